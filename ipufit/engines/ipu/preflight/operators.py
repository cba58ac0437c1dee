"""Facts about operators that PopTorch turns into PopART's, with the line of each handler."""

from __future__ import annotations

from typing import Dict, List, Tuple

from ipufit.engines.ipu.preflight.report import SUPPORTED, Fact, Line, canonical, dispatcher

__all__ = ["CONSTANT", "HANDLED", "WHOLE", "outplace"]

# By file of poptorch/source/popart_canonicalization: operators with the line that registers their
# handler. Operators that torch always writes with others never come there and have no row.
_HANDLERS: Dict[str, str] = {
    "ActivationOps": (
        "glu:185 rrelu_with_noise:187 softplus:188 hardsigmoid:189 hardswish:190 "
        "_prelu_kernel:192 gelu:193 mish:194"
    ),
    "ArithmeticOps": (
        "add:320 trunc:321 frac:322 floor_divide:323 mul:324 clamp:326 clamp_min:327 "
        "clamp_max:328 addcdiv:329 addcmul:330 linalg_cross:332 var:333 var_mean:334 std:335 "
        "std_mean:336"
    ),
    "AtenHandlers.gen": (
        "abs:779 acos:780 acosh:781 addmm:782 asin:783 asinh:784 atan:785 atan2:786 atanh:787 "
        "cat:788 ceil:789 celu:790 constant_pad_nd:791 cos:792 cosh:793 detach:794 div:795 "
        "elu:796 eq:797 erf:798 erfc:799 exp:800 expm1:801 floor:802 fmod:803 ge:804 gt:805 "
        "hardshrink:806 hardtanh:807 hinge_embedding_loss:808 index_select:809 isnan:810 "
        "l1_loss:811 le:812 leaky_relu:813 log:814 log10:815 log1p:816 log2:817 "
        "log_sigmoid_forward:819 logical_and:820 logical_not:821 logical_or:822 lt:823 "
        "margin_ranking_loss:824 masked_fill:825 mse_loss:826 ne:827 neg:828 normal_:829 "
        "pixel_shuffle:830 pow:831 rand:832 randn:833 reciprocal:834 reflection_pad1d:835 "
        "reflection_pad2d:836 relu:837 remainder:838 replication_pad1d:839 "
        "replication_pad2d:840 replication_pad3d:841 round:842 rsqrt:843 rsub:844 sigmoid:846 "
        "sign:847 silu:848 sin:849 sinh:850 smooth_l1_loss:851 soft_margin_loss:852 "
        "softshrink:853 sort:854 sqrt:855 sub:857 t:858 tan:859 tanh:860 threshold:861 "
        "topk:862 uniform_:863 where:864"
    ),
    "BilinearOps": "bilinear:82",
    "BitwiseOps": "bitwise_and:79 bitwise_not:80 bitwise_or:81 bitwise_xor:82",
    "BlasOps": "baddbmm:152 addmv:153 mv:156 dot:159 bmm:162 mm:165",
    "ConstantOps": ("ones_like:136 new_ones:137 new_zeros:138 zeros_like:140 randperm:141"),
    "ConvolutionOps": "convolution:256 cumsum:261 cumprod:262",
    "DistanceOps": "_cdist_forward:211",
    "DropoutOps": "feature_dropout:51 dropout:52",
    "EmbeddingOps": "embedding:148 _embedding_bag:150 one_hot:151",
    "IndexOps": "index:345 index_put:346 index_fill:347",
    "LossOps": (
        "nll_loss2d_forward:637 nll_loss_forward:639 binary_cross_entropy:640 kl_div:641 "
        "poisson_nll_loss:642 binary_cross_entropy_with_logits:643 cosine_embedding_loss:647 "
        "triplet_margin_loss:648 ctc_loss:649"
    ),
    "NormalizationOps": "native_batch_norm:313 native_layer_norm:315 native_group_norm:317",
    "OtherOps": (
        "bincount:477 bucketize:478 scatter_add:483 scatter_reduce:484 index_reduce:485 "
        "randint:487 random_:488"
    ),
    "PoolingOps": (
        "max_pool1d:155 max_pool2d:157 avg_pool2d:158 max_pool3d:159 avg_pool3d:160 "
        "adaptive_avg_pool1d:166 adaptive_avg_pool2d:167 adaptive_avg_pool3d:168"
    ),
    "RNNOps": "lstm:342",
    "RandomSamplingOps": "normal:116 bernoulli:117 exponential_:118",
    "ReduceOps": (
        "amax:510 amin:511 argmax:512 argmin:513 argsort:514 prod:515 mean:516 median:517 "
        "sum:518 logsumexp:519 norm:520 linalg_vector_norm:521 frobenius_norm:522 min:523 "
        "minimum:524 max:525 maximum:526 any:527 all:528 count_nonzero:529 nansum:530"
    ),
    "ReshapeOps": (
        "expand:991 view:993 _unsafe_view:994 unsqueeze:995 select:999 split:1000 "
        "split_with_sizes:1001 permute:1005 transpose:1006 col2im:1008 im2col:1009 "
        "upsample_nearest1d:1013 upsample_nearest2d:1014 upsample_nearest3d:1015 "
        "upsample_bicubic2d:1019 squeeze:1020 stack:1022"
    ),
    "SliceOps": "slice:519 unbind:522 unfold:524",
    "SoftmaxOps": "_softmax:62 _log_softmax:64",
    "TensorOps": (
        "flip:520 repeat:521 roll:523 clone:524 copy_:525 gather:527 scatter:528 "
        "new_full:530 full_like:531 take_along_dim:534"
    ),
}

