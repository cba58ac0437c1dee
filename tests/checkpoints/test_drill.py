"""A few of the kills of ``nox -s drill``."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_killed_at_random_moments_the_run_ends_with_the_same_bytes():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    drill = subprocess.run(
        [sys.executable, "-m", "tests.drill", "--kills", "12", "--seed", "1"],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert drill.returncode == 0, drill.stdout + drill.stderr
    found = re.match(r"12 kills in (\d+) runs and .*; (\d+) of \1 runs ended", drill.stdout)
    assert found is not None, drill.stdout
    assert found[1] == found[2]
