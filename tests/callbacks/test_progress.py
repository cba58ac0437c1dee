"""What a user sees while it runs, and what is left afterwards."""

import contextlib
import os
import re
import signal
import sys
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
from tests.told import message


def model_and_loader(n=23):
    """A dense net, compiled, and data for it."""
    model = ipufit.Model(nn.Linear(3, 2))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    x, y = torch.randn(n, 3), torch.randint(0, 2, (n,))
    return model, DataLoader(TensorDataset(x, y), batch_size=2)


def drawn(text):
    """The states of the line that is drawn where no terminal is, one after another."""
    return [state.rstrip() for state in re.split(r"[\r\n]+", text) if state.strip()]


@pytest.mark.long
@pytest.mark.parametrize("di", [1, 5, 100])
def test_the_bar_counts_updates_whatever_the_execution(di, capsys):
    """With many updates per call, bars elsewhere have counted wrongly again and again."""
    model, loader = model_and_loader()
    model.fit(loader, epochs=2, gradient_accumulation=2, device_iterations=di, verbose=1)
    out, err = capsys.readouterr()
    assert out == ""
    states = drawn(err)
    for epoch in ("epoch 1/2", "epoch 2/2"):
        first, *later, last = [state for state in states if state.startswith(epoch)]
        assert re.fullmatch(rf"{epoch} \S+ 0/6", first)
        for state in later:
            count = int(re.search(r" (\d)/6", state)[1])
            assert count == 6 or count % di == 0
            assert re.search(r"loss=\d\.\d+, accuracy=\d(\.\d+)?$", state)
        values = r"loss=\d\.\d+, accuracy=\d\.\d+, samples/s=\d+"
        assert re.fullmatch(rf"{epoch}: 6 updates, {values}", last)


@pytest.mark.long("ipu-standin")
def test_recording_is_reported_apart(capsys):
    """A first epoch that seems slow is the recording; the rate must not hide or contain it."""
    model, loader = model_and_loader()
    model.fit(loader, verbose=2)
    before, after, _ = capsys.readouterr().err.splitlines()
    assert before == "recording the program ..."
    assert re.fullmatch(r"recorded the program in \d+\.\d\d s", after)
    assert model.history.params["capture_seconds"] == model.capture_seconds > 0


@pytest.mark.embedded_only("an IPU compiles a program anew where a fit begins")
def test_nothing_is_said_of_a_recording_that_is_there(capsys):
    """A second fit was said to record for as long as the first one had."""
    model, loader = model_and_loader()
    model.fit(loader, verbose=0)
    model.fit(loader, verbose=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("epoch 1/1: 12 updates, loss=")


def test_recording_is_shown_while_it_records(capsys, engine):
    """Minutes may pass, in which nobody knew what was going on."""
    seen = []

    class Looks(nn.Linear):
        def forward(self, x):
            seen.append(capsys.readouterr().err)
            return super().forward(x)

    _, loader = model_and_loader()
    for verbose in (1, 2):
        model = ipufit.Model(Looks(3, 2), engine=engine)
        model.compile("sgd", "cross_entropy")
        for call in (model.fit, model.evaluate, model.predict):
            del seen[:]
            call(loader, verbose=verbose)
            assert "".join(seen).strip().endswith("recording the program ...")
            capsys.readouterr()


@pytest.mark.parametrize("verbose", [1, 2])
def test_one_is_singular(verbose, capsys):
    """A single batch is what a newcomer tries first."""
    model, loader = model_and_loader(2)
    model.fit(loader, verbose=verbose)
    model.predict(loader, verbose=verbose)
    states = drawn(capsys.readouterr().err)
    assert any(state.startswith("epoch 1/1: 1 update, loss=") for state in states)
    assert states[-1] == "predict: 1 batch"


class Branches(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    ("net", "options"), [(nn.Linear, {"run_eagerly": True}), (Branches, {})], ids=["asked", "falls"]
)
@pytest.mark.both_engines
def test_where_the_module_itself_runs_no_line_says_that_it_was_recorded(net, options, capsys):
    """Who reads that a program was recorded would look for the reason of its speed elsewhere."""
    _, loader = model_and_loader()
    model = ipufit.Model(net(3, 2), engine="embedded")
    model.compile("sgd", "cross_entropy", **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Branches can't be recorded")
        model.fit(loader, verbose=2)
    (line,) = [line for line in drawn(capsys.readouterr().err) if not line.endswith(" ...")]
    assert line.startswith("epoch 1/1: 12 updates, loss=")


@pytest.mark.embedded_only("an IPU compiles another program for another plan")
def test_a_fit_that_records_nothing_does_not_say_so(capsys):
    """Whether another number of micro-batches may be merged is looked up, not recorded."""
    model = ipufit.Model(nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2)))
    model.compile("sgd", "cross_entropy")
    _, loader = model_and_loader()
    for accumulation, lines in ((1, 2), (2, 1), (3, 1)):
        model.fit(loader, gradient_accumulation=accumulation, verbose=2)
        assert len([s for s in drawn(capsys.readouterr().err) if not s.endswith(" ...")]) == lines


