"""Runs a graph node by node: times it, and looks at what goes through."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Sequence, Tuple

from torch import Tensor, fx

from ipufit.engines.embedded.passes.direct_calls import operator_called
from ipufit.engines.embedded.profiling.live_bytes import LiveBytes
from ipufit.engines.embedded.profiling.timers import Timer
from ipufit.partition.flops import bytes_of, flops_of
from ipufit.tracing.flat_storage import storage_id
from ipufit.utils import tree

__all__ = ["OpRecord", "ProfilingInterpreter", "TimedRun"]


@dataclasses.dataclass(frozen=True)
class OpRecord:
    """One call of an operator: its work in operations and bytes.

    Attributes:
        operator: such as "aten.mm.default"; the name of a function that is none.
        flops: two per multiply-add.
        bytes: read and written.
    """

    operator: str
    flops: int
    bytes: int


class TimedRun(fx.Interpreter):
    """Times every call of an operator.

    Args:
        graph: that runs.
        timer: is told of each call by the name of its node.
    """

    def __init__(self, graph: fx.GraphModule, timer: Timer) -> None:
        super().__init__(graph)
        self._timer = timer
        self._name = ""

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, unless nobody wants it."""
        self._name = n.name
        value = super().run_node(n)
        return value if n.users or n.op == "output" else None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator."""
        begun = self._timer.begin()
        result = target(*args, **kwargs)
        self._timer.end(self._name, begun)
        return result


class ProfilingInterpreter(TimedRun):
    """Times every node, and looks at what it computes and at the memory in use.

    Args:
        graph, timer: as of a timed run.
        given: the arguments.

    Attributes:
        looked: by name of the node.
        alive: bytes of values while each node runs, in order; the arguments are not among them.
    """

    def __init__(self, graph: fx.GraphModule, timer: Timer, given: Sequence[Tensor]) -> None:
        super().__init__(graph, timer)
        self.looked: Dict[str, OpRecord] = {}
        self.alive: List[Tuple[fx.Node, int]] = []
        self._held = LiveBytes(given)

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, unless nobody wants it."""
        value = super().run_node(n)
        self._held.take(value)
        if n.op == "call_function":
            self.alive.append((n, self._held.now))
        # What the interpreter lets go of next.
        for over in self.user_to_last_uses.get(n, ()):
            self._held.drop(self.env[over])
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operator."""
        result = super().call_function(target, args, kwargs)
        self.looked[self._name] = _looked(target, args, kwargs, result)
        return result


def _looked(target: Any, args: Any, kwargs: Any, result: Any) -> OpRecord:
    operator = operator_called(target, kwargs)
    if operator is not None:
        moved = bytes_of(operator, args, kwargs, result)
        return OpRecord(str(operator), flops_of(operator, args, result), moved)
    given, made = (
        [leaf for leaf in tree.flatten(each)[0] if isinstance(leaf, Tensor)]
        for each in ((args, kwargs), result)
    )
    shared = {storage_id(tensor) for tensor in given}
    moved = 0
    if not all(storage_id(tensor) in shared for tensor in made):
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*given, *made))
    return OpRecord(getattr(target, "__name__", str(target)), 0, moved)
