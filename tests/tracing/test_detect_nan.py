"""The first value that is not finite is named, in gradients with ``compile(detect_nan=True)``."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import ipufit
from ipufit.callbacks import TerminateOnNaN
from ipufit.engines.embedded import context as context_module
from ipufit.engines.embedded import non_finite, replay_update
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.errors import NonFiniteLossError, NonFiniteValue, Operand
from ipufit.tracing.source_map import SourceTracker
from tests import nets
from tests.tape import Tapes
from tests.told import message

pytestmark = pytest.mark.both_engines

NUMBERS_OPERATORS = hasattr(torch._C._autograd, "_get_sequence_nr")


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)


class Forward(nn.Module):
    """Takes the logarithm of what is zero for a picture of zeros."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 8)
        self.log = Log()
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(self.log(self.inner(x).abs() * x[:, :1].abs()))


class Backward(nn.Module):
    """Takes the root of zero, which only its gradient can't stand."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = x.flatten(1)
        y = torch.sqrt((self.inner(x) * x[:, :1]).abs())
        return self.head(y)


class Masked(nn.Module):
    """Attention with a mask of -inf; for a picture of zeros all is masked."""

    def __init__(self, all_of_zeros=True):
        super().__init__()
        self.all_of_zeros = all_of_zeros
        self.embed = nn.Linear(4, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = x.squeeze(1)
        scores = x @ x.transpose(1, 2)
        blank = x.abs().sum(2, keepdim=True).expand_as(scores) == 0
        blank = blank & (torch.ones(3, 3, dtype=x.dtype).tril(0 if self.all_of_zeros else -1) == 1)
        causal = torch.full((3, 3), -math.inf, dtype=x.dtype).triu(1)
        weights = (scores + causal).masked_fill(blank, -math.inf).softmax(2)
        return self.head((weights @ self.embed(x)).mean(1))


def line_of(text):
    """The line of this file that has a text."""
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if text in line)


def data(bad=13, value=0.0, n=24):
    """Pictures, one of them with other values."""
    x, y = nets.data(n)
    x[bad] = value
    return x, y


def built(net, engine=None, optimizer="sgd", loss="cross_entropy", **options):
    """A compiled model that looks for what is not finite."""
    torch.manual_seed(0)
    module = net().double() if isinstance(net, type) else net
    model = ipufit.Model(module, engine=(lambda: engine) if engine else "embedded")
    model.compile(optimizer, loss, **{"detect_nan": True, **options})
    return model


def fit(model, x, y, **options):
    """One epoch in the order of the samples."""
    given = {"batch_size": 4, "gradient_accumulation": 2, **options}
    model.fit(x, y, verbose=0, shuffle=False, seed=1, **given)


def error_of(model, x, y, **options):
    """What ``fit`` ends with."""
    with pytest.raises(NonFiniteLossError) as caught:
        fit(model, x, y, **options)
    return caught.value


def as_device(tape):
    """An engine that treats the host as a device."""
    engine = EmbeddedEngine()
    engine.as_device = True
    engine.tape = Tapes() if tape else None
    return engine


WAYS = {
    "auto": ({}, None),
    "graph": ({"jit": "graph"}, None),
    "eager": ({"run_eagerly": True}, None),
    "device": ({}, lambda: as_device(False)),
    "tape": ({"jit": "auto"}, lambda: as_device(True)),
}


def _thousandfold(prediction, target):
    return 1000 * nn.functional.cross_entropy(prediction, target)


@pytest.fixture(params=WAYS)
def way(request):
    """How the program runs: options of compile, and the engine."""
    options, make = WAYS[request.param]
    return lambda: {**options, "engine": make() if make else None}


@pytest.mark.few
@pytest.mark.parametrize("work", [{}, {"ipus": 2, "device_iterations": 2}])
def test_the_operator_that_made_an_infinity_is_named(way, work):
    """Where the loss became NaN says nothing of the logarithm that is to blame."""
    model = built(Forward, **way())
    x, y = data()
    if work:
        x, y = torch.cat([nets.data(8)[0], x]), torch.cat([nets.data(8)[1], y])
    error = error_of(model, x, y, **work)
    found = error.found
    replicas = work.get("ipus", 1)
    assert (found.cause, found.made, found.kind) == ("forward", "inf", "Log")
    assert (error.module, error.operator) == ("log", "aten.log.default")
    assert (found.file, found.line) == (__file__, line_of("return torch.log(x)"))
    assert error.samples == (1,)
    assert error.epoch_samples == ((21,) if work else (13,))
    assert error.update == 1
    assert found.micro_batch == 1
    assert found.replica == 1 % replicas
    assert [operand.minimum for operand in found.operands] == [0.0]
    assert math.isnan(error.value)


@pytest.mark.few
def test_a_gradient_is_noticed_in_its_own_update(way):
    """Without this the weights are lost before the next loss shows it."""
    model = built(Backward, **way())
    error = error_of(model, *data(), epochs=2)
    found = error.found
    assert (error.update, error.epoch, error.epoch_samples) == (1, 0, (13,))
    assert (found.cause, found.module, found.parameter) == ("backward", "", "inner.weight")
    assert error.operator == "aten.div.Tensor"
    assert all(bool(p.isfinite().all()) for p in model.module.parameters())
    if NUMBERS_OPERATORS:
        assert (found.file, found.line) == (__file__, line_of("y = torch.sqrt("))
        assert found.source.startswith("y = torch.sqrt(")


@pytest.mark.long
def test_the_whole_text():
    """What users read, in the three beats of every error."""
    error = error_of(built(Forward), *data())
    assert str(error) == (
        "the loss must be finite, but it became nan in update 1. The weights, buffers and "
        "optimizer state are those from before that update. The forward pass made the first inf: "
        f"aten.log.default of module 'log' (Log), at {__file__}:{line_of('return torch.log(x)')}: "
        "`return torch.log(x)`, in replica 0, micro-batch 1 of 2. Its operands were (4 x 8): 0 to "
        f"{error.found.operands[0].maximum:.6g}. It is in sample 1 of the micro-batch. A logarithm "
        "needs positive numbers: clamp its input, for example x.clamp(min=1e-6).log(). In the "
        "order of epoch 1: 13; row of the data: 13."
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("net", "value"),
    [(nets.MLP, math.nan), (nets.CNN, math.inf), (nets.Transformer, math.nan)],
)
def test_data_that_is_not_finite_is_said_to_be_it(net, value):
    """It is the most common cause, and no operator's fault."""
    error = error_of(built(net), *data(bad=[13, 15], value=value))
    assert error.found.cause == "data"
    assert (error.update, error.samples, error.epoch_samples) == (1, (1, 3), (13, 15))
    assert error.operator is None
    name = "nan" if math.isnan(value) else "inf"
    assert str(error).endswith(
        f"The data was not finite: {name} in replica 0, micro-batch 1 of 2, samples 1, 3 of the "
        "micro-batch. Leave such samples out, or fill the missing values. In the order of epoch 1: "
        "13, 15; rows of the data: 13, 15."
    )


