"""A pytest plugin that runs the Python snippets of Markdown pages, for the nox session `docs`.

Every ```python block is one test. The blocks of a page share their names, as a reader expects, and
run in an empty scratch folder. A ```text block that directly follows a ```python block shows what
that block leaves on a terminal of 80 columns, of which both streams are one; the two are compared
as doctests are: `...` stands for anything, and numbers are compared to the digits shown (exactly,
though, where `...` hides some of them). Lines of progress are compared as tests/pages/terminal.py
has it. A block may also be written as a doctest, with `>>>` prompts.

`--write-outputs` writes what came into the pages, where it is not what they show, and where lines
of progress are shown; and a picture that a block saves under the name of one of docs/pictures/.
"""

from __future__ import annotations

import contextlib
import doctest
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest
import torch
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.doctest import NUMBER, OutputChecker
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from sybil.typing import Evaluator

from tests.pages.terminal import COLUMNS, Terminal, shortened, with_lines_of

# As in conftest.py: too little work to share between cores.
torch.set_num_threads(1)

# As there, too: a background job of a shell ignores the Ctrl-C that a page presses.
signal.signal(signal.SIGINT, signal.default_int_handler)

PICTURES = Path(__file__).resolve().parents[1] / "docs/pictures"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | NUMBER
OTHER_SPELLING = re.compile(r"^[ \t>*-]*(?:```|~~~)[ \t]*(?!python$)py.*$", re.MULTILINE)

python_blocks = PythonCodeBlockParser(doctest_optionflags=FLAGS)
text_blocks = CodeBlockParser("text", evaluator=lambda example: None)
run_block = PythonEvaluator()

# Of each page where an output begins, what it shows, and what came.
new_outputs: Dict[str, List[Tuple[int, str, str]]] = {}
new_pictures: Dict[str, bytes] = {}


def snippets(document: Document) -> Iterator[Region]:
    """Yield the Python blocks of a page, each with the output it promises, if any."""
    stray = OTHER_SPELLING.search(document.text)
    if stray:
        raise ValueError(
            f"{document.path}: only ```python opens a block that is run, got {stray[0]}"
        )
    outputs = {len(document.text[: text.start].rstrip()): text for text in text_blocks(document)}
    for block in python_blocks(document):
        is_doctest = isinstance(block.parsed, doctest.Example)
        if block.end in outputs and not is_doctest:
            block.evaluator = printing(outputs[block.end])
        yield block


def printing(output: Region) -> Evaluator:
    """Return an evaluator that runs a block and compares what stays on the terminal."""
    expected = output.parsed

    def evaluate(example: Example) -> str:
        terminal = Terminal()
        with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
            run_block(example)
        screen, checker = terminal.screen(), OutputChecker()
        got = with_lines_of(expected, screen)
        if checker.check_output(expected, got, FLAGS) and got == screen:
            return ""
        start = example.document.text.index("\n", output.start) + 1
        new_outputs.setdefault(example.path, []).append((start, expected, screen))
        if checker.check_output(expected, got, FLAGS):
            return ""
        return checker.output_difference(doctest.Example(example.parsed, expected), got, FLAGS)

    return evaluate


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--write-outputs`."""
    parser.addoption("--write-outputs", action="store_true", help="write outputs into the pages")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what came into the pages, if that is wanted."""
    if session.config.option.write_outputs:
        for name, picture in new_pictures.items():
            (PICTURES / name).write_bytes(picture)
    for name, changes in new_outputs.items() if session.config.option.write_outputs else ():
        page = Path(name)
        text = page.read_text(encoding="utf-8")
        for start, shown, screen in sorted(changes, reverse=True):
            text = text[:start] + shortened(shown, screen) + text[start + len(shown) :]
        page.write_text(text, encoding="utf-8")


def enter_scratch_folder(namespace: Dict[str, Any]) -> None:
    """Let a page write files without touching the checkout."""
    namespace["__name__"] = "__main__"
    scratch = contextlib.ExitStack()
    folder = scratch.enter_context(tempfile.TemporaryDirectory())
    scratch.callback(os.chdir, Path.cwd())
    os.chdir(folder)
    environment = scratch.enter_context(pytest.MonkeyPatch.context())
    environment.setenv("COLUMNS", str(COLUMNS))
    environment.setenv("LINES", "24")  # tqdm wants both
    namespace["_leave_scratch_folder"] = scratch.close


def leave_scratch_folder(namespace: Dict[str, Any]) -> None:
    """Return to the checkout and delete what the page wrote, but for the pictures that it shows."""
    for picture in Path().glob("*.[ps][nv]g"):
        if (PICTURES / picture.name).exists():
            new_pictures[picture.name] = picture.read_bytes()
    namespace["_leave_scratch_folder"]()


pytest_collect_file = Sybil(
    parsers=[snippets],
    path=str(Path(__file__).resolve().parents[1]),
    pattern="*.md",
    setup=enter_scratch_folder,
    teardown=leave_scratch_folder,
).pytest()
