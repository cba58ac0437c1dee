"""Settings that go on and off during fit: momentum, dampening and decays through zero, nesterov.

By a zero an optimizer decides whether something is computed at all; each update decides anew, as
torch's own does.
"""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.engines.embedded.inductor.compiled import CompiledUpdates
from ipufit.engines.embedded.inductor.update_spec import Request, UpdateFunction
from ipufit.errors import OptimizerError
from tests.engines import EAGER_OR_NOT, embedded_only
from tests.engines.embedded.test_cudagraph import built, captured
from tests.nets import MLP, data

X, Y = data(125)
X = X.double()
# 25 updates of an epoch, 50 of a fit.
LOADER = DataLoader(TensorDataset(X, Y), 5)
# An IPU has no float64.
PLAIN = DataLoader(TensorDataset(X.float(), Y), 5)
OPTIM = torch.optim

leaves_alone = embedded_only("an IPU changes its velocities without momentum, too")
own_step = embedded_only("an IPU has five optimizers, and runs no step of another")


def on_at_first(update):
    """Something, then nothing, and so on; nothing in the end."""
    return 0.5 + 0.005 * update if (update + 5) % 9 > 2 and update < 41 else 0.0


def off_at_first(update):
    return 0.5 + 0.005 * update if update % 9 > 2 and update < 41 else 0.0


def small(update):
    return 0.1 * off_at_first(update)


CASES = {
    "velocities that begin late": (OPTIM.SGD, {"momentum": off_at_first}),
    "velocities that begin at once": (OPTIM.SGD, {"momentum": on_at_first}),
    "dampened from their second update on": (
        OPTIM.SGD,
        {"momentum": off_at_first, "dampening": on_at_first},
    ),
    "dampening": (partial(OPTIM.SGD, momentum=0.9), {"dampening": off_at_first}),
    "all of SGD": (
        partial(OPTIM.SGD, momentum=0.9, nesterov=True),
        {"momentum": on_at_first, "weight_decay": small, "lr": small},
    ),
    "momentum of RMSprop": (
        partial(OPTIM.RMSprop, momentum=0.9, centered=True),
        {"momentum": on_at_first, "weight_decay": small, "eps": small},
    ),
    "adam": (OPTIM.Adam, {"weight_decay": small, "beta1": off_at_first, "eps": small}),
    "adamw": (partial(OPTIM.AdamW, amsgrad=True), {"weight_decay": small, "beta1": on_at_first}),
    "lamb": (ipufit.optim.LAMB, {"weight_decay": small, "eps": small}),
}
OWN_STEPS = {
    "adagrad": (OPTIM.Adagrad, {"lr_decay": small, "weight_decay": small, "eps": small}),
    "adadelta": (OPTIM.Adadelta, {"rho": off_at_first, "weight_decay": small}),
    "asgd": (OPTIM.ASGD, {"lambd": small, "alpha": small, "weight_decay": small}),
    "rprop": (OPTIM.Rprop, {"lr": small}),
    "nadam": (OPTIM.NAdam, {"momentum_decay": small, "weight_decay": small, "eps": small}),
    "radam": (OPTIM.RAdam, {"weight_decay": small, "lr": small}),
    "adamax": (OPTIM.Adamax, {"weight_decay": small, "lr": small}),
}


def write(optimizer, tables, update):
    """Set what tables have for an update, as a loop by hand does."""
    for group in optimizer.param_groups:
        for name, table in tables.items():
            if name.startswith("beta"):
                betas = list(group["betas"])
                betas[int(name[-1]) - 1] = table(update)
                group["betas"] = tuple(betas)
            else:
                group[name] = table(update)


def loop(net, optimizer, tables=None, epochs=2, on_update=lambda update: None):
    """The loop by hand."""
    for update, (x, y) in enumerate(list(LOADER) * epochs):
        write(optimizer, tables or {}, update)
        on_update(update)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def fit(
    net,
    optimizer,
    tables=None,
    di=1,
    *,
    epochs=2,
    callbacks=(),
    checkpoint=None,
    loader=LOADER,
    **options,
):
    """Train; return the model."""
    model = ipufit.Model(net)
    model.compile(optimizer, "cross_entropy", lr_scheduler=copy.copy(tables), **options)
    fits = {"device_iterations": di, "callbacks": list(callbacks), "checkpoint": checkpoint}
    model.fit(loader, epochs=epochs, seed=3, verbose=0, **fits)
    return model


