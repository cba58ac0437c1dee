"""PopTorch's options for a program, from its plan and from what the user hands over.

They hold the partition as blocks inside forward and a strategy, the profile that PopVision's Graph
Analyser opens, and the place of this process among several. Under PopRun they come from
``popdist.poptorch.Options(ipus_per_replica=...)``, which sets replicas, processes and device by
itself and refuses ``replicationFactor``, ``useIpuId`` and all setters of ``Distributed``
(``tests/popdist_test.py`` of PopTorch 3.4). Whether PopRun has started this process says
``popdist.isPopdistEnvSet()`` (PopDist's Python API reference).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from types import ModuleType
from typing import Any, Dict, List, Optional

from ipufit.core.batch import Mode
from ipufit.core.compile_arguments import TRAINING, role_of
from ipufit.engines.ipu.sdk import is_standin
from ipufit.engines.ipu.size import Size
from ipufit.engines.program import ProgramSpec
from ipufit.errors import ConfigurationError
from ipufit.partition.own_blocks import OwnBlocks
from ipufit.partition.partition import BLOCK, Partition
from ipufit.utils.console import warn_user
from ipufit.utils.random_streams import update_key


def new_options(sdk: ModuleType, ipus_per_replica: int) -> Any:
    """PopTorch's options for this process, with PopRun's settings where PopRun has started it."""
    popdist = _popdist(sdk)
    return sdk.Options() if popdist is None else popdist.Options(ipus_per_replica=ipus_per_replica)


def set_replicas(sdk: ModuleType, options: Any, replicas: int, spec: ProgramSpec) -> None:
    """Say how many replicas this process has, and which of all it is.

    Args:
        sdk: PopTorch.
        options: PopTorch's, which are changed.
        replicas: of this process.
        spec: what is built.

    Raises:
        ConfigurationError: the options, or PopRun, say something else.
    """
    popdist = _popdist(sdk)
    if popdist is not None:
        _check_popdist(sdk, popdist, options, replicas, spec)
        return
    options.replicationFactor(replicas)
    group, processes = options.Distributed, spec.processes
    configured = (group.processId, group.numProcesses)
    actual = (processes.process_id, processes.num_processes)
    if configured == actual:
        return
    # Those of OpenMPI's environment came by themselves, and ipufit.distributed may know better.
    fresh = sdk.Options().Distributed
    if configured[1] > 1 and configured != (fresh.processId, fresh.numProcesses):
        raise ConfigurationError(
            f"{role_of(spec.mode)} must be for process {actual[0]} of {actual[1]}, which ipufit "
            f"found, but they are for process {configured[0]} of {configured[1]}. Leave "
            "Distributed.configureProcessId out, and start the processes with torchrun, mpirun or "
            "PopRun, or call ipufit.distributed."
        )
    if processes.is_distributed:
        group.configureProcessId(processes.process_id, processes.num_processes)
    else:
        group.disable()


def _check_popdist(
    sdk: ModuleType, popdist: ModuleType, options: Any, replicas: int, spec: ProgramSpec
) -> None:
    stages, processes = spec.plan.stages, spec.processes
    if not isinstance(options, popdist.Options):
        raise ConfigurationError(
            f"{role_of(spec.mode)} must be popdist.poptorch.Options in a process that PopRun has "
            f"started, got {sdk.__name__}.Options. Make them with "
            f"popdist.poptorch.Options(ipus_per_replica={stages}), or leave them out."
        )
    group = options.Distributed
    configured = (group.processId, group.numProcesses)
    actual = (processes.process_id, processes.num_processes)
    if configured != actual:
        raise ConfigurationError(
            "PopRun and ipufit must agree on the processes, but for PopRun this is process "
            f"{configured[0]} of {configured[1]}, and for ipufit {actual[0]} of {actual[1]}. Leave "
            "ipufit.distributed out, and start the processes with PopRun alone."
        )
    if options.replication_factor != replicas:
        count = options.replication_factor
        raise ConfigurationError(
            f"`ipus` must be those of the replicas that PopRun gives each process, {count} x "
            f"{stages} = {count * stages}, got {replicas * stages}. Pass ipus={count * stages}, or "
            f"start poprun with --num-replicas={replicas * processes.num_processes}."
        )


def fixes_replicas(sdk: ModuleType) -> bool:
    """Tell whether all programs of this process have the replicas that PopRun says."""
    return _popdist(sdk) is not None


def _popdist(sdk: ModuleType) -> Optional[ModuleType]:
    """The module ``popdist.poptorch`` where PopRun has started this process, for this PopTorch."""
    try:
        package = importlib.import_module("popdist")
    except ImportError:
        return None
    if not package.isPopdistEnvSet():
        return None
    popdist = importlib.import_module("popdist.poptorch")
    # The stand-in has options of its own, with which PopDist does nothing.
    return popdist if issubclass(popdist.Options, sdk.Options) else None


def block_of(stage: int) -> str:
    """The name of a stage's block."""
    return f"{BLOCK}stage {stage}"


