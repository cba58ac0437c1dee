"""Losses: names against torch.nn.functional, refusals, and modules with their own loss."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import ipufit
from ipufit.errors import LossError, UnknownNameError
from ipufit.losses import check_loss_value, resolve_loss
from tests import told
from tests.engines import EAGER_OR_NOT

KNOWN = (
    "bce, bce_with_logits, binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy, "
    "hinge_embedding, huber, kl_div, l1, mae, mean_absolute_error, mean_squared_error, mse, "
    "multi_margin, multilabel_soft_margin, nll, poisson_nll, smooth_l1, soft_margin"
)
REALS = torch.linspace(-2, 3, 24).reshape(6, 4)
SHARES = REALS.sigmoid()
INDICES = torch.tensor([0, 3, 1, 1, 2, 0])
SIGNS = REALS.sin().sign()
ZERO_ONE = (REALS.sin() > 0).float()


message = functools.partial(told.message, kind=LossError)


# ---- names --------------------------------------------------------------------------------------

CASES = [
    ("cross_entropy", REALS, INDICES, functional.cross_entropy),
    ("cross_entropy", REALS, SHARES, functional.cross_entropy),
    ("nll", REALS.log_softmax(1), INDICES, functional.nll_loss),
    ("mse", REALS, SHARES, functional.mse_loss),
    ("mae", REALS, SHARES, functional.l1_loss),
    ("smooth_l1", REALS, SHARES, functional.smooth_l1_loss),
    ("huber", REALS, SHARES, functional.huber_loss),
    ("bce", SHARES, ZERO_ONE, functional.binary_cross_entropy),
    ("bce_with_logits", REALS, ZERO_ONE, functional.binary_cross_entropy_with_logits),
    (
        "kl_div",
        REALS.log_softmax(1),
        SHARES.softmax(1),
        functools.partial(functional.kl_div, reduction="batchmean"),
    ),
    ("poisson_nll", REALS, INDICES[:, None].expand(6, 4), functional.poisson_nll_loss),
    ("hinge_embedding", REALS, SIGNS, functional.hinge_embedding_loss),
    ("soft_margin", REALS, SIGNS, functional.soft_margin_loss),
    ("multi_margin", REALS, INDICES, functional.multi_margin_loss),
    ("multilabel_soft_margin", REALS, ZERO_ONE, functional.multilabel_soft_margin_loss),
]


@pytest.mark.parametrize(("name", "prediction", "target", "function"), CASES)
def test_a_name_is_the_function_of_torch(name, prediction, target, function):
    """The name promises the number that torch's documentation describes, gradient included."""
    loss = resolve_loss(name)
    assert (loss.name, loss.reduction, loss.module, loss.in_module) == (name, "mean", None, False)
    prediction = prediction.clone().requires_grad_()
    term = loss(prediction, target)
    ours, theirs = term.value, function(prediction, target)
    assert (ours.shape, term.count, term.parts) == ((), None, {})
    assert torch.equal(ours, theirs)
    for mine, plain in zip(
        torch.autograd.grad(ours, prediction), torch.autograd.grad(theirs, prediction)
    ):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("mean_squared_error", "mse"),
        ("l1", "mae"),
        ("mean_absolute_error", "mae"),
        ("binary_cross_entropy", "bce"),
        ("binary_cross_entropy_with_logits", "bce_with_logits"),
        ("MSE", "mse"),
    ],
)
def test_an_alias_is_the_loss_it_stands_for(alias, name):
    """Keras' and torch's spellings of one number must not become two losses."""
    assert resolve_loss(alias).name == name
    assert resolve_loss(alias).function == resolve_loss(name).function


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(("name", "prediction", "target", "function"), CASES)
def test_named_losses_are_recorded_under_fake_tensors(name, prediction, target, function):
    """A check that looked at a value would break every capture."""

    def step(prediction, target):
        prediction = prediction.detach().requires_grad_()
        value = resolve_loss(name)(prediction, target).value
        return torch.autograd.grad(value, prediction)[0]

    graph = make_fx(step, tracing_mode="fake")(prediction, target)
    torch.testing.assert_close(graph(prediction, target), step(prediction, target))