@pytest.mark.long("ipu-standin")
def test_one_line_an_epoch(capsys):
    """In a pipe or a log file a bar is noise."""
    model, loader = model_and_loader()
    model.fit(loader, epochs=2, validation_data=loader, verbose=2)
    lines = capsys.readouterr().err.splitlines()[1:]
    assert lines[0].startswith("recorded the program in ")
    pattern = (
        r"epoch {}/2: 12 updates, loss=\S+, accuracy=\S+, val_loss=\S+, val_accuracy=\S+, "
        r"samples/s=\d+"
    )
    assert re.fullmatch(pattern.format(1), lines[1])
    assert re.fullmatch(pattern.format(2), lines[2])
    assert len(lines) == 3


class Terminal:
    """What a terminal of so many columns shows over time, for all that is sent to one.

    Attributes:
        states: the lines that it showed, one list after another.
    """

    def __init__(self, columns):
        self.columns = columns
        self.states = []
        self._lines, self._row, self._column = [[]], 0, 0

    def feed(self, text):
        for sequence, one in re.findall(r"\x1b\[(\d*[AJ])|([\s\S])", text):
            if sequence or one in "\r\n":
                self._look()
            if sequence.endswith("A"):
                self._row -= int(sequence[:-1])
                assert self._row >= 0
            elif sequence:
                assert sequence == "J"
                del self._lines[self._row + 1 :], self._lines[self._row][self._column :]
            elif one == "\r":
                self._column = 0
            elif one == "\n":
                self._row, self._column = self._row + 1, 0
                self._lines += [[]] * (self._row == len(self._lines))
            else:
                assert one.isprintable(), repr(one)
                assert self._column < self.columns, "the line is longer than the terminal is wide"
                self._lines[self._row][self._column : self._column + 1] = [one]
                self._column += 1
        self._look()

    def _look(self):
        shown = ["".join(line).rstrip() for line in self._lines]
        while shown and not shown[-1]:
            del shown[-1]
        # A state that begins with another one is that one while it is drawn.
        if self.states and "\n".join(shown).startswith("\n".join(self.states[-1])):
            del self.states[-1]
        self.states.append(shown)


