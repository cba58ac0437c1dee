"""One update being compiled, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Iterator, Optional

from ipufit.engines.embedded.inductor import worker
from ipufit.engines.embedded.inductor.request import Request
from ipufit.engines.embedded.inductor.store import LIBRARY, Store

__all__ = ["Compilation", "CompilerError"]

_LOG = "log.txt"
_RUN = "import sys; from {0} import main; sys.exit(main(sys.argv[1], sys.argv[2]))"
_SHOWN = 2000


class CompilerError(Exception):
    """The text is the compiler's."""


class Compilation:
    """Starts at once and goes on until it is done, closed, or this process ends.

    Args:
        request: what to compile.
        store: takes the library.
    """

    def __init__(self, request: Request, store: Store) -> None:
        self._store = store
        self._parts = request.parts()
        self._start = time.perf_counter()
        self._opened = contextlib.ExitStack()
        self._place = self._opened.enter_context(store.workplace())
        try:
            (self._place / worker.REQUEST).write_text(request.to_json())
            self._process = self._opened.enter_context(_started(self._place, store.scratch()))
        except BaseException:
            self._opened.close()
            raise
        self.close = weakref.finalize(self, _close, self._opened, os.getpid())

    def is_done(self) -> bool:
        """Tell whether :meth:`result` need not wait."""
        return self._process.poll() is not None

    def result(self) -> Path:
        """The library, once it is compiled.

        Raises:
            CompilerError: it could not be.
        """
        code = self._process.wait()
        try:
            library = self._place / LIBRARY
            if code != 0 or not library.exists():
                raise CompilerError(_said(self._place) or f"it ended with exit code {code}")
            return self._store.keep(library, self._parts, time.perf_counter() - self._start)
        finally:
            self.close()


def _close(opened: contextlib.ExitStack, owner: int) -> None:
    # A copy of this process, made by fork, must not end what it has not started.
    if os.getpid() == owner:
        opened.close()


@contextlib.contextmanager
def _started(place: Path, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process; killed on the way out, with all that it has started."""
    # The folder that holds the package of all of these modules.
    root = str(Path(__file__).resolve().parents[__name__.count(".")])
    # The same modules as here; not those of the directory that it works in.
    paths = [root, *(os.path.abspath(path) for path in sys.path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TMPDIR": str(scratch),
    }
    command = [sys.executable, "-c", _RUN.format(worker.__name__), str(place), LIBRARY]
    with open(place / _LOG, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=str(place),
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _said(place: Path) -> Optional[str]:
    """The cause that the process has left, or the end of what it printed."""
    for name in (worker.ERROR, _LOG):
        with contextlib.suppress(OSError):
            text = (place / name).read_text(errors="replace").strip()
            if text:
                return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."
    return None
