"""Errors of the front end."""

from __future__ import annotations

from ipufit.poptorch.poptorch_core import Error

__all__ = ["error"]


def error(text: str) -> Error:
    """An error of the front end, to be raised."""
    return Error(text)
