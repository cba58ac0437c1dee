"""What every callback can rely on: shared logs, its turn at the end, early complaints."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError

import ipufit
from ipufit.callbacks import Callback, CallbackList, History
from ipufit.errors import ConfigurationError, NonFiniteLossError
from tests.engines import takes_back
from tests.faulty import Told, assert_same_bits, batches, compiled, fit, loader, state
from tests.told import message


class Adds(Callback):
    """Puts a value into the logs of an epoch."""

    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = epoch / 2


class Seen(Callback):
    """Keeps the logs of epochs and of the end."""

    def __init__(self):
        super().__init__()
        self.logs = []

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append((epoch, dict(logs)))

    def on_train_end(self, logs=None):
        self.logs.append(("end", dict(logs)))


@pytest.mark.long("ipu-standin")
def test_what_a_callback_adds_is_in_history_and_in_later_callbacks():
    """As in Keras, where a learning rate gets into History that way."""
    before, after = Seen(), Seen()
    history = fit(compiled(), batches(3), epochs=2, callbacks=[before, Adds(), after])
    assert history.history["mine"] == [0.0, 0.5]
    assert list(history.history) == ["loss", "mine"]
    assert [set(logs) for _, logs in before.logs] == [{"loss"}, {"loss"}, {"loss", "mine"}]
    assert [set(logs) for _, logs in after.logs] == [{"loss", "mine"}] * 3
    assert after.logs[-1] == ("end", after.logs[-2][1])


@pytest.mark.long("ipu-standin")
def test_a_history_of_the_user_is_the_one_that_is_filled():
    """It stands where the user has put it, and begins anew with a second fit."""
    own = History()
    model = compiled()
    assert fit(model, batches(2), epochs=2, callbacks=[own, Adds()]) is own
    assert model.history is own
    assert own.epoch == [0, 1]
    assert list(own.history) == ["loss"]
    fit(model, batches(2), callbacks=[own])
    assert (own.epoch, len(own.history["loss"])) == ([0], 1)
    assert ipufit.History is History


@pytest.mark.long("ipu-standin")
def test_a_history_can_be_stored():
    """The result of a training outlives the model."""
    history = fit(compiled(), batches(2))
    assert history.model is None
    assert pickle.loads(pickle.dumps(history)).history == history.history
    assert copy.deepcopy(history).params == history.params


@pytest.mark.long("ipu-standin")
def test_params_name_the_values_and_their_directions():
    """A callback can tell before training what will be there, and which way is better."""

    class Error:
        higher_is_better = False

        def __call__(self, prediction, target):
            return (prediction.argmax(1) != target).double()

    metrics = {
        "acc": "accuracy",
        "plain": lambda p, t: p.sum(1),
        "error": Error(),
        "one": MulticlassAccuracy(num_classes=3),
        "two": MetricCollection({"a": MulticlassAccuracy(num_classes=3)}),
    }
    model = ipufit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy", metrics=metrics)
    data = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))]
    told = Told()
    model.fit(data, validation_data=data, callbacks=[told], verbose=0)
    names = ["loss", "acc", "plain", "error", "one", "two_a"]
    known = {"loss": "min", "acc": "max", "error": "min", "one": "max", "two_a": "max"}
    assert told.params["metrics"] == [*names, *(f"val_{name}" for name in names)]
    assert told.params["directions"] == {**known, **{f"val_{n}": d for n, d in known.items()}}
    assert list(model.history.history) == told.params["metrics"]
    model.evaluate(data, callbacks=[told], verbose=0)
    assert told.params["metrics"] == names
    model.predict(data, callbacks=[told], verbose=0)
    assert (told.params["metrics"], told.params["directions"]) == ([], {})
    model = compiled(metrics=["rmse", MeanSquaredError()])
    fit(model, batches(2), callbacks=[told])
    assert told.params["directions"] == dict.fromkeys(["loss", "rmse", "MeanSquaredError"], "min")


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_every_updates_must_be_a_count(value):
    """A wrong one would be noticed only when nothing is written for hours."""
    told = Told()
    told.every_updates = value
    assert message(fit, compiled(), callbacks=[told]) == (
        f"every_updates of Told must be an integer of at least 1 or None, got {value!r}. It "
        "counts weight updates from the start of fit."
    )


class Waits(Callback):
    """Can't do without one value."""

    monitors = ("val_loss",)


MISSING = "Waits needs the value 'val_loss' at the end of an epoch, but there is only loss. "


@pytest.mark.long
def test_a_value_that_nobody_gives_is_missed_before_training():
    """An hour later would be too late."""
    told = Told()
    model = compiled()
    before = state(model)
    with pytest.raises(ConfigurationError) as caught:
        fit(model, callbacks=[told, Waits()])
    assert str(caught.value) == (f"{MISSING}Pass validation_data to fit, or use one of these.")
    assert told.hooks == []
    assert_same_bits(state(model), before)
    waits = Waits()
    waits.monitors = ("accuracy",)
    assert message(fit, model, callbacks=[waits]) == (
        "Waits needs the value 'accuracy' at the end of an epoch, but there is only loss. Use "
        "one of these, or add it to metrics."
    )
    assert fit(model, validation_data=batches(1), callbacks=[Waits()]).epoch == [0]


