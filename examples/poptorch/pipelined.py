"""A model in two stages of a pipeline, split in two ways: with BeginBlock and with Block.

A pipeline works on several micro-batches at once, one in each stage, and training needs as many as
there are stages forward and backward: 3 here. Where the work is done does not change the numbers,
so both ways end with the same weights as a plain torch loop, up to rounding. Prints the loss of
every call; it falls from 1.1 to 0.2. Takes well under a minute.

    ipufit run examples/poptorch/pipelined.py
"""

import poptorch
import torch
from torch import nn

CALLS = 10
ACCUMULATION = 6


def layers():
    torch.manual_seed(0)
    return nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)


class WithLoss(nn.Module):
    """Any net beside its loss."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        out = self.net(x)
        return out, self.loss(out, y)


class InBlocks(nn.Module):
    """The same layers, split where forward says so."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.second = layers()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        with poptorch.Block("bottom", ipu_id=0):
            h = self.act(self.first(x))
        with poptorch.Block("top", ipu_id=1):
            out = self.second(h)
            return out, self.loss(out, y)


def annotated():
    """The layers as a list, split before the last: what follows a BeginBlock belongs to it."""
    first, act, second = layers()
    first = poptorch.BeginBlock(first, "bottom", ipu_id=0)
    second = poptorch.BeginBlock(second, "top", ipu_id=1)
    return WithLoss(nn.Sequential(first, act, second))


def data():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(CALLS, 8 * ACCUMULATION, 8, generator=generator)
    return x, (x[:, :, :3] + 0.3 * x[:, :, 3:6]).argmax(2)


def options():
    chosen = poptorch.Options()
    chosen.Training.gradientAccumulation(ACCUMULATION)
    stages = poptorch.Stage("bottom"), poptorch.Stage("top")
    chosen.setExecutionStrategy(poptorch.PipelinedExecution(*stages))
    return chosen


def train(module):
    """Its weights after ten calls."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    model = poptorch.trainingModel(module, options(), optimizer)
    for call, (x, y) in enumerate(zip(*data())):
        _, loss = model(x, y)
        print(f"  call {call + 1:2d}: loss {loss:.4f}")
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    model.destroy()
    return weights


def by_hand():
    """The same without a pipeline: one batch is the mean over its micro-batches."""
    net = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
    for x, y in zip(*data()):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def main():
    wanted = by_hand()
    for name, make in (("BeginBlock", annotated), ("Block", InBlocks)):
        print(name)
        gap = max(float((a - b).abs().max()) for a, b in zip(train(make()), wanted))
        print(f"  largest difference from plain torch: below 1e-5 is {gap < 1e-5}")
        if gap >= 1e-5:
            raise SystemExit(f"weights differ by {gap}")


if __name__ == "__main__":
    main()
