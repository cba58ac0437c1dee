"""``python -m ipufit.conformance``: the table, the file, the status."""

import contextlib
import functools
import itertools
import json
import math
import signal
import sys
from pathlib import Path

import pytest
import torch

import ipufit
from ipufit.conformance import implementations, running
from ipufit.conformance.__main__ import main
from ipufit.conformance.kit import CASES, Case, Kit
from ipufit.conformance.running import run_case
from tests.conformance.mutants import changed

QUICK = "training/di=1 ga=1 R=1 Final"


@pytest.fixture
def sdk(monkeypatch):
    """What ``import poptorch`` gives is under control of the test."""
    monkeypatch.delitem(sys.modules, "poptorch", raising=False)
    return lambda module: monkeypatch.setitem(sys.modules, "poptorch", module)


@pytest.mark.long
def test_the_table_says_what_ran_and_how_far_off_it_was(capsys, tmp_path):
    """Whoever gets the table has to know which versions and which device it speaks of."""
    path = tmp_path / "table.json"
    assert main(["--engine", "embedded", "--only", QUICK, "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "engine     embedded"
    assert f"ipufit     {ipufit.__version__}" in lines
    assert f"torch      {torch.__version__}" in lines
    assert "device     CPU" in lines
    assert "tolerance  1e-10 (float64)" in lines
    (row,) = [line for line in lines if line.startswith(QUICK)]
    assert row.split()[-2] == "pass"
    assert float(row.split()[-1]) < 1e-14
    assert lines[-2] == "1 cases: 1 pass, 0 fail, 0 error, 0 open"
    (table,) = json.loads(path.read_text(encoding="utf-8"))
    assert table["passed"] is True
    assert table["environment"]["engine"] == "embedded"
    (kept,) = table["rows"]
    assert (kept["name"], kept["outcome"], kept["said"]) == (QUICK, "pass", "")
    assert list(kept) == ["name", "outcome", "error", "tolerance", "said", "question"]
    assert kept["error"] < kept["tolerance"] == 1e-10


def test_what_fails_is_told_and_changes_the_status(capsys, tmp_path):
    """A later case is still run, and a number that is none is still JSON."""
    path = tmp_path / "table.json"
    nan = changed(
        "ipufit.optim.rules:SGDRule.coefficients",
        lambda original: lambda self, group, step: [math.nan] * 4,
    )
    names = ["--only", QUICK, "--only", "inference/di=1 R=1 All"]
    with nan:
        assert main(["--engine", "standin", "--json", str(path), *names]) == 1
    out = capsys.readouterr().out
    assert "    loss of call 1: nan, not 1.47403; out of call 1: [nan, nan, nan, nan], not [" in out
    assert "2 cases: 1 pass, 1 fail, 0 error, 0 open" in out
    (table,) = json.loads(path.read_text(encoding="utf-8"))
    assert table["passed"] is False
    assert [row["error"] for row in table["rows"]] == ["inf", 0.0]


def test_an_open_question_is_reported_and_not_judged(capsys):
    name = "training/di=4 ga=1 R=2 Final"
    swapped = changed(
        "ipufit.conformance.scenario:_start", lambda original: lambda scenario, d, a, r: 0
    )
    assert main(["--engine", "embedded", "--only", name]) == 0
    assert f"    {name}: as we read it" in capsys.readouterr().out
    with swapped:
        assert main(["--engine", "embedded", "--only", name]) == 0
    out = capsys.readouterr().out
    assert "In which order do micro-batches stand in a batch" in out
    assert f"    {name}: losses of call 0: [" in out


@pytest.mark.long
def test_without_an_engine_all_that_is_here_is_examined(capsys, sdk):
    """On a machine without the SDK its absence is said, not an error."""
    sdk(None)
    assert main(["--only", QUICK]) == 0
    out = capsys.readouterr().out
    assert out.count(f"\n{QUICK} ") == 2
    assert "engine     standin" in out
    assert "poptorch: not examined. --engine poptorch needs the PopTorch of the Poplar SDK" in out


def test_poptorch_that_is_missing_is_an_error_where_it_is_asked_for(capsys, sdk):
    sdk(None)
    with pytest.raises(SystemExit) as caught:
        main(["--engine", "poptorch"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "importing it failed (ModuleNotFoundError: " in err
    assert "or use --engine standin." in err


def test_another_package_of_that_name_is_not_poptorch(capsys, sdk):
    sdk(type(sys)("poptorch"))
    with pytest.raises(SystemExit):
        main(["--engine", "poptorch"])
    assert "what was found under this name has no trainingModel" in capsys.readouterr().err


def test_the_stand_in_does_not_pass_for_poptorch(capsys, sdk):
    """A table of the stand-in that claims to be PopTorch's would settle the open questions."""
    import ipufit.poptorch

    sdk(ipufit.poptorch)
    with pytest.raises(SystemExit):
        main(["--engine", "poptorch"])
    assert "under this name ipufit.poptorch was found" in capsys.readouterr().err


def test_poptorch_itself_is_examined_in_float32(monkeypatch, sdk, capsys):
    """As far as it can be shown without one: the stand-in, narrow as a device, in its place."""
    import ipufit.poptorch

    class Named(type(sys)):
        def __getattr__(self, name):
            return getattr(ipufit.poptorch, name)

    sdk(Named("poptorch"))
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    names = ["--only", QUICK, "--only", "optimizer/poptorch.optim.Adam*", "--only", "values/*"]
    assert main(["--engine", "poptorch", *names]) == 0
    out = capsys.readouterr().out
    assert "tolerance  0.0001 (float32)" in out
    assert "device     IPU Model" in out
    assert " 0 fail, 0 error" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "nothing"], "--only nothing fits no case. Try 'training/*'."),
        (["--json", "/no/such/folder/file"], "can't be written: No such file or directory"),
        (["--kit", "/no/such/folder/file"], "--kit /no/such/folder/file can't be written: No such"),
        (["--engine", "ipu"], "invalid choice: 'ipu'"),
    ],
)
def test_a_command_line_that_cannot_be_followed_is_refused_before_anything_runs(
    arguments, text, capsys
):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_a_kit_has_cases_programs_and_speeds(tmp_path, monkeypatch, capfd):
    """One file to send back from a machine with IPUs; here a checkout's programs are left out."""
    monkeypatch.setattr(running, "_ROOT", tmp_path)
    monkeypatch.setattr(running, "timings", functools.partial(running.timings, 64))
    path = tmp_path / "kit.json"
    assert main(["--engine", "embedded", "--only", QUICK, "--kit", str(path)]) == 0
    kit = json.loads(path.read_text(encoding="utf-8"))
    parts = ["environment", "engines", "cases", "speeds", "programs"]
    assert list(kit) == ["format", "complete", *parts]
    assert kit["complete"] is True
    assert kit["cases"][0]["passed"] is True
    assert kit["programs"] == []
    engines = [status.name for status in ipufit.engines() if status.available]
    combinations = itertools.product(engines, ("perceptron", "convolutions"), (1, 20))
    rows = [(row["engine"], row["module"], row["device_iterations"]) for row in kit["speeds"]]
    assert rows == list(combinations)
    assert all(row["samples_per_second"] > 0 for row in kit["speeds"])
    out = capfd.readouterr().out
    assert "Published programs: not run. They are listed in a checkout of ipufit.\n" in out
    assert "module=perceptron engine=embedded device_iterations=1 first_epoch_seconds=" in out


