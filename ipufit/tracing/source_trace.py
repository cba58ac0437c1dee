"""A recording made again, to note for every node of its graph where it comes from."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.tracing.capture import capture
from ipufit.tracing.grad_step import GradStep, ModuleWithLoss, attributes_kept
from ipufit.tracing.node_meta import graph_in_recording
from ipufit.tracing.source_map import ModuleCall, Origin, SourceTracker
from ipufit.utils import tree

__all__ = ["Call", "CallRecorder", "SourceInterpreter", "trace_calls"]


@dataclasses.dataclass
class Call:
    """One call of an operator by the user's Python, or by torch on the way back.

    Attributes:
        operator: such as "aten.mm.default".
        origin: where it comes from.
        nodes: names of what it left in the graph; none of what runs on values.
        outputs: its results.
        returned: calls of modules that returned a result of it, and which one.
    """

    operator: str
    origin: Origin
    nodes: Sequence[str] = ()
    outputs: Sequence[Tensor] = ()
    returned: List[Tuple[ModuleCall, int]] = dataclasses.field(default_factory=list)


class CallRecorder(TorchDispatchMode):
    """Lists the operators that a step calls, on values or while it is recorded.

    Args:
        step: the user's module with the loss.
        keeps: whether copies of the results are kept.
    """

    def __init__(self, step: ModuleWithLoss, keeps: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = SourceTracker(step, self._module_returned)
        self._keeps = keeps
        self._graph: Optional[fx.Graph] = None
        # Held, so that no other tensor gets the identity of one of them.
        self._made: Dict[int, Tuple[Tensor, Call, int]] = {}
        self.calls: List[Call] = []

    @contextlib.contextmanager
    def listed(self) -> Iterator[None]:
        """The step runs in the block."""
        self._graph = graph_in_recording()
        with self._where.followed(), self:
            yield
        self._made.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        call = Call(str(func), self._where.now())
        before = None if self._graph is None else next(iter(reversed(self._graph.nodes)))
        result = func(*args, **(kwargs or {}))
        if self._graph is not None:
            call.nodes = _names_after(self._graph, before)
        outputs = [leaf for leaf in tree.flatten(result)[0] if isinstance(leaf, Tensor)]
        if self._keeps:
            call.outputs = [output.detach().clone() for output in outputs]
        for place, output in enumerate(outputs):
            self._made[id(output)] = output, call, place
        # Old versions of torch dispatch what only asks for a device, but not everywhere alike.
        if outputs:
            self.calls.append(call)
        return result

    def _module_returned(self, returned: ModuleCall) -> None:
        for output in returned.outputs:
            if id(output) in self._made:
                _, call, place = self._made[id(output)]
                call.returned.append((dataclasses.replace(returned, outputs=()), place))


def _names_after(graph: fx.Graph, node: Optional[fx.Node]) -> List[str]:
    names: List[str] = []
    for each in reversed(graph.nodes):
        if each is node:
            break
        names.append(each.name)
    return names[::-1]


def trace_calls(micro: GradStep, step: ModuleWithLoss, arguments: Sequence[Tensor]) -> List[Call]:
    """List the operator calls that a traced micro-batch was made of, by tracing it again.

    Args:
        micro: the function that was traced.
        step: the user's module with the loss.
        arguments: the tensors to trace with; their values are not looked at.
    """
    calls = CallRecorder(step, keeps=False)

    def watched(*tensors: Tensor) -> List[Tensor]:
        with calls.listed():
            return micro(*tensors)

    with attributes_kept(step):
        capture(watched, arguments)
    return calls.calls


class SourceInterpreter(fx.Interpreter):
    """Runs a recorded graph node by node, and knows where each node comes from.

    Args:
        graph: recorded.
        calls: of which it was made.
    """

    def __init__(self, graph: fx.GraphModule, calls: Sequence[Call]) -> None:
        super().__init__(graph)
        self._origins: Mapping[str, Origin] = {
            name: call.origin for call in calls for name in call.nodes
        }
        self._node: Optional[fx.Node] = None

    def now(self) -> Origin:
        """The origin of the node that runs."""
        return Origin() if self._node is None else self._origins.get(self._node.name, Origin())

    def run_node(self, n: fx.Node) -> Any:
        """The node's value."""
        self._node = n
        return super().run_node(n)
