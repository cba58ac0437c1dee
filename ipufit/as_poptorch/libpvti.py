"""A stand-in for ``libpvti``, PopVision's trace instrumentation: spans go to torch's profiler.

The names are those of the API reference of libpvti, which writes a file of its own for PopVision.
"""

from typing import Any, Dict, List, Sequence, Tuple

from ipufit.poptorch.profiling import Channel as createTraceChannel
from ipufit.utils.poptorch_sdk import refuse, stands_in

__all__ = ["Graph", "HeatmapDouble", "Tracepoint", "createTraceChannel", "instrument"]

stands_in(__name__, "whose spans torch.profiler shows, and which keeps no graphs")


def instrument(obj: object, methods: Sequence[str], channel: Any) -> None:
    """Make every call of these methods of an object a span of their name."""
    channel.instrument(obj, *methods)


_BEGUN: "Dict[Tuple[object, str], Tracepoint]" = {}


class Tracepoint:
    """A span of time: the block of a ``with`` statement.

    Args:
        channel: that it belongs to.
        label: its name.
    """

    def __init__(self, channel: Any, label: str) -> None:
        self._span = channel.tracepoint(label)

    def __enter__(self) -> "Tracepoint":
        self._span.__enter__()
        return self

    def __exit__(self, *fault: object) -> None:
        self._span.__exit__(*fault)

    @staticmethod
    def begin(channel: object, label: str) -> None:
        """Begin a span that ``end`` ends."""
        _BEGUN[channel, label] = Tracepoint(channel, label).__enter__()

    @staticmethod
    def end(channel: object, label: str) -> None:
        """End a span; does nothing where none of this name has begun, as libpvti."""
        if (channel, label) in _BEGUN:
            _BEGUN.pop((channel, label)).__exit__(None, None, None)

    @staticmethod
    def event(channel: object, label: str) -> None:
        """Mark a moment, by an empty span."""
        with Tracepoint(channel, label):
            pass


class _Series:
    """A line of a graph."""

    def add(self, value: float) -> None:
        """Keep no value."""


class Graph:
    """Numbers over time.

    Args:
        name: of the graph.
        unit: of its values.
    """

    def __init__(self, name: str, unit: str) -> None:
        pass

    def addSeries(self, name: str) -> _Series:
        """Return a line of the graph."""
        return _Series()


class HeatmapDouble:
    """A histogram over time.

    Args:
        name: of the histogram.
        bin_edges: between its bins, ascending.
        unit: of its values.
    """

    def __init__(self, name: str, bin_edges: List[float], unit: str) -> None:
        pass

    def add(self, values: List[float]) -> None:
        """Keep none of these values."""


def __getattr__(name: str) -> object:
    """Refuse every other name of libpvti, and say where its like is.

    Raises:
        AttributeError: always.
    """
    refuse("libpvti", name, __all__)
