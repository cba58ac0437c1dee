"""Generators of random numbers besides torch's own: their states, to be compared and set back."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import Tensor

__all__ = ["Generators", "generator_state", "hashable", "same_state", "set_generator"]


def generator_state(value: object) -> Any:
    """Return the state of Python's, NumPy's or torch's generator; None for anything else."""
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
    """Set a generator back to a state."""
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def hashable(state: object) -> Any:
    """Convert the state of a generator to a form that can be compared."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return tuple((key, hashable(value)) for key, value in state.items())
    return state.tobytes() if hasattr(state, "tobytes") else state


def same_state(one: object, other: object) -> bool:
    """Say whether two states of a generator give the same next number."""
    return bool(hashable(one) == hashable(other))


class Generators:
    """Generators of Python's and NumPy's random numbers, and their states at one time.

    Args:
        objects: those of the user's that draw, each behind a title for people.

    Attributes:
        probes: by name, what is another value after any draw: "random", "numpy.random" and titles.
    """

    def __init__(self, objects: Sequence[Tuple[str, object]] = ()) -> None:
        self._objects: Dict[str, Any] = {"random": random._inst}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._objects["numpy.random"] = numpy.random.mtrand._rand
        self._objects.update(objects)
        self.probes: Dict[str, Callable[[], Any]] = {
            name: functools.partial(_looked_at, each) for name, each in self._objects.items()
        }
        self._states = {name: generator_state(each) for name, each in self._objects.items()}

    def again(self) -> Generators:
        """Return a new object for these generators, with the states that they have now."""
        return Generators(list(self._objects.items()))

    def drawn(self) -> List[str]:
        """Names of the generators that have moved since."""
        return [
            name
            for name, each in self._objects.items()
            if not same_state(generator_state(each), self._states[name])
        ]

    def restore(self) -> None:
        """Set all generators back to their states at the start."""
        for name, each in self._objects.items():
            set_generator(each, self._states[name])

    def start(self, seed: int) -> None:
        """Let each draw the numbers of a seed."""
        _, numbers, _ = random.Random(seed).getstate()
        for each in self._objects.values():
            if isinstance(each, random.Random):
                each.seed(seed)
            elif hasattr(each, "bit_generator"):
                each.bit_generator.state = type(each.bit_generator)(seed).state
            else:
                # The stream that Python's generator has for this seed.
                each.set_state(("MT19937", numbers[:-1], numbers[-1]))


def _looked_at(generator: object) -> Any:
    return hashable(generator_state(generator))
