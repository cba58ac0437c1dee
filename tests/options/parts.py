"""Options of everything that is neither Model nor a callback of Keras."""

import dataclasses
import json

import torch
from torch import nn

import ipufit
from ipufit import (
    BatchSize,
    History,
    LearningRates,
    LossScale,
    PartitionPlan,
    Plan,
    PreflightReport,
    Sharded,
    distributed,
    errors,
    poptorch,
    testing,
)
from ipufit.core.batch import Mode
from ipufit.data import LengthBuckets
from ipufit.engines.ipu.preflight import FACTS, PreflightFinding
from ipufit.engines.program import ProgramSpec
from ipufit.errors import NonFiniteValue
from ipufit.metrics.resolve import resolve_metrics
from ipufit.optim import MultiOptimizer, Muon, schedules, state
from ipufit.optim.optimizers import LAMB
from ipufit.planner.costs import StageCost
from ipufit.planner.partition_plan import Planned
from ipufit.search.fit_many import FitResult, FitResults

from . import FLIPS, Made, With, X, Y, files, folder, linear, of, told

__all__ = ["FLIPS"]


# History

LOGS = [
    {"loss": 3.0, "val_loss": 3.0, "error": 1.0},
    {"loss": 2.0, "error": 2.0},
    {"loss": 1.0, "val_loss": 4.0, "error": 1.0},
]


def history():
    found = History()
    for epoch, logs in enumerate(LOGS):
        found.append(epoch, logs)
    return found


def kept(method, **given):
    def observe(**options):
        found = history()
        result = getattr(found, method)(**{**given, **options})
        return result, told(found)

    return observe


def stored(method):
    def observe(path):
        with folder() as place:
            text = getattr(history(), method)(None if path is None else place / path)
            return files(place), text

    return observe


def drawn(path=None, **options):
    with folder() as place:
        figure = history().plot(None if path is None else place / path, **options)
        shape = [
            (panel.get_title(), panel.get_ylabel(), len(panel.lines), len(panel.collections))
            for panel in figure.axes
        ]
        places = [panel.get_subplotspec().get_geometry() for panel in figure.axes]
        return shape, places, sorted(files(place))


of("History", lambda params: told(History(params)), params=(None, {"note": 1}))
of(
    "History.append",
    kept("append", epoch=7, logs={"loss": 1.0}),
    epoch=(7, 8),
    logs=({"loss": 1.0}, {"loss": 2.0}),
)
of(
    "History.append_update",
    kept("append_update", name="scale", update=1, value=2.0),
    name=("scale", "other"),
    update=(1, 2),
    value=(2.0, 3.0),
)
of("History.places", kept("places"), name=("loss", "val_loss"))
of("History.aligned", kept("aligned"), name=("loss", "val_loss"))
of(
    "History.best_epoch",
    kept("best_epoch"),
    monitor=("val_loss", "loss"),
    mode=("auto", "max"),
)
of("History.to_csv", stored("to_csv"), path=("one.csv", "other.csv"))
of("History.to_json", stored("to_json"), path=(None, "one.json"))
of(
    "History.from_json",
    lambda source: told(History.from_json(source)),
    source=(Made(lambda: history().to_json()), Made(lambda: History().to_json())),
)
of(
    "History.plot",
    drawn,
    path=(None, "curves.png"),
    metrics=(None, "nothing"),
    columns=(None, 1),
    mark_best=(True, False),
)


# What searches found


def fields(kind, **values):
    """Flips of a dataclass that only holds its values."""
    base = {name: pair[0] for name, pair in values.items()}
    of(kind.__name__, lambda **one: dataclasses.asdict(kind(**{**base, **one})), **values)


fields(
    BatchSize,
    batch_size=(1, 2),
    gradient_accumulation=(1, 2),
    tried=(((1, 2.0),), ((1, None),)),
)
fields(
    LearningRates,
    learning_rates=((1.0, 2.0), (1.0, 3.0)),
    losses=((1.0, 2.0), (1.0, 3.0)),
    smoothed=((1.0, 2.0), (1.0, 3.0)),
    diverged=(False, True),
)


