"""Facts about layers and losses, from PopTorch's documentation."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

from ipufit.engines.ipu.preflight.report import (
    LIMITED,
    UNKNOWN,
    UNSUPPORTED,
    Call,
    Fact,
    Line,
    canonical,
    guide,
    operators_page,
)

__all__ = ["LAYERS", "LEFT_OUT", "LOSSES"]

# Of a module, whose attributes depend on its class.
_Condition = Callable[[Any], bool]

_RECURRENT = operators_page(337)
_NO_BIAS = operators_page(340)
_AFFINE = operators_page(321)
_REPLICAS = guide("overview", 1028)

# The lines in which the handlers refuse layers, dropout, two directions and no bias.
_REFUSALS: Dict[str, Tuple[int, int, int, Optional[int]]] = {
    "RNN": (262, 265, 268, 259),
    "LSTM": (129, 132, 135, 126),
    "GRU": (56, 57, 58, None),
}


# The lines in which PopTorch's tests run a normalisation without weights of its own.
_TESTED = {"BatchNorm": 20, "GroupNorm": 218, "InstanceNorm": 299, "LayerNorm": 129}


def _fact(
    layer: str,
    argument: str,
    verdict: str,
    texts: Tuple[str, str],
    places: Tuple[Line, ...],
    applies: _Condition,
) -> Fact:
    says, cure = texts
    return Fact("layers", f"{layer}({argument})", layer, verdict, says, places, cure, applies)


def _recurrent(layer: str) -> Tuple[Fact, ...]:
    layers, dropout, two, bias = _REFUSALS[layer]
    rows: Tuple[Tuple[str, Tuple[str, str], Optional[int], _Condition], ...] = (
        (
            "num_layers>1",
            ("a recurrent layer has one layer", "Write one module for each of its layers."),
            layers,
            lambda module: bool(module.num_layers > 1),
        ),
        (
            "dropout>0",
            ("a recurrent layer has no dropout", "Put nn.Dropout after it."),
            dropout,
            lambda module: bool(module.dropout),
        ),
        (
            "bidirectional=True",
            (
                "a recurrent layer has one direction",
                "Run a second one over x.flip(dim), flip its result, and join the two.",
            ),
            two,
            lambda module: bool(module.bidirectional),
        ),
        (
            "bias=False",
            ("bias=False is for GRU alone", "Leave bias=False out, or use GRU."),
            bias,
            lambda module: not module.bias,
        ),
    )
    listed = {"bias=False": _NO_BIAS}
    return tuple(
        _fact(
            layer,
            argument,
            UNSUPPORTED,
            texts,
            (listed.get(argument, _RECURRENT), canonical("RNNOps", line)),
            applies,
        )
        for argument, texts, line, applies in rows
        if line is not None
    )


def _plain(layer: str, argument: str) -> Fact:
    """A normalisation without weights of its own."""
    says = (
        "only normalisation with weights of its own is supported by the documentation, though "
        "PopTorch's tests run it without"
    )
    places = (_AFFINE, Line("tests/norms_test.py", _TESTED[layer.rstrip("123d")]))
    return _fact(
        layer,
        f"{argument}=False",
        UNSUPPORTED,
        (says, f"Use {argument}=True; freeze weight and bias where they must not learn."),
        places,
        lambda module: not getattr(module, argument),
    )


def _separate_statistics(layer: str) -> Fact:
    return _fact(
        layer,
        "running statistics",
        LIMITED,
        ("buffers are not kept alike between replicas: each has statistics of its own", ""),
        (_REPLICAS, Line("poptorch/source/InplaceOps.cpp", 229)),
        lambda module: bool(module.training and module.track_running_stats),
    )


def _has_no_bias(module: Any) -> bool:
    return module.weight is not None and module.bias is None


_BATCH = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
_INSTANCE = ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")

LAYERS: Tuple[Fact, ...] = (
    *(fact for layer in _REFUSALS for fact in _recurrent(layer)),
    _fact(
        "LSTM",
        "proj_size>0",
        UNKNOWN,
        (
            "neither the documentation nor the handler has a word of proj_size",
            "Leave proj_size out, and put nn.Linear after it.",
        ),
        (_RECURRENT, canonical("RNNOps", 112)),
        lambda module: bool(getattr(module, "proj_size", 0)),
    ),
    *(_plain(layer, "affine") for layer in (*_BATCH, "GroupNorm", *_INSTANCE)),
    _plain("LayerNorm", "elementwise_affine"),
    _fact(
        "LayerNorm",
        "bias=False",
        UNSUPPORTED,
        ("weight and bias come together or not at all", "Use bias=True."),
        (canonical("NormalizationOps", 53),),
        _has_no_bias,
    ),
    *(_separate_statistics(layer) for layer in _BATCH),
)

# at::Reduction of ATen/core/Reduction.h.
_NONE, _MEAN = 0, 1


def _on_loss(
    key: str, says: str, cure: str, places: Tuple[Line, ...], applies: Callable[[Call], bool]
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
    _on_loss(
        "aten::ctc_loss reduction='none'",
        "CTCLoss has reduction 'sum' and 'mean' only",
        "Use reduction='sum' or 'mean'.",
        (canonical("LossOps", 579), operators_page(395)),
        lambda call: bool(call.arguments["reduction"] == _NONE),
    ),
    _on_loss(
        "aten::ctc_loss joined targets",
        "the targets go to PopART as they are, whose CTC loss takes a padded batch of shape (N, S)",
        "Pad the targets to shape (N, S).",
        (canonical("LossOps", 605),),
        _is_joined,
    ),
    *(
        _on_loss(f"aten::{name} weight", *_CLASS_WEIGHT, (canonical("LossOps", 101),), _has_weight)
        for name in ("nll_loss_forward", "nll_loss2d_forward")
    ),
    _on_loss(
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
