"""What is read is what was written: anything else on the disk is refused, with its file."""

import hashlib
import json
import os

import pytest

from ipufit.checkpoint import Store, files, name_of
from ipufit.errors import CheckpointError
from tests.checkpoint.written import (
    ONE,
    TWO,
    assert_whole,
    content,
    list_again,
    listed,
    newest,
    place,
    put,
    refused,
    written,
)

pytestmark = pytest.mark.both_engines

CURE = "Use another checkpoint, or restore this one from a copy."


def replace(store, data, file, name=TWO):
    """Put another file in the place of one, and into the manifest, as a stranger can."""
    put(store, data, name, file)
    changed = listed(store)
    changed["files"][file] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    list_again(store, changed)


def damaged(store, file, reason, advice=CURE):
    """Reading says this of the file, and so does the search, which finds the one before."""
    text = f"{file!r} of the checkpoint {place(store, TWO)!r} must be as ipufit wrote it, but "
    text += f"{reason}. {advice}"
    refused(lambda: store.read(TWO), text)
    assert newest(store) == (ONE, [text])


def test_a_missing_checkpoint_is_named(store):
    """With what is there."""
    text = (
        f"a checkpoint must be one of those in {store.folder!r}, but {name_of(7)!r} is not there; "
        f"the newest is {TWO!r}. Choose one of Store.names()."
    )
    refused(lambda: store.read(name_of(7)), text)
    refused(lambda: store.remove(name_of(7)), text)
    store.rotate(0)
    refused(lambda: store.read(name_of(7)), text.replace(f"the newest is {TWO!r}", "there is none"))


@pytest.mark.parametrize("file", ["state.json", "state.safetensors", "weights.safetensors"])
def test_a_changed_file_is_not_read(store, file):
    """One bit is enough, a missing end, or a longer one."""
    whole = content(store, TWO, file)
    flipped = bytearray(whole)
    for spot in range(0, len(whole), 7):
        flipped[spot] ^= 1 << spot % 8
        put(store, flipped, TWO, file)
        with pytest.raises(CheckpointError):
            store.read(TWO)
        flipped[spot] = whole[spot]
    flipped[-1] ^= 1
    put(store, flipped, TWO, file)
    damaged(store, file, "its content has changed since manifest.json was written")
    for data in (whole[:-1], whole + b" ", b""):
        put(store, data, TWO, file)
        damaged(store, file, f"it has {len(data)} bytes, but manifest.json says {len(whole)}")
    os.remove(place(store, TWO, file))
    damaged(store, file, "it is missing")


def test_a_changed_manifest_is_not_read(store):
    """Every bit of it matters."""
    whole = content(store, TWO, "manifest.json")
    for spot in range(len(whole)):
        flipped = bytearray(whole)
        flipped[spot] ^= 1 << spot % 8
        put(store, flipped, TWO, "manifest.json")
        with pytest.raises(CheckpointError):
            store.read(TWO)
    for end in range(0, len(whole), 20):
        put(store, whole[:end], TWO, "manifest.json")
        with pytest.raises(CheckpointError, match=r"'manifest\.json' of the checkpoint"):
            store.read(TWO)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[]", "it is not the manifest of a checkpoint"),
        (b'{"format": "other"}', "it is not the manifest of a checkpoint"),
        (
            b"{",
            ("it is not JSON: Expecting property name enclosed in double quotes: line 1 column 2"),
        ),
        (b'{"a": NaN}', "it is not JSON: NaN is not a number"),
        (b'{"a": -Infinity}', "it is not JSON: -Infinity is not a number"),
        (b'{"a": 1e999}', "it is not JSON: the number '1e999' is too large"),
        (b'{"a": 1, "b": 2, "a": 1}', "it is not JSON: the key 'a' appears twice"),
        (b"[" * 100_000, "it is nested deeper than 350 levels"),
        (b'{"a":' * 100_000, "it is nested deeper than 350 levels"),
        (
            b"1" * 100_000,
            f"it is not JSON: the number '{'1' * 80}'... has more than 30 characters",
        ),
        (
            b"0." + b"1" * 40,
            f"it is not JSON: the number '0.{'1' * 40}' has more than 30 characters",
        ),
        (b" " * (1 << 20) + b"1", "it has more than 1048576 bytes"),
        (b"\xff", "it is not JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid"),
    ],
)
def test_what_is_no_manifest_is_refused(store, data, reason):
    """A stranger's file may be anything."""
    put(store, data, TWO, "manifest.json")
    with pytest.raises(CheckpointError) as caught:
        store.read(TWO)
    text = (
        f"'manifest.json' of the checkpoint {place(store, TWO)!r} must be as ipufit wrote it, but "
    )
    assert str(caught.value).startswith(text + reason)
    assert str(caught.value).endswith(". " + CURE)


