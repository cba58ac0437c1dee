"""Schedules against loops written by hand: the same numbers, bit for bit, however they are cut."""

import copy
import functools
import json
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from ipufit.errors import ConfigurationError
from ipufit.optim.schedules import AtEpochEnd, resolve_schedule
from ipufit.optim.schedules.resolve import EveryBatches
from tests.told import message

UPDATES = 23


def sgd():
    """Two parameter groups with rates of their own, and momentum."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    groups = [{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.01, "weight_decay": 0.5}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def adam():
    """One parameter group with betas."""
    return torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.02)


class Doubling:
    """A factor that counts its calls, as objects given to LambdaLR may."""

    def __init__(self):
        self.calls = []

    def __call__(self, epoch):
        self.calls.append(epoch)
        return 1.0 + len(self.calls)


class Own(lrs.LRScheduler):
    """A scheduler of a user's, with state of its own in a list."""

    def __init__(self, optimizer):
        self.seen = [1.0]
        super().__init__(optimizer)

    def get_lr(self):
        self.seen.append(self.seen[-1] * 0.75 + 0.01)
        return [base * self.seen[-1] for base in self.base_lrs]


def sequential(optimizer):
    parts = [
        lrs.LinearLR(optimizer, 0.1, total_iters=4),
        lrs.ExponentialLR(optimizer, 0.8),
        lrs.ConstantLR(optimizer, 0.5, total_iters=3),
    ]
    return lrs.SequentialLR(optimizer, parts, milestones=[4, 15])


def chained(optimizer):
    return lrs.ChainedScheduler(
        [lrs.LinearLR(optimizer, 0.2, total_iters=5), lrs.ExponentialLR(optimizer, 0.9)]
    )


KINDS = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda n: 0.95**n),
    "lambda object": lambda o: lrs.LambdaLR(o, Doubling()),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda n: 0.9 + n / 100),
    "step": lambda o: lrs.StepLR(o, step_size=5, gamma=0.3),
    "multi step": lambda o: lrs.MultiStepLR(o, [3, 3, 11], gamma=0.5),
    "constant": lambda o: lrs.ConstantLR(o, 0.3, total_iters=6),
    "warm-up": lambda o: lrs.LinearLR(o, 0.05, total_iters=9),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.93),
    "polynomial": lambda o: lrs.PolynomialLR(o, total_iters=17, power=2.0),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, T_max=8, eta_min=1e-3),
    "warm restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "one cycle": lambda o: lrs.OneCycleLR(o, max_lr=0.4, total_steps=UPDATES),
    "one cycle linear": lambda o: lrs.OneCycleLR(
        o, max_lr=0.4, total_steps=UPDATES, anneal_strategy="linear", three_phase=True
    ),
    "cyclic": lambda o: lrs.CyclicLR(
        o, 0.001, 0.1, step_size_up=4, cycle_momentum="momentum" in o.defaults
    ),
    "cyclic triangular2": lambda o: lrs.CyclicLR(
        o, 0.001, 0.1, step_size_up=3, mode="triangular2", cycle_momentum=False
    ),
    "cyclic own": lambda o: lrs.CyclicLR(
        o, 0.001, 0.1, step_size_up=3, scale_fn=lambda n: 0.5**n, cycle_momentum=False
    ),
    "sequential": sequential,
    "chained": chained,
    "own": lambda o: Own(o),
}