@pytest.mark.long
def test_targets_are_data():
    """A target that is missing is one of the samples too."""
    x = nets.data(8)[0]
    target = torch.randn(8, 5, dtype=torch.float64)
    target[6, 2] = math.nan
    error = error_of(built(nets.MLP, loss="mse"), x, target)
    assert (error.found.cause, error.epoch_samples) == ("data", (6,))


@pytest.mark.long
def test_a_weight_that_was_lost_before_is_named():
    """Then no operator of this update is to blame."""
    model = built(nets.MLP)
    with torch.no_grad():
        model.module.layers[2].bias[1] = math.nan
    error = error_of(model, *nets.data(8))
    assert (error.found.cause, error.found.parameter) == ("weights", "layers.2.bias")
    assert error.update == 0


@pytest.mark.few("tape")
def test_a_step_of_the_optimizer_that_loses_weights_is_taken_back(way):
    """The gradient is finite, so nobody would look for the update before the next loss."""
    rates = [1e-5, 1e-5, 1e308]
    options = {"lr_scheduler": lambda update: rates[update], "loss": _thousandfold}
    model = built(nets.MLP, **options, **way())
    error = error_of(model, *nets.data(24), device_iterations=3)
    assert (error.found.cause, error.update) == ("optimizer", 2)
    assert str(error).startswith("the weights must be finite, but 'layers.0.weight' became ")
    other = built(nets.MLP, **options, **way())
    fit(other, *nets.data(24), steps_per_epoch=2)
    for one, two in zip(model.module.parameters(), other.module.parameters()):
        assert torch.equal(one, two)


