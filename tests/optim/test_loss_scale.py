"""Loss scaling: updates whose gradient overflows are left out, in every way to run."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.engines.embedded.gradient_transform import Scaler, ScaleState
from ipufit.errors import ConfigurationError, NonFiniteLossError
from tests.caching import once_per_engine
from tests.engines import embedded_only, scales_itself, skips_updates
from tests.faulty import assert_clean
from tests.fitting import WAYS, Plan, assert_equal, compiled, fit
from tests.nets import MLP, data

pytestmark = pytest.mark.grid

X, Y = data(23)
HUGE = 1e30  # of a sample whose gradient leaves float32 once the loss is scaled


class Scaling(nn.Module):
    """Predicts w * x + b, with a buffer that counts and a value that is logged."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5]))
        self.b = nn.Parameter(torch.tensor([0.25]))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += len(x)
        ipufit.log("mean", self.w.mean(), on_update=True)
        return self.w * x + self.b


def loss(prediction, target):
    """Linear, so that the gradient is the sample, and the loss stays finite."""
    return (prediction * target).mean()


def samples(*values):
    """One micro-batch for each value."""
    return torch.tensor(values).unsqueeze(1), torch.ones(len(values), 1)


def by_hand(optimizer, x, y, rule, initial, ga=1, epochs=1, mb=1, first=(), ema=None):
    """Training with a loss scale in a plain loop.

    Args:
        rule: growth interval, or None for a scale that never changes.
        first: the scale and its age at the start.

    Returns:
        The network, per epoch the scale and the number of skipped updates, and the last scale.
    """
    net = Scaling()
    optimizer = optimizer(net.parameters())
    scale, good = first or (initial, 0)
    report, averages, update = [], None, 0
    for _ in range(epochs):
        skipped = 0
        for start in range(0, len(x), mb * ga):
            total = None
            rows = min(mb * ga, len(x) - start)
            for at in range(start, start + rows, mb):
                stop = min(at + mb, start + rows)
                value = loss(net(x[at:stop]), y[at:stop]) * scale
                own = torch.autograd.grad(value, list(net.parameters()))
                own = [g * (stop - at) / rows for g in own]
                total = own if total is None else [t + g for t, g in zip(total, own)]
            total = [t / scale for t in total]
            update += 1
            if all(bool(t.isfinite().all()) for t in total):
                for p, t in zip(net.parameters(), total):
                    p.grad = t
                optimizer.step()
                good += 1
                if rule is not None and good == rule:
                    scale, good = scale * 2, 0
                weights = [p.detach().clone() for p in net.parameters()]
                if ema is not None:
                    averages = (
                        weights
                        if averages is None
                        else [ema * a + (1 - ema) * w for a, w in zip(averages, weights)]
                    )
            else:
                skipped += 1
                if rule is not None:
                    scale, good = scale / 2, 0
        report.append((scale, skipped))
    if ema is not None:
        with torch.no_grad():
            for p, a in zip(net.parameters(), averages):
                p.copy_(a)
    return net, report, (scale, good)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adadelta(parameters):
    return torch.optim.Adadelta(parameters, lr=0.5)


def check(model, history, expected, report):
    for name in ("w", "b"):
        torch.testing.assert_close(
            getattr(model.module, name), getattr(expected, name), rtol=1e-6, atol=1e-6
        )
    assert torch.equal(model.module.seen, expected.seen)
    assert history["loss_scale"] == [scale for scale, _ in report]
    assert history["skipped_updates"] == [skipped for _, skipped in report]


# From 2**29 on a gradient of 1e30 overflows.
SERIES = {
    "none": (1.0, 2.0, -1.0, 0.5, 1.5),
    "first": (HUGE, 2.0, -1.0, 0.5, 1.5),
    "last": (1.0, 2.0, -1.0, 0.5, HUGE),
    "several": (1.0, HUGE, -1.0, HUGE, HUGE, 0.5, 1.5, HUGE, 1.0, 2.0, HUGE),
    "all": (HUGE, HUGE, HUGE),
}


