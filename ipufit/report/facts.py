"""What a report says of a model and of the machine, in plain values."""

from __future__ import annotations

import inspect
import os
import platform
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch import nn

from ipufit._version import __version__
from ipufit.analysis.partition_report import planned
from ipufit.core.batch import MicroBatch
from ipufit.core.plan import Plan
from ipufit.errors import IpufitError
from ipufit.partition.request import PartitionRequest
from ipufit.planner.partition_plan import PartitionPlan
from ipufit.tracing.layers import layers_of, note_calls, output_shapes
from ipufit.training.session import Session

__all__ = ["environment", "layers", "partition", "totals"]


def environment(session: Session) -> Dict[str, str]:
    """Versions, the device and the processes."""
    device = next((p.device for p in session.module.parameters()), torch.device("cpu"))
    name = str(device)
    if device.type == "cuda":
        name = f"{device} ({torch.cuda.get_device_name(device)})"
    found = {
        "ipufit": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "engine": session.engine.name,
        "device": name,
        "threads": str(torch.get_num_threads()),
        "cores": str(os.cpu_count()),
    }
    if session.processes.is_distributed:
        found["processes"] = session.processes.describe()
        found["report"] = "seconds, memory and warnings of process 0; losses and samples of all"
    return found


def layers(module: nn.Module, sample: MicroBatch) -> List[Dict[str, Any]]:
    """The tree of layers, with the file and line of each one's forward."""
    found = layers_of(module)
    shapes, used, failure = output_shapes(module, sample)
    if failure is None:
        note_calls(found, shapes, used)
    rows = []
    for layer in found:
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
    """Where forward is written, unless that is in torch."""
    forward = type(module).forward
    if getattr(forward, "__module__", "torch").partition(".")[0] == "torch":
        return None, None
    try:
        return inspect.getsourcefile(forward), inspect.getsourcelines(forward)[1]
    except (OSError, TypeError):
        return None, None


def totals(module: nn.Module) -> Dict[str, int]:
    """Numbers of parameters."""
    every = list(module.parameters())
    return {
        "parameters": sum(p.numel() for p in every),
        "trainable": sum(p.numel() for p in every if p.requires_grad),
    }


def _least(plan: PartitionPlan, utilisation: float) -> Optional[int]:
    """The accumulation that reaches it, if any does."""
    try:
        return plan.least_accumulation(utilisation)
    except IpufitError:
        return None


def partition(session: Session, plan: Plan) -> Dict[str, Any]:
    """The stages as :meth:`ipufit.Model.plan` has them, and the timeline of one update."""
    asked = PartitionRequest(None, None, None, None, None)
    if session.partitions.of(True) is None:
        # As it runs: on one IPU.
        asked = PartitionRequest(ipus_per_replica=1)
    try:
        found = planned(
            session, None, asked, (None, plan.gradient_accumulation), ("grouped", None, None)
        )
    except IpufitError as error:
        return {"missing": str(error)}
    line = found.timeline()
    return {
        **found.to_dict(),
        "least_accumulation": {str(used): _least(found, used) for used in (0.8, 0.9)},
        "timeline": {
            "tasks": [
                [task.stage, task.micro_batch, task.is_backward, task.begin, task.end]
                for task in line.tasks
            ],
            "total": line.total,
            "utilisation": line.utilisation,
            "schedule": found.planned.schedule,
        },
    }
