"""Programs like those of Lightning's pages about IPUs, and of Graphcore's article about Lightning.

The names they were written with are here those of ipufit: ``Trainer`` and ``IPUStrategy`` of
``ipufit.lightning``, and ``poptorch`` of ``ipufit``.
"""

import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from ipufit import poptorch
from ipufit.engines.ipu import options as ipu_options
from tests.core.test_precision import needs_half_autocast
from tests.lightning.twins import by_lightning, pl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ipufit.lightning
    from ipufit.lightning import IPUAccelerator, IPUStrategy, Trainer

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 2,
}
ENGINES = pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])


class Net(pl.LightningModule):
    """Data, a step and an optimizer; a net in one piece."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 5), nn.Softmax(dim=1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.nll_loss(self(batch[0]).float().log(), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(640, 5, generator=generator)
        return DataLoader(TensorDataset(x, x.argmax(1)), batch_size=4)

    val_dataloader = train_dataloader


class Begun(Net):
    """Four blocks of one or two layers, begun by the layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            poptorch.BeginBlock(nn.Linear(5, 10), ipu_id=0),
            poptorch.BeginBlock(nn.Linear(10, 5), ipu_id=1),
            nn.Linear(5, 5),
            poptorch.BeginBlock(nn.Linear(5, 5), ipu_id=2),
            poptorch.BeginBlock(nn.Softmax(dim=1), ipu_id=3),
        )


