"""What the documentation says of losses.

ipufit marks the objective with ``identity_loss``, so that any loss will do that is made of
operators that PopTorch has: these are the arguments of those that it has whole.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple

from ipufit.engines.ipu.preflight.facts import UNKNOWN, UNSUPPORTED, Fact, Place
from ipufit.engines.ipu.preflight.operator_call import Call
from ipufit.engines.ipu.preflight.places import canonical, guide, operators_page

__all__ = ["LEFT_OUT", "LOSSES"]

# at::Reduction of ATen/core/Reduction.h.
_NONE, _MEAN = 0, 1


def _fact(
    key: str, says: str, cure: str, places: Tuple[Place, ...], applies: Callable[[Call], bool]
) -> Fact:
    return Fact("losses", key, key.partition(" ")[0], UNSUPPORTED, says, places, cure, applies)


def _has_weight(call: Call) -> bool:
    return call.arguments.get("weight") is not None


def _is_joined(call: Call) -> bool:
    targets: Any = call.arguments["targets"]
    return bool(targets.dim() == 1 and call.arguments["log_probs"].dim() == 3)


def _is_smoothed_mean(call: Call) -> bool:
    arguments = call.arguments
    return bool(
        arguments["label_smoothing"] > 0
        and arguments["reduction"] == _MEAN
        and arguments["weight"] is None
        and not arguments["target"].is_floating_point()
    )


_CLASS_WEIGHT = (
    "class weights are not supported in this loss",
    "Leave weight= out, and pass class_weight or sample_weight to fit.",
)

LOSSES: Tuple[Fact, ...] = (
    _fact(
        "aten::ctc_loss reduction='none'",
        "CTCLoss has reduction 'sum' and 'mean' only",
        "Use reduction='sum' or 'mean'.",
        (canonical("LossOps", 579), operators_page(395)),
        lambda call: bool(call.arguments["reduction"] == _NONE),
    ),
    _fact(
        "aten::ctc_loss joined targets",
        "the targets go to PopART as they are, whose CTC loss takes a padded batch of shape (N, S)",
        "Pad the targets to shape (N, S).",
        (canonical("LossOps", 605),),
        _is_joined,
    ),
    *(
        _fact(f"aten::{name} weight", *_CLASS_WEIGHT, (canonical("LossOps", 101),), _has_weight)
        for name in ("nll_loss_forward", "nll_loss2d_forward")
    ),
    _fact(
        "aten::cross_entropy_loss label_smoothing",
        "torch 2.0.1, which PopTorch runs on, takes the mean with label_smoothing over elements "
        "that a mask selects, and shapes can't follow values",
        "Smooth the targets yourself: class probabilities as targets, with label_smoothing=0.",
        (guide("intro", 112),),
        _is_smoothed_mean,
    ),
)

# Said where there is no target to look at the loss with.
LEFT_OUT = Fact(
    "losses",
    "no target",
    "no target",
    UNKNOWN,
    "it differentiates the loss, at which nobody has looked",
    (operators_page(371),),
    "Pass the target too: preflight((inputs, target)).",
)
