"""A few of the kills and interrupts of ``nox -s drill``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.both_engines,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here"),
]


def drill(*options):
    """What a drill prints that has nothing to complain of."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.drill", *options],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.long
def test_killed_at_random_moments_the_run_ends_with_the_same_bytes():
    """A job may be killed at any time, and must not begin anew."""
    text = drill("--kills", "2", "--seed", "1")
    found = re.match(r"2 kills in (\d+) runs and .*; (\d+) of \1 runs ended", text)
    assert found is not None, text
    assert found[1] == found[2]


@pytest.mark.long
def test_interrupted_at_any_moment_a_run_with_workers_ends_and_leaves_nothing():
    """Ctrl-C was lost while a worker was forked, and then only SIGKILL helped."""
    text = drill("--interrupts", "4", "--bound", "60")
    assert "4 ended by KeyboardInterrupt and left nothing behind" in text
