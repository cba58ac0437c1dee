"""IPUConfig: parameters and defaults of optimum-graphcore, every fault at once, modes and pods."""

import copy
import inspect
import json
import pickle

import numpy as np
import pytest
import torch

from ipufit import IPUConfig
from ipufit.engines.ipu.ipu_config import IpuLayout
from ipufit.engines.ipu.ipu_config.parameters import PARAMETERS
from ipufit.errors import ConfigurationError
from tests.told import message

# What IPUConfig() of optimum-graphcore 0.7 holds, once twins have followed.
DEFAULTS = {
    "auto_loss_scaling": False,
    "device_iterations": 1,
    "embedding_serialization_factor": 1,
    "enable_half_partials": True,
    "executable_cache_dir": "",
    "explicit_ir_inference": False,
    "gradient_accumulation_steps": 1,
    "inference_device_iterations": 1,
    "inference_embedding_serialization_factor": 1,
    "inference_ipus_per_replica": 1,
    "inference_layers_per_ipu": [-1],
    "inference_matmul_proportion": 0.2,
    "inference_parallelize_kwargs": {},
    "inference_projection_serialization_factor": 1,
    "inference_replication_factor": 1,
    "inference_serialized_embedding_splits_per_ipu": None,
    "inference_serialized_projection_splits_per_ipu": None,
    "ipus_per_replica": 1,
    "layers_per_ipu": [-1],
    "matmul_proportion": 0.2,
    "optimizer_state_offchip": False,
    "output_mode": "final",
    "parallelize_kwargs": {},
    "projection_serialization_factor": 1,
    "recompute_checkpoint_every_layer": False,
    "replicated_tensor_sharding": False,
    "replication_factor": 1,
    "seed": None,
    "serialized_embedding_splits_per_ipu": None,
    "serialized_projection_splits_per_ipu": None,
}
# Another value of each, which fits beside the defaults.
OTHERS = {
    "auto_loss_scaling": True,
    "device_iterations": 4,
    "embedding_serialization_factor": 2,
    "enable_half_partials": False,
    "executable_cache_dir": "cache",
    "explicit_ir_inference": True,
    "gradient_accumulation_steps": 8,
    "inference_device_iterations": 5,
    "inference_embedding_serialization_factor": 2,
    "inference_ipus_per_replica": 2,
    "inference_layers_per_ipu": [12],
    "inference_matmul_proportion": [0.3],
    "inference_parallelize_kwargs": {"for_generation": True},
    "inference_projection_serialization_factor": 2,
    "inference_replication_factor": 4,
    "inference_serialized_embedding_splits_per_ipu": [3],
    "inference_serialized_projection_splits_per_ipu": [3],
    "ipus_per_replica": 4,
    "layers_per_ipu": [6],
    "matmul_proportion": 0.4,
    "optimizer_state_offchip": True,
    "output_mode": "all",
    "parallelize_kwargs": {"for_generation": True},
    "projection_serialization_factor": 2,
    "recompute_checkpoint_every_layer": True,
    "replicated_tensor_sharding": True,
    "replication_factor": 2,
    "seed": 0,
    "serialized_embedding_splits_per_ipu": [2],
    "serialized_projection_splits_per_ipu": [2],
}
BY_MODE = [
    "layers_per_ipu",
    "ipus_per_replica",
    "matmul_proportion",
    "embedding_serialization_factor",
    "serialized_embedding_splits_per_ipu",
    "projection_serialization_factor",
    "serialized_projection_splits_per_ipu",
    "parallelize_kwargs",
]


def fault(**given):
    """The text of the error that these values raise."""
    return message(IPUConfig, **given)


