"""What an error advises is done here, and the call then succeeds."""

import ast
import contextlib
import importlib
import inspect
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.errors import ConfigurationError, DataError, PlanError, UnknownArgumentError
from ipufit.utils.names import REPLACEMENTS
from tests.faulty import momentum
from tests.pages.test_reference_pages import templates

X = torch.arange(48.0).reshape(12, 4).sin()
Y = torch.arange(36.0).reshape(12, 3).cos()
PAIRS = TensorDataset(X, Y)
QUIET = {"seed": 0, "verbose": 0}


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def compiled(optimizer="sgd", loss="mse", module=None, **options):
    model = ipufit.Model(linear() if module is None else module)
    model.compile(optimizer, loss, **options)
    return model


def fit(*data, model=None, **options):
    """A fit of a small model."""
    return (model or compiled()).fit(*(data or (X, Y)), **{**QUIET, **options})


class OwnLoss(nn.Module):
    """Returns outputs and loss."""

    def __init__(self):
        super().__init__()
        self.head = linear()

    def forward(self, x):
        outputs = self.head(x)
        return outputs, outputs.square().mean()


class Silent(nn.Linear):
    """Forgets to return."""

    def __init__(self):
        super().__init__(4, 3)

    def forward(self, x):
        super().forward(x)


def pictures():
    """Classifies pictures; a convolution takes one without a batch too, what follows does not."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))


class Numbered:
    """Items that are picked by number, and nothing else."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Again:
    """Batches that can be read again."""

    def __iter__(self):
        return iter([(X, Y)])


