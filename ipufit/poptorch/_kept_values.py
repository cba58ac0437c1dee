"""Values that backward needs, kept when forward changes their tensor in place.

A device's program has no changes in place: each makes a new value, and what was computed from the
old one stays differentiable. torch refuses such a backward instead.
"""

from __future__ import annotations

import contextlib
from typing import Dict, Iterator, List

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ipufit.engines.embedded.storage import storage_id

__all__ = ["KeptValues"]


class _Kept:
    """One tensor that backward needs, in a box of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class KeptValues:
    """What autograd saves while forward is recorded."""

    def __init__(self) -> None:
        self._of: Dict[int, List[_Kept]] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Look on while autograd saves tensors."""
        with saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
            yield

    def _pack(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor)
        self._of.setdefault(storage_id(tensor), []).append(kept)
        return kept

    def before_change(self, tensor: Tensor) -> None:
        """Copy what was saved of this memory, which is about to be written to."""
        for kept in self._of.pop(storage_id(tensor), ()):
            kept.tensor = kept.tensor.clone()
