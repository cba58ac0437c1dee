"""Keras itself, trained on the same data: what its users rely on must be the same here."""

import pytest

import ipufit
from tests.against_keras.twins import (
    fit_ipufit,
    fit_keras,
    keras,
    ledger,
    networks,
    same_weights,
)

# Keras hands torch tensors to NumPy in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.mark.parametrize("validation", [True, False], ids=["validated", "plain"])
def test_callbacks_are_called_in_keras_order(validation):
    """Hooks, indices and the names in logs."""
    theirs, ours = ledger(keras.callbacks.Callback), ledger(ipufit.callbacks.Callback)
    model, module = networks()
    fit_keras(model, [theirs], validation=validation, epochs=2)
    fit_ipufit(module, [ours], validation=validation, epochs=2)
    assert ours.calls == theirs.calls
    same_weights(model, module)


def test_history_has_keras_keys_and_values():
    model, module = networks()
    theirs = fit_keras(model)
    _, ours = fit_ipufit(module)
    assert set(ours.history) == set(theirs.history)
    assert ours.epoch == theirs.epoch
    for name, values in theirs.history.items():
        assert ours.history[name] == pytest.approx(values, abs=1e-5)
