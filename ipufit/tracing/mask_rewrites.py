"""Values that torch reads, and a recording can do without: masks, numbers of repeats, and classes.

A mask of a transformer that is known to be causal may be left out for a faster kernel. Without that
knowledge it is applied as it is given, to the same result, and its values need not be known.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import transformer

__all__ = ["one_hot_by_comparison", "reads_classes", "without_values"]


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


def without_values(rewrites_one_hot: bool) -> List[Tuple[object, str, object]]:
    """List the functions of torch's that read values, and what reads none.

    Args:
        rewrites_one_hot: for an old torch, which can't leave out a look at the classes, compute
            one_hot in another way.

    Returns:
        Owner, name and replacement of each.
    """
    # An old torch holds classes against their number.
    is_fixed = rewrites_one_hot and _reads_values(_one_hot)
    readers: List[Tuple[object, str, object]] = [
        (functional, "one_hot", _call_fixed_one_hot if is_fixed else _call_one_hot)
    ]
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
