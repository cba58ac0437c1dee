"""The arguments of a call in one normal form, and what a later call may change in them."""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor

from ipufit.poptorch._argument_match import ADVICE, compare, compare_keys
from ipufit.poptorch._errors import error
from ipufit.poptorch._parsers import (
    flattenTensorStructure,
    reconstructTensorStructure,
)

__all__ = ["Arguments"]

_logger = logging.getLogger("poptorch::python")


class Arguments:
    """The arguments of one call, bound to the parameters of forward.

    Attributes:
        args: the positional arguments, defaults among them.
        names: names of the positional arguments in messages.
        kwargs: the keyword-only arguments.
    """

    def __init__(
        self,
        args: Tuple[Any, ...],
        names: Sequence[str],
        kwargs: Mapping[str, Any],
        original: Optional[Tuple[Any, Any]] = None,
    ) -> None:
        self.args = args
        self.names = tuple(names)
        self.kwargs = dict(kwargs)
        self._original = original
        self._warned = False

    def tensors(self, like: Optional[Arguments] = None) -> List[Tensor]:
        """Return all tensors in one list: dense in memory, without a gradient.

        Args:
            like: arguments that the model was compiled with, which fix the order of a dict's keys.
        """
        return _flat((self.args, self.kwargs), like)

    def callers(self, like: Optional[Arguments] = None) -> List[Tensor]:
        """Return the caller's own tensors in the order of :meth:`tensors`, for changes in place."""
        return _flat(self._original or (self.args, self.kwargs), like)

    def tensor_names(self) -> List[str]:
        """Return the name in messages of each of the ``tensors()``."""
        named: List[str] = []
        for name, value in [*zip(self.names, self.args), *self.kwargs.items()]:
            count = len(flattenTensorStructure(value))
            alone = isinstance(value, Tensor)
            named += [name] if alone else [f"tensor {i} of {name}" for i in range(count)]
        return named

    def rebuild(self, tensors: Sequence[Tensor]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """Return arguments for forward with these tensors in place of ``tensors()``."""
        args, kwargs = reconstructTensorStructure((self.args, self.kwargs), tensors)
        return args, kwargs

    def without_values(self) -> Arguments:
        """Return a copy with tensors of device "meta", with which later calls are compared."""
        empty = [torch.empty_like(tensor, device="meta") for tensor in self.tensors()]
        args, kwargs = self.rebuild(empty)
        return Arguments(args, self.names, kwargs)

    def check_like(self, compiled: Arguments) -> None:
        """Refuse arguments for which the program was not compiled.

        Raises:
            Error: another number of arguments, type, length, key, dtype, shape or value.
        """
        if len(self.args) != len(compiled.args):
            raise error(
                f"Number of positional arguments mismatch: expected {len(compiled.args)} arguments "
                f"but got {len(self.args)}.{ADVICE}"
            )
        differing: Set[str] = set()
        for name, expected, got in zip(compiled.names, compiled.args, self.args):
            compare(name, expected, got, differing)
        compare_keys("named arguments", compiled.kwargs, self.kwargs)
        for name, expected in compiled.kwargs.items():
            compare(name, expected, self.kwargs[name], differing)
        if differing and not compiled._warned:
            compiled._warned = True
            _logger.warning(
                "The values in %s that are no tensors differ from those of the first call, which "
                "are part of the compiled program and are used again. Pass them as arguments of "
                "their own to have this checked, or as tensors to change them.",
                ", ".join(sorted(differing)),
            )


def _flat(structure: Tuple[Any, Any], like: Optional[Arguments]) -> List[Tensor]:
    return flattenTensorStructure(structure, None if like is None else (like.args, like.kwargs))
