"""Losses: from what the user may pass to one normal form, and the checks that a trace can make."""

from ipufit.core.argument_order import (
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
from ipufit.losses.loss import Loss
from ipufit.losses.module_loss import find_loss
from ipufit.losses.resolve import resolve_loss
from ipufit.losses.unreduced import LabelRange, LossTerm

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
