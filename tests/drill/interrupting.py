"""The drill of Ctrl-C: processes that read with workers, and one that interrupts them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ipufit

__all__ = ["CASES", "interrupt"]

# Of a process that ended by KeyboardInterrupt, and left no process or thread behind.
_INTERRUPTED = 130
# A hang, not a slow computer.
_HANG = 60.0


class Samples(Dataset):
    """A few, each of which takes a while to read."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        return torch.full((8,), float(index)), torch.tensor(index % 3)


class Stream(IterableDataset):
    """Those samples one after the other."""

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        return (Samples()[index] for index in range(24))


class Own(DataLoader):
    """Starts its workers only when its first batch is read."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


def _loader(data: Any = None, kind: Any = DataLoader, **options: Any) -> Any:
    return kind(data or Samples(0.001), **{"batch_size": 4, "num_workers": 2, **options})


def _fit(**options: Any) -> Callable[[ipufit.Model, Path], None]:
    def run(model: ipufit.Model, folder: Path) -> None:
        given = {name: make() if callable(make) else make for name, make in options.items()}
        data = given.pop("data", None)
        if given.pop("keeps", False):
            given["checkpoint"] = ipufit.Checkpoint(folder / "run")
        data = _loader() if data is None else data
        model.fit(data, epochs=10**6, **{"verbose": 0, **given})

    return run


def _again(name: str) -> Callable[[ipufit.Model, Path], None]:
    def run(model: ipufit.Model, folder: Path) -> None:
        while True:
            getattr(model, name)(_loader(), verbose=0)

    return run


# What is interrupted, by name. The first is what most users do.
CASES: Dict[str, Callable[[ipufit.Model, Path], None]] = {
    "fit": _fit(),
    "fit in this thread": _fit(loading=ipufit.Loading(prefetch=0)),
    "persistent workers": _fit(data=lambda: _loader(persistent_workers=True)),
    "validation": _fit(validation_data=_loader),
    "steps": _fit(steps_per_epoch=4),
    "checkpoint": _fit(keeps=True),
    "evaluate": _again("evaluate"),
    "predict": _again("predict"),
    "a stream": _fit(data=lambda: _loader(Stream())),
    "a loader of one's own": _fit(data=lambda: _loader(kind=Own)),
    "slow samples": _fit(data=lambda: _loader(Samples(30.0))),
    "slow samples in this thread": _fit(
        data=lambda: _loader(Samples(30.0)), loading=ipufit.Loading(prefetch=0)
    ),
    "slow samples, persistent": _fit(
        data=lambda: _loader(Samples(30.0), persistent_workers=True, batch_size=1)
    ),
    "spawn": _fit(data=lambda: _loader(multiprocessing_context="spawn")),
    "forkserver": _fit(data=lambda: _loader(multiprocessing_context="forkserver")),
    "a bar": _fit(verbose=1),
}


def interrupt(case: str, after: float, only_parent: bool = False) -> Tuple[float, List[str]]:
    """Let a process fit, send Ctrl-C to it and its workers, and look at what is left.

    Args:
        case: one of ``CASES``.
        after: seconds from the beginning of the fit to the signal.
        only_parent: the workers don't get the signal, as in a notebook.

    Returns:
        Seconds from the signal to the end of the process, and all that is wrong.
    """
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "stderr"), "w+b") as errors:
        read, write = os.pipe()
        process = os.fork()
        if not process:
            _run(case, Path(folder), write, errors.fileno())
        os.close(write)
        try:
            begun = os.read(read, 1)
            time.sleep(after)
            start = time.monotonic()
            (os.kill if only_parent else os.killpg)(process, signal.SIGINT)
            faults = [] if begun else ["it did not begin"]
            code = _wait(process)
            seconds = time.monotonic() - start
            if code != _INTERRUPTED:
                faults.append("a hang" if code is None else f"exit code {code}")
            faults += [f"left behind: {name}" for name in _left(process)]
        finally:
            os.close(read)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
        if faults or "Exception ignored" in text:
            faults.append(text)
        return seconds, faults


def _run(case: str, folder: Path, begun: int, errors: int) -> None:
    """Be interrupted, and end without what Python does at the end of a process."""
    code = 1
    try:
        os.setsid()
        os.dup2(errors, 2)
        os.dup2(errors, 1)
        torch.manual_seed(0)
        model = ipufit.Model(nn.Linear(8, 3))
        model.compile("adam", "cross_entropy", metrics=["accuracy"])
        try:
            os.write(begun, b"x")
            CASES[case](model, folder)
        except KeyboardInterrupt:
            pass  # with its traceback go the generators of users
        code = _look_round(case)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _look_round(case: str) -> int:
    """The exit code of a process that was interrupted; its children and threads are printed."""
    children = multiprocessing.active_children()
    left = [] if "persistent" in case else [str(each) for each in children]
    # The thread that waits for slow samples notices later that it waits in vain.
    if "slow" not in case:
        left += [each.name for each in threading.enumerate() if "ipufit" in each.name]
    print(*left, flush=True)
    for each in children:
        each.terminate()
    return 2 if left else _INTERRUPTED


def _wait(process: int) -> Any:
    """Its exit code; minus a signal's number, or None if it does not end."""
    deadline = time.monotonic() + _HANG
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        time.sleep(0.002)
    os.killpg(process, signal.SIGABRT)
    return None


def _left(group: int) -> List[str]:
    """Command lines of a group's processes; they have some time to end."""
    deadline = time.monotonic() + _HANG
    left = ["?"]
    while left and time.monotonic() < deadline:
        left = [
            Path("/proc", stat[0], "cmdline").read_text().replace("\0", " ")
            for stat in map(_stat, os.listdir("/proc"))
            if stat[2:] and stat[2] != "Z" and stat[4] == str(group)
        ]
        time.sleep(0.01)
    return left


def _stat(process: str) -> List[str]:
    """The fields of a process in /proc, its name without spaces; none of what is no process."""
    try:
        begin, _, end = Path("/proc", process, "stat").read_text().rpartition(")")
    except OSError:
        return []
    return [begin.split(" ")[0], "", *end.split()]
