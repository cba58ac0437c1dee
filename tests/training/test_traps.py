"""Traps that give wrong numbers without an error, each closed: the right numbers, or a refusal."""

import copy
import functools
import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.engines.embedded.programs.training import TrainingProgram
from ipufit.errors import CaptureError, ConfigurationError, DataError, OptimizerError
from tests.engines import (
    EAGER,
    EAGER_OR_NOT,
    counts_in_a_buffer,
    embedded_only,
    own_step,
    replicas_meet,
    strict,
)
from tests.nets import MLP, Tally, data
from tests.told import message


def loader(n=24, **options):
    """Pictures and classes, four at a time; as many as need no smaller micro-batch."""
    return DataLoader(TensorDataset(*data(n)), batch_size=4, **options)


def descent(parameters):
    """Plain descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def compiled(net, loss="cross_entropy", optimizer=descent, **options):
    """A compiled model."""
    model = ipufit.Model(net, engine=options.pop("engine", "auto"))
    model.compile(optimizer, loss, **options)
    return model


def assert_same(net, other, atol=1e-12):
    """All parameters and buffers agree."""
    for (name, value), wanted in zip(net.state_dict().items(), other.state_dict().values()):
        torch.testing.assert_close(value, wanted, rtol=0, atol=atol, msg=name)


@embedded_only("the parameters in such a list are the program's own on an IPU")
def test_a_parameter_reached_past_the_module_is_refused():
    """A penalty over a list of parameters made before would silently be zero."""
    net = MLP().double()
    kept = list(net.parameters())

    def loss(prediction, target):
        return nn.functional.cross_entropy(prediction, target) + sum(p.square().sum() for p in kept)

    model = compiled(net, loss, jit="graph")
    with pytest.raises(CaptureError) as caught:
        model.fit(loader(), verbose=0)
    assert "'layers." in str(caught.value)
    assert str(caught.value).partition("' ")[2] == (
        "was used through a reference outside of the module, such as a list of parameters, and "
        "would get no gradient from this use. Use it through the module, such as "
        "self.layer.weight, in forward or in the loss."
    )


class Overlooked(nn.Module):
    """Has a second layer, or a scale, in an attribute that torch does not look into."""

    def __init__(self, hide, alone=False):
        super().__init__()
        self.inner = nn.Module()
        self.inner.extra = hide(nn.Linear(12, 12).double())
        if not alone:
            self.head = nn.Linear(12, 5).double()

    def forward(self, x):
        x, extra = x.flatten(1), self.inner.extra
        if isinstance(extra, torch.Tensor):
            x = x * extra
        else:
            (extra,) = extra.values() if hasattr(extra, "values") else extra
            x = x * extra if isinstance(extra, torch.Tensor) else extra(x)
        return self.head(x) if hasattr(self, "head") else x[:, :5]


HIDDEN = {
    "list": (
        lambda layer: [layer],
        "layers in a plain list",
        "nn.ModuleList(self.extra)",
        nn.ModuleList,
    ),
    "tuple": (
        lambda layer: (layer,),
        "layers in a plain tuple",
        "nn.ModuleList(self.extra)",
        nn.ModuleList,
    ),
    "dict": (
        lambda layer: {"layer": layer},
        "layers in a plain dict",
        "nn.ModuleDict(self.extra)",
        nn.ModuleDict,
    ),
    "parameters": (
        lambda layer: [layer.bias],
        "parameters in a plain list",
        "nn.ParameterList(self.extra)",
        nn.ParameterList,
    ),
    "tensor": (
        lambda layer: torch.ones(12, dtype=torch.float64, requires_grad=True),
        "parameters in a plain Tensor",
        "nn.Parameter(value)",
        lambda value: nn.Parameter(value.detach()),
    ),
}


@pytest.mark.few("list", "tensor")
@pytest.mark.parametrize("name", HIDDEN)
@embedded_only("a device refuses a tensor that was never given to it, before there is a gradient")
def test_what_torch_does_not_register_is_refused(name):
    """Torch trains the rest of the module and leaves such layers as they began.

    A loop by hand does that, and so does the module itself, which says so.
    """
    hide, holds, instead, register = HIDDEN[name]
    net = Overlooked(hide)
    with pytest.warns(UserWarning, match=f"'inner.extra' of Module holds {holds}, .* not trained"):
        compiled(Overlooked(hide), run_eagerly=True).fit(loader(), verbose=0)
    assert message(compiled(net).fit, loader(), verbose=0, kind=CaptureError) == (
        f"'inner.extra' of Module holds {holds}, where torch finds no parameters, so they would "
        f"not be trained. Write self.extra = {instead} in __init__. If that is on purpose, call "
        "requires_grad_(False) on them."
    )
    registered = Overlooked(lambda layer: register(hide(layer)))
    before = copy.deepcopy(registered.state_dict())
    compiled(registered).fit(loader(), verbose=0)
    assert any(
        not torch.equal(value, before[key])
        for key, value in registered.state_dict().items()
        if key.startswith("inner.extra")
    )


@pytest.mark.long
@embedded_only("a device refuses a tensor that was never given to it, trained or not")
def test_what_is_not_to_be_trained_may_stay_unregistered():
    """A teacher is often kept in a list, so that it is no part of the module."""
    net = Overlooked(lambda layer: [layer.requires_grad_(False)])
    assert compiled(net).fit(loader(), verbose=0).epoch == [0]
    net = Overlooked(lambda layer: layer)
    net.same = [net.inner.extra, net.head]
    net.forward = lambda x: net.same[1](net.same[0](x.flatten(1)))
    assert compiled(net).fit(loader(), verbose=0).epoch == [0]


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
def test_a_recurrent_layers_own_list_of_weights_is_no_such_list(eager):
    """torch keeps one beside the parameters, and forward puts others into it for a while."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRU(4, 5, batch_first=True)

        def forward(self, x):
            return self.cell(x.reshape(len(x), 3, 4))[0][:, -1]

    x, y = data(8)
    pairs = [(x.float(), y)]
    assert compiled(Recurrent(), run_eagerly=eager).fit(pairs, verbose=0).epoch == [0]


