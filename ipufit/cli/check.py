"""``ipufit check``: a script runs as it is, and what it would fit is checked instead."""

from __future__ import annotations

import json
from types import FrameType
from typing import Callable, List, Mapping, Tuple

from ipufit.analysis.check.check import checked_sample
from ipufit.analysis.check.findings import CheckReport
from ipufit.cli.intercept_fit import first_micro_batch, intercept_fit
from ipufit.training.model import Model
from ipufit.training.session import Session

__all__ = ["check_script"]

CLEAN, FOUND = 0, 1


def check_script(execute: Callable[[], None], as_json: bool, every: bool) -> int:
    """Run a script with ``Model.fit`` replaced by a check of its first micro-batch.

    Args:
        execute: runs it.
        as_json: print the findings as JSON; what the script prints goes to stderr.
        every: go on after the first ``fit``, which then returns an empty history.

    Returns:
        The exit status: 0 where nothing was found, 1 for findings, 2 where the script failed or
        fits no model.
    """

    def look(
        model: Model, session: Session, fit_args: Mapping[str, object], caller: FrameType
    ) -> CheckReport:
        sample = first_micro_batch(session, fit_args)
        return checked_sample(model.module, session, sample, caller)

    def show(reports: List[CheckReport]) -> Tuple[int, str]:
        text = "\n\n".join(map(str, reports))
        if as_json:
            text = json.dumps({"reports": [report.as_dict() for report in reports]}, indent=2)
        return FOUND if any(reports) else CLEAN, text

    return intercept_fit(execute, look, show, "check", as_json, every)
