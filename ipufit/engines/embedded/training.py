"""The training program: the loop over updates, without any Python of the user's."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor

from ipufit.engines.embedded.averages import Averages
from ipufit.engines.embedded.base import BaseProgram, on_host
from ipufit.engines.embedded.clipping import Finish
from ipufit.engines.embedded.collected import Collected
from ipufit.engines.embedded.following import follow_the_module
from ipufit.engines.embedded.reduction import Reduction
from ipufit.engines.embedded.replicas import copy_of, put_back
from ipufit.engines.embedded.scaling import Scaler, ScaleState
from ipufit.engines.embedded.sharing import refuse_shared_memory
from ipufit.engines.embedded.step import public_name
from ipufit.engines.embedded.storage import Block, FlatStorage
from ipufit.engines.embedded.updater import Rows, updater_for
from ipufit.errors import CaptureError, ConfigurationError, NonFiniteLossError
from ipufit.program import (
    Anchors,
    CombinedBatch,
    MicroBatch,
    Prepared,
    ProgramSpec,
    TrainState,
)
from ipufit.recipe import outputs_wanted

if TYPE_CHECKING:
    from ipufit.engines.embedded.engine import EmbeddedEngine, Recorded

__all__ = ["TrainingProgram"]

# The micro-batches of an update, each with what is recorded for it.
Update = Sequence[Tuple[MicroBatch, "Recorded"]]


class TrainingProgram(BaseProgram):
    """Forward, loss, backward, reduction and optimizer for every update of an execution.

    From the first :meth:`prepare` until :meth:`close` the module's trained parameters are views of
    the program's flat tensors, and the buffers of replica 0 are the module's own.
    """

    def __init__(self, engine: EmbeddedEngine, spec: ProgramSpec) -> None:
        super().__init__(engine, spec)
        assert spec.optimizer is not None
        assert spec.loss is not None
        self._optimizer = spec.optimizer
        owned = {id(p) for group in spec.optimizer.param_groups for p in group["params"]}
        self._trained = [
            name for name, p in self._parameters.items() if p.requires_grad and id(p) in owned
        ]
        trained = set(self._trained)
        self._frozen = [name for name in self._parameters if name not in trained]
        refuse_shared_memory(self._trained, self._parameters, self._buffers)
        recipe = spec.recipe
        self._reduction = Reduction(spec)
        finish = Finish(recipe.clip, recipe.accumulation_dtype)
        scheduled = recipe.schedule is not None
        self._updater = updater_for(spec.optimizer, engine.optimizer_graphs, finish, scheduled)
        self._averages: Optional[Averages] = None
        self._scaler = Scaler(recipe.loss_scale, engine.scale) if recipe.loss_scale else None
        self._replicas = engine.replicas.recall(spec.plan.replicas, self._buffers)
        self._storage = FlatStorage([])
        self._reached: Tuple[str, ...] = ()
        self._states: List[List[Tensor]] = []
        self.updates = spec.first_update
        self._closed = False
        self._published: object = None
        self._published_at = self.updates
        # Where the host can look at a loss without waiting for a device, it looks before the
        # update.
        self._check_at_once = self._device.type == "cpu" and not engine.check_late

    def _lay_out(self, names: Sequence[str]) -> List[Block]:
        return self._updater.layout([(name, self._parameters[name]) for name in names])

    def _collect_state(self, buffers: Dict[str, Tensor]) -> List[Tensor]:
        names = [*self._trained, *self._frozen]
        return [*(self._parameters[name].detach() for name in names), *buffers.values()]

    def _record(self, example: MicroBatch) -> Recorded:
        state = self._states[0] if self._states else self._collect_state(self._buffers)
        fixed = [*self._frozen, *self._buffers]
        recorded = self._engine.record(
            self._spec, example, self._trained, fixed, state, self._lay_out
        )
        if not self._reached:
            self._take_over(recorded.reached)
        if recorded.reached != self._reached:
            different = sorted(set(recorded.reached) ^ set(self._reached))[0]
            raise CaptureError(
                "the same parameters must get a gradient whatever the micro-batch's size, but with "
                f"{example.size} samples {public_name(different)!r} differs. Remove the branch on "
                "the batch size."
            )
        return recorded

    def _take_over(self, reached: Tuple[str, ...]) -> None:
        """From here on parameters and optimizer state are the program's."""
        self._storage = FlatStorage(self._lay_out(reached))
        try:
            with self._engine.timed():
                self._updater.bind(self._storage, self._spec.run_eagerly)
        except BaseException:
            self._storage.release()
            raise
        self._reached = reached
        rule = self._spec.recipe.averaging
        if rule is not None:
            known = self._engine.averages
            self._averages = Averages(rule, self._storage.blocks, self._storage.flats, known)
        self._note_published()
        self._states = [self._collect_state(buffers) for buffers in self._replicas]

    def prepare(self, example: MicroBatch) -> Prepared:
        """Record the program, or look again what it was recorded from.

        Raises:
            ConfigurationError: a parameter was frozen or unfrozen since the program was built.
        """
        if self._reached:
            for name in self._trained:
                if not self._parameters[name].requires_grad:
                    raise ConfigurationError(
                        f"{public_name(name)!r} was frozen during fit, but which parameters are "
                        "trained is fixed when fit starts. Freeze it between two calls of fit."
                    )
            self._by_form = {}
        return super().prepare(example)

    def run(self, batch: CombinedBatch) -> Anchors:
        """One execution: every update in turn, its micro-batches in stream order."""
        if self._averages is not None and self._averages.swapped:
            raise ConfigurationError(
                "training works on the weights, but their moving averages stand in their place. "
                "Call model.swap_ema_weights() again before training goes on."
            )
        micro_batches = [micro_batch.to(self._device) for micro_batch in batch.micro_batches]
        self._follow_the_optimizer()
        work = [(micro_batch, self._recorded(micro_batch)) for micro_batch in micro_batches]
        follow_the_module(self._step, self._parameters, self._buffers, self._storage)
        group = self._spec.plan.micro_batches_per_update
        updates = [work[i : i + group] for i in range(0, len(work), group)]
        start, schedule = self.updates, self._spec.recipe.schedule
        before = schedule.snapshot() if schedule is not None else None
        rows: Rows = [self._optimizer.param_groups] * len(updates)
        if schedule is not None:
            rows = schedule.rows(len(updates))
        try:
            self._updater.refresh(rows)
            with self._computing([recorded for _, recorded in work]):
                return self._execute(updates, rows)
        except BaseException:
            if schedule is not None:
                schedule.restore(before)
                schedule.rows(self.updates - start)
            raise

    def _execute(self, updates: Sequence[Update], rows: Rows) -> Anchors:
        """All updates; where results are looked at late, again without those that were bad."""
        if self._check_at_once:
            return self._attempt(updates, None).to_anchors(self._engine, self._settings(rows))[0]
        snapshot = self._snapshot()
        left_out: Set[int] = set()
        while True:
            try:
                collected = self._attempt(updates, left_out)
            except NonFiniteLossError:
                raise  # this is the update it names: all before it are known to be good
            except BaseException:
                # An update before this one may have been spoilt already: no loss was looked at.
                self._restore(snapshot)
                raise
            anchors, finite = collected.to_anchors(self._engine, self._settings(rows))
            lost = _first_lost(updates, anchors.losses)
            bad = next((i for i, ok in enumerate(finite) if not ok and i not in left_out), None)
            if bad is None and lost is None:
                return anchors
            if bad is None or (lost is not None and lost <= bad):
                assert lost is not None
                self._go_back(snapshot, updates[:lost], rows, left_out)
                first = sum(len(update) for update in updates[:lost])
                for value in anchors.losses[first : first + len(updates[lost])].tolist():
                    self._refuse_non_finite(value)
            assert bad is not None
            left_out.add(bad)
            self._go_back(snapshot, [], rows, left_out)

    def _go_back(
        self, snapshot: Any, updates: Sequence[Update], rows: Rows, left_out: Set[int]
    ) -> None:
        """Restore the start of the execution, and repeat it up to the update that went wrong.

        Data and random numbers are functions of the update, so the repetition gives the same bits.
        """
        self._restore(snapshot)
        self._updater.refresh(rows)
        self._attempt(updates, left_out)

    def _attempt(self, updates: Sequence[Update], left_out: Optional[Set[int]]) -> Collected:
        """Every update in turn.

        Args:
            updates: micro-batches, with what is recorded for them, by update.
            left_out: updates known to have a gradient that is not finite; None to look at once.
        """
        mode, plan = self._spec.recipe.output_mode, self._spec.plan
        collected = Collected(plan.replicas if mode.kind == "sum" else 0)
        count = sum(len(update) for update in updates)
        wanted: Set[int] = set()
        if self._spec.want_outputs:
            found = outputs_wanted(mode, count, plan.micro_batches_per_update, plan.replicas)
            wanted = set(found)
        for index, update in enumerate(updates):
            left = None if left_out is None else index in left_out
            self._update(update, index * plan.micro_batches_per_update, wanted, collected, left)
        return collected

    def _settings(self, rows: Rows) -> Dict[str, float]:
        """What the program says of itself after an execution."""
        settings = {}
        if self._spec.recipe.schedule is not None:
            settings["learning_rate"] = float(rows[-1][0]["lr"])
        if self._scaler is not None:
            settings["loss_scale"] = self._scaler.value
        return settings

    def _follow_the_optimizer(self) -> None:
        """Take over what a callback has made of the optimizer's state.

        Raises:
            ConfigurationError: it changed a state that was not up to date.
        """
        if not self._reached or _signature(self._optimizer) == self._published:
            return
        if self._published_at != self.updates:
            raise ConfigurationError(
                "the optimizer's state was changed during an epoch through a reference of your "
                "own, where it was that of an earlier update. Read it as model.optimizer, which "
                "brings it up to date, or change it at the end of an epoch."
            )
        self._let_go()

    def _update(
        self,
        update: Update,
        first: int,
        wanted: Set[int],
        collected: Collected,
        left_out: Optional[bool],
    ) -> None:
        """One weight update.

        Args:
            update: its micro-batches.
            first: place of the first one in the execution.
            wanted: places whose outputs come back.
            collected: where results go.
            left_out: whether it is known to have a gradient that is not finite; None to look.
        """
        saved = [copy_of(buffers) for buffers in self._replicas]
        try:
            gradients = self._gradients(update, first, wanted, collected)
            skip = False
            if self._scaler is not None:
                skip = self._scaler.judge(gradients, left_out, collected.finite, self.updates)
        except BaseException:
            for buffers, values in zip(self._replicas, saved):
                put_back(buffers, values)
            raise
        if skip:
            collected.skipped += 1
            self._updater.skip()
        else:
            self._updater.apply(gradients)
        self.updates += 1
        if self._averages is not None and not skip:
            self._averages.move(self._storage.flats, self.updates)

    def _gradients(
        self, update: Update, first: int, wanted: Set[int], collected: Collected
    ) -> List[Tensor]:
        """Reduced over the micro-batches of one update, one flat tensor per block."""
        blocks = len(self._storage.blocks)
        total = self._reduction.start([batch.size for batch, _ in update])
        scale = [] if self._scaler is None else [self._scaler.tensor(self._device)]
        for place, (batch, recorded) in enumerate(update):
            self._seed(recorded, self.updates, place)
            state = self._states[place % len(self._states)]
            numbers, *rest = recorded.run(*state, *batch.leaves, *scale)
            outputs, own = rest[: len(rest) - blocks], rest[len(rest) - blocks :]
            if self._check_at_once:
                self._refuse_non_finite((numbers[0] if numbers.dim() else numbers).item())
            collected.numbers.append((recorded, numbers))
            if first + place in wanted:
                collected.add_outputs(recorded, outputs, first + place)
            is_counted = recorded.reported is not None and recorded.reported.counted
            total.add(own, numbers[1] if is_counted else None)
        return total.reduced(1.0 if self._scaler is None else self._scaler.value)

    def _refuse_non_finite(self, value: float) -> None:
        if not math.isfinite(value):
            cause = (
                "Look for a learning rate that is too high, a log or division of zero, or "
                "non-finite data."
            )
            if not all(bool(flat.isfinite().all()) for flat in self._storage.flats):
                cause = (
                    "Weights were not finite before it: the gradient of an earlier update was "
                    "not, though its loss was. Look for a square root or a power at zero."
                )
            raise NonFiniteLossError(
                f"the loss must be finite, but it became {value} in update {self.updates}. The "
                "weights, buffers and optimizer state are those from before that update. " + cause,
                self.updates,
                value,
            )

    def _snapshot(self) -> Any:
        flats = [flat.clone() for flat in self._storage.flats]
        buffers = [copy_of(own) for own in self._replicas]
        averages = self._averages.snapshot() if self._averages is not None else None
        scale = self._scaler.state if self._scaler is not None else None
        return flats, buffers, self._updater.snapshot(), averages, scale, self.updates

    def _restore(self, snapshot: Any) -> None:
        flats, buffers, state, averages, scale, self.updates = snapshot
        if self._scaler is not None:
            self._scaler.state = scale
        for flat, value in zip(self._storage.flats, flats):
            flat.copy_(value)
        for own, values in zip(self._replicas, buffers):
            put_back(own, values)
        self._updater.restore(state)
        if self._averages is not None:
            self._averages.restore(averages)

    def read_state(self) -> TrainState:
        """Copies of everything that training has changed."""
        self.publish()
        weights = on_host(self._parameters)
        buffers = [on_host(own) for own in self._replicas]
        optimizer = copy.deepcopy(self._optimizer.state_dict())
        averages = self._averages.by_name() if self._averages is not None else {}
        schedule = self._spec.recipe.schedule
        return TrainState(
            weights,
            buffers,
            optimizer,
            self._spec.seed,
            self.updates,
            on_host(averages),
            dataclasses.astuple(self._scaler.state) if self._scaler is not None else None,
            schedule.state_dict() if schedule is not None else None,
        )

    def write_state(self, state: TrainState) -> None:
        """Continue from another state. Replicas that it does not know start like its first."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state.weights[public_name(name)])
            for replica, own in enumerate(self._replicas):
                known = replica if replica < len(state.buffers) else 0
                put_back(own, {name: state.buffers[known][public_name(name)] for name in own})
        self._optimizer.load_state_dict(state.optimizer)
        self._let_go()
        names = {public_name(name): name for name in self._parameters}
        self._engine.averages = {
            names[name]: tensor.to(self._device) for name, tensor in state.averages.items()
        }
        if self._scaler is not None and state.loss_scale is not None:
            self._scaler.state = ScaleState(*state.loss_scale)
        if self._spec.recipe.schedule is not None and state.schedule is not None:
            self._spec.recipe.schedule.load_state_dict(state.schedule)
        self.updates = state.updates

    def swap_averages(self) -> None:
        """Exchange weights and averages; without averages, nothing."""
        if self._averages is not None:
            with torch.no_grad():
                self._averages.swap(self._storage.flats)

    def adopt_averages(self) -> None:
        """The averages become the weights; without averages, nothing."""
        if self._averages is not None and self._averages.by_name():
            with torch.no_grad():
                self._averages.adopt(self._storage.flats)

    def _keep_averages(self) -> None:
        if self._averages is not None:
            self._engine.averages.update(self._averages.by_name())
            self._averages = None

    def publish(self) -> None:
        """Write the optimizer's state where torch keeps it."""
        if self._reached:
            self._updater.export()
            self._note_published()

    def _note_published(self) -> None:
        self._published = _signature(self._optimizer)
        self._published_at = self.updates

    def _let_go(self) -> None:
        """Give back parameters and state; the next recording takes over what is there then."""
        self._keep_averages()
        self._storage.release()
        self._by_form, self._states, self._reached = {}, [], ()

    def close(self) -> None:
        """The module gets memory of its own again, the optimizer its state; safe twice."""
        if self._closed:
            return
        self._closed = True
        if self._reached:
            self.publish()
            self._engine.replicas.keep(self._replicas)
            if self._scaler is not None:
                self._engine.scale = self._scaler.state
            if self._averages is not None and self._averages.swapped:
                self._averages.swap(self._storage.flats)
        self._keep_averages()
        self._storage.release()
        self._states = []


def _signature(optimizer: torch.optim.Optimizer) -> object:
    """What changes when somebody changes the optimizer's state."""
    return {
        (id(parameter), name): (id(value), value._version)
        if isinstance(value, Tensor)
        else (id(value), value)
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
    }


def _first_lost(updates: Sequence[Update], losses: Tensor) -> Optional[int]:
    """The first update with a loss that is not finite."""
    values = iter(losses.tolist())
    for index, update in enumerate(updates):
        if not all(math.isfinite(value) for value in [next(values) for _ in update]):
            return index
    return None
