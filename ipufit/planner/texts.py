"""Numbers and tables of a plan as text."""

from __future__ import annotations

from typing import List, Sequence

__all__ = ["columns", "flops", "share", "size"]


def size(count: int) -> str:
    """Bytes in the unit that leaves a short number.

    >>> size(300), size(2048), size(897 * 2**20)
    ('300 B', '2.0 KiB', '897.0 MiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= (1 << power) * (1 if power < 30 else 10):
            return f"{count / (1 << power):,.1f} {unit}"
    return f"{count} B"


def flops(count: int) -> str:
    """FLOPs likewise.

    >>> flops(0), flops(1500), flops(2_000_000_000)
    ('0', '1.5 k', '2.0 G')
    """
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return str(count)


def share(part: float) -> str:
    """A share in percent.

    >>> share(0.5), share(0.0001), share(0.0)
    ('50.0 %', '< 0.1 %', '0.0 %')
    """
    return "< 0.1 %" if 0 < part < 0.0005 else f"{100 * part:.1f} %"


def columns(rows: Sequence[Sequence[str]]) -> List[str]:
    """A head, a rule and the other rows; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:])]
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
