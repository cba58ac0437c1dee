"""Runs that are written by hand, of which every number is known."""

import json
import math
import random
from array import array

from ipufit.report.rows import COLUMNS, columns_of
from ipufit.report.run import EXECUTIONS, FACTS, FORMAT, Run
from ipufit.utils.phase_timer import PHASES

# Seconds by phase of an execution; binary fractions, so that sums are exact.
EACH = {"data": 0.25, "compute": 0.5, "metrics": 0.125}
AFTER = {"validation": 1.0, "callbacks": 0.5}


def flat_rows(epochs, executions, each=None):
    """Rows of executions of one update with four samples; between two epochs lies AFTER."""
    seconds = EACH if each is None else each
    rows, now, update = array("d"), 2.0, 0
    for epoch in range(epochs):
        for _ in range(executions):
            loss = 1.0 / (1 + update)
            values = [now, epoch, update, 1, 1, 4, loss, 0.1, math.nan, 0, 1000.0 + update]
            rows.extend([*values, *(seconds.get(name, 0.0) for name in PHASES)])
            now, update = now + sum(seconds.values()), update + 1
        now += sum(AFTER.values())
    return rows


def facts_of(epochs, executions, **changes):
    """Facts of such a run that is over."""
    own = sum(EACH.values()) * executions
    spent = {name: EACH.get(name, 0.0) * executions + AFTER.get(name, 0.0) for name in PHASES}
    length = own + sum(AFTER.values())
    return {
        "format": FORMAT,
        "status": "finished",
        "error": "",
        "title": "Net",
        "begun": "2024-01-02T03:04:05+00:00",
        "seconds": 2.0 + epochs * length,
        "phases": {name: seconds * epochs for name, seconds in spent.items()},
        "epochs": [
            {
                "epoch": epoch,
                "begin": 2.0 + epoch * length,
                "first_update": epoch * executions,
                "seconds": length,
                "executions": executions,
                "updates": executions,
                "samples": 4 * executions,
                "phases": spent,
            }
            for epoch in range(epochs)
        ],
        "environment": {
            **{"ipufit": "1", "torch": "2", "Python": "3", "system": "Linux x86_64"},
            **{"engine": "embedded", "device": "cpu", "threads": "1", "cores": "2"},
        },
        "params": {"epochs": epochs, "gradient_accumulation": 1, "device_iterations": 1},
        "explain": ["Plan for training"],
        "history": {
            "epoch": list(range(epochs)),
            "history": {"loss": [[epoch, 1.0 / (1 + epoch)] for epoch in range(epochs)]},
            "updates": {},
        },
        "layers": [],
        "totals": {"parameters": 0, "trainable": 0},
        "plan": {"missing": "there is none"},
        "operators": {"missing": "they were not asked for"},
        "warnings": [],
        "first_update": 0,
        "total_updates": epochs * executions,
        **changes,
    }


def made(epochs=2, executions=3, each=None, **changes):
    """Such a run."""
    rows = columns_of(flat_rows(epochs, executions, each))
    return Run("runs/1", facts_of(epochs, executions, **changes), rows)


def written(folder, epochs=2, executions=3, **changes):
    """The same in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).write_text(json.dumps(facts_of(epochs, executions, **changes)))
    (folder / EXECUTIONS).write_bytes(flat_rows(epochs, executions).tobytes())
    return folder


def busy_rows(count, seed=0):
    """As many rows as asked for in which nothing is zero, and no two numbers are alike."""
    draw, rows, now = random.Random(seed), array("d"), 0.0
    for update in range(count):
        seconds = [draw.uniform(1e-6, 1e-3) for _ in PHASES]
        values = [now, 0, update, 1, 1, 32, draw.random(), draw.random(), draw.random(), 0]
        rows.extend([*values, 1e9 * draw.random(), *seconds])
        now += sum(seconds)
    assert len(rows) == count * len(COLUMNS)
    return columns_of(rows)
