"""IPUs: which blocks go where, how many a model needs, and who has a device to itself."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from typing import Any, Dict, Hashable, List, NamedTuple, Optional, Sequence, Tuple

from ipufit.poptorch import enums
from ipufit.poptorch._logging import error, logger
from ipufit.poptorch._options import execution
from ipufit.poptorch._options.options import Options
from ipufit.utils.poptorch_sdk import CLAIM_IPUS

# The most that one process can have.
_MOST = 64


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Say whether the system has a device of so many IPUs: it has none.

    Where ``ipufit run --claim-ipus`` runs the program, it is told that there are up to 64.
    """
    return _flag(CLAIM_IPUS) and num_ipus <= _MOST


def ipuHardwareVersion() -> int:
    """Return the version of the system's IPUs; 2 where ``ipufit run --claim-ipus`` says so.

    Raises:
        AssertionError: it has none.
    """
    if _flag(CLAIM_IPUS):
        return 2
    raise AssertionError(
        "No IPU hardware available on this system: ipufit.poptorch computes with torch. Ask "
        "poptorch.ipuHardwareIsAvailable() first, or run the program with `ipufit run "
        "--claim-ipus`, which says that there are some."
    )


def uses_ipu_model(options: Options) -> bool:
    """Return True if the options, or else the environment, choose the IPU Model over hardware."""
    if options.exists("use_model"):
        return bool(options.use_model)
    return _flag("POPTORCH_IPU_MODEL") or _flag("POPTORCH_SMALL_IPU_MODEL")


def _flag(variable: str) -> bool:
    text = os.environ.get(variable, "") or "0"
    try:
        return int(text) != 0
    except ValueError:
        raise error(f"The environment variable {variable} must be 0 or 1, got {text!r}.") from None


def reserved(options: Options, needed: int) -> int:
    """Return how many IPUs are reserved for a model that needs so many, on all its replicas.

    Raises:
        Error: more than a process can have, not a power of two of hardware's IPUs, or options
            that the kind of device does not have.
    """
    if needed > _MOST:
        raise error(
            f"Too many IPUs requested ({needed}). Experiments that need more than {_MOST} IPUs "
            "require distributed execution. Use fewer replicas, or several processes."
        )
    offline = options.connection_type == enums.ConnectionType.Never
    model = uses_ipu_model(options)
    if options.exists("use_model"):
        shown = "Enabled" if model else "Disabled"
        logger.info("From the user configuration: Ipu model: %s", shown)
    if options._Popart.options.get("instrumentWithHardwareCycleCounter"):
        raise error(
            "Cycle count logging is only supported on actual IPU hardware. Leave out "
            "options.logCycleCount(True)."
        )
    if model:
        if offline:
            raise error(
                "The IPU Model can't be compiled for offline, got ConnectionType.Never. Leave out "
                "useIpuModel(True), or unset POPTORCH_IPU_MODEL."
            )
        if options._Popart.options.get("enableEngineCaching"):
            logger.warning("Nothing is cached for the IPU Model: enableExecutableCaching is unused")
        return needed
    if offline:
        if options.exists("ipu_id"):
            raise error(
                f"ConnectionType.Never takes no device, got useIpuId({options.ipu_id}) too. "
                "Leave one of them out."
            )
        return needed
    return _power_of_two(options, needed)


def _power_of_two(options: Options, needed: int) -> int:
    """Return the number of IPUs that hardware can reserve."""
    rounded = 1 << (needed - 1).bit_length()
    if rounded != needed:
        reason = "because PopTorch must reserve a power of 2 or maximum of 64 IPUs per process"
        if not options.auto_round_num_ipus:
            raise error(
                f"The model specifies the use of {needed} IPUs, however PopTorch must reserve a "
                f"minimum of {rounded} in order to allow the model to run, {reason}. Please "
                "reconfigure your model to use a different number of IPUs or set "
                "poptorch.Options().autoRoundNumIPUs(True)."
            )
        logger.warning(
            "Reserving %d IPUs for a model that uses %d, %s; %d stay unused",
            rounded,
            needed,
            reason,
            rounded - needed,
        )
    return rounded


# There are as many devices as are asked for: this engine computes on the host. What is exclusive
# on a system with IPUs is so here, so that a program that runs here runs there.
_allocations: Dict[int, DeviceAllocation] = {}
_changed = threading.Condition(threading.RLock())


class DeviceAllocation:
    """A device that belongs to one model.

    Attributes:
        device: its number; None where several models may use it at once.
    """

    def __init__(self, device: Optional[int]) -> None:
        self.device = device

    def release(self) -> None:
        """Give the device back; safe to call twice."""
        device, self.device = self.device, None
        if device is None:
            return
        with _changed:
            if _allocations.get(device) is self:
                del _allocations[device]
            _changed.notify_all()
        logger.debug("Detached from device %d", device)


