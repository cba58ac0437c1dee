"""LambdaCallback: every hook can be a function."""

import inspect

import pytest

from ipufit.callbacks import LambdaCallback
from ipufit.callbacks.callback import EVENTS
from tests.faulty import Told, batches, compiled, fit
from tests.told import refused

# The others fire where something is wrong.
HOOKS = [event.hook for event in EVENTS.values() if "logs" in event.arguments]


@pytest.mark.long("ipu-standin")
def test_every_hook_can_be_given_and_is_called_as_in_a_class():
    """With the same arguments, in the same order."""
    calls = []
    given = {hook: lambda *args, hook=hook: calls.append(hook) for hook in HOOKS}
    told = Told()
    model = compiled()
    callbacks = [LambdaCallback(**given), told]
    fit(model, batches(3), validation_data=batches(2), callbacks=callbacks)
    model.predict(batches(2), callbacks=callbacks, verbose=0)
    assert calls == told.hooks
    assert set(calls) == set(HOOKS)


def test_the_first_six_are_in_keras_order():
    """They may be given by position."""
    assert list(inspect.signature(LambdaCallback).parameters)[:6] == [
        "on_epoch_begin",
        "on_epoch_end",
        "on_train_begin",
        "on_train_end",
        "on_train_batch_begin",
        "on_train_batch_end",
    ]


@pytest.mark.long
def test_arguments_and_answers_reach_the_loop():
    """Logs can be added to, and a loss that is not a number can be taken."""

    def add(epoch, logs):
        logs["twice"] = 2 * logs["loss"]

    errors = []
    callback = LambdaCallback(
        on_epoch_end=add, on_non_finite=lambda error: errors.append(error) or True
    )
    history = fit(compiled(), batches(2), callbacks=[callback]).history
    assert history["twice"] == [2 * history["loss"][0]]
    x, y = batches(1)[0]
    assert fit(compiled(), [(x, y * float("nan"))], epochs=3, callbacks=[callback]).epoch == [0]
    assert [error.update for error in errors] == [0]


def test_what_is_no_function_is_refused():
    """And a misspelt hook is Python's own TypeError."""
    refused(
        lambda: LambdaCallback(on_epoch_end=3),
        "on_epoch_end of LambdaCallback must be a function or None, got 3. Write for example "
        "on_epoch_end=lambda epoch, logs: print(logs).",
    )
    with pytest.raises(TypeError, match="on_epoch_ende"):
        LambdaCallback(on_epoch_ende=print)
