"""``training_options`` and ``inference_options``: what PopTorch's options fix, on either engine."""

import copy
import inspect

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.core.compile_arguments import TRAINING
from ipufit.engines.ipu import effects
from ipufit.engines.ipu.poptorch_options import PopTorchOptions
from ipufit.errors import ConfigurationError, PlanError
from ipufit.partition.partition import NOT_DIVIDED
from tests.engines import scales_itself
from tests.told import refused

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1)).double()
Y = torch.arange(24) % 3
OFF_CHIP = poptorch.TensorLocationSettings().useOnChipStorage(False)

# Every setter there is, by its name: a value that is not the default.
EXACT = {
    "Training.accumulationAndReplicationReductionType": (poptorch.ReductionType.Sum,),
    "Training.gradientAccumulation": (2,),
    "autoRoundNumIPUs": (True,),
    "deviceIterations": (3,),
    "outputMode": (poptorch.OutputMode.EveryN, 2),
    "replicationFactor": (2,),
}
APPROXIMATED = {
    "TensorLocations.setOptimizerLocation": (OFF_CHIP,),
    "Training.setAutomaticLossScaling": (True,),
    "randomSeed": (5,),
}
NO_EFFECT = {
    "Precision.enableFloatingPointExceptions": (True,),
    "Precision.enableStochasticRounding": (True,),
    "Precision.setPartialsType": (torch.half,),
    "TensorLocations.numIOTiles": (32,),
    "TensorLocations.setAccumulatorLocation": (OFF_CHIP,),
    "TensorLocations.setActivationLocation": (OFF_CHIP,),
    "TensorLocations.setWeightLocation": (OFF_CHIP,),
    "Training.setConvolutionDithering": (True,),
    "Training.setMeanAccumulationAndReplicationReductionStrategy": (
        poptorch.MeanReductionStrategy.Running,
    ),
    "anchorTensor": ("mine", "Gradient___weight"),
    "broadcastBuffers": (False,),
    "connectionType": (poptorch.ConnectionType.OnDemand,),
    "disableModuleNamescope": (),
    "enableExecutableCaching": ("cache",),
    "enableProfiling": ("profile",),
    "enableStableNorm": (True,),
    "enableSyntheticData": (True,),
    "logCycleCount": (True,),
    "logDir": ("logs",),
    "maxRepeatLogs": (2,),
    "modelName": ("small",),
    "relaxOptimizerAttributesChecks": (True,),
    "setAvailableMemoryProportion": ({"IPU0": 0.3},),
    "setExecutionStrategy": (poptorch.ShardedExecution(),),
    "showCompilationProgressBar": (False,),
    "sourceLocationExcludes": (["mine"],),
    "syncPattern": (poptorch.SyncPattern.SinglePipeline,),
    "updatableNamedBuffers": (["running_mean"],),
    "useIpuId": (2,),
    "useIpuModel": (True,),
}
# Seen under the name of another setter, refused, or readers and containers.
OTHERS = {
    "Distributed",
    "Jit",
    "Precision",
    "TensorLocations",
    "Training",
    "appendToLocationExcludes",
    "checkIsFrozen",
    "clone",
    "createOrSet",
    "defaultOutputMode",
    "deleteIfExists",
    "exists",
    "from_json",
    "inputReplicaGrouping",
    "loadFromFile",
    "set",
    "toDict",
    "update",
    "useOfflineIpuTarget",
    "Precision.halfFloatCasting",
    "Precision.runningStatisticsAlwaysFloat",
}


def with_setter(name, values):
    """Fresh options on which one setter was called."""
    options = poptorch.Options()
    group, _, setter = name.rpartition(".")
    getattr(getattr(options, group) if group else options, setter)(*values)
    return options


class Net(nn.Module):
    """Two layers, with noise that each seed draws otherwise, in eval mode too."""

    def __init__(self, noise=0.0):
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head, self.noise = nn.Linear(6, 4), nn.Linear(4, 3), noise

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.head(x + self.noise * torch.randn_like(x))


def still(parameters):
    """An optimizer that leaves the weights where they are."""
    return torch.optim.SGD(parameters, lr=0.0)


