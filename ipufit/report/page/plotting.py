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
                text = file.read()
            packed = gzip.compress(text, 6, mtime=0)
            return Library(base64.b64encode(packed).decode("ascii"), digest(text))
    raise ConfigurationError(
        "the page of a report draws its curves with plotly, which is not installed. Run: "
        "pip install ipufit[report]"
    )
