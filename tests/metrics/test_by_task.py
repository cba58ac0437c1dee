"""Metrics by name that are no means over samples, computed by torchmetrics."""

import math

import pytest
import torch
from torch import nn

import ipufit
from ipufit import metrics
from ipufit.errors import ConfigurationError, MetricError
from ipufit.metrics.resolve import resolve_metrics
from tests.told import message

SAMPLES, UNEVEN = 23, (7, 1, 7, 5, 3)
_GENERATOR = torch.Generator().manual_seed(7)
SHARES = torch.rand(SAMPLES, 4, generator=_GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(0, 4, (SAMPLES,), generator=_GENERATOR)
LABELS = (torch.rand(SAMPLES, 4, generator=_GENERATOR) > 0.5).double()
REALS = torch.randn(SAMPLES, 4, generator=_GENERATOR, dtype=torch.float64)
NEAR = REALS + torch.randn(SAMPLES, 4, generator=_GENERATOR, dtype=torch.float64)
# torchmetrics counts in integers and divides in float32.
TOLERANCE = 1e-6


def fed(metric, prediction, target, sizes=UNEVEN):
    """A set that has seen the samples in micro-batches of these sizes."""
    one = resolve_metrics(metric)
    one.probe(torch.rand_like(prediction), target, len(prediction))
    for p, t in zip(prediction.split(sizes), target.split(sizes)):
        one.update(p, t, len(p))
    return one


def value(metric, prediction, target, sizes=UNEVEN):
    """The only value of a metric over the samples."""
    (number,) = fed(metric, prediction, target, sizes).compute().values()
    return number


def counted(prediction, target):
    """True positives, false positives and false negatives over all elements at 0.5."""
    yes, right = prediction > 0.5, target > 0.5
    return [int(each.sum()) for each in (yes & right, yes & ~right, ~yes & right)]


def by_class(prediction, classes):
    """The same of each class, the largest of which is predicted."""
    rows = range(prediction.shape[1])
    chosen = prediction.argmax(1)
    return [counted((chosen == c).double(), (classes == c).double()) for c in rows]


@pytest.mark.parametrize("columns", [slice(0, 1), slice(0, 4)], ids=["one", "several"])
def test_yes_and_no_are_counted_over_all_elements(columns):
    """As in Keras, whatever the shape."""
    prediction, target = SHARES[:, columns], LABELS[:, columns]
    hits, wrong, missed = counted(prediction, target)
    assert value("precision", prediction, target) == pytest.approx(hits / (hits + wrong), TOLERANCE)
    assert value("recall", prediction, target) == pytest.approx(hits / (hits + missed), TOLERANCE)


def test_class_indices_make_it_the_mean_over_classes():
    """There the task is known, and so is the number of classes."""
    rows = by_class(SHARES, CLASSES)
    precision = sum(hits / (hits + wrong) for hits, wrong, _ in rows) / 4
    f1 = sum(2 * hits / (2 * hits + wrong + missed) for hits, wrong, missed in rows) / 4
    union = sum(hits / (hits + wrong + missed) for hits, wrong, missed in rows) / 4
    assert value("precision", SHARES, CLASSES) == pytest.approx(precision, TOLERANCE)
    assert value("f1_score", SHARES, CLASSES) == pytest.approx(f1, TOLERANCE)
    assert value("mean_io_u", SHARES, CLASSES) == pytest.approx(union, TOLERANCE)


@pytest.mark.long("ipu-standin")
def test_one_hot_targets_are_classes_where_keras_takes_them_so():
    """The F1 score and the intersection look for the largest of a row; precision does not."""
    hot = nn.functional.one_hot(CLASSES, 4).double()
    for name in ("f1_score", "mean_io_u"):
        assert value(name, SHARES, hot) == value(name, SHARES, CLASSES)
    of_classes = metrics.Precision(task="multiclass")
    assert value(of_classes, SHARES, hot) == value("precision", SHARES, CLASSES)
    assert value("precision", SHARES, hot) != value("precision", SHARES, CLASSES)


@pytest.mark.long("ipu-standin")
def test_ignored_classes_are_left_out_as_in_cross_entropy():
    """A metric beside the loss must leave out the same."""
    target = CLASSES.clone()
    target[::3] = -100
    left = target != -100
    for name in ("precision", "f1_score", "auc", "mean_io_u"):
        expected = value(name, SHARES[left], CLASSES[left], (int(left.sum()),))
        assert value(name, SHARES, target) == pytest.approx(expected, TOLERANCE), name


def test_the_area_under_the_curve_is_that_of_pairs():
    """The share of pairs of a yes and a no that are in order, but for ties within a threshold."""
    prediction, target = SHARES[:, 0], LABELS[:, 0]
    yes, no = prediction[target > 0.5], prediction[target < 0.5]
    pairs = (yes.unsqueeze(1) > no).double().mean()
    fine = metrics.AUC(num_thresholds=20001)
    assert value(fine, prediction, target) == pytest.approx(float(pairs), 1e-3)


def test_correlations_of_one_output_are_over_all_samples():
    """Within a sample of one number there is none."""
    one, other = REALS[:, :1], NEAR[:, :1]
    expected = float(torch.corrcoef(torch.cat([one, other], 1).T)[0, 1])
    assert value("pearson_correlation", one, other) == pytest.approx(expected, 1e-9)
    x, y = one[:, 0], other[:, 0]
    covariance = ((x - x.mean()) * (y - y.mean())).sum() / (SAMPLES - 1)
    expected = float(2 * covariance / (x.var() + y.var() + (x.mean() - y.mean()).square()))
    assert value("concordance_correlation", one, other) == pytest.approx(expected, 1e-9)


def test_correlations_of_several_outputs_are_within_samples():
    """As in Keras, whose axis is the last one."""
    rows = [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(REALS, NEAR)]
    assert value("pearson_correlation", REALS, NEAR) == pytest.approx(sum(rows) / SAMPLES, 1e-9)


def test_the_explained_variance_is_the_mean_over_outputs():
    """1 - residual / total, of each output over all samples."""
    residual = (NEAR - REALS).square().sum(0)
    total = (NEAR - NEAR.mean(0)).square().sum(0)
    expected = float((1 - residual / total).mean())
    assert value("r2_score", REALS, NEAR) == pytest.approx(expected, 1e-9)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mape", lambda p, t: (100 * (p - t).abs() / t.abs()).mean()),
        ("msle", lambda p, t: (p.clamp(min=0).log1p() - t.clamp(min=0).log1p()).square().mean()),
        ("log_cosh", lambda p, t: (p - t).cosh().log().mean()),
        ("cosine_similarity", lambda p, t: nn.functional.cosine_similarity(p, t, 1).mean()),
        ("hinge", lambda p, t: (1 - t * p).clamp(min=0).mean()),
        ("squared_hinge", lambda p, t: (1 - t * p).clamp(min=0).square().mean()),
        ("kl_divergence", lambda p, t: (t * (t / p).log()).sum(1).mean()),
    ],
)
def test_names_that_are_means_are_exact(name, expected):
    """Nothing but sums is needed for these, in float64."""
    prediction, target = REALS, NEAR
    if name == "kl_divergence":
        prediction, target = SHARES.softmax(1), REALS.softmax(1)
    # Negative numbers count as the smallest positive one.
    assert value(name, prediction, target) == pytest.approx(
        float(expected(prediction, target)), 1e-6
    )


