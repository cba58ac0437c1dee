"""Numbers: dtypes that come back, constants, random numbers, and operators that torch has not."""

from __future__ import annotations

import torch
from torch import nn

from ipufit.conformance.kit import FunctionModule, Kit, judged, open_question

# Of what is computed in float32 on purpose.
SINGLE = 1e-6


@judged("values/int64 becomes int32 and float64 becomes float32", narrow=True)
def _narrowing(kit: Kit) -> None:
    whole, real = torch.arange(4), torch.arange(4, dtype=torch.float64) / 3
    returned = kit.infer(lambda a, b: (a + 1, b * 2), whole, real)
    kit.equal("dtypes", [t.dtype for t in returned], [torch.int32, torch.float32])
    kit.close("whole", returned[0], whole + 1)
    kit.close("real", returned[1], real * 2, SINGLE)


@judged("values/argmax and integer sums are int32", narrow=True)
def _whole(kit: Kit) -> None:
    rows = kit.rows(4).float()
    returned = kit.infer(lambda x: (x.argmax(1), (x > 0).sum(1)), rows)
    kit.equal("dtypes", [t.dtype for t in returned], [torch.int32, torch.int32])
    kit.close("argmax", returned[0], rows.argmax(1))
    kit.close("count", returned[1], (rows > 0).sum(1))


@judged("values/a half input makes a layer half, whatever its weights are", narrow=True)
def _half(kit: Kit) -> None:
    layer = kit.linear().float()
    x = torch.tensor([[1.0, 2.0, -0.5], [0.25, 0.0, 3.0]])
    try:
        out = kit.inference(layer)(x.half())
    except RuntimeError as fault:
        if "not implemented for 'Half'" not in str(fault):
            raise
        kit.skip(f"torch {torch.__version__} can't multiply in half precision on a CPU")
    kit.equal("dtype", out.dtype, torch.float16)
    kit.close("values", out, layer(x), 4e-3)


@judged("values/bool comes back as bool", narrow=True)
def _bool(kit: Kit) -> None:
    out = kit.infer(lambda x: x > 0, kit.rows(4).float())
    kit.equal("dtype", out.dtype, torch.bool)


@judged("values/Python's values are those of the trace")
def _python(kit: Kit) -> None:
    def count(net, x):
        net.calls += 1
        return x + net.calls

    model = kit.inference(FunctionModule(count, calls=0), device_iterations=2)
    first, second = model(kit.rows(4)), model(kit.rows(4))
    kit.close("two calls", second, first)


@judged("values/a tensor of the host comes back as it is, once")
def _constant(kit: Kit) -> None:
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.constant = torch.tensor([1.0, 2.0, 3.0], dtype=kit.dtype)

        def forward(self, x):
            return x + 1, self.constant

    model = kit.inference(Holding(), device_iterations=4)
    out, constant = model(kit.rows(4))
    kit.close("computed", out, kit.rows(4) + 1)
    kit.close("held", constant, torch.tensor([1.0, 2.0, 3.0]))


@open_question(
    "open/a tensor made in forward",
    "Does a tensor that forward makes of nothing, and returns, come once or per micro-batch?",
)
def _made(kit: Kit) -> None:
    out = kit.infer(lambda x: (x + 1, torch.ones(3)), kit.rows(4), device_iterations=4)
    kit.note(f"torch.ones(3) with 4 micro-batches has shape {list(out[1].shape)}")


@judged("values/a scalar output becomes one element per micro-batch")
def _scalar(kit: Kit) -> None:
    rows = kit.rows(6)
    out = kit.infer(lambda x: x.sum(), rows, device_iterations=3)
    kit.close("sums", out, rows.view(3, -1).sum(1))
    single = kit.infer(lambda x: x.sum(), rows)
    kit.close("one sum", single, rows.sum())


@judged("values/structures come back as they were")
def _structure(kit: Kit) -> None:
    x = kit.rows(2)
    out = kit.infer(lambda x: {"a": [x, (x + 1, None)], "b": 3}, x)
    kit.equal("keys", sorted(out), ["a", "b"])
    kit.equal("types", [type(out["a"]), type(out["a"][1])], [list, tuple])
    kit.equal("what is no tensor", (out["a"][1][1], out["b"]), (None, 3))
    kit.close("untouched", out["a"][0], x)
    kit.close("plus one", out["a"][1][0], x + 1)


@judged("values/the model runs on the IPU only while it is traced")
def _where(kit: Kit) -> None:
    answers = []
    kit.infer(lambda x: (answers.append(kit.poptorch.isRunningOnIpu()), x + 1)[1], kit.rows(2))
    kit.equal("inside", answers, [True])
    kit.equal("outside", kit.poptorch.isRunningOnIpu(), False)


@judged("random/dropout keeps what it says, scaled")
def _dropout(kit: Kit) -> None:
    ones = torch.ones(4, 5000, dtype=kit.dtype)

    def drop(x):
        return nn.functional.dropout(x, 0.25, training=True)

    out = kit.infer(drop, ones, device_iterations=2, replicas=2, seed=7)
    share = (out != 0).double().mean()
    kit.close("share kept", share, 0.75, 0.02)
    kit.close("scaled by", out[out != 0].unique().double(), torch.tensor([4 / 3]), 1e-3)
    same = [(i, j) for i in range(4) for j in range(i) if torch.equal(out[i] == 0, out[j] == 0)]
    kit.equal("micro-batches that drop the same", same, [])


@judged("random/normal numbers have mean 0 and deviation 1")
def _normal(kit: Kit) -> None:
    out = kit.infer(torch.randn_like, torch.zeros(1, 40000, dtype=kit.dtype), seed=3)
    kit.close("mean", out.double().mean(), 0.0, 0.03)
    kit.close("deviation", out.double().std(), 1.0, 0.03)


@judged("random/the same seed draws the same numbers, call by call")
def _seed(kit: Kit) -> None:
    def two_calls():
        model = kit.inference(lambda x: x + torch.rand_like(x), seed=11)
        drawn = [model(kit.rows(2)).clone() for _ in range(2)]
        model.destroy()
        return drawn

    first, second = two_calls(), two_calls()
    for index in range(2):
        kit.close(f"call {index}", second[index], first[index])
    kit.equal("calls alike", torch.equal(first[0], first[1]), False)


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
    model = kit.inference(body)
    for which, wanted in ((True, x + 1), (False, x * 3)):
        kit.close(str(which), model(torch.tensor([which]), x), wanted)


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
