"""Warnings and advice, with their cures."""

from __future__ import annotations

from typing import Any, List, Mapping

from ipufit.report.page.html import Html, element, joined
from ipufit.report.page.sections import Section

__all__ = ["notices", "warned"]


def warned(facts: Mapping[str, Any]) -> Section:
    """The section; its body is empty where there is nothing to say."""
    return Section("warnings", "Warnings and advice", notices(facts, "h3"))


def notices(facts: Mapping[str, Any], heading: str) -> Html:
    """Advice first, for it has cures, then what Python warned of.

    Args:
        facts: of the run.
        heading: element of the titles.
    """
    said: List[Mapping[str, Any]] = list(facts.get("warnings", ()))
    parts: List[Html] = []
    for title, kind in (("Advice", "advice"), ("Warnings", "warning")):
        found = [each for each in said if (each["kind"] == "advice") == (kind == "advice")]
        if found:
            parts.append(element(heading, title))
            parts.append(element("ul", [_notice(each) for each in found], class_="notices"))
    return joined(parts)


def _notice(said: Mapping[str, Any]) -> Html:
    where = [str(part) for part in (said.get("category"), said.get("place")) if part]
    if said.get("count", 1) > 1:
        where.append(f"{said['count']:,} times")
    return element(
        "li",
        element("p", str(said["text"])),
        element("p", element("strong", "What to do: "), str(said["cure"]))
        if said["cure"]
        else None,
        element("p", " · ".join(where), class_="place") if where else None,
        class_="advice" if said["kind"] == "advice" else "warning",
    )
