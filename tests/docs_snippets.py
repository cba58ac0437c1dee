"""A pytest plugin that runs the Python snippets of Markdown pages, for the nox session `docs`.

Every ```python block is one test. The blocks of a page share their names, as a reader expects, and
run in an empty scratch folder. A ```text block that directly follows a ```python block shows what
that block prints; the two are compared as doctests are: `...` stands for anything, and numbers are
compared to the digits shown (exactly, though, where `...` hides some of them). A block may also be
written as a doctest, with `>>>` prompts.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import signal
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator

import torch
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.doctest import NUMBER, OutputChecker
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from sybil.typing import Evaluator

# As in conftest.py: too little work to share between cores.
torch.set_num_threads(1)

# As there, too: a background job of a shell ignores the Ctrl-C that a page presses.
signal.signal(signal.SIGINT, signal.default_int_handler)

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | NUMBER
OTHER_SPELLING = re.compile(r"^[ \t>*-]*(?:```|~~~)[ \t]*(?!python$)py.*$", re.MULTILINE)

python_blocks = PythonCodeBlockParser(doctest_optionflags=FLAGS)
text_blocks = CodeBlockParser("text", evaluator=lambda example: None)
run_block = PythonEvaluator()


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
            block.evaluator = printing(outputs[block.end].parsed)
        yield block


def printing(expected: str) -> Evaluator:
    """Return an evaluator that runs a block and compares what it prints."""

    def evaluate(example: Example) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as stdout:
            run_block(example)
        got, checker = stdout.getvalue(), OutputChecker()
        if checker.check_output(expected, got, FLAGS):
            return ""
        return checker.output_difference(doctest.Example(example.parsed, expected), got, FLAGS)

    return evaluate


def enter_scratch_folder(namespace: Dict[str, Any]) -> None:
    """Let a page write files without touching the checkout."""
    namespace["__name__"] = "__main__"
    scratch = contextlib.ExitStack()
    folder = scratch.enter_context(tempfile.TemporaryDirectory())
    scratch.callback(os.chdir, Path.cwd())
    os.chdir(folder)
    namespace["_leave_scratch_folder"] = scratch.close


def leave_scratch_folder(namespace: Dict[str, Any]) -> None:
    """Return to the checkout and delete what the page wrote."""
    namespace["_leave_scratch_folder"]()


pytest_collect_file = Sybil(
    parsers=[snippets],
    path=str(Path(__file__).resolve().parents[1]),
    pattern="*.md",
    setup=enter_scratch_folder,
    teardown=leave_scratch_folder,
).pytest()