def rates_drawn(path):
    with folder() as place:
        found = LearningRates((0.1, 0.2, 0.3), (3.0, 2.0, 1.0), (3.0, 2.0, 1.0), False)
        found.plot(None if path is None else place / path)
        return sorted(files(place))


of("LearningRates.plot", rates_drawn, path=(None, "curve.png"))


def classifier(lr):
    model = ipufit.Model(linear())
    model.compile(torch.optim.SGD(model.module.parameters(), lr), "cross_entropy")
    return model


def averaged(lr):
    model = ipufit.Model(linear())
    model.compile(torch.optim.SGD(model.module.parameters(), lr), "nll")
    return model


def results(grid=({"lr": 0.1}, {"lr": 0.2}), **options):
    given = {"build": classifier, "x": X, "y": Y, "seed": 0, "verbose": 0, **options}
    return ipufit.fit_many(grid=[*grid], **given)


of(
    "fit_many",
    lambda **options: [(str(each), told(each.model.history)) for each in results(**options)],
    build=(classifier, averaged),
    grid=(({"lr": 0.1}, {"lr": 0.2}), ({"lr": 0.1}, {"lr": 0.3})),
    x=(X, X + 1),
    y=(Y, (Y + 1) % 3),
    verbose=(0, 2),
    device_iterations=(None, 1),
    seed=(0, 1),
)


class Fitted:
    """What a result of fit_many needs of a model."""

    def __init__(self, **losses):
        self.history = History({"directions": {"loss": "min"}})
        self.history.append(0, losses)


of(
    "FitResult",
    lambda **one: (lambda result: (result.setting, result.values, result.seed, str(result)))(
        FitResult(**{"setting": {"lr": 0.1}, "model": Fitted(loss=1.0), "seed": 0, **one})
    ),
    setting=({"lr": 0.1}, {"lr": 0.2}),
    model=(Made(lambda: Fitted(loss=1.0)), Made(lambda: Fitted(loss=2.0))),
    seed=(0, 1),
    error=(None, errors.NonFiniteLossError("the loss became nan", None, float("nan"))),
)
of(
    "FitResults.best",
    lambda **options: (
        FitResults(
            FitResult({}, Fitted(val_loss=a, loss=b), seed)
            for seed, (a, b) in enumerate([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)])
        )
        .best(**options)
        .seed
    ),
    monitor=("val_loss", "loss"),
    mode=("auto", "max"),
)


# Plan

SIZES = {"micro_batch_size": 2, "gradient_accumulation": 1, "replicas": 2, "device_iterations": 1}
SIZES.update(stages=1, reserved_ipus=2)
of(
    "Plan",
    lambda **options: Plan(**{**SIZES, **options}).explain(),
    micro_batch_size=(2, 3),
    gradient_accumulation=(1, 2),
    replicas=(2, 1),
    device_iterations=(1, 2),
    stages=(1, 2),
    reserved_ipus=(2, 4),
    samples=(None, 12),
    dropped=(0, 1),
    training=(True, False),
    fixed_updates=(None, 3),
    pipelined=(False, True),
    processes=(1, 2),
    process=With(0, 1, processes=2),
    depth=With(0, 3, stages=2),
    batches=(None, 5),
)
of("Plan.explain", Plan(**SIZES).explain, columns=(100, 40))
of(
    "Plan.make",
    lambda **options: Plan.make(**{"micro_batch_size": 2, **options}).explain(),
    micro_batch_size=(2, 3),
    ipus=(None, 2),
    device_iterations=(1, 2),
    gradient_accumulation=(1, 2),
    stages=With(1, 2, ipus=4),
    samples=(None, 12),
    dropped=(0, 1),
    training=(True, False),
    auto_round_ipus=With(False, True, ipus=3),
    fixed_updates=(None, 3),
    pipelined=With(False, True, stages=2),
    processes=(1, 2),
    process=With(0, 1, processes=2),
    depth=With(0, 3, stages=2),
)
TWO = {**SIZES, "processes": 2}
of("Plan.owner", lambda number: Plan(**TWO).owner(number), number=(1, 2))
of("Plan.own_before", lambda number: Plan(**TWO).own_before(number), number=(1, 2))
of("Plan.place", lambda index: Plan(**SIZES).place(index), index=(1, 2))
WIDE = {**SIZES, "device_iterations": 2, "gradient_accumulation": 2}
of(
    "Plan.index",
    lambda **one: Plan(**WIDE).index(
        **{"iteration": 0, "accumulation": 0, "replica": 0, "position": 0, **one}
    ),
    iteration=(0, 1),
    accumulation=(0, 1),
    replica=(0, 1),
    position=(0, 1),
)
of("Plan.updates", lambda samples: list(Plan(**SIZES).updates(samples)), samples=(7, 8))


