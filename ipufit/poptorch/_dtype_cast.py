"""Data types of a device, and the casts of inputs and outputs to them."""

from __future__ import annotations

from typing import Dict

import torch
from torch import Tensor

from ipufit.poptorch._errors import error

__all__ = ["DEVICE_DTYPES", "check_input", "narrowed", "narrowed_output", "output_dtype"]

# A tensor of the left type is on the device one of the right type. What is not here can't go there.
DEVICE_DTYPES: Dict[torch.dtype, torch.dtype] = {
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int16,
    torch.int32: torch.int32,
    torch.int64: torch.int32,
    torch.float16: torch.float16,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float32,
    torch.bool: torch.bool,
}

# On the way out bfloat16 is half, other than on the way in.
_OUTPUTS = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float16,
}


def check_input(tensor: Tensor, name: str) -> None:
    """Refuse a tensor that a device can't hold.

    Args:
        name: what it is called in a message.
    Raises:
        Error: it has no elements, or its dtype is not in ``DEVICE_DTYPES``.
    """
    if tensor.dtype not in DEVICE_DTYPES:
        supported = ", ".join(sorted(str(dtype)[len("torch.") :] for dtype in DEVICE_DTYPES))
        raise error(
            f"Unsupported input type {tensor.dtype} of the input {name}. Convert it to one of "
            f"{supported}; a complex tensor fits as torch.view_as_real(tensor)."
        )
    if not tensor.numel():
        raise error(
            f"Zero-sized tensors are unsupported (Got shape {list(tensor.shape)}). Leave the input "
            f"{name} out of this call, or pad it."
        )


def narrowed(tensor: Tensor) -> Tensor:
    """Cast an input to what the recorded program reads: float64 and bfloat16 become float32.

    int64 stays, although the device has int32: torch's operators index with int64.
    """
    dtype = DEVICE_DTYPES[tensor.dtype]
    return tensor if dtype is torch.int32 else tensor.to(dtype)


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an output of this dtype leaves the device."""
    return _OUTPUTS.get(dtype, dtype)


def narrowed_output(tensor: Tensor) -> Tensor:
    """Cast an output as a device does: int64 to int32, float64 to float32, bfloat16 to half."""
    return tensor.to(output_dtype(tensor.dtype))
