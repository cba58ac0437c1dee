"""A plan in the place of ``stages``: what it says to ``compile``, and what it holds it to."""

from __future__ import annotations

import dataclasses
import hashlib

from torch import nn

from ipufit.errors import PartitionError
from ipufit.partition.request import PartitionRequest
from ipufit.planner.partition_plan import PartitionPlan
from ipufit.planner.texts import size

__all__ = ["as_planned", "fingerprint"]


def fingerprint(module: nn.Module) -> str:
    """The same for modules of the same layers and the same shapes of parameters."""
    parts = [f"{name} {type(part).__qualname__}" for name, part in module.named_modules()]
    shapes = [f"{name} {tuple(p.shape)}" for name, p in module.named_parameters()]
    return hashlib.sha256("\n".join([*parts, *shapes]).encode()).hexdigest()


def as_planned(module: nn.Module, asked: PartitionRequest) -> PartitionRequest:
    """The request with the stages and the strategy of a plan, where its stages are one.

    Raises:
        PartitionError: the plan is one of another module or strategy, or does not fit.
    """
    plan = asked.stages
    if not isinstance(plan, PartitionPlan):
        return asked
    name, strategy = asked.name("stages"), plan.planned.strategy
    if plan.planned.fingerprint != fingerprint(module):
        raise PartitionError(
            f"{name} as a plan must be one of the module that is compiled, "
            f"{type(module).__name__}, but this one was made of a {plan.planned.title} with other "
            "layers or parameters. Ask model.plan again."
        )
    if not plan.fits:
        most = max(plan.memory)
        raise PartitionError(
            f"{name} as a plan must fit in the memory that it was made for, "
            f"{size(plan.planned.memory)} per IPU, but its largest stage takes about {size(most)}. "
            f"Plan with more IPUs or a smaller batch, or pass {name}=plan.stages, which are not "
            "held against the estimate."
        )
    if asked.strategy not in (None, strategy):
        raise PartitionError(
            f"{asked.name('strategy')} must be that of the plan, {strategy!r}, got "
            f"{asked.strategy!r}. Leave it out, or plan with the other one."
        )
    if len(plan.costs) == 1:
        return dataclasses.replace(asked, stages=None, strategy=None)
    # Inference runs sharded where it does not fill the pipeline, unless someone says otherwise.
    strategy = asked.strategy if asked.prefix else strategy
    return dataclasses.replace(asked, stages=plan.stages, strategy=strategy)
