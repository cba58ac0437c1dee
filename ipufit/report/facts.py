"""Facts of a report in plain values: the machine, the module, its stages, the warnings of a run."""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
import warnings
from typing import Dict, Iterator, List, Optional, TextIO, Tuple, Type, Union

import torch
from torch import nn

from ipufit._version import __version__
from ipufit.callbacks.callback_list import ObservedSession
from ipufit.core.batch import MicroBatch
from ipufit.core.plan import Plan
from ipufit.errors import IpufitError
from ipufit.partition.request import PartitionRequest
from ipufit.planner.partition_plan import PartitionPlan
from ipufit.planner.plan_partition import plan_partition
from ipufit.report.run import OF_PROCESS, OF_TENSORS
from ipufit.tracing.layers import layers_of, note_calls, output_shapes
from ipufit.utils.devices import memory_of_tensors, name_of


def environment(session: ObservedSession, device: torch.device) -> Dict[str, str]:
    """Describe versions, the device and the processes of a run."""
    facts = {
        "ipufit": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "engine": session.engine.name,
        "device": name_of(device),
        "memory": OF_PROCESS if memory_of_tensors(device) is None else OF_TENSORS,
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
    }
    if session.processes.is_distributed:
        facts["processes"] = session.processes.describe()
        facts["report"] = "seconds, memory and warnings are of process 0; losses and samples of all"
    return facts


def layers(module: nn.Module, sample: MicroBatch) -> List[Dict[str, object]]:
    """List the layers of a module, with the file and line of the forward of each."""
    tree = layers_of(module)
    shapes, used, failure = output_shapes(module, sample)
    if failure is None:
        note_calls(tree, shapes, used)
    rows = []
    for layer in tree:
        file, line = _forward_of(layer.module)
        rows.append(
            {
                "name": layer.name,
                "depth": layer.depth,
                "kind": layer.kind,
                "parameters": layer.parameters,
                "trainable": layer.trainable,
                "shape": " / ".join(dict.fromkeys(shapes.get(layer.module, ()))),
                "notes": list(layer.notes),
                "file": file,
                "line": line,
            }
        )
    return rows


def _forward_of(module: nn.Module) -> Tuple[Optional[str], Optional[int]]:
    """Return file and line of a layer's forward; None for layers of torch."""
    forward = type(module).forward
    if getattr(forward, "__module__", "torch").partition(".")[0] == "torch":
        return None, None
    try:
        return inspect.getsourcefile(forward), inspect.getsourcelines(forward)[1]
    except (OSError, TypeError):
        return None, None


def totals(module: nn.Module) -> Dict[str, int]:
    """Count the parameters of a module, all and those that are trained."""
    every = list(module.parameters())
    return {
        "parameters": sum(p.numel() for p in every),
        "trainable": sum(p.numel() for p in every if p.requires_grad),
    }


def _least(plan: PartitionPlan, utilisation: float) -> Optional[int]:
    """Return the least accumulation that reaches a utilisation; None if none does."""
    try:
        return plan.least_accumulation(utilisation)
    except IpufitError:
        return None


def partition(session: ObservedSession, plan: Plan) -> Dict[str, object]:
    """Plan the stages as :meth:`ipufit.Model.plan` does, with the timeline of one update."""
    sample = session.sample
    assert sample is not None
    # As it runs: where nothing divides it, on one IPU.
    is_whole = session.divided.partitions.of(True) is None
    request = PartitionRequest(ipus_per_replica=1 if is_whole else None)
    try:
        partition_plan = plan_partition(
            session.divided,
            session.plan_estimator,
            lambda: sample,
            request,
            gradient_accumulation=plan.gradient_accumulation,
        )
    except IpufitError as error:
        return {"missing": str(error)}
    line = partition_plan.timeline()
    return {
        **partition_plan.to_dict(),
        "least_accumulation": {str(used): _least(partition_plan, used) for used in (0.8, 0.9)},
        "timeline": {
            "tasks": [
                [task.stage, task.micro_batch, task.is_backward, task.begin, task.end]
                for task in line.tasks
            ],
            "total": line.total,
            "utilisation": line.utilisation,
            "schedule": partition_plan.planned.schedule,
        },
    }


# Of a run that warns without end, the kinds of warnings that are kept.
_MOST = 200


class CapturedWarnings:
    """Counts the warnings of a run, which are shown as ever."""

    def __init__(self) -> None:
        self._counts: Dict[Tuple[str, str, str], int] = {}
        self.left_out = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Count the warnings that are shown in the block."""
        shown = warnings.showwarning

        def show(
            message: Union[Warning, str],
            category: Type[Warning],
            filename: str,
            lineno: int,
            file: Optional[TextIO] = None,
            line: Optional[str] = None,
        ) -> None:
            self._count(str(message), category.__name__, f"{filename}:{lineno}")
            shown(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        try:
            yield
        finally:
            # Whoever has put another one in its place keeps it.
            if warnings.showwarning is show:
                warnings.showwarning = shown

    def _count(self, text: str, category: str, place: str) -> None:
        key = (text, category, place)
        if key not in self._counts and len(self._counts) >= _MOST:
            self.left_out += 1
            return
        self._counts[key] = self._counts.get(key, 0) + 1

    def to_entries(self) -> List[Dict[str, object]]:
        """Return the warnings as ``run.json`` has them."""
        counts = dict(self._counts)
        if self.left_out:
            text = f"{self.left_out} more warnings, of other texts, are not kept."
            counts[text, "", ""] = 1
        return [
            {
                "kind": "warning",
                "text": text,
                "cure": "",
                "category": category,
                "place": place,
                "count": count,
            }
            for (text, category, place), count in counts.items()
        ]
