"""Asynchronous: the same ledger as without it, whatever the delays and errors."""

import random
import threading
import time
import traceback

import pytest
import torch
from torch import nn

import ipufit
from ipufit.callbacks import (
    Asynchronous,
    Callback,
    CSVLogger,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    ReduceLROnPlateau,
)
from ipufit.callbacks.callback import EVENTS
from ipufit.errors import NonFiniteLossError
from tests.caching import once_per_engine
from tests.faulty import Told, batches, compiled, fit
from tests.told import refused

# The others fire where something is wrong.
HOOKS = [event.hook for event in EVENTS.values() if "logs" in event.arguments]


class Ledger(Callback):
    """Writes down every hook with its argument and logs, as slowly as it likes.

    Args:
        delays: seed of random delays; None for none.
        act: called after each entry, with the ledger.
    """

    def __init__(self, delays=None, act=None):
        super().__init__()
        self.entries = []
        self.threads = set()
        self._random = None if delays is None else random.Random(delays)
        self._act = act

    def write(self, hook, args):
        if self._random is not None and self._random.random() < 0.3:
            time.sleep(0.004 * self._random.random())
        *index, logs = args
        # The outputs of a prediction as numbers, which can be compared.
        plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in logs.items()}
        self.entries.append((hook, *index, plain))
        if "batch" in hook:
            self.threads.add(threading.current_thread().name)
        if self._act is not None:
            self._act(self)


for hook in HOOKS:
    setattr(Ledger, hook, lambda self, *args, hook=hook: self.write(hook, args))


def run(callback, **options):
    """A fit of three epochs with validation; the error that ended it, if any."""
    torch.manual_seed(3)
    model = compiled(nn.Linear(4, 3), metrics=["mae"])
    callbacks = [callback, *options.pop("after", ())]
    settings = {"epochs": 3, "validation_data": batches(3), **options}
    threads = threading.active_count()
    try:
        fit(model, settings.pop("x", batches(7)), callbacks=callbacks, **settings)
    except BaseException as error:
        return error
    finally:
        assert threading.active_count() == threads
    return None


@once_per_engine
def synchronous(di):
    """The ledger to compare with."""
    plain = Ledger()
    assert run(plain, device_iterations=di) is None
    return plain


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("max_pending", [1, 3, 64])
@pytest.mark.parametrize("di", [1, 3])
def test_the_ledger_is_that_of_the_synchronous_callback(seed, max_pending, di):
    """Every hook once, in order, with the values of its own moment."""
    plain, late = synchronous(di), Ledger(delays=seed)
    assert run(Asynchronous(late, max_pending), device_iterations=di) is None
    assert late.entries == plain.entries
    assert late.threads == {"ipufit-callback"}
    assert plain.threads == {threading.current_thread().name}


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("place", [0, 1, 2, 5, 14, 15, 18, 22, 23, 24, 60, 70])
@pytest.mark.parametrize("max_pending", [1, 64])
def test_an_error_of_the_callback_ends_training_with_the_same_ledger(place, max_pending):
    """What waits behind it is not run, as it would not be without the thread."""

    def fail(ledger):
        if len(ledger.entries) == place + 1:
            raise LookupError("mine")

    plain, late = Ledger(act=fail), Ledger(delays=place, act=fail)
    expected, found = run(plain), run(Asynchronous(late, max_pending))
    assert str(expected) == str(found) == "mine"
    assert type(found) is LookupError
    assert late.entries == plain.entries
    assert late.entries[-1][0] == "on_train_end" or place == 0
    frames = [frame.name for frame in traceback.extract_tb(found.__traceback__)]
    assert frames[-1] == "fail"
    assert "run" in frames


