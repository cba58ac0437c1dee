"""Every callback's ledger: which hooks it gets, in which order, with which arguments and logs."""

import contextlib
import functools
import urllib.request

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit import callbacks
from ipufit.callbacks import Callback
from tests.caching import once_per_engine
from tests.faulty import assert_same_bits, flat
from tests.reference import follow

HOOKS = [name for name in vars(Callback) if name.startswith(("on_", "set_")) or name == "close"]
MAKERS = {
    "Asynchronous": lambda folder: callbacks.Asynchronous(Callback()),
    "CSVLogger": lambda folder: callbacks.CSVLogger(folder / "log.csv"),
    "EarlyStopping": lambda folder: callbacks.EarlyStopping(patience=9, restore_best_weights=True),
    "ExperimentLogger": lambda folder: callbacks.ExperimentLogger(lambda values, step: None),
    "History": lambda folder: callbacks.History(),
    "JSONLinesLogger": lambda folder: callbacks.JSONLinesLogger(folder / "log.jsonl"),
    "LambdaCallback": lambda folder: callbacks.LambdaCallback(on_epoch_end=lambda *args: None),
    "LearningRateScheduler": lambda folder: callbacks.LearningRateScheduler(lambda epoch: 0.01),
    "ModelCheckpoint": lambda folder: callbacks.ModelCheckpoint(
        folder / "{epoch}-{val_loss:.6f}.safetensors", save_best_only=True
    ),
    "ProgbarLogger": lambda folder: callbacks.ProgbarLogger(2),
    "ReduceLROnPlateau": lambda folder: callbacks.ReduceLROnPlateau(patience=1, min_delta=9),
    "RemoteMonitor": lambda folder: callbacks.RemoteMonitor(),
    "SwapEMAWeights": lambda folder: callbacks.SwapEMAWeights(swap_on_epoch=True),
    "TensorBoard": lambda folder: callbacks.TensorBoard(folder / "board"),
    "TerminateOnNaN": lambda folder: callbacks.TerminateOnNaN(),
    "Timer": lambda folder: callbacks.Timer(1e6),
}
ADDED = {"LearningRateScheduler": ["learning_rate"], "ReduceLROnPlateau": ["learning_rate"]}


class Model(ipufit.Model):
    """Has an average of the weights, which is the weights."""

    def swap_ema_weights(self):
        pass


def written_down(callback, ledger):
    """The callback, every call of a hook of which is put into the ledger first."""

    def wrap(hook, own):
        def call(*args):
            shown = args
            if hook.startswith("set_"):
                shown = ()
            elif hook.startswith("on_"):
                logs = dict(args[-1])
                counts = (logs.pop("updates"), logs.pop("samples")) if "updates" in logs else ()
                shown = (*args[:-1], *counts, *sorted(logs))
            ledger.append((hook, *shown))
            return own(*args)

        return call

    for hook in HOOKS:
        setattr(callback, hook, wrap(hook, getattr(callback, hook)))
    return callback


def loader(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)


@pytest.fixture
def make(request, tmp_path, monkeypatch):
    """Makes the callback of a name, with whatever it needs around it."""

    def made(name, folder="0"):
        if name == "TensorBoard":
            pytest.importorskip("tensorboard")
        answer = contextlib.nullcontext()
        monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **options: answer)
        (tmp_path / folder).mkdir(exist_ok=True)
        return MAKERS[name](tmp_path / folder)

    return made


@functools.lru_cache(maxsize=None)
def first_weights():
    torch.manual_seed(0)
    return nn.Linear(3, 1).double().state_dict()


@once_per_engine
def recorded_once():
    """One model for all fits: most of the time would go into recording its programs."""
    model = Model(nn.Linear(3, 1).double())
    model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "mse", metrics=["mae"])
    return model


def untrained():
    """The model as it was at first; its optimizer has no state to be forgotten."""
    model = recorded_once()
    model.module.load_state_dict(first_weights())
    model.optimizer.param_groups[0]["lr"] = 0.1
    return model


def trained(callback, di, **options):
    """A fit of 7 updates of up to 4 samples an epoch, and 4 micro-batches of validation."""
    model = untrained()
    settings = {
        "epochs": 2,
        "gradient_accumulation": 2,
        "device_iterations": di,
        "validation_data": ipufit.Validation(loader(7, 1), device_iterations=2),
        "seed": 0,
        "verbose": 0,
    }
    model.fit(loader(25, 0), callbacks=[callback], **{**settings, **options})
    return model


VALUES = ("loss", "mae")
EPOCH = ("loss", "mae", "val_loss", "val_mae")


