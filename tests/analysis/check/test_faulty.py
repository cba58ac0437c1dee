"""Every fault has a finding of its own, at its line, and nothing else is reported."""

import functools
import inspect
import re

import pytest
import torch

import ipufit

from . import faulty
from .faulty import MODELS

TARGET = torch.tensor([0, 1, 2, 0])


@functools.lru_cache(maxsize=None)
def expected(kind):
    """Kinds and lines, as they are written beside the source."""
    lines, first = inspect.getsourcelines(kind)
    return sorted(
        (word, number)
        for number, line in enumerate(lines, first)
        for words in re.findall(r"# finds: (.*)", line)
        for word in words.split(", ")
    )


def compiled(net):
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy")
    return model


def points():
    """The first model of each set of findings; of those that find the same, the rest at length."""
    seen = set()
    for name, kind in MODELS.items():
        found = frozenset(word for word, _ in expected(kind))
        yield pytest.param(name, marks=pytest.mark.long if found in seen else ())
        seen.add(found)


@pytest.mark.few(
    "CountsCalls",
    "CountsInAnObject",
    "CountsInAClosure",
    "WarmsUp",
    "HasAGeneratorOfTorchs",
    "ConvertsToNumpy",
    "WritesAText",
    "MakesATensorOfNumbers",
    "HasANormInEvalMode",
    "SwitchesItsMode",
)
@pytest.mark.parametrize("name", list(points()))
def test_a_fault_is_found_at_its_line(name):
    """A finding without the place is a riddle."""
    report = compiled(MODELS[name]()).check((torch.randn(4, 4) + 0.1, TARGET))
    assert sorted((f.kind, f.line) for f in report) == expected(MODELS[name]), str(report)
    assert {f.file for f in report} == {faulty.__file__}
    assert all(f.text and f.cure for f in report)


def test_there_are_thirty_of_them():
    """The promise names the number."""
    assert len(MODELS) >= 30
    assert all(map(expected, MODELS.values()))
