"""Describes a traced training program as the specification of one update, or refuses."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import MicroBatch
from ipufit.core.compile_arguments import KERNELS
from ipufit.core.train_config import Clip
from ipufit.engines.embedded.flat_optimizer import RuleOptimizer, Settings
from ipufit.engines.embedded.inductor.update_spec import BlockSpec, SlotSpec, UpdateSpec
from ipufit.engines.embedded.passes import cpu_kernels
from ipufit.engines.embedded.passes.simplify import simplify
from ipufit.engines.embedded.passes.small_convolutions import convolve_by_products
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.engines.gradient_reduction import GradientReduction
from ipufit.tracing.graph_analysis import Memories
from ipufit.tracing.recording import is_again, is_backward
from ipufit.utils import tree
from ipufit.utils.random_operators import draws, hoist_draws

# Operators that torch itself or ipufit brings along, so that another process has them too.
_LIBRARIES = ("aten", "ipufit", "mkldnn", "prims")
# Before this torch, kernels for CPUs round only what they store.
_HALF, _ROUNDS_HALF = (torch.float16, torch.bfloat16), "2.13"
_CAT, _CLONE = torch.ops.aten.cat.default, torch.ops.aten.clone.default


class UncompilableError(Exception):
    """A traced program can't be compiled as one update; the text says why."""


@dataclasses.dataclass(frozen=True)
class CompilableUpdate:
    """Specification of what a library makes, and the tensors that go with it.

    Attributes:
        form: of an update, or of a micro-batch.
        rest: places, in the state of a micro-batch, of what is no part of a flat tensor.
        constants: tensors that the recording holds.
        draw: makes the random numbers of a micro-batch; None: it takes none.
        leaves: like what a micro-batch takes behind its state: leaves of the batch, the loss scale
            if there is one, and random numbers.
    """

    form: UpdateSpec
    rest: Tuple[int, ...]
    constants: Tuple[Tensor, ...]
    draw: Optional[Callable[[], Sequence[Tensor]]]
    leaves: Tuple[Tensor, ...]


def describe(
    live: TrainingState, recorded: TracedStep, example: MicroBatch, groups: Optional[Settings]
) -> CompilableUpdate:
    """The form of updates whose micro-batches are all like an example, or of these alone.

    Args:
        live: what updates change; parameters and state are the program's already.
        recorded: for the example.
        example: a micro-batch.
        groups: settings of the optimizer, where it is part of an update in one call; None for a
            micro-batch alone.

    Raises:
        UncompilableError: they can't be compiled.
    """
    config, plan = live.spec.config, live.spec.plan
    updater, graph, blocks = live.updater, recorded.graph, live.storage.blocks
    assert graph is not None
    _refuse_operators(graph)
    state = len(live.states[0])
    copied = copy.deepcopy(graph.graph)
    # Torch draws them, with the generator of each micro-batch, before an update.
    draw = hoist_draws(graph, copied)
    if any(draws(node.target, node.args, node.kwargs) for node in copied.nodes):
        raise UncompilableError("it draws random numbers that depend on more than a shape")
    inputs = [node for node in copied.nodes if node.op == "placeholder"]
    scale = [] if live.scaler is None else [live.scaler.tensor(live.device)]
    leaves = [*example.leaves, *scale]
    drawn = inputs[state + len(leaves) :]
    leaves += [node.meta["val"] for node in drawn]
    memories = Memories(copied)
    for node in drawn:
        if memories.of(node) in memories.writes:
            # The library would write it back.
            with copied.inserting_before(inputs[-1].next):
                copy_of = copied.call_function(_CLONE, (node,))
            copy_of.meta = dict(node.meta)
            node.replace_all_uses_with(copy_of, lambda user, copy=copy_of: user is not copy)
    _order_repetitions(copied, inputs[state:])
    by_channels, divided = recorded.lowered.way == KERNELS, () if groups is None else blocks
    source, code, constants, outputs = _code(graph, copied, len(blocks), divided, by_channels)
    places = {name: i for i, name in enumerate(recorded.micro.trained)}
    slots = [
        SlotSpec(b, places[slot.name], tuple(slot.parameter.shape), slot.order)
        for b, block in enumerate(blocks)
        for slot in block.slots
    ]
    in_slots = {slot.place for slot in slots}
    rest = tuple(i for i in range(state) if i not in in_slots)
    sizes = [example.size] * plan.micro_batches_per_update
    factors, share = GradientReduction(live.spec).shares(sizes)
    dtype = config.accumulation_dtype
    rules: Sequence[Tuple[str, Dict[str, bool]]] = ()
    if groups is not None and isinstance(updater, RuleOptimizer):
        rules = updater.rules(groups)
    form = UpdateSpec(
        source=source,
        code=code,
        slots=tuple(slots),
        blocks=tuple(BlockSpec(*each) for each in rules),
        rest=len(rest),
        written=tuple(i for i, place in enumerate(rest) if place in memories.changed),
        constants=len(constants),
        leaves=len(leaves),
        outputs=outputs,
        counted=recorded.micro.reported.counted,
        micro_batches=len(sizes),
        replicas=plan.replicas,
        factors=tuple(factors),
        share=share,
        dtype=None if dtype is None else str(dtype).replace("torch.", ""),
        clip=config.clip,
        scale=len(example.leaves) if scale else None,
        recomputes=bool(config.recompute),
    )
    if groups is None:
        # Sums, bounds and rules are applied to what it returns.
        form = dataclasses.replace(
            form, micro_batches=1, replicas=1, factors=(), share=1.0, dtype=None, clip=Clip()
        )
    return CompilableUpdate(form, rest, constants, draw, tuple(leaves))


