"""What a user sees while it runs, and what is left afterwards."""

import contextlib
import os
import re
import subprocess
import sys
import traceback
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import ProgbarLogger
from ipufit.errors import ConfigurationError
from ipufit.utils.console import resolve_verbose
from tests.copies import CAN_COPY


def model_and_loader(n=23):
    """A dense net, compiled, and data for it."""
    model = ipufit.Model(nn.Linear(3, 2))
    model.compile("sgd", "cross_entropy", ["accuracy"])
    x, y = torch.randn(n, 3), torch.randint(0, 2, (n,))
    return model, DataLoader(TensorDataset(x, y), batch_size=2)


def final_bars(text):
    """The last state of every bar that was drawn."""
    states = [line for line in re.split(r"[\r\n]+", text) if "|" in line]
    last = {}
    for state in states:
        last[state.split(":")[0]] = state
    return last


@pytest.mark.long
@pytest.mark.parametrize("di", [1, 5, 100])
def test_the_bar_counts_updates_whatever_the_execution(di, capsys):
    """With many updates per call, bars elsewhere have counted wrongly again and again."""
    model, loader = model_and_loader()
    model.fit(loader, epochs=2, gradient_accumulation=2, device_iterations=di, verbose=1)
    out, err = capsys.readouterr()
    assert out == ""
    bars = final_bars(err)
    assert set(bars) == {"epoch 1/2", "epoch 2/2"}
    for bar in bars.values():
        assert "| 6/6 [" in bar
        assert "100%" in bar
        assert re.search(r"loss=\d\.\d+, accuracy=\d\.\d+, samples/s=\d+", bar)


@pytest.mark.long("ipu-standin")
def test_recording_is_reported_apart(capsys):
    """A first epoch that seems slow is the recording; the rate must not hide or contain it."""
    model, loader = model_and_loader()
    model.fit(loader, verbose=1)
    assert re.search(r"recorded the program in \d+\.\d\d s", capsys.readouterr().err)
    assert model.history.params["capture_seconds"] == model.capture_seconds > 0


@pytest.mark.long("ipu-standin")
def test_one_line_an_epoch(capsys):
    """In a pipe or a log file a bar is noise."""
    model, loader = model_and_loader()
    model.fit(loader, epochs=2, validation_data=loader, verbose=2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("recorded the program in ")
    pattern = (
        r"epoch {}/2: 12 updates, loss=\S+, accuracy=\S+, val_loss=\S+, val_accuracy=\S+, "
        r"samples/s=\d+"
    )
    assert re.fullmatch(pattern.format(1), lines[1])
    assert re.fullmatch(pattern.format(2), lines[2])
    assert len(lines) == 3


class Terminal:
    """What a terminal of so many columns shows over time, for all that tqdm sends one.

    Attributes:
        states: of the line that is written, one by one.
        lines: those that are finished.
    """

    def __init__(self, columns):
        self.columns = columns
        self.states, self.lines = [], []
        self._line, self._column = [], 0

    def feed(self, text):
        for one in text:
            if one in "\r\n":
                shown = "".join(self._line).rstrip()
                if shown and self.states[-1:] != [shown]:
                    self.states.append(shown)
                self._column = 0
                if one == "\n":
                    self.lines.append(shown)
                    self._line = []
            else:
                assert one.isprintable(), repr(one)
                assert self._column < self.columns, "the line is longer than the terminal is wide"
                self._line[self._column : self._column + 1] = [one]
                self._column += 1


IN_TERMINAL = """
import sys, time, torch, ipufit
from ipufit.callbacks import LambdaCallback

slow = LambdaCallback(
    on_train_batch_end=lambda batch, logs: time.sleep(0.03),
    on_test_batch_end=lambda batch, logs: time.sleep(0.01),
    on_predict_batch_end=lambda batch, logs: time.sleep(0.01),
)
torch.manual_seed(0)
data = [(torch.randn(2, 3), torch.tensor([0, 1]))] * 24
model = ipufit.Model(torch.nn.Linear(3, 2))
model.compile("sgd", "cross_entropy", ["accuracy"])
held_out = data if "validation" in sys.argv else None
stream = (pair for pair in data) if "stream" in sys.argv else data
epochs = 1 if "stream" in sys.argv else 2
model.fit(stream, epochs=epochs, validation_data=held_out, callbacks=[slow], verbose=1)
model.evaluate(data, callbacks=[slow], verbose=1)
model.predict(data, callbacks=[slow], verbose=1)
"""


def start(script, output, errors, *arguments):
    """Run a script in a copy of this process, which has imported torch already, where that works.

    Returns:
        The number of the process.
    """
    if not CAN_COPY:
        command = [sys.executable, "-c", script, *arguments]
        files = [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, errors, 2)]
        return os.posix_spawn(sys.executable, command, os.environ, file_actions=files)
    with warnings.catch_warnings():
        # Newer Pythons warn of other threads; those of the test runner do not matter to the script.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1) for number in (1, 2))
        sys.argv = ["script", *arguments]
        exec(script, {"__name__": "__main__"})
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def watched(columns, *how):
    """Run the script in a terminal of this width, and see what it shows."""
    import fcntl
    import pty
    import struct
    import termios

    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = start(IN_TERMINAL, its, its, *how)
    os.close(its)
    text = b""
    # Linux says that the other end is closed by an error.
    with contextlib.suppress(OSError):
        while True:
            piece = os.read(ours, 4096)
            if not piece:
                break
            text += piece
    os.close(ours)
    assert os.waitpid(process, 0)[1] == 0, text.decode()
    terminal = Terminal(columns)
    terminal.feed(text.decode())
    return terminal


