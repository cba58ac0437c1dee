"""IPUConfig.to_options: the options that optimum-graphcore makes of the same values."""

import sys
import types

import pytest
import torch

import ipufit.poptorch as poptorch
from ipufit import IPUConfig
from ipufit.engines.ipu import sdk
from ipufit.engines.ipu.ipu_config.settings import to_options
from ipufit.errors import ConfigurationError
from ipufit.poptorch._options.compiler import validate

FULL = {
    "replication_factor": 4,
    "inference_replication_factor": 2,
    "gradient_accumulation_steps": 8,
    "layers_per_ipu": [3, 5],
    "optimizer_state_offchip": True,
    "replicated_tensor_sharding": True,
    "matmul_proportion": [0.1, 0.3],
    "inference_matmul_proportion": 0.5,
    "device_iterations": 6,
    "inference_device_iterations": 7,
    "output_mode": "sum",
    "seed": 0,
    "auto_loss_scaling": True,
    "executable_cache_dir": "cache",
    "explicit_ir_inference": True,
}


def values(for_inference=False, compile_only=False, **given):
    """All values of the options by the compiler's names, but for the picture of the progress."""
    options = IPUConfig(**given).to_options(for_inference, compile_only)
    assert isinstance(options, poptorch.Options)
    copied = options.clone()
    if copied.defaultOutputMode():
        # Which has no dict, as it means another mode for training than for inference.
        copied.outputMode(poptorch.OutputMode.All)
    found = {name: value for name, value in copied.toDict().items() if not callable(value)}
    validate(found)
    found["output_mode"] = options.output_mode
    return found


def changes(one, other):
    """What another configuration changes."""
    names = sorted(set(one) | set(other))
    return {n: (one.get(n), other.get(n)) for n in names if one.get(n) != other.get(n)}


def test_a_whole_configuration_for_training():
    """Every value by the compiler's name."""
    found = values(**FULL)
    expected = {
        "replication_factor": 4,
        "device_iterations": 6,
        "gradient_accumulation": 8,
        "accumulation_and_replication_reduction_type": poptorch.ReductionType.Mean,
        "output_mode": poptorch.OutputMode.Sum.value,
        "random_seed": 0,
        "available_memory_proportion": {0: 0.1, 1: 0.3},
        "location_optimizer": {"onChip": 0, "useReplicatedTensorSharding": 1},
        "auto_round_num_ipus": True,
        "enableStochasticRounding": True,
        "partialsTypeMatMuls": "half",
        "convolutionOptions": {"partialsType": "half"},
        "automaticLossScalingSettings.enabled": True,
        "enableEngineCaching": True,
        "cachePath": "cache",
        "execution_mode": 0,
        "disableGradAccumulationTensorStreams": True,
        "accumulateOuterFragmentSettings.schedule": 3,
        "accumulateOuterFragmentSettings.excludedVirtualGraphs": ["0"],
        "outlineThreshold": 10.0,
        "subgraphCopyingStrategy": 1,
        "scheduleNonWeightUpdateGradientConsumersEarly": True,
        "patterns": {
            "TiedGather": True,
            "TiedGatherAccumulate": True,
            "UpdateInplacePrioritiesForIpu": True,
        },
        "engineOptions": {
            "opt.useAutoloader": "true",
            "target.syncReplicasIndependently": "true",
        },
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "enableExplicitIR" not in found


def test_a_whole_configuration_for_inference():
    """Its twins, all outputs, no accumulation, no stochastic rounding, sharded."""
    found = values(for_inference=True, **FULL)
    expected = {
        "replication_factor": 2,
        "device_iterations": 7,
        "gradient_accumulation": 1,
        "output_mode": poptorch.OutputMode.All.value,
        "random_seed": 0,
        "available_memory_proportion": {0: 0.5, 1: 0.5},
        "location_optimizer": {"onChip": 0, "useReplicatedTensorSharding": 1},
        "enableStochasticRounding": False,
        "enableExplicitIR": True,
        "execution_mode": 1,
        "cachePath": "cache",
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "automaticLossScalingSettings.enabled" not in found


@pytest.mark.parametrize(
    ("given", "training", "inference"),
    [
        ({"replication_factor": 2}, ["replication_factor"], []),
        ({"inference_replication_factor": 2}, [], ["replication_factor"]),
        ({"gradient_accumulation_steps": 2}, ["gradient_accumulation"], []),
        ({"device_iterations": 2}, ["device_iterations"], []),
        ({"inference_device_iterations": 2}, [], ["device_iterations"]),
        ({"output_mode": "all"}, ["output_mode"], []),
        ({"output_mode": "default"}, ["output_mode"], []),
        ({"optimizer_state_offchip": True}, ["location_optimizer"], ["location_optimizer"]),
        ({"replicated_tensor_sharding": True}, [], []),
        (
            {"matmul_proportion": 0.3},
            ["available_memory_proportion"],
            ["available_memory_proportion"],
        ),
        ({"inference_matmul_proportion": 0.3}, [], ["available_memory_proportion"]),
        ({"ipus_per_replica": 2}, ["available_memory_proportion"], ["available_memory_proportion"]),
        ({"inference_ipus_per_replica": 2}, [], ["available_memory_proportion"]),
        (
            {"layers_per_ipu": [1, 1]},
            ["available_memory_proportion"],
            ["available_memory_proportion"],
        ),
        ({"inference_layers_per_ipu": [1, 1]}, [], ["available_memory_proportion"]),
        (
            {"enable_half_partials": False},
            ["convolutionOptions", "partialsTypeMatMuls"],
            ["convolutionOptions", "partialsTypeMatMuls"],
        ),
        ({"seed": 0}, ["random_seed"], ["random_seed"]),
        ({"auto_loss_scaling": True}, ["automaticLossScalingSettings.enabled"], []),
        (
            {"executable_cache_dir": "x"},
            ["cachePath", "enableEngineCaching"],
            ["cachePath", "enableEngineCaching"],
        ),
        ({"executable_cache_dir": "disabled"}, [], []),
        ({"explicit_ir_inference": True}, [], ["enableExplicitIR"]),
        ({"parallelize_kwargs": {"x": 1}, "inference_parallelize_kwargs": {"x": 1}}, [], []),
        ({"recompute_checkpoint_every_layer": True}, [], []),
    ],
)
def test_each_parameter_changes_its_options_and_no_others(given, training, inference):
    """A twin never reaches the other mode; sharding needs replicas."""
    assert sorted(changes(values(), values(**given))) == training
    assert sorted(changes(values(True), values(True, **given))) == inference


def test_sharding_of_the_optimizer_needs_replicas():
    """Of each mode's own."""
    given = {"replicated_tensor_sharding": True, "inference_replication_factor": 2}
    assert values(**given)["location_optimizer"]["useReplicatedTensorSharding"] == 0
    assert values(True, **given)["location_optimizer"]["useReplicatedTensorSharding"] == 1


def test_the_mode_of_the_configuration_does_not_matter():
    """What is asked for says it, and the mode stays."""
    config = IPUConfig(inference_matmul_proportion=0.5).eval()
    assert config.to_options().available_memory_proportion == {0: 0.2}
    assert config.mode == "inference"


def test_compile_only_makes_options_for_no_device():
    """To compile on a machine without IPUs."""
    assert IPUConfig().to_options(compile_only=True).connection_type == 2
    assert IPUConfig().to_options().connection_type == 0


def test_torchs_generator_stays_as_it_is():
    """PopTorch seeds it when it is told a seed."""
    torch.manual_seed(1)
    IPUConfig(seed=5).to_options()
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))


