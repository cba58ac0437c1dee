"""What a release says of itself in several places."""

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

import ipufit

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_the_same_everywhere():
    """Who cites a release must be able to find it."""
    for file, pattern in (
        ("pyproject.toml", r'^version = "(.*)"$'),
        ("CITATION.cff", r"^version: (.*)$"),
    ):
        (version,) = re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.M)
        assert version == ipufit.__version__


@pytest.fixture
def standalone(monkeypatch):
    """The function of hatch_build.py, without hatchling."""
    interface = types.SimpleNamespace(MetadataHookInterface=object)
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.standalone


def test_a_package_index_gets_a_page_that_stands_alone(standalone):
    """Relative links would lead nowhere there."""
    page = "a [b c](docs/b.md#d), ![e](docs/e.svg) [f](https://f.example/) [g](#g)"
    assert standalone(page, "") == "a b c (`docs/b.md#d`),  [f](https://f.example/) [g](#g)"
    assert standalone(page, "https://a.example/b/{kind}/v1/") == (
        "a [b c](https://a.example/b/blob/v1/docs/b.md#d), "
        "![e](https://a.example/b/raw/v1/docs/e.svg) [f](https://f.example/) [g](#g)"
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"\]\((?!https?:|#)", standalone(readme, ""))