@pytest.mark.long("ipu-standin")
def test_a_module_with_all_layers_in_a_list_is_told_so():
    """It was told to unfreeze what it has not."""
    with pytest.raises(OptimizerError) as caught:
        compiled(Overlooked(lambda layer: [layer], alone=True))
    assert str(caught.value) == (
        "the module has no trainable parameter: 'inner.extra' of Module holds layers in a plain "
        "list, where torch finds no parameters. Write self.extra = nn.ModuleList(self.extra) in "
        "__init__."
    )
    net = Overlooked(lambda layer: nn.ModuleList([layer]), alone=True)
    assert compiled(net).fit(loader(), verbose=0).epoch == [0]


@pytest.mark.long("ipu-standin")
def test_one_tensor_in_two_places_is_two_inputs():
    """An autoencoder's batch holds its input twice; the next batch need not."""
    a, b, c = (torch.randn(4, 3, dtype=torch.float64) for _ in range(3))
    net = nn.Linear(3, 3).double()
    other = copy.deepcopy(net)
    model = compiled(net, "mse")
    model.fit([(a, a), (b, c)], verbose=0)
    optimizer = descent(other.parameters())
    for x, y in ((a, a), (b, c)):
        optimizer.zero_grad()
        nn.functional.mse_loss(other(x), y).backward()
        optimizer.step()
    assert_same(net, other)


class Checkpointed(nn.Module):
    """A checkpointed layer, with or without dropout inside."""

    def __init__(self, rate):
        super().__init__()
        self.first, self.rate = nn.Linear(12, 12), rate
        self.head = nn.Linear(12, 5)

    def part(self, x):
        return nn.functional.dropout(torch.tanh(self.first(x)), self.rate, self.training)

    def forward(self, x):
        return self.head(checkpoint(self.part, x.flatten(1), use_reentrant=False))


@embedded_only("torch.utils.checkpoint asks for a torch.ipu, and is refused in other words")
def test_checkpointing_is_recorded_and_with_dropout_refused():
    """The repeated forward would draw another mask than the first one."""
    net = Checkpointed(0.0).double()
    other = copy.deepcopy(net)
    compiled(net).fit(loader(), verbose=0)
    optimizer = descent(other.parameters())
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
    assert_same(net, other)
    with pytest.raises(CaptureError) as caught:
        compiled(Checkpointed(0.5).double(), **strict()).fit(loader(), verbose=0)
    advice = "Leave out the seed, or move the dropout out of the checkpointed function."
    assert advice in str(caught.value)
    compiled(Checkpointed(0.5).double(), run_eagerly=True).fit(loader(), verbose=0)


class WithAttribute(torch.optim.SGD):
    """Reads an attribute of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.scale = 0.5

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * self.scale)


@pytest.mark.long
@own_step
def test_an_optimizer_with_attributes_of_its_own_runs():
    """They are not in what an optimizer pickles."""
    net = MLP().double()
    other = copy.deepcopy(net)
    compiled(net, optimizer=lambda p: WithAttribute(p, lr=0.2)).fit(loader(), verbose=0)
    compiled(other).fit(loader(), verbose=0)
    assert_same(net, other)


def halve_by_vector(net):
    """Sets every parameter's data, as swapping in averaged weights does."""
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, net.parameters())


def halve_in_place(net):
    """The same in place."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.5)


class AtEpochEnd(Callback):
    """Calls a function of the module after the first epoch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.function(self.model.module)


@pytest.mark.long("ipu-standin")
def test_data_set_in_a_callback_is_trained_on():
    """Training must not go on in memory that nobody looks at."""
    nets = []
    for change in (halve_by_vector, halve_in_place):
        torch.manual_seed(0)
        net = MLP().double()
        compiled(net).fit(loader(), epochs=3, callbacks=AtEpochEnd(change), verbose=0)
        nets.append(net)
    assert_same(*nets, atol=0)


class Taught(MLP):
    """Beside a layer that no optimizer trains."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(12, 5).requires_grad_(False)

    def forward(self, x):
        return super().forward(x) + self.teacher(x.flatten(1)).tanh()


class AfterEachUpdate(Callback):
    """Calls a function of the module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        self.function(self.model.module)


def halve_teacher(net):
    """Sets the data of what is not trained, as momentum encoders are moved."""
    for parameter in net.teacher.parameters():
        parameter.data = parameter.data * 0.5


def halve_teacher_in_place(net):
    """The same in place."""
    for parameter in net.teacher.parameters():
        parameter.mul_(0.5)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize("when", [AfterEachUpdate, AtEpochEnd])
def test_data_of_a_frozen_parameter_set_in_a_callback_is_computed_with(when, eager):
    """The module would show the new values, and the program go on with the first ones."""
    nets = []
    for change in (halve_teacher, halve_teacher_in_place, lambda net: None):
        torch.manual_seed(0)
        nets.append(Taught().double())
        model = compiled(nets[-1], run_eagerly=eager)
        model.fit(loader(), epochs=3, callbacks=when(change), verbose=0)
    assert_same(*nets[:2], atol=0)
    assert not torch.equal(nets[1].layers[0].weight, nets[2].layers[0].weight)


