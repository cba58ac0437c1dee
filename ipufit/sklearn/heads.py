"""What a loss on classes wants as target, and how its outputs become probabilities."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Optional

import torch
from torch import Tensor

from ipufit.losses.resolve import resolve_loss

__all__ = ["Head", "head_of"]


@dataclasses.dataclass(frozen=True)
class Head:
    """How a classifier's outputs are read.

    Attributes:
        is_binary: whether one output stands for the second of two classes, and the target is 0 or 1
            in floating point; else there is one output for each class, and the target its index.
        to_probabilities: of the outputs; None where the loss does not say what they are.
    """

    is_binary: bool
    to_probabilities: Optional[Callable[[Tensor], Tensor]]


def _softmax(outputs: Tensor) -> Tensor:
    return torch.softmax(outputs, 1)


def _as_they_are(outputs: Tensor) -> Tensor:
    return outputs


_CLASSES = Head(False, _softmax)
_LOGARITHMS = Head(False, torch.exp)
_LOGITS = Head(True, torch.sigmoid)
_PROBABILITIES = Head(True, _as_they_are)
_HEADS: Dict[str, Head] = {
    "cross_entropy": _CLASSES,
    "CrossEntropyLoss": _CLASSES,
    "nll": _LOGARITHMS,
    "nll_loss": _LOGARITHMS,
    "NLLLoss": _LOGARITHMS,
    "bce_with_logits": _LOGITS,
    "binary_cross_entropy_with_logits": _LOGITS,
    "BCEWithLogitsLoss": _LOGITS,
    "bce": _PROBABILITIES,
    "binary_cross_entropy": _PROBABILITIES,
    "BCELoss": _PROBABILITIES,
}


def head_of(loss: Any) -> Head:
    """By the loss, in any form that ``compile`` takes; one output for each class where unknown."""
    return _HEADS.get(resolve_loss(loss).name, Head(False, None))
