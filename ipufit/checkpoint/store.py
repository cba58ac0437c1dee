"""A folder of checkpoints: each appears when it is complete, and one run at a time writes there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
from typing import Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple, Union

from torch import Tensor

from ipufit.checkpoint.files import (
    MANIFEST,
    Contents,
    Document,
    Files,
    read_contents,
    write_contents,
)
from ipufit.errors import CheckpointError
from ipufit.utils.codec import UnfitError, advice_of, reason_of, shown
from ipufit.utils.console import warn_user
from ipufit.utils.files import part_of

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]


_NAME = re.compile(r"update-([0-9]{9,18})(?:[-_.][A-Za-z0-9_.-]{0,80})?")
_PART = re.compile(r"\.update-.*\.([0-9]{1,20})\.[0-9]{1,20}\.part")
_A_DAY = 24 * 60 * 60
# Hidden folders that threads of this process work on. Their names have the thread in them.
_HELD: Set[str] = set()


def name_of(updates: int) -> str:
    """The name of the checkpoint after so many updates; one may add a suffix such as "-last"."""
    return f"update-{updates:09d}"


def _is_name(name: str) -> bool:
    """Return True if a checkpoint can have a name: it leads nowhere outside of its folder."""
    return _NAME.fullmatch(name) is not None


def _place_of(name: str) -> Tuple[int, str]:
    """Return the key by which checkpoints are sorted: the number, then the suffix."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1]), name


@contextlib.contextmanager
def _protect_part(part: str) -> Iterator[None]:
    """Inside, a hidden folder is no leftover."""
    _HELD.add(part)
    try:
        yield
    finally:
        _HELD.discard(part)


def _is_left_over(path: str) -> bool:
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


