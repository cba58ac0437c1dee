"""Torch's own losses before their elements become one number, weighted or not."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, Callable, Dict, Literal, NamedTuple, Optional, Tuple, Type, Union

import torch
from torch import Tensor, nn
from torch.nn import functional

from ipufit.core.objective_arguments import broadcast_weights, fit_indices, fit_values, spread_shape
from ipufit.errors import LossError


@dataclasses.dataclass(frozen=True)
class LabelRange:
    """Class indices that a loss takes.

    Attributes:
        name: of the loss.
        key: of the target among those of several losses; None of one loss.
        classes: how many there are in the prediction.
        ignore_index: index that is left out; None of a loss over two classes in one output, which
            may be anything between them, too.
    """

    name: str
    key: Optional[Union[str, int]]
    classes: int
    ignore_index: Optional[int]


# Why little can be learned, and what to do.
Doubt = Tuple[str, str]


class LossFacts(NamedTuple):
    """Facts about a loss that its first micro-batch shows.

    Attributes:
        labels: class indices that it takes as target.
        doubts: why little can be learned of it though nothing fails, and what to do.
    """

    labels: Tuple[LabelRange, ...] = ()
    doubts: Tuple[Doubt, ...] = ()


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """The loss of one micro-batch, with what it is a mean over.

    Attributes:
        value: shape (), differentiable: the mean over the micro-batch, which is optimised.
        count: shape (), float64, detached: how many tokens, or how much weight, ``value`` is the
            mean over; None for the samples.
        parts: of several losses, ``<output>_loss`` to the mean of that one, without its
            ``loss_weights``; shape () each, detached. Empty for one loss.
        separate: losses of a step that move parameters of their own; ``value`` is their sum. Empty
            where that moves all.
    """

    value: Tensor
    count: Optional[Tensor] = None
    parts: Dict[str, Tensor] = dataclasses.field(default_factory=dict)
    separate: Tuple[Tensor, ...] = ()


def constant(value: float, like: Tensor) -> Tensor:
    """A number as a tensor of shape (), float64, made so that a recording holds it."""
    return torch.full((), value, dtype=torch.float64, device=like.device)


def nothing_counts(value: Tensor, count: Tensor) -> Tensor:
    """Zero, with zero gradient, in place of a value that is the mean over nothing."""
    return value.masked_fill(count == 0, 0.0)


def hide_padding(weight: Tensor, valid: Tensor) -> Tensor:
    """Weights of samples, shape (batch, ...), zero where ``valid``, shape (batch,), is."""
    return weight * valid.reshape((-1,) + (1,) * (weight.dim() - 1)).to(weight.dtype)


@dataclasses.dataclass(frozen=True)
class Elements:
    """A loss before it is reduced.

    Attributes:
        values: one for each element, floating-point, shape (batch, ...).
        shares: how much each counts in the mean without sample weights: a tensor of the shape of
            ``values``, or one number for all. Their sum is what the sum is divided by.
    """

    values: Tensor
    shares: Union[Tensor, float] = 1.0

    def by_sample(self) -> Elements:
        """The elements in a mean over the samples, however many each sample has."""
        return Elements(self.values, self.values.shape[0] / max(self.values.numel(), 1))

    def weighted_sum(self, weight: Optional[Tensor], where: str) -> Tensor:
        """The sum of values, shape (), at least float32; a weight of zero hides inf and nan."""
        values = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        if weight is not None:
            spreaded = broadcast_weights(weight, values.shape, where, LossError)
            # Multiplied by zero, inf would be nan.
            values = (values * spreaded.to(values.dtype)).masked_fill(spreaded == 0, 0.0)
        return values.sum()

    def size(self, weight: Optional[Tensor], where: str) -> Tensor:
        """The sum of the shares, each times its weight: shape (), float64."""
        if weight is None:
            if isinstance(self.shares, float):
                return constant(self.values.numel() * self.shares, self.values)
            return self.shares.sum(dtype=torch.float64)
        wide = broadcast_weights(weight, self.values.shape, where, LossError).double()
        if isinstance(self.shares, float):
            return wide.expand(self.values.shape).sum() * self.shares
        return (wide * self.shares).sum()

    def mean(
        self,
        weight: Optional[Tensor],
        size_weight: Optional[Tensor],
        empty_is_zero: bool,
        where: str,
    ) -> Tuple[Tensor, Tensor]:
        """The mean, and what it is the mean over.

        Args:
            weight: of the samples, or None.
            size_weight: what each sample counts in the divisor; None divides by the elements.
            empty_is_zero: whether the mean over nothing is 0 rather than nan.
            where: whose values, for messages.

        Returns:
            The mean, shape (), of the values' dtype; the divisor, shape (), float64.
        """
        sum_of_values = self.weighted_sum(weight, where)
        size = self.size(size_weight, where).detach()
        divisor = size.masked_fill(size == 0, 1.0) if empty_is_zero else size
        value = sum_of_values / divisor.to(sum_of_values.dtype)
        if empty_is_zero:
            value = nothing_counts(value, size)
        return value.to(self.values.dtype), size


# How the elements lie in the prediction: one for each of its values, for each of its positions over
# the classes in dimension 1, or for each row along its last dimension.
Layout = Literal["values", "classes", "rows"]
# What the target holds: class indices, or floating-point values.
TargetKind = Literal["indices", "values"]

# Torch's losses, each as a module and as a function.
_LOSSES: Tuple[Tuple[Type[nn.Module], Callable[..., Tensor], Layout, TargetKind], ...] = (
    (nn.BCELoss, functional.binary_cross_entropy, "values", "values"),
    (nn.BCEWithLogitsLoss, functional.binary_cross_entropy_with_logits, "values", "values"),
    (nn.CrossEntropyLoss, functional.cross_entropy, "classes", "indices"),
    (nn.HingeEmbeddingLoss, functional.hinge_embedding_loss, "values", "values"),
    (nn.HuberLoss, functional.huber_loss, "values", "values"),
    (nn.KLDivLoss, functional.kl_div, "values", "values"),
    (nn.L1Loss, functional.l1_loss, "values", "values"),
    (nn.MSELoss, functional.mse_loss, "values", "values"),
    (nn.MultiLabelMarginLoss, functional.multilabel_margin_loss, "rows", "indices"),
    (nn.MultiLabelSoftMarginLoss, functional.multilabel_soft_margin_loss, "rows", "values"),
    (nn.MultiMarginLoss, functional.multi_margin_loss, "rows", "indices"),
    (nn.NLLLoss, functional.nll_loss, "classes", "indices"),
    (nn.PoissonNLLLoss, functional.poisson_nll_loss, "values", "values"),
    (nn.SmoothL1Loss, functional.smooth_l1_loss, "values", "values"),
    (nn.SoftMarginLoss, functional.soft_margin_loss, "values", "values"),
)
_LEGACY = ("size_average", "reduce")

# A number that every one of these losses takes as prediction and as floating-point target.
_HARMLESS = 0.5


@dataclasses.dataclass(frozen=True)
class TorchRule:
    """One of torch's losses, ready to be asked for its elements.

    Attributes:
        call: the loss with ``reduction="none"``.
        layout: how the elements lie in the prediction.
        reduction: of the loss itself: "batchmean" divides the sum by the samples.
        ignore_index: the class index that is left out, of a loss over class indices.
        weights: its ``weight`` and ``pos_weight``, None each where it has none; of a loss over
            classes the first has shape (classes,).
        target_kind: what it takes as target; one over classes may take probabilities too.
        is_binary: whether its targets are 0, 1 or between.
        kind: the class of torch's that computes it.
    """

    call: Callable[[Tensor, Tensor], Tensor]
    layout: Layout
    reduction: object
    ignore_index: int
    weights: Tuple[Optional[Tensor], Optional[Tensor]]
    target_kind: TargetKind
    is_binary: bool
    kind: Type[nn.Module]

    def fit_target(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The target in the shape of a prediction, if it has the right number of values.

        Args:
            prediction: what the module returned.
            target: of it, shape (batch, ...).
        """
        if self.target_kind == "indices":
            return fit_indices(prediction, target)
        return fit_values(prediction, target)

    def elements(self, prediction: Tensor, target: Tensor, weight: Optional[Tensor]) -> Elements:
        """The loss of each element, and its share.

        Args:
            prediction, target: as the loss takes them.
            weight: of the samples. Where it is zero, prediction and target are replaced by a
                harmless number, so that an inf or nan there can't reach a gradient.
        """
        if weight is not None:
            prediction, target = self._guard(prediction, target, weight)
        values = self.call(prediction, target)
        if self.reduction == "batchmean" and values.dim():
            return Elements(values).by_sample()
        if self.layout != "classes" or target.is_floating_point():
            return Elements(values)
        counted = target != self.ignore_index
        class_weight = self.weights[0]
        if class_weight is None:
            return Elements(values, counted.to(values.dtype))
        shares = class_weight.detach()[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0)
        return Elements(values, shares)

    def is_by_rows(self, prediction: Tensor, target: Tensor) -> bool:
        """True if each row of the elements comes of the same row of prediction and target alone."""
        if prediction.shape[0] != target.shape[0]:
            return False
        if self.layout == "classes" and not target.is_floating_point():
            return target.shape == prediction.shape[:1] + prediction.shape[2:]
        wide = any(
            weight is not None and weight.dim() >= prediction.dim() for weight in self.weights
        )
        return self.layout == "rows" or (target.shape == prediction.shape and not wide)

    def _guard(self, prediction: Tensor, target: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
        shape = tuple(prediction.shape)
        if self.layout == "classes":
            shape = shape[:1] + shape[2:]
        if self.layout == "rows":
            shape = shape[:-1]
        if not spread_shape(weight, shape):
            return prediction, target
        hidden = (weight == 0).reshape(tuple(weight.shape) + (1,) * (len(shape) - weight.dim()))
        if self.layout == "classes":
            hidden = hidden.unsqueeze(1)
        if self.layout == "rows":
            hidden = hidden.unsqueeze(-1)
        if target.is_floating_point() and target.shape == prediction.shape:
            target = target.masked_fill(hidden, _HARMLESS)
        return prediction.masked_fill(hidden, _HARMLESS), target


def torch_rule(loss: Union[nn.Module, Callable[..., object]]) -> Optional[TorchRule]:
    """The rule of one of torch's losses; None of anything else, also of a subclass's own forward.

    Args:
        loss: a module, a function of ``torch.nn.functional``, or a partial of one with keywords.
    """
    inner, settings = loss, {}
    if isinstance(loss, nn.Module):
        names = ("reduction", "ignore_index", "weight", "pos_weight")
        settings = {name: getattr(loss, name) for name in names if hasattr(loss, name)}
    elif isinstance(loss, functools.partial):
        inner, settings = loss.func, loss.keywords
        if loss.args or any(settings.get(name) is not None for name in _LEGACY):
            return None
    for kind, function, layout, target_kind in _LOSSES:
        call: Callable[..., Tensor]
        if isinstance(loss, nn.Module):
            overridden = "forward" in vars(loss) or type(loss).forward is not kind.forward
            if overridden or not isinstance(loss, kind):
                continue
            call = functools.partial(unreduced, loss)
        elif inner is function:
            call = functools.partial(function, **{**settings, "reduction": "none"})
        else:
            continue
        return TorchRule(
            call,
            layout,
            settings.get("reduction", "mean"),
            settings.get("ignore_index", -100),
            (settings.get("weight"), settings.get("pos_weight")),
            target_kind,
            kind in (nn.BCELoss, nn.BCEWithLogitsLoss),
            kind,
        )
    return None


def unreduced(module: nn.Module, *args: object, **kwargs: object) -> Any:
    """Call a copy of a module with ``reduction="none"`` on these arguments.

    The copy shares parameters, buffers and submodules with the module, which stays as it is. CTC's
    values are divided by the lengths of their targets, as in its mean.
    """
    twin = copy.copy(module)
    twin.reduction = "none"  # type: ignore[assignment]
    values = twin(*args, **kwargs)
    if isinstance(module, nn.CTCLoss) and module.reduction == "mean":
        lengths: Any = kwargs["target_lengths"]
        lengths = torch.as_tensor(lengths, device=values.device)
        return values / lengths.clamp(min=1).to(values.dtype)
    return values
