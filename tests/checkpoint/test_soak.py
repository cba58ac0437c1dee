"""A short run of ``nox -s soak``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.both_engines

HERE = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
@pytest.mark.long
def test_nothing_is_left_of_a_long_run_and_of_many_models():
    soak = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--executions", "1600", "--models", "24"],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert soak.returncode == 0, soak.stdout + soak.stderr
    assert soak.stdout.count("memory") == 2
