"""Sections of a page that compares several runs."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipufit.report.page import texts
from ipufit.report.page.curves import curves
from ipufit.report.page.html import Cell, Column, Html, element, join_parts, table
from ipufit.report.page.operators import TOGETHER, grouped
from ipufit.report.page.phases import LOOKS, PHASE_NAMES, used_phases
from ipufit.report.page.pipeline import stage_title
from ipufit.report.page.sections import (
    Chart,
    Section,
    Series,
    choices,
    figure,
    lacking,
    note,
    rounded,
)
from ipufit.report.page.summary import final_values, headline, notices, param_text
from ipufit.report.run import Run
from ipufit.utils.phase_timer import PHASES

__all__ = ["comparison_sections"]

Named = Sequence[Tuple[str, Run]]

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


def comparison_sections(runs: Named) -> List[Section]:
    """Make all sections of the comparison."""
    sections = [_summary(runs)]
    warnings = _warnings(runs)
    if warnings.body:
        sections.insert(0, warnings)
    return [*sections, curves(runs), _phases(runs), _plans(runs), _operators(runs)]


def _heads(runs: Named, first: str, is_number: bool = False) -> List[Column]:
    return [Column(first), *(Column(name, is_number) for name, _ in runs)]


def _marked(name: str, shown: Sequence[str]) -> List[Any]:
    """Return a row with a value of every run, which says whether they differ."""
    differs = len(set(shown)) > 1
    if not differs:
        return [name, *shown, "same"]
    return [
        name,
        *(Cell(each, mark="differs") for each in shown),
        Cell("\N{NOT EQUAL TO} differs", mark="differs"),
    ]


def _summary(runs: Named) -> Section:
    heads = [*_heads(runs, "what"), Column("all the same?")]
    tops = [dict(headline(run)) for _, run in runs]
    names = list(dict.fromkeys(name for top in tops for name in top))
    first = [_marked(name, [top.get(name, Html(texts.DASH)) for top in tops]) for name in names]
    body: List[Html] = [table("table-summary", "The runs", heads, first, sorts=False)]
    values = _values(runs)
    if values is not None:
        body.append(values)
    for key, title in (("environment", "Environment"), ("params", "Settings")):
        groups = [run.facts.get(key, {}) for _, run in runs]
        names = list(dict.fromkeys(name for each in groups for name in each))
        rows = [
            _marked(
                name, [param_text(each[name]) if name in each else texts.DASH for each in groups]
            )
            for name in names
        ]
        # What differs first, else in their order.
        rows.sort(key=lambda row: row[-1] == "same")
        if rows:
            body.append(table(f"table-{key}", title, heads, rows))
    return Section("summary", "Summary", join_parts(body))


def _values(runs: Named) -> Optional[Html]:
    by_run = [{value[0]: value for value in final_values(run.facts)} for _, run in runs]
    names = list(dict.fromkeys(name for each in by_run for name in each))
    rows = []
    for name in names:
        row: List[Any] = [name]
        for each in by_run:
            _, last, best, epoch, _ = each.get(name, ("", math.nan, None, None, ""))
            row.append(Cell(texts.number(last) if name in each else texts.DASH, last))
            has_best = best is not None and not math.isnan(best)
            row.append(
                Cell(
                    f"{texts.number(best)} ({epoch})" if has_best else texts.DASH,
                    best if has_best else None,
                )
            )
        rows.append(row)
    columns = [Column("value")]
    for name, _ in runs:
        columns += [Column(f"{name}, at the end", True), Column(f"{name}, best (epoch)", True)]
    return table("table-values", "Values of the epochs", columns, rows) if rows else None


def _warnings(runs: Named) -> Section:
    parts = []
    for name, run in runs:
        shown = notices(run.facts, "h4")
        if shown:
            parts += [element("h3", name), shown]
    return Section("warnings", "Warnings and advice", join_parts(parts))


def _phases(runs: Named) -> Section:
    measured = [(name, run.facts["phases"]) for name, run in runs if "phases" in run.facts]
    if not measured:
        why = lacking(runs[0][1].facts, "phases")
        return Section("time", "Time", join_parts(why))
    used = [p for p in PHASES if any(p in used_phases(phases) for _, phases in measured)]
    wholes = [math.fsum(map(texts.real, phases.values())) for _, phases in measured]
    unit, unit_name = texts.scale(max(wholes), "seconds")
    names = [name for name, _ in measured]
    series = [
        Series(
            PHASE_NAMES[phase],
            [[rounded(texts.real(phases.get(phase, 0)) / unit, 5) for _, phases in measured]],
            names,
            LOOKS.index(phase),
            "bar",
        )
        for phase in used
    ]
    lengths = [f"{name} {texts.seconds(whole)}" for name, whole in zip(names, wholes)]
    chart = Chart(
        "phases",
        "Time of the whole runs by phase",
        f"{', '.join(lengths)}.",
        series,
        (unit_name,),
        "",
        is_across=True,
        stacks=True,
        height=170 + 46 * len(names),
        names=names,
    )
    rows = []
    for phase in PHASES:
        row: List[Any] = [PHASE_NAMES[phase]]
        for (_, phases), whole in zip(measured, wholes):
            spent = texts.real(phases.get(phase, 0.0))
            part = spent / whole if whole else 0.0
            row += [Cell(texts.seconds(spent), spent), Cell(texts.share(part), part)]
        rows.append(row)
    foot = ["all", *(text for whole in wholes for text in (texts.seconds(whole), "100.0 %"))]
    columns = [Column("phase")]
    for name in names:
        columns += [Column(f"{name}, time", True), Column(f"{name}, share", True)]
    body = join_parts(
        figure(chart), table("table-phases", "Time by phase", columns, rows, foot=foot)
    )
    return Section("time", "Time", body, [chart])


def _plans(runs: Named) -> Section:
    title = "Plans"
    plans = [(name, run.facts["plan"]) for name, run in runs if lacking(run.facts, "plan") is None]
    parts: List[Html] = []
    for name, run in runs:
        why = lacking(run.facts, "plan")
        if why is not None:
            parts += [element("h3", name), why]
    if plans:
        rows = [
            _marked(what, [_plan_text(plan.get(key)) for _, plan in plans])
            for key, what in _PLAN.items()
        ]
        rows.append(_marked("stages", [str(len(plan["stages"])) for _, plan in plans]))
        for key, what in (("utilisation", "utilisation"), ("total", "length of an update")):
            rows.append(_marked(what, [_timed(plan, key) for _, plan in plans]))
        most = [max(stage["memory"] for stage in plan["stages"]) for _, plan in plans]
        rows.append(_marked("memory of the largest stage", [texts.size(each) for each in most]))
        count = max(len(plan["stages"]) for _, plan in plans)
        for place in range(count):
            rows.append(
                _marked(f"stage {place} begins with", [_stage(plan, place) for _, plan in plans])
            )
        columns = [Column("what"), *(Column(name) for name, _ in plans), Column("all the same?")]
        parts.append(note("Estimates from the work of every operator; no IPU has run them."))
        parts.append(table("table-plans", "The plans", columns, rows, sorts=False))
    return Section("plans", title, join_parts(parts))


def _plan_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return param_text(value)


def _timed(plan: Mapping[str, Any], key: str) -> str:
    value = plan["timeline"][key]
    return texts.share(value) if key == "utilisation" else texts.number(value)


def _stage(plan: Mapping[str, Any], place: int) -> str:
    if place >= len(plan["stages"]):
        return texts.DASH
    stage = plan["stages"][place]
    title = stage_title(place, stage).partition(": ")[2]
    return f"{title}, {texts.share(stage['time_share'])} of the time, {texts.size(stage['memory'])}"


def _operators(runs: Named) -> Section:
    title = "Operators"
    parts: List[Html] = []
    measured = []
    for name, run in runs:
        why = lacking(run.facts, "operators")
        if why is None:
            measured.append((name, run.facts["operators"]["rows"]))
        else:
            parts += [element("h3", name), why]
    if len(measured) < 2:
        return Section("operators", title, join_parts(parts))
    tables = {}
    for name, heads, key in (
        ("operator", ("operator", "direction"), _operator),
        ("place", ("operator", "direction", "module"), _placed),
    ):
        works = [dict(grouped(rows, key)) for _, rows in measured]
        keys = sorted(
            dict.fromkeys(each for groups in works for each in groups),
            key=lambda each: -max(w[each].seconds if each in w else 0.0 for w in works),
        )
        body = [_ratios(each, works) for each in keys[:_MOST]]
        columns = [Column(head) for head in heads]
        columns += [Column(run_name, True) for run_name, _ in measured]
        first = measured[0][0]
        columns += [Column(f"{run_name} / {first}", True) for run_name, _ in measured[1:]]
        caption = {"operator": "Time of operators"}.get(name, "Time of operators, by module")
        button = {"operator": "by operator"}.get(name, "by operator and module")
        tables[button] = table(f"table-operators-{name}", caption, columns, body)
    parts.append(note("Seconds of one micro-batch; a ratio above 1 took longer."))
    parts.append(choices("operators", TOGETHER, tables))
    return Section("operators", title, join_parts(parts))


def _operator(row: Mapping[str, object]) -> Tuple[str, ...]:
    return str(row["operator"]), str(row["direction"])


def _placed(row: Mapping[str, object]) -> Tuple[str, ...]:
    return (*_operator(row), str(row.get("module") or "outside of modules"))


def _ratios(key: Tuple[str, ...], works: Sequence[Dict[Tuple[str, ...], Any]]) -> List[Any]:
    spent = [groups[key].seconds if key in groups else None for groups in works]
    row: List[Any] = list(key)
    row += [
        Cell(texts.seconds(each), each) if each is not None else Cell(texts.DASH, 0.0)
        for each in spent
    ]
    first = spent[0]
    for each in spent[1:]:
        if not first or each is None:
            row.append(Cell(texts.DASH, 0.0))
        else:
            row.append(Cell(f"{each / first:.2f} \N{MULTIPLICATION SIGN}", each / first))
    return row