class Sdk(types.ModuleType):
    """PopTorch on a machine with IPUs of a version, or without."""

    def __init__(self, version):
        super().__init__("poptorch")
        self.ipuHardwareIsAvailable = lambda: version is not None
        self.ipuHardwareVersion = lambda: version

    def __getattr__(self, name):
        return getattr(poptorch, name)


@pytest.mark.parametrize("version", [2, 21])
def test_ipus_of_the_second_generation_are_taken(version):
    """Also a C600."""
    assert to_options(Sdk(version), IPUConfig(), False, False).device_iterations == 1


@pytest.mark.parametrize(
    ("version", "came"), [(1, "PopTorch finds version 1"), (None, "there is no IPU")]
)
def test_other_hardware_is_refused(version, came):
    """Unless nothing runs on it."""
    with pytest.raises(ConfigurationError) as caught:
        to_options(Sdk(version), IPUConfig(), False, False)
    assert str(caught.value) == (
        f"to_options is for IPUs of version 2 or 21, but {came}. Pass compile_only=True for "
        "options to compile without an IPU."
    )
    assert to_options(Sdk(version), IPUConfig(), False, True).connection_type == 2


def test_the_sdks_options_are_made_where_it_is(monkeypatch):
    """The stand-in is for machines without one."""
    found = Sdk(2)
    monkeypatch.setitem(sys.modules, "poptorch", found)
    monkeypatch.setattr(sdk, "why_no_sdk", lambda: None)
    made = []
    found.Options = lambda: made.append(1) or poptorch.Options()
    IPUConfig().to_options()
    assert made == [1]


@pytest.mark.long
def test_importing_ipufit_imports_no_poptorch():
    """Options are made on demand."""
    import subprocess

    code = (
        "import sys, ipufit; c = ipufit.IPUConfig(); c.report(); c.to_dict(); "
        "print('ipufit.poptorch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False\n"
