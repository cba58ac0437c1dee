"""The pages as a site, for the nox session `docs`.

The folder of sources is the whole checkout, so that a link between two pages is the same here and
on a code host: `sphinx-build -c docs . build/site`. README.md is the first page. The list at its
end is the contents: each `###` heading with its links becomes a part of the sidebar, so that no
page holds anything but plain Markdown.
"""

from __future__ import annotations

import re
from pathlib import Path

import tomllib
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = PROJECT["name"]
author = copyright = PROJECT["authors"][0]["name"]
release = version = PROJECT["version"]

extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "README"
source_suffix = {".md": "markdown"}
include_patterns = ["*.md", "docs/*.md"]
exclude_patterns = [".*", "build", "dist"]
nitpicky = True
smartquotes = False  # `"` means itself in a sentence about code

# Anchors are those of a code host: tests/pages/test_reference_pages.py knows the same.
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"ipufit {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_additional_pages = {"index": "index.html"}  # sends to README.html
templates_path = ["templates"]

# A click on "copy" takes the code, not the prompts.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def contents(readme: str) -> str:
    """Return the tables of contents for the sidebar, from the last section of README.md.

    A page that is not in that list comes last, under "More".
    """
    _, _, listed = readme.partition("\n## Read on\n")
    parts = re.split(r"^### (.+)$", listed, flags=re.M)[1:]
    captions = [
        (caption, re.findall(r"^- .*?\]\(([\w/-]+)\.md\)", links, flags=re.M))
        for caption, links in zip(parts[::2], parts[1::2])
    ]
    found = {"README", *(page for _, pages in captions for page in pages)}
    present = [page.relative_to(ROOT) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
    more = sorted({page.with_suffix("").as_posix() for page in present} - found)
    trees = [*captions, ("More", more)]
    return "".join(
        "\n```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n".format(caption, "\n".join(pages))
        for caption, pages in trees
        if pages
    )


def add_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give README its tables of contents."""
    if docname == root_doc:
        source[0] += contents(source[0])


def setup(app: Sphinx) -> None:
    """Hook in."""
    app.connect("source-read", add_contents)