@pytest.mark.few("adam-none-1-recorded", "adadelta-first-1-captured")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("di", [1, 4, 100])
@pytest.mark.parametrize("series", [name for name in SERIES if name != "all"])
@pytest.mark.parametrize("optimizer", [adam, momentum, adadelta])
def test_an_update_that_overflows_is_left_out(optimizer, series, di, way):
    """Its number is the next one's, for Adam's bias correction; the schedule of the scale is hand-
    written."""
    x, y = samples(*SERIES[series])
    expected, report, _ = by_hand(optimizer, x, y, 3, 2.0**45, epochs=2)
    scale = ipufit.LossScale(2.0**45, growth_interval=3)
    model, engine = compiled(
        Scaling(), optimizer, loss, way, precision=ipufit.Precision(loss_scale=scale)
    )
    history = fit(model, x, y, Plan(1, di)).history
    check(model, history, expected, report)
    if optimizer is not momentum:
        skipped = sum(count for _, count in report)
        step = model.optimizer.state[model.module.w]["step"]
        assert float(step) == 2 * len(x) - skipped
    assert model._session.updates == 2 * len(x)
    assert engine.carried.scale.value == report[-1][0]
    assert_clean(model)


@pytest.mark.long
@skips_updates
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ga", [1, 2, 3])
def test_one_micro_batch_that_overflows_leaves_out_its_whole_update(ga, way):
    """Also in the tail, which is a smaller update."""
    x, y = samples(1.0, 2.0, HUGE, 1.0, 0.5, 1.0, 1.0, 3.0, 1.0, HUGE)
    expected, report, _ = by_hand(adam, x, y, None, 2.0**40, ga=ga, mb=1, epochs=2)
    model, _ = compiled(Scaling(), adam, loss, way, precision=ipufit.Precision(loss_scale=2.0**40))
    history = fit(model, x, y, Plan(1, 2, ga)).history
    check(model, history, expected, report)


@pytest.mark.few
@pytest.mark.parametrize("way", WAYS)
def test_averages_do_not_move_with_an_update_that_is_left_out(way):
    x, y = samples(HUGE, 1.0, 2.0, HUGE, 0.5)
    expected, report, _ = by_hand(adam, x, y, None, 2.0**40, epochs=2, ema=0.7)
    model, _ = compiled(
        Scaling(),
        adam,
        loss,
        way,
        precision=ipufit.Precision(loss_scale=2.0**40),
        ema=ipufit.EMA(momentum=0.7),
    )
    history = fit(model, x, y, Plan(1, 4)).history
    check(model, history, expected, report)


@pytest.mark.long
def test_the_averages_are_written_at_an_update_that_is_left_out():
    """Every second update is every second update."""
    x, y = samples(1.0, HUGE)
    options = {"ema": ipufit.EMA(momentum=1.0, overwrite_frequency=2)}
    first, _ = compiled(Scaling(), momentum, loss)
    fit(first, x[:1], y[:1], Plan(1), epochs=1)
    seen = []

    class After(ipufit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(self.model.module.w.item())

    for way in WAYS:
        model, _ = compiled(
            Scaling(),
            momentum,
            loss,
            way,
            precision=ipufit.Precision(loss_scale=2.0**40),
            **options,
        )
        fit(model, x, y, Plan(1, 2), epochs=2, callbacks=After())
    # The average is that after the first update, for good; the third one moved the weight away.
    assert seen == [first.module.w.item()] * 2 * len(WAYS)


NUMBERS = (1, 2, 5, 100)


@pytest.mark.long
@pytest.mark.parametrize(
    "runs",
    [list(zip(WAYS, NUMBERS)), list(itertools.product(WAYS, NUMBERS))],
    ids=["each", "all"],
)
@pytest.mark.parametrize("optimizer", [adam, momentum, adadelta])
def test_every_way_and_every_plan_has_the_same_bits(optimizer, runs):
    """Skipped updates included: what is repeated without them is the same again."""
    x, y = samples(*SERIES["several"])
    found = []
    for way, di in runs:
        scale = ipufit.LossScale(2.0**50, growth_interval=2)
        model, engine = compiled(
            Scaling(), optimizer, loss, way, precision=ipufit.Precision(loss_scale=scale)
        )
        history = fit(model, x, y, Plan(1, di), epochs=3).history
        found.append((model.module, engine.carried.scale, history))
    for module, scale, history in found[1:]:
        assert_equal(module, found[0][0])
        assert scale == found[0][1]
        assert history == found[0][2]


@pytest.mark.long
def test_a_scale_that_is_a_power_of_two_changes_no_bit():
    """Nothing is rounded by it."""
    net, x, y = MLP(), X[:16].float(), Y[:16]
    plain, _ = compiled(net, adam, jit="graph")  # the others are not merged either
    fit(plain, x, y, Plan(4, 2, 2))
    for scale in (1, 4096.0, ipufit.LossScale(1024.0, growth_interval=2)):
        model, _ = compiled(net, adam, precision=ipufit.Precision(loss_scale=scale))
        fit(model, x, y, Plan(4, 2, 2))
        assert_equal(model.module, plain.module)


@once_per_engine
def unscaled():
    """A network, and the same trained without a scale."""
    net = MLP().double()
    plain, _ = compiled(net, momentum)
    fit(plain, X[:20], Y[:20])
    return net, plain.module.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scale", [1000.1, 1e-3, 1e100])
def test_any_scale_is_exact_in_float64(scale, way):
    """A factor rounded to float32 would be off in the eighth digit."""
    net, expected = unscaled()
    model, _ = compiled(net, momentum, way=way, precision=ipufit.Precision(loss_scale=scale))
    fit(model, X[:20], Y[:20])
    for name, value in model.module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-12)


