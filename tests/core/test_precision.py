"""Mixed and half precision, with and without what the CPU of this torch can compute."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.core.precision import autocast_state, check_precision, refuse_missing_half
from ipufit.core.train_config import Precision
from ipufit.errors import ConfigurationError, IpufitError
from tests.caching import once_per_engine
from tests.engines import embedded_only
from tests.fitting import WAYS, Plan, assert_close, assert_equal, compiled, fit
from tests.nets import CNN, MLP, data
from tests.reference import train
from tests.told import message

X, Y = data(23)
X = X.float()
# Of whole updates, where smaller micro-batches, which are recorded too, show nothing.
EVEN = X[:16], Y[:16]
CPU = torch.device("cpu")


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def has_autocast(dtype):
    try:
        check_precision(Precision({torch.float16: "mixed_float16"}[dtype]), MLP())
    except ConfigurationError:
        return False
    return True


def computes_half():
    """Whether the CPU of this torch multiplies matrices in float16."""
    try:
        torch.ones(2, 2, dtype=torch.float16) @ torch.ones(2, 2, dtype=torch.float16)
    except RuntimeError:
        return False
    return True


needs_half = pytest.mark.skipif(not computes_half(), reason="no float16 kernels on this CPU")
lacks_half = pytest.mark.skipif(computes_half(), reason="float16 kernels on this CPU")
needs_half_autocast = pytest.mark.skipif(
    not has_autocast(torch.float16), reason="no autocast to float16 on this CPU"
)


class Autocast(nn.Module):
    """What precision= does, written out by hand."""

    def __init__(self, net, dtype):
        super().__init__()
        self.net, self.dtype = net, dtype

    def forward(self, x):
        with torch.autocast("cpu", dtype=self.dtype, cache_enabled=False):
            return self.net(x)


def autocast_loss(dtype):
    def loss(prediction, target):
        with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
            return nn.functional.cross_entropy(prediction, target)

    return loss


MIXED = [
    pytest.param("mixed_bfloat16", torch.bfloat16),
    pytest.param("bf16-mixed", torch.bfloat16),
    pytest.param("mixed_float16", torch.float16, marks=needs_half_autocast),
    pytest.param("16-mixed", torch.float16, marks=needs_half_autocast),
]


def in_turn(cases):
    """Each in every way; one way after the other stands for all of them."""
    return [
        pytest.param(
            *case.values,
            way,
            marks=[*case.marks, *(() if way == WAYS[place % len(WAYS)] else (pytest.mark.long,))],
        )
        for place, case in enumerate(cases)
        for way in WAYS
    ]


@once_per_engine
def without_precision(way, plan):
    """A network, and a model of it in float32 that has trained, and its history."""
    net = MLP()
    model, _ = compiled(net, sgd, way=way)
    return net, model, fit(model, *EVEN, plan)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(("precision", "dtype", "way"), in_turn(MIXED))
def test_mixed_precision_is_autocast_around_forward_and_loss(precision, dtype, way):
    """Weights, their gradients and the update stay in float32."""
    plan = Plan(4, 2, 2)
    net, plain, other = without_precision(way, plan)
    expected = Autocast(copy.deepcopy(net), dtype)
    train(expected, sgd(expected.parameters()), autocast_loss(dtype), *EVEN, 2, **plan.by_hand)
    model, _ = compiled(net, sgd, way=way, precision=ipufit.Precision(precision, loss_scale=1))
    history = fit(model, *EVEN, plan)
    assert_close(model.module, expected.net, atol=1e-6)
    assert not torch.equal(plain.module.layers[0].weight, model.module.layers[0].weight)
    assert history.history["loss"] != other.history["loss"]
    assert history.params["precision"] == precision
    assert model.module.layers[0].weight.dtype == torch.float32


@pytest.mark.few
@pytest.mark.parametrize(("precision", "dtype"), MIXED)
def test_mixed_precision_holds_in_evaluate_and_predict(precision, dtype):
    net = MLP()
    model, _ = compiled(net, sgd, precision=precision)
    loader = DataLoader(TensorDataset(X, Y), batch_size=23)
    got = model.predict(loader, verbose=0)
    assert got.dtype == dtype
    torch.testing.assert_close(got, Autocast(net, dtype)(X), rtol=0, atol=0)
    loss = autocast_loss(dtype)(Autocast(net, dtype)(X), Y).item()
    assert model.evaluate(loader, verbose=0)["loss"] == pytest.approx(loss, abs=1e-7)


@pytest.mark.long
@pytest.mark.parametrize("numbers", [(1, 5), (1, 2, 5, 10)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_mixed_precision_has_the_same_bits_for_every_number_of_device_iterations(way, numbers):
    net, found = CNN(), []
    for di in numbers:
        model, _ = compiled(net, sgd, way=way, precision="mixed_bfloat16", metrics=["accuracy"])
        history = fit(model, X, Y, Plan(2, di)).history
        found.append((model.module, history))
    for module, history in found[1:]:
        assert_equal(module, found[0][0])
        assert history == found[0][1]


@pytest.mark.long
@needs_half_autocast
def test_mixed_float16_scales_dynamically_unless_told_otherwise():
    """As Keras does: without a scale small gradients vanish."""
    model, _ = compiled(MLP(), sgd, precision="mixed_float16")
    history = fit(model, *EVEN)
    assert history.history["loss_scale"] == [2.0**15] * 2
    assert history.params["loss_scale"] == "dynamic"
    model, _ = compiled(MLP(), sgd, precision=ipufit.Precision("mixed_float16", loss_scale=1))
    assert fit(model, *EVEN).history["loss_scale"] == [1.0] * 2
    model, _ = compiled(MLP(), sgd, precision="mixed_bfloat16")
    assert "loss_scale" not in fit(model, *EVEN).history


PURE = [
    pytest.param("bfloat16", torch.bfloat16),
    pytest.param("bf16-true", torch.bfloat16),
    pytest.param("float16", torch.float16, marks=needs_half),
    pytest.param("16-true", torch.float16, marks=needs_half),
    pytest.param("float64", torch.float64),
    pytest.param("64-true", torch.float64),
    pytest.param("float32", torch.float32),
    pytest.param("32-true", torch.float32),
]


@pytest.mark.long
@pytest.mark.parametrize(("precision", "dtype", "way"), in_turn(PURE))
def test_a_module_of_one_dtype_gets_its_inputs_in_it(precision, dtype, way):
    """A loader need not know; targets follow too, as a loss wants one dtype."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).to(dtype)
    x, y = EVEN[0].double(), torch.randn(len(EVEN[0]), 3)
    expected = copy.deepcopy(net)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)

    def loss(prediction, target):
        return (prediction - target).square().mean()

    train(expected, optimizer, loss, x.to(dtype), y.to(dtype), 2, mb=4)
    model, _ = compiled(
        net, lambda p: torch.optim.SGD(p, lr=0.1), loss, way, precision=precision, metrics=["mae"]
    )
    fit(model, x, y)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 4e-3)
    assert_close(model.module, expected, atol=tolerance)
    assert {p.dtype for p in model.module.parameters()} == {dtype}
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    assert model.predict(loader, verbose=0).dtype == dtype


