"""Search for the partition whose slowest stage is the fastest, among those that fit memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import TrainConfig
from ipufit.errors import PartitionError
from ipufit.losses import Loss
from ipufit.partition.layers_per_ipu import stacks_of
from ipufit.partition.partition import Partition
from ipufit.planner.costs import IPU_MEMORY, Costs, StageCost, by_ipu, memory_of, state_bytes
from ipufit.planner.measure import CallTrace, measure
from ipufit.planner.pipeline_schedule import SCHEDULES, PipelineSchedule, in_flight
from ipufit.planner.rendering import size
from ipufit.tracing.grad_step import ModuleWithLoss

# Time of the slowest stage, sum of squares of all times, first part of every stage.
_Found = Tuple[float, float, Tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class _SplitPoint:
    """A place where a stage may begin.

    Attributes:
        name: of the module that would begin it.
        segment: its call in the trace.
    """

    name: str
    segment: int


@dataclasses.dataclass(frozen=True)
class _TiedTail:
    """Last part of a module, which may go back to the IPU of an earlier stage for a weight there.

    Attributes:
        cut: where it begins; it goes on to the end.
        first, last: segments between which the weights are used before; no stage begins there.
    """

    cut: _SplitPoint
    first: int
    last: int


def _tail_of(trace: CallTrace, module: nn.Module) -> Optional[_TiedTail]:
    """The last module that reads a weight again, such as a head that is tied to the embedding."""
    names = {f"net.{name}" for name, _ in module.named_parameters()}
    calls = [segment.name for segment in trace.segments]
    before: Dict[str, Set[int]] = {}
    for number, segment in enumerate(trace.segments):
        for name in segment.state & names:
            before.setdefault(name, set()).add(number)
    for number in range(len(calls) - 1, 0, -1):
        name = calls[number]
        again = [before[n] for n in trace.segments[number].state & names if min(before[n]) < number]
        if again and name and calls.count(name) == 1 and not _is_weight(name):
            later = [uses for uses in before.values() if max(uses) >= number]
            earlier = {use for uses in later for use in uses if use < number}
            return _TiedTail(_SplitPoint(name, number), min(earlier), max(earlier))
    return None


def spans_of(trace: CallTrace, module: nn.Module, end: int) -> List[Tuple[int, int]]:
    """First and last segment of each parameter's use, by operators and by calls of its module.

    Between the two no stage may begin: a parameter is on one IPU.

    Args:
        trace: of a forward pass.
        module: the user's module.
        end: segments from this one on don't count.
    """
    calls = trace.calls()
    firsts = {id(part): name for name, part in module.named_modules()}
    used: Dict[int, Set[int]] = {}
    ids = {f"net.{name}": id(parameter) for name, parameter in module.named_parameters()}
    for number, segment in enumerate(trace.segments):
        for name in segment.state:
            if name in ids:
                used.setdefault(ids[name], set()).add(number)
    for part in module.modules():
        name = firsts[id(part)]
        while name and name not in calls:
            name = name.rpartition(".")[0]
        for parameter in part._parameters.values():
            if parameter is not None and name:
                used.setdefault(id(parameter), set()).update(calls[name])
    before_end = [{one for one in where if one < end} for where in used.values()]
    return [(min(where), max(where)) for where in before_end if where]


def cuts_of(
    trace: CallTrace, module: nn.Module, fine: bool, tail: Optional[_TiedTail] = None
) -> List[_SplitPoint]:
    """Find where stages may begin, in the order of execution.

    A module that is called once, and no parameter of which is used on both sides. What does no work
    of its own, such as a Flatten, or none in inference, such as a Dropout, begins none.

    Args:
        trace: of a forward pass.
        module: the user's module.
        fine: False takes a block of repeated layers as a whole, and of other modules those that
            hold no others.
        tail: what is a stage already, behind all others; None for nothing.
    """
    end = len(trace.segments) if tail is None else tail.cut.segment
    calls = trace.calls()
    blocks = () if fine else tuple(layer for s in stacks_of(module) for layer in s.layers)
    inner = tuple(f"{block}." for block in blocks)
    spans = spans_of(trace, module, end)
    if tail is not None:
        spans.append((tail.first, tail.last))
    points: List[_SplitPoint] = []
    for name, where in calls.items():
        is_once = len(where) == 1 and where[0] < end
        if not name or not is_once or name.startswith(inner) or _is_weight(name):
            continue
        inside = (
            other for other in calls if other.startswith(f"{name}.") and not _is_weight(other)
        )
        if not fine and name not in blocks and any(inside):
            continue
        if points and any(first < where[0] <= last for first, last in spans):
            continue
        points.append(_SplitPoint(name, where[0]))
    points.sort(key=lambda cut: cut.segment)
    # In inference a stage that begins with a dropout, and ends there, would compute nothing.
    idle = {n for n, m in module.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd)}
    return _working(trace, points, end, idle)


def _is_weight(name: str) -> bool:
    """True if the module computes a parameter, as weight_norm's does, when a layer reads it."""
    return "parametrizations" in name.split(".")


