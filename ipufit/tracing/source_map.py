"""Sources of operators: the module, the user's line, and which of the two passes.

Nothing here is in place while a program is recorded or runs; it is for a run that is watched, and
for a recording that is made again to note for every node of its graph where it comes from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from ipufit.tracing.capture import capture
from ipufit.tracing.grad_step import MicroBatchStep, ModuleWithLoss
from ipufit.tracing.interpreter import Listener, OperatorCall, watch_operators
from ipufit.tracing.recording import GraphPlace, autograd_nodes, current_graph, listen_to_backward
from ipufit.tracing.user_lines import source_line, user_frame
from ipufit.tracing.validate import public_name
from ipufit.utils import tree
from ipufit.utils.state import watch_modules

# The name of what is computed outside of the user's module.
LOSS = "loss"


@dataclasses.dataclass(frozen=True)
class Origin:
    """Module, line and pass that an operator comes from.

    Attributes:
        module: name of the innermost module, "" for the user's own, "loss" for what the loss
            computes; None where nobody knows.
        kind: class of the module.
        file, line: the user's; None where there is none.
        is_backward: whether torch ran it while it followed the loss back. Module and line are then
            those of the operator whose gradient it is a part of.
    """

    module: Optional[str] = None
    kind: str = ""
    file: Optional[str] = None
    line: Optional[int] = None
    is_backward: bool = False

    @property
    def source(self) -> str:
        """The line's text, if there is a file to read it from."""
        return source_line(self.file, self.line)


@dataclasses.dataclass(frozen=True)
class _ModuleCall:
    """A call of a module that has returned.

    Attributes:
        name: of the module.
        kind: its class.
        outputs: tensors that it returned.
    """

    name: str
    kind: str
    outputs: Tuple[Tensor, ...]


class SourceTracker:
    """Follows a step through modules, and back.

    Args:
        step: the user's module with the loss.
        on_return: called with every call of a module when it returns.
    """

    def __init__(
        self, step: ModuleWithLoss, on_return: Callable[[_ModuleCall], None] = lambda call: None
    ) -> None:
        self._names: Dict[int, Tuple[str, str]] = {}
        for name, part in step.named_modules():
            self._names[id(part)] = (user_name(name), type(part).__name__)
        self._names[id(step)] = (LOSS, "")
        self._on_return = on_return
        self._stack: List[Tuple[str, str]] = []
        self._running: Optional[Origin] = None
        self._by_number: Dict[int, Origin] = {}
        self._claimed: Dict[object, Origin] = {}
        self._nodes: List[Node] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Track the step that runs in the block."""
        with watch_modules(self._begin, self._end), listen_to_backward(self._turn):
            yield

    def now(self) -> Origin:
        """The origin of the operator that is being called, from inside of a dispatch mode."""
        if self._running is not None:
            return self._running
        module, kind = self._stack[-1] if self._stack else (LOSS, "")
        file, line = (user_frame(sys._getframe()) or (None, None, ""))[:2]
        origin = Origin(module, kind, file, line)
        number = _number_of_last()
        if number is not None:
            # Of an operator that autograd leaves aside, this is the number of an earlier one.
            self._by_number.setdefault(number, origin)
        return origin

    def _begin(self, part: nn.Module, args: object) -> None:
        if id(part) not in self._names:
            return
        if _number_of_last() is None and self._stack:
            name, kind = self._stack[-1]
            self._claim(
                [t.grad_fn for t in tree.tensors(args)], Origin(name, kind, is_backward=True)
            )
        self._stack.append(self._names[id(part)])

    def _end(self, part: nn.Module, args: object, output: object) -> None:
        if id(part) not in self._names:
            return
        name, kind = called = self._names[id(part)]
        # A module whose exception was caught has not returned.
        while self._stack.pop() != called:
            pass
        tensors = tuple(tree.tensors(output))
        if _number_of_last() is None:
            self._claim([t.grad_fn for t in tensors], Origin(name, kind, is_backward=True))
        if kind:
            self._on_return(_ModuleCall(name, kind, tensors))

    def _claim(self, nodes: Sequence[Optional[Node]], origin: Origin) -> None:
        """In a torch that numbers no operators: all that no inner module has made is this one's."""
        for node in autograd_nodes(nodes, self._claimed):
            self._claimed[node] = origin

    def _turn(self, objective: Optional[Tensor]) -> None:
        """Note that the backward pass begins, or has ended."""
        self._running = None
        if objective is None:
            self._claimed, self._nodes = {}, []
            self._running = Origin()
            return
        # Held, so that Python does not let go of their wrappers, and with them of their identities.
        self._nodes = list(autograd_nodes([objective.grad_fn]))
        for node in self._nodes:
            self._tell_before(node, self._origin_of(node))

    def _tell_before(self, node: Node, origin: Origin) -> None:
        def begin(gradients: object) -> None:
            self._running = origin

        node.register_prehook(begin)

    def _origin_of(self, node: object) -> Origin:
        if node in self._claimed:
            return self._claimed[node]
        number = getattr(node, "_sequence_nr", lambda: -1)()
        origin = self._by_number.get(number)
        if origin is None:
            return Origin(LOSS if number < 0 else None, is_backward=True)
        return dataclasses.replace(origin, is_backward=True)


