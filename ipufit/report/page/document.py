"""The page as a whole, with its scripts and what they may do."""

from __future__ import annotations

import base64
import dataclasses
import functools
import gzip
import hashlib
import importlib.util
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipufit.errors import ConfigurationError
from ipufit.report.page.comparison import comparison_sections
from ipufit.report.page.curves import curves
from ipufit.report.page.html import Html, data, element, join_parts
from ipufit.report.page.memory import memory
from ipufit.report.page.operators import layers, operators
from ipufit.report.page.phases import phases
from ipufit.report.page.pipeline import pipeline
from ipufit.report.page.sections import DRAWN, Section
from ipufit.report.page.summary import status, summary, warnings_section
from ipufit.report.run import Run

__all__ = ["digest", "policy", "render_page", "render_state"]


def digest(script: bytes) -> str:
    """Return the digest by which a Content-Security-Policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode('ascii')}'"


def policy(scripts: Sequence[str], live: bool) -> str:
    """Return a Content-Security-Policy: own scripts alone, and no other server.

    Args:
        scripts: digests of those that may run; no other does, whatever gets into the page.
        live: whether the page may ask where it came from how the run goes on.
    """
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(scripts),
        # plotly.js sets the look of what it draws.
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


_FILE = os.path.join("package_data", "plotly.min.js")
# How plotly.js begins and ends what it is: a function that another one calls.
_BEGIN, _END = b"self : this, () => {\n", b"\n}));"


@dataclasses.dataclass(frozen=True)
class Library:
    """A JavaScript library that draws, as the page holds it.

    Attributes:
        packed: gzip, in base64.
        digest: of the text, as a Content-Security-Policy names it.
    """

    packed: str
    digest: str


@functools.lru_cache(maxsize=1)
def library() -> Library:
    """Read and pack plotly.js, once per process.

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
    """Return a script with its outer function in parentheses.

    Browsers take that as a sign that it is called at once, and compile it in one go. Without it
    they read the whole script to find its end, and again when it is called, which is a quarter of
    the time that it takes to start. A script of another form is left as it is.
    """
    body = text.rstrip()
    if body.count(_BEGIN) != 1 or not body.endswith(_END):
        return text
    return body[: -len(_END)].replace(_BEGIN, b"self : this, (() => {\n") + b"\n})));\n"


_ASSETS = os.path.join(os.path.dirname(__file__), "assets")
_FOOT = "Made by ipufit. Drawn by plotly.js, which is in this file; nothing is fetched."
_SCRIPTS = ("start.js", "tables.js", "charts.js", "turns.js", "live.js", "main.js")


def render_page(runs: Sequence[Run], live: bool = False) -> str:
    """Render the whole page.

    Args:
        runs: one, or several to compare.
        live: whether it asks ``state``, beside its own address, how the run goes on. It then has
            one run.

    Raises:
        ConfigurationError: plotly is not installed.
    """
    assert len(runs) == 1 if live else runs
    drawing = library()
    script = "\n".join(map(_asset, _SCRIPTS))
    content = _content(runs, live)
    title = _title(runs)
    allowed = [digest(script.encode("utf-8")), drawing.digest]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy(allowed, live)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", Html(_asset("style.css"))),
        element("noscript", element("style", ".plot, .tools { display: none }")),
    )
    body = element(
        "body",
        element("a", "Skip to the report", href="#main", class_="skip"),
        element(
            "header",
            element("h1", title),
            element(
                "div",
                element("p", content["subtitle"], id="subtitle"),
                element("div", id="page-tools", class_="tools"),
                class_="top",
            ),
            element("p", id="live", role="status", aria_live="polite", hidden=not live),
        ),
        element("nav", content["navigation"], id="navigation", aria_label="Sections"),
        element("p", id="trouble", role="alert", hidden=True),
        element(
            "noscript",
            element("p", "Without JavaScript the tables are here, the pictures are not."),
        ),
        element("main", [content["sections"][name] for name in content["order"]], id="main"),
        element("footer", element("p", _FOOT)),
        element(
            "script",
            Html(data({"charts": content["charts"], "points": DRAWN})),
            type="application/json",
            id="data",
        ),
        element("script", Html(drawing.packed), type="text/plain", id="plotly"),
        element("script", Html(script)),
        data_live=live,
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def render_state(run: Run) -> str:
    """Render the JSON with which a page that was made with ``live=True`` updates itself."""
    content = _content([run], live=True)
    return data({**content, "status": str(run.facts["status"])})


def _content(runs: Sequence[Run], live: bool) -> Dict[str, Any]:
    """Return the parts of the page that change while a run goes on, in plain values."""
    if len(runs) == 1:
        sections = _sections(runs[0])
        subtitle = _subtitle(runs[0], live)
    else:
        sections = comparison_sections(_named(runs))
        subtitle = join_parts(f"{len(runs)} runs, side by side")
    return {
        "subtitle": subtitle,
        "navigation": _navigation(sections),
        "order": [section.anchor for section in sections],
        "sections": {section.anchor: _shown(section) for section in sections},
        "charts": {chart.name: chart.to_dict() for section in sections for chart in section.charts},
    }


def _sections(run: Run) -> List[Section]:
    facts = run.facts
    sections = [
        warnings_section(facts),
        summary(run),
        curves([("", run)]),
        phases(run),
        pipeline(facts),
        memory(run),
        operators(facts),
        layers(facts),
    ]
    return [section for section in sections if section.body]


def _shown(section: Section) -> Html:
    heading = f"{section.anchor}-title"
    return element(
        "section",
        element("h2", section.title, id=heading),
        section.body,
        id=section.anchor,
        aria_labelledby=heading,
    )


def _navigation(sections: Sequence[Section]) -> Html:
    links = [
        element("li", element("a", section.title, href=f"#{section.anchor}"))
        for section in sections
    ]
    return element("ul", links)


def _title(runs: Sequence[Run]) -> str:
    return " and ".join(dict.fromkeys(str(run.facts["title"]) for run in runs))


def _subtitle(run: Run, live: bool) -> Html:
    environment = run.facts.get("environment", {})
    where = f"{environment['engine']} engine, {environment['device']}" if environment else ""
    how: Optional[str] = None
    if run.facts["status"] == "running" and not live:
        how = " when this page was made"
    return join_parts(
        element("span", run.folder, class_="folder"), " ", status(run), how, " ", where
    )


def _named(runs: Sequence[Run]) -> List[Tuple[str, Run]]:
    """Name runs by their folders, or by whole paths where folders share a name."""
    short = [os.path.basename(os.path.normpath(run.folder)) for run in runs]
    if len(set(short)) < len(short):
        short = [run.folder for run in runs]
    return [
        (name if short.count(name) == 1 else f"{name} ({place + 1})", run)
        for place, (name, run) in enumerate(zip(short, runs))
    ]


def _asset(name: str) -> str:
    with open(os.path.join(_ASSETS, name), encoding="utf-8") as file:
        return file.read()
