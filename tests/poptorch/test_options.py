"""``Options``: setters, defaults, checks, freezing, copies, the dictionary for the compiler."""

import copy

import pytest
import torch

import ipufit.poptorch as poptorch
from tests.poptorch.option_texts import exactly, unexpected

FROZEN = (
    "Can't modify frozen Options: they belong to a model or a DataLoader. Set options before "
    "handing them over, or change a copy: options.clone()."
)


@pytest.fixture
def options(monkeypatch):
    for name in ("POPTORCH_DEFAULT_OPTIONS", "POPTORCH_CACHE_DIR", "POPLAR_ENGINE_OPTIONS"):
        monkeypatch.delenv(name, raising=False)
    return poptorch.Options()


LOCATION = poptorch.TensorLocationSettings().useOnChipStorage(False)

# A group, a setter, its arguments, and what the compiler is told then and was not before.
SETTERS = [
    ("", "autoRoundNumIPUs", (), {"auto_round_num_ipus": True}),
    ("", "broadcastBuffers", (False,), {"broadcast_buffers": False}),
    ("", "connectionType", (poptorch.ConnectionType.OnDemand,), {"connection_type": 1}),
    ("", "deviceIterations", (3,), {"device_iterations": 3}),
    ("", "enableExecutableCaching", ("x",), {"cachePath": "x", "enableEngineCaching": True}),
    ("", "enableExecutableCaching", (None,), {"enableEngineCaching": False}),
    ("", "enableStableNorm", (True,), {"enableStableNorm": True}),
    ("", "enableSyntheticData", (True,), {"syntheticDataMode": 2}),
    ("", "enableSyntheticData", (False,), {"syntheticDataMode": 0}),
    ("", "logCycleCount", (True,), {"instrumentWithHardwareCycleCounter": True}),
    ("", "logDir", ("x",), {"log_dir": "x"}),
    ("", "maxRepeatLogs", (None,), {"max_repeat_logs": 2**64 - 1}),
    ("", "maxRepeatLogs", (7,), {"max_repeat_logs": 7}),
    ("", "modelName", ("x",), {"model_name": "x"}),
    (
        "",
        "outputMode",
        (poptorch.OutputMode.EveryN, 3),
        {"output_mode": 1, "output_return_period": 3},
    ),
    ("", "outputMode", (poptorch.OutputMode.Sum,), {"output_mode": 3}),
    ("", "replicationFactor", (4,), {"replication_factor": 4}),
    (
        "",
        "setAvailableMemoryProportion",
        ({"IPU0": 0.5, "IPU12": 1},),
        {"available_memory_proportion": {0: 0.5, 12: 1.0}},
    ),
    ("", "setExecutionStrategy", (poptorch.ShardedExecution(),), {"execution_mode": 1}),
    ("", "syncPattern", (poptorch.SyncPattern.ReplicaAndLadder,), {"sync_pattern": 2}),
    ("", "updatableNamedBuffers", (["a", "b"],), {"updatableNamedBuffers": ["a", "b"]}),
    ("", "useIpuId", (5,), {"ipu_id": 5}),
    ("", "useIpuModel", (True,), {"use_model": True}),
    ("", "useOfflineIpuTarget", (), {"connection_type": 2, "ipu_version": 2}),
    ("", "useOfflineIpuTarget", (21,), {"connection_type": 2, "ipu_version": 21}),
    (
        "Distributed",
        "configureProcessId",
        (1, 3),
        {"distributed_process_id": 1, "num_distributed_processes": 3},
    ),
    ("Precision", "enableFloatingPointExceptions", (True,), {"enableFloatingPointChecks": True}),
    ("Precision", "enableStochasticRounding", (True,), {"enableStochasticRounding": True}),
    (
        "Precision",
        "setPartialsType",
        (torch.half,),
        {"partialsTypeMatMuls": "half", "convolutionOptions": {"partialsType": "half"}},
    ),
    (
        "Precision",
        "setPartialsType",
        (torch.float,),
        {"partialsTypeMatMuls": "float", "convolutionOptions": {"partialsType": "float"}},
    ),
    ("TensorLocations", "numIOTiles", (100,), {"numIOTiles": 100}),
    (
        "TensorLocations",
        "setAccumulatorLocation",
        (LOCATION,),
        {"location_accumulator": {"onChip": 0}},
    ),
    (
        "TensorLocations",
        "setActivationLocation",
        (LOCATION,),
        {"location_activation": {"onChip": 0}},
    ),
    ("TensorLocations", "setOptimizerLocation", (LOCATION,), {"location_optimizer": {"onChip": 0}}),
    ("TensorLocations", "setWeightLocation", (LOCATION,), {"location_weight": {"onChip": 0}}),
    (
        "Training",
        "accumulationAndReplicationReductionType",
        (poptorch.ReductionType.Sum,),
        {"accumulation_and_replication_reduction_type": poptorch.ReductionType.Sum},
    ),
    ("Training", "gradientAccumulation", (8,), {"gradient_accumulation": 8}),
    (
        "Training",
        "setAutomaticLossScaling",
        (True,),
        {"automaticLossScalingSettings.enabled": True},
    ),
    (
        "Training",
        "setConvolutionDithering",
        (True,),
        {"convolutionOptions": {"enableConvDithering": True}},
    ),
    (
        "Training",
        "setMeanAccumulationAndReplicationReductionStrategy",
        (poptorch.MeanReductionStrategy.Running,),
        {
            "meanAccumulationAndReplicationReductionStrategy": (
                poptorch.MeanReductionStrategy.Running
            )
        },
    ),
    ("_Popart", "set", ("any", [1]), {"any": [1]}),
    ("_Popart", "setEngineOptions", ({"a": "b"},), {"engineOptions": {"a": "b"}}),
    ("_Popart", "setPatterns", ({"A": True},), {"patterns": {"A": True}, "patterns_level": 2}),
    ("_Popart", "setPatterns", ({"A": True}, 0), {"patterns": {"A": True}, "patterns_level": 0}),
]


