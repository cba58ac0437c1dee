"""Losses: from what the user may pass to one normal form, and the checks that a trace can make.

A loss is looked at while the update is captured, so every check here reads shapes and dtypes, never
values: the tensors may be fake ones that have none.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, Callable, Dict, Literal, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ipufit.errors import ConfigurationError, LossError, UnknownNameError

__all__ = [
    "Loss",
    "check_loss_value",
    "describe_tensor",
    "find_loss",
    "resolve_loss",
    "shape_advice",
]


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """The loss of one micro-batch."""

    value: Tensor
    count: Optional[Tensor] = None
    parts: Dict[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Loss:
    """A loss in normal form: a module, a function, or the user's own module itself.

    Attributes:
        name: for messages and logs; of an alias, the name it stands for.
        module: the user's loss module, which may own parameters and buffers, or None.
        function: a function of (prediction, target), or None.
        reduction: "mean" or "sum", how the loss joins the samples of a micro-batch.
        in_module: True for ``loss=None``: the user's module returns ``(outputs, loss)``; use
            :meth:`split`.
    """

    name: str
    module: Optional[nn.Module] = None
    function: Optional[Callable[..., Any]] = None
    reduction: Literal["mean", "sum"] = "mean"
    in_module: bool = False
    normalize: str = "samples"
    part_names: Tuple[str, ...] = ()

    def __call__(self, prediction: Any, target: Any, sample_weight: Any = None) -> LossTerm:
        """The loss of one micro-batch.

        Args:
            prediction: what the user's module returned; a named loss takes one tensor.
            target: the micro-batch's target; a named loss takes one tensor.

        Returns:
            A floating-point tensor of shape ().

        Raises:
            LossError: a named loss can't take these shapes or dtypes, or the value is not a scalar.
        """
        call = self.module if self.module is not None else self.function
        assert call is not None, "with loss=None the module computes the loss; use split"
        return LossTerm(check_loss_value(call(prediction, target), f"loss {self.name!r}"))

    def split(self, result: Any) -> Tuple[Any, LossTerm]:
        """Take apart what a module that computes its own loss returned.

        Args:
            result: a tuple or list whose last element is the loss; a named tuple or dataclass with
                a field, or a mapping with a key, called ``loss``, wherever it stands.

        Returns:
            The outputs and the loss of shape (). ``(a, loss)`` gives ``a``, ``(a, b, loss)`` gives
            the tuple ``(a, b)``; a mapping or a dataclass gives a plain dict without ``loss``.

        Raises:
            LossError: there is no loss in the result.
        """
        assert self.in_module, "only a module that computes its own loss returns one"
        found = find_loss(result)
        if found is None:
            raise LossError(
                "with loss=None the module must return (outputs, loss), the loss a tensor of one "
                f"number, got {_describe(result)}. Return (outputs, loss) from forward, or pass "
                "loss= to compile."
            )
        outputs, loss = found
        return outputs, LossTerm(check_loss_value(loss, "the module's own loss"))


def check_loss_value(loss: object, where: str) -> Tensor:
    """Make sure that a loss can be differentiated: one floating-point number.

    Args:
        loss: what the loss returned.
        where: the subject of the error message, such as ``"loss 'mse'"``.

    Returns:
        The loss with shape ().

    Raises:
        LossError: not a tensor, more or less than one element, or not floating-point.
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
    if not loss.is_floating_point():
        raise LossError(
            f"{where} must be floating-point, got dtype {_dtype(loss)}. Compute it from the "
            "prediction with differentiable operations; an argmax or a comparison has no gradient."
        )
    return loss.reshape(())


def find_loss(result: Any) -> Optional[Tuple[Any, Any]]:
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


# ---- what a named loss asks of its arguments ----------------------------------------------------


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).replace("torch.", "")


def describe_tensor(value: Any) -> str:
    """``shape (8, 10), dtype float32`` of a tensor, the type's name of anything else."""
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}, dtype {_dtype(value)}"
    return type(value).__name__


