"""Several losses at once: by name and by position, weighted, each logged."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import Precision
from ipufit.errors import ConfigurationError, LossError
from ipufit.losses import resolve_loss
from ipufit.tracing.capture import capture
from ipufit.tracing.grad_step import GradStep, ModuleWithLoss
from tests import told

CLOSE = {"rtol": 1e-14, "atol": 1e-15}
_GENERATOR = torch.Generator().manual_seed(4)
N = 5
A = torch.randn(N, 3, generator=_GENERATOR, dtype=torch.float64)
B = torch.randn(N, generator=_GENERATOR, dtype=torch.float64)
CLASSES = torch.tensor([0, 2, 1, 1, 0])
REALS = torch.randn(N, generator=_GENERATOR, dtype=torch.float64)
WEIGHTS = torch.tensor([0.5, 0.0, 2.0, 1.0, 3.0], dtype=torch.float64)
OTHER = torch.tensor([1.0, 1.0, 0.0, 4.0, 0.5], dtype=torch.float64)

Pair = collections.namedtuple("Pair", ["a", "b"])


@dataclasses.dataclass
class Record:
    """A module's outputs with names."""

    a: Any
    b: Any


message = functools.partial(told.message, kind=LossError)


EXPECTED_A = functional.cross_entropy(A, CLASSES)
EXPECTED_B = functional.mse_loss(B, REALS)
FORMS = [
    ({"a": "cross_entropy", "b": "mse"}, {"a": A, "b": B}, {"a": CLASSES, "b": REALS}),
    ({"b": "mse", "a": nn.CrossEntropyLoss()}, Pair(A, B), {"a": CLASSES, "b": REALS, "id": 3}),
    ({"a": "cross_entropy", "b": "mse"}, Record(A, B), Pair(CLASSES, REALS)),
    ({"a": "cross_entropy", "b": "mse"}, {"a": A, "b": B, "c": B}, Record(CLASSES, REALS)),
    (["cross_entropy", "mse"], (A, B), (CLASSES, REALS)),
    (("cross_entropy", nn.MSELoss), [A, B], [CLASSES, REALS]),
    (["cross_entropy", "mse"], Pair(A, B), Pair(CLASSES, REALS)),
]


@pytest.mark.parametrize(("loss", "prediction", "target"), FORMS)
def test_each_output_has_its_loss_and_their_sum_is_optimised(loss, prediction, target):
    """Keras' loss of several outputs, in every structure that a module returns."""
    resolved = resolve_loss(loss)
    by_name = isinstance(loss, dict)
    term = resolved(prediction, target)
    torch.testing.assert_close(term.value, EXPECTED_A + EXPECTED_B, **CLOSE)
    assert term.count is None
    names = ("a_loss", "b_loss") if by_name else ("output_0_loss", "output_1_loss")
    assert sorted(resolved.part_names) == sorted(term.parts) == list(names)
    torch.testing.assert_close(term.parts[names[0]], EXPECTED_A, **CLOSE)
    torch.testing.assert_close(term.parts[names[1]], EXPECTED_B, **CLOSE)
    assert resolved.outputs == (tuple(loss) if by_name else 2)
    assert (resolved.reduction, resolved.in_module) == ("mean", False)


@pytest.mark.parametrize(
    ("loss", "prediction", "target", "weights"),
    [
        (*FORMS[0], {"a": 0.25, "b": 3}),
        (*FORMS[4], [0.25, 3]),
        (*FORMS[4], (0.25, 3.0)),
    ],
)
def test_loss_weights_weigh_the_sum_and_not_the_parts(loss, prediction, target, weights):
    """The parts are logged as they are, so that they can be compared between runs."""
    resolved = resolve_loss(loss, weights)
    term = resolved(prediction, target)
    torch.testing.assert_close(term.value, 0.25 * EXPECTED_A + 3.0 * EXPECTED_B, **CLOSE)
    assert list(term.parts.values()) == [EXPECTED_A, EXPECTED_B]
    assert not any(part.requires_grad for part in term.parts.values())


def test_loss_weights_left_out_are_one():
    """As in Keras."""
    resolved = resolve_loss(FORMS[0][0], {"b": -2.0})
    value = resolved(*FORMS[0][1:]).value
    torch.testing.assert_close(value, EXPECTED_A - 2.0 * EXPECTED_B, **CLOSE)


