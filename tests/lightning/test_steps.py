"""Steps, hooks and data of a LightningModule, called as Lightning calls them; else refused."""

import re

import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler

import ipufit
from ipufit.errors import (
    CaptureError,
    ConfigurationError,
    IpufitError,
    LossError,
    UnknownArgumentError,
)
from ipufit.lightning_module.inspection import _MODULE
from tests.lightning.twins import (
    Classifier,
    by_lightning,
    ipufit_of,
    largest_difference,
    loader,
    pl,
    rows,
    twins,
)

X, Y = rows(20, 6)
BATCHES = loader(X, Y, batch_size=4)

HOOKS = [
    *("prepare_data", "configure_model", "on_fit_start", "on_train_start"),
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_fit_end"),
    *(
        f"on_{stage}_{when}"
        for stage in ("validation", "test", "predict")
        for when in ("start", "epoch_start", "epoch_end", "end")
    ),
]
CALLS = []


def noting(name):
    return lambda self, **arguments: CALLS.append((name, *arguments.values()))


Noted = type("Noted", (Classifier,), {name: noting(name) for name in [*HOOKS, "setup", "teardown"]})


class Data(pl.LightningDataModule):
    """Notes what is called."""

    def prepare_data(self):
        CALLS.append(("data: prepare",))

    def setup(self, stage):
        CALLS.append(("data: setup", stage))
        self.rows = loader(X, Y, batch_size=4)

    def teardown(self, stage):
        CALLS.append(("data: teardown", stage))

    def train_dataloader(self):
        return self.rows

    def val_dataloader(self):
        return [loader(X[:10], Y[:10], batch_size=5)]

    test_dataloader = predict_dataloader = train_dataloader


def called(run):
    """What was called in a run."""
    CALLS.clear()
    run()
    return list(CALLS)


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_hooks_and_data_are_called_as_by_lightning(call):
    """The same names in the same order, with the same stages, for module and data."""
    one, two = twins(Noted())
    model = ipufit_of(two)
    ours = {"fit": model.fit, "validate": model.evaluate, "test": model.test}
    ours["predict"] = model.predict
    more = {"epochs": 2} if call == "fit" else {}
    theirs = {"max_epochs": 2} if call == "fit" else {}
    expected = called(lambda: by_lightning(one, call, Data(), **theirs))
    assert called(lambda: ours[call](datamodule=Data(), verbose=0, **more)) == expected


def test_a_data_module_gives_the_same_weights_and_predictions():
    """As x or by its name."""
    one, two = twins(Classifier())
    by_lightning(one, "fit", Data(), max_epochs=2)
    model = ipufit_of(two)
    history = model.fit(Data(), epochs=2, verbose=0)
    assert largest_difference(one, two) < 1e-10
    assert "val_loss" in history.history
    _, expected = by_lightning(one, "predict", Data())
    found = model.predict(datamodule=Data(), verbose=0)
    assert torch.allclose(found, torch.cat(expected), rtol=1e-10)


@pytest.mark.parametrize("device_iterations", [1, 2])
def test_predictions_are_those_of_predict_step(device_iterations):
    """All rows in order; piece by piece and for one batch too, trained or not."""
    model = ipufit_of(Classifier())
    expected = model.lightning(X).softmax(1)
    found = model.predict(BATCHES, device_iterations=device_iterations, verbose=0)
    assert torch.allclose(found, expected, rtol=1e-12)
    pieces = list(model.predict_iter(BATCHES, device_iterations=device_iterations))
    assert torch.equal(torch.cat(pieces), found)
    assert torch.allclose(model.predict_on_batch([X[:4], Y[:4]]), expected[:4], rtol=1e-12)


def test_without_a_step_of_its_own_predict_calls_forward():
    """Lightning's default."""

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 2).double()

        def forward(self, inputs):
            return self.layer(inputs)

    net = Net()
    found = ipufit_of(net).predict(torch.utils.data.DataLoader(X, batch_size=4), verbose=0)
    assert torch.allclose(found, net(X), rtol=1e-12)


def test_single_batches_use_the_steps_too():
    """train_on_batch the training step, test_on_batch that of validation."""
    one, two = twins(Classifier())
    model = ipufit_of(two)
    before = model.test_on_batch([X, Y])
    assert list(before) == ["val_loss", "val_accuracy"]
    model.train_on_batch([X, Y])
    optimizer = one.configure_optimizers()
    F.cross_entropy(one(X), Y).backward()
    optimizer.step()
    assert largest_difference(one, two) < 1e-10


