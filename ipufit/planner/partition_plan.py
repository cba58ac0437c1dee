"""What ``Model.plan`` returns: memory, work and time of every stage."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from ipufit.errors import ConfigurationError, UnknownNameError
from ipufit.planner.costs import StageCost, by_ipu, memory_of, times_of
from ipufit.planner.pipeline_schedule import (
    SCHEDULES,
    Timeline,
    in_flight,
    least_accumulation,
    simulate,
)
from ipufit.planner.texts import share

__all__ = ["PartitionPlan", "Planned"]


@dataclasses.dataclass(frozen=True)
class Planned:
    """How the stages are used.

    Attributes:
        title: class of the module.
        begins: modules that begin a stage, with its number.
        micro_batch_size: samples.
        gradient_accumulation: micro-batches of an update.
        replicas: copies of the model.
        strategy: "pipelined" or "sharded".
        schedule: of the pipeline, one of SCHEDULES.
        recompute: whether activations are recomputed.
        memory: bytes of an IPU that may be used.
        unused: parameters that the module does not use.
        checkpoints: layers from whose outputs recomputation starts, besides the inputs of stages.
        with_loss: whether the loss is counted, for which the batch must have a target.
        fingerprint: of the module's layers and parameters.
        places: the IPU of each stage, where one goes back to an earlier IPU; else none.
    """

    title: str
    begins: Tuple[Tuple[str, int], ...]
    micro_batch_size: int
    gradient_accumulation: int
    replicas: int
    strategy: str
    schedule: str
    recompute: bool
    memory: int
    unused: Tuple[str, ...] = ()
    checkpoints: Tuple[str, ...] = ()
    with_loss: bool = True
    fingerprint: str = ""
    places: Tuple[int, ...] = ()


class PartitionPlan:
    """An estimate of what the stages of a model take; ``print`` shows it as tables.

    Memory is counted tensor by tensor: weights, accumulated gradients, the optimizer's state and
    what autograd keeps. Code, exchange buffers and temporary results come on top, which only the
    compiler knows. Times are shares, from the FLOPs and the bytes of every operator, not cycles.

    Args:
        costs: of every stage.
        planned: how the stages are used.

    Attributes:
        costs, planned: those.
        stages: modules that begin a stage, by name, with its number, or a pair of that and its IPU
            where a stage goes back to an earlier one. ``compile(stages=plan)`` takes the plan
            itself, ``compile(stages=plan.stages)`` leaves out its checks.
    """

    def __init__(self, costs: Sequence[StageCost], planned: Planned) -> None:
        self.costs: Tuple[StageCost, ...] = tuple(costs)
        self.planned = planned
        self.stages: Dict[str, Union[int, Tuple[int, int]]] = {
            name: (stage, self.ipu_of(stage)) if planned.places else stage
            for name, stage in planned.begins
        }

    @property
    def ipus(self) -> int:
        """IPUs of a replica."""
        return 1 + max(self.planned.places) if self.planned.places else len(self.costs)

    def ipu_of(self, stage: int) -> int:
        """The IPU of a stage."""
        return self.planned.places[stage] if self.planned.places else stage

    @property
    def stage_memory(self) -> List[int]:
        """Bytes that each stage takes."""
        return memory_of(self.costs, self.planned.schedule, self.planned.recompute)

    @property
    def memory(self) -> List[int]:
        """Bytes on each IPU of a replica, which is each stage's where no two share one."""
        return by_ipu(self.stage_memory, self.planned.places)

    @property
    def fits(self) -> bool:
        """Whether the memory of every IPU is enough."""
        return max(self.memory) <= self.planned.memory

    @property
    def time_shares(self) -> List[float]:
        """Time of each stage as a part of that of all, about; they add up to 1."""
        forward, backward = times_of(self.costs, self.planned.schedule, self.planned.recompute)
        whole = sum(forward) + sum(backward)
        return [(f + b) / whole if whole else 0.0 for f, b in zip(forward, backward)]

    def utilisation(
        self, gradient_accumulation: Optional[int] = None, schedule: Optional[str] = None
    ) -> float:
        """Share of the time of an update in which an IPU works, over all IPUs.

        The rest is the pipeline's bubble: stages that wait for the first micro-batch, for the last
        one, or for a slower stage.

        Args:
            gradient_accumulation: micro-batches of an update; None is the plan's.
            schedule: "grouped", "interleaved" or "sequential"; None is the plan's.

        Raises:
            ConfigurationError: an unknown schedule, or no positive number.
        """
        return self.timeline(gradient_accumulation, schedule).utilisation

    def least_accumulation(self, utilisation: float, schedule: Optional[str] = None) -> int:
        """The smallest ``gradient_accumulation`` that reaches a utilisation.

        It fills the pipeline too, as PopTorch demands.

        Args:
            utilisation: above 0, at most 1.
            schedule: as for :meth:`utilisation`.

        Raises:
            ConfigurationError: no number reaches it, since stages of other times wait for the
                slowest; with the utilisation that is never exceeded.
        """
        schedule = self._schedule(schedule)
        is_number = isinstance(utilisation, (int, float)) and not isinstance(utilisation, bool)
        if not is_number or not 0 < utilisation <= 1:
            raise ConfigurationError(
                f"utilisation must be a number above 0 and at most 1, got {utilisation!r}. Write "
                "0.9 for 90 %."
            )
        found, limit = least_accumulation(
            schedule,
            *times_of(self.costs, schedule, self.planned.recompute),
            utilisation,
            self.planned.places,
        )
        if found is None:
            raise ConfigurationError(
                f"a utilisation of {share(utilisation)} is out of reach of the {schedule} "
                f"schedule: these stages stay below {share(limit)}, however many micro-batches "
                "follow each other. Ask for less, or divide the work more evenly."
            )
        return found

    def timeline(
        self, gradient_accumulation: Optional[int] = None, schedule: Optional[str] = None
    ) -> Timeline:
        """When every stage works on which micro-batch, in one update.

        Args:
            gradient_accumulation: as for :meth:`utilisation`.
            schedule: as for :meth:`utilisation`.

        Returns:
            Tasks; the unit of their times is that of one micro-batch through all stages and back.
        """
        count = gradient_accumulation
        if count is None:
            count = self.planned.gradient_accumulation
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigurationError(
                f"gradient_accumulation must be a positive whole number or None, got {count!r}."
            )
        schedule = self._schedule(schedule)
        forward, backward = times_of(self.costs, schedule, self.planned.recompute)
        unit = sum(forward) + sum(backward) or 1.0
        forward, backward = ([time / unit for time in times] for times in (forward, backward))
        return simulate(schedule, forward, backward, count, self.planned.places)

    def to_dict(self) -> Dict[str, Any]:
        """Everything in plain values."""
        planned = dataclasses.asdict(self.planned)
        planned.update(
            begins=dict(self.planned.begins),
            unused=list(self.planned.unused),
            checkpoints=list(self.planned.checkpoints),
            places=list(self.planned.places),
        )
        schedule = self.planned.schedule
        stages = []
        for stage, (cost, memory) in enumerate(zip(self.costs, self.stage_memory)):
            flights = in_flight(schedule, stage, len(self.costs))
            stages.append(
                {
                    **dataclasses.asdict(cost),
                    "in_flight": flights,
                    "ipu": self.ipu_of(stage),
                    "memory": memory,
                    "activations_kept": cost.activations(flights),
                    "activations_recomputed": cost.activations(flights, True),
                    "time_share": self.time_shares[stage],
                }
            )
        names = SCHEDULES if len(self.costs) > 1 else ()
        return {
            **planned,
            "fits": self.fits,
            "utilisation": {name: self.utilisation(schedule=name) for name in names},
            "stages": stages,
        }

    def plot(self, path: Union[str, os.PathLike[str], None] = None) -> Any:
        """Draw the timeline of one update, and the memory of every stage.

        Args:
            path: where to save the picture (the suffix chooses the format); None to
                show it in a notebook, and return it.

        Returns:
            The matplotlib ``Figure``.

        Raises:
            ConfigurationError: matplotlib is not installed, or the path can't be written.
        """
        from ipufit.planner.picture import draw

        return draw(self, path)

    def __str__(self) -> str:
        from ipufit.planner.tables import told

        return told(self)

    def __repr__(self) -> str:
        planned = self.planned
        return (
            f"PartitionPlan({planned.title}, {len(self.costs)} stages, {planned.strategy}, "
            f"fits={self.fits})"
        )

    def _schedule(self, schedule: Optional[str]) -> str:
        if schedule is None:
            return self.planned.schedule
        if schedule not in SCHEDULES:
            raise UnknownNameError("schedule", str(schedule), SCHEDULES)
        return schedule
