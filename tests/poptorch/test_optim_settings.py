"""What of an optimizer goes to a device, and what may change about it after compilation."""

import enum
import logging
import math
import types

import pytest
import torch

from ipufit.poptorch import Error, optim
from ipufit.poptorch._optimizer_link import AttributeTracker, select_mean_strategy
from ipufit.poptorch._optimizer_settings import OptimizerKind, Value, check_replacement, settings_of
from tests.told import message

HALF = torch.float16


def weight():
    """One tensor to train."""
    return [torch.zeros(2, requires_grad=True)]


def settings(kind, **options):
    """Of an optimizer of this class."""
    return settings_of(kind(weight(), **{"lr": 0.1, **options}))


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.SGD, {}, OptimizerKind.SGD_SEPARATE),
        (optim.SGD, {}, OptimizerKind.SGD_SEPARATE),
        (optim.SGD, {"use_combined_accum": True}, OptimizerKind.SGD_COMBINED),
        (torch.optim.Adam, {}, OptimizerKind.ADAM),
        (optim.Adam, {}, OptimizerKind.ADAM),
        (torch.optim.AdamW, {}, OptimizerKind.ADAMW),
        (optim.AdamW, {}, OptimizerKind.ADAMW),
        (optim.AdamW, {"bias_correction": False}, OptimizerKind.ADAMW),
        (torch.optim.RMSprop, {}, OptimizerKind.RMSPROP),
        (optim.RMSprop, {"centered": True}, OptimizerKind.RMSPROP_CENTERED),
        (optim.LAMB, {}, OptimizerKind.LAMB),
        (optim.LAMB, {"bias_correction": False}, OptimizerKind.LAMB_NO_BIAS),
    ],
)
def test_every_supported_optimizer_has_its_kind(kind, options, expected):
    """AdamW is derived from Adam in new versions of torch, and must not be taken for it."""
    assert settings(kind, **options).kind is expected


def test_other_optimizers_are_refused():
    assert message(settings, torch.optim.Adagrad, kind=AssertionError) == (
        "Unsupported optimizer type Adagrad. The device knows those of torch.optim: SGD, Adam, "
        "AdamW, RMSprop; of poptorch.optim: SGD, Adam, AdamW, RMSprop, LAMB."
    )


@pytest.mark.parametrize(
    ("kind", "options", "variable"),
    [
        (torch.optim.SGD, {}, {"lr"}),
        (torch.optim.SGD, {"momentum": 0.9}, {"lr", "momentum"}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}, {"lr", "momentum", "dampening"}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {"lr", "momentum"}),
        (torch.optim.SGD, {"weight_decay": 0.1}, {"lr", "weight_decay"}),
        (torch.optim.Adam, {"betas": (0.8, 0.9)}, {"lr"}),
        (torch.optim.Adam, {"eps": 1e-6, "weight_decay": 1e-2}, {"lr", "eps", "weight_decay"}),
        (torch.optim.AdamW, {}, {"lr"}),
        (torch.optim.AdamW, {"weight_decay": 0.0}, {"lr", "weight_decay"}),
        (torch.optim.RMSprop, {"alpha": 0.5}, {"lr"}),
        (torch.optim.RMSprop, {"momentum": 0.5}, {"lr", "momentum"}),
    ],
)
def test_values_of_torchs_optimizers_are_constants_where_they_are_defaults(kind, options, variable):
    """They carry no marks, so their values decide; the learning rate may always change."""
    found = settings(kind, **options)
    for values in (found.defaults, *found.groups):
        assert {name for name, value in values.items() if not value.constant} == variable
    assert found.loss_scaling == Value(1.0, True)


def test_values_of_ours_are_constants_as_they_are_marked():
    found = settings(optim.Adam, eps=1e-8, loss_scaling=1.0)
    assert found.groups[0]["lr"] == Value(0.1, False)
    assert found.groups[0]["eps"] == Value(1e-8, False)
    assert found.groups[0]["weight_decay"] == Value(0.0, True)
    assert found.groups[0]["beta1"] == Value(0.9, True)
    assert found.loss_scaling == Value(1.0, False)


def test_a_loss_scaling_given_to_torchs_optimizer_counts():
    optimizer = torch.optim.SGD(weight(), lr=0.1)
    optimizer.loss_scaling = 16.0
    optimizer.max_grad_norm = 2.0
    found = settings_of(optimizer)
    assert found.loss_scaling == Value(16.0, False)
    assert found.max_grad_norm == 2.0


