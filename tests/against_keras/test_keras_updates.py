"""What happens to a gradient and to weights: clipping, moving averages, single batches."""

import math

import numpy
import pytest

import ipufit
from tests.against_keras.twins import (
    WEIGHTS,
    XV,
    YV,
    X,
    Y,
    from_keras,
    keras,
    ledger,
    pair,
    same_values,
)

pytestmark = from_keras


def flat(pair, side):
    """All weights of one side as one vector, in the order and layout of torch."""
    parts = []
    for dense, linear in pair.layers:
        if side == "theirs":
            kernel, bias = dense.get_weights()
            parts += [kernel.T.ravel(), bias]
        else:
            parts += [linear.weight.detach().numpy().ravel(), linear.bias.detach().numpy()]
    return numpy.concatenate(parts)


@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm", "clipvalue"])
@pytest.mark.parametrize("bound", [0.01, 0.1, 100.0])
def test_one_clipped_update(name, bound):
    """Keras divides by the norm; torch, and so ipufit, by the norm plus 1e-6.

    The clipped gradient is smaller by 1e-6 / norm for that. The smallest norm here is 0.3, so the
    updates differ in their sixth digit; 1e-7 is what float32 leaves of the weights around them.
    """
    before = flat(pair(), "ours")
    both = pair(**{name: bound})
    both.fit(x=X[:10], y=Y[:10], epochs=1)
    theirs, ours = flat(both, "theirs") - before, flat(both, "ours") - before
    numpy.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)
    plain = pair()
    plain.fit(x=X[:10], y=Y[:10], epochs=1)
    clipped = not numpy.allclose(flat(plain, "ours") - before, ours, rtol=1e-3)
    assert clipped == (bound < 1)


@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_training_with_clipping(name):
    both = pair(**{name: 0.1})
    theirs, ours = both.fit(validated=True)
    same_values(ours.history, theirs.history)
    numpy.testing.assert_allclose(flat(both, "ours"), flat(both, "theirs"), atol=2e-5)


AVERAGES = [
    {},
    {"ema_momentum": 0.5},
    {"ema_momentum": 0.0},
    {"ema_momentum": 0.9, "ema_overwrite_frequency": 4},
    {"ema_momentum": 0.9, "ema_overwrite_frequency": 1},
    {"ema_momentum": 0.9, "ema_overwrite_frequency": 100},
]


@pytest.mark.parametrize("options", AVERAGES, ids=str)
def test_moving_averages_are_the_weights_at_the_end(options):
    """Validation before that is of the trained weights."""
    both = pair(use_ema=True, **options)
    theirs, ours = both.fit(validated=True)
    same_values(ours.history, theirs.history)
    both.same_weights()


def test_moving_averages_go_on_in_the_next_fit():
    both = pair(use_ema=True, ema_momentum=0.8)
    for _ in range(3):
        theirs, ours = both.fit(validated=True, epochs=1)
        same_values(ours.history, theirs.history)
        both.same_weights()


def test_moving_averages_after_stop_training():
    def stop(callback, hook, index):
        if hook == "on_train_batch_end" and index == 2:
            callback.model.stop_training = True

    both = pair(use_ema=True, ema_momentum=0.8)
    both.fit(
        [ledger(keras.callbacks.Callback, stop)],
        [ledger(ipufit.callbacks.Callback, stop)],
        epochs=1,
    )
    both.same_weights()


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swap_ema_weights(swap_on_epoch):
    """Validation is of the averages, and so are the weights that callbacks after it see."""
    both = pair(use_ema=True, ema_momentum=0.8)
    seen = {"theirs": [], "ours": []}

    def look(side):
        def act(callback, hook, index):
            if hook == "on_epoch_end":
                seen[side].append(flat(both, side))

        return act

    swap = {"swap_on_epoch": swap_on_epoch}
    theirs, ours = both.fit(
        [keras.callbacks.SwapEMAWeights(**swap), ledger(keras.callbacks.Callback, look("theirs"))],
        [ipufit.callbacks.SwapEMAWeights(**swap), ledger(ipufit.callbacks.Callback, look("ours"))],
        validated=True,
    )
    same_values(ours.history, theirs.history)
    numpy.testing.assert_allclose(seen["ours"], seen["theirs"], atol=2e-6)
    both.same_weights()


def test_without_its_own_moving_averages_swap_ema_weights_is_an_error_in_both():
    both = pair()
    with pytest.raises(ValueError, match="use_ema"):
        both.theirs.fit(X, Y, validation_data=(XV, YV), callbacks=[swap(keras)], verbose=0)
    with pytest.raises(ipufit.errors.ConfigurationError, match="ema=ipufit"):
        both.ours.fit(X, Y, validation_data=(XV, YV), callbacks=[swap(ipufit)], verbose=0)


def swap(library, **options):
    return library.callbacks.SwapEMAWeights(**options)


def test_stopped_early_with_swap_on_epoch_ipufit_alone_ends_with_the_averages():
    """Keras makes sure of them in the last epoch it was asked for, which does not come here."""

    def stop(callback, hook, index):
        if hook == "on_epoch_end":
            callback.model.stop_training = True

    averaged = pair(use_ema=True, ema_momentum=0.8)
    averaged.fit(epochs=1)
    both = pair(use_ema=True, ema_momentum=0.8)
    both.fit(
        [ledger(keras.callbacks.Callback, stop), swap(keras, swap_on_epoch=True)],
        [ledger(ipufit.callbacks.Callback, stop), swap(ipufit, swap_on_epoch=True)],
        epochs=2,
    )
    numpy.testing.assert_allclose(flat(both, "ours"), flat(averaged, "ours"), atol=1e-7)
    trained = pair()
    trained.fit(epochs=1)
    numpy.testing.assert_allclose(flat(both, "theirs"), flat(trained, "ours"), atol=2e-6)


