"""Metrics of several outputs, weighted metrics, and a spread of torchmetrics' classes."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional

from ipufit.errors import ConfigurationError, MetricError
from ipufit.losses import resolve_loss
from ipufit.metrics.resolve import resolve_metrics
from ipufit.utils import tree
from tests import told

SAMPLES, CLASSES = 23, 5
UNEVEN = (7, 1, 7, 5, 3)
_GENERATOR = torch.Generator().manual_seed(8)
LOGITS = torch.randn(SAMPLES, CLASSES, generator=_GENERATOR, dtype=torch.float64)
INDICES = torch.randint(0, CLASSES, (SAMPLES,), generator=_GENERATOR)
INDICES[0], INDICES[4] = 4, -100
WHOLE = INDICES.clamp(min=0)
REALS = torch.randn(SAMPLES, generator=_GENERATOR, dtype=torch.float64)
TARGET = REALS + torch.randn(SAMPLES, generator=_GENERATOR, dtype=torch.float64)
BITS = torch.randint(0, 2, (SAMPLES, CLASSES), generator=_GENERATOR)
PIXELS = torch.randn(SAMPLES, CLASSES, 4, generator=_GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, CLASSES, (SAMPLES, 4), generator=_GENERATOR)
LABELS[3, 1:] = -100
WEIGHTS = torch.rand(SAMPLES, generator=_GENERATOR, dtype=torch.float64)
WEIGHTS[10] = 0.0
# float64 sums over some dozen values in another order.
CLOSE = {"rel": 1e-13}

Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Record:
    """Outputs with names."""

    a: Any
    b: Any


def rows_of(value, rows):
    """Rows of every tensor in a structure."""
    return tree.map_leaves(lambda leaf: leaf[rows], value)


def fed(metrics, prediction, target, weight=None, sizes=UNEVEN):
    """The values of a set after micro-batches of these sizes."""
    metrics = metrics.fresh()
    metrics.probe(*rows_of((prediction, target), slice(0, 2)), 2, rows_of(weight, slice(0, 2)))
    first = 0
    for size in sizes:
        rows = slice(first, first + size)
        given = rows_of((prediction, target), rows)
        metrics.update(*given, size, rows_of(weight, rows))
        first += size
    return metrics.compute()


message = functools.partial(told.message, kind=MetricError)


def error(prediction, target):
    """One value per sample."""
    return (prediction - target).abs()


# ---- torchmetrics -------------------------------------------------------------------------------

C, R = torchmetrics.classification, torchmetrics.regression


def objects():
    """Metrics of many kinds with what they take; some announce that they keep all samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            (C.MulticlassAccuracy(CLASSES, average="micro"), LOGITS, WHOLE),
            (C.MulticlassAccuracy(CLASSES, top_k=2), LOGITS, WHOLE),
            (C.MulticlassAccuracy(CLASSES, ignore_index=-100), PIXELS, LABELS),
            (C.MulticlassF1Score(CLASSES), LOGITS, WHOLE),
            (C.MulticlassPrecision(CLASSES), LOGITS, WHOLE),
            (C.MulticlassRecall(CLASSES), LOGITS, WHOLE),
            (C.MulticlassSpecificity(CLASSES), LOGITS, WHOLE),
            (C.MulticlassAUROC(CLASSES), LOGITS, WHOLE),
            (C.MulticlassAveragePrecision(CLASSES), LOGITS, WHOLE),
            (C.MulticlassCohenKappa(CLASSES), LOGITS, WHOLE),
            (C.MulticlassMatthewsCorrCoef(CLASSES), LOGITS, WHOLE),
            (C.MulticlassJaccardIndex(CLASSES), LOGITS, WHOLE),
            (C.MulticlassCalibrationError(CLASSES), LOGITS, WHOLE),
            (C.MulticlassHingeLoss(CLASSES), LOGITS, WHOLE),
            (C.MulticlassExactMatch(CLASSES), PIXELS, LABELS.clamp(min=0)),
            (C.BinaryAccuracy(), REALS.sigmoid(), BITS[:, 0]),
            (C.BinaryAUROC(), REALS.sigmoid(), BITS[:, 0]),
            (C.BinaryF1Score(), REALS.sigmoid(), BITS[:, 0]),
            (C.MultilabelAccuracy(CLASSES), LOGITS, BITS),
            (C.MultilabelRankingLoss(CLASSES), LOGITS, BITS),
            (R.MeanSquaredError(), REALS, TARGET),
            (R.MeanSquaredError(squared=False), REALS, TARGET),
            (R.MeanAbsoluteError(), REALS, TARGET),
            (R.MeanAbsolutePercentageError(), REALS, TARGET),
            (R.SymmetricMeanAbsolutePercentageError(), REALS, TARGET),
            (R.R2Score(), REALS, TARGET),
            (R.ExplainedVariance(), REALS, TARGET),
            (R.PearsonCorrCoef(), REALS, TARGET),
            (R.SpearmanCorrCoef(), REALS, TARGET),
            (R.ConcordanceCorrCoef(), REALS, TARGET),
            (R.CosineSimilarity(reduction="mean"), LOGITS, LOGITS.flip(0)),
            (R.KLDivergence(), LOGITS.softmax(1), LOGITS.flip(0).softmax(1)),
            (R.LogCoshError(), REALS, TARGET),
            (R.TweedieDevianceScore(), REALS, TARGET),
            (torchmetrics.text.Perplexity(ignore_index=-100), PIXELS.transpose(1, 2), LABELS),
            (R.MeanSquaredError() + R.MeanAbsoluteError(), REALS, TARGET),
            (torchmetrics.MinMaxMetric(R.MeanSquaredError()), REALS, TARGET),
            (
                torchmetrics.ClasswiseWrapper(C.MulticlassRecall(CLASSES, average=None)),
                LOGITS,
                WHOLE,
            ),
            (
                torchmetrics.MetricCollection(
                    {"f1": C.MulticlassF1Score(CLASSES), "auc": C.MulticlassAUROC(CLASSES)},
                    prefix="my_",
                ),
                LOGITS,
                WHOLE,
            ),
        ]


