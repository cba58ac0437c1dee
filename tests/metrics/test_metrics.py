"""Metrics: exact over uneven micro-batches, chosen carefully, and refused before any training."""

from __future__ import annotations

import functools
import math
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import ipufit
from ipufit.callbacks import LambdaCallback
from ipufit.errors import ConfigurationError, MetricError, UnknownNameError
from ipufit.metrics.metric_set import MetricSet
from ipufit.metrics.resolve import resolve_metrics
from ipufit.utils.names import RESERVED, check_log_name
from tests import told

KNOWN = (
    "acc, accuracy, auc, binary_accuracy, binary_accuracy_with_logits, categorical_accuracy, "
    "concordance_correlation, cosine_similarity, f1, f1_score, fbeta_score, hinge, kl_divergence, "
    "log_cosh, logcosh, mae, mape, mean_absolute_error, mean_absolute_percentage_error, "
    "mean_io_u, mean_iou, mean_squared_error, mean_squared_logarithmic_error, mse, msle, "
    "pearson_correlation, perplexity, precision, r2, r2_score, recall, rmse, "
    "root_mean_squared_error, sparse_categorical_accuracy, sparse_top_k_categorical_accuracy, "
    "squared_hinge, top_5_accuracy, top_k_categorical_accuracy"
)
# float64 sums over some dozen values in another order.
TOLERANCE = 1e-12
SAMPLES = 23
UNEVEN = (7, 1, 7, 5, 3)
_GENERATOR = torch.Generator().manual_seed(5)
LOGITS = torch.randn(SAMPLES, 8, generator=_GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(0, 8, (SAMPLES,), generator=_GENERATOR)
PIXELS = torch.randn(SAMPLES, 3, 4, 2, generator=_GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, 3, (SAMPLES, 4, 2), generator=_GENERATOR)
REALS = torch.randn(SAMPLES, 8, generator=_GENERATOR, dtype=torch.float64)
BITS = torch.randint(0, 2, (SAMPLES, 8), generator=_GENERATOR)


def fed(metrics, prediction, target, sizes=UNEVEN):
    """The values after micro-batches of these sizes."""
    metrics = resolve_metrics(metrics)
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        metrics.update(prediction[rows], target[rows], size)
        first += size
    assert first == len(prediction)
    return metrics.compute()


def one(metric, prediction, target, sizes=UNEVEN):
    """The value of a single metric."""
    (value,) = fed(metric, prediction, target, sizes).values()
    return value


message = functools.partial(told.message, kind=MetricError)


# ---- named metrics ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prediction", "target", "expected"),
    [
        ("accuracy", LOGITS, CLASSES, (LOGITS.argmax(1) == CLASSES).double().mean()),
        ("acc", LOGITS, CLASSES, (LOGITS.argmax(1) == CLASSES).double().mean()),
        ("accuracy", PIXELS, LABELS, (PIXELS.argmax(1) == LABELS).double().mean()),
        (
            "sparse_categorical_accuracy",
            LOGITS,
            CLASSES.int(),
            (LOGITS.argmax(1) == CLASSES).double().mean(),
        ),
        (
            "accuracy",
            REALS[:, 0].sigmoid(),
            BITS[:, 0],
            ((REALS > 0) == BITS)[:, 0].double().mean(),
        ),
        (
            "accuracy",
            REALS[:, :1].sigmoid(),
            BITS[:, :1].double(),
            ((REALS > 0) == BITS)[:, 0].double().mean(),
        ),
        ("binary_accuracy", REALS.sigmoid(), BITS.bool(), ((REALS > 0) == BITS).double().mean()),
        ("binary_accuracy_with_logits", REALS, BITS, ((REALS > 0) == BITS).double().mean()),
        (
            "categorical_accuracy",
            LOGITS,
            functional.one_hot(CLASSES, 8),
            (LOGITS.argmax(1) == CLASSES).double().mean(),
        ),
        (
            "top_5_accuracy",
            LOGITS,
            CLASSES,
            (LOGITS.topk(5).indices == CLASSES[:, None]).any(1).double().mean(),
        ),
        (
            "top_2_accuracy",
            LOGITS,
            functional.one_hot(CLASSES, 8).double(),
            (LOGITS.topk(2).indices == CLASSES[:, None]).any(1).double().mean(),
        ),
        (
            "top_2_accuracy",
            PIXELS,
            LABELS,
            (PIXELS.topk(2, dim=1).indices == LABELS[:, None]).any(1).double().mean(),
        ),
        ("mse", LOGITS, REALS, functional.mse_loss(LOGITS, REALS)),
        ("mean_squared_error", LOGITS, REALS, functional.mse_loss(LOGITS, REALS)),
        ("mae", LOGITS, REALS, functional.l1_loss(LOGITS, REALS)),
        ("mean_absolute_error", LOGITS, REALS, functional.l1_loss(LOGITS, REALS)),
        ("rmse", LOGITS, REALS, functional.mse_loss(LOGITS, REALS).sqrt()),
        ("root_mean_squared_error", LOGITS, REALS, functional.mse_loss(LOGITS, REALS).sqrt()),
        ("perplexity", LOGITS, CLASSES, functional.cross_entropy(LOGITS, CLASSES).exp()),
        ("perplexity", PIXELS, LABELS, functional.cross_entropy(PIXELS, LABELS).exp()),
    ],
)
def test_a_named_metric_is_exact_over_uneven_micro_batches(name, prediction, target, expected):
    """A mean of means over micro-batches is another number as soon as the last one is smaller."""
    assert fed(name, prediction, target) == {name: pytest.approx(expected.item(), rel=TOLERANCE)}


