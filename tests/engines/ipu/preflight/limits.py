"""For every fact with a limit: something that it is about, and the same without it."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

import ipufit.optim
from ipufit import poptorch
from ipufit.core.train_config import EMA, Clip, LossScale, Precision, TrainConfig
from ipufit.engines.ipu.preflight.evaluate import preflight
from tests.engines.ipu.preflight.looked_at import LOSS, Calls, batch_of, report_of, tensors


def keys(report):
    """Of the facts that a report has findings of."""
    return {finding.fact.key for finding in report.findings}


def calls(bad, good):
    """Two functions of tensors, in a model that only predicts."""
    return lambda: keys(report_of(bad)), lambda: keys(report_of(good))


def trained(module, first, optimizer=None, config=None, **kwargs):
    """What is said of a model that learns."""
    weights = [*module.parameters(), nn.Parameter(torch.zeros(1))]
    optimizer = optimizer or torch.optim.SGD(weights, lr=0.1)
    args = () if first is None else (first,)
    return keys(
        preflight(module, LOSS, optimizer, config or TrainConfig(), batch_of(*args, **kwargs))
    )


def layers(bad, good, x):
    """Two modules that learn, on one input."""
    return lambda: trained(bad(), x), lambda: trained(good(), x)


def optimizers(bad, good):
    """Two optimizers of one model."""

    def said(make):
        net = nn.Linear(4, 3)
        return trained(net, X[0], make([*net.parameters()]))

    return lambda: said(bad), lambda: said(good)


def recipes(bad, good, kind=torch.optim.RMSprop):
    """Two ways of making updates."""

    def said(config):
        net = nn.Linear(4, 3)
        return trained(net, X[0], kind(net.parameters(), lr=0.1), config)

    return lambda: said(bad), lambda: said(good)


def inputs(bad, good):
    """Two tensors that go into a model."""
    return tuple(
        lambda dtype=dtype: trained(nn.Identity(), torch.zeros(2, 4, dtype=dtype))
        for dtype in (bad, good)
    )


def held(bad, good):
    """Two tensors that a model has."""
    return tuple(
        lambda dtype=dtype: trained(Holds(torch.zeros(3, dtype=dtype)), X) for dtype in (bad, good)
    )


def learning(bad, good):
    """Two functions of tensors, in a model that learns."""
    return (
        lambda: trained(Calls(bad), None, **tensors(bad)),
        lambda: trained(Calls(good), None, **tensors(good)),
    )


class Holds(nn.Module):
    """Has a buffer, to which it may add."""

    def __init__(self, held, adds=False):
        super().__init__()
        self.register_buffer("held", held)
        self.adds = adds

    def forward(self, x):
        if self.adds:
            self.held += 1
        return x + 1


X = torch.zeros(2, 3, 4)
PICTURE = torch.zeros(2, 4, 8, 8)
VOLUME = torch.zeros(2, 4, 4, 4, 4)


def ctc(targets, **options):
    """CTC loss of 2 steps, 3 samples and 8 classes."""
    lengths = (2, 2, 2), (1, 1, 1)
    return lambda t: F.ctc_loss(t.one.log_softmax(-1), targets(t), *lengths, **options)


def padded(t):
    """Targets of three samples."""
    return t.i[0]


OPERATORS = {
    "aten::topk sorted=False": calls(lambda t: t.x.topk(2, sorted=False), lambda t: t.x.topk(2)),
    "aten::max_pool2d_with_indices": calls(
        lambda t: F.max_pool2d(t.two, 2, return_indices=True), lambda t: F.max_pool2d(t.two, 2)
    ),
    "aten::max_pool3d_with_indices": calls(
        lambda t: F.max_pool3d(t.three, 2, return_indices=True), lambda t: F.max_pool3d(t.three, 2)
    ),
    "aten::avg_pool2d divisor_override": calls(
        lambda t: F.avg_pool2d(t.two, 2, divisor_override=3), lambda t: F.avg_pool2d(t.two, 2)
    ),
    "aten::avg_pool3d divisor_override": calls(
        lambda t: F.avg_pool3d(t.three, 2, divisor_override=3), lambda t: F.avg_pool3d(t.three, 2)
    ),
    "aten::adaptive_avg_pool1d uneven": calls(
        lambda t: F.adaptive_avg_pool1d(t.one, 3), lambda t: F.adaptive_avg_pool1d(t.one, 4)
    ),
    "aten::adaptive_avg_pool2d uneven": calls(
        lambda t: F.adaptive_avg_pool2d(t.two, (4, 3)),
        lambda t: F.adaptive_avg_pool2d(t.two, (4, 2)),
    ),
    "aten::adaptive_avg_pool3d uneven": calls(
        lambda t: F.adaptive_avg_pool3d(t.three, 3), lambda t: F.adaptive_avg_pool3d(t.three, 1)
    ),
    "aten::convolution transposed dilation": calls(
        lambda t: nn.ConvTranspose2d(3, 2, 3, dilation=2)(t.two),
        lambda t: (nn.ConvTranspose2d(3, 2, 3)(t.two), nn.Conv2d(3, 2, 3, dilation=2)(t.two)),
    ),
    "aten::_pad_circular": calls(
        lambda t: nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular")(t.two),
        lambda t: nn.Conv2d(3, 2, 3, padding=1, padding_mode="reflect")(t.two),
    ),
    "aten::embedding padding_idx": calls(
        lambda t: F.embedding(t.tokens, t.square, padding_idx=0),
        lambda t: F.embedding(t.tokens, t.square),
    ),
    "aten::embedding sparse": calls(
        lambda t: F.embedding(t.tokens, t.square, scale_grad_by_freq=True),
        lambda t: F.embedding(t.tokens, t.square),
    ),
    "aten::_embedding_bag padding_idx": calls(
        lambda t: nn.EmbeddingBag(4, 4, padding_idx=0)(t.tokens.view(1, 5)),
        lambda t: nn.EmbeddingBag(4, 4)(t.tokens.view(1, 5)),
    ),
    "aten::_embedding_bag sparse": calls(
        lambda t: nn.EmbeddingBag(4, 4, sparse=True)(t.tokens.view(1, 5)),
        lambda t: nn.EmbeddingBag(4, 4)(t.tokens.view(1, 5)),
    ),
    "aten::_embedding_bag offsets": calls(
        lambda t: nn.EmbeddingBag(4, 4)(t.tokens, t.labels),
        lambda t: nn.EmbeddingBag(4, 4)(t.tokens, torch.arange(2)),
    ),
    "aten::one_hot num_classes=-1": calls(
        lambda t: F.one_hot(t.labels), lambda t: F.one_hot(t.labels, 3)
    ),
    "aten::bincount minlength": calls(
        lambda t: torch.bincount(t.tokens), lambda t: torch.bincount(t.tokens, minlength=3)
    ),
    "aten::upsample_linear1d": calls(
        lambda t: F.interpolate(t.one, scale_factor=2, mode="linear"),
        lambda t: F.interpolate(t.one, scale_factor=2),
    ),
    "aten::upsample_trilinear3d": calls(
        lambda t: F.interpolate(t.three, scale_factor=2, mode="trilinear"),
        lambda t: F.interpolate(t.three, scale_factor=2),
    ),
    "aten::upsample_bicubic2d align_corners": calls(
        lambda t: F.interpolate(t.two, scale_factor=2, mode="bicubic", align_corners=True),
        lambda t: F.interpolate(t.two, scale_factor=2, mode="bicubic"),
    ),
    "aten::upsample_bilinear2d": calls(
        lambda t: F.interpolate(t.two, scale_factor=2, mode="bilinear"),
        lambda t: F.interpolate(t.two, scale_factor=2),
    ),
    "aten::upsample_bilinear2d uneven": calls(
        lambda t: F.interpolate(t.two, size=(16, 24), mode="bilinear"),
        lambda t: F.interpolate(t.two, size=(24, 24), mode="bilinear"),
    ),
    "aten::dropout p=0": calls(
        lambda t: F.dropout(t.x, 0.0), lambda t: (F.dropout(t.x, 0.1), F.dropout(t.x, 0.0, False))
    ),
    "aten::gelu approximate='none'": calls(
        lambda t: F.gelu(t.x), lambda t: F.gelu(t.x, approximate="tanh")
    ),
    **{
        f"aten::{name} correction": calls(
            lambda t, name=name: getattr(torch, name)(t.x, correction=2),
            lambda t, name=name: getattr(torch, name)(t.x, correction=0),
        )
        for name in ("var", "var_mean", "std", "std_mean")
    },
    "aten::bitwise_and of 8 bits": calls(lambda t: t.small & t.small, lambda t: t.whole & t.small),
    "aten::bitwise_or of 8 bits": calls(lambda t: t.signs | t.signs, lambda t: t.yes | t.yes),
    "aten::bitwise_xor of 8 bits": calls(lambda t: t.small ^ t.small, lambda t: t.whole ^ t.whole),
    "aten::bitwise_not of 8 bits": calls(lambda t: ~t.small, lambda t: ~t.whole),
    "aten::linalg_matrix_norm spectral": calls(
        lambda t: torch.linalg.matrix_norm(t.square, ord=2),
        lambda t: torch.linalg.matrix_norm(t.square, ord=1),
    ),
    "aten::triu": calls(lambda t: t.square.triu(), lambda t: t.square * torch.ones(4, 4).triu()),
    "aten::as_strided": calls(lambda t: t.x.as_strided((2, 2), (1, 2)), lambda t: t.x[0, :2, :2]),
}

LOSSES = {
    "aten::ctc_loss reduction='none'": calls(ctc(padded, reduction="none"), ctc(padded)),
    "aten::ctc_loss joined targets": calls(ctc(lambda t: t.tokens), ctc(padded)),
    "aten::nll_loss_forward weight": calls(
        lambda t: F.cross_entropy(t.square[:2], t.labels, weight=t.row),
        lambda t: F.cross_entropy(t.square[:2], t.labels),
    ),
    "aten::nll_loss2d_forward weight": calls(
        lambda t: F.nll_loss(t.two, t.labels.view(2, 1, 1).expand(2, 8, 8), weight=t.row[:3]),
        lambda t: F.nll_loss(t.two, t.labels.view(2, 1, 1).expand(2, 8, 8)),
    ),
    "aten::cross_entropy_loss label_smoothing": calls(
        lambda t: F.cross_entropy(t.square[:2], t.labels, label_smoothing=0.1),
        lambda t: F.cross_entropy(t.square[:2], t.square[:2], label_smoothing=0.1),
    ),
}


def _recurrent(name):
    kind = getattr(nn, name)
    options = {
        "num_layers>1": {"num_layers": 2},
        "dropout>0": {"dropout": 0.1, "num_layers": 2},
        "bidirectional=True": {"bidirectional": True},
        "bias=False": {"bias": False},
    }
    if name == "GRU":
        del options["bias=False"]
    good = {"bias": name != "GRU"}
    return {
        f"{name}({argument})": layers(
            lambda chosen=chosen: kind(4, 4, **chosen), lambda: kind(4, 4, **good), X
        )
        for argument, chosen in options.items()
    }


class HalfNorm(nn.LayerNorm):
    """A normalisation with a weight and no bias, on any version of torch."""

    def __init__(self, shape):
        super().__init__(shape)
        self.register_parameter("bias", None)


_INPUTS = {"1": X, "2": PICTURE, "3": VOLUME}


def _plain(name):
    kind = getattr(nn, name)
    x = _INPUTS[name[-2]]
    width = x.shape[1]
    return layers(lambda: kind(width, affine=False), lambda: kind(width, affine=True), x)


def _tracked(name):
    kind = getattr(nn, name)
    x = _INPUTS[name[-2]]
    width = x.shape[1]
    return layers(lambda: kind(width), lambda: kind(width, track_running_stats=False), x)


LAYERS = {
    **_recurrent("RNN"),
    **_recurrent("LSTM"),
    **_recurrent("GRU"),
    "LSTM(proj_size>0)": layers(lambda: nn.LSTM(4, 4, proj_size=2), lambda: nn.LSTM(4, 4), X),
    **{
        f"{kind}Norm{rank}d(affine=False)": _plain(f"{kind}Norm{rank}d")
        for kind in ("Batch", "Instance")
        for rank in (1, 2, 3)
    },
    "GroupNorm(affine=False)": layers(
        lambda: nn.GroupNorm(2, 4, affine=False), lambda: nn.GroupNorm(2, 4), PICTURE
    ),
    "LayerNorm(elementwise_affine=False)": layers(
        lambda: nn.LayerNorm(4, elementwise_affine=False), lambda: nn.LayerNorm(4), X
    ),
    "LayerNorm(bias=False)": layers(lambda: HalfNorm(4), lambda: nn.LayerNorm(4), X),
    **{
        f"BatchNorm{rank}d(running statistics)": _tracked(f"BatchNorm{rank}d") for rank in (1, 2, 3)
    },
}

_ADAM, _SGD, _RMS = torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop


def _split(kind, name, first, second):
    """An optimizer with two groups that have a setting of their own."""
    return lambda weights: kind(
        [{"params": weights[:1], name: first}, {"params": weights[1:], name: second}], lr=0.1
    )


def _told(name, value):
    """An optimizer whose group has a setting that this version of torch may not know."""

    def make(weights):
        optimizer = _ADAM(weights, lr=0.1)
        optimizer.param_groups[0][name] = value
        return optimizer

    return make


OPTIMIZERS = {
    "maximize": optimizers(
        lambda w: _SGD(w, lr=0.1, maximize=True), lambda w: _SGD(w, lr=0.1, nesterov=False)
    ),
    "amsgrad": optimizers(lambda w: _ADAM(w, amsgrad=True), lambda w: _ADAM(w)),
    "decoupled_weight_decay": optimizers(
        _told("decoupled_weight_decay", True), _told("decoupled_weight_decay", False)
    ),
    "dampening": optimizers(
        lambda w: _SGD(w, lr=0.1, momentum=0.9, dampening=0.1),
        lambda w: _SGD(w, lr=0.1, dampening=0.1),
    ),
    "lr": optimizers(_told("lr", torch.ones(2)), _told("lr", torch.ones(()))),
    "centered": optimizers(
        _split(_RMS, "centered", True, False), _split(_RMS, "centered", True, True)
    ),
    "bias_correction": optimizers(
        _split(ipufit.optim.LAMB, "bias_correction", True, False),
        _split(ipufit.optim.LAMB, "bias_correction", True, True),
    ),
    **{
        name: optimizers(_told(name, True), _told(name, False))
        for name in ("foreach", "fused", "capturable", "differentiable")
    },
}

_PLAIN = TrainConfig()


def _with(**changed):
    return dataclasses.replace(_PLAIN, **changed)


SETTINGS = {
    "clipnorm": recipes(_with(clip=Clip(norm=1.0)), _PLAIN),
    "clipvalue": recipes(_with(clip=Clip(value=1.0)), _PLAIN),
    "global_clipnorm": (
        recipes(_with(clip=Clip(global_norm=1.0)), _PLAIN)[0],
        recipes(_PLAIN, _with(clip=Clip(global_norm=1.0)), torch.optim.SGD)[1],
    ),
    "use_ema": recipes(_with(ema=EMA()), _PLAIN),
    "autocast": recipes(
        _with(precision=Precision("mixed_bfloat16")),
        _with(precision=Precision("float16")),
    ),
    "precision": recipes(
        _with(precision=Precision("float64")),
        _with(precision=Precision("float32")),
    ),
    "loss_scale": recipes(_with(loss_scale=LossScale()), _with(loss_scale=LossScale(8.0, None))),
    "accumulation_dtype": recipes(
        _with(accumulation_dtype=torch.float64), _with(accumulation_dtype=torch.float32)
    ),
    "detect_nan": recipes(_with(detect_nan=True), _PLAIN),
    "run_eagerly": recipes(_with(jit="off"), _PLAIN),
    "jit": recipes(_with(jit="graph"), _with(jit="auto")),
}

DTYPES = {
    "int64": inputs(torch.int64, torch.int32),
    "float64": inputs(torch.float64, torch.float32),
    "bfloat16": inputs(torch.bfloat16, torch.float16),
    "float64 in the module": held(torch.float64, torch.float32),
    "bfloat16 in the module": held(torch.bfloat16, torch.float16),
    "complex64": held(torch.complex64, torch.float32),
    "complex128": held(torch.complex128, torch.float32),
    "a buffer of integers that changes": (
        lambda: trained(Holds(torch.zeros((), dtype=torch.int32), adds=True), X),
        lambda: trained(Holds(torch.zeros((), dtype=torch.int32)), X),
    ),
    "a buffer that changes": (
        lambda: trained(Holds(torch.zeros(()), adds=True), X),
        lambda: trained(Holds(torch.zeros(())), X),
    ),
    "no elements": (
        lambda: trained(nn.Identity(), torch.zeros(2, 0)),
        lambda: trained(nn.Identity(), torch.zeros(2, 1)),
    ),
}

CONTROL_FLOW = {
    "a value in Python": calls(
        lambda t: t.x if t.x.sum() > 0 else t.y, lambda t: torch.where(t.x > 0, t.x, t.y)
    ),
    "a shape of values": calls(lambda t: t.x[t.yes], lambda t: torch.where(t.yes, t.x, t.y)),
    "poptorch.for_loop": learning(
        lambda t: poptorch.for_loop(2, lambda x: x + 1, [t.x])[0], lambda t: t.x + 1 + 1
    ),
    "poptorch.cond": learning(
        lambda t: poptorch.cond(t.labels[0] > 0, lambda x: x + 1, [t.x], lambda x: x, [t.x])[0],
        lambda t: torch.where(t.labels[0] > 0, t.x + 1, t.x),
    ),
}

LIMITS = {
    **OPERATORS,
    **LOSSES,
    **LAYERS,
    **OPTIMIZERS,
    **SETTINGS,
    **DTYPES,
    **CONTROL_FLOW,
}
