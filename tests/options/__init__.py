"""What flipping an option of a public function changes: a registry, and means to observe.

An observation is made of plain values, so that two of them can be compared: results, weights,
printed text, the order of hooks, files, or the text of an exception.
"""

import contextlib
import dataclasses
import io
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ipufit
from ipufit.callbacks import Callback

FLIPS = {}

X = torch.arange(48.0).reshape(12, 4).sin()
Y = torch.arange(12) % 3


class With:
    """Two values of an option, together with others without which it means nothing."""

    def __init__(self, one, other, **also):
        self.values = one, other
        self.also = also


def of(function, observe, /, **options):
    """Register flips.

    Args:
        function: full name, without "ipufit.".
        observe: called with one option by name, and those that go with it.
        options: by name, two values, or a :class:`With`. A value that is a :class:`Made` is made
            anew for every call.
    """
    for option, values in options.items():
        assert (function, option) not in FLIPS
        pair = values if isinstance(values, With) else With(*values)
        FLIPS[function, option] = (observe, option, pair)


# How long something took, and where a scratch folder is, are no differences.
_TIMES = re.compile(r"[\d.]+ s\b|samples/s=\d+|\d+:\d+|[\d.?]+ ?(batches|updates)/s|[\d.?]+s/ \w+")
_FOLDERS = re.compile(re.escape(tempfile.gettempdir()) + r"/\w+")


class Made:
    """A value that is made anew for every observation."""

    def __init__(self, make):
        self.make = make


def observed(observe, given):
    """What is seen with these options, an exception included, in plain values."""
    given = {n: v.make() if isinstance(v, Made) else v for n, v in given.items()}
    torch.manual_seed(0)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            found = plain(observe(**given))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
    # How long something took is no difference.
    text = printed.getvalue()
    for noise in (_TIMES, _FOLDERS):
        text = noise.sub("", text)
    return found, text


def plain(value):
    """The same value in lists, dicts and numbers."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    # NaN differs from itself; its text does not.
    return repr(value) if isinstance(value, float) else value


class Ledger(Callback):
    """Remembers the hooks that were called, with their first argument."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __getattribute__(self, name):
        if not name.startswith("on_") or name == "on_non_finite":
            return super().__getattribute__(name)

        def hook(*args):
            first = args[0] if args and isinstance(args[0], int) else None
            self.calls.append((name, first))

        return hook


def linear():
    """A classifier with known weights."""
    net = nn.Linear(4, 3)
    with torch.no_grad():
        net.weight.copy_(X[:3])
        net.bias.zero_()
    return net


class Noisy(nn.Module):
    """Draws random numbers in every mode."""

    def __init__(self):
        super().__init__()
        self.head = linear()

    def forward(self, x):
        return self.head(x + torch.rand_like(x))


def told(history):
    """All that a history says, but how long things took."""
    params = {n: v for n, v in history.params.items() if n != "capture_seconds"}
    return [history.history, history.epoch, history.updates, repr(sorted(params.items(), key=str))]


def recorded(callbacks, epochs=4, validates=True, **options):
    """A fit that computes nothing, with these callbacks; the history and the optimizer's rate."""
    model = ipufit.Model(linear(), engine=ipufit.testing.RecordingEngine)
    model.compile(torch.optim.SGD(model.module.parameters(), 0.1), "cross_entropy")
    held = {"validation_data": (X, Y)} if validates else {}
    history = model.fit(
        X, Y, batch_size=6, epochs=epochs, seed=0, verbose=0, callbacks=callbacks, **held, **options
    )
    return model, history


@contextlib.contextmanager
def folder():
    """A folder for one observation."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def files(path):
    """Names and contents of all files below; those that are no text by their size."""
    found = {}
    for file in sorted(Path(path).rglob("*")):
        if file.is_file():
            data = file.read_bytes()
            is_text = file.suffix in (".csv", ".json", ".jsonl", ".txt")
            found[file.relative_to(path).as_posix()] = data.decode() if is_text else len(data)
    return found