def test_brackets_and_quotes_in_texts_are_no_nesting(store):
    """The depth is measured before the parser sees the text."""
    document = {"a": "[" * 1000 + '\\"{' * 1000, '"[\\': ["\\", "]}"]}
    store.write(name_of(3), document, {})
    assert store.read(name_of(3)).document == document


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"version": [0, 9]}, "its version does not exist"),
        ({"version": [1]}, "its version does not exist"),
        ({"version": [1, True]}, "its version does not exist"),
        ({"version": [1, -1]}, "its version does not exist"),
        ({"version": "1.0"}, "its version does not exist"),
        ({"files": []}, "its parts are not format, version and files"),
        ({"more": 1}, "its parts are not format, version and files"),
        ({"files": {}}, "it lists 0 files, but must list state.json and at most 64"),
        (
            {"files": {name: {} for name in ["state.json", *map(str, range(64))]}},
            "it lists 65 files, but must list state.json and at most 64",
        ),
        (
            {"files": {"state.json": {"size": -1, "sha256": "0" * 64}}},
            "it does not give a size and a hash for 'state.json'",
        ),
        (
            {"files": {"state.json": {"size": 1.0, "sha256": "0" * 64}}},
            "it does not give a size and a hash for 'state.json'",
        ),
        (
            {"files": {"state.json": {"size": 1, "sha256": "0" * 63}}},
            "it does not give a size and a hash for 'state.json'",
        ),
        (
            {"files": {"state.json": 3}},
            "it does not give a size and a hash for 'state.json'",
        ),
    ],
)
def test_a_manifest_of_other_parts_is_refused(store, changed, reason):
    """Each with what is wrong."""
    list_again(store, {**listed(store), **changed})
    damaged(store, "manifest.json", reason)


@pytest.mark.parametrize(
    "file",
    [
        "../x.safetensors",
        "/x.safetensors",
        "a/b.safetensors",
        ".x.safetensors",
        "x.pt",
        "..",
        "\u0661",
        ".safetensors",
        "manifest.json",
        "a\\b.safetensors",
        "a\n.safetensors",
    ],
)
def test_files_elsewhere_are_not_listed(store, file):
    """A manifest may not lead out of its folder."""
    changed = listed(store)
    changed["files"][file] = changed["files"]["state.json"]
    list_again(store, changed)
    reason = f"it lists the file {file!r}, which can't belong to a checkpoint"
    damaged(store, "manifest.json", reason)


@pytest.mark.parametrize("version", [[1, 3], [2, 0]])
def test_a_newer_version_is_refused(store, version):
    """What this one does not know of might matter; it may have other parts, too."""
    list_again(store, {**listed(store), "version": version, "more": 1})
    came = ".".join(map(str, version))
    damaged(
        store,
        "manifest.json",
        f"it was written by a newer ipufit, in version {came} of the format; this ipufit reads "
        "versions up to 1.2",
        "Update ipufit, or read a checkpoint that this version wrote.",
    )


def test_an_older_minor_version_is_read(store, monkeypatch):
    """Checkpoints are kept longer than versions."""
    monkeypatch.setattr(files, "VERSION", (1, 3))
    assert_whole(store.folder, TWO)


def test_a_huge_declared_size_is_only_compared(store):
    """No memory is taken for what is not there."""
    changed = listed(store)
    changed["files"]["weights.safetensors"]["size"] = 10**20
    list_again(store, changed)
    size = len(content(store, TWO, "weights.safetensors"))
    reason = f"it has {size} bytes, but manifest.json says {10**20}"
    damaged(store, "weights.safetensors", reason)


