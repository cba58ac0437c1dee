"""The cases; importing a module of this package adds its own to the list."""

from ipufit.conformance.cases import errors, loader, open_questions, runs, values, weights

__all__ = [
    "errors",
    "loader",
    "open_questions",
    "runs",
    "values",
    "weights",
]
