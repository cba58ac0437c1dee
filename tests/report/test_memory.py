"""The memory that a report tells is what tensors are given in updates of the same fit."""

import gc
import time

import pytest
import torch

import ipufit
from ipufit.callbacks import Callback
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.profiling.operators import LiveBytes, bytes_in
from ipufit.report import recorder
from ipufit.tracing.capture import capture
from ipufit.tracing.graph_analysis import alive_bytes, peak_bytes
from tests.bench.workloads import LEARNING_RATE, WORKLOADS

PLANS = {
    "one": {},
    "accumulation": {"gradient_accumulation": 4},
    "replicas": {"ipus": 4},
    "long": {"gradient_accumulation": 3, "device_iterations": 4},
}


class Moments(Callback):
    """When the third execution begins, and when the fourth has ended, in nanoseconds."""

    def __init__(self):
        super().__init__()
        self.begins, self.ends = [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begins.append(time.time_ns())

    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.time_ns())


def fitted(name, jit, how, **more):
    """One epoch of four executions of a workload of the benchmarks."""
    work = WORKLOADS[name]
    per_execution = work.batch
    for count in how.values():
        per_execution *= count
    x, y = work.data(4 * per_execution)
    module = work.module()
    model = ipufit.Model(module, engine=EmbeddedEngine)
    optimizer = torch.optim.Adam(module.parameters(), LEARNING_RATE)
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"], jit=jit)
    model.fit(x, y, batch_size=work.batch, seed=0, verbose=0, **how, **more)


def told(name, jit, how, monkeypatch, folder):
    """What the report says of it."""
    found, original = {}, recorder.Recorder._profiled

    def kept(self):
        found.update(original(self))
        return dict(found)

    monkeypatch.setattr(recorder.Recorder, "_profiled", kept)
    monkeypatch.setattr(recorder, "write_page", lambda folder: None)
    fitted(name, jit, how, callbacks=ipufit.Report(folder))
    return found["memory"]


def measured(name, jit, how):
    """The most that torch has given out to tensors while updates are made, as its profiler saw.

    Everything is made while it looks, but for the data, which is the user's.
    """
    # Of what was made before, nothing is to go while the profiler looks.
    gc.collect()
    moments = Moments()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        fitted(name, jit, how, callbacks=[moments])
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    work = WORKLOADS[name]

    def at(event):
        # Old versions of torch tell microseconds.
        return event.start_ns() if hasattr(event, "start_ns") else 1000 * event.start_us()

    now = most = 0
    for event in sorted(events, key=at):
        now += event.nbytes()
        if moments.begins[2] <= at(event) <= moments.ends[3]:
            most = max(most, now)
    count = 4 * work.batch
    for each in how.values():
        count *= each
    return most - bytes_in(work.data(count))


def check(name, jit, plan, monkeypatch, folder):
    """The total, and the sums that it is made of."""
    how = PLANS[plan]
    memory = told(name, jit, how, monkeypatch, folder)
    assert memory["total"] == sum(memory["fixed"].values()) + memory["peak"]
    assert memory["peak"] == max(point[3] for point in memory["curve"])
    assert memory["total"] == pytest.approx(measured(name, jit, how), rel=0.05)


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "plan", "jit"),
    [("mlp", "long", "graph"), ("mlp", "accumulation", "auto"), ("cnn", "one", "auto")],
)
def test_memory_is_what_is_measured(name, plan, jit, monkeypatch, tmp_path):
    """To 5 %: weights, gradients, Adam's state, samples, and values that come and go."""
    check(name, jit, plan, monkeypatch, tmp_path / "r")


@pytest.mark.long
@pytest.mark.parametrize("jit", ["graph", "auto"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_memory_is_what_is_measured_whatever_the_plan(name, plan, jit, monkeypatch, tmp_path):
    """All models, merged and one by one."""
    check(name, jit, plan, monkeypatch, tmp_path / "r")


def test_values_are_counted_from_when_they_come_until_their_last_use():
    """In closed form: 40 bytes each, and 4 for the sum; a view takes nothing."""

    def step(x):
        first = x + 1
        second = (first * 2).view(5, 2)
        return [second.sum() + first[0]]

    graph = capture(step, [torch.zeros(10)])
    curve = {node.name: alive for node, alive in alive_bytes(graph)}
    assert curve == {
        "arg0_1": 0,
        "add": 40,
        "mul": 80,
        "view": 80,
        "sum_1": 84,
        "select": 44,
        "add_1": 48,
        "output": 4,
    }
    assert peak_bytes(graph) == 84


def test_memory_that_is_shared_is_held_once():
    """By two views of it, until both are gone; what is given does not count."""
    given, whole = torch.zeros(10), torch.zeros(10)
    held = LiveBytes([given])
    held.take([given[:5], (whole[:3], 7)])
    assert held.now == 40
    held.take(whole[3:])
    assert held.now == 40
    held.drop([given[:5], (whole[:3], 7)])
    assert held.now == 40
    held.drop(whole)
    assert held.now == 0
    assert bytes_in([whole, whole[2:], torch.zeros(3)]) == 52
