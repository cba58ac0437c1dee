"""Operators of PopTorch that torch has not."""

from __future__ import annotations

import torch

from ipufit.conformance.kit import FunctionModule, Kit, judged


@judged("operators/for_loop runs its body as often as it says")
def _for_loop(kit: Kit) -> None:
    def body(x):
        return kit.poptorch.for_loop(5, lambda y: [y * 2 + 1], [x])[0]

    x = kit.rows(2)
    kit.close("5 times", kit.infer(body, x), 32 * x + 31)


@judged("operators/cond takes one of two ways")
def _cond(kit: Kit) -> None:
    def body(which, x):
        branches = (lambda y: y + 1), [x], (lambda y: y * 3), [x]
        return kit.poptorch.cond(which, *branches)[0]

    x = kit.rows(2)
    model = kit.poptorch.inferenceModel(FunctionModule(body))
    for which, wanted in ((True, x + 1), (False, x * 3)):
        kit.close(str(which), model(torch.tensor([which]), x), wanted)
    model.destroy()


@judged("operators/identities keep their value")
def _identities(kit: Kit) -> None:
    poptorch = kit.poptorch
    x = kit.rows(2)
    for name, body in (
        ("nop", poptorch.nop),
        ("recomputationCheckpoint", poptorch.recomputationCheckpoint),
        ("set_available_memory", lambda x: poptorch.set_available_memory(x + 0, 0.3)),
        ("identity_loss none", lambda x: poptorch.identity_loss(x, reduction="none")),
    ):
        kit.close(name, kit.infer(body, x), x)
    mean = kit.infer(lambda x: poptorch.identity_loss(x, reduction="mean"), x)
    kit.close("identity_loss mean", mean, x.mean())


@judged("operators/serializedMatMul is matmul")
def _matmul(kit: Kit) -> None:
    a, b = kit.rows(2, 4), kit.rows(4, 6, 33)
    mode = kit.poptorch.MatMulSerializationMode
    for name in ("OutputChannels", "ReducingDim", "InputChannels", "Disabled"):
        chosen = getattr(mode, name)

        def body(x, y, chosen=chosen):
            return kit.poptorch.serializedMatMul(x, y, chosen, 2)

        kit.close(name, kit.infer(body, a, b), a @ b)


@judged("operators/dynamic_slice and dynamic_update")
def _slices(kit: Kit) -> None:
    x, piece = kit.rows(6), kit.rows(2, start=70)

    def cut(x, start):
        return kit.poptorch.dynamic_slice(x, 0, start, 2, 1)

    def write(x, piece, start):
        return kit.poptorch.dynamic_update(x, piece, 0, start, 2)

    start = torch.tensor([3], dtype=torch.int32)
    kit.close("cut", kit.infer(cut, x, start), x[3:5])
    wanted = torch.cat([x[:3], piece, x[5:]])
    kit.close("written", kit.infer(write, x, piece, start), wanted)
