"""A profiler of torch's that looks on: what it sees, what becomes of it, and when it is refused."""

import collections
import json
import warnings

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import ipufit
from ipufit.callbacks import Callback, LambdaCallback
from ipufit.errors import ConfigurationError
from ipufit.report import recorder
from ipufit.report.run import FACTS, TORCH_TRACE

# torch's own remark on what it keeps of several cycles.
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    """The page has tests of its own."""
    monkeypatch.setattr(recorder, "write_page", lambda folder: None)


def fit(report, epochs=2, callbacks=(), **options):
    """A model trained in four executions an epoch."""
    torch.manual_seed(0)
    model = ipufit.Model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    model.compile("sgd", "mse")
    data = torch.ones(16, 3), torch.ones(16, 2)
    callbacks = [*callbacks, *([report] if report else [])]
    model.fit(*data, batch_size=4, epochs=epochs, callbacks=callbacks, verbose=0, **options)
    return model


def cpu(**options):
    return profile(activities=[ProfilerActivity.CPU], **options)


def seen(folder):
    """The events of the trace, and how many there are of each of our names."""
    events = json.loads((folder / TORCH_TRACE).read_text())["traceEvents"]
    own = [e for e in events if e.get("ph") == "X" and e["name"].startswith("ipufit ")]
    return own, collections.Counter(event["name"] for event in own)


def within(event, other):
    """Times are given to the microsecond, at worst."""
    end, other_end = (each["ts"] + each["dur"] for each in (event, other))
    return other["ts"] - 2 <= event["ts"] and end <= other_end + 2


@pytest.mark.long
def test_executions_and_phases_have_names_in_its_trace(tmp_path):
    fit(ipufit.Report(tmp_path, profiler=cpu()))
    events, counts = seen(tmp_path)
    assert counts["ipufit execution"] == counts["ipufit compute"] == counts["ipufit metrics"] == 8
    # And one look at the end of each epoch that finds no more.
    assert counts["ipufit data"] == 10
    executions = [event for event in events if event["name"] == "ipufit execution"]
    for name, count in (("compute", 1), ("metrics", 1), ("data", 0)):
        own = [event for event in events if event["name"] == f"ipufit {name}"]
        for execution in executions:
            assert sum(within(event, execution) for event in own) == count


def test_a_schedule_counts_executions(tmp_path):
    fit(
        ipufit.Report(
            tmp_path, profiler=cpu(schedule=schedule(wait=1, warmup=1, active=2, repeat=1))
        )
    )
    _, counts = seen(tmp_path)
    assert counts["ipufit execution"] == counts["ipufit compute"] == 2


@pytest.mark.long
def test_a_handler_gets_every_cycle_and_no_file_is_written(tmp_path):
    got = []
    looks_on = cpu(
        schedule=schedule(wait=0, warmup=1, active=1, repeat=2),
        on_trace_ready=lambda p: got.append([e.key for e in p.key_averages()]),
    )
    fit(ipufit.Report(tmp_path, profiler=looks_on))
    assert [names.count("ipufit execution") for names in got] == [1, 1]
    assert not (tmp_path / TORCH_TRACE).exists()


@pytest.mark.few
@pytest.mark.parametrize("how", [{"wait": 50, "warmup": 1}, {"wait": 0, "warmup": 50}])
def test_a_schedule_that_never_comes_to_its_turn_is_said(how, tmp_path):
    looks_on = cpu(schedule=schedule(active=1, **how))
    with pytest.warns(UserWarning, match="^profiler of Report") as warned:
        fit(ipufit.Report(tmp_path, profiler=looks_on))
    assert str(warned[0].message) == (
        "profiler of Report recorded nothing, so there is no torch_trace.json: at the end of the "
        "run its schedule was waiting or warming up. Choose a schedule that ends before the run "
        "does, or pass on_trace_ready."
    )
    assert not (tmp_path / TORCH_TRACE).exists()
    assert json.loads((tmp_path / FACTS).read_text())["status"] == "finished"


def test_it_changes_no_bit_of_the_weights(tmp_path):
    plain, looked_at = fit(None), fit(ipufit.Report(tmp_path, profiler=cpu()))
    for one, other in zip(plain.module.parameters(), looked_at.module.parameters()):
        assert torch.equal(one, other)


@pytest.mark.long
def test_a_run_that_fails_stops_it_and_leaves_its_trace(tmp_path):
    def fail(update, logs):
        if update == 2:
            raise ZeroDivisionError

    looks_on = cpu()
    with pytest.raises(ZeroDivisionError):
        fit(
            ipufit.Report(tmp_path, profiler=looks_on),
            callbacks=[LambdaCallback(on_train_batch_end=fail)],
        )
    assert seen(tmp_path)[1]["ipufit compute"] == 3
    assert json.loads((tmp_path / FACTS).read_text())["status"] == "failed"
    # Nothing goes on: another one can start.
    fit(ipufit.Report(tmp_path / "2", profiler=cpu()))


@pytest.mark.long
def test_a_run_that_is_stopped_in_an_epoch_ends_its_execution(tmp_path):
    class Stop(Callback):
        def on_train_batch_end(self, update, logs):
            self.model.stop_training = update == 1

    fit(ipufit.Report(tmp_path, profiler=cpu()), callbacks=[Stop()])
    assert seen(tmp_path)[1]["ipufit execution"] == 2


STARTED = (
    "profiler of Report must be new, but this one was started before: it is running, or was passed "
    "to another fit. Create one for every fit, and let fit start and stop it."
)


@pytest.mark.long
def test_one_that_has_been_used_is_refused(tmp_path):
    looks_on = cpu()
    fit(ipufit.Report(tmp_path / "1", profiler=looks_on))
    with pytest.raises(ConfigurationError) as caught:
        fit(ipufit.Report(tmp_path / "2", profiler=looks_on))
    assert str(caught.value) == STARTED
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize("how", [{}, {"schedule": schedule(wait=5, warmup=1, active=1)}])
def test_one_that_runs_is_refused(how, tmp_path):
    with cpu(**how) as looks_on, pytest.raises(ConfigurationError) as caught:
        fit(ipufit.Report(tmp_path / "1", profiler=looks_on))
    assert str(caught.value) == STARTED
    assert not (tmp_path / "1").exists()


def test_it_is_refused_while_another_one_runs(tmp_path):
    with cpu(), pytest.raises(ConfigurationError) as caught:
        fit(ipufit.Report(tmp_path / "1", profiler=cpu()))
    assert str(caught.value) == (
        "profiler of Report can't run together with another profiler, but one is running. Call fit "
        "outside of its `with` block, or leave profiler out: the other one records fit."
    )


@pytest.mark.long
def test_a_profiler_of_the_users_own_sees_operators(tmp_path):
    """And no names of ours: those cost something."""
    with warnings.catch_warnings(), cpu() as looks_on:
        warnings.simplefilter("error")
        fit(None)
    names = {event.key for event in looks_on.key_averages()}
    assert "aten::addmm" in names
    assert not [name for name in names if name.startswith("ipufit")]


def test_anything_with_start_step_and_stop_may_look_on(tmp_path):
    class LooksOn:
        def __init__(self):
            self.calls = collections.Counter()

        def start(self):
            self.calls["start"] += 1

        def step(self):
            self.calls["step"] += 1

        def stop(self):
            self.calls["stop"] += 1

    looks_on = LooksOn()
    fit(ipufit.Report(tmp_path, profiler=looks_on))
    assert looks_on.calls == {"start": 1, "step": 8, "stop": 1}
