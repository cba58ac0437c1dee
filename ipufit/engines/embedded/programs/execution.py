"""The updates of one execution, with results looked at as they come or all at its end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Set, Tuple

from torch import Tensor

from ipufit.core.batch import ProcessShard, local_indices
from ipufit.core.train_config import outputs_wanted
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.execution_outputs import ExecutionOutputs
from ipufit.engines.embedded.flat_optimizer import Rows
from ipufit.engines.embedded.nan_detection import refuse_loss
from ipufit.engines.embedded.traced_step import Update
from ipufit.engines.embedded.training_state import Snapshot, TrainingState
from ipufit.engines.embedded.update_runner import UpdateRunner
from ipufit.engines.program import ExecutionResult, ProgramSpec
from ipufit.errors import NonFiniteLossError

if TYPE_CHECKING:
    from ipufit.engines.embedded.replay_update import Replay

__all__ = ["Execution", "settings_of"]


class Execution:
    """Runs all updates, and sees to it that none is made of what is not finite.

    Where the host can look at a number without waiting for the device, it does so before each
    update. Elsewhere it looks after the last one, when everything has come over in one copy; if an
    update turns out to have been bad, the execution is taken back and repeated without it. Data and
    random numbers are functions of the update, so both ways give the same bits.

    Args:
        engine: brings results to the host.
        spec: what is built.
        live: what the updates change.
        maker: makes one update.
        updates: micro-batches, with what is recorded for them, by update.
        rows: the settings of the optimizer for each update.
        shares: what the updates are of those of all processes; None for one process.
        replay: finds out where a value that is not finite began; None: nobody asks.
    """

    def __init__(
        self,
        engine: EngineContext,
        spec: ProgramSpec,
        live: TrainingState,
        maker: UpdateRunner,
        updates: Sequence[Update],
        rows: Rows,
        shares: Optional[Sequence[ProcessShard]] = None,
        replay: Optional[Replay] = None,
    ) -> None:
        self._shares = shares
        self._replay = replay
        self._engine = engine
        self._spec = spec
        self._live = live
        self._maker = maker
        self._updates = updates
        self._rows = rows
        self._wanted = self._wanted_outputs()

    def _wanted_outputs(self) -> Set[int]:
        if not self._spec.want_outputs:
            return set()
        plan, shares = self._spec.plan, self._shares
        mode, per_update = self._spec.config.output_mode, plan.micro_batches_per_update
        if shares is None:
            count = sum(len(update) for update in self._updates)
            return set(outputs_wanted(mode, count, per_update, plan.replicas))
        count = sum(len(share.sizes) for share in shares)
        wanted = set(outputs_wanted(mode, count, per_update, plan.all_replicas))
        return {index for index, place in enumerate(local_indices(shares)) if place in wanted}

    def run(self) -> ExecutionResult:
        """All updates.

        Raises:
            NonFiniteLossError: the state is that before the update named in it.
        """
        if self._replay is not None:
            return self._run_watched(self._replay)
        if self._maker.at_once:
            return self._fetch(self.attempt(self._updates, None))[0]
        return self._run_late()

    def _run_watched(self, replay: Replay) -> ExecutionResult:
        """Run all updates, and trace what is not finite to where it began."""
        start, snapshot = self._live.updates, self._live.snapshot()
        try:
            results = self.attempt(self._updates, None)
        except NonFiniteLossError as error:
            lost = self._live.updates - start
            if error.found is not None:
                # Weights show it when the update is made.
                self._go_back(snapshot)
                self.attempt(self._updates[:lost], None)
            before = sum(batch.size for update in self._updates[:lost] for batch, _ in update)
            raise replay.explain(error, self._updates[lost], before) from None
        return self._fetch(results)[0]

    def _run_late(self) -> ExecutionResult:
        snapshot = self._live.snapshot()
        left_out: Set[int] = set()
        while True:
            try:
                results = self.attempt(self._updates, left_out)
            except NonFiniteLossError:
                raise  # this is the update it names: all before it are known to be good
            except BaseException:
                # An update before this one may have been spoilt already: no loss was looked at.
                self._live.restore(snapshot)
                raise
            anchors, finite = self._fetch(results)
            lost = self._first_lost_of_all(anchors.losses)
            bad = next((i for i, ok in enumerate(finite) if not ok and i not in left_out), None)
            if lost is not None and (bad is None or lost <= bad):
                self._go_back(snapshot)
                self.attempt(self._updates[:lost], left_out)
                self._refuse(lost, anchors.losses)
            if bad is None:
                return anchors
            left_out.add(bad)
            self._go_back(snapshot)

    def _go_back(self, snapshot: Snapshot) -> None:
        self._live.restore(snapshot)
        self._live.updater.refresh(self._rows)

    def attempt(self, updates: Sequence[Update], left_out: Optional[Set[int]]) -> ExecutionOutputs:
        """Every update in turn.

        Args:
            updates: all of the execution, or the first ones.
            left_out: updates known to have a gradient that is not finite; None to look at once.
        """
        plan = self._spec.plan
        is_sum = self._spec.config.output_mode.kind == "sum"
        results = ExecutionOutputs(plan.replicas if is_sum else 0)
        first = 0
        for index, update in enumerate(updates):
            left = None if left_out is None else index in left_out
            share = None if self._shares is None else self._shares[index]
            self._maker.make(update, first, self._wanted, results, left, share)
            first += len(update)
        return results

    def _fetch(self, results: ExecutionOutputs) -> Tuple[ExecutionResult, List[bool]]:
        return self._engine.fetch(results, settings_of(self._spec, self._live, self._rows))

    def _first_lost(self, losses: Tensor) -> Optional[int]:
        """The first update with a loss that is not finite."""
        values = iter(losses.tolist())
        for index, update in enumerate(self._updates):
            if not all(math.isfinite(value) for value in [next(values) for _ in update]):
                return index
        return None

    def _first_lost_of_all(self, losses: Tensor) -> Optional[int]:
        """Return the first update with a loss that is not finite in any process."""
        lost = self._first_lost(losses)
        if self._shares is None:
            return lost
        found = [each for each in self._spec.processes.gather(lost) if each is not None]
        return min(found, default=None)

    def _refuse(self, lost: int, losses: Tensor) -> None:
        first = sum(len(update) for update in self._updates[:lost])
        values = losses[first : first + len(self._updates[lost])].tolist()
        if self._shares is not None:
            self._maker.refuse_common(values, self._shares[lost])
        for value in values:
            refuse_loss(self._live, value)


def settings_of(spec: ProgramSpec, live: TrainingState, rows: Rows) -> Dict[str, float]:
    """Return what a program says of itself after an execution.

    Args:
        spec: of the program.
        live: after the execution.
        rows: the settings of the optimizer for each update of it.
    """
    settings = {}
    if spec.config.schedule is not None:
        settings["learning_rate"] = float(rows[-1][0]["lr"])
    if live.scaler is not None:
        settings["loss_scale"] = live.scaler.value
    return settings
