"""What a loss asks of its arguments, and what is asked of its value.

A loss is looked at while the update is captured, so every check here reads shapes and dtypes, never
values: the tensors may be fake ones that have none.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.errors import DataError, LossError

__all__ = [
    "check_class_indices",
    "check_class_indices_or_probabilities",
    "check_labels",
    "check_loss_value",
    "check_same_shape",
    "check_same_shape_floating",
    "check_tensors",
    "describe",
    "describe_tensor",
    "fit_indices",
    "fit_values",
    "refuse_broadcast",
    "shape_advice",
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
            f"{where} must be a real number, got dtype {_dtype(loss)}. Take what is to become "
            "small, for example with .abs()."
        )
    if not loss.is_floating_point():
        raise LossError(
            f"{where} must be floating-point, got dtype {_dtype(loss)}. Compute it from the "
            "prediction with differentiable operations; an argmax or a comparison has no gradient."
        )
    return loss.reshape(())


# ---- what a named loss asks of its arguments ----------------------------------------------------


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).replace("torch.", "")


def describe_tensor(value: Any) -> str:
    """``shape (8, 10), dtype float32`` of a tensor, the type's name of anything else."""
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, dtype {_dtype(value)}"
    return type(value).__name__


def describe(value: Any) -> str:
    """What came, for a sentence."""
    if isinstance(value, Tensor):
        return f"a tensor of {describe_tensor(value)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {[str(key) for key in value]}"
    if isinstance(value, (tuple, list)) and value:
        return f"{type(value).__name__} of {len(value)}, the last {describe(value[-1])}"
    return type(value).__name__


def shape_advice(prediction: Tensor, target: Tensor) -> str:
    """What to write so that two shapes become equal, as a sentence."""
    dim = _extra_dim(prediction.shape, target.shape)
    if dim:
        return f"Give target.unsqueeze({dim}), or return prediction.squeeze({dim})."
    dim = _extra_dim(target.shape, prediction.shape)
    if dim:
        return f"Give target.squeeze({dim}), or return prediction.unsqueeze({dim})."
    return "Make both shapes equal."


def _extra_dim(wide: Sequence[int], narrow: Sequence[int]) -> int:
    """The dimension of size one that ``wide`` has more than ``narrow``; 0 when there is none.

    Dimension 0 is the batch and never too many: of (1, 1) and (1,) it is the last one.
    """
    for dim in range(len(wide) - 1, 0, -1):
        if wide[dim] == 1 and [*wide[:dim], *wide[dim + 1 :]] == list(narrow):
            return dim
    return 0


def fit_values(prediction: Tensor, target: Tensor) -> Tensor:
    """The target in the prediction's shape, if a last dimension of size one is all that differs.

    torch would broadcast (batch, 1) against (batch,) to (batch, batch). Nothing is copied.
    """
    return _fit(target, prediction.shape)


def fit_indices(prediction: Tensor, target: Tensor) -> Tensor:
    """Class indices without a last dimension of size one that the prediction has no use for.

    Args:
        prediction: shape (batch, classes, ...).
        target: integers of shape (batch, ..., 1); others are returned as they are.
    """
    is_integer = not (target.is_floating_point() or target.is_complex())
    if not is_integer or prediction.dim() < 2 or target.shape == prediction.shape:
        return target
    return _fit(target, prediction.shape[:1] + prediction.shape[2:])


def _fit(target: Tensor, shape: Sequence[int]) -> Tensor:
    """The target with one dimension of size one less or more at its end, if that makes the shape.

    Keras looks at the last dimension alone, too.
    """
    shape = list(shape)
    if shape and list(target.shape) == [*shape, 1]:
        return target.squeeze(-1)
    if target.dim() and [*target.shape, 1] == shape:
        return target.unsqueeze(-1)
    return target


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
            f"{_dtype(prediction)} and target float64. Make the target {_dtype(prediction)}, for "
            f"example with .to(torch.{_dtype(prediction)})."
        )


def check_same_shape_floating(name: str, prediction: Tensor, target: Tensor) -> None:
    """As :func:`check_same_shape`, for functions whose gradient fails on an integer target."""
    check_same_shape(name, prediction, target)
    if not target.is_floating_point():
        raise LossError(
            f"loss {name!r} needs a floating-point target, got dtype {_dtype(target)}. Make it "
            f"{_dtype(prediction)}, for example with .to(torch.{_dtype(prediction)})."
        )


def _class_advice(prediction: Tensor, target: Tensor, wanted: Tuple[int, ...]) -> str:
    """What to write so that a target becomes class indices, as a sentence."""
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


def _picking(name: str, role: str, value: Any) -> str:
    """What to write so that a named loss gets one tensor of several, as a sentence."""
    own = "a callable loss(prediction, target) that picks its tensors"
    if role == "prediction" and isinstance(value, Mapping) and value:
        return f"Name the output, loss={{{next(iter(value))!r}: {name!r}}}, or pass {own}."
    return f"Pass {own}."


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
                f"loss {name!r} needs real numbers, got a {role} of dtype {_dtype(value)}. Give "
                "real and imaginary parts with torch.view_as_real, or pass a callable "
                "loss(prediction, target) that returns a real number."
            )
    if not prediction.is_floating_point():
        raise LossError(
            f"loss {name!r} needs a floating-point prediction, got dtype {_dtype(prediction)}. "
            "Return what comes before the argmax or the rounding."
        )
