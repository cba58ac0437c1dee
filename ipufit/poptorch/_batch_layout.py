"""Layout of a batch: a tensor, a list, a dict, or an object with a parser."""

from __future__ import annotations

from typing import Any, List, Sequence

from torch import Tensor

from ipufit.poptorch._parsers import parser_of, reconstructTensorStructure

__all__ = ["Layout"]

_ADVICE = (
    "An AsynchronousDataAccessor carries a tensor, a flat list, tuple or dict of tensors, or an "
    "object whose type has a parser (registerCustomArgParser, where the module is imported). Leave "
    "the rest out in the dataset or in collate_fn, or use DataLoaderMode.Sync."
)
_NAMES = {"tensor": "a tensor", "list": "a list or tuple", "dict": "a dict", "object": "an object"}


class Layout:
    """Splits the batches of a dataset into tensors and rebuilds them; all have the same layout.

    A tuple comes back as a list, and a dict in the order of the first batch's keys.

    Args:
        data: the first batch.
    Raises:
        AssertionError: there is more in it than tensors.
    """

    def __init__(self, data: Any) -> None:
        self._kind = _kind_of(data)
        self._keys = list(data) if self._kind == "dict" else []
        self._template: Any = None
        self._count = 0
        self._count = len(self.take_apart(data))
        if self._kind == "object":
            parser = parser_of(data)
            assert parser is not None
            # Its tensors are in the ring buffer; what travels is everything else.
            empty = [tensor.new_empty(0) for tensor in parser.yieldTensors(data)]
            self._template = reconstructTensorStructure(data, empty)

    def take_apart(self, data: Any) -> List[Tensor]:
        """Return the tensors of one batch.

        Raises:
            AssertionError: it is not like the first one, or there is more in it than tensors.
        """
        kind = _kind_of(data)
        if kind != self._kind:
            raise AssertionError(
                f"The first batch of the dataset is {_NAMES[self._kind]}, and a later one is "
                f"{_NAMES[kind]} ({type(data).__name__}). Make all batches alike."
            )
        if kind == "tensor":
            return [data]
        if kind == "dict":
            return self._values(data)
        if kind == "object":
            parser = parser_of(data)
            assert parser is not None
            return self._counted(list(parser.yieldTensors(data)))
        return self._counted(_only_tensors(list(data), range(len(data))))

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """A batch of these tensors."""
        if self._kind == "tensor":
            return tensors[0]
        if self._kind == "dict":
            return dict(zip(self._keys, tensors))
        if self._kind == "object":
            return reconstructTensorStructure(self._template, tensors)
        return list(tensors)

    def _values(self, data: Any) -> List[Tensor]:
        if len(data) != len(self._keys) or any(key not in data for key in self._keys):
            raise AssertionError(
                f"The first batch of the dataset has the keys {self._keys}, and a later one has "
                f"{list(data)}. Make all batches alike."
            )
        return _only_tensors([data[key] for key in self._keys], self._keys)

    def _counted(self, tensors: List[Tensor]) -> List[Tensor]:
        if self._count and len(tensors) != self._count:
            raise AssertionError(
                f"The first batch of the dataset has {self._count} tensors, and a later one has "
                f"{len(tensors)}. Make all batches alike."
            )
        return tensors


def _kind_of(data: object) -> str:
    if isinstance(data, Tensor):
        return "tensor"
    if isinstance(data, dict):
        return "dict"
    if parser_of(data) is not None:
        return "object"
    if isinstance(data, (list, tuple)):
        return "list"
    raise AssertionError(f"A batch of the dataset is of type {type(data).__name__}. {_ADVICE}")


def _only_tensors(values: List[Any], names: Sequence[Any]) -> List[Tensor]:
    for name, value in zip(names, values):
        if not isinstance(value, Tensor):
            raise AssertionError(
                f"Element {name!r} of a batch is of type {type(value).__name__}. {_ADVICE}"
            )
    return values
