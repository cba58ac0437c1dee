"""The directory of compiled programs, and the process that makes them."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipufit.engines.embedded.inductor import store as store_module
from ipufit.engines.embedded.inductor.store import CALLS, LIBRARY, LibraryStore, key_of
from ipufit.errors import ConfigurationError

pytestmark = [
    pytest.mark.both_engines,
    pytest.mark.skipif(os.name != "posix", reason="the store is for POSIX systems"),
]

PARTS = {"torch": "2.13.0", "threads": "2", "tensors": "t", "shapes": "a", "graph": "b"}


@pytest.fixture
def store(tmp_path):
    return LibraryStore(tmp_path / "compiled")


def put(store, parts, text=b"machine code"):
    with store.workplace() as place:
        (place / LIBRARY).write_bytes(text)
        return store.keep(place / LIBRARY, parts, 1.0)


def test_what_is_kept_is_found_again(store, tmp_path):
    kept = put(store, PARTS)
    assert kept.read_bytes() == b"machine code"
    assert LibraryStore(tmp_path / "compiled").find(PARTS) == kept
    assert store.find({**PARTS, "threads": "1"}) is None
    assert [path.name for path in (tmp_path / "compiled").iterdir()] == [key_of(PARTS)]
    described = json.loads((kept.parent / "entry.json").read_text())
    assert (described["parts"], described["seconds"]) == (PARTS, 1.0)


def test_what_a_library_calls_is_kept_with_it(store):
    with store.workplace() as place:
        (place / LIBRARY).write_bytes(b"machine code")
        (place / CALLS).write_bytes(b"operators")
        kept = store.keep(place / LIBRARY, PARTS, 1.0)
    assert (kept.parent / CALLS).read_bytes() == b"operators"
    assert store.find(PARTS) == kept
    (kept.parent / CALLS).unlink()
    assert store.find(PARTS) is None


def test_the_directory_is_the_users_alone(store, tmp_path):
    root = tmp_path / "compiled"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o770)
    with pytest.raises(ConfigurationError, match="in a directory that only you can use, but "):
        LibraryStore(root)
    root.chmod(0o700)
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(ConfigurationError, match="or is not a directory"):
        LibraryStore(tmp_path / "link")


def test_the_directory_is_chosen_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("IPUFIT_CACHE_DIR", raising=False)
    LibraryStore()
    assert (tmp_path / "caches" / "ipufit" / "compiled").is_dir()
    monkeypatch.setenv("IPUFIT_CACHE_DIR", str(tmp_path / "own"))
    LibraryStore()
    assert (tmp_path / "own" / "compiled").is_dir()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"torch": "2.14.0"}, "torch 2.13.0 -> 2.14.0"),
        ({"shapes": "c"}, "new shapes"),
        ({"tensors": "u", "shapes": "c"}, "new shapes"),
        ({"graph": "c", "threads": "1"}, "threads 2 -> 1, new operators"),
    ],
)
def test_a_miss_says_what_differs_from_the_nearest(change, reason, store):
    assert store.why_missing(PARTS) == "nothing was cached yet"
    put(store, {**PARTS, "torch": "1", "threads": "9", "shapes": "z", "graph": "z"})
    put(store, PARTS)
    assert store.why_missing({**PARTS, **change}) == reason


def test_a_damaged_library_is_not_run_but_replaced(store):
    kept = put(store, PARTS)
    kept.write_bytes(b"machine co")
    assert store.find(PARTS) is None
    assert store.why_missing(PARTS) == "the cached one is damaged"
    assert put(store, PARTS) == kept
    assert store.find(PARTS) == kept


def test_what_was_not_used_for_longest_makes_room(store, monkeypatch):
    monkeypatch.setattr(store_module, "_LARGEST", 250)
    parts = [{**PARTS, "graph": str(i)} for i in range(4)]
    for age, each in zip((30, 20, 10), parts):
        entry = put(store, each, bytes(100)).parent
        os.utime(entry, (time.time() - age, time.time() - age))
        if age == 20:
            assert store.find(parts[0]) is not None  # which makes it the last used
    put(store, parts[3], bytes(100))
    assert [store.find(each) is not None for each in parts] == [True, False, False, True]


def test_what_nobody_finished_is_swept_away(store, tmp_path):
    old = tmp_path / "compiled" / "making-old"
    old.mkdir()
    os.utime(old, (0, 0))
    with store.workplace() as place:
        assert place.exists()
        assert not old.exists()
    assert not place.exists()


def test_a_full_scratch_is_emptied(store, monkeypatch):
    monkeypatch.setattr(store_module, "_LARGEST_SCRATCH", 10)
    (store.scratch() / "header").write_bytes(bytes(11))
    assert list(store.scratch().iterdir()) == []


_PARENT = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from ipufit.engines.embedded.inductor import compiled
place = Path(sys.argv[1])
opened = ExitStack()
compiled._RUN = '''
from {0} import _end_with_input
print("up", flush=True)
_end_with_input()
'''
process = opened.enter_context(compiled._started(place, place))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.long
def test_the_compiler_ends_when_its_parent_is_killed(tmp_path):
    command = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4]) as parent:
        pid = int(parent.stdout.readline())
        waiting = time.monotonic() + 60
        while b"up" not in (tmp_path / "log.txt").read_bytes():
            assert time.monotonic() < waiting
            time.sleep(0.1)
        parent.send_signal(signal.SIGKILL)
    while _is_alive(pid):
        assert time.monotonic() < waiting
        time.sleep(0.1)


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended may wait for init to notice.
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
