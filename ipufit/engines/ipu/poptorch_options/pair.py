"""Options for training and for inference together, merged into the arguments of ``compile``."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Tuple

from ipufit.core.compile_arguments import INFERENCE, TRAINING
from ipufit.core.train_config import LossScale, TrainConfig
from ipufit.engines.ipu.poptorch_options.reading import PopTorchOptions
from ipufit.engines.ipu.poptorch_options.report import SetterEffects, setter_effects
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError
from ipufit.partition.partition import Partitions
from ipufit.utils.error_collector import ErrorCollector

__all__ = ["OptionPair"]


@dataclasses.dataclass(frozen=True)
class OptionPair:
    """The two options that were passed to ``compile``.

    Attributes:
        training, inference: None where there are none.
    """

    training: Optional[PopTorchOptions] = None
    inference: Optional[PopTorchOptions] = None

    @staticmethod
    def read(arguments: object, faults: ErrorCollector) -> OptionPair:
        """Read the options among the arguments of ``compile``; faults are collected."""
        by_role = {}
        for role in (TRAINING, INFERENCE):
            with faults.collect():
                by_role[role] = PopTorchOptions.read(role, getattr(arguments, role))
        return OptionPair(by_role.get(TRAINING), by_role.get(INFERENCE))

    @property
    def present(self) -> List[PopTorchOptions]:
        """The options that were passed, training first."""
        return [options for options in (self.training, self.inference) if options is not None]

    def merged(self, arguments: Any, faults: ErrorCollector) -> Any:
        """Fill the arguments of ``compile`` from the options; conflicts are collected."""
        for options in self.present:
            name = "inference_partition" if options.is_inference else "partition"
            with faults.collect():
                divided = options.with_strategy(getattr(arguments, name), arguments.partition)
                arguments = dataclasses.replace(arguments, **{name: divided})
        if self.training is None:
            return arguments
        training, role = self.training, self.training.role
        for title, group, name, value, setter in (
            ("outputs", "", "outputs", training.outputs, "outputMode"),
            (
                "Reduction.gradients",
                "reduction",
                "gradients",
                training.gradient_reduction,
                "Training.accumulationAndReplicationReductionType",
            ),
            (
                "Memory.offload_optimizer",
                "memory",
                "offload_optimizer",
                training.offloads_state,
                "TensorLocations.setOptimizerLocation",
            ),
            (
                "Parallel.auto_round_ipus",
                "",
                "auto_round_ipus",
                training.rounds_ipus or None,
                "autoRoundNumIPUs",
            ),
        ):
            owner = getattr(arguments, group) if group else arguments
            passed = getattr(owner, name)
            if value is None:
                continue
            with faults.collect():
                if passed not in (None, value):
                    raise _disagrees(title, passed, value, f"{role}.{setter}")
                owner = dataclasses.replace(owner, **{name: value})
                arguments = dataclasses.replace(arguments, **{group: owner}) if group else owner
        with faults.collect():
            # Off IPUs, options share nothing out.
            passed, shares = arguments.memory.shard_optimizer, training.shards_state
            if None not in (passed, shares) and passed != shares:
                setter = f"{role}.TensorLocations.setOptimizerLocation"
                raise _disagrees("Memory.shard", arguments.memory.shard, shares, setter)
        with faults.collect():
            scale = arguments.precision.loss_scale
            if training.scales_loss and scale not in (None, "dynamic"):
                raise ConfigurationError(
                    f"Precision.loss_scale must agree with {role}.Training."
                    f"setAutomaticLossScaling, which is on, got {scale!r}. Leave one out."
                )
        return arguments

    def applied(
        self, engine: Engine, config: TrainConfig, partitions: Partitions
    ) -> Tuple[TrainConfig, List[str], List[str]]:
        """Apply the options on an engine that takes none, and report their effects.

        Returns:
            the TrainConfig, texts to print, and sentences for ``explain``.

        Raises:
            ConfigurationError: it would be another run without them.
        """
        if engine.takes_options:
            return config, [], []
        effects: List[SetterEffects] = []
        for options in self.present:
            options.refuse_other_processes()
            is_divided = partitions.of(not options.is_inference) is not None
            effects.append(setter_effects(options, is_divided))
        if self.training is not None and self.training.scales_loss and config.loss_scale is None:
            config = dataclasses.replace(config, loss_scale=LossScale())
        printed = [text for text in (rows.text(engine.name) for rows in effects) if text]
        sentences = [
            f"Of {rows.role}, these change nothing on {engine.name}: {', '.join(rows.none)}."
            for rows in effects
            if rows.none
        ]
        return config, printed, sentences


def _disagrees(title: str, passed: Any, value: Any, by: str) -> ConfigurationError:
    return ConfigurationError(
        f"{title} must agree with {by}, which says {value!r}, got {passed!r}. Leave it out, or "
        "change the options."
    )
