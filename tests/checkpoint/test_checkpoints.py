"""``fit(checkpoint=, resume=)``: when checkpoints are written, what they hold, what is refused."""

import errno
import gc
import hashlib
import json
import os
import re
import shutil
import signal
import threading

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback, CSVLogger, EarlyStopping, JSONLinesLogger, ModelCheckpoint
from ipufit.checkpoint import Files, Store, decode, encode
from ipufit.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    NonFiniteLossError,
    RecoverableDeviceError,
    UnrecoverableDeviceError,
)
from ipufit.testing import inject
from tests.checkpoint.test_resume import Case, assert_same, loader, state
from tests.copies import CAN_COPY, start_copy
from tests.nets import MLP, data
from tests.told import refused

X, Y = data(24)
# Twelve updates in an epoch. What is left over of an epoch, dropout and statistics are the subject
# of test_resume.py.
WHOLE = TensorDataset(X, Y)


def whole_batches(**options):
    return loader(WHOLE, **options)


def plain(net=MLP, train=whole_batches, **options):
    """A fit that goes on with the same bits."""
    return Case(net, train, seed=5, **options)


PLAIN, LONGER = plain(), plain(epochs=3)


def names(folder):
    return sorted(os.listdir(folder))


def fit(folder, net=MLP, **options):
    """A model after two epochs of 12 updates that wrote checkpoints."""
    return plain(net).run(**{"checkpoint": folder, **options})


def documents(folder):
    return {name: json.loads((folder / name / "state.json").read_text()) for name in names(folder)}


@pytest.mark.long("ipu-standin")
def test_every_epoch_leaves_one_and_the_latest_are_kept(tmp_path):
    fit(tmp_path / "run", epochs=4)
    assert names(tmp_path / "run") == ["update-000000036-epoch", "update-000000048-epoch"]


@pytest.mark.long("ipu-standin")
def test_so_many_updates_are_between_two(tmp_path):
    """Whatever the executions would be otherwise."""
    checkpoint = ipufit.Checkpoint(tmp_path / "run", every_updates=5, keep=100)
    fit(checkpoint, device_iterations=4)
    expected = {5: "", 10: "", 12: "-epoch", 15: "", 20: "", 24: "-epoch"}
    assert names(tmp_path / "run") == [f"update-{k:09d}{kind}" for k, kind in expected.items()]
    told = documents(tmp_path / "run")
    assert [each["updates"] for each in told.values()] == list(expected)
    assert [each["in_epoch"] for each in told.values()] == [not kind for kind in expected.values()]


