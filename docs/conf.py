"""The pages as a site, for the nox session `docs`.

The folder of sources is the whole checkout, so that a link between two pages is the same here and
on a code host: `sphinx-build -c docs . build/site`. README.md is the first page. The lists of
docs/README.md are the contents: each heading with its links becomes a part of the sidebar, so that
no page holds anything but plain Markdown.

The reference is made of the docstrings, into docs/reference/, which git ignores: a page for each
public module and each public class, as tests/pages/catalog.py lists them. A code span that is a
public name, such as `ipufit.Model`, leads there from every page.
"""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import tomllib
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.pages import catalog  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REFERENCE = ROOT / "docs" / "reference"
OBJECTS = catalog.public_objects()
CLASSES = {name: value for name, value in OBJECTS.items() if isinstance(value, type)}

# Signatures show what a name stands for, such as the words of an argument, where all names in them
# are known; what modules import for type checkers alone, they import here. The type of an attribute
# is that of its class, so that those which methods set become types of the class.
BASES = {base for kind in CLASSES.values() for base in kind.__mro__}
for base in BASES:
    if base.__module__.startswith("ipufit"):
        base.__annotations__ = {
            **catalog.attribute_types(base),
            **vars(base).get("__annotations__", {}),
        }
for name in {base.__module__ for base in BASES if base.__module__.startswith("ipufit")}:
    module = sys.modules[name]
    for part in ast.parse(inspect.getsource(module)).body:
        if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING":
            imports = [each for each in part.body if isinstance(each, (ast.Import, ast.ImportFrom))]
            exec(ast.unparse(imports), vars(module))

project = PROJECT["name"]
author = copyright = PROJECT["authors"][0]["name"]
release = version = PROJECT["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "README"
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
include_patterns = ["*.md", "docs/*.md", "docs/reference/*.rst", "examples/*.md"]
exclude_patterns = [".*", "build", "dist"]
nitpicky = True
smartquotes_action = "D"  # dashes alone: `"` means itself in a sentence about code

# Bases and errors of other packages stay text: a build asks no other site what it has.
nitpick_ignore_regex = [(r"py:class", r"(torch|sklearn)\..*"), (r"py:exc", r"NotFittedError")]

# Tables on the page of a module have full names.
suppress_warnings = ["autosummary.import_cycle"]

# Anchors are those of a code host: tests/pages/test_reference_pages.py knows the same.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autosummary_generate = ["docs/reference/index.rst"]
autosummary_context = {
    "rooms": {room: catalog.contents(room, OBJECTS) for room in catalog.ROOMS},
    "page_members": {n: [*catalog.public_members(v, OBJECTS)] for n, v in CLASSES.items()},
    "page_bases": {n: bool(catalog.public_bases(v, OBJECTS)) for n, v in CLASSES.items()},
}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"ipufit {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_additional_pages = {"index": "index.html"}  # sends to README.html
templates_path = [str(ROOT / "docs" / "templates")]

# A click on "copy" takes the code, not the prompts.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Where torch explains its types. The addresses are written out, as a build asks no other site.
TORCH = "https://docs.pytorch.org/docs/stable"
TORCH_TYPES = {
    "DataLoader": f"{TORCH}/data.html#torch.utils.data.DataLoader",
    "Module": f"{TORCH}/generated/torch.nn.Module.html#torch.nn.Module",
    "Optimizer": f"{TORCH}/optim.html#torch.optim.Optimizer",
    "Tensor": f"{TORCH}/tensors.html#torch.Tensor",
    "device": f"{TORCH}/tensor_attributes.html#torch.device",
    "dtype": f"{TORCH}/tensor_attributes.html#torch.dtype",
}

INDEX = """\
Reference
=========

Everything public, by module, from the docstrings: ``help(ipufit.Model.fit)`` shows the same. The
:ref:`index <genindex>` has all names.

.. autosummary::
   :toctree: .
   :template: autosummary/room.rst

"""


def contents(listed: str) -> str:
    """Return the tables of contents for the sidebar, from the lists of docs/README.md.

    The reference is first among what is looked up. A page that is not in these lists comes last,
    under "More".
    """
    parts = re.split(r"^## (.+)$", listed, flags=re.M)[1:]
    captions = [
        (
            caption,
            [
                posixpath.normpath(f"docs/{page}")
                for page in re.findall(r"^- .*?\]\(([\w./-]+)\.md\)", links, flags=re.M)
            ],
        )
        for caption, links in zip(parts[::2], parts[1::2])
    ]
    dict(captions)["Look up"][:0] = ["docs/reference/index", "docs/README"]
    found = {"README", *(page for _, pages in captions for page in pages)}
    present = [page.relative_to(ROOT) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))]
    more = sorted({page.with_suffix("").as_posix() for page in present} - found)
    trees = [*captions, ("More", more)]
    return "".join(
        "\n```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n".format(caption, "\n".join(pages))
        for caption, pages in trees
        if pages
    )


