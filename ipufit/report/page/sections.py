"""What a section of the page is."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Optional, Sequence

from ipufit.report.page.charts import Chart
from ipufit.report.page.html import Html, element

__all__ = ["Section", "lacking", "note"]


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
