"""The notebooks of docs/; `python -m tests.integrations.notebooks` writes their outputs anew."""

import os
import pathlib
import tempfile

import nbclient
import nbformat

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "notebooks"


def names():
    """Names of the notebooks, without suffix."""
    return sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name):
    """The notebook as it is in docs/."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(book):
    """The same cells with what they show now, in an empty folder; none may fail."""
    book = nbformat.from_dict(book)
    with tempfile.TemporaryDirectory() as scratch:
        options = {"timeout": 300, "kernel_name": "python3", "record_timing": False}
        resources = {"metadata": {"path": scratch}}
        nbclient.NotebookClient(book, resources=resources, **options).execute()
    # The kernel says which Python it is.
    book.metadata.language_info = {"name": "python"}
    for cell in book.cells:
        for output in cell.get("outputs", ()):
            output.pop("transient", None)
    return book


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(FOLDER.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    for name in names():
        nbformat.write(executed(read(name)), FOLDER / f"{name}.ipynb")