@pytest.mark.parametrize(
    "name", ["top_k_categorical_accuracy", "sparse_top_k_categorical_accuracy"]
)
def test_keras_names_of_the_five_best_are_top_5_accuracy(name):
    """They are the same share."""
    prediction = torch.rand(SAMPLES, 9, generator=_GENERATOR)
    assert value(name, prediction, CLASSES) == value("top_5_accuracy", prediction, CLASSES)


ALL = (
    *("auc", "precision", "recall", "f1_score", "fbeta_score", "mean_io_u"),
    *("r2_score", "pearson_correlation", "concordance_correlation"),
)


def inputs(name):
    """Prediction and target that a metric of this name takes."""
    is_of_numbers = "correlation" in name or name == "r2_score"
    return (REALS[:, :1], NEAR[:, :1]) if is_of_numbers else (SHARES, CLASSES)


@pytest.mark.parametrize("name", ALL)
def test_no_cut_into_micro_batches_changes_the_value(name):
    """Sums, not values of micro-batches, are kept."""
    whole = value(name, *inputs(name), (SAMPLES,))
    assert value(name, *inputs(name)) == pytest.approx(whole, TOLERANCE)


@pytest.mark.parametrize("name", ALL)
def test_processes_and_checkpoints_take_its_state_over(name):
    """What was seen in parts is what was seen at once."""
    prediction, target = inputs(name)
    parts = [
        fed(name, prediction[:9], target[:9], (9,)),
        fed(name, prediction[9:], target[9:], (14,)),
    ]
    empty = resolve_metrics(name)
    joined = empty.fresh()
    states = [part.state_dict() for part in (*parts, empty)]
    joined.load_state_dict(joined.merge_states(states))
    assert joined.compute()[name] == pytest.approx(value(name, prediction, target), TOLERANCE)
    resumed = resolve_metrics(name)
    resumed.load_state_dict(parts[0].state_dict())
    resumed.update(prediction[9:], target[9:], 14)
    assert resumed.compute()[name] == pytest.approx(value(name, prediction, target), TOLERANCE)