class Store:
    """Checkpoints in one folder, whatever happens while they are written.

    A checkpoint is a folder of ``manifest.json``, ``state.json`` and a file of safetensors for
    each group of tensors. It is made beside under a hidden name, and renamed.

    Args:
        folder: is made when the first checkpoint is written; found now if it is relative.
        files: what works on the disk.
    """

    def __init__(self, folder: Union[str, os.PathLike[str]], files: Optional[Files] = None) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        self._files = files or Files()

    def write(
        self, name: str, document: Document, tensors: Mapping[str, Mapping[str, Tensor]]
    ) -> str:
        """Write a checkpoint, which is complete or absent.

        Args:
            name: a new one: :func:`name_of` and perhaps a suffix such as "-last".
            document: plain JSON.
            tensors: by name, by group; each group is a file that safetensors alone can load.
        Returns:
            The path of its folder.
        Raises:
            CheckpointError: it could not be written; nothing is left of it, and those before it
                are as they were.
        """
        target = self._path(name)
        if os.path.lexists(target):
            raise self._exists(name)
        part = part_of(name)
        hidden = os.path.join(self.folder, part)
        try:
            self._make_folder(self.folder)
            self._sweep()
            with _protect_part(part):
                self._write(hidden, target, document, tensors)
        except (OSError, UnfitError) as error:
            is_taken = isinstance(error, OSError) and error.errno in (
                errno.EEXIST,
                errno.ENOTEMPTY,
            )
            if is_taken and os.path.lexists(target):
                # Another thread was faster.
                raise self._exists(name) from error
            usual = "Free some space or choose another folder; earlier checkpoints are intact."
            raise CheckpointError(
                f"a checkpoint must be written completely, but {name!r} can't be written to "
                f"{self.folder!r}: {reason_of(error)}. {advice_of(error) or usual}"
            ) from error
        return target

    def _write(
        self,
        hidden: str,
        target: str,
        document: Document,
        tensors: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        try:
            self._files.make_folder(hidden)
            write_contents(self._files, hidden, document, tensors)
            self._files.rename(hidden, target)
            try:
                self._files.sync_folder(self.folder)
            except OSError:
                # It may be gone after a power cut, so it is better not there at all.
                self._files.rename(target, hidden)
                raise
        except BaseException:
            with contextlib.suppress(OSError):
                self._files.remove_tree(hidden)
            raise

    def prepare(self) -> None:
        """Make the folder, so that one that can't be is known before any work.

        Raises:
            CheckpointError: it can't be made, or nothing can be written into it.
        """
        try:
            self._make_folder(self.folder)
            part = os.path.join(self.folder, part_of(name_of(0)))
            self._files.make_folder(part)
            self._files.remove_tree(part)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints need a writable folder, but {self.folder!r} is not: "
                f"{reason_of(error)}. Choose another folder."
            ) from error

    def set_aside(self, name: str) -> str:
        """Give a checkpoint that can't be read a name under which no run looks for it.

        Returns:
            The path that it has then.

        Raises:
            CheckpointError: it can't be renamed.
        """
        aside = os.path.join(self.folder, f"damaged-{name}")
        try:
            self._files.rename(self._path(name), aside)
            self._files.sync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {name!r} in {self.folder!r} can't be read and can't be moved "
                f"out of the way either: {reason_of(error)}. Move its folder away yourself."
            ) from error
        return aside

    def names(self) -> List[str]:
        """The checkpoints that are there, damaged ones too, oldest first.

        Raises:
            CheckpointError: the folder can't be looked at. One that is missing has none.
        """
        try:
            entries = self._files.names(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoints are in a folder, but {self.folder!r} can't be listed: "
                f"{reason_of(error)}. Choose another folder."
            ) from error
        names = [name for name in entries if _is_name(name)]
        return sorted(
            (n for n in names if os.path.lexists(os.path.join(self.folder, n, MANIFEST))),
            key=_place_of,
        )

    def read(self, name: str) -> Contents:
        """Read a checkpoint, after every file of it was compared with its hash.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged; the text says where.
        """
        path = self._path(name)
        if not os.path.lexists(path):
            raise self._missing(name)
        return read_contents(self._files, path)

    def newest(self) -> Tuple[Optional[Tuple[str, Contents]], List[str]]:
        """The newest checkpoint that can be read, with its name, and why those after it can't."""
        faults: List[str] = []
        for name in reversed(self.names()):
            try:
                return (name, self.read(name)), faults
            except CheckpointError as error:
                faults.append(str(error))
        return None, faults

    def remove(self, name: str) -> None:
        """Remove a checkpoint: as a whole, whatever happens.

        Raises:
            CheckpointError: it could not be removed, or not all of its files. What is left of
                them goes when the next checkpoint is written.
        """
        path = self._path(name)
        part = part_of(name)
        hidden = os.path.join(self.folder, part)
        try:
            self._sweep()
            with _protect_part(part):
                self._files.rename(path, hidden)
                self._files.sync_folder(self.folder)
                self._files.remove_tree(hidden)
        except FileNotFoundError as error:
            raise self._missing(name) from error
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {name!r} in {self.folder!r} can't be removed: "
                f"{reason_of(error)}. Remove its folder yourself."
            ) from error

    def rotate(self, keep: int, also: Iterable[str] = ()) -> List[str]:
        """Remove the checkpoints that are not to be kept.

        Args:
            keep: how many of the newest stay, damaged ones counted.
            also: names of others that stay.
        Returns:
            The names of those that were removed, oldest first.
        Raises:
            CheckpointError: one could not be removed.
        """
        assert keep >= 0, keep
        names, spared = self.names(), set(also)
        doomed = [name for name in names[: max(0, len(names) - keep)] if name not in spared]
        for name in doomed:
            try:
                self.remove(name)
            except CheckpointError as error:
                # Another process that rotates was faster.
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
        return doomed

    def _path(self, name: str) -> str:
        if not _is_name(name):
            raise CheckpointError(
                f"a checkpoint must be named like {name_of(12)!r}, perhaps with a suffix as in "
                f"{name_of(12) + '-last'!r}, got {shown(name)}. Use name_of(updates)."
            )
        return os.path.join(self.folder, name)

    def _exists(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"a checkpoint must have a new name, but {name!r} is in {self.folder!r} already. "
            "Choose another name or folder, or remove it first."
        )

    def _missing(self, name: str) -> CheckpointError:
        others = self.names()
        hint = f"the newest is {others[-1]!r}" if others else "there is none"
        return CheckpointError(
            f"a checkpoint must be one of those in {self.folder!r}, but {name!r} is not there; "
            f"{hint}. Choose one of Store.names()."
        )

    def _make_folder(self, path: str) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent != path:
            self._make_folder(parent)
        try:
            self._files.make_folder(path)
        except FileExistsError as error:
            # Another thread was faster, or it is a file.
            if not os.path.isdir(path):
                text = f"{path!r} is not a folder"
                raise NotADirectoryError(errno.ENOTDIR, text) from error
        self._files.sync_folder(parent)

    def _sweep(self) -> None:
        """Remove what is left of checkpoints whose writing or removal was cut off."""
        for entry in self._files.names(self.folder):
            path = os.path.join(self.folder, entry)
            # Another process may be at it; and what can't be removed hinders nobody.
            with contextlib.suppress(OSError):
                if _is_left_over(path):
                    self._files.remove_tree(path)


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
                    f"the folder {folder!r} was last written to by {_name(before)}, which did "
                    "not end normally. Locks of other machines are not always visible: if it "
                    "still runs, end one of the two.",
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
