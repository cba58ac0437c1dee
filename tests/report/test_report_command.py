"""``ipufit report``: pages and numbers of what runs have written down."""

import json
import sys
import types
import webbrowser

import pytest
import torch
from torch import nn

import ipufit
from ipufit.cli.main import main
from ipufit.errors import DataError
from ipufit.report.run import PAGE, TRACE
from tests.report.runs_made import AFTER, EACH, written


@pytest.fixture
def page(monkeypatch):
    """A page that says of which runs it is made, in place of the long one."""
    fake = types.ModuleType("ipufit.report.page")
    fake.render_page = lambda runs, live=False: " ".join(run.facts["title"] for run in runs)
    monkeypatch.setitem(sys.modules, "ipufit.report.page", fake)


@pytest.fixture
def shown(monkeypatch):
    """What a browser is asked to show."""
    asked = []
    monkeypatch.setattr(webbrowser, "open", asked.append)
    return asked


def run(capsys, *arguments):
    """Status, output and errors of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, arguments)])
    return (ended.value.code, *capsys.readouterr())


@pytest.mark.long
@pytest.mark.parametrize("status", ["finished", "running"])
def test_one_folder_gets_its_files_anew(status, tmp_path, capsys, shown):
    """Also of a run that was killed, which made none."""
    folder = written(tmp_path / "run", status=status)
    (folder / TRACE).write_text("old")
    assert run(capsys, folder) == (0, f"{folder / PAGE}\n", "")
    assert json.loads((folder / TRACE).read_text())["otherData"]["status"] == status
    assert shown == []


def test_the_page_is_shown_where_that_is_asked_for(tmp_path, capsys, page, shown):
    folder, out = written(tmp_path / "run"), tmp_path / "page.html"
    assert run(capsys, folder, "--output", out, "--open")[0] == 0
    assert shown == [out.resolve().as_uri()]


def test_several_folders_are_compared(tmp_path, capsys, page, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [written(tmp_path / name, title=name) for name in ("a", "b")]
    assert run(capsys, *folders) == (0, "comparison.html\n", "")
    assert (tmp_path / "comparison.html").read_text() == "a b"
    assert run(capsys, *folders) == (
        2,
        "",
        "ipufit report: 'comparison.html' exists already. Pass --force to overwrite it, or "
        "--output and another file.\n",
    )
    assert run(capsys, *folders[::-1], "--force")[0] == 0
    assert (tmp_path / "comparison.html").read_text() == "b a"
    assert not (folders[0] / TRACE).exists()


def test_a_file_of_somebody_elses_stays(tmp_path, capsys, page):
    folder, out = written(tmp_path / "run"), tmp_path / "thesis.html"
    out.write_text("years")
    assert run(capsys, folder, "--output", out)[0] == 2
    assert out.read_text() == "years"
    status, _, err = run(capsys, folder, "--output", tmp_path)
    assert status == 2
    assert err == (
        f"ipufit report: the page must be a file, but {str(tmp_path)!r} is a folder. Pass "
        f"--output {tmp_path}/page.html.\n"
    )


def test_the_runs_own_page_may_be_named(tmp_path, capsys):
    folder = written(tmp_path / "run")
    (folder / PAGE).write_text("old")
    assert run(capsys, folder, "--output", folder / PAGE) == (0, f"{folder / PAGE}\n", "")


def test_json_has_the_numbers_and_makes_no_page(tmp_path, capsys):
    folder = written(tmp_path / "run", warnings=[dict(WARNING)])
    status, out, err = run(capsys, folder, "--json")
    assert (status, err) == (0, "")
    assert not (folder / PAGE).exists()
    assert not (folder / TRACE).exists()
    (found,) = json.loads(out)["runs"]
    each, after = sum(EACH.values()), sum(AFTER.values())
    assert found.pop("phases")["compute"] == 6 * EACH["compute"]
    assert found == {
        "folder": str(folder),
        "title": "Net",
        "status": "finished",
        "error": "",
        "begun": "2024-01-02T03:04:05+00:00",
        "epochs": 2,
        "executions": 6,
        "updates": 6,
        "samples": 24,
        "samples_per_second": 4 / each,
        "seconds": 2.0 + 6 * each + 2 * after,
        "final": {"loss": 0.5},
        "warnings": [{name: value for name, value in WARNING.items() if name != "category"}],
    }


WARNING = {
    "kind": "advice",
    "text": "52 % waits.",
    "cure": "prefetch",
    "category": "",
    "place": "",
    "count": 1,
}


def test_a_run_that_failed_before_it_began_has_few_numbers(tmp_path, capsys):
    folder = tmp_path / "run"
    model = ipufit.Model(nn.Linear(3, 2))
    model.compile("sgd", "mse")
    with pytest.raises(DataError):
        model.fit(torch.ones(4, 5), torch.ones(4, 2), callbacks=[ipufit.Report(folder)], verbose=0)
    (found,) = json.loads(run(capsys, folder, "--json")[1])["runs"]
    assert (found["status"], found["samples_per_second"], found["final"]) == ("failed", None, {})
    assert found["error"].startswith("DataError: training data, batch 0: ")
    assert run(capsys, folder)[0] == 0


def test_json_of_several_and_of_numbers_that_are_not_finite(tmp_path, capsys):
    history = {"epoch": [0], "history": {"loss": [[0, "nan"]]}, "updates": {}}
    folders = [written(tmp_path / "a"), written(tmp_path / "b", history=history)]
    found = json.loads(run(capsys, *folders, "--json")[1])["runs"]
    assert [each["final"] for each in found] == [{"loss": 0.5}, {"loss": "nan"}]


@pytest.mark.parametrize("option", [("--output", "x.html"), ("--force",), ("--open",)])
def test_json_and_a_page_do_not_go_together(option, tmp_path, capsys):
    status, out, err = run(capsys, written(tmp_path / "run"), "--json", *option)
    assert (status, out) == (2, "")
    assert err == (
        f"ipufit report: --json writes no page, but {option[0]} is about one. Leave one of them "
        "out.\n"
    )


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_what_is_no_report_is_one_line(more, tmp_path, capsys):
    status, out, err = run(capsys, tmp_path / "none", *more)
    assert (status, out) == (2, "")
    assert err.startswith("ipufit report: a report must be a folder written by ipufit.Report")
    assert err.count("\n") == 1


def test_a_folder_that_can_not_be_written_is_one_line(tmp_path, capsys, page):
    folder = written(tmp_path / "run")
    status, _, err = run(capsys, folder, "--output", tmp_path / "missing" / "page.html")
    assert status == 2
    assert err.startswith("ipufit report: [Errno 2] No such file or directory: ")


def test_help_teaches(capsys):
    for command, texts in {
        (): ("report  ", "watch  ", "run  ", "check  ", "examples:\n  ipufit check train.py"),
        ("report",): ("Exit status: 0", "ipufit report runs/1 runs/2 --open"),
        ("watch",): ("Exit status: 0", "127.0.0.1", "ipufit watch runs/1 --port 8000"),
    }.items():
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        out = capsys.readouterr().out
        assert [text for text in texts if text not in out] == []
