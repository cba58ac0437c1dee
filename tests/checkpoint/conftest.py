"""What the tests of checkpoints share: a store, and a disk that does not take its time."""

import os

import pytest

from ipufit.checkpoint import Store
from tests.checkpoint.written import written


@pytest.fixture(autouse=True)
def _no_power_cut(monkeypatch):
    """Nobody waits for the disk: what is read back is what the system has, synchronised or not."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def store(tmp_path):
    """A store with two checkpoints."""
    store = Store(tmp_path / "runs" / "first")
    written(store, 1)
    written(store, 2)
    return store
