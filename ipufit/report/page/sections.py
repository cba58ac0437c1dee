"""Sections of the page: a template with its values, or the reason why there is nothing to show."""

from __future__ import annotations

import dataclasses
from typing import Mapping, Sequence

from ipufit.report.files import Facts
from ipufit.report.page.figures import Chart

__all__ = ["Section", "lacking"]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page with a heading.

    Attributes:
        anchor: its address in the page.
        title: its heading, and its name in the navigation.
        values: what its template shows.
        charts: the charts in it.
        missing: why there is nothing to show; empty if there is.
        kind: name of its template, if that is not the anchor.
    """

    anchor: str
    title: str
    values: Mapping[str, object] = dataclasses.field(default_factory=dict)
    charts: Sequence[Chart] = ()
    missing: str = ""
    kind: str = ""


def lacking(facts: Facts, name: str) -> str:
    """Tell why a fact is not there, without a full stop; empty if it is.

    Args:
        facts: facts of the run.
        name: key of the fact.
    """
    if name not in facts:
        if facts.get("status") != "running":
            return "the run ended before it was known"
        return "the run has not come so far"
    if isinstance(facts[name], dict) and "missing" in facts[name]:
        return str(facts[name]["missing"]).rstrip(".")
    return ""