def test_an_output_without_a_loss_is_not_trained():
    """Its target may be missing too."""
    target = {"b": REALS}
    for loss in ({"b": "mse"}, {"a": None, "b": "mse"}):
        resolved = resolve_loss(loss)
        term = resolved({"a": A, "b": B}, target)
        assert (term.value, list(term.parts)) == (EXPECTED_B, ["b_loss"])
        assert (resolved.part_names, resolved.outputs) == (("b_loss",), ("b",))
    resolved = resolve_loss([None, "mse"])
    term = resolved((A, B), (None, REALS))
    assert (term.value, list(term.parts)) == (EXPECTED_B, ["output_1_loss"])
    assert (resolved.part_names, resolved.outputs) == (("output_1_loss",), 2)


# ---- sample weights -----------------------------------------------------------------------------

VALUES_A = functional.cross_entropy(A, CLASSES, reduction="none")
VALUES_B = (B - REALS).square()


@pytest.mark.parametrize(
    ("weights", "of_a", "of_b"),
    [
        (WEIGHTS, WEIGHTS, WEIGHTS),
        (WEIGHTS[:, None], WEIGHTS, WEIGHTS),
        ({"a": WEIGHTS, "b": OTHER}, WEIGHTS, OTHER),
        ({"a": WEIGHTS, "b": None}, WEIGHTS, torch.ones(N)),
        ({"b": OTHER}, torch.ones(N), OTHER),
        (Pair(WEIGHTS, OTHER), WEIGHTS, OTHER),
    ],
)
def test_samples_weigh_alike_or_by_output(weights, of_a, of_b):
    """A sample may have a label for one output and none for another."""
    term = resolve_loss(FORMS[0][0])(*FORMS[0][1:], weights)
    torch.testing.assert_close(term.parts["a_loss"], (of_a * VALUES_A).mean(), **CLOSE)
    torch.testing.assert_close(term.parts["b_loss"], (of_b * VALUES_B).mean(), **CLOSE)
    torch.testing.assert_close(term.value, sum(term.parts.values()), **CLOSE)
    assert term.count is None


def test_weights_by_position():
    """As the losses."""
    term = resolve_loss(FORMS[4][0])(*FORMS[4][1:], [None, OTHER])
    assert term.parts["output_0_loss"] == EXPECTED_A
    torch.testing.assert_close(term.parts["output_1_loss"], (OTHER * VALUES_B).mean(), **CLOSE)


def test_the_mean_by_weight_counts_the_weight():
    """All outputs must have one count, by which micro-batches are put together."""
    how = "mean_with_sample_weight"
    resolved = resolve_loss(FORMS[0][0], sample_weight_reduction=how)
    term = resolved(*FORMS[0][1:], WEIGHTS)
    expected = (WEIGHTS * (VALUES_A + VALUES_B)).sum() / WEIGHTS.sum()
    torch.testing.assert_close(term.value, expected, **CLOSE)
    assert term.count.item() == WEIGHTS.sum().item()
    empty = resolved(*FORMS[0][1:], torch.zeros(N))
    assert (empty.value.item(), empty.count.item()) == (0.0, 0.0)
    assert resolved(*FORMS[0][1:]).count is None
    by_micro_batch = resolve_loss(FORMS[0][0], None, "micro_batches", how)
    assert by_micro_batch(*FORMS[0][1:], WEIGHTS).count is None
    assert message(resolved, *FORMS[0][1:], {"a": WEIGHTS, "b": OTHER}) == (
        "sample_weight must be one tensor for all outputs with several losses and "
        "sample_weights='mean_with_sample_weight', got dict with ['a', 'b']: with separate "
        "weights, each loss would have a separate count. Pass one tensor, or use "
        "'sum_over_batch_size'."
    )


# ---- modules ------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A loss that is trained itself."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, prediction, target):
        self.calls.add_(1)
        return self.scale * (prediction - target).square()


def test_the_modules_of_the_parts_are_owned():
    """Their parameters are trained and their buffers kept like those of one loss."""
    first, second = Scaled(), Scaled()
    for losses in ({"a": first, "b": second}, {"a.b": first, "forward": second}, [first, second]):
        module = resolve_loss(losses).module
        parameters = list(module.parameters())
        assert [id(p) for p in parameters] == [id(first.scale), id(second.scale)]
        assert len(list(module.buffers())) == 2
    assert [n for n, _ in resolve_loss({"a": first}).module.named_parameters()] == ["a.scale"]
    assert resolve_loss({"a": "mse"}).module is None


def test_several_losses_can_be_pickled():
    """A compiled model is saved with its loss."""
    loss = pickle.loads(pickle.dumps(resolve_loss(FORMS[0][0], {"a": 0.5})))
    assert loss(*FORMS[0][1:]).value == 0.5 * EXPECTED_A + EXPECTED_B