@pytest.mark.parametrize(
    ("name", "reference", "prediction", "target"),
    [
        (
            "accuracy",
            torchmetrics.classification.MulticlassAccuracy(8, average="micro"),
            LOGITS,
            CLASSES,
        ),
        (
            "top_5_accuracy",
            torchmetrics.classification.MulticlassAccuracy(8, top_k=5, average="micro"),
            LOGITS,
            CLASSES,
        ),
        ("binary_accuracy", torchmetrics.classification.BinaryAccuracy(), REALS.sigmoid(), BITS),
        ("rmse", torchmetrics.MeanSquaredError(squared=False), LOGITS, REALS),
        ("mae", torchmetrics.MeanAbsoluteError(), LOGITS, REALS),
    ],
)
def test_a_named_metric_agrees_with_torchmetrics_on_the_whole(name, reference, prediction, target):
    """Two independent authors are unlikely to misread a definition in the same way."""
    # torchmetrics sums in float32.
    expected = pytest.approx(reference(prediction, target).item(), rel=1e-6)
    assert one(name, prediction, target) == expected


@pytest.mark.long("ipu-standin")
@given(cuts=st.lists(st.integers(1, 9), min_size=1), name=st.sampled_from(["rmse", "mae", "mse"]))
def test_no_cut_into_micro_batches_changes_a_named_metric(cuts, name):
    """Changing device_iterations or replicas must not change the History."""
    sizes = []
    for cut in cuts:
        sizes.append(min(cut, SAMPLES - sum(sizes)))
    sizes = [size for size in [*sizes, SAMPLES - sum(sizes)] if size]
    whole = one(name, LOGITS, REALS, (SAMPLES,))
    assert one(name, LOGITS, REALS, sizes) == pytest.approx(whole, rel=TOLERANCE)


COUNTS = ["accuracy", "sparse_categorical_accuracy", "top_3_accuracy"]


def cut(prediction, target, sizes=UNEVEN):
    """Micro-batches as ``update_all`` takes them."""
    rows = zip(prediction.split(sizes), target.split(sizes), sizes)
    return [(own, wanted, size, None, {}) for own, wanted, size in rows]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_an_execution_at_once_has_the_bits_of_its_micro_batches_in_turn(kind):
    """Counts are taken of all at once; other metrics see one micro-batch after another."""
    seen = []

    def rows(prediction, target):
        seen.append(len(prediction))
        return prediction.double().mean(1)

    metrics = [*COUNTS, "perplexity", rows]
    target = CLASSES.clone()
    target[::5] = -100
    logits = LOGITS.to(kind)
    together = resolve_metrics(metrics)
    together.update_all(cut(logits, target))
    assert seen == list(UNEVEN)
    assert together.compute() == fed(metrics, logits, target)


def calls_of_an_execution(device_iterations, metrics):
    """Python functions that are called between the two hooks of the second execution."""
    counted = []

    def begin(batch, logs):
        if batch:
            sys.setprofile(lambda frame, event, _: counted.append(event == "call"))

    model = ipufit.Model(nn.Linear(4, 3), engine="embedded")
    model.compile("adam", "cross_entropy", metrics=metrics, jit="graph")
    x, y = torch.rand(8 * device_iterations, 4), torch.zeros(8 * device_iterations).long()
    end = LambdaCallback(
        on_train_batch_begin=begin, on_train_batch_end=lambda batch, logs: sys.setprofile(None)
    )
    how = {"batch_size": 4, "device_iterations": device_iterations, "verbose": 0}
    model.fit(x, y, callbacks=[end], **how)
    return sum(counted)


@pytest.mark.long
def test_accuracy_calls_little_for_each_micro_batch():
    """What is done once an execution is not counted; 10 calls are left, of 60 with the update."""
    short, long = (
        calls_of_an_execution(count, ["accuracy"]) - calls_of_an_execution(count, None)
        for count in (8, 40)
    )
    assert (long - short) / 32 <= 12


