"""Losses with sample weights and counts of tokens, against closed forms in float64."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

from ipufit.errors import ConfigurationError, LossError
from ipufit.losses import resolve_loss
from ipufit.tracing.capture import capture
from tests import told

# Sums of some dozen numbers in another order, in float64.
CLOSE = {"rtol": 1e-14, "atol": 1e-15}
_GENERATOR = torch.Generator().manual_seed(3)
N, CLASSES = 6, 4
REALS = torch.randn(N, CLASSES, generator=_GENERATOR, dtype=torch.float64)
SHARES = torch.randn(N, CLASSES, generator=_GENERATOR, dtype=torch.float64).sigmoid()
ODDS = torch.randn(N, CLASSES, generator=_GENERATOR, dtype=torch.float64).softmax(1)
BITS = (SHARES > 0.5).double()
SIGNS = BITS * 2 - 1
INDICES = torch.tensor([0, 3, 1, 1, 2, 0])
IGNORING = torch.tensor([0, -100, 1, -100, 2, 0])
OTHERS = torch.tensor([0, 3, 1, 2, 2, 0])
PIXELS = torch.randn(N, CLASSES, 5, generator=_GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, CLASSES, (N, 5), generator=_GENERATOR)
LABELS[1, 2:] = -100
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0, 0.25], dtype=torch.float64)
BY_CLASS = torch.tensor([0.3, 1.0, 2.0, 0.7], dtype=torch.float64)
POSITIVE = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)

# Everything whose elements can be had: the loss, its arguments, and what it divides a sum by.
CASES = {
    "mse": ("mse", REALS, SHARES),
    "mae": ("mae", REALS, SHARES),
    "smooth_l1": ("smooth_l1", REALS, SHARES),
    "huber": ("huber", REALS, SHARES),
    "bce": ("bce", ODDS, BITS),
    "bce_with_logits": ("bce_with_logits", REALS, BITS),
    "kl_div": ("kl_div", REALS.log_softmax(1), ODDS),
    "poisson_nll": ("poisson_nll", REALS, BITS),
    "hinge_embedding": ("hinge_embedding", REALS, SIGNS),
    "soft_margin": ("soft_margin", REALS, SIGNS),
    "multi_margin": ("multi_margin", REALS, INDICES),
    "multilabel_soft_margin": ("multilabel_soft_margin", REALS, BITS),
    "cross_entropy": ("cross_entropy", REALS, INDICES),
    "cross_entropy of probabilities": ("cross_entropy", REALS, ODDS),
    "cross_entropy with ignored": ("cross_entropy", REALS, IGNORING),
    "cross_entropy of pixels": ("cross_entropy", PIXELS, LABELS),
    "nll with ignored": ("nll", REALS.log_softmax(1), IGNORING),
    "MSELoss": (nn.MSELoss(), REALS, SHARES),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(pos_weight=POSITIVE), REALS, BITS),
    "KLDivLoss mean": (nn.KLDivLoss(reduction="batchmean"), REALS.log_softmax(1), ODDS),
    "KLDivLoss log": (
        nn.KLDivLoss(reduction="batchmean", log_target=True),
        REALS.log_softmax(1),
        ODDS.log(),
    ),
    "CrossEntropyLoss": (
        nn.CrossEntropyLoss(weight=BY_CLASS, label_smoothing=0.1),
        REALS,
        IGNORING,
    ),
    "CrossEntropyLoss ignore_index": (nn.CrossEntropyLoss(ignore_index=2), REALS, OTHERS),
    "CrossEntropyLoss of probabilities": (
        nn.CrossEntropyLoss(weight=BY_CLASS, label_smoothing=0.1),
        REALS,
        ODDS,
    ),
    "CrossEntropyLoss of pixels": (nn.CrossEntropyLoss(weight=BY_CLASS), PIXELS, LABELS),
    "NLLLoss": (nn.NLLLoss(weight=BY_CLASS, ignore_index=2), REALS.log_softmax(1), OTHERS),
    "MultiMarginLoss": (nn.MultiMarginLoss(weight=BY_CLASS), REALS, INDICES),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), REALS, INDICES[:, None].expand(N, CLASSES)),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), REALS, BITS),
    "sum": (nn.MSELoss(reduction="sum"), REALS, SHARES),
    "sum of classes": (nn.CrossEntropyLoss(weight=BY_CLASS, reduction="sum"), REALS, IGNORING),
    "function": (functional.cross_entropy, REALS, IGNORING),
    "partial": (
        functools.partial(functional.cross_entropy, weight=BY_CLASS, ignore_index=2),
        REALS,
        OTHERS,
    ),
    "partial sum": (functools.partial(functional.mse_loss, reduction="sum"), REALS, SHARES),
    "per sample": (lambda p, t: (p - t).square().mean(1), REALS, SHARES),
    "per element": (lambda p, t: (p - t).square(), REALS, SHARES),
}
MEANS = {name: case for name, case in CASES.items() if "sum" not in name}
cases = pytest.mark.parametrize(("loss", "prediction", "target"), CASES.values(), ids=list(CASES))
means = pytest.mark.parametrize(("loss", "prediction", "target"), MEANS.values(), ids=list(MEANS))


def gradient(call, prediction):
    """Value and gradient of a function of the prediction."""
    prediction = prediction.clone().requires_grad_()
    value = call(prediction)
    return value.detach(), torch.autograd.grad(value, prediction)[0]


message = functools.partial(told.message, kind=LossError)


# ---- weights ------------------------------------------------------------------------------------


@cases
def test_weights_of_one_change_nothing(loss, prediction, target):
    """Whoever adds a column of ones to the data must not get other numbers."""
    plain = resolve_loss(loss)
    ones = torch.ones(N, dtype=torch.float64)
    expected = gradient(lambda p: plain(p, target).value, prediction)
    for how in ["sum_over_batch_size", "mean_with_sample_weight"][: 1 + (plain.reduction != "sum")]:
        weighted = resolve_loss(loss, sample_weight_reduction=how)
        came = gradient(lambda p, weighted=weighted: weighted(p, target, ones).value, prediction)
        torch.testing.assert_close(came, expected, **CLOSE)


def divisor(loss, target, values):
    """What torch divides the sum of these values by."""
    module = loss if isinstance(loss, nn.Module) else None
    options = loss.keywords if isinstance(loss, functools.partial) else {}
    if "sum" in (getattr(module, "reduction", None), options.get("reduction")):
        return torch.ones(())
    if loss == "kl_div" or isinstance(module, nn.KLDivLoss):
        return torch.full(values.shape, 1 / CLASSES, dtype=torch.float64)
    names = ("cross_entropy", "nll", functional.cross_entropy)
    classes = loss in names or isinstance(module, (nn.CrossEntropyLoss, nn.NLLLoss))
    classes = classes or getattr(loss, "func", None) is functional.cross_entropy
    if not classes or target.is_floating_point():
        return torch.ones_like(values)
    ignored = options.get("ignore_index", getattr(module, "ignore_index", -100))
    by_class = options.get("weight", getattr(module, "weight", None))
    by_class = torch.ones(CLASSES, dtype=torch.float64) if by_class is None else by_class
    return torch.where(target == ignored, 0.0, by_class[target.clamp(min=0)])


def one_by_one(loss, prediction, target):
    """The loss of every sample, found by giving the others a weight of zero: a linear form."""
    resolved = resolve_loss(loss)
    eye = torch.eye(N, dtype=torch.float64)
    return torch.stack([resolved(prediction, target, row).value for row in eye])


@cases
def test_the_weighted_sum_is_divided_by_what_the_plain_one_is(loss, prediction, target):
    """Keras' sum_over_batch_size: a heavier sample changes nothing about the others."""
    resolved = resolve_loss(loss)
    came = resolved(prediction, target, WEIGHTS)
    assert came.count is None
    per_sample = one_by_one(loss, prediction, target)
    torch.testing.assert_close(came.value, (WEIGHTS * per_sample).sum(), **CLOSE)
    torch.testing.assert_close(per_sample.sum(), resolved(prediction, target).value, **CLOSE)


