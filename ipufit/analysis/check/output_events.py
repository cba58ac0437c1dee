"""Lines of user code that write output, set a seed, or read a tensor."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import sys
import threading
import types
import warnings
from typing import Any, Callable, Dict, Iterator, Optional

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ipufit.analysis.check.trace_facts import OperationRecorder
from ipufit.errors import CaptureError
from ipufit.tracing.capture import Frame, numpy_error, text_error, value_error
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.user_lines import is_installed, is_users, users_frame

__all__ = ["OutputEvents", "Reads", "quiet"]


class OutputEvents:
    """Lines that print, log, warn, or seed torch's generator.

    Attributes:
        outputs: by the line, how.
        seeds: lines that seed.
    """

    def __init__(self) -> None:
        self.outputs: Dict[Frame, str] = {}
        self.seeds: Dict[Frame, None] = {}

    def out(self, how: str) -> None:
        """Record a line that writes now, unless it is of an installed package."""
        frame = users_frame(sys._getframe(2))
        if frame is not None and not is_installed(frame[0]):
            self.outputs.setdefault(frame, how)


class _Sink(io.TextIOBase):
    def __init__(self, events: OutputEvents, thread: int) -> None:
        self._events = events
        self._thread = thread

    def write(self, text: str) -> int:
        if text and threading.get_ident() == self._thread:
            self._events.out("prints")
        return len(text)

    def writable(self) -> bool:
        return True


_SEEDS = ((torch, "manual_seed"), (torch, "seed"), (torch.random, "manual_seed"))


@contextlib.contextmanager
def quiet(events: OutputEvents) -> Iterator[None]:
    """Record output and seeds of the block instead of showing them."""
    sink = _Sink(events, threading.get_ident())
    handle = logging.Logger.handle

    def handle_record(self: logging.Logger, record: logging.LogRecord) -> None:
        events.out("logs")

    def warned(message: object, category: object, filename: str, lineno: int, *_: object) -> None:
        frame: Optional[types.FrameType] = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == "warnings":
            frame = frame.f_back
        # torch's own warnings come from the line that calls torch, too.
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno) if frame else ""
        if frame is not None and is_users(frame.f_code.co_filename) and "warn" in source:
            events.out("warns")

    def seeding(original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: object, **kwargs: object) -> Any:
            frame = users_frame(sys._getframe(1))
            if frame is not None:
                events.seeds[frame] = None
            return original(*args, **kwargs)

        return seed

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sink))
        stack.enter_context(contextlib.redirect_stderr(sink))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = warned  # type: ignore[assignment]
        stack.callback(setattr, logging.Logger, "handle", handle)
        logging.Logger.handle = handle_record  # type: ignore[method-assign]
        for owner, name in _SEEDS:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, seeding(original))
        yield


_READERS = {
    "tolist": value_error,
    "numpy": numpy_error,
    "__array__": numpy_error,
}
_SHOWN = ("__repr__", "__str__", "__format__")


class Reads(TorchFunctionMode):
    """Reports where user code reads values in ways that no operator shows.

    Args:
        note: called with an error for each read.
        recorder: knows the tensors that depend on what the program is given.
    """

    def __init__(self, note: Callable[[CaptureError], None], recorder: OperationRecorder) -> None:
        super().__init__()
        self._note = note
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        recorder = self._recorder
        if recorder.is_muted or not (args and isinstance(args[0], Tensor)):
            return func(*args, **(kwargs or {}))
        is_text = name == "__format__" and args[0].dim() == 0
        if storage_id(args[0]) in recorder.tainted and (name in _READERS or is_text):
            error = text_error if is_text else _READERS[name]
            self._note(error(users_frame(sys._getframe(1))))
        recorder.is_muted = name in _SHOWN
        try:
            return func(*args, **(kwargs or {}))
        finally:
            recorder.is_muted = False
