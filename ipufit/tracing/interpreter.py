"""Listeners to operators: in a graph that runs node by node, or in Python that nobody records.

A listener says what it wants to know of each call, such as where it comes from, how long it takes
or which parameters it reads. One interpreter serves all of them where there is a graph; modes of
torch serve them where the user's own code has to run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple

from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.utils import tree


@dataclasses.dataclass
class OperatorCall:
    """A call of an operator, or of a function of torch's.

    Attributes:
        operator: what is called.
        args, kwargs: its arguments.
        node: of the graph that runs; None where Python runs without one.
    """

    operator: Any
    args: Tuple[object, ...]
    kwargs: Dict[str, object]
    node: Optional[fx.Node] = None

    @property
    def inputs(self) -> List[Tensor]:
        """Tensors among the arguments, in order."""
        return tree.tensors((self.args, self.kwargs))


class Listener:
    """Base class of what looks at operators while they run; its own methods do nothing."""

    def before(self, call: OperatorCall) -> None:
        """Called before an operator runs; what this raises is raised at the operator."""

    def after(self, call: OperatorCall, result: object) -> None:
        """Called with the result of an operator that did not fail."""

    def on_value(self, node: fx.Node, value: object, released: Sequence[object]) -> None:
        """Called when any node of a graph has its value, which is None if no other node uses it.

        Args:
            node: that has run.
            value: of the node.
            released: values of earlier nodes that no later node uses.
        """


def _run(listeners: Sequence[Listener], call: OperatorCall) -> object:
    """Run an operator; the last listener is the one closest to it."""
    for listener in listeners:
        listener.before(call)
    result = call.operator(*call.args, **call.kwargs)
    for listener in reversed(listeners):
        listener.after(call, result)
    return result


class InstrumentedInterpreter(fx.Interpreter):
    """Runs a recorded graph node by node, and tells listeners of every call and every value.

    Args:
        graph: recorded.
        listeners: are told, the last one closest to the operators.
    """

    def __init__(self, graph: fx.GraphModule, listeners: Sequence[Listener]) -> None:
        super().__init__(graph)
        self._listeners = tuple(listeners)
        self._node: Optional[fx.Node] = None

    def run_node(self, n: fx.Node) -> object:
        """Run a node; a value that no other node uses is let go of."""
        self._node = n
        value: object = super().run_node(n)
        if not n.users and n.op != "output":
            value = None
        released = [self.env[node] for node in self.user_to_last_uses.get(n, ())]
        for listener in self._listeners:
            listener.on_value(n, value, released)
        return value

    def call_function(
        self, target: object, args: Tuple[object, ...], kwargs: Dict[str, object]
    ) -> object:
        """Call an operator or another function."""
        return _run(self._listeners, OperatorCall(target, args, kwargs, self._node))


class _OperatorMode(TorchDispatchMode):
    def __init__(self, listeners: Sequence[Listener]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listeners = listeners

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: Tuple[object, ...] = (),
        kwargs: Optional[Dict[str, object]] = None,
    ) -> object:
        return _run(self._listeners, OperatorCall(func, args, kwargs or {}))


class _FunctionMode(TorchFunctionMode):
    def __init__(self, listeners: Sequence[Listener]) -> None:
        super().__init__()
        self._listeners = listeners

    __torch_function__ = _OperatorMode.__torch_dispatch__


def watch_operators(*listeners: Listener) -> contextlib.AbstractContextManager[object]:
    """Tell of every operator of the block below autograd, those of gradients included."""
    return _OperatorMode(listeners)


def watch_functions(*listeners: Listener) -> contextlib.AbstractContextManager[object]:
    """Tell of every function of torch's that the block calls, above autograd."""
    return _FunctionMode(listeners)
