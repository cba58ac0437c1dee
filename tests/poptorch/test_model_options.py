"""What a model makes of its options, what the compiler refuses of them, and what has no effect."""

import pytest
import torch

import ipufit.poptorch as poptorch
from ipufit.poptorch._options import compiler as reports
from ipufit.poptorch._options.compiler import ignored, model_options, report_ignored
from tests.poptorch.option_texts import exactly


@pytest.mark.parametrize(
    ("training", "mode"), [(True, poptorch.OutputMode.Final), (False, poptorch.OutputMode.All)]
)
def test_a_model_freezes_options_and_picks_an_output_mode_in_its_copy(training, mode):
    options = poptorch.Options()
    options.anchorTensor("follows", "long")
    options.anchorTensor("own", "long", poptorch.OutputMode.EveryN, 2)
    own = model_options(options, training)
    assert own.output_mode == mode
    assert own.anchored_tensors == {
        "follows": ["long", True, mode, 1],
        "own": ["long", False, poptorch.OutputMode.EveryN, 2],
    }
    assert options.defaultOutputMode()
    assert options.anchored_tensors["follows"] == ["long", True, None, 1]
    with pytest.raises(AttributeError):
        options.deviceIterations(2)
    own.deviceIterations(2)


def test_an_output_mode_that_was_set_is_kept():
    options = poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 2).deviceIterations(4)
    options.anchorTensor("follows", "long")
    own = model_options(options, True)
    assert (own.output_mode, own.output_return_period) == (1, 2)
    assert own.anchored_tensors["follows"] == ["long", True, poptorch.OutputMode.EveryN, 2]


def test_no_options_are_the_default_ones():
    assert repr(model_options(None, True)) == repr(
        poptorch.Options().outputMode(poptorch.OutputMode.Final)
    )


def test_what_is_not_options_is_refused():
    with pytest.raises(poptorch.Error) as refused:
        model_options({"deviceIterations": 1}, True)
    assert refused.value.message == (
        "options must be poptorch.Options, got dict. Leave them out for the defaults."
    )


ACCUMULATION = (
    "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default "
    "value (1) when running a poptorch.inferenceModel()."
)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (
            poptorch.PipelinedExecution(),
            f"{ACCUMULATION} Use poptorch.Options().deviceIterations to process a sufficient "
            "number of batches each run for pipelined execution instead. Got 2.",
        ),
        (poptorch.ShardedExecution(), f"{ACCUMULATION} Got 2."),
        (poptorch.SerialPhasedExecution("A"), f"{ACCUMULATION} Got 2."),
    ],
)
def test_inference_accumulates_no_gradients(strategy, text):
    options = poptorch.Options().setExecutionStrategy(strategy)
    options.Training.gradientAccumulation(2)
    with pytest.raises(poptorch.Error) as refused:
        model_options(options, False)
    assert refused.value.message == text
    assert model_options(options, True).Training.gradient_accumulation == 2


