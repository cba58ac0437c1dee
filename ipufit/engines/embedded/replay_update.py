"""Run the micro-batches of one update again, each operator watched, to find what broke them."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Sequence, Tuple

from torch import Tensor

from ipufit.core.batch import MicroBatch
from ipufit.core.precision import WithoutAutocast
from ipufit.engines.embedded.non_finite import STATE_IS_FROM_BEFORE, first_non_finite
from ipufit.engines.embedded.traced_step import Seeding, TracedStep, Update
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.errors import NonFiniteLossError, NonFiniteValue
from ipufit.tracing.find_nonfinite import NonFiniteSearch
from ipufit.tracing.interpreter import InstrumentedInterpreter, watch_operators
from ipufit.tracing.source_map import NodeOrigins, SourceTracker, trace_calls


@dataclasses.dataclass(frozen=True)
class Replay:
    """Finds the first value of an update that is not finite.

    Args:
        live: the state from before the update; it stays as it is.
        seed: starts the random numbers of a micro-batch.
        watches: whether gradients and weights are to be finite too, not losses alone.
    """

    live: TrainingState
    seed: Seeding
    watches: bool

    def explain(self, error: NonFiniteLossError, update: Update, offset: int) -> NonFiniteLossError:
        """Add to an error where the value that is not finite began; without that, return it.

        Args:
            error: of the coming update.
            update: its micro-batches.
            offset: samples of the execution before them.
        """
        origin = error.found or self.find(update, offset)
        if not self.watches and origin.cause in ("unknown", "weights"):
            return error
        text = str(error).partition(STATE_IS_FROM_BEFORE)[0]
        return NonFiniteLossError(
            f"{text}{STATE_IS_FROM_BEFORE} {origin.describe()}", error.update, error.value, origin
        )

    def find(self, update: Update, offset: int) -> NonFiniteValue:
        """Find the cause by running the module itself, and else by running the recording.

        Args:
            update: its micro-batches.
            offset: samples of the execution that come before.
        """
        for as_recorded in (False, True):
            cause = self._find(update, offset, as_recorded)
            if cause is not None:
                return cause
        return NonFiniteValue("unknown", micro_batches=len(update))

    def _find(self, update: Update, offset: int, as_recorded: bool) -> Optional[NonFiniteValue]:
        states = [[tensor.clone() for tensor in state] for state in self.live.states]
        total: List[Tensor] = []
        for place, (batch, recorded) in enumerate(update):
            if as_recorded and recorded.graph is None:
                return None
            replica = place % len(states)
            self.seed(recorded, self.live.updates, place, "")
            cause, gradients = self._micro_batch(recorded, states[replica], batch, as_recorded)
            if cause is not None:
                return dataclasses.replace(
                    cause,
                    replica=replica,
                    micro_batch=place,
                    micro_batches=len(update),
                    offset=offset,
                )
            offset += batch.size
            total = [one + other for one, other in zip(total, gradients)] if total else gradients
        if self.watches and not all(bool(flat.isfinite().all()) for flat in total):
            name = first_non_finite(update[0][1].micro.blocks, total)[0]
            return NonFiniteValue("accumulation", micro_batches=len(update), parameter=name)
        return None

    def _micro_batch(
        self, recorded: TracedStep, state: Sequence[Tensor], batch: MicroBatch, as_recorded: bool
    ) -> Tuple[Optional[NonFiniteValue], List[Tensor]]:
        """The cause, if something is not finite, and the gradients."""
        arguments = self.live.call_arguments(state, batch.leaves)
        tensors = dict(zip(recorded.micro.names, state))
        if as_recorded and recorded.graph is not None:
            origins = NodeOrigins(trace_calls(recorded.micro, self.live.step, arguments))
            search = NonFiniteSearch(origins.now, batch, tensors)
            run = InstrumentedInterpreter(recorded.graph, [origins, search]).run
            results = WithoutAutocast(run, arguments)(*arguments)
        else:
            where = SourceTracker(self.live.step)
            search = NonFiniteSearch(where.now, batch, tensors)
            with self.live.step.preserve_attributes(), where.followed(), watch_operators(search):
                results = recorded.micro(*arguments)
        numbers, _, flats = recorded.micro.split_results(results)
        loss = numbers[0] if numbers.dim() else numbers
        if not bool(loss.isfinite()):
            return search.cause_of(numbers) or NonFiniteValue("unknown"), flats
        if self.live.scaler is not None or not self.watches:
            # An update with such a gradient is skipped, or nobody looks at it.
            return None, flats
        for flat in flats:
            if not bool(flat.isfinite().all()):
                cause = search.cause_of(flat) or NonFiniteValue("unknown")
                name = cause.parameter or first_non_finite(recorded.micro.blocks, flats)[0]
                return dataclasses.replace(cause, parameter=name), flats
        return None, flats
