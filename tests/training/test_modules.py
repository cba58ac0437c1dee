"""Any module: buffers, shared and frozen weights, several inputs, nested outputs, a loss of its
own."""

import copy
import dataclasses
import functools
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ipufit
from tests.engines import EAGER_OR_NOT, counts_in_a_buffer, embedded_only, strict
from tests.nets import CNN, MLP, Running, Transformer, data
from tests.reference import follow
from tests.told import message


def loader(n=24, batch_size=4):
    """Pictures and classes; as many as need no smaller micro-batch."""
    return DataLoader(TensorDataset(*data(n)), batch_size=batch_size)


def eager_epoch(net, call, batches, rate=0.1):
    """One epoch of plain descent by hand; ``call`` gives the loss of a batch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for batch in batches:
        optimizer.zero_grad()
        call(net, batch).backward()
        optimizer.step()


def assert_same(net, other, atol=1e-12):
    """All parameters and buffers agree to rounding."""
    for (name, value), wanted in zip(net.state_dict().items(), other.state_dict().values()):
        torch.testing.assert_close(value, wanted, rtol=0, atol=atol, msg=name)


def fit_like_by_hand(net, call, batches, loss="cross_entropy", atol=1e-12, **options):
    """Fit, and hold the result against the loop by hand; returns the model."""
    other = copy.deepcopy(net)
    start = copy.deepcopy(net.state_dict())
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.1), loss, **options)
    model.fit(batches, verbose=0, device_iterations=2)
    eager_epoch(other, call, batches)
    assert_same(net, other, atol)
    assert any(not torch.equal(start[name], value) for name, value in net.state_dict().items())
    return model


def plain(net, batch):
    """Cross entropy of a net with one input."""
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x.flatten(1)))))


@pytest.mark.long("ipu-standin")
def test_tied_weights_stay_tied():
    """One weight in two layers gets both gradients, once."""
    net = Tied().double()
    fit_like_by_hand(net, plain, loader())
    assert net.first.weight is net.second.weight


class TwoNames(nn.Module):
    """One module, with a parameter and running statistics, under two names."""

    def __init__(self, calls):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12, momentum=0.3))
        self.again = self.body
        self.head = nn.Linear(12, 5)
        self.calls = calls

    def forward(self, x):
        x = x.flatten(1)
        for name in self.calls:
            x = torch.tanh(getattr(self, name)(x))
        return self.head(x)


@pytest.mark.long
@pytest.mark.parametrize("calls", [["body"], ["again"], ["body", "again"]], ids="+".join)
def test_a_module_under_two_names(calls):
    """It gets the gradients of all its calls, keeps its statistics, and stays one module."""
    net = TwoNames(calls).double()
    model = fit_like_by_hand(net, plain, loader(24))
    assert net.again is net.body
    x, _ = data(8)
    net.eval()
    expected = net(x)
    assert torch.equal(torch.as_tensor(model.predict(x, batch_size=4, verbose=0)), expected)
    own = {id(p) for p in net.parameters()}
    assert {id(p) for p in [*net.body.parameters(), *net.head.parameters()]} == own


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.filterwarnings("ignore:training data has other dtypes:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=["LSTM", "GRU", "RNN"])
def test_recurrent_nets(kind, dtype):
    """Their weights live in lists of their own; in float32 torch has a kernel for whole layers."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = kind(4, 6, batch_first=True)
            self.head = nn.Linear(6, 5)

        def forward(self, x):
            return self.head(self.cell(x.squeeze(1).to(dtype))[0][:, -1])

    # float32: rounding in another order, over six updates.
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    fit_like_by_hand(Recurrent().to(dtype), plain, loader(), atol=tolerance)


@pytest.mark.long
def test_parametrized_weights():
    """torch's parametrizations compute a weight from parameters under other names."""
    net = MLP().double()
    nn.utils.parametrizations.orthogonal(net.layers[2])
    fit_like_by_hand(net, plain, loader())


@counts_in_a_buffer
def test_buffers_that_forward_changes_in_place():
    """Statistics of a user's own are kept like those of BatchNorm."""
    net = Running().double()
    fit_like_by_hand(net, plain, loader(22))
    assert net.seen.item() == 22


