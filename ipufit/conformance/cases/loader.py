"""poptorch.DataLoader: every sample once, in order, in combined batches."""

from __future__ import annotations

import collections

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ipufit.conformance.kit import Kit, judged


def _doubled_in_place(x):
    x *= 2
    return x + 1


@judged("inputs/a change in place comes back to the caller")
def _written(kit: Kit) -> None:
    x, before = kit.rows(4), kit.rows(4)
    model = kit.inference(_doubled_in_place, device_iterations=2)
    kit.close("output", model(x), 2 * before + 1)
    kit.close("input", x, 2 * before)


@judged("inputs/nested structures, keywords and defaults")
def _nested(kit: Kit) -> None:
    Pair = collections.namedtuple("Pair", "left right")

    class Mixing(nn.Module):
        def forward(self, pair, parts, *, scale=2, shift=None):
            out = pair.left + pair.right * scale + parts["a"] - parts["b"][0]
            return out if shift is None else out + shift

    rows = [kit.rows(2, start=start) for start in (0, 20, 40, 60, 80)]
    model = kit.inference(Mixing())
    out = model(Pair(*rows[:2]), {"b": [rows[3]], "a": rows[2]}, shift=rows[4])
    kit.close("values", out, rows[0] + rows[1] * 2 + rows[2] - rows[3] + rows[4])


@judged("inputs/rows of every input belong together")
def _together(kit: Kit) -> None:
    x, y = kit.rows(8), kit.rows(8, 2, 40)
    model = kit.inference(lambda x, y: torch.cat([x, y], 1).sum(0), device_iterations=4)
    wanted = torch.cat([x, y], 1).view(4, 2, 5).sum(1)
    kit.close("sums of micro-batches", model(x, y), wanted.flatten())


@judged("inputs/results are new tensors at every call")
def _fresh(kit: Kit) -> None:
    model = kit.inference(kit.linear())
    first = model(kit.rows(2))
    copied = first.clone()
    model(kit.rows(2, start=9))
    kit.close("the first result", first, copied)


@judged("inputs/compiling computes nothing of their values")
def _compile(kit: Kit) -> None:
    x = kit.rows(2)
    model = kit.inference(_doubled_in_place)
    model.compile(x)
    kit.close("input", x, kit.rows(2))
    kit.close("output", model(x), 2 * kit.rows(2) + 1)


def _loader(kit: Kit, count: int, options, **settings):
    return kit.poptorch.DataLoader(options, TensorDataset(torch.arange(count)), **settings)


def _samples(loader):
    return [batch[0].tolist() for batch in loader]


@judged("data/a combined batch holds the samples of a call, in order")
def _combined(kit: Kit) -> None:
    options = kit.options(device_iterations=2, accumulation=3, replicas=2)
    loader = _loader(kit, 48, options, batch_size=2)
    kit.equal("samples of a batch", loader.combinedBatchSize, 24)
    kit.equal("batches", _samples(loader), [list(range(24)), list(range(24, 48))])
    kit.equal("len", len(loader), 2)


@judged("data/what does not fill a batch is left out, or comes last")
def _rest(kit: Kit) -> None:
    options = kit.options(device_iterations=2)
    kit.equal(
        "dropped", _samples(_loader(kit, 10, options, batch_size=2)), [[0, 1, 2, 3], [4, 5, 6, 7]]
    )
    with_rest = _samples(_loader(kit, 10, options, batch_size=2, drop_last=False))
    kit.equal("kept", with_rest, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])


@judged("data/shuffled, every sample comes once")
def _shuffled(kit: Kit) -> None:
    torch.manual_seed(5)
    samples = _samples(
        _loader(kit, 24, kit.options(device_iterations=2), batch_size=3, shuffle=True)
    )
    flat = [sample for batch in samples for sample in batch]
    kit.equal("samples", sorted(flat), list(range(24)))
    kit.equal("in order", flat == list(range(24)), False)


@judged("data/two processes have the two halves")
def _processes(kit: Kit) -> None:
    parts = []
    for index in range(2):
        options = kit.options(device_iterations=2)
        options.Distributed.configureProcessId(index, 2)
        parts.append(_samples(_loader(kit, 16, options, batch_size=2)))
    kit.equal("first", parts[0], [[0, 1, 2, 3], [4, 5, 6, 7]])
    kit.equal("second", parts[1], [[8, 9, 10, 11], [12, 13, 14, 15]])


@judged("data/two processes that shuffle share one permutation")
def _shuffled_processes(kit: Kit) -> None:
    samples = []
    for index in range(2):
        options = kit.options(seed=3)
        options.Distributed.configureProcessId(index, 2)
        samples += _samples(_loader(kit, 12, options, batch_size=2, shuffle=True))
    flat = [sample for batch in samples for sample in batch]
    kit.equal("samples", sorted(flat), list(range(12)))
    kit.equal("in order", flat == list(range(12)), False)


@judged("data/a model takes what the loader gives")
def _model(kit: Kit) -> None:
    options = kit.options(device_iterations=4)
    x = kit.rows(16)
    loader = kit.poptorch.DataLoader(options, TensorDataset(x), batch_size=2)
    model = kit.inference(lambda x: x + 0, options)
    kit.close("all rows", torch.cat([model(batch) for (batch,) in loader]), x)
