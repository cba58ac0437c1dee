"""Optimizers without a rule: recorded through their own step or run as they are, with any schedule.

Every number is that of a loop by hand in float64, 50 updates long.
"""

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback, EarlyStopping
from ipufit.errors import OptimizerError
from tests.engines import EAGER_OR_NOT, own_step
from tests.nets import data
from tests.optim.own_optimizers import Attributes, Lion, ScheduleFree, Shampoo

X, Y = data(200)
LOADER = DataLoader(TensorDataset(X, Y), batch_size=4)
HELD_OUT = (X[:20], Y[:20])

OF_TORCH = [
    *("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "Rprop"),
]
KINDS = [
    *(getattr(torch.optim, name) for name in OF_TORCH if hasattr(torch.optim, name)),
    *(Lion, ScheduleFree, Shampoo, Attributes),
]
# What runs as it is, and the reason.
UNRECORDED = {
    "Adafactor": "it needs a tensor's value",
    "ScheduleFree": "it keeps changing values outside of its parameters' state",
    "Shampoo": "its state has a list",
}


def net():
    """Matrices alone, which every optimizer takes, and one that Muon's transposes."""
    torch.manual_seed(3)
    layers = nn.Linear(12, 7, bias=False), nn.Tanh(), nn.Linear(7, 5, bias=False)
    return nn.Sequential(nn.Flatten(), *layers).double()


def groups(module, lr=0.02):
    """Two parameter groups with rates of their own."""
    first, second = module.parameters()
    return [{"params": [first]}, {"params": [second], "lr": lr / 4}]


def half_cosine(optimizer):
    """A rate for every update, down to a twentieth."""
    rate = lambda update: 0.05 + 0.475 * (1 + math.cos(math.pi * update / 50))  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def switched(optimizer, mode):
    """Let a schedule-free optimizer train, or evaluate."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def by_hand(module, optimizer, scheduler=None, epochs=1, finish=None, loader=LOADER):
    """Train with a loop, which ends in eval mode."""
    for _ in range(epochs):
        switched(optimizer, "train")
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            if finish is not None:
                finish(module.parameters())
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        switched(optimizer, "eval")


def fitted(module, optimizer, loader=LOADER, epochs=1, fit_options=None, **options):
    """Train with ipufit."""
    model = ipufit.Model(module)
    model.compile(optimizer, "cross_entropy", **options)
    fit_options = {"device_iterations": 8, "verbose": 0, **(fit_options or {})}
    model.fit(loader, epochs=epochs, **fit_options)
    return model


def assert_equal(first, second, atol=1e-12):
    """All parameters agree."""
    for value, other in zip(first.parameters(), second.parameters()):
        torch.testing.assert_close(value, other, rtol=0, atol=atol)


def explained(model, capsys):
    """What ``explain`` prints of the step."""
    capsys.readouterr()
    model.explain()
    return next(line for line in capsys.readouterr().out.splitlines() if "The step of" in line)


def test_every_optimizer_of_torch_is_held_against_its_loop():
    """Here or with the rules; SparseAdam in test_plain_loops.py, LBFGS in test_closures.py."""
    there = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    by_rule = {"SGD", "Adam", "AdamW", "RMSprop"}
    assert there - {"Optimizer", *OF_TORCH} == {*by_rule, "SparseAdam", "LBFGS"}


def test_an_engine_runs_the_step_or_refuses_it_with_its_name(engine):
    """Before any work."""
    module = net()
    before = copy.deepcopy(module)
    if engine == "embedded":
        fitted(module, Lion(module.parameters(), lr=0.01))
        assert not torch.equal(module[1].weight, before[1].weight)
        return
    text = (
        "an IPU runs the updates of SGD, Adam, AdamW, RMSprop, LAMB only, got Lion. Choose one of "
        "these, or engine='embedded'."
    )
    with pytest.raises(OptimizerError, match=re.escape(text)):
        fitted(module, Lion(module.parameters(), lr=0.01))
    assert_equal(module, before, atol=0)


@own_step
@pytest.mark.few(
    *(f"{kind.__name__}-scheduled" for kind in KINDS),
    *("NAdam-constant", "ScheduleFree-constant"),
)
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_fifty_updates_equal_the_loop(kind, scheduled, capsys):
    """With a schedule and rates of groups, recorded or not, and the way is said."""
    module = net()
    other = copy.deepcopy(module)
    schedule = half_cosine if scheduled else None
    model = fitted(module, kind(groups(module), lr=0.02), lr_scheduler=schedule)
    optimizer = kind(groups(other), lr=0.02)
    by_hand(other, optimizer, schedule and schedule(optimizer))
    assert_equal(module, other)
    why = UNRECORDED.get(kind.__name__)
    is_torchs = kind.__module__.startswith("torch.")
    whose = "torch's own" if is_torchs else f"that of {kind.__module__}.{kind.__name__}"
    assert explained(model, capsys) == (
        f"The step of {kind.__name__} is {whose}, recorded."
        if why is None
        else f"The step of {kind.__name__} runs as it is, after the recorded gradients: {why}."
    )


@own_step
@pytest.mark.parametrize("kind", [Lion, torch.optim.NAdam], ids=lambda kind: kind.__name__)
def test_any_number_may_be_scheduled(kind):
    """Betas and decay are inputs of the recording as soon as they change; zero is another one."""
    module = net()
    other = copy.deepcopy(module)
    schedule = {
        "beta1": lambda update: 0.9 - 0.002 * update,
        "weight_decay": lambda update: 0.01 * (update % 3),
    }
    fitted(module, kind(module.parameters(), lr=0.02), lr_scheduler=schedule)
    optimizer = kind(other.parameters(), lr=0.02)
    for update, (x, y) in enumerate(LOADER):
        group = optimizer.param_groups[0]
        group["betas"] = (schedule["beta1"](update), group["betas"][1])
        group["weight_decay"] = schedule["weight_decay"](update)
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
    assert_equal(module, other)


class Halves(Callback):
    """Halves the rates, and changes another setting, before every epoch after the first."""

    def on_epoch_begin(self, epoch, logs=None):
        for group in self.model.optimizer.param_groups if epoch else ():
            group.update(lr=group["lr"] / 2, maximize=epoch == 2)


@own_step
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize(
    "kind", [torch.optim.Adadelta, torch.optim.RAdam], ids=lambda kind: kind.__name__
)
def test_what_a_callback_changes_counts(kind, eager):
    """A rate is an input; a switch makes another recording."""
    module = net()
    other = copy.deepcopy(module)
    model = ipufit.Model(module)
    model.compile(kind(groups(module), lr=0.02), "cross_entropy", run_eagerly=eager)
    model.fit(LOADER, epochs=3, callbacks=[Halves()], device_iterations=8, verbose=0)
    optimizer = kind(groups(other), lr=0.02)
    for epoch in range(3):
        for group in optimizer.param_groups if epoch else ():
            group.update(lr=group["lr"] / 2, maximize=epoch == 2)
        by_hand(other, optimizer)
    assert_equal(module, other)


@own_step
@pytest.mark.parametrize("kind", [Lion, Shampoo, ScheduleFree], ids=lambda kind: kind.__name__)
def test_bounds_and_averages_are_as_with_any_optimizer(kind):
    """Gradients are clipped before the step, and averages follow it."""
    module = net()
    other = copy.deepcopy(module)
    fitted(module, kind(groups(module), lr=0.02), clip=ipufit.Clip(global_norm=0.2))
    clip = lambda params: nn.utils.clip_grad_norm_(params, 0.2)  # noqa: E731
    by_hand(other, kind(groups(other), lr=0.02), finish=clip)
    assert_equal(module, other)


class Fails(Callback):
    """Keeps the weights after every epoch, and fails within the last one."""

    def __init__(self):
        super().__init__()
        self.epoch, self.weights = 0, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(copy.deepcopy(self.model.module))

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 2:
            raise LookupError


@own_step
def test_an_error_leaves_the_best_weights_of_an_optimizer_with_two_modes():
    """They are those for evaluation: put in the place of those for training, they would change."""
    module = net()
    optimizer = ScheduleFree(module.parameters(), lr=0.02)
    stops, fails = EarlyStopping("loss", restore_best_weights=True), Fails()
    with pytest.raises(LookupError):
        fitted(module, optimizer, epochs=3, fit_options={"callbacks": [stops, fails]})
    assert_equal(module, fails.weights[stops.best_epoch], atol=0)


@own_step
@pytest.mark.parametrize("kind", [Attributes, Shampoo], ids=lambda kind: kind.__name__)
def test_averages_follow_the_step(kind):
    module = net()
    other = copy.deepcopy(module)
    fitted(module, kind(module.parameters(), lr=0.02), ema=ipufit.EMA(momentum=0.9))
    optimizer, averages = kind(other.parameters(), lr=0.02), None
    for x, y in LOADER:
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
        now = [p.detach().clone() for p in other.parameters()]
        averages = now if averages is None else [a.lerp(p, 0.1) for a, p in zip(averages, now)]
    for value, average in zip(module.parameters(), averages):
        torch.testing.assert_close(value, average, rtol=0, atol=1e-12)


@own_step
@pytest.mark.few("NAdam", "ScheduleFree", "Shampoo", "Attributes")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_run_that_goes_on_has_the_same_bits(kind, tmp_path):
    """All that an optimizer keeps is in a checkpoint: lists of matrices, numbers, settings."""
    small = DataLoader(TensorDataset(X[:40], Y[:40]), batch_size=4)

    def run(epochs, **checkpoint):
        module = net()
        work = {"checkpoint": ipufit.Checkpoint(tmp_path / "run", **checkpoint), "seed": 1}
        options = {"validation_data": HELD_OUT, **(work if checkpoint else {"seed": 1})}
        fitted(
            module,
            kind(groups(module), lr=0.02),
            small,
            epochs,
            options,
            lr_scheduler=half_cosine,
        )
        return [p.detach().clone() for p in module.parameters()]

    whole = run(3)
    run(2, every_updates=7)
    for value, other in zip(run(3, resume="auto"), whole):
        assert torch.equal(value, other)


@own_step
@pytest.mark.parametrize("kind", [ScheduleFree, torch.optim.ASGD], ids=lambda kind: kind.__name__)
def test_the_bits_are_those_of_every_device_iterations(kind):
    """The settings of an update are its own, however many updates run at once."""
    results = []
    for device_iterations in (1, 7):
        module = net()
        options = {"device_iterations": device_iterations}
        fitted(module, kind(groups(module), lr=0.02), fit_options=options, lr_scheduler=half_cosine)
        results.append(module)
    assert_equal(*results, atol=0)


class Looks(Callback):
    """Evaluates and looks at the weights, in the middle of an epoch and at its end."""

    def __init__(self, path):
        super().__init__()
        self.path, self.seen = path, []

    def on_train_batch_end(self, batch, logs=None):
        self.model.evaluate(*HELD_OUT, verbose=0)

    def on_epoch_end(self, epoch, logs=None):
        self.model.save_weights(self.path)
        self.seen.append([p.detach().clone() for p in self.model.module.parameters()])


@own_step
def test_a_schedule_free_optimizer_evaluates_with_its_averages(tmp_path):
    """fit trains in train mode; validation, predict, callbacks at the end and files see eval's."""
    module = net()
    other = copy.deepcopy(module)
    looks = Looks(tmp_path / "weights.safetensors")
    options = {"callbacks": [looks], "validation_data": HELD_OUT}
    model = fitted(module, ScheduleFree(module.parameters()), epochs=2, fit_options=options)
    optimizer = ScheduleFree(other.parameters())
    losses = []
    for epoch in range(2):
        by_hand(other, optimizer)
        with torch.no_grad():
            losses.append(nn.functional.cross_entropy(other(HELD_OUT[0]), HELD_OUT[1]).item())
        for value, expected in zip(looks.seen[epoch], other.parameters()):
            torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-12)
    assert model.history.history["val_loss"] == pytest.approx(losses, abs=1e-12)
    assert_equal(module, other)
    read = ipufit.Model(net())
    read.load_weights(tmp_path / "weights.safetensors")
    assert_equal(read.module, other)


