"""Two runs do not write into one folder of checkpoints."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest
import torch
from torch import nn

import ipufit
from ipufit.callbacks import Callback
from ipufit.checkpoint.store import LOCK, locked
from ipufit.errors import CheckpointError
from tests.copies import start_copy

X, Y = torch.randn(8, 3), torch.randint(0, 2, (8,))

pytestmark = [
    pytest.mark.both_engines,
    pytest.mark.skipif(os.name != "posix", reason="nothing is locked elsewhere"),
]


def fit(folder, epochs=1, callbacks=(), **fields):
    model = ipufit.Model(nn.Linear(3, 2))
    model.compile("sgd", "cross_entropy")
    model.fit(
        X,
        Y,
        batch_size=8,
        epochs=epochs,
        checkpoint=ipufit.Checkpoint(folder, **fields),
        callbacks=callbacks,
        seed=1,
        verbose=0,
    )
    return model


def hold(folder, forks, told):
    """Write into the folder, until somebody ends the process."""
    os.setsid()
    with locked(folder):
        if forks and not os.fork():
            time.sleep(60)
        told.send("locked")
        time.sleep(60)


@pytest.fixture
def start(tmp_path):
    """Starts another process that writes into the folder, in a group of its own."""
    started = []

    def run(*options):
        listening, told = multiprocessing.Pipe(duplex=False)
        process = start_copy(hold, str(tmp_path), "forks" in options, told)
        started.append(process)
        told.close()
        with listening:
            assert listening.recv() == "locked"
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.few
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_second_process_is_told_at_once(start, tmp_path, resume):
    """With the process, and before anything of its own was done."""
    process = start()
    with pytest.raises(CheckpointError) as told:
        fit(tmp_path, resume=resume)
    before, rest = str(told.value).split(" since ")
    assert before == (
        "checkpoints of one run at a time are written to a folder, but process "
        f"{process.pid} on {socket.gethostname()!r}"
    )
    assert rest[19:] == (
        f" is writing to {str(tmp_path)!r}. Wait until that run has ended, or choose another "
        "folder."
    )
    assert os.listdir(tmp_path) == [LOCK]
    # The advice works.
    fit(tmp_path / "other")


@pytest.mark.few
@pytest.mark.parametrize("options", [(), ("forks",)], ids=["alone", "with a child"])
def test_after_sigkill_the_folder_is_free(start, tmp_path, options):
    """Although the file is there; and although a worker, made by fork, lives on for a while."""
    process = start(*options)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert os.listdir(tmp_path) == [LOCK]
    fit(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["update-000000001-epoch"]


def test_a_second_fit_of_the_same_process_is_told_too(tmp_path):
    class Begins(Callback):
        def on_train_begin(self, logs=None):
            with pytest.raises(CheckpointError, match=f"process {os.getpid()} on "):
                fit(tmp_path, resume="auto")

    fit(tmp_path, callbacks=[Begins()])
    errors = []
    with locked(str(tmp_path)):

        def other():
            try:
                fit(tmp_path, resume="auto")
            except CheckpointError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == 1
    fit(tmp_path, resume="auto", epochs=2, resume_changes={"callbacks"})


def test_a_run_that_another_machine_has_not_ended_is_a_warning(tmp_path):
    """It may be dead, and a job that begins again must not wait for somebody to remove a file."""
    owner = {"host": "elsewhere", "pid": 7, "started": "2026-01-02 03:04:05"}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    with pytest.warns(UserWarning, match="elsewhere") as warned:
        fit(tmp_path)
    assert [str(each.message) for each in warned] == [
        f"the folder {str(tmp_path)!r} was last written to by process 7 on 'elsewhere' since "
        "2026-01-02 03:04:05, which did not end normally. Locks of other machines are not "
        "always visible: if it still runs, end one of the two."
    ]
    assert LOCK not in os.listdir(tmp_path)


@pytest.mark.few
@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 1}', "[" * 999])
def test_a_file_of_something_else_is_written_anew(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    fit(tmp_path)
    assert os.listdir(tmp_path) == ["update-000000001-epoch"]


def test_errors_let_go_of_it(tmp_path):
    class Fails(Callback):
        def on_train_begin(self, logs=None):
            assert LOCK in os.listdir(tmp_path)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fit(tmp_path, callbacks=[Fails()])
    assert os.listdir(tmp_path) == []