def test_named_losses_can_be_pickled():
    """A compiled model is saved with its loss."""
    loss = pickle.loads(pickle.dumps(resolve_loss("kl_div")))
    expected = resolve_loss("kl_div")(REALS.log_softmax(1), SHARES).value
    assert loss(REALS.log_softmax(1), SHARES).value == expected


def test_an_unknown_name_gets_the_nearest():
    """A typing error should cost a second, not a search in the manual."""
    assert message(resolve_loss, "cross_entrpy", kind=UnknownNameError) == (
        f"unknown loss 'cross_entrpy'. Did you mean 'cross_entropy'? Known names: {KNOWN}."
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "categorical_crossentropy",
            "Keras' 'categorical_crossentropy' takes probabilities; 'cross_entropy' takes logits "
            "(leave the softmax out of the module) and class indices or one-hot targets in "
            "floating point. ",
        ),
        (
            "SparseCategoricalCrossentropy",
            "Keras' 'sparse_categorical_crossentropy' takes probabilities; 'cross_entropy' takes "
            "logits (leave the softmax out of the module) and int64 class indices. ",
        ),
        (
            "binary_crossentropy",
            "Keras' 'binary_crossentropy' takes probabilities; 'bce_with_logits' takes logits "
            "(leave the sigmoid out of the module), 'bce' takes probabilities. ",
        ),
        (
            "kl_divergence",
            "Keras' 'kl_divergence' takes probabilities; 'kl_div' takes log-probabilities as "
            "prediction (end the module with log_softmax). ",
        ),
        (
            "poisson",
            "Keras' 'poisson' takes rates; 'poisson_nll' takes logarithms of rates (leave the exp "
            "out of the module). ",
        ),
    ],
)
def test_a_keras_name_of_another_meaning_is_explained_and_refused(name, advice):
    """Taken for torch's loss it would train on a softmax of a softmax, and still seem to learn."""
    text = message(resolve_loss, name, kind=UnknownNameError)
    assert text == f"unknown loss {name!r}. {advice}Known names: {KNOWN}."


# ---- shapes and dtypes of named losses ----------------------------------------------------------

SAME_SHAPE = [
    "mse",
    "mae",
    "smooth_l1",
    "huber",
    "bce",
    "bce_with_logits",
    "kl_div",
    "poisson_nll",
    "hinge_embedding",
    "soft_margin",
    "multilabel_soft_margin",
]


@pytest.mark.parametrize("name", SAME_SHAPE)
@pytest.mark.parametrize(
    ("prediction", "target", "advice"),
    [
        ((8, 1, 3), (8, 3), "Pass target.unsqueeze(1), or return prediction.squeeze(1)."),
        ((8, 3), (8, 1, 3), "Pass target.squeeze(1), or return prediction.unsqueeze(1)."),
        ((8, 3), (3,), "Make both shapes equal."),
        ((8, 3), (), "Make both shapes equal."),
    ],
)
def test_shapes_that_torch_would_broadcast_are_refused(name, prediction, target, advice):
    """(N, 1, 3) against (N, 3) becomes a mean over N * N pairs: it falls, and means nothing."""
    loss = resolve_loss(name)
    assert message(loss, torch.rand(prediction), torch.rand(target)) == (
        f"loss {name!r} needs prediction and target of one shape, got prediction {prediction} and "
        f"target {target}. {advice}"
    )


MODULES = {
    "mse": nn.MSELoss(),
    "mae": nn.L1Loss(),
    "smooth_l1": nn.SmoothL1Loss(),
    "huber": nn.HuberLoss(),
    "bce": nn.BCELoss(),
    "bce_with_logits": nn.BCEWithLogitsLoss(),
    "poisson_nll": nn.PoissonNLLLoss(),
    "soft_margin": nn.SoftMarginLoss(),
}


