"""Updates on the device equal torch's and the papers', number for number."""

import copy
import logging
import math

import pytest
import torch
from torch import nn

from ipufit.poptorch import Error, optim
from ipufit.poptorch._optimizer import CompiledOptimizer
from ipufit.poptorch._optimizer_settings import settings_of

HALF = torch.float16
UPDATES = 10


class Net(nn.Module):
    """Two groups of parameters, one of them in another memory order."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.second = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.double()


def named(net):
    """The device's tensors: copies of the parameters."""
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def grouped(net, lr):
    """Weights, and the rest with a learning rate of its own."""
    weights = [p for name, p in net.named_parameters() if name.endswith("weight")]
    others = [p for name, p in net.named_parameters() if not name.endswith("weight")]
    return [{"params": weights}, {"params": others, "lr": lr / 3}]


def names_of(net, optimizer):
    """Names of the parameters of every group."""
    by_id = {id(p): name for name, p in net.named_parameters()}
    return [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def gradients(net, update, scale=1.0):
    """Those of an update, by name; the same for whoever asks."""
    generator = torch.Generator().manual_seed(100 + update)
    return {
        name: scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for name, p in net.named_parameters()
    }


class Pair:
    """A device's optimizer, and a reference on a net."""

    def __init__(self, kind, options, reference=None, reference_options=None):
        self.net = Net()
        lr = options.get("lr", 0.1)
        self.optimizer = kind(grouped(self.net, lr), **options)
        self.tensors = named(self.net)
        self.device = CompiledOptimizer(
            settings_of(self.optimizer), names_of(self.net, self.optimizer), self.tensors
        )
        plain = reference or kind
        self.reference = plain(
            grouped(self.net, lr), **(options if reference_options is None else reference_options)
        )
        self.updates = 0

    def update(self, max_norm=None):
        """One on both sides."""
        own = gradients(self.net, self.updates)
        scale = self.device.loss_scaling
        self.device.apply({name: g * scale for name, g in own.items()})
        for name, parameter in self.net.named_parameters():
            parameter.grad = own[name]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), max_norm)
        self.reference.step()
        self.updates += 1

    def change(self, **values):
        """Hyper-parameters of group 0, on both sides."""
        for optimizer in (self.optimizer, self.reference):
            optimizer.param_groups[0].update(values)
        self.device.set(settings_of(self.optimizer))

    def check(self, atol=1e-12):
        """Both sides have the same weights, which are not the first ones."""
        start = Net()
        for name, parameter in self.net.named_parameters():
            tensor = self.tensors[name]
            torch.testing.assert_close(tensor, parameter.detach(), rtol=0, atol=atol, msg=name)
            assert not torch.equal(tensor, start.get_parameter(name))


