"""Validation data and metrics that cannot work: found before the first epoch, not after it."""

import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from ipufit.errors import DataError, LossError, MetricError
from tests.faulty import (
    EMPTY,
    SEVERAL,
    Net,
    Samples,
    Told,
    Watched,
    batches,
    compiled,
    fit,
    loader,
    refused,
)

X, Y = batches(1, 8)[0]

# ---- validation data ----------------------------------------------------------------------------


def wide():
    return DataLoader(TensorDataset(torch.zeros(8, 5), Y), batch_size=4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (list, f"validation data {EMPTY}"),
        (
            lambda: DataLoader(TensorDataset(X[:0], Y[:0]), batch_size=4),
            f"validation data {EMPTY}",
        ),
        (
            lambda: loader(samples=5, size=8, drop_last=True),
            "validation data yields no batch: its dataset has 5 samples, batch_size is 8 and "
            "drop_last=True. Use drop_last=False, or a batch_size of at most 5.",
        ),
        (
            lambda: DataLoader(TensorDataset(X), batch_size=4),
            "validation data, batch 0: a batch must be (inputs, target) or (inputs, target, "
            f"sample_weight), got list of 1. {SEVERAL}",
        ),
    ],
    ids=["list", "dataset", "drop_last", "target"],
)
def test_bad_validation_data_is_found_before_training(make, text):
    """Otherwise the first epoch is trained before anybody learns of it."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    told = Told()
    with refused(model, DataError, text):
        fit(model, validation_data=make(), callbacks=[told])
    assert told.hooks == []
    assert engine.built == engine.closed


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("make", [wide, lambda: list(wide())], ids=["loader", "list"])
def test_validation_data_that_the_module_cannot_take_is_found_before_training(make):
    """The text must say that it is the validation data, and how it differs."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    told = Told()
    data = make()
    text = (
        "the module must take the validation data like the training data, but it failed with "
        "layer 'body', Linear(in_features=4, out_features=6, bias=True), needs 4 features in the "
        "last dimension, got shape (4, 5), dtype float32"
    )
    with refused(model, DataError, text, part=True) as caught:
        fit(model, validation_data=data, callbacks=[told])
    assert str(caught.value).endswith(
        ". It got (4, 5) torch.float32 and (4, 3) torch.float32, in training (4, 4) torch.float32 "
        "and (4, 3) torch.float32. Use the same form for both in the dataset or collate_fn."
    )
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert told.hooks == []
    assert engine.built == engine.closed


def test_validation_targets_that_the_loss_cannot_take_are_those_of_validation():
    """The error was that of a training target, which is right."""
    model = compiled(loss="mse")
    told = Told()
    with refused(
        model,
        DataError,
        "the module must take the validation data like the training data, but it failed with "
        "LossError: loss 'mse' needs prediction and target of one shape, got prediction (4, 3) and "
        "target (4, 2). Make both shapes equal. It got (4, 4) torch.float32 and (4, 2) "
        "torch.float32, in training (4, 4) torch.float32 and (4, 3) torch.float32. Use the same "
        "form for both in the dataset or collate_fn.",
    ):
        fit(model, validation_data=[(X[:4], X[:4, :2])], callbacks=[told])
    assert told.hooks == []


@pytest.mark.long
def test_validation_data_that_the_metrics_cannot_take_is_found_before_training():
    """Its targets may be of another kind than those of the training data."""
    model = compiled(loss=lambda prediction, target: (prediction - target.mean()).square().mean())
    fit(model)
    model.compile("sgd", lambda p, t: (p - t.float().mean()).square().mean(), metrics=["mse"])
    told = Told()
    text = (
        "metric 'mse' needs prediction and target of one shape, got prediction (4, 3) and target "
        "(4,). Make both shapes equal."
    )
    labels = DataLoader(TensorDataset(X, torch.arange(8)), batch_size=4)
    with refused(model, MetricError, text):
        fit(model, validation_data=labels, callbacks=[told])
    assert told.hooks == []


