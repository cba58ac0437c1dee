"""Print a tensor, and its gradient, each time that the program computes it."""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any, Tuple

import torch
from torch import Tensor

from ipufit.poptorch._errors import error
from ipufit.poptorch._operators.library import define
from ipufit.poptorch._operators.text import FLOAT_FORMATS, Style, text_of
from ipufit.poptorch._tracing import Trace, tracing
from ipufit.tracing.ipu_only import is_for_this_engine

__all__ = ["ipu_print_tensor"]


def _run(tensor: Tensor, title: str, *style: Any) -> Tensor:
    # One write: lines of other threads don't come between.
    sys.stderr.write(text_of(tensor, title, Style(*style)) + "\n")
    sys.stderr.flush()
    return tensor.clone()


_PRINT = define(
    "print_tensor(Tensor tensor, str title, int summarise_threshold, int edge_items, "
    "int max_line_width, int digits, str float_format, str separator, str open_bracket, "
    "str close_bracket) -> Tensor",
    _run,
    lambda tensor, *rest: torch.empty_like(tensor),
)


class _Printed(torch.autograd.Function):
    """Prints a tensor, and its gradient if there is a ``gradient_title``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, title: str, gradient_title: str, *style: Any) -> Tensor:
        ctx.gradient_title, ctx.style = gradient_title, style
        printed: Tensor = _PRINT(tensor, title, *style)
        return printed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tuple[Any, ...]:
        gradient = gradients[0]
        if ctx.gradient_title:
            gradient = _PRINT(gradient, ctx.gradient_title, *ctx.style)
        return (gradient, None, None, *[None] * len(ctx.style))


_untitled: weakref.WeakKeyDictionary[Trace, int] = weakref.WeakKeyDictionary()


def _default_title(trace: Trace) -> str:
    _untitled[trace] = _untitled.get(trace, -1) + 1
    return f"Tensor:{_untitled[trace]}"


def ipu_print_tensor(
    tensor: Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> Tensor:
    """Print a tensor on standard error whenever the model computes it, and return it.

    Outside of a model that is being compiled nothing is printed; an `ipufit.Model` on the embedded
    engine warns of it.

    Args:
        tensor: what is printed; its gradient is printed under ``<title>_gradient``.
        title: stands before the values; without one, tensors are numbered.
        print_gradient: whether the gradient is printed too.
        summarise_threshold: with more elements only those at the edges are shown; 0: always all.
        edge_items: how many at each edge.
        max_line_width: longer lines are split; 0: never.
        digits: of each number, without the exponent; 0: numbers are not aligned.
        float_format: ``"auto"``, ``"fixed"``, ``"scientific"``, or ``"none"``, which is each
            number for itself.
        separator: between values; its first character.
        open_bracket: its first character.
        close_bracket: its first character.
    Raises:
        Error: it is no tensor, or there is no such format.
    """
    if not isinstance(tensor, Tensor):
        raise error(
            f"ipu print tensor must take a torch.tensor argument. {type(tensor)} is not "
            "supported. Print Python values with print()."
        )
    if float_format not in FLOAT_FORMATS:
        raise error(
            f"ipu print tensor expects float_format to be one of {', '.join(FLOAT_FORMATS)}, got "
            f"{float_format!r}. Leave it out for auto."
        )
    trace = tracing()
    if trace is None:
        if is_for_this_engine():
            warnings.warn(
                "poptorch.ipu_print_tensor prints nothing on the embedded engine. Use ipufit.log, "
                "or compile(..., run_eagerly=True) and print().",
                UserWarning,
                stacklevel=2,
            )
        return tensor
    if title:
        gradient_title = f"{title}_gradient"
    else:
        title = _default_title(trace)
        gradient_title = f"Gradient___{title}"
    printed: Tensor = _Printed.apply(  # type: ignore[no-untyped-call]
        tensor,
        title,
        gradient_title if print_gradient else "",
        summarise_threshold,
        edge_items,
        max_line_width,
        digits,
        float_format,
        # What the device takes is a single character.
        separator[:1],
        open_bracket[:1],
        close_bracket[:1],
    )
    return printed
