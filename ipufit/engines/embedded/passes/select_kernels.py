"""Chooses the kernels of a traced graph: as recorded, or others that are faster here."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import time
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.compile_arguments import GRAPH, KERNELS
from ipufit.core.precision import WithoutAutocast
from ipufit.engines.embedded.passes import cpu_kernels
from ipufit.engines.embedded.passes.cpu_kernels import agree
from ipufit.engines.embedded.passes.simplify import (
    call_directly,
    drop_unused,
    fuse_concats,
    simplify,
    value_of,
)
from ipufit.engines.embedded.passes.small_convolutions import convolve_by_products
from ipufit.engines.embedded.timing import SETTLED, fastest, recall, settle
from ipufit.tracing.graph_analysis import Memories
from ipufit.tracing.interpreter import InstrumentedInterpreter, Listener, OperatorCall
from ipufit.utils import tree
from ipufit.utils.malloc_policy import free_at_once, give_back_freed_memory
from ipufit.utils.random_streams import isolated

if TYPE_CHECKING:
    from ipufit.engines.embedded.passes.collective_hooks import CollectiveHooks

# How far, of the norm of a tensor, where values went to the other side of a ReLU's kink.
_TOLERANCE_OF_KINKS = 5e-2

# Seconds that micro-batches have run before their kernels are timed again, and what share of the
# time this may take. It ends when so many more runs say one thing than the other, or after so many.
_BEGIN, _SHARE = 1.0, 0.1
_LEAD, _MOST_RUNS = 3, 7

# Other kernels stay if they need less than this share of the time of torch's own: where they were
# timed again, and where each of them was faster by itself.
_WORTH, _WORTH_OF_PARTS = 0.95, 1.0


@dataclasses.dataclass(eq=False)
class Lowered:
    """A traced graph with the kernels that it runs with.

    Attributes:
        run: takes and returns what the recorded graph does.
        way: "graph", "kernels", or the name of a backend of torch.compile.
        why: a sentence for ``explain``.
        meeting: where its gradients may go to other processes; None where they don't.
        trial: to be called instead of ``run`` until the kernels are settled; None where they are.
    """

    run: Callable[..., List[Tensor]]
    way: str
    why: str
    meeting: Optional[CollectiveHooks] = None
    trial: Optional[KernelTrial] = None

    @property
    def graph(self) -> Optional[fx.GraphModule]:
        """The graph that runs; None where something else runs."""
        owner = self.run.__self__ if inspect.ismethod(self.run) else None
        return owner if isinstance(owner, fx.GraphModule) else None


class KernelTrial:
    """Times the kernels of a micro-batch again where it runs, and lets the faster ones stay.

    Before the first update they are timed in a few runs on copies. Here memory, caches and other
    work are as in the rest of the run. All results are those of the present kernels.

    Args:
        lowered: what runs; it changes if the other kernels are faster.
        other: makes what runs with the other kernels.
        copies: makes of arguments those of a run whose results nobody needs.
        key: that the choice is kept under.
        worth: the share of the time of torch's own kernels below which others stay.
        clock: in seconds.

    Attributes:
        caller: calls this until the kernels are settled, and them from then on.
        seconds: that the present kernels have run.
    """

    def __init__(
        self,
        lowered: Lowered,
        other: Callable[[], Lowered],
        copies: Callable[[Sequence[Tensor]], List[Tensor]],
        key: Tuple[object, ...],
        worth: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.caller: Optional[WithoutAutocast] = None
        self.seconds = 0.0
        self._lowered = lowered
        self._other = other
        self._copies = copies
        self._key = key
        self._worth = worth
        self._clock = clock
        self._spent = 0.0
        # Of the others to torch's own, in times.
        self._ratios: List[float] = []

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """Run a micro-batch."""
        is_due = self.seconds >= _BEGIN and self._spent <= _SHARE * self.seconds
        others = self._time_others(tensors) if is_due else None
        start = self._clock()
        results = self._lowered.run(*tensors)
        seconds = self._clock() - start
        self.seconds += seconds
        if others is not None:
            self._compare(seconds, others)
        return results

    def _time_others(self, tensors: Sequence[Tensor]) -> Optional[float]:
        """Return the seconds of the other kernels; None where they fail, which settles it."""
        try:
            inputs, way = self._copies(tensors), self._other()
            with isolated(inputs[-1].device):
                start = self._clock()
                way.run(*inputs)
                seconds = self._clock() - start
        except Exception:
            self._settle(self._lowered)
            return None
        self._spent += seconds
        return seconds

    def _compare(self, seconds: float, others: float) -> None:
        """Note the times of a run of each, and settle the kernels once these are enough."""
        runs_others = self._lowered.way == KERNELS
        self._ratios.append(seconds / others if runs_others else others / seconds)
        count, faster = len(self._ratios), sum(ratio < self._worth for ratio in self._ratios)
        if abs(2 * faster - count) >= _LEAD or count >= _MOST_RUNS:
            pays = 2 * faster > count
            self._settle(self._lowered if pays == runs_others else self._other())

    def _settle(self, way: Lowered) -> None:
        lowered = self._lowered
        lowered.run, lowered.way, lowered.why, lowered.trial = way.run, way.way, way.why, None
        settle(self._key, way.way)
        assert self.caller is not None
        self.caller.graph = way.run
        give_back_freed_memory()


def lower(
    graph: fx.GraphModule,
    arguments: Sequence[Tensor],
    jit: str,
    sums: int = 0,
    may_change: bool = False,
) -> Lowered:
    """Make of a recorded graph what runs.

    Args:
        graph: of one micro-batch; it stays as it is.
        arguments: a micro-batch with the state it starts from; none of them is changed.
        jit: how to run; ways that are not of this module count as "auto".
        sums: how many of the last results are gradients that may go to other processes at once.
        may_change: whether the kernels may become others while micro-batches run.
    """

    def simplified() -> Tuple[fx.GraphModule, fx.Graph, Optional[CollectiveHooks]]:
        """Copy what was recorded, without what nobody needs; what holds its tensors, and hooks."""
        nodes = copy.deepcopy(graph.graph)
        simplify(nodes)
        if not sums:
            return graph, nodes, None
        # Imported here: one process meets nobody.
        from ipufit.engines.embedded.passes.collective_hooks import insert_gradient_hooks

        owner = fx.GraphModule(graph, nodes)
        return owner, nodes, insert_gradient_hooks(owner, sums)

    @functools.lru_cache(maxsize=None)
    def plain() -> Lowered:
        """Make what was recorded, which takes a while, where it is needed."""
        owner, nodes, meeting = simplified()
        why = f"Runs the graph as it was recorded: {what} would not be faster." if what else ""
        return Lowered(_compile(owner, nodes).forward, GRAPH, why, meeting)

    @functools.lru_cache(maxsize=None)
    def changed() -> Set[int]:
        return set(Memories(graph.graph).changed)

    def copies(tensors: Sequence[Tensor]) -> List[Tensor]:
        """Copy what a run writes into."""
        return [t.clone() if place in changed() else t for place, t in enumerate(tensors)]

    owner, nodes, meeting = simplified()
    what, measured = ("", False) if jit == GRAPH else _with_kernels(nodes)
    runs = _compile(owner, nodes)
    if not what:
        return Lowered(runs.forward, GRAPH, "", meeting)
    chosen = Lowered(runs.forward, KERNELS, f"Runs {what}.", meeting)
    seconds = [0.0, 0.0]

    def compared() -> Dict[str, Callable[[], object]]:
        ways = (plain(), chosen)
        with free_at_once():
            _compare(ways, functools.partial(copies, arguments), seconds)
        inputs = copies(arguments)
        return {way.way: functools.partial(way.run, *inputs) for way in ways}

    key = (runs.code, *((t.shape, t.stride(), t.dtype) for t in arguments))
    try:
        if jit == KERNELS:
            compared()
            return chosen
        faster = fastest(key, compared, first=seconds, expected=measured, again=may_change)
    except _DisagreementError as error:
        lowered = plain()
        lowered.why = f"Runs the graph as it was recorded: {error}."
        return lowered
    finally:
        # What both took to run lies in pieces among what has come to stay.
        give_back_freed_memory()
    lowered, other = (chosen, plain) if faster == KERNELS else (plain(), lambda: chosen)
    if may_change and recall((SETTLED, *key)) is None:
        worth = _WORTH_OF_PARTS if measured else _WORTH
        lowered.trial = KernelTrial(lowered, other, copies, key, worth)
    return lowered


class _DisagreementError(Exception):
    """A reason against other kernels, in half a sentence."""


def _with_kernels(graph: fx.Graph) -> Tuple[str, bool]:
    """Put other kernels in; what was done, in words, and whether each was faster by itself."""
    values = [value_of(node) for node in graph.nodes]
    if any(value is not None and value.device.type != "cpu" for value in values):
        return "", False
    by_products, products = convolve_by_products(graph), cpu_kernels.use_onednn_matmul(graph)
    pictures = cpu_kernels.to_channels_last(graph)
    if by_products or products or pictures:
        cpu_kernels.restore_outputs(graph)
    done = [f"{by_products} convolutions of few positions as products"] if by_products else []
    done += [f"{products} matrix products by oneDNN"] if products else []
    done += [f"{pictures} convolutions and poolings with channels last"] if pictures else []
    return " and ".join(done), not pictures


def _compile(owner: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Make a module of a graph over the tensors of another, once it is as it shall run."""
    drop_unused(graph)
    fuse_concats(graph)
    call_directly(graph)
    graph.lint()
    return fx.GraphModule(owner, graph)


