"""A module that computes its own loss: where in its result the loss stands."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Mapping, Optional, Tuple, Union

from torch import Tensor

__all__ = ["WHOLE_BATCH", "OwnLoss", "WholeBatch", "find_loss", "own_loss_advice"]

# Whether a module computes its own loss; "whole" where it takes a batch as one argument.
OwnLoss = Union[bool, Literal["whole"]]


class WholeBatch:
    """Value of ``loss`` for a module that computes its own, and takes a batch as one argument."""


WHOLE_BATCH = WholeBatch()


def find_loss(result: object) -> Optional[Tuple[Any, Any]]:
    """Outputs and loss of a module that computes its own; None when the result holds no loss."""
    fields = getattr(result, "_fields", ()) if isinstance(result, tuple) else ()
    if isinstance(result, (tuple, list)):
        # A named tuple says which one is the loss: taking the last of (loss, accuracy) would train
        # on the accuracy.
        place = fields.index("loss") if "loss" in fields else len(result) - 1
        if len(result) < 2:
            return None
        loss = result[place]
        rest = tuple(result[:place]) + tuple(result[place + 1 :])
        outputs: Any = rest[0] if len(rest) == 1 else rest
    elif isinstance(result, Mapping):
        loss = result.get("loss")
        outputs = {key: value for key, value in result.items() if key != "loss"}
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        names = [field.name for field in dataclasses.fields(result)]
        loss = getattr(result, "loss", None)
        outputs = {name: getattr(result, name) for name in names if name != "loss"}
    else:
        return None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return None
    return outputs, loss


def own_loss_advice(result: object) -> str:
    """Advise, in a sentence or two, what to do about a result without a loss."""
    advice = "Return (outputs, loss) from forward, or pass loss= to compile."
    if isinstance(result, Mapping) and type(result) is not dict:
        # As models of the transformers library return, which compute a loss from labels alone.
        return (
            "If forward computes the loss from labels, put them into the batch, under the name "
            f"that it has for them, such as 'labels'. {advice}"
        )
    first = result[0] if isinstance(result, tuple) and len(result) > 1 else None
    if isinstance(first, Tensor) and not first.dim() and first.is_floating_point():
        return (
            f"{advice} The first looks like the loss, which must stand last: models of the "
            "transformers library return it by name with config.return_dict = True."
        )
    return advice