def assert_alike(net, optimizer, other, expected, atol=1e-12):
    """The weights, and the state under torch's names."""
    for parameter, reference in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(parameter, reference, rtol=0, atol=atol)
        own, states = optimizer.state[parameter], expected.state[reference]
        values = {name: value for name, value in states.items() if value is not None}
        assert own.keys() >= values.keys()
        for name, value in values.items():
            torch.testing.assert_close(
                torch.as_tensor(own[name]), torch.as_tensor(value), rtol=0, atol=atol
            )


def check(make, tables, di=7, **options):
    torch.manual_seed(0)
    net = MLP().double()
    other = copy.deepcopy(net)
    optimizer, expected = make(net.parameters(), lr=0.05), make(other.parameters(), lr=0.05)
    fit(net, optimizer, tables, di, **options)
    loop(other, expected, tables)
    assert_alike(net, optimizer, other, expected)
    return net


@leaves_alone
@pytest.mark.few(
    "velocities that begin late-False", "velocities that begin late-True", "adam-False"
)
@pytest.mark.parametrize("eager", EAGER_OR_NOT)
@pytest.mark.parametrize("case", CASES)
def test_each_update_does_what_torchs_own_does(case, eager):
    check(*CASES[case], run_eagerly=eager)


@own_step
@pytest.mark.few("adagrad", "asgd")
@pytest.mark.parametrize("case", OWN_STEPS)
def test_a_step_of_torchs_own_is_recorded_anew(case):
    check(*OWN_STEPS[case])


