"""Errors of the front end."""

from __future__ import annotations

from ipufit.tracing.ipu_only import PopTorchError

__all__ = ["Error", "error"]


class Error(PopTorchError):
    """Anything that compiling or running a model refuses.

    Attributes:
        type: which part of the system it comes from; ``"poptorch_py_error"`` for the front end.
        message: the text alone.
        location: where it happened, outermost last; empty for the front end.
    """

    # PopTorch has the class there, and files name it so.
    __module__ = "ipufit.poptorch.poptorch_core"

    def __init__(self, message: str = "", type: str = "poptorch_py_error", location: str = ""):
        where = f"\nRaised in:\n{location}" if location else ""
        super().__init__(f"'{type}': {message}{where}")
        self.type = type
        self.message = message
        self.location = location


def error(text: str) -> Error:
    """Return an error of the front end, to be raised."""
    return Error(text)
