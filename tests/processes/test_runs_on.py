"""Runs of several processes that end early go on with the same bits, or in other processes."""

import json
import shutil
import signal

import pytest

from tests.processes.launching import ROOT, on_one_python, run_copies, run_torchrun
from tests.processes.test_fits import numbers

pytestmark = on_one_python

SCRIPT = (ROOT / "tests" / "processes" / "runs_on.py").read_text()


def run(folder, happens, count=2):
    """The same script in so many processes."""
    return run_copies(SCRIPT, count, args=(str(folder), happens))


def found(folder, process=0):
    """What a process has found at the end, as bytes."""
    return (folder / f"{process}.json").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    for ended in run(folder, "nothing"):
        assert ended.code == 0, str(ended)
    return folder


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run of which one process was asked to end."""
    folder = tmp_path_factory.mktemp("ended")
    first, second = run(folder, "term")
    assert (first.code, second.code) == (143, 143), f"{first}\n{second}"
    assert first.stderr.count("SIGTERM: fit ends after update 7, in epoch 2") == 1
    assert "SIGTERM" not in second.stderr
    assert (folder / "checkpoints" / "update-000000007").is_dir()
    return folder


def go_on(ended, folder, count):
    """Go on from the checkpoints of another folder."""
    shutil.copytree(ended / "checkpoints", folder / "checkpoints")
    for each in run(folder, "nothing", count):
        assert each.code == 0, str(each)


@pytest.mark.long
def test_a_signal_to_one_process_ends_all_and_they_go_on(whole, ended, tmp_path):
    go_on(ended, tmp_path, 2)
    assert [found(tmp_path, each) for each in (0, 1)] == [found(whole, each) for each in (0, 1)]


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 4])
def test_other_numbers_of_processes_go_on_up_to_summation_order(whole, ended, tmp_path, count):
    go_on(ended, tmp_path, count)
    # Updates of Adam turn the last bits of a gradient near zero into a few more.
    expected = numbers(json.loads(found(whole)))
    assert numbers(json.loads(found(tmp_path))) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.long
def test_torchrun_begins_again_and_the_run_goes_on(whole, tmp_path):
    ended = run_torchrun(SCRIPT, 2, restarts=1, args=(str(tmp_path), "kill"))
    assert ended.code == 0, str(ended)
    assert [found(tmp_path, each) for each in (0, 1)] == [found(whole, each) for each in (0, 1)]


@pytest.mark.long
def test_a_killed_process_ends_the_others_and_all_go_on(whole, tmp_path):
    first, second = run(tmp_path, "kill")
    assert second.code == -signal.SIGKILL
    assert first.code == 1, str(first)
    assert "process 1 of 2 has gone" in first.stderr
    for ended in run(tmp_path, "nothing"):
        assert ended.code == 0, str(ended)
    assert [found(tmp_path, each) for each in (0, 1)] == [found(whole, each) for each in (0, 1)]


@pytest.mark.long
def test_a_run_of_one_process_goes_on_in_two(tmp_path):
    """From the first process on; it ends like one that had one process throughout."""
    for folder in ("alone", "begun"):
        (tmp_path / folder).mkdir()
    (alone,) = run(tmp_path / "alone", "nothing", 1)
    assert alone.code == 0, str(alone)
    (begun,) = run(tmp_path / "begun", "term", 1)
    assert begun.code == 143, str(begun)
    (tmp_path / "two").mkdir()
    go_on(tmp_path / "begun", tmp_path / "two", 2)
    expected = numbers(json.loads(found(tmp_path / "alone")))
    assert numbers(json.loads(found(tmp_path / "two"))) == pytest.approx(
        expected, rel=1e-9, abs=1e-9
    )
