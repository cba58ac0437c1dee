"""ReduceLROnPlateau: when it lowers the rate, to what, and what it writes into the logs."""

import pytest
import torch

from ipufit.callbacks import ReduceLROnPlateau
from tests.faulty import Net, Told, batches, compiled, fit
from tests.told import Gives, refused


def rates(values, **options):
    """The rates that the epochs were trained with, from 1."""
    reduce = ReduceLROnPlateau("v", **{"mode": "min", "factor": 0.5, "min_delta": 0, **options})
    model = compiled(optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    history = fit(model, batches(1), epochs=len(values), callbacks=[Gives(v=values), reduce])
    return history.history["learning_rate"]


@pytest.mark.long("ipu-standin")
@pytest.mark.few(
    "values0-options0-expected0", "values6-options6-expected6", "values9-options9-expected9"
)
@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ([4, 3, 2], {"patience": 1}, [1, 1, 1]),
        ([4, 4, 4, 4], {"patience": 1}, [1, 1, 0.5, 0.25]),
        ([4, 4, 4, 4], {"patience": 0}, [1, 1, 0.5, 0.25]),
        ([4, 4, 4, 4], {"patience": 2}, [1, 1, 1, 0.5]),
        ([4, 4, 4], {"patience": 1, "factor": 0.1}, [1, 1, 0.1]),
        ([4, 4, 4, 4, 4, 4], {"patience": 1, "cooldown": 2}, [1, 1, 0.5, 0.5, 0.25, 0.25]),
        ([4, 4, 4, 4], {"patience": 1, "min_lr": 0.4}, [1, 1, 0.5, 0.4]),
        ([1, 2, 2, 2], {"patience": 1, "mode": "max"}, [1, 1, 1, 0.5]),
        ([4, 3.9, 3.8, 3.7], {"patience": 1, "min_delta": 0.15}, [1, 1, 0.5, 0.5]),
        ([4, None, 4, 4], {"patience": 1}, [1, 1, 1, 0.5]),
    ],
)
def test_it_lowers_the_rate_when_keras_does(values, options, expected):
    """The logs have the rate of the epoch, not of the next one."""
    assert rates(values, **options) == expected


@pytest.mark.long
def test_the_lower_rate_is_what_the_next_epoch_uses():
    """A rate that is only logged would be worse than none."""
    reduce = ReduceLROnPlateau("v", mode="min", factor=0.25, patience=1)
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    model = compiled(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    twin = compiled(other, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    data = batches(3)
    fit(model, data, epochs=3, callbacks=[Gives(v=[1, 1, 1]), reduce])

    def lower(told, epoch):
        if epoch == 2:
            told.model.optimizer.param_groups[0]["lr"] = 0.125

    fit(twin, data, epochs=3, callbacks=[Told(on_epoch_begin=lower)])
    for p, q in zip(net.parameters(), other.parameters()):
        assert torch.equal(p, q)


@pytest.mark.long("ipu-standin")
def test_groups_keep_their_ratio(capsys):
    """And a group that is below the minimum stays where it is."""
    net = Net()
    groups = [
        {"params": list(net.body.parameters()), "lr": 1.0},
        {"params": list(net.head.parameters()), "lr": torch.tensor(0.1)},
        {"params": list(net.norm.parameters()), "lr": 0.001},
    ]
    model = compiled(net, optimizer=torch.optim.SGD(groups, lr=1.0))
    reduce = ReduceLROnPlateau("v", mode="min", factor=0.5, patience=1, min_lr=0.01, verbose=1)
    history = fit(model, batches(1), epochs=3, callbacks=[Gives(v=[1, 1, 1]), reduce]).history
    assert history["learning_rate"] == [1.0, 1.0, 0.5]
    assert history["learning_rate_1"] == pytest.approx([0.1, 0.1, 0.05])
    assert history["learning_rate_2"] == [0.001, 0.001, 0.001]
    assert capsys.readouterr().err.splitlines() == [
        "epoch 2: ReduceLROnPlateau sets the learning rate to 0.5, 0.05, 0.001",
        "epoch 3: ReduceLROnPlateau sets the learning rate to 0.25, 0.025, 0.001",
    ]


@pytest.mark.long("ipu-standin")
def test_it_begins_anew_with_every_fit():
    """The best of another training is no measure."""
    reduce = ReduceLROnPlateau("v", mode="min", patience=1)
    model = compiled()
    fit(model, batches(1), epochs=1, callbacks=[Gives(v=[1]), reduce])
    fit(model, batches(1), epochs=2, callbacks=[Gives(v=[2, 1]), reduce])
    assert (reduce.best, reduce.wait) == (1, 0)


@pytest.mark.long("ipu-standin")
def test_an_unknown_value_is_missed_before_training():
    """The rate that it adds itself is known."""
    refused(
        lambda: fit(compiled(), callbacks=[ReduceLROnPlateau()]),
        "ReduceLROnPlateau needs the value 'val_loss' at the end of an epoch, but there is only "
        "loss. Pass validation_data to fit, or use one of these.",
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        *(
            (
                {"factor": value},
                "factor of ReduceLROnPlateau must be between 0 and 1, so that the "
                f"learning rate becomes smaller, got {value!r}. Try 0.1.",
            )
            for value in (1.0, 0, -0.5, 2)
        ),
        ({"factor": "a"}, "factor of ReduceLROnPlateau must be a finite number, got 'a'."),
        (
            {"patience": -1},
            "patience of ReduceLROnPlateau must be an integer of at least 0, got -1.",
        ),
        (
            {"cooldown": 0.5},
            "cooldown of ReduceLROnPlateau must be an integer of at least 0, got 0.5.",
        ),
        (
            {"min_lr": -1},
            "min_lr of ReduceLROnPlateau must be a finite number of at least 0.0, got -1.",
        ),
        ({"verbose": True}, "verbose of ReduceLROnPlateau must be 0 or 1, got True."),
    ],
    ids=repr,
)
def test_a_wrong_argument_is_named(options, text):
    """When it is made, not at the end of an epoch."""
    refused(lambda: ReduceLROnPlateau(**options), text)
