"""Checks of the arguments of a loss, and of its value.

A loss is looked at while the update is captured, so every check here reads shapes and dtypes, never
values: the tensors may be fake ones that have none.
"""

from __future__ import annotations

from typing import Any, Mapping, Tuple

import torch
from torch import Tensor

from ipufit.core.objective_arguments import describe_tensor, dtype_name, shape_advice
from ipufit.errors import DataError, LossError

__all__ = [
    "check_class_indices",
    "check_class_indices_or_probabilities",
    "check_labels",
    "check_loss_value",
    "check_same_shape",
    "check_same_shape_floating",
    "check_tensors",
    "refuse_broadcast",
]


def check_loss_value(loss: object, where: str) -> Tensor:
    """Make sure that a loss can be differentiated: one floating-point number.

    Args:
        loss: what the loss returned.
        where: the subject of the error message, such as ``"loss 'mse'"``.

    Returns:
        The loss with shape ().

    Raises:
        LossError: not a tensor, more or less than one element, complex, or not floating-point.
    """
    if not isinstance(loss, Tensor):
        raise LossError(
            f"{where} must be a scalar tensor, got {type(loss).__name__}. Compute it from the "
            "prediction with torch operations, so that gradients can flow."
        )
    if loss.numel() != 1:
        raise LossError(
            f"{where} must be a scalar, got shape {tuple(loss.shape)}. Reduce it to one number, "
            "for example with .mean()."
        )
    if loss.is_complex():
        raise LossError(
            f"{where} must be a real number, got dtype {dtype_name(loss)}. Take what is to become "
            "small, for example with .abs()."
        )
    if not loss.is_floating_point():
        raise LossError(
            f"{where} must be floating-point, got dtype {dtype_name(loss)}. Compute it from the "
            "prediction with differentiable operations; an argmax or a comparison has no gradient."
        )
    return loss.reshape(())


def refuse_broadcast(name: str, prediction: Tensor, target: Tensor) -> None:
    """Refuse what torch would broadcast: (N, 1) against (N,) becomes a mean over N * N numbers."""
    if prediction.shape != target.shape:
        raise LossError(
            f"loss {name!r} needs prediction and target of one shape, got prediction "
            f"{tuple(prediction.shape)} and target {tuple(target.shape)}. "
            f"{shape_advice(prediction, target)}"
        )


def check_same_shape(name: str, prediction: Tensor, target: Tensor) -> None:
    """Refuse a target of another shape, or in float64 beside a prediction that is narrower."""
    refuse_broadcast(name, prediction, target)
    # Data from NumPy comes as float64: a trace would carry the loss in float64 from here on, and
    # eager torch 2.0.1 would fail in the backward.
    if target.dtype == torch.float64 and prediction.dtype != torch.float64:
        raise LossError(
            f"loss {name!r} needs a target of the prediction's dtype, got prediction "
            f"{dtype_name(prediction)} and target float64. Make the target "
            f"{dtype_name(prediction)}, for example with .to(torch.{dtype_name(prediction)})."
        )


def check_same_shape_floating(name: str, prediction: Tensor, target: Tensor) -> None:
    """Check shapes, for functions whose gradient fails on an integer target."""
    check_same_shape(name, prediction, target)
    if not target.is_floating_point():
        raise LossError(
            f"loss {name!r} needs a floating-point target, got dtype {dtype_name(target)}. Make it "
            f"{dtype_name(prediction)}, for example with .to(torch.{dtype_name(prediction)})."
        )


def _class_advice(prediction: Tensor, target: Tensor, wanted: Tuple[int, ...]) -> str:
    """Advise, in a sentence, how a target becomes class indices."""
    shape = tuple(target.shape)
    if shape == wanted:
        return "Make it int64 with .long()."
    if len(shape) > 1 and shape[1] == 1 and shape[:1] + shape[2:] == wanted:
        return f"Give target.squeeze(1){'' if target.dtype == torch.int64 else '.long()'}."
    if shape == tuple(prediction.shape):
        return "Of a one-hot target, give target.argmax(1)."
    return "Give one class index per prediction; dimension 1 of the prediction holds the classes."


def check_class_indices(name: str, prediction: Tensor, target: Tensor) -> None:
    """Refuse a target that is not one class index for each prediction."""
    wanted = tuple(prediction.shape[:1] + prediction.shape[2:]) if prediction.dim() > 1 else ()
    if tuple(target.shape) == wanted and target.dtype == torch.int64:
        return
    raise LossError(
        f"loss {name!r} needs class indices of shape {wanted} and dtype int64 for a prediction of "
        f"shape {tuple(prediction.shape)}, got a target of {describe_tensor(target)}. "
        f"{_class_advice(prediction, target, wanted)}"
    )


def check_class_indices_or_probabilities(name: str, prediction: Tensor, target: Tensor) -> None:
    """Refuse a target that is neither class indices nor a probability for each class."""
    if not (target.shape == prediction.shape and target.is_floating_point()):
        check_class_indices(name, prediction, target)


def check_labels(name: str, target: Tensor, classes: int, ignore_index: int, where: str) -> None:
    """Look at the values of class indices, which torch does while it computes, if at all.

    Args:
        name: of the loss.
        target: class indices, any shape; with values.
        classes: how many there are in the prediction.
        ignore_index: index that is left out, whether it is a class or not.
        where: begin of the message.

    Raises:
        DataError: one is negative or as large as the number of classes.
    """
    target = target.long()
    outside = (target != ignore_index) & ((target < 0) | (target >= classes))
    if not outside.any():
        return
    sample = int(outside.nonzero()[0, 0]) if target.dim() else 0
    label = int(target[outside].flatten()[0])
    counted = target[target != ignore_index]
    if label < 0:
        cure = f"What is to be left out has the label {ignore_index}; classes count from 0."
    elif int(counted.min()) == 1 and int(counted.max()) == classes:
        cure = "They seem to count from 1: subtract 1."
    else:
        cure = f"Let the module return {int(counted.max()) + 1} classes, or number them from 0."
    what = (
        f"{where}loss {name!r} needs labels from 0 to {classes - 1} for a prediction of {classes} "
        f"classes, got {label} in sample {sample}"
    )
    raise DataError(f"{what}. {cure}", what=what, cure=cure)


def _picking(name: str, role: str, value: object) -> str:
    """Advise, in a sentence, how a named loss gets one tensor of several."""
    advice = "a callable loss(prediction, target) that picks its tensors"
    if role == "prediction" and isinstance(value, Mapping) and value:
        return f"Name the output, loss={{{next(iter(value))!r}: {name!r}}}, or pass {advice}."
    return f"Pass {advice}."


def check_tensors(name: str, prediction: Any, target: Any) -> None:
    """Make sure that a named loss gets one real tensor as each of its arguments."""
    for role, value in (("prediction", prediction), ("target", target)):
        if not isinstance(value, Tensor):
            raise LossError(
                f"loss {name!r} takes one tensor as {role}, got {type(value).__name__}. "
                f"{_picking(name, role, value)}"
            )
        if value.is_complex():
            raise LossError(
                f"loss {name!r} needs real numbers, got a {role} of dtype {dtype_name(value)}. "
                "Give real and imaginary parts with torch.view_as_real, or pass a callable "
                "loss(prediction, target) that returns a real number."
            )
    if not prediction.is_floating_point():
        raise LossError(
            f"loss {name!r} needs a floating-point prediction, got dtype {dtype_name(prediction)}. "
            "Return what comes before the argmax or the rounding."
        )
