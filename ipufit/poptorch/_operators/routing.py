"""Dispatch of torch functions while a PopTorch model is recorded."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ipufit.poptorch._logging import error
from ipufit.poptorch._operators import slices
from ipufit.poptorch._operators.identities import LOSSES
from ipufit.poptorch._operators.replaced import REPLACED
from ipufit.poptorch._tracing import tracing
from ipufit.tracing import recurrent

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


def _embedding(operator: str) -> Callable[[Arguments], None]:
    def check(arguments: Arguments) -> None:
        for name in ("scale_grad_by_freq", "sparse"):
            if arguments.get(name):
                raise error(f"Unsupported aten::{operator} operation: {name}=True. Leave it out.")
        if operator == "embedding_bag" and arguments.get("padding_idx") is not None:
            raise error(
                "Unsupported aten::embedding_bag operation: padding_idx parameter is unsupported. "
                "Keep the row at zero yourself."
            )

    return check


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


def _names_of(function: Callable[..., object]) -> Sequence[str]:
    return tuple(inspect.signature(function).parameters)


# Built-in functions, such as torch.ctc_loss, have no signature.
_CHECKS: Dict[object, Tuple[Sequence[str], Callable[[Arguments], None]]] = {
    F.interpolate: (_names_of(F.interpolate), _upsampling),
    F.upsample: (_names_of(F.upsample), _upsampling),
    torch.bincount: (("input", "weights", "minlength"), _bincount),
    Tensor.bincount: (("input", "weights", "minlength"), _bincount),
    F.one_hot: (("input", "num_classes"), _one_hot),
    F.ctc_loss: (_names_of(F.ctc_loss), _ctc),
    torch.ctc_loss: (_names_of(F.ctc_loss), _ctc),
    F.nll_loss: (_names_of(F.nll_loss), _class_weights("nll_loss_nd")),
    F.cross_entropy: (_names_of(F.cross_entropy), _class_weights("cross_entropy_loss")),
    F.embedding: (_names_of(F.embedding), _embedding("embedding")),
    F.embedding_bag: (_names_of(F.embedding_bag), _embedding("embedding_bag")),
    torch.linalg.matrix_norm: (("input", "ord"), _matrix_norm),
    torch.lstm: (recurrent.ARGUMENTS, _lstm),
}


def check_supported(func: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse a call of a torch function that PopTorch doesn't support.

    Raises:
        Error: torch accepts the call, but a model for IPUs can't contain it.
    """
    entry = _CHECKS.get(func)
    if entry is not None:
        names, check_call = entry
        check_call({**dict(zip(names, args)), **kwargs})


Call = Tuple[Tuple[object, ...], Dict[str, object]]

# Function: where its weights stand, and their names. The input always comes first.
CASTS: Dict[object, Dict[int, str]] = {
    torch.group_norm: {2: "weight", 3: "bias"},
    torch.layer_norm: {2: "weight", 3: "bias"},
    torch.batch_norm: {1: "weight", 2: "bias"},
    torch.instance_norm: {1: "weight", 2: "bias"},
}
_NORMS = (F.group_norm, F.layer_norm, F.batch_norm, F.instance_norm)
for _function in (*_NORMS, F.multi_head_attention_forward):
    CASTS[_function] = {
        place: name
        for place, name in enumerate(_names_of(_function))
        if name.endswith("weight") or "bias" in name
    }
for _place in (F, torch, torch._C._nn):
    for _name in (
        "linear",
        *(f"conv{n}d" for n in (1, 2, 3)),
        *(f"conv_transpose{n}d" for n in (1, 2, 3)),
        "convolution",
    ):
        if hasattr(_place, _name):
            CASTS[getattr(_place, _name)] = {1: "weight", 2: "bias"}


def _cast(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
        return value.to(dtype)
    return value


def cast(func: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
    """Return the arguments of a call, with weight and bias in the type of the input.

    Arguments of functions that are not in ``CASTS`` are returned unchanged.
    """
    places = CASTS.get(func)
    tensor = args[0] if args else kwargs.get("input", kwargs.get("query"))
    if places is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tuple(args), dict(kwargs)
    names = set(places.values())
    return (
        tuple(_cast(a, tensor.dtype) if i in places else a for i, a in enumerate(args)),
        {k: _cast(v, tensor.dtype) if k in names else v for k, v in kwargs.items()},
    )


# Where a function takes a mask, or indices one of which may be a mask.
_MASKED: Dict[object, Tuple[int, str]] = {
    Tensor.__getitem__: (1, ""),
    Tensor.__setitem__: (1, ""),
    torch.where: (0, "condition"),
    Tensor.where: (1, "condition"),
}
for _name in ("index_put", "masked_fill", "masked_select", "masked_scatter"):
    _keyword = "indices" if _name == "index_put" else "mask"
    for _owner, _full in ((torch, _name), (Tensor, _name), (Tensor, _name + "_")):
        if hasattr(_owner, _full):
            _MASKED[getattr(_owner, _full)] = (1, _keyword)


def _bool(value: object) -> object:
    if isinstance(value, Tensor) and value.dtype == torch.uint8:
        return value != 0
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        return type(value)(_bool(each) for each in value)
    return value


def _with_bool_masks(
    func: object, args: Sequence[object], kwargs: Dict[str, object]
) -> Sequence[object]:
    """Return the positional arguments with bool masks; those in ``kwargs`` are replaced there."""
    if func not in _MASKED:
        return args
    place, name = _MASKED[func]
    if name in kwargs:
        kwargs[name] = _bool(kwargs[name])
    return [_bool(value) if i == place else value for i, value in enumerate(args)]


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, object]) -> Any:
    """Call a torch function as the device would compute it, and mark its result if it is a loss.

    For a TorchFunctionMode that is active while a model is recorded: whatever torch function is
    called comes here.

    Raises:
        Error: torch accepts the call, a model for IPUs can't have it.
    """
    check_supported(func, args, kwargs)
    if func is Tensor.__getitem__ and slices.has_tensor_bounds(args[1]):
        return slices.getitem(args[0], args[1])
    args, kwargs = cast(func, args, kwargs)
    args = _with_bool_masks(func, args, kwargs)
    result = REPLACED.get(func, func)(*args, **kwargs)
    trace = tracing()
    if func not in LOSSES or trace is None:
        return result
    # The L1 loss of an IPU reduces by itself; for all others PopTorch adds a reduction.
    return trace.mark_loss(result, reduced=func.__name__ != "l1_loss")
