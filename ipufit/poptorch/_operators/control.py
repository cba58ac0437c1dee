"""Loops and branches that are decided at run time; each body is recorded once."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple, Union

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

from ipufit.poptorch._logging import error
from ipufit.poptorch._precision import device_dtype, half_computed, makes_half
from ipufit.poptorch._tracing import Numbered, Trace, define, tensor_list, tracing
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.graph_analysis import Memories
from ipufit.tracing.interpreter import Listener, OperatorCall, watch_operators
from ipufit.tracing.recording import current_tracer


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


class Body:
    """A recorded function of its inputs and of tensors captured from the graph around it.

    Attributes:
        number: identifies the body in the nodes that call it.
        graph: computes a list of tensors from the inputs, then the captured tensors.
        results: shape and dtype of each result.
    """

    def __init__(self, graph: fx.GraphModule, results: Sequence[Union[Tensor, TensorSpec]]) -> None:
        self.graph = graph
        self.results = [TensorSpec(result.shape, result.dtype) for result in results]
        self.number = _BODIES.add(self)
        self._half = makes_half(graph)
        self._writes = bool(Memories(graph.graph).writes)

    def run(self, inputs: Sequence[Tensor], captured: Sequence[Tensor]) -> List[Tensor]:
        """Compute the results without changing the inputs or the captured tensors.

        Results may be arguments, or views of them.
        """
        arguments = [*inputs, *captured]
        if self._writes:
            arguments = [tensor.clone() for tensor in arguments]
        # The mode of the program around this operator does not reach into it.
        with torch.no_grad(), half_computed(self._half, arguments):
            return list(self.graph(*arguments))


_BODIES: Numbered[Body] = Numbered("the body of a poptorch.for_loop or poptorch.cond")


def _without_aliases(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> List[Tensor]:
    """Copy the results that share memory with an input or another result, which torch forbids."""
    storages = {storage_id(tensor) for tensor in inputs}
    separate = []
    for result in results:
        storage = storage_id(result)
        separate.append(result.clone() if storage in storages else result)
        storages.add(storage)
    return separate


def _run_repeat(
    inputs: List[Tensor], captured: List[Tensor], count: int, body: int
) -> List[Tensor]:
    recorded = _BODIES[body]
    state = list(inputs)
    for _ in range(count):
        state = recorded.run(state, captured)
    return _without_aliases(state, [*inputs, *captured])


REPEAT = define(
    "repeat(Tensor[] inputs, Tensor[] captured, int count, int body) -> Tensor[]",
    _run_repeat,
    lambda inputs, captured, count, body: [torch.empty_like(tensor) for tensor in inputs],
)


def _run_branch(
    condition: Tensor,
    then_inputs: List[Tensor],
    then_captured: List[Tensor],
    else_inputs: List[Tensor],
    else_captured: List[Tensor],
    then_body: int,
    else_body: int,
) -> List[Tensor]:
    number, inputs, captured = then_body, then_inputs, then_captured
    if not condition.item():
        number, inputs, captured = else_body, else_inputs, else_captured
    return _without_aliases(_BODIES[number].run(inputs, captured), [*inputs, *captured])


def _shape_branch(condition: Tensor, *rest: Any) -> List[Tensor]:
    results = _BODIES[rest[4]].results
    return [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in results]


BRANCH = define(
    "branch(Tensor condition, Tensor[] then_inputs, Tensor[] then_captured, "
    "Tensor[] else_inputs, Tensor[] else_captured, int then_body, int else_body) -> Tensor[]",
    _run_branch,
    _shape_branch,
)


class _Lift(Listener):
    """Turns every tensor captured from around a body into an input of the body's graph."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.captured: List[Tensor] = []

    def before(self, call: OperatorCall) -> None:
        """Lift the arguments."""
        for tensor in call.inputs:
            self.lift(tensor)

    def lift(self, tensor: Tensor) -> None:
        """Make a tensor an input unless the body has it."""
        # In a body within this body, what is foreign is so to the inner one.
        is_foreign = isinstance(tensor, FakeTensor) and current_tracer() is self._inner
        if not is_foreign or proxy_tensor.has_proxy_slot(tensor, self._inner):
            return
        name = f"captured_{len(self.captured)}"
        proxy = self._inner.create_proxy("placeholder", name, (), {})
        proxy_tensor.track_tensor(tensor, proxy, constant=None, tracer=self._inner)
        self.captured.append(tensor)


