"""Text of a printed tensor."""

from __future__ import annotations

import math
from typing import Callable, List, NamedTuple, Sequence, Union

import torch
from torch import Tensor

__all__ = ["FLOAT_FORMATS", "Style", "text_of"]

FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")

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
    before = _digits_before_point(largest)
    fixed = f"{{:.{max(style.digits - before, 0)}f}}".format
    if style.float_format == "none":
        return f"{{:.{style.digits}g}}".format
    if style.float_format == "scientific":
        return scientific
    fits = before <= style.digits and smallest >= _SMALLEST_FIXED
    return fixed if style.float_format == "fixed" or fits else scientific


def _digits_before_point(size: float) -> int:
    return 1 if size < 10 else math.floor(math.log10(size)) + 1


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
