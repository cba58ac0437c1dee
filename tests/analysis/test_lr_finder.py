"""What a range test makes of the losses that it saw."""

import math
import sys

import matplotlib
import pytest

import ipufit
from ipufit import LearningRates
from ipufit.analysis.tuner import exponential_range
from ipufit.errors import ConfigurationError


def curve(smoothed, rates=None, diverged=False):
    """What a test with such a smoothed loss would have seen."""
    rates = rates or exponential_range(1e-6, 1.0, len(smoothed))
    return LearningRates(tuple(rates), tuple(smoothed), tuple(smoothed), diverged)


def test_rates_grow_by_one_factor():
    """So that every power of ten gets as many updates."""
    assert exponential_range(1e-4, 1.0, 5) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


@pytest.mark.parametrize("place", [30, 50, 70])
def test_the_suggestion_is_where_the_loss_falls_fastest(place):
    """A logistic fall is steepest in its middle."""
    smoothed = [1 / (1 + math.exp((i - place) / 3)) for i in range(100)]
    found = curve(smoothed)
    assert found.suggestion == found.learning_rates[place]


def test_the_suggestion_looks_past_the_noise_of_single_updates():
    """A spike is the steepest step of all, and says nothing."""
    smoothed = [1 / (1 + math.exp((i - 60) / 5)) for i in range(100)]
    smoothed[20] += 0.15
    found = curve(smoothed)
    assert abs(found.learning_rates.index(found.suggestion) - 60) <= 5
    steps = [after - before for before, after in zip(smoothed, smoothed[1:])]
    assert steps.index(min(steps)) == 20


@pytest.mark.parametrize("smoothed", [[1.0] * 20, [1.0 + 0.1 * i for i in range(20)], [1.0, 0.9]])
def test_there_is_no_suggestion_where_nothing_fell(smoothed):
    """A number would be taken for advice."""
    assert curve(smoothed).suggestion is None


def test_the_text_says_what_was_found():
    """In a notebook it is the last line of a cell."""
    found = curve([1.0, 0.9, 0.1, 0.05, 0.04])
    assert repr(found) == "LearningRates(5 updates from 1e-06 to 1, suggestion 3.16e-05)"
    assert repr(curve([1.0] * 5)) == "LearningRates(5 updates from 1e-06 to 1, no suggestion)"


@pytest.mark.parametrize("sign", [1, -1])
def test_the_plot_shows_the_fall_and_not_the_divergence(sign):
    """The last losses of a test that diverged are many times larger than all others."""
    matplotlib.use("agg")
    offset = 0.0 if sign > 0 else -3.0
    smoothed = [offset + 2.0 - 0.01 * i for i in range(80)] + [9.0]
    figure = curve(smoothed, diverged=True).plot()
    (panel,) = figure.axes
    low, high = panel.get_ylim()
    assert low < min(smoothed) < smoothed[0] < high < 9.0
    assert panel.get_xscale() == "log"
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("learning rate", "loss")
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert any(label.startswith("steepest") for label in labels)


@pytest.mark.long
def test_the_plot_shows_all_of_a_test_that_did_not_diverge(tmp_path):
    """Also of a loss that only grew, or never moved."""
    for smoothed in ([1.0 + i for i in range(20)], [0.0] * 20):
        figure = curve(smoothed).plot(tmp_path / "curve.png")
        low, high = figure.axes[0].get_ylim()
        assert low <= min(smoothed) <= max(smoothed) <= high
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_asks_for_matplotlib(monkeypatch):
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError) as caught:
        curve([1.0, 0.5, 0.2]).plot()
    assert str(caught.value) == (
        "LearningRates.plot needs matplotlib, which is not installed. Run: pip install ipufit[plot]"
    )


def test_the_result_classes_are_public():
    """Annotations name them."""
    assert ipufit.LearningRates is LearningRates