def told(options):
    """What the compiler is told, with a fixed output mode where none is set."""
    if options.defaultOutputMode():
        options = options.clone().outputMode(poptorch.OutputMode.All)
    values = options.toDict()
    del values["compilation_progress_bar_fn"]
    return values


@pytest.mark.parametrize(("group", "setter", "arguments", "expected"), SETTERS)
def test_a_setter_sets_its_options_and_returns_its_group(
    options, group, setter, arguments, expected
):
    target = getattr(options, group) if group else options
    before = told(options)
    assert getattr(target, setter)(*arguments) is target
    after = told(options)
    assert {key: after[key] for key in expected} == expected
    assert any(before.get(key) != value for key, value in expected.items())
    changed = {key for key in after if before.get(key) != after[key]}
    assert changed <= {*expected, "output_mode"}


@pytest.mark.parametrize(("group", "setter", "arguments", "expected"), SETTERS)
def test_frozen_options_take_nothing(options, group, setter, arguments, expected):
    before = repr(options)
    options._freeze()
    target = getattr(options, group) if group else options
    with pytest.raises(AttributeError, match=exactly(FROZEN)):
        getattr(target, setter)(*arguments)
    assert repr(options) == before


@pytest.mark.parametrize(
    ("setter", "arguments"),
    [
        ("appendToLocationExcludes", ("x",)),
        ("disableModuleNamescope", ()),
        ("enableProfiling", ("x",)),
        ("inputReplicaGrouping", (1, poptorch.CommGroupType.Consecutive)),
        ("randomSeed", (1,)),
        ("relaxOptimizerAttributesChecks", ()),
        ("showCompilationProgressBar", (False,)),
        ("sourceLocationExcludes", (["x"],)),
    ],
)
def test_frozen_options_refuse_the_other_setters_too(options, setter, arguments):
    """And before anything else happens: a seed that is refused is not set."""
    options._freeze()
    torch.manual_seed(7)
    with pytest.raises(AttributeError, match=exactly(FROZEN)):
        getattr(options, setter)(*arguments)
    assert torch.initial_seed() == 7
    assert options._source_location_excludes == poptorch.Options()._source_location_excludes
    assert "engineOptions" not in options._Popart.options