@counts_in_a_buffer
def test_each_replica_has_buffers_of_its_own():
    """Replica 0's go into the module, with what replica 0 has seen."""
    net = Running().double()
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy")
    model.fit(loader(22), ipus=2, verbose=0)
    # Batches of 4, 4, 4, 4, 4, 2, of which replica 0 sees the first, third and fifth.
    assert net.seen.item() == 12


@pytest.mark.long
def test_a_norm_set_to_eval_stays_so():
    """Frozen statistics are how pre-trained nets are tuned; fit must not thaw them."""
    net = CNN().double()
    net.drop = nn.Identity()
    net.train()
    net.norm.eval()
    before = copy.deepcopy(dict(net.norm.named_buffers()))
    other = copy.deepcopy(net)
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.1), "cross_entropy")
    model.fit(loader(), validation_data=loader(), verbose=0)
    eager_epoch(other, plain, loader())
    assert_same(net, other)
    assert all(torch.equal(value, before[name]) for name, value in net.norm.named_buffers())
    assert [net.training, net.conv.training, net.norm.training] == [True, True, False]


@pytest.mark.long("ipu-standin")
def test_a_module_in_eval_mode_is_trained_in_train_mode_and_put_back():
    """Calling evaluate by hand before fit must not switch dropout off."""
    net = CNN().double().eval()
    before = net.norm.running_mean.clone()
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy")
    model.fit(loader(), verbose=0)
    assert not torch.equal(net.norm.running_mean, before)
    assert not any(module.training for module in net.modules())


class Two(nn.Module):
    """Two inputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(12, 5), nn.Linear(3, 5)

    def forward(self, picture, features):
        return self.left(picture.flatten(1)) + self.right(features)


class Parts(Dataset):
    """Two inputs and a class, in the form that ``form`` makes of them."""

    def __init__(self, form):
        self.form = form
        self.x, self.y = data(24)
        self.features = torch.randn(24, 3, dtype=torch.float64)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return self.form(self.x[index], self.features[index]), self.y[index]


Pair = namedtuple("Pair", ["picture", "features"])


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(
    "form",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, b],
        lambda a, b: {"features": b, "picture": a},
    ],
    ids=["tuple", "list", "dict"],
)
def test_several_inputs(form):
    """A tuple or list is forward's arguments, a dict its keyword arguments."""

    def call(net, batch):
        inputs, target = batch
        keywords = isinstance(inputs, dict)
        output = net(**inputs) if keywords else net(*inputs)
        return nn.functional.cross_entropy(output, target)

    fit_like_by_hand(Two().double(), call, DataLoader(Parts(form), batch_size=4))


@pytest.mark.long("ipu-standin")
def test_a_named_tuple_is_one_input():
    """It is a value of the user's own, not a list of arguments."""

    class Whole(Two):
        def forward(self, pair):
            return super().forward(pair.picture, pair.features)

    batches = DataLoader(Parts(Pair), batch_size=4)
    fit_like_by_hand(Whole().double(), plain, batches)


@dataclasses.dataclass
class Result:
    """A dataclass output."""

    logits: Any
    extra: Any
    note: str = "static"


def nested(kind):
    """A net that returns its logits and more in a structure."""

    class Nested(MLP):
        def forward(self, x):
            logits = super().forward(x)
            half = logits[:, :2]
            if kind == "dict":
                return {"logits": logits, "more": (half, [logits * 2, None])}
            if kind == "ordered":
                return OrderedDict([("logits", logits), ("half", half)])
            if kind == "tuple":
                return logits, (half, 7)
            if kind == "namedtuple":
                return Pair(logits, half)
            return Result(logits, {"half": half})

    return Nested().double()


LOGITS = {
    "dict": lambda out: out["logits"],
    "ordered": lambda out: out["logits"],
    "tuple": lambda out: out[0],
    "namedtuple": lambda out: out.picture,
    "dataclass": lambda out: out.logits,
}


