"""Where blocks go, and what a device would refuse about them."""

import pytest

import ipufit.poptorch as poptorch
from ipufit.poptorch._options.compiler import model_options
from ipufit.poptorch._placement import PlacedBlock, place_on_ipus, placed_blocks, uses_ipu_model
from tests.poptorch.option_texts import exactly


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL", "POPTORCH_DEFAULT_OPTIONS"):
        monkeypatch.delenv(name, raising=False)


def inference(entered, strategy=None, iterations=64, overlapped=False, change=lambda options: None):
    """Place an inference model that has micro-batches enough."""
    options = poptorch.Options().deviceIterations(iterations)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    change(options)
    return place_on_ipus(model_options(options, False), entered, False, overlapped)


def training(entered, accumulation, strategy=None):
    options = poptorch.Options()
    options.Training.gradientAccumulation(accumulation)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    return place_on_ipus(model_options(options, True), entered, True)


def where(entered, strategy=None):
    """Block: (stage, phase, IPU), of the last entry into it."""
    strategy = strategy or poptorch.Options()._execution_strategy
    return {block: tuple(place) for block, *place in placed_blocks(strategy, entered)}


def refused(call):
    with pytest.raises(poptorch.Error) as error:
        call()
    assert error.value.type == "poptorch_py_error"
    return error.value.message


def test_a_model_without_blocks_is_on_one_ipu():
    assert inference([], iterations=1) == training([], 1) == 1


def test_by_default_a_block_has_the_stage_of_its_ipu():
    entered = [("0", 0), ("1", 1), ("2", 0)]
    assert placed_blocks(poptorch.Options()._execution_strategy, entered) == [
        PlacedBlock("0", 0, -1, 0),
        PlacedBlock("1", 1, -1, 1),
        PlacedBlock("2", 0, -1, 0),
    ]
    assert inference(entered) == 2


def test_stages_can_be_counted_up_instead():
    """From 1: what comes before the first block is stage 0."""
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    entered = [("0", 0), ("1", 1), ("0", 0), ("2", None)]
    assert inference(entered, strategy) == 4
    assert where(entered, strategy) == {"0": (1, -1, 0), "1": (2, -1, 1), "2": (3, -1, 3)}


def test_named_stages_give_blocks_their_stage_and_maybe_their_ipu():
    strategy = poptorch.PipelinedExecution("A", poptorch.Stage("B", "C").ipu(3), ["D"])
    entered = [("A", None), ("B", 1), ("C", None), ("D", 1)]
    assert where(entered, strategy) == {
        "A": (0, -1, 0),  # its stage's number
        "B": (1, -1, 3),  # the strategy's word comes before the block's
        "C": (1, -1, 3),
        "D": (2, -1, 1),
    }
    assert inference(entered, strategy) == 4


@pytest.mark.parametrize(
    ("ipus", "forward"),
    [
        ([], 1),
        ([0], 1),
        ([0, 0], 1),
        # What comes before the first block is on IPU 0.
        ([1], 2),
        ([0, 1], 2),
        ([0, 1, 1, 0], 3),
        ([0, 1, 2, 3], 4),
    ],
)
def test_every_change_of_ipu_is_a_stage_and_training_goes_back_through_all_but_one(ipus, forward):
    entered = [(str(number), ipu) for number, ipu in enumerate(ipus)]
    change = lambda options: options.autoRoundNumIPUs()  # noqa: E731
    inference(entered, iterations=forward, change=change)
    training(entered, 2 * forward - 1)
    if forward > 1:
        text = refused(lambda: inference(entered, iterations=forward - 1, change=change))
        assert f"pipeline stages ({forward}) to fill a pipeline" in text
        text = refused(lambda: training(entered, 2 * forward - 2))
        assert f"the number of pipeline stages ({2 * forward - 1}) when" in text


def test_a_pipeline_needs_a_micro_batch_for_every_stage():
    entered = [("A", 0), ("B", 1), ("C", 2), ("D", 3)]
    assert refused(lambda: training(entered, 6)) == (
        "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the "
        "number of pipeline stages (7) when using poptorch.PipelinedExecution. Please note that a "
        "model with 4 pipeline stages in PopTorch will have an additional 3 stages when training. "
        "Got 6: use options.Training.gradientAccumulation(7) or more, or another strategy."
    )
    assert refused(lambda: inference(entered, iterations=3)) == (
        "poptorch.Options().deviceIterations must be greater than or equal to the number of "
        "pipeline stages (4) to fill a pipeline. Got 3: use options.deviceIterations(4) or more, "
        "or another strategy."
    )


