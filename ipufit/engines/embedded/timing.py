"""Which of several ways to compute the same is the fastest on this machine, as measured."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

# A way is taken instead of torch's own only if it needs less than this share of its time.
_WORTH = 0.93

# Rounds after the first call, and seconds after which two of them are enough, and one: long calls
# differ less from one to the next, and cost the user more. Where the fastest is so many times as
# fast as the next, two rounds are enough, and of long calls the first.
_ROUNDS = 7
_ENOUGH_FOR_TWO = 0.05
_ENOUGH_FOR_ONE = 0.5
_CLEARLY = 1.25

Ways = Mapping[str, Callable[[], Any]]

# How many choices are kept on disk for later processes, and up to how much load for each core.
_KEPT, _BUSY = 2000, 1.5

# Of this process; those of a file come to them when they are asked for.
_known: Dict[str, str] = {}

# What the key of a choice begins with where that is to be measured no more.
SETTLED = "settled"


def _once(call: Callable[[], object]) -> float:
    """Seconds of one call, of as many as take a millisecond."""
    count, start = 0, time.perf_counter()
    while True:
        call()
        count += 1
        seconds = time.perf_counter() - start
        if seconds > 1e-3:
            return seconds / count


def fastest(
    key: Tuple[object, ...],
    make: Callable[[], Ways],
    measure: Callable[[Callable[[], Any]], float] = _once,
    first: Sequence[float] = (),
    expected: bool = False,
    again: bool = False,
) -> str:
    """The name of the fastest way; the first one unless another is clearly faster.

    What was found once, or settled since, holds for the rest of the process, so that equal programs
    stay equal, and for later processes on the same kind of machine, which begin sooner; not for
    these if the machine was busy with other things.

    Args:
        key: what the time depends on, besides the number of threads.
        make: makes the ways, each of which computes the same.
        measure: the seconds that a way takes.
        first: seconds of a first call of each, where it was made already.
        expected: whether all parts of the last way were faster when they were measured alone. Then
            it is taken unless it is slower as a whole.
        again: whether they are measured again later.
    """
    name = recall(key)
    if name is None:
        with torch.no_grad():
            ways = make()
            seconds = seconds_of([*ways.values()], measure, first, expected, again)
        best, worth = min(seconds), 1.0 if expected else _WORTH
        place = seconds.index(best) if best < worth * seconds[0] else 0
        name = list(ways)[place]
        _keep({_digest(key): name})
    return name


def recall(key: Tuple[object, ...]) -> Optional[str]:
    """Return what was chosen for a key, in this process or else in an earlier one; None: nothing.

    For a key that begins with :data:`SETTLED`, it is what :func:`settle` was told for the rest.
    """
    digest = _digest(key)
    if digest not in _known:
        stored = _stored()
        if digest in stored:
            _known[digest] = stored[digest]
    return _known.get(digest)


def settle(key: Tuple[object, ...], name: str) -> None:
    """Let a way hold for a key from now on, instead of what :func:`fastest` has found."""
    _keep(dict.fromkeys((_digest(key), _digest((SETTLED, *key))), name))


def _keep(choices: Mapping[str, str]) -> None:
    """Let what was chosen hold for this process, and for later ones if the times say enough."""
    _known.update(choices)
    if not _is_busy():
        _store({**_stored(), **choices})


def _digest(key: Tuple[object, ...]) -> str:
    text = repr((*key, torch.get_num_threads()))
    return hashlib.sha256(text.encode()).hexdigest()


def cache_dir() -> Path:
    """Return the user's directory for what later processes may use.

    It is $IPUFIT_CACHE_DIR, or ipufit in $XDG_CACHE_HOME or ~/.cache.
    """
    chosen = os.environ.get("IPUFIT_CACHE_DIR")
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(chosen) if chosen else Path(caches) / "ipufit"


@functools.lru_cache(maxsize=None)
def processor() -> str:
    """Describe all that code made for this very processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _is_busy() -> bool:
    """Tell whether so much wants to run that times say little of the machine."""
    with contextlib.suppress(AttributeError, OSError):  # not every system knows
        return os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
    return False


def _file() -> Path:
    """The file for choices of this torch on this processor."""
    machine = hashlib.sha256(f"{torch.__version__}\0{processor()}".encode()).hexdigest()
    return cache_dir() / f"choices-{machine[:16]}.json"


def _stored() -> Dict[str, str]:
    """Choices of earlier processes, by digests of what they depend on."""
    with contextlib.suppress(OSError, ValueError):
        stored: object = json.loads(_file().read_text())
        if isinstance(stored, dict):
            return {key: value for key, value in stored.items() if isinstance(value, str)}
    return {}


def _store(choices: Mapping[str, str]) -> None:
    """Write the newest choices; where that is not possible, the next process measures again."""
    newest = dict(list(choices.items())[-_KEPT:])
    with contextlib.suppress(OSError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        beside = _file().with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(newest))
        beside.replace(_file())


def measured_choices() -> Dict[str, str]:
    """Return what was measured so far in this process, by digests of what it depends on."""
    return dict(_known)


def prefer(found: Mapping[str, str]) -> None:
    """Let what another process has found hold here."""
    _known.update(found)


def seconds_of(
    calls: Sequence[Callable[[], object]],
    measure: Callable[[Callable[[], object]], float],
    first: Sequence[float],
    expected: bool,
    again: bool,
) -> List[float]:
    """The shortest time of a call of each, in seconds, taken in turn.

    Args:
        calls: each is called at least once.
        measure: the seconds that a call takes.
        first: seconds of a first call of each, where it was made already.
        expected: whether the last one is likely to be the fastest.
        again: whether they are measured again later, so that one call of each says enough.
    """
    start = time.perf_counter() - sum(first)
    best = list(first) or [measure(call) for call in calls]
    for done in range(_ROUNDS):
        is_clear = sorted(best)[1:2] > [_CLEARLY * min(best)]
        if done > 1 or (expected and best[-1] == min(best)):
            enough = 0.0 if is_clear else _ENOUGH_FOR_TWO
        else:
            # One call that another program has slowed down is not to speak against all parts.
            says_enough = done or again or (is_clear and not expected)
            enough = _ENOUGH_FOR_ONE if says_enough else math.inf
        if time.perf_counter() - start > enough:
            break
        for i, call in enumerate(calls):
            best[i] = min(best[i], measure(call))
    return best
