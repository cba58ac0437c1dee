"""Files of configurations: those of every release, per-pod values, bad files, the Hub."""

import json
import os
import sys
import types

import pytest

from ipufit import IPUConfig
from ipufit.engines.ipu.ipu_config import serialization
from tests.told import message as fault

# Shapes of what was published from 2021 to 2023, with values of our own.
OF_2021 = {
    "device_iterations": 1,
    "embedding_serialization_factor": 2,
    "enable_half_partials": True,
    "executable_cache_dir": None,
    "gradient_accumulation_steps": 16,
    "ipus_per_replica": 4,
    "layers_per_ipu": [1, 2, 2, 1],
    "matmul_proportion": [0.3, 0.3, 0.2, 0.1],
    "optimizer_state_offchip": True,
    "optimum_version": "0.1.2",
    "profile_dir": None,
    "random_seed": 7,
    "recompute_checkpoint_every_layer": True,
    "replicated_tensor_sharding": False,
    "replication_factor": 1,
    "synthetic_data": False,
    "transformers_version": "4.12.3",
    "use_popdist": False,
}
OF_2022 = {
    "auto_loss_scaling": False,
    "decompose_grad_sum": True,
    "device_iterations": 1,
    "embedding_serialization_factor": 1,
    "enable_half_first_order_momentum": True,
    "enable_half_partials": True,
    "executable_cache_dir": "./exe_cache",
    "execute_encoder_on_cpu_for_generation": False,
    "gradient_accumulation_steps": {"pod4": 64, "pod16": 16, "default": 64},
    "inference_device_iterations": 5,
    "inference_replication_factor": {"pod4": 2, "pod16": 8, "default": 2},
    "ipus_per_replica": 2,
    "layers_per_ipu": [5, 7],
    "matmul_proportion": [0.4],
    "optimizer_state_offchip": True,
    "optimum_version": "1.3.0",
    "output_mode": "final",
    "profile_dir": "profile",
    "recompute_checkpoint_every_layer": True,
    "replicated_tensor_sharding": True,
    "replication_factor": {"pod4": 2, "pod16": 8, "default": 2},
    "seed": 42,
    "sharded_execution_for_inference": False,
    "transformers_version": "4.18.0",
}
OF_2023 = {
    "executable_cache_dir": "",
    "inference_ipus_per_replica": 1,
    "inference_layers_per_ipu": [-1],
    "inference_matmul_proportion": 0.2,
    "optimum_version": "1.8.6",
    "output_mode": "final",
    "seed": None,
    "training_ipus_per_replica": 2,
    "training_layers_per_ipu": [-1, 4],
    "training_matmul_proportion": [0.1, 0.15],
    "transformers_version": "4.29.2",
}


def write(folder, content, name="ipu_config.json"):
    """A file with this content."""
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# What earlier releases wrote


def test_a_file_of_2021_is_read():
    """The seed had another name, null was no folder, and switches that are off say nothing."""
    config = IPUConfig.from_dict(OF_2021)
    assert (config.seed, config.executable_cache_dir) == (7, "")
    assert config.layers_per_ipu == config.inference_layers_per_ipu == [1, 2, 2, 1]
    assert config.inference_matmul_proportion == [0.3, 0.3, 0.2, 0.1]
    assert config.notes == ("random_seed=7 is read as seed, its new name.",)


def test_a_file_of_2022_is_read_with_what_was_left_aside():
    """A setting that once did something is not dropped without a word."""
    config = IPUConfig.from_dict(OF_2022)
    assert config.matmul_proportion == 0.4
    assert config.notes == (
        "decompose_grad_sum=True was removed and is ignored: use "
        "options._Popart.set('decomposeGradSum', True) of to_options().",
        "enable_half_first_order_momentum=True was removed and is ignored: set the optimizer's own "
        "dtype of that state instead.",
        "profile_dir='profile' was removed and is ignored: use enableProfiling(...) of "
        "to_options(), or the variable POPLAR_ENGINE_OPTIONS.",
    )
    assert all(f"note: {note[:40]}" in config.report() for note in config.notes)


