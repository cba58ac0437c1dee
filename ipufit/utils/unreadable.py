"""Why a part of a checkpoint can't be used, before it is known which checkpoint it belongs to."""

from __future__ import annotations

__all__ = ["UnfitError", "reason_of", "shown"]

_SHOWN = 80  # characters of a text from a file that an error repeats


class UnfitError(Exception):
    """A file of a checkpoint, or what should become one, is not as it must be.

    Attributes:
        reason: the end of "but ...", without a full stop.
        advice: what to do, where it is something else than usual.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        self.reason = reason
        self.advice = advice
        super().__init__(reason)


def reason_of(error: Exception) -> str:
    """What an error says, without the path that the whole message has already."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).rstrip(".")


def shown(text: str) -> str:
    """A text from a file, quoted and cut: it may be as long as its writer liked."""
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."
