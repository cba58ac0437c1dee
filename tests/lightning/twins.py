"""The same LightningModule trained by Lightning's own Trainer and by ipufit."""

import copy
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from tests.lightning import pl

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def by_lightning(module, call, *data, **options):
    """What Lightning's Trainer makes of a module; the trainer is returned with the result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(**{**QUIET, **options})
        result = getattr(trainer, call)(module, *data)
    return trainer, result


def twins(module):
    """Two modules with the same weights."""
    return module, copy.deepcopy(module)


def in_one_and_two_processes(name):
    """What a script beside this file prints last, as JSON: alone, and started in two processes."""
    here = Path(__file__)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    results = []
    for how in ([], launcher):
        done = subprocess.run(
            [sys.executable, *how, str(here.with_name(name))],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(here.parents[2]), "OMP_NUM_THREADS": "1"},
        )
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def largest_difference(one, two):
    """Over all weights and buffers."""
    pairs = zip(one.state_dict().items(), two.state_dict().items())
    differences = []
    for (name, mine), (other_name, other) in pairs:
        assert name == other_name
        differences.append((mine.double() - other.double()).abs().max().item())
    return max(differences)


def rows(count, size, classes=3, seed=0):
    """Random inputs and classes, float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (count,), generator=generator)


def loader(*tensors, batch_size):
    """Unshuffled batches."""
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size)


class Classifier(pl.LightningModule):
    """Logs a loss and an accuracy in every step; configured by a function."""

    def __init__(self, configure=None, size=6):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(size, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.configure = configure or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def forward(self, inputs):
        return self.net(inputs)

    def step(self, batch, name, **options):
        inputs, target = batch
        prediction = self(inputs)
        loss = F.cross_entropy(prediction, target)
        self.log(f"{name}_loss", loss, **options)
        self.log(f"{name}_accuracy", (prediction.argmax(1) == target).double().mean(), **options)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train", on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def test_step(self, batch, batch_idx):
        self.step(batch, "test")

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).softmax(1)

    def configure_optimizers(self):
        return self.configure(self.parameters())


def ipufit_of(module, engine="embedded"):
    """A model of it on this engine."""
    return ipufit.Model.from_lightning(module, engine)
