"""LAMB against Algorithm 2 of arXiv 1904.00962, written out a second time in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from ipufit.optim.optimizers import LAMB

# Two float64 programs of the same equations differ by rounding only, some 1e-15 for each update.
TOLERANCE = 1e-12


def algorithm_2(x, gradients, lr, betas, eps, weight_decay, bias_correction=True, limit=65500.0):
    """The paper's loop for one tensor, line by line; ``gradients`` holds one array per update."""
    x = x.copy()
    m = np.zeros_like(x)
    v = np.zeros_like(x)
    for t, g in enumerate(gradients, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat = m / (1 - betas[0] ** t) if bias_correction else m
        v_hat = v / (1 - betas[1] ** t) if bias_correction else v
        r = m_hat / (np.sqrt(v_hat) + eps)
        update = r + weight_decay * x
        weight_norm = np.sqrt(np.sum(x**2))
        update_norm = np.sqrt(np.sum(update**2))
        phi = weight_norm if limit is None else min(weight_norm, limit)
        ratio = phi / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
        x = x - lr * ratio * update
    return x


def run(params, gradients, optimizer):
    """Give every parameter its gradients, one after another, and step."""
    for arrays in zip(*gradients):
        for param, array in zip(params, arrays):
            param.grad = torch.from_numpy(array.copy())
        optimizer.step()


def random_case(seed, shapes, updates=50):
    """Parameters in float64 and, for each, its gradients."""
    rng = np.random.RandomState(seed)
    params = [nn.Parameter(torch.from_numpy(rng.randn(*shape))) for shape in shapes]
    return params, [[rng.randn(*shape) for _ in range(updates)] for shape in shapes]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"bias_correction": False},
        {"weight_decay": 0.0},
        {"max_weight_norm": 0.5},
        {"max_weight_norm": None},
        {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ],
)
def test_fifty_updates_follow_algorithm_2(arguments):
    """A missing correction or a wrong place of eps shows only in the numbers of many updates."""
    params, gradients = random_case(0, [(4, 3), (7,), (2, 3, 2)])
    plain = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, **arguments}
    plain["limit"] = plain.pop("max_weight_norm", 65500.0)
    expected = [algorithm_2(p.detach().numpy(), g, **plain) for p, g in zip(params, gradients)]
    run(params, gradients, LAMB(params, **arguments))
    for param, array in zip(params, expected):
        np.testing.assert_allclose(param.detach().numpy(), array, rtol=0, atol=TOLERANCE)


def test_parts_of_complex_parameters_are_numbers_of_their_own():
    """The square of an imaginary number is negative, and has no real root."""
    (real,), (gradients,) = random_case(3, [(4, 3, 2)])
    weight = nn.Parameter(torch.view_as_complex(real.detach().clone()))
    pairs = [gradient.view(np.complex128)[..., 0] for gradient in gradients]
    run([real], [gradients], LAMB([real]))
    run([weight], [pairs], LAMB([weight]))
    assert torch.equal(torch.view_as_real(weight), real)


def test_groups_keep_their_own_arguments():
    """Leaving biases out of the weight decay is the usual use of groups with LAMB."""
    (weight, bias), gradients = random_case(1, [(4, 3), (3,)])
    rest = {"betas": (0.9, 0.999), "eps": 1e-8}
    expected = [
        algorithm_2(weight.detach().numpy(), gradients[0], lr=0.02, weight_decay=0.1, **rest),
        algorithm_2(
            bias.detach().numpy(),
            gradients[1],
            0.01,
            weight_decay=0.0,
            bias_correction=False,
            **rest,
        ),
    ]
    groups = [
        {"params": [weight], "lr": 0.02, "weight_decay": 0.1},
        {"params": [bias], "weight_decay": 0.0, "bias_correction": False},
    ]
    run([weight, bias], gradients, LAMB(groups, lr=0.01))
    for param, array in zip((weight, bias), expected):
        np.testing.assert_allclose(param.detach().numpy(), array, rtol=0, atol=TOLERANCE)


def test_a_weight_of_zeros_moves_with_ratio_one():
    """A bias usually starts at zero; a ratio of zero would hold it there for ever."""
    bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = LAMB([bias], lr=0.1, eps=0.0)
    bias.grad = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    optimizer.step()
    # After one update m_hat / sqrt(v_hat) is the sign of the gradient.
    expected = torch.tensor([-0.1, 0.1, -0.1], dtype=torch.float64)
    torch.testing.assert_close(bias.detach(), expected, rtol=0, atol=TOLERANCE)


