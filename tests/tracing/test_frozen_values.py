"""Python values that a recording has as constants: a change is recorded anew, or said."""

from __future__ import annotations

import enum
import functools
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import ipufit
from ipufit.callbacks import Callback
from tests.engines import EAGER, EAGER_OR_NOT, embedded_only, runs_eagerly

X = torch.linspace(-1, 1, 32).reshape(16, 2).double()
Y = torch.linspace(0, 1, 16).reshape(16, 1).double()

RATE = 1.0
SETTINGS = {"rate": [1.0]}
TABLE = np.ones(3)
OPTIONS = types.SimpleNamespace(model=types.SimpleNamespace(rate=1.0))
UNRELATED = 1.0
CALLS = []


class Config:
    rate = 1.0


class Fixed(enum.Enum):
    SLOW, MIDDLE, FAST = 0.25, 0.5, 1.0


class Slots:
    __slots__ = ("rate",)


class Rate:
    """Gives its rate by a property, a method, a call, and by methods that call others."""

    def __init__(self):
        self._rate = 1.0
        self.again = self.indirectly

    @property
    def rate(self):
        return self._rate

    def indirectly(self, calls_itself=False):
        return self.again() if calls_itself else self.rate

    def __call__(self, prediction, target):
        return squares(prediction, target) * self.rate


MODE, SLOTS, OBJECT = Fixed.FAST, Slots(), Rate()


def squares(prediction, target):
    return ((prediction - target) ** 2).mean()


def indirect():
    return RATE


class Net(nn.Linear):
    """Multiplies with a rate from somewhere."""

    rate = 1.0

    def __init__(self, how=lambda: 1.0):
        super().__init__(2, 1)
        self.how = how
        self.double()

    def factor(self):
        return self.rate

    def forward(self, x):
        return super().forward(x) * self.how() * self.factor()


# ---- where a value can be ------------------------------------------------------------------------


def of_global():
    def change(value):
        global RATE
        RATE = value

    return Net(), lambda p, t: squares(p, t) * RATE, change


def of_helper():
    return Net(), lambda p, t: squares(p, t) * indirect(), of_global()[2]


def of_closure():
    rate = 1.0

    def loss(prediction, target):
        return rate * squares(prediction, target)

    def change(value):
        nonlocal rate
        rate = value

    return Net(), loss, change


def of_class_of_the_module():
    return Net(), squares, lambda value: setattr(Net, "rate", value)


def of_config_class():
    return Net(), lambda p, t: squares(p, t) * Config.rate, lambda v: setattr(Config, "rate", v)


def of_config_object():
    def change(value):
        OPTIONS.model.rate = value

    return Net(), lambda p, t: squares(p, t) * OPTIONS.model.rate, change


def of_container():
    def change(value):
        SETTINGS["rate"][0] = value

    return Net(), lambda p, t: squares(p, t) * SETTINGS["rate"][0], change


def of_array():
    def change(value):
        TABLE[1] = value

    return Net(), lambda p, t: squares(p, t) * float(TABLE[1]), change


def of_default():
    options = types.SimpleNamespace(rate=1.0)

    def loss(prediction, target, options=options):
        return options.rate * squares(prediction, target)

    return Net(), loss, lambda value: setattr(options, "rate", value)


def of_loss_module():
    class Weighted(nn.Module):
        def forward(self, prediction, target):
            return RATE * squares(prediction, target)

    return Net(), Weighted(), of_global()[2]


def of_several_losses():
    _, loss, change = of_closure()

    class Two(Net):
        def forward(self, x):
            return super().forward(x), super().forward(x)

    return Two(), [loss, None], change


def of_function_in_an_attribute():
    return Net(indirect), squares, of_global()[2]


def of_hook():
    net = Net()
    net.register_forward_hook(lambda module, inputs, output: output * RATE)
    return net, squares, of_global()[2]


def of_object_of_the_module():
    class Configured(Net):
        options = types.SimpleNamespace(rate=1.0)

        def factor(self):
            return self.options.rate

    return Configured(), squares, lambda value: setattr(Configured.options, "rate", value)


def of_function_in_a_container():
    net = Net()
    net.how = lambda: REGISTERED["rate"][0]()
    return net, squares, of_global()[2]


