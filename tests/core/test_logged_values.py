"""ipufit.log: values from inside the program, exact whatever the plan."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks.epoch_metrics import EpochMetrics
from ipufit.core.logged_values import LogRule, Running, collecting, report
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.errors import ConfigurationError
from ipufit.losses import Loss
from ipufit.metrics.metric_set import MetricSet
from tests.engines import embedded_only
from tests.fitting import PLANS, WAYS, Plan, assert_equal, compiled, fit
from tests.nets import data
from tests.reference import cut
from tests.tape import HostReads

pytestmark = pytest.mark.grid

X, Y = data(23)
# Without a smaller last micro-batch, which an IPU pads only where nothing is logged, and which is
# recorded too.
EVEN = X[:20], Y[:20]


def frozen(parameters):
    """An optimizer that leaves the weights as they are."""
    return torch.optim.SGD(parameters, lr=0.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


REDUCTIONS = ["mean", "sum", "max", "min", "last"]


class Norm(nn.Module):
    """Logs the mean of its input in every way, from a module below the user's."""

    def forward(self, x):
        for reduce in REDUCTIONS:
            ipufit.log(f"input_{reduce}", x.mean(), reduce, on_update=True)
        return x


class Net(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner = Norm() if inner is None else inner
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.inner(x.flatten(1)))


def joined(values, sizes, reduce):
    """A reduction over micro-batches, by hand."""
    if reduce == "mean":
        return sum(v * n for v, n in zip(values, sizes)) / sum(sizes)
    return {"sum": sum, "max": max, "min": min, "last": lambda v: v[-1]}[reduce](values)


def close(value):
    return pytest.approx(value, rel=1e-12, abs=1e-14)