def settings(optimizer):
    """All settings but the parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


@functools.lru_cache(maxsize=None)
def by_hand(kind, make):
    """What each ``optimizer.step()`` of a plain loop sees, and the settings after the last."""
    optimizer = make()
    scheduler = KINDS[kind](optimizer)
    seen = []
    for _ in range(UPDATES):
        seen.append(copy.deepcopy(settings(optimizer)))
        optimizer.step()
        scheduler.step()
    return [*seen, settings(optimizer)]


both = pytest.mark.parametrize("make", [sgd, adam])
every = pytest.mark.parametrize("kind", sorted(KINDS))
# SequentialLR itself, in the loop written by hand on torch 2.0.1.
quiet = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")


def cut(sizes, updates=UPDATES):
    """Updates in executions of the sizes, over and over, the last one smaller."""
    left, i = updates, 0
    while left:
        size = min(left, sizes[i % len(sizes)])
        yield size
        left, i = left - size, i + 1


@quiet
@both
@every
@pytest.mark.parametrize("sizes", [(1,), (2,), (5,), (7, 1, 3), (UPDATES,)])
def test_rows_are_what_a_loop_sees_however_the_updates_are_cut(kind, make, sizes):
    """The curve must not depend on device_iterations."""
    expected = by_hand(kind, make)
    optimizer = make()
    schedule = resolve_schedule(KINDS[kind](optimizer), optimizer)
    rows = [row for size in cut(sizes) for row in schedule.rows(size)]
    assert rows == expected[:-1]
    assert settings(optimizer) == expected[-1]
    assert schedule.updates == UPDATES


@quiet
@both
@every
def test_a_restored_schedule_repeats_itself(kind, make):
    """A failed execution is taken back as if it had never been asked for, twice if need be."""
    expected = by_hand(kind, make)
    optimizer = make()
    schedule = resolve_schedule(KINDS[kind](optimizer), optimizer)
    schedule.rows(4)
    kept = schedule.snapshot()
    for _ in range(2):
        schedule.rows(13)
        schedule.restore(kept)
        assert settings(optimizer) == expected[4]
        assert schedule.updates == 4
    assert schedule.rows(UPDATES - 4) == expected[4:-1]


@quiet
@both
@every
def test_a_saved_schedule_goes_on_in_another_process(kind, make):
    """Through JSON, which has neither tuples nor integers as keys."""
    expected = by_hand(kind, make)
    optimizer = make()
    schedule = resolve_schedule(KINDS[kind](optimizer), optimizer)
    schedule.rows(6)
    schedule.end_epoch({"loss": 1.0})
    state = json.loads(json.dumps(schedule.state_dict()))
    fresh = make()
    other = resolve_schedule(KINDS[kind](fresh), fresh)
    other.load_state_dict(state)
    assert (other.updates, other.epochs) == (6, 1)
    assert other.rows(UPDATES - 6) == expected[6:-1]


@quiet
@every
def test_looking_ahead_changes_nothing(kind):
    """fit may look whether all its updates have values."""
    optimizer = sgd()
    schedule = resolve_schedule(KINDS[kind](optimizer), optimizer)
    schedule.check(UPDATES)
    assert schedule.rows(UPDATES) == by_hand(kind, sgd)[:-1]


@quiet
@every
def test_a_factory_makes_what_the_scheduler_is(kind):
    """A user who names an optimizer has no object to build a scheduler on."""
    optimizer = sgd()
    schedule = resolve_schedule(KINDS[kind], optimizer)
    assert schedule.rows(UPDATES) == by_hand(kind, sgd)[:-1]


def test_a_scheduler_that_was_stepped_before_goes_on():
    """As in a loop that goes on with the same objects."""
    optimizer = sgd()
    scheduler = lrs.StepLR(optimizer, step_size=5, gamma=0.3)
    for _ in range(7):
        optimizer.step()
        scheduler.step()
    schedule = resolve_schedule(scheduler, optimizer)
    assert schedule.rows(10) == by_hand("step", sgd)[7:17]
    assert schedule.updates == 10
    assert scheduler.last_epoch == 17


def test_a_partial_of_a_class_is_a_factory():
    optimizer = sgd()
    schedule = resolve_schedule(functools.partial(lrs.StepLR, step_size=5, gamma=0.3), optimizer)
    assert schedule.rows(UPDATES) == by_hand("step", sgd)[:-1]


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    """Programs may hold on to it; rows have its values as numbers."""
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
    optimizer.param_groups[0]["lr"] = rate
    schedule = resolve_schedule(lambda update: 0.5 / (update + 1), optimizer)
    rates = [groups[0]["lr"] for groups in schedule.rows(2)]
    assert rates == [0.5, 0.25]
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.5 / 3, rel=1e-7)
    kept = schedule.snapshot()
    schedule.rows(3)
    schedule.restore(kept)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.5 / 3, rel=1e-7)


def test_a_torch_scheduler_takes_a_rate_that_is_a_tensor():
    expected, optimizer = [], None
    for own in (False, True):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.5)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        scheduler = lrs.ExponentialLR(optimizer, 0.5)
        if own:
            rows = resolve_schedule(scheduler, optimizer).rows(4)
            assert [row[0]["lr"] for row in rows] == expected
            continue
        for _ in range(4):
            expected.append(optimizer.param_groups[0]["lr"].item())
            optimizer.step()
            scheduler.step()


def rates(schedule, updates, name="lr"):
    """The values of the first group."""
    return [groups[0][name] for groups in schedule.rows(updates)]


@pytest.mark.parametrize("result", [float, torch.tensor, lambda v: torch.tensor([v]).numpy()[0]])
def test_a_callable_gives_the_rate_of_every_group(result):
    """As a schedule of Keras, which counts optimizer steps from 0."""
    optimizer = sgd()
    schedule = resolve_schedule(lambda update: result(0.5**update), optimizer)
    assert optimizer.param_groups[1]["lr"] == 1.0
    rows = schedule.rows(3) + schedule.rows(2)
    assert [[group["lr"] for group in row] for row in rows] == [[0.5**i] * 2 for i in range(5)]
    assert optimizer.param_groups[0]["lr"] == 0.5**5


def test_any_number_of_the_optimizer_can_be_scheduled():
    """Names as torch has them, the two betas and Keras' learning_rate."""
    optimizer = adam()
    schedule = resolve_schedule(
        {
            "learning_rate": lambda n: n / 4,
            "beta1": lambda n: 0.5 + n / 8,
            "beta2": lambda n: 0.9 - n / 8,
            "eps": lambda n: 1.0 / (n + 1),
            "weight_decay": lambda n: n,
        },
        optimizer,
    )
    rows = [groups[0] for groups in schedule.rows(4)]
    assert [row["lr"] for row in rows] == [0.0, 0.25, 0.5, 0.75]
    assert [row["betas"] for row in rows] == [(0.5 + n / 8, 0.9 - n / 8) for n in range(4)]
    assert [row["eps"] for row in rows] == [1.0 / (n + 1) for n in range(4)]
    assert [row["weight_decay"] for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert optimizer.param_groups[0]["betas"] == (1.0, 0.4)


def test_the_groups_may_have_schedules_of_their_own():
    optimizer = sgd()
    schedule = resolve_schedule(
        [{"lr": lambda n: n / 2}, {"momentum": lambda n: n / 10}], optimizer
    )
    first, second = zip(*schedule.rows(3))
    assert [group["lr"] for group in first] == [0.0, 0.5, 1.0]
    assert [group["momentum"] for group in first] == [0.9] * 3
    assert [group["lr"] for group in second] == [0.01] * 3
    assert [group["momentum"] for group in second] == [0.0, 0.1, 0.2]
    alone = resolve_schedule([{}, {"lr": lambda n: 0.5}], sgd())
    assert [group["lr"] for group in alone.rows(1)[0]] == [0.1, 0.5]


def test_a_callable_starts_anew_for_a_saved_schedule():
    optimizer = sgd()
    schedule = resolve_schedule({"momentum": lambda n: n / 100}, optimizer)
    schedule.rows(7)
    state = json.loads(json.dumps(schedule.state_dict()))
    other = resolve_schedule({"momentum": lambda n: n / 100}, sgd())
    other.load_state_dict(state)
    assert rates(other, 2, "momentum") == [0.07, 0.08]
    schedule.restore(schedule.snapshot())
    assert rates(schedule, 2, "momentum") == [0.07, 0.08]


def plateau(optimizer):
    return lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


@pytest.mark.parametrize("interval", ["update", "epoch"])
@pytest.mark.parametrize(
    ("logs", "monitor"),
    [
        (["loss"], None),
        (["loss", "val_loss"], None),
        (["loss", "val_loss"], "loss"),
        (["loss", "val_accuracy"], "val_accuracy"),
    ],
)
def test_reduce_on_plateau_steps_at_epoch_ends(interval, logs, monitor):
    """It watches val_loss if there is one, else loss, or what it is told to."""
    series = {
        "loss": [3.0, 2.0, 1.0, 1.0, 1.0, 1.0],
        "val_loss": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "val_accuracy": [0.5, 0.4, 0.3, 0.6, 0.6, 0.1],
    }
    watched = monitor or ("val_loss" if "val_loss" in logs else "loss")
    optimizer, mine = sgd(), sgd()
    scheduler = plateau(optimizer)
    given = plateau(mine) if monitor is None else AtEpochEnd(plateau(mine), monitor=monitor)
    schedule = resolve_schedule(given, mine, interval)
    for epoch in range(6):
        rows = schedule.rows(3)
        assert rows == [copy.deepcopy(settings(optimizer))] * 3
        scheduler.step(series[watched][epoch])
        schedule.end_epoch({name: series[name][epoch] for name in logs})
        assert settings(mine) == settings(optimizer)
    assert optimizer.param_groups[0]["lr"] < 0.1


def test_a_restored_plateau_counts_its_patience_again():
    optimizer = sgd()
    schedule = resolve_schedule(plateau, optimizer)
    schedule.end_epoch({"loss": 1.0})
    kept = schedule.snapshot()
    state = json.loads(json.dumps(schedule.state_dict()))
    for _ in range(3):
        schedule.end_epoch({"loss": 1.0})
    assert optimizer.param_groups[0]["lr"] == 0.05
    schedule.restore(kept)
    assert optimizer.param_groups[0]["lr"] == 0.1
    schedule.end_epoch({"loss": 1.0})
    assert optimizer.param_groups[0]["lr"] == 0.1
    fresh = sgd()
    other = resolve_schedule(plateau, fresh)
    other.load_state_dict(state)
    for expected in (0.1, 0.05):
        other.end_epoch({"loss": 1.0})
        assert fresh.param_groups[0]["lr"] == expected


@pytest.mark.parametrize("way", ["interval", "AtEpochEnd"])
@pytest.mark.parametrize(
    "given", [lambda o: lrs.StepLR(o, 2, 0.5), lambda e: 0.1 * 0.5 ** (e // 2)]
)
def test_schedules_may_step_at_epoch_ends(way, given):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    if way == "interval":
        schedule = resolve_schedule(given, optimizer, "epoch")
    else:
        schedule = resolve_schedule(AtEpochEnd(given), optimizer)
    seen = []
    for _ in range(5):
        seen += rates(schedule, 2)
        schedule.end_epoch({"loss": 1.0})
    assert seen == [0.1] * 4 + [0.05] * 4 + [0.025] * 2
    assert (schedule.updates, schedule.epochs) == (10, 5)


def test_schedules_may_step_at_the_ends_of_every_so_many_epochs():
    """A plateau then needs its value in those alone."""
    schedule = resolve_schedule(AtEpochEnd(lambda epoch: 0.5**epoch, frequency=2), sgd())
    seen = []
    for _ in range(5):
        seen += rates(schedule, 1)
        schedule.end_epoch({})
    assert seen == [1.0, 1.0, 0.25, 0.25, 0.0625]
    schedule = resolve_schedule(AtEpochEnd(plateau, monitor="val_loss", frequency=2), sgd())
    schedule.end_epoch({"loss": 1.0})
    with pytest.raises(ConfigurationError, match="got monitor='val_loss'"):
        schedule.end_epoch({"loss": 1.0})


def test_a_check_ends_epochs_where_fit_will():
    """Ten epochs of seven batches step ten times two, not twenty-three."""
    of_two = EveryBatches(lambda o: lrs.OneCycleLR(o, 0.1, total_steps=21), 3)
    resolve_schedule(of_two, sgd()).check(70, [1] * 7)
    with pytest.raises(ConfigurationError, match="OneCycleLR failed"):
        resolve_schedule(of_two, sgd()).check(70)


def test_the_end_of_an_epoch_means_nothing_to_a_schedule_of_updates():
    schedule = resolve_schedule(lambda update: 0.5**update, sgd())
    schedule.rows(1)
    schedule.end_epoch({})
    assert rates(schedule, 1) == [0.5]


def test_no_schedule_is_none():
    assert resolve_schedule(None, sgd()) is None
    assert resolve_schedule(None, None) is None


def test_a_value_after_the_last_update_is_not_needed():
    """A list of rates is as long as the training; nobody reads what comes after it."""
    table = [0.3, 0.2, 0.1]
    for sizes in ([3], [1, 1, 1], [2, 1]):
        optimizer = sgd()
        schedule = resolve_schedule(lambda update: table[update], optimizer)
        assert [rate for size in sizes for rate in rates(schedule, size)] == table
        state = json.loads(json.dumps(schedule.state_dict()))
        text = (
            "lr_scheduler must have a value for update 3, counted from 0, but the schedule of lr "
            "failed with IndexError: list index out of range. It must cover all updates of fit: "
            "epochs × updates per epoch."
        )
        other = resolve_schedule(lambda update: table[update], sgd())
        other.load_state_dict(state)
        for one in (schedule, other):
            with pytest.raises(ConfigurationError) as caught:
                one.rows(1)
            assert str(caught.value) == text
        assert isinstance(caught.value.__cause__, (IndexError, type(None)))


def test_one_cycle_is_refused_before_the_execution_that_it_does_not_reach():
    """torch counts one step more than there are rates; after that it raises."""
    optimizer = sgd()
    schedule = resolve_schedule(lambda o: lrs.OneCycleLR(o, 0.4, total_steps=6), optimizer)
    assert message(schedule.check, 9).startswith(
        "lr_scheduler must have a value for update 7, counted from 0, but OneCycleLR failed with "
        "ValueError: Tried to step 7 times."
    )
    before = copy.deepcopy(settings(optimizer))
    with pytest.raises(ConfigurationError):
        schedule.rows(9)
    assert settings(optimizer) == before
    assert schedule.updates == 0
    assert len(schedule.rows(7)) == 7


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", math.nan, "lr a finite number of at least 0, but the schedule of lr gives nan"),
        ("lr", math.inf, "lr a finite number of at least 0, but the schedule of lr gives inf"),
        ("lr", -0.5, "lr a finite number of at least 0, but the schedule of lr gives -0.5"),
        (
            "momentum",
            -1,
            "momentum a finite number of at least 0, but the schedule of momentum gives -1.0",
        ),
        (
            "dampening",
            math.nan,
            "dampening a finite number, but the schedule of dampening gives nan",
        ),
    ],
)
@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_value_that_no_update_can_use_is_refused_beforehand(name, value, expected, at):
    """One such update and the weights are lost."""
    optimizer = sgd()
    before = copy.deepcopy(settings(optimizer))
    text = (
        f"lr_scheduler must make {expected} for update {at}, counted from 0, in parameter group 0. "
        "Correct the schedule; nothing of that execution has run."
    )
    given = {name: lambda update: value if update == at else 0.25}
    if at == 0:
        assert message(resolve_schedule, given, optimizer) == text
        assert settings(optimizer) == before
        return
    schedule = resolve_schedule(given, optimizer)
    schedule.rows(1)
    before = copy.deepcopy(settings(optimizer))
    assert message(schedule.rows, 8) == text
    assert schedule.updates == 1
    if at > 1:
        assert settings(optimizer) == before
        assert rates(schedule, 3, name) == [0.25] * 3


def test_a_torch_scheduler_with_bad_values_is_refused_too():
    optimizer = sgd()
    schedule = resolve_schedule(lrs.LambdaLR(optimizer, lambda n: 1 - n), optimizer)
    assert message(schedule.rows, 4) == (
        "lr_scheduler must make lr a finite number of at least 0, but LambdaLR gives -0.1 for "
        "update 2, counted from 0, in parameter group 0. Correct the schedule; nothing of that "
        "execution has run."
    )
    assert rates(schedule, 2) == [0.1, 0.0]


def test_a_beta_of_one_is_refused():
    assert message(resolve_schedule, {"beta2": lambda n: 1.0}, adam()) == (
        "lr_scheduler must make beta2 a number of at least 0 and less than 1, but the schedule of "
        "beta2 gives 1.0 for update 0, counted from 0, in parameter group 0. Correct the schedule; "
        "nothing of that execution has run."
    )


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (True, "bool"), ("1", "str")])
def test_a_schedule_that_returns_no_number_is_refused(value, kind):
    assert message(resolve_schedule, {"lr": lambda update: value}, sgd()) == (
        f"the schedule of lr must return one number, got {kind} for update 0, counted from 0. "
        "Return for example 0.1 * 0.99 ** update."
    )
    schedule = resolve_schedule(lambda e: 0.1 if e < 2 else value, sgd(), "epoch")
    schedule.end_epoch({})
    schedule.end_epoch({})
    assert message(schedule.rows, 1) == (
        f"the schedule of lr must return one number, got {kind} for epoch 2, counted from 0. "
        "Return for example 0.1 * 0.99 ** epoch."
    )