OBJECTS = objects()


@pytest.mark.parametrize(
    ("metric", "prediction", "target"), OBJECTS, ids=[type(case[0]).__name__ for case in OBJECTS]
)
def test_a_metric_of_torchmetrics_is_that_of_all_samples_together(metric, prediction, target):
    """Whatever it is made of, it sees every sample once, alone or as one of several outputs."""
    whole = metric.clone()
    whole.update(prediction, target)
    expected = whole.compute()
    if not isinstance(expected, dict):
        expected = {type(metric).__name__: expected}
    expected = {name: value.item() for name, value in expected.items()}
    metrics = resolve_metrics([metric])
    metrics.probe(prediction[:7], target[:7], 7)
    first = 0
    for size in UNEVEN:
        rows = slice(first, first + size)
        metrics.update(prediction[rows], target[rows], size)
        first += size
    # torchmetrics keeps its states in float32; MinMax has seen the parts of nothing but the whole.
    assert metrics.compute() == pytest.approx(expected, rel=2e-5, abs=1e-6)
    several = resolve_metrics({"out": [metric]})
    several.update({"out": prediction}, {"out": target}, SAMPLES)
    named = {f"out_{name}": value for name, value in expected.items()}
    assert several.compute() == pytest.approx(named, rel=2e-5, abs=1e-6)


# ---- by output ----------------------------------------------------------------------------------

BOTH = {"a": LOGITS, "b": REALS}
TARGETS = {"a": WHOLE, "b": TARGET}
ACCURACY = (LOGITS.argmax(1) == WHOLE).double().mean().item()
MSE = functional.mse_loss(REALS, TARGET).item()
MAE = functional.l1_loss(REALS, TARGET).item()


