"""Random numbers: where each stream starts, and how streams are kept apart.

A micro-batch draws from a stream of its own, keyed by (seed, domain, update, place in the update).
The updates of a run have consecutive numbers, so that one number says where an execution starts: an
IPU is given it as its seed, and a program over the stand-in for one draws the same numbers.
The place is ``a * R + r``, so replicas never share a stream; the key does not hold
``device_iterations``, so the numbers are the same for every value of it; and nothing has to be
stored to resume but the update counter. Validation lives in another domain and cannot disturb
training.

Draws of the data pipeline (shuffling, augmentation in the main process) come from one more stream,
keyed by (seed, epoch), which is put in place only while batches are fetched. States of generators
besides torch's own, Python's and NumPy's, can be compared and set back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib.util
import random
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.errors import ConfigurationError, shown
from ipufit.utils.devices import HOST, devices_in_use, generator_of, is_keyed
from ipufit.utils.error_collector import whole_number
from ipufit.utils.random_operators import HostDraws

# torch has one generator and one recorder in a process: threads take turns.
LOCK = threading.RLock()


def draw_seed() -> int:
    """A fresh seed from torch's generator: ``torch.manual_seed`` before ``fit`` fixes a run."""
    return int(torch.randint(0, 2**31 - 1, (), dtype=torch.int64).item())


class Seeds(int):
    """Seeds of several models that train as one, or keys made of them; as a number, the first.

    Attributes:
        each: one for each model.
    """

    each: Sequence[int]

    @staticmethod
    def of(each: Sequence[int]) -> Seeds:
        """Join the seeds of models."""
        seeds = Seeds(each[0])
        seeds.each = each
        return seeds

    def __add__(self, other: int) -> Seeds:
        return Seeds.of([each + other for each in self.each])


# Generators on the host for the random numbers of each of several models.
GENERATORS: List[torch.Generator] = []


def stream_key(seed: int, *parts: object) -> int:
    """A 63-bit generator seed from a user's seed and the place where it is used.

    Hashed, so that neighbouring seeds, updates or replicas do not give related generators.
    """
    if isinstance(seed, Seeds):
        return Seeds.of([stream_key(each, *parts) for each in seed.each])
    text = "/".join(str(part) for part in (seed, *parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def update_key(seed: int, domain: str, update: int) -> int:
    """The number of an update, or of a forward pass of inference; the next one's is the next."""
    return stream_key(seed, domain) + update


def micro_batch_key(update: int, place: int) -> int:
    """The generator seed of the micro-batch at a place of an update.

    Args:
        update: of :func:`update_key`.
        place: within the update.
    """
    return stream_key(update, place)


def seed_generators(key: int, device: torch.device = HOST) -> None:
    """Start the default generator of the host, and that of ``device``, at ``key``.

    Those of other devices, where a module has parts of it, start at keys of their own.
    """
    torch.default_generator.manual_seed(key)
    for row, of_model in enumerate(key.each if isinstance(key, Seeds) else ()):
        if row == len(GENERATORS):
            GENERATORS.append(torch.Generator())
        GENERATORS[row].manual_seed(of_model)
    for each in devices_in_use(device):
        generator = generator_of(each)
        if generator is not None:
            generator.start(key if each == device else stream_key(key, each))


@contextlib.contextmanager
def isolated(device: torch.device = HOST) -> Iterator[None]:
    """Leave the user's generators (of the host, ``device`` and others in use) as they were found.

    What is drawn in the block on a device whose generator can't be keyed is drawn on the host.
    """
    with LOCK:
        devices, host = devices_in_use(device), torch.get_rng_state()
        generators = [each for each in map(generator_of, devices) if each is not None]
        states = [generator.state() for generator in generators]
        try:
            with contextlib.nullcontext() if all(map(is_keyed, devices)) else HostDraws():
                yield
        finally:
            torch.set_rng_state(host)
            for generator, state in zip(generators, states):
                generator.go_on(state)


class DataStream:
    """The generator state that the data pipeline of one epoch sees.

    Args:
        seed: the run's seed.
        parts: what sets this stream apart, such as ("data", epoch).
    """

    def __init__(self, seed: int, *parts: object) -> None:
        self._key = stream_key(seed, *parts)
        self._state: Optional[torch.Tensor] = None

    def again(self) -> DataStream:
        """Make this stream anew, from its start."""
        stream = copy.copy(self)
        stream._state = None
        return stream

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Swap this stream into torch's host generator for the duration."""
        with LOCK:
            outside = torch.get_rng_state()
            if self._state is None:
                torch.default_generator.manual_seed(self._key)
            else:
                torch.set_rng_state(self._state)
            try:
                yield
            finally:
                self._state = torch.get_rng_state()
                torch.set_rng_state(outside)


# NumPy's global generator takes no more, so a seed in range is the same everywhere.
_LIMIT = 2**32


def seed_everything(seed: Optional[int] = None) -> int:
    """Seed the global generators of Python, of NumPy if it is installed, and of torch.

    ``fit`` with ``seed=None`` draws its seed from torch's generator, so this fixes it too. Random
    numbers that a dataset draws from ``random`` or NumPy in this process are only fixed by this
    function. Workers of a DataLoader do not inherit these generators: in each worker, torch seeds
    ``random``, NumPy and torch in every epoch (once, with ``persistent_workers``), from a number
    that in ``fit`` depends on its seed and the epoch. Generator objects, such as
    ``numpy.random.default_rng()``, are not changed.

    Args:
        seed: at least 0 and less than 2 ** 32; None draws one from the operating system.

    Returns:
        The seed, for example to pass to ``fit``.

    Raises:
        ConfigurationError: it is not an integer, or out of range; nothing was seeded.
    """
    if seed is None:
        seed = random.SystemRandom().randrange(_LIMIT)
    number = whole_number(seed)
    if number is None:
        raise ConfigurationError(
            f"seed_everything needs an integer or None, got {shown(seed)}. Pass for example 0."
        )
    seed = number
    if not 0 <= seed < _LIMIT:
        raise ConfigurationError(
            f"seed_everything needs a seed from 0 to {_LIMIT - 1}, the range of NumPy, got {seed}. "
            f"Try {seed % _LIMIT}."
        )
    random.seed(seed)
    # Also if nobody has imported it yet: whoever does would find it unseeded.
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)  # all accelerators included
    return seed


def generator_state(value: object) -> object:
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


def hashable(state: object) -> object:
    """Convert the state of a generator to a form that can be compared."""
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return tuple((key, hashable(value)) for key, value in state.items())
    return state.tobytes() if hasattr(state, "tobytes") else state


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
        self.probes: Dict[str, Callable[[], object]] = {
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
            if hashable(generator_state(each)) != hashable(self._states[name])
        ]

    def restore(self) -> None:
        """Set all generators back to their states at the start."""
        for name, each in self._objects.items():
            set_generator(each, self._states[name])

    def start(self, seed: int) -> None:
        """Let each draw numbers of its own that a seed says."""
        for key, each in enumerate(self._objects.values(), seed):
            if isinstance(each, random.Random):
                each.seed(key)
            elif isinstance(each, torch.Generator):
                each.manual_seed(key)
            elif hasattr(each, "bit_generator"):
                each.bit_generator.state = type(each.bit_generator)(key).state
            else:
                # The stream that Python's generator has for this key.
                _, numbers, _ = random.Random(key).getstate()
                each.set_state(("MT19937", numbers[:-1], numbers[-1]))


def _looked_at(generator: object) -> object:
    return hashable(generator_state(generator))
