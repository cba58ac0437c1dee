"""Runs on the stand-in, the same in one process and in several; see test_ipu_processes.py."""

import contextlib
import copy
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.poptorch._precision import keep_float64
from ipufit.processes import current


def mlp(*between):
    """Of float64, as the stand-in keeps it here: sums in another order then differ by 1e-15."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(4, 6), *copy.deepcopy(between), nn.Tanh(), nn.Linear(6, 3)
    ).double()


def rows(samples, seed=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def run(
    between=(),
    samples=48,
    compiled=None,
    replicas=2,
    accumulation=2,
    iterations=2,
    epochs=2,
    held_out=0,
    predicted=0,
    data=None,
    fit=None,
    engine="ipu-standin",
):
    """What a fit gives, with as many replicas in all processes together."""
    net = mlp(*between)
    processes = current().num_processes
    order = torch.Generator().manual_seed(1)
    shuffled = {"batch_size": 3, "shuffle": True, "generator": order}
    loader = data or DataLoader(TensorDataset(*rows(samples)), **shuffled)
    with keep_float64():
        model = ipufit.Model(net, engine=engine)
        given = {"optimizer": "adam", "loss": "cross_entropy", "metrics": ["accuracy"]}
        model.compile(**{**given, **(compiled or {})})
        validation = {"validation_data": rows(held_out, 7)} if held_out else {}
        history = model.fit(
            loader,
            ipus=replicas // processes,
            gradient_accumulation=accumulation,
            device_iterations=iterations,
            epochs=epochs,
            seed=11,
            verbose=0,
            **validation,
            **(fit or {}),
        )
        found = {
            "history": history.history,
            "weights": {name: each.tolist() for name, each in net.state_dict().items()},
        }
        if predicted:
            outputs = model.predict(rows(predicted, 9)[0], batch_size=3, verbose=0)
            found["outputs"] = outputs.tolist()
        model.close()
    return found


def say(value):
    print(json.dumps(value), flush=True)


@contextlib.contextmanager
def refused(kind):
    """Print the text of an error that the block must end with."""
    try:
        yield
    except kind as error:
        say(str(error))
    else:
        say("not refused")
