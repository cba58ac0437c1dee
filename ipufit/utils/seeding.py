"""One seed for every global random generator of the process."""

from __future__ import annotations

import importlib.util
import operator
import random
from typing import Optional

import torch

from ipufit.errors import ConfigurationError

__all__ = ["seed_everything"]

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
