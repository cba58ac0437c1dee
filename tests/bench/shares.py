"""Which share of a fit of the MLP is waiting, reading and telling, and of one of texts padding."""

from __future__ import annotations

import contextlib
import io
import runpy
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, Generator, Iterator, List
from unittest import mock

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.bench.running import serve
from tests.bench.workloads import WORKLOADS, Workload

__all__ = ["SHARES", "waits"]

_EPOCHS = 4
_EXAMPLE = Path(__file__).parents[2] / "examples" / "text_buckets.py"

# So often two fits are compared in turn for one value: a difference of a few percent is less than
# what repeats of some tenths of a second differ by.
_TURNS = 9


def _later(epochs: List[float]) -> float:
    """Seconds of an epoch but for the first, which pays for what is done once."""
    return statistics.median(epochs[1:])


def _more(one: Callable[[], List[float]], other: Callable[[], List[float]]) -> float:
    """By which part of the other's time the one takes more, in turn."""
    return statistics.median(_later(one()) / _later(other()) for _ in range(_TURNS)) - 1


def _timed(
    work: Workload, metrics: Any = None, jit: str = "auto", data: Any = None, **how: Any
) -> Callable[[], List[float]]:
    from tests.bench.fitted import compiled, seconds_of_epochs

    model = compiled(work.module(), metrics=metrics, jit=jit)
    given = {"batch_size": work.batch, "device_iterations": 32, **how}
    rounds = seconds_of_epochs(model, *(data or work.tensors()), **given)
    return lambda: rounds(_EPOCHS)


@contextlib.contextmanager
def _reading(read: Callable[..., Any]) -> Iterator[None]:
    """``read``, given what reads executions and its arguments, takes its place."""
    from ipufit.data.pipeline import BatchPipeline

    original = BatchPipeline.executions
    with mock.patch.object(BatchPipeline, "executions", lambda *given: read(original, *given)):
        yield


@contextlib.contextmanager
def waits() -> Iterator[List[float]]:
    """The seconds that each epoch of the block waits for executions."""
    found: List[float] = []

    def read(original: Any, *given: Any) -> Generator[Any, None, None]:
        found.append(0.0)
        with contextlib.closing(original(*given)) as executions:
            while True:
                start = time.perf_counter()
                try:
                    batch = next(executions)
                except StopIteration:
                    return
                finally:
                    found[-1] += time.perf_counter() - start
                yield batch

    with _reading(read):
        yield found


@contextlib.contextmanager
def _replayed() -> Iterator[None]:
    """Every epoch of the block has the executions of the first one, without reading data."""
    held: List[Any] = []

    def read(original: Any, *given: Any) -> Generator[Any, None, None]:
        if not held:
            held.extend(original(*given))
        yield from held

    with _reading(read):
        yield


def _waiting(work: Workload) -> Callable[[], float]:
    fit = _timed(work)

    def share() -> float:
        with waits() as seconds:
            epochs = fit()
        return statistics.median(w / e for w, e in list(zip(seconds, epochs))[1:])

    return share


def _feeding(work: Workload) -> Callable[[], float]:
    fit = _timed(work)

    def prepared() -> List[float]:
        with _replayed():
            return fit()

    return lambda: _more(fit, prepared)


def _telling(work: Workload) -> Callable[[], float]:
    # As recorded: which kernels "auto" takes for one program and for the other is another matter.
    silent, told = _timed(work, jit="graph"), _timed(work, ["accuracy"], "graph", verbose=1)

    def spoken() -> List[float]:
        with contextlib.redirect_stderr(io.StringIO()) as bars:
            seconds = told()
        _check_bars(bars.getvalue())
        return seconds

    return lambda: _more(spoken, silent)


def _check_bars(text: str) -> None:
    """Refuse to time a bar that shows nothing.

    Raises:
        SystemExit: no bar has a loss and an accuracy before its epoch is over.
    """
    states = [state for line in text.split("\n") for state in line.split("\r")[:-1]]
    if not any("loss=" in state and "accuracy=" in state for state in states):
        raise SystemExit(f"the bar shows neither loss nor accuracy within an epoch: {text!r}")


class _Samples(Dataset[Any]):
    """Tensors as somebody's own dataset has them: sample by sample."""

    def __init__(self, *tensors: Any) -> None:
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._tensors[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(tensor[index] for tensor in self._tensors)


def _loading(work: Workload, dataset: Callable[..., Any]) -> Callable[[], float]:
    # Processor time of this process: other cores may be busy with other work, and two have to do
    # for training and two workers.
    given = {"batch_size": work.batch, "shuffle": True}
    options: Dict[str, Any] = {"num_workers": 2, "persistent_workers": True, **given}
    loader: Any = DataLoader(dataset(*work.tensors()), **options)
    how: Dict[str, Any] = {"jit": "graph", "clock": time.process_time, "shuffle": True}
    tensors = _timed(work, **how)
    loaded = _timed(work, data=(loader, None), **{**how, "shuffle": None, "batch_size": None})

    def share() -> float:
        # Threads that wait for one another spend processor time.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return _more(loaded, tensors)
        finally:
            torch.set_num_threads(threads)

    return share


def _padding(work: Workload) -> Callable[[], float]:
    # The texts and the net of an example; a look takes as many texts as its updates have samples.
    example = runpy.run_path(str(_EXAMPLE))
    samples = example["load"]()[0][: 16 * work.updates]
    fits = []
    for boundaries in (None, (example["LONGEST"],)):
        model, batches = example["compiled"](), example["loader"](samples, boundaries=boundaries)
        fits.append(_rounds(model, batches))
    buckets, longest = fits
    return lambda: _later(buckets()) / _later(longest())


def _rounds(model: Any, batches: Any) -> Callable[[], List[float]]:
    from tests.bench.fitted import Marks

    def fit() -> List[float]:
        marks = Marks()
        model.fit(batches, epochs=2, device_iterations=8, verbose=0, seed=0, callbacks=[marks])
        return marks.epochs

    return fit


# Of a workload, what measures a share once, each time it is called.
SHARES: Dict[str, Callable[[Workload], Callable[[], float]]] = {
    "waiting": _waiting,
    "feeding": _feeding,
    "telling": _telling,
    "padding": _padding,
    "rows": lambda work: _loading(work, TensorDataset),
    "workers": lambda work: _loading(work, _Samples),
}


def main() -> None:
    """``python -m tests.bench.shares``: one share or another, as asked."""

    def make() -> Any:
        def answer(asked: Dict[str, Any]) -> Dict[str, Any]:
            # Each value has models of its own: where their tensors lie decides some percent.
            return {"value": SHARES[asked["share"]](WORKLOADS["mlp"].of(asked["updates"]))()}

        return answer

    serve(make)


if __name__ == "__main__":
    main()