@pytest.mark.long
def test_a_callback_that_may_add_a_value_puts_the_check_off():
    """What it adds is known only when it has added it."""
    adds = Adds()
    assert fit(compiled(), callbacks=[Waits(), adds]).epoch == [0]
    adds.adds = ("val_loss",)
    assert fit(compiled(), callbacks=[Waits(), adds]).epoch == [0]
    adds.adds = ("mine",)
    with pytest.raises(ConfigurationError):
        fit(compiled(), callbacks=[Waits(), adds])
    told = Told()
    told.adds = None  # overrides nothing
    with pytest.raises(ConfigurationError):
        fit(compiled(), callbacks=[Waits(), told])


def failing(hook, error=LookupError):
    def fail(told, argument):
        raise error(hook)

    return Told(**{hook: fail})


@pytest.mark.long("ipu-standin")
def test_every_callback_gets_its_turn_at_the_end():
    """A file must be closed even if another callback fails to close its own."""
    first, bad, last = Told(), failing("on_train_end"), Told()
    with pytest.raises(LookupError, match="on_train_end"):
        fit(compiled(), callbacks=[first, bad, last])
    assert first.hooks[-1] == last.hooks[-1] == "on_train_end"


@pytest.mark.long("ipu-standin")
def test_two_errors_at_the_end_are_both_seen():
    """The second one is chained to the first."""
    with pytest.raises(KeyError) as caught:
        fit(
            compiled(),
            callbacks=[failing("on_train_end"), failing("on_train_end", KeyError)],
        )
    assert isinstance(caught.value.__context__, LookupError)


@pytest.mark.long("ipu-standin")
def test_a_training_ends_for_those_for_whom_it_began():
    """A callback whose on_train_begin has not run has nothing to end."""
    first, bad, last = Told(), failing("on_train_begin"), Told()
    closed = []
    for told in (first, bad, last):
        told.close = lambda told=told: closed.append(told)
    with pytest.raises(LookupError, match="on_train_begin"):
        fit(compiled(), callbacks=[first, bad, last])
    assert first.hooks == ["on_train_begin", "on_train_end"]
    assert bad.hooks == ["on_train_begin"]
    assert last.hooks == []
    assert closed == [first, bad, last]


@pytest.mark.long("ipu-standin")
def test_close_comes_last_wherever_callbacks_are_used():
    """Evaluate and predict have threads and files to end too."""
    model = compiled()
    hooks = []
    told = Told()
    told.close = lambda: hooks.append([*told.hooks][-1])
    fit(model, validation_data=batches(1), callbacks=[told])
    model.evaluate(batches(1), callbacks=[told], verbose=0)
    model.predict(batches(1), callbacks=[told], verbose=0)
    with pytest.raises(LookupError):
        model.evaluate(batches(1), callbacks=[failing("on_test_begin"), told], verbose=0)
    assert hooks == ["on_train_end", "on_test_end", "on_predict_end", "on_predict_end"]


@pytest.mark.long("ipu-standin")
def test_an_epoch_whose_end_failed_is_in_history():
    """It has been trained; its values are not to be lost."""
    model = compiled()
    with pytest.raises(LookupError):
        fit(model, epochs=3, callbacks=[Adds(), failing("on_epoch_end")])
    assert model.history.epoch == [0]
    assert model.history.history["mine"] == [0.0]


class Accepts(Told):
    """Ends training when a loss is not finite."""

    def __init__(self):
        super().__init__()
        self.errors = []

    def __getattribute__(self, name):
        if name == "on_non_finite":
            return self.take
        return super().__getattribute__(name)

    def take(self, error):
        self.errors.append((error.update, error.epoch))
        return True


def bad_in(epoch, index, count=4):
    """Batches of which one has NaN, in one epoch."""

    class Data:
        seen = -1

        def __iter__(self):
            self.seen += 1
            for place, (x, y) in enumerate(batches(count)):
                spoilt = (self.seen, place) == (epoch, index)
                yield x, torch.full_like(y, float("nan")) if spoilt else y

    return Data()


@pytest.mark.long
@pytest.mark.parametrize("di", [1, 4])
@takes_back
def test_a_callback_may_end_training_at_a_loss_that_is_no_number(di):
    """The epoch is finished as one that was stopped, with the loss that came."""
    told, accepts = Told(), Accepts()
    model, twin = compiled(), compiled()
    twin.module.load_state_dict(model.module.state_dict())
    history = fit(
        model,
        bad_in(1, 2),
        epochs=4,
        device_iterations=di,
        validation_data=batches(1),
        callbacks=[told, accepts],
    )
    assert accepts.errors == [(6, 1)]
    assert told.hooks[-2:] == ["on_epoch_end", "on_train_end"]
    assert history.epoch == [0, 1]
    loss, val = history.history["loss"], history.history["val_loss"]
    assert loss[0] == loss[0]
    assert loss[1] != loss[1]
    assert all(v == v for v in val)

    def stop(told, last):
        told.model.stop_training = told.hooks.count("on_epoch_begin") == 2 and last == 1

    fit(twin, batches(4), epochs=4, callbacks=[Told(on_train_batch_end=stop)])
    assert_same_bits(state(model), state(twin))


