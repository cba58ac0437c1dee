"""Losses and metrics of the user's: which parameter is the prediction, and which the target."""

from __future__ import annotations

import copy
import functools

import pytest
import sklearn.metrics
import torch
from torch import nn

import ipufit
from ipufit.errors import ConfigurationError, LossError
from ipufit.losses import resolve_loss
from ipufit.metrics.resolve import resolve_metrics
from tests.engines import EAGER_OR_NOT
from tests.reference import follow
from tests.told import message

# float32 sums of some dozen values in another order.
TOLERANCE = 1e-6
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(24, 6, generator=GENERATOR)
Y = torch.rand(24, 3, generator=GENERATOR) + 0.5


def value(prediction, target):
    """Another number when the two change places."""
    return (prediction.exp() * target).mean()


# ---- the forms in which a loss or a metric comes -------------------------------------------------


def keras_like(y_true, y_pred):
    return value(y_pred, y_true)


def torch_like(input, target):
    return value(input, target)


def plain(a, b):
    return value(a, b)


def first_says_it(labels, thing):
    return value(thing, labels)


def second_says_it(thing, logits):
    return value(logits, thing)


def by_name_alone(*, y_true, y_pred):
    return value(y_pred, y_true)


def second_by_name(y_pred, *, y_true):
    return value(y_pred, y_true)


def with_options(scale, y_true, y_pred, *, shift=0.0):
    return scale * value(y_pred, y_true) + shift


def rest_says_nothing(targets, *rest):
    return value(rest[0], targets)


