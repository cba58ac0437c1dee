"""Whatever fails while checkpoints are written and removed, a whole one can be read afterwards."""

import errno
import os

import pytest

from ipufit.checkpoint import Files, Store, name_of
from ipufit.errors import CheckpointError
from tests.checkpoint.written import assert_whole, newest, written
from tests.processes.launching import run_copies
from tests.told import message

pytestmark = pytest.mark.both_engines

CHANGES = ("make_folder", "write", "write_tensors", "rename", "sync_folder", "remove_tree")


class Crash(BaseException):
    """The process ends here: nothing is tidied up."""


class Faulty(Files):
    """Fails at one of its operations.

    Args:
        at: number of the operation, counted from 0; None for none.
        error: what is raised there.
        lasts: whether all later operations fail too.
        half: whether the operation is done by half first, or wholly if it is one that has none.
    """

    def __init__(self, at=None, error=None, lasts=False, half=False):
        self.at = at
        self.error = error
        self.lasts = lasts
        self.half = half
        self.done = []

    def _fails(self, change, path):
        count = len(self.done)
        self.done.append((change, os.path.basename(path)))
        return self.at is not None and (count == self.at or (self.lasts and count > self.at))

    def is_first(self):
        return len(self.done) - 1 == self.at


def failing(change):
    """The operation, which may fail."""
    real = getattr(Files, change)

    def run(self, path, *args):
        if not self._fails(change, path):
            return real(self, path, *args)
        if self.half and self.is_first():
            if change == "remove_tree":
                os.remove(os.path.join(path, sorted(os.listdir(path))[0]))
            else:
                real(self, path, *args)
            if change.startswith("write"):
                with open(path, "rb+") as file:
                    file.truncate(os.path.getsize(path) // 2)
        raise self.error

    return run


for _change in CHANGES:
    setattr(Faulty, _change, failing(_change))


def train(folder, files):
    """Write the third checkpoint, and keep two."""
    store = Store(folder, files)
    written(store, 3)
    store.rotate(2)


def prepared(folder):
    """A folder with two checkpoints."""
    for updates in (1, 2):
        written(Store(folder), updates)
    return folder


def operations(folder):
    """Those of an undisturbed run."""
    files = Faulty()
    train(prepared(folder), files)
    return files.done


def assert_sound(folder):
    """The second or the third checkpoint is the newest, whole, and training can go on."""
    store = Store(folder)
    name, faults = newest(store)
    assert name in (name_of(2), name_of(3))
    assert faults == []
    for each in store.names():
        assert_whole(folder, each)
    before = store.names()
    written(store, 4)
    assert store.names() == [*before, name_of(4)]
    assert_whole(folder, name_of(4))
    assert sorted(os.listdir(folder)) == store.names()
    return name


def test_files_are_complete_before_they_have_a_name(tmp_path):
    """The order on which everything rests: contents, their folder, the name, the name's folder."""
    steps = operations(tmp_path / "runs")
    part = f".{name_of(3)}."
    removed = f".{name_of(1)}."
    assert [(change, name[: len(part)] if name[0] == "." else name) for change, name in steps] == [
        ("make_folder", part),
        ("write", "state.json"),
        ("write_tensors", "weights.safetensors"),
        ("write_tensors", "state.safetensors"),
        ("write", "manifest.json"),
        ("sync_folder", part),
        ("rename", part),
        ("sync_folder", "runs"),
        ("rename", name_of(1)),
        ("sync_folder", "runs"),
        ("remove_tree", removed),
    ]


def test_every_file_and_folder_is_synchronised(tmp_path, monkeypatch):
    """Without it, a power cut leaves a checkpoint of empty files."""
    places = []
    real = os.fsync

    def fsync(handle):
        places.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real(handle)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("the names of open files are in no folder /proc")
    store = Store(tmp_path / "new" / "runs")
    monkeypatch.setattr(os, "fsync", fsync)
    written(store, 1)
    files = ["state.json", "weights.safetensors", "state.safetensors", "manifest.json"]
    assert places[:2] == [tmp_path.name, "new"]
    assert places[2:6] == files
    assert places[6].startswith(f".{name_of(1)}.")
    assert places[7:] == ["runs"]


@pytest.mark.few
@pytest.mark.parametrize("half", [False, True])
def test_any_failing_operation_leaves_a_whole_checkpoint(tmp_path, half):
    """A full disk: the error is told, and nothing is left over once there is room."""
    steps = operations(tmp_path / "whole")
    for at, (change, _) in enumerate(steps):
        folder = prepared(tmp_path / str(at))
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with pytest.raises(CheckpointError, match="No space left on device"):
            train(folder, Faulty(at, error, half=half))
        is_written = at >= steps.index(("sync_folder", "whole")) + 1
        if not (half and change == "rename"):
            assert sorted(Store(folder).names())[-1] == name_of(3 if is_written else 2)
        assert_sound(folder)


@pytest.mark.long
@pytest.mark.parametrize("half", [False, True])
def test_a_disk_that_stays_full_leaves_a_whole_checkpoint(tmp_path, half):
    """Nothing can be tidied up either."""
    for at in range(len(operations(tmp_path / "whole"))):
        folder = prepared(tmp_path / str(at))
        error = OSError(errno.EIO, os.strerror(errno.EIO))
        with pytest.raises(CheckpointError, match="Input/output error"):
            train(folder, Faulty(at, error, lasts=True, half=half))
        assert_sound(folder)


@pytest.mark.few
@pytest.mark.parametrize("half", [False, True])
def test_a_crash_at_any_operation_leaves_a_whole_checkpoint(tmp_path, half):
    """The process is killed: nothing after that operation happens."""
    found = set()
    for at in range(len(operations(tmp_path / "whole"))):
        folder = prepared(tmp_path / str(at))
        with pytest.raises(Crash):
            train(folder, Faulty(at, Crash(), lasts=True, half=half))
        found.add(assert_sound(folder))
    assert found == {name_of(2), name_of(3)}


@pytest.mark.long
@pytest.mark.parametrize("half", [False, True])
def test_an_interrupt_at_any_operation_leaves_a_whole_checkpoint(tmp_path, half):
    """Ctrl-C goes through, after what was half written is removed."""
    for at in range(len(operations(tmp_path / "whole"))):
        folder = prepared(tmp_path / str(at))
        with pytest.raises(KeyboardInterrupt):
            train(folder, Faulty(at, KeyboardInterrupt(), half=half))
        assert_sound(folder)


def test_the_first_checkpoint_makes_its_folder_or_nothing(tmp_path):
    """There is none before it to fall back on."""
    files = Faulty()
    written(Store(tmp_path / "whole" / "runs", files), 1)
    for at in range(len(files.done)):
        folder = tmp_path / str(at) / "runs"
        with pytest.raises(Crash):
            written(Store(folder, Faulty(at, Crash(), lasts=True)), 1)
        assert Store(folder).newest()[1] == []
        assert_whole(folder, written(Store(folder), 2))


def test_the_same_name_can_be_written_after_a_failure(tmp_path):
    """Training that goes on in the same process comes to the same update again."""
    for at in range(7):
        folder = prepared(tmp_path / str(at))
        with pytest.raises(Crash):
            written(Store(folder, Faulty(at, Crash(), lasts=True)), 3)
        assert_whole(folder, written(Store(folder), 3))


def test_a_name_that_may_not_last_is_taken_back(tmp_path):
    """The error says that there is no checkpoint, so there must be none."""
    folder = prepared(tmp_path / "runs")
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    assert message(written, Store(folder, Faulty(7, error)), 3, kind=CheckpointError) == (
        f"a checkpoint must be written completely, but {name_of(3)!r} can't be written to "
        f"{str(folder)!r}: Input/output error. Free some space or choose another folder; earlier "
        "checkpoints are intact."
    )
    assert sorted(os.listdir(folder)) == [name_of(1), name_of(2)]


def test_a_checkpoint_that_can_not_be_removed_is_told(tmp_path):
    """Else a disk fills up silently."""
    folder = prepared(tmp_path / "runs")
    error = OSError(errno.EACCES, os.strerror(errno.EACCES))
    assert message(Store(folder, Faulty(0, error)).rotate, 1, kind=CheckpointError) == (
        f"the checkpoint {name_of(1)!r} in {str(folder)!r} can't be removed: Permission denied. "
        "Remove its folder yourself."
    )


def test_one_that_another_process_removed_is_no_failure(tmp_path):
    """Both rotate the same folder."""
    folder = prepared(tmp_path / "runs")
    error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    assert Store(folder, Faulty(0, error)).rotate(0) == [name_of(1), name_of(2)]


KILLED = """
import os, sys
from ipufit.checkpoint import Files, Store
from tests.checkpoint.written import written

class Killed(Files):
    def sync_folder(self, path):
        os._exit(3)

written(Store(sys.argv[1], Killed()), 3)
"""


@pytest.mark.long
def test_what_a_killed_process_left_is_removed(tmp_path):
    """The real thing: its folder has another process's name, and nobody can ask it."""
    folder = prepared(tmp_path / "runs")
    (ended,) = run_copies(KILLED, 1, args=[str(folder)])
    assert ended.code == 3, str(ended)
    assert len(os.listdir(folder)) == 3
    assert assert_sound(folder) == name_of(2)
