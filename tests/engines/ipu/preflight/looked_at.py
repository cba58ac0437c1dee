"""What the tests of preflight share: functions as modules, and what is said of them."""

import inspect
from types import SimpleNamespace

import torch
from torch import nn

from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import Precision, TrainConfig
from ipufit.engines.ipu.preflight.evaluate import of_calls, preflight
from ipufit.engines.ipu.preflight.facts import FACTS, Table
from ipufit.engines.ipu.preflight.recording import record
from ipufit.losses import Loss

# Of any output.
LOSS = Loss("mean", function=lambda prediction, target: target.mean())

# Names and shapes of the tensors that a case finds; nothing computes their values.
SHAPES = {
    "x": (2, 3, 4),
    "y": (2, 3, 4),
    "one": (2, 3, 8),
    "two": (2, 3, 8, 8),
    "three": (2, 3, 4, 4, 4),
    "square": (4, 4),
    "row": (4,),
}
TYPES = {
    "i": (torch.int64, (2, 3, 4)),
    "labels": (torch.int64, (2,)),
    "tokens": (torch.int64, (5,)),
    "small": (torch.uint8, (4,)),
    "signs": (torch.int8, (4,)),
    "whole": (torch.int32, (4,)),
    "yes": (torch.bool, (2, 3, 4)),
}


def names_in(function):
    """What a function, and others that it holds, have attributes called."""
    codes, found = [function.__code__], set()
    for cell in function.__closure__ or ():
        if inspect.isfunction(cell.cell_contents):
            found |= names_in(cell.cell_contents)
    while codes:
        code = codes.pop()
        found |= set(code.co_names)
        codes += [held for held in code.co_consts if inspect.iscode(held)]
    return found


def tensors(function):
    """Those that a function asks for: each takes its time."""
    names = names_in(function)
    given = {name: torch.zeros(shape) for name, shape in SHAPES.items() if name in names}
    for name, (kind, shape) in TYPES.items():
        if name in names:
            given[name] = torch.zeros(shape, dtype=kind)
    return given


class Calls(nn.Module):
    """A module that is one function of the tensors above."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, **given):
        return self.function(SimpleNamespace(**given))


def batch_of(*args, **kwargs):
    """A micro-batch with a target."""
    return MicroBatch.of(args, kwargs, torch.zeros(2), 2)


def report_of(function):
    """What is said of a function."""
    return preflight(Calls(function), LOSS, None, TrainConfig(), batch_of(**tensors(function)))


def calls_of(function):
    """The operators that it calls."""
    knows = Table().knows
    given = (Calls(function), LOSS, batch_of(**tensors(function)), False, Precision())
    return record(*given, lambda name: knows("operators", name)).calls


def said_of(calls, without=None):
    """Keys and verdicts of what a table says of them that may lack the fact with a key."""
    table = Table([fact for fact in FACTS if fact.key != without])
    return {(one.fact.key, one.verdict) for one in of_calls(table, calls)}
