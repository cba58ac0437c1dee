"""One weight update: the gradients of its micro-batches, reduced and applied, or left out."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Iterator, List, Optional, Sequence, Set, Union

import torch
from torch import Tensor

from ipufit.core.batch import ProcessShard
from ipufit.engines.embedded.execution_outputs import ExecutionOutputs
from ipufit.engines.embedded.gradient_reduction import GradientSum, Reduction
from ipufit.engines.embedded.nan_detection import (
    refuse_gradients,
    refuse_loss,
    refuse_weights,
)
from ipufit.engines.embedded.overlapped_reduction import BucketSums, Overlap
from ipufit.engines.embedded.replicas import copy_of, put_back
from ipufit.engines.embedded.traced_step import Seeding, TracedStep, Update
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.engines.program import ProgramSpec
from ipufit.errors import NonFiniteLossError
from ipufit.processes import common

if TYPE_CHECKING:
    from ipufit.engines.embedded.batching import BatchedStep
    from ipufit.engines.embedded.inductor.compiled import CompiledUpdates

__all__ = ["UpdateRunner"]


class UpdateRunner:
    """Makes one update after another.

    Args:
        spec: what is built.
        live: what the updates change.
        device: where.
        seed: starts the random numbers of a micro-batch.
        at_once: whether losses are looked at as they come, where the host need not wait for them.
        scales: the loss scale of each update, where a captured graph reads it; None for the present
            one.

    Attributes:
        counted: whether losses are means over what they count, rather than over samples.
        compiled: makes the updates that fit it, once it is ready; None for none.
        merged: takes several micro-batches at once, where an update is made of such; None: never.
        overlap: says whether gradients are added during the backward pass; None where they are
            in one bucket, or in one process.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        live: TrainingState,
        device: torch.device,
        seed: Seeding,
        at_once: bool,
        scales: Optional[Iterator[Tensor]] = None,
    ) -> None:
        self._live = live
        self._device = device
        self._seed = seed
        self._reduction = Reduction(spec)
        self._clips = bool(spec.config.clip)
        self.at_once = at_once
        self._scales = scales
        self._processes = spec.processes
        self._detects = spec.config.detect_nan
        self.counted = False
        self.compiled: Optional[CompiledUpdates] = None
        self.merged: Optional[BatchedStep] = None
        self.overlap: Optional[Overlap] = None

    def make(
        self,
        update: Update,
        first: int,
        wanted: Set[int],
        results: ExecutionOutputs,
        left_out: Optional[bool],
        share: Optional[ProcessShard] = None,
    ) -> None:
        """One update.

        Args:
            update: its micro-batches, of this process.
            first: place of the first one among those of the execution.
            wanted: places whose outputs come back.
            results: where results go.
            left_out: whether it is known to have a gradient that is not finite; None to look.
            share: what these are of the whole update; None for all of it.

        Raises:
            NonFiniteLossError: a loss, or at every loss scale the gradient, is not finite; buffers
                are back to what they were before the update. With ``detect_nan`` also a gradient,
                or a weight afterwards, with which the update is made already.
        """
        if self.compiled is not None and self.compiled.fits(update):
            self.compiled.make(update, first, wanted, results)
            return
        live = self._live
        # Where an update is known to be made, nobody needs this: what fails takes all of them back.
        looks = left_out is not False and bool(live.replicas[0])
        saved = [copy_of(own) for own in live.replicas] if looks else []
        try:
            gradients = self._gradients(update, first, wanted, results, share)
            skip = False
            if live.scaler is not None:
                used_gradients = self._as_used(gradients)
                if live.divided is not None:
                    used_gradients = [self._lost_anywhere(used_gradients)]
                skip = live.scaler.judge(used_gradients, left_out, results.finite, live.updates)
            elif self._detects:
                refuse_gradients(live, gradients)
        except BaseException:
            for buffers, values in zip(live.replicas, saved):
                put_back(buffers, values)
            raise
        if skip:
            results.skipped += 1
            live.updater.skip()
        else:
            live.updater.apply(gradients)
            if self._detects:
                refuse_weights(live)
        live.updates += 1
        if live.averages is not None:
            live.averages.after_update(live.storage.flats, live.updates, skipped=skip)

    def _gradients(
        self,
        update: Update,
        first: int,
        wanted: Set[int],
        results: ExecutionOutputs,
        share: Optional[ProcessShard],
    ) -> List[Tensor]:
        """Reduced over the micro-batches of one update, one flat tensor per block."""
        live = self._live
        blocks = len(live.storage.blocks)
        divided = live.divided
        total = self._reduction.start([batch.size for batch, _ in update], share)
        sums, goes_along = None, False
        if self.overlap is not None and share is not None:
            sums = BucketSums(self._processes, self.overlap.order, total, live.cuts)
            goes_along = self.overlap.begin()
        reported = len(results.numbers)
        merged = self.merged
        # Of micro-batches of several sizes the gradients have factors of their own.
        alike = share is None or len(set(share.sizes)) == 1
        if merged is not None and alike and merged.takes([recorded for _, recorded in update]):
            self._add_merged(merged, total, update, first, wanted, results)
            self._add_others(total, share, results, reported, sums)
            return total.reduced(1.0)
        scale: List[Tensor] = []
        loss_scale: Union[float, Tensor] = 1.0
        if self._scales is not None:
            scale = [next(self._scales)]
            loss_scale = scale[0]
        elif live.scaler is not None:
            scale, loss_scale = [live.scaler.tensor(self._device)], live.scaler.value
        for index, (batch, recorded) in enumerate(update):
            place = index if share is None else share.places[index]
            self._seed(recorded, live.updates, place)
            state = live.states[place % len(live.states)]
            if divided is not None:
                divided.factor = None if self.counted else total.next_factor()
            meets = goes_along and index == len(update) - 1 and recorded.lowered.meeting is not None
            with self._met(sums if meets else None, recorded, total):
                numbers, *rest = recorded.run(*state, *batch.leaves, *scale)
            outputs, gradients = rest[: len(rest) - blocks], rest[len(rest) - blocks :]
            kind = recorded.reported()
            if self.at_once and share is None:
                refuse_loss(self._live, (numbers[0] if numbers.dim() else numbers).item())
            results.numbers.append(([kind], numbers))
            if first + index in wanted:
                results.add_outputs(recorded, outputs, first + index)
            count = numbers[1] if kind.counted else None
            if meets:
                if count is not None:
                    total.note(count)
            elif divided is not None:
                total.collect(gradients, count)
            else:
                total.add(gradients, count)
            # Not held while the next one is computed.
            del rest, outputs, gradients
        if divided is not None and share is not None:
            for _ in range(share.most - len(update)):
                total.collect(divided.idle(divided.events), None)
        self._add_others(total, share, results, reported, sums)
        return total.reduced(loss_scale)

    @contextlib.contextmanager
    def _met(
        self, sums: Optional[BucketSums], recorded: TracedStep, total: GradientSum
    ) -> Iterator[None]:
        """A micro-batch runs, whose gradients go to the other processes as they come."""
        meeting = recorded.lowered.meeting
        if sums is None or meeting is None:
            yield
            return
        sums.expect(total.next_factor(), self.counted)
        meeting.host = sums
        try:
            yield
        finally:
            meeting.host = None

    def _add_others(
        self,
        total: GradientSum,
        share: Optional[ProcessShard],
        results: ExecutionOutputs,
        reported: int,
        sums: Optional[BucketSums] = None,
    ) -> None:
        """Add the gradients of the other processes, if there are any.

        Args:
            total: the sum of this one.
            share: what of the update is its own; None for all.
            results: with what the update's micro-batches have reported.
            reported: how many entries of it are of earlier updates.
            sums: those of buckets, some begun perhaps; None for all of the gradient at once.
        """
        if share is None:
            return
        losses: List[float] = results.losses(reported).tolist() if self.at_once else []
        is_lost = not all(map(math.isfinite, losses))
        live = self._live
        flats = live.storage.flats
        if sums is not None:
            assert self.overlap is not None
            sums.finish(flats)
            self.overlap.end()
        if sums is not None or live.divided is not None:
            # The gradients have met those of the others already.
            total.add_facts(self._processes, flats[0], self.counted, is_lost)
        else:
            total.add_others(self._processes, flats, self.counted, is_lost, live.cuts)
        if self.at_once and total.is_suspect():
            self.refuse_common(losses, share)

    def refuse_common(self, losses: Sequence[float], share: ProcessShard) -> None:
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
            refuse_loss(self._live, min(every)[1])
        except NonFiniteLossError as error:
            common(error)
            raise

    def _add_merged(
        self,
        merged: BatchedStep,
        total: GradientSum,
        update: Update,
        first: int,
        wanted: Set[int],
        results: ExecutionOutputs,
    ) -> None:
        """The gradients of one update, several micro-batches at once."""
        for start in range(0, len(update), merged.count):
            batches = [batch for batch, _ in update[start : start + merged.count]]
            result = merged(self._live.states[0], batches)
            losses = result.losses() if self.at_once and not self._processes.is_distributed else []
            if not all(map(math.isfinite, losses)):
                for value in losses:
                    refuse_loss(self._live, value)
            results.numbers.append((result.kinds, result.numbers))
            for place in range(len(batches)) if wanted else ():
                if first + start + place in wanted:
                    outputs = result.outputs_of(place)
                    results.add_outputs(merged.base, outputs, first + start + place)
            total.add_summed(result.gradients, result.count, merged.factor)
            del result

    def _as_used(self, gradients: Sequence[Tensor]) -> List[Tensor]:
        """In the dtype of the weights, which may hold less than the sum; bounded ones fit."""
        if self._clips:
            return list(gradients)
        return [g.to(flat.dtype) for g, flat in zip(gradients, self._live.storage.flats)]

    def _lost_anywhere(self, gradients: Sequence[Tensor]) -> Tensor:
        """One number, finite if the gradients are so in all processes."""
        lost = torch.stack([~gradient.isfinite().all() for gradient in gradients]).any()
        count = lost.to(torch.float32).reshape(1)
        self._processes.add([count])
        return torch.where(count > 0, math.inf, 0.0)