class Mean(nn.Module):
    """A loss that needs an argument."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, prediction, target):
        return self.scale * (prediction - target).square().mean()


# The call that fails, what the error advises, and calls that do so.
ADVICE = {
    "ipus": (
        lambda: fit(ipus=3),
        "Try 2 or 4, or compile(..., parallel=ipufit.Parallel(auto_round_ipus=True)) to reserve 4",
        lambda: fit(ipus=2),
        lambda: fit(ipus=4),
        lambda: fit(ipus=3, model=compiled(parallel=ipufit.Parallel(auto_round_ipus=True))),
    ),
    "ipus of Validation": (
        lambda: fit(validation_data=ipufit.Validation((X, Y), ipus=3)),
        "`ipus` of Validation, the total number of IPUs, must be a power of two, got 3. Try 2 or "
        "4, or compile(..., parallel=ipufit.Parallel(auto_round_ipus=True))",
        lambda: fit(validation_data=ipufit.Validation((X, Y), ipus=2)),
        lambda: fit(
            validation_data=ipufit.Validation((X, Y), ipus=3),
            model=compiled(parallel=ipufit.Parallel(auto_round_ipus=True)),
        ),
    ),
    "device_iterations": (
        lambda: fit(device_iterations=0),
        "Try 1.",
        lambda: fit(device_iterations=1),
    ),
    "gradient_accumulation": (
        lambda: fit(gradient_accumulation=1.5),
        "write 1 or 2.",
        lambda: fit(gradient_accumulation=1),
        lambda: fit(gradient_accumulation=2),
    ),
    "epochs": (
        lambda: fit(epochs=range(3, 3)),
        "Pass for example range(3, 10).",
        lambda: fit(epochs=range(3, 10)),
    ),
    "epochs of none": (
        lambda: fit(epochs=0),
        "must be an integer of at least 1",
        lambda: fit(epochs=1),
    ),
    "split": (
        lambda: fit(validation_split=2),
        "Try 0.2.",
        lambda: fit(validation_split=0.2),
    ),
    "split of too few": (
        lambda: fit(X[:1], Y[:1], validation_split=0.5),
        "Choose another fraction, or pass validation_data.",
        lambda: fit(X[:1], Y[:1], validation_data=(X, Y)),
    ),
    "split and data": (
        lambda: fit(validation_split=0.2, validation_data=(X, Y)),
        "Pass one of them.",
        lambda: fit(validation_split=0.2),
        lambda: fit(validation_data=(X, Y)),
    ),
    "no validation": (
        lambda: fit(validation_data=ipufit.Validation(freq=2, steps=1)),
        "Pass Validation(data, ...) or validation_split, or leave them out.",
        lambda: fit(epochs=2, validation_data=ipufit.Validation((X, Y), freq=2, steps=1)),
        lambda: fit(
            epochs=2, validation_split=0.5, validation_data=ipufit.Validation(freq=2, steps=1)
        ),
        fit,
    ),
    "validation tuple": (
        lambda: fit(validation_data=((X, Y),) * 4),
        "Pass batches as a list or a DataLoader.",
        lambda: fit(validation_data=[(X, Y)] * 4),
        lambda: fit(validation_data=DataLoader(PAIRS)),
    ),
    "limits": (
        lambda: fit(steps_per_epoch=1, loading=ipufit.Loading(limit_train_batches=1)),
        "Pass one of them.",
        lambda: fit(steps_per_epoch=1),
        lambda: fit(loading=ipufit.Loading(limit_train_batches=1)),
    ),
    "small fraction": (
        lambda: fit(loading=ipufit.Loading(limit_train_batches=0.01)),
        "Use a larger fraction, or a number of batches.",
        lambda: fit(loading=ipufit.Loading(limit_train_batches=1.0)),
        lambda: fit(loading=ipufit.Loading(limit_train_batches=1)),
    ),
    "overfit": (
        lambda: fit(loading=ipufit.Loading(overfit_batches=1), shuffle=True),
        "Leave one out.",
        lambda: fit(loading=ipufit.Loading(overfit_batches=1)),
        lambda: fit(shuffle=True),
    ),
    "callback class": (
        lambda: fit(callbacks=[Callback]),
        "Pass an object: Callback(...).",
        lambda: fit(callbacks=[Callback()]),
    ),
    "no callbacks": (
        lambda: fit(callbacks=3),
        "Pass a list of objects: callbacks=[...]; [] for none.",
        lambda: fit(callbacks=[Callback()]),
        lambda: fit(callbacks=[]),
    ),
    "size of a loader": (
        lambda: fit(DataLoader(PAIRS, 2), batch_size=4),
        "Set it there.",
        lambda: fit(DataLoader(PAIRS, 4)),
    ),
    "order of a loader": (
        lambda: fit(DataLoader(PAIRS, 2), shuffle=True),
        "Set it there.",
        lambda: fit(DataLoader(PAIRS, 2, shuffle=True)),
    ),
    "target of a dataset": (
        lambda: fit(TensorDataset(X), Y),
        "Let it yield (inputs, target)",
        lambda: fit(TensorDataset(X, Y)),
    ),
    "no target": (
        lambda: fit(X),
        "Pass y= as well, or use compile(loss=None) if the module computes its own loss.",
        lambda: fit(X, y=Y),
        lambda: fit(X, model=compiled(loss=None, module=OwnLoss())),
    ),
    "two weights": (
        lambda: fit(
            X,
            torch.arange(12) % 3,
            sample_weight=torch.ones(12),
            class_weight={0: 2.0},
            model=compiled(loss="cross_entropy"),
        ),
        "Pass one of them, or multiply both into sample_weight.",
        lambda: fit(
            X,
            torch.arange(12) % 3,
            sample_weight=torch.ones(12),
            model=compiled(loss="cross_entropy"),
        ),
        lambda: fit(
            X, torch.arange(12) % 3, class_weight={0: 2.0}, model=compiled(loss="cross_entropy")
        ),
    ),
    "tuple": (
        lambda: fit((X, Y)),
        "Pass the target as y, and several inputs as x=(first, second)",
        lambda: fit(X, Y),
    ),
    "samples in a list": (
        lambda: fit(list(X), Y),
        "A list holds one array per input; turn samples into one with numpy.stack.",
        lambda: fit(np.stack(list(X)), Y),
    ),
    "scalars in a list": (
        lambda: fit(X, list(torch.arange(12) % 3), model=compiled(loss="cross_entropy")),
        "torch.stack turns a list of tensors into one tensor.",
        lambda: fit(
            X, torch.stack(list(torch.arange(12) % 3)), model=compiled(loss="cross_entropy")
        ),
    ),
    "texts": (
        lambda: fit(X, ["a", "b", "c"] * 4, model=compiled(loss="cross_entropy")),
        "Number it, all data alike, with numbers = {text: i for i, text in "
        "enumerate(sorted(set(values)))} and [numbers[text] for text in values]",
        lambda: fit(
            X,
            (lambda numbers, values: [numbers[text] for text in values])(
                {text: i for i, text in enumerate(sorted(set(["a", "b", "c"] * 4)))},
                ["a", "b", "c"] * 4,
            ),
            model=compiled(loss="cross_entropy"),
        ),
    ),
    "nothing returned": (
        lambda: compiled(module=Silent()).predict(X, **QUIET),
        "End it with return and the outputs.",
        lambda: compiled(module=linear()).predict(X, **QUIET),
    ),
    "missing labels": (
        lambda: fit(X, [0, 1, None] * 4, model=compiled(loss="cross_entropy")),
        "Fill what is missing (None), or leave those samples out.",
        lambda: fit(X, [0, 1, 2] * 4, model=compiled(loss="cross_entropy")),
    ),
    "labels as texts in a dataset": (
        lambda: fit(
            DataLoader([(X[i], "ab"[i % 2]) for i in range(12)], 4),
            model=compiled(loss="cross_entropy"),
        ),
        "Let the dataset yield a number for each text such as 'a'.",
        lambda: fit(
            DataLoader([(X[i], i % 2) for i in range(12)], 4), model=compiled(loss="cross_entropy")
        ),
    ),
    "a target alone": (
        lambda: fit(None, Y),
        "Pass for example DataLoader(dataset, batch_size=...).",
        lambda: fit(DataLoader(PAIRS, batch_size=4)),
    ),
    "one sample": (
        lambda: compiled().predict(X[0], **QUIET),
        "If x is one sample, pass x[None].",
        lambda: compiled().predict(X[0][None], **QUIET),
    ),
    "one picture": (
        lambda: compiled(module=pictures()).predict(torch.ones(3, 8, 8), **QUIET),
        "If x is one sample, pass x[None].",
        lambda: compiled(module=pictures()).predict(torch.ones(3, 8, 8)[None], **QUIET),
    ),
    "a target for predict": (
        lambda: compiled().predict(X, Y, **QUIET),
        "predict takes x, but no target.",
        lambda: compiled().predict(X, **QUIET),
    ),
    "weights by position": (
        lambda: compiled().evaluate(X, Y, torch.ones(12), **QUIET),
        "Pass weights by name, sample_weight=weights.",
        lambda: compiled().evaluate(X, Y, sample_weight=torch.ones(12), **QUIET),
    ),
    "classes in floating point": (
        lambda: fit(X, np.array([0.0, 1.0, 2.0] * 4), model=compiled(loss="cross_entropy")),
        "Convert it to int64, with .long() or .astype('int64'); NaN is not a class, so leave those "
        "samples out first.",
        lambda: fit(
            X, np.array([0.0, 1.0, 2.0] * 4).astype("int64"), model=compiled(loss="cross_entropy")
        ),
        lambda: fit(
            X, torch.tensor([0.0, 1.0, 2.0] * 4).long(), model=compiled(loss="cross_entropy")
        ),
    ),
    "items by number": (
        lambda: fit(Numbered(PAIRS)),
        "If data[i] is a sample, pass DataLoader(data, batch_size=32); if it is a batch, "
        "DataLoader(data, batch_size=None).",
        lambda: fit(DataLoader(Numbered(PAIRS), batch_size=32)),
        lambda: fit(DataLoader(Numbered([(X, Y), (X, Y)]), batch_size=None)),
    ),
    "iterator": (
        lambda: fit(iter([(X, Y)]), epochs=2),
        "Pass an object whose __iter__ starts again, such as a DataLoader or a list of batches.",
        lambda: fit(Again(), epochs=2),
        lambda: fit(DataLoader(PAIRS), epochs=2),
        lambda: fit([(X, Y)], epochs=2),
    ),
    "position": (
        lambda: compiled().fit(X, Y, 4, 2, 0, (), 0.0, None, False, None, torch.ones(12), 3),
        "fit takes (x, y, batch_size, epochs, verbose, callbacks, validation_split, "
        "validation_data, shuffle, class_weight, sample_weight) by position, got 12 values. Pass "
        "all others by name.",
        lambda: compiled().fit(
            X, Y, 4, 2, 0, (), 0.0, None, False, None, torch.ones(12), steps_per_epoch=3
        ),
    ),
    "not compiled": (
        lambda: ipufit.Model(linear()).fit(X, Y),
        "Call model.compile(optimizer='adam', loss='cross_entropy') first.",
        lambda: fit(
            X, torch.arange(12) % 3, model=compiled(optimizer="adam", loss="cross_entropy")
        ),
    ),
    "no optimizer": (
        lambda: fit(model=compiled(None)),
        "Call compile with one, such as optimizer='adam'.",
        lambda: fit(model=compiled(optimizer="adam")),
    ),
    "optimizer and options": (
        lambda: compiled(("adam", {"learning_rate": 0.01, "eps": 1e-4})),
        "Pass a factory: lambda params: torch.optim.Adam(params, lr=0.01, eps=0.0001).",
        lambda: compiled(lambda params: torch.optim.Adam(params, lr=0.01, eps=0.0001)),
    ),
    "optimizer and learning rate": (
        lambda: compiled(["sgd", 0.1]),
        "Pass a factory: lambda params: torch.optim.SGD(params, lr=0.1).",
        lambda: compiled(lambda params: torch.optim.SGD(params, lr=0.1)),
    ),
    "optimizer as Keras writes it": (
        lambda: compiled({"class_name": "Adam", "config": {"learning_rate": 0.01}}),
        "Pass a factory: lambda params: torch.optim.Adam(params, lr=0.01).",
        lambda: compiled(lambda params: torch.optim.Adam(params, lr=0.01)),
    ),
    "optimizer class and options": (
        lambda: compiled((ipufit.optim.LAMB, {"lr": 0.01})),
        "Pass a factory: lambda params: ipufit.optim.LAMB(params, lr=0.01).",
        lambda: compiled(lambda params: ipufit.optim.LAMB(params, lr=0.01)),
    ),
    "optimizer factory": (
        lambda: compiled(lambda: None),
        "but too many positional arguments. Write for example lambda params: torch.optim.SGD(",
        lambda: compiled(lambda params: torch.optim.SGD(params, lr=0.01)),
    ),
    "no optimizer at all": (
        lambda: compiled(3),
        "Pass for example optimizer='adam'.",
        lambda: compiled(optimizer="adam"),
    ),
    "optimizer": (
        lambda: compiled("adm"),
        "Did you mean 'adam'?",
        lambda: compiled("adam"),
    ),
    "loss": (
        lambda: compiled(loss="msee"),
        "Did you mean 'mse'?",
        lambda: compiled(loss="mse"),
    ),
    "no loss": (
        lambda: compiled(loss=3),
        "Pass for example loss='mse'.",
        lambda: compiled(loss="mse"),
    ),
    "loss class": (
        lambda: compiled(loss=Mean),
        "Pass an instance: loss=Mean(...).",
        lambda: fit(model=compiled(loss=Mean(2.0))),
    ),
    "loss weights": (
        lambda: compiled(loss_weights=[2.0]),
        "Leave it out, or multiply in a callable loss.",
        compiled,
        lambda: fit(model=compiled(loss=lambda p, t: 2.0 * (p - t).square().mean())),
    ),
    "metric": (
        lambda: compiled(metrics="acuracy"),
        "Did you mean 'accuracy'?",
        lambda: compiled(metrics="accuracy"),
    ),
    "switch": (
        lambda: compiled(run_eagerly=1),
        "run_eagerly must be True or False",
        lambda: compiled(run_eagerly=False),
    ),
    "reduction": (
        lambda: compiled(reduction=ipufit.Reduction(gradients="avg")),
        "Reduction.gradients must be one of None, 'mean', 'sum'",
        lambda: compiled(reduction=ipufit.Reduction(gradients="mean")),
        lambda: compiled(reduction=ipufit.Reduction(gradients="sum")),
    ),
    "shards": (
        lambda: compiled(memory=ipufit.Memory(shard=True)),
        "Memory.shard must be one of None, 'none', 'optimizer', 'weights', got True.",
        lambda: compiled(memory=ipufit.Memory(shard="optimizer")),
        lambda: compiled(memory=ipufit.Memory(shard="weights")),
    ),
    "module class": (
        lambda: ipufit.Model(OwnLoss),
        "Pass an instance, such as ipufit.Model(MyNet()).",
        lambda: ipufit.Model(OwnLoss()),
    ),
    "engine": (
        lambda: ipufit.Model(linear(), engine="gpu"),
        "Pass for example engine='embedded'.",
        lambda: ipufit.Model(linear(), engine="embedded"),
    ),
    "device": (
        lambda: ipufit.Model(linear(), device="gpu"),
        "Leave it out to run where the module is, or pass device='cpu'.",
        lambda: ipufit.Model(linear()),
        lambda: ipufit.Model(linear(), device="cpu"),
    ),
}


class Heads(nn.Module):
    """Two outputs by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x):
        return {"first": self.first(x), "second": self.second(x)}


