"""What a release says of itself in several places."""

import re
from pathlib import Path

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
