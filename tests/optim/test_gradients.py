"""From gradients to weights: clipping, averaging, normalisation, accumulation, by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import ipufit
from ipufit.engines.embedded.engine import EmbeddedEngine
from tests.caching import once_per_engine
from tests.fitting import PLANS, WAYS, Plan, assert_close, assert_equal, compiled, fit
from tests.nets import CNN, MLP, data
from tests.reference import train
from tests.told import message

pytestmark = pytest.mark.grid

X, Y = data(23)
# Of whole micro-batches, where a smaller one, which is recorded too, shows nothing.
EVEN = X[:20], Y[:20]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def adadelta(parameters):
    """Goes through its own step."""
    return torch.optim.Adadelta(parameters, lr=0.5)


def two_groups(parameters):
    first, *others = parameters
    return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 0.1}], lr=0.5)


def by_hand(net, optimizer, plan, epochs=2, rows=None, **options):
    net = copy.deepcopy(net)
    x, y, loss = X[:rows], Y[:rows], nn.functional.cross_entropy
    report = train(net, optimizer(net.parameters()), loss, x, y, epochs, **plan.by_hand, **options)
    return net, report


# ---- clipping -----------------------------------------------------------------------------------


def norm_of_each(parameters, update):
    for p in parameters:
        clip_grad_norm_([p], 0.05)
    return True


def norm_of_all(parameters, update):
    clip_grad_norm_(parameters, 0.1)
    return True


def values(parameters, update):
    clip_grad_value_(parameters, 0.01)
    return True


CLIPS = {
    "norm": (0.05, norm_of_each),
    "global_norm": (0.1, norm_of_all),
    "value": (0.01, values),
}


@pytest.mark.few(
    "norm-Plan(mb=3, di=2, ga=3, replicas=2)-captured",
    "global_norm-Plan(mb=4, di=3, ga=1, replicas=1)-eager",
    "value-Plan(mb=5, di=2, ga=2, replicas=1)-late",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_is_that_of_torch_once_after_the_reduction(name, plan, way):
    """Clipped in every micro-batch, accumulation would change the gradient's direction."""
    net = MLP().double()
    bound, finish = CLIPS[name]
    expected, report = by_hand(net, sgd, plan, finish=finish)
    model, _ = compiled(net, sgd, way=way, clip=ipufit.Clip(**{name: bound}))
    history = fit(model, X, Y, plan).history
    assert_close(model.module, expected)
    assert history["loss"] == pytest.approx([loss for loss, _ in report], abs=1e-11)
    free, _ = by_hand(net, sgd, plan)
    assert not torch.allclose(free.layers[0].weight, model.module.layers[0].weight)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [adadelta, two_groups, adam])
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_works_for_every_kind_of_optimizer(name, optimizer):
    """Parameters of several groups have one norm together; another optimizer has its own step."""
    net, plan = MLP().double(), Plan(4, 2, 2)
    bound, finish = CLIPS[name]
    expected, _ = by_hand(net, optimizer, plan, rows=16, finish=finish)
    model, _ = compiled(net, optimizer, clip=ipufit.Clip(**{name: bound}))
    fit(model, X[:16], Y[:16], plan)
    assert_close(model.module, expected)


@once_per_engine
def unclipped():
    """A network, and the same trained without a bound."""
    net = MLP().double()
    free, _ = compiled(net, sgd)
    fit(free, *EVEN)
    return net, free.module


@pytest.mark.long
@pytest.mark.parametrize("name", CLIPS)
def test_a_bound_that_is_never_reached_changes_no_bit(name):
    net, free = unclipped()
    wide, _ = compiled(net, sgd, clip=ipufit.Clip(**{name: 1e6}))
    fit(wide, *EVEN)
    assert_equal(wide.module, free)