TRAINED = r"loss=\d\.\d+(e-\d+)?"
VALUE = r"\d+(\.\d+)?(e-\d+)?"
# The last line of an epoch: at 60 columns one of four values has no room.
WHOLE = {
    60: rf"epoch 2/2: .*{TRAINED}, accuracy={VALUE}, val_loss={VALUE}",
    80: rf"epoch 2/2: .*{TRAINED}, accuracy={VALUE}, val_loss={VALUE}, val_accuracy={VALUE}",
    120: rf"epoch 2/2: .*24/24 \[.*{TRAINED}, .*val_accuracy={VALUE}(, samples/s={VALUE})?\]",
}


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("columns", WHOLE)
def test_a_terminal_shows_the_loss_all_the_time_and_whole_lines(columns):
    """The loss was seen only when an epoch was over, and the last line was cut off."""
    terminal = watched(columns, "validation")
    for epoch in ("epoch 1/2", "epoch 2/2"):
        first, *later = [state for state in terminal.states if state.startswith(epoch)]
        assert "0/24" in first
        assert len(later) > 2
        for state in later:
            assert re.search(rf"\b{TRAINED}", state), state
            # The bar comes last of what needs no room.
            assert ("val_loss" in state) or columns < 80 or "|" in state
    recorded, _, last, evaluated, predicted = terminal.lines
    assert recorded.startswith("recorded the program in ")
    assert re.fullmatch(WHOLE[columns], last), last
    assert re.match(rf"evaluate: .*\b{TRAINED}", evaluated)
    assert re.match(r"predict: .*24/24 \[", predicted)


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_terminal_shows_the_loss_where_nobody_knows_the_end():
    """A stream has no total, no bar and no time that is left."""
    terminal = watched(60, "stream")
    first, *later = [state for state in terminal.states if state.startswith("epoch")]
    assert "0 updates [" in first
    assert later
    for state in later:
        assert re.search(TRAINED, state), state
    assert "24" in later[-1]
    # A line that is cut off ends within a word.
    for state in terminal.states[1:]:
        assert re.search(rf"(\]|={VALUE})$", state), state


PIPED = """
import torch
import ipufit
from ipufit.callbacks import LearningRateScheduler

data = [(torch.randn(2, 3), torch.tensor([0, 1]))] * 3
rate = LearningRateScheduler(lambda epoch: 0.25)
for options in ({"verbose": 0}, {}):
    model = ipufit.Model(torch.nn.Linear(3, 2))
    model.compile("sgd", "cross_entropy")
    model.fit(data, epochs=2, validation_data=data, callbacks=[rate], **options)
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here")
def test_no_terminal_gets_one_line_an_epoch(tmp_path):
    """Without being asked, with what callbacks add; or nothing at all."""
    with open(tmp_path / "out", "w") as out, open(tmp_path / "errors", "w") as errors:
        process = start(PIPED, out.fileno(), errors.fileno())
    shown, told = (tmp_path / "out").read_text, (tmp_path / "errors").read_text
    assert os.waitpid(process, 0)[1] == 0, told()
    recorded, *lines = told().splitlines()
    assert recorded.startswith("recorded the program in ")
    assert (shown(), len(lines)) == ("", 2)
    for epoch, line in enumerate(lines):
        assert re.fullmatch(
            rf"epoch {epoch + 1}/2: 3 updates, loss=\S+, val_loss=\S+, learning_rate=0.25, "
            r"samples/s=\d+",
            line,
        )


@pytest.mark.long
def test_silence(capsys):
    """verbose=0 prints nothing at all."""
    model, loader = model_and_loader()
    model.fit(loader, epochs=2, validation_data=loader, verbose=0)
    model.evaluate(loader, verbose=0)
    model.predict(loader, verbose=0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.long("ipu-standin")
def test_a_progress_bar_of_the_user_is_the_only_one(capsys):
    """As in Keras; two bars would write over each other."""
    model, loader = model_and_loader()
    model.fit(loader, callbacks=[ProgbarLogger(2)], verbose=2)
    assert capsys.readouterr().err.count("epoch 1/1: 12 updates") == 1


@pytest.mark.long
def test_bars_that_are_switched_off_for_the_whole_process():
    """tqdm's own switch: training goes on without a bar."""
    code = (
        "import torch, ipufit; m = ipufit.Model(torch.nn.Linear(1, 1)); m.compile('sgd', 'mse');"
        "x = torch.rand(4, 1); m.fit(x, x, epochs=2, verbose=1); m.evaluate(x, x, verbose=1);"
        "m.predict(x, verbose=1)"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "TQDM_DISABLE": "1"},
    )
    assert "|" not in ran.stderr