# The plan of a partition


def costs(values):
    numbers = dict.fromkeys([f.name for f in dataclasses.fields(StageCost)], 40)
    return [StageCost(**{**numbers, "name": name, "parameters": values}) for name in "ab"]


USE = Planned("Net", (("a", 0), ("b", 1)), 4, 3, 1, "pipelined", "grouped", False, 900)


def asked(method):
    def observe(**options):
        return getattr(PartitionPlan(costs(7), USE), method)(**options)

    return observe


def bars(path=None):
    with folder() as place:
        figure = PartitionPlan(costs(7), USE).plot(None if path is None else place / path)
        return [len(panel.patches) for panel in figure.axes], sorted(files(place))


of(
    "PartitionPlan",
    lambda **given: str(PartitionPlan(**{"costs": costs(7), "planned": USE, **given})),
    costs=(costs(7), costs(8)),
    planned=(USE, dataclasses.replace(USE, recompute=True)),
)
for method in ("utilisation", "timeline"):
    of(
        f"PartitionPlan.{method}",
        asked(method),
        gradient_accumulation=(None, 4),
        schedule=(None, "sequential"),
    )
of(
    "PartitionPlan.least_accumulation",
    asked("least_accumulation"),
    utilisation=(0.8, 0.9),
    schedule=With(None, "sequential", utilisation=0.4),
)
of("PartitionPlan.ipu_of", asked("ipu_of"), stage=(0, 1))
of("PartitionPlan.plot", bars, path=(None, "plan.png"))


# What an IPU can't do

LIMIT = next(fact for fact in FACTS if fact.cure)
SAID = {"title": "Net", "findings": (), "operators": 3}
of(
    "PreflightReport",
    lambda **given: json.dumps(PreflightReport(**{**SAID, **given}).as_dict()),
    title=("Net", "Other"),
    findings=((), (PreflightFinding(LIMIT, "it"),)),
    operators=(3, 4),
    stopped=(None, "a branch"),
    warnings=((), ("little is learned",)),
)


# Logged values, seeds, loss scale


def trained(net=None, **options):
    model = ipufit.Model(net or linear())
    model.compile("sgd", "cross_entropy", **options)
    found = model.fit(X, Y, batch_size=4, epochs=2, seed=1, verbose=0)
    return found.history, found.updates


def logged(**options):
    class Logs(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = linear()

        def forward(self, x):
            ipufit.log(**{"name": "size", "value": x[0].sum(), **options})
            return self.head(x)

    return trained(Logs())


of(
    "log",
    logged,
    name=("size", "other"),
    value=(1.0, 2.0),
    reduce=("mean", "sum"),
    on_update=(False, True),
)
of(
    "seed_everything",
    lambda seed: (ipufit.seed_everything(seed), torch.rand(2)),
    seed=(1, 2),
)
of(
    "LossScale",
    lambda **options: trained(precision=ipufit.Precision(loss_scale=LossScale(**options))),
    initial=(8.0, 16.0),
    growth_interval=With(None, 1, initial=8.0),
)


# optim


def optimized(closure=None, group=None, params=None, **options):
    net = linear()
    chosen = net.parameters() if params is None else getattr(net, params).data.requires_grad_()
    chosen = [chosen] if isinstance(chosen, torch.Tensor) else list(chosen)
    optimizer = LAMB(chosen, **{"lr": 0.1, **options})
    if group is not None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], **group})
    result = None
    for _ in range(2):
        for parameter in chosen:
            parameter.grad = parameter.detach().cos()
        result = optimizer.step(closure)
    return [p.detach() for p in chosen], len(optimizer.param_groups), result


