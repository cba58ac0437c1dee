"""Settings of a report: the argument ``fit(report=)``, and its checks."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, Optional, Union

from ipufit.errors import ConfigurationError
from ipufit.report.files import EXECUTIONS, FACTS, POPVISION
from ipufit.report.profiling import refuse_profiler
from ipufit.utils.error_collector import folder_of, one_of

__all__ = ["Report", "refuse_report", "resolve_report"]

Path = Union[str, "os.PathLike[str]"]

# Where Lightning's IPUStrategy(autoreport=True) puts things when nobody says where: PopVision's own
# default is the present folder.
_AUTOREPORT = "autoreport"


class Report:
    """Where and how ``fit`` writes down what it does.

    The folder gets ``report.html``, a page that needs nothing else, what it was made of
    (``run.json``, ``executions.f64``), and ``trace.json`` for trace viewers such as Perfetto.

    Args:
        folder: of one run; made if it is missing.
        overwrite: whether the report of another run that is there may go.
        operators: time the operators of one micro-batch, once, after the first epoch.
        profiler: a ``torch.profiler.profile`` that is not running: ``fit`` starts it, calls its
            ``step()`` after every execution, stops it, and writes its trace beside the page, as
            ``torch_trace.json``, unless it has a handler of its own.

    Attributes:
        folder, overwrite, operators, profiler: the arguments.

    Raises:
        ConfigurationError: an argument can't work.
    """

    def __init__(
        self,
        folder: Path,
        overwrite: bool = False,
        operators: bool = True,
        profiler: Any = None,
    ) -> None:
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
        """The folder of PopVision's profile, of an engine that has one."""
        return os.path.abspath(os.path.join(self.folder, POPVISION))

    def __repr__(self) -> str:
        return f"Report({self.folder!r})"


def resolve_report(report: Any, autoreport: Any, autoreport_dir: Any) -> Optional[Report]:
    """Bring the arguments of ``fit`` about reports into one form.

    Args:
        report: a path, a Report, or None.
        autoreport: Lightning's name of the switch.
        autoreport_dir: Lightning's name of the folder.

    Raises:
        ConfigurationError: they are of other types, or contradict each other.
    """
    one_of("autoreport", autoreport, (True, False))
    if report is not None and (autoreport or autoreport_dir is not None):
        raise ConfigurationError(
            "report and autoreport both ask for a report; autoreport is the name that it has in "
            "Lightning. Pass report='runs/1' alone."
        )
    if autoreport_dir is not None and not autoreport:
        raise ConfigurationError(
            f"autoreport_dir={autoreport_dir!r} is the folder of a report, but autoreport is not "
            "given. Pass autoreport=True too, or report='runs/1'."
        )
    if autoreport:
        folder = _AUTOREPORT if autoreport_dir is None else autoreport_dir
        return Report(folder_of("autoreport_dir", folder))
    if report is None or isinstance(report, Report):
        return report
    if isinstance(report, type):
        raise ConfigurationError(
            "report must be a path or an object, got the class Report. Pass Report('runs/1')."
        )
    return Report(folder_of("report", report))


def refuse_report(report: Report, resumes: bool) -> None:
    """Refuse, before any work, a report that could not be made at its end.

    Args:
        report: that is asked for.
        resumes: whether a run goes on, whose report then goes on too.

    Raises:
        ConfigurationError: no page can be made, the profiler can't look on, or the folder is not
            free.
    """
    if importlib.util.find_spec("plotly") is None:
        raise ConfigurationError(
            "report draws its curves with plotly, which is not installed. Run: "
            "pip install ipufit[report]"
        )
    refuse_profiler(report.profiler)
    if os.path.exists(report.folder) and not os.path.isdir(report.folder):
        raise ConfigurationError(
            f"report must be a folder, but {report.folder!r} is a file. Pass another path."
        )
    existing = [f for f in (FACTS, EXECUTIONS) if os.path.exists(os.path.join(report.folder, f))]
    if existing and not (report.overwrite or resumes):
        raise ConfigurationError(
            f"report={report.folder!r} holds the report of another run. Pass another folder, or "
            f"report=ipufit.Report({report.folder!r}, overwrite=True)."
        )