def test_the_defaults(options):
    values = told(options)
    assert values == {
        "accumulation_and_replication_reduction_type": poptorch.ReductionType.Mean,
        "anchored_tensors": {},
        "auto_round_num_ipus": False,
        "available_memory_proportion": {},
        "broadcast_buffers": True,
        "connection_type": 0,
        "device_iterations": 1,
        "distributed_process_id": 0,
        "execution_mode": 0,
        "gradient_accumulation": 1,
        "input_cgt": poptorch.CommGroupType.Consecutive,
        "input_group_size": 1,
        "instrumentWithHardwareCycleCounter": False,
        "ipuof_configs": {},
        "log_dir": ".",
        "max_repeat_logs": 4,
        "meanAccumulationAndReplicationReductionStrategy": poptorch.MeanReductionStrategy.Post,
        "num_distributed_processes": 1,
        "output_mode": 2,
        "output_return_period": 1,
        "rearrangeAnchorsOnHost": False,
        "replication_factor": 1,
        "sync_pattern": 0,
    }


def test_values_are_read_as_attributes_by_name_and_by_call(options):
    options.deviceIterations(3)
    assert options.device_iterations == 3
    assert options("device_iterations") == 3
    assert options.exists("device_iterations")
    assert not options.exists("ipu_id")
    options.useIpuId(1)
    options.deleteIfExists("ipu_id")
    assert not options.exists("ipu_id")


