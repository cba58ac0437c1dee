"""Masks of uint8 mean what bool ones mean, in any version of torch, and assignments train."""

import pytest
import torch
from torch import nn

from ipufit import poptorch
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


class Masked(nn.Module):
    """Puts a trained row where the mask is, as models of speech do with hidden time steps."""

    def __init__(self, mask, shape):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.row = nn.Parameter(torch.randn(shape))
        self.mask = mask

    def forward(self, x, labels):
        hidden = self.linear(x)
        hidden[self.mask] = self.row
        return nn.functional.mse_loss(hidden.tanh(), labels)


STEPS = torch.tensor([[True, False, True], [False, False, True]])


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (STEPS, (4,)),
        (STEPS, (1, 4)),
        (STEPS, ()),
        (STEPS[:, 1:].sum(1).bool(), (3, 4)),
        (STEPS.byte(), (4,)),
        (STEPS.unsqueeze(-1).expand(2, 3, 4), (1,)),
    ],
)
def test_a_row_that_is_put_over_a_mask_trains(mask, shape):
    """Gradients are those of torch, which counts the places of the mask for them."""
    module = Masked(mask.bool(), shape)
    x, labels = torch.randn(2, 3, 3), torch.randn(2, 3, 4)
    loss = module(x, labels)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    expected = [p.detach() - 0.5 * g for p, g in zip(module.parameters(), gradients)]
    module.mask = mask
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.5)
    trained = poptorch.trainingModel(module, optimizer=optimizer)
    torch.testing.assert_close(trained(x, labels), loss.detach())
    torch.testing.assert_close([p.detach() for p in module.parameters()], expected)


def test_rows_for_the_places_of_a_mask_alone_do_not_train():
    """How many of them there are is a value, so their gradients have no fixed shape."""
    module = Masked(STEPS, (3, 4))
    trained = poptorch.trainingModel(
        module, optimizer=poptorch.optim.SGD(module.parameters(), lr=0.5)
    )
    with pytest.raises(RuntimeError, match="a shape depends on"):
        trained(torch.randn(2, 3, 3), torch.randn(2, 3, 4))
