"""What a fit writes down."""

import json
import os
import warnings

import pytest
import torch
from torch import nn

import ipufit
import ipufit.testing
from ipufit.callbacks import Callback, LambdaCallback
from ipufit.errors import ConfigurationError, NonFiniteLossError
from ipufit.report import recorder
from ipufit.report.run import Run
from ipufit.utils.phase_timer import PHASES
from tests.told import message

X = torch.arange(84, dtype=torch.float64).reshape(21, 4) / 84
Y = (torch.arange(21) * 7) % 3


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    """The page has tests of its own."""
    monkeypatch.setattr(recorder, "write_page", lambda folder: None)


class Net(nn.Module):
    """Has what draws and what changes in forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def made(engine="embedded", **options):
    """A compiled model, always the same."""
    torch.manual_seed(0)
    model = ipufit.Model(Net().double(), engine=engine)
    given = {"optimizer": "adam", "loss": "cross_entropy", "metrics": ["accuracy"], **options}
    model.compile(**given)
    return model


def fitted(model, report, **options):
    """Train it; into a folder alone, without timing single operators."""
    given = {"batch_size": 3, "epochs": 3, "seed": 5, "verbose": 0, **options}
    report = report if isinstance(report, ipufit.Report) else ipufit.Report(report, operators=False)
    callbacks = [*given.pop("callbacks", ()), report]
    model.fit(X, Y, callbacks=callbacks, **given)
    return Run.read(report.folder)


@pytest.mark.grid
@pytest.mark.parametrize("iterations", [1, 2, 10])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_executions_are_those_of_the_run(tmp_path, iterations, accumulation):
    """Their samples and losses are those of History, whatever the plan."""
    model = made()
    run = fitted(model, tmp_path, device_iterations=iterations, gradient_accumulation=accumulation)
    rows, facts = run.rows, run.facts
    updates = -(-7 // accumulation)
    assert len(rows["begin"]) == 3 * -(-updates // iterations)
    assert sum(rows["updates"]) == 3 * updates == facts["params"]["updates_done"]
    for epoch in range(3):
        own = [place for place, number in enumerate(rows["epoch"]) if number == epoch]
        assert sum(rows["samples"][place] for place in own) == 21
        loss = sum(rows["loss"][place] * rows["samples"][place] for place in own) / 21
        assert loss == pytest.approx(model.history.history["loss"][epoch], abs=1e-12)
    starts = rows["first_update"]
    assert starts == [sum(rows["updates"][:place]) for place in range(len(starts))]
    assert set(rows["learning_rate"]) == {0.001}


def test_all_phases_together_are_the_time(tmp_path):
    """Of the run, of each epoch, and of each execution."""
    run = fitted(made(), tmp_path, validation_split=1 / 7)
    facts, rows = run.facts, run.rows
    assert list(facts["phases"]) == list(PHASES)
    assert sum(facts["phases"].values()) == pytest.approx(facts["seconds"])
    assert facts["phases"]["capture"] > 0
    for epoch in facts["epochs"]:
        assert sum(epoch["phases"].values()) == pytest.approx(epoch["seconds"])
        assert epoch["phases"]["validation"] > 0
        assert epoch["phases"]["compute"] > 0
    ends = [begin + sum(own) for begin, own in zip(rows["begin"], zip(*(rows[p] for p in PHASES)))]
    for end, begin in zip(ends, rows["begin"][1:]):
        assert end <= begin + 1e-9


@pytest.mark.few("1000000000.0")
@pytest.mark.parametrize("together", [0.0, 1e9])
def test_short_executions_have_rows_together_after_the_first_ones(tmp_path, together, monkeypatch):
    """None has those of two epochs, or what an epoch does after them."""
    monkeypatch.setattr(recorder, "_FIRST", 3)
    monkeypatch.setattr(recorder, "_SHORTEST", together)
    model, seen = made(), []
    show = LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs["loss"]))
    run = fitted(model, tmp_path, validation_split=1 / 7, callbacks=[show])
    rows = run.rows
    counts = [1, 1, 1, 3, 6, 6] if together else [1] * 18
    assert rows["executions"] == rows["updates"] == counts
    assert rows["samples"] == [3 * count for count in counts]
    assert rows["first_update"] == [sum(counts[:place]) for place in range(len(counts))]
    assert [each["executions"] for each in run.facts["epochs"]] == [6, 6, 6]
    assert rows["validation"] == [0.0] * len(counts)
    for epoch in range(3):
        own = [place for place, number in enumerate(rows["epoch"]) if number == epoch]
        losses = [rows["loss"][place] * rows["samples"][place] for place in own]
        assert sum(losses) / 18 == pytest.approx(model.history.history["loss"][epoch], abs=1e-12)
        compute = sum(rows["compute"][place] for place in own)
        assert compute == pytest.approx(run.facts["epochs"][epoch]["phases"]["compute"])
    # One alone has the number that callbacks see, to the last bit.
    assert rows["loss"][0] == seen[0]


@pytest.mark.parametrize("way", [{"jit": "graph"}, {}, {"run_eagerly": True}])
def test_a_report_changes_no_number(tmp_path, way):
    """Weights, statistics and history have the same bits with and without."""
    plain, watched = made(**way), made(**way)
    how = {"gradient_accumulation": 2, "validation_split": 1 / 7}
    plain.fit(X, Y, batch_size=3, epochs=3, seed=5, verbose=0, **how)
    fitted(watched, ipufit.Report(tmp_path), **how)
    assert watched.history.history == plain.history.history
    pairs = zip(plain.module.state_dict().values(), watched.module.state_dict().values())
    assert all(torch.equal(one, other) for one, other in pairs)


def test_facts_say_what_was_run(tmp_path):
    """Settings, values, layers, stages and the machine."""
    model = made(parallel=ipufit.Parallel(stages={"first": 0, "last": 1}))
    facts = fitted(model, tmp_path, ipus=2, gradient_accumulation=3).facts
    assert (facts["status"], facts["error"], facts["title"]) == ("finished", "", "Net")
    assert facts["params"]["seed"] == 5
    assert facts["params"]["device_iterations"] == 1
    assert facts["environment"]["torch"] == str(torch.__version__)
    assert facts["environment"]["engine"] == "embedded"
    values = [value for _, value in facts["history"]["history"]["loss"]]
    assert values == model.history.history["loss"]
    layers = {layer["name"]: layer for layer in facts["layers"]}
    assert list(layers) == ["", "first", "norm", "drop", "last"]
    assert layers["first"]["parameters"] == 30
    assert layers["first"]["shape"] == "(3, 6)"
    assert layers[""]["file"] == __file__
    assert layers["first"]["file"] is None
    plan = model.plan(gradient_accumulation=3)
    assert facts["plan"]["utilisation"] == plan.to_dict()["utilisation"]
    assert facts["plan"]["timeline"]["utilisation"] == plan.utilisation()
    tasks = [
        [task.stage, task.micro_batch, task.is_backward, task.begin, task.end]
        for task in plan.timeline().tasks
    ]
    assert facts["plan"]["timeline"]["tasks"] == tasks


def test_what_has_no_plan_says_why(tmp_path):
    """A strategy whose memory can't be told."""
    model = made(parallel=ipufit.Parallel(stages={"first": 0, "last": 1}, strategy="serial_phased"))
    facts = fitted(model, tmp_path, ipus=2).facts
    assert "phases keep little on the IPU" in facts["plan"]["missing"]