@pytest.mark.long
@scales_itself
def test_the_scale_goes_on_in_a_second_fit_and_starts_anew_with_compile():
    x, y = samples(1.0, HUGE, 2.0, 1.0)
    scale = ipufit.LossScale(2.0**30, growth_interval=5)
    _, report, last = by_hand(adam, x, y, 5, 2.0**30, epochs=1)
    model, engine = compiled(Scaling(), adam, loss, precision=ipufit.Precision(loss_scale=scale))
    first = fit(model, x, y, Plan(1), epochs=1).history
    assert first["loss_scale"] == [report[0][0]]
    assert (engine.carried.scale.value, engine.carried.scale.good) == last
    second = fit(model, x, y, Plan(1), epochs=1).history
    _, report, _ = by_hand(adam, x, y, 5, 2.0**30, epochs=2)
    assert second["loss_scale"] == [report[1][0]]
    anew = ipufit.Model(model.module)
    for _ in range(2):
        anew.compile("sgd", loss, precision=ipufit.Precision(loss_scale=scale))
        assert fit(anew, x[:2], y[:2], Plan(1), epochs=1).history["loss_scale"] == [2.0**29]


@pytest.mark.few
@pytest.mark.parametrize("late", [False, True])
def test_the_state_goes_out_and_in_again(late):
    """A checkpoint in the middle: scale, age and averages continue with the same bits."""
    x, y = samples(1.0, HUGE, 2.0, 1.0, 0.5)
    options = {
        "precision": ipufit.Precision(loss_scale=ipufit.LossScale(2.0**30, growth_interval=2)),
        "ema": ipufit.EMA(momentum=0.5),
    }

    class Keep(ipufit.callbacks.Callback):
        def __init__(self, at, state=None):
            super().__init__()
            self.at, self.state = at, state

        def on_epoch_begin(self, epoch, logs=None):
            if self.state is not None:
                self.model._session._training.write_state(self.state)
                self.state = None

        def on_epoch_end(self, epoch, logs=None):
            if epoch == self.at:
                self.kept = self.model._session._training.read_state()

    way = "late" if late else "recorded"
    whole, _ = compiled(Scaling(), adam, loss, way, **options)
    keeper = Keep(1)
    fit(whole, x, y, Plan(1, 2), epochs=4, callbacks=keeper)
    assert keeper.kept.loss_scale is not None
    assert sorted(keeper.kept.averages) == ["b", "w"]
    other, _ = compiled(Scaling(), adam, loss, way, **options)
    fit(other, x, y, Plan(1, 2), epochs=range(2, 4), callbacks=Keep(9, keeper.kept))
    assert torch.equal(other.module.w, whole.module.w)
    assert torch.equal(other.module.b, whole.module.b)


@skips_updates
def test_an_epoch_without_any_update_warns():
    """A scale that is too large for ever trains nothing, without an error."""
    x, y = samples(HUGE, HUGE)
    model, _ = compiled(Scaling(), adam, loss, precision=ipufit.Precision(loss_scale=2.0**60))
    text = (
        "all 2 updates of epoch 1 were skipped, because their gradients were not finite at the "
        "loss scale: the model learned nothing. Choose a smaller ipufit.Precision(loss_scale=...), "
        "or 'dynamic'."
    )
    with pytest.warns(UserWarning, match="all 2 updates") as caught:
        history = fit(model, x, y, Plan(1), epochs=1).history
    assert [str(each.message) for each in caught] == [text]
    assert caught[0].filename.endswith("fitting.py")  # where fit was called
    assert history["skipped_updates"] == [2]
    assert model.module.w.item() == 0.5
    assert not model.optimizer.state


