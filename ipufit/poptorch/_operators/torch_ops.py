"""PopTorch's operators as ``torch.ops.poptorch`` has them: by position, enums as texts and numbers.

The names and the order of arguments are those that PopTorch registers with torch. What marks only
one end of a loop, a branch or a call of the host can't be recorded alone, and is refused.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NoReturn, Optional, Sequence

import torch
from torch import Tensor

from ipufit.poptorch import enums
from ipufit.poptorch._logging import error, refusing
from ipufit.poptorch._operators import identities
from ipufit.poptorch._operators.custom import custom_op
from ipufit.poptorch._operators.identities import nop, recomputationCheckpoint, set_available_memory
from ipufit.poptorch._operators.printing import ipu_print_tensor
from ipufit.poptorch._operators.scopes import Block, MultiConv, pop_name_scope, push_name_scope
from ipufit.poptorch._operators.search import ctc_beam_search_decoder, fps, nearest
from ipufit.poptorch._operators.slices import dynamic_slice, dynamic_update
from ipufit.poptorch._options.execution import Attribute
from ipufit.poptorch._parsers import accessAttributes
from ipufit.poptorch._tracing import tracing

__all__ = [
    "begin_ipu_block",
    "begin_multi_conv",
    "call_cpu_op",
    "clear_attribute",
    "ctc_beam_search_decoder",
    "custom_operation",
    "dynamic_slice",
    "dynamic_update",
    "end_cpu_op",
    "end_for_loop",
    "end_if_block",
    "end_ipu_block",
    "end_multi_conv",
    "fps",
    "identity_loss",
    "internal_cast",
    "ipu_print_tensor",
    "nearest",
    "nearest_batch_list",
    "nop",
    "optimizer_group",
    "pop_name_scope",
    "push_name_scope",
    "recomputation_checkpoint",
    "set_attribute",
    "set_available_memory",
    "set_matmul_serialization",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "start_else_block",
    "start_for_loop",
    "start_if_block",
]

_DTYPES = {
    "BOOL": torch.bool,
    "FLOAT": torch.float32,
    "FLOAT16": torch.float16,
    "INT32": torch.int32,
    "INT64": torch.int64,
}

recomputation_checkpoint = recomputationCheckpoint


def internal_cast(tensor: Tensor, dtype: str) -> Tensor:
    """Convert a tensor of a model that is being recorded.

    Outside of a recording PopTorch computes in float32: half is converted, and anything else
    stays as it is.

    Args:
        tensor: any shape.
        dtype: one of "FLOAT", "FLOAT16", "INT32", "INT64" and "BOOL".
    Raises:
        Error: another type.
    """
    if dtype not in _DTYPES:
        raise error(
            f"internal_cast expects one of {', '.join(sorted(_DTYPES))}, got {dtype!r}. Write "
            "tensor.to(...) for another type."
        )
    if tracing() is not None:
        return tensor.to(_DTYPES[dtype])
    return tensor.float() if dtype == "FLOAT16" else tensor


def identity_loss(x: Tensor, reduction: int) -> Tensor:
    """Mark a tensor as a loss: 0 takes its sum, 1 its mean, 2 the tensor itself."""
    if reduction not in (0, 1, 2):
        raise error(f"reduction must be sum (0), mean (1) or none (2), got {reduction!r}.")
    return identities.identity_loss(x, ("sum", "mean", "none")[reduction])


def begin_ipu_block(stage_id: int, phase_id: int, ipu_id: int) -> None:
    """Begin a block that is named after its stage.

    Args:
        stage_id: the number.
        phase_id: no value depends on it.
        ipu_id: which IPU it is on; negative: none that is named.
    """
    Block.start(f"stage-{stage_id}", None if ipu_id < 0 else ipu_id)


def end_ipu_block() -> None:
    """End the block that was begun last."""
    Block().__exit__(None, None, None)


def begin_multi_conv() -> None:
    """Let the convolutions that follow be one operator."""
    MultiConv().__enter__()


def end_multi_conv(
    available_memory_proportions: Optional[Sequence[float]] = None,
    partials_types: Optional[Sequence[int]] = None,
    plan_type: Optional[int] = None,
    per_conv_reserved_tiles: Optional[int] = None,
    cycle_back_off: Optional[float] = None,
    enable_conv_dithering: Optional[Sequence[int]] = None,
) -> None:
    """End the ``MultiConv`` of ``begin_multi_conv`` with these settings.

    Raises:
        Error: none was begun, or it has no convolution.
    """
    trace = tracing()
    if trace is None:
        return
    if trace.multi_conv is None:
        raise error("Unexpected end_multi_conv without begin_multi_conv. Call that one first.")
    several, _ = trace.multi_conv
    several._per_convolution["availableMemoryProportions"] = available_memory_proportions
    several._per_convolution["partialsTypes"] = partials_types
    if plan_type is not None:
        several.planType(enums.MultiConvPlanType(plan_type))
    if enable_conv_dithering is not None:
        several._per_convolution["enableConvDithering"] = enable_conv_dithering
    several.__exit__(None, None, None)


def set_attribute(attribute: str, key: str, value: str) -> None:
    """Set one entry of an attribute that operators carry from here on."""
    Attribute._current_attrs.setdefault(attribute, {})[key] = value


def clear_attribute(attribute: str, key: str) -> None:
    """Remove an entry that ``set_attribute`` has set."""
    entries = Attribute._current_attrs.get(attribute, {})
    entries.pop(key, None)
    if not entries:
        Attribute._current_attrs.pop(attribute, None)


def optimizer_group(group: int, inputs: List[Tensor]) -> None:
    """Accept parameters of an optimizer's group, which executors look up themselves."""