def test_parameters_and_defaults_are_those_of_optimum():
    """A script that names every parameter runs, and one that names none means the same."""
    assert {name: getattr(IPUConfig(), name) for name in PARAMETERS} == DEFAULTS
    signature = inspect.signature(IPUConfig).parameters
    assert list(signature) == [*PARAMETERS, "others"]
    for name, parameter in PARAMETERS.items():
        assert signature[name].default == parameter.default


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_parameter_keeps_its_value(name):
    """Through the constructor, a dict, JSON, an assignment, an update and a copy."""
    value = OTHERS[name]
    made = IPUConfig(**{name: value})
    assert getattr(made, name) == (value if value != [0.3] else 0.3)
    value = getattr(made, name)
    assert IPUConfig.from_dict({name: value}) == made
    assert IPUConfig.from_dict(made.to_dict()) == made
    assert IPUConfig.from_json_string(made.to_json_string()) == made
    assert copy.deepcopy(made) == copy.copy(made) == pickle.loads(pickle.dumps(made)) == made
    assert made != IPUConfig()
    assigned = IPUConfig()
    setattr(assigned, name, value)
    assert getattr(assigned, name) == value
    assert repr(name)[1:-1] in repr(made)


def test_twins_follow_the_training_values():
    """Those that follow, and those that have a default of their own."""
    config = IPUConfig(
        layers_per_ipu=[1, 2, 3, 4],
        matmul_proportion=[0.1, 0.2, 0.3, 0.4],
        replication_factor=2,
        device_iterations=3,
        embedding_serialization_factor=2,
    )
    assert config.ipus_per_replica == config.inference_ipus_per_replica == 4
    assert config.inference_layers_per_ipu == [1, 2, 3, 4]
    assert config.inference_matmul_proportion == [0.1, 0.2, 0.3, 0.4]
    assert config.inference_replication_factor == 1
    assert config.inference_device_iterations == 1
    assert config.inference_embedding_serialization_factor == 1


@pytest.mark.parametrize(
    ("given", "ipus", "memory"),
    [
        ({"ipus_per_replica": 10}, 10, 0.2),
        ({"ipus_per_replica": 10, "inference_layers_per_ipu": [1, 2, 3]}, 3, 0.2),
        (
            {
                "layers_per_ipu": [1, 2],
                "matmul_proportion": [0.1, 0.3],
                "inference_layers_per_ipu": [3],
            },
            1,
            0.2,
        ),
        ({"matmul_proportion": 0.5, "inference_layers_per_ipu": [3, 3]}, 2, 0.5),
        ({"layers_per_ipu": [2, 2], "inference_ipus_per_replica": 2}, 2, 0.2),
    ],
)
def test_inference_counts_its_ipus_as_optimum_does(given, ipus, memory):
    """By its layers, or as training where they are one wildcard."""
    config = IPUConfig(**given)
    assert config.inference_ipus_per_replica == ipus
    assert config.inference_matmul_proportion == memory


def test_zero_is_a_value():
    """Zero is no None: optimum-graphcore ignores seed=0, and a share of 0.0 for inference."""
    config = IPUConfig(seed=0, inference_matmul_proportion=0)
    assert (config.seed, config.inference_matmul_proportion) == (0, 0.0)


def test_lists_are_the_configurations_own():
    """What a caller does with a list later is none of its business, nor are twins one list."""
    layers = [1, 2]
    config = IPUConfig(layers_per_ipu=layers)
    layers.append(3)
    config.layers_per_ipu[0] = 7
    assert config.inference_layers_per_ipu == [1, 2]
    assert IPUConfig().layers_per_ipu is not IPUConfig().layers_per_ipu
    config.to_dict()["layers_per_ipu"].append(1)
    assert config.layers_per_ipu == [7, 2]


