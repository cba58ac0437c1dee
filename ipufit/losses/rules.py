"""Rules of torch's own losses for the elements of a micro-batch before they become one number.

Sample weights and counts need the loss of each element, and what torch divides their sum by: the
number of elements for most, for classes the sum of the class weights of the targets that are not
left out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, Callable, Dict, Literal, Optional, Tuple, Type, Union

from torch import Tensor, nn
from torch.nn import functional

from ipufit.core.objective_arguments import fit_indices, fit_values
from ipufit.core.sample_weights import spread_shape
from ipufit.losses.unreduced import Elements

__all__ = ["Layout", "TargetKind", "TorchRule", "torch_rule", "unreduced"]

# How the elements lie in the prediction: one for each of its values, for each of its positions over
# the classes in dimension 1, or for each row along its last dimension.
Layout = Literal["values", "classes", "rows"]

_MODULES: Dict[Type[nn.Module], Layout] = {
    nn.BCELoss: "values",
    nn.BCEWithLogitsLoss: "values",
    nn.CrossEntropyLoss: "classes",
    nn.HingeEmbeddingLoss: "values",
    nn.HuberLoss: "values",
    nn.KLDivLoss: "values",
    nn.L1Loss: "values",
    nn.MSELoss: "values",
    nn.MultiLabelMarginLoss: "rows",
    nn.MultiLabelSoftMarginLoss: "rows",
    nn.MultiMarginLoss: "rows",
    nn.NLLLoss: "classes",
    nn.PoissonNLLLoss: "values",
    nn.SmoothL1Loss: "values",
    nn.SoftMarginLoss: "values",
}
_FUNCTIONS: Dict[Any, Layout] = {
    functional.binary_cross_entropy: "values",
    functional.binary_cross_entropy_with_logits: "values",
    functional.cross_entropy: "classes",
    functional.hinge_embedding_loss: "values",
    functional.huber_loss: "values",
    functional.kl_div: "values",
    functional.l1_loss: "values",
    functional.mse_loss: "values",
    functional.multi_margin_loss: "rows",
    functional.multilabel_margin_loss: "rows",
    functional.multilabel_soft_margin_loss: "rows",
    functional.nll_loss: "classes",
    functional.poisson_nll_loss: "values",
    functional.smooth_l1_loss: "values",
    functional.soft_margin_loss: "values",
}
# What the target holds: class indices, or floating-point values.
TargetKind = Literal["indices", "values"]
_INDEX_MODULES = (nn.CrossEntropyLoss, nn.MultiLabelMarginLoss, nn.MultiMarginLoss, nn.NLLLoss)
_INDEX_FUNCTIONS = (
    functional.cross_entropy,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.nll_loss,
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
        batchmean: whether the sum is divided by the samples.
        ignore_index: the class index that is left out, of a loss over class indices.
        class_weight: shape (classes,), of such a loss, or None.
        target_kind: what it takes as target; one over classes may take probabilities too.
    """

    call: Callable[[Tensor, Tensor], Tensor]
    layout: Layout
    batchmean: bool
    ignore_index: int
    class_weight: Optional[Tensor]
    target_kind: TargetKind

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
            prediction, target = self._guarded(prediction, target, weight)
        values = self.call(prediction, target)
        if self.batchmean and values.dim():
            return Elements(values, values.shape[0] / max(values.numel(), 1))
        if self.layout != "classes" or target.is_floating_point():
            return Elements(values)
        counted = target != self.ignore_index
        if self.class_weight is None:
            return Elements(values, counted.to(values.dtype))
        classes = self.class_weight.detach()
        shares = classes[target.masked_fill(~counted, 0)].masked_fill(~counted, 0.0)
        return Elements(values, shares)

    def _guarded(self, prediction: Tensor, target: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
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


def torch_rule(loss: Union[nn.Module, Callable[..., Any]]) -> Optional[TorchRule]:
    """The rule of one of torch's losses; None of anything else, also of a subclass's own forward.

    Args:
        loss: a module, a function of ``torch.nn.functional``, or a partial of one with keywords.
    """
    if isinstance(loss, nn.Module):
        layout = _module_layout(loss)
        if layout is None:
            return None
        return TorchRule(
            functools.partial(unreduced, loss),
            layout,
            getattr(loss, "reduction", "mean") == "batchmean",
            getattr(loss, "ignore_index", -100),
            getattr(loss, "weight", None) if layout == "classes" else None,
            "indices" if isinstance(loss, _INDEX_MODULES) else "values",
        )
    inner, keywords = loss, {}
    if isinstance(loss, functools.partial):
        inner, keywords = loss.func, loss.keywords
        if loss.args or any(keywords.get(name) is not None for name in _LEGACY):
            return None
    try:
        layout = _FUNCTIONS.get(inner)
    except TypeError:  # not hashable
        return None
    if layout is None:
        return None
    return TorchRule(
        functools.partial(inner, **{**keywords, "reduction": "none"}),
        layout,
        keywords.get("reduction") == "batchmean",
        keywords.get("ignore_index", -100),
        keywords.get("weight") if layout == "classes" else None,
        "indices" if inner in _INDEX_FUNCTIONS else "values",
    )


def _module_layout(module: nn.Module) -> Optional[Layout]:
    for kind, layout in _MODULES.items():
        overridden = "forward" in vars(module) or type(module).forward is not kind.forward
        if isinstance(module, kind) and not overridden:
            return layout
    return None


def unreduced(module: nn.Module, *args: object, **kwargs: object) -> Any:
    """Call a copy of a module with ``reduction="none"`` on these arguments.

    The copy shares parameters, buffers and submodules with the module, which stays as it is.
    """
    twin = copy.copy(module)
    twin.reduction = "none"  # type: ignore[assignment]
    return twin(*args, **kwargs)