@leaves_alone
def test_the_bits_are_the_same_for_every_number_of_device_iterations():
    nets = [check(*CASES["dampened from their second update on"], di=di) for di in (1, 4, 25)]
    weights = [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@leaves_alone
def test_velocities_of_rmsprop_begin_with_zeros_where_torchs_own_step_fails():
    torch.manual_seed(0)
    net = MLP().double()
    other = copy.deepcopy(net)
    optimizer, expected = (OPTIM.RMSprop(each.parameters(), 0.01) for each in (net, other))
    tables = {"momentum": off_at_first}
    fit(net, optimizer, tables, 7)
    again = copy.deepcopy(other)
    with pytest.raises(KeyError, match="momentum_buffer"):
        loop(again, OPTIM.RMSprop(again.parameters(), 0.01), tables)

    def begin(update):
        for parameter in other.parameters() if update == 1 else ():
            expected.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    loop(other, expected, tables, on_update=begin)
    assert_alike(net, optimizer, other, expected)


class Switch(ipufit.callbacks.Callback):
    """Changes settings before some epochs."""

    def __init__(self, changes):
        super().__init__()
        self.changes = changes

    def on_epoch_begin(self, epoch, logs=None):
        for group in self.model.optimizer.param_groups:
            group.update(self.changes.get(epoch, {}))


@leaves_alone
@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (OPTIM.SGD, {1: {"momentum": 0.9, "dampening": 0.5}, 2: {"momentum": 0.0}}),
        (
            partial(OPTIM.SGD, momentum=0.9),
            {1: {"momentum": 0.0}, 2: {"momentum": 0.5, "nesterov": True}, 3: {"maximize": True}},
        ),
        (partial(OPTIM.AdamW, amsgrad=True), {1: {"amsgrad": False}, 2: {"amsgrad": True}}),
        (ipufit.optim.LAMB, {1: {"max_weight_norm": 0.1}, 2: {"max_weight_norm": None}}),
    ],
    ids=["sgd", "nesterov", "amsgrad", "lamb"],
)
@pytest.mark.parametrize("eager", EAGER_OR_NOT)
def test_a_callback_may_switch_whatever_a_loop_may(make, changes, eager):
    torch.manual_seed(0)
    net = MLP().double()
    other = copy.deepcopy(net)
    optimizer, expected = make(net.parameters(), lr=0.05), make(other.parameters(), lr=0.05)
    fit(net, optimizer, epochs=4, callbacks=[Switch(changes)], di=3, run_eagerly=eager)

    def switch(update):
        for group in expected.param_groups:
            group.update(changes.get(update // 25, {}) if update % 25 == 0 else {})

    loop(other, expected, epochs=4, on_update=switch)
    assert_alike(net, optimizer, other, expected)


@leaves_alone
def test_groups_go_their_own_ways():
    torch.manual_seed(0)
    net = MLP().double()
    other = copy.deepcopy(net)

    def make(net):
        first, *rest = net.parameters()
        groups = [{"params": [first]}, {"params": rest, "momentum": 0.9}]
        return OPTIM.SGD(groups, lr=0.05)

    optimizer, expected = make(net), make(other)
    fit(net, optimizer, [{"momentum": off_at_first}, {"dampening": small}], 7)

    def switch(update):
        expected.param_groups[0]["momentum"] = off_at_first(update)
        expected.param_groups[1]["dampening"] = small(update)

    loop(other, expected, on_update=switch)
    assert_alike(net, optimizer, other, expected)


class Stop(ipufit.callbacks.Callback):
    """Interrupts the fit once so many updates are made."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates

    def on_train_batch_end(self, batch, logs=None):
        self.updates -= 1
        if not self.updates:
            raise KeyboardInterrupt


@leaves_alone
@pytest.mark.parametrize("updates", [28, 31, 43], ids=["without momentum", "with", "at the end"])
def test_an_interrupted_run_goes_on_with_velocities_that_were_left_alone(updates, tmp_path):
    """A checkpoint has them also where no update of that moment moves them."""
    make, tables = CASES["dampened from their second update on"]
    whole = check(make, tables, di=1)
    torch.manual_seed(0)
    net = MLP().double()
    checkpoint = ipufit.Checkpoint(tmp_path, every_updates=1, resume="auto")
    with pytest.raises(KeyboardInterrupt):
        fit(
            net,
            make(net.parameters(), lr=0.05),
            tables,
            callbacks=[Stop(updates)],
            checkpoint=checkpoint,
        )
    torch.manual_seed(1)
    net = MLP().double()
    optimizer = make(net.parameters(), lr=0.05)
    fit(net, optimizer, tables, callbacks=[Stop(-1)], checkpoint=checkpoint)
    for parameter, expected in zip(net.parameters(), whole.parameters()):
        assert torch.equal(parameter, expected)


@leaves_alone
def test_executions_that_are_captured_do_it_too():
    make, tables = CASES["velocities that begin late"]
    models = []
    for jit in ("cudagraph", "graph"):
        torch.manual_seed(0)
        net = MLP().double()
        model = built(net, partial(make, lr=0.05), jit, "tape", lr_scheduler=dict(tables))
        model.fit(LOADER, epochs=2, device_iterations=3, seed=3, verbose=0)
        models.append(model)
    assert captured(models[0])
    for one, other in zip(*(model.module.parameters() for model in models)):
        assert torch.equal(one, other)


@leaves_alone
def test_compiled_updates_are_those_with_the_settings_that_they_were_compiled_for(monkeypatch):
    """All have one optimizer state."""
    made = []

    def begin(self, request, compiles):
        update = UpdateFunction(Request.of_json(request.to_json()).form)
        self._run = lambda *tensors: made.append(update) or update(*tensors)
        self.origin = "described"

    monkeypatch.setattr(CompiledUpdates, "_begin", begin)
    monkeypatch.setattr("ipufit.engines.embedded.engine.refuse_missing", lambda: None)
    check(*CASES["dampened from their second update on"], jit="inductor")
    on = {(bool(off_at_first(update)), bool(on_at_first(update))) for update in range(50)}
    assert len(made) == 50
    assert len(set(map(id, made))) == len(on) > 1


@pytest.mark.both_engines
def test_on_an_ipu_a_momentum_stays_on_or_off(monkeypatch):
    monkeypatch.setenv("IPUFIT_ENGINE", "ipu-standin")
    net = MLP()
    optimizer = OPTIM.SGD(net.parameters(), 0.1, momentum=0.9)
    with pytest.raises(OptimizerError) as caught:
        fit(net, optimizer, {"momentum": lambda update: 0.9 if update < 5 else 0.0}, loader=PLAIN)
    assert str(caught.value) == (
        "momentum of parameter group 0 can't go from 0.9 to 0.0 during fit on an IPU, which "
        "changes its velocities without momentum, too, where torch leaves them as they are. Change "
        "it between two calls of fit, or use engine='embedded'."
    )