def _describe(value: Any) -> str:
    """What came, for a sentence."""
    if isinstance(value, Tensor):
        return f"a tensor of {describe_tensor(value)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {[str(key) for key in value]}"
    if isinstance(value, (tuple, list)) and value:
        return f"{type(value).__name__} of {len(value)}, the last {_describe(value[-1])}"
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


def _same_shape(name: str, prediction: Tensor, target: Tensor) -> None:
    """Refuse what torch would broadcast: (N, 1) against (N,) becomes a mean over N * N numbers."""
    if prediction.shape != target.shape:
        raise LossError(
            f"loss {name!r} needs prediction and target of one shape, got prediction "
            f"{tuple(prediction.shape)} and target {tuple(target.shape)}. "
            f"{shape_advice(prediction, target)}"
        )
    # Data from NumPy comes as float64: a trace would carry the loss in float64 from here on, and
    # eager torch 2.0.1 would fail in the backward.
    if target.dtype == torch.float64 and prediction.dtype != torch.float64:
        raise LossError(
            f"loss {name!r} needs a target of the prediction's dtype, got prediction "
            f"{_dtype(prediction)} and target float64. Make the target {_dtype(prediction)}, for "
            f"example with .to(torch.{_dtype(prediction)})."
        )


def _same_shape_floating(name: str, prediction: Tensor, target: Tensor) -> None:
    """As :func:`_same_shape`, for functions whose gradient fails on an integer target."""
    _same_shape(name, prediction, target)
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


def _class_indices(name: str, prediction: Tensor, target: Tensor) -> None:
    wanted = tuple(prediction.shape[:1] + prediction.shape[2:]) if prediction.dim() > 1 else ()
    if tuple(target.shape) == wanted and target.dtype == torch.int64:
        return
    raise LossError(
        f"loss {name!r} needs class indices of shape {wanted} and dtype int64 for a prediction of "
        f"shape {tuple(prediction.shape)}, got a target of {describe_tensor(target)}. "
        f"{_class_advice(prediction, target, wanted)}"
    )


def _class_indices_or_probabilities(name: str, prediction: Tensor, target: Tensor) -> None:
    if not (target.shape == prediction.shape and target.is_floating_point()):
        _class_indices(name, prediction, target)


@dataclasses.dataclass(frozen=True)
class _Named:
    """A function of torch behind the check of its arguments."""

    name: str
    function: Callable[..., Tensor]
    check: Callable[[str, Tensor, Tensor], None]

    def __call__(self, prediction: Any, target: Any) -> Tensor:
        for role, value in (("prediction", prediction), ("target", target)):
            if not isinstance(value, Tensor):
                raise LossError(
                    f"loss {self.name!r} takes one tensor as {role}, got {type(value).__name__}. "
                    "Pass a callable loss(prediction, target) that picks its tensors."
                )
        if not prediction.is_floating_point():
            raise LossError(
                f"loss {self.name!r} needs a floating-point prediction, got dtype "
                f"{_dtype(prediction)}. Return what comes before the argmax or the rounding."
            )
        self.check(self.name, prediction, target)
        return self.function(prediction, target)


# Each is the function of torch.nn.functional with its defaults, the mean over everything, except
# kl_div: its own "mean" divides by the classes too, which torch's documentation calls not the
# divergence, so here the mean is over the samples ("batchmean").
_kl_div = functools.partial(functional.kl_div, reduction="batchmean")
_LOSSES: Dict[str, _Named] = {
    named.name: named
    for named in (
        _Named("bce", functional.binary_cross_entropy, _same_shape_floating),
        _Named(
            "bce_with_logits", functional.binary_cross_entropy_with_logits, _same_shape_floating
        ),
        _Named("cross_entropy", functional.cross_entropy, _class_indices_or_probabilities),
        _Named("hinge_embedding", functional.hinge_embedding_loss, _same_shape),
        _Named("huber", functional.huber_loss, _same_shape_floating),
        _Named("kl_div", _kl_div, _same_shape_floating),
        _Named("mae", functional.l1_loss, _same_shape_floating),
        _Named("mse", functional.mse_loss, _same_shape_floating),
        _Named("multi_margin", functional.multi_margin_loss, _class_indices),
        _Named("multilabel_soft_margin", functional.multilabel_soft_margin_loss, _same_shape),
        _Named("nll", functional.nll_loss, _class_indices),
        _Named("poisson_nll", functional.poisson_nll_loss, _same_shape),
        _Named("smooth_l1", functional.smooth_l1_loss, _same_shape_floating),
        _Named("soft_margin", functional.soft_margin_loss, _same_shape),
    )
}

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
_REDUCTIONS: Dict[str, Literal["mean", "sum"]] = {
    "mean": "mean",
    "batchmean": "mean",
    "sum": "sum",
}


