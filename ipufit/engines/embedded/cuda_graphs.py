"""CUDA graphs through torch: whether executions are captured, what of, and from which memory.

What a captured graph reads stays where it is; new values are put there before a replay.
Where there is no GPU, :mod:`tests.tape` stands in for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Any, Callable, Iterator, List, Optional, Protocol, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.compile_arguments import AUTO, CUDAGRAPH
from ipufit.engines.program import ProgramSpec
from ipufit.errors import ConfigurationError
from ipufit.utils.random_streams import LOCK

# Says that what follows draws from the stream of random numbers at a place, which starts at a key.
Draw = Callable[[int, int], None]


class CapturedGraph(Protocol):
    """Captured work."""

    def replay(self, keys: Sequence[int]) -> None:
        """Ask the device for all of it again, with streams of random numbers from these keys."""


class GraphMaker(Protocol):
    """Captures work on one device."""

    def capture(self, function: Callable[[Draw], None], streams: int) -> CapturedGraph:
        """The work of a function, which is not done yet.

        Args:
            function: called once. What it makes stays where it is, and has values after a replay.
            streams: of random numbers that it draws from.
        """

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Where work is done that is captured later: libraries set themselves up there."""


def why_no_graphs() -> Optional[str]:
    """Why this torch captures nothing; None if it does."""
    # With this argument other threads, such as a loader's, may go on using the device.
    has_modes = "capture_error_mode" in inspect.signature(torch.cuda.graph.__init__).parameters
    has_generators = hasattr(torch.cuda.CUDAGraph, "register_generator_state")
    if has_modes and has_generators and hasattr(torch.Generator, "graphsafe_set_state"):
        return None
    return f"CUDA graphs of torch {torch.__version__} can't have their own random generators"


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

    def capture(self, function: Callable[[Draw], None], streams: int) -> CapturedGraph:
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
            user_state = default.graphsafe_get_state()
            try:
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    function(draw)
            except BaseException:
                _FAILED.append(graph)
                # torch leaves its stream in place, and generators as if they were still captured.
                torch.cuda.set_stream(outside)
                user_state = torch.Generator(self._device).set_state(user_state.get_state())
                raise
            finally:
                default.graphsafe_set_state(user_state)
        return _CudaGraph(graph, generators)


class _CudaGraph:
    def __init__(self, graph: Any, generators: Sequence[torch.Generator]) -> None:
        self._graph = graph
        self._generators = generators

    def replay(self, keys: Sequence[int]) -> None:
        for generator, key in zip(self._generators, keys):
            generator.manual_seed(key)
        self._graph.replay()


def check_cudagraph(module: nn.Module) -> None:
    """Make sure that CUDA graphs can be captured of this module's work.

    Raises:
        ConfigurationError: it is not on a GPU, or torch is too old.
    """
    for parameter in module.parameters():
        if parameter.device.type != "cuda":
            raise ConfigurationError(
                f"jit='cudagraph' needs a module on a CUDA device, but {type(module).__name__} is "
                f"on {parameter.device}. Move it with module.cuda(), or use jit='auto'."
            )
    why_not = why_no_graphs()
    if why_not is not None:
        raise ConfigurationError(
            f"jit='cudagraph' can't work here: {why_not}. Use jit='auto', or a newer torch."
        )


def graph_maker(
    spec: ProgramSpec, device: torch.device, tape: Optional[Callable[[torch.device], GraphMaker]]
) -> Optional[GraphMaker]:
    """Choose what captures the executions of a program; None where they run as recorded."""
    # What processes send each other goes through the host.
    if spec.config.jit not in (AUTO, CUDAGRAPH) or spec.processes.is_distributed:
        return None
    if tape is not None:
        return tape(device)
    if device.type != "cuda" or why_no_graphs() is not None:
        return None
    return CudaGraphs(device)


# As CUDA's own allocations: kernels choose wider loads, and cuBLAS other algorithms, by alignment.
_ALIGNMENT = 512


def keeps_its_form(tensor: Tensor, device: torch.device) -> bool:
    """Tell whether a copy on the device has the strides that the tensor has there when traced."""
    return tensor.device != device or tensor.stride() == torch.empty_like(tensor).stride()


@dataclasses.dataclass(frozen=True)
class Sent:
    """Values on their way to static memory.

    Attributes:
        static: where they go.
        memory: where they arrive, on the device.
        arrived: the event of it; None where the device is the host.
    """

    static: Static
    memory: Tensor
    arrived: Any


class Static:
    """Tensors side by side in one piece of the device's memory, filled in one copy.

    Args:
        like: what they look like.
        device: where they are.

    Attributes:
        tensors: they.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        self._places: List[Tuple[slice, Tensor]] = []
        size = 0
        for tensor in like:
            form = torch.empty_like(tensor, device="meta")
            end = size + form.numel() * form.element_size()
            self._places.append((slice(size, end), form))
            size = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._size = size
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._bytes)
        self._is_cuda = device.type == "cuda"
        self._aside: Any = None

    def _views(self, memory: Tensor) -> List[Tensor]:
        return [
            memory[place].view(form.dtype).as_strided(form.shape, form.stride())
            for place, form in self._places
        ]

    def fill(self, values: Sequence[Tensor]) -> None:
        """Put values there, without waiting for the device."""
        if any(value.device.type != "cpu" for value in values):
            for tensor, value in zip(self.tensors, values):
                tensor.copy_(value, non_blocking=True)
            return
        self._bytes.copy_(self._packed(values), non_blocking=True)

    def send(self, values: Sequence[Tensor]) -> Sent:
        """Start to bring values from the host while the device works on; from any thread."""
        host = self._packed(values)
        if not self._is_cuda:
            return Sent(self, host, None)
        if self._aside is None:
            device = self._bytes.device
            self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._aside):
            memory = torch.empty_like(self._bytes).copy_(host, non_blocking=True)
            return Sent(self, memory, self._aside.record_event())

    def receive(self, sent: Sent) -> None:
        """Put there what was sent, as soon as it has arrived; the host does not wait."""
        if sent.arrived is not None:
            present = torch.cuda.current_stream(self._bytes.device)
            present.wait_event(sent.arrived)
            sent.memory.record_stream(present)
        self._bytes.copy_(sent.memory)

    def _packed(self, values: Sequence[Tensor]) -> Tensor:
        """Values on the host as one tensor, from which the device reads directly."""
        memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._is_cuda)
        for tensor, value in zip(self._views(memory), values):
            tensor.copy_(value)
        return memory
