"""Options of Model's methods."""

import contextlib
import json
import threading
import warnings
from collections import OrderedDict

import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.callbacks import Callback

from . import FLIPS, Ledger, Made, Noisy, With, X, Y, files, folder, linear, of, told

__all__ = ["FLIPS"]

WEIGHTS = torch.tensor([1.0, 0.0, 3.0] * 4)
HELD = (X[:6], Y[:6])


class Reads:
    """Batches, and whether the main thread reads them."""

    def __init__(self):
        self.in_main = set()

    def __iter__(self):
        for i in range(0, 12, 3):
            self.in_main.add(threading.current_thread() is threading.main_thread())
            yield X[i : i + 3], Y[i : i + 3]


class Stop(Callback):
    """Ends whatever it can."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True

    def on_test_begin(self, logs=None):
        print("evaluates")

    def on_predict_begin(self, logs=None):
        print("predicts")


class Two(nn.Module):
    """Two outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(), nn.Linear(4, 3)

    def forward(self, x):
        return {"first": self.first(x), "second": self.second(x)}


class Counted(nn.Module):
    """Says how often Python ran its forward pass."""

    def __init__(self):
        super().__init__()
        self.head = linear()

    def forward(self, x):
        CALLS.append(1)
        return self.head(x)


CALLS = []


# Model, compile, fit; eagerly where the program does not matter, as recording takes most time


def made(**options):
    model = ipufit.Model(**{"module": linear(), **options})
    return [str(p.device) for p in model.module.parameters()], type(model.module).__name__


of(
    "Model",
    made,
    module=(Made(linear), Made(Noisy)),
    engine=("auto", "ipu"),
    device=(None, "meta"),
)


def trained(work=None, net=Counted, **options):
    """Weights and reports of a fit after ``compile`` with these options."""
    del CALLS[:]
    model = ipufit.Model(net())
    eagerly = {"run_eagerly": "jit" not in options}
    model.compile(**{"optimizer": "sgd", "loss": "cross_entropy", **eagerly, **options})
    given = {"x": X, "y": Y, "batch_size": 3, "epochs": 2, "seed": 1, "verbose": 0, **(work or {})}
    history = model.fit(**given)
    model.explain()
    return told(history), [p.detach() for p in model.module.parameters()], len(CALLS)


SEVERAL = {"net": Two, "loss": {"first": "cross_entropy", "second": "cross_entropy"}}
SEVERAL["work"] = {"y": {"first": Y, "second": Y}}
MEASURED = {"metrics": ["accuracy"], "work": {"device_iterations": 2, "batch_size": 2}}