@pytest.mark.long("ipu-standin")
@pytest.mark.few(
    "Plan(mb=3, di=2, ga=3, replicas=2)-captured", "Plan(mb=4, di=3, ga=1, replicas=1)-eager"
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_values_are_exact_for_every_plan(plan, way):
    """Each sample counts once in a mean, in tails too; sum, max, min and last follow the stream."""
    model, _ = compiled(Net().double(), frozen, way=way)
    seen = {name: [] for name in REDUCTIONS}

    class See(ipufit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            meter = self.model.seen_meter
            for reduce in REDUCTIONS:
                seen[reduce].append(list(meter.by_update[f"input_{reduce}"]))

        def on_train_batch_end(self, batch, logs=None):
            self.model.seen_meter = logs._meter

    history = fit(model, X, Y, plan, callbacks=See()).history
    rows = cut(23, plan.mb)
    values = [X[r.start : r.stop].mean().item() for r in rows]
    sizes = [len(r) for r in rows]
    group = plan.ga * plan.replicas
    for reduce in REDUCTIONS:
        expected = joined(values, sizes, reduce)
        assert history[f"input_{reduce}"] == close([expected, expected])
        by_update = [
            joined(values[i : i + group], sizes[i : i + group], reduce)
            for i in range(0, len(values), group)
        ]
        assert seen[reduce] == [close(by_update)] * 2


@pytest.mark.parametrize(
    "numbers", [(1, 5), pytest.param((1, 2, 5, 100), marks=pytest.mark.long)], ids=str
)
def test_values_have_the_same_bits_for_every_number_of_device_iterations(numbers):
    net, found = Net().double(), []
    for di in numbers:
        model, _ = compiled(net, sgd)
        found.append(fit(model, X, Y, Plan(2, di, 2)).history)
    assert found[1:] == found[:1] * (len(numbers) - 1)


@pytest.mark.long("ipu-standin")
def test_logging_changes_no_bit_of_training():
    net = Net().double()
    quiet, _ = compiled(net, sgd)
    quiet.module.inner = nn.Identity()
    fit(quiet, *EVEN)
    model, _ = compiled(net, sgd)
    fit(model, *EVEN)
    assert torch.equal(model.module.head.weight, quiet.module.head.weight)


def logging_loss(prediction, target):
    value = nn.functional.cross_entropy(prediction, target)
    ipufit.log("squared", value**2)
    return value


class LoggingLoss(nn.Module):
    def forward(self, prediction, target):
        return logging_loss(prediction, target)


class OwnLoss(nn.Module):
    """Computes its loss itself."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x, target):
        logits = self.head(x.flatten(1))
        return logits, logging_loss(logits, target)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("net", "loss"),
    [
        (Net(nn.Identity()), logging_loss),
        (Net(nn.Identity()), LoggingLoss()),
        (OwnLoss(), None),
    ],
    ids=["function", "module", "own"],
)
def test_a_loss_of_any_kind_can_log(net, loss, way):
    net = net.double()
    model, _ = compiled(net, frozen, loss, way)
    validation = DataLoader(TensorDataset(X[:8], Y[:8]), batch_size=4)
    history = fit(model, *EVEN, Plan(4, 3), validation_data=validation).history
    for name, n in (("squared", 20), ("val_squared", 8)):
        rows = cut(n, 4)
        values = [
            nn.functional.cross_entropy(
                net.head(X[r.start : r.stop].flatten(1)), Y[r.start : r.stop]
            )
            for r in rows
        ]
        expected = joined([v.item() ** 2 for v in values], [len(r) for r in rows], "mean")
        assert history[name] == close([expected, expected])
    assert model.evaluate(validation, verbose=0)["squared"] == close(expected)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_a_name_used_twice_in_one_forward_is_reduced_there_too(way):
    class Twice(nn.Module):
        def forward(self, x):
            for reduce in REDUCTIONS:
                ipufit.log(reduce, x.sum(), reduce)
                ipufit.log(reduce, 2 * x.sum(), reduce)
            return x

    model, _ = compiled(Net(Twice()).double(), frozen, way=way)
    history = fit(model, X, Y, Plan(23), epochs=1).history
    total = X.sum().item()
    assert history["mean"] == close([1.5 * total])
    assert history["sum"] == close([3 * total])
    assert history["max"] == close([max(total, 2 * total)])
    assert history["min"] == close([min(total, 2 * total)])
    assert history["last"] == close([2 * total])


@pytest.mark.long("ipu-standin")
def test_predict_and_calls_outside_leave_values_aside():
    model, engine = compiled(Net().double(), frozen)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    model.module.eval()
    expected = model.module(X)
    got = model.predict(loader, verbose=0)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
    if isinstance(engine, EmbeddedEngine):
        assert engine.transfer.count == 6


@pytest.mark.long
def test_a_number_is_what_it_was_when_the_program_was_recorded_to_the_last_bit():
    """0.1 is no float32, and 2**24 + 1 is none either."""

    class Numbers(nn.Module):
        def forward(self, x):
            ipufit.log("tenth", 0.1)
            ipufit.log("large", 2**24 + 1, "max")
            ipufit.log("true", True, "last")
            ipufit.log("integer", (x > 0).sum(), "sum")
            ipufit.log("bool", (x > 1e9).any(), "max")
            ipufit.log("one_element", x.new_ones(1, 1, 1), "sum")
            return x

    for way in WAYS:
        model, _ = compiled(Net(Numbers()), frozen, way=way)
        history = fit(model, X[:20].float(), Y[:20], Plan(4), epochs=1).history
        assert history["tenth"] == pytest.approx([0.1], rel=1e-15)
        assert history["large"] == [2**24 + 1]
        assert history["true"] == [1.0]
        assert history["integer"] == [int((X[:20] > 0).sum())]
        assert history["bool"] == [0.0]
        assert history["one_element"] == [5.0]


@pytest.mark.long
def test_what_forward_does_to_a_tensor_later_on_is_not_logged():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            ipufit.log("before", self.count, "last")
            self.count += 1
            ipufit.log("after", self.count, "last")
            return x

    for way in WAYS:
        model, _ = compiled(Net(InPlace()).double(), frozen, way=way)
        history = fit(model, X, Y, Plan(23), epochs=3).history
        assert history["before"] == [0.0, 1.0, 2.0]
        assert history["after"] == [1.0, 2.0, 3.0]


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("way", WAYS)
def test_no_gradient_flows_through_a_value(way):
    class Logs(nn.Module):
        def forward(self, x):
            ipufit.log("x", (x * self.weight).sum())
            return x

    class Plain(nn.Module):
        def forward(self, x):
            return x

    found = []
    for kind in (Logs, Plain):
        torch.manual_seed(3)
        net = Net(kind()).double()
        net.inner.weight = nn.Parameter(torch.ones(12, dtype=torch.float64))
        model, _ = compiled(net, sgd, way=way)
        fit(model, *EVEN)
        found.append(model.module)
    assert_equal(*found)
    assert bool((found[0].inner.weight == 1).all())


@pytest.mark.long
@embedded_only("PopTorch traces no torch.utils.checkpoint, which it says itself")
@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_is_computed_again_reports_once(way):
    """torch.utils.checkpoint runs it a second time in the backward pass."""

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense = nn.Linear(12, 12)

        def inner(self, x):
            ipufit.log("rows", x.new_ones(()) * len(x), "sum")
            return self.dense(x).tanh()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    model, _ = compiled(Net(Again()).double(), sgd, way=way)
    assert fit(model, *EVEN).history["rows"] == [20.0, 20.0]


@pytest.mark.long
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_a_value_that_is_no_number_is_not_hidden(reduce):
    class Holes(nn.Module):
        def forward(self, x):
            ipufit.log("hole", torch.where(x.mean() == X[8:12].mean(), math.nan, x.mean()), reduce)
            return x

    for way in WAYS:
        model, _ = compiled(Net(Holes()).double(), frozen, way=way)
        (value,) = fit(model, *EVEN, epochs=1).history["hole"]
        assert math.isnan(value) == (reduce != "last")


class Sized(nn.Module):
    """Logs other names for a smaller micro-batch."""

    def forward(self, x):
        ipufit.log("all", x.sum(), "sum", on_update=True)
        if len(x) < 4:
            ipufit.log("small", x.sum(), "sum", on_update=True)
        else:
            ipufit.log("full", x.sum(), "mean", on_update=True)
        return x


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("di", [1, 2, 100])
def test_micro_batches_may_log_different_names(di, way):
    """A value counts where it was logged; of updates without one, the value is nan."""
    model, _ = compiled(Net(Sized()).double(), frozen, way=way)
    seen = {}

    class See(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.update(logs._meter.by_update)

    history = fit(model, X, Y, Plan(4, di), epochs=1, callbacks=See()).history
    sums = [X[r.start : r.stop].sum().item() for r in cut(23, 4)]
    assert history["all"] == close([sum(sums)])
    assert history["small"] == close([sums[-1]])
    assert history["full"] == close([sum(sums[:-1]) / 5])
    assert seen["all"] == close(sums)
    assert [math.isnan(value) for value in seen["small"]] == [True] * 5 + [False]
    assert [math.isnan(value) for value in seen["full"]] == [False] * 5 + [True]


@pytest.mark.long("ipu-standin")
def test_a_module_that_runs_may_log_as_its_values_will():
    """Without a recording a name may come and go from one micro-batch to the next."""

    class Sometimes(nn.Module):
        def forward(self, x):
            if x.mean() > 0:
                ipufit.log("positive", x.mean())
            else:
                ipufit.log("negative", x.mean())
            return x

    model, _ = compiled(Net(Sometimes()).double(), frozen, way="eager")
    history = fit(model, X, Y, Plan(1, 4), epochs=1).history
    means = X.flatten(1).mean(1)
    assert history["positive"] == close([means[means > 0].mean().item()])
    assert history["negative"] == close([means[means <= 0].mean().item()])


@pytest.mark.long
def test_values_come_over_in_the_one_transfer_of_an_execution():
    """Nothing is read between two updates, which would stop a device."""

    class Executions(ipufit.callbacks.Callback):
        count, reads = 0, []

        def on_train_batch_begin(self, batch, logs=None):
            self.mode = HostReads()
            self.mode.__enter__()

        def on_train_batch_end(self, batch, logs=None):
            self.mode.__exit__(None, None, None)
            self.reads.append(self.mode.count)
            self.count += 1

        def on_test_batch_end(self, batch, logs=None):
            self.count += 1

    counter = Executions()
    options = {
        "precision": ipufit.Precision(loss_scale="dynamic"),
        "ema": ipufit.EMA(),
        "clip": ipufit.Clip(global_norm=1.0),
    }
    model, engine = compiled(Net().double(), sgd, way="late", **options)
    validation = DataLoader(TensorDataset(X[:10], Y[:10]), batch_size=4)
    fit(model, X, Y, Plan(4, 3), validation_data=validation, callbacks=counter)
    assert engine.transfer.count == counter.count == 4 + 2
    assert counter.reads == [0] * 4


@pytest.mark.long("ipu-standin")
def test_callbacks_see_values_so_far():
    model, _ = compiled(Net().double(), frozen)
    seen = []

    class See(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((logs["input_sum"], dict(logs)["input_last"], logs["loss"]))

    fit(model, X, Y, Plan(4, 2), epochs=1, callbacks=See())
    means = [X[r.start : r.stop].mean().item() for r in cut(23, 4)]
    assert [one for one, _, _ in seen] == close([sum(means[:n]) for n in (2, 4, 6)])
    assert [one for _, one, _ in seen] == close([means[n - 1] for n in (2, 4, 6)])


# ---- names and bad input ------------------------------------------------------------------------


def logging(*calls):
    """A network whose forward makes these calls of log."""

    class Logs(nn.Module):
        def forward(self, x):
            for args, kwargs in calls:
                args = [arg(x) if callable(arg) else arg for arg in args]
                ipufit.log(*args, **kwargs)
            return x

    return Net(Logs()).double()


def call(*args, **kwargs):
    return args, kwargs


NAMES = (
    "the name of a logged value must be free, and ipufit itself logs batch, epoch, event, "
    "learning_rate, loss, loss_scale, samples, skipped_updates, update, updates and val_..., got "
    "{!r}. Choose another name; rename a metric with metrics={{'name': metric}}."
)
BAD = [
    (call("loss", 1.0), NAMES.format("loss")),
    (call("val_x", 1.0), NAMES.format("val_x")),
    (call("skipped_updates", 1.0), NAMES.format("skipped_updates")),
    (
        call("", 1.0),
        "the name of a logged value must be a string, got ''. Write for example 'error'.",
    ),
    (
        call(3, 1.0),
        "the name of a logged value must be a string, got 3. Write for example 'error'.",
    ),
    (
        call("a", 1.0, "median"),
        "log('a'): reduce must be one of 'mean', 'sum', 'max', 'min', 'last', got 'median'.",
    ),
    (call("a", 1.0, on_update=1), "log('a'): on_update must be True or False, got 1."),
    (
        call("a", lambda x: x[0, :3]),
        "log('a') takes one real number, a tensor of one element, got a tensor of shape (3,), "
        "dtype torch.float64. Reduce it, for example with .mean().",
    ),
    (
        call("a", lambda x: torch.complex(x, x).sum()),
        "log('a') takes one real number, a tensor of one element, got a tensor of shape (), dtype "
        "torch.complex128. Reduce it, for example with .mean().",
    ),
    (
        call("a", "text"),
        "log('a') takes one real number, a tensor of one element, got str. Reduce it, for example "
        "with .mean().",
    ),
]


@pytest.mark.parametrize("way", ["recorded", "eager"])
@pytest.mark.parametrize(("bad", "text"), BAD, ids=[text[:40] for _, text in BAD])
def test_what_cannot_be_logged_is_refused_before_any_update(bad, text, way):
    net = logging(bad)
    model, _ = compiled(net, sgd, way=way)
    with pytest.raises(ConfigurationError) as caught:
        fit(model, X, Y)
    assert str(caught.value) == text
    assert_equal(model.module, net)
    with pytest.raises(ConfigurationError) as caught:
        model.module(X)  # outside of a program too
    assert str(caught.value) == text


def test_one_name_has_one_reduction():
    text = (
        "log must always reduce 'a' in the same way, got reduce='mean', on_update=False and "
        "reduce='sum', on_update=False. Give the second value another name."
    )
    model, _ = compiled(logging(call("a", 1.0), call("a", 2.0, "sum")), sgd)
    with pytest.raises(ConfigurationError) as caught:
        fit(model, X, Y)
    assert str(caught.value) == text


@pytest.mark.long
def test_one_name_has_one_reduction_in_a_smaller_micro_batch_too():
    class Sized(nn.Module):
        def forward(self, x):
            ipufit.log("a", x.sum(), "mean" if len(x) == 4 else "max", on_update=len(x) != 4)
            return x

    net = Net(Sized()).double()
    text = (
        "log must always reduce 'a' in the same way, got reduce='mean', on_update=False and "
        "reduce='max', on_update=True. Give the second value another name."
    )
    model, _ = compiled(net, sgd)
    with pytest.raises(ConfigurationError) as caught:
        fit(model, X, Y)
    assert str(caught.value) == text
    assert_equal(model.module, net)
    # Of data without a length the tail is not known before it comes.
    batches = [(X[r.start : r.stop], Y[r.start : r.stop]) for r in cut(23, 4)]
    for di in (1, 100):
        with pytest.raises(ConfigurationError) as caught:
            model.fit((batch for batch in batches), device_iterations=di, verbose=0)
        assert str(caught.value) == text


@pytest.mark.long
@pytest.mark.parametrize(
    "size",
    [4, pytest.param(3, marks=embedded_only("an IPU pads a tail, so that forward sees 4 rows"))],
)
@pytest.mark.parametrize("has_length", [True, False])
def test_a_value_and_a_metric_cannot_share_a_name(size, has_length):
    """One of them would be overwritten; in a tail alone as well."""

    class Sized(nn.Module):
        def forward(self, x):
            if len(x) == size:
                ipufit.log("accuracy", x.sum())
            return x

    net = Net(Sized()).double()
    model, _ = compiled(net, frozen, metrics=["accuracy"])
    batches = [(X[r.start : r.stop], Y[r.start : r.stop]) for r in cut(23, 4)]
    with pytest.raises(ConfigurationError) as caught:
        model.fit(batches if has_length else (batch for batch in batches), verbose=0)
    assert str(caught.value) == (
        "logged values must have different names, got 'accuracy' twice. Choose another name; "
        "rename a metric with metrics={'accuracy_2': metric}."
    )
    assert_equal(model.module, net)


def test_values_outside_of_a_program_go_nowhere():
    ipufit.log("a", 1.0)
    with collecting() as entries:
        ipufit.log("a", 2.0)
        with collecting() as inner:
            ipufit.log("b", torch.ones(()))
    ipufit.log("c", 3.0)
    assert list(entries) == ["a"]
    assert list(inner) == ["b"]


def test_nothing_at_all_has_no_value():
    """An epoch in which a name was never logged says so."""
    for reduce in REDUCTIONS:
        assert math.isnan(Running(LogRule(reduce)).value)
    meter = EpochMetrics(MetricSet(), None, Loss("mse"))
    assert math.isnan(meter.loss)
    assert meter.by_update == {}


@pytest.mark.long
def test_copies_of_a_module_log_as_well():
    """A deep copy made in a callback must not report into the program."""

    class Copying(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            copy.deepcopy(self.model.module)(X)

    model, _ = compiled(Net().double(), frozen)
    plain, _ = compiled(Net().double(), frozen)
    first = fit(model, *EVEN, callbacks=Copying()).history
    assert first["input_sum"] == fit(plain, *EVEN).history["input_sum"]


class WithoutLoss(nn.Module):
    """Says that it has no loss, as a LightningModule whose validation_step returns none."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x, y):
        report("loss", 0.0, LogRule("last", exact=True, is_none=True))
        report("error", (self.head(x).sum(1) - y).abs().mean(), LogRule("mean"))
        return {"loss": torch.zeros(())}


def test_a_loss_that_is_none_is_not_among_the_values():
    """Its zero stands for nothing."""
    model = ipufit.Model(WithoutLoss(), engine="embedded")
    model.compile(None, None)
    batch = (torch.randn(4, 3), torch.randn(4))
    assert list(model.evaluate([batch], verbose=0)) == ["error"]
    assert list(model.test_on_batch(batch)) == ["error"]
