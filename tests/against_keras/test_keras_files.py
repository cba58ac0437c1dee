"""Callbacks that write: the same files in the same epochs, the same rows, as Keras."""

import csv

import pytest

import ipufit
from tests.against_keras.twins import X, Y, from_keras, keras, pair, regrouped

pytestmark = from_keras
LIBRARIES = ((keras.callbacks, "theirs"), (ipufit.callbacks, "ours"))


# ---- tables -------------------------------------------------------------------------------------


def tables(tmp_path, before=None, fits=1, fit=None, **options):
    """What CSVLogger of each library writes: rows of texts, the first one of the columns."""
    both = pair()
    written = []
    for library, side in LIBRARIES:
        path = tmp_path / f"{side}.csv"
        for _ in range(fits):
            told = [] if before is None else [before(library)]
            told.append(library.CSVLogger(str(path), **options))
            given = {"batch_size": 10, "shuffle": False, "epochs": 3, "verbose": 0, **(fit or {})}
            given = regrouped(**given) if side == "ours" else given
            getattr(both, side).fit(X, Y, callbacks=told, **given)
        with open(path, newline="") as file:
            written.append(list(csv.reader(file, delimiter=options.get("separator", ","))))
    return written


def same_tables(theirs, ours):
    assert ours[0] == theirs[0]
    assert len(ours) == len(theirs)
    for mine, row in zip(ours, theirs):
        for cell, expected in zip(mine, row):
            assert cell == expected or float(cell) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"separator": ";"}, {"fits": 2}, {"fits": 2, "append": True}], ids=str
)
def test_csv_logger(tmp_path, options):
    theirs, ours = tables(tmp_path, fit={"validation_split": 0.5}, **options)
    same_tables(theirs, ours)
    assert ours[0] == ["epoch", "accuracy", "loss", "val_accuracy", "val_loss"]


def test_csv_logger_has_what_a_callback_before_it_adds(tmp_path):
    theirs, ours = tables(
        tmp_path,
        before=lambda library: library.LearningRateScheduler(lambda epoch: 0.5**epoch),
        fit={"validation_split": 0.5},
    )
    assert [sorted(row) for row in (theirs[0], ours[0])] == [sorted(theirs[0])] * 2
    columns = [[row[table[0].index("learning_rate")] for row in table] for table in (theirs, ours)]
    assert columns[0] == columns[1] == ["learning_rate", "1.0", "0.5", "0.25"]


def test_csv_logger_has_no_columns_for_a_validation_that_never_comes(tmp_path):
    """Keras leaves room for one, full of NA; ipufit adds a column when a value comes."""
    theirs, ours = tables(tmp_path)
    assert ours[0] == ["epoch", "accuracy", "loss"]
    assert theirs[0] == ["epoch", "accuracy", "loss", "val_accuracy", "val_loss"]
    assert {cell for row in theirs[1:] for cell in row[3:]} == {"NA"}
    same_tables([row[:3] for row in theirs], ours)


def test_csv_logger_marks_an_epoch_without_validation(tmp_path):
    theirs, ours = tables(tmp_path, fit={"validation_split": 0.5, "validation_freq": 2})
    same_tables(theirs, ours)
    assert ours[1][3:] == ["NA", "NA"]


# ---- checkpoints --------------------------------------------------------------------------------

VALUES = [3, 4, 2.5, 2.5, 2.75, 2, 5, 1]


def script(library, values):
    class Script(library.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_x"] = float(values[epoch])

    return Script()


def saved(tmp_path, *fits, name="{epoch}", **options):
    """The files that ModelCheckpoint of each library writes, without their suffixes.

    Args:
        fits: for each fit its values, one an epoch.
    """
    both = pair()
    found = []
    for library, side in LIBRARIES:
        suffix = ".weights.h5" if side == "theirs" else ".safetensors"
        folder = tmp_path / side
        path = str(folder / (name + suffix))
        # Keras wants to know the mode even where nothing is compared.
        options = {"mode": "min", "save_weights_only": True, **options}
        checkpoint = library.ModelCheckpoint(path, "val_x", **options)
        for values in fits:
            told = [script(library, values), checkpoint]
            given = {"epochs": len(values), "batch_size": 10, "verbose": 0}
            getattr(both, side).fit(X, Y, callbacks=told, **given)
        found.append(sorted(file.name[: -len(suffix)] for file in folder.glob("*")))
    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "12345678"),
        ({"save_best_only": True}, "1368"),
        ({"save_best_only": True, "mode": "max"}, "127"),
        ({"save_best_only": True, "initial_value_threshold": 2.25}, "68"),
        ({"save_best_only": True, "mode": "max", "initial_value_threshold": 3.0}, "27"),
    ],
)
def test_model_checkpoint_saves_in_the_same_epochs(tmp_path, options, expected):
    theirs, ours = saved(tmp_path, VALUES, **options)
    assert ours == theirs == list(expected)


def test_model_checkpoint_fills_in_the_same_names(tmp_path):
    theirs, ours = saved(tmp_path, VALUES, name="{epoch:02d}-{val_x:.2f}")
    assert ours == theirs
    assert ours[0] == "01-3.00"


def test_model_checkpoint_remembers_the_best_of_an_earlier_fit(tmp_path):
    theirs, ours = saved(
        tmp_path, [3, 1], [2, 0.5], name="{epoch}-{val_x:.1f}", save_best_only=True
    )
    assert ours == theirs == ["1-3.0", "2-0.5", "2-1.0"]


@pytest.mark.parametrize("every", [2, 4, 5])
def test_model_checkpoint_saves_after_the_same_batches(tmp_path, every):
    theirs, ours = saved(tmp_path, [0, 0], save_freq=every, name="{epoch}-{batch}")
    assert ours == theirs != []


def test_model_checkpoint_writes_weights(tmp_path):
    """Keras writes the whole model unless told otherwise; a torch module is code, not a file."""
    keras.callbacks.ModelCheckpoint(str(tmp_path / "all.keras"), save_weights_only=False)
    with pytest.raises(ipufit.errors.ConfigurationError, match="save_weights_only"):
        ipufit.callbacks.ModelCheckpoint(tmp_path / "all.safetensors", save_weights_only=False)


def test_model_checkpoint_never_takes_nan_for_the_best(tmp_path):
    """Keras saves a first NaN as the best, after which no number is better."""
    values = [float("nan"), 3, 2]
    theirs, ours = saved(tmp_path, values, save_best_only=True)
    assert theirs == ["1"]
    assert ours == ["2", "3"]
