"""``ipufit plan``: what the model of a script takes on IPUs, by estimate."""

from __future__ import annotations

import dataclasses
import json
from types import FrameType
from typing import Any, Callable, List, Mapping, Optional, Tuple

from ipufit.cli.intercept_fit import check_fit_arguments, first_micro_batch, intercept_fit
from ipufit.core.plan import Plan
from ipufit.partition.request import PartitionRequest
from ipufit.planner.partition_plan import PartitionPlan
from ipufit.planner.plan_partition import plan_partition
from ipufit.training.model import Model
from ipufit.training.session import Session
from ipufit.training.summary import stripped

__all__ = ["plan_script"]

FITS, TOO_LARGE = 0, 1


def plan_script(
    execute: Callable[[], None], as_json: bool, ipus: Optional[int], per_replica: Optional[int]
) -> int:
    """Run a script up to its first ``fit``, and print the plan of what it would train.

    Args:
        execute: runs it.
        as_json: print it as JSON; what the script prints goes to stderr.
        ipus: in all, instead of those of ``fit``.
        per_replica: find a division into so many stages, instead of that of ``compile``; then the
            plan of the batches, which is of the division that ``fit`` would use, is left out.

    Returns:
        The exit status: 0 where every stage fits its IPU, 1 where one does not, 2 where the script
        failed or fits no model.
    """

    def look(
        model: Model, session: Session, fit_args: Mapping[str, Any], caller: FrameType
    ) -> Tuple[Optional[Plan], PartitionPlan]:
        sample = first_micro_batch(session, fit_args)
        request = check_fit_arguments(session, fit_args, **({} if ipus is None else {"ipus": ipus}))
        accumulation, batches = fit_args["gradient_accumulation"], None
        if per_replica is None:
            # As fit has it, where only the data itself says how large a micro-batch is.
            batches = dataclasses.replace(request.plan, micro_batch_size=sample.size)
        elif accumulation == 1:
            # What nobody has chosen: the least that fills the pipeline.
            accumulation = None
        session.sample = sample = stripped(sample)
        work = (fit_args["ipus"] if ipus is None else ipus, accumulation)
        division = PartitionRequest(ipus_per_replica=per_replica)
        estimator = session.plan_estimator
        plan = plan_partition(session.divided, estimator, lambda: sample, division, *work)
        return batches, plan

    def show(plans: List[Tuple[Optional[Plan], PartitionPlan]]) -> Tuple[int, str]:
        ((batches, plan),) = plans
        text = str(plan) if batches is None else f"{batches.explain()}\n\n{plan}"
        if as_json:
            of_batches = None if batches is None else dataclasses.asdict(batches)
            text = json.dumps({"batches": of_batches, **plan.to_dict()}, indent=2)
        return FITS if plan.fits else TOO_LARGE, text

    return intercept_fit(execute, look, show, "plan", as_json, in_one_line=True)
