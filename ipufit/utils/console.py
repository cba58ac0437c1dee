"""Output for the user: how much is printed, and which of their lines a warning names."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import warnings
from typing import Any, Literal, Mapping, Type, cast

from ipufit.errors import ConfigurationError

# The folder of the package, with a separator at its end, as code objects name their files.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


# Blocks of ours are entered through contextlib.
# Python skips no file whose whole name is the prefix.
_OURS = (PACKAGE, os.path.splitext(contextlib.__file__)[0] + ".")


def is_fault_of_ours(error: BaseException) -> bool:
    """Tell whether an error was raised in a line of ipufit's own, not of torch's or the user's."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_filename.startswith(PACKAGE)


def warn_user(text: str, category: Type[Warning] = UserWarning) -> None:
    """Warn of the line of the user's, or of another library's, from which ipufit was called."""
    if sys.version_info >= (3, 12):
        warnings.warn(text, category, skip_file_prefixes=_OURS)
    else:
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
            frame, level = frame.f_back, level + 1
        warnings.warn(text, category, stacklevel=level)


def notebook_shell() -> Any:
    """IPython's shell, if this is a notebook or another program that shows pictures; else None."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    # One in a terminal has no kernel behind it.
    return shell if hasattr(shell, "kernel") else None


class TextReport:
    """Has a text that ``str`` makes, which a notebook shows as it is."""

    def _repr_html_(self) -> str:
        return preformatted(str(self))


def preformatted(text: str) -> str:
    """Return HTML that shows a text as it is, for notebooks."""
    # Imported here: its table of characters would slow `import ipufit` down.
    import html

    return f"<pre>{html.escape(text)}</pre>"


VerboseLevel = Literal[0, 1, 2, "rich"]


def resolve_verbose(verbose: object) -> VerboseLevel:
    """0 silent, 1 a bar, 2 a line per epoch, "rich" a bar by rich.

    "auto" is 1 in a notebook and where stderr is a terminal, else 2; so is "rich" in a notebook and
    where there is no terminal.

    Raises:
        ConfigurationError: anything else, or rich is not installed.
    """
    if verbose == "rich" and importlib.util.find_spec("rich") is None:
        raise ConfigurationError(
            "verbose='rich' needs rich, which is not installed. Run: pip install ipufit[rich]"
        )
    if verbose in ("auto", "rich"):
        if notebook_shell() is not None:
            return 1
        if not sys.stderr.isatty():
            return 2
        return 1 if verbose == "auto" else "rich"
    if verbose in (0, 1, 2) and isinstance(verbose, int):
        return cast(VerboseLevel, int(verbose))
    raise ConfigurationError(
        "verbose must be 0 (silent), 1 (bar), 2 (one line an epoch), 'rich' or 'auto', got "
        f"{verbose!r}."
    )


def say(text: str) -> None:
    """Print a line where the progress is shown, without breaking what is drawn there."""
    # What a notebook gets by stderr looks like an error.
    print(text, file=sys.stderr if notebook_shell() is None else sys.stdout, flush=True)


def say_dev_run(notes: Mapping[str, Any], validates: bool) -> None:
    """Print that this is a trial run, and which callbacks it leaves out.

    Args:
        notes: of the run, for History.
        validates: whether there is a validation.
    """
    count = notes.get("fast_dev_run")
    if not count:
        return
    executions = f"{count} execution{'s' if count > 1 else ''}"
    left_out = notes["left_out_callbacks"]
    say(
        f"fast_dev_run: 1 epoch of {executions}{', also of validation' if validates else ''}; "
        + (f"without callbacks {', '.join(left_out)}" if left_out else "all callbacks run")
    )
