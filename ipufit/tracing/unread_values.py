"""Values that torch reads, and a recording can do without: masks, repeats, classes and lengths.

A mask of a transformer that is known to be causal may be left out for a faster kernel. Without that
knowledge it is applied as it is given, to the same result, and its values need not be known.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import transformer

from ipufit.core.precision import autocast_state
from ipufit.tracing.recurrent import LIBRARY


def _as_said(
    mask: Optional[Tensor], is_causal: Optional[bool] = None, size: Optional[int] = None
) -> bool:
    """Causal where the caller says so."""
    return is_causal is True


_Encoder = transformer.TransformerEncoder
_encode = _Encoder.forward


@functools.wraps(_encode)
def _encode_as_said(*args: Any, **kwargs: Any) -> Tensor:
    if len(args) < 5:
        kwargs["is_causal"] = kwargs.get("is_causal") is True
    return _encode(*args, **kwargs)


def _repeat_interleave(input: Tensor, repeats: int, dim: Optional[int] = None) -> Tensor:
    """Repeat every element a fixed number of times, as ``torch.repeat_interleave`` does."""
    if dim is None:
        input, dim = input.reshape(-1), 0
    place = dim % input.dim() + 1
    shape = list(input.unsqueeze(place).shape)
    shape[place] = repeats
    return input.unsqueeze(place).expand(shape).clone().flatten(place - 1, place)


def _as_fixed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def repeated(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = {**dict(zip(("repeats", "dim"), args)), **kwargs}
        repeats, dim = named.get("repeats"), named.get("dim")
        if isinstance(repeats, int) and repeats >= 0 and (dim is None or input.dim()):
            rows = input.numel() if dim is None else input.shape[dim]
            if named.get("output_size") in (None, repeats * rows):
                return _repeat_interleave(input, repeats, dim)
        return function(input, *args, **kwargs)

    return repeated


@functools.lru_cache(maxsize=None)
def _reads_values(function: Callable[[Tensor, int], Tensor]) -> bool:
    """Tell whether a function of torch's reads a tensor's values; one on "meta" has none."""
    try:
        function(torch.empty(1, dtype=torch.int64, device="meta"), 2)
    except RuntimeError:
        return True
    return False


def one_hot_by_comparison(input: Tensor, num_classes: int) -> Tensor:
    """Put a one where the class is, as torch's one_hot does; what is no class gives zeros."""
    classes = torch.arange(num_classes, dtype=input.dtype, device=input.device)
    return (input.unsqueeze(-1) == classes).to(torch.int64)


_one_hot, _repeat = functional.one_hot, torch.repeat_interleave


def _call_one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    return _one_hot(input, num_classes)


def _call_fixed_one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    is_fixed = isinstance(num_classes, int) and num_classes > 0 and input.dtype is torch.int64
    return (one_hot_by_comparison if is_fixed else _call_one_hot)(input, num_classes)


# Lengths of sequences, one for each sample.
Lengths = Union[Tensor, Sequence[int]]

_ctc_loss: Callable[..., Tensor] = torch.ctc_loss


def _run_ctc(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
    wants_gradient: bool,
) -> Tuple[Tensor, Tensor]:
    labels = targets.to(log_probs.device, torch.int64)
    arguments = (labels, input_lengths.tolist(), target_lengths.tolist())
    rest = (blank, zero_infinity)
    losses, alphas = torch.ops.aten._ctc_loss(log_probs, *arguments, *rest)
    if not wants_gradient:
        return losses, log_probs.new_empty(0)
    ones = torch.ones_like(losses)
    backward = torch.ops.aten._ctc_loss_backward
    gradients = backward(ones, log_probs, *arguments, losses, alphas, *rest)
    return losses, gradients.contiguous()


def _empty_ctc(log_probs: Tensor, *rest: object) -> Tuple[Tensor, Tensor]:
    """Make results without values, for tracing."""
    losses = log_probs.new_empty(log_probs.shape[1])
    return losses, log_probs.new_empty(log_probs.shape if rest[-1] else 0)


# Loss and gradient at once: what torch keeps between them has a shape that depends on the targets.
LIBRARY.define(
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity, bool wants_gradient) -> (Tensor, Tensor)"
)
LIBRARY.impl("ctc_loss", _run_ctc, "CompositeExplicitAutograd")
LIBRARY.impl("ctc_loss", _empty_ctc, "Meta")


class _Losses(torch.autograd.Function):
    """Computes the loss of each sample, and its gradient in the same operator."""

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, *rest: object) -> Tuple[Tensor, Tensor]:
        """Compute losses of shape (samples,) and the gradient of their sum."""
        losses, gradient = torch.ops.ipufit.ctc_loss.default(log_probs, *rest)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(gradient)
        return losses, gradient

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tuple[Optional[Tensor], ...]:
        """Multiply the gradient of each sample's loss.

        Raises:
            RuntimeError: a gradient of the gradient is wanted; torch has none either.
        """
        if torch.is_grad_enabled():
            raise RuntimeError("derivative for aten::_ctc_loss_backward is not implemented")
        (of_inputs,) = ctx.saved_tensors
        return (of_inputs * gradients[0][None, :, None], *[None] * 6)