@pytest.mark.long("ipu-standin")
def test_a_run_of_an_older_version_of_the_format_goes_on(tmp_path):
    """Version 1.0 had one process, and said nothing of others; up to 1.1 none was configured."""
    fit(ipufit.Checkpoint(tmp_path / "run", every_updates=5, keep=9))
    folder = tmp_path / "run" / "update-000000005"
    for name in names(tmp_path / "run")[1:]:
        shutil.rmtree(tmp_path / "run" / name)
    document = json.loads((folder / "state.json").read_text())
    assert document.pop("divides") is True
    assert document["content"].pop("apart") == []
    assert document.pop("configuration")["begin"]["loss"]["name"] == "cross_entropy"
    assert document.pop("changes") == []
    changed = json.dumps(document).encode()
    (folder / "state.json").write_bytes(changed)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["version"] == [1, 2]
    manifest["version"] = [1, 0]
    described = {"size": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
    manifest["files"]["state.json"] = described
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.warns(UserWarning, match="older ipufit") as warned:
        model = fit(tmp_path / "run", resume="auto")
    assert_same(model, PLAIN.whole())
    assert [str(each.message) for each in warned] == [
        "the checkpoint 'update-000000005' comes from an older ipufit and does not say how its "
        "run was configured: ipufit can't check that loss, optimizer settings, data and module "
        "are the same, and takes the optimizer settings from the checkpoint."
    ]


@pytest.mark.long("ipu-standin")
def test_the_best_one_is_kept_besides(tmp_path):
    folder = tmp_path / "run"
    checkpoint = ipufit.Checkpoint(folder, keep=1, monitor="val_loss")
    values = iter([3.0, 1.0, float("nan"), 2.0, 5.0])

    class Judges(Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = next(values)

    fit(checkpoint, epochs=5, callbacks=[Judges()], validation_data=(X[:4], Y[:4]))
    assert names(folder) == ["update-000000024-epoch", "update-000000060-epoch"]
    last = documents(folder)["update-000000060-epoch"]
    assert last["best"] == {"name": "update-000000024-epoch", "value": 1.0}


@pytest.mark.long
def test_the_weights_need_no_ipufit_to_be_read(tmp_path):
    """Also those that are tied, or that load_weights reads."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
            self.second.weight = self.first.weight
            self.head = nn.Linear(12, 5)
            self.register_buffer("kept", torch.zeros(2))
            self.register_buffer("own", torch.zeros(2), persistent=False)

        def forward(self, x):
            return self.head(self.second(self.first(x.flatten(1))))

    model = fit(tmp_path / "run", net=Tied)
    path = tmp_path / "run" / "update-000000024-epoch" / "weights.safetensors"
    other = Tied().double()
    other.load_state_dict(safetensors.torch.load_file(path))
    for name, value in model.module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    model.load_weights(path)
    resumed = fit(tmp_path / "run", net=Tied, resume="auto", epochs=3)
    longer = fit(tmp_path / "other", net=Tied, epochs=3)
    assert_same(resumed, state(longer))


@pytest.mark.long
@pytest.mark.parametrize(
    "change", [{"device_iterations": 7}, {"loading": ipufit.Loading(prefetch=2)}]
)
@pytest.mark.parametrize("before", [3, 12, 16])
def test_what_only_cuts_the_work_may_change(change, before, tmp_path):
    checkpoint = ipufit.Checkpoint(tmp_path / "run", every_updates=1)
    PLAIN.run(before, checkpoint=checkpoint)
    assert_same(PLAIN.run(checkpoint=tmp_path / "run", resume="auto", **change), PLAIN.whole())


@pytest.mark.long
def test_replicas_may_become_accumulation(tmp_path):
    """The same samples in an update, in another order of summation."""
    folder, whole = tmp_path / "run", PLAIN.run(ipus=4)
    checkpoint = ipufit.Checkpoint(folder, every_updates=1)
    PLAIN.run(4, checkpoint=checkpoint, ipus=4)
    model = PLAIN.run(checkpoint=checkpoint, resume="auto", ipus=2, gradient_accumulation=2)
    for name, value in whole.module.state_dict().items():
        torch.testing.assert_close(model.module.state_dict()[name], value, rtol=0, atol=1e-12)
    assert model.history.epoch == whole.history.epoch
    assert model.history.history["loss"] == pytest.approx(whole.history.history["loss"], abs=1e-12)


@pytest.mark.long
def test_a_run_that_is_done_stays_done(tmp_path):
    first = fit(tmp_path / "run")
    again = fit(tmp_path / "run", resume="auto")
    assert_same(again, state(first))
    assert again.history.params["resumed"]["update"] == 24
    # More epochs are the epochs of a longer run.
    assert_same(fit(tmp_path / "run", resume="auto", epochs=3), LONGER.whole())


@pytest.mark.long("ipu-standin")
def test_a_run_that_a_callback_has_stopped_stays_stopped(tmp_path):
    def run(**options):
        stops = EarlyStopping("loss", min_delta=100, patience=1, restore_best_weights=True)
        return fit(tmp_path / "run", epochs=9, callbacks=[stops], **options)

    first = run()
    assert len(first.history.epoch) == 2
    assert_same(run(resume="auto"), state(first))


@pytest.mark.long("ipu-standin")
def test_resume_begins_where_there_is_nothing_yet(tmp_path):
    second = fit(tmp_path / "run", resume="auto")
    assert_same(second, PLAIN.whole())
    assert "resumed" not in second.history.params


class Stops(ipufit.callbacks.Callback):
    """Ends training after its second epoch, where it is to."""

    stops = False

    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = self.stops and epoch == 1


@pytest.mark.parametrize(
    ("epochs", "stops", "text"),
    [
        (3, False, "going on from checkpoint {} with epoch 3 of 3\n"),
        (2, False, "nothing is left to train after checkpoint {}: all 2 epochs are done\n"),
        (4, True, "nothing is left to train after checkpoint {}: a callback ended this run\n"),
    ],
)
def test_a_run_that_goes_on_says_with_what(tmp_path, capsys, epochs, stops, text):
    """Whoever runs a script again sees that it does not begin anew, or has nothing to do."""

    def run(count, verbose):
        torch.manual_seed(0)
        model = ipufit.Model(torch.nn.Linear(4, 3))
        model.compile("sgd", "mse")
        stop = Stops()
        stop.stops = stops
        checkpoint = ipufit.Checkpoint(tmp_path / "run", resume="auto")
        data = (torch.ones(8, 4), torch.ones(8, 3))
        options = {"batch_size": 4, "callbacks": [stop], "checkpoint": checkpoint, "seed": 0}
        model.fit(*data, epochs=count, verbose=verbose, **options)
        return capsys.readouterr().err

    assert "checkpoint" not in run(epochs if stops else 2, 2)
    (name,) = (folder.name for folder in (tmp_path / "run").iterdir() if "000004" in folder.name)
    again = run(epochs, 2)
    assert text.format(name) in again
    assert run(epochs, 0) == ""


@pytest.mark.long("ipu-standin")
def test_one_checkpoint_can_be_chosen_and_goes_on_elsewhere(tmp_path):
    PLAIN.run(checkpoint=ipufit.Checkpoint(tmp_path / "run", every_updates=4, keep=100))
    chosen = tmp_path / "run" / "update-000000008"
    model = PLAIN.run(resume=chosen, checkpoint=tmp_path / "other")
    assert_same(model, PLAIN.whole())
    assert model.history.params["resumed"] == {
        "checkpoint": "update-000000008",
        "update": 8,
        "epoch": 0,
        "data": "read again up to there",
    }
    # Without writing any.
    assert_same(PLAIN.run(resume=str(chosen)), PLAIN.whole())


@pytest.mark.long("ipu-standin")
def test_logs_go_on_as_if_nothing_had_happened(tmp_path):
    def run(folder, before=None, **options):
        folder.mkdir(exist_ok=True)
        callbacks = [
            CSVLogger(folder / "log.csv"),
            JSONLinesLogger(folder / "log.jsonl", every_updates=3),
            ModelCheckpoint(folder / "{epoch}.safetensors", keep=1, save_freq=7),
        ]
        plain(callbacks=lambda: callbacks).run(before, **options)
        return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}

    expected = run(tmp_path / "whole")
    checkpoint = ipufit.Checkpoint(tmp_path / "part" / "run", every_updates=4)
    (tmp_path / "part").mkdir()
    run(tmp_path / "part", 19, checkpoint=checkpoint)
    assert run(tmp_path / "part", checkpoint=checkpoint, resume="auto") == expected


@pytest.mark.long("ipu-standin")
def test_a_log_that_is_gone_is_missed(tmp_path):
    def run(before=None, **options):
        make = lambda: [JSONLinesLogger(tmp_path / "log.jsonl", every_updates=1)]  # noqa: E731
        checkpoint = ipufit.Checkpoint(tmp_path / "run", every_updates=1)
        return plain(callbacks=make).run(before, checkpoint=checkpoint, **options)

    run(3)
    os.remove(tmp_path / "log.jsonl")
    with pytest.raises(ConfigurationError, match="Restore the file") as told:
        run(resume="auto")
    assert re.match(
        r"JSONLinesLogger continues '.*log.jsonl', which had \d+ bytes when the checkpoint was "
        r"written, but now has 0. Restore the file, or start a new run with another filename.$",
        str(told.value),
    )


@pytest.mark.long("ipu-standin")
def test_damaged_ones_are_told_set_aside_and_passed_over(tmp_path):
    folder = tmp_path / "run"
    checkpoint = ipufit.Checkpoint(folder, every_updates=1, keep=3)
    PLAIN.run(9, checkpoint=checkpoint)
    newest = folder / "update-000000009" / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="state.safetensors"):
        model = PLAIN.run(checkpoint=folder, resume="auto")
    assert model.history.params["resumed"]["update"] == 8
    assert_same(model, PLAIN.whole())
    assert "damaged-update-000000009" in names(folder)


@pytest.mark.long("ipu-standin")
def test_none_that_can_be_read_is_an_error(tmp_path):
    fit(tmp_path / "run")
    for name in names(tmp_path / "run"):
        (tmp_path / "run" / name / "state.json").write_text("{}")
    with pytest.warns(UserWarning, match="state.json"), pytest.raises(CheckpointError) as told:
        fit(tmp_path / "run", resume="auto")
    assert str(told.value) == (
        "resume='auto' needs a readable checkpoint, but none of the 2 in "
        f"{str(tmp_path / 'run')!r} can be read. Pass another folder to start a new run."
    )


VALIDATED = plain(validation_data=(X[:4], Y[:4]))


@pytest.mark.long("ipu-standin")
@pytest.mark.grid
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["batch", "validation", "epoch"])
def test_signals_let_the_execution_end_and_a_checkpoint_be_written(kind, when, tmp_path, capfd):
    sent = []

    class Sends(Callback):
        def _send(self, here):
            if here == when and not sent:
                sent.append(os.kill(os.getpid(), kind))

        def on_train_batch_begin(self, batch, logs=None):
            if self.model.history.epoch == [0]:
                self._send("batch")

        def on_test_begin(self, logs=None):
            self._send("validation")

        def on_epoch_end(self, epoch, logs=None):
            self._send("epoch")

    callbacks = [Sends()]
    folder = tmp_path / "run"
    expected = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}[kind]
    handler = signal.getsignal(kind)
    with pytest.raises(expected) as ended:
        VALIDATED.run(checkpoint=folder, callbacks=callbacks)
    assert signal.getsignal(kind) is handler
    done, epoch = (13, 2) if when == "batch" else (12, 1)
    message = (
        f"{kind.name}: fit ends after update {done}, in epoch {epoch}, which is saved in "
        f"{str(folder)!r}. Call it again with Checkpoint(..., resume='auto') to continue."
    )
    # Python prints what a KeyboardInterrupt says, and nothing of SystemExit.
    said = capfd.readouterr().err
    assert said.endswith(f"ipufit: {message}\n" if kind is signal.SIGTERM else "")
    assert (message in said) is (kind is signal.SIGTERM)
    assert ended.value.args == ((143,) if kind is signal.SIGTERM else (message,))
    model = VALIDATED.run(checkpoint=folder, resume="auto", callbacks=callbacks)
    assert_same(model, VALIDATED.whole())


@pytest.mark.long("ipu-standin")
def test_a_second_signal_ends_it_at_once(tmp_path):
    class Presses(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        plain(callbacks=lambda: [Presses()]).run(checkpoint=tmp_path / "run")
    assert names(tmp_path / "run") == []


@pytest.mark.long("ipu-standin")
def test_a_handler_of_the_users_own_stays(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
    try:

        class Sends(Callback):
            def on_epoch_end(self, epoch, logs=None):
                os.kill(os.getpid(), signal.SIGTERM)

        fit(tmp_path / "run", callbacks=[Sends()])
        assert heard == [1, 1]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.long("ipu-standin")
def test_other_threads_need_no_signals(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(fit(tmp_path / "run")))
    thread.start()
    thread.join()
    assert_same(found[0], PLAIN.whole())


@pytest.mark.long("ipu-standin")
def test_a_trial_run_writes_none(tmp_path):
    model = fit(tmp_path / "run", loading=ipufit.Loading(fast_dev_run=True))
    assert not (tmp_path / "run").exists()
    assert model.history.params["left_out_callbacks"] == ["checkpoint"]


class Holds(Callback):
    """Keeps what no file can."""

    def state_dict(self):
        return {"model": self.model}


@pytest.mark.long("ipu-standin")
def test_what_cannot_be_written_is_refused_before_any_work(tmp_path):
    with pytest.raises(CheckpointError, match="'callbacks") as told:
        fit(tmp_path / "run", callbacks=[Holds()])
    assert "Model" in str(told.value)
    assert names(tmp_path / "run") == []


class Shy:
    """A metric that does not say what it has seen."""

    def reset(self):
        pass

    def update(self, prediction, target):
        pass

    def compute(self):
        return 0.0


@pytest.mark.long("ipu-standin")
def test_metrics_must_say_what_they_have_seen(tmp_path):
    case = plain(compile=lambda net: {"metrics": [Shy()]})
    refused(
        lambda: case.run(checkpoint=tmp_path / "run"),
        "a checkpoint in the middle of an epoch holds the state of every metric, but 'Shy' (Shy) "
        "can't return it. Give it state_dict and load_state_dict, use a plain torchmetrics metric, "
        "or leave checkpoint out.",
    )


@pytest.mark.long("ipu-standin")
def test_a_folder_with_checkpoints_is_not_begun_anew(tmp_path):
    folder = str(tmp_path / "run")
    fit(folder)
    refused(
        lambda: fit(folder),
        f"checkpoint must be a folder without checkpoints for a new run, but {folder!r} has 2, "
        f"the latest 'update-000000024-epoch'. Pass ipufit.Checkpoint({folder!r}, resume='auto') "
        "to continue from there, or another folder.",
    )
    refused(
        lambda: fit(folder, resume=f"{folder}/update-000000012-epoch"),
        f"resume continues from 'update-000000012-epoch', but checkpoint={folder!r} has later "
        "ones, such as 'update-000000024-epoch', which the run would overwrite. Pass another "
        "folder as checkpoint, or move the later ones away.",
    )


@pytest.mark.long("ipu-standin")
def test_another_run_is_refused_with_all_that_differs(tmp_path):
    odd = TensorDataset(*data(23))
    plain(train=lambda: loader(odd)).run(checkpoint=tmp_path / "run")

    class Other(MLP):
        def __init__(self):
            super().__init__()
            self.layers[2] = nn.Linear(16, 5, bias=False)
            self.more = nn.Linear(2, 2)

    case = Case(
        Other,
        train=lambda: DataLoader(TensorDataset(*odd[:20]), batch_size=4),
        compile=lambda net: {"optimizer": "sgd"},
        epochs=2,
    )
    with pytest.raises(CheckpointError) as told:
        case.run(checkpoint=tmp_path / "run", resume="auto", callbacks=[])
    assert str(told.value) == (
        "the checkpoint 'update-000000024-epoch' must match the run that continues, but they "
        "differ:\n  more.weight: missing in the checkpoint\n  more.bias: missing in the "
        "checkpoint\n  layers.2.bias: only in the checkpoint\n  optimizer: 'Adam' in the "
        "checkpoint, 'SGD' now\n  samples of an update: 2 in the checkpoint, 4 now\n  "
        "batch_size: 2 in the checkpoint, 4 now\n  samples of the training data: 23 in the "
        "checkpoint, 20 now\n  callbacks: ['Ends'] in the checkpoint, [] now\n  shuffle: "
        "'RandomSampler' in the checkpoint, 'SequentialSampler' now\n  data content: "
        "'b76b113262e99f49' in the checkpoint, '73b4d3ba06bfe96b' now\n  module of '': 'MLP' in "
        "the checkpoint, 'Other' now\n  module extra_repr of 'layers.2': 'in_features=16, "
        "out_features=5, bias=True' in the checkpoint, 'in_features=16, out_features=5, "
        "bias=False' now\n  module of 'more': nothing in the checkpoint, 'Linear' now\nPass the "
        "same model, data and arguments, or another folder to start a new run."
    )


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": 6}, "seed must be that of the resumed run, 5, got 6. Leave it out: the "
                      "checkpoint has it."),
        ({"epochs": range(1, 2)}, "epochs must begin with the first one of the resumed run, 0, got "
                                  "range(1, 2). Pass epochs=2: the checkpoint knows where to "
                                  "continue."),
    ],
)  # fmt: skip
def test_what_the_checkpoint_has_is_not_said_otherwise(options, text, tmp_path):
    fit(tmp_path / "run")
    refused(lambda: fit(tmp_path / "run", resume="auto", **options), text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"resume": "auto"}, "resume='auto' looks for the latest checkpoint in the folder of "
                             "Checkpoint, but no folder is set. Pass Checkpoint('runs/1', "
                             "resume='auto'), or the path of one checkpoint as resume."),
        ({"resume": True}, "resume must be 'auto', the path of a checkpoint or None, got True. "
                           "Use 'auto', which starts a new run if there is no checkpoint yet."),
        ({"resume": 3}, "resume must be the path of a folder, got 3. Use for example 'runs/1'."),
        ({"checkpoint": 3}, "checkpoint must be the path of a folder, got 3. Use for example "
         "'runs/1'."),
        ({"checkpoint": ipufit.Checkpoint}, "checkpoint must be a path or an object, got the class "
         "Checkpoint. Pass Checkpoint('runs/1')."),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work(options, text):
    refused(lambda: fit(None, **options), text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"folder": 3}, "folder of Checkpoint must be the path of a folder, got 3. Use for example "
         "'runs/1'."),
        ({"every_updates": 0}, "every_updates of Checkpoint must be an integer of at least 1 or "
         "None, got 0."),
        ({"keep": 0}, "keep of Checkpoint must be an integer of at least 1, got 0."),
        ({"monitor": 1}, "monitor of Checkpoint must be the name of a value, such as 'val_loss', "
         "or None, got 1."),
        ({"folder": None, "resume": "runs/1/update-000000012", "monitor": "loss"},
         "monitor of Checkpoint set what is written to its folder, but it has no folder. Pass "
         "Checkpoint('runs/1', ...), or leave them out."),
        ({"folder": None}, "folder of Checkpoint must be the path of a folder, got None. Use for "
         "example 'runs/1'."),
        ({"mode": "best"}, "mode of Checkpoint must be one of 'auto', 'min', 'max', got 'best'."),
    ],
)  # fmt: skip
def test_settings_that_cannot_work(options, text):
    refused(lambda: ipufit.Checkpoint(**{"folder": "runs/1", **options}), text)


def test_a_value_that_nobody_gives_cannot_say_which_is_best(tmp_path):
    checkpoint = ipufit.Checkpoint(tmp_path / "run", monitor="val_loss")
    refused(
        lambda: fit(checkpoint),
        "Checkpoint needs the value 'val_loss' at the end of an epoch, but there is only loss, "
        "accuracy. Pass validation_data to fit, or use one of these.",
    )


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_refused_before_any_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="can be written to"):
        fit(tmp_path / "run")


def test_a_folder_that_refuses_is_told_before_any_work(tmp_path, monkeypatch):
    """As one would to anybody but root."""

    def refuse(self, path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(Files, "make_folder", refuse)
    folder = str(tmp_path / "run")
    with pytest.raises(CheckpointError) as told:
        fit(folder)
    assert str(told.value).startswith(
        f"checkpoints need a writable folder, but {folder!r} is not: "
    )
    assert str(told.value).endswith(". Choose another folder.")


def test_a_file_in_the_place_of_the_folder_is_refused_before_any_work(tmp_path):
    (tmp_path / "run").write_text("")
    updates = []

    class Counts(Callback):
        def on_train_batch_end(self, batch, logs=None):
            updates.append(batch)

    with pytest.raises(CheckpointError, match="run"):
        fit(tmp_path / "run", callbacks=[Counts()])
    assert not updates


def said_by(engine, update, action):
    """What a device that fails says."""
    if engine == "embedded":
        return (
            f"the device must run, but a drill lets it fail at update {update}. It can be used "
            f"again after {action}."
        )
    return (
        f"running failed on the device: a drill lets it fail. It can be used again after {action}; "
        "see the documentation of the Poplar SDK, then fit again."
    )


@pytest.mark.long("ipu-standin")
def test_a_device_that_can_be_used_again_gets_another_chance(tmp_path, engine):
    case = plain(callbacks=lambda: [CSVLogger(tmp_path / "log.csv")])
    expected = state(case.run())
    rows = (tmp_path / "log.csv").read_text()
    chances = {"checkpoint": tmp_path / "run", "max_restarts": 2}
    warned = pytest.warns(UserWarning, match="restart")
    with inject("ipu_reset", 3) as early, inject("ipu_reset", 19) as late, warned as told:
        model = case.run(**chances)
    assert early.happened
    assert late.happened
    assert_same(model, expected)
    assert (tmp_path / "log.csv").read_text() == rows
    assert [str(each.message) for each in told] == [
        "restart 1 of 2, from update 0: " + said_by(engine, 3, "IPU_RESET"),
        "restart 2 of 2, from update 12: " + said_by(engine, 19, "IPU_RESET"),
    ]


@pytest.mark.long("ipu-standin")
def test_another_chance_also_where_epochs_are_parts_of_passes(tmp_path):
    """And where a generator of the user's orders the samples."""
    case = plain(
        train=lambda: whole_batches(generator=torch.Generator().manual_seed(3)), steps_per_epoch=5
    )
    with inject("ipu_reset", 1), pytest.warns(UserWarning, match="restart 1 of 1, from update 0"):
        model = case.run(checkpoint=tmp_path / "run", max_restarts=1)
    assert_same(model, state(case.run()))


@pytest.mark.few("full_reset-RecoverableDeviceError", "non_finite-NonFiniteLossError")
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("full_reset", RecoverableDeviceError),
        ("link_reset", RecoverableDeviceError),
        ("partition_reset", RecoverableDeviceError),
        ("unrecoverable", UnrecoverableDeviceError),
        ("non_finite", NonFiniteLossError),
    ],
)
def test_what_cannot_be_helped_from_here_is_an_error(fault, error, tmp_path):
    """And the checkpoints before it are there."""
    with inject(fault, 14), pytest.raises(error) as told:
        PLAIN.run(checkpoint=tmp_path / "run", max_restarts=3)
    assert getattr(told.value, "action", fault.upper()) == fault.upper()
    assert_same(PLAIN.run(checkpoint=tmp_path / "run", resume="auto"), PLAIN.whole())


