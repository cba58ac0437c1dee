"""The device's state of an optimizer: its names, what it is worth, and its ways to and fro."""

import logging

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from ipufit import poptorch
from ipufit.poptorch import Error, optim
from ipufit.poptorch._loss_scale import AutomaticLossScale
from ipufit.poptorch._optimizer import CompiledOptimizer
from ipufit.poptorch._optimizer_rules import Factors
from ipufit.poptorch._optimizer_settings import settings_of
from ipufit.poptorch.optim import StateSync

CLASSES = [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB]
NAMES = ("w", "b")


def tensors():
    """Two parameters of a device."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"w": (3, 2), "b": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def gradients(update):
    """Theirs, in an update."""
    generator = torch.Generator().manual_seed(50 + update)
    shapes = {"w": (3, 2), "b": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def made(kind, **options):
    """An optimizer of two parameters."""
    return kind([t.clone().requires_grad_() for t in tensors().values()], **options)


def on_device(optimizer, weights=None, factors=None, automatic=None):
    """It, with its weights."""
    weights = tensors() if weights is None else weights
    settings = settings_of(optimizer, automatic is not None)
    return CompiledOptimizer(settings, [NAMES], weights, factors, automatic), weights


def said(caplog):
    """What the front end logged."""
    return [r.getMessage() for r in caplog.records if r.name == "poptorch::python"]


def all_variable(optimizer):
    """With every hyper-parameter marked."""
    for name in optimizer.variable_attrs._allowed_attributes:
        optimizer.variable_attrs.markAsVariable(name)
    return optimizer


# --- names and values


@pytest.mark.parametrize(
    ("kind", "options", "state", "numbers"),
    [
        (optim.SGD, {}, [], ["scaledLearningRate0", "weightDecayScaleFactor0"]),
        (
            optim.SGD,
            {"momentum": 0.9},
            ["Accl1"],
            ["scaledLearningRate2", "scaledMomentum2"],
        ),
        (
            optim.SGD,
            {"momentum": 0.9, "loss_scaling": 2.0, "nesterov": True},
            ["Accl1"],
            [
                "dampeningScaleFactor2",
                "nesterovDampeningScaleFactor2",
                "nesterovGradScaleFactor2",
                "scaledLearningRate2",
                "scaledMomentum2",
                "scaledWeightDecay1",
                "sgdMomentum",
            ],
        ),
        (
            optim.SGD,
            {"momentum": 0.9, "use_combined_accum": True, "weight_decay": 0.1},
            ["Accl"],
            ["scaledLearningRate1", "scaledMomentum1", "scaledWeightDecay1"],
        ),
        (optim.Adam, {}, ["Accl1", "Accl2", "Step"], ["learningRate"]),
        (
            optim.AdamW,
            {"betas": (0.5, 0.5), "eps": 1e-3, "weight_decay": 0.1, "loss_scaling": 2.0},
            ["Accl1", "Accl2", "Step"],
            [
                "adamBeta1",
                "adamBeta2",
                "adamEps",
                "adamGradientScaling",
                "learningRate",
                "weightDecay",
            ],
        ),
        (
            optim.LAMB,
            {"max_weight_norm": 2.0},
            ["Accl1", "Accl2", "Step"],
            ["learningRate", "maxWeightNorm"],
        ),
        (optim.LAMB, {"bias_correction": False}, ["Accl1", "Accl2"], ["learningRate"]),
        (
            optim.RMSprop,
            {"alpha": 0.5, "eps": 1e-3, "loss_scaling": 2.0},
            ["Accl1"],
            ["adaptiveAlpha", "adaptiveEps", "adaptiveGradientScaling", "learningRate"],
        ),
        (
            optim.RMSprop,
            {"centered": True, "momentum": 0.5},
            ["Accl1", "Accl2", "Accl3"],
            ["adaptiveMomentum", "learningRate"],
        ),
    ],
)
def test_state_has_the_devices_names(kind, options, state, numbers):
    """Constants are no numbers of the device: they are part of the program."""
    device, _ = on_device(made(kind, lr=0.1, **options))
    found = device.state()
    assert sorted(found["ipu_state"]) == sorted(f"{s}___{p}" for s in state for p in NAMES)
    expected = [f"{n}___specific___{p}" for n in numbers for p in NAMES]
    expected += ["lossScaling_FLOAT"] * ("loss_scaling" in options)
    assert sorted(found["ipu_param"]) == sorted(expected)
    assert all(t.dtype == torch.float32 for part in found.values() for t in part.values())


@pytest.mark.parametrize(
    ("kind", "options", "factors", "expected"),
    [
        (
            optim.SGD,
            {"lr": 0.05, "weight_decay": 0.5, "loss_scaling": 0.25},
            Factors(),
            {"scaledLearningRate0": 0.2, "weightDecayScaleFactor0": 0.975},
        ),
        (
            optim.SGD,
            {"lr": 0.8, "loss_scaling": 2.0},
            Factors(accumulation=2, replicas=4),
            {"scaledLearningRate0": 0.05},
        ),
        (
            optim.SGD,
            {"lr": 0.8, "loss_scaling": 2.0},
            Factors(accumulation=2, replicas=4, post=False),
            {"scaledLearningRate0": 0.4},
        ),
        (
            optim.SGD,
            {"lr": 0.8, "loss_scaling": 2.0},
            Factors(accumulation=2, replicas=4, mean=False),
            {"scaledLearningRate0": 0.4},
        ),
        (
            optim.SGD,
            {"lr": 0.8, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.1, "loss_scaling": 4},
            Factors(accumulation=3),
            {
                "scaledMomentum2": 0.5,
                "dampeningScaleFactor2": 0.25,
                "scaledWeightDecay1": 0.3,
                "scaledLearningRate2": 0.2,
            },
        ),
        (
            optim.SGD,
            {
                "lr": 0.8,
                "momentum": 0.6,
                "loss_scaling": 4.0,
                "velocity_scaling": 2.0,
                "use_combined_accum": True,
            },
            Factors(accumulation=3, replicas=2),
            {"scaledMomentum1": 0.3, "dampeningScaleFactor1": 1 / 6, "scaledLearningRate1": 0.2},
        ),
        (
            optim.SGD,
            {"lr": 0.8, "momentum": 0.6, "loss_scaling": 4.0, "use_combined_accum": True},
            Factors(accumulation=3, replicas=2, mean=False),
            {"scaledMomentum1": 0.3, "dampeningScaleFactor1": 0.5, "scaledLearningRate1": 0.4},
        ),
        (
            optim.SGD,
            {"lr": 0.8, "momentum": 0.6, "loss_scaling": 4.0, "use_combined_accum": True},
            Factors(replicas=2),
            {"scaledMomentum1": 0.6, "dampeningScaleFactor1": 0.125, "scaledLearningRate1": 0.8},
        ),
        (
            optim.Adam,
            {"lr": 0.05, "betas": (0.25, 0.5), "eps": 0.125, "loss_scaling": 4.0},
            Factors(replicas=2),
            {
                "learningRate": 0.05,
                "adamBeta1": 0.25,
                "adamBeta2": 0.5,
                "adamEps": 0.125,
                "adamGradientScaling": 0.125,
            },
        ),
        (
            optim.RMSprop,
            {"lr": 0.05, "alpha": 0.25, "momentum": 0.5, "loss_scaling": 4.0, "weight_decay": 0.3},
            Factors(),
            {
                "learningRate": 0.05,
                "adaptiveAlpha": 0.25,
                "adaptiveMomentum": 0.5,
                "weightDecay": 0.3,
                "adaptiveGradientScaling": 0.25,
            },
        ),
    ],
)
def test_numbers_are_what_the_device_multiplies_with(kind, options, factors, expected):
    device, _ = on_device(made(kind, **options), factors=factors)
    found = device.state()["ipu_param"]
    assert found["lossScaling_FLOAT"] == options["loss_scaling"]
    for name, value in expected.items():
        for parameter in NAMES:
            number = found[f"{name}___specific___{parameter}"]
            torch.testing.assert_close(number, torch.tensor(value), rtol=1e-6, atol=0)


def test_state_is_the_optimizers_of_torch():
    device, weights = on_device(made(optim.Adam, lr=0.1))
    other = {name: weight.clone().requires_grad_() for name, weight in tensors().items()}
    reference = torch.optim.Adam(other.values(), lr=0.1)
    for i in range(3):
        device.apply(gradients(i))
        for name, parameter in other.items():
            parameter.grad = gradients(i)[name]
        reference.step()
    state = device.state()["ipu_state"]
    for name, parameter in other.items():
        own = reference.state[parameter]
        torch.testing.assert_close(state[f"Accl1___{name}"], own["exp_avg"])
        torch.testing.assert_close(state[f"Accl2___{name}"], own["exp_avg_sq"])
        assert state[f"Step___{name}"] == 3
        torch.testing.assert_close(weights[name], parameter.detach())


def test_what_was_read_does_not_follow_the_device():
    device, _ = on_device(made(optim.Adam, lr=0.1))
    before = device.state()["ipu_state"]["Accl1___w"]
    device.apply(gradients(0))
    assert not before.any()
    assert device.state()["ipu_state"]["Accl1___w"].all()


# --- writing


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
        (optim.SGD, {"momentum": 0.9, "use_combined_accum": True, "weight_decay": 0.1}),
        (optim.Adam, {}),
        (optim.AdamW, {}),
        (optim.LAMB, {}),
        (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    ],
)
def test_another_program_goes_on_where_the_state_was_read(kind, options):
    first, weights = on_device(made(kind, lr=0.1, **options))
    for i in range(3):
        first.apply(gradients(i))
    second, copies = on_device(
        made(kind, lr=0.1, **options), {name: t.clone() for name, t in weights.items()}
    )
    second.load_state(first.state())
    for i in range(3, 6):
        first.apply(gradients(i))
        second.apply(gradients(i))
    for name, weight in weights.items():
        torch.testing.assert_close(copies[name], weight, rtol=0, atol=0)


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "start", "other"),
    [
        (optim.SGD, {"weight_decay": 0.1}, {"lr": 0.3, "weight_decay": 0.2, "loss_scaling": 1.0}),
        (optim.SGD, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.5, "dampening": 0.6}),
        (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, {"lr": 0.3, "weight_decay": 0.4}),
        (
            optim.SGD,
            {"momentum": 0.9, "use_combined_accum": True, "velocity_scaling": 2.0},
            {"momentum": 0.5, "lr": 0.3},
        ),
        (optim.Adam, {}, {"lr": 0.3, "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.2}),
        (optim.AdamW, {}, {"lr": 0.3, "weight_decay": 0.2}),
        (optim.LAMB, {}, {"lr": 0.3, "max_weight_norm": 0.5, "weight_decay": 0.2}),
        (optim.RMSprop, {}, {"lr": 0.3, "alpha": 0.5, "momentum": 0.5, "eps": 0.1}),
    ],
)
@pytest.mark.parametrize("factors", [Factors(), Factors(accumulation=3, replicas=2)])
def test_numbers_that_were_written_are_those_that_count(kind, start, other, factors):
    """A number of another optimizer does what that optimizer would do; the settings come later."""
    options = {"lr": 0.1, **start}
    writer = all_variable(made(kind, **{**options, **other}))
    reader = all_variable(made(kind, **options))
    first, weights = on_device(writer, factors=factors)
    second, copies = on_device(reader, factors=factors)
    first.apply(gradients(0))
    second.apply(gradients(0))
    for name, weight in weights.items():
        copies[name].copy_(weight)
    second.load_state(first.state())
    expected = first.state()["ipu_param"]
    for i in range(1, 4):
        first.apply(gradients(i))
        second.apply(gradients(i))
    for name, weight in weights.items():
        torch.testing.assert_close(copies[name], weight, rtol=1e-5, atol=1e-6)
    assert second.state()["ipu_param"] == expected
    reader.param_groups[0]["lr"] = 0.7
    second.set(settings_of(reader))
    fresh, _ = on_device(reader, factors=factors)
    assert second.state()["ipu_param"] == fresh.state()["ipu_param"]


def test_every_parameter_may_get_numbers_of_its_own():
    """They are kept by parameter on the device, though an optimizer has them by group."""
    device, weights = on_device(made(optim.Adam, lr=0.1))
    state = device.state()
    state["ipu_param"]["learningRate___specific___b"] = torch.tensor(0.0)
    device.load_state(state)
    start = tensors()
    device.apply(gradients(0))
    assert torch.equal(weights["b"], start["b"])
    assert not torch.isclose(weights["w"], start["w"]).any()


def test_every_parameter_may_get_a_count_of_its_own():
    device, weights = on_device(made(optim.Adam, lr=0.1))
    state = device.state()
    state["ipu_state"]["Step___w"] = torch.tensor(7.0)
    device.load_state(state)
    start = tensors()
    device.apply(gradients(0))
    g = gradients(0)["w"]
    first, second = 0.1 * g / (1 - 0.9**8), 0.001 * g * g / (1 - 0.999**8)
    expected = start["w"] - 0.1 * first / (second.sqrt() + 1e-8)
    torch.testing.assert_close(weights["w"], expected)
    steps = [device.state()["ipu_state"][f"Step___{name}"].item() for name in NAMES]
    assert steps == [8.0, 1.0]


@pytest.mark.few
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_any_numbers_come_back_as_they_were_written(kind):
    """Also such that no optimizer could have: a device takes what it is given."""
    device, _ = on_device(all_variable(made(kind, lr=0.1)))
    state = device.state()
    generator = torch.Generator().manual_seed(1)
    written = {
        key: {name: torch.randn(t.shape, generator=generator) for name, t in part.items()}
        for key, part in state.items()
    }
    device.load_state(written)
    found = device.state()
    for key, part in written.items():
        for name, tensor in part.items():
            assert torch.equal(found[key][name], tensor), name
    device.apply(gradients(0))
    found = device.state()
    assert all(torch.equal(found["ipu_param"][n], t) for n, t in written["ipu_param"].items())
    changed = [
        not torch.allclose(found["ipu_state"][n], t) for n, t in written["ipu_state"].items()
    ]
    assert all(changed)


def test_what_is_missing_stays_and_is_said(caplog):
    device, _ = on_device(made(optim.Adam, lr=0.1))
    device.apply(gradients(0))
    before = device.state()
    state = {
        "ipu_state": {"Accl1___w": torch.ones(3, 2), "unknown": torch.ones(())},
        "ipu_param": {"learningRate___specific___b": torch.tensor(0.5)},
    }
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        device.load_state(state)
    missing = ["Accl2___w", "Accl1___b", "Accl2___b", "Step___w", "Step___b"]
    assert said(caplog) == [
        *[
            f"The optimizer's state {name} is missing in what is loaded, and stays."
            for name in missing
        ],
        "The optimizer's parameter learningRate___specific___w is missing in what is loaded, and "
        "stays.",
    ]
    after = device.state()
    assert all(torch.equal(after["ipu_state"][n], before["ipu_state"][n]) for n in missing)
    assert torch.equal(after["ipu_state"]["Accl1___w"], torch.ones(3, 2))
    numbers = {name: number.item() for name, number in after["ipu_param"].items()}
    assert numbers == pytest.approx(
        {"learningRate___specific___w": 0.1, "learningRate___specific___b": 0.5}
    )


def test_state_of_another_shape_is_refused_before_anything_changes():
    device, _ = on_device(made(optim.Adam, lr=0.1))
    state = device.state()
    state["ipu_state"]["Accl1___w"].fill_(1)
    state["ipu_state"]["Accl2___b"] = torch.ones(7)
    with pytest.raises(Error) as caught:
        device.load_state(state)
    assert caught.value.message == (
        "State Accl2___b of the optimizer must have shape (3,), got (7,). Load the state of an "
        "optimizer of the same model."
    )
    assert not device.state()["ipu_state"]["Accl1___w"].any()


# --- between the optimizer and the device


class Life:
    """An executor's half: a device that notes what is read and written."""

    def __init__(self, optimizer):
        self.notes = []
        self.optimizer = optimizer
        self.device, self.weights = on_device(optimizer)
        self.sync = StateSync(optimizer, self.read, self.write)
        self.updates = 0

    def read(self):
        """From the device."""
        self.notes.append("read")
        return self.device.state()

    def write(self, state):
        """To the device."""
        self.notes.append("write")
        self.device.load_state(state)

    def run(self):
        """One update."""
        self.sync.send()
        self.device.apply(gradients(self.updates))
        self.updates += 1
        self.sync.mark_updated()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_state_is_none_until_there_is_a_device(kind):
    optimizer = made(kind, lr=0.1)
    plain = kind.__bases__[1].state_dict(optimizer)
    assert optimizer.state_dict() == {"ipu_state": None, "ipu_param": None, **plain}
    assert not optimizer.has_state()
    life = Life(optimizer)
    assert optimizer.state_dict()["ipu_state"] is None
    assert life.notes == []