IN_TERMINAL = """
import signal, sys, torch, ipufit
from ipufit.callbacks import LambdaCallback, progbar_logger

progbar_logger._INTERVAL = 0  # draws every state, however fast the machine is

def share_of_the_first_class(prediction, target):
    return (prediction.argmax(1) == 0).float().mean()

def end(epoch, logs):
    print("printed after", epoch + 1)
    sys.stdout.write("in two")
    sys.stdout.write(" pieces\\n")

def look(batch, logs):
    if "interrupt" in sys.argv and batch == 11 and model.history.epoch:
        signal.raise_signal(signal.SIGINT)
    if "error" in sys.argv and batch == 11:
        raise ZeroDivisionError("of a callback")

def validated(batch, logs):
    if "late" in sys.argv and batch == 11:
        raise ZeroDivisionError("of a callback")

watching = LambdaCallback(on_train_batch_end=look, on_test_batch_end=validated, on_epoch_end=end)
torch.manual_seed(0)
data = [(torch.randn(2, 3), torch.tensor([0, 1]))] * 24
model = ipufit.Model(torch.nn.Linear(3, 2))
model.compile("sgd", "cross_entropy", metrics=["accuracy", share_of_the_first_class])
held_out = data if "validation" in sys.argv else None
stream = (pair for pair in data) if "stream" in sys.argv else data
epochs = 1 if "stream" in sys.argv else 2
verbose = "rich" if "rich" in sys.argv else 1
model.fit(stream, epochs=epochs, validation_data=held_out, callbacks=[watching], verbose=verbose)
model.evaluate(data, verbose=verbose)
model.predict(data, verbose=verbose)
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
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def written(columns, *how, status=0):
    """Run the script in a terminal of this width; what it writes there."""
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
    assert os.waitpid(process, 0)[1] == status, text.decode()
    return text.decode()


def watched(columns, *how, status=0):
    """Run the script in a terminal of this width, and see what it shows."""
    terminal = Terminal(columns)
    terminal.feed(written(columns, *how, status=status))
    return terminal.states


def told_before(text):
    """What a terminal got before an error, and the error, of which PopTorch writes a line first."""
    before, error = re.split(
        r"(?=(?:\x1b\[[\d;]+m)?\[\d\d:\d\d:\d\d)|(?=Traceback)", text, maxsplit=1
    )
    return before, error


def block(state, title):
    """What stands from the last line with this title on, as one line, and its first line."""
    last = max(place for place, line in enumerate(state) if line.startswith(title))
    return " ".join(map(str.strip, state[last:])), state[last]


VALUE = r"\d+(\.\d+)?(e-\d+)?"
VALUES = rf"loss={VALUE}, accuracy={VALUE}, share_of_the_first_class={VALUE}"
VALIDATED = re.sub(r"(\w+)=", r"val_\1=", VALUES)
needs_terminal = pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")


@needs_terminal
@pytest.mark.few("80")
@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_a_terminal_shows_every_value_all_the_time(columns):
    """The loss was seen only when an epoch was over, and the last line was cut off."""
    states = watched(columns, "validation")
    assert states[0] == ["recording the program ..."]
    for epoch in (1, 2):
        title, kept = f"epoch {epoch}/2 ", f"epoch {epoch}/2: "
        running = [
            state
            for state in states
            if any(line.startswith(title) for line in state)
            and not any(line.startswith(kept) for line in state)
        ]
        held_out = [s for s in running if any(line.startswith("validation") for line in s)]
        trained = [state for state in running if state not in held_out]
        counts = []
        for state in trained:
            line, head = block(state, title)
            counts.append(int(re.search(r"(\d+)/24", head)[1]))
            if counts[-1]:
                assert re.search(rf"[\u2501\u2500]{{8,}} +{counts[-1]}/24, .*{VALUES}$", line), line
        assert counts == sorted(counts)
        assert len(set(counts)) > 3
        # A validation has a line of its own, below that of its epoch.
        assert len(held_out) > 1
        for state in held_out[1:]:
            line, _ = block(state, "validation")
            assert re.search(rf"^validation [\u2501\u2500]{{8,}} +\d+/24, .*{VALUES}$", line), line
    recorded, *last = states[-1]
    assert recorded.startswith("recorded the program in ")
    whole = " ".join(map(str.strip, last))
    assert re.fullmatch(
        r"printed after 1 in two pieces "
        rf"epoch 1/2: 24 updates, {VALUES}, {VALIDATED}, samples/s=\d+ "
        r"printed after 2 in two pieces "
        rf"epoch 2/2: 24 updates, {VALUES}, {VALIDATED}, samples/s=\d+ "
        rf"evaluate: 24 batches, {VALUES}, samples/s=\d+ predict: 24 batches",
        whole,
    ), whole
    # A line ends between two values.
    for line in last:
        assert re.search(rf"(,|={VALUE}|\d|pieces|batches)$", line), line


@needs_terminal
@pytest.mark.long
def test_a_terminal_shows_the_loss_where_nobody_knows_the_end():
    """A stream has no total, no bar and no time that is left."""
    states = watched(60, "stream")
    running = [s for s in states if any(line.startswith("epoch 1/1 ") for line in s)]
    lines = [block(state, "epoch 1/1 ")[0] for state in running]
    assert lines[0] == "epoch 1/1 0 updates"
    assert len(lines) > 3
    for line in lines[1:]:
        assert re.fullmatch(rf"epoch 1/1 \d+ updates?, \d+ samples/s,? {VALUES}", line), line


@needs_terminal
def test_ctrl_c_ends_in_a_sentence():
    """Thirteen frames of ipufit said nothing of where it stopped, and of what is left."""
    # A process of its own ends by the signal, as its shell expects.
    *_, last = watched(200, "interrupt", status=1 << 8 if CAN_COPY else signal.SIGINT)
    told = last[-1]
    assert "Traceback" not in " ".join(last)
    stopped = rf"epoch 2/2 stopped: 12 of 24 updates, {VALUES}, samples/s=\d+"
    assert re.fullmatch(stopped, block(last[:-1], "epoch 2/2 ")[0])
    assert re.fullmatch(
        r"ipufit: Ctrl-C ends fit in epoch 2 of 2, after 12 of 24 updates; the module has the "
        r"weights of that update, and model.history 1 finished epoch.",
        told,
    ), told


@needs_terminal
@pytest.mark.few("80-error", "200-late")
@pytest.mark.parametrize("where", ["error", "late"])
@pytest.mark.parametrize("columns", [80, 200])
def test_an_error_leaves_lines_of_what_was_done_and_no_bar(columns, where):
    """The bar's last state was older, and looked as if it still ran."""
    terminal = Terminal(columns)
    before, error = told_before(written(columns, "validation", where, status=1 << 8))
    assert before.endswith("\r\n")
    assert "ZeroDivisionError: of a callback" in error
    terminal.feed(before)
    text = " ".join(map(str.strip, terminal.states[-1]))
    assert "\u2501" not in text
    count = "epoch 1/2 stopped: 12 of 24 updates" if where == "error" else "epoch 1/2: 24 updates"
    lines = rf"{count}, {VALUES}, samples/s=\d+"
    if where == "late":
        lines += rf" validation stopped: 12 of 24 batches, {VALUES}, samples/s=\d+"
    assert re.search(rf"{lines}$", text), text


