"""What a process of a distributed fit runs; its results are compared with those of one process.

Run by test_fits.py in one, two and four processes. Arguments: the folder for the results, and names
of fits, or the first words of several; none for all. With "buckets" gradients go in many small
ones.
"""

import json
import os
import sys

import torch
import torchmetrics
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

import ipufit
from ipufit.callbacks import Callback, CSVLogger, LambdaCallback
from ipufit.data import LengthBuckets
from ipufit.engines.embedded import overlapped_reduction

REPLICAS = 4
PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
PROCESS = int(os.environ.get("RANK", "0"))
WANTED = [argument for argument in sys.argv[2:] if argument != "buckets"]


def is_wanted(name):
    """Whether this fit, or all those that begin with its first word, are among the arguments."""
    return not WANTED or name in WANTED or name.split()[0] in WANTED


class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Spread(nn.Module):
    """Logs a value, and has a buffer that every micro-batch changes."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.abs().mean()
        ipufit.log("spread", x.std(unbiased=False))
        ipufit.log("largest", x.max(), reduce="max")
        return self.net(x)


class Attention(nn.Module):
    """One layer of a transformer over four steps."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(self.embed(x.reshape(len(x), 4, 2))).mean(1))


class Experts(nn.Module):
    """Each sample goes to one expert, so that others may have no gradient in an update."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Linear(8, 3) for _ in range(6))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        outputs = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                outputs[rows] = expert(x[rows]) * weights[rows, None]
        return outputs


class Uneven(nn.Sequential):
    """Can't be recorded in any process but the first."""

    def forward(self, x):
        if PROCESS:
            assert x.sum().item() < 1e9
        return super().forward(x)


def mlp():
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3))


def in_turn(name):
    """A step of one's own, whose loss has this name."""
    return lambda net, batch: {name: nn.functional.cross_entropy(net(batch[0]), batch[1])}


def searches(params):
    """An optimizer that evaluates the loss again, and goes by its value."""
    return torch.optim.LBFGS(params, max_iter=3, history_size=2, line_search_fn="strong_wolfe")


def cnn():
    return nn.Sequential(
        nn.Unflatten(1, (2, 4)),
        nn.Conv1d(2, 4, 3, padding=1),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def data(samples):
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 8, generator=generator)
    return x, torch.randint(0, 3, (samples,), generator=generator)


def shuffled(samples, **options):
    return DataLoader(Pairs(*data(samples)), batch_size=4, shuffle=True, **options)


def fit(net, *given, compiled=None, weights=True, **options):
    """History and what is left of the model after a fit."""
    # Unlike in every process: they begin with the weights of the first.
    torch.manual_seed(PROCESS)
    net = net()
    if PROCESS == 0:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model = ipufit.Model(net)
    model.compile(**{"optimizer": "adam", "loss": "cross_entropy", **(compiled or {})})
    options = {"epochs": 2, "gradient_accumulation": 2, "device_iterations": 2, **options}
    history = model.fit(*given, ipus=REPLICAS // PROCESSES, seed=3, verbose=0, **options)
    found = {"history": history.history, "updates_logged": history.updates}
    found["weights"] = torch.cat([t.flatten().double() for t in net.state_dict().values()]).tolist()
    found["updates"] = history.params["updates_done"]
    return model, found


def lengths():
    """Every length leaves another end, down to a single sample in all processes."""
    for samples in (64, 61, 33, 9, 1):
        if not is_wanted(f"lengths {samples}"):
            continue
        x, y = data(samples)
        options = {"validation_data": (x, y), "batch_size": 4}
        model, found = fit(mlp, x, y, compiled={"metrics": ["accuracy"]}, **options)
        found["predicted"] = model.predict(x, batch_size=4, verbose=0).tolist()
        found["evaluated"] = model.evaluate(x, y, batch_size=4, verbose=0)
        pieces = model.predict_iter(x, batch_size=4, device_iterations=2, verbose=0)
        found["pieces"] = [piece.tolist() for piece in pieces]
        yield f"lengths {samples}", found


def forms():
    """Data in every form that is cut by ipufit."""
    x, y = data(37)
    batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 37, 4)]
    buckets = LengthBuckets(Pairs(x, y), 4, [1 + i % 7 for i in range(37)], max_recordings=3)
    sampled = BatchSampler(RandomSampler(Pairs(x, y)), 4, drop_last=False)
    given = {
        "arrays": ((x.numpy(), y.numpy()), {"batch_size": 4}),
        "dataset": ((Pairs(x, y),), {"batch_size": 4}),
        "loader": ((shuffled(37),), {}),
        "held": ((DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True),), {}),
        "workers": ((shuffled(37, num_workers=2, persistent_workers=True),), {}),
        "generator": ((shuffled(37, generator=torch.Generator().manual_seed(7)),), {}),
        "drop_last": ((shuffled(37, drop_last=True),), {}),
        "batch_sampler": ((DataLoader(Pairs(x, y), batch_sampler=sampled),), {}),
        "buckets": ((DataLoader(Pairs(x, y), batch_sampler=buckets),), {}),
        "list": ((batches,), {}),
        "passes": ((shuffled(13),), {"steps_per_epoch": 3, "epochs": 3}),
        "passes of arrays": (data(13), {"batch_size": 4, "steps_per_epoch": 3, "epochs": 3}),
        "limited": ((shuffled(37),), {"loading": ipufit.Loading(limit_train_batches=5)}),
        "prefetch": ((shuffled(37),), {"loading": ipufit.Loading(prefetch=2)}),
        "split": ((x, y), {"batch_size": 4, "validation_split": 0.3}),
        "class_weight": ((x, y), {"batch_size": 4, "class_weight": {0: 2.0, 1: 0.5}}),
    }
    for name, (arguments, options) in given.items():
        if is_wanted(f"forms {name}"):
            yield f"forms {name}", fit(mlp, *arguments, **options)[1]


