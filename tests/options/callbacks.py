"""Options of the callbacks."""

import contextlib
import io
import sys
import threading
import types
import urllib.request
from unittest import mock

import torch

import ipufit
from ipufit import callbacks as given_callbacks
from ipufit.callbacks import Callback, CallbackList, LambdaCallback
from ipufit.callbacks.callback import EVENTS
from tests.told import Gives

from . import FLIPS, Ledger, Made, With, X, Y, files, folder, linear, of, recorded

__all__ = ["FLIPS"]

SCORES = [3.0, 2.5, 2.0, 2.1, 2.2, 2.3, 2.4]


class Moves(Callback):
    """Stands for training where nothing is computed: the weights are the number of the epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        with torch.no_grad():
            self.model.module.weight.fill_(epoch)


def judging(make):
    """Epochs and weights of a fit in which a callback watches a score."""

    def observe(**options):
        options = {"monitor": "score", "mode": "min", **options}
        scores = [Gives(score=SCORES, other=SCORES[::-1], val_loss=[1.0] * 7), Moves()]
        model, history = recorded([*scores, make(**options)], 7)
        return history.history, model.module.weight.detach()

    return observe


of(
    "callbacks.EarlyStopping",
    judging(given_callbacks.EarlyStopping),
    monitor=("score", "other"),
    min_delta=(0, 0.6),
    patience=(0, 3),
    verbose=(0, 1),
    mode=("min", "max"),
    baseline=With(None, 1.0, patience=2),
    restore_best_weights=(False, True),
    start_from_epoch=(0, 4),
)
of(
    "callbacks.ReduceLROnPlateau",
    judging(lambda **options: given_callbacks.ReduceLROnPlateau(**{"patience": 1, **options})),
    monitor=("score", "other"),
    factor=(0.1, 0.5),
    patience=(1, 3),
    verbose=(0, 1),
    mode=("min", "max"),
    min_delta=(1e-4, 0.6),
    cooldown=(0, 3),
    min_lr=(0.0, 0.05),
)


def written(make):
    """Files after two fits with a callback, and what it says."""

    def observe(**options):
        with folder() as place:
            for key in ("filename", "filepath", "log_dir"):
                if key in options:
                    options[key] = str(place / options[key])
            callback = make(place, **options)
            for _ in range(2):
                recorded([Gives(score=SCORES, other=SCORES[::-1]), Moves(), callback])
            return files(place)

    return observe


of(
    "callbacks.CSVLogger",
    written(lambda place, **o: given_callbacks.CSVLogger(**{"filename": place / "a.csv", **o})),
    filename=("one.csv", "other.csv"),
    separator=(",", ";"),
    append=(False, True),
)
of(
    "callbacks.JSONLinesLogger",
    written(
        lambda place, **o: given_callbacks.JSONLinesLogger(**{"filename": place / "a.jsonl", **o})
    ),
    filename=("one.jsonl", "other.jsonl"),
    append=(False, True),
    every_updates=(None, 1),
)
BEST = {"save_best_only": True}
of(
    "callbacks.ModelCheckpoint",
    written(
        lambda place, **o: given_callbacks.ModelCheckpoint(
            **{
                "filepath": place / "{epoch}.safetensors",
                "monitor": "score",
                "mode": "min",
                **o,
            }
        )
    ),
    filepath=("{epoch}.safetensors", "last.safetensors"),
    monitor=With("score", "other", **BEST),
    verbose=(0, 1),
    save_best_only=(False, True),
    save_weights_only=(True, False),
    mode=With("min", "max", **BEST),
    save_freq=With("epoch", 1, filepath="{epoch}.safetensors", verbose=1),
    initial_value_threshold=With(None, 2.2, **BEST),
    keep=(None, 1),
)


LINES = []


class Writer:
    """Stands for tensorboard, which is an extra."""

    def __init__(self, path):
        self.path = path

    def add_scalar(self, *values):
        LINES.append((self.path, *map(str, values)))

    def add_histogram(self, name, values, epoch):
        LINES.append((self.path, name, epoch))

    def flush(self):
        pass

    close = flush


class Tracker:
    """Stands for MLflow."""

    def __init__(self):
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append(("metrics", *metrics, step))

    def log_params(self, params):
        self.lines.append(("params", *params))


def tracked(logger=None, **options):
    tracker = Tracker() if logger is None else logger()
    recorded([given_callbacks.ExperimentLogger(tracker, **options)])
    return tracker.lines


class OtherTracker(Tracker):
    """Told of nothing but values."""

    log_params = None


of(
    "callbacks.ExperimentLogger",
    tracked,
    logger=(Tracker, OtherTracker),
    every_updates=(None, 1),
    log_params=(True, False),
)


def drawn(**options):
    fake = types.ModuleType("tensorboard")
    fake.SummaryWriter = Writer
    del LINES[:]
    with mock.patch.dict(sys.modules, {"torch.utils.tensorboard": fake}):
        recorded([given_callbacks.TensorBoard(**options)])
    return list(LINES)


of(
    "callbacks.TensorBoard",
    drawn,
    log_dir=("logs", "other"),
    histogram_freq=(0, 2),
    update_freq=("epoch", "batch"),
)


def sent(**options):
    seen = []

    def urlopen(request, timeout):
        seen.append((request.full_url, request.data.decode(), request.headers, timeout))
        return mock.MagicMock()

    with mock.patch.object(urllib.request, "urlopen", urlopen):
        recorded([given_callbacks.RemoteMonitor(**options)], 1)
    return seen


of(
    "callbacks.RemoteMonitor",
    sent,
    root=("http://localhost:9000", "http://localhost:9001"),
    path=("/publish/epoch/end/", "/other/"),
    field=("data", "other"),
    headers=(None, {"X-key": "1"}),
    send_as_json=(False, True),
    timeout=(10.0, 1.0),
)
of(
    "callbacks.LearningRateScheduler",
    lambda schedule=lambda epoch: 0.1, verbose=0: (
        recorded([given_callbacks.LearningRateScheduler(schedule, verbose)])[1].history
    ),
    schedule=(lambda epoch: 0.1, lambda epoch: 0.1 / (1 + epoch)),
    verbose=(0, 1),
)


def redrawn(verbose):
    """Whether a line is drawn again and again; how often, and how wide it is, differs by itself."""
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        recorded([given_callbacks.ProgbarLogger(verbose)])
    return "\r" in shown.getvalue()


of(
    "callbacks.ProgbarLogger",
    redrawn,
    verbose=(1, 2),
)


def timed(stage=None, **options):
    timer = given_callbacks.Timer(**options)
    _, history = recorded([timer])
    return history.epoch if stage is None else timer.time_elapsed(stage) > 0


of("callbacks.Timer", timed, duration=(None, 0.0), verbose=With(0, 1, duration=0.0))
of("callbacks.Timer.time_elapsed", timed, stage=("train", "predict"))


def blown_up(callback):
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy")
    x = X.clone()
    x[8] = float("nan")
    history = model.fit(x, Y, batch_size=4, shuffle=False, seed=0, verbose=0, callbacks=[callback])
    return history.history


of(
    "callbacks.TerminateOnNaN",
    lambda raise_error: blown_up(given_callbacks.TerminateOnNaN(raise_error)),
    raise_error=(False, True),
)


def swapped(swap_on_epoch):
    seen = []

    def look(epoch, logs):
        seen.append(model.module.weight.detach().clone())

    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy", ema=ipufit.EMA(momentum=0.5))
    callbacks = [given_callbacks.SwapEMAWeights(swap_on_epoch), LambdaCallback(on_epoch_end=look)]
    model.fit(X, Y, epochs=2, seed=0, verbose=0, callbacks=callbacks)
    return seen


of("callbacks.SwapEMAWeights", swapped, swap_on_epoch=(False, True))


def hooked(**hooks):
    """What is printed where one hook is given in fit, evaluate and predict."""
    callback = LambdaCallback(**hooks)
    if "on_non_finite" in hooks:
        return blown_up(callback)
    rare = [hook for hook in hooks if "logs" not in EVENTS[hook].arguments]
    if rare:
        return [CallbackList([callback], None, {}).call(hook) for hook in rare]
    model, _ = recorded([callback], 1)
    model.evaluate(X, Y, callbacks=[callback], verbose=0)
    model.predict(X, callbacks=[callback], verbose=0)
    return None


def says(name):
    def hook(*args):
        print(name, len(args))
        return True

    return hook


of("callbacks.LambdaCallback", hooked, **{name: (None, says(name)) for name in EVENTS})


class Waits(Callback):
    """A batch hook that does not return before it is told to."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()

    def on_train_batch_end(self, batch, logs=None):
        self.go.wait(10)


