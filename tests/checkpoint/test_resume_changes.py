"""What differs from the run that a checkpoint is of: refused with all of it, or allowed by name."""

import json
import shutil

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback, EarlyStopping, LearningRateScheduler
from ipufit.errors import CheckpointError
from ipufit.testing import inject
from tests.checkpoint.test_resume import RESUMING, resuming
from tests.engines import clips_apart, has_no_autocast, keeps_averages, runs_eagerly, weighs_classes
from tests.nets import data
from tests.told import message, refused

X, Y = data(20)
OTHER_X = X + 1


class Net(nn.Module):
    """Two layers, whose activation is a module and whose scale is a number."""

    def __init__(self, activation=nn.Tanh, dropout=0.0, scale=1.0, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, width), activation(), nn.Dropout(dropout))
        self.head = nn.Linear(width, 5)
        self.scale = scale

    def forward(self, x):
        return self.head(self.layers(x.flatten(1))) * self.scale


def sgd(**options):
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, **options})


COMPILE = {"optimizer": sgd(), "loss": "cross_entropy"}
FIT = {"x": X, "y": Y, "batch_size": 4, "seed": 3, "verbose": 0}


def compiled(net=None, **options):
    torch.manual_seed(0)
    model = ipufit.Model((net or Net()).double())
    model.compile(**{**COMPILE, **options})
    return model


def run(folder, epochs, change=None, **options):
    """A fit that begins or goes on, with changes by the argument that they belong to."""
    change = change or {}
    given = {**FIT, **{name: value for name, value in change.items() if name in FITTED}}
    made = {name: value for name, value in change.items() if name not in FITTED}
    model = compiled(**made)
    fields = {name: options.pop(name) for name in RESUMING if name in options}
    checkpoint = resuming(folder, resume="auto", **fields)
    model.fit(**given, epochs=epochs, checkpoint=checkpoint, **options)
    return model


FITTED = ("x", "y", "class_weight", "sample_weight", "shuffle", "validation_data")
WEIGHT = torch.linspace(0.5, 2, 20, dtype=torch.float64)
# Name in resume_changes, what changes, how the error says it.
CHANGES = {
    "lr": ({"optimizer": sgd(lr=0.01)}, "lr: 0.1 in the checkpoint, 0.01 now"),
    "momentum": ({"optimizer": sgd(momentum=0.9)}, "momentum: 0 in the checkpoint, 0.9 now"),
    "weight_decay": (
        {"optimizer": sgd(weight_decay=0.1)},
        "weight_decay: 0 in the checkpoint, 0.1 now",
    ),
    "loss": (
        {"loss": "multi_margin"},
        "loss: 'cross_entropy' in the checkpoint, 'multi_margin' now",
    ),
    "dropout": (
        {"net": lambda: Net(dropout=0.5)},
        "dropout p of 'layers.2': 0.0 in the checkpoint, 0.5 now",
    ),
    "activation": (
        {"net": lambda: Net(activation=nn.ReLU)},
        "activation of 'layers.1': 'Tanh' in the checkpoint, 'ReLU' now",
    ),
    "module": (
        {"net": lambda: Net(scale=2.0)},
        "module scale of '': 1.0 in the checkpoint, 2.0 now",
    ),
    "class_weight": (
        {"class_weight": {1: 3.0}},
        "class_weight: None in the checkpoint, {'1': 3.0} now",
    ),
    "sample_weight": (
        {"sample_weight": WEIGHT},
        "sample_weight: False in the checkpoint, True now",
    ),
    "shuffle": ({"shuffle": False}, "shuffle: True in the checkpoint, False now"),
    "global_clipnorm": (
        {"clip": ipufit.Clip(global_norm=0.01)},
        "global_clipnorm: None in the checkpoint, 0.01 now",
    ),
    "gradient_reduction": (
        {"reduction": ipufit.Reduction(gradients="sum")},
        "gradient_reduction: 'mean' in the checkpoint, 'sum' now",
    ),
    "normalize": (
        {"reduction": ipufit.Reduction(normalize="tokens")},
        "normalize: 'samples' in the checkpoint, 'tokens' now",
    ),
    "metrics": ({"metrics": ["accuracy"]}, "metrics: [] in the checkpoint, ['accuracy'] now"),
    "validation_data": (
        {"validation_data": (X[:4], Y[:4])},
        "validation_data: None in the checkpoint, "
        "{'class': 'ArrayLoader', 'columns': ['float64 [1, 3, 4]', 'int64 []'], 'content'... now",
    ),
    "lr_scheduler": (
        {"lr_scheduler": lambda update: 0.1},
        None,
    ),
    "loss_scale": (
        {"precision": ipufit.Precision(loss_scale=8.0)},
        "loss_scale: None in the checkpoint, 8.0 now",
    ),
}
EMBEDDED = {
    "use_ema": ({"ema": ipufit.EMA()}, "use_ema: None in the checkpoint, True now", keeps_averages),
    "clipnorm": (
        {"clip": ipufit.Clip(norm=0.01)},
        "clipnorm: None in the checkpoint, 0.01 now",
        clips_apart,
    ),
    "precision": (
        {"precision": "mixed_bfloat16"},
        "precision: None in the checkpoint, 'mixed_bfloat16' now",
        has_no_autocast,
    ),
}
ALL = [
    *(pytest.param(name, *value, id=name) for name, value in CHANGES.items()),
    *(
        pytest.param(name, change, line, id=name, marks=mark)
        for name, (change, line, mark) in EMBEDDED.items()
    ),
]


