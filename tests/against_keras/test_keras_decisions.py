"""Callbacks that decide by a value: the same decision in the same epoch as Keras, for every option.

The value is a script: a callback puts it into the logs before the one under test. Its numbers are
multiples of 1/8, which float32, in which Keras compares, holds exactly, ties with ``min_delta``
included.
"""

import itertools
import math

import pytest
import torch
from torch import nn

import ipufit
from tests.against_keras.twins import from_keras, keras

pytestmark = from_keras

# Of val_x, one number an epoch; None is an epoch without it. For "max" the signs are turned.
SCRIPTS = {
    "falls, then stays": [4, 3, 2.5, 2.5, 2.5, 2.5, 2.5, 2.5],
    "rises": [1, 2, 3, 4, 5, 6, 7, 8],
    "steps of 1/8": [3, 2.875, 2.75, 2.625, 2.5, 2.375, 2.25, 2.125],
    "to and fro": [2, 3, 1.5, 4, 1.375, 1.5, 1.25, 3],
    "second half better": [4, 5, 4.5, 4.25, 3, 3.5, 2, 2.5],
    "every second epoch": [3, None, 3, None, 2, None, 2.5, None],
}
EPOCHS = 8


@pytest.fixture(scope="module")
def sides():
    """A model of each library that learns nothing, so that its bias can tell the epoch."""
    x, y = torch.zeros(2, 1).numpy(), torch.zeros(2, 1).numpy()
    theirs = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    theirs.compile(keras.optimizers.SGD(0.0), "mse")
    ours = ipufit.Model(nn.Linear(1, 1))
    ours.compile(torch.optim.SGD(ours.module.parameters(), 0.0), "mse")
    return (theirs, keras.callbacks), (ours, ipufit.callbacks), x, y


def set_rate(model, rate):
    if isinstance(model, ipufit.Model):
        model.optimizer.param_groups[0]["lr"] = rate
    else:
        model.optimizer.learning_rate = rate


def bias(model):
    """The epoch whose weights are in the model."""
    if isinstance(model, ipufit.Model):
        return model.module.bias.item()
    return float(model.layers[0].get_weights()[1][0])


