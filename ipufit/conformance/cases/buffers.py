"""Buffers: changed in place, preserved between calls, a copy for every replica."""

from __future__ import annotations

import torch
from torch import nn

from ipufit.conformance.kit import Kit, judged, open_question


class Counter(nn.Module):
    """Adds up its inputs; returns the sum so far."""

    def __init__(self, dtype: torch.dtype, start: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("total", torch.full((1,), start, dtype=dtype))

    def forward(self, x):
        self.total += x.sum()
        return x[:1, :1] * 0 + self.total


class CountedLayer(nn.Module):
    """A counter and a layer with a loss."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.counter, self.layer = Counter(kit.dtype), kit.linear()

    def forward(self, x):
        total = self.counter(x)
        return total, kit_loss(self.layer(x))


def kit_loss(out):
    return nn.functional.mse_loss(out, torch.zeros_like(out))


@judged("buffers/an inference model carries them from micro-batch to micro-batch and call to call")
def _carried(kit: Kit) -> None:
    net = Counter(kit.dtype, 10.0)
    model = kit.poptorch.inferenceModel(net, kit.options(device_iterations=3))
    x = kit.rows(6)
    sums = x.double().view(3, -1).sum(1)
    kit.close("first call", model(x).flatten(), 10 + sums.cumsum(0))
    kit.close("second call", model(x).flatten(), 10 + sums.sum() + sums.cumsum(0))
    model.copyWeightsToHost()
    kit.close("on the host", net.total, (10 + 2 * sums.sum()).view(1))
    model.destroy()


@judged("buffers/a training model brings them to the host by itself")
def _trained(kit: Kit) -> None:
    net = CountedLayer(kit)
    model = kit.poptorch.trainingModel(net, kit.options(accumulation=2))
    x = kit.rows(4)
    for call in range(2):
        model(x)
        wanted = (call + 1) * x.double().sum().view(1)
        kit.close(f"after call {call}", net.counter.total, wanted)
    model.destroy()


@judged("buffers/every replica has its own")
def _replicas(kit: Kit) -> None:
    options = kit.options(device_iterations=1, replicas=2).broadcastBuffers(False)
    model = kit.poptorch.inferenceModel(Counter(kit.dtype), options)
    x = kit.rows(4)
    sums = x.double().view(2, -1).sum(1)
    for call in range(3):
        kit.close(f"call {call}", model(x).flatten(), (call + 1) * sums)
    model.destroy()


@judged("buffers/replicas that would share one that changes are refused")
def _shared(kit: Kit) -> None:
    model = kit.poptorch.inferenceModel(Counter(kit.dtype), kit.options(replicas=2))
    kit.raises("broadcastBuffers(True)", lambda: model(kit.rows(4)), text="broadcastBuffers(False)")


@judged("buffers/one that is replaced is refused")
def _replaced(kit: Kit) -> None:
    class Replacing(Counter):
        def forward(self, x):
            self.total = self.total + 1
            return x + self.total

    model = kit.poptorch.inferenceModel(Replacing(kit.dtype))
    kit.raises("rebinding", lambda: model(kit.rows(2)), text="is reassigned within the model")


@judged("buffers/whole numbers are constants")
def _whole(kit: Kit) -> None:
    class IntegerBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int32))

        def forward(self, x):
            return x + self.count

    net = IntegerBuffer()
    model = kit.poptorch.inferenceModel(net)
    model(kit.rows(2))
    net.count.fill_(5)
    model.copyWeightsToDevice()
    kit.close("after a change on the host", model(kit.rows(2)), kit.rows(2))
    model.destroy()


@judged("buffers/those named as updatable can be sent alone")
def _named(kit: Kit) -> None:
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.zeros(1, dtype=kit.dtype))
            self.register_buffer("factor", torch.ones(1, dtype=kit.dtype))

        def forward(self, x):
            return x * self.factor + self.shift

    net = Shifted()
    options = kit.options().updatableNamedBuffers(["shift"])
    model = kit.poptorch.inferenceModel(net, options)
    x = kit.rows(2)
    kit.close("before", model(x), x)
    net.shift.fill_(2.0)
    net.factor.fill_(3.0)
    model.copyNamedBuffersToDevice()
    kit.close("after", model(x), x + 2)
    model.destroy()


@open_question(
    "buffers/which replica's the host gets",
    "Whose buffers come to the host, where every replica has its own?",
)
def _whose(kit: Kit) -> None:
    net = Counter(kit.dtype)
    options = kit.options(replicas=2).broadcastBuffers(False)
    model = kit.poptorch.inferenceModel(net, options)
    x = kit.rows(4)
    model(x)
    model.copyWeightsToHost()
    sums = x.double().view(2, -1).sum(1)
    owners = [r for r in range(2) if abs(float(net.total) - float(sums[r])) < 1e-3]
    kit.note(f"replica {owners[0]}'s" if owners else f"no replica's: {float(net.total):.6g}")
    model.destroy()