def test_the_device_is_read_only_if_it_ran_since(caplog):
    life = Life(made(optim.Adam, lr=0.1))
    life.sync.attach()
    assert not life.optimizer.state_dict()["ipu_state"]["Accl1___w"].any()
    assert life.notes == ["read"]
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        life.optimizer.state_dict()
    assert said(caplog) == ["Using cached optimiser state dict: the device has not run since."]
    life.run()
    assert life.optimizer.state_dict()["ipu_state"]["Step___w"] == 1
    life.run()
    life.run()
    assert life.optimizer.state_dict()["ipu_state"]["Step___w"] == 3
    assert life.notes == ["read"] * 3


def test_transfers_are_logged(caplog):
    life = Life(made(optim.Adam, lr=0.1))
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        life.sync.attach()
        state = life.optimizer.state_dict()
        life.optimizer.load_state_dict(state)
        life.sync.send()
    assert said(caplog) == [
        "Writing optimiser state tensors from IPU to host: 6 state tensors, 2 numbers.",
        "Writing optimiser state tensors from host to IPU memory: 6 state tensors, 2 numbers.",
    ]


def test_loaded_state_is_written_with_the_next_run():
    life = Life(made(optim.Adam, lr=0.1))
    life.sync.attach()
    life.run()
    state = life.optimizer.state_dict()
    life.run()
    life.run()
    life.optimizer.load_state_dict(state)
    assert life.optimizer.state_dict()["ipu_state"]["Step___w"] == 1
    assert life.notes == ["read"]
    life.run()
    assert life.notes == ["read", "write"]
    assert life.optimizer.state_dict()["ipu_state"]["Step___w"] == 2
    life.run()
    assert life.notes == ["read", "write", "read"]