class Net(nn.Module):
    """Two outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 3).double(), nn.Linear(4, 1).double()

    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x).squeeze(1)}


@pytest.mark.long
def test_training_follows_the_weighted_sum_of_the_losses():
    """The parameters of all parts, against a loop by hand."""
    x = torch.randn(12, 4, generator=_GENERATOR, dtype=torch.float64)
    classes, reals = torch.arange(12) % 3, x.sum(1)

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return x[i], {"a": classes[i], "b": reals[i]}

    net, loss = Net(), Scaled()
    model = ipufit.Model(net)
    model.compile(
        lambda params: torch.optim.SGD(params, lr=0.1),
        {"a": "cross_entropy", "b": loss},
        loss_weights={"a": 0.5},
        metrics={"a": ["accuracy"], "b": "mse"},
    )
    history = model.fit(DataLoader(Rows(), batch_size=4), verbose=0)
    assert {"loss", "a_accuracy", "b_mse"} <= set(history.history)
    other, by_hand = Net(), Scaled()
    optimizer = torch.optim.SGD([*other.parameters(), by_hand.scale], lr=0.1)
    for rows in (slice(0, 4), slice(4, 8), slice(8, 12)):
        optimizer.zero_grad()
        outputs = other(x[rows])
        first = functional.cross_entropy(outputs["a"], classes[rows])
        (0.5 * first + by_hand(outputs["b"], reals[rows]).mean()).backward()
        optimizer.step()
    torch.testing.assert_close(loss.scale, by_hand.scale, rtol=1e-12, atol=0)
    torch.testing.assert_close(net.state_dict(), other.state_dict(), rtol=1e-12, atol=1e-14)
    assert loss.calls.item() == 3.0


@pytest.mark.long
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("plan", [{}, {"gradient_accumulation": 2}, {"device_iterations": 3}])
def test_the_parts_add_up_to_the_loss_with_a_smaller_last_micro_batch(reduction, plan):
    """A sum over fewer samples counts like one over a full micro-batch, in the parts as well."""
    x = torch.randn(10, 4, generator=_GENERATOR, dtype=torch.float64)
    y = torch.randn(10, 4, generator=_GENERATOR, dtype=torch.float64)

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, i):
            return x[i], {"a": y[i, :3], "b": y[i, 3]}

    net = Net()
    model = ipufit.Model(net)
    losses = {name: nn.MSELoss(reduction=reduction) for name in "ab"}
    model.compile(lambda p: torch.optim.SGD(p, lr=0.0), losses, loss_weights={"a": 0.5})
    rows = DataLoader(Rows(), batch_size=4)
    history = model.fit(rows, validation_data=rows, verbose=0, **plan).history
    with torch.no_grad():
        outputs = net(x)
    of_a, of_b = ((outputs["a"] - y[:, :3]) ** 2).sum(), ((outputs["b"] - y[:, 3]) ** 2).sum()
    of_a, of_b = (of_a / 30, of_b / 10) if reduction == "mean" else (of_a * 0.4, of_b * 0.4)
    for prefix in ("", "val_"):
        values = [history[prefix + name][0] for name in ("a_loss", "b_loss", "loss")]
        expected = [of_a.item(), of_b.item(), (0.5 * of_a + of_b).item()]
        assert values == pytest.approx(expected, rel=1e-13)


@pytest.mark.long("ipu-standin")
def test_sample_weights_reach_the_recorded_losses():
    """The micro-batch carries them as inputs of the program, so other values give other numbers."""
    net = Net()
    step = ModuleWithLoss(net, resolve_loss({"a": "cross_entropy", "b": "mse"}))
    x = torch.randn(N, 4, generator=_GENERATOR, dtype=torch.float64)

    def batch(weights):
        return MicroBatch.of((x,), {}, {"a": CLASSES, "b": REALS}, N, weights)

    example = batch({"a": WEIGHTS, "b": OTHER})
    state = dict(step.named_parameters())
    micro = GradStep(step, [], list(state), example, True, False, None, Precision(), False)
    program = capture(micro, [*state.values(), *example.leaves])
    outputs = net(x)
    for of_a, of_b in ((WEIGHTS, OTHER), (OTHER, WEIGHTS)):
        with torch.no_grad():
            (numbers,) = program(*state.values(), *batch({"a": of_a, "b": of_b}).leaves)
        first = of_a * functional.cross_entropy(outputs["a"], CLASSES, reduction="none")
        second = of_b * (outputs["b"] - REALS).square()
        wanted = [first.mean() + second.mean(), first.mean(), second.mean()]
        torch.testing.assert_close(numbers, torch.stack(wanted), **CLOSE)


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "prediction", "target", "text"),
    [
        (
            FORMS[0][0],
            {"a": A, "c": B},
            FORMS[0][2],
            "the module's outputs must hold 'b', got dict with ['a', 'c']. Use an existing "
            "name, or add it.",
        ),
        (
            FORMS[0][0],
            FORMS[0][1],
            {"a": CLASSES},
            "the target must hold 'b', got dict with ['a']. Use an existing name, or add it.",
        ),
        (
            FORMS[0][0],
            (A, B),
            FORMS[0][2],
            "the module's outputs must be a mapping, named tuple or dataclass to be used by "
            "name ('a'), got tuple of 2. Return a dict, or pass losses and metrics as a list by "
            "position.",
        ),
        (
            FORMS[0][0],
            A,
            FORMS[0][2],
            "the module's outputs must be a mapping, named tuple or dataclass to be used by "
            "name ('a'), got Tensor. Return a dict, or pass losses and metrics as a list by "
            "position.",
        ),
        (
            FORMS[4][0],
            {"a": A, "b": B},
            FORMS[4][2],
            "the module's outputs must be a tuple or list to be used by position, got dict with "
            "['a', 'b']. Pass losses and metrics as a dict by name: {'a': ...}.",
        ),
        (
            FORMS[4][0],
            A,
            FORMS[4][2],
            "the module's outputs must be a tuple or list to be used by position, got Tensor. "
            "Pass a tuple with one element for each output; output 0 has none.",
        ),
        (
            FORMS[4][0],
            (A, B, B),
            FORMS[4][2],
            "the module's outputs must have one element for each of the 2 losses, got tuple of 3. "
            "Pass None as the loss of an output that is not trained.",
        ),
        (
            FORMS[4][0],
            (A, B),
            [CLASSES],
            "the target must have one element for each of the 2 losses, got list of 1. Pass None "
            "as the loss of an output that is not trained.",
        ),
        (
            FORMS[4][0],
            (A, B),
            CLASSES,
            "the target must have one part for each of the 2 losses, got one tensor of shape (5,). "
            "Return a tuple of 2 from the dataset.",
        ),
        (
            FORMS[0][0],
            {"a": A, "b": B},
            CLASSES,
            "the target must have one part for each of the 2 losses, got one tensor of shape (5,). "
            "Return {'a': ..., 'b': ...} from the dataset.",
        ),
    ],
)
def test_outputs_and_targets_must_be_there(loss, prediction, target, text):
    """What is there is the quickest way to see what was misspelt."""
    assert message(resolve_loss(loss), prediction, target) == text


def test_sample_weights_of_unknown_outputs_are_refused():
    """A misspelt name would leave an output unweighted."""
    resolved = resolve_loss({"a": "cross_entropy", "b": "mse"})
    assert message(resolved, *FORMS[0][1:], {"A": WEIGHTS}) == (
        "sample_weight must go by the names of outputs, got 'A', but the outputs are dict with "
        "['a', 'b']. Use these names, or one tensor for all."
    )
    assert message(resolved, *FORMS[0][1:], [WEIGHTS, OTHER]) == (
        "sample_weight must go by the names of outputs, got 0, but the outputs are dict with ['a', "
        "'b']. Use these names, or one tensor for all."
    )
    by_position = resolve_loss(["cross_entropy", "mse"])
    assert message(by_position, *FORMS[4][1:], [WEIGHTS]) == (
        "sample_weight must have one element for each of the 2 losses, got list of 1. Pass None as "
        "the loss of an output that is not trained."
    )
    assert message(by_position, *FORMS[4][1:], {"a": WEIGHTS}).startswith(
        "sample_weight must be a tuple or list to be used by position, got dict with ['a']."
    )


@pytest.mark.parametrize(
    ("loss", "options", "text"),
    [
        (
            {"a": {"b": "mse"}},
            {},
            "each output must have one loss, got dict of 1 for 'a'. Pass a callable "
            "loss(prediction, target) that adds them up.",
        ),
        (
            ["mse", ["mse", "mae"]],
            {},
            "each output must have one loss, got list of 2 for 'output_1'. Pass a callable "
            "loss(prediction, target) that adds them up.",
        ),
        (
            {0: "mse"},
            {},
            "losses as a dict must have names of outputs as keys, got 0. Write {'output': loss}; "
            "for losses by position, a list.",
        ),
        (
            {"val_a": "mse"},
            {},
            "the name of a logged value must be free, and ipufit itself logs batch, epoch, event, "
            "learning_rate, loss, loss_scale, samples, skipped_updates, update, updates and "
            "val_..., got 'val_a_loss'. Choose another name; rename a metric with "
            "metrics={'name': metric}.",
        ),
        (
            [],
            {},
            "at least one output must have a loss, got []. Pass for example loss={'output': "
            "'mse'}, or loss=None when the module returns (outputs, loss).",
        ),
        (
            {"a": None},
            {},
            "at least one output must have a loss, got {'a': None}. Pass for example "
            "loss={'output': 'mse'}, or loss=None when the module returns (outputs, loss).",
        ),
        (
            ["mse", nn.MSELoss(reduction="sum")],
            {},
            "several losses must all be means or all be sums, got output_0 'mean', output_1 'sum'. "
            "Otherwise their ratio would depend on the size of the micro-batch; use one reduction.",
        ),
        (
            {"a": "mse", "b": "mse"},
            {"normalize": "tokens"},
            "normalize='tokens' needs one loss, got 2: each would count its own tokens. Pass one "
            "callable loss(prediction, target) that returns (mean, count).",
        ),
        (
            {"a": "mse", "b": None},
            {"loss_weights": {"b": 2.0}},
            "loss_weights must go by the outputs that have a loss, ['a'], got 'b'. Use these "
            "names.",
        ),
        (
            ["mse", "mae"],
            {"loss_weights": [1.0]},
            "loss_weights must have one number for each of the 2 losses, got 1. Pass 1 to change "
            "nothing.",
        ),
        (
            ["mse", None],
            {"loss_weights": [1.0, 0.5]},
            "loss_weights must be 1 for outputs without a loss, got 0.5 for 'output_1'. Give it a "
            "loss, or 1 as its weight.",
        ),
        (
            ["mse", "mae"],
            {"loss_weights": {"a": 1.0}},
            "loss_weights must be a list, like the losses, got dict. Give one number for each "
            "loss.",
        ),
        (
            {"a": "mse"},
            {"loss_weights": 2.0},
            "loss_weights must be a dict by output, like the losses, got float. Give one number "
            "for each loss.",
        ),
        (
            {"a": "mse"},
            {"loss_weights": {"a": float("nan")}},
            "loss_weights must be finite numbers, got nan for 'a'. Give for example 0.5.",
        ),
        (
            ["mse", "mae"],
            {"loss_weights": [1.0, True]},
            "loss_weights must be finite numbers, got True for 'output_1'. Give for example 0.5.",
        ),
    ],
)
def test_losses_that_cannot_work_are_refused(loss, options, text):
    """At compile, before any work is lost."""
    assert message(resolve_loss, loss, kind=ConfigurationError, **options) == text


def test_compile_reports_a_bad_loss_alone_where_the_metrics_depend_on_it():
    """By what the metrics go is not known, and a second error about them would mislead."""
    model = ipufit.Model(Net())
    with pytest.raises(ConfigurationError) as caught:
        model.compile("sgd", ["mse", "mee"], metrics=[["mae"], ["mae"]], run_eagerly="no")
    texts = str(caught.value).splitlines()
    assert [text.split("'")[0] for text in texts] == [
        "unknown loss ",
        "run_eagerly must be True or False, got ",
    ]


def test_options_of_compile_reach_the_loss_and_the_metrics():
    """A word that compile takes and does not pass on is an option without an effect."""
    model = ipufit.Model(Net())
    for options, start in (
        ({"loss_weights": {"c": 1.0}}, "loss_weights must go by the outputs that have a loss"),
        (
            {"reduction": ipufit.Reduction(normalize="tokens")},
            "normalize='tokens' needs one loss, got 2",
        ),
        ({"weighted_metrics": ["mse"]}, "weighted_metrics must be a dict by output"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            model.compile("sgd", {"a": "cross_entropy", "b": "mse"}, **options)
        assert str(caught.value).startswith(start)


def test_a_single_target_in_the_data_is_refused_as_fit_starts():
    """The text names the structure to return from the dataset."""
    model = ipufit.Model(Net())
    model.compile("sgd", {"a": "cross_entropy"})
    rows = DataLoader(TensorDataset(torch.zeros(4, 4).double(), torch.arange(4) % 3), batch_size=2)
    with pytest.raises(LossError) as caught:
        model.fit(rows, verbose=0)
    assert str(caught.value) == (
        "the target must have one part for each of the 1 losses, got one tensor of shape (2,). "
        "Return {'a': ...} from the dataset."
    )
