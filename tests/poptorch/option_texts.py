"""Texts of errors, as the tests of options expect them."""

import re


def exactly(text):
    """A pattern that matches this text and nothing else."""
    return f"^{re.escape(text)}$"


def unexpected(option, expected, value):
    """What is said of a value of another type."""
    return (
        f"Unexpected type {type(value).__name__} for option {option}. Expected {expected}, "
        f"got {value!r}."
    )
