"""``ipufit conformance`` is ``python -m ipufit.conformance`` under a name that is easier found."""

import pytest

from ipufit.cli.main import main
from ipufit.conformance.__main__ import ENGINES
from ipufit.conformance.implementations import IMPLEMENTATIONS

CASE = "values/structures come back as they were"


def conformance(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["conformance", *arguments])
    return ended.value.code


def test_it_runs_the_cases(capsys):
    assert conformance("--engine", "standin", "--only", CASE) == 0
    out = capsys.readouterr().out
    assert CASE in out
    assert "1 cases: 1 pass" in out


def test_its_errors_and_help_have_its_name(capsys):
    assert conformance("--only", "nothing", "--engine", "embedded") == 2
    assert "ipufit conformance: error: --only nothing fits no case." in capsys.readouterr().err
    assert conformance("--help") == 0
    assert capsys.readouterr().out.startswith("usage: ipufit conformance [-h]")


def test_every_implementation_can_be_asked_for():
    """The command line has their names without importing them."""
    assert list(ENGINES) == sorted(IMPLEMENTATIONS)
