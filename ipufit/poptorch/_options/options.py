"""``Options``, which say how a model is compiled and run."""

from __future__ import annotations

import contextlib
import copy
import datetime
import os
import sys
from typing import Any, Dict, Iterator, List, Optional, TypeVar, Union

import tqdm

from ipufit.poptorch import enums
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.execution import ExecutionOptions, PipelinedExecution
from ipufit.poptorch._options.files import apply_file, apply_json
from ipufit.poptorch._options.group import (
    OptionGroup,
    _DistributedOptions,
    _JitOptions,
    _PopartOptions,
    _PrecisionOptions,
    _TensorLocationOptions,
    _TrainingOptions,
    need_type,
)


class ProgressBar:
    """Shows the progress of a compilation; called with the progress and its total.

    Attributes:
        compilation_time: from the first call to the last; None before.
    """

    def __init__(self) -> None:
        self.compilation_time: Optional[datetime.timedelta] = None
        self._start_time: Optional[datetime.datetime] = None
        self._bar: Any = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Show and measure the compilation inside; one that fails is not measured."""
        before = self.compilation_time
        self(0, 100)
        try:
            yield
        except BaseException:
            self._bar.close()
            self._bar = self._start_time = None
            self.compilation_time = before
            raise
        self(100, 100)

    def __call__(self, progress: int, total: int) -> None:
        if self._start_time is None:
            self._start_time = datetime.datetime.now()
            self._bar = tqdm.tqdm(
                desc="Graph compilation",
                total=total,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
                file=sys.stderr,
            )
        self._bar.update(progress - self._bar.n)
        self.compilation_time = datetime.datetime.now() - self._start_time
        if progress >= total:
            self._bar.close()
            self._bar = self._start_time = None

    def __deepcopy__(self, memory: object) -> ProgressBar:
        """Return a new bar, because each model compiles for itself."""
        return ProgressBar()


_Reports = TypeVar("_Reports", bound="ReportOptions")

DEFAULT_EXCLUDES = ("install/poptorch", "site-packages/torch", "site-packages/poptorch")
# The compiler's word for "never repeat too often".
_NO_LIMIT = (1 << 64) - 1


class ReportOptions(OptionGroup):
    """Options on which no result depends."""

    def logDir(self: _Reports, log_dir: str) -> _Reports:
        """Set the folder for the compiler's logs."""
        return self._with(log_dir=log_dir)

    def maxRepeatLogs(self: _Reports, max_lines: Optional[int]) -> _Reports:
        """Set how often the compiler may repeat a line of its log; None for no limit."""
        return self._with(max_repeat_logs=_NO_LIMIT if max_lines is None else max_lines)

    def modelName(self: _Reports, name: str) -> _Reports:
        """Set the model's name in profiles; the default is "training" or "inference"."""
        return self._with(model_name=need_type("model_name", name, str))

    def logCycleCount(self: _Reports, log_cycle_count: bool) -> _Reports:
        """Count the device's cycles. Only hardware has any."""
        need_type("logCycleCount", log_cycle_count, bool)
        return self._with_compiler("instrumentWithHardwareCycleCounter", log_cycle_count)

    def enableProfiling(self: _Reports, profile_dir: Optional[str] = None) -> _Reports:
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

    def showCompilationProgressBar(self: _Reports, show: bool = True) -> _Reports:
        """Show a bar while compiling, which is needed for ``executor.compilationTime()``."""
        self._show_compilation_progress_bar = need_type("showCompilationProgressBar", show, bool)
        return self

    def relaxOptimizerAttributesChecks(self: _Reports, relax: bool = True) -> _Reports:
        """Log unknown attributes of an optimizer as debug messages, not as warnings."""
        self._relax_optimizer_checks = need_type("relaxOptimizerAttributesChecks", relax, bool)
        return self

    def disableModuleNamescope(self: _Reports) -> _Reports:
        """Leave modules' names out of the program's names."""
        self._module_namescope_enabled = False
        return self

    def sourceLocationExcludes(self: _Reports, excludes: List[str]) -> _Reports:
        """Set parts of paths whose frames are left out when the program is printed."""
        self.checkIsFrozen()
        for part in need_type("sourceLocationExcludes", excludes, list, tuple):
            need_type("sourceLocationExcludes", part, str)
        self._source_location_excludes = list(excludes)
        return self

    def appendToLocationExcludes(self: _Reports, *excludes: str) -> _Reports:
        """Add parts of paths to those of ``sourceLocationExcludes``."""
        return self.sourceLocationExcludes([*self._source_location_excludes, *excludes])


