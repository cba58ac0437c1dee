"""What self.log reports is what Lightning's own Trainer has in callback_metrics."""

import math

import pytest
import torch
from torch.nn import functional as F

import ipufit
from ipufit.errors import ConfigurationError
from tests.lightning.twins import (
    Classifier,
    by_lightning,
    ipufit_of,
    loader,
    rows,
    twins,
)

X, Y = rows(20, 6)
BATCHES = loader(X, Y, batch_size=3)  # the last one has two samples


@pytest.fixture(autouse=True)
def _default_dtype():
    """Lightning keeps what is logged in torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Logs(Classifier):
    """Logs one value in the way that is tested."""

    def __init__(self, **how):
        super().__init__()
        self.how = how

    def step(self, batch, name, **_):
        inputs, target = batch
        loss = F.cross_entropy(self(inputs), target)
        self.log("value", loss.detach() * 2, **self.how)
        return loss


WAYS = [
    {"on_step": on_step, "on_epoch": on_epoch, "reduce_fx": reduce_fx}
    for on_step, on_epoch in ((None, None), (True, False), (False, True), (True, True))
    for reduce_fx in ("mean", "sum", "max", torch.min)
]


@pytest.mark.grid
@pytest.mark.parametrize("device_iterations", [1, 3])
@pytest.mark.parametrize("how", WAYS, ids=[str(i) for i in range(len(WAYS))])
def test_a_logged_value_is_that_of_callback_metrics(how, device_iterations):
    """For every level and reduction, with a smaller last batch; names with _step and _epoch too."""
    one, two = twins(Logs(**how))
    trainer, _ = by_lightning(one, "fit", BATCHES, max_epochs=2)
    history = ipufit_of(two).fit(BATCHES, epochs=2, device_iterations=device_iterations, verbose=0)
    logged = {name: values[-1] for name, values in history.history.items() if "value" in name}
    expected = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert logged == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("call", ["validate", "test"])
def test_an_evaluation_returns_what_its_step_logs(call):
    """Under the very names, without the loss that the step does not return."""
    one, two = twins(Classifier())
    _, (expected,) = by_lightning(one, call, BATCHES)
    model = ipufit_of(two)
    values = (model.evaluate if call == "validate" else model.test)(BATCHES, verbose=0)
    assert values == pytest.approx(expected, rel=1e-12)


def test_a_loss_that_validation_step_returns_is_reported():
    """As val_loss in the history, as loss of evaluate."""

    class Returns(Classifier):
        def validation_step(self, batch, batch_idx):
            return F.cross_entropy(self(batch[0]), batch[1])

    model = ipufit_of(Returns())
    history = model.fit(BATCHES, validation_data=BATCHES, verbose=0)
    expected = F.cross_entropy(model.lightning(X), Y).item()
    assert history.history["val_loss"] == pytest.approx([expected], rel=1e-12)
    assert model.evaluate(BATCHES, verbose=0) == pytest.approx({"loss": expected}, rel=1e-12)


def test_a_name_of_both_steps_is_kept_apart():
    """Lightning writes one over the other."""

    class Same(Classifier):
        def validation_step(self, batch, batch_idx):
            return self.step(batch, "train")

    model = ipufit_of(Same())
    history = model.fit(BATCHES, validation_data=BATCHES, verbose=0).history
    assert history["val_train_loss"] == pytest.approx(
        [F.cross_entropy(model.lightning(X), Y).item()], rel=1e-12
    )
    assert history["val_train_loss"] < history["train_loss"]


def test_what_is_logged_as_loss_is_a_mean_over_the_epoch():
    """Its values of every update are kept beside."""

    class Loss(Classifier):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss, prog_bar=True)
            return loss

    model = ipufit_of(Loss())
    history = model.fit(loader(X, Y, batch_size=5), verbose=0)
    by_update = [value for _, value in history.updates["loss"]]
    assert len(by_update) == 4
    assert history.history["loss"] == pytest.approx([math.fsum(by_update) / 4], rel=1e-12)


def test_callbacks_watch_the_names_of_the_module():
    """Before training a wrong one is refused, with those that there are."""
    model = ipufit_of(Classifier())
    stop = ipufit.callbacks.EarlyStopping("val_accuracy", patience=0, mode="max")
    history = model.fit(BATCHES, validation_data=BATCHES, epochs=9, callbacks=stop, verbose=0)
    assert len(history.epoch) < 9
    wrong = ipufit.callbacks.EarlyStopping("valid_acc", mode="max")
    with pytest.raises(ConfigurationError, match=r"'valid_acc'.*val_accuracy"):
        model.fit(BATCHES, validation_data=BATCHES, callbacks=wrong, verbose=0)


def log_in_training(*args, **options):
    """A module that logs these."""

    class Net(Classifier):
        def training_step(self, batch, batch_idx):
            self.log(*args, **options)
            return F.cross_entropy(self(batch[0]), batch[1])

    return ipufit_of(Net())


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (
            ("a", torch.ones(2)),
            {},
            "log('a') takes one real number, a tensor of one element, got a tensor of shape (2,), "
            "dtype torch.float32. Reduce it, for example with .mean().",
        ),
        (
            ("a", 1.0),
            {"batch_size": 7},
            "self.log('a') weights a value with the number of samples in its micro-batch, 3, got "
            "batch_size=7. Leave batch_size out; for another mean, log a sum and a count with "
            "reduce_fx='sum'.",
        ),
        (
            ("a", 1.0),
            {"reduce_fx": len},
            "self.log('a') can reduce with 'mean', 'sum', 'max' or 'min', got reduce_fx=<built-in "
            "function len>. Use one of these.",
        ),
        (
            ("a", 1.0),
            {"enable_graph": True},
            "self.log('a') can't honour enable_graph: no gradient flows through a logged value. "
            "Leave it out.",
        ),
        (
            ("a", 1.0),
            {"rank_zero_only": True},
            "self.log('a') can't honour rank_zero_only: values are those of all processes. Leave "
            "it out.",
        ),
        (
            ("a", 1.0),
            {"sync_dist_group": 1},
            "self.log('a') can't honour sync_dist_group: values are those of all processes. Leave "
            "it out.",
        ),
        (
            ("a", 1.0),
            {"metric_attribute": "m"},
            "self.log('a') can't honour metric_attribute: the value is not a metric object. Leave "
            "it out.",
        ),
        (
            ("a", 1.0),
            {"on_step": False, "on_epoch": False},
            "self.log('a', on_step=False, on_epoch=False) would log nothing. Leave one of them "
            "out.",
        ),
        (
            ("epoch", 1.0),
            {},
            "the name of a logged value must be free, and ipufit itself logs batch, epoch, event, "
            "learning_rate, loss, loss_scale, samples, skipped_updates, update, updates and "
            "val_..., got 'epoch'. Choose another name; rename a metric with "
            "metrics={'name': metric}.",
        ),
    ],
)
def test_what_log_can_not_honour_is_refused(arguments, options, text):
    """By name, when the step is recorded, before any training."""
    with pytest.raises(ConfigurationError) as caught:
        log_in_training(*arguments, **options).fit(BATCHES, verbose=0)
    assert str(caught.value) == text


def test_the_size_of_the_batch_may_be_said():
    """The usual batch_size=len(inputs) is what a mean is weighed with anyway."""

    class Sized(Classifier):
        def step(self, batch, name, **options):
            return super().step(batch, name, batch_size=len(batch[0]), sync_dist=True, **options)

    history = ipufit_of(Sized()).fit(BATCHES, verbose=0).history
    assert history["train_loss"] == pytest.approx(history["loss"], rel=1e-12)


class EpochEnds(Classifier):
    def on_validation_epoch_end(self):
        self.log("val_epochs", float(self.current_epoch))

    def on_train_epoch_end(self):
        self.log_dict({"steps": float(self.global_step)})


def test_values_of_epoch_ends_stand_beside_the_others():
    """With the epoch and the number of updates, which are true there."""
    one, two = twins(EpochEnds())
    trainer, _ = by_lightning(one, "fit", BATCHES, BATCHES, max_epochs=2)
    history = ipufit_of(two).fit(BATCHES, validation_data=BATCHES, epochs=2, verbose=0).history
    assert history["val_epochs"] == [0.0, 1.0]
    assert history["steps"] == [7.0, 14.0]
    for name, value in trainer.callback_metrics.items():
        assert history[name][-1] == pytest.approx(value.item(), rel=1e-12)


def test_predict_step_can_log_nothing():
    """As in Lightning."""

    class Net(Classifier):
        def predict_step(self, batch, batch_idx):
            self.log("a", 1.0)
            return self(batch[0])

    with pytest.raises(ConfigurationError) as caught:
        ipufit_of(Net()).predict(BATCHES, verbose=0)
    assert str(caught.value) == (
        "self.log('a') can't be called in predict_step, where there is no epoch for the value to "
        "belong to. Log in training_step, validation_step, test_step or an on_..._epoch_end."
    )


def test_a_value_in_a_text_is_told_where_it_is_made(capsys):
    """The module then runs itself, and what it prints has values."""

    class Net(Classifier):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            print(f"{loss:.3f}")
            return loss

    with pytest.warns(UserWarning, match=r"formatted as a string.*test_logged\.py"):
        ipufit_of(Net()).fit(BATCHES, verbose=0)
    assert float(capsys.readouterr().out.split()[-1]) > 0


def test_the_end_of_an_epoch_is_no_step():
    """Lightning refuses it too."""

    class Net(Classifier):
        def on_train_epoch_end(self):
            self.log("a", 1.0, on_step=True)

    with pytest.raises(ConfigurationError) as caught:
        ipufit_of(Net()).fit(BATCHES, validation_split=0.0, verbose=0)
    assert str(caught.value) == (
        "self.log('a', on_step=True) can't be called at the end of an epoch, which is not a step. "
        "Leave on_step out."
    )
