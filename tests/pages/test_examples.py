"""examples/README.md lists what is there."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_every_example_has_a_row_and_every_row_an_example():
    """Who looks for a script like their own reads the table, not the folder."""
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(.+?)` \|", table, re.M)
    assert len(listed) == len(set(listed))
    there = {path.name for path in EXAMPLES.glob("*.py")}
    assert set(listed) == there | {"poptorch/*.py"}
