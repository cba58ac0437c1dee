"""Times the operators of one micro-batch, and finds out what memory its updates take."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import warnings
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import MicroBatch
from ipufit.core.compile_arguments import CUDAGRAPH, INDUCTOR
from ipufit.core.precision import WithoutAutocast
from ipufit.core.train_config import outputs_wanted
from ipufit.engines.embedded.profiling.operators import (
    GRADIENTS,
    NodeTimes,
    NodeWork,
    OperatorSource,
    OpRecord,
    bytes_in,
    places_of,
    profile_graph,
    rows_of,
    timer_for,
)
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.errors import CaptureError
from ipufit.optim.several import name_of_optimizer
from ipufit.tracing.flat_storage import flat_of
from ipufit.tracing.graph_analysis import peak_bytes
from ipufit.tracing.interpreter import InstrumentedInterpreter
from ipufit.tracing.recording import is_backward
from ipufit.tracing.source_map import Origin, trace_calls
from ipufit.utils.devices import is_out_of_memory

if TYPE_CHECKING:
    from ipufit.engines.embedded.batching import BatchedStep


# Operator, module, direction, and bytes of values while it runs.
Point = Tuple[str, str, str, int]

# A curve of more points is drawn through the highest of several.
_MOST = 2000


def thin_curve(points: Sequence[Point]) -> List[List[object]]:
    """A curve of at most so many points that its peak is still there."""
    each = -(-len(points) // _MOST) or 1
    parts = [points[begin : begin + each] for begin in range(0, len(points), each)]
    highest = [max(part, key=lambda point: point[3]) for part in parts]
    return [[*point] for point in highest]


# Rows of the products that are tried, until one takes so long, in seconds.
_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
_LONG = 0.02

# Bytes of what is copied: more than caches hold.
_COPIED = {"cpu": 2**26, "cuda": 2**29}

_TIMES = 3


@functools.lru_cache(maxsize=None)
def _peak_of(dtype: torch.dtype, device: torch.device) -> Dict[str, object]:
    """FLOPs and bytes per second that were reached on large tensors, measured once in a process.

    Returns:
        ``dtype``, ``flops`` and ``bytes``; None for what can't be measured.
    """
    return {
        "dtype": str(dtype).replace("torch.", ""),
        "flops": _products(dtype, device),
        "bytes": _copies(dtype, device),
    }


def _products(dtype: torch.dtype, device: torch.device) -> Optional[float]:
    best = 0.0
    for size in _SIZES:
        try:
            a, b, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
            seconds = _shortest(functools.partial(torch.mm, a, b, out=out), device)
        except RuntimeError:
            # A processor without products of this type, or without room for them.
            break
        best = max(best, 2 * size**3 / seconds)
        if seconds > _LONG:
            break
    return best or None


def _copies(dtype: torch.dtype, device: torch.device) -> Optional[float]:
    size = _COPIED.get(device.type, _COPIED["cpu"])
    count = size // _size(dtype)
    try:
        source, target = (torch.ones(count, dtype=dtype, device=device) for _ in range(2))
        seconds = _shortest(lambda: target.copy_(source), device)
    except RuntimeError:
        return None
    return 2 * size / seconds


def _size(dtype: torch.dtype) -> int:
    return int(torch.empty(0, dtype=dtype).element_size())


def _shortest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call."""
    timer = timer_for(device)
    call()
    best = math.inf
    for _ in range(_TIMES):
        begun = timer.begin()
        call()
        timer.end("", begun)
        timer.end_round()
        best = timer.seconds("")
        if best > _LONG:
            break
    return best


# Rounds at most, and seconds after which no other one begins.
_ROUNDS, _ENOUGH = 7, 0.3

_EAGERLY = "the module itself runs, so there is no recording whose operators could be timed"
DIVIDED = "the weights are divided over processes, and one process alone can't run a micro-batch"
_NO_ROOM = "there was not enough memory for copies of the weights: {}"