def resolve_loss(loss: object) -> Loss:
    """Bring a loss into normal form.

    Args:
        loss: a name; an ``nn.Module``, kept as it is, or such a class that takes no arguments; a
            callable ``(prediction, target) -> scalar``; or None, when the module returns
            ``(outputs, loss)``. A named loss is the function of ``torch.nn.functional`` that bears
            its name, averaged ("kl_div": over the samples, "batchmean").

    Raises:
        UnknownNameError: no loss has that name; of Keras' losses on probabilities, it tells which
            to use instead.
        LossError: a reduction that leaves more than one number, or something that is no loss.
        ConfigurationError: several losses.
    """
    if loss is None:
        return Loss("the module's own loss", in_module=True)
    if isinstance(loss, str):
        return _by_name(loss)
    if isinstance(loss, (list, tuple, Mapping)):
        raise ConfigurationError(
            f"loss must be one loss, got {type(loss).__name__} of {len(loss)}. Several losses are "
            "not yet supported: pass one callable loss(prediction, target) that adds them up."
        )
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        loss = _instantiate(loss)
    if isinstance(loss, nn.Module):
        name = type(loss).__name__
        return Loss(name, module=loss, reduction=_reduction(name, getattr(loss, "reduction", None)))
    if callable(loss) and not isinstance(loss, type):
        keywords = loss.keywords if isinstance(loss, functools.partial) else {}
        inner = loss.func if isinstance(loss, functools.partial) else loss
        name = getattr(inner, "__name__", type(inner).__name__)
        return Loss(name, function=loss, reduction=_reduction(name, keywords.get("reduction")))
    came = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
    raise LossError(
        "loss must be a name, an nn.Module, a callable (prediction, target) -> scalar, or None, "
        f"got {came}. Pass for example loss='mse'."
    )


def _by_name(name: str) -> Loss:
    folded = name.lower()
    named = _LOSSES.get(_ALIASES.get(folded, folded))
    if named is None:
        hint = _KERAS_HINTS.get(folded.replace("_", ""), "")
        raise UnknownNameError("loss", name, [*_LOSSES, *_ALIASES], hint)
    return Loss(named.name, function=named)


def _instantiate(loss: Callable[..., nn.Module]) -> nn.Module:
    name = getattr(loss, "__name__", "loss")
    try:
        inspect.signature(loss).bind()
    except TypeError as error:
        raise LossError(
            f"a loss class must need no arguments, got {name} ({error}). Pass an instance: "
            f"loss={name}(...)."
        ) from error
    return loss()


def _reduction(name: str, reduction: object) -> Literal["mean", "sum"]:
    # torch spells reductions as strings; another kind of attribute of this name is the user's own.
    if not isinstance(reduction, str):
        return "mean"
    if reduction == "none":
        raise LossError(
            f"loss {name!r} must give one number for a micro-batch, got reduction='none'. Use "
            "reduction='mean', or wrap it in a callable that reduces."
        )
    if reduction not in _REDUCTIONS:
        raise LossError(
            f"loss {name!r} must have reduction 'mean', 'batchmean' or 'sum', got {reduction!r}. "
            "Use one of these; it tells how the loss joins the samples."
        )
    return _REDUCTIONS[reduction]