class Broken(Samples):
    """Has a sample that can't be read."""

    def __getitem__(self, index):
        if index == 1:
            raise OSError("broken")
        return super().__getitem__(index)


def test_a_sample_that_the_sampler_leaves_out_is_not_looked_at():
    """Who has such a sample leaves it out in this way."""
    data = Broken(list(zip(X, Y)))
    held_out = DataLoader(data, batch_size=4, sampler=SubsetRandomSampler([0, 2, 3, 4, 5]))
    rows, model = [0, 2, 3, 4, 5], compiled()
    history = fit(model, validation_data=held_out).history
    whole = model.evaluate(X[rows], Y[rows], verbose=0)
    assert history["val_loss"] == pytest.approx([whole["loss"]], rel=1e-6)


@pytest.mark.long("ipu-standin")
def test_the_look_at_validation_data_draws_nothing_and_disturbs_nothing():
    """Augmentation in the dataset must give the same numbers with and without the look."""

    class Noisy(Samples):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.randn(4), y

    pairs = list(zip(X, Y))
    histories = []
    for validation in (
        DataLoader(Noisy(pairs), 4),
        DataLoader(Noisy(pairs), 4, sampler=iter_of(range(8))),
    ):
        model = compiled()
        model.module.load_state_dict({k: v.fill_(0.1) for k, v in Net().state_dict().items()})
        outside = torch.get_rng_state()
        histories.append(fit(model, validation_data=validation, epochs=2).history)
        assert torch.equal(torch.get_rng_state(), outside)
    assert histories[0] == histories[1]


def iter_of(indices):
    """A sampler of the user's own, which ipufit can't look into."""

    class Own(torch.utils.data.Sampler):
        def __init__(self):
            pass

        def __iter__(self):
            return iter(indices)

        def __len__(self):
            return len(indices)

    return Own()


# ---- metrics ------------------------------------------------------------------------------------


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_a_metric_that_cannot_take_the_outputs_is_found_before_any_work(method):
    """An epoch that ends in a shape error has trained for nothing."""
    engine = Watched()
    model = compiled(metrics=["accuracy"], engine=lambda: engine)
    told = Told()
    text = (
        "metric 'accuracy' needs class indices, or one value per sample, got prediction and target "
        "of one shape (4, 3). For one-hot targets, use 'categorical_accuracy'; for several labels, "
        "'binary_accuracy_with_logits', or 'binary_accuracy' where the module returns "
        "probabilities."
    )
    with refused(model, MetricError, text):
        if method == "fit":
            fit(model, callbacks=[told])
        else:
            model.evaluate(loader(), callbacks=[told], verbose=0)
    assert told.hooks == []
    assert engine.built == engine.closed == 1


@pytest.mark.long("ipu-standin")
def test_a_metric_that_fails_by_itself_names_what_it_got():
    """The user's metric fails with the user's error, which says nothing of shapes."""

    def broken(prediction, target):
        return 1 / 0

    model = compiled(metrics=[broken])
    told = Told()
    text = (
        "metric 'broken' must take the module's outputs and the targets, got prediction of shape "
        "(4, 3), dtype float32 and target of shape (4, 3), dtype float32, and failed with "
        "ZeroDivisionError: division by zero. Pass a metric for these, or a callable "
        "metric(prediction, target) that converts them."
    )
    with refused(model, MetricError, text) as caught:
        fit(model, callbacks=[told])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert told.hooks == []


@pytest.mark.long("ipu-standin")
def test_a_named_loss_refuses_shapes_that_torch_would_broadcast():
    """(N, 3) against (N,) would train towards a mean over the wrong numbers."""
    model = compiled()
    text = (
        "loss 'mse' needs prediction and target of one shape, got prediction (8, 3) and target "
        "(8,). Make both shapes equal. For class indices, use loss='cross_entropy'."
    )
    with refused(model, LossError, text):
        fit(model, [(X, Y[:, 0])])
