"""Train and eval mode, set for a while and put back module by module."""

from __future__ import annotations

import contextlib
from typing import Iterator, Optional, Sequence

from torch import nn

__all__ = ["evaluating", "training"]


@contextlib.contextmanager
def _as_found(modules: Sequence[Optional[nn.Module]]) -> Iterator[None]:
    flags = [(m, m.training) for module in modules if module is not None for m in module.modules()]
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


@contextlib.contextmanager
def training(*modules: Optional[nn.Module]) -> Iterator[None]:
    """Train mode of module and loss; one already in it keeps the parts set to eval."""
    with _as_found(modules):
        for module in modules:
            if module is not None and not module.training:
                module.train()
        yield


@contextlib.contextmanager
def evaluating(*modules: Optional[nn.Module]) -> Iterator[None]:
    """Eval mode of module and loss."""
    with _as_found(modules):
        for module in modules:
            if module is not None:
                module.eval()
        yield
