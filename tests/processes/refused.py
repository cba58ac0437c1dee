"""What each of two processes is told; run by test_refused.py, which pins the texts.

Argument: the folder for the results.
"""

import contextlib
import io
import json
import os
import socket
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler

import ipufit
from ipufit.callbacks import Callback
from ipufit.training import rank_consistency

PROCESS = int(os.environ["RANK"])
X, Y = torch.arange(40.0).reshape(20, 2).sin(), torch.arange(20) % 3


class Stream(IterableDataset):
    """Samples in a row; with ``asks``, those of the worker that asks."""

    def __iter__(self):
        yield from zip(X, Y)


class Asking(Stream):
    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from list(zip(X, Y))[first::step]


class Failing(TensorDataset):
    def __getitem__(self, index):
        if index == 13:
            raise KeyError("thirteen")
        return super().__getitem__(index)


class Looks(Callback):
    """Evaluates in one process alone."""

    def on_epoch_end(self, epoch, logs=None):
        if PROCESS == 1:
            self.model.evaluate(X, Y, verbose=0)


class Unknown:
    """A metric that says nothing of what it has seen."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.sum = 0.0

    def update(self, prediction, target):
        self.sum += float(prediction.sum())

    def compute(self):
        return self.sum


def made(net=None, **compiled):
    torch.manual_seed(0)
    model = ipufit.Model(net or nn.Linear(2, 3))
    model.compile(**{"optimizer": "sgd", "loss": "cross_entropy", **compiled})
    return model


def said(call):
    """The text of the error that comes, and what it is."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error).replace(socket.gethostname(), "here")]
    return ["none", ""]


def fit(*data, model=None, **options):
    options = {"epochs": 1, "verbose": 0, "seed": 1, **options}
    return (model or made()).fit(*data, **options)


def loader(dataset=None, **options):
    return DataLoader(dataset or TensorDataset(X, Y), **{"batch_size": 2, **options})


def generator(seed):
    return torch.Generator().manual_seed(seed)


def sampler():
    return DistributedSampler(TensorDataset(X, Y), num_replicas=2, rank=PROCESS)


ORDERED = made()
BEFORE = ORDERED.module.weight.clone()


def differently():
    """What processes can't agree on."""
    one = PROCESS == 1
    yield "module", lambda: fit(X, Y, model=made(nn.Linear(2, 3, bias=not one)))
    yield "class", lambda: fit(X, Y, model=made(nn.Sequential(nn.Linear(2, 3)) if one else None))
    yield "optimizer", lambda: fit(X, Y, model=made(optimizer="adam" if one else "sgd"))
    yield "clip", lambda: fit(X, Y, model=made(clip=ipufit.Clip(norm=0.1 + one)))
    yield "length", lambda: fit(X[: 20 - one], Y[: 20 - one])
    yield "batch_size", lambda: fit(X, Y, batch_size=2 + one)
    yield "replicas", lambda: fit(X, Y, ipus=1 + one)
    yield "epochs", lambda: fit(X, Y, epochs=1 + one)
    yield "seed", lambda: fit(X, Y, seed=1 + one)
    yield "callbacks", lambda: fit(X, Y, callbacks=[Callback()] * PROCESS)
    yield "order", lambda: fit(loader(shuffle=True, generator=generator(PROCESS)), model=ORDERED)
    yield "arguments of one", lambda: fit(X, Y, epochs=1 - one)
    rank_consistency.__version__ = "0.1.0" if not one else "0.0.9"
    yield "version", lambda: fit(X, Y)
    rank_consistency.__version__ = "0.1.0"


def refused():
    """What can't be divided, or works in one process alone."""
    yield "sampler", lambda: fit(loader(sampler=sampler()))
    yield "stream", lambda: fit(loader(Stream()))
    yield "iterable", lambda: fit((x, y) for x, y in zip(X, Y))
    yield "no batches", lambda: fit(loader(batch_size=None))
    yield "metric", lambda: fit(X, Y, model=made(metrics=[Unknown()]))
    yield "inductor", lambda: fit(X, Y, model=made(jit="inductor"))
    yield "lazy", lambda: fit(X, Y, model=made(nn.LazyLinear(3)))
    yield "on_batch", lambda: made().train_on_batch(X, Y)
    yield "find_lr", lambda: made().find_lr(X, Y)
    yield "find_batch_size", lambda: made().find_batch_size(X, Y, effective_batch_size=4)
    yield "compare", lambda: made().compare((X, Y))
    yield "invariance", lambda: made().check_invariance((X, Y))
    yield "detection", lambda: fit(X, Y, model=made(detect_nan=True))
    yield "restarts", lambda: fit(X, Y, checkpoint=ipufit.Checkpoint("runs", max_restarts=1))
    zero = torch.ones(20)
    zero[8:12] = 0
    yield "weights", lambda: fit(X, Y, batch_size=2, sample_weight=zero, shuffle=False)
    yield "sharded tensor", lambda: ipufit.Sharded(X)


def works():
    """Streams that are cut by themselves; every sample comes once, however many there are."""
    seen = []

    class Ledger(nn.Linear):
        def forward(self, x):
            ipufit.log("rows", torch.ones(()) * len(x), reduce="sum")
            return super().forward(x)

    own = list(zip(X, Y))[PROCESS * 13 :][: 13 - 6 * PROCESS]
    batches = [
        (torch.stack(x), torch.stack(y))
        for x, y in (zip(*own[i : i + 2]) for i in range(0, len(own), 2))
    ]
    for name, data in (
        ("asking", loader(Asking())),
        ("asking workers", loader(Asking(), num_workers=2)),
        ("sharded list", ipufit.Sharded(batches)),
        ("sharded stream", ipufit.Sharded(loader(TensorDataset(*map(torch.stack, zip(*own)))))),
    ):
        model = made(Ledger(2, 3))
        history = fit(data, model=model, epochs=2, gradient_accumulation=2, device_iterations=2)
        weights = model.module.weight.flatten().tolist()
        seen.append([name, history.history["rows"], history.history["loss"], weights])
    model = made()
    fit(X, Y, model=model)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        model.explain()
    return seen, text.getvalue().splitlines()


def main():
    found = {name: said(call) for part in (differently, refused) for name, call in part()}
    found["works"], found["explained"] = works()
    found["alone"] = said(lambda: fit(X, Y, callbacks=[Looks()]))
    found["unchanged"] = torch.equal(ORDERED.module.weight, BEFORE)
    # After this they are apart.
    found["sample of one"] = said(lambda: fit(loader(Failing(X, Y))))
    found["afterwards"] = said(lambda: fit(X, Y))
    with open(os.path.join(sys.argv[1], f"{PROCESS}.json"), "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