SGD, ADAM, ADAMW, RMSPROP = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
)
CASES = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "weight_decay": 0.05}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    (ADAM, {"lr": 0.01}),
    (ADAM, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    (ADAMW, {"lr": 0.01}),
    (ADAMW, {"lr": 0.01, "weight_decay": 0.0, "betas": (0.7, 0.99)}),
    (RMSPROP, {"lr": 0.01}),
    (RMSPROP, {"lr": 0.01, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.05}),
    (RMSPROP, {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
]
EXTRA = [{}, {"loss_scaling": 0.3}]
COMBINED = [
    {"use_combined_accum": True},
    {"loss_scaling": 0.3, "use_combined_accum": True, "velocity_scaling": 5.0},
]
SCALED = [
    (kind, options, extra)
    for kind, options in CASES
    for extra in (EXTRA + COMBINED if kind is SGD else EXTRA)
]


def title(case):
    """A readable test id."""
    if isinstance(case, dict):
        return ",".join(f"{key}={value}" for key, value in case.items()) or "plain"
    return case.__name__


@pytest.mark.few
@pytest.mark.parametrize(("kind", "options"), CASES, ids=title)
def test_torchs_optimizers_run_as_torch_runs_them(kind, options):
    pair = Pair(kind, options)
    for _ in range(UPDATES):
        pair.update()
    pair.check()


@pytest.mark.few(
    "SGD-lr=0.1-plain",
    "SGD-lr=0.1,momentum=0.9,nesterov=True,weight_decay=0.02-loss_scaling=0.3,use_combined_accum=True,velocity_scaling=5.0",
)
@pytest.mark.parametrize(("kind", "options", "extra"), SCALED, ids=title)
def test_ours_run_as_torchs_whatever_the_scaling(kind, options, extra):
    """Loss scaling and velocity scaling cancel out, in either variant of SGD."""
    pair = Pair(getattr(optim, kind.__name__), {**options, **extra}, kind, options)
    for _ in range(UPDATES):
        pair.update()
    pair.check()


class DampenedSGD(torch.optim.SGD):
    """torch's, with velocities that start at zero; dampening is a smaller rate without momentum."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        for group in self.param_groups:
            if not group["momentum"]:
                group["lr"] *= 1 - group["dampening"]
                continue
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


@pytest.mark.few(
    "None-lr=0.1,momentum=0.9,dampening=0.3",
    "{'loss_scaling': 0.3}-lr=0.1,dampening=0.3,weight_decay=0.02",
    "{'use_combined_accum': True}-lr=0.1,momentum=0.9,dampening=0.3,weight_decay=0.02",
)
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
        {"lr": 0.1, "dampening": 0.3, "weight_decay": 0.02},
    ],
    ids=title,
)
@pytest.mark.parametrize("extra", [None, *EXTRA, *COMBINED], ids=str)
def test_every_gradient_is_dampened_as_in_popart(options, extra):
    """Unlike torch, which takes the first one whole and dampens nothing without momentum."""
    kind = torch.optim.SGD if extra is None else optim.SGD
    pair = Pair(kind, {**options, **(extra or {})}, DampenedSGD, options)
    for _ in range(UPDATES):
        pair.update()
    pair.check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"lr": 0.01}, {"lr": 0.01}),
        ({"lr": 0.01, "loss_scaling": 64.0}, {"lr": 0.01}),
        ({"lr": 0.01, "bias_correction": False}, {"lr": 0.01, "bias_correction": False}),
        ({"lr": 0.01, "max_weight_norm": 0.2}, {"lr": 0.01, "max_weight_norm": 0.2}),
        ({"lr": 0.01, "max_weight_norm": None}, {"lr": 0.01}),
        (
            {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0, "eps": 1e-3},
            {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0, "eps": 1e-3},
        ),
    ],
)
def test_lamb_is_the_papers(options, reference):
    pair = Pair(optim.LAMB, options, PaperLAMB, reference)
    for _ in range(UPDATES):
        pair.update()
    pair.check()


class PaperLAMB(torch.optim.Optimizer):
    """Algorithm 2 of You et al. 2020, written down once more."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, **own):
        super().__init__(params, {"lr": lr})
        self.betas, self.eps, self.decay = betas, eps, weight_decay
        self.corrected = own.get("bias_correction", True)
        self.limit = own.get("max_weight_norm", 65500.0)

    @torch.no_grad()
    def step(self):
        """One update."""
        for group in self.param_groups:
            for x in group["params"]:
                state = self.state[x]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = self.betas[0] * state.get("m", 0) + (1 - self.betas[0]) * x.grad
                v = self.betas[1] * state.get("v", 0) + (1 - self.betas[1]) * x.grad**2
                state["v"] = v
                if self.corrected:
                    m, v = m / (1 - self.betas[0] ** t), v / (1 - self.betas[1] ** t)
                change = m / (v.sqrt() + self.eps) + self.decay * x
                ratio = min(float(x.norm()), self.limit) / float(change.norm())
                x -= group["lr"] * (ratio or 1.0) * change


def test_adamw_is_corrected_whatever_its_bias_correction():
    """The device has no other AdamW."""
    options = {"lr": 0.01, "bias_correction": False}
    pair = Pair(optim.AdamW, options, ADAMW, {"lr": 0.01})
    for _ in range(UPDATES):
        pair.update()
    pair.check()


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_tensorflow_variant_of_rmsprop(momentum, centered):
    """Ones to start with, eps within the root, the learning rate within the momentum."""
    options = {"lr": 0.02, "momentum": momentum, "centered": centered, "alpha": 0.9, "eps": 1e-3}
    pair = Pair(optim.RMSprop, {**options, "use_tf_variant": True}, reference_options=options)
    weights = {name: tensor.clone() for name, tensor in pair.tensors.items()}
    rates = {
        name: group["lr"]
        for group, names in zip(pair.optimizer.param_groups, names_of(pair.net, pair.optimizer))
        for name in names
    }
    state = {
        name: (torch.ones_like(w), torch.zeros_like(w), torch.zeros_like(w))
        for name, w in weights.items()
    }
    for i in range(UPDATES):
        if i == 10:
            pair.change(lr=0.005)
            rates.update({name: 0.005 for name in rates if name.endswith("weight")})
        for name, g in gradients(pair.net, i).items():
            square, mean, buffer = state[name]
            square = 0.9 * square + 0.1 * g**2
            mean = 0.9 * mean + 0.1 * g
            variance = square - mean**2 if centered else square
            buffer = momentum * buffer + rates[name] * g / (variance + 1e-3).sqrt()
            state[name] = square, mean, buffer
            weights[name] -= buffer
        pair.update()
    for name, weight in weights.items():
        torch.testing.assert_close(pair.tensors[name], weight, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "options", "changes"),
    [
        (SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum": 0.5}),
        (SGD, {"lr": 0.1, "weight_decay": 0.1}, {"weight_decay": 0.2}),
        (ADAM, {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-4}, {"weight_decay": 0.2, "eps": 1e-2}),
        (ADAMW, {"lr": 0.1, "weight_decay": 0.1}, {"weight_decay": 0.2}),
        (RMSPROP, {"lr": 0.1, "momentum": 0.1}, {"momentum": 0.7}),
    ],
    ids=title,
)
def test_a_schedule_is_followed_from_update_to_update(kind, options, changes):
    pair = Pair(kind, options)
    schedulers = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for optimizer in (pair.optimizer, pair.reference)
    ]
    for i in range(UPDATES):
        pair.update()
        # The device's update is one, whatever the scheduler has seen.
        pair.optimizer._opt_called, pair.optimizer._step_count = True, i + 1
        for scheduler in schedulers:
            scheduler.step()
        pair.device.set(settings_of(pair.optimizer))
        if i == 12:
            pair.change(**changes)
    pair.check()


def test_a_changed_loss_scaling_cancels_out_too():
    """The velocity is scaled like the loss, so it is Adam that shows it."""
    pair = Pair(optim.Adam, {"lr": 0.01, "loss_scaling": 4.0}, ADAM, {"lr": 0.01})
    for i in range(UPDATES):
        pair.update()
        pair.optimizer.loss_scaling = float(2 ** (i % 5))
        pair.device.set(settings_of(pair.optimizer))
        assert pair.device.loss_scaling == pair.optimizer.loss_scaling
    pair.check()


def test_momentum_that_may_change_has_a_velocity_while_it_is_zero():
    """The program is the same whatever the value, so the last gradient is there when it rises."""
    pair = Pair(optim.SGD, {"lr": 0.1, "momentum": 0.0})
    velocity = torch.zeros(2, dtype=torch.float64)
    weight = pair.tensors["second.bias"].clone()
    for i in range(6):
        momentum = 0.9 if i >= 3 else 0.0
        for group in pair.optimizer.param_groups:
            group.update(momentum=momentum, lr=0.1)
        pair.device.set(settings_of(pair.optimizer))
        velocity = momentum * velocity + gradients(pair.net, i)["second.bias"]
        weight -= 0.1 * velocity
        pair.update()
    torch.testing.assert_close(pair.tensors["second.bias"], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("combined", [False, True])
def test_new_numbers_come_into_full_effect_an_update_later_in_the_combined_variant(combined):
    """Its velocity already has the coming update's momentum and weight decay within it."""
    start = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    pair = Pair(optim.SGD, {**start, "use_combined_accum": combined})
    weight = pair.tensors["second.weight"].clone()
    velocity = torch.zeros_like(weight)
    now = before = dict(start)
    for i in range(10):
        if i == 4:
            now = {"lr": 0.05, "momentum": 0.3, "weight_decay": 0.5}
            pair.change(**now)
        lagging = before if combined else now
        g = gradients(pair.net, i)["second.weight"]
        velocity = lagging["momentum"] * velocity + g + lagging["weight_decay"] * weight
        weight = weight - now["lr"] * velocity
        before = now
        pair.update()
    torch.testing.assert_close(pair.tensors["second.weight"], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("combined", [False, True])
def test_less_velocity_scaling_overestimates_the_velocity_for_a_while(combined):
    """What is in the velocity is not rescaled: so it is on the device."""
    scaling = "velocity_scaling" if combined else "loss_scaling"
    options = {"lr": 0.1, "momentum": 0.5, "use_combined_accum": combined, scaling: 4.0}
    pair = Pair(optim.SGD, options)
    weight = pair.tensors["second.bias"].clone()
    velocity = torch.zeros_like(weight)
    scale = 4.0
    for i in range(6):
        if i == 3:
            scale = 1.0
            if combined:
                for group in pair.optimizer.param_groups:
                    group["velocity_scaling"] = scale
            else:
                pair.optimizer.loss_scaling = scale
            pair.device.set(settings_of(pair.optimizer))
        velocity = 0.5 * velocity + scale * gradients(pair.net, i)["second.bias"]
        weight -= 0.1 / 3 / scale * velocity
        pair.update()
    torch.testing.assert_close(pair.tensors["second.bias"], weight, rtol=0, atol=1e-12)


@pytest.mark.few
@pytest.mark.parametrize("scaling", [1.0, 16.0])
@pytest.mark.parametrize("max_norm", [0.01, 3.0, 1e6])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_one_norm_of_all_gradients_is_bounded(name, max_norm, scaling):
    """As clip_grad_norm_ does it, to the gradient without its scaling, over all groups."""
    options = {"lr": 0.05, "momentum": 0.9} if name == "SGD" else {"lr": 0.05}
    pair = Pair(
        getattr(optim, name),
        {**options, "max_grad_norm": max_norm, "loss_scaling": scaling},
        getattr(torch.optim, name),
        options,
    )
    for _ in range(UPDATES):
        pair.update(max_norm)
    pair.check()


def test_parameters_that_are_not_reached_or_not_given_stay():
    """A frozen weight is not on the device's list, and one of no group has no update."""
    net = Net()
    tensors = named(net)
    before = copy.deepcopy(tensors)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    groups = [["first.weight", "second.weight", "frozen"]]
    device = CompiledOptimizer(settings_of(optimizer), groups, tensors)
    device.apply(gradients(net, 0))
    changed = {name for name in tensors if not torch.equal(tensors[name], before[name])}
    assert changed == {"first.weight", "second.weight"}
    alone = CompiledOptimizer(settings_of(optimizer), [["frozen"]], tensors)
    alone.apply({})
    assert alone.state() == {"ipu_state": {}, "ipu_param": {}}


def test_the_devices_tensors_stay_those_that_were_given():
    """The executor goes on with them: it writes weights into them and reads them."""
    pair = Pair(SGD, {"lr": 0.1})
    tensor = pair.tensors["first.weight"]
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    tensor.copy_(torch.ones_like(tensor))
    pair.update()
    expected = 1 - 0.1 * gradients(pair.net, 0)["first.weight"]
    torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-12)


# --- half precision


def half_net():
    """A weight, and what trains it."""
    return {"w": torch.full((4,), 0.5, dtype=HALF)}


def run(kind, tensors, gradient, updates=1, **options):
    """Updates of one weight with the same gradient, multiplied by the loss scaling before."""
    parameter = tensors["w"].clone().requires_grad_()
    device = CompiledOptimizer(settings_of(kind([parameter], **options)), [["w"]], tensors)
    for _ in range(updates):
        device.apply({"w": gradient})
    return device


@pytest.mark.long
def test_the_state_of_half_precision_weights_is_float32_unless_asked():
    for kind, kwargs, expected in (
        (optim.SGD, {"momentum": 0.9}, {"Accl1___w": torch.float32}),
        (optim.SGD, {"momentum": 0.9, "velocity_accum_type": HALF}, {"Accl1___w": HALF}),
        (optim.SGD, {"momentum": 0.9, "use_combined_accum": True}, {"Accl___w": HALF}),
        (optim.SGD, {}, {}),
        (
            optim.Adam,
            {"first_order_momentum_accum_type": HALF},
            {"Accl1___w": HALF, "Accl2___w": torch.float32, "Step___w": torch.float32},
        ),
        (
            optim.LAMB,
            {"second_order_momentum_accum_type": HALF},
            {"Accl1___w": torch.float32, "Accl2___w": HALF, "Step___w": torch.float32},
        ),
        (
            optim.RMSprop,
            {"first_order_momentum_accum_type": HALF, "centered": True, "momentum": 0.5},
            {"Accl1___w": HALF, "Accl3___w": torch.float32, "Accl2___w": HALF},
        ),
        (
            optim.RMSprop,
            {"second_order_momentum_accum_type": HALF, "centered": True},
            {"Accl1___w": torch.float32, "Accl2___w": torch.float32},
        ),
    ):
        device = run(kind, half_net(), torch.ones(4, dtype=HALF), lr=0.1, **kwargs)
        state = device.state()["ipu_state"]
        assert {name: tensor.dtype for name, tensor in state.items()} == expected


def test_small_gradients_of_half_precision_survive_in_wide_state():
    """1e-4 squared is nothing in float16: with a state of float16, the step explodes."""
    gradient = torch.full((4,), 1e-4, dtype=HALF)
    wide, narrow = half_net(), half_net()
    run(optim.Adam, wide, gradient, lr=0.125)
    types = {f"{order}_order_momentum_accum_type": HALF for order in ("first", "second")}
    run(optim.Adam, narrow, gradient, lr=0.125, **types)
    torch.testing.assert_close(wide["w"].float(), torch.full((4,), 0.375), rtol=0, atol=1e-3)
    assert (narrow["w"].float().abs() > 100).all()


def test_loss_scaling_is_taken_out_in_single_precision():
    """Otherwise what the scaling has saved would be lost again as it is divided by."""
    tensors = half_net()
    scaled = torch.full((4,), 0.01, dtype=HALF)
    run(optim.SGD, tensors, scaled, lr=2.0**24, loss_scaling=2.0**20)
    expected = 0.5 - 2.0**24 * float(scaled[0]) / 2.0**20
    torch.testing.assert_close(tensors["w"].float(), torch.full((4,), expected), rtol=1e-3, atol=0)


def test_a_gradient_that_overflowed_is_not_hidden():
    tensors = half_net()
    run(optim.SGD, tensors, torch.full((4,), math.inf, dtype=HALF), lr=0.1, loss_scaling=2.0**20)
    assert not tensors["w"].isfinite().any()


# --- settings


def said(caplog):
    """What the front end logged."""
    return [r.getMessage() for r in caplog.records if r.name == "poptorch::python"]


def test_settings_that_do_not_fit_the_program_change_nothing():
    pair = Pair(SGD, {"lr": 0.1})
    pair.update()
    old = pair.device.settings
    pair.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(Error, match="from a constant to variable"):
        pair.device.set(settings_of(pair.optimizer))
    assert pair.device.settings is old
    pair.optimizer.param_groups[0].update(momentum=0.0, lr=-1.0)
    with pytest.raises(Error, match="lr to be zero or more"):
        pair.device.set(settings_of(pair.optimizer))
    assert pair.device.settings is old
    pair.update()
    pair.check()


def test_a_device_refuses_what_it_can_not_compute_with():
    net = Net()
    with pytest.raises(Error, match="eps to be more than zero"):
        CompiledOptimizer(
            settings_of(torch.optim.Adam(net.parameters(), eps=0.0)), [[]], named(net)
        )


def test_what_is_sent_is_logged_and_the_same_is_not_sent_again(caplog):
    pair = Pair(SGD, {"lr": 0.1})
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        pair.device.set(settings_of(pair.optimizer))
        assert said(caplog) == []
        pair.change(lr=0.5)
    lines = said(caplog)
    assert [line.partition(" with ")[0] for line in lines] == [
        "Updating graph optimizer",
        "Updating group 0 optimizer",
        "Updating group 1 optimizer",
    ]
    assert "SGD, learningRate=0.5," in lines[1]
    assert pair.device.settings == settings_of(pair.optimizer)


def test_nesterov_stays_as_it_was_compiled(caplog):
    """A mark lets it change, but it is no number of the program."""
    options = {"lr": 0.1, "momentum": 0.9}
    pair = Pair(optim.SGD, {**options, "nesterov": True}, SGD, {**options, "nesterov": True})
    pair.update()
    for group in pair.optimizer.param_groups:
        group["nesterov"] = False
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        pair.device.set(settings_of(pair.optimizer))
    assert said(caplog) == [
        f"nesterov of group {group} is part of the compiled program and stays True. Call destroy() "
        "and wrap the model again to change it."
        for group in (0, 1)
    ]
    for _ in range(5):
        pair.update()
    pair.check()