def test_only_what_is_alike_is_counted_at_once():
    """Rows of two micro-batches that fit together by chance are not looked at together."""
    metrics = resolve_metrics(["accuracy"])
    with pytest.raises(MetricError, match=r"got prediction of shape \(2, 8\)"):
        metrics.update_all(
            [(LOGITS[:2], CLASSES[:3], 2, None, {}), (LOGITS[2:5], CLASSES[3:5], 3, None, {})]
        )


def test_weighted_micro_batches_are_taken_in_turn():
    weight = torch.rand(SAMPLES, dtype=torch.float64)
    weighted, plain = (resolve_metrics(None, ["accuracy"]) for _ in range(2))
    cuts = zip(cut(LOGITS, CLASSES), weight.split(UNEVEN))
    parts = [(p, t, n, w, {}) for (p, t, n, *_), w in cuts]
    weighted.update_all(parts)
    for part in parts:
        plain.update(*part)
    assert weighted.compute() == plain.compute()


def test_what_cannot_be_counted_is_told_of_its_own_micro_batch():
    """As without counting at once: the error names the values of the third one alone."""
    probabilities = torch.full((6, 1), 0.5)
    probabilities[4], probabilities[0] = 3.0, 0.25
    metrics = resolve_metrics(["accuracy"])
    with pytest.raises(MetricError, match=r"got values from 0\.5 to 3"):
        metrics.update_all(cut(probabilities, torch.ones(6, 1), (2, 2, 2)))
    # As in turn, the first two are counted.
    assert metrics.compute() == {"accuracy": 0.0}


def test_executions_that_wait_are_counted_when_somebody_looks(monkeypatch):
    """Of one form, they are looked at together; whoever asks, and whenever, gets all of them."""
    looked = []
    once = MetricSet._update

    def update(self, metrics, seen):
        looked.append(seen[2])
        once(self, metrics, seen)

    monkeypatch.setattr(MetricSet, "_update", update)
    metrics, in_turn = resolve_metrics(["accuracy"]), resolve_metrics(["accuracy"])
    for end, part in enumerate(cut(LOGITS, CLASSES), 1):
        metrics.update_all([part])
        once(in_turn, in_turn._metrics, part)
        if end in (3, 5):
            assert metrics.compute() == in_turn.compute()
    # The first of a form shows that the metric takes it.
    assert looked == [7, 1 + 7, 5 + 3]
    metrics.update_all([part])
    once(in_turn, in_turn._metrics, part)
    copied = resolve_metrics(["accuracy"])
    copied.load_state_dict(metrics.state_dict())
    assert copied.compute() == in_turn.compute()


def test_what_waits_is_bounded():
    """Before a few megabytes of outputs lie there, they are counted."""
    metrics = resolve_metrics(["accuracy"])
    logits, classes = torch.rand(1000, 5), torch.zeros(1000).long()
    lengths = []
    for _ in range(200):
        metrics.update_all([(logits, classes, 1000, None, {})])
        lengths.append(len(metrics._pending))
    assert max(lengths) == 2**18 // 6000
    assert lengths.count(0) > 3


def test_what_waits_is_not_what_a_callback_changes():
    """The outputs that it is shown are its own; the metrics are those of the program's."""
    metrics = resolve_metrics(["accuracy"])
    for _ in range(3):
        logits, classes = LOGITS.clone(), CLASSES.clone()
        metrics.update_all([(logits, classes, SAMPLES, None, {})])
        logits.neg_(), classes.fill_(0)
    assert metrics.compute() == fed(["accuracy"], LOGITS, CLASSES)


def test_what_depends_on_values_does_not_wait():
    """Probabilities out of bounds are an error of their own execution."""
    metrics = resolve_metrics(["accuracy"])
    good, bad = torch.full((4, 1), 0.5), torch.full((4, 1), 2.0)
    metrics.update_all([(good, torch.ones(4, 1), 4, None, {})])
    with pytest.raises(MetricError, match="probabilities between 0 and 1"):
        metrics.update_all([(bad, torch.ones(4, 1), 4, None, {})])


def test_a_new_epoch_forgets_what_waits():
    metrics = resolve_metrics(["accuracy"])
    for _ in range(3):
        metrics.update_all([(LOGITS, CLASSES, SAMPLES, None, {})])
    metrics.reset()
    metrics.update_all([(LOGITS, LOGITS.argmax(1), SAMPLES, None, {})])
    assert metrics.compute() == {"accuracy": 1.0}


def test_many_small_values_are_summed_in_float64():
    """In float32 a million samples of a float32 model lose the last digits that one compares."""
    metrics = resolve_metrics("mse")
    prediction = torch.full((1000,), 0.1)
    for _ in range(100):
        metrics.update(prediction, torch.zeros(1000), 1000)
    exact = prediction.double().square()[0].item()
    assert metrics.compute()["mse"] == pytest.approx(exact, rel=TOLERANCE)


