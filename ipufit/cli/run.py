"""A file or module runs as Python runs it, for ``ipufit run`` and what examines scripts."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from dataclasses import dataclass
from typing import Callable, Optional, Sequence

from ipufit.utils.console import PACKAGE
from ipufit.utils.poptorch_sdk import search_in


class ScriptError(Exception):
    """A script that can't be read, or a module that is not there."""


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
    wanted = "`script` must be a readable Python file"
    if os.path.isdir(path):
        raise ScriptError(f"{wanted}, but {path} is a folder. Pass a file in it.")
    try:
        with open(path, "rb") as file:
            return Script(path, file.read())
    except FileNotFoundError:
        raise ScriptError(
            f"{wanted}, but {path} does not exist. The path is relative to {os.getcwd()}."
        ) from None
    except OSError as fault:
        reason = fault.strerror or str(fault)
        raise ScriptError(f"{wanted}, but {path} can't be: {reason}. Pass another.") from None


def enter(script: Script, arguments: Sequence[str]) -> None:
    """Make ``sys.argv`` and ``sys.path`` those of the script.

    They stay so when it has ended: threads, exit handlers and processes that it started go on
    needing them.
    """
    _enter(script.path, os.path.dirname(os.path.realpath(script.path)), arguments)


def enter_module(name: str, arguments: Sequence[str]) -> None:
    """Make ``sys.argv`` and ``sys.path`` those of a module that ``python -m`` runs.

    Nothing is imported yet, not even the package that the module is in.

    Raises:
        ScriptError: there is no such module, as far as that can be known without importing one.
    """
    _enter("-m", os.getcwd(), arguments)
    outermost = name.partition(".")[0]
    if not outermost or importlib.util.find_spec(outermost) is None:
        raise ScriptError(
            "`-m` must be followed by the name of a module that can be imported, but there is "
            f"no module {outermost!r}. Install it for {sys.executable}, or start in the folder "
            f"that contains it; this one is {os.getcwd()}."
        )


def _enter(name: str, folder: str, arguments: Sequence[str]) -> None:
    sys.argv[:] = [name, *arguments]
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return  # Python has put no folder in front, either
    left, sys.path[0] = sys.path[0], folder
    home = os.path.realpath(os.path.join(PACKAGE, os.pardir))
    # A checkout that is not installed was found through the folder that has just gone.
    if os.path.realpath(left) == home and home not in map(os.path.realpath, sys.path):
        search_in(home, last=True)


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
    except BaseException as fault:
        _show_from(fault, lambda path: path == file)
        raise


def run_module(name: str) -> None:
    """Run it as ``__main__``, as ``python -m`` does.

    Raises:
        BaseException: what the module raises. Where it reaches the top, the traceback that Python
            shows begins in the module.
    """
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException as fault:
        above = (__file__, runpy.run_module.__code__.co_filename)
        _show_from(fault, lambda path: path not in above)
        raise


def _show_from(fault: BaseException, is_its: Callable[[str], bool]) -> None:
    """Leave out of the traceback that Python shows what lies above the script's own code.

    Args:
        fault: as it was caught here.
        is_its: whether a file, of those from here on, is the script's.
    """
    first = fault.__traceback__
    while first is not None and not is_its(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    frame = first.tb_frame if first is not None else None
    show = sys.excepthook

    def shown(kind: type, value: BaseException, traceback: Optional[types.TracebackType]) -> None:
        while traceback is not None and traceback.tb_frame is not frame:
            traceback = traceback.tb_next
        show(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = shown
