"""Which objects are Lightning's, and what of them is the user's, without importing Lightning."""

from __future__ import annotations

import inspect
from typing import Any, Iterator, Optional

from torch import nn

__all__ = ["base_of", "is_data_module", "lightning_parts", "overrides", "parameters_of"]

# One library under two names.
_PACKAGES = ("lightning", "pytorch_lightning")


def base_of(value: object, name: str = "LightningModule") -> Optional[type]:
    """Lightning's class of this name, if the object is one; of either package."""
    for kind in type(value).__mro__:
        if kind.__name__ == name and kind.__module__.partition(".")[0] in _PACKAGES:
            return kind
    return None


def is_data_module(value: object) -> bool:
    """Whether it is a LightningDataModule."""
    return base_of(value, "LightningDataModule") is not None


def overrides(value: Any, name: str, base: str = "LightningModule") -> bool:
    """Whether the user has written this method, in the class or on the object.

    Args:
        value: a LightningModule or LightningDataModule.
        name: of the method; one that Lightning does not have counts if it is there.
        base: the name of Lightning's class.
    """
    if name in vars(value):
        return True
    owner = next((kind for kind in type(value).__mro__ if name in vars(kind)), None)
    known = base_of(value, base)
    return owner is not None and known is not None and owner not in known.__mro__


def lightning_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all LightningModules inside it."""
    for part in module.modules():
        if base_of(part) is not None:
            yield part


def parameters_of(method: Any) -> Optional[inspect.Signature]:
    """The signature of a bound method; None where Python can't tell."""
    try:
        return inspect.signature(method)
    except (TypeError, ValueError):
        return None
