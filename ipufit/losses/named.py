"""Losses that have names: functions of torch behind checks of their arguments."""

from __future__ import annotations

import dataclasses
import functools
from typing import Callable, Dict, Iterator, Mapping, Optional, Tuple, Type

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn import functional

from ipufit.core.objective_arguments import describe_tensor, dtype_name, shape_advice
from ipufit.errors import DataError, LossError, UnknownNameError
from ipufit.losses.rules import Doubt

# Operators whose outputs are no log-probabilities, by the names of autograd, and words for them.
_OPERATORS: Dict[str, str] = {
    "Addmm": "a linear layer",
    "Convolution": "a convolution",
    "Gelu": "a GELU",
    "Mm": "a linear layer",
    "Relu": "a ReLU",
    "Sigmoid": "a sigmoid",
    "Softmax": "a softmax",
    "Tanh": "a tanh",
}
# Operators that leave all values as they are.
_VIEWS = ("Alias", "Clone", "ReshapeAlias", "Squeeze", "ToCopy", "UnsafeView", "Unsqueeze", "View")
# Operators with which a loss compares two tensors.
_PAIRWISE = ("Add", "Div", "Mul", "Sub")


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
            f"{where} must be a real number, got dtype {dtype_name(loss.dtype)}. Make it real, for "
            "example with .abs()."
        )
    if not loss.is_floating_point():
        raise LossError(
            f"{where} must be floating-point, got dtype {dtype_name(loss.dtype)}. Compute it from "
            "the prediction with differentiable operations; an argmax or a comparison has no "
            "gradient."
        )
    return loss.reshape(())


def refuse_broadcast(name: str, prediction: Tensor, target: Tensor) -> None:
    """Refuse what torch would broadcast: (N, 1) against (N,) becomes a mean over N * N numbers."""
    if prediction.shape != target.shape:
        is_class = prediction.dim() == 2 and target.shape == prediction.shape[:1]
        advice = " For class indices, use loss='cross_entropy'." if is_class else ""
        raise LossError(
            f"loss {name!r} needs prediction and target of one shape, got prediction "
            f"{tuple(prediction.shape)} and target {tuple(target.shape)}. "
            f"{shape_advice(prediction, target)}{advice}"
        )


def check_same_shape(name: str, prediction: Tensor, target: Tensor) -> None:
    """Refuse a target of another shape, or in float64 beside a prediction that is narrower."""
    refuse_broadcast(name, prediction, target)
    # Data from NumPy comes as float64: a trace would carry the loss in float64 from here on, and
    # eager torch 2.0.1 would fail in the backward.
    if target.dtype == torch.float64 and prediction.dtype != torch.float64:
        dtype = dtype_name(prediction.dtype)
        raise LossError(
            f"loss {name!r} needs a target of the prediction's dtype, got prediction {dtype} and "
            f"target float64. Make the target {dtype}, for example with .to(torch.{dtype})."
        )


def check_same_shape_floating(name: str, prediction: Tensor, target: Tensor) -> None:
    """Check shapes, for functions whose gradient fails on an integer target."""
    check_same_shape(name, prediction, target)
    if not target.is_floating_point():
        dtype = dtype_name(prediction.dtype)
        raise LossError(
            f"loss {name!r} needs a floating-point target, got dtype {dtype_name(target.dtype)}. "
            f"Make it {dtype}, for example with .to(torch.{dtype})."
        )


def _class_advice(prediction: Tensor, target: Tensor, wanted: Tuple[int, ...]) -> str:
    """Advise, in a sentence, how a target becomes class indices."""
    shape = tuple(target.shape)
    if shape == wanted:
        missing = "; NaN is not a class, so leave those samples out first"
        missing = missing if target.is_floating_point() else ""
        return f"Convert it to int64, with .long() or .astype('int64'){missing}."
    if len(shape) > 1 and shape[1] == 1 and shape[:1] + shape[2:] == wanted:
        return f"Pass target.squeeze(1){'' if target.dtype == torch.int64 else '.long()'}."
    if shape == tuple(prediction.shape):
        return "For a one-hot target, pass target.argmax(1)."
    return "Pass one class index per prediction; dimension 1 of the prediction holds the classes."


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


