"""Record a model's forward, and its backward when training, as a graph."""

from __future__ import annotations

import contextlib
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor

from ipufit.errors import CaptureError
from ipufit.poptorch._errors import error
from ipufit.poptorch._loss_scale import ScalingSettings, Tracked
from ipufit.poptorch._operators.control import everywhere
from ipufit.poptorch._operators.identities import Overlaps, resolve_overlaps
from ipufit.poptorch._parsers import flattenTensorStructure
from ipufit.poptorch._recorded_program import Outputs, RecordedProgram, find_writes
from ipufit.poptorch._tracing import Trace, traced
from ipufit.poptorch._watching import watched
from ipufit.tracing.capture import capture, uses_random_numbers
from ipufit.tracing.graph_analysis import schema_of
from ipufit.utils.state import call_with

__all__ = ["record"]


# Their running statistics may be rebound; the program has them under their names all the same.
_EXEMPT = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ModuleTensors(NamedTuple):
    """Parameters and buffers of a module by name, as the very objects."""

    buffers: Dict[str, Tensor]
    parameters: Dict[str, Tensor]


def module_tensors(model: nn.Module) -> ModuleTensors:
    """Return parameters and buffers of a module, without the buffers of batch normalisation."""
    buffers: Dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not isinstance(module, _EXEMPT):
            buffers.update(module.named_buffers(prefix=path, recurse=False))
    return ModuleTensors(buffers, dict(model.named_parameters()))


def check_not_replaced(before: ModuleTensors, after: ModuleTensors) -> None:
    """Refuse a forward that removed or replaced a buffer or parameter.

    Args:
        before, after: tensors of the recorded module, before and after the recording.
    Raises:
        Error: one was removed, or replaced by another tensor.
    """
    for what, old, new in [
        ("Buffer", before.buffers, after.buffers),
        ("Parameter", before.parameters, after.parameters),
    ]:
        for name, tensor in old.items():
            if name not in new:
                raise error(
                    f"{what} {name} is removed from the model when calling the forward method. "
                    "Keep it, and change its values in place."
                )
            if new[name] is not tensor:
                raise error(
                    f"{what} {name} is reassigned within the model when calling the forward "
                    "method. This is not supported. Consider using "
                    f"self.{name}.copy_(src) to copy data from a source tensor, where src is the "
                    "name of the source tensor."
                )


_LARGEST = 65504.0

_PRODUCTS = {
    "aten::addmm",
    "aten::baddbmm",
    "aten::bmm",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::mm",
}


def count_large(graph: fx.GraphModule, settings: ScalingSettings, gradients: int) -> int:
    """Make the graph return the number of large elements of gradients, before its gradients.

    Tracked are float16 values that the gradient of the loss flows through, and that are not views.
    A device's compiler sees the same values, except inside operators that it splits differently.

    Args:
        graph: changed in place; its last input is the scale of the loss.
        settings: the size from which an element is large, and which gradients are tracked.
        gradients: how many gradients the graph returns, last of all.
    Returns:
        Number of elements that are tracked.
    Raises:
        Error: there is none: no gradient is in half precision.
    """
    nodes = _tracked(graph, settings.tracked)
    if not nodes:
        raise error(
            "No tracked gradient tensors of type fp16 were found. Automatic loss scaling follows "
            "gradients of half precision: call model.half(), or leave "
            "Training.setAutomaticLossScaling off."
        )
    ops = torch.ops.aten
    edge = settings.edge * _LARGEST
    total: Any = None
    for node in nodes:
        with graph.graph.inserting_before(node.next):
            # In single precision, which holds the edge. Not `>=`: what is no number is not small.
            wide = graph.graph.call_function(ops._to_copy.default, (node,), {"dtype": torch.float})
            size = graph.graph.call_function(ops.abs.default, (wide,))
            small = graph.graph.call_function(ops.lt.Scalar, (size, edge))
            large = graph.graph.call_function(ops.bitwise_not.default, (small,))
            number = graph.graph.call_function(ops.sum.default, (large,))
            if total is not None:
                number = graph.graph.call_function(ops.add.Tensor, (total, number))
            total = number
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    returned = list(output.args[0])
    returned.insert(len(returned) - gradients, total)
    output.args = (returned,)
    graph.graph.lint()
    graph.recompile()
    return sum(node.meta["val"].numel() for node in nodes)