_Device = TypeVar("_Device", bound="DeviceOptions")


class DeviceOptions(OptionGroup):
    """Options that say where a model runs."""

    def autoRoundNumIPUs(self: _Device, auto_round_num_ipus: bool = True) -> _Device:
        """Take the next power of two where a model needs another number of IPUs."""
        return self._with(auto_round_num_ipus=auto_round_num_ipus)

    def useIpuModel(self: _Device, use_model: bool) -> _Device:
        """Follow the rules of the IPU Model instead of hardware's.

        It comes before the environment variable ``POPTORCH_IPU_MODEL``.
        """
        return self._with(use_model=need_type("use_model", use_model, bool))

    def connectionType(self: _Device, connection_type: enums.ConnectionType) -> _Device:
        """When a model takes its device.

        Raises:
            AssertionError: not a ``ConnectionType``.
        """
        need_type("connectionType", connection_type, enums.ConnectionType)
        return self._with(connection_type=connection_type.value)

    def syncPattern(self: _Device, sync_pattern: enums.SyncPattern) -> _Device:
        """Which IPUs wait for each other.

        Raises:
            AssertionError: not a ``SyncPattern``.
        """
        need_type("syncPattern", sync_pattern, enums.SyncPattern)
        return self._with(sync_pattern=sync_pattern.value)

    def useIpuId(self: _Device, ipu_id: int) -> _Device:
        """Take this device of the system.

        Raises:
            AssertionError: not an int.
        """
        return self._with(ipu_id=need_type("ipu_id", ipu_id, int))

    def useOfflineIpuTarget(self: _Device, ipu_version: int = 2) -> _Device:
        """Only compile, for a kind of IPU: 1, 2 or 21. It sets ``ConnectionType.Never``."""
        need_type("ipu_version", ipu_version, int)
        self.connectionType(enums.ConnectionType.Never)
        return self._with(ipu_version=ipu_version)

    def setAvailableMemoryProportion(
        self: _Device, available_memory_proportion: Dict[str, float]
    ) -> _Device:
        """Memory for temporary values, as a part of each IPU's: ``{"IPU0": 0.5}``.

        Raises:
            AssertionError: a key that is not "IPU" and a number, or a value outside of 0 ... 1.
        """
        need_type("available_memory_proportion", available_memory_proportion, dict)
        by_ipu: Dict[int, float] = {}
        for key, proportion in available_memory_proportion.items():
            if not isinstance(key, str) or not key.startswith("IPU") or not key[3:].isdigit():
                raise AssertionError(
                    f'Available memory is set for each IPU, by "IPU" and its number, got {key!r}. '
                    'Use {"IPU0": 0.5}.'
                )
            need_type(f"available_memory_proportion[{key!r}]", proportion, float, int)
            if not 0 <= proportion <= 1:
                raise AssertionError(
                    f"The available memory of {key} must be in 0 ... 1, got {proportion}."
                )
            by_ipu[int(key[3:])] = float(proportion)
        return self._with(available_memory_proportion=by_ipu)

    def enableExecutableCaching(
        self: _Device, path: Optional[Union[str, os.PathLike[str]]]
    ) -> _Device:
        """Keep compiled programs in a folder and take them from there; None for no longer."""
        if path is not None:
            need_type("enableExecutableCaching", path, str, os.PathLike)
            self._popart.set("cachePath", os.fspath(path))
        return self._with_compiler("enableEngineCaching", path is not None)