OPTIMIZERS = {
    "sgd": sgd,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
    "lamb": lambda p: ipufit.optim.LAMB(p, lr=0.01, eps=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5, eps=1e-3),
}


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=needs_half)])
def test_modules_of_half_precision_train_with_everything(optimizer, dtype):
    """Scaled, accumulated in float32, clipped and averaged."""
    net = MLP().to(dtype)
    found = []
    for way in WAYS:
        model, _ = compiled(
            net,
            OPTIMIZERS[optimizer],
            way=way,
            precision=ipufit.Precision(loss_scale="dynamic", accumulation_dtype="float32"),
            clip=ipufit.Clip(global_norm=1.0),
            ema=ipufit.EMA(),
        )
        history = fit(model, EVEN[0].to(dtype), EVEN[1], Plan(4, 2, 2)).history
        assert all(bool(p.isfinite().all()) for p in model.module.parameters())
        assert {p.dtype for p in model.module.parameters()} == {dtype}
        assert len(history["loss"]) == 2
        found.append(model.module)
    for other in found[1:]:
        assert_equal(other, found[0])
    assert not torch.equal(found[0].layers[0].weight, net.layers[0].weight)


@pytest.mark.long
@needs_half
@pytest.mark.parametrize("way", WAYS)
def test_a_scale_saves_gradients_that_float16_loses(way):
    """1e-9 is zero in float16; times 2**15 it is not."""

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1, dtype=torch.float16))

        def forward(self, x):
            return self.w * x

    def loss(prediction, target):
        return prediction.float().mean() * 1e-9

    made = {}
    for scale in (None, 2.0**15):
        model, _ = compiled(
            Tiny(),
            lambda p: torch.optim.SGD(p, lr=1e4),
            loss,
            way,
            precision=ipufit.Precision(loss_scale=scale, accumulation_dtype="float32"),
            reduction=ipufit.Reduction(gradients="sum"),
        )
        x = torch.ones(64, 1, dtype=torch.float16)
        fit(model, x, torch.zeros(64), Plan(1, 1, 64), epochs=1)
        made[scale] = 1 - model.module.w.item()
    assert made[None] == 0.0
    assert made[2.0**15] == pytest.approx(64 * 1e-5, rel=0.25)  # a step of float16 at 1 is 5e-4