def waited(max_pending):
    """Whether training has to wait while three hooks are due and none returns."""
    slow = Waits()
    wrapped = given_callbacks.Asynchronous(slow, max_pending)

    def train():
        for batch in range(3):
            wrapped.on_train_batch_end(batch, {})

    thread = threading.Thread(target=train)
    thread.start()
    # It has done it at once, or will never do it.
    thread.join(0.3 if max_pending == 1 else 10)
    waits = thread.is_alive()
    slow.go.set()
    thread.join()
    wrapped.on_train_end({})
    wrapped.close()
    return waits


def beside(callback):
    recorded([given_callbacks.Asynchronous(callback)], 1)
    return callback.calls


of("callbacks.Asynchronous", waited, max_pending=(64, 1))
of("callbacks.Asynchronous", beside, callback=(Made(Ledger), Made(lambda: None)))


def listed(callbacks=None, model=None, params=None, call=None):
    ledger = Ledger()
    both = CallbackList([ledger] if callbacks is None else callbacks, model, params or {})
    both.call("on_epoch_end", 1, {})
    if call is not None:
        call(both)
    return ledger.calls, ledger.model, ledger.params


of(
    "callbacks.CallbackList",
    listed,
    callbacks=(None, []),
    model=(None, "model"),
    params=(None, {"epochs": 1}),
)


class Shows(Callback):
    """Wants outputs, and answers what it is told."""

    wants_outputs = True

    def on_non_finite(self, error):
        return error == "yes"

    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch)

    def on_train_begin(self, logs=None):
        print("begin", logs)


def calling(method):
    def observe(hook=None, args=None, outputs=None):
        model = types.SimpleNamespace(outputs=None)
        both = CallbackList([Shows()], model, {})
        if method == "show_outputs":
            both.show_outputs(outputs)
            return model.outputs
        return getattr(both, method)(hook, *(args or []))

    return observe


of("callbacks.CallbackList.show_outputs", calling("show_outputs"), outputs=([1], [2]))
of(
    "callbacks.CallbackList.call",
    calling("call"),
    hook=With("on_epoch_end", "on_train_begin", args=[1]),
    args=With(["yes"], ["no"], hook="on_non_finite"),
)