def test_groups_differ_from_the_defaults():
    first, second = weight() + weight()
    found = settings_of(
        optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.5}], lr=0.1)
    )
    assert [values["momentum"] for values in found.groups] == [Value(0.0, True), Value(0.5, True)]


def test_the_velocity_of_the_separate_variant_is_scaled_like_the_loss():
    found = settings(optim.SGD, loss_scaling=8.0)
    assert found.groups[0]["velocity_scaling"] == Value(8.0, False)
    found = settings(optim.SGD, loss_scaling=8.0, use_combined_accum=True, velocity_scaling=4.0)
    assert found.groups[0]["velocity_scaling"] == Value(4.0, False)


def test_automatic_loss_scaling_makes_it_variable_whatever_the_marks():
    optimizer = optim.Adam(weight(), lr=0.1)
    assert settings_of(optimizer, True).loss_scaling == Value(1.0, False)
    assert not optimizer.variable_attrs.isConstant("loss_scaling")
    assert settings_of(torch.optim.Adam(weight(), lr=0.1), True).loss_scaling == Value(1.0, False)


def test_types_of_accumulators_are_read():
    found = settings(optim.SGD, accum_type=HALF, velocity_accum_type=HALF)
    assert (found.accum_type, found.first) == (HALF, HALF)
    found = settings(optim.Adam, second_order_momentum_accum_type=HALF)
    assert (found.accum_type, found.first, found.second) == (torch.float32, torch.float32, HALF)


@pytest.mark.parametrize(
    ("options", "weight_type", "expected"),
    [
        ({}, torch.float32, torch.float32),
        ({}, HALF, torch.float32),
        ({}, torch.float64, torch.float64),
        ({"accum_type": HALF}, torch.float32, HALF),
        ({"accum_type": HALF, "use_combined_accum": True, "momentum": 0.9}, HALF, HALF),
        ({"use_combined_accum": True, "momentum": 0.9}, HALF, HALF),
        ({"use_combined_accum": True}, HALF, torch.float32),
        (
            {"accum_type": HALF, "use_combined_accum": True, "momentum": 0.9},
            torch.float32,
            torch.float32,
        ),
    ],
)
def test_gradients_are_accumulated_in_the_type_of_the_variant(options, weight_type, expected):
    assert settings(optim.SGD, **options).accumulator(weight_type) is expected


def test_amsgrad_is_refused():
    for kind in (torch.optim.Adam, optim.Adam, torch.optim.AdamW, optim.AdamW):
        with pytest.raises(ValueError, match="Only non-amsgrad Adam/AdamW optimizers") as caught:
            settings(kind, amsgrad=True)
        assert str(caught.value).endswith("got amsgrad=True in the defaults. Leave it out.")


def test_centered_must_be_the_same_in_all_groups():
    first, second = weight() + weight()
    optimizer = torch.optim.RMSprop([{"params": [first]}, {"params": [second], "centered": True}])
    assert message(settings_of, optimizer, kind=AssertionError) == (
        "All parameter groups must have the same value for the 'centered' attribute, got "
        "[False, True]. Use one for all."
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("lr", "fast", "Expected a number for lr but got 'fast' instead. Pass a Python number."),
        (
            "betas",
            [0.9, 0.99],
            "Expected a pair for betas but got [0.9, 0.99] instead. Pass a tuple of two numbers.",
        ),
        (
            "betas",
            (0.9, None),
            "Expected a number for betas[1] but got None instead. Pass a Python number.",
        ),
        ("eps", None, "Mandatory attribute eps not found in group 0 of Adam. Set it there."),
    ],
)
def test_values_that_are_no_numbers_are_refused(name, value, text):
    optimizer = torch.optim.Adam(weight())
    optimizer.param_groups[0][name] = value
    assert message(settings_of, optimizer, kind=AssertionError) == text


def test_a_type_of_accumulators_that_was_set_later_is_refused():
    optimizer = optim.Adam(weight())
    optimizer.accum_type = torch.float64
    with pytest.raises(ValueError, match="accum_type must be set to") as caught:
        settings_of(optimizer)
    assert str(caught.value) == (
        "accum_type must be set to either torch.float16 or torch.float32, got torch.float64."
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"max_grad_norm": math.nan},
            "Maximum norm of gradients cannot be NaN. Pass max_grad_norm=float('inf') for none.",
        ),
        ({"loss_scaling": 0.0}, "Loss scaling cannot be 0. Pass 1.0 for none."),
        (
            {"eps": 0.0},
            "The device needs eps to be more than zero, got 0 in the defaults of ADAM. Pass "
            "another one.",
        ),
    ],
)
def test_numbers_that_a_device_can_not_compute_with_are_refused(change, text):
    found = settings(optim.Adam, **change)
    with pytest.raises(Error) as caught:
        found.check()
    assert caught.value.message == text


