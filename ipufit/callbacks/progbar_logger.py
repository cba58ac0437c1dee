"""The progress bar, in a terminal, in a notebook, by rich, or as lines."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import os
import sys
import textwrap
import threading
import time
from typing import Any, Dict, Iterator, List, Literal, Mapping, Optional, Sequence, TextIO, Tuple

from ipufit.callbacks.callback import Callback, Logs, means, one_of
from ipufit.callbacks.epoch_metrics import RunningLogs
from ipufit.engines.program import Engine
from ipufit.utils.console import notebook_shell, terminal_size

Progress = Literal[1, 2, "rich"]

_INTERVAL = 0.1  # seconds between two states of a bar
_MOST_CELLS, _LEAST_CELLS = 25, 8
_COLUMNS = 80  # of a terminal that does not say how wide it is
_INDENT = "  "  # of the second line and those below
_ROWS = 10  # finished epochs that a notebook shows


class ProgbarLogger(Callback):
    """Progress bar that counts updates, for any ``device_iterations``, or one line for each epoch.

    ``verbose`` of ``fit``, ``evaluate`` and ``predict`` adds it. It shows loss and metrics so far,
    the time left and samples per second, after the first execution and then ten times a second, and
    validation on a separate line; values that do not fit into a line are on the next one. One line
    for each epoch stays, with the final values. The time for recording the program is shown
    separately; the rate includes neither recording nor validation.

    Args:
        verbose: 1 for a bar, 2 for one line for each epoch, evaluation or prediction, "rich" for a
            bar drawn by the package rich.

    Raises:
        ConfigurationError: another value of ``verbose``.
    """

    def __init__(self, verbose: Progress = 1) -> None:
        super().__init__()
        self._verbose: Progress = one_of(self, "verbose", verbose, Progress)
        self._bars: List[_Progress] = []
        self._display: Optional[_Display] = None
        self._recordings = 0
        self._has_recorded = self._training = False
        self._captured = self._first_captured = 0.0
        self._start = self._next_draw = 0.0

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        self._recordings += 1
        if self._recordings == 1:
            self._draw("recording the program ...")
        try:
            yield
            self._has_recorded = True
        finally:
            self._recordings -= 1
            if not self._recordings:
                self._draw()

    def _shown_by(self) -> _Display:
        """Where it is shown; made anew for every run."""
        if self._display is None:
            self._display = _make_display(self._verbose)
        return self._display

    def _draw(self, note: str = "") -> None:
        self._shown_by().draw(self._bars if self._verbose != 2 else [], note)

    def _open(self, title: str, total: Optional[int]) -> None:
        self._bars.append(_Progress(title, total))
        self._captured = float(self.model.capture_seconds)
        self._start = self._next_draw = time.perf_counter()
        self._draw()

    def _advance(self, batch: int, logs: Optional[Logs]) -> None:
        bar, now = self._bars[-1], time.perf_counter()
        captured = float(self.model.capture_seconds) - self._captured
        bar.done, bar.seconds = batch + 1, now - self._start - captured
        bar.samples, bar.logs = (logs["samples"] if logs else 0.0), logs
        # Metrics are worked out only when the bar is drawn: after the first execution, and then in
        # intervals, in which a whole epoch may pass.
        if self._verbose != 2 and now >= self._next_draw:
            bar.values = _shown(logs)
            self._draw()
            self._next_draw = now + _INTERVAL

    def _keep(self, logs: Optional[Logs]) -> None:
        """Put the last bar's line, which stays, in its place."""
        bar = self._bars.pop()
        self._shown_by().keep(bar.title, bar.count, {**_shown(logs), **bar.rate})

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Print how long recording took, if something was recorded."""
        self._training = True
        if self._has_recorded:
            seconds = float(self.model.capture_seconds) - self._first_captured
            self._shown_by().write(f"recorded the program in {seconds:.2f} s")

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Open the epoch's bar."""
        self._bars = []
        self._open(f"epoch {epoch + 1}/{self.params['epochs']}", self.params["updates"])

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Advance by the updates of the execution."""
        self._advance(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Replace the epoch's bar by its line."""
        self._keep(logs)

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """Count batches from here on, of evaluations and predictions."""
        self._training = False

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        """Open a bar; for validation in ``fit``, it is below the bar of the epoch."""
        if self._training:
            self._open("validation", self.params.get("validation_updates"))
        else:
            self._open("evaluate", self.params["updates"])

    def on_test_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Advance by the device iterations of the execution."""
        self._advance(batch, logs)

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """Replace the bar by the line of the evaluation, or remove that of a validation."""
        if self._training:
            self._bars.pop()
        else:
            self._keep(logs)

    def on_predict_begin(self, logs: Optional[Logs] = None) -> None:
        """Open the bar of a prediction."""
        self._open("predict", self.params["updates"])

    def on_predict_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Advance by the device iterations of the execution."""
        self._advance(batch, None)

    def on_predict_end(self, logs: Optional[Logs] = None) -> None:
        """Replace the bar by the line of the prediction."""
        self._keep(None)

    def close(self) -> None:
        """Put lines that stay in the place of the bars of a run that did not end."""
        while self._bars:
            bar = self._bars.pop(0)
            # The error that ended the run is to be seen, not one of a metric.
            with contextlib.suppress(Exception):
                if isinstance(bar.logs, RunningLogs):
                    # Another callback may have failed before this one saw the last execution.
                    logs = bar.logs.latest()
                    bar.done, bar.samples = int(logs["updates"]), logs["samples"]
                    bar.values = _shown(logs)
            if bar.done:
                title = bar.title if bar.done == bar.total else f"{bar.title} stopped"
                self._shown_by().keep(title, bar.count, {**bar.values, **bar.rate})
            else:
                self._draw()
        if self._display is not None:
            self._display.close()
            self._display = None