def test_values_are_set_as_attributes_under_the_same_checks(options):
    options.device_iterations = 5
    assert options.device_iterations == 5
    options.set(device_iterations=6, replication_factor=2)
    assert (options.device_iterations, options.replication_factor) == (6, 2)
    with pytest.raises(
        AssertionError,
        match=exactly("Unexpected type str for option device_iterations. Expected int, got 'a'."),
    ):
        options.device_iterations = "a"


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (
            lambda o: o.set(device_iteration=1),
            AssertionError,
            "There is no option device_iteration. Did you mean device_iterations?",
        ),
        (
            lambda o: setattr(o, "replication", 1),
            AssertionError,
            "There is no option replication. Did you mean replication_factor?",
        ),
        (
            lambda o: o.deviceIteration(1),
            AttributeError,
            "There is no option deviceIteration. Did you mean deviceIterations?",
        ),
        (
            lambda o: setattr(o, "_new", 1),
            AttributeError,
            "There is no private attribute _new. Valid names are _distributed, "
            "_execution_strategy, _graphProcessing, _is_frozen, _jit, _module_namescope_enabled, "
            "_popart, _progress_bar, _relax_optimizer_checks, _show_compilation_progress_bar, "
            "_source_location_excludes, _tensor_locations, _training, _values.",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(options, act, kind, text):
    with pytest.raises(kind, match=exactly(text)):
        act(options)


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda o: o.autoRoundNumIPUs(1), unexpected("auto_round_num_ipus", "bool", 1)),
        (lambda o: o.broadcastBuffers(0), unexpected("broadcast_buffers", "bool", 0)),
        (lambda o: o.connectionType(0), unexpected("connectionType", "ConnectionType", 0)),
        (lambda o: o.deviceIterations(1.5), unexpected("device_iterations", "int", 1.5)),
        (lambda o: o.deviceIterations(True), unexpected("device_iterations", "int", True)),
        (
            lambda o: o.enableExecutableCaching(1),
            unexpected("enableExecutableCaching", "str or PathLike", 1),
        ),
        (lambda o: o.enableProfiling(1), unexpected("enableProfiling", "str or PathLike", 1)),
        (lambda o: o.enableStableNorm(1), unexpected("enableStableNorm", "bool", 1)),
        (
            lambda o: o.enableSyntheticData("2"),
            unexpected("enableSyntheticData", "bool or int", "2"),
        ),
        (
            lambda o: o.inputReplicaGrouping(2.0, poptorch.CommGroupType.Consecutive),
            unexpected("input_group_size", "int", 2.0),
        ),
        (
            lambda o: o.inputReplicaGrouping(1, 1),
            unexpected("input_cgt", "CommGroupType", 1),
        ),
        (lambda o: o.logCycleCount("yes"), unexpected("logCycleCount", "bool", "yes")),
        (lambda o: o.logDir(1), unexpected("log_dir", "str", 1)),
        (lambda o: o.maxRepeatLogs("4"), unexpected("max_repeat_logs", "int", "4")),
        (lambda o: o.modelName(1), unexpected("model_name", "str", 1)),
        (lambda o: o.outputMode(2), unexpected("outputMode", "OutputMode", 2)),
        (
            lambda o: o.outputMode(poptorch.OutputMode.EveryN, 2.0),
            unexpected("output_return_period", "int", 2.0),
        ),
        (lambda o: o.randomSeed("1"), unexpected("random_seed", "int", "1")),
        (
            lambda o: o.relaxOptimizerAttributesChecks(1),
            unexpected("relaxOptimizerAttributesChecks", "bool", 1),
        ),
        (lambda o: o.replicationFactor("4"), unexpected("replication_factor", "int", "4")),
        (
            lambda o: o.setAvailableMemoryProportion([0.5]),
            unexpected("available_memory_proportion", "dict", [0.5]),
        ),
        (
            lambda o: o.setAvailableMemoryProportion({"IPU0": "0.5"}),
            unexpected("available_memory_proportion['IPU0']", "float or int", "0.5"),
        ),
        (
            lambda o: o.showCompilationProgressBar(1),
            unexpected("showCompilationProgressBar", "bool", 1),
        ),
        (
            lambda o: o.sourceLocationExcludes("a"),
            unexpected("sourceLocationExcludes", "list or tuple", "a"),
        ),
        (
            lambda o: o.appendToLocationExcludes(1),
            unexpected("sourceLocationExcludes", "str", 1),
        ),
        (lambda o: o.syncPattern(1), unexpected("syncPattern", "SyncPattern", 1)),
        (
            lambda o: o.updatableNamedBuffers("a"),
            unexpected("updatableNamedBuffers", "list or tuple", "a"),
        ),
        (
            lambda o: o.updatableNamedBuffers([1]),
            unexpected("updatableNamedBuffers", "str", 1),
        ),
        (lambda o: o.useIpuId("0"), unexpected("ipu_id", "int", "0")),
        (lambda o: o.useIpuModel(1), unexpected("use_model", "bool", 1)),
        (lambda o: o.useOfflineIpuTarget("ipu2"), unexpected("ipu_version", "int", "ipu2")),
        (lambda o: o.anchorTensor(1, "long"), unexpected("short_name", "str", 1)),
        (lambda o: o.anchorTensor("short", None), unexpected("long_name", "str", None)),
        (lambda o: o.anchorTensor("s", "l", 1), unexpected("output_mode", "OutputMode", 1)),
        (
            lambda o: o.Distributed.configureProcessId("1", 2),
            unexpected("distributed_process_id", "int", "1"),
        ),
        (
            lambda o: o.Distributed.configureProcessId(1, 2.0),
            unexpected("num_distributed_processes", "int", 2.0),
        ),
        (
            lambda o: o.Precision.enableStochasticRounding(None),
            unexpected("enableStochasticRounding", "bool", None),
        ),
        (
            lambda o: o.Training.gradientAccumulation("4"),
            unexpected("gradient_accumulation", "int", "4"),
        ),
        (
            lambda o: o.Training.setAutomaticLossScaling(1),
            unexpected("setAutomaticLossScaling", "bool", 1),
        ),
        (
            lambda o: o.Training.setConvolutionDithering(1),
            unexpected("setConvolutionDithering", "bool", 1),
        ),
        (
            lambda o: o.Training.setMeanAccumulationAndReplicationReductionStrategy(1),
            unexpected(
                "meanAccumulationAndReplicationReductionStrategy", "MeanReductionStrategy", 1
            ),
        ),
        (
            lambda o: o.TensorLocations.setWeightLocation({"onChip": 0}),
            unexpected("location_weight", "TensorLocationSettings", {"onChip": 0}),
        ),
        (lambda o: o.TensorLocations.numIOTiles("32"), unexpected("numIOTiles", "int", "32")),
        (lambda o: o._Popart.set(1, 1), unexpected("key", "str", 1)),
        (lambda o: o._Popart.setEngineOptions("a"), unexpected("engineOptions", "dict", "a")),
        (lambda o: o._Popart.setPatterns(["A"]), unexpected("patterns", "dict", ["A"])),
        (lambda o: o._Popart.setPatterns({}, "2"), unexpected("level", "int", "2")),
        (
            lambda o: o.setExecutionStrategy("pipelined"),
            "Unexpected type str for option setExecutionStrategy. Expected "
            "poptorch.PipelinedExecution, ShardedExecution, ParallelPhasedExecution or "
            "SerialPhasedExecution, got 'pipelined'.",
        ),
        (
            lambda o: o.Precision.enableFloatingPointExceptions(1),
            "enableFloatingPointExceptions needs to be set to a bool, got 1.",
        ),
        (
            lambda o: o.setAvailableMemoryProportion({"0": 0.5}),
            "Available memory is set for each IPU, by \"IPU\" and its number, got '0'. "
            'Use {"IPU0": 0.5}.',
        ),
        (
            lambda o: o.setAvailableMemoryProportion({"IPU3": 1.5}),
            "The available memory of IPU3 must be in 0 ... 1, got 1.5.",
        ),
        (
            lambda o: o.outputMode(poptorch.OutputMode.EveryN),
            "OutputMode.EveryN needs output_return_period, a positive integer, got None. Use "
            "outputMode(poptorch.OutputMode.EveryN, 2) for every second device iteration.",
        ),
        (
            lambda o: o.outputMode(poptorch.OutputMode.EveryN, 0),
            "OutputMode.EveryN needs output_return_period, a positive integer, got 0. Use "
            "outputMode(poptorch.OutputMode.EveryN, 2) for every second device iteration.",
        ),
        (
            lambda o: o.TensorLocations.numIOTiles(10),
            "numIOTiles must be an even number between 32 and 192. Got 10; the nearest is 32.",
        ),
        (
            lambda o: o.TensorLocations.numIOTiles(193),
            "numIOTiles must be an even number between 32 and 192. Got 193; the nearest is 192.",
        ),
        (
            lambda o: o.toDict(),
            "toDict() needs an output mode other than Default, which means another mode for "
            "training than for inference. Call options.outputMode(poptorch.OutputMode.All).",
        ),
    ],
)
def test_bad_values_are_refused_and_change_nothing(options, act, text):
    before = repr(options)
    with pytest.raises(AssertionError, match=exactly(text)):
        act(options)
    assert repr(options) == before


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (
            lambda o: o.Training.accumulationAndReplicationReductionType(
                poptorch.ReductionType.NoReduction
            ),
            "accumulationAndReplicationReductionType must be poptorch.ReductionType.Mean or "
            f"poptorch.ReductionType.Sum, got {poptorch.ReductionType.NoReduction!r}.",
        ),
        (
            lambda o: o.Training.accumulationAndReplicationReductionType(1),
            "accumulationAndReplicationReductionType must be poptorch.ReductionType.Mean or "
            "poptorch.ReductionType.Sum, got 1.",
        ),
        (
            lambda o: o.Precision.setPartialsType(torch.bfloat16),
            "parameter to setPartialsType should be either torch.float or torch.half, got "
            "torch.bfloat16.",
        ),
        (
            lambda o: o.Precision.setPartialsType("half"),
            "parameter to setPartialsType should be either torch.float or torch.half, got 'half'.",
        ),
        (
            lambda o: o.Precision.runningStatisticsAlwaysFloat(1),
            "runningStatisticsAlwaysFloat needs to be set to a bool, got 1. Delete the call: "
            "statistics keep the module's type.",
        ),
        (
            lambda o: o.Jit.traceModel(True),
            "options.Jit.traceModel(True) is no longer supported. Delete the call: models are "
            "recorded as they run.",
        ),
        (
            lambda o: o.Distributed.configureProcessId(2, 2),
            "process_id must be in 0 ... num_processes - 1, got process_id=2 and num_processes=2. "
            "Number the processes from 0.",
        ),
        (
            lambda o: o.replicationFactor(4).inputReplicaGrouping(4, poptorch.CommGroupType.All),
            "CommGroupType.All is no grouping of inputs. For one group of all replicas use "
            "inputReplicaGrouping(4, poptorch.CommGroupType.Consecutive).",
        ),
        (
            lambda o: o.inputReplicaGrouping(2, poptorch.CommGroupType.Orthogonal),
            "A group of 2 replicas needs as many replicas, got replicationFactor(1). Call "
            "replicationFactor first, with a multiple.",
        ),
        (
            lambda o: o.replicationFactor(6).inputReplicaGrouping(
                4, poptorch.CommGroupType.Consecutive
            ),
            "The size of a group must divide the 6 replicas, got 4. Use one of [1, 2, 3, 6].",
        ),
        (
            lambda o: o.inputReplicaGrouping(0, poptorch.CommGroupType.Consecutive),
            "The size of a group must divide the 1 replicas, got 0. Use one of [1].",
        ),
    ],
)
def test_values_that_can_not_be_are_value_errors(options, act, text):
    with pytest.raises(ValueError, match=exactly(text)):
        act(options)


