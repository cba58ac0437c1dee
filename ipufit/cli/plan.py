"""``ipufit plan``: what the model of a script takes on IPUs, by estimate."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

from ipufit.cli.intercept_fit import Examination, FitCall
from ipufit.core.plan import Plan
from ipufit.partition.request import PartitionRequest
from ipufit.planner.partition_plan import PartitionPlan
from ipufit.planner.plan_partition import plan_partition

_FITS, _TOO_LARGE = 0, 1

# Of the batches; None where the division is another one than that of fit.
_Plans = Tuple[Optional[Plan], PartitionPlan]


class Planning(Examination[_Plans]):
    """Plans what a script's first ``fit`` would train.

    ``--ipus`` is in the place of those of ``fit``, and ``--ipus-per-replica`` finds a division into
    so many stages, instead of that of ``compile``; then the plan of the batches, which is of the
    division that ``fit`` would use, is left out.

    The exit status is 0 where every stage fits its IPU, 1 where one does not, 2 where the script
    failed or never calls fit.
    """

    def look(self, call: FitCall) -> _Plans:
        """Plan the batches, and the division of the model."""
        ipus, per_replica = self.options.ipus, self.options.ipus_per_replica
        sample = call.first_micro_batch()
        request = call.check_arguments(**({} if ipus is None else {"ipus": ipus}))
        accumulation, batches = call.arguments["gradient_accumulation"], None
        if per_replica is None:
            # As fit has it, where only the data itself says how large a micro-batch is.
            batches = dataclasses.replace(request.plan, micro_batch_size=sample.size)
        elif accumulation == 1:
            # What nobody has chosen: the least that fills the pipeline.
            accumulation = None
        session = call.session
        session.sample = sample = sample.stripped()
        work = (call.arguments["ipus"] if ipus is None else ipus, accumulation)
        division = PartitionRequest(ipus_per_replica=per_replica)
        estimator = session.plan_estimator
        plan = plan_partition(session.divided, estimator, lambda: sample, division, *work)
        return batches, plan

    def show(self, results: List[_Plans]) -> Tuple[int, str, object]:
        """Show both plans."""
        ((batches, plan),) = results
        text = str(plan) if batches is None else f"{batches.explain()}\n\n{plan}"
        of_batches = None if batches is None else dataclasses.asdict(batches)
        values = {"batches": of_batches, **plan.to_dict()}
        return _FITS if plan.fits else _TOO_LARGE, text, values
