"""Operators that return their input: hints to a compiler for IPUs, and the mark of a loss."""

from __future__ import annotations

from typing import Any, Callable, FrozenSet, Sequence, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ipufit.poptorch import enums
from ipufit.poptorch._logging import error
from ipufit.poptorch._parsers import flattenTensorStructure, reconstructTensorStructure
from ipufit.poptorch._tracing import define, need_kind, tracing
from ipufit.tracing.ipu_only import report_hint

T = TypeVar("T")


def nop(tensor: Tensor) -> Tensor:
    """Return the tensor; on an IPU this is an operator that the compiler does not remove.

    Raises:
        Error: it is no tensor.
    """
    advice = "Call it once for each tensor."
    need_kind(tensor, Tensor, "nop must take a torch.tensor argument.", advice)
    return tensor


def recomputationCheckpoint(*tensors: object) -> Any:
    """Return the tensors; a pipelined IPU program stores their values for the backward pass.

    Args:
        tensors: tensors, or one list or tuple of them.
    Returns:
        One tensor for one, a tuple for several, a list or tuple for one list or tuple.
    Raises:
        ValueError: one of them is no tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        checkpointed = recomputationCheckpoint(*tensors[0])
        return type(tensors[0])(
            [checkpointed] if isinstance(checkpointed, Tensor) else checkpointed
        )
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"All inputs must be tensors, or one list or tuple of them, got "
                f"{type(tensor).__name__}. Leave out what is not a tensor."
            )
    report_hint("recomputationCheckpoint", tensors)
    return tensors[0] if len(tensors) == 1 else tensors


def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: enums.MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """Return the matrix product, which an IPU would compute in parts, one after another.

    Args:
        lhs: as for ``torch.matmul``.
        rhs: as for ``torch.matmul``.
        mode: the dimension that is cut into parts. No part changes the value here.
        factor: number of parts.
        keep_precision: add the parts of half numbers in float32.
    Raises:
        AssertionError: ``mode``, ``factor`` or ``keep_precision`` is of another type.
    """
    if not isinstance(keep_precision, bool):
        raise AssertionError(
            f"serializedMatMul expects keep_precision to be True or False, got {keep_precision!r}."
        )
    if not isinstance(factor, int):
        raise AssertionError(
            f"serializedMatMul expects factor to be an int, got {factor!r}. Give the number of "
            "parts."
        )
    if not isinstance(mode, enums.MatMulSerializationMode):
        raise AssertionError(
            f"serializedMatMul expects mode to be a poptorch.MatMulSerializationMode, got {mode!r}."
        )
    report_hint("serializedMatMul", lhs)
    return torch.matmul(lhs, rhs)


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """Return the tensor; on an IPU its operator may use this proportion of memory.

    Args:
        tensor: the result of the operator, such as a convolution.
        available_memory_proportion: from 0 to 1. It changes nothing here.
    Raises:
        Error: it is no tensor, or no such proportion.
    """
    expectation = "You may only set available memory for torch.tensor values."
    advice = "Give the result of the operator that it is meant for."
    need_kind(tensor, Tensor, expectation, advice)
    if not 0 <= available_memory_proportion <= 1:
        raise error(
            "set_available_memory expects a proportion from 0 to 1, got "
            f"{available_memory_proportion!r}. Divide a percentage by 100."
        )
    report_hint("set_available_memory", tensor)
    return tensor


def _run(tensor: Tensor, mode: str) -> Tensor:
    return tensor.clone()


_SCHEMA = "{}(Tensor tensor, str mode) -> Tensor"
_INPUT = define(_SCHEMA.format("overlap_input"), _run, lambda t, mode: torch.empty_like(t))
_OUTPUT = define(_SCHEMA.format("overlap_output"), _run, lambda t, mode: torch.empty_like(t))


class _Same(torch.autograd.Function):
    """Passes the gradient of a mark on to the marked tensor."""

    @staticmethod
    def forward(
        ctx: object, operator: Callable[[Tensor, str], Tensor], tensor: Tensor, mode: str
    ) -> Tensor:
        marked: Tensor = operator(tensor, mode)
        return marked

    @staticmethod
    def backward(ctx: object, *gradients: object) -> Any:
        return None, gradients[0], None


def _mark(structure: T, mode: enums.OverlapMode, operator: object, kind: str) -> T:
    def marked(tensor: Tensor) -> Tensor:
        expectation = f"You may only set overlap for torch.tensor {kind}s."
        need_kind(tensor, Tensor, expectation, "Leave out what is not a tensor.")
        report_hint(f"set_overlap_for_{kind}", tensor)
        if tracing() is None:
            return tensor
        result: Tensor = _Same.apply(  # type: ignore[no-untyped-call]
            operator, tensor, mode.value
        )
        return result

    tensors = flattenTensorStructure(structure)
    rebuilt: T = reconstructTensorStructure(structure, map(marked, tensors))
    return rebuilt


def set_overlap_for_input(input_tensors: T, mode: enums.OverlapMode) -> T:
    """Mark inputs that are sent to the IPU while it computes; call it first in ``forward``.

    Args:
        input_tensors: a tensor, or tuples, lists and dicts of them.
        mode: an :class:`poptorch.OverlapMode`. No value depends on it.
    Returns:
        The same structure; use these tensors, and not the inputs any more.
    """
    return _mark(input_tensors, mode, _INPUT, "input")


def set_overlap_for_output(output_tensors: T, mode: enums.OverlapMode) -> T:
    """Mark outputs that leave the IPU while it computes; call it right before returning them.

    Args:
        output_tensors: a tensor, or tuples, lists and dicts of them.
        mode: an :class:`poptorch.OverlapMode`. No value depends on it.
    Returns:
        The same structure; return these tensors.
    """
    return _mark(output_tensors, mode, _OUTPUT, "output")


def resolve_overlaps(
    graph: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> bool:
    """Remove the marks from a recorded graph, and return True if there were any.

    Args:
        graph: changed in place.
        inputs: nodes of the model's tensor inputs, in order.
        outputs: nodes of the tensors that the model returns, in order, one for each time that a
            tensor is returned.
    Raises:
        Error: a mark stands elsewhere than first on an input or last before an output.
    """
    marks = [node for node in graph.graph.nodes if node.target in (_INPUT, _OUTPUT)]
    is_marked = bool(marks)
    for position, node in enumerate(inputs):
        marked = [user for user in node.users if user.target is _INPUT]
        if marked and len(node.users) > 1:
            raise error(
                "poptorch.set_overlap_for_input must be the only op applied to an input. This is "
                f"not the case for input {position} to the model. Use its result wherever the "
                "input was used."
            )
        if marked:
            marks.remove(marked[0])
            _erase(graph, marked[0])
    returned = list(outputs)
    for node in outputs:
        if node.target is not _OUTPUT:
            continue
        if returned.count(node) + returned.count(node.all_input_nodes[0]) > 1:
            raise error(
                "poptorch.set_overlap_for_output cannot be used with a tensor that is returned "
                "twice. Please check all returned tensors including those nested in "
                "tuples/lists."
            )
        marks.remove(node)
        _erase(graph, node)
    for node in marks:
        kind = "input" if node.target is _INPUT else "output"
        place = "first of all" if kind == "input" else "right before returning"
        raise error(
            f"poptorch.set_overlap_for_{kind} applied on a node which is not a tensor {kind} to "
            f"the model. Call it {place}, on the {kind} itself."
        )
    graph.recompile()
    return is_marked


def _erase(graph: fx.GraphModule, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(node)


_NAMES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "cross_entropy_loss",
    "ctc_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "nll_loss",
    "nll_loss2d",
    "nll_loss_nd",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)


# Functions whose result is a loss, as they are called: torch.nn.functional's, torch's own. Of
# F.kl_div the loss is the operator within, as its replacement says.
LOSSES: FrozenSet[object] = frozenset(
    getattr(place, name)
    for place in (F, torch, torch._C._nn)
    for name in _NAMES
    if hasattr(place, name) and (place, name) != (F, "kl_div")
)


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Make a tensor a loss, which is what training differentiates.

    A training model has exactly one loss that leads to no other one; a sum of torch's losses is
    none before it is passed to this.

    Args:
        x: any shape.
        reduction: ``"sum"``, ``"mean"``, or ``"none"``, after which every element counts.
    Raises:
        AssertionError: another reduction.
    """
    if reduction not in ("sum", "mean", "none"):
        raise AssertionError(
            f'Unsupported reduction type! Expected "sum", "mean" or "none", got {reduction!r}.'
        )
    if reduction == "sum":
        loss = torch.sum(x)
    elif reduction == "mean":
        loss = torch.mean(x)
    else:
        loss = x.clone()
    trace = tracing()
    return loss if trace is None else trace.mark_loss(loss, reduction != "none")