def begin_loss(sdk: ModuleType, partition: Optional[Partition], user_blocks: OwnBlocks) -> None:
    """Let the loss be where the module ends, which may have left its last block.

    Where blocks don't tell which they are, it is the last IPU; but a strategy of PopTorch's own
    form that names all blocks would not know another one.
    """
    if is_standin(sdk):
        user_blocks.reopen(sdk)
    elif partition is not None and not partition.begins and partition.poptorch_strategy is None:
        sdk.Block.start(f"{BLOCK}loss", ipu_id=partition.ipus - 1)


def place(sdk: ModuleType, options: Any, partition: Partition, size: Size, training: bool) -> None:
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


def _sharded(sdk: ModuleType, pipeline: Any) -> Any:
    """The stages of a pipeline, one after the other."""
    named = {} if pipeline is None else pipeline._block_map
    if named:
        return sdk.ShardedExecution(*dict.fromkeys(named.values()))
    # Counting on from the IPUs that blocks name, it needs no IPU on every one.
    return sdk.ShardedExecution(sdk.AutoStage.AutoIncrement)


def _strategy(sdk: ModuleType, partition: Partition) -> Any:
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
    return kind(*(sdk.Phase(sdk.Stage(block_of(p)).ipu(partition.ipu_of(p))) for p in phases))


_VARIABLE = "POPLAR_ENGINE_OPTIONS"
_PREFIX = "autoReport."
_DIRECTORY = "autoReport.directory"
# How many runs of a program its profile has; neither whether there is one nor where.
_RUNS = "autoReport.executionProfileProgramRunCount"


def set_profile(options: Any, spec: ProgramSpec, size: Size) -> None:
    """Have the profile of a program written, where that is asked for.

    What the user's own options or environment say of a profile holds as a whole. How many runs it
    has is beside that.

    Args:
        options: of the program; changed.
        spec: what is built.
        size: of one call. The programs of smaller updates have folders of their own.
    """
    if spec.profile_folder is not None and not _profile_settings(options):
        options.enableProfiling(os.path.join(_folder(spec), *_beside(spec, size)))


def place_of_profile(sdk: ModuleType, spec: ProgramSpec) -> Optional[str]:
    """The folder that the profile is written to; None where none is.

    Args:
        sdk: PopTorch, of which the stand-in writes none.
        spec: what is built.

    Warns:
        UserWarning: it is another one than was asked for.
    """
    if spec.profile_folder is None:
        return None
    profile_settings, requested = _profile_settings(spec.options), _folder(spec)
    if not profile_settings:
        return None if is_standin(sdk) else requested
    who = _VARIABLE if _profile_settings(None) else TRAINING
    writes = any(value == "true" for name, value in profile_settings.items() if name != _DIRECTORY)
    place = os.path.abspath(profile_settings.get(_DIRECTORY, "."))
    if place != requested or not writes:
        what = f"is written to {place!r}" if writes else "is not written"
        warn_user(
            f"report asks for PopVision's profile in {requested!r}, but {who} sets "
            f"{', '.join(sorted(profile_settings))}, which takes precedence: the profile {what}.",
        )
    return place if writes and not is_standin(sdk) else None


def _folder(spec: ProgramSpec) -> str:
    """The folder of this process: all run the same program, and each writes what it sees."""
    assert spec.profile_folder is not None
    process = spec.processes.process_id
    return os.path.join(spec.profile_folder, *([f"process-{process}"] if process else []))