def test_a_rate_that_is_scheduled_and_set_by_hand_is_refused():
    """One of the two would be ignored without a word."""
    optimizer = sgd()
    schedule = resolve_schedule(lambda update: 0.5, optimizer)
    optimizer.param_groups[1]["lr"] = 0.125
    assert message(schedule.rows, 1) == (
        "lr is set by lr_scheduler, but it was changed from 0.5 to 0.125 in parameter group 1. "
        "Leave it to the schedule, or compile without one and set it in a callback."
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lrs.LambdaLR(optimizer, lambda update: 1.0),
        lambda optimizer: lrs.OneCycleLR(optimizer, 0.1, total_steps=9),
        lambda optimizer: lrs.CyclicLR(optimizer, 0.1, 0.2),
        lambda optimizer: lrs.CosineAnnealingWarmRestarts(optimizer, 9),
        lambda optimizer: lrs.ChainedScheduler([lrs.LambdaLR(optimizer, lambda update: 1.0)]),
    ],
    ids=["LambdaLR", "OneCycleLR", "CyclicLR", "CosineAnnealingWarmRestarts", "ChainedScheduler"],
)
def test_a_rate_set_by_hand_is_refused_where_torch_would_overwrite_it(make):
    """These schedulers compute from the first rates, so it would hold for one update."""
    optimizer = sgd()
    schedule = resolve_schedule(make(optimizer), optimizer)
    schedule.rows(2)
    wanted, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.125
    text = (
        f"lr is set by lr_scheduler, but it was changed from {wanted!r} to 0.125 in parameter "
        "group 0. Leave it to the schedule, or compile without one and set it in a callback."
    )
    assert message(schedule.rows, 1) == text
    optimizer.param_groups[0]["lr"] = wanted
    schedule.rows(1)
    # From one epoch to the next it counts.
    optimizer = sgd()
    schedule = resolve_schedule(make(optimizer), optimizer, "epoch")
    optimizer.param_groups[0]["lr"] = 0.125
    assert rates(schedule, 2) == [0.125] * 2