def test_a_file_of_2023_is_read():
    """For a month, values for training had a prefix of their own."""
    config = IPUConfig.from_dict(OF_2023)
    assert (config.ipus_per_replica, config.inference_ipus_per_replica) == (2, 1)
    assert (config.layers_per_ipu, config.inference_layers_per_ipu) == ([-1, 4], [-1])
    assert (config.matmul_proportion, config.inference_matmul_proportion) == ([0.1, 0.15], 0.2)
    assert (
        config.notes[0]
        == "training_layers_per_ipu=[-1, 4] is read as layers_per_ipu, its new name."
    )
    both = IPUConfig.from_dict({"layers_per_ipu": [3], "training_layers_per_ipu": [1, 2]})
    assert (both.layers_per_ipu, both.inference_layers_per_ipu) == ([1, 2], [3])


@pytest.mark.parametrize("old", ["training_replication_factor", "random_seed"])
def test_older_names_work_as_arguments_too(old):
    """Scripts have them as well."""
    new = "seed" if old == "random_seed" else "replication_factor"
    assert getattr(IPUConfig(**{old: 3}), new) == 3


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("use_popdist", True, "an external launcher starts the processes"),
        ("compile_only", True, "it is an argument of to_options()"),
        ("synthetic_data", True, "use enableSyntheticData(True) of to_options()"),
    ],
)
def test_what_was_withdrawn_is_told_only_where_it_did_something(name, value, hint):
    """Most files have these, switched off."""
    note = f"{name}={value} was removed and is ignored: {hint}."
    assert IPUConfig.from_dict({name: value}).notes == (note,)
    assert IPUConfig.from_dict({name: False, "sharded_execution_for_inference": True}).notes == ()


# Values by type of pod


def test_values_by_pod_are_those_of_the_pod():
    """Without a pod, those named default; the others are kept."""
    config = IPUConfig.from_dict(OF_2022)
    assert (config.replication_factor, config.gradient_accumulation_steps) == (2, 64)
    assert config.batch_size_factor() == 128
    assert config.batch_size_factor(pod_type="pod16") == 128
    assert config.batch_size_factor(for_inference=True, pod_type="pod16") == 40
    large = config.for_pod_type("pod16")
    assert (large.replication_factor, large.inference_replication_factor) == (8, 8)
    assert large == IPUConfig.from_dict(OF_2022, pod_type="pod16")
    assert large.for_pod_type("pod4").replication_factor == 8
    assert config.to_options(pod_type="pod16").replication_factor == 8
    assert config.to_options(for_inference=True, pod_type="pod4").replication_factor == 2
    assert large.notes == config.notes


def test_what_follows_from_a_value_by_pod_follows_for_each_pod():
    """A twin is not left at what it was for another pod; what was given stays."""
    values = {
        "layers_per_ipu": {"default": [4], "pod16": [2, 2]},
        "matmul_proportion": {"default": 0.1, "pod16": 0.3},
    }
    config = IPUConfig.from_dict(values)
    config.seed = 1
    large = config.for_pod_type("pod16")
    assert large == IPUConfig.from_dict(values, "pod16", seed=1)
    assert (large.inference_layers_per_ipu, large.inference_ipus_per_replica) == ([2, 2], 2)
    assert large.inference_matmul_proportion == 0.3
    assert config.to_dict() == {**values, "seed": 1}
    assert IPUConfig.from_dict(config.to_dict()).for_pod_type("pod16") == large


def test_values_by_pod_are_saved():
    """Or the file would be for one pod alone after it was read once."""
    config = IPUConfig.from_dict(OF_2022)
    saved = config.to_dict()
    assert saved["replication_factor"] == {"pod4": 2, "pod16": 8, "default": 2}
    assert IPUConfig.from_dict(saved).for_pod_type("pod16").replication_factor == 8
    assert config.for_pod_type().to_dict()["replication_factor"] == 2
    assert config != config.for_pod_type()
    config.replication_factor = 4
    assert config.to_dict()["replication_factor"] == 4
    assert config.for_pod_type("pod16").replication_factor == 4