def _working(
    trace: CallTrace, cuts: Sequence[_SplitPoint], end: int, idle: Set[str]
) -> List[_SplitPoint]:
    """Keep the cuts before which and after which something is computed."""

    def works(begin: int, end: int) -> bool:
        return any(s.forward.clocks and s.name not in idle for s in trace.segments[begin:end])

    working = list(cuts[:1])
    for cut in cuts[1:]:
        last = working[-1]
        if works(last.segment if len(working) > 1 else 0, cut.segment):
            working.append(cut)
        elif len(working) > 1 and not cut.name.startswith(f"{last.name}."):
            # A module that begins with another one keeps the place; what does nothing loses it.
            working[-1] = cut
    while len(working) > 1 and not works(working[-1].segment, end):
        working.pop()
    return working


def best_cuts(
    parts: int,
    stages: int,
    time: Callable[[int, int], float],
    fits: Callable[[int, int, int], bool],
    limit: float = math.inf,
) -> Optional[Tuple[int, ...]]:
    """First part of every stage, such that the slowest stage is as fast as it can be.

    Of equally slow ones that which is more even. Dynamic programming over (stages, parts).

    Args:
        parts: how many there are, in a fixed order; every stage gets at least one.
        stages: how many to make.
        time: of a stage of the parts from one to before another; with more parts it takes longer.
        fits: whether a stage (its number first) of these parts fits memory; with more parts it
            takes more.
        limit: no stage may take longer.

    Returns:
        None where nothing fits.
    """
    best: Dict[int, _Found] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        following: Dict[int, _Found] = {}
        for begin, (slowest, spread, begins) in best.items():
            for end in range(begin + 1, parts - (stages - stage - 1) + 1):
                if stage == stages - 1 and end < parts:
                    continue
                clocks = time(begin, end)
                if clocks > limit or not fits(stage, begin, end):
                    break
                candidate = (max(slowest, clocks), spread + clocks * clocks, (*begins, begin))
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        best = following
    return best[parts][2] if parts in best else None


def _best_division(
    costs: Costs,
    cuts: Sequence[_SplitPoint],
    stages: int,
    schedule: PipelineSchedule,
    recompute: bool,
    memory: Optional[int],
    limit: float = math.inf,
    tail: Optional[_TiedTail] = None,
) -> Optional[Tuple[Tuple[_SplitPoint, ...], float]]:
    """The beginnings of the stages; the first takes what comes before its cut too.

    Args:
        costs: of the trace.
        cuts: where stages may begin.
        stages: how many.
        schedule: of the pipeline.
        recompute: whether activations are recomputed.
        memory: bytes of an IPU; None for no limit.
        limit: clocks that no stage may exceed.
        tail: what is a stage more, behind all others and on the IPU of the one with its weights.

    Returns:
        These, and the clocks of the slowest stage or IPU; None where there are too few cuts or
        nothing fits.
    """
    if len(cuts) < stages:
        return None
    whole = len(costs.trace.segments)
    end = whole if tail is None else tail.cut.segment
    bounds = [0, *(cut.segment for cut in cuts[1:]), end]
    table: List[List[StageCost]] = [[] for _ in cuts]
    to_come = [costs.ranges(bounds[i], bounds[i + 1 :]) for i in range(len(cuts))]

    def of(begin: int, end: int) -> StageCost:
        while len(table[begin]) < end - begin:
            table[begin].append(next(to_come[begin]))
        return table[begin][end - begin - 1]

    depth = stages if tail is None else stages + 1
    # The last stage has one micro-batch in flight, all others have several or one.
    flights = in_flight(schedule, 0, depth)
    behind = None if tail is None else costs.of(end, whole)

    def has_tail(begin: int, end: int) -> bool:
        return tail is not None and bounds[begin] <= tail.first < bounds[end]

    def time(begin: int, end: int) -> float:
        cost = of(begin, end)
        is_last = behind is None and end == len(cuts)
        amount = cost.forward_clocks + cost.backward(1 if is_last else flights, recompute)
        if behind is not None and has_tail(begin, end):
            amount += behind.forward_clocks + behind.backward(1, recompute)
        return amount

    def fits(stage: int, begin: int, end: int) -> bool:
        if memory is None:
            return True
        amount = of(begin, end).memory(stage, depth, schedule, recompute)
        if behind is not None and has_tail(begin, end):
            amount += behind.memory(stages, depth, schedule, recompute)
        return amount <= memory

    begins = best_cuts(len(cuts), stages, time, fits, limit)
    if begins is None:
        return None
    slowest = max(time(begin, end) for begin, end in zip(begins, [*begins[1:], len(cuts)]))
    return tuple(cuts[begin] for begin in begins), slowest


