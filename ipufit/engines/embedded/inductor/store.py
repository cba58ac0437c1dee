"""Compiled programs on disk, for the next process that needs the same ones.

The directory belongs to the user alone: what lies in it is run. An entry is a directory with the
library and a description; it is made beside its place and renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from torch import Tensor

from ipufit.engines.embedded.timing import cache_dir
from ipufit.errors import ConfigurationError

LIBRARY = "program.so"
# Where torch looks for the operators that the library calls by name; not there if it calls none.
CALLS = "program.json"
_DESCRIPTION, _SCRATCH = "entry.json", "scratch"
# Bytes, and seconds after which what was left half made is nobody's any more.
_LARGEST = 256 * 2**20
_LARGEST_SCRATCH = 2**30
_ABANDONED = 24 * 3600

# What a program depends on, by name; values are texts.
Parts = Mapping[str, str]

Runner = Callable[..., List[Tensor]]
# What is loaded already, by key.
Libraries = Dict[str, Runner]


def key_of(parts: Parts) -> str:
    """Name under which the store keeps a program, a digest of all that it depends on.

    It begins with that of the tensors, which is quickly made: where no name begins so, the rest of
    the parts need not be found out.
    """
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return f"{parts['tensors']}-{digest}"


class LibraryStore:
    """Compiled libraries in a directory.

    Args:
        root: the directory; None for that of the user: $IPUFIT_CACHE_DIR, or ipufit in the
            directory for caches.

    Raises:
        ConfigurationError: others can write to it.
    """

    def __init__(self, root: Optional[Path] = None) -> None:
        self._root = _private(cache_dir() / "compiled" if root is None else root)

    @staticmethod
    def has_entries(tensors: str) -> bool:
        """Say whether the user's directory has programs of such tensors, without creating it.

        Args:
            tensors: the part of that name.
        """
        try:
            with os.scandir(cache_dir() / "compiled") as entries:
                return any(entry.name.startswith(tensors) for entry in entries)
        except OSError:
            return False

    def find(self, parts: Parts) -> Optional[Path]:
        """Find the library of a program; None if it is not stored."""
        entry = self._root / key_of(parts)
        described = _description(entry)
        if described is None or described.get("sha256") != _digest(entry):
            return None
        with contextlib.suppress(OSError):
            os.utime(entry)
        return entry / LIBRARY

    def why_missing(self, parts: Parts) -> str:
        """Say in a few words how a program differs from the most similar one that is there."""
        others = [described["parts"] for _, described in self._entries()]
        if not others:
            return "nothing was cached yet"
        differences = [
            [name for name in parts if parts[name] != other.get(name)] for other in others
        ]
        fewest, nearest = min(zip(differences, others), key=lambda pair: len(pair[0]))
        if not fewest:
            return "the cached one is damaged"
        lines = (_difference(name, nearest.get(name), parts[name]) for name in fewest)
        return ", ".join(dict.fromkeys(lines))

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """An empty directory beside the entries; gone afterwards, whatever is in it."""
        self._sweep()
        place = Path(tempfile.mkdtemp(prefix="making-", dir=self._root))
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def scratch(self) -> Path:
        """A directory for what compilers keep between two runs, such as translated headers."""
        place = self._root / _SCRATCH
        if sum(_status(path)[0] for path in place.rglob("*")) > _LARGEST_SCRATCH:
            shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700, exist_ok=True)
        return place

    def keep(self, library: Path, parts: Parts, seconds: float) -> Path:
        """Put a library in its place; the least recently used ones make room.

        Args:
            library: in a workplace.
            parts: what it depends on.
            seconds: that it took to compile.
        """
        entry = self._root / key_of(parts)
        description = {"parts": parts, "seconds": seconds, "sha256": _digest(library.parent)}
        (library.parent / _DESCRIPTION).write_text(json.dumps(description))
        prepared = library.parent / "entry"
        prepared.mkdir(mode=0o700)
        for name in (LIBRARY, CALLS, _DESCRIPTION):
            with contextlib.suppress(FileNotFoundError):
                (library.parent / name).rename(prepared / name)
        if self.find(parts) is None:
            shutil.rmtree(entry, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Somebody else may have been faster; theirs is as good.
            prepared.rename(entry)
        self._make_room(entry)
        return entry / LIBRARY

    def drop(self, parts: Parts) -> None:
        """Delete the library of a program."""
        shutil.rmtree(self._root / key_of(parts), ignore_errors=True)

    def _entries(self) -> List[Tuple[Path, Dict[str, Any]]]:
        """All that are whole, the most recently used first."""
        described = [(entry, _description(entry)) for entry in self._root.iterdir()]
        entries = [(entry, each) for entry, each in described if each is not None]
        return sorted(entries, key=lambda each: -_status(each[0])[1])

    def _make_room(self, newest: Path) -> None:
        total = 0
        for entry, _ in self._entries():
            total += _status(entry / LIBRARY)[0]
            if total > _LARGEST and entry != newest:
                shutil.rmtree(entry, ignore_errors=True)

    def _sweep(self) -> None:
        for place in self._root.glob("making-*"):
            if time.time() - _status(place)[1] > _ABANDONED:
                shutil.rmtree(place, ignore_errors=True)


def _private(root: Path) -> Path:
    root.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    status = root.lstat()
    others = stat.S_IMODE(status.st_mode) & 0o077
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or others:
        raise ConfigurationError(
            f"compiled programs are kept in a directory that only you can use, but {root} "
            "belongs to another user, is open to others, or is not a directory. Run chmod 700 "
            "on it if it is yours, or set IPUFIT_CACHE_DIR to another directory."
        )
    return root.resolve()


def _description(entry: Path) -> Optional[Dict[str, object]]:
    with contextlib.suppress(OSError, ValueError):
        description: Dict[str, object] = json.loads((entry / _DESCRIPTION).read_text())
        return description
    return None


def _digest(entry: Path) -> str:
    digest = hashlib.sha256()
    for name in (LIBRARY, CALLS):
        with contextlib.suppress(OSError):
            digest.update((entry / name).read_bytes())
    return digest.hexdigest()


def _status(path: Path) -> Tuple[int, float]:
    """Return size in bytes and time of the last use; zeros where nothing is there."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_size, status.st_mtime
    return 0, 0.0


# What a part is called; those of long texts are known by a digest that tells nobody anything.
_NEW = {
    "graph": "new operators",
    "update": "another optimizer, reduction or number of micro-batches",
    "tensors": "new shapes",
    "shapes": "new shapes",
    "cpu": "another processor",
    "ipufit": "another ipufit",
}


def _difference(name: str, before: Optional[str], now: str) -> str:
    return _NEW.get(name) or f"{name} {before} -> {now}"
