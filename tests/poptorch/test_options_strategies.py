"""Stages, phases and execution strategies: what they hold and what they refuse."""

import copy

import pytest

import ipufit.poptorch as poptorch
from tests.poptorch.option_texts import exactly, unexpected


def stages(strategy):
    """The stage's number of each block."""
    return {block: stage._stage_id for block, stage in strategy._block_map.items()}


def phases(strategy):
    """The phase's number of each block."""
    return {block: stage._phase_id for block, stage in strategy._block_map.items()}


@pytest.mark.parametrize("kind", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
def test_a_pipeline_is_made_of_stages_blocks_and_lists(kind):
    strategy = kind("A", poptorch.Stage("B", "C"), ["D", "E"], ("F",))
    assert stages(strategy) == {"A": 0, "B": 1, "C": 1, "D": 2, "E": 2, "F": 3}
    assert strategy.stage("B") is strategy.stage("C")
    assert strategy.stage("A").ipu(5) is strategy.stage("A")
    assert strategy.stage("A")._ipu == 5


def test_stages_follow_from_the_blocks_where_none_are_named():
    assert poptorch.PipelinedExecution()._auto_stage == poptorch.AutoStage.SameAsIpu
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    assert strategy._auto_stage == poptorch.AutoStage.AutoIncrement
    assert stages(strategy) == {}


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (poptorch.PipelinedExecution(), {"execution_mode": 0}),
        (poptorch.ShardedExecution(), {"execution_mode": 1}),
        (
            poptorch.ParallelPhasedExecution("A").sendTensorsOffChipAfterFwd(),
            {
                "execution_mode": 2,
                "separate_backward_phase": False,
                "serial_phases_execution": False,
                "tensors_liveness": 1,
            },
        ),
        (
            poptorch.ParallelPhasedExecution("A")
            .sendTensorsOffChipAfterFwd()
            .sendTensorsOffChipAfterFwd(False),
            {
                "execution_mode": 2,
                "separate_backward_phase": False,
                "serial_phases_execution": False,
                "tensors_liveness": 0,
            },
        ),
        (
            poptorch.SerialPhasedExecution("A")
            .setTensorsLiveness(poptorch.Liveness.OffChipAfterEachPhase)
            .useSeparateBackwardPhase(),
            {
                "execution_mode": 2,
                "separate_backward_phase": True,
                "serial_phases_execution": True,
                "tensors_liveness": 3,
            },
        ),
    ],
)
def test_the_compiler_is_told_the_strategy(strategy, told):
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    values = options.setExecutionStrategy(strategy).toDict()
    assert {key: values[key] for key in told} == told
    assert strategy.onStartTracing() is None
    assert strategy.onEndTracing() is None


@pytest.mark.parametrize("kind", [poptorch.SerialPhasedExecution, poptorch.ParallelPhasedExecution])
@pytest.mark.parametrize(
    ("arguments", "expected", "counts"),
    [
        ((poptorch.Phase("A", "B"), poptorch.Phase("C")), {"A": 0, "B": 0, "C": 1}, [1, 1]),
        (([poptorch.Stage("A"), poptorch.Stage("B")], "C"), {"A": 0, "B": 0, "C": 1}, [2, 1]),
        ((["A", "B"], poptorch.Stage("C")), {"A": 0, "B": 0, "C": 1}, [1, 1]),
    ],
)
def test_phases_are_made_of_phases_stages_and_lists(kind, arguments, expected, counts):
    # Stages remember their phase: each case makes its own.
    strategy = kind(*copy.deepcopy(arguments))
    assert phases(strategy) == expected
    assert [len(strategy.phase(i).stages) for i in range(2)] == counts
    assert strategy.phase(0).stage(0) is strategy.stage("A")
    assert strategy.phase(1).ipus(3) is None
    assert strategy.stage("C")._ipu == 3


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [
        (
            lambda: poptorch.Stage("A", 1),
            AssertionError,
            "A stage takes names of blocks, which are strings, got ('A', 1). Use "
            'poptorch.Stage("A", "B").',
        ),
        (lambda: poptorch.Stage("A").ipu("0"), AssertionError, unexpected("ipu", "int", "0")),
        (
            lambda: poptorch.Stage("A").ipu(-1),
            AssertionError,
            "IPUs are numbered from 0, got ipu=-1.",
        ),
        (
            lambda: poptorch.Phase("A", poptorch.Stage("B")),
            AssertionError,
            "A phase takes stages, or names of blocks (strings), but not both; got "
            "['str', 'Stage'].",
        ),
        (
            lambda: poptorch.Phase("A", "B").ipus(0, 1),
            AssertionError,
            "This phase has 1 stages, got 2 IPUs. Give one IPU for each stage.",
        ),
        (
            lambda: poptorch.PipelinedExecution("A", 1),
            AssertionError,
            "A stage is a poptorch.Stage, a block ID (a string) or a list of block IDs, got int.",
        ),
        (
            lambda: poptorch.ShardedExecution("A", ["B", "A"]),
            AssertionError,
            "The block 'A' is in more than one stage. Name each block once.",
        ),
        (
            lambda: poptorch.SerialPhasedExecution("A", ["B", "A"]),
            AssertionError,
            "The block 'A' is in more than one stage. Name each block once.",
        ),
        (
            lambda: poptorch.PipelinedExecution("A", "B").stage("C"),
            AssertionError,
            "Unknown block 'C': this strategy names ['A', 'B']. Use one of them.",
        ),
        (
            lambda: poptorch.ParallelPhasedExecution(),
            AssertionError,
            "Phased execution needs its phases, which can't follow from the blocks, got none. Use "
            'poptorch.SerialPhasedExecution(["A"], ["B"]).',
        ),
        (
            lambda: poptorch.SerialPhasedExecution("A").phase(-1),
            AssertionError,
            "Phases are numbered from 0, got -1. Use an int of at least 0.",
        ),
        (
            lambda: poptorch.SerialPhasedExecution("A").phase("A"),
            AssertionError,
            "Phases are numbered from 0, got 'A'. Use an int of at least 0.",
        ),
        (
            lambda: poptorch.SerialPhasedExecution("A").phase(1),
            IndexError,
            "There are 1 phases, from 0; got 1.",
        ),
        (
            lambda: poptorch.SerialPhasedExecution("A").useSeparateBackwardPhase(1),
            AssertionError,
            unexpected("useSeparateBackwardPhase", "bool", 1),
        ),
        (
            lambda: poptorch.SerialPhasedExecution("A").setTensorsLiveness(1),
            AssertionError,
            unexpected("setTensorsLiveness", "Liveness", 1),
        ),
        (
            lambda: poptorch.ParallelPhasedExecution("A").sendTensorsOffChipAfterFwd(1),
            AssertionError,
            unexpected("sendTensorsOffChipAfterFwd", "bool", 1),
        ),
    ],
)
def test_what_is_no_stage_phase_or_strategy_is_refused(act, kind, text):
    with pytest.raises(kind, match=exactly(text)):
        act()


def test_a_copy_of_options_has_a_strategy_of_its_own():
    options = poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution("A"))
    copied = options.clone()
    options._execution_strategy.stage("A").ipu(3)
    assert copied._execution_strategy.stage("A")._ipu is None
