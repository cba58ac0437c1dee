"""Optimizers of the front end: arguments, marks of what may change, copies, and the host's step."""

import copy
import inspect
import logging
import math

import pytest
import torch

from ipufit.optim.optimizers import LAMB as PlainLAMB
from ipufit.poptorch import optim
from tests.told import message

CLASSES = [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB]

SIGNATURES = {
    "SGD": "params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, "
    "differentiable, loss_scaling, velocity_scaling, use_combined_accum, accum_type, "
    "velocity_accum_type, max_grad_norm",
    "Adam": "params, lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable, "
    "differentiable, fused, loss_scaling, accum_type, first_order_momentum_accum_type, "
    "second_order_momentum_accum_type, max_grad_norm",
    "AdamW": "params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, "
    "differentiable, fused, loss_scaling, bias_correction, accum_type, "
    "first_order_momentum_accum_type, second_order_momentum_accum_type, max_grad_norm",
    "RMSprop": "params, lr, alpha, eps, weight_decay, momentum, centered, foreach, maximize, "
    "differentiable, loss_scaling, accum_type, first_order_momentum_accum_type, "
    "second_order_momentum_accum_type, use_tf_variant",
    "LAMB": "params, lr, betas, eps, weight_decay, bias_correction, loss_scaling, "
    "max_weight_norm, accum_type, first_order_momentum_accum_type, "
    "second_order_momentum_accum_type",
}


