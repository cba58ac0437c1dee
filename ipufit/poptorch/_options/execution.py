"""How a model runs: stages, strategies that place them on IPUs, options of an execution."""

from __future__ import annotations

import copy
from types import TracebackType
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Sequence, Type, TypeVar, Union

import torch

from ipufit.poptorch import enums
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.group import OptionGroup, need_type

BlockId = str


class Stage:
    """One or more blocks that run one after the other on one IPU.

    Raises:
        AssertionError: a block's name that is not a string.
    """

    def __init__(self, *block_ids: BlockId) -> None:
        if not all(isinstance(block, str) for block in block_ids):
            raise AssertionError(
                f"A stage takes names of blocks, which are strings, got {block_ids}. Use "
                'poptorch.Stage("A", "B").'
            )
        self._blocks = block_ids
        self._stage_id = -1
        self._phase_id = -1
        self._ipu: Optional[int] = None

    @property
    def blocks(self) -> List[BlockId]:
        """The names of the stage's blocks."""
        return list(self._blocks)

    def ipu(self, ipu: int) -> Stage:
        """Set the IPU that the stage runs on, instead of the one that its blocks name.

        Raises:
            AssertionError: not an int, or below 0.
        """
        need_type("ipu", ipu, int)
        if ipu < 0:
            raise AssertionError(f"IPUs are numbered from 0, got ipu={ipu}.")
        self._ipu = ipu
        return self

    def _setStage(self, stage: Optional[int]) -> Stage:
        if stage is not None:
            self._stage_id = stage
        return self


class Phase:
    """Stages that run at the same time.

    Args:
        arg: stages; or names of blocks, which make one stage.
    Raises:
        AssertionError: something else, or both kinds.
    """

    def __init__(self, *arg: Union[BlockId, Stage]) -> None:
        stages = [element for element in arg if isinstance(element, Stage)]
        names = [element for element in arg if isinstance(element, str)]
        if len(stages) == len(arg):
            self.stages: Sequence[Stage] = stages
        elif len(names) == len(arg):
            self.stages = [Stage(*names)]
        else:
            raise AssertionError(
                "A phase takes stages, or names of blocks (strings), but not both; got "
                f"{[type(element).__name__ for element in arg]}."
            )

    def stage(self, idx: int) -> Stage:
        """Return one of the stages, counted from 0."""
        return self.stages[idx]

    def ipus(self, *ipus: int) -> None:
        """Set one IPU for each of the stages, in their order.

        Raises:
            AssertionError: another number of IPUs than of stages.
        """
        if len(ipus) != len(self.stages):
            raise AssertionError(
                f"This phase has {len(self.stages)} stages, got {len(ipus)} IPUs. Give one IPU for "
                "each stage."
            )
        for stage, ipu in zip(self.stages, ipus):
            stage.ipu(ipu)