def compiled(noise=0.0, metrics=("accuracy",), engine=None, optimizer="sgd", **options):
    model = ipufit.Model(Net(noise).double(), **({"engine": engine} if engine else {}))
    model.compile(optimizer, "cross_entropy", metrics=list(metrics), **options)
    return model


def fitted(model, **work):
    work = {"batch_size": 2, "seed": 7, "epochs": 2, "shuffle": False, "verbose": 0, **work}
    return model.fit(X, Y, **work)


def weights(model):
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def assert_same_run(options, arguments, at_compile=None, **given):
    """Options give the bits of a run that is told the same by arguments."""
    by_options, by_hand = compiled(**given, **options), compiled(**given, **(at_compile or {}))
    first, second = fitted(by_options), fitted(by_hand, **arguments)
    assert first.history == second.history
    for name, value in weights(by_options).items():
        assert torch.equal(value, weights(by_hand)[name])
    return first, second


def test_every_setter_is_in_one_table():
    """A setter that is in none would be ignored in silence."""
    options, found = poptorch.Options(), set()
    for prefix, group in (
        ("", options),
        ("Training.", options.Training),
        ("Precision.", options.Precision),
        ("TensorLocations.", options.TensorLocations),
    ):
        for name, member in inspect.getmembers(group):
            if not name.startswith("_") and (callable(member) or not prefix):
                found.add(prefix + name)
    inherited = {f"{p}.{n}" for p in ("Training", "Precision", "TensorLocations") for n in OTHERS}
    assert found - inherited - OTHERS == {*EXACT, *APPROXIMATED, *NO_EFFECT}


@pytest.mark.parametrize("name", sorted({*EXACT, *APPROXIMATED, *NO_EFFECT}))
def test_a_setter_is_in_one_list(name):
    """With a reason where it does not hold exactly."""
    tables = (EXACT, APPROXIMATED, NO_EFFECT)
    (values,) = (table[name] for table in tables if name in table)
    options = PopTorchOptions(TRAINING, with_setter(name, values))
    (found,) = options.effects("embedded", is_divided=False).effects
    assert found.name == name
    kinds = (effects.EXACT, effects.APPROXIMATED, effects.NONE)
    assert [found.kind == kind for kind in kinds] == [name in table for table in tables]
    assert found.kind == effects.EXACT or found.why


def test_other_options_of_the_compiler_have_their_names():
    options = poptorch.Options()
    options._Popart.set("autoRecomputation", 4)
    options._Popart.setEngineOptions({"debug.outputAllSymbols": "true"})
    found = PopTorchOptions(TRAINING, options).effects("embedded", is_divided=False)
    assert [effect.name for effect in found.of(effects.NONE)] == [
        '_Popart.set("autoRecomputation")',
        "_Popart.setEngineOptions",
    ]


@pytest.mark.long("ipu-standin")
def test_options_as_they_are_by_default_say_nothing(capsys):
    model = compiled(
        engine="embedded",
        poptorch=(poptorch.Options(), poptorch.Options()),
    )
    model.fit(X, Y, batch_size=2, verbose=0)
    assert capsys.readouterr().out == ""


@pytest.mark.long("ipu-standin")
def test_compile_prints_the_three_lists_and_explain_the_last(capsys):
    training = poptorch.Options().deviceIterations(2).modelName("small").randomSeed(4)
    inference = poptorch.Options().useIpuId(3)
    model = compiled(engine="embedded", poptorch=(training, inference))
    assert capsys.readouterr().out == (
        "training_options on engine 'embedded'\n  exact: deviceIterations\n  approximated: "
        "randomSeed\n    randomSeed: a seed, which gives other random numbers than on an IPU\n  no "
        "effect here: modelName\n    modelName: no report names the model\ninference_options on "
        "engine 'embedded'\n  exact: none\n  approximated: none\n  no effect here: useIpuId\n    "
        "useIpuId: there is no IPU to attach to\n"
    )
    model.fit(X, Y, batch_size=2, verbose=0)
    model.explain()
    text = capsys.readouterr().out
    assert "\nOf training_options, these have no effect on embedded: modelName.\n" in text
    assert "\nOf inference_options, these have no effect on embedded: useIpuId.\n" in text


