"""A recording that is under way: how operators get into its graph, and notes on their nodes.

Torch's tracer takes several times as long for an operator as it takes to note it down, since it
also follows symbolic sizes, constants and other kinds of tensors. An operator over fake tensors
alone has none of them, and is noted here; any other one still goes to torch's tracer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from threading import get_ident
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map_only

from ipufit.partition.recomputation import watch_calls
from ipufit.utils.state import replaced

_AGAIN = "ipufit_again"
_BACKWARD = "ipufit_backward"
_SEGMENT = "ipufit_segment"

# Tags of operators that look at values, or make a shape of them.
NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

# Of these, a result has the size of a tensor that is passed, whatever the sizes of others.
_NORMALIZATIONS = (torch.ops.aten.native_batch_norm, torch.ops.aten.native_batch_norm_backward)

_KINDS = (torch.dtype, torch.device, torch.layout, torch.memory_format)

# Called with what torch is about to follow back, and with None when it has.
Listener = Callable[[Optional[Tensor]], None]

_LISTENERS: List[Listener] = []


def current_tracer() -> Optional[Any]:
    """Return the innermost tracer that is recording; None outside of a recording."""
    # Before torch 2.4 a mode that is set aside stays on the stack, switched off.
    for mode in reversed(_get_current_dispatch_mode_stack()):
        is_on = getattr(mode, "enable_tracing", True)
        if is_on and isinstance(mode, proxy_tensor.ProxyTorchDispatchMode):
            return mode.tracer
    return None


def current_graph() -> Optional[fx.Graph]:
    """Return the graph of the innermost recording; None where a function runs on values."""
    tracer = current_tracer()
    return None if tracer is None else tracer.graph


def make_graph(function: Callable[..., object], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Record a function of tensors; the graph is compiled when it is called for the first time."""
    record = functools.partial(
        proxy_tensor.make_fx, tracing_mode="fake", _allow_non_fake_inputs=True
    )
    # What torch notes of each call, for its compilers, nobody here reads.
    if "_disable_torch_fn_metadata_mode" in inspect.signature(record).parameters:
        record = functools.partial(record, _disable_torch_fn_metadata_mode=True)
    # What torch.compile has made says by torch's flag that it can't be recorded.
    flag = fx._symbolic_trace
    if hasattr(flag, "_is_fx_tracing_context"):  # from torch 2.14, of each thread
        is_tracing = flag._is_fx_tracing_context(True)
    else:
        is_tracing = replaced((flag, "_is_fx_tracing_flag", True))
    trace = functools.partial(_dispatch_trace, get_ident(), proxy_tensor.dispatch_trace)
    with replaced((proxy_tensor, "dispatch_trace", trace)), is_tracing:
        return record(function)(*inputs)


def _dispatch_trace(
    thread: int,
    torchs: Callable[..., fx.GraphModule],
    root: Callable[..., object],
    tracer: fx.Tracer,
    concrete_args: Tuple[object, ...],
) -> fx.GraphModule:
    """Record into a graph what a function does to tensors of a recording, as torch's namesake does.

    Torch's also patches calls of modules for it, and so changes every class of them, a fifth of the
    time of a small recording; only a tracer that looks at those calls needs it. Another thread may
    compile something at the same time, which goes torch's way.
    """
    if get_ident() != thread:
        return torchs(root, tracer, concrete_args)
    graph_module = fx.GraphModule
    with contextlib.suppress(ImportError):  # before torch 2.3
        from torch.fx._lazy_graph_module import _LazyGraphModule

        graph_module = _LazyGraphModule
    graph = fx.Graph(tracer_cls=type(tracer))
    tracer.root, tracer.graph, tracer.tensor_attrs = nn.Module(), graph, {}
    proxies = []
    for place, _ in enumerate(tree_flatten(concrete_args)[0]):
        proxies.append(fx.Proxy(graph.placeholder(f"arg{place}_1"), tracer))
    graph.output(tracer.create_arg(root(*proxies)))
    return graph_module(tracer.root, graph)


