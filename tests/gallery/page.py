"""The text of docs/gallery.md: from the scripts, the table of examples/README.md, and a run."""

import ast
import functools
import re
import textwrap
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
GALLERY = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "gallery"
SHOWN, WIDTH = 8, 96  # lines of output, and their characters
INDENT = " " * 4  # of what goes on in another line

HEAD = """\
# Gallery

The [examples](../examples/README.md), each with a picture and the last lines of its output.
Each example is a single file, and fails if it does not reach the numbers that it promises.
Times are rounded, on one core of an AMD EPYC server, without an IPU or a GPU.
Fashion-MNIST was not downloaded; its script reads small digits from files in the same format.

`nox -s examples` runs all examples and compares their output with this page.
`nox -s examples -- --write` updates it.
"""


def rows():
    """Map names of scripts to what the table of examples/README.md says of them, in its order."""
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(\w+)\.py` \| (.+) \|$", table, re.MULTILINE))


def scripts():
    """The scripts of the gallery, in its order."""
    return [EXAMPLES / f"{name}.py" for name in rows()]


def title(script):
    """The first sentence of a script's docstring."""
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    return docstring.splitlines()[0].rstrip(".")


def sentence(script):
    """What the table says of a script."""
    said = rows()[script.stem]
    return f"{said[0].upper()}{said[1:]}."


def ending(printed):
    """The last lines of an output; of a long one, what does not fit is indented."""
    printed = re.sub(r"\S*/tmp\w{8}/", "", printed)  # folders of a moment
    lines = [line.rstrip() for line in printed.rstrip().splitlines()]
    shown = lines if len(lines) <= SHOWN else ["...", *lines[-SHOWN:]]
    wrap = functools.partial(textwrap.wrap, width=WIDTH, subsequent_indent=INDENT)
    return [part for line in shown for part in (wrap(line) if len(line) > WIDTH else [line])]


def rounded(seconds):
    """A time for people."""
    return "A few seconds" if seconds < 7.5 else f"About {5 * round(seconds / 5)} seconds"


def part(script, printed, seconds):
    """The part of the page about one script."""
    # Imported here: who reads the page alone needs no matplotlib.
    from tests.gallery.draw import drawing

    seen = drawing(script).__doc__.splitlines()[0].rstrip(".")
    lines = "\n".join(ending(printed))
    return f"""\
## {title(script)}

{sentence(script)}

![{seen}](gallery/{script.stem}.png)

```text
{lines}
```

{rounded(seconds)}: [examples/{script.name}](../examples/{script.name})
"""


def parts():
    """Map names of scripts to their parts of the page as it is."""
    text = GALLERY.read_text(encoding="utf-8") if GALLERY.exists() else ""
    _, *found = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    link = re.compile(r"\(\.\./examples/(\w+)\.py\)\n*\Z")
    return {link.search(each)[1]: f"{each.rstrip()}\n" for each in found}


def write(written):
    """Write the page of these parts."""
    ordered = [written[name] for name in rows() if name in written]
    GALLERY.write_text("\n".join([HEAD, *ordered]), encoding="utf-8")


def output(text):
    """The lines of output of a part."""
    return re.search(r"```text\n(.*?)```", text, re.DOTALL)[1].splitlines()


def agree(one, other):
    """Whether two parts end with a line of the same beginning, and most others have one, too.

    Numbers and times differ between machines, and with them which advice a report gives.
    """
    sets = [Counter(_beginnings(text)) for text in (one, other)]
    if not all(sets):
        return False
    ends = {_beginnings(text)[-1] for text in (one, other)}
    common, most = sets[0] & sets[1], max(sum(each.values()) for each in sets)
    return len(ends) == 1 and 2 * sum(common.values()) > most


def _beginnings(text):
    """The first word of each line of output, without numbers."""
    lines = [line for line in output(text) if not line.startswith(INDENT)] if text else []
    return [re.sub(r"\d+", "0", line.split()[0]) for line in lines if line]
