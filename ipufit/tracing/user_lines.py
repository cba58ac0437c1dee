"""Which line of the user's source is running, and at which of them something changes."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import traceback
import types
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from ipufit.utils.console import PACKAGE

# File, line, function.
Frame = Tuple[str, int, str]

TORCH_PATH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_TORCH_MODULES = os.path.join(TORCH_PATH, "nn") + os.sep

# Where ipufit calls the user's module and loss.
CALLERS = (
    os.path.join(PACKAGE, "tracing", "grad_step.py"),
    os.path.join(PACKAGE, "poptorch", "_recording.py"),
    os.path.join(PACKAGE, "analysis", "check", "check.py"),
)

# A function that sys.settrace takes.
Tracer = Callable[[types.FrameType, str, Any], Any]

_STANDARD = os.path.abspath(sysconfig.get_paths()["stdlib"]) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Called by a model, and never what is at fault.
_TOOLS = tuple(f"{place}numpy{os.sep}" for place in _INSTALLED)


@functools.lru_cache(maxsize=None)
def is_installed(file: str) -> bool:
    """Say whether a file belongs to an installed package."""
    return any(place in file for place in _INSTALLED)


@functools.lru_cache(maxsize=None)
def is_users(file: str) -> bool:
    """Say whether a file is neither torch's nor ipufit's nor Python's own."""
    if file.startswith("<"):
        return False
    path = os.path.abspath(file)
    if path.startswith((PACKAGE, TORCH_PATH)) or any(place in path for place in _TOOLS):
        return False
    return is_installed(path) or not path.startswith(_STANDARD)


def users_module(value: object) -> bool:
    """Say whether a class or function is defined in a file of the user's, not an installed one."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is not None and file is None:
        return module.__name__ == "__main__"
    return file is not None and is_users(file) and not is_installed(file)


def user_frame(frame: Optional[types.FrameType], everywhere: bool = False) -> Optional[Frame]:
    """Find the user's innermost line, or else that of a torch module.

    Args:
        frame: from where on outwards.
        everywhere: also among what called ipufit.

    Returns:
        None where it is neither.
    """
    walked = traceback.walk_stack(frame)
    return _innermost([(f.f_code.co_filename, n, f.f_code.co_name) for f, n in walked], everywhere)


def source_line(file: Optional[str], line: Optional[int]) -> str:
    """The text of a line without its indentation; empty where there is no file to read it from."""
    return linecache.getline(file or "", line or 0).strip()


def frame_of(error: BaseException, everywhere: bool = False) -> Optional[Frame]:
    """The user's line that an exception came out of, or else that of a torch module."""
    walked = traceback.walk_tb(error.__traceback__)
    frames = [(f.f_code.co_filename, n, f.f_code.co_name) for f, n in walked]
    return _innermost(frames[::-1], everywhere)


def _innermost(frames: Sequence[Frame], everywhere: bool) -> Optional[Frame]:
    module = None
    for frame in frames:
        file, _, function = frame
        if is_users(file):
            return frame
        if not everywhere and os.path.abspath(file) in CALLERS:
            break
        if module is None and file.startswith(_TORCH_MODULES) and function == "forward":
            module = frame
    return module


class Lines:
    """Follows the user's lines, and notes at which of them a probe changes.

    Args:
        probes: what is asked after every line, by name.

    Attributes:
        lines: by name, those of the user in the order of their first change.
    """

    def __init__(self, probes: Mapping[str, Callable[[], object]]) -> None:
        self._probes = dict(probes)
        self._last: Dict[str, object] = {}
        self._at: List[Tuple[types.FrameType, Frame]] = []
        self.lines: Dict[str, Dict[Frame, None]] = {name: {} for name in probes}
        self._before: Any = None

    def __enter__(self) -> Lines:
        self._last = {name: probe() for name, probe in self._probes.items()}
        self._at.clear()
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        self._look()

    def _called(self, frame: types.FrameType, event: str, argument: object) -> Optional[Tracer]:
        if not is_users(frame.f_code.co_filename):
            return None
        self._look()
        self._at.append((frame, self._line(frame)))
        return self._moved

    def _moved(self, frame: types.FrameType, event: str, argument: object) -> Tracer:
        self._look()
        while self._at and self._at[-1][0] is not frame:
            self._at.pop()
        if event == "return":
            if self._at:
                self._at.pop()
        elif event == "line" and self._at:
            self._at[-1] = (frame, self._line(frame))
        return self._moved

    def _line(self, frame: types.FrameType) -> Frame:
        return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name

    def _look(self) -> None:
        for name, probe in self._probes.items():
            now = probe()
            if now != self._last[name]:
                self._last[name] = now
                if self._at:
                    self.lines[name][self._at[-1][1]] = None
