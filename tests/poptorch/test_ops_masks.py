"""Masks of uint8 mean in a recorded model what bool ones mean, in any version of torch."""

import pytest
import torch

from ipufit.errors import CaptureError
from tests.poptorch.recording import record

ROWS = torch.arange(6.0).reshape(2, 3)
OLD = torch.tensor([1, 0, 4], dtype=torch.uint8)


def put(x, mask, value):
    x = x * 1
    x[:, mask] = value
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x, mask: put(x, mask, 7.0),
        lambda x, mask: put(x, mask, torch.tensor([7.0])),
        lambda x, mask: x.t().index_put((mask,), torch.tensor(7.0)).t(),
        lambda x, mask: (x * 1).masked_fill_(mask, 7.0),
        lambda x, mask: torch.masked_fill(x, mask=mask, value=7.0),
        lambda x, mask: torch.where(mask, 7.0, x),
        lambda x, mask: torch.full_like(x, 7.0).where(condition=mask, other=x),
    ],
)
def test_a_mask_of_uint8_is_true_where_it_is_not_zero(function):
    expected = torch.tensor([[7.0, 1.0, 7.0], [7.0, 4.0, 7.0]])
    assert torch.equal(record(function, ROWS, OLD)(ROWS, OLD)[0], expected)


@pytest.mark.parametrize("mask", [OLD, OLD != 0])
def test_reading_through_a_mask_has_no_fixed_shape(mask):
    with pytest.raises(CaptureError, match="a shape depends on"):
        record(lambda x, m: x[:, m], ROWS, mask)
