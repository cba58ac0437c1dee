"""Print a tensor, and its gradient, each time that the program computes it."""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ipufit.poptorch._logging import error
from ipufit.poptorch._tracing import define, need_kind, tracing
from ipufit.tracing.ipu_only import is_for_this_engine
from ipufit.utils.console import warn_user

_FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")

# A fixed format would show a smaller number as nothing but zeros.
_SMALLEST_FIXED = 1e-4

Number = Union[int, float]


class Style(NamedTuple):
    """Format of numbers and rows, as in :func:`poptorch.ipu_print_tensor`.

    Separator and brackets are one character each.
    """

    summarise_threshold: int
    edge_items: int
    max_line_width: int
    digits: int
    float_format: str
    separator: str
    open_bracket: str
    close_bracket: str


def text_of(tensor: Tensor, title: str, style: Style) -> str:
    """Format the title and the values, one row of the last dimension a line.

    All elements share one format and one width, decided by those of the whole tensor: fixed point,
    or scientific where the largest has more digits before the point than ``digits`` or the
    smallest (but zero) is under 1e-4.
    """
    values = tensor.detach().cpu()
    if values.dtype == torch.bool:
        values = values.to(torch.uint8)
    form = _format(values, style)
    summarised = 0 < style.summarise_threshold < values.numel()
    if values.dim() == 0:
        return f"{title}: {form(values.item())}"
    width = 0
    if style.digits:
        width = max(len(form(v)) for v in _shown(values, style, summarised).flatten().tolist())
    lines = _rows(values, 0, style, summarised, lambda value: form(value).rjust(width))
    return f"{title}: " + "\n".join(lines)


def _format(values: Tensor, style: Style) -> Callable[[Number], str]:
    if not values.is_floating_point():
        return str
    if not style.digits:
        return "{:g}".format
    sizes = values.double().abs().flatten()
    sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
    largest = float(sizes.max()) if len(sizes) else 0.0
    smallest = float(sizes.min()) if len(sizes) else 1.0
    scientific = f"{{:.{max(style.digits - 1, 0)}e}}".format
    before = 1 if largest < 10 else math.floor(math.log10(largest)) + 1
    fixed = f"{{:.{max(style.digits - before, 0)}f}}".format
    if style.float_format == "none":
        return f"{{:.{style.digits}g}}".format
    if style.float_format == "scientific":
        return scientific
    fits = before <= style.digits and smallest >= _SMALLEST_FIXED
    return fixed if style.float_format == "fixed" or fits else scientific


def _shown_positions(length: int, style: Style, summarised: bool) -> Sequence[int]:
    """Return the positions that are shown; -1 stands for those left out."""
    if not summarised or length <= 2 * style.edge_items:
        return range(length)
    edge = style.edge_items
    return [*range(edge), -1, *range(length - edge, length)]


def _shown(values: Tensor, style: Style, summarised: bool) -> Tensor:
    for dim, length in enumerate(values.shape):
        shown = [i for i in _shown_positions(length, style, summarised) if i >= 0]
        values = values.index_select(dim, torch.tensor(shown, dtype=torch.int64))
    return values


def _rows(
    values: Tensor, depth: int, style: Style, summarised: bool, form: Callable[[Number], str]
) -> List[str]:
    indent = " " * depth
    positions = _shown_positions(len(values), style, summarised)
    if values.dim() == 1:
        row = values.tolist()
        return _row([form(row[i]) if i >= 0 else "..." for i in positions], depth, style)
    lines = [indent + style.open_bracket]
    for position in positions:
        if position < 0:
            lines.append(indent + " ...")
        else:
            lines += _rows(values[position], depth + 1, style, summarised, form)
    return [*lines, indent + style.close_bracket]


def _row(elements: Sequence[str], depth: int, style: Style) -> List[str]:
    """Format one row, on as many lines as it needs; continuation lines are indented by two more."""
    lines = [" " * depth + style.open_bracket]
    empty = True
    for position, element in enumerate(elements):
        last = position == len(elements) - 1
        piece = element + (style.close_bracket if last else style.separator)
        too_long = 0 < style.max_line_width < len(lines[-1]) + len(piece)
        if too_long and not empty:
            lines.append(" " * (depth + 2))
        lines[-1] += piece
        empty = False
    return lines


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
    def forward(
        ctx: Any, tensor: Tensor, title: str, gradient_title: str, *style: object
    ) -> Tensor:
        ctx.gradient_title, ctx.style = gradient_title, style
        printed: Tensor = _PRINT(tensor, title, *style)
        return printed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tuple[Optional[Tensor], ...]:
        gradient = gradients[0]
        if ctx.gradient_title:
            gradient = _PRINT(gradient, ctx.gradient_title, *ctx.style)
        return (gradient, None, None, *[None] * len(ctx.style))


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
    expectation = "ipu print tensor must take a torch.tensor argument."
    need_kind(tensor, Tensor, expectation, "Print Python values with print().")
    if float_format not in _FLOAT_FORMATS:
        raise error(
            f"ipu print tensor expects float_format to be one of {', '.join(_FLOAT_FORMATS)}, got "
            f"{float_format!r}. Leave it out for auto."
        )
    trace = tracing()
    if trace is None:
        if is_for_this_engine():
            warn_user(
                "poptorch.ipu_print_tensor prints nothing on the embedded engine. Use ipufit.log, "
                "or compile(..., run_eagerly=True) and print().",
            )
        return tensor
    if title:
        gradient_title = f"{title}_gradient"
    else:
        title = f"Tensor:{trace.untitled}"
        trace.untitled += 1
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
