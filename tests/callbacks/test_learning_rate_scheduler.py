"""LearningRateScheduler: when the schedule is asked, with what, and what it may answer."""

import functools
import math

import numpy as np
import pytest
import torch

from ipufit.callbacks import LearningRateScheduler
from tests.faulty import Net, Told, batches, compiled, fit
from tests.told import refused


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


@pytest.mark.long("ipu-standin")
def test_the_schedule_sets_the_rate_of_the_epoch():
    """It is asked before the epoch, with the rate that it has made itself."""
    asked = []

    def schedule(epoch, rate):
        asked.append((epoch, rate))
        return rate / 2

    model = compiled(optimizer=sgd)
    callbacks = [LearningRateScheduler(schedule)]
    history = fit(model, batches(2), epochs=range(2, 5), callbacks=callbacks)
    assert asked == [(2, 0.5), (3, 0.25), (4, 0.125)]
    assert history.history["learning_rate"] == [0.25, 0.125, 0.0625]
    assert model.optimizer.param_groups[0]["lr"] == 0.0625


@pytest.mark.long
@pytest.mark.parametrize("di", [1, 3])
def test_training_is_that_with_rates_set_by_hand(di):
    """A rate that is only logged would be worse than none."""
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())

    def by_hand(told, epoch):
        told.model.optimizer.param_groups[0]["lr"] = 0.3 / (epoch + 1)

    scheduler = LearningRateScheduler(lambda epoch: 0.3 / (epoch + 1))
    options = {"epochs": 3, "device_iterations": di}
    fit(compiled(net), batches(4), callbacks=[scheduler], **options)
    fit(compiled(other), batches(4), callbacks=[Told(on_epoch_begin=by_hand)], **options)
    for p, q in zip(net.parameters(), other.parameters()):
        assert torch.equal(p, q)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(
    "schedule",
    [
        lambda epoch: 1.0,
        lambda epoch, rate: 1,
        lambda epoch, rate: np.float32(1),
        lambda epoch, rate: torch.tensor(1.0),
        functools.partial(lambda scale, epoch, rate: scale, 1.0),
    ],
)
def test_what_a_schedule_may_be_and_return(schedule):
    """Any number, from a function of one or two arguments."""
    model = compiled(optimizer=sgd)
    fit(model, batches(1), callbacks=[LearningRateScheduler(schedule)])
    assert model.optimizer.param_groups[0]["lr"] == 1.0
    assert type(model.optimizer.param_groups[0]["lr"]) is float


@pytest.mark.long("ipu-standin")
def test_every_group_is_asked_with_its_own_rate(capsys):
    """A factor keeps their ratio, a fixed rate is that of all."""
    net = Net()
    groups = [
        {"params": list(net.body.parameters()), "lr": 1.0},
        {"params": list(net.head.parameters()), "lr": 0.1},
    ]
    model = compiled(net, optimizer=torch.optim.SGD(groups, lr=1.0))
    scheduler = LearningRateScheduler(lambda epoch, rate: rate / 2, verbose=1)
    history = fit(model, batches(1), callbacks=[scheduler]).history
    assert history["learning_rate"] == [0.5]
    assert history["learning_rate_1"] == [0.05]
    assert capsys.readouterr().err == (
        "epoch 1: LearningRateScheduler sets the learning rate to 0.5, 0.05\n"
    )


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, None, "0.1", True])
def test_what_is_no_rate_is_refused(value):
    """The rate stays what it was, and no update is made with another."""
    model = compiled(optimizer=sgd)
    refused(
        lambda: fit(model, callbacks=[LearningRateScheduler(lambda epoch, rate: value)]),
        "the schedule of LearningRateScheduler must return a finite number of at least 0, got "
        f"{value!r} for epoch 1 and the rate 0.5. Correct the function.",
    )
    assert model.optimizer.param_groups[0]["lr"] == 0.5
    assert model.history.epoch == []


@pytest.mark.long("ipu-standin")
def test_an_error_inside_the_schedule_is_its_own():
    """Keras takes a TypeError for a sign that the function has one argument, and calls it again."""

    def schedule(epoch, rate):
        raise TypeError("inside")

    with pytest.raises(TypeError, match="inside"):
        fit(compiled(), callbacks=[LearningRateScheduler(schedule)])


@pytest.mark.parametrize("schedule", [0.1, lambda: 0.1, lambda a, b, c: 0.1, float])
def test_what_is_no_schedule_is_refused(schedule):
    """When it is made."""
    refused(
        lambda: LearningRateScheduler(schedule),
        "schedule of LearningRateScheduler must be a function of (epoch, rate) or of (epoch), got "
        f"{schedule!r}. Write one, such as lambda epoch, rate: 0.9 * rate.",
    )
    refused(
        lambda: LearningRateScheduler(lambda epoch: 0.1, verbose=2),
        "verbose of LearningRateScheduler must be 0 or 1, got 2.",
    )