class LeftBehindError(RuntimeError):
    """A tensor of an earlier recording, which has no values, is used in this one."""


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the operators of a recording, and writes them into its graph.

    It is made when the recording has begun, before any other mode of ours is active.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A mode beside those of the recording may change what is recorded.
        modes = _get_current_dispatch_mode_stack()
        self._tracer: Any = current_tracer() if len(modes) == 2 else None
        self._modes = modes
        self._names: Dict[torch._ops.OpOverload, str] = {}
        # By call: the type of what it returned, and for each result the place of a tensor of that
        # form among those that were passed, -1 where none is, and such a tensor.
        self._results: Dict[object, Tuple[type, List[Tuple[int, FakeTensor]]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would put two more calls around each operator, to keep its compiler away.
        return False

    def run(
        self, func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        """Compute the result of an operator, as a fake tensor, and record it.

        Args:
            func: the operator.
            args, kwargs: of its call.
        """
        optional, tracer = _optional_arguments(func), current_tracer()
        if optional is None or tracer is None or tracer is not self._tracer:
            return func(*args, **kwargs)
        options = {}
        try:
            inputs = tuple(map(self._argument, args))
            for name, value in kwargs.items():
                if value is not None or name not in optional:
                    options[name] = self._argument(value)
        except LookupError:
            return func(*args, **kwargs)
        if func not in self._names:
            self._names[func] = tracer.graph._target_to_str(func.overloadpacket.__name__)
        # What fails leaves nothing in the graph.
        result, snapshot = self._compute(func, args, kwargs)
        node = tracer.graph.create_node("call_function", func, inputs, options, self._names[func])
        self._follow(result, snapshot, node)
        return result

    def _compute(
        self, func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Tuple[object, object]:
        """Return what an operator returns, and a snapshot of it, which nobody changes.

        Neither a view nor a call like an earlier one asks torch, which works out in Python what
        comes of many operators. Most calls in a large model are like others, since its layers are
        alike. Torch also keeps what they come to, but it takes half the time of a recording to look
        for that.
        """
        tensors: List[FakeTensor] = []
        calls: List[object] = []
        with contextlib.suppress(LookupError):
            settings = _form((*args, *kwargs.values()), tensors)
            if tensors and _returns_views(func):
                views, snapshots = _fakes(tensors[0], func, *args, **kwargs)
                _form(views, [])
                return views, snapshots
            modes = (torch.get_default_dtype(), torch.is_inference_mode_enabled())
            # By the very layouts of tensors; else, where that says enough, by what any size has.
            call = (func, modes, *kwargs, settings)
            layouts = list(map(_layout, tensors))
            calls.append((call, *layouts))
            sizes = [] if calls[0] in self._results else _relative_sizes(func, tensors)
            calls += [(call, *sizes)] if sizes else []
        kind, results = self._results.get(calls[-1], (None, [])) if calls else (None, [])
        if kind is not None and results:
            return _fakes(results[0][1], _empty_like, kind, results, tensors)
        with proxy_tensor.disable_proxy_modes_tracing():
            result = func(*args, **kwargs)
            snapshot = tree_map_only(Tensor, proxy_tensor.snapshot_fake, result)
        if calls and kind is None:
            results = []
            for template in _templates(func, result, tensors):
                form = _layout(template)
                results.append((layouts.index(form) if form in layouts else -1, template))
                # What has no values is like nothing that was passed, and of one size.
                if form not in layouts and template.shape != (0,):
                    calls = calls[:1]
            self._results.update(dict.fromkeys(calls, (type(result), results)))
        return result, snapshot

    def _argument(self, value: object) -> fx.node.Argument:
        """Return what stands for an argument in the graph.

        Raises:
            LookupError: it is neither a tensor of the recording nor a plain value.
            LeftBehindError: it is a tensor of another recording.
        """
        if type(value) is FakeTensor:
            slot = proxy_tensor.get_proxy_slot(value, self._tracer, None)
            if slot is not None and slot.constant is None:
                return slot.proxy.node
            if value.fake_mode not in self._modes:
                raise LeftBehindError
        elif value is None or isinstance(value, (int, float, str, *_KINDS)):
            return value
        elif type(value) is list:
            return list(map(self._argument, value))
        raise LookupError(value)

    def _follow(self, result: object, snapshot: object, node: fx.Node) -> None:
        """Note which node computes a tensor, or each tensor of several results."""
        node.meta["val"] = snapshot
        if isinstance(result, Tensor):
            slot = proxy_tensor._ProxyTensor(fx.Proxy(node, self._tracer), None)
            proxy_tensor.set_proxy_slot(result, self._tracer, slot)
        elif isinstance(result, (list, tuple)) and isinstance(snapshot, (list, tuple)):
            for place, part in enumerate(result):
                if isinstance(part, Tensor):
                    item = node.graph.call_function(operator.getitem, (node, place))
                    self._follow(part, snapshot[place], item)


def _form(value: object, tensors: List[FakeTensor]) -> object:
    """Return all of an argument that a fake result depends on but tensors, which go to the list.

    Raises:
        LookupError: it is not plain.
    """
    if type(value) is FakeTensor:
        is_odd = value.layout is not torch.strided or value.is_conj() or value.is_neg()
        if value.constant is not None or is_odd:
            raise LookupError(value)
        tensors.append(value)
        return FakeTensor
    if isinstance(value, (list, tuple)):
        return (type(value), *map(functools.partial(_form, tensors=tensors), value))
    if value is None or isinstance(value, (int, float, str, *_KINDS)):
        return type(value), value
    raise LookupError(value)


def _layout(tensor: FakeTensor) -> Tuple[object, ...]:
    """Return all of a plain tensor that a fake result depends on."""
    layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
    return (*layout, tensor.untyped_storage().nbytes(), tensor.dtype, tensor.fake_device)


def _relative_sizes(
    func: torch._ops.OpOverload, tensors: Sequence[FakeTensor]
) -> List[Tuple[object, ...]]:
    """Describe tensors by all that says which of them the results of a call are like, of any size.

    Returns:
        Nothing where these may depend on more than that.
    """
    sizes: List[Tuple[object, ...]] = []
    if torch.Tag.pointwise not in func.tags and func.overloadpacket not in _NORMALIZATIONS:
        return []
    for tensor in tensors:
        is_whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        strides = torch._prims_common.make_contiguous_strides_for(tensor.shape)
        if not is_whole or tensor.stride() != strides:
            return []
        # One value is as many as others have there, and without values torch takes other strides.
        relative = tuple(map(functools.partial(min, 2), tensor.shape))
        sizes.append((relative, tensor.dtype, tensor.fake_device))
    return sizes


def _fakes(
    source: FakeTensor, function: Callable[..., object], *args: object, **kwargs: object
) -> Tuple[object, object]:
    """Return fake tensors, and a snapshot of them, like what a function returns.

    Args:
        source: of the same recording, on the device that the results are on.
        function: called with ``args`` and ``kwargs``; it sees tensors without values.
    """
    with in_kernel_invocation_manager(source.fake_mode):
        result = function(*args, **kwargs)
    fake = functools.partial(FakeTensor, source.fake_mode, device=source.fake_device)
    if isinstance(result, (list, tuple)):
        return type(result)(map(fake, result)), type(result)(map(fake, result))
    return fake(result), fake(result)


def _empty_like(
    kind: type, sources: Sequence[Tuple[int, Tensor]], tensors: Sequence[Tensor]
) -> object:
    """Return tensors without values, in memory of their own, of the forms of others.

    Args:
        kind: of what holds them, where it is a list or tuple; else it is a single tensor.
        sources: for each the place of the other tensor, and one to take where that is -1.
        tensors: the others.
    """
    results = []
    for place, template in sources:
        tensor = template if place < 0 else tensors[place]
        shape, stride, dtype = tensor.shape, tensor.stride(), tensor.dtype
        results.append(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
    return kind(results) if kind in (list, tuple) else results[0]


@functools.lru_cache(maxsize=None)
def _returns_views(func: torch._ops.OpOverload) -> bool:
    """Tell whether an operator returns views of its first argument."""
    schema = func._schema
    # Of one the schema is silent.
    is_silent = func is torch.ops.aten._unsafe_view.default
    is_view = is_silent or schema.arguments[0].alias_info is not None
    return is_view and func.namespace == "aten" and not schema.is_mutable


def _templates(
    func: torch._ops.OpOverload, result: object, tensors: Sequence[FakeTensor]
) -> List[FakeTensor]:
    """Return tensors like the results of a call; none where torch has to make such results.

    Args:
        func: the operator.
        result: what a call returned.
        tensors: those that were passed.
    """
    parts = result if isinstance(result, (list, tuple)) else [result]
    results: List[FakeTensor] = []
    templates: List[FakeTensor] = []
    with contextlib.suppress(LookupError):
        _form(parts, results)
    if len(results) != len(parts) or func.namespace != "aten" or func._schema.is_mutable:
        return []
    memories = [tensor.untyped_storage()._cdata for tensor in tensors]
    keys = torch._C._dispatch_key_set
    for each in results:
        _form(_fakes(results[0], _empty_like, Tensor, [(-1, each)], [])[0], templates)
        memory, template = each.untyped_storage()._cdata, templates[-1]
        is_alike = _layout(template) == _layout(each) and keys(template) == keys(each)
        if memory in memories or each.requires_grad or not is_alike:
            return []
        memories.append(memory)
    return templates


@functools.lru_cache(maxsize=None)
def _optional_arguments(func: torch._ops.OpOverload) -> Optional[Set[str]]:
    """Name the arguments of a plain operator that are None where nothing is passed.

    Returns:
        None of an operator that is not plain: one that reads a value, which may be a constant's;
        one that only composes others, and is recorded as these; and one that makes a constant of a
        tensor that Python has made of numbers.
    """
    name = func.name()  # type: ignore[no-untyped-call]
    if (
        not NEEDS_VALUES.isdisjoint(func.tags)
        or torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        or func.overloadpacket in (torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy)
    ):
        return None
    names = set()
    for argument in func._schema.arguments:
        if argument.has_default_value() and argument.default_value is None:
            names.add(argument.name)
    return names


def is_backward(node: fx.Node) -> bool:
    """Tell whether the node was recorded while torch followed the loss back."""
    return _BACKWARD in node.meta


def mark_backward(node: fx.Node) -> None:
    """Count the node among those of the backward pass."""
    node.meta[_BACKWARD] = True


def mark_again(node: fx.Node, first: fx.Node) -> None:
    """Note that the node computes again what another one was recorded for."""
    node.meta[_AGAIN] = recorded_name(first)


def is_again(node: fx.Node) -> bool:
    """Tell whether the node computes again what another one was recorded for."""
    return _AGAIN in node.meta


def recorded_name(node: fx.Node) -> str:
    """The name that the node, or the one that it computes again, had in the recording."""
    name: str = node.meta.get(_AGAIN, node.name)
    return name


def segment_of(node: fx.Node) -> Optional[int]:
    """The number of the call of a marked layer in which the node was recorded, or None."""
    segment: Optional[int] = node.meta.get(_SEGMENT)
    return segment


class GraphPlace:
    """A place in the graph of a recording: behind what is recorded so far.

    Args:
        graph: of the recording; None where a function runs on values.
    """

    def __init__(self, graph: Optional[fx.Graph]) -> None:
        self._graph = graph
        self._last = None if graph is None else next(iter(reversed(graph.nodes)))

    def nodes_after(self) -> List[fx.Node]:
        """List the nodes that were recorded since, in their order."""
        nodes: List[fx.Node] = []
        if self._graph is not None:
            for node in reversed(self._graph.nodes):
                if node is self._last:
                    break
                nodes.append(node)
        return nodes[::-1]


@contextlib.contextmanager
def mark_backward_pass(objective: Optional[Tensor] = None) -> Iterator[None]:
    """Mark what is recorded in the block as part of the backward pass.

    Args:
        objective: what is followed back; for whoever listens.
    """
    start = GraphPlace(current_graph())
    for tell in _LISTENERS:
        tell(objective)
    yield
    for tell in _LISTENERS:
        tell(None)
    for node in start.nodes_after():
        node.meta[_BACKWARD] = True


def autograd_nodes(
    first: Sequence[Optional[torch.autograd.graph.Node]], passed_over: Mapping[object, object] = {}
) -> Iterator[torch.autograd.graph.Node]:
    """Yield the nodes of autograd's graph that a backward pass goes through, each once.

    Args:
        first: the ``grad_fn`` of the tensors that it begins with; None of a tensor without one.
        passed_over: nodes that are left out, with those that lie behind them alone.
    """
    todo, visited = list(first), set()
    while todo:
        node = todo.pop()
        if node is None or node in visited or node in passed_over:
            continue
        # Python lets go of a node's wrapper, and with it of its identity, unless somebody holds it.
        visited.add(node)
        yield node
        for following, _ in node.next_functions:
            todo.append(following)


@contextlib.contextmanager
def listen_to_backward(listener: Listener) -> Iterator[None]:
    """Tell of every backward pass in the block."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


@contextlib.contextmanager
def mark_layers(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Mark what is recorded in each call of these layers as belonging together.

    Raises:
        ConfigurationError: one of them was never called.
    """
    graph = current_graph()
    starts, calls = [], 0

    def begin(name: str) -> None:
        starts.append(GraphPlace(graph))

    def end(name: str, output: object) -> None:
        nonlocal calls
        for node in starts.pop().nodes_after():
            node.meta[_SEGMENT] = calls
        calls += 1

    with watch_calls(module, names, begin, end):
        yield
