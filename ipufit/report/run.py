"""A run as its report has it."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List

from ipufit.report.files import read_facts, read_rows

__all__ = ["Run"]


@dataclasses.dataclass(frozen=True)
class Run:
    """What is known of one run.

    Attributes:
        folder: of its report.
        facts: ``run.json``; see :mod:`ipufit.report.files`.
        rows: its executions, by column.
    """

    folder: str
    facts: Dict[str, Any]
    rows: Dict[str, List[float]]

    @staticmethod
    def read(folder: str) -> Run:
        """From its folder, also while it is being written.

        Raises:
            ConfigurationError: there is no report.
        """
        return Run(folder, read_facts(folder), read_rows(folder))
