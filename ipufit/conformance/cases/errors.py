"""Errors that models and options raise."""

from __future__ import annotations

import functools

import torch
from torch import nn

from ipufit.conformance.kit import FunctionModule, Kit, judged


def _train(kit: Kit, body, optimizer=None, **settings):
    """Call a training model once: a layer, and a function of its output and the target."""
    net = FunctionModule(lambda net, x, y: body(net.layer(x), y), layer=kit.linear())
    return kit.training(net, optimizer, **settings)(kit.rows(4), kit.rows(4, 2))


def _with_loss(out, y):
    return out, nn.functional.mse_loss(out, y)


@judged("errors/a training model needs a loss")
def _no_loss(kit: Kit) -> None:
    kit.raises("no loss", lambda: _train(kit, lambda out, y: out), text="Couldn't find a loss")


@judged("errors/two independent losses are refused")
def _two_losses(kit: Kit) -> None:
    def both(out, y):
        return nn.functional.mse_loss(out, y) + nn.functional.l1_loss(out, y)

    kit.raises("two losses", lambda: _train(kit, both), text="Multiple independent losses found")


@judged("errors/a batch that does not divide is refused")
def _batch(kit: Kit) -> None:
    call = functools.partial(_train, kit, _with_loss, accumulation=3)
    kit.raises("4 samples for 3", call, text="Invalid batch dimension", kind=AssertionError)


@judged("errors/inference takes no gradient accumulation")
def _accumulation(kit: Kit) -> None:
    options = kit.options(accumulation=2)
    kit.raises("wrapping", lambda: kit.inference(kit.linear(), options))


@judged("errors/a value baked into the program may not change")
def _baked(kit: Kit) -> None:
    model = kit.inference(lambda x, factor: x * factor)
    kit.close("3 times", model(kit.rows(2), 3), 3 * kit.rows(2))
    kit.raises("4 times", lambda: model(kit.rows(2), 4), text="Value mismatch for")


@judged("errors/a shape that the program was not compiled for is refused")
def _shape(kit: Kit) -> None:
    model = kit.inference(kit.linear())
    model(kit.rows(4))
    kit.raises("2 rows for 4", lambda: model(kit.rows(2)))


@judged("errors/the value of a tensor can't be read while tracing")
def _item(kit: Kit) -> None:
    model = kit.inference(lambda x: x * x.sum().item())
    text = "aten::item is only supported in eager mode"
    kit.raises("item()", lambda: model(kit.rows(2)), text=text)


@judged("errors/EveryN has to divide the iterations")
def _every_n(kit: Kit) -> None:
    def call() -> None:
        options = kit.options(device_iterations=4)
        options.outputMode(kit.poptorch.OutputMode.EveryN, 3)
        kit.inference(kit.linear(), options)(kit.rows(4))

    kit.raises("3 of 4", call)


@judged("errors/a pipeline needs as many micro-batches as stages")
def _pipeline(kit: Kit) -> None:
    poptorch = kit.poptorch

    def two(net, x, y):
        with poptorch.Block("a", ipu_id=0):
            h = net.a(x)
        with poptorch.Block("b", ipu_id=1):
            return nn.functional.mse_loss(net.b(h), y)

    def call() -> None:
        net = FunctionModule(two, a=kit.linear(), b=kit.linear(2, 2))
        kit.training(net, accumulation=2)(kit.rows(4), kit.rows(4, 2))

    kit.raises("2 micro-batches for 3 stages", call)


@judged("errors/backward() on a result is refused")
def _backward(kit: Kit) -> None:
    returned = _train(kit, _with_loss)[1]
    kit.raises("backward()", returned.backward)


@judged("errors/a parameter of another model in the optimizer is refused")
def _foreign(kit: Kit) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    call = functools.partial(_train, kit, nn.functional.mse_loss, optimizer)
    kit.raises("foreign parameter", call, kind=KeyError)


@judged("errors/options are frozen once they are used")
def _frozen(kit: Kit) -> None:
    options = kit.options()
    kit.inference(kit.linear(), options)
    kit.raises("a setter", lambda: options.deviceIterations(2), kind=AttributeError)