@own_step
def test_to_look_at_a_schedule_free_run_changes_no_bit(tmp_path):
    """Weights that go to eval mode and back come back as they were."""
    results = []
    for options in ({}, {"callbacks": [Looks(tmp_path / "weights.safetensors")]}):
        module = net()
        fitted(module, ScheduleFree(module.parameters()), epochs=2, fit_options=options)
        results.append(module)
    assert_equal(*results, atol=0)


@own_step
@pytest.mark.skipif(
    not hasattr(torch.optim.Optimizer, "register_step_pre_hook"), reason="torch without step hooks"
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, Lion], ids=lambda kind: kind.__name__)
def test_hooks_on_step_are_called(kind, capsys):
    """With gradients in the parameters; the step then runs as it is, also one with a rule."""
    module = net()
    other = copy.deepcopy(module)
    norms = {}

    def halve(optimizer, *_):
        seen = norms.setdefault(id(optimizer), [])
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            p.grad.mul_(0.5)
            seen.append(p.grad.norm().item())

    optimizer, expected = kind(module.parameters(), lr=0.02), kind(other.parameters(), lr=0.02)
    for each in (optimizer, expected):
        each.register_step_pre_hook(halve)
    model = fitted(module, optimizer)
    by_hand(other, expected)
    assert_equal(module, other)
    if id(expected) not in norms:
        pytest.skip("this torch calls no hook of its own optimizers once it has loaded dynamo")
    assert norms[id(optimizer)] == pytest.approx(norms[id(expected)], abs=1e-12)
    assert all(p.grad is None for p in module.parameters())
    assert explained(model, capsys).endswith(": it has hooks.")


