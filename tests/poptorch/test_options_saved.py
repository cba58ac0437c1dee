"""Options as values, for files."""

import json

import pytest
import torch

import ipufit.poptorch as poptorch
from ipufit.poptorch._codec import make_codec
from ipufit.poptorch._object_files import options_from_values, options_to_values


def through_a_file(options):
    document, tensors = make_codec().encode(options_to_values(options))
    return options_from_values(make_codec().decode(json.loads(json.dumps(document)), tensors))


def everything():
    """Options with every kind of value away from its default."""
    options = poptorch.Options().deviceIterations(4).replicationFactor(6).broadcastBuffers(False)
    options.inputReplicaGrouping(3, poptorch.CommGroupType.Orthogonal)
    options.outputMode(poptorch.OutputMode.EveryN, 2).setAvailableMemoryProportion({"IPU1": 0.5})
    options.anchorTensor("a", "long")
    options.anchorTensor("b", "long", poptorch.OutputMode.EveryN, 2)
    options.useIpuId(3).randomSeed(5).modelName("m").sourceLocationExcludes(["x"])
    options.disableModuleNamescope().relaxOptimizerAttributesChecks()
    options.showCompilationProgressBar(False).Distributed.configureProcessId(1, 3)
    options.TensorLocations.numIOTiles(32).setWeightLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False)
    )
    options.Training.gradientAccumulation(2).accumulationAndReplicationReductionType(
        poptorch.ReductionType.Sum
    )
    options.Precision.setPartialsType(torch.half)
    options._Popart.set("some", [1, 2.5, None, (True, {"a"}), {1: "b"}])
    return options


def test_options_come_back_as_they_were():
    options = everything()
    options._freeze()
    back = through_a_file(options)
    assert type(back) is poptorch.Options
    assert repr(back) == repr(options)
    assert back.toDict() == options.toDict()
    for name in (
        "_module_namescope_enabled",
        "_relax_optimizer_checks",
        "_show_compilation_progress_bar",
        "_source_location_excludes",
    ):
        assert getattr(back, name) == getattr(options, name)
    assert back.Training.accumulation_and_replication_reduction_type is poptorch.ReductionType.Sum
    # What comes back can be changed, and its groups share its compiler options.
    back.deviceIterations(5).Precision.setPartialsType(torch.float)
    assert back._Popart.options["partialsTypeMatMuls"] == "float"
    assert options._Popart.options["partialsTypeMatMuls"] == "half"


def test_the_environment_has_no_say_in_them(monkeypatch):
    options = poptorch.Options()
    data = options_to_values(options)
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"deviceIterations": 9, "randomSeed": 3}')
    torch.manual_seed(7)
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "folder")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert repr(options_from_values(data)) == repr(options)
    assert torch.initial_seed() == 7


@pytest.mark.parametrize(
    "strategy",
    [
        poptorch.PipelinedExecution(),
        poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement),
        poptorch.PipelinedExecution("A", poptorch.Stage("B", "C").ipu(3), ["D"]),
        poptorch.ShardedExecution("A", "B"),
        poptorch.ParallelPhasedExecution(
            [poptorch.Stage("A").ipu(0), poptorch.Stage("B").ipu(2)], ["C", "D"]
        ).sendTensorsOffChipAfterFwd(),
        poptorch.SerialPhasedExecution("A", "B")
        .setTensorsLiveness(poptorch.Liveness.OffChipAfterEachPhase)
        .useSeparateBackwardPhase(),
    ],
)
def test_strategies_come_back_as_they_were(strategy):
    back = through_a_file(poptorch.Options().setExecutionStrategy(strategy))._execution_strategy
    assert type(back) is type(strategy)
    assert back.backendOptions() == strategy.backendOptions()
    assert getattr(back, "_auto_stage", None) == getattr(strategy, "_auto_stage", None)

    def stages(one):
        return {
            block: (stage.blocks, stage._stage_id, stage._phase_id, stage._ipu)
            for block, stage in one._block_map.items()
        }

    assert stages(back) == stages(strategy)


def test_what_is_not_plain_is_refused():
    options = poptorch.Options()
    options._Popart.set("dotChecks", [len])
    with pytest.raises(poptorch.Error) as refused:
        through_a_file(options)
    assert refused.value.message == (
        "a file holds tensors, numbers, texts, None, and lists, tuples, sets and dicts of them, "
        "but 'compiler.dotChecks.0' is of type builtin_function_or_method. Use one of these "
        "instead."
    )

    class Own(poptorch.ShardedExecution):
        pass

    with pytest.raises(poptorch.Error) as refused:
        options_to_values(poptorch.Options().setExecutionStrategy(Own()))
    assert refused.value.message == (
        "An execution strategy in a file is one of ParallelPhasedExecution, PipelinedExecution, "
        "SerialPhasedExecution, ShardedExecution, got Own."
    )
