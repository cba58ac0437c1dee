"""Random numbers of Python and NumPy in forward or loss, which a recording has as constants."""

from __future__ import annotations

import copy
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ipufit
from ipufit.errors import CaptureError
from tests.engines import EAGER_OR_NOT, runs_eagerly, strict

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 3
RNG = np.random.default_rng(5)


class Layers(nn.Module):
    """Leaves layers out with numbers from a function."""

    def __init__(self, draw, rate=0.5, count=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))
        self.head = nn.Linear(8, 3)
        self.draw = draw
        self.rate = rate

    def forward(self, x):
        for layer in self.layers:
            number = self.draw()
            if self.training and number < self.rate:
                continue
            x = x + layer(x).relu()
        return self.head(x)


class Held(Layers):
    """Has a generator of its own."""

    def __init__(self, generator):
        super().__init__(self.number)
        self.generator = generator

    def number(self):
        return self.generator.random()


class Numbers:
    """Has generators of its own, in a list."""

    def __init__(self):
        self.generators = [np.random.default_rng(3)]

    def random(self):
        return self.generators[0].random()


NUMBERS = Numbers()


def of_python():
    return random.random()


def of_numpy():
    return np.random.uniform(0, 1)


def of_global_generator():
    return RNG.random()


def of_global_object():
    return NUMBERS.random()


def mixed(prediction, target):
    share = np.random.beta(0.4, 0.4)
    other = prediction.roll(1, 0)
    return share * nn.functional.cross_entropy(prediction, target) + (
        1 - share
    ) * nn.functional.cross_entropy(other, target)


def layers(draw):
    return lambda: (Layers(draw), "cross_entropy")


CASES = {
    "random": (layers(of_python), "random", "random.random()", "torch.rand"),
    "numpy": (layers(of_numpy), "numpy.random", "np.random.uniform(0, 1)", "torch.rand"),
    "global": (layers(of_global_generator), "RNG", "RNG.random()", "torch.rand"),
    "global object": (
        layers(of_global_object),
        "NUMBERS.generators",
        "self.generators[0].random()",
        "torch.rand",
    ),
    "held by numpy": (
        lambda: (Held(np.random.default_rng(3)), "cross_entropy"),
        "Held.generator",
        "self.generator.random()",
        "torch.rand",
    ),
    "held by python": (
        lambda: (Held(random.Random(3)), "cross_entropy"),
        "Held.generator",
        "self.generator.random()",
        "torch.rand",
    ),
    "held by an object": (
        lambda: (Held(Numbers()), "cross_entropy"),
        "Held.generator.generators",
        "self.generators[0].random()",
        "torch.rand",
    ),
    "loss": (
        lambda: (nn.Linear(8, 3), mixed),
        "numpy.random",
        "np.random.beta(0.4, 0.4)",
        "torch.distributions.Beta(a, b).sample()",
    ),
}


def compiled(make, **options):
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(1)
    module, loss = make()
    model = ipufit.Model(module)
    model.compile(torch.optim.SGD(module.parameters(), lr=0.1), loss, **options)
    return model


# The others are of the same kinds.
@pytest.mark.few("random", "global")
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long if case in ("numpy", "held by python") else ())
        for case in CASES
    ],
)
def test_fit_refuses_numbers_that_would_never_change(case, engine):
    """With the line and what to write, before any work, and again in the next call."""
    calls = 2 if case in ("random", "held by numpy") else 1
    make, source, line, call = CASES[case]
    model = compiled(make, **strict())
    before = copy.deepcopy(model.module.state_dict())
    for _ in range(calls):
        with pytest.raises(CaptureError) as caught:
            model.fit(X, Y, batch_size=4, verbose=0)
        text = str(caught.value)
        assert text.startswith(
            f"a random number is drawn from {source}, but Python runs only once, to be recorded: "
            f"every micro-batch would get the same number, at {__file__}:{caught.value.line} in "
        )
        assert line in text
        eagerly = (
            " To run this module as it is, without capture, use compile(..., run_eagerly=True)."
        )
        assert text.endswith(
            f"Draw with {call}, whose numbers are part of the program."
            + (eagerly if engine == "embedded" else "")
        )
    for name, value in model.module.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.long
def test_each_line_that_draws_is_named():
    """A branch in the line gets its own advice."""

    class Two(nn.Linear):
        def forward(self, x):
            if random.random() < 0.5:
                x = x * random.gauss(0, 1)
            return super().forward(x) * np.random.rand()

    model = compiled(lambda: (Two(8, 3), "cross_entropy"), **strict())
    with pytest.raises(CaptureError) as caught:
        model.fit(X, Y, verbose=0)
    assert "and choose with torch.where instead of a branch" in str(caught.value)
    assert f"So does {__file__}:" in str(caught.value)


class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + random.random()


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_evaluate_and_predict_refuse_them_too(call):
    """Every sample would get the same noise."""
    model = compiled(lambda: (Noisy(8, 3), "cross_entropy"), **strict())
    with pytest.raises(CaptureError, match="a random number is drawn from random"):
        model.evaluate(X, Y, verbose=0) if call == "evaluate" else model.predict(X, verbose=0)


