"""Times the operators of one micro-batch, and finds out what memory its updates take."""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.engines.embedded.liveness import peak_bytes
from ipufit.engines.embedded.noted import noted
from ipufit.engines.embedded.origins import LOSS, Origin
from ipufit.engines.embedded.precision import without_autocast
from ipufit.engines.embedded.profiling.held import bytes_in
from ipufit.engines.embedded.profiling.machine import peak_of
from ipufit.engines.embedded.profiling.memory import Point, fixed_bytes, thinned
from ipufit.engines.embedded.profiling.places import GRADIENTS, origins_of
from ipufit.engines.embedded.profiling.timers import timer_for
from ipufit.engines.embedded.profiling.watched import Looked, TimedRun, WatchedRun
from ipufit.errors import CaptureError
from ipufit.program import MicroBatch, ProgramSpec

if TYPE_CHECKING:
    from ipufit.engines.embedded.engine import Recorded
    from ipufit.engines.embedded.live import LiveState
    from ipufit.engines.embedded.step import StepModule
    from ipufit.engines.embedded.update import UpdateMaker

__all__ = ["DIVIDED", "Profiling"]

# Rounds at most, and seconds after which no other one begins.
_ROUNDS, _ENOUGH = 7, 0.3

_EAGERLY = "the module itself runs, without a recording whose operators could be timed"
DIVIDED = "weights lie in parts, and one process alone can't run a micro-batch"
_NO_ROOM = "there was no memory for copies of the weights: {}"

_COMPILED = "Updates run compiled as a whole; these are the operators that were compiled."
_CAPTURED = "Executions replay CUDA graphs; these are the operators that were captured."
_MERGED = (
    "{} micro-batches run as one larger batch: operators are those of one micro-batch alone, "
    "memory is that of the larger batch."
)


