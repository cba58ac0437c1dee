"""Try something out on a model, and leave no trace."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from typing import Iterator, Optional, Sequence

import torch
from torch import nn

__all__ = ["everything_kept", "generators_kept"]


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the generators of torch, Python and NumPy (if it is loaded) as they were found."""
    numpy = sys.modules.get("numpy")
    host, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    on_cuda = torch.cuda.is_available()
    accelerators = torch.cuda.get_rng_state_all() if on_cuda else []
    try:
        yield
    finally:
        torch.set_rng_state(host)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if on_cuda:
            torch.cuda.set_rng_state_all(accelerators)


@contextlib.contextmanager
def everything_kept(
    modules: Sequence[Optional[nn.Module]], optimizer: Optional[torch.optim.Optimizer]
) -> Iterator[None]:
    """Put back, bit for bit, weights, buffers, optimizer state and random number generators.

    Args:
        modules: the module, and the loss where it is one; None is passed over.
        optimizer: torch's, or None.
    """
    tensors = [
        tensor
        for module in modules
        if module is not None
        for tensor in (*module.parameters(), *module.buffers())
    ]
    values = [tensor.detach().clone() for tensor in tensors]
    state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    with generators_kept():
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, values):
                    tensor.copy_(value)
            if optimizer is not None and state is not None:
                optimizer.load_state_dict(state)
