"""Callbacks of Keras and of ipufit are called alike: hooks, order, indices, names, values."""

import numpy
import pytest

import ipufit
from tests.against_keras.twins import (
    BATCH_SIZE,
    HOOKS,
    XV,
    YV,
    X,
    Y,
    from_keras,
    keras,
    ledgers,
    names,
    pair,
    same_calls,
)

pytestmark = from_keras


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"validated": True},
        {"validated": True, "epochs": 4, "validation_freq": 2},
        {"validated": True, "epochs": 4, "validation_freq": [1, 4]},
        {"validated": True, "validation_batch_size": 7},
        {"validated": True, "validation_steps": 2},
        {"validation_split": 0.25},
        {"initial_epoch": 2, "epochs": 4},
        {"batch_size": 16},
        {"steps_per_epoch": 3, "epochs": 2},
    ],
    ids=str,
)
def test_fit(options):
    theirs, ours = ledgers()
    both = pair()
    both.fit([theirs], [ours], **options)
    same_calls(ours, theirs)
    both.same_weights()


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end", "on_test_batch_end"])
def test_stop_training(hook):
    """The rest of the epoch is left out, its validation and its end are not."""

    def stop(callback, called, index):
        if called == hook and len([c for c in callback.calls if c[0] == hook]) == 2:
            callback.model.stop_training = True

    theirs, ours = ledgers(stop)
    both = pair()
    both.fit([theirs], [ours], validated=True)
    same_calls(ours, theirs)
    both.same_weights()


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_train_batch_begin", "on_train_begin"])
def test_stop_training_at_a_beginning(hook):
    def stop(callback, called, index):
        if called == hook:
            callback.model.stop_training = True

    theirs, ours = ledgers(stop)
    both = pair()
    both.fit([theirs], [ours], validated=True)
    same_calls(ours, theirs)
    both.same_weights()


@pytest.mark.parametrize(
    "hook",
    ["on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"],
)
def test_after_an_error_in_a_callback_ipufit_alone_says_that_training_ended(hook):
    """Keras leaves files open and weights unrestored there; ours are told of the end."""

    def fail(callback, called, index):
        if called == hook and index == 1:
            raise RuntimeError("of a callback")

    theirs, ours = ledgers(fail)
    both = pair()
    with pytest.raises(RuntimeError, match="of a callback"):
        both.theirs.fit(X, Y, batch_size=BATCH_SIZE, epochs=2, callbacks=[theirs], verbose=0)
    with pytest.raises(RuntimeError, match="of a callback"):
        both.ours.fit(X, Y, batch_size=BATCH_SIZE, epochs=2, callbacks=[ours], verbose=0)
    assert names(ours.calls) == [*names(theirs.calls), ("on_train_end", None)]


def test_after_an_error_in_a_callback_both_have_trained_as_far():
    def fail(callback, called, index):
        if called == "on_train_batch_end" and index == 3:
            raise RuntimeError("of a callback")

    both = pair()
    theirs, ours = ledgers(fail)
    for model, callback in ((both.theirs, theirs), (both.ours, ours)):
        with pytest.raises(RuntimeError, match="of a callback"):
            model.fit(X, Y, batch_size=10, shuffle=False, callbacks=[callback], verbose=0)
    both.same_weights()


@pytest.mark.parametrize("options", [{}, {"batch_size": 7}, {"steps": 2}], ids=str)
def test_evaluate(options):
    theirs, ours = ledgers()
    both = pair()
    arguments = {"x": XV, "y": YV, "batch_size": BATCH_SIZE, "verbose": 0, **options}
    both.theirs.evaluate(**arguments, callbacks=[theirs])
    both.ours.evaluate(**arguments, callbacks=[ours])
    same_calls(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"batch_size": 7}, {"steps": 2}], ids=str)
def test_predict(options):
    theirs, ours = ledgers()
    both = pair()
    arguments = {"x": XV, "batch_size": BATCH_SIZE, "verbose": 0, **options}
    expected = both.theirs.predict(**arguments, callbacks=[theirs])
    came = both.ours.predict(**arguments, callbacks=[ours])
    assert names(ours.calls) == names(theirs.calls)
    for (_, _, mine), (_, _, logs) in zip(ours.calls, theirs.calls):
        assert mine.keys() == logs.keys()
        for key, values in logs.items():
            numpy.testing.assert_allclose(mine[key], values, atol=1e-6)
    numpy.testing.assert_allclose(came.numpy(), expected, atol=1e-6)


def test_several_callbacks_are_called_in_the_order_of_the_list():
    order = {"theirs": [], "ours": []}

    def told(side, name):
        return lambda callback, hook, index: order[side].append((name, hook, index))

    both = pair()
    first, second = told("theirs", 1), told("theirs", 2)
    theirs = [ledgers(first)[0], ledgers(second)[0]]
    first, second = told("ours", 1), told("ours", 2)
    ours = [ledgers(first)[1], ledgers(second)[1]]
    both.fit(theirs, ours, validated=True)
    assert order["ours"] == order["theirs"]


def test_what_a_callback_adds_to_logs_is_in_those_after_it_and_in_the_history():
    def adds(base):
        class Adds(base):
            def on_epoch_end(self, epoch, logs=None):
                logs["more"] = logs["loss"] * 0 + epoch

        return Adds()

    theirs, ours = ledgers()
    both = pair()
    histories = both.fit(
        [adds(keras.callbacks.Callback), theirs], [adds(ipufit.callbacks.Callback), ours]
    )
    assert [history.history["more"] for history in histories] == [[0.0, 1.0, 2.0]] * 2
    # Keras hands on_train_end the epoch's own values only.
    assert theirs.calls.pop()[2].keys() == {"loss", "accuracy"}
    assert ours.calls.pop()[2].keys() == {"loss", "accuracy", "more"}
    same_calls(ours, theirs)


def test_lambda_callback_calls_the_same_functions():
    calls = {}

    def made(library, side):
        def write(hook):
            if hook in ("on_train_begin", "on_train_end"):
                return lambda logs: calls.setdefault(side, []).append((hook, sorted(logs)))
            return lambda index, logs: calls.setdefault(side, []).append(
                (hook, index, sorted(logs.keys() - {"updates", "samples"}))
            )

        hooks = [hook for hook in HOOKS if hook.startswith(("on_train", "on_epoch"))]
        return library.LambdaCallback(**{hook: write(hook) for hook in hooks})

    both = pair()
    both.fit([made(keras.callbacks, "theirs")], [made(ipufit.callbacks, "ours")])
    assert len(calls["ours"]) == 2 + 3 * (2 + 2 * 6)
    assert calls["ours"] == calls["theirs"]


def test_no_epoch_to_train_is_an_error():
    """Keras trains nothing and says nothing, which hides a mistake in the count."""
    both = pair()
    theirs = both.theirs.fit(X, Y, initial_epoch=2, epochs=2, verbose=0)
    assert theirs.history == {}
    with pytest.raises(
        ipufit.errors.ConfigurationError, match="with at least one epoch, no negative index"
    ):
        both.ours.fit(X, Y, epochs=range(2, 2), verbose=0)


def test_a_callback_of_keras_is_refused():
    """It would look for weights and a learning rate where a torch model has none."""
    callback = keras.callbacks.EarlyStopping()
    with pytest.raises(ipufit.errors.ConfigurationError, match=r"Subclass ipufit\.callbacks"):
        pair().ours.fit(X, Y, callbacks=[callback])
