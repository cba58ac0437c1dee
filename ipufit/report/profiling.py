"""Profiling of a run with torch.profiler."""

from __future__ import annotations

import os
from typing import Any, ContextManager, Iterator, List, Optional, TypeVar

import torch
from torch.profiler import ProfilerAction, record_function

from ipufit.errors import ConfigurationError
from ipufit.report.run import TORCH_TRACE
from ipufit.utils.console import warn_user
from ipufit.utils.phase_timer import PHASES, Clock, Span

T = TypeVar("T")


def refuse_profiler(profiler: object) -> None:
    """Refuse, before any work, a profiler that could not watch the run.

    Args:
        profiler: a ``torch.profiler.profile``; None for none.

    Raises:
        ConfigurationError: it has been started before, or another one runs.
    """
    if profiler is None:
        return
    # torch's own, or one that begins like it: what it knows only after start().
    names = ("profiler", "step_rec_fn")
    if any(getattr(profiler, name, None) is not None for name in names):
        raise ConfigurationError(
            "profiler of Report must be new, but this one was started before: it is running, or "
            "was passed to another fit. Create one for every fit, and let fit start and stop it."
        )
    autograd: Any = torch.autograd
    if autograd._profiler_enabled():
        raise ConfigurationError(
            "profiler of Report can't run together with another profiler, but one is running. Call "
            "fit outside of its `with` block, or leave profiler out: the other one records fit."
        )


class NamingClock(Clock):
    """Clock that shows a profiler executions and phases as named ranges.

    Their names are "ipufit execution", which begins when its data is there, "ipufit compute", and
    so on for every phase.
    """

    def __init__(self) -> None:
        super().__init__()
        self._execution: Optional[ContextManager[object]] = None
        self._turned: Optional[ContextManager[object]] = None

    def _span(self, place: int) -> Span:
        return _Named(self, place)

    def turn(self, phase: str) -> None:
        """Begin a phase, which lasts up to the next turn."""
        turned, self._turned = self._turned, None
        if turned is not None:
            turned.__exit__(None, None, None)
        super().turn(phase)
        if phase != "other":
            self._turned = _name(phase)
            self._turned.__enter__()

    def reading(self, values: Iterator[T]) -> Iterator[T]:
        """Yield the values, each within an execution that :meth:`executed` ends."""
        for value in super().reading(values):
            self._execution = _name("execution")
            self._execution.__enter__()
            try:
                yield value
            finally:
                self.executed()
            # Whoever has made the value may want its memory back for the next one.
            del value

    def executed(self) -> None:
        """End the execution; safe twice."""
        self.turn("other")
        execution, self._execution = self._execution, None
        if execution is not None:
            execution.__exit__(None, None, None)


class _Named(Span):
    """Span of a phase that a profiler sees as a named range."""

    __slots__ = ("_open", "_phase")

    def __init__(self, clock: Clock, place: int) -> None:
        super().__init__(clock, place)
        self._phase = PHASES[place]
        self._open: List[ContextManager[object]] = []

    def __enter__(self) -> None:
        super().__enter__()
        # The same phase may lie within itself.
        self._open.append(_name(self._phase))
        self._open[-1].__enter__()

    def __exit__(self, *about: object) -> None:
        self._open.pop().__exit__(None, None, None)
        super().__exit__(*about)


def _name(what: str) -> ContextManager[object]:
    return record_function(f"ipufit {what}")


class Profiler:
    """Starts, steps and stops the user's profiler.

    Args:
        profiler: a ``torch.profiler.profile``; None for none.
        folder: of the report, where its trace goes.

    Attributes:
        clock: whose phases the profiler sees, if there is one.
    """

    def __init__(self, profiler: Any, folder: str) -> None:
        self._profiler = profiler
        self._path = os.path.join(folder, TORCH_TRACE)
        self.clock = Clock() if profiler is None else NamingClock()
        self._running: Optional[NamingClock] = None

    def start(self) -> None:
        """Start the profiler as training begins."""
        if isinstance(self.clock, NamingClock):
            self._profiler.start()
            self._running = self.clock

    def step(self) -> None:
        """Step the profiler after an execution."""
        if self._running is not None:
            self._running.executed()
            self._profiler.step()

    def stop(self) -> None:
        """Stop the profiler and write its trace; safe twice.

        Warns:
            UserWarning: the profiler has nothing to show.
        """
        running, self._running = self._running, None
        if running is None:
            return
        running.executed()
        waits = getattr(self._profiler, "current_action", None) is ProfilerAction.WARMUP
        self._profiler.stop()
        # One with a handler of its own has done something else with what it has seen.
        has_handler = getattr(self._profiler, "on_trace_ready", None) is not None
        if has_handler or not hasattr(self._profiler, "export_chrome_trace"):
            return
        if waits or getattr(self._profiler, "profiler", self) is None:
            warn_user(
                f"profiler of Report recorded nothing, so there is no {TORCH_TRACE}: at the end of "
                "the run its schedule was waiting or warming up. Choose a schedule that ends "
                "before the run does, or pass on_trace_ready.",
            )
            return
        self._profiler.export_chrome_trace(self._path)
