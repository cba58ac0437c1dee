"""Facts about the processes of a run, from the environment that a launcher sets.

=====================  ==========================================================================
torchrun               RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
OpenMPI, so PopRun     OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
Slurm                  SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, inside a job step (srun)
=====================  ==========================================================================

PopRun starts its instances by OpenMPI's ``mpirun``, and passes on variables that begin with
``POPDIST_``; it is known by these, and the numbers are OpenMPI's. A launcher that runs inside
another is the one that counts: torchrun's numbers before those of OpenMPI, these before Slurm's.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from typing import Callable, Mapping, Optional, Tuple

from ipufit.errors import ConfigurationError

# Of Slurm's steps that are no srun: the interactive shell, the batch script, the rest.
_NO_STEPS = {"4294967290", "4294967291", "4294967292", "4294967293"}
_PORTS = range(20000, 30000)  # below those that systems hand out by themselves
_MAX_PORT = 65535


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """Address at which the processes of a run find each other.

    Attributes:
        host: the machine of process 0.
        port: on which it listens.
        is_hosted: whether somebody else, as torchrun, listens there for it.
        attempt: how often the run was begun before at the same place.
    """

    host: str
    port: int
    is_hosted: bool = False
    attempt: int = 0


@dataclasses.dataclass(frozen=True)
class LauncherInfo:
    """Numbers that a launcher gave this process.

    Attributes:
        launcher: its name.
        names: the variables of the number of this process and of how many there are.
        local_id: number of this process on its machine.
        is_one_machine: whether all processes are on it, as far as known.
        job: a text that all processes of this run have, and no other run on the machine.
    """

    launcher: str
    process_id: int
    num_processes: int
    names: str
    local_id: int = 0
    is_one_machine: bool = False
    job: str = ""


def find_launcher(environment: Mapping[str, str]) -> Optional[LauncherInfo]:
    """Read which launcher started this process, as one of several or of one; None without one.

    Raises:
        ConfigurationError: the variables are malformed, or contradict each other.
    """
    by_torch = _torch(environment)
    by_mpi = _mpi(environment)
    by_slurm = _slurm(environment)
    if by_torch is not None and by_torch.launcher != "torchrun":
        # Set by hand or by a script, from which an outer launcher must not differ.
        outer = by_mpi or by_slurm
        if outer is not None and outer.num_processes > 1 and _numbers(outer) != _numbers(by_torch):
            raise ConfigurationError(
                f"environment variables contradict each other: {by_torch.names} say process "
                f"{by_torch.process_id} of {by_torch.num_processes}, and {outer.names} say process "
                f"{outer.process_id} of {outer.num_processes}. Unset the wrong ones, or call "
                "ipufit.distributed with the right numbers."
            )
        if outer is not None and _numbers(outer) == _numbers(by_torch):
            return outer
    return by_torch or by_mpi or by_slurm


def find_rendezvous(environment: Mapping[str, str], info: LauncherInfo) -> Rendezvous:
    """Find the address at which the processes meet.

    Without MASTER_ADDR and MASTER_PORT, processes of one machine meet at 127.0.0.1, on a port from
    20000 on that is computed from the launcher's number of the job.

    Raises:
        ConfigurationError: nobody says where.
    """
    host = environment.get("MASTER_ADDR", "")
    port = _integer(environment, "MASTER_PORT")
    if port is not None and not 0 < port <= _MAX_PORT:
        raise ConfigurationError(
            f"MASTER_PORT must be from 1 to {_MAX_PORT}, but it is {port}. Set it to a port that "
            "is free on the machine of process 0."
        )
    if not host and info.is_one_machine:
        host = "127.0.0.1"
    if not host:
        raise ConfigurationError(
            f"{info.num_processes} processes need the address of process 0, but MASTER_ADDR is not "
            "set. Set it to the name of that machine, and MASTER_PORT to a free port there, the "
            'same for all processes, or pass address="host:port" to ipufit.distributed.'
        )
    if port is None:
        if not info.job:
            raise ConfigurationError(
                f"{info.num_processes} processes need the port of process 0, but MASTER_PORT is "
                "not set. Set it to a port that is free on its machine, the same for all "
                'processes, or pass address="host:port" to ipufit.distributed.'
            )
        port = _PORTS[zlib.crc32(info.job.encode()) % len(_PORTS)]
    is_hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    attempt = _integer(environment, "TORCHELASTIC_RESTART_COUNT") or 0
    return Rendezvous(host, port, is_hosted, attempt)


def parse_address(address: object) -> Rendezvous:
    """Read an address that is written ``host:port``."""
    # The host may be an IPv6 address in brackets.
    text = address if isinstance(address, str) else ""
    match = re.fullmatch(r"\[?([^\s\[\]]+?)\]?:([0-9]{1,5})", text)
    if match is None or not 0 < int(match[2]) <= _MAX_PORT:
        raise ConfigurationError(
            'address must be "host:port" of process 0, with a port from 1 to '
            f'{_MAX_PORT}, but got {address!r}. Pass, for example, address="node1:29500".'
        )
    return Rendezvous(match[1], int(match[2]))


def _torch(environment: Mapping[str, str]) -> Optional[LauncherInfo]:
    if environment.get("WORLD_SIZE", "") == "1" and not environment.get("RANK"):
        environment = {**environment, "RANK": "0"}
    local_size = _integer(environment, "LOCAL_WORLD_SIZE")
    is_torchrun = "TORCHELASTIC_RUN_ID" in environment
    return _checked(
        environment,
        "torchrun" if is_torchrun else "a launcher that sets RANK",
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        is_one_machine=lambda count: local_size == count,
    )


def _mpi(environment: Mapping[str, str]) -> Optional[LauncherInfo]:
    local_size = _integer(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    if environment.keys().isdisjoint(names):
        return None  # before all names are gone through: fit asks this at each execution
    is_poprun = any(name.startswith("POPDIST_") for name in environment)
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
    return _checked(
        environment,
        "PopRun" if is_poprun else "OpenMPI",
        names,
        is_one_machine=lambda count: local_size == count,
        job=job or "",
    )


def _slurm(environment: Mapping[str, str]) -> Optional[LauncherInfo]:
    step = environment.get("SLURM_STEP_ID", "")
    if not step or step in _NO_STEPS:
        return None  # the shell of a job: its variables are those of the job, not of a process
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES")
    return _checked(
        environment,
        "Slurm",
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        is_one_machine=lambda count: nodes == "1",
        job=f"{environment.get('SLURM_JOB_ID', '')}.{step}",
    )


def _checked(
    environment: Mapping[str, str],
    launcher: str,
    names: Tuple[str, str, str],
    is_one_machine: Callable[[int], bool],
    job: str = "",
) -> Optional[LauncherInfo]:
    number, size, local = names
    process_id = _integer(environment, number)
    count = _integer(environment, size)
    if process_id is None and count is None:
        return None
    if process_id is None or count is None:
        there, missing = (size, number) if process_id is None else (number, size)
        raise ConfigurationError(
            f"{number} and {size} must be set together, but {there} is {environment[there]} and "
            f"{missing} is not set. Set {missing}, unset {there}, or call ipufit.distributed with "
            "the right numbers."
        )
    if count < 1 or not 0 <= process_id < count:
        raise ConfigurationError(
            f"{number} must be from 0 to {size} - 1, but {number} is {process_id} and {size} is "
            f"{count}. Correct them, or call ipufit.distributed with the right numbers."
        )
    return LauncherInfo(
        launcher,
        process_id,
        count,
        f"{number} and {size}",
        _integer(environment, local) or 0,
        is_one_machine(count),
        job,
    )


def _integer(environment: Mapping[str, str], name: str) -> Optional[int]:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ConfigurationError(
            f"{name} must be an integer, but it is {text!r}. Correct it or unset it."
        )
    return int(text)


def _numbers(info: LauncherInfo) -> Tuple[int, int]:
    return info.process_id, info.num_processes
