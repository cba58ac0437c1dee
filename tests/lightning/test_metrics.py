"""Metric objects of torchmetrics in steps: what Lightning's own Trainer has in callback_metrics."""

import dataclasses

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassRecall,
)

import ipufit
from ipufit.errors import CaptureError, ConfigurationError, IpufitError, MetricError
from ipufit.poptorch._precision import keep_float64
from tests.lightning.measured import Measured
from tests.lightning.twins import (
    Classifier,
    by_lightning,
    in_one_and_two_processes,
    ipufit_of,
    largest_difference,
    loader,
    pl,
    rows,
    twins,
)

X, Y = rows(22, 6)
BATCHES = loader(X, Y, batch_size=3)  # the last one has one sample
HELD = loader(X[:10], Y[:10], batch_size=4)
EXACT = 1e-10


@pytest.fixture(autouse=True)
def _wide():
    """Lightning keeps what is logged in torch's default dtype; the stand-in computes in float64."""
    torch.set_default_dtype(torch.float64)
    with keep_float64():
        yield
    torch.set_default_dtype(torch.float32)


def last(history):
    """The values of the last epoch."""
    return {name: values[-1] for name, values in history.history.items()}


def of_callbacks(trainer):
    """What a Trainer has to show."""
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


PLANS = [
    {},
    {"device_iterations": 3},
    {"gradient_accumulation": 2},
    {"ipus": 2, "device_iterations": 2},
    {"ipus": 2, "gradient_accumulation": 2},
]


@pytest.mark.grid
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_values_of_epochs_are_those_of_lightning(plan, engine):
    """Of training and validation, of states that are sums and lists, of single ones and many."""
    one, two = twins(Measured())
    # Batches of one size: what is left of an accumulation Lightning weighs otherwise.
    data = loader(X[:20], Y[:20], batch_size=5)
    accumulation = plan.get("ipus", 1) * plan.get("gradient_accumulation", 1)
    trainer, _ = by_lightning(
        one, "fit", data, HELD, max_epochs=2, accumulate_grad_batches=accumulation
    )
    model = ipufit_of(two, engine)
    history = model.fit(data, validation_data=HELD, epochs=2, verbose=0, **plan)
    found = last(history)
    expected = of_callbacks(trainer)
    assert set(expected) == set(found) - {"loss", "learning_rate"}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=EXACT), name
    assert largest_difference(one, two) < EXACT


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_so_they_are_with_a_smaller_last_batch_however_it_runs(run_eagerly):
    """And every epoch begins anew."""
    one, two = twins(Measured())
    trainer, _ = by_lightning(one, "fit", BATCHES, HELD, max_epochs=3)
    model = ipufit_of(two)
    model.compile(run_eagerly=run_eagerly)
    history = model.fit(BATCHES, validation_data=HELD, epochs=3, verbose=0)
    found = {name: value for name, value in last(history).items() if name != "loss"}
    assert found == pytest.approx(of_callbacks(trainer), rel=EXACT)


@pytest.mark.parametrize("call", ["validate", "test"])
def test_an_evaluation_has_them_too(call):
    """Under the names that validation_step and test_step give."""
    one, two = twins(Measured())
    _, (expected,) = by_lightning(one, call, BATCHES)
    model = ipufit_of(two)
    run = model.evaluate if call == "validate" else model.test
    for plan in ({}, {"device_iterations": 2}, {"ipus": 2}):
        assert run(BATCHES, verbose=0, **plan) == pytest.approx(expected, rel=EXACT)


class Logs(Classifier):
    """Calls and logs one metric in the way that is tested."""

    def __init__(self, called=True, **how):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.called, self.how = called, how

    def step(self, batch, name, **_):
        inputs, target = batch
        prediction = self(inputs)
        self.count(prediction, torch.eye(3)[target])
        return F.cross_entropy(prediction, target)

    def count(self, prediction, target):
        if self.called:
            self.error(prediction, target)
        else:
            self.error.update(prediction, target)
        self.log("error", self.error, **self.how)


class LogsTheValue(Logs):
    """Logs what the call returns: the mean of the values of batches."""

    def count(self, prediction, target):
        value = self.error(prediction, target)
        self.log_dict({"error": value.detach()}, **self.how)
        self.log("again", value, on_step=False, on_epoch=True, reduce_fx="max")