@pytest.mark.long("ipu-standin")
def test_bars_of_evaluate_and_predict(capsys):
    """They count forward passes, each over all replicas."""
    model, loader = model_and_loader()
    model.evaluate(loader, ipus=2, device_iterations=4, verbose=1)
    model.predict(loader, ipus=2, device_iterations=4, verbose=1)
    bars = final_bars(capsys.readouterr().err)
    assert "| 6/6 [" in bars["evaluate"]
    assert "accuracy=" in bars["evaluate"]
    assert "| 6/6 [" in bars["predict"]


@pytest.mark.long("ipu-standin")
def test_the_bar_is_closed_after_an_error(capsys):
    """An exception must not leave a bar that later output is written into."""

    class Fail(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError

    model, loader = model_and_loader()
    with pytest.raises(ZeroDivisionError):
        model.fit(loader, callbacks=[Fail()], verbose=1)
    assert capsys.readouterr().err.endswith("\n")


def test_auto_is_a_line_an_epoch_outside_a_terminal(monkeypatch):
    """And a bar in one, as in Keras."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert resolve_verbose("auto") == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert resolve_verbose("auto") == 1
    assert [resolve_verbose(v) for v in (0, 1, 2, True, False)] == [0, 1, 2, 1, 0]
    assert isinstance(ProgbarLogger(1), ipufit.callbacks.Callback)


@pytest.mark.long("ipu-standin")
def test_history_is_keras(engine):
    """Lists by name, one value an epoch, validation under val_."""
    model, loader = model_and_loader()
    history = model.fit(loader, epochs=3, validation_data=loader, seed=4, ipus=2, verbose=0)
    assert history is model.history
    assert history.epoch == [0, 1, 2]
    assert list(history.history) == ["loss", "accuracy", "val_loss", "val_accuracy"]
    assert {len(values) for values in history.history.values()} == {3}
    seconds = history.params.pop("capture_seconds")
    assert seconds > 0
    assert history.params == {
        "epochs": 3,
        "verbose": 0,
        "updates": 6,
        "samples": 23,
        "metrics": ["loss", "accuracy", "val_loss", "val_accuracy"],
        "directions": {
            "loss": "min",
            "accuracy": "max",
            "val_loss": "min",
            "val_accuracy": "max",
        },
        "adds": [],
        "gradient_reduction": "mean",
        "engine": engine,
        "seed": 4,
        "micro_batch_size": 2,
        "gradient_accumulation": 1,
        "replicas": 2,
        "device_iterations": 1,
        "ipus": 2,
        "dropped_samples": 0,
        "prefetch": int(engine != "embedded"),
        "updates_done": 18,
        "jit": "graph" if engine == "embedded" else "auto",
        # The last batch of an epoch is smaller, which is filled up on an IPU.
        "recordings": 2 if engine == "embedded" else 1,
    }
    assert re.fullmatch(r"History\(3 epochs: loss=.*, val_accuracy=\S+\)", repr(history))


@pytest.mark.long
def test_history_plots(tmp_path):
    """One panel a value, training and validation together, saved in the format of the suffix."""
    pytest.importorskip("matplotlib")
    model, loader = model_and_loader()
    history = model.fit(loader, epochs=3, validation_data=loader, verbose=0)
    figure = history.plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "accuracy"]
    for axes, name in zip(figure.axes, ("loss", "accuracy")):
        drawn = {line.get_label(): line.get_ydata().tolist() for line in axes.get_lines()}
        assert drawn == {
            "training": history.history[name],
            "validation": history.history[f"val_{name}"],
        }
        assert axes.get_lines()[0].get_xdata().tolist() == [1, 2, 3]
    history.plot(str(tmp_path / "curves.svg"))
    assert (tmp_path / "curves.svg").exists()


def test_plot_without_an_epoch_or_matplotlib(monkeypatch):
    """Both are told in words."""
    history = ipufit.History()
    with pytest.raises(ConfigurationError) as caught:
        history.plot()
    assert str(caught.value) == "plot needs at least one finished epoch, there is none yet."
    history.append(0, {"loss": 1.0})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError) as caught:
        history.plot()
    assert str(caught.value) == (
        "History.plot needs matplotlib, which is not installed. Run: pip install ipufit[plot]"
    )