def test_ignored_classes_are_left_out_as_in_cross_entropy():
    """Padding tokens counted as errors would hide how good a language model is."""
    target = CLASSES.clone()
    target[::3] = -100
    kept = target != -100
    values = fed(["accuracy", "perplexity", "top_5_accuracy"], LOGITS, target)
    expected = fed(
        ["accuracy", "perplexity", "top_5_accuracy"], LOGITS[kept], CLASSES[kept], [kept.sum()]
    )
    assert values == pytest.approx(expected, rel=TOLERANCE)
    assert values["perplexity"] == pytest.approx(
        functional.cross_entropy(LOGITS, target).exp().item(), rel=TOLERANCE
    )


def test_low_precision_predictions_are_measured_in_float64():
    """The error of a bfloat16 model is not to be rounded to bfloat16 once more."""
    prediction = LOGITS.bfloat16()
    expected = functional.mse_loss(prediction.double(), REALS).item()
    assert one("mse", prediction, REALS) == pytest.approx(expected, rel=TOLERANCE)


def test_before_the_first_micro_batch_the_value_is_nan():
    """A zero would look like a result."""
    values = resolve_metrics(["accuracy", "rmse", "perplexity"]).compute()
    assert list(values) == ["accuracy", "rmse", "perplexity"]
    assert all(math.isnan(value) for value in values.values())


def test_an_infinite_perplexity_is_infinite():
    """An OverflowError at the end of an epoch would lose the epoch."""
    logits = torch.tensor([[0.0, 1e6]])
    assert one("perplexity", logits, torch.tensor([0]), [1]) == math.inf


@pytest.mark.parametrize(
    ("name", "prediction", "target", "text"),
    [
        (
            "accuracy",
            (6, 4),
            torch.zeros(6, 4),
            "metric 'accuracy' needs class indices, or one value per sample, got prediction and "
            "target of one shape (6, 4). For one-hot targets, use 'categorical_accuracy'; for "
            "several labels, 'binary_accuracy_with_logits', or 'binary_accuracy' where the module "
            "returns probabilities.",
        ),
        (
            "accuracy",
            (6, 4),
            torch.zeros(6),
            "metric 'accuracy' needs a prediction of shape (batch, classes, ...) and integer class "
            "indices of shape (batch, ...), got prediction of shape (6, 4), dtype float32 and "
            "target of shape (6,), dtype float32. Convert the target with .long().",
        ),
        (
            "sparse_categorical_accuracy",
            (6, 4),
            torch.zeros(6, 4),
            "metric 'sparse_categorical_accuracy' needs a prediction of shape (batch, classes, "
            "...) and integer class indices of shape (batch, ...), got prediction of shape (6, 4), "
            "dtype float32 and target of shape (6, 4), dtype float32. For one-hot targets, pass "
            "target.argmax(1).",
        ),
        (
            "accuracy",
            (6, 4, 5),
            torch.zeros(6, dtype=torch.int64),
            "metric 'accuracy' needs a prediction of shape (batch, classes, ...) and integer class "
            "indices of shape (batch, ...), got prediction of shape (6, 4, 5), dtype float32 and "
            "target of shape (6,), dtype int64. Pass a callable metric(prediction, target) for "
            "other shapes.",
        ),
        (
            "top_5_accuracy",
            (6, 4),
            torch.zeros(6, dtype=torch.int64),
            "metric 'top_5_accuracy' needs at least 5 classes, got 4. Use 'top_3_accuracy' or "
            "less; over all classes it is always 1.",
        ),
        (
            "categorical_accuracy",
            (6, 1),
            torch.zeros(6, 1),
            "metric 'categorical_accuracy' needs at least two classes in dimension 1, got shape "
            "(6, 1). Use 'binary_accuracy'.",
        ),
        (
            "binary_accuracy",
            (6, 4),
            torch.zeros(6),
            "metric 'binary_accuracy' needs prediction and target of one shape, got prediction (6, "
            "4) and target (6,). Make both shapes equal.",
        ),
    ],
)
def test_what_a_named_metric_cannot_take_is_refused_by_the_probe(name, prediction, target, text):
    """An hour of training is lost if the metric fails at the end of the epoch."""
    assert message(resolve_metrics(name).probe, torch.rand(prediction), target, 6) == text


@pytest.mark.parametrize(
    ("name", "prediction", "target"),
    [
        ("mse", (6, 1), torch.rand(6)),
        ("mae", (6,), torch.rand(6, 1)),
        ("binary_accuracy", (6, 1), torch.arange(6) % 2),
        ("accuracy", (6, 1), torch.arange(6) % 2),
        ("accuracy", (6,), torch.arange(6)[:, None] % 2),
        ("accuracy", (6, 4), torch.arange(6)[:, None] % 4),
        ("sparse_categorical_accuracy", (6, 4), torch.arange(6)[:, None] % 4),
        ("top_2_accuracy", (6, 4), torch.arange(6)[:, None] % 4),
        ("perplexity", (6, 4, 2), torch.arange(12).reshape(6, 2, 1) % 4),
    ],
)
def test_a_last_dimension_of_size_one_is_no_difference(name, prediction, target):
    """The metric beside a loss takes the target that the loss takes."""
    prediction = torch.rand(prediction)
    alike = target.squeeze(-1) if target.dim() > 1 else target
    if name in ("mse", "mae", "binary_accuracy") or prediction.shape[1:] in ((), (1,)):
        alike = target.reshape(prediction.shape)
    assert alike.shape != target.shape
    values = []
    for one in (target, alike):
        metrics = resolve_metrics(name)
        metrics.update(prediction, one, 6)
        values.append(metrics.compute())
    assert values[0] == values[1]


