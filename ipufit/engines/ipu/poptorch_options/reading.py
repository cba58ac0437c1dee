"""Reader of ``poptorch.Options``, by their public names, of the SDK or the stand-in."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple

from ipufit.core.compile_arguments import INFERENCE
from ipufit.core.train_config import Outputs
from ipufit.errors import ConfigurationError
from ipufit.partition.request import PartitionRequest, kind_of
from ipufit.processes import current
from ipufit.utils.poptorch_sdk import sdk_kind

__all__ = ["PopTorchOptions"]

# OutputMode by its numbers; the last is PopTorch's default.
_OUTPUT_MODES = ("final", "every_n", "all", "sum", None)


@dataclasses.dataclass(frozen=True)
class PopTorchOptions:
    """``poptorch.Options`` that were passed to ``compile``, with the values that concern a run.

    Attributes:
        role: the argument.
        options: the user's object, which stays as it is.
    """

    role: str
    options: Any

    @staticmethod
    def read(role: str, options: object) -> Optional[PopTorchOptions]:
        """Make a reader of options; None for none.

        Raises:
            ConfigurationError: it is something else, or asks for what no program of ipufit does.
        """
        if options is None:
            return None
        if sdk_kind(options, ("Options",)) is None:
            raise ConfigurationError(
                f"{role} must be poptorch.Options or None, got {type(options).__module__}."
                f"{type(options).__qualname__}. Make them with poptorch.Options(), or with "
                "ipufit.poptorch.Options() where there is no SDK."
            )
        read = PopTorchOptions(role, options)
        read._refuse()
        return read

    def _refuse(self) -> None:
        faults = []
        if self.options.input_group_size != 1:
            faults.append(
                "inputReplicaGrouping gives several replicas the same input, but every replica of "
                "a Model has its own"
            )
        if self.is_inference and self.output_mode not in (None, "all"):
            faults.append(
                f"outputMode is {self.output_mode!r}, but evaluate and predict need all outputs"
            )
        if self.is_inference and self.options.Training.gradient_accumulation != 1:
            faults.append("Training.gradientAccumulation is set, but inference has no gradients")
        if faults:
            raise ConfigurationError(
                f"{self.role} can't be used: {'; '.join(faults)}. Leave these options as they are "
                "by default."
            )

    @property
    def is_inference(self) -> bool:
        """True if the options are for ``evaluate``, ``predict`` and validation."""
        return self.role == INFERENCE

    def work(self) -> Dict[str, Tuple[int, str]]:
        """Return values that the options fix, by argument of ``fit``, each with its setter.

        A value of 1 is PopTorch's default, and fixes nothing.
        """
        options = self.options
        rows = {
            "device_iterations": (options.device_iterations, "deviceIterations"),
            "gradient_accumulation": (
                options.Training.gradient_accumulation,
                "Training.gradientAccumulation",
            ),
        }
        return {
            name: (int(value), f"{self.role}.{setter}")
            for name, (value, setter) in rows.items()
            if value != 1
        }

    @property
    def replicas(self) -> Optional[Tuple[int, str]]:
        """Return the value of ``replicationFactor`` and its title; None for PopTorch's default."""
        count = int(self.options.replication_factor)
        return None if count == 1 else (count, f"{self.role}.replicationFactor")

    @property
    def seed(self) -> Optional[Tuple[int, str]]:
        """The value of ``randomSeed`` and its title; None if it was not set."""
        if not self.options.exists("random_seed"):
            return None
        return int(self.options.random_seed), f"{self.role}.randomSeed"

    @property
    def output_mode(self) -> Optional[str]:
        """The mode of :class:`Outputs` that was set; None for PopTorch's default."""
        return _OUTPUT_MODES[int(self.options.output_mode)]

    @property
    def outputs(self) -> Optional[Outputs]:
        """The value of ``outputs`` for ``compile``; None for PopTorch's default."""
        mode = self.output_mode
        if mode is None:
            return None
        return Outputs(mode, int(self.options.output_return_period) if mode == "every_n" else None)

    @property
    def gradient_reduction(self) -> Optional[str]:
        """``"sum"``, or None where it is PopTorch's default, the mean."""
        kind = self.options.Training.accumulation_and_replication_reduction_type
        return "sum" if kind.name == "Sum" else None

    @property
    def offloads_state(self) -> Optional[bool]:
        """True if the optimizer's state lies off the chip; None if that was not set."""
        locations = self.options.TensorLocations.toDict()
        on_chip = locations.get("location_optimizer", {}).get("onChip")
        return None if on_chip is None else not on_chip

    @property
    def shards_state(self) -> Optional[bool]:
        """True if replicas share the optimizer's state out; None if that was not set."""
        location = self.options.TensorLocations.toDict().get("location_optimizer")
        return None if location is None else bool(location.get("useReplicatedTensorSharding"))

    @property
    def scales_loss(self) -> bool:
        """True if the loss scale is chosen while training."""
        return bool(self.options._Popart.options.get("automaticLossScalingSettings.enabled"))

    @property
    def rounds_ipus(self) -> bool:
        """True if IPUs may be rounded up to a power of two."""
        return bool(self.options.auto_round_num_ipus)

    @property
    def strategy(self) -> Any:
        """The execution strategy that was set; None where it is PopTorch's default."""
        strategy = self.options._execution_strategy
        # In the SDK an object of its own finds the stages.
        finder = getattr(strategy, "_stages_manager", strategy)
        if kind_of(strategy) != "pipelined" or strategy._block_map:
            return strategy
        return None if finder._auto_stage.name == "SameAsIpu" else strategy

    def with_strategy(
        self, request: PartitionRequest, training: PartitionRequest
    ) -> PartitionRequest:
        """Add the execution strategy of these options to a request, if they have one.

        Args:
            request: the division of the module for the mode of these options.
            training: the division for training, which inference follows.

        Raises:
            ConfigurationError: both have one.
        """
        strategy = self.strategy
        if strategy is None:
            return request
        if request.strategy is not None:
            raise ConfigurationError(
                f"{request.name('strategy')} and {self.role}.setExecutionStrategy both say how "
                "stages run. Leave one out."
            )
        both = (request, training)
        divides = any(r.stages is not None or r.layers_per_ipu is not None for r in both)
        if not divides and all(r.ipus_per_replica is None for r in both):
            return (
                request  # nothing divides the module, or blocks of its own, which PopTorch counts
            )
        if divides and not strategy._block_map:
            strategy = kind_of(strategy)
        return dataclasses.replace(request, strategy=strategy)

    def refuse_other_processes(self) -> None:
        """Refuse options that are for another one of several processes than this.

        Raises:
            ConfigurationError: they are.
        """
        group, processes = self.options.Distributed, current()
        place = (group.distributed_process_id, group.num_distributed_processes)
        if place[1] > 1 and place != (processes.process_id, processes.num_processes):
            raise ConfigurationError(
                f"{self.role} must be for this process, {processes.process_id} of "
                f"{processes.num_processes}, but are for {place[0]} of {place[1]}. Leave "
                "Distributed.configureProcessId out, and let torchrun or another launcher start "
                "the processes."
            )