def test_a_pod_without_a_value_is_refused():
    """As there: the default is for no pod, not for every other one."""
    values = {"replication_factor": {"pod4": 1, "default": 2}}
    assert fault(IPUConfig.from_dict, values, pod_type="pod16") == (
        "IPUConfig.replication_factor must have a value for pod_type='pod16', got values for "
        "'pod4', 'default'. Choose one of these, or add the value."
    )
    assert fault(IPUConfig.from_dict, {"replication_factor": {"pod4": 1}}) == (
        "IPUConfig.replication_factor must have a value named 'default' if pod_type is not set, "
        "got values for 'pod4'. Pass one of these as pod_type."
    )
    assert fault(IPUConfig.from_dict(values).for_pod_type, "pod5") == (
        "pod_type must be one of 'pod4', 'pod8', 'pod16', 'pod32', 'pod64', 'pod128', 'pod256', or "
        "None for the values named 'default', got 'pod5'."
    )
    assert IPUConfig.from_dict({"seed": {"pod4": 1}}, pod_type="pod4").seed == 1


def test_every_value_by_pod_is_checked():
    """Also those of pods that are not chosen."""
    values = {"replication_factor": {"default": 1, "pod64": 0}}
    assert fault(IPUConfig.from_dict, values) == (
        "IPUConfig.replication_factor['pod64'] must be an integer of at least 1, got 0. Try 1."
    )
    said = (
        "IPUConfig.replication_factor may have values by type of pod, which is one of 'pod4', "
        "'pod8', 'pod16', 'pod32', 'pod64', 'pod128', 'pod256', 'default', got {!r}. {}"
    )
    for name, cure in (("pod5", "Choose one of these."), ("Default", "Did you mean 'default'?")):
        values = {"replication_factor": {"pod4": 1, name: 1}}
        assert fault(IPUConfig.from_dict, values) == said.format(name, cure)
    assert IPUConfig(parallelize_kwargs={"default": 1}).parallelize_kwargs == {"default": 1}


# Reading and writing


@pytest.mark.parametrize("published", [OF_2021, OF_2022, OF_2023])
def test_a_saved_configuration_is_the_same(tmp_path, published):
    """Into a folder that is made, and back from the folder, the file, and its text."""
    config = IPUConfig.from_dict(published)
    folder = tmp_path / "a" / "b"
    config.save_pretrained(folder)
    file = folder / "ipu_config.json"
    assert os.listdir(folder) == ["ipu_config.json"]
    assert IPUConfig.from_pretrained(folder) == config
    assert IPUConfig.from_pretrained(str(folder)) == config
    assert IPUConfig.from_pretrained(file) == config
    assert IPUConfig.from_json_file(file) == config
    assert IPUConfig.from_json_string(file.read_text()) == config
    assert json.loads(file.read_text()) == config.to_dict()
    if published is not OF_2022:
        config.to_json_file(tmp_path / "other.json")
        assert IPUConfig.from_json_file(tmp_path / "other.json") == config


def test_a_pod_is_chosen_while_reading(tmp_path):
    """The third way beside from_dict and for_pod_type."""
    path = write(tmp_path, OF_2022)
    for read in (IPUConfig.from_pretrained, IPUConfig.from_json_file):
        assert read(path, pod_type="pod16").replication_factor == 8
    text = path.read_text()
    assert IPUConfig.from_json_string(text, pod_type="pod16").replication_factor == 8


def test_changes_are_made_after_reading(tmp_path):
    """What the file says of IPUs stays, as in optimum-graphcore."""
    path = write(tmp_path, OF_2021)
    config = IPUConfig.from_pretrained(path, inference_layers_per_ipu=[-1], seed=0)
    assert config.inference_layers_per_ipu == [-1]
    assert (config.inference_ipus_per_replica, config.seed) == (4, 0)
    assert IPUConfig.from_dict(OF_2021, inference_layers_per_ipu=[-1], seed=0) == config
    text = fault(IPUConfig.from_pretrained, path, layers_per_ipu=[2, 2], sed=1)
    assert text == "IPUConfig has no parameter 'sed'. Did you mean 'seed'?"
    assert "ipus_per_replica has 4" in fault(IPUConfig.from_pretrained, path, layers_per_ipu=[2, 2])