LEVELS = [
    (None, None),
    pytest.param(True, False, marks=pytest.mark.long),
    pytest.param(False, True, marks=pytest.mark.long),
    (True, True),
]


@pytest.mark.parametrize("kind", [Logs, LogsTheValue])
@pytest.mark.parametrize(("on_step", "on_epoch"), LEVELS)
def test_every_level_has_the_names_and_values_of_lightning(kind, on_step, on_epoch):
    """A metric that computes values of batches, and what its call returns."""
    one, two = twins(kind(on_step=on_step, on_epoch=on_epoch))
    trainer, _ = by_lightning(one, "fit", BATCHES, max_epochs=2)
    history = ipufit_of(two).fit(BATCHES, epochs=2, device_iterations=3, verbose=0)
    found = {name: value for name, value in last(history).items() if name != "loss"}
    assert found == pytest.approx(of_callbacks(trainer), rel=EXACT)
    step = {(None, None): "error", (True, False): "error", (True, True): "error_step"}
    if (on_step, on_epoch) in step:
        assert len(history.updates[step[on_step, on_epoch]]) == 16


def test_a_metric_that_is_only_updated_has_no_values_of_batches():
    """With on_epoch the names are Lightning's; without, there would be nothing at all."""
    one, two = twins(Logs(called=False, on_step=True, on_epoch=True))
    trainer, _ = by_lightning(one, "fit", BATCHES, max_epochs=1)
    history = ipufit_of(two).fit(BATCHES, verbose=0)
    assert set(of_callbacks(trainer)) == {"error", "error_epoch"} == set(history.history) - {"loss"}
    with pytest.raises(ConfigurationError) as caught:
        ipufit_of(Logs(called=False)).fit(BATCHES, verbose=0)
    assert str(caught.value) == (
        "self.log('error') would log nothing: with on_step, the default in training_step, it logs "
        "the value of the batch, but self.error.update computes none. Log it with on_step=False, "
        "on_epoch=True, or call self.error(...)."
    )


class AtEpochEnds(Classifier):
    """Metrics in every kind of place, computed and reset by hand."""

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.held = nn.ModuleDict({"all": torchmetrics.MetricCollection([MulticlassRecall(3)])})
        self.never_reset = torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        prediction = self(batch[0])
        self.accuracy.update(prediction, target=batch[1])
        self.never_reset(batch[1].double())
        return F.cross_entropy(prediction, batch[1])

    def validation_step(self, batch, batch_idx):
        self.held["all"].update(self(batch[0]), batch[1])

    def on_train_epoch_end(self):
        self.log("accuracy", self.accuracy.compute())
        self.accuracy.reset()
        self.log("sum", self.never_reset.compute())

    def on_validation_epoch_end(self):
        self.log_dict(self.held["all"].compute())
        self.log("object", self.held["all"]["MulticlassRecall"])


@pytest.mark.parametrize("plan", [{}, {"ipus": 2, "device_iterations": 2}])
def test_hooks_at_epoch_ends_compute_and_reset_them(plan):
    """What is never logged as an object goes on until the module resets it."""
    one, two = twins(AtEpochEnds())
    trainer, _ = by_lightning(one, "fit", BATCHES, HELD, max_epochs=3)
    history = ipufit_of(two).fit(BATCHES, validation_data=HELD, epochs=3, verbose=0, **plan)
    found = {name: value for name, value in last(history).items() if name != "loss"}
    if plan:
        assert history.history["sum"] == [float(Y.sum()) * n for n in (1, 2, 3)]
        return
    assert found == pytest.approx(of_callbacks(trainer), rel=EXACT)


def test_one_that_training_and_validation_share_counts_apart():
    """Lightning adds both up in one state; here each has its own samples."""

    class Shares(Classifier):
        def __init__(self):
            super().__init__()
            self.accuracy = MulticlassAccuracy(3)

        def step(self, batch, name, **_):
            prediction = self(batch[0])
            self.accuracy(prediction, batch[1])
            self.log(f"{name}_accuracy", self.accuracy, on_step=False, on_epoch=True)
            return F.cross_entropy(prediction, batch[1])

        def on_train_epoch_end(self):
            self.log("once more", self.accuracy.compute())

    model = ipufit_of(Shares())
    history = model.fit(BATCHES, validation_data=HELD, epochs=2, verbose=0).history
    right = MulticlassAccuracy(3)
    right.update(model.lightning(X[:10]), Y[:10])
    assert history["val_accuracy"][-1] == pytest.approx(right.compute().item(), rel=EXACT)
    assert history["once more"] == history["train_accuracy"] != history["val_accuracy"]