def doubled(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def turned(function):
    @functools.wraps(function)
    def wrapper(prediction, target):
        return function(target, prediction)

    return wrapper


class Called:
    def __call__(self, y_true, y_pred):
        return value(y_pred, y_true)

    def method(self, y_true, y_pred):
        return value(y_pred, y_true)


class Module(nn.Module):
    def forward(self, labels, logits):
        return value(logits, labels)


FORMS = {
    "keras": keras_like,
    "torch": torch_like,
    "names say nothing": plain,
    "lambda": lambda y_true, y_pred: value(y_pred, y_true),
    "the first says it": first_says_it,
    "the second says it": second_says_it,
    "by name alone": by_name_alone,
    "the second by name": second_by_name,
    "partial by position": functools.partial(with_options, 1.0),
    "partial by name": functools.partial(with_options, scale=1.0, shift=0.0),
    "decorated": doubled(keras_like),
    "a wrapper of another order": turned(keras_like),
    "partial of a decorated": functools.partial(doubled(with_options), 1.0),
    "rest": rest_says_nothing,
    "object": Called(),
    "method": Called().method,
    "module": Module(),
}


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(6, 3)


@pytest.mark.long("ipu-standin")
@pytest.mark.few("False-keras", "True-partial by position", "True-method")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
def test_fit_trains_on_the_loss_that_was_written(form, run_eagerly):
    """The weights are those of a loop that calls it the right way round."""
    module = net()
    other = copy.deepcopy(module)
    model = ipufit.Model(module)
    model.compile(
        torch.optim.SGD(module.parameters(), lr=0.1), FORMS[form], run_eagerly=run_eagerly
    )
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    batches = zip(X.split(8), Y.split(8))
    follow(other, torch.optim.SGD(other.parameters(), lr=0.1), batches, value)
    for mine, plain_loop in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(mine, plain_loop, rtol=0, atol=TOLERANCE)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("form", FORMS)
def test_a_metric_gets_its_arguments_as_it_names_them(form):
    """A number on its own, by output and in a dict."""
    module = net()
    expected = pytest.approx(value(module(X), Y).item(), abs=TOLERANCE)
    model = ipufit.Model(module)
    model.compile("sgd", "mse", metrics={"value": FORMS[form]})
    assert model.evaluate(X, Y, batch_size=24, verbose=0)["value"] == expected


@pytest.mark.parametrize(
    ("names", "first"),
    [
        ("y_true y_pred", "target"),
        ("yTrue yPred", "target"),
        ("target input", "target"),
        ("labels logits", "target"),
        ("labels_true labels_pred", "target"),
        ("y y_hat", "target"),
        ("y_true y_score", "target"),
        ("source estimate_source", "target"),
        ("expected actual", "target"),
        ("x recon_x", "target"),
        ("teacher_logits student_logits", "target"),
        ("gt_boxes boxes", "target"),
        ("y_pred y_true", "prediction"),
        ("recon_x x", "prediction"),
        ("est_targets targets", "prediction"),
        ("student_logits teacher_logits", "prediction"),
        ("log_probs targets", "prediction"),
        ("log_input target", "prediction"),
        ("preds target", "prediction"),
        ("embeddings labels", "prediction"),
        ("x y", "prediction"),
        ("p q", "prediction"),
        ("y t", "prediction"),
        ("true_pred other", "prediction"),
    ],
)
def test_names_of_parameters_say_the_order(names, first):
    """The words of torch, Keras, scikit-learn and others; what says nothing is torch's order."""
    one, two = names.split()
    scope = {}
    exec(f"def loss({one}, {two}): return ({one} * 0 + {two}).mean()", scope)
    result = resolve_loss(scope["loss"])(torch.tensor([1.0]), torch.tensor([2.0])).value
    assert result.item() == {"prediction": 2.0, "target": 1.0}[first]


ADVICE = (
    "Name them prediction and target, or pass a function (prediction, target) that calls it with "
    "its arguments in the right order."
)


@pytest.mark.parametrize(
    ("names", "came"),
    [
        ("labels, targets", "(labels, targets), which both name a target"),
        ("output, input", "(output, input), which both name a prediction"),
        ("y, p", "(y, p), which might be (target, prediction)"),
        ("t, p", "(t, p), which might be (target, prediction)"),
        ("*, a, b", "(a, b) only by name, which do not tell them"),
    ],
)
def test_an_ambiguous_order_is_refused(names, came):
    """With the loss or the metric that it is about; what the text advises works."""
    scope = {"value": value}
    one, two = names.replace("*, ", "").split(", ")
    exec(f"def own({names}): return value({two}, {one})", scope)
    own = scope["own"]
    rest = (
        f"must have parameter names that tell the prediction from the target, got {came}. {ADVICE}"
    )
    assert message(resolve_loss, own, kind=LossError) == f"loss 'own' {rest}"
    assert message(resolve_metrics, {"mine": own}) == f"metric 'mine' {rest}"
    named = (
        (lambda prediction, target: own(**{one: target, two: prediction}))
        if "*" in names
        else (lambda prediction, target: own(target, prediction))
    )
    expected = value(X, X + 1).item()
    assert resolve_loss(named)(X, X + 1).value.item() == pytest.approx(expected)


# ---- several losses, metrics by output, weights --------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x)}


def rows(y_true, y_pred):
    """One value for each sample."""
    return (y_pred.exp() * y_true).mean(1)


def weighted_mean(y_true, y_pred, sample_weight=None):
    """Weighs its samples itself."""
    values = rows(y_true, y_pred)
    return values.mean() if sample_weight is None else (values * sample_weight).mean()


def test_each_of_several_losses_and_metrics_has_its_own_order():
    """A dict by output, metrics by output, and weights for both."""
    torch.manual_seed(0)
    module = TwoHeads()
    model = ipufit.Model(module)
    model.compile(
        "sgd",
        {"a": rows, "b": weighted_mean},
        metrics={"a": {"plain": torch_like}, "b": [keras_like]},
        weighted_metrics={"a": {"rows": rows}},
    )
    weight = torch.rand(24, generator=GENERATOR) + 0.5
    result = model.evaluate(X, {"a": Y, "b": 2 * Y}, sample_weight=weight, batch_size=24, verbose=0)
    out = module(X)
    a, b = rows(Y, out["a"]), rows(2 * Y, out["b"])
    expected = {
        "a_loss": (a * weight).mean(),
        "b_loss": (b * weight).mean(),
        "a_plain": value(out["a"], Y),
        "b_keras_like": value(out["b"], 2 * Y),
        "a_rows": (a * weight).sum() / weight.sum(),
    }
    for name, wanted in expected.items():
        assert result[name] == pytest.approx(wanted.item(), abs=TOLERANCE), name


class Sums:
    """A metric with torchmetrics' methods and Keras' order."""

    def reset(self):
        self.total = 0.0

    def update(self, y_true, y_pred):
        self.total += value(y_pred, y_true)

    def compute(self):
        return self.total


class Contradicting(Sums):
    def update(self, labels, targets):
        pass


@pytest.mark.long("ipu-standin")
def test_an_object_is_updated_in_its_own_order():
    """Its names count as those of a function do."""
    model = ipufit.Model(net())
    model.compile("sgd", "mse", metrics=[Sums()])
    expected = sum(value(model.module(x), y).item() for x, y in zip(X.split(8), Y.split(8)))
    result = model.evaluate(X, Y, batch_size=8, verbose=0)["Sums"]
    assert result == pytest.approx(expected, abs=TOLERANCE)
    with pytest.raises(
        ConfigurationError, match=r"^update of metric 'Contradicting' must have parameter"
    ):
        resolve_metrics([Contradicting()])


@pytest.mark.long("ipu-standin")
def test_a_metric_of_scikit_learn_gets_targets_first():
    """R2 of swapped arguments is another number."""
    model = ipufit.Model(net())
    model.compile(
        "sgd", "mse", metrics=[sklearn.metrics.r2_score, sklearn.metrics.explained_variance_score]
    )
    result = model.evaluate(X, Y, batch_size=24, verbose=0)
    with torch.no_grad():
        prediction = model.module(X)
    for metric in (sklearn.metrics.r2_score, sklearn.metrics.explained_variance_score):
        right = metric(Y.numpy(), prediction.numpy())
        assert result[metric.__name__] == pytest.approx(right, abs=TOLERANCE)
        assert right != pytest.approx(metric(prediction.numpy(), Y.numpy()), abs=1e-3)


# ---- objects of Keras' shape ---------------------------------------------------------------------


class KerasLoss:
    """Reduces what ``call`` gives, as ``keras.losses.Loss`` does."""

    def __init__(self, reduction="sum_over_batch_size"):
        self.reduction = reduction

    def __call__(self, y_true, y_pred, sample_weight=None):
        values = self.call(y_true, y_pred)
        if sample_weight is not None:
            values = values * sample_weight
        if self.reduction is None:
            return values
        if self.reduction == "sum":
            return values.sum()
        if self.reduction == "mean_with_sample_weight" and sample_weight is not None:
            return values.sum() / sample_weight.sum()
        return values.sum() / values.numel()

    def call(self, y_true, y_pred):
        return rows(y_true, y_pred)


class KerasMetric:
    """Adds up what it is called with, as ``keras.metrics.Metric`` does."""

    def __call__(self, *args, **kwargs):
        self.update_state(*args, **kwargs)
        return self.result()

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total = y_pred.sum()

    def result(self):
        return self.total

    def reset_state(self):
        self.total = 0.0


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean", "sum", None])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_object_of_keras_is_what_it_is_there(reduction, weighted):
    """Its order, its reduction and its weights, also where a batch is smaller than the others."""
    model = ipufit.Model(net())
    model.compile("sgd", KerasLoss(reduction))
    weight = torch.rand(24, generator=GENERATOR) + 0.5 if weighted else torch.ones(24)
    options = {"sample_weight": weight} if weighted else {}
    result = model.evaluate(X, Y, batch_size=12, verbose=0, **options)["loss"]
    values = rows(Y, model.module(X)) * weight
    expected = values.sum() / 2 if reduction == "sum" else values.mean()
    assert result == pytest.approx(expected.item(), rel=TOLERANCE)


def test_a_loss_object_of_keras_and_compile_divide_by_the_same():
    """Otherwise the weights of small batches would count for too much."""
    text = (
        "loss 'KerasLoss' of Keras must have the reduction of compile, got reduction='{}' with "
        "sample_weights='{}'. Use the same for both."
    )
    for one, other in (
        ("mean_with_sample_weight", "sum_over_batch_size"),
        ("sum_over_batch_size", "mean_with_sample_weight"),
    ):
        with pytest.raises(LossError) as caught:
            resolve_loss(KerasLoss(one), sample_weight_reduction=other)
        assert str(caught.value) == text.format(one, other)
    loss = resolve_loss(
        KerasLoss("mean_with_sample_weight"), sample_weight_reduction="mean_with_sample_weight"
    )
    weight = torch.rand(24, generator=GENERATOR) + 0.5
    term = loss(X[:, :3], Y, weight)
    expected = (rows(Y, X[:, :3]) * weight).sum() / weight.sum()
    assert term.value.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    assert term.count.item() == pytest.approx(weight.sum().item(), rel=TOLERANCE)


def test_metric_objects_of_keras_are_refused():
    """They hold one running value, which training and validation would share."""
    assert message(resolve_metrics, [KerasMetric()]) == (
        "a metric must be a name, a callable (prediction, target), or an object of torchmetrics, "
        "got KerasMetric with update_state and result, which would mix samples of training and "
        "validation. Pass the corresponding function, such as keras.metrics.mean_squared_error, or "
        "a name, such as 'mse'."
    )
    assert message(resolve_loss, KerasMetric(), kind=LossError) == (
        "a loss must give the value of one micro-batch, got KerasMetric, a metric with "
        "update_state and result, which accumulates over batches. Pass the corresponding function "
        "or loss."
    )