COUNT = "must be an integer of at least 1, got"
LAYERS = (
    "IPUConfig.layers_per_ipu must be a list with the number of layers on each IPU, -1 for an even "
    "share of the rest, got {!r}. Try [2, -1]."
)
SPLITS = (
    "IPUConfig.serialized_embedding_splits_per_ipu must be a list with the number of splits on "
    "each IPU{}, or None, got {!r}. Try {}."
)
MEMORY = (
    "IPUConfig.matmul_proportion must be a number from 0 to 1, or a list with one for each IPU, "
    "got {!r}. Try 0.2."
)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        *(
            ({"replication_factor": v}, f"IPUConfig.replication_factor {COUNT} {v!r}. Try 1.")
            for v in (0, -1, 1.0, "2", True, None, [1])
        ),
        *(
            ({"layers_per_ipu": v}, LAYERS.format(v))
            for v in ([], [-2], [1.5], 0, True, "3", [True])
        ),
        *(
            ({"serialized_embedding_splits_per_ipu": v}, SPLITS.format(rule, v, example))
            for v, rule, example in (
                ([0, 0], ", at least one in all", None),
                ([0, 1, 0, 2], ", with no 0 between two others", [0, 1, 2, 0]),
                ([-1, 2], "", [0, 2, 2, 0]),
                ([], "", [0, 2, 2, 0]),
                (2, "", [0, 2, 2, 0]),
            )
        ),
        *(
            ({"matmul_proportion": v}, MEMORY.format(v))
            for v in (-0.1, 1.1, [0.1, 2], [], True, float("nan"), None)
        ),
        (
            {"auto_loss_scaling": 1},
            "IPUConfig.auto_loss_scaling must be True or False, got 1. Try True.",
        ),
        (
            {"output_mode": "every_n"},
            "IPUConfig.output_mode must be one of 'all', 'sum', 'final', 'default', got 'every_n'. "
            "Try 'final'.",
        ),
        *(
            (
                {"seed": v},
                "IPUConfig.seed must be an integer of at least 0 and less than 2**64, or None, got "
                f"{v!r}. Try 0.",
            )
            for v in (-1, 1.5, True, 2**64)
        ),
        (
            {"executable_cache_dir": 3},
            "IPUConfig.executable_cache_dir must be the path of a folder as a string, '' for none, "
            "got 3. Try ''.",
        ),
        (
            {"parallelize_kwargs": [1]},
            "IPUConfig.parallelize_kwargs must be a dict by names of arguments, or None, got [1]. "
            "Try {}.",
        ),
        (
            {"layers_per_ip": [1]},
            "IPUConfig has no parameter 'layers_per_ip'. Did you mean 'layers_per_ipu'?",
        ),
        ({"zzz": 1}, "IPUConfig has no parameter 'zzz'. Leave it out."),
        (
            {"layers_per_ipu": [1, 2], "ipus_per_replica": 4, "inference_layers_per_ipu": [3]},
            "IPUConfig.layers_per_ipu must have one entry for each of the IPUs of a replica, of "
            "which IPUConfig.ipus_per_replica has 4, got [1, 2]. Change one of them.",
        ),
        (
            {"inference_matmul_proportion": [0.1, 0.2]},
            "IPUConfig.inference_matmul_proportion must have one entry for each of the IPUs of a "
            "replica, of which IPUConfig.inference_ipus_per_replica has 1, got [0.1, 0.2]. Change "
            "one of them.",
        ),
        (
            {"serialized_projection_splits_per_ipu": [1, 1]},
            "IPUConfig.serialized_projection_splits_per_ipu must have one entry for each of the "
            "IPUs of a replica, of which IPUConfig.ipus_per_replica has 1, got [1, 1]. Change one "
            "of them.",
        ),
        (
            {"projection_serialization_factor": 2, "serialized_projection_splits_per_ipu": [2]},
            "IPUConfig.projection_serialization_factor cuts a layer on one IPU and "
            "IPUConfig.serialized_projection_splits_per_ipu over several, so one of them must be "
            "None, got 2 and [2]. Leave one out.",
        ),
        (
            {"execute_encoder_on_cpu_for_generation": True},
            "IPUConfig.execute_encoder_on_cpu_for_generation must be False, as no release supports "
            "anything else, got True. Leave it out.",
        ),
    ],
)
def test_a_bad_value_is_refused(given, text):
    """Expected, came, do."""
    assert fault(**given) == text


