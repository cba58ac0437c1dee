"""The figures of the house are those of a package that can be counted by hand."""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.house import __main__ as house
from tests.house.structure import measure

FILES = {
    "__init__.py": '"""A package."""\n',
    "one.py": '"""Of something."""\n\nfrom typing import TYPE_CHECKING, Any\n\n'
    "if TYPE_CHECKING:\n    from package.sub.two import Two\n\n\n"
    "def use(found: Any) -> None:\n"
    '    """Use it.\n\n    In two lines.\n    """\n'
    '    return getattr(found, "x", None)  # a probe\n\n\nclass Two:\n    pass\n',
    "sub/__init__.py": "",
    "sub/two.py": "from ..one import use\nfrom . import three\n\n\nclass Two:\n    pass\n",
    "sub/three.py": "def late():\n    import package.sub.two\n",
    "sub/four.py": "import os\n",
    "sub/__init__.pyi": "from package.sub.two import Two as Two\n",
}


pytestmark = pytest.mark.both_engines


def test_a_small_package(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    figures, groups = measure(tmp_path / "package")
    assert groups == [["package.one", "package.sub.three", "package.sub.two"]]
    assert figures == {
        "files": 6,
        "code": 15,
        "longest_file": 7,
        "root_files": 2,
        "circles": 1,
        "largest_circle": 3,
        "lazy_imports": 1,
        "type_only_imports": 1,
        "vague_names": 2,
        "docstrings_that_dangle": 1,
        "any_uses": 1,
        "import_lines": 6,
        "getattr_none_probes": 1,
        "class_names_used_twice": 1,
    }


def test_a_figure_above_its_bound_fails(tmp_path, monkeypatch, capsys):
    figures = {"files": 3, "functions": 9}
    monkeypatch.setattr(house, "measure", lambda root: ({"files": 3}, [["a", "b"]]))
    monkeypatch.setattr(house.subprocess, "run", lambda *args, **how: _Done())
    monkeypatch.setattr(house, "BOUNDS", tmp_path / "bounds.json")
    house.BOUNDS.write_text(json.dumps(figures))
    house.main()
    assert "above" not in capsys.readouterr().out
    house.BOUNDS.write_text(json.dumps({**figures, "functions": 8}))
    with pytest.raises(SystemExit) as caught:
        house.main()
    assert str(caught.value) == "above the bounds of bounds.json: functions"
    out = capsys.readouterr().out
    assert "circle of 2: a, b" in out
    assert "above" in out


class _Done:
    stdout = 'something else\n{"functions": 9}\n'


def test_no_module_is_reached_by_its_name():
    """A name in a text is an import that neither the layers nor a rename would see."""
    package = Path(house.HERE).parents[1] / "ipufit"
    reached = []
    for path in package.rglob("*.py"):
        text = path.read_text("utf-8")
        # To walk through all of them would take seconds.
        for node in ast.walk(ast.parse(text)) if re.search("[\"']ipufit", text) else ():
            function = node.func if isinstance(node, ast.Call) else None
            if isinstance(function, ast.Attribute) and function.attr in ("import_module", "get"):
                texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                reached += [text for text in texts if str(text).startswith("ipufit")]
    assert reached == []
