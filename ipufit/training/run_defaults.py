"""Arguments of ``fit``, ``evaluate`` and ``predict`` that ``compile`` has fixed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Sequence, Set, Tuple

from ipufit.errors import ConfigurationError, PlanError
from ipufit.partition.partition import Partition

if TYPE_CHECKING:
    from ipufit.engines.ipu.ipu_config import IPUConfig
    from ipufit.engines.ipu.poptorch_options.reading import PopTorchOptions

__all__ = ["RunDefaults"]

# A value, and what says so.
Fixed = Tuple[int, str]

# What holds where neither an argument nor a configuration says anything.
_DEFAULTS: Dict[str, Optional[int]] = {
    "ipus": None,
    "device_iterations": 1,
    "gradient_accumulation": 1,
}


@dataclasses.dataclass(frozen=True)
class RunDefaults:
    """Arguments of ``fit``, ``evaluate`` and ``predict`` that ``compile`` has fixed.

    Attributes:
        training, inference: by argument, its value and what says so; both empty if nothing does.
        replicas: by whether it is training, a number of replicas and what says so; "ipus" then
            follows from the IPUs of a replica.
        seed, inference_seed: the same of seeds, each a pair, or None.
        other: what to compile with to change them, for errors.
        said: sentences for ``explain``.
    """

    training: Mapping[str, Fixed] = dataclasses.field(default_factory=dict)
    inference: Mapping[str, Fixed] = dataclasses.field(default_factory=dict)
    replicas: Mapping[bool, Fixed] = dataclasses.field(default_factory=dict)
    seed: Optional[Fixed] = None
    inference_seed: Optional[Fixed] = None
    other: str = ""
    said: Tuple[str, ...] = ()

    @staticmethod
    def of(config: IPUConfig) -> RunDefaults:
        """Return the defaults that an IPUConfig fixes."""
        training = {
            **_work(config, ""),
            "gradient_accumulation": (
                config.gradient_accumulation_steps,
                "IPUConfig.gradient_accumulation_steps",
            ),
        }
        seed = None if config.seed is None else (config.seed, "IPUConfig.seed")
        sentence = f"Work, seed and options are those of {config!r}."
        inference = _work(config, "inference_")
        return RunDefaults(training, inference, {}, seed, None, "another config", (sentence,))

    @staticmethod
    def of_options(
        training: Optional[PopTorchOptions],
        inference: Optional[PopTorchOptions],
        said: Sequence[str],
    ) -> RunDefaults:
        """Return the defaults that whole PopTorch options fix.

        Args:
            training, inference: the options, or None.
            said: sentences for ``explain``.
        """
        pair = (training, inference)
        work = [{} if options is None else options.work() for options in pair]
        replicas = [options is not None and options.replicas for options in pair]
        one, other = (None if options is None else options.seed for options in pair)
        return RunDefaults(
            work[0],
            work[1],
            {is_training: each for is_training, each in zip((True, False), replicas) if each},
            one,
            other,
            "other options",
            tuple(said),
        )

    def names(self, is_training: bool) -> Set[str]:
        """Names of the arguments that are fixed in a mode."""
        fixed = self.training if is_training else self.inference
        return {*fixed, *(["ipus"] if is_training in self.replicas else [])}

    def resolve(
        self, is_training: bool, partition: Optional[Partition], **arguments: Any
    ) -> Dict[str, Any]:
        """The arguments with values of the configuration where they are None.

        Args:
            is_training: which of both counts.
            partition: of the module over the IPUs of a replica.
            arguments: "ipus", "device_iterations" and "gradient_accumulation", as the user
                has them.

        Raises:
            PlanError: an argument disagrees with the configuration; with all that do.
        """
        fixed = dict(self.training if is_training else self.inference)
        if is_training in self.replicas:
            count, source = self.replicas[is_training]
            ipus = 1 if partition is None else partition.ipus
            source += f" x {ipus} IPUs of a replica" if ipus > 1 else ""
            fixed["ipus"] = (count * ipus, source)
        resolved: Dict[str, Any] = {}
        faults = []
        for name, value in arguments.items():
            there, source = fixed.get(name, (_DEFAULTS[name], ""))
            resolved[name] = there if value is None else value
            if source and value is not None and value != there:
                faults.append(
                    f"`{name}` must agree with {source}, which says {there}, got {value!r}. Leave "
                    f"it out, or compile with {self.other}."
                )
                resolved[name] = there
        if faults:
            raise PlanError(faults, {name: resolved[name] for name in fixed if name in resolved})
        return resolved

    def seed_or(self, seed: Optional[int], is_training: bool = True) -> Optional[int]:
        """The seed that was asked for, else the one that ``compile`` has fixed.

        Raises:
            ConfigurationError: they disagree.
        """
        fixed = self.seed if is_training else self.inference_seed
        if fixed is None:
            return seed
        value, source = fixed
        if seed not in (None, value):
            raise ConfigurationError(
                f"seed must agree with {source}, which is {value}, got {seed}. Leave it out, or "
                f"compile with {self.other}."
            )
        return value


def _work(config: IPUConfig, prefix: str) -> Dict[str, Fixed]:
    replicas = getattr(config, f"{prefix}replication_factor")
    ipus = getattr(config, f"{prefix}ipus_per_replica")
    product = f"IPUConfig.{prefix}replication_factor x {prefix}ipus_per_replica"
    name = f"{prefix}device_iterations"
    return {
        "ipus": (replicas * ipus, product),
        "device_iterations": (getattr(config, name), f"IPUConfig.{name}"),
    }