def test_all_faults_come_at_once():
    """A file with four faults is corrected in one go."""
    text = fault(
        replication_factor="2", seed=-1, layers_per_ip=1, layers_per_ipu=[1, 2], ipus_per_replica=4
    )
    assert text.splitlines() == [
        "IPUConfig.replication_factor must be an integer of at least 1, got '2'. Try 1.",
        "IPUConfig.seed must be an integer of at least 0 and less than 2**64, or None, got -1. "
        "Try 0.",
        "IPUConfig has no parameter 'layers_per_ip'. Did you mean 'layers_per_ipu'?",
        "IPUConfig.layers_per_ipu must have one entry for each of the IPUs of a replica, of which "
        "IPUConfig.ipus_per_replica has 4, got [1, 2]. Change one of them.",
    ]


@pytest.mark.parametrize("layers", [[-1], [-1, -1], [2, -1], [12]])
def test_on_one_ipu_and_with_one_wildcard_lists_may_have_other_lengths(layers):
    """On one IPU there is nothing to choose; one wildcard is for any number of IPUs."""
    if -1 in layers:
        assert IPUConfig(layers_per_ipu=layers, ipus_per_replica=1).layers_per_ipu == layers
    assert IPUConfig(layers_per_ipu=[-1], ipus_per_replica=4).layers_per_ipu == [-1]


def test_an_assignment_is_checked_and_changes_nothing_if_it_is_bad():
    """Also the name: a misspelt one would be a setting that nobody reads."""
    config = IPUConfig()
    with pytest.raises(ConfigurationError, match="device_iterations must be an integer"):
        config.device_iterations = 0
    with pytest.raises(ConfigurationError, match="Did you mean 'device_iterations'"):
        config.device_iteration = 4
    with pytest.raises(AttributeError, match="Did you mean 'device_iterations'"):
        _ = config.device_iteration
    assert config == IPUConfig()


def test_values_that_do_not_fit_together_are_found_when_they_are_used():
    """Two assignments that belong together can be made one after the other."""
    config = IPUConfig()
    config.layers_per_ipu = [2, 2]
    for use in (config.check, config.to_options):
        with pytest.raises(ConfigurationError, match="ipus_per_replica has 1, got"):
            use()
    config.ipus_per_replica = 2
    config.check()


def test_splits_take_the_place_of_a_factor_of_one():
    """That factor was filled in and cuts nothing; one of 2 was meant."""
    config = IPUConfig()
    config.serialized_embedding_splits_per_ipu = [4]
    assert config.embedding_serialization_factor is None
    config.check()
    config = IPUConfig(embedding_serialization_factor=2)
    config.serialized_embedding_splits_per_ipu = [4]
    with pytest.raises(ConfigurationError, match="one of them must be None"):
        config.check()


# Modes


def test_the_mode_chooses_between_twins():
    """As code for optimum-graphcore reads and writes them."""
    config = IPUConfig(layers_per_ipu=[2], inference_layers_per_ipu=[5])
    assert config.mode == "training"
    assert config.value("layers_per_ipu") == config._layers_per_ipu == [2]
    assert config.eval() is config
    assert config.mode == "inference"
    assert config.value("layers_per_ipu") == config._layers_per_ipu == [5]
    config._layers_per_ipu = [7]
    assert (config.layers_per_ipu, config.inference_layers_per_ipu) == ([2], [7])
    assert config.train().mode == "training"
    config.mode = "inference"
    assert config.value("gradient_accumulation_steps") == 1
    assert "mode" not in config.to_dict()


@pytest.mark.parametrize("name", BY_MODE)
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_names_with_an_underscore_are_those_of_the_mode(name, mode):
    """Eight of them, as there."""
    other = name if mode == "training" else f"inference_{name}"
    config = IPUConfig(**{other: OTHERS[other]})
    config.mode = mode
    assert getattr(config, f"_{name}") == getattr(config, other)


