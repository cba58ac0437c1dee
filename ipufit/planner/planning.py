"""From a model and a micro-batch to a plan of its partition."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn

from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import TrainConfig
from ipufit.errors import PartitionError
from ipufit.losses import Loss
from ipufit.partition.partition import Partition
from ipufit.planner.costs import IPU_MEMORY, Costs, StageCost, by_ipu, memory_of, state_bytes
from ipufit.planner.measure import Trace, measure
from ipufit.planner.pipeline_schedule import SCHEDULES
from ipufit.planner.search import Cut, Tail, best_division, cuts_of, tail_of
from ipufit.planner.texts import size

__all__ = ["Divided", "Estimator", "schedule_of"]

# A block is cut, or a stage more is made, only where the slowest one becomes so much faster.
_WORTH = 1.05


def schedule_of(strategy: str, schedule: Optional[str] = None) -> str:
    """Find the schedule: PopTorch's, or the requested one; "sequential" where sharded."""
    if strategy == "sharded":
        return "sequential"
    return schedule or SCHEDULES[0]


class Divided(NamedTuple):
    """A division that was found.

    Attributes:
        costs: what the stages take, in their order.
        places: the IPU of each, where the last one goes back to an earlier IPU; else none.
    """

    costs: List[StageCost]
    places: Tuple[int, ...] = ()


