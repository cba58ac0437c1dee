"""Weights, buffers and optimizer settings: which side has them, and when they are transferred."""

from __future__ import annotations

import torch
from torch import nn

from ipufit.conformance.kit import FunctionModule, Kit, Regression, judged, open_question


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
    model = kit.inference(net, device_iterations=3)
    x = kit.rows(6)
    sums = x.double().view(3, -1).sum(1)
    kit.close("first call", model(x).flatten(), 10 + sums.cumsum(0))
    kit.close("second call", model(x).flatten(), 10 + sums.sum() + sums.cumsum(0))
    model.copyWeightsToHost()
    kit.close("on the host", net.total, (10 + 2 * sums.sum()).view(1))


@judged("buffers/a training model brings them to the host by itself")
def _trained(kit: Kit) -> None:
    net = CountedLayer(kit)
    model = kit.training(net, accumulation=2)
    x = kit.rows(4)
    for call in range(2):
        model(x)
        wanted = (call + 1) * x.double().sum().view(1)
        kit.close(f"after call {call}", net.counter.total, wanted)


@judged("buffers/every replica has its own")
def _replicas(kit: Kit) -> None:
    options = kit.options(device_iterations=1, replicas=2).broadcastBuffers(False)
    model = kit.inference(Counter(kit.dtype), options)
    x = kit.rows(4)
    sums = x.double().view(2, -1).sum(1)
    for call in range(3):
        kit.close(f"call {call}", model(x).flatten(), (call + 1) * sums)


@judged("buffers/replicas that would share one that changes are refused")
def _shared(kit: Kit) -> None:
    model = kit.inference(Counter(kit.dtype), replicas=2)
    kit.raises("broadcastBuffers(True)", lambda: model(kit.rows(4)), text="broadcastBuffers(False)")


@judged("buffers/one that is replaced is refused")
def _replaced(kit: Kit) -> None:
    class Replacing(Counter):
        def forward(self, x):
            self.total = self.total + 1
            return x + self.total

    model = kit.inference(Replacing(kit.dtype))
    kit.raises("rebinding", lambda: model(kit.rows(2)), text="is reassigned within the model")


@judged("buffers/whole numbers are constants")
def _whole(kit: Kit) -> None:
    count = torch.zeros((), dtype=torch.int32)
    net = FunctionModule(lambda net, x: x + net.count, count=count)
    model = kit.inference(net)
    model(kit.rows(2))
    net.count.fill_(5)
    model.copyWeightsToDevice()
    kit.close("after a change on the host", model(kit.rows(2)), kit.rows(2))


@judged("buffers/those named as updatable can be sent alone")
def _named(kit: Kit) -> None:
    zero, one = torch.zeros(1, dtype=kit.dtype), torch.ones(1, dtype=kit.dtype)
    net = FunctionModule(lambda net, x: x * net.factor + net.shift, shift=zero, factor=one)
    options = kit.options().updatableNamedBuffers(["shift"])
    model = kit.inference(net, options)
    x = kit.rows(2)
    kit.close("before", model(x), x)
    net.shift.fill_(2.0)
    net.factor.fill_(3.0)
    model.copyNamedBuffersToDevice()
    kit.close("after", model(x), x + 2)


@open_question(
    "buffers/which replica's the host gets",
    "Whose buffers come to the host, where every replica has its own?",
)
def _whose(kit: Kit) -> None:
    net = Counter(kit.dtype)
    options = kit.options(replicas=2).broadcastBuffers(False)
    model = kit.inference(net, options)
    x = kit.rows(4)
    model(x)
    model.copyWeightsToHost()
    sums = x.double().view(2, -1).sum(1)
    owners = [r for r in range(2) if abs(float(net.total) - float(sums[r])) < 1e-3]
    kit.note(f"replica {owners[0]}'s" if owners else f"no replica's: {float(net.total):.6g}")


def _slope(kit: Kit) -> FunctionModule:
    """Return a loss whose gradient is the input."""

    def loss(net, x):
        return kit.poptorch.identity_loss((x * net.weight).sum(), "none")

    return FunctionModule(loss, weight=nn.Parameter(kit.rows(1, 3, 20)[0]))


class HandModel:
    """A linear regression on one batch with SGD, written out in float64."""

    def __init__(self, kit: Kit, x: torch.Tensor, y: torch.Tensor) -> None:
        layer = kit.linear().double()
        self.weight, self.bias = layer.weight.data, layer.bias.data
        self.x, self.y = x.double(), y.double()

    def predict(self):
        return self.x @ self.weight.t() + self.bias

    def update(self, lr: float, parts=("weight", "bias")) -> None:
        error = 2 * (self.predict() - self.y) / self.y.numel()
        if "weight" in parts:
            self.weight = self.weight - lr * error.t() @ self.x
        if "bias" in parts:
            self.bias = self.bias - lr * error.sum(0)