@pytest.mark.parametrize(
    ("metrics", "outputs", "prediction", "target", "expected"),
    [
        (
            {"a": ["accuracy"], "b": ["mse", error]},
            ("a", "b"),
            BOTH,
            TARGETS,
            {"a_accuracy": ACCURACY, "b_mse": MSE, "b_error": MAE},
        ),
        (
            {"b": "mse"},
            ("a", "b"),
            Pair(LOGITS, REALS),
            Record(WHOLE, TARGET),
            {"b_mse": MSE},
        ),
        (
            {"a": None, "b": {"mine": "mse", "other": error}},
            ("a",),
            Record(LOGITS, REALS),
            TARGETS,
            {"b_mine": MSE, "b_other": MAE},
        ),
        (
            [["accuracy"], None],
            2,
            (LOGITS, REALS),
            (WHOLE, TARGET),
            {"output_0_accuracy": ACCURACY},
        ),
        (
            ["accuracy", ["mse", error]],
            2,
            [LOGITS, REALS],
            Pair(WHOLE, TARGET),
            {"output_0_accuracy": ACCURACY, "output_1_mse": MSE, "output_1_error": MAE},
        ),
        (
            {"a": ["accuracy"], "b": {"mine": "mse"}, "joint": lambda p, t: error(p["b"], t["b"])},
            None,
            BOTH,
            TARGETS,
            {"a_accuracy": ACCURACY, "b_mine": MSE, "joint": MAE},
        ),
        (
            {0: ["accuracy"], 1: ("mse",)},
            None,
            (LOGITS, REALS),
            [WHOLE, TARGET],
            {"output_0_accuracy": ACCURACY, "output_1_mse": MSE},
        ),
    ],
)
def test_metrics_go_by_output(metrics, outputs, prediction, target, expected):
    """Keras' forms and names, for every structure that a module returns."""
    resolved = resolve_metrics(metrics, None, outputs)
    assert resolved.names == tuple(expected)
    assert fed(resolved, prediction, target) == pytest.approx(expected, **CLOSE)


def test_collections_go_by_output_with_all_guarantees():
    """Copies, resets and names learnt from a trial are those of a metric without an output."""
    own = torchmetrics.MetricCollection([C.MulticlassF1Score(CLASSES), C.MulticlassRecall(CLASSES)])
    resolved = resolve_metrics({"a": own, "b": {"s": own.clone()}}, None, ("a", "b"))
    members = ("MulticlassF1Score", "MulticlassRecall")
    names = (*(f"a_{n}" for n in members), *(f"b_s_{n}" for n in members))
    assert resolved.names == names
    both = {"a": LOGITS, "b": LOGITS}
    targets = {"a": WHOLE, "b": WHOLE}
    resolved.probe(both, targets, SAMPLES)
    assert resolved.names == resolved.fresh().names == names
    assert all(math.isnan(value) for value in resolved.compute().values())
    resolved.update(both, targets, SAMPLES)
    expected = own.clone()(LOGITS, WHOLE)
    for name in members:
        assert resolved.compute()[f"a_{name}"] == pytest.approx(expected[name].item())
        assert resolved.compute()[f"b_s_{name}"] == pytest.approx(expected[name].item())
    assert all(math.isnan(value) for value in resolved.fresh().compute().values())
    resolved.reset()
    assert all(math.isnan(value) for value in resolved.compute().values())
    assert not own["MulticlassRecall"].update_called


