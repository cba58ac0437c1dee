"""``ipufit check`` checks what a script would fit, and says by its status what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ipufit
from ipufit.cli.main import main

HEAD = """
import sys
import torch
from torch import nn
import ipufit

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls

def made(net):
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy")
    return model

x, y = torch.randn(8, 4), torch.arange(8) % 3
"""
FAULTY = "made(Net()).fit(x, y, batch_size=4)\n"
CLEAN = "made(nn.Linear(4, 3)).fit(x, y, batch_size=4, epochs=1000000)\n"
NO_FIT = (
    "ipufit check: the script must call fit of an ipufit.Model, but it did not. Pass the "
    "arguments with which it trains.\n"
)


@pytest.fixture
def check(tmp_path, monkeypatch, capfd):
    """Runs the command on a script in this process; returns status, stdout and stderr."""
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "script.py"
    fit = ipufit.Model.fit

    def run(text, *options, arguments=()):
        script.write_text(HEAD + text, encoding="utf-8")
        with pytest.raises(SystemExit) as end:
            main(["check", *options, str(script), *arguments])
        assert ipufit.Model.fit is fit
        return (end.value.code, *capfd.readouterr())

    run.script = script
    return run


def line_of(text):
    return (HEAD.splitlines().index(text)) + 1


def test_findings_are_printed_and_the_status_is_one(check):
    """A build server needs no more than the status."""
    status, out, _ = check(FAULTY)
    at = f"{check.script}:{line_of('        return self.layer(x) * self.calls')} in forward: error"
    assert status == 1
    assert out.startswith(f"Net: 1 error, 1 warning.\n{at} [constant]\n")


@pytest.mark.long
def test_a_clean_script_ends_with_zero_and_is_not_trained(check):
    """A million epochs would be noticed."""
    assert check(CLEAN) == (0, "Linear: nothing found.\n", "")


@pytest.mark.long
def test_a_script_ends_at_its_first_fit(check):
    """What comes after training could overwrite a model that somebody has trained."""
    rest = "print('saved')\nmade(Net()).fit(x, y)\n"
    assert check(f"try:\n    {CLEAN}except Exception:\n    pass\n{rest}")[:2] == (
        0,
        "Linear: nothing found.\n",
    )


def test_all_goes_on_with_an_empty_history(check):
    """A script with several models is checked whole."""
    text = f"history = {CLEAN}print(type(history).__name__, history.epoch)\n{FAULTY}"
    status, out, _ = check(text, "--all")
    assert status == 1
    assert out.startswith("History []\nLinear: nothing found.\n\nNet: 1 error, 1 warning.\n")


def test_json_has_stdout_for_itself(check):
    """It is read by a program."""
    status, out, err = check(f"print('hello', sys.argv[1:])\n{FAULTY}", "--json", arguments=["--x"])
    (report,) = json.loads(out)["reports"]
    assert status == 1
    assert err == "hello ['--x']\n"
    assert [finding["kind"] for finding in report["findings"]] == ["constant", "attribute"]


@pytest.mark.parametrize("text", ["print('no fit')\n", "sys.exit(0)\n"])
def test_a_script_that_fits_nothing_is_not_clean(check, text):
    """Nothing was looked at."""
    status, _, err = check(text)
    assert (status, err) == (2, NO_FIT)


def test_a_script_that_fails_is_not_clean(check):
    """Its traceback is shown, as Python does."""
    status, _, err = check(f"{FAULTY}".replace("x, y", "x[:, :2], y"))
    assert status == 2
    assert "DataError: check: layer '" in err
    assert " needs 4 features in the last dimension, got shape (4, 2), dtype float32, at " in err
    assert err.endswith("ipufit check: the script failed, so the check is not complete.\n")


def test_what_cannot_be_read_is_refused(capsys):
    """As by run, with the name of this command."""
    with pytest.raises(SystemExit) as end:
        main(["check", "absent.py"])
    assert end.value.code == 2
    text = "ipufit check: `script` must be a readable Python file, but absent.py does"
    assert capsys.readouterr().err.startswith(text)
    with pytest.raises(SystemExit) as end:
        main(["check"])
    assert end.value.code == 2


def test_help_says_what_becomes_of_the_script(capsys):
    """Nobody should be surprised that the rest is not run."""
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "The script ends there, so that its later lines can't overwrite files" in out
    assert "Exit status: 0 if there are no findings, 1 if there are, 2 if the command line" in out


@pytest.mark.long
def test_the_command_works_in_a_process_of_its_own(tmp_path):
    """As it is typed."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + FAULTY, encoding="utf-8")
    command = [sys.executable, "-m", "ipufit", "check", str(script)]
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:24]) == (1, "Net: 1 error, 1 warning.")