def test_a_rate_set_by_hand_counts_for_a_torch_scheduler():
    """Chainable schedulers multiply what they find, as in any loop."""
    optimizer = sgd()
    schedule = resolve_schedule(lrs.ExponentialLR(optimizer, 0.5), optimizer)
    optimizer.param_groups[0]["lr"] = 8.0
    assert rates(schedule, 3) == [8.0, 4.0, 2.0]


def annotated(o: torch.optim.Optimizer):
    return lrs.StepLR(o, 5)


def named(o: "torch.optim.Optimizer"):
    return lrs.StepLR(o, 5)


def promised(o) -> lrs.StepLR:
    return lrs.StepLR(o, 5)


def of_int(n: int):
    return 0.5


def to_float(n) -> float:
    return 0.5


@pytest.mark.parametrize("given", [annotated, named, promised])
def test_annotations_mark_a_factory(given):
    calls = []

    @functools.wraps(given)
    def spying(argument):
        calls.append(argument)
        return given(argument)

    optimizer = sgd()
    assert resolve_schedule(spying, optimizer).name == "StepLR"
    assert calls == [optimizer]


@pytest.mark.parametrize("given", [of_int, to_float])
def test_annotations_mark_a_schedule(given):
    assert resolve_schedule(given, sgd()).rows(1)[0][1]["lr"] == 0.5


