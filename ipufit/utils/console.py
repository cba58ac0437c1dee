"""Output for the user: how much is printed, and which of their lines a warning names."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from typing import Any, Mapping, Type, Union

from ipufit.errors import ConfigurationError

__all__ = ["PACKAGE", "resolve_verbose", "say_dev_run", "warn_user"]

# The folder of the package, with a separator at its end, as code objects name their files.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


# Blocks of ours are entered through contextlib.
# Python skips no file whose whole name is the prefix.
_OURS = (PACKAGE, os.path.splitext(contextlib.__file__)[0] + ".")


def warn_user(text: str, category: Type[Warning] = UserWarning) -> None:
    """Warn of the line of the user's, or of another library's, from which ipufit was called."""
    if sys.version_info >= (3, 12):
        warnings.warn(text, category, skip_file_prefixes=_OURS)
    else:
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
            frame, level = frame.f_back, level + 1
        warnings.warn(text, category, stacklevel=level)


def resolve_verbose(verbose: Union[int, str]) -> int:
    """0 silent, 1 a bar, 2 a line per epoch; "auto" is 1 where stderr is a terminal, else 2.

    Raises:
        ConfigurationError: anything else.
    """
    if verbose == "auto":
        return 1 if sys.stderr.isatty() or "ipykernel" in sys.modules else 2
    if isinstance(verbose, bool):
        return int(verbose)
    if verbose in (0, 1, 2) and isinstance(verbose, int):
        return verbose
    raise ConfigurationError(
        f"verbose must be 0 (silent), 1 (bar), 2 (one line an epoch) or 'auto', got {verbose!r}."
    )


def say_dev_run(notes: Mapping[str, Any], validates: bool) -> None:
    """Tell that this is a dry run, and what it leaves out.

    Args:
        notes: of the run, for History.
        validates: whether there is a validation.
    """
    count = notes.get("fast_dev_run")
    if not count:
        return
    # Imported here: nobody needs it who prints nothing.
    from tqdm.auto import tqdm

    executions = f"{count} execution{'s' if count > 1 else ''}"
    left_out = notes["left_out_callbacks"]
    tqdm.write(
        f"fast_dev_run: 1 epoch of {executions}{', validation likewise' if validates else ''}; "
        + (f"left out: {', '.join(left_out)}" if left_out else "no callback left out"),
        file=sys.stderr,
    )
