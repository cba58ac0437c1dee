"""Training that ends early: a loss that is no number, Ctrl-C. Nothing that was learned is lost."""

import contextlib
import math
import os
import signal
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ipufit
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.errors import NonFiniteLossError
from tests.engines import runs_eagerly
from tests.faulty import (
    Net,
    Told,
    Watched,
    assert_clean,
    assert_same_bits,
    batches,
    compiled,
    fit,
    flat,
    loader,
    state,
)
from tests.tape import Tapes


class Spoilt:
    """A loader with one bad value in one epoch.

    Args:
        items: its batches.
        epoch: when the value comes; None for never.
        index: in which batch.
        value: put into the target, so that the loss takes it over.
    """

    def __init__(self, items, epoch=None, index=0, value=float("nan")):
        self.items = items
        self.place = (epoch, index)
        self.value = value
        self.epoch = -1

    def __iter__(self):
        self.epoch += 1
        for index, (x, y) in enumerate(self.items):
            if (self.epoch, index) == self.place:
                y = y.clone()
                y[-1, -1] = self.value
            yield x, y


def stop_after(updates, epoch):
    """A callback that ends fit when so many updates of an epoch are done."""

    def look(told, last):
        if told.hooks.count("on_epoch_begin") == epoch + 1 and last + 1 >= updates:
            told.model.stop_training = True

    return Told(on_train_batch_end=look)


def pair(left=None, right=None):
    """Two compiled models with the same weights."""
    model, twin = compiled(**(left or {})), compiled(**(right or {}))
    twin.module.load_state_dict(model.module.state_dict())
    return model, twin


def assert_goes_on_alike(model, twin, **options):
    """Statistics of every replica, the count of updates and all that shows only later agree."""
    more = batches(8, seed=5)
    assert fit(model, more, **options).history == fit(twin, more, **options).history
    assert_same_bits(state(model), state(twin))


# ---- a loss that is no number -------------------------------------------------------------------

NAN = (float("nan"), "nan")
INF = (1e30, "inf")  # squared, it is more than float32 holds


@pytest.mark.long("ipu-standin")
@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize(
    ("ga", "replicas", "value", "shown"),
    [(1, 1, *NAN), (2, 1, *NAN), (1, 2, *NAN), (2, 2, *NAN), (2, 2, *INF)],
)
@pytest.mark.parametrize("di", [1, 4])
def test_a_loss_that_is_no_number_ends_training_before_its_update(
    di, ga, replicas, value, shown, late
):
    """The state is that of a run that stopped just before, wherever the loss is read."""
    group, updates, bad = ga * replicas, 10, 6
    items = batches(updates * group)
    data = Spoilt(items, epoch=1, index=bad * group + group - 1, value=value)
    engine, other = Watched(late=late), Watched()
    told = Told()
    model, twin = pair({"engine": lambda: engine}, {"engine": lambda: other})
    plan = {"gradient_accumulation": ga, "ipus": replicas}
    with pytest.raises(NonFiniteLossError) as caught:
        fit(model, data, epochs=3, device_iterations=di, callbacks=[told], **plan)
    error = caught.value
    text = str(error)
    assert text.startswith(
        f"the loss must be finite, but it became {shown} in update {updates + bad}. The weights, "
        "buffers and optimizer state are those from before that update. "
    )
    where = f"in replica {replicas - 1}, micro-batch {group - 1} of {group}"
    assert ("The data was not finite: nan in" if value is NAN[0] else "mse_loss.default") in text
    assert where in text
    assert (error.found.cause == "data") == (value is NAN[0])
    assert (error.update, error.epoch, str(error.value)) == (updates + bad, 1, shown)
    assert engine.built == engine.closed == 1
    assert told.hooks[-1] == "on_train_end"
    expected = fit(twin, Spoilt(items), epochs=3, callbacks=[stop_after(bad, 1)], **plan)
    assert model.history.epoch == [0]
    assert model.history.history["loss"] == expected.history["loss"][:1]
    assert_same_bits(state(model), state(twin))
    assert_same_bits(flat(engine.left.buffers), flat(other.left.buffers))
    assert len(engine.left.buffers) == replicas
    assert_clean(model)
    assert_goes_on_alike(model, twin, device_iterations=di, **plan)


class Followed(nn.Module):
    """A layer, and a frozen one that follows it in forward, as a momentum encoder does."""

    def __init__(self, by_data):
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.slow = nn.Linear(2, 1), nn.Linear(2, 1).requires_grad_(False)
        self.by_data = by_data

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.layer.parameters()):
                    target = slow.data if self.by_data else slow
                    target.mul_(0.9).add_(fast, alpha=0.1)
        return self.layer(x) + self.slow(x)


