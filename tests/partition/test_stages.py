"""A module divided over IPUs computes what it computes on one."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.engines.ipu.engine import IpuEngine
from ipufit.partition.layers_per_ipu import repeated_layers, share_out
from ipufit.partition.own_blocks import record_blocks
from tests.fitting import assert_equal, unmeasured
from tests.ipu_calls import Recorder
from tests.points import only

pytestmark = pytest.mark.both_engines

TOKENS = torch.randint(0, 11, (24, 5), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(21, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 4, (24,), generator=torch.Generator().manual_seed(2))
STRATEGIES = ("pipelined", "sharded", "serial_phased", "parallel_phased")


class Encoder(nn.Module):
    """A transformer's encoder over embedded tokens."""

    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.encoder(self.embed(x)).mean(1))


class EncoderDecoder(nn.Module):
    """torch's own transformer with embeddings before and a head behind."""

    def __init__(self, layers=1):
        super().__init__()
        self.embed, self.embed_target = nn.Embedding(11, 8), nn.Embedding(11, 8)
        self.body = nn.Transformer(8, 2, layers, layers, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(self.embed(x), self.embed_target(x[:, :2])).mean(1))


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shortcut."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.Conv2d(outputs, outputs, 3, padding=1),
        )
        self.norm = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        return torch.relu(self.norm(self.second(torch.relu(self.first(x)))) + self.shortcut(x))


class ResNet(nn.Module):
    """Two groups of residual blocks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 6), Residual(6, 6))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class Recurrent(nn.Module):
    """Two recurrent layers, which no list holds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first, self.second = nn.GRU(6, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        hidden, _ = self.first(self.embed(x))
        # A module that drops would begin a stage that has nothing to do in inference.
        hidden = nn.functional.dropout(hidden, 0.1, self.training)
        return self.head(self.second(hidden)[0][:, -1])


def stack():
    """Four linear layers."""
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))


# What takes long to record has no smaller update at the end.
NETS = {
    "stack": (stack, torch.randn(24, 5, generator=torch.Generator().manual_seed(4))),
    "encoder": (Encoder, TOKENS[:21]),
    "encoder_decoder": (EncoderDecoder, TOKENS[:21]),
    "resnet": (ResNet, IMAGES),
    "rnn": (Recurrent, TOKENS),
}
DIVIDED = {
    "encoder": [
        ipufit.Parallel(stages={"embed": 0, "encoder.layers.1": 1, "head": 1}),
        ipufit.Parallel(layers_per_ipu=[1, -1]),
    ],
    "encoder_decoder": [
        ipufit.Parallel(stages={"body.encoder": 1, "body.decoder.layers.0": 2, "head": 3}),
        # One layer is no stack that would be found.
        ipufit.Parallel(
            layers_per_ipu=[-1, 1], layers=["body.encoder.layers", "body.decoder.layers"]
        ),
    ],
    "resnet": [
        ipufit.Parallel(stages={"stem": 0, "layer2": 1}),
        ipufit.Parallel(layers_per_ipu=[0, 3, 1], auto_round_ipus=True),
    ],
    "rnn": [
        ipufit.Parallel(stages={"first": 0, "second": 1}),
        ipufit.Parallel(stages={"first": 1, "second": 2, "head": 3}),
    ],
}
ENGINES = ("embedded", "ipu-standin")
# Every division of every net, and every strategy on either engine.
QUICK = {
    ("encoder", 0, "pipelined", "embedded"),
    ("encoder", 1, "parallel_phased", "embedded"),
    ("encoder_decoder", 0, "serial_phased", "embedded"),
    ("encoder_decoder", 1, "sharded", "embedded"),
    ("resnet", 0, "serial_phased", "ipu-standin"),
    ("resnet", 1, "parallel_phased", "ipu-standin"),
    ("rnn", 0, "sharded", "ipu-standin"),
    ("rnn", 1, "pipelined", "ipu-standin"),
}
POINTS = only(QUICK, itertools.product(DIVIDED, range(2), STRATEGIES, ENGINES))


