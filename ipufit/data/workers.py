"""The worker processes of a DataLoader: started and ended so that no signal leaves one behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import time
from typing import Any, Iterator, List, Optional

from torch.utils.data import DataLoader, dataloader

from ipufit.data.loaders import reads_as_torch
from ipufit.data.read_errors import frames_of
from ipufit.utils.interrupts import defer_sigint, starting_processes

__all__ = ["end_workers", "kill_workers", "starting_workers"]

# How long all workers together may take to end by themselves, in seconds; torch gives each five.
_PATIENCE = 1.0
_INIT = dataloader._MultiProcessingDataLoaderIter.__init__.__code__


@contextlib.contextmanager
def starting_workers(loader: Any) -> Iterator[None]:
    """Let reading of a loader begin, with workers or without, and signals do no harm.

    Args:
        loader: of torch, or anything that may read one.
    """
    silent = reads_as_torch(loader) and loader.num_workers > 0 and not _forks(loader)
    if silent:
        # It would let SIGINT through again as it is started.
        multiprocessing.resource_tracker.ensure_running()
    try:
        with starting_processes(silent):
            yield
    except BaseException as error:
        _end_torn(error)
        raise


def _end_torn(error: Optional[BaseException]) -> None:
    """End the workers of an iterator that is not whole, which lives as long as the traceback."""
    while error is not None:
        for frame in frames_of(error):
            if frame.f_code is _INIT:
                with contextlib.suppress(AttributeError):
                    end_workers(frame.f_locals["self"])
        error = error.__context__


def _forks(loader: DataLoader[Any]) -> bool:
    context: Any = loader.multiprocessing_context or multiprocessing
    method: Optional[str] = context.get_start_method(allow_none=True)
    return (method or multiprocessing.get_all_start_methods()[0]) == "fork"


def end_workers(iterator: Any) -> None:
    """End the workers of a pass over a DataLoader that nobody reads on, if it has any.

    Ctrl-C waits until they have ended, which takes about a second at most.
    """
    workers: List[Any] = getattr(iterator, "_workers", [])
    if not workers:
        return
    with defer_sigint():
        deadline = time.monotonic() + _PATIENCE
        # torch ends them one after the other, and lets go of them only then.
        iterator._workers = [_Impatient(worker, deadline) for worker in workers]
        try:
            iterator._shutdown_workers()
        finally:
            for worker in workers:
                worker.join(_PATIENCE)
                if worker.exitcode is None:
                    worker.kill()
                    worker.join()


def kill_workers(iterator: Any) -> None:
    """End the workers of a pass while another thread waits for them, which will notice."""
    for worker in getattr(iterator, "_workers", []):
        # torch's handler of SIGTERM lets them end without an error here.
        worker.terminate()


class _Impatient:
    """A worker process that is waited for until a deadline at most."""

    def __init__(self, worker: Any, deadline: float) -> None:
        self._worker = worker
        self._deadline = deadline

    def join(self, timeout: Optional[float] = None) -> None:
        """Wait; ``timeout`` is not waited for."""
        self._worker.join(max(0.0, self._deadline - time.monotonic()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)
