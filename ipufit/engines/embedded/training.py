"""The training program: the loop over updates, without any Python of the user's."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.engines.embedded.base import BaseProgram, Collected, on_host
from ipufit.engines.embedded.replicas import copy_of, put_back
from ipufit.engines.embedded.sharing import refuse_shared_memory
from ipufit.engines.embedded.step import public_name
from ipufit.engines.embedded.storage import Block, FlatStorage
from ipufit.engines.embedded.updater import updater_for
from ipufit.errors import CaptureError, ConfigurationError, NonFiniteLossError
from ipufit.program import (
    Anchors,
    CombinedBatch,
    MicroBatch,
    ProgramSpec,
    TrainState,
    loss_counts,
)
from ipufit.randomness import isolated

if TYPE_CHECKING:
    from ipufit.engines.embedded.engine import EmbeddedEngine, Recorded

__all__ = ["TrainingProgram"]


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
        self._summed = spec.loss.reduction == "sum"
        owned = {id(p) for group in spec.optimizer.param_groups for p in group["params"]}
        self._trained = [
            name for name, p in self._parameters.items() if p.requires_grad and id(p) in owned
        ]
        trained = set(self._trained)
        self._frozen = [name for name in self._parameters if name not in trained]
        refuse_shared_memory(self._trained, self._parameters, self._buffers)
        self._updater = updater_for(spec.optimizer, engine.optimizer_graphs)
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
        self._note_published()
        self._states = [self._collect_state(buffers) for buffers in self._replicas]

    def prepare(self, example: MicroBatch) -> Any:
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
        micro_batches = [micro_batch.to(self._device) for micro_batch in batch.micro_batches]
        self._follow_the_optimizer()
        self._recorded(micro_batches[0])
        self._follow_the_module()
        group = self._spec.plan.micro_batches_per_update
        updates = [micro_batches[i : i + group] for i in range(0, len(micro_batches), group)]
        self._updater.refresh(len(updates))
        collected = Collected()
        snapshot = None if self._check_at_once else self._snapshot()
        try:
            with torch.no_grad(), isolated(self._device):
                for update in updates:
                    self._update(update, collected)
        except BaseException:
            # An update before this one may have been spoilt already: no loss was looked at.
            if snapshot is not None:
                self._restore(snapshot)
            raise
        anchors = collected.to_anchors(self._engine)
        if snapshot is not None and not bool(torch.isfinite(anchors.losses).all()):
            self._go_back(snapshot, updates, anchors.losses)
        return anchors

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

    def _follow_the_module(self) -> None:
        """Take over what a callback has put into parameters by other means than in place.

        Raises:
            ConfigurationError: a parameter or buffer is another object now.
        """
        now: Dict[str, Tensor] = {**dict(self._step.named_parameters())}
        now.update(self._step.named_buffers())
        for name, tensor in {**self._parameters, **self._buffers}.items():
            if now.get(name) is not tensor:
                raise ConfigurationError(
                    f"{public_name(name)!r} was replaced or removed during fit, but the program "
                    "works on the one that was there at its start. Change values in place, or call "
                    "fit again after changing the module."
                )
        for flat, block in zip(self._storage.flats, self._storage.blocks):
            for slot in block.slots:
                view, data = slot.view(flat), slot.parameter.data
                if data.data_ptr() == view.data_ptr():
                    continue
                if (data.shape, data.dtype, data.device) != (view.shape, view.dtype, view.device):
                    raise ConfigurationError(
                        f"{public_name(slot.name)!r} changed its shape, dtype or device during "
                        "fit. Change the module between two calls of fit."
                    )
                view.copy_(data)
                slot.parameter.data = view

    def _update(self, micro_batches: Sequence[MicroBatch], collected: Collected) -> None:
        saved = [copy_of(buffers) for buffers in self._replicas]
        try:
            gradients = self._gradients(micro_batches, collected)
        except BaseException:
            for buffers, values in zip(self._replicas, saved):
                put_back(buffers, values)
            raise
        self._updater.apply(gradients)
        self.updates += 1

    def _gradients(self, micro_batches: Sequence[MicroBatch], collected: Collected) -> List[Tensor]:
        """Reduced over the micro-batches of one update, one flat tensor per block."""
        blocks = len(self._storage.blocks)
        factors, scale = self._factors([batch.size for batch in micro_batches])
        total: List[Tensor] = []
        for place, batch in enumerate(micro_batches):
            recorded = self._recorded(batch)
            self._seed(recorded, self.updates, place)
            state = self._states[place % len(self._states)]
            result = recorded.run(*state, *batch.leaves)
            loss, outputs, own = result[0], result[1:-blocks], result[-blocks:]
            if self._check_at_once:
                self._refuse_non_finite(loss.item())
            collected.losses.append(loss)
            if self._spec.want_outputs:
                collected.outputs.append((recorded, outputs))
            total = _add(total, own, factors[place])
        return [t.mul_(scale) for t in total] if scale != 1 else total

    def _factors(self, sizes: List[int]) -> Tuple[List[float], float]:
        """What each micro-batch's gradient is multiplied with, and then their sum."""
        full = self._spec.plan.micro_batch_size
        whole = full if self._spec.reduction == "sum" else sum(sizes)
        weights = [count / whole for count in loss_counts(sizes, full, self._summed)]
        if len(set(sizes)) == 1:
            return [1.0] * len(sizes), weights[0]
        return weights, 1.0

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

    def _snapshot(self) -> Tuple[List[Tensor], List[Dict[str, Tensor]], Any, int]:
        flats = [flat.clone() for flat in self._storage.flats]
        buffers = [copy_of(own) for own in self._replicas]
        return flats, buffers, self._updater.snapshot(), self.updates

    def _restore(self, snapshot: Any) -> None:
        flats, buffers, state, self.updates = snapshot
        for flat, value in zip(self._storage.flats, flats):
            flat.copy_(value)
        for own, values in zip(self._replicas, buffers):
            put_back(own, values)
        self._updater.restore(state)

    def _go_back(
        self, snapshot: Any, updates: Sequence[Sequence[MicroBatch]], losses: Tensor
    ) -> None:
        """Restore the start of the execution and repeat it up to the update that went wrong.

        Data and random numbers are functions of the update, so the repetition gives the same bits.
        """
        self._restore(snapshot)
        self._updater.refresh(len(updates))
        start = 0
        with torch.no_grad(), isolated(self._device):
            for update in updates:
                for value in losses[start : start + len(update)].tolist():
                    self._refuse_non_finite(value)
                start += len(update)
                self._update(update, Collected())

    def read_state(self) -> TrainState:
        """Copies of everything that training has changed."""
        self.publish()
        weights = on_host(self._parameters)
        buffers = [on_host(own) for own in self._replicas]
        optimizer = copy.deepcopy(self._optimizer.state_dict())
        return TrainState(weights, buffers, optimizer, self._spec.seed, self.updates)

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
        self.updates = state.updates

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


def _add(total: List[Tensor], gradients: Sequence[Tensor], factor: float) -> List[Tensor]:
    """Add gradients, times a factor, to the sum; the first ones become the sum."""
    if not total:
        return [g.mul_(factor) if factor != 1 else g for g in gradients]
    for t, g in zip(total, gradients):
        t.add_(g, alpha=factor)
    return total