def test_names_that_only_a_trial_shows_keep_their_output():
    """A result with keys is flattened under the output's name."""

    class Range:
        def reset(self):
            self.values = []

        def update(self, prediction, target):
            self.values.append(prediction)

        def compute(self):
            values = torch.cat(self.values)
            return {"low": values.min(), "high": values.max()}

    resolved = resolve_metrics({"b": Range()}, None, ("b",))
    assert resolved.names == ("b_Range",)
    resolved.probe(BOTH, TARGETS, SAMPLES)
    assert resolved.names == ("b_low", "b_high")
    expected = {"b_low": REALS.min().item(), "b_high": REALS.max().item()}
    assert fed(resolved, BOTH, TARGETS) == expected
    clash = resolve_metrics({"b": {"low": "mse", "r": Range()}}, None, ("b",))
    clash.probe(BOTH, TARGETS, SAMPLES)
    assert clash.names == ("b_low", "b_r_low", "b_r_high")


def test_one_that_writes_into_its_output_disturbs_no_other():
    """The next metric, and the loss, must see what the module returned."""

    def careless(prediction, target):
        return prediction.zero_()

    outputs = {"a": LOGITS.clone(), "b": REALS.clone()}
    resolved = resolve_metrics({"b": [careless, "mse"]}, None, ("b",))
    resolved.probe(outputs, TARGETS, SAMPLES)
    resolved.update(outputs, TARGETS, SAMPLES)
    assert resolved.compute() == pytest.approx({"b_careless": 0.0, "b_mse": MSE}, **CLOSE)
    assert torch.equal(outputs["b"], REALS)


@pytest.mark.parametrize(
    ("metrics", "outputs", "prediction", "target", "text"),
    [
        (
            {"c": "mse"},
            ("a",),
            BOTH,
            TARGETS,
            "metric 'c_mse': the module's outputs must hold 'c', got dict with ['a', 'b']. Use "
            "an existing name, or add it.",
        ),
        (
            {"b": "mse"},
            ("a",),
            BOTH,
            {"a": WHOLE},
            "metric 'b_mse': the target must hold 'b', got dict with ['a']. Use an existing "
            "name, or add it.",
        ),
        (
            {3: ["mse"]},
            None,
            (LOGITS, REALS),
            (WHOLE, TARGET),
            "metric 'output_3_mse': the module's outputs must have an element 3, got tuple of "
            "2. Pass one for each output, in the order in which the module returns them.",
        ),
        (
            {"b": "accuracy"},
            ("b",),
            {"b": LOGITS},
            {"b": LOGITS},
            "metric 'b_accuracy' needs class indices, or one value per sample, got prediction and "
            "target of one shape (23, 5). For one-hot targets, use 'categorical_accuracy'; for "
            "several labels, 'binary_accuracy_with_logits', or 'binary_accuracy' where the module "
            "returns probabilities.",
        ),
    ],
)
def test_an_output_that_is_not_there_is_refused_by_the_probe(
    metrics, outputs, prediction, target, text
):
    """The text names the metric, and what is there."""
    resolved = resolve_metrics(metrics, None, outputs)
    assert message(resolved.probe, prediction, target, SAMPLES) == text


@pytest.mark.parametrize(
    ("metrics", "outputs", "text"),
    [
        (
            ["accuracy"],
            ("a", "b"),
            "metrics must be a dict by output, like the losses, got list. Write {'a': "
            "['accuracy']}.",
        ),
        (
            "accuracy",
            ("a",),
            "metrics must be a dict by output, like the losses, got str. Write {'a': "
            "['accuracy']}.",
        ),
        (
            ["accuracy"],
            2,
            "metrics must be a list with one element for each of the 2 losses, got list of 1. Pass "
            "a metric, a list of metrics or None for each output.",
        ),
        (
            {"a": "accuracy"},
            2,
            "metrics must be a list with one element for each of the 2 losses, got dict. Pass a "
            "metric, a list of metrics or None for each output.",
        ),
        (
            {"a": {"loss": "mse"}},
            ("a",),
            "logged values must have different names, got 'a_loss' twice. Choose another name; "
            "rename a metric with metrics={'a_loss_2': metric}.",
        ),
        (
            [{"loss": "mse"}, None],
            2,
            "logged values must have different names, got 'output_0_loss' twice. Choose another "
            "name; rename a metric with metrics={'output_0_loss_2': metric}.",
        ),
        (
            {-1: ["mse"]},
            None,
            "metrics as a dict must have names as keys, got -1. Write {'name': metric}.",
        ),
    ],
)
def test_forms_that_do_not_go_with_the_losses_are_refused(metrics, outputs, text):
    """At compile; a metric on the wrong output looks like any other."""
    assert message(resolve_metrics, metrics, None, outputs, kind=ConfigurationError) == text


