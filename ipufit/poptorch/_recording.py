"""Record a model's forward, and its backward when training, as a graph."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor

from ipufit.errors import CaptureError
from ipufit.poptorch._logging import error
from ipufit.poptorch._loss_scale import ScalingSettings, count_large
from ipufit.poptorch._operators.control import everywhere
from ipufit.poptorch._operators.identities import resolve_overlaps
from ipufit.poptorch._parsers import flattenTensorStructure, reconstructTensorStructure
from ipufit.poptorch._tracing import Trace, traced
from ipufit.poptorch._watching import watched
from ipufit.tracing.capture import capture
from ipufit.tracing.fingerprint import StepModule
from ipufit.tracing.graph_analysis import Memories, operator_name
from ipufit.utils.random_operators import uses_random_numbers
from ipufit.utils.state import call_with


@dataclasses.dataclass
class Outputs:
    """Outputs of forward: tensors that the device computes, and everything else as forward made it.

    Attributes:
        structure: the return value of forward, its tensors without data.
        computed: for each tensor of the structure, whether a micro-batch computes it.
        constants: the tensors that no micro-batch computes, None elsewhere.
    """

    structure: object
    computed: List[bool]
    constants: List[Optional[Tensor]]

    def forget(self) -> None:
        """Drop the tensors of the recording, which have no values; those of the host stay."""
        self.constants = [None if t is None else t.detach().clone() for t in self.constants]
        if self.structure is not None:
            empty = [torch.empty(0) if t is None else t for t in self.constants]
            self.structure = reconstructTensorStructure(self.structure, empty)

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return what forward returned, with these tensors in place of the computed ones."""
        if self.structure is None:
            return None
        source = iter(tensors)
        every = [
            next(source) if computed else constant
            for computed, constant in zip(self.computed, self.constants)
        ]
        return reconstructTensorStructure(self.structure, every)


class MicroBatchResults(NamedTuple):
    """Results of one micro-batch.

    Attributes:
        outputs: the computed outputs of forward.
        loss: None for inference.
        large: number of large elements of gradients; None where they are not counted.
        gradients: gradients by the parameter's name.
        factors: of the old values of moving averages.
    """

    outputs: Sequence[Tensor]
    loss: Optional[Tensor]
    large: Optional[Tensor]
    gradients: Mapping[str, Tensor]
    factors: Sequence[Tensor]


@dataclasses.dataclass(frozen=True)
class RecordedProgram:
    """A micro-batch as a graph over (parameters and buffers, inputs, loss scale).

    Attributes:
        graph: returns the computed outputs, the loss when training, the number of large elements
            of gradients where they are counted, the gradients of ``with_gradient``, and the factors
            of ``averages``.
        outputs: how the graph's outputs become those of forward.
        with_gradient: names of the parameters that the loss depends on, when training.
        changed_inputs: positions of the inputs that forward changes in place.
        changed_state: names of the parameters and buffers that change other than by training.
        statistics: names of the buffers that only batch normalisation changes.
        random: whether the program draws random numbers.
        overlapped: whether a transfer is to overlap with computing.
        trace: what the model declared while it was recorded.
        counted: number of elements of gradients of which large ones are counted.
        activations: names of the graph's nodes, by the names under which tensors can be anchored.
        averages: for each moving average, the names of the weight that it follows, and its own.
    """

    graph: fx.GraphModule
    outputs: Outputs
    with_gradient: Tuple[str, ...]
    changed_inputs: Tuple[int, ...]
    changed_state: Tuple[str, ...]
    random: bool
    overlapped: bool
    trace: Trace
    counted: int = 0
    activations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    statistics: Tuple[str, ...] = ()
    averages: Tuple[Tuple[str, str], ...] = ()

    def returned(self, tensors: Sequence[Tensor]) -> MicroBatchResults:
        """Name the tensors that the graph returned."""
        outputs = sum(self.outputs.computed)
        factors = len(tensors) - len(self.averages)
        gradients = factors - len(self.with_gradient)
        return MicroBatchResults(
            tensors[:outputs],
            tensors[outputs] if self.trace.training else None,
            tensors[gradients - 1] if self.counted else None,
            dict(zip(self.with_gradient, tensors[gradients:factors])),
            tensors[factors:],
        )