def test_before_the_first_micro_batch_the_value_is_nan():
    """There is nothing to compute, and no task to know."""
    empty = resolve_metrics(["auc", "r2_score"])
    assert all(math.isnan(number) for number in empty.compute().values())
    again = empty.fresh()
    again.load_state_dict(again.merge_states([empty.state_dict(), empty.state_dict()]))
    assert all(math.isnan(number) for number in again.compute().values())


def test_logits_are_refused_unless_they_are_said_to_be():
    """Read as probabilities they would give a number that means nothing."""
    text = message(lambda: fed("precision", REALS, LABELS), kind=MetricError)
    low, high = float(REALS[:7].min()), float(REALS[:7].max())
    assert (
        f"metric 'precision' needs probabilities between 0 and 1, got values from {low:.3g} to "
        f"{high:.3g}. For logits, use ipufit.metrics.Precision(from_logits=True)."
    ) in text
    expected = value("precision", REALS.sigmoid(), LABELS)
    assert value(metrics.Precision(from_logits=True), REALS, LABELS) == expected
    expected = value("auc", REALS.softmax(1), CLASSES)
    assert value(metrics.AUC(from_logits=True), REALS, CLASSES) == expected


@pytest.mark.parametrize(
    "metric", [metrics.F1Score(num_classes=5), metrics.Recall(task="multilabel")]
)
def test_what_does_not_fit_the_data_is_refused_by_the_probe(metric):
    """Before an hour of work is lost."""
    text = message(lambda: fed(metric, SHARES, CLASSES), kind=MetricError)
    assert "needs a prediction of shape (batch, classes, ...)" in text
    assert f"Pass another task or num_classes to ipufit.metrics.{type(metric).__name__}." in text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: metrics.Precision(task="twoclass"),
            "task of Precision must be one of None, 'binary', 'multiclass', 'multilabel', got "
            "'twoclass'.",
        ),
        (
            lambda: metrics.F1Score(average="none"),
            "average of F1Score must be one of None, 'macro', 'micro', 'weighted', got 'none'.",
        ),
        (
            lambda: metrics.Recall(threshold=1),
            "threshold of Recall must be between 0 and 1, got 1. Try 0.5.",
        ),
        (
            lambda: metrics.MeanIoU(num_classes=1),
            "num_classes of MeanIoU must be an integer of at least 2 or None, got 1. Leave it out "
            "to take the size of the prediction's dimension 1.",
        ),
        (
            lambda: metrics.AUC(num_thresholds=2),
            "num_thresholds of AUC must be an integer of at least 3, got 2. Keras has 200.",
        ),
    ],
)
def test_arguments_that_cannot_work_are_refused(make, text):
    """Where they are written, not as fit begins."""
    assert message(make, kind=ConfigurationError) == text


