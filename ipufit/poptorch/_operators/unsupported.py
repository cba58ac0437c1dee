"""Refuse calls of torch functions that a model for IPUs can't contain, before they are recorded."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ipufit.poptorch._errors import error
from ipufit.tracing import recurrent

__all__ = ["check"]

Arguments = Dict[str, Any]


def _upsampling(arguments: Arguments) -> None:
    mode = arguments.get("mode", "nearest")
    tensor = arguments.get("input")
    if mode in ("linear", "trilinear"):
        dims = {"linear": "1d", "trilinear": "3d"}[mode]
        raise error(
            f"Unsupported upsample mode aten::upsample_{mode}{dims}: currently only 'nearest' is "
            "supported for this input. Use mode='nearest', or bilinear on a 4-dimensional input."
        )
    if mode == "bicubic" and arguments.get("align_corners"):
        raise error("Only support align_corners=False. Leave it out for mode='bicubic'.")
    scale = arguments.get("scale_factor")
    if mode == "bilinear" and scale is not None and isinstance(tensor, Tensor):
        scales = list(scale) if isinstance(scale, (list, tuple)) else [scale]
        if len(set(scales)) > 1:
            raise error(
                f"Non-uniform bilinear upsampling not supported, got factors {scales}. Give one "
                "factor for both dimensions, or size=."
            )
        if any(factor != int(factor) for factor in scales):
            raise error(
                f"Bilinear upsampling with non-integer factor not supported, got {scales[0]}. "
                "Give a whole number, or size=."
            )


def _bincount(arguments: Arguments) -> None:
    minlength = arguments.get("minlength", 0)
    if not isinstance(minlength, int) or minlength < 1:
        raise error(
            "Bincount `minlength` must be specified and must be a constant. On the IPU MK2 "
            "platform the minimum length is also the maximum length, since shapes are fixed when "
            f"the model is compiled. Got {minlength!r}: give one more than the largest value."
        )


def _one_hot(arguments: Arguments) -> None:
    if arguments.get("num_classes", -1) == -1:
        raise error(
            "OneHot num classes must be specified and must be constant. Got -1, which torch finds "
            "out from the values: give num_classes."
        )


def _ctc(arguments: Arguments) -> None:
    if arguments.get("reduction", "mean") in ("none", 0):
        raise error(
            'CTCLoss with reduction="none" is currently not supported. Use "mean" or "sum".'
        )
    targets = arguments.get("targets")
    if isinstance(targets, Tensor) and targets.dim() == 1:
        raise error(
            "CTCLoss with concatenated targets is not supported: expected targets of shape "
            f"(batch, length), got {tuple(targets.shape)}. Pad them to one length."
        )


def _class_weights(operator: str) -> Callable[[Arguments], None]:
    def check(arguments: Arguments) -> None:
        if arguments.get("weight") is not None:
            raise error(
                f'Parameter "weight" is unsupported for aten::{operator}. Compute the loss with '
                'reduction="none", multiply it by weight[target] and pass the sum to '
                "poptorch.identity_loss."
            )

    return check


def _embedding(arguments: Arguments) -> None:
    for name in ("scale_grad_by_freq", "sparse"):
        if arguments.get(name):
            raise error(f"Unsupported aten::embedding operation: {name}=True. Leave it out.")


def _embedding_bag(arguments: Arguments) -> None:
    for name in ("scale_grad_by_freq", "sparse"):
        if arguments.get(name):
            raise error(f"Unsupported aten::embedding_bag operation: {name}=True. Leave it out.")
    if arguments.get("padding_idx") is not None:
        raise error(
            "Unsupported aten::embedding_bag operation: padding_idx parameter is unsupported. "
            "Keep the row at zero yourself."
        )


def _matrix_norm(arguments: Arguments) -> None:
    order = arguments.get("ord", "fro")
    if order in (2, -2, "nuc"):
        what = "nuclear norm" if order == "nuc" else "2-norm"
        raise error(f"Matrix {what} is not supported. Use ord='fro', 1, -1, inf or -inf.")


def _lstm(arguments: Arguments) -> None:
    # Packed sequences come in another order.
    if not isinstance(arguments.get("hx"), (list, tuple)) or "batch_first" not in arguments:
        return
    rules = (
        (not arguments["has_biases"], "LSTM without biases not supported. Use bias=True."),
        (arguments["num_layers"] != 1, "Only LSTM with 1 layer supported. Stack several modules."),
        (arguments["dropout"] != 0, "LSTM only supports dropout = 0.0."),
        (arguments["bidirectional"], "bidirectional LSTM not supported. Use two modules and flip."),
    )
    for broken, text in rules:
        if broken:
            raise error(text)


_INTERPOLATE = ("input", "size", "scale_factor", "mode", "align_corners")
_CTC = (
    "log_probs",
    "targets",
    "input_lengths",
    "target_lengths",
    "blank",
    "reduction",
    "zero_infinity",
)
_NLL = ("input", "target", "weight")
_EMBEDDING = (
    "input",
    "weight",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)
_BAG = (
    "input",
    "weight",
    "offsets",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)

_CHECKS: Dict[Any, Any] = {
    F.interpolate: (_INTERPOLATE, _upsampling),
    F.upsample: (_INTERPOLATE, _upsampling),
    torch.bincount: (("input", "weights", "minlength"), _bincount),
    Tensor.bincount: (("input", "weights", "minlength"), _bincount),
    F.one_hot: (("input", "num_classes"), _one_hot),
    F.ctc_loss: (_CTC, _ctc),
    torch.ctc_loss: (_CTC, _ctc),
    F.nll_loss: (_NLL, _class_weights("nll_loss_nd")),
    F.cross_entropy: (_NLL, _class_weights("cross_entropy_loss")),
    F.embedding: (_EMBEDDING, _embedding),
    F.embedding_bag: (_BAG, _embedding_bag),
    torch.linalg.matrix_norm: (("input", "ord"), _matrix_norm),
    torch.lstm: (recurrent.ARGUMENTS, _lstm),
}


def check(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of a torch function that PopTorch doesn't support.

    Raises:
        Error: torch accepts the call, but a model for IPUs can't contain it.
    """
    entry = _CHECKS.get(func)
    if entry is not None:
        names, check_call = entry
        check_call({**dict(zip(names, args)), **kwargs})
