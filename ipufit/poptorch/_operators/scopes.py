"""Context managers that annotate operators for a compiler of IPU programs; values don't change."""

from __future__ import annotations

import weakref
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch

from ipufit.poptorch import enums
from ipufit.poptorch._errors import error
from ipufit.poptorch._operators.graph import graph_so_far
from ipufit.poptorch._tracing import Trace, tracing

__all__ = ["MultiConv", "NameScope", "pop_name_scope", "push_name_scope"]

# For each recording inside of a MultiConv: how many nodes there were before.
_open: weakref.WeakKeyDictionary[Trace, int] = weakref.WeakKeyDictionary()


def _is_convolution(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name != "aten::convolution":
        return False
    # A transposed one is another operator on the device.
    return not node.args[6]


class MultiConv:
    """Combines the convolutions inside into one operator of the device."""

    def __init__(self) -> None:
        self._available_memory_proportions: Optional[Sequence[float]] = None
        self._partials_types: Optional[Sequence[int]] = None
        self._plan_type: Optional[enums.MultiConvPlanType] = None
        self._per_conv_reserved_tiles: Optional[int] = None
        self._cycle_back_off: Optional[float] = None
        self._enable_conv_ditherings: Optional[Sequence[bool]] = None

    @staticmethod
    def _validatePerConvProperty(name: str, value: Any, expected_scalar_type: type) -> Any:
        if value is None:
            return value
        if isinstance(value, expected_scalar_type):
            return (value,)
        several = isinstance(value, (list, tuple)) and len(value) > 0
        if several and all(isinstance(one, expected_scalar_type) for one in value):
            return value
        raise AssertionError(
            f"Invalid {name}! Expected a {expected_scalar_type.__name__}, or a list of one for "
            f"each convolution, got {value!r}."
        )

    def availableMemoryProportions(self, value: Union[float, List[float]]) -> MultiConv:
        """Set the proportion of memory for temporary data, for each convolution or for all."""
        name = "available memory proportion"
        self._available_memory_proportions = self._validatePerConvProperty(name, value, float)
        return self

    def partialsTypes(self, value: Union[torch.dtype, List[torch.dtype]]) -> MultiConv:
        """Set the type of partial sums, for each convolution or for all: float or half."""
        codes = {torch.float32: 0, torch.float16: 1}
        values = value if isinstance(value, (list, tuple)) else (value,)
        for one in values:
            if not isinstance(one, torch.dtype) or one not in codes:
                raise ValueError(
                    f"Invalid partials types. Expecting torch.float or torch.half, got {one!r}."
                )
        self._partials_types = [codes[one] for one in values]
        return self

    def enableConvDithering(self, value: Union[bool, List[bool]]) -> MultiConv:
        """Turn dithering on or off, for each convolution or for all."""
        values = value if isinstance(value, (list, tuple)) or value is None else (value,)
        for one in values or ():
            if not isinstance(one, bool):
                raise ValueError(f"value must be bool or list of bools, got {one!r}.")
        self._enable_conv_ditherings = values
        return self

    def planType(self, value: enums.MultiConvPlanType) -> MultiConv:
        """Set how the convolutions run: in parallel or one after another."""
        if value is not None and not isinstance(value, enums.MultiConvPlanType):
            raise AssertionError(
                f"Invalid plan type! Expected a poptorch.MultiConvPlanType, got {value!r}."
            )
        self._plan_type = value
        return self

    def perConvReservedTiles(self, value: int) -> MultiConv:
        """Set the number of tiles reserved for each convolution."""
        if not isinstance(value, int):
            raise AssertionError(f"Invalid reserved tiles! Expected an int, got {value!r}.")
        self._per_conv_reserved_tiles = value
        return self

    def cycleBackOff(self, value: float) -> MultiConv:
        """Set the cycle back-off, a proportion between 0 and 1."""
        if not isinstance(value, float):
            raise AssertionError(f"Invalid cycle back off! Expected a float, got {value!r}.")
        self._cycle_back_off = value
        return self

    def __enter__(self) -> None:
        trace = tracing()
        if trace is None:
            return
        if trace in _open:
            raise error(
                "Nested poptorch.MultiConv is not supported. Close the outer one first, or put "
                "all convolutions into it."
            )
        _open[trace] = len(graph_so_far())

    def __exit__(self, type: object, value: object, traceback: object) -> None:
        trace = tracing()
        if trace is None:
            return
        before = _open.pop(trace, 0)
        if type is not None:
            return
        count = sum(_is_convolution(node) for node in graph_so_far()[before:])
        if not count:
            raise error(
                "Unexpected end_multi_conv: there is no convolution in this poptorch.MultiConv. "
                "Put at least one into it, or remove it."
            )
        self._check_lengths(count)

    def _check_lengths(self, count: int) -> None:
        properties: List[Tuple[str, Optional[Sequence[Any]]]] = [
            ("availableMemoryProportions", self._available_memory_proportions),
            ("partialsTypes", self._partials_types),
            ("enableConvDithering", self._enable_conv_ditherings),
        ]
        for name, values in properties:
            if values is not None and len(values) not in (1, count):
                raise error(
                    f"poptorch.MultiConv.{name} expects one value, or one for each of its "
                    f"{count} convolutions, got {len(values)}."
                )


class NameScope:
    """Prefix the names of the operators inside, which ``getTensorNames`` lists.

    Args:
        name: the prefix.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise AssertionError(f"Parameter to NameScope must be a string, got {name!r}.")
        self.name = name

    def __enter__(self) -> None:
        push_name_scope(self.name)

    def __exit__(self, type: object, value: object, traceback: object) -> None:
        pop_name_scope()


def push_name_scope(name: str) -> None:
    """Prefix the names of operators from here on, until the scope is popped."""
    trace = tracing()
    if trace is not None:
        trace.activations.enter(name)


def pop_name_scope() -> None:
    """Remove the scope of the last ``push_name_scope``.

    Raises:
        Error: there is none in the model that is being recorded.
    """
    trace = tracing()
    if trace is not None:
        trace.activations.leave("")