def heads(loss, **options):
    """A model with two outputs; and a fit of it."""
    model = compiled(loss=loss, module=Heads(), **options)
    return fit(X, {"first": Y, "second": Y}, model=model)


CLASSES = torch.arange(12) % 3
TEXTS = [{"ids": torch.arange(1 + i % 5), "labels": torch.tensor(i % 2)} for i in range(12)]
BOTH = {"first": "mse", "second": "mae"}
EACH = nn.MSELoss(reduction="none")
UPDATE_RATE = {"lr": lambda update: 0.1 * 0.99**update}


def classify(target=CLASSES, module=None, x=X, **options):
    """A fit of class indices."""
    return fit(x, target, model=compiled(loss="cross_entropy", module=module), **options)


class Reads(nn.Module):
    """Reads texts of any length."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 2)

    def forward(self, ids):
        return self.embed(ids).mean(1)


def texts(loader):
    """A fit of texts and their labels."""
    return fit(loader, model=compiled(loss="cross_entropy", module=Reads()))


def bucketed(dataset=TEXTS, **options):
    """Batches of samples of several lengths."""
    return ipufit.data.LengthBuckets(dataset, **{"batch_size": 4, **options})


# More of those that are met first: by data, losses, optimizers, schedules, buckets and settings.
ADVICE.update(
    {
        "no samples": (
            lambda: fit(X[:0], Y[:0]),
            "has no samples. Pass at least one.",
            lambda: fit(X[:1], Y[:1]),
        ),
        "rows that differ": (
            lambda: fit([[1.0, 2.0, 3.0, 4.0], [1.0]], Y[:2]),
            "Pad them, or pass batches whose rows have equal length.",
            lambda: fit([[1.0, 2.0, 3.0, 4.0], [1.0, 0.0, 0.0, 0.0]], Y[:2]),
        ),
        "a scalar": (
            lambda: fit(torch.tensor(1.0), Y),
            "Pass one row per sample",
            lambda: fit(torch.ones(12, 4), Y),
        ),
        "parts of other lengths": (
            lambda: fit(X, Y[:5]),
            "Every part needs one row for each sample.",
            lambda: fit(X[:5], Y[:5]),
        ),
        "sparse": (
            lambda: fit(X.to_sparse(), Y),
            "Pass x.to_dense()",
            lambda: fit(X.to_sparse().to_dense(), Y),
        ),
        "masked": (
            lambda: fit(np.ma.masked_array(X.numpy(), X.numpy() > 0.9), Y),
            "Pass x.filled(value)",
            lambda: fit(np.ma.masked_array(X.numpy(), X.numpy() > 0.9).filled(0.9), Y),
        ),
        "requires grad": (
            lambda: fit(X.clone().requires_grad_(), Y),
            "Pass x.detach().",
            lambda: fit(X.clone().requires_grad_().detach(), Y),
        ),
        "requires grad in a batch": (
            lambda: fit([(X.clone().requires_grad_(), Y)]),
            "Pass tensor.detach().",
            lambda: fit([(X.clone().requires_grad_().detach(), Y)]),
        ),
        "another dtype": (
            lambda: fit(X.numpy().astype("longdouble"), Y),
            "Convert it, for example with array.astype('float32').",
            lambda: fit(X.numpy().astype("longdouble").astype("float32"), Y),
        ),
        "an empty batch": (
            lambda: fit([(X[:0], Y[:0]), (X, Y)]),
            "Leave empty batches out of the loader.",
            lambda: fit([(X, Y)]),
        ),
        "a batch of three lengths": (
            lambda: fit([(X, Y[:5])]),
            "Check the dataset or collate_fn.",
            lambda: fit([(X[:5], Y[:5])]),
        ),
        "a target that is missing": (
            lambda: fit([(X, None)]),
            "Yield (inputs, target), or use compile(loss=None) if the module computes its own",
            lambda: fit([(X, Y)]),
            lambda: fit([(X,)], model=compiled(loss=None, module=OwnLoss())),
        ),
        "a single part": (
            lambda: fit([(X,)]),
            "if the module computes its own loss, use compile(loss=None).",
            lambda: fit([(X, Y)]),
            lambda: fit([(X,)], model=compiled(loss=None, module=OwnLoss())),
        ),
        "a weight that is negative": (
            lambda: fit(X, Y, sample_weight=-torch.ones(12)),
            "Use 0 to leave a sample out.",
            lambda: fit(X, Y, sample_weight=torch.tensor([0.0] + [1.0] * 11)),
        ),
        "weights of zero": (
            lambda: fit(X, Y, sample_weight=torch.zeros(12)),
            "Leave it out, or give some samples a positive weight.",
            fit,
            lambda: fit(X, Y, sample_weight=torch.ones(12)),
        ),
        "a weight without a target": (
            lambda: fit(X, sample_weight=torch.ones(12), model=compiled("sgd", "mse")),
            "Pass y= as well.",
            lambda: fit(X, y=Y, sample_weight=torch.ones(12)),
        ),
        "class weights": (
            lambda: classify(class_weight=[1.0, 5.0]),
            "class_weight must be a dict of weights by class index, such as {0: 1.0, 1: 5.0}",
            lambda: classify(class_weight={0: 1.0, 1: 5.0}),
        ),
        "a class below zero": (
            lambda: classify(class_weight={-1: 2.0}),
            "Count the classes from 0, as in the target.",
            lambda: classify(class_weight={0: 2.0}),
        ),
        "a class weight below zero": (
            lambda: classify(class_weight={0: -2.0}),
            "Use 0 to leave a class out.",
            lambda: classify(class_weight={0: 0.0}),
        ),
        "a class without an output": (
            lambda: classify(class_weight={3: 2.0}),
            "Remove the other keys, or give the module an output for each class.",
            lambda: classify(class_weight={2: 2.0}),
            lambda: classify(class_weight={3: 2.0}, module=nn.Linear(4, 4)),
        ),
        "loading": (
            lambda: fit(loading=3),
            "Write for example Loading(limit_train_batches=10).",
            lambda: fit(loading=ipufit.Loading(limit_train_batches=10)),
        ),
        "the class Validation": (
            lambda: fit(validation_data=ipufit.Validation),
            "Pass Validation((x_val, y_val)).",
            lambda: fit(validation_data=ipufit.Validation((X, Y))),
        ),
        "an epoch that is none": (
            lambda: fit(epochs=2, validation_data=ipufit.Validation((X, Y), freq=[5])),
            "must name an epoch from 1 to 2, counted from 1",
            lambda: fit(epochs=2, validation_data=ipufit.Validation((X, Y), freq=[2])),
        ),
        "labels": (
            lambda: classify(CLASSES + 1),
            "They seem to start at 1: subtract 1.",
            lambda: classify(CLASSES + 1 - 1),
        ),
        "more labels than outputs": (
            lambda: classify(CLASSES * 2),
            "Let the module return 5 classes, or number labels from 0.",
            lambda: classify(CLASSES * 2, module=nn.Linear(4, 5)),
            lambda: classify(torch.unique(CLASSES * 2, return_inverse=True)[1]),
        ),
        "a label below zero": (
            lambda: classify(CLASSES - 1),
            "Classes count from 0; samples to ignore have the label -100.",
            lambda: classify(torch.where(CLASSES == 0, -100, CLASSES - 1)),
        ),
        "one-hot integers": (
            lambda: classify(nn.functional.one_hot(CLASSES, 3)),
            "For a one-hot target, pass target.argmax(1).",
            lambda: classify(nn.functional.one_hot(CLASSES, 3).argmax(1)),
        ),
        "no probabilities": (
            lambda: fit(X, Y.abs(), model=compiled(loss="bce", module=nn.Linear(4, 3))),
            "Use loss='bce_with_logits', or end the module with nn.Sigmoid().",
            lambda: fit(X, Y.abs(), model=compiled(loss="bce_with_logits")),
            lambda: fit(
                X, Y.abs(), model=compiled(loss="bce", module=nn.Sequential(linear(), nn.Sigmoid()))
            ),
        ),
        "class indices for mse": (
            lambda: fit(X, CLASSES, model=compiled(loss="mse")),
            "For class indices, use loss='cross_entropy'.",
            classify,
        ),
        "outputs by name": (
            lambda: heads("mse"),
            "Name the output, loss={'first': 'mse'}, or pass a callable loss(prediction, target) "
            "that picks its tensors.",
            lambda: heads({"first": "mse"}),
            lambda: heads(lambda p, t: (p["first"] - t["first"]).square().mean()),
        ),
        "no loss at all": (
            lambda: heads({"first": None}),
            "or loss=None when the module returns (outputs, loss).",
            lambda: heads({"first": "mse"}),
            lambda: fit(X, model=compiled(loss=None, module=OwnLoss())),
        ),
        "weights of several losses": (
            lambda: heads(BOTH, loss_weights=[1.0]),
            "Give one number for each loss.",
            lambda: heads(BOTH, loss_weights={"first": 1.0, "second": 2.0}),
        ),
        "a weight for no output": (
            lambda: heads(BOTH, loss_weights={"third": 1.0}),
            "Use these names.",
            lambda: heads(BOTH, loss_weights={"second": 1.0}),
        ),
        "a weight that is no number": (
            lambda: heads(BOTH, loss_weights={"first": float("nan")}),
            "Give for example 0.5.",
            lambda: heads(BOTH, loss_weights={"first": 0.5}),
        ),
        "metrics by position": (
            lambda: compiled("adam", "mse", loss_weights=["mae"]),
            "Write metrics=[...].",
            lambda: compiled("adam", "mse", metrics=["mae"]),
        ),
        "one value per sample": (
            lambda: compiled(loss=nn.MSELoss(reduction="none")),
            "Use reduction='mean', or wrap it in a callable that reduces it.",
            lambda: fit(model=compiled(loss=nn.MSELoss(reduction="mean"))),
            lambda: fit(
                model=compiled(loss=lambda p, t: nn.MSELoss(reduction="none")(p, t).mean())
            ),
        ),
        "loss=None": (
            lambda: fit(X, model=compiled(loss=None)),
            "Return (outputs, loss) from forward, or pass loss= to compile.",
            lambda: fit(X, model=compiled(loss=None, module=OwnLoss())),
            lambda: fit(model=compiled(loss="mse")),
        ),
        "another module's optimizer": (
            lambda: compiled(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)),
            "Build it from this module: SGD(module.parameters(), ...).",
            lambda: own_optimizer(linear()),
        ),
        "no optimizers": (
            lambda: compiled([]),
            "got an empty list.",
            lambda: compiled("adam"),
        ),
        "patterns of parameters": (
            lambda: compiled({1: "adam"}),
            "Write for example {'encoder.*': 'adamw', '*': 'sgd'}.",
            lambda: compiled({"encoder.*": "adamw", "*": "sgd"}, module=Parts()),
        ),
        "a class that needs more": (
            lambda: compiled(Demanding),
            "Pass a factory: lambda params: Demanding(params, lr=0.01).",
            lambda: compiled(lambda params: Demanding(params, lr=0.01)),
        ),
        "lbfgs": (
            lambda: compiled({"*": "lbfgs"}),
            "Pass it alone, with one loss, or use another optimizer.",
            lambda: fit(model=compiled("lbfgs")),
        ),
        "a frozen module": (
            lambda: compiled(module=linear().requires_grad_(False)),
            "requires gradients",
            lambda: compiled(module=linear().requires_grad_()),
        ),
        "a schedule": (
            lambda: compiled(lr_scheduler="cosin"),
            "Did you mean 'cosine'?",
            lambda: fit(model=compiled(lr_scheduler="cosine")),
        ),
        "no schedule": (
            lambda: compiled(lr_scheduler=3),
            "Pass for example 'cosine'",
            lambda: fit(model=compiled(lr_scheduler="cosine")),
        ),
        "a schedule without an optimizer": (
            lambda: compiled(None, lr_scheduler="cosine"),
            "Leave it out of a model that only evaluates and predicts.",
            lambda: compiled(None).evaluate(X, Y, verbose=0),
        ),
        "an empty schedule": (
            lambda: compiled(lr_scheduler={}),
            "Pass for example {'lr': lambda update: 0.1 * 0.99 ** update}.",
            lambda: fit(model=compiled(lr_scheduler=UPDATE_RATE)),
        ),
        "a rate that is fixed": (
            lambda: compiled(lr_scheduler={"lr": 0.1}),
            "Pass for example {'lr': lambda update: 0.1 * 0.99 ** update}, or set a "
            "constant value in the optimizer.",
            lambda: fit(model=compiled(lr_scheduler=UPDATE_RATE)),
            lambda: compiled(lambda params: torch.optim.SGD(params, lr=0.1)),
        ),
        "a length of warmup": (
            lambda: ipufit.optim.schedules.Cosine(warmup=1.5),
            "Write for example warmup=100, or warmup=0.1.",
            lambda: ipufit.optim.schedules.Cosine(warmup=100),
            lambda: fit(
                epochs=10,
                model=compiled(lr_scheduler=ipufit.optim.schedules.Cosine(warmup=0.1)),
            ),
        ),
        "warmup longer than the run": (
            lambda: fit(model=compiled(lr_scheduler=ipufit.optim.schedules.Cosine(warmup=100))),
            "or a share of the run such as warmup=0.1.",
            lambda: fit(
                epochs=10,
                model=compiled(lr_scheduler=ipufit.optim.schedules.Cosine(warmup=0.1)),
            ),
        ),
        "an interval": (
            lambda: compiled(lr_scheduler="cosine", lr_scheduler_interval="step"),
            "lr_scheduler_interval must be 'update' or 'epoch'",
            lambda: fit(model=compiled(lr_scheduler="cosine", lr_scheduler_interval="update")),
            lambda: fit(model=compiled(lr_scheduler="cosine", lr_scheduler_interval="epoch")),
        ),
        "two bounds": (
            lambda: ipufit.Clip(norm=1.0, global_norm=1.0),
            "Choose one: norm for each parameter, global_norm for all together",
            lambda: compiled(clip=ipufit.Clip(norm=1.0)),
            lambda: compiled(clip=ipufit.Clip(global_norm=1.0)),
        ),
        "a bound": (
            lambda: compiled(clip=1.0),
            "Write for example clip=ipufit.Clip(global_norm=1.0).",
            lambda: fit(model=compiled(clip=ipufit.Clip(global_norm=1.0))),
        ),
        "momentum of averages": (
            lambda: ipufit.EMA(momentum=1.5),
            "such as 0.99.",
            lambda: fit(model=compiled(ema=ipufit.EMA(momentum=0.99))),
        ),
        "every n": (
            lambda: compiled(outputs="every_n"),
            "Pass for example outputs=ipufit.Outputs('every_n', 4).",
            lambda: compiled(outputs=ipufit.Outputs("every_n", 4)),
        ),
        "recordings": (
            lambda: compiled(max_recordings=0),
            "max_recordings must be an integer of at least 1",
            lambda: fit(model=compiled(max_recordings=1), batch_size=4),
        ),
        "the class Checkpoint": (
            lambda: fit(checkpoint=ipufit.Checkpoint),
            "Pass Checkpoint('runs/1').",
            lambda: fit(checkpoint=ipufit.Checkpoint("runs/1")),
        ),
        "resume": (
            lambda: ipufit.Checkpoint("runs/2", resume=True),
            "Use 'auto', which starts a new run if there is no checkpoint yet.",
            lambda: fit(checkpoint=ipufit.Checkpoint("runs/2", resume="auto")),
        ),
        "resume without a folder": (
            lambda: ipufit.Checkpoint(resume="auto"),
            "Pass Checkpoint('runs/1', resume='auto'), or the path of one checkpoint as resume.",
            lambda: fit(checkpoint=ipufit.Checkpoint("runs/3", resume="auto")),
        ),
        "a metric that is none": (
            lambda: compiled(metrics=[3]),
            "a metric must be a name, a callable (prediction, target), or an object",
            lambda: fit(model=compiled(metrics=["mae"])),
            lambda: fit(model=compiled(metrics=[lambda p, t: (p - t).abs().mean()])),
        ),
        "accuracy of several labels": (
            lambda: fit(
                X, (Y > 0).float(), model=compiled("sgd", "bce_with_logits", metrics="acc")
            ),
            "for several labels, 'binary_accuracy_with_logits', or 'binary_accuracy' where the "
            "module returns probabilities.",
            lambda: fit(
                X,
                (Y > 0).float(),
                model=compiled("sgd", "bce_with_logits", metrics="binary_accuracy_with_logits"),
            ),
        ),
        "boundaries": (
            lambda: bucketed(lengths=[1] * 12, boundaries=(64, 32)),
            "Write for example boundaries=(32, 64, 128).",
            lambda: bucketed(lengths=[1] * 12, boundaries=(32, 64, 128)),
        ),
        "a sample that is too long": (
            lambda: bucketed(lengths=[100] * 12, boundaries=(32, 64)),
            "Add a boundary, or cut the samples.",
            lambda: bucketed(lengths=[100] * 12, boundaries=(32, 64, 128)),
            lambda: bucketed(lengths=[64] * 12, boundaries=(32, 64)),
        ),
        "lengths": (
            lambda: bucketed(lengths=[1, 2]),
            "Pass a list of them, or a function of a sample.",
            lambda: bucketed(lengths=[1] * 12),
            lambda: bucketed(lengths=lambda sample: len(sample["ids"])),
        ),
        "samples of several sizes": (
            lambda: texts(DataLoader(TEXTS, 4)),
            "Pass a collate_fn that pads the samples of a batch to one size, such as the pad of an "
            "ipufit.data.LengthBuckets(...) over the dataset.",
            lambda: texts(DataLoader(TEXTS, batch_sampler=bucketed(), collate_fn=bucketed().pad)),
        ),
        "samples of several sizes in a worker": (
            lambda: texts(DataLoader(TEXTS[4:], 4, num_workers=1)),
            "Pass a collate_fn that pads the samples of a batch to one size, such as the pad of an "
            "ipufit.data.LengthBuckets(...) over the dataset.",
            lambda: texts(
                DataLoader(
                    TEXTS, batch_sampler=bucketed(), collate_fn=bucketed().pad, num_workers=1
                )
            ),
        ),
        "no length": (
            lambda: bucketed([1.0, 2.0] * 6),
            "Pass lengths=, a list of integers or a function of a sample.",
            lambda: bucketed([1.0, 2.0] * 6, lengths=[1] * 12),
            lambda: bucketed([1.0, 2.0] * 6, lengths=int),
        ),
        "preflight before compile": (
            lambda: ipufit.Model(linear()).preflight(X),
            "Call model.compile(optimizer='adam', loss='cross_entropy') first.",
            lambda: compiled(optimizer="adam", loss="cross_entropy").preflight((X, CLASSES)),
        ),
        "evaluate before compile": (
            lambda: ipufit.Model(linear()).evaluate(X, CLASSES),
            "Pass loss='cross_entropy', or call model.compile(",
            lambda: ipufit.Model(linear()).evaluate(X, CLASSES, loss="cross_entropy", verbose=0),
        ),
        "loss of a model that has one": (
            lambda: compiled().evaluate(X, Y, loss="mae"),
            "Leave them out, or call model.compile(loss=...) again.",
            lambda: compiled().evaluate(X, Y, verbose=0),
            lambda: compiled(None, loss="mae").evaluate(X, Y, verbose=0),
        ),
        "explain without data": (
            lambda: compiled().explain(batch_size=4),
            "Pass explain(x, ...), or leave them out to explain the last fit.",
            lambda: compiled().explain(X, batch_size=4),
        ),
    }
)


def own_optimizer(module):
    """A model with an optimizer over its own parameters."""
    return compiled(torch.optim.SGD(module.parameters(), lr=0.1), module=module)


class Demanding(torch.optim.SGD):
    """Needs a learning rate."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)