@pytest.mark.long("ipu-standin")
def test_so_many_restarts_and_no_more(tmp_path):
    ended = pytest.raises(RecoverableDeviceError, match="IPU_RESET")
    warned = pytest.warns(UserWarning, match="restart")
    faults = (inject("ipu_reset", update) for update in (2, 4, 6))
    with next(faults), next(faults), next(faults), warned, ended:
        fit(tmp_path / "run", max_restarts=2)


@pytest.mark.long("ipu-standin")
def test_a_full_disk_ends_training_and_loses_nothing(tmp_path):
    folder = tmp_path / "run"
    with inject("full_disk", 15) as fault, pytest.raises(CheckpointError) as told:
        PLAIN.run(checkpoint=folder)
    assert fault.happened
    assert str(told.value).startswith(
        "a checkpoint must be written completely, but 'update-000000024-epoch' can't be written "
        f"to {str(folder)!r}: "
    )
    assert names(folder) == ["update-000000012-epoch"]
    assert_same(PLAIN.run(checkpoint=folder, resume="auto"), PLAIN.whole())


# torch looks whether files can be opened when a worker does not answer, and leaves them open.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed_ends_training_and_loses_nothing(tmp_path):
    # With a time limit each batch is sent by itself.
    loading = {"num_workers": 1, "worker_init_fn": hash, "timeout": 60}
    case = plain(train=lambda: whole_batches(**loading))
    with inject("worker", 14), pytest.raises(DataError, match="worker"):
        case.run(checkpoint=tmp_path / "run")
    gc.collect()
    assert_same(case.run(checkpoint=tmp_path / "run", resume="auto"), state(case.run()))


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("fault", "error"), [("interrupt", KeyboardInterrupt), ("terminate", SystemExit)]
)
def test_signals_on_demand(fault, error, tmp_path):
    with inject(fault, 14), pytest.raises(error):
        PLAIN.run(checkpoint=tmp_path / "run")
    assert names(tmp_path / "run")[-1] == "update-000000015"
    assert_same(PLAIN.run(checkpoint=tmp_path / "run", resume="auto"), PLAIN.whole())


