"""Hands recorded graphs to a backend of torch.compile, and holds what it makes against them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Callable, List, Optional, Sequence

import torch
from torch import Tensor, fx

from ipufit.core.compile_arguments import GRAPH, Backend
from ipufit.engines.embedded.passes.cpu_kernels import agree
from ipufit.engines.embedded.passes.select_kernels import Lowered, lower
from ipufit.engines.embedded.passes.simplify import value_of
from ipufit.errors import ConfigurationError, brief_error
from ipufit.utils.devices import is_out_of_memory
from ipufit.utils.random_operators import hoist_draws, uses_random_numbers
from ipufit.utils.random_streams import isolated, seed_generators

_WHY = (
    "Hands recorded graphs to the backend {!r} of torch.compile; each "
    "computes what the graph does, as was compared when it was compiled."
)


def compile_micro_batch(
    backend: Backend, graph: fx.GraphModule, arguments: Sequence[Tensor]
) -> Lowered:
    """Have a backend compile the recorded graph of a micro-batch.

    Args:
        backend: of torch.compile.
        graph: it stays as it is.
        arguments: a micro-batch with the state it starts from; none of them is changed.

    Raises:
        ConfigurationError: the backend can't, or computes something else.
    """
    run = _compiled(backend, graph, arguments, "the graph of a micro-batch")
    return Lowered(run, backend.name, _WHY.format(backend.name))


def compile_update(
    backend: Backend, graph: fx.GraphModule, first: Sequence[Tensor]
) -> Callable[..., List[Tensor]]:
    """Have a backend compile the recorded graph of a weight update.

    Args:
        backend: of torch.compile.
        graph: it stays as it is.
        first: the first of its inputs; the others are gradients and the optimizer's state.

    Raises:
        ConfigurationError: the backend can't, or computes something else.
    """
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    rest = _positive(inputs[len(first) :])
    return _compiled(backend, graph, [*first, *rest], "the graph of an update")


def _compiled(
    backend: Backend, graph: fx.GraphModule, arguments: Sequence[Tensor], title: str
) -> Callable[..., List[Tensor]]:
    """Have a backend compile a recorded graph, of which the arguments are good inputs.

    Raises:
        ConfigurationError: the backend fails, or what it returns is no function, fails, or returns
            or writes other values than the graph.
    """
    nodes = copy.deepcopy(graph.graph)
    (output,) = (node for node in nodes.nodes if node.op == "output")
    # As the graphs of torch.compile do, where ours return a list.
    output.args = (tuple(output.args[0]),)
    _view_by_shape(nodes)
    draw = hoist_draws(graph, nodes)
    try:
        with torch.no_grad(), isolated(arguments[-1].device):
            inputs = [*_copies(arguments), *(() if draw is None else draw())]
            run = backend.function(fx.GraphModule(graph, nodes), inputs)
    except Exception as error:
        raise _error(backend.name, f"failed to compile {title}: {brief_error(error)}") from error
    if not callable(run):
        what = f"must return a function of tensors that runs {title}, but returned {run!r}"
        raise _error(backend.name, what)
    compiled = _CompiledGraph(run, draw, backend.name, title)
    compiled.check(graph, arguments)
    return compiled


def _view_by_shape(graph: fx.Graph) -> None:
    """Make views of flat tensors by shape, where they are recorded by strides.

    torch.compile's own first step, which takes writes out of a graph, follows none by strides.
    """
    aten = torch.ops.aten
    for node in list(graph.nodes):
        source = value_of(node.args[0]) if node.args else None
        if node.target is not aten.as_strided.default or len(node.args) != 3 or node.kwargs:
            continue
        shape, strides = node.args[1:]
        order = sorted(range(len(shape)), key=lambda d: (-strides[d], shape[d] != 1))
        step, is_dense = 1, source is not None and source.dim() == 1 and source.is_contiguous()
        for d in reversed(order):
            is_dense = is_dense and (shape[d] == 1 or strides[d] == step)
            step *= shape[d]
        if not is_dense or source is None or source.numel() != step:
            continue
        with graph.inserting_before(node):
            view = graph.call_function(aten.view.default, (node.args[0], [shape[d] for d in order]))
            back = [order.index(d) for d in range(len(shape))]
            if back != sorted(back):
                view = graph.call_function(aten.permute.default, (view, back))
        view.meta = dict(node.meta)
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _error(backend: str, what: str) -> ConfigurationError:
    """The error that says what is wrong with a backend."""
    return ConfigurationError(
        f"jit={backend!r} compiles recorded graphs with that backend of torch.compile, which "
        f"{what}. Use another backend, or jit='auto', which needs none."
    )


@dataclasses.dataclass(eq=False)
class _CompiledGraph:
    """Runs what a backend compiled; results are tensors of their own.

    Attributes:
        run: of the backend.
        draw: makes random numbers that it takes behind the inputs of the graph; None: it takes
            none.
        backend: its name, for errors.
        title: of the graph, for errors.
    """

    run: Callable[..., Sequence[Tensor]]
    draw: Optional[Callable[[], Sequence[Tensor]]]
    backend: str
    title: str

    def __post_init__(self) -> None:
        # Places of results that the next call would write over.
        self._reused: List[int] = []

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """Compute the results of the graph.

        Raises:
            ConfigurationError: the compiled graph fails.
        """
        if self.draw is not None:
            tensors = (*tensors, *self.draw())
        try:
            results = [*self.run(*tensors)]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            what = f"compiled {self.title}, but that fails: {brief_error(error)}"
            raise _error(self.backend, what) from error
        for place in self._reused:
            results[place] = results[place].clone()
        return results

    def check(self, graph: fx.GraphModule, arguments: Sequence[Tensor]) -> None:
        """Hold results, and what is written into arguments, against the recorded graph.

        Raises:
            ConfigurationError: they differ.
        """
        device = arguments[-1].device
        inputs, written, again = (_copies(arguments) for _ in range(3))
        with torch.no_grad(), isolated(device):
            seed_generators(0, device)
            expected = lower(graph, arguments, GRAPH).run(*inputs)
            seed_generators(0, device)
            results = self(*written)
            seed_generators(0, device)
            repeated = self(*again)
        for what, ours, theirs in (
            ("return", expected, results),
            ("write into its inputs", inputs, written),
            ("return in every call", expected, repeated),
        ):
            fault = _difference(ours, theirs)
            if fault is not None:
                if uses_random_numbers(graph):
                    fault += "; it draws random numbers, which may differ in a backend"
                what = f"must {what} what {self.title} does, but {fault}"
                raise _error(self.backend, what)
        self._reused = [
            place
            for place, (one, other) in enumerate(zip(results, repeated))
            if one.numel() and one.data_ptr() == other.data_ptr()
        ]


def _positive(like: Sequence[Tensor]) -> List[Tensor]:
    """Make tensors like these, with positive numbers, which may be squares; counters are at 0."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(t.shape, generator=generator) if t.dim() else torch.zeros(())).to(
            t.device, t.dtype
        )
        for t in like
    ]


def _copies(tensors: Sequence[Tensor]) -> List[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _difference(expected: Sequence[Tensor], results: Sequence[Tensor]) -> Optional[str]:
    """Say in what tensors differ from those of a graph; None where they don't."""
    if len(expected) != len(results):
        return f"there are {len(results)} of them, and not {len(expected)}"
    for place, (one, other) in enumerate(zip(expected, results)):
        if not isinstance(other, Tensor):
            return f"number {place} is {other!r}, and no tensor"
        if _form(one) != _form(other):
            return f"number {place} is {_form(other)}, and not {_form(one)}"
        if not agree(one, other):
            return f"number {place} has other values"
    return None


def _form(tensor: Tensor) -> str:
    kind = str(tensor.dtype).replace("torch.", "")
    return f"{kind} of shape {tuple(tensor.shape)} on {tensor.device}"