def _regression(kit: Kit):
    """Return a module, a batch and the model by hand."""
    batch = kit.rows(4), kit.rows(4, 2, 50)
    return Regression(kit.linear()), batch, HandModel(kit, *batch)


def _start(kit: Kit):
    """Return a wrapped model, its module, its optimizer, a batch and the model by hand."""
    net, batch, hand = _regression(kit)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return kit.training(net, optimizer), net, optimizer, batch, hand


@judged("weights/reading the module's weights brings the device's")
def _read(kit: Kit) -> None:
    model, net, _, batch, hand = _start(kit)
    for call in range(3):
        model(*batch)
        hand.update(0.1)
        kit.close(f"weight after call {call}", net.layer.weight, hand.weight)
    kit.close("bias in state_dict", net.state_dict()["layer.bias"], hand.bias)


@judged("weights/a returned output is that before the update")
def _before(kit: Kit) -> None:
    model, _, _, batch, hand = _start(kit)
    for call in range(2):
        kit.close(f"call {call}", model(*batch)[0], hand.predict())
        hand.update(0.1)


@judged("weights/inference sees what training has made")
def _inference(kit: Kit) -> None:
    model, net, _, batch, hand = _start(kit)
    inference = kit.inference(net)
    kit.close("before", inference(batch[0]), hand.predict())
    for call in range(3):
        model(*batch)
        hand.update(0.1)
        kit.close(f"after call {call}", inference(batch[0]), hand.predict())


@judged("weights/training goes on where it was after an evaluation")
def _evaluation_between(kit: Kit) -> None:
    model, net, _, batch, hand = _start(kit)
    inference = kit.inference(net)
    for _ in range(2):
        model(*batch)
        hand.update(0.1)
        inference(batch[0])
        float(net.layer.weight.sum())
    kit.close("weight", net.layer.weight, hand.weight)
    kit.close("output", model(*batch)[0], hand.predict())


@judged("weights/the host's are not seen until they are copied")
def _host(kit: Kit) -> None:
    model, net, _, batch, hand = _start(kit)
    model(*batch)
    hand.update(0.1)
    with torch.no_grad():
        net.layer.bias.fill_(0.5)
    kit.close("not copied", model(*batch)[0], hand.predict())
    hand.update(0.1)
    with torch.no_grad():
        net.layer.bias.fill_(0.5)
    model.copyWeightsToDevice()
    hand.bias = torch.full_like(hand.bias, 0.5)
    kit.close("copied", model(*batch)[0], hand.predict())


@judged("weights/load_state_dict reaches the device")
def _load(kit: Kit) -> None:
    model, net, _, batch, hand = _start(kit)
    begin = {name: value.clone() for name, value in net.state_dict().items()}
    start = hand.weight, hand.bias
    model(*batch)
    model.load_state_dict(begin)
    hand.weight, hand.bias = start
    kit.close("output", model(*batch)[0], hand.predict())


@judged("weights/destroy leaves the trained weights in a plain module")
def _destroy(kit: Kit) -> None:
    model, net, _, batch, hand = _start(kit)
    model(*batch)
    hand.update(0.1)
    model.destroy()
    kit.equal("class", type(net), Regression)
    kit.close("weight", net.layer.weight, hand.weight)
    again = kit.training(net, torch.optim.SGD(net.parameters(), lr=1))
    kit.close("wrapped again", again(*batch)[0], hand.predict())


@judged("weights/setOptimizer changes the learning rate, and nothing else does")
def _rate(kit: Kit) -> None:
    model, net, optimizer, batch, hand = _start(kit)
    model(*batch)
    optimizer.param_groups[0]["lr"] = 0.02
    model(*batch)
    hand.update(0.1)
    hand.update(0.1)
    kit.close("not told", net.layer.weight, hand.weight)
    model.setOptimizer(optimizer)
    model(*batch)
    hand.update(0.02)
    kit.close("told", net.layer.weight, hand.weight)


