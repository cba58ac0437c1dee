"""The page as a whole, with its scripts and what they may do."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import os
import pkgutil
from typing import Dict, List, Sequence, Tuple

import jinja2
from markupsafe import Markup

from ipufit.errors import ConfigurationError
from ipufit.report.chrome import render_trace
from ipufit.report.page import texts
from ipufit.report.page.comparison import compared_operators, compared_plans, compared_summary
from ipufit.report.page.curves import curves, phases
from ipufit.report.page.operators import layers, operators
from ipufit.report.page.pipeline import memory, pipeline
from ipufit.report.page.sections import CONFIG, DRAWN, Section, look
from ipufit.report.page.summary import summary, warnings_section
from ipufit.report.run import PAGE, TRACE, NamedRuns, Run
from ipufit.utils.files import write_text


def _digest(script: bytes) -> str:
    """Return the digest by which a Content-Security-Policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode('ascii')}'"


def _policy(scripts: Sequence[str], live: bool) -> str:
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


# How plotly.js begins and ends what it is: a function that another one calls.
_BEGIN, _END = b"self : this, () => {\n", b"\n}));"


@functools.lru_cache(maxsize=1)
def library() -> Tuple[str, str]:
    """Read and pack plotly.js, once per process.

    Returns:
        The script packed by gzip, in base64, and the digest by which a Content-Security-Policy
        names it.

    Raises:
        ConfigurationError: plotly is not installed.
    """
    script = pkgutil.get_data("plotly", "package_data/plotly.min.js")
    if script is None:
        raise ConfigurationError(
            "the page of a report draws its curves with plotly, which is not installed. Run: "
            "pip install ipufit[report]"
        )
    text = _called_at_once(script)
    packed = gzip.compress(text, 6, mtime=0)
    return base64.b64encode(packed).decode("ascii"), _digest(text)


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


_FOLDER = os.path.dirname(__file__)
_SCRIPTS = ("charts.js", "live.js", "page.js")


@functools.lru_cache(maxsize=1)
def _templates() -> jinja2.Environment:
    """Make the environment of the templates, all of which escape what is put into them."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.join(_FOLDER, "templates")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(texts.FILTERS)
    return templates


def _render(name: str, **values: object) -> Markup:
    return Markup(_templates().get_template(f"{name}.html").render(**values))


def data(value: object) -> Markup:
    """Render JSON that can't end the element ``script`` in which it stands."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    # Line separators are escaped by json already.
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


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
    packed, plotly_digest = library()
    script = "\n".join(map(_asset, _SCRIPTS))
    content = _content(runs, live)
    page = _render(
        "page",
        **content,
        data=data(
            {
                "charts": content["charts"],
                "config": CONFIG,
                "look": look(),
                "points": DRAWN,
            }
        ),
        live=live,
        plotly=Markup(packed),
        policy=_policy([_digest(script.encode("utf-8")), plotly_digest], live),
        script=Markup(script),
        title=" and ".join(dict.fromkeys(str(run.facts["title"]) for run in runs)),
    )
    return str(page)


def write_page(folder: str) -> None:
    """Write the page and the trace of a run, from the facts and rows in its folder.

    Raises:
        ConfigurationError: there is no report, or plotly is not installed.
        OSError: a file can't be written.
    """
    run = Run.read(folder)
    write_text(os.path.join(folder, TRACE), render_trace(run))
    write_text(os.path.join(folder, PAGE), render_page([run]))


def render_state(run: Run) -> str:
    """Render the JSON with which a page that was made with ``live=True`` updates itself."""
    return str(data({**_content([run], live=True), "status": str(run.facts["status"])}))


def _content(runs: Sequence[Run], live: bool) -> Dict[str, object]:
    """Return the parts of the page that change while a run goes on, in plain values."""
    sections = _sections(_named(runs))
    return {
        "subtitle": _render("subtitle", runs=runs, live=live),
        "navigation": _render("navigation", sections=sections),
        "sections": {section.anchor: render_section(section) for section in sections},
        "charts": {chart.name: chart.figure() for section in sections for chart in section.charts},
    }


def _sections(runs: NamedRuns) -> List[Section]:
    """Make the sections of the page of one run, or of one that compares several."""
    over_time = [curves(runs), phases(runs)]
    if len(runs) == 1:
        ((_, run),) = runs
        of_program = [pipeline(run.facts), memory(run), operators(run.facts), layers(run.facts)]
        sections = [summary(run), *over_time, *of_program]
    else:
        differences = [compared_plans(runs), compared_operators(runs)]
        sections = [compared_summary(runs), *over_time, *differences]
    warnings = warnings_section(runs)
    return sections if warnings is None else [warnings, *sections]


def render_section(section: Section) -> Markup:
    """Render a section, with its heading."""
    kind = f"{section.kind or section.anchor}.html"
    values = {**section.values, "charts": section.charts}
    return _render("section", section=section, template=kind, **values)


def _named(runs: Sequence[Run]) -> NamedRuns:
    """Name runs by their folders, or by whole paths where folders share a name."""
    if len(runs) == 1:
        return [("", runs[0])]
    short = [os.path.basename(os.path.normpath(run.folder)) for run in runs]
    if len(set(short)) < len(short):
        short = [run.folder for run in runs]
    return [
        (name if short.count(name) == 1 else f"{name} ({place + 1})", run)
        for place, (name, run) in enumerate(zip(short, runs))
    ]


def _asset(name: str) -> str:
    with open(os.path.join(_FOLDER, "assets", name), encoding="utf-8") as file:
        return file.read()
