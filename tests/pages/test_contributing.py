"""CONTRIBUTING.md draws the house as it stands."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_folder_of_the_house_is_drawn():
    """Who looks for the place of a change reads the drawing."""
    folders = {path.parent.name for path in (ROOT / "ipufit").glob("*/__init__.py")}
    assert len(folders) > 10
    assert [name for name in sorted(folders) if f"{name}/" not in PAGE] == []


def test_every_session_is_in_the_table():
    """A check that nobody knows of is run by nobody."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    sessions = [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list
    ]
    assert len(sessions) > 10
    assert [name for name in sessions if f"`{name}`" not in PAGE] == []