@pytest.mark.both_engines
@pytest.mark.grid
@pytest.mark.parametrize("by_data", [False, True], ids=["parameter", "data"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("di", [1, 4])
@pytest.mark.parametrize("way", ["recorded", "late", "replayed", "eager"])
def test_a_frozen_parameter_that_forward_changes_goes_back_too(way, di, accumulation, by_data):
    """It is a weight, and the error says that weights are those from before the update."""

    def trained(updates):
        engine = EmbeddedEngine()
        engine.as_device = way in ("late", "replayed")
        engine.tape = Tapes() if way == "replayed" else None
        model = ipufit.Model(Followed(by_data), engine=lambda: engine)
        model.compile("sgd", "mse", run_eagerly=way == "eager")
        x = torch.ones(4 * accumulation * updates, 2)
        x[4 * accumulation * 10 :] = math.nan
        work = {"device_iterations": di, "gradient_accumulation": accumulation, "verbose": 0}
        fails = pytest.raises(NonFiniteLossError, match=" in update 10")
        with fails if updates > 10 else contextlib.nullcontext():
            model.fit(x, x[:, :1], batch_size=4, shuffle=False, **work)
        return flat(model.module.state_dict())

    assert_same_bits(trained(12), trained(10))


class FollowedLater(Followed):
    """Its frozen layer follows from the fifth micro-batch on, in one of two ways."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls < 5:
            return self.layer(x) + self.slow(x)
        if not self.by_data:
            return super().forward(x)
        for slow, fast in zip(self.slow.parameters(), self.layer.parameters()):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        return self.layer(x) + self.slow(x)


@runs_eagerly
@pytest.mark.parametrize("by_data", [False, True], ids=["in place", "assigned"])
@pytest.mark.parametrize("di", [1, 12])
def test_a_parameter_that_forward_changes_later_goes_back_too(di, by_data):
    """The module itself may do something else in every micro-batch."""
    states = []
    for updates in (12, 10):
        net = FollowedLater(by_data)
        model = ipufit.Model(net)
        model.compile("sgd", "mse", run_eagerly=True)
        x = torch.ones(4 * updates, 2)
        x[4 * 10 :] = math.nan
        with contextlib.suppress(NonFiniteLossError):
            model.fit(x, x[:, :1], batch_size=4, shuffle=False, device_iterations=di, verbose=0)
        assert net.calls == min(updates, 11)
        states.append(flat(net.state_dict()))
    assert_same_bits(*states)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("bad", [0, 3, 4, 9])
def test_the_first_and_the_last_update_of_an_execution_may_be_the_bad_one(bad, late):
    """The borders of executions, and the smaller last execution, are where counting goes wrong."""
    items = batches(10)
    engine = Watched(late=late)
    model, twin = pair({"engine": lambda: engine})
    with pytest.raises(NonFiniteLossError) as caught:
        fit(model, Spoilt(items, 0, bad), device_iterations=4)
    assert (caught.value.update, caught.value.epoch) == (bad, 0)
    if bad:
        fit(twin, items[:bad])
    assert_same_bits(flat_weights(model), flat_weights(twin))
    assert model.history.epoch == []
    assert_clean(model)
    assert fit(model, items).epoch == [0]


def flat_weights(model):
    """The module's part of the state: an optimizer that has not begun lists less."""
    return {name: t.clone() for name, t in model.module.state_dict().items()}


@runs_eagerly
def test_eagerly_a_loss_that_is_no_number_is_reported_alike():
    """The debugging mode must stop at the same place."""
    items = batches(10)
    model, twin = pair({"run_eagerly": True}, {"run_eagerly": True})
    with pytest.raises(NonFiniteLossError) as caught:
        fit(model, Spoilt(items, 0, 6), device_iterations=4)
    assert (caught.value.update, caught.value.epoch) == (6, 0)
    fit(twin, items[:6])
    assert_same_bits(state(model), state(twin))


@pytest.mark.long("ipu-standin")
def test_evaluate_reports_a_loss_that_is_no_number_as_it_is():
    """Nothing can be spoilt there, and the number is the answer."""
    model = compiled()
    before = state(model)
    with pytest.warns(UserWarning, match=r"that of batch 1 is nan, and so is the mean\. The data"):
        loss = model.evaluate(Spoilt(batches(3), 0, 1), verbose=0)["loss"]
    assert loss != loss
    assert_same_bits(state(model), before)


# ---- Ctrl-C -------------------------------------------------------------------------------------


def ctrl_c(*_):
    """What the terminal does."""
    os.kill(os.getpid(), signal.SIGINT)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_an_interrupt_waits_for_the_recording_to_end(method):
    """One that tears a recording can leave torch recording, and nothing works any more."""
    told = []

    class Interrupted(Net):
        def forward(self, x):
            if not told:
                told.append("begins")
                ctrl_c()
            out = super().forward(x)
            told.append("ends")
            return out

    model = compiled(Interrupted())
    before = state(model)
    data = [x for x, _ in batches(3)] if method == "predict" else batches(3)
    with pytest.raises(KeyboardInterrupt):
        getattr(model, method)(data, verbose=0, seed=7)
    assert told[:2] == ["begins", "ends"]
    assert_clean(model)
    assert_same_bits(state(model), before)
    fit(model)


class Interrupting(Dataset):
    """Raises at one fetch, counted over all epochs."""

    def __init__(self, items, fetch):
        self.samples = [pair for batch in items for pair in zip(*batch)]
        self.left = fetch

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt
        return self.samples[index]


def in_dataset(updates):
    """Epochs of 10 updates of 4 samples; the interrupt comes while the data of epoch 1 is read."""
    return {"x": DataLoader(Interrupting(batches(10), 4 * (10 + updates) + 2), batch_size=4)}


def in_callback(updates):
    def look(told, last):
        if told.hooks.count("on_epoch_begin") == 2 and last + 1 == updates:
            raise KeyboardInterrupt

    return {"callbacks": [Told(on_train_batch_end=look)]}


def signal_in_callback(updates):
    def look(told, last):
        if told.hooks.count("on_epoch_begin") == 2 and last + 1 == updates:
            ctrl_c()

    return {"callbacks": [Told(on_train_batch_end=look)]}


@pytest.mark.long
@pytest.mark.parametrize("make", [in_dataset, in_callback, signal_in_callback])
@pytest.mark.parametrize("di", [1, 2])
def test_an_interrupt_between_executions_keeps_the_last_one(make, di):
    """Stopping by hand is the most usual end of a training; its weights are the ones to save."""
    engine = Watched()
    told = Told()
    model, twin = pair({"engine": lambda: engine})
    options = make(6)
    callbacks = [told, *options.pop("callbacks", [])]
    with pytest.raises(KeyboardInterrupt):
        fit(
            model,
            options.pop("x", batches(10)),
            epochs=3,
            device_iterations=di,
            callbacks=callbacks,
        )
    expected = fit(twin, batches(10), epochs=3, callbacks=[stop_after(6, 1)])
    assert_ended_like(model, twin, expected, told, engine)


def assert_ended_like(model, twin, expected, told, engine):
    """State, history, callbacks and memory after an interrupt in epoch 1."""
    assert_same_bits(state(model), state(twin))
    assert model.history.epoch == [0]
    assert model.history.history["loss"] == expected.history["loss"][:1]
    assert told.hooks.count("on_epoch_end") == 1
    assert told.hooks[-1] == "on_train_end"
    assert engine.built == engine.closed == 1
    assert_clean(model)
    assert_goes_on_alike(model, twin)


class Signalled(Net):
    """Gets a signal while it computes one update; runs eagerly, as a recording has no such moment.

    Args:
        forward: number of the forward pass that gets it.
        times: how many signals come.
    """

    def __init__(self, forward, times=1):
        super().__init__()
        self.left = forward
        self.times = times

    def forward(self, x):
        self.left -= 1
        y = super().forward(x)
        if self.left == -1:
            for _ in range(self.times):
                ctrl_c()
        return y


@pytest.mark.long
@pytest.mark.parametrize(("di", "kept"), [(1, 7), (4, 8)])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@runs_eagerly
def test_ctrl_c_within_an_execution_waits_for_its_end(di, kept, late):
    """Half an execution would leave weights that no plan can tell of."""
    engine = Watched(late=late)
    told = Told()
    # Forward 16, counted from 0, is update 6 of epoch 1.
    signalled = {"net": Signalled(16), "engine": lambda: engine, "run_eagerly": True}
    model, twin = pair(signalled, {"run_eagerly": True})
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches(10), epochs=3, device_iterations=di, callbacks=[told])
    expected = fit(twin, batches(10), epochs=3, callbacks=[stop_after(kept, 1)])
    assert_ended_like(model, twin, expected, told, engine)


@pytest.mark.long("ipu-standin")
def test_ctrl_c_within_a_recorded_execution_waits_for_its_end():
    """The usual case: no Python of the user's is running."""

    def before_run(program, execution):
        if execution == 4 and engine.built == 1:
            ctrl_c()

    engine = Watched(before_run)
    told = Told()
    model, twin = pair({"engine": lambda: engine})
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches(10), epochs=3, device_iterations=4, callbacks=[told])
    expected = fit(twin, batches(10), epochs=3, callbacks=[stop_after(8, 1)])
    assert_ended_like(model, twin, expected, told, engine)