def _compare(
    ways: Sequence[Lowered], make_inputs: Callable[[], List[Tensor]], seconds: List[float]
) -> None:
    """Compare the results of two ways.

    Args:
        ways: two to run a micro-batch.
        make_inputs: makes inputs that a run may write into.
        seconds: gets the time of the run of each.

    Raises:
        _DisagreementError: the second way has other results, or one fails.
    """
    results: List[List[Tensor]] = [[], []]
    # Torch's own come last: what only the first run pays for is not to speak for the others.
    for place in (1, 0):
        inputs = make_inputs()
        with torch.no_grad(), isolated(inputs[-1].device):
            torch.manual_seed(0)
            start = time.perf_counter()
            try:
                results[place] = [*ways[place].run(*inputs), *inputs]
            except Exception as error:
                why = f"other kernels end with {type(error).__name__}" if place else "it fails"
                raise _DisagreementError(why) from error
            seconds[place] = time.perf_counter() - start
    pairs = [(one, other) for one, other in zip(*results) if one is not other]
    apart = [pair for pair in pairs if pair[0].is_floating_point() and not agree(*pair)]
    # One rounding may put a value on the other side of a ReLU's kink, where its gradient is
    # another. Then results are to be close as a whole, and each kernel's by itself.
    is_close = all((one - other).norm() <= _TOLERANCE_OF_KINKS * one.norm() for one, other in apart)
    if not is_close or (apart and not _agree_one_by_one(ways[1], make_inputs())):
        raise _DisagreementError("other kernels give different numbers")


def _agree_one_by_one(way: Lowered, inputs: List[Tensor]) -> bool:
    """Tell whether each of the other kernels makes of its inputs what torch's own would."""
    assert way.graph is not None
    check = _KernelCheck()
    with torch.no_grad(), isolated(inputs[-1].device):
        torch.manual_seed(0)
        InstrumentedInterpreter(way.graph, [check]).run(*inputs)
    return check.is_right


class _KernelCheck(Listener):
    """Compares each of the other kernels in a graph with torch's own."""

    is_right = True

    def after(self, call: OperatorCall, result: object) -> None:
        """Compare the result of a call with that of torch's own kernel, where it is another."""
        pairs = zip(cpu_kernels.results_of_torch(call), tree.tensors(result))
        self.is_right = self.is_right and all(agree(one, other) for one, other in pairs)
