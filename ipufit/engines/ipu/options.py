"""PopTorch's options for a program, from its plan and from what the user hands over."""

from __future__ import annotations

from typing import Any

from ipufit.core.batch import Mode
from ipufit.core.compile_arguments import role_of
from ipufit.engines.ipu.blocks import place
from ipufit.engines.ipu.distributed_options import new_options, set_replicas
from ipufit.engines.ipu.profiling import set_profile
from ipufit.engines.ipu.size import Size
from ipufit.engines.program import ProgramSpec
from ipufit.errors import ConfigurationError
from ipufit.utils.random_streams import update_key

__all__ = ["check_options", "make_options", "seed_of"]


def check_options(sdk: Any, options: Any, role: str) -> None:
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
            "without one, for later. Leave it out."
        )


def seed_of(spec: ProgramSpec, updates: int) -> int:
    """Return the seed of a device after so many updates, or passes of inference.

    It is set before every call, and so they depend on nothing that ran before.
    """
    return update_key(spec.seed, spec.domain, updates)


def make_options(sdk: Any, given: Any, spec: ProgramSpec, size: Size) -> Any:
    """Options of a program of this size; the user's own object stays as it is.

    Args:
        sdk: PopTorch.
        given: ``poptorch.Options`` or None.
        spec: what is built.
        size: of one call.
    """
    if given is not None:
        options = given.clone()
    else:
        # PopTorch's bar would be drawn into logs, and whatever verbose says.
        options = new_options(sdk, spec.plan.stages).showCompilationProgressBar(False)
    training = spec.mode is Mode.TRAIN
    options.deviceIterations(size.iterations)
    given_to = (spec.plan.stages, spec.processes, role_of(spec.mode))
    set_replicas(sdk, options, size.replicas, *given_to)
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


def _offload(sdk: Any, options: Any, spec: ProgramSpec) -> None:
    """Let the optimizer's state be beside the chip, or in parts, and the weights in parts.

    What the options say of either holds.
    """
    config, locations = spec.config, options.TensorLocations
    shares = spec.plan.all_replicas > 1
    asked = (
        (
            "Optimizer",
            config.offload_optimizer_state,
            config.shard_optimizer and shares,
        ),
        ("Weight", False, config.shard_weights and shares),
    )
    known = locations.toDict()
    for what, offloads, shards in asked:
        if (offloads or shards) and f"location_{what.lower()}" not in known:
            location = sdk.TensorLocationSettings()
            if offloads:
                location.useOnChipStorage(False)
            if shards:
                location.useReplicatedTensorSharding(True)
            getattr(locations, f"set{what}Location")(location)
