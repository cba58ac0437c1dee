"""Kernels chosen before training are timed again in it, and the faster ones stay."""

import itertools

import pytest
import torch

from ipufit.core.precision import WithoutAutocast
from ipufit.engines.embedded import timing
from ipufit.engines.embedded.passes import select_kernels
from ipufit.engines.embedded.passes.select_kernels import KernelTrial, Lowered
from tests.engines.embedded.test_lowerings import (
    Draws,
    Pictures,
    all_kernels,
    fitted,
    later_process,
    needs_onednn,
)

__all__ = ["all_kernels", "later_process"]

KEY = ("a program",)
SETTLED = (timing.SETTLED, *KEY)


class Kernels:
    """Two ways to add one to a buffer, which take as long as is said, and what has run so far."""

    def __init__(self, present, seconds, worth=0.95):
        self.now, self.ran = 0.0, []
        self.seconds = seconds
        ways = {name: Lowered(self._way(name), name, f"Runs {name}.") for name in seconds}
        (other,) = set(ways) - {present}
        self.lowered = ways[present]
        arguments = torch.zeros(1), torch.ones(1)
        self.trial = KernelTrial(
            self.lowered,
            lambda: ways[other],
            lambda tensors: [tensors[0].clone(), *tensors[1:]],
            KEY,
            worth,
            lambda: self.now,
        )
        self.lowered.trial = self.trial
        self.caller = self.trial.caller = WithoutAutocast(self.trial, arguments)

    def _way(self, name):
        def run(buffer, step):
            self.ran.append(name)
            seconds = self.seconds[name]
            self.now += seconds(len(self.ran)) if callable(seconds) else seconds
            buffer += step
            return [torch.tensor(float(name == "kernels"))]

        return run

    def run(self, count):
        """Run so many micro-batches; the results, and how often other kernels have run."""
        buffer, before = torch.zeros(1), len(self.ran)
        results = [self.caller(buffer, torch.ones(1))[0].item() for _ in range(count)]
        assert buffer.item() == count
        return results, len(self.ran) - before - count


def test_kernels_that_were_chosen_wrongly_are_changed(later_process):
    kernels = Kernels("kernels", {"graph": 0.125, "kernels": 0.25})
    results, extra = kernels.run(40)
    # In the fifth, the sixth and the eleventh run.
    assert results == [1.0] * 11 + [0.0] * 29
    assert extra == 3
    assert (kernels.lowered.way, kernels.lowered.why) == ("graph", "Runs graph.")
    assert kernels.caller.graph is kernels.lowered.run


@pytest.mark.parametrize("present", ["graph", "kernels"])
def test_kernels_that_were_chosen_well_stay(present, later_process):
    kernels = Kernels(present, {"graph": 0.2, "kernels": 0.4, present: 0.1})
    results, extra = kernels.run(100)
    assert results == [float(present == "kernels")] * 100
    assert extra == 3
    assert kernels.lowered.trial is None


def test_nothing_is_timed_in_the_first_second(later_process):
    kernels = Kernels("graph", {"graph": 0.125, "kernels": 0.01})
    assert kernels.run(8)[1] == 0
    assert kernels.run(1)[1] == 1


def test_timing_takes_a_tenth_of_the_time(later_process):
    seconds = itertools.cycle([0.5, 1.5])
    kernels = Kernels("graph", {"graph": 1.0, "kernels": lambda _: next(seconds)})
    extra = [kernels.run(1)[1] for _ in range(100)]
    assert sum(extra) == 7
    for count in range(100):
        others = sum(extra[:count])
        assert others - others % 2 / 2 <= 0.1 * count + 1.5


@pytest.mark.parametrize(
    ("seconds", "extra"),
    [
        ([0.5, 0.05, 0.05, 0.05, 0.05], 5),
        ([0.5, 0.05, 0.05, 0.5, 0.05, 0.5, 0.05], 7),
    ],
)
def test_runs_that_disagree_are_more_and_most_of_them_count(seconds, extra, later_process):
    """One run that other work has slowed down is not to decide."""
    each = iter(seconds)
    kernels = Kernels("graph", {"graph": 0.1, "kernels": lambda _: next(each, 0.05)})
    assert kernels.run(200)[1] == extra
    assert kernels.lowered.way == "kernels"


@pytest.mark.parametrize(
    ("seconds", "worth", "way"),
    [(0.094, 0.95, "kernels"), (0.096, 0.95, "graph"), (0.099, 1.0, "kernels")],
)
def test_other_kernels_have_to_be_worth_it(seconds, worth, way, later_process):
    kernels = Kernels("graph", {"graph": 0.1, "kernels": seconds}, worth)
    kernels.run(60)
    assert kernels.lowered.way == way


def test_kernels_that_fail_are_left_alone(later_process):
    def fails(_):
        raise RuntimeError("no memory")

    kernels = Kernels("graph", {"graph": 0.1, "kernels": fails})
    assert kernels.run(30)[0] == [0.0] * 30
    assert kernels.ran.count("kernels") == 1
    assert timing.recall(SETTLED) == "graph"


def test_a_later_process_begins_with_what_was_settled(later_process, monkeypatch):
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0, 0.5])
    ways = dict.fromkeys(["graph", "kernels"], int)
    assert timing.fastest(KEY, lambda: ways) == "kernels"
    later_process()
    assert timing.recall(SETTLED) is None
    Kernels("kernels", {"graph": 0.1, "kernels": 0.2}).run(40)
    for forget in (lambda: None, later_process):
        forget()
        assert timing.recall(SETTLED) == "graph"
        assert timing.fastest(KEY, lambda: pytest.fail("is measured")) == "graph"


def times_at_once(monkeypatch, first, worth):
    """Have kernels timed from the first run on, after these were chosen before."""
    monkeypatch.setattr(select_kernels, "fastest", lambda *_, **__: first)
    monkeypatch.setattr(select_kernels, "_BEGIN", 0.0)
    monkeypatch.setattr(select_kernels, "_SHARE", float("inf"))
    monkeypatch.setattr(select_kernels, "_WORTH", worth)


@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(("worth", "way"), [(0.0, "graph"), (1e9, "kernels")])
@pytest.mark.parametrize("first", ["graph", "kernels"])
def test_a_fit_has_the_numbers_of_either_way(first, worth, way, later_process, monkeypatch):
    """It is timed in every run from the first on, and nothing but the order of sums differs."""
    times_at_once(monkeypatch, first, worth)
    net = Pictures()
    one, _, expected = fitted(net, jit="graph")
    model, engine, history = fitted(net)
    torch.testing.assert_close(history.history["loss"], expected.history["loss"], rtol=1e-5, atol=0)
    for name, value in one.module.state_dict().items():
        torch.testing.assert_close(model.module.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    assert history.params["jit"] == way
    said = engine.explain(model._session.config, {})[0]
    assert "10 convolutions and poolings with channels last" in said
    assert said.startswith("Runs the graph as it was recorded: ") == (way == "graph")
    assert set(timing.measured_choices().values()) == {way}


@needs_onednn
@pytest.mark.usefixtures("all_kernels")
def test_timing_changes_no_random_number(later_process, monkeypatch):
    times_at_once(monkeypatch, "graph", 0.0)
    net, losses = Draws(), []
    for begin in (1e9, 0.0):
        monkeypatch.setattr(select_kernels, "_BEGIN", begin)
        losses.append(fitted(net)[2].history["loss"])
        assert bool(timing.measured_choices()) == (begin == 0.0)
    assert losses[0] == losses[1]