@pytest.mark.parametrize(
    "strategy", [poptorch.ShardedExecution(), poptorch.SerialPhasedExecution("A", "B")]
)
def test_without_a_pipeline_one_micro_batch_is_enough(strategy):
    entered = [("A", 0), ("B", 1)]
    assert training(entered, 1, strategy) == inference(entered, strategy, 1) == 2


def test_phases_are_placed_by_their_stages():
    strategy = poptorch.ParallelPhasedExecution(
        [poptorch.Stage("A"), poptorch.Stage("B")], [poptorch.Stage("C", "D"), poptorch.Stage("E")]
    )
    strategy.phase(0).ipus(0, 2)
    strategy.phase(1).ipus(1, 3)
    entered = [(name, None) for name in "ABCED"]
    assert training(entered, 1, strategy) == 4
    assert where(entered, strategy) == {
        "A": (-1, 0, 0),
        "B": (-1, 0, 2),
        "C": (-1, 1, 1),
        "D": (-1, 1, 1),
        "E": (-1, 1, 3),
    }


def test_parallel_phases_alternate_between_even_and_odd_ipus():
    strategy = poptorch.ParallelPhasedExecution("A", "B")
    assert refused(lambda: training([("A", 0), ("B", 2)], 1, strategy)) == (
        "When phases are executed in parallel, even phases need even IPUs and odd phases odd ones: "
        "the block 'B' is of phase 1 and on IPU 2. Use strategy.phase(1).ipus(...)."
    )
    entered = [("A", 2), ("B", 3)]
    assert training(entered, 1, strategy) == 4
    assert where(entered, strategy) == {"A": (-1, 0, 2), "B": (-1, 1, 3)}


def test_a_block_of_a_phase_needs_an_ipu():
    strategy = poptorch.SerialPhasedExecution("A")
    assert refused(lambda: inference([("A", None)], strategy)) == (
        "The block 'A' has no IPU (got None). Name one, from 0: poptorch.Block('A', ipu_id=0), or "
        "strategy.stage('A').ipu(0)."
    )
    assert refused(lambda: inference([("A", -1)])) == (
        "The block 'A' has no IPU (got -1). Name one, from 0: poptorch.Block('A', ipu_id=0), or "
        "strategy.stage('A').ipu(0)."
    )


@pytest.mark.parametrize(
    "strategy",
    [
        poptorch.PipelinedExecution("A", "B"),
        poptorch.ShardedExecution("A", "B"),
        poptorch.SerialPhasedExecution("A", "B"),
    ],
)
def test_a_block_that_the_strategy_does_not_name_is_refused(strategy):
    text = (
        "Unknown block 'C': the execution strategy names ['A', 'B']. Add it there, or leave the "
        "strategy's arguments out."
    )
    with pytest.raises(AssertionError, match=exactly(text)):
        inference([("A", 0), ("C", 1)], strategy)


def test_the_stage_of_an_ipu_needs_an_ipu():
    text = (
        "poptorch.AutoStage.SameAsIpu takes a block's stage from its IPU, and the block 'A' has "
        "none. Use poptorch.Block('A', ipu_id=0), or poptorch.AutoStage.AutoIncrement."
    )
    with pytest.raises(AssertionError, match=exactly(text)):
        inference([("A", None)])


def test_a_block_entered_again_needs_no_ipu_where_its_stage_is_known():
    """Its stage is that of its first entry, and stands for the IPU too."""
    assert where([("A", 1), ("A", None)]) == {"A": (1, -1, 1)}


def test_hardware_gives_powers_of_two(caplog):
    entered = [("A", 0), ("B", 1), ("C", 2)]
    assert refused(lambda: inference(entered)) == (
        "The model specifies the use of 3 IPUs, however PopTorch must reserve a minimum of 4 in "
        "order to allow the model to run, because PopTorch must reserve a power of 2 or maximum "
        "of 64 IPUs per process. Please reconfigure your model to use a different number of IPUs "
        "or set poptorch.Options().autoRoundNumIPUs(True)."
    )
    assert inference(entered, change=lambda options: options.autoRoundNumIPUs(True)) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "Reserving 4 IPUs for a model that uses 3, because PopTorch must reserve a power of 2 or "
        "maximum of 64 IPUs per process; 1 stay unused"
    ]


def test_replicas_multiply_the_ipus():
    assert inference([("A", 0), ("B", 1)], change=lambda o: o.replicationFactor(4)) == 8


