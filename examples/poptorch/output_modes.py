"""What comes back of a call, in every output mode.

A call with 4 device iterations on 2 replicas works on 8 micro-batches. Here a micro-batch is one
number, and the model returns it, so the output shows which of them come back:

    All        0 1 2 3 4 5 6 7
    EveryN(2)  2 3 6 7
    Final      6 7
    Sum        12 16

Takes well under a minute.

    ipufit run examples/poptorch/output_modes.py
"""

import poptorch
import torch
from torch import nn


class Returning(nn.Module):
    """Returns its input; with a loss in training, which leaves the input alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        if not self.training:
            return x + 0
        loss = poptorch.identity_loss(x * self.weight, reduction="sum")
        return x + 0, loss


MODES = {
    "All": (poptorch.OutputMode.All, 1, [0, 1, 2, 3, 4, 5, 6, 7]),
    "EveryN(2)": (poptorch.OutputMode.EveryN, 2, [2, 3, 6, 7]),
    "Final": (poptorch.OutputMode.Final, 1, [6, 7]),
    "Sum": (poptorch.OutputMode.Sum, 1, [12, 16]),
}


def options(mode, period):
    chosen = poptorch.Options()
    chosen.deviceIterations(4)
    chosen.replicationFactor(2)
    chosen.outputMode(mode, period)
    return chosen


def main():
    numbers = torch.arange(8, dtype=torch.float32)
    for name, (mode, period, wanted) in MODES.items():
        inference = poptorch.inferenceModel(Returning().eval(), options(mode, period))
        training = poptorch.trainingModel(Returning(), options(mode, period))
        found = [int(value) for value in inference(numbers)]
        trained = [int(value) for value in training(numbers)[0]]
        inference.destroy()
        training.destroy()
        print(f"{name:<10} {' '.join(map(str, found))}")
        if not found == trained == wanted:
            raise SystemExit(f"{name}: {found} and {trained}, not {wanted}")

    # Without a choice: everything in inference, the last of each replica in training.
    defaults = poptorch.Options().deviceIterations(4).replicationFactor(2)
    everything = poptorch.inferenceModel(Returning().eval(), defaults)(numbers)
    last = poptorch.trainingModel(Returning(), defaults)(numbers)[0]
    print(f"by default {len(everything)} of 8 in inference, {len(last)} in training")
    if (len(everything), len(last)) != (8, 2):
        raise SystemExit("the default modes are not All and Final")


if __name__ == "__main__":
    main()