def script(library, values):
    """Puts the values into the logs, and the index of the epoch into the weights."""

    class Script(library.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if values[epoch] is not None:
                logs["val_x"] = float(values[epoch])
            if isinstance(self.model, ipufit.Model):
                self.model.module.bias.data.fill_(epoch)
            else:
                kernel, before = self.model.layers[0].get_weights()
                self.model.layers[0].set_weights([kernel, before * 0 + epoch])

    return Script()


def run(sides, name, values, rate=0.0, epochs=EPOCHS, **options):
    """Fit both with such a callback; of each side its model, callback and History."""
    theirs, ours, x, y = sides
    results = []
    for model, library in (theirs, ours):
        callback = getattr(library, name)(monitor="val_x", **options)
        set_rate(model, rate)
        told = [script(library, values), callback]
        history = model.fit(x, y, epochs=epochs, callbacks=told, verbose=0)
        results.append((model, callback, history))
    return results


def turned(values, mode):
    return values if mode == "min" else [None if v is None else -v for v in values]


def some_of(grid, name):
    """Every 19th, others for each script; 19 divides no option's number of values."""
    return grid[3 * list(SCRIPTS).index(name) :: 19]


PATIENCE, DELTA, BASELINE = (0, 1, 2, 3), (0, 0.125, 1), (None, 2.5)
STOPS = list(
    itertools.product(PATIENCE, DELTA, BASELINE, (True, False), (0, 3), ("min", "max")),
)


@pytest.mark.filterwarnings("ignore:Early stopping conditioned on metric:UserWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_early_stopping(sides, name):
    """The epoch in which it stops, what it remembers, and whose weights are left in the end."""
    stops = set()
    for patience, min_delta, baseline, restore, start, mode in some_of(STOPS, name):
        options = {
            "patience": patience,
            "min_delta": min_delta,
            "baseline": baseline if baseline is None or mode == "min" else -baseline,
            "restore_best_weights": restore,
            "start_from_epoch": start,
            "mode": mode,
        }
        theirs, ours = run(sides, "EarlyStopping", turned(SCRIPTS[name], mode), **options)
        assert ours[2].epoch == theirs[2].epoch, options
        assert bias(ours[0]) == bias(theirs[0]), options
        assert ours[1].best == theirs[1].best, options
        assert ours[1].wait == theirs[1].wait, options
        assert (ours[1].best_epoch or 0) == theirs[1].best_epoch, options
        assert (ours[1].stopped_epoch or 0) == theirs[1].stopped_epoch, options
        stops.add(len(ours[2].epoch))
    assert len(stops) > 1


REDUCTIONS = list(
    itertools.product(
        (0.5, 0.25), (0, 1, 2), (0, 1, 3), (0.0, 0.1), (0, 0.125, 0.5), ("min", "max")
    )
)


@pytest.mark.filterwarnings("ignore:Learning rate reduction is conditioned:UserWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_reduce_lr_on_plateau(sides, name):
    """The rate of every epoch, in the history, and the one that is left."""
    rates = set()
    for factor, patience, cooldown, min_lr, min_delta, mode in some_of(REDUCTIONS, name):
        options = {
            "factor": factor,
            "patience": patience,
            "cooldown": cooldown,
            "min_lr": min_lr,
            "min_delta": min_delta,
            "mode": mode,
        }
        values = turned(SCRIPTS[name], mode)
        theirs, ours = run(sides, "ReduceLROnPlateau", values, rate=0.5, **options)
        expected = theirs[2].history["learning_rate"]
        # Keras holds the rate in float32.
        assert ours[2].history["learning_rate"] == pytest.approx(expected, rel=1e-6), options
        left = float(theirs[0].optimizer.learning_rate)
        assert ours[0].optimizer.param_groups[0]["lr"] == pytest.approx(left, rel=1e-6), options
        rates.add(left)
    assert len(rates) > 1


def test_early_stopping_and_reduce_lr_on_plateau_can_be_used_again(sides):
    """A second fit with the same object begins anew."""
    theirs, ours, x, y = sides
    seen = []
    for model, library in (theirs, ours):
        stop = library.EarlyStopping(monitor="val_x", patience=2, mode="min")
        reduce = library.ReduceLROnPlateau(monitor="val_x", patience=1, mode="min", factor=0.5)
        for name in ("to and fro", "rises"):
            set_rate(model, 1.0)
            told = [script(library, SCRIPTS[name]), reduce, stop]
            history = model.fit(x, y, epochs=EPOCHS, callbacks=told, verbose=0)
            seen.append((len(history.epoch), history.history["learning_rate"]))
    assert seen[2:] == seen[:2]


@pytest.mark.parametrize("schedule", [lambda epoch, rate: rate * 0.5, lambda epoch: 0.5**epoch])
def test_learning_rate_scheduler(sides, schedule):
    theirs, ours, x, y = sides
    rates = []
    for model, library in (theirs, ours):
        set_rate(model, 1.0)
        told = [library.LearningRateScheduler(schedule)]
        history = model.fit(x, y, epochs=4, callbacks=told, verbose=0)
        rates.append(history.history["learning_rate"])
    assert rates[1] == rates[0]


# ---- where ipufit differs on purpose ------------------------------------------------------------


def test_nan_is_never_the_best(sides):
    """In Keras a first NaN is, after which nothing is ever better and the weights of it are kept.

    In ipufit the first number is an improvement over it.
    """
    values = [math.nan, 3, 2, 1, math.nan, math.nan, 4, 5]
    options = {"patience": 3, "mode": "min", "restore_best_weights": True}
    theirs, ours = run(sides, "EarlyStopping", values, **options)
    assert theirs[2].epoch == [0, 1, 2, 3]
    assert (bias(theirs[0]), theirs[1].best_epoch) == (0, 0)
    assert ours[2].epoch == list(range(7))
    assert (bias(ours[0]), ours[1].best_epoch) == (3, 3)


def test_a_later_nan_is_no_improvement_in_either(sides):
    values = [3, math.nan, 2, math.nan, math.nan, math.nan, 1, 1]
    for patience in (1, 2, 3, 4):
        theirs, ours = run(sides, "EarlyStopping", values, patience=patience, mode="min")
        assert ours[2].epoch == theirs[2].epoch


@pytest.mark.parametrize("name", ["EarlyStopping", "ReduceLROnPlateau"])
def test_a_value_that_nobody_gives_is_an_error(sides, name):
    """Keras warns every epoch and never stops, which is found out when the time is spent."""
    theirs, ours, x, y = sides
    callback = getattr(keras.callbacks, name)(monitor="val_losss", mode="min")
    with pytest.warns(UserWarning, match="which is not available"):
        assert len(theirs[0].fit(x, y, epochs=2, callbacks=[callback], verbose=0).epoch) == 2
    callback = getattr(ipufit.callbacks, name)(monitor="val_losss", mode="min")
    with pytest.raises(ipufit.errors.ConfigurationError, match="needs the value 'val_losss'"):
        ours[0].fit(x, y, epochs=2, callbacks=[callback], verbose=0)


def test_a_direction_that_nobody_knows_is_an_error_in_both(sides):
    """In Keras at the end of the first epoch, in ipufit before it."""
    theirs, ours, x, y = sides
    for model, library, error in ((*theirs, ValueError), (*ours, ipufit.errors.ConfigurationError)):
        told = [script(library, SCRIPTS["rises"]), library.EarlyStopping(monitor="val_x")]
        with pytest.raises(error):
            model.fit(x, y, epochs=2, callbacks=told, verbose=0)
    assert ours[0].history.epoch == []