def test_input_groups_are_kept(options):
    options.replicationFactor(6).inputReplicaGrouping(3, poptorch.CommGroupType.Orthogonal)
    assert (options.input_group_size, options.input_cgt) == (3, poptorch.CommGroupType.Orthogonal)
    options.inputReplicaGrouping(3, poptorch.CommGroupType.NoGrouping)
    assert (options.input_group_size, options.input_cgt) == (1, poptorch.CommGroupType.Consecutive)


def test_counts_may_be_any_int_until_a_model_compiles(options):
    """PopTorch's setters look at the type alone, and scripts pass through invalid states."""
    options.deviceIterations(0).replicationFactor(-1).Training.gradientAccumulation(0)
    assert (options.device_iterations, options.replication_factor) == (0, -1)


def test_a_period_without_every_n_is_noted_and_dropped(options, caplog):
    poptorch.logger.setLevel("INFO")
    try:
        options.outputMode(poptorch.OutputMode.Sum, 5)
    finally:
        poptorch.setLogLevel("WARN")
    assert options.output_return_period == 1
    assert [record.getMessage() for record in caplog.records] == [
        "output_return_period=5 is not used: it belongs to OutputMode.EveryN, not to OutputMode.Sum"
    ]


def test_the_output_mode_is_the_default_until_it_is_set(options):
    assert options.defaultOutputMode()
    assert not options.outputMode(poptorch.OutputMode.All).defaultOutputMode()
    assert options.outputMode(poptorch.OutputMode.Default).defaultOutputMode()