def _tracked(graph: fx.GraphModule, method: Tracked) -> List[fx.Node]:
    scale = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    seed = _seed(scale)
    below: Set[fx.Node] = set()
    tracked = []
    for node in graph.graph.nodes:
        if not below.intersection(node.all_input_nodes) and node not in seed:
            continue
        below.add(node)
        if node not in seed and _is_half(node) and node.users and _computes(node, method):
            tracked.append(node)
    return tracked


def _seed(scale: fx.Node) -> Tuple[fx.Node, ...]:
    """Return the scale and the nodes that read it first, the gradient of the loss: not tracked."""
    converted = [user for user in scale.users if user.target is torch.ops.aten._to_copy.default]
    return (scale, *converted, *(user for node in [scale, *converted] for user in node.users))


def _is_half(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


def _computes(node: fx.Node, method: Tracked) -> bool:
    source = node
    while schema_of(source) is None and source.all_input_nodes:
        # One of several results.
        source = source.all_input_nodes[0]
    schema = schema_of(source)
    if schema is None or node.op != "call_function":
        return False
    if method == Tracked.Products:
        return schema.name in _PRODUCTS
    aliases = [result.alias_info for result in schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)


class _Forward(nn.Module):
    """Calls the model, and checks that it did not replace its parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        before = module_tensors(self.model)
        result = self.model(*args, **kwargs)
        check_not_replaced(before, module_tensors(self.model))
        return result


class _Step:
    """The function that is recorded: forward, and when training its backward."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        trained: Sequence[str],
        call: Callable[[Sequence[Tensor]], Tuple[Sequence[Any], Mapping[str, Any]]],
        trace: Trace,
        wide: bool,
        scoped: bool,
    ) -> None:
        self._scoped = scoped
        self._forward = _Forward(model)
        self._model = model
        self._names = list(names)
        self._parameters = {name for name, _ in model.named_parameters()}
        self._trained = list(trained)
        self._call = call
        self._trace = trace
        self._wide = wide
        self.outputs = Outputs(None, [], [])
        self.with_gradient: Tuple[str, ...] = ()

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
            scopes = self._trace.activations.named_by(self._model, self._scoped)
            with watched(self._trace, _constants(self._model), self._wide), scopes:
                in_place = {f"model.{name}": tensor for name, tensor in state.items()}
                result = call_with(self._forward, in_place, (args, kwargs))
            outputs = flattenTensorStructure(result) if result is not None else []
            changed = [t for name, t in state.items() if t._version != before[name]]
            gradients: List[Tensor] = []
            final = None
            if training:
                final = self._trace.final_loss([*outputs, *changed])
                gradients = self._gradients(final, state, scale)
        computed = self._note(result, outputs, final)
        return [*computed, *([] if final is None else [final.detach()]), *gradients]

    def _gradients(self, loss: Tensor, state: Mapping[str, Tensor], scale: Tensor) -> List[Tensor]:
        weights = [state[name] for name in self._trained]
        if not loss.requires_grad or not weights:
            return []
        seed = torch.ones_like(loss) * scale.to(loss.dtype)
        gradients = torch.autograd.grad([loss], weights, grad_outputs=[seed], allow_unused=True)
        self.with_gradient = tuple(n for n, g in zip(self._trained, gradients) if g is not None)
        return [gradient for gradient in gradients if gradient is not None]

    def _note(
        self, result: object, outputs: Sequence[Tensor], final: Optional[Tensor]
    ) -> List[Tensor]:
        computed = [isinstance(tensor, FakeTensor) for tensor in outputs]
        # Whatever is done to a tensor here, in the middle of the recording, makes it a fake one.
        constants = [None if is_computed else t for is_computed, t in zip(computed, outputs)]
        tensors: List[Tensor] = []
        for is_computed, tensor in zip(computed, outputs):
            if not is_computed:
                continue
            inner = self._trace.is_inner_reduced(tensor, final)
            tensors.append((tensor.reshape(1) if inner else tensor).detach())
        self.outputs = Outputs(result, computed, constants)
        return tensors