@pytest.mark.long("ipu-standin")
@pytest.mark.filterwarnings("ignore:training data has other dtypes:UserWarning")
class Rivals(nn.Module):
    """Two parts that are moved by losses of their own."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = linear(), linear()

    def forward(self, x):
        return self.actor(x)


def losses_of(*names):
    """A step that returns a loss of each of these parts, under its name, or a single one."""

    def step(net, batch):
        values = {name: getattr(net, name)(batch[0]).square().mean() for name in names}
        return values if len(names) > 1 else values[names[0]]

    return step


def stepped(*steps, optimizer="sgd", module=Rivals, work=None, **options):
    """A fit of steps of one's own."""
    loss = list(steps) if len(steps) > 1 else steps[0]
    return fit(model=compiled(optimizer, loss, module(), **options), **(work or {}))


def named(name, **moves):
    """A step that returns the loss of a part in a dict."""
    step = losses_of(name)
    return ipufit.TrainStep(lambda net, batch: {name: step(net, batch)}, **moves)


MOVES = {"actor": "actor", "critic": "critic"}
TAKES_NO_BATCH = "For a method of the module, pass the function, such as MyModule.training_step."


def of_module(net, batch):
    """A step as a function."""
    return net(batch[0]).mean()


class Critics(nn.Module):
    """A part alone, under both names."""

    def __init__(self):
        super().__init__()
        self.critic = linear()

    @property
    def actor(self):
        return self.critic