# ---- an autocast of the user's ------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_an_autocast_around_fit_counts(way):
    """Whoever writes it around a loop expects it around fit."""
    net, plain, _ = without_precision(way, Plan())
    asked, _ = compiled(net, sgd, way=way, precision="mixed_bfloat16")
    fit(asked, *EVEN)
    around, _ = compiled(net, sgd, way=way)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fit(around, *EVEN)
        assert autocast_state(CPU) == (True, torch.bfloat16)
    assert_close(around.module, asked.module, atol=2e-3)
    assert not torch.equal(around.module.layers[0].weight, plain.module.layers[0].weight)


@pytest.mark.long
def test_an_autocast_around_fit_counts_the_same_in_every_way():
    net, found = MLP(), []
    for way in WAYS:
        model, _ = compiled(net, sgd, way=way, clip=ipufit.Clip(global_norm=0.5))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fit(model, *EVEN, Plan(4, 2, 2))
        found.append(model.module)
    for other in found[1:]:
        assert_equal(other, found[0])


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_the_precision_asked_for_wins_over_an_autocast_around_fit(way):
    """Twice the same is once; the update itself is not cast."""
    net = MLP()
    model, _ = compiled(net, sgd, way=way, precision="mixed_bfloat16")
    fit(model, *EVEN)
    inside, _ = compiled(net, sgd, way=way, precision="mixed_bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fit(inside, *EVEN)
    assert_close(inside.module, model.module, atol=2e-3)


@embedded_only("PopTorch has no autocast, and that of the user is refused")
def test_an_autocast_that_comes_or_goes_is_recorded_anew():
    """A recording holds its casts."""
    model, engine = compiled(MLP(), sgd)
    loader = DataLoader(TensorDataset(X, Y), batch_size=23)
    plain = model.predict(loader, verbose=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.predict(loader, verbose=0).dtype == torch.bfloat16
    assert torch.equal(model.predict(loader, verbose=0), plain)
    assert engine.captures == 2


# ---- bad input ----------------------------------------------------------------------------------


@lacks_half
@pytest.mark.parametrize("way", ["recorded", "eager"])
def test_an_operator_that_the_cpu_lacks_is_named_before_any_update(way):
    net = MLP().half()
    model, _ = compiled(net, sgd, way=way)
    assert message(fit, model, X.half(), Y) == (
        "every operator of the program must support the chosen precision, but torch "
        f"{torch.__version__} says on the CPU: \"addmm_impl_cpu_\" not implemented for 'Half'. Use "
        "float32, 'mixed_bfloat16', or a GPU."
    )
    assert_equal(model.module, net)
    assert model._session.updates == 0


@pytest.mark.long
@needs_half
def test_an_eps_that_is_zero_in_the_weights_dtype_is_reported():
    """0 / 0 in an optimizer that works for years in float32."""
    text = (
        "eps=1e-08 of Adam is zero in float16, so a weight whose gradient is zero becomes NaN. "
        "Pass a larger one, such as 1e-4, or keep weights in float32 with "
        "precision='mixed_float16'."
    )
    model, _ = compiled(MLP().half(), "adam")
    with pytest.warns(UserWarning, match="is zero in float16") as caught:
        fit(model, X[:4].half(), Y[:4], epochs=1)
    assert [str(each.message) for each in caught] == [text]
    for net in (MLP().bfloat16(), MLP()):
        model, _ = compiled(net, "adam")
        fit(model, X[:4].to(next(net.parameters()).dtype), Y[:4], epochs=1)


@pytest.mark.long
@pytest.mark.parametrize("way", ["recorded", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["fit", "evaluate", "predict"])
def test_a_kernel_missing_in_any_torch_is_named(mode, dtype, way):
    """linalg has none for half precision in any version so far."""

    class Solves(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.eye(3))

        def forward(self, x):
            return x.flatten(1)[:, :3] * torch.linalg.inv_ex(self.w)[0].sum()

    net = Solves().to(dtype)
    model, _ = compiled(net, sgd, lambda p, t: p.float().mean(), way)
    loader = DataLoader(TensorDataset(X.to(dtype), Y), batch_size=4)
    with pytest.raises((IpufitError, RuntimeError)) as caught:
        getattr(model, mode)(loader, verbose=0)
    text = str(caught.value)
    if isinstance(caught.value, IpufitError):
        name = str(dtype).rpartition("float")[2]
        assert text.startswith(
            "every operator of the program must support the chosen precision, but torch "
            f"{torch.__version__} says on the CPU: "
        )
        assert text.endswith(". Use float32, 'mixed_bfloat16', or a GPU.")
        assert name in {"16"}
    else:
        assert "Low precision dtypes not supported" in text
    assert_equal(model.module, net)


def test_errors_that_are_not_about_kernels_pass():
    for text in ("shapes differ", "BFloat16 is a word in this message"):
        with pytest.raises(RuntimeError, match=text) as caught, refuse_missing_half():
            raise RuntimeError(text)
        assert type(caught.value) is RuntimeError


@pytest.mark.parametrize(
    ("precision", "net", "text"),
    [
        (
            "float16",
            MLP(),
            "precision='float16' needs a module of float16, but 'layers.0.weight' is float32. "
            "Convert it first: module.to(torch.float16), or use a mixed precision, which keeps "
            "the dtype of the weights.",
        ),
        (
            "64-true",
            MLP(),
            "precision='64-true' needs a module of float64, but 'layers.0.weight' is float32. "
            "Convert it first: module.to(torch.float64), or use a mixed precision, which keeps "
            "the dtype of the weights.",
        ),
    ],
)
def test_a_module_of_another_dtype_is_refused(precision, net, text):
    model, engine = compiled(net, sgd, precision=precision)
    assert message(fit, model, X, Y) == text
    assert engine.seconds == 0


@pytest.mark.parametrize("precision", ["half", 16, "mixed"])
def test_a_precision_that_is_none_is_refused(precision):
    assert message(compiled, MLP(), sgd, precision=precision) == (
        "precision must be one of None, 'mixed_float16', 'mixed_bfloat16', '16-mixed', "
        "'bf16-mixed', 'float16', 'bfloat16', 'float32', 'float64', '16-true', 'bf16-true', "
        f"'32-true', '64-true', got {precision!r}."
    )


@pytest.mark.skipif(has_autocast(torch.float16), reason="autocast to float16 on this CPU")
def test_mixed_float16_that_the_cpu_lacks_is_refused():
    model, engine = compiled(MLP(), sgd, precision="mixed_float16")
    assert message(fit, model, X, Y) == (
        "precision='mixed_float16' needs autocast to float16 on cpu, which torch "
        f"{torch.__version__} does not have. Use 'mixed_bfloat16', a newer torch, or None."
    )
    assert engine.seconds == 0