class Estimator:
    """Traces a model once, and says what its divisions take.

    Args:
        module: the user's.
        loss: its normal form.
        optimizer: None for a model that only evaluates and predicts.
        config: precision and accumulation.
        sample: a micro-batch.
        partition: whose rules are checked on the way; None for one that is yet to be found.
        recompute: layers from whose outputs recomputation starts, besides the inputs of stages.

    Raises:
        CaptureError: the module needs a value.
        PartitionError: the partition can't work, or the optimizer's state can't be found out.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        optimizer: Optional[torch.optim.Optimizer],
        config: TrainConfig,
        sample: MicroBatch,
        partition: Optional[Partition] = None,
        recompute: Sequence[str] = (),
    ) -> None:
        groups = optimizer.param_groups if optimizer is not None else []
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        precision, wide = config.precision, config.accumulation_dtype
        trace = measure(module, loss, sample, trained, precision, partition, recompute)
        modules = {"net": module}
        if loss.module is not None:
            modules["loss_module"] = loss.module
        states = state_bytes(optimizer) if optimizer is not None else {}
        if config.offload_optimizer_state:
            states = dict.fromkeys(states, 0)
        self._module = module
        self._costs = Costs(trace, modules, states, wide)

    @property
    def unused(self) -> Tuple[str, ...]:
        """Parameters that the module does not use."""
        return tuple(self._costs.unused)

    @property
    def _trace(self) -> Trace:
        return self._costs.trace

    def given(self, partition: Optional[Partition]) -> List[StageCost]:
        """Estimate the costs of the stages of a partition, in their order.

        Raises:
            PartitionError: it is that of the module's own blocks, which has no names.
        """
        if partition is None or partition.stages == 1:
            return [self._costs.of(0, len(self._trace.segments), self._first())]
        if not partition.begins:
            raise PartitionError(
                "plan needs to know which modules begin the stages, but this model is divided by "
                "its own blocks. Pass stages={'name of a module': number of its stage}, or "
                "stages='auto'."
            )
        calls: Dict[str, int] = {}
        for number, segment in enumerate(self._trace.segments):
            calls.setdefault(segment.name, number)
        starts: Dict[int, Cut] = {}
        for name, stage in partition.begins:
            cut = Cut(name, calls[name])
            if stage not in starts or cut.segment < starts[stage].segment:
                starts[stage] = cut
        for number, stage in self._trace.placed.items():
            if stage not in starts or number < starts[stage].segment:
                starts[stage] = Cut(self._trace.segments[number].name, number)
        starts.setdefault(0, Cut(self._first(), 0))
        return self._along([starts[stage] for stage in range(partition.stages)])

    def divided(
        self, stages: int, schedule: str, recompute: bool = False, memory: Optional[int] = None
    ) -> Optional[Divided]:
        """The best division over so many IPUs.

        Args:
            stages: how many, each on an IPU; there may be one more, which goes back to one of them
                for a weight that is there.
            schedule: of the pipeline.
            recompute: whether activations are recomputed.
            memory: bytes of an IPU; None for no limit.

        Returns:
            It; None where nothing fits.

        Raises:
            PartitionError: no so many can be made.
        """
        if stages == 1:
            whole = self._costs.of(0, len(self._trace.segments), self._first())
            taken = whole.memory(0, 1, schedule, recompute)
            return Divided([whole]) if memory is None or taken <= memory else None
        most, limit = 0, math.inf
        best: Optional[Tuple[Tuple[Cut, ...], Optional[Tail]]] = None
        tails = [None, tail_of(self._trace, self._module)]
        for tail in tails if tails[1] is not None else tails[:1]:
            for fine in (False, True):
                cuts = cuts_of(self._trace, self._module, fine, tail)
                most = max(most, len(cuts))
                how = (schedule, recompute, memory)
                found = best_division(self._costs, cuts, stages, *how, limit, tail)
                if found is not None:
                    best, limit = (found[0], tail), found[1] / _WORTH
        if best is not None:
            return self._with_tail(*best)
        if most < stages:
            raise PartitionError(
                f"the module can be divided into {most} stage{'s' if most != 1 else ''} at most, "
                f"got {stages}: a stage begins with a module that is called once, and none "
                "begins between two uses of a parameter. Use fewer IPUs, or untie weights."
            )
        return None

    def automatic(
        self, stages: int, strategy: str, recompute: bool = False
    ) -> Tuple[Tuple[Tuple[str, int], ...], Tuple[int, ...]]:
        """Divide as ``compile(stages="auto")`` does: the modules that begin a stage.

        And the IPU of each stage, where one goes back.

        Raises:
            PartitionError: no so many stages can be made, or they don't fit memory.
        """
        kind = schedule_of(strategy)
        found = self.divided(stages, kind, recompute, IPU_MEMORY)
        if found is None:
            least = self.divided(stages, kind, recompute)
            assert least is not None
            most = max(by_ipu(memory_of(least.costs, kind, recompute), least.places))
            how = "recomputed" if recompute else "kept"
            raise PartitionError(
                f"stages='auto' must find stages that fit in an IPU's {size(IPU_MEMORY)}, but none "
                f"of {stages} do: of the evenest ones the largest takes about {size(most)}, with "
                f"activations {how}. Use a larger ipus_per_replica, or smaller micro-batches, or "
                "name the stages, which are not held against this estimate."
            )
        begins = ((cost.name, stage) for stage, cost in enumerate(found.costs) if cost.name)
        return tuple(begins), found.places

    def _with_tail(self, cuts: Sequence[Cut], tail: Optional[Tail]) -> Divided:
        """Stages that begin at these cuts, and what goes back behind them."""
        if tail is None:
            return Divided(self._along(cuts))
        starts = [0, *(cut.segment for cut in cuts[1:])]
        home = max(stage for stage, start in enumerate(starts) if start <= tail.first)
        if home == len(cuts) - 1:
            # It is there already.
            return Divided(self._along(cuts))
        return Divided(self._along([*cuts, tail.cut]), (*range(len(cuts)), home))

    def _along(self, cuts: Sequence[Cut]) -> List[StageCost]:
        """Stages that begin at these cuts; the first takes what comes before it too."""
        bounds = [0, *(cut.segment for cut in cuts[1:]), len(self._trace.segments)]
        return [
            self._costs.of(begin, end, cut.name)
            for cut, begin, end in zip(cuts, bounds, bounds[1:])
        ]

    def _first(self) -> str:
        cuts = cuts_of(self._trace, self._module, fine=False)
        return cuts[0].name if cuts else ""
