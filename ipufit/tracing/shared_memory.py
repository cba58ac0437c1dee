"""Tensors of a module that share memory without being one tensor."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from torch import Tensor

from ipufit.errors import ConfigurationError, OptimizerError
from ipufit.tracing.grad_step import public_name

__all__ = ["refuse_shared_memory"]


def refuse_shared_memory(
    trained: Sequence[str], parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> None:
    """The program moves trained parameters, and copies buffers: what overlaps would come apart.

    Raises:
        ConfigurationError: two different parameters or buffers overlap in memory.
        OptimizerError: a trained parameter is complex.
    """
    for name in trained:
        if parameters[name].is_complex():
            raise OptimizerError(
                f"trained parameters must be real, but {public_name(name)!r} is "
                f"{parameters[name].dtype}. Keep real and imaginary part as two parameters, and "
                "join them with torch.complex in forward."
            )
    by_storage: Dict[int, List[Tuple[int, int, str]]] = {}
    for name, tensor in {**parameters, **buffers}.items():
        if not tensor.numel() or tensor.is_sparse:
            continue
        last = int(sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())))
        begin = int(tensor.storage_offset())
        key = tensor.untyped_storage().data_ptr()
        by_storage.setdefault(key, []).append((begin, begin + last, name))
    for places in by_storage.values():
        places.sort()
        for (_, end, first), (begin, _, second) in zip(places, places[1:]):
            if begin <= end:
                raise ConfigurationError(
                    f"{public_name(first)!r} and {public_name(second)!r} share memory without "
                    "being one tensor, and would come apart in the program. Tie them: "
                    "b.weight = a.weight makes both names one parameter."
                )
