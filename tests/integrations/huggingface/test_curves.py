"""Curves by name are the schedules of the transformers library, update by update."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers

from ipufit.optim.schedules import WSD, Constant, Cosine, Linear, Polynomial, resolve_schedule

pytestmark = pytest.mark.both_engines

LENGTH, WARMUP, RATE = 57, 9, 0.3
SHARE = 0.15  # of the length: nine updates, rounded up
MADE = {
    "constant": (Constant(WARMUP), transformers.get_constant_schedule_with_warmup, {}),
    "linear": (Linear(WARMUP), transformers.get_linear_schedule_with_warmup, {}),
    "a share": (Linear(SHARE), transformers.get_linear_schedule_with_warmup, {}),
    "cosine": (Cosine(WARMUP), transformers.get_cosine_schedule_with_warmup, {}),
    "polynomial": (
        Polynomial(WARMUP, 2.0, 1e-7 / RATE),
        transformers.get_polynomial_decay_schedule_with_warmup,
        {"power": 2.0},
    ),
    "wsd": (WSD(WARMUP, 12), transformers.get_wsd_schedule, {"num_decay_steps": 12}),
    "root": (
        WSD(WARMUP, 12, "1-sqrt"),
        transformers.get_wsd_schedule,
        {"num_decay_steps": 12, "decay_type": "1-sqrt"},
    ),
}


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=RATE)


@pytest.mark.parametrize("name", MADE)
def test_every_update_has_the_rate_of_the_library(name):
    curve, make, options = MADE[name]
    if name != "constant":
        options = {**options, "num_training_steps": LENGTH}
    optimizer, expected = sgd(), []
    scheduler = make(optimizer, num_warmup_steps=WARMUP, **options)
    for _ in range(LENGTH):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    schedule = resolve_schedule(curve, sgd())
    schedule.begin_run(LENGTH, 1)
    found = [row[0]["lr"] for row in schedule.rows(LENGTH)]
    assert found == pytest.approx(expected, rel=1e-14, abs=1e-17)
