"""Weight updates as recorded: gradients of micro-batches, reduced and applied, or left out."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

import torch
from torch import Tensor

from ipufit.core.batch import ProcessShard, local_indices
from ipufit.core.train_config import outputs_wanted
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.execution import ExecutionOutputs, ExecutionWork, UpdateWay, losses_of
from ipufit.engines.embedded.flat_optimizer import Evaluate, Rows
from ipufit.engines.embedded.non_finite import refuse_gradients, refuse_loss, refuse_weights
from ipufit.engines.embedded.overlapped_reduction import BucketSums, Overlap
from ipufit.engines.embedded.traced_step import Seeding, Update, computing
from ipufit.engines.embedded.training_state import Snapshot, TrainingState, copy_of, put_back
from ipufit.engines.embedded.turns import Move, TurnState, by_micro_batch
from ipufit.engines.gradient_reduction import GradientReduction, GradientSum, are_finite
from ipufit.engines.program import ExecutionResult
from ipufit.errors import CaptureError, NonFiniteLossError
from ipufit.optim.resolve import sparse_parameters
from ipufit.optim.several import evaluates_again
from ipufit.processes import common
from ipufit.tracing.grad_step import MicroBatchStep, ReportedScalars, public_name

if TYPE_CHECKING:
    from ipufit.engines.embedded.batching import BatchedStep


# What micro-batches report, as :class:`ExecutionOutputs` keeps it.
_Numbers = Sequence[Tuple[Sequence[ReportedScalars], Tensor]]


@dataclasses.dataclass(eq=False)
class UpdateRunner(UpdateWay):
    """Makes one update after another, and sees to it that none is made of what is not finite.

    Where the host can look at a number without waiting for the device, it does so before each
    update. Elsewhere it looks after the last one, when everything has come over in one copy; if an
    update turns out to have been bad, the execution is taken back and repeated without it. Data and
    random numbers are functions of the update, so both ways give the same bits.

    Attributes:
        engine: brings results to the host.
        state: what the updates change.
        seed: starts the random numbers of a micro-batch.
        at_once: whether losses are looked at as they come, where the host need not wait for them.
        watches: whether gradients and weights are looked at in every update, too.
        scales: the loss scale of each update, where a captured graph reads it; None for the present
            one.
        counted: whether losses are means over what they count, rather than over samples.
        overlap: says whether gradients are added during the backward pass; None where they are
            in one bucket, or in one process.
    """

    engine: EngineContext
    state: TrainingState
    seed: Seeding
    at_once: bool
    watches: bool = False
    scales: Optional[Iterator[Tensor]] = None

    def __post_init__(self) -> None:
        self.counted = False
        self.overlap: Optional[Overlap] = None
        self._spec = spec = self.state.spec
        self._device = self.state.device
        self._reduction = GradientReduction(spec)
        self._only_move = Move(self.state.turns[0])
        self._processes = spec.processes
        self._is_scaled = self.state.scaler is not None
        # Whether anybody looks at gradients before they are applied.
        self._is_judged = self._is_scaled or self.watches
        # Names of the parameters that a gradient came to in the present update, where it may be
        # others than in the one before.
        self._with_grad: Set[str] = set()
        # Where gradients of the present update are sparse, for an optimizer that goes by it.
        self._goes_by_indices = bool(sparse_parameters(spec.optimizer))
        self._evaluates_again = spec.optimizer is not None and evaluates_again(spec.optimizer)
        self._indices: Dict[str, List[Tensor]] = {}

    def run(self, execution: ExecutionWork) -> ExecutionResult:
        """Run all updates.

        Raises:
            NonFiniteLossError: the state is that before the update named in it.
        """
        if not execution.is_here:
            with self.engine.clock.during("to_device"):
                execution.updates = [
                    [(batch.to(self._device), recorded) for batch, recorded in update]
                    for update in execution.updates
                ]
        self.state.updater.refresh(execution.rows)
        with computing(self._device, execution.is_random):
            if self.watches or not self.at_once:
                return self._run_late(execution)
            results = self.make(execution, execution.updates, None)
            return self.engine.fetch(results, self.state.describe(execution.rows))[0]

    def _run_late(self, execution: ExecutionWork) -> ExecutionResult:
        """Run all updates, look at their numbers, and repeat them without those that were bad."""
        state, updates = self.state, execution.updates
        start, snapshot = state.updates, state.snapshot()
        left_out: Set[int] = set()
        while True:
            try:
                results = self.make(execution, updates, None if self.watches else left_out)
            except NonFiniteLossError as error:
                # This is the update it names: all before it are known to be good.
                if error.found is not None:
                    # Weights show it when the update is made.
                    lost_update = state.updates - start
                    self._go_back(snapshot, execution)
                    self.make(execution, updates[:lost_update], None)
                raise
            except BaseException:
                # An update before this one may have been spoilt already: no loss was looked at.
                state.restore(snapshot)
                raise
            anchors, finite = self.engine.fetch(results, state.describe(execution.rows))
            lost = self._first_lost(execution, anchors.losses)
            bad = next((i for i, ok in enumerate(finite) if not ok and i not in left_out), None)
            if lost is not None and (bad is None or lost <= bad):
                self._go_back(snapshot, execution)
                self.make(execution, updates[: self._begin_of(execution, lost)], left_out)
                self._refuse(execution, lost, anchors.losses)
            if bad is None:
                moves = execution.moves
                return by_micro_batch(anchors, moves, updates) if moves else anchors
            left_out.add(bad)
            self._go_back(snapshot, execution)

    def _go_back(self, snapshot: Snapshot, execution: ExecutionWork) -> None:
        self.state.restore(snapshot)
        self.state.updater.refresh(execution.rows)

    def _begin_of(self, execution: ExecutionWork, index: int) -> int:
        """Return the first entry of the update that an entry of the execution belongs to."""
        while execution.moves and index and not execution.moves[index - 1].is_last:
            index -= 1
        return index

    def _first_lost(self, execution: ExecutionWork, losses: Tensor) -> Optional[int]:
        """Return the first update with a loss that is not finite in any process."""
        values, lost = iter(losses.tolist()), None
        for index, update in enumerate(execution.updates):
            if not all(math.isfinite(value) for value in [next(values) for _ in update]):
                lost = index
                break
        if execution.shares is None:
            return lost
        lost_updates = [index for index in self._processes.gather(lost) if index is not None]
        return min(lost_updates, default=None)

    def _refuse(self, execution: ExecutionWork, lost: int, losses: Tensor) -> None:
        first = sum(len(update) for update in execution.updates[:lost])
        values = losses[first : first + len(execution.updates[lost])].tolist()
        title, update = "the loss", lost
        if execution.moves:
            move = execution.moves[lost]
            loss, update = move.turn.step.loss, move.update
            names = () if loss is None else loss.part_names
            title = " and ".join([f"the loss {name!r}" for name in names]) or title
        if execution.shares is not None:
            self._refuse_common(values, execution.shares[update])
        for value in values:
            refuse_loss(self.state, value, title)

    def make(
        self, execution: ExecutionWork, updates: Sequence[Update], left_out: Optional[Set[int]]
    ) -> ExecutionOutputs:
        """Make updates, one after another.

        Args:
            execution: that they belong to.
            updates: all of the execution, or the first ones; where an update has several turns,
                each is one here.
            left_out: updates known to have a gradient that is not finite; None to look at once.

        Returns:
            Their results, on the device.

        Raises:
            NonFiniteLossError: a loss, or at every loss scale the gradient, is not finite; buffers
                are back to what they were before the update. With ``detect_nan`` also a gradient,
                or a weight afterwards, with which the update is made already.
        """
        state = self.state
        is_sum = self._spec.config.outputs.mode == "sum"
        wanted = self._places_wanted(execution) if self._spec.want_outputs else set()
        results = ExecutionOutputs(wanted, self._spec.plan.replicas if is_sum else 0)
        moves = execution.moves or [self._only_move] * len(updates)
        for index, update in enumerate(updates):
            move = moves[index]
            compiled = execution.compiled.get(index)
            if compiled is not None:
                compiled(update, results)
                continue
            left = None if left_out is None else index in left_out
            self._with_grad, self._indices = set(), {}
            # Where an update is known to be made, nobody needs this: what fails takes all back.
            saves = left is not False and any(state.in_place)
            saved = [copy_of(buffers) for buffers in state.in_place] if saves else []
            reported = len(results.numbers)
            try:
                gradients = self._gradients(execution, index, results, move)
                if execution.moves:
                    gradients = state.finish(gradients, move.turn)
                if state.varies:
                    gradients = self._bind_present(gradients, execution.rows[index:], move.turn)
                is_skipped = not gradients or (
                    self._is_judged and self._judge(gradients, left, results)
                )
            except BaseException:
                for buffers, values in zip(state.in_place, saved):
                    put_back(buffers, values)
                if state.varies:
                    self._bind_all(execution.rows[index:])
                raise
            if is_skipped:
                results.skipped += bool(gradients)
                state.updater.skip()
            else:
                if self._goes_by_indices:
                    state.storage.indices.update(self._common_indices())
                if self._evaluates_again:
                    numbers = results.numbers[reported:]
                    evaluate = self._evaluation(execution, index, move, numbers, gradients)
                    state.updater.evaluate = evaluate
                state.updater.apply(gradients)
                state.updater.evaluate = None
                state.storage.indices.clear()
                if self.watches:
                    refuse_weights(state)
            # Not held while those of the next update are computed.
            del gradients, saved
            if state.varies:
                self._bind_all(execution.rows[index + 1 :])
            if not move.is_last:
                continue
            state.updates += 1
            if state.averages is not None:
                state.averages.after_update(state.storage.flats, state.updates, is_skipped)
        return results

    def _bind_present(self, gradients: List[Tensor], rows: Rows, turn: TurnState) -> List[Tensor]:
        """Bind what a gradient has reached in any process; return the gradients of that."""
        present = self._with_grad
        if self._evaluates_again:
            # The next evaluation of the same update may reach others.
            present = {name for block in turn.gradient_blocks for name in block.names}
        if self._processes.is_distributed:
            present = set().union(*self._processes.gather(sorted(present)))
        if not present:
            return []
        storage = self.state.storage
        gradients = self.state.bind_present(gradients, present, turn)
        if self.state.storage is not storage:
            self.state.updater.refresh(rows)
        return gradients

    def _note(self, micro: MicroBatchStep) -> None:
        """Note where the gradients of a micro-batch are, and what it has changed in place."""
        self.state.note_written(micro.written)
        self._with_grad |= micro.with_grad
        for name, indices in micro.indices.items():
            self._indices.setdefault(name, []).append(indices)

    def _refuse_left_out(self, micro: MicroBatchStep) -> None:
        """Refuse a micro-batch without a gradient that an update of all processes counts on.

        Raises:
            CaptureError: an optimizer would take it for a gradient of zero.
        """
        left_out = set(micro.with_gradient).difference(micro.with_grad)
        if left_out:
            raise CaptureError(
                "over several processes, beside recorded batches or with Memory(shard=...), a "
                "batch that the module itself computes must give every parameter a gradient that "
                f"the first ones do, but one in update {self.state.updates} gives "
                f"{public_name(min(left_out))!r} none. Multiply what is left out by zero, or use "
                "compile(..., run_eagerly=True) without shard=."
            )

    def _common_indices(self) -> Dict[str, Tensor]:
        """Return where the gradients of the update, of all processes, are sparse."""
        several = self._indices
        if self._processes.is_distributed:
            local = {name: torch.cat(each, 1).tolist() for name, each in several.items()}
            several = {}
            for others in self._processes.gather(local):
                for name, each in others.items():
                    several.setdefault(name, []).append(torch.tensor(each, device=self._device))
        return {n: torch.unique(torch.cat(each, 1), dim=1) for n, each in several.items()}

    def _bind_all(self, rows: Rows) -> None:
        """Bind again what an update has passed over."""
        if self.state.bind_all() and rows:
            self.state.updater.refresh(rows)

    def _evaluation(
        self,
        execution: ExecutionWork,
        index: int,
        move: Move,
        numbers: _Numbers,
        gradients: Sequence[Tensor],
    ) -> Evaluate:
        """Return what evaluates the loss of an update again, with the same random numbers.

        Its first call returns what the update was computed with, if the weights are still the same.

        Args:
            execution: that the update belongs to.
            index: of the update in it.
            move: the turn that it is of.
            numbers: what its micro-batches have reported.
            gradients: of the update.
        """
        state, first = self.state, [gradient.clone() for gradient in gradients]
        before = [flat.clone() for flat in state.storage.flats]

        def evaluate() -> Tuple[Tensor, Sequence[Tensor]]:
            earlier, at_once = [*first], self.at_once
            first.clear()
            if earlier and all(map(torch.equal, before, state.storage.flats)):
                return self._loss(execution, index, numbers), earlier
            results = ExecutionOutputs()
            # What is not finite is left to the optimizer.
            self.at_once = False
            try:
                again = self._gradients(execution, index, results, move)
            finally:
                self.at_once = at_once
            if state.varies:
                again = move.turn.cut(again, state.storage.blocks)
            return self._loss(execution, index, results.numbers), again

        return evaluate

    def _loss(self, execution: ExecutionWork, index: int, numbers: _Numbers) -> Tensor:
        """Return the loss, shape (), that the gradient of an update is of.

        Args:
            execution: that the update belongs to.
            index: of the update in it.
            numbers: what its micro-batches have reported.
        """
        share = None if execution.shares is None else execution.shares[index]
        sizes = [batch.size for batch, _ in execution.updates[index]]
        total = self._reduction.start(sizes, share)
        kind = torch.promote_types(self.state.storage.flats[0].dtype, torch.float32)
        for kinds, rows in numbers:
            for row in rows.reshape(len(kinds), -1).to(kind):
                count = row[1] if self.counted else None
                total.collect([row[:1] * (total.next_factor() if count is None else count)], count)
        if share is not None:
            like = [torch.zeros(1, dtype=kind, device=self._device)]
            total.add_others(self._processes, like, self.counted, False)
        return total.reduced(1.0)[0][0]

    def _places_wanted(self, execution: ExecutionWork) -> Set[int]:
        """Return the places among the own micro-batches whose outputs come back."""
        plan, shares = self._spec.plan, execution.shares
        outputs, per_update = self._spec.config.outputs, plan.micro_batches_per_update
        if shares is None:
            count = len(execution.batch.micro_batches)
            return set(outputs_wanted(outputs, count, per_update, plan.replicas))
        count = sum(len(share.sizes) for share in shares)
        wanted = set(outputs_wanted(outputs, count, per_update, plan.all_replicas))
        return {index for index, place in enumerate(local_indices(shares)) if place in wanted}

    def _judge(
        self, gradients: Sequence[Tensor], left_out: Optional[bool], results: ExecutionOutputs
    ) -> bool:
        """Tell whether an update with these gradients is skipped."""
        state = self.state
        if state.scaler is None:
            if self.watches:
                refuse_gradients(state, gradients)
            return False
        used_gradients = list(gradients)
        if not (self._spec.config.clip or self._spec.config.optimizer_clips):
            # The weights' dtype may hold less than the sum; bounded gradients fit.
            used_gradients = [g.to(flat.dtype) for g, flat in zip(gradients, state.storage.flats)]
        if state.placement.weights is not None:
            used_gradients = [self._lost_anywhere(used_gradients)]
        finite = are_finite(used_gradients)
        return state.scaler.judge(finite, left_out, results.finite, state.updates)

    def _lost_anywhere(self, gradients: Sequence[Tensor]) -> Tensor:
        """One number, finite if the gradients are so in all processes."""
        lost = torch.stack([~gradient.isfinite().all() for gradient in gradients]).any()
        count = lost.to(torch.float32).reshape(1)
        self._processes.add([count])
        return torch.where(count > 0, math.inf, 0.0)

    def _gradients(
        self, execution: ExecutionWork, index: int, results: ExecutionOutputs, move: Move
    ) -> List[Tensor]:
        """Compute the gradient of an update, one flat tensor per block that is moved.

        Args:
            execution: that the update belongs to.
            index: of the update in it.
            results: takes what micro-batches report.
            move: the turn that it is of.
        """
        update, state, states = execution.updates[index], self.state, move.turn.states
        shares = execution.shares
        share = None if shares is None else shares[move.update if execution.moves else index]
        total = self._reduction.start([batch.size for batch, _ in update], share)
        merged = execution.merged.get(update[0][1]) if update else None
        # Of micro-batches of several sizes the gradients have factors of their own.
        alike = share is None or len(set(share.sizes)) == 1
        scale, loss_scale = self._scale() if self._is_scaled else ([], 1.0)
        sums, goes_along = (None, False) if share is None else self._begin_sums(total)
        reported = len(results.numbers)
        divided, runs = state.placement.weights, execution.runs.get(index, {})
        if merged is not None and alike and merged.takes([recorded for _, recorded in update]):
            self._add_merged(merged, total, update, results)
            update = ()
        for number, (batch, recorded) in enumerate(update):
            blocks = len(recorded.micro.blocks)
            place = number if share is None else share.places[number]
            if recorded.random:
                self.seed(recorded, state.updates, place, move.stream)
            weights = states[place % len(states)]
            if divided is not None:
                divided.factor = None if self.counted else total.next_factor()
            # The gradients of the last one may go to the other processes as they come.
            is_last = number == len(update) - 1
            meeting = recorded.lowered.meeting if goes_along and is_last else None
            if meeting is not None and sums is not None:
                sums.expect(total.next_factor(), self.counted)
                meeting.host = sums
            try:
                run = runs.get(recorded, recorded.run)
                numbers, *rest = run(*weights, *batch.leaves, *scale)
            finally:
                if meeting is not None:
                    meeting.host = None
            if state.varies or self._goes_by_indices:
                self._note(recorded.micro)
            elif share is not None and recorded.graph is None:
                self._refuse_left_out(recorded.micro)
            if self.at_once and share is None:
                value = (numbers[0] if numbers.dim() else numbers).item()
                if not math.isfinite(value):
                    refuse_loss(state, value)
            kind, gradients = recorded.micro.reported, rest[-blocks:]
            results.add(recorded, [kind], numbers, rest[:-blocks], move.hands_out)
            count = numbers[1] if kind.counted else None
            if meeting is not None:
                if count is not None:
                    total.note(count)
            elif divided is not None:
                total.collect(gradients, count)
            else:
                total.add(gradients, count)
            # Not held while the next one is computed.
            del rest, gradients
        if share is not None:
            self._add_others(total, share, results, reported, sums, move)
        return total.reduced(loss_scale)

    def _scale(self) -> Tuple[List[Tensor], Union[float, Tensor]]:
        """Return the loss scale as an argument of a recording, and its value."""
        if self.scales is not None:
            scale = next(self.scales)
            return [scale], scale
        scaler = self.state.scaler
        assert scaler is not None
        return [scaler.tensor(self._device)], scaler.value

    def _begin_sums(self, total: GradientSum) -> Tuple[Optional[BucketSums], bool]:
        """Begin sums over processes by buckets; whether they go along with the backward pass."""
        if self.overlap is None:
            return None, False
        cuts = self.state.placement.cuts
        sums = BucketSums(self._processes, self.overlap.order, total, cuts)
        return sums, self.overlap.begin()

    def _add_others(
        self,
        total: GradientSum,
        share: ProcessShard,
        results: ExecutionOutputs,
        reported: int,
        sums: Optional[BucketSums],
        move: Move,
    ) -> None:
        """Add the gradients of the other processes.

        Args:
            total: the sum of this one.
            share: what of the update is its own.
            results: with what the update's micro-batches have reported.
            reported: how many entries of it are of earlier updates.
            sums: those of buckets, some begun perhaps; None for all of the gradient at once.
            move: the turn that the update is of.
        """
        losses: List[float] = results.losses(reported).tolist() if self.at_once else []
        is_lost = not all(map(math.isfinite, losses))
        placement = self.state.placement
        divided = placement.weights
        if divided is not None:
            for _ in range(share.most - len(share.indices)):
                total.collect(divided.idle(divided.events), None)
        flats = self.state.gradients_like(move.turn)
        if sums is not None:
            assert self.overlap is not None
            sums.finish(flats)
            self.overlap.end()
        if sums is not None or divided is not None:
            # The gradients have met those of the others already.
            total.add_facts(self._processes, flats[0], self.counted, is_lost)
        else:
            total.add_others(self._processes, flats, self.counted, is_lost, placement.cuts)
        if self.at_once and total.is_suspect():
            self._refuse_common(losses, share)

    def _refuse_common(self, losses: Sequence[float], share: ProcessShard) -> None:
        """In all processes, refuse the coming update for the first loss that is not finite, if any.

        Args:
            losses: of the own micro-batches of the update.
            share: where they stand in it.

        Raises:
            NonFiniteLossError: one of all processes' losses is not finite.
        """
        lost_losses = [
            [place, value] for place, value in zip(share.places, losses) if not math.isfinite(value)
        ]
        every = [each for several in self._processes.gather(lost_losses) for each in several]
        if not every:
            return
        try:
            refuse_loss(self.state, min(every)[1])
        except NonFiniteLossError as error:
            common(error)
            raise

    def _add_merged(
        self, merged: BatchedStep, total: GradientSum, update: Update, results: ExecutionOutputs
    ) -> None:
        """Add the gradients of one update, several micro-batches at once."""
        kinds, looks = merged.step.reported, self.at_once and not self._processes.is_distributed
        for start in range(0, len(update), merged.count):
            batches = [batch for batch, _ in update[start : start + merged.count]]
            numbers, outputs, gradients = merged(self.state.states[0], batches)
            losses = losses_of(numbers, len(kinds)) if looks else []
            if not all(map(math.isfinite, losses)):
                for value in losses:
                    refuse_loss(self.state, value)
            results.add(merged.base, kinds, numbers, outputs)
            self._with_grad |= merged.base.micro.with_grad
            count = numbers[:, 1].sum() if kinds[0].counted else None
            total.add_summed(gradients, count, merged.factor)
            # Not held while the next ones are computed.
            del gradients
