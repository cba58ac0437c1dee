"""Groups of options, which have fixed names and types, and can be frozen; one class a section."""

from __future__ import annotations

import copy
import difflib
import os
from typing import Any, Dict, Iterable, Optional, TypeVar

import torch

from ipufit.poptorch import enums
from ipufit.poptorch._logging import logger

T = TypeVar("T")
Self = TypeVar("Self", bound="Freezable")
Group = TypeVar("Group", bound="OptionGroup")

_FROZEN = (
    "Can't modify frozen Options: they belong to a model or a DataLoader. "
    "Set options before handing them over, or change a copy: options.clone()."
)


# By the name in earlier versions of PopTorch: an option, and its enum, as they are called now.
RENAMED = {"anchorMode": "outputMode", "AnchorMode": "OutputMode"}


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest name, or lists all of them."""
    names = sorted(names)
    if RENAMED.get(name) in names:
        return f"It is called {RENAMED[name]} in PopTorch 3.4."
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]}?"
    return f"Valid names are {', '.join(names)}." if names else "There are none."


def need_type(option: str, value: T, *kinds: type) -> T:
    """Return a value, and refuse one of another type.

    A bool is not taken for a number: the device's compiler would refuse it later.

    Raises:
        AssertionError: it is of another type.
    """
    matches = isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
    if not matches:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise AssertionError(
            f"Unexpected type {type(value).__name__} for option {option}. "
            f"Expected {expected}, got {value!r}."
        )
    return value


class Freezable:
    """Options that an executor freezes, because it is compiled for their values."""

    _is_frozen = False

    def checkIsFrozen(self, option: Optional[str] = None) -> None:
        """Refuse a change of frozen options.

        Raises:
            AttributeError: they are frozen.
        """
        if option != "_is_frozen" and self._is_frozen:
            raise AttributeError(_FROZEN)

    def __deepcopy__(self: Self, memory: Dict[int, object]) -> Self:
        """Return a copy that is not frozen."""
        copied = type(self).__new__(type(self))
        memory[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = False if name == "_is_frozen" else copy.deepcopy(value, memory)
        return copied


class OptionGroup(Freezable):
    """A dictionary of options whose names and types are those of its defaults.

    Values are read as attributes (``options.device_iterations``), by name (``options.exists``,
    ``options("device_iterations")``), or all at once (``toDict``).
    """

    _popart: _PopartOptions

    def __init__(self, **default_values: object) -> None:
        self._is_frozen = False
        # From here on no other private attribute can appear.
        self._values: Dict[str, Any] = default_values

    def set(self, **kwargs: object) -> None:
        """Give known options new values.

        Raises:
            AssertionError: an unknown name, or a value of another type than the present one.
            AttributeError: the options are frozen.
        """
        self.checkIsFrozen()
        for option, value in kwargs.items():
            if not self.exists(option):
                raise AssertionError(
                    f"There is no option {option}. {nearest(option, self._values)}"
                )
            need_type(option, value, type(self._values[option]))
            self._values[option] = value

    def createOrSet(self, **kwargs: object) -> None:
        """Set options; a new name is added, and an existing one follows the rules of ``set``."""
        self.checkIsFrozen()
        for option, value in kwargs.items():
            if option in self._values:
                self.set(**{option: value})
            else:
                self._values[option] = value

    def _with(self: Group, **options: object) -> Group:
        """Set options like ``createOrSet``, and return this group, so that calls can be chained."""
        self.createOrSet(**options)
        return self

    def _with_compiler(self: Group, option: str, value: object) -> Group:
        """Set an option of the compiler by its own name, and return this group."""
        self._popart.set(option, value)
        return self

    def exists(self, option: str) -> bool:
        """Return True if the option has a value."""
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Remove the value of an option."""
        self.checkIsFrozen()
        self._values.pop(option, None)

    def update(self, other: Dict[str, Any]) -> Dict[str, Any]:
        """Add this group's values to a dictionary, which is returned.

        Raises:
            AssertionError: the dictionary has one of these names already.
        """
        both = sorted(set(self._values).intersection(other))
        if both:
            raise AssertionError(
                f"These options are set in two places: {', '.join(both)}. Keep their own setters, "
                "and leave them out of options._Popart.set."
            )
        other.update(self._values)
        return other

    def toDict(self) -> Dict[str, Any]:
        """Return the values by name."""
        return self.update({})

    def _unfreeze(self) -> None:
        self._freeze(False)

    def _freeze(self, frozen: bool = True) -> None:
        """Freeze or unfreeze this group and the groups inside it."""
        self._is_frozen = frozen
        for value in self.__dict__.values():
            if isinstance(value, Freezable):
                value._is_frozen = frozen

    def __call__(self, option: str) -> Any:
        return getattr(self, option)

    def __getattr__(self, option: str) -> Any:
        # Only asked for what is not an attribute; `_values` itself is missing while a copy is made.
        values = self.__dict__.get("_values", {})
        if option.startswith("_") or option not in values:
            names = set(values).union(name for name in dir(type(self)) if not name.startswith("_"))
            raise AttributeError(f"There is no option {option}. {nearest(option, names)}")
        return values[option]

    def __setattr__(self, option: str, value: object) -> None:
        self.checkIsFrozen(option)
        if not option.startswith("_"):
            self.set(**{option: value})
            return
        if "_values" in self.__dict__ and option != "__class__" and option not in self.__dict__:
            raise AttributeError(
                f"There is no private attribute {option}. {nearest(option, self.__dict__)}"
            )
        super().__setattr__(option, value)

    def __getstate__(self) -> Dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: Dict[str, object]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({values})"


