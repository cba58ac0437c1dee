"""First sections of the page: the outcome of a run, its warnings and advice."""

from __future__ import annotations

import datetime
import math
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from ipufit.callbacks.history import best_place, direction_of
from ipufit.report.page import texts
from ipufit.report.page.html import Cell, Column, Html, Row, element, join_parts, table
from ipufit.report.page.sections import Section, note
from ipufit.report.run import Run, samples_per_second, total

__all__ = [
    "final_values",
    "headline",
    "notices",
    "pairs",
    "param_text",
    "status",
    "summary",
    "warnings_section",
]

_STATUS = {
    "running": "running",
    "finished": "finished",
    "interrupted": "interrupted",
    "failed": "failed",
}
# Characters of a setting that are shown.
_LONGEST = 2000
_RATE = (
    "Samples per second are those of training: recording the program, validation and this report "
    "are left out."
)


def status(run: Run) -> Html:
    """Render the status of a run, as a word with a mark beside it."""
    name = str(run.facts["status"])
    return element(
        "span", _STATUS.get(name, name), class_=f"status {_STATUS.get(name, '')}".strip()
    )


def when(text: object) -> Html:
    """Render a moment as people write it, in UTC."""
    try:
        moment = datetime.datetime.fromisoformat(str(text))
        shown = f"{moment:%Y-%m-%d %H:%M:%S} {moment:%Z}".strip()
    except ValueError:
        shown = str(text)
    return element("time", shown, datetime=str(text))


def headline(run: Run) -> List[Tuple[str, Html]]:
    """Return the key figures of a run, by name."""
    facts = run.facts
    done, whole = total(run, "updates"), facts.get("total_updates")
    first = texts.real(facts.get("first_update", 0))
    updates = texts.count(done)
    if isinstance(whole, int) and whole > done:
        updates += f" of {whole:,}"
    if first > 0:
        updates += f", the first after {texts.count(first)}"
    rate = samples_per_second(run)
    entries = [
        ("Status", status(run)),
        ("Begun", when(facts["begun"])),
        ("Took", join_parts(texts.seconds(facts.get("seconds")))),
        ("Epochs", join_parts(texts.count(len(facts["epochs"])))),
        ("Updates", join_parts(updates)),
        ("Executions", join_parts(texts.count(total(run, "executions")))),
        ("Samples", join_parts(texts.count(total(run, "samples")))),
        ("Samples per second", join_parts(texts.speed(rate))),
    ]
    skipped = total(run, "skipped")
    if skipped:
        entries.append(("Updates that were skipped", join_parts(texts.count(skipped))))
    if "totals" in facts:
        totals = facts["totals"]
        text = f"{texts.count(totals['parameters'])}"
        if totals["trainable"] != totals["parameters"]:
            text += f", {texts.count(totals['trainable'])} of them trained"
        entries.append(("Parameters", join_parts(text)))
    return entries


def final_values(facts: Mapping[str, Any]) -> List[Tuple[str, float, Optional[float], Any, str]]:
    """List the values of epochs: name, last, best, epoch of the best, and which way is better.

    There is no best of a value whose better direction is unknown.
    """
    history = facts.get("history", {"epoch": [], "history": {}})
    directions = facts.get("params", {}).get("directions")
    rows = []
    for name, values in history["history"].items():
        numbers = [texts.real(value) for _, value in values]
        if not numbers:
            continue
        direction = direction_of(name, directions)
        place = best_place(numbers, direction) if direction else None
        best, epoch = None, None
        if place is not None:
            best, epoch = numbers[place], history["epoch"][values[place][0]] + 1
        rows.append((name, numbers[-1], best, epoch, direction or ""))
    return rows


def pairs(values: Sequence[Tuple[str, str]], name: str) -> Html:
    """Render a list of names with their values."""
    return element(
        "dl", [element("div", element("dt", n), element("dd", v)) for n, v in values], class_=name
    )