@pytest.mark.long
@pytest.mark.parametrize("name", ["global_norm", "norm", "value"])
def test_the_global_norm_counts_parameters_of_two_dtypes(name):
    """Blocks of different dtypes have norms of different dtypes."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(12, 6)
            self.second = nn.Linear(6, 5).double()

        def forward(self, x):
            return self.second(self.first(x.flatten(1).float()).double())

    net = Two()
    bound, finish = CLIPS[name]
    expected, _ = by_hand(net, sgd, Plan(), rows=len(EVEN[0]), finish=finish)
    model, _ = compiled(net, sgd, clip=ipufit.Clip(**{name: bound}))
    fit(model, *EVEN)
    assert_close(model.module, expected, atol=2e-5)  # half of it in float32


# ---- moving averages ----------------------------------------------------------------------------


class Averaged:
    """Keras' moving average, by hand: the first update sets it."""

    def __init__(self, momentum, every=None):
        self.momentum, self.every, self.values = momentum, every, None

    def __call__(self, net, update):
        weights = [p.detach().clone() for p in net.parameters()]
        if self.values is None:
            self.values = weights
        else:
            self.values = [
                self.momentum * old + (1 - self.momentum) * new
                for old, new in zip(self.values, weights)
            ]
        if self.every is not None and update % self.every == 0:
            self.write(net)

    def write(self, net):
        with torch.no_grad():
            for p, value in zip(net.parameters(), self.values):
                p.copy_(value)


