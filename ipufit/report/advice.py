"""What the numbers of a run say against it, and what to do."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

__all__ = ["advised"]


def advised(facts: Mapping[str, Any], rows: Mapping[str, List[float]]) -> List[Dict[str, Any]]:
    """Warnings with their cures.

    Args:
        facts: of the run, as ``run.json`` has them.
        rows: of its executions, by column.
    """
    return []