def test_a_dict_that_was_changed_changes_nothing_until_it_is_loaded():
    life = Life(made(optim.Adam, lr=0.1))
    life.sync.attach()
    state = life.optimizer.state_dict()
    state["ipu_state"].clear()
    assert "Step___w" in life.optimizer.state_dict()["ipu_state"]


def test_an_optimizer_with_state_brings_it_along():
    life = Life(made(optim.Adam, lr=0.1))
    life.sync.attach()
    life.run()
    other = made(optim.Adam, lr=0.1)
    other.load_state_dict(life.optimizer.state_dict())
    second = Life(other)
    second.sync.attach()
    other.state_dict()
    assert second.notes == ["write"]
    second.run()
    assert other.state_dict()["ipu_state"]["Step___w"] == 2


def test_an_optimizer_that_is_replaced_keeps_the_last_state_and_lets_go():
    life = Life(made(optim.Adam, lr=0.1))
    life.sync.attach()
    life.run()
    life.sync.close()
    life.sync.close()
    assert life.notes == ["read"]
    life.device.apply(gradients(1))
    life.sync.mark_updated()
    assert life.optimizer.state_dict()["ipu_state"]["Step___w"] == 1
    assert life.notes == ["read"]
    second = made(optim.Adam, lr=0.1)
    sync = StateSync(second, life.read, life.write)
    sync.attach()
    assert second.state_dict()["ipu_state"]["Step___w"] == 2