@pytest.mark.few(
    "None-Plan(mb=3, di=2, ga=3, replicas=2)-captured",
    "2-Plan(mb=4, di=3, ga=1, replicas=1)-eager",
    "100-Plan(mb=5, di=2, ga=2, replicas=1)-late",
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("every", [None, 2, 100])
def test_averages_are_those_of_keras(every, plan, way):
    """At the end of fit the weights are the averages; before, only every so many updates."""
    net = CNN().double()
    average = Averaged(0.8, every)
    expected, report = by_hand(net, sgd, plan, seed=5, after=average)
    average.write(expected)
    model, _ = compiled(net, sgd, way=way, ema=ipufit.EMA(momentum=0.8, overwrite_frequency=every))
    history = fit(model, X, Y, plan).history
    assert_close(model.module, expected)
    assert history["loss"] == pytest.approx([loss for loss, _ in report], abs=1e-11)


@pytest.mark.long
def test_averages_go_on_in_a_second_fit():
    """As in Keras, whose optimizer keeps them."""
    net = MLP().double()
    average = Averaged(0.5)
    expected = copy.deepcopy(net)
    optimizer = sgd(expected.parameters())
    model, _ = compiled(net, sgd, ema=ipufit.EMA(momentum=0.5))
    for _ in range(2):
        train(expected, optimizer, nn.functional.cross_entropy, X, Y, 1, mb=4, after=average)
        average.write(expected)
        fit(model, X, Y, epochs=1)
    assert_close(model.module, expected)


@pytest.mark.long
@pytest.mark.parametrize(("momentum", "is_last"), [(0.0, True), (1.0, False)])
def test_momentum_zero_is_the_last_weight_and_one_the_first(momentum, is_last):
    net, seen = MLP().double(), []
    expected, _ = by_hand(
        net,
        sgd,
        Plan(),
        rows=len(EVEN[0]),
        after=lambda net, update: seen.append(copy.deepcopy(net)),
    )
    model, _ = compiled(net, sgd, ema=ipufit.EMA(momentum=momentum))
    fit(model, *EVEN)
    assert_close(model.module, expected if is_last else seen[0])


class Swapping(ipufit.callbacks.Callback):
    """Looks at the averages at the end of each epoch."""

    def __init__(self, back=True):
        super().__init__()
        self.back, self.seen, self.between = back, [], []

    def on_epoch_end(self, epoch, logs=None):
        self.model.swap_ema_weights()
        self.seen.append(copy.deepcopy(self.model.module))
        if self.back:
            self.model.swap_ema_weights()
            self.between.append(copy.deepcopy(self.model.module))


@pytest.mark.long
def test_swapping_shows_the_averages_and_leaves_training_alone():
    net, callback = MLP().double(), Swapping()
    plain, _ = compiled(net, sgd)
    fit(plain, *EVEN)
    model, _ = compiled(net, sgd, ema=ipufit.EMA(momentum=0.8))
    fit(model, *EVEN, callbacks=callback)
    assert_equal(model.module, callback.seen[-1])
    assert_equal(callback.between[-1], plain.module)
    once, _ = compiled(net, sgd, ema=ipufit.EMA(momentum=0.8))
    fit(once, *EVEN, epochs=1)
    assert_equal(once.module, callback.seen[0])


def test_training_on_the_averages_is_refused_and_the_weights_come_back():
    net = MLP().double()
    model, _ = compiled(net, sgd, ema=ipufit.EMA())
    text = (
        "training needs the weights, but the module holds their moving averages now. Call "
        "model.swap_ema_weights() again before training continues."
    )
    assert message(fit, model, *EVEN, callbacks=Swapping(back=False)) == text
    plain, _ = compiled(net, sgd)
    fit(plain, *EVEN, epochs=1)
    assert_equal(model.module, plain.module)


@pytest.mark.long
def test_averages_left_in_place_at_the_end_are_the_weights():
    """A swap in the last epoch and the end of fit ask for the same."""
    net = MLP().double()
    model, _ = compiled(net, sgd, ema=ipufit.EMA(momentum=0.8))
    fit(model, *EVEN, epochs=1, callbacks=Swapping(back=False))
    other, _ = compiled(net, sgd, ema=ipufit.EMA(momentum=0.8))
    fit(other, *EVEN, epochs=1)
    assert_equal(model.module, other.module)


@pytest.mark.long
def test_an_error_in_training_leaves_the_weights_not_the_averages():
    """Averages become the weights when fit has done what it was asked for."""

    class Failing(ipufit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyError(epoch)

    net = MLP().double()
    model, _ = compiled(net, sgd, ema=ipufit.EMA())
    with pytest.raises(KeyError):
        fit(model, *EVEN, callbacks=Failing())
    plain, _ = compiled(net, sgd)
    fit(plain, *EVEN, epochs=1)
    assert_equal(model.module, plain.module)


@pytest.mark.long
def test_half_precision_weights_are_averaged_in_float32():
    """In bfloat16 an average would stop at a difference of one in 256."""
    net = MLP().bfloat16()
    average = Averaged(0.99)

    def after(net, update):
        wide = copy.deepcopy(net).float()
        average(wide, update)

    expected = copy.deepcopy(net)
    train(
        expected,
        torch.optim.SGD(expected.parameters(), lr=0.5),
        nn.functional.cross_entropy,
        X.bfloat16(),
        Y,
        epochs=2,
        mb=4,
        after=after,
    )
    model, _ = compiled(net, lambda p: torch.optim.SGD(p, lr=0.5), ema=ipufit.EMA())
    fit(model, X.bfloat16(), Y)
    average.write(expected)
    assert_close(model.module, expected, atol=4e-3)  # one bit of bfloat16


@pytest.mark.long
def test_a_parameter_unfrozen_between_two_fits_joins_the_averages():
    """The averages of the others must not start anew."""
    net = MLP().double()
    model, engine = compiled(net, sgd, ema=ipufit.EMA(momentum=0.9))
    last = model.module.layers[2]
    for p in last.parameters():
        p.requires_grad_(False)
    fit(model, X, Y, epochs=1)
    known = engine.carried.averages["net.layers.0.weight"].clone()
    for p in last.parameters():
        p.requires_grad_(True)
    begun = last.weight.detach().clone()
    seen = []

    class After(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(copy.deepcopy(self.model.module))

    fit(model, X[:4], Y[:4], epochs=1, callbacks=After())
    first = 0.9 * known + 0.1 * seen[0].layers[0].weight
    torch.testing.assert_close(model.module.layers[0].weight, first, rtol=0, atol=1e-12)
    joined = 0.9 * begun + 0.1 * seen[0].layers[2].weight
    torch.testing.assert_close(last.weight, joined, rtol=0, atol=1e-12)


def test_swapping_needs_averages_and_a_running_fit():
    model, _ = compiled(MLP().double(), sgd)
    text = (
        "swap_ema_weights swaps weights and their moving averages, which needs {}. Call it in a "
        "callback of a model compiled with ema=ipufit.EMA()."
    )
    assert message(model.swap_ema_weights) == text.format("ema= in compile")
    model, _ = compiled(MLP().double(), sgd, ema=ipufit.EMA())
    assert message(model.swap_ema_weights) == text.format("a running fit")
    with pytest.raises(ipufit.errors.NotCompiledError):
        ipufit.Model(MLP()).swap_ema_weights()


# ---- reduction and accumulation -----------------------------------------------------------------


@pytest.mark.few("Plan(mb=4, di=3, ga=1, replicas=1)-eager")
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_micro_batches_may_count_the_same_whatever_their_size(plan, way):
    """The mean of means, which Keras and Lightning have; a tail then counts more."""
    net = CNN().double()
    expected, _ = by_hand(net, sgd, plan, seed=5, equally=True)
    model, _ = compiled(net, sgd, way=way, reduction=ipufit.Reduction(normalize="micro_batches"))
    fit(model, X, Y, plan)
    assert_close(model.module, expected)


def fit_plainly(net, plan):
    """The losses of an epoch of one update do not depend on what the update makes of them."""
    model, _ = compiled(net, sgd)
    return fit(model, X, Y, plan, epochs=1).history["loss"]


@pytest.mark.long
def test_normalisation_and_reduction_are_options_that_differ():
    """Of an update with a smaller micro-batch, four ways make four results."""
    net, plan = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double(), Plan(5, 1, 5)
    found, plain = [], fit_plainly(net, plan)
    for how in ("samples", "micro_batches"):
        for reduction in ("mean", "sum"):
            model, _ = compiled(
                net, sgd, reduction=ipufit.Reduction(gradients=reduction, normalize=how)
            )
            history = fit(model, X, Y, plan, epochs=1).history
            found.append(model.module[1].weight.detach())
            assert history["loss"] == plain
    for i, one in enumerate(found):
        assert not any(torch.allclose(one, other) for other in found[:i])


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    # A bit of the sum: kernels for long and for short tensors round half precision differently.
    ("dtype", "atol"),
    [("float64", 1e-7), (torch.float16, 5e-5), (torch.bfloat16, 4e-4)],
)
def test_gradients_are_added_up_in_the_dtype_that_is_asked_for(dtype, atol, way):
    """By hand: cast, add, share, cast back.

    An IPU's program has one size of micro-batch and divides by their number: what is to count less
    is made smaller within the loss, so before it is cast.
    """
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    net, plan = MLP(), Plan(4, 1, 3)
    x = X.float()
    model, engine = compiled(
        net,
        lambda p: torch.optim.SGD(p, lr=0.5),
        way=way,
        precision=ipufit.Precision(accumulation_dtype=dtype),
    )
    on_ipu = not isinstance(engine, EmbeddedEngine)
    expected = copy.deepcopy(net)
    groups = [range(0, 12), range(12, 23)]
    parameters = list(expected.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for rows in groups:
        is_full = len(rows) == 12
        total = None
        for first in range(rows.start, rows.stop, 4):
            stop = min(first + 4, rows.stop)
            value = nn.functional.cross_entropy(expected(x[first:stop]), Y[first:stop])
            gradients = torch.autograd.grad(value, parameters)
            factor = 1.0 if is_full else (stop - first) / len(rows)
            if on_ipu and not is_full:
                gradients, factor = [g * (3 * factor) for g in gradients], 1.0
            own = [g.to(wanted) for g in gradients]
            total = (
                [g * factor for g in own]
                if total is None
                else [t.add(g, alpha=factor) for t, g in zip(total, own)]
            )
        share = 1 / 3 if is_full else 1.0
        for p, t in zip(parameters, total):
            p.grad = (t / 3 if on_ipu else t * share).float()
        optimizer.step()
    fit(model, x, Y, plan, epochs=1)
    assert_close(model.module, expected, atol=atol)
    plain, _ = compiled(net, lambda p: torch.optim.SGD(p, lr=0.5), way=way)
    fit(plain, x, Y, plan, epochs=1)
    assert not torch.equal(plain.module.layers[0].weight, model.module.layers[0].weight)


@pytest.mark.long
def test_a_wide_accumulation_keeps_what_half_precision_loses():
    """512 gradients of one: in bfloat16 the sum stops at 256, and the mean with it."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

        def forward(self, x):
            return x * self.weight

    def loss(prediction, target):
        return prediction.sum()

    x, y, plan = torch.ones(512, 1), torch.zeros(512), Plan(1, 1, 512)
    made = {}
    for dtype in (None, "float32"):
        model, _ = compiled(
            Sum(),
            lambda p: torch.optim.SGD(p, lr=1.0),
            loss,
            precision=ipufit.Precision("bfloat16", accumulation_dtype=dtype),
        )
        fit(model, x, y, plan, epochs=1)
        made[dtype] = model.module.weight.item()
    assert made == {None: -0.5, "float32": -1.0}


# ---- all together -------------------------------------------------------------------------------

EVERYTHING = {
    "clip": ipufit.Clip(global_norm=0.2),
    "ema": ipufit.EMA(momentum=0.7, overwrite_frequency=3),
    "precision": ipufit.Precision(loss_scale=512.0, accumulation_dtype="float64"),
}


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [adam, adadelta])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("numbers", [(1, 4), (1, 2, 5, 10)], ids=str)
def test_everything_at_once_has_the_same_bits_for_every_number_of_device_iterations(
    numbers, way, optimizer
):
    net, found = CNN(), []
    for di in numbers:
        model, _ = compiled(net, optimizer, way=way, metrics=["accuracy"], **EVERYTHING)
        history = fit(model, X.float(), Y, Plan(2, di, 2), epochs=3)
        found.append((model.module, history.history))
    for module, history in found[1:]:
        assert_equal(module, found[0][0])
        assert history == found[0][1]


@pytest.mark.parametrize("optimizer", [adam, pytest.param(adadelta, marks=pytest.mark.long)])
def test_every_way_to_run_has_the_same_bits(optimizer):
    net, found = CNN(), []
    for way in WAYS:
        model, _ = compiled(net, optimizer, way=way, **EVERYTHING)
        history = fit(model, X.float(), Y, Plan(2, 3, 2, 2))
        found.append((model.module, history.history))
    for module, history in found[1:]:
        assert_equal(module, found[0][0])
        assert history == found[0][1]


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: ipufit.Clip(norm=0),
            "Clip.norm must be a positive number, got 0. Leave it out for no clipping.",
        ),
        (
            lambda: ipufit.Clip(value=float("nan")),
            "Clip.value must be a positive number, got nan. Leave it out for no clipping.",
        ),
        (
            lambda: ipufit.Clip(global_norm=True),
            "Clip.global_norm must be a positive number, got True. Leave it out for no clipping.",
        ),
        (
            lambda: ipufit.Clip(norm=1.0, value=2),
            "Clip takes at most one bound on gradients, got norm and value. Choose one: norm for "
            "each parameter, global_norm for all together, value for each element.",
        ),
        (
            lambda: ipufit.EMA(momentum=1.5),
            "EMA.momentum must be between 0 and 1, got 1.5. It is the weight of the old "
            "average, such as 0.99.",
        ),
        (
            lambda: ipufit.EMA(overwrite_frequency=0),
            "EMA.overwrite_frequency must be an integer of at least 1 or None, got 0.",
        ),
        (
            lambda: ipufit.EMA(overwrite_frequency=torch.tensor(2.5)),
            "EMA.overwrite_frequency must be an integer of at least 1 or None, got tensor(2.5000).",
        ),
        (
            lambda: ipufit.Precision(accumulation_dtype="int32"),
            "Precision.accumulation_dtype must be None or a floating-point dtype such as "
            "torch.float32, got 'int32'.",
        ),
        (
            lambda: ipufit.Precision(accumulation_dtype="double-double"),
            "Precision.accumulation_dtype must be None or a floating-point dtype such as "
            "torch.float32, got 'double-double'.",
        ),
        (
            lambda: compiled(MLP(), sgd, clip=1.0),
            "clip must be an ipufit.Clip or None, got 1.0. Write for example "
            "clip=ipufit.Clip(global_norm=1.0).",
        ),
        (
            lambda: compiled(MLP(), sgd, ema=True),
            "ema must be an ipufit.EMA or None, got True. Write for example "
            "ema=ipufit.EMA(momentum=0.99).",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(make, text):
    assert message(make) == text


@pytest.mark.long
def test_what_compile_was_told_is_in_the_history_and_in_explain(capsys):
    """A run that can't be told from its neighbour is no experiment."""
    model, _ = compiled(
        MLP().double(), sgd, reduction=ipufit.Reduction(gradients="sum"), **EVERYTHING
    )
    params = fit(model, X, Y, Plan(4, 3)).params
    told = {
        "global_clipnorm": 0.2,
        "use_ema": True,
        "ema_momentum": 0.7,
        "ema_overwrite_frequency": 3,
        "loss_scale": 512.0,
        "accumulation_dtype": "float64",
    }
    assert {name: params[name] for name in told} == told
    assert params["gradient_reduction"] == "sum"
    model.explain()
    text = capsys.readouterr().out
    assert "gradients reduced by sum" in text
    for name, value in told.items():
        assert f"{name}={value!r}" in text
    plain, _ = compiled(MLP().double(), sgd)
    params = fit(plain, X, Y).params
    assert params["gradient_reduction"] == "mean"
    assert not set(told).intersection(params)
    plain.explain()
    assert "Compiled with" not in capsys.readouterr().out