def test_accuracy_of_logits_against_one_half_is_refused():
    """Of logits, 0.5 is the wrong threshold, and the share it gives looks believable."""
    metrics = resolve_metrics("accuracy")
    prediction, target = torch.tensor([-1.5, 0.25, 4.0]), torch.tensor([0, 0, 1])
    assert message(metrics.update, prediction, target, 3) == (
        "metric 'accuracy' needs probabilities between 0 and 1, got values from -1.5 to 4. For "
        "logits, use 'binary_accuracy_with_logits'."
    )


def test_named_metrics_take_single_tensors():
    """Which of several tensors is meant, only the user knows."""
    advice = "Pass a callable metric(prediction, target) that picks its tensors."
    metrics = resolve_metrics("mse")
    assert message(metrics.probe, (REALS, REALS), REALS, SAMPLES) == (
        f"metric 'mse' takes one tensor as prediction, got tuple. {advice}"
    )
    assert message(metrics.probe, REALS, {"y": REALS}, SAMPLES) == (
        f"metric 'mse' takes one tensor as target, got dict. {advice}"
    )


# ---- callables ----------------------------------------------------------------------------------


def bias(prediction, target):
    """One number for the micro-batch, not for a sample."""
    return (prediction - target).mean()


def test_a_scalar_is_weighted_with_its_samples():
    """The last micro-batch of an epoch is smaller and must count less."""
    expected = pytest.approx((LOGITS - REALS).mean().item(), rel=TOLERANCE)
    assert fed(bias, LOGITS, REALS) == {"bias": expected}
    assert one(lambda p, t: bias(p, t).item(), LOGITS, REALS) == expected
    assert one(lambda p, t: np.float32(1.0), LOGITS, REALS) == 1.0


def test_values_per_sample_are_averaged_over_samples():
    """It is the exact form, whatever the metric does within a sample."""
    worst = functional.l1_loss(LOGITS, REALS, reduction="none").max(1).values.mean().item()
    assert one(lambda p, t: (p - t).abs().max(1).values, LOGITS, REALS) == pytest.approx(
        worst, rel=TOLERANCE
    )
    every = functional.l1_loss(LOGITS, REALS).item()
    assert one(lambda p, t: (p - t).abs(), LOGITS, REALS) == pytest.approx(every, rel=TOLERANCE)
    hits = (LOGITS.argmax(1) == CLASSES).double().mean().item()
    assert one(lambda p, t: p.argmax(1) == t, LOGITS, CLASSES) == pytest.approx(hits, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("result", "came"),
    [
        (torch.zeros(5), "shape (5,), dtype float32"),
        (torch.zeros(1), "shape (1,), dtype float32"),
        (torch.zeros(4, 0), "shape (4, 0), dtype float32"),
        (torch.zeros((), dtype=torch.complex64), "shape (), dtype complex64"),
        (None, "NoneType"),
        ((0.5, 0.5), "tuple ([0] float; [1] float)"),
    ],
)
def test_a_callable_that_gives_something_else_is_refused(result, came):
    """Averaging whatever comes would put a number into the History that nobody defined."""
    metrics = resolve_metrics({"mine": lambda p, t: result})
    assert message(metrics.probe, torch.rand(4, 2), torch.rand(4, 2), 4) == (
        "metric 'mine' must give a number, or a tensor of 4 values, one for each sample, got "
        f"{came}. Return a torch tensor, with all other dimensions reduced by .mean()."
    )


def test_a_callable_gets_nested_values_as_they_are_and_without_gradients():
    """It is the way to outputs and targets that no name takes, and no graph may pile up."""
    seen = []

    def first(prediction, target):
        seen.append(torch.is_grad_enabled())
        return prediction["a"].sum() - target[0].sum()

    metrics = resolve_metrics(first)
    metrics.update({"a": torch.ones(3)}, (torch.zeros(3),), 3)
    assert metrics.compute() == {"first": 3.0}
    assert seen == [False]


# ---- objects of torchmetrics --------------------------------------------------------------------


def collection():
    """Two metrics that torchmetrics computes from one shared state."""
    return torchmetrics.MetricCollection(
        [
            torchmetrics.classification.MulticlassPrecision(8),
            torchmetrics.classification.MulticlassRecall(8),
        ]
    )


