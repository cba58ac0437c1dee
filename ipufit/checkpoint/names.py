"""Names of checkpoints, and of what becomes one or was one."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from typing import Iterator, Set, Tuple

__all__ = ["is_left_over", "is_name", "name_of", "part_of", "place_of", "protect_part"]

_NAME = re.compile(r"update-([0-9]{9,18})(?:[-_.][A-Za-z0-9_.-]{0,80})?")
_PART = re.compile(r"\.update-.*\.([0-9]{1,20})\.[0-9]{1,20}\.part")
_A_DAY = 24 * 60 * 60
# Hidden folders that threads of this process work on. Their names have the thread in them.
_HELD: Set[str] = set()


def name_of(updates: int) -> str:
    """The name of the checkpoint after so many updates; one may add a suffix such as "-last"."""
    return f"update-{updates:09d}"


def is_name(name: str) -> bool:
    """Return True if a checkpoint can have a name: it leads nowhere outside of its folder."""
    return _NAME.fullmatch(name) is not None


def place_of(name: str) -> Tuple[int, str]:
    """Return the key by which checkpoints are sorted: the number, then the suffix."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1]), name


def part_of(name: str) -> str:
    """The hidden name under which this thread makes a checkpoint, or takes it away."""
    return f".{name}.{os.getpid()}.{threading.get_ident()}.part"


@contextlib.contextmanager
def protect_part(part: str) -> Iterator[None]:
    """Inside, a hidden folder is no leftover."""
    _HELD.add(part)
    try:
        yield
    finally:
        _HELD.discard(part)


def is_left_over(path: str) -> bool:
    """Return True if nobody works on a hidden folder: its process is gone, or it is old."""
    entry = os.path.basename(path)
    match = _PART.fullmatch(entry)
    if match is None:
        return False
    pid = int(match[1])
    if pid == os.getpid():
        return entry not in _HELD
    return not _is_running(pid) or time.time() - os.lstat(path).st_mtime > _A_DAY


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        return True  # elsewhere os.kill would end it
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