@pytest.mark.skipif(not CAN_COPY, reason="processes that train can't be forked here")
def test_a_process_that_is_killed_loses_nothing(tmp_path):
    """Nothing of it is tidied up; ``nox -s drill`` kills at any moment."""
    checkpoint = ipufit.Checkpoint(tmp_path / "run", every_updates=5)

    def train():
        with inject("kill", 14):
            PLAIN.run(checkpoint=checkpoint)

    process = start_copy(train)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    model = PLAIN.run(checkpoint=checkpoint, resume="auto")
    assert model.history.params["resumed"]["update"] == 12
    assert_same(model, PLAIN.whole())


@pytest.mark.long("ipu-standin")
def test_what_was_not_struck_is_forgotten_after_the_block(tmp_path):
    with inject("ipu_reset", 500) as fault:
        fit(None)
    assert not fault.happened
    with inject("worker", 0):
        refused(
            lambda: fit(None),
            "the fault 'worker' kills a process of the DataLoader, but there is none. Train on a "
            "DataLoader with num_workers=1 or more, over a dataset of your own.",
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("fire", 1), "fault must be one of 'ipu_reset', 'link_reset', 'partition_reset', "
         "'full_reset', 'unrecoverable', 'non_finite', 'full_disk', 'worker', 'kill', "
         "'terminate', 'interrupt', got 'fire'."),
        (("kill", -1), "at_update must be an integer of at least 0, got -1."),
    ],
)  # fmt: skip
def test_faults_that_there_are_not(arguments, text):
    def planned():
        with inject(*arguments):
            pass

    refused(planned, text)