def frozen():
    """Rivals of which one is not trained."""
    net = Rivals()
    net.critic.requires_grad_(False)
    return net


# Of steps of one's own, and of several optimizers.
ADVICE.update(
    {
        "a step that is none": (
            lambda: ipufit.TrainStep(3),
            "Write for example TrainStep(lambda module, batch: module(batch[0]).mean()).",
            lambda: stepped(ipufit.TrainStep(lambda module, batch: module(batch[0]).mean())),
        ),
        "a step of other arguments": (
            lambda: ipufit.TrainStep(lambda batch: batch),
            TAKES_NO_BATCH,
            lambda: stepped(ipufit.TrainStep(of_module)),
        ),
        "at_once of one loss": (
            lambda: ipufit.TrainStep(losses_of("actor"), at_once=True),
            "Write for example moves={'policy': 'actor', 'value': 'critic'}, or leave at_once out.",
            lambda: ipufit.TrainStep(
                losses_of("actor"), moves={"policy": "actor", "value": "critic"}, at_once=True
            ),
            lambda: stepped(ipufit.TrainStep(losses_of("actor"))),
        ),
        "moves of nothing": (
            lambda: ipufit.TrainStep(losses_of("actor"), moves={}),
            "Write for example moves={'critic': 'critic', 'actor': 'actor'}.",
            lambda: stepped(ipufit.TrainStep(losses_of("critic", "actor"), moves=MOVES)),
        ),
        "moves of outputs": (
            lambda: ipufit.TrainStep(losses_of("actor"), moves={"outputs": "actor"}),
            "Rename the loss.",
            lambda: ipufit.TrainStep(losses_of("actor"), moves={"output": "actor"}),
        ),
        "moves of a number": (
            lambda: ipufit.TrainStep(losses_of("actor"), moves=3),
            "Write for example moves='critic', or moves={'critic': 'critic'}.",
            lambda: stepped(ipufit.TrainStep(losses_of("critic"), moves="critic"), module=Critics),
            lambda: stepped(named("critic", moves={"critic": "critic"}), module=Critics),
        ),
        "moves of numbers": (
            lambda: ipufit.TrainStep(losses_of("actor"), moves=[3]),
            "Write for example 'critic', or 'critic.*.weight'.",
            lambda: ipufit.TrainStep(losses_of("critic"), moves=["critic"]),
            lambda: ipufit.TrainStep(losses_of("critic"), moves=["critic.*.weight"]),
        ),
        "no dict of losses": (
            lambda: stepped(ipufit.TrainStep(losses_of("actor"), moves=MOVES)),
            "Return each loss under its name.",
            lambda: stepped(ipufit.TrainStep(losses_of("actor", "critic"), moves=MOVES)),
        ),
        "a loss that is missing": (
            lambda: stepped(named("actor", moves=MOVES)),
            "Return each loss under its name, or correct moves.",
            lambda: stepped(ipufit.TrainStep(losses_of("actor", "critic"), moves=MOVES)),
        ),
        "a logged vector": (
            lambda: stepped(
                ipufit.TrainStep(lambda net, batch: {"loss": net(batch[0]).mean(), "x": batch[0]})
            ),
            "Reduce it, or put it into 'outputs'.",
            lambda: stepped(
                ipufit.TrainStep(
                    lambda net, batch: {"loss": net(batch[0]).mean(), "x": batch[0].mean()}
                )
            ),
            lambda: stepped(
                ipufit.TrainStep(
                    lambda net, batch: {"loss": net(batch[0]).mean(), "outputs": batch[0]}
                )
            ),
        ),
        "tokens of a step": (
            lambda: stepped(
                ipufit.TrainStep(of_module), reduction=ipufit.Reduction(normalize="tokens")
            ),
            "Leave it out.",
            lambda: stepped(ipufit.TrainStep(of_module)),
        ),
        "one name twice": (
            lambda: stepped(*[named("actor", moves={"actor": "actor"})] * 2, module=Critics),
            "Rename one, in moves and in what the step returns.",
            lambda: stepped(
                named("actor", moves={"actor": "actor"}),
                named("critic", moves={"critic": "critic"}),
            ),
        ),
        "steps without names": (
            lambda: stepped(ipufit.TrainStep(of_module), ipufit.TrainStep(of_module)),
            "Write for example TrainStep(function, moves={'critic': 'critic'}), and return "
            "{'critic': loss}.",
            lambda: stepped(
                named("critic", moves={"critic": "critic"}),
                named("actor", moves={"actor": "actor"}),
            ),
        ),
        "steps now and then": (
            lambda: stepped(
                named("critic", moves={"critic": "critic"}, every=2),
                named("actor", moves={"actor": "actor"}, every=2),
            ),
            "Give the most frequent one every=1, or gradient_accumulation= of fit",
            lambda: stepped(
                named("critic", moves={"critic": "critic"}, every=1),
                named("actor", moves={"actor": "actor"}, every=2),
            ),
            lambda: stepped(
                named("critic", moves={"critic": "critic"}),
                named("actor", moves={"actor": "actor"}),
                work={"gradient_accumulation": 2},
            ),
        ),
        "a part that nothing moves": (
            lambda: stepped(named("actor", moves={"actor": "actor"})),
            "Name them in moves, or call requires_grad_(False) on them before compile.",
            lambda: stepped(ipufit.TrainStep(losses_of("actor", "critic"), moves=MOVES)),
            lambda: stepped(named("actor", moves={"actor": "actor"}), module=frozen),
        ),
        "a part that there is not": (
            lambda: stepped(named("actor", moves={"actor": "agent"})),
            "Name one of the parts 'actor', 'critic', or parameters in them.",
            lambda: stepped(ipufit.TrainStep(losses_of("actor", "critic"), moves=MOVES)),
            lambda: stepped(
                ipufit.TrainStep(
                    losses_of("actor", "critic"),
                    moves={"actor": ["actor.weight", "actor.bias"], "critic": "critic"},
                )
            ),
        ),
        "losses at once of one part": (
            lambda: stepped(
                ipufit.TrainStep(
                    losses_of("actor", "critic"), moves={"actor": "*", "critic": "*"}, at_once=True
                )
            ),
            "Add them up into one loss, or let them take turns (at_once=False).",
            lambda: stepped(
                ipufit.TrainStep(
                    lambda net, batch: sum(losses_of("actor", "critic")(net, batch).values())
                )
            ),
            lambda: stepped(
                ipufit.TrainStep(losses_of("actor", "critic"), moves={"actor": "*", "critic": "*"})
            ),
        ),
        "patterns that overlap": (
            lambda: compiled({"actor": "sgd", "actor.weight": "adam"}, module=Rivals()),
            "The patterns must not overlap.",
            lambda: compiled({"actor": "sgd", "critic": "adam"}, module=Rivals()),
        ),
        "a part without an optimizer": (
            lambda: compiled({"actor": "sgd"}, module=Rivals()),
            "Add a pattern for it, '*' for all the others, or freeze it with "
            "requires_grad_(False).",
            lambda: compiled({"actor": "sgd", "critic": "sgd"}, module=Rivals()),
            lambda: compiled({"actor": "sgd", "*": "adam"}, module=Rivals()),
            lambda: compiled({"actor": "sgd"}, module=frozen()),
        ),
        "a pattern of nothing": (
            lambda: compiled({"agent": "sgd", "*": "adam"}, module=Rivals()),
            "Its parameters are 'actor.weight', 'actor.bias', 'critic.weight', 'critic.bias'.",
            lambda: compiled({"actor.weight": "sgd", "*": "adam"}, module=Rivals()),
        ),
        "a schedule of no optimizer": (
            lambda: compiled(
                {"actor": "sgd", "critic": "sgd"},
                module=Rivals(),
                lr_scheduler={"actor": "cosine", "agent": "cosine"},
            ),
            "There is 'actor', 'critic'.",
            lambda: compiled(
                {"actor": "sgd", "critic": "sgd"},
                module=Rivals(),
                lr_scheduler={"actor": "cosine"},
            ),
        ),
    }
)


