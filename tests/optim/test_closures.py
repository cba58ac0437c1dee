"""Optimizers whose step evaluates the loss again, such as LBFGS, against their loops in float64."""

import copy
import functools
import re
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import NonFiniteLossError, OptimizerError
from ipufit.optim.several import evaluates_again
from tests.engines import EAGER_OR_NOT, own_step
from tests.nets import CNN, data
from tests.optim.test_own_steps import explained, half_cosine, net

X, Y = data(210)
# 50 updates of four samples, and some of three micro-batches with a smaller last one.
FIFTY = DataLoader(TensorDataset(X[:200], Y[:200]), batch_size=4)
RAGGED = DataLoader(TensorDataset(X[:41], Y[:41]), batch_size=4)

TURNS = "losses that take turns, as TrainStep and manual optimization have them"
SEARCHES = pytest.mark.parametrize("search", [None, "strong_wolfe"], ids=["fixed", "wolfe"])


def lbfgs(search="strong_wolfe", **options):
    """A factory; without a line search the rate must be small."""
    lr = 1.0 if search else 0.01
    options = {"lr": lr, "max_iter": 4, "history_size": 5, **options}
    return lambda params: torch.optim.LBFGS(params, line_search_fn=search, **options)


def fitted(module, optimizer, loader=FIFTY, epochs=1, fit_options=None, late=False, **options):
    """Train with ipufit; ``late`` as on a device whose numbers the host sees afterwards."""
    model = ipufit.Model(module)
    model.compile(optimizer, options.pop("loss", "cross_entropy"), **options)
    if late:
        model._session.engine.as_device = True
    fit_options = {"device_iterations": 8, "verbose": 0, **(fit_options or {})}
    model.fit(loader, epochs=epochs, **fit_options)
    return model


def by_hand(module, optimizer, updates, scheduler=None, finish=None, first=False):
    """A loop in which each update has a list of micro-batches; returns the loss of each."""
    parameters, losses = list(module.parameters()), []
    for batches in updates:
        sizes = [len(y) for _, y in batches]
        # Rounded as fit does, because LBFGS makes more of every rounding.
        is_even = len(set(sizes)) == 1
        factors = [1.0 if is_even else size / sum(sizes) for size in sizes]
        share = 1 / len(sizes) if is_even else 1.0

        def closure():
            optimizer.zero_grad()
            total, sums = 0.0, [torch.zeros_like(p) for p in parameters]
            for factor, (x, y) in zip(factors, batches):  # noqa: B023
                loss = nn.functional.cross_entropy(module(x), y)
                total = total + loss.detach() * factor
                gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                for each, gradient in zip(sums, gradients):
                    if gradient is not None:
                        each.add_(gradient, alpha=factor)
            for p, each in zip(parameters, sums):
                p.grad = each.mul_(share)  # noqa: B023
            if finish is not None:
                finish(parameters)
            return total * share  # noqa: B023

        if first:
            losses.append(closure().item())
            optimizer.step(closure)
        else:
            losses.append(optimizer.step(closure).item())
        if scheduler is not None:
            scheduler.step()
    return losses


def alone(loader):
    """Updates of one micro-batch."""
    return [[batch] for batch in loader]


def joined(loader, number=3):
    """Updates of several micro-batches, and what is left."""
    batches = list(loader)
    return [batches[i : i + number] for i in range(0, len(batches), number)]


def assert_close(first, second):
    """All of the state dicts agree to 1e-12 of their largest number."""
    for name, value in first.state_dict().items():
        other = second.state_dict()[name].double()
        scale = other.abs().max().clamp(min=1e-300)
        assert ((value.double() - other).abs().max() / scale).item() <= 1e-12, name


class Sharp(torch.optim.SGD):
    """Foret et al. 2021, SAM: climbs by the gradients that are there, then evaluates."""

    losses: ClassVar[list] = []

    @torch.no_grad()
    def step(self, closure):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        climbs = [0.05 * p.grad / norm for p in parameters]
        for p, climb in zip(parameters, climbs):
            p.add_(climb)
        with torch.enable_grad():
            self.losses.append(float(closure()))
        for p, climb in zip(parameters, climbs):
            p.sub_(climb)
        super().step()
        return torch.tensor(self.losses[-1])