of(
    "optim.LAMB",
    optimized,
    params=("weight", "bias"),
    lr=(0.1, 0.2),
    betas=((0.9, 0.999), (0.5, 0.9)),
    eps=(1e-6, 1e-1),
    weight_decay=(0.0, 0.1),
    bias_correction=With(True, False, eps=0.1),
    max_weight_norm=(None, 0.1),
)
of(
    "optim.LAMB.add_param_group",
    lambda param_group: optimized(group=param_group),
    param_group=({}, {"lr": -1.0}),
)
of("optim.LAMB.step", optimized, closure=(None, lambda: 3.0))


def orthogonal(closure=None, **options):
    torch.manual_seed(0)
    chosen = [nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 2))]
    params = options.pop("params", slice(None))
    optimizer = Muon(chosen[params], **{"lr": 0.1, **options})
    for _ in range(2):
        for parameter in chosen:
            parameter.grad = parameter.detach().cos()
        result = optimizer.step(closure)
    return [p.detach() for p in chosen], result


of(
    "optim.Muon",
    orthogonal,
    params=(slice(0, 1), slice(1, 2)),
    lr=(0.1, 0.2),
    weight_decay=(0.0, 0.5),
    momentum=(0.95, 0.5),
    nesterov=(True, False),
    ns_coefficients=((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)),
    eps=(1e-7, 10.0),
    ns_steps=(5, 1),
    adjust_lr_fn=("original", "match_rms_adamw"),
)
of("optim.Muon.step", orthogonal, closure=(None, lambda: 3.0))


def together(closure=None, optimizers=(0.1, 0.2), param_group=None):
    chosen = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    members = {str(lr): torch.optim.SGD([p], lr=lr) for p, lr in zip(chosen, optimizers)}
    optimizer = MultiOptimizer(members)
    if param_group is not None:
        optimizer.add_param_group(param_group)
    for parameter in chosen:
        parameter.grad = torch.ones(2)
    return optimizer.step(closure), [p.detach() for p in chosen]


of("optim.MultiOptimizer", together, optimizers=((0.1, 0.2), (0.1, 0.3)))
of("optim.MultiOptimizer.step", together, closure=(None, lambda: 3.0))
of(
    "optim.MultiOptimizer.add_param_group",
    together,
    param_group=({"params": []}, {"params": [nn.Parameter(torch.ones(2))]}),
)


# Steps of one's own


def squared(net, batch):
    hidden = net[0](batch[0])
    return {"one": hidden.square().mean(), "two": net[1](hidden).square().mean()}


def absolute(net, batch):
    return {**squared(net, batch), "one": net[0](batch[0]).abs().mean()}


def stepped(function=squared, **options):
    """History of a few updates, in each of which a second step moves everything."""
    net = nn.Sequential(linear(), nn.Linear(3, 1))
    model = ipufit.Model(net)
    step = ipufit.TrainStep(function, **{"moves": {"one": "0"}, **options})
    rest = ipufit.TrainStep(lambda net, batch: {"rest": net(batch[0]).mean()}, {"rest": None})
    model.compile("sgd", loss=[step, rest], run_eagerly=True)
    return model.fit(X, batch_size=4, verbose=0, seed=0).history, net.state_dict()


BOTH = {"one": "0", "two": "1"}
of(
    "TrainStep",
    stepped,
    function=(squared, absolute),
    moves=({"one": "0"}, {"one": "0.bias"}),
    every=(1, 2),
    repeat=(1, 2),
    at_once=With(False, True, moves=BOTH),
)


