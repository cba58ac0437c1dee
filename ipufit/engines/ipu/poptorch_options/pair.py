"""Options for training and for inference together: what ``compile`` makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Tuple

from ipufit.core.option_roles import INFERENCE, TRAINING
from ipufit.core.train_config import LossScale, TrainConfig
from ipufit.engines.ipu.poptorch_options.reading import WholeOptions
from ipufit.engines.ipu.poptorch_options.report import Lists, lists
from ipufit.errors import ConfigurationError
from ipufit.partition.partition import Partitions
from ipufit.utils.error_collector import Faults

__all__ = ["OptionPair"]


@dataclasses.dataclass(frozen=True)
class OptionPair:
    """What ``compile`` was given.

    Attributes:
        training, inference: None where there are none.
    """

    training: Optional[WholeOptions] = None
    inference: Optional[WholeOptions] = None

    @staticmethod
    def read(asked: Any, faults: Faults) -> OptionPair:
        """The options among the arguments of ``compile``; faults are noted."""
        found = {}
        for role in (TRAINING, INFERENCE):
            with faults.collected():
                found[role] = WholeOptions.read(role, getattr(asked, role))
        return OptionPair(found.get(TRAINING), found.get(INFERENCE))

    @property
    def given(self) -> List[WholeOptions]:
        """Those that there are."""
        return [options for options in (self.training, self.inference) if options is not None]

    def merged(self, asked: Any, faults: Faults) -> Any:
        """The arguments of ``compile``, with what the options say of them; conflicts are noted."""
        for options in self.given:
            name = "inference_partition" if options.is_inference else "partition"
            with faults.collected():
                divided = options.with_strategy(getattr(asked, name), asked.partition)
                asked = dataclasses.replace(asked, **{name: divided})
        if self.training is None:
            return asked
        role = self.training.role
        for name, said, setter in (
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
            with faults.collected():
                asked = _agreed(asked, name, said, f"{role}.{setter}")
        with faults.collected():
            # Off IPUs, options share nothing out.
            setter = f"{role}.TensorLocations.setOptimizerLocation"
            _agreed(asked, "shard_optimizer", self.training.shards_state, setter)
        with faults.collected():
            if self.training.scales_loss and asked.loss_scale not in (None, "dynamic"):
                raise ConfigurationError(
                    f"loss_scale must agree with {role}.Training.setAutomaticLossScaling, which is "
                    f"on, got {asked.loss_scale!r}. Leave one out."
                )
        return asked

    def applied(
        self, engine: Any, config: TrainConfig, partitions: Partitions
    ) -> Tuple[TrainConfig, List[str], List[str]]:
        """On an engine without options of its own: what stands for them, and what is said of it.

        Returns:
            the TrainConfig, texts to print, and sentences for ``explain``.

        Raises:
            ConfigurationError: it would be another run without them.
        """
        if getattr(engine, "takes_options", False):
            return config, [], []
        name = getattr(engine, "name", "given")
        found: List[Lists] = []
        for options in self.given:
            options.refuse_other_processes()
            is_divided = partitions.of(not options.is_inference) is not None
            found.append(lists(options, is_divided))
        if self.training is not None and self.training.scales_loss and config.loss_scale is None:
            config = dataclasses.replace(config, loss_scale=LossScale())
        printed = [rows.text(name) for rows in found if rows.text(name)]
        said = [
            f"Of {rows.role}, these change nothing on {name}: {', '.join(rows.none)}."
            for rows in found
            if rows.none
        ]
        return config, printed, said


def _agreed(asked: Any, name: str, said: Any, by: str) -> Any:
    """The arguments with this value, unless one disagrees."""
    if said is None:
        return asked
    value = getattr(asked, name)
    if value not in (None, said):
        raise ConfigurationError(
            f"{name} must agree with {by}, which says {said!r}, got {value!r}. Leave it out, or "
            "change the options."
        )
    return dataclasses.replace(asked, **{name: said})