def test_anchors_are_kept_also_by_frozen_options(options):
    options._freeze()
    assert options.anchorTensor("a", "long a") is None
    options.anchorTensor("b", "long b", poptorch.OutputMode.EveryN, 3)
    options.anchorTensor("c", "long c", poptorch.OutputMode.Sum, 3)
    assert options.anchored_tensors == {
        "a": ["long a", True, None, 1],
        "b": ["long b", False, poptorch.OutputMode.EveryN, 3],
        "c": ["long c", False, poptorch.OutputMode.Sum, 1],
    }


def test_a_random_seed_is_torchs_at_once(options):
    options.randomSeed(42)
    assert torch.initial_seed() == 42
    assert options.random_seed == 42


@pytest.mark.parametrize(
    ("name", "argument", "warning"),
    [
        (
            "Jit.traceModel",
            False,
            "[Deprecated] options.Jit.traceModel() will be removed: models are recorded as they "
            "run. Delete the call.",
        ),
        (
            "Precision.halfFloatCasting",
            poptorch.HalfFloatCastingBehavior.Default,
            "[Deprecated] options.Precision.halfFloatCasting() will be removed: half and float "
            "mix as in torch. Delete the call.",
        ),
        (
            "Precision.runningStatisticsAlwaysFloat",
            False,
            "[Deprecated] options.Precision.runningStatisticsAlwaysFloat() will be removed: "
            "statistics have the type of the module's. Delete the call.",
        ),
    ],
)
def test_withdrawn_setters_warn_and_do_nothing(options, caplog, name, argument, warning):
    before = repr(options)
    group, setter = name.split(".")
    target = getattr(options, group)
    assert getattr(target, setter)(argument) is target
    assert [record.getMessage() for record in caplog.records] == [warning]
    assert repr(options) == before