def test_what_the_losses_go_by_is_what_the_metrics_are_told():
    """The two normal forms meet in one attribute."""
    for loss, metrics, names in (
        ({"a": "mse", "b": "mse"}, {"a": "mae"}, ("a_mae",)),
        (["mse", None], ["mae", "mae"], ("output_0_mae", "output_1_mae")),
        ("mse", {"a": "mae"}, ("a",)),
    ):
        assert resolve_metrics(metrics, None, resolve_loss(loss).outputs).names == names


# ---- weighted -----------------------------------------------------------------------------------


def weighted_mean(values, kept=None):
    """The closed form, of values of shape (samples, ...)."""
    wide = WEIGHTS.reshape((SAMPLES,) + (1,) * (values.dim() - 1)).expand(values.shape)
    wide = wide if kept is None else wide * kept
    return ((values.double() * wide).sum() / wide.sum()).item()


@pytest.mark.parametrize(
    ("metric", "prediction", "target", "expected"),
    [
        ("accuracy", LOGITS, INDICES, weighted_mean(LOGITS.argmax(1) == INDICES, INDICES != -100)),
        ("accuracy", PIXELS, LABELS, weighted_mean(PIXELS.argmax(1) == LABELS, LABELS != -100)),
        (
            "top_2_accuracy",
            LOGITS,
            INDICES,
            weighted_mean(
                (LOGITS.topk(2).indices == INDICES[:, None]).any(1),
                INDICES != -100,
            ),
        ),
        (
            "categorical_accuracy",
            LOGITS,
            functional.one_hot(WHOLE, CLASSES),
            weighted_mean(LOGITS.argmax(1) == WHOLE),
        ),
        (
            "binary_accuracy_with_logits",
            LOGITS,
            BITS,
            weighted_mean((LOGITS > 0) == BITS),
        ),
        ("binary_accuracy", LOGITS.sigmoid(), BITS, weighted_mean((LOGITS > 0) == BITS)),
        ("mse", REALS, TARGET, weighted_mean((REALS - TARGET).square())),
        ("mae", LOGITS, LOGITS.flip(0), weighted_mean((LOGITS - LOGITS.flip(0)).abs())),
        ("rmse", REALS, TARGET, weighted_mean((REALS - TARGET).square()) ** 0.5),
        (
            "perplexity",
            PIXELS,
            LABELS,
            math.exp(
                weighted_mean(
                    functional.cross_entropy(PIXELS, LABELS, reduction="none"), LABELS != -100
                )
            ),
        ),
        (error, REALS, TARGET, weighted_mean(error(REALS, TARGET))),
        (error, LOGITS, LOGITS.flip(0), weighted_mean(error(LOGITS, LOGITS.flip(0)))),
    ],
)
def test_a_weighted_metric_is_divided_by_the_sum_of_the_weights(
    metric, prediction, target, expected
):
    """Keras' weighted_metrics, exact however an epoch is cut."""
    resolved = resolve_metrics(None, {"value": metric})
    for weight in (WEIGHTS, WEIGHTS[:, None]):
        value = fed(resolved, prediction, target, weight)
        assert value == pytest.approx({"value": expected}, rel=1e-13)
    plain = fed(resolve_metrics({"value": metric}), prediction, target, WEIGHTS)
    assert plain == pytest.approx(fed(resolved, prediction, target), rel=1e-13)
    assert plain != pytest.approx({"value": expected}, rel=1e-6)