@pytest.mark.parametrize(
    ("loss", "prediction", "target", "values"),
    [
        ("mse", REALS, SHARES, (REALS - SHARES).square()),
        (
            "cross_entropy",
            REALS,
            IGNORING,
            functional.cross_entropy(REALS, IGNORING, reduction="none"),
        ),
        (
            "cross_entropy",
            PIXELS,
            LABELS,
            functional.cross_entropy(PIXELS, LABELS, reduction="none"),
        ),
        (
            CASES["CrossEntropyLoss"][0],
            REALS,
            IGNORING,
            functional.cross_entropy(
                REALS, IGNORING, weight=BY_CLASS, label_smoothing=0.1, reduction="none"
            ),
        ),
        (
            "kl_div",
            REALS.log_softmax(1),
            ODDS,
            functional.kl_div(REALS.log_softmax(1), ODDS, reduction="none"),
        ),
        (lambda p, t: (p - t).abs(), REALS, SHARES, (REALS - SHARES).abs()),
        (nn.HuberLoss(), REALS, SHARES, functional.huber_loss(REALS, SHARES, reduction="none")),
    ],
    ids=["mse", "ignored", "pixels", "module", "batchmean", "callable", "huber"],
)
def test_weighted_values_are_those_of_the_closed_forms(loss, prediction, target, values):
    """Both of Keras' ways, written out."""
    shares = divisor(loss, target, values)
    wide = WEIGHTS.reshape((N,) + (1,) * (values.dim() - 1)).expand(values.shape)
    over_size = resolve_loss(loss)(prediction, target, WEIGHTS)
    torch.testing.assert_close(over_size.value, (wide * values).sum() / shares.sum(), **CLOSE)
    by_weight = resolve_loss(loss, sample_weight_reduction="mean_with_sample_weight")
    term = by_weight(prediction, target, WEIGHTS)
    size = (wide * shares).sum()
    torch.testing.assert_close(term.value, (wide * values).sum() / size, **CLOSE)
    torch.testing.assert_close(term.count, size, **CLOSE)
    assert (term.count.dtype, term.count.requires_grad) == (torch.float64, False)
    micro = resolve_loss(loss, None, "micro_batches", "mean_with_sample_weight")
    term = micro(prediction, target, WEIGHTS)
    torch.testing.assert_close(term.value, (wide * values).sum() / size, **CLOSE)
    assert term.count is None


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, CLASSES)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
def test_weights_have_leading_dimensions_of_the_values(shape, dtype):
    """Keras takes weights per sample and per time step, as a column too, of any dtype."""
    weights = torch.arange(1, 1 + N * CLASSES).reshape(N, CLASSES)[:, : (*shape, 1)[1]] % 3
    weights = weights.reshape(shape).to(dtype)
    wide = weights.reshape(N, -1).double().expand(N, CLASSES)
    expected = (wide * (REALS - SHARES).square()).sum() / (N * CLASSES)
    torch.testing.assert_close(resolve_loss("mse")(REALS, SHARES, weights).value, expected, **CLOSE)


