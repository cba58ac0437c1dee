"""Options from JSON and from files."""

import os

import pytest

import ipufit.poptorch as poptorch
from tests.poptorch.option_texts import exactly, unexpected

ALLOWED = (
    "A line is one call, such as deviceIterations(2) or Training.gradientAccumulation(4), with "
    "numbers, strings, True, False, None, lists, tuples, sets, dicts, enums "
    "(poptorch.OutputMode.All), and poptorch.ParallelPhasedExecution, poptorch.Phase, "
    "poptorch.PipelinedExecution, poptorch.SerialPhasedExecution, poptorch.ShardedExecution, "
    "poptorch.Stage, poptorch.TensorLocationSettings as arguments. The file is read, never run."
)


@pytest.fixture
def load(tmp_path):
    """Options from the text of a file called ``my.conf``."""

    def loaded(text, options=None):
        path = tmp_path / "my.conf"
        path.write_text(text)
        options = options or poptorch.Options()
        assert options.loadFromFile(str(path)) is options
        return options

    return loaded


def test_a_file_sets_one_option_a_line(load):
    options = load(
        """
# a comment
deviceIterations(4)  # another

   replicationFactor(2).broadcastBuffers(False)
Training.gradientAccumulation(3)
outputMode(poptorch.OutputMode.EveryN, output_return_period=2)
connectionType(poptorch.enums.ConnectionType.OnDemand)
setAvailableMemoryProportion({"IPU0": 0.5, "IPU1": .25})
_Popart.set("dotChecks", ["FINAL", "ALL"])
_Popart.set("hardwareInstrumentations", {0, -1, +1})
_Popart.set("some", (None, True, ("a",)))
TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
"""
    )
    expected = (
        poptorch.Options()
        .deviceIterations(4)
        .replicationFactor(2)
        .broadcastBuffers(False)
        .outputMode(poptorch.OutputMode.EveryN, 2)
        .connectionType(poptorch.ConnectionType.OnDemand)
        .setAvailableMemoryProportion({"IPU0": 0.5, "IPU1": 0.25})
    )
    expected.Training.gradientAccumulation(3)
    expected._Popart.set("dotChecks", ["FINAL", "ALL"])
    expected._Popart.set("hardwareInstrumentations", {0, -1, 1})
    expected._Popart.set("some", (None, True, ("a",)))
    expected.TensorLocations.setWeightLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False)
    )
    assert repr(options) == repr(expected)


def test_files_add_up(load):
    options = load("deviceIterations(32)\nreplicationFactor(2)")
    load("deviceIterations(4)", options)
    assert (options.device_iterations, options.replication_factor) == (4, 2)


def test_a_file_can_hold_execution_strategies(load):
    pipelined = load(
        'setExecutionStrategy(poptorch.PipelinedExecution("A", poptorch.Stage("B", "C").ipu(3), '
        '["D"]))'
    )._execution_strategy
    assert type(pipelined) is poptorch.PipelinedExecution
    assert pipelined.stage("C").blocks == ["B", "C"]
    assert pipelined.stage("C")._ipu == 3
    assert pipelined.stage("D")._stage_id == 2
    serial = load(
        'setExecutionStrategy(poptorch.SerialPhasedExecution(poptorch.options.Phase("A"), ["B"])'
        ".setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd).useSeparateBackwardPhase())"
    )._execution_strategy
    assert serial.backendOptions() == {
        "execution_mode": 2,
        "separate_backward_phase": True,
        "serial_phases_execution": True,
        "tensors_liveness": 1,
    }
    sharded = load("setExecutionStrategy(poptorch.ShardedExecution())")._execution_strategy
    assert type(sharded) is poptorch.ShardedExecution


@pytest.mark.parametrize(
    "line",
    [
        "deviceIterations",
        "deviceIterations = 2",
        "deviceIterations(2); deviceIterations(3)",
        "deviceIterations(1 + 1)",
        "deviceIterations(*[1])",
        "set(**{})",
        "setAvailableMemoryProportion({**{}})",
        "deviceIterations(int('2'))",
        "deviceIterations(options.device_iterations)",
        "deviceIterations(options.clone())",
        "deviceIterations(poptorch.Options().device_iterations)",
        "deviceIterations(poptorch.Stage)",
        "deviceIterations(poptorch.Stage.__init__.__globals__)",
        "deviceIterations(poptorch.OutputMode.__class__)",
        "deviceIterations(poptorch.OutputMode.Nothing)",
        "deviceIterations(poptorch.Nothing())",
        "deviceIterations(poptorch.ipuHardwareVersion())",
        "deviceIterations(torch.half)",
        "deviceIterations([x for x in ()])",
        "deviceIterations(lambda: 1)",
        "deviceIterations(f'{1}')",
        "deviceIterations(x := 1)",
        "deviceIterations([1][0])",
        "deviceIterations(__import__('os').system('true'))",
        "deviceIterations(1) if True else None",
        "deviceIterations(1).device_iterations",
        "deviceIterations(1)()",
        "Training[0]",
    ],
)
def test_what_is_not_such_a_call_is_refused_and_nothing_is_set(load, line):
    options = poptorch.Options()
    before = repr(options)
    text = f"Not a call of an option at line 2 of my.conf:\n> options.{line}\n{ALLOWED}"
    with pytest.raises(poptorch.ConfigFileError, match=exactly(text)):
        load(f"replicationFactor(2)\n{line}", options)
    assert repr(options) == before


@pytest.mark.parametrize(
    "name", ["__init__", "__class__", "_freeze", "_popart", "device_iterations"]
)
def test_only_setters_can_be_called(load, name):
    with pytest.raises(AttributeError, match=rf"^There is no option {name}\. "):
        load(f"{name}(1)")


