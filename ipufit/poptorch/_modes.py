"""Independence of the device from the autograd mode of the caller."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar, cast

import torch

__all__ = ["outside_inference_mode"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_inference_mode(function: _Function) -> _Function:
    """Run a function outside of inference mode, so that its tensors can be changed later."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return cast(_Function, called)
