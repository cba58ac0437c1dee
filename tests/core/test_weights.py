"""Files of weights: complete or absent, readable without ipufit, compared before they are used."""

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import ipufit
from ipufit.core.weights_file import WeightsCopy, load_weights, save_weights
from ipufit.errors import ConfigurationError
from tests.faulty import Net, Told, assert_same_bits, batches, compiled, fit, flat
from tests.told import refused


class Tied(nn.Module):
    """Two names of one parameter, a scalar, an integer and a buffer that is not stored."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class Extra(nn.Module):
    """Has a state of its own."""

    def __init__(self, value):
        super().__init__()
        self.value = value
        self.head = nn.Linear(1, 1)

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


def test_torch_and_safetensors_alone_read_the_file(tmp_path):
    """A file of weights must outlive the library that wrote it."""
    module, other = Tied(), Tied()
    save_weights(module, tmp_path / "w.safetensors")
    stored = safetensors.torch.load_file(tmp_path / "w.safetensors")
    assert set(stored) == set(module.state_dict())
    assert other.load_state_dict(stored).missing_keys == []
    assert_same_bits(flat(module.state_dict()), flat(other.state_dict()))


def test_weights_come_back_bit_by_bit(tmp_path):
    """Through the model, with every dtype, and into the module's own tensors."""
    net = Net().to(torch.bfloat16)
    model, other = ipufit.Model(net), ipufit.Model(Net().to(torch.bfloat16))
    before = [p.data_ptr() for p in other.module.parameters()]
    model.save_weights(str(tmp_path / "w.safetensors"))
    other.load_weights(str(tmp_path / "w.safetensors"))
    assert_same_bits(flat(net.state_dict()), flat(other.module.state_dict()))
    assert [p.data_ptr() for p in other.module.parameters()] == before


@pytest.mark.long("ipu-standin")
def test_weights_are_saved_and_loaded_inside_fit(tmp_path):
    """There parameters are views into the program's memory."""
    path = tmp_path / "w.safetensors"
    kept = {}

    def act(told, last):
        if last == 1:
            told.model.save_weights(path)
            kept.update(flat(told.model.module.state_dict()))
        if last == 3:
            told.model.load_weights(path)

    model = compiled()
    fit(model, batches(4), callbacks=[Told(on_train_batch_end=act)])
    assert_same_bits(flat(model.module.state_dict()), kept)


def test_a_failed_write_keeps_the_file_that_was_there(tmp_path, monkeypatch):
    """A checkpoint is most needed after what interrupts its writing."""
    path = tmp_path / "w.safetensors"
    save_weights(nn.Linear(1, 1), path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigurationError, match=r"can't be written: full\. Free some space"):
        save_weights(nn.Linear(2, 2), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["w.safetensors"]


def test_paths_that_can_not_be_written_are_refused(tmp_path):
    """Before an hour of training, where a callback asks early."""
    net = nn.Linear(1, 1)
    for path in ("w.pt", "w", "w.weights.h5"):
        refused(
            lambda path=path: save_weights(net, path),
            "weights are written as safetensors, so the path must end with '.safetensors', got "
            f"{path!r}. Try 'weights.safetensors'.",
        )
    missing = str(tmp_path / "no" / "w.safetensors")
    refused(
        lambda: save_weights(net, missing),
        f"weights are written to a file in an existing folder, but {os.path.dirname(missing)!r} "
        "is not. Create the folder, or choose another path.",
    )
    folder = tmp_path / "d.safetensors"
    folder.mkdir()
    refused(
        lambda: save_weights(net, folder),
        f"weights are written to a file in an existing folder, but {str(folder)!r} is a folder. "
        "Create the folder, or choose another path.",
    )


def test_a_state_that_is_no_tensor_is_refused_by_name(tmp_path):
    """Left out silently, it would be missing when the file is loaded."""
    path = tmp_path / "w.safetensors"
    refused(
        lambda: save_weights(nn.Sequential(Extra({"a": 1})), path),
        "a file of weights holds dense tensors only, but '0._extra_state' in the module's "
        "state_dict is of type dict. Return a tensor from get_extra_state, or save this part "
        "separately.",
    )
    sparse = nn.Module()
    sparse.register_buffer("grid", torch.eye(2).to_sparse())
    refused(
        lambda: save_weights(sparse, path),
        "a file of weights holds dense tensors only, but 'grid' in the module's state_dict is a "
        "tensor of layout torch.sparse_coo. Return a tensor from get_extra_state, or save this "
        "part separately.",
    )
    assert not path.exists()
    save_weights(Extra(torch.tensor(5.0)), path)
    other = Extra(torch.tensor(0.0))
    load_weights(other, path)
    assert other.value == 5


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path, monkeypatch):
    """The library's own message is a bare key."""

    def fail(*args, **kwargs):
        raise KeyError("torch.quint8")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    refused(
        lambda: save_weights(nn.Linear(1, 1), tmp_path / "w.safetensors"),
        "the installed safetensors can't store these tensors (torch.float32): 'torch.quint8'. "
        "Convert them with module.to(dtype).",
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "Error while serializing: I/O error: No space left on device (os error 28)",
        'Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No sp" })',
    ],
)
def test_a_full_disk_is_no_fault_of_a_dtype(text, tmp_path, monkeypatch):
    """The advice was to convert the module, and training ended by that."""

    def fail(*args, **kwargs):
        raise safetensors.SafetensorError(text)

    path = tmp_path / "w.safetensors"
    save_weights(nn.Linear(1, 1), path)
    before = path.read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    refused(
        lambda: save_weights(nn.Linear(2, 1), path),
        f"weights must be written completely, but {str(path)!r} can't be written: No space left on "
        "device. Free some space or choose another path.",
    )
    assert os.listdir(tmp_path) == ["w.safetensors"]
    assert path.read_bytes() == before


