"""What a section of the page is."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional, Sequence

from ipufit.report.page.charts import Chart
from ipufit.report.page.html import Html, element

__all__ = ["Section", "choices", "lacking", "note"]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        anchor: its address in the page.
        title: its heading, and its name in the navigation.
        body: what stands in it.
        charts: that stand in it.
    """

    anchor: str
    title: str
    body: Html
    charts: Sequence[Chart] = ()


def note(*parts: str) -> Html:
    """A paragraph of explanation."""
    return element("p", *parts, class_="note")


def choices(anchor: str, about: str, tables: Mapping[str, Html]) -> Html:
    """Tables of which one is shown at a time.

    Args:
        anchor: of all of them.
        about: what they differ in, for whoever can't see the buttons.
        tables: by the name of the button.
    """
    return element(
        "div",
        element("div", class_="tools", role="group", aria_label=about),
        [
            element("div", table, class_="choice", data_choice=name)
            for name, table in tables.items()
        ],
        class_="choices",
        id=f"choices-{anchor}",
    )


def lacking(facts: Mapping[str, Any], name: str) -> Optional[Html]:
    """Why a fact is not there; None if it is.

    Args:
        facts: of the run.
        name: of the fact.
    """
    if name not in facts:
        why = "the run has not come so far"
        if facts.get("status") != "running":
            why = "the run ended before it was known"
    elif isinstance(facts[name], dict) and "missing" in facts[name]:
        why = str(facts[name]["missing"])
    else:
        return None
    return element("p", "Not shown: ", why.rstrip("."), ".", class_="missing")
