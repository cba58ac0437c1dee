"""plotly.js, as the installed package ``plotly`` brings it."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import importlib.util
import os

from ipufit.errors import ConfigurationError
from ipufit.report.page.policy import digest

__all__ = ["Library", "library"]

_FILE = os.path.join("package_data", "plotly.min.js")
# How plotly.js begins and ends what it is: a function that another one calls.
_BEGIN, _END = b"self : this, () => {\n", b"\n}));"


@dataclasses.dataclass(frozen=True)
class Library:
    """What draws.

    Attributes:
        packed: gzip, in base64.
        digest: of the text, as a Content-Security-Policy names it.
    """

    packed: str
    digest: str


@functools.lru_cache(maxsize=1)
def library() -> Library:
    """Read and packed once per process.

    Raises:
        ConfigurationError: plotly is not installed.
    """
    spec = importlib.util.find_spec("plotly")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        path = os.path.join(folder, _FILE)
        if os.path.exists(path):
            with open(path, "rb") as file:
                text = _called_at_once(file.read())
            packed = gzip.compress(text, 6, mtime=0)
            return Library(base64.b64encode(packed).decode("ascii"), digest(text))
    raise ConfigurationError(
        "the page of a report draws its curves with plotly, which is not installed. Run: "
        "pip install ipufit[report]"
    )


def _called_at_once(text: bytes) -> bytes:
    """The same script, whose outer function stands in parentheses.

    Browsers take that as a sign that it is called at once, and compile it in one go. Without it
    they read the whole script to find its end, and again when it is called, which is a quarter of
    the time that it takes to start. A script of another form is left as it is.
    """
    body = text.rstrip()
    if body.count(_BEGIN) != 1 or not body.endswith(_END):
        return text
    return body[: -len(_END)].replace(_BEGIN, b"self : this, (() => {\n") + b"\n})));\n"
