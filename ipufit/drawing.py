"""A figure to draw on, where matplotlib is installed."""

from __future__ import annotations

from typing import Any, Tuple

from ipufit.errors import ConfigurationError

__all__ = ["new_figure"]


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