# schedules


def sgd(rate=0.1):
    return torch.optim.SGD(linear().parameters(), rate)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def halving(update):
    return 0.1 * 0.5**update


def scheduled(lr_scheduler=halving, optimizer=None, interval="update", after=None):
    """Rates of three updates, an epoch's end in between."""
    found = schedules.resolve_schedule(lr_scheduler, optimizer or sgd(), interval)
    if found is None:
        return None
    rates = []
    for logs in (
        {"loss": 1.0, "score": 3.0},
        {"loss": 1.0, "score": 2.0},
        {"loss": 1.0, "score": 1.0},
    ):
        rates.append(found.rows(1)[0][0]["lr"])
        found.end_epoch(logs)
    return rates


of(
    "optim.schedules.resolve_schedule",
    scheduled,
    lr_scheduler=(None, halving),
    optimizer=With(
        Made(sgd),
        Made(lambda: sgd(0.2)),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
    ),
    interval=With("update", "other", lr_scheduler=halving),
)
of(
    "optim.schedules.AtEpochEnd",
    lambda scheduler=plateau, monitor=None, frequency=1: scheduled(
        schedules.AtEpochEnd(scheduler, monitor, frequency)
    ),
    scheduler=(plateau, halving),
    monitor=With(None, "score", scheduler=plateau),
    frequency=With(1, 2, scheduler=halving),
)


def curved(curve, updates=8, epochs=8, interval="update", is_trial=False):
    """Settings of the first updates of a run, an epoch each."""
    optimizer = torch.optim.SGD(linear().parameters(), 0.1, momentum=0.9)
    found = schedules.resolve_schedule(curve, optimizer, interval)
    found.begin_run(updates, epochs, is_trial)
    rates = []
    for _ in range(min(updates, epochs)):
        rates += [(row[0]["lr"], row[0]["momentum"]) for row in found.rows(1)]
        found.end_epoch({})
    return rates


CURVES = {
    "Constant": {},
    "Linear": {"final": (0.0, 0.1)},
    "Cosine": {"final": (0.0, 0.1)},
    "Polynomial": {"power": (1.0, 2.0), "final": (0.0, 0.1)},
    "WSD": {
        "decay": (4, 0.25),
        "shape": With("cosine", "1-sqrt", decay=4),
        "final": With(0.0, 0.1, decay=4),
    },
    "OneCycle": {
        "shape": ("cosine", "linear"),
        "div_factor": (25.0, 10.0),
        "final_div_factor": (1e4, 10.0),
        "momentum": ((0.85, 0.95), None),
    },
}


def of_curve(name, options):
    """Its arguments, and the value of one update without an optimizer."""
    kind = getattr(schedules, name)
    first = 0.3 if name == "OneCycle" else 0
    of(
        f"optim.schedules.{name}",
        lambda **given: curved(kind(**given)),
        warmup=(first, 0.5),
        total=(None, 9),
        **options,
    )
    of(
        f"optim.schedules.{name}.multiplier",
        lambda update=3, length=8: kind(warmup=0.75).multiplier(update, length),
        update=(3, 5),
        length=(8, 12),
    )


for curve, options in CURVES.items():
    of_curve(curve, options)
of(
    "optim.schedules.OneCycle.momentum_at",
    lambda update=3, length=8: schedules.OneCycle().momentum_at(update, length),
    update=(3, 5),
    length=(8, 12),
)
of(
    "optim.schedules.Schedule.begin_run",
    lambda **run: curved("linear", **run),
    updates=(8, 6),
    epochs=With(8, 6, interval="epoch"),
    is_trial=(False, True),
)


class Doubling(schedules.Schedule):
    """A schedule of a user's own."""

    name = "doubling"

    def _advance(self):
        self._optimizer.param_groups[0]["lr"] *= 2

    def _keep(self):
        return lambda: None

    def _own_state(self):
        return None

    def _load_own(self, state):
        pass