@pytest.mark.long
def test_work_is_that_of_the_options():
    options = poptorch.Options().deviceIterations(3).replicationFactor(2)
    options.Training.gradientAccumulation(2)
    work = {"device_iterations": 3, "ipus": 2, "gradient_accumulation": 2}
    first, second = assert_same_run({"poptorch": options}, work)
    assert {name: first.params[name] for name in work} == work
    assert first.params["updates_done"] == second.params["updates_done"]


@pytest.mark.long
def test_a_sum_of_gradients_is_that_of_the_options():
    options = poptorch.Options()
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    options.Training.gradientAccumulation(2)
    by_hand = {"reduction": ipufit.Reduction(gradients="sum")}
    first, _ = assert_same_run(
        {"poptorch": options}, {"gradient_accumulation": 2}, at_compile=by_hand
    )
    assert first.params["gradient_reduction"] == "sum"


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "by_hand"),
    [
        (("Final",), {"outputs": "final"}),
        (("EveryN", 2), {"outputs": ipufit.Outputs("every_n", 2)}),
        (("All",), {}),
    ],
)
def test_the_output_mode_is_that_of_the_options(mode, by_hand):
    options = poptorch.Options().deviceIterations(4)
    options.outputMode(getattr(poptorch.OutputMode, mode[0]), *mode[1:])
    assert_same_run({"poptorch": options}, {"device_iterations": 4}, at_compile=by_hand)


@pytest.mark.long("ipu-standin")
def test_a_sum_of_outputs_takes_no_metrics():
    options = poptorch.Options().outputMode(poptorch.OutputMode.Sum)
    assert fitted(compiled(metrics=(), poptorch=options)).params["output_mode"] == "sum"
    with pytest.raises(ConfigurationError, match="returns only sums of outputs"):
        compiled(poptorch=options)


@pytest.mark.long
def test_the_seed_is_that_of_the_options():
    model = compiled(0.5, poptorch=poptorch.Options().randomSeed(11))
    other = compiled(0.5)
    assert fitted(model, seed=None).history == fitted(other, seed=11).history
    refused(
        lambda: fitted(model, seed=12),
        "seed must agree with training_options.randomSeed, which is 11, got 12. Leave it out, or "
        "compile with other options.",
    )


@pytest.mark.long
def test_the_seed_of_inference_is_that_of_its_options():
    given, plain = compiled(0.5, poptorch=(None, poptorch.Options().randomSeed(5))), compiled(0.5)
    same = given.predict(X, batch_size=4, verbose=0)
    assert torch.equal(torch.as_tensor(same), plain.predict(X, batch_size=4, seed=5, verbose=0))
    assert not torch.equal(torch.as_tensor(same), plain.predict(X, batch_size=4, verbose=0))
    refused(
        lambda: given.evaluate(X, Y, batch_size=4, seed=6, verbose=0),
        "seed must agree with inference_options.randomSeed, which is 5, got 6. Leave it out, or "
        "compile with other options.",
    )


@pytest.mark.long
def test_validation_has_the_seed_of_inference():
    given = compiled(0.5, poptorch=(None, poptorch.Options().randomSeed(5)), optimizer=still)
    plain = compiled(0.5, optimizer=still)
    held_out = {"validation_data": ipufit.Validation((X, Y), batch_size=4)}
    expected = fitted(plain, seed=5, **held_out).history["val_loss"]
    assert fitted(given, **held_out).history["val_loss"] == expected
    assert fitted(plain, **held_out).history["val_loss"] != expected


