"""Memory that programs free stays in the process while they run, and leaves it when they end.

What a program holds, it frees when it ends, whoever still refers to it.
"""

import contextlib
import gc
import os
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import ipufit
from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.engines.embedded.passes import cpu_kernels, select_kernels, simplify
from ipufit.utils import malloc_policy

# All name the engine whose memory they look at.
pytestmark = pytest.mark.both_engines

needs_glibc = pytest.mark.skipif(malloc_policy._glibc() is None, reason="another C library")
tells = pytest.mark.skipif(
    not hasattr(malloc_policy._glibc(), "mallinfo2"), reason="a library that does not tell"
)

# What the C library tells of itself, to a script as to this process.
MALLINFO = """
import ctypes
import torch

class Told(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost",
    )]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Told
library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
"""

# Of 16 MiB asked for while fit runs, more than any hole in the heap has: whether they lie apart
# from it, and how many the heap gives back to the system when they are freed. The C library is
# asked itself: what torch makes beside a tensor may lie above it, and keep it from the heap's end.
SCRIPT = (
    MALLINFO
    + """
import ipufit
from ipufit.callbacks import LambdaCallback

torch.set_num_threads(1)
model = ipufit.Model(torch.nn.Linear(64, 5), engine="embedded")
model.compile("sgd", "cross_entropy")
x, y = torch.rand(8, 64), torch.arange(8) % 5

def look(batch, logs=None):
    before = library.mallinfo2()
    block = library.malloc(2**24)
    inside = library.mallinfo2()
    library.free(block)
    after = library.mallinfo2()
    apart, given_back = inside.hblks - before.hblks, inside.arena - after.arena
    print(apart * 100 + given_back // 2**20)

model.fit(x, y, batch_size=8, verbose=0, callbacks=[LambdaCallback(on_train_batch_end=look)])
"""
)


# Of 16 MiB asked for in between, and afterwards: whether they lie apart from the heap. A tensor of
# less might find a hole in it, and what torch makes beside one has pages of its own.
AT_ONCE = (
    MALLINFO
    + """
from ipufit.utils.malloc_policy import free_at_once, keep_freed_memory

def lies_apart():
    before = library.mallinfo2().hblks
    block = library.malloc(2**24)
    blocks = library.mallinfo2().hblks - before
    library.free(block)
    return blocks

keep_freed_memory()
try:
    with free_at_once():
        between = lies_apart()
        raise ValueError
except ValueError:
    pass
print(between * 10 + lies_apart())
"""
)


def run(script, **variables):
    """What a script prints, without a will of the environment's own."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("MALLOC")}
    environment.pop("GLIBC_TUNABLES", None)
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.long
@tells
def test_updates_get_no_new_pages():
    """What is freed and asked for again in every update stays in the heap."""
    assert run(SCRIPT) == 0


@pytest.mark.long
@tells
def test_what_the_environment_says_of_memory_holds():
    """With glibc's own threshold fixed low, a large block lies apart and goes back."""
    assert run(SCRIPT, MALLOC_MMAP_THRESHOLD_="131072") == 100
    assert run(SCRIPT, MALLOC_MMAP_THRESHOLD_=str(2**25), MALLOC_TRIM_THRESHOLD_="131072") == 16


@pytest.mark.skipif(cpu_kernels._linear() is None, reason="this torch has no other products")
def test_trying_other_kernels_leaves_no_memory_behind(monkeypatch):
    """What two programs took to run once is handed back before training begins."""
    order = []
    monkeypatch.setattr(
        select_kernels, "give_back_freed_memory", lambda: order.append("given back")
    )
    compare = select_kernels._compare

    def tried(*arguments):
        order.append("tried")
        compare(*arguments)

    monkeypatch.setattr(select_kernels, "_compare", tried)
    # Which products are faster here is measured.
    monkeypatch.setattr(cpu_kernels, "_fastest", lambda *arguments: cpu_kernels._STRAIGHT)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 5))
    model = ipufit.Model(net, engine="embedded")
    model.compile("sgd", "cross_entropy", jit="kernels")
    begins = ipufit.callbacks.LambdaCallback(on_train_begin=lambda logs: order.append("begins"))
    x, y = torch.rand(128, 64), torch.arange(128) % 5
    model.fit(x, y, batch_size=128, verbose=0, callbacks=[begins])
    assert order == ["tried", "given back", "begins"]


@needs_glibc
def test_what_is_given_back_is_all_that_is_free(monkeypatch):
    """The C library is asked to keep nothing at the end of its heap."""
    asked = []

    class Library:
        def mallopt(self, *arguments):
            return 1

        def malloc_trim(self, kept):
            asked.append(kept)

    monkeypatch.setattr(malloc_policy, "_glibc", Library)
    malloc_policy.give_back_freed_memory()
    assert asked == [0]