@dataclasses.dataclass
class Profiling:
    """Runs copies of a micro-batch and its state; nothing is changed.

    Args:
        spec: of the program.
        step: the user's module with the loss.
        live: the state.
        recorded: what runs a micro-batch.
        batch: a full one, on its device.
        maker: of updates.
        seed: starts the random numbers of the micro-batch.
        captured: whether executions are CUDA graphs.
    """

    spec: ProgramSpec
    step: StepModule
    live: LiveState
    recorded: Recorded
    batch: MicroBatch
    maker: UpdateMaker
    seed: Callable[[], None]
    captured: bool

    def run(self) -> Dict[str, Any]:
        """What :mod:`ipufit.report.files` has under ``operators``."""
        if self.recorded.graph is None or self.recorded.lowered.graph is None:
            return {"missing": _EAGERLY}
        try:
            return self._run()
        except CaptureError as error:
            return {"missing": str(error)}
        except (MemoryError, RuntimeError) as error:
            if "memory" not in str(error):
                raise
            return {"missing": _NO_ROOM.format(str(error).partition("\n")[0])}

    def _run(self) -> Dict[str, Any]:
        recorded, graph = self.recorded, self.recorded.lowered.graph
        assert recorded.graph is not None
        assert graph is not None
        device = self.batch.leaves[0].device
        timer = timer_for(device)
        given = self._arguments()
        self.seed()
        start = time.perf_counter()
        watched = WatchedRun(graph, timer, given)
        results = without_autocast(watched.run, given)(*given)
        timer.end_round()
        rounds, timed = 1, without_autocast(TimedRun(graph, timer).run, given)
        while rounds < _ROUNDS and time.perf_counter() - start < _ENOUGH:
            self.seed()
            timed(*given)
            timer.end_round()
            rounds += 1
        with warnings.catch_warnings():
            # Heard when the program was recorded.
            warnings.simplefilter("ignore")
            calls = noted(recorded, self.step, given)
        places = {
            name: _Place.of(origin, turned)
            for name, (origin, turned) in origins_of(graph, recorded.graph, calls).items()
        }
        rows = _rows(watched.looked, places, timer.seconds)
        return {
            "micro_batch_size": self.batch.size,
            "way": recorded.lowered.way,
            "device": str(device),
            "timed": f"node by node, {timer.said}; the shortest time of {rounds} rounds",
            "note": " ".join(self._notes()),
            "rows": rows + self._optimizer_rows(results),
            "peak": peak_of(self._dtype(), device),
            "memory": self._memory(watched, places, results),
        }

    def _arguments(self) -> List[Tensor]:
        """The state, of its own so that it may change, and the batch."""
        leaves = [leaf.clone() for leaf in self.batch.leaves]
        scaler = self.live.scaler
        scale = [] if scaler is None else [scaler.tensor(leaves[0].device)]
        return [*(tensor.clone() for tensor in self.live.states[0]), *leaves, *scale]

    def _dtype(self) -> torch.dtype:
        """In which most is computed."""
        return self.spec.recipe.precision.autocast or self.live.storage.flats[0].dtype

    def _notes(self) -> Iterator[str]:
        if self.captured:
            yield _CAPTURED
        elif self.maker.compiled is not None:
            yield _COMPILED
        elif self.maker.merged is not None:
            yield _MERGED.format(self.maker.merged.count)

    def _memory(
        self, watched: WatchedRun, places: Dict[str, _Place], results: Sequence[Tensor]
    ) -> Dict[str, Any]:
        recipe, merged = self.spec.recipe, self.maker.merged
        runs, alive = self.spec.plan.own_micro_batches_per_update, watched.alive
        if merged is not None and merged.graph is not None:
            alive, places = self._alive_of_merged(), {}
            runs //= merged.count
        points: List[Point] = []
        for name, operator, held in alive:
            place = places.get(name, _UNKNOWN)
            points.append((operator, place.module, place.direction, held))
        blocks = len(self.live.storage.blocks)
        gradients = bytes_in(results[len(results) - blocks :])
        if runs > 1 and recipe.accumulation_dtype is not None:
            added = [g.to(recipe.accumulation_dtype) for g in results[len(results) - blocks :]]
            points.append(("aten.add_.Tensor", GRADIENTS, "backward", gradients + bytes_in(added)))
        update = self.live.updater.recorded()
        during = 0 if update is None else peak_bytes(update)
        points.append((_name_of(self.spec), "", "optimizer", during + (runs == 1) * gradients))
        fixed = fixed_bytes(
            self.spec,
            self.live,
            [*self.step.parameters(), *self.step.buffers()],
            self.batch,
            results[: len(results) - blocks][1:],
            runs,
            self.maker.at_once,
        )
        peak = max(point[3] for point in points)
        return {
            "fixed": fixed,
            "curve": thinned(points),
            "peak": peak,
            "total": sum(fixed.values()) + peak,
        }

    def _alive_of_merged(self) -> List[Tuple[str, str, int]]:
        """The memory of values while several micro-batches run as one."""
        merged = self.maker.merged
        assert merged is not None
        assert merged.graph is not None
        batches = [self.batch] * merged.count
        given = [t.clone() for t in (*self.live.states[0], *merged.step.arguments(batches))]
        watched = WatchedRun(merged.graph, timer_for(given[-1].device), given)
        without_autocast(watched.run, given)(*given)
        return watched.alive

    def _optimizer_rows(self, results: Sequence[Tensor]) -> List[Dict[str, Any]]:
        """One for a weight update, where it can be tried on copies."""
        blocks, live = len(self.live.storage.blocks), self.live
        gradients = list(results[len(results) - blocks :])
        update = live.updater.aside(_ROUNDS)
        if update is None:
            return []
        timer = timer_for(gradients[0].device)
        for _ in range(_ROUNDS):
            begun = timer.begin()
            update(gradients)
            timer.end("", begun)
            timer.end_round()
        changed = bytes_in([*live.storage.flats, *live.updater.held()])
        looked = Looked(_name_of(self.spec), 0, 2 * changed + bytes_in(gradients))
        return _rows({"": looked}, {"": _Place(Origin("", ""), "optimizer")}, timer.seconds)


def _name_of(spec: ProgramSpec) -> str:
    """What stands for a weight update among operators."""
    return type(spec.optimizer).__name__


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an operator comes from, and in which pass it runs."""

    origin: Origin
    direction: str

    @staticmethod
    def of(origin: Origin, turned: bool) -> _Place:
        return _Place(origin, "backward" if turned else "forward")

    @property
    def module(self) -> str:
        """Its name; of what belongs to no module, what it does."""
        if self.origin.module is not None:
            return self.origin.module
        return GRADIENTS if self.direction == "backward" else LOSS


_UNKNOWN = _Place(Origin(""), "forward")


def _rows(
    looked: Dict[str, Looked], places: Dict[str, _Place], seconds: Callable[[str], float]
) -> List[Dict[str, Any]]:
    """One for all calls of an operator that come from one line, the longest first."""
    found: Dict[Any, Dict[str, Any]] = {}
    for name, each in looked.items():
        place = places[name]
        origin = place.origin
        key = (each.operator, place.direction, place.module, origin.file, origin.line)
        row = found.setdefault(
            key,
            {
                "operator": each.operator,
                "direction": place.direction,
                "module": place.module,
                "kind": origin.kind,
                "file": origin.file,
                "line": origin.line,
                "source": origin.source,
                "calls": 0,
                "seconds": 0.0,
                "flops": 0,
                "bytes": 0,
            },
        )
        row["calls"] += 1
        row["seconds"] += seconds(name)
        row["flops"] += each.flops
        row["bytes"] += each.bytes
    return sorted(found.values(), key=lambda row: -row["seconds"])
