"""ModelCheckpoint: which weights are written when, under which names, and what is refused."""

import math
import os

import pytest
import safetensors.torch

from ipufit.callbacks import Callback, ModelCheckpoint
from tests.faulty import Told, assert_same_bits, batches, compiled, fit, flat
from tests.told import Gives, refused


class After(Callback):
    """The weights after every update of the fit, counted from 1."""

    def __init__(self):
        super().__init__()
        self.states = {}

    def on_train_batch_end(self, batch, logs=None):
        self.states[len(self.states) + 1] = flat(self.model.module.state_dict())


def files(folder):
    return sorted(os.listdir(folder))


def stored(path):
    return flat(safetensors.torch.load_file(path))


@pytest.mark.long("ipu-standin")
def test_weights_are_written_after_every_epoch(tmp_path):
    """Into folders that are made, under names with the epoch and its values."""
    after = After()
    path = tmp_path / "deep" / "run-{v:.1f}" / "{epoch:02d}.safetensors"
    save = ModelCheckpoint(path)
    fit(compiled(), batches(3), epochs=2, callbacks=[after, Gives(v=[0.25, 3]), save])
    assert files(tmp_path / "deep") == ["run-0.2", "run-3.0"]
    assert save.files == [
        str(tmp_path / "deep" / "run-0.2" / "01.safetensors"),
        str(tmp_path / "deep" / "run-3.0" / "02.safetensors"),
    ]
    for index, path in enumerate(save.files):
        assert_same_bits(stored(path), after.states[3 * (index + 1)])


@pytest.mark.long("ipu-standin")
def test_one_name_is_written_again(tmp_path):
    """The last weights, then."""
    after = After()
    path = tmp_path / "last.safetensors"
    save = ModelCheckpoint(str(path))
    fit(compiled(), batches(3), epochs=2, callbacks=[after, save])
    assert save.files == [str(path)]
    assert_same_bits(stored(path), after.states[6])


def saved_epochs(folder, values, **options):
    save = ModelCheckpoint(
        folder / "{epoch}.safetensors", "v", save_best_only=True, **{"mode": "min", **options}
    )
    callbacks = [Gives(v=values), save]
    fit(compiled(), batches(1), epochs=len(values), callbacks=callbacks)
    return [int(name.split(".")[0]) for name in files(folder)], save


@pytest.mark.long("ipu-standin")
@pytest.mark.few("values0-options0-epochs0", "values4-options4-epochs4")
@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([3, 2, 2, 1], {}, [1, 2, 4]),
        ([1, 2, 2, 3], {"mode": "max"}, [1, 2, 4]),
        ([3, 2, 2, 1], {"initial_value_threshold": 2}, [4]),
        ([math.nan, 2, math.nan], {}, [2]),
        ([3, None, 2], {}, [1, 3]),
    ],
)
def test_only_the_best_are_written(tmp_path, values, options, epochs):
    """The value is looked at before the file is written."""
    found, save = saved_epochs(tmp_path, values, **options)
    assert found == epochs
    best = max if options.get("mode") == "max" else min
    assert save.best == best(v for v in values if v is not None and v == v)


@pytest.mark.long("ipu-standin")
def test_the_best_of_all_fits_counts(tmp_path):
    """As in Keras: a second fit goes on, and must not replace a better file."""
    path = tmp_path / "best.safetensors"
    save = ModelCheckpoint(path, "v", save_best_only=True, mode="min")
    model = compiled()
    fit(model, batches(1), callbacks=[Gives(v=[1]), save])
    before = path.read_bytes()
    fit(model, batches(1), callbacks=[Gives(v=[2]), save])
    assert path.read_bytes() == before


@pytest.mark.long
@pytest.mark.parametrize(("keep", "left"), [(None, 5), (2, 2), (1, 1), (9, 5)])
def test_old_files_go(tmp_path, keep, left):
    """Those that it has written itself, oldest first; never another's."""
    (tmp_path / "0.safetensors").touch()
    save = ModelCheckpoint(tmp_path / "{epoch}.safetensors", keep=keep)

    def remove(told, epoch):
        if epoch == 2 and keep == 2:
            os.remove(save.files[0])

    callbacks = [save, Told(on_epoch_begin=remove)]
    fit(compiled(), batches(1), epochs=5, callbacks=callbacks)
    names = [f"{epoch}.safetensors" for epoch in range(6 - left, 6)]
    assert files(tmp_path) == ["0.safetensors", *names]
    assert save.files == [str(tmp_path / name) for name in names]


@pytest.mark.long("ipu-standin")
def test_every_so_many_updates(tmp_path):
    """Counted over the epochs; the mean of the epoch so far is the value."""
    after = After()
    save = ModelCheckpoint(
        tmp_path / "{epoch}-{batch}-{updates}-{loss:.3f}.safetensors", save_freq=2
    )
    assert save.every_updates == 2
    losses = []
    look = Told(on_train_batch_end=lambda told, last: losses.append(told))
    fit(compiled(), batches(5), epochs=2, callbacks=[after, look, save])
    numbers = [tuple(map(int, os.path.basename(f).split("-")[:3])) for f in save.files]
    assert numbers == [(1, 2, 2), (1, 4, 4), (2, 1, 1), (2, 3, 3), (2, 5, 5)]
    for update, path in zip((2, 4, 6, 8, 10), save.files):
        assert_same_bits(stored(path), after.states[update])