@pytest.mark.parametrize(
    "loss",
    [*SAME_SHAPE, *MODULES.values(), functional.mse_loss],
    ids=[*SAME_SHAPE, *map(repr, MODULES.values()), "mse_loss"],
)
@pytest.mark.parametrize(
    ("prediction", "target"),
    [((8, 1), (8,)), ((8,), (8, 1)), ((1, 1), (1,)), ((8, 3, 1), (8, 3)), ((8, 3), (8, 3, 1))],
)
def test_a_last_dimension_of_size_one_is_no_difference(loss, prediction, target):
    """As in Keras: torch would broadcast (N, 1) against (N,), with a warning or none."""
    if loss == "multilabel_soft_margin" and len(prediction) < 2:
        pytest.skip("torch's loss needs a dimension of labels")
    found, given = torch.rand(prediction), torch.rand(target)
    loss = resolve_loss(loss)
    weight = torch.linspace(0, 1, prediction[0])
    alike = given.reshape(prediction)
    assert torch.equal(loss(found, given).value, loss(found, alike).value)
    assert torch.equal(loss(found, given, weight).value, loss(found, alike, weight).value)


@pytest.mark.parametrize(
    "loss", ["cross_entropy", "nll", "multi_margin", nn.CrossEntropyLoss(), functional.nll_loss]
)
def test_a_column_of_class_indices_is_taken_as_a_vector(loss):
    """As in Keras, whose own datasets have labels of shape (samples, 1)."""
    loss = resolve_loss(loss)
    assert torch.equal(loss(REALS, INDICES[:, None]).value, loss(REALS, INDICES).value)
    dense, labels = torch.randn(2, 5, 3), torch.tensor([[0, 4, 2], [1, 1, 3]])
    if loss.name != "multi_margin":
        assert torch.equal(loss(dense, labels[..., None]).value, loss(dense, labels).value)


def test_the_refusal_comes_in_a_capture_as_well():
    """Training is always captured, so a check that only eager code reaches would be none."""

    def step(prediction, target):
        return resolve_loss("mse")(prediction, target)

    text = message(make_fx(step, tracing_mode="fake"), torch.rand(8, 1), torch.rand(8, 2))
    assert text == (
        "loss 'mse' needs prediction and target of one shape, got prediction (8, 1) and target "
        "(8, 2). Make both shapes equal."
    )


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "smooth_l1", "bce", "bce_with_logits"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integer_targets_of_elementwise_losses_are_refused(name, dtype):
    """Torch fails on them in the backward or not at all, by function, version and capture."""
    target = ZERO_ONE.to(dtype)
    came = str(dtype).replace("torch.", "")
    assert message(resolve_loss(name), SHARES, target) == (
        f"loss {name!r} needs a floating-point target, got dtype {came}. Make it float32, for "
        "example with .to(torch.float32)."
    )


@pytest.mark.parametrize("name", ["mse", "poisson_nll"])
def test_float64_targets_of_a_float32_prediction_are_refused(name):
    """NumPy makes float64 of everything, and on a device the whole loss would pay for it."""
    assert message(resolve_loss(name), REALS, SHARES.double()) == (
        f"loss {name!r} needs a target of the prediction's dtype, got prediction float32 and "
        "target float64. Make the target float32, for example with .to(torch.float32)."
    )
    assert resolve_loss(name)(REALS.double(), SHARES.double()).value.dtype == torch.float64


def test_a_float32_target_of_a_lower_precision_prediction_is_left_to_torch():
    """Under autocast that is the usual pair."""
    assert resolve_loss("mse")(REALS.bfloat16(), SHARES).value.dtype == torch.float32


MAKE_INT64 = "Convert it to int64, with .long() or .astype('int64')"