def made(change):
    """The change, with a module made anew."""
    return {name: value() if name == "net" else value for name, value in change.items()}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run of two epochs, and its weights."""
    folder = tmp_path_factory.mktemp("begun")
    return folder, run(folder / "run", 2).module.state_dict()


def lines_refused(folder, name, change, line):
    """What a run with the change is told that differs, line by line, and their names."""
    head, *lines, advice = message(run, folder, 3, made(change), kind=CheckpointError).split("\n")
    assert head == (
        "the checkpoint 'update-000000010-epoch' must match the run that continues, but they "
        "differ:"
    )
    if line is not None:
        assert f"  {line}" in lines
    names = {each.split()[0].rstrip(":") for each in lines}
    assert name in names
    allowed = ", ".join(map(repr, sorted(names)))
    assert advice == (
        "Pass the same model, data and arguments, or another folder to start a new run. To "
        f"continue with other settings from here, pass resume_changes={{{allowed}}}."
    )
    return lines, names


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(("name", "change", "line"), ALL)
def test_each_change_is_refused_with_its_name(name, change, line, begun, engine):
    """Eagerly where that can be, as nothing is trained."""
    eagerly = {"run_eagerly": True} if engine == "embedded" else {}
    lines_refused(begun[0] / "run", name, {**eagerly, **change}, line)


@pytest.mark.long
@pytest.mark.parametrize(("name", "change", "line"), ALL)
def test_each_change_is_refused_and_allowed_by_its_name(name, change, line, begun, tmp_path):
    """It takes effect as in a fit that begins from those weights with the other arguments."""
    folder, weights = begun
    shutil.copytree(folder / "run", tmp_path / "run")
    lines, names = lines_refused(tmp_path / "run", name, change, line)
    model = run(tmp_path / "run", 3, made(change), resume_changes=names)
    noted = model.history.params["resume_changes"]
    assert noted["unchanged"] == []
    assert noted["changed"] == [{"update": 10, "change": each.strip()} for each in lines]
    assert model.history.epoch == [0, 1, 2]

    options = {k: v for k, v in made(change).items() if k not in FITTED}
    by_hand = compiled(**options)
    by_hand.module.load_state_dict(weights)
    # The update that a schedule and dropout count from is another.
    if name not in ("lr_scheduler", "dropout"):
        given = {**FIT, **{k: v for k, v in change.items() if k in FITTED}}
        by_hand.fit(**given, epochs=range(2, 3))
        for key, value in by_hand.module.state_dict().items():
            assert torch.equal(model.module.state_dict()[key], value), key
    # And the checkpoints after that are of the run as it is now.
    again = run(tmp_path / "run", 4, made(change), resume_changes=names)
    assert again.history.params["resume_changes"] == {**noted, "unchanged": sorted(names)}
    assert run(tmp_path / "run", 4, made(change)).history.params["resume_changes"] == noted


@pytest.mark.long
def test_all_that_differs_is_in_one_error(tmp_path):
    run(tmp_path / "run", 1)
    change = {
        "optimizer": sgd(lr=0.2, momentum=0.5),
        "loss": "multi_margin",
        "net": Net(nn.ReLU, 0.5, 3.0),
        "x": OTHER_X,
        "metrics": ["accuracy"],
    }
    with pytest.raises(CheckpointError) as told:
        run(tmp_path / "run", 2, change, callbacks=[EarlyStopping("loss")])
    text = str(told.value)
    lines = [line.strip() for line in text.split("\n")[1:-1]]
    assert [line.split(":")[0] for line in lines] == [
        "callbacks", "loss", "metrics", "data content", "lr", "momentum", "module scale of ''",
        "activation of 'layers.1'", "dropout p of 'layers.2'",
    ]  # fmt: skip
    assert text.endswith(
        "pass resume_changes={'activation', 'callbacks', 'data', 'dropout', 'loss', 'lr', "
        "'metrics', 'module', 'momentum'}."
    )


@pytest.mark.parametrize(
    "change",
    [{"net": lambda: Net(width=9)}, {"optimizer": torch.optim.Adam, "class_weight": {1: 3.0}}],
    ids=["shapes", "optimizer"],
)
def test_no_names_are_advised_where_the_run_could_not_go_on(change, tmp_path):
    """The next refusal would come in spite of following the advice."""
    run(tmp_path / "run", 1)
    text = message(run, tmp_path / "run", 2, made(change), kind=CheckpointError)
    assert text.endswith(
        "Pass the same model, data and arguments, or another folder to start a new run."
    )


class Rates(Callback):
    """The learning rate of every update that this fit has made."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(logs["learning_rate"])