def test_an_object_sees_every_micro_batch():
    """What is no mean over samples can only be computed from all of them."""
    expected = torchmetrics.classification.MulticlassF1Score(8)(LOGITS, CLASSES).item()
    values = fed(torchmetrics.classification.MulticlassF1Score(8), LOGITS, CLASSES)
    assert values == {"MulticlassF1Score": pytest.approx(expected, rel=1e-6)}


def test_a_collection_is_flattened():
    """History holds numbers, one list for each name."""
    expected = {name: value.item() for name, value in collection()(LOGITS, CLASSES).items()}
    assert fed(collection(), LOGITS, CLASSES) == pytest.approx(expected, rel=1e-6)
    metrics = resolve_metrics([collection(), "accuracy"])
    assert metrics.names == ("MulticlassPrecision", "MulticlassRecall", "accuracy")
    prefixed = fed({"own": collection()}, LOGITS, CLASSES)
    assert prefixed == pytest.approx(
        {f"own_{name}": value for name, value in expected.items()}, rel=1e-6
    )


class _Spread:
    """Anything with the three methods is taken, torchmetrics or not."""

    def __init__(self, wrap=lambda values: {"low": values.min(), "range": {"high": 1.0}}):
        self.wrap = wrap
        self.values = []

    def update(self, prediction, target):
        """Keep a micro-batch."""
        self.values.append(prediction - target)

    def compute(self):
        """A nested result."""
        return self.wrap(torch.cat(self.values))

    def reset(self):
        """Forget all."""
        self.values = []


def test_the_three_methods_are_enough():
    """Users have metrics of their own in that style, and torchmetrics is not imported to ask."""
    low = (LOGITS - REALS).min().item()
    assert fed(_Spread(), LOGITS, REALS) == {"low": low, "range_high": 1.0}


def test_the_names_of_a_result_are_known_after_the_probe():
    """Progress bars and CSV headers are written before the first epoch ends."""
    metrics = resolve_metrics(["mse", _Spread()])
    assert metrics.names == ("mse", "_Spread")
    metrics.probe(LOGITS, REALS, SAMPLES)
    assert metrics.names == ("mse", "low", "range_high")
    assert metrics.fresh().names == ("mse", "low", "range_high")
    values = metrics.compute()
    assert list(values) == ["mse", "low", "range_high"]
    assert all(math.isnan(value) for value in values.values())


def test_the_users_object_is_left_alone():
    """It may hold the state of the user's own evaluation."""
    own = torchmetrics.MeanSquaredError()
    own.update(torch.ones(2), torch.zeros(2))
    metrics = resolve_metrics(own)
    metrics.probe(LOGITS, REALS, SAMPLES)
    metrics.update(LOGITS, REALS, SAMPLES)
    metrics.reset()
    assert own.compute().item() == 1.0
    own.update(torch.full((2,), 3.0), torch.zeros(2))
    assert math.isnan(metrics.compute()["MeanSquaredError"])


def test_state_of_the_users_object_is_not_taken_over():
    """A metric that was tried out before fit would start its first epoch with foreign samples."""
    own = torchmetrics.MeanSquaredError()
    own.update(torch.full((2,), 100.0), torch.zeros(2))
    expected = functional.mse_loss(LOGITS, REALS).item()
    assert one(own, LOGITS, REALS) == pytest.approx(expected, rel=1e-6)


def test_a_result_that_is_no_scalar_is_refused_by_the_probe():
    """One value per class has no place in a History of numbers."""
    metrics = resolve_metrics(torchmetrics.classification.MulticlassAccuracy(8, average=None))
    assert message(metrics.probe, LOGITS, CLASSES, SAMPLES) == (
        "metric 'MulticlassAccuracy' must give a scalar, got shape (8,), dtype float32. Average "
        "it, for example with average='macro', or wrap it in a metric that does."
    )
    pair = _Spread(lambda values: (values.min(), 1.0))
    assert message(resolve_metrics({"pair": pair}).probe, LOGITS, REALS, SAMPLES) == (
        "metric 'pair' must give a scalar, got tuple ([0] shape (), dtype float64; [1] float). "
        "Average it, for example with average='macro', or wrap it in a metric that does."
    )


# ---- sets ---------------------------------------------------------------------------------------


def all_kinds():
    """One metric of each kind."""
    return resolve_metrics(["mse", bias, torchmetrics.MeanAbsoluteError()])


def test_training_and_validation_share_no_state():
    """Validation in the middle of an epoch must not leak into the training values."""
    training = all_kinds()
    training.update(LOGITS, REALS, SAMPLES)
    before = training.compute()
    validation = training.fresh()
    assert all(math.isnan(value) for value in validation.compute().values())
    validation.update(REALS, REALS, SAMPLES)
    assert validation.compute() == {"mse": 0.0, "bias": 0.0, "MeanAbsoluteError": 0.0}
    assert training.compute() == before


