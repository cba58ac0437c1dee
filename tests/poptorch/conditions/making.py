"""Models, and what is done with them, of which something is refused."""

import json
import os
import tempfile
import zipfile
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch import ops, optim

ONE, TWO = torch.ones(1, 2), torch.ones(2, 2)
WITH_GRADIENT = torch.ones(2, requires_grad=True)


class Row(NamedTuple):
    """One condition.

    Attributes:
        name: the condition.
        act: meets it.
        kind: the exception's class.
        said: the words of PopTorch, or the first ones of ours.
        advice: the end of the text, or what it says to do.
    """

    name: str
    act: Callable[[], Any]
    kind: type
    said: str
    advice: str


class Net(nn.Module):
    """A layer, a buffer, and what is done with the layer's result."""

    def __init__(self, function=lambda net, x: x):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("state", torch.ones(2))
        self.function = function

    def forward(self, x, *more, **named):
        return self.function(self, self.layer(x), *more, **named)


class Fixed(nn.Module):
    """With a signature."""

    def forward(self, x, times=2):
        return x * times


class ScalarNet(nn.Module):
    """A parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return ops.identity_loss(x * self.w, "sum")


def same(net, x, *more, **named):
    """The layer's result."""
    return x


def loss(net, x):
    """Its sum, as a loss."""
    return ops.identity_loss(x, "sum")


def opts(change=lambda options: None):
    """Options, changed."""
    made = poptorch.Options()
    change(made)
    return made


def infer(function, *args, change=lambda options: None):
    """Compile a forward, and run it."""
    return poptorch.inferenceModel(Net(function), opts(change))(*(args or (ONE,)))


def train(function, *args, change=lambda options: None):
    """Compile a training model, and run it."""
    return poptorch.trainingModel(Net(function), opts(change))(*(args or (ONE,)))


def trained(change=lambda options: None, make=lambda p: optim.SGD(p, lr=0.1), run=True):
    """A training model that has run, its module and its optimizer."""
    net = Net(loss)
    optimizer = make(net.parameters())
    model = poptorch.trainingModel(net, opts(change), optimizer)
    if run:
        model(ONE)
    return model, net, optimizer


def next_optimizer(make, first=lambda p: optim.SGD(p, lr=0.1)):
    """Put another optimizer in the place of the first one."""
    model, net, _ = trained(make=first)
    model.setOptimizer(make(net.parameters()))


def call(*args, **kwargs):
    """Arguments."""
    return args, kwargs


def later(first, then):
    """Call a model again, in another way."""
    model = poptorch.inferenceModel(Net(same))
    model(*first[0], **first[1])
    model(*then[0], **then[1])


# Modules and weights.


def overwritten(name):
    """A forward that does not keep its buffer."""

    def forward(net, x):
        if name == "remove":
            del net.state
        else:
            net.state = net.state + 1
        return x

    return forward


def changed_state(net, x):
    net.state.add_(1)
    return x


def subclassed():
    """A module with a buffer that is no plain tensor."""

    class Own(torch.Tensor):
        pass

    net = Net()
    net.register_buffer("own", torch.ones(2).as_subclass(Own))
    return net


def wrapped_twice():
    net = Net(loss)
    first = poptorch.trainingModel(net)
    return poptorch.trainingModel(net), first


def detached_twice():
    model = trained()[0]
    model.detachFromDevice()
    model.detachFromDevice()


def grouped_scalar():
    model = poptorch.trainingModel(ScalarNet(), opts(lambda o: o.replicationFactor(2)))
    groups, mode = poptorch.CommGroupType.NoGrouping, poptorch.VariableRetrievalMode.OnePerGroup
    model.w.replicaGrouping(groups, 0, mode)
    model(TWO)


# Data.


class Nothing(torch.utils.data.Dataset):
    """Without elements."""

    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError


class Failing(torch.utils.data.Dataset):
    """That can't be read."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise OSError("lost")


class Stream(torch.utils.data.IterableDataset):
    """Without a length."""

    def __iter__(self):
        return iter([torch.ones(1)])


def loader(change=lambda options: None, data=8, **kwargs):
    """A loader of so many elements, or of a dataset."""
    rows = data if not isinstance(data, int) else torch.utils.data.TensorDataset(torch.ones(data))
    return poptorch.DataLoader(opts(change), rows, **kwargs)


def sampler():
    return torch.utils.data.BatchSampler(range(8), 2, True)


def two_processes(options):
    options.Distributed.configureProcessId(0, 2)


def accessor_of_asynchronous():
    asynchronous = loader(mode=poptorch.DataLoaderMode.Async)
    try:
        poptorch.AsynchronousDataAccessor(asynchronous)
    finally:
        asynchronous.terminate()


# Options and blocks.


def frozen():
    options = opts()
    poptorch.inferenceModel(Net(), options)
    options.deviceIterations(2)


def option_file(line):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "options")
        with open(path, "w") as file:
            file.write(line)
        opts().loadFromFile(path)


def strategy(make):
    """A change of options: a strategy made anew, since it takes notes of the blocks."""
    return lambda options: options.setExecutionStrategy(make())


def same_parity(options):
    made = poptorch.ParallelPhasedExecution(poptorch.Phase("a"), poptorch.Phase("b"))
    made.phase(0).ipus(0)
    made.phase(1).ipus(0)
    options.setExecutionStrategy(made)


def sharded_io(options):
    options.setExecutionStrategy(poptorch.ShardedExecution())
    options.TensorLocations.numIOTiles(32)


def blocks(net, x):
    """Two blocks on two IPUs."""
    with poptorch.Block("a", ipu_id=0):
        x = x + 1
    with poptorch.Block("b", ipu_id=1):
        return x * 2


def trained_blocks(net, x):
    return ops.identity_loss(blocks(net, x), "sum")


def after_block(net, x):
    with poptorch.Block("a", ipu_id=0):
        x = x + 1
    return x * 2


def in_block(x):
    """Two blocks without IPUs."""
    with poptorch.Block("a"):
        x = x + 1
    with poptorch.Block("b"):
        return x * 2


def twice_begun():
    poptorch.BeginBlock(poptorch.BeginBlock(nn.Linear(1, 1), "a"), "b")


def overlapped(x):
    return ops.set_overlap_for_output(x, poptorch.OverlapMode.OverlapAccumulationLoop)


# Operators and files.


def nested_multiconv(net, x):
    with ops.MultiConv(), ops.MultiConv():
        return x


def empty_multiconv(net, x):
    with ops.MultiConv():
        return x + 1


def loaded(version=None):
    """A file without a model, of this version or another."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model")
        poptorch.inferenceModel(Net()).compileAndExport(path, ONE, export_model=False)
        if version is not None:
            with zipfile.ZipFile(path) as file:
                parts = {name: file.read(name) for name in file.namelist()}
            metadata = json.loads(parts["metadata.json"])
            metadata["values"]["version"] = version
            parts["metadata.json"] = json.dumps(metadata).encode()
            with zipfile.ZipFile(path, "w") as file:
                for name, content in parts.items():
                    file.writestr(name, content)
        poptorch.load(path)