@pytest.mark.long
def test_on_an_ipu_compiling_is_told_apart(tmp_path):
    """The stand-in has the same report, but for single operators."""
    model = ipufit.Model(nn.Linear(4, 3), engine="ipu-standin")
    model.compile("sgd", "cross_entropy")
    model.fit(X.float(), Y, batch_size=3, verbose=0, callbacks=[ipufit.Report(tmp_path)])
    facts = Run.read(os.fspath(tmp_path)).facts
    assert facts["phases"]["capture"] > 0
    assert facts["phases"]["compute"] > 0
    assert facts["operators"]["missing"] == "the ipu-standin engine can't time single operators"


class Raising(Callback):
    """Fails in the second epoch."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise self.error


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ValueError("no <b>good</b>"), "failed", "ValueError: no <b>good</b>"),
        (KeyboardInterrupt(), "interrupted", ""),
        (SystemExit(3), "interrupted", ""),
    ],
)
def test_a_run_that_ends_early_has_its_report(tmp_path, error, status, text):
    """With all that had happened, and the error as it was raised."""
    model = made()
    with pytest.raises(type(error)):
        fitted(model, tmp_path, callbacks=[Raising(error)])
    run = Run.read(os.fspath(tmp_path))
    assert (run.facts["status"], run.facts["error"]) == (status, text)
    assert len(run.rows["begin"]) == 7
    assert len(run.facts["epochs"]) == 1


@pytest.mark.long
def test_a_loss_that_is_not_finite_ends_the_report(tmp_path):
    """Numbers that JSON has not are text."""
    model = made("embedded", optimizer="sgd")
    bad = X.clone()
    bad[20] = float("nan")
    with pytest.raises(NonFiniteLossError):
        model.fit(
            bad, Y, batch_size=3, shuffle=False, verbose=0, callbacks=[ipufit.Report(tmp_path)]
        )
    run = Run.read(os.fspath(tmp_path))
    assert run.facts["status"] == "failed"
    assert run.facts["error"].startswith("NonFiniteLossError: the loss must be finite")
    assert len(run.rows["begin"]) == 6
    with open(tmp_path / "run.json", encoding="utf-8") as file:
        json.load(file, parse_constant=pytest.fail)


@pytest.mark.long
def test_while_it_runs_everything_can_be_read(tmp_path):
    """After each epoch, from another process if need be."""
    seen = []

    class Looks(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            run = Run.read(os.fspath(tmp_path))
            seen.append((run.facts["status"], len(run.rows["begin"]), len(run.facts["epochs"])))

    fitted(made(), tmp_path, callbacks=[Looks()])
    assert seen == [("running", 0, 0), ("running", 7, 1), ("running", 14, 2)]


@pytest.mark.long
def test_warnings_are_heard_and_still_shown(tmp_path):
    """Each text once, with how often it came."""

    class Warns(Callback):
        def on_epoch_end(self, epoch, logs=None):
            warnings.warn("mind <the> gap", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="mind <the> gap") as shown:
        facts = fitted(made(), tmp_path, callbacks=[Warns()]).facts
    assert len(shown) == 3
    (heard,) = [each for each in facts["warnings"] if each["kind"] == "warning"]
    assert (heard["text"], heard["count"]) == ("mind <the> gap", 3)
    assert heard["place"].rpartition(":")[0] == __file__
    before = warnings.showwarning
    fitted(made(), tmp_path / "other")
    assert warnings.showwarning is before


def test_a_run_that_goes_on_has_one_report(tmp_path):
    """What was trained after the checkpoint, and lost, is not counted twice."""

    class Stops(Callback):
        def __init__(self, at):
            super().__init__()
            self.left = at

        def on_train_batch_end(self, batch, logs=None):
            self.left -= 1
            if not self.left:
                raise ValueError("a power cut")

    kept = {"checkpoint": tmp_path / "run", "epochs": 3}
    with pytest.raises(ValueError, match="a power cut"):
        fitted(made(), tmp_path / "run", callbacks=[Stops(12)], **kept)
    first = Run.read(os.fspath(tmp_path / "run"))
    assert len(first.rows["begin"]) == 11
    kept["checkpoint"] = ipufit.Checkpoint(tmp_path / "run", resume="auto")
    run = fitted(made(), tmp_path / "run", callbacks=[Stops(99)], **kept)
    assert run.rows["first_update"] == [float(update) for update in range(21)]
    assert [epoch["epoch"] for epoch in run.facts["epochs"]] == [0, 1, 2]
    assert run.facts["begun"] == first.facts["begun"]
    assert run.facts["seconds"] > first.facts["seconds"]
    assert sum(run.facts["phases"].values()) == pytest.approx(run.facts["seconds"])
    assert run.rows["begin"] == sorted(run.rows["begin"])


@pytest.mark.long
def test_a_device_that_is_used_again_goes_on_with_the_report(tmp_path):
    """A restart is a warning in it."""
    model = made()
    again = {"checkpoint": ipufit.Checkpoint(tmp_path / "c", every_updates=2, max_restarts=1)}
    with ipufit.testing.inject("ipu_reset", 5), pytest.warns(UserWarning, match="restart 1 of 1"):
        run = fitted(model, tmp_path / "r", **again)
    assert run.facts["status"] == "finished"
    assert run.rows["first_update"] == [float(update) for update in range(21)]


def test_trying_everything_out_writes_no_report(tmp_path):
    """And History says so."""
    model = made()
    model.fit(
        X,
        Y,
        batch_size=3,
        loading=ipufit.Loading(fast_dev_run=True),
        verbose=0,
        callbacks=[ipufit.Report(tmp_path / "r")],
    )
    assert not (tmp_path / "r").exists()
    assert "report" in model.history.params["left_out_callbacks"]


def test_a_report_is_one_of_the_callbacks_of_fit(tmp_path):
    """A run has one, and evaluate has none."""
    report = ipufit.Report(tmp_path / "run")
    assert message(made().fit, X, Y, callbacks=[report, ipufit.Report("other")], verbose=0) == (
        f"callbacks must have at most one Report, got 2: {report!r}, Report('other'). Leave all "
        "but one out."
    )
    assert message(made().evaluate, X, Y, callbacks=[report], verbose=0) == (
        f"callbacks of evaluate can't include a Report, which records only fit, got {report!r}. "
        "Leave it out."
    )
    assert not (tmp_path / "run").exists()
    made().fit(X, Y, callbacks=report, verbose=0)
    assert Run.read(report.folder).facts["status"] == "finished"


TAKEN = "this one contains the report of another run. Pass another folder, or ipufit.Report("


@pytest.mark.long
def test_a_report_is_not_written_over_unasked(tmp_path):
    """Before any work."""
    fitted(made(), tmp_path)
    model = made()
    before = (tmp_path / "run.json").read_text()
    with pytest.raises(ConfigurationError) as caught:
        fitted(model, tmp_path)
    assert TAKEN in str(caught.value)
    assert str(caught.value).endswith(", overwrite=True).")
    assert (tmp_path / "run.json").read_text() == before
    run = fitted(model, ipufit.Report(tmp_path, overwrite=True), epochs=1)
    assert len(run.rows["begin"]) == 7


BAD = [
    (3, "folder of Report must be the path of a folder, got 3. Use for example 'runs/1'."),
    ("", "folder of Report must be the path of a folder, got ''. Use for example 'runs/1'."),
    (
        __file__,
        f"folder of Report must be a folder, but {__file__!r} is a file. Pass another path.",
    ),
    ("/proc/here", "folder of Report must be writable, but '/proc/here' is not: "),
]


@pytest.mark.parametrize(("place", "text"), BAD)
def test_what_can_not_be_is_refused(place, text):
    """Before any work."""
    model = made()
    with pytest.raises(ConfigurationError) as caught:
        model.fit(X, Y, callbacks=[ipufit.Report(place)], verbose=0)
    assert text in str(caught.value)
    assert model.capture_seconds == 0


BAD_REPORTS = [
    ({"folder": None}, "folder of Report must be the path of a folder, got None."),
    ({"folder": "r", "overwrite": 1}, "overwrite of Report must be True or False, got 1."),
    ({"folder": "r", "operators": None}, "operators of Report must be True or False, got None."),
    (
        {"folder": "r", "profiler": True},
        "profiler of Report must be an object like torch.profiler.profile(...), which has start, "
        "step and stop, got True. Leave it out for none.",
    ),
]


@pytest.mark.parametrize(("options", "text"), BAD_REPORTS)
def test_a_report_that_can_not_be_is_refused(options, text):
    """When it is made."""
    assert text in message(ipufit.Report, **options)


def test_without_plotly_there_is_no_report(monkeypatch, tmp_path):
    """Which is said before any work."""
    monkeypatch.setattr("ipufit.report.settings.importlib.util.find_spec", lambda name: None)
    model = made()
    assert message(fitted, model, tmp_path) == (
        "Report draws its curves with plotly, which is not installed. Run: "
        "pip install ipufit[report]"
    )
    assert model.capture_seconds == 0


@pytest.mark.long
def test_operators_need_not_be_timed(tmp_path):
    """It takes a moment, after the first epoch."""
    facts = fitted(made(), ipufit.Report(tmp_path, operators=False), epochs=1).facts
    assert facts["operators"] == {"missing": "they were not asked for: Report(operators=False)"}


def test_a_folder_without_a_report_is_refused(tmp_path):
    """By whoever reads it."""
    with pytest.raises(ConfigurationError, match="a report must be a folder written by ipufit"):
        Run.read(os.fspath(tmp_path))
    (tmp_path / "run.json").write_text('{"format": "other"}')
    with pytest.raises(ConfigurationError, match=r"must have the format 'ipufit\.Report/1'"):
        Run.read(os.fspath(tmp_path))


@pytest.mark.few
@pytest.mark.parametrize("what", ["append_rows", "write_facts"])
def test_a_full_disk_ends_the_report_and_not_the_training(tmp_path, monkeypatch, what):
    """Said once."""
    model, plain = made(), made()
    written = []

    def full(path, *_):
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)

    class Fills(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            monkeypatch.setattr(f"ipufit.report.recorder.{what}", full)

    text = r"the report in .* ends here, because it can't be written any more: .*No space left"
    with pytest.warns(UserWarning, match=text) as caught:
        history = model.fit(
            X,
            Y,
            batch_size=3,
            epochs=4,
            seed=5,
            verbose=0,
            callbacks=[Fills(), ipufit.Report(tmp_path)],
        )
    assert len(caught) == 1
    plain.fit(X, Y, batch_size=3, epochs=4, seed=5, verbose=0)
    assert history.history == plain.history.history


@pytest.mark.long
def test_facts_of_many_short_epochs_are_written_seldom(tmp_path, monkeypatch):
    """After the first few, as often as a hundredth of the time allows, and at the end."""
    monkeypatch.setattr("ipufit.report.recorder._FEW", 1)
    monkeypatch.setattr("ipufit.report.recorder._APART", 1e9)
    seen = []

    class Looks(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            run = Run.read(os.fspath(tmp_path))
            seen.append((len(run.facts["epochs"]), len(run.rows["begin"])))

    run = fitted(made(), tmp_path, callbacks=[Looks()])
    assert seen == [(0, 0), (1, 7), (1, 14)]
    assert [epoch["epoch"] for epoch in run.facts["epochs"]] == [0, 1, 2]
    assert run.facts["status"] == "finished"