@pytest.mark.few("dict-traced", "tuple-traced")
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize("kind", LOGITS)
def test_nested_outputs(kind, eager):
    """Outputs keep their structure on the way to loss, metrics and predict."""
    net = nested(kind)
    logits = LOGITS[kind]

    def loss(output, target):
        return nn.functional.cross_entropy(logits(output), target)

    def accuracy(output, target):
        return (logits(output).argmax(1) == target).float()

    def call(net, batch):
        return loss(net(batch[0]), batch[1])

    model = fit_like_by_hand(net, call, loader(), loss=loss, metrics=[accuracy], run_eagerly=eager)
    x, y = data(24)
    predicted = model.predict(loader(), ipus=2, device_iterations=2, verbose=0)
    expected = net(x)
    assert type(predicted) is type(expected)
    torch.testing.assert_close(logits(predicted), logits(expected))
    if kind == "dict":
        half, (double, nothing) = predicted["more"]
        torch.testing.assert_close(half, expected["more"][0])
        torch.testing.assert_close(double, expected["more"][1][0])
        assert nothing is None
    if kind == "tuple":
        assert predicted[1][1] == 7
    if kind == "dataclass":
        torch.testing.assert_close(predicted.extra["half"], expected.extra["half"])
        assert predicted.note == "static"
    right = accuracy(expected, y).mean().item()
    assert model.evaluate(loader(), verbose=0)["accuracy"] == pytest.approx(right)


class OwnLoss(MLP):
    """Returns (outputs, loss) when it gets the target, outputs alone otherwise."""

    def forward(self, x, target=None):
        logits = super().forward(x)
        if target is None:
            return logits
        return logits, nn.functional.cross_entropy(logits, target)


@pytest.mark.long("ipu-standin")
def test_a_module_with_a_loss_of_its_own():
    """PopTorch and transformers users have the loss inside the module."""
    net = OwnLoss().double()
    model = fit_like_by_hand(
        net, lambda net, batch: net(*batch)[1], loader(), loss=None, metrics=["accuracy"]
    )
    x, y = data(24)
    logits, loss = net(x, y)
    result = model.evaluate(loader(), verbose=0)
    assert result["loss"] == pytest.approx(loss.item(), abs=1e-12)
    assert result["accuracy"] == pytest.approx((logits.argmax(1) == y).double().mean().item())
    assert torch.equal(model.predict(loader(), verbose=0).argmax(1), logits.argmax(1))
    unlabelled = DataLoader(TensorDataset(x), batch_size=5)
    torch.testing.assert_close(model.predict(unlabelled, verbose=0), logits)


def test_a_dict_batch_for_a_module_with_a_loss_of_its_own():
    """The form of transformers: a dict in, a dict with "loss" out."""

    class Labelled(MLP):
        def forward(self, pixels, labels):
            logits = super().forward(pixels)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    x, y = data(24)
    batches = [{"pixels": a, "labels": b} for a, b in DataLoader(TensorDataset(x, y), batch_size=4)]
    net = Labelled().double()

    def accuracy(output, labels):
        return (output["logits"].argmax(1) == labels).float()

    model = fit_like_by_hand(
        net, lambda net, batch: net(**batch)["loss"], batches, loss=None, metrics=[accuracy]
    )
    assert model.predict(batches, verbose=0)["logits"].shape == (24, 5)


