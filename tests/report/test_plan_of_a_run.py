"""The plan in a report is the one that ``Model.plan`` makes."""

import json

import torch
from torch import nn

import ipufit


def test_the_plan_in_a_report_is_that_before_the_run(tmp_path):
    """While a program runs, its weights share memory; each of them is counted all the same."""
    net = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(24, 3))
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy")
    x, y = torch.randn(16, 1, 8), torch.randint(0, 3, (16,))
    expected = model.plan((x[:4], y[:4]), gradient_accumulation=2)
    model.fit(
        x,
        y,
        batch_size=4,
        gradient_accumulation=2,
        callbacks=[ipufit.Report(tmp_path, operators=False)],
        verbose=0,
    )
    found = json.loads((tmp_path / "run.json").read_text())["plan"]
    assert found["stages"] == json.loads(json.dumps(expected.to_dict()))["stages"]
    assert found["unused"] == []
    assert found["stages"][0]["parameters"] == sum(p.numel() for p in net.parameters())