def acquire(options: Options, ipus: int) -> DeviceAllocation:
    """Allocate the device of ``useIpuId``, or the first one that is free.

    Args:
        options: of the model; the IPU Model is nobody's own.
        ipus: how many IPUs it has.

    Raises:
        Error: another model of this process has it, and POPTORCH_WAIT_FOR_IPU is not set.
    """
    if uses_ipu_model(options) or options.connection_type == enums.ConnectionType.Never:
        return DeviceAllocation(None)
    wanted = options.ipu_id if options.exists("ipu_id") else None
    with _changed:
        if wanted is None:
            device = next(number for number in itertools.count() if number not in _allocations)
            logger.debug("Acquired %d IPU(s): running on device Id %d.", ipus, device)
        else:
            device = _wait_for(wanted)
            logger.debug("Acquired IPU device with id %d, running on device.", device)
        allocation = _allocations[device] = DeviceAllocation(device)
    logger.debug("Attached to device %d", device)
    return allocation


def _wait_for(device: int) -> int:
    """Wait until a device is free, if POPTORCH_WAIT_FOR_IPU says so."""
    if device in _allocations:
        # A model that nobody uses any more may not be gone yet.
        gc.collect()
    if device in _allocations and os.environ.get("POPTORCH_WAIT_FOR_IPU", "0") in ("", "0"):
        raise error(
            f"Failed to acquire device Id {device}: another model of this process is attached to "
            "it. Call detachFromDevice() or destroy() on that one, or leave out useIpuId."
        )
    while device in _allocations:
        logger.warning("Waiting for the device Id %d, which another model has", device)
        _changed.wait(60)
    return device


Entered = Sequence[Tuple[Hashable, Optional[int]]]


class PlacedBlock(NamedTuple):
    """One entry into a block.

    ``stage`` and ``phase`` are -1 where the strategy has none.
    """

    block: Hashable
    stage: int
    phase: int
    ipu: int


def place_on_ipus(
    options: Options, entered: Entered, training: bool, overlapped: bool = False
) -> int:
    """Place the blocks of a recording, and return how many IPUs are reserved for all replicas.

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
    pipelined = isinstance(strategy, execution.PipelinedExecution) and not isinstance(
        strategy, execution.ShardedExecution
    )
    blocks = placed_blocks(strategy, entered)
    for block in blocks:
        logger.debug(
            "block %s: stage %d, phase %d, IPU %d", block.block, block.stage, block.phase, block.ipu
        )
    if overlapped:
        _check_overlap(options, pipelined)
    # What comes before the first block is on IPU 0.
    per_replica = 1 + max((block.ipu for block in blocks), default=0)
    ipus = reserved(options, per_replica * options.replication_factor)
    if pipelined:
        _check_pipeline(options, _pipeline_stages(blocks, training), training)
    return ipus


def placed_blocks(strategy: execution._IExecutionStrategy, entered: Entered) -> List[PlacedBlock]:
    """Return each entry into a block with its stage, phase and IPU."""
    stages: Dict[Hashable, execution.Stage] = {}
    blocks = []
    for block, block_ipu in entered:
        stage = _stage(strategy, stages, block, block_ipu)
        # The strategy's word on the IPU comes before the block's.
        ipu = stage._ipu if stage._ipu is not None else block_ipu
        if ipu is None and not isinstance(strategy, execution._IPhasedExecution):
            ipu = stage._stage_id
        if ipu is None or ipu < 0:
            raise error(
                f"The block {block!r} has no IPU (got {ipu}). Name one, from 0: poptorch.Block("
                f"{block!r}, ipu_id=0), or strategy.stage({block!r}).ipu(0)."
            )
        if (
            isinstance(strategy, execution.ParallelPhasedExecution)
            and stage._phase_id % 2 != ipu % 2
        ):
            raise error(
                "When phases are executed in parallel, even phases need even IPUs and odd phases "
                f"odd ones: the block {block!r} is of phase {stage._phase_id} and on IPU {ipu}. "
                f"Use strategy.phase({stage._phase_id}).ipus(...)."
            )
        blocks.append(PlacedBlock(block, stage._stage_id, stage._phase_id, ipu))
    return blocks


def _stage(
    strategy: execution._IExecutionStrategy,
    generated_stages: Dict[Hashable, execution.Stage],
    block: Hashable,
    ipu: Optional[int],
) -> execution.Stage:
    """Return the stage of a block, and add those that the strategy generates to a dict."""
    named: Dict[Any, execution.Stage] = strategy._block_map
    if named:
        if block not in named:
            raise AssertionError(
                f"Unknown block {block!r}: the execution strategy names {list(named)}. Add "
                "it there, or leave the strategy's arguments out."
            )
        return named[block]
    if block in generated_stages:
        return generated_stages[block]
    assert isinstance(strategy, execution.PipelinedExecution)  # phases are always named
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
    generated_stages[block] = execution.Stage()._setStage(number)
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