def test_restarts_need_checkpoints():
    refused(
        lambda: fit(None, max_restarts=1, resume="runs/1/update-000000012"),
        "max_restarts=1 continues from the last checkpoint after a device failure, but "
        "Checkpoint has no folder to write to. Pass Checkpoint('runs/1', ...).",
    )
    refused(
        lambda: fit("unused", max_restarts=-1),
        "max_restarts must be an integer of at least 0, got -1.",
    )


@pytest.mark.long("ipu-standin")
def test_vanished_folders_end_training(tmp_path):
    folder = tmp_path / "run"

    class Removes(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                shutil.rmtree(tmp_path / "run")
                (tmp_path / "run").write_text("")

    with pytest.raises(CheckpointError, match="can't be written to"):
        fit(folder, callbacks=[Removes()])


def tampered(folder, change):
    """The newest checkpoint as somebody else might have made it: whole, with other content."""
    store = Store(folder)
    name = store.names()[-1]
    contents = store.read(name)
    # In memory of their own: the files go.
    tensors = {g: {n: t.clone() for n, t in own.items()} for g, own in contents.tensors.items()}
    document = dict(contents.document)
    tree = decode(document["content"], tensors["state"])
    change(document, tree)
    document["content"], tensors["state"] = encode(tree)
    store.remove(name)
    store.write(name, document, tensors)


PATIENT = plain(callbacks=lambda: [EarlyStopping("loss", patience=9)])


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run that has just begun."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    PATIENT.run(4, checkpoint=ipufit.Checkpoint(folder, every_updates=4))
    return folder


@pytest.mark.few("<lambda>0", "<lambda>16")
@pytest.mark.parametrize(
    "change",
    [
        lambda document, tree: document.update(epoch="1"),
        lambda document, tree: document.update(updates=-1),
        lambda document, tree: document.update(kind="weights"),
        lambda document, tree: document.update(run={}),
        lambda document, tree: document.update(best={"name": 3, "value": None}),
        lambda document, tree: tree.pop("meter"),
        lambda document, tree: tree.update(meter={"samples": []}),
        lambda document, tree: tree["history"].update(history={"loss": ["high"]}),
        lambda document, tree: tree["place"].update(batches=-3),
        lambda document, tree: tree["place"].update(number=None),
        lambda document, tree: tree["random"].update(torch=torch.zeros(3)),
        lambda document, tree: tree["random"].update(python=[3, [1, 2], None]),
        lambda document, tree: tree["optimizer"].update(state={0: {"exp_avg": "much"}}),
        lambda document, tree: tree["optimizer"].update(param_groups=[]),
        lambda document, tree: tree.update(optimizer=3),
        lambda document, tree: tree.update(choices={"a": 1}),
        lambda document, tree: tree.update(callbacks=[["EarlyStopping", 5], ["Ends", None]]),
    ],
)
def test_content_that_nobody_can_take_over_is_an_error_of_ours(change, begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    tampered(tmp_path / "run", change)
    with pytest.raises(CheckpointError):
        PATIENT.run(resume=tmp_path / "run" / "update-000000004")


@pytest.mark.long("ipu-standin")
def test_files_of_others_are_not_removed_for_a_checkpoint(tmp_path):
    """A list of files to rotate is a list of files to remove."""
    (tmp_path / "precious.safetensors").write_text("")

    def make():
        return [ModelCheckpoint(tmp_path / "kept" / "{epoch}.safetensors", keep=1)]

    case = plain(callbacks=make)
    case.run(14, checkpoint=ipufit.Checkpoint(tmp_path / "run", every_updates=7))

    def point_elsewhere(document, tree):
        assert tree["callbacks"][0][1]["files"] == [str(tmp_path / "kept" / "1.safetensors")]
        tree["callbacks"][0][1]["files"] = [str(tmp_path / "precious.safetensors")]

    tampered(tmp_path / "run", point_elsewhere)
    with pytest.raises(CheckpointError, match="does not match filepath"):
        case.run(resume=tmp_path / "run" / "update-000000014")
    assert (tmp_path / "precious.safetensors").exists()