def models():
    """Modules, losses and ways to make an update."""
    x, y = data(61)
    tokens = y.repeat_interleave(2).reshape(61, 2)
    tokens[::3, 1] = -100
    given = {
        "cnn": (cnn, {}),
        "transformer": (Attention, {}),
        "logged": (lambda: Spread(mlp()), {}),
        "merged": (lambda: nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), {}),
        "sum": (mlp, {"reduction": ipufit.Reduction(gradients="sum"), "optimizer": "sgd"}),
        "clipped": (mlp, {"clip": ipufit.Clip(global_norm=0.1)}),
        "joined": (
            lambda: Spread(nn.Sequential(cnn(), nn.Dropout(0.3), nn.Linear(3, 3))),
            {"clip": ipufit.Clip(global_norm=0.1)},
        ),
        "ema": (mlp, {"ema": ipufit.EMA()}),
        "eager": (mlp, {"run_eagerly": True}),
        "experts": (Experts, {}),
        "uneven": (lambda: Uneven(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)), {}),
        "own step": (
            mlp,
            {
                "optimizer": lambda p: torch.optim.Adagrad(p, lr=0.05),
                "lr_scheduler": lambda update: 0.05 / (1 + update),
            },
        ),
        "evaluated again": (mlp, {"optimizer": searches, "clip": ipufit.Clip(value=0.1)}),
        "lamb": (mlp, {"optimizer": "lamb"}),
        "accumulated wide": (mlp, {"precision": ipufit.Precision(accumulation_dtype="float64")}),
        "schedule": (mlp, {"lr_scheduler": lambda update: 0.01 / (1 + update)}),
        "turns": (
            mlp,
            {
                "loss": [
                    ipufit.TrainStep(in_turn("first"), {"first": "0"}, repeat=2),
                    ipufit.TrainStep(in_turn("second"), {"second": "3"}, every=2),
                ]
            },
        ),
        "experts in turn": (
            Experts,
            {
                "loss": [
                    ipufit.TrainStep(in_turn("first"), {"first": None}),
                    ipufit.TrainStep(in_turn("second"), {"second": "experts"}),
                ]
            },
        ),
        # A backend of torch.compile's is given whole graphs.
        "backend": (cnn, {"jit": lambda graph, inputs: graph.forward}),
    }
    for name, (net, compiled) in given.items():
        if is_wanted(f"models {name}"):
            yield f"models {name}", fit(net, x, y, batch_size=4, compiled=compiled)[1]
    if not is_wanted("models tokens"):
        return
    own = {"loss": nn.CrossEntropyLoss(ignore_index=-100)}
    net = lambda: nn.Sequential(mlp(), nn.Unflatten(1, (3, 1)), nn.Upsample(2))  # noqa: E731
    yield "models tokens", fit(net, x, tokens, batch_size=4, compiled=own)[1]


def measures():
    """Metrics of every kind that can be joined."""
    if not is_wanted("measures"):
        return
    x, y = data(53)
    metrics = {
        "accuracy": "accuracy",
        "own": lambda prediction, target: (prediction.argmax(1) == target).double(),
        "auroc": torchmetrics.AUROC("multiclass", num_classes=3),
        "several": torchmetrics.MetricCollection(
            [
                torchmetrics.F1Score("multiclass", num_classes=3),
                torchmetrics.Precision("multiclass", num_classes=3, average="macro"),
            ]
        ),
    }
    compiled = {"metrics": metrics}
    yield "measures", fit(mlp, x, y, batch_size=4, compiled=compiled, validation_split=0.2)[1]


