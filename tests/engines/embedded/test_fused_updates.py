"""torch's kernels for whole updates give what the rules give, and what torch's optimizers give."""

import copy

import pytest
import torch
from torch import nn

import ipufit
from ipufit.engines.embedded import fused_optimizers
from ipufit.engines.embedded.fused_optimizers import fused_for
from ipufit.optim.rules import rules_for
from tests.fitting import Plan, compiled, fit, state_of
from tests.nets import MLP, data

pytestmark = pytest.mark.both_engines

X, Y = data(24)

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1),
    "adam upwards": lambda p: torch.optim.Adam(p, 1e-3, maximize=True, betas=(0.5, 0.9)),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
}


def without_kernels(monkeypatch):
    """As on a torch that has none."""
    monkeypatch.setattr(fused_optimizers, "_works", lambda kernel, device, dtype: False)


def run(make, eagerly=False, **options):
    """A model after two fits, of which the second goes on with the state of the first."""
    torch.manual_seed(0)
    way = "eager" if eagerly else "late"
    # Without the measurements that choose among kernels of other operators.
    options.update({} if eagerly else {"jit": "graph"})
    model, _ = compiled(MLP().double(), make, way=way, **options)
    for _ in range(2):
        fit(model, X, Y, Plan(3, 2, 2))
    return model


def kernel_of(make, dtype=torch.float64):
    """The kernel for the optimizer of one parameter."""
    optimizer = make([nn.Parameter(torch.zeros(2, dtype=dtype))])
    rule = rules_for(optimizer)[0](optimizer.param_groups[0])
    return fused_for(rule, torch.zeros(2, dtype=dtype))


HAS_KERNELS = kernel_of(OPTIMIZERS["adam"]) is not None
needs_kernels = pytest.mark.skipif(
    not HAS_KERNELS, reason="kernels for the CPU came with torch 2.4"
)


@pytest.mark.grid
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kernels_and_rules_make_the_same_weights_and_state(name, eagerly, monkeypatch):
    """Without kernels, as on older torch, to rounding."""
    one = run(OPTIMIZERS[name], eagerly)
    without_kernels(monkeypatch)
    other = run(OPTIMIZERS[name], eagerly)
    for key, value in one.module.state_dict().items():
        torch.testing.assert_close(value, other.module.state_dict()[key], rtol=1e-11, atol=1e-13)
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], rtol=1e-11, atol=1e-15)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"lr_scheduler": lambda update: 0.1 * 0.9**update},
        {"clip": ipufit.Clip(norm=0.1)},
        {"clip": ipufit.Clip(global_norm=0.1)},
        {"clip": ipufit.Clip(value=0.01)},
        {"precision": ipufit.Precision(accumulation_dtype="float32")},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_done_to_gradients_and_rates_reaches_both(options, monkeypatch):
    one = run(OPTIMIZERS["adamw"], **options)
    without_kernels(monkeypatch)
    other = run(OPTIMIZERS["adamw"], **options)
    for key, value in one.module.state_dict().items():
        torch.testing.assert_close(value, other.module.state_dict()[key], rtol=1e-11, atol=1e-13)


@needs_kernels
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_there_is_a_kernel(name, dtype):
    assert kernel_of(OPTIMIZERS[name], dtype) is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_there_is_none_for_narrow_types(dtype):
    """A kernel rounds once where the rules round after each operator."""
    assert kernel_of(OPTIMIZERS["adam"], dtype) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 0.01),
        lambda p: ipufit.optim.LAMB(p, 0.01),
    ],
    ids=["sgd", "rmsprop", "lamb"],
)
def test_there_is_none_for_other_optimizers(make):
    assert kernel_of(make) is None


@needs_kernels
def test_adam_that_decouples_its_decay_has_the_kernel_of_adamw():
    if "decoupled_weight_decay" not in torch.optim.Adam([torch.zeros(1)]).defaults:
        pytest.skip("this torch's Adam can't decouple")

    def decoupled(parameters):
        return torch.optim.Adam(parameters, 0.01, weight_decay=0.1, decoupled_weight_decay=True)

    assert kernel_of(decoupled) is kernel_of(OPTIMIZERS["adamw"])


@pytest.mark.long
@needs_kernels
def test_an_update_by_kernels_is_recorded_nowhere():
    """And one by rules is, once for all fits."""
    for make, count in ((OPTIMIZERS["adam"], 0), (lambda p: torch.optim.RMSprop(p, 0.01), 1)):
        model, engine = compiled(MLP().double(), make, way="late")
        fit(model, X, Y)
        fit(model, X, Y)
        assert len(engine.carried.optimizer_graphs) == count


def test_two_types_of_parameters_are_updated_by_rules_together():
    """Half of a program by kernels would need both ways at once."""
    net = nn.Sequential(nn.Linear(12, 8).double(), nn.Linear(8, 5).bfloat16())

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = copy.deepcopy(net)

        def forward(self, x):
            return self.net[1](self.net[0](x.flatten(1)).bfloat16()).double()

    model, engine = compiled(Mixed(), OPTIMIZERS["adam"], way="late")
    before = copy.deepcopy(model.module.state_dict())
    fit(model, X, Y)
    assert len(engine.carried.optimizer_graphs) == 1
    assert all(not torch.equal(v, before[k]) for k, v in model.module.state_dict().items())
