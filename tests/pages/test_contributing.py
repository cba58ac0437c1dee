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


# Tests of the house as a whole: with others, of its pages and scripts, and in a browser.
OF_THE_WHOLE = {
    *("against_keras", "bench", "browser", "gallery", "house", "integrations", "options", "pages"),
}


def test_tests_lie_where_what_they_test_lies():
    """Who changes a module finds its tests by its place."""
    folders = {path.parent.relative_to(ROOT / "tests") for path in ROOT.glob("tests/**/test_*.py")}
    assert len(folders) > 20
    rooms = [folder for folder in folders if folder.parts and folder.parts[0] not in OF_THE_WHOLE]
    assert [str(room) for room in rooms if not (ROOT / "ipufit" / room).is_dir()] == []
    flat = {path.name for path in ROOT.glob("tests/test_*.py")}
    assert flat == {"test_advice.py", "test_import.py", "test_covering.py"}
