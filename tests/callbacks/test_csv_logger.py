"""CSVLogger: a table that loses no value."""

import csv
import os
import shutil

import pytest

from ipufit.callbacks import CSVLogger, LearningRateScheduler
from tests.faulty import Told, batches, compiled, fit
from tests.told import Gives, refused


def table(path, separator=","):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file, delimiter=separator))


@pytest.mark.long("ipu-standin")
def test_the_table_is_the_history(tmp_path):
    """Every digit of it."""
    path = tmp_path / "deep" / "log.csv"
    model = compiled(metrics=["mae"])
    history = fit(
        model, batches(2), epochs=3, validation_data=batches(1), callbacks=[CSVLogger(path)]
    ).history
    names = ["loss", "mae", "val_loss", "val_mae"]
    rows = table(path)
    assert rows[0] == ["epoch", *names]
    for epoch, row in enumerate(rows[1:]):
        assert row == [str(epoch), *(repr(history[name][epoch]) for name in names)]
    assert os.listdir(path.parent) == ["log.csv"]


@pytest.mark.long("ipu-standin")
def test_every_row_is_there_at_once(tmp_path):
    """Whoever looks during training, or after a crash, sees all finished epochs."""
    path = tmp_path / "log.csv"
    seen = []
    look = Told(on_epoch_begin=lambda told, epoch: seen.append(len(table(path)) - 1))
    fit(compiled(), batches(1), epochs=3, callbacks=[CSVLogger(path), look])
    assert seen == [0, 1, 2]


@pytest.mark.long("ipu-standin")
def test_a_value_that_comes_late_gets_a_column(tmp_path):
    """Keras drops it."""
    path = tmp_path / "log.csv"
    gives = Gives(a=[None, None, 2.5], b=[1.5, None, None])
    fit(compiled(), batches(1), epochs=3, callbacks=[gives, CSVLogger(path)])
    rows = table(path)
    assert rows[0] == ["epoch", "loss", "b", "a"]
    assert [row[2:] for row in rows[1:]] == [["1.5", "NA"], ["NA", "NA"], ["NA", "2.5"]]


@pytest.mark.long("ipu-standin")
def test_a_learning_rate_is_in_the_table(tmp_path):
    """When the callback that logs it stands before."""
    path = tmp_path / "log.csv"
    scheduler = LearningRateScheduler(lambda epoch: 0.25)
    fit(compiled(), batches(1), callbacks=[scheduler, CSVLogger(path)])
    assert [row[2] for row in table(path)] == ["learning_rate", "0.25"]


@pytest.mark.long
@pytest.mark.parametrize("append", [False, True])
def test_a_second_fit_replaces_or_goes_on(tmp_path, append):
    """With one header, also where it has other columns."""
    path = tmp_path / "log.csv"
    model = compiled()
    fit(model, batches(1), epochs=2, callbacks=[CSVLogger(path, append=append)])
    logger = CSVLogger(path, append=append)
    options = {"epochs": range(2, 3), "validation_data": batches(1)}
    fit(model, batches(1), callbacks=[logger], **options)
    rows = table(path)
    assert rows[0] == ["epoch", "loss", "val_loss"]
    assert [row[0] for row in rows[1:]] == (["0", "1", "2"] if append else ["2"])
    if append:
        assert [row[2] == "NA" for row in rows[1:]] == [True, True, False]


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("text", ["", "\n"])
def test_appending_to_an_empty_file_writes_the_header(tmp_path, text):
    """There is nothing to go on with."""
    path = tmp_path / "log.csv"
    path.write_text(text)
    fit(compiled(), batches(1), callbacks=[CSVLogger(path, append=True)])
    assert table(path)[0] == ["epoch", "loss"]


def test_appending_to_what_a_spreadsheet_has_saved_goes_on(tmp_path):
    """As UTF-8 with a mark at its beginning."""
    path = tmp_path / "log.csv"
    path.write_text("epoch,loss\n0,1.5\n", encoding="utf-8-sig")
    fit(compiled(), batches(1), callbacks=[CSVLogger(path, append=True)])
    assert table(path)[:2] == [["epoch", "loss"], ["0", "1.5"]]
    assert len(table(path)) == 3


@pytest.mark.long("ipu-standin")
def test_the_separator(tmp_path):
    """For programs that read a comma as a decimal point."""
    path = tmp_path / "log.csv"
    fit(compiled(), batches(1), callbacks=[CSVLogger(path, ";")])
    assert table(path, ";")[0] == ["epoch", "loss"]


@pytest.mark.long("ipu-standin")
def test_what_it_can_not_write_is_known_before_training(tmp_path):
    """And another file is not spoilt."""
    path = tmp_path / "other.csv"
    path.write_text("name,value\na,1\n")
    model = compiled()
    refused(
        lambda: fit(model, callbacks=[CSVLogger(path, append=True)]),
        "CSVLogger appends to a table whose first column is 'epoch', but the first column of "
        f"{str(path)!r} is 'name'. Choose another filename or separator, or append=False.",
    )
    assert path.read_text() == "name,value\na,1\n"
    with pytest.raises(ValueError, match="choose another filename") as caught:
        fit(model, callbacks=[CSVLogger(tmp_path)])
    assert str(caught.value).startswith(f"CSVLogger writes to {str(tmp_path)!r}, but it can't: ")
    assert model.history.epoch == []
    assert CSVLogger(path).writes_files


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk of this system")
def test_a_full_disk_is_named(tmp_path):
    """The rows of earlier epochs are in the table."""
    path = tmp_path / "log.csv"

    def fill(told, epoch):
        if epoch == 1:
            shutil.copy(path, tmp_path / "kept")
            path.unlink()
            path.symlink_to("/dev/full")

    logger = CSVLogger(path)
    refused(
        lambda: fit(compiled(), epochs=2, callbacks=[logger, Told(on_epoch_begin=fill)]),
        f"CSVLogger writes to {str(path)!r}, but it can't: [Errno 28] No space left on device. "
        "Free some space or choose another filename.",
    )
    assert len(table(tmp_path / "kept")) == 2


@pytest.mark.parametrize("separator", ["", ", ", "\n", '"', 3])
def test_a_separator_is_one_character(separator):
    """The table could not be read again."""
    refused(
        lambda: CSVLogger("log.csv", separator),
        "separator of CSVLogger must be one character, but not a quote or a line end, got "
        f"{separator!r}. Use ',' or ';' or '\\t'.",
    )
    refused(
        lambda: CSVLogger("log.csv", append=1), "append of CSVLogger must be True or False, got 1."
    )
