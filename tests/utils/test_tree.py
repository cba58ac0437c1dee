"""Nested values come apart and together again."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipufit.utils.tree import Structure, flatten, flatten_with_paths, map_leaves, unflatten
from tests.examples import few

Point = namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Box:
    """A dataclass."""

    content: Any
    label: Any


class Output(OrderedDict):
    """A mapping class of a library's own, as model outputs often are."""


# Of all letters Hypothesis would first make a table, which takes seconds.
letters = "aZ0é'\\ "
leaves = st.integers() | st.text(letters, max_size=3)
trees = st.recursive(
    leaves | st.none(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(letters, max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(letters, max_size=2), inner, max_size=3).map(Output)
        | st.builds(Point, inner, inner)
        | st.builds(Box, inner, inner)
    ),
    max_leaves=12,
)


@pytest.mark.long
@few(50)
@given(trees)
def test_every_tree_is_rebuilt(value):
    """What goes through the program keeps its containers and their types."""
    parts, structure = flatten(value)
    back = unflatten(parts, structure)
    assert back == value
    assert type(back) is type(value)
    assert structure.leaves == len(parts)
    assert flatten(back)[1] == structure
    assert hash(flatten(back)[1]) == hash(structure)


@pytest.mark.long
@given(trees)
def test_mapping_over_leaves_keeps_the_structure(value):
    """Moving a batch to a device must not touch what is not a tensor's place."""
    wrapped = map_leaves(lambda leaf: ("leaf", leaf), value)
    parts, structure = flatten(value)
    assert wrapped == unflatten([("leaf", part) for part in parts], structure)


def test_paths_are_python_expressions():
    """An error message must say where, in words that can be pasted."""
    value = {"a": [1, Point(2, None)], "b": Box((3,), 4)}
    pairs, _ = flatten_with_paths(value, "batch")
    assert pairs == [
        ("batch['a'][0]", 1),
        ("batch['a'][1][0]", 2),
        ("batch['b'].content[0]", 3),
        ("batch['b'].label", 4),
    ]


def test_structures_are_shown_readably():
    """They appear in the error for a batch that differs from the first."""
    _, structure = flatten({"a": (1, None), "b": [2]})
    assert str(structure) == "dict('a': tuple(0: *, 1: None), 'b': list(0: *))"
    assert str(Structure(None)) == "*"