class Rebinding(torch.optim.Optimizer):
    """Gives parameters new data."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad.data


class Counter(torch.optim.SGD):
    """Counts in its group and in itself, as some third-party optimizers do."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.count)
        return super().step(closure)


@own_step
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Rebinding, "it replaces the parameters' data instead of changing it in place"),
        (Counter, "it keeps changing values outside of its parameters' state"),
    ],
)
def test_a_step_that_can_not_be_recorded_runs_as_it_is(kind, why, eager, capsys):
    """Its counter counts, its new data count, and nothing of a recording is left in it."""
    module = net()
    other = copy.deepcopy(module)
    model = fitted(module, kind(module.parameters(), lr=0.1), run_eagerly=eager)
    by_hand(other, kind(other.parameters(), lr=0.1))
    assert_equal(module, other)
    said = "run_eagerly=True" if eager else why
    assert explained(model, capsys).endswith(f"after the recorded gradients: {said}.")


class Leaking(torch.optim.Optimizer):
    """Takes a number out of what is followed."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=float(f"{group['lr']:.17g}"))


@own_step
def test_a_number_that_can_not_be_followed_is_no_constant(capsys):
    """Frozen into a recording it would give wrong numbers without a word."""
    module = net()
    other = copy.deepcopy(module)
    model = fitted(module, Leaking(module.parameters()), lr_scheduler=half_cosine)
    optimizer = Leaking(other.parameters())
    by_hand(other, optimizer, half_cosine(optimizer))
    assert_equal(module, other)
    assert explained(model, capsys).endswith(
        ": it computes with Python numbers in ways that can't be recorded."
    )