def test_weights_of_time_steps_go_with_class_indices():
    """The classes are in dimension 1, so the leading dimensions of the loss skip it."""
    weights = torch.rand(N, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights[2] = 0.0
    values = functional.cross_entropy(PIXELS, LABELS, reduction="none")
    expected = (weights * values).sum() / (LABELS != -100).sum()
    came = resolve_loss("cross_entropy")(PIXELS, LABELS, weights).value
    torch.testing.assert_close(came, expected, **CLOSE)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (torch.ones(5), "(6,) for loss 'mse', or leading dimensions of its values' shape (6, 4), "
         "got (5,)"),
        (torch.ones(6, 3), "(6,) for loss 'mse', or leading dimensions of its values' shape "
         "(6, 4), got (6, 3)"),
    ],
)  # fmt: skip
def test_weights_of_another_shape_are_refused(weights, text):
    """Broadcast silently, they would weigh classes in place of samples."""
    assert message(resolve_loss("mse"), REALS, SHARES, weights) == (
        f"sample_weight must have shape {text}. Pass one weight for each sample."
    )


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (
            {"a": WEIGHTS},
            "sample_weight must be one tensor of shape (batch,), got dict with ['a']. A dict or "
            "list of weights is for losses or metrics by output.",
        ),
        (
            torch.ones(()),
            "sample_weight must hold one real number for each sample, got shape (), dtype "
            "float32. Pass a tensor of shape (batch,).",
        ),
        (
            torch.ones(N, dtype=torch.complex64),
            "sample_weight must hold one real number for each sample, got shape (6,), dtype "
            "complex64. Pass a tensor of shape (batch,).",
        ),
    ],
)
def test_weights_that_are_none_are_refused(weights, text):
    """One loss has one kind of weights."""
    assert message(resolve_loss("mse"), REALS, SHARES, weights) == text


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(CASES) - {"per sample", "per element"}))
def test_a_weight_of_zero_hides_what_is_not_finite(name):
    """Missing labels are often NaN with a weight of zero: 0 * NaN would spoil every parameter."""
    loss, prediction, target = CASES[name]
    resolved = resolve_loss(loss)
    expected = gradient(lambda p: resolved(p, target, WEIGHTS).value, prediction)
    broken, missing = prediction.clone(), target.clone()
    broken[3] = float("nan")
    broken[3, 0] = float("inf")
    if target.is_floating_point():
        missing[3] = float("nan")
    came = gradient(lambda p: resolved(p, missing, WEIGHTS).value, broken)
    torch.testing.assert_close(came, expected, rtol=0, atol=0)
    assert came[1][3].tolist() == torch.zeros_like(prediction[3]).tolist()


