"""The losses that have names: functions of torch behind a check of their arguments."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Dict

from torch import Tensor
from torch.nn import functional

from ipufit.errors import UnknownNameError
from ipufit.losses.checks import (
    check_class_indices,
    check_class_indices_or_probabilities,
    check_same_shape,
    check_same_shape_floating,
    check_tensors,
)

__all__ = ["Named", "by_name", "check_torch_loss"]


@dataclasses.dataclass(frozen=True)
class Named:
    """A function of torch behind the check of its arguments."""

    name: str
    function: Callable[..., Tensor]
    check: Callable[[str, Tensor, Tensor], None]

    def accept(self, prediction: Any, target: Any) -> None:
        """Make sure that the function means something for such arguments.

        Raises:
            LossError: it does not.
        """
        check_tensors(self.name, prediction, target)
        self.check(self.name, prediction, target)

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
        raise UnknownNameError("loss", name, [*_LOSSES, *_ALIASES], hint)
    return named