def stack():
    """Three layers."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def stacks():
    """Two lists of them."""
    return nn.Sequential(OrderedDict(a=stack(), middle=nn.Tanh(), b=stack()))


# Of two pictures and two labels.
NAMED = {"image": X, "other": X + 1, "label": Y, "shifted": (Y + 1) % 3}
FIELDS = {"net": linear, "work": {"x": [NAMED], "y": None, "batch_size": None}}
FILLED = {"net": stack, "work": {"gradient_accumulation": 3}}

of(
    "Model.compile",
    trained,
    optimizer=("sgd", "adam"),
    loss=("cross_entropy", nn.MultiMarginLoss()),
    metrics=(None, ["accuracy"]),
    loss_weights=With(None, {"first": 2.0, "second": 1.0}, **SEVERAL),
    weighted_metrics=With(None, ["accuracy"], work={"sample_weight": WEIGHTS}),
    inputs=With("image", "other", targets="label", **FIELDS),
    targets=With("label", "shifted", inputs="image", **FIELDS),
    lr_scheduler=(None, lambda update: 0.1 * 0.5**update),
    lr_scheduler_interval=With("update", "epoch", lr_scheduler=lambda i: 0.1 * 0.5**i),
    reduction=With(None, ipufit.Reduction(gradients="sum"), work={"gradient_accumulation": 2}),
    clip=(None, ipufit.Clip(norm=1e-3)),
    ema=(None, ipufit.EMA(momentum=0.5)),
    precision=(None, "mixed_bfloat16"),
    outputs=With("all", "final", **MEASURED),
    parallel=With(None, ipufit.Parallel(stages={"1": 1}), **FILLED),
    memory=(None, ipufit.Memory(serialize={"head": 3})),
    detect_nan=(False, True),
    # The last batch of an epoch has two samples, and so a shape of its own.
    max_recordings=With(2, 1, jit="graph", work={"batch_size": 5}),
    run_eagerly=With(False, True, jit="auto"),
    jit=("graph", "kernels"),
    poptorch=(None, poptorch.Options().deviceIterations(2)),
    config=(None, ipufit.IPUConfig(gradient_accumulation_steps=2)),
)


def grouped(argument, kind):
    """Observe a fit after ``compile`` with an object of these options as one argument."""

    def observe(work=None, net=Counted, metrics=None, also=None, **options):
        made = {argument: kind(**{**(also or {}), **options})}
        return trained(work, net, metrics=metrics, **made)

    return observe


of(
    "Reduction",
    grouped("reduction", ipufit.Reduction),
    normalize=With("samples", "micro_batches", work={"batch_size": 5, "gradient_accumulation": 3}),
    sample_weights=With(
        "sum_over_batch_size", "mean_with_sample_weight", work={"sample_weight": WEIGHTS}
    ),
    gradients=With("mean", "sum", work={"gradient_accumulation": 2}),
)
of(
    "Clip",
    grouped("clip", ipufit.Clip),
    norm=(None, 1e-3),
    global_norm=(None, 1e-3),
    value=(None, 1e-3),
)
of(
    "EMA",
    grouped("ema", ipufit.EMA),
    momentum=(0.9, 0.5),
    overwrite_frequency=(None, 1),
)
of(
    "Precision",
    grouped("precision", ipufit.Precision),
    name=(None, "mixed_bfloat16"),
    loss_scale=(None, 8.0),
    accumulation_dtype=With(None, "bfloat16", work={"gradient_accumulation": 2}),
)
of(
    "Outputs",
    grouped("outputs", ipufit.Outputs),
    mode=With("all", "final", **MEASURED),
    every=With(1, 2, also={"mode": "every_n"}, **MEASURED),
)
DIVIDED = {"also": {"stages": {"1": 1}}, **FILLED}
of(
    "Parallel",
    grouped("parallel", ipufit.Parallel),
    stages=With(None, {"1": 1}, **FILLED),
    layers_per_ipu=With(None, [1, 2], **FILLED),
    layers=With(None, "b", also={"layers_per_ipu": [1, -1]}, net=stacks, work=FILLED["work"]),
    strategy=With(None, "sharded", **DIVIDED),
    ipus_per_replica=With(None, 2, also={"stages": "auto"}, **FILLED),
    auto_round_ipus=With(False, True, work={"ipus": 3}),
    inference=With(None, ipufit.Parallel(strategy="sharded"), **DIVIDED),
)
of(
    "Memory",
    grouped("memory", ipufit.Memory),
    serialize=(None, {"head": [3]}),
    inference_serialize=(None, {"head": 3}),
    recompute=(False, "head"),
    offload_optimizer=(None, True),
    shard=("none", "weights"),
)


def fitted(callbacks=None, **options):
    """Weights, reports and hooks of a fit with these options."""
    ledger = Ledger()
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy", run_eagerly=True)
    given = {"y": Y, "batch_size": 3, "epochs": 2, "seed": 1, "verbose": 0, "x": X, **options}
    given = {name: value for name, value in given.items() if value is not ...}
    history = model.fit(callbacks=callbacks or [ledger], **given)
    reads = getattr(given["x"], "in_main", None)
    return told(history)[:3], [p.detach() for p in model.module.parameters()], ledger.calls, reads


LOADED = {"x": Made(Reads), "y": ..., "batch_size": ...}

of(
    "Model.fit",
    fitted,
    x=(X, X + 1),
    y=(Y, 2 - Y),
    batch_size=(3, 4),
    epochs=(1, 3),
    ipus=(None, 2),
    device_iterations=(1, 2),
    gradient_accumulation=(1, 2),
    validation_split=(0.0, 0.25),
    validation_data=(None, HELD),
    shuffle=(True, False),
    class_weight=(None, {0: 5.0}),
    sample_weight=(None, WEIGHTS),
    steps_per_epoch=(None, 3),
    loading=(None, ipufit.Loading(limit_train_batches=2)),
    callbacks=(None, Made(Stop)),
    seed=(1, 2),
    verbose=(0, 2),
)


def reading(x=X, y=Y, batch_size=3, **options):
    """A fit with a validation that reads data in this way."""
    data = {"x": x, "y": y, "batch_size": batch_size, "validation_data": HELD}
    return fitted(loading=ipufit.Loading(**options), **data)


of(
    "Loading",
    reading,
    limit_train_batches=(None, 2),
    limit_val_batches=(None, 1),
    overfit_batches=(None, 1),
    fast_dev_run=(False, True),
    prefetch=With(0, 2, **LOADED),
)


def validating(**options):
    """A fit with a validation of this kind."""
    return fitted(validation_data=ipufit.Validation(**{"data": HELD, **options}))


of(
    "Validation",
    validating,
    data=(HELD, (X[6:], Y[6:])),
    steps=(None, 1),
    batch_size=(None, 6),
    freq=(1, 2),
    ipus=(None, 2),
    device_iterations=(None, 2),
)


# Inference


def inferring(method):
    """What a method of a model with random numbers of its own returns, and the hooks."""

    def observe(callbacks=None, **options):
        ledger = Ledger()
        model = ipufit.Model(Noisy())
        model.compile("sgd", "cross_entropy", run_eagerly=True)
        given = {"x": X, "batch_size": 3, "verbose": 0, **options}
        if method == "evaluate":
            given.setdefault("y", Y)
        given = {name: value for name, value in given.items() if value is not ...}
        found = getattr(model, method)(callbacks=callbacks or [ledger], **given)
        found = list(found) if method == "predict_iter" else found
        return found, ledger.calls, getattr(given["x"], "in_main", None)

    return observe


def padded(method):
    """Sums of a batch of one length and of one of another."""

    def observe(padding_value):
        found = getattr(ipufit.Model(nn.ReLU()), method)(
            [X[:2], X[:2, :3]], device_iterations=2, padding_value=padding_value, verbose=0
        )
        return list(found)

    return observe


for method in ("predict", "predict_iter"):
    of(f"Model.{method}", padded(method), padding_value=(0, 1.5))
for method in ("evaluate", "predict", "predict_iter"):
    of(
        f"Model.{method}",
        inferring(method),
        x=(X, X + 1),
        batch_size=(3, 4),
        steps=(None, 1),
        prefetch=With(0, 2, **LOADED),
        ipus=(None, 2),
        device_iterations=(1, 2),
        callbacks=(None, Made(Stop)),
        seed=(0, 1),
        verbose=(0, 2),
    )
of(
    "Model.evaluate",
    inferring("evaluate"),
    y=(Y, 2 - Y),
    sample_weight=(None, WEIGHTS),
    return_dict=(True, False),
)


def judged(**options):
    """The values of a model that was not compiled."""
    torch.manual_seed(0)
    model = ipufit.Model(linear())
    return model.evaluate(X, Y, verbose=0, **{"loss": "cross_entropy", **options})


of(
    "Model.evaluate",
    judged,
    loss=("cross_entropy", "multi_margin"),
    metrics=(None, ["accuracy"]),
)


def on_batch(method):
    """What a method for one batch returns."""

    def observe(**options):
        model = ipufit.Model(linear())
        model.compile("sgd", "cross_entropy", run_eagerly=True)
        given = {"x": X} if method == "predict_on_batch" else {"x": X, "y": Y}
        return getattr(model, method)(**{**given, **options})

    return observe


for method in ("train_on_batch", "test_on_batch"):
    of(
        f"Model.{method}",
        on_batch(method),
        x=(X, X + 1),
        y=(Y, 2 - Y),
        sample_weight=(None, WEIGHTS),
        return_dict=(True, False),
    )
of("Model.train_on_batch", on_batch("train_on_batch"), class_weight=(None, {0: 5.0}))
of("Model.predict_on_batch", on_batch("predict_on_batch"), x=(X, X + 1))


# Searches


def searched_rate(**options):
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy", run_eagerly=True)
    given = {"x": X, "y": Y, "batch_size": 3, "updates": 4, "max_lr": 0.1, "seed": 1, **options}
    return model.find_lr(**given)


of(
    "Model.find_lr",
    searched_rate,
    x=(X, X + 1),
    y=(Y, 2 - Y),
    batch_size=(3, 6),
    min_lr=(1e-7, 1e-3),
    max_lr=(0.1, 0.2),
    updates=(4, 5),
    ipus=(None, 2),
    gradient_accumulation=(1, 2),
    seed=(1, 2),
)


class Looked(nn.Module):
    """Remembers what it was given."""

    def __init__(self):
        super().__init__()
        self.head = linear()

    def forward(self, x):
        LOOKED.append((x.detach().clone(), len(x)))
        return self.head(x)


LOOKED = []


def searched_size(**options):
    del LOOKED[:]
    model = ipufit.Model(Looked())
    model.compile("sgd", "cross_entropy", run_eagerly=True)
    given = {"x": X, "y": Y, "effective_batch_size": 8, "seed": 1, **options}
    found = model.find_batch_size(**given)
    sizes = [size for size, _ in found.tried]
    return found.batch_size, found.gradient_accumulation, sizes, LOOKED


of(
    "Model.find_batch_size",
    searched_size,
    x=(X, X + 1),
    y=(Y, None),
    effective_batch_size=(8, 4),
    start=(2, 1),
    ipus=(None, 2),
    seed=(1, 2),
)


# Reports and files


def explained(**options):
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy")
    model.explain(**{"x": X, **options})


of(
    "Model.explain",
    explained,
    x=(X, X[:6]),
    y=(Y, Y[:6]),
    batch_size=(3, 4),
    steps_per_epoch=(None, 2),
    loading=With(None, ipufit.Loading(limit_train_batches=2), batch_size=3),
    ipus=(None, 2),
    device_iterations=(1, 2),
    gradient_accumulation=(1, 2),
)


def summarized(**options):
    inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    printed = []
    if options.get("print_fn") == "given":
        options["print_fn"] = printed.append
    net = nn.Sequential(OrderedDict({"a_layer_with_a_name_that_needs_room": inside}))
    ipufit.Model(net).summary(**options)
    return printed


of(
    "Model.summary",
    summarized,
    x=(None, X),
    line_length=(None, 60),
    depth=(None, 1),
    expand_nested=(True, False),
    print_fn=(None, "given"),
)


def compared(**options):
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy")
    found = model.compare(**{"sample": (X[:4], Y[:4]), **options})
    return str(found), len(found.differences)


of(
    "Model.compare",
    compared,
    sample=((X[:4], Y[:4]), (X[:4], 1.0 * Y[:4])),
    reference=("eager", "float64"),
    rtol=With(None, 0.0, reference="float64", atol=0.0),
    atol=With(0.0, 1.0, reference="float64", rtol=0.0),
)


def checked(**options):
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy")
    return str(model.check_invariance(**{"sample": (X[:8], Y[:8]), **options}))


of(
    "Model.check_invariance",
    checked,
    sample=((X[:8], Y[:8]), (X[:4], Y[:4])),
    rtol=With(0.0, 1.0, atol=0.0),
    atol=With(0.0, 1.0, rtol=0.0),
)


def saved(path):
    with folder() as place:
        ipufit.Model(linear()).save_weights(place / path)
        return files(place)


def saved_whole(path):
    with folder() as place:
        ipufit.Model(linear()).save(place / path)
        return files(place)


of("Model.save", saved_whole, path=("one.safetensors", "other.safetensors"))


of("Model.save_weights", saved, path=("one.safetensors", "other.safetensors"))


def loaded(path="one.safetensors", strict=True):
    with folder() as place:
        ipufit.Model(linear()).save_weights(place / "one.safetensors")
        ipufit.Model(nn.Linear(4, 3, bias=False)).save_weights(place / "other.safetensors")
        model = ipufit.Model(nn.Linear(4, 3))
        try:
            model.load_weights(place / path, strict)
        except ipufit.errors.ConfigurationError:
            return "refused"
        return model.module.state_dict()


of(
    "Model.load_weights",
    loaded,
    path=With("one.safetensors", "other.safetensors", strict=False),
    strict=With(True, False, path="other.safetensors"),
)


def made(path="one.safetensors", module=None, **options):
    """What a model of a file runs on, or why there is none."""
    with folder() as place:
        for name, scale in (("one", 1.0), ("other", 2.0)):
            net = linear()
            with torch.no_grad():
                net.weight *= scale
            ipufit.Model(net).save(place / f"{name}.safetensors")
        model = ipufit.load(place / path, module or linear(), **options)
        model.compile("sgd", "cross_entropy")
        parameters = list(model.module.parameters())
        return model._session.engine.name, parameters[0].device.type, parameters


of(
    "load",
    made,
    path=("one.safetensors", "other.safetensors"),
    module=(Made(linear), Made(lambda: nn.Linear(4, 3, bias=False))),
    engine=("embedded", "ipu-standin"),
    device=(None, "meta"),
)


# Checkpoints


def kept(place, **options):
    """Names of the checkpoints of a fit of two epochs of four updates, and its weights."""
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], run_eagerly=True)
    work = {"batch_size": 3, "epochs": 3, "seed": 1, "verbose": 0, **options}
    model.fit(X, Y, **work)
    names = sorted(each.name for each in place.rglob("update-*"))
    return names, list(model.module.parameters())


def checkpointed(**options):
    with folder() as place:
        given = {"folder": "run", "keep": 1, **options}
        given["folder"] = place / given["folder"]
        names, weights = kept(place, checkpoint=ipufit.Checkpoint(**given))
        return sorted(each.name for each in place.iterdir()), names, weights


of(
    "Checkpoint",
    checkpointed,
    folder=("run", "other"),
    every_updates=With(None, 3, keep=9),
    keep=(1, 3),
    monitor=With(None, "loss", mode="max"),
    mode=With("min", "max", monitor="loss"),
)


def written(checkpoint):
    """Which checkpoints a fit leaves."""
    with folder() as place:
        return kept(place, checkpoint=place / "run" if checkpoint else None)[0]


def resumed(resume):
    """What a second fit makes of what the first leaves."""
    with folder() as place:
        kept(place, checkpoint=place / "run")
        try:
            return kept(place, checkpoint=ipufit.Checkpoint(place / "run", resume=resume))
        except ipufit.errors.ConfigurationError:
            return "refused"


def restarted(max_restarts):
    """Whether a device may fail."""
    with folder() as place, ipufit.testing.inject("ipu_reset", 1):
        with contextlib.suppress(ipufit.errors.DeviceError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint = ipufit.Checkpoint(place / "run", max_restarts=max_restarts)
            kept(place, checkpoint=checkpoint)
        return sorted(each.name for each in place.rglob("update-*"))


def unshuffled(resume_changes):
    """Whether a run goes on in another order."""
    with folder() as place:
        kept(place, checkpoint=place / "run")
        fields = {"resume": "auto", "resume_changes": resume_changes}
        checkpoint = ipufit.Checkpoint(place / "run", **fields)
        try:
            return kept(place, checkpoint=checkpoint, epochs=4, shuffle=False)
        except ipufit.errors.CheckpointError:
            return "refused"


of("Model.fit", written, checkpoint=(True, False))
of("Checkpoint", resumed, resume=(None, "auto"))
of("Checkpoint", unshuffled, resume_changes=(None, {"shuffle"}))
of("Checkpoint", restarted, max_restarts=(0, 1))


def files_of(place, report, **options):
    """What a fit of three epochs leaves in folders, and whether it could be."""
    given = {"batch_size": 3, "seed": 1, "verbose": 0, **options}
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy", run_eagerly=True)
    model.fit(X, Y, callbacks=report, **given)
    return sorted(str(each.relative_to(place)) for each in place.rglob("run.json"))


class Counts:
    """Stands for a profiler."""

    on_trace_ready = None

    def start(self):
        print("starts")

    def step(self):
        print("steps")

    def stop(self):
        print("stops")

    def export_chrome_trace(self, path):
        print("exports")


def report_of(**options):
    """What the second of two fits into one folder does, and whether operators were timed."""
    with folder() as place:
        given = {"folder": "a", "overwrite": True, **options}
        given["folder"] = place / given["folder"]
        report = ipufit.Report(**given)
        found = [files_of(place, report), files_of(place, report)]
        facts = json.loads((given["folder"] / "run.json").read_text())
        return found, "asked for" in str(facts["operators"])


of(
    "Report",
    report_of,
    folder=("a", "b"),
    overwrite=(True, False),
    operators=(True, False),
    profiler=(None, Made(Counts)),
)


def injected(fault="ipu_reset", at_update=1):
    """What goes wrong, and after how many updates."""
    with folder() as place, ipufit.testing.inject(fault, at_update) as planned:
        try:
            found = kept(place)
        except Exception as error:
            found = type(error).__name__
        return planned.happened, found


of("testing.inject", injected, fault=("ipu_reset", "unrecoverable"), at_update=(1, 999))
of(
    "testing.Fault",
    lambda **options: str(ipufit.testing.Fault(**{"kind": "kill", "at_update": 1, **options})),
    kind=("kill", "worker"),
    at_update=(1, 2),
    happened=(False, True),
)


# Losses of arguments by name


def called(loss, names):
    """Weights of a fit with a loss that takes labels by name."""
    call = ipufit.losses.Call(loss, **names)
    return trained(inputs="image", loss=call, **FIELDS)


BY_NAME = {"input": "output", "target": "label"}
of(
    "losses.Call",
    called,
    loss=With(nn.CrossEntropyLoss(), nn.MultiMarginLoss(), names=BY_NAME),
    names=With(BY_NAME, {**BY_NAME, "target": "shifted"}, loss=nn.CrossEntropyLoss()),
)


# The plan of a partition


def planned(**options):
    """What a plan of three layers says."""
    model = ipufit.Model(stack())
    model.compile("sgd", "cross_entropy", parallel=ipufit.Parallel(stages={"1": 1}))
    return str(model.plan(**{"x": (X, Y), **options}))


of(
    "Model.plan",
    planned,
    x=((X, Y), X[:3]),
    ipus=(None, 4),
    gradient_accumulation=(None, 5),
    ipus_per_replica=With(1, 2, ipus=2),
    stages=(None, {"2": 1}),
    layers_per_ipu=(None, [2, 1]),
    layers=(None, ""),
    strategy=(None, "sharded"),
    schedule=("grouped", "interleaved"),
    recompute=(False, True),
    ipu_memory=(None, 5000),
)


def looked_at(**options):
    """What is said of a layer that no IPU has."""
    model = ipufit.Model(stack())
    model.compile("sgd", "cross_entropy")
    return str(model.preflight(**options))


of("Model.preflight", looked_at, x=((X, Y), X[:3]))


# The check of a module


def checked(**options):
    """What a check says."""
    model = ipufit.Model(linear())
    model.compile("sgd", "cross_entropy")
    return str(model.check(**options))


of("Model.check", checked, x=(None, (X, Y)))


def from_lightning(**options):
    """The refusal of what is no LightningModule: tests/lightning has real ones."""
    return ipufit.Model.from_lightning(**{"module": nn.Linear(4, 3), **options})


of(
    "Model.from_lightning",
    from_lightning,
    module=(nn.Linear(4, 3), nn.ReLU()),
    engine=("embedded", "embeded"),
    device=("cpu", "nowhere"),
)
