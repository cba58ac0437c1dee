"""Losses: from what the user may pass to one normal form, and the checks that a trace can make."""

from ipufit.losses.checks import check_loss_value, describe_tensor, shape_advice
from ipufit.losses.elements import LossTerm
from ipufit.losses.loss import Loss
from ipufit.losses.own import find_loss
from ipufit.losses.resolve import resolve_loss

__all__ = [
    "Loss",
    "LossTerm",
    "check_loss_value",
    "describe_tensor",
    "find_loss",
    "resolve_loss",
    "shape_advice",
]
