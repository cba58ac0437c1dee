"""Settings of a report: the callback that asks for one, and its checks."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, List, Optional, Sequence, Tuple, Union

from ipufit.callbacks import Callback
from ipufit.errors import ConfigurationError
from ipufit.report.profiling import refuse_profiler
from ipufit.report.run import EXECUTIONS, FACTS, POPVISION
from ipufit.utils.error_collector import folder_of, one_of

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
            raise ConfigurationError(
                "profiler of Report must be an object like torch.profiler.profile(...), which has "
                f"start, step and stop, got {profiler!r}. Leave it out for none."
            )
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
    refuse_profiler(report.profiler)
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
