"""Profiling channels: spans that torch's profiler shows."""

import copy

import pytest
import torch

import ipufit.poptorch as poptorch
from ipufit.poptorch._tracing import Trace, traced


class Worker:
    def __init__(self):
        self.done = []

    def work(self, amount, times=1):
        self.done.append(amount * times)
        return len(self.done)


def spans(act):
    """The names of the spans that the profiler sees, and how often each came."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        act()
    events = [event.name for event in profile.events()]
    return {name: events.count(name) for name in events if name.startswith("Mine.")}


def test_a_tracepoint_is_a_span():
    channel = poptorch.profiling.Channel("Mine")

    def act():
        with channel.tracepoint("outer"), channel.tracepoint("inner"):
            torch.ones(2).sum()

    assert spans(act) == {"Mine.outer": 1, "Mine.inner": 1}


def test_every_call_of_an_instrumented_method_is_a_span():
    worker = Worker()
    assert poptorch.profiling.Channel("Mine").instrument(worker, "work") is worker
    results = []
    assert spans(lambda: results.extend([worker.work(2), worker.work(2, times=3)])) == {
        "Mine.work": 2
    }
    assert (results, worker.done) == ([1, 2], [2, 6])
    assert "work" not in vars(Worker())
    # Data loaders copy and send what they instrument.
    assert copy.deepcopy(worker).work(1) == 3


def test_a_method_that_is_not_there_is_refused():
    with pytest.raises(AttributeError, match="rest"):
        poptorch.profiling.Channel("Mine").instrument(Worker(), "rest")


def test_a_span_does_not_get_into_a_recording():
    channel = poptorch.profiling.Channel("Mine")

    def act():
        with traced(Trace(training=False)), channel.tracepoint("inside"):
            torch.ones(2).sum()

    assert spans(act) == {}