def test_weights_of_time_steps():
    """One weight for each position, as in the loss."""
    weights = torch.rand(SAMPLES, 4, generator=torch.Generator().manual_seed(2)).double()
    kept = (LABELS != -100) * weights
    expected = ((PIXELS.argmax(1) == LABELS) * kept).sum() / kept.sum()
    value = fed(resolve_metrics(None, "accuracy"), PIXELS, LABELS, weights)
    assert value == pytest.approx({"accuracy": expected.item()}, **CLOSE)


def test_a_weight_of_zero_hides_what_is_not_finite():
    """Missing labels are often NaN with a weight of zero."""
    target = TARGET.clone()
    target[10] = math.nan
    value = fed(resolve_metrics(None, ["mse", error]), REALS, target, WEIGHTS)
    kept = WEIGHTS > 0
    squares = (REALS - TARGET).square()[kept]
    assert value["mse"] == pytest.approx(
        ((squares * WEIGHTS[kept]).sum() / WEIGHTS.sum()).item(), **CLOSE
    )
    assert math.isfinite(value["error"])


def test_without_any_weight_the_mean_is_over_nothing():
    """As before the first micro-batch; 0 would look like a measurement."""

    def own(prediction, target, sample_weight):
        return (error(prediction, target) * sample_weight).sum() / sample_weight.sum()

    resolved = resolve_metrics(None, ["mse", error, own])
    value = fed(resolved, REALS, TARGET, torch.zeros(SAMPLES))
    assert all(math.isnan(number) for number in value.values())


def test_a_callable_may_take_the_weights_itself():
    """Its scalar counts with the weight of the micro-batch."""
    seen = []

    def own(prediction, target, sample_weight=None):
        seen.append(sample_weight)
        return (error(prediction, target) * sample_weight).sum() / sample_weight.sum()

    class Own(nn.Module):
        def forward(self, prediction, target, sample_weight):
            return own(prediction, target, sample_weight)

    expected = weighted_mean(error(REALS, TARGET))
    value = fed(resolve_metrics(None, [own, Own()]), REALS, TARGET, WEIGHTS[:, None])
    assert value == pytest.approx({"own": expected, "Own": expected}, **CLOSE)
    assert seen[-1].shape == (3,)
    value = fed(resolve_metrics(None, own), REALS, TARGET)
    assert value == pytest.approx({"own": MAE}, rel=1e-7)
    assert seen[-1].tolist() == [1.0] * 3


class WeightedSum:
    """An object that takes weights."""

    def __init__(self, word="weight"):
        self.word = word

    def __deepcopy__(self, memo):
        return type(self)(self.word)

    def reset(self):
        self.total = self.count = 0.0

    def update(self, prediction, target, weight=1.0):
        self.total += float((error(prediction, target) * weight).sum())
        self.count += float(weight.sum())

    def compute(self):
        return self.total / self.count


class Other(WeightedSum):
    """The same under Keras' word."""

    def update(self, prediction, target, *, sample_weight):
        super().update(prediction, target, sample_weight)


class Third(WeightedSum):
    """The same in the plural."""

    def update(self, prediction, target, weights):
        super().update(prediction, target, weights)


def test_an_object_may_take_the_weights():
    """By whichever of the usual words its update has."""
    expected = weighted_mean(error(REALS, TARGET))
    resolved = resolve_metrics(None, [WeightedSum(), Other(), Third()])
    names = ("WeightedSum", "Other", "Third")
    assert resolved.names == names
    assert fed(resolved, REALS, TARGET, WEIGHTS) == pytest.approx(
        dict.fromkeys(names, expected), **CLOSE
    )
    assert fed(resolved, REALS, TARGET) == pytest.approx(dict.fromkeys(names, MAE), **CLOSE)


