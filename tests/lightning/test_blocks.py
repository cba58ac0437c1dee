"""Modules whose poptorch.Block and BeginBlock put parts on IPUs, under IPUStrategy."""

import contextlib
import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipufit import poptorch
from ipufit.errors import OptimizerError, PartitionError, PlanError
from ipufit.partition import serialize
from ipufit.poptorch._precision import keep_float64
from tests.lightning.test_strategy import IPUStrategy, by_ipufit
from tests.lightning.twins import by_lightning, largest_difference, loader, pl, rows

TOLERANCE = 1e-10  # float64, other orders of summation
X, Y = rows(96, 6)
ENGINES = pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
BLOCK = {True: poptorch.Block, False: lambda ipu_id: contextlib.nullcontext()}


@pytest.fixture(autouse=True)
def _wide():
    """The stand-in computes in float64; Lightning keeps what is logged in the default dtype."""
    torch.set_default_dtype(torch.float64)
    with keep_float64():
        yield
    torch.set_default_dtype(torch.float32)


class Four(pl.LightningModule):
    """Four layers; where blocks divide them is what the classes below differ in."""

    def __init__(self, divided=True):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.block = BLOCK[divided]

    def forward(self, inputs):
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        return self.head(inputs)

    def shared(self, batch, name):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log(f"{name}_loss", loss, on_step=False, on_epoch=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.shared(batch, "val")

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Annotated(Four):
    """Each layer begins a block."""

    def __init__(self, divided=True):
        super().__init__()
        if divided:
            for ipu, layer in enumerate([*self.layers, self.head]):
                poptorch.BeginBlock(layer, ipu_id=ipu)


class InForward(Four):
    """Each layer is called in a block, which ends behind it; the loss is behind all blocks."""

    def forward(self, inputs):
        for ipu, layer in enumerate(self.layers):
            with self.block(ipu_id=ipu):
                inputs = layer(inputs).tanh()
        with self.block(ipu_id=3):
            return self.head(inputs)


class InStep(Four):
    """Blocks in the step itself, of which validation has other ones."""

    def training_step(self, batch, batch_idx):
        inputs = batch[0]
        for ipu, layer in enumerate([*self.layers, self.head]):
            with self.block(ipu_id=ipu):
                inputs = layer(inputs) if ipu == 3 else layer(inputs).tanh()
        loss = F.cross_entropy(inputs, batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs = batch[0]
        with self.block(ipu_id=0):
            for layer in self.layers:
                inputs = layer(inputs).tanh()
        with self.block(ipu_id=1):
            loss = F.cross_entropy(self.head(inputs), batch[1])
            self.log("val_loss", loss, on_step=False, on_epoch=True)


KINDS = pytest.mark.parametrize("kind", [Annotated, InForward, InStep])


@contextlib.contextmanager
def plans_built(monkeypatch):
    """The plans of the programs that are built."""
    from ipufit.engines.embedded.engine import EmbeddedEngine
    from ipufit.engines.ipu.engine import IpuEngine

    plans = {}
    with monkeypatch.context() as patched:
        for engine in (EmbeddedEngine, IpuEngine):

            def build(self, spec, build=engine.build):
                plans[spec.mode.value] = spec.plan
                return build(self, spec)

            patched.setattr(engine, "build", build)
        yield plans


@pytest.mark.grid
@ENGINES
@KINDS
@pytest.mark.parametrize("devices", [1, 2])
def test_devices_are_replicas_of_as_many_ipus_as_blocks_name(engine, kind, devices, monkeypatch):
    """Weights and metrics are those of the CPU with as many batches accumulated."""
    data = loader(X, Y, batch_size=2), loader(X[:16], Y[:16], batch_size=2)
    plain, divided = kind(divided=False), kind()
    expected, _ = by_lightning(plain, "fit", *data, max_epochs=2, accumulate_grad_batches=devices)
    strategy = IPUStrategy(device_iterations=4, engine=engine)
    with plans_built(monkeypatch) as plans:
        trainer, _ = by_ipufit(
            divided, "fit", *data, devices=devices, strategy=strategy, max_epochs=2
        )
    assert largest_difference(plain, divided) < TOLERANCE
    for name, value in trainer.callback_metrics.items():
        assert value.item() == pytest.approx(expected.callback_metrics[name].item(), rel=1e-10)
    held = 2 if kind is InStep else 4
    stages = {mode: (plan.replicas, plan.stages) for mode, plan in plans.items()}
    assert stages == {"train": (devices, 4), "evaluate": (devices, held)}


@pytest.mark.grid
@ENGINES
@KINDS
def test_a_prediction_alone_counts_the_blocks(engine, kind):
    data = loader(X, Y, batch_size=2)
    _, expected = by_lightning(kind(divided=False), "predict", data)
    strategy = IPUStrategy(device_iterations=4, engine=engine)
    _, found = by_ipufit(kind(), "predict", data, devices=2, strategy=strategy)
    assert torch.allclose(torch.cat(found), torch.cat(expected), rtol=1e-12)


@pytest.mark.grid
@ENGINES
@KINDS
def test_device_iterations_for_all_stages_are_enough(engine, kind, monkeypatch, caplog):
    """As Lightning's pages say; what the pipeline lacks is said in a sentence."""
    data = loader(X, Y, batch_size=2)
    text = (
        "The blocks of the module make 4 stages. A pipeline that trains is filled by "
        "accumulate_grad_batches=7 or more; with {}, the stages of a micro-batch run one after the "
        "other. The numbers are the same."
    )
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    for accumulation, said in ((1, [text.format(1)]), (6, [text.format(6)]), (7, [])):
        caplog.clear()
        strategy = IPUStrategy(device_iterations=4, engine=engine)
        how = {"accumulate_grad_batches": accumulation, "strategy": strategy, "max_epochs": 1}
        with caplog.at_level(logging.INFO, logger.name), plans_built(monkeypatch) as plans:
            by_ipufit(kind(), "fit", data, **how)
        found = [record.message for record in caplog.records if "stages" in record.message]
        assert found == said
        assert plans["train"].pipelined == (accumulation == 7)


@ENGINES
@KINDS
def test_fewer_device_iterations_than_stages_are_refused(engine, kind):
    """Before any work; either number of the advice cures it."""
    data = loader(X, Y, batch_size=2)
    module = kind()
    before = copy.deepcopy(module.state_dict())
    strategy = IPUStrategy(device_iterations=3, engine=engine)
    with pytest.raises(PlanError) as caught:
        by_ipufit(module, "fit", data, max_epochs=1, strategy=strategy)
    assert str(caught.value) == (
        "device_iterations of IPUStrategy must be at least 4 for a module in 4 stages, got 3. Pass "
        "IPUStrategy(device_iterations=4), or Trainer(accumulate_grad_batches=7), which fills a "
        "pipeline."
    )
    for name, value in before.items():
        assert torch.equal(module.state_dict()[name], value)
    for iterations, accumulation in ((4, 1), (1, 7)):
        strategy = IPUStrategy(device_iterations=iterations, engine=engine)
        how = {"accumulate_grad_batches": accumulation, "strategy": strategy}
        by_ipufit(module, "fit", data, max_epochs=1, **how)


class Three(Four):
    """Blocks on a number of IPUs that is no power of two."""

    def __init__(self, divided=True):
        super().__init__()
        for ipu, layer in enumerate(self.layers):
            poptorch.BeginBlock(layer, ipu_id=ipu)


@ENGINES
def test_ipus_that_can_not_be_reserved_are_refused_in_the_words_of_a_trainer(engine):
    """A Trainer has no ipus and no auto_round_ipus; PopTorch's options have the latter."""
    data = loader(X, Y, batch_size=2)
    for kind, devices, product in (
        (Four, 3, "3 replicas of 1 IPU"),
        (Three, 2, "2 replicas of 3 IPUs"),
    ):
        strategy = IPUStrategy(device_iterations=4, engine=engine)
        with pytest.raises(PlanError) as caught:
            by_ipufit(kind(), "fit", data, devices=devices, strategy=strategy, max_epochs=1)
        cure = "devices=4, or " if kind is Four else ""
        assert str(caught.value) == (
            f"IPUs come in powers of two, but devices={devices} asks for {product}. Pass "
            f"{cure}options with autoRoundNumIPUs(True) as training_opts and inference_opts, which "
            "reserves more IPUs and leaves the rest idle."
        )
        rounding = poptorch.Options().deviceIterations(4).autoRoundNumIPUs(True)
        strategy = IPUStrategy(training_opts=rounding, inference_opts=rounding, engine=engine)
        how = {"devices": devices, "strategy": strategy, "max_epochs": 1}
        by_ipufit(kind(), "fit", data, data, **how)


class Unplaced(Four):
    """One block names no IPU."""

    def __init__(self, where=None):
        super().__init__()
        self.where = where or {}

    def forward(self, inputs):
        with poptorch.Block("first", ipu_id=0):
            inputs = self.layers[0](inputs).tanh()
        with poptorch.Block("second", ipu_id=1):
            inputs = self.layers[1](inputs)
        with poptorch.Block("third", **self.where):
            return self.head(inputs)


class Cut(Four):
    """A layer in parts on two IPUs, in a module on one."""

    def __init__(self, divided=False):
        super().__init__(divided)
        serialize(self, {"head": [1, 2]})
        if divided:
            poptorch.BeginBlock(self.layers[0], ipu_id=0)
            poptorch.BeginBlock(self.head, ipu_id=1)


@ENGINES
@pytest.mark.parametrize(
    ("kind", "error", "text", "mended"),
    [
        (
            Unplaced,
            PartitionError,
            "every block must name its IPU, but the block 'third' does not. Begin it with "
            "ipu_id=0, for example, or name its IPU in an execution strategy, such as "
            "options.setExecutionStrategy(poptorch.PipelinedExecution(...)) of training_opts and "
            "inference_opts.",
            lambda: Unplaced({"ipu_id": 1}),
        ),
        (
            Cut,
            PartitionError,
            "splits_per_ipu of serialised layers must have a number for each IPU of a replica, got "
            "2 and a replica has 1. Begin blocks in the module with poptorch.BeginBlock(layer, "
            "ipu_id=...), so that the IPUs of a replica are 2.",
            lambda: Cut(True),
        ),
        (
            lambda: Four().requires_grad_(False),
            OptimizerError,
            "the module has no trainable parameter: nothing that SGD holds requires gradients. "
            "Unfreeze at least one with requires_grad_(True), or call trainer.validate, test or "
            "predict, which need no optimizer.",
            Four,
        ),
    ],
    ids=["block", "serialised", "frozen"],
)
def test_errors_advise_what_the_user_of_a_trainer_can_write(engine, kind, error, text, mended):
    """They named arguments of compile, which a Trainer does not call."""
    data = loader(X, Y, batch_size=2)
    how = {"max_epochs": 1, "accumulate_grad_batches": 7}
    with pytest.raises(error) as caught:
        by_ipufit(kind(), "fit", data, strategy=IPUStrategy(engine=engine), **how)
    assert str(caught.value) == text
    by_ipufit(mended(), "fit", data, strategy=IPUStrategy(engine=engine), **how)
