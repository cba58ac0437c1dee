"""A figure to draw on, where matplotlib is installed."""

from __future__ import annotations

import os
from typing import Any, Tuple

from ipufit.errors import ConfigurationError

__all__ = ["new_figure", "saved"]


def new_figure(caller: str, size: Tuple[float, float]) -> Any:
    """A matplotlib ``Figure`` that needs no window.

    Args:
        caller: the method that draws, for the message.
        size: width and height in inches.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            f"{caller} needs matplotlib, which is not installed. Run: pip install ipufit[plot]"
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def saved(figure: Any, path: Any, caller: str) -> Any:
    """Write the figure to a file, where a path is given; the suffix chooses the format.

    Args:
        figure: what to write.
        path: of the file, or None.
        caller: the method that draws, for the message.

    Returns:
        The figure.

    Raises:
        ConfigurationError: it can't be written there.
    """
    if path is None:
        return figure
    try:
        figure.savefig(os.fspath(path), dpi=120)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{caller} must be given the path of a picture in a folder that is there, such as "
            f"'picture.png', got {path!r}: {str(error).rstrip('.')}. Leave it out to get the "
            "figure alone."
        ) from error
    return figure
