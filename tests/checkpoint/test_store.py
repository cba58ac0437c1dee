"""Checkpoints are written as other programs read them, or are refused and leave nothing."""

import hashlib
import json
import os
import resource

import pytest
import safetensors.torch
import torch
from torch import nn

from ipufit.checkpoint import Store, encode, name_of
from ipufit.errors import CheckpointError
from tests.checkpoint.written import (
    ONE,
    TWO,
    assert_whole,
    content,
    listed,
    newest,
    place,
    put,
    refused,
    same,
    written,
)

pytestmark = pytest.mark.both_engines

BITS = getattr(torch, "bits8", torch.uint8)


def test_what_was_written_is_read(store, tmp_path):
    """In a folder that was made for it; older ones stay."""
    assert store.names() == [ONE, TWO]
    assert newest(store) == (TWO, [])
    for name in store.names():
        assert_whole(store.folder, name)
    assert sorted(os.listdir(store.folder)) == [ONE, TWO]
    assert store.write(name_of(3), {}, {}) == place(store, name_of(3))
    assert Store(tmp_path / "none").names() == []
    assert Store(tmp_path / "none").newest() == (None, [])


def test_the_files_are_what_other_programs_read(store):
    """A checkpoint must outlive the library that wrote it."""
    files = {"manifest.json", "state.json", "state.safetensors", "weights.safetensors"}
    assert set(os.listdir(place(store, TWO))) == files
    net = nn.Sequential()
    net.add_module("head", nn.Linear(2, 2, bias=False))
    net.load_state_dict(safetensors.torch.load_file(place(store, TWO, "weights.safetensors")))
    assert net.head.weight.tolist() == [[2, 2], [2, 2]]
    with safetensors.safe_open(place(store, TWO, "weights.safetensors"), "pt") as file:
        assert file.metadata() == {"format": "pt"}
    found = listed(store)
    assert found["format"] == "ipufit.Checkpoint"
    assert found["version"] == [1, 2]
    assert set(found["files"]) == files - {"manifest.json"}
    for name, entry in found["files"].items():
        data = content(store, TWO, name)
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_files_have_the_rights_of_other_new_files(store):
    """A colleague who may read the folder may read the weights."""
    put(store, b"", "other")
    rights = os.stat(place(store, "other")).st_mode
    for file in os.listdir(place(store, TWO)):
        assert os.stat(place(store, TWO, file)).st_mode == rights


def test_any_tensors_are_stored(store):
    """Views, names of one tensor, scalars, empty ones: a module's state has them all."""
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "base": base,
        "again": base,
        "view": base[1:],
        "turned": base.t(),
        "scalar": torch.tensor(2, dtype=torch.int8),
        "empty": torch.empty(0, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    store.write(name_of(3), {}, {"weights": tensors, "empty": {}})
    found = store.read(name_of(3)).tensors
    assert same(found["weights"], {name: tensors[name].detach() for name in found["weights"]})
    assert set(found["weights"]) == set(tensors)
    assert found["empty"] == {}


def test_conjugates_are_stored_as_values(store):
    """torch keeps them as a mark on the tensor, which a file has no place for."""
    value = torch.tensor([1 + 2j], dtype=torch.complex128)
    store.write(name_of(3), {}, {"weights": {"a": value.conj(), "view": torch.arange(4)[1:3]}})
    found = store.read(name_of(3)).tensors["weights"]
    assert found["a"].tolist() == [1 - 2j]
    assert found["view"].tolist() == [1, 2]


def test_a_name_is_never_written_twice(store):
    """A checkpoint that is there is not touched."""
    text = (
        f"a checkpoint must have a new name, but {TWO!r} is in {store.folder!r} already. Choose "
        "another name or folder, or remove it first."
    )
    refused(lambda: store.write(TWO, {}, {}), text)
    assert_whole(store.folder, TWO)
    os.mkdir(place(store, name_of(3)))
    refused(lambda: store.write(name_of(3), {}, {}), text.replace(TWO, name_of(3)))


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "../x",
        "/etc",
        "update-1",
        "update-000000001/../x",
        "update-000000001x",
        "update-000000001\n",
        "a" * 200,
        "update-000000001-" + "a" * 100,
        "update-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661",
    ],
)
def test_names_that_lead_elsewhere_are_refused(store, name):
    """A name may come from a file or a command line."""
    cut = repr(name) if len(name) <= 80 else f"{name[:80]!r}..."
    text = (
        "a checkpoint must be named like 'update-000000012', perhaps with a suffix as in "
        f"'update-000000012-last', got {cut}. Use name_of(updates)."
    )
    for call in (store.read, store.remove, lambda name: store.write(name, {}, {})):
        refused(lambda call=call: call(name), text)


