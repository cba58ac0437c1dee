"""JSON in files, written so that it can be read back and read so that no file can do harm."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Dict, List, NoReturn, Tuple

from ipufit.utils.codec import MAX_DEPTH, UnfitError, reason_of, shown

__all__ = ["dump", "parse"]

# A level of an encoded value takes up to three: {"$dict": [[key, value]]}.
_LEVELS = 3 * MAX_DEPTH + 50
_LENGTH = 30  # of a number: a float has up to 24; more digits take quadratic time to read
_TOKENS = re.compile(rb'\\.|["\[\]{}]', re.DOTALL)


def dump(document: object, most: int) -> bytes:
    """Return a document as the text of a JSON file.

    Raises:
        UnfitError: it is not plain JSON, or could not be read back.
    """
    try:
        data = json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise UnfitError(f"it is no JSON: {reason_of(error)}") from error
    if len(data) > most:
        raise UnfitError(f"it has {len(data)} bytes, more than {most}")
    # json writes a tuple as a list, and a key 1 as "1".
    if parse(data) != document:
        raise UnfitError("it is no plain JSON, as it comes back from a file as something else")
    return data


def parse(data: bytes) -> Any:
    """The document in a file of bounded size.

    Raises:
        UnfitError: it is no JSON, nested deeper than an encoded value, names a key twice, or has a
            number that is not finite or too long.
    """
    _check_depth(data)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_short,
        )
    except ValueError as error:
        raise UnfitError(f"it is no JSON: {reason_of(error)}") from error


def _check_depth(data: bytes) -> None:
    """The parser recurses, on a stack whose size is not known."""
    depth, in_text = 0, False
    for match in _TOKENS.finditer(data):
        token = match.group()
        if token == b'"':
            in_text = not in_text
        elif not in_text and token in b"[{":
            depth += 1
            if depth > _LEVELS:
                raise UnfitError(f"it is nested deeper than {_LEVELS} levels")
        elif not in_text and token in b"]}":
            depth -= 1


def _unique(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
    members: Dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"the key {shown(name)} comes twice")
        members[name] = value
    return members


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    value = float(_bounded(text))
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} is too large")
    return value


def _short(text: str) -> int:
    return int(_bounded(text))


def _bounded(text: str) -> str:
    if len(text) > _LENGTH:
        raise ValueError(f"the number {shown(text)} has more than {_LENGTH} characters")
    return text
