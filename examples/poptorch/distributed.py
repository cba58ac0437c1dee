"""Two processes that share a dataset: each is told which one it is, and reads its own half.

On a real system a launcher such as PopRun starts the processes and adds up their gradients. Here
this script starts itself twice and tells each copy its place with ``configureProcessId``; the
copies train nothing, they count what their data loader gives them. Together they see each of the
96 samples once, and both shuffle by the same permutation. Takes well under a minute.

    ipufit run examples/poptorch/distributed.py
"""

import json
import subprocess
import sys

import poptorch
import torch
from torch import nn
from torch.utils.data import TensorDataset

PROCESSES = 2
SAMPLES = 96


class Total(nn.Module):
    """The sum of a micro-batch."""

    def forward(self, x):
        return x.sum()


def worker(index):
    """Print the samples of this process, and their sum as the device has it."""
    options = poptorch.Options()
    options.deviceIterations(4)
    options.randomSeed(7)
    options.Distributed.configureProcessId(index, PROCESSES)
    data = TensorDataset(torch.arange(SAMPLES, dtype=torch.float32))
    loader = poptorch.DataLoader(options, data, batch_size=3, shuffle=True)
    model = poptorch.inferenceModel(Total(), options)
    seen, total = [], 0.0
    for (batch,) in loader:
        seen += [int(sample) for sample in batch]
        total += float(model(batch).sum())
    print(json.dumps({"seen": seen, "total": total}))


def main():
    started = [
        subprocess.Popen([sys.executable, __file__, str(index)], stdout=subprocess.PIPE)
        for index in range(PROCESSES)
    ]
    told = []
    for index, process in enumerate(started):
        out, _ = process.communicate(timeout=300)
        if process.returncode:
            raise SystemExit(f"process {index} ended with status {process.returncode}")
        told.append(json.loads(out))
        print(f"process {index}: {len(told[-1]['seen'])} samples, sum {told[-1]['total']:.0f}")
    seen = [sample for each in told for sample in each["seen"]]
    total = sum(each["total"] for each in told)
    print(f"together: {len(set(seen))} different samples, sum {total:.0f}")
    if sorted(seen) != list(range(SAMPLES)) or total != SAMPLES * (SAMPLES - 1) / 2:
        raise SystemExit("the processes do not share the samples between them")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(int(sys.argv[1]))
    else:
        main()