def test_an_update_of_zeros_changes_nothing():
    """Dividing by the norm of an update of zeros would fill the weights with NaN."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = LAMB([weight], weight_decay=0.0)
    weight.grad = torch.zeros(3, dtype=torch.float64)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_parameters_without_gradient_are_left_alone():
    """Frozen layers must neither decay nor collect state."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = LAMB([used, unused, frozen])
    used.grad = torch.ones(2)
    optimizer.step()
    assert unused.tolist() == frozen.tolist() == [1.0, 1.0]
    assert used.tolist() != [1.0, 1.0]
    assert list(optimizer.state) == [used]


def test_state_has_the_documented_names_and_dtypes():
    """Checkpoints and the recorded update find the state by these names."""
    weight = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    optimizer = LAMB([weight])
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    state = optimizer.state[weight]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
    assert state["step"].dtype == torch.float32
    assert state["step"].shape == ()
    assert state["step"].item() == 2.0
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].dtype == weight.dtype
        assert state[name].shape == weight.shape


def test_a_restored_state_continues_with_the_same_bits():
    """A resumed run has to end where the uninterrupted one does."""
    params, gradients = random_case(2, [(3, 2)], updates=10)
    optimizer = LAMB(params, lr=0.1)
    run(params, [gradients[0][:5]], optimizer)
    twins = copy.deepcopy(params)
    twin = LAMB(twins, lr=0.3)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(params, [gradients[0][5:]], optimizer)
    run(twins, [gradients[0][5:]], twin)
    assert torch.equal(params[0], twins[0])


def test_norms_of_half_precision_weights_are_taken_in_float32():
    """In 16 bits a norm overflows, or is off by half a percent, and so is every update."""
    weight = nn.Parameter(torch.full((3,), 1000.0, dtype=torch.bfloat16))
    optimizer = LAMB([weight], lr=0.5, weight_decay=0.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    # Norm 1732.05 over 1.73205: each weight loses 0.5 * 1000; of norms in bfloat16, 0.5 * 996.
    assert weight.tolist() == [500.0] * 3


def test_the_closure_is_evaluated_with_gradients_and_its_loss_returned():
    """It is the contract of every optimizer of torch."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = LAMB([weight])

    def closure():
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert weight.grad.tolist() == [2.0, 2.0]
    assert weight[0].item() < 1.0


def test_a_sparse_gradient_is_refused():
    """Norms and averages of a sparse gradient would silently leave out rows."""
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        LAMB(table.parameters()).step()
    assert str(caught.value) == (
        "LAMB needs dense gradients, got a sparse one. Build the Embedding with sparse=False."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "LAMB needs lr >= 0, got -1.0."),
        ({"lr": float("nan")}, "LAMB needs lr >= 0, got nan."),
        ({"eps": -1e-8}, "LAMB needs eps >= 0, got -1e-08."),
        ({"weight_decay": -0.1}, "LAMB needs weight_decay >= 0, got -0.1."),
        (
            {"betas": (0.9, 1.0)},
            "LAMB needs two betas in [0, 1), got (0.9, 1.0). Try (0.9, 0.999).",
        ),
        ({"betas": (0.9,)}, "LAMB needs two betas in [0, 1), got (0.9,). Try (0.9, 0.999)."),
        (
            {"max_weight_norm": 0.0},
            "LAMB needs max_weight_norm > 0, got 0.0. Pass None for no limit.",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    """A negative rate climbs the loss, and nobody notices before the end of the run."""
    for params, given in (
        ([nn.Parameter(torch.ones(1))], arguments),
        ([{"params": [nn.Parameter(torch.ones(1))], **arguments}], {}),
    ):
        with pytest.raises(ValueError, match="LAMB needs") as caught:
            LAMB(params, **given)
        assert str(caught.value) == message


def test_a_counter_that_is_a_number_becomes_a_tensor() -> None:
    """State that another program saved may count with numbers; torch's own optimizers take both."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = LAMB([parameter])
    state = optimizer.state_dict()
    zeros = torch.zeros(2)
    state["state"] = {0: {"step": 3, "exp_avg": zeros, "exp_avg_sq": zeros}}
    optimizer.load_state_dict(state)
    step = optimizer.state[parameter]["step"]
    assert isinstance(step, torch.Tensor)
    assert (step.item(), step.dtype) == (3.0, torch.float32)
