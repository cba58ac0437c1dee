"""Train and eval mode, set for a while and put back module by module."""

from __future__ import annotations

import contextlib
from typing import Iterator

from torch import nn

__all__ = ["evaluating", "training"]


@contextlib.contextmanager
def _as_found(module: nn.Module) -> Iterator[None]:
    flags = [(m, m.training) for m in module.modules()]
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


@contextlib.contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """Train mode. A module already in it keeps the parts that its user has set to eval."""
    with _as_found(module):
        if not module.training:
            module.train()
        yield


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode."""
    with _as_found(module):
        module.eval()
        yield
