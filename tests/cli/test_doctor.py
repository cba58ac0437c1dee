"""``ipufit doctor`` says what is here, and by its status whether models can be trained."""

import email
import json
import platform
import sys
from importlib import metadata

import pytest
import torch

import ipufit
from ipufit.cli.main import main

REQUIRES = [
    "torch>=2.0.1",
    'tomli>=2; python_version < "3"',
    'plotly>=5.15.0; extra == "report"',
    'matplotlib>=3.7.0; extra == "plot"',
    'matplotlib>=3.7.0; extra == "examples"',
]
EXTRAS = "\n".join(f"Provides-Extra: {name}" for name in ("report", "plot", "examples"))


@pytest.fixture
def installed(monkeypatch):
    """Versions of what there is; ipufit's own metadata is as above."""
    versions = {"torch": "2.13.0+cpu", "plotly": "6.0.0"}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(metadata, "metadata", lambda name: email.message_from_string(EXTRAS))
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delenv("IPUFIT_ENGINE", raising=False)
    monkeypatch.delenv("POPLAR_SDK_ENABLED", raising=False)
    return versions


def doctor(capsys, *arguments):
    """Its status, and what it prints."""
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return ended.value.code, out


def test_it_tells_versions_engines_and_packages(installed, capsys):
    status, out = doctor(capsys, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["versions"] == {
        "ipufit": ipufit.__version__,
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    assert found["engines"] == [
        {"name": each.name, "available": each.available, "reason": each.reason}
        for each in ipufit.engines()
    ]
    assert found["machine"]["Poplar SDK"] == "not enabled in this shell"
    # What is for another Python is not wanted here.
    assert found["packages"] == [
        {
            **{"name": "torch", "extra": None, "wanted": ">=2.0.1"},
            **{"version": "2.13.0+cpu", "fits": True},
        },
        {
            **{"name": "plotly", "extra": "report", "wanted": ">=5.15.0"},
            **{"version": "6.0.0", "fits": True},
        },
        {
            **{"name": "matplotlib", "extra": "plot", "wanted": ">=3.7.0"},
            **{"version": None, "fits": False},
        },
        {
            **{"name": "matplotlib", "extra": "examples", "wanted": ">=3.7.0"},
            **{"version": None, "fits": False},
        },
    ]
    assert found["problems"] == []


def test_people_read_the_same(installed, capsys):
    status, out = doctor(capsys)
    assert status == 0
    lines = out.splitlines()
    assert f"torch             {torch.__version__}" in lines
    assert "  plotly          6.0.0 (wanted: >=5.15.0)  [report]" in lines
    assert "  matplotlib      not installed (wanted: >=3.7.0)  [plot]" in lines
    assert any(line.startswith("  ipu             can") for line in lines)
    assert lines[-1] == "Models can be trained here."


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "torch>=2.0.1 is missing. Run: pip install ipufit"),
        (
            "1.13.0",
            "torch must be >=2.0.1, but is 1.13.0. Run: pip install --upgrade ipufit",
        ),
    ],
)
def test_what_is_needed_and_does_not_fit_is_a_problem(version, problem, installed, capsys):
    del installed["torch"]
    installed.update({} if version is None else {"torch": version})
    status, out = doctor(capsys, "--json")
    assert (status, json.loads(out)["problems"]) == (1, [problem])


def test_an_extra_that_is_too_old_is_a_problem(installed, capsys):
    installed["plotly"] = "4.0"
    status, out = doctor(capsys)
    assert status == 1
    assert out.splitlines()[-1] == (
        "plotly must be >=5.15.0, but is 4.0. Run: pip install --upgrade ipufit[report]"
    )


def test_an_engine_that_the_environment_names_must_run(installed, capsys, monkeypatch):
    monkeypatch.setenv("IPUFIT_ENGINE", "ipu-standin")
    assert doctor(capsys)[0] == 0
    monkeypatch.setenv("IPUFIT_ENGINE", "tpu")
    status, out = doctor(capsys)
    assert status == 1
    usable = ", ".join(each.name for each in ipufit.engines() if each.available)
    assert out.splitlines()[-1] == (
        f"IPUFIT_ENGINE is 'tpu', which can't run here. Set it to one of {usable}, or unset it."
    )


def test_a_checkout_has_no_list_of_packages(installed, capsys, monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    status, out = doctor(capsys)
    assert status == 0
    assert (
        "  ipufit runs from a checkout, which names none. Run: pip install -e ." in out.splitlines()
    )
    assert json.loads(doctor(capsys, "--json")[1])["packages"] is None


def test_a_torch_that_can_not_be_imported_is_the_problem(installed, capsys, monkeypatch):
    """Else whoever looks for the reason of a traceback gets another one."""
    monkeypatch.setitem(sys.modules, "torch", None)
    status, out = doctor(capsys)
    lines = out.splitlines()
    assert status == 1
    assert "torch             can't be imported" in lines
    assert "Engines" not in lines
    assert "  plotly          6.0.0 (wanted: >=5.15.0)  [report]" in lines
    assert lines[-1] == (
        "torch must be importable, but its import ends with ModuleNotFoundError: import of torch "
        "halted; None in sys.modules. Install it as https://pytorch.org/get-started says."
    )
    found = json.loads(doctor(capsys, "--json")[1])
    assert (found["engines"], len(found["problems"])) == ([], 1)