def _beside(spec: ProgramSpec, size: Size) -> List[str]:
    """The folder within that one of a program that is not the main one."""
    main, schedule = Size.of(spec.plan), spec.config.schedule
    if schedule is not None and schedule.per_update:
        main = dataclasses.replace(main, iterations=1)
    if size == main:
        return []
    numbers = (size.iterations, size.accumulation, size.replicas, size.micro_batch)
    return ["x".join(map(str, numbers)) + ("" if size.padding == "none" else "-padded")]


def _profile_settings(options: object) -> Dict[str, str]:
    """The user's settings of a profile: the environment comes first, as for Poplar itself."""
    popart = getattr(options, "_Popart", None)
    engine = getattr(popart, "options", {}).get("engineOptions", {})
    settings = {**engine, **_environment()}
    names = [name for name in settings if name.startswith(_PREFIX) and name != _RUNS]
    return {name: str(settings[name]) for name in names}


def _environment() -> Dict[str, object]:
    try:
        settings = json.loads(os.environ.get(_VARIABLE) or "{}")
    except ValueError:
        # Poplar says so itself.
        return {}
    return settings if isinstance(settings, dict) else {}


def check_options(sdk: ModuleType, options: Any, role: str) -> None:
    """Make sure that these are options of this PopTorch.

    Raises:
        ConfigurationError: they are something else, or ask for a program that can't be run.
    """
    if options is None:
        return
    if not isinstance(options, sdk.Options):
        raise ConfigurationError(
            f"{role} must be {sdk.__name__}.Options or None, got {type(options).__module__}."
            f"{type(options).__qualname__}. Make them with {sdk.__name__}.Options()."
        )
    if options.connection_type == sdk.ConnectionType.Never.value:
        raise ConfigurationError(
            f"{role} must be for a device, but connectionType(ConnectionType.Never) compiles "
            "without one. Leave it out."
        )


def seed_of(spec: ProgramSpec, updates: int) -> int:
    """Return the seed of a device after so many updates, or passes of inference.

    It is set before every call, and so they depend on nothing that ran before.
    """
    return update_key(spec.seed, spec.domain, updates)


def make_options(sdk: ModuleType, spec: ProgramSpec, size: Size) -> Any:
    """Options of a program of this size; the user's own object stays as it is.

    Args:
        sdk: PopTorch.
        spec: what is built.
        size: of one call.
    """
    options: Any = spec.options
    if options is not None:
        options = options.clone()
    else:
        # PopTorch's bar would be drawn into logs, and whatever verbose says.
        options = new_options(sdk, spec.plan.stages).showCompilationProgressBar(False)
    training = spec.mode is Mode.TRAIN
    options.deviceIterations(size.iterations)
    set_replicas(sdk, options, size.replicas, spec)
    options.outputMode(sdk.OutputMode.All)
    if training:
        options.Training.gradientAccumulation(size.accumulation)
        kind = sdk.ReductionType.Sum
        if spec.config.gradient_reduction == "mean":
            kind = sdk.ReductionType.Mean
        options.Training.accumulationAndReplicationReductionType(kind)
        _offload(sdk, options, spec)
        set_profile(options, spec, size)
    if spec.plan.idle_ipus:
        options.autoRoundNumIPUs(True)
    if spec.partition is not None:
        place(sdk, options, spec.partition, size, training)
    if size.replicas * spec.processes.num_processes > 1:
        # Each replica has running statistics of its own.
        options.broadcastBuffers(False)
    return options


def _offload(sdk: ModuleType, options: Any, spec: ProgramSpec) -> None:
    """Let the optimizer's state be beside the chip, or in parts, and the weights in parts.

    What the options say of either holds.
    """
    config, locations = spec.config, options.TensorLocations
    shares = spec.plan.all_replicas > 1
    requested = (
        (
            "Optimizer",
            config.offload_optimizer_state,
            config.shard_optimizer and shares,
        ),
        ("Weight", False, config.shard_weights and shares),
    )
    configured = locations.toDict()
    for what, offloads, shards in requested:
        if (offloads or shards) and f"location_{what.lower()}" not in configured:
            location = sdk.TensorLocationSettings()
            if offloads:
                location.useOnChipStorage(False)
            if shards:
                location.useReplicatedTensorSharding(True)
            getattr(locations, f"set{what}Location")(location)
