"""Memory in use while updates are made: what stays, and values that come and go."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import outputs_wanted
from ipufit.engines.embedded.profiling.live_bytes import bytes_in
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.engines.program import ProgramSpec
from ipufit.tracing.flat_storage import flat_of

__all__ = ["Point", "fixed_bytes", "thinned"]

# Operator, module, direction, and bytes of values while it runs.
Point = Tuple[str, str, str, int]

# A curve of more points is drawn through the highest of several.
_MOST = 2000


def fixed_bytes(
    spec: ProgramSpec,
    live: TrainingState,
    given: Sequence[Tensor],
    batch: MicroBatch,
    outputs: Sequence[Tensor],
    runs: int,
    at_once: bool,
) -> Dict[str, int]:
    """Bytes that are there all the time, by what they are.

    Args:
        spec: of the program.
        live: what training changes.
        given: parameters and buffers of the module and the loss.
        batch: a micro-batch.
        outputs: of the module, for it.
        runs: how often gradients are computed in an update.
        at_once: whether losses are looked at as they come.
    """
    storage, plan = live.storage, spec.plan
    buffers = bytes_in([t for own in live.replicas for t in own.values()])
    own = {id(t) for replica in live.replicas for t in replica.values()}
    apart = [t for t in given if id(t) not in own and flat_of(t, storage.flats) is None]
    weights = bytes_in([*storage.flats, *apart])
    optimizer = bytes_in(live.updater.state_tensors())
    averages = 0 if live.averages is None else bytes_in(live.averages.state_tensors())
    count = plan.own_micro_batches_per_update * plan.device_iterations
    wanted = 0
    if spec.want_outputs:
        mode, per_update = spec.config.output_mode, plan.own_micro_batches_per_update
        wanted = len(outputs_wanted(mode, count, per_update, plan.replicas))
        # Those that are added up are added to the first ones.
        wanted = min(wanted, plan.replicas) if mode.kind == "sum" else wanted
    # What an update goes back to where a loss is not finite; or an execution, where the host
    # looks at losses behind it.
    snapshot = buffers
    if not at_once or spec.config.detect_nan:
        snapshot = 2 * buffers if spec.config.detect_nan else buffers
        snapshot += bytes_in(storage.flats) + optimizer + averages
    return {
        "weights": weights,
        "buffers": buffers,
        "gradients": _gradient_bytes(spec, storage.flats) if runs > 1 else 0,
        "optimizer": optimizer + averages,
        "snapshot": snapshot,
        # The first micro-batch of all is kept to look at.
        "batch": (1 + count) * sum(leaf.numel() * leaf.element_size() for leaf in batch.leaves),
        "outputs": wanted * sum(t.numel() * t.element_size() for t in outputs),
    }


def _gradient_bytes(spec: ProgramSpec, flats: Sequence[Tensor]) -> int:
    """Bytes of the tensors that gradients are added up in."""
    dtype = spec.config.accumulation_dtype
    return sum(flat.numel() * _size(dtype or flat.dtype) for flat in flats)


def _size(dtype: torch.dtype) -> int:
    return int(torch.empty(0, dtype=dtype).element_size())


def thinned(points: Sequence[Point]) -> List[List[Any]]:
    """A curve of at most so many points that its peak is still there."""
    each = -(-len(points) // _MOST) or 1
    parts = [points[begin : begin + each] for begin in range(0, len(points), each)]
    highest = [max(part, key=lambda point: point[3]) for part in parts]
    return [[*point] for point in highest]