def swap_data(net, average):
    """Exchanges the memory of weights and averages."""
    for one, other in zip(net.parameters(), average.parameters()):
        one.data, other.data = other.data, one.data


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("widths", [(12, 8, 5), (12, 5)], ids=["many", "one"])
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
def test_weights_that_change_places_with_an_average_keep_both(widths, eager):
    """What is taken over from one memory would be written over what the other one holds."""
    nets, averages = [], []
    for swap in (swap_data, None):
        torch.manual_seed(0)
        layers = [nn.Linear(*pair, bias=len(widths) > 2) for pair in zip(widths, widths[1:])]
        net = nn.Sequential(nn.Flatten(), *layers).double()
        average = copy.deepcopy(net)
        for parameter in average.parameters():
            parameter.data *= 0.5

        def change(net, swap=swap, average=average):
            if swap is not None:
                return swap(net, average)
            values = copy.deepcopy(net.state_dict())
            net.load_state_dict(average.state_dict())
            return average.load_state_dict(values)

        momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        model = compiled(net, run_eagerly=eager, optimizer=momentum)
        model.fit(loader(), epochs=3, callbacks=AfterEachUpdate(change), verbose=0)
        nets.append(net)
        averages.append(average)
    assert_same(*nets, atol=0)
    assert_same(*averages, atol=0)


class Shadow(Callback):
    """Averages of the weights, which evaluations find in the place of the weights."""

    def set_model(self, model):
        super().set_model(model)
        self.net, self.kept = model.module, {}
        self.averages = {p: p.data.clone() for p in self.net.parameters()}

    def on_train_batch_end(self, batch, logs=None):
        for parameter, average in self.averages.items():
            self.averages[parameter] = 0.5 * average + 0.5 * parameter.data

    def on_test_begin(self, logs=None):
        for parameter, average in self.averages.items():
            self.kept[parameter], parameter.data = parameter.data, average

    def on_test_end(self, logs=None):
        for parameter, value in self.kept.items():
            parameter.data = value


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
def test_weights_that_a_callback_lends_to_an_evaluation_are_evaluated(eager):
    """A program that has looked for its weights before would evaluate those that are trained."""
    torch.manual_seed(0)
    net, images, losses = MLP().double(), loader(), []
    other = copy.deepcopy(net)
    model = compiled(net, run_eagerly=eager)
    model.fit(images, epochs=2, validation_data=images, callbacks=Shadow(), verbose=0)
    optimizer, average = descent(other.parameters()), copy.deepcopy(other)
    for _ in range(2):
        for x, y in images:
            optimizer.zero_grad()
            nn.functional.cross_entropy(other(x), y).backward()
            optimizer.step()
            for mean, parameter in zip(average.parameters(), other.parameters()):
                mean.data.lerp_(parameter.data, 0.5)
        each = [nn.functional.cross_entropy(average(x), y) for x, y in images]
        losses.append(torch.stack(each).mean().item())
    assert_same(net, other)
    assert model.history.history["val_loss"] == pytest.approx(losses, rel=0, abs=1e-12)


class Staged(MLP):
    """Its second layer is there for some stages only, as where a callback lets a net grow."""

    stage = 0

    def forward(self, x):
        first, *between, last = self.layers[0], *self.layers[1:-1], self.layers[-1]
        x = first(x.flatten(1)).tanh()
        for layer in between if self.stage == 1 else ():
            x = layer(x)
        return last(x)


class Stages(Callback):
    """Sets the stage of every epoch."""

    def __init__(self, net, stages):
        super().__init__()
        self.net, self.stages = net, stages

    def on_epoch_begin(self, epoch, logs=None):
        self.net.stage = self.stages[epoch]


@embedded_only("a program of an IPU moves the same parameters in every update")
@pytest.mark.parametrize("stages", [(0, 1, 1), (1, 0, 1)])
@pytest.mark.parametrize("jit", ["auto", "graph"])
def test_parameters_that_take_part_in_some_epochs_alone_are_trained_in_these(jit, stages):
    """The first recording of an epoch says which a gradient reaches."""
    nets = []
    for is_loop in (False, True):
        torch.manual_seed(0)
        net = Staged().double()
        net.layers = nn.ModuleList([nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 5)]).double()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
        if not is_loop:
            model = compiled(net, optimizer=optimizer, jit=jit)
            model.fit(loader(), epochs=3, callbacks=Stages(net, stages), verbose=0)
        for stage in stages if is_loop else ():
            net.stage = stage
            for x, y in loader():
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()
        nets.append(net)
    assert_same(*nets)


def turn(net):
    """Transposes a square weight, without another address."""
    net.square.weight.data = net.square.weight.data.t()


def turn_in_place(net):
    """The same in place."""
    with torch.no_grad():
        net.square.weight.copy_(net.square.weight.t().clone())


@pytest.mark.long("ipu-standin")
def test_data_turned_in_a_callback_is_trained_on():
    """It is another view of the very memory that is trained."""
    nets = []
    for change in (turn, turn_in_place):
        torch.manual_seed(0)
        net = MLP().double()
        net.square = net.layers[1] = nn.Linear(16, 16).double()
        compiled(net).fit(loader(), epochs=3, callbacks=AtEpochEnd(change), verbose=0)
        nets.append(net)
    assert_same(*nets, atol=0)


@pytest.mark.long
def test_a_fit_of_another_model_in_a_callback_is_not_lost():
    """Two models over one module take turns with its weights."""

    def inner(net):
        compiled(net).fit(loader(8), verbose=0)

    net = MLP().double()
    other = copy.deepcopy(net)
    compiled(net).fit(loader(), epochs=2, callbacks=AtEpochEnd(inner), verbose=0)
    for n in (24, 8, 24):
        compiled(other).fit(loader(n), verbose=0)
    assert_same(net, other)


def new_parameter(net):
    """Another object."""
    net.layers[2].weight = nn.Parameter(net.layers[2].weight.detach().clone())