def of_functions_of_the_module():
    class Several(Net):
        def factor(self):
            return self.functions[0]()

    net = Several()
    net.functions = [indirect]
    return net, squares, of_global()[2]


def of_private_attribute():
    return Net(lambda: OBJECT.rate), squares, lambda value: setattr(OBJECT, "_rate", value)


def of_bound_method():
    return Net(OBJECT.indirectly), squares, of_private_attribute()[2]


def of_object_that_is_called():
    return Net(), OBJECT, of_private_attribute()[2]


def of_slots():
    return Net(lambda: SLOTS.rate), squares, lambda value: setattr(SLOTS, "rate", value)


def of_enumeration():
    def change(value):
        global MODE
        MODE = Fixed(value)

    return Net(lambda: MODE.value), squares, change


REGISTERED = {"rate": [indirect]}
PLACES = [
    of_global,
    of_helper,
    of_closure,
    of_class_of_the_module,
    of_config_class,
    of_config_object,
    of_container,
    of_array,
    of_default,
    of_loss_module,
    of_several_losses,
    of_function_in_an_attribute,
    of_hook,
    of_object_of_the_module,
    of_function_in_a_container,
    of_functions_of_the_module,
    of_private_attribute,
    of_bound_method,
    of_object_that_is_called,
    of_slots,
    of_enumeration,
]


@pytest.fixture(autouse=True)
def _rates_put_back():
    yield
    for place in PLACES:
        place()[2](1.0)


class Annealed(Callback):
    """Halves the value at the end of every epoch."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_epoch_end(self, epoch, logs=None):
        self.change(0.5 ** (epoch + 1))


def trained(place, run_eagerly=False, engine="auto"):
    torch.manual_seed(0)
    module, loss, change = place()
    change(1.0)
    model = ipufit.Model(module, engine=engine)
    model.compile(lambda p: torch.optim.SGD(p, lr=0.1), loss, run_eagerly=run_eagerly)
    y = (Y, Y) if isinstance(loss, list) else Y
    options = {"batch_size": 4, "shuffle": False, "verbose": 0}
    history = model.fit(X, y, epochs=2, callbacks=Annealed(change), **options).history
    change(0.25)
    options.pop("shuffle")
    return [*history["loss"], model.evaluate(X, y, **options)["loss"]], module


@pytest.mark.few("global", "array", "private_attribute", "function_in_a_container")
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__[3:])
def test_an_annealed_value_counts_from_the_next_epoch(place):
    """Wherever code reads it from; the numbers are those of a run without a recording."""
    losses, module = trained(place)
    expected, other = trained(place, **EAGER)
    assert losses == pytest.approx(expected, rel=1e-12)
    for mine, plain in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-12)
    assert max(losses) > 2 * min(losses)


class EveryBatch(Callback):
    """Changes the value after every execution."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        self.change(1.0 / (1 + self.count))


def fit_and_listen(module, loss, change, epochs=1, **options):
    """The warnings of a fit whose callback changes a value after every execution."""
    model = ipufit.Model(module)
    model.compile(lambda p: torch.optim.SGD(p, lr=0.1), loss, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=2, epochs=epochs, callbacks=EveryBatch(change), verbose=0)
    return [str(warning.message) for warning in caught]


REST = (
    " within an epoch, but it is a constant of the program: until the end of the epoch, forward "
    "and loss use its old value. To change it within an epoch, make it a buffer of the module or "
    "of the loss module, and change it in place; or use compile(..., run_eagerly=True)."
)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (of_global, "RATE changed from 1.0 to 0.5"),
        (of_closure, "rate changed from 1.0 to 0.5"),
        (of_class_of_the_module, "Net.rate changed from 1.0 to 0.5"),
        (of_config_object, "OPTIONS.model.rate changed from 1.0 to 0.5"),
        (of_container, "SETTINGS changed"),
    ],
)
def test_a_change_within_an_epoch_is_said_once(place, text):
    """With the name and both values, as soon as the second execution begins."""
    module, loss, change = place()
    assert fit_and_listen(module, loss, change, epochs=3) == [text + REST]