@pytest.mark.long
@means
def test_a_micro_batch_without_weight_counts_nothing(loss, prediction, target):
    """Its mean is over nothing; NaN would stop a training that lacks nothing."""
    resolved = resolve_loss(loss, sample_weight_reduction="mean_with_sample_weight")
    zeros = torch.zeros(N, dtype=torch.float64)
    value, found = gradient(lambda p: resolved(p, target, zeros).value, prediction)
    assert value.item() == resolved(prediction, target, zeros).count.item() == 0.0
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_sums_do_not_overflow(dtype):
    """A sum of many halves is infinite long before their mean is."""
    prediction = torch.full((1024, 64), 40.0, dtype=dtype)
    ones = torch.ones(1024)
    loss = resolve_loss(lambda p, t: p - t)
    value = loss(prediction, torch.zeros_like(prediction), ones).value
    assert (value.dtype, value.item()) == (dtype, 40.0)


# ---- callables and modules of one's own ---------------------------------------------------------


def test_a_callable_may_take_the_weights_itself():
    """Only it knows what its scalar is a mean of."""
    seen = []

    def own(prediction, target, sample_weight=None):
        seen.append(sample_weight)
        values = (prediction - target).square().mean(1)
        if sample_weight is None:
            return values.mean()
        return (values * sample_weight).sum() / sample_weight.sum()

    class Own(nn.Module):
        def forward(self, prediction, target, sample_weight=None):
            return own(prediction, target, sample_weight)

    expected = (WEIGHTS * (REALS - SHARES).square().mean(1)).sum() / WEIGHTS.sum()
    for loss in (own, Own(), functools.partial(own)):
        resolved = resolve_loss(loss)
        torch.testing.assert_close(resolved(REALS, SHARES, WEIGHTS[:, None]).value, expected)
        assert resolved(REALS, SHARES, WEIGHTS).count is None
        assert torch.equal(seen[-1], WEIGHTS)
        plain = resolved(REALS, SHARES).value
        torch.testing.assert_close(plain, functional.mse_loss(REALS, SHARES))
        assert seen[-1] is None
    by_weight = resolve_loss(own, sample_weight_reduction="mean_with_sample_weight")
    assert by_weight(REALS, SHARES, WEIGHTS).count.item() == WEIGHTS.sum().item()
    empty = by_weight(REALS, SHARES, torch.zeros(N))
    assert (empty.value.item(), empty.count.item()) == (0.0, 0.0)
    text = message(resolve_loss(lambda p, t, sample_weight: p), REALS, SHARES, WEIGHTS)
    assert text.startswith("loss '<lambda>' must be a scalar, got shape (6, 4).")
    bound = functools.partial(own, sample_weight=None)
    assert not resolve_loss(bound).takes_weight