def test_partials_and_dithering_replace_each_other(options):
    options.Precision.setPartialsType(torch.half)
    options.Training.setConvolutionDithering(True)
    assert options._Popart.options["convolutionOptions"] == {"enableConvDithering": True}
    options.Precision.setPartialsType(torch.half)
    assert options._Popart.options["convolutionOptions"] == {"partialsType": "half"}


def test_profiling_keeps_other_engine_options(options, caplog, monkeypatch):
    options._Popart.setEngineOptions({"mine": "1"})
    assert options.enableProfiling() is options
    assert options._Popart.options["engineOptions"] == {
        "mine": "1",
        "autoReport.all": "true",
        "autoReport.directory": ".",
        "debug.allowOutOfMemory": "true",
    }
    assert not caplog.records
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "true"}')
    options.enableProfiling("folder")
    assert options._Popart.options["engineOptions"]["autoReport.directory"] == "folder"
    assert [record.getMessage() for record in caplog.records] == [
        "POPLAR_ENGINE_OPTIONS sets profiling too, and comes first: check its content."
    ]


def test_options_of_the_host_side_are_kept(options):
    excludes = list(options._source_location_excludes)
    assert options.appendToLocationExcludes("a", "b") is options
    assert options._source_location_excludes == [*excludes, "a", "b"]
    assert options.sourceLocationExcludes(["c"]) is options
    assert options._source_location_excludes == ["c"]
    assert options.relaxOptimizerAttributesChecks() is options
    assert options._relax_optimizer_checks
    assert options.disableModuleNamescope() is options
    assert not options._module_namescope_enabled
    assert options.showCompilationProgressBar(False) is options
    values = options.outputMode(poptorch.OutputMode.All).toDict()
    assert "compilation_progress_bar_fn" not in values


@pytest.mark.parametrize(
    ("setter", "value", "key", "kept"),
    [
        ("minElementsForOffChip", 4, "minElementsForOffChip", 4),
        ("minElementsForReplicatedTensorSharding", 5, "minElementsForReplicatedTensorSharding", 5),
        ("useIOTilesToLoad", True, "useIOTilesToLoad", 1),
        ("useIOTilesToStore", False, "useIOTilesToStore", 0),
        ("useOnChipStorage", False, "onChip", 0),
        ("useReplicatedTensorSharding", True, "useReplicatedTensorSharding", 1),
    ],
)
def test_locations_are_settings_of_their_own(setter, value, key, kept):
    settings = poptorch.TensorLocationSettings()
    assert getattr(settings, setter)(value) is settings
    assert settings.toDict() == {key: kept}
    kind = "int" if setter.startswith("min") else "bool"
    with pytest.raises(AssertionError, match=exactly(unexpected(key, kind, "x"))):
        getattr(settings, setter)("x")


def test_on_chip_storage_can_be_left_open_again():
    settings = poptorch.TensorLocationSettings().useOnChipStorage().useOnChipStorage(None)
    assert settings.toDict() == {}


def test_a_location_is_copied_when_it_is_set(options):
    settings = poptorch.TensorLocationSettings().useOnChipStorage(True)
    options.TensorLocations.setWeightLocation(settings)
    settings.useOnChipStorage(False)
    assert options.TensorLocations.location_weight == {"onChip": 1}


@pytest.mark.parametrize("copied", [lambda o: o.clone(), copy.deepcopy])
def test_a_copy_is_unfrozen_and_independent(options, copied):
    options.deviceIterations(5).Training.gradientAccumulation(4)
    options.anchorTensor("a", "long")
    options.TensorLocations.setWeightLocation(LOCATION)
    options._freeze()
    other = copied(options)
    assert repr(other) == repr(options)
    other.deviceIterations(6).Training.gradientAccumulation(7)
    other.anchorTensor("b", "long")
    other.Distributed.configureProcessId(1, 2)
    other.Precision.setPartialsType(torch.half)
    other.TensorLocations.numIOTiles(32)
    assert options.device_iterations == 5
    assert options.Training.gradient_accumulation == 4
    assert list(options.anchored_tensors) == ["a"]
    assert options.Distributed.numProcesses == 1
    assert not options.TensorLocations.exists("numIOTiles")
    # The groups of a copy share the copy's compiler options, as those of the original do.
    assert other._Popart.options["partialsTypeMatMuls"] == "half"
    assert "partialsTypeMatMuls" not in options._Popart.options


