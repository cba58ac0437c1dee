"""The device computes as it always does, whatever mode of autograd the caller is in."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar, cast

import torch

__all__ = ["outside_inference_mode"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_inference_mode(function: _Function) -> _Function:
    """Let what is made in there be changed later, which tensors of inference mode can't be."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return cast(_Function, called)