@pytest.mark.long
def test_masks_of_minus_infinity_are_not_blamed():
    """They are there on purpose; the softmax of a row that is masked as a whole is not."""
    fit(built(Masked(False).double()), *data())
    error = error_of(built(Masked().double()), *data())
    assert (error.found.cause, error.found.made) == ("forward", "nan")
    assert error.operator == "aten._softmax.default"
    assert error.epoch_samples == (13,)


class Given(nn.Module):
    """Scores with a mask that comes with the batch."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 12)

    def forward(self, x, mask):
        return (self.head(x) + mask).softmax(1)[:, :5]


def test_a_mask_in_the_batch_is_no_bad_data():
    """Of minus infinity alone, that is; here it masks one row as a whole."""
    x, y = nets.data(8)
    mask = torch.zeros(8, 12, dtype=torch.float64)
    mask[:, 7:] = -math.inf
    model = built(Given)
    fit(model, (x.flatten(1), mask), y)
    mask[5] = -math.inf
    error = error_of(model, (x.flatten(1), mask), y)
    assert (error.operator, error.epoch_samples) == ("aten._softmax.default", (5,))


class Chosen(nn.Module):
    """Leaves the logarithm of zero aside, and gets its gradient all the same."""

    def __init__(self, reached=True):
        super().__init__()
        self.reached = reached
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        y = self.head(x.flatten(1))
        z = y if self.reached else y.detach()
        z = z * x.flatten(1)[:, :1].abs()
        return torch.where(z == 0, y, torch.log(z.abs()))


@pytest.mark.long
def test_what_where_leaves_aside_is_blamed_for_its_gradient_alone():
    """A loss that is finite says that the logarithm did no harm; the gradient says it did."""
    fit(built(Chosen(False).double()), *data())
    error = error_of(built(Chosen().double()), *data())
    assert error.found.cause == "backward"
    assert error.operator == "aten.div.Tensor"
    if NUMBERS_OPERATORS:
        assert error.found.line == line_of("return torch.where(z == 0")


LAYOUTS = {
    "plain": lambda x: x.log(),
    "second dimension": lambda x: x.transpose(0, 1).log().transpose(0, 1),
    "last dimension": lambda x: x.permute(1, 2, 0).log().permute(2, 0, 1),
    "batch and rows": lambda x: x.reshape(-1, 4).log().view(-1, 3, 4),
    "rows and batch": lambda x: (
        x.transpose(0, 1).reshape(-1, 4).log().view(3, -1, 4).transpose(0, 1)
    ),
    "heads": lambda x: x.view(-1, 3, 2, 2).transpose(1, 2).reshape(-1, 3, 2).log().view(-1, 3, 4),
    "scaled": lambda x: (x * torch.rand(4, 4, dtype=x.dtype)[0]).unsqueeze(1).log().squeeze(1),
    "summed": lambda x: (x[:, :, :1] - 1 + x.sum(2, keepdim=True) - 3 + 1).clamp(0).log() + x,
    "one of the rows": lambda x: x.select(1, 1).log().unsqueeze(1) + x,
}


class Laid(nn.Module):
    """Takes the logarithm of a zero, however the rows of the batch lie then."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = x.clone()
        # In a picture that is marked, all of the second row is zero.
        marked = (x[:, 0, 0, 0] == 7).to(x.dtype)[:, None, None]
        row = torch.tensor([0.0, 1.0, 0.0], dtype=x.dtype)[None, :, None]
        ones = torch.ones_like(x.squeeze(1))
        return self.head(LAYOUTS[self.layout](ones - marked * row).flatten(1) + x.flatten(1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_followed_wherever_they_lie(layout):
    """Transposed, with other dimensions in one, or broadcast against something."""
    x, y = nets.data(4)
    x[2, 0, 0, 0] = 7.0
    error = error_of(built(Laid(layout).double(), run_eagerly=True), x, y, gradient_accumulation=1)
    assert error.operator == "aten.log.default"
    assert error.samples == (2,)


def test_rows_that_are_joined_are_told_of_none():
    """After a mean over the batch no sample is to blame."""

    class Joined(nets.MLP):
        def forward(self, x):
            return super().forward(x) + (x.mean(0).flatten()[:1] * 0).log()

    error = error_of(built(Joined), *nets.data(8))
    assert (error.operator, error.samples, error.epoch_samples) == ("aten.log.default", (), ())


class Large(nn.Module):
    """Has a gradient of nearly the largest number."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        return self.head(x.flatten(1)).squeeze(1)


def test_a_sum_of_gradients_that_overflows_is_told_apart():
    """Each micro-batch is innocent."""
    x = torch.full((8, 1, 3, 4), 1e19)
    model = built(
        Large().float(),
        loss=lambda p, t: p.mean() * 3e19,
        reduction=ipufit.Reduction(gradients="sum"),
    )
    error = error_of(model, x, torch.zeros(8))
    assert (error.found.cause, error.found.micro_batches) == ("accumulation", 2)
    assert error.found.parameter == "head.weight"


@pytest.mark.few
@pytest.mark.parametrize("way", ["auto", "graph"], indirect=True)
def test_a_fault_of_the_recording_alone_is_found_in_it(monkeypatch, way):
    """Where the module itself is fine, the recorded graph is run node by node."""
    original = context_module.capture

    def faulty(*args):
        graph = original(*args)
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                with graph.graph.inserting_after(node):
                    new = graph.graph.call_function(torch.ops.aten.div.Scalar, (node, 0.0))
                for user in list(node.users):
                    if user is not new:
                        user.replace_input_with(node, new)
        graph.recompile()
        return graph

    monkeypatch.setattr(context_module, "capture", faulty)
    error = error_of(built(nets.MLP, **way()), *nets.data(8))
    assert (error.operator, error.found.cause) == ("aten.div.Scalar", "forward")


def test_random_numbers_are_the_same_in_the_replay():
    """A division by what dropout made zero would not be there again otherwise."""

    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.drop = nn.Linear(12, 5), nn.Dropout(0.002)

        def forward(self, x):
            return self.head(1 / self.drop(torch.ones_like(x.flatten(1))))

    error = error_of(built(Dropped), *nets.data(96), ipus=2)
    assert (error.operator, error.module) == ("aten.reciprocal.default", "")
    assert error.found.cause == "forward"


@pytest.mark.few("auto", "tape")
def test_the_state_is_that_from_before_the_update(way):
    """What was promised without the search still holds: weights, buffers, optimizer state."""

    class Counted(nets.CNN):
        def forward(self, x):
            return super().forward(x) * torch.log(x.flatten(1)[:, :1].abs() * 1e9 + 0).sign()

    x, y = data(bad=21, value=math.nan)
    models = []
    for steps in (3, 2):
        model = built(Counted, optimizer="adam", **way())
        if steps == 3:
            assert error_of(model, x, y, device_iterations=3).update == 2
        else:
            fit(model, x, y, steps_per_epoch=2)
        models.append(model)
    one, two = (model.module.state_dict() for model in models)
    assert all(torch.equal(one[name], two[name]) for name in two)
    states = [model.optimizer.state_dict()["state"] for model in models]
    for key, value in states[1].items():
        assert all(torch.equal(states[0][key][name], value[name]) for name in value)


@pytest.mark.few("auto", "tape")
def test_training_goes_on_with_the_same_numbers(way):
    """Looking must not change what is looked at."""
    weights = []
    for detect in (True, False):
        model = built(nets.CNN, optimizer="adam", detect_nan=detect, **way())
        fit(model, *nets.data(32), device_iterations=2, ipus=2, epochs=2)
        weights.append([p.detach().clone() for p in model.module.state_dict().values()])
    assert all(torch.equal(one, two) for one, two in zip(*weights))


class _Picky(nn.Module):
    def forward(self, x):
        raise ValueError


class _Tries(nn.Module):
    def __init__(self):
        super().__init__()
        self.picky = _Picky()

    def forward(self, x):
        try:
            return self.picky(x)
        except ValueError:
            return x.flatten(1)


@pytest.mark.parametrize("detect", [True, False])
def test_a_module_around_one_that_raised_and_was_caught_is_not_named(detect):
    """The layer to look at is the one that computes."""

    class Log(Forward):
        def __init__(self):
            super().__init__()
            self.tries = _Tries()

        def forward(self, x):
            x = self.inner(self.tries(x)) * 0
            return self.head(torch.log(x))

    error = error_of(built(Log, detect_nan=detect), *data())
    assert (error.found.operator, error.found.module) == ("aten.log.default", "")


def test_a_module_of_the_loss_is_named_as_a_part_of_the_loss():
    """Its name within ipufit's step says nothing to a user."""

    class Rooted(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = Log()

        def forward(self, prediction, target):
            return self.log(prediction * 0).mean()

    error = error_of(built(Forward, loss=Rooted()), *data(value=1.0))
    assert error.found.module == "loss.log"


def test_without_it_nothing_is_looked_at(monkeypatch):
    """It must cost nothing to those who do not ask."""

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(TrainingState, "snapshot", refuse)
    monkeypatch.setattr(SourceTracker, "__init__", refuse)
    fit(built(nets.MLP, detect_nan=False), *nets.data(24))


def test_without_it_a_lost_gradient_shows_in_the_next_loss():
    """The weights are lost then, and only an option that looks earlier names the operator."""
    model = built(Backward, detect_nan=False)
    error = error_of(model, *data())
    assert (error.found, error.update) == (None, 2)
    assert str(error).endswith(
        "The weights were not finite before this update: an earlier update had a finite loss, but "
        "not a finite gradient. Look for a square root or a power at zero; with "
        "compile(detect_nan=True) the update, the layer and the samples are named."
    )
    error = error_of(built(Backward, detect_nan=True), *data())
    assert (error.found.cause, error.update, error.rows) == ("backward", 1, (13,))


@pytest.mark.few
@pytest.mark.parametrize("bad", ["operator", "data", "rate"])
def test_a_lost_loss_is_explained_without_it(way, bad):
    """The state is the one from before the update, so that this can run again."""
    options = {**way(), "detect_nan": False}
    if bad == "rate":
        options["optimizer"] = lambda params: torch.optim.SGD(params, lr=1e80)
    model = built(Forward if bad == "operator" else nets.MLP, loss="mse", **options)
    x, _ = data(value=math.nan if bad == "data" else 0.0)
    error = error_of(model, x, torch.ones(24, 5, dtype=torch.float64), device_iterations=3)
    found = error.found
    if bad == "rate":
        assert (found.cause, error.operator.partition(".")[0]) == ("forward", "aten")
        assert "The numbers became too large: try a smaller learning rate" in str(error)
        return
    assert (error.update, found.micro_batch, error.samples, error.rows) == (1, 1, (1,), (13,))
    assert found.cause == ("forward" if bad == "operator" else "data")
    assert error.module == ("log" if bad == "operator" else None)


def test_what_looks_for_it_changes_nothing(monkeypatch):
    """Weights, buffers and random numbers are those of a run that nobody has explained."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Dropout(), Log())
    states = []
    for explains in (True, False):
        if not explains:
            monkeypatch.setattr(replay_update.Replay, "find", lambda *_: 1 / 0)
        model = built(copy.deepcopy(net).double(), loss="mse", detect_nan=False)
        torch.manual_seed(5)
        error = error_of(model, nets.data(24)[0], torch.ones(24, 8, dtype=torch.float64))
        assert (error.found is not None) == explains
        states.append([*model.module.state_dict().values(), torch.rand(3)])
    assert str(error).endswith(
        "Look for a learning rate that is too high, a log or division of zero, or non-finite data."
    )
    assert all(map(torch.equal, *states))


def own_generator():
    """A generator of the user's, whose state has gone on when somebody asks."""
    return torch.Generator().manual_seed(0)


def reversed_collate(samples):
    """Samples in another order than that in which they were picked."""
    return default_collate(samples[::-1])


class Numbered(Dataset):
    """Samples of a map-style dataset, one of which is NaN."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (lambda x, y: {"x": x, "y": y, "batch_size": 4}, (13,)),
        (lambda x, y: {"x": x.numpy(), "y": y, "validation_split": 0.25}, (13,)),
        (lambda x, y: {"x": x, "y": y, "batch_size": 4, "shuffle": False}, (13,)),
        (lambda x, y: {"x": Numbered(x, y), "batch_size": 4}, (13,)),
        (lambda x, y: {"x": Numbered(x, y), "shuffle": False}, (13,)),
        (lambda x, y: {"x": DataLoader(Numbered(x, y), 4)}, (13,)),
        (lambda x, y: {"x": DataLoader(Numbered(x, y), 4, shuffle=True)}, (13,)),
        (lambda x, y: {"x": DataLoader(TensorDataset(x, y), 4, shuffle=True)}, (13,)),
        (lambda x, y: {"x": DataLoader(Numbered(x, y), 4, True, generator=own_generator())}, ()),
        (lambda x, y: {"x": DataLoader(Numbered(x, y), 4, collate_fn=reversed_collate)}, ()),
        (lambda x, y: {"x": [*zip(x.split(4), y.split(4))]}, ()),
        (lambda x, y: {"x": x, "y": y, "steps_per_epoch": 1}, ()),
    ],
    ids=[
        *("arrays", "split", "in order", "dataset", "dataset in order", "loader"),
        *("shuffled loader", "shuffled rows", "own generator", "collated", "batches", "passes"),
    ],
)
@pytest.mark.parametrize("work", [{}, {"ipus": 2, "device_iterations": 2}])
def test_the_row_of_the_users_data_is_named(make, rows, work):
    """In a shuffled epoch, the place of a sample is nothing that anybody can look at."""
    x, y = data(value=math.nan)
    model = built(nets.MLP, detect_nan=False)
    with pytest.raises(NonFiniteLossError) as caught:
        model.fit(**make(x, y), **work, epochs=9, seed=3, verbose=0)
    error = caught.value
    assert error.rows == rows
    assert len(error.epoch_samples) == 1
    assert str(error).endswith("; row of the data: 13." if rows else f": {error.epoch_samples[0]}.")


class Divides(nn.Module):
    def forward(self, x):
        return 1 / x


class Rooted(nn.Module):
    def forward(self, x):
        return x.sqrt()


class Norm(nn.Module):
    def forward(self, x):
        return x.square().sum(1, keepdim=True).sqrt()


class Softmax(nn.Module):
    def forward(self, x):
        return x.masked_fill(x == 0, -math.inf).softmax(1)


@pytest.mark.parametrize(
    ("layer", "cure", "cured", "options"),
    [
        (Log(), "example x.clamp(min=1e-6).log()", lambda x: x.clamp(min=1e-6).log(), {}),
        (Divides(), "with x / (y + 1e-6)", lambda x: 1 / (x + 1e-6), {}),
        (Rooted(), "example x.clamp(min=0).sqrt()", lambda x: x.clamp(min=0).sqrt(), {}),
        (Norm(), "example (x + 1e-12).sqrt()", lambda x: (x.square() + 1e-12).sqrt(), {}),
        (Softmax(), "keep at least one entry of each row", lambda x: x.softmax(1), {}),
    ],
    ids=["log", "division", "root", "norm", "softmax"],
)
def test_the_cure_that_is_advised_works(layer, cure, cured, options):
    """For the operator that made the first such value."""
    x = torch.ones(8, 3)
    x[5] = -1.0 if isinstance(layer, Rooted) else 0.0
    scale = nn.Linear(3, 3, bias=False)
    nn.init.eye_(scale.weight)
    with pytest.raises(NonFiniteLossError) as caught:
        ipufit_fit(nn.Sequential(scale, layer), x)
    assert cure in str(caught.value)
    assert caught.value.rows == (5,)
    mended = type("Mended", (nn.Module,), {"forward": lambda self, x: cured(x)})()
    assert ipufit_fit(nn.Sequential(copy.deepcopy(scale), mended), x).epoch == [0]


def ipufit_fit(net, x):
    """One small update, watched for gradients too."""
    model = ipufit.Model(net)
    model.compile(lambda params: torch.optim.SGD(params, lr=1e-12), "mse", detect_nan=True)
    target = torch.zeros_like(net(x))
    return model.fit(x, target.detach(), shuffle=False, verbose=0)


def test_skipped_updates_are_no_error_and_lost_losses_are():
    """A loss scale leaves out what overflows; a loss that is NaN is one at any scale."""
    model = built(Backward, precision=ipufit.Precision(loss_scale="dynamic"))
    fit(model, *data())
    assert model.history.history["skipped_updates"] == [1]
    error = error_of(built(Forward, precision=ipufit.Precision(loss_scale="dynamic")), *data())
    assert error.operator == "aten.log.default"


@pytest.mark.long
def test_callbacks_can_end_training_in_order():
    """TerminateOnNaN gets the same error, with all that is known."""
    seen = []

    class Sees(TerminateOnNaN):
        def on_non_finite(self, error):
            seen.append(error)
            return super().on_non_finite(error)

    model = built(Backward)
    fit(model, *data(), callbacks=[Sees()])
    assert [error.operator for error in seen] == ["aten.div.Tensor"]


def test_a_single_batch_is_searched_too():
    """It has no epoch, and so no place in one."""
    x, y = data(bad=2, n=4)
    with pytest.raises(NonFiniteLossError) as caught:
        built(Forward).train_on_batch(x, y)
    assert (caught.value.samples, caught.value.epoch_samples) == ((2,), ())


@pytest.mark.long
def test_captured_executions_are_left_out_with_a_sentence():
    """A captured graph makes its updates before anyone can look."""
    engine = as_device(True)
    model = built(nets.MLP, engine=engine)
    fit(model, *nets.data(24))
    said = "Runs no CUDA graphs: detect_nan inspects every update while it runs."
    assert said in model._session.explain()
    assert engine.tape.captures == 0


def test_compiled_updates_are_refused():
    """They are one call, which tells a loss and nothing else."""
    assert message(built, nets.MLP, jit="inductor") == (
        "detect_nan=True inspects every update while it runs, but jit='inductor' compiles whole "
        "updates, got both. Leave one of them out."
    )


def test_several_processes_are_refused(monkeypatch):
    """They would have to search together."""

    class Several:
        is_distributed, process_id, num_processes = True, 1, 4

    monkeypatch.setattr(non_finite, "current", Several)
    assert message(built, nets.MLP) == (
        "detect_nan=True works in one process, but this is process 1 of 4. Leave it out, or "
        "train in one process with the same ipus=."
    )


def test_an_ipu_refuses_it():
    """Its operators can't be run one by one."""
    model = ipufit.Model(nets.MLP().float(), engine="ipu-standin")
    assert message(model.compile, "sgd", "cross_entropy", detect_nan=True) == (
        "an IPU can't run detect_nan=True: a device tells nothing of its operators. Leave it out, "
        "or use engine='embedded'."
    )


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            NonFiniteValue("unknown"),
            "Running the update again operator by operator gave finite values everywhere: "
            "model.compare shows where the recorded program differs from the module.",
        ),
        (
            NonFiniteValue("weights", parameter="a"),
            "The cause is older: 'a' was not finite before, in replica 0, micro-batch 0 of 1.",
        ),
        (
            NonFiniteValue("data", samples=tuple(range(10))),
            "The data was not finite: nan in replica 0, micro-batch 0 of 1, samples 0, 1, 2, 3, 4, "
            "5, 6, 7 and 2 more of the micro-batch. Leave such samples out, or fill the missing "
            "values.",
        ),
        (
            NonFiniteValue(
                "forward",
                operator="aten.mul.Tensor",
                module="loss",
                operands=(Operand((), None, None, 0, 1), Operand((2, 3), -1.0, 2.0, 4)),
            ),
            "The forward pass made the first nan: aten.mul.Tensor of the loss in replica 0, "
            "micro-batch 0 of 1. Its operands were (one number): nothing finite, 1 infinite; (2 x "
            "3): -1 to 2, 4 NaN. The numbers became too large: try a smaller learning rate, "
            "compile(..., clip=ipufit.Clip(global_norm=1.0)), or inputs of about unit size.",
        ),
    ],
)
def test_what_is_known_is_said(found, text):
    """In plain sentences."""
    assert found.describe() == text