def rates(*given, **options):
    """Of the updates of a run with a schedule."""
    noted = Rates()
    run(*given, callbacks=[noted], **options)
    return noted.values


SCHEDULES = {
    "of the update": lambda rate: {"lr_scheduler": lambda update: rate * 0.9**update},
    "StepLR by epochs": lambda rate: stepped(rate, lambda o: StepLR(o, 1, 0.5), "epoch"),
    "StepLR by updates": lambda rate: stepped(rate, lambda o: StepLR(o, 3, 0.5), "update"),
    "cosine": lambda rate: stepped(rate, lambda o: CosineAnnealingLR(o, 20, 0.01), "update"),
}


def stepped(rate, make, interval):
    net = Net().double()
    optimizer = torch.optim.SGD(net.parameters(), rate)
    return {
        "net": net,
        "optimizer": optimizer,
        "lr_scheduler": make(optimizer),
        "lr_scheduler_interval": interval,
    }


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_another_rate_goes_on_at_the_place_in_its_schedule(schedule, tmp_path):
    """The rates after the change are those of a run that had the new schedule from the start."""
    rates(tmp_path / "run", 2, schedule(0.1))
    with pytest.raises(CheckpointError, match="lr"):
        rates(tmp_path / "run", 4, schedule(0.2))
    names = {"lr", "lr_scheduler"}
    resumed = rates(tmp_path / "run", 4, schedule(0.2), resume_changes=names)
    expected = rates(tmp_path / "other", 4, schedule(0.2))
    assert len(expected) == 20
    assert resumed == pytest.approx(expected[10:], rel=1e-12)


@pytest.mark.long
def test_a_schedule_can_be_another_or_none(tmp_path):
    by_epoch = SCHEDULES["StepLR by epochs"]
    rates(tmp_path / "run", 2, by_epoch(0.1))
    other = SCHEDULES["cosine"]
    resumed = rates(tmp_path / "run", 3, other(0.1), resume_changes="lr_scheduler")
    assert resumed == pytest.approx(rates(tmp_path / "other", 3, other(0.1))[10:], rel=1e-12)
    names = ["lr_scheduler", "callbacks"]
    last = run(tmp_path / "run", 4, resume_changes=names)
    assert [group["lr"] for group in last.optimizer.param_groups] == [0.1]