def outside_classes(target: Tensor, classes: int, ignore_index: Optional[int]) -> Tensor:
    """Tell of each class index whether it is none of so many classes, nor left out."""
    return (target != ignore_index) & ((target < 0) | (target >= classes))


def check_labels(
    name: str, target: Tensor, classes: int, ignore_index: Optional[int], where: str
) -> None:
    """Look at the values of class indices, which torch does while it computes, if at all.

    Args:
        name: of the loss.
        target: class indices, any shape; with values.
        classes: how many there are in the prediction.
        ignore_index: index that is left out, whether it is a class or not; None of a loss over two
            classes in one output.
        where: begin of the message.

    Raises:
        DataError: one is negative or as large as the number of classes.
    """
    target = target.long()
    outside = outside_classes(target, classes, ignore_index)
    if not outside.any():
        return
    sample = int(outside.nonzero()[0, 0]) if target.dim() else 0
    label = int(target[outside].flatten()[0])
    counted = target[target != ignore_index]
    of = f" for a prediction of {classes} classes"
    if ignore_index is None:
        of = ""
        cure = "Classes are 0 and 1; for more, use an output for each and loss='cross_entropy'."
    elif label < 0:
        cure = f"Classes count from 0; samples to ignore have the label {ignore_index}."
    elif int(counted.min()) == 1 and int(counted.max()) == classes:
        cure = "They seem to start at 1: subtract 1."
    else:
        cure = f"Let the module return {int(counted.max()) + 1} classes, or number labels from 0."
    what = (
        f"{where}loss {name!r} needs labels from 0 to {classes - 1}{of}, got {label} in sample "
        f"{sample}"
    )
    raise DataError(f"{what}. {cure}", what=what, cure=cure)


def range_doubts(name: str, kind: Type[nn.Module], prediction: Tensor) -> Iterator[Doubt]:
    """Yield what is wrong with the values that one of torch's losses gets.

    Args:
        name: of the loss.
        kind: the class of torch's that computes it.
        prediction: with the graph of autograd that made it.
    """
    node = prediction.grad_fn
    operator = "" if node is None else node.name().partition("Backward")[0]
    while node is not None and operator in _VIEWS:
        node = node.next_functions[0][0]
        operator = "" if node is None else node.name().partition("Backward")[0]
    if operator not in _OPERATORS:
        return
    layer = _OPERATORS[operator]
    is_last = operator == "Softmax" and node is prediction.grad_fn
    is_twice = operator == "Sigmoid" or (is_last and _is_over_classes(prediction))
    function, cure = "softmax", "; predict(x).softmax(1) turns logits into probabilities."
    if kind is nn.BCEWithLogitsLoss:
        function, cure = "sigmoid", ", or use loss='bce', which takes probabilities."
        is_twice = operator in ("Sigmoid", "Softmax")
    if kind in (nn.BCEWithLogitsLoss, nn.CrossEntropyLoss) and is_twice:
        yield (
            f"loss {name!r} takes logits and applies a {function} itself, but the module's outputs "
            f"already come from {layer}, so the model learns little",
            f"Remove it from the module{cure}",
        )
    if kind is nn.NLLLoss:
        yield (
            f"loss {name!r} takes log-probabilities, but the module's outputs come from {layer}: "
            "the loss decreases without limit, and the model learns little",
            "Let the module return logits with loss='cross_entropy', or end it with "
            "nn.LogSoftmax(1).",
        )


def _is_over_classes(outputs: Tensor) -> bool:
    """Tell whether outputs of a softmax are one over their classes."""
    # A negative number is shown as one of 64 bits without a sign.
    dim = (outputs.grad_fn._saved_dim + 2**63) % 2**64 - 2**63  # type: ignore[union-attr]
    return bool(dim % outputs.dim() == min(1, outputs.dim() - 1))