def both_fail(argument):
    raise RuntimeError("never")


ADVICE = (
    "Write lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10) or "
    "lambda update: 0.1 * 0.99 ** update."
)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            lambda _: None,
            "lr_scheduler must make a torch scheduler from the optimizer or a learning rate from "
            "the update, but calling it with 0 gives NoneType, and with the optimizer gives "
            f"NoneType. {ADVICE}",
        ),
        (
            both_fail,
            "lr_scheduler must make a torch scheduler from the optimizer or a learning rate from "
            "the update, but calling it with 0 fails with RuntimeError: never, and with the "
            f"optimizer fails with RuntimeError: never. {ADVICE}",
        ),
        (
            lambda update, rate: 0.1,
            "lr_scheduler must be callable with one argument, the optimizer or the update, got "
            f"one that is not: missing a required argument: 'rate'. {ADVICE}",
        ),
        (
            functools.partial(lrs.OneCycleLR, max_lr=0.1),
            "lr_scheduler is a factory, which must make a torch scheduler from the optimizer, but "
            "it failed with ValueError: You must define either total_steps OR (epochs AND "
            "steps_per_epoch). Correct it: lambda optimizer: "
            "torch.optim.lr_scheduler.StepLR(optimizer, step_size=10).",
        ),
        (
            lrs.StepLR,
            "lr_scheduler must be an object, a factory, a callable or a dict, got the class "
            "StepLR. Pass for example functools.partial(StepLR, ...), which is called with the "
            "optimizer.",
        ),
        (
            0.1,
            "lr_scheduler must be a name, an object of torch.optim.lr_scheduler, a factory, a "
            "callable or a dict of callables, got 0.1. Pass for example 'cosine' or lambda "
            "optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10) or lambda update: "
            "0.1 * 0.99 ** update; torch's SequentialLR and ChainedScheduler combine several.",
        ),
        (
            {},
            "lr_scheduler must name a hyper-parameter, got an empty dict. Pass for example "
            "{'lr': lambda update: 0.1 * 0.99 ** update}.",
        ),
        (
            {"lr": 0.1},
            "lr_scheduler must have a callable for 'lr', got 0.1. Pass for example "
            "{'lr': lambda update: 0.1 * 0.99 ** update}, or set a constant value in the "
            "optimizer.",
        ),
        (
            {"lr": of_int, "learning_rate": of_int},
            "lr_scheduler must name each hyper-parameter once, got 'lr' and 'learning_rate', which "
            "mean the same. Leave one out.",
        ),
        (
            [{"lr": of_int}],
            "lr_scheduler must be one dict, or a list with one for each of the 2 parameter groups, "
            "got 1. Write {} for a group without a schedule.",
        ),
        (
            {"beta1": of_int},
            "lr_scheduler can only schedule hyper-parameters of SGD that are numbers, got 'beta1' "
            "for parameter group 0. It has lr, momentum, dampening, weight_decay.",
        ),
        (
            {"nesterov": of_int},
            "lr_scheduler can only schedule hyper-parameters of SGD that are numbers, got "
            "'nesterov' for parameter group 0, which is False, not a single number. It has lr, "
            "momentum, dampening, weight_decay.",
        ),
        (
            AtEpochEnd(of_int, monitor="loss"),
            "only ReduceLROnPlateau monitors a value, got monitor='loss' for dict. Leave monitor "
            "out.",
        ),
        (
            AtEpochEnd(lambda o: lrs.StepLR(o, 5), frequency=0),
            "the frequency of a scheduler must be an integer of at least 1, got 0.",
        ),
        (
            AtEpochEnd(lambda o: lrs.StepLR(o, 5), monitor="loss"),
            "only ReduceLROnPlateau monitors a value, got monitor='loss' for StepLR. Leave monitor "
            "out.",
        ),
    ],
)
def test_what_is_no_schedule_is_refused_with_advice(given, text):
    """And the optimizer is as it was."""
    optimizer = sgd()
    before = copy.deepcopy(settings(optimizer))
    assert message(resolve_schedule, given, optimizer) == text
    assert settings(optimizer) == before


