"""Tables of the datasets library: map-style datasets that do not derive from torch's."""

from __future__ import annotations

from typing import Any, Mapping

__all__ = ["as_tensors", "is_table"]


def is_table(value: Any) -> bool:
    """Whether it is a ``datasets.Dataset``, by what it can do: the library is not imported."""
    kind = type(value)
    if kind.__module__.partition(".")[0] != "datasets" or isinstance(value, Mapping):
        return False
    return all(hasattr(kind, name) for name in ("__getitem__", "__len__", "with_format"))


def as_tensors(value: Any) -> Any:
    """A table whose rows are tensors, as ``with_format("torch")`` has them; others as they are.

    One with a format or a transform of its own keeps it.
    """
    if is_table(value) and value.format["type"] is None:
        return value.with_format("torch")
    return value