def test_all_differences_are_listed_and_nothing_is_loaded(tmp_path):
    """One at a time, they would take as many attempts."""
    path = str(tmp_path / "w.safetensors")
    stored = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1))
    stored[2].double()
    save_weights(stored, path)
    module = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 1, bias=False), nn.Linear(1, 1))
    module.add_module("new", nn.Linear(1, 1, bias=False))
    before = flat(module.state_dict())
    head = f"the weights in {path!r} must fit the module Sequential, but they differ:\n"
    shapes = (
        "  0.weight: shape (3, 2) in the file, (4, 2) in the module\n"
        "  0.bias: shape (3,) in the file, (4,) in the module\n"
    )
    tail = "Load it into a module like the one that was saved."
    refused(
        lambda: load_weights(module, path),
        f"{head}  new.weight: missing in the file\n  1.bias: only in the file\n{shapes}"
        "  2.weight: torch.float64 in the file, torch.float32 in the module\n"
        f"  2.bias: torch.float64 in the file, torch.float32 in the module\n{tail}",
    )
    refused(lambda: load_weights(module, path, strict=False), f"{head}{shapes}{tail}")
    assert_same_bits(flat(module.state_dict()), before)
    module[0] = nn.Linear(2, 3)
    with pytest.raises(
        ConfigurationError, match=r"Pass strict=False to load only what both have\.$"
    ):
        load_weights(module, path)
    load_weights(module, path, strict=False)
    assert torch.equal(module[1].weight, stored[1].weight)
    assert torch.equal(module[2].bias, stored[2].bias.float())
    assert torch.equal(module.new.weight, before["/new.weight"])
    refused(lambda: load_weights(module, path, strict=1), "strict must be True or False, got 1.")


@pytest.mark.parametrize("strict", [True, False])
def test_a_file_without_a_name_of_the_module_is_refused(tmp_path, strict):
    """As of a module inside of another one: nothing would be loaded, without a word."""
    path = str(tmp_path / "w.safetensors")
    save_weights(nn.Sequential(nn.Linear(2, 1, bias=False)), path)
    refused(
        lambda: load_weights(nn.Linear(2, 1, bias=False), path, strict=strict),
        f"the weights in {path!r} must fit the module Linear, but they differ:\n"
        "  weight: missing in the file\n  0.weight: only in the file\n"
        "Load it into a module like the one that was saved.",
    )


def test_a_wider_dtype_takes_the_values_as_they_are(tmp_path):
    """Nothing is lost by it."""
    path = tmp_path / "w.safetensors"
    stored, module = nn.Linear(2, 2).half(), nn.Linear(2, 2)
    save_weights(stored, path)
    load_weights(module, path)
    assert torch.equal(module.weight, stored.weight.float())


def test_what_is_no_file_of_weights_is_refused(tmp_path):
    """Above all a pickle, which may run code when it is read."""
    path = tmp_path / "w.safetensors"
    torch.save(nn.Linear(1, 1).state_dict(), path)
    for wrong in (path, tmp_path / "absent"):
        with pytest.raises(ConfigurationError) as caught:
            load_weights(nn.Linear(1, 1), wrong)
        assert str(caught.value).startswith(
            f"load_weights reads {str(wrong)!r} as safetensors, but that fails: "
        )
        assert str(caught.value).endswith(
            "For a file of torch.save, use a suffix such as .pt, .pth, .bin."
        )


