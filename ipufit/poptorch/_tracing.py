"""The recording that is under way: its graph, blocks and losses, and the names of its tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    FrozenSet,
    Generic,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes

from ipufit.partition.own_blocks import EnteredBlocks
from ipufit.poptorch._logging import error
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.graph_analysis import operator_name
from ipufit.tracing.recording import current_graph, current_tracer
from ipufit.utils.state import watch_modules

_NAMESPACE = "ipufit_poptorch"

# Lives as long as the process: its operators would go with it.
_LIBRARY: Any = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, run: Callable[..., object], shapes: Callable[..., object]) -> Any:
    """Register an operator and return it.

    It has no gradient: call it in a ``torch.autograd.Function``, or under ``torch.no_grad``.

    Args:
        schema: ``name(Tensor x, ...) -> Tensor``; the results alias nothing.
        run: computes, on any device.
        shapes: returns empty results of the right shape and dtype, for recording.
    """
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, shapes, "Meta")
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


T = TypeVar("T")


class Numbered(Generic[T]):
    """Objects that operators of recorded graphs refer to by number.

    They live as long as the recording that holds them.

    Args:
        what: what they are, in the message about one that is gone.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)

    def add(self, thing: T) -> int:
        """Return the number of an object, which is new."""
        number = next(self._numbers)
        self._objects[number] = thing
        return number

    def __getitem__(self, number: int) -> T:
        thing = self._objects.get(number)
        if thing is None:
            raise error(
                f"{self._what} is gone: expected the model that recorded it to be alive. Compile "
                "the model again."
            )
        return thing


def need_kind(value: object, kind: type, expectation: str, advice: str = "") -> None:
    """Refuse an argument of an operator that is of another kind.

    Args:
        value: the argument.
        kind: its class.
        expectation: a sentence that says what it must be.
        advice: a sentence that says what to do.
    Raises:
        Error: both sentences, and of what type it is.
    """
    if not isinstance(value, kind):
        refusal = f"{expectation} {type(value)} is not supported."
        raise error(f"{refusal} {advice}" if advice else refusal)


def tensor_list(value: Any, expectation: str, advice: str) -> List[Tensor]:
    """Return a tensor, or a list or tuple of them, as a list.

    Args:
        value: what a function of the user's takes or returns.
        expectation: the beginning of a sentence that says what it must be.
        advice: a sentence that says what to do.
    Raises:
        Error: something else is in it.
    """
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    for one in values:
        if not isinstance(one, Tensor):
            raise error(f"{expectation}, got {type(one).__name__}. {advice}")
    return values


def node_of(tensor: Tensor) -> Optional[fx.Node]:
    """Return the node that computes a tensor; None where this tracer doesn't know it."""
    current = current_tracer()
    if current is None or not proxy_tensor.has_proxy_slot(tensor, current):
        return None
    node: fx.Node = proxy_tensor.get_proxy_slot(tensor, current).proxy.node
    return node


