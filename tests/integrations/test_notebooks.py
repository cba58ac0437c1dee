"""What a notebook shows: cells run by a real kernel of Jupyter's."""

import re

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

from tests.integrations import notebooks  # noqa: E402 - it needs what may not be there

MODEL = """
import torch, ipufit
model = ipufit.Model(torch.nn.Linear(3, 2))
model.compile("sgd", "cross_entropy")
data = [(torch.randn(2, 3), torch.tensor([0, 1]))] * 3
history = model.fit(data, epochs=2, verbose=0)
rates = model.find_lr(data * 40)
"""


@pytest.fixture(scope="module")
def outputs():
    """Run cells after the one that trains; for each, the outputs by kind and text."""

    def run(*cells, raw=False, fails=False):
        book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
        options = {"timeout": 300, "kernel_name": "python3", "allow_errors": fails}
        nbclient.NotebookClient(book, **options).execute()
        return [
            [(_raw if raw else _shown)(output) for output in cell.outputs] for cell in book.cells
        ]

    return run


def _shown(output):
    if output.output_type == "stream":
        return output.text
    kinds = sorted(output.data)
    return kinds[0] if kinds != ["text/plain"] else output.data["text/plain"]


def _raw(output):
    """The text of standard output or of an error; of anything else its page and its text."""
    if output.output_type == "error":
        return "\n".join(output.traceback)
    if output.output_type == "stream":
        assert output.name == "stdout", output.text
        return output.text
    return output.data.get("text/html"), output.data["text/plain"]


PICTURE = ["image/png"]


def test_a_plot_is_shown_once_wherever_in_a_cell_it_was_drawn(outputs, tmp_path):
    """It showed `<Figure size 920x320 with 2 Axes>`, or nothing."""
    shown = outputs(
        MODEL,
        "history.plot()",
        "history.plot()\nprint('after it')",
        "rates.plot()",
        "figure = rates.plot()\nfigure.axes[0].set_title('mine')\nfigure",
        "display(history.plot()); None",
        "figure",
        f"history.plot({str(tmp_path / 'a.png')!r}); None",
        f"history.plot({str(tmp_path / 'a.png')!r})",
        "import matplotlib.pyplot\nhistory.plot()",
        "history.plot(); None",
        "import pickle\nlen(pickle.dumps(figure)) > 0",
        "1 / 1",
    )
    assert shown[1:] == [
        *(PICTURE, ["after it\n", *PICTURE], PICTURE, PICTURE, PICTURE, PICTURE),
        *([], PICTURE, PICTURE, PICTURE, ["True"], ["1.0"]),
    ]


FIT = """
import signal, torch, ipufit
from ipufit.callbacks import LambdaCallback
model = ipufit.Model(torch.nn.Linear(3, 2))
model.compile("sgd", "cross_entropy", metrics=["accuracy"])
data = [(torch.randn(2, 3), torch.tensor([0, 1]))] * 3
press = lambda batch, logs: signal.raise_signal(signal.SIGINT) if batch else None
"""


def test_a_cell_that_trains_has_one_output_and_nothing_red(outputs):
    """A bar of tqdm's warned of ipywidgets, and a line of standard error looks like a fault."""
    shown = outputs(
        FIT,
        "history = model.fit(data, epochs=2, validation_data=data)",
        "values = model.evaluate(data)",
        "history = model.fit(data, epochs=2, callbacks=[ipufit.callbacks.EarlyStopping("
        "'loss', min_delta=9, patience=0, verbose=1)])",
        raw=True,
    )
    ((page, text),) = shown[1]
    head = "<th>epoch</th><th>loss</th><th>accuracy</th><th>val_loss</th><th>val_accuracy</th>"
    assert f"<table><thead><tr>{head}<th>samples/s</th></tr></thead>" in page
    assert page.count("<tr><td>1/2</td>") == page.count("<tr><td>2/2</td>") == 1
    assert "<progress" not in page
    recorded, *epochs = text.splitlines()
    assert recorded.startswith("recorded the program in ")
    assert [line.partition(":")[0] for line in epochs] == ["epoch 1/2", "epoch 2/2"]
    ((page, text),) = shown[2]
    assert page == f"{text}<br>"
    assert text.startswith("evaluate: 3 batches, loss=")
    (page, _), said = shown[3]
    assert page.startswith("<table>")
    assert said.startswith("epoch 2: EarlyStopping ends training because ")


def test_ctrl_c_in_a_cell_is_a_sentence(outputs):
    """As in a program; the frames of ipufit say nothing to the reader."""
    *_, (bar, error) = outputs(
        FIT,
        "model.fit(data, callbacks=[LambdaCallback(on_train_batch_end=press)])",
        raw=True,
        fails=True,
    )
    assert bar[0].startswith("recorded the program in ")
    assert error.startswith("ipufit: Ctrl-C ends fit in epoch 1 of 1, after 2 of 3 updates")
    assert "\n" not in error


def test_reports_and_models_show_their_text(outputs):
    """Of these a cell showed the address in memory, or the fields of a dataclass."""
    shown = outputs(FIT, "model", "model.check(data)", "model.plan(data)", raw=True)
    (model,), (check,), (plan,) = shown[1:]
    assert model[0].startswith("<pre>")
    assert "(model)  Linear" in model[0]
    assert check == (
        "<pre>Linear: nothing found.</pre>",
        "CheckReport(Linear, 0 errors, 0 warnings)",
    )
    assert plan[0].startswith("<pre>Estimate for training Linear on 1 IPU\n")
    assert plan[1] == "PartitionPlan(Linear, 1 stage, pipelined, fits)"


def what_is_shown(book):
    """For each cell, kinds of outputs and the lines in them, whatever their numbers are."""
    return [
        {
            (kind, re.sub(r"[-+\d.,e]*\d", "0", line))
            for output in cell.get("outputs", ())
            for kind, text in _texts(output).items()
            for line in text.splitlines()
        }
        for cell in book.cells
    ]


def _texts(output):
    if output.output_type == "stream":
        return {output.name: output.text}
    assert output.output_type != "error", output.evalue
    return {
        kind: "" if kind.startswith(("image/", "text/html")) else text
        for kind, text in output.data.items()
    }


@pytest.mark.parametrize("name", notebooks.names())
def test_a_notebook_of_the_docs_shows_what_it_shows(name):
    """What readers see there is what they get; nothing of the machine that ran it is in it."""
    book = notebooks.read(name)
    shown = what_is_shown(book)
    assert what_is_shown(notebooks.executed(book)) == shown
    assert not any(kind == "stderr" for cell in shown for kind, _ in cell)
    text = nbformat.writes(book)
    for mine in ("/tmp", "/home", "/root", " at 0x", "iopub.execute_input"):
        assert mine not in text