def single(net):
    """Another dtype."""
    net.float()


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            new_parameter,
            "'layers.2.weight' was replaced or removed within an epoch, but the program still uses "
            "the original one. Change values in place, or replace it in on_epoch_begin or "
            "on_epoch_end.",
        ),
        (
            single,
            "'layers.0.weight' changed its shape, dtype or device during fit. Change the module "
            "between two calls of fit.",
        ),
    ],
)
def test_a_module_changed_in_a_callback_is_refused(change, text):
    """The rest of the training would be lost."""
    with pytest.raises(ConfigurationError) as caught:
        compiled(MLP().double()).fit(loader(), callbacks=AfterEachUpdate(change), verbose=0)
    assert str(caught.value) == text


@embedded_only("PopTorch has no autocast, and that of the user is refused")
def test_autocast_is_part_of_the_recording():
    """What was recorded in lower precision must not serve outside, nor the other way round."""
    x = torch.randn(8, 12)
    model = compiled(MLP())
    dtypes = []
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            dtypes.append(model.predict([x], verbose=0).dtype)
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    plain = compiled(copy.deepcopy(model.module)).predict([x], verbose=0)
    assert torch.equal(model.predict([x], verbose=0), plain)


def test_memory_shared_by_two_parameters_is_refused():
    """The program would separate what the user has joined."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5))
    net = net.double()
    net[2].weight.data = net[1].weight.data
    assert message(compiled(net).fit, loader(), verbose=0) == (
        "'1.weight' and '2.weight' share memory but are different tensors, so the program would "
        "separate them. Tie them: b.weight = a.weight makes them one parameter."
    )


class Watching(nn.Module):
    """Reads a weight once more through an attribute that looks into its memory."""

    def __init__(self, how="detached", weight=None):
        super().__init__()
        torch.manual_seed(3)
        wide = {"dtype": torch.float64}
        self.hidden, self.head = nn.Linear(12, 12, **wide), nn.Linear(12, 5, **wide)
        if weight is not None:
            self.hidden.weight = nn.Parameter(weight)
        weight = self.hidden.weight
        self.view = weight.detach() if how == "detached" else [weight.data[0]]

    def forward(self, x):
        return self.head(self.hidden(x.flatten(1)) * self.view[0])


def by_hand(net, epochs):
    """Plain descent in a loop over the loader."""
    optimizer = descent(net.parameters())
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


@embedded_only("a device has memory of its own: see below")
@pytest.mark.parametrize("eager", EAGER_OR_NOT)
@pytest.mark.parametrize("how", ["detached", "in a list"])
def test_an_attribute_that_looks_into_a_weight_follows_it(how, eager):
    """Left behind, it would keep the values from before training, in silence."""
    net, other = Watching(how), Watching(how)
    model = compiled(net, run_eagerly=eager)
    for _ in range(2):
        model.fit(loader(), epochs=2, verbose=0)
        assert model.history.params["recordings"] == (0 if eager else 1)
    by_hand(other, 4)
    assert_same(net, other)
    assert torch.equal(net.hidden.weight[0], net.view[0])


def test_an_attribute_that_can_not_follow_a_weight_is_refused():
    """A device has a constant there, and a weight with gaps goes into a tensor without any."""
    gaps = torch.randn(12, 24, dtype=torch.float64)[:, ::2]
    assert message(compiled(Watching(weight=gaps)).fit, loader(), verbose=0) == (
        "'view' of Watching shares memory with the parameter 'hidden.weight', but would not follow "
        "it in training. Compute it in forward instead, such as self.layer.weight.detach()."
    )


def test_what_torch_computes_anew_is_no_view():
    """The attribute of a spectral norm looks into a weight only until the first forward."""
    net = nn.Sequential(nn.Flatten(), nn.utils.spectral_norm(nn.Linear(12, 5).double()))
    net.eval()
    assert net[1].weight.data_ptr() == net[1].weight_orig.data_ptr()
    history = compiled(net).fit(loader(), epochs=2, verbose=0)
    assert history.history["loss"][1] < history.history["loss"][0]


class Columns(nn.Module):
    """Two layers whose weights are columns of one matrix, in turn."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        matrix = torch.randn(12, 10, dtype=torch.float64)
        self.first, self.second = nn.Parameter(matrix[:, ::2]), nn.Parameter(matrix[:, 1::2])

    def forward(self, x):
        return x.flatten(1) @ self.first + torch.tanh(x.flatten(1) @ self.second)


def test_columns_of_one_matrix_share_no_memory():
    """They lie between each other, but have no element in common: chunk(2, dim=1) makes such."""
    net, other = Columns(), Columns()
    compiled(net).fit(loader(), epochs=2, verbose=0)
    by_hand(other, 2)
    assert_same(net, other)


@pytest.mark.long
def test_parameters_side_by_side_in_one_storage_are_fine():
    """Slices of one tensor overlap nowhere."""
    net = MLP().double()
    halve_by_vector(net)
    other = copy.deepcopy(net)
    compiled(net).fit(loader(), verbose=0)
    compiled(other).fit(loader(), verbose=0)
    assert_same(net, other)


@pytest.mark.long
def test_a_metric_that_works_in_its_arguments_harms_nothing():
    """Marking ignored targets in place is common; loss and other metrics must not see it."""
    x, y = data(22)

    def zeroing(prediction, target):
        target[target == 1] = 0
        prediction.zero_()
        return torch.zeros(len(target))

    results = []
    for metrics in ([zeroing, "accuracy"], ["accuracy"]):
        batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 22, 4)]
        torch.manual_seed(0)
        model = compiled(MLP().double(), metrics=metrics)
        result = model.fit(batches, epochs=2, verbose=0).history
        result.update(model.evaluate(batches, verbose=0))
        result.pop("zeroing", None)
        results.append(result)
    assert results[0] == results[1]
    assert torch.equal(y, data(22)[1])


@pytest.mark.long("ipu-standin")
def test_batches_of_another_memory_layout_are_recorded_anew():
    """A graph holds views that fit one layout only."""
    x, y = data(8)
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    net = MLP().double()
    other = copy.deepcopy(net)
    compiled(net).fit([(x, y), (turned, y)], verbose=0)
    compiled(other).fit([(x, y), (x, y)], verbose=0)
    assert_same(net, other)


