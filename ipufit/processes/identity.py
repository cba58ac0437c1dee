"""Number of this process in the run, as the user, torch.distributed or the launcher says."""

from __future__ import annotations

import dataclasses
import os
from typing import Dict, Optional, Tuple

from torch import distributed as torch_distributed

from ipufit.errors import ConfigurationError, unfit
from ipufit.processes.group import ALONE, TIMEOUT, Processes
from ipufit.processes.launchers import Rendezvous, find_launcher, find_rendezvous, parse_address
from ipufit.utils.error_collector import number_in


@dataclasses.dataclass(frozen=True)
class _Arguments:
    """Arguments of :func:`distributed`; None leaves one to the environment."""

    process_id: Optional[int] = None
    num_processes: Optional[int] = None
    place: Optional[Rendezvous] = None
    timeout: float = TIMEOUT


_arguments = _Arguments()
# By their fields, so that there is one object for one run.
_runs: Dict[Tuple[object, ...], Processes] = {}


def current() -> Processes:
    """Return the processes of this run, one object as long as nobody says otherwise.

    They come from the first of these that speaks of processes: :func:`distributed`;
    torch.distributed, if it is initialised; the environment, as torchrun, OpenMPI, PopRun and
    Slurm set it.

    Raises:
        ConfigurationError: what they say is malformed or contradicts itself.
    """
    for processes in _runs.values():
        if processes.connection.is_connected:
            return processes  # which initialised torch.distributed itself, perhaps
    processes = _find()
    if not processes.is_distributed:
        return ALONE
    return _runs.setdefault(dataclasses.astuple(processes), processes)


def distributed(
    process_id: Optional[int] = None,
    num_processes: Optional[int] = None,
    *,
    address: Optional[str] = None,
    timeout: float = TIMEOUT,
) -> Processes:
    """Set by hand which process of a run this is, instead of by a launcher's environment.

    See docs/distributed.md. Call it before the first ``fit``, ``evaluate`` or ``predict``, in every
    process::

        ipufit.distributed(0, 1)  # one process, whatever the environment says
        ipufit.distributed(timeout=60)  # the environment's numbers, and other limits

    Args:
        process_id: of this process, from 0; None is what the environment says.
        num_processes: how many there are; 1 is one process, whatever the environment says. None is
            what that says.
        address: "host:port" of process 0, which must be free there; None is MASTER_ADDR and
            MASTER_PORT.
        timeout: seconds that a process waits for another one before it raises an error.

    Returns:
        The process group, a :class:`ipufit.processes.group.Processes`.

    Raises:
        ConfigurationError: an argument that cannot work, or the processes are connected already.
    """
    global _arguments
    arguments = _checked(process_id, num_processes, address, timeout)
    if any(each.connection.is_connected for each in _runs.values()):
        raise ConfigurationError(
            "ipufit.distributed must be called before the processes first communicate, but they "
            "are already connected. Call it at the start of the program."
        )
    before, _arguments = _arguments, arguments
    try:
        return current()
    except ConfigurationError:
        _arguments = before
        raise


def _checked(
    process_id: Optional[int],
    num_processes: Optional[int],
    address: Optional[str],
    timeout: float,
) -> _Arguments:
    for name, value in (("process_id", process_id), ("num_processes", num_processes)):
        if value is not None and type(value) is not int:
            advice = "Pass process_id from 0, and num_processes, or leave both to the launcher."
            raise unfit(name, "an int", value, advice)
    needed, advice = "a number of seconds above 0", "Pass, for example, timeout=600.0."
    timeout = number_in("timeout", timeout, needed, advice=advice)
    if num_processes == 1 and process_id is None:
        process_id = 0
    if (process_id is None) != (num_processes is None):
        present = "num_processes" if process_id is None else "process_id"
        missing = "process_id" if process_id is None else "num_processes"
        value = num_processes if process_id is None else process_id
        raise ConfigurationError(
            f"process_id and num_processes must be passed together, but got {present}={value} "
            f"without {missing}. Pass both, or leave both to the launcher."
        )
    if process_id is not None and not 0 <= process_id < (num_processes or 0):
        raise ConfigurationError(
            f"process_id must be from 0 to num_processes - 1, but got process_id={process_id} and "
            f"num_processes={num_processes}. Number the processes from 0."
        )
    place = None if address is None else parse_address(address)
    return _Arguments(process_id, num_processes, place, timeout)


def _find() -> Processes:
    arguments = _arguments
    if arguments.process_id is not None and arguments.num_processes is not None:
        return _by_hand(arguments, arguments.process_id, arguments.num_processes)
    if _is_initialized():
        rank, size = torch_distributed.get_rank(), torch_distributed.get_world_size()
        local = os.environ.get("LOCAL_RANK", "")
        local_id = int(local) if local.isascii() and local.isdigit() else 0
        return Processes(rank, size, "torch.distributed", local_id, None, arguments.timeout)
    info = find_launcher(os.environ)
    if info is None or info.num_processes == 1:
        return ALONE
    place = arguments.place or find_rendezvous(os.environ, info)
    return Processes(
        info.process_id, info.num_processes, info.launcher, info.local_id, place, arguments.timeout
    )


def _by_hand(arguments: _Arguments, process_id: int, num_processes: int) -> Processes:
    if num_processes == 1:
        return ALONE
    place = arguments.place
    if place is None and not _is_initialized():
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if not host or not port:
            raise ConfigurationError(
                f"{num_processes} processes need the address of process 0, but ipufit.distributed "
                "got no address, and MASTER_ADDR and MASTER_PORT are not set. Pass "
                'address="host:port" of process 0, the same in all processes.'
            )
        place = parse_address(f"{host}:{port}")
    return Processes(process_id, num_processes, "hand", 0, place, arguments.timeout)


def _is_initialized() -> bool:
    return torch_distributed.is_available() and torch_distributed.is_initialized()