def test_swap_ema_weights_is_for_fit():
    """Keras' averages live on in the optimizer; in ipufit they are the weights when fit is over."""
    both = pair(use_ema=True, ema_momentum=0.8)
    both.fit(epochs=1)
    given = {"batch_size": 10, "verbose": 0}
    expected = both.theirs.evaluate(XV, YV, callbacks=[swap(keras)], return_dict=True, **given)
    same_values(both.ours.evaluate(XV, YV, **given), expected)
    with pytest.raises(ipufit.errors.ConfigurationError, match="needs a running fit"):
        both.ours.evaluate(XV, YV, callbacks=[swap(ipufit)], **given)


# ---- a non-finite loss --------------------------------------------------------------------------


def test_terminate_on_nan_ends_in_the_same_batch():
    """Keras has made the update with NaN by then; in ipufit the weights are those before it.

    The hook of the batch itself is therefore one that only Keras calls. Values of the epoch follow.
    """
    x = X.copy()
    x[25] = math.nan
    seen = {}

    def count(side):
        def act(callback, hook, index):
            if hook in ("on_train_batch_begin", "on_epoch_end", "on_train_end"):
                seen.setdefault(side, []).append((hook, index))

        return act

    both = pair(metrics=())
    theirs, ours = both.fit(
        [keras.callbacks.TerminateOnNaN(), ledger(keras.callbacks.Callback, count("theirs"))],
        [ipufit.callbacks.TerminateOnNaN(), ledger(ipufit.callbacks.Callback, count("ours"))],
        x=x,
    )
    assert seen["ours"] == seen["theirs"]
    assert seen["ours"][-2:] == [("on_epoch_end", 0), ("on_train_end", None)]
    same_values(ours.history, theirs.history)
    assert numpy.isnan(flat(both, "theirs")).all()
    left = flat(both, "ours")
    before = pair(metrics=())
    before.fit(x=X[:20], y=Y[:20], epochs=1)
    numpy.testing.assert_array_equal(left, flat(before, "ours"))


def test_without_terminate_on_nan_a_nan_is_an_error():
    """Keras trains on with weights that are all NaN."""
    x = X.copy()
    x[25] = math.nan
    both = pair()
    history = both.theirs.fit(x, Y, epochs=2, verbose=0, batch_size=10, shuffle=False)
    assert len(history.epoch) == 2
    with pytest.raises(ipufit.errors.NonFiniteLossError):
        both.ours.fit(x, Y, epochs=2, verbose=0, batch_size=10, shuffle=False)


# ---- one batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("metrics", [(), ("accuracy",)])
@pytest.mark.parametrize("return_dict", [False, True])
def test_on_batch_methods_return_the_same(metrics, return_dict):
    """A number, a list that begins with the loss, or a dict."""
    both = pair(metrics=metrics)
    form = {"return_dict": return_dict}
    for method, data in (
        ("train_on_batch", (X[:10], Y[:10])),
        ("train_on_batch", (X[10:20], Y[10:20])),
        ("train_on_batch", (X[10:20], Y[10:20], WEIGHTS[10:20])),
        ("test_on_batch", (XV, YV)),
        ("test_on_batch", (XV, YV, WEIGHTS[:30])),
    ):
        expected = getattr(both.theirs, method)(*data, **form)
        same_form(getattr(both.ours, method)(*data, **form), expected)
        both.same_weights()
    came = both.ours.predict_on_batch(XV)
    numpy.testing.assert_allclose(
        came.detach().numpy(), both.theirs.predict_on_batch(XV), atol=2e-6
    )


def test_train_on_batch_with_class_weights():
    both = pair()
    weights = {0: 0.5, 2: 3.0}
    expected = both.theirs.train_on_batch(X[:10], Y[:10], class_weight=weights, return_dict=True)
    same_form(both.ours.train_on_batch(X[:10], Y[:10], class_weight=weights), expected)
    both.same_weights()


@pytest.mark.parametrize("metrics", [(), ("accuracy",)])
def test_evaluate_returns_the_same_numbers(metrics):
    """A dict unless told otherwise in ipufit, where a list's order need not be known."""
    both = pair(metrics=metrics)
    given = {"verbose": 0, "batch_size": 7}
    same_form(
        both.ours.evaluate(XV, YV, return_dict=False, **given),
        both.theirs.evaluate(XV, YV, **given),
    )
    same_form(
        both.ours.evaluate(XV, YV, **given), both.theirs.evaluate(XV, YV, return_dict=True, **given)
    )
    weighted = {"sample_weight": WEIGHTS[:30], **given}
    same_form(
        both.ours.evaluate(XV, YV, **weighted),
        both.theirs.evaluate(XV, YV, return_dict=True, **weighted),
    )


def same_form(came, expected):
    """The same kind of thing with the same numbers."""
    if isinstance(expected, dict):
        same_values(came, expected)
        return
    assert isinstance(came, list) == isinstance(expected, list)
    assert came == pytest.approx(numpy.asarray(expected, float).tolist(), abs=1e-5)
