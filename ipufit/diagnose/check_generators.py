"""Generators of random numbers besides torch's own: their states, to be compared and set back."""

from __future__ import annotations

import random
import sys
from typing import Any, Callable, Dict, List

import torch
from torch import Tensor

__all__ = ["Generators", "generator_state", "hashable", "same_state", "set_generator"]


def generator_state(value: Any) -> Any:
    """Of a generator of Python's, NumPy's or torch's; None of anything else."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, torch.Generator):
        return None if value is torch.default_generator else value.get_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state(legacy=False)
    return None


def set_generator(value: Any, state: Any) -> None:
    """Set it back."""
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def hashable(state: Any) -> Any:
    """The state in a form that can be compared."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return tuple((key, hashable(value)) for key, value in state.items())
    return state.tobytes() if hasattr(state, "tobytes") else state


def same_state(one: Any, other: Any) -> bool:
    """Whether the next number is the same."""
    return bool(hashable(one) == hashable(other))


class Generators:
    """States of the generators that ``random`` and ``numpy.random`` have.

    Attributes:
        probes: by module, what is another value after any draw.
    """

    def __init__(self) -> None:
        self.probes: Dict[str, Callable[[], Any]] = {
            "random": random.getstate,
            "numpy.random": lambda: hashable(self._numpy_state()),
        }
        self._python = random.getstate()
        self._numpy = self._numpy_state()

    def _numpy_state(self) -> Any:
        numpy = sys.modules.get("numpy")
        return None if numpy is None else numpy.random.get_state(legacy=False)

    def drawn(self) -> List[str]:
        """Names of the modules whose generators have moved."""
        found = ["random"] if random.getstate() != self._python else []
        if self._numpy is not None and not same_state(self._numpy_state(), self._numpy):
            found.append("numpy.random")
        return found

    def restore(self) -> None:
        """Set them back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