@pytest.mark.parametrize("name", ADVICE)
def test_what_an_error_advises_works(name, tmp_path, monkeypatch):
    """Advice that does not work is worse than none."""
    monkeypatch.chdir(tmp_path)
    wrong, advice, *right = ADVICE[name]
    with pytest.raises((ConfigurationError, DataError, ipufit.errors.NotCompiledError)) as caught:
        wrong()
    assert advice in str(caught.value)
    for call in right:
        call()


# ---- names of arguments -------------------------------------------------------------------------

LOADER = DataLoader(PAIRS, 2)
# What the calls in the table stand on.
NAMES = {"ipufit": ipufit, "torch": torch, "x": X, "y": Y, "val_loader": LOADER, "dataset": PAIRS}
NAMES.update(DataLoader=DataLoader, module=linear(), options=None)


class Parts(nn.Module):
    """Has the layers that the calls name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def forward(self, x):
        return self.head(self.blocks(self.encoder(x)))[:, :3]


def with_fit(**options):
    """A fit of two updates with the arguments that a call of the table has."""
    data = {} if "x" in options else {"x": X, "y": Y}
    options = {**QUIET, **data, **options}
    if "steps_per_epoch" in options:
        options.update(steps_per_epoch=2, batch_size=4)
    return compiled().fit(**options)


def with_compile(**options):
    """A model with the arguments that a call of the table has."""
    classes = "loss" in options or "metrics" in options
    given = {"optimizer": "adam", "loss": "cross_entropy" if classes else "mse", **options}
    model = ipufit.Model(Parts())
    model.compile(**given)
    return model


OWNERS = {
    "compile": with_compile,
    "fit": with_fit,
    "evaluate": lambda x=PAIRS, **options: compiled().evaluate(x, verbose=0, **options),
    "Model": lambda **options: ipufit.Model(**{"module": linear(), **options}),
}
ROWS = [(word, row) for names, row in REPLACEMENTS.items() for word in names.split()]


@pytest.mark.parametrize("call", [row for row in REPLACEMENTS.values() if "(" in row])
@pytest.mark.embedded_only("some of the arguments are refused for an IPU, in a text of their own")
def test_what_is_written_in_place_of_an_argument_works(call, tmp_path, monkeypatch):
    """Every call of the table is made; a sentence names what there is."""
    monkeypatch.chdir(tmp_path)
    if call.partition("(")[0] in OWNERS:
        eval(call, {**NAMES, **OWNERS})
        return
    for name in re.findall(r"ipufit(?:\.\w+)+", call):
        assert eval(name, NAMES), name


@pytest.mark.parametrize(("word", "row"), ROWS)
def test_an_argument_of_another_library_is_answered_with_ours(word, row):
    """In the words of the table: the argument where the method has it, else the call."""
    method, _, name = word.rpartition(".")
    method = method or "fit"
    with pytest.raises(UnknownArgumentError) as caught:
        getattr(compiled(), method)(X, **{name: 1})
    # Another line says what else is wrong, such as a target that is missing.
    text = str(caught.value).split("\n")[0]
    owner, _, rest = row.partition("(")
    if owner not in OWNERS:
        assert text == f"{method} has no argument {name!r}. {row}"
        return
    argument, _, remark = rest.partition("  # ")
    written = argument[:-1] if owner == method else f"{owner}(..., {argument}"
    if argument.startswith("x="):
        written = argument[:-1]
    remark = remark and (", " if remark.startswith("or ") else ": ") + remark
    assert text == f"{method} has no argument {name!r}. Write {written}{remark}."


def test_a_name_stands_in_one_row():
    """Two rows for one name would be two answers."""
    words = [word for word, _ in ROWS]
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("method", "name", "written"),
    [
        ("compile", "stages", "parallel=ipufit.Parallel(stages=...)"),
        ("compile", "accumulation_dtype", "precision=ipufit.Precision(accumulation_dtype=...)"),
        ("fit", "limit_train_batches", "loading=ipufit.Loading(limit_train_batches=...)"),
        ("explain", "limit_train_batches", "loading=ipufit.Loading(limit_train_batches=...)"),
        ("fit", "max_restarts", "checkpoint=ipufit.Checkpoint(max_restarts=...)"),
        ("fit", "recompute", "compile(..., memory=ipufit.Memory(recompute=...))"),
        ("summary", "overfit_batches", "fit(..., loading=ipufit.Loading(overfit_batches=...))"),
        ("compile", "ipus", "fit(..., ipus=...)"),
    ],
)
def test_an_argument_that_settings_or_another_method_have_says_where_it_is(method, name, written):
    """Also where the method has one whose name is much alike."""
    with pytest.raises(UnknownArgumentError) as caught:
        getattr(compiled(), method)(**{name: 1})
    text = str(caught.value).split("\n")[0]
    assert text == f"{method} has no argument {name!r}. Write {written}."


def test_all_arguments_of_0_1_0_say_where_they_are():
    """With the argument that the changelog's table has."""
    page = (Path(__file__).parent.parent / "CHANGELOG.md").read_text("utf-8")
    rows = []
    for method in ("compile", "fit", "explain"):
        table = page.partition(f"| `{method}` of 0.1.0 | now |\n")[2].partition("\n\n")[0]
        found = re.findall(r"^\| `(\w+)` \| `(.+)` \|$", table, re.MULTILINE)
        rows += [(method, name, now) for name, now in found]
    assert len(rows) > 45
    for method, name, now in rows:
        with pytest.raises(UnknownArgumentError) as caught:
            getattr(compiled(), method)(**{name: 1})
        argument, _, value = now.partition("=")
        kind = re.match(r"[\w.]*", value).group()
        assert f" {argument}={kind}" in str(caught.value)
        eval(value, NAMES)