class NormedLoss(nn.Module):
    """A loss with statistics of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5).double()

    def forward(self, prediction, target):
        return nn.functional.cross_entropy(self.norm(prediction), target)


class Counter(MLP):
    """Counts in a buffer, in eval mode too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += len(x)
        return super().forward(x)


@pytest.mark.long
@counts_in_a_buffer
def test_validation_leaves_the_statistics_of_loss_and_module_alone():
    """A loss is in eval mode with its module, and looking counts nothing."""
    states = []
    for held_out in (None, loader(9)):
        torch.manual_seed(0)
        net, loss = Counter().double(), NormedLoss()
        compiled(net, loss).fit(loader(24), epochs=2, validation_data=held_out, seed=0, verbose=0)
        states.append({**net.state_dict(), **loss.state_dict()})
        assert loss.training
        assert loss.norm.training
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert states[0]["seen"] == 48


@pytest.mark.long("ipu-standin")
def test_a_collate_that_reuses_a_buffer_gives_the_same_for_every_execution():
    """Batches of an execution are held together."""
    buffer = torch.empty(4, 1, 3, 4, dtype=torch.float64)

    def collate(samples):
        for row, (x, _) in zip(buffer, samples):
            row.copy_(x)
        return buffer[: len(samples)], torch.stack([y for _, y in samples])

    nets = []
    for di in (1, 4):
        torch.manual_seed(0)
        net = MLP().double()
        compiled(net).fit(loader(collate_fn=collate), device_iterations=di, verbose=0)
        nets.append(net)
    assert_same(*nets, atol=0)


@pytest.mark.long("ipu-standin")
def test_a_second_reader_of_a_loader_with_persistent_workers_is_refused():
    """torch has one iterator for both, and would end the epoch early."""
    batches = loader(num_workers=1, persistent_workers=True, worker_init_fn=hash)

    class Look(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.evaluate(self.again, verbose=0)

    # Not in the class, which is garbage in a circle: torch's iterator would wait for its workers.
    look = Look()
    look.again = batches
    model = compiled(MLP().double())
    with pytest.raises(DataError, match="is already being read"):
        model.fit(batches, callbacks=look, verbose=0)
    assert model.fit(batches, validation_data=batches, epochs=2, verbose=0).epoch == [0, 1]


@pytest.mark.long
@replicas_meet
def test_buffers_with_nan_do_not_make_replicas_forget():
    """NaN is not equal to itself, but a buffer that holds one is unchanged."""

    class Spoilt(MLP):
        def __init__(self):
            super().__init__()
            self.register_buffer("odd", torch.tensor([float("nan")]))
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.seen.add_(x.mean())
            return super().forward(x) * self.seen.cos()

    nets = []
    for calls in (((0, 2),), ((0, 1), (1, 2))):
        torch.manual_seed(0)
        net = Spoilt().double()
        model = compiled(net)
        for first, last in calls:
            model.fit(loader(), epochs=range(first, last), ipus=2, seed=0, verbose=0)
        nets.append(net.layers)
    assert_same(*nets, atol=0)


@embedded_only("a tensor that is no buffer is a constant on an IPU, and forward may not change it")
def test_a_tensor_that_forward_changes_is_not_changed_by_the_recording():
    """It is no buffer, but still counts right."""

    for eager in (False, True):
        net = Tally().double()
        compiled(net, run_eagerly=eager).fit(loader(16), verbose=0)
        assert net.calls == 4


@pytest.mark.long("ipu-standin")
def test_a_config_object_is_part_of_the_recording():
    """Many modules read their settings from an object."""

    class Config:
        scale = None

    class Scaled(MLP):
        def __init__(self):
            super().__init__()
            self.config = Config()
            self.config.scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.config.scale

    net = Scaled().double()
    model = compiled(net)
    once = model.predict(loader(), verbose=0)
    net.config.scale = 3.0
    torch.testing.assert_close(model.predict(loader(), verbose=0), 3 * once)


@embedded_only("the gradients of an update stay on the device")
def test_a_gradient_that_is_not_finite_is_named_as_the_cause():
    """The loss of its own update is finite, so the next one is the first to be seen."""

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            h = x * self.weight
            return torch.where(h > 0, h.sqrt(), h)

    model = compiled(Root(), "mse")
    with pytest.raises(ipufit.errors.NonFiniteLossError) as caught:
        model.fit([(torch.ones(2, 3), torch.ones(2, 3))] * 3, verbose=0)
    assert caught.value.update == 1
    assert "an earlier update had a finite loss, but not a finite gradient" in str(caught.value)


@pytest.mark.long("ipu-standin")
def test_distributions_are_recorded():
    """Their argument checks look at values, which a recording has not."""

    class Variational(MLP):
        def forward(self, x):
            h = super().forward(x)
            return h + torch.distributions.Normal(h, torch.ones_like(h)).rsample()

    before = torch.distributions.Distribution._validate_args
    results = []
    for options in ({}, EAGER):
        torch.manual_seed(0)
        net = Variational().double()
        # In eager mode the checks run, and pass.
        compiled(net, **options).fit(loader(20), seed=0, verbose=0)
        results.append(net)
    assert_same(*results, atol=0)
    assert torch.distributions.Distribution._validate_args is before


@pytest.mark.long
def test_fits_in_threads_take_turns():
    """torch has one generator and one recorder for all of them."""

    def run(seed, results):
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Dropout(0.3)).double()
        with torch.no_grad():
            net[1].weight.fill_(0.1)
            net[1].bias.zero_()
        compiled(net).fit(loader(), epochs=2, seed=seed, verbose=0)
        results[seed] = net[1].weight.detach().clone()

    alone, together = {}, {}
    for seed in range(3):
        run(seed, alone)
    threads = [threading.Thread(target=run, args=(seed, together)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: value.tolist() for seed, value in alone.items()} == {
        seed: value.tolist() for seed, value in together.items()
    }


def test_fit_in_inference_mode_is_refused():
    """torch's own words there are that no gradient was found."""
    model = compiled(MLP().double())
    with torch.inference_mode(), pytest.raises(ConfigurationError) as caught:
        model.fit(loader(), verbose=0)
    assert str(caught.value) == (
        "fit needs gradients, which torch.inference_mode() disables. Call it outside of that "
        "block; evaluate and predict do not need the block."
    )


def made_in_inference_mode(kind):
    """A net of which a layer, or a buffer, was made where torch keeps no gradients."""
    with torch.inference_mode():
        layer, scale = nn.Linear(4, 4), torch.ones(4)
    if kind == "converted":
        layer.double().float()
    if kind == "buffer":
        layer = nn.Linear(4, 4)
        layer.register_buffer("scale", scale)
    if kind != "trained":
        layer.requires_grad_(False)
    return nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 3))


