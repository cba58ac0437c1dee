"""Weights after training are those of Lightning's own Trainer, in float64 to rounding."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import ipufit
from ipufit.poptorch._precision import keep_float64
from tests.lightning.nets import Boring, Language, Pictures, Tokens
from tests.lightning.twins import (
    Classifier,
    by_lightning,
    in_one_and_two_processes,
    ipufit_of,
    largest_difference,
    loader,
    pl,
    rows,
    twins,
)

TOLERANCE = 1e-10  # float64, other orders of summation


ENGINES = ["embedded", "ipu-standin"]


@pytest.fixture(autouse=True)
def _wide():
    """The stand-in computes in float64, so that nothing hides behind rounding."""
    with keep_float64():
        yield


@pytest.mark.parametrize("engine", ENGINES)
def test_a_boring_model_ends_with_the_weights_of_lightning(engine):
    """Its own loaders, a schedule per epoch."""
    one, two = twins(Boring())
    by_lightning(one, "fit", max_epochs=2)
    ipufit_of(two, engine).fit(epochs=2, device_iterations=3, verbose=0)
    assert largest_difference(one, two) < TOLERANCE


@pytest.mark.parametrize("device_iterations", [1, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_net_with_batch_norm_and_a_schedule_per_step_does(engine, device_iterations):
    """Clipping of the whole norm, a smaller last batch, a number of steps that only fit knows."""
    one, two = twins(Pictures())
    x, y = rows(30, 16)
    data = loader(x, y, batch_size=4), loader(x[:10], y[:10], batch_size=4)
    trainer, _ = by_lightning(one, "fit", *data, max_epochs=2, gradient_clip_val=0.5)
    model = ipufit_of(two, engine)
    model.compile(clip=ipufit.Clip(global_norm=0.5))
    history = model.fit(
        data[0],
        validation_data=data[1],
        epochs=2,
        device_iterations=device_iterations,
        verbose=0,
    )
    assert largest_difference(one, two) < TOLERANCE
    for name, value in trainer.callback_metrics.items():
        # Lightning keeps values in torch's default dtype, float32.
        assert history.history[name][-1] == pytest.approx(value.item(), rel=1e-6)


@pytest.mark.parametrize("ipus", [1, 2])
def test_a_transformer_with_gradient_accumulation_does(ipus):
    """Two micro-batches an update, accumulated or on two replicas; clipped values; a warm-up."""
    one, two = twins(Language())
    data = torch.utils.data.DataLoader(Tokens(24), batch_size=3)
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    by_lightning(one, "fit", data, max_epochs=2, accumulate_grad_batches=2, **clip)
    model = ipufit_of(two)
    model.compile(clip=ipufit.Clip(value=0.05))
    model.fit(data, epochs=2, ipus=ipus, gradient_accumulation=2 // ipus, verbose=0)
    assert largest_difference(one, two) < TOLERANCE


def test_the_last_update_of_an_epoch_is_a_mean_over_what_it_has():
    """Lightning divides it by accumulate_grad_batches all the same; ipufit as a loop would."""
    one, two = twins(Classifier())
    x, y = rows(20, 6)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    for part in (slice(0, 8), slice(8, 16), slice(16, 20)):
        optimizer.zero_grad()
        F.cross_entropy(one(x[part]), y[part]).backward()
        optimizer.step()
    ipufit_of(two).fit(loader(x, y, batch_size=4), gradient_accumulation=2, verbose=0)
    assert largest_difference(one, two) < TOLERANCE


def plateau(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_accuracy"}


def forms(parameters, form):
    """The same optimizer and, where the form has one, the same schedule."""
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    step = lr_scheduler.StepLR(optimizer, 1, 0.5)
    return {
        "optimizer": optimizer,
        "list": [optimizer],
        "two lists": ([optimizer], [step]),
        "list and scheduler": ([optimizer], step),
        "lists with a dict": ([optimizer], [{"scheduler": step, "interval": "epoch"}]),
        "dict": {"optimizer": optimizer},
        "dict with scheduler": {"optimizer": optimizer, "lr_scheduler": step},
        "dict with dict": {"optimizer": optimizer, "lr_scheduler": {"scheduler": step}},
        "tuple of dicts": ({"optimizer": optimizer, "lr_scheduler": step},),
        "every second epoch": {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": step, "frequency": 2, "name": "rate"},
        },
        "every step": [[optimizer], [{"scheduler": step, "interval": "step", "frequency": 1}]],
    }[form]


FORMS = [
    *("optimizer", "list", "two lists", "list and scheduler", "lists with a dict", "dict"),
    *("dict with scheduler", "dict with dict", "tuple of dicts", "every second epoch"),
    *("every step", "plateau"),
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_configure_optimizers_is_honoured(form):
    """Optimizer and schedule are those that Lightning makes of it."""
    configure = plateau if form == "plateau" else functools.partial(forms, form=form)
    one, two = twins(Classifier(configure))
    x, y = rows(24, 6)
    data = loader(x, y, batch_size=8), loader(x[:9], y[:9], batch_size=3)
    by_lightning(one, "fit", *data, max_epochs=5)
    model = ipufit_of(two)
    model.fit(data[0], validation_data=data[1], epochs=5, device_iterations=2, verbose=0)
    assert largest_difference(one, two) < TOLERANCE


def every_batches(parameters, frequency):
    """A schedule that counts batches."""
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.9)
    step = lr_scheduler.ExponentialLR(optimizer, 0.7)
    config = {"scheduler": step, "interval": "step", "frequency": frequency}
    return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.grid
@pytest.mark.parametrize("device_iterations", [1, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("accumulation", "frequency"), [(1, 3), (2, 3), (2, 4), (3, 2), (4, 12)])
def test_a_schedule_of_every_so_many_batches_counts_as_lightning(
    engine, accumulation, frequency, device_iterations
):
    """Of the epoch, and looks at updates: of the 12 batches 3, 6, 9, or with 2 an update 6, 12."""
    one, two = twins(Classifier(functools.partial(every_batches, frequency=frequency)))
    data = loader(*rows(36, 6), batch_size=3)
    by_lightning(one, "fit", data, max_epochs=3, accumulate_grad_batches=accumulation)
    ipufit_of(two, engine).fit(
        data,
        epochs=3,
        gradient_accumulation=accumulation,
        device_iterations=device_iterations,
        verbose=0,
    )
    assert largest_difference(one, two) < TOLERANCE


@pytest.mark.parametrize(("batches", "frequency"), [(7, 3), (7, 7), (5, 5)])
def test_every_epoch_counts_its_batches_anew(batches, frequency):
    """Those that are left over at its end count no more; its last update may have fewer."""
    one, two = twins(Classifier(functools.partial(every_batches, frequency=frequency)))
    data = loader(*rows(2 * batches, 6), batch_size=2)
    rates = []

    class Rates(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    by_lightning(one, "fit", data, max_epochs=3, accumulate_grad_batches=2, callbacks=[Rates()])
    model = ipufit_of(two)
    found = []
    model.fit(
        data,
        epochs=3,
        gradient_accumulation=2,
        device_iterations=2,
        callbacks=ipufit.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: found.append(model.optimizer.param_groups[0]["lr"])
        ),
        verbose=0,
    )
    assert found == pytest.approx(rates, rel=1e-12)


class Interrupts(ipufit.callbacks.Callback):
    """Ends a run after so many updates."""

    def __init__(self, updates):
        super().__init__()
        self.left = updates

    def on_train_batch_end(self, index, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("updates", [2, 3, 5])
def test_a_schedule_of_every_so_many_batches_goes_on_in_the_middle(updates, tmp_path):
    """Of an epoch of three updates, with the same bits."""
    data = loader(*rows(24, 6), batch_size=4)

    def fitted(interrupted=0, **options):
        model = ipufit_of(Classifier(functools.partial(every_batches, frequency=4)))
        model.fit(
            data,
            epochs=2,
            gradient_accumulation=2,
            callbacks=Interrupts(interrupted),
            seed=0,
            verbose=0,
            **options,
        )
        return model.lightning

    keep = {"checkpoint": ipufit.Checkpoint(tmp_path, every_updates=1)}
    with pytest.raises(KeyboardInterrupt):
        fitted(updates, **keep)
    keep["checkpoint"] = dataclasses.replace(keep["checkpoint"], resume="auto")
    assert largest_difference(fitted(), fitted(**keep)) == 0


def every_second(parameters):
    """A plateau that is looked at every second epoch."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
    config = {"scheduler": scheduler, "monitor": "val_accuracy", "frequency": 2}
    return {"optimizer": optimizer, "lr_scheduler": config}