def test_reset_forgets_everything():
    """Values of an epoch that hold those before are a known bug of other libraries."""
    metrics = all_kinds()
    metrics.update(LOGITS, REALS, SAMPLES)
    metrics.reset()
    assert all(math.isnan(value) for value in metrics.compute().values())
    metrics.update(REALS, REALS, SAMPLES)
    assert metrics.compute() == {"mse": 0.0, "bias": 0.0, "MeanAbsoluteError": 0.0}


def test_a_micro_batch_of_no_samples_changes_nothing():
    """Its mean would be NaN, and NaN times zero samples is still NaN."""
    metrics = all_kinds()
    metrics.update(LOGITS, REALS, SAMPLES)
    before = metrics.compute()
    metrics.update(LOGITS[:0], REALS[:0], 0)
    assert metrics.compute() == before


def test_an_empty_set_is_false():
    """Without metrics nobody needs the outputs on the host, and that copy is saved."""
    for empty in (MetricSet(), resolve_metrics(None), resolve_metrics([]), resolve_metrics({})):
        assert not empty
        assert empty.names == ()
        empty.probe(LOGITS, REALS, SAMPLES)
        empty.update(LOGITS, REALS, SAMPLES)
        assert empty.compute() == {}
    assert all_kinds()


def test_the_probe_leaves_no_trace():
    """The numbers of a run must not depend on whether its metrics were tried first."""

    def noisy(prediction, target):
        warnings.warn("noise", stacklevel=1)
        return torch.rand(()) + random.random() + np.random.rand()

    metrics = resolve_metrics(
        {"noisy": noisy, "mse": "mse", "mae": torchmetrics.MeanAbsoluteError(), "own": _Spread()}
    )
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.probe(LOGITS, REALS, SAMPLES)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2][1])
    assert all(math.isnan(value) for value in metrics.compute().values())


def test_the_probe_leaves_no_trace_when_it_fails():
    """A user who catches the error and goes on must find the generators where they were."""

    def failing(prediction, target):
        torch.rand(3)
        random.random()
        raise RuntimeError("mine")

    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(MetricError):
        resolve_metrics(failing).probe(LOGITS, REALS, SAMPLES)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_metric_that_fails_is_named_with_both_shapes():
    """A traceback from inside a metric shows neither which one nor what it was given."""

    def failing(prediction, target):
        raise RuntimeError("sizes differ.")

    metrics = resolve_metrics(["mse", failing])
    outputs = {"a": REALS[:, 0].float(), "b": REALS}
    text = (
        "metric 'failing' must take the module's outputs and the targets, got prediction of dict "
        "(['a'] shape (23,), dtype float32; ['b'] shape (23, 8), dtype float64) and target of "
        "shape (23,), dtype int64, and failed with RuntimeError: sizes differ. Pass a metric for "
        "these, or a callable metric(prediction, target) that converts them."
    )
    with pytest.raises(MetricError) as caught:
        resolve_metrics(failing).probe(outputs, CLASSES, SAMPLES)
    assert str(caught.value) == text
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(MetricError, match="metric 'failing' must take"):
        metrics.update(REALS, REALS, SAMPLES)


def test_an_object_that_fails_is_named_with_both_shapes():
    """Its own text speaks of preds and target, which are nobody's names here."""
    metrics = resolve_metrics(torchmetrics.MeanSquaredError())
    with pytest.raises(MetricError) as caught:
        metrics.probe(torch.rand(4, 2), torch.rand(4), 4)
    assert str(caught.value).startswith(
        "metric 'MeanSquaredError' must take the module's outputs and the targets, got prediction "
        "of shape (4, 2), dtype float32 and target of shape (4,), dtype float32, and failed with "
    )


# ---- names --------------------------------------------------------------------------------------


def test_one_metric_a_list_and_a_dict_are_accepted():
    """These are the forms that Keras and torchmetrics users bring."""
    own = torchmetrics.MeanSquaredError()
    assert resolve_metrics("accuracy").names == ("accuracy",)
    assert resolve_metrics(bias).names == ("bias",)
    assert resolve_metrics(own).names == ("MeanSquaredError",)
    assert resolve_metrics(("mse", bias, own)).names == ("mse", "bias", "MeanSquaredError")
    assert resolve_metrics({"a": "mse", "b": bias, "c": own}).names == ("a", "b", "c")
    assert fed({"a": "MSE"}, LOGITS, REALS).keys() == {"a"}


def test_callables_are_called_by_their_names():
    """A History full of <lambda> tells nothing, and two of them must be told apart."""
    metrics = [lambda p, t: 0.0, lambda p, t: 1.0, functools.partial(bias), nn.MSELoss()]
    assert resolve_metrics(metrics).names == ("metric", "metric_1", "bias", "MSELoss")
    values = fed([lambda p, t: 0.0, lambda p, t: 1.0], LOGITS, REALS)
    assert values == {"metric": 0.0, "metric_1": 1.0}