def test_an_optimizer_that_belongs_to_another_executor_is_not_taken_from_it():
    first = Life(made(optim.Adam, lr=0.1))
    second = Life(first.optimizer)
    second.sync.attach()
    first.sync.close()
    first.optimizer.state_dict()
    assert (first.notes, second.notes) == ([], ["read"])


def test_a_program_that_is_attached_again_takes_only_what_was_loaded_since():
    """What was read before is older than settings that came in between."""
    life = Life(made(optim.Adam, lr=0.1))
    life.sync.attach()
    life.run()
    life.sync.refresh()
    life.optimizer.param_groups[0]["lr"] = 0.5
    life.device.set(settings_of(life.optimizer))
    life.sync.attach()
    assert life.notes == ["read"]
    life.run()
    found = life.optimizer.state_dict()
    assert found["ipu_param"]["learningRate___specific___w"] == 0.5
    life.sync.refresh()
    life.optimizer.load_state_dict(found)
    life.sync.attach()
    assert life.notes == ["read", "read", "write"]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_state_of_torchs_optimizers_stays_on_the_device(kind):
    optimizer = made(kind, lr=0.1)
    life = Life(optimizer)
    life.sync.attach()
    life.run()
    life.sync.refresh()
    life.sync.close()
    assert life.notes == []
    assert "ipu_state" not in optimizer.state_dict()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            {},
            "Cannot load optimizer state dictionary because it is empty. Pass what state_dict() of "
            "an optimizer of poptorch.optim gave.",
        ),
        (
            None,
            "Only IPU optimizer states can be loaded onto the IPU. This one has no 'ipu_state' and "
            "'ipu_param', as that of an optimizer of torch.optim; pass what state_dict() of an "
            "optimizer of poptorch.optim gave.",
        ),
    ],
)
def test_state_of_no_device_is_refused_before_anything_changes(state, text):
    if state is None:
        state = made(torch.optim.Adam, lr=0.5).state_dict()
    optimizer = made(optim.Adam, lr=0.1)
    with pytest.raises(RuntimeError) as caught:
        optimizer.load_state_dict(state)
    assert str(caught.value) == text
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.ipu_state_is_dirty


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_checkpoint_goes_through_a_file(tmp_path):
    """Learning rates come with it, and the file holds nothing that has to be unpickled."""
    life = Life(made(optim.Adam, lr=1.0))
    life.sync.attach()
    scheduler = ExponentialLR(life.optimizer, 0.5)
    life.optimizer._opt_called, life.optimizer._step_count = True, 1
    life.run()
    scheduler.step()
    life.device.set(settings_of(life.optimizer))
    torch.save(life.optimizer.state_dict(), tmp_path / "optimizer.pt")
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    other = made(optim.Adam, lr=0.1)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.5
    second = Life(other)
    second.sync.attach()
    second.run()
    found = other.state_dict()
    assert found["ipu_param"]["learningRate___specific___w"] == 0.5
    assert found["ipu_state"]["Step___w"] == 2