@pytest.mark.parametrize(
    ("target", "came", "advice"),
    [
        (INDICES.int(), "shape (6,), dtype int32", f"{MAKE_INT64}."),
        (INDICES.byte(), "shape (6,), dtype uint8", f"{MAKE_INT64}."),
        (
            INDICES.float(),
            "shape (6,), dtype float32",
            f"{MAKE_INT64}; NaN is not a class, so leave those samples out first.",
        ),
        (
            ZERO_ONE.long(),
            "shape (6, 4), dtype int64",
            "For a one-hot target, pass target.argmax(1).",
        ),
        (
            INDICES[:5],
            "shape (5,), dtype int64",
            "Pass one class index per prediction; dimension 1 of the prediction holds the classes.",
        ),
    ],
)
@pytest.mark.parametrize("name", ["cross_entropy", "nll", "multi_margin"])
def test_targets_that_are_no_class_indices_are_refused(name, target, came, advice):
    """Torch's own texts for these are about scalar types and multi-targets."""
    assert message(resolve_loss(name), REALS, target) == (
        f"loss {name!r} needs class indices of shape (6,) and dtype int64 for a prediction of "
        f"shape (6, 4), got a target of {came}. {advice}"
    )


def test_class_indices_of_dense_prediction_have_all_other_dimensions():
    """Segmentation has its classes in dimension 1 as well."""
    prediction, target = torch.randn(2, 5, 3, 3), torch.zeros(2, 3, 3, dtype=torch.int64)
    expected = functional.cross_entropy(prediction, target)
    assert torch.equal(resolve_loss("cross_entropy")(prediction, target).value, expected)
    assert message(resolve_loss("cross_entropy"), prediction, target[:, None]).endswith(
        "got a target of shape (2, 1, 3, 3), dtype int64. Pass target.squeeze(1)."
    )


def test_named_losses_take_single_tensors():
    """Which of several tensors is meant, only the user knows."""
    advice = "Pass a callable loss(prediction, target) that picks its tensors."
    loss = resolve_loss("mse")
    assert message(loss, (REALS, REALS), REALS) == (
        f"loss 'mse' takes one tensor as prediction, got tuple. {advice}"
    )
    assert message(loss, REALS, {"y": REALS}) == (
        f"loss 'mse' takes one tensor as target, got dict. {advice}"
    )
    assert message(loss, REALS, None) == (
        f"loss 'mse' takes one tensor as target, got NoneType. {advice}"
    )
    assert message(loss, {"y": REALS}, REALS) == (
        "loss 'mse' takes one tensor as prediction, got dict. Name the output, loss={'y': 'mse'}, "
        "or pass a callable loss(prediction, target) that picks its tensors."
    )


def test_an_integer_prediction_has_no_gradient_and_is_refused():
    """An argmax inside the module is a usual slip of those who come from evaluation code."""
    assert message(resolve_loss("mse"), INDICES, INDICES) == (
        "loss 'mse' needs a floating-point prediction, got dtype int64. Return the values before "
        "the argmax or the rounding."
    )


# ---- modules, classes and callables -------------------------------------------------------------


def test_a_module_is_kept_for_it_may_own_parameters():
    """A learned temperature has to be the very tensor that the optimizer updates."""
    module = nn.CrossEntropyLoss(weight=torch.ones(4), label_smoothing=0.1)
    loss = resolve_loss(module)
    assert (loss.name, loss.reduction) == ("CrossEntropyLoss", "mean")
    assert loss.module is module
    assert loss.function is None
    assert torch.equal(loss(REALS, INDICES).value, module(REALS, INDICES))


def test_a_class_without_arguments_is_instantiated():
    """Forgetting the parentheses has one meaning only."""
    assert isinstance(resolve_loss(nn.MSELoss).module, nn.MSELoss)


class _NeedsWidth(nn.Module):
    def __init__(self, width):
        super().__init__()


class _Failing(nn.Module):
    def __init__(self):
        raise TypeError("mine")


def test_a_class_that_needs_arguments_is_refused():
    """Python's TypeError would not say that an instance is wanted."""
    assert message(resolve_loss, _NeedsWidth) == (
        "a loss class must need no arguments, got _NeedsWidth (missing a required argument: "
        "'width'). Pass an instance: loss=_NeedsWidth(...)."
    )


