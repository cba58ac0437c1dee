"""Settings of an IPUConfig and of PopTorch's options, in one form, beside arguments of fit."""

import pytest

from ipufit import IPUConfig, poptorch
from ipufit.core.compile_arguments import INFERENCE, TRAINING
from ipufit.engines.ipu.ipu_config.settings import read_settings as of_config
from ipufit.engines.ipu.poptorch_options import PopTorchOptions, read_settings
from ipufit.engines.ipu_settings import IpuSettings, Setting
from ipufit.errors import ConfigurationError, PlanError
from ipufit.partition.partition import Partition

pytestmark = pytest.mark.both_engines

NAMES = ("outputs", "gradient_reduction", "loss_scale", "offload_optimizer", "shard")


def by_config():
    """An IPUConfig with a value of its own for all that options have, too."""
    return of_config(
        IPUConfig(
            gradient_accumulation_steps=2,
            device_iterations=3,
            inference_device_iterations=4,
            output_mode="sum",
            seed=5,
            auto_loss_scaling=True,
            optimizer_state_offchip=True,
            replicated_tensor_sharding=True,
        )
    )


def by_options():
    """Options that fix as much."""
    training = poptorch.Options().deviceIterations(3).outputMode(poptorch.OutputMode.Sum)
    training.Training.gradientAccumulation(2)
    training.Training.setAutomaticLossScaling(True)
    training.randomSeed(5)
    location = poptorch.TensorLocationSettings()
    location.useOnChipStorage(False).useReplicatedTensorSharding(True)
    training.TensorLocations.setOptimizerLocation(location)
    inference = poptorch.Options().deviceIterations(4)
    return read_settings(PopTorchOptions(TRAINING, training), PopTorchOptions(INFERENCE, inference))


def test_a_configuration_and_options_that_say_alike_fix_alike():
    """What follows must not know which of both the user has."""
    config, options = by_config(), by_options()
    for name in set(NAMES) - {"gradient_reduction"}:
        assert getattr(config, name).value == getattr(options, name).value
    # The mean is PopTorch's default, of which options say nothing.
    assert (config.gradient_reduction.value, options.gradient_reduction) == ("mean", None)
    for is_training in (True, False):
        found = [
            {name: setting.value for name, setting in settings.of(is_training).work().items()}
            for settings in (config, options)
        ]
        # Options without replicationFactor fix no IPUs.
        assert found[0].pop("ipus") == 1
        assert found[0] == found[1]
    assert config.seed_or(None) == options.seed_or(None) == 5


def test_nothing_fixes_nothing():
    """Most models have neither."""
    settings = IpuSettings()
    assert settings.names(True) == settings.names(False) == set()
    wanted = {"ipus": None, "device_iterations": 1, "gradient_accumulation": 4}
    asked = {"ipus": None, "device_iterations": None, "gradient_accumulation": 4}
    assert settings.resolve(True, None, **asked) == wanted
    assert settings.seed_or(7) == 7


def test_replicas_count_with_the_ipus_of_each():
    """Known only when the module is divided."""
    options = PopTorchOptions(TRAINING, poptorch.Options().replicationFactor(2))
    settings = read_settings(options, None)
    halves = Partition((("head", 1),), 2, "pipelined", False, 2)
    assert settings.resolve(True, halves, ipus=None) == {"ipus": 4}
    with pytest.raises(PlanError) as caught:
        settings.resolve(True, halves, ipus=2)
    assert str(caught.value) == (
        "`ipus` must agree with training_options.replicationFactor x 2 IPUs of a replica, which "
        "says 4, got 2. Leave it out, or compile with other options."
    )
    assert caught.value.suggestion == {"ipus": 4}


def test_a_conflict_names_the_argument_the_source_and_the_cure():
    """All three are needed to mend it."""
    setting = Setting(3, "IPUConfig.seed", "Leave it out.")
    text = "seed must agree with IPUConfig.seed, which is 3, got 4. Leave it out."
    assert setting.conflict("seed", 4) == text
    with pytest.raises(ConfigurationError, match="which is 5, got 6"):
        by_config().seed_or(6)
