"""Detect floating-point exceptions: operators that make NaN or infinities of numbers."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from torch import Tensor, fx

from ipufit.poptorch.poptorch_core import UnrecoverableError

__all__ = ["FloatChecker"]

# Comparisons that have no answer for a NaN.
_ORDERING = ("aten::lt", "aten::le", "aten::gt", "aten::ge")

# What these make holds whatever was in the memory.
_UNFILLED = ("aten::empty", "aten::new_empty")


class FloatChecker(fx.Interpreter):
    """Runs a graph and checks every result.

    NaN and infinities among the inputs are passed on, as a device does: moving one is no exception.
    Making one of numbers is, and so is comparing a NaN by size.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=True)

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the graph.

        Raises:
            UnrecoverableError: an operator made a NaN or an infinity, or compared a NaN.
        """
        return self.run(*tensors)

    def run_node(self, n: fx.Node) -> Any:
        """Run one operator, and check its results."""
        schema = getattr(n.target, "_schema", None)
        if n.op != "call_function" or schema is None:
            return super().run_node(n)
        inputs = list(_values(self.fetch_args_kwargs_from_env(n)))
        # Looked at before: an operator may change what it is given.
        nan, infinite = _any(torch.isnan, inputs), _any(torch.isinf, inputs)
        result = super().run_node(n)
        exception = _exception(schema.name, nan, infinite, list(_values(result)))
        if exception is not None:
            raise UnrecoverableError(
                f"a floating-point exception: {n.target} {exception}. Look at its inputs, or leave "
                "Precision.enableFloatingPointExceptions off.",
                "poplar_unrecoverable_runtime_error",
            )
        return result


def _exception(name: str, nan: bool, infinite: bool, results: Sequence[Any]) -> Optional[str]:
    """Describe the exception that an operator has raised, or return None."""
    if nan and name.startswith(_ORDERING):
        return "compared a NaN"
    if name.startswith(_UNFILLED):
        return None
    if not nan and _any(torch.isnan, results):
        return "made a NaN of numbers"
    if not infinite and _any(torch.isinf, results):
        return "made an infinity of finite numbers"
    return None


def _any(question: Callable[[Tensor], Tensor], values: Sequence[Any]) -> bool:
    return any(
        bool(question(value).any())
        if isinstance(value, Tensor)
        else bool(question(torch.tensor(value)))
        for value in values
    )


def _values(value: object) -> Iterator[Any]:
    """Yield the floating-point tensors, and the numbers that are not finite, in a structure."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _values(each)
    elif isinstance(value, dict):
        yield from _values(list(value.values()))