@pytest.mark.long
def test_a_plateau_keeps_what_it_has_seen(tmp_path):
    def plateau(rate):
        return stepped(rate, lambda o: ReduceLROnPlateau(o, factor=0.5, patience=9), "epoch")

    rates(tmp_path / "run", 2, plateau(0.1))
    assert rates(tmp_path / "run", 3, plateau(0.3), resume_changes={"lr"}) == [0.3] * 5
    state = json.loads((tmp_path / "run" / "update-000000015-epoch" / "state.json").read_text())
    assert state["content"]["schedule"]["epochs"] == 3


@pytest.mark.long("ipu-standin")
def test_settings_that_callbacks_change_are_no_change_of_the_run(tmp_path):
    """Neither in another process, which begins as this one did, nor in a second fit of a model."""

    def halves():
        return [LearningRateScheduler(lambda epoch, lr: lr / 2)]

    model = run(tmp_path / "run", 2, callbacks=halves())
    given = {**FIT, "checkpoint": ipufit.Checkpoint(tmp_path / "run", resume="auto")}
    model.fit(**given, epochs=3, callbacks=halves())
    assert model.optimizer.param_groups[0]["lr"] == 0.1 / 8
    model = run(tmp_path / "run", 4, callbacks=halves())
    assert model.optimizer.param_groups[0]["lr"] == 0.1 / 16
    model.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(CheckpointError, match=r"lr: 0\.1 in the checkpoint, 0\.5 now"):
        model.fit(**given, epochs=5, callbacks=halves())


def unfreeze(model):
    """A layer that the optimizer has had from the beginning."""
    model.module.head.bias.requires_grad_(True)


def add_group(model):
    """A layer that it gets now."""
    first = model.module.layers[0].weight.requires_grad_(True)
    model.optimizer.add_param_group({"params": [first], "lr": 0.3})


def fix_dropout(model):
    """A part of the module to eval mode."""
    model.module.layers[2].eval()


def scale(model):
    """A number in the module, by what it was."""
    model.module.scale *= 0.5


class Once(Callback):
    """Changes something when the second epoch begins; ends the run within an epoch if asked to."""

    def __init__(self, change, ends_at=None):
        super().__init__()
        self.change = change
        self.ends_at = ends_at

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if epoch == 1:
            self.change(self.model)

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.ends_at:
            raise KeyboardInterrupt


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("ends_at", [(1, 3), (2, 0)], ids=["within an epoch", "after one"])
@pytest.mark.parametrize("change", [unfreeze, add_group, fix_dropout, scale])
def test_a_run_goes_on_with_what_callbacks_had_changed(change, ends_at, tmp_path):
    """Bit by bit, though no callback changes it again."""

    def fit(folder, ends_at=None):
        net = Net(dropout=0.5)
        net.head.bias.requires_grad_(change is not unfreeze)
        net.layers[0].weight.requires_grad_(change is not add_group)
        model = compiled(net)
        parameters = [p for p in net.parameters() if p.requires_grad or change is unfreeze]
        model.compile(torch.optim.SGD(parameters, 0.1, momentum=0.9), "cross_entropy")
        checkpoint = ipufit.Checkpoint(tmp_path / folder, every_updates=1, resume="auto")
        calls = [Once(change, ends_at)]
        try:
            model.fit(**FIT, epochs=4, checkpoint=checkpoint, callbacks=calls)
        except KeyboardInterrupt:
            return fit(folder)
        assert ("resumed" in model.history.params) == (folder == "ended")
        return net.state_dict()

    whole, ended = fit("whole"), fit("ended", ends_at)
    for name, value in whole.items():
        assert torch.equal(ended[name], value), name


@pytest.mark.long
def test_a_list_that_callbacks_had_changed_is_reported(tmp_path):
    def fit(ends_at=None):
        net = Net()
        net.widths = [1, 2]
        model = compiled(net)
        calls = [Once(lambda model: model.module.widths.append(3), ends_at)]
        checkpoint = ipufit.Checkpoint(tmp_path / "run", resume="auto")
        model.fit(**FIT, epochs=3, checkpoint=checkpoint, callbacks=calls)

    with pytest.raises(KeyboardInterrupt):
        fit((2, 0))
    with pytest.warns(UserWarning, match="the run had changed") as caught:
        fit()
    assert [str(each.message) for each in caught] == [
        "the run had changed 'widths' of Net, which a checkpoint does not restore: it has "
        "numbers and texts only. Let a callback's load_state_dict set it again."
    ]


