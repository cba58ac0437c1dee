"""Finding the partition whose slowest stage is the fastest, among those that fit memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from torch import nn

from ipufit.parallel.costs import Costs, StageCost, spans_of
from ipufit.parallel.measuring import Trace
from ipufit.parallel.repeated import stacks_of
from ipufit.parallel.schedule import in_flight

__all__ = ["Cut", "best_cuts", "best_division", "cuts_of"]


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


def cuts_of(trace: Trace, module: nn.Module, fine: bool) -> List[Cut]:
    """Where stages may begin, in the order of execution.

    A module that is called once, and no parameter of which is used on both sides. What does no work
    of its own, such as a Flatten, begins none.

    Args:
        trace: of a forward pass.
        module: the user's.
        fine: False takes a block of repeated layers as a whole, and of other modules those that
            hold no others.
    """
    calls: Dict[str, List[int]] = {}
    for number, segment in enumerate(trace.segments):
        calls.setdefault(segment.name, []).append(number)
    blocks = () if fine else tuple(layer for s in stacks_of(module) for layer in s.layers)
    inner = tuple(f"{block}." for block in blocks)
    spans = spans_of(trace, module)
    found: List[Cut] = []
    for name, where in calls.items():
        if not name or len(where) > 1 or name.startswith(inner) or _is_weight(name):
            continue
        held = (other for other in calls if other.startswith(f"{name}.") and not _is_weight(other))
        if not fine and name not in blocks and any(held):
            continue
        if found and any(first < where[0] <= last for first, last in spans):
            continue
        found.append(Cut(name, where[0]))
    found.sort(key=lambda cut: cut.segment)
    return _working(trace, found)


def _is_weight(name: str) -> bool:
    """Whether the module computes a parameter, as weight_norm's does, when a layer reads it."""
    return "parametrizations" in name.split(".")


def _working(trace: Trace, cuts: Sequence[Cut]) -> List[Cut]:
    """Those before which and after which something is computed."""

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
    while len(kept) > 1 and not works(kept[-1].segment, len(trace.segments)):
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

    Returns:
        These, and the clocks of the slowest stage; None where there are too few cuts or nothing
        fits.
    """
    if len(cuts) < stages:
        return None
    bounds = [0, *(cut.segment for cut in cuts[1:]), len(costs.trace.segments)]
    table: List[List[StageCost]] = [[] for _ in cuts]
    to_come = [costs.ranges(bounds[i], bounds[i + 1 :]) for i in range(len(cuts))]

    def of(begin: int, end: int) -> StageCost:
        while len(table[begin]) < end - begin:
            table[begin].append(next(to_come[begin]))
        return table[begin][end - begin - 1]

    # The last stage has one micro-batch in flight, all others have several or one.
    flights = in_flight(schedule, 0, stages)

    def time(begin: int, end: int) -> float:
        cost = of(begin, end)
        return cost.forward_clocks + cost.backward(flights if end < len(cuts) else 1, recompute)

    def fits(stage: int, begin: int, end: int) -> bool:
        return memory is None or of(begin, end).memory(stage, stages, schedule, recompute) <= memory

    begins = best_cuts(len(cuts), stages, time, fits, limit)
    if begins is None:
        return None
    slowest = max(time(begin, end) for begin, end in zip(begins, [*begins[1:], len(cuts)]))
    return tuple(cuts[begin] for begin in begins), slowest