@pytest.mark.parametrize(
    ("metrics", "name"),
    [
        (["mse", "mse"], "mse"),
        ([bias, {"bias": bias}["bias"]], "bias"),
        ([torchmetrics.MeanSquaredError(), torchmetrics.MeanSquaredError()], "MeanSquaredError"),
        ([collection(), collection()], "MulticlassPrecision"),
    ],
)
def test_a_name_that_comes_twice_is_refused(metrics, name):
    """The second would overwrite the first in the History."""
    assert message(resolve_metrics, metrics, kind=ConfigurationError) == (
        f"logged values must have different names, got {name!r} twice. Choose another name; rename "
        f"a metric with metrics={{'{name}_2': metric}}."
    )


def test_a_name_that_comes_twice_among_results_is_refused_by_the_probe():
    """What a metric returns is known only once it has returned."""
    metrics = resolve_metrics({"low": "mse", "b": "mae"})
    metrics.probe(LOGITS, REALS, SAMPLES)
    clash = resolve_metrics([_Spread(), lambda p, t: 0.0])
    clash.probe(LOGITS, REALS, SAMPLES)

    def low(prediction, target):
        return 0.0

    text = message(
        resolve_metrics([_Spread(), low]).probe, LOGITS, REALS, SAMPLES, kind=ConfigurationError
    )
    assert text.startswith("logged values must have different names, got 'low' twice.")


@pytest.mark.parametrize("name", [*RESERVED, "val_mse"])
def test_names_of_what_ipufit_logs_itself_are_reserved(name):
    """A metric called loss would take the place of the loss in the History."""
    assert message(resolve_metrics, {name: "mse"}, kind=ConfigurationError) == (
        "the name of a logged value must be free, and ipufit itself logs batch, epoch, event, "
        "learning_rate, loss, loss_scale, samples, skipped_updates, update, updates and val_..., "
        f"got {name!r}. Choose another name; rename a metric with metrics={{'name': metric}}."
    )


@pytest.mark.parametrize(("name", "came"), [(3, "3"), ("", "''"), (None, "None")])
def test_what_is_logged_needs_a_text_as_its_name(name, came):
    """It becomes the key of a History and the heading of a CSV file."""
    assert message(check_log_name, name, kind=ConfigurationError) == (
        f"the name of a logged value must be a string, got {came}. Write for example 'error'."
    )


def test_a_good_name_comes_back():
    """The check can stand where the name is used."""
    assert check_log_name("error", {"other"}) == "error"


@pytest.mark.parametrize(("key", "came"), [(3, "3"), ("", "''")])
def test_keys_of_a_dict_are_names(key, came):
    """They become the keys of the History."""
    assert message(resolve_metrics, {key: "mse"}, kind=ConfigurationError) == (
        f"metrics as a dict must have names as keys, got {came}. Write {{'name': metric}}."
    )


def test_an_unknown_name_gets_the_nearest():
    """A typing error should cost a second, not a search in the manual."""
    assert message(resolve_metrics, "acuracy", kind=UnknownNameError) == (
        f"unknown metric 'acuracy'. Did you mean 'accuracy'? Known names: {KNOWN}."
    )
    assert message(resolve_metrics, "top_0_accuracy", kind=UnknownNameError) == (
        f"unknown metric 'top_0_accuracy'. Did you mean 'top_5_accuracy'? Known names: {KNOWN}."
    )


@pytest.mark.parametrize(
    ("metric", "came"),
    [
        (3, "int. Pass for example metrics=['accuracy']."),
        ([None], "NoneType. Pass for example metrics=['accuracy']."),
        (
            torchmetrics.MeanSquaredError,
            "the class MeanSquaredError. Pass an instance, MeanSquaredError(...).",
        ),
    ],
)
def test_anything_else_is_refused(metric, came):
    """The reader needs what is accepted, not the type check that failed."""
    assert message(resolve_metrics, metric, kind=ConfigurationError) == (
        "a metric must be a name, a callable (prediction, target), or an object of torchmetrics, "
        f"got {came}"
    )


@pytest.mark.long
def test_torchmetrics_is_not_imported():
    """It takes seconds, which nobody should wait who uses none of it."""
    code = (
        "import sys, ipufit.metrics.resolve as m; m.resolve_metrics(['accuracy', print]); "
        "sys.exit('torchmetrics' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_object_asks_no_other_process_by_itself():
    """Its state is joined once, in one order for all; what asks again would count twice."""

    def asked(*_, **__):
        raise AssertionError("it asked")

    talks = {"distributed_available_fn": lambda: True, "dist_sync_fn": asked}
    metrics = resolve_metrics(torchmetrics.MeanSquaredError(**talks))
    metrics.update(torch.ones(2), torch.zeros(2), 2)
    assert metrics.compute() == {"MeanSquaredError": 1.0}
