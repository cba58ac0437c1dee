"""A store for the tests of checkpoints."""

import pytest

from ipufit.checkpoint import Store
from tests.checkpoint.written import written


@pytest.fixture
def store(tmp_path):
    """A store with two checkpoints."""
    store = Store(tmp_path / "runs" / "first")
    written(store, 1)
    written(store, 2)
    return store