def test_one_that_can_not_count_apart_is_refused():
    """Before training: a wrapper keeps more than it declares."""

    class Shares(Classifier):
        def __init__(self):
            super().__init__()
            self.low = torchmetrics.MinMaxMetric(MulticlassAccuracy(3))

        def step(self, batch, name, **_):
            self.low.update(self(batch[0]), batch[1])
            return F.cross_entropy(self(batch[0]), batch[1])

    with pytest.raises(ConfigurationError) as caught:
        ipufit_of(Shares()).fit(BATCHES, validation_data=HELD, verbose=0)
    assert str(caught.value) == (
        "self.low (MinMaxMetric) is called in the train step and in the validation step, but can't "
        "count them separately. Create one metric for each."
    )


def test_metrics_are_no_part_of_the_program():
    """Neither their state nor what they hold is trained, recorded or summed up."""

    class Holds(Measured):
        def __init__(self):
            super().__init__()
            self.train_accuracy.register_buffer("own", torch.zeros(3))

    model = ipufit_of(Holds())
    model.fit(BATCHES, validation_data=HELD, epochs=2, verbose=0)
    session = model._session
    assert session.engine.captures == 4  # two sizes each
    model.fit(BATCHES, validation_data=HELD, epochs=1, ipus=2, verbose=0)
    assert session.engine.captures == 4
    names = {name for name, _ in model.module.named_modules()}
    assert names == {"", "net", "net.0", "net.1", "net.2"}
    assert all(name.startswith("net") for name, _ in model.module.named_parameters())
    assert list(model.module.named_buffers()) == []
    assert list(model.lightning.state_dict()) == list(model.module.state_dict())
    assert model.lightning.train_accuracy._update_count == 0
    assert not {"forward", "compute_on_step"} & set(vars(model.lightning.train_accuracy))


def test_what_looks_at_a_model_leaves_them_alone(capsys, tmp_path):
    """check, summary, predict, save and load."""
    model = ipufit_of(Measured())
    assert not model.check([X[:4], Y[:4]])
    model.summary([X[:4], Y[:4]])
    assert "Accuracy" not in capsys.readouterr().out
    assert model.check_invariance([X[:8], Y[:8]]).ok
    assert model.predict(BATCHES, verbose=0).shape == (22, 3)
    assert all(each._update_count == 0 for each in objects(model))
    model.save_weights(tmp_path / "weights.safetensors")
    other = ipufit_of(Measured())
    other.load_weights(tmp_path / "weights.safetensors")
    assert largest_difference(model.lightning, other.lightning) == 0


def objects(model):
    """All metrics of a model."""
    return [m for m in model.lightning.modules() if isinstance(m, torchmetrics.Metric)]


def test_callbacks_watch_them_and_get_the_outputs_of_the_step_alone():
    """EarlyStopping knows the name and the direction."""

    class Sees(ipufit.callbacks.Callback):
        wants_outputs = True

        def on_train_batch_end(self, index, logs=None):
            seen.extend(list(each) for each in self.model.outputs)

    seen = []
    model = ipufit_of(Measured())
    stop = ipufit.callbacks.EarlyStopping("val_MulticlassRecall", patience=0)
    model.fit(BATCHES, validation_data=HELD, epochs=2, callbacks=[stop, Sees()], verbose=0)
    assert len(seen) == 16
    assert not any(seen)
    wrong = ipufit.callbacks.EarlyStopping("val_Recall", mode="max")
    with pytest.raises(ConfigurationError, match=r"'val_Recall'.*val_MulticlassRecall"):
        model.fit(BATCHES, validation_data=HELD, callbacks=wrong, verbose=0)