def test_a_scalar_of_a_callable_cannot_be_weighted():
    """The weights would have to be dropped."""

    def mine(prediction, target):
        return (prediction - target).mean()

    assert message(resolve_loss(mine), REALS, SHARES, WEIGHTS) == (
        "loss 'mine' must give one value per sample to be weighted with sample_weight, got a "
        "tensor of shape (), dtype float64. Return the values before their mean, shape (batch,), "
        "or take sample_weight as a third argument."
    )


class Focal(nn.Module):
    """A user's module in torch's own style, with a parameter and a buffer."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, prediction, target):
        self.calls += 1
        values = functional.cross_entropy(prediction, target, reduction="none") * self.scale
        return values if self.reduction == "none" else getattr(values, self.reduction)()


def test_a_module_with_a_reduction_is_asked_without_it():
    """A copy is asked, so nobody finds the module changed, and parameters stay the same ones."""
    module = Focal()
    values = functional.cross_entropy(REALS, INDICES, reduction="none")
    value = resolve_loss(module)(REALS, INDICES, WEIGHTS).value
    torch.testing.assert_close(value, 2.0 * (WEIGHTS * values).mean(), **CLOSE)
    value.backward()
    torch.testing.assert_close(module.scale.grad, (WEIGHTS * values).mean(), **CLOSE)
    assert (module.reduction, module.calls.item()) == ("mean", 1.0)
    total = resolve_loss(Focal("sum"))(REALS, INDICES, WEIGHTS).value
    torch.testing.assert_close(total, 2.0 * (WEIGHTS * values).sum(), **CLOSE)


def test_a_module_that_ignores_its_reduction_is_refused():
    """Its scalar would be weighted with a number for each sample."""

    class Deaf(nn.Module):
        reduction = "mean"

        def forward(self, prediction, target):
            return (prediction - target).mean()

    assert message(resolve_loss(Deaf()), REALS, SHARES, WEIGHTS) == (
        "loss 'Deaf' must give one value per sample with reduction='none', which sample weights "
        "and normalize='tokens' need, got a tensor of shape (), dtype float64. Let forward respect "
        "self.reduction, or take sample_weight as a third argument."
    )


def test_a_subclass_with_a_forward_of_its_own_is_not_taken_for_torchs():
    """Over which elements its mean is taken, only it knows."""

    class Harder(nn.CrossEntropyLoss):
        def forward(self, prediction, target):
            return super().forward(prediction, target) * 2

    text = message(resolve_loss(Harder()), REALS, IGNORING, WEIGHTS)
    assert text.startswith("loss 'Harder' must give one value per sample to be weighted with")


# ---- tokens -------------------------------------------------------------------------------------


@means
def test_means_over_tokens_add_up_to_the_whole(loss, prediction, target):
    """What normalize="tokens" is for: accumulation equals the full batch, whatever the cut."""
    resolved = resolve_loss(loss, normalize="tokens")
    whole = resolve_loss(loss)(prediction, target).value
    full = resolved(prediction, target)
    torch.testing.assert_close(full.value, whole, **CLOSE)
    parts = [resolved(prediction[rows], target[rows]) for rows in (slice(0, 2), slice(2, N))]
    joined = sum(part.count * part.value for part in parts) / sum(part.count for part in parts)
    torch.testing.assert_close(joined, whole, **CLOSE)
    torch.testing.assert_close(sum(part.count for part in parts), full.count, **CLOSE)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mse", N * CLASSES),
        ("multi_margin", N),
        ("kl_div", N),
        ("cross_entropy", N),
        ("cross_entropy with ignored", 4),
        ("cross_entropy of pixels", 27),
        ("CrossEntropyLoss", 0.3 + 1.0 + 2.0 + 0.3),
        ("CrossEntropyLoss ignore_index", 4),
        ("CrossEntropyLoss of probabilities", N),
        ("per sample", N),
        ("per element", N * CLASSES),
    ],
)
def test_the_count_is_what_the_mean_is_over(name, count):
    """With class weights torch divides by their sum."""
    loss, prediction, target = CASES[name]
    term = resolve_loss(loss, normalize="tokens")(prediction, target)
    assert term.count.item() == pytest.approx(count, rel=1e-15)
    assert (term.count.shape, term.count.dtype) == ((), torch.float64)
    assert not term.count.requires_grad
    for normalize in ("samples", "micro_batches"):
        assert resolve_loss(loss, normalize=normalize)(prediction, target).count is None


@pytest.mark.parametrize("how", ["sum_over_batch_size", "mean_with_sample_weight"])
def test_tokens_can_have_weights(how):
    """The count goes with the divisor, or the micro-batches would not add up."""
    resolved = resolve_loss("cross_entropy", None, "tokens", how)
    whole = resolved(REALS, IGNORING, WEIGHTS)
    rows = [slice(0, 2), slice(2, N)]
    parts = [resolved(REALS[r], IGNORING[r], WEIGHTS[r]) for r in rows]
    joined = sum(part.count * part.value for part in parts) / sum(part.count for part in parts)
    torch.testing.assert_close(joined, whole.value, **CLOSE)
    expected = 4.0 if how == "sum_over_batch_size" else WEIGHTS[IGNORING != -100].sum().item()
    assert whole.count.item() == expected


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(weight=BY_CLASS)])
def test_a_micro_batch_without_tokens_counts_nothing(loss):
    """Torch gives NaN for it, and a micro-batch of nothing but padding is no mistake."""
    nothing = torch.full((N,), -100)
    resolved = resolve_loss(loss, normalize="tokens")
    value, found = gradient(lambda p: resolved(p, nothing).value, REALS)
    assert (value.item(), resolved(REALS, nothing).count.item()) == (0.0, 0.0)
    assert torch.equal(found, torch.zeros_like(found))
    assert resolve_loss(loss)(REALS, nothing).value.isnan()


@pytest.mark.parametrize("count", [torch.tensor(4), torch.tensor([4.0]), 4, 4.0])
def test_a_callable_may_return_its_count(count):
    """Only it knows which of its tokens are padding."""
    term = resolve_loss(lambda p, t: ((p - t).square().mean(), count), normalize="tokens")(
        REALS, SHARES
    )
    assert (term.count.item(), term.count.dtype, term.count.shape) == (4.0, torch.float64, ())
    torch.testing.assert_close(term.value, functional.mse_loss(REALS, SHARES), **CLOSE)
    empty = resolve_loss(lambda p, t: (p.mean() / 0.0, 0), normalize="tokens")(REALS, SHARES)
    assert (empty.value.item(), empty.count.item()) == (0.0, 0.0)


def mean_error(prediction, target):
    """A scalar, and no word about what it is over."""
    return (prediction - target).mean()


def test_a_callable_that_cannot_tell_its_count_is_refused():
    """Counting samples in place of tokens would be the mistake that the option is against."""
    resolved = resolve_loss(mean_error, normalize="tokens")
    assert message(resolved, REALS, SHARES) == (
        "loss 'mean_error' must return the number of tokens of its mean with normalize='tokens', "
        "got a tensor of shape (), dtype float64. Return (mean, count), or one value for each "
        "token, shape (batch, ...)."
    )
    odd = resolve_loss(lambda p, t: (p.mean(), "4"), normalize="tokens")
    assert message(odd, REALS, SHARES) == (
        "loss '<lambda>' must give its count as one number, got str. Return the number of tokens, "
        "such as (target != -100).sum()."
    )


def test_a_count_without_use_is_refused():
    """Dropped silently, the micro-batches would count by their samples."""
    text = message(resolve_loss(lambda p, t: (p.mean(), torch.tensor(3))), REALS, SHARES)
    assert text == (
        "loss '<lambda>' must return one number, or with normalize='tokens' (mean, count), got "
        "tuple of 2, the last a tensor of shape (), dtype int64. Return only the mean, or compile "
        "with normalize='tokens'."
    )


def test_a_module_with_its_own_loss_may_return_its_count():
    """Language models know how many of their labels are padding."""
    resolved = resolve_loss(None, normalize="tokens")
    loss = torch.tensor(2.0)
    outputs, term = resolved.split({"loss": loss, "loss_count": torch.tensor(7), "logits": REALS})
    assert outputs == {"logits": REALS}
    assert (term.value.item(), term.count.item(), term.count.dtype) == (2.0, 7.0, torch.float64)
    assert message(resolved.split, (REALS, loss)) == (
        "with loss=None and normalize='tokens' the module must return a mapping or dataclass with "
        "loss and loss_count, got tuple of 2, the last a tensor of shape (), dtype float32. Add "
        "loss_count, the number of tokens of the mean, or pass loss= to compile."
    )
    outputs, term = resolve_loss(None).split({"loss": loss, "loss_count": 7})
    assert (outputs, term.count) == ({"loss_count": 7}, None)


# ---- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"loss_weights": [1.0]},
            "loss_weights is for a dict or list of losses, got [1.0] with one loss. Leave it out, "
            "or multiply in a callable loss.",
        ),
        (
            {"loss": None, "sample_weight_reduction": "mean_with_sample_weight"},
            "sample_weights='mean_with_sample_weight' needs a loss that is passed to compile, got "
            "loss=None. Leave it out: the module weights its samples itself.",
        ),
        (
            {"loss": nn.MSELoss(reduction="sum"), "normalize": "tokens"},
            "loss 'MSELoss' must be a mean for normalize='tokens', got reduction='sum'. Use "
            "reduction='mean', or leave the option out.",
        ),
        (
            {
                "loss": nn.MSELoss(reduction="sum"),
                "sample_weight_reduction": "mean_with_sample_weight",
            },
            "loss 'MSELoss' must be a mean for sample_weights='mean_with_sample_weight', "
            "got reduction='sum'. Use reduction='mean', or leave the option out.",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, text):
    """An option without an effect is one that somebody believes in."""
    assert message(resolve_loss, kind=ConfigurationError, **{"loss": "mse", **options}) == text


# ---- recorded -----------------------------------------------------------------------------------


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("options", [
    {},
    {"normalize": "tokens"},
    {"sample_weight_reduction": "mean_with_sample_weight"},
])  # fmt: skip
@pytest.mark.parametrize(
    "name", ["mse", "cross_entropy of pixels", "CrossEntropyLoss", "kl_div", "per sample"]
)
def test_weighted_losses_are_recorded(name, options):
    """Training is always recorded, on fake tensors; the program must hold for other values too."""
    loss, prediction, target = CASES[name]
    resolved = resolve_loss(loss, **options)

    def step(prediction, target, weights):
        prediction = prediction.detach().requires_grad_()
        term = resolved(prediction, target, weights)
        (found,) = torch.autograd.grad(term.value, prediction)
        count = [] if term.count is None else [term.count]
        return [term.value.detach(), found, *count]

    program = capture(step, (prediction, target, WEIGHTS))
    for weights in (WEIGHTS, WEIGHTS.flip(0), torch.zeros_like(WEIGHTS)):
        with torch.no_grad():
            came = program(prediction, target, weights)
        expected = step(prediction, target, weights)
        torch.testing.assert_close(list(came), expected, **CLOSE)
    if options:
        assert came[0].item() == 0.0
