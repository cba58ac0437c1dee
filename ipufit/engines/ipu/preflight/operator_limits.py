"""Facts about operators that PopTorch has, but not for all arguments, or with other results."""

from __future__ import annotations

from typing import Callable, Tuple

import torch
from torch import Tensor

from ipufit.engines.ipu.preflight.report import (
    LIMITED,
    UNKNOWN,
    UNSUPPORTED,
    Call,
    Fact,
    Line,
    always,
    canonical,
    dispatcher,
    operators_page,
)

__all__ = ["OPERATOR_LIMITS"]

_Condition = Callable[[Call], bool]


def _no(key: str, says: str, cure: str, places: Tuple[Line, ...], applies: _Condition) -> Fact:
    """Make a fact about calls that are not supported; its key is the operator and a remark."""
    return Fact("operators", key, key.partition(" ")[0], UNSUPPORTED, says, places, cure, applies)


def _limit(key: str, says: str, cure: str, places: Tuple[Line, ...], applies: _Condition) -> Fact:
    return Fact("operators", key, key.partition(" ")[0], LIMITED, says, places, cure, applies)


def _truthy(*names: str) -> _Condition:
    return lambda call: any(bool(call.arguments.get(name)) for name in names)


def _has_padding_index(call: Call) -> bool:
    index = call.arguments.get("padding_idx")
    return index is not None and index >= 0


def _is_dilated_transpose(call: Call) -> bool:
    arguments = call.arguments
    return bool(arguments["transposed"]) and any(size != 1 for size in arguments["dilation"])


def _does_not_divide(call: Call) -> bool:
    wanted = call.arguments["output_size"]
    wanted = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    sizes = call.arguments["self"].shape[-len(wanted) :]
    return any(size % to for size, to in zip(sizes, wanted))


def _stretches_evenly(call: Call) -> bool:
    return call.is_whole and not _stretches_unevenly(call)


def _stretches_unevenly(call: Call) -> bool:
    if not call.is_whole:
        # By a factor; torch then writes it with a size.
        return False
    before, after = call.arguments["self"].shape[-2:], call.arguments["output_size"]
    return bool(before[0] * after[1] != before[1] * after[0])


def _is_small_integer(call: Call) -> bool:
    tensors = [value for value in call.arguments.values() if isinstance(value, Tensor)]
    return bool(tensors) and any(
        all(tensor.dtype is dtype for tensor in tensors) for dtype in (torch.uint8, torch.int8)
    )


def _is_other_correction(call: Call) -> bool:
    return call.arguments.get("correction") not in (None, 0, 1)


def _is_spectral(call: Call) -> bool:
    order = call.arguments["ord"]
    return order == "nuc" if isinstance(order, str) else abs(order) == 2


def _drops_nothing(call: Call) -> bool:
    return bool(call.arguments["train"] and call.arguments["p"] == 0)


def _moving_offsets(call: Call) -> bool:
    return not call.is_constant("offsets")


def _equals(name: str, value: object) -> _Condition:
    return lambda call: bool(call.arguments.get(name) == value)


_EMBEDDINGS = operators_page(361)
_BITS = "PopART computes no bits of 8-bit integers"


