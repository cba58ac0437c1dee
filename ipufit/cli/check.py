"""``ipufit check``: a script runs as it is, and what it would fit is checked instead."""

from __future__ import annotations

from typing import List, Tuple

from ipufit.analysis.check.check import checked_sample
from ipufit.analysis.check.findings import CheckReport
from ipufit.cli.intercept_fit import Examination, FitCall

_CLEAN, _FOUND = 0, 1


class Checking(Examination[CheckReport]):
    """Checks the first micro-batch of a script's first ``fit``, or with ``--all`` of every one.

    The exit status is 0 where nothing was found, 1 for findings, 2 where the script failed or fits
    no model.
    """

    in_one_line = False

    def look(self, call: FitCall) -> CheckReport:
        """Check the micro-batch."""
        sample = call.first_micro_batch()
        return checked_sample(call.model.module, call.session, sample, call.caller)

    def show(self, results: List[CheckReport]) -> Tuple[int, str, object]:
        """Show all findings."""
        values = {"reports": [report.as_dict() for report in results]}
        return _FOUND if any(results) else _CLEAN, "\n\n".join(map(str, results)), values
