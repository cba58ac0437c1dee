"""A model too large for one IPU, cut over four that work one after the other.

Sharding has no more than one micro-batch under way, so it needs no gradient accumulation. The cut
is made from outside: ``BeginBlock`` in front of every second layer of a finished net. Prints the
mean squared error of every tenth call, which falls below 0.02, and what the net
then gives, without blocks again, for two points: close to 0.5 and -0.5. Takes well under a minute.

    ipufit run examples/poptorch/sharded.py
"""

import poptorch
import torch
from torch import nn

CALLS = 60


class Fit(nn.Module):
    """A net and the squared error of its output."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.loss = nn.MSELoss()

    def forward(self, x, y=None):
        out = self.net(x)
        return out if y is None else (out, self.loss(out, y))


def build():
    """Four pairs of layers."""
    torch.manual_seed(0)
    net = nn.Sequential()
    for index, (size, after) in enumerate([(2, 32), (32, 32), (32, 32), (32, 1)]):
        net.add_module(f"dense{index}", nn.Linear(size, after))
        net.add_module(f"act{index}", nn.Tanh() if after > 1 else nn.Identity())
    return net


def main():
    net = build()
    names = []
    for ipu in range(4):
        name = f"dense{ipu}"
        setattr(net, name, poptorch.BeginBlock(getattr(net, name), name, ipu_id=ipu))
        names.append(name)
    module = Fit(net)

    options = poptorch.Options()
    options.deviceIterations(5)
    options.setExecutionStrategy(poptorch.ShardedExecution(*names))
    optimizer = poptorch.optim.Adam(module.parameters(), lr=0.01)
    model = poptorch.trainingModel(module, options, optimizer)

    generator = torch.Generator().manual_seed(1)
    for call in range(CALLS):
        x = 2 * torch.rand(5 * 32, 2, generator=generator) - 1
        y = torch.sin(3 * x[:, :1]) * x[:, 1:]
        _, loss = model(x, y)
        if call % 10 == 9:
            print(f"call {call + 1}: error {loss:.4f}")
    model.destroy()

    poptorch.removeBlocks(net)
    x = torch.tensor([[0.5, 0.5], [-0.5, 0.5]])
    print("sin(3a) b at two points:", [f"{value:.2f}" for value in module(x).flatten().tolist()])
    if loss >= 0.02:
        raise SystemExit(f"the error is {loss:.4f}, not below 0.02")


if __name__ == "__main__":
    main()