def record(
    function: Callable[..., object], inputs: Sequence[Tensor], what: str
) -> Tuple[Body, List[Tensor]]:
    """Call a function once and record its operators as a graph.

    Args:
        function: takes as many tensors as there are inputs; it gets copies of them, and may use
            other tensors of the recording under way.
        inputs: tensors of the shapes and dtypes that the body will be called with.
        what: what error messages call the function.

    Returns:
        The body, and the captured tensors in the order in which it wants them.
    Raises:
        Error: it returned something other than tensors.
    """
    expectation = f"{what} must return tensors, or a list or tuple of them"
    advice = "Return only what depends on its inputs as tensors."
    lifts: List[_Lift] = []
    results: List[Tensor] = []

    # The first argument is there so that there is one.
    def traced(_: Tensor, *arguments: Tensor) -> List[Tensor]:
        lift = _Lift(current_tracer())
        lifts.append(lift)
        with watch_operators(lift):
            results.extend(tensor_list(function(*arguments), expectation, advice))
            for result in results:
                lift.lift(result)
        return list(results)

    with proxy_tensor.disable_proxy_modes_tracing():
        # Made anew: a copy of a constant would be known, and its value written into the graph.
        fresh = [torch.empty_like(tensor) for tensor in inputs]
        graph = proxy_tensor.make_fx(traced)(torch.empty(()), *fresh)
        captured = lifts[0].captured + _gather_inputs(graph)
        body = Body(graph, results)
    trace = tracing()
    if trace is not None:
        trace.keep_alive.append(body)
    return body, captured


def _gather_inputs(graph: fx.GraphModule) -> List[Tensor]:
    """Put the inputs first, and make inputs of tensors that are attributes of the graph.

    Returns:
        What these attributes were: parameters and buffers that the caller did not pass on.
    """
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    graph.graph.erase_node(placeholders[0])
    last = graph.graph._root
    for node in placeholders[1:]:
        if last.next is not node:
            last.append(node)
        last = node
    attributes: Dict[str, fx.Node] = {}
    captured: List[Tensor] = []
    for node in [n for n in graph.graph.nodes if n.op == "get_attr"]:
        # Literals: torch.tensor in the function.
        if all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users):
            continue
        if node.target not in attributes:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"held_{len(captured)}")
            attributes[node.target] = last
            captured.append(getattr(graph, node.target))
        node.replace_all_uses_with(attributes[node.target])
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return captured