class Root(nn.Module):
    """A finite loss with a gradient that is infinite at zero, at every scale."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return (self.w * x).abs().sqrt()


@pytest.mark.few("recorded", "captured")
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_no_scale_helps_ends_training(way):
    """Halved for ever, a scale would hide a division by zero."""
    x, y = samples(*[1.0] * 3, *[0.0] * 6)
    scale = ipufit.LossScale(2.0**-21, growth_interval=100)
    model, engine = compiled(
        Root(), momentum, loss, way, precision=ipufit.Precision(loss_scale=scale)
    )
    text = (
        "the gradient must be finite at some loss scale, but it was not down to 5.96046e-08 in "
        "update 6. The weights, buffers and optimizer state are those from before that update. "
        "Look for a division by zero or a root at zero in the backward pass."
    )
    with pytest.raises(NonFiniteLossError) as caught:
        fit(model, x, y, Plan(1, 100), epochs=1)
    assert str(caught.value) == text
    assert (caught.value.update, caught.value.epoch) == (6, 0)
    assert model._session.updates == 6
    assert model.module.seen.item() == 6
    good, _ = compiled(Root(), momentum, loss, way, precision=ipufit.Precision(loss_scale=scale))
    fit(good, x[:3], y[:3], Plan(1, 100), epochs=1)
    assert torch.equal(good.module.w, model.module.w)
    assert engine.carried.scale == ScaleState(2.0**-24)
    assert_clean(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ema", [False, True])
def test_a_loss_that_is_no_number_leaves_everything_as_before_its_update(ema, way):
    """Scale, averages and counts too, with updates skipped before it in the same execution."""
    values = (1.0, HUGE, 2.0, HUGE, 1.0, 0.5)
    options = {
        "precision": ipufit.Precision(loss_scale=ipufit.LossScale(2.0**30, growth_interval=2)),
        "ema": ipufit.EMA() if ema else None,
    }
    found = []
    for tail in ((), (float("nan"), 1.0, HUGE)):
        x, y = samples(*values, *tail)
        model, engine = compiled(Scaling(), adam, loss, way, **options)
        if not tail:
            keeper = Keeping()
            fit(model, x, y, Plan(1, 100), epochs=1, callbacks=keeper)
            found.append((keeper.state, engine.carried.scale))
            continue
        keeper = Keeping()
        with pytest.raises(NonFiniteLossError) as caught:
            fit(model, x, y, Plan(1, 100), epochs=1, callbacks=keeper)
        assert str(caught.value) == (
            "the loss must be finite, but it became nan in update 6. The weights, buffers and "
            "optimizer state are those from before that update. The data was not finite: nan in "
            "replica 0, micro-batch 0 of 1, sample 0 of the micro-batch. Leave such samples out, "
            "or fill the missing values. In the order of epoch 1: 6; row of the data: 6."
        )
        found.append((keeper.state, engine.carried.scale))
        assert model._session.updates == 6
    (good, scale), (failed, other) = found
    assert scale == other
    assert good.loss_scale == failed.loss_scale
    for name, value in good.weights.items():
        assert torch.equal(value, failed.weights[name])
    for name, value in good.averages.items():
        assert torch.equal(value, failed.averages[name])
    assert bool(good.averages) == ema
    assert torch.equal(good.buffers[0]["seen"], failed.buffers[0]["seen"])
    for key, state in good.optimizer["state"].items():
        for name, value in state.items():
            assert torch.equal(value, failed.optimizer["state"][key][name])


class Keeping(ipufit.callbacks.Callback):
    """The state of the program after the first epoch, or when training failed in it."""

    state = None

    def on_epoch_end(self, epoch, logs=None):
        self.state = self.model._session._training.read_state()

    def on_train_end(self, logs=None):
        if self.state is None:
            self.on_epoch_end(0)


@pytest.mark.few
@skips_updates
@pytest.mark.parametrize("way", WAYS)
def test_logged_values_of_skipped_updates_count_too(way):
    """Their micro-batches were computed: leaving them out would hide what went wrong."""
    x, y = samples(1.0, HUGE, 2.0, HUGE)
    model, _ = compiled(
        Scaling(), momentum, loss, way, precision=ipufit.Precision(loss_scale=2.0**40)
    )
    history = fit(model, x, y, Plan(1, 4), epochs=1).history
    # The weight is 0.5 before the first update, 0.45 before the second and third.
    assert history["mean"] == pytest.approx([(0.5 + 0.45 + 0.45 + 0.305) / 4], abs=1e-6)
    assert history["loss"][0] > HUGE / 10


@pytest.mark.long
@skips_updates
def test_a_sum_that_does_not_fit_into_the_weights_dtype_is_an_overflow():
    """Finite in float32, infinite as the float16 gradient that the optimizer would get."""
    x, y = samples(1.0, 6e4, 1.0)
    x[1] = 60000.0
    net = Scaling().half()

    def twice(prediction, target):
        return (prediction * target).float().sum() * 2

    for way in WAYS:
        model, _ = compiled(
            net,
            lambda p: torch.optim.SGD(p, lr=1e-3),
            twice,
            way,
            precision=ipufit.Precision(loss_scale=2.0**-4, accumulation_dtype="float32"),
            reduction=ipufit.Reduction(gradients="sum"),
        )
        history = fit(model, x.half(), y.half(), Plan(1), epochs=1).history
        assert history["skipped_updates"] == [1]
        assert bool(model.module.w.isfinite())


def test_the_scale_does_not_grow_without_end_nor_shrink_by_growing():
    """Beyond 2**100 the factor itself would leave float32; a larger start is the user's wish."""
    rule = ipufit.LossScale(2.0**99, growth_interval=1)
    state = ScaleState(rule.initial)
    seen = []
    for _ in range(3):
        state = state.after(True, rule)
        seen.append(state.value)
    assert seen == [2.0**100] * 3
    high = ipufit.LossScale(2.0**110, growth_interval=1)
    assert ScaleState(high.initial).after(True, high).value == 2.0**110