@pytest.mark.long
def test_what_belongs_to_an_epoch_changes_between_two(tmp_path):
    class Ends(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                raise KeyboardInterrupt

    checkpoint = ipufit.Checkpoint(tmp_path / "run", every_updates=1)
    with pytest.raises(KeyboardInterrupt):
        run(checkpoint, 2, callbacks=[Ends()])
    names = {"callbacks", "metrics", "data"}
    change = {"metrics": ["accuracy"], "x": OTHER_X}
    assert message(run, checkpoint, 2, change, resume_changes=names, kind=CheckpointError) == (
        "the checkpoint 'update-000000003' must match the run that continues, but they "
        "differ:\n  data: it can change at the end of an epoch, not within one\n  metrics: it "
        "can change at the end of an epoch, not within one\nPass the same model, data and "
        "arguments, or another folder to start a new run."
    )
    run(checkpoint, 1, resume_changes="callbacks")
    model = run(checkpoint, 2, change, resume_changes=names)
    assert model.history.places("accuracy") == [1]


@pytest.mark.long
def test_more_data_after_an_epoch(tmp_path):
    run(tmp_path / "run", 1)
    more = {"x": torch.cat([X, OTHER_X]), "y": torch.cat([Y, Y])}
    with pytest.raises(CheckpointError, match="samples of the training data: 20"):
        run(tmp_path / "run", 2, more)
    model = run(tmp_path / "run", 2, more, resume_changes={"data"})
    assert model.history.params["updates_done"] == 15


@pytest.mark.long("ipu-standin")
def test_callbacks_go_on_by_their_class(tmp_path):
    run(tmp_path / "run", 2, callbacks=[EarlyStopping("loss", patience=5)])
    stops = EarlyStopping("loss", patience=5)
    run(tmp_path / "run", 3, callbacks=[Callback(), stops], resume_changes={"callbacks"})
    expected = EarlyStopping("loss", patience=5)
    run(tmp_path / "other", 3, callbacks=[expected])
    assert stops.state_dict() == expected.state_dict()


@weighs_classes
def test_a_loss_that_is_a_module_has_the_settings_of_now(tmp_path):
    """Its buffers in the checkpoint are those of the other loss."""

    def weighted(weight):
        return {"loss": nn.CrossEntropyLoss(weight=torch.tensor(weight, dtype=torch.float64))}

    first = run(tmp_path / "run", 1, weighted([1.0, 1, 1, 1, 1]))
    change = weighted([5.0, 1, 1, 1, 1])
    with pytest.raises(CheckpointError, match=r"loss module.buffers.weight"):
        run(tmp_path / "run", 2, change)
    model = run(tmp_path / "run", 2, change, resume_changes={"loss"})
    by_hand = compiled(**weighted([5.0, 1, 1, 1, 1]))
    by_hand.module.load_state_dict(first.module.state_dict())
    by_hand.fit(**FIT, epochs=range(1, 2))
    for key, value in by_hand.module.state_dict().items():
        assert torch.equal(model.module.state_dict()[key], value), key


@pytest.mark.long("ipu-standin")
def test_a_device_that_fails_goes_on_with_the_changes(tmp_path):
    """Also before the first checkpoint after them."""
    run(tmp_path / "run", 2)
    change = CHANGES["lr"][0]
    with inject("ipu_reset", 12), pytest.warns(UserWarning, match="restart 1 of 1, from update 10"):
        model = run(tmp_path / "run", 3, change, resume_changes={"lr"}, max_restarts=1)
    assert model.optimizer.param_groups[0]["lr"] == 0.01
    run(tmp_path / "other", 2)
    whole = run(tmp_path / "other", 3, change, resume_changes={"lr"})
    for key, value in whole.module.state_dict().items():
        assert torch.equal(model.module.state_dict()[key], value), key


@pytest.mark.long
def test_frozen_layers_and_loaders(tmp_path):
    def loader(**options):
        return {"x": DataLoader(TensorDataset(X, Y), batch_size=4, **options), "y": None}

    def fit(folder, net=None, change=None, **options):
        model = compiled(net=net, optimizer=None)
        parameters = list(model.module.parameters())
        model.compile(torch.optim.SGD(parameters, 0.1), "cross_entropy")
        given = {**FIT, **(change or {})}
        del given["batch_size"]
        model.fit(**given, checkpoint=ipufit.Checkpoint(folder, resume="auto"), **options)

    frozen = Net()
    frozen.layers[0].weight.requires_grad = False
    fit(tmp_path / "run", change=loader(), epochs=1)
    with pytest.raises(CheckpointError) as told:
        fit(tmp_path / "run", frozen, loader(shuffle=True), epochs=2)
    assert str(told.value).split("\n")[1:-1] == [
        "  shuffle: 'SequentialSampler' in the checkpoint, 'RandomSampler' now",
        "  requires_grad of 'layers.0.weight': True in the checkpoint, False now",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"jit": "graph"}, marks=runs_eagerly),
        {"memory": ipufit.Memory(recompute=["layers"])},
        {"x": X.numpy(), "y": Y.numpy()},
        {"net": lambda: Net()},
        {"detect_nan": False},
        {"max_recordings": 4},
    ],
    ids=["jit", "recompute", "arrays", "another object", "detect_nan", "max_recordings"],
)
def test_what_changes_no_number_is_no_change(change, tmp_path):
    run(tmp_path / "run", 1)
    model = run(tmp_path / "run", 2, made(change))
    assert "resume_changes" not in model.history.params