def broadcast_doubts(
    description: str, prediction: Tensor, target: Tensor, value: Tensor
) -> Iterator[Doubt]:
    """Yield it where a function compares every prediction with every target, from torch 2.1 on.

    Args:
        description: of the loss.
        prediction, target: what the function got.
        value: the loss, with the graph of autograd that made it.
    """
    size = prediction.shape[0] if prediction.dim() else 1
    shapes = {tuple(prediction.shape), tuple(target.shape)}
    if size == 1 or shapes != {(size,), (size, 1)}:
        return
    root = prediction.grad_fn
    waiting, done = [value.grad_fn], {root, None}
    while waiting:
        node = waiting.pop()
        if node is None or node in done:
            continue
        done.add(node)
        inputs = [each for each, _ in node.next_functions]
        waiting += inputs
        is_pair = node.name().partition("Backward")[0] in _PAIRWISE and set(inputs) == {root, None}
        if is_pair and _shape(node) == (size, size):
            yield (
                f"{description} compares a prediction of shape {tuple(prediction.shape)} with a "
                f"target of shape {tuple(target.shape)}, which torch broadcasts to ({size}, "
                f"{size}): every prediction is compared with the target of every sample",
                "Make the shapes equal in the loss, for example with "
                "target.reshape(prediction.shape).",
            )
            return


def _shape(node: Node) -> Tuple[int, ...]:
    """Shape of what an operator made; () where this torch does not tell."""
    metadata = node._input_metadata if hasattr(node, "_input_metadata") else ()
    return tuple(metadata[0].shape) if metadata else ()


def _picking(name: str, role: str, value: object) -> str:
    """Advise, in a sentence, how a named loss gets one tensor of several."""
    advice = "a callable loss(prediction, target) that picks its tensors"
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    if isinstance(first, str):
        return f"Let the dataset yield a number for each text such as {first!r}."
    if role == "prediction" and isinstance(value, Mapping) and value:
        return f"Name the output, loss={{{next(iter(value))!r}: {name!r}}}, or pass {advice}."
    return f"Pass {advice}."


def check_tensors(name: str, prediction: object, target: object) -> Tuple[Tensor, Tensor]:
    """Make sure that a named loss gets one real tensor as each of its arguments; return both."""
    for role, value in (("prediction", prediction), ("target", target)):
        if not isinstance(value, Tensor):
            raise LossError(
                f"loss {name!r} takes one tensor as {role}, got {type(value).__name__}. "
                f"{_picking(name, role, value)}"
            )
        if value.is_complex():
            raise LossError(
                f"loss {name!r} needs real numbers, got a {role} of dtype "
                f"{dtype_name(value.dtype)}. Pass real and imaginary parts with "
                "torch.view_as_real, or pass a callable loss(prediction, target) that returns a "
                "real number."
            )
    assert isinstance(prediction, Tensor)
    assert isinstance(target, Tensor)
    if not prediction.is_floating_point():
        raise LossError(
            f"loss {name!r} needs a floating-point prediction, got dtype "
            f"{dtype_name(prediction.dtype)}. Return the values before the argmax or the rounding."
        )
    return prediction, target


@dataclasses.dataclass(frozen=True)
class Named:
    """A function of torch behind the check of its arguments."""

    name: str
    function: Callable[..., Tensor]
    check: Callable[[str, Tensor, Tensor], None]

    def accept(self, prediction: object, target: object) -> None:
        """Make sure that the function means something for such arguments.

        Raises:
            LossError: it does not.
        """
        self.check(self.name, *check_tensors(self.name, prediction, target))

    def __call__(self, prediction: object, target: object) -> Tensor:
        """The loss of one micro-batch, shape ()."""
        self.accept(prediction, target)
        return self.function(prediction, target)