def _constants(model: nn.Module) -> List[Tensor]:
    """Return the tensors that are plain attributes of modules: constants of the program."""
    return [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor)
    ]


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules afterwards, and drop tensors of the recording from them."""
    namespaces = [vars(module) for module in model.modules()]
    namespaces += [module_vars[members] for module_vars in list(namespaces) for members in _MEMBERS]
    before = [dict(namespace) for namespace in namespaces]
    try:
        yield
    finally:
        for namespace, attributes in zip(namespaces, before):
            for name in [n for n, value in namespace.items() if isinstance(value, FakeTensor)]:
                del namespace[name]
            for name, value in attributes.items():
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
    scaling: Optional[ScalingSettings] = None,
    scoped: bool = True,
) -> RecordedProgram:
    """Record one micro-batch.

    Args:
        model: the user's, in the mode in which it is to be recorded.
        state: the device's parameters and buffers by name.
        trained: names of the parameters that get a gradient.
        call: makes the arguments of forward of the inputs.
        leaves: one micro-batch of inputs; their values are not looked at.
        training: whether there is a loss to be followed.
        wide: let float64 be.
        scaling: of an automatic loss scaling, which wants large gradients counted.
        scoped: whether names within the program have those of the modules before them.

    Raises:
        Error: forward does what a program of the device can't.
    """
    trace = Trace(training)
    step = _Step(model, list(state), trained, call, trace, wide, scoped)
    tensors = [*state.values(), *leaves, torch.ones((), dtype=torch.float64)]
    try:
        with _attributes_kept(model):
            graph = capture(step, tensors, whole_layers=False)
    except CaptureError as failure:
        raise _translated(failure) from failure
    except TypeError as failure:
        # What torch says of arguments names the class that tensors have in a recording.
        failure.args = (str(failure).replace("FakeTensor", "Tensor"),)
        raise
    step.outputs.forget()
    _own_constants(graph)
    overlaps = _overlaps(graph, len(state), len(leaves), sum(step.outputs.computed))
    writes = find_writes(graph)
    names = list(state)
    counted = 0 if scaling is None else count_large(graph, scaling, len(step.with_gradient))
    return RecordedProgram(
        graph,
        step.outputs,
        step.with_gradient,
        tuple(i - len(names) for i in writes.changed if len(names) <= i < len(tensors) - 1),
        tuple(names[i] for i in writes.changed if i < len(names)),
        any(uses_random_numbers(each) for each in everywhere(graph)),
        bool(overlaps.inputs or overlaps.outputs),
        trace,
        counted,
        trace.activations.names_in(graph),
        tuple(names[i] for i in writes.statistics if i < len(names)),
    )


def _own_constants(graph: fx.GraphModule) -> None:
    """Copy the user's tensors that the program contains, because they may be changed later."""
    # Each with what it is a copy of: the number of a tensor that is gone could come again.
    copies: Dict[int, Tuple[Tensor, Tensor]] = {}
    for part in everywhere(graph):
        for name in {str(node.target) for node in part.graph.nodes if node.op == "get_attr"}:
            value = getattr(part, name, None)
            if isinstance(value, Tensor):
                copy = copies.setdefault(id(value), (value.detach().clone(), value))[0]
                # Whether it stands there as a buffer or as a plain attribute.
                delattr(part, name)
                setattr(part, name, copy)
                copies[id(copy)] = (copy, copy)


def _overlaps(graph: fx.GraphModule, state: int, inputs: int, outputs: int) -> Overlaps:
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    returned = [node for node in nodes[-1].args[0][:outputs] if isinstance(node, fx.Node)]
    return resolve_overlaps(graph, placeholders[state : state + inputs], returned)


def _translated(failure: CaptureError) -> Exception:
    """Convert a failure to PopTorch's error, with the location and the advice of the original."""
    if failure.cause == "shape":
        # What torch gives it is the operator; its readers are told what happened instead.
        return DynamicOutputShapeException(failure.brief)  # type: ignore[arg-type]
    if failure.cause == "value":
        return error(f"aten::item is only supported in eager mode: {failure.brief}")
    return error(failure.brief)