def set_matmul_serialization(
    matmul: Tensor, mode: str, factor: int, keep_precision: bool
) -> Tensor:
    """Return a product, which an IPU would compute in parts along this dimension."""
    enums.MatMulSerializationMode(mode)
    return matmul


def set_overlap_for_input(tensor: Tensor, mode: str) -> Any:
    """Say that an input is sent to the IPU while it computes, by the value of an OverlapMode."""
    return identities.set_overlap_for_input(tensor, enums.OverlapMode(mode))


def set_overlap_for_output(tensor: Tensor, mode: str) -> Any:
    """Say that an output leaves the IPU while it computes, by the value of an OverlapMode."""
    return identities.set_overlap_for_output(tensor, enums.OverlapMode(mode))


def custom_operation(
    inputs: List[Tensor],
    name: str,
    domain: str,
    domain_version: int,
    num_outputs: int,
    outputs: List[Tensor],
    attributes: str,
) -> List[Tensor]:
    """Call ``poptorch.custom_op`` with attributes as ``poptorch.accessAttributes`` takes them."""
    values: Dict[str, object] = accessAttributes(attributes)
    return custom_op(inputs, name, domain, domain_version, outputs, values)


def nearest_batch_list(
    x: Tensor, y: Tensor, batch_x: Sequence[int], batch_y: Sequence[int]
) -> Tensor:
    """Call ``poptorch.nearest`` with the sample of each row as a list."""
    return nearest(x, y, list(batch_x), list(batch_y))


def _one_end(name: str, whole: str) -> Callable[..., NoReturn]:
    return refusing(
        name,
        f"torch.ops.poptorch.{name} is one end of {whole}, whose body is recorded as a whole "
        f"here. Call {whole} instead.",
    )


start_for_loop = _one_end("start_for_loop", "poptorch.for_loop")
end_for_loop = _one_end("end_for_loop", "poptorch.for_loop")
start_if_block = _one_end("start_if_block", "poptorch.cond")
start_else_block = _one_end("start_else_block", "poptorch.cond")
end_if_block = _one_end("end_if_block", "poptorch.cond")
call_cpu_op = _one_end("call_cpu_op", "poptorch.CPU")
end_cpu_op = _one_end("end_cpu_op", "poptorch.CPU")
