"""The random numbers of the process, which are the user's: callbacks and datasets draw them."""

from __future__ import annotations

import sys
from typing import Any, Dict, Mapping

import torch

from ipufit.utils.state import generator_states, set_generators

__all__ = ["restore", "stored"]


def stored() -> Dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, as a checkpoint holds them."""
    states = generator_states()
    if "numpy" in states:
        kind, keys, position, has_gauss, cached = states["numpy"]
        states["numpy"] = [kind, keys.tolist(), int(position), int(has_gauss), float(cached)]
    return states


def restore(states: Mapping[str, Any]) -> None:
    """Let those of them that are here go on from there."""
    usable = {name: states[name] for name in ("torch", "python")}
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        kind, keys, *rest = states["numpy"]
        usable["numpy"] = (kind, numpy.array(keys, dtype="uint32"), *rest)
    cuda = states.get("cuda", [])
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        usable["cuda"] = cuda
    set_generators(usable)
