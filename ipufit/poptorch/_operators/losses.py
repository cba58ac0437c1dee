"""Functions of torch that return a loss, and the mark that makes any tensor one."""

from __future__ import annotations

from typing import Any, FrozenSet

import torch
import torch.nn.functional as F
from torch import Tensor

from ipufit.poptorch._tracing import tracing

__all__ = ["LOSSES", "identity_loss"]

_NAMES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "cross_entropy_loss",
    "ctc_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "nll_loss",
    "nll_loss2d",
    "nll_loss_nd",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)


def _spellings() -> FrozenSet[Any]:
    functions = set()
    for place in (F, torch, torch._C._nn):
        functions |= {getattr(place, name) for name in _NAMES if hasattr(place, name)}
    return frozenset(functions)


# Functions whose result is a loss, as they are called: torch.nn.functional's, torch's own.
LOSSES = _spellings()


def identity_loss(x: Tensor, reduction: str) -> Tensor:
    """Make a tensor a loss, which is what training differentiates.

    A training model has exactly one loss that leads to no other one; a sum of torch's losses is
    none before it is passed to this.

    Args:
        x: any shape.
        reduction: ``"sum"``, ``"mean"``, or ``"none"``, after which every element counts.
    Raises:
        AssertionError: another reduction.
    """
    if reduction not in ("sum", "mean", "none"):
        raise AssertionError(
            f'Unsupported reduction type! Expected "sum", "mean" or "none", got {reduction!r}.'
        )
    if reduction == "sum":
        loss = torch.sum(x)
    elif reduction == "mean":
        loss = torch.mean(x)
    else:
        loss = x.clone()
    trace = tracing()
    return loss if trace is None else trace.mark_loss(loss, reduction != "none")