# --- automatic loss scaling


@pytest.mark.grid(pairs=False)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("initial", [1.0, 2.0])
def test_the_factor_is_part_of_the_state_and_cancels_out(kind, initial):
    device, weights = on_device(
        made(kind, lr=0.1, loss_scaling=initial), automatic=AutomaticLossScale()
    )
    plain, expected = on_device(made(kind, lr=0.1))
    for i in range(4):
        factor = device.state()["ipu_state"]["lossScaleUpdateFactor"]
        assert factor == 2.0**i
        assert device.loss_scaling == initial * factor
        assert device.state()["ipu_param"]["lossScaling_FLOAT"] == initial
        device.apply({name: g * device.loss_scaling for name, g in gradients(i).items()})
        plain.apply(gradients(i))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6)
    state = device.state()
    state["ipu_state"]["lossScaleUpdateFactor"] = torch.tensor(0.5)
    device.load_state(state)
    assert device.loss_scaling == initial * 0.5


class Weighted(torch.nn.Module):
    """A loss with the gradient one for its weight."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return poptorch.identity_loss(self.weight * x, "sum")


def test_state_that_was_loaded_goes_to_the_device_together_with_the_hosts_weights(caplog):
    """What training made of them comes to the host first; what was changed there since, goes."""
    net = Weighted()
    optimizer = optim.SGD(net.parameters(), lr=1.0, momentum=0.5, use_combined_accum=False)
    model = poptorch.trainingModel(net, optimizer=optimizer)
    x = torch.ones(2)
    model(x)  # momentum 1, weights -1
    state = optimizer.state_dict()
    model(x)  # momentum 1.5, weights -2.5
    optimizer.load_state_dict(state)
    with caplog.at_level("DEBUG", poptorch.logger.name):
        model(x)  # momentum 1.5 again
    texts = ("Implicit copyWeightsToHost()", "Writing weights from", "Writing optimiser state")
    seen = [m.split(":")[0] for m in caplog.messages if m.startswith(texts)]
    assert seen == [
        "Implicit copyWeightsToHost()",
        "Writing weights from IPU to host",
        "Writing weights from host to IPU memory",
        "Writing optimiser state tensors from host to IPU memory",
    ]
    torch.testing.assert_close(net.weight.detach(), torch.full((2,), -4.0))

    with torch.no_grad():
        net.weight.fill_(10.0)
    optimizer.load_state_dict(state)
    model(x)
    torch.testing.assert_close(net.weight.detach(), torch.full((2,), 8.5))
