"""Time, work and memory of the operators of a graph, added up by the layer and line of each."""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.precision import WithoutAutocast
from ipufit.engines.embedded.passes.simplify import operator_called
from ipufit.partition.flops import bytes_of, flops_of
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.interpreter import InstrumentedInterpreter, Listener, OperatorCall
from ipufit.tracing.recording import is_backward, recorded_name
from ipufit.tracing.source_map import LOSS, Origin, TracedCall
from ipufit.utils import tree
from ipufit.utils.devices import HOST, TimingEvent, synchronize, timing_event


class HostTimer:
    """Times calls by name, by the host's clock, where a call that returns is over.

    There may be several rounds, in each of which everything is called once; of each name the
    shortest time is kept.

    Args:
        device: that the calls are for.

    Attributes:
        method: how, in half a sentence.
    """

    method = "by the clock of the host"

    def __init__(self, device: torch.device = HOST) -> None:
        self._device = device
        self._best: Dict[str, float] = {}

    def begin(self) -> Any:
        """Begin a call, and return what :meth:`end` takes."""
        return time.perf_counter()

    def end(self, name: str, begun: Any) -> None:
        """End the call of a name that :meth:`begin` has begun."""
        self._keep(name, time.perf_counter() - begun)

    def _keep(self, name: str, seconds: float) -> None:
        self._best[name] = min(self._best.get(name, math.inf), seconds)

    def end_round(self) -> None:
        """End a round."""

    def seconds(self, name: str) -> float:
        """Shortest time of a name; 0 for one that was never called."""
        return self._best.get(name, 0.0)


class _DeviceTimer(HostTimer):
    """Times calls by events on the stream of a device, so that the host need not wait for each.

    Args:
        device: one that has such events.
    """

    method = "by events on the device"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pairs: List[Tuple[str, TimingEvent, TimingEvent]] = []

    def begin(self) -> Optional[TimingEvent]:
        """An event that is reached when all before it is done."""
        return timing_event(self._device)

    def end(self, name: str, begun: Any) -> None:
        """Record the event that ends the call."""
        ended = self.begin()
        assert ended is not None
        self._pairs.append((name, begun, ended))

    def end_round(self) -> None:
        """Wait, and look at the events."""
        synchronize(self._device)
        for name, begun, ended in self._pairs:
            self._keep(name, begun.elapsed_time(ended) / 1e3)
        self._pairs = []


class _WaitingTimer(HostTimer):
    """Times calls on a device that has no events, by waiting for it before and after each."""

    method = "by the clock of the host, which waits for the device"

    def begin(self) -> Any:
        """Wait, and begin a call."""
        synchronize(self._device)
        return super().begin()

    def end(self, name: str, begun: Any) -> None:
        """Wait for the call, and end it."""
        synchronize(self._device)
        super().end(name, begun)


def timer_for(device: torch.device) -> HostTimer:
    """Make the timer for calls on a device."""
    if device.type == "cpu":
        return HostTimer()
    return _DeviceTimer(device) if timing_event(device) is not None else _WaitingTimer(device)


