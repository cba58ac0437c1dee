"""Settings of a report: the callback that asks for one, its checks, and the profiler in it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from typing import Any, ContextManager, Iterator, List, Optional, Sequence, Tuple, TypeVar, Union

import torch
from torch.profiler import ProfilerAction, record_function

from ipufit.callbacks import Callback
from ipufit.errors import ConfigurationError, unfit
from ipufit.report.run import EXECUTIONS, FACTS, POPVISION, TORCH_TRACE
from ipufit.utils.console import warn_user
from ipufit.utils.error_collector import folder_of, one_of
from ipufit.utils.phase_timer import PHASES, Clock, Span

Path = Union[str, "os.PathLike[str]"]


class Report(Callback):
    """Callback that records what a ``fit`` does, and where its time and memory go.

    It writes ``report.html``, a self-contained page, its data (``run.json``, ``executions.f64``),
    and ``trace.json`` for trace viewers such as Perfetto. On IPUs, PopVision's own report is
    written there too. See docs/report.md.

    Args:
        folder: for one run; created if it is missing.
        overwrite: whether the report of another run in the folder may be overwritten.
        operators: whether to time the operators of one micro-batch, once, after the first epoch.
        profiler: a ``torch.profiler.profile`` that is not running: ``fit`` starts it, calls its
            ``step()`` after every execution, stops it, and writes its trace next to the page, as
            ``torch_trace.json``, unless it has its own handler.

    Attributes:
        folder: of the run.
        overwrite: whether another run's report may be overwritten.
        operators: whether operators are timed.
        profiler: torch's profiler, or None.

    Raises:
        ConfigurationError: an argument can't work.
    """

    # Its hooks do nothing: ``fit`` has a Recorder look at what lies between them too.
    writes_files = True

    def __init__(
        self,
        folder: Path,
        overwrite: bool = False,
        operators: bool = True,
        profiler: Any = None,
    ) -> None:
        super().__init__()
        self.folder: str = folder_of("folder of Report", folder)
        one_of("overwrite of Report", overwrite, (True, False))
        one_of("operators of Report", operators, (True, False))
        missing = [name for name in ("start", "step", "stop") if not hasattr(profiler, name)]
        if profiler is not None and (isinstance(profiler, type) or missing):
            needed = "an object like torch.profiler.profile(...), which has start, step and stop"
            raise unfit("profiler of Report", needed, profiler, "Leave it out for none.")
        self.overwrite = overwrite
        self.operators = operators
        self.profiler = profiler

    @property
    def popvision(self) -> str:
        """Folder of PopVision's profile, if the engine has one."""
        return os.path.abspath(os.path.join(self.folder, POPVISION))

    def __repr__(self) -> str:
        return f"Report({self.folder!r})"


def split_reports(callbacks: Sequence[Callback]) -> Tuple[List[Callback], Optional[Report]]:
    """The callbacks that have hooks to call, and the report among them, if there is one.

    Raises:
        ConfigurationError: there are several.
    """
    reports = [callback for callback in callbacks if isinstance(callback, Report)]
    if len(reports) > 1:
        raise ConfigurationError(
            f"callbacks must have at most one Report, got {len(reports)}: "
            f"{', '.join(map(repr, reports))}. Leave all but one out."
        )
    others = [callback for callback in callbacks if not isinstance(callback, Report)]
    return others, next(iter(reports), None)


def refuse_reports(callbacks: Sequence[Callback], call: str) -> None:
    """Refuse a report of what is no training.

    Args:
        callbacks: of a call.
        call: the method.

    Raises:
        ConfigurationError: there is one.
    """
    _, report = split_reports(callbacks)
    if report is not None:
        raise ConfigurationError(
            f"callbacks of {call} can't include a Report, which records only fit, got {report!r}. "
            "Leave it out."
        )


def refuse_report(report: Report, resumes: bool) -> None:
    """Refuse, before any work, a report that could not be made at its end.

    Args:
        report: that is asked for.
        resumes: whether a run goes on, whose report then goes on too.

    Raises:
        ConfigurationError: no page can be made, the profiler can't look on, or the folder is not
            free.
    """
    for library, what in (
        ("plotly", "Report draws its curves with plotly, which is not installed"),
        ("jinja2", "Report builds its page with jinja2, which is not installed"),
    ):
        if importlib.util.find_spec(library) is None:
            raise ConfigurationError(f"{what}. Run: pip install ipufit[report]")
    if report.profiler is not None:
        _refuse_profiler(report.profiler)
    if os.path.exists(report.folder) and not os.path.isdir(report.folder):
        raise ConfigurationError(
            f"folder of Report must be a folder, but {report.folder!r} is a file. Pass another "
            "path."
        )
    existing = [f for f in (FACTS, EXECUTIONS) if os.path.exists(os.path.join(report.folder, f))]
    if existing and not (report.overwrite or resumes):
        raise ConfigurationError(
            f"{report!r} must have its own folder, but this one contains the report of another "
            f"run. Pass another folder, or ipufit.Report({report.folder!r}, overwrite=True)."
        )


T = TypeVar("T")


def _refuse_profiler(profiler: object) -> None:
    """Refuse, before any work, a profiler that could not watch the run."""
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
        self._execution, self._turned = contextlib.ExitStack(), contextlib.ExitStack()

    def _span(self, place: int) -> Span:
        return _Named(self, place)

    def turn(self, phase: str) -> None:
        """Begin a phase, which lasts up to the next turn."""
        self._turned.close()
        super().turn(phase)
        if phase != "other":
            self._turned.enter_context(_name(phase))

    def reading(self, values: Iterator[T]) -> Iterator[T]:
        """Yield the values, each within an execution that :meth:`executed` ends."""
        for value in super().reading(values):
            self._execution.enter_context(_name("execution"))
            try:
                yield value
            finally:
                self.executed()
            # Whoever has made the value may want its memory back for the next one.
            del value

    def executed(self) -> None:
        """End the execution; safe twice."""
        self.turn("other")
        self._execution.close()


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
