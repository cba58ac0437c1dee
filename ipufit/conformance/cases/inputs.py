"""Inputs of a model, and changes of them that are written back."""

from __future__ import annotations

import collections

import torch
from torch import nn

from ipufit.conformance.kit import Kit, judged


@judged("inputs/a change in place comes back to the caller")
def _written(kit: Kit) -> None:
    class Doubling(nn.Module):
        def forward(self, x):
            x *= 2
            return x + 1

    x, before = kit.rows(4), kit.rows(4)
    model = kit.poptorch.inferenceModel(Doubling(), kit.options(device_iterations=2))
    kit.close("output", model(x), 2 * before + 1)
    kit.close("input", x, 2 * before)
    model.destroy()


@judged("inputs/nested structures, keywords and defaults")
def _nested(kit: Kit) -> None:
    Pair = collections.namedtuple("Pair", "left right")

    class Mixing(nn.Module):
        def forward(self, pair, parts, *, scale=2, shift=None):
            out = pair.left + pair.right * scale + parts["a"] - parts["b"][0]
            return out if shift is None else out + shift

    rows = [kit.rows(2, start=start) for start in (0, 20, 40, 60, 80)]
    model = kit.poptorch.inferenceModel(Mixing())
    out = model(Pair(*rows[:2]), {"b": [rows[3]], "a": rows[2]}, shift=rows[4])
    kit.close("values", out, rows[0] + rows[1] * 2 + rows[2] - rows[3] + rows[4])
    model.destroy()


@judged("inputs/rows of every input belong together")
def _together(kit: Kit) -> None:
    class Both(nn.Module):
        def forward(self, x, y):
            return torch.cat([x, y], 1).sum(0)

    x, y = kit.rows(8), kit.rows(8, 2, 40)
    model = kit.poptorch.inferenceModel(Both(), kit.options(device_iterations=4))
    wanted = torch.cat([x, y], 1).view(4, 2, 5).sum(1)
    kit.close("sums of micro-batches", model(x, y), wanted.flatten())
    model.destroy()


@judged("inputs/results are new tensors at every call")
def _fresh(kit: Kit) -> None:
    model = kit.poptorch.inferenceModel(kit.linear())
    first = model(kit.rows(2))
    copied = first.clone()
    model(kit.rows(2, start=9))
    kit.close("the first result", first, copied)
    model.destroy()


@judged("inputs/compiling computes nothing of their values")
def _compile(kit: Kit) -> None:
    class InPlaceDoubling(nn.Module):
        def forward(self, x):
            x *= 2
            return x + 0

    x = kit.rows(2)
    model = kit.poptorch.inferenceModel(InPlaceDoubling())
    model.compile(x)
    kit.close("input", x, kit.rows(2))
    kit.close("output", model(x), 2 * kit.rows(2))
    model.destroy()