def graph_so_far() -> List[fx.Node]:
    """Return the nodes recorded so far by the innermost tracer."""
    graph = current_graph()
    return [] if graph is None else list(graph.nodes)


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def written_tensors(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    schema = func._schema
    if schema.is_mutable:
        arguments = {**dict(zip((a.name for a in schema.arguments), args)), **kwargs}
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_in(arguments.get(argument.name))


class Activations:
    """Names the results of operators: ``module/submodule/operator:0``, then ``operator:0/1``."""

    def __init__(self) -> None:
        self._scopes: List[str] = []
        self._nodes: Dict[str, fx.Node] = {}
        self._counts: Dict[str, int] = {}
        self._graph: object = None

    def named_by(self, model: nn.Module, enabled: bool) -> ContextManager[None]:
        """Name tensors after the modules of a model while its forward is recorded.

        Args:
            model: whose modules give their names.
            enabled: whether they do.
        """
        self._graph = current_graph()
        if not enabled:
            return contextlib.nullcontext()
        names = {m: name.rpartition(".")[2] for name, m in model.named_modules() if name}
        return watch_modules(
            lambda module, args: self.enter(names.get(module)),
            lambda module, args, result: self.leave(names.get(module)),
        )

    def enter(self, name: Optional[str]) -> None:
        """Add a scope to the names of operators from here on; None adds nothing."""
        if name is not None:
            self._scopes.append(name)

    def leave(self, name: Optional[str]) -> None:
        """Remove the innermost scope; None removes nothing.

        Raises:
            Error: there is none.
        """
        if name is None:
            return
        if not self._scopes:
            raise error("pop_name_scope without push_name_scope. Push a name before it is popped.")
        self._scopes.pop()

    def record(self, func: OpOverload, results: Sequence[Tensor]) -> None:
        """Name the results of an operator that has just been recorded."""
        operator = func._schema.name.partition("::")[2]
        for place, result in enumerate(results):
            node = node_of(result)
            # What a body of a loop makes is the loop's own.
            if node is None or node.graph is not self._graph:
                continue
            name = "/".join([*self._scopes, f"{operator}:{place}"])
            count = self._counts.get(name, 0)
            self._counts[name] = count + 1
            self._nodes[f"{name}/{count}" if count else name] = node

    def names_in(self, graph: fx.GraphModule) -> Dict[str, str]:
        """Map anchor names to names of the nodes that a finished graph still has."""
        there = {node.name for node in graph.graph.nodes}
        return {name: node.name for name, node in self._nodes.items() if node.name in there}


def returning(graph: fx.GraphModule, nodes: Sequence[str]) -> fx.GraphModule:
    """Return a copy of a program that returns these nodes too, as they are when computed.

    Args:
        graph: left as it is.
        nodes: their names.
    """
    if not nodes:
        return graph
    copied = fx.Graph()
    places: Dict[fx.Node, fx.Node] = {}
    returned = copied.graph_copy(graph.graph, places)
    by_name = {node.name: copy for node, copy in places.items()}
    extra = []
    for name in nodes:
        copied_node = by_name[name]
        with copied.inserting_after(copied_node):
            # Whatever is written into it later.
            extra.append(copied.call_function(torch.ops.aten.clone.default, (copied_node,)))
    copied.output([*returned, *extra])  # type: ignore[misc]
    return fx.GraphModule(graph, copied)


class RecordedBlocks(EnteredBlocks):
    """The blocks of a recording, in one of which every operator has to be."""

    def on_operator(self) -> None:
        """Refuse an operator that is about to be recorded outside of any block.

        Raises:
            Error: the last block was left, and no other one entered.
        """
        if not self.is_active:
            name = self.entered[-1][0] if self.entered else None
            raise error(
                "No active Block, all the ops must belong to a Block: something is computed "
                f"after the block {name!r} was left. Put it into a poptorch.Block, or begin blocks "
                "with poptorch.Block.start or poptorch.BeginBlock, which don't end."
            )


@dataclasses.dataclass(frozen=True)
class _Loss:
    """A tensor that was marked as a loss.

    Attributes:
        tensor: the marked tensor.
        reaching: numbers of the losses that it was computed from.
        reduced: whether it was reduced to one number.
    """

    tensor: Tensor
    reaching: FrozenSet[int]
    reduced: bool


class Trace:
    """One recording of a model's forward.

    Attributes:
        training: whether it is a training model.
        blocks: where the model says that its operators go.
        keep_alive: objects that must live as long as the recorded graph.
        losses: number of tensors that were said to be losses.
        activations: names of what its operators make.
        averages: for each moving average of the model, the weight that it follows, itself, and the
            factor of its old value.
        multi_conv: the ``poptorch.MultiConv`` that is open, and how many nodes came before it.
        untitled: number of tensors that are printed without a title of their own.
    """

    def __init__(self, training: bool) -> None:
        self.training = training
        self.blocks = RecordedBlocks()
        self.keep_alive: List[object] = []
        self.losses = 0
        self.activations = Activations()
        self.averages: List[Tuple[Tensor, Tensor, Tensor]] = []
        self.multi_conv: Optional[Tuple[Any, int]] = None
        self.untitled = 0
        self._losses: List[_Loss] = []
        self._reaching: Dict[int, Set[int]] = {}
        self._foreign: Set[int] = set()
        # Memory that is freed may be given out again, and would bring its old losses along.
        self._alive: List[Tensor] = []

    def mark_loss(self, loss: Tensor, reduced: bool) -> Tensor:
        """Mark a tensor as a loss.

        Args:
            loss: any shape.
            reduced: whether a tensor without dimensions is the reduction of another one.
        Returns:
            A tensor of the same value, to be used in its place; without training, itself.
        """
        self.losses += 1
        if not self.training:
            return loss
        number = len(self._losses)
        marked = loss.clone()
        is_reduced = reduced and not loss.dim()
        self._losses.append(_Loss(marked, frozenset(self._of(loss)), is_reduced))
        self._reaching[storage_id(marked)] = {number, *self._of(loss)}
        self._alive.append(marked)
        return marked

    def _of(self, tensor: Tensor) -> Set[int]:
        return self._reaching.get(storage_id(tensor), set())

    def computed(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Record that an operator made, or changed, tensors out of others."""
        reaching: Set[int] = set()
        for tensor in inputs:
            reaching |= self._of(tensor)
        for tensor in results:
            self._alive.append(tensor)
            if reaching:
                self._reaching.setdefault(storage_id(tensor), set()).update(reaching)

    def made_on_host(self, tensor: Tensor) -> None:
        """Record a tensor that forward made of numbers without naming the device."""
        self._alive.append(tensor)
        self._foreign.add(storage_id(tensor))

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return True if a tensor of the recording belongs to the host."""
        return storage_id(tensor) in self._foreign

    def final_loss(self, results: Sequence[Tensor]) -> Tensor:
        """Return the one loss that no other loss is computed from.

        Args:
            results: what the model returns or changes; a loss that reaches none of it is dead.

        Raises:
            Error: there is none, or there are several.
        """
        live: Set[int] = set()
        for tensor in results:
            live |= self._of(tensor)
        inner: Set[int] = set()
        for number in live:
            inner |= self._losses[number].reaching
        final = sorted(live - inner)
        if not final:
            raise error(
                "Couldn't find a loss in graph! Training needs a loss that is returned, or that "
                "what is returned is computed from: use a loss of torch.nn, or mark your own with "
                "poptorch.identity_loss(value, reduction)."
            )
        if len(final) > 1:
            raise error(
                "Multiple independent losses found in graph. Graph must have one final loss. Wrap "
                f"final graph loss in poptorch.identity_loss. Of the {len(final)} found, add up "
                'what is to be trained on: poptorch.identity_loss(loss1 + loss2, reduction="none").'
            )
        return self._losses[final[0]].tensor

    def has_one_element(self, tensor: Tensor, final: Optional[Tensor]) -> bool:
        """Return True for a tensor without dimensions that has the shape [1] on an IPU.

        There the reduction of a loss that goes into another loss leaves one dimension, which stays
        in all that is computed from it element by element. Call it during the recording.

        Args:
            tensor: an output of forward.
            final: the loss that goes into no other one.
        """
        inner = [each for each in self._losses if each.reduced and each.tensor is not final]
        reduced = {node_of(each.tensor) for each in inner}
        pending = [] if tensor.dim() else [node_of(tensor)]
        visited: Set[Optional[fx.Node]] = set()
        while pending:
            node = pending.pop()
            if node in reduced:
                return True
            if node is not None and node not in visited and _is_elementwise(node):
                pending += node.all_input_nodes
            visited.add(node)
        return False


# Those without the tag.
_COPIES = ("aten.clone", "aten.detach", "aten._to_copy", "aten.alias")


def _is_elementwise(node: fx.Node) -> bool:
    is_tagged = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return is_tagged or operator_name(node) in _COPIES


_stack: List[Trace] = []


def tracing() -> Optional[Trace]:
    """Return the recording that is under way; None outside of one."""
    return _stack[-1] if _stack else None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Suspend the recording that is under way, to compute for real."""
    stack, _stack[:] = list(_stack), []
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        _stack[:] = stack


@contextlib.contextmanager
def traced(trace: Trace) -> Iterator[Trace]:
    """Make a trace the recording that is under way."""
    _stack.append(trace)
    try:
        yield trace
    finally:
        _stack.pop()