def _refuse_operators(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        is_operator = node.op == "call_function" and node.target is not operator.getitem
        if is_operator and getattr(node.target, "namespace", None) not in _LIBRARIES:
            raise UncompilableError(f"it calls {node.target}, which another process does not know")
        for value in tree.tensors(node.meta.get("val")):
            if value.device.type != "cpu":
                raise UncompilableError(
                    f"it computes on {value.device.type}, and this compiles for the CPU"
                )
            if value.is_complex():
                raise UncompilableError("it computes with complex numbers")
            if value.layout is not torch.strided:
                raise UncompilableError("it computes with sparse tensors")
            if value.dtype in _HALF and torch.__version__ < _ROUNDS_HALF:
                raise UncompilableError("it computes in half precision, which needs torch 2.13")


def _order_repetitions(graph: fx.Graph, leaves: Sequence[fx.Node]) -> None:
    """Let what is computed again wait for the gradient before it, as it does in the recording.

    A compiler orders what it likes, and would keep what was to be computed later.

    Args:
        graph: is changed.
        leaves: inputs of a micro-batch that no parameters are.
    """
    values = torch.ops.aten
    before: Optional[fx.Node] = None
    waiting: Set[fx.Node] = set()
    for node in list(graph.nodes):
        if not is_again(node):
            if is_backward(node) and isinstance(node.meta.get("val"), Tensor):
                before = node
            continue
        assert before is not None
        for read in node.all_input_nodes if waiting.isdisjoint(node.all_input_nodes) else ():
            if is_again(read) or (read.op == "placeholder" and read not in leaves):
                continue
            with graph.inserting_before(node):
                gradient = before
                for _ in range(before.meta["val"].dim()):
                    gradient = graph.call_function(values.select.int, (gradient, 0, 0))
                is_zero = graph.call_function(values.eq.Scalar, (gradient, 0))
                # The same value in any case.
                late = graph.call_function(values.where.self, (is_zero, read, read))
            late.meta = dict(read.meta)
            node.replace_input_with(read, late)
            waiting.add(late)
        if not waiting.isdisjoint(node.all_input_nodes):
            waiting.add(node)


def _code(
    graph: fx.GraphModule,
    copied: fx.Graph,
    gradients: int,
    blocks: Sequence[object],
    by_channels: bool,
) -> Tuple[str, str, Tuple[Tensor, ...], int]:
    """Both texts for a form, the constants it takes behind its inputs, its outputs.

    Args:
        graph: holds the constants.
        copied: of it; is changed.
        gradients: how many it returns.
        blocks: that they are of, where each parameter gets its own.
        by_channels: whether pictures have channels last, where there are any.
    """
    source = copied.python_code("self").src
    simplify(copied)
    convolve_by_products(copied)
    cpu_kernels.use_onednn_matmul(copied)
    if by_channels and cpu_kernels.to_channels_last(copied):
        cpu_kernels.restore_outputs(copied)
    constants: Dict[str, Tensor] = {}
    lifted: Dict[str, fx.Node] = {}
    *_, last = (node for node in copied.nodes if node.op == "placeholder")
    for node in list(copied.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in lifted:
            # What the recording holds is an input of the other process.
            constants[node.target] = getattr(graph, node.target)
            with copied.inserting_after(last):
                last = lifted[node.target] = copied.placeholder(f"constant_{len(lifted)}")
        node.replace_all_uses_with(lifted[node.target])
        copied.erase_node(node)
    (output,) = (node for node in copied.nodes if node.op == "output")
    results = list(output.args[0])
    first = len(results) - gradients
    with copied.inserting_before(output):
        parts = [
            part
            for gradient, block in itertools.zip_longest(results[first:], blocks)
            for part in _parts(copied, gradient, block)
        ]
    output.args = ([*results[:first], *parts],)
    for gradient in results[first:]:
        if gradient.target is _CAT and not gradient.users:
            copied.erase_node(gradient)
    return source, copied.python_code("self").src, tuple(constants.values()), first - 1


def _parts(graph: fx.Graph, gradient: Any, block: Any) -> List[fx.Node]:
    """The gradient of each parameter of a block, which the recording puts side by side.

    Without a block it is the gradient as it is, in memory of its own.
    """
    if block is None:
        is_new = gradient.target is _CAT
        return [gradient if is_new else graph.call_function(_CLONE, (gradient,))]
    if gradient.target is _CAT and len(gradient.args) == 1:
        parts = list(gradient.args[0])
        if len(parts) == len(block.slots):
            return parts
    slices = torch.ops.aten.slice.Tensor
    return [
        graph.call_function(slices, (gradient, 0, slot.start, slot.stop)) for slot in block.slots
    ]
