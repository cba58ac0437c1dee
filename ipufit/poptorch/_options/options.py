"""``Options``, which say how a model is compiled and run."""

from __future__ import annotations

import copy
import os
from typing import Any, Dict

from ipufit.poptorch import enums
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.device import DeviceOptions
from ipufit.poptorch._options.distributed import _DistributedOptions
from ipufit.poptorch._options.execution import ExecutionOptions
from ipufit.poptorch._options.files import apply_file
from ipufit.poptorch._options.locations import _TensorLocationOptions
from ipufit.poptorch._options.naming import apply_json
from ipufit.poptorch._options.numbers import _JitOptions, _PrecisionOptions
from ipufit.poptorch._options.popart import _PopartOptions
from ipufit.poptorch._options.progress import ProgressBar
from ipufit.poptorch._options.reports import DEFAULT_EXCLUDES, ReportOptions
from ipufit.poptorch._options.strategies import PipelinedExecution, _IExecutionStrategy
from ipufit.poptorch._options.training import _TrainingOptions

__all__ = ["Options"]


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
        self._execution_strategy: _IExecutionStrategy = PipelinedExecution()
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
        values: Dict[str, Any] = dict(self._execution_strategy.backendOptions())
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
