"""One update, one evaluation, one prediction: a batch at a time, as parts of the same training."""

import numpy as np
import pytest
import torch
from torch import nn

import ipufit
from ipufit.errors import ConfigurationError, NonFiniteLossError, NotCompiledError
from tests.engines import CONFIGURATION_MARKS, but, takes_back
from tests.faulty import Net, assert_clean, assert_same_bits, batches, compiled, fit, refused, state
from tests.nets import CNN, MLP, data
from tests.reference import train


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("make", [MLP, CNN])
def test_updates_one_by_one_equal_a_loop_by_hand(make):
    """Dropout and BatchNorm included."""
    x, y = data(24)
    model = ipufit.Model(make().double())
    torch.manual_seed(1)
    by_hand = make().double()
    by_hand.load_state_dict(model.module.state_dict())
    model.compile(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "cross_entropy")
    torch.manual_seed(9)
    seed = int(torch.randint(0, 2**31 - 1, (), dtype=torch.int64))
    torch.manual_seed(9)
    losses = [model.train_on_batch(x[i : i + 6], y[i : i + 6])["loss"] for i in range(0, 24, 6)]
    optimizer = torch.optim.SGD(by_hand.parameters(), 0.1, momentum=0.9)
    (report,) = train(by_hand, optimizer, nn.functional.cross_entropy, x, y, 1, 6, seed=seed)
    np.testing.assert_allclose(np.mean(losses), report[0], rtol=1e-10)
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(model.module.state_dict()[name], value, rtol=1e-9, atol=1e-11)


CONFIGURATIONS = {
    "plain": {},
    "schedule": {"lr_scheduler": lambda update: 0.1 * 0.9**update},
    "averages": {"ema": ipufit.EMA(momentum=0.5, overwrite_frequency=2)},
    "dynamic scale": {"precision": ipufit.Precision(loss_scale=ipufit.LossScale(2.0**10, 3))},
    "clipped": {"clip": ipufit.Clip(norm=0.1)},
    "eager": {"run_eagerly": True},
}


@pytest.mark.long
@pytest.mark.parametrize("name", but(CONFIGURATIONS, **CONFIGURATION_MARKS))
def test_updates_one_by_one_have_the_bits_of_fit(name):
    """Schedule, averages, loss scale and random numbers go on from call to call."""
    given = batches(7)

    def trained(single):
        torch.manual_seed(4)
        model = compiled(**CONFIGURATIONS[name])
        torch.manual_seed(5)
        if single:
            for x, y in given:
                model.train_on_batch(x, y)
        else:
            model.fit(given, verbose=0)
        return model

    one_by_one, at_once = trained(True), trained(False)
    if name == "averages":
        # fit ends with the averages as weights; without its end they are kept beside them.
        kept = one_by_one._session.engine.carried.averages
        other = at_once._session.engine.carried.averages
        assert kept.keys() == other.keys()
        for key, value in kept.items():
            assert torch.equal(value, other[key])
    else:
        assert_same_bits(state(one_by_one), state(at_once))
    assert one_by_one._session.updates == 7
    if name == "dynamic scale":
        assert one_by_one._session.engine.carried.scale == at_once._session.engine.carried.scale
    assert_clean(one_by_one)


@pytest.mark.long("ipu-standin")
def test_single_updates_and_fit_go_on_with_one_another():
    """One count of updates, one schedule, one state of the optimizer."""
    given = batches(6)
    seen = []
    model = compiled(lr_scheduler=lambda update: 0.1 / (1 + update))
    for x, y in given[:2]:
        seen.append(model.train_on_batch(x, y)["learning_rate"])
    fit(model, given[2:5])
    x, y = given[5]
    seen.append(model.train_on_batch(x, y)["learning_rate"])
    assert seen == pytest.approx([0.1, 0.05, 0.1 / 6])
    assert model._session.updates == 6
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 7)


@pytest.mark.long("ipu-standin")
def test_each_update_draws_other_random_numbers():
    """A dropout mask that never changes trains half of a network."""
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3, bias=False))
    model = compiled(net, optimizer=lambda p: torch.optim.SGD(p, 0.0))
    x, y = batches(1)[0]
    assert len({model.train_on_batch(x, y)["loss"] for _ in range(6)}) == 6


