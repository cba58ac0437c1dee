"""What the tests of bad input share: a small model, data, and "the error has changed nothing"."""

import contextlib
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.engines.embedded.engine import EmbeddedEngine

SEVERAL = (
    "For several inputs yield ((first, second), target), ({'name': first, ...}, target) or one "
    "dict of all; if the module computes its own loss, use compile(loss=None)."
)
EMPTY = (
    "must yield at least one batch, but it is empty. Check the dataset's length and the sampler."
)


class Net(nn.Module):
    """Has all that an error could spoil: statistics, random numbers and a part set to eval mode."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.frozen_norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.frozen_norm.eval()

    def forward(self, x):
        return self.head(self.frozen_norm(self.drop(self.norm(self.body(x)))))


def batches(count, size=4, seed=0):
    """Inputs and targets for a regression."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randn(size, 3, generator=generator))
        for _ in range(count)
    ]


class Samples(Dataset):
    """Whatever it is given, sample by sample."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Stream(IterableDataset):
    """The same without indices."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Batches:
    """An iterable of batches that is no list."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


def loader(samples=12, size=4, **options):
    """A DataLoader of the same kind of data."""
    x, y = batches(1, samples)[0]
    return DataLoader(TensorDataset(x, y), batch_size=size, **options)


def momentum(parameters):
    """An optimizer with state."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def compiled(net=None, loss="mse", metrics=None, **options):
    """A model that is ready for fit."""
    engine = options.pop("engine", "auto")
    model = ipufit.Model(Net() if net is None else net, engine=engine)
    model.compile(options.pop("optimizer", momentum), loss, metrics=metrics, **options)
    return model


def fit(model, x=None, **options):
    """``fit`` that prints nothing and draws nothing from torch's generator."""
    return model.fit(loader() if x is None else x, **{"seed": 7, "verbose": 0, **options})


class Told(Callback):
    """Remembers the hooks that were called, and may act in one of them.

    Args:
        actions: by hook: called with the callback and the hook's first argument.
    """

    def __init__(self, **actions):
        super().__init__()
        self.hooks = []
        self._actions = actions

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hook(*args):
            self.hooks.append(name)
            if name in self._actions:
                self._actions[name](self, args[0])

        return hook


class Watched(EmbeddedEngine):
    """Counts what is built and closed, and keeps the state of the last program.

    Args:
        before_run: called with the program and the index of the execution.
        before_close: called without arguments.
        late: look at losses after an execution only.
    """

    def __init__(self, before_run=None, before_close=None, late=False):
        super().__init__()
        self.built = self.closed = 0
        self.as_device = late
        self._before_run = before_run
        self._before_close = before_close

    def build(self, spec):
        program = super().build(spec)
        self.built += 1
        run, close, executions = program.run, program.close, iter(range(10**6))

        def watched_run(batch):
            if self._before_run:
                self._before_run(program, next(executions))
            return run(batch)

        def watched_close():
            self.closed += 1
            self.left = program.read_state()
            if self._before_close:
                self._before_close()
            close()

        program.run, program.close = watched_run, watched_close
        return program


def flat(value, path=""):
    """Leaves of nested dicts and lists by path, tensors copied."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {path: value.detach().clone() if isinstance(value, torch.Tensor) else value}
    return {k: v for key, part in items for k, v in flat(part, f"{path}/{key}").items()}


def state(model):
    """Weights, buffers and, once compiled, the optimizer's state: everything that fit changes."""
    found = flat(model.module.state_dict())
    if model._session is not None:
        found.update(flat(model.optimizer.state_dict(), "optimizer"))
    return found


def assert_same_bits(left, right):
    """Equal keys and equal values; of tensors, every bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[name].dtype, name
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name


def assert_clean(model):
    """Nothing of a program is left: memory, signals, modes of torch, attributes without values."""
    for name, p in model.module.named_parameters():
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size(), name
        assert type(p) is nn.Parameter
        assert p.is_leaf
    for module in model.module.modules():
        for name, value in {**vars(module), **module._buffers}.items():
            assert not isinstance(value, torch.Tensor) or type(value) is torch.Tensor, name
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert torch.is_grad_enabled()
    assert type(torch.rand(1) + 1) is torch.Tensor
    if model._session is not None:
        assert not model._session.is_training


@contextlib.contextmanager
def refused(model, error, text, part=False):
    """The block raises exactly this error, and nothing is different afterwards.

    Args:
        model: whose module, optimizer, flags and random numbers must be left alone.
        error: the exact class.
        text: all of the message.
        part: the message holds more than ``text``.
    """
    before = state(model)
    flags = [module.training for module in model.module.modules()]
    generator = torch.get_rng_state()
    with pytest.raises(error) as caught:
        yield caught
    assert type(caught.value) is error
    if part:
        assert text in str(caught.value)
    else:
        assert str(caught.value) == text
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in model.module.modules()] == flags
    assert_same_bits(state(model), before)
    assert_clean(model)