@pytest.mark.long
def test_an_attribute_that_changes_within_an_epoch_is_said():
    """Of the user's module or of torch's; of what no code reads, nothing is said."""
    module = nn.Sequential(Net(), nn.Dropout(0.5))

    def change(value):
        module[0].rate = module[1].p = module[0].note = value / 2

    module[0].rate = 1.0
    module[1].p = 0.75
    assert sorted(fit_and_listen(module, squares, change, epochs=2)) == [
        "Dropout.p changed from 0.75 to 0.25" + REST,
        "Net.rate changed from 1.0 to 0.25" + REST,
    ]


def test_an_attribute_that_hides_that_of_its_class_within_an_epoch_is_said():
    """As a coefficient with a default is set for the first time."""

    class Weighted(nn.Module):
        weight = 1.0

        def forward(self, prediction, target):
            return squares(prediction, target) * self.weight

    loss = Weighted()
    told = fit_and_listen(
        nn.Linear(2, 1).double(), loss, lambda value: setattr(loss, "weight", value)
    )
    assert told == ["Weighted.weight changed from 1.0 to 0.5" + REST]


@runs_eagerly
def test_a_run_without_a_recording_sees_every_change():
    """So nothing has to be said."""
    module, loss, change = of_closure()
    assert fit_and_listen(module, loss, change, run_eagerly=True) == []


@pytest.mark.long("ipu-standin")
def test_the_advice_works():
    """A buffer that is changed in place counts from the next update, without a word."""

    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("rate", torch.ones((), dtype=torch.float64))

        def forward(self, prediction, target):
            return self.rate * squares(prediction, target)

    losses = []
    for eager in ({}, EAGER):
        torch.manual_seed(0)
        loss = Weighted()
        model = ipufit.Model(Net(), engine=eager.get("engine", "auto"))
        model.compile("sgd", loss, run_eagerly=bool(eager))
        callback = EveryBatch(loss.rate.fill_)
        losses.append(
            model.fit(X, Y, batch_size=2, shuffle=False, callbacks=callback, verbose=0).history
        )
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-12)


@pytest.mark.long("ipu-standin")
def test_what_no_code_reads_is_recorded_once():
    """A global of the same file, such as a best score, is no reason to record anew."""
    model = ipufit.Model(Net(), engine="embedded")
    model.compile("sgd", squares)

    def change(value):
        global UNRELATED
        UNRELATED = value

    model.fit(X, Y, epochs=3, callbacks=[Annealed(change), EveryBatch(change)], verbose=0)
    assert model._session.engine.captures == 1


class Counts(Net):
    calls = 0

    def forward(self, x):
        Counts.calls += 1
        CALLS.append(len(x))
        return super().forward(x)


@embedded_only("PopTorch runs the code again for every program that it compiles")
def test_what_code_writes_itself_is_recorded_once():
    """Each recording would be a reason for the next."""
    Counts.calls = 0
    CALLS.clear()
    model = ipufit.Model(Counts())
    model.compile("sgd", squares)
    for _ in range(2):
        model.fit(X, Y, batch_size=4, epochs=3, verbose=0)
        assert Counts.calls == len(CALLS) == model._session.engine.captures == 1


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("file", ["<stdin>", "<string>", "<python-input-3>", "<ipython-input-1-a>"])
def test_a_global_of_code_without_a_file_counts(file):
    """At a prompt, of python -c and of a script on stdin; its first value stayed, in silence."""
    variables = {"__name__": "__main__", "RATE": 1.0, "squares": squares}
    code = (lambda p, t: squares(p, t) * RATE).__code__.replace(co_filename=file)
    model = ipufit.Model(Net())
    model.compile("sgd", types.FunctionType(code, variables))
    whole = model.evaluate(X, Y, verbose=0)["loss"]
    variables["RATE"] = 0.25
    assert model.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(whole / 4, rel=1e-12)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