@contextlib.contextmanager
def showing(logger: ProgbarLogger, engine: Engine) -> Iterator[None]:
    """Show within the block what the engine records, and leave no bar open after it."""
    logger._first_captured, logger._has_recorded = engine.seconds, False
    engine.announce = logger._recording
    try:
        yield
    finally:
        engine.announce = contextlib.nullcontext
        ProgbarLogger.close(logger)


def _shown(logs: Optional[Logs]) -> Dict[str, str]:
    return {name: f"{value:.4g}" for name, value in means(logs).items()}


@dataclasses.dataclass
class _Progress:
    """How far an epoch, an evaluation or a prediction is.

    Attributes:
        title: what runs, such as "epoch 1/10".
        total: how many of them there are; None where nobody knows.
        done: how many are over.
        seconds: since it began, without recording.
        samples: how many are over.
        values: loss and metrics so far, in words, by name.
        logs: those from which they are made.
    """

    title: str
    total: Optional[int]
    done: int = 0
    seconds: float = 0.0
    samples: float = 0.0
    values: Dict[str, str] = dataclasses.field(default_factory=dict)
    logs: Optional[Logs] = None

    @property
    def count(self) -> str:
        """How many updates of an epoch, or batches of anything else, are over, in words."""
        one, more = ("update", "s") if self.title.startswith("epoch") else ("batch", "es")
        count, most = str(self.done), self.total or 0
        if self.done < most:
            count = f"{count} of {most}"
        return f"{count} {one}{'' if max(self.done, most) == 1 else more}"

    @property
    def rate(self) -> Dict[str, str]:
        """Samples per second, by name, where there are any."""
        rate = self.samples / self.seconds if self.samples and self.seconds > 0 else 0.0
        return {"samples/s": f"{rate:.0f}"} if rate else {}

    def facts(self) -> List[str]:
        """The count, the time left and the rate, in words: the most important first."""
        total = self.total
        facts = [self.count if total is None else f"{self.done:>{len(str(total))}}/{total}"]
        if total is not None and 0 < self.done < total:
            left = self.seconds / self.done * (total - self.done)
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
        whole = _wrap([head, *values], columns)
        return (
            whole
            if len(whole) == 1
            else [*_wrap([head], columns), *_wrap(values, columns, _INDENT)]
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


def _wrap(parts: Sequence[str], columns: Optional[int], indent: str = "") -> List[str]:
    """Join parts by commas, in lines no longer than ``columns`` that end between two of them.

    Args:
        parts: one that is longer than a line is cut into several.
        columns: of the terminal; None for one line.
        indent: before the first line; the others have two spaces.
    """
    # At spaces that do not break a line, textwrap does not either.
    text = ", ".join(part.replace(" ", "\xa0") for part in parts)
    wrapper = textwrap.TextWrapper(columns or sys.maxsize, indent, _INDENT, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in wrapper.wrap(text)]


class _Display:
    """Shows lines that stay, one after another: all that a pipe or a file gets.

    Args:
        stream: where they go; None is standard error.
    """

    def __init__(self, stream: Optional[TextIO] = None) -> None:
        self._stream = stream
        self._note = ""

    def draw(self, bars: Sequence[_Progress], note: str = "") -> None:
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
        columns, _ = terminal_size(self._stream or sys.stderr)
        self.write("\n".join(_wrap([f"{title}: {count}", *_words(values)], columns)))

    def write(self, text: str) -> None:
        """Show a line that stays."""
        print(text, file=self._stream or sys.stderr, flush=True)

    def close(self) -> None:
        """Leave what is shown as it is; safe twice."""


class _Terminal(_Display):
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

    def draw(self, bars: Sequence[_Progress], note: str = "") -> None:
        """Show the bars and the note in the place of what was drawn before."""
        columns, rows = terminal_size(self._stream)
        lines = [line for bar in bars for line in bar.lines(columns, self._cells)]
        with self._lock:
            self._replace_streams()
            self._show((lines + [note] * bool(note))[-rows:])

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
            if terminal_size(stream)[0]:
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

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


class _Notebook(_Display):
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
        self._plain: List[str] = []

    def draw(self, bars: Sequence[_Progress], note: str = "") -> None:
        """Show the bars and the note below the table."""
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
        lines = [*self._plain]
        lines += [line for bar in bars for line in bar.lines(None, "=-")]
        data = {"text/html": "".join(page), "text/plain": "\n".join(lines + [note] * bool(note))}
        is_first, self._id = not self._id, self._id or f"ipufit-{id(self)}-{time.time()}"
        publish = self._shell.display_pub.publish
        publish(data, transient={"display_id": self._id}, update=not is_first)

    def keep(self, title: str, count: str, values: Mapping[str, str]) -> None:
        """Add a row to the table for an epoch, and a line for anything else."""
        kind, _, which = title.partition(" ")
        if kind != "epoch":
            super().keep(title, count, values)
            return
        self._plain += _wrap([f"{title}: {count}", *_words(values)], None)
        self._rows.append({kind: which, **values})
        self.draw([])

    def write(self, text: str) -> None:
        """Show a line above the table."""
        self._texts.append(text)
        self._plain.append(text)
        self.draw([])


class _Rich(_Display):
    """Shows bars by rich, below lines that stay."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)

    def draw(self, bars: Sequence[_Progress], note: str = "") -> None:
        """Show the bars and the note in the place of what was drawn before."""
        from rich.console import Group, RenderableType
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        shown: List[RenderableType] = []
        for bar in bars:
            grid = Table.grid(padding=(0, 1))
            cells = ProgressBar(total=bar.total, completed=bar.done, width=_MOST_CELLS)
            grid.add_row(Text(bar.title, "bold"), cells, Text(", ".join(bar.facts())))
            shown += [grid, *[Text("  " + ", ".join(_words(bar.values)))] * bool(bar.values)]
        self._live.start()
        self._live.update(Group(*shown, *[Text(note, "dim")] * bool(note)), refresh=True)

    def write(self, text: str) -> None:
        """Show a line that stays in the place of the bars."""
        from rich.text import Text

        line = Text(text)
        line.highlight_regex("^[^:]+(?=:)", "bold")
        line.highlight_regex("[^ ]+(?==)", "cyan")
        self._live.update("", refresh=True)
        self._live.console.print(line)

    def close(self) -> None:
        """End the lines that change."""
        self._live.stop()


def _writes(stream: TextIO, text: str) -> bool:
    """Return True if the encoding of a stream has these characters."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeError, LookupError, AttributeError):
        return False
    return True


def _make_display(verbose: Progress) -> _Display:
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
    is_terminal = terminal_size(stream)[0] is not None
    is_dumb = is_terminal and os.environ.get("TERM") == "dumb"
    # The switch of tqdm's for all bars of a process.
    if verbose == 2 or stream is None or is_dumb or os.environ.get("TQDM_DISABLE", "0") != "0":
        return _Display()
    if is_terminal and os.name == "nt":
        os.system("")  # has Windows' own terminal follow escape sequences
    return _Terminal(stream, is_terminal)