def test_a_step_that_logs_other_names_is_believed():
    """Names are those of the present fit; a loader without a length changes nothing."""
    net = Logs(on_step=False, on_epoch=True)
    model = ipufit_of(net)
    before = model.fit(BATCHES, verbose=0).history["error"]
    plain = Classifier()
    net.load_state_dict(plain.state_dict())
    net.count = lambda prediction, target: net.log("other", net.error(prediction, target))
    history = model.fit(list(BATCHES), verbose=0).history
    assert set(history) == {"loss", "other"}
    del net.count
    net.load_state_dict(plain.state_dict())
    stream = torch.utils.data.DataLoader(Stream(list(zip(X, Y))), batch_size=3)
    assert model.fit(stream, verbose=0).history["error"] == before


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def test_single_batches_have_them():
    """train_on_batch and test_on_batch."""
    model = ipufit_of(Measured())
    expected = MulticlassAccuracy(3)(model.lightning(X), Y).item()
    values = model.train_on_batch([X, Y])
    assert values["train_accuracy_epoch"] == values["train_accuracy_step"]
    assert values["train_accuracy_epoch"] == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize(
    ("kind", "updates", "every"),
    [
        (Measured, 3, 2),
        (AtEpochEnds, 6, None),
        pytest.param(Measured, 6, 5, marks=pytest.mark.long),
        pytest.param(Measured, 6, None, marks=pytest.mark.long),
        pytest.param(AtEpochEnds, 3, 2, marks=pytest.mark.long),
        pytest.param(AtEpochEnds, 6, 5, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_in_the_middle_of_an_epoch(updates, every, kind, tmp_path):
    """With the bits of one that was not interrupted: weights, and all that metrics say."""

    class Interrupts(ipufit.callbacks.Callback):
        left = 0

        def on_train_batch_end(self, index, logs=None):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    def fitted(interrupted=0, **options):
        model = ipufit_of(kind())
        stops = Interrupts()
        stops.left = interrupted
        how = {"epochs": 3, "gradient_accumulation": 2, "seed": 0, "verbose": 0}
        history = model.fit(BATCHES, validation_data=HELD, callbacks=stops, **how, **options)
        return history.history, model.lightning

    keep = {"checkpoint": ipufit.Checkpoint(tmp_path, every_updates=every)}
    with pytest.raises(KeyboardInterrupt):
        fitted(updates, **keep)
    keep["checkpoint"] = dataclasses.replace(keep["checkpoint"], resume="auto")
    whole, resumed = fitted(), fitted(**keep)
    assert whole[0] == resumed[0]
    assert largest_difference(whole[1], resumed[1]) == 0


def with_step(body, **metrics):
    """A module whose training_step does this."""
    namespace = {"F": F, "torch": torch}
    code = "def training_step(self, batch, batch_idx):\n    p = self(batch[0])\n    y = batch[1]\n"
    code += "    loss = F.cross_entropy(p, y)\n"
    code += "".join(f"    {line}\n" for line in body.split("; ")) + "    return loss\n"
    exec(compile(code, "user_module.py", "exec"), namespace)
    kind = type("Net", (Classifier,), {"training_step": namespace["training_step"]})
    net = kind()
    net.acc = MulticlassAccuracy(3)
    for name, metric in metrics.items():
        setattr(net, name, metric)
    return net


USED = "the value of self.acc(...) was used, but the host updates metric objects after the"
REFUSED = {
    "loss = loss * self.acc(p, y)": USED,
    "loss = self.acc(p, y) * loss": USED,
    "loss = loss if self.acc(p, y) > 0.5 else 2 * loss": USED,
    "torch.stack([self.acc(p, y), loss])": USED,
    "self.log('a', 1 - self.acc(p, y))": USED,
    "self.acc(p, y).mean()": USED,
    "f'{self.acc(p, y):.3f}'": USED,
    "self.bag[0].update(p, y)": "self.bag[0] was called inside a step, but a metric in a list or",
    "self.acc.compute()": "self.acc.compute() was called inside a step, but the host updates",
    "self.acc.reset()": "self.acc.reset() was called inside a step, but the step is recorded once",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_needs_a_value_in_the_step_is_refused_at_its_line(body):
    """Before training, with the way out."""
    with pytest.raises(CaptureError) as caught:
        ipufit_of(with_step(body, bag=[MulticlassAccuracy(3)])).fit(BATCHES, verbose=0)
    assert str(caught.value).startswith(REFUSED[body])
    assert "user_module.py:5 in training_step. " in str(caught.value)


def test_a_list_of_metrics_that_the_module_holds_changes_nothing():
    """They are found by their attributes."""
    net = with_step("self.bag[0].update(p, y); self.log('a', self.acc, on_epoch=True)", bag=[])
    net.bag.append(net.acc)
    assert 0 < ipufit_of(net).fit(BATCHES, verbose=0).history["a"][0] < 1


@pytest.mark.parametrize(
    ("body", "metrics", "text"),
    [
        (
            "self.log('a', self.acc, on_epoch=True)",
            {},
            "training_step logs self.acc, but does not call it. Write self.acc.update(...) before.",
        ),
        (
            "self.acc(p, y); self.log('a', self.acc, metric_attribute='b')",
            {},
            "self.log('a') got the metric self.acc, but metric_attribute is 'b'. Leave it out.",
        ),
        (
            "self.acc(p, y); self.log('a', self.acc, reduce_fx='sum')",
            {},
            "self.log('a') can't honour reduce_fx='sum' for a metric object, which computes the "
            "value of the epoch itself. Leave it out.",
        ),
        (
            "self.log('a', self.bag[0])",
            {"bag": [MulticlassAccuracy(3)]},
            "self.log('a') must get a metric that is an attribute of the LightningModule, or in "
            "one of its ModuleList, ModuleDict or MetricCollection attributes, got "
            "MulticlassAccuracy. Make it one in __init__.",
        ),
        (
            "self.all(p, y); self.log('a', self.all)",
            {"all": torchmetrics.MetricCollection([MulticlassF1Score(3)])},
            "self.log('a') must get a metric that is an attribute of the LightningModule, or in "
            "one of its ModuleList, ModuleDict or MetricCollection attributes, got "
            "MetricCollection. Use self.log_dict.",
        ),
        (
            "self.acc(p, y); self.two(p, y); d = {'on_epoch': True}; self.log('a', self.acc, **d)"
            "; self.log('a', self.two, **d)",
            {"two": MulticlassAccuracy(3)},
            "self.log('a') was called with self.acc and self.two. Choose another name for one.",
        ),
        (
            "self.acc.update(p, batch_idx)",
            {},
            "self.acc must get tensors and numbers in training_step, got BatchIndex. Convert it to "
            "tensors in the dataset or in collate_fn.",
        ),
        (
            "self.log_dict([self.acc])",
            {},
            "self.log_dict takes a dict of names and values, or a MetricCollection, got list. Pass "
            "one of these.",
        ),
    ],
)
def test_what_can_not_be_logged_is_refused(body, metrics, text):
    """By name, before training."""
    model = ipufit_of(with_step(body, **metrics))
    before = [p.clone() for p in model.lightning.parameters()]
    with pytest.raises(ConfigurationError) as caught:
        model.fit(BATCHES, verbose=0)
    assert str(caught.value) == text
    assert all(map(torch.equal, before, model.lightning.parameters()))


@pytest.mark.parametrize(
    ("body", "metrics", "text"),
    [
        (
            "self.acc.update(p[:, :2], y)",
            {},
            "self.acc must take what the step calls it with, got shape (3, 2), dtype float64, "
            "shape (3,), dtype int64, and failed with ValueError: ",
        ),
        (
            "self.table(p, y); self.log('a', self.table, on_step=False, on_epoch=True)",
            {"table": MulticlassConfusionMatrix(3)},
            "metric 'a' must give a scalar, got shape (3, 3), dtype int64. Average it, for "
            "example with average='macro', or compute it in an on_..._epoch_end and log its parts.",
        ),
    ],
)
def test_metrics_are_tried_before_training(body, metrics, text):
    """On copies: a shape that does not fit is no matter for the end of the first epoch."""
    model = ipufit_of(with_step(body, **metrics))
    with pytest.raises(MetricError) as caught:
        model.fit(BATCHES, verbose=0)
    assert str(caught.value).startswith(text)
    assert all(each._update_count == 0 for each in objects(model))


def test_outputs_that_are_left_out_are_refused():
    """Metrics would miss micro-batches."""
    model = ipufit_of(Measured())
    model.compile(outputs="final")
    with pytest.raises(ConfigurationError, match="needs outputs='all', got 'final'"):
        model.fit(BATCHES, verbose=0)


class Mixed(Measured):
    """Training logs values of batches, of an object that validation logs too."""

    def __init__(self):
        super().__init__()
        self.both = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        value = self.both(self(batch[0]), batch[1])
        self.log("of_batches", value, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.both.update(self(batch[0]), batch[1])
        self.log("both", self.both)
        super().validation_step(batch, batch_idx)


@pytest.mark.grid
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
@pytest.mark.parametrize(("device_iterations", "accumulation"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("make", [Measured, Mixed])
def test_a_trainer_with_ipus_has_the_values_of_one_on_the_cpu(
    make, device_iterations, accumulation, engine
):
    """It computes them of the very objects, which executions update."""
    from ipufit.lightning import IPUStrategy

    one, two = twins(make())
    # Batches that are added up weigh alike in Lightning, also a smaller one.
    data = (BATCHES if accumulation == 1 else loader(X[:18], Y[:18], batch_size=3)), HELD
    how = {"max_epochs": 2, "accumulate_grad_batches": accumulation}
    expected, _ = by_lightning(one, "fit", *data, **how)
    strategy = IPUStrategy(device_iterations=device_iterations, engine=engine)
    how.update(accelerator="ipu", strategy=strategy)
    found, _ = by_lightning(two, "fit", *data, **how)
    found, expected = of_callbacks(found), of_callbacks(expected)
    assert {"train_accuracy_step", "train_mean", "val_MulticlassRecall"} <= set(found)
    if "of_batches" in found:
        # A metric's value is a float32, and so is what Lightning multiplies it with.
        assert found.pop("of_batches") == pytest.approx(expected.pop("of_batches"), rel=1e-6)
    assert found == pytest.approx(expected, rel=EXACT)
    expected, _ = by_lightning(one, "test", HELD)
    found, _ = by_lightning(two, "test", HELD, accelerator="ipu", strategy=type(strategy)())
    assert of_callbacks(found) == pytest.approx(of_callbacks(expected), rel=EXACT)


def test_what_a_step_of_a_trainer_logs_is_that_of_the_last_micro_batch():
    """An execution is its batch."""
    from ipufit.lightning import IPUStrategy

    seen = []

    class Sees(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(trainer.callback_metrics["train_accuracy_step"].item())

    one, two = twins(Measured())
    how = {"max_epochs": 1, "callbacks": Sees()}
    by_lightning(one, "fit", BATCHES, **how)
    each, seen[:] = list(seen), []
    how.update(accelerator="ipu", strategy=IPUStrategy(device_iterations=3))
    by_lightning(two, "fit", BATCHES, **how)
    assert len(each) == 8
    assert seen == pytest.approx([each[2], each[5], each[7]])


def test_predict_step_calls_none():
    """There is no epoch that it could count."""

    class Net(Classifier):
        def __init__(self):
            super().__init__()
            self.acc = MulticlassAccuracy(3)

        def predict_step(self, batch, batch_idx):
            self.acc(self(batch[0]), batch[1])
            return self(batch[0])

    with pytest.raises(CaptureError, match=r"^self\.acc was called in predict_step, at .*\. Call"):
        ipufit_of(Net()).predict(BATCHES, verbose=0)


def test_a_metric_that_can_not_say_what_it_has_seen_is_refused_with_a_checkpoint(tmp_path):
    """A wrapper keeps more than it declares; without a checkpoint it may be computed in a hook."""
    net = with_step("self.low.update(p, y)", low=torchmetrics.MinMaxMetric(MulticlassAccuracy(3)))
    ipufit_of(net).fit(BATCHES, verbose=0)
    assert 0 < net.low.compute()["raw"] < 1
    with pytest.raises(IpufitError, match=r"but self\.low \(MinMaxMetric\) can't return it"):
        ipufit_of(net).fit(BATCHES, checkpoint=tmp_path, verbose=0)


def test_a_value_among_the_outputs_is_a_text_that_says_so():
    """A dict of a step may hold it, as many do."""

    class Net(Classifier):
        def __init__(self):
            super().__init__()
            self.acc = MulticlassAccuracy(3)

        def training_step(self, batch, batch_idx):
            prediction = self(batch[0])
            value = self.acc(prediction, batch[1])
            self.log("acc", value)
            return {"loss": F.cross_entropy(prediction, batch[1]), "acc": value}

    class Sees(ipufit.callbacks.Callback):
        wants_outputs = True

        def on_train_batch_end(self, index, logs=None):
            (self.seen,) = self.model.outputs

    sees = Sees()
    ipufit_of(Net()).fit(BATCHES, callbacks=sees, verbose=0)
    assert sees.seen == {
        "acc": "<the value of self.acc(...), which the host computes after the execution>"
    }


@pytest.mark.long
def test_two_processes_have_the_values_of_two_replicas():
    """Of epochs, of batches, and what hooks compute, with states that are sums and lists."""
    one, two = in_one_and_two_processes("measured.py")
    assert set(one) == set(two)
    for name, values in one.items():
        assert two[name] == pytest.approx(values, rel=1e-12), name
