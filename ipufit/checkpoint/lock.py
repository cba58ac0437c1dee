"""One run at a time writes into a folder of checkpoints."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from typing import Dict, Iterator, Optional, Set, Union

from ipufit.checkpoint.store import Store
from ipufit.errors import CheckpointError
from ipufit.utils.console import warn_user

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "locked"]

LOCK = ".lock"
_MOST_BYTES = 1000
# The lock of the operating system is one of the whole process.
_FOLDERS: Set[str] = set()
_GUARD = threading.Lock()


@contextlib.contextmanager
def locked(folder: Union[str, os.PathLike[str]]) -> Iterator[None]:
    """Within the block no other run writes checkpoints into the folder, which is made if missing.

    The operating system holds a lock on a file in it, and lets go of it when the process ends, in
    whatever way: nothing has to be cleaned up after a crash. A child made by fork has none.

    Raises:
        CheckpointError: another run is writing there; or the folder can't be written to.
    """
    store, process = Store(folder), os.getpid()
    store.prepare()
    path = os.path.join(store.folder, LOCK)
    with _GUARD:
        if store.folder in _FOLDERS:
            raise _taken(store.folder, _owner())
        handle = _open(path, store.folder)
        _FOLDERS.add(store.folder)
    try:
        yield
    finally:
        with _GUARD:
            _FOLDERS.discard(store.folder)
            # Before it is let go of: afterwards it may be that of another run. A child made by
            # fork, which leaves the block too, has no lock.
            if process == os.getpid():
                with contextlib.suppress(OSError):
                    os.unlink(path)
            with contextlib.suppress(OSError):
                os.close(handle)


def _open(path: str, folder: str) -> int:
    """Open the file and lock it; its content says who has it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            before = _read(handle)
            if not _lock(handle):
                raise _taken(folder, before)
            if not _is_at(handle, path):
                os.close(handle)
                continue  # The run before has just ended, and removed it.
            host = (before or {}).get("host")
            if before is not None and host != socket.gethostname():
                warn_user(
                    f"the folder {folder!r} was last written to by {_name(before)}, which has not "
                    "ended as a run does. Locks of other machines are not always seen: if it still "
                    "runs, end one of the two.",
                )
            os.ftruncate(handle, 0)
            os.lseek(handle, 0, os.SEEK_SET)
            os.write(handle, json.dumps(_owner()).encode())
            return handle
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(handle)
            raise


def _lock(handle: int) -> bool:
    """Lock a file, and say whether that worked: False where another process has the lock.

    Where the file system has no locks, nobody knows, and the answer is True.
    """
    if fcntl is None:
        return True
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _is_at(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def _owner() -> Dict[str, object]:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": started}


def _read(handle: int) -> Optional[Dict[str, object]]:
    """Who has written the file; None if nobody has, or something else."""
    try:
        content = json.loads(os.read(handle, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(content, dict) and {"host", "pid", "started"} == set(content)
    return content if is_ours else None


def _name(owner: Optional[Dict[str, object]]) -> str:
    if owner is None:
        return "another process"
    return (
        f"process {str(owner['pid'])[:20]} on {str(owner['host'])[:80]!r} "
        f"since {str(owner['started'])[:20]}"
    )


def _taken(folder: str, owner: Optional[Dict[str, object]]) -> CheckpointError:
    return CheckpointError(
        f"checkpoints of one run at a time are written to a folder, but {_name(owner)} is writing "
        f"to {folder!r}. Wait until that run has ended, or choose another folder."
    )