def test_an_object_that_takes_no_weights_is_refused_at_compile():
    """Left out, they would make the weighted metric the plain one."""
    f1 = C.MulticlassF1Score(3)
    for metric, came in (
        (f1, "preds, target"),
        (torchmetrics.MetricCollection([f1]), "none of these"),
    ):
        text = message(resolve_metrics, None, {"f1": metric}, kind=ConfigurationError)
        assert text == (
            "weighted metric 'f1' must take sample_weight, weight or weights in its update, got "
            f"{came}. Pass it under metrics, or a callable that gives one value per sample."
        )


def test_callables_that_cannot_be_weighted_are_refused_by_the_probe():
    """The mean is taken before the weights could be."""

    def scalar(prediction, target):
        return error(prediction, target).mean()

    def vector(prediction, target, sample_weight):
        return error(prediction, target)

    assert message(resolve_metrics(None, scalar).probe, REALS, TARGET, SAMPLES) == (
        "weighted metric 'scalar' must give a tensor of 23 values, one for each sample, got shape "
        "(), dtype float64. Return the values before their mean, or take sample_weight as a third "
        "argument and return the weighted mean."
    )
    assert message(resolve_metrics(None, vector).probe, REALS, TARGET, SAMPLES) == (
        "weighted metric 'vector' takes sample_weight, so it must give one number, the weighted "
        "mean, got shape (23,), dtype float64. Reduce it with the weights."
    )
    bad = resolve_metrics(None, "mse")
    assert message(bad.probe, REALS, TARGET, SAMPLES, torch.ones(3)) == (
        "sample_weight must have shape (23,) for metric 'mse', got (3,). Pass one weight for "
        "each sample."
    )
    assert message(bad.probe, REALS, TARGET, SAMPLES, {"a": WEIGHTS}) == (
        "sample_weight must be one tensor of shape (batch,), got dict with ['a']. A dict or "
        "list of weights is for losses or metrics by output."
    )


def test_a_weighted_name_gives_way_to_a_plain_one():
    """Keras' names: History holds both."""
    resolved = resolve_metrics(["accuracy", "mse"], ["accuracy", {"mae": "mae"}["mae"]])
    assert resolved.names == ("accuracy", "mse", "weighted_accuracy", "mae")
    both = resolve_metrics({"a": "mse", "b": "mse"}, {"b": ["mse", "mae"]}, ("a", "b"))
    assert both.names == ("a_mse", "b_mse", "b_weighted_mse", "b_mae")
    values = fed(resolve_metrics("mse", "mse"), REALS, TARGET, WEIGHTS)
    expected = {"mse": MSE, "weighted_mse": weighted_mean((REALS - TARGET).square())}
    assert values == pytest.approx(expected, **CLOSE)
    assert message(resolve_metrics, None, ["mse", "mse"], kind=ConfigurationError).startswith(
        "logged values must have different names, got 'mse' twice."
    )


def test_weights_by_output():
    """Each output may have weights of its own, or none."""
    resolved = resolve_metrics(None, {"a": "accuracy", "b": ["mse"]}, ("a", "b"))
    hits = LOGITS.argmax(1) == WHOLE
    squares = (REALS - TARGET).square()
    one = fed(resolved, BOTH, TARGETS, WEIGHTS)
    assert one == pytest.approx(
        {"a_accuracy": weighted_mean(hits), "b_mse": weighted_mean(squares)}, **CLOSE
    )
    for weight in ({"b": WEIGHTS}, {"a": None, "b": WEIGHTS}):
        values = fed(resolved, BOTH, TARGETS, weight)
        assert values == pytest.approx(
            {"a_accuracy": ACCURACY, "b_mse": weighted_mean(squares)}, **CLOSE
        )
    by_position = resolve_metrics(None, [None, "mse"], 2)
    values = fed(by_position, (LOGITS, REALS), (WHOLE, TARGET), (None, WEIGHTS))
    assert values == pytest.approx({"output_1_mse": weighted_mean(squares)}, **CLOSE)