@pytest.mark.long
@embedded_only("PopTorch refuses a cross entropy with weights")
def test_a_loss_with_weights_of_its_own_is_trained_too():
    """A learned temperature belongs to the loss, and to the optimizer."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
            self.register_buffer("weight", torch.tensor([1.0, 2, 1, 1, 1], dtype=torch.float64))

        def forward(self, prediction, target):
            scaled = prediction * self.log_scale.exp()
            return nn.functional.cross_entropy(scaled, target, self.weight)

    net, loss = MLP().double(), Scaled()
    other, other_loss = copy.deepcopy(net), copy.deepcopy(loss)
    model = ipufit.Model(net)
    model.compile("sgd", loss)
    model.fit(loader(), verbose=0)
    optimizer = torch.optim.SGD([*other.parameters(), *other_loss.parameters()], lr=0.01)
    follow(other, optimizer, loader(), other_loss)
    assert_same(net, other)
    assert_same(loss, other_loss)
    assert loss.log_scale.item() != 0


class Watch(ipufit.callbacks.Callback):
    """Copies a weight whenever a hook fires."""

    def __init__(self, parameter):
        super().__init__()
        self.parameter = parameter
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(self.parameter.detach().clone())

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.parameter.detach().clone())


@pytest.mark.long("ipu-standin")
def test_parameters_read_in_a_callback_are_current():
    """A callback that saves or measures weights must see those of this execution."""
    net = MLP().double()
    other = copy.deepcopy(net)
    watch = Watch(net.layers[0].weight)
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.1), "cross_entropy")
    model.fit(loader(24), device_iterations=2, callbacks=[watch], verbose=0)
    expected = []
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for index, (x, y) in enumerate(loader(24)):
        if index % 2 == 0:
            expected.append(other.layers[0].weight.detach().clone())
        optimizer.zero_grad()
        plain(other, (x, y)).backward()
        optimizer.step()
        if index % 2 == 1:
            expected.append(other.layers[0].weight.detach().clone())
    assert len(watch.seen) == len(expected) == 6
    for seen, wanted in zip(watch.seen, expected):
        torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-12)


@pytest.mark.long("ipu-standin")
def test_weights_written_in_a_callback_are_used():
    """Restoring or averaging weights during fit works on the module itself."""

    class Zero(ipufit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.zero_()

    net = MLP().double()
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy")
    model.fit(loader(), callbacks=[Zero()], verbose=0)
    assert not any(parameter.any() for parameter in net.parameters())


@pytest.mark.long("ipu-standin")
def test_the_optimizer_read_in_a_callback_is_current():
    """Its state must be that of the update just made."""
    steps = []

    class Read(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            state = self.model.optimizer.state
            steps.extend(float(own["step"]) for own in state.values())

    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5, bias=False)).double()
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy")
    model.fit(loader(), device_iterations=2, callbacks=[Read()], verbose=0)
    assert steps == [2, 4, 6]


@pytest.mark.long("ipu-standin")
def test_after_fit_every_parameter_owns_its_memory():
    """A saved parameter must not drag all others into the file."""
    net = CNN().double()
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy")
    model.fit(loader(), verbose=0)
    for parameter in net.parameters():
        storage = parameter.untyped_storage()
        assert storage.nbytes() == parameter.numel() * parameter.element_size()
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.grad is None


@pytest.mark.long("ipu-standin")
def test_a_parameter_unfrozen_after_compile_is_reported():
    """The optimizer was made without it: silence would leave it untrained."""
    net = MLP().double()
    net.layers[0].weight.requires_grad_(False)
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy")
    net.layers[0].weight.requires_grad_(True)
    with pytest.warns(UserWarning, match="became trainable after compile") as caught:
        model.fit(loader(), verbose=0)
    assert str(caught[0].message) == (
        "layers.0.weight became trainable after compile made the optimizer, so fit does not train "
        "it. Call compile again or model.optimizer.add_param_group to train it."
    )
    assert caught[0].filename == __file__


@pytest.mark.long("ipu-standin")
def test_a_parameter_frozen_between_two_fits_stays():
    """requires_grad is read at every fit."""
    net = MLP().double()
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy")
    model.fit(loader(), verbose=0)
    net.layers[0].weight.requires_grad_(False)
    before = net.layers[0].weight.clone()
    model.fit(loader(), verbose=0)
    assert torch.equal(net.layers[0].weight, before)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("kind", [MLP, CNN, Transformer], ids=lambda kind: kind.__name__)
def test_evaluate_and_predict_equal_the_module(kind):
    """Exact means and all rows in order, whatever the plan."""
    net = kind().double()
    net(data(9)[0])  # statistics of BatchNorm that are not the first ones
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    for n, ipus, di in ((22, 1, 1), (22, 2, 3), (1, 4, 5), (24, 4, 2)):
        x, y = data(n)
        work = {"ipus": ipus, "device_iterations": di, "verbose": 0}
        result = model.evaluate(loader(n), **work)
        predicted = model.predict(loader(n), **work)
        net.eval()
        expected = net(x).detach()
        net.train()
        torch.testing.assert_close(predicted, expected, rtol=0, atol=1e-12)
        loss = nn.functional.cross_entropy(expected, y).item()
        assert result["loss"] == pytest.approx(loss, abs=1e-12)
        assert result["accuracy"] == (expected.argmax(1) == y).double().mean().item()
        assert net.norm.num_batches_tracked == 1 if kind is CNN else True


class OverTime(nn.Module):
    """A layer on time steps (batch, time, features) in torch's order, and one on its features."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        result = self.layer(x.transpose(0, 1))
        steps = result[0] if isinstance(result, tuple) else result
        return self.head(steps.transpose(0, 1)).mean(1)