@pytest.mark.long
def test_train_and_test_on_batch_return_what_evaluate_does():
    """A dict, or in Keras' other form the loss alone, or a list that begins with it."""
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    net = nn.Linear(4, 3)
    expected = nn.functional.cross_entropy(net(x), y).item()
    accuracy = (net(x).argmax(1) == y).double().mean().item()
    model = compiled(
        net, "cross_entropy", ["accuracy"], optimizer=lambda p: torch.optim.SGD(p, 0.0)
    )
    plain = compiled(net, "cross_entropy", optimizer=lambda p: torch.optim.SGD(p, 0.0))
    calls = [
        (model.train_on_batch, plain.train_on_batch, {}),
        (model.test_on_batch, plain.test_on_batch, {}),
        (model.evaluate, plain.evaluate, {"batch_size": 4, "verbose": 0}),
    ]
    for both, alone, options in calls:
        found = both(x, y, **options)
        assert found == pytest.approx({"loss": expected, "accuracy": accuracy})
        listed = both(x, y, return_dict=False, **options)
        assert isinstance(listed, list)
        assert listed == pytest.approx([expected, accuracy])
        only = alone(x, y, return_dict=False, **options)
        assert isinstance(only, float)
        assert only == pytest.approx(expected)
        with pytest.raises(ConfigurationError) as caught:
            both(x, y, return_dict=1, **options)
        assert str(caught.value) == "return_dict must be True or False, got 1."


@pytest.mark.long("ipu-standin")
def test_a_prediction_for_one_batch_is_that_of_the_module():
    """In eval mode, and without a trace."""
    net = Net()
    model = compiled(net)
    x = batches(1)[0][0]
    before = state(model)
    found = model.predict_on_batch(x)
    assert net.training
    assert_same_bits(state(model), before)
    net.eval()
    assert torch.equal(found, net(x).detach())
    assert torch.equal(found, model.predict_on_batch(x.numpy()))


@pytest.mark.long("ipu-standin")
def test_weights_of_samples_and_classes_count():
    """As in fit."""
    x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
    net = nn.Linear(4, 3)
    each = nn.functional.cross_entropy(net(x), y, reduction="none")
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5])
    model = compiled(net, "cross_entropy", optimizer=lambda p: torch.optim.SGD(p, 0.0))
    expected = {"loss": (each * weights).mean().item()}
    assert model.test_on_batch(x, y, weights) == pytest.approx(expected)
    assert model.train_on_batch(x, y, weights) == pytest.approx(expected)
    expected = {"loss": (each * torch.tensor([3.0, 1.0, 1.0, 3.0])).mean().item()}
    assert model.train_on_batch(x, y, class_weight={0: 3.0}) == pytest.approx(expected)


@takes_back
def test_a_loss_that_is_no_number_leaves_the_state_before_its_update():
    """Training goes on with the next batch."""
    model = compiled()
    x, y = batches(1)[0]
    model.train_on_batch(x, y)
    with refused(
        model,
        NonFiniteLossError,
        "loss must be finite",
        part=True,
    ):
        model.train_on_batch(torch.full_like(x, float("nan")), y)
    assert model._session.updates == 1
    assert np.isfinite(model.train_on_batch(x, y)["loss"])


REFUSED = {
    "train_on_batch was called inside fit, from a callback or the data. Call it after fit has "
    "returned.": "inside",
    "train_on_batch needs an optimizer, but compile got none, which only evaluates and predicts. "
    "Call compile with one, such as optimizer='adam'.": "no optimizer",
    "train_on_batch runs one update, but Outputs.every=2 returns the outputs of one update in 2, "
    "so metrics would get none. Compile with outputs='all', or call fit.": "every n",
}


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("text", REFUSED)
def test_a_single_update_that_cannot_be_is_refused(text):
    """By name."""
    x, y = batches(1)[0]
    options = {
        "no optimizer": {"optimizer": None},
        "every n": {"outputs": ipufit.Outputs("every_n", 2)},
    }.get(REFUSED[text], {})
    model = compiled(**options)
    inside = ipufit.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: model.train_on_batch(x, y)
    )
    is_inside = REFUSED[text] == "inside"
    with pytest.raises(ConfigurationError) as caught:
        fit(model, callbacks=[inside]) if is_inside else model.train_on_batch(x, y)
    assert str(caught.value) == text


@pytest.mark.parametrize("name", ["train_on_batch", "test_on_batch"])
def test_nothing_runs_before_compile(name):
    """With the call that is missing."""
    model = ipufit.Model(nn.Linear(4, 3))
    with pytest.raises(NotCompiledError) as caught:
        getattr(model, name)(torch.ones(2, 4))
    assert str(caught.value) == (
        f"{name} needs a compiled model. Call model.compile(optimizer='adam', "
        "loss='cross_entropy') first."
    )


@pytest.mark.long
def test_looking_inside_fit_changes_nothing():
    """test_on_batch and predict_on_batch see the present weights of a running fit."""
    x, y = batches(1)[0]
    seen = []

    def look(epoch, logs):
        seen.append((model.test_on_batch(x, y), model.predict_on_batch(x)))

    finals = []
    for callbacks in ([], [ipufit.callbacks.LambdaCallback(on_epoch_end=look)]):
        torch.manual_seed(2)
        model = compiled()
        fit(model, epochs=2, callbacks=callbacks)
        finals.append(state(model))
    assert_same_bits(*finals)
    assert seen[0][0] != seen[1][0]
    model.module.eval()
    assert torch.equal(seen[1][1], model.module(x).detach())