def weights():
    """Two tensors with gradients."""
    generator = torch.Generator().manual_seed(3)
    result = [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2)]
    for weight in result:
        weight.requires_grad_()
        weight.grad = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return result


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_arguments_stand_in_poptorchs_order(kind):
    """Scripts pass them by position too; only SGD's learning rate has no default."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    assert ", ".join(p.name for p in parameters) == SIGNATURES[kind.__name__]
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    assert needed == (["params", "lr"] if kind is optim.SGD else ["params"])
    assert all(p.default is None for p in parameters if p.name not in needed)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_optimizer_is_one_of_torch_and_one_of_poptorch(kind):
    """Schedulers ask for the one, the executor for the other."""
    optimizer = kind(weights(), lr=0.1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, optim.Optimizer)
    if kind is not optim.LAMB:
        assert isinstance(optimizer, getattr(torch.optim, kind.__name__))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (optim.SGD, {"use_combined_accum": False, "max_grad_norm": math.inf}),
        (optim.Adam, {"max_grad_norm": math.inf}),
        (optim.AdamW, {"bias_correction": True, "max_grad_norm": math.inf}),
        (optim.RMSprop, {"use_tf_variant": False}),
        (optim.LAMB, {"bias_correction": True, "max_weight_norm": 65500.0}),
    ],
)
def test_what_is_left_out_has_poptorchs_defaults(kind, expected):
    optimizer = kind(weights(), lr=0.1)
    assert {name: getattr(optimizer, name) for name in expected} == expected
    assert optimizer.loss_scaling == 1.0
    types = [name for name in vars(optimizer) if name.endswith("accum_type")]
    assert all(getattr(optimizer, name) == torch.float32 for name in types)
    moments = ["first_order_momentum_accum_type", "second_order_momentum_accum_type"]
    assert types == ["accum_type", *(["velocity_accum_type"] if kind is optim.SGD else moments)]
    assert hasattr(optimizer, "max_grad_norm") == ("max_grad_norm" in expected)


def test_every_argument_of_a_device_is_kept():
    half = torch.float16
    sgd = optim.SGD(
        weights(),
        0.1,
        loss_scaling=2.0,
        velocity_scaling=4.0,
        use_combined_accum=True,
        accum_type=half,
        velocity_accum_type=half,
        max_grad_norm=3.0,
    )
    assert (sgd.loss_scaling, sgd.use_combined_accum, sgd.max_grad_norm) == (2.0, True, 3.0)
    assert (sgd.accum_type, sgd.velocity_accum_type) == (half, half)
    assert [group["velocity_scaling"] for group in sgd.param_groups] == [4.0]
    moments = {
        "loss_scaling": 2.0,
        "accum_type": half,
        "first_order_momentum_accum_type": half,
        "second_order_momentum_accum_type": half,
    }
    for kind, own in (
        (optim.Adam, {"max_grad_norm": 3.0}),
        (optim.AdamW, {"max_grad_norm": 3.0, "bias_correction": False}),
        (optim.RMSprop, {"use_tf_variant": True}),
        (optim.LAMB, {"bias_correction": False, "max_weight_norm": 7.0}),
    ):
        optimizer = kind(weights(), **moments, **own)
        for name, value in {**moments, **own}.items():
            assert getattr(optimizer, name) == value, (kind, name)


def test_a_group_may_have_its_own_velocity_scaling():
    first, second = weights()
    optimizer = optim.SGD(
        [{"params": [first]}, {"params": [second], "velocity_scaling": 8.0}],
        lr=0.1,
        velocity_scaling=2.0,
        use_combined_accum=True,
    )
    assert [group["velocity_scaling"] for group in optimizer.param_groups] == [2.0, 8.0]


def test_velocity_scaling_of_the_separate_variant_is_ignored_and_said(caplog):
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        optimizer = optim.SGD(weights(), lr=0.1, velocity_scaling=4.0)
    assert [
        record.getMessage() for record in caplog.records if record.name == "poptorch::python"
    ] == [
        "velocity_scaling=4 is ignored without use_combined_accum=True: the separate velocity is "
        "scaled with loss_scaling. Leave it out."
    ]
    assert "velocity_scaling" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (optim.SGD, "accum_type"),
        (optim.SGD, "velocity_accum_type"),
        *[
            (kind, name)
            for kind in CLASSES[1:]
            for name in (
                "accum_type",
                "first_order_momentum_accum_type",
                "second_order_momentum_accum_type",
            )
        ],
    ],
)
def test_other_types_of_accumulators_are_refused(kind, name):
    assert message(kind, weights(), lr=0.1, **{name: torch.bfloat16}, kind=AssertionError) == (
        "Accumulation types must be either torch.float32 or torch.float16, got "
        f"{name}=torch.bfloat16. Pass one of the two."
    )


def test_explicit_arguments_are_variable_and_the_others_constant():
    optimizer = optim.Adam(weights(), lr=1e-3, betas=(0.9, 0.999))
    marks = optimizer.variable_attrs
    assert not marks.isConstant("lr")
    assert not marks.isConstant("betas")
    assert marks.isConstant("eps")
    assert marks.isConstant("loss_scaling")
    marks.markAsVariable("eps")
    marks.markAsVariable("eps")
    marks.markAsConstant("lr")
    assert not marks.isConstant("eps")
    assert marks.isConstant("lr")
    marks.markAsConstant("eps")
    assert marks.isConstant("eps")


@pytest.mark.parametrize("method", ["markAsVariable", "markAsConstant"])
def test_an_unknown_attribute_can_not_be_marked(method):
    marks = optim.VariableAttributes(["lr"], ["lr", "eps"])
    assert marks.isConstant("gamma")
    assert message(getattr(marks, method), "gamma", kind=AssertionError) == (
        "Unknown attribute gamma: the optimizer has no hyper-parameter of this name. It has lr, "
        "eps."
    )


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_loss_scaling_and_every_default_can_be_marked(kind):
    optimizer = kind(weights(), lr=0.1)
    for name in [*optimizer.defaults, "loss_scaling"]:
        optimizer.variable_attrs.markAsVariable(name)
        assert not optimizer.variable_attrs.isConstant(name)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_copies_have_the_settings_but_no_executor(kind):
    """Training loops keep copies; a copy must not read from the device of the original."""
    optimizer = kind(weights(), lr=0.1, loss_scaling=4.0)
    reads = []
    sync = optim_sync(optimizer, reads)
    optimizer.set_state_dict({"ipu_state": {}, "ipu_param": {"a": torch.ones(())}})
    sync.mark_updated()
    for other in (copy.copy(optimizer), copy.deepcopy(optimizer)):
        assert other.loss_scaling == 4.0
        assert not other.variable_attrs.isConstant("loss_scaling")
        own = [name for name in kind._child_only if name != "velocity_scaling"]
        assert all(getattr(other, name) == getattr(optimizer, name) for name in own)
        assert other.ipu_state_is_dirty
        assert not other.host_state_is_dirty
        assert other.state_dict()["ipu_param"] == {"a": torch.ones(())}
    assert reads == []


def optim_sync(optimizer, reads):
    """A connection to a device that gives nothing."""
    from ipufit.poptorch.optim import StateSync

    def read():
        reads.append(1)
        return {"ipu_state": {}, "ipu_param": {}}

    return StateSync(optimizer, read, lambda state: None)


@pytest.mark.parametrize(
    ("kind", "plain", "options"),
    [
        (optim.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (optim.SGD, torch.optim.SGD, {"lr": 0.1, "maximize": True, "weight_decay": 0.1}),
        (optim.Adam, torch.optim.Adam, {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}),
        (optim.AdamW, torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2}),
        (optim.RMSprop, torch.optim.RMSprop, {"lr": 0.1, "centered": True, "momentum": 0.5}),
        (optim.LAMB, PlainLAMB, {"lr": 0.1, "bias_correction": False, "max_weight_norm": 0.5}),
        (optim.LAMB, PlainLAMB, {}),
    ],
)
def test_the_hosts_step_is_that_of_the_plain_class(kind, plain, options):
    """A script that compares with its own steps on the host must get torch's."""
    ours, theirs = weights(), weights()
    for optimizer in (kind(ours, **options), plain(theirs, **options)):
        for _ in range(5):
            optimizer.step()
    for own, other in zip(ours, theirs):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


def test_lambs_step_calls_a_closure_with_gradients_on():
    (weight, _) = weights()
    optimizer = optim.LAMB([weight], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    before = weight.detach().clone()
    assert optimizer.step(closure) == (before**2).sum()
    assert not torch.equal(weight, before)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_schedulers_of_torch_take_them(kind):
    optimizer = kind(weights(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