@pytest.mark.long("ipu-standin")
def test_a_model_is_made_of_a_file(tmp_path):
    """Which says what it is of."""
    path = tmp_path / "w.safetensors"
    model = compiled()
    fit(model, batches(4))
    model.save(path)
    loaded = ipufit.load(path, Net())
    assert_same_bits(flat(loaded.module.state_dict()), flat(model.module.state_dict()))
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"
    assert json.loads(metadata["ipufit"]) == {
        "ipufit": ipufit.__version__,
        "torch": str(torch.__version__),
        "module": "tests.faulty.Net",
        "updates": 4,
    }
    with pytest.raises(ConfigurationError, match="they differ"):
        ipufit.load(path, nn.Linear(1, 1))


SAFE = torch.__version__ >= (2, 6)
needs_safe_torch = pytest.mark.skipif(not SAFE, reason="this torch reads no pickle safely")


@pytest.mark.skipif(SAFE, reason="this torch reads state dicts safely")
def test_an_old_torch_reads_no_pickle(tmp_path):
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "w.pt")
    refused(
        lambda: load_weights(nn.Linear(1, 1), tmp_path / "w.pt"),
        f"a file of torch.save can be read safely from torch 2.6 on, got "
        f"{str(tmp_path / 'w.pt')!r} and torch {torch.__version__}. Convert it with a newer torch: "
        "safetensors.torch.save_file(torch.load(path, weights_only=True), 'w.safetensors').",
    )


@needs_safe_torch
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_state_dict_of_torchs_is_read(suffix, tmp_path):
    stored, module = Tied(), Tied()
    torch.save(stored.state_dict(), tmp_path / f"w{suffix}")
    load_weights(module, tmp_path / f"w{suffix}")
    assert_same_bits(flat(module.state_dict()), flat(stored.state_dict()))


class Runs:
    """What a hostile file would run."""

    def __reduce__(self):
        return os.system, ("touch ran",)


def packed(path):
    """The same content, compressed."""
    with zipfile.ZipFile(path) as source:
        members = [(name, source.read(name)) for name in source.namelist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in members:
            target.writestr(name, content)


@needs_safe_torch
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: torch.save({"weight": Runs()}, path), "UnpicklingError"),
        (lambda path: path.write_bytes(pickle.dumps(Runs())), "BadZipFile"),
        (
            lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
            "BadZipFile",
        ),
        (
            lambda path: (torch.save({"w": torch.zeros(9)}, path), packed(path)),
            "ValueError: it is compressed, which torch.save never does",
        ),
        (lambda path: None, "FileNotFoundError"),
    ],
)
def test_hostile_and_broken_files_of_torch_are_refused(make, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.pt"
    make(path)
    with pytest.raises(ConfigurationError) as caught:
        load_weights(nn.Linear(1, 1), path)
    assert str(caught.value).startswith(
        "load_weights reads files of torch.save(module.state_dict(), path), but can't read "
        f"{str(path)!r}: {said}"
    )
    assert str(caught.value).endswith(". Save the state_dict again, or use safetensors.")
    assert not (tmp_path / "ran").exists()


@needs_safe_torch
@pytest.mark.parametrize(
    ("content", "came"),
    [([torch.zeros(1)], "a list"), ({"state_dict": {}}, "dict under 'state_dict'")],
)
def test_what_else_torch_saves_is_refused(content, came, tmp_path):
    torch.save(content, tmp_path / "w.pt")
    refused(
        lambda: load_weights(nn.Linear(1, 1), tmp_path / "w.pt"),
        f"load_weights reads a dict of tensors by name, but {str(tmp_path / 'w.pt')!r} holds "
        f"{came}. Save only module.state_dict().",
    )


def test_a_snapshot_restores_everything_in_place():
    """Buffers that are not stored, and states of a module's own, belong to that moment too."""
    module = nn.Sequential(Tied(), Extra({"steps": 1}))
    before = flat(module.state_dict())
    place = module[0].first.weight.data_ptr()
    snapshot = WeightsCopy(module)
    module[1].value["steps"] = 5
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)
    for _ in range(2):
        snapshot.restore()
        assert_same_bits(flat(module.state_dict()), before)
        assert torch.equal(module[0].scratch, torch.ones(2))
        assert module[0].first.weight.data_ptr() == place
        module[1].value["steps"] = 6


def test_the_written_file_has_the_usual_rights(tmp_path):
    """A private temporary file would end as a file that nobody else can read."""
    save_weights(nn.Linear(1, 1), tmp_path / "w.safetensors")
    Path(tmp_path / "plain").touch()
    rights = [os.stat(tmp_path / name).st_mode for name in ("w.safetensors", "plain")]
    assert rights[0] == rights[1]