def param_text(value: object) -> str:
    """Format a parameter of the run, cut where it is very long."""
    text = _param_text(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} … ({len(text):,} characters; run.json has them)"


def _param_text(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_param_text, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_param_text(each)}" for key, each in value.items()) or "none"
    if isinstance(value, float):
        return texts.number(value)
    return "none" if value is None else str(value)


def summary(run: Run) -> Section:
    """Make the section that sums the run up."""
    facts = run.facts
    body: List[Html] = [pairs(headline(run), "headline")]
    if facts.get("error"):
        body.append(
            element(
                "div",
                element("p", element("strong", "It failed with: ")),
                element("pre", str(facts["error"])),
                class_="failure",
            )
        )
    if facts.get("popvision"):
        body.append(
            note("PopVision's Graph Analyser opens the profile in ", facts["popvision"], ".")
        )
    values = final_values(facts)
    if values:
        body.append(_table_of_values(values))
    if "explain" in facts:
        body.append(element("h3", "Plan"))
        body.append(
            element(
                "div",
                element("pre", "\n".join(map(str, facts["explain"]))),
                class_="scroll",
                tabindex="0",
                role="region",
                aria_label="Plan",
            )
        )
    for name, key, title in (
        ("environment", "environment", "Environment"),
        ("params", "params", "All settings of the run"),
    ):
        if facts.get(key):
            rows = [[str(n), param_text(v)] for n, v in facts[key].items()]
            columns = [Column("name"), Column("value")]
            body.append(
                element(
                    "details",
                    element("summary", title),
                    table(f"table-{name}", title, columns, rows, sorts=False),
                    id=f"details-{name}",
                )
            )
    if samples_per_second(run) is not None:
        body.insert(1, note(_RATE))
    return Section("summary", "Summary", join_parts(body))


def _table_of_values(values: Sequence[Tuple[str, float, Optional[float], Any, str]]) -> Html:
    rows: List[Row] = []
    for name, last, best, epoch, direction in values:
        has_best = best is not None and not math.isnan(best)
        rows.append(
            [
                name,
                Cell(texts.number(last), last),
                Cell(texts.number(best), best) if has_best else Cell(texts.DASH),
                Cell(texts.count(epoch), epoch) if has_best else Cell(texts.DASH),
                {"min": "smaller", "max": "larger"}.get(direction, "not known"),
            ]
        )
    columns = [
        Column("value"),
        Column("at the end", True),
        Column("best", True),
        Column("in epoch", True, "The first epoch that has the best value"),
        Column("better is"),
    ]
    return table("table-values", "Values of the last epoch, and the best", columns, rows)


def warnings_section(facts: Mapping[str, object]) -> Section:
    """Make the section of warnings; its body is empty where there are none."""
    return Section("warnings", "Warnings and advice", notices(facts, "h3"))


def notices(facts: Mapping[str, Any], heading: str) -> Html:
    """Render advice and then warnings of Python, with their cures.

    Args:
        facts: facts of the run.
        heading: HTML element of the titles.
    """
    entries: List[Mapping[str, Any]] = list(facts.get("warnings", ()))
    parts: List[Html] = []
    for title, kind in (("Advice", "advice"), ("Warnings", "warning")):
        of_kind = [each for each in entries if (each["kind"] == "advice") == (kind == "advice")]
        if of_kind:
            parts.append(element(heading, title))
            parts.append(element("ul", [_notice(each) for each in of_kind], class_="notices"))
    return join_parts(parts)


def _notice(entry: Mapping[str, Any]) -> Html:
    where = [str(part) for part in (entry.get("category"), entry.get("place")) if part]
    if entry.get("count", 1) > 1:
        where.append(f"{entry['count']:,} times")
    return element(
        "li",
        element("p", str(entry["text"])),
        element("p", element("strong", "What to do: "), str(entry["cure"]))
        if entry["cure"]
        else None,
        element("p", " · ".join(where), class_="place") if where else None,
        class_="advice" if entry["kind"] == "advice" else "warning",
    )
