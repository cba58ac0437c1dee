"""Parameters and buffers that forward removed or put another tensor in the place of."""

from __future__ import annotations

from typing import Dict, NamedTuple

from torch import Tensor, nn

from ipufit.poptorch._errors import error

__all__ = ["Held", "changed_buffers", "held_tensors"]

# Their running statistics may be rebound; the program has them under their names all the same.
_EXEMPT = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Held(NamedTuple):
    """The very tensors that a module holds, by name."""

    buffers: Dict[str, Tensor]
    parameters: Dict[str, Tensor]


def held_tensors(model: nn.Module) -> Held:
    """What the module holds now, without the buffers of batch normalisation."""
    buffers: Dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if not isinstance(module, _EXEMPT):
            buffers.update(module.named_buffers(prefix=path, recurse=False))
    return Held(buffers, dict(model.named_parameters()))


def changed_buffers(before: Held, after: Held) -> None:
    """Refuse a forward that did not change its buffers and parameters in place.

    Args:
        before, after: of the module that was recorded, around the recording.
    Raises:
        Error: one was removed, or another tensor stands in its place.
    """
    for what, old, new in [
        ("Buffer", before.buffers, after.buffers),
        ("Parameter", before.parameters, after.parameters),
    ]:
        for name, tensor in old.items():
            if name not in new:
                raise error(
                    f"{what} {name} is removed from the model when calling the forward method. "
                    "Keep it, and change its values in place."
                )
            if new[name] is not tensor:
                raise error(
                    f"{what} {name} is reassigned within the model when calling the forward "
                    "method. This is not supported. Consider using "
                    f"self.{name}.copy_(src) to copy data from a source tensor, where src is the "
                    "name of the source tensor."
                )