# Operators that are settled before the handlers.
_ELSEWHERE: Dict[str, Tuple[Line, str]] = {
    "alias": (
        Line("poptorch/source/AliasProcessing.cpp", 14),
        "it is replaced by what it stands for",
    ),
    "_weight_norm_interface": (
        dispatcher("RegisterAtenOverloads.cpp", 635),
        "the dispatcher writes it with a product and a norm",
    ),
}

# What has no form but the one that changes its argument.
_ONLY_IN_PLACE = frozenset({"copy_", "normal_", "uniform_", "random_", "exponential_"})
_OTHER_NAMES = {"zero_": "zeros_like", "fill_": "full_like"}
# What newer versions of torch write where torch 2.0.1, PopTorch's own, writes the second.
_OLDER_NAMES = {"_safe_softmax": "_softmax", "native_dropout": "dropout"}


def outplace(name: str) -> str:
    """Return the name by which handlers know an operator, such as "aten::add" for "aten::add_"."""
    space, _, operator = name.partition("::")
    if operator in _OTHER_NAMES:
        operator = _OTHER_NAMES[operator]
    elif operator.endswith("_") and not operator.endswith("__") and operator not in _ONLY_IN_PLACE:
        operator = operator[:-1]
    return f"{space}::{_OLDER_NAMES.get(operator, operator)}"


def _handled() -> List[Fact]:
    facts = []
    for file, entries in _HANDLERS.items():
        for entry in entries.split():
            name, _, line = entry.partition(":")
            says = "a handler is registered for it"
            facts.append(_fact(name, says, canonical(file, int(line))))
    return facts + [_fact(name, says, place) for name, (place, says) in _ELSEWHERE.items()]


def _fact(name: str, says: str, place: Line) -> Fact:
    key = f"aten::{name}"
    return Fact("operators", key, key, SUPPORTED, says, (place,))


# What such operators as torch.zeros make, and what is computed of that alone.
CONSTANT = "constant expressions"

HANDLED: Tuple[Fact, ...] = (
    *_handled(),
    Fact(
        "operators",
        CONSTANT,
        CONSTANT,
        SUPPORTED,
        "what depends on no input and no weight is computed on the host, when it is compiled",
        (Line("poptorch/source/type_and_constant_canonicalization/EvaluateConstexprs.cpp", 186),),
    ),
)

# Operators that torch would write with others, but that PopTorch registers, and so takes whole:
# poptorch/source/dispatch_tracer/RegisterOptionalAtenOps.cpp.inc, lines 3 to 167.
WHOLE = frozenset(
    f"aten::{name}"
    for name in [
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "argsort"),
        *("bilinear", "cosine_embedding_loss", "ctc_loss.IntList", "ctc_loss.Tensor"),
        *("dropout", "feature_dropout", "feature_dropout_"),
        *("frobenius_norm.dim", "hinge_embedding_loss", "kl_div", "l1_loss"),
        *("lstm.input", "margin_ranking_loss", "max_pool1d", "max_pool2d", "max_pool3d"),
        *("one_hot", "poisson_nll_loss", "take_along_dim", "triplet_margin_loss"),
    ]
)