def doubled(optimizer=None, per_update=True):
    found = Doubling(optimizer or sgd(), per_update)
    return [row[0]["lr"] for row in found.rows(3)]


of(
    "optim.schedules.Schedule",
    doubled,
    optimizer=(Made(sgd), Made(lambda: sgd(0.2))),
    per_update=(True, False),
)


def half():
    return schedules.resolve_schedule(halving, sgd())


def watching():
    return schedules.resolve_schedule(plateau, sgd())


def ended(logs):
    found = watching()
    for _ in range(3):
        found.end_epoch(logs)
    return found.state_dict()


def restored(snapshot):
    found = half()
    places = {"first": found.snapshot()}
    found.rows(2)
    places["later"] = found.snapshot()
    found.rows(2)
    found.restore(places[snapshot])
    return found.state_dict()


def continued(state):
    found, other = half(), half()
    found.rows(state)
    other.load_state_dict(found.state_dict())
    return other.state_dict()


def made(updates=4, accumulation_steps=()):
    found = half()
    found.frequency = 2
    return [row[0]["lr"] for row in found.rows(updates, accumulation_steps)]


def checked(updates=2, epoch=()):
    fails = schedules.resolve_schedule(lambda update: 0.1 if update < 3 else float("nan"), sgd())
    # Every epoch counts its batches from 0: those of one batch never come to the second.
    fails.frequency = 2
    return fails.check(updates, epoch)


def advanced(updates=4, epochs=1, in_run=(3, 1)):
    """A function of updates, and a curve, which counts by run."""
    found = half(), schedules.resolve_schedule(schedules.Cosine(total=9), sgd())
    for each in found:
        each.begin_run(9, None)
        each.advance_to(updates, epochs, in_run)
    return [(each.state_dict(), [row[0]["lr"] for row in each.rows(2)]) for each in found]


of(
    "optim.schedules.Schedule.advance_to",
    advanced,
    updates=(4, 2),
    epochs=(1, 2),
    in_run=((3, 1), (2, 1)),
)
of("optim.schedules.Schedule.rows", made, updates=(4, 2), accumulation_steps=((), (2, 2, 2, 2)))
of("optim.schedules.Schedule.check", checked, updates=(2, 9), epoch=With((), (1,), updates=9))
of("optim.schedules.Schedule.end_epoch", ended, logs=({"loss": 1.0}, {"other": 1.0}))
of("optim.schedules.Schedule.restore", restored, snapshot=("first", "later"))
of("optim.schedules.Schedule.load_state_dict", continued, state=(1, 2))


# data


def grouped(size=4, count=11, **options):
    """Batches of an epoch, padded, each sample of a length of its own."""
    data = [{"x": torch.full((1 + i,), 1.0 + i)} for i in range(options.pop("dataset", count))]
    buckets = LengthBuckets(data, options.pop("batch_size", size), **options)
    torch.manual_seed(0)
    return [buckets.pad([data[i] for i in indices]) for indices in buckets]


of(
    "data.LengthBuckets",
    grouped,
    dataset=(11, 7),
    batch_size=(4, 3),
    lengths=(None, [5] * 11),
    boundaries=(None, (6, 11)),
    max_recordings=(None, 3),
    multiple_of=(1, 4),
    pad=(0, -1),
    mask=(None, "there"),
    shuffle=(True, False),
)


# errors


def of_error(kind, /, **values):
    """Text and attributes of an error."""
    base = {name: pair[0] for name, pair in values.items()}

    def observe(**one):
        error = kind(**{**base, **one})
        return str(error), {
            name: value for name, value in vars(error).items() if name != "__notes__"
        }

    of(f"errors.{kind.__name__}", observe, **values)


of_error(
    errors.CaptureError,
    message=("a", "b"),
    file=(None, "net.py"),
    line=(None, 3),
    cause=(None, "shape"),
    advice=("", "c"),
    function=(None, "forward"),
    kind=("capture", "branch"),
    what=("", "d"),
    cure=("", "e"),
)
of_error(errors.DataError, message=("a", "b"), what=("", "c"), cure=("", "d"))
of_error(
    errors.NonFiniteLossError,
    message=("a", "b"),
    update=(1, 2),
    value=(1.0, 2.0),
    found=(None, NonFiniteValue("data", samples=(1,))),
)