def user_name(name: str) -> str:
    """A module's name in the user's model, with "loss" before those of the loss."""
    if name.partition(".")[0] == "loss_module":
        return LOSS + name[len("loss_module") :]
    return "" if name == "net" else public_name(name)


def _number_of_last() -> Optional[int]:
    """The number that autograd has given to the last operator; None where torch tells none."""
    tell = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return None if tell is None else int(tell()) - 1


@dataclasses.dataclass
class TracedCall:
    """Call of an operator by the user's Python, or by torch in the backward pass.

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
    returned: List[Tuple[_ModuleCall, int]] = dataclasses.field(default_factory=list)


class CallRecorder(Listener):
    """Lists the operators that a step calls, on values or while it is recorded.

    Args:
        step: the user's module with the loss.
        keeps: whether copies of the results are kept.
    """

    def __init__(self, step: ModuleWithLoss, keeps: bool) -> None:
        self._where = SourceTracker(step, self._module_returned)
        self._keeps = keeps
        self._graph: Optional[fx.Graph] = None
        self._place = GraphPlace(None)
        self._traced = TracedCall("", Origin())
        # Held, so that no other tensor gets the identity of one of them.
        self._made: Dict[int, Tuple[Tensor, TracedCall, int]] = {}
        self.calls: List[TracedCall] = []

    @contextlib.contextmanager
    def listed(self) -> Iterator[None]:
        """List the calls of the step that runs in the block."""
        self._graph = current_graph()
        with self._where.followed(), watch_operators(self):
            yield
        self._made.clear()

    def before(self, call: OperatorCall) -> None:
        """Note where the operator comes from, and which node of a recording is the last so far."""
        self._traced = TracedCall(str(call.operator), self._where.now())
        self._place = GraphPlace(self._graph)

    def after(self, call: OperatorCall, result: object) -> None:
        """Add the call to the list, with its nodes or its results."""
        traced = self._traced
        traced.nodes = [node.name for node in self._place.nodes_after()]
        outputs = tree.tensors(result)
        if self._keeps:
            traced.outputs = [output.detach().clone() for output in outputs]
        for place, output in enumerate(outputs):
            self._made[id(output)] = output, traced, place
        # Old versions of torch dispatch what only asks for a device, but not everywhere alike.
        if outputs:
            self.calls.append(traced)

    def _module_returned(self, returned: _ModuleCall) -> None:
        for output in returned.outputs:
            if id(output) in self._made:
                _, call, place = self._made[id(output)]
                call.returned.append((dataclasses.replace(returned, outputs=()), place))


def trace_calls(
    micro: MicroBatchStep, step: ModuleWithLoss, arguments: Sequence[Tensor]
) -> List[TracedCall]:
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

    with step.preserve_attributes():
        capture(watched, arguments)
    return calls.calls


class NodeOrigins(Listener):
    """Knows where each node of a recorded graph comes from while the graph runs.

    Args:
        calls: of which the graph was made.
    """

    def __init__(self, calls: Sequence[TracedCall]) -> None:
        self._origins = {name: call.origin for call in calls for name in call.nodes}
        self._now = Origin()

    def now(self) -> Origin:
        """Origin of the node that runs."""
        return self._now

    def before(self, call: OperatorCall) -> None:
        """Look up the node that is about to run."""
        self._now = Origin() if call.node is None else self._origins.get(call.node.name, Origin())