@needs_terminal
def test_an_error_under_rich_leaves_lines_of_what_was_done():
    """Rich takes its bars away; nothing said where it was."""
    pytest.importorskip("rich")
    before, _ = told_before(written(100, "error", "rich", status=1 << 8))
    text = re.sub(r"\s+", " ", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", before))
    assert re.search(rf"epoch 1/2 stopped: 12 of 24 updates, {VALUES}, samples/s=\d+ $", text)


@needs_terminal
def test_rich_draws_where_it_is_installed():
    """Its bars show the same values, and what others print goes above them."""
    pytest.importorskip("rich")
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written(100, "validation", "rich"))
    assert "recording the program ..." in text
    assert re.search(r"validation .*\d+/24, ", text)
    assert len(set(re.findall(r"epoch 1/2 .* (\d+)/24, ", text))) > 3
    text = re.sub(r"\s+", " ", text)
    assert re.search(rf"epoch 2/2: 24 updates, {VALUES}, {VALIDATED}, samples/s=\d+", text)
    assert text.count("printed after 1") == 1
    assert "predict: 24 batches" in text


def test_rich_that_is_not_installed_is_an_error(monkeypatch):
    """Before any work, as of every argument."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert message(resolve_verbose, "rich") == (
        "verbose='rich' needs rich, which is not installed. Run: pip install ipufit[rich]"
    )


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
    recording, recorded, *lines = told().splitlines()
    assert recording == "recording the program ..."
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
def test_bars_that_are_switched_off_for_the_whole_process(monkeypatch, capsys):
    """tqdm's own switch: training goes on with a line an epoch."""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    model, loader = model_and_loader()
    model.fit(loader, epochs=2, verbose=1)
    model.evaluate(loader, verbose=1)
    model.predict(loader, verbose=1)
    shown = capsys.readouterr().err
    assert "\r" not in shown
    assert len(re.findall("^(epoch|evaluate|predict)", shown, re.MULTILINE)) == 4


@pytest.mark.long("ipu-standin")
def test_bars_of_evaluate_and_predict(capsys):
    """They count forward passes, each over all replicas."""
    model, loader = model_and_loader()
    model.evaluate(loader, ipus=2, device_iterations=4, verbose=1)
    model.predict(loader, ipus=2, device_iterations=4, verbose=1)
    states = drawn(capsys.readouterr().err)
    assert re.search(r"^evaluate \S+ 4/6, .*accuracy=", "\n".join(states), re.MULTILINE)
    assert re.search(r"^evaluate: 6 batches, loss=.*accuracy=", "\n".join(states), re.MULTILINE)
    assert states[-1] == "predict: 6 batches"


@pytest.mark.long("ipu-standin")
def test_the_bar_is_closed_after_an_error(capsys):
    """An exception must not leave a bar that later output is written into."""

    class Fail(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError

    model, loader = model_and_loader()
    with pytest.raises(ZeroDivisionError):
        model.fit(loader, callbacks=[Fail()], verbose=1)
    assert re.search(r"\d+/12\r +\r$", capsys.readouterr().err)


def test_auto_is_a_line_an_epoch_outside_a_terminal(monkeypatch):
    """And a bar in one, as in Keras."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert resolve_verbose("auto") == 2
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert resolve_verbose("auto") == 1
    assert [resolve_verbose(v) for v in (0, 1, 2, True, False)] == [0, 1, 2, 1, 0]
    pytest.importorskip("rich")
    assert resolve_verbose("rich") == "rich"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert resolve_verbose("rich") == 2
    with pytest.raises(ConfigurationError) as caught:
        resolve_verbose("loud")
    assert str(caught.value) == (
        "verbose must be 0 (silent), 1 (bar), 2 (one line an epoch), 'rich' or 'auto', got 'loud'."
    )
    with pytest.raises(ConfigurationError) as caught:
        ProgbarLogger(0)
    assert str(caught.value) == "verbose of ProgbarLogger must be one of 1, 2, 'rich', got 0."


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
        "eager_shapes": 0,
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
    assert str(caught.value) == "plot needs at least one finished epoch, but there is none yet."
    history.append(0, {"loss": 1.0})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert message(history.plot) == (
        "History.plot needs matplotlib, which is not installed. Run: pip install ipufit[plot]"
    )