@pytest.mark.long("ipu-standin")
def test_the_best_of_the_means_so_far(tmp_path):
    """With a number as save_freq, the value is one of training."""
    path = tmp_path / "{batch}.safetensors"
    save = ModelCheckpoint(path, "loss", save_best_only=True, save_freq=1)
    means = []

    class Look(Callback):
        def on_train_batch_end(self, batch, logs=None):
            means.append(logs["loss"])

    fit(compiled(), batches(6), callbacks=[Look(), save])
    best = [i + 1 for i, v in enumerate(means) if v < min([math.inf, *means[:i]])]
    assert [int(os.path.basename(f).split(".")[0]) for f in save.files] == best


@pytest.mark.long("ipu-standin")
def test_it_says_what_it_does(tmp_path, capsys):
    """With verbose=1."""
    saved_epochs(tmp_path, [2.0, 3.0], verbose=1)
    assert capsys.readouterr().err.splitlines() == [
        f"epoch 1: wrote {tmp_path / '1.safetensors'}",
        "epoch 2: v 3 is not better than 2.0",
    ]
    saved_epochs(tmp_path, [2.0, 3.0])
    assert capsys.readouterr() == ("", "")


def test_a_trial_run_can_leave_it_out(tmp_path):
    """It says of itself that it writes files."""
    assert ModelCheckpoint(tmp_path / "w.safetensors").writes_files
    assert ModelCheckpoint(tmp_path / "w.safetensors").every_updates is None


ITEMS = [
    (
        {"save_weights_only": False},
        "save_weights_only of ModelCheckpoint must be True, got False. Leave it out to write "
        "weights; fit(checkpoint='runs/1') writes checkpoints of the whole training.",
    ),
    ({"save_best_only": 1}, "save_best_only of ModelCheckpoint must be True or False, got 1."),
    ({"save_freq": 0}, "save_freq of ModelCheckpoint must be an integer of at least 1, got 0."),
    (
        {"save_freq": "batch"},
        "save_freq of ModelCheckpoint must be an integer of at least 1, got 'batch'.",
    ),
    ({"keep": 0}, "keep of ModelCheckpoint must be an integer of at least 1, got 0."),
    (
        {"initial_value_threshold": "a"},
        "initial_value_threshold of ModelCheckpoint must be a finite number, got 'a'.",
    ),
    (
        {"save_freq": 3, "save_best_only": True},
        "ModelCheckpoint with save_freq=3 writes in the middle of an epoch, where 'val_loss' has "
        "no value. Use a value of training, such as 'loss', or save_freq='epoch'.",
    ),
    (
        {"filepath": "{val_loss}.safetensors", "save_freq": 3},
        "ModelCheckpoint with save_freq=3 writes in the middle of an epoch, where 'val_loss' has "
        "no value. Use a value of training, such as 'loss', or save_freq='epoch'.",
    ),
    (
        {"filepath": "w.pt"},
        "weights are written as safetensors, so the path must end with '.safetensors', got "
        "'w.pt'. Try 'weights.safetensors'.",
    ),
    (
        {"filepath": "{batch}.safetensors"},
        "filepath of ModelCheckpoint may have the field {batch} only if save_freq is a number of "
        "updates, got '{batch}.safetensors'. Use {epoch}.",
    ),
]


@pytest.mark.parametrize(("options", "text"), ITEMS, ids=lambda value: str(value)[:40])
def test_a_wrong_argument_is_named(options, text):
    """When it is made, not at the end of an epoch."""
    refused(lambda: ModelCheckpoint(**{"filepath": "w.safetensors", **options}), text)


@pytest.mark.parametrize("path", ["{}", "{val_loss:d}", "{epoch:.2q}", "{a.b}", "{a[x]}"])
def test_a_path_that_can_not_be_filled_in_is_refused(path):
    """The mistake is in the text; no epoch is needed to see it."""
    with pytest.raises(ValueError, match="may have fields such as") as caught:
        ModelCheckpoint(f"{path}.safetensors")
    start = (
        "filepath of ModelCheckpoint may have fields such as {epoch:02d} and {val_loss:.2f}, but "
        f"'{path}.safetensors' can't be filled in: "
    )
    assert str(caught.value).startswith(start)
    end = "Correct the field, or double each literal brace."
    assert str(caught.value).endswith(end)


@pytest.mark.long("ipu-standin")
def test_a_path_that_can_not_be_written_is_known_before_training(tmp_path):
    """The first epoch may take a day."""
    (tmp_path / "file").touch()
    (tmp_path / "d.safetensors").mkdir()
    told = Told()
    with pytest.raises(ValueError, match="can't be made") as caught:
        fit(compiled(), callbacks=[ModelCheckpoint(tmp_path / "file" / "w.safetensors"), told])
    start = f"ModelCheckpoint writes into the folder {str(tmp_path / 'file')!r}, but it can't be"
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith("Choose another filepath.")
    with pytest.raises(ValueError, match="is a folder"):
        fit(compiled(), callbacks=[ModelCheckpoint(tmp_path / "d.safetensors"), told])
    assert told.hooks == []


@pytest.mark.long("ipu-standin")
def test_values_that_are_not_there_are_missed_before_training(tmp_path):
    """In the path or for the comparison."""
    save = ModelCheckpoint(tmp_path / "{val_loss}.safetensors")
    refused(
        lambda: fit(compiled(), callbacks=[save]),
        "ModelCheckpoint needs the value 'val_loss' at the end of an epoch, but there is only "
        "loss. Pass validation_data to fit, or use one of these.",
    )
    # What this callback will add is not known before it has.
    refused(
        lambda: fit(compiled(), callbacks=[Gives(other=[1]), save]),
        "filepath of ModelCheckpoint has a field val_loss that no epoch logs, got "
        f"{save.filepath!r}. There is epoch, loss, other.",
    )
    assert files(tmp_path) == []
