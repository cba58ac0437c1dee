"""Running a file as Python itself runs a script."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import sys
import types
from dataclasses import dataclass
from typing import Optional, Sequence

__all__ = ["Script", "ScriptError", "enter", "read_script", "run_script", "search_also"]


class ScriptError(Exception):
    """A script that can't be read."""


@dataclass(frozen=True)
class Script:
    """A file that has been read.

    Attributes:
        path: as it was given; ``sys.argv[0]`` of the script.
        source: its bytes, in the encoding that it names.
    """

    path: str
    source: bytes


def read_script(path: str) -> Script:
    """Read a script.

    Raises:
        ScriptError: it is no file, or the system doesn't let it be read.
    """
    wanted = "`script` must be a file of Python that can be read"
    if os.path.isdir(path):
        raise ScriptError(f"{wanted}, but {path} is a folder. Name the file in it to run.")
    try:
        with open(path, "rb") as file:
            return Script(path, file.read())
    except FileNotFoundError:
        raise ScriptError(
            f"{wanted}, but {path} does not exist. The path is relative to {os.getcwd()}."
        ) from None
    except OSError as fault:
        reason = fault.strerror or str(fault)
        raise ScriptError(f"{wanted}, but {path} can't be: {reason}. Give another.") from None


def enter(script: Script, arguments: Sequence[str]) -> None:
    """Make ``sys.argv`` and ``sys.path`` those of the script.

    They stay so when it has ended: threads, exit handlers and processes that it started go on
    needing them.
    """
    sys.argv[:] = [script.path, *arguments]
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return  # Python has put no folder in front, either
    left, sys.path[0] = sys.path[0], os.path.dirname(os.path.realpath(script.path))
    home = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    # A checkout that is not installed was found through the folder that has just gone.
    if os.path.realpath(left) == home and home not in map(os.path.realpath, sys.path):
        search_also(home)


def run_script(script: Script) -> None:
    """Run it as ``__main__``, as Python does.

    Raises:
        BaseException: what the script raises. Where it reaches the top, the traceback that Python
            shows begins in the script.
    """
    main = types.ModuleType("__main__")
    # As Python does: absolute since 3.9.
    file = script.path if sys.version_info < (3, 9) else os.path.abspath(script.path)
    main.__file__ = file
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
    vars(main).update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    try:
        exec(compile(script.source, file, "exec", dont_inherit=True), vars(main))
    except SystemExit:
        raise
    except BaseException:
        _show_from(file)
        raise


def search_also(folder: str) -> None:
    """Import from this folder, too, here and in processes that this one starts.

    multiprocessing hands over ``sys.path``; any other Python reads the environment.
    """
    if folder not in sys.path:
        sys.path.append(folder)
    known = os.environ.get("PYTHONPATH")
    entries = known.split(os.pathsep) if known else []
    if folder not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([*entries, folder])


def _show_from(file: str) -> None:
    """Leave out of the traceback that Python shows what lies above the script."""
    show = sys.excepthook

    def shown(kind: type, value: BaseException, traceback: Optional[types.TracebackType]) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename != file:
            traceback = traceback.tb_next
        show(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = shown