def test_a_wrong_mode_or_name_is_refused():
    """A mode is one of two words."""
    config = IPUConfig()
    with pytest.raises(ConfigurationError) as caught:
        config.mode = "eval"
    assert str(caught.value) == (
        "IPUConfig.mode must be 'training' or 'inference', got 'eval'. Use train() or eval()."
    )
    with pytest.raises(ConfigurationError, match="Did you mean 'seed'"):
        config.value("sed")
    with pytest.raises(AttributeError):
        _ = config._replication_factor


def test_the_partition_is_that_of_training_or_inference():
    """What cuts the model, in one object; inference computes nothing again."""
    config = IPUConfig(
        layers_per_ipu=[1, 2],
        inference_layers_per_ipu=[-1],
        serialized_embedding_splits_per_ipu=[2, 0],
        projection_serialization_factor=3,
        recompute_checkpoint_every_layer=True,
    )
    assert config.partition() == IpuLayout(2, (1, 2), None, (2, 0), 3, None, True)
    assert config.partition(for_inference=True) == IpuLayout(1, (-1,), 1, None, 1, None, False)


# Changes from a string


def test_a_string_changes_several_values():
    """Numbers, flags, lists, strings and None."""
    config = IPUConfig(seed=3)
    config.update_from_string(
        "layers_per_ipu=[1 2 -1], ipus_per_replica=3,matmul_proportion=[0.08 0.2 0.25],"
        "enable_half_partials=no,replicated_tensor_sharding=1,executable_cache_dir=a=b,"
        "output_mode=sum,seed=none,inference_matmul_proportion=0"
    )
    assert config.layers_per_ipu == [1, 2, -1]
    assert config.matmul_proportion == [0.08, 0.2, 0.25]
    assert (config.enable_half_partials, config.replicated_tensor_sharding) == (False, True)
    assert (config.executable_cache_dir, config.output_mode, config.seed) == ("a=b", "sum", None)
    assert config.inference_matmul_proportion == 0.0
    config.update_from_string("layers_per_ipu=[4,5,6],embedding_serialization_factor=2")
    assert config.layers_per_ipu == [4, 5, 6]
    assert config.embedding_serialization_factor == 2
    config.update_from_string("")


def test_a_bad_string_changes_nothing_and_tells_all():
    """Half of a change would be a configuration that nobody asked for."""
    config = IPUConfig()
    with pytest.raises(ConfigurationError) as caught:
        config.update_from_string(
            "device_iterations=4,sed=1,seed,enable_half_partials=maybe,seed=x,device_iterations=5"
        )
    assert str(caught.value).splitlines() == [
        "IPUConfig has no parameter 'sed'. Did you mean 'seed'?",
        "every change must be name=value, got 'seed'. Separate changes by commas, and the entries "
        "of a list by spaces: layers_per_ipu=[2 2].",
        "IPUConfig.enable_half_partials must be one of true, 1, y, yes, false, 0, n, no in a "
        "string, got 'maybe'. Try true.",
        "every change must appear once, got 'device_iterations' again. Leave one out.",
        "IPUConfig.seed must be an integer of at least 0 and less than 2**64, or None, got 'x'. "
        "Try 0.",
    ]
    with pytest.raises(ConfigurationError, match="ipus_per_replica has 1"):
        config.update_from_string("device_iterations=4,layers_per_ipu=[2 2]")
    assert message(config.update_from_string, {"seed": 1}) == (
        "update_from_string needs a string such as 'seed=1,device_iterations=4', got {'seed': 1}. "
        "Use update(...) for a dict."
    )
    assert config == IPUConfig()


def test_update_takes_a_dict():
    """All or nothing, too."""
    config = IPUConfig()
    config.update({"layers_per_ipu": [2, 2], "ipus_per_replica": 2})
    assert config.ipus_per_replica == 2
    with pytest.raises(ConfigurationError, match="no parameter 'x'"):
        config.update({"seed": 1, "x": 2})
    assert config.seed is None


# The batch


def test_the_factor_of_the_batch_size():
    """Replicas, accumulation and device iterations; inference accumulates nothing."""
    config = IPUConfig(
        replication_factor=2,
        gradient_accumulation_steps=3,
        device_iterations=5,
        inference_replication_factor=7,
        inference_device_iterations=11,
    )
    assert config.batch_size_factor() == 30
    assert config.batch_size_factor(for_inference=True) == 77