# A block is cut, or a stage more is made, only where the slowest one becomes so much faster.
_WORTH = 1.05


def schedule_of(strategy: str, schedule: Optional[PipelineSchedule] = None) -> PipelineSchedule:
    """Find the schedule: PopTorch's, or the requested one; "sequential" where sharded."""
    if strategy == "sharded":
        return "sequential"
    return schedule or SCHEDULES[0]


class Divided(NamedTuple):
    """Stages of a division and their costs.

    Attributes:
        costs: what the stages take, in their order.
        places: the IPU of each, where the last one goes back to an earlier IPU; else none.
    """

    costs: List[StageCost]
    places: Tuple[int, ...] = ()


class PartitionEstimator:
    """Traces a model once, and says what its divisions take.

    Args:
        module: the user's module.
        loss: its normal form.
        optimizer: None for a model that only evaluates and predicts.
        config: precision and accumulation.
        sample: a micro-batch.
        partition: whose rules are checked on the way; None for one that is yet to be found.
        recompute: layers from whose outputs recomputation starts, besides the inputs of stages.

    Raises:
        CaptureError: the module needs a value.
        PartitionError: the partition can't work, or the optimizer's state can't be found out.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: Optional[torch.optim.Optimizer],
        config: TrainConfig,
        sample: MicroBatch,
        partition: Optional[Partition] = None,
        recompute: Sequence[str] = (),
    ) -> None:
        groups = optimizer.param_groups if optimizer is not None else []
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        precision, wide = config.precision, config.accumulation_dtype
        trace = measure(module, loss, sample, trained, precision, partition, recompute)
        states = state_bytes(optimizer) if optimizer is not None else {}
        if config.offload_optimizer_state:
            states = dict.fromkeys(states, 0)
        self._module = module
        self._costs = Costs(trace, ModuleWithLoss(module, loss), states, wide)

    @property
    def unused(self) -> Tuple[str, ...]:
        """Parameters that the module does not use."""
        return tuple(self._costs.unused)

    @property
    def _trace(self) -> CallTrace:
        return self._costs.trace

    def estimate(self, partition: Optional[Partition]) -> List[StageCost]:
        """Estimate the costs of the stages of a partition, in their order.

        Raises:
            PartitionError: it is that of the module's own blocks, which has no names.
        """
        if partition is None or partition.stages == 1:
            return [self._costs.of(0, len(self._trace.segments), self._first())]
        if not partition.begins:
            raise PartitionError(
                "plan needs the modules that begin the stages, but this model is divided by its "
                "own blocks. Pass stages={'name of a module': number of its stage}, or "
                "stages='auto'."
            )
        calls = self._trace.calls()
        starts: Dict[int, _SplitPoint] = {}
        for name, stage in partition.begins:
            cut = _SplitPoint(name, calls[name][0])
            if stage not in starts or cut.segment < starts[stage].segment:
                starts[stage] = cut
        for number, stage in self._trace.placed.items():
            if stage not in starts or number < starts[stage].segment:
                starts[stage] = _SplitPoint(self._trace.segments[number].name, number)
        starts.setdefault(0, _SplitPoint(self._first(), 0))
        return self._along([starts[stage] for stage in range(partition.stages)])

    def divide(
        self,
        stages: int,
        schedule: PipelineSchedule,
        recompute: bool = False,
        memory: Optional[int] = None,
    ) -> Optional[Divided]:
        """Find the best division into so many stages.

        Args:
            stages: how many, each on an IPU; there may be one more, which goes back to one of them
                for a weight that is there.
            schedule: of the pipeline.
            recompute: whether activations are recomputed.
            memory: bytes of an IPU; None for no limit.

        Returns:
            It; None where nothing fits.

        Raises:
            PartitionError: no so many can be made.
        """
        if stages == 1:
            whole = self._costs.of(0, len(self._trace.segments), self._first())
            bytes_needed = whole.memory(0, 1, schedule, recompute)
            return Divided([whole]) if memory is None or bytes_needed <= memory else None
        most, limit = 0, math.inf
        best: Optional[Tuple[Tuple[_SplitPoint, ...], Optional[_TiedTail]]] = None
        tails = [None, _tail_of(self._trace, self._module)]
        for tail in tails if tails[1] is not None else tails[:1]:
            for fine in (False, True):
                cuts = cuts_of(self._trace, self._module, fine, tail)
                most = max(most, len(cuts))
                how = (schedule, recompute, memory)
                division = _best_division(self._costs, cuts, stages, *how, limit, tail)
                if division is not None:
                    best, limit = (division[0], tail), division[1] / _WORTH
        if best is not None:
            return self._with_tail(*best)
        if most < stages:
            raise PartitionError(
                f"the module can be divided into {most} stage{'s' if most != 1 else ''} at most, "
                f"got {stages}: a stage begins with a module that is called once, and none "
                "begins between two uses of a parameter. Use fewer IPUs, or untie weights."
            )
        return None

    def divide_automatically(
        self, stages: int, strategy: str, recompute: bool = False
    ) -> Tuple[Tuple[Tuple[str, int], ...], Tuple[int, ...]]:
        """Divide as ``Parallel(stages="auto")`` does: the modules that begin a stage.

        And the IPU of each stage, where one goes back.

        Raises:
            PartitionError: no so many stages can be made, or they don't fit memory.
        """
        kind = schedule_of(strategy)
        division = self.divide(stages, kind, recompute, IPU_MEMORY)
        if division is None:
            least = self.divide(stages, kind, recompute)
            assert least is not None
            most = max(by_ipu(memory_of(least.costs, kind, recompute), least.places))
            how = "recomputed" if recompute else "kept"
            raise PartitionError(
                f"stages='auto' must find stages that fit in an IPU's {size(IPU_MEMORY)}, but no "
                f"division into {stages} does: in the most even one, the largest stage needs about "
                f"{size(most)}, with activations {how}. Use a larger ipus_per_replica or smaller "
                "micro-batches, or name the stages, which are not checked."
            )
        begins = ((cost.name, stage) for stage, cost in enumerate(division.costs) if cost.name)
        return tuple(begins), division.places

    def _with_tail(self, cuts: Sequence[_SplitPoint], tail: Optional[_TiedTail]) -> Divided:
        """Stages that begin at these cuts, and what goes back behind them."""
        if tail is not None:
            starts = [0, *(cut.segment for cut in cuts[1:])]
            home = max(stage for stage, start in enumerate(starts) if start <= tail.first)
            if home < len(cuts) - 1:  # else it is there already
                return Divided(self._along([*cuts, tail.cut]), (*range(len(cuts)), home))
        return Divided(self._along(cuts))

    def _along(self, cuts: Sequence[_SplitPoint]) -> List[StageCost]:
        """Stages that begin at these cuts; the first takes what comes before it too."""
        bounds = [0, *(cut.segment for cut in cuts[1:]), len(self._trace.segments)]
        return [
            self._costs.of(begin, end, cut.name)
            for cut, begin, end in zip(cuts, bounds, bounds[1:])
        ]

    def _first(self) -> str:
        cuts = cuts_of(self._trace, self._module, fine=False)
        return cuts[0].name if cuts else ""
