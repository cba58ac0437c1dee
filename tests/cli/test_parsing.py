"""What is said of a command line with a mistake in it."""

import pytest

from ipufit.cli.main import main

KNOWN = "Known names: bench, check, conformance, doctor, plan, report, run, watch."
BEHIND = "Put arguments of the script after it."

COMMANDS = ["run", "check", "plan", "bench", "report", "watch", "doctor", "conformance"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "chekc train.py",
            f"ipufit: error: unknown command 'chekc'. Did you mean 'check'? {KNOWN}",
        ),
        ("other", f"ipufit: error: unknown command 'other'. {KNOWN}"),
        (
            "train.py --lr 0.1",
            "ipufit: error: unknown command 'train.py'. To run a script, write: ipufit run "
            f"train.py. {KNOWN}",
        ),
        (
            "check --alll train.py",
            "ipufit check: error: unrecognized arguments: --alll. Did you mean --all? "
            f"{BEHIND} ipufit check --help lists all.",
        ),
        (
            "plan --epochs 3 train.py",
            f"ipufit plan: error: unrecognized arguments: --epochs. {BEHIND} "
            "ipufit plan --help lists all.",
        ),
        (
            "report --jsno runs/1",
            "ipufit report: error: unrecognized arguments: --jsno. Did you mean --json? "
            "ipufit report --help lists all.",
        ),
        (
            "doctor here",
            "ipufit doctor: error: unrecognized arguments: here. ipufit doctor --help lists all.",
        ),
    ],
)
def test_a_mistake_is_told_by_the_command_that_was_meant(line, told, capsys):
    """Else the usage that is shown is not the one that was looked for."""
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == told


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_help_fits_into_the_terminal(command, columns, monkeypatch, capsys):
    """Lines that a terminal breaks in the middle of words are hard to read."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) < columns
    # No option of the usage is broken, and no example has lost its command.
    usage, _, rest = text.partition("\n\n")
    assert usage.startswith(" ".join(["usage: ipufit", *command]))
    assert all(line.count("[") == line.count("]") for line in usage.splitlines())
    commands = rest.partition("\nexamples:\n")[2].splitlines()
    assert sum(line.startswith("  ipufit") for line in commands) >= 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_examples_and_says_what_its_exit_status_means(command, capsys):
    """Who looks at a help text wants a line to copy, and what a script may rely on."""
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "Exit status: " in text
    assert text.partition("\nexamples:\n")[2].count(f"  ipufit {command}") >= 2