@pytest.mark.long
def test_inference_has_work_of_its_own():
    training = poptorch.Options().deviceIterations(3)
    inference = poptorch.Options().deviceIterations(2).replicationFactor(2)
    model = compiled(poptorch=(training, inference))
    history = fitted(model, validation_data=ipufit.Validation((X, Y), batch_size=2))
    assert history.params["device_iterations"] == 3
    with pytest.raises(PlanError) as caught:
        model.evaluate(X, Y, batch_size=2, device_iterations=3, ipus=1, verbose=0)
    assert str(caught.value) == (
        "`ipus` must agree with inference_options.replicationFactor, which says 2, got 1. Leave it "
        "out, or compile with other options.\n"
        "`device_iterations` must agree with inference_options.deviceIterations, which says 2, got "
        "3. Leave it out, or compile with other options."
    )


@pytest.mark.long
def test_what_inference_options_leave_open_is_that_of_fit():
    """Validation has the IPUs of training unless something says otherwise."""
    model = compiled(poptorch=(None, poptorch.Options().deviceIterations(2)))
    with pytest.raises(PlanError, match="`ipus`"):
        model.fit(X, Y, batch_size=2, ipus=3, verbose=0)
    fitted(model, ipus=2, validation_data=ipufit.Validation((X, Y), batch_size=2))


@pytest.mark.long("ipu-standin")
def test_arguments_that_disagree_are_refused():
    options = poptorch.Options().deviceIterations(3).replicationFactor(2)
    options.Training.gradientAccumulation(2)
    model = compiled(poptorch=options)
    before = copy.deepcopy(weights(model))
    with pytest.raises(PlanError) as caught:
        fitted(model, ipus=4, device_iterations=8, gradient_accumulation=1)
    assert str(caught.value) == (
        "`ipus` must agree with training_options.replicationFactor, which says 2, got 4. Leave it "
        "out, or compile with other options.\n"
        "`device_iterations` must agree with training_options.deviceIterations, which says 3, got "
        "8. Leave it out, or compile with other options.\n"
        "`gradient_accumulation` must agree with training_options.Training.gradientAccumulation, "
        "which says 2, got 1. Leave it out, or compile with other options."
    )
    for name, value in weights(model).items():
        assert torch.equal(value, before[name])
    fitted(model, ipus=2, device_iterations=3, gradient_accumulation=2)


def summing():
    options = poptorch.Options()
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    return options


def scaling():
    options = poptorch.Options()
    options.Training.setAutomaticLossScaling(True)
    return options


def accumulating():
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    return options


@pytest.mark.parametrize(
    ("options", "arguments", "text"),
    [
        (
            poptorch.Options().outputMode(poptorch.OutputMode.All),
            {
                "outputs": "sum",
            },
            "outputs must agree with training_options.outputMode, which says "
            "Outputs(mode='all', every=None), got Outputs(mode='sum', every=None). Leave it out, "
            "or change the options.",
        ),
        (
            poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 2),
            {
                "outputs": ipufit.Outputs("every_n", 3),
            },
            "outputs must agree with training_options.outputMode, which says "
            "Outputs(mode='every_n', every=2), got Outputs(mode='every_n', every=3). Leave it "
            "out, or change the options.",
        ),
        (
            summing(),
            {"reduction": ipufit.Reduction(gradients="mean")},
            "Reduction.gradients must agree with "
            "training_options.Training.accumulationAndReplicationReductionType, which says 'sum', "
            "got 'mean'. Leave it out, or change the options.",
        ),
        (
            scaling(),
            {"precision": ipufit.Precision(loss_scale=8.0)},
            "Precision.loss_scale must agree with training_options.Training."
            "setAutomaticLossScaling, which is on, got 8.0. Leave one out.",
        ),
        (
            poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution()),
            {
                "parallel": ipufit.Parallel(stages={"head": 1}, strategy="sharded"),
            },
            "strategy and training_options.setExecutionStrategy both set how stages run. Leave one "
            "out.",
        ),
        (
            (None, poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())),
            {
                "parallel": ipufit.Parallel(
                    stages={"head": 1}, inference=ipufit.Parallel(strategy="sharded")
                ),
            },
            "inference.strategy and inference_options.setExecutionStrategy both set how stages "
            "run. Leave one out.",
        ),
        (
            {"deviceIterations": 2},
            {},
            "training_options must be poptorch.Options or None, got builtins.dict. Make them with "
            "poptorch.Options(), or with ipufit.poptorch.Options() where there is no SDK.",
        ),
        (
            poptorch.Options()
            .replicationFactor(2)
            .inputReplicaGrouping(2, poptorch.CommGroupType.Consecutive),
            {},
            "training_options can't be used: inputReplicaGrouping gives several replicas the same "
            "input, but every replica of a Model has its own. Leave these options as they are by "
            "default.",
        ),
        (
            (None, poptorch.Options().outputMode(poptorch.OutputMode.Final)),
            {},
            "inference_options can't be used: outputMode is 'final', but evaluate and predict need "
            "all outputs. Leave these options as they are by default.",
        ),
        (
            (None, accumulating()),
            {},
            "inference_options can't be used: Training.gradientAccumulation is set, but inference "
            "has no gradients. Leave these options as they are by default.",
        ),
        (
            ([], ()),
            {},
            "training_options must be poptorch.Options or None, got builtins.list. Make them with "
            "poptorch.Options(), or with ipufit.poptorch.Options() where there is no SDK.\n"
            "inference_options must be poptorch.Options or None, got builtins.tuple. Make them "
            "with poptorch.Options(), or with ipufit.poptorch.Options() where there is no SDK.",
        ),
    ],
)
def test_what_compile_refuses(options, arguments, text):
    refused(lambda: compiled(metrics=(), poptorch=options, **arguments), text)


