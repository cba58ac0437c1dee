"""Detection of Lightning's objects, and of methods that users override, without Lightning."""

from __future__ import annotations

import inspect
from typing import Any, Iterator, Optional, Set, Tuple

from torch import nn

__all__ = [
    "base_of",
    "is_collection",
    "is_data_module",
    "is_metric",
    "lightning_parts",
    "metrics_in",
    "overrides",
    "parameters_of",
    "parts_without_metrics",
]

# One library under two names.
_PACKAGES = ("lightning", "pytorch_lightning")


def base_of(value: object, name: str = "LightningModule") -> Optional[type]:
    """Return the class of Lightning that an object derives from, in either package; else None."""
    for kind in type(value).__mro__:
        if kind.__name__ == name and kind.__module__.partition(".")[0] in _PACKAGES:
            return kind
    return None


def is_data_module(value: object) -> bool:
    """Return True for a LightningDataModule."""
    return base_of(value, "LightningDataModule") is not None


def overrides(value: object, name: str, base: str = "LightningModule") -> bool:
    """Return True if the user has written this method, in the class or on the object.

    Args:
        value: a LightningModule or LightningDataModule.
        name: of the method; one that Lightning does not have counts if it is there.
        base: the name of Lightning's class.
    """
    if name in vars(value):
        return True
    owner = next((kind for kind in type(value).__mro__ if name in vars(kind)), None)
    lightning_class = base_of(value, base)
    return (
        owner is not None and lightning_class is not None and owner not in lightning_class.__mro__
    )


def lightning_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and all LightningModules inside it."""
    for part in module.modules():
        if base_of(part) is not None:
            yield part


def is_metric(value: object) -> bool:
    """Return True for a metric of torchmetrics or a collection of them."""
    return _is_of_torchmetrics(value, "Metric") or is_collection(value)


def is_collection(value: object) -> bool:
    """Return True for a MetricCollection of torchmetrics."""
    return _is_of_torchmetrics(value, "MetricCollection")


def _is_of_torchmetrics(value: object, name: str) -> bool:
    return any(
        kind.__name__ == name and kind.__module__.partition(".")[0] == "torchmetrics"
        for kind in type(value).__mro__
    )


def metrics_in(module: nn.Module, inside: bool = True) -> Iterator[Tuple[str, Any]]:
    """Yield the metric objects of a module by their paths, each once.

    Args:
        module: where they are.
        inside: whether those inside of others count too.
    """
    outermost: Tuple[str, ...] = ()
    for path, part in module.named_modules():
        if is_metric(part):
            is_inside = path.startswith(outermost)
            outermost += () if is_inside else (f"{path}.",)
            if inside or not is_inside:
                yield path, part


def parts_without_metrics(
    module: nn.Module, visited: Set[int], prefix: str, remove_duplicate: bool
) -> Iterator[Tuple[str, nn.Module]]:
    """Yield modules as ``named_modules`` does, without metric objects and their parts.

    Args:
        module: where to begin.
        visited: identities of parts that were yielded before.
        prefix: before all names.
        remove_duplicate: whether each is told once.
    """
    if remove_duplicate and id(module) in visited:
        return
    visited.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not is_metric(child):
            path = f"{prefix}.{name}" if prefix else name
            yield from parts_without_metrics(child, visited, path, remove_duplicate)


def parameters_of(method: Any) -> Optional[inspect.Signature]:
    """Return the signature of a bound method; None where Python can't tell."""
    try:
        return inspect.signature(method)
    except (TypeError, ValueError):
        return None