def test_a_large_state_is_not_read(store):
    """Its numbers belong into tensors. The file has a hole, and takes no room."""
    with open(place(store, TWO, "state.json"), "wb") as file:
        file.truncate((64 << 20) + 1)
    changed = listed(store)
    changed["files"]["state.json"]["size"] = (64 << 20) + 1
    list_again(store, changed)
    damaged(store, "state.json", "it has more than 67108864 bytes")


def test_files_of_state_that_are_not_listed_are_refused(store):
    """They would be taken for checked; notes do no harm."""
    for file in ("README.txt", ".DS_Store", ".weights.safetensors"):
        put(store, b"", TWO, file)
    assert_whole(store.folder, TWO)
    put(store, b"", TWO, "more.safetensors")
    reason = "it does not list 'more.safetensors', which is in the folder"
    damaged(store, "manifest.json", reason)


def test_a_state_that_is_no_object_is_refused(store):
    """Though its hash is right."""
    replace(store, b"[]", "state.json")
    damaged(store, "state.json", "it is not a JSON object")
    replace(store, b'{"a": 1, "a": 2}', "state.json")
    damaged(store, "state.json", "it is not JSON: the key 'a' appears twice")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"12345678",
        b"\xff" * 100,
        (10).to_bytes(8, "little") + b'{"a":[1,2]' + b" ",
        (2**62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{}" + b"more",
        (1000).to_bytes(8, "little") + b"[" * 1000,
    ],
)
def test_what_is_no_file_of_tensors_is_refused(store, data):
    """Though its hash is right; what safetensors says differs from release to release."""
    replace(store, data, "weights.safetensors")
    with pytest.raises(CheckpointError) as caught:
        store.read(TWO)
    text = f"'weights.safetensors' of the checkpoint {place(store, TWO)!r} must be as ipufit wrote"
    assert str(caught.value).startswith(f"{text} it, but safetensors says ")
    assert newest(store)[0] == ONE


def test_tensors_of_a_dtype_nobody_knows_are_refused(store):
    """A file of a newer safetensors may have them."""
    header = json.dumps({"a": {"dtype": "F7", "shape": [1], "data_offsets": [0, 1]}}).encode()
    data = len(header).to_bytes(8, "little") + header + b"\0"
    replace(store, data, "weights.safetensors")
    with pytest.raises(CheckpointError, match="but safetensors says "):
        store.read(TWO)


@pytest.mark.parametrize("file", ["manifest.json", "state.json", "weights.safetensors"])
def test_links_are_not_followed(store, file):
    """A link could lead to any file that the reader may read; a pipe would never end."""
    os.replace(place(store, TWO, file), place(store, "elsewhere"))
    os.symlink(place(store, "elsewhere"), place(store, TWO, file))
    damaged(store, file, "it is not a regular file; it may be a link")
    os.remove(place(store, TWO, file))
    os.mkfifo(place(store, TWO, file))
    damaged(store, file, "it is not a regular file; it may be a link")


def test_a_link_that_is_put_in_place_late_is_not_followed(store, monkeypatch):
    """Between a look at the file and its opening."""
    os.replace(place(store, TWO, "state.json"), place(store, "elsewhere"))
    os.symlink(place(store, "elsewhere"), place(store, TWO, "state.json"))
    monkeypatch.setattr(os, "lstat", os.stat)
    damaged(store, "state.json", "Too many levels of symbolic links")


def test_a_link_to_a_folder_is_no_checkpoint(store):
    """It is told, not left out; and removing it leaves what it leads to."""
    os.rename(place(store, TWO), place(store, "elsewhere"))
    os.symlink(place(store, "elsewhere"), place(store, TWO))
    damaged(store, "manifest.json", "the checkpoint is not a folder, or is a link to one")
    store.remove(TWO)
    assert sorted(os.listdir(store.folder)) == ["elsewhere", ONE]
    assert len(os.listdir(place(store, "elsewhere"))) == 4


def test_the_folder_itself_may_be_a_link(store, tmp_path):
    """Large files are often on another disk than the project."""
    os.symlink(store.folder, tmp_path / "link")
    linked = Store(tmp_path / "link")
    assert_whole(linked.folder, written(linked, 3))
    assert store.names() == [ONE, TWO, name_of(3)]
