"""A Trainer with accelerator "ipu" and IPUStrategy ends where the same Trainer on the CPU does."""

import functools
import json
import subprocess
import sys
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

import ipufit
from ipufit import poptorch
from ipufit.errors import CaptureError, ConfigurationError
from ipufit.poptorch._precision import keep_float64
from ipufit.report.advice import advised
from ipufit.utils.phase_timer import PHASES
from tests.lightning.nets import Boring, Language, Pictures, Tokens
from tests.lightning.twins import (
    QUIET,
    Classifier,
    by_lightning,
    largest_difference,
    loader,
    pl,
    rows,
    twins,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from ipufit.lightning import IPUAccelerator, IPUStrategy

TOLERANCE = 1e-10  # float64, other orders of summation

X, Y = rows(22, 6)
BATCHES = loader(X, Y, batch_size=4)


@pytest.fixture(autouse=True)
def _wide():
    """The stand-in computes in float64; Lightning keeps what is logged in the default dtype."""
    torch.set_default_dtype(torch.float64)
    with keep_float64():
        yield
    torch.set_default_dtype(torch.float32)


def by_ipufit(module, call, *data, devices=1, strategy=None, **options):
    """The same with ipufit's accelerator and strategy."""
    strategy = strategy or IPUStrategy()
    ours = {"accelerator": "ipu", "devices": devices, "strategy": strategy}
    return by_lightning(module, call, *data, **{**options, **ours})


def assert_same_metrics(one, two):
    """What callbacks of both Trainers see."""
    found = {name: value.item() for name, value in two.callback_metrics.items()}
    expected = {name: value.item() for name, value in one.callback_metrics.items()}
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
@pytest.mark.parametrize("device_iterations", [1, 3])
def test_a_net_with_batch_norm_ends_with_the_weights_of_the_cpu(engine, device_iterations):
    """A schedule of as many steps as there are updates; clipping; a smaller last batch."""
    one, two = twins(Pictures())
    x, y = rows(30, 16)
    data = loader(x, y, batch_size=4), loader(x[:10], y[:10], batch_size=4)
    how = {"max_epochs": 2, "gradient_clip_val": 0.5, "num_sanity_val_steps": 1}
    expected, _ = by_lightning(one, "fit", *data, **how)
    strategy = IPUStrategy(device_iterations=device_iterations, engine=engine)
    trainer, _ = by_ipufit(two, "fit", *data, strategy=strategy, **how)
    assert largest_difference(one, two) < TOLERANCE
    found = {n: v for n, v in trainer.callback_metrics.items() if n != "train_loss"}
    for name, value in found.items():
        assert value.item() == pytest.approx(expected.callback_metrics[name].item(), rel=1e-10)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_transformer_with_accumulation_does(devices):
    """Accumulated, or on as many replicas."""
    one, two = twins(Language())
    data = torch.utils.data.DataLoader(Tokens(24), batch_size=3)
    how = {"max_epochs": 2, "gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}
    by_lightning(one, "fit", data, accumulate_grad_batches=2, **how)
    strategy = IPUStrategy(device_iterations=2)
    accumulation = {"accumulate_grad_batches": 2 // devices}
    trainer, _ = by_ipufit(
        two, "fit", data, devices=devices, strategy=strategy, **accumulation, **how
    )
    assert largest_difference(one, two) < TOLERANCE
    assert trainer.global_step == 4  # executions, of two updates each
    assert trainer.accumulate_grad_batches == 2 // devices


def test_a_schedule_per_epoch_and_loaders_of_the_module_do():
    """As in Lightning's own tests."""
    one, two = twins(Boring())
    by_lightning(one, "fit", max_epochs=3)
    by_ipufit(two, "fit", max_epochs=3, strategy=IPUStrategy(device_iterations=5))
    assert largest_difference(one, two) < TOLERANCE


def plateau(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_accuracy"}


def test_a_plateau_watches_the_metrics_of_the_trainer():
    """Those of the epoch that ended, its validation included."""
    one, two = twins(Classifier(plateau))
    expected, _ = by_lightning(one, "fit", BATCHES, BATCHES, max_epochs=5)
    trainer, _ = by_ipufit(two, "fit", BATCHES, BATCHES, max_epochs=5)
    assert largest_difference(one, two) < TOLERANCE
    assert_same_metrics(expected, trainer)


def closures(parameters):
    options = {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    return torch.optim.LBFGS(parameters, **options)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("device_iterations", [1, 3])
def test_lbfgs_ends_with_the_weights_of_the_cpu(device_iterations, clip):
    """Lightning calls it with a closure of training_step; the program evaluates within an update.

    What is logged is the loss before the update, in Lightning that of the last evaluation.
    """
    one, two = twins(Classifier(closures))
    by_lightning(one, "fit", BATCHES, max_epochs=2, gradient_clip_val=clip)
    strategy = IPUStrategy(device_iterations=device_iterations)
    trainer, _ = by_ipufit(
        two, "fit", BATCHES, max_epochs=2, gradient_clip_val=clip, strategy=strategy
    )
    assert largest_difference(one, two) < TOLERANCE
    assert trainer.global_step == 2 * -(-6 // device_iterations)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("device_iterations", [1, 4])
def test_evaluations_and_predictions_are_those_of_the_cpu(devices, device_iterations):
    """All samples, each once, in order."""
    make = functools.partial(IPUStrategy, device_iterations=device_iterations)
    net = Classifier()
    for call in ("validate", "test"):
        _, (expected,) = by_lightning(net, call, BATCHES)
        _, (found,) = by_ipufit(net, call, BATCHES, devices=devices, strategy=make())
        assert found == pytest.approx(expected, rel=1e-12)
    _, found = by_ipufit(net, "predict", BATCHES, devices=devices, strategy=make())
    assert torch.allclose(torch.cat(found), net(X).softmax(1), rtol=1e-12)


def test_every_step_is_recorded_once():
    """However many epochs, validations and executions there are."""
    calls = []

    class Net(Classifier):
        def forward(self, inputs):
            calls.append((self.training, len(inputs)))
            return super().forward(inputs)

    by_ipufit(Net(), "fit", BATCHES, BATCHES, max_epochs=3, strategy=IPUStrategy(None, 2))
    assert sorted(calls) == [(False, 2), (False, 4), (True, 2), (True, 4)]


def test_hooks_and_callbacks_of_the_trainer_are_called_for_every_execution():
    """Also those of a batch, which is then the list of an execution's batches."""
    seen = []

    class Net(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append((batch_idx, len(batch), outputs["loss"].item()))

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(trainer.callback_metrics["train_loss"].item())

    by_ipufit(Net(), "fit", BATCHES, max_epochs=1, callbacks=Watch(), strategy=IPUStrategy(None, 4))
    assert [entry[:2] for entry in seen[:2]] == [(0, 4), (1, 2)]
    mean = (seen[0][2] * 16 + seen[1][2] * 6) / 22
    assert seen[2] == pytest.approx(mean, rel=1e-12)


def test_options_of_poptorch_say_how_much_an_execution_does():
    """Where the Trainer says nothing."""
    options = poptorch.Options()
    options.replicationFactor(2).deviceIterations(2)
    options.Training.gradientAccumulation(1)
    one, two = twins(Language())
    data = torch.utils.data.DataLoader(Tokens(24), batch_size=3)
    by_lightning(one, "fit", data, max_epochs=1, accumulate_grad_batches=2)
    trainer, _ = by_ipufit(
        two, "fit", data, max_epochs=1, strategy=IPUStrategy(training_opts=options)
    )
    assert largest_difference(one, two) < TOLERANCE
    assert trainer.global_step == 2


def warned(module, data, *, strategy, **how):
    """Train, and validate; what of the options was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(**{**QUIET, **how, "accelerator": "ipu", "strategy": strategy})
        trainer.fit(module, data, data)
    texts = [str(each.message) for each in caught]
    return trainer, [text for text in texts if "_opts" in text]


def plain_options(replicas=1, iterations=2, accumulation=1):
    options = poptorch.Options().replicationFactor(replicas).deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    return options


ENGINES = pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])


@ENGINES
def test_a_trainer_fills_in_what_options_leave_at_its_default(engine):
    """One object for both, as on Lightning's pages; it stays as it is."""
    one, two = twins(Language())
    data = torch.utils.data.DataLoader(Tokens(24), batch_size=3)
    by_lightning(one, "fit", data, max_epochs=1, accumulate_grad_batches=4)
    options = plain_options()
    strategy = IPUStrategy(training_opts=options, inference_opts=options, engine=engine)
    how = {"devices": 2, "accumulate_grad_batches": 2, "max_epochs": 1}
    trainer, texts = warned(two, data, strategy=strategy, **how)
    assert largest_difference(one, two) < TOLERANCE
    assert (trainer.global_step, texts) == (1, [])
    assert (options.replication_factor, options.Training.gradient_accumulation) == (1, 1)


@ENGINES
def test_a_trainer_counts_where_options_were_set_otherwise(engine):
    """Once for each, with both numbers."""
    one, two = twins(Language())
    data = torch.utils.data.DataLoader(Tokens(24), batch_size=3)
    by_lightning(one, "fit", data, max_epochs=1, accumulate_grad_batches=4)
    strategy = IPUStrategy(
        training_opts=plain_options(4, 1, 3), inference_opts=plain_options(1, 4, 3), engine=engine
    )
    how = {"devices": 2, "accumulate_grad_batches": 2, "max_epochs": 1}
    trainer, texts = warned(two, data, strategy=strategy, **how)
    assert largest_difference(one, two) < TOLERANCE
    assert trainer.global_step == 2
    assert texts == [
        "training_opts.replicationFactor is 4, but the Trainer has devices=2, which takes "
        "precedence. Leave one out.",
        "training_opts.Training.gradientAccumulation is 3, but the Trainer has "
        "accumulate_grad_batches=2, which takes precedence. Leave one out.",
        "inference_opts.Training.gradientAccumulation is 3, but nothing is accumulated in "
        "inference, where it counts as 1. Leave it out there.",
    ]


def test_device_iterations_of_strategy_and_options_must_agree():
    data = torch.utils.data.DataLoader(Tokens(24), batch_size=3)
    for name in ("training_opts", "inference_opts"):
        strategy = IPUStrategy(device_iterations=4, **{name: plain_options(iterations=2)})
        with pytest.raises(ConfigurationError) as caught:
            by_ipufit(Language(), "fit", data, max_epochs=1, strategy=strategy)
        assert str(caught.value) == (
            f"device_iterations is set twice: IPUStrategy has 4 and {name} have 2. Leave one out."
        )
        for cured in (
            IPUStrategy(device_iterations=4, **{name: plain_options(iterations=1)}),
            IPUStrategy(**{name: plain_options(iterations=2)}),
        ):
            by_ipufit(Language(), "fit", data, max_epochs=1, strategy=cured)


def test_weights_of_a_checkpoint_are_the_trained_ones(tmp_path):
    """Written in the middle; going on from it is refused, evaluating is not."""
    net = Classifier()
    how = {"max_epochs": 2, "enable_checkpointing": True, "default_root_dir": tmp_path}
    trainer, _ = by_ipufit(net, "fit", BATCHES, BATCHES, **how)
    path = trainer.checkpoint_callback.best_model_path
    saved = torch.load(path, weights_only=True)
    for name, value in net.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value)
    with pytest.raises(ConfigurationError) as caught:
        by_ipufit(net, "fit", BATCHES, None, None, path, max_epochs=3)
    assert str(caught.value) == (
        "IPUStrategy can't resume from a checkpoint of the Trainer, because it does not contain "
        "the schedule. Load its weights into the module, or train with ipufit.Model.from_lightning "
        "and fit(checkpoint=...)."
    )


def test_the_name_works_where_ipufit_lightning_is_imported():
    """Without a strategy of ours nothing would be recorded, so that is refused."""
    assert pl.Trainer(accelerator="ipu", strategy="ipu_strategy", logger=False).num_devices == 1
    assert IPUAccelerator.name() == "ipu"


def test_another_strategy_is_refused():
    """It would train on the host; Lightning before 2.3 says so itself."""
    with pytest.raises((ConfigurationError, ImportError)) as caught:
        by_lightning(Classifier(), "fit", BATCHES, accelerator="ipu", devices=8, max_epochs=1)
    if isinstance(caught.value, ConfigurationError):
        assert str(caught.value) == (
            "accelerator='ipu' needs ipufit's strategy, got SingleDeviceStrategy. Pass "
            "strategy=ipufit.lightning.IPUStrategy(), or make the Trainer with "
            "ipufit.lightning.Trainer, which has it."
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device_iterations": 0}, "device_iterations must be an integer of at least 1, got 0."),
        (
            {"training_opts": 4},
            "training_opts must be poptorch.Options or None, got 4. Make them with "
            "poptorch.Options().",
        ),
        (
            {"inference_opts": {}},
            "inference_opts must be poptorch.Options or None, got {}. Make them with "
            "poptorch.Options().",
        ),
    ],
)
def test_what_a_strategy_can_not_honour_is_refused(options, text):
    """When it is made."""
    with pytest.raises(ConfigurationError) as caught:
        IPUStrategy(**options)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"devices": "all"}, "devices must be a number of replicas with accelerator='ipu', got "),
        ({"precision": "64-true"}, "precision must be one of '32-true', '16-mixed', 'bf16-mixed'"),
    ],
)
def test_what_of_a_trainer_can_not_be_honoured_is_refused(options, text):
    """Before training."""
    with pytest.raises(ConfigurationError, match=text):
        by_ipufit(Classifier(), "fit", BATCHES, max_epochs=1, **options)


def test_autoreport_has_the_profile_of_training_written(tmp_path, monkeypatch):
    """PopTorch is told of the folder; the stand-in has nothing to write there."""
    folders = []

    def noted(options, spec, size):
        folders.append((spec.mode.value, spec.profile_folder))

    monkeypatch.setattr("ipufit.engines.ipu.options.set_profile", noted)
    where = {"autoreport": True, "autoreport_dir": str(tmp_path), "engine": "ipu-standin"}
    by_ipufit(Classifier(), "fit", BATCHES, max_epochs=1, strategy=IPUStrategy(**where))
    assert set(folders) == {("train", str(tmp_path))}


def facts_of(folder):
    return json.loads((folder / "run.json").read_text())


@pytest.mark.parametrize("asked", [{}, {"autoreport": True}], ids=["folder", "folder and switch"])
def test_autoreport_on_the_embedded_engine_is_the_report_of_fit(tmp_path, asked):
    """Its numbers are those of the Trainer, its layers and program those of Model."""
    pytest.importorskip("plotly")
    where = {"autoreport_dir": str(tmp_path / "here"), **asked}
    strategy = IPUStrategy(None, 2, **where)
    one, two = twins(Classifier())
    trainer, _ = by_ipufit(one, "fit", BATCHES, BATCHES, max_epochs=2, strategy=strategy)
    assert (tmp_path / "here" / "report.html").stat().st_size > 10_000
    found = facts_of(tmp_path / "here")
    model = ipufit.Model.from_lightning(two)
    how = {"epochs": 2, "device_iterations": 2, "seed": found["params"]["seed"], "verbose": 0}
    model.fit(
        BATCHES, validation_data=BATCHES, callbacks=[ipufit.Report(tmp_path / "there")], **how
    )
    expected = facts_of(tmp_path / "there")
    for name in ("status", "title", "layers", "totals", "first_update", "total_updates"):
        assert found[name] == expected[name]
    assert found["plan"]["begins"] == expected["plan"]["begins"]
    assert found["operators"]["rows"]
    for epoch, other in zip(found["epochs"], expected["epochs"]):
        for name in ("epoch", "first_update", "executions", "updates", "samples"):
            assert epoch[name] == other[name]
        assert epoch["phases"]["compute"] > 0
        assert epoch["phases"]["data"] > 0
        assert epoch["phases"]["validation"] > 0
    values = found["history"]["history"]
    for name in ("loss", "val_loss"):
        mine, theirs = (
            [value for _, value in each["history"]["history"][name]] for each in (found, expected)
        )
        assert mine == pytest.approx(theirs, rel=1e-10)
    for name, value in trainer.callback_metrics.items():
        assert values[name][-1] == [1, pytest.approx(value.item(), rel=1e-12)]


def test_a_second_report_takes_the_place_of_the_first(tmp_path):
    """A script of Lightning's runs as often as one likes; PopVision writes over its profile too."""
    pytest.importorskip("plotly")
    make = functools.partial(IPUStrategy, autoreport_dir=str(tmp_path))
    for epochs in (2, 1):
        by_ipufit(Classifier(), "fit", BATCHES, max_epochs=epochs, strategy=make())
        assert len(facts_of(tmp_path)["epochs"]) == epochs
    by_ipufit(Classifier(), "validate", BATCHES, strategy=make())
    assert len(facts_of(tmp_path)["epochs"]) == 1


def test_a_report_of_a_training_that_fails_says_so(tmp_path):
    """With what was trained before."""
    pytest.importorskip("plotly")

    class Failing(Classifier):
        def on_train_epoch_end(self):
            if self.current_epoch == 1:
                raise OSError("no space")

    strategy = IPUStrategy(autoreport=True, autoreport_dir=str(tmp_path))
    with pytest.raises(OSError, match="no space"):
        by_ipufit(Failing(), "fit", BATCHES, max_epochs=3, strategy=strategy)
    found = facts_of(tmp_path)
    assert (found["status"], found["error"]) == ("failed", "OSError: no space")
    assert len(found["epochs"]) == 1
    assert (tmp_path / "report.html").exists()


def test_without_a_report_no_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_ipufit(Classifier(), "fit", BATCHES, max_epochs=1)
    assert list(tmp_path.iterdir()) == []


def test_the_advice_of_a_report_has_the_names_of_a_trainer():
    """It has no Loading(prefetch=) and no fit(device_iterations=)."""
    phases = {**dict.fromkeys(PHASES, 0.0), "data": 8.0, "compute": 1.0, "callbacks": 1.0}
    facts = {
        "params": {"device_iterations": 1, "trainer": True},
        "phases": {**phases, "other": 5.0},
        "seconds": 15.0,
        "history": {"epoch": [], "history": {}, "updates": {}},
    }
    rows = {name: [10.0] for name in ("executions", "skipped", "updates", "loss")}
    cures = [each["cure"] for each in advised(facts, rows)]
    assert "Give the DataLoader more workers, or make reading a sample cheaper." in cures
    cure = "Make several updates per execution: IPUStrategy(device_iterations=16). The numbers "
    assert cure + "stay the same." in cures


def test_a_number_of_updates_that_is_not_known_is_refused():
    """A schedule of another length would be silently wrong."""
    x, y = rows(30, 16)
    with pytest.raises(ConfigurationError, match="estimated_stepping_batches is known for a num"):
        by_ipufit(
            Pictures(), "fit", loader(x, y, batch_size=4), max_epochs=1, limit_train_batches=2
        )


def test_without_lightning_the_error_says_what_to_install():
    """An import that fails deep inside another library helps nobody."""
    code = (
        "import sys\n"
        "sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "try:\n"
        "    import ipufit.lightning\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "ConfigurationError ipufit.lightning needs Lightning 2.1 or newer, which is not installed. "
        "Run pip install ipufit[lightning]."
    )


class Branching(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) < 1e9 else loss * 0


class Late(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if len(batch[0]) == 4 or float(loss) < 1e9 else loss * 0


@pytest.mark.parametrize("kind", [Branching, Late])
def test_a_step_that_can_not_be_recorded_runs_itself(kind):
    """As jit="auto" of compile has it: said once, in the words of a Trainer."""
    one, two = twins(kind())
    by_lightning(one, "fit", BATCHES, max_epochs=2, accelerator="cpu")
    strategy = IPUStrategy(device_iterations=2)
    trainer = pl.Trainer(**{**QUIET, "accelerator": "ipu", "strategy": strategy, "max_epochs": 2})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(two, BATCHES)
    assert largest_difference(one, two) < TOLERANCE
    texts = [str(each.message) for each in seen if "can't be recorded" in str(each.message)]
    assert len(texts) == 1
    which, them = ("", "") if kind is Branching else (" for batches of (2, 6), (2,)", " for them")
    assert texts[0].startswith(
        f"{kind.__name__} can't be recorded as one program{which}, so IPUStrategy runs the module "
        f"itself{them}: a tensor's value was turned into a Python number"
    )
    assert texts[0].endswith(
        "Trainer(accelerator='cpu') trains it in Lightning's own loop, and IPUStrategy("
        "engine='ipu') makes it an error."
    )


def test_a_step_that_can_not_be_recorded_gets_the_advice_of_a_trainer():
    """A Trainer has no run_eagerly; its CPU runs any step. An IPU has nothing but programs."""
    strategy = IPUStrategy(engine="ipu-standin")
    with pytest.raises(CaptureError) as caught:
        by_ipufit(Branching(), "fit", BATCHES, max_epochs=1, strategy=strategy)
    text = str(caught.value)
    assert text.endswith("To run this module as it is, without capture, use accelerator='cpu'.")
    assert "run_eagerly" not in text
    assert caught.value.line is not None
    by_lightning(Branching(), "fit", BATCHES, max_epochs=1, accelerator="cpu")


def test_anomaly_detection_gets_the_advice_of_a_trainer():
    strategy = IPUStrategy(engine="ipu-standin")
    how = {"max_epochs": 1, "detect_anomaly": True, "strategy": strategy}
    with pytest.raises(CaptureError) as caught:
        by_ipufit(Classifier(), "fit", BATCHES, **how)
    assert str(caught.value) == (
        "torch.autograd.set_detect_anomaly(True) looks for NaN in the values of gradients, but the "
        "program is recorded once, before there are values. Leave detect_anomaly=True out of the "
        "Trainer, or use ipufit.Model.from_lightning with compile(detect_nan=True), which names "
        "operator, line and samples."
    )
    model = ipufit.Model.from_lightning(Classifier())
    model.compile(detect_nan=True)
    model.fit(BATCHES, verbose=0)


@pytest.mark.parametrize(
    ("hook", "cure"),
    [
        ("configure_gradient_clipping", "Pass gradient_clip_val to the Trainer."),
        (
            "on_before_zero_grad",
            "Use on_train_batch_end, which is called after every execution.",
        ),
    ],
)
def test_hooks_that_are_not_called_name_what_a_trainer_has(hook, cure):
    """from_lightning has other words for it."""
    kind = type("Hooked", (Classifier,), {hook: lambda self, *args, **options: None})
    with pytest.raises(ConfigurationError) as caught:
        by_ipufit(kind(), "fit", BATCHES, max_epochs=1)
    assert str(caught.value).endswith(cure)


@pytest.mark.parametrize(
    "hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
)
def test_hooks_of_the_data_that_are_not_called_are_refused(hook):
    """Batches would go into the program as if the hook were not there."""

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return BATCHES

    setattr(Data, hook, lambda self, batch, *_: batch)
    with pytest.raises(ConfigurationError, match=rf"^Data\.{hook} can't be called\. ipufit moves"):
        by_ipufit(Classifier(), "fit", Data(), max_epochs=1)


def test_several_processes_are_refused(monkeypatch):
    """A Trainer would hand each of them all the data."""
    several = type("Several", (), {"is_distributed": True, "num_processes": 4})()
    monkeypatch.setattr("ipufit.lightning.strategy.current", lambda: several)
    with pytest.raises(ConfigurationError) as caught:
        by_ipufit(Classifier(), "fit", BATCHES, max_epochs=1)
    assert str(caught.value) == (
        "IPUStrategy trains in one process, but this is one of 4. Use "
        "ipufit.Model.from_lightning, which trains in several."
    )