@pytest.mark.parametrize("every", [1, 2])
def test_a_plateau_of_every_second_epoch_is_that_of_lightning(every):
    """The value to watch need not be there in the others."""
    one, two = twins(Classifier(every_second))
    x, y = rows(24, 6)
    data = loader(x, y, batch_size=8), loader(x[:9], y[:9], batch_size=3)
    by_lightning(one, "fit", *data, max_epochs=8, check_val_every_n_epoch=every)
    model = ipufit_of(two)
    model.fit(data[0], validation_data=ipufit.Validation(data[1], freq=every), epochs=8, verbose=0)
    assert largest_difference(one, two) < TOLERANCE


def test_a_batch_arrives_as_the_loader_gives_it():
    """A list of one tensor is no tensor: batch[0] would else be the first sample."""

    class Autoencoder(Classifier):
        def training_step(self, batch, batch_idx):
            assert type(batch) is list
            assert len(batch) == 1
            return self(batch[0]).square().mean()

    one, two = twins(Autoencoder())
    data = loader(rows(12, 6)[0], batch_size=4)
    by_lightning(one, "fit", data, max_epochs=1)
    ipufit_of(two).fit(data, verbose=0)
    assert largest_difference(one, two) < TOLERANCE


def test_on_after_batch_transfer_is_part_of_the_program():
    """What it does on the device is done to every batch."""

    class Scaled(Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * 2, batch[1]

    one, two = twins(Scaled())
    data = loader(*rows(12, 6), batch_size=4)
    by_lightning(one, "fit", data, max_epochs=1)
    ipufit_of(two).fit(data, verbose=0)
    assert largest_difference(one, two) < TOLERANCE


def test_a_module_of_the_other_package_trains_too():
    """pytorch_lightning is the same library under its older name."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        older = pytest.importorskip("pytorch_lightning")

    class Net(older.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3).double()

        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self.layer(batch[0]), batch[1])
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    history = ipufit_of(Net()).fit(loader(*rows(12, 6), batch_size=4), verbose=0)
    assert history.history["train_loss"] == history.history["loss"]


@pytest.mark.long
def test_two_processes_have_the_numbers_of_two_replicas():
    """Weights, and what the steps log."""
    results = in_one_and_two_processes("in_processes.py")
    (history, weights), (other_history, other_weights) = results
    for name, values in history.items():
        assert other_history[name] == pytest.approx(values, rel=1e-12)
    for mine, other in zip(weights, other_weights):
        assert other == pytest.approx(mine, rel=1e-10)
