"""One small network, its data and its training, in Keras and in ipufit."""

import dataclasses
import functools
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ipufit

keras = pytest.importorskip("keras", reason="needs Keras: nox -s keras")

# Keras hands torch tensors to NumPy in a way that NumPy 2 warns of.
from_keras = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(60, 6, generator=GENERATOR).numpy()
Y = (X @ torch.randn(6, 3, generator=GENERATOR).numpy()).argmax(1)
XV = torch.randn(30, 6, generator=GENERATOR).numpy()
YV = torch.randint(0, 3, (30,), generator=GENERATOR).numpy()
WEIGHTS = torch.rand(60, generator=GENERATOR).numpy() + 0.5
BATCH_SIZE = 10


def regrouped(initial_epoch=0, epochs=1, validation_data=None, **options):
    """Keras' arguments of ``fit`` as those of ours."""
    names = {"validation_freq": "freq", "validation_steps": "steps"}
    names["validation_batch_size"] = "batch_size"
    fields = {ours: options.pop(theirs) for theirs, ours in names.items() if theirs in options}
    if fields:
        validation_data = ipufit.Validation(validation_data, **fields)
    return {"epochs": range(initial_epoch, epochs), "validation_data": validation_data, **options}


@dataclasses.dataclass
class Pair:
    """The same network with the same weights, and what either side calls its linear layers."""

    theirs: Any
    ours: ipufit.Model
    layers: Any

    def same_weights(self):
        """Whether both have been trained alike, to the rounding of float32."""
        for dense, linear in self.layers:
            kernel, bias = dense.get_weights()
            numpy.testing.assert_allclose(kernel.T, linear.weight.detach().numpy(), atol=2e-6)
            numpy.testing.assert_allclose(bias, linear.bias.detach().numpy(), atol=2e-6)

    def fit(self, theirs=(), ours=(), **options):
        """Call ``fit`` of both with the same arguments and these callbacks; both histories.

        ``validated=True`` stands for the held-out data.
        """
        arguments = {
            "x": X,
            "y": Y,
            "batch_size": BATCH_SIZE,
            "epochs": 3,
            "shuffle": False,
            "verbose": 0,
            **options,
        }
        if arguments.pop("validated", False):
            arguments["validation_data"] = (XV, YV)
        return [
            self.theirs.fit(**arguments, callbacks=list(theirs)),
            self.ours.fit(**regrouped(**arguments), callbacks=list(ours)),
        ]


def copy_weights(layers):
    """Give the layers of Keras the weights of the layers of torch."""
    for dense, linear in layers:
        dense.set_weights([linear.weight.detach().T.numpy(), linear.bias.detach().numpy()])


def arguments_of(optimizer):
    """What compile takes for the options of an optimizer of Keras' that are no rate."""
    bounds = {"clipnorm": "norm", "global_clipnorm": "global_norm", "clipvalue": "value"}
    clip = {bounds[name]: value for name, value in optimizer.items() if name in bounds}
    ema = {n[len("ema_") :]: value for n, value in optimizer.items() if n.startswith("ema_")}
    arguments = {"clip": ipufit.Clip(**clip)} if clip else {}
    if optimizer.get("use_ema"):
        arguments["ema"] = ipufit.EMA(**ema)
    return arguments


def pair(metrics=("accuracy",), weighted_metrics=(), lr=0.5, **optimizer):
    """A classifier, compiled on both sides with the same options, with the same first weights.

    Without options of the optimizer, it is the pair that an earlier call with the same metrics has
    returned: most of the time goes into recording programs, and SGD has no state to be forgotten.
    """
    if optimizer:
        return _pair(tuple(metrics), tuple(weighted_metrics), lr, **optimizer)
    found = _kept(tuple(metrics), tuple(weighted_metrics))
    for name, values in first_weights().items():
        found.ours.module.state_dict()[name].copy_(values)
    copy_weights(found.layers)
    found.theirs.optimizer.learning_rate = found.ours.optimizer.param_groups[0]["lr"] = lr
    return found


@functools.lru_cache(maxsize=None)
def _kept(metrics, weighted_metrics):
    return _pair(metrics, weighted_metrics, 0.5)


@functools.lru_cache(maxsize=None)
def first_weights():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).state_dict()


def _pair(metrics, weighted_metrics, lr, **optimizer):
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    module.load_state_dict(first_weights())
    theirs = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    )
    layers = list(zip(theirs.layers, (module[0], module[2])))
    copy_weights(layers)
    measured = {
        "metrics": list(metrics) or None,
        "weighted_metrics": list(weighted_metrics) or None,
    }
    theirs.compile(
        keras.optimizers.SGD(lr, **optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **measured,
    )
    ours = ipufit.Model(module)
    measured.update(arguments_of(optimizer))
    ours.compile(torch.optim.SGD(module.parameters(), lr), "cross_entropy", **measured)
    return Pair(theirs, ours, layers)


def same_values(ours, theirs):
    """Whether two dicts of numbers, or of lists of them, are the same to the sixth digit."""
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        values = [float(value) for value in values] if isinstance(values, list) else float(values)
        assert ours[name] == pytest.approx(values, abs=1e-5, nan_ok=True), name


HOOKS = [
    f"on_{kind}{part}_{when}"
    for kind in ("train", "test", "epoch", "predict")
    for part in (("", "_batch") if kind != "epoch" else ("",))
    for when in ("begin", "end")
]


def ledger(base, act=None):
    """A callback of either library that writes down every call, then calls ``act`` with it.

    Args:
        act: ``(callback, hook, index)``.
    """

    class Ledger(base):
        def __init__(self):
            super().__init__()
            self.calls = []

    def hook(name):
        def call(self, *args, **kwargs):
            logs = kwargs.get("logs", args[-1] if args else None)
            index = args[0] if args and isinstance(args[0], int) else None
            # "updates" and "samples" are what ipufit adds to the logs of a batch.
            values = {k: v for k, v in (logs or {}).items() if k not in ("updates", "samples")}
            self.calls.append((name, index, values))
            if act is not None:
                act(self, name, index)

        return call

    for name in HOOKS:
        setattr(Ledger, name, hook(name))
    return Ledger()


def ledgers(act=None):
    """One of Keras, one of ours."""
    return ledger(keras.callbacks.Callback, act), ledger(ipufit.callbacks.Callback, act)


def names(calls):
    """A ledger without the values."""
    return [(name, index) for name, index, _ in calls]


def same_calls(ours, theirs):
    """Whether two ledgers agree: hooks, indices, names and values in logs."""
    assert names(ours.calls) == names(theirs.calls)
    for (_, _, mine), (_, _, values) in zip(ours.calls, theirs.calls):
        same_values(mine, values)
