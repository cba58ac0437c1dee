"""How stages run: by name, or by an object of PopTorch's."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from ipufit.errors import PartitionError, UnknownNameError
from ipufit.partition.partition import STRATEGIES
from ipufit.partition.request import PartitionRequest
from ipufit.utils.poptorch_types import sdk_kind

__all__ = ["POPTORCH_STRATEGIES", "kind_of", "strategy_of"]

POPTORCH_STRATEGIES = {
    "ShardedExecution": "sharded",
    "PipelinedExecution": "pipelined",
    "SerialPhasedExecution": "serial_phased",
    "ParallelPhasedExecution": "parallel_phased",
}


def strategy_of(asked: PartitionRequest) -> Tuple[str, Any]:
    """The name of the strategy, and PopTorch's object or None.

    Raises:
        UnknownNameError: a name that there is not.
        PartitionError: something else.
    """
    given = asked.strategy
    if given is None:
        return "pipelined", None
    if isinstance(given, str):
        if given not in STRATEGIES:
            raise UnknownNameError(asked.name("strategy"), given, STRATEGIES)
        return given, None
    found = kind_of(given)
    if found is not None:
        return found, given
    raise PartitionError(
        f"{asked.name('strategy')} must be one of {', '.join(map(repr, STRATEGIES))}, or an object "
        f"such as poptorch.PipelinedExecution(), got {given!r}."
    )


def kind_of(strategy: object) -> Optional[str]:
    """The name of what an execution strategy of PopTorch's is; None if it is none."""
    kind = sdk_kind(strategy, POPTORCH_STRATEGIES)
    return None if kind is None else POPTORCH_STRATEGIES[kind]
