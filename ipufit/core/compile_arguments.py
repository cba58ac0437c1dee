"""Arguments of ``compile`` that several rooms read: values of ``jit``, options of programs."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Callable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import Mode
from ipufit.errors import ConfigurationError, UnknownNameError, brief_error

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
    "Backend",
    "CompilerFunction",
    "resolve_jit",
    "role_of",
]

AUTO, OFF, GRAPH, KERNELS = "auto", "off", "graph", "kernels"
INDUCTOR, CUDAGRAPH = "inductor", "cudagraph"

LOWERINGS = (AUTO, GRAPH, KERNELS, INDUCTOR, CUDAGRAPH)

# A backend of torch.compile: takes a graph and tensors like its inputs, and returns what runs it.
CompilerFunction = Callable[[fx.GraphModule, List[Tensor]], Callable[..., Sequence[Tensor]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Backend:
    """A backend of torch.compile, to which recorded graphs are handed.

    Attributes:
        name: under which torch lists it, or module and name of the function.
        function: the backend.
    """

    name: str
    function: CompilerFunction


def resolve_jit(jit: object, run_eagerly: object) -> Tuple[str, Optional[Backend]]:
    """The way that both arguments of ``compile`` ask for.

    Returns:
        The name of a way, and the backend of torch.compile that has this name; None for a way of
        ipufit's own.

    Raises:
        ConfigurationError: there is no such way, or they say two things.
    """
    if jit == OFF:
        raise ConfigurationError(
            f"jit says how a recorded program runs, got {jit!r}. Write run_eagerly=True to run the "
            "module itself."
        )
    if not isinstance(jit, str) and not callable(jit):
        raise ConfigurationError(
            f"jit must be {' or '.join(map(repr, LOWERINGS))}, or a backend of torch.compile, by "
            f"name or as a function, got {jit!r}."
        )
    name = jit if isinstance(jit, str) else _name_of(jit)
    if run_eagerly is not True:
        if name in LOWERINGS:
            return name, None
        return name, Backend(name, _backend_of_torch(jit) if isinstance(jit, str) else jit)
    if name != AUTO:
        raise ConfigurationError(
            f"run_eagerly=True runs the module itself, but jit={name!r} asks for a recorded "
            "program. Leave one of them out."
        )
    return OFF, None


def _name_of(function: Callable[..., object]) -> str:
    """Module and name of a function, or of the class of an object that can be called."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}.{owner.__qualname__}"


# Backends that torch has for its own tests.
_OF_TESTS = "_TESTING_ONLY"


def _backend_of_torch(name: str) -> CompilerFunction:
    """Look a name up among the backends that torch, and packages installed beside it, bring along.

    Raises:
        ConfigurationError: there is none, or what brings it along can't be loaded.
    """
    try:
        registry = importlib.import_module("torch._dynamo.backends.registry")
        names = [each for each in registry.list_backends(()) if not each.endswith(_OF_TESTS)]
    except Exception as error:
        raise ConfigurationError(
            f"jit={name!r} is none of {', '.join(map(repr, LOWERINGS))}, so it names a backend of "
            f"torch.compile, but torch {torch.__version__} can't list these here: "
            f"{brief_error(error)}. Use one of the names above, or pass the backend as a function."
        ) from error
    try:
        function: CompilerFunction = registry.lookup_backend(name)
    except Exception as error:
        # Older versions of torch list what other packages bring along only once it is in use.
        if name in names or isinstance(error, ImportError):
            raise ConfigurationError(
                f"jit={name!r} names a backend of torch.compile that can't be loaded: "
                f"{brief_error(error)}. Install what it needs, or use jit='auto'."
            ) from error
        raise UnknownNameError(
            "way to run a recorded program", name, {*LOWERINGS, *names}
        ) from None
    return function


TRAINING, INFERENCE = "training_options", "inference_options"


def role_of(mode: Mode) -> str:
    """The argument of ``compile`` that holds the options for such a program."""
    return TRAINING if mode is Mode.TRAIN else INFERENCE