def test_the_module_is_the_users_own():
    """Weights, train mode, attributes and what isinstance says of it."""
    net = Classifier()
    model = ipufit_of(net)
    model.fit(BATCHES, verbose=0)
    assert model.lightning is net
    assert list(model.module.state_dict()) == list(net.state_dict())
    assert type(model.module).__name__ == "Classifier"
    assert net.training
    assert "log" not in vars(net)
    assert net._trainer is None


def test_training_goes_on_and_is_interrupted_as_ever(tmp_path):
    """A checkpoint of the middle ends with the same bits."""
    whole, parted, resumed = (ipufit_of(Classifier()) for _ in range(3))
    whole.fit(BATCHES, epochs=4, seed=0, verbose=0)
    parted.fit(BATCHES, epochs=2, seed=0, checkpoint=tmp_path, verbose=0)
    resumed.fit(
        BATCHES, epochs=4, seed=0, checkpoint=ipufit.Checkpoint(tmp_path, resume="auto"), verbose=0
    )
    for name, value in whole.lightning.state_dict().items():
        assert torch.equal(value, resumed.lightning.state_dict()[name])


def test_hooks_see_the_run_and_can_end_it():
    """What self.trainer has outside of steps is true; should_stop ends training."""
    seen = []

    class Net(Classifier):
        def on_train_epoch_end(self):
            logged = self.trainer.callback_metrics["train_loss"]
            seen.append((self.current_epoch, self.global_step, self.trainer.max_epochs, logged))
            if self.current_epoch == 1:
                self.trainer.should_stop = True

    history = ipufit_of(Net()).fit(BATCHES, epochs=5, verbose=0)
    losses = history.history["train_loss"]
    assert seen == [(0, 5, 5, losses[0]), (1, 10, 5, losses[1])]
    assert history.epoch == [0, 1]


def momentum_and_steps(parameters):
    """Descent whose rate is halved after every epoch."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Reads(Classifier):
    """Looks at optimizer, state and schedule before and after every epoch."""

    def look(self):
        optimizer = self.optimizers()
        assert self.trainer.optimizers[0].param_groups is optimizer.param_groups
        state = [each["momentum_buffer"] for each in optimizer.state.values()]
        size = sum(float(each.abs().sum()) for each in state)
        self.seen.append((optimizer.param_groups[0]["lr"], size))
        self.seen.append(tuple(self.lr_schedulers().get_last_lr()))

    def on_train_epoch_start(self):
        self.seen = getattr(self, "seen", [])
        self.look()

    on_train_epoch_end = look


class Writes(Classifier):
    """Changes settings, also of groups, after the first epoch."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.optimizers(use_pl_optimizer=False).param_groups[0]["momentum"] = 0.5
            for group in self.trainer.optimizers[0].param_groups:
                group["weight_decay"] = 0.01


class Unfreezes(Classifier):
    """Trains its first layer from the second epoch on, as a finetuning callback has it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            group = {"params": list(self.net[0].parameters()), "lr": 0.05}
            self.optimizers().add_param_group(group)


@pytest.mark.parametrize("kind", [Reads, Writes, Unfreezes])
def test_hooks_reach_optimizer_and_schedule(kind):
    """What they read is what Lightning shows there, and what they change counts as there."""
    one, two = kind(momentum_and_steps), kind(momentum_and_steps)
    by_lightning(one, "fit", BATCHES, max_epochs=3)
    ipufit_of(two).fit(BATCHES, epochs=3, verbose=0)
    assert largest_difference(one, two) < 1e-12
    assert getattr(two, "seen", []) == [
        pytest.approx(each, rel=1e-9) for each in getattr(one, "seen", [])
    ]


def test_hooks_see_what_there_is_no_optimizer_or_scheduler_of():
    """As in Lightning: no optimizer where nothing is trained, no scheduler where there is none."""
    seen = []

    class Net(Classifier):
        def on_validation_start(self):
            seen.append((self.optimizers(), self.trainer.optimizers))

        def on_train_start(self):
            seen.append(self.lr_schedulers())

    ipufit_of(Net()).fit(BATCHES, verbose=0)
    model = ipufit_of(Net())
    model.compile_to_infer()
    model.evaluate(BATCHES, verbose=0)
    assert seen == [None, ([], [])]


def with_method(name, method):
    """An object of a class that overrides one method."""
    return type("Net", (Classifier,), {name: method})()


@pytest.mark.parametrize("name", sorted(_MODULE))
def test_a_hook_that_no_program_calls_is_refused(name):
    """By its name and with what to do, when the model is made."""
    with pytest.raises(ConfigurationError, match=rf"^Net\.{name} can't be called\. \S.*\.$"):
        ipufit_of(with_method(name, lambda self, *_: None))


def test_the_refusal_of_a_hook_says_what_to_do():
    """One of each kind, in full; all of them together."""

    class Net(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

        def configure_gradient_clipping(self, optimizer, *_):
            pass

    with pytest.raises(ConfigurationError) as caught:
        ipufit_of(Net())
    assert "Net.on_train_batch_end can't be called. Your Python does not run" in str(caught.value)
    assert (
        "Net.configure_gradient_clipping can't be called. The program computes the gradients and "
        "applies them itself. Pass clip=ipufit.Clip(...) to compile."
    ) in str(caught.value)


def test_every_hook_of_lightning_is_called_or_refused():
    """A hook of Lightning's that is in neither list would be ignored."""
    hooks = {
        name
        for kind in pl.LightningModule.__mro__
        if kind.__name__ in ("ModelHooks", "DataHooks", "LightningModule")
        for name in vars(kind)
        if name.startswith("on_") and callable(getattr(kind, name))
    }
    used = {*HOOKS, "on_after_batch_transfer"}
    assert hooks - used - set(_MODULE) == set()


