"""docs/architecture.md names modules and functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# A module of the package, and a class, method or function in it.
NAMED = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", PAGE)
FOLDERS = re.findall(r"`(?:ipufit/)?([\w/]+/)`", PAGE)


def defined(body, names):
    """Whether the classes and functions of these names are defined, each in the one before."""
    if not names:
        return True
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    inner = [node for node in body if isinstance(node, kinds) and node.name == names[0]]
    return any(defined(node.body, names[1:]) for node in inner)


def test_the_page_names_modules_of_most_rooms():
    """So that the next tests look at something."""
    assert len({path.partition("/")[0] for path, _ in NAMED}) >= 10


@pytest.mark.parametrize(("path", "name"), sorted(set(NAMED)))
def test_what_the_page_names_exists(path, name):
    module = ROOT / "ipufit" / path
    assert module.is_file()
    assert defined(
        ast.parse(module.read_text(encoding="utf-8")).body, name.split(".") if name else []
    )


@pytest.mark.parametrize("folder", sorted(set(FOLDERS) - {"ipufit/"}))
def test_folders_that_the_page_names_exist(folder):
    assert (ROOT / "ipufit" / folder).is_dir()
