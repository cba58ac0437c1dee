"""What PopTorch options say of a run: read by their public names, from the SDK or the stand-in."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple

from ipufit.core.option_roles import INFERENCE
from ipufit.errors import ConfigurationError
from ipufit.partition.request import PartitionRequest
from ipufit.partition.strategy import kind_of
from ipufit.processes import current
from ipufit.utils.poptorch_types import sdk_kind

__all__ = ["WholeOptions"]

# OutputMode by its numbers; the last is PopTorch's default.
_OUTPUT_MODES = ("final", "every_n", "all", "sum", None)


@dataclasses.dataclass(frozen=True)
class WholeOptions:
    """``poptorch.Options`` that ``compile`` was given.

    Attributes:
        role: the argument.
        given: the user's own object, which stays as it is.
    """

    role: str
    given: Any

    @staticmethod
    def read(role: str, given: Any) -> Optional[WholeOptions]:
        """Options that can be used for a model; None for none.

        Raises:
            ConfigurationError: it is something else, or asks for what no program of ipufit does.
        """
        if given is None:
            return None
        if sdk_kind(given, ("Options",)) is None:
            raise ConfigurationError(
                f"{role} must be poptorch.Options or None, got {type(given).__module__}."
                f"{type(given).__qualname__}. Make them with poptorch.Options(), or with "
                "ipufit.poptorch.Options() where there is no SDK."
            )
        options = WholeOptions(role, given)
        options._refuse()
        return options

    def _refuse(self) -> None:
        faults = []
        if self.given.input_group_size != 1:
            faults.append(
                "inputReplicaGrouping gives several replicas the same input, but every replica of "
                "a Model has its own"
            )
        if self.is_inference and self.output_mode not in (None, "all"):
            faults.append(
                f"outputMode is {self.output_mode!r}, but evaluate and predict need all outputs"
            )
        if self.is_inference and self.given.Training.gradient_accumulation != 1:
            faults.append("Training.gradientAccumulation is set, but inference has no gradients")
        if faults:
            raise ConfigurationError(
                f"{self.role} can't be used: {'; '.join(faults)}. Leave these options as they are "
                "by default."
            )

    @property
    def is_inference(self) -> bool:
        """Whether these are for ``evaluate``, ``predict`` and validation."""
        return self.role == INFERENCE

    def work(self) -> Dict[str, Tuple[int, str]]:
        """By argument of ``fit``: the value that these options fix, and what says so.

        A value of 1 is PopTorch's default, and fixes nothing.
        """
        given = self.given
        rows = {
            "device_iterations": (given.device_iterations, "deviceIterations"),
            "gradient_accumulation": (
                given.Training.gradient_accumulation,
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
        count = int(self.given.replication_factor)
        return None if count == 1 else (count, f"{self.role}.replicationFactor")

    @property
    def seed(self) -> Optional[Tuple[int, str]]:
        """What ``randomSeed`` was given, and what says so; or None."""
        if not self.given.exists("random_seed"):
            return None
        return int(self.given.random_seed), f"{self.role}.randomSeed"

    @property
    def output_mode(self) -> Optional[str]:
        """``output_mode`` of ``compile``; None where it is PopTorch's default."""
        return _OUTPUT_MODES[int(self.given.output_mode)]

    @property
    def output_every(self) -> Optional[int]:
        """``output_every`` of ``compile``."""
        return int(self.given.output_return_period) if self.output_mode == "every_n" else None

    @property
    def gradient_reduction(self) -> Optional[str]:
        """``"sum"``, or None where it is PopTorch's default, the mean."""
        kind = self.given.Training.accumulation_and_replication_reduction_type
        return "sum" if kind.name == "Sum" else None

    @property
    def offloads_state(self) -> Optional[bool]:
        """Whether the optimizer's state is off the chip; None where nothing is said of it."""
        locations = self.given.TensorLocations.toDict()
        on_chip = locations.get("location_optimizer", {}).get("onChip")
        return None if on_chip is None else not on_chip

    @property
    def shards_state(self) -> Optional[bool]:
        """Whether replicas share the optimizer's state out; None where nobody says where it is."""
        location = self.given.TensorLocations.toDict().get("location_optimizer")
        return None if location is None else bool(location.get("useReplicatedTensorSharding"))

    @property
    def scales_loss(self) -> bool:
        """Whether the scale of the loss is to be chosen while training."""
        return bool(self.given._Popart.options.get("automaticLossScalingSettings.enabled"))

    @property
    def rounds_ipus(self) -> bool:
        """Whether IPUs may be rounded up to a power of two."""
        return bool(self.given.auto_round_num_ipus)

    @property
    def strategy(self) -> Any:
        """The execution strategy that was set; None where it is PopTorch's default."""
        strategy = self.given._execution_strategy
        # In the SDK an object of its own finds the stages.
        finder = getattr(strategy, "_stages_manager", strategy)
        if kind_of(strategy) != "pipelined" or strategy._block_map:
            return strategy
        return None if finder._auto_stage.name == "SameAsIpu" else strategy

    def with_strategy(
        self, asked: PartitionRequest, training: PartitionRequest
    ) -> PartitionRequest:
        """The request, with the execution strategy of these options where they have one.

        Args:
            asked: what divides the module for the same as these options.
            training: the same for training, which inference follows.

        Raises:
            ConfigurationError: both have one.
        """
        strategy = self.strategy
        if strategy is None:
            return asked
        if asked.strategy is not None:
            raise ConfigurationError(
                f"{asked.name('strategy')} and {self.role}.setExecutionStrategy both say how "
                "stages run. Leave one out."
            )
        both = (asked, training)
        divides = any(r.stages is not None or r.layers_per_ipu is not None for r in both)
        if not divides and all(r.ipus_per_replica is None for r in both):
            return asked  # nothing divides the module, or blocks of its own, which PopTorch counts
        if divides and not strategy._block_map:
            strategy = kind_of(strategy)
        return dataclasses.replace(asked, strategy=strategy)

    def refuse_other_processes(self) -> None:
        """Refuse options that are for another one of several processes than this.

        Raises:
            ConfigurationError: they are.
        """
        group, known = self.given.Distributed, current()
        said = (group.distributed_process_id, group.num_distributed_processes)
        if said[1] > 1 and said != (known.process_id, known.num_processes):
            raise ConfigurationError(
                f"{self.role} must be for this process, {known.process_id} of "
                f"{known.num_processes}, but are for {said[0]} of {said[1]}. Leave "
                "Distributed.configureProcessId out, and let torchrun or another launcher start "
                "the processes."
            )
