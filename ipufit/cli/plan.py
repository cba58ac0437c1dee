"""``ipufit plan``: what the model of a script takes on IPUs, by estimate."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import FrameType
from typing import Any, Callable, List, Mapping, Optional

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
    plans: List[PartitionPlan] = []
    batches: List[Plan] = []

    def look(
        model: Model, session: Session, fit_args: Mapping[str, Any], caller: FrameType
    ) -> None:
        sample = first_micro_batch(session, fit_args)
        request = check_fit_arguments(session, fit_args, **({} if ipus is None else {"ipus": ipus}))
        accumulation = fit_args["gradient_accumulation"]
        if per_replica is None:
            # As fit has it, where only the data itself says how large a micro-batch is.
            batches.append(dataclasses.replace(request.plan, micro_batch_size=sample.size))
        elif accumulation == 1:
            # What nobody has chosen: the least that fills the pipeline.
            accumulation = None
        session.sample = sample = stripped(sample)
        work = (fit_args["ipus"] if ipus is None else ipus, accumulation)
        division = PartitionRequest(ipus_per_replica=per_replica)
        plans.append(plan_partition(session, lambda: sample, division, *work))

    stream = sys.stderr if as_json else None
    failed = intercept_fit(execute, look, "plan", printing_to=stream, in_one_line=True)
    if failed is not None:
        return failed
    plan = plans[0]
    if as_json:
        whole = {"batches": dataclasses.asdict(batches[0]) if batches else None, **plan.to_dict()}
        sys.stdout.write(json.dumps(whole, indent=2) + "\n")
    else:
        texts = [*(each.explain() for each in batches), str(plan)]
        sys.stdout.write("\n\n".join(texts) + "\n")
    sys.stdout.flush()
    return FITS if plan.fits else TOO_LARGE