class Inside(Net):
    """Four blocks that forward enters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 10), nn.Linear(10, 5), nn.Linear(5, 5)])
        self.more = nn.Linear(5, 5)

    def forward(self, x):
        with poptorch.Block(ipu_id=0):
            x = self.layers[0](x).relu()
        with poptorch.Block(ipu_id=1):
            x = self.layers[1](x).relu()
        with poptorch.Block(ipu_id=2):
            x = self.layers[2](x).relu()
            x = self.more(x).relu()
        with poptorch.Block(ipu_id=3):
            return x.softmax(1)


def run(module, *data, **options):
    """Train; the loss of validation has to fall."""
    x, y = module.val_dataloader().dataset.tensors
    with torch.no_grad():
        before = F.nll_loss(module(x.to(next(module.parameters()).dtype)).float().log(), y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(**{**QUIET, **options})
        trainer.fit(module, *data)
    assert trainer.callback_metrics["val_loss"].item() < before.item() - 0.001
    return trainer


def assert_as_on_the_cpu(module, *data, **options):
    """The weights are those of Lightning's own Trainer with these data and options."""
    expected = Net()
    by_lightning(expected, "fit", *data, **{"max_epochs": 2, **options})
    ours, theirs = ([p.detach() for p in m.parameters()] for m in (module, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("devices", "replicas"), [(1, 1), (2, 2), (8, 8), ("auto", 1)], ids=["1", "2", "8", "auto"]
)
def test_a_trainer_with_accelerator_and_devices_alone(devices, replicas):
    """Basic: eight replicas see eight batches in an execution."""
    trainer = run(Net(), accelerator="ipu", devices=devices)
    assert isinstance(trainer, pl.Trainer)
    assert isinstance(trainer.strategy, IPUStrategy)
    assert trainer.global_step == 2 * 160 // replicas


def test_the_accelerator_as_an_object():
    trainer = run(Net(), accelerator=IPUAccelerator(), devices=4)
    assert isinstance(trainer.strategy, IPUStrategy)
    trainer = run(Net(), devices=4, strategy=IPUStrategy(accelerator=IPUAccelerator()))
    assert isinstance(trainer.accelerator, IPUAccelerator)
    assert trainer.global_step == 2 * 160 // 4


def test_other_accelerators_are_those_of_lightning():
    """Also without any argument, and where a strategy was chosen."""
    assert not isinstance(Trainer(**QUIET).strategy, IPUStrategy)
    assert not isinstance(Trainer(accelerator="cpu", **QUIET).strategy, IPUStrategy)
    strategy = IPUStrategy(device_iterations=4)
    assert Trainer(accelerator="ipu", strategy=strategy, **QUIET).strategy is strategy
    by_name = Trainer(accelerator="ipu", devices=2, strategy="ipu_strategy", **QUIET)
    assert isinstance(by_name.strategy, IPUStrategy)


@needs_half_autocast
def test_precision_16():
    """Intermediate: mixed, and with weights in half precision too."""
    assert run(Net(), accelerator="ipu", devices=8, precision=16).global_step == 40
    module = Net().half()
    assert run(module, accelerator="ipu", devices=8, precision=16).global_step == 40
    assert {p.dtype for p in module.parameters()} == {torch.float16}


def test_a_folder_for_reports(tmp_path):
    """Intermediate: the folder alone asks for a report."""
    pytest.importorskip("plotly")
    strategy = IPUStrategy(autoreport_dir=f"{tmp_path}/report_dir/")
    run(Net(), accelerator="ipu", devices=8, strategy=strategy)
    assert (tmp_path / "report_dir" / "report.html").exists()


def test_a_profile_of_some_executions(tmp_path, monkeypatch):
    """The first five with PopVision, any with torch's profiler, which a Trainer starts."""
    compiled, make = [], ipu_options.make_options
    monkeypatch.setattr(
        "ipufit.engines.ipu.program_cache.make_options",
        lambda *args: compiled.append(make(*args)) or compiled[-1],
    )
    options = poptorch.Options()
    options._Popart.setEngineOptions({"autoReport.executionProfileProgramRunCount": "5"})
    strategy = IPUStrategy(
        engine="ipu-standin", training_opts=options, autoreport_dir=str(tmp_path / "popvision")
    )
    run(Net(), accelerator="ipu", devices=8, strategy=strategy)
    settings = compiled[0]._Popart.options["engineOptions"]
    assert settings["autoReport.executionProfileProgramRunCount"] == "5"
    assert settings["autoReport.directory"] == str(tmp_path / "popvision")

    window = torch.profiler.schedule(wait=5, warmup=1, active=3, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU]
    where = {"dirpath": str(tmp_path / "torch"), "filename": "run", "activities": activities}
    profiler = pl.profilers.PyTorchProfiler(**where, schedule=window)
    strategy = IPUStrategy(device_iterations=2)
    run(Net(), accelerator="ipu", devices=8, strategy=strategy, profiler=profiler)
    (file,) = (tmp_path / "torch").glob("*training_step*.json")
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep#")]
    assert sorted(steps) == ["ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"]


@ENGINES
def test_device_iterations(engine):
    """Advanced: 32 updates of eight replicas in an execution, of 160 batches an epoch."""
    strategy = IPUStrategy(device_iterations=16, engine=engine)
    assert run(Net(), accelerator="ipu", devices=8, strategy=strategy).global_step == 4


@ENGINES
def test_options_for_training_and_inference(engine):
    """Advanced: with what is called outputMode today, beside devices."""
    inference_opts = poptorch.Options()
    inference_opts.deviceIterations(16)
    training_opts = poptorch.Options()
    training_opts.outputMode(poptorch.OutputMode.All)
    training_opts.deviceIterations(16)
    strategy = IPUStrategy(
        inference_opts=inference_opts, training_opts=training_opts, engine=engine
    )
    assert run(Net(), accelerator="ipu", devices=8, strategy=strategy).global_step == 4


@ENGINES
@pytest.mark.parametrize("kind", [Begun, Inside])
def test_a_model_in_blocks(engine, kind):
    """Advanced: four IPUs for each of eight replicas."""
    strategy = IPUStrategy(device_iterations=20, engine=engine)
    module = kind()
    assert run(module, accelerator="ipu", devices=8, strategy=strategy).global_step == 2


@ENGINES
def test_blocks_that_are_begun_before_fit(engine):
    """Article: the layers of a module that knows nothing of IPUs."""
    module = Net()
    for ipu in range(4):
        poptorch.BeginBlock(module.net[ipu], ipu_id=ipu)
    run(module, accelerator="ipu", accumulate_grad_batches=8, strategy=IPUStrategy(engine=engine))
    assert_as_on_the_cpu(module, accumulate_grad_batches=8)


@ENGINES
def test_options_of_300_iterations_and_four_replicas(engine):
    """Article: 300 x 4 x 8 samples are one execution of 300 updates."""
    options = poptorch.Options().deviceIterations(300).replicationFactor(4)
    x = torch.randn(9600, 5, generator=torch.Generator().manual_seed(2))
    dataset = TensorDataset(x, x.argmax(1))
    data = DataLoader(dataset, batch_size=8)
    module, strategy = Net(), IPUStrategy(training_opts=options, engine=engine)
    trainer = run(module, data, accelerator="ipu", devices=4, max_epochs=1, strategy=strategy)
    assert trainer.global_step == 1
    assert_as_on_the_cpu(module, DataLoader(dataset, batch_size=32), max_epochs=1)


@ENGINES
def test_clipping_which_the_pages_exclude(engine):
    """Basic, known limitations: it is Lightning's own."""
    clipped = {"gradient_clip_val": 0.05}
    module, strategy = Net(), IPUStrategy(engine=engine)
    run(module, accelerator="ipu", devices=2, strategy=strategy, **clipped)
    assert_as_on_the_cpu(module, accumulate_grad_batches=2, **clipped)


@ENGINES
def test_a_batch_sampler_for_several_replicas_which_the_pages_exclude(engine):
    """Basic, known limitations: each batch of the sampler is a micro-batch."""
    module, strategy = Net(), IPUStrategy(engine=engine)
    dataset = module.train_dataloader().dataset
    sampler = BatchSampler(SequentialSampler(dataset), 4, drop_last=False)
    data = DataLoader(dataset, batch_sampler=sampler)
    run(module, data, accelerator="ipu", devices=2, strategy=strategy)
    assert_as_on_the_cpu(module, accumulate_grad_batches=2)


def test_ipus_is_no_argument_of_today_s_trainer():
    """Article: one line asked for ``ipus=1`` in 2021."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'ipus'"):
        Trainer(ipus=1, **QUIET)


def test_names_of_earlier_versions_say_what_they_are_called_now():
    with pytest.raises(AttributeError) as caught:
        _ = poptorch.AnchorMode.All
    assert str(caught.value) == (
        "module 'ipufit.poptorch' has no attribute 'AnchorMode'. It is called OutputMode in "
        "PopTorch 3.4."
    )
    assert not hasattr(poptorch, "AnchorMode")
    with pytest.raises(AttributeError) as caught:
        poptorch.Options().anchorMode(poptorch.OutputMode.All)
    assert str(caught.value) == (
        "There is no option anchorMode. It is called outputMode in PopTorch 3.4."
    )
    with pytest.raises(AttributeError, match="It is called outputMode in PopTorch"):
        poptorch.Options().from_json('{"anchorMode": "OutputMode.All"}')
    with pytest.raises(ImportError) as caught:
        from ipufit.lightning import IPUPlugin  # noqa: F401
    assert str(caught.value) == (
        "IPUPlugin is the name of IPUStrategy before Lightning 1.6, and does not exist here. Use "
        "ipufit.lightning.IPUStrategy, as strategy= of the Trainer."
    )
    with pytest.raises(AttributeError, match="has no attribute 'IPUPlugins'"):
        _ = ipufit.lightning.IPUPlugins