def test_programs_are_those_of_the_checkout(tmp_path, monkeypatch, capfd):
    package = tmp_path / "tests" / "programs"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    text = "import sys; open(sys.argv[2].partition('=')[2], 'w').write('[{\"path\": \"a.py\"}]')"
    (package / "__main__.py").write_text(f"print('begun', flush=True); {text}", encoding="utf-8")
    monkeypatch.setattr(running, "_ROOT", tmp_path)
    kit = running.Evidence(sys.stdout)
    kit.run_programs()
    assert kit.programs == [{"path": "a.py"}]
    assert capfd.readouterr().out == "begun\n"


def test_what_was_seen_before_an_interrupt_is_in_the_file(tmp_path, monkeypatch, capsys):
    path, seen = tmp_path / "table.json", []

    def interrupted(implementation, case):
        if seen:
            raise KeyboardInterrupt
        seen.append(case)
        return run_case(implementation, case)

    monkeypatch.setattr(running, "run_case", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(["--engine", "embedded", "--json", str(path), "--only", "training/*"])
    (table,) = json.loads(path.read_text(encoding="utf-8"))
    assert len(table["rows"]) == 1


def interrupt_models(number):
    """Send a signal when a model has been measured."""
    yield {"module": "perceptron"}
    signal.raise_signal(number)
    yield {"module": "convolutions"}


def interrupt_programs(number):
    """Replace ``subprocess.run`` by a run of one program, and a signal."""

    def run(command, **settings):
        (option,) = [word for word in command if word.startswith("--json=")]
        Path(option.partition("=")[2]).write_text('[{"program": "a.py"}]', encoding="utf-8")
        signal.raise_signal(number)

    return run


@pytest.mark.parametrize(
    ("number", "ends_by"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
@pytest.mark.parametrize("at", ["speeds", "programs"])
def test_a_kit_has_what_came_before_an_interrupt(
    number, ends_by, at, tmp_path, monkeypatch, capsys
):
    """An hour on a machine with IPUs that somebody else wants back is not for nothing."""
    (tmp_path / "tests" / "programs").mkdir(parents=True)
    monkeypatch.setattr(running, "_ROOT", tmp_path)
    rows = interrupt_models(number) if at == "speeds" else [{"module": "perceptron"}]
    monkeypatch.setattr(running, "timings", lambda: rows)
    monkeypatch.setattr(running.subprocess, "run", interrupt_programs(number))
    path, before = tmp_path / "kit.json", signal.getsignal(number)
    with pytest.raises(ends_by) as caught:
        main(["--engine", "embedded", "--only", QUICK, "--kit", str(path)])
    if ends_by is SystemExit:  # as a shell has it of a program that the signal has ended
        assert caught.value.code == 128 + signal.SIGTERM
    kit = json.loads(path.read_text(encoding="utf-8"))
    assert kit["complete"] is False
    assert [len(table["rows"]) for table in kit["cases"]] == [1]
    assert kit["speeds"] == [{"module": "perceptron"}]
    assert kit["programs"] == ([] if at == "speeds" else [{"program": "a.py"}])
    assert signal.getsignal(number) is before


def test_names_of_cases_are_different():
    """The table of one machine is compared with that of another by name."""
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert len(names) > 200


def judged_by(body, dtype=torch.float64):
    """The row of a case with this body."""

    class Nothing:
        poptorch = ipufit
        tolerance = 0.1
        computing = staticmethod(contextlib.nullcontext)

    Nothing.dtype = dtype
    return run_case(Nothing, Case("a case", body=body))


def test_the_tolerance_is_relative_to_the_largest_magnitude_above_one():
    row = judged_by(
        lambda kit: kit.close("x", torch.tensor([0.0, 104.0]), torch.tensor([9.0, 100]))
    )
    assert (row.outcome, row.error) == ("pass", 0.09)
    row = judged_by(lambda kit: kit.close("x", 0.2, 0.0))
    assert (row.outcome, row.details) == ("fail", "x: 0.2, not 0")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda kit: kit.close("x", torch.ones(2), torch.ones(1)), "x: shape [2], not [1]"),
        (lambda kit: kit.close("x", math.nan, 1.0), "x: nan, not 1"),
        (lambda kit: kit.equal("x", 1, 2), "x: 1, not 2"),
        (lambda kit: kit.raises("x", lambda: None, kind=ValueError), "x: was not refused"),
        (
            lambda kit: kit.raises("x", lambda: int("a"), kind=ValueError, text="other"),
            "x: ValueError: invalid literal for int() with base 10: 'a'",
        ),
    ],
)
def test_a_claim_that_does_not_hold_is_a_fault(body, said):
    row = judged_by(body)
    assert (row.outcome, row.details) == ("fail", said)


def test_an_exception_in_a_case_is_an_error_of_the_case():
    row = judged_by(lambda kit: [][0])
    assert row.outcome == "error"
    assert row.details.startswith("IndexError: list index out of range (<lambda>, line ")


def test_a_case_that_the_machine_cannot_run_is_skipped_with_the_reason():
    row = judged_by(lambda kit: kit.skip("no half precision"))
    assert (row.outcome, row.details, row.error) == ("skip", "no half precision", None)


def test_a_kit_makes_rows_that_repeat_nowhere():
    rows = Kit(ipufit, torch.float64, 0.0).rows(50)
    assert len(rows.flatten().unique()) == 150


def test_implementations_have_the_names_of_the_command_line():
    for name, made in implementations.IMPLEMENTATIONS.items():
        assert made.name == name