def test_names_of_other_libraries_are_no_names_of_ours():
    """A name that is both would never be asked for its hint."""
    for word, _ in ROWS:
        method, _, name = word.rpartition(".")
        for each in [method] if method else ("compile", "fit"):
            assert name not in inspect.signature(getattr(ipufit.Model, each)).parameters


def test_every_argument_that_is_not_there_is_told_at_once():
    """With those of other methods, and those that are misspelt."""
    with pytest.raises(UnknownArgumentError) as caught:
        compiled().fit(X, Y, max_epochs=2, metrics=["mae"], batchsize=4, device="cpu", frobnicate=1)
    lines = str(caught.value).split("\n")
    assert lines[:4] == [
        "fit has no argument 'max_epochs'. Write epochs=3: how many, or a range of their indices.",
        "fit has no argument 'metrics'. Write compile(..., metrics=...).",
        "fit has no argument 'batchsize'. Write batch_size=...",
        "fit has no argument 'device'. Write Model(..., device=...).",
    ]
    assert lines[4].startswith(
        "fit has no argument 'frobnicate'. Leave it out, or use one of these: x, y, batch"
    )
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda model: model.evaluate(X, Y, steps_per_execution=2),
            "evaluate has no argument 'steps_per_execution'. Write device_iterations=4: weight "
            "updates per call of the program, forward passes in evaluate and predict.",
        ),
        (
            lambda model: model.compile("adam", "mse", callbacks=[]),
            "compile has no argument 'callbacks'. Write fit(..., callbacks=...).",
        ),
        (
            lambda model: model.predict(X, verbos=0),
            "predict has no argument 'verbos'. Write verbose=...",
        ),
        (
            lambda model: model.summary(line_lenght=80),
            "summary has no argument 'line_lenght'. Write line_length=...",
        ),
        (
            lambda model: ipufit.Model(model.module, accelerator="gpu"),
            "Model has no argument 'accelerator'. Write engine='embedded', or 'ipu'; device='cuda' "
            "for a GPU.",
        ),
        (
            lambda model: model.predict(X, 4, 0, 1, (), 2),
            "predict takes (x, batch_size, verbose, steps, callbacks) by position, got 6 values. "
            "Pass all others by name.",
        ),
    ],
    ids=["evaluate", "compile", "predict", "summary", "Model", "position"],
)
def test_all_methods_tell_what_was_meant(call, text):
    """By one mechanism; the signature that a reader sees stays."""
    with pytest.raises(UnknownArgumentError) as caught:
        call(compiled())
    assert str(caught.value) == text
    assert "batch_size" in inspect.signature(ipufit.Model.fit).parameters


@pytest.mark.long("ipu-standin")
def test_batch_size_and_epochs_may_be_given_by_position():
    """In the order of Keras."""
    by_name = compiled().fit(X, Y, batch_size=4, epochs=2, **QUIET)
    model = compiled()
    assert model.fit(X, Y, 4, 2, **QUIET).history == by_name.history
    by_position = model.evaluate(X, Y, 4, verbose=0)
    assert by_position == model.evaluate(X, Y, batch_size=4, verbose=0)
    assert torch.equal(model.predict(X, 4, verbose=0), model.predict(X, verbose=0))


def test_all_faults_of_a_call_are_told_whatever_is_wrong_with_the_data():
    """Five bad arguments are one error of five lines."""
    with pytest.raises(ConfigurationError) as caught:
        fit(epochs=0, batch_size=0, ipus=3, device_iterations=0, verbose=9)
    text = str(caught.value)
    assert len(text.split("\n")) == 5
    for name in ("epochs", "batch_size", "`ipus`", "`device_iterations`", "verbose"):
        assert f"{name} must be" in text or f"{name}, the total" in text
    with pytest.raises(ConfigurationError) as caught:
        fit(X, Y[:5], epochs=0, ipus=3, validation_data=(X[:3], Y))
    assert len(str(caught.value).split("\n")) == 4
    with pytest.raises(DataError) as caught:
        fit(X, Y[:5], validation_data=(X[:3], Y))
    assert len(str(caught.value).split("\n")) == 2
    for method in ("evaluate", "predict"):
        data = (X, Y)[: 2 if method == "evaluate" else 1]
        with pytest.raises(ConfigurationError) as caught:
            getattr(compiled(), method)(*data, batch_size=0, ipus=3, steps=0, seed=1.5, verbose=9)
        assert len(str(caught.value).split("\n")) == 5


WRONG_NAMES_AND_VALUES = {
    "compile": (
        lambda: ipufit.Model(linear()).compile("adm", "msee", learning_rate=0.1, metrics="mea"),
        ["no argument 'learning_rate'", "loss 'msee'", "optimizer 'adm'", "metric 'mea'"],
    ),
    "fit": (
        lambda: fit(X, Y[:5], max_epochs=2, batchsize=4, batch_size=0, ipus=3),
        ["argument 'max_epochs'", "'batchsize'", "batch_size must be", "x has 12", "`ipus`, the"],
    ),
    "fit by position": (
        lambda: compiled().fit(X, Y, 0, 1, 0, (), 0.0, None, None, None, None, 3, ipus=3),
        ["by position, got 12 values", "batch_size must be", "`ipus`, the total"],
    ),
    "fit of no compiled model": (
        lambda: ipufit.Model(linear()).fit(X, Y, lr=0.1),
        ["no argument 'lr'", "fit needs a compiled model"],
    ),
    "fit without x": (
        lambda: compiled().fit(train_dataset=PAIRS, batch_size=0),
        ["no argument 'train_dataset'"],
    ),
    "evaluate": (
        lambda: compiled().evaluate(X, Y, max_steps=2, steps=0, return_dict=3, verbose=9),
        ["no argument 'max_steps'", "return_dict must", "steps must be", "verbose must be"],
    ),
    "evaluate with a loss": (
        lambda: ipufit.Model(linear()).evaluate(X, Y, loss="msee", steps=0, nonsense=1),
        ["no argument 'nonsense'", "unknown loss 'msee'", "steps must be"],
    ),
    "predict": (
        lambda: ipufit.Model(linear()).predict(X, batch=4, steps=0, padding_value="a"),
        ["no argument 'batch'", "steps must be", "padding_value must be"],
    ),
    "predict_iter": (
        lambda: compiled().predict_iter(X, batchsize=4, steps=0),
        ["no argument 'batchsize'", "steps must be"],
    ),
    "explain": (
        lambda: compiled().explain(X, Y[:5], epochs=3, steps_per_epoch=0, ipus=3),
        ["no argument 'epochs'", "x has 12 and y has 5", "steps_per_epoch must be", "`ipus`"],
    ),
    "Model": (
        lambda: ipufit.Model(linear, engin="embedded", engine="gpu", device="gpu"),
        ["no argument 'engin'", "Model takes a torch.nn", "engine must be", "device must be one"],
    ),
    "load": (
        lambda: ipufit.load("no.safetensors", linear(), strict=False, device="gpu"),
        ["no argument 'strict'", "device must be one"],
    ),
    "from_lightning": (
        lambda: ipufit.Model.from_lightning(linear(), loss="mse", engine="gpu"),
        ["no argument 'loss'", "engine must be one", "from_lightning takes a LightningModule"],
    ),
    "save": (
        lambda: compiled().save("model.pt", overwrite=True),
        ["no argument 'overwrite'", "the path must end with '.safetensors'"],
    ),
    "load_weights": (
        lambda: compiled().load_weights("no.safetensors", strict=3, map_location="cpu"),
        ["no argument 'map_location'", "strict must be True or False"],
    ),
    "plan": (
        lambda: compiled().plan(X[:4], epochs=1, schedule="x", ipu_memory=0, ipus=3),
        ["no argument 'epochs'", "schedule must be", "ipu_memory must be", "`ipus`"],
    ),
    "compare": (
        lambda: compiled().compare((X, Y), tolerance=1, reference="x", rtol=-1),
        ["no argument 'tolerance'", "reference must be", "rtol must be"],
    ),
    "check_invariance": (
        lambda: compiled().check_invariance((X, Y), ipus=1, rtol=-1),
        ["no argument 'ipus'", "rtol must be"],
    ),
    "summary": (
        lambda: compiled().summary(X, width=80, depth=0),
        ["no argument 'width'", "depth must be"],
    ),
    "find_lr": (
        lambda: compiled().find_lr(X, Y, epochs=1, min_lr=-1),
        ["no argument 'epochs'", "min_lr must be"],
    ),
    "find_batch_size": (
        lambda: compiled().find_batch_size(X, Y, epochs=1, effective_batch_size=0),
        ["no argument 'epochs'", "effective_batch_size must be"],
    ),
    "train_on_batch": (
        lambda: compiled().train_on_batch(X, Y, epochs=1, return_dict=0),
        ["no argument 'epochs'", "return_dict must be"],
    ),
}