@pytest.mark.parametrize("argument", ["dataloader_iter", "optimizer_idx", "hiddens"])
def test_other_arguments_of_training_step_are_refused(argument):
    """They belong to other ways of training."""
    method = eval(f"lambda self, batch, {argument}: None")
    with pytest.raises(ConfigurationError, match=rf"batch_idx\), got '{argument}'\. \S"):
        ipufit_of(with_method("training_step", method))


def test_other_objects_are_refused():
    """A plain module has Model itself."""
    with pytest.raises(ConfigurationError) as caught:
        ipufit_of(torch.nn.Linear(2, 2))
    assert str(caught.value) == (
        "from_lightning takes a LightningModule object, of lightning.pytorch or "
        "pytorch_lightning, got Linear. Pass any other module to ipufit.Model(module)."
    )


USES = {
    "batch_idx % 2": "batch_idx was used",
    "batch_idx == 0": "batch_idx was used",
    "[0, 1][batch_idx]": "batch_idx was used",
    "f'{batch_idx}'": "batch_idx was used",
    "not batch_idx": "batch_idx was used",
    "self.current_epoch > 3": "self.current_epoch was read inside a step",
    "self.global_step": "self.global_step was read inside a step",
    "self.global_rank": "self.global_rank was read inside a step",
    "self.logger.experiment": "self.logger was read inside a step",
    "self.trainer.callback_metrics": "self.trainer.callback_metrics was read inside a step",
    "self.optimizers()": "self.trainer.strategy was read inside a step",
    "self.lr_schedulers()": "self.trainer.lr_scheduler_configs was read inside a step",
}


@pytest.mark.parametrize("use", USES)
def test_what_would_become_a_constant_is_refused(use):
    """The step is recorded once; the error names the line."""
    namespace = {"F": F}
    code = (
        "def training_step(self, batch, batch_idx):\n"
        f"    {use}\n"
        "    return F.cross_entropy(self(batch[0]), batch[1])\n"
    )
    exec(compile(code, "user_module.py", "exec"), namespace)
    net = with_method("training_step", namespace["training_step"])
    with pytest.raises(CaptureError, match=f"^{re.escape(USES[use])}.*user_module.py:2 in ") as e:
        ipufit_of(net).fit(BATCHES, verbose=0)
    assert e.value.line == 2


def test_batch_idx_may_be_passed_on_and_the_stage_may_be_read():
    """Neither is a constant that could be wrong."""

    class Net(Classifier):
        def shared(self, batch, batch_idx):
            assert not self.trainer.sanity_checking
            return self.step(batch, "train" if self.trainer.training else "val")

        training_step = validation_step = shared

    history = ipufit_of(Net()).fit(BATCHES, validation_data=BATCHES, verbose=0).history
    assert {"train_loss", "val_loss"} < set(history)