@pytest.mark.long
@tells
def test_what_comes_once_stays_out_of_the_heap():
    """A block lies apart from it meanwhile, and none afterwards, even after an error."""
    assert run(AT_ONCE) == 10


@pytest.mark.long
def test_other_kernels_are_tried_outside_of_the_heap(monkeypatch):
    """Where they would leave holes that training can't fill."""
    inside = []

    @contextlib.contextmanager
    def noted():
        inside.append(True)
        yield
        inside.append(False)

    compare = select_kernels._compare

    def asked(*args):
        assert inside == [True]
        compare(*args)

    monkeypatch.setattr(select_kernels, "free_at_once", noted)
    monkeypatch.setattr(select_kernels, "_compare", asked)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 3))
    model = ipufit.Model(net, engine="embedded")
    model.compile("sgd", "cross_entropy", jit="kernels")
    model.fit(torch.rand(64, 1, 16, 16), torch.arange(64) % 3, batch_size=64, verbose=0)
    assert inside == [True, False]


def test_another_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(malloc_policy, "_glibc", lambda: None)
    malloc_policy.keep_freed_memory.cache_clear()
    assert not malloc_policy.keep_freed_memory()
    with malloc_policy.free_at_once():
        pass
    malloc_policy.give_back_freed_memory()
    malloc_policy.keep_freed_memory.cache_clear()


def test_a_system_without_a_library_to_load(monkeypatch):
    def fails(name):
        raise TypeError("no such library")

    monkeypatch.setattr(malloc_policy.ctypes, "CDLL", fails)
    malloc_policy._glibc.cache_clear()
    assert malloc_policy._glibc() is None
    malloc_policy._glibc.cache_clear()


@pytest.fixture
def without_collections():
    """Reference cycles live on."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def sizes_of_large_tensors():
    """Bytes of each piece of memory of 100 KB or more that a tensor lies in."""
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.layout is torch.strided:
            storage = each.untyped_storage()
            # Several may look at one piece of memory.
            found[storage.data_ptr()] = storage.nbytes()
    return sorted(size for size in found.values() if size >= 100_000)


@pytest.mark.few
@pytest.mark.parametrize("way", [{}, {"jit": "graph"}, {"run_eagerly": True}])
@pytest.mark.parametrize("optimizer", ["adam", torch.optim.Rprop])
def test_a_program_that_ended_holds_no_state(optimizer, way, without_collections):
    """A second copy of Adam's state is twice the weights, and garbage is counted by objects."""
    before = sizes_of_large_tensors()
    net = nn.Linear(256, 256, bias=False)
    if callable(optimizer):
        optimizer = optimizer(net.parameters())
    model = ipufit.Model(net, engine="embedded")
    model.compile(optimizer, "mse", **way)
    x = torch.rand(8, 256)
    kept = []
    for _ in range(3):
        model.fit(x, x, batch_size=4, verbose=0)
        kept.append(sizes_of_large_tensors())
    weights_and_two_states = [256 * 256 * 4] * 3
    assert kept == [sorted([*before, *weights_and_two_states])] * 3


@pytest.mark.long
@pytest.mark.parametrize(("optimizer", "states"), [("adam", 2), ("rmsprop", 1)])
def test_a_program_that_runs_holds_its_state_once(optimizer, states, without_collections):
    """Torch's optimizer has it too, at the end of each epoch, and from the start of a later fit."""
    before = sizes_of_large_tensors()
    net = nn.Linear(256, 256, bias=False)
    model = ipufit.Model(net, engine="embedded")
    model.compile(optimizer, "mse")
    x = torch.rand(8, 256)
    kept = []

    def look(*args):
        assert model.optimizer.state
        kept.append(sizes_of_large_tensors())

    at_ends = ipufit.callbacks.LambdaCallback(on_epoch_end=look)
    model.fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=[at_ends])
    at_begins = ipufit.callbacks.LambdaCallback(on_train_batch_begin=look)
    model.fit(x, x, batch_size=4, verbose=0, callbacks=[at_begins])
    assert kept == [sorted([*before, *[256 * 256 * 4] * (1 + states)])] * 4


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 1), ("adam", 2), ("amsgrad", 3)])
@pytest.mark.parametrize("is_alone", [False, True])
def test_states_change_hands_one_after_another(
    is_alone, optimizer, states, without_collections, monkeypatch
):
    """A fit takes them over from torch's optimizer, and gives them back at its end.

    Those of a parameter that is alone in its block stay where they are.
    """
    before = len(sizes_of_large_tensors())
    net = nn.Linear(256, 256, bias=not is_alone)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "adam": torch.optim.Adam,
        "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    }
    model = ipufit.Model(net, engine="embedded")
    model.compile(make[optimizer](net.parameters()), "mse", jit="graph")
    x, counted = torch.rand(8, 256), []
    for name in ("keep", "for_torch"):
        method = getattr(StateMemory, name)

        def counting(memory, tensor, name=name, method=method):
            counted.append((name, len(sizes_of_large_tensors()) - before))
            return method(memory, tensor)

        monkeypatch.setattr(StateMemory, name, counting)
    for _ in range(2):
        counted.clear()
        model.fit(x, x, batch_size=4, verbose=0)
    weights = 1
    taken = [("keep", weights + states + (not is_alone))] * states
    # That of the weight, then that of the bias beside its copy.
    given = [("for_torch", weights + states), ("for_torch", weights + states + 1)] * states
    assert counted == taken + ([] if is_alone else given)


