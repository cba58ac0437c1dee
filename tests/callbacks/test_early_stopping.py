"""EarlyStopping: when it stops, what it puts back, and what it refuses."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ipufit
from ipufit.callbacks import Callback, EarlyStopping, LambdaCallback
from tests.faulty import Told, assert_same_bits, batches, compiled, fit, flat
from tests.told import Gives, refused

NAN = math.nan


def epochs_of(values, **options):
    """How many epochs are trained, and the callback."""
    stop = EarlyStopping("v", **{"mode": "min", **options})
    history = fit(compiled(), batches(1), epochs=len(values), callbacks=[Gives(v=values), stop])
    return len(history.epoch), stop


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([3, 2, 1, 0], {}, 4),
        ([3, 4, 1, 0], {}, 2),
        ([3, 3, 1, 0], {"patience": 1}, 2),
        ([3, 3, 3, 0], {"patience": 2}, 3),
        ([3, 3, 2, 3, 3, 0], {"patience": 2}, 5),
        ([3, 2.9, 2.8, 2.7, 0], {"min_delta": 0.15, "patience": 2}, 5),
        ([3, 2.9, 2.8, 2.7, 0], {"min_delta": -0.25, "patience": 2}, 3),
        ([1, 2, 1, 0], {"mode": "max"}, 3),
        ([3, 2, 1, 0], {"baseline": 2, "patience": 2}, 4),
        ([3, 2.5, 2.5, 0], {"baseline": 2, "patience": 2}, 3),
        ([3, 4, 5, 2, 3, 0], {"start_from_epoch": 3}, 5),
        ([3, None, None, 4, 0], {"patience": 1}, 4),
        ([NAN, NAN, 1, 0], {"patience": 3}, 4),
        ([1, NAN, NAN, NAN, 0], {"patience": 3}, 4),
    ],
)
def test_it_stops_when_keras_stops(values, options, epochs):
    """One epoch late or early is a different result."""
    assert epochs_of(values, **options)[0] == epochs


@pytest.mark.long
def test_it_tells_what_it_has_seen():
    """For whoever looks afterwards."""
    _, stop = epochs_of([3, 2, 4, 5, 0], patience=2)
    assert (stop.best, stop.best_epoch, stop.stopped_epoch, stop.wait) == (2, 1, 3, 2)
    _, stop = epochs_of([3, 2])
    assert (stop.best, stop.stopped_epoch, stop.wait) == (2, None, 0)


@pytest.mark.long("ipu-standin")
def test_it_begins_anew_with_every_fit():
    """The best of another training is no measure."""
    stop = EarlyStopping("v", mode="min")
    model = compiled()
    gives = Gives(v=[1, 2, 0])
    assert fit(model, batches(1), epochs=3, callbacks=[gives, stop]).epoch == [0, 1]
    gives.values = {"v": [9, 8, 7]}
    assert fit(model, batches(1), epochs=3, callbacks=[gives, stop]).epoch == [0, 1, 2]
    assert stop.best == 7


class Keeps(Callback):
    """The state at the end of every epoch."""

    def __init__(self):
        super().__init__()
        self.states = []

    def on_epoch_end(self, epoch, logs=None):
        self.states.append(flat(self.model.module.state_dict()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("values", "best"), [([3, 1, 2, 2, 2], 1), ([3, 2, 1, 4], 2), ([NAN, NAN], 0)]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_best_weights_are_put_back(values, best, replicas):
    """Also when the last epoch was reached, and running statistics with them."""
    keeps = Keeps()
    stop = EarlyStopping("v", patience=2, mode="min", restore_best_weights=True)
    model = compiled()
    callbacks = [Gives(v=values), keeps, stop]
    fit(model, batches(4), epochs=len(values), callbacks=callbacks, ipus=replicas)
    assert_same_bits(flat(model.module.state_dict()), keeps.states[best])
    assert stop.best_epoch == best


@pytest.mark.long("ipu-standin")
def test_without_the_option_the_last_weights_stay():
    """The default of Keras."""
    keeps = Keeps()
    stop = EarlyStopping("v", mode="min")
    model = compiled()
    fit(model, batches(2), epochs=3, callbacks=[Gives(v=[1, 2, 3]), keeps, stop])
    assert_same_bits(flat(model.module.state_dict()), keeps.states[1])


@pytest.mark.long
def test_the_best_weights_are_put_back_after_an_interrupt():
    """Ctrl-C is how many trainings end."""
    keeps = Keeps()

    def interrupt(told, last):
        if told.hooks.count("on_epoch_begin") == 3:
            raise KeyboardInterrupt

    stop = EarlyStopping("v", patience=9, mode="min", restore_best_weights=True)
    model = compiled()
    callbacks = [Gives(v=[1, 2, 3]), keeps, Told(on_train_batch_end=interrupt), stop]
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches(2), epochs=3, callbacks=callbacks)
    assert_same_bits(flat(model.module.state_dict()), keeps.states[0])


def test_weights_that_the_module_no_longer_has_are_not_put_back():
    """What a callback has pruned in between has another mask."""
    keeps = Keeps()
    stop = EarlyStopping("v", patience=9, mode="min", restore_best_weights=True)
    model = compiled()
    layer = next(part for part in model.module.modules() if isinstance(part, torch.nn.Linear))
    prunes = LambdaCallback(
        on_epoch_end=lambda epoch, logs: prune.random_unstructured(layer, "weight", amount=0.5)
    )
    with pytest.warns(UserWarning, match="EarlyStopping") as caught:
        fit(model, batches(2), epochs=2, callbacks=[Gives(v=[1, 2]), stop, prunes, keeps])
    assert [str(each.message) for each in caught] == [
        "EarlyStopping can't restore the weights of epoch 1: parameters or buffers were replaced, "
        "added or removed after it. The module keeps the weights of the last epoch."
    ]
    assert_same_bits(flat(model.module.state_dict()), keeps.states[1])


@pytest.mark.long("ipu-standin")
def test_it_says_what_it_does(capsys):
    """With verbose=1, beside the bar; silently otherwise."""
    epochs_of([1, 2], verbose=1, restore_best_weights=True)
    assert capsys.readouterr().err.splitlines() == [
        "epoch 2: EarlyStopping ends training because v has not improved",
        "EarlyStopping restores the weights of epoch 1",
    ]
    epochs_of([1, 2], restore_best_weights=True)
    assert capsys.readouterr() == ("", "")


@pytest.mark.long("ipu-standin")
def test_the_direction_comes_from_the_metric():
    """Taking the worst for the best would show nowhere."""
    model = ipufit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", metrics=["accuracy", "perplexity"])
    data = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))]
    for name, direction in (
        ("loss", "min"),
        ("val_loss", "min"),
        ("val_accuracy", "max"),
        ("perplexity", "min"),
    ):
        stop = EarlyStopping(name, patience=5)
        model.fit(data, validation_data=data, callbacks=[stop], verbose=0)
        assert stop._direction == direction
    stop = EarlyStopping("head_loss", patience=5)
    model.fit(data, callbacks=[Gives(head_loss=[1.0]), stop], verbose=0)
    assert stop._direction == "min"
    stop = EarlyStopping("accuracy", mode="min")
    model.fit(data, callbacks=[stop], verbose=0)
    assert stop._direction == "min"


@pytest.mark.long("ipu-standin")
def test_an_unknown_direction_is_an_error_before_training():
    """As in Keras: there is no guess that is never wrong."""
    told = Told()
    model = compiled(metrics={"mine": lambda p, t: (p - t).sum(1)})
    refused(
        lambda: fit(model, callbacks=[EarlyStopping("mine"), told]),
        "EarlyStopping must know whether a small or a large 'mine' is better. Pass mode='min' "
        "or mode='max'.",
    )
    assert told.hooks == []


@pytest.mark.long("ipu-standin")
def test_an_unknown_value_is_an_error_that_lists_what_is_there():
    """Keras warns, and trains to the last epoch."""
    refused(
        lambda: fit(compiled(), epochs=3, callbacks=[EarlyStopping()]),
        "EarlyStopping needs the value 'val_loss' at the end of an epoch, but there is only "
        "loss. Pass validation_data to fit, or use one of these.",
    )
    model = compiled()
    refused(
        lambda: fit(
            model, epochs=3, callbacks=[Gives(other=[1, 1, 1]), EarlyStopping("v", mode="min")]
        ),
        "EarlyStopping needs the value 'v' at the end of an epoch, but there is only loss, "
        "other. Use one of these, or add it to metrics.",
    )
    assert model.history.epoch == [0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"monitor": 3},
            "monitor of EarlyStopping must be the name of a value, such as 'val_loss', got 3.",
        ),
        ({"min_delta": NAN}, "min_delta of EarlyStopping must be a finite number, got nan."),
        ({"min_delta": "1"}, "min_delta of EarlyStopping must be a finite number, got '1'."),
        ({"patience": -1}, "patience of EarlyStopping must be an integer of at least 0, got -1."),
        ({"patience": 1.5}, "patience of EarlyStopping must be an integer of at least 0, got 1.5."),
        ({"verbose": 2}, "verbose of EarlyStopping must be 0 or 1, got 2."),
        (
            {"mode": "best"},
            "mode of EarlyStopping must be one of 'auto', 'min', 'max', got 'best'.",
        ),
        ({"baseline": "x"}, "baseline of EarlyStopping must be a finite number, got 'x'."),
        (
            {"restore_best_weights": 1},
            "restore_best_weights of EarlyStopping must be True or False, got 1.",
        ),
        (
            {"start_from_epoch": None},
            "start_from_epoch of EarlyStopping must be an integer of at least 0, got None.",
        ),
    ],
    ids=repr,
)
def test_a_wrong_argument_is_named(options, text):
    """When it is made, not at the end of an epoch."""
    refused(lambda: EarlyStopping(**options), text)


def test_counts_may_be_numbers_of_numpys():
    """They come out of searches and tables; fit takes them too."""
    stopping = EarlyStopping("loss", patience=np.int64(2), start_from_epoch=np.int32(1))
    assert type(stopping.patience) is type(stopping.start_from_epoch) is int
    assert (stopping.patience, stopping.start_from_epoch) == (2, 1)