def test_an_error_inside_a_constructor_is_the_users_own():
    """Taking it for a missing argument would send the user to the wrong place."""
    with pytest.raises(TypeError, match="mine"):
        resolve_loss(_Failing)


@pytest.mark.parametrize(
    ("module", "reduction"),
    [
        (nn.MSELoss(), "mean"),
        (nn.MSELoss(reduction="sum"), "sum"),
        (nn.KLDivLoss(reduction="batchmean"), "mean"),
        (nn.PairwiseDistance(), "mean"),
        (functools.partial(functional.mse_loss, reduction="sum"), "sum"),
        (functional.mse_loss, "mean"),
    ],
)
def test_reduction_is_what_the_loss_says_of_itself(module, reduction):
    """It decides how micro-batches of different sizes are put together."""
    assert resolve_loss(module).reduction == reduction


def test_an_attribute_of_that_name_but_another_kind_is_the_users_own():
    """A layer called ``reduction`` is no reduction."""
    module = nn.Module()
    module.reduction = nn.Linear(1, 1)
    assert resolve_loss(module).reduction == "mean"


def test_losses_without_a_reduction_are_refused_at_once():
    """Otherwise the same is found out in the middle of a capture."""
    text = (
        "must give one number for a micro-batch, got reduction='none'. Use reduction='mean', or "
        "wrap it in a callable that reduces it."
    )
    assert message(resolve_loss, nn.L1Loss(reduction="none")) == f"loss 'L1Loss' {text}"
    partial = functools.partial(functional.mse_loss, reduction="none")
    assert message(resolve_loss, partial) == f"loss 'mse_loss' {text}"


def test_an_unknown_reduction_is_refused():
    """Guessing a mean where a sum is meant scales every gradient."""
    module = nn.Module()
    module.reduction = "median"
    assert message(resolve_loss, module) == (
        "loss 'Module' must have reduction 'mean', 'batchmean' or 'sum', got 'median'. Use one of "
        "these; it says how the loss combines the samples."
    )


def test_a_callable_gets_prediction_and_target_as_they_are():
    """Nested outputs and targets are what callables are for."""

    def both(prediction, target):
        return (prediction["a"] - target[0]).square().mean()

    loss = resolve_loss(both)
    assert (loss.name, loss.reduction, loss.module) == ("both", "mean", None)
    assert loss.function is both
    assert loss({"a": torch.ones(2)}, [torch.zeros(2)]).value.item() == 1.0
    assert resolve_loss(lambda p, t: p.mean()).name == "<lambda>"
    assert resolve_loss(functools.partial(both)).name == "both"


def test_one_value_per_sample_is_averaged():
    """Keras' custom losses return one; a loop by hand would say .mean() to it."""

    def per_sample(prediction, target):
        return (prediction - target).square().mean(1)

    def per_element(prediction, target):
        return (prediction - target).square()

    expected = functional.mse_loss(REALS, SHARES)
    for function in (per_sample, per_element):
        value = resolve_loss(function)(REALS, SHARES).value
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_refused_by_name(dtype):
    """Torch's own texts name a kernel, and which of two parts is to be learned nobody said."""
    came = str(dtype).replace("torch.", "")
    advice = (
        "Pass real and imaginary parts with torch.view_as_real, or pass a callable "
        "loss(prediction, target) that returns a real number."
    )
    assert message(resolve_loss("mse"), REALS.to(dtype), REALS) == (
        f"loss 'mse' needs real numbers, got a prediction of dtype {came}. {advice}"
    )
    assert message(resolve_loss("soft_margin"), REALS, REALS.to(dtype)) == (
        f"loss 'soft_margin' needs real numbers, got a target of dtype {came}. {advice}"
    )
    assert message(resolve_loss(lambda p, t: (p - t).mean()), REALS.to(dtype), REALS) == (
        f"loss '<lambda>' must be a real number, got dtype {came}. Make it real, for example with "
        ".abs()."
    )