def assert_sharp(loader, updates, fit_options, epochs=1, finish=None, kind=Sharp, **options):
    """Weights, and losses where the gradients have led, are those of the loop."""
    module = net()
    other = copy.deepcopy(module)
    Sharp.losses.clear()
    fitted(module, functools.partial(kind, lr=0.1), loader, epochs, fit_options, **options)
    losses = [*Sharp.losses]
    Sharp.losses.clear()
    by_hand(other, kind(other.parameters(), lr=0.1), updates, finish=finish, first=True)
    assert_close(module, other)
    assert losses == pytest.approx(Sharp.losses, rel=1e-12)


@own_step
@SEARCHES
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
def test_fifty_updates_of_lbfgs_equal_the_loop(search, eager, scheduled, capsys):
    """The loss of an update is that of its first evaluation, as ``step`` returns it."""
    module = net()
    other = copy.deepcopy(module)
    schedule = half_cosine if scheduled else None
    options = {"run_eagerly": eager, "lr_scheduler": schedule}
    model = fitted(module, lbfgs(search), FIFTY, **options)
    optimizer = lbfgs(search)(other.parameters())
    scheduler = schedule and schedule(optimizer)
    losses = by_hand(other, optimizer, alone(FIFTY), scheduler=scheduler)
    assert_close(module, other)
    assert model.history.history["loss"] == pytest.approx([sum(losses) / 50], rel=1e-12)
    # It has evaluated as often.
    counts = [
        next(iter(each.state.values()))["func_evals"] for each in (model.optimizer, optimizer)
    ]
    assert counts[0] == counts[1] > 100
    assert explained(model, capsys) == (
        "The step of LBFGS runs as it is, after the recorded gradients: it evaluates the loss "
        "again."
    )
    assert all(p.grad is None for p in module.parameters())


@own_step
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["free", "clipped"])
def test_each_evaluation_adds_up_and_bounds_as_the_update_does(clip, late):
    """Over micro-batches of two sizes, and as on a device that is not the host."""
    module = net()
    other = copy.deepcopy(module)
    bound = None if clip is None else ipufit.Clip(value=clip)
    plan = {"gradient_accumulation": 3}
    fitted(module, lbfgs(), RAGGED, 2, plan, late, clip=bound, jit="graph")
    finish = None if clip is None else lambda params: nn.utils.clip_grad_value_(params, clip)
    by_hand(other, lbfgs()(other.parameters()), joined(RAGGED) * 2, finish=finish)
    assert_close(module, other)


@own_step
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
def test_statistics_move_in_each_evaluation(eager):
    """As those of BatchNorm do in a loop."""
    torch.manual_seed(0)
    module = CNN().double()
    module.drop.p = 0.0
    other = copy.deepcopy(module)
    fitted(module, lbfgs(), FIFTY, run_eagerly=eager)
    by_hand(other, lbfgs()(other.parameters()), alone(FIFTY))
    assert_close(module, other)
    assert module.norm.num_batches_tracked > 100


@own_step
def test_the_loss_is_the_mean_over_what_counts():
    """Of micro-batches with other numbers of labels that count, all labels of an update alike."""
    y = Y.clone()
    y[::3], y[1:40:4] = -100, -100
    loader, whole = (DataLoader(TensorDataset(X[:200], y[:200]), batch_size=n) for n in (4, 20))
    options = {"reduction": ipufit.Reduction(normalize="tokens")}
    assert_sharp(loader, alone(whole), {"gradient_accumulation": 5}, **options)


@own_step
@pytest.mark.parametrize(
    ("jit", "plan"),
    [
        ("kernels", {"gradient_accumulation": 4}),
        ("aot_eager", {"gradient_accumulation": 4}),
        ("graph", {"ipus": 2, "gradient_accumulation": 2}),
    ],
    ids=["merged", "compiled", "replicas"],
)
def test_however_micro_batches_run_they_run_again(jit, plan):
    """Several at once, through a backend, or two on each replica; bounded in the same way."""
    finish = functools.partial(nn.utils.clip_grad_norm_, max_norm=0.5)
    updates, clip = joined(RAGGED, 4) * 2, ipufit.Clip(global_norm=0.5)
    assert_sharp(RAGGED, updates, plan, 2, finish, jit=jit, clip=clip)