def test_names_that_nothing_has():
    def fit(**options):
        return lambda: compiled().fit(**FIT, checkpoint=ipufit.Checkpoint(**options))

    refused(
        fit(folder="unused", resume="auto", resume_changes={"learning_rat"}),
        "unknown name in resume_changes 'learning_rat'. Known names: accumulation_dtype, "
        "activation, callbacks, class_weight, clipnorm, clipvalue, dampening, data, dropout, "
        "ema_momentum, ema_overwrite_frequency, global_clipnorm, gradient_reduction, loss, "
        "loss_scale, loss_weights, lr, lr_scheduler, maximize, metrics, module, momentum, "
        "nesterov, normalize, output_every, output_mode, precision, requires_grad, sample_weight, "
        "sample_weight_reduction, shuffle, use_ema, validation_data, weight_decay.",
    )
    with pytest.raises(ipufit.errors.UnknownNameError, match="Did you mean 'momentum'"):
        fit(folder="unused", resume="auto", resume_changes="momentun")()
    refused(
        fit(folder="unused", resume_changes={"lr"}),
        "resume_changes says what may differ from the checkpoint, but resume is not set. Pass "
        "resume='auto' too, or leave it out.",
    )
    refused(
        fit(folder="unused", resume="auto", resume_changes={"lr": 0.1}),
        "resume_changes must name settings that may differ from the checkpoint, such as {'lr'}, "
        "got {'lr': 0.1}. Leave it out if nothing may differ.",
    )


@pytest.mark.long
def test_the_checkpoint_says_how_the_run_was_configured(tmp_path):
    run(tmp_path / "run", 1)
    text = (tmp_path / "run" / "update-000000005-epoch" / "state.json").read_text()
    begin = json.loads(text)["configuration"]["begin"]
    assert begin["hyperparameters"][0]["lr"] == 0.1
    assert begin["modules"]["layers.2"]["p"] == 0.0
    assert begin["loss"]["name"] == "cross_entropy"


@pytest.mark.long("ipu-standin")
def test_a_schedule_that_has_begun_is_not_moved(tmp_path):
    """Its next values would not be those of a run with the new rate."""
    change = SCHEDULES["StepLR by updates"](0.1)
    model = run(tmp_path / "run", 1, change)
    for group in model.optimizer.param_groups:
        group["initial_lr"] = 0.2
    refused(
        lambda: model.fit(
            **FIT,
            epochs=2,
            checkpoint=ipufit.Checkpoint(tmp_path / "run", resume="auto", resume_changes={"lr"}),
        ),
        "a run can continue with another lr or lr_scheduler if StepLR is unused and counts updates "
        "or epochs, but it has made 5 updates and 1 epochs, and counts by 1. Call compile again "
        "before fit, or start a new run in another folder.",
    )