def test_negative_numbers_are_refused_in_any_group():
    optimizer = torch.optim.SGD(weight(), lr=0.1)
    optimizer.param_groups[0]["dampening"] = -0.5
    with pytest.raises(Error) as caught:
        settings_of(optimizer).check()
    assert caught.value.message == (
        "The device needs dampening to be zero or more, got -0.5 in group 0 of SGD. Pass "
        "another one."
    )


def test_a_learning_rate_that_stays_zero_is_refused():
    optimizer = optim.SGD(weight(), lr=0.0)
    settings_of(optimizer).check()
    optimizer.variable_attrs.markAsConstant("lr")
    with pytest.raises(Error) as caught:
        settings_of(optimizer).check()
    assert caught.value.message == (
        "A learning rate that is a constant zero trains nothing, got one in the defaults of SGD. "
        'Mark it with markAsVariable("lr").'
    )


def test_the_log_shows_what_goes_to_the_device():
    found = settings(optim.SGD, loss_scaling=2.0, momentum=0.5, velocity_accum_type=HALF)
    assert list(found.lines()) == [
        "Updating graph optimizer with SGD, defaultLearningRate=0.1, defaultMomentum=0.5, "
        "defaultDampening=0 (const), defaultWeightDecay=0 (const), nesterov=0 (const), "
        "defaultVelocityScaling=2, lossScaling=2, accumType=float32, "
        "firstOrderMomentumAccumType=float16, secondOrderMomentumAccumType=float32, "
        "useTfVariant=False, maxGradNorm=inf",
        "Updating group 0 optimizer with SGD, learningRate=0.1, momentum=0.5, "
        "dampening=0 (const), weightDecay=0 (const), nesterov=0 (const), velocityScaling=2, "
        "accumType=float32, firstOrderMomentumAccumType=float16, "
        "secondOrderMomentumAccumType=float32, useTfVariant=False, maxGradNorm=inf",
    ]


# --- changes after compilation


def test_the_same_settings_are_equal_whoever_made_them():
    """What is equal is not sent again."""
    assert settings(torch.optim.SGD) == settings(optim.SGD)
    assert settings(torch.optim.Adam) == settings(optim.Adam)
    assert settings(optim.SGD) != settings(optim.SGD, lr=0.2)


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (optim.SGD, {}, {"lr": 0.2}),
        (optim.SGD, {"momentum": 0.9}, {"momentum": 0.5}),
        (optim.SGD, {"momentum": 0.9}, {"momentum": 0.0}),
        (optim.SGD, {"loss_scaling": 1.0}, {"loss_scaling": 4.0}),
        (optim.Adam, {"betas": (0.9, 0.9)}, {"betas": (0.5, 0.5)}),
        (optim.AdamW, {}, {"bias_correction": False}),
        (optim.LAMB, {"max_weight_norm": 1.0}, {"max_weight_norm": 2.0}),
        (optim.SGD, {}, {"use_combined_accum": True}),
    ],
)
def test_what_is_variable_may_change(kind, old, new):
    check_replacement(settings(kind, **old), settings(kind, **new))


