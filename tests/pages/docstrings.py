"""Docstrings in Google's style, read: what they say of parameters and attributes."""

import inspect
import re

HEADING = re.compile(r"^(Args|Attributes|Raises|Returns):$")
ENTRY = re.compile(r"^ {4}(\*{0,2}\w+(?:, \w+)*): \S")


def described(thing, section):
    """The names that a section of the docstring of a class or function has an entry for."""
    found, present = [], None
    for line in (inspect.getdoc(thing) or "").splitlines():
        heading = HEADING.match(line)
        if heading:
            present = heading[1]
        elif line and not line.startswith(" "):
            present = None
        entry = ENTRY.match(line)
        if entry and present == section:
            found += [name.lstrip("*") for name in entry[1].split(", ")]
    return found


def parameters(function):
    """The names of what a function, a method or the constructor of a class takes.

    An error without a constructor of its own takes its text.
    """
    if inspect.isclass(function) and not inspect.isfunction(function.__init__):
        return []
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