def test_all_faults_of_a_file_are_told_with_its_name(tmp_path):
    """Which of ten files it was is half of the message."""
    path = write(tmp_path, {"replication_facto": 1, "seed": "x", "output_mode": "none"})
    assert fault(IPUConfig.from_pretrained, tmp_path).splitlines() == [
        f"{str(path)!r} can't be read as an IPUConfig:",
        "IPUConfig has no parameter 'replication_facto'. Did you mean 'replication_factor'?",
        "IPUConfig.seed must be an integer of at least 0 and less than 2**64, or None, got 'x'. "
        "Try 0.",
        "IPUConfig.output_mode must be one of 'all', 'sum', 'final', 'default', got 'none'. Try "
        "'final'.",
    ]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("[1]", "holds a list. Check that it is an ipu_config.json."),
        ('{"seed": 1,}', "is not (JSONDecodeError: "),
        ('{"seed": NaN}', "is not (ValueError: NaN is not a number in JSON)"),
        ("[" * 100_000, "is not (RecursionError: "),
        ('{"seed": 1, "seed": 2}', "has 'seed' several times. Keep one of each."),
        ('{"parallelize_kwargs": {"a": 1, "a": 2}}', "has 'a' several times."),
        (" " * (1 << 20) + "{}", "has more. Check that it is an ipu_config.json."),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, text):
    """Bounded, and nothing in it is run."""
    assert text in fault(IPUConfig.from_pretrained, write(tmp_path, content))
    assert text in fault(IPUConfig.from_json_string, content)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    """A file of weights, say."""
    (tmp_path / "ipu_config.json").write_bytes(b"\x80\x02}")
    assert "is not (UnicodeDecodeError" in fault(IPUConfig.from_pretrained, tmp_path)


