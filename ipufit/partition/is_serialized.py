"""Whether a module has layers in parts, told without the code that computes in parts."""

from __future__ import annotations

from torch import nn

__all__ = ["InParts", "has_parts"]


class InParts(nn.Module):
    """What all serialised layers are."""


def has_parts(module: nn.Module) -> bool:
    """Whether a layer of the module is serialised."""
    return any(isinstance(layer, InParts) for layer in module.modules())
