"""Reader of ``poptorch.Options``, by their public names, of the SDK or the stand-in."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Tuple

from ipufit.core import OutputMode, Shard
from ipufit.core.compile_arguments import INFERENCE
from ipufit.core.train_config import Outputs
from ipufit.engines.ipu.effects import EffectReport, setter_effects
from ipufit.engines.ipu_settings import IpuSettings, ModeSettings, Setting, Strategy, T
from ipufit.errors import ConfigurationError
from ipufit.partition.request import kind_of
from ipufit.processes import current
from ipufit.utils.poptorch_sdk import sdk_kind

# OutputMode by its numbers; the last is PopTorch's default.
_OUTPUT_MODES: Tuple[Optional[OutputMode], ...] = ("final", "every_n", "all", "sum", None)
_CHANGE = "Leave it out, or change the options."
_RECOMPILE = "Leave it out, or compile with other options."
_EITHER = "Leave one out."


def read_settings(
    training: Optional[PopTorchOptions], inference: Optional[PopTorchOptions]
) -> IpuSettings:
    """Read what the options of training and of inference fix of a run.

    Args:
        training, inference: the options, or None. What is of the whole run is read from the former.
    """
    first, second = (
        ModeSettings() if options is None else options.mode_settings()
        for options in (training, inference)
    )
    return IpuSettings(first, second) if training is None else training.settings(first, second)


@dataclasses.dataclass(frozen=True)
class PopTorchOptions:
    """``poptorch.Options`` that were passed to ``compile``.

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

    @property
    def output_mode(self) -> Optional[OutputMode]:
        """The mode of :class:`Outputs` that was set; None for PopTorch's default."""
        return _OUTPUT_MODES[int(self.options.output_mode)]

    def mode_settings(self) -> ModeSettings:
        """Read what is fixed of the mode that the options are for; defaults fix nothing."""
        options, strategy = self.options, self._strategy()
        seed = int(options.random_seed) if options.exists("random_seed") else None
        setter = f"{self.role}.setExecutionStrategy"
        return ModeSettings(
            replicas=self._count(options.replication_factor, "replicationFactor"),
            device_iterations=self._count(options.device_iterations, "deviceIterations"),
            gradient_accumulation=self._count(
                options.Training.gradient_accumulation, "Training.gradientAccumulation"
            ),
            seed=None if seed is None else Setting(seed, f"{self.role}.randomSeed", _RECOMPILE),
            strategy=None if strategy is None else Setting(strategy, setter, _EITHER),
        )

    def _count(self, value: int, setter: str) -> Optional[Setting[int]]:
        count = int(value)
        if count == 1:
            return None
        return Setting(count, f"{self.role}.{setter}", _RECOMPILE, f"which says {count}")

    def settings(self, training: ModeSettings, inference: ModeSettings) -> IpuSettings:
        """Read what the options fix of the whole run, beside what is fixed of both modes."""
        options = self.options
        reduction = options.Training.accumulation_and_replication_reduction_type
        location = options.TensorLocations.toDict().get("location_optimizer", {})
        on_chip, shards = location.get("onChip"), location.get("useReplicatedTensorSharding")
        place = f"{self.role}.TensorLocations.setOptimizerLocation"
        scale = Setting(
            "dynamic",
            f"{self.role}.Training.setAutomaticLossScaling",
            _EITHER,
            "which is on",
            fills=False,
        )
        scales = options._Popart.options.get("automaticLossScalingSettings.enabled")
        # Off IPUs, options share nothing out.
        part: Shard = "optimizer" if shards else "none"
        shard = Setting(part, place, _CHANGE, f"which says {bool(shards)}", False)
        return IpuSettings(
            training,
            inference,
            outputs=self._setting(self._outputs(), "outputMode"),
            gradient_reduction=self._setting(
                "sum" if reduction.name == "Sum" else None,
                "Training.accumulationAndReplicationReductionType",
            ),
            loss_scale=scale if scales else None,
            offload_optimizer=self._setting(
                None if on_chip is None else not on_chip, "TensorLocations.setOptimizerLocation"
            ),
            shard=shard if location else None,
            auto_round_ipus=self._setting(options.auto_round_num_ipus or None, "autoRoundNumIPUs"),
        )

    def _setting(self, value: Optional[T], setter: str) -> Optional[Setting[T]]:
        if value is None:
            return None
        return Setting(value, f"{self.role}.{setter}", _CHANGE, f"which says {value!r}")

    def _outputs(self) -> Optional[Outputs]:
        mode = self.output_mode
        if mode is None:
            return None
        return Outputs(mode, int(self.options.output_return_period) if mode == "every_n" else None)

    def _strategy(self) -> Optional[Strategy]:
        """The execution strategy that was set; None where it is PopTorch's default."""
        strategy: Any = self.options._execution_strategy
        # In the SDK an object of its own finds the stages.
        finder = getattr(strategy, "_stages_manager", strategy)
        is_set = kind_of(strategy) != "pipelined" or strategy._block_map
        return strategy if is_set or finder._auto_stage.name != "SameAsIpu" else None

    def effects(self, engine: str, is_divided: bool) -> EffectReport:
        """Report what the setters that were used do on an engine without such options.

        Args:
            engine: its name.
            is_divided: whether the module lies on several IPUs.
        """
        has_strategy = self._strategy() is not None
        effects = setter_effects(self.options, has_strategy, is_divided)
        return EffectReport(self.role, engine, effects)

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