@runs_eagerly
def test_a_second_ctrl_c_interrupts_at_once_between_two_updates():
    """A long execution must not hold the terminal; the update that was begun is not half done."""
    engine = Watched()
    told = Told()
    signalled = {"net": Signalled(16, times=2), "engine": lambda: engine, "run_eagerly": True}
    model, twin = pair(signalled, {"run_eagerly": True})
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches(10), epochs=3, device_iterations=4, callbacks=[told])
    expected = fit(twin, batches(10), epochs=3, callbacks=[stop_after(6, 1)])
    assert_ended_like(model, twin, expected, told, engine)


@pytest.mark.long("ipu-standin")
def test_ctrl_c_while_the_program_is_closed_waits_for_that():
    """Parameters that still share memory would be saved many times over."""
    engine = Watched(before_close=ctrl_c)
    model, twin = pair({"engine": lambda: engine})
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches(10))
    fit(twin, batches(10))
    assert_same_bits(state(model), state(twin))
    assert_clean(model)
    engine._before_close = None
    assert_goes_on_alike(model, twin)


@pytest.mark.long("ipu-standin")
def test_ctrl_c_while_the_module_is_recorded_leaves_everything():
    """Recording a large module takes a while, and it is when a wrong argument is noticed."""

    class Slow(Net):
        def forward(self, x):
            ctrl_c()
            return super().forward(x)

    engine = Watched()
    model = compiled(Slow(), engine=lambda: engine)
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        fit(model)
    assert_same_bits(state(model), before)
    assert engine.built == engine.closed == 1
    assert_clean(model)