def bytes_in(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, what several share counted once."""
    sizes = {storage_id(t): t.untyped_storage().nbytes() for t in tensors if storage_id(t)}
    return sum(sizes.values())


class LiveBytes:
    """Counts the memory of values that come and go, what several share once.

    Args:
        arguments: of the graph, which are there all the time and do not count.

    Attributes:
        now: bytes that are held.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        self._arguments = {storage_id(tensor) for tensor in arguments} | {0}
        self._holders: Dict[int, int] = {}
        self.now = 0

    def take(self, value: object) -> None:
        """Count a value in: a tensor, or what holds some."""
        for key, size in self._memories(value):
            if key not in self._holders:
                self._holders[key] = 0
                self.now += size
            self._holders[key] += 1

    def drop(self, value: object) -> None:
        """Count a value out that was counted in."""
        for key, size in self._memories(value):
            self._holders[key] -= 1
            if not self._holders[key]:
                # Its address may be that of other memory from now on.
                del self._holders[key]
                self.now -= size

    def _memories(self, value: object) -> Iterator[Tuple[int, int]]:
        for tensor in tree.tensors(value):
            if storage_id(tensor) not in self._arguments:
                yield storage_id(tensor), tensor.untyped_storage().nbytes()


@dataclasses.dataclass(frozen=True)
class OpRecord:
    """Work of one call of an operator, in operations and bytes.

    Attributes:
        operator: such as "aten.mm.default"; the name of a function that is none.
        flops: two per multiply-add.
        bytes: read and written.
    """

    operator: str
    flops: int
    bytes: int


class NodeTimes(Listener):
    """Times every call of an operator in a graph.

    Args:
        timer: is told of each call by the name of its node.
    """

    def __init__(self, timer: HostTimer) -> None:
        self._timer = timer
        self._begun: object = None

    def before(self, call: OperatorCall) -> None:
        """Begin the call."""
        self._begun = self._timer.begin()

    def after(self, call: OperatorCall, result: object) -> None:
        """End the call."""
        assert call.node is not None
        self._timer.end(call.node.name, self._begun)


class NodeWork(Listener):
    """Looks at what every node of a graph computes and at the memory in use.

    Args:
        arguments: of the graph.

    Attributes:
        records: work of each call, by the name of its node.
        alive: bytes of values while each node runs, in order; the arguments are not among them.
    """

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        self.records: Dict[str, OpRecord] = {}
        self.alive: List[Tuple[fx.Node, int]] = []
        self._live = LiveBytes(arguments)

    def after(self, call: OperatorCall, result: object) -> None:
        """Record the work of a call."""
        assert call.node is not None
        self.records[call.node.name] = _work_of(call, result)

    def on_value(self, node: fx.Node, value: object, released: Sequence[object]) -> None:
        """Count the bytes in use behind a node."""
        self._live.take(value)
        if node.op == "call_function":
            self.alive.append((node, self._live.now))
        for each in released:
            self._live.drop(each)


def profile_graph(
    graph: fx.GraphModule, timer: HostTimer, arguments: Sequence[Tensor]
) -> Tuple[NodeWork, Sequence[Tensor]]:
    """Run a graph once, and time and weigh every node.

    Args:
        graph: that runs.
        timer: is told of each call by the name of its node.
        arguments: of the graph.

    Returns:
        The work of its nodes, and its results.
    """
    work = NodeWork(arguments)
    run = InstrumentedInterpreter(graph, [work, NodeTimes(timer)]).run
    return work, WithoutAutocast(run, arguments)(*arguments)


def _work_of(call: OperatorCall, result: object) -> OpRecord:
    operator = operator_called(call.operator, call.kwargs)
    if operator is not None:
        moved = bytes_of(operator, call.args, call.kwargs, result)
        return OpRecord(str(operator), flops_of(operator, call.args, result), moved)
    inputs, results = call.inputs, tree.tensors(result)
    shared = {storage_id(tensor) for tensor in inputs}
    moved = 0
    if not all(storage_id(tensor) in shared for tensor in results):
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *results))
    return OpRecord(getattr(call.operator, "__name__", str(call.operator)), 0, moved)


# Stands for the module of what joins the gradients of all modules.
GRADIENTS = "gradients"


@dataclasses.dataclass(frozen=True)
class OperatorSource:
    """Module, line and pass that an operator comes from.

    Attributes:
        origin: its module and line.
        direction: "forward", "backward" or "optimizer".
    """

    origin: Origin
    direction: str

    @property
    def module(self) -> str:
        """Its name; of what belongs to no module, what it does."""
        if self.origin.module is not None:
            return self.origin.module
        return GRADIENTS if self.direction == "backward" else LOSS


