"""The page as a whole, of one run or of several to compare, and what its scripts may do."""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import json
import os
import pkgutil
from typing import Dict, Iterator, List, Mapping, Sequence, Tuple

import jinja2
from markupsafe import Markup

from ipufit.errors import ConfigurationError
from ipufit.report.chrome import render_trace
from ipufit.report.page import texts
from ipufit.report.page.curves import columns, curves, phases
from ipufit.report.page.operators import grouped, layers, operators
from ipufit.report.page.pipeline import memory, pipeline, title_of
from ipufit.report.page.sections import CONFIG, DRAWN, Section, lacking, look
from ipufit.report.page.summary import final_values, headline, summary, warnings_section
from ipufit.report.run import PAGE, TRACE, Facts, NamedRuns, Run
from ipufit.utils.files import write_text

_MOST = 600
# Numbers of a plan that are compared, and what they are called.
_PLAN = {
    "micro_batch_size": "micro-batch",
    "gradient_accumulation": "gradient accumulation",
    "replicas": "replicas",
    "strategy": "strategy",
    "schedule": "schedule",
    "recompute": "recomputation",
    "fits": "fits its IPUs",
}


def _row(name: str, values: Sequence[object]) -> Dict[str, object]:
    """Return a row with a value of every run, which says whether they differ."""
    return {"name": name, "values": values, "differs": len(set(values)) > 1}


def _rows(by_run: Sequence[Mapping[str, object]]) -> List[Dict[str, object]]:
    """Return a row for every name that any run has; None is the value of a run without it."""
    names = dict.fromkeys(name for values in by_run for name in values)
    return [_row(name, [values.get(name) for values in by_run]) for name in names]


def compared_summary(runs: NamedRuns) -> Section:
    """Make the section with the outcomes and settings of several runs, and whether they differ."""
    groups = []
    for key, title in (("environment", "Environment"), ("params", "Settings")):
        by_run = [
            {name: texts.setting(value) for name, value in run.facts.get(key, {}).items()}
            for _, run in runs
        ]
        # What differs first, else in their order.
        groups.append((key, title, sorted(_rows(by_run), key=lambda row: not row["differs"])))
    finals = [{value.name: value for value in final_values(run)} for _, run in runs]
    names = dict.fromkeys(name for values in finals for name in values)
    values = {
        "names": [name for name, _ in runs],
        "headline": _rows([headline(run) for _, run in runs]),
        "groups": groups,
        "values": [(name, [values.get(name) for values in finals]) for name in names],
        "value_columns": columns(runs, "at the end", "best (epoch)"),
    }
    return Section("summary", "Summary", values, kind="compared_summary")


def compared_plans(runs: NamedRuns) -> Section:
    """Make the section with the plans of several runs."""
    plans = {name: run.facts["plan"] for name, run in runs if not lacking(run.facts, "plan")}
    values = {
        "lacking": _lacking(runs, "plan"),
        "names": list(plans),
        "rows": list(_plan_rows(list(plans.values()))) if plans else [],
    }
    return Section("plans", "Plans", values)


def _lacking(runs: NamedRuns, fact: str) -> List[Tuple[str, str]]:
    """List the runs that lack a fact, each with the reason."""
    reasons = [(name, lacking(run.facts, fact)) for name, run in runs]
    return [(name, why) for name, why in reasons if why]


def _plan_rows(plans: Sequence[Facts]) -> Iterator[Dict[str, object]]:
    for key, what in _PLAN.items():
        yield _row(what, [_plan_text(plan.get(key)) for plan in plans])
    yield _row("stages", [str(len(plan["stages"])) for plan in plans])
    lines = [plan["timeline"] for plan in plans]
    yield _row("utilisation", [texts.share(line["utilisation"]) for line in lines])
    yield _row("length of an update", [texts.number(line["total"]) for line in lines])
    most = [max(stage["memory"] for stage in plan["stages"]) for plan in plans]
    yield _row("memory of the largest stage", list(map(texts.size, most)))
    for place in range(max(len(plan["stages"]) for plan in plans)):
        yield _row(f"stage {place} begins with", [_stage(plan, place) for plan in plans])


def _plan_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return texts.setting(value)


def _stage(plan: Facts, place: int) -> str:
    if place >= len(plan["stages"]):
        return texts.DASH
    stage = plan["stages"][place]
    title = title_of(place, stage).partition(": ")[2]
    return f"{title}, {texts.share(stage['time_share'])} of the time, {texts.size(stage['memory'])}"


def compared_operators(runs: NamedRuns) -> Section:
    """Make the section with the time of operators in several runs, and its ratios."""
    measured = [
        (name, run.facts["operators"]["rows"])
        for name, run in runs
        if not lacking(run.facts, "operators")
    ]
    tables = {}
    if len(measured) > 1:
        operator = ("operator", "direction")
        by_module = (*operator, "module")
        for button, name, heads, caption in (
            ("by operator", "operator", operator, "Time of operators"),
            ("by operator and module", "place", by_module, "Time of operators, by module"),
        ):
            works = [_seconds(rows, len(heads)) for _, rows in measured]
            keys = sorted(
                dict.fromkeys(key for seconds in works for key in seconds),
                key=lambda key: -max(seconds.get(key, 0.0) for seconds in works),
            )
            rows = [_ratios(key, works) for key in keys[:_MOST]]
            tables[button] = {"name": name, "caption": caption, "heads": heads, "rows": rows}
    first = measured[0][0] if measured else ""
    values = {
        "lacking": _lacking(runs, "operators"),
        "tables": tables,
        "columns": [
            *([name] for name, _ in measured),
            *([f"{name} / {first}"] for name, _ in measured[1:]),
        ],
    }
    return Section("operators", "Operators", values, kind="compared_operators")


def _seconds(rows: Sequence[Facts], length: int) -> Dict[Tuple[str, ...], float]:
    """Sum the time of operators by their names and directions and, with three names, modules."""

    def key(row: Facts) -> Tuple[str, ...]:
        module = str(row.get("module") or "outside of modules")
        return (str(row["operator"]), str(row["direction"]), module)[:length]

    return {names: work.seconds for names, work in grouped(rows, key)}


def _ratios(
    key: Tuple[str, ...], works: Sequence[Mapping[Tuple[str, ...], float]]
) -> Tuple[Tuple[str, ...], List[object], List[object]]:
    """Return names of an operator, its seconds by run, and their ratios to the first of them."""
    spent = [seconds.get(key) for seconds in works]
    first = spent[0]
    ratios = [None if not first or each is None else each / first for each in spent[1:]]
    return key, [*spent], [*ratios]


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