@embedded_only("a device rounds as it does")
@pytest.mark.parametrize("layer", [nn.Linear, nn.GRU], ids=lambda layer: layer.__name__)
def test_predictions_have_the_bits_of_the_module(layer):
    """Torch multiplies otherwise with weights that require gradients, even where it makes none."""
    torch.manual_seed(0)
    net = OverTime(layer(5, 6))
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy")
    x = torch.randn(64, 7, 5)
    for trains in (True, False):
        net.layer.requires_grad_(trains)
        with torch.no_grad():
            expected = torch.cat([net(part) for part in x.split(4)])
        assert torch.equal(model.predict(x, batch_size=4, verbose=0), expected)


@pytest.mark.long("ipu-standin")
def test_predict_needs_no_target_and_no_compiled_shapes():
    """Batches of inputs alone are what one predicts on."""
    net = MLP().double()
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy")
    x, _ = data(10)
    for batches in (
        DataLoader(TensorDataset(x), batch_size=4),
        [x[:4], x[4:8], x[8:]],
        [(x[:6],), (x[6:],)],
        [{"x": x[:6]}, {"x": x[6:]}],
    ):
        torch.testing.assert_close(model.predict(batches, verbose=0), net(x))


@pytest.mark.long("ipu-standin")
def test_predictions_do_not_share_memory_with_weights_or_data():
    """An output that is the input or a weight must not change when those do."""

    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x):
            return x, self.weight[: len(x)]

    net = Views()
    x = torch.ones(4, 3)
    model = ipufit.Model(net)
    model.compile("sgd", lambda out, y: (out[1] * y).mean())
    same, weight = model.predict([(x,)], verbose=0)
    x.zero_()
    with torch.no_grad():
        net.weight.zero_()
    assert torch.equal(same, torch.ones(4, 3))
    assert torch.equal(weight, torch.ones(4, 3))
    assert not weight.requires_grad


@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
def test_an_output_that_is_a_weight_is_that_of_its_own_update(eager):
    """Metrics are worked out after an execution, when the weight has moved on."""

    class Shown(MLP):
        def forward(self, x):
            return super().forward(x), self.layers[2].bias.expand(len(x), 5)

    def loss(output, target):
        return nn.functional.cross_entropy(output[0], target)

    def bias(output, target):
        return output[1].sum(1)

    values = []
    for di in (1, 4):
        torch.manual_seed(0)
        net = Shown().double()
        model = ipufit.Model(net)
        model.compile("adam", loss, metrics=[bias], run_eagerly=eager)
        values.append(model.fit(loader(16), device_iterations=di, verbose=0).history["bias"])
    assert values[0] == values[1]


@embedded_only("an IPU runs no hooks on gradients")
def test_hooks_on_parameters_are_honoured():
    """A hook that scales or masks a gradient is part of the user's model."""
    net = MLP().double()
    other = copy.deepcopy(net)
    handles = []
    for module in (net, other):
        for parameter in module.layers[0].parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)
        # Deep copies and state dicts don't carry hooks, so each gets its own.
        handles.append(module.layers[2].weight.register_hook(lambda gradient: gradient * 0))
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), lr=0.1), "cross_entropy")
    before = net.layers[2].weight.clone()
    model.fit(loader(), verbose=0)
    eager_epoch(other, plain, loader())
    assert_same(net, other)
    assert torch.equal(net.layers[2].weight, before)
    for handle in handles:
        handle.remove()
    model.fit(loader(), verbose=0)
    eager_epoch(other, plain, loader())
    assert_same(net, other)
    assert not torch.equal(net.layers[2].weight, before)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"), reason="torch before 2.1"
)
@embedded_only("an IPU runs no hooks on gradients, and refuses them at compile")
def test_a_hook_for_after_accumulation_is_refused():
    """There is no .grad to fill inside one program, and silence would skip the hook."""
    net = MLP().double()
    net.layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy", **strict())
    assert message(model.fit, loader(), verbose=0, kind=ipufit.errors.CaptureError) == (
        "'layers.0.weight' has a hook that runs after .grad is filled, but a program never fills "
        ".grad. Use parameter.register_hook."
    )