@pytest.mark.parametrize("rounding", [True, False])
def test_no_process_has_more_than_64_ipus(rounding):
    def change(options):
        options.replicationFactor(65).autoRoundNumIPUs(rounding)

    assert refused(lambda: inference([], change=change)) == (
        "Too many IPUs requested (65). Experiments that need more than 64 IPUs require distributed "
        "execution. Use fewer replicas, or several processes."
    )
    assert inference([], change=lambda options: options.replicationFactor(64)) == 64


@pytest.mark.parametrize(
    "change",
    [
        lambda options: options.useIpuModel(True),
        lambda options: options.useOfflineIpuTarget(),
        lambda options: options.connectionType(poptorch.ConnectionType.Never),
    ],
)
def test_the_model_and_offline_targets_have_any_number_of_ipus(change):
    assert inference([("A", 0), ("B", 1), ("C", 2)], change=change) == 3


@pytest.mark.parametrize("name", ["POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"])
def test_the_model_can_be_chosen_by_the_environment(monkeypatch, name):
    options = poptorch.Options()
    assert not uses_ipu_model(options)
    for text, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(name, text)
        assert uses_ipu_model(options) == expected
        assert not uses_ipu_model(options.clone().useIpuModel(False))
        assert uses_ipu_model(options.clone().useIpuModel(True))
    monkeypatch.setenv(name, "yes")
    assert refused(lambda: uses_ipu_model(options)) == (
        f"The environment variable {name} must be 0 or 1, got 'yes'."
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda options: options.logCycleCount(True),
            "Cycle count logging is only supported on actual IPU hardware. Leave out "
            "options.logCycleCount(True).",
        ),
        (
            lambda options: options.useIpuModel(True).useOfflineIpuTarget(),
            "The IPU Model can't be compiled for offline, got ConnectionType.Never. Leave out "
            "useIpuModel(True), or unset POPTORCH_IPU_MODEL.",
        ),
        (
            lambda options: options.useIpuId(2).useOfflineIpuTarget(),
            "ConnectionType.Never takes no device, got useIpuId(2) too. Leave one of them out.",
        ),
    ],
)
def test_devices_that_can_not_be_are_refused(change, text):
    assert refused(lambda: inference([], change=change)) == text


def test_nothing_is_cached_for_the_model(caplog, tmp_path):
    def change(options):
        options.useIpuModel(True).enableExecutableCaching(tmp_path)

    inference([], change=change)
    assert [record.getMessage() for record in caplog.records] == [
        "Nothing is cached for the IPU Model: enableExecutableCaching is unused"
    ]


def tiles(options):
    options.TensorLocations.numIOTiles(32)


def test_transfers_overlap_in_sharded_and_phased_execution():
    for strategy in (poptorch.ShardedExecution(), poptorch.SerialPhasedExecution("A")):
        for mode in (poptorch.OutputMode.All, poptorch.OutputMode.Sum):

            def change(options, mode=mode):
                tiles(options)
                options.outputMode(mode)

            assert inference([("A", 0)], strategy, overlapped=True, change=change) == 1


@pytest.mark.parametrize(
    ("strategy", "change", "text"),
    [
        (
            poptorch.PipelinedExecution(),
            tiles,
            "Overlapped IO is not supported with poptorch.PipelinedExecution. If you are using "
            "only one IPU, please switch to poptorch.ShardedExecution.",
        ),
        (
            poptorch.ShardedExecution(),
            lambda options: None,
            "No IO tiles allocated. You must allocate at least 32 IO tiles using "
            "poptorch.Options().TensorLocations.numIOTiles.",
        ),
        (
            poptorch.ShardedExecution(),
            lambda options: tiles(options) or options.outputMode(poptorch.OutputMode.Final),
            "A transfer that overlaps with computing needs every micro-batch's output, got "
            "OutputMode.Final. Use poptorch.OutputMode.All or poptorch.OutputMode.Sum.",
        ),
    ],
)
def test_transfers_that_can_not_overlap_are_refused(strategy, change, text):
    assert refused(lambda: inference([], strategy, overlapped=True, change=change)) == text
    inference([], strategy, overlapped=False, change=change)


def test_the_log_says_where_blocks_go(caplog):
    poptorch.setLogLevel("DEBUG")
    try:
        inference([("A", 1)])
    finally:
        poptorch.setLogLevel("WARN")
    assert [record.getMessage() for record in caplog.records] == [
        "block A: stage 1, phase -1, IPU 1"
    ]