def _changed_inputs(graph: fx.GraphModule) -> Tuple[List[int], List[int]]:
    """Find the placeholders that a graph changes in place, directly or through views.

    Returns:
        Positions of those that operators write into whose purpose it is, and of running statistics
        that batch normalisation alone updates.
    """
    memories = Memories(graph.graph)
    changed: List[int] = []
    statistics: List[int] = []
    for place in memories.changed:
        writers = memories.writes[memories.of(memories.inputs[place])]
        origins: List[fx.Node] = []
        for node in writers:
            # Of a float32 copy, where torch normalises no float16.
            is_copy = operator_name(node) == "aten.copy_"
            source = memories.of(node.all_input_nodes[-1]) if is_copy else node
            origins += memories.writes.get(source) or [node]
        is_normalised = all("batch_norm" in operator_name(node) for node in origins)
        (statistics if is_normalised else changed).append(place)
    return changed, statistics


# Their running statistics may be rebound; the program has them under their names all the same.
_EXEMPT = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


# The very objects by kind, "Buffer" or "Parameter", and name.
ModuleTensors = Dict[Tuple[str, str], Tensor]


def module_tensors(model: nn.Module) -> ModuleTensors:
    """Return parameters and buffers of a module, without the buffers of batch normalisation."""
    tensors: ModuleTensors = {}
    for path, module in model.named_modules():
        if not isinstance(module, _EXEMPT):
            for name, buffer in module.named_buffers(prefix=path, recurse=False):
                tensors["Buffer", name] = buffer
    tensors.update({("Parameter", name): each for name, each in model.named_parameters()})
    return tensors


def check_not_replaced(before: ModuleTensors, after: ModuleTensors) -> None:
    """Refuse a forward that removed or replaced a buffer or parameter.

    Args:
        before, after: tensors of the recorded module, before and after the recording.
    Raises:
        Error: one was removed, or replaced by another tensor.
    """
    for (kind, name), tensor in before.items():
        if (kind, name) not in after:
            raise error(
                f"{kind} {name} is removed from the model when calling the forward method. Keep "
                "it, and change its values in place."
            )
        if after[kind, name] is not tensor:
            raise error(
                f"{kind} {name} is reassigned within the model when calling the forward method. "
                f"This is not supported. Consider using self.{name}.copy_(src) to copy data from a "
                "source tensor, where src is the name of the source tensor."
            )


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


# Makes the arguments of forward of the inputs.
ArgumentMaker = Callable[[Sequence[Tensor]], Tuple[Sequence[object], Mapping[str, object]]]


