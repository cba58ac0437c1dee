"""What of a terminal pages show, and what of that must come again."""

import contextlib

import pytest
import torch

import ipufit
from tests.pages.terminal import Terminal, shortened, with_lines_of

PAGE = """\
recorded the program in 0.31 s
epoch 1/2: 45 updates, loss=1.233, accuracy=0.6263, val_loss=0.6544,
  val_accuracy=0.8722, samples/s=4667
...
epoch 2/2: 45 updates, loss=0.0391, accuracy=0.993
tensor(3)
"""


@pytest.mark.parametrize(
    ("written", "screen"),
    [
        ("one\ntwo\n", "one\ntwo\n"),
        ("epoch 1: 3/9\repoch 1: 9/9\n", "epoch 1: 9/9\n"),
        ("longer\rabc\n", "abcger\n"),
        ("longer\r\x1b[Kabc\n", "abc\n"),
        ("one\ntwo\nthree\x1b[2A\r\x1b[Jfour\n", "four\n"),
        ("\x1b[?25l\x1b[1;33mred\x1b[0m   \n", "red\n"),
    ],
)
def test_the_screen_has_what_stays(written, screen):
    """As a reader who runs the code sees it in the end, without the states in between."""
    terminal = Terminal()
    print(written, end="", file=terminal)
    assert terminal.screen() == screen
    assert terminal.isatty()


def test_times_speeds_and_layout_may_differ():
    """Another machine is faster, and another width has room for more."""
    screen = """\
recorded the program in 12.01 s
epoch 1/2: 100%|█████| 45/45 [00:01<00:00, 93.9 updates/s, loss=1.234, accuracy=0.6263, \
val_loss=0.6551, val_accuracy=0.8694, samples/s=3]
epoch 2/2: 45 updates, loss=0.0389,
  accuracy=0.993, samples/s=123456
tensor(3)
"""
    assert with_lines_of(PAGE, screen) == PAGE.replace("...\n", "")


@pytest.mark.parametrize(
    ("shown", "came"),
    [
        ("loss=1.233", "loss=1.333"),
        ("accuracy=0.6263", "accuracy=0.6463"),
        ("loss=1.233", "lost=1.233"),
        ("loss=1.233", "loss=nan"),
        ("epoch 1/2", "epoch 1/3"),
        (", samples/s=4667", ", samples/s=4667, learning_rate=0.1"),
        ("tensor(3)", "tensor(4)"),
        ("recorded the program in 0.31 s", "recorded no program in 0.31 s"),
    ],
)
def test_names_and_values_must_come_again(shown, came):
    """A page that shows what no longer comes is found."""
    screen = PAGE.replace(shown, came)
    assert screen != PAGE
    assert with_lines_of(PAGE, screen) == screen


def test_a_line_of_the_page_stands_for_one_line():
    """An epoch that comes twice is shown twice."""
    line = "epoch 1/1: loss=1\n"
    other = "epoch 1/1: loss=1.001\n"
    assert with_lines_of(line, line + other) == line + other
    assert with_lines_of(line + line, line + other) == line + line


def test_a_loss_that_is_not_a_number_may_be_shown():
    """NaN is unlike itself, but a page shows it where that is what happens."""
    assert (
        with_lines_of("epoch 1/1: loss=nan\n", "epoch 1/1:  loss=nan\n") == "epoch 1/1: loss=nan\n"
    )


def test_what_is_left_out_stays_out():
    """New outputs are written into a page as short as they were."""
    assert shortened("1\n2\n", "3\n4\n5\n") == "3\n4\n5\n"
    assert shortened("1\n2\n...\n3\n", "4\n5\n6\n7\n8\n") == "4\n5\n...\n8\n"
    assert shortened("1\n...\n", "4\n5\n6\n") == "4\n...\n"
    epochs = "epoch 1/3: 1\nepoch 2/3: 2\n  3\nepoch 3/3: 4\n  5\n"
    shown = "epoch 1/3: 1\n...\nepoch 3/3: 4\n  5\n"
    assert shortened("epoch 1/3: 7\n...\nepoch 3/3: 7\n", epochs) == shown
    assert shortened("1\n...\n2\n...\n", "1\n3\n2\n4\n") == "1\n...\n2\n...\n"


@pytest.mark.parametrize(
    ("page", "screen", "written"),
    [
        ("1 ...\n", "3 4 5\n", "3 ...\n"),
        ("at ...: no row 1\n", "at a.py:7: no row 2\n", "at ...: no row 2\n"),
        ("a ... z\n", "a b c y\n", "a ... y\n"),
        ("row 1\nat .../a.py:...\n", "row 2\n  at /x/a.py:9\n", "row 2\nat .../a.py:...\n"),
        ("a ... b,\nc ... d\n", "a 1 b, c 2 e\n", "a ... b,\nc ... e\n"),
        ("x ... y ...\n", "3\n4\n", "3\n4\n"),
        ("at ...: 1\n", "epoch 1/1\nat a.py: 1\n", "epoch 1/1\nat ...: 1\n"),
    ],
)
def test_a_text_with_gaps_is_written_too(page, screen, written):
    """Words that changed are in the page, though it leaves out paths and what is too long."""
    assert shortened(page, screen) == written


def test_a_fit_is_shown_as_in_a_terminal():
    """By itself, fit draws a bar where somebody is watching, and the line of the epoch stays."""
    terminal = Terminal()
    torch.manual_seed(0)
    model = ipufit.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    with contextlib.redirect_stderr(terminal):
        history = model.fit(torch.ones(8, 2), torch.zeros(8, 1), batch_size=4, seed=0)
    loss = f"{history.history['loss'][0]:.4g}"
    page = f"recorded the program in 1.00 s\nepoch 1/1: 2 updates, loss={loss}, samples/s=1\n"
    assert history.params["verbose"] == 1
    assert "\r" in terminal.getvalue()
    assert with_lines_of(page, terminal.screen()) == page