def _as_tensor(lengths: Union[int, Lengths]) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths.reshape(-1)
    numbers = [lengths] if isinstance(lengths, int) else list(lengths)
    return torch.tensor(numbers, dtype=torch.int64)


def ctc_loss_and_gradient(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: Union[str, int] = "mean",
    zero_infinity: bool = False,
    wants_gradient: bool = True,
) -> Tuple[Tensor, Tensor]:
    """Compute ``torch.nn.functional.ctc_loss`` with lengths that may change from run to run.

    Half precision is computed in float32, in which its results stay where torch's autocast is on.

    Args:
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity: as torch takes
            them.
        reduction: as torch takes it, or torch's number for it.
        wants_gradient: whether somebody reads the second result.

    Returns:
        The loss, and the gradient of its sum over the samples by ``log_probs``.
    """
    is_batched = log_probs.dim() == 3
    if not is_batched:
        log_probs, targets = log_probs[:, None], targets.reshape(1, -1)
    dtype = log_probs.dtype
    if dtype in (torch.float16, torch.bfloat16):
        log_probs = log_probs.float()
        dtype = torch.float32 if autocast_state(log_probs.device)[0] else dtype
    lengths = _as_tensor(target_lengths)
    losses, gradient = _Losses.apply(  # type: ignore[no-untyped-call]
        log_probs,
        targets,
        _as_tensor(input_lengths),
        lengths,
        blank,
        zero_infinity,
        wants_gradient,
    )
    if zero_infinity:
        losses = torch.where(losses == float("inf"), torch.zeros_like(losses), losses)
    if reduction in ("mean", 1):
        result = (losses / lengths.clamp(min=1).to(losses.device, losses.dtype)).mean()
    elif reduction in ("sum", 2):
        result = losses.sum()
    else:
        result = losses if is_batched else losses.squeeze(0)
    return result.to(dtype), gradient.to(dtype)


def _record_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Stand in for ``torch.ctc_loss``, which reads values, while a program is recorded.

    A mode of torch's functions is shown torch's own.
    """
    arguments = (targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    if torch.overrides.has_torch_function((log_probs,)):
        return torch.overrides.handle_torch_function(_ctc_loss, (log_probs,), log_probs, *arguments)
    wants_gradient = torch.is_grad_enabled() and log_probs.requires_grad
    return ctc_loss_and_gradient(log_probs, *arguments, wants_gradient)[0]


class _NothingFound:
    """torch, but for ``any``, which finds nothing."""

    any = staticmethod(lambda *args: False)

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


# Torch's own code, which looks for negative variances only to refuse them.
_gaussian_nll_loss = types.FunctionType(
    functional.gaussian_nll_loss.__code__,
    {**vars(functional), "torch": _NothingFound()},
    "gaussian_nll_loss",
    functional.gaussian_nll_loss.__defaults__,
)


def without_values(rewrites: bool) -> List[Tuple[object, str, object]]:
    """List the functions of torch's that read values, and what reads none.

    Args:
        rewrites: whether a function that can't do without values is computed in another way:
            ctc_loss, gaussian_nll_loss without its look for negative variances, and one_hot of an
            old torch, which can't leave out a look at the classes.

    Returns:
        Owner, name and replacement of each.
    """
    # An old torch holds classes against their number.
    is_fixed = rewrites and _reads_values(_one_hot)
    readers: List[Tuple[object, str, object]] = [
        (functional, "one_hot", _call_fixed_one_hot if is_fixed else _call_one_hot)
    ]
    if rewrites:
        readers.append((torch, "ctc_loss", _record_ctc_loss))
        readers.append((functional, "gaussian_nll_loss", _gaussian_nll_loss))
    if hasattr(transformer, "_detect_is_causal_mask"):
        readers.append((transformer, "_detect_is_causal_mask", _as_said))
    else:
        # torch 2.0 asks in the encoder itself, and only there.
        readers.append((_Encoder, "forward", _encode_as_said))
    # Before torch 2.1 a number of repeats becomes a tensor, and the shape of the result one of its
    # values. A mode of torch's functions would switch off its fused layers.
    if _reads_values(_repeat):
        for owner in (torch, Tensor):
            readers.append((owner, "repeat_interleave", _as_fixed(owner.repeat_interleave)))
    return readers


def reads_classes(frame: Optional[types.FrameType]) -> bool:
    """Tell whether a frame was called by one_hot."""
    while frame is not None and frame.f_code is not _call_one_hot.__code__:
        frame = frame.f_back
    return frame is not None