def expected(ends, added):
    """The ledger of ``trained``, whose executions end with these updates."""
    starts = [0, *(end + 1 for end in ends[:-1])]
    epochs = []
    for epoch in range(2):
        epochs.append(("on_epoch_begin", epoch))
        for start, end in zip(starts, ends):
            epochs.append(("on_train_batch_begin", start))
            samples = min(25, 4 * (end + 1))
            epochs.append(("on_train_batch_end", end, end + 1, samples, *VALUES))
        epochs += [
            ("on_test_begin",),
            ("on_test_batch_begin", 0),
            ("on_test_batch_end", 1, 2, 4, *VALUES),
            ("on_test_batch_begin", 2),
            ("on_test_batch_end", 3, 4, 7, *VALUES),
            ("on_test_end", *VALUES),
            ("on_epoch_end", epoch, *EPOCH),
        ]
    begin = [("set_model",), ("set_params",), ("on_train_begin",)]
    end = [("on_train_end", *sorted([*EPOCH, *added])), ("close",)]
    return [*begin, *epochs, *end]


def test_every_callback_is_here():
    """A new one must not be forgotten."""
    assert set(MAKERS) == set(callbacks.__all__) - {"Callback", "CallbackList"}


ENDS = {1: [0, 1, 2, 3, 4, 5, 6], 3: [2, 5, 6], 100: [6]}


# Executions are not made by callbacks: of those of other lengths one callback shows the hooks.
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("name", "di", "ends"),
    [
        pytest.param(
            *(name, di, ends),
            marks=[] if di == 3 or name == "Asynchronous" else pytest.mark.long,
        )
        for di, ends in ENDS.items()
        for name in MAKERS
    ],
)
def test_the_ledger_of_fit(make, name, di, ends):
    """Hooks of batches once an execution, all others the same whatever device_iterations is."""
    ledger = []
    trained(written_down(make(name), ledger), di)
    assert ledger == expected(ends, ADDED.get(name, []))


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("name", MAKERS)
def test_the_ledger_of_evaluate_and_predict(make, name):
    """Any callback may be passed there; what is for training does nothing."""
    ledger = []
    callback = written_down(make(name), ledger)
    model = trained(Callback(), 1)
    before = flat(model.module.state_dict())
    model.evaluate(loader(7, 1), callbacks=[callback], device_iterations=3, verbose=0)
    model.predict(loader(7, 1), callbacks=[callback], device_iterations=3, verbose=0)
    assert ledger == [
        ("set_model",),
        ("set_params",),
        ("on_test_begin",),
        ("on_test_batch_begin", 0),
        ("on_test_batch_end", 2, 3, 6, *VALUES),
        ("on_test_batch_begin", 3),
        ("on_test_batch_end", 3, 4, 7, *VALUES),
        ("on_test_end", *VALUES),
        ("close",),
        ("set_model",),
        ("set_params",),
        ("on_predict_begin",),
        ("on_predict_batch_begin", 0),
        ("on_predict_batch_end", 2, "outputs"),
        ("on_predict_batch_begin", 3),
        ("on_predict_batch_end", 3, "outputs"),
        ("on_predict_end",),
        ("close",),
    ]
    assert_same_bits(flat(model.module.state_dict()), before)


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("name", sorted(set(MAKERS) - {"TensorBoard"}))
def test_what_a_callback_does_is_the_same_for_every_device_iterations(make, name, tmp_path):
    """Weights, history and files to the last bit."""
    results = []
    for di in (1, 3, 100):
        model = trained(make(name, str(di)), di, epochs=4)
        files = {p.name: p.read_bytes() for p in (tmp_path / str(di)).iterdir()}
        results.append((model.history.history, files, flat(model.module.state_dict())))
    for history, files, weights in results[1:]:
        assert (history, files) == results[0][:2]
        assert_same_bits(weights, results[0][2])


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("name", MAKERS)
def test_an_error_beside_a_callback_leaves_the_state_and_surfaces(make, name):
    """Each ends what it has begun, and the weights are those of the updates that were made."""

    class Fails(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise LookupError("beside")

    ledger = []
    callback = written_down(make(name), ledger)
    fails = Fails()
    model = untrained()
    with pytest.raises(LookupError, match="beside"):
        model.fit(
            loader(25, 0), callbacks=[callback, fails], validation_data=loader(7, 1), verbose=0
        )
    assert ledger[-2:] == [("on_train_end",), ("close",)]
    assert model.history.epoch == []
    twin = nn.Linear(3, 1).double()
    twin.load_state_dict(first_weights())
    rate = 0.01 if name == "LearningRateScheduler" else 0.1
    optimizer = torch.optim.SGD(twin.parameters(), lr=rate)
    follow(twin, optimizer, list(loader(25, 0))[:5], nn.functional.mse_loss)
    for value, wanted in zip(model.module.parameters(), twin.parameters()):
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)