def with_sources(page: str) -> str:
    """Return the gallery with each script, folded up, below the line that links it."""

    def shown(link: re.Match[str]) -> str:
        source = (ROOT / "examples" / link[1]).read_text(encoding="utf-8")
        fold = "<details><summary>Source</summary>"
        return f"{link[0]}\n\n{fold}\n\n```python\n{source}```\n\n</details>"

    return re.sub(r"^.*\]\(\.\./examples/(\w+\.py)\)$", shown, page, flags=re.M)


def complete_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give README its tables of contents, and the gallery the scripts."""
    if docname == root_doc:
        source[0] += contents((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    elif docname == "docs/gallery":
        source[0] = with_sources(source[0])


def begin_reference(app: Sphinx, config: Config) -> None:
    """Write the page that autosummary makes all others from; what an earlier build made goes."""
    shutil.rmtree(REFERENCE, ignore_errors=True)
    REFERENCE.mkdir()
    rooms = "".join(f"   {room}\n" for room in catalog.ROOMS)
    (REFERENCE / "index.rst").write_text(INDEX + rooms, encoding="utf-8")


def show_public_bases(
    app: Sphinx, name: str, value: type, options: dict[str, Any], bases: list[type]
) -> None:
    """Leave out classes of ours without a page, and name what stands behind them."""
    bases[:] = catalog.public_bases(value, OBJECTS)


def finish_docstring(
    app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]
) -> None:
    """Link every page that a docstring names, such as docs/data.md, and show types of attributes.

    They stand below what is said of an attribute, and come behind its name, as in a signature.
    """
    pages = re.compile(r"(?<![`/\w])((?:docs/[\w-]+|CONTRIBUTING)\.md)")
    found: list[str] = []
    behind_name = 0
    for line in lines:
        if line.startswith(".. attribute::"):
            behind_name = len(found) + 1
        if line.startswith("   :type:"):
            found.insert(behind_name, re.sub(r"(?<![\w.~])(\w+\.[\w.]+)", r"~\1", line))
        else:
            found.append(pages.sub(lambda m: f":doc:`{m[1]} </{m[1][:-3]}>`", line))
    lines[:] = found


def resolve_type(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.TextElement
) -> nodes.Node | None:
    """Lead a type in a signature, which is written without its module, to its page if it has one.

    What has none stays text, or leads to torch's page. A role in a docstring must have one.
    """
    if node.get("refdomain") != "py" or "refexplicit" in node:
        return None
    name = node["reftarget"].rpartition(".")[2]
    if name in TORCH_TYPES:
        return nodes.reference("", "", shown, internal=False, refuri=TORCH_TYPES[name])
    homes = [name for name, kind in CLASSES.items() if kind.__name__ == node["reftarget"]]
    if len(homes) != 1:
        return shown
    entry = env.domains.python_domain.objects[homes[0]]
    place = env.current_document.docname
    return make_refnode(app.builder, place, entry.docname, entry.node_id, shown, homes[0])


class LinkNames(SphinxPostTransform):
    """Make a link of every code span that is the full name of something in the reference."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        """Look at each code span of a page."""
        known = self.env.domains.python_domain.objects
        for span in list(self.document.findall(nodes.literal)):
            name = span.astext()
            entry = known.get(name) if name.startswith("ipufit") else None
            if entry is None or isinstance(span.parent, (nodes.reference, pending_xref)):
                continue
            place = self.env.current_document.docname
            link = make_refnode(
                self.app.builder, place, entry.docname, entry.node_id, span.deepcopy(), name
            )
            span.replace_self(link)


def setup(app: Sphinx) -> None:
    """Hook in."""
    app.connect("config-inited", begin_reference)
    app.connect("source-read", complete_source)
    app.connect("autodoc-process-bases", show_public_bases)
    app.connect("autodoc-process-docstring", finish_docstring)
    app.connect("missing-reference", resolve_type)
    app.add_post_transform(LinkNames)
