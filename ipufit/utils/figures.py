"""A figure to draw on, where matplotlib is installed, and its place in a notebook."""

from __future__ import annotations

import io
import os
from typing import Any, Dict, Tuple, Union

from ipufit.errors import ConfigurationError
from ipufit.utils.console import notebook_shell


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


def save_figure(figure: Any, path: Union[str, os.PathLike[str], None], caller: str) -> Any:
    """Write the figure to a file, where a path is given; the suffix chooses the format.

    A cell of a notebook shows one that is not written, once, wherever in the cell it was drawn.

    Args:
        figure: what to write.
        path: of the file, or None.
        caller: the method that draws, for the message.

    Returns:
        The figure.

    Raises:
        ConfigurationError: it can't be written there.
    """
    shell = notebook_shell()
    if shell is not None:
        figure._ipython_display_ = _Output(figure)
    if path is None:
        if shell is not None:
            shell.events.register("post_execute", figure._ipython_display_.end_cell)
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


class _Output:
    """Shows a figure, which IPython calls for what ends a cell or is given to ``display``.

    Matplotlib itself shows those of pyplot alone, and only where pyplot was imported.
    """

    def __init__(self, figure: Any) -> None:
        self._figure = figure
        self._was_shown = False

    def __call__(self) -> None:
        shell = notebook_shell()
        self._was_shown = True
        data: Dict[str, object] = {"text/plain": repr(self._figure)}
        metadata: Dict[str, object] = {}
        # Formats that %matplotlib or the user has chosen.
        for kind, formatter in shell.display_formatter.formatters.items():
            value = formatter(self._figure) if kind.startswith("image/") else None
            if isinstance(value, tuple):
                value, metadata[kind] = value
            if value is not None:
                data[kind] = value
        if len(data) == 1:
            picture = io.BytesIO()
            self._figure.savefig(picture, format="png", dpi=100)
            data["image/png"] = picture.getvalue()
        shell.display_pub.publish(data, metadata)

    def end_cell(self) -> None:
        """Show the figure after the cell that has drawn it, unless that was done."""
        notebook_shell().events.unregister("post_execute", self.end_cell)
        if not self._was_shown:
            self()