def test_a_setting_of_another_file_counts(run_eagerly):
    """``import settings; settings.RATE`` is a global of that module."""
    settings = types.ModuleType("settings_of_a_test")
    settings.__file__ = __file__
    settings.RATE = 1.0
    sys.modules[settings.__name__] = settings
    try:
        model = ipufit.Model(Net())
        model.compile("sgd", lambda p, t: squares(p, t) * settings.RATE, run_eagerly=run_eagerly)
        whole = model.evaluate(X, Y, verbose=0)["loss"]
        settings.RATE = 0.25
        assert model.evaluate(X, Y, verbose=0)["loss"] == pytest.approx(whole / 4, rel=1e-12)
    finally:
        del sys.modules[settings.__name__]


@pytest.mark.both_engines
def test_what_forward_makes_counts_after_it_is_gone(engine):
    """Another object may get the identity of one that is freed, and was taken for it."""

    class Makes(Net):
        def forward(self, x):
            global MADE
            if "MADE" not in globals():
                MADE = np.full(2**18, 1.0)
            return super().forward(x) * float(MADE[0])

    globals().pop("MADE", None)
    model = ipufit.Model(Makes(), engine=engine)
    model.compile("sgd", squares)
    once = [model.predict(X, verbose=0) for _ in range(2)][1]
    gone, others = id(globals().pop("MADE")), []
    while len(others) < 20 and gone not in map(id, others):
        others.append(np.full(2**18, 2.0))
    globals()["MADE"] = others[-1]
    twice = model.predict(X, verbose=0)
    torch.testing.assert_close(twice, 2 * once, rtol=1e-12, atol=0)
    model.fit(X, Y, verbose=0)


# ---- functions that a recording has followed -----------------------------------------------------


def doubled(x):
    return 2 * x


def tripled(x):
    return 3 * x


def scaled(x, by=1.0):
    return by * x


@torch.no_grad()
def largest():
    return GAIN


class Scale:
    def __init__(self, by):
        self.by = by * GAIN

    def __rmul__(self, x):
        return self.by * x

    def times(self, x):
        return 5 * self.by * x


CURVE, ACTIVATION, GAIN = torch.square, nn.Tanh(), 2.0
FIRST, SECOND, THIRD = doubled, tripled, doubled
PARTIAL, BOUND, VMAPPED = functools.partial(scaled, by=2.0), Scale(1.0).times, torch.vmap(doubled)
FEW = [doubled]


class Straight(torch.autograd.Function):
    """Passes a gradient on as it comes."""

    @staticmethod
    def forward(ctx, x):
        return GAIN * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Called(nn.Module):
    """Calls functions by names of its file, of its class and of torch."""

    curve = staticmethod(torch.square)

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1).double()

    def gain(self, x):
        return 2 * x

    def forward(self, x):
        x = Straight.apply(CURVE(self.curve(self.gain(self.layer(x))))) / 1000 * Scale(3.0)
        x = THIRD(SECOND(FIRST(x))) + FEW[0](x) + scaled(x)
        return nn.functional.gelu(VMAPPED(BOUND(PARTIAL(x)))) + ACTIVATION(largest() * x)


def other_forward(self, x):
    return tripled(self.layer(x))


HERE = sys.modules[__name__]
# Where another function, or what decides on one, can come to be.
REPLACEMENTS = {
    "torch's": (HERE, "CURVE", torch.abs),
    "helper": (HERE, "FIRST", tripled),
    "known helper": (HERE, "THIRD", tripled),
    "vmapped": (HERE, "VMAPPED", torch.vmap(tripled)),
    "partial": (HERE, "PARTIAL", functools.partial(scaled, by=3.0)),
    "bound": (HERE, "BOUND", Scale(2.0).times),
    "module": (HERE, "ACTIVATION", nn.ReLU()),
    "gain": (HERE, "GAIN", 3.0),
    "gain of no_grad": (largest.__wrapped__, "__code__", (lambda: 3.0).__code__),
    "static": (Called, "curve", staticmethod(torch.abs)),
    "method": (Called, "gain", lambda self, x: 3 * x),
    "forward": (Called, "forward", other_forward),
    "operator": (Scale, "__rmul__", lambda self, x: 7 * x),
    "init": (Scale.__init__, "__code__", (lambda self, by: setattr(self, "by", 9.0)).__code__),
    "gradient": (Straight, "forward", staticmethod(lambda ctx, x: 3 * x)),
    "edited": (Called.forward, "__code__", other_forward.__code__),
    "edited helper": (tripled, "__code__", (lambda x: 4 * x).__code__),
    "edited default": (scaled, "__defaults__", (2.0,)),
    "patched": (nn.functional, "gelu", torch.neg),
    "patched layer": (nn.Linear, "forward", lambda self, x: x @ self.weight.T),
}


