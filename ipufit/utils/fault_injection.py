"""Faults on demand, for drills: see :func:`ipufit.testing.inject`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
from typing import Callable, Dict, Iterator, List, Optional, Protocol

from ipufit.errors import (
    ConfigurationError,
    NonFiniteLossError,
    RecoverableDeviceError,
    UnrecoverableDeviceError,
)
from ipufit.utils.error_collector import at_least, one_of


@dataclasses.dataclass
class Fault:
    """A failure to inject; :func:`ipufit.testing.inject` creates it.

    Attributes:
        kind: its name.
        at_update: index of the update, counted from ``compile``, in whose execution it happens.
        happened: whether it has happened.
    """

    kind: str
    at_update: int
    happened: bool = False


_pending: List[Fault] = []
_full: List[Fault] = []


@contextlib.contextmanager
def inject(fault: str, at_update: int) -> Iterator[Fault]:
    """Context manager that causes a failure in a ``fit`` within the block, once.

    It happens before the execution of the update runs, so that execution has no effect. See
    docs/checkpoints.md.

    Args:
        fault: one of

            - "ipu_reset", "link_reset", "partition_reset" or "full_reset": the device fails, and
              can be used again after that (``RecoverableDeviceError``);
            - "unrecoverable": it fails permanently (``UnrecoverableDeviceError``);
            - "non_finite": the loss of the update is NaN (``NonFiniteLossError``);
            - "full_disk": there is no space for the next checkpoint (``CheckpointError``);
            - "worker": a process of the DataLoader is killed (``DataError``);
            - "kill", "terminate" or "interrupt": this process gets SIGKILL, SIGTERM or SIGINT.
        at_update: index of the update, counted from ``compile``.

    Returns:
        A :class:`ipufit.testing.Fault`, whose ``happened`` is True after the failure.

    Raises:
        ConfigurationError: an unknown failure, or an invalid update.
    """
    one_of("fault", fault, tuple(_FAULTS))
    planned = Fault(fault, at_least("at_update", at_update, 0))
    _pending.append(planned)
    try:
        yield planned
    finally:
        for waiting in (_pending, _full):
            if planned in waiting:
                waiting.remove(planned)


class _FallibleProgram(Protocol):
    """The part of a program that a drill needs."""

    @property
    def updates(self) -> int:
        """Weight updates done since ``compile``."""

    def fail(self, action: Optional[str]) -> None:
        """Raise what a failing device would raise, where the program has a device."""


def raise_injected_fault(program: _FallibleProgram, updates: int) -> None:
    """Let go wrong what was asked for in one of these updates.

    Args:
        program: the program that is about to run.
        updates: how many it makes.
    """
    if not _pending:
        return
    first = program.updates
    for fault in [each for each in _pending if first <= each.at_update < first + updates]:
        _pending.remove(fault)
        fault.happened = True
        if fault.kind in _OF_DEVICES:
            program.fail(_OF_DEVICES[fault.kind])
        _FAULTS[fault.kind](fault)


def check_disk(path: str) -> None:
    """Fail like a disk without room, if that was asked for.

    Raises:
        OSError: it was.
    """
    if _full:
        _full.pop()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def _reset(fault: Fault) -> None:
    action = str(_OF_DEVICES[fault.kind])
    raise RecoverableDeviceError(
        f"the device must run, but a drill lets it fail at update {fault.at_update}. It can be "
        f"used again after {action}.",
        action,
    )


def _unrecoverable(fault: Fault) -> None:
    raise UnrecoverableDeviceError(
        f"the device must run, but a drill lets it fail permanently at update {fault.at_update}. "
        "Have the system checked before you use it again."
    )


def _non_finite(fault: Fault) -> None:
    raise NonFiniteLossError(
        f"the loss must be finite, but a drill makes it nan in update {fault.at_update}. The "
        "weights, buffers and optimizer state are those from before the execution.",
        fault.at_update,
        float("nan"),
    )


def _worker(fault: Fault) -> None:
    import multiprocessing  # takes time to import, for a drill alone

    workers = [each for each in multiprocessing.active_children() if each.pid is not None]
    if not workers:
        raise ConfigurationError(
            "the fault 'worker' kills a process of the DataLoader, but there is none. Train on a "
            "DataLoader with num_workers=1 or more, over a dataset of your own."
        )
    os.kill(int(workers[0].pid or 0), signal.SIGKILL)
    # torch tells of it from a signal, which must not come when the fit is over.
    workers[0].join()


def _send(number: int) -> Callable[[Fault], None]:
    return lambda fault: os.kill(os.getpid(), number)


# What lets the device run again; None for nothing.
_OF_DEVICES = {
    "ipu_reset": "IPU_RESET",
    "link_reset": "LINK_RESET",
    "partition_reset": "PARTITION_RESET",
    "full_reset": "FULL_RESET",
    "unrecoverable": None,
}

_FAULTS: Dict[str, Callable[[Fault], None]] = {
    **dict.fromkeys(_OF_DEVICES, _reset),
    "unrecoverable": _unrecoverable,
    "non_finite": _non_finite,
    "full_disk": _full.append,
    "worker": _worker,
    "kill": _send(getattr(signal, "SIGKILL", signal.SIGTERM)),
    "terminate": _send(signal.SIGTERM),
    "interrupt": _send(signal.SIGINT),
}
