"""Faults that show in a run: complex numbers, schedules, monitors, callbacks; the state is kept."""

import math
import traceback

import pytest
import torch

import ipufit
from ipufit.callbacks import EarlyStopping, ModelCheckpoint, ReduceLROnPlateau
from ipufit.errors import ConfigurationError, LossError
from tests.faulty import (
    Told,
    assert_clean,
    assert_same_bits,
    batches,
    compiled,
    fit,
    refused,
    state,
)

REAL = (
    "Pass real and imaginary parts with torch.view_as_real, or pass a callable loss(prediction, "
    "target) that returns a real number."
)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("loss", ["mse", "huber"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_complex_targets_are_refused_in_full_words(loss, prefetch):
    """Before the first update, whoever prepares the batches."""
    x, y = batches(1, 8)[0]
    model = compiled(loss=loss)
    text = f"loss {loss!r} needs real numbers, got a target of dtype complex64. {REAL}"
    with refused(model, LossError, text):
        fit(
            model,
            x,
            y=y.to(torch.complex64),
            batch_size=4,
            loading=ipufit.Loading(prefetch=prefetch),
        )


BAD_SCHEDULES = {
    "nan": (lambda update: 0.1 if update < 4 else math.nan, 4),
    "negative": (lambda update: 0.125 - 0.0625 * update, 3),
    "infinite": (lambda update: 0.1 if update < 5 else math.inf, 5),
}


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("name", BAD_SCHEDULES)
def test_a_schedule_that_goes_bad_is_refused_before_any_work(name):
    """Every update to come is tried, so that no hour of training is lost to the last one."""
    schedule, update = BAD_SCHEDULES[name]
    model = compiled(lr_scheduler=schedule)
    fit(model, batches(1))
    before, told = state(model), Told()
    with pytest.raises(ConfigurationError) as caught:
        fit(model, batches(3), epochs=3, callbacks=[told])
    assert str(caught.value) == (
        "lr_scheduler must make lr a finite number of at least 0, but the schedule of lr gives "
        f"{schedule(update)!r} for update {update}, counted from 0, in parameter group 0. Correct "
        "the schedule; nothing of that execution has run."
    )
    assert told.hooks == []
    assert model._session.updates == 1
    assert_same_bits(state(model), before)
    assert_clean(model)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(
    "make",
    [
        lambda monitor: EarlyStopping(monitor, mode="min"),
        lambda monitor: ReduceLROnPlateau(monitor, mode="min"),
        lambda monitor: ModelCheckpoint(
            "x.safetensors", monitor=monitor, mode="min", save_best_only=True
        ),
    ],
)
def test_an_unknown_monitor_lists_what_is_there_before_any_work(make, tmp_path, monkeypatch):
    """A misspelt name would watch nothing for the whole of a training."""
    monkeypatch.chdir(tmp_path)
    callback = make("val_lss")
    model = compiled()
    name = type(callback).__name__
    told = Told()
    with refused(
        model,
        ConfigurationError,
        f"{name} needs the value 'val_lss' at the end of an epoch, but there is only loss, "
        "val_loss. Use one of these, or add it to metrics.",
    ):
        fit(model, validation_data=batches(1), callbacks=[callback, told])
    assert "on_epoch_begin" not in told.hooks


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("device_iterations", [1, 2])
def test_a_callback_that_raises_keeps_the_updates_done(device_iterations):
    """Its own traceback says where; the weights are those of the executions that have run."""

    def fail(told, batch):
        if batch >= 3:
            raise LookupError("mine")

    given = batches(8)
    model = compiled()
    twin = compiled()
    twin.module.load_state_dict(model.module.state_dict())
    with pytest.raises(LookupError, match="mine") as caught:
        fit(
            model,
            given,
            device_iterations=device_iterations,
            callbacks=[Told(on_train_batch_end=fail)],
        )
    assert type(caught.value) is LookupError
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"
    assert model._session.updates == 4
    fit(twin, given[:4])
    assert_same_bits(state(model), state(twin))
    assert_clean(model)
    fit(model, given[4:])
    assert model._session.updates == 8