# Each is the function of torch.nn.functional with its defaults, the mean over everything, except
# kl_div: its own "mean" divides by the classes too, which torch's documentation calls not the
# divergence, so here the mean is over the samples ("batchmean").
_kl_div = functools.partial(functional.kl_div, reduction="batchmean")
_LOSSES: Dict[str, Named] = {
    named.name: named
    for named in (
        Named("bce", functional.binary_cross_entropy, check_same_shape_floating),
        Named(
            "bce_with_logits",
            functional.binary_cross_entropy_with_logits,
            check_same_shape_floating,
        ),
        Named("cross_entropy", functional.cross_entropy, check_class_indices_or_probabilities),
        Named("hinge_embedding", functional.hinge_embedding_loss, check_same_shape),
        Named("huber", functional.huber_loss, check_same_shape_floating),
        Named("kl_div", _kl_div, check_same_shape_floating),
        Named("mae", functional.l1_loss, check_same_shape_floating),
        Named("mse", functional.mse_loss, check_same_shape_floating),
        Named("multi_margin", functional.multi_margin_loss, check_class_indices),
        Named("multilabel_soft_margin", functional.multilabel_soft_margin_loss, check_same_shape),
        Named("nll", functional.nll_loss, check_class_indices),
        Named("poisson_nll", functional.poisson_nll_loss, check_same_shape),
        Named("smooth_l1", functional.smooth_l1_loss, check_same_shape_floating),
        Named("soft_margin", functional.soft_margin_loss, check_same_shape),
    )
}


def check_torch_loss(function: str, prediction: Tensor, target: Tensor) -> None:
    """Make sure that a function of ``torch.nn.functional`` means something for such arguments.

    Args:
        function: its name; nothing is checked of one that no named loss stands for.
        prediction, target: as it got them.

    Raises:
        LossError: it does not.
    """
    for named in _LOSSES.values():
        if getattr(named.function, "func", named.function).__name__ == function:
            Named(function, named.function, named.check).accept(prediction, target)


_ALIASES = {
    "binary_cross_entropy": "bce",
    "binary_cross_entropy_with_logits": "bce_with_logits",
    "l1": "mae",
    "mean_absolute_error": "mae",
    "mean_squared_error": "mse",
}

# Keras' names that mean something else there: mapped silently, they would train on a wrong number.
_KERAS_CLASSES = (
    "Keras' {name!r} takes probabilities; 'cross_entropy' takes logits (leave the softmax out of "
    "the module) and {target}. "
)
_KERAS_HINTS = {
    "categoricalcrossentropy": _KERAS_CLASSES.format(
        name="categorical_crossentropy", target="class indices or one-hot targets in floating point"
    ),
    "sparsecategoricalcrossentropy": _KERAS_CLASSES.format(
        name="sparse_categorical_crossentropy", target="int64 class indices"
    ),
    "binarycrossentropy": (
        "Keras' 'binary_crossentropy' takes probabilities; 'bce_with_logits' takes logits (leave "
        "the sigmoid out of the module), 'bce' takes probabilities. "
    ),
    "kldivergence": (
        "Keras' 'kl_divergence' takes probabilities; 'kl_div' takes log-probabilities as "
        "prediction (end the module with log_softmax). "
    ),
    "poisson": (
        "Keras' 'poisson' takes rates; 'poisson_nll' takes logarithms of rates (leave the exp out "
        "of the module). "
    ),
}


def by_name(name: str) -> Named:
    """The loss of this name, in any case.

    Raises:
        UnknownNameError: no loss has that name; of Keras' losses on probabilities, it tells which
            to use instead.
    """
    folded = name.lower()
    named = _LOSSES.get(_ALIASES.get(folded, folded))
    if named is None:
        hint = _KERAS_HINTS.get(folded.replace("_", ""), "")
        raise UnknownNameError("loss", name, [*_LOSSES, *_ALIASES], hint, is_typo=not hint)
    return named