@own_step
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
@SEARCHES
def test_a_run_that_goes_on_has_the_same_bits(search, eager, tmp_path):
    """Whatever device_iterations, with dropout: the history of LBFGS is in a checkpoint."""

    def run(epochs, device_iterations=8, **checkpoint):
        torch.manual_seed(0)
        module = CNN().double()
        work = {"checkpoint": ipufit.Checkpoint(tmp_path / "run", **checkpoint)}
        options = {"device_iterations": device_iterations, "seed": 1, **(checkpoint and work)}
        compiled = {"lr_scheduler": half_cosine, "run_eagerly": eager}
        fitted(module, lbfgs(search), RAGGED, epochs, options, **compiled)
        return [tensor.clone() for tensor in module.state_dict().values()]

    whole = run(3)
    assert all(map(torch.equal, run(3, device_iterations=1), whole))
    run(2, every_updates=7)
    assert all(map(torch.equal, run(3, resume="auto"), whole))


class Thrice(torch.optim.SGD):
    """Evaluates three times, moves its weights by new data, and remembers losses and gradients."""

    def step(self, closure):
        evaluations = []
        for _ in range(3):
            loss = closure()
            gradients = [p.grad.clone() for group in self.param_groups for p in group["params"]]
            evaluations.append([loss.item(), gradients])
            self.param_groups[0]["params"][0].grad.zero_()
        type(self).evaluations.append(evaluations)
        for group in self.param_groups:
            for p, gradient in zip(group["params"], gradients):
                p.data = p.data - group["lr"] * gradient
        type(self).moved.append(closure().item())


class AsPublished(Sharp):
    """Its closure has a default, and is needed."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure"
        evaluate = torch.enable_grad()(lambda: closure())
        return super().step(evaluate)


class Asks(Sharp):
    """Its closure has a default, which is meant."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        torch.optim.SGD.step(self)
        return loss


@own_step
@pytest.mark.parametrize("kind", [Sharp, AsPublished])
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
def test_an_optimizer_of_others_evaluates_where_its_weights_are(eager, kind):
    """It has gradients before the step, as after ``backward`` in its loop."""
    assert_sharp(FIFTY, alone(FIFTY), {}, kind=kind, run_eagerly=eager)


def test_a_closure_is_passed_to_a_step_that_does_not_ask_for_it():
    parameters = [nn.Parameter(torch.zeros(1))]
    kinds = (Sharp, AsPublished, Asks, torch.optim.LBFGS, torch.optim.Adam, ipufit.optim.LAMB)
    assert [evaluates_again(kind(parameters, lr=0.1)) for kind in kinds] == [
        *(True, True, False, True, False, False)
    ]


@own_step
@pytest.mark.parametrize("eager", EAGER_OR_NOT, ids=["traced", "eager"])
def test_each_evaluation_has_the_same_random_numbers(eager):
    """Dropout is the same function while an update searches, and another one in the next."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Dropout(0.5), nn.Linear(9, 5))
    Thrice.evaluations, Thrice.moved = [], []
    plan = {"gradient_accumulation": 3, "seed": 1}
    model = fitted(
        module.double(), functools.partial(Thrice, lr=0.1), RAGGED, 1, plan, run_eagerly=eager
    )
    assert len(Thrice.evaluations) == 4
    for evaluations in Thrice.evaluations:
        losses, gradients = zip(*evaluations)
        assert losses[0] == losses[1] == losses[2]
        assert all(map(torch.equal, gradients[0], gradients[1]))
        assert all(map(torch.equal, gradients[0], gradients[2]))
    shares = [12, 12, 12, 5]
    means = [evaluations[0][0] for evaluations in Thrice.evaluations]
    expected = sum(share * mean for share, mean in zip(shares, means)) / 41
    assert model.history.history["loss"] == pytest.approx([expected], rel=1e-12)
    # New data in the place of a parameter's are what the next evaluation reads.
    assert all(moved < mean for moved, mean in zip(Thrice.moved, means))


class Chosen(nn.Module):
    """Experts by index: which parameters get a gradient depends on values."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 3)
        self.experts = nn.ModuleList(nn.Linear(12, 5) for _ in range(3))
        self.chosen = []

    def forward(self, x):
        gates = self.gate(x.flatten(1)).softmax(-1)
        best = gates.argmax(-1)
        self.chosen.append(tuple(best.unique().tolist()))
        out = x.new_zeros(len(x), 5)
        for number in best.unique().tolist():
            rows = best == number
            out[rows] = self.experts[number](x[rows].flatten(1)) * gates[rows, number, None]
        return out