def placed(**options):
    found = NonFiniteValue("data", samples=(1,))
    error = errors.NonFiniteLossError("a", 1, 1.0, found)
    error.place(**{"epoch": 0, "before": 0, **options})
    return str(error), error.epoch, error.epoch_samples, error.rows


of(
    "errors.NonFiniteLossError.place",
    placed,
    epoch=(0, 1),
    before=(0, 8),
    rows=(lambda places: [], lambda places: [7 for _ in places]),
)


def non_finite(**one):
    """A value with what is told of it, as words and as it is."""
    found = NonFiniteValue(**{"cause": "forward", "operator": "aten.log.default", **one})
    return found.describe(), found


of(
    "errors.NonFiniteValue",
    non_finite,
    cause=("forward", "data"),
    made=("nan", "inf"),
    replica=(0, 1),
    micro_batch=(0, 1),
    micro_batches=(1, 2),
    module=(None, "0"),
    kind=("", "Linear"),
    operator=("aten.log.default", "aten.div.Tensor"),
    file=(None, "net.py"),
    line=(None, 3),
    source=("", "x.log()"),
    samples=((), (2,)),
    offset=(0, 8),
    operands=((), (errors.Operand((2,), 0.0, 1.0),)),
    parameter=(None, "weight"),
)
of(
    "errors.Operand",
    lambda **one: str(errors.Operand(**{"shape": (2, 3), "minimum": 0.0, "maximum": 1.0, **one})),
    shape=((2, 3), (3,)),
    minimum=(0.0, -1.0),
    maximum=(1.0, 2.0),
    nans=(0, 1),
    infinities=(0, 1),
)
of_error(errors.RecoverableDeviceError, message=("a", "b"), action=("IPU_RESET", "FULL_RESET"))
of_error(errors.PlanError, faults=(["a"], ["b"]), suggestion=(None, {"ipus": 2}))
of_error(
    errors.UnknownNameError,
    kind=("loss", "metric"),
    name=("adm", "sg"),
    known=(["adam", "lamb", "sgd"], ["adam"]),
    hint=("", "Look. "),
    is_typo=(True, False),
    shown=(0, 1),
)


# engines


def status(**one):
    base = {"name": "a", "available": True, "reason": "r"}
    return str(ipufit.engines.EngineStatus(**{**base, **one}))


of(
    "engines.EngineStatus",
    status,
    name=("a", "b"),
    available=(True, False),
    reason=("r", "s"),
)


# testing


def spec(first_update=0):
    plan = Plan.make(micro_batch_size=2)
    return ProgramSpec(linear(), None, None, plan, Mode.TRAIN, False, 0, first_update=first_update)


def program(**options):
    found = testing.RecordingProgram(**{"spec": spec(), **options})
    return found.updates, found.spec.first_update, len(found.executions), found.closed


of(
    "testing.RecordingProgram",
    program,
    spec=(Made(spec), Made(lambda: spec(3))),
)


# Layers in parts


def cut(module=None, layers=None, inference_layers=None):
    module = module or nn.Sequential(linear())
    found = ipufit.partition.serialize(module, layers or {"0": 1}, inference_layers)
    return str(found), [(name, tuple(p.shape)) for name, p in found.named_parameters()]


of(
    "partition.serialize",
    cut,
    module=(Made(lambda: nn.Sequential(linear())), Made(lambda: nn.Sequential(nn.Linear(2, 2)))),
    layers=({"0": 1}, {"0": 3}),
    inference_layers=(None, {"0": 3}),
)
of(
    "partition.to_dense",
    lambda module: str(ipufit.partition.to_dense(module)),
    module=(Made(lambda: nn.Sequential(linear())), Made(lambda: nn.Sequential(nn.Linear(2, 2)))),
)
of(
    "partition.Serialization",
    lambda **options: cut(
        nn.Sequential(nn.Linear(6, 3)), {"0": ipufit.partition.Serialization(**options)}
    ),
    factor=(1, 3),
    splits_per_ipu=([3], [0, 3]),
    mode=With("output_channels", "reducing_dim", splits_per_ipu=[3]),
)


