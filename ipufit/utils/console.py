"""Output for the user: how much is printed, and which of their lines a warning names."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import itertools
import os
import re
import sys
import textwrap
import warnings
from typing import Any, List, Literal, Mapping, Optional, TextIO, Tuple, Type, Union, cast

from ipufit.errors import ConfigurationError, unfit

# The folder of the package, with a separator at its end, as code objects name their files.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


_MOST_COLUMNS = 100  # of a paragraph in a wide terminal
_COLUMNS, _ROWS = 80, 11  # of a terminal that does not say how large it is

# Blocks of ours are entered through contextlib.
# Python skips no file whose whole name is the prefix.
_OURS = (PACKAGE, os.path.splitext(contextlib.__file__)[0] + ".")


def is_fault_of_ours(error: BaseException) -> bool:
    """Tell whether an error was raised in a line of ipufit's own, not of torch's or the user's."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_filename.startswith(PACKAGE)


def warn_user(text: str, category: Type[Warning] = UserWarning) -> None:
    """Warn of the line of the user's, or of another library's, from which ipufit was called."""
    if sys.version_info >= (3, 12):
        warnings.warn(text, category, skip_file_prefixes=_OURS)
    else:
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
            frame, level = frame.f_back, level + 1
        warnings.warn(text, category, stacklevel=level)


def notebook_shell() -> Any:
    """IPython's shell, if this is a notebook or another program that shows pictures; else None."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    # One in a terminal has no kernel behind it.
    return shell if hasattr(shell, "kernel") else None


class TextReport:
    """Has a text that ``str`` makes, which a notebook shows as it is."""

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def preformatted(text: str) -> str:
    """Return HTML that shows a text as it is, for notebooks."""
    # Imported here: its table of characters would slow `import ipufit` down.
    import html

    return f"<pre>{html.escape(text)}</pre>"


class HelpFormatter(argparse.HelpFormatter):
    """Lays out the help of a command for the width of the terminal.

    Lines that begin with spaces are examples: a command, and what it does behind two spaces or
    more; where one of them is too long, all have that on a line of its own. Other lines are
    paragraphs, which blank lines separate.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: List[str] = []
        for is_example, group in itertools.groupby(text.splitlines(), _is_example):
            rows = [*group]
            if is_example and max(map(len, rows)) > width:
                for row in rows:
                    command, _, what = row.strip().partition("  ")
                    lines += [f"  {command}", f"      {what.strip()}"]
            elif is_example or not rows[0]:
                lines += rows
            else:
                lines += _wrap(" ".join(rows), min(width, _MOST_COLUMNS))
        return "\n".join(lines)

    def _format_usage(
        self, usage: Optional[str], actions: object, groups: object, prefix: Optional[str]
    ) -> str:
        if usage is None:
            return super()._format_usage(usage, actions, groups, prefix)  # type: ignore[arg-type]
        # A line may end between two options, not within one.
        usage = re.sub(r"\[.*?\]|\{.*?\}", lambda part: part[0].replace(" ", "\xa0"), usage)
        head = f"{prefix or 'usage: '}{self._prog} "
        rest = usage.replace("%(prog)s ", "")
        lines = _wrap(rest, self._width, initial_indent=head, subsequent_indent=" " * len(head))
        return "\n".join(lines).replace("\xa0", " ") + "\n\n"


# A path that is longer than a line can be copied as it is.
_wrap = functools.partial(textwrap.wrap, break_on_hyphens=False, break_long_words=False)


def fold(text: str, columns: Optional[int]) -> str:
    """Break the lines of a text between words: the last cell of a row of a table in its column.

    Args:
        text: rows have two spaces between cells.
        columns: that a line may have; None for any number.
    """
    if columns is None:
        return text
    lines: List[str] = []
    for line in text.splitlines():
        cell, begin = line.rfind("  ") + 2, len(line) - len(line.lstrip())
        indent = " " * min(max(cell, begin + 4), columns // 2)
        lines += _wrap(line, columns, subsequent_indent=indent) or [""]
    return "\n".join(lines)


def terminal_size(stream: Optional[TextIO]) -> Tuple[Optional[int], int]:
    """Return how many columns a line may have, and how many lines are seen at once.

    What is no terminal has any number of columns, None, and one line.
    """
    try:
        if stream is None or not stream.isatty():
            return None, 1
        columns, rows = os.get_terminal_size(stream.fileno())
    except AttributeError:  # an object that can only write
        return None, 1
    except (OSError, ValueError):
        columns, rows = _COLUMNS, _ROWS
    # In the last column some terminals begin a new line.
    return (columns or _COLUMNS) - 1, max(rows - 1, 1)


def _is_example(line: str) -> Union[bool, str]:
    return line.startswith(" ") if line else "blank"


VerboseLevel = Literal[0, 1, 2, "rich"]


def resolve_verbose(verbose: object) -> VerboseLevel:
    """0 silent, 1 a bar, 2 a line per epoch, "rich" a bar by rich.

    "auto" is 1 in a notebook and where stderr is a terminal, else 2; so is "rich" in a notebook and
    where there is no terminal.

    Raises:
        ConfigurationError: anything else, or rich is not installed.
    """
    name = verbose if isinstance(verbose, str) else ""
    if name == "rich" and importlib.util.find_spec("rich") is None:
        raise ConfigurationError(
            "verbose='rich' needs rich, which is not installed. Run: pip install ipufit[rich]"
        )
    if name in ("auto", "rich"):
        if notebook_shell() is not None:
            return 1
        if terminal_size(sys.stderr)[0] is None:
            return 2
        return 1 if name == "auto" else "rich"
    if isinstance(verbose, int) and verbose in (0, 1, 2):
        return cast(VerboseLevel, int(verbose))
    needed = "0 (silent), 1 (bar), 2 (one line an epoch), 'rich' or 'auto'"
    raise unfit("verbose", needed, verbose)


def say(text: str) -> None:
    """Print a line where the progress is shown, without breaking what is drawn there."""
    # What a notebook gets by stderr looks like an error.
    stream = sys.stderr if notebook_shell() is None else sys.stdout
    print(fold(text, terminal_size(stream)[0]), file=stream, flush=True)


def say_dev_run(notes: Mapping[str, Any], validates: bool) -> None:
    """Print that this is a trial run, and which callbacks it leaves out.

    Args:
        notes: of the run, for History.
        validates: whether there is a validation.
    """
    count = notes.get("fast_dev_run")
    if not count:
        return
    executions = f"{count} execution{'s' if count > 1 else ''}"
    left_out = notes["left_out_callbacks"]
    say(
        f"fast_dev_run: 1 epoch of {executions}{', also of validation' if validates else ''}; "
        + (f"without callbacks {', '.join(left_out)}" if left_out else "all callbacks run")
    )
