"""Seconds by phase."""

import contextlib

import pytest

from ipufit.utils import phase_timer
from ipufit.utils.phase_timer import NO_CLOCK, PHASES, Clock


@pytest.fixture
def now(monkeypatch):
    """Time goes on by what is added to it."""
    now = [100.0]
    monkeypatch.setattr(phase_timer.time, "perf_counter", lambda: now[0])
    return now


def test_a_phase_takes_its_time_from_the_one_around_it(now):
    """Each moment counts once, and all phases together are the time that has passed."""
    told = Clock()
    now[0] += 1
    with told.during("compute"):
        now[0] += 2
        with told.during("capture"):
            now[0] += 4
            with told.during("compute"):
                now[0] += 8
        now[0] += 16
    now[0] += 32
    assert told.seconds() == {
        **dict.fromkeys(PHASES, 0.0),
        "compute": 2 + 8 + 16,
        "capture": 4,
        "other": 1 + 32,
    }


def test_a_phase_ends_with_an_error(now):
    """What follows is not counted in it."""
    told = Clock()

    def fail():
        with told.during("callbacks"):
            now[0] += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    now[0] += 2
    assert (told.seconds()["callbacks"], told.seconds()["other"]) == (1, 2)


def test_a_turn_goes_on_to_the_next_one(now):
    """A block within it takes its time from it."""
    told = Clock()
    told.turn("compute")
    now[0] += 1
    with told.during("anchors"):
        now[0] += 2
    now[0] += 4
    told.turn("callbacks")
    now[0] += 8
    found = {name: seconds for name, seconds in told.seconds().items() if seconds}
    assert found == {"compute": 1 + 4, "anchors": 2, "callbacks": 8}


def slow(now, fails=False):
    """Three values, each a second's work."""
    for value in range(3):
        now[0] += 1
        yield value
    if fails:
        raise KeyError


@pytest.mark.parametrize("ends", ["at the end", "before it", "by an error"])
def test_waiting_for_values_is_time_of_the_data(now, ends):
    """What is done with them is not, nor what follows."""
    told, seen = Clock(), []
    error = pytest.raises(KeyError) if ends == "by an error" else contextlib.nullcontext()
    with error:
        for value in told.reading(slow(now, ends == "by an error")):
            told.turn("metrics")
            now[0] += 10
            seen.append(value)
            if ends == "before it" and value == 1:
                break
    now[0] += 100
    found = {name: seconds for name, seconds in told.seconds().items() if seconds}
    assert found == {"data": len(seen), "metrics": 10 * len(seen), "other": 100}
    assert len(seen) == (2 if ends == "before it" else 3)


def test_without_a_clock_values_go_through_untouched():
    """Off, there is nothing in between."""
    values = iter([1, 2])
    assert NO_CLOCK.reading(values) is values
    NO_CLOCK.turn("data")
    assert NO_CLOCK.during("data") is NO_CLOCK.during("compute")
