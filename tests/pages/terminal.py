"""What pages show of a terminal: what stays on it, and which of that must come again.

Times and speeds differ from run to run, and a line of progress leaves out what has no room, so
those of a page and of a run are compared by the rest: what is being done, the names of the values,
and the values themselves, which other processors round otherwise.
"""

from __future__ import annotations

import io
import math
import re
from difflib import SequenceMatcher
from typing import Iterator, List

__all__ = ["COLUMNS", "Terminal", "shortened", "with_lines_of"]

COLUMNS = 80

# Lines that tell of a run: a bar or a line for each epoch, evaluation or prediction, and notes.
_PROGRESS = re.compile(r"(epoch \d+|evaluate|predict|record(ed|ing)|Graph compilation)\b")
# What has no room everywhere, or is another number each time.
_VARYING = re.compile(
    r"""
    \d+%\|[^|]*\|                               # a bar
    | (?<!epoch[ ])\b\d+/\d+\b                  # how much of it is done
    | \b\d+[ ](updates?|batch(es)?)\b
    | \d+:\d\d(:\d\d)?(<(\d+:\d\d(:\d\d)?|\?))? # a clock, and what is left
    | samples/s=\S+
    | [\d.?]+k?[ ]?(s|ms|\w+/s|s/\w+)(?![\w/])  # seconds and rates
    | [━─]+                                     # another bar
    """,
    re.VERBOSE,
)
_WORD = re.compile(r"[^\s,=:|\[\]()]+")
_CONTROL = re.compile(r"\x1b\[\??(\d*)[\d;]*([A-Za-z])|\n|\r|[^\x1b\n\r]+")

# An accuracy may be off by a sample, and a loss by what other kernels round.
_RELATIVE, _ABSOLUTE = 0.02, 0.005


class Terminal(io.StringIO):
    """A terminal of :data:`COLUMNS` columns to write to."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Say that it shows all that is written."""
        return "utf-8"

    def isatty(self) -> bool:
        """Say that somebody is watching."""
        return True

    def screen(self) -> str:
        """Return what stays on the screen, without spaces at the ends of lines."""
        rows: List[str] = [""]
        row = column = 0
        for match in _CONTROL.finditer(self.getvalue()):
            text, count, action = match[0], int(match[1] or 1), match[2]
            if text == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif text == "\r":
                column = 0
            elif action == "A":
                row = max(0, row - count)
            elif action in ("J", "K"):
                rows[row] = "" if match[1] == "2" else rows[row][:column]
                if action == "J":
                    del rows[row + 1 :]
            elif not text.startswith("\x1b"):
                old = rows[row].ljust(column)
                rows[row] = old[:column] + text + old[column + len(text) :]
                column += len(text)
        return "\n".join(line.rstrip() for line in rows)


def with_lines_of(page: str, screen: str) -> str:
    """Return what a run has left on the screen, with lines of progress as the page shows them.

    A line of progress that the page does not show, or shows with other values, stays as it is.
    """
    shown = [part for part in _parts(page) if _PROGRESS.match(part)]
    return "".join(_as_shown(part, shown) for part in _parts(screen))


def _parts(text: str) -> Iterator[str]:
    """Cut a text into lines, of which one of progress goes on in indented ones."""
    part = ""
    for line in text.splitlines():
        if part and not (_PROGRESS.match(part) and line.startswith("  ")):
            yield part
            part = ""
        part += f"{line}\n"
    yield part


def _as_shown(part: str, shown: List[str]) -> str:
    if _PROGRESS.match(part):
        for place, other in enumerate(shown):
            if _same(other, part):
                return shown.pop(place)
    return part


def _same(one: str, other: str) -> bool:
    words = [_WORD.findall(_VARYING.sub(" ", line)) for line in (one, other)]
    return len(words[0]) == len(words[1]) and all(map(_close, *words))


def _close(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        return math.isclose(float(one), float(other), rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except ValueError:
        return False


def shortened(page: str, screen: str) -> str:
    """Return what is on the screen, with ``...`` where the page leaves something out.

    A line of three points stands for so much that there are as many lines before and behind it as
    in the page, where lines of progress count with those that they go on in; points among words
    stand for what is between the words around them. Where the screen has nothing that they could
    stand for, it is shown whole.
    """
    first, *rest = re.split(r"^\.\.\.\n", page, flags=re.M)
    if "..." in "".join([first, *rest]) or len(rest) > 1:
        return _with_gaps(page, screen)
    if not rest:
        return screen
    before, behind = (len([*_parts(text)]) if text else 0 for text in (first, rest[0]))
    parts = [*_parts(screen)]
    return "".join([*parts[:before], "...\n", *parts[len(parts) - behind :]])


def _with_gaps(page: str, screen: str) -> str:
    """Return the page with other words where the screen has others, and the gaps that it had."""
    shown, came = ([*re.findall(r"\s*\S+", text)] for text in (page, screen))
    words = [[word.strip() for word in text] for text in (shown, came)]
    parts: List[str] = []
    matcher = SequenceMatcher(None, words[0], words[1], False)
    for action, start, end, low, high in matcher.get_opcodes():
        gaps = [place for place in range(start, end) if "..." in shown[place]]
        if action == "equal":
            parts += shown[start:end]
        elif gaps:
            before, behind = gaps[0] - start, end - gaps[-1] - 1
            parts += came[low : low + before]
            parts += shown[gaps[0] : gaps[-1] + 1]
            parts += came[high - behind : high]
        else:
            parts += came[low:high]
    text = "".join(part if part[0].isspace() else f"\n{part}" for part in parts).lstrip("\n") + "\n"
    pattern = re.escape(" ".join(text.split())).replace(re.escape("..."), ".*")
    return text if re.fullmatch(pattern, " ".join(screen.split())) else screen