CANT = "a checkpoint must be written completely, but 'update-000000003' can't be written to {!r}: "


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"a": {1}}, "it is not JSON: Object of type set is not JSON serializable"),
        (
            {"a": (1,)},
            "it is not plain JSON: reading it back gives something else",
        ),
        ({1: 2}, "it is not plain JSON: reading it back gives something else"),
        ({1: 2, "1": 3}, "it is not JSON: the key '1' appears twice"),
        (
            {"a": 10**40},
            f"it is not JSON: the number '1{'0' * 40}' has more than 30 characters",
        ),
        (
            {"a": json.loads("[" * 350 + "]" * 350)},
            "it is nested deeper than 350 levels",
        ),
    ],
)
def test_a_document_that_could_not_be_read_back_is_refused(store, document, reason):
    """Better now than on the day it is needed."""
    refused(
        lambda: store.write(name_of(3), document, {}),
        CANT.format(store.folder) + f"its document is refused: {reason}. Make it with "
        "ipufit.checkpoint.encode.",
    )
    assert sorted(os.listdir(store.folder)) == [ONE, TWO]


@pytest.mark.long
def test_a_document_without_an_end_is_refused(store):
    """Python's own error would name neither the document nor the cure."""
    loop, deep = [], []
    loop.append(loop)
    for _ in range(100_000):
        deep = [deep]
    for value, reason in ((loop, "Circular reference detected"), (deep, "maximum recursion depth")):
        with pytest.raises(
            CheckpointError, match=f"its document is refused: it is not JSON: {reason}"
        ):
            store.write(name_of(3), {"a": value}, {})


def test_numbers_that_are_not_finite_are_refused(store):
    """They are no JSON; encode has a form for them."""
    for value in ("nan", "inf"):
        with pytest.raises(
            CheckpointError, match=("its document is refused: it is not JSON: Out of")
        ):
            store.write(name_of(3), {"a": float(value)}, {})


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (
            {"w": {"a": torch.eye(2).to_sparse()}},
            "'a' of 'w' is a tensor of layout torch.sparse_coo. Convert it to a dense tensor with "
            "values.",
        ),
        (
            {"w": {"a": torch.empty(2, device="meta")}},
            "'a' of 'w' is a tensor on the device meta. Convert it to a dense tensor with values.",
        ),
        pytest.param(
            {"w": {"a": torch.ones(1), "b": torch.empty(1, dtype=BITS)}},
            "the installed safetensors can't store these tensors (torch.bits8, torch.float32): "
            "torch.bits8. Convert tensors to another dtype.",
            marks=pytest.mark.skipif(BITS is torch.uint8, reason="this torch has no such dtype"),
        ),
        (
            {"../w": {}},
            "a group of its tensors is called '../w'. Name groups with letters, digits, '_', '.' "
            "and '-'.",
        ),
        (
            {f"w{count}": {} for count in range(64)},
            "it has 65 files, more than 64. Make fewer groups of tensors.",
        ),
    ],
)
def test_tensors_that_can_not_be_stored_are_refused(store, tensors, reason):
    """By name, and nothing is left of the checkpoint."""
    refused(lambda: store.write(name_of(3), {}, tensors), CANT.format(store.folder) + reason)
    assert sorted(os.listdir(store.folder)) == [ONE, TWO]


def test_a_folder_that_can_not_be_is_refused(tmp_path):
    """With what the system says."""
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/in"):
        store = Store(tmp_path / folder)
        refused(
            lambda store=store: store.write(name_of(3), {}, {}),
            CANT.format(store.folder) + f"{str(tmp_path / 'file')!r} is not a folder. Free some "
            "space or choose another folder; earlier checkpoints are intact.",
        )
    refused(
        lambda: Store(tmp_path / "file").names(),
        f"checkpoints are in a folder, but {str(tmp_path / 'file')!r} can't be listed: Not a "
        "directory. Choose another folder.",
    )


@pytest.mark.parametrize("most", [100, 5000])
def test_a_full_disk_leaves_nothing_behind(store, most):
    """A limit on the size of files is as good as one; the message is the system's."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    tensors = {"weights": {"a": torch.ones(10_000)}}
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, kept[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            store.write(name_of(3), {"a": "b" * 200}, tensors)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert sorted(os.listdir(store.folder)) == [ONE, TWO]
    written(store, 3)
    assert_whole(store.folder, name_of(3))


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    """Data sets and scripts change the working directory."""
    monkeypatch.chdir(tmp_path)
    store = Store("runs")
    os.mkdir("elsewhere")
    monkeypatch.chdir("elsewhere")
    written(store, 1)
    assert os.listdir(tmp_path / "runs") == [ONE]


def test_encoded_values_are_what_a_document_takes(store):
    """The two halves fit, at the limit of nesting too."""
    value = {"a": 1.5}
    for _ in range(99):
        value = {0: value}
    document, tensors = encode(value)
    store.write(name_of(3), {"state": document}, {"state": tensors})
    assert store.read(name_of(3)).document["state"] == document