@pytest.mark.long("ipu-standin")
def test_a_handler_of_the_user_stays_in_charge():
    """Cluster jobs save a checkpoint there; it must be called, and at once."""
    called = []
    model = compiled()
    before = signal.signal(signal.SIGINT, lambda *_: called.append(len(called)))
    try:
        fit(model, callbacks=[Told(on_train_batch_end=ctrl_c)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert called == [0, 1, 2]
    assert model.history.epoch == [0]


@pytest.mark.long("ipu-standin")
def test_fit_runs_outside_the_main_thread():
    """Signals can't be handled there, and a notebook or a server trains there."""
    model = compiled()
    thread = threading.Thread(target=lambda: fit(model))
    thread.start()
    thread.join()
    assert model.history.epoch == [0]


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_an_interrupted_inference_leaves_the_module_as_it_was(method):
    """It sets eval mode for a while, which must not stay."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    before = state(model)
    flags = [module.training for module in model.module.modules()]
    hook = "on_test_batch_end" if method == "evaluate" else "on_predict_batch_end"
    with pytest.raises(KeyboardInterrupt):
        getattr(model, method)(loader(), callbacks=[Told(**{hook: interrupt})], verbose=0)
    assert_same_bits(state(model), before)
    assert [module.training for module in model.module.modules()] == flags
    assert engine.built == engine.closed == 1
    assert_clean(model)


@pytest.mark.long("ipu-standin")
def test_an_interrupted_validation_keeps_the_epoch():
    """The weights are those of the finished epoch, and training mode is back."""
    told = Told()
    stop = Told(on_test_batch_end=interrupt)
    engine = Watched()
    model, twin = pair({"engine": lambda: engine})
    with pytest.raises(KeyboardInterrupt):
        fit(model, batches(4), validation_data=batches(2), callbacks=[told, stop])
    fit(twin, batches(4))
    assert_same_bits(state(model), state(twin))
    assert told.hooks[-1] == "on_train_end"
    assert model.history.epoch == []
    assert engine.built == engine.closed
    assert_clean(model)
    assert torch.equal(
        model.predict(batches(1)[:1], verbose=0), twin.predict(batches(1), verbose=0)
    )


@pytest.mark.long("ipu-standin")
@pytest.mark.few("on_train_begin", "on_train_batch_begin", "on_epoch_end")
@pytest.mark.parametrize(
    "hook",
    ["on_train_begin", "on_epoch_begin", "on_train_batch_begin", "on_epoch_end", "on_train_end"],
)
def test_an_error_of_a_callback_surfaces_as_it_is(hook):
    """The program lets the module go, wherever the callback fails."""

    def fail(told, argument):
        raise LookupError(hook)

    engine = Watched()
    model = compiled(engine=lambda: engine)
    with pytest.raises(LookupError, match=hook):
        fit(model, epochs=2, callbacks=[Told(**{hook: fail})])
    assert engine.built == engine.closed == 1
    assert_clean(model)
    assert fit(model).epoch == [0]
