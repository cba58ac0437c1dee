"""A stand-in for ``horovod.torch``, with which programs average over the processes of PopRun.

The names, their arguments and the errors of an uninitialized Horovod are those of its API
reference. With one process, what comes back is a copy of what was passed.
"""

from typing import List, Optional, Sequence

import torch

from ipufit.utils.poptorch_sdk import check_alone, refuse

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_parameters",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

# Horovod's numbers; each of these reductions of one process gives what it has.
Average, Sum, Min, Max, Product = 0, 1, 3, 4, 5

_is_initialized = False


def init() -> None:
    """Begin, with nobody to talk to.

    Raises:
        RuntimeError: the environment says that a launcher has started several processes.
    """
    global _is_initialized
    check_alone("horovod.torch")
    _is_initialized = True


def shutdown() -> None:
    """End what ``init`` began."""
    global _is_initialized
    _is_initialized = False


def is_initialized() -> bool:
    """Tell whether ``init`` has been called."""
    return _is_initialized


def rank() -> int:
    """Return the number of this process.

    Raises:
        ValueError: ``init`` has not been called.
    """
    if not _is_initialized:
        raise ValueError("Horovod must be initialized, but is not. Call init() first.")
    return 0


def size() -> int:
    """Return the number of processes.

    Raises:
        ValueError: ``init`` has not been called.
    """
    return rank() + 1


local_rank = rank
local_size = size


def allreduce(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    *,
    op: Optional[int] = None,
) -> torch.Tensor:
    """Reduce a tensor over all processes.

    Args:
        tensor: of any shape.
        average: Horovod's earlier form of ``op``.
        name: of the reduction, which has no effect here.
        op: ``Average``, ``Sum``, ``Min``, ``Max`` or ``Product``.
    Returns:
        A new tensor of the same shape and dtype.
    Raises:
        ValueError: both ``average`` and ``op`` came, or ``init`` has not been called.
    """
    rank()
    if average is not None and op is not None:
        raise ValueError("`average` is the earlier form of `op`, but both came. Pass `op` alone.")
    return tensor.clone()


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    *,
    op: Optional[int] = None,
) -> List[torch.Tensor]:
    """Reduce each of these tensors over all processes, as ``allreduce`` does one."""
    return [allreduce(tensor, average, name, op=op) for tensor in tensors]


def allgather(tensor: torch.Tensor, name: Optional[str] = None) -> torch.Tensor:
    """Concatenate the tensors of all processes along their first dimension, into a new one."""
    rank()
    return tensor.clone()


def broadcast(tensor: torch.Tensor, root_rank: int, name: Optional[str] = None) -> torch.Tensor:
    """Return the root's tensor, in a new one.

    Raises:
        ValueError: there is no process with this number, or ``init`` has not been called.
    """
    broadcast_parameters(tensor, root_rank)
    return tensor.clone()


def broadcast_parameters(params: object, root_rank: int) -> None:
    """Give these parameters the root's values, which they have.

    Raises:
        ValueError: there is no process with this number, or ``init`` has not been called.
    """
    if root_rank != rank():
        raise ValueError(
            f"`root_rank` must be the number of a process, but is {root_rank}. There is one "
            "process here: pass 0."
        )


def __getattr__(name: str) -> object:
    """Refuse every other name of Horovod, and say where its like is.

    Raises:
        AttributeError: always.
    """
    refuse("horovod.torch", name, __all__, " for one process")
