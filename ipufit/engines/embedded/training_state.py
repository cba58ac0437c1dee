"""State that updates change, on the device, and how to go back to what it was."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from torch import Tensor

from ipufit.engines.embedded.ema import EMA
from ipufit.engines.embedded.flat_optimizer import FlatOptimizer
from ipufit.engines.embedded.loss_scale import Scaler, ScaleState
from ipufit.engines.embedded.replicas import copy_of, put_back
from ipufit.tracing.flat_storage import FlatStorage

if TYPE_CHECKING:
    from ipufit.engines.embedded.fsdp.weights import ShardedWeights

__all__ = ["Snapshot", "TrainingState"]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Copies of everything in a :class:`TrainingState`."""

    flats: List[Tensor]
    buffers: List[Dict[str, Tensor]]
    optimizer: Any
    averages: Optional[List[Tensor]]
    scale: Optional[ScaleState]
    updates: int


@dataclasses.dataclass
class TrainingState:
    """All that training changes, while a program has it.

    Attributes:
        updater: applies the optimizer, and holds its state.
        scaler: follows the loss scale; None without one.
        replicas: buffers of each replica; those of replica 0 are the module's own.
        updates: weight updates done since ``compile``, skipped ones included.
        storage: the trained parameters.
        averages: their moving averages; None without averaging.
        states: for each replica, what a micro-batch is computed from: parameters and its buffers.
        cuts: of each block, where each process gets a part of its gradient; None: all get it whole.
        divided: the weights, where each process has a part of them; None: all have all.
    """

    updater: FlatOptimizer
    scaler: Optional[Scaler]
    replicas: List[Dict[str, Tensor]]
    updates: int
    storage: FlatStorage = dataclasses.field(default_factory=lambda: FlatStorage([]))
    averages: Optional[EMA] = None
    states: List[List[Tensor]] = dataclasses.field(default_factory=list)
    cuts: Optional[Sequence[Sequence[int]]] = None
    divided: Optional[ShardedWeights] = None

    def snapshot(self) -> Snapshot:
        """Copies of everything."""
        return Snapshot(
            flats=[flat.clone() for flat in self.storage.flats],
            buffers=[copy_of(own) for own in self.replicas],
            optimizer=self.updater.snapshot(),
            averages=self.averages.snapshot() if self.averages is not None else None,
            scale=self.scaler.state if self.scaler is not None else None,
            updates=self.updates,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, in place; as often as one likes."""
        self.updates = snapshot.updates
        if self.scaler is not None and snapshot.scale is not None:
            self.scaler.state = snapshot.scale
        for flat, value in zip(self.storage.flats, snapshot.flats):
            flat.copy_(value)
        for own, values in zip(self.replicas, snapshot.buffers):
            put_back(own, values)
        self.updater.restore(snapshot.optimizer)
        if self.averages is not None and snapshot.averages is not None:
            self.averages.restore(snapshot.averages)