class Lazy(nn.Module):
    """Its parameters get their shape at the first forward, a part of them in training alone."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.first, self.norm, self.last = (
                nn.LazyLinear(6),
                nn.LazyBatchNorm1d(),
                nn.LazyLinear(5),
            )
            self.last, self.aside = nn.LazyLinear(5), nn.LazyLinear(5)
            self.double()

    def forward(self, x):
        x = self.norm(self.first(x.flatten(1))).tanh()
        return self.last(x) + (self.aside(x) if self.training else 0)


@pytest.mark.parametrize("eager", EAGER_OR_NOT)
def test_lazy_parameters_get_their_shape_with_the_first_batch(eager):
    """And the values that they have at the first forward of a loop; buffers count it once."""
    data = [(x, y) for x, y in loader()]
    torch.manual_seed(3)
    model = ipufit.Model(Lazy())
    options = {"run_eagerly": True} if eager else {}
    model.compile(lambda params: torch.optim.SGD(params, lr=0.1), "cross_entropy", **options)
    model.fit(data, epochs=2, seed=0, verbose=0)
    torch.manual_seed(3)
    net = Lazy()
    follow(net, torch.optim.SGD(net.parameters(), lr=0.1), data * 2)
    for (name, value), wanted in zip(model.module.state_dict().items(), net.state_dict().values()):
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12, msg=name)
    rows = model.predict([x for x, _ in data], verbose=0)
    torch.testing.assert_close(rows, torch.cat([net.eval()(x) for x, _ in data]).detach())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_part_that_no_forward_reaches_is_refused():
    """Nobody knows its shape."""
    net = Lazy()
    net.idle = nn.LazyLinear(2)
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy")
    assert message(model.fit, loader(), verbose=0) == (
        "every parameter must have a shape, but 'weight' of LazyLinear gets its shape in the first "
        "forward. Call the module once on an example before ipufit.Model(module)."
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: nn.Linear(2, 2, device="meta"),
            "every parameter must have data, but 'weight' of Linear is on the device 'meta'. Use "
            "module.to_empty(device=...) and load weights first.",
        ),
    ],
    ids=["meta"],
)
def test_modules_that_are_not_ready_are_refused_at_once(make, text):
    """Torch's own errors for these come late and do not say what to do."""
    assert message(ipufit.Model, make()) == text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: nn.Sequential(nn.Flatten(), torch.jit.script(nn.Linear(12, 5).double())),
            "the module must be plain Python to be recorded, but its part '1' is a TorchScript "
            "module (RecursiveScriptModule). Pass the module that it was scripted from, or use "
            "compile(..., run_eagerly=True).",
        ),
        (
            lambda: nn.Sequential(
                nn.Flatten(), torch.compile(nn.Linear(12, 5).double(), backend="eager")
            ),
            "the module must be plain Python to be recorded, but its part '1' went through "
            "torch.compile. Pass the module itself: ipufit records the whole training step. Or "
            "use compile(..., run_eagerly=True).",
        ),
    ],
    ids=["script", "compile"],
)
@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated, and torch.compile imports much
def test_what_is_compiled_already_is_recorded_in_no_way_and_trains_eagerly(make, text, engine):
    """Torch's own errors for these do not say what to do."""
    model = ipufit.Model(make())
    model.compile("sgd", "cross_entropy", **strict())
    assert message(model.fit, loader(), verbose=0, kind=ipufit.errors.CaptureError) == text
    if engine == "embedded":
        quick = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        module, by_hand = make(), make()
        by_hand.load_state_dict(module.state_dict())
        model = ipufit.Model(module)
        model.compile(quick(module.parameters()), "cross_entropy", run_eagerly=True)
        model.fit(loader(), verbose=0, epochs=2)
        follow(by_hand, quick(by_hand.parameters()), [*loader(), *loader()])
        for one, other in zip(module.parameters(), by_hand.parameters()):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.long