_COMPILED = (
    "Updates run compiled as a whole; these are the operators that were compiled, and the memory "
    "that they take one by one."
)
_CAPTURED = "Executions replay CUDA graphs; these are the operators that were captured."
_MERGED = (
    "{} micro-batches run as one larger batch: operators are those of one micro-batch alone, "
    "memory is that of the larger batch."
)


@dataclasses.dataclass
class OperatorProfiler:
    """Runs copies of a micro-batch and its state; nothing is changed.

    Args:
        live: the state.
        recorded: what runs a micro-batch.
        batch: a full one, on its device.
        jit: the value that stands for how updates run; None where they run as recorded.
        merged: takes several micro-batches at once, where an update is made of such; None: never.
        seed: starts the random numbers of the micro-batch.
        at_once: whether losses are looked at as they come.
    """

    live: TrainingState
    recorded: TracedStep
    batch: MicroBatch
    jit: Optional[str]
    merged: Optional[BatchedStep]
    seed: Callable[[], None]
    at_once: bool

    def run(self) -> Dict[str, object]:
        """Return the entry ``operators`` of :mod:`ipufit.report.run`."""
        if self.recorded.graph is None or self.recorded.lowered.graph is None:
            return {"missing": _EAGERLY}
        try:
            return self._run()
        except CaptureError as error:
            return {"missing": str(error)}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return {"missing": _NO_ROOM.format(str(error).partition("\n")[0])}

    def _run(self) -> Dict[str, object]:
        recorded, graph = self.recorded, self.recorded.lowered.graph
        assert recorded.graph is not None
        assert graph is not None
        device = self.batch.leaves[0].device
        timer = timer_for(device)
        arguments = [
            tensor.clone()
            for tensor in self.live.call_arguments(self.live.states[0], self.batch.leaves)
        ]
        self.seed()
        start = time.perf_counter()
        work, results = profile_graph(graph, timer, arguments)
        timer.end_round()
        timed_run = InstrumentedInterpreter(graph, [NodeTimes(timer)]).run
        rounds, timed = 1, WithoutAutocast(timed_run, arguments)
        while rounds < _ROUNDS and time.perf_counter() - start < _ENOUGH:
            self.seed()
            timed(*arguments)
            timer.end_round()
            rounds += 1
        with warnings.catch_warnings():
            # Heard when the program was recorded.
            warnings.simplefilter("ignore")
            calls = trace_calls(recorded.micro, self.live.step, arguments)
        places = places_of(graph, recorded.graph, calls)
        _, outputs, gradients = recorded.micro.split_results(results)
        rows = rows_of(work.records, places, timer.seconds)
        # In which most of the graph is computed.
        dtype = self.live.spec.config.precision.autocast or self.live.storage.flats[0].dtype
        return {
            "micro_batch_size": self.batch.size,
            "way": recorded.lowered.way,
            "device": str(device),
            "timed": f"node by node, {timer.method}; the shortest time of {rounds} rounds",
            "note": self._note(),
            "rows": rows + self._optimizer_rows(gradients),
            "peak": _peak_of(dtype, device),
            "memory": self._memory(work, places, outputs, gradients),
        }

    def _note(self) -> str:
        if self.jit == CUDAGRAPH:
            return _CAPTURED
        if self.jit == INDUCTOR:
            return _COMPILED
        return "" if self.merged is None else _MERGED.format(self.merged.count)

    def _memory(
        self,
        work: NodeWork,
        places: Dict[str, OperatorSource],
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> Dict[str, object]:
        config, merged = self.live.spec.config, self.merged
        runs = self.live.spec.plan.own_micro_batches_per_update
        if merged is not None and merged.lowered.graph is not None:
            work, places = self._merged_work(merged, merged.lowered.graph), {}
            runs //= merged.count
        points: List[Point] = []
        for node, live_bytes in work.alive:
            place = places.get(node.name)
            if place is None:
                # Whose it is nobody has noted.
                place = OperatorSource(Origin(""), "backward" if is_backward(node) else "forward")
            operator = work.records[node.name].operator
            points.append((operator, place.module, place.direction, live_bytes))
        gradient_bytes = bytes_in(gradients)
        if runs > 1 and config.accumulation_dtype is not None:
            added = bytes_in([g.to(config.accumulation_dtype) for g in gradients])
            points.append(("aten.add_.Tensor", GRADIENTS, "backward", gradient_bytes + added))
        update = self.live.updater.recorded()
        during = 0 if update is None else peak_bytes(update)
        during += (runs == 1) * gradient_bytes
        points.append((name_of_optimizer(self.live.spec.optimizer), "", "optimizer", during))
        fixed = self._fixed_bytes(outputs, runs)
        peak = max(point[3] for point in points)
        return {
            "fixed": fixed,
            "curve": thin_curve(points),
            "peak": peak,
            "total": sum(fixed.values()) + peak,
        }

    def _fixed_bytes(self, outputs: Sequence[Tensor], runs: int) -> Dict[str, int]:
        """Bytes that are there all the time, by what they are.

        Args:
            outputs: of the module, for a micro-batch.
            runs: how often gradients are computed in an update.
        """
        live, config, plan = self.live, self.live.spec.config, self.live.spec.plan
        flats, leaves = live.storage.flats, self.batch.leaves
        in_replicas = [t for replica in live.replicas for t in replica.values()]
        ids = {id(t) for t in in_replicas}
        apart = [
            t
            for t in (*self.live.step.parameters(), *self.live.step.buffers())
            if id(t) not in ids and flat_of(t, flats) is None
        ]
        buffers = bytes_in(in_replicas)
        optimizer = bytes_in(live.updater.state_tensors())
        averages = 0 if live.averages is None else bytes_in(live.averages.tensors)
        count = plan.own_micro_batches_per_update * plan.device_iterations
        wanted = 0
        if self.live.spec.want_outputs:
            chosen, per_update = config.outputs, plan.own_micro_batches_per_update
            wanted = len(outputs_wanted(chosen, count, per_update, plan.replicas))
            # Those that are added up are added to the first ones.
            wanted = min(wanted, plan.replicas) if chosen.mode == "sum" else wanted
        # What an update goes back to where a loss is not finite; or an execution, where the host
        # looks at losses behind it.
        snapshot = buffers
        if not self.at_once or config.detect_nan:
            snapshot = 2 * buffers if config.detect_nan else buffers
            snapshot += bytes_in(flats) + optimizer + averages
        # Of the tensors that gradients are added up in.
        gradients = sum(
            flat.numel() * _size(config.accumulation_dtype or flat.dtype) for flat in flats
        )
        return {
            "weights": bytes_in([*flats, *apart]),
            "buffers": buffers,
            "gradients": gradients if runs > 1 else 0,
            "optimizer": optimizer + averages,
            "snapshot": snapshot,
            # The first micro-batch of all is kept to look at.
            "batch": (1 + count) * sum(leaf.numel() * leaf.element_size() for leaf in leaves),
            "outputs": wanted * sum(t.numel() * t.element_size() for t in outputs),
        }

    def _merged_work(self, merged: BatchedStep, graph: fx.GraphModule) -> NodeWork:
        """Profile a run of several micro-batches as one larger batch."""
        batches = [self.batch] * merged.count
        arguments = [t.clone() for t in (*self.live.states[0], *merged.step.arguments(batches))]
        return profile_graph(graph, timer_for(arguments[-1].device), arguments)[0]

    def _optimizer_rows(self, gradients: Sequence[Tensor]) -> List[Dict[str, object]]:
        """Make the row of a weight update, where it can be tried on copies."""
        live = self.live
        update = live.updater.aside(_ROUNDS)
        if update is None:
            return []
        timer = timer_for(gradients[0].device)
        for _ in range(_ROUNDS):
            begun = timer.begin()
            update(gradients)
            timer.end("", begun)
            timer.end_round()
        changed = bytes_in([*live.storage.flats, *live.updater.state_tensors()])
        record = OpRecord(
            name_of_optimizer(self.live.spec.optimizer), 0, 2 * changed + bytes_in(gradients)
        )
        return rows_of({"": record}, {"": OperatorSource(Origin(""), "optimizer")}, timer.seconds)
