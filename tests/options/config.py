"""Options of IPUConfig and its methods."""

import sys
import types
from unittest import mock

from ipufit import IPUConfig

from . import FLIPS, With, files, folder, of

__all__ = ["FLIPS"]

SHARED = {"replication_factor": {"pod4": 2, "pod16": 8, "default": 1}}


def made(others=None, **options):
    """All values, and what is said of them."""
    config = IPUConfig(**options, **(others or {}))
    return config.to_dict(), config.notes


of(
    "IPUConfig",
    made,
    replication_factor=(1, 2),
    inference_replication_factor=(1, 2),
    gradient_accumulation_steps=(1, 2),
    layers_per_ipu=((-1,), [1, 2]),
    inference_layers_per_ipu=(None, [1, 2]),
    ipus_per_replica=(None, 2),
    inference_ipus_per_replica=(None, 2),
    optimizer_state_offchip=(False, True),
    replicated_tensor_sharding=(False, True),
    matmul_proportion=(0.2, 0.3),
    inference_matmul_proportion=(None, 0.0),
    enable_half_partials=(True, False),
    embedding_serialization_factor=(None, 2),
    inference_embedding_serialization_factor=(None, 2),
    serialized_embedding_splits_per_ipu=(None, [2]),
    inference_serialized_embedding_splits_per_ipu=(None, [2]),
    projection_serialization_factor=(None, 2),
    inference_projection_serialization_factor=(None, 2),
    serialized_projection_splits_per_ipu=(None, [2]),
    inference_serialized_projection_splits_per_ipu=(None, [2]),
    recompute_checkpoint_every_layer=(False, True),
    device_iterations=(1, 2),
    inference_device_iterations=(1, 2),
    output_mode=("final", "all"),
    seed=(None, 0),
    auto_loss_scaling=(False, True),
    executable_cache_dir=("", "cache"),
    explicit_ir_inference=(False, True),
    parallelize_kwargs=(None, {"x": 1}),
    inference_parallelize_kwargs=(None, {"x": 1}),
    others=({}, {"use_popdist": True}),
)


def from_dict(config_dict=SHARED, pod_type=None, changes=None):
    return IPUConfig.from_dict(config_dict, pod_type, **(changes or {})).to_dict()


def from_text(text='{"seed": {"pod4": 4, "default": 1}}', pod_type=None):
    return IPUConfig.from_json_string(text, pod_type).to_dict()


def from_file(path="a.json", pod_type=None):
    with folder() as place:
        IPUConfig.from_dict(SHARED).to_json_file(place / "a.json")
        IPUConfig(seed=1).to_json_file(place / "b.json")
        return IPUConfig.from_json_file(place / path, pod_type).to_dict()


def from_pretrained(source="someone/some", changes=None, **options):
    """What it holds, and what the Hub was asked."""
    asked = []
    with folder() as place:

        def download(name, file, **how):
            asked.append((name, file, how))
            IPUConfig.from_dict(SHARED).save_pretrained(place)
            return str(place / "ipu_config.json")

        hub = types.SimpleNamespace(hf_hub_download=download)
        with mock.patch.dict(sys.modules, {"huggingface_hub": hub}):
            config = IPUConfig.from_pretrained(source, **options, **(changes or {}))
        return config.to_dict(), asked


of(
    "IPUConfig.from_dict",
    from_dict,
    config_dict=({}, SHARED),
    pod_type=(None, "pod16"),
    changes=({}, {"seed": 1}),
)
of("IPUConfig.from_json_string", from_text, text=("{}", '{"seed": 1}'), pod_type=(None, "pod4"))
of("IPUConfig.from_json_file", from_file, path=("a.json", "b.json"), pod_type=(None, "pod16"))
of(
    "IPUConfig.from_pretrained",
    from_pretrained,
    source=("someone/some", "someone/other"),
    pod_type=(None, "pod16"),
    revision=(None, "v1"),
    cache_dir=(None, "cache"),
    local_files_only=(False, True),
    token=(None, "secret"),
    subfolder=(None, "ipu"),
    changes=({}, {"seed": 1}),
)


def written(path="a.json"):
    with folder() as place:
        IPUConfig().to_json_file(place / path)
        return files(place)


of("IPUConfig.to_json_file", written, path=("a.json", "b.json"))


def pushed(call):
    """What the Hub is asked while something is called, and what that returns."""
    asked = []

    def noted(name):
        return lambda *given, **how: asked.append((name, given, how))

    names = ("create_repo", "create_branch", "upload_file")
    hub = types.SimpleNamespace(**{name: noted(name) for name in names})
    with mock.patch.dict(sys.modules, {"huggingface_hub": hub}):
        return call(), asked


def saved(folder_="a", push_to_hub=False, **options):
    """The files, and what the Hub was asked."""
    options = {"repo_id": "someone/some", **options} if push_to_hub else {}
    with folder() as place:
        found = pushed(
            lambda: IPUConfig().save_pretrained(place / folder_, push_to_hub=push_to_hub, **options)
        )
        return files(place), found


def sent(**options):
    return pushed(lambda: IPUConfig().push_to_hub(**{"repo_id": "someone/some", **options}))


ON_HUB = {
    "repo_id": ("someone/some", "someone/other"),
    "commit_message": (None, "mine"),
    "private": (None, True),
    "token": (None, "secret"),
    "revision": (None, "v1"),
}
of(
    "IPUConfig.save_pretrained",
    lambda **o: saved(o.pop("folder", "a"), **o),
    folder=("a", "b"),
    push_to_hub=(False, True),
    **{name: With(*pair, push_to_hub=True) for name, pair in ON_HUB.items()},
)
of("IPUConfig.push_to_hub", sent, **ON_HUB)


def updated(changes):
    config = IPUConfig()
    config.update(changes)
    return config.to_dict()


def updated_from(update_str):
    config = IPUConfig()
    config.update_from_string(update_str)
    return config.to_dict()


BOTH = {
    "layers_per_ipu": [1, 2],
    "inference_layers_per_ipu": [3],
    "inference_device_iterations": 3,
    "replication_factor": {"pod16": 8, "default": 1},
}


def options_of(**options):
    return repr(IPUConfig.from_dict(BOTH).to_options(**options))


of("IPUConfig.update", updated, changes=({}, {"seed": 0}))
of("IPUConfig.update_from_string", updated_from, update_str=("", "seed=0"))
of("IPUConfig.value", IPUConfig(seed=3).value, name=("seed", "device_iterations"))
of(
    "IPUConfig.for_pod_type",
    lambda **o: IPUConfig.from_dict(SHARED).for_pod_type(**o).to_dict(),
    pod_type=(None, "pod16"),
)
of(
    "IPUConfig.batch_size_factor",
    IPUConfig.from_dict(BOTH).batch_size_factor,
    for_inference=(False, True),
    pod_type=(None, "pod16"),
)
of(
    "IPUConfig.partition",
    IPUConfig(**{**BOTH, "replication_factor": 1}).partition,
    for_inference=(False, True),
)
of(
    "IPUConfig.to_options",
    options_of,
    for_inference=(False, True),
    compile_only=(False, True),
    pod_type=(None, "pod16"),
)
of("IPUConfig.report", IPUConfig().report, engine=("embedded", "ipu"))
