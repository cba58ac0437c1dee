"""Execution strategies: how a model is distributed over IPUs. Its values do not depend on them."""

from __future__ import annotations

from typing import Dict, List, Union

from ipufit.poptorch import enums
from ipufit.poptorch._options.group import need_type
from ipufit.poptorch._options.stages import BlockId, Phase, Stage

__all__ = [
    "ParallelPhasedExecution",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "_IExecutionStrategy",
    "_IPhasedExecution",
]


class _IExecutionStrategy:
    """A mapping of blocks to stages; empty where the stages follow from the blocks."""

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
        return {}

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

    def __init__(self, *args: object) -> None:
        super().__init__({})
        self._auto_stage = enums.AutoStage.SameAsIpu
        if len(args) == 1 and isinstance(args[0], enums.AutoStage):
            self._auto_stage = args[0]
            return
        for stage_id, arg in enumerate(args):
            self._add(_stage_of(arg)._setStage(stage_id))

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        """Return the compiler's options for this strategy."""
        return {"execution_mode": 0}


class ShardedExecution(PipelinedExecution):
    """Stages that run one after the other, with the arguments of ``PipelinedExecution``."""

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        """Return the compiler's options for this strategy."""
        return {"execution_mode": 1}


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
        need_type("useSeparateBackwardPhase", use, bool)
        self._separate_backward_phase = use
        return self

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        """Return the compiler's options for this strategy."""
        return {
            "execution_mode": 2,
            "separate_backward_phase": self._separate_backward_phase,
            "tensors_liveness": self._tensors_liveness.value,
        }


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases that alternate between the even and the odd IPUs."""

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        """Return the compiler's options for this strategy."""
        return {**super().backendOptions(), "serial_phases_execution": False}

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

    def setTensorsLiveness(self, liveness: enums.Liveness) -> SerialPhasedExecution:
        """Set when tensors leave the chip.

        Raises:
            AssertionError: not a ``Liveness``.
        """
        need_type("setTensorsLiveness", liveness, enums.Liveness)
        self._tensors_liveness = liveness
        return self

    def backendOptions(self) -> Dict[str, Union[int, bool]]:
        """Return the compiler's options for this strategy."""
        return {**super().backendOptions(), "serial_phases_execution": True}