@pytest.mark.parametrize(
    ("metric", "target", "text"),
    [
        (
            metrics.Precision(threshold=0.6),
            CLASSES,
            "threshold of ipufit.metrics.Precision has no effect for task='multiclass', which "
            "follows from prediction and target, got 0.6. Leave it out, or pass another task.",
        ),
        (
            metrics.AUC(average="weighted"),
            LABELS,
            "average of ipufit.metrics.AUC has no effect for task='binary', which follows from "
            "prediction and target, got 'weighted'. Leave it out, or pass another task.",
        ),
        (
            metrics.Recall(num_classes=4),
            LABELS,
            "num_classes of ipufit.metrics.Recall has no effect for task='binary', which follows "
            "from prediction and target, got 4. Leave it out, or pass another task.",
        ),
    ],
)
def test_an_argument_without_effect_is_refused_by_the_probe(metric, target, text):
    """Nothing is ignored in silence."""
    assert text in message(lambda: fed(metric, SHARES, target), kind=MetricError)


def test_one_that_knows_no_weights_is_refused_among_weighted_metrics():
    """Unweighted it would be another number under a promising name."""
    assert message(lambda: resolve_metrics(None, ["auc"]), kind=ConfigurationError) == (
        "weighted metric 'auc' must take weights, but its torchmetrics implementation has none. "
        "Pass it under metrics, or a callable that gives one value per sample."
    )


def test_another_kind_of_data_within_an_epoch_is_refused():
    """Its counts can't be added to those before."""
    one = fed("f1_score", SHARES, CLASSES)
    text = message(lambda: one.update(SHARES[:, :1], LABELS[:, :1], SAMPLES), kind=MetricError)
    assert (
        "metric 'f1_score' must get the same kind of prediction and target during an epoch, got "
        "task='binary' of size 1 after task='multiclass' of size 4. Convert the data to one form."
    ) in text
    other = fed("f1_score", SHARES[:, :1], LABELS[:, :1])
    text = message(
        lambda: one.merge_states([one.state_dict(), other.state_dict()]), kind=MetricError
    )
    assert text.startswith(
        "metric 'f1_score' must get the same kind of prediction and target in all "
    )


@pytest.mark.long("ipu-standin")
def test_fit_logs_them_and_knows_that_more_is_better():
    """EarlyStopping and best checkpoints ask for the direction."""
    torch.manual_seed(0)
    model = ipufit.Model(nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)), engine="embedded")
    listed = ["auc", metrics.F1Score(average="micro")]
    model.compile("sgd", lambda prediction, target: prediction[0, 0], metrics=listed)
    data = (REALS.float(), CLASSES)
    stop = ipufit.callbacks.EarlyStopping("val_auc", patience=5)
    history = model.fit(
        *data, batch_size=5, epochs=2, validation_data=data, callbacks=[stop], verbose=0
    )
    assert {"auc", "val_auc", "f1_score", "val_f1_score"} <= set(history.history)
    assert history.params["directions"]["val_auc"] == "max"
    with torch.no_grad():
        expected = value("auc", model.module(data[0]), CLASSES)
    assert history.history["val_auc"][-1] == pytest.approx(expected, 1e-5)
