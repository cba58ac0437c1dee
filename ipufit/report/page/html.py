"""HTML that is safe by its type: text is escaped unless it is ``Html`` already."""

from __future__ import annotations

import dataclasses
import html
import json
from typing import List, Optional, Sequence, Union

__all__ = ["Cell", "Column", "Html", "Part", "Row", "data", "element", "join_parts", "table"]

_EMPTY = ("br", "col", "link", "meta")


class Html(str):
    """Markup; any other ``str`` is text."""

    __slots__ = ()


Part = Union[str, None, Sequence[Optional[str]]]


def element(tag: str, /, *parts: Part, **attributes: object) -> Html:
    """Render one element.

    Args:
        tag: its name.
        parts: what is in it: text, Html, lists of them, or None for nothing.
        attributes: by name: a final "_" is left out, any other becomes "-". True is an attribute
            without value; None and False are left out.
    """
    head = tag
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        head += f" {key}" if value is True else f' {key}="{html.escape(str(value))}"'
    if tag in _EMPTY:
        return Html(f"<{head}>")
    return Html(f"<{head}>{join_parts(*parts)}</{tag}>")


def join_parts(*parts: Part) -> Html:
    """Concatenate parts; text is escaped, None is left out."""
    markup: List[str] = []
    for part in parts:
        if part is None:
            continue
        if isinstance(part, Html):
            markup.append(part)
        elif isinstance(part, str):
            markup.append(html.escape(part))
        else:
            markup.append(join_parts(*part))
    return Html("".join(markup))


def data(value: object) -> str:
    """Render JSON that can't end the element ``script`` in which it stands."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # Line separators are escaped by json already.
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


@dataclasses.dataclass(frozen=True)
class Column:
    """A column's heading in a table of the page, and how its cells are set and sorted.

    Attributes:
        title: text of its head.
        is_number: whether it is set to the right, and sorted by value.
        about: a longer explanation of the title, shown as its tooltip.
    """

    title: str
    is_number: bool = False
    about: str = ""


@dataclasses.dataclass(frozen=True)
class Cell:
    """Content of one field of a table.

    Attributes:
        shown: text or Html.
        value: to sort by; None for the text.
        mark: an additional CSS class.
    """

    shown: str
    value: Optional[float] = None
    mark: str = ""


Row = Sequence[Union[Cell, str]]


def table(
    name: str,
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    sorts: bool = True,
    foot: Row = (),
) -> Html:
    """Render a table in a frame that scrolls; the first column is the head of each row.

    Args:
        name: of the element.
        caption: what it shows.
        columns: their heads.
        rows: one cell for each column.
        sorts: whether a reader may sort it.
        foot: a row that stays below the others.
    """
    head = [
        element(
            "th",
            element("button", column.title, type="button", title=column.about or None)
            if sorts
            else column.title,
            scope="col",
            class_="number" if column.is_number else None,
            aria_sort="none" if sorts else None,
        )
        for column in columns
    ]
    body = [_row(columns, row) for row in rows]
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", element("tr", head)),
            element("tbody", body),
            element("tfoot", _row(columns, foot)) if foot else None,
            id=name,
            class_="sorts" if sorts else None,
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def _row(columns: Sequence[Column], row: Row) -> Html:
    cells = zip(columns, row)
    return element("tr", [_cell(column, cell, i == 0) for i, (column, cell) in enumerate(cells)])


def _cell(column: Column, cell: Union[Cell, str], is_head: bool) -> Html:
    if not isinstance(cell, Cell):
        cell = Cell(cell)
    classes = ["number"] if column.is_number else []
    classes += [cell.mark] if cell.mark else []
    return element(
        "th" if is_head else "td",
        cell.shown,
        scope="row" if is_head else None,
        class_=" ".join(classes) or None,
        data_value=None if cell.value is None else repr(float(cell.value)),
    )