class Named(Pairs):
    """Pairs as dicts, with a name that nothing but a metric and a callback takes."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"name": f"{index}", "x": x, "y": y}


def fields():
    """What the module does not take goes with its samples, to metrics and to callbacks."""
    if not is_wanted("fields"):
        return
    seen = []

    def numbers(prediction, target, name):
        return torch.tensor([float(each) for each in name]) * prediction[:, 0]

    class Sees(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.extend(int(each) for extras in self.model.extras for each in extras["name"])

    compiled = {"metrics": [numbers], "inputs": "x", "targets": "y"}
    loader = DataLoader(Named(*data(53)), batch_size=4, shuffle=True)
    model, found = fit(mlp, loader, compiled=compiled, callbacks=[Sees()], epochs=1)
    found["evaluated"] = model.evaluate(loader, verbose=0)
    parts = [None] * PROCESSES
    if PROCESSES > 1:
        torch.distributed.all_gather_object(parts, seen)
    else:
        parts = [seen]
    found["names"] = sorted(each for part in parts for each in part)
    yield "fields", found


class Steps(nn.Module):
    """Sequences of any length: a class for each, or for each of their steps."""

    def __init__(self, pools=True):
        super().__init__()
        self.pools = pools
        self.embed, self.drop, self.head = nn.Linear(2, 6), nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.drop(self.embed(x).tanh())
        return self.head(hidden.mean(1) if self.pools else hidden)


class AnySize:
    """Batches of several sizes and lengths, in an order that each epoch draws."""

    def __iter__(self):
        groups = torch.arange(41).split([4, 1, 3, 4, 5, 2, 4, 4, 3, 4, 7])
        for place in torch.randperm(len(groups)).tolist():
            yield groups[place].tolist()

    def __len__(self):
        return 11


def shapes():
    """Processes see batches of other shapes, at the same time, than the others do."""
    if not is_wanted("shapes"):
        return
    x, y = data(41)

    def collate(samples):
        length = 2 + (len(samples) + int(samples[0][1])) % 3
        return (
            torch.stack([each.reshape(4, 2)[:length] for each, _ in samples]),
            torch.stack([label for _, label in samples]),
        )

    loader = DataLoader(Pairs(x, y), batch_sampler=AnySize(), collate_fn=collate)
    compiled = {"metrics": ["accuracy"], "loss": nn.CrossEntropyLoss(reduction="sum")}
    model, found = fit(Steps, loader, compiled=compiled, validation_data=loader)
    found["evaluated"] = model.evaluate(loader, verbose=0)
    predicted = ipufit.Model(Steps(pools=False)).predict(loader, device_iterations=2, verbose=0)
    found["rows"] = [list(row.shape) for row in predicted]
    yield "shapes", found


class Longest(Steps):
    """Sequences of four steps can't be recorded."""

    def forward(self, x):
        if x.shape[1] == 4:
            assert x.sum().item() < 1e9
        return super().forward(x)


def late():
    """A shape that can't be recorded comes after others, in some of the processes alone."""
    if not is_wanted("late"):
        return
    x, y = data(56)

    def collate(samples):
        first = int(samples[0][0])
        length = 4 if first in (16, 32, 36, 48, 52) else 2 + first % 8 // 4
        rows = [int(index) for index, _ in samples]
        return x[rows].reshape(-1, 4, 2)[:, :length], torch.stack([y[row] for row in rows])

    loader = DataLoader(Pairs(torch.arange(56), y), batch_size=4, collate_fn=collate)
    _, found = fit(Longest, loader)
    yield "late", found


def stopping(hook, at):
    """A callback that asks to stop in the last process alone, in a hook of an update or epoch."""

    def stop(index, logs):
        if PROCESS == PROCESSES - 1 and index == at:
            callback.model.stop_training = True

    callback = LambdaCallback(**{hook: stop})
    return callback


def callbacks():
    """Callbacks run in all processes, those that only report in the first; any may stop."""
    if not is_wanted("callbacks"):
        return
    x, y = data(61)
    folder = os.path.join(sys.argv[1], f"logs-{PROCESSES}-{PROCESS}.csv")
    seen = []
    noted = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    work = {"batch_size": 4, "gradient_accumulation": 1, "device_iterations": 1, "epochs": 3}
    given = [CSVLogger(folder), noted, stopping("on_train_batch_end", 1)]
    _, found = fit(mlp, x, y, callbacks=given, **work)
    assert found["updates"] == 2
    found["seen"] = seen
    _, found["begun"] = fit(mlp, x, y, callbacks=stopping("on_epoch_begin", 1), **work)
    assert found["begun"]["updates"] == 5
    yield "callbacks", found
    found = {"wrote": os.path.exists(folder) == (PROCESS == 0)}
    yield "files", found


def main():
    begun = []
    if "buckets" in sys.argv[2:]:
        overlapped_reduction.BUCKET, inner = 256, overlapped_reduction.BucketSums.sum

        def noted(sums, *given):
            begun.append(given[0])
            return inner(sums, *given)

        overlapped_reduction.BucketSums.sum = noted
    torch.set_default_dtype(torch.float64)
    results = {}
    for part in (lengths, forms, models, measures, fields, shapes, late, callbacks):
        results.update(part())
    assert bool(begun) == ("buckets" in sys.argv[2:])
    with open(os.path.join(sys.argv[1], f"{PROCESSES}-{PROCESS}.json"), "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