@pytest.mark.few("helper", "edited", "patched", "bound")
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("place", REPLACEMENTS)
def test_another_function_under_a_name_is_recorded(place, monkeypatch):
    """A notebook's second version of a method, or an editor's, would be passed over in silence."""
    model = ipufit.Model(Called())
    model.compile("sgd", squares)
    before = model.predict(X, verbose=0)
    monkeypatch.setattr(*REPLACEMENTS[place])
    after = model.predict(X, verbose=0)
    with torch.no_grad():
        torch.testing.assert_close(after, model.module(X), rtol=0, atol=1e-9)
    assert not torch.allclose(before, after)


def again(function):
    """The function that a second run of its source makes."""
    code = function.__code__.replace(co_filename="another cell")
    return types.FunctionType(code, function.__globals__, argdefs=function.__defaults__)


@embedded_only("PopTorch compiles more programs")
def test_what_calls_functions_is_recorded_once(monkeypatch):
    """For each kind of program; so it is where a notebook's cell is run again without a change."""
    model = ipufit.Model(Called())
    model.compile(lambda p: torch.optim.SGD(p, lr=1e-6), squares)
    for _ in range(2):
        model.fit(X, Y, batch_size=4, epochs=3, validation_data=(X, Y), verbose=0)
        model.evaluate(X, Y, batch_size=4, verbose=0)
        model.predict(X, batch_size=4, verbose=0)
        assert model._session.engine.captures == 3
        monkeypatch.setattr(HERE, "FIRST", again(doubled))
        monkeypatch.setattr(HERE, "scaled", again(scaled))
        monkeypatch.setattr(HERE, "PARTIAL", functools.partial(scaled, by=2.0))
        monkeypatch.setattr(HERE, "BOUND", BOUND.__self__.times)
        monkeypatch.setattr(Called, "gain", again(Called.gain))


def test_a_function_that_changes_within_an_epoch_is_said(monkeypatch):
    """A buffer is no advice for it."""
    texts = fit_and_listen(
        Net(), squares, lambda value: monkeypatch.setattr(Net, "factor", lambda self: 1.0)
    )
    assert texts == [
        "Net.factor changed within an epoch, but it is a constant of the program: until the "
        "end of the epoch, forward and loss use its old value. To change it within an epoch, use "
        "compile(..., run_eagerly=True)."
    ]


class Cached(nn.Linear):
    def forward(self, x):
        global CACHED
        CACHED = len(x)
        return RATE * super().forward(x)


@pytest.mark.long("ipu-standin")
def test_a_value_counts_beside_one_that_code_makes():
    """The code writes that one itself, so it is no reason to record; those after it are."""
    model = ipufit.Model(Cached(2, 1).double())
    model.compile("sgd", squares)
    before = model.predict(X, verbose=0)
    of_global()[2](0.5)
    torch.testing.assert_close(model.predict(X, verbose=0), before / 2)


class Kind(enum.Enum):
    """Members are instances of their class, in which the code finds them by name."""

    SMALL = "small"
    LARGE = "large"

    @property
    def factor(self):
        return 2.0 if self is Kind.LARGE else 1.0


class Unit:
    """Has an instance of itself in its class."""

    def __init__(self, scale):
        self.scale = scale


Unit.default = Unit(3.0)


class ByKind(nn.Linear):
    def forward(self, x):
        return super().forward(x) * Kind.LARGE.factor * Unit.default.scale


def test_classes_that_hold_their_own_instances_are_read_once():
    net, x = ByKind(4, 3), torch.ones(2, 4)
    model = ipufit.Model(net)
    model.compile("sgd", "mse")
    for scale in (3.0, 5.0):
        Unit.default.scale = scale
        with torch.no_grad():
            expected = nn.functional.linear(x, net.weight, net.bias) * 2 * scale
        torch.testing.assert_close(model.predict(x, verbose=0), expected)
