"""jit="auto" looks for compiled updates at once, measures them, and compiles where that pays."""

import copy
import functools
import itertools

import pytest
import torch

import ipufit
from ipufit.engines.embedded import autotune, timing
from ipufit.engines.embedded.autotune import JitAutotuner
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.inductor.compiled import CompiledPart, CompilerError
from ipufit.engines.embedded.inductor.store import LibraryStore
from ipufit.engines.embedded.inductor.update_spec import UpdateFunction
from ipufit.engines.embedded.passes import select_kernels
from ipufit.engines.embedded.programs import training
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.engines.embedded.update_runner import UpdateRunner
from ipufit.errors import ConfigurationError, NonFiniteLossError
from tests.engines.embedded.inductor.test_inductor import Made
from tests.engines.embedded.test_lowerings import all_kernels, needs_onednn
from tests.fitting import assert_close, assert_equal
from tests.nets import MLP, data
from tests.training.test_shapes import Pooled, sequences

pytestmark = pytest.mark.both_engines

__all__ = ["all_kernels"]

KEYS = itertools.count()


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("IPUFIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(timing, "_known", {})


class Library:
    """Stands for compiled updates: what is asked of it, and whether it is there."""

    title = "updates"
    are_kernels_settled = True

    def __init__(self, kept=False, after=0, fails=None, refuses=None, operators=100):
        self.started = []
        self.is_ready = False
        self.key = f"library {next(KEYS)}"
        self._kept, self._after, self._fails, self._refuses = kept, after, fails, refuses
        self._operators = operators

    def may_be_there(self):
        return self._kept

    def operators(self):
        return self._operators

    def start(self, compiles=True):
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


def run(library, seconds, to_come, executions=20, updates=10, tried=None):
    """Which executions were compiled; a recorded update takes seconds[0], a compiled one [1]."""
    now = [0.0]
    tried = [] if tried is None else tried
    tuner = JitAutotuner(library, clock=lambda: now[0])
    tuner.expect(to_come)
    tuner.start()
    made = []

    def trial(compiled):
        tried.append(compiled is library)
        return seconds[compiled is library]

    for _ in range(executions):
        made.append(tuner.choose(lambda: trial) is library)
        now[0] += updates * seconds[made[-1]]
        tuner.after(updates)
    return tuner, made


def test_nothing_is_looked_for_where_nothing_was_ever_kept():
    """Nobody who has never compiled anything pays for it."""
    library = Library()
    tuner, made = run(library, (0.001, 0.0005), to_come=1000)
    assert library.started == []
    assert not any(made)
    assert tuner.explain() == []
    assert tuner.jit is None


def test_what_was_kept_is_used_from_the_first_update_on():
    """So that the bits of a run depend neither on when it was found nor on device_iterations."""
    library = Library(kept=True)
    tuner, made = run(library, (0.001, 0.0005), to_come=1000)
    assert library.started == [False]
    assert all(made)
    assert tuner.jit == "inductor"
    assert tuner.explain() == ["Compiled updates take 0.50 of the time, and are kept."]


class Explained:
    """A part of the training that says how it runs."""

    jit = None

    def __init__(self, *lines):
        self.explain = lambda: list(lines)


def explained(lines):
    """How a way is explained whose updates of these shapes say these lines."""
    way = autotune.CompiledWay(None, None, None, None)
    for shape, line in lines.items():
        kind = autotune._Kind(object(), (1,))
        way._by_kind[kind], way._shapes[kind] = Explained(*line), shape
    return way.explain()


KEPT = "Compiled updates take {} of the time, and are kept."
LEFT = "Compiled updates take {} of the time, and are not used."


def test_shapes_that_differ_in_figures_alone_are_one_sentence():
    """A net that sees texts of forty lengths had forty lines."""
    shapes = [f"(8, {length})" for length in range(40)]
    took = [f"0.{10 + (7 * place) % 40}" for place in range(40)]
    lines = {shape: [KEPT.format(time)] for shape, time in zip(shapes, took)}
    assert explained(lines) == [KEPT.format("0.10 to 0.49")]
    lines.update({shape: [LEFT.format("0.97")] for shape in shapes[::3]})
    lines[shapes[1]] = []
    assert explained(lines) == [
        f"Batches of 14 shapes, such as (8, 0); (8, 3); (8, 6): {LEFT.format('0.97')}",
        f"Batches of 25 shapes, such as (8, 2); (8, 4); (8, 5): {KEPT.format('0.11 to 0.49')}",
    ]


def test_a_few_shapes_are_all_listed():
    """And what runs in another way has a sentence of its own."""
    failed = ["Updates run as recorded, not compiled: no compiler."]
    lines = {"(8, 2)": [KEPT.format("0.5")], "(8, 3)": failed, "(8, 4)": [KEPT.format("0.5")]}
    assert explained(lines) == [
        f"Batches of (8, 2); (8, 4): {KEPT.format('0.5')}",
        f"Batches of (8, 3): {failed[0]}",
    ]


def test_what_was_measured_once_holds_for_the_process():
    library, tried = Library(kept=True), []
    run(library, (0.1, 0.05), to_come=1000, tried=tried)
    measured = len(tried)
    tuner, made = run(library, (0.1, 0.2), to_come=1000, tried=tried)
    assert len(tried) == measured
    assert all(made)
    assert tuner.explain() == ["Compiled updates are kept, as was measured before."]


@pytest.mark.parametrize(
    ("updates", "operators", "seconds", "compiles"),
    [
        # 100 operators of 5 us each: 0.5 ms an update, and 40 s have to be saved.
        (79_000, 100, 0.01, False),
        (81_000, 100, 0.01, True),
        # No more than seven tenths of an update.
        (79_000, 1000, 0.000_714, False),
        (81_000, 1000, 0.000_714, True),
        (10_000, 1000, 1.0, True),
        (1_000_000, 0, 1.0, False),
    ],
)
def test_it_is_compiled_where_the_time_to_come_pays_for_it(updates, operators, seconds, compiles):
    library = Library(operators=operators)
    run(library, (seconds, seconds), to_come=updates, executions=2)
    assert library.started == ([True] if compiles else [])


def test_a_long_run_compiles_while_it_trains():
    library = Library(after=4)
    tuner, made = run(library, (0.1, 0.05), to_come=100_000)
    assert library.started == [True]
    assert made == [False] * 5 + [True] * 15
    assert tuner.jit == "inductor"


def test_nothing_is_compiled_before_its_kernels_are_settled():
    """What is compiled has its convolutions in the same layout."""
    library = Library()
    library.are_kernels_settled = False
    run(library, (0.1, 0.05), to_come=100_000)
    assert library.started == []
    library.are_kernels_settled = True
    run(library, (0.1, 0.05), to_come=100_000, executions=1)
    assert library.started == [True]


def test_what_is_no_faster_is_not_used():
    tuner, made = run(Library(kept=True), (0.1, 0.095), to_come=100_000)
    assert not any(made)
    assert tuner.jit is None
    assert tuner.explain() == ["Compiled updates take 0.95 of the time, and are not used."]


def test_a_choice_is_within_a_twelfth_of_the_best():
    """What is left out can't be faster than the bound by which it is chosen."""
    assert 1 / timing._WORTH <= 1.08


def test_a_compiler_that_fails_stops_nothing():
    tuner, made = run(Library(fails="no space left\nin line 3"), (0.1, 0.05), to_come=100_000)
    assert not any(made)
    assert tuner.explain() == ["Updates run as recorded, not compiled: no space left"]
    tuner, made = run(Library(refuses="a directory of others"), (0.1, 0.05), to_come=100_000)
    assert not any(made)
    assert tuner.explain() == ["Updates run as recorded, not compiled: a directory of others"]


def test_a_loss_that_is_not_finite_is_for_training_to_tell():
    def trial(compiled):
        raise NonFiniteLossError("the loss is nan", 1, float("nan"))

    tuner = JitAutotuner(Library(kept=True))
    tuner.start()
    assert tuner.choose(lambda: trial) is None
    assert tuner.jit is None


def test_asking_whether_anything_is_kept_makes_no_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("IPUFIT_CACHE_DIR", str(tmp_path / "own"))
    assert not LibraryStore.has_entries("ab")
    assert not (tmp_path / "own").exists()
    LibraryStore().scratch()
    (tmp_path / "own" / "compiled" / "ab-0123").mkdir()
    assert LibraryStore.has_entries("ab")
    assert not LibraryStore.has_entries("cd")


@pytest.fixture
def described(monkeypatch):
    """Compiling is done at once, by running the description as it is; updates made so."""
    made = Made()

    def begin(self, request, compiles):
        update = UpdateFunction(request.form)

        def one(*tensors):
            (made if request.form.blocks else made.alone).append(1)
            return update(*tensors)

        self._run, self.origin = one, "described"

    monkeypatch.setattr(CompiledPart, "_begin", begin)
    monkeypatch.setattr(CompiledPart, "may_be_there", lambda self: True)
    monkeypatch.setattr(training, "missing", lambda: None)
    return made


def trained(net, **work):
    """A copy of the net, its engine and its history; the optimizer has state, and a schedule."""
    engine = EmbeddedEngine()
    model = ipufit.Model(copy.deepcopy(net), engine=lambda: engine)
    jit = work.pop("jit", "auto")
    model.compile("adam", "cross_entropy", jit=jit, ema=ipufit.EMA(), lr_scheduler=halved)
    settings = {"batch_size": 2, "device_iterations": 2, "epochs": 4, "seed": 1, "verbose": 0}
    history = model.fit(*data(42), **{**settings, **work})
    return model, engine, history


def halved(update):
    return 0.5 ** (update // 20)


def let_win(monkeypatch, way):
    """Measure, and choose this one."""

    def seconds_of(calls, measure, *_):
        for _ in range(3):
            for each in calls:
                measure(each)
        return [1.0, 0.5 if way == "inductor" else 1.0]

    monkeypatch.setattr(timing, "seconds_of", seconds_of)


@pytest.mark.few
@pytest.mark.parametrize("way", ["graph", "inductor"])
def test_a_model_that_is_tuned_has_the_same_numbers(described, monkeypatch, way):
    """Whichever wins; what has won is said, and is in History."""
    let_win(monkeypatch, way)
    net = MLP().double()
    model, engine, history = trained(net)
    other, _, expected = trained(net, jit="graph")
    assert_close(model.module, other.module, 1e-10)
    torch.testing.assert_close(
        torch.tensor(history.history["loss"]), torch.tensor(expected.history["loss"])
    )
    assert described
    wins = way == "inductor"
    assert history.params["jit"] == way
    (said,) = engine.explain(model._session.config, {})
    assert said.endswith("and are kept." if wins else "and are not used.")
    assert (len(described) > 40) is wins


def test_a_library_of_micro_batches_is_for_the_updates_that_need_it_alone(described, monkeypatch):
    """Full updates run as recorded where that is faster, also beside a smaller one."""
    tried = []

    def seconds_of(calls, measure, *_):
        before = len(described.alone)
        for each in calls:
            measure(each)
        tried.append(len(described.alone) > before)
        return [1.0, 0.5 if tried[-1] else 1.0]

    monkeypatch.setattr(timing, "seconds_of", seconds_of)
    net = MLP().double()
    modules, made = [], []
    for iterations in (1, 11):
        before = len(described.alone)
        how = {"gradient_accumulation": 2, "device_iterations": iterations}
        model, engine, _ = trained(net, **how)
        modules.append(model.module)
        made.append(len(described.alone) - before)
    # Each of four epochs ends with one; it was tried once.
    assert made == [5, 4]
    assert sorted(tried) == [False, True]
    assert_equal(*modules)
    plain, _, _ = trained(net, jit="graph", gradient_accumulation=2)
    assert_close(modules[0], plain.module, 1e-10)
    assert engine.training.way.explain() == [
        "Compiled updates are not used, as was measured before.",
        "Compiled micro-batches are kept, as was measured before.",
    ]


@pytest.fixture
def begun(monkeypatch):
    """What is begun to be compiled, where an update takes a second, and compiling six."""
    begun, now, run = [], [0.0], UpdateRunner.run

    def timed(runner, execution):
        now[0] += len(execution.updates)
        return run(runner, execution)

    def start(part, compiles=True):
        begun.append((part.title, *part._example.leaves[0].shape[:2]))

    monkeypatch.setattr(UpdateRunner, "run", timed)
    monkeypatch.setattr(CompiledPart, "start", start)
    monkeypatch.setattr(CompiledPart, "may_be_there", lambda self: False)
    make = functools.partial(JitAutotuner, clock=lambda: now[0])
    monkeypatch.setattr(autotune.AutotunedWay, "_make", lambda way, compiled: make(compiled))
    monkeypatch.setattr(autotune, "_CALL", 1.0)
    monkeypatch.setattr(autotune, "_COMPILATION", 6.0)
    monkeypatch.setattr(training, "missing", lambda: None)
    return begun


@pytest.mark.parametrize(
    ("epochs", "expected"),
    # Twelve seconds have to be saved, by 18 updates: seven tenths of each.
    [(1, []), (2, [("updates", 4, 1)]), (40, [("updates", 4, 1), ("updates", 3, 1)])],
)
def test_a_tail_is_compiled_where_enough_of_them_are_to_come(epochs, expected, begun):
    """One in each epoch of 21 updates."""
    model = ipufit.Model(MLP().double(), engine="embedded")
    model.compile("sgd", "cross_entropy")
    model.fit(*data(83), batch_size=4, epochs=epochs, verbose=0)
    assert begun == expected


@needs_onednn
@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(("accumulated", "waits"), [(1, True), (2, False)])
def test_compiling_waits_for_kernels_that_are_timed_in_training(
    accumulated, waits, begun, monkeypatch
):
    """Those of a micro-batch that is part of a larger batch never run by themselves."""
    monkeypatch.setattr(select_kernels, "fastest", lambda *_, **__: "kernels")
    monkeypatch.setattr(select_kernels, "_BEGIN", float("inf"))
    model = ipufit.Model(MLP(), engine="embedded")
    model.compile("sgd", "cross_entropy")
    work = {"batch_size": 4, "gradient_accumulation": accumulated, "epochs": 40, "verbose": 0}
    x, y = data(80)
    model.fit(x.float(), y, **work)
    assert (begun == []) == waits
    monkeypatch.setattr(select_kernels, "_BEGIN", 0.0)
    monkeypatch.setattr(select_kernels, "_SHARE", float("inf"))
    model.fit(x.float(), y, **work)
    assert begun


@pytest.mark.parametrize("is_compiling", [False, True])
def test_micro_batches_of_updates_that_mix_shapes_are_counted(is_compiling, begun, monkeypatch):
    """Half a second for each of two; one compiler at a time."""
    busy = property(lambda part: is_compiling and bool(begun))
    monkeypatch.setattr(CompiledPart, "is_compiling", busy)
    model = ipufit.Model(Pooled().double(), engine="embedded")
    model.compile("sgd", "mse")
    batches = sequences([(3, 4), (5, 4)] * 30)
    model.fit(batches, gradient_accumulation=2, epochs=1, verbose=0)
    assert begun == []
    model.fit(batches, gradient_accumulation=2, epochs=2, verbose=0)
    assert begun == [("micro-batches", 4, 3), ("micro-batches", 4, 5)][: 1 if is_compiling else 2]


@pytest.mark.long
@pytest.mark.parametrize("way", ["graph", "inductor"])
def test_updates_that_were_tried_leave_no_trace(described, monkeypatch, way):
    """Weights, state of the optimizer, averages and schedule go on as if nothing had been tried."""
    let_win(monkeypatch, way)
    net = MLP().double()
    first, _, history = trained(net)
    tried = len(described)
    again, _, other = trained(net, device_iterations=5)
    assert history.history["loss"] == other.history["loss"]
    assert_equal(first.module, again.module)
    assert tried == len(described) - tried + 3
    if way == "graph":
        plain, _, expected = trained(net, jit="graph")
        assert history.history["loss"] == expected.history["loss"]
        assert_equal(first.module, plain.module)


@pytest.mark.long
def test_a_state_is_copied_for_trials_alone(described, monkeypatch):
    """What was measured in this process needs no copy of the state in a later fit."""
    copies = []
    snapshot = TrainingState.snapshot
    monkeypatch.setattr(TrainingState, "snapshot", lambda live: copies.append(1) or snapshot(live))
    let_win(monkeypatch, "inductor")
    net = MLP().double()
    trained(net)
    assert copies == [1]
    trained(net)
    assert copies == [1]


def test_a_run_that_goes_on_keeps_the_choice(described, monkeypatch, tmp_path):
    """Its bits would be others."""
    let_win(monkeypatch, "inductor")
    net = MLP().double()
    whole, _, _ = trained(net)
    trained(net, epochs=2, checkpoint=tmp_path)
    monkeypatch.setattr(timing, "_known", {})
    monkeypatch.setenv("IPUFIT_CACHE_DIR", str(tmp_path / "of another machine"))
    let_win(monkeypatch, "graph")
    resumed, engine, _ = trained(net, checkpoint=ipufit.Checkpoint(tmp_path, resume="auto"))
    assert engine.way == "inductor"
    assert_equal(whole.module, resumed.module)


@pytest.mark.long
def test_a_run_without_a_full_micro_batch_trains():
    """Fewer samples than a micro-batch has: there is nothing that a library could make."""
    net = MLP().double()
    other = copy.deepcopy(net)
    x, y = data(5)
    model = ipufit.Model(net, engine="embedded")
    model.compile(torch.optim.SGD(net.parameters(), lr=0.1), "cross_entropy")
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
    assert_close(net, other)
