"""SwapEMAWeights: the average where it is evaluated, the trained weights everywhere else."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit.callbacks import ModelCheckpoint, SwapEMAWeights
from tests.faulty import Told
from tests.told import refused


class Averaged(ipufit.Model):
    """Stands in for a model with an average: it is 100 everywhere."""

    def swap_ema_weights(self):
        self.swaps = getattr(self, "swaps", 0) + 1
        with torch.no_grad():
            for p in self.module.parameters():
                kept = getattr(p, "other", torch.full_like(p, 100.0))
                p.other = p.detach().clone()
                p.copy_(kept)

    @property
    def averaged(self):
        return all(bool((p == 100).all()) for p in self.module.parameters())


def averaged_model():
    model = Averaged(nn.Linear(2, 1))
    model.compile(lambda p: torch.optim.SGD(p, lr=0.01), "mse")
    return model


DATA = [(torch.ones(2, 2), torch.ones(2, 1))] * 3
HOOKS = [
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_batch_end",
    "on_test_end",
    "on_epoch_end",
    "on_train_end",
]


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(
    ("option", "where"),
    [
        (False, {"on_test_begin", "on_test_batch_end"}),
        (True, {"on_test_begin", "on_test_batch_end", "on_epoch_end"}),
    ],
)
def test_where_the_average_is_in_the_model(option, where):
    """Training itself never sees it."""
    seen = {}

    def look(hook):
        return lambda told, _: seen.setdefault(hook, set()).add(told.model.averaged)

    model = averaged_model()
    told = Told(**{hook: look(hook) for hook in HOOKS})
    callbacks = [SwapEMAWeights(option), told]
    model.fit(DATA, epochs=3, validation_data=DATA, callbacks=callbacks, verbose=0)
    assert seen == {hook: {hook in where} for hook in HOOKS}
    assert not model.averaged


@pytest.mark.long("ipu-standin")
def test_checkpoints_after_it_hold_the_average(tmp_path):
    """That is what swap_on_epoch is for."""
    model = averaged_model()
    save = ModelCheckpoint(tmp_path / "w.safetensors")
    model.fit(DATA, callbacks=[SwapEMAWeights(swap_on_epoch=True), save], verbose=0)
    other = averaged_model()
    other.load_weights(tmp_path / "w.safetensors")
    assert other.averaged
    assert not model.averaged


@pytest.mark.long("ipu-standin")
def test_it_serves_evaluate_and_predict():
    """Keras leaves the average in the model after predict."""
    model = averaged_model()
    outputs = model.predict(DATA, callbacks=[SwapEMAWeights()], verbose=0)
    assert outputs.flatten().tolist() == [300.0] * 6
    assert not model.averaged
    assert model.evaluate(DATA, callbacks=[SwapEMAWeights()], verbose=0)["loss"] == 299.0**2
    assert not model.averaged
    assert model.swaps == 4


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("hook", ["on_test_batch_end", "on_epoch_end", "on_test_end"])
@pytest.mark.parametrize("option", [True, False])
def test_an_error_leaves_the_trained_weights(hook, option):
    """Wherever it happens."""

    def fail(told, argument):
        raise LookupError

    model = averaged_model()
    callbacks = [SwapEMAWeights(option), Told(**{hook: fail})]
    with pytest.raises(LookupError):
        model.fit(DATA, validation_data=DATA, callbacks=callbacks, verbose=0)
    assert not model.averaged
    if hook != "on_epoch_end":
        with pytest.raises(LookupError):
            model.evaluate(DATA, callbacks=callbacks, verbose=0)
        assert not model.averaged


def test_a_wrong_argument_is_named():
    """When it is made."""
    refused(
        lambda: SwapEMAWeights("yes"),
        "swap_on_epoch of SwapEMAWeights must be True or False, got 'yes'.",
    )
