"""Values on their way into files and requests."""

from __future__ import annotations

import json
import math
import os
from typing import Any, Dict, Mapping, Optional, Union

from ipufit.errors import ConfigurationError

__all__ = ["as_json", "check_length", "log_file", "means"]


def means(logs: Optional[Mapping[str, object]]) -> Dict[str, Any]:
    """The means of the epoch so far, of the logs of an execution; not how much has been done."""
    return {name: v for name, v in (logs or {}).items() if name not in ("updates", "samples")}


def as_json(record: Mapping[str, object]) -> str:
    """Return a record as one line of JSON, in which numbers that are not finite are texts.

    JSON has no numbers that are not finite; they become "NaN", "Infinity" and "-Infinity", which
    ``float`` reads.
    """
    return json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def log_file(owner: object, filename: Union[str, os.PathLike[str]]) -> str:
    """The path as a string, its folder made; nothing is written yet.

    Raises:
        ConfigurationError: the file can't be written.
    """
    path = os.fspath(filename)
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"{type(owner).__name__} writes to {path!r}, but it can't: {error}. Choose another "
            "filename."
        ) from error
    return path


def check_length(owner: object, path: str, unit: str, length: int, wanted: int) -> None:
    """Make sure that a file still has all that was in it when a checkpoint was written.

    Raises:
        ConfigurationError: it is shorter.
    """
    if length < wanted:
        raise ConfigurationError(
            f"{type(owner).__name__} goes on with {path!r}, which had {wanted} {unit} when the "
            f"checkpoint was written, but has {length}. Put the file back, or choose another "
            "filename and begin anew."
        )