def everywhere(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield a graph and, at any depth, the graphs of the bodies that it calls."""
    yield graph
    for node in graph.graph.nodes:
        for number in _called(node):
            yield from everywhere(_BODIES[number].graph)


def _body_positions(node: fx.Node) -> Tuple[int, ...]:
    """Return the positions of the arguments of a node that are numbers of bodies."""
    if node.target is REPEAT:
        return (3,)
    return (5, 6) if node.target is BRANCH else ()


def _called(node: fx.Node) -> List[int]:
    return [int(node.args[place]) for place in _body_positions(node)]  # type: ignore[arg-type]


def bodies_in(graph: fx.GraphModule) -> Dict[int, Body]:
    """Map numbers to the bodies that a graph calls, at any depth; inner bodies come first."""
    numbers = {n for g in everywhere(graph) for node in g.graph.nodes for n in _called(node)}
    return {number: _BODIES[number] for number in sorted(numbers)}


def renumber(graph: fx.GraphModule, numbers: Mapping[int, int]) -> None:
    """Let a graph that was read from a file call the bodies of this process.

    Args:
        graph: changed in place.
        numbers: the present number of each body by the file's.

    Raises:
        KeyError: it calls one that is not there.
    """
    for node in graph.graph.nodes:
        for place in _body_positions(node):
            node.update_arg(place, numbers[node.args[place]])
    graph.recompile()


def _inference_only(trace: Trace, name: str) -> None:
    if trace.training:
        raise error(
            f"poptorch.{name}() is only supported in inference, but this is a training model. "
            "Wrap the model with poptorch.inferenceModel, or write the steps one after another."
        )


def _check_inputs(inputs: object, expectation: str, advice: str) -> None:
    """Refuse inputs of a body that are no list of tensors.

    Raises:
        ValueError: says what is there instead.
    """

    def refusal(where: str, value: object, advice: str) -> ValueError:
        kind = type(value).__name__
        return ValueError(
            f"{expectation} to be a list of tensors. ({where}) Got {kind}: write {advice}."
        )

    if not isinstance(inputs, list):
        raise refusal("Object is not list", inputs, advice)
    for position, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            where = f"Object contained in list at index {position} is not torch.tensor"
            raise refusal(where, tensor, "torch.tensor(...) around a number")


def _listed(value: object) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def for_loop(count: int, body: Callable[..., object], inputs: List[Tensor]) -> List[Tensor]:
    """Run a body several times, each time on what it returned the time before.

    The body is recorded once, whatever the count is. It works on copies, so that it changes
    nothing outside of itself; other tensors of the model may be used in it.

    Args:
        count: number of turns, fixed when the model is compiled.
        body: takes as many tensors as there are inputs and returns as many, of the same shapes
            and dtypes.
        inputs: the tensors of the first turn, a list.
    Returns:
        What the last turn returned.
    Raises:
        ValueError: the inputs are no list of tensors.
        Error: a training model, a count that is not a number, or a body that returns something else
            than it takes.
    """
    _check_inputs(inputs, "poptorch.for_loop expects input tensors (inputs)", "[x] for one tensor")
    if isinstance(count, Tensor) or not isinstance(count, int) or count < 0:
        raise error(
            f"poptorch.for_loop expects count to be an int of at least 0 that is known when the "
            f"model is compiled, got {count!r}. Pass a Python int."
        )
    trace = tracing()
    if trace is None:
        state = [tensor.clone() for tensor in inputs]
        for _ in range(count):
            state = _listed(body(*[tensor.clone() for tensor in state]))
        return state
    _inference_only(trace, "for_loop")
    checked = _checked(
        body,
        inputs,
        "the body of poptorch.for_loop must return as many tensors as it takes, expected {}, got "
        "{}. Return every input, changed or not.",
        "the body of poptorch.for_loop must return tensors like its inputs: expected {} at index "
        "{position}, got {}. Convert or reshape it where the body ends.",
    )
    recorded, captured = record(checked, inputs, "the body of poptorch.for_loop")
    with torch.no_grad():
        return list(REPEAT(inputs, captured, count, recorded.number))


def _checked(
    body: Callable[..., object],
    expected: Sequence[Union[Tensor, TensorSpec]],
    number: str,
    likeness: str,
) -> Callable[..., object]:
    """Wrap a body to check its results, and to convert them to the dtypes that are expected.

    Args:
        body: returns a tensor, or a list or tuple of them.
        expected: shape and dtype of each result; dtypes that are one on the device are alike.
        number: text about another number of results, with places for both numbers.
        likeness: text about another shape or dtype, with places for both and for ``position``.
    """

    def checked(*arguments: Tensor) -> List[object]:
        results = _listed(body(*arguments))
        if len(results) != len(expected):
            raise error(number.format(len(expected), len(results)))
        for position, (result, spec) in enumerate(zip(results, expected)):
            if isinstance(result, Tensor):
                specs = [f"{tuple(t.shape)} {device_dtype(t.dtype)}" for t in (spec, result)]
                if specs[0] != specs[1]:
                    raise error(likeness.format(*specs, position=position))
                results[position] = result.to(spec.dtype)
        return results

    return checked


def cond(
    condition: Tensor,
    then_body: Callable[..., object],
    then_inps: List[Tensor],
    else_body: Callable[..., object],
    else_inps: List[Tensor],
) -> List[Tensor]:
    """Run one of two bodies; which one is decided by a tensor while the model runs.

    Both bodies are recorded; only the one that is taken is computed. They work on copies, and may
    use other tensors of the model beside their inputs.

    Args:
        condition: one element.
        then_body: takes tensors and returns one, or a list or tuple of them.
        then_inps: its inputs, a list, which may be empty.
        else_body: as ``then_body``; returns the same number of tensors, of the same shapes and
            dtypes.
        else_inps: its inputs.
    Returns:
        A list of the tensors that the body returned.
    Raises:
        ValueError: inputs that are no list of tensors.
        Error: a training model, a condition of several elements, or bodies that return
            different things.
    """
    for inputs in (then_inps, else_inps):
        expectation = "poptorch.cond expects then_inps and else_inps tensors"
        _check_inputs(inputs, expectation, "[x] for one tensor, [] for none")
    trace = tracing()
    if trace is None:
        if condition:
            return _listed(then_body(*[tensor.clone() for tensor in then_inps]))
        return _listed(else_body(*[tensor.clone() for tensor in else_inps]))
    _inference_only(trace, "cond")
    if not isinstance(condition, Tensor) or condition.numel() != 1:
        got = f"shape {tuple(condition.shape)}" if isinstance(condition, Tensor) else condition
        raise error(
            f"poptorch.cond expects the condition to be a tensor of one element, got {got}. "
            "Reduce it with torch.all or torch.any."
        )
    then_recorded, then_captured = record(then_body, then_inps, "then_body of poptorch.cond")
    checked = _checked(
        else_body,
        then_recorded.results,
        "then_body and else_body of poptorch.cond must return the same number of tensors, got {} "
        "and {}. Return a tensor unchanged where one of them has nothing to compute.",
        "then_body and else_body of poptorch.cond must return tensors of the same shape and dtype, "
        "got {} and {} at index {position}. Convert or reshape one of them at the end of its body.",
    )
    else_recorded, else_captured = record(checked, else_inps, "else_body of poptorch.cond")
    with torch.no_grad():
        return list(
            BRANCH(
                condition,
                then_inps,
                then_captured,
                else_inps,
                else_captured,
                then_recorded.number,
                else_recorded.number,
            )
        )