def test_frozen_options_can_be_thawed(options):
    options._freeze()
    options._unfreeze()
    options.deviceIterations(2).Training.gradientAccumulation(2)
    options._Popart.set("any", 1)
    options.checkIsFrozen()


def test_the_state_of_options_is_taken_as_it_is(options):
    """As it is when options go to another process: what is frozen stays so."""
    options.deviceIterations(4)._freeze()
    sent = copy.copy(options)
    assert repr(sent) == repr(options)
    with pytest.raises(AttributeError, match=exactly(FROZEN)):
        sent.deviceIterations(5)


def test_a_subclass_can_take_setters_away(options):
    """As launchers of several processes do with replicas and processes."""

    class Group(poptorch.options._DistributedOptions):
        def disable(self):
            raise RuntimeError("Cannot call `Distributed.disable`")

    class Launched(poptorch.Options):
        def useIpuId(self, ipu_id):
            raise RuntimeError("Cannot call `useIpuId`")

    launched = Launched()
    launched.Distributed.__class__ = Group
    copied = launched.clone()
    for one in (launched, copied):
        assert isinstance(one, Launched)
        with pytest.raises(RuntimeError, match=exactly("Cannot call `useIpuId`")):
            one.useIpuId(1)
        with pytest.raises(RuntimeError, match=exactly("Cannot call `Distributed.disable`")):
            one.Distributed.disable()


def test_one_option_set_in_two_places_is_refused(options):
    options.outputMode(poptorch.OutputMode.All)._Popart.set("device_iterations", 2)
    with pytest.raises(
        AssertionError,
        match=exactly(
            "These options are set in two places: device_iterations. Keep their own setters, and "
            "leave them out of options._Popart.set."
        ),
    ):
        options.toDict()


def test_the_printed_form_says_every_value(options):
    options.replicationFactor(4).Training.gradientAccumulation(3)
    options.enableStableNorm(True)
    text = repr(options)
    assert text.startswith("Options(replication_factor=4, ")
    assert "Training=_TrainingOptions(gradient_accumulation=3, " in text
    assert "enableStableNorm=True" in text
    assert repr(poptorch.Options()) == repr(poptorch.Options())


def test_processes_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    group = poptorch.Options().Distributed
    assert (group.processId, group.numProcesses) == (2, 4)
    assert group.disable() is group
    assert (group.processId, group.numProcesses) == (0, 1)
    monkeypatch.setenv("SIZE", "8")
    monkeypatch.setenv("RANK", "7")
    assert group.setEnvVarNames("SIZE", "RANK") is group
    assert (group.processId, group.numProcesses) == (7, 8)
    monkeypatch.setenv("RANK", "seven")
    with pytest.raises(
        ValueError,
        match=exactly(
            "The environment variable RANK must be an integer, got 'seven'. Unset it, or call "
            "options.Distributed.configureProcessId(process_id, num_processes)."
        ),
    ):
        group.setEnvVarNames("SIZE", "RANK")
    with pytest.raises(AssertionError):
        group.processId = 3


def test_a_cache_is_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "folder")
    values = poptorch.Options()._Popart.options
    assert (values["cachePath"], values["enableEngineCaching"]) == ("folder", True)


def test_attributes_are_nested_and_restored():
    current = lambda: poptorch.Attribute._current_attrs  # noqa: E731
    with poptorch.Attribute(a={"x": 1, "y": 2}):
        with poptorch.Attribute(a={"y": 3}, b={"z": 4}):
            assert current() == {"a": {"x": 1, "y": 3}, "b": {"z": 4}}
        assert current() == {"a": {"x": 1, "y": 2}}
    assert current() == {}
    with pytest.raises(AssertionError, match=exactly(unexpected("Attribute(a=...)", "dict", 1))):
        poptorch.Attribute(a=1)
