"""Options about logs, profiles, names, and the progress bar."""

from __future__ import annotations

import os
from typing import List, Optional, TypeVar

from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.group import OptionGroup, need_type
from ipufit.poptorch._options.popart import _PopartOptions

__all__ = ["DEFAULT_EXCLUDES", "ReportOptions"]

Self = TypeVar("Self", bound="ReportOptions")

DEFAULT_EXCLUDES = ("install/poptorch", "site-packages/torch", "site-packages/poptorch")
# The compiler's word for "never repeat too often".
_NO_LIMIT = (1 << 64) - 1


class ReportOptions(OptionGroup):
    """Options on which no result depends."""

    _popart: _PopartOptions

    def logDir(self: Self, log_dir: str) -> Self:
        """Set the folder for the compiler's logs."""
        self.set(log_dir=log_dir)
        return self

    def maxRepeatLogs(self: Self, max_lines: Optional[int]) -> Self:
        """Set how often the compiler may repeat a line of its log; None for no limit."""
        self.set(max_repeat_logs=_NO_LIMIT if max_lines is None else max_lines)
        return self

    def modelName(self: Self, name: str) -> Self:
        """Set the model's name in profiles; the default is "training" or "inference"."""
        need_type("model_name", name, str)
        self.createOrSet(model_name=name)
        return self

    def logCycleCount(self: Self, log_cycle_count: bool) -> Self:
        """Count the device's cycles. Only hardware has any."""
        need_type("logCycleCount", log_cycle_count, bool)
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def enableProfiling(self: Self, profile_dir: Optional[str] = None) -> Self:
        """Write a profile into a folder; None is the current one."""
        self.checkIsFrozen()
        if profile_dir is not None:
            need_type("enableProfiling", profile_dir, str, os.PathLike)
        settings = {
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": os.fspath(profile_dir) if profile_dir else ".",
            "autoReport.all": "true",
        }
        environment = os.environ.get("POPLAR_ENGINE_OPTIONS", "")
        if any(name in environment for name in settings):
            logger.warning(
                "POPLAR_ENGINE_OPTIONS sets profiling too, and comes first: check its content."
            )
        self._popart.setEngineOptions({**self._popart.options.get("engineOptions", {}), **settings})
        return self

    def showCompilationProgressBar(self: Self, show: bool = True) -> Self:
        """Show a bar while compiling, which is needed for ``executor.compilationTime()``."""
        need_type("showCompilationProgressBar", show, bool)
        self._show_compilation_progress_bar = show
        return self

    def relaxOptimizerAttributesChecks(self: Self, relax: bool = True) -> Self:
        """Log unknown attributes of an optimizer as debug messages, not as warnings."""
        need_type("relaxOptimizerAttributesChecks", relax, bool)
        self._relax_optimizer_checks = relax
        return self

    def disableModuleNamescope(self: Self) -> Self:
        """Leave modules' names out of the program's names."""
        self._module_namescope_enabled = False
        return self

    def sourceLocationExcludes(self: Self, excludes: List[str]) -> Self:
        """Set parts of paths whose frames are left out when the program is printed."""
        self.checkIsFrozen()
        need_type("sourceLocationExcludes", excludes, list, tuple)
        for part in excludes:
            need_type("sourceLocationExcludes", part, str)
        self._source_location_excludes = list(excludes)
        return self

    def appendToLocationExcludes(self: Self, *excludes: str) -> Self:
        """Add parts of paths to those of ``sourceLocationExcludes``."""
        return self.sourceLocationExcludes([*self._source_location_excludes, *excludes])
