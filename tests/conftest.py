"""Fixtures that many tests share."""

import pytest
import torch

# The tensors of the tests are too small to share between cores, and waiting for a busy core costs
# more than the work.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)