class Scaled(nn.Module):
    """Weights that are each too small for a block of their own, by the megabyte."""

    def __init__(self, megabytes):
        super().__init__()
        weights = [nn.Parameter(torch.ones(2**18 - 1)) for _ in range(megabytes)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x):
        return x * sum(weight.mean() for weight in self.weights)


@pytest.mark.parametrize(("megabytes", "searches"), [(8, 1), (40, 3)])
def test_the_heap_is_searched_for_what_large_states_were_in(megabytes, searches, monkeypatch):
    """Of each state of Adam, as a later fit takes it over; and in any case at the end."""
    searched = []
    library = types.SimpleNamespace(malloc_trim=searched.append)
    model = ipufit.Model(Scaled(megabytes), engine="embedded")
    model.compile("adam", "mse", jit="graph")
    x, y = torch.rand(1, 1), torch.rand(1, 1)
    model.fit(x, y, verbose=0)
    monkeypatch.setattr(malloc_policy, "_glibc", lambda: library)
    monkeypatch.setattr(malloc_policy, "keep_freed_memory", lambda: True)
    model.fit(x, y, verbose=0)
    assert searched == [0] * searches


@pytest.fixture
def pool(monkeypatch):
    """Tensors of 8 elements and more are large, and kept."""
    monkeypatch.setattr(malloc_policy, "_KEEPING", (2**30, 31))
    monkeypatch.setattr(malloc_policy, "keep_freed_memory", lambda: True)
    monkeypatch.setattr(malloc_policy, "_pool", [])
    return malloc_policy._pool


def flat(size=8):
    return malloc_policy.reused_empty(size, torch.float32, torch.device("cpu"))


needs_counts = pytest.mark.skipif(not malloc_policy._COUNTS_USES, reason="uses are not counted")


@needs_counts
def test_large_memory_of_which_nothing_is_left_is_used_again(pool):
    place = flat().data_ptr()
    for _ in range(3):
        assert flat().data_ptr() == place
    assert flat().shape == (8,)
    assert len(pool) == 1


@needs_counts
def test_memory_that_anything_looks_at_stays(pool):
    views = []
    for number in range(4):
        whole = flat().fill_(number)
        views.append(whole.view(2, 4)[1])
    assert [view.tolist() for view in views] == [[number] * 4 for number in range(4)]
    # More at once than a sum and what is added to it are not kept.
    assert len(pool) == 2
    assert flat(16).numel() == 16


def test_small_memory_is_the_c_librarys(pool):
    assert flat(7).shape == (7,)
    assert pool == []


@needs_counts
@pytest.mark.parametrize("accumulation", [1, 3])
def test_gradients_have_the_memory_of_those_before(pool, accumulation, monkeypatch):
    """The bits stay; what is kept ends with the fit."""
    monkeypatch.setattr(simplify, "_SMALLEST_WHOLE", 8)
    used = []

    def watched(*arguments):
        new = malloc_policy.reused_empty(*arguments)
        used.append(new.data_ptr())
        return new

    weights = []
    for pooled in (watched, torch.empty):
        monkeypatch.setattr(simplify, "reused_empty", named(pooled))
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
        model = ipufit.Model(net, engine="embedded")
        model.compile("adam", "cross_entropy", jit="graph")
        x, y = torch.rand(48, 1, 6, 6), torch.arange(48) % 5
        plan = {"gradient_accumulation": accumulation, "device_iterations": 2}
        model.fit(x, y, batch_size=4, seed=0, verbose=0, **plan)
        weights.append([*net.parameters()])
    assert len(used) == 12
    assert len(set(used)) <= 2
    assert pool == []
    assert all(torch.equal(*pair) for pair in zip(*weights))


def named(function):
    """What a graph can call by its name."""

    def reused_empty(size, dtype, device):
        if function is torch.empty:
            return torch.empty(size, dtype=dtype, device=device)
        return function(size, dtype, device)

    return reused_empty
