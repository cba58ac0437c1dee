"""That the suite of Model really runs on either engine: pytest --engine says on which."""

import ast
from pathlib import Path

import pytest

import ipufit
from tests import engines
from tests.conftest import OWN_ENGINES
from tests.nets import MLP

TESTS = Path(__file__).parents[1]
MARKS = {name for name, value in vars(engines).items() if isinstance(value, pytest.MarkDecorator)}


def test_the_engine_is_the_one_that_was_asked_for(engine, request):
    """Of a model that says nothing about it."""
    model = ipufit.Model(MLP())
    model.compile("sgd", "cross_entropy")
    assert model._session.engine.name == engine
    assert request.config.getoption("--engine") in (engine, "all")
    assert request.node.name.endswith(f":{engine}") == (
        engine != "embedded" and request.config.getoption("--engine") == "all"
    )


def test_every_common_reason_says_something():
    for name in MARKS - {"embedded_only"}:
        (reason,) = getattr(engines, name).args
        assert len(reason) > 20, name


@pytest.mark.parametrize("folder", OWN_ENGINES)
def test_a_folder_that_chooses_its_engines_is_there(folder):
    """A name that is gone would hide a folder that takes it later."""
    assert list(TESTS.joinpath(folder).glob("**/test_*.py"))


def _files():
    """Those of the suite of Model, by their places."""
    files = (file.relative_to(TESTS) for file in TESTS.glob("**/test_*.py"))
    return sorted(str(f) for f in files if not f"{f.as_posix()}".startswith(OWN_ENGINES))


@pytest.mark.parametrize("file", _files())
def test_no_file_is_left_out_as_a_whole(file):
    """A mark on everything in it would take a subject off the other engine without a word."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if getattr(node, "name", "").startswith("test_")]
    assert tests
    assert not all(any(map(_is_mark, test.decorator_list)) for test in tests)
    for_all = [node for node in tree.body if "pytestmark" in map(_name, _targets(node))]
    assert not MARKS.intersection(_name(node) for each in for_all for node in ast.walk(each))


def _is_mark(decorator):
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return _name(called) in MARKS


def _name(node):
    return getattr(node, "id", getattr(node, "attr", ""))


def _targets(node):
    return getattr(node, "targets", [])
