"""A stand-in for ``popdist`` where there is no Poplar SDK: one process, all by itself.

The names are those of PopDist's Python API reference. PopRun, which starts several processes,
comes with the SDK alone.
"""

from typing import Any, Callable, Iterable

from ipufit.utils.poptorch_sdk import check_alone, refuse, stands_in

__all__ = [
    "execute_on_instances",
    "getInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "init",
    "isPopdistEnvSet",
    "synchronize",
]

stands_in(__name__, "for one process")


def isPopdistEnvSet() -> bool:
    """Tell whether PopRun has started this process: it has not.

    Raises:
        RuntimeError: the environment says that it has.
    """
    check_alone("popdist")
    return False


def init() -> None:
    """Begin, with nobody to talk to.

    Raises:
        RuntimeError: the environment says that PopRun has started this process.
    """
    check_alone("popdist")


def synchronize() -> None:
    """Wait for the other processes, which there are none of."""


def getInstanceIndex() -> int:
    """Return the number of this process."""
    return 0


def getNumInstances() -> int:
    """Return the number of processes."""
    return 1


def getNumLocalReplicas() -> int:
    """Return the replicas of this process, before any option asks for more."""
    return 1


def getNumTotalReplicas() -> int:
    """Return the replicas of all processes, before any option asks for more."""
    return 1


def getNumIpusPerReplica() -> int:
    """Return the IPUs of a replica, before any option asks for more."""
    return 1


def execute_on_instances(
    instances: Iterable[int], function: Callable[..., Any], *args: object, **kwargs: object
) -> Any:
    """Call a function in the processes of these numbers.

    Returns:
        What it returns; None where this process is not among them.
    """
    return function(*args, **kwargs) if 0 in {*instances} else None


def __getattr__(name: str) -> object:
    """Refuse every other name of popdist, and say where its like is.

    Raises:
        AttributeError: always.
    """
    refuse("popdist", name, __all__, " for one process")
