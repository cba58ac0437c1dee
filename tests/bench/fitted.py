"""ipufit as it is measured: epochs of ``fit``, and the losses of its first updates."""

from __future__ import annotations

import time
from typing import Any, Callable, List, Sequence

import torch
from torch import nn

import ipufit
from ipufit.callbacks import Callback, LambdaCallback
from ipufit.engines.embedded.autotune import AutotunedWay
from tests.bench.workloads import LEARNING_RATE, Batches

__all__ = ["Marks", "compiled", "first_losses", "seconds_of_epochs", "until_settled"]


class Marks(Callback):
    """Notes the seconds of each epoch, by a clock."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self.epochs: List[float] = []
        self._clock = clock
        self._start = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start."""
        self._start = self._clock()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop."""
        self.epochs.append(self._clock() - self._start)


def compiled(module: nn.Module, loss: Any = "cross_entropy", **options: Any) -> ipufit.Model:
    """With the optimizer of every peer, and these options of ``compile``."""
    model = ipufit.Model(module, engine="embedded")
    optimizer = torch.optim.Adam(model.module.parameters(), LEARNING_RATE)
    model.compile(optimizer, loss, **options)
    return model


def seconds_of_epochs(
    model: ipufit.Model,
    x: Any,
    y: Any,
    clock: Callable[[], float] = time.perf_counter,
    more: Sequence[Callback] = (),
    **how: Any,
) -> Callable[[int], Any]:
    """Fits for a number of epochs, as the arguments of ``fit`` say, and tells the time of each."""

    def rounds(epochs: int) -> List[float]:
        marks = Marks(clock)
        given = {"shuffle": False, "verbose": 0, "seed": 0, **how}
        model.fit(x, y, epochs=epochs, callbacks=[marks, *more], **given)
        return marks.epochs

    return rounds


class _Settled(Callback):
    """Ends a fit once it is known which updates run compiled, and which don't."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Look at what was chosen so far."""
        way = self.model._session.engine.training.way
        tuners = way._by_kind.values() if isinstance(way, AutotunedWay) else ()
        self.model.stop_training = all(tuner._choice is not None for tuner in tuners)


def until_settled(model: ipufit.Model, x: Any, y: Any, **how: Any) -> Callable[[int], Any]:
    """Fits as one does who trains for days, until nothing in the way updates run changes any more.

    What was chosen and compiled is kept for a later process.
    """

    rounds = seconds_of_epochs(model, x, y, more=[_Settled()], **how)
    return lambda epochs: [sum(rounds(10**7))]


def first_losses(model: ipufit.Model, batches: Batches) -> List[float]:
    """Of the update of each batch."""
    found: List[float] = []
    each = LambdaCallback(on_train_batch_end=lambda _, logs: found.append(logs["loss"]))
    model.fit(batches, verbose=0, seed=0, callbacks=[each])
    # A bar shows the mean of all losses so far.
    totals = [0.0, *((i + 1) * mean for i, mean in enumerate(found))]
    return [after - before for before, after in zip(totals, totals[1:])]
