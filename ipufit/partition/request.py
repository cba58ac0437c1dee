"""How ``compile`` is told to divide a module, and the execution strategy that it names."""

from __future__ import annotations

import dataclasses
from typing import Mapping, Optional, Sequence, Tuple, Union

from ipufit.errors import ConfigurationError, PartitionError, UnknownNameError, shown, unfit
from ipufit.partition.partition import STRATEGIES
from ipufit.utils.error_collector import ErrorCollector, one_of, whole_number
from ipufit.utils.poptorch_sdk import sdk_kind


@dataclasses.dataclass(frozen=True)
class Parallel:
    """How a module is divided over the IPUs of a replica.

    ``compile(parallel=...)`` takes it, or a plan of :meth:`ipufit.Model.plan`; it is frozen. See
    docs/stages.md.

    Attributes:
        stages: dict from names of modules that begin a stage to its number, from 0. A stage lasts
            until the next one begins, and has its own IPU; "after x" begins a stage when module x
            has returned. A pair (number, IPU) begins a stage on the IPU of an earlier stage, for a
            weight that is there. Stages change no numbers, only the place of computations. "auto"
            finds stages for ipus_per_replica IPUs when the first micro-batch is known: the slowest
            is as fast as possible, and all fit in memory, by the estimate of
            :meth:`ipufit.Model.plan`. A plan sets its stages and strategy; ``fit`` then refuses
            micro-batches that need more memory than the plan allows.
        layers_per_ipu: instead of stages, how many of the repeated layers are on each IPU; -1 for
            an even share of the rest, with the remainder on the last such IPU. Modules before the
            layers are on the first IPU, modules after them on the last; 0 for an IPU with only such
            modules, or with parts of a serialised layer. A module that shares a weight with a
            module on another IPU, like the last layer of a language model with its embedding, runs
            there in an additional stage.
        layers: names of the ModuleLists or Sequentials whose layers are counted; None finds the
            longest list of equal blocks, other lists with blocks of the same class, and a decoder
            next to an encoder.
        strategy: "pipelined", "sharded", "serial_phased", "parallel_phased" (with phases as
            stages), or an object such as ``poptorch.PipelinedExecution(...)`` for a module with its
            own blocks. None is "pipelined".
        ipus_per_replica: number of IPUs of a replica if layers are split over several. For a module
            with its own blocks (``poptorch.BeginBlock``, ``Block``, ``BlockFunction``) it follows
            from them. With stages="auto", the number of stages.
        auto_round_ipus: if ``ipus`` is not a power of two, reserve the next one and leave the rest
            idle. None is the setting of ``config`` or PopTorch's options, or False.
        inference: stages or layers_per_ipu, and strategy, for validation, ``evaluate`` and
            ``predict``; None is as in training, except that a pipeline that the device iterations
            don't fill runs sharded.

    Raises:
        ConfigurationError: values that can't work with any module; with every fault.
    """

    stages: Union[Mapping[str, Union[int, Tuple[int, int]]], str, object, None] = None
    layers_per_ipu: Optional[Sequence[int]] = None
    layers: Union[str, Sequence[str], None] = None
    strategy: object = None
    ipus_per_replica: Optional[int] = None
    auto_round_ipus: Optional[bool] = None
    inference: Optional[Parallel] = None

    def __post_init__(self) -> None:
        faults = ErrorCollector()
        with faults.collect():
            one_of("Parallel.auto_round_ipus", self.auto_round_ipus, (None, True, False))
        with faults.collect():
            if self.inference is not None:
                self._check_inference()
        faults.raise_all()

    def _check_inference(self) -> None:
        inference = self.inference
        if not isinstance(inference, Parallel):
            raise unfit("Parallel.inference", "an ipufit.Parallel or None", inference)
        for name in ("layers", "ipus_per_replica", "auto_round_ipus", "inference"):
            if getattr(inference, name) is not None:
                raise ConfigurationError(
                    "Parallel.inference takes only stages, layers_per_ipu and strategy; the rest "
                    f"is the same as in training, but it sets {name}. Leave it out there."
                )


@dataclasses.dataclass(frozen=True)
class PartitionRequest(Parallel):
    """A :class:`Parallel` for training or for inference alone, and what says it.

    Attributes:
        prefix: before the names of its fields, as the user wrote them.
        ipus_said_by: what says ``ipus_per_replica`` where no argument does.
        is_annotated: whether ``ipus_per_replica`` is what ``BeginBlock`` wrote into the module, and
            no more than a guess until it runs.
    """

    prefix: str = ""
    ipus_said_by: str = ""
    is_annotated: bool = False

    @staticmethod
    def pair(parallel: Parallel) -> Tuple[PartitionRequest, PartitionRequest]:
        """The requests for training and for inference."""
        rest = parallel.inference or Parallel()
        training = PartitionRequest(
            parallel.stages,
            parallel.layers_per_ipu,
            parallel.layers,
            parallel.strategy,
            parallel.ipus_per_replica,
        )
        inference = PartitionRequest(
            rest.stages, rest.layers_per_ipu, strategy=rest.strategy, prefix="inference."
        )
        return training, inference

    @property
    def is_empty(self) -> bool:
        """True if no argument divides the module."""
        return (self.stages, self.layers_per_ipu, self.strategy) == (None, None, None)

    @property
    def is_absent(self) -> bool:
        """True if all arguments were left out, also those that only go with others."""
        how = (self.stages, self.layers_per_ipu, self.layers, self.strategy, self.ipus_per_replica)
        return all(value is None for value in how)

    @property
    def sets_ipus(self) -> bool:
        """Say whether the user divides the module or sets how many IPUs a replica has."""
        divides = self.stages is not None or self.layers_per_ipu is not None
        return divides or (self.ipus_per_replica is not None and not self.is_annotated)

    def name(self, argument: str) -> str:
        """Name an argument as the user does."""
        return f"{self.prefix}{argument}"


def count_of(name: str, value: object) -> Optional[int]:
    """A positive whole number, or None.

    Raises:
        PartitionError: it is something else.
    """
    if value is None:
        return None
    count = whole_number(value)
    if count is None or count < 1:
        raise PartitionError(f"{name} must be a positive whole number or None, got {shown(value)}.")
    return count


POPTORCH_STRATEGIES = {
    "ShardedExecution": "sharded",
    "PipelinedExecution": "pipelined",
    "SerialPhasedExecution": "serial_phased",
    "ParallelPhasedExecution": "parallel_phased",
}


def strategy_of(request: PartitionRequest) -> Tuple[str, object]:
    """The name of the strategy, and PopTorch's object or None.

    Raises:
        UnknownNameError: a name that there is not.
        PartitionError: something else.
    """
    strategy = request.strategy
    if strategy is None:
        return "pipelined", None
    if isinstance(strategy, str):
        if strategy not in STRATEGIES:
            raise UnknownNameError(request.name("strategy"), strategy, STRATEGIES)
        return strategy, None
    name = kind_of(strategy)
    if name is not None:
        return name, strategy
    raise PartitionError(
        f"{request.name('strategy')} must be one of {', '.join(map(repr, STRATEGIES))}, or an "
        f"object such as poptorch.PipelinedExecution(), got {strategy!r}."
    )


def kind_of(strategy: object) -> Optional[str]:
    """The name of what an execution strategy of PopTorch's is; None if it is none."""
    kind = sdk_kind(strategy, POPTORCH_STRATEGIES)
    return None if kind is None else POPTORCH_STRATEGIES[kind]
