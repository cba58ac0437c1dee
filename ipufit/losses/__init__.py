"""Losses: from what the user may pass to one normal form, and the checks that a trace can make."""

from ipufit.losses.argument_order import (
    PREDICTION_FIRST,
    ArgumentOrder,
    argument_order,
    is_running_metric,
)
from ipufit.losses.checks import (
    check_labels,
    check_loss_value,
    describe,
    describe_tensor,
    fit_indices,
    fit_values,
    shape_advice,
)
from ipufit.losses.elements import LabelRange, LossTerm
from ipufit.losses.loss import Loss
from ipufit.losses.own import find_loss
from ipufit.losses.resolve import resolve_loss

__all__ = [
    "PREDICTION_FIRST",
    "ArgumentOrder",
    "LabelRange",
    "Loss",
    "LossTerm",
    "argument_order",
    "check_labels",
    "check_loss_value",
    "describe",
    "describe_tensor",
    "find_loss",
    "fit_indices",
    "fit_values",
    "is_running_metric",
    "resolve_loss",
    "shape_advice",
]