INFERENCE = (
    "training needs tensors that torch can change and differentiate with, but '1.{}' was made "
    "under torch.inference_mode(). Make or load module and loss outside of that block, or pass "
    "copy.deepcopy of them, whose tensors are clones."
)


@pytest.mark.both_engines
@pytest.mark.parametrize("kind", ["frozen", "trained", "converted", "buffer"])
@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
def test_tensors_made_in_inference_mode_are_refused_in_one_way(kind, eager):
    """torch has other words for each way, none of which names the tensor; check advised eager."""
    net = made_in_inference_mode(kind)
    before = net[2].weight.detach().clone()
    x, y = torch.randn(8, 4), torch.randn(8, 3)

    def of(module):
        model = ipufit.Model(module, engine="embedded")
        model.compile("sgd", "mse", run_eagerly=eager)
        return model

    text = INFERENCE.format("scale" if kind == "buffer" else "weight")
    assert message(of(net).fit, x, y, batch_size=4, verbose=0) == text
    assert message(of(net).check, (x, y)) == text
    of(copy.deepcopy(net)).fit(x, y, batch_size=4, verbose=0)
    assert torch.equal(before, net[2].weight)


@pytest.mark.both_engines
@pytest.mark.parametrize("kind", ["frozen", "trained", "buffer"])
def test_tensors_made_in_inference_mode_predict(kind):
    """As in torch, which needs no gradients for that."""
    net, x = made_in_inference_mode(kind), torch.randn(8, 4)
    model = ipufit.Model(net, engine="embedded")
    model.compile("sgd", "mse")
    with torch.no_grad():
        expected = net(x)
    torch.testing.assert_close(model.predict(x, verbose=0), expected)
    assert model.evaluate(x, expected, verbose=0)["loss"] == pytest.approx(0, abs=1e-12)


@pytest.mark.long
def test_recordings_do_not_grow_without_bound():
    """A service that predicts on ever new shapes must not run out of memory."""
    net = nn.Conv1d(1, 1, 3)
    engine = ipufit.engines.embedded.engine.EmbeddedEngine()
    model = ipufit.Model(net, engine=lambda: engine)
    model.compile("sgd", "mse")
    for length in range(3, 70):
        model.predict([torch.zeros(1, 1, length)], verbose=0)
    assert engine.captures == 67
    assert len(engine._traced) == 64


class Annealed(MLP):
    """Reads a temperature that a callback may lower."""

    def __init__(self):
        super().__init__()
        self.temperature = 2.0
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(super().forward(x)) / self.temperature


def anneal(model):
    """A Python value of the module."""
    model.module.temperature = 0.5


def freeze_statistics(model):
    """Part of the module to eval mode."""
    model.module.norm.eval()


def forget(model):
    """The optimizer's state."""
    model.optimizer.state.clear()


def shrink(model):
    """The optimizer's state, in place."""
    for state in model.optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)


class BetweenEpochs(Callback):
    """Changes something after the first epoch."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.change(self.model)


@pytest.mark.long("ipu-standin")
@pytest.mark.grid
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize("change", [anneal, freeze_statistics, forget, shrink])
def test_a_change_between_two_epochs_counts_as_one_between_two_fits(change, eager):
    """Annealing, freezing statistics and resetting momentum are usual recipes for callbacks."""
    nets = []
    for in_callback in (True, False):
        torch.manual_seed(0)
        net = Annealed().double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model = compiled(net, optimizer=optimizer, run_eagerly=eager)
        batches = loader(20)
        if in_callback:
            model.fit(batches, epochs=2, callbacks=BetweenEpochs(change), seed=0, verbose=0)
        else:
            model.fit(batches, epochs=1, seed=0, verbose=0)
            change(model)
            model.fit(batches, epochs=range(1, 2), seed=0, verbose=0)
        nets.append(net)
    assert_same(*nets, atol=0)


def freeze(net, optimizer):
    """A layer."""
    net.layers[0].requires_grad_(False)


def thaw(net, optimizer):
    """A layer that the optimizer has had from the beginning."""
    net.layers[2].requires_grad_(True)


def add_thawed(net, optimizer):
    """A layer in a group of its own."""
    bias = net.layers[0].bias.requires_grad_(True)
    optimizer.add_param_group({"params": [bias], "lr": 0.3, "weight_decay": 0.1})


def move(net, optimizer):
    """A layer to another group."""
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize("change", [freeze, thaw, add_thawed, move])
def test_parameters_frozen_or_thawed_in_a_callback_train_as_in_a_loop(change, eager):
    """From the next epoch on, also in groups that the optimizer did not have before."""
    nets, batches = [], loader(20)
    for by_hand in (True, False):
        torch.manual_seed(0)
        net = MLP().double()
        frozen = {thaw: net.layers[2], add_thawed: net.layers[0]}.get(change)
        if frozen is not None:
            frozen.requires_grad_(False)
        has = [p for p in net.parameters() if p.requires_grad or change is thaw]
        groups = [{"params": has[:-1]}, {"params": has[-1:], "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        if by_hand:
            for epoch in range(3):
                for x, y in batches:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
                    optimizer.step()
                if epoch == 0:
                    change(net, optimizer)
        else:
            model = compiled(net, optimizer=optimizer, run_eagerly=eager)
            late = BetweenEpochs(lambda model: change(model.module, model.optimizer))
            model.fit(batches, epochs=3, callbacks=late, verbose=0)
        nets.append(net)
    assert_same(*nets)


class Scaled(MLP):
    """Scales its inputs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(12))

    def forward(self, x):
        return super().forward(x.flatten(1) * self.scale)


