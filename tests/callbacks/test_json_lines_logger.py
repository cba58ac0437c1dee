"""JSONLinesLogger: one line of real JSON for every epoch, and for updates if asked."""

import json
import math
import os

import numpy as np
import pytest
import torch

from ipufit.callbacks import Callback, JSONLinesLogger
from ipufit.errors import ConfigurationError
from tests.faulty import Told, batches, compiled, fit
from tests.told import Gives, refused


def lines(path):
    def no_constant(name):
        raise ValueError(name)

    text = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=no_constant) for line in text]


@pytest.mark.long("ipu-standin")
def test_epochs_are_the_history(tmp_path):
    """With their place in training."""
    path = tmp_path / "deep" / "log.jsonl"
    history = fit(
        compiled(),
        batches(3),
        epochs=2,
        validation_data=batches(1),
        callbacks=[JSONLinesLogger(path)],
    ).history
    assert lines(path) == [
        {
            "event": "epoch",
            "epoch": epoch,
            "update": 3 * (epoch + 1),
            "loss": history["loss"][epoch],
            "val_loss": history["val_loss"][epoch],
        }
        for epoch in range(2)
    ]


@pytest.mark.long("ipu-standin")
def test_every_so_many_updates(tmp_path):
    """Counted over epochs, with the means so far."""
    path = tmp_path / "log.jsonl"
    logger = JSONLinesLogger(path, every_updates=2)
    assert logger.every_updates == 2
    seen = {}

    class Look(Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen[len(seen) + 1] = dict(logs)

    fit(compiled(), batches(3), epochs=2, callbacks=[Look(), logger])
    found = [(line["event"], line["epoch"], line["update"]) for line in lines(path)]
    assert found == [
        ("update", 0, 2),
        ("epoch", 0, 3),
        ("update", 1, 4),
        ("update", 1, 6),
        ("epoch", 1, 6),
    ]
    for line in lines(path):
        if line["event"] == "update":
            assert {k: line[k] for k in ("loss", "updates", "samples")} == seen[line["update"]]


@pytest.mark.parametrize("name", ["event", "update", "epoch", "batch"])
def test_a_metric_can_not_take_the_place_of_a_field(name):
    """Of a line, or of a path of ModelCheckpoint."""
    with pytest.raises(ConfigurationError, match=f"must be free.* got {name!r}"):
        compiled(metrics={name: "mae"})


@pytest.mark.long("ipu-standin")
def test_values_that_json_lacks_are_texts_that_float_reads(tmp_path):
    """Python's own NaN in JSON is what other programs stop at."""
    path = tmp_path / "log.jsonl"
    gives = Gives(
        a=[math.nan], b=[math.inf], c=[-math.inf], d=[np.float32(0.5)], e=[3], f=[torch.tensor(2.0)]
    )
    fit(compiled(), batches(1), callbacks=[gives, JSONLinesLogger(path)])
    (line,) = lines(path)
    assert [line[name] for name in "abcdef"] == ["NaN", "Infinity", "-Infinity", 0.5, 3, 2.0]
    assert float(line["c"]) == -math.inf


@pytest.mark.long
@pytest.mark.parametrize("append", [False, True])
def test_a_second_fit_replaces_or_goes_on(tmp_path, append):
    """The same object serves again."""
    path = tmp_path / "log.jsonl"
    logger = JSONLinesLogger(path, append)
    model = compiled()
    for _ in range(2):
        fit(model, batches(1), callbacks=[logger])
    assert len(lines(path)) == (2 if append else 1)


@pytest.mark.long
def test_lines_are_there_at_once_and_the_file_is_closed(tmp_path):
    """Also after an error."""
    path = tmp_path / "log.jsonl"
    logger = JSONLinesLogger(path)

    def look(told, epoch):
        if epoch == 1:
            assert len(lines(path)) == 1
            raise LookupError

    with pytest.raises(LookupError):
        fit(compiled(), batches(1), epochs=2, callbacks=[logger, Told(on_epoch_begin=look)])
    assert logger._file is None
    assert logger.writes_files


@pytest.mark.long("ipu-standin")
def test_a_wrong_argument_is_named(tmp_path):
    """When it is made, or before training."""
    refused(
        lambda: JSONLinesLogger("a", every_updates=0),
        "every_updates of JSONLinesLogger must be an integer of at least 1, got 0.",
    )
    refused(
        lambda: JSONLinesLogger("a", append=1),
        "append of JSONLinesLogger must be True or False, got 1.",
    )
    with pytest.raises(ValueError, match="choose another filename"):
        fit(compiled(), callbacks=[JSONLinesLogger(tmp_path)])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a full disk of this system")
def test_a_full_disk_is_named():
    """Once, and the file is closed."""
    logger = JSONLinesLogger("/dev/full")
    refused(
        lambda: fit(compiled(), callbacks=[logger]),
        "JSONLinesLogger writes to '/dev/full', but it can't: [Errno 28] No space left on device. "
        "Free some space or choose another filename.",
    )
    assert logger._file is None
