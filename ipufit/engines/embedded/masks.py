"""Masks of transformers, which torch looks at to see whether they are causal ones.

A mask that is known to be causal may be left out for a faster kernel. Without that knowledge it is
applied as it is given, to the same result, and its values need not be known.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterator, Optional

from torch import Tensor
from torch.nn.modules import transformer

__all__ = ["unread_masks"]


def _as_said(
    mask: Optional[Tensor], is_causal: Optional[bool] = None, size: Optional[int] = None
) -> bool:
    """Causal where the caller says so."""
    return is_causal is True


_Encoder = transformer.TransformerEncoder
_encode = _Encoder.forward


@functools.wraps(_encode)
def _encode_as_said(*args: Any, **kwargs: Any) -> Any:
    if len(args) < 5:
        kwargs["is_causal"] = kwargs.get("is_causal") is True
    return _encode(*args, **kwargs)


@contextlib.contextmanager
def unread_masks() -> Iterator[None]:
    """Within it a mask is causal only where ``is_causal`` says so."""
    owner: Any = transformer
    name, instead = "_detect_is_causal_mask", _as_said
    if not hasattr(owner, name):
        # torch 2.0 asks in the encoder itself, and only there.
        owner, name, instead = _Encoder, "forward", _encode_as_said
    original = getattr(owner, name)
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, original)