MARK = (
    'Mark it from the start: optimizer.variable_attrs.markAsVariable("{0}"), or pass it '
    "explicitly to an optimizer of poptorch.optim."
)
AGAIN = "once the model is compiled. Call destroy() and wrap the model again."


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            (torch.optim.SGD, {}),
            (torch.optim.SGD, {"momentum": 0.9}),
            "The optimizer can't change momentum in the defaults from a constant to variable once "
            "the model is compiled. " + MARK.format("momentum"),
        ),
        (
            (torch.optim.SGD, {"weight_decay": 0.1}),
            (torch.optim.SGD, {}),
            "The optimizer can't change weight_decay in the defaults from variable to a constant "
            "once the model is compiled. " + MARK.format("weight_decay"),
        ),
        (
            (torch.optim.Adam, {}),
            (torch.optim.Adam, {"betas": (0.8, 0.999)}),
            "The optimizer can't change betas in the defaults from 0.9 to 0.8 once the model is "
            "compiled: it is a constant of the program. " + MARK.format("betas"),
        ),
        (
            (optim.Adam, {}),
            (optim.Adam, {"loss_scaling": 2.0}),
            "The optimizer can't change loss_scaling from a constant to variable once the model is "
            "compiled. " + MARK.format("loss_scaling"),
        ),
        (
            (optim.Adam, {}),
            (optim.AdamW, {}),
            "The optimizer can't change its type from ADAM to ADAMW " + AGAIN,
        ),
        (
            (optim.SGD, {"momentum": 0.9}),
            (optim.SGD, {"momentum": 0.9, "use_combined_accum": True}),
            "The optimizer can't change its type from SGD2 to SGD1 " + AGAIN,
        ),
        (
            (optim.Adam, {}),
            (optim.Adam, {"accum_type": HALF}),
            "The optimizer can't change accum_type from torch.float32 to torch.float16 " + AGAIN,
        ),
        (
            (optim.Adam, {}),
            (optim.Adam, {"first_order_momentum_accum_type": HALF}),
            "The optimizer can't change the type of the first momentum from torch.float32 to "
            "torch.float16 " + AGAIN,
        ),
        (
            (optim.Adam, {}),
            (optim.Adam, {"second_order_momentum_accum_type": HALF}),
            "The optimizer can't change the type of the second momentum from torch.float32 to "
            "torch.float16 " + AGAIN,
        ),
        (
            (optim.Adam, {}),
            (optim.Adam, {"max_grad_norm": 2.0}),
            "The optimizer can't change max_grad_norm from inf to 2.0 " + AGAIN,
        ),
        (
            (optim.RMSprop, {}),
            (optim.RMSprop, {"use_tf_variant": True}),
            "The optimizer can't change use_tf_variant from False to True " + AGAIN,
        ),
    ],
)
def test_what_the_program_is_made_of_can_not_change(old, new, text):
    with pytest.raises(Error) as caught:
        check_replacement(settings(old[0], **old[1]), settings(new[0], **new[1]))
    assert caught.value.message == text
    assert caught.value.type == "poptorch_py_error"


def test_the_number_of_groups_can_not_change():
    both = settings_of(torch.optim.SGD([{"params": weight()}, {"params": weight()}], lr=0.1))
    with pytest.raises(Error) as caught:
        check_replacement(settings(torch.optim.SGD), both)
    assert caught.value.message == (
        "The optimizer can't change the number of groups from 1 to 2 " + AGAIN
    )


def test_a_constant_of_one_group_can_not_change():
    def grouped(dampening):
        groups = [{"params": weight()}, {"params": weight(), "dampening": dampening}]
        return settings_of(optim.SGD(groups, lr=0.1))

    with pytest.raises(Error) as caught:
        check_replacement(grouped(0.0), grouped(0.5))
    assert caught.value.message == (
        "The optimizer can't change dampening in group 1 from 0 to 0.5 once the model is compiled: "
        "it is a constant of the program. " + MARK.format("dampening")
    )


# --- attributes


def messages(caplog, *optimizers, relax=False):
    """What a tracker logs as it looks at optimizers, as (level, text)."""
    tracker = AttributeTracker(relax)
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        for optimizer, change in optimizers:
            change(optimizer)
            tracker.look(optimizer)
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == "poptorch::python"
    ]


def nothing(optimizer):
    """Leave it."""


def add(optimizer):
    """Attributes that no device knows."""
    optimizer.step_count = 0
    optimizer.param_groups[0]["initial_lr"] = 0.1


LATER = (
    "it was not there when the model got its first optimizer. "
    "Options.relaxOptimizerAttributesChecks() makes this a debug message."
)


@pytest.mark.parametrize(("relax", "level"), [(False, "WARNING"), (True, "DEBUG")])
def test_attributes_that_appear_later_are_ignored_and_said_once(caplog, relax, level):
    optimizer = optim.SGD(weight(), lr=0.1)
    steps = [(optimizer, nothing), (optimizer, add), (optimizer, add)]
    assert messages(caplog, *steps, relax=relax) == [
        (level, f"Ignoring unexpected optimizer attribute ['step_count']: {LATER}"),
        (level, f"Ignoring unexpected group 0 attribute ['initial_lr']: {LATER}"),
    ]


def test_defaults_that_appear_later_are_ignored_and_said(caplog):
    optimizer = torch.optim.Adam(weight())

    def change(optimizer):
        optimizer.defaults["gamma"] = 1.0

    assert messages(caplog, (optimizer, nothing), (optimizer, change)) == [
        ("WARNING", f"Ignoring unexpected default group variable ['gamma']: {LATER}")
    ]


def test_attributes_that_were_there_at_first_are_not_said(caplog):
    optimizer = optim.SGD(weight(), lr=0.1)
    assert messages(caplog, (optimizer, add), (optimizer, add)) == []


