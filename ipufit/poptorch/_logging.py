"""The log and the errors of the front end: PopTorch's names, levels and line format."""

from __future__ import annotations

import datetime
import logging
import os
import subprocess
import sys
import traceback
from types import TracebackType
from typing import Callable, Dict, NoReturn, Optional, TextIO, Tuple, Type, Union

from ipufit.tracing.ipu_only import PopTorchError


class Error(PopTorchError):
    """Anything that compiling or running a model refuses.

    Attributes:
        type: which part of the system it comes from; ``"poptorch_py_error"`` for the front end.
        message: the text alone.
        location: where it happened, outermost last; empty for the front end.
    """

    # PopTorch has the class there, and files name it so.
    __module__ = "ipufit.poptorch.poptorch_core"

    def __init__(self, message: str = "", type: str = "poptorch_py_error", location: str = ""):
        where = f"\nRaised in:\n{location}" if location else ""
        super().__init__(f"'{type}': {message}{where}")
        self.type = type
        self.message = message
        self.location = location


def error(text: str) -> Error:
    """Return an error of the front end, to be raised."""
    return Error(text)


def refusing(name: str, text: str) -> Callable[..., NoReturn]:
    """Make a function of this name that raises an error with this text, whatever it is called with.

    Args:
        name: of a function of PopTorch's that has no meaning here.
        text: of the error, and the docstring of the function.
    """

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise error(text)

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = text
    return refuse


logger = logging.getLogger("poptorch::python")

# name: (number, level of Python's logging)
_LEVELS: Dict[str, Tuple[int, int]] = {
    "TRACE": (0, logging.DEBUG),
    "TRACE_ALL": (0, logging.DEBUG),
    "DEBUG": (1, logging.DEBUG),
    "DEBUG_IR": (1, logging.DEBUG),
    "INFO": (2, logging.INFO),
    "WARN": (3, logging.WARNING),
    "ERR": (4, logging.ERROR),
    "OFF": (6, logging.CRITICAL),
}
# Accepted and not advertised, as there.
_UNADVERTISED = ("TRACE_ALL", "DEBUG_IR")

_COLOURS = {
    logging.DEBUG: "\033[36m",
    logging.INFO: "\033[0m",
    logging.WARNING: "\033[1;33m",
    logging.ERROR: "\033[1;31m",
    logging.CRITICAL: "\033[1;31m",
}


def setLogLevel(level: Union[str, int]) -> None:
    """Set the lowest level of messages that are printed.

    Args:
        level: ``"TRACE"``, ``"DEBUG"``, ``"INFO"``, ``"WARN"``, ``"ERR"`` or ``"OFF"``, or one of
            their numbers 0, 1, 2, 3, 4, 6.
    Raises:
        ValueError: no such level.
    """
    if isinstance(level, int):
        names = [name for name, (number, _) in _LEVELS.items() if number == level]
        if not names:
            raise ValueError(
                f"Invalid log level integer {level}. Use 0 (TRACE), 1 (DEBUG), 2 (INFO), 3 (WARN), "
                "4 (ERR) or 6 (OFF)."
            )
        level = names[0]
    if not isinstance(level, str) or level not in _LEVELS:
        public = sorted(name for name in _LEVELS if name not in _UNADVERTISED)
        values = f"{', '.join(public[:-1])} and {public[-1]}"
        raise ValueError(f"Unknown log level: {level}. Valid values are {values}")
    logger.setLevel(_LEVELS[level][1])


def setPopartLogLevel(level: str) -> None:
    """Accept a level for the compiler's own log, which this engine does not have.

    Raises:
        ValueError: no such level.
    """
    if not isinstance(level, str) or level not in _LEVELS:
        raise ValueError(f"Level must be one of {', '.join(_LEVELS)}, got {level!r}.")


class _Formatter(logging.Formatter):
    """``[HH:MM:SS.mmm] [name] [level] text``, coloured where a person reads it."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one record as one line."""
        moment = datetime.datetime.fromtimestamp(record.created)
        milliseconds = moment.microsecond // 1000
        line = (
            f"[{moment:%H:%M:%S}.{milliseconds:03d}] [{record.name}] "
            f"[{record.levelname.lower()}] {record.getMessage()}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        if sys.stdout.isatty() and sys.stderr.isatty():
            line = f"{_COLOURS.get(record.levelno, '')}{line}\033[0m"
        return line


class _Console(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the ``sys.stderr`` of the moment, which a test or a notebook may have replaced."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    @property
    def stream(self) -> TextIO:
        """The ``sys.stderr`` in use."""
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        """Not kept."""


def _log_uncaught(
    kind: Type[BaseException], error: BaseException, where: Optional[TracebackType]
) -> None:
    """Log an exception that ends the program, with the output of a failed child process."""
    lines = traceback.format_exception(kind, error, where)
    printed = ""
    if isinstance(error, subprocess.CalledProcessError):
        output = error.stderr or error.stdout or ""
        printed = "\n" + (output.decode(errors="replace") if isinstance(output, bytes) else output)
    logger.critical("%s\n%s%s", lines[-1].rstrip("\n"), "".join(lines).rstrip("\n"), printed)


def _start() -> None:
    """Set the logger's level and handler, and the hook for uncaught exceptions."""
    setLogLevel(os.environ.get("POPTORCH_LOG_LEVEL", "WARN"))
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        console = _Console()
        console.setFormatter(_Formatter())
        console.setLevel(logging.DEBUG)
        logger.addHandler(console)
    # A debugger's or notebook's hook stays.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _log_uncaught


_start()
