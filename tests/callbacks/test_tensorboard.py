"""TensorBoard: the scalars that are in its files, and what happens without the package."""

import sys

import pytest

from ipufit.callbacks import TensorBoard
from tests.faulty import batches, compiled, fit
from tests.told import Means, refused


def scalars(folder):
    """(step, value) by name."""
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    found = event_accumulator.EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()
    values = {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in tags["scalars"]
    }
    return values, tags["histograms"]


def pairs(values, first=0):
    return [(first + i, pytest.approx(value)) for i, value in enumerate(values)]


@pytest.mark.long("ipu-standin")
def test_epochs(tmp_path):
    """Under Keras' names, training and validation as two curves in one picture."""
    pytest.importorskip("tensorboard")
    model = compiled()
    history = fit(
        model,
        batches(3),
        epochs=2,
        validation_data=batches(1),
        callbacks=[TensorBoard(tmp_path)],
    ).history
    values, histograms = scalars(tmp_path / "train")
    assert values == {
        "epoch_loss": pairs(history["loss"]),
        "epoch_learning_rate": pairs([0.05, 0.05]),
    }
    assert histograms == []
    held_out = history["val_loss"]
    values, _ = scalars(tmp_path / "validation")
    assert values == {
        "epoch_loss": pairs(held_out),
        "evaluation_loss_vs_iterations": [
            (3, pytest.approx(held_out[0])),
            (6, pytest.approx(held_out[1])),
        ],
    }


@pytest.mark.long
def test_executions_and_updates(tmp_path):
    """A batch is an execution; a number counts updates over the epochs."""
    pytest.importorskip("tensorboard")
    means = Means()
    each, second = TensorBoard(tmp_path / "a", update_freq="batch"), None
    assert each.every_updates is None
    second = TensorBoard(tmp_path / "b", update_freq=2)
    assert second.every_updates == 2
    fit(compiled(), batches(3), epochs=2, callbacks=[means, each, second])
    every = [(i + 1, pytest.approx(value)) for i, value in enumerate(means.values)]
    values, _ = scalars(tmp_path / "a" / "train")
    assert values["batch_loss"] == every
    assert set(values) == {"batch_loss", "epoch_loss", "epoch_learning_rate"}
    values, _ = scalars(tmp_path / "b" / "train")
    assert values["batch_loss"] == every[1::2]


@pytest.mark.long
def test_histograms_of_the_weights(tmp_path):
    """Every so many epochs."""
    pytest.importorskip("tensorboard")
    model = compiled()
    fit(model, batches(1), epochs=3, callbacks=[TensorBoard(tmp_path, histogram_freq=2)])
    _, histograms = scalars(tmp_path / "train")
    assert set(histograms) == {f"{n}/histogram" for n, _ in model.module.named_parameters()}


@pytest.mark.long
def test_evaluate_alone(tmp_path):
    """At the updates that it has seen."""
    pytest.importorskip("tensorboard")
    board = TensorBoard(tmp_path)
    model = compiled()
    fit(model, batches(3), callbacks=[board])
    value = model.evaluate(batches(1), callbacks=[board], verbose=0)["loss"]
    values, _ = scalars(tmp_path / "validation")
    assert values == {"evaluation_loss_vs_iterations": [(3, pytest.approx(value))]}
    assert board._writers == {}
    assert board.writes_files


def test_without_the_package_it_says_what_to_install(monkeypatch):
    """When it is made, not when the first epoch is done."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    refused(
        TensorBoard,
        "TensorBoard needs the package tensorboard, which is not installed. Run: pip install "
        "ipufit[tensorboard]",
    )


@pytest.mark.long("ipu-standin")
def test_a_wrong_argument_is_named():
    """When it is made."""
    pytest.importorskip("tensorboard")
    refused(
        lambda: TensorBoard(update_freq="update"),
        "update_freq of TensorBoard must be an integer of at least 1, got 'update'.",
    )
    refused(
        lambda: TensorBoard(histogram_freq=-1),
        "histogram_freq of TensorBoard must be an integer of at least 0, got -1.",
    )
