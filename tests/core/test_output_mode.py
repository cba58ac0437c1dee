"""Which outputs come back from a training execution, and what metrics make of them."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.core.train_config import Outputs, outputs_wanted
from ipufit.testing import RecordingEngine
from tests.fitting import WAYS, Plan, assert_equal, compiled, fit
from tests.nets import MLP, data
from tests.reference import cut
from tests.told import message

pytestmark = pytest.mark.grid

X, Y = data(23)
PLANS = [Plan(), Plan(4, 2), Plan(3, 2, 2, 2), Plan(2, 4, 1, 4), Plan(2, 4, 3, 1)]


def frozen(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def wanted_by_hand(kind, every, plan, micro_batches):
    """Indices of micro-batches in the epoch whose outputs come back, by execution."""
    per_update = plan.ga * plan.replicas
    per_execution = per_update * plan.di
    found = []
    for start in range(0, micro_batches, per_execution):
        execution = list(range(start, min(start + per_execution, micro_batches)))
        updates = [execution[i : i + per_update] for i in range(0, len(execution), per_update)]
        if kind == "final":
            last = updates[-1]
            steps = [last[i : i + plan.replicas] for i in range(0, len(last), plan.replicas)]
            found.append(steps[-1])
        elif kind == "every_n":
            kept = [update for i, update in enumerate(updates, 1) if i % every == 0]
            found.append([place for update in kept for place in update])
        else:
            found.append(execution)
    return found


class Keep(ipufit.callbacks.Callback):
    """Outputs of every execution."""

    wants_outputs = True

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(list(self.model.outputs))


MODES = [("all", None), ("final", None), ("every_n", 1), ("every_n", 2)]


# An interval that is no part of an execution is refused.
FITTING = [
    (kind, every, plan, way)
    for (kind, every), plan, way in itertools.product(MODES, PLANS, WAYS)
    if every is None or plan.di % every == 0
]


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(("kind", "every", "plan", "way"), FITTING, ids=str)
def test_metrics_and_callbacks_see_the_outputs_that_come_back(kind, every, plan, way):
    """The loss is exact under each; weights do not depend on who looks."""
    net = MLP().double()
    model, _ = compiled(
        net, frozen, way=way, metrics=["accuracy"], outputs=ipufit.Outputs(kind, every)
    )
    keep = Keep()
    history = fit(model, X, Y, plan, epochs=1, callbacks=keep).history
    rows = cut(23, plan.mb)
    wanted = wanted_by_hand(kind, every, plan, len(rows))
    assert len(keep.seen) == len(wanted)
    right = count = 0
    for outputs, places in zip(keep.seen, wanted):
        assert len(outputs) == len(places)
        for output, place in zip(outputs, places):
            part = slice(rows[place].start, rows[place].stop)
            torch.testing.assert_close(output, net(X[part]), rtol=0, atol=1e-14)
            right += int((output.argmax(1) == Y[part]).sum())
            count += len(output)
    assert history["accuracy"] == [pytest.approx(right / count)]
    expected = nn.functional.cross_entropy(net(X), Y).item()
    assert history["loss"] == [pytest.approx(expected, abs=1e-13)]


@pytest.mark.few
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_sum_is_that_of_each_replica(plan, way):
    """A smaller last micro-batch adds to the rows that it has."""
    net = MLP().double()
    model, _ = compiled(net, frozen, way=way, outputs="sum")
    keep = Keep()
    history = fit(model, X, Y, plan, epochs=1, callbacks=keep).history
    rows = cut(23, plan.mb)
    per_execution = plan.ga * plan.replicas * plan.di
    for number, outputs in enumerate(keep.seen):
        execution = rows[number * per_execution : (number + 1) * per_execution]
        assert len(outputs) == min(plan.replicas, len(execution))
        for replica, output in enumerate(outputs):
            own = execution[replica :: plan.replicas]
            expected = torch.zeros(len(own[0]), 5, dtype=torch.float64)
            for part in own:
                expected[: len(part)] += net(X[part.start : part.stop])
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-13)
    expected = nn.functional.cross_entropy(net(X), Y).item()
    assert history["loss"] == [pytest.approx(expected, abs=1e-13)]


@pytest.mark.long
def test_sums_of_integers_do_not_overflow():
    """As torch.sum, which counts in int64."""

    class Counts(MLP):
        def forward(self, x):
            logits = super().forward(x)
            kinds = [torch.int8, torch.int32, torch.bool]
            return logits, [torch.full((len(x),), 100).to(kind) for kind in kinds]

    def loss(prediction, target):
        return nn.functional.cross_entropy(prediction[0], target)

    for way in WAYS:
        model, _ = compiled(Counts().double(), frozen, loss, way, outputs="sum")
        keep = Keep()
        fit(model, X, Y, Plan(1, 23), epochs=1, callbacks=keep)
        _, counts = keep.seen[0][0]
        assert [count.tolist() for count in counts] == [[2300], [2300], [23]]
        assert {count.dtype for count in counts} == {torch.int64}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["all", "final", "sum"])
def test_outputs_that_nobody_looks_at_do_not_come_back(kind):
    """Of large outputs the copy costs more than the training."""
    engine = RecordingEngine()
    model = ipufit.Model(MLP(), engine=lambda: engine)
    model.compile("sgd", "cross_entropy", outputs=kind)
    fit(model, X.float(), Y)
    assert [program.spec.want_outputs for program in engine.programs] == [False]
    assert model.outputs == []
    fit(model, X.float(), Y, callbacks=[ipufit.callbacks.Callback(), Keep()])
    assert engine.programs[-1].spec.want_outputs


@pytest.mark.long("ipu-standin")
def test_who_looks_changes_no_bit_of_training():
    net = MLP().double()
    plain, _ = compiled(net, sgd)
    fit(plain, X[:16], Y[:16], Plan(4, 2))
    for kind, every in [*MODES, ("sum", None)]:
        model, _ = compiled(net, sgd, outputs=ipufit.Outputs(kind, every))
        fit(model, X[:16], Y[:16], Plan(4, 2), callbacks=Keep())
        assert_equal(model.module, plain.module)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["final", "sum", "every_n"])
def test_evaluate_validation_and_predict_always_see_all(kind):
    net = MLP().double()
    every = 2 if kind == "every_n" else None
    metrics = None if kind == "sum" else ["accuracy"]
    model, _ = compiled(net, frozen, metrics=metrics, outputs=ipufit.Outputs(kind, every))
    x, y = X[:16], Y[:16]
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    history = fit(model, x, y, Plan(4, 2), epochs=1, validation_data=loader).history
    expected = (net(x).argmax(1) == y).double().mean().item()
    if metrics:
        assert history["val_accuracy"] == [pytest.approx(expected)]
        assert model.evaluate(loader, verbose=0)["accuracy"] == pytest.approx(expected)
    assert model.predict(loader, verbose=0).shape == (16, 5)


@pytest.mark.long("ipu-standin")
def test_an_epoch_without_outputs_has_metrics_of_nothing():
    """The one execution is a tail that ends before the second update."""
    model, _ = compiled(
        MLP().double(), frozen, metrics=["accuracy"], outputs=ipufit.Outputs("every_n", 2)
    )
    history = fit(model, X[:4], Y[:4], Plan(4, 2), epochs=1).history
    assert math.isnan(history["accuracy"][0])
    assert not math.isnan(history["loss"][0])


@pytest.mark.parametrize("count", range(1, 25))
def test_the_wanted_micro_batches_are_those_of_the_definition(count):
    for plan in PLANS:
        per_update = plan.ga * plan.replicas
        for kind, every in MODES:
            wide = dataclasses.replace(plan, di=24)
            expected = wanted_by_hand(kind, every, wide, count)[0]
            mode = Outputs(kind, every)
            assert outputs_wanted(mode, count, per_update, plan.replicas) == expected


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            lambda: {"outputs": "last"},
            "outputs must be one of 'all', 'final', 'sum', 'every_n', got 'last'.",
        ),
        (
            lambda: {"outputs": "every_n"},
            "outputs='every_n' needs the number of device iterations from one returned output "
            "to the next, got None. Pass for example outputs=ipufit.Outputs('every_n', 4).",
        ),
        (
            lambda: {"outputs": ipufit.Outputs(every=2)},
            "Outputs.every is for mode 'every_n', got it with 'all'. Leave it out, or choose "
            "'every_n'.",
        ),
        (
            lambda: {"outputs": ipufit.Outputs("every_n", 0)},
            "Outputs.every must be an integer of at least 1 or None, got 0.",
        ),
        (
            lambda: {"outputs": "sum", "metrics": ["accuracy"]},
            "metrics compare outputs with targets, but outputs='sum' returns only sums of "
            "outputs. Leave the metrics out, or log the value to sum: ipufit.log('correct', "
            "(prediction.argmax(1) == target).sum(), reduce='sum').",
        ),
    ],
    ids=["unknown", "no number", "number alone", "zero", "metrics"],
)
def test_modes_that_cannot_work_are_refused(options, text):
    assert message(lambda: compiled(MLP(), sgd, **options())) == text


def test_an_interval_that_does_not_fit_is_refused_before_any_work():
    net = MLP().double()
    model, engine = compiled(net, sgd, outputs=ipufit.Outputs("every_n", 4))
    assert message(fit, model, X, Y, Plan(4, 6)) == (
        "Outputs.every must divide device_iterations (6), got 4. Choose one of 1, 2, 3, 6."
    )
    assert engine.seconds == 0
    assert_equal(model.module, net)


# ---- the recording engine -----------------------------------------------------------------------


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(("kind", "every"), [*MODES, ("sum", None)])
def test_the_recording_engine_gives_back_what_the_mode_chooses(kind, every):
    """A test written with it must not pass for an option that it does not know."""
    engine, plan = RecordingEngine(), Plan(3, 2, 2, 2)
    model = ipufit.Model(MLP(), engine=lambda: engine)
    model.compile("sgd", "cross_entropy", outputs=ipufit.Outputs(kind, every))
    keep = Keep()
    fit(model, X.float(), Y, plan, epochs=1, callbacks=keep)
    rows = cut(23, 3)
    for outputs, places in zip(keep.seen, wanted_by_hand(kind, every, plan, len(rows))):
        if kind != "sum":
            parts = [X[rows[p].start : rows[p].stop].float() for p in places]
            assert all(torch.equal(*pair) for pair in zip(outputs, parts))
            assert len(outputs) == len(parts)
            continue
        for replica, output in enumerate(outputs):
            total = torch.zeros(3, 1, 3, 4)
            for place in places[replica :: plan.replicas]:
                total[: len(rows[place])] += X[rows[place].start : rows[place].stop].float()
            torch.testing.assert_close(output, total)


def test_the_recording_engine_remembers_every_call():
    engine = RecordingEngine()
    model = ipufit.Model(MLP(), engine=lambda: engine)
    scale = ipufit.LossScale(8.0)
    model.compile(
        "sgd",
        "cross_entropy",
        ema=ipufit.EMA(),
        precision=ipufit.Precision(loss_scale=scale),
        clip=ipufit.Clip(norm=1.0),
    )

    class Swap(ipufit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.swap_ema_weights()
            program = self.model._session._training
            program.write_state(program.read_state())

    history = fit(model, X[:8].float(), Y[:8], Plan(4, 2), epochs=1, callbacks=Swap())
    (program,) = engine.programs
    assert program.calls == [
        "prepare",
        "prepare",
        "run",
        "publish",
        "swap_averages",
        "read_state",
        "write_state",
        "adopt_averages",
        "close",
    ]
    assert [state.updates for state in program.written] == [2]
    assert [example.size for example in program.examples] == [4, 4]
    assert program.closed == 1
    assert program.spec.config.clip.norm == 1.0
    assert history.history["loss_scale"] == [8.0]
    assert history.history["skipped_updates"] == [0.0]
