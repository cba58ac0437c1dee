"""Numbers of a report formatted as text."""

from __future__ import annotations

import datetime
import functools
import math
from typing import Callable, Dict, Optional, Tuple

from ipufit.planner import rendering

DASH = "–"
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


# Characters of a setting that are shown.
_LONGEST = 2000


def real(value: object) -> float:
    """Convert a number of run.json, where "nan" and "inf" are text, and None is unknown (nan)."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _dash_unless_finite(write: Callable[..., str]) -> Callable[..., str]:
    """Make a function that writes a finite number write a dash for everything else."""

    @functools.wraps(write)
    def text_of(value: object, *units: str) -> str:
        as_float = real(value)
        return write(as_float, *units) if math.isfinite(as_float) else DASH

    return text_of


def part_of(value: float, whole: float) -> float:
    """Return the share that a value has in a whole; 0 of nothing."""
    return value / whole if whole else 0.0


def number(value: object) -> str:
    """Format any number with five significant digits.

    >>> number(0.123456789), number(1234567.0), number("nan"), number(3), number(None)
    ('0.12346', '1,234,567', 'nan', '3', '–')
    """
    if value is None:
        return DASH
    as_float = real(value)
    if not math.isfinite(as_float):
        return str(as_float)
    if as_float == int(as_float) and abs(as_float) < 1e15:
        return f"{int(as_float):,}"
    return f"{as_float:,.0f}" if 1e5 <= abs(as_float) < 1e15 else f"{as_float:.5g}"


@_dash_unless_finite
def count(value: float) -> str:
    """Format a whole number.

    >>> count(12000.0), count(None), count("nan")
    ('12,000', '–', '–')
    """
    return f"{value:,.0f}"


@_dash_unless_finite
def seconds(value: float) -> str:
    """Format a duration.

    >>> seconds(0.00042), seconds(0.0123), seconds(1.5), seconds(75.2), seconds(7384), seconds(0)
    ('420 µs', '12.3 ms', '1.50 s', '1 min 15 s', '2 h 03 min', '0 s')
    """
    if value == 0:
        return "0 s"
    if abs(value) >= 3599.5:
        hours, minutes = divmod(round(value / 60), 60)
        return f"{hours:,} h {minutes:02} min"
    if abs(value) >= 59.95:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest:02} s"
    unit, name = next((time for time in _TIMES if abs(value) >= 0.9995 * time[0]), _TIMES[-1])
    part = value / unit
    digits = max(0, 2 - math.floor(math.log10(abs(part)) + 1e-3))
    return f"{part:.{min(digits, 2)}f} {name}"


@_dash_unless_finite
def size(value: float) -> str:
    """Format a number of bytes.

    >>> size(2048.0), size(None)
    ('2.0 KiB', '–')
    """
    return rendering.size(round(value))


@_dash_unless_finite
def work(value: float) -> str:
    """Format a number of floating-point operations.

    >>> work(1500), work(None)
    ('1.5 k', '–')
    """
    return rendering.flops(round(value))


@_dash_unless_finite
def rate(value: float, unit: str) -> str:
    """Format an amount per second.

    >>> rate(2.5e9, "FLOP"), rate(None, "B")
    ('2.5 GFLOP/s', '–')
    """
    text = rendering.flops(round(value))
    return f"{text}{unit}/s" if " " in text else f"{text} {unit}/s"


@_dash_unless_finite
def speed(value: float) -> str:
    """Format a number of samples per second.

    >>> speed(23833.4), speed(12.34), speed(None)
    ('23,833', '12.3', '–')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


@_dash_unless_finite
def share(value: float) -> str:
    """Format a part of a whole in percent.

    >>> share(0.5), share(None)
    ('50.0 %', '–')
    """
    return rendering.share(value)


def scale(most: float, sort: str) -> Tuple[float, str]:
    """Choose a divisor and its unit so that the largest of some values is a short number.

    >>> scale(0.02, "seconds"), scale(3000, "bytes")
    ((0.001, 'ms'), (1024.0, 'KiB'))
    """
    units: Tuple[Tuple[float, str], ...] = _TIMES if sort == "seconds" else _SIZES
    unit: Optional[Tuple[float, str]] = next((u for u in units if most >= u[0]), None)
    return unit or units[-1]


def moment(text: str) -> str:
    """Format a moment in ISO 8601 as people write it, in UTC.

    >>> moment("2024-01-02T03:04:05+00:00"), moment("long ago")
    ('2024-01-02 03:04:05 UTC', 'long ago')
    """
    try:
        time = datetime.datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{time:%Y-%m-%d %H:%M:%S} {time:%Z}".strip()


def setting(value: object) -> str:
    """Format a parameter of the run, cut where it is very long."""
    text = _setting(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]} … ({len(text):,} characters; run.json has them)"


def _setting(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_setting, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_setting(each)}" for key, each in value.items()) or "none"
    if isinstance(value, float):
        return number(value)
    return "none" if value is None else str(value)


def sortable(value: object) -> str:
    """Write a number with all its digits, for scripts that sort by it."""
    return repr(real(value))


def power(value: float) -> int:
    """Return the power of two that is nearest to a value of at least 1."""
    return round(math.log2(value))


# Filters of the templates, by name.
FILTERS: Dict[str, Callable[..., object]] = {
    each.__name__: each
    for each in (
        *(count, moment, number, part_of, power, rate, seconds),
        *(setting, share, size, sortable, speed, work),
    )
}