def test_a_list_of_schedulers_is_refused():
    optimizer = sgd()
    several = [lrs.StepLR(optimizer, 5), lrs.StepLR(optimizer, 7)]
    with pytest.raises(ConfigurationError, match=r"got list of 2\. .*combine several\.$"):
        resolve_schedule(several, optimizer)


def test_a_scheduler_of_another_optimizer_is_refused():
    """It would change the rate of something that is not trained."""
    assert message(resolve_schedule, lrs.StepLR(sgd(), 5), sgd()) == (
        "lr_scheduler must be made for the compiled optimizer, got StepLR for another SGD. Pass "
        "that optimizer too, or a factory: lambda optimizer: StepLR(optimizer, ...)."
    )


def test_plateau_inside_another_scheduler_is_refused():
    optimizer = sgd()
    inside = lrs.ChainedScheduler([lrs.StepLR(optimizer, 5)])
    inside._schedulers = [plateau(optimizer)]
    assert message(resolve_schedule, inside, optimizer) == (
        "ReduceLROnPlateau can't be combined, got one inside ChainedScheduler: it needs a value "
        "that only exists at the end of an epoch. Pass it directly as lr_scheduler."
    )


def test_a_value_to_watch_that_is_missing_is_named():
    schedule = resolve_schedule(AtEpochEnd(plateau, monitor="val_acc"), sgd())
    assert message(schedule.end_epoch, {"loss": 1.0, "accuracy": 0.5}) == (
        "ReduceLROnPlateau must monitor a value of the epoch, got monitor='val_acc'. There is "
        "loss, accuracy."
    )
    assert schedule.epochs == 0


