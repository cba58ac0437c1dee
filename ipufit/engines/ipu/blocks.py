"""How a partition is told to PopTorch: blocks inside forward, a strategy in the options."""

from __future__ import annotations

from typing import Any, Optional

from ipufit.engines.ipu.sdk import is_standin
from ipufit.engines.ipu.size import Size
from ipufit.partition.own_blocks import OwnBlocks
from ipufit.partition.partition import BLOCK, Partition

__all__ = ["begin_loss", "block_of", "ipu_of", "place"]


def block_of(stage: int) -> str:
    """The name of a stage's block."""
    return f"{BLOCK}stage {stage}"


def ipu_of(partition: Optional[Partition], stage: int) -> int:
    """The IPU of a replica on which a stage or phase runs."""
    assert partition is not None
    return partition.ipu_of(stage)


def begin_loss(sdk: Any, partition: Optional[Partition], own: OwnBlocks) -> None:
    """Let the loss be where the module ends, which may have left its last block.

    Where blocks don't tell which they are, it is the last IPU; but a strategy of PopTorch's own
    form that names all blocks would not know another one.
    """
    if is_standin(sdk):
        own.reopen(sdk)
    elif partition is not None and not partition.begins and partition.poptorch_strategy is None:
        sdk.Block.start(f"{BLOCK}loss", ipu_id=partition.ipus - 1)


def place(sdk: Any, options: Any, partition: Partition, size: Size, training: bool) -> None:
    """Set the execution strategy.

    A call that is too small to fill the pipeline, as the last of an epoch may be, runs one stage
    after the other: the numbers are the same.
    """
    filled = size.iterations >= partition.stages
    if training:
        filled = size.accumulation >= 2 * partition.stages - 1
    if partition.is_pipelined and not filled:
        options.setExecutionStrategy(_sharded(sdk, partition.poptorch_strategy))
    elif partition.poptorch_strategy is not None:
        options.setExecutionStrategy(partition.poptorch_strategy)
    else:
        options.setExecutionStrategy(_strategy(sdk, partition))


def _sharded(sdk: Any, pipeline: Any) -> Any:
    """The stages of a pipeline, one after the other."""
    named = {} if pipeline is None else pipeline._block_map
    if named:
        return sdk.ShardedExecution(*dict.fromkeys(named.values()))
    # Counting on from the IPUs that blocks name, it needs no IPU on every one.
    return sdk.ShardedExecution(sdk.AutoStage.AutoIncrement)


def _strategy(sdk: Any, partition: Partition) -> Any:
    stage = sdk.AutoStage.SameAsIpu
    if partition.stages > partition.ipus:
        # Stages must have ascending numbers; that of an IPU can't come twice.
        stage = sdk.AutoStage.AutoIncrement
    if partition.strategy == "pipelined":
        return sdk.PipelinedExecution(stage)
    if partition.strategy == "sharded":
        return sdk.ShardedExecution(stage)
    kind = sdk.SerialPhasedExecution
    if partition.strategy == "parallel_phased":
        kind = sdk.ParallelPhasedExecution
    phases = range(partition.stages)
    return kind(*(sdk.Phase(sdk.Stage(block_of(p)).ipu(ipu_of(partition, p))) for p in phases))
