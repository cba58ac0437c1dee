"""jit="auto" compiles where that pays, and keeps what turns out to be faster."""

import copy

import pytest
import torch

import ipufit
from ipufit.engines.embedded import training
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.lowering import racing
from ipufit.engines.embedded.lowering.inductor.compilation import CompilerError
from ipufit.engines.embedded.lowering.inductor.compiled import CompiledUpdates
from ipufit.engines.embedded.lowering.inductor.form import update_of
from ipufit.engines.embedded.lowering.racing import Race
from ipufit.errors import ConfigurationError
from tests.fitting import assert_close
from tests.nets import MLP, data


class Library:
    """Stands for compiled updates: what is asked of it, and whether it is there."""

    def __init__(self, kept=False, after=0, fails=None, refuses=None):
        self.started = []
        self.is_ready = False
        self._kept, self._after, self._fails, self._refuses = kept, after, fails, refuses

    def start(self, recorded, example, compiles=True):
        if self._refuses:
            raise ConfigurationError(self._refuses)
        self.started.append(compiles)
        self.is_ready = self._kept

    def poll(self):
        if self.started and self.started[-1] and not self.is_ready:
            if self._fails:
                raise CompilerError(self._fails)
            self._after -= 1
            self.is_ready = self._after < 0
        return self.is_ready


def run(library, seconds, to_come, executions=20, updates=10):
    """Which executions were compiled; a recorded update takes seconds[0], a compiled one [1]."""
    now = [0.0]
    race = Race(library, clock=lambda: now[0])
    race.expect(to_come)
    race.enter(object(), object())
    made = []
    for _ in range(executions):
        made.append(race.before() is library)
        now[0] += updates * seconds[made[-1]]
        race.after(updates)
    return race, made


def test_a_short_run_looks_for_nothing():
    library = Library(kept=True)
    race, made = run(library, (0.001, 0.0005), to_come=1000)
    assert library.started == []
    assert not any(made)
    assert race.said() == []
    assert not race.wins


def test_a_longer_one_takes_what_was_kept_and_compiles_nothing():
    library = Library()
    _, made = run(library, (0.1, 0.05), to_come=1000)
    assert library.started == [False]
    assert not any(made)
    library = Library(kept=True)
    race, made = run(library, (0.1, 0.05), to_come=1000)
    assert library.started == [False]
    assert made[:3] == [False, False, True]
    assert all(made[-8:])
    assert race.wins
    assert race.said() == ["Compiled updates take 0.50 of the time, and are kept."]


def test_a_long_one_compiles_while_it_trains():
    library = Library(after=4)
    race, made = run(library, (0.1, 0.05), to_come=100_000)
    assert library.started == [True]
    assert not any(made[:6])
    assert all(made[-4:])
    assert race.wins


def test_what_is_no_faster_is_not_used():
    race, made = run(Library(kept=True), (0.1, 0.095), to_come=100_000)
    assert not any(made[-4:])
    assert not race.wins
    assert race.said() == ["Compiled updates take 0.95 of the time, and are not used."]


def test_a_compiler_that_fails_stops_nothing():
    race, made = run(Library(fails="no space left\nin line 3"), (0.1, 0.05), to_come=100_000)
    assert not any(made)
    assert race.said() == ["Updates run as recorded, uncompiled: no space left"]
    race, made = run(Library(refuses="a directory of others"), (0.1, 0.05), to_come=100_000)
    assert not any(made)
    assert race.said() == ["Updates run as recorded, uncompiled: a directory of others"]


def test_another_program_is_another_race():
    race, _ = run(Library(kept=True), (0.1, 0.05), to_come=100_000)
    race.enter(object(), object())
    assert not race.wins
    assert race.said() == []


@pytest.fixture
def described(monkeypatch):
    """Compiling is done at once, by running the description as it is; updates made so."""
    made = []

    def begin(self, request):
        update = update_of(request.form)

        def one(*tensors):
            made.append(1)
            return update(*tensors)

        self._run, self.origin = one, "described"

    monkeypatch.setattr(CompiledUpdates, "_begin", begin)
    monkeypatch.setattr(training, "missing", lambda: None)
    monkeypatch.setattr(racing, "_LOOKS", 0.0)
    monkeypatch.setattr(racing, "_COMPILES", 0.0)
    return made


@pytest.mark.parametrize("worth", [0.0, 1e9])
def test_a_model_in_the_race_has_the_same_numbers(described, monkeypatch, worth):
    """Whichever wins; what has won is said, and is in History."""
    monkeypatch.setattr(racing, "_WORTH", worth)
    net, (x, y) = MLP().double(), data(42)
    found = []
    for jit in ("auto", "graph"):
        engine = EmbeddedEngine()
        model = ipufit.Model(copy.deepcopy(net), engine=lambda engine=engine: engine)
        model.compile("adam", "cross_entropy", jit=jit)
        work = {"batch_size": 2, "device_iterations": 2, "epochs": 4, "seed": 1, "verbose": 0}
        found.append((model, engine, model.fit(x, y, **work)))
    (one, engine, history), (other, _, told) = found
    assert_close(one.module, other.module, 1e-10)
    torch.testing.assert_close(
        torch.tensor(history.history["loss"]), torch.tensor(told.history["loss"])
    )
    assert described
    wins = worth > 0
    assert history.params["jit"] == ("inductor" if wins else "graph")
    (said,) = engine.explain(one._session.recipe, {})
    assert said.endswith("and are kept." if wins else "and are not used.")
    assert (len(described) > 40) is wins
