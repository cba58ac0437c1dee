"""The log: levels, lines, where they go, and what ends a program."""

import logging
import os
import re
import subprocess
import sys

import pytest

import ipufit.poptorch as poptorch
from ipufit.poptorch import _logging
from tests.poptorch.option_texts import exactly


@pytest.fixture(autouse=True)
def restored_level():
    before = poptorch.logger.level
    yield
    poptorch.logger.setLevel(before)


@pytest.mark.parametrize(
    ("name", "number", "level"),
    [
        ("TRACE", 0, logging.DEBUG),
        ("DEBUG", 1, logging.DEBUG),
        ("INFO", 2, logging.INFO),
        ("WARN", 3, logging.WARNING),
        ("ERR", 4, logging.ERROR),
        ("OFF", 6, logging.CRITICAL),
    ],
)
def test_levels_have_names_and_numbers(name, number, level):
    for value in (name, number):
        poptorch.logger.setLevel(logging.NOTSET)
        poptorch.setLogLevel(value)
        assert poptorch.logger.level == level
    poptorch.logger.setLevel(logging.NOTSET)
    poptorch.poptorch_core.setLogLevel(number)
    assert poptorch.logger.level == level
    assert _logging.setPopartLogLevel(name) is None
    assert poptorch.poptorch_core.setPopartLogLevel(number) is None


def test_levels_that_are_none_are_refused():
    for value in (5, -1, 7):
        with pytest.raises(
            ValueError,
            match=exactly(
                f"Invalid log level integer {value}. Use 0 (TRACE), 1 (DEBUG), 2 (INFO), 3 (WARN), "
                "4 (ERR) or 6 (OFF)."
            ),
        ):
            poptorch.setLogLevel(value)
    for value in ("wibble", None, "debug", []):
        with pytest.raises(
            ValueError,
            match=exactly(
                f"Unknown log level: {value}. Valid values are DEBUG, ERR, INFO, OFF, TRACE and "
                "WARN"
            ),
        ):
            poptorch.setLogLevel(value)
    for value in (0, "FOO"):
        with pytest.raises(
            ValueError,
            match=exactly(
                "Level must be one of TRACE, TRACE_ALL, DEBUG, DEBUG_IR, INFO, WARN, ERR, OFF, got "
                f"{value!r}."
            ),
        ):
            _logging.setPopartLogLevel(value)


def test_a_line_has_time_name_level_and_text(capsys):
    poptorch.setLogLevel("INFO")
    poptorch.logger.warning("%d of %s", 1, "these")
    poptorch.logger.info("shown")
    poptorch.logger.debug("not shown")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    time = r"\[\d\d:\d\d:\d\d\.\d\d\d\]"
    assert re.fullmatch(rf"{time} \[poptorch::python\] \[warning\] 1 of these", lines[0])
    assert re.fullmatch(rf"{time} \[poptorch::python\] \[info\] shown", lines[1])


def test_lines_go_where_stderr_goes_at_that_moment(capsys, monkeypatch, tmp_path):
    with open(tmp_path / "log", "w+") as file:
        monkeypatch.setattr(sys, "stderr", file)
        poptorch.logger.error("into the file")
        monkeypatch.undo()
        file.seek(0)
        assert file.read().endswith("[error] into the file\n")
    poptorch.logger.error("onto the screen")
    assert capsys.readouterr().err.endswith("[error] onto the screen\n")


def test_a_terminal_gets_colours(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    poptorch.logger.error("red")
    assert re.fullmatch(r"\x1b\[1;31m\[.*\] red\x1b\[0m\n", capsys.readouterr().err)


def test_an_exception_is_logged_with_its_traceback(capsys):
    try:
        raise KeyError("lost")
    except KeyError:
        poptorch.logger.exception("while looking")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("[error] while looking")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "KeyError: 'lost'"


def ended(level):
    """A program that imports the log alone, and then fails."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('_logging', {_logging.__file__!r})\n"
        "_logging = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(_logging)\n"
        "_logging.logger.warning('not shown')\n"
        "raise RuntimeError('the end')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "POPTORCH_LOG_LEVEL": level},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )


@pytest.mark.long
def test_what_ends_a_program_is_logged():
    program = ended("ERR")
    assert program.returncode == 1
    lines = program.stderr.splitlines()
    assert lines[0].endswith("[poptorch::python] [critical] RuntimeError: the end")
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-1] == "RuntimeError: the end"


@pytest.mark.long
def test_a_wrong_level_in_the_environment_is_refused_on_import():
    program = ended("LOUD")
    assert program.returncode == 1
    assert program.stderr.splitlines()[-1] == (
        "ValueError: Unknown log level: LOUD. Valid values are DEBUG, ERR, INFO, OFF, TRACE and "
        "WARN"
    )


def test_the_hook_of_another_stays(monkeypatch):
    """A debugger's or a notebook's; and the log has one handler however often it starts."""
    for hook, expected in (
        (sys.__excepthook__, _logging._log_uncaught),
        (_logging._log_uncaught, _logging._log_uncaught),
        (ended, ended),
    ):
        monkeypatch.setattr(sys, "excepthook", hook)
        _logging._start()
        assert sys.excepthook is expected
    assert len(poptorch.logger.handlers) == 1


@pytest.mark.parametrize("output", [b"what it said", "what it said"])
def test_the_last_words_of_a_child_process_are_logged(capsys, output):
    error = subprocess.CalledProcessError(3, ["false"], stderr=output)
    _logging._log_uncaught(type(error), error, None)
    assert capsys.readouterr().err.splitlines()[-1] == "what it said"