def test_a_list_that_a_step_adds_to_is_refused():
    """It would hold tensors of the recording."""

    class Net(Classifier):
        def __init__(self):
            super().__init__()
            self.losses = []

        def training_step(self, batch, batch_idx):
            self.losses.append(super().training_step(batch, batch_idx))
            return self.losses[-1]

    with pytest.raises(CaptureError) as caught:
        ipufit_of(Net()).fit(BATCHES, verbose=0)
    assert str(caught.value) == (
        "training_step adds to self.losses, but it is recorded once, so self.losses would hold one "
        "batch's tensors without values. Log what you need with self.log, or keep it in a buffer."
    )


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (
            "None",
            "training_step must return a loss, got None: a recorded program can't skip a batch. "
            "Return the loss times zero instead.",
        ),
        (
            "{'logits': self(batch[0])}",
            "training_step must return a loss, or a dict with 'loss', got a dict of 'logits'. "
            "Return for example {'loss': loss}.",
        ),
        (
            "self(batch[0]).sum(1)",
            "training_step must return a loss of one number, got one of shape (4,). Return for "
            "example loss.mean().",
        ),
    ],
)
def test_a_training_step_without_a_loss_is_refused(result, text):
    """Before any update."""
    method = eval(f"lambda self, batch, batch_idx: {result}")
    with pytest.raises(LossError) as caught:
        ipufit_of(with_method("training_step", method)).fit(BATCHES, verbose=0)
    assert str(caught.value) == text


def sgd(self):
    return torch.optim.SGD(self.parameters(), lr=0.1)


def scheduled(**config):
    """configure_optimizers with this dict around a scheduler."""

    def configure(self):
        optimizer = sgd(self)
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        if config.pop("plateau", False):
            scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, **config}]

    return configure


@pytest.mark.parametrize(
    ("configure", "text"),
    [
        (
            lambda self: [sgd(self), sgd(self)],
            "configure_optimizers must return one optimizer, got 2",
        ),
        (
            lambda self: ({"optimizer": sgd(self)}, {"optimizer": sgd(self)}),
            "configure_optimizers must return one optimizer, got 2",
        ),
        (lambda self: "adam", "configure_optimizers returned str, which is not an accepted form"),
        (lambda self: {"optim": 1}, "may return a dict with 'optimizer', .* got 'optim'"),
        (scheduled(interval="batch"), "must be 'step' or 'epoch', got 'batch'"),
        (scheduled(frequency=0), "must be an integer of at least 1, got 0"),
        (scheduled(plateau=True), "ReduceLROnPlateau must have a monitor, got none"),
        (
            scheduled(plateau=True, monitor="val_loss", interval="step"),
            "ReduceLROnPlateau must have interval 'epoch', got 'step'",
        ),
        (scheduled(strict=False), "must have strict=True, got False"),
        (scheduled(reduce_on_plateau=True), "reduce_on_plateau must say whether"),
        (scheduled(gamma=2), "the dict of a scheduler must have 'scheduler'"),
        (
            lambda self: ([sgd(self)], [1, 2]),
            "configure_optimizers must return one scheduler, got 2",
        ),
    ],
)
def test_optimizers_that_a_program_can_not_have_are_refused(configure, text):
    """Before training, with what to write instead."""
    model = ipufit_of(with_method("configure_optimizers", configure))
    with pytest.raises(ConfigurationError, match=text):
        model.fit(BATCHES, validation_data=BATCHES, verbose=0)


def test_compile_refuses_what_the_module_says():
    """Loss and metrics are the steps' own; a schedule comes with its optimizer."""
    model = ipufit_of(Classifier())
    for name in ("loss", "metrics"):
        with pytest.raises(ConfigurationError, match=f"{name} must be None: the steps"):
            model.compile(**{name: "mse"})
    with pytest.raises(ConfigurationError, match="lr_scheduler needs an optimizer"):
        model.compile(lr_scheduler=lambda update: 0.1)
    model.compile("sgd", lr_scheduler=lambda update: 0.0)
    before = [p.clone() for p in model.lightning.parameters()]
    model.fit(BATCHES, verbose=0)
    assert all(map(torch.equal, before, model.lightning.parameters()))


