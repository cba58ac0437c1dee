"""Tensors as a safetensors file takes them: dense, on the host, no two in the same memory."""

from __future__ import annotations

from typing import Dict, Mapping, Optional

import torch
from torch import Tensor

__all__ = ["apart", "host_copy", "why_not_stored"]


def why_not_stored(tensor: Tensor) -> Optional[str]:
    """What kind of tensor it is, if it is one that no file of tensors can hold; else None."""
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "a tensor on the device meta"
    return "a quantized tensor" if tensor.is_quantized else None


def host_copy(tensor: Tensor) -> Tensor:
    """The same values, contiguous, in memory of their own on the host."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return copy.copy_(tensor.detach())


def apart(tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """The tensors, of which those that are not as a file takes them are copied."""
    found: Dict[str, Tensor] = {}
    taken = set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage().data_ptr()
        is_fit = (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not (tensor.is_conj() or tensor.is_neg())
            and memory not in taken
        )
        taken.add(memory)
        found[name] = tensor.detach() if is_fit else host_copy(tensor)
    return found
