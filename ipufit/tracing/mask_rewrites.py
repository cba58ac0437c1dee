"""Values that torch reads, and a recording can do without: masks, numbers of repeats, and classes.

A mask of a transformer that is known to be causal may be left out for a faster kernel. Without that
knowledge it is applied as it is given, to the same result, and its values need not be known.
"""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any, Callable, Iterator, Optional

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import transformer

__all__ = ["fix_classes", "fix_repeats", "reads_classes", "unread_masks"]


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


@contextlib.contextmanager
def unread_masks() -> Iterator[None]:
    """Within it a mask is causal only where ``is_causal`` says so."""
    owner: object = transformer
    name = "_detect_is_causal_mask"
    instead: Callable[..., object] = _as_said
    if not hasattr(owner, name):
        # torch 2.0 asks in the encoder itself, and only there.
        owner, name, instead = _Encoder, "forward", _encode_as_said
    original = getattr(owner, name)
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, original)


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
def _reads_repeats() -> bool:
    """Tell whether torch reads a whole number of repeats off a tensor; one on "meta" has none."""
    try:
        torch.repeat_interleave(torch.empty(1, device="meta"), 2)
    except RuntimeError:
        return True
    return False


@contextlib.contextmanager
def fix_repeats() -> Iterator[None]:
    """Within it a whole number of repeats is a fixed one.

    Before torch 2.1 the number becomes a tensor, and the shape of the result one of its values.
    """
    if not _reads_repeats():
        yield
        return
    function, method = torch.repeat_interleave, Tensor.repeat_interleave
    # A mode of torch's functions would switch off its fused layers.
    torch.repeat_interleave = _as_fixed(function)
    Tensor.repeat_interleave = _as_fixed(method)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.repeat_interleave = function
        Tensor.repeat_interleave = method  # type: ignore[method-assign]


def _one_hot_by_comparison(input: Tensor, num_classes: int) -> Tensor:
    """Put a one where the class is, as ``torch.nn.functional.one_hot`` does."""
    classes = torch.arange(num_classes, dtype=input.dtype, device=input.device)
    return (input.unsqueeze(-1) == classes).to(torch.int64)


@functools.lru_cache(maxsize=None)
def _compares_classes() -> bool:
    """Tell whether torch holds classes against their number; those on "meta" have no values."""
    try:
        functional.one_hot(torch.empty(1, dtype=torch.int64, device="meta"), 2)
    except RuntimeError:
        return True
    return False


_one_hot = functional.one_hot


def _call_one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    return _one_hot(input, num_classes)


def _call_fixed_one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    is_fixed = isinstance(num_classes, int) and num_classes > 0 and input.dtype is torch.int64
    return (_one_hot_by_comparison if is_fixed else _call_one_hot)(input, num_classes)


@contextlib.contextmanager
def fix_classes(rewrites: bool) -> Iterator[None]:
    """Within it one_hot does not look whether classes are under the number that it got.

    Args:
        rewrites: for an old torch, which can't leave that out, compute it in another way.
    """
    owner: Any = functional
    owner.one_hot = _call_fixed_one_hot if rewrites and _compares_classes() else _call_one_hot
    try:
        yield
    finally:
        owner.one_hot = _one_hot


def reads_classes(frame: Optional[types.FrameType]) -> bool:
    """Tell whether a frame was called by one_hot."""
    while frame is not None and frame.f_code is not _call_one_hot.__code__:
        frame = frame.f_back
    return frame is not None