def rows_of(
    records: Mapping[str, OpRecord],
    places: Mapping[str, OperatorSource],
    seconds: Callable[[str], float],
) -> List[Dict[str, Any]]:
    """Add up the calls of an operator that come from one line, the longest first.

    Args:
        records: what each call does, by its name.
        places: where it comes from.
        seconds: tells how long it takes.
    """
    rows: Dict[object, Dict[str, Any]] = {}
    for name, each in records.items():
        place, origin = places[name], places[name].origin
        whose = {
            "operator": each.operator,
            "direction": place.direction,
            "module": place.module,
            "kind": origin.kind,
            "file": origin.file,
            "line": origin.line,
        }
        sums = {"calls": 0, "seconds": 0.0, "flops": 0, "bytes": 0}
        row = rows.setdefault(tuple(whose.values()), {**whose, "source": origin.source, **sums})
        row["calls"] += 1
        row["seconds"] += seconds(name)
        row["flops"] += each.flops
        row["bytes"] += each.bytes
    return sorted(rows.values(), key=lambda row: -row["seconds"])


# Of what lowering puts there, what computes a value that was recorded: by which operators.
_INSTEAD = {
    "mm": ("mm",),
    "_linear_pointwise": ("mm", "addmm"),
    "cat": ("cat",),
    "copy_": ("cat",),
}
_ALL = tuple(kind for kinds in _INSTEAD.values() for kind in kinds)


def places_of(
    graph: fx.GraphModule, recorded: fx.GraphModule, calls: Sequence[TracedCall]
) -> Dict[str, OperatorSource]:
    """Find the source of every operator, by the name of its node.

    A node that stands in the place of a recorded one comes from where that came from; one that was
    put before another one, from where that comes from.

    Args:
        graph: that runs.
        recorded: of which it was made.
        calls: of which that was made.
    """
    origins = {name: call.origin for call in calls for name in call.nodes}
    nodes = list(graph.graph.nodes)
    left = {node.name for node in nodes}
    order = {node.name: place for place, node in enumerate(recorded.graph.nodes)}
    names = list(order)
    gone = [node for node in recorded.graph.nodes if node.name not in left]
    gone_at = [order[node.name] for node in gone]
    following = [len(order)] * len(nodes)
    for place in reversed(range(len(nodes) - 1)):
        following[place] = order.get(nodes[place + 1].name, following[place + 1])
    as_recorded = {node.name: recorded_name(node) for node in recorded.graph.nodes}
    places: Dict[str, OperatorSource] = {}
    last, turned = -1, False
    for place, node in enumerate(nodes):
        if node.op != "call_function":
            last = order.get(node.name, last)
            continue
        name = recorded_name(node)
        if node.name in order:
            last = order[node.name]
        else:
            between = slice(bisect.bisect(gone_at, last), bisect.bisect(gone_at, following[place]))
            stands_for = _counterpart(node, gone[between])
            if stands_for is None:
                # Behind the last one there is nothing but the end.
                name = names[min(following[place], len(names) - 2)]
            else:
                name = stands_for.name
                if _kind(node) in _INSTEAD:
                    last = order[name]
            name = as_recorded[name]
        origin = origins.get(name, Origin())
        # What comes after the way back joins what it has found.
        turned = turned or origin.is_backward or is_backward(node)
        places[node.name] = OperatorSource(origin, "backward" if turned else "forward")
    return places


def _counterpart(node: fx.Node, gone: Sequence[fx.Node]) -> Optional[fx.Node]:
    """Which of the nodes that are gone the node stands for."""
    instead = _INSTEAD.get(_kind(node), _ALL)
    return next((each for each in gone if _kind(each) in instead), gone[-1] if gone else None)


def _kind(node: fx.Node) -> str:
    """The name of its operator, in whichever form it is called."""
    operator = operator_called(node.target, node.kwargs)
    return "" if operator is None else str(operator._schema.name.partition("::")[2])
