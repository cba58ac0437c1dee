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
        role = self.training.role
        for name, value, setter in (
            ("output_mode", self.training.output_mode, "outputMode"),
            ("output_every", self.training.output_every, "outputMode"),
            (
                "gradient_reduction",
                self.training.gradient_reduction,
                "Training.accumulationAndReplicationReductionType",
            ),
            (
                "offload_optimizer_state",
                self.training.offloads_state,
                "TensorLocations.setOptimizerLocation",
            ),
            ("auto_round_ipus", self.training.rounds_ipus or None, "autoRoundNumIPUs"),
        ):
            with faults.collect():
                arguments = _set_argument(arguments, name, value, f"{role}.{setter}")
        with faults.collect():
            # Off IPUs, options share nothing out.
            setter = f"{role}.TensorLocations.setOptimizerLocation"
            _set_argument(arguments, "shard_optimizer", self.training.shards_state, setter)
        with faults.collect():
            if self.training.scales_loss and arguments.loss_scale not in (None, "dynamic"):
                raise ConfigurationError(
                    f"loss_scale must agree with {role}.Training.setAutomaticLossScaling, which is "
                    f"on, got {arguments.loss_scale!r}. Leave one out."
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


def _set_argument(arguments: Any, name: str, value: Any, by: str) -> Any:
    """Set an argument that the options fix, unless another value was passed."""
    if value is None:
        return arguments
    passed = getattr(arguments, name)
    if passed not in (None, value):
        raise ConfigurationError(
            f"{name} must agree with {by}, which says {value!r}, got {passed!r}. Leave it out, or "
            "change the options."
        )
    return dataclasses.replace(arguments, **{name: value})
