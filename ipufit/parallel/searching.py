"""Finding the partition whose slowest stage is the fastest, among those that fit memory."""

from __future__ import annotations

import dataclasses
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
        fine: False takes a block of repeated layers as a whole.
    """
    calls: Dict[str, List[int]] = {}
    for number, segment in enumerate(trace.segments):
        calls.setdefault(segment.name, []).append(number)
    blocks = () if fine else tuple(layer for s in stacks_of(module) for layer in s.layers)
    inner = tuple(f"{block}." for block in blocks)
    spans = spans_of(trace, module)
    found: List[Cut] = []
    for name, where in calls.items():
        if not name or len(where) > 1 or name.startswith(inner):
            continue
        holds_others = any(other.startswith(f"{name}.") for other in calls)
        if name not in blocks and holds_others:
            continue
        if found and any(first < where[0] <= last for first, last in spans):
            continue
        found.append(Cut(name, where[0]))
    found.sort(key=lambda cut: cut.segment)
    return _working(trace, found)


def _working(trace: Trace, cuts: Sequence[Cut]) -> List[Cut]:
    """Those before which and after which something is computed."""
    kept: List[Cut] = []
    for place, cut in enumerate(cuts):
        end = cuts[place + 1].segment if place + 1 < len(cuts) else len(trace.segments)
        works = any(s.forward.clocks for s in trace.segments[cut.segment : end])
        if works or not kept:
            kept.append(cut)
    return kept


def best_cuts(
    parts: int,
    stages: int,
    time: Callable[[int, int], float],
    fits: Callable[[int, int, int], bool],
) -> Optional[Tuple[int, ...]]:
    """First part of every stage, such that the slowest stage is as fast as it can be.

    Of equally slow ones that which is more even. Dynamic programming over (stages, parts).

    Args:
        parts: how many there are, in a fixed order; every stage gets at least one.
        stages: how many to make.
        time: of a stage of the parts from one to before another.
        fits: whether a stage (its number first) of these parts fits memory.

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
                if not fits(stage, begin, end):
                    continue
                own = time(begin, end)
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
) -> Optional[Tuple[Cut, ...]]:
    """The beginnings of the stages; the first takes what comes before its cut too.

    Args:
        costs: of the trace.
        cuts: where stages may begin.
        stages: how many.
        schedule: of the pipeline.
        recompute: whether activations are recomputed.
        memory: bytes of an IPU; None for no limit.

    Returns:
        None where there are too few cuts or nothing fits.
    """
    if len(cuts) < stages:
        return None
    bounds = [0, *(cut.segment for cut in cuts[1:]), len(costs.trace.segments)]
    table = [costs.ranges(bounds[i], bounds[i + 1 :]) for i in range(len(cuts))]

    def of(begin: int, end: int) -> StageCost:
        return table[begin][end - begin - 1]

    # Of the last stage nothing is recomputed: it has one micro-batch in flight.
    recomputes = recompute and in_flight(schedule, 0, stages) > 1

    def time(begin: int, end: int) -> float:
        cost = of(begin, end)
        again = cost.forward_clocks if recomputes and end < len(cuts) else 0.0
        return cost.forward_clocks + cost.backward_clocks + again

    def fits(stage: int, begin: int, end: int) -> bool:
        return memory is None or of(begin, end).memory(stage, stages, schedule, recompute) <= memory

    begins = best_cuts(len(cuts), stages, time, fits)
    return None if begins is None else tuple(cuts[begin] for begin in begins)
