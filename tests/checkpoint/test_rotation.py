"""Names, rotation and leftovers: checkpoints come and go as a whole."""

import os
import subprocess
import sys
import threading

import pytest

from ipufit.checkpoint import Store, name_of
from ipufit.errors import CheckpointError
from ipufit.utils.files import part_of
from tests.checkpoint.written import ONE, TWO, assert_whole, place, put, written

pytestmark = pytest.mark.both_engines


def test_names_are_in_the_order_of_their_numbers(store):
    """Whatever their suffixes, and however many digits."""
    several = [name_of(10**9), name_of(3) + "-last", name_of(3), name_of(10**10)]
    for name in [*several, name_of(999999999)]:
        store.write(name, {}, {})
    os.mkdir(place(store, name_of(4)))
    put(store, b"", "update-000000005")
    assert store.names() == [
        ONE,
        TWO,
        "update-000000003",
        "update-000000003-last",
        "update-999999999",
        "update-1000000000",
        "update-10000000000",
    ]


def test_rotation_keeps_the_newest_and_those_that_are_named(store):
    """The best one stays, however old."""
    for updates in (3, 4, 5):
        written(store, updates)
    assert store.rotate(5) == []
    assert store.rotate(2, also=[TWO, name_of(5), "other"]) == [ONE, name_of(3)]
    assert store.names() == [TWO, name_of(4), name_of(5)]
    assert sorted(os.listdir(store.folder)) == store.names()
    assert store.rotate(0) == [TWO, name_of(4), name_of(5)]
    assert os.listdir(store.folder) == []


def test_tensors_outlive_their_checkpoint(store):
    """They are views of a file that rotation removes."""
    tensors = store.read(TWO).tensors["weights"]
    store.remove(TWO)
    assert tensors["head.weight"].tolist() == [[2, 2], [2, 2]]


def test_threads_write_side_by_side(store):
    """Two models may be trained in one program; each name goes to one of them."""
    outcomes, refusals = [], []
    barrier = threading.Barrier(4)

    def write(first):
        barrier.wait()
        for updates in range(first, first + 10):
            try:
                outcomes.append(written(Store(store.folder), updates))
            except CheckpointError as error:
                refusals.append(str(error))
            store.rotate(30)

    threads = [threading.Thread(target=write, args=(first,)) for first in (10, 10, 15, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refusals) == 20
    assert all("must have a new name" in text for text in refusals)
    assert sorted(outcomes) == [name_of(updates) for updates in range(10, 30)]
    for name in outcomes:
        assert_whole(store.folder, name)
    assert sorted(os.listdir(store.folder)) == [ONE, TWO, *sorted(outcomes)]


def ended():
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_are_removed_by_the_next_write(store, tmp_path):
    """Of processes that are gone, of this one's own failures, and of those a day old."""
    alive = os.getppid()
    for pid in (ended(), os.getpid(), alive):
        os.mkdir(place(store, f".{name_of(3)}.{pid}.7.part"))
    put(store, b"half", f".{name_of(3)}.{os.getpid()}.7.part", "state.json")
    old = f".{name_of(3)}.{alive}.8.part"
    os.mkdir(place(store, old))
    os.utime(place(store, old), (0, 0))
    linked = f".{name_of(3)}.{ended()}.9.part"
    os.mkdir(tmp_path / "other")
    os.symlink(tmp_path / "other", place(store, linked))
    others = [".hidden", f".{name_of(3)}.part", ".x.1.2.part"]
    for other in others:
        os.mkdir(place(store, other))
    written(store, 3)
    left = [f".{name_of(3)}.{alive}.7.part", *others]
    assert sorted(os.listdir(store.folder)) == sorted([ONE, TWO, name_of(3), *left])
    assert (tmp_path / "other").exists()


def test_leftovers_do_not_hinder_a_removal(store):
    """What is left may have the very name that is needed."""
    os.mkdir(place(store, part_of(ONE)))
    put(store, b"half", part_of(ONE), "state.json")
    store.remove(ONE)
    assert os.listdir(store.folder) == [TWO]
