"""A model whose parts are brought to the IPU phase by phase, serially or in parallel.

Phases let a model be larger than the memory of the IPUs: what a phase does not need waits outside.
The strategy decides where the work is done, not what comes out: both end with the weights of a
plain torch loop, up to rounding; the loss falls from 0.0767 to 0.0385. Takes well under a minute.

    ipufit run examples/poptorch/phased.py
"""

import poptorch
import torch
from torch import nn

CALLS = 8


class Phased(nn.Module):
    """Three layers, each in a block that the strategy knows by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 1)
        self.loss = nn.MSELoss()

    def forward(self, x, y):
        with poptorch.Block("a"):
            h = torch.relu(self.a(x))
        with poptorch.Block("b"):
            h = torch.relu(self.b(h))
        with poptorch.Block("c"):
            out = self.c(h)
            return out, self.loss(out, y)


def serial():
    """All phases on one IPU."""
    strategy = poptorch.SerialPhasedExecution(
        poptorch.Phase(poptorch.Stage("a")),
        poptorch.Phase(poptorch.Stage("b")),
        poptorch.Phase(poptorch.Stage("c")),
    )
    for index in range(3):
        strategy.phase(index).ipus(0)
    strategy.setTensorsLiveness(poptorch.Liveness.AlwaysLive)
    return strategy


def parallel():
    """Even phases on one IPU, odd ones on the other."""
    strategy = poptorch.ParallelPhasedExecution(
        poptorch.Phase(poptorch.Stage("a")),
        poptorch.Phase(poptorch.Stage("b")),
        poptorch.Phase(poptorch.Stage("c")),
    )
    for index in range(3):
        strategy.phase(index).ipus(index % 2)
    return strategy


def batches():
    generator = torch.Generator().manual_seed(2)
    for _ in range(CALLS):
        x = torch.randn(32, 6, generator=generator)
        yield x, x.prod(1, keepdim=True).tanh()


def main():
    # Outside of PopTorch a block does nothing, so the same module is its own reference.
    plain = Phased()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        plain(x, y)[1].backward()
        optimizer.step()

    for name, strategy in (("serial", serial()), ("parallel", parallel())):
        module = Phased()
        options = poptorch.Options()
        options.setExecutionStrategy(strategy)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        model = poptorch.trainingModel(module, options, optimizer)
        losses = [float(model(x, y)[1]) for x, y in batches()]
        pairs = zip(module.state_dict().values(), plain.state_dict().values())
        gap = max(float((own - other).abs().max()) for own, other in pairs)
        print(f"{name}: first loss {losses[0]:.4f}, last {losses[-1]:.4f}")
        model.destroy()
        if gap >= 1e-5:
            raise SystemExit(f"{name}: weights differ from plain torch by {gap}")
    print("both end with the weights of plain torch")


if __name__ == "__main__":
    main()