@pytest.mark.parametrize(("loss", "came"), [(3, "int"), (int, "the class int")])
def test_anything_else_is_refused(loss, came):
    """The reader needs what is accepted, not the type check that failed."""
    assert message(resolve_loss, loss) == (
        "loss must be a name, an nn.Module, a callable (prediction, target) -> scalar, or None, "
        f"got {came}. Pass for example loss='mse'."
    )


# ---- the value ----------------------------------------------------------------------------------


def test_a_loss_of_one_element_becomes_zero_dimensional():
    """The anchors of an execution are one number per micro-batch."""
    value = torch.ones(1, 1, requires_grad=True)
    checked = check_loss_value(value, "the loss")
    assert checked.shape == ()
    checked.backward()
    assert value.grad.tolist() == [[1.0]]


def test_a_value_that_is_no_scalar_is_refused():
    """A gradient exists of one number only."""
    text = (
        "loss 'unreduced' must be a scalar, got shape (6, 4). Reduce it to one number, for example "
        "with .mean()."
    )
    assert message(check_loss_value, REALS, "loss 'unreduced'") == text

    def unreduced(prediction, target):
        return (prediction - target).T

    assert message(resolve_loss(unreduced), REALS, REALS) == text.replace("(6, 4)", "(4, 6)")


def test_a_value_that_is_no_tensor_is_refused():
    """A float, from .item(), has lost its way back to the weights."""
    assert message(check_loss_value, 0.5, "loss 'mine'") == (
        "loss 'mine' must be a scalar tensor, got float. Compute it from the prediction with torch "
        "operations, so that gradients can flow."
    )


def test_a_value_that_is_an_integer_is_refused():
    """A count of errors has no gradient."""
    assert message(check_loss_value, torch.tensor(3), "loss 'mine'") == (
        "loss 'mine' must be floating-point, got dtype int64. Compute it from the prediction with "
        "differentiable operations; an argmax or a comparison has no gradient."
    )


# ---- loss=None ----------------------------------------------------------------------------------

VALUE = torch.tensor(2.5)
LastLoss = collections.namedtuple("LastLoss", "a b loss")
FirstLoss = collections.namedtuple("FirstLoss", "loss accuracy")


@dataclasses.dataclass
class _Output:
    loss: Any
    logits: Any


class _ModelOutput(collections.OrderedDict):
    """A mapping with attributes, as Hugging Face's models return it."""


@pytest.mark.parametrize(
    ("result", "outputs"),
    [
        ((1, VALUE), 1),
        ([1, VALUE], 1),
        ((1, 2, VALUE), (1, 2)),
        ([1, 2, VALUE], (1, 2)),
        (((1, 2), VALUE), (1, 2)),
        (LastLoss(1, 2, VALUE), (1, 2)),
        (FirstLoss(VALUE, torch.tensor(0.5)), torch.tensor(0.5)),
        ({"loss": VALUE, "logits": 1}, {"logits": 1}),
        (_ModelOutput(loss=VALUE, logits=1), {"logits": 1}),
        (_Output(VALUE, 1), {"logits": 1}),
        ((1, VALUE.reshape(1)), 1),
    ],
)
def test_a_module_with_its_own_loss_returns_outputs_and_loss(result, outputs):
    """PopTorch models and Hugging Face models have their loss inside and must run unchanged."""
    loss = resolve_loss(None)
    assert (loss.in_module, loss.module, loss.function) == (True, None, None)
    came, term = loss.split(result)
    assert came == outputs
    assert type(came) is type(outputs)
    assert (term.value.shape, term.count, term.parts) == ((), None, {})
    assert term.value.item() == 2.5