def prune_more(net, optimizer):
    """A fifth of the weights that a layer has left."""
    prune.l1_unstructured(net.layers[0], "weight", amount=0.2)


def prune_for_good(net, optimizer):
    """The same, and the parameter has its name again."""
    prune_more(net, optimizer)
    prune.remove(net.layers[0], "weight")


def new_head(net, optimizer):
    """A layer that the optimizer is told of."""
    torch.manual_seed(5)
    net.layers[2] = nn.Linear(16, 5).double()
    optimizer.param_groups[0]["params"] = list(net.parameters())


def new_scale(net, optimizer):
    """A buffer."""
    net.scale = net.scale * 0.9


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize("change", [prune_more, prune_for_good, new_head, new_scale])
def test_tensors_replaced_between_epochs_or_fits_train_as_in_a_loop(change, eager):
    """Pruning goes by the weights that the layer has by then, epoch after epoch."""
    nets, batches = [], loader(20)
    for way in ("loop", "callback", "fits"):
        torch.manual_seed(0)
        net = Scaled().double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model = compiled(net, optimizer=optimizer, run_eagerly=eager)

        class Changes(Callback):
            def on_epoch_end(self, epoch, logs=None):
                change(self.model.module, self.model.optimizer)

        if way == "callback":
            model.fit(batches, epochs=4, callbacks=Changes(), verbose=0)
        for epoch in range(4) if way != "callback" else ():
            if way == "fits":
                model.fit(batches, epochs=range(epoch, epoch + 1), verbose=0)
            else:
                for x, y in batches:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
                    optimizer.step()
                # Pruning takes the weights that forward has masked.
                net(x)
            change(net, optimizer)
        nets.append(net)
    assert_same(nets[0], nets[1])
    assert_same(nets[0], nets[2])


@embedded_only("averages are the embedded engine's")
@pytest.mark.parametrize("change", [prune_more, new_head])
def test_averages_belong_to_the_parameter_and_not_to_its_name(change):
    """Here no weight moves, so each is its own average."""
    net = Scaled().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = compiled(net, optimizer=optimizer, ema=ipufit.EMA(0.5))
    before = []

    def note(model):
        change(model.module, model.optimizer)
        before.append(copy.deepcopy(model.module.state_dict()))

    model.fit(loader(), epochs=3, callbacks=BetweenEpochs(note), verbose=0)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[0][name]), name


@embedded_only("an IPU compiles before the first update")
def test_after_a_change_of_what_is_trained_the_rest_of_the_run_is_expected(monkeypatch):
    """Or nothing would be compiled in it."""
    expected = []
    monkeypatch.setattr(TrainingProgram, "expect", lambda self, updates: expected.append(updates))
    late = BetweenEpochs(lambda model: freeze(model.module, model.optimizer))
    compiled(MLP().double()).fit(loader(20), epochs=3, callbacks=late, verbose=0)
    assert expected == [15, 10]


def test_a_parameter_thawed_in_a_callback_without_the_optimizer_is_reported():
    net = MLP().double()
    net.layers[0].bias.requires_grad_(False)
    model = compiled(net, optimizer=descent([p for p in net.parameters() if p.requires_grad]))
    late = BetweenEpochs(lambda model: model.module.requires_grad_(True))
    with pytest.warns(UserWarning, match="became trainable after compile") as caught:
        model.fit(loader(), epochs=3, callbacks=late, verbose=0)
    assert [str(each.message) for each in caught] == [
        "layers.0.bias became trainable after compile made the optimizer, so fit does not train "
        "it. Call compile again or model.optimizer.add_param_group to train it."
    ]


