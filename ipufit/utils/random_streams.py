"""Random numbers: where each stream starts, and how streams are kept apart.

A micro-batch draws from a stream of its own, keyed by (seed, domain, update, place in the update).
The updates of a run have consecutive numbers, so that one number says where an execution starts: an
IPU is given it as its seed, and a program over the stand-in for one draws the same numbers.
The place is ``a * R + r``, so replicas never share a stream; the key does not hold
``device_iterations``, so the numbers are the same for every value of it; and nothing has to be
stored to resume but the update counter. Validation lives in another domain and cannot disturb
training.

Draws of the data pipeline (shuffling, augmentation in the main process) come from one more stream,
keyed by (seed, epoch), which is put in place only while batches are fetched.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import operator
import random
import threading
from typing import Iterable, Iterator, Optional, Tuple

import torch

from ipufit.errors import ConfigurationError

__all__ = [
    "LOCK",
    "DataStream",
    "check_keyed_devices",
    "draw_seed",
    "isolated",
    "micro_batch_key",
    "seed_everything",
    "seed_generators",
    "stream_key",
    "update_key",
]

# torch has one generator and one recorder in a process: threads take turns.
LOCK = threading.RLock()


def draw_seed() -> int:
    """A fresh seed from torch's generator: ``torch.manual_seed`` before ``fit`` fixes a run."""
    return int(torch.randint(0, 2**31 - 1, (), dtype=torch.int64).item())


def stream_key(seed: int, *parts: object) -> int:
    """A 63-bit generator seed from a user's seed and the place where it is used.

    Hashed, so that neighbouring seeds, updates or replicas do not give related generators.
    """
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


# Types of devices whose default generator `seed_generators` starts and `isolated` puts back.
_KEYED = ("cpu", "cuda")


def check_keyed_devices(tensors: Iterable[Tuple[str, torch.Tensor]]) -> None:
    """Refuse devices whose random numbers would follow neither seed nor checkpoint.

    Args:
        tensors: parameters and buffers, with their names.

    Raises:
        ConfigurationError: one of them is on another device than a CPU or a CUDA device.
    """
    for name, tensor in tensors:
        if tensor.device.type not in _KEYED:
            raise ConfigurationError(
                "the module must be on a CPU or a CUDA device, where ipufit can key random numbers "
                f"by seed and update, but {name!r} is on {tensor.device}. Dropout there would "
                "follow neither seed nor checkpoint: move the module with module.cpu()."
            )


def seed_generators(key: int, device: torch.device) -> None:
    """Start the default generator of the host, and of ``device`` if it has one, at ``key``."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(key)


@contextlib.contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Leave the user's generators (host, and ``device``) as they were found."""
    with LOCK:
        host = torch.get_rng_state()
        accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        try:
            yield
        finally:
            torch.set_rng_state(host)
            if accelerator is not None:
                torch.cuda.set_rng_state(accelerator, device)


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
    """Start the global generators of Python, of NumPy if installed, and of torch at one seed.

    ``fit`` with ``seed=None`` draws its seed from torch's generator, so this fixes it too; what a
    dataset draws from ``random`` or NumPy in this process is fixed by this alone. Workers of a
    DataLoader do not inherit these generators: torch starts those of ``random``, NumPy and torch
    in each worker anew in every epoch (once, with ``persistent_workers``), from a number that in
    ``fit`` depends on its seed and the epoch. Generators that are objects, such as
    ``numpy.random.default_rng()``, are not touched.

    Args:
        seed: from 0 up to, not including, 2 ** 32; None draws one from the operating system.

    Returns:
        The seed, to write down or pass to ``fit``.

    Raises:
        ConfigurationError: it is no integer, or out of range; nothing was seeded.
    """
    if seed is None:
        seed = random.SystemRandom().randrange(_LIMIT)
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ConfigurationError(
            f"seed_everything needs an integer or None, got {seed!r}. Pass for example 0."
        )
    seed = operator.index(seed)
    if not 0 <= seed < _LIMIT:
        raise ConfigurationError(
            f"seed_everything needs a seed from 0 to {_LIMIT - 1}, which NumPy takes too, got "
            f"{seed}. Try {seed % _LIMIT}."
        )
    random.seed(seed)
    # Also if nobody has imported it yet: whoever does would find it unseeded.
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)  # all accelerators included
    return seed
