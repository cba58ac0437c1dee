"""Options of one process among several: ``options.Distributed``, or what PopDist makes of PopRun's.

Under PopRun the options come from ``popdist.poptorch.Options(ipus_per_replica=...)``, which sets
replicas, processes and device by itself and refuses ``replicationFactor``, ``useIpuId`` and all
setters of ``Distributed`` (``tests/popdist_test.py`` of PopTorch 3.4). Whether PopRun has started
this process says ``popdist.isPopdistEnvSet()`` (PopDist's Python API reference).
"""

from __future__ import annotations

import importlib
from typing import Any, Optional

from ipufit.errors import ConfigurationError
from ipufit.processes import Processes

__all__ = ["fixes_replicas", "new_options", "set_replicas"]


def new_options(sdk: Any, ipus_per_replica: int) -> Any:
    """PopTorch's options for this process, with PopRun's settings where PopRun has started it."""
    own = _popdist(sdk)
    return sdk.Options() if own is None else own.Options(ipus_per_replica=ipus_per_replica)


def set_replicas(
    sdk: Any, options: Any, replicas: int, stages: int, processes: Processes, role: str
) -> None:
    """Say how many replicas this process has, and which of all it is.

    Args:
        sdk: PopTorch.
        options: PopTorch's, which are changed.
        replicas: of this process.
        stages: IPUs of a replica.
        processes: those of the run.
        role: name of the options, for messages.

    Raises:
        ConfigurationError: the options, or PopRun, say something else.
    """
    own = _popdist(sdk)
    if own is not None:
        _check_popdist(sdk, own, options, replicas, stages, processes, role)
        return
    options.replicationFactor(replicas)
    group = options.Distributed
    said = (group.processId, group.numProcesses)
    known = (processes.process_id, processes.num_processes)
    if said == known:
        return
    # Those of OpenMPI's environment came by themselves, and ipufit.distributed may know better.
    fresh = sdk.Options().Distributed
    if said[1] > 1 and said != (fresh.processId, fresh.numProcesses):
        raise ConfigurationError(
            f"{role} must be for the processes that ipufit finds, of which this is "
            f"{known[0]} of {known[1]}, but they are for process {said[0]} of {said[1]}. Leave "
            "Distributed.configureProcessId out, and start the processes with torchrun, mpirun or "
            "PopRun, or call ipufit.distributed."
        )
    if processes.is_distributed:
        group.configureProcessId(processes.process_id, processes.num_processes)
    else:
        group.disable()


def _check_popdist(
    sdk: Any, own: Any, options: Any, replicas: int, stages: int, processes: Processes, role: str
) -> None:
    if not isinstance(options, own.Options):
        raise ConfigurationError(
            f"{role} must be popdist.poptorch.Options in a process that PopRun has started, got "
            f"{sdk.__name__}.Options. Make them with "
            f"popdist.poptorch.Options(ipus_per_replica={stages}), or leave them out."
        )
    group = options.Distributed
    said = (group.processId, group.numProcesses)
    known = (processes.process_id, processes.num_processes)
    if said != known:
        raise ConfigurationError(
            f"PopRun and ipufit must find the same processes, but to PopRun this is process "
            f"{said[0]} of {said[1]}, and to ipufit {known[0]} of {known[1]}. Leave "
            "ipufit.distributed out, and start the processes with PopRun alone."
        )
    if options.replication_factor != replicas:
        found = options.replication_factor
        raise ConfigurationError(
            f"`ipus` must be those of the replicas that PopRun gives each process, {found} x "
            f"{stages} = {found * stages}, got {replicas * stages}. Pass ipus={found * stages}, or "
            f"start poprun with --num-replicas={replicas * processes.num_processes}."
        )


def fixes_replicas(sdk: Any) -> bool:
    """Tell whether all programs of this process have the replicas that PopRun says."""
    return _popdist(sdk) is not None


def _popdist(sdk: Any) -> Optional[Any]:
    """The module ``popdist.poptorch`` where PopRun has started this process, for this PopTorch."""
    try:
        popdist: Any = importlib.import_module("popdist")
    except ImportError:
        return None
    if not popdist.isPopdistEnvSet():
        return None
    own: Any = importlib.import_module("popdist.poptorch")
    # The stand-in has options of its own, with which PopDist does nothing.
    return own if issubclass(own.Options, sdk.Options) else None
