"""One small network, its data and its training, in Keras and in ipufit."""

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit

keras = pytest.importorskip("keras", reason="needs Keras: nox -s keras")

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 6, generator=GENERATOR)
Y = (X @ torch.randn(6, 3, generator=GENERATOR)).argmax(1)
XV = torch.randn(30, 6, generator=GENERATOR)
YV = torch.randint(0, 3, (30,), generator=GENERATOR)
MICRO_BATCH = 10


def loader(x, y):
    """Batches in order."""
    return DataLoader(TensorDataset(x, y), MICRO_BATCH)


def networks():
    """The same weights twice: a Keras model, and a torch module."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    for dense, linear in zip(model.layers, (module[0], module[2])):
        dense.set_weights([linear.weight.detach().T.numpy(), linear.bias.detach().numpy()])
    return model, module


def fit_keras(model, callbacks=(), epochs=4, lr=0.5, validation=True, **options):
    """Train the Keras model; returns its History."""
    model.compile(
        keras.optimizers.SGD(lr, **options.pop("optimizer", {})),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        X.numpy(),
        Y.numpy(),
        batch_size=MICRO_BATCH,
        epochs=epochs,
        shuffle=False,
        validation_data=(XV.numpy(), YV.numpy()) if validation else None,
        callbacks=list(callbacks),
        verbose=0,
        **options,
    )
    history.history = {k: [float(v) for v in values] for k, values in history.history.items()}
    return history


def fit_ipufit(module, callbacks=(), epochs=4, lr=0.5, validation=True, **options):
    """Train the torch module; returns the model and its History."""
    model = ipufit.Model(module)
    compile_options = options.pop("compile", {})
    model.compile(
        torch.optim.SGD(module.parameters(), lr),
        "cross_entropy",
        metrics=["accuracy"],
        **compile_options,
    )
    history = model.fit(
        loader(X, Y),
        epochs=epochs,
        validation_data=loader(XV, YV) if validation else None,
        callbacks=list(callbacks),
        verbose=0,
        **options,
    )
    return model, history


def same_weights(keras_model, module):
    """Whether both have been trained alike, to the rounding of float32."""
    for dense, linear in zip(keras_model.layers, (module[0], module[2])):
        kernel, bias = dense.get_weights()
        numpy.testing.assert_allclose(kernel.T, linear.weight.detach().numpy(), atol=2e-6)
        numpy.testing.assert_allclose(bias, linear.bias.detach().numpy(), atol=2e-6)


HOOKS = [
    f"on_{kind}{part}_{when}"
    for kind in ("train", "test", "epoch", "predict")
    for part in (("", "_batch") if kind != "epoch" else ("",))
    for when in ("begin", "end")
]


def ledger(base):
    """A callback class of either library that writes down every call."""

    class Ledger(base):
        def __init__(self):
            super().__init__()
            self.calls = []

    def hook(name):
        def call(self, *args, **kwargs):
            logs = kwargs.get("logs", args[-1] if args else None)
            index = args[0] if args and isinstance(args[0], int) else None
            # Keras sorts the names, we begin with the loss; "updates" and "samples" are ours.
            keys = sorted(set(logs or {}) - {"updates", "samples"})
            self.calls.append((name, index, keys))

        return call

    for name in HOOKS:
        setattr(Ledger, name, hook(name))
    return Ledger()