@dataclasses.dataclass(eq=False)
class _Step:
    """The function that is recorded: forward, and when training its backward.

    Attributes:
        model, trained, make_arguments, wide, scoped: as for ``record``.
        names: of the device's parameters and buffers.
        trace: the recording.
        outputs, with_gradient, averages: as in a ``RecordedProgram``, after the call.
    """

    model: nn.Module
    names: Sequence[str]
    trained: Sequence[str]
    make_arguments: ArgumentMaker
    trace: Trace
    wide: bool
    scoped: bool
    outputs: Outputs = dataclasses.field(default_factory=lambda: Outputs(None, [], []))
    with_gradient: Tuple[str, ...] = ()
    averages: Tuple[Tuple[str, str], ...] = ()

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        count, training = len(self.names), self.trace.training
        state = dict(zip(self.names, tensors[:count]))
        scale = tensors[-1]
        for name in self.trained:
            state[name] = state[name].detach().requires_grad_()
        for name in {name for name, _ in self.model.named_parameters()}.intersection(state):
            # What stands for a parameter is one for isinstance, and so for get_parameter.
            state[name]._is_param = True
        args, kwargs = self.make_arguments([leaf.detach() for leaf in tensors[count:-1]])
        before = {name: tensor._version for name, tensor in state.items()}
        with torch.set_grad_enabled(training), traced(self.trace):
            scopes = self.trace.activations.named_by(self.model, self.scoped)
            with watched(self.trace, _constants(self.model), self.wide), scopes:
                in_place = {f"model.{name}": tensor for name, tensor in state.items()}
                result = call_with(_Forward(self.model), in_place, (args, kwargs))
            outputs = flattenTensorStructure(result) if result is not None else []
            changed = [t for name, t in state.items() if t._version != before[name]]
            gradients: List[Tensor] = []
            final = None
            if training:
                final = self.trace.final_loss([*outputs, *changed])
                gradients = self._gradients(final, state, scale)
        computed = self._note(result, outputs, final)
        losses = [] if final is None else [final.detach()]
        return [*computed, *losses, *gradients, *self._factors(state)]

    def _factors(self, state: Mapping[str, Tensor]) -> List[Tensor]:
        names = {id(tensor): name for name, tensor in state.items()}
        averages = []
        for *tensors, _ in self.trace.averages:
            weight, average = (names.get(id(tensor)) for tensor in tensors)
            if weight is None or average is None:
                shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
                raise error(
                    "ExpMovAvg expects a parameter or buffer of the model and another one, which "
                    f"follows it, got computed tensors of shapes {shapes}. Pass them as they are "
                    "in the model."
                )
            averages.append((weight, average))
        self.averages = tuple(averages)
        return [factor for *_, factor in self.trace.averages]

    def _gradients(self, loss: Tensor, state: Mapping[str, Tensor], scale: Tensor) -> List[Tensor]:
        weights = [state[name] for name in self.trained]
        if not loss.requires_grad or not weights:
            return []
        seed = torch.ones_like(loss) * scale.to(loss.dtype)
        gradients = torch.autograd.grad([loss], weights, grad_outputs=[seed], allow_unused=True)
        self.with_gradient = tuple(n for n, g in zip(self.trained, gradients) if g is not None)
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
            is_long = self.trace.has_one_element(tensor, final)
            tensors.append((tensor.reshape(1) if is_long else tensor).detach())
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


def record(
    model: nn.Module,
    state: Mapping[str, Tensor],
    trained: Sequence[str],
    make_arguments: ArgumentMaker,
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
        make_arguments: makes the arguments of forward of the inputs.
        leaves: one micro-batch of inputs; their values are not looked at.
        training: whether there is a loss to be followed.
        wide: let float64 be.
        scaling: of an automatic loss scaling, which wants large gradients counted.
        scoped: whether names within the program have those of the modules before them.

    Raises:
        Error: forward does what a program of the device can't.
    """
    trace = Trace(training)
    step = _Step(model, list(state), trained, make_arguments, trace, wide, scoped)
    tensors = [*state.values(), *leaves, torch.ones((), dtype=torch.float64)]
    try:
        with StepModule(model).forget_recording():
            graph = capture(step, tensors, whole_layers=False)
    except CaptureError as failure:
        raise _translated(failure) from failure
    except TypeError as failure:
        # What torch says of arguments names the class that tensors have in a recording.
        failure.args = (str(failure).replace("FakeTensor", "Tensor"),)
        raise
    step.outputs.forget()
    _own_constants(graph)
    overlapped = _overlaps(graph, len(state), len(leaves), sum(step.outputs.computed))
    changed, statistics = _changed_inputs(graph)
    names = list(state)
    behind = len(step.with_gradient) + len(step.averages)
    counted = 0 if scaling is None else count_large(graph, scaling, behind)
    return RecordedProgram(
        graph,
        step.outputs,
        step.with_gradient,
        tuple(i - len(names) for i in changed if len(names) <= i < len(tensors) - 1),
        (*(names[i] for i in changed if i < len(names)), *(name for _, name in step.averages)),
        any(uses_random_numbers(each) for each in everywhere(graph)),
        overlapped,
        trace,
        counted,
        trace.activations.names_in(graph),
        tuple(names[i] for i in statistics if i < len(names)),
        step.averages,
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


def _overlaps(graph: fx.GraphModule, state: int, inputs: int, outputs: int) -> bool:
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
