"""The cases; importing a module of this package adds its own to the list."""

from ipufit.conformance.cases import (
    buffers,
    errors,
    loader,
    open_questions,
    operators,
    runs,
    values,
    weights,
)

__all__ = [
    "buffers",
    "errors",
    "loader",
    "open_questions",
    "operators",
    "runs",
    "values",
    "weights",
]
