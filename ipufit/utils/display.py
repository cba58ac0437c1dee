"""How far something is, shown while it runs: in a terminal, a notebook, by rich, or as lines."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from typing import Any, Dict, List, Mapping, Optional, Sequence, TextIO, Tuple, Union

from ipufit.utils.console import notebook_shell

__all__ = ["Display", "Progress", "make_display"]

_MOST_CELLS, _LEAST_CELLS = 25, 8
_COLUMNS = 80  # of a terminal that does not say how wide it is
_INDENT = "  "  # of the second line and those below
_ROWS = 10  # finished epochs that a notebook shows


@dataclasses.dataclass
class Progress:
    """How far an epoch, an evaluation or a prediction is.

    Attributes:
        title: what runs, such as "epoch 1/10".
        unit: what is counted, in the plural.
        total: how many of them there are; None where nobody knows.
        done: how many are over.
        seconds: since it began, without recording.
        samples: how many are over.
        values: loss and metrics so far, in words, by name.
    """

    title: str
    unit: str
    total: Optional[int]
    done: int = 0
    seconds: float = 0.0
    samples: float = 0.0
    values: Dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def rate(self) -> Dict[str, str]:
        """Samples per second, by name, where there are any."""
        rate = self.samples / self.seconds if self.samples and self.seconds > 0 else 0.0
        return {"samples/s": f"{rate:.0f}"} if rate else {}

    def facts(self) -> List[str]:
        """The count, the time left and the rate, in words: the most important first."""
        if self.total is None:
            facts = [f"{self.done} {self.unit}"]
        else:
            facts = [f"{self.done:>{len(str(self.total))}}/{self.total}"]
            if 0 < self.done < self.total:
                left = self.seconds / self.done * (self.total - self.done)
                facts.append(f"{_clock(left)} left")
        return facts + [f"{rate} {name}" for name, rate in self.rate.items()]

    def lines(self, columns: Optional[int], cells: str) -> List[str]:
        """Lay it out in lines no longer than ``columns``, with every value; None for one line.

        Args:
            columns: width of the terminal.
            cells: what a bar is drawn with: a cell that is done, and one that is not.
        """
        room, facts = columns or _COLUMNS, self.facts()
        while len(facts) > 1 and len(self._head(facts, _LEAST_CELLS, cells)) > room:
            facts.pop()
        width = min(_MOST_CELLS, room - len(self._head(facts, 0, cells)) - 1)
        head = self._head(facts, width if width >= _LEAST_CELLS else 0, cells)
        values = _words(self.values)
        whole = wrap([head, *values], columns)
        return (
            whole if len(whole) == 1 else [*wrap([head], columns), *wrap(values, columns, _INDENT)]
        )

    def _head(self, facts: Sequence[str], width: int, cells: str) -> str:
        bar = ""
        if width and self.total:
            done = width * min(self.done, self.total) // self.total
            bar = f"{cells[0] * done}{cells[1] * (width - done)} "
        return f"{self.title} {bar}{', '.join(facts)}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _words(values: Mapping[str, str]) -> List[str]:
    return [f"{name}={value}" for name, value in values.items()]


def wrap(parts: Sequence[str], columns: Optional[int], indent: str = "") -> List[str]:
    """Join parts by commas, in lines no longer than ``columns`` that end between two of them.

    Args:
        parts: at least one; one that is longer than a line is cut into several.
        columns: of the terminal; None for one line.
        indent: before the first line; the others have two spaces.
    """
    if columns is None:
        return [indent + ", ".join(parts)]
    lines = [indent]
    for place, part in enumerate(parts):
        part += "," if place < len(parts) - 1 else ""
        joined = f"{lines[-1]} {part}" if place else indent + part
        if len(joined) <= columns or not place:
            lines[-1] = joined
        else:
            lines.append(_INDENT + part)
    return [line[at : at + columns] for line in lines for at in range(0, len(line), columns)]


def _line(title: str, count: str, values: Mapping[str, str]) -> str:
    return ", ".join([f"{title}: {count}", *_words(values)])


class Display:
    """Shows lines that stay, one after another: all that a pipe or a file gets.

    Args:
        stream: where they go; None is standard error.
    """

    def __init__(self, stream: Optional[TextIO] = None) -> None:
        self._stream = stream
        self._note = ""

    def draw(self, bars: Sequence[Progress], note: str = "") -> None:
        """Show what goes on in the place of what was drawn before.

        Args:
            bars: what runs, the outermost first.
            note: a sentence on what is done at this moment; a pipe gets it once.
        """
        if note and note != self._note:
            self._note = note
            self.write(note)

    def keep(self, title: str, count: str, values: Mapping[str, str]) -> None:
        """Show a result that stays, in the place of what was drawn last.

        Args:
            title: of what is over, such as "epoch 1/10".
            count: how many updates or batches there were.
            values: its loss and metrics, in words, by name.
        """
        self.write(_line(title, count, values))

    def write(self, text: str) -> None:
        """Show a line that stays."""
        print(text, file=self._stream or sys.stderr, flush=True)

    def close(self) -> None:
        """Leave what is shown as it is; safe twice."""


class _Terminal(Display):
    """Shows bars in lines that change, below those that stay, whatever else is printed.

    While it shows some, text of others for a terminal goes above them.

    Args:
        stream: of the terminal.
        moves: whether the cursor can be moved up; else there is one line.
    """

    def __init__(self, stream: TextIO, moves: bool) -> None:
        super().__init__(stream)
        self._moves = moves
        self._lines: List[str] = []
        self._in_line = False
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._replaced: List[Tuple[str, TextIO, _Above]] = []
        self._cells = "\u2501\u2500" if _writes(stream, "\u2501\u2500") else "=-"

    def draw(self, bars: Sequence[Progress], note: str = "") -> None:
        """Show the bars and the note in the place of what was drawn before."""
        columns, rows = self._size()
        lines = [line for bar in bars for line in bar.lines(columns, self._cells)]
        with self._lock:
            self._replace_streams()
            self._show((lines + [note] * bool(note))[-rows:])

    def keep(self, title: str, count: str, values: Mapping[str, str]) -> None:
        """Show a result that stays, in lines that end between two values."""
        columns, _ = self._size()
        self.write("\n".join(wrap([f"{title}: {count}", *_words(values)], columns)))

    def write(self, text: str) -> None:
        """Show a line that stays."""
        with self._lock:
            self._show([])
            self._put(f"{text}\n")

    def above(self, stream: TextIO, text: str) -> None:
        """Write what somebody else has printed above the lines that change."""
        if os.getpid() != self._process:
            stream.write(text)  # a worker, which draws nothing
            return
        with self._lock:
            lines = self._lines
            self._show([])
            stream.write(text)
            stream.flush()
            self._in_line = not text.endswith("\n")
            if not self._in_line:
                self._show(lines)

    def close(self) -> None:
        """Leave what is shown as it is, and the standard streams to themselves; safe twice."""
        with self._lock:
            if self._lines:
                self._put("\n")
                self._lines = []
            while self._replaced:
                name, stream, above = self._replaced.pop()
                if getattr(sys, name) is above:
                    setattr(sys, name, stream)

    def _replace_streams(self) -> None:
        if not self._moves or self._replaced:
            return
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and stream.isatty():
                above = _Above(stream, self)
                self._replaced.append((name, stream, above))
                setattr(sys, name, above)

    def _show(self, lines: List[str]) -> None:
        if lines == self._lines:
            return
        text = ""
        if self._lines and self._moves:
            up = f"\x1b[{len(self._lines) - 1}A" if len(self._lines) > 1 else ""
            text = f"{up}\r\x1b[J"
        elif self._lines:
            text = f"\r{' ' * len(self._lines[-1])}\r"
        elif lines and self._in_line:
            text, self._in_line = "\n", False
        self._lines = lines
        self._put(text + "\n".join(lines))

    def _put(self, text: str) -> None:
        assert self._stream is not None
        self._stream.write(text)
        self._stream.flush()

    def _size(self) -> Tuple[Optional[int], int]:
        """Return the columns that a line may have, None for any number, and how many lines."""
        if not self._moves:
            return None, 1
        assert self._stream is not None
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return _COLUMNS - 1, _ROWS
        # In the last column some terminals begin a new line.
        return (size.columns or _COLUMNS) - 1, max(size.lines - 1, 1)


class _Above:
    """A standard stream while bars are drawn: its text goes above them."""

    def __init__(self, stream: TextIO, terminal: _Terminal) -> None:
        self.stream = stream
        self.terminal = terminal

    def write(self, text: str) -> int:
        """Write as the stream does."""
        if text:
            self.terminal.above(self.stream, text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Notebook(Display):
    """Shows bars below a table of what is over, in one output of a cell.

    Args:
        shell: IPython's.
    """

    def __init__(self, shell: Any) -> None:
        super().__init__()
        self._shell = shell
        self._id = ""
        self._rows: List[Dict[str, str]] = []
        self._texts: List[str] = []
        self._kept: List[str] = []

    def draw(self, bars: Sequence[Progress], note: str = "") -> None:
        """Show the bars and the note below the table."""
        # Imported here: its table of characters would slow `import ipufit` down.
        import html

        names = dict.fromkeys(name for row in self._rows for name in row)
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        rows = [
            "".join(f"<td>{html.escape(row.get(name, ''))}</td>" for name in names)
            for row in self._rows[-_ROWS:]
        ]
        page = [html.escape(text) + "<br>" for text in self._texts]
        if rows:
            body = "".join(f"<tr>{row}</tr>" for row in rows)
            page.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        for bar in bars:
            value = "" if bar.total is None else f" value='{bar.done}' max='{bar.total}'"
            text = ", ".join([*bar.facts(), *_words(bar.values)])
            page.append(f"{bar.title} <progress{value}></progress> {html.escape(text)}<br>")
        page += [html.escape(note)] * bool(note)
        lines = [*self._kept]
        lines += [line for bar in bars for line in bar.lines(None, "=-")]
        data = {"text/html": "".join(page), "text/plain": "\n".join(lines + [note] * bool(note))}
        is_first, self._id = not self._id, self._id or f"ipufit-{id(self)}-{time.time()}"
        publish = self._shell.display_pub.publish
        publish(data, transient={"display_id": self._id}, update=not is_first)

    def keep(self, title: str, count: str, values: Mapping[str, str]) -> None:
        """Add a row to the table for an epoch, and a line for anything else."""
        kind, _, which = title.partition(" ")
        if not which:
            super().keep(title, count, values)
            return
        self._kept.append(_line(title, count, values))
        self._rows.append({kind: which, **values})
        self.draw([])

    def write(self, text: str) -> None:
        """Show a line above the table."""
        self._texts.append(text)
        self._kept.append(text)
        self.draw([])


class _Rich(Display):
    """Shows bars by rich, below lines that stay."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)

    def draw(self, bars: Sequence[Progress], note: str = "") -> None:
        """Show the bars and the note in the place of what was drawn before."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        shown: List[Any] = []
        for bar in bars:
            grid = Table.grid(padding=(0, 1))
            cells = ProgressBar(total=bar.total, completed=bar.done, width=_MOST_CELLS)
            grid.add_row(Text(bar.title, "bold"), cells, Text(", ".join(bar.facts())))
            shown += [grid, *[Text("  " + ", ".join(_words(bar.values)))] * bool(bar.values)]
        self._live.start()
        self._live.update(Group(*shown, *[Text(note, "dim")] * bool(note)), refresh=True)

    def keep(self, title: str, count: str, values: Mapping[str, str]) -> None:
        """Show a result that stays above the bars."""
        from rich.text import Text

        line = Text.assemble((title, "bold"), f": {count}")
        for name, value in values.items():
            line.append(", ").append(name, "cyan").append(f"={value}")
        self._live.update(Text())
        self._live.console.print(line)

    def write(self, text: str) -> None:
        """Show a line that stays above the bars."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """End the lines that change."""
        self._live.stop()


def _writes(stream: TextIO, text: str) -> bool:
    """Return True if the encoding of a stream has these characters."""
    try:
        text.encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def make_display(verbose: Union[int, str]) -> Display:
    """Return what shows progress where the program runs.

    Args:
        verbose: 1 for bars, 2 for lines that stay alone, "rich" for bars by rich.
    """
    stream = sys.stderr
    if isinstance(stream, _Above):
        return stream.terminal  # of a fit whose callback evaluates, for example
    shell = notebook_shell()
    if shell is not None:
        return _Notebook(shell)
    if verbose == "rich":
        return _Rich()
    is_terminal = stream is not None and stream.isatty()
    is_dumb = is_terminal and os.environ.get("TERM") == "dumb"
    # The switch of tqdm's for all bars of a process.
    if verbose == 2 or stream is None or is_dumb or os.environ.get("TQDM_DISABLE", "0") != "0":
        return Display()
    if is_terminal and os.name == "nt":
        os.system("")  # has Windows' own terminal follow escape sequences
    return _Terminal(stream, is_terminal)