def trained(kind, engine="embedded", accumulation=7, di=2, **options):
    """A net after two epochs, its history and, as recording takes long, only small ones' loss."""
    torch.manual_seed(0)
    make, x = NETS[kind]
    net = make()
    model = ipufit.Model(net, engine=engine)
    model.compile("adam", "cross_entropy", metrics=["accuracy"], **options, **unmeasured(engine))
    work = {"batch_size": 3, "device_iterations": di, "verbose": 0, "seed": 3}
    y = LABELS[: len(x)]
    history = model.fit(x, y, epochs=2, gradient_accumulation=accumulation, **work)
    return net, history.history, "encoder" in kind or model.evaluate(x, y, **work)


@pytest.fixture(scope="module")
def whole():
    """The same nets on one IPU, by kind and engine."""
    made = {}

    def get(kind, engine):
        if (kind, engine) not in made:
            made[kind, engine] = trained(kind, engine)
        return made[kind, engine]

    return get


@pytest.mark.few("rnn-1-pipelined-ipu-standin")
@pytest.mark.parametrize(("kind", "division", "strategy", "engine"), POINTS)
def test_a_divided_module_trains_to_the_same_bits(whole, kind, division, strategy, engine):
    """Weights, History and evaluation; full updates and smaller ones."""
    expected = whole(kind, engine)
    parallel = dataclasses.replace(DIVIDED[kind][division], strategy=strategy)
    found = trained(kind, engine, parallel=parallel)
    assert_equal(found[0], expected[0])
    assert found[1:] == expected[1:]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
@pytest.mark.parametrize("kind", ["encoder", "encoder_decoder", "resnet", "rnn"])
def test_a_module_that_ipufit_divides_trains_to_the_same_bits(whole, kind, engine):
    """The stages are found when the first micro-batch is known."""
    expected = whole(kind, engine)
    found = trained(kind, engine, parallel=ipufit.Parallel(stages="auto", ipus_per_replica=4))
    assert_equal(found[0], expected[0])
    assert found[1:] == expected[1:]


@pytest.mark.few("parallel_phased-ParallelPhasedExecution-ipus3")
@pytest.mark.parametrize(
    ("strategy", "kind", "ipus"),
    [
        ("pipelined", poptorch.PipelinedExecution, [0, 1, 2, 3]),
        ("sharded", poptorch.ShardedExecution, [0, 1, 2, 3]),
        ("serial_phased", poptorch.SerialPhasedExecution, [0, 0, 0, 0]),
        ("parallel_phased", poptorch.ParallelPhasedExecution, [0, 1, 0, 1]),
    ],
)
def test_the_partition_reaches_poptorch(strategy, kind, ipus):
    """Blocks with their IPUs, the strategy, and the IPUs of the plan."""
    recorder = Recorder()
    with recorder.watching(), record_blocks() as entered:
        net = trained(
            "stack",
            lambda: IpuEngine(recorder, "ipu-standin"),
            parallel=ipufit.Parallel(layers_per_ipu=[1, 1, 1, 1], strategy=strategy),
        )[0]
    assert entered[:4] == [(f"ipufit stage {stage}", ipu) for stage, ipu in enumerate(ipus)]
    given = [call.args[0] for call in recorder.calls if call.name == "setExecutionStrategy"]
    assert type(given[0]) is kind
    assert not any(part._forward_pre_hooks for part in net.modules())


@pytest.mark.long
def test_calls_that_do_not_fill_the_pipeline_are_sharded():
    """The last update of an epoch is smaller, and evaluate has one device iteration."""
    recorder = Recorder()
    with recorder.watching():
        trained(
            "stack",
            lambda: IpuEngine(recorder, "ipu-standin"),
            accumulation=3,
            di=1,
            parallel=ipufit.Parallel(stages={"2": 1}),
        )
    given = [call.args[0] for call in recorder.calls if call.name == "setExecutionStrategy"]
    kinds = {type(strategy).__name__ for strategy in given}
    assert kinds == {"PipelinedExecution", "ShardedExecution"}
    assert type(given[0]) is poptorch.PipelinedExecution


def divided(**options):
    model = ipufit.Model(stack())
    parallel = ipufit.Parallel(layers_per_ipu=[1, 3], **options)
    model.compile("sgd", "cross_entropy", parallel=parallel)
    return model


@pytest.mark.long
def test_explain_says_what_is_where(capsys):
    x, y = NETS["stack"][1], LABELS
    model = divided(inference=ipufit.Parallel(layers_per_ipu=[3, 1]))
    model.fit(x, y, batch_size=2, ipus=4, gradient_accumulation=3, verbose=0)
    model.explain()
    lines = capsys.readouterr().out.splitlines()
    assert "  stages                 2  IPUs that share one replica, as a pipeline" in lines
    assert "Training: pipelined over 2 stages: stage 0 from 0; stage 1 from 1." in lines
    said = (
        "Inference: pipelined over 2 stages: stage 0 from 0; stage 1 from 3; sharded if an "
        "execution has less than 2 device iterations, which can't fill the pipeline."
    )
    assert said in lines