@runs_eagerly
@pytest.mark.parametrize("make", [CASES["loss"][0], lambda: (Noisy(8, 3), "cross_entropy")])
def test_a_run_without_a_recording_draws_anew(make):
    """As the text advises; then every micro-batch has a number of its own, which the seed says."""
    fits = []
    for iterations in (1, 3):
        model = compiled(make, run_eagerly=True)
        state = random.getstate(), np.random.get_state()[1].tolist()
        model.fit(X, Y, batch_size=4, seed=3, device_iterations=iterations, verbose=0)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == state
        fits.append(model.module.weight.tolist())
    assert fits[0] == fits[1]
    twice = torch.cat([X[:4], X[:4]])
    outputs = model.predict(twice, batch_size=4, verbose=0)
    assert torch.equal(outputs[:4], outputs[4:]) == (make is CASES["loss"][0])


class Drawing(nn.Module):
    """Notes the numbers of its generator."""

    def __init__(self, generator, numbers):
        super().__init__()
        self.generator = generator
        self.note = numbers.append

    def forward(self, x):
        number = float(self.generator.random())
        self.note(number)
        return x * number


@runs_eagerly
@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_generators_of_modules_of_one_class_each_follow_the_seed(make):
    """All but one went on where they were; nor may they draw the same."""
    fits = []
    for own in (1, 5):
        generators, numbers = [make(own), make(own + 1)], []
        parts = [Drawing(generator, numbers) for generator in generators]
        module = nn.Sequential(*parts, nn.Linear(8, 3))
        model = compiled(lambda module=module: (module, "cross_entropy"), run_eagerly=True)
        model.fit(X, Y, batch_size=8, seed=3, verbose=0)
        # What is before them was drawn to see the outputs.
        fits.append(numbers[-8:])
        assert [each.random() for each in generators] == [
            make(number).random() for number in (own, own + 1)
        ]
    assert fits[0] == fits[1]
    assert len(set(fits[0])) == 8


HARMLESS = (
    "but Python runs only once, to be recorded. The program does not depend on the number, so this "
    "has no effect now; if it should, draw with torch.rand."
)


def said(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught]


@pytest.mark.long
@pytest.mark.parametrize("draw", [of_python, of_numpy])
def test_numbers_that_decide_nothing_are_warned_of(draw):
    """Layers that are never left out, or only in training, draw for nothing."""
    model = compiled(lambda: (Layers(draw, 0.0, count=2), "cross_entropy"))
    source = "random" if draw is of_python else "numpy.random"
    line = draw.__code__.co_firstlineno + 1
    text = f"a random number is drawn from {source} at {__file__}:{line} in {draw.__name__}, "
    assert said(lambda: model.fit(X, Y, batch_size=4, epochs=2, verbose=0)) == [text + HARMLESS]
    model = compiled(lambda: (Layers(draw, 0.5, count=2), "cross_entropy"))
    assert said(lambda: model.evaluate(X, Y, verbose=0)) == [text + HARMLESS]


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("seed", range(5))
def test_a_rate_that_is_small_is_refused_as_well(seed):
    """Whether the layers were left out when it was recorded is luck."""
    model = compiled(lambda: (Layers(of_python, 0.02, count=2), "cross_entropy"), **strict())
    random.seed(seed)
    with pytest.raises(CaptureError, match="a random number is drawn from random"):
        model.fit(X, Y, batch_size=4, verbose=0)


class Augmented(Dataset):
    """Draws as it reads."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + random.random() + np.random.rand() * RNG.random(), Y[index]


@pytest.mark.long
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
def test_data_may_draw(run_eagerly):
    """A dataset runs for every sample, also while something is recorded."""
    model = compiled(lambda: (nn.Linear(8, 3), "cross_entropy"), run_eagerly=run_eagerly)
    loader = DataLoader(Augmented(), batch_size=4)
    model.fit(
        loader, epochs=2, loading=ipufit.Loading(prefetch=2), validation_data=loader, verbose=0
    )
    model.evaluate(loader, prefetch=2, verbose=0)


class Waiting(nn.Linear):
    """Gives another thread a turn."""

    def forward(self, x):
        for _ in range(50):
            threading.Event().wait(0.001)
        return super().forward(x)


@pytest.mark.long
def test_another_thread_may_draw():
    """What the program depends on is what counts."""
    ended = threading.Event()

    def draw():
        while not ended.wait(0.0005):
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        model = compiled(lambda: (Waiting(8, 3), "cross_entropy"))
        for text in said(lambda: model.fit(X, Y, verbose=0)):
            assert text.endswith(HARMLESS)
    finally:
        ended.set()
        thread.join()


class Advised(Layers):
    """As the text of the error advises."""

    def forward(self, x):
        for layer in self.layers:
            leave_out = torch.rand(()) < self.rate
            x = torch.where(leave_out, x, x + layer(x).relu())
        return self.head(x)


@pytest.mark.long
def test_the_advice_works():
    """All layers are trained, and all are left out now and then."""
    model = compiled(lambda: (Advised(None), "cross_entropy"))
    before = copy.deepcopy(model.module.state_dict())
    model.fit(X, Y, batch_size=4, epochs=4, verbose=0)
    assert all((before[n] != v).any() for n, v in model.module.state_dict().items())


@pytest.mark.long
def test_generators_go_on_where_a_recording_left_them():
    """Looking closer draws nothing more."""
    ends = []
    for rate in (0.0, None):
        model = compiled(
            lambda rate=rate: (Layers(of_python, rate or 0.0, count=2), "cross_entropy")
        )
        if rate is None:
            for _ in model.module.layers:
                random.random()
        else:
            said(lambda model=model: model.fit(X, Y, verbose=0))
        ends.append(random.random())
    assert ends[0] == ends[1]
