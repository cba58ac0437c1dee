"""Sections of a page that compares several runs."""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Sequence, Tuple

from ipufit.report.page import texts
from ipufit.report.page.curves import columns
from ipufit.report.page.operators import grouped
from ipufit.report.page.pipeline import stage_title
from ipufit.report.page.sections import Section, lacking
from ipufit.report.page.summary import final_values, headline
from ipufit.report.run import Facts, NamedRuns

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
    title = stage_title(place, stage).partition(": ")[2]
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
