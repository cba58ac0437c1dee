"""Sections of the options: training, precision, tracing, memory of tensors, several processes."""

from __future__ import annotations

import os
from typing import Optional

import torch

from ipufit.poptorch import enums
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.group import OptionGroup, _PopartOptions, need_type

__all__ = [
    "TensorLocationSettings",
    "_DistributedOptions",
    "_JitOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]


class _TrainingOptions(OptionGroup):
    """Options of how gradients are reduced: ``options.Training``. Not for inference models."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Set the number of micro-batches whose gradients make one update of the weights."""
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(
        self, reduction_type: enums.ReductionType
    ) -> _TrainingOptions:
        """Set whether gradients are averaged or added up over micro-batches and replicas.

        It does not depend on the loss' own reduction.

        Raises:
            ValueError: anything but ``ReductionType.Mean`` or ``ReductionType.Sum``.
        """
        if reduction_type not in (enums.ReductionType.Mean, enums.ReductionType.Sum) or (
            not isinstance(reduction_type, enums.ReductionType)
        ):
            raise ValueError(
                "accumulationAndReplicationReductionType must be poptorch.ReductionType.Mean or "
                f"poptorch.ReductionType.Sum, got {reduction_type!r}."
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        """Set when a mean is divided: at every addition (``Running``) or at the end (``Post``).

        An optimizer whose ``accum_type`` is float16 chooses ``Running`` by itself.
        """
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Let the loss scale follow the size of half-precision gradients."""
        need_type("setAutomaticLossScaling", enabled, bool)
        self._popart_options.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Spread convolutions over the tiles of an IPU. Nothing is spread on this engine.

        It replaces what ``Precision.setPartialsType`` has set for convolutions.
        """
        need_type("setConvolutionDithering", enabled, bool)
        self._popart_options.set("convolutionOptions", {"enableConvDithering": enabled})
        return self


def _withdrawn(call: str, reason: str) -> None:
    logger.warning("[Deprecated] options.%s() will be removed: %s Delete the call.", call, reason)


class _JitOptions(OptionGroup):
    """Withdrawn options of PopTorch's former tracer: ``options.Jit``."""

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Accept False; the option is withdrawn.

        Raises:
            ValueError: it is True.
        """
        _withdrawn("Jit.traceModel", "models are recorded as they run.")
        if trace_model:
            raise ValueError(
                "options.Jit.traceModel(True) is no longer supported. Delete the call: models are "
                "recorded as they run."
            )
        return self


class _PrecisionOptions(OptionGroup):
    """Number formats and floating-point exceptions: ``options.Precision``."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__()

    def halfFloatCasting(
        self, half_float_casting: enums.HalfFloatCastingBehavior
    ) -> _PrecisionOptions:
        """Accept a withdrawn option: operators promote as in torch."""
        _withdrawn("Precision.halfFloatCasting", "half and float mix as in torch.")
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Accept a withdrawn option: statistics have the type that the module gives them.

        Raises:
            ValueError: it is not a bool.
        """
        if not isinstance(value, bool):
            raise ValueError(
                "runningStatisticsAlwaysFloat needs to be set to a bool, got "
                f"{value!r}. Delete the call: statistics keep the module's type."
            )
        _withdrawn(
            "Precision.runningStatisticsAlwaysFloat", "statistics have the type of the module's."
        )
        return self

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Stop where a computation makes NaN, divides by zero or overflows.

        Raises:
            AssertionError: it is not a bool.
        """
        if not isinstance(enabled, bool):
            raise AssertionError(
                f"enableFloatingPointExceptions needs to be set to a bool, got {enabled!r}."
            )
        self._popart_options.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round to half at random, right on average. This engine rounds to nearest."""
        need_type("enableStochasticRounding", enabled, bool)
        self._popart_options.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Set the type of partial sums in products and convolutions; torch chooses it here.

        It replaces what ``Training.setConvolutionDithering`` has set, and the other way round.

        Raises:
            ValueError: neither ``torch.float`` nor ``torch.half``.
        """
        names = {torch.float32: "float", torch.float16: "half"}
        if not isinstance(dtype, torch.dtype) or dtype not in names:
            raise ValueError(
                "parameter to setPartialsType should be either torch.float or torch.half, "
                f"got {dtype!r}."
            )
        self._popart_options.set("partialsTypeMatMuls", names[dtype])
        self._popart_options.set("convolutionOptions", {"partialsType": names[dtype]})
        return self


class TensorLocationSettings(OptionGroup):
    """Memory in which one kind of tensor is stored.

    Every setter refuses another type with an AssertionError.
    """

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Store tensors of fewer elements on the chip."""
        return self._keep("minElementsForOffChip", min_elements, int)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Do not shard tensors of fewer elements over replicas."""
        return self._keep("minElementsForReplicatedTensorSharding", min_elements, int)

    def useOnChipStorage(self, use: Optional[bool] = True) -> TensorLocationSettings:
        """Store tensors on the chip (True), off it (False), or where the compiler likes (None)."""
        if use is None:
            self.deleteIfExists("onChip")
            return self
        return self._keep("onChip", use, bool)

    def useReplicatedTensorSharding(self, use: bool = True) -> TensorLocationSettings:
        """Shard tensors over replicas, for weights and optimizer states."""
        return self._keep("useReplicatedTensorSharding", use, bool)

    def useIOTilesToLoad(self, use: bool = True) -> TensorLocationSettings:
        """Load through the tiles reserved for transfers."""
        return self._keep("useIOTilesToLoad", use, bool)

    def useIOTilesToStore(self, use: bool = True) -> TensorLocationSettings:
        """Store through the tiles reserved for transfers."""
        return self._keep("useIOTilesToStore", use, bool)

    def _keep(self, option: str, value: object, kind: type) -> TensorLocationSettings:
        need_type(option, value, kind)
        self.createOrSet(**{option: int(value)})  # type: ignore[call-overload]  # a bool or an int
        return self


class _TensorLocationOptions(OptionGroup):
    """Memory of each kind of tensor: ``options.TensorLocations``.

    Settings are copied: a later change of them is not seen. Another type than
    ``TensorLocationSettings`` is an AssertionError.
    """

    def numIOTiles(self, num_tiles: int) -> _TensorLocationOptions:
        """Set the number of tiles of each IPU that are reserved for transfers.

        Raises:
            AssertionError: not an int, or not an even number in 32 ... 192.
        """
        need_type("numIOTiles", num_tiles, int)
        if not 32 <= num_tiles <= 192 or num_tiles % 2:
            raise AssertionError(
                "numIOTiles must be an even number between 32 and 192. "
                f"Got {num_tiles}; the nearest is {2 * round(min(max(num_tiles, 32), 192) / 2)}."
            )
        self.createOrSet(numIOTiles=num_tiles)
        return self

    def setActivationLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory of activations."""
        return self._place("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory of weights."""
        return self._place("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory of optimizer states."""
        return self._place("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> _TensorLocationOptions:
        """Set the memory of gradient accumulators."""
        return self._place("location_accumulator", location)

    def _place(self, option: str, location: object) -> _TensorLocationOptions:
        need_type(option, location, TensorLocationSettings)
        assert isinstance(location, TensorLocationSettings)
        self.createOrSet(**{option: location.toDict()})
        return self


def _number(variable: str, default: int) -> int:
    """Read an integer from the environment."""
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"The environment variable {variable} must be an integer, got {text!r}. Unset it, or "
            "call options.Distributed.configureProcessId(process_id, num_processes)."
        ) from None


class _DistributedOptions(OptionGroup):
    """Index of this process, and number of processes: ``options.Distributed``.

    OpenMPI's environment variables are read when the options are made.
    """

    def __init__(self) -> None:
        self._gcd_mappings: object = {}
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> _DistributedOptions:
        """Use one process, whatever the environment says."""
        self.set(num_distributed_processes=1, distributed_process_id=0)
        return self

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Read both numbers from these environment variables; unset means one process.

        Raises:
            ValueError: a variable that is not an integer.
        """
        return self.configureProcessId(_number(var_process_id, 0), _number(var_num_processes, 1))

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Set the index of this process, from 0, and the number of processes.

        Raises:
            AssertionError: not an int.
            ValueError: no such process among so many.
        """
        self.checkIsFrozen()
        need_type("distributed_process_id", process_id, int)
        need_type("num_distributed_processes", num_processes, int)
        if not 0 <= process_id < num_processes:
            raise ValueError(
                f"process_id must be in 0 ... num_processes - 1, got process_id={process_id} and "
                f"num_processes={num_processes}. Number the processes from 0."
            )
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self) -> int:
        """Index of this process, from 0."""
        return int(self._values["distributed_process_id"])

    @property
    def numProcesses(self) -> int:
        """Number of processes."""
        return int(self._values["num_distributed_processes"])
