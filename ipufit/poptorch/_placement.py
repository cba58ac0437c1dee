"""Placement of blocks on stages, phases and IPUs, and the checks of a device.

Nothing is moved on this engine. A model that is accepted here has stages that fit its batches and
a number of IPUs that a system can have, so that it is accepted on one.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Hashable, List, NamedTuple, Optional, Sequence, Tuple

from ipufit.poptorch import enums
from ipufit.poptorch._devices import reserved
from ipufit.poptorch._errors import error
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.execution import (
    ParallelPhasedExecution,
    PipelinedExecution,
    ShardedExecution,
    Stage,
    _IExecutionStrategy,
    _IPhasedExecution,
)
from ipufit.poptorch._options.options import Options

__all__ = ["PlacedBlock", "Placement", "placed"]

Entered = Sequence[Tuple[Hashable, Optional[int]]]


class PlacedBlock(NamedTuple):
    """One entry into a block.

    ``stage`` and ``phase`` are -1 where the strategy has none.
    """

    block: Hashable
    stage: int
    phase: int
    ipu: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """Placement of a model on IPUs.

    Attributes:
        strategy: ``"pipelined"``, ``"sharded"`` or ``"phased"``.
        blocks: the blocks in the order in which they were entered.
        stages: pipeline stages, of the backward pass too; 1 for another strategy.
        ipus_per_replica: IPUs of one replica.
        ipus: IPUs that are reserved for all replicas.
        unused: reserved IPUs that no replica uses.
    """

    strategy: str
    blocks: Tuple[PlacedBlock, ...]
    stages: int
    ipus_per_replica: int
    ipus: int
    unused: int


def placed(
    options: Options, entered: Entered, training: bool, overlapped: bool = False
) -> Placement:
    """Place the blocks of a recording.

    Args:
        options: the model's own, with the output mode picked.
        entered: for each entry into a block its name and IPU, in order; None for no IPU.
        training: whether it is a training model.
        overlapped: whether an input or output asked for a transfer that overlaps with computing.
    Raises:
        AssertionError: a block that the strategy does not know, or whose stage does not follow.
        Error: fewer micro-batches than pipeline stages, phases on the wrong IPUs, more IPUs than
            a system has or not a power of two of them, or a transfer that can't overlap.
    """
    strategy = options._execution_strategy
    pipelined = isinstance(strategy, PipelinedExecution) and not isinstance(
        strategy, ShardedExecution
    )
    blocks = _blocks(strategy, entered)
    for block in blocks:
        logger.debug(
            "block %s: stage %d, phase %d, IPU %d", block.block, block.stage, block.phase, block.ipu
        )
    if overlapped:
        _check_overlap(options, pipelined)
    stages = 1
    # What comes before the first block is on IPU 0.
    per_replica = 1 + max((block.ipu for block in blocks), default=0)
    needed = per_replica * options.replication_factor
    ipus = reserved(options, needed)
    if pipelined:
        stages = _pipeline_stages(blocks, training)
        _check_pipeline(options, stages, training)
    return Placement(
        "phased" if isinstance(strategy, _IPhasedExecution) else _NAMES[pipelined],
        tuple(blocks),
        stages,
        per_replica,
        ipus,
        ipus - needed,
    )


_NAMES = {True: "pipelined", False: "sharded"}


def _blocks(strategy: _IExecutionStrategy, entered: Entered) -> List[PlacedBlock]:
    """Return each entry into a block with its stage, phase and IPU."""
    stages: Dict[Hashable, Stage] = {}
    blocks = []
    for block, block_ipu in entered:
        stage = _stage(strategy, stages, block, block_ipu)
        # The strategy's word on the IPU comes before the block's.
        ipu = stage._ipu if stage._ipu is not None else block_ipu
        if ipu is None and not isinstance(strategy, _IPhasedExecution):
            ipu = stage._stage_id
        if ipu is None or ipu < 0:
            raise error(
                f"The block {block!r} has no IPU (got {ipu}). Name one, from 0: poptorch.Block("
                f"{block!r}, ipu_id=0), or strategy.stage({block!r}).ipu(0)."
            )
        if isinstance(strategy, ParallelPhasedExecution) and stage._phase_id % 2 != ipu % 2:
            raise error(
                "When phases are executed in parallel, even phases need even IPUs and odd phases "
                f"odd ones: the block {block!r} is of phase {stage._phase_id} and on IPU {ipu}. "
                f"Use strategy.phase({stage._phase_id}).ipus(...)."
            )
        blocks.append(PlacedBlock(block, stage._stage_id, stage._phase_id, ipu))
    return blocks


def _stage(
    strategy: _IExecutionStrategy,
    generated_stages: Dict[Hashable, Stage],
    block: Hashable,
    ipu: Optional[int],
) -> Stage:
    """Return the stage of a block, and add those that the strategy generates to a dict."""
    named: Dict[Any, Stage] = strategy._block_map
    if named:
        if block not in named:
            raise AssertionError(
                f"Unknown block {block!r}: the execution strategy names {list(named)}. Add "
                "it there, or leave the strategy's arguments out."
            )
        return named[block]
    if block in generated_stages:
        return generated_stages[block]
    assert isinstance(strategy, PipelinedExecution)  # phases are always named
    if strategy._auto_stage == enums.AutoStage.SameAsIpu:
        if ipu is None:
            raise AssertionError(
                "poptorch.AutoStage.SameAsIpu takes a block's stage from its IPU, and the block "
                f"{block!r} has none. Use poptorch.Block({block!r}, ipu_id=0), or "
                "poptorch.AutoStage.AutoIncrement."
            )
        number = ipu
    else:
        number = 1 + len(generated_stages)
    generated_stages[block] = Stage()._setStage(number)
    return generated_stages[block]


def _pipeline_stages(blocks: Sequence[PlacedBlock], training: bool) -> int:
    """Stages of a pipeline: blocks that follow each other on one IPU are one stage.

    The backward pass has as many, and shares one: the loss' stage goes straight on.
    """
    ipus = [0, *(block.ipu for block in blocks)]
    forward = 1 + sum(before != after for before, after in zip(ipus, ipus[1:]))
    return 2 * forward - 1 if training else forward


def _check_pipeline(options: Options, stages: int, training: bool) -> None:
    """Refuse a run with too few micro-batches to fill the pipeline."""
    accumulation = options.Training.gradient_accumulation
    if training and accumulation < stages:
        raise error(
            "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the "
            f"number of pipeline stages ({stages}) when using poptorch.PipelinedExecution. Please "
            f"note that a model with {(stages + 1) // 2} pipeline stages in PopTorch will have an "
            f"additional {(stages - 1) // 2} stages when training. Got {accumulation}: use "
            f"options.Training.gradientAccumulation({stages}) or more, or another strategy."
        )
    if not training and options.device_iterations < stages:
        raise error(
            "poptorch.Options().deviceIterations must be greater than or equal to the number of "
            f"pipeline stages ({stages}) to fill a pipeline. Got {options.device_iterations}: use "
            f"options.deviceIterations({stages}) or more, or another strategy."
        )


def _check_overlap(options: Options, pipelined: bool) -> None:
    """Refuse transfers that a device can't overlap with computing."""
    if pipelined:
        raise error(
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using "
            "only one IPU, please switch to poptorch.ShardedExecution."
        )
    if not options.TensorLocations.exists("numIOTiles"):
        raise error(
            "No IO tiles allocated. You must allocate at least 32 IO tiles using "
            "poptorch.Options().TensorLocations.numIOTiles."
        )
    if options.output_mode not in (enums.OutputMode.Sum, enums.OutputMode.All):
        mode = enums.OutputMode(options.output_mode).name
        raise error(
            "A transfer that overlaps with computing needs every micro-batch's output, got "
            f"OutputMode.{mode}. Use poptorch.OutputMode.All or poptorch.OutputMode.Sum."
        )
