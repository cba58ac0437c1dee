"""Settings of a run that an IPUConfig or PopTorch's options fix beside the arguments, in one form.

There are three readers: ``CompileConfig`` reads the arguments of ``compile``, which are
:class:`IpuArguments` among others; ``engines/ipu/ipu_config`` reads an IPUConfig, and
``engines/ipu/poptorch_options`` the options, into :class:`IpuSettings`.
``training/merge_settings`` merges them and names what disagrees.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Generic, List, Mapping, Optional, Protocol, Sequence, Set, TypeVar, Union

from ipufit.core import GradientReduction, Shard
from ipufit.core.train_config import Memory, Outputs, Precision, Reduction
from ipufit.errors import ConfigurationError, PlanError
from ipufit.partition.partition import Partition
from ipufit.partition.request import PartitionRequest

T = TypeVar("T", covariant=True)

# Into how many parts a layer is cut, or how many are on each IPU.
LayerCut = Union[int, List[int], None]


class Strategy(Protocol):
    """An execution strategy of PopTorch's, which may name blocks of the module's own."""

    _block_map: Mapping[str, object]


@dataclasses.dataclass(frozen=True)
class Setting(Generic[T]):
    """A value that something beside the arguments fixes, with the words for an error.

    Attributes:
        value: the value.
        source: name of what fixes it, such as "IPUConfig.seed".
        cure: what to do where an argument says something else.
        says: a clause about the value, to follow the name; empty for "which is" and the value.
        fills: whether the value stands for an argument that is None; else it must only not be
            contradicted.
    """

    value: T
    source: str
    cure: str
    says: str = ""
    fills: bool = True

    def conflict(self, argument: str, passed: object) -> str:
        """Write the sentence about an argument that says something else."""
        says = self.says or f"which is {self.value!r}"
        return f"{argument} must agree with {self.source}, {says}, got {passed!r}. {self.cure}"

    def agreed(self, argument: str, passed: object) -> T:
        """Return the value, which stands for an argument that is None.

        Raises:
            ConfigurationError: the argument says something else.
        """
        if passed is not None and passed != self.value:
            raise ConfigurationError(self.conflict(argument, passed))
        return self.value


def times(setting: Setting[int], factor: int, by: str) -> Setting[int]:
    """Multiply a number that is fixed.

    Args:
        setting: the number.
        factor: by which it is multiplied.
        by: name of the factor.
    """
    count = setting.value * factor
    source = f"{setting.source} x {by}"
    return dataclasses.replace(setting, value=count, source=source, says=f"which says {count}")


@dataclasses.dataclass(frozen=True)
class IpuArguments:
    """The arguments of ``compile`` that an IPUConfig or PopTorch's options may fix, too.

    Attributes:
        reduction, precision, memory: as ``compile`` documents them.
        outputs: None where the argument was left out.
        partition, inference_partition, auto_round_ipus: what ``parallel`` says.
        training_options, inference_options: the two of ``poptorch``.
        config: an IPUConfig, the path of one, or None.
    """

    reduction: Reduction
    precision: Precision
    outputs: Optional[Outputs]
    memory: Memory
    partition: PartitionRequest
    inference_partition: PartitionRequest
    auto_round_ipus: Optional[bool]
    training_options: object
    inference_options: object
    config: object


@dataclasses.dataclass(frozen=True)
class ModeSettings:
    """Settings that are fixed of training, or of inference; None where nothing is.

    Attributes:
        ipus: of all replicas together.
        replicas: from which ``ipus`` follows, by the IPUs of a replica.
        device_iterations, gradient_accumulation, seed: as in ``fit``.
        ipus_per_replica: of a replica.
        layers_per_ipu: layers on each of them, -1 for an even share of the rest.
        strategy: an execution strategy of PopTorch's.
        cuts: by kind of layer, into what the one that is meant is cut; its value is None where
            that is whole.
    """

    ipus: Optional[Setting[int]] = None
    replicas: Optional[Setting[int]] = None
    device_iterations: Optional[Setting[int]] = None
    gradient_accumulation: Optional[Setting[int]] = None
    seed: Optional[Setting[int]] = None
    ipus_per_replica: Optional[Setting[int]] = None
    layers_per_ipu: Optional[Setting[List[int]]] = None
    strategy: Optional[Setting[Strategy]] = None
    cuts: Mapping[str, Setting[LayerCut]] = dataclasses.field(default_factory=dict)

    def work(self, partition: Optional[Partition] = None) -> Dict[str, Setting[int]]:
        """Return what is fixed of the arguments of ``fit`` that make a plan, by their names.

        Args:
            partition: of the module over the IPUs of a replica.
        """
        settings = {
            "ipus": self.ipus or self._ipus_of_replicas(partition),
            "device_iterations": self.device_iterations,
            "gradient_accumulation": self.gradient_accumulation,
        }
        return {name: setting for name, setting in settings.items() if setting is not None}

    def _ipus_of_replicas(self, partition: Optional[Partition]) -> Optional[Setting[int]]:
        replicas = self.replicas
        if replicas is None or partition is None or partition.ipus == 1:
            return replicas
        return times(replicas, partition.ipus, f"{partition.ipus} IPUs of a replica")


# What holds where neither an argument nor a configuration says anything.
_DEFAULTS: Dict[str, Optional[int]] = {
    "ipus": None,
    "device_iterations": 1,
    "gradient_accumulation": 1,
}


@dataclasses.dataclass(frozen=True)
class IpuSettings:
    """Settings of a run that an IPUConfig or PopTorch's options fix; None where they say nothing.

    Attributes:
        training, inference: what is fixed of one mode.
        outputs: the argument of ``compile``.
        gradient_reduction: "mean" or "sum".
        loss_scale: "dynamic".
        offload_optimizer: whether the optimizer's state lies in host memory.
        shard: "optimizer" where its state is divided, else "none".
        auto_round_ipus: whether IPUs are rounded up to a power of two.
        recompute: whether the repeated layers are computed again in the backward pass.
        remarks: sentences for ``explain``.
    """

    training: ModeSettings = dataclasses.field(default_factory=ModeSettings)
    inference: ModeSettings = dataclasses.field(default_factory=ModeSettings)
    outputs: Optional[Setting[Outputs]] = None
    gradient_reduction: Optional[Setting[GradientReduction]] = None
    loss_scale: Optional[Setting[str]] = None
    offload_optimizer: Optional[Setting[bool]] = None
    shard: Optional[Setting[Shard]] = None
    auto_round_ipus: Optional[Setting[bool]] = None
    recompute: Optional[Setting[bool]] = None
    remarks: Sequence[str] = ()

    def of(self, is_training: bool) -> ModeSettings:
        """Return the settings of a mode."""
        return self.training if is_training else self.inference

    def names(self, is_training: bool) -> Set[str]:
        """Return the names of the arguments of ``fit`` that are fixed in a mode."""
        return set(self.of(is_training).work())

    def resolve(
        self, is_training: bool, partition: Optional[Partition], **arguments: Optional[int]
    ) -> Dict[str, Optional[int]]:
        """Fill in what is fixed for arguments that are None.

        Args:
            is_training: the mode.
            partition: of the module over the IPUs of a replica.
            arguments: "ipus", "device_iterations" and "gradient_accumulation", as the user
                has them.

        Raises:
            PlanError: an argument disagrees with what is fixed; with all that do.
        """
        fixed = self.of(is_training).work(partition)
        resolved: Dict[str, Optional[int]] = {}
        faults = []
        for name, value in arguments.items():
            setting = fixed.get(name)
            there = _DEFAULTS[name] if setting is None else setting.value
            resolved[name] = there if value is None else value
            if setting is not None and value is not None and value != there:
                faults.append(setting.conflict(f"`{name}`", value))
                resolved[name] = there
        if faults:
            raise PlanError(faults, {name: resolved[name] for name in fixed if name in resolved})
        return resolved

    def find_strategy(self, is_training: bool) -> Optional[Strategy]:
        """Return the execution strategy that is fixed in a mode; None if none is."""
        setting = self.of(is_training).strategy
        return None if setting is None else setting.value

    def seed_or(self, seed: Optional[int], is_training: bool = True) -> Optional[int]:
        """Return the seed that was asked for, else the one that is fixed.

        Raises:
            ConfigurationError: they disagree.
        """
        setting = self.of(is_training).seed
        return seed if setting is None else setting.agreed("seed", seed)