@judged("weights/parameter groups have their own rates")
def _groups(kit: Kit) -> None:
    net, batch, hand = _regression(kit)
    groups = [{"params": [net.layer.weight]}, {"params": [net.layer.bias], "lr": 0.3}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    model = kit.training(net, optimizer)
    model(*batch)
    start = hand.weight, hand.bias
    hand.update(0.1)
    weight = hand.weight
    hand.weight, hand.bias = start
    hand.update(0.3)
    kit.close("weight", net.layer.weight, weight)
    kit.close("bias", net.layer.bias, hand.bias)


@judged("weights/what the optimizer has not, or wants no gradient, stays")
def _frozen(kit: Kit) -> None:
    for left_out in ("optimizer", "requires_grad"):
        net, batch, hand = _regression(kit)
        trained = [net.layer.weight] if left_out == "optimizer" else list(net.parameters())
        net.layer.bias.requires_grad_(left_out == "optimizer")
        optimizer = torch.optim.SGD(trained, lr=0.1)
        model = kit.training(net, optimizer)
        model(*batch)
        hand.update(0.1, ("weight",))
        kit.close(f"{left_out}: weight", net.layer.weight, hand.weight)
        kit.close(f"{left_out}: bias", net.layer.bias, hand.bias)
        model.destroy()


@judged("weights/tied parameters stay one")
def _tied(kit: Kit) -> None:
    def loss(net, x, y):
        return nn.functional.mse_loss(net.b(torch.tanh(net.a(x))), y)

    a, b = kit.linear(2, 2), nn.Linear(2, 2).to(kit.dtype)
    b.weight, b.bias = a.weight, a.bias
    net, x, y = FunctionModule(loss, a=a, b=b), kit.rows(4, 2), kit.rows(4, 2, 30)
    start = kit.linear(2, 2).double()
    model = kit.training(net, torch.optim.SGD(net.parameters(), lr=0.1))
    model(x, y)
    weight, bias = (p.data.clone().requires_grad_() for p in start.parameters())
    hidden = torch.tanh(x.double() @ weight.t() + bias)
    ((hidden @ weight.t() + bias - y.double()) ** 2).mean().backward()
    kit.close("weight", net.a.weight, (weight - 0.1 * weight.grad).detach())
    kit.close("the other", net.b.weight, (weight - 0.1 * weight.grad).detach())


@judged("weights/without an optimizer it is SGD with a rate of 0.01")
def _default(kit: Kit) -> None:
    net, batch, hand = _regression(kit)
    model = kit.training(net)
    model(*batch)
    hand.update(0.01)
    kit.close("weight", net.layer.weight, hand.weight)


@judged("loss/kl div over the batch trains on the sum")
def _divergence(kit: Kit) -> None:
    """Check that the division by the batch comes behind what PopTorch marks as the loss."""

    def divergence(net, x, y):
        shares, target = net.layer(x).log_softmax(1), y.softmax(1)
        return nn.functional.kl_div(shares, target, reduction="batchmean")

    net = FunctionModule(divergence, layer=kit.linear())
    x, y = kit.rows(4), kit.rows(4, 2)
    mean = net(x, y)
    (gradient,) = torch.autograd.grad(mean * 4, net.layer.weight)
    weight = net.layer.weight.detach() - 0.1 * gradient
    model = kit.training(net, torch.optim.SGD(net.parameters(), lr=0.1))
    kit.close("loss", model(x, y), mean)
    kit.close("weight", net.layer.weight, weight)


@judged("weights/detached and attached again, training goes on")
def _detach(kit: Kit) -> None:
    net, batch, hand = _regression(kit)
    optimizer = kit.poptorch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = kit.training(net, optimizer)
    velocity = 0.0
    for call in range(3):
        before = hand.weight
        model(*batch)
        hand.update(1.0)
        velocity = 0.9 * velocity + (before - hand.weight)
        # The bias goes the plain way, so take it from the device.
        hand.weight = before - 0.1 * velocity
        hand.bias = net.layer.bias.detach().double().clone()
        kit.close(f"weight after call {call}", net.layer.weight, hand.weight)
        if call < 2:
            model.detachFromDevice()
            kit.equal("attached", model.isAttachedToDevice(), False)


@judged("optimizer/SGD dampens the first gradient too, and the rate without momentum")
def _dampened(kit: Kit) -> None:
    """Check that velocities start at zero in PopART, unlike in torch."""
    for home in (torch.optim, kit.poptorch.optim):
        for momentum, dampening, shares in [(0.5, 0.25, [0.75, 1.125]), (0.0, 0.25, [0.75, 0.75])]:
            net, hand = _slope(kit), _slope(kit).weight.detach().double()
            settings = {"momentum": momentum, "dampening": dampening}
            optimizer = home.SGD(net.parameters(), lr=0.5, **settings)
            model = kit.training(net, optimizer)
            for call, part in enumerate(shares):
                model(kit.rows(1))
                hand = hand - 0.5 * part * kit.rows(1)[0].double()
                what = f"weight after call {call} with momentum {momentum}"
                kit.close(what, net.weight, hand)
            model.destroy()
