"""Commands that run a script, on one that a test writes."""

import pytest

import ipufit
from ipufit.cli.main import main

HEAD = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import ipufit

def made(net, engine="auto", **options):
    model = ipufit.Model(net, engine=engine)
    model.compile("adam", "cross_entropy", **options)
    return model

torch.manual_seed(0)
x, y = torch.randn(40, 4), torch.arange(40) % 3
"""


@pytest.fixture
def command(tmp_path, imports, monkeypatch, capfd):
    """Runs a command on a script in this process; returns status, stdout and stderr."""
    monkeypatch.delenv("IPUFIT_ENGINE", raising=False)
    script = tmp_path / "script.py"
    fit = ipufit.Model.fit

    def run(name, text, *options, arguments=()):
        script.write_text(HEAD + text, encoding="utf-8")
        with pytest.raises(SystemExit) as end:
            main([name, *options, str(script), *arguments])
        assert ipufit.Model.fit is fit
        return (end.value.code, *capfd.readouterr())

    return run
