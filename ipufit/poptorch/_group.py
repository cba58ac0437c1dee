"""Process group that trains one model: ``options.Distributed`` with more than one process.

PopTorch hands PopART ``num_processes * replicationFactor`` as the global replication factor and
``process_id * replicationFactor`` as this process's first replica
(``popart_compiler/source/Compiler.cpp`` of PopTorch 3.4). A gradient is summed over all of these
replicas, and divided by their number where it is a mean; random numbers differ between them.
Nothing else is shared: each process uploads weights and inputs of its own, and gets back what its
own replicas have computed.
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch
from torch import Tensor

from ipufit.poptorch._device import Device
from ipufit.poptorch._errors import error
from ipufit.poptorch.options import Options
from ipufit.processes import Processes, current

__all__ = ["Group"]


class Group:
    """All processes of a run, as one of them sees them.

    Args:
        options: number of processes, and the index of this one.
        training: whether gradients are added up. Inference needs no other process.

    Attributes:
        count: number of processes whose replicas make an update.
        number: index of this process.
    """

    def __init__(self, options: Options, training: bool) -> None:
        self.count = options.Distributed.numProcesses
        self.number = options.Distributed.processId
        self._trains = training and self.count > 1
        self._processes: Optional[Processes] = None
        self._written = 0

    def check(self, device: Device) -> None:
        """Check that the environment has the same processes, without communicating.

        Raises:
            Error: it does not, or replicas have parameters of their own.
        """
        if not self._trains:
            return
        processes = current()
        if (processes.process_id, processes.num_processes) != (self.number, self.count):
            says = "nothing of other processes"
            if processes.is_distributed:
                says = f"process {processes.process_id} of {processes.num_processes}"
            raise error(
                "a training model must reach the other processes that options.Distributed speaks "
                f"of, which makes this process {self.number} of {self.count}, but the environment "
                f"says {says}. Start all of them with torchrun, mpirun or PopRun, call "
                "ipufit.distributed with the same numbers, or train alone with "
                "options.Distributed.disable()."
            )
        if device.grouped:
            raise error(
                "replicaGrouping must leave a parameter the same on all replicas where several "
                f"processes train, which ipufit.poptorch does not cut up, but {device.grouped[0]!r}"
                " has several copies. Leave replicaGrouping out, or train in one process."
            )
        self._processes = processes

    def begin(self, device: Device, **facts: object) -> None:
        """Check that all processes are about to run the same program on the same weights.

        Args:
            device: device of this process.
            facts: properties that the programs must have in common.
        Raises:
            ProcessError: another process has gone.
            Error: they are not alike; an IPU would hang, or train different models.
        """
        if not self._trains:
            return
        assert self._processes is not None, "checked when the device was taken"
        rewritten = device.writes != self._written
        reports = self._processes.gather({"fresh": rewritten, **facts})
        for name in facts:
            for process, each in enumerate(reports):
                if each[name] != reports[0][name]:
                    shown = name.replace("_", " ")
                    raise error(
                        f"all processes must run the same program, but process 0 has {shown} "
                        f"{reports[0][name]} and process {process} has {each[name]}. Give all of "
                        "them the same options, and inputs of the same shapes."
                    )
        if any(each["fresh"] for each in reports):
            self._compare_weights(device)
        self._written = device.writes

    def _compare_weights(self, device: Device) -> None:
        assert self._processes is not None
        digests: List[Dict[str, str]] = self._processes.gather(_digests(device))
        for process, each in enumerate(digests):
            for name, digest in digests[0].items():
                if each.get(name) != digest:
                    raise error(
                        "all processes must begin with the same weights, as PopTorch does not "
                        f"bring them together, but {name!r} is another in process {process} than "
                        "in process 0. Seed torch alike before the module is made, or load one "
                        "file in all of them."
                    )

    def add(self, gradients: Mapping[Any, Tensor]) -> None:
        """Sum each gradient over all processes, in place."""
        if self._trains:
            assert self._processes is not None
            self._processes.add(list(gradients.values()))

    def all_of(self, numbers: Sequence[Tensor]) -> List[Tensor]:
        """Gather scalar tensors from all processes, each of which has as many of them."""
        if not self._trains or not numbers:
            return list(numbers)
        assert self._processes is not None
        row = torch.stack(list(numbers))
        rows = self._processes.gather_rows(row, [len(numbers)] * self.count)
        return list(torch.cat(rows))

    def place(self, step: int, replica: int, replicas: int) -> int:
        """Return the position of a micro-batch of this process in an update of all processes."""
        return (step * self.count + self.number) * replicas + replica


def _digests(device: Device) -> Dict[str, str]:
    """Hash each parameter of the device, by name."""
    digests = {}
    for name, part in device.parts(device.parameters).items():
        data = part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digests[name] = hashlib.sha256(data).hexdigest()[:16]
    return digests
