"""CUDA graphs through torch: the work that a function asks of the device, to be had again.

No GPU has run this module yet. It is written against torch's documentation of ``torch.cuda.graph``
and its source; :mod:`tests.tape` stands in for it on the CPU.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, ContextManager, Iterator, List, Optional, Protocol, Sequence

import torch

from ipufit.utils.random_streams import LOCK

__all__ = ["CudaGraphs", "Draw", "Graph", "GraphMaker", "why_no_graphs"]

# Says that what follows draws from the stream of random numbers at a place, which starts at a key.
Draw = Callable[[int, int], None]


class Graph(Protocol):
    """Captured work."""

    def replay(self, keys: Sequence[int]) -> None:
        """Ask the device for all of it again, with streams of random numbers from these keys."""
        ...


class GraphMaker(Protocol):
    """Captures work on one device."""

    def capture(self, function: Callable[[Draw], None], streams: int) -> Graph:
        """The work of a function, which is not done yet.

        Args:
            function: called once. What it makes stays where it is, and has values after a replay.
            streams: of random numbers that it draws from.
        """
        ...

    def aside(self) -> ContextManager[None]:
        """Where work is done that is captured later: libraries set themselves up there."""
        ...


def why_no_graphs() -> Optional[str]:
    """Why this torch captures nothing; None if it does."""
    # With this argument other threads, such as a loader's, may go on using the device.
    has_modes = "capture_error_mode" in inspect.signature(torch.cuda.graph.__init__).parameters
    has_generators = hasattr(torch.cuda.CUDAGraph, "register_generator_state")
    if has_modes and has_generators and hasattr(torch.Generator, "graphsafe_set_state"):
        return None
    return f"a CUDA graph of torch {torch.__version__} takes no generators of its own"


# A capture that failed may leave torch's allocator with a reference to its graph.
_FAILED: List[object] = []


class CudaGraphs:
    """Captures on one GPU; its graphs share memory for what they compute on the way.

    They may, because they run one after another, and what is read afterwards is held.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On the stream that captures, as torch asks for a warm-up."""
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def capture(self, function: Callable[[Draw], None], streams: int) -> Graph:
        """The work of a function; it waits for the device once."""
        graph: Any = torch.cuda.CUDAGraph()
        generators = [torch.Generator(self._device) for _ in range(streams)]
        for generator in generators:
            graph.register_generator_state(generator)
        default: Any = torch.cuda.default_generators[self._device.index]

        def draw(place: int, key: int) -> None:
            default.graphsafe_set_state(generators[place])

        outside = torch.cuda.current_stream(self._device)
        with LOCK, torch.cuda.device(self._device):
            own = default.graphsafe_get_state()
            try:
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    function(draw)
            except BaseException:
                _FAILED.append(graph)
                # torch leaves its stream in place, and generators as if they were still captured.
                torch.cuda.set_stream(outside)
                own = torch.Generator(self._device).set_state(own.get_state())
                raise
            finally:
                default.graphsafe_set_state(own)
        return _CudaGraph(graph, generators)


class _CudaGraph:
    def __init__(self, graph: Any, generators: Sequence[torch.Generator]) -> None:
        self._graph = graph
        self._generators = generators

    def replay(self, keys: Sequence[int]) -> None:
        for generator, key in zip(self._generators, keys):
            generator.manual_seed(key)
        self._graph.replay()
