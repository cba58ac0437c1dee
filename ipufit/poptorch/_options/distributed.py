"""Options of a run over several processes."""

from __future__ import annotations

import os

from ipufit.poptorch._options.group import OptionGroup, need_type

__all__ = ["_DistributedOptions"]


def _number(variable: str, default: int) -> int:
    """Read an integer from the environment."""
    text = os.environ.get(variable, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"The environment variable {variable} must be an integer, got {text!r}. Unset it, or "
            "call options.Distributed.configureProcessId(process_id, num_processes)."
        ) from None


class _DistributedOptions(OptionGroup):
    """Index of this process, and number of processes: ``options.Distributed``.

    OpenMPI's environment variables are read when the options are made.
    """

    def __init__(self) -> None:
        self._gcd_mappings: object = {}
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> _DistributedOptions:
        """Use one process, whatever the environment says."""
        self.set(num_distributed_processes=1, distributed_process_id=0)
        return self

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        """Read both numbers from these environment variables; unset means one process.

        Raises:
            ValueError: a variable that is not an integer.
        """
        return self.configureProcessId(_number(var_process_id, 0), _number(var_num_processes, 1))

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        """Set the index of this process, from 0, and the number of processes.

        Raises:
            AssertionError: not an int.
            ValueError: no such process among so many.
        """
        self.checkIsFrozen()
        need_type("distributed_process_id", process_id, int)
        need_type("num_distributed_processes", num_processes, int)
        if not 0 <= process_id < num_processes:
            raise ValueError(
                f"process_id must be in 0 ... num_processes - 1, got process_id={process_id} and "
                f"num_processes={num_processes}. Number the processes from 0."
            )
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self) -> int:
        """Index of this process, from 0."""
        return int(self._values["distributed_process_id"])

    @property
    def numProcesses(self) -> int:
        """Number of processes."""
        return int(self._values["num_distributed_processes"])