@pytest.mark.long("ipu-standin")
def test_without_such_a_callback_the_error_is_raised():
    """Answering False is no consent."""
    with pytest.raises(NonFiniteLossError) as caught:
        fit(compiled(), bad_in(0, 1), callbacks=[Callback(), Told()])
    assert (caught.value.update, caught.value.epoch) == (1, 0)


def test_a_list_of_ones_own():
    """For a loop by hand."""
    told, accepts = Told(), Accepts()
    callbacks = CallbackList([told, accepts], None, {})
    callbacks.check_monitors()
    callbacks.call("on_epoch_begin", 3, {})
    assert told.hooks == accepts.hooks == ["on_epoch_begin"]
    error = NonFiniteLossError("", 0, float("nan"))
    assert callbacks.call("on_non_finite", error) is True
    assert CallbackList([told], None, {}).call("on_non_finite", error) is False


@pytest.mark.parametrize("hook", ["on_batch_begin", "on_batch_end"])
def test_hooks_that_are_never_called_are_refused(hook):
    """Keras calls these old names too; a callback brought along would do nothing here."""
    told = type("Old", (Callback,), {hook: lambda self, batch, logs=None: None})()
    assert message(fit, compiled(), callbacks=[told]) == (
        f"Old must have hooks for train, test or predict batches, but has {hook}, which is never "
        f"called. Rename it to on_train_{hook[3:]}."
    )


class Seldom(Callback):
    """Gives a value after every second epoch, the first one not among them."""

    adds = ("val_bleu",)

    def on_epoch_end(self, epoch, logs=None):
        if epoch % 2:
            logs["val_bleu"] = -float(epoch)


@pytest.mark.long
def test_a_value_that_a_callback_promises_may_come_later():
    """Epochs without it are none to EarlyStopping, also before the first one that has it."""
    stop = ipufit.callbacks.EarlyStopping("val_bleu", patience=1, mode="max")
    told = Told()
    history = fit(compiled(), epochs=9, callbacks=[Seldom(), stop, told])
    assert told.params["adds"] == ["val_bleu"]
    assert history.history["val_bleu"] == [-1.0, -3.0]
    assert (len(history.epoch), stop.best) == (4, -1.0)


def test_the_outputs_of_a_prediction_are_in_logs():
    """In the structure that predict returns, one execution at a time."""
    seen = []
    look = ipufit.callbacks.LambdaCallback(
        on_predict_batch_end=lambda batch, logs: seen.append(logs["outputs"])
    )
    outputs = compiled().predict(batches(4), device_iterations=3, callbacks=[look], verbose=0)
    assert [len(piece) for piece in seen] == [12, 4]
    assert torch.equal(torch.cat(seen), outputs)


class Keeps(Callback):
    """Keeps the logs themselves, as is good practice nowhere and done everywhere."""

    def __init__(self):
        super().__init__()
        self.kept = []
        self.copies = []

    def on_train_batch_end(self, batch, logs=None):
        self.kept.append(logs)
        self.copies.append({name: logs[name] for name in logs})
        assert logs.copy() == self.copies[-1]
        assert repr(logs) == repr(self.copies[-1])

    def on_test_batch_end(self, batch, logs=None):
        self.on_train_batch_end(batch, logs)


@pytest.mark.long("ipu-standin")
def test_logs_that_are_kept_stay_those_of_their_moment():
    """Keras gives a dict; here values are worked out late, but never those of a later time."""
    model, keeps = compiled(metrics=["mae"]), Keeps()
    fit(model, epochs=2, callbacks=keeps, validation_data=loader())
    assert [dict(logs) for logs in keeps.kept] == keeps.copies
    assert [logs["updates"] for logs in keeps.kept] == [1, 2, 3] * 4
    assert len({logs["mae"] for logs in keeps.kept}) > 4


@pytest.mark.long("ipu-standin")
def test_logs_that_nobody_looks_at_cost_no_metric():
    """Metrics are worked out where somebody reads or keeps them."""
    calls = []

    class Counted(torch.nn.Module):
        higher_is_better = False

        def update(self, prediction, target):
            pass

        def compute(self):
            calls.append(1)
            return 1.0

        def reset(self):
            pass

    model = compiled(metrics=[Counted()])
    calls.clear()
    fit(model, epochs=2, callbacks=Told())
    quiet = len(calls)
    calls.clear()
    fit(model, epochs=2, callbacks=Keeps())
    assert quiet < len(calls)
