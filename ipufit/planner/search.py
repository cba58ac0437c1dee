"""Finding the partition whose slowest stage is the fastest, among those that fit memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple

from torch import nn

from ipufit.partition.repeated_layers import stacks_of
from ipufit.planner.costs import Costs, StageCost, spans_of
from ipufit.planner.measure import Trace
from ipufit.planner.pipeline_schedule import in_flight

__all__ = ["Cut", "Tail", "best_cuts", "best_division", "cuts_of", "tail_of"]


# Time of the slowest stage, sum of squares of all times, first part of every stage.
_Found = Tuple[float, float, Tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A place where a stage may begin.

    Attributes:
        name: of the module that would begin it.
        segment: its call in the trace.
    """

    name: str
    segment: int


@dataclasses.dataclass(frozen=True)
class Tail:
    """Last part of a module, which may go back to the IPU of an earlier stage for a weight there.

    Attributes:
        cut: where it begins; it goes on to the end.
        first, last: segments between which the weights are used before; no stage begins there.
    """

    cut: Cut
    first: int
    last: int


def tail_of(trace: Trace, module: nn.Module) -> Optional[Tail]:
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
            return Tail(Cut(name, number), min(earlier), max(earlier))
    return None


def cuts_of(trace: Trace, module: nn.Module, fine: bool, tail: Optional[Tail] = None) -> List[Cut]:
    """Where stages may begin, in the order of execution.

    A module that is called once, and no parameter of which is used on both sides. What does no work
    of its own, such as a Flatten, begins none.

    Args:
        trace: of a forward pass.
        module: the user's.
        fine: False takes a block of repeated layers as a whole, and of other modules those that
            hold no others.
        tail: what is a stage already, behind all others; None for nothing.
    """
    end = len(trace.segments) if tail is None else tail.cut.segment
    calls: Dict[str, List[int]] = {}
    for number, segment in enumerate(trace.segments):
        calls.setdefault(segment.name, []).append(number)
    blocks = () if fine else tuple(layer for s in stacks_of(module) for layer in s.layers)
    inner = tuple(f"{block}." for block in blocks)
    spans = spans_of(trace, module, end)
    if tail is not None:
        spans.append((tail.first, tail.last))
    found: List[Cut] = []
    for name, where in calls.items():
        if not name or len(where) > 1 or name.startswith(inner) or _is_weight(name):
            continue
        if where[0] >= end:
            continue
        held = (other for other in calls if other.startswith(f"{name}.") and not _is_weight(other))
        if not fine and name not in blocks and any(held):
            continue
        if found and any(first < where[0] <= last for first, last in spans):
            continue
        found.append(Cut(name, where[0]))
    found.sort(key=lambda cut: cut.segment)
    return _working(trace, found, end)


def _is_weight(name: str) -> bool:
    """True if the module computes a parameter, as weight_norm's does, when a layer reads it."""
    return "parametrizations" in name.split(".")


def _working(trace: Trace, cuts: Sequence[Cut], end: int) -> List[Cut]:
    """Keep the cuts before which and after which something is computed."""

    def works(begin: int, end: int) -> bool:
        return any(segment.forward.clocks for segment in trace.segments[begin:end])

    kept = list(cuts[:1])
    for cut in cuts[1:]:
        last = kept[-1]
        if works(last.segment if len(kept) > 1 else 0, cut.segment):
            kept.append(cut)
        elif len(kept) > 1 and not cut.name.startswith(f"{last.name}."):
            # A module that begins with another one keeps the place; what does nothing loses it.
            kept[-1] = cut
    while len(kept) > 1 and not works(kept[-1].segment, end):
        kept.pop()
    return kept


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
                own = time(begin, end)
                if own > limit or not fits(stage, begin, end):
                    break
                found = (max(slowest, own), spread + own * own, (*begins, begin))
                if end not in following or found < following[end]:
                    following[end] = found
        best = following
    return best[parts][2] if parts in best else None


def best_division(
    costs: Costs,
    cuts: Sequence[Cut],
    stages: int,
    schedule: str,
    recompute: bool,
    memory: Optional[int],
    limit: float = math.inf,
    tail: Optional[Tail] = None,
) -> Optional[Tuple[Tuple[Cut, ...], float]]:
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
        taken = cost.forward_clocks + cost.backward(1 if is_last else flights, recompute)
        if behind is not None and has_tail(begin, end):
            taken += behind.forward_clocks + behind.backward(1, recompute)
        return taken

    def fits(stage: int, begin: int, end: int) -> bool:
        if memory is None:
            return True
        taken = of(begin, end).memory(stage, depth, schedule, recompute)
        if behind is not None and has_tail(begin, end):
            taken += behind.memory(stages, depth, schedule, recompute)
        return taken <= memory

    begins = best_cuts(len(cuts), stages, time, fits, limit)
    if begins is None:
        return None
    slowest = max(time(begin, end) for begin, end in zip(begins, [*begins[1:], len(cuts)]))
    return tuple(cuts[begin] for begin in begins), slowest
