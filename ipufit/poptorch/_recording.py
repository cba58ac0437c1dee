"""A model's forward, and its backward when training, recorded once as a graph."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.func import functional_call

from ipufit.engines.embedded.capture import capture, uses_random_numbers
from ipufit.errors import CaptureError
from ipufit.poptorch._changes import changed_buffers, held_tensors
from ipufit.poptorch._errors import error
from ipufit.poptorch._operators import overlap
from ipufit.poptorch._operators.bodies import everywhere
from ipufit.poptorch._parsers import flattenTensorStructure, reconstructTensorStructure
from ipufit.poptorch._tracing import Trace, traced
from ipufit.poptorch._watching import watched

__all__ = ["Recorded", "record"]


@dataclasses.dataclass
class Outputs:
    """What forward returned: tensors of the device by place, and the rest as it was.

    Attributes:
        structure: what forward returned, its tensors without data.
        computed: for each tensor of the structure, whether a micro-batch computes it.
        constants: the tensors that none computes, None elsewhere.
    """

    structure: Any
    computed: List[bool]
    constants: List[Optional[Tensor]]

    def forget(self) -> None:
        """Let go of the tensors of the recording, which have no values; keep those of the host."""
        self.constants = [None if t is None else t.detach().clone() for t in self.constants]
        if self.structure is not None:
            empty = [torch.empty(0) if t is None else t for t in self.constants]
            self.structure = reconstructTensorStructure(self.structure, empty)

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The same containers around the tensors that were computed."""
        if self.structure is None:
            return None
        source = iter(tensors)
        every = [
            next(source) if computed else constant
            for computed, constant in zip(self.computed, self.constants)
        ]
        return reconstructTensorStructure(self.structure, every)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A micro-batch as a graph over (parameters and buffers, inputs, loss scale).

    Attributes:
        graph: returns the computed outputs, the loss when training, and the gradients of
            ``reached``.
        outputs: how its outputs become those of forward.
        reached: the parameters that a gradient reached, when training.
        changed_inputs: places of the inputs that forward changes.
        changed_state: names of what forward changes of parameters and buffers.
        random: whether it draws random numbers.
        overlapped: whether a transfer was asked to overlap with computing.
        trace: what was noted meanwhile.
    """

    graph: fx.GraphModule
    outputs: Outputs
    reached: Tuple[str, ...]
    changed_inputs: Tuple[int, ...]
    changed_state: Tuple[str, ...]
    random: bool
    overlapped: bool
    trace: Trace


class _Forward(nn.Module):
    """The model with a look, while its tensors are in place, at whether it kept them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        before = held_tensors(self.model)
        result = self.model(*args, **kwargs)
        changed_buffers(before, held_tensors(self.model))
        return result


class _Step:
    """The function that is recorded."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        trained: Sequence[str],
        call: Callable[[Sequence[Tensor]], Tuple[Sequence[Any], Mapping[str, Any]]],
        trace: Trace,
        wide: bool,
    ) -> None:
        self._forward = _Forward(model)
        self._model = model
        self._names = list(names)
        self._parameters = {name for name, _ in model.named_parameters()}
        self._trained = list(trained)
        self._call = call
        self._trace = trace
        self._wide = wide
        self.outputs = Outputs(None, [], [])
        self.reached: Tuple[str, ...] = ()

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        count, training = len(self._names), self._trace.training
        state = dict(zip(self._names, tensors[:count]))
        scale = tensors[-1]
        for name in self._trained:
            state[name] = state[name].detach().requires_grad_()
        for name in self._parameters.intersection(state):
            # What stands for a parameter is one for isinstance, and so for get_parameter.
            state[name]._is_param = True
        args, kwargs = self._call([leaf.detach() for leaf in tensors[count:-1]])
        before = {name: tensor._version for name, tensor in state.items()}
        with torch.set_grad_enabled(training), traced(self._trace):
            with watched(self._trace, _constants(self._model), self._wide):
                in_place = {f"model.{name}": tensor for name, tensor in state.items()}
                result = functional_call(self._forward, in_place, (args, kwargs))
            found = flattenTensorStructure(result) if result is not None else []
            changed = [t for name, t in state.items() if t._version != before[name]]
            gradients: List[Tensor] = []
            final = None
            if training:
                final = self._trace.final_loss([*found, *changed])
                gradients = self._gradients(final, state, scale)
        computed = self._note(result, found, final)
        return [*computed, *([] if final is None else [final.detach()]), *gradients]

    def _gradients(self, loss: Tensor, state: Mapping[str, Tensor], scale: Tensor) -> List[Tensor]:
        weights = [state[name] for name in self._trained]
        if not loss.requires_grad or not weights:
            return []
        seed = torch.ones_like(loss) * scale.to(loss.dtype)
        found = torch.autograd.grad([loss], weights, grad_outputs=[seed], allow_unused=True)
        self.reached = tuple(n for n, g in zip(self._trained, found) if g is not None)
        return [gradient for gradient in found if gradient is not None]

    def _note(self, result: Any, found: Sequence[Tensor], final: Optional[Tensor]) -> List[Tensor]:
        computed = [isinstance(tensor, FakeTensor) for tensor in found]
        # Whatever is done to a tensor here, in the middle of the recording, makes it a fake one.
        constants = [None if own else t for own, t in zip(computed, found)]
        tensors: List[Tensor] = []
        for own, tensor in zip(computed, found):
            if not own:
                continue
            inner = self._trace.is_inner_reduced(tensor, final)
            tensors.append((tensor.reshape(1) if inner else tensor).detach())
        self.outputs = Outputs(result, computed, constants)
        return tensors


def _constants(model: nn.Module) -> List[Tensor]:
    """Tensors that are plain attributes of modules: constants of the program."""
    return [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor)
    ]


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards no attribute is a tensor of the recording, without a value, and none is gone."""
    namespaces = [vars(module) for module in model.modules()]
    namespaces += [own[members] for own in list(namespaces) for members in _MEMBERS]
    before = [dict(namespace) for namespace in namespaces]
    try:
        yield
    finally:
        for namespace, known in zip(namespaces, before):
            for name in [n for n, value in namespace.items() if isinstance(value, FakeTensor)]:
                del namespace[name]
            for name, value in known.items():
                namespace.setdefault(name, value)