def test_what_is_not_there_is_told(tmp_path, monkeypatch):
    """A path is never taken for a name on the Hub."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert fault(IPUConfig.from_pretrained, tmp_path) == (
        f"a folder of a configuration must hold a file ipu_config.json, but {str(tmp_path)!r} has "
        "none. Check the path, or pass the file itself."
    )
    for missing in (tmp_path / "x", "./x", "x.json", "a/b/c", "/x", ""):
        assert fault(IPUConfig.from_pretrained, missing) == (
            "a configuration must be a file, a folder with a file ipu_config.json, or the name of "
            f"a repository on the Hugging Face Hub, but nothing exists at {str(missing)!r}. Check "
            "the path."
        )
    assert "got b'x'. Decode it first." in fault(IPUConfig.from_pretrained, b"x")
    assert "is read from a file, but" in fault(IPUConfig.from_json_file, tmp_path / "x")
    assert "from_dict needs values by name, got 'x'" in fault(IPUConfig.from_dict, "x")


def test_the_hub_needs_its_library(monkeypatch):
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert fault(IPUConfig.from_pretrained, "someone/some-ipu") == (
        "there is no file or folder 'someone/some-ipu' here, and to look for it on the Hugging "
        "Face Hub huggingface_hub is needed, which is not installed. Install it with pip install "
        "ipufit[hub], or pass a path."
    )


def test_a_file_on_the_hub_is_read(tmp_path, monkeypatch):
    """Through huggingface_hub, which is told what the caller said."""
    asked = []

    def download(name, file, **options):
        asked.append((name, file, options))
        return str(write(tmp_path, OF_2022))

    hub = types.SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    config = IPUConfig.from_pretrained(
        "someone/some-ipu",
        "pod16",
        revision="v1",
        cache_dir="cache",
        local_files_only=True,
        seed=1,
    )
    assert (config.replication_factor, config.seed) == (8, 1)
    options = {"revision": "v1", "cache_dir": "cache", "local_files_only": True}
    assert asked == [("someone/some-ipu", "ipu_config.json", options)]


def test_a_fault_of_the_hub_is_told(monkeypatch):
    """No network, no such repository, no right to see it."""

    def download(*_, **__):
        raise OSError("404 Client Error.\nmore lines")

    hub = types.SimpleNamespace(hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert fault(IPUConfig.from_pretrained, "some-ipu") == (
        "the Hugging Face Hub must have a file ipu_config.json in 'some-ipu', but it could not be "
        "downloaded: OSError: 404 Client Error. Check the name, or pass a path."
    )


def test_what_cannot_be_written_is_told(tmp_path, monkeypatch):
    """And an older file stays whole."""
    file = write(tmp_path, OF_2021)
    before = file.read_text()
    assert "save_pretrained needs a folder, but" in fault(IPUConfig().save_pretrained, file)
    config = IPUConfig()
    config.layers_per_ipu = [1, 2]
    assert "ipus_per_replica has 1" in fault(config.save_pretrained, tmp_path)
    assert "in an existing folder, but" in fault(IPUConfig().to_json_file, tmp_path / "x" / "y")

    def failing(*_):
        raise OSError("disk full")

    monkeypatch.setattr(serialization.os, "replace", failing)
    assert "but disk full. Choose another path." in fault(IPUConfig().save_pretrained, tmp_path)
    assert os.listdir(tmp_path) == ["ipu_config.json"]
    assert file.read_text() == before


def test_a_file_is_readable_for_whom_the_user_lets(tmp_path):
    """A temporary file is for its owner alone; the configuration is not."""
    IPUConfig().save_pretrained(tmp_path)
    plain = write(tmp_path, "", "plain")
    written = tmp_path / "ipu_config.json"
    assert written.stat().st_mode == plain.stat().st_mode


# The first release, and what a value once was


def test_pods_and_layers_of_the_first_release_are_read():
    """Two more types of pod; and one number where there are lists since."""
    config = IPUConfig.from_dict(
        {"replication_factor": {"pod128": 8, "pod256": 16, "default": 1}, "layers_per_ipu": 1}
    )
    assert config.for_pod_type("pod256").replication_factor == 16
    assert config.for_pod_type("pod128").replication_factor == 8
    assert (config.layers_per_ipu, config.ipus_per_replica) == ([1], 1)
    assert config.notes == ("layers_per_ipu=1 is read as [1]: newer releases use a list.",)
    config = IPUConfig.from_dict({"layers_per_ipu": 3, "ipus_per_replica": 2})
    assert config.layers_per_ipu == [3, 3]
    by_pod = IPUConfig.from_dict({"layers_per_ipu": {"pod4": 2, "default": [1, 1]}})
    assert by_pod.for_pod_type("pod4").layers_per_ipu == [2]


def test_an_old_seed_beside_a_new_one_is_noted():
    config = IPUConfig.from_dict({"random_seed": 3, "seed": 5})
    assert config.seed == 5
    assert config.notes == ("random_seed=3 is ignored because of seed=5.",)
    assert IPUConfig.from_dict({"random_seed": 5, "seed": 5}).notes == ()


def test_a_value_that_was_changed_in_place_is_not_saved(tmp_path):
    """A file that from_pretrained would refuse is not written."""
    config = IPUConfig()
    config.layers_per_ipu[0] = "x"
    for use in (config.check, lambda: config.save_pretrained(tmp_path)):
        assert fault(use) == (
            "IPUConfig.layers_per_ipu must be a list with the number of layers on each IPU, -1 for "
            "an even share of the rest, got ['x']. Try [2, -1]."
        )
    assert os.listdir(tmp_path) == []


def test_faults_of_values_and_of_changes_come_together(tmp_path):
    seed = (
        "IPUConfig.seed must be an integer of at least 0 and less than 2**64, or None, got {!r}. "
        "Try 0."
    )
    name = "IPUConfig has no parameter 'sed'. Did you mean 'seed'?"
    assert fault(IPUConfig.from_dict, {"seed": "x"}, sed=3).splitlines() == [seed.format("x"), name]
    file = write(tmp_path, {"seed": -1})
    lines = fault(IPUConfig.from_pretrained, file, sed=3, seed="y").splitlines()
    assert lines[1:] == [seed.format(-1), name, seed.format("y")]


# The Hub


class Hub:
    """What ipufit uses of huggingface_hub, written down."""

    def __init__(self, file=None):
        self.calls = []
        self.file = file

    def hf_hub_download(self, name, file, **options):
        self.calls.append(("download", name, file, options))
        return str(self.file)

    def create_repo(self, repo_id, **options):
        self.calls.append(("create", repo_id, options))
        return types.SimpleNamespace(repo_id=f"me/{repo_id}")

    def create_branch(self, repo_id, **options):
        self.calls.append(("branch", repo_id, options))

    def upload_file(self, **options):
        self.calls.append(("upload", options))
        return types.SimpleNamespace(commit_url="https://hub/commit/1")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    made = Hub(write(tmp_path, {"seed": 2}, "downloaded.json"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", made)
    return made


def test_a_token_and_a_subfolder_go_to_the_hub(hub, tmp_path):
    config = IPUConfig.from_pretrained("me/some-ipu", token="t", subfolder="a")
    assert config.seed == 2
    options = {
        "subfolder": "a",
        "revision": None,
        "cache_dir": None,
        "local_files_only": False,
        "token": "t",
    }
    assert hub.calls == [("download", "me/some-ipu", "ipu_config.json", options)]
    (tmp_path / "a").mkdir()
    IPUConfig(seed=4).save_pretrained(tmp_path / "a")
    assert IPUConfig.from_pretrained(tmp_path, subfolder="a").seed == 4


def test_a_misspelt_change_is_told_before_anything_is_downloaded(hub):
    assert fault(IPUConfig.from_pretrained, "me/some-ipu", sed=1) == (
        "IPUConfig has no parameter 'sed'. Did you mean 'seed'?"
    )
    assert hub.calls == []


def test_a_configuration_is_written_to_the_hub(hub):
    config = IPUConfig(seed=3)
    url = config.push_to_hub(
        "some-ipu", commit_message="Seed", private=True, token="t", revision="next"
    )
    assert url == "https://hub/commit/1"
    created, branch, uploaded = hub.calls
    assert created == ("create", "some-ipu", {"token": "t", "exist_ok": True, "private": True})
    assert branch == ("branch", "me/some-ipu", {"branch": "next", "token": "t", "exist_ok": True})
    assert IPUConfig.from_json_string(uploaded[1].pop("path_or_fileobj").decode()) == config
    assert uploaded[1] == {
        "path_in_repo": "ipu_config.json",
        "repo_id": "me/some-ipu",
        "token": "t",
        "revision": "next",
        "commit_message": "Seed",
    }


def test_what_is_not_said_is_left_to_the_hub(hub):
    IPUConfig().push_to_hub("some-ipu")
    assert hub.calls[0] == ("create", "some-ipu", {"token": None, "exist_ok": True})
    assert [call[0] for call in hub.calls] == ["create", "upload"]
    assert hub.calls[1][1]["commit_message"] == "Upload ipu_config.json"


def test_a_folder_may_be_written_to_the_hub_too(hub, tmp_path):
    """Under its own name, or another."""
    config = IPUConfig(seed=3)
    assert config.save_pretrained(tmp_path / "some-ipu") is None
    assert hub.calls == []
    url = config.save_pretrained(tmp_path / "some-ipu", push_to_hub=True, private=False)
    assert url == "https://hub/commit/1"
    config.save_pretrained(
        tmp_path / "x",
        True,
        "other",
        commit_message="m",
        token=True,
        revision="refs/pr/1",
    )
    created = [call for call in hub.calls if call[0] == "create"]
    assert [call[1] for call in created] == ["some-ipu", "other"]
    assert created[0][2]["private"] is False
    assert hub.calls[-1][1]["commit_message"] == "m"
    assert hub.calls[-1][1]["token"] is True
    assert hub.calls[-1][1]["revision"] == "refs/pr/1"
    assert IPUConfig.from_pretrained(tmp_path / "x") == config
    assert fault(config.save_pretrained, tmp_path / "y", repo_id="a", private=True) == (
        "repo_id, private of save_pretrained are for the Hugging Face Hub, but push_to_hub is "
        "False. Pass push_to_hub=True, or leave it out."
    )
    assert not (tmp_path / "y").exists()


def test_what_the_hub_refuses_is_told(hub, monkeypatch):
    """After the values: nothing that can't be read is written there."""

    def refused(**_):
        raise OSError("403 Forbidden.\nmore lines")

    monkeypatch.setattr(hub, "upload_file", refused)
    assert fault(IPUConfig().push_to_hub, "some-ipu") == (
        "a configuration is written to 'some-ipu' on the Hugging Face Hub, but that failed: "
        "OSError: 403 Forbidden. Check the name and the token; huggingface_hub.login() keeps one."
    )
    hub.calls.clear()
    config = IPUConfig()
    config.layers_per_ipu = [1, 2]
    assert "ipus_per_replica has 1" in fault(config.push_to_hub, "some-ipu")
    assert fault(IPUConfig().push_to_hub, "") == (
        "repo_id must be the name of a repository on the Hugging Face Hub, got ''. Write for "
        "example 'someone/some-ipu'."
    )
    assert hub.calls == []
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert fault(IPUConfig().push_to_hub, "some-ipu") == (
        "push_to_hub needs huggingface_hub, which is not installed. Install it with pip install "
        "ipufit[hub], or write a folder with save_pretrained."
    )