# Optimizer state that moves to PopTorch and back


def stepped(steps):
    """A layer, and Adam over it after so many steps."""
    torch.manual_seed(0)
    net = linear()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    for _ in range(steps):
        net(X).square().sum().backward()
        optimizer.step()
    return net, optimizer


def to_device(optimizer=1, target=False, module=True):
    net, own = stepped(optimizer)
    kind = poptorch.optim.SGD if target else poptorch.optim.Adam
    theirs = kind(net.parameters(), lr=0.1)
    state.to_poptorch(own, theirs, net if module else linear())
    return theirs.state_dict()["ipu_state"]


def from_device(source=2, optimizer=False, module=True, updates=0):
    net, own = stepped(source)
    theirs = poptorch.optim.Adam(net.parameters(), lr=0.1)
    state.to_poptorch(own, theirs, net)
    if updates:
        # RMSprop has no count on a device.
        own = torch.optim.RMSprop(net.parameters())
        theirs = poptorch.optim.RMSprop(net.parameters(), lr=0.1)
    back = (torch.optim.SGD if optimizer else type(own))(net.parameters(), lr=0.1)
    state.from_poptorch(theirs, back, net if module else linear(), max(0, updates))
    return back.state_dict()["state"]


of(
    "optim.state.to_poptorch",
    to_device,
    optimizer=(1, 2),
    target=(False, True),
    module=(True, False),
)
of(
    "optim.state.from_poptorch",
    from_device,
    source=(2, 3),
    optimizer=(False, True),
    module=(True, False),
    updates=(-1, 4),
)


# Metrics that torchmetrics computes


def measures(kind):
    """Values of a metric of classes, and of labels; or why there is none."""

    def observe(**options):
        metric = getattr(ipufit.metrics, kind)(**options)
        shares = X.abs()
        values = []
        for target in (torch.arange(12) % 4, (X > 0).float()):
            one = resolve_metrics(metric)
            try:
                one.update(shares, target, 12)
                values.append(one.compute())
            except ipufit.errors.MetricError as error:
                values.append(str(error))
        return values

    return observe


for _kind in ("Precision", "Recall", "F1Score", "FBetaScore", "MeanIoU", "AUC"):
    of(
        f"metrics.{_kind}",
        measures(_kind),
        task=("binary", "multilabel"),
        num_classes=(None, 3),
        average=("macro", "weighted"),
        # The order of labels, which is all that AUC looks at, stays.
        from_logits=With(False, True, **({} if _kind == "AUC" else {"task": "multilabel"})),
        **({"num_thresholds": (3, 200)} if _kind == "AUC" else {}),
        **({} if _kind == "AUC" else {"threshold": With(0.3, 0.7, task="multilabel")}),
        **({"beta": (1.0, 2.0)} if _kind == "FBetaScore" else {}),
    )


# Several processes


def told_by_hand(**options):
    """What is then known of the processes, and nothing afterwards."""
    address = {"address": "127.0.0.1:29511"} if options.get("num_processes", 1) > 1 else {}
    try:
        processes = distributed(**{**address, **options})
        return repr(processes), processes.describe()
    finally:
        distributed()


def trained_on(loader):
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy")
    return model.fit(Sharded(loader), verbose=0).history


of(
    "distributed",
    told_by_hand,
    process_id=With(0, 1, num_processes=2),
    num_processes=With(2, 3, process_id=0),
    address=With("127.0.0.1:29511", "127.0.0.1:29512", process_id=0, num_processes=2),
    timeout=With(600.0, 60.0, process_id=0, num_processes=2),
)
of("Sharded", trained_on, loader=([(X[:4], Y[:4])], [(X[4:8], Y[4:8])]))