class Options(ExecutionOptions, DeviceOptions, ReportOptions):
    """Options of how a model is compiled and run.

    Setters return the options, so that calls can be chained; those of a group are reached through
    it: ``options.Training.gradientAccumulation(4)``. A model or a ``DataLoader`` freezes the
    options that it is given and keeps a copy.

    ``POPTORCH_DEFAULT_OPTIONS`` (JSON, see ``from_json``) and ``POPTORCH_CACHE_DIR`` are read here.

    >>> import ipufit.poptorch as poptorch
    >>> options = poptorch.Options().deviceIterations(4).outputMode(poptorch.OutputMode.Sum)
    >>> options.device_iterations
    4
    """

    def __init__(self) -> None:
        self._jit = _JitOptions()
        self._popart = _PopartOptions()
        self._graphProcessing = _PrecisionOptions(self._popart)
        self._training = _TrainingOptions(self._popart)
        self._distributed = _DistributedOptions()
        self._tensor_locations = _TensorLocationOptions()
        self._execution_strategy = PipelinedExecution()
        self._source_location_excludes = list(DEFAULT_EXCLUDES)
        self._progress_bar = ProgressBar()
        self._relax_optimizer_checks = False
        self._show_compilation_progress_bar = True
        self._module_namescope_enabled = True
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            input_cgt=enums.CommGroupType.Consecutive,
            broadcast_buffers=True,
            device_iterations=1,
            log_dir=".",
            max_repeat_logs=4,
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=enums.OutputMode.Default.value,
            output_return_period=1,
            connection_type=enums.ConnectionType.Always.value,
            sync_pattern=enums.SyncPattern.Full.value,
            available_memory_proportion={},
        )
        self._read_environment()

    def _read_environment(self) -> None:
        cache = os.environ.get("POPTORCH_CACHE_DIR", "")
        if cache:
            logger.info("POPTORCH_CACHE_DIR is set: programs are kept in %s", cache)
            self.enableExecutableCaching(cache)
        defaults = os.environ.get("POPTORCH_DEFAULT_OPTIONS", "")
        if defaults:
            apply_json(self, defaults, "POPTORCH_DEFAULT_OPTIONS")

    @property
    def Training(self) -> _TrainingOptions:
        """Options of training models."""
        return self._training

    @property
    def Precision(self) -> _PrecisionOptions:
        """Options about number formats."""
        return self._graphProcessing

    @property
    def Distributed(self) -> _DistributedOptions:
        """Options of a run over several processes."""
        return self._distributed

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        """Options about the memory in which tensors live."""
        return self._tensor_locations

    @property
    def Jit(self) -> _JitOptions:
        """Withdrawn options of a former tracer."""
        return self._jit

    @property
    def _Popart(self) -> _PopartOptions:
        """Options of the device's compiler, by its own names."""
        return self._popart

    def from_json(self, string: str) -> Options:
        """Set options from JSON.

        Each key is a setter, with its group; each value is its argument, or the list of its
        arguments. A single string such as ``"ConnectionType.OnDemand"`` means the enum's member.

        >>> import ipufit.poptorch as poptorch
        >>> options = poptorch.Options().from_json(
        ...     '{"deviceIterations": 2, "Training.gradientAccumulation": 4}')
        >>> options.Training.gradient_accumulation
        4

        Raises:
            ValueError: not a JSON object.
            AttributeError: a key that is not a setter.
        """
        apply_json(self, string, "Options.from_json")
        return self

    def loadFromFile(self, filepath: str) -> Options:
        """Set options from a file with one call a line, as in a script but without ``options.``.

        Blank lines and lines that begin with ``#`` are skipped. The file is read, never run: calls
        of options with numbers, strings, lists, dicts, PopTorch's enums and strategies as arguments
        are all it can hold. If one line can't be read, none is applied.

        Raises:
            ConfigFileError: a line is something else, or is not Python.
        """
        apply_file(self, filepath)
        return self

    def toDict(self) -> Dict[str, Any]:
        """Return all values by the compiler's names.

        Raises:
            AssertionError: the output mode is still the default, or a name is set twice.
        """
        if self.defaultOutputMode():
            raise AssertionError(
                "toDict() needs an output mode other than Default, which means another mode for "
                "training than for inference. Call options.outputMode(poptorch.OutputMode.All)."
            )
        values: Dict[str, object] = dict(self._execution_strategy.backendOptions())
        values.update(self._popart.options)
        values = self.update(values)
        for group in (self._training, self._distributed, self._tensor_locations):
            values = group.update(values)
        if self._show_compilation_progress_bar:
            values["compilation_progress_bar_fn"] = self._progress_bar
        return values

    def clone(self) -> Options:
        """Return a copy that is not frozen."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        groups = ("Training", "Precision", "Distributed", "TensorLocations", "Jit", "_Popart")
        values = [f"{name}={value!r}" for name, value in self._values.items()]
        values += [f"{name}={getattr(self, name)!r}" for name in groups]
        return f"{type(self).__name__}({', '.join(values)})"