@pytest.mark.parametrize(
    ("result", "came"),
    [
        (REALS, "a tensor of shape (6, 4), dtype float32"),
        (VALUE, "a tensor of shape (), dtype float32"),
        ((VALUE,), "tuple of 1, the last a tensor of shape (), dtype float32"),
        ((REALS, 0.5), "tuple of 2, the last float"),
        ((), "tuple"),
        ({"logits": REALS}, "dict with keys ['logits']"),
        ({"loss": None, "logits": REALS}, "dict with keys ['loss', 'logits']"),
        (_Output(None, REALS), "_Output"),
        (None, "NoneType"),
    ],
)
def test_a_result_without_a_loss_is_refused(result, came):
    """Most often loss= was forgotten, so the text says so."""
    assert message(resolve_loss(None).split, result) == (
        "with loss=None the module must return (outputs, loss), the loss a tensor of one number, "
        f"got {came}. Return (outputs, loss) from forward, or pass loss= to compile."
    )


class _Named(dict):
    """A mapping of a library's own."""


def test_a_loss_in_another_place_gets_advice():
    """Models of the transformers library have it first, by name, or only beside labels."""
    split = resolve_loss(None).split
    assert message(split, (VALUE, REALS)).endswith(
        "got tuple of 2, the last a tensor of shape (6, 4), dtype float32. Return (outputs, loss) "
        "from forward, or pass loss= to compile. The first looks like the loss, which must be "
        "last: models of the transformers library return it by name with config.return_dict = "
        "True."
    )
    assert message(split, _Named(logits=REALS)).endswith(
        "got _Named with keys ['logits']. If forward computes the loss from labels, put them into "
        "the batch under the name of its parameter, such as 'labels'. Return (outputs, loss) from "
        "forward, or pass loss= to compile."
    )


def test_the_modules_own_loss_must_be_differentiable():
    """The last of (logits, predicted class) of one sample is one number, and no loss."""
    assert message(resolve_loss(None).split, (REALS, torch.tensor(1))) == (
        "the module's own loss must be floating-point, got dtype int64. Compute it from the "
        "prediction with differentiable operations; an argmax or a comparison has no gradient."
    )


class Penalty:
    """A loss that is an object, with a factor that a callback changes from epoch to epoch."""

    def __init__(self):
        self.factor = torch.tensor(1.0, dtype=torch.float64)
        self.power = 2
        self.last = None

    def __call__(self, prediction, target):
        value = ((prediction - target) ** self.power).mean() * self.factor
        self.last = value
        return value

    def method(self, prediction, target):
        return self(prediction, target)


@pytest.mark.long
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda penalty: penalty,
        lambda penalty: penalty.method,
        lambda penalty: functools.partial(penalty),
        lambda penalty: [penalty, None],
    ],
    ids=["object", "method", "partial", "several"],
)
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.filterwarnings("ignore:forward sets Penalty.last")
def test_attributes_of_a_loss_that_is_an_object_may_change_between_epochs(loss_of, run_eagerly):
    """They are recorded as constants, so a change needs another recording, and an old one returns.

    What the object notes down while it is recorded is undone: it has no values.
    """
    penalty = Penalty()
    several = isinstance(loss_of(penalty), list)

    class Net(nn.Linear):
        def forward(self, x):
            result = super().forward(x)
            return (result, result) if several else result

    net = Net(2, 1).double()
    x = torch.randn(6, 2, dtype=torch.float64)
    y = torch.randn(6, 1, dtype=torch.float64)
    with torch.no_grad():
        error = net(x)[0] - y if several else net(x) - y
    batches = [(x, (y, y) if several else y)]

    class Change(ipufit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            penalty.power = (2, 4, 4, 2)[epoch]
            penalty.factor = penalty.factor * 0 + (1.0, 1.0, 3.0, 1.0)[epoch]

    model = ipufit.Model(net)
    model.compile(lambda p: torch.optim.SGD(p, lr=0.0), loss_of(penalty), run_eagerly=run_eagerly)
    history = model.fit(batches, epochs=4, callbacks=Change(), verbose=0)
    second, fourth = (error**2).mean().item(), (error**4).mean().item()
    expected = [second, fourth, 3 * fourth, second]
    assert history.history["loss"] == pytest.approx(expected, rel=1e-14)
    assert run_eagerly or penalty.last is None
    penalty.power = 4
    assert model.evaluate(batches, verbose=0)["loss"] == pytest.approx(fourth, rel=1e-14)
