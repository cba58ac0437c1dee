"""What a notebook shows: cells run by a real kernel of Jupyter's."""

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

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

    def run(*cells):
        book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
        nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
        return [[_shown(output) for output in cell.outputs] for cell in book.cells]

    return run


def _shown(output):
    if output.output_type == "stream":
        return output.text
    kinds = sorted(output.data)
    return kinds[0] if kinds != ["text/plain"] else output.data["text/plain"]


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