@pytest.mark.parametrize("call", WRONG_NAMES_AND_VALUES)
def test_wrong_names_are_told_together_with_bad_values(call):
    """In one error, a line for each, the names first; whoever catches TypeError gets it."""
    make, expected = WRONG_NAMES_AND_VALUES[call]
    with pytest.raises(UnknownArgumentError) as caught:
        make()
    lines = str(caught.value).split("\n")
    assert len(lines) == len(expected), lines
    for line, text in zip(lines, expected):
        assert text in line
    assert isinstance(caught.value, TypeError)


# What methods are called with that take something else than data, inputs alone, or nothing.
ARGUMENTS = {
    "compile": ("adam", "mse"),
    **dict.fromkeys(("predict", "predict_iter", "predict_on_batch", "plan", "check"), (X,)),
    **dict.fromkeys(("summary", "preflight"), (X,)),
    **dict.fromkeys(("compare", "check_invariance"), ((X, Y),)),
    **dict.fromkeys(("save", "save_weights"), ("model.safetensors",)),
    "load_weights": ("weights.safetensors",),
    "close": (),
}
METHODS = [
    *("fit", "evaluate", "explain", "find_lr", "train_on_batch", "test_on_batch"),
    *ARGUMENTS,
]


@pytest.mark.parametrize("method", METHODS)
def test_a_wrong_name_alone_does_no_work(method, tmp_path, monkeypatch, capsys):
    """The other arguments are only checked: nothing is trained, printed or compiled anew."""
    monkeypatch.chdir(tmp_path)
    compiled(momentum).save("weights.safetensors")
    model = compiled()
    calls = []
    model.module.register_forward_hook(lambda *args: calls.append(1))
    weights = [weight.clone() for weight in model.module.parameters()]
    before = repr(model)
    args = ARGUMENTS.get(method, (X, Y))
    with pytest.raises(UnknownArgumentError) as caught:
        getattr(model, method)(*args, nonsense=1)
    assert str(caught.value).startswith(f"{method} has no argument 'nonsense'. Leave it out")
    assert "\n" not in str(caught.value)
    assert not calls
    assert capsys.readouterr().out == ""
    assert os.listdir() == ["weights.safetensors"]
    assert repr(model) == before
    assert all(map(torch.equal, weights, model.module.parameters()))
    # The next call has no wrong name.
    assert fit(model=model).epoch == [0]


@pytest.mark.long("ipu-standin")
def test_the_suggestion_of_fit_is_one_of_its_arguments():
    """``fit(**error.suggestion)`` is how a program follows the advice."""
    model = compiled(momentum)
    with pytest.raises(PlanError) as caught:
        fit(ipus=3, device_iterations=0, model=model)
    assert fit(model=model, **caught.value.suggestion).epoch == [0]


# ---- all texts of the source --------------------------------------------------------------------

CALL = re.compile(
    r"(?<![\w.\"'])(?:compile|fit|evaluate|predict|Model|(?:ipufit|model|torch)[\w.]+)\("
)
# Of PopTorch's models and of the user's module, whose texts call them a model too.
NOT_OURS = ("model.destroy", "model.half", "model.module", "model.parameters")


def calls_in(text):
    """The calls of ipufit's and torch's that a text writes out, each as a node of Python's AST."""
    text = text.replace("\0", "_")
    for found in CALL.finditer(text):
        ends = [text[found.start() : i + 1] for i, sign in enumerate(text) if sign == ")"]
        for written in filter(None, ends):
            try:
                tree = ast.parse(written, mode="eval")
            except SyntaxError:
                continue
            yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))
            break


def called(node):
    """What a call calls; None of what no text of ours would know."""
    name = ast.unparse(node.func)
    if name in OWNERS or name == "predict":
        name = "ipufit.Model" if name == "Model" else f"model.{name}"
    head, *rest = name.split(".")
    if head not in ("ipufit", "model", "torch") or name.startswith(NOT_OURS) or "_" in rest:
        return None
    found = ipufit.Model if head == "model" else importlib.import_module(head)
    for part in rest:
        if inspect.ismodule(found) and not hasattr(found, part):
            if found is ipufit and part == "lightning":  # needs Lightning
                return None
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def test_every_call_that_a_text_writes_out_can_be_made():
    """Errors, warnings and docstrings: what is called exists, and has the arguments by name."""
    written = 0
    for text in {*templates()}:
        for node in calls_in(text):
            try:
                parameters = inspect.signature(called(node)).parameters
            except (TypeError, ValueError):
                continue  # nothing of ours, or without a signature
            written += 1
            takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
            names = {keyword.arg for keyword in node.keywords} - {None, "_"}
            assert takes_any or names <= set(parameters), ast.unparse(node)
    assert written > 250


# Arguments of what is not looked at below, by what has them.
ELSEWHERE = {
    "Lightning": {"accelerator", "dataloader_idx"},
    "PopTorch": {
        "auto_distributed_partitioning",
        "compile_only",
        "max_grad_norm",
        "rebatched_size",
    },
    "torch": {"ord", "size", "use_reentrant"},
    "ipufit.data.LengthBuckets": {"lengths", "pad"},
    "ipufit.distributed": {"address"},
    "ipufit.metrics": {"task"},
    "ipufit.sklearn": {"classes"},
    "ipufit.IPUConfig": {"pod_type", "push_to_hub"},
}


def test_every_argument_that_an_error_says_to_write_exists():
    """Outside of a call, too: 'Leave it out, or pass device='cpu'.'"""
    kinds = [getattr(ipufit, name) for name in ipufit.__all__]
    kinds += [getattr(ipufit.callbacks, name) for name in ipufit.callbacks.__all__]
    calls = [value for value in kinds if inspect.isclass(value)]
    calls += [getattr(ipufit.Model, name) for name in dir(ipufit.Model) if name[0] != "_"]
    calls += [DataLoader, torch.optim.SGD, torch.optim.Adam, nn.Linear, ipufit.load]
    names = set()
    for call in calls:
        with contextlib.suppress(TypeError, ValueError):
            names |= set(inspect.signature(call).parameters)
    said = set()
    for text in {*templates()}:
        said |= set(
            re.findall(r"(?:[Pp]ass|[Ww]rite|[Uu]se|[Gg]ive|or) (?:\w+\(\.\.\., )?(\w+)=\S", text)
        )
    assert len(said) > 50
    others = set().union(*ELSEWHERE.values())
    assert sorted(said - names - others) == []
    assert others <= said