def test_an_unknown_interval_is_refused():
    assert message(resolve_schedule, of_int, sgd(), "step") == (
        "the interval of lr_scheduler must be 'update' or 'epoch', got 'step'. Take 'update', "
        "which steps it after every weight update."
    )


def test_a_schedule_without_optimizer_is_refused():
    assert message(resolve_schedule, of_int, None) == (
        "lr_scheduler needs an optimizer to schedule, got optimizer=None. Leave it out of a model "
        "that only evaluates and predicts."
    )


def test_a_state_of_another_schedule_is_refused():
    state = resolve_schedule(of_int, sgd()).state_dict()
    with pytest.raises(ConfigurationError) as caught:
        resolve_schedule({"momentum": of_int}, sgd()).load_state_dict(state)
    names = "[['dampening', 'lr', 'momentum', 'weight_decay']] * 2"
    names = str(eval(names))
    assert str(caught.value) == (
        f"the state of a schedule must be that of the schedule of momentum over {names}, got the "
        f"schedule of lr over {names}. Compile with the optimizer and the lr_scheduler that made "
        "it."
    )


def test_a_loop_goes_on_after_the_schedule_without_a_warning():
    """The wrapper that torch's scheduler puts around optimizer.step stays in order."""
    optimizer = sgd()
    scheduler = lrs.StepLR(optimizer, 5, 0.3)
    schedule = resolve_schedule(scheduler, optimizer)
    schedule.rows(5)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert settings(optimizer) == by_hand("step", sgd)[8]