def test_a_configuration_says_what_differs_from_the_defaults():
    """In a notebook or a log."""
    assert repr(IPUConfig()) == "IPUConfig()"
    assert repr(IPUConfig(seed=0, device_iterations=2)) == "IPUConfig(device_iterations=2, seed=0)"
    assert IPUConfig() != "IPUConfig()"
    with pytest.raises(TypeError, match="unhashable"):
        hash(IPUConfig())


def test_json_is_sorted_and_whole():
    """Two files can be compared line by line, and a default of tomorrow changes no old file."""
    text = IPUConfig(seed=1).to_json_string()
    assert list(json.loads(text)) == sorted(PARAMETERS)
    assert text.endswith("}\n")
    with pytest.raises(ConfigurationError, match="parallelize_kwargs must hold only JSON values"):
        IPUConfig(parallelize_kwargs={"x": object()}).to_json_string()


# What follows from other values


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("ipus_per_replica", {"layers_per_ipu": [2, 2]}, 2),
        ("inference_ipus_per_replica", {"inference_layers_per_ipu": [1, 1, 1]}, 3),
        ("inference_layers_per_ipu", {"layers_per_ipu": [2, 2]}, [2, 2]),
        ("inference_matmul_proportion", {"matmul_proportion": 0.5}, 0.5),
        ("embedding_serialization_factor", {}, 1),
        ("parallelize_kwargs", {"parallelize_kwargs": {"x": 1}}, {}),
    ],
)
def test_none_derives_a_value_anew(name, given, value):
    """As it does where the object is made: None is not a number of IPUs."""
    config = IPUConfig(**{**given, **({} if name in given else {name: None})})
    setattr(config, name, None)
    assert getattr(config, name) == value
    config.check()


def test_a_string_may_let_the_ipus_follow_the_layers():
    config = IPUConfig()
    config.update_from_string(
        "layers_per_ipu=[2 2 2 2],ipus_per_replica=none,inference_layers_per_ipu=none,"
        "inference_ipus_per_replica=none"
    )
    assert (config.ipus_per_replica, config.inference_ipus_per_replica) == (4, 4)
    assert config.inference_layers_per_ipu == [2, 2, 2, 2]
    config.ipus_per_replica = None
    assert config.partition().ipus_per_replica == 4


def test_splits_that_are_taken_back_leave_no_trace():
    config = IPUConfig()
    config.serialized_embedding_splits_per_ipu = [4]
    config.serialized_embedding_splits_per_ipu = None
    assert config == IPUConfig()
    assert config.embedding_serialization_factor == 1


def test_what_follows_is_not_written_where_values_are_by_pod():
    """There it follows from the value for each type."""
    config = IPUConfig.from_dict({"layers_per_ipu": {"pod4": [1, 1], "default": [2]}})
    config.ipus_per_replica = 1
    assert config.to_dict()["ipus_per_replica"] == 1
    config.ipus_per_replica = None
    assert "ipus_per_replica" not in config.to_dict()
    assert config.for_pod_type("pod4").ipus_per_replica == 2


def test_numbers_and_lists_of_numpy_are_values():
    """Which torch has as tensors too."""
    config = IPUConfig(
        layers_per_ipu=np.array([1, 2]),
        matmul_proportion=np.float32(0.25),
        inference_matmul_proportion=np.array([0.5, 0.25]),
        replication_factor=np.int64(2),
    )
    assert config.layers_per_ipu == [1, 2]
    assert (config.matmul_proportion, config.inference_matmul_proportion) == (0.25, [0.5, 0.25])
    assert IPUConfig.from_json_string(config.to_json_string()) == config
    assert IPUConfig(layers_per_ipu=torch.tensor([1, 2])).layers_per_ipu == [1, 2]
    assert "got array([1.5])" in fault(layers_per_ipu=np.array([1.5]))
