"""What hatchling calls when the package is built: README.md as a package index can show it.

An index shows the page alone, without the files that its links lead to. With a `Source` among
`project.urls` of pyproject.toml, a GitHub repository, they lead there, to the tag of the version.
As long as there is none, a link becomes its words and the name of the file, which is in the source
distribution, and pictures are left out.
"""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Fills in `readme`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict) -> None:
        """Add the page to the metadata of the project."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        place = f"{source}/{{kind}}/v{metadata['version']}/" if source else ""
        metadata["readme"] = {"content-type": "text/markdown", "text": standalone(text, place)}


def standalone(text: str, place: str) -> str:
    """Return a page of Markdown whose relative links are absolute, or gone.

    Args:
        text: of the page.
        place: where its folder lies, with `{kind}` for `blob` or `raw`; empty if nowhere.
    """

    def link(match: re.Match) -> str:
        is_picture, words, target = match.groups()
        if not place:
            return "" if is_picture else f"{words} (`{target}`)"
        kind = "raw" if is_picture else "blob"
        return f"{is_picture}[{words}]({place.format(kind=kind)}{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)", link, text)