@pytest.mark.long
def test_ipus_are_those_of_all_replicas():
    """Eight IPUs of a module on two are four replicas."""
    x, y = NETS["stack"][1], LABELS
    model = divided()
    model.fit(x, y, batch_size=2, ipus=8, gradient_accumulation=3, verbose=0)
    params = model.history.params
    assert (params["ipus"], params["replicas"]) == (8, 4)


def test_layers_are_found_by_structure():
    """The longest stack, its kin, and the decoder beside the encoder."""
    assert repeated_layers(Encoder(12), None) == tuple(f"encoder.layers.{i}" for i in range(12))
    both = repeated_layers(EncoderDecoder(3), None)
    assert both == tuple(
        f"body.{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(3)
    )
    blocks = repeated_layers(ResNet(), None)
    assert blocks == ("layer1.0", "layer1.1", "layer2.0", "layer2.1")
    assert repeated_layers(ResNet(), "layer2") == ("layer2.0", "layer2.1")
    assert repeated_layers(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None) == ("0", "1")


@pytest.mark.parametrize(
    ("counts", "shares"),
    [
        ([12], [12]),
        ([2, 3, -1, -1], [2, 3, 3, 4]),
        ([-1, 5, -1], [3, 5, 4]),
        ([0, -1, -1], [0, 6, 6]),
        ([-1, -1, -1, -1, -1], [2, 2, 2, 2, 4]),
    ],
)
def test_wildcards_share_the_rest(counts, shares):
    assert share_out(counts, 12, "layers_per_ipu", "") == shares


class Annotated(nn.Module):
    """Has blocks of its own, in three ways; the last one ends, or goes on."""

    def __init__(self, ends):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = poptorch.BeginBlock(nn.Linear(4, 4), "middle", ipu_id=1)
        self.ends = ends

    def forward(self, x):
        with poptorch.Block("first", ipu_id=0):
            x = self.first(x)
        if self.ends:
            return self.end(self.middle(x))
        return self.last(self.middle(x))

    @poptorch.BlockFunction("end", ipu_id=1)
    def end(self, x):
        return self.last(x)


class Plain(Annotated):
    """The same without blocks."""

    def __init__(self):
        super().__init__(ends=False)
        poptorch.removeBlocks(self)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


FLAT = torch.randn(12, 4, generator=torch.Generator().manual_seed(3))
STAGES = (poptorch.Stage("first"), poptorch.Stage("middle", "end"))


def phases(kind):
    strategy = kind(poptorch.Phase("first"), ["middle", "end"])
    for phase in (0, 1):
        strategy.phase(phase).ipus(phase)
    return strategy


def over_two(make, engine="embedded", **options):
    """The net, trained and evaluated, and the IPUs it took."""
    torch.manual_seed(0)
    net = make()
    model = ipufit.Model(net, engine=engine)
    model.compile("adam", "cross_entropy", **options, **unmeasured(engine))
    model.fit(FLAT, LABELS[:12], batch_size=2, gradient_accumulation=3, verbose=0, seed=1)
    return net, model.evaluate(FLAT, LABELS[:12], verbose=0), model.history.params["ipus"]


@pytest.fixture(scope="module")
def over_one():
    """What the module without blocks comes to, by engine."""
    return {engine: over_two(Plain, engine) for engine in ENGINES}


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("strategy", "ends"),
    [
        (None, True),
        ("sharded", True),
        (poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement), False),
        (poptorch.PipelinedExecution(*STAGES), False),
        (phases(poptorch.SerialPhasedExecution), False),
        (phases(poptorch.ParallelPhasedExecution), False),
    ],
)
def test_blocks_of_the_module_are_honoured(over_one, engine, strategy, ends):
    found = over_two(
        lambda: Annotated(ends),
        engine,
        parallel=ipufit.Parallel(strategy=strategy, ipus_per_replica=2),
    )
    plain = over_one[engine]
    assert_equal(found[0], plain[0])
    assert found[1:] == (plain[1], 2)
