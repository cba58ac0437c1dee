"""Process group of a run: the rank of this process, collectives, and errors of other processes.

``current()`` is the group, and ``distributed()`` sets it by hand. ``group`` has the collectives of
whole trees and tensors, ``collectives`` those of sharded tensors, ``connection`` and
``heartbeat_store`` what happens when a process ends or is silent, ``launchers`` what torchrun,
OpenMPI, PopRun and Slurm say. Rooms above use what is exported here and ``collectives``; all ranks
make the same calls in the same order. One process alone imports no connection.
"""

from ipufit.processes.group import ALONE, Processes, common
from ipufit.processes.identity import current, distributed

__all__ = ["ALONE", "Processes", "common", "current", "distributed"]