def test_what_only_fit_knows_waits_for_fit():
    """Where nobody will know it, the error says what is known."""

    class Net(Classifier):
        def configure_optimizers(self):
            self.seen = self.trainer.estimated_stepping_batches
            return sgd(self)

    model = ipufit_of(Net())
    model.compile(clip=ipufit.Clip(global_norm=1.0))
    model.evaluate(BATCHES, verbose=0)
    model.fit(BATCHES, epochs=3, gradient_accumulation=2, verbose=0)
    assert model.lightning.seen == 9
    with pytest.raises(ConfigurationError) as caught:
        ipufit_of(Net()).fit(BATCHES, steps_per_epoch=2, verbose=0)
    assert str(caught.value) == (
        "there is no Trainer, so self.trainer has only what ipufit knows about the run "
        "(max_epochs), not 'estimated_stepping_batches'. Pass it to the module's __init__ instead."
    )


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            lambda m: m.fit(verbose=0),
            "neither x nor datamodule was passed, and Classifier has no train_",
        ),
        (lambda m: m.fit(BATCHES, datamodule=Data()), "x and datamodule both define the data"),
        (lambda m: m.fit(datamodule=[1]), "must be a LightningDataModule object, got list"),
    ],
)
def test_data_must_be_said_once(run, text):
    """Neither silently nothing nor one of two."""
    with pytest.raises(ConfigurationError, match=text):
        run(ipufit_of(Classifier()))


def test_several_loaders_and_hooks_of_data_modules_are_refused():
    """With the way out."""

    class Two(Data):
        def val_dataloader(self):
            return [BATCHES, BATCHES]

    class Moves(Data):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch

    with pytest.raises(ConfigurationError, match=r"Two\.val_dataloader must return one loader"):
        ipufit_of(Classifier()).fit(Two(), verbose=0)
    with pytest.raises(ConfigurationError, match=r"Moves\.on_before_batch_transfer can't be"):
        ipufit_of(Classifier()).fit(Moves(), verbose=0)