OPERATOR_LIMITS: Tuple[Fact, ...] = (
    _no(
        "aten::topk sorted=False",
        "sorted=False is not supported",
        "Leave sorted=False out: the k largest come sorted.",
        (operators_page(197),),
        _equals("sorted", False),
    ),
    *(
        _no(
            f"aten::max_pool{rank}d_with_indices",
            "max pooling does not return indices",
            "Leave return_indices=True out, and keep what needs the indices on the host.",
            (operators_page(263),),
            always,
        )
        for rank in (2, 3)
    ),
    *(
        _no(
            f"aten::avg_pool{rank}d divisor_override",
            "divisor_override is left aside, so that other numbers come out",
            "Multiply the result of a plain average with kernel size / divisor instead.",
            (canonical("PoolingOps", 84),),
            lambda call: call.arguments.get("divisor_override") is not None,
        )
        for rank in (2, 3)
    ),
    Fact(
        "operators",
        "aten::dropout p=0",
        "aten::dropout",
        UNKNOWN,
        "its tests skip a model over PopART's refusal of a dropout of 0, and no other line is "
        "about it",
        (Line("tests/torch_nn_test.py", 312), canonical("DropoutOps", 22)),
        "Leave the dropout out where p is 0.",
        _drops_nothing,
    ),
    *(
        _no(
            f"aten::adaptive_avg_pool{rank}d uneven",
            "the size of the output must divide the size of the input",
            "Choose an output_size that divides, or pad or resize before it.",
            (canonical("PoolingOps", 136),),
            _does_not_divide,
        )
        for rank in (1, 2, 3)
    ),
    _no(
        "aten::convolution transposed dilation",
        "transposed convolutions have no dilation",
        "Use dilation=1, with a larger kernel.",
        (operators_page(250),),
        _is_dilated_transpose,
    ),
    _no(
        "aten::_pad_circular",
        "no circular padding is listed, and PopTorch's tests leave it out as unsupported",
        "Use padding_mode='reflect' or 'replicate', or join the edges with torch.cat.",
        (operators_page(279), Line("tests/convs_test.py", 128)),
        always,
    ),
    _no(
        "aten::embedding padding_idx",
        "padding_idx is not supported by the documentation, though the source has an operator of "
        "its own for it",
        "Leave padding_idx out, and multiply by a mask: embedding(x) * (x != pad).unsqueeze(-1).",
        (_EMBEDDINGS, canonical("EmbeddingOps", 41), Line("tests/misc_nn_layers_test.py", 295)),
        _has_padding_index,
    ),
    _no(
        "aten::embedding sparse",
        "neither sparse=True nor scale_grad_by_freq=True is supported",
        "Leave both out.",
        (canonical("EmbeddingOps", 27),),
        _truthy("sparse", "scale_grad_by_freq"),
    ),
    _no(
        "aten::_embedding_bag padding_idx",
        "padding_idx is not supported",
        "Leave padding_idx out, and give the padding a weight of zero in per_sample_weights.",
        (_EMBEDDINGS, canonical("EmbeddingOps", 66)),
        _has_padding_index,
    ),
    _no(
        "aten::_embedding_bag sparse",
        "neither sparse=True nor scale_grad_by_freq=True is supported",
        "Leave both out.",
        (canonical("EmbeddingOps", 61),),
        _truthy("sparse", "scale_grad_by_freq"),
    ),
    _no(
        "aten::_embedding_bag offsets",
        "the offsets of the bags must be constants",
        "Pass indices of shape (bags, size) without offsets, or keep the offsets as a constant.",
        (canonical("EmbeddingOps", 94),),
        _moving_offsets,
    ),
    _no(
        "aten::one_hot num_classes=-1",
        "the number of classes must be given, and be a constant",
        "Pass num_classes.",
        (canonical("EmbeddingOps", 134),),
        _equals("num_classes", -1),
    ),
    _no(
        "aten::bincount minlength",
        "minlength must be given: it is the length of the result",
        "Pass minlength, or add up one_hot(x, num_classes) over the samples.",
        (dispatcher("RegisterMetaOps.cpp.inc", 42),),
        lambda call: call.arguments["minlength"] <= 0,
    ),
    _no(
        "aten::upsample_linear1d",
        "linear upsampling is not supported",
        "Use mode='nearest'.",
        (operators_page(399), canonical("ReshapeOps", 1016)),
        always,
    ),
    _no(
        "aten::upsample_trilinear3d",
        "trilinear upsampling is not supported",
        "Use mode='nearest'.",
        (operators_page(399), canonical("ReshapeOps", 1018)),
        always,
    ),
    _no(
        "aten::upsample_bicubic2d align_corners",
        "bicubic upsampling has align_corners=False only",
        "Leave align_corners=True out.",
        (canonical("ReshapeOps", 843),),
        _truthy("align_corners"),
    ),
    _limit(
        "aten::upsample_bilinear2d",
        "the documentation names nearest and bicubic only; the source has an operator of its own, "
        "which PopTorch's tests run",
        "",
        (operators_page(399), canonical("ReshapeOps", 1017)),
        _stretches_evenly,
    ),
    _no(
        "aten::upsample_bilinear2d uneven",
        "both sides are stretched by the factor of the first one",
        "Use one factor for height and width, or mode='nearest'.",
        (canonical("ReshapeOps", 945),),
        _stretches_unevenly,
    ),
    _limit(
        "aten::gelu approximate='none'",
        "the exact form is computed by the same PopART operator as the approximate one",
        "",
        (canonical("ActivationOps", 157),),
        _equals("approximate", "none"),
    ),
    *(
        _no(
            f"aten::{name} correction",
            "any correction but 0 counts as 1, so that other numbers come out",
            "Use correction=0 or 1, and multiply by (n - 1) / (n - correction).",
            (canonical("ArithmeticOps", 239),),
            _is_other_correction,
        )
        for name in ("var", "var_mean", "std", "std_mean")
    ),
    *(
        _no(
            f"aten::bitwise_{name} of 8 bits",
            _BITS,
            "Compute with int32: x.int().",
            (canonical("BitwiseOps", 19),),
            _is_small_integer,
        )
        for name in ("and", "not", "or", "xor")
    ),
    _no(
        "aten::linalg_matrix_norm spectral",
        "the 2-norm and the nuclear norm of a matrix are not supported",
        "Use the Frobenius norm: ord='fro'.",
        (operators_page(213), dispatcher("RegisterAtenOverloads.cpp", 590)),
        _is_spectral,
    ),
    _no(
        "aten::triu",
        "triu is computed of constants only",
        "Multiply by a constant mask: x * torch.ones(n, n).triu().",
        (canonical("TensorOps", 490), Line("tests/tensor_ops_test.py", 839)),
        always,
    ),
    _no(
        "aten::as_strided",
        "as_strided is not supported",
        "Write the view with reshape, slices, unfold or permute.",
        (canonical("ReshapeOps", 141),),
        always,
    ),
)