@own_step
def test_an_evaluation_may_reach_other_parameters():
    """A step along the line chooses other experts; one without a gradient counts as zeros."""
    torch.manual_seed(2)
    module = Chosen().double()
    other = copy.deepcopy(module)
    few = DataLoader(TensorDataset(X[:12], Y[:12]), batch_size=4)
    fitted(module, lbfgs(), few, run_eagerly=True)
    by_hand(other, lbfgs()(other.parameters()), alone(few))
    assert_close(module, other)
    assert module.chosen == other.chosen
    assert len(set(module.chosen[:5])) > 1


class Blows(torch.optim.SGD):
    """Looks at the loss far away, and goes back."""

    def step(self, closure):
        weight = self.param_groups[0]["params"][0]
        before = weight.detach().clone()
        with torch.no_grad():
            weight.fill_(float("inf"))
            type(self).losses.append(float(closure()))
            weight.copy_(before)
        closure()
        super().step()


@own_step
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_what_is_not_finite_in_a_search_is_the_optimizers_business(late):
    """The loss of the update itself is refused as ever, with the state from before."""
    Blows.losses = []
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    other = copy.deepcopy(module)
    fitted(module, Blows(module.parameters(), lr=0.1), RAGGED, late=late)
    fitted(other, torch.optim.SGD(other.parameters(), lr=0.1), RAGGED)
    assert_close(module, other)
    assert len(Blows.losses) == 11
    assert not any(map(torch.isfinite, map(torch.tensor, Blows.losses)))
    x = X[:40].clone()
    x[21] = float("nan")
    loader = DataLoader(TensorDataset(x, Y[:40]), batch_size=4)
    module = net()
    other = copy.deepcopy(module)
    with pytest.raises(NonFiniteLossError, match="update 5"):
        fitted(module, lbfgs(), loader, late=late)
    by_hand(other, lbfgs()(other.parameters()), alone(loader)[:5])
    assert_close(module, other)


def critic(module, batch):
    """A step of one's own."""
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


@own_step
def test_a_step_of_ones_own_is_evaluated_again():
    """One that is the only one of an update."""
    module = net()
    other = copy.deepcopy(module)
    fitted(module, lbfgs(), loss=ipufit.TrainStep(critic))
    by_hand(other, lbfgs()(other.parameters()), alone(FIFTY))
    assert_close(module, other)


@own_step
@pytest.mark.parametrize(
    ("optimizer", "loss", "came"),
    [
        ({"*": "lbfgs"}, "cross_entropy", "a dict or list of optimizers"),
        ({"1": lbfgs(), "*": "adam"}, "cross_entropy", "a dict or list of optimizers"),
        (
            "lbfgs",
            [ipufit.TrainStep(critic, moves={n: "*"}) for n in "ab"],
            TURNS,
        ),
        ("lbfgs", ipufit.TrainStep(critic, repeat=2), TURNS),
    ],
    ids=["dict", "two", "turns", "repeated"],
)
def test_it_is_the_only_optimizer_of_one_loss(optimizer, loss, came):
    """An update of several has no loss that all of them could go down."""
    text = (
        "LBFGS evaluates the loss again within an update, and so must be the only optimizer and "
        f"have one loss, but got {came}. Pass it alone, with one loss, or use another "
        "optimizer. A LightningModule returns that loss from training_step."
    )
    with pytest.raises(OptimizerError, match=re.escape(text)):
        ipufit.Model(net()).compile(optimizer, loss)


def test_an_engine_evaluates_again_or_refuses_it_with_its_name(engine):
    """An IPU makes updates of its own five optimizers."""
    module = net()
    before = copy.deepcopy(module)
    if engine == "embedded":
        fitted(module, "lbfgs")
        assert not torch.equal(module[1].weight, before[1].weight)
        return
    with pytest.raises(OptimizerError, match=r"LAMB only, got LBFGS\. Choose one of these"):
        fitted(module, "lbfgs")
    assert_close(module, before)