def test_a_missing_step_is_named():
    """Lightning's own default does nothing."""

    class Net(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(6, 3).double()

        def training_step(self, batch):
            return self.layer(batch[0]).sum()

        def configure_optimizers(self):
            return sgd(self)

    model = ipufit_of(Net())
    model.fit(Data(), verbose=0)  # no validation_step, no validation
    for run in (model.evaluate, model.test):
        with pytest.raises(ConfigurationError, match=r"Net has no (validation|test)_step"):
            run(BATCHES)
    with pytest.raises(ConfigurationError, match="Net has no validation_step"):
        model.fit(BATCHES, validation_data=BATCHES, verbose=0)


def test_hooks_of_checkpoints_are_refused_where_there_are_some(tmp_path):
    """ipufit's checkpoints hold tensors, and nothing that they add."""
    net = with_method("on_save_checkpoint", lambda self, checkpoint: None)
    model = ipufit_of(net)
    model.fit(BATCHES, verbose=0)
    with pytest.raises(ConfigurationError, match=r"Net\.on_save_checkpoint can't be called"):
        model.fit(BATCHES, checkpoint=tmp_path, verbose=0)

    class Counted(Data):
        def state_dict(self):
            return {"rows": 3}

    model = ipufit_of(Classifier())
    model.fit(Counted(), verbose=0)
    with pytest.raises(ConfigurationError, match=r"^Counted\.state_dict can't be called"):
        model.fit(Counted(), checkpoint=tmp_path, verbose=0)


@pytest.mark.parametrize("call", ["fit", "predict"])
def test_a_data_module_hears_of_an_error_as_by_lightning(call):
    """Once, with the error itself, so that it can close what it has opened."""
    heard = []

    class Failing(Data):
        def train_dataloader(self):
            raise OSError("no disk")

        predict_dataloader = train_dataloader

        def on_exception(self, exception):
            heard.append(exception)

    one, two = twins(Classifier())
    with pytest.raises(OSError, match="no disk"):
        by_lightning(one, call, Failing())
    (theirs,) = heard
    heard.clear()
    with pytest.raises(OSError, match="no disk"):
        getattr(ipufit_of(two), call)(Failing(), verbose=0)
    (ours,) = heard
    assert type(ours) is type(theirs)


def test_a_model_that_is_only_evaluated_needs_no_optimizer():
    """Whatever configure_optimizers asks for."""
    net = with_method("configure_optimizers", lambda self: None)
    model = ipufit_of(net)
    assert "val_loss" in model.evaluate(BATCHES, verbose=0)
    with pytest.raises(ConfigurationError, match="fit needs an optimizer"):
        model.fit(BATCHES, verbose=0)


@pytest.mark.long
def test_lightning_is_not_imported():
    """from_lightning looks at the module's own classes."""
    import subprocess
    import sys

    code = (
        "import sys, ipufit, ipufit.lightning_module\n"
        "print(sorted(n for n in sys.modules if n.partition('.')[0] in "
        "('lightning', 'pytorch_lightning', 'lightning_fabric')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert ipufit.Model.from_lightning.__doc__


def test_what_looks_at_a_model_knows_its_steps(capsys):
    """A batch is one argument of a step, before compile too."""
    assert not ipufit_of(Classifier()).check([X[:4], Y[:4]])
    ipufit_of(Classifier()).summary([X[:4], Y[:4]])
    assert "net.2  Linear      (4, 3)" in capsys.readouterr().out
    assert ipufit_of(Classifier()).check_invariance([X[:8], Y[:8]]).ok


def test_a_second_fit_needs_no_new_recording():
    """Whether a Trainer had the module before or not."""
    net = Classifier()
    by_lightning(net, "fit", BATCHES, max_epochs=1)
    model = ipufit_of(net)
    for _ in range(2):
        model.fit(BATCHES, validation_data=BATCHES, verbose=0)
        assert model._session.engine.captures == 2


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        (
            lambda model: model.fit(BATCHES, max_epochs=2, epochs=0, ipus=3),
            ["fit has no argument 'max_epochs'. Write epochs=3", "epochs must be", "`ipus`, the"],
        ),
        (lambda model: model.fit(X, Y, 4, 1, 0), ["fit takes (x, y, batch_size, epochs) by pos"]),
        (
            lambda model: model.evaluate(BATCHES, max_steps=1, steps=0),
            ["evaluate has no argument 'max_steps'", "steps must be"],
        ),
        (
            lambda model: model.test(BATCHES, dataloaders=BATCHES, steps=0),
            ["test has no argument 'dataloaders'", "steps must be"],
        ),
        (
            lambda model: model.predict(BATCHES, nonsense=1, steps=0),
            ["predict has no argument 'nonsense'", "steps must be"],
        ),
        (
            lambda model: model.compile(loss="mse", metrics=["mae"], max_epochs=1),
            ["compile has no argument 'max_epochs'", "loss must be None", "metrics must be None"],
        ),
    ],
    ids=["fit", "by position", "evaluate", "test", "predict", "compile"],
)
def test_wrong_names_and_values_are_one_error(call, lines):
    """As those of a Model; nothing is trained."""
    module = Classifier()
    weights = [weight.clone() for weight in module.parameters()]
    with pytest.raises(UnknownArgumentError) as caught:
        call(ipufit.Model.from_lightning(module))
    texts = str(caught.value).split("\n")
    assert len(texts) == len(lines), texts
    for text, line in zip(texts, lines):
        assert line in text
    assert all(map(torch.equal, weights, module.parameters()))


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda model, data: model.fit(datamodule=data, epochs=0, max_time=1), "epochs must be"),
        (lambda model, data: model.fit(data, batch_size=4), "already comes in batches"),
        (lambda model, data: model.fit(data, ipus=0), "`ipus`, the total number of IPUs, must be"),
        (lambda model, data: model.fit(data, callbacks=[1]), "callbacks must be"),
        (lambda model, data: model.fit(BATCHES, verbose=7), "verbose must be"),
        (lambda model, data: model.fit(BATCHES, validation_data=BATCHES, seed="a"), "seed must be"),
        (lambda model, data: model.evaluate(datamodule=data, steps=0), "steps must be"),
        (lambda model, data: model.evaluate(data, return_dict=1), "return_dict must be"),
        (lambda model, data: model.test(data, nothing=0), "no argument 'nothing'"),
        (lambda model, data: model.predict(data, padding_value="a"), "padding_value must be"),
    ],
)
@pytest.mark.parametrize("compiles", [True, False])
def test_wrong_arguments_are_told_before_setup(call, line, compiles):
    """What prepares data may take an hour; a right call sets up as ever afterwards."""
    CALLS.clear()
    model = ipufit.Model.from_lightning(Noted())
    if compiles:
        model.compile()
    with pytest.raises(IpufitError) as caught:
        call(model, Data())
    assert line in str(caught.value)
    assert not any("setup" in name or "prepare" in name for name, *_ in CALLS)
    model.fit(datamodule=Data(), verbose=0)
    assert [name for name, *_ in CALLS if "setup" in name] == ["data: setup", "setup"]


def test_limits_of_data_that_setup_makes_are_checked_with_it():
    """A fraction is one of batches that nobody knows before."""
    model = ipufit.Model.from_lightning(Noted())
    loading = ipufit.Loading(limit_train_batches=0.5)
    history = model.fit(datamodule=Data(), loading=loading, verbose=0)
    assert history.params["limit_train_batches"] == 2  # of 5