class Scaling(nn.Module):
    """Scales by statistics that it keeps."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(12), nn.Dropout(0.5)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.drop(self.norm(x))


class NormOfItsOwn(nn.Module):
    """Keeps statistics, and a teacher without dropout, whatever mode it is in."""

    def __init__(self):
        super().__init__()
        self.norm, self.teacher, self.head = nn.BatchNorm1d(12), Scaling(), nn.Linear(12, 5)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        self.teacher.drop.eval()
        return self

    def forward(self, x):
        x = self.norm(x.flatten(1))
        return self.head(x + self.teacher(x))


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize("within", [False, True])
def test_what_a_module_says_of_its_modes_counts_from_the_first_fit(within, eager):
    """In a loop, train() says it before the first update; a part that a user set stays set."""
    nets = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        net = NormOfItsOwn().double()
        whole = nn.Sequential(nn.Flatten(), net, nn.Dropout(0.5)) if within else net
        if by_hand:
            whole.train()
        if within:
            whole[2].eval()
        assert net.norm.training != by_hand
        if by_hand:
            optimizer = descent(whole.parameters())
            for x, y in loader():
                optimizer.zero_grad()
                nn.functional.cross_entropy(whole(x), y).backward()
                optimizer.step()
        else:
            compiled(whole, run_eagerly=eager).fit(loader(), verbose=0)
            assert net.norm.training
        nets.append(net)
    assert_same(*nets)


@pytest.mark.long("ipu-standin")
def test_the_users_own_optimizer_is_current_at_the_end_of_an_epoch():
    """Whoever saves a checkpoint saves from the object at hand."""
    net = MLP().double()
    optimizer = torch.optim.Adam(net.parameters())
    steps = []

    class Save(Callback):
        def on_epoch_end(self, epoch, logs=None):
            steps.append([float(state["step"]) for state in optimizer.state.values()])

    compiled(net, optimizer=optimizer).fit(loader(20), epochs=2, callbacks=Save(), verbose=0)
    assert steps == [[5.0] * 4, [10.0] * 4]


class InTheMiddle(Callback):
    """Makes the momentum half of it after the third update, in what ``optimizer_of`` gives."""

    def __init__(self, optimizer_of):
        super().__init__()
        self.optimizer_of = optimizer_of

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            for state in self.optimizer_of(self.model).state.values():
                state["momentum_buffer"] = state["momentum_buffer"] * 0.5


def test_optimizer_state_changed_within_an_epoch_is_taken_over():
    """The next execution starts from what the callback left."""
    net = MLP().double()
    other = copy.deepcopy(net)

    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    halve = InTheMiddle(lambda model: model.optimizer)
    compiled(net, optimizer=momentum).fit(loader(20), callbacks=halve, verbose=0)
    optimizer = momentum(other.parameters())
    for index, (x, y) in enumerate(loader(20)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
        if index == 2:
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(0.5)
    assert_same(net, other)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("reader", ["nobody", "model.optimizer", "checkpoint", "end"])
def test_optimizer_state_changed_after_an_epoch_survives_who_reads_it(reader, tmp_path):
    """Whoever brings the state up to date must not write over what a callback has just set."""
    net = MLP().double()
    other = copy.deepcopy(net)

    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def halve(optimizer):
        for state in optimizer.state.values():
            state["momentum_buffer"].mul_(0.5)

    class Halve(Callback):
        def on_epoch_end(self, epoch, logs=None):
            halve(self.model.optimizer)
            if reader == "model.optimizer":
                assert self.model.optimizer is not None

    # At the end of fit the program closes; the next one takes over what is there.
    model = compiled(net, optimizer=momentum)
    folder = tmp_path / "runs" if reader == "checkpoint" else None
    ends = (1, 2) if reader == "end" else (2,)
    for begin, end in zip((0, *ends), ends):
        given = {"epochs": range(begin, end), "checkpoint": folder, "callbacks": Halve()}
        model.fit(loader(20), verbose=0, **given)
    optimizer = momentum(other.parameters())
    for _ in range(2):
        for x, y in loader(20):
            optimizer.zero_grad()
            nn.functional.cross_entropy(other(x), y).backward()
            optimizer.step()
        halve(optimizer)
    assert_same(net, other)
    for mine, theirs in zip(net.parameters(), other.parameters()):
        found = model.optimizer.state[mine]["momentum_buffer"]
        torch.testing.assert_close(found, optimizer.state[theirs]["momentum_buffer"])


@pytest.mark.long("ipu-standin")
def test_optimizer_state_that_is_not_up_to_date_is_not_taken_over():
    """The updates since would be lost."""
    net = MLP().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = compiled(net, optimizer=optimizer)
    model.fit(loader(20), verbose=0)
    with pytest.raises(ConfigurationError) as caught:
        model.fit(loader(20), callbacks=InTheMiddle(lambda model: optimizer), verbose=0)
    assert str(caught.value) == (
        "the optimizer's state was changed during an epoch through your own reference, which "
        "holds the state of an earlier update. Use model.optimizer, which updates it, or change "
        "it at the end of an epoch."
    )


class Masked(nn.Module):
    """An encoder with a causal mask, said to be one or not."""

    def __init__(self, **said):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head, self.said = nn.Linear(4, 5), said
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3).double())

    def forward(self, x):
        return self.head(self.encoder(x.squeeze(1), mask=self.mask, **self.said).mean(1))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Converting mask without torch.bool")  # torch 2.0, in eval mode
def test_a_causal_mask_need_not_say_that_it_is_one():
    """torch compares it with a causal one, value by value, to pick a faster kernel alone."""
    finals = []
    for said in ({}, {"is_causal": True}, {"is_causal": False}):
        torch.manual_seed(0)
        net = Masked(**said).double()
        x = torch.randn(4, 3, 4, dtype=torch.float64)
        expected = net(x).detach()
        model = compiled(net)
        torch.testing.assert_close(torch.as_tensor(model.predict(x, verbose=0)), expected)
        model.fit(loader(8), verbose=0)
        finals.append([weight.detach().clone() for weight in net.parameters()])
    for final in finals[1:]:
        torch.testing.assert_close(final, finals[0])


@pytest.mark.long("ipu-standin")
def test_a_value_read_in_a_layer_of_torchs_is_located_there():
    """The line that called fit says nothing."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5, momentum=None)).double()
    with pytest.raises(CaptureError) as caught:
        compiled(net, **strict()).fit(loader(), verbose=0)
    assert caught.value.file.endswith("batchnorm.py")
    assert "num_batches_tracked" in str(caught.value)


@embedded_only("torch.utils.checkpoint asks for a torch.ipu, and is refused in other words")
def test_reentrant_checkpointing_is_refused_with_the_way_out():
    """torch's own error does not name the argument."""

    class Reentrant(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = nn.Linear(4, 4), MLP()

        def forward(self, x):
            h = self.first(x)
            return checkpoint(self.rest.layers, h.flatten(1), use_reentrant=True)

    with pytest.raises(CaptureError) as caught:
        compiled(Reentrant().double(), **strict()).fit(loader(), verbose=0)
    assert "Pass use_reentrant=False." in str(caught.value)