def validated(change):
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    change(options)
    poptorch.poptorch_core._validateOptions(options.toDict())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda o: o._Popart.set("enableOutline", True),
            "Unknown bool option enableOutline. Did you mean enableOutlining? See "
            "poptorch.Options._Popart.set, which takes any name.",
        ),
        (
            lambda o: o._Popart.set("enableOutlining", 1),
            "Unknown uint64 option enableOutlining. It is a bool option. See "
            "poptorch.Options._Popart.set, which takes any name.",
        ),
        (
            lambda o: o._Popart.set("qqqqq", "a"),
            "Unknown string option qqqqq. No string option has a name like it. See "
            "poptorch.Options._Popart.set, which takes any name.",
        ),
        (
            lambda o: o._Popart.set("dotChecks", torch.zeros(1)),
            "Unknown value type Tensor for option dotChecks. Use a bool, int, float, str, list, "
            "set, tuple or dict.",
        ),
        (
            lambda o: o._Popart.set("qqqqq", None),
            "Unknown value type NoneType for option qqqqq. Use a bool, int, float, str, list, set, "
            "tuple or dict.",
        ),
        (
            lambda o: o._Popart.set("firstDotOp", -1),
            "The option firstDotOp must be in 0 ... 2**64 - 1, got -1.",
        ),
        (
            lambda o: o.randomSeed(-1),
            "The option random_seed must be in 0 ... 2**64 - 1, got -1.",
        ),
        (
            lambda o: o.Training.setMeanAccumulationAndReplicationReductionStrategy(
                poptorch.MeanReductionStrategy.PostAndLoss
            ),
            "The option meanAccumulationAndReplicationReductionStrategy has the values 0 ... 1, "
            f"got {poptorch.MeanReductionStrategy.PostAndLoss!r}. Use another member of the "
            "enum: the device's compiler has no such one.",
        ),
        (
            lambda o: o._Popart.set("patterns", {"A": True}),
            "The compiler option patterns needs patterns_level. Use "
            "options._Popart.setPatterns(patterns, level).",
        ),
        (
            lambda o: o.deviceIterations(0),
            "poptorch.Options().deviceIterations must be at least 1, got 0. Leave it out for 1.",
        ),
        (
            lambda o: o.replicationFactor(-2),
            "poptorch.Options().replicationFactor must be at least 1, got -2. Leave it out for 1.",
        ),
        (
            lambda o: o.Training.gradientAccumulation(0),
            "poptorch.Options().Training.gradientAccumulation must be at least 1, got 0. Leave it "
            "out for 1.",
        ),
        (
            lambda o: o.deviceIterations(6).outputMode(poptorch.OutputMode.EveryN, 4),
            "The N of OutputMode.EveryN must divide the device iterations, got N=4 and "
            "deviceIterations(6). Use one of [1, 2, 3, 6].",
        ),
        (
            lambda o: o.outputMode(poptorch.OutputMode.EveryN, 2),
            "The N of OutputMode.EveryN must divide the device iterations, got N=2 and "
            "deviceIterations(1). Use one of [1].",
        ),
    ],
)
def test_the_compiler_refuses_what_it_does_not_know(change, text):
    with pytest.raises(poptorch.Error) as refused:
        validated(change)
    assert refused.value.message == text


def test_the_compiler_takes_what_it_knows():
    def change(options):
        options.deviceIterations(6).outputMode(poptorch.OutputMode.EveryN, 3).randomSeed(3)
        options.setAvailableMemoryProportion({"IPU0": 0.5}).useIpuModel(True).modelName("m")
        options.maxRepeatLogs(None).anchorTensor("a", "long")
        options.TensorLocations.numIOTiles(32)
        options.TensorLocations.setWeightLocation(poptorch.TensorLocationSettings())
        options.Precision.setPartialsType(torch.half)
        options.Training.setAutomaticLossScaling(True)
        options.setExecutionStrategy(poptorch.SerialPhasedExecution("A"))
        popart = options._Popart
        popart.setPatterns({"PadSum": True}).setEngineOptions({"a": "b"})
        popart.set("dotChecks", ["ALL"]).set("outlineThreshold", 1.5)
        popart.set("accumulateOuterFragmentSettings.excludedVirtualGraphs", ["0"])

    validated(change)


def test_the_log_says_what_the_compiler_is_told(caplog):
    poptorch.setLogLevel("DEBUG")

    def change(options):
        options._Popart.set("dotChecks", ["FINAL"]).setEngineOptions({"a": "b"})

    try:
        validated(change)
    finally:
        poptorch.setLogLevel("WARN")
    lines = [record.getMessage() for record in caplog.records]
    for line in (
        "poptorch.Options set execution_mode to value 0",
        "poptorch.Options set broadcast_buffers to value true",
        "poptorch.Options set accumulation_and_replication_reduction_type to value 1",
        "poptorch.Options added FINAL to dotChecks",
        "poptorch.Options set engineOptions[a] to b",
    ):
        assert lines.count(line) == 1