@pytest.mark.long
@pytest.mark.parametrize("update", [0, 3, 6, 10])
@pytest.mark.parametrize("error", [KeyboardInterrupt, LookupError])
def test_nothing_is_lost_when_training_is_interrupted(update, error):
    """By Ctrl-C, or by another callback."""

    def interrupt():
        count = iter(range(100))

        def look(batch, logs):
            if next(count) == update:
                raise error

        return LambdaCallback(on_train_batch_end=look)

    plain, late = Ledger(), Ledger(delays=update)
    assert type(run(plain, after=[interrupt()])) is error
    assert type(run(Asynchronous(late), after=[interrupt()])) is error
    assert late.entries == plain.entries
    assert late.entries[-1][0] == "on_train_end"


@pytest.mark.long
@pytest.mark.parametrize("bad", [0, 2, 6])
def test_nothing_is_lost_when_the_loss_is_no_number(bad):
    """The updates before it are reported."""
    data = [(x, y * float("nan") if i == bad else y) for i, (x, y) in enumerate(batches(7))]
    plain, late = Ledger(), Ledger(delays=bad)
    assert type(run(plain, x=data)) is type(run(Asynchronous(late), x=data)) is NonFiniteLossError
    assert late.entries == plain.entries


def test_two_errors_are_both_seen():
    """That of the training, and that of the callback which came out at the end."""
    go = threading.Event()

    class Fails(Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert go.wait(60)
            raise LookupError("callback")

    def interrupt(batch, logs):
        go.set()
        raise KeyboardInterrupt

    found = run(Asynchronous(Fails()), after=[LambdaCallback(on_train_batch_end=interrupt)])
    assert type(found) is LookupError
    assert type(found.__context__) is KeyboardInterrupt


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_stop_training_takes_effect_with_a_later_execution(seed):
    """Every update that was made is reported, and the first ones are those of the plain run."""

    def stop(ledger):
        if ledger.entries[-1][:2] == ("on_train_batch_end", 2):
            ledger.model.stop_training = True

    plain, late = Ledger(act=stop), Ledger(delays=seed, act=stop)
    made = []
    count = LambdaCallback(on_train_batch_end=lambda batch, logs: made.append(batch))
    assert run(plain) is None
    assert run(Asynchronous(late), after=[count]) is None
    reported = [entry[1] for entry in late.entries if entry[0] == "on_train_batch_end"]
    assert reported == made
    assert 3 <= len(made) <= 7
    ends = [entry[0] for entry in late.entries if "batch" not in entry[0]]
    assert ends == [entry[0] for entry in plain.entries if "batch" not in entry[0]]
    first = 2 + 2 * 3
    assert late.entries[:first] == plain.entries[:first]


@pytest.mark.long("ipu-standin")
def test_hooks_run_while_the_next_execution_is_in_flight():
    """In one thread this would wait for ever."""
    begun = threading.Event()
    waited = []

    class Waits(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                waited.append(begun.wait(60))

    def begin(batch, logs):
        if batch == 1:
            begun.set()

    after = [LambdaCallback(on_train_batch_begin=begin)]
    assert run(Asynchronous(Waits()), after=after, epochs=1) is None
    assert waited == [True]


@pytest.mark.long
@pytest.mark.parametrize("max_pending", [1, 2, 5])
def test_training_waits_for_a_callback_that_is_too_slow(max_pending):
    """An unbounded queue would hold a copy of the logs for every execution of the epoch."""
    done = []
    ahead = []

    class Slow(Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.002)
            done.append(batch)

    look = LambdaCallback(
        on_train_batch_end=lambda batch, logs: ahead.append(batch + 1 - len(done))
    )
    x = batches(30)
    assert run(Asynchronous(Slow(), max_pending), after=[look], x=x, epochs=1) is None
    assert done == list(range(30))
    # So many wait, and one is being run.
    assert max(ahead) <= max_pending + 1


@pytest.mark.long
def test_decisions_at_the_end_of_an_epoch_are_in_time(tmp_path):
    """Wrapping a callback that has no batch hooks changes nothing."""
    for make in (
        lambda: EarlyStopping("loss", patience=1, min_delta=10, restore_best_weights=True),
        lambda: ReduceLROnPlateau("loss", patience=1, min_delta=10),
        lambda: CSVLogger(tmp_path / "log.csv"),
    ):
        results = []
        for wrap in (lambda c: c, Asynchronous):
            torch.manual_seed(3)
            model = compiled()
            history = fit(model, batches(3), epochs=4, callbacks=[wrap(make())])
            weights = [p.detach().clone() for p in model.module.parameters()]
            results.append((history.history, weights))
        assert results[0][0] == results[1][0]
        assert all(map(torch.equal, results[0][1], results[1][1]))


@pytest.mark.long
def test_it_serves_evaluate_and_predict_and_again():
    """The thread ends with each of them."""
    late, plain = Ledger(delays=1), Ledger()
    wrapped = Asynchronous(late)
    threads = threading.active_count()
    for callback in (plain, wrapped):
        torch.manual_seed(3)
        model = compiled()
        for _ in range(2):
            fit(model, batches(2), callbacks=[callback])
            model.evaluate(batches(3), callbacks=[callback], verbose=0)
            model.predict(batches(3), callbacks=[callback], verbose=0)
            assert threading.active_count() == threads
    assert late.entries == plain.entries
    assert {entry[0] for entry in late.entries} == set(HOOKS)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_error_in_the_last_batch_is_raised_and_forgotten(method):
    """The next use begins without it."""
    failing = [True]

    class Fails(Callback):
        def on_test_batch_end(self, batch, logs=None):
            if failing.pop() if failing else False:
                raise LookupError("late")

        on_predict_batch_end = on_test_batch_end

    wrapped = Asynchronous(Fails())
    call = getattr(compiled(), method)
    with pytest.raises(LookupError, match="late"):
        call(batches(1), callbacks=[wrapped], verbose=0)
    call(batches(1), callbacks=[wrapped], verbose=0)
    assert wrapped._thread is None


@pytest.mark.long("ipu-standin")
def test_what_the_callback_asks_for_is_passed_on():
    """The loop sees the wrapper only."""
    inner = ModelCheckpoint("{val_loss}.safetensors")
    outer = Asynchronous(inner)
    assert (outer.monitors, outer.writes_files, outer.adds) == (("val_loss",), True, ())
    told = Told()
    told.every_updates = 3
    assert Asynchronous(told).every_updates == 3
    assert Asynchronous(Callback()).adds == ()
    assert Asynchronous(Ledger()).adds is None
    model = compiled()
    fit(model, callbacks=[Asynchronous(told)])
    assert told.model is model
    assert told.params["epochs"] == 1
    taken = LambdaCallback(on_non_finite=lambda error: True)
    x, y = batches(1)[0]
    assert fit(model, [(x, y * float("nan"))], callbacks=[Asynchronous(taken)]).epoch == [0]


def test_what_can_not_be_asynchronous_is_refused():
    """Weights that are written while they change would be of no update."""
    text = (
        "Asynchronous takes one object of a subclass of ipufit.callbacks.Callback, got {}. Wrap "
        "each callback on its own."
    )
    for wrong in (Callback, 3, [Callback()]):
        refused(lambda wrong=wrong: Asynchronous(wrong), text.format(repr(wrong)))
    refused(
        lambda: Asynchronous(Asynchronous(Callback())),
        "Asynchronous takes a callback that runs in the calling thread, got one that is already "
        "Asynchronous. Leave one of the two out.",
    )
    text = (
        "Asynchronous takes a callback whose batch hooks need nothing but their logs, but {} "
        "of an execution, which the next execution may have replaced by then. Pass it to fit "
        "directly."
    )
    refused(
        lambda: Asynchronous(ModelCheckpoint("w.safetensors", save_freq=3)),
        text.format("ModelCheckpoint reads the weights"),
    )
    told = Told()
    told.wants_outputs = True
    refused(lambda: Asynchronous(told), text.format("Told reads the outputs"))
    told = Told()
    told.every_updates = 0
    with pytest.raises(ValueError, match="every_updates of Told"):
        Asynchronous(told)
    refused(
        lambda: Asynchronous(Callback(), max_pending=0),
        "max_pending of Asynchronous must be an integer of at least 1, got 0.",
    )
    assert ipufit.callbacks.Asynchronous is Asynchronous
