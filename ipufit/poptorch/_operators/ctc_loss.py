"""CTC loss whose lengths are read when the program runs."""

from __future__ import annotations

from typing import Any, Sequence, Tuple, Union

import torch
from torch import Tensor

from ipufit.poptorch._operators.library import define

__all__ = ["ctc_loss"]

Lengths = Union[Tensor, Sequence[int]]


def _run(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tuple[Tensor, Tensor]:
    labels, steps = targets.to(torch.int64), input_lengths.tolist()
    lengths = target_lengths.tolist()
    losses, alphas = torch.ops.aten._ctc_loss(
        log_probs, labels, steps, lengths, blank, zero_infinity
    )
    gradient = torch.ops.aten._ctc_loss_backward(
        torch.ones_like(losses),
        log_probs,
        labels,
        steps,
        lengths,
        losses,
        alphas,
        blank,
        zero_infinity,
    )
    return losses, gradient


# Both at once: what the backward pass of torch needs has a shape that depends on values.
_CTC = define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity) -> (Tensor, Tensor)",
    _run,
    lambda log_probs, *rest: (
        log_probs.new_empty(log_probs.shape[1]),
        torch.empty_like(log_probs),
    ),
)


class _Losses(torch.autograd.Function):
    """Computes the loss of each sample, and its gradient in the same operator."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, *rest: Any) -> Tensor:
        losses, gradient = _CTC(log_probs, *rest)
        ctx.save_for_backward(gradient)
        return losses  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tuple[Any, ...]:
        (of_inputs,) = ctx.saved_tensors
        return (of_inputs * gradients[0][None, :, None], *[None] * 5)


def _tensor(lengths: Any) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths.reshape(-1)
    numbers = [lengths] if isinstance(lengths, int) else list(lengths)
    return torch.tensor(numbers, dtype=torch.int64)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: Union[str, int] = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute ``torch.nn.functional.ctc_loss`` with lengths that may change from run to run.

    ``reduction`` is ``"mean"`` or ``"sum"``, or torch's number for it.
    """
    if log_probs.dim() == 2:
        log_probs, targets = log_probs[:, None], targets.reshape(1, -1)
    single = log_probs.float() if log_probs.dtype == torch.float16 else log_probs
    lengths = _tensor(target_lengths)
    losses: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]
        single, targets, _tensor(input_lengths), lengths, blank, zero_infinity
    )
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros_like(losses), losses)
    if reduction in ("mean", 1):
        losses = losses / lengths.clamp(min=1).to(losses.device, losses.dtype)
        return losses.mean().to(log_probs.dtype)
    return losses.sum().to(log_probs.dtype)
