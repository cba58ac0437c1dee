"""The ways to train that are compared, each a function that times epochs and tells losses."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.bench.workloads import LEARNING_RATE, LOSSES, Batches, Workload

__all__ = ["BY_HAND", "COMPILED", "EARLIER", "FIRST_RUN", "LONG_RUN", "OWN", "PEERS", "Peer"]

# Epochs asked for, the first of which may pay for what is done once: seconds of each epoch.
Rounds = Callable[[int], List[float]]
# Losses of the first updates from the first weights.
First = Callable[[int], List[float]]
Peer = Callable[[Workload], Tuple[Rounds, First]]

# The names of the rows that others are held against.
OWN, BY_HAND = "ipufit", "eager loop, indexed, fused Adam"
COMPILED = 'ipufit, jit="inductor"'
# With nothing in its cache; and the long run that has left there what :data:`OWN` finds.
FIRST_RUN, EARLIER = "ipufit, first run", "an earlier run of ipufit"


def _loader(work: Workload, count: int = 0) -> DataLoader[Any]:
    if work.cuts is not None:
        return DataLoader(work.batches(count), batch_size=None)  # type: ignore[arg-type]
    x, y = work.tensors()
    end = count * work.batch or len(x)
    return DataLoader(TensorDataset(x[:end], y[:end]), batch_size=work.batch)


def _loop(make: Callable[[Workload], Tuple[Any, Any]], batches: Callable[..., Any]) -> Peer:
    """A loop by hand.

    Args:
        make: of the workload, a new module's forward with loss, and the optimizer.
        batches: of the workload and a number of updates (0 for all).
    """

    def peer(work: Workload) -> Tuple[Rounds, First]:
        step, optimizer = make(work)
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
            own, other = make(work)
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


def _indexed(work: Workload, count: int) -> Batches:
    return work.batches(count)


def _with_adam(work: Workload, **options: Any) -> Tuple[Any, Any]:
    net, loss = work.module(), work.loss_function
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE, **options)
    return lambda x, y: loss(net(x), y), optimizer


def _fused(work: Workload) -> Tuple[Any, Any]:
    return _with_adam(work, fused=True)


def _compiled(work: Workload) -> Tuple[Any, Any]:
    step, optimizer = _fused(work)
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
            loss = work.loss_function(self.net(batch[0]), batch[1])
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

        assert work.keras is not None
        assert work.for_keras is not None
        make_twin = work.keras
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
            model = make_twin(work.module())
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


# What skorch takes in the place of a function.
_LOSS_MODULES = {"cross_entropy": nn.CrossEntropyLoss, "mse": nn.MSELoss}


def _skorch(work: Workload) -> Tuple[Rounds, First]:
    from skorch import NeuralNet

    def made(epochs: int) -> Any:
        net = NeuralNet(
            work.module(),
            _LOSS_MODULES[work.loss],
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


class _WithLoss(nn.Module):
    """As transformers' models are: the loss comes with the outputs, which is all that is used."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.net, self._loss = work.module(), work.loss_function

    def forward(self, x: Any, labels: Any) -> Dict[str, Any]:
        """The loss by name."""
        return {"loss": self._loss(self.net(x), labels)}


def _trainer(work: Workload) -> Tuple[Rounds, First]:
    """The Trainer of transformers, with what it does besides training switched off."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")

    class Marks(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.epochs: List[float] = []
            self.start = 0.0

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.start = time.perf_counter()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.epochs.append(time.perf_counter() - self.start)

    class InOrder(transformers.Trainer):  # type: ignore[misc]
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.losses: List[Any] = []

        def get_train_dataloader(self) -> Any:
            return self.train_dataset

        def compute_loss(self, model: Any, inputs: Any, *given: Any, **more: Any) -> Any:
            loss = model(**inputs)["loss"]
            if len(self.losses) < LOSSES:
                self.losses.append(loss.detach())
            return loss

    def trainer(model: nn.Module, epochs: int, count: int = 0) -> Tuple[Any, Marks]:
        def named(rows: List[Any]) -> Dict[str, Any]:
            x, y = zip(*rows)
            return {"x": torch.stack(x), "labels": torch.stack(y)}

        loader = _loader(work, count)
        rows = DataLoader(loader.dataset, batch_size=work.batch, collate_fn=named)
        optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True)
        steady = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        arguments = transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            num_train_epochs=epochs,
            per_device_train_batch_size=work.batch,
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        marks = Marks()
        own = InOrder(
            model,
            arguments,
            train_dataset=rows,
            optimizers=(optimizer, steady),
            callbacks=[marks],
        )
        own.remove_callback(transformers.PrinterCallback)
        return own, marks

    model = _WithLoss(work)

    def rounds(epochs: int) -> List[float]:
        own, marks = trainer(model, epochs)
        own.train()
        return marks.epochs

    def first(count: int) -> List[float]:
        own, _ = trainer(_WithLoss(work), 1, count)
        own.train()
        return [loss.item() for loss in own.losses]

    return rounds, first


def _accelerate(work: Workload) -> Tuple[Rounds, First]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)

    def prepared(count: int = 0) -> Any:
        net = work.module()
        optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE, fused=True)
        return accelerator.prepare(net, optimizer, _loader(work, count))

    def epoch(net: Any, optimizer: Any, loader: Any) -> List[Any]:
        losses = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = work.loss_function(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())
        losses[-1].item()
        return losses

    parts = prepared()

    def rounds(epochs: int) -> List[float]:
        found = []
        for _ in range(epochs):
            start = time.perf_counter()
            epoch(*parts)
            found.append(time.perf_counter() - start)
        return found

    return rounds, lambda count: [loss.item() for loss in epoch(*prepared(count))]


def _ipufit(device_iterations: int = 32, is_long: bool = False, **options: Any) -> Peer:
    def peer(work: Workload) -> Tuple[Rounds, First]:
        from tests.bench.fitted import compiled, first_losses, seconds_of_epochs, until_settled

        options.update(loss=work.loss)
        how: Dict[str, Any] = {"device_iterations": device_iterations}
        if work.cuts is None:
            x, y = work.tensors()
            how.update(batch_size=work.batch)
        else:
            # Batches come in their own order.
            x, y = work.batches(), None
            how.update(shuffle=None)
        trains = until_settled if is_long else seconds_of_epochs
        rounds = trains(compiled(work.module(), **options), x, y, **how)

        def first(count: int) -> List[float]:
            return first_losses(compiled(work.module(), **options), work.batches(count))

        return rounds, first

    return peer


LONG_RUN = _ipufit(is_long=True)
PEERS: Dict[str, Peer] = {
    OWN: _ipufit(),
    FIRST_RUN: _ipufit(),
    'ipufit, jit="graph"': _ipufit(jit="graph"),
    "ipufit, run_eagerly=True": _ipufit(run_eagerly=True),
    COMPILED: _ipufit(jit="inductor"),
    "eager loop, DataLoader": _loop(_with_adam, _loader),
    BY_HAND: _loop(_fused, _indexed),
    "torch.compile loop, fused Adam": _loop(_compiled, _indexed),
    "Lightning": _lightning,
    "Keras, torch": _keras(),
    "Keras, JAX": _keras(),
    "Keras, JAX, steps_per_execution=32": _keras(steps_per_execution=32),
    "skorch": _skorch,
    "Trainer of transformers": _trainer,
    "Accelerate": _accelerate,
}
