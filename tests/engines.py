"""What differs between the engines, for tests that run on either: see ``--engine``."""

import pytest

embedded_only = pytest.mark.embedded_only
runs_eagerly = embedded_only("an IPU runs compiled programs only, so run_eagerly is refused")
unbounded_norms = embedded_only("PopTorch bounds the norm of all gradients together only")
takes_back = embedded_only("an IPU can't go back to the update before the bad one")
keeps_averages = embedded_only("PopTorch keeps no averages of weights, so use_ema is refused")
ragged = embedded_only(
    "beside BatchNorm, an update with a smaller micro-batch can't be run exactly, and is refused"
)
replicas_meet = embedded_only(
    "on an IPU replicas start each program with the statistics of the first"
)
counts_in_a_buffer = embedded_only("a buffer of integers is a constant on an IPU")

# For a parameter that says whether to run eagerly.
EAGER_OR_NOT = [False, pytest.param(True, marks=runs_eagerly)]
# A run through the module itself, to compare with, where one call takes engine and options.
EAGER = {"engine": "embedded", "run_eagerly": True}