def test_a_static_scale_may_be_as_small_as_one_likes():
    scaler = Scaler(ipufit.LossScale(2.0**-40, None), None)
    assert scaler.judge(torch.tensor(False), None, [], 0) is True
    assert scaler.value == 2.0**-40


@embedded_only("the gradients of an update stay on the device")
def test_without_a_scale_an_infinite_gradient_is_not_hidden():
    """Nobody asked for updates to be left out: the next loss tells."""
    x, y = samples(1.0, 0.0, 1.0, 1.0)
    model, _ = compiled(Root(), momentum, loss)
    with pytest.raises(NonFiniteLossError, match="weights were not finite before this update"):
        fit(model, x, y, Plan(1), epochs=1)
    history = model.history.history
    assert "skipped_updates" not in history
    assert "loss_scale" not in history


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0, "0"),
        (-1.0, "-1.0"),
        (True, "True"),
        (float("inf"), "inf"),
        ("big", "'big'"),
    ],
)
def test_a_scale_that_is_none_is_refused(given, text):
    with pytest.raises(ConfigurationError) as caught:
        compiled(MLP(), momentum, precision=ipufit.Precision(loss_scale=given))
    assert str(caught.value) == (
        "Precision.loss_scale must be None, a positive number, 'dynamic' or an ipufit.LossScale, "
        f"got {text}. Pass 1 for no scaling under mixed_float16."
    )


def test_a_loss_scale_object_is_checked():
    with pytest.raises(ConfigurationError) as caught:
        compiled(MLP(), momentum, precision=ipufit.Precision(loss_scale=ipufit.LossScale(-2.0)))
    assert str(caught.value) == "LossScale.initial must be a positive number, got -2.0."
    for interval in (0, torch.tensor(2.5)):
        with pytest.raises(ConfigurationError) as caught:
            ipufit.LossScale(growth_interval=interval)
        assert str(caught.value) == (
            f"LossScale.growth_interval must be an integer of at least 1 or None, got {interval!r}."
        )


@pytest.mark.long
def test_the_loss_scale_is_told():
    """As short as it was given, in History and in explain."""
    told = []
    for given in (
        4,
        "dynamic",
        ipufit.LossScale(),
        ipufit.LossScale(8.0),
        ipufit.LossScale(8.0, None),
    ):
        model, _ = compiled(MLP().double(), momentum, precision=ipufit.Precision(loss_scale=given))
        told.append(fit(model, X[:4], Y[:4], epochs=1).params["loss_scale"])
    assert told == [
        4.0,
        "dynamic",
        "dynamic",
        "LossScale(initial=8.0, growth_interval=2000)",
        8.0,
    ]


@pytest.mark.long("ipu-standin")
def test_evaluation_knows_no_scale():
    model, _ = compiled(MLP().double(), momentum, precision=ipufit.Precision(loss_scale=2.0**60))
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    plain = copy.deepcopy(model.module)
    other, _ = compiled(plain, momentum)
    assert model.evaluate(loader, verbose=0) == other.evaluate(loader, verbose=0)
