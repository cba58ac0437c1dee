"""Arguments of ``compile`` that divide a module, and the execution strategy that they name."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Optional, Tuple

from ipufit.errors import PartitionError, UnknownNameError
from ipufit.partition.partition import STRATEGIES
from ipufit.utils.poptorch_sdk import sdk_kind

__all__ = ["POPTORCH_STRATEGIES", "PartitionRequest", "count_of", "kind_of", "strategy_of"]


@dataclasses.dataclass(frozen=True)
class PartitionRequest:
    """The arguments of ``compile`` that divide a module, as they came; it documents them.

    Attributes:
        prefix: before their names, as the user wrote them.
        ipus_said_by: what says ``ipus_per_replica`` where no argument does.
        is_annotated: whether ``ipus_per_replica`` is what ``BeginBlock`` wrote into the module, and
            no more than a guess until it runs.
    """

    stages: Any = None
    layers_per_ipu: Any = None
    layers: Any = None
    strategy: Any = None
    ipus_per_replica: Any = None
    prefix: str = ""
    ipus_said_by: str = ""
    is_annotated: bool = False

    @property
    def is_empty(self) -> bool:
        """True if no argument divides the module."""
        return (self.stages, self.layers_per_ipu, self.strategy) == (None, None, None)

    @property
    def is_absent(self) -> bool:
        """True if all arguments were left out, also those that only go with others."""
        said = (self.stages, self.layers_per_ipu, self.layers, self.strategy, self.ipus_per_replica)
        return all(value is None for value in said)

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
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise PartitionError(f"{name} must be a positive whole number or None, got {value!r}.")
    return operator.index(value)


POPTORCH_STRATEGIES = {
    "ShardedExecution": "sharded",
    "PipelinedExecution": "pipelined",
    "SerialPhasedExecution": "serial_phased",
    "ParallelPhasedExecution": "parallel_phased",
}


def strategy_of(request: PartitionRequest) -> Tuple[str, Any]:
    """The name of the strategy, and PopTorch's object or None.

    Raises:
        UnknownNameError: a name that there is not.
        PartitionError: something else.
    """
    given = request.strategy
    if given is None:
        return "pipelined", None
    if isinstance(given, str):
        if given not in STRATEGIES:
            raise UnknownNameError(request.name("strategy"), given, STRATEGIES)
        return given, None
    found = kind_of(given)
    if found is not None:
        return found, given
    raise PartitionError(
        f"{request.name('strategy')} must be one of {', '.join(map(repr, STRATEGIES))}, or an "
        f"object such as poptorch.PipelinedExecution(), got {given!r}."
    )


def kind_of(strategy: object) -> Optional[str]:
    """The name of what an execution strategy of PopTorch's is; None if it is none."""
    kind = sdk_kind(strategy, POPTORCH_STRATEGIES)
    return None if kind is None else POPTORCH_STRATEGIES[kind]