def test_an_attribute_of_groups_is_none_of_the_optimizer(caplog):
    optimizer = optim.SGD(weight(), lr=0.1)

    def change(optimizer):
        optimizer.param_groups[0]["loss_scaling"] = 2.0
        optimizer.lr = 0.5

    assert messages(caplog, (optimizer, nothing), (optimizer, change)) == [
        ("WARNING", f"Ignoring unexpected optimizer attribute ['lr']: {LATER}"),
        ("WARNING", f"Ignoring unexpected group 0 attribute ['loss_scaling']: {LATER}"),
    ]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_torchs_optimizer_and_ours_may_take_turns(caplog, name):
    """What belongs to a class is not unexpected, nor what this version of torch adds to groups."""
    plain = getattr(torch.optim, name)(weight(), lr=0.1)
    plain.param_groups[0].setdefault("fused", None)
    ours = getattr(optim, name)(weight(), lr=0.1)
    ours.param_groups[0].setdefault("decoupled_weight_decay", False)
    assert messages(caplog, (plain, nothing), (ours, nothing), (plain, nothing)) == []


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.RMSprop,
        optim.LAMB,
    ],
)
def test_a_class_of_the_users_is_warned_of_and_a_plain_one_not(caplog, kind):
    class Own(kind):
        """One with its own step."""

    assert messages(caplog, (kind(weight(), lr=0.1), nothing)) == []
    own = Own(weight(), lr=0.1)
    assert messages(caplog, (own, nothing), (own, nothing)) == [
        (
            "WARNING",
            "Own is a subclass, and is unlikely to behave as intended: Poptorch does not run "
            "Python optimizer code directly, but the device's own update. Use an optimizer of "
            "torch.optim or poptorch.optim as it is.",
        )
    ]


def test_settings_that_do_nothing_are_warned_of(caplog):
    """A device that minimised what a script means to maximise would be found out late."""
    adamw = optim.AdamW(weight(), lr=0.1, bias_correction=False, maximize=True)
    assert messages(caplog, (adamw, nothing), (adamw, nothing)) == [
        (
            "WARNING",
            "maximize=True is ignored: the device minimises the loss. Negate the loss instead.",
        ),
        (
            "WARNING",
            "bias_correction=False is ignored: the device corrects the bias of AdamW in any case. "
            "LAMB honours it.",
        ),
    ]


# --- running means


class Strategy(enum.Enum):
    """As in the options."""

    Running = 0
    Post = 1


class Options:
    """Frozen options with one setting."""

    def __init__(self, strategy):
        self.frozen = True
        self.Training = types.SimpleNamespace(
            meanAccumulationAndReplicationReductionStrategy=strategy,
            setMeanAccumulationAndReplicationReductionStrategy=self._set,
        )

    def _set(self, strategy):
        assert not self.frozen
        self.Training.meanAccumulationAndReplicationReductionStrategy = strategy

    def _freeze(self):
        self.frozen = True

    def _unfreeze(self):
        self.frozen = False

    @property
    def strategy(self):
        """The setting."""
        return self.Training.meanAccumulationAndReplicationReductionStrategy


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (optim.SGD, {"accum_type": HALF}, Strategy.Running),
        (optim.Adam, {"accum_type": HALF}, Strategy.Running),
        (optim.SGD, {"accum_type": HALF, "use_combined_accum": True}, Strategy.Post),
        (optim.SGD, {"velocity_accum_type": HALF}, Strategy.Post),
        (torch.optim.SGD, {}, Strategy.Post),
    ],
)
def test_half_precision_accumulators_take_running_means(kind, given, expected):
    """Frozen options change too: nothing is compiled yet."""
    options = Options(Strategy.Post)
    select_mean_strategy(kind(weight(), lr=0.1, **given), options, compiled=False)
    assert options.strategy is expected
    assert options.frozen


def test_a_compiled_model_can_not_turn_to_running_means():
    optimizer = optim.Adam(weight(), accum_type=HALF)
    options = Options(Strategy.Post)
    with pytest.raises(ValueError, match="is already compiled") as caught:
        select_mean_strategy(optimizer, options, compiled=True)
    assert str(caught.value) == (
        "Invalid optimizer: accum_type=torch.float16 needs "
        "meanAccumulationAndReplicationReductionStrategy to be MeanReductionStrategy.Running, got "
        "Strategy.Post, and the model is already compiled. Set it in options.Training, or the type "
        "in the first optimizer."
    )
    assert options.strategy is Strategy.Post
    select_mean_strategy(optimizer, Options(Strategy.Running), compiled=True)