LOCATION = poptorch.TensorLocationSettings().useOnChipStorage(False)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda o: o, []),
        (lambda o: o.logDir("."), []),
        (lambda o: o.logDir("x"), ["logDir"]),
        (lambda o: o.maxRepeatLogs(None), ["maxRepeatLogs"]),
        (lambda o: o.modelName("x"), ["modelName"]),
        (lambda o: o.syncPattern(poptorch.SyncPattern.Full), []),
        (lambda o: o.syncPattern(poptorch.SyncPattern.SinglePipeline), ["syncPattern"]),
        (lambda o: o.setAvailableMemoryProportion({}), []),
        (
            lambda o: o.setAvailableMemoryProportion({"IPU0": 0.1}),
            ["setAvailableMemoryProportion"],
        ),
        (lambda o: o.useIpuId(0), []),
        (lambda o: o.sourceLocationExcludes(["x"]), ["sourceLocationExcludes"]),
        (lambda o: o.disableModuleNamescope(), []),
        (lambda o: o.enableStableNorm(True), ["enableStableNorm"]),
        (lambda o: o.enableStableNorm(False), []),
        (
            lambda o: o.Precision.enableStochasticRounding(True),
            ["Precision.enableStochasticRounding"],
        ),
        (lambda o: o.Precision.enableStochasticRounding(False), []),
        (lambda o: o.Precision.setPartialsType(torch.half), ["Precision.setPartialsType"]),
        (
            lambda o: o.Training.setConvolutionDithering(True),
            ["Training.setConvolutionDithering"],
        ),
        (lambda o: o.enableProfiling("x"), ["enableProfiling"]),
        (lambda o: o._Popart.setEngineOptions({"a": "b"}), ["_Popart.setEngineOptions"]),
        (lambda o: o._Popart.setPatterns({"A": True}), ["_Popart.setPatterns"]),
        (lambda o: o._Popart.set("autoRecomputation", 3), ['_Popart.set("autoRecomputation")']),
        (lambda o: o._Popart.set("enableOutlining", False), ['_Popart.set("enableOutlining")']),
        (
            lambda o: o._Popart.set("rearrangeAnchorsOnHost", True),
            ['_Popart.set("rearrangeAnchorsOnHost")'],
        ),
        (lambda o: o.TensorLocations.numIOTiles(32), ["TensorLocations.numIOTiles"]),
        (
            lambda o: o.TensorLocations.setWeightLocation(poptorch.TensorLocationSettings()),
            [],
        ),
        (
            lambda o: (
                o.TensorLocations.setActivationLocation(LOCATION)
                .setWeightLocation(LOCATION)
                .setOptimizerLocation(LOCATION)
                .setAccumulatorLocation(LOCATION)
            ),
            [
                "TensorLocations.setAccumulatorLocation",
                "TensorLocations.setActivationLocation",
                "TensorLocations.setOptimizerLocation",
                "TensorLocations.setWeightLocation",
            ],
        ),
        # These have an effect, or are refused.
        (lambda o: o.deviceIterations(2).replicationFactor(2).broadcastBuffers(False), []),
        (lambda o: o.enableSyntheticData(True).enableExecutableCaching("x"), []),
        (lambda o: o.updatableNamedBuffers(["x"]).logCycleCount(True).useIpuModel(True), []),
        (lambda o: o.Precision.enableFloatingPointExceptions(True), []),
        (lambda o: o.Training.setAutomaticLossScaling(True), []),
    ],
)
def test_options_without_effect_are_named(change, names, monkeypatch):
    for name in reports._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    options = poptorch.Options()
    change(options)
    assert ignored(options) == names


def test_environment_variables_without_effect_are_named(monkeypatch):
    for name in reports._ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    assert ignored(poptorch.Options()) == sorted(reports._ENVIRONMENT)


def test_each_name_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(reports, "_reported", set())
    for name in reports._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    options = poptorch.Options()
    report_ignored(options)
    report_ignored(options.modelName("a").logDir("b"))
    report_ignored(options.enableStableNorm(True))
    report_ignored(options)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "These options change nothing on this engine: logDir, modelName"),
        ("WARNING", "These options change nothing on this engine: enableStableNorm"),
    ]


def test_the_bar_measures_the_compilation(capsys):
    options = poptorch.Options()
    bar = options._progress_bar
    assert bar.compilation_time is None
    bar(1, 2)
    first = bar.compilation_time
    bar(2, 2)
    assert bar.compilation_time >= first
    assert "Graph compilation: 100%" in capsys.readouterr().err
    assert options.clone()._progress_bar.compilation_time is None
    again = bar.compilation_time
    bar(1, 1)
    assert bar.compilation_time is not again


def test_exactly_is_exact():
    """Of the helper that the tests of texts lean on."""
    with pytest.raises(ValueError, match=exactly("a.b")):
        raise ValueError("a.b")
    with pytest.raises(AssertionError), pytest.raises(ValueError, match=exactly("a.b")):
        raise ValueError("a.b!")
