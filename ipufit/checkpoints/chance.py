"""The random numbers of the process, which are the user's: callbacks and datasets draw them."""

from __future__ import annotations

import random
import sys
from typing import Any, Dict

import torch

from ipufit.keeping import cuda_in_use

__all__ = ["generators", "set_generators"]


def generators() -> Dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, as far as they are in use."""
    version, numbers, gauss = random.getstate()
    found: Dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
        found["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    if cuda_in_use():
        found["cuda"] = list(torch.cuda.get_rng_state_all())
    return found


def set_generators(states: Dict[str, Any]) -> None:
    """Let them go on from there."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(states["torch"])
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype="uint32"), *rest))
    cuda = states.get("cuda", [])
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