class _PopartOptions(Freezable):
    """Session options of the device's compiler, by its own names: ``options._Popart``.

    Any name and any value is taken here; ``compile`` refuses what the compiler does not know.

    Attributes:
        options: the values by name.
    """

    def __init__(self) -> None:
        self._is_frozen = False
        self.options: Dict[str, Any] = {}
        self.set("instrumentWithHardwareCycleCounter", False)
        self.set("rearrangeAnchorsOnHost", False)

    def set(self, key: str, value: object) -> _PopartOptions:
        """Set one option."""
        self.checkIsFrozen()
        need_type("key", key, str)
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: Dict[str, str]) -> _PopartOptions:
        """Set options of the device's engine, by its own names."""
        return self.set("engineOptions", need_type("engineOptions", engine_options, dict))

    def setPatterns(self, patterns: Dict[str, bool], level: int = 2) -> _PopartOptions:
        """Set the rewriting patterns that the compiler uses, on top of those of a level.

        Raises:
            AssertionError: not a dict, or a level that is not an int.
        """
        need_type("level", level, int)
        need_type("patterns", patterns, dict)
        self.set("patterns_level", level)
        return self.set("patterns", patterns)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({values})"


class _TrainingOptions(OptionGroup):
    """Options of how gradients are reduced: ``options.Training``. Not for inference models."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart = popart_options
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Set the number of micro-batches whose gradients make one update of the weights."""
        return self._with(gradient_accumulation=gradient_accumulation)

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
        return self._with(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        """Set when a mean is divided: at every addition (``Running``) or at the end (``Post``).

        An optimizer whose ``accum_type`` is float16 chooses ``Running`` by itself.
        """
        return self._with(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Let the loss scale follow the size of half-precision gradients."""
        need_type("setAutomaticLossScaling", enabled, bool)
        return self._with_compiler("automaticLossScalingSettings.enabled", enabled)

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Spread convolutions over the tiles of an IPU. Nothing is spread on this engine.

        It replaces what ``Precision.setPartialsType`` has set for convolutions.
        """
        need_type("setConvolutionDithering", enabled, bool)
        return self._with_compiler("convolutionOptions", {"enableConvDithering": enabled})


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
        self._popart = popart_options
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
        return self._with_compiler("enableFloatingPointChecks", enabled)

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round to half at random, right on average. This engine rounds to nearest."""
        need_type("enableStochasticRounding", enabled, bool)
        return self._with_compiler("enableStochasticRounding", enabled)

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
        self._popart.set("partialsTypeMatMuls", names[dtype])
        return self._with_compiler("convolutionOptions", {"partialsType": names[dtype]})


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
        return self._with(**{option: int(value)})  # type: ignore[call-overload]  # a bool or an int


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
        return self._with(numIOTiles=num_tiles)

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

    def _place(self, option: str, location: TensorLocationSettings) -> _TensorLocationOptions:
        need_type(option, location, TensorLocationSettings)
        return self._with(**{option: location.toDict()})


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
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> _DistributedOptions:
        """Use one process, whatever the environment says."""
        return self._with(num_distributed_processes=1, distributed_process_id=0)

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
        return self._with(
            distributed_process_id=process_id, num_distributed_processes=num_processes
        )

    @property
    def processId(self) -> int:
        """Index of this process, from 0."""
        return int(self._values["distributed_process_id"])

    @property
    def numProcesses(self) -> int:
        """Number of processes."""
        return int(self._values["num_distributed_processes"])
