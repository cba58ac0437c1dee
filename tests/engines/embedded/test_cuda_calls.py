"""What is asked of torch.cuda, and in which order, with stand-ins that write it down.

This shows that calls match what is documented, not what a GPU makes of them.
"""

import contextlib
import types

import pytest
import torch

from ipufit.engines.embedded import cuda_graphs
from ipufit.engines.embedded.cuda_graphs import CudaGraphs

pytestmark = pytest.mark.both_engines

DEVICE = torch.device("cuda", 0)


class Stream:
    """A stream by name."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class Generator:
    """A generator whose state is another one."""

    def __init__(self, log, name):
        self.log, self.name, self.state = log, name, name

    def graphsafe_get_state(self):
        return Generator(self.log, self.state)

    def graphsafe_set_state(self, other):
        self.state = other.name
        self.log.append(f"draw from {other.name}")

    def get_state(self):
        return f"values of {self.name}"

    def set_state(self, state):
        self.log.append(f"{self.name} takes {state}")
        return self

    def manual_seed(self, key):
        self.log.append(f"{self.name} starts at {key}")


class Graph:
    """A graph that knows its generators."""

    def __init__(self, log):
        self.log = log

    def register_generator_state(self, generator):
        self.log.append(f"register {generator.name}")

    def replay(self):
        self.log.append("replay")


@pytest.fixture
def cuda(monkeypatch):
    """The calls so far, and what is current."""
    log = []
    world = types.SimpleNamespace(log=log, stream=Stream(log, "main"))
    names = iter("abc")

    @contextlib.contextmanager
    def graph(graph, pool, stream, capture_error_mode):
        log.append(f"begin on {stream.name}, pool {pool}, {capture_error_mode}")
        world.stream = stream
        yield
        # As torch: after an error in between, what follows is not reached.
        log.append("end")
        world.stream = outside

    @contextlib.contextmanager
    def using(stream):
        before, world.stream = world.stream, stream
        yield
        world.stream = before

    outside = world.stream
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Stream", lambda device: Stream(log, "side"))
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: "shared")
    monkeypatch.setattr(cuda, "CUDAGraph", lambda: Graph(log))
    monkeypatch.setattr(cuda, "graph", graph)
    monkeypatch.setattr(cuda, "stream", using)
    monkeypatch.setattr(cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "current_stream", lambda device: world.stream)
    monkeypatch.setattr(cuda, "set_stream", lambda stream: setattr(world, "stream", stream))
    world.default = Generator(log, "default")
    monkeypatch.setattr(cuda, "default_generators", (world.default,))
    monkeypatch.setattr(torch, "Generator", lambda device: Generator(log, next(names)))
    monkeypatch.setattr(cuda_graphs, "_FAILED", [])
    return world


def test_every_stream_of_random_numbers_is_registered_and_seeded(cuda):
    """Before the capture and before each replay, as torch asks; the user's stays in its place."""
    maker = CudaGraphs(DEVICE)

    def work(draw):
        assert cuda.stream.name == "side"
        draw(1, 70)
        draw(0, 71)

    graph = maker.capture(work, 2)
    graph.replay([5, 6])
    assert cuda.log == [
        "register a",
        "register b",
        "begin on side, pool shared, thread_local",
        "draw from b",
        "draw from a",
        "end",
        "draw from default",
        "a starts at 5",
        "b starts at 6",
        "replay",
    ]
    assert cuda.stream.name == "main"


def test_work_that_draws_nothing_has_no_streams(cuda):
    CudaGraphs(DEVICE).capture(lambda draw: None, 0).replay([])
    assert cuda.log == [
        "begin on side, pool shared, thread_local",
        "end",
        "draw from default",
        "replay",
    ]


def test_a_failed_capture_leaves_stream_and_random_numbers_as_they_were(cuda):
    """torch leaves its stream in place, a generator that draws no more, and a graph in use."""

    def work(draw):
        draw(0, 7)
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphs(DEVICE).capture(work, 1)
    assert cuda.stream.name == "main"
    assert cuda.log[-2:] == ["b takes values of default", "draw from b"]
    assert len(cuda_graphs._FAILED) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_warm_up_is_between_two_waits(fails, cuda):
    raised = pytest.raises(KeyError) if fails else contextlib.nullcontext()
    with raised, CudaGraphs(DEVICE).aside():
        cuda.log.append(f"work on {cuda.stream.name}")
        if fails:
            raise KeyError
    assert cuda.log == ["side waits for main", "work on side", "main waits for side"]
