"""What is printed fits into a terminal: lines end between words, as nobody can read them else."""

import os
import re
import sys

import pytest
import torch
from torch import nn

import ipufit
from ipufit.utils.console import fold, say
from ipufit.utils.interrupts import summarized_interrupt

pytestmark = pytest.mark.both_engines


class Terminal:
    """A stream that is a terminal of so many columns."""

    def __init__(self, columns):
        import fcntl
        import pty
        import struct
        import termios

        self._ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(its, "w")

    def lines(self):
        """Return what was written, and close both ends."""
        self.stream.write("\0")
        self.stream.flush()
        text = b""
        while not text.endswith(b"\0"):
            text += os.read(self._ours, 4096)
        self.stream.close()
        os.close(self._ours)
        return text[:-1].decode().splitlines()


needs_terminal = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")


def printed(columns, monkeypatch, name, call):
    """What a call prints to a standard stream that is a terminal."""
    terminal = Terminal(columns)
    with monkeypatch.context() as patch:
        patch.setattr(sys, name, terminal.stream)
        call()
    return terminal.lines()


TEXT = """\
head
  micro-batch    8  samples that one replica sees at once
    a line that stands further in goes on there

a line of a /very/long/path/that/has/no/place"""
FOLDED = """\
head
  micro-batch    8  samples
              that one
              replica sees
              at once
    a line that stands
        further in goes on
        there

a line of a
    /very/long/path/that/has/no/place"""


def test_lines_end_between_words_and_cells_keep_their_column():
    """A column of its own has at most half of the width; a path stays whole, to be copied."""
    assert fold(TEXT, None) == TEXT
    assert fold(TEXT, 100) == TEXT
    assert fold(TEXT, 28) == FOLDED


def model():
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy")
    return model


@needs_terminal
@pytest.mark.parametrize("columns", [60, 80])
def test_explain_breaks_no_word(columns, monkeypatch, capsys):
    """Of the table and of the sentences below, each of which is longer than a line."""
    trained, x, y = model(), torch.randn(203, 20), torch.randint(0, 4, (203,))
    plan = {"device_iterations": 2, "gradient_accumulation": 2}
    trained.fit(x, y, batch_size=8, verbose=0, **plan)
    trained.explain()
    text = capsys.readouterr().out
    lines = printed(columns, monkeypatch, "stdout", trained.explain)
    assert max(map(len, text.splitlines())) > columns
    assert max(map(len, lines)) < columns
    assert " ".join(lines).split() == text.split()
    table = lines[1 : lines.index(next(line for line in lines if line.startswith("One")))]
    assert {line[: line.find(line.split()[0])] for line in table} == {"  ", " " * 28}


@needs_terminal
def test_a_sentence_that_is_said_breaks_no_word(monkeypatch):
    """Callbacks say which weights they restore and where files are."""
    text = "epoch 3: ReduceLROnPlateau sets the learning rate to 0.0001"
    lines = printed(40, monkeypatch, "stderr", lambda: say(text))
    assert lines == ["epoch 3: ReduceLROnPlateau sets the", "    learning rate to 0.0001"]


@needs_terminal
def test_lines_of_epochs_break_no_number(monkeypatch):
    """With ``verbose=2``, too, where a loss was cut into two numbers."""
    trained, x, y = model(), torch.randn(40, 20), torch.randint(0, 4, (40,))

    def fit():
        trained.fit(x, y, epochs=2, validation_data=(x, y), verbose=2)

    lines = printed(40, monkeypatch, "stderr", fit)
    assert max(map(len, lines)) < 40
    assert len(lines) > 4
    for line in lines:
        assert re.search(r"(,|\.\.\.| s|samples/s=\d+)$", line), line


@needs_terminal
def test_the_sentence_of_ctrl_c_breaks_no_word(monkeypatch):
    """It says what is left of hours of training."""
    text = "Ctrl-C ends fit in epoch 1 of 200, after 643 of 25375 updates; the module has weights"

    def interrupt():
        with summarized_interrupt(lambda error: text):
            raise KeyboardInterrupt

    def end():
        with pytest.raises(KeyboardInterrupt) as end:
            interrupt()
        sys.excepthook(end.type, end.value, end.tb)

    lines = printed(80, monkeypatch, "stderr", end)
    assert " ".join(lines).split() == ["ipufit:", *text.split()]
    assert [len(line) < 80 for line in lines] == [True, True]


class Tee:
    """A stream as many programs put in the place of one: it can write, and nothing else."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_a_stream_that_can_only_write_is_no_terminal(monkeypatch):
    trained, x, y = model(), torch.randn(40, 20), torch.randint(0, 4, (40,))
    tees = {name: Tee() for name in ("stdout", "stderr")}
    for name, tee in tees.items():
        monkeypatch.setattr(sys, name, tee)
    trained.fit(x, y, epochs=2)
    trained.explain()
    assert "epoch 2/2: 2 updates, loss=" in tees["stderr"].text
    assert tees["stdout"].text.startswith("Plan for training")