class Attribute:
    """A context in which operators carry attributes for the device's compiler.

    They change no value, and nothing reads them on this engine.

    Args:
        kwargs: for each attribute, a dict of its keys and values.
    Raises:
        AssertionError: an attribute that is not a dict.
    """

    _current_attrs: ClassVar[Dict[str, Dict[str, object]]] = {}

    def __init__(self, **kwargs: Dict[str, Any]) -> None:
        for name, attribute in kwargs.items():
            need_type(f"Attribute({name}=...)", attribute, dict)
        self._kwargs = kwargs
        self._saved: Dict[str, Dict[str, object]] = {}

    def __enter__(self) -> None:
        self._saved = Attribute._current_attrs
        inside = copy.deepcopy(self._saved)
        for name, attribute in self._kwargs.items():
            inside.setdefault(name, {}).update(attribute)
        Attribute._current_attrs = inside

    def __exit__(
        self,
        type: Optional[Type[BaseException]],
        value: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        Attribute._current_attrs = self._saved


class _IExecutionStrategy:
    """A mapping of blocks to stages; empty where the stages follow from the blocks."""

    _backend_options: ClassVar[Mapping[str, Union[int, bool]]] = {}

    def __init__(self, block_map: Dict[BlockId, Stage]) -> None:
        self._block_map = block_map

    def stage(self, block_id: BlockId) -> Stage:
        """Return the stage to which a block belongs.

        Raises:
            AssertionError: the strategy names no such block.
        """
        if block_id not in self._block_map:
            raise AssertionError(
                f"Unknown block {block_id!r}: this strategy names {list(self._block_map)}. Use "
                "one of them."
            )
        return self._block_map[block_id]

    def onStartTracing(self) -> None:
        """Prepare nothing: blocks are placed when the recording is complete."""

    def onEndTracing(self) -> None:
        """Undo nothing."""

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        """Return the compiler's options for this strategy."""
        return dict(self._backend_options)

    def _add(self, stage: Stage) -> None:
        """Add a stage and its blocks."""
        for block in stage.blocks:
            if block in self._block_map:
                raise AssertionError(
                    f"The block {block!r} is in more than one stage. Name each block once."
                )
            self._block_map[block] = stage


def _stage_of(arg: object) -> Stage:
    """Return a stage for a stage, a block's name or several names."""
    if isinstance(arg, Stage):
        return arg
    if isinstance(arg, str):
        return Stage(arg)
    if isinstance(arg, (list, tuple)):
        return Stage(*arg)
    raise AssertionError(
        "A stage is a poptorch.Stage, a block ID (a string) or a list of block IDs, got "
        f"{type(arg).__name__}."
    )


class PipelinedExecution(_IExecutionStrategy):
    """Stages that work at the same time, on micro-batches that follow each other.

    Args:
        args: stages, names of blocks, or lists of names, in the order in which they run; or one
            ``AutoStage`` that says how stages follow from the blocks (``SameAsIpu`` if nothing is
            given).
    Raises:
        AssertionError: something else, or a block in two stages.
    """

    _backend_options: ClassVar[Mapping[str, Union[int, bool]]] = {"execution_mode": 0}

    def __init__(self, *args: object) -> None:
        super().__init__({})
        self._auto_stage = enums.AutoStage.SameAsIpu
        if len(args) == 1 and isinstance(args[0], enums.AutoStage):
            self._auto_stage = args[0]
            return
        for stage_id, arg in enumerate(args):
            self._add(_stage_of(arg)._setStage(stage_id))


class ShardedExecution(PipelinedExecution):
    """Stages that run one after the other, with the arguments of ``PipelinedExecution``."""

    _backend_options: ClassVar[Mapping[str, Union[int, bool]]] = {"execution_mode": 1}


class _IPhasedExecution(_IExecutionStrategy):
    """Phases that run one after the other, each made of stages that run at the same time.

    Args:
        phases: phases, lists of stages, or lists of blocks' names (which make one stage).
    Raises:
        AssertionError: something else, no phase, or a block in two stages.
    """

    def __init__(self, *phases: Union[Phase, Stage, BlockId, List[Stage], List[BlockId]]) -> None:
        super().__init__({})
        self._tensors_liveness = enums.Liveness.AlwaysLive
        self._separate_backward_phase = False
        self._phases: List[Phase] = []
        if not phases:
            raise AssertionError(
                "Phased execution needs its phases, which can't follow from the blocks, got none. "
                'Use poptorch.SerialPhasedExecution(["A"], ["B"]).'
            )
        for phase_id, arg in enumerate(phases):
            if isinstance(arg, Phase):
                phase = arg
            else:
                phase = Phase(*(arg if isinstance(arg, list) else [arg]))
            self._phases.append(phase)
            for stage in phase.stages:
                stage._phase_id = phase_id
                self._add(stage)

    def phase(self, phase: int) -> Phase:
        """Return one of the phases, counted from 0.

        Raises:
            AssertionError: not an int, or below 0.
            IndexError: there are fewer phases.
        """
        if not isinstance(phase, int) or phase < 0:
            raise AssertionError(
                f"Phases are numbered from 0, got {phase!r}. Use an int of at least 0."
            )
        if phase >= len(self._phases):
            raise IndexError(f"There are {len(self._phases)} phases, from 0; got {phase}.")
        return self._phases[phase]

    def useSeparateBackwardPhase(self, use: bool = True) -> _IPhasedExecution:
        """Start the backward pass in a separate phase, not in the last forward phase.

        Raises:
            AssertionError: not a bool.
        """
        self._separate_backward_phase = need_type("useSeparateBackwardPhase", use, bool)
        return self

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        """Return the compiler's options for this strategy."""
        return {
            "execution_mode": 2,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._tensors_liveness.value,
            **super().backendOptions(),
        }


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases that alternate between the even and the odd IPUs."""

    _backend_options: ClassVar[Mapping[str, Union[int, bool]]] = {"serial_phases_execution": False}

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        """Store tensors off the chip between the forward and the backward pass.

        Raises:
            AssertionError: not a bool.
        """
        need_type("sendTensorsOffChipAfterFwd", off_chip, bool)
        self._tensors_liveness = (
            enums.Liveness.OffChipAfterFwd if off_chip else enums.Liveness.AlwaysLive
        )
        return self


class SerialPhasedExecution(_IPhasedExecution):
    """Phases that follow each other on the same IPUs."""

    _backend_options: ClassVar[Mapping[str, Union[int, bool]]] = {"serial_phases_execution": True}

    def setTensorsLiveness(self, liveness: enums.Liveness) -> SerialPhasedExecution:
        """Set when tensors leave the chip.

        Raises:
            AssertionError: not a ``Liveness``.
        """
        self._tensors_liveness = need_type("setTensorsLiveness", liveness, enums.Liveness)
        return self


# By the names under which files have them.
STRATEGIES: Dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        ParallelPhasedExecution,
        PipelinedExecution,
        SerialPhasedExecution,
        ShardedExecution,
    )
}

Self = TypeVar("Self", bound="ExecutionOptions")


class ExecutionOptions(OptionGroup):
    """Options on which the results of a run depend."""

    _execution_strategy: _IExecutionStrategy

    def deviceIterations(self: Self, device_iterations: int) -> Self:
        """Set the number of steps of one run, each with its own micro-batches."""
        return self._with(device_iterations=device_iterations)

    def replicationFactor(self: Self, replication_factor: int) -> Self:
        """Set the number of copies of the model, each with its own micro-batches."""
        return self._with(replication_factor=replication_factor)

    def inputReplicaGrouping(
        self: Self, input_group_size: int, input_group_type: enums.CommGroupType
    ) -> Self:
        """Let the replicas of a group read the same micro-batch.

        Args:
            input_group_size: replicas of a group; divides the replication factor set so far.
            input_group_type: which replicas are a group; ``NoGrouping`` means groups of one.
        Raises:
            ValueError: ``All``, or a size that does not divide the replication factor.
            AssertionError: another type.
        """
        self.checkIsFrozen()
        need_type("input_group_size", input_group_size, int)
        need_type("input_cgt", input_group_type, enums.CommGroupType)
        replicas = self.replication_factor
        if input_group_type == enums.CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, enums.CommGroupType.Consecutive
        if input_group_type == enums.CommGroupType.All:
            raise ValueError(
                "CommGroupType.All is no grouping of inputs. For one group of all replicas use "
                f"inputReplicaGrouping({replicas}, poptorch.CommGroupType.Consecutive)."
            )
        if replicas < input_group_size:
            raise ValueError(
                f"A group of {input_group_size} replicas needs as many replicas, got "
                f"replicationFactor({replicas}). Call replicationFactor first, with a multiple."
            )
        if input_group_size < 1 or replicas % input_group_size:
            sizes = [size for size in range(1, replicas + 1) if replicas % size == 0]
            raise ValueError(
                f"The size of a group must divide the {replicas} replicas, got {input_group_size}. "
                f"Use one of {sizes}."
            )
        return self._with(input_group_size=input_group_size, input_cgt=input_group_type)

    def broadcastBuffers(self: Self, broadcast_buffers: bool = True) -> Self:
        """Require equal buffers on all replicas; False gives each replica its own."""
        return self._with(broadcast_buffers=broadcast_buffers)

    def outputMode(
        self: Self, output_mode: enums.OutputMode, output_return_period: Optional[int] = None
    ) -> Self:
        """Set which outputs of a run come back.

        Args:
            output_mode: see ``OutputMode``.
            output_return_period: the N of ``EveryN``, in device iterations.
        Raises:
            AssertionError: not an ``OutputMode``, or ``EveryN`` without a positive period.
        """
        need_type("outputMode", output_mode, enums.OutputMode)
        if output_return_period is not None:
            need_type("output_return_period", output_return_period, int)
        if output_mode == enums.OutputMode.EveryN:
            if output_return_period is None or output_return_period <= 0:
                raise AssertionError(
                    "OutputMode.EveryN needs output_return_period, a positive integer, got "
                    f"{output_return_period}. Use outputMode(poptorch.OutputMode.EveryN, 2) for "
                    "every second device iteration."
                )
        elif output_return_period:
            logger.info(
                "output_return_period=%d is not used: it belongs to OutputMode.EveryN, not to "
                "OutputMode.%s",
                output_return_period,
                output_mode.name,
            )
            output_return_period = None
        return self._with(
            output_mode=output_mode.value, output_return_period=output_return_period or 1
        )

    def defaultOutputMode(self) -> bool:
        """Return True while the output mode depends on the kind of model."""
        return bool(self.output_mode == enums.OutputMode.Default)

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: Optional[enums.OutputMode] = None,
        output_return_period: int = 1,
    ) -> None:
        """Return a tensor of the program too, through ``executor.getAnchoredTensor(short_name)``.

        Frozen options take it as well. It returns nothing: calls can't be chained behind it.

        Args:
            short_name: the name to ask for.
            long_name: the program's name, one of ``executor.getTensorNames()``.
            output_mode: None for that of the outputs.
            output_return_period: the N of ``EveryN``.
        Raises:
            AssertionError: another type.
        """
        need_type("short_name", short_name, str)
        need_type("long_name", long_name, str)
        need_type("output_return_period", output_return_period, int)
        if output_mode is not None:
            need_type("output_mode", output_mode, enums.OutputMode)
        period = output_return_period if output_mode == enums.OutputMode.EveryN else 1
        self.anchored_tensors[short_name] = [long_name, output_mode is None, output_mode, period]

    def randomSeed(self: Self, random_seed: int) -> Self:
        """Seed the device's random numbers, and torch's at once.

        Raises:
            AssertionError: not an int.
        """
        self.checkIsFrozen()
        need_type("random_seed", random_seed, int)
        torch.manual_seed(random_seed)
        return self._with(random_seed=random_seed)

    def setExecutionStrategy(self: Self, strategy: _IExecutionStrategy) -> Self:
        """Set how the model is distributed over IPUs.

        Raises:
            AssertionError: not an execution strategy.
        """
        self.checkIsFrozen()
        if not isinstance(strategy, _IExecutionStrategy):
            raise AssertionError(
                f"Unexpected type {type(strategy).__name__} for option setExecutionStrategy. "
                "Expected poptorch.PipelinedExecution, ShardedExecution, ParallelPhasedExecution "
                f"or SerialPhasedExecution, got {strategy!r}."
            )
        self._execution_strategy = strategy
        return self

    def updatableNamedBuffers(self: Self, buffers: List[str]) -> Self:
        """Name the buffers that ``executor.copyNamedBuffersToDevice()`` copies.

        Raises:
            AssertionError: not a list of strings.
        """
        for name in need_type("updatableNamedBuffers", buffers, list, tuple):
            need_type("updatableNamedBuffers", name, str)
        return self._with_compiler("updatableNamedBuffers", list(buffers))

    def enableSyntheticData(self: Self, enabled: Union[bool, int]) -> Self:
        """Compute on synthetic inputs and return no useful results, to measure speed.

        Args:
            enabled: numbers of ``popart.SyntheticDataMode`` count as in PopTorch, where any but 0
                is the normal distribution.
        """
        need_type("enableSyntheticData", enabled, bool, int)
        # The compiler's numbers: 0 for off, 2 for normally distributed.
        return self._with_compiler("syntheticDataMode", 2 if enabled else 0)

    def enableStableNorm(self: Self, enabled: bool) -> Self:
        """Compute norms more exactly. torch's norms are exact already."""
        return self._with_compiler("enableStableNorm", need_type("enableStableNorm", enabled, bool))