def test_options_for_another_process_are_refused_off_ipus():
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    refused(
        lambda: compiled(engine="embedded", poptorch=options),
        "training_options must be for this process, 0 of 1, but are for 0 of 2. Leave "
        "Distributed.configureProcessId out, and let torchrun or another launcher start the "
        "processes.",
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ShardedExecution", "PipelinedExecution"])
def test_the_strategy_is_that_of_the_options(kind, capsys):
    strategy = getattr(poptorch, kind)(poptorch.AutoStage.AutoIncrement)
    training = poptorch.Options().setExecutionStrategy(strategy).replicationFactor(2)
    training.Training.gradientAccumulation(3)
    model = compiled(parallel=ipufit.Parallel(stages={"head": 1}), poptorch=training)
    history = fitted(model)
    assert history.params["ipus"] == 4
    assert history.params["replicas"] == 2
    model.explain()
    wanted = "sharded" if kind == "ShardedExecution" else "pipelined"
    assert wanted in capsys.readouterr().out
    with pytest.raises(PlanError, match="replicationFactor x 2 IPUs of a replica, which says 4"):
        fitted(model, ipus=2)


def test_a_strategy_of_inference_is_that_of_its_options():
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    model = compiled(
        parallel=ipufit.Parallel(stages={"head": 1}), poptorch=(None, options.deviceIterations(1))
    )
    found = model._session.divided.partitions
    assert (found.training.strategy, found.inference.strategy) == ("pipelined", "sharded")


def test_a_strategy_that_names_blocks_is_for_blocks_of_the_modules_own():
    strategy = poptorch.PipelinedExecution("first", "second")
    options = poptorch.Options().setExecutionStrategy(strategy)
    with pytest.raises(ConfigurationError, match="names the module's own blocks"):
        compiled(parallel=ipufit.Parallel(stages={"head": 1}), poptorch=options)
    assert compiled(poptorch=options)._session.divided.partitions == NOT_DIVIDED


@pytest.mark.long
def test_ipus_are_rounded_up_if_the_options_say_so():
    options = poptorch.Options().replicationFactor(3).autoRoundNumIPUs(True)
    assert fitted(compiled(poptorch=options)).params["ipus"] == 3
    with pytest.raises(PlanError):
        fitted(compiled(poptorch=poptorch.Options().replicationFactor(3)))


@pytest.mark.long
@scales_itself
def test_automatic_loss_scaling_is_a_dynamic_scale():
    model, other = (
        compiled(poptorch=scaling()),
        compiled(precision=ipufit.Precision(loss_scale="dynamic")),
    )
    assert fitted(model).history == fitted(other).history
    assert model.history.params["loss_scale"] == other.history.params["loss_scale"]
