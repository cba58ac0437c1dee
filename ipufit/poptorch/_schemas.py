"""Tensors that an operator reads and writes, by its schema."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

from torch import Tensor

__all__ = ["tensors_in", "written"]


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    schema = func._schema
    if schema.is_mutable:
        arguments = {**dict(zip((a.name for a in schema.arguments), args)), **kwargs}
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_in(arguments.get(argument.name))
