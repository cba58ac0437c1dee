"""TerminateOnNaN: an orderly end instead of an error."""

import math

import pytest
import torch

from ipufit.callbacks import LambdaCallback, TerminateOnNaN
from ipufit.errors import NonFiniteLossError
from tests.engines import takes_back
from tests.faulty import Told, assert_same_bits, batches, compiled, fit, state
from tests.told import Gives, refused


def spoilt(index, value=math.nan, count=6):
    """Batches, one of which gives a loss that is not finite."""
    return [
        (x, torch.full_like(y, value) if place == index else y)
        for place, (x, y) in enumerate(batches(count))
    ]


@pytest.mark.long
@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (1e30, "inf")])
@pytest.mark.parametrize("di", [1, 4])
@takes_back
def test_training_ends_in_order_before_the_bad_update(capsys, di, value, shown):
    """With validation, the last hooks, and an epoch in History, as in Keras."""
    told = Told()
    model, twin = compiled(), compiled()
    twin.module.load_state_dict(model.module.state_dict())
    history = fit(
        model,
        spoilt(3, value),
        epochs=5,
        device_iterations=di,
        validation_data=batches(1),
        callbacks=[TerminateOnNaN(), told],
    )
    text = capsys.readouterr().err
    assert text.startswith(
        f"TerminateOnNaN ends training: the loss must be finite, but it became {shown} in update 3."
    )
    assert (
        "The data was not finite: nan in" in text
        or "too large: try a smaller learning rate" in text
    )
    assert model.stop_training is True
    assert history.epoch == [0]
    assert str(history.history["loss"][0]) == shown
    assert math.isfinite(history.history["val_loss"][0])
    assert told.hooks[-2:] == ["on_epoch_end", "on_train_end"]
    fit(twin, batches(3))
    assert_same_bits(state(model), state(twin))


@pytest.mark.long("ipu-standin")
def test_a_finite_training_is_left_alone(capsys):
    """No message, no end."""
    assert fit(compiled(), epochs=3, callbacks=[TerminateOnNaN()]).epoch == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


@pytest.mark.long
def test_another_value_ends_training_with_its_epoch(capsys):
    """A validation loss that is not a number will hardly become one again."""
    model = compiled()
    held_out = spoilt(0, count=1)
    with pytest.warns(UserWarning, match="but that of batch 0 is nan, and so is the mean"):
        history = fit(model, epochs=5, validation_data=held_out, callbacks=[TerminateOnNaN()])
    assert history.epoch == [0]
    assert capsys.readouterr().err == (
        "TerminateOnNaN ends training: val_loss became nan in epoch 1\n"
    )
    callbacks = [Gives(mine=[1.0, math.inf, 1.0]), TerminateOnNaN()]
    assert fit(compiled(), epochs=3, callbacks=callbacks).epoch == [0, 1]
    assert capsys.readouterr().err == ("TerminateOnNaN ends training: mine became inf in epoch 2\n")


@pytest.mark.long("ipu-standin")
def test_a_mean_that_overflows_ends_training(capsys):
    """Every loss may be finite, and their sum not."""
    callback = TerminateOnNaN()
    model = compiled()

    def overflow(batch, logs):
        callback.on_train_batch_end(batch, {"loss": math.inf})

    fit(
        model,
        batches(3),
        epochs=2,
        callbacks=[callback, LambdaCallback(on_train_batch_end=overflow)],
    )
    assert model.history.epoch == [0]
    assert model.history.params["updates"] == 3
    assert capsys.readouterr().err == ("TerminateOnNaN ends training: loss became inf in batch 0\n")


@pytest.mark.long("ipu-standin")
def test_it_may_raise_instead():
    """Keras' raise_error: the error of fit itself, and one for the other values."""
    with pytest.raises(NonFiniteLossError) as caught:
        fit(compiled(), spoilt(2), callbacks=[TerminateOnNaN(raise_error=True)])
    assert caught.value.update == 2
    warned = pytest.warns(UserWarning, match="finite for every batch of the validation data")
    with warned, pytest.raises(NonFiniteLossError) as caught:
        fit(
            compiled(),
            validation_data=spoilt(0, count=1),
            callbacks=[TerminateOnNaN(raise_error=True)],
        )
    assert str(caught.value) == (
        "every value must be finite, but val_loss became nan in epoch 1. Look for a learning rate "
        "that is too high, a log or division of zero, or non-finite data."
    )
    assert (caught.value.update, str(caught.value.value)) == (None, "nan")
    refused(
        lambda: TerminateOnNaN(raise_error=1),
        "raise_error of TerminateOnNaN must be True or False, got 1.",
    )
