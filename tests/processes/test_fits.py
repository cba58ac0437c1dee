"""Fits in several real processes give what one process with as many replicas gives."""

import json

import pytest
import torchmetrics  # noqa: F401 - for the copies, each of which would import it

from tests.processes.launching import ROOT, on_one_python, run_copies

SCRIPT = (ROOT / "tests" / "processes" / "fits.py").read_text()

# What is run without --exhaustive: an end within an update, who reads and cuts the data (ipufit,
# the user's sampler), and what processes add up: statistics of BatchNorm, dropout, logged values
# and norms, all in one net; tokens; metrics; callbacks that stop.
SAMPLE = (
    *("lengths 61", "forms buckets"),
    *("models joined", "models turns", "models backend", "models tokens", "measures"),
    *("fields", "shapes", "late", "models experts", "models experts in turn", "models uneven"),
    *("models evaluated again", "callbacks"),
)
# In four: an update of which some have no micro-batch, and what is added up.
IN_FOUR = ("models joined", "shapes", "late")
IN_BUCKETS = ("models joined", "late")


def results(folder, count, parts=()):
    """By process, what each part has found."""
    script = "import sys\nsys.path.insert(0, '.')\n" + SCRIPT
    for ended in run_copies(script, count, args=(str(folder), *parts)):
        assert ended.code == 0, str(ended)
    return [json.loads((folder / f"{count}-{each}.json").read_text()) for each in range(count)]


@pytest.fixture(scope="module")
def sample(request):
    """The fits that are run: none for all of them."""
    return () if request.config.getoption("--exhaustive") else SAMPLE


@pytest.fixture(scope="module")
def alone(tmp_path_factory, sample):
    """What one process finds."""
    (found,) = results(tmp_path_factory.mktemp("alone"), 1, sample)
    # Callbacks are two of them: what they saw, and which files they wrote.
    assert len(found) == (len(sample) + 1 if sample else 47)
    return found


def numbers(value):
    """All numbers in a tree, in one order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in numbers(value[key])]
    if isinstance(value, list):
        return [number for each in value for number in numbers(each)]
    return [float(value)]


def check(alone, found):
    """In float64 only the order of sums is another one; every process has the same bits."""
    assert found[0].keys() <= alone.keys()
    for name, first in found[0].items():
        for part, value in first.items():
            assert numbers(value) == pytest.approx(
                numbers(alone[name][part]), rel=1e-10, abs=1e-10, nan_ok=True
            ), (name, part)
            assert all(each[name][part] == value for each in found), (name, part)


def test_two_processes_give_the_numbers_of_one(alone, tmp_path, sample):
    found = results(tmp_path, 2, sample)
    assert found[0].keys() == alone.keys()
    check(alone, found)


@pytest.mark.parametrize(
    ("processes", "parts"),
    [
        pytest.param(2, IN_BUCKETS, marks=on_one_python),
        pytest.param(2, (), marks=pytest.mark.long),
        pytest.param(4, (), marks=pytest.mark.long),
    ],
)
def test_buckets_that_go_along_with_backward_change_nothing(alone, tmp_path, processes, parts):
    """Updates take turns at first: their gradients are added during the backward pass, or after."""
    check(alone, results(tmp_path, processes, ("buckets", *parts)))


@on_one_python
def test_four_processes_give_the_numbers_of_one(alone, tmp_path, sample):
    found = results(tmp_path, 4, sample and IN_FOUR)
    assert len(found[0]) == len(IN_FOUR if sample else alone)
    check(alone, found)
