"""Runs whose reports are looked at: a real one, a long one, and what others measure."""

import dataclasses
import math

import torch
from torch import nn

import ipufit
from ipufit.report.rows import COLUMNS
from ipufit.report.run import Run
from ipufit.utils.phase_timer import PHASES

HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=alert(2)>"


class Digits(nn.Module):
    """A small net for pictures of 16 x 16."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.smaller = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.flat = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU())
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        x = self.smaller(self.seen(x))
        ipufit.log("activity", x.abs().mean())
        return self.head(self.flat(x))


def trained(folder, epochs=3, samples=320, stages=True, lr=0.01):
    """A report of a real run, with four stages and a validation."""
    torch.manual_seed(0)
    x = torch.randn(samples, 1, 16, 16)
    y = (x.mean((1, 2, 3)) > 0).long() + 2 * (x[:, 0, :8].mean((1, 2)) > 0).long()
    model = ipufit.Model(Digits(), engine="embedded")
    begins = {"seen": 0, "smaller": 1, "flat": 2, "head": 3} if stages else None
    model.compile(
        torch.optim.Adam(model.module.parameters(), lr=lr),
        "cross_entropy",
        metrics=["accuracy"],
        parallel=ipufit.Parallel(stages=begins),
        lr_scheduler=lambda update: lr / (1 + update / 40),
    )
    model.fit(
        x,
        y,
        batch_size=8,
        gradient_accumulation=7 if stages else 1,
        ipus=4 if stages else 1,
        epochs=epochs,
        validation_split=0.1,
        callbacks=[ipufit.Report(folder, overwrite=True)],
        verbose=0,
    )
    model.close()
    return Run.read(str(folder))


# Of one micro-batch of Digits, as a program's profile has it: operator, direction, module, class,
# line, microseconds, FLOPs and bytes.
_OPERATORS = (
    ("convolution", "forward", "seen.0", "Conv2d", 26, 410, 294_912, 77_000),
    ("native_batch_norm", "forward", "seen.1", "BatchNorm2d", 26, 120, 0, 131_000),
    ("relu", "forward", "seen.2", "ReLU", 26, 31, 0, 131_000),
    ("max_pool2d_with_indices", "forward", "smaller.0", "MaxPool2d", 26, 150, 0, 98_000),
    ("convolution", "forward", "smaller.1", "Conv2d", 26, 380, 1_179_648, 70_000),
    ("relu", "forward", "smaller.2", "ReLU", 26, 19, 0, 65_000),
    ("addmm", "forward", "flat.2", "Linear", 28, 45, 262_144, 75_000),
    ("addmm", "forward", "head", "Linear", 28, 9, 4096, 3400),
    ("_log_softmax", "forward", "", "", None, 8, 0, 256),
    ("convolution_backward", "backward", "smaller.1", "Conv2d", 26, 900, 2_359_296, 140_000),
    ("convolution_backward", "backward", "seen.0", "Conv2d", 26, 610, 294_912, 150_000),
    ("mm", "backward", "flat.2", "Linear", 28, 61, 524_288, 150_000),
    ("native_batch_norm_backward", "backward", "seen.1", "BatchNorm2d", 26, 260, 0, 260_000),
)


def with_operators(run, hostile=""):
    """The same run, with operators that somebody has written down by hand.

    Args:
        run: of Digits.
        hostile: a text that stands in the names of operators, modules and classes.
    """
    rows, curve, alive = [], [], 0
    for operator, direction, module, kind, line, spent, flops, moved in _OPERATORS:
        rows.append(
            {
                "operator": operator + hostile,
                "direction": direction,
                "module": module + hostile if module else "",
                "kind": kind + hostile,
                "file": f"/home/{hostile}/made.py",
                "line": line,
                "source": "x = self.smaller(self.seen(x))" + hostile,
                "calls": 1,
                "seconds": spent * 1e-6,
                "flops": flops,
                "bytes": moved,
            }
        )
        alive += moved // 2 if direction == "forward" else -moved // 5
        curve.append([operator + hostile, module + hostile, direction, max(0, alive)])
    fixed = {"weights": 72_000, "buffers": 68, "gradients": 72_000, "optimizer": 144_000}
    fixed["batch"] = 8256
    peak = max(each[3] for each in curve)
    operators = {
        "micro_batch_size": 8,
        "way": "Each operator on its own, the shortest of three times",
        "device": "cpu",
        "rows": rows,
        "peak": {"flops": 9e10, "bytes": 1.1e10, "dtype": "float32"},
        "memory": {
            "fixed": fixed,
            "curve": curve,
            "peak": peak,
            "total": sum(fixed.values()) + peak,
        },
    }
    return dataclasses.replace(run, facts={**run.facts, "operators": operators})


def long(run, executions=10_000, loss=2.3):
    """The same run, as if it had made so many executions in epochs of 500."""
    rows = {name: [] for name in COLUMNS}
    epochs, values, accuracies, begin = [], [], [], 0.0
    noise = torch.randn(executions, generator=torch.Generator().manual_seed(1)).tolist()
    for place in range(executions):
        spent = dict.fromkeys(PHASES, 0.0)
        spent.update(data=0.0004, compute=0.004 + 0.0004 * abs(noise[place]), metrics=0.0003)
        spent.update(anchors=0.0002, callbacks=0.0001, other=0.00005)
        if place == 0:
            spent["capture"] = 0.8
        if place % 500 == 0:
            epochs.append({"epoch": place // 500, "begin": begin, "first_update": 4 * place})
            epochs[-1].update(executions=500, updates=2000, samples=64_000)
            phases = dict.fromkeys(PHASES, 0.0)
        for phase in PHASES:
            phases[phase] += spent[phase]
            rows[phase].append(spent[phase])
        value = loss * (0.15 + math.exp(-place / 2500)) * (1 + 0.08 * noise[place])
        row = (begin, place // 500, 4 * place, 1, 4, 128, value, 0.01 * 0.5 ** (place // 2500))
        row += (1024.0 * 2 ** (place // 3000), 0, 4e8 + 1e4 * place)
        for name, each in zip(COLUMNS, row):
            rows[name].append(float(each))
        begin += sum(spent.values())
        if place % 500 == 499:
            phases["validation"] = 0.2
            begin += 0.2
            epochs[-1].update(seconds=sum(phases.values()), phases=dict(phases))
            values.append(value)
            accuracies.append(1 - value / 4)
    count = len(values)
    facts = {
        **run.facts,
        "epochs": epochs[:count],
        "seconds": begin,
        "phases": {p: sum(rows[p]) + (0.2 * count if p == "validation" else 0) for p in PHASES},
        "history": {
            "epoch": list(range(count)),
            "history": {
                "loss": [[i, v] for i, v in enumerate(values)],
                "accuracy": [[i, v] for i, v in enumerate(accuracies)],
                "val_loss": [[i, 1.1 * v] for i, v in enumerate(values)],
                "val_accuracy": [[i, 0.95 * v] for i, v in enumerate(accuracies)],
            },
            "updates": {"activity": [[4 * i, abs(noise[i])] for i in range(0, executions, 2)]},
        },
        "total_updates": 4 * executions,
    }
    return dataclasses.replace(run, facts=facts, rows=rows)
