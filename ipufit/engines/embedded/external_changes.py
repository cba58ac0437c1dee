"""Changes that callbacks may have made to the module between two executions."""

from __future__ import annotations

from typing import Dict, Mapping

from torch import Tensor, nn

from ipufit.errors import ConfigurationError
from ipufit.tracing.flat_storage import FlatStorage
from ipufit.tracing.grad_step import public_name

__all__ = ["changed_shape", "follow_the_module", "refuse_replaced"]


def refuse_replaced(step: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make sure that the module has the tensors that it had when the program was built.

    Raises:
        ConfigurationError: a parameter or buffer is another object now.
    """
    now: Dict[str, Tensor] = {**dict(step.named_parameters())}
    now.update(step.named_buffers())
    for name, tensor in tensors.items():
        if now.get(name) is not tensor:
            raise ConfigurationError(
                f"{public_name(name)!r} was replaced or removed during fit, but the program works "
                "on the one that was there at its start. Change values in place, or call fit again "
                "after changing the module."
            )


def changed_shape(name: str) -> ConfigurationError:
    """The error about a parameter that can't be taken over."""
    return ConfigurationError(
        f"{public_name(name)!r} changed its shape, dtype or device during fit. Change the module "
        "between two calls of fit."
    )


def follow_the_module(
    step: nn.Module,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    storage: FlatStorage,
) -> None:
    """Take over what a callback has put into parameters by other means than in place.

    Raises:
        ConfigurationError: a parameter or buffer is another object now.
    """
    refuse_replaced(step, {**parameters, **buffers})
    for flat, block in zip(storage.flats, storage.blocks):
        for slot in block.slots:
            view, data = storage.views[slot.name], slot.parameter.data
            if data.data_ptr() == view.data_ptr():
                continue
            if (data.shape, data.dtype, data.device) != (view.shape, view.dtype, view.device):
                raise changed_shape(slot.name)
            view.copy_(data)
            slot.parameter.data = slot.window(flat)