def test_a_file_is_never_run(load, tmp_path):
    target = tmp_path / "made"
    for line in (
        f"deviceIterations(open({str(target)!r}, 'w'))",
        f"logDir(poptorch.enums.enum.sys.modules['os'].mkdir({str(target)!r}))",
    ):
        with pytest.raises(poptorch.ConfigFileError):
            load(line)
    assert not os.path.exists(target)


def test_a_line_that_is_not_python_is_refused_by_the_number_of_the_lines_kept(load):
    """PopTorch counts without blank lines and comments; the file's own number follows."""
    with pytest.raises(poptorch.ConfigFileError) as refused:
        load("# one\n\ndeviceIterations(2)\noutputMode(poptorch.OutputMode.All")
    lines = str(refused.value).split("\n")
    assert lines[0].startswith("SyntaxError at line 2 of my.conf: ")
    assert lines[1:] == [
        "> options.outputMode(poptorch.OutputMode.All",
        "(Line 4 with blank lines and comments.)",
        ALLOWED,
    ]
    assert isinstance(refused.value.__cause__, SyntaxError)


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ('deviceIterations("2")', AssertionError, unexpected("device_iterations", "int", "2")),
        (
            "deviceIteration(2)",
            AttributeError,
            "There is no option deviceIteration. Did you mean deviceIterations?",
        ),
        (
            "Precision.setPartialsType(16)",
            ValueError,
            "parameter to setPartialsType should be either torch.float or torch.half, got 16.",
        ),
    ],
)
def test_what_a_setter_refuses_keeps_its_type_and_names_the_line(load, line, kind, text):
    expected = (
        f"{text}\nAt line 2 of my.conf:\n> options.{line}\n(Line 3 with blank lines and comments.)"
    )
    with pytest.raises(kind, match=exactly(expected)):
        load(f"replicationFactor(2)\n\n{line}")


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        poptorch.Options().loadFromFile(str(tmp_path / "none.conf"))


def test_json_names_setters_and_arguments():
    options = poptorch.Options()
    assert (
        options.from_json(
            """{
            "deviceIterations": 2,
            "logDir": "./a.b",
            "outputMode": "OutputMode.Sum",
            "Training.gradientAccumulation": 4,
            "Precision.enableFloatingPointExceptions": true,
            "setAvailableMemoryProportion": {"IPU0": 0.5},
            "sourceLocationExcludes": [["a"]],
            "enableExecutableCaching": null,
            "_Popart.set": ["saveInitializersToFile", "OutputMode.Sum"]
        }"""
        )
        is options
    )
    expected = poptorch.Options().deviceIterations(2).logDir("./a.b")
    expected.outputMode(poptorch.OutputMode.Sum).setAvailableMemoryProportion({"IPU0": 0.5})
    expected.Precision.enableFloatingPointExceptions(True)
    expected.enableExecutableCaching(None)
    expected.Training.gradientAccumulation(4)
    # A string inside of a list stays one.
    expected._Popart.set("saveInitializersToFile", "OutputMode.Sum")
    assert repr(options) == repr(expected)
    assert options._source_location_excludes == ["a"]


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "{",
            ValueError,
            "Options.from_json expected JSON, got '{': Expecting property name enclosed in double "
            "quotes: line 1 column 2 (char 1).",
        ),
        (
            "[]",
            ValueError,
            "Options.from_json expected a JSON object, such as "
            "{\"deviceIterations\": 2}, got '[]'.",
        ),
        (
            '{"deviceIteration": 2}',
            AttributeError,
            "There is no option deviceIteration. Did you mean deviceIterations?",
        ),
        (
            '{"Training.gradientAccumulations": 2}',
            AttributeError,
            "There is no option gradientAccumulations. Did you mean gradientAccumulation?",
        ),
        (
            '{"Training": 2}',
            AttributeError,
            "Options.from_json: Training is a group of options. Name one of its setters, such as "
            '"Training.accumulationAndReplicationReductionType".',
        ),
        (
            '{"deviceIterations.__self__": 2}',
            AttributeError,
            "There is no option __self__. There are none.",
        ),
        (
            '{"deviceIterations": "2"}',
            AssertionError,
            unexpected("device_iterations", "int", "2"),
        ),
        (
            '{"outputMode": "OutputMode.Some"}',
            AssertionError,
            unexpected("outputMode", "OutputMode", "OutputMode.Some"),
        ),
    ],
)
def test_json_that_can_not_be_is_refused(text, kind, message):
    expected = exactly(message)
    if text == "{":
        # Python's own words change with its version.
        expected = r"^Options\.from_json expected JSON, got '\{': .+\.$"
    with pytest.raises(kind, match=expected):
        poptorch.Options().from_json(text)


def test_json_with_an_unknown_name_sets_nothing():
    options = poptorch.Options()
    with pytest.raises(AttributeError):
        options.from_json('{"deviceIterations": 2, "nothing": 1}')
    assert options.device_iterations == 1


def test_defaults_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv(
        "POPTORCH_DEFAULT_OPTIONS",
        '{"connectionType": "ConnectionType.OnDemand", "deviceIterations": 2}',
    )
    options = poptorch.Options()
    assert (options.connection_type, options.device_iterations) == (1, 2)
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", "2")
    with pytest.raises(
        ValueError,
        match=exactly(
            "POPTORCH_DEFAULT_OPTIONS expected a JSON object, such as "
            "{\"deviceIterations\": 2}, got '2'."
        ),
    ):
        poptorch.Options()
