"""Arguments of ``compile`` that several rooms read: values of ``jit``, options of programs."""

from __future__ import annotations

from ipufit.core.batch import Mode
from ipufit.errors import ConfigurationError
from ipufit.utils.error_collector import one_of

__all__ = [
    "AUTO",
    "CUDAGRAPH",
    "GRAPH",
    "INDUCTOR",
    "INFERENCE",
    "KERNELS",
    "LOWERINGS",
    "OFF",
    "TRAINING",
    "resolve_jit",
    "role_of",
]

AUTO, OFF, GRAPH, KERNELS = "auto", "off", "graph", "kernels"
INDUCTOR, CUDAGRAPH = "inductor", "cudagraph"

LOWERINGS = (AUTO, GRAPH, KERNELS, INDUCTOR, CUDAGRAPH)


def resolve_jit(jit: object, run_eagerly: object) -> str:
    """The way that both arguments of ``compile`` ask for.

    Raises:
        ConfigurationError: no way has that name, or they say two things.
    """
    if jit == OFF:
        raise ConfigurationError(
            f"jit says how a recorded program runs, got {jit!r}. Write run_eagerly=True to run the "
            "module itself."
        )
    one_of("jit", jit, LOWERINGS)
    if run_eagerly is not True:
        return str(jit)
    if jit != AUTO:
        raise ConfigurationError(
            f"run_eagerly=True runs the module itself, but jit={jit!r} asks for a recorded "
            "program. Leave one of them out."
        )
    return OFF


TRAINING, INFERENCE = "training_options", "inference_options"


def role_of(mode: Mode) -> str:
    """The argument of ``compile`` that holds the options for such a program."""
    return TRAINING if mode is Mode.TRAIN else INFERENCE