_MEMBERS = ("_parameters", "_buffers")


def record(
    model: nn.Module,
    state: Mapping[str, Tensor],
    trained: Sequence[str],
    call: Callable[[Sequence[Tensor]], Tuple[Sequence[Any], Mapping[str, Any]]],
    leaves: Sequence[Tensor],
    training: bool,
    wide: bool = False,
) -> Recorded:
    """Record one micro-batch.

    Args:
        model: the user's, in the mode in which it is to be recorded.
        state: the device's parameters and buffers by name.
        trained: names of the parameters that get a gradient.
        call: makes the arguments of forward of the inputs.
        leaves: one micro-batch of inputs; their values are not looked at.
        training: whether there is a loss to be followed.
        wide: let float64 be.

    Raises:
        Error: forward does what a program of the device can't.
    """
    trace = Trace(training)
    step = _Step(model, list(state), trained, call, trace, wide)
    tensors = [*state.values(), *leaves, torch.ones((), dtype=torch.float64)]
    try:
        with _attributes_kept(model):
            graph = capture(step, tensors)
    except CaptureError as failure:
        raise _translated(failure) from failure
    except TypeError as failure:
        # What torch says of arguments names the class that tensors have in a recording.
        failure.args = (str(failure).replace("FakeTensor", "Tensor"),)
        raise
    step.outputs.forget()
    _own_constants(graph)
    overlaps = _overlaps(graph, len(state), len(leaves), sum(step.outputs.computed))
    changed = _changed(graph)
    names = list(state)
    return Recorded(
        graph,
        step.outputs,
        step.reached,
        tuple(i - len(names) for i in changed if len(names) <= i < len(tensors) - 1),
        tuple(names[i] for i in changed if i < len(names)),
        any(uses_random_numbers(each) for each in everywhere(graph)),
        bool(overlaps.inputs or overlaps.outputs),
        trace,
    )


def _own_constants(graph: fx.GraphModule) -> None:
    """Copy what the program holds of the user's tensors, which may be changed later."""
    # Each with what it is a copy of: the number of a tensor that is gone could come again.
    copies: Dict[int, Tuple[Tensor, Tensor]] = {}
    for part in everywhere(graph):
        for name in {str(node.target) for node in part.graph.nodes if node.op == "get_attr"}:
            value = getattr(part, name, None)
            if isinstance(value, Tensor):
                own = copies.setdefault(id(value), (value.detach().clone(), value))[0]
                # Whether it stands there as a buffer or as a plain attribute.
                delattr(part, name)
                setattr(part, name, own)
                copies[id(own)] = (own, own)


def _overlaps(graph: fx.GraphModule, state: int, inputs: int, outputs: int) -> overlap.Overlaps:
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    returned = [node for node in nodes[-1].args[0][:outputs] if isinstance(node, fx.Node)]
    return overlap.resolve(graph, placeholders[state : state + inputs], returned)


def _translated(failure: CaptureError) -> Exception:
    """What PopTorch calls this failure, with the place and the advice of ours."""
    if failure.cause == "shape":
        # What torch gives it is the operator; its readers are told what happened instead.
        return DynamicOutputShapeException(failure.brief)  # type: ignore[arg-type]
    if failure.cause == "value":
        return error(f"aten::item is only supported in eager mode: {failure.brief}")
    return error(failure.brief)


def _changed(graph: fx.GraphModule) -> List[int]:
    """Which placeholders the graph changes in place, through whatever views of them."""
    place: Dict[fx.Node, int] = {}
    changed: List[int] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            place[node] = len(place)
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            # A member of several results: of a split, say.
            source = node.args[0] if node.args else None
            if isinstance(source, fx.Node) and source in place:
                place[node] = place[source]
            continue
        _follow(node, schema, place, changed)
    return sorted(set(changed))


def _follow(node: fx.Node, schema: Any, place: Dict[fx.Node, int], changed: List[int]) -> None:
    batch_norm = "batch_norm" in schema.name
    given: Dict[str, Any] = dict(zip((a.name for a in schema.arguments), node.args))
    given.update(node.kwargs)
    for argument in schema.arguments:
        value = given.get(argument.name)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(each, fx.Node) or each not in place:
                continue
            alias = argument.alias_info
            if alias is not None:
                if alias.is_write:
                    changed.append(place[each])
                place[node] = place[each]
            elif batch_norm and argument.name in ("running_mean", "running_var"):
                # It changes them without saying so in its schema.
                changed.append(place[each])
