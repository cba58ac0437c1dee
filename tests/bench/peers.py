"""The ways to train that are compared, each a function that times epochs and tells losses."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.bench.workloads import LEARNING_RATE, Workload

__all__ = ["BY_HAND", "COMPILED", "LOSSES", "OWN", "PEERS", "Peer"]

# Epochs asked for, the first of which may pay for what is done once: seconds of each epoch.
Rounds = Callable[[int], List[float]]
# Losses of the first updates from the first weights.
First = Callable[[int], List[float]]
Peer = Callable[[Workload], Tuple[Rounds, First]]

# Updates over which losses are compared.
LOSSES = 16

# The names of the rows that others are held against.
OWN, BY_HAND = "ipufit", "eager loop, indexed, fused Adam"
COMPILED = 'ipufit, jit="inductor"'


def _loader(work: Workload, count: int = 0) -> DataLoader[Any]:
    x, y = work.tensors()
    end = count * work.batch or len(x)
    return DataLoader(TensorDataset(x[:end], y[:end]), batch_size=work.batch)


def _loop(make: Callable[[nn.Module], Tuple[Any, Any]], batches: Callable[..., Any]) -> Peer:
    """A loop by hand.

    Args:
        make: of the module, forward with loss, and the optimizer.
        batches: of the workload and a number of updates (0 for all).
    """

    def peer(work: Workload) -> Tuple[Rounds, First]:
        step, optimizer = make(work.module())
        held = list(batches(work, 0)) if batches is _indexed else None

        def epoch() -> float:
            start = time.perf_counter()
            for x, y in held or batches(work, 0):
                optimizer.zero_grad()
                loss = step(x, y)
                loss.backward()
                optimizer.step()
            loss.item()
            return time.perf_counter() - start

        def first(count: int) -> List[float]:
            own, other = make(work.module())
            found = []
            for x, y in batches(work, count):
                other.zero_grad()
                loss = own(x, y)
                loss.backward()
                other.step()
                found.append(loss.item())
            return found

        return lambda epochs: [epoch() for _ in range(epochs)], first

    return peer


def _indexed(work: Workload, count: int) -> Iterator[Tuple[Any, Any]]:
    x, y = work.tensors()
    for start in range(0, (count or work.updates) * work.batch, work.batch):
        yield x[start : start + work.batch], y[start : start + work.batch]


def _with_loss(net: nn.Module) -> Callable[[Any, Any], Any]:
    return lambda x, y: nn.functional.cross_entropy(net(x), y)


def _plain(net: nn.Module) -> Tuple[Any, Any]:
    return _with_loss(net), torch.optim.Adam(net.parameters(), LEARNING_RATE)


def _fused(net: nn.Module) -> Tuple[Any, Any]:
    return _with_loss(net), torch.optim.Adam(net.parameters(), LEARNING_RATE, fused=True)


def _compiled(net: nn.Module) -> Tuple[Any, Any]:
    step, optimizer = _fused(net)
    return torch.compile(step), optimizer


def _lightning(work: Workload) -> Tuple[Rounds, First]:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Trained(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses, self.marks = work.module(), [], []

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            if len(self.losses) < LOSSES:
                self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), LEARNING_RATE)

        def on_train_epoch_start(self) -> None:
            self.marks.append(time.perf_counter())

        def on_train_epoch_end(self) -> None:
            self.marks.append(time.perf_counter())

    def trainer(epochs: int) -> Any:
        return lightning.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    model = Trained()

    def rounds(epochs: int) -> List[float]:
        model.marks.clear()
        trainer(epochs).fit(model, _loader(work))
        return [end - start for start, end in zip(model.marks[::2], model.marks[1::2])]

    def first(count: int) -> List[float]:
        own = Trained()
        trainer(1).fit(own, _loader(work, count))
        return [loss.item() for loss in own.losses]

    return rounds, first


def _keras(**options: Any) -> Peer:
    """Keras on the backend that KERAS_BACKEND names."""

    def peer(work: Workload) -> Tuple[Rounds, First]:
        import keras

        x, y = work.tensors()
        inputs, classes = work.for_keras(x), y.numpy()

        class Marks(keras.callbacks.Callback):
            def __init__(self) -> None:
                super().__init__()
                self.epochs, self.start = [], 0.0

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.start = time.perf_counter()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.epochs.append(time.perf_counter() - self.start)

        def made(**more: Any) -> Any:
            model = work.keras(work.module())
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(LEARNING_RATE, epsilon=1e-8), loss, **more)
            return model

        model = made(**options)

        def rounds(epochs: int) -> List[float]:
            marks = Marks()
            model.fit(
                inputs,
                classes,
                work.batch,
                epochs,
                verbose=0,
                shuffle=False,
                callbacks=[marks],
            )
            return marks.epochs

        def first(count: int) -> List[float]:
            own, size = made(), work.batch
            parts = [slice(start, start + size) for start in range(0, count * size, size)]
            return [float(own.train_on_batch(inputs[part], classes[part])) for part in parts]

        return rounds, first

    return peer


def _skorch(work: Workload) -> Tuple[Rounds, First]:
    from skorch import NeuralNet

    def made(epochs: int) -> Any:
        net = NeuralNet(
            work.module(),
            nn.CrossEntropyLoss,
            optimizer=torch.optim.Adam,
            lr=LEARNING_RATE,
            batch_size=work.batch,
            max_epochs=epochs,
            train_split=None,
            verbose=0,
        )
        return net

    x, y = work.tensors()
    model = made(1).initialize()

    def rounds(epochs: int) -> List[float]:
        found = []
        for _ in range(epochs):
            start = time.perf_counter()
            model.partial_fit(x, y)
            found.append(time.perf_counter() - start)
        return found

    def first(count: int) -> List[float]:
        own, end = made(1), count * work.batch
        own.fit(x[:end], y[:end])
        return [batch["train_loss"] for batch in own.history[0]["batches"]]

    return rounds, first


def _ipufit(device_iterations: int = 32, **options: Any) -> Peer:
    def peer(work: Workload) -> Tuple[Rounds, First]:
        from tests.bench.fitted import compiled, first_losses, seconds_of_epochs

        x, y = work.tensors()
        how = {"batch_size": work.batch, "device_iterations": device_iterations}
        rounds = seconds_of_epochs(compiled(work.module(), **options), x, y, **how)

        def first(count: int) -> List[float]:
            end = count * work.batch
            return first_losses(compiled(work.module(), **options), x[:end], y[:end], work.batch)

        return rounds, first

    return peer


PEERS: Dict[str, Peer] = {
    OWN: _ipufit(),
    'ipufit, jit="graph"': _ipufit(jit="graph"),
    "ipufit, run_eagerly=True": _ipufit(run_eagerly=True),
    COMPILED: _ipufit(jit="inductor"),
    "eager loop, DataLoader": _loop(_plain, _loader),
    BY_HAND: _loop(_fused, _indexed),
    "torch.compile loop, fused Adam": _loop(_compiled, _indexed),
    "Lightning": _lightning,
    "Keras, torch": _keras(),
    "Keras, JAX": _keras(),
    "Keras, JAX, steps_per_execution=32": _keras(steps_per_execution=32),
    "skorch": _skorch,
}