def test_a_last_batch_that_the_module_cannot_take_is_found_before_training():
    """BatchNorm can't train on one sample: better told now than at the end of the first epoch."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5)).double()
    shown = repr(net[2])
    before = copy.deepcopy(net.state_dict())
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy")
    assert message(model.fit, loader(9), verbose=0, kind=ipufit.errors.DataError) == (
        "the module must take every micro-batch of the training data, but fails with the last one "
        f"of an epoch, which is smaller (1 sample instead of 4): layer '2', {shown}, needs more "
        "than one value per feature while it trains, got shape (1, 5), dtype float64. Choose "
        "another batch_size, or drop_last=True in the loader."
    )
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    model.fit(DataLoader(TensorDataset(*data(9)), batch_size=4, drop_last=True), verbose=0)


@pytest.mark.long
def test_evaluating_inside_a_callback_shows_current_weights_and_changes_nothing():
    """A callback may look at more than the validation data."""
    losses = []

    class Look(ipufit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            result = self.model.evaluate(loader(9), verbose=0)
            rows = self.model.predict(loader(9), verbose=0)
            _, y = data(9)
            assert result["loss"] == pytest.approx(
                nn.functional.cross_entropy(rows, y).item(), abs=1e-12
            )
            losses.append(result["loss"])

    nets = []
    for callbacks in ([Look()], []):
        torch.manual_seed(0)
        net = CNN().double()
        model = ipufit.Model(net)
        model.compile("adam", "cross_entropy")
        model.fit(loader(), epochs=3, seed=1, callbacks=callbacks, verbose=0)
        nets.append(net.state_dict())
    assert all(torch.equal(value, nets[1][name]) for name, value in nets[0].items())
    assert len(set(losses)) == 3


REPEATS = {
    "method": lambda h: h.repeat_interleave(2, dim=-1),
    "function": lambda h: torch.repeat_interleave(h, repeats=2, dim=1),
    "flat": lambda h: h.repeat_interleave(2).reshape(len(h), -1),
    "once": lambda h: torch.repeat_interleave(torch.cat([h, h], 1), 1, dim=0),
    "sized": lambda h: h.repeat_interleave(2, dim=1, output_size=10),
}


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("kind", REPEATS)
def test_elements_repeated_a_fixed_number_of_times_train_as_in_torch(kind):
    """torch 2.0 makes a tensor of the number, and a shape of its value."""

    class Repeating(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, x):
            return REPEATS[kind](torch.tanh(self.linear(x.flatten(1))))

    fit_like_by_hand(Repeating().double(), plain, loader())


@pytest.mark.long("ipu-standin")
def test_a_one_hot_of_a_number_of_classes_trains_as_in_torch():
    """torch 2.0 compares the classes with the number, and reads them for that."""

    class Coding(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12 * 3, 5)

        def forward(self, x):
            classes = x.flatten(1).sign().long() + 1
            return self.linear(functional.one_hot(classes, 3).flatten(1).double())

    fit_like_by_hand(Coding().double(), plain, loader())


@pytest.mark.long
def test_a_buffer_that_is_overwritten_for_every_batch_is_copied():
    """Batches of an execution are held together: a loader that reuses memory must not mix them."""
    x, y = data(12)

    class Reusing:
        def __iter__(self):
            inputs, target = torch.empty_like(x[:4]), torch.empty_like(y[:4])
            for start in range(0, 12, 4):
                inputs.copy_(x[start : start + 4])
                target.copy_(y[start : start + 4])
                yield inputs, target

    nets = []
    for batches in (Reusing(), loader(12)):
        torch.manual_seed(0)
        net = MLP().double()
        model = ipufit.Model(net)
        model.compile("sgd", "cross_entropy", metrics=["accuracy"])
        history = model.fit(batches, device_iterations=3, verbose=0).history
        nets.append((net.layers[0].weight, history))
    assert torch.equal(nets[0][0], nets[1][0])
    assert nets[0][1] == nets[1][1]
