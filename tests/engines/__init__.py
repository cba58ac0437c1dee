"""What differs between the engines, for tests that run on either: see ``--engine``.

Each reason is one of an IPU; what it refuses, and how, is in tests/engines/ipu/test_engine.py and
tests/engines/ipu/test_refusals.py.
"""

import os

import pytest

embedded_only = pytest.mark.embedded_only

runs_eagerly = embedded_only("an IPU runs compiled programs only, so run_eagerly is refused")
takes_back = embedded_only("an IPU can't go back to the update before the bad one")
weighs_classes = embedded_only("PopTorch has no weight of classes in its cross-entropy")
keeps_averages = embedded_only("PopTorch keeps no averages of weights, so use_ema is refused")
scales_itself = embedded_only("PopTorch does not tell its factor, so a LossScale is refused")
skips_updates = embedded_only("PopTorch makes every update, also one that is not finite")
clips_apart = embedded_only("PopTorch bounds the norm of all gradients together only")
has_no_autocast = embedded_only("PopTorch has no autocast, so mixed precision is refused")
own_step = embedded_only("an IPU has five optimizers, and runs no step of another")
moves_parts = embedded_only("an IPU makes an update from one loss, and no gradient inside a step")
has_no_variant = embedded_only("PopTorch has no such variant of the optimizer, so it is refused")
has_kept_values = embedded_only("the program of a device keeps the value that backward needs")
counts_in_a_buffer = embedded_only("a buffer of integers is a constant on an IPU")
ragged = embedded_only(
    "beside buffers that forward changes, an update that is not full is refused where no smaller "
    "program is it exactly"
)
one_shape = embedded_only("a compiled program has one shape")
replicas_meet = embedded_only(
    "on an IPU replicas start each program with the statistics of the first"
)

# For a parameter that says whether to run eagerly.
EAGER_OR_NOT = [False, pytest.param(True, marks=runs_eagerly)]


def strict():
    """Options of compile with which it is an error, on either engine, that nothing is recorded."""
    is_ipu = os.environ.get("IPUFIT_ENGINE", "").startswith("ipu")
    return {} if is_ipu else {"jit": "graph"}


# A run through the module itself, to compare with, where one call takes engine and options.
EAGER = {"engine": "embedded", "run_eagerly": True}

# Marks of configurations by their names, for `but`.
CONFIGURATION_MARKS = {
    "averages": keeps_averages,
    "dynamic_scale": scales_itself,
    "clipped": clips_apart,
    "eager": runs_eagerly,
}


def but(values, **marks):
    """Parameters of a test, those of these names with their marks."""
    return [pytest.param(value, marks=marks.get(value.replace(" ", "_"), ())) for value in values]
