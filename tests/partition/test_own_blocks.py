"""Blocks that a module begins itself: what they must agree with, and how their stages count."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.errors import PartitionError, PlanError
from tests.fitting import assert_equal, unmeasured
from tests.told import message

pytestmark = pytest.mark.both_engines

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (12,), generator=torch.Generator().manual_seed(1))
ENGINES = pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])


def net(*ipus, tied=(), names="ABCD"):
    """A layer on each of these IPUs, blocks A, B, ...; None begins none."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in ipus))
    for layer, name, ipu in zip(layers, names, ipus):
        if ipu is not None:
            poptorch.BeginBlock(layer, name, ipu_id=ipu)
    if tied:
        one, other = tied
        layers[other].weight = layers[one].weight
    return layers


def over_two(module, engine="embedded", **options):
    model = ipufit.Model(module, engine=engine)
    options = {"parallel": ipufit.Parallel(ipus_per_replica=2), **options}
    model.compile("sgd", "cross_entropy", **options, **unmeasured(engine, **options))
    return model


def fit(model, accumulation=7):
    model.fit(X, Y, batch_size=2, gradient_accumulation=accumulation, verbose=0, seed=1)


def refused(module, engine, error=PartitionError, accumulation=7, **options):
    return message(lambda: fit(over_two(module, engine, **options), accumulation), kind=error)


STRATEGIES = {
    "SerialPhasedExecution": poptorch.SerialPhasedExecution,
    "ParallelPhasedExecution": poptorch.ParallelPhasedExecution,
    "PipelinedExecution": poptorch.PipelinedExecution,
    "ShardedExecution": poptorch.ShardedExecution,
}


@pytest.mark.few
@ENGINES
@pytest.mark.parametrize("kind", list(STRATEGIES))
def test_a_strategy_whose_blocks_are_missing_is_refused(engine, kind):
    text = refused(
        net(None, None), engine, parallel=ipufit.Parallel(strategy=STRATEGIES[kind](["A"], ["B"]))
    )
    assert text == (
        f"forward must enter a block of every stage that poptorch.{kind} names, but it does not "
        "enter 'A', 'B'. It enters none. Begin the block with poptorch.BeginBlock(module, 'A'), "
        "or leave it out of the strategy."
    )
    text = refused(
        net(0, 1), engine, parallel=ipufit.Parallel(strategy=STRATEGIES[kind](["A"], ["B"], ["C"]))
    )
    assert text == (
        f"forward must enter a block of every stage that poptorch.{kind} names, but it does not "
        "enter 'C'. It enters 'A', 'B'. Begin the block with poptorch.BeginBlock(module, 'C'), or "
        "leave it out of the strategy."
    )
    module = net(0, 1, names=("first", "second"))
    text = refused(
        module, engine, parallel=ipufit.Parallel(strategy=STRATEGIES[kind](["first"], ["secnd"]))
    )
    assert text == (
        f"forward must enter a block of every stage that poptorch.{kind} names, but it does not "
        "enter 'secnd'. Did you mean 'second'? It enters 'first', 'second'. Begin the block with "
        "poptorch.BeginBlock(module, 'secnd'), or leave it out of the strategy."
    )
    assert refused(
        net(0, 1), engine, parallel=ipufit.Parallel(strategy=STRATEGIES[kind](["A"]))
    ) == (
        f"poptorch.{kind} must name every block that forward enters, but it does not name 'B'. It "
        "names 'A'. Add the block to the strategy."
    )


@pytest.mark.parametrize("prefix", ["", "inference."])
def test_phases_of_own_blocks_need_their_names(prefix):
    for name, kind in (("serial_phased", "Serial"), ("parallel_phased", "Parallel")):
        parallel = ipufit.Parallel(strategy=name)
        if prefix:
            parallel = ipufit.Parallel(inference=parallel)
        assert message(over_two, net(0, 1), parallel=parallel, kind=PartitionError) == (
            f"{prefix}strategy='{name}' runs the stages of {prefix}stages or "
            f"{prefix}layers_per_ipu as phases, got neither. Pass one of them, or, for the "
            f"module's own blocks, {prefix}strategy=poptorch.{kind}PhasedExecution('A', 'B') with "
            "their names."
        )


@ENGINES
def test_blocks_of_one_stage_are_on_one_ipu(engine):
    strategy = poptorch.PipelinedExecution(poptorch.Stage("A", "B"))
    assert refused(net(0, 1), engine, parallel=ipufit.Parallel(strategy=strategy)) == (
        "the blocks of a stage run on one IPU, but strategy puts 'A' and 'B' into one stage, and "
        "they begin on IPUs 0 and 1. Give each its own poptorch.Stage, or use "
        "poptorch.Stage(...).ipu(number)."
    )


@ENGINES
def test_several_ipus_need_something_that_divides(engine):
    assert refused(net(None, None), engine) == (
        "ipus_per_replica=2 needs a divided module, but nothing divides this one, which has no own "
        "blocks. Pass stages or layers_per_ipu to compile, begin blocks with poptorch.BeginBlock, "
        "or leave ipus_per_replica out."
    )


@ENGINES
def test_no_ipu_is_without_work(engine):
    assert refused(net(1, 1), engine) == (
        "every IPU of a replica must compute something, but IPU 0 of 2 has nothing to do. Number "
        "the IPUs of the blocks from 0 without gaps."
    )
    assert refused(
        net(0, 2), engine, parallel=ipufit.Parallel(ipus_per_replica=3, auto_round_ipus=True)
    ) == (
        "every IPU of a replica must compute something, but IPU 1 of 3 has nothing to do. Number "
        "the IPUs of the blocks from 0 without gaps."
    )


class Left(nn.Module):
    """A block that ends, after which something is computed or not."""

    def __init__(self, ipu=1, goes_on=False):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.ipu, self.goes_on = ipu, goes_on

    def forward(self, x):
        x = self.first(x)
        with poptorch.Block("A", ipu_id=self.ipu):
            x = self.last(x)
        return x * 2 if self.goes_on else x


@ENGINES
def test_nothing_is_computed_between_blocks(engine):
    assert refused(Left(goes_on=True), engine) == (
        "every operator must be in a block, but forward continues after the end of block 'A'. Put "
        "the rest into a poptorch.Block, or begin blocks with poptorch.Block.start or "
        "poptorch.BeginBlock, which don't end."
    )


@pytest.mark.long
@ENGINES
@pytest.mark.parametrize("named", [False, True])
def test_the_loss_is_in_the_last_block_though_it_ended(engine, named):
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement) if named else None
    model = over_two(Left(), engine, parallel=ipufit.Parallel(strategy=strategy))
    fit(model, 3)
    assert model.predict(X, verbose=0).shape == X.shape


@ENGINES
def test_every_block_has_an_ipu(engine):
    assert refused(Left(ipu=None), engine) == (
        "every block must name its IPU, but the block 'A' does not. Begin it with ipu_id=0, for "
        "example, or name its IPU in an object for strategy."
    )


# Each walk over the IPUs once, and either engine with and without names.
WALKS = [
    ((0, 1), 2, [("ipu-standin", True)]),
    ((0, 1, 0), 3, [("embedded", False)]),
    ((0, 1, 0, 1), 4, [("ipu-standin", False)]),
    ((1, 0), 3, [("embedded", True)]),
    ((0, 0, 1), 2, [("ipu-standin", False)]),
]


@pytest.mark.few
@pytest.mark.parametrize(
    ("ipus", "stages", "engine", "named"),
    [
        pytest.param(
            *(ipus, stages, engine, named),
            marks=() if (engine, named) in quick else pytest.mark.long,
        )
        for ipus, stages, quick in WALKS
        for engine in ("embedded", "ipu-standin")
        for named in (False, True)
    ],
)
def test_stages_are_changes_of_the_ipu(engine, ipus, stages, named):
    """One that goes back to an earlier IPU, as tied embeddings do, has more stages than IPUs."""
    strategy = None
    if named:
        parts = [poptorch.Stage(name).ipu(ipu) for name, ipu in zip("ABCD", ipus)]
        strategy = poptorch.PipelinedExecution(*parts)
    least = 2 * stages - 1
    with pytest.raises(PlanError) as caught:
        fit(over_two(net(*ipus), engine, parallel=ipufit.Parallel(strategy=strategy)), least - 1)
    assert str(caught.value) == (
        f"`gradient_accumulation` must be at least {least} to fill a training pipeline of "
        f"{stages} stages, forward and backward, got {least - 1}. Try {least}."
    )
    assert caught.value.suggestion == {"gradient_accumulation": least}
    model = over_two(net(*ipus), engine, parallel=ipufit.Parallel(strategy=strategy))
    fit(model, least)
    for iterations in sorted({1, stages - 1, stages}):
        work = {"device_iterations": iterations, "batch_size": 2, "verbose": 0}
        assert model.evaluate(X, Y, **work)["loss"] > 0
    plain = ipufit.Model(net(*(None for _ in ipus)), engine=engine)
    plain.compile("sgd", "cross_entropy", **unmeasured(engine))
    fit(plain, least)
    assert_equal(model.module, plain.module)


@ENGINES
def test_an_inference_pipeline_that_was_asked_for_must_be_filled(engine):
    model = over_two(
        net(0, 1, 0),
        engine,
        parallel=ipufit.Parallel(inference=ipufit.Parallel(strategy="pipelined")),
    )
    with pytest.raises(PlanError) as caught:
        model.evaluate(X, Y, batch_size=2, device_iterations=2, verbose=0)
    assert str(caught.value) == (
        "`device_iterations` must be at least 3 to fill a pipeline of 3 stages, got 2. Try 3."
    )
    assert model.evaluate(X, Y, batch_size=2, device_iterations=3, verbose=0)["loss"] > 0


@pytest.mark.long
def test_explain_says_how_many_stages_there_are(capsys):
    model = over_two(net(0, 1, 0))
    fit(model, 5)
    model.explain()
    assert "Training: pipelined over 2 IPUs in 3 stages by the module's own blocks." in (
        capsys.readouterr().out.splitlines()
    )


@ENGINES
def test_tied_weights_on_two_ipus_are_refused(engine):
    assert refused(net(0, 1, tied=(0, 1)), engine) == (
        "a parameter must be on one IPU, but '0.weight' and '1.weight' are one parameter, on IPUs "
        "0 and 1. Put all its uses into one IPU's blocks, or give each its own copy: module.weight "
        "= torch.nn.Parameter(module.weight.detach().clone())."
    )


@pytest.mark.long
@ENGINES
def test_tied_weights_on_one_ipu_are_fine(engine):
    """The usual pattern: the projection is back on the IPU of the embedding."""
    model = over_two(net(0, 1, 0, tied=(0, 2)), engine)
    fit(model, 5)
    assert model.module[0].weight is model.module[2].weight


@pytest.mark.long
@ENGINES
def test_blocks_without_names_are_numbered(engine):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for ipu, layer in enumerate(module):
        poptorch.BeginBlock(layer, ipu_id=ipu)
    strategy = poptorch.PipelinedExecution(poptorch.Stage("0"), poptorch.Stage("1"))
    fit(over_two(module, engine, parallel=ipufit.Parallel(strategy=strategy)), 3)
    module = nn.Sequential(*module)
    assert refused(
        module, engine, parallel=ipufit.Parallel(strategy=poptorch.ShardedExecution("0", "2"))
    ) == (
        "forward must enter a block of every stage that poptorch.ShardedExecution names, but it "
        "does not enter '2'. It enters '0', '1'. Begin the block with "
        "poptorch.BeginBlock(module, '2'), or leave it out of the strategy."
    )


class InForward(nn.Module):
    """Two blocks that forward alone enters."""

    def __init__(self):
        super().__init__()
        self.layers = net(None, None)

    def forward(self, x):
        with poptorch.Block("A", ipu_id=0):
            x = self.layers[0](x)
        with poptorch.Block("B", ipu_id=1):
            return self.layers[1](x)


def compiled_alone(module, engine="embedded", **options):
    """Without a word about IPUs."""
    model = ipufit.Model(module, engine=engine)
    model.compile("sgd", "cross_entropy", **options, **unmeasured(engine, **options))
    return model


@pytest.mark.long
@ENGINES
@pytest.mark.parametrize("make", [lambda: net(0, 1), InForward], ids=["annotated", "in forward"])
def test_the_ipus_of_a_replica_are_those_of_the_blocks(engine, make):
    """Whether a replica is all there is, or the IPUs are shared out; numbers are those of one."""
    work = {"batch_size": 1, "gradient_accumulation": 3, "verbose": 0, "shuffle": False}
    plain = {}
    for replicas in (1, 2):
        plain[replicas] = compiled_alone(net(None, None), engine)
        plain[replicas].fit(X, Y, ipus=replicas, **work)
    for ipus, replicas in ((None, 1), (2, 1), (4, 2)):
        model = compiled_alone(make(), engine)
        model.fit(X, Y, ipus=ipus, **work)
        found = model.history.params
        assert (found["replicas"], found["ipus"]) == (replicas, 2 * replicas)
        for one, other in zip(model.module.parameters(), plain[replicas].module.parameters()):
            assert torch.equal(one, other)
    with pytest.raises(PlanError, match="must be a power of two that stages=2 divides, got 1"):
        compiled_alone(make(), engine).fit(X, Y, ipus=1, **work)


@pytest.mark.long
@ENGINES
@pytest.mark.parametrize("make", [lambda: net(0, 1), InForward], ids=["annotated", "in forward"])
def test_inference_alone_has_the_ipus_of_the_blocks(engine, make):
    """Also where nothing was trained before, and beside a training that follows."""
    model = compiled_alone(make(), engine)
    plain = compiled_alone(net(None, None), engine)
    work = {"batch_size": 2, "device_iterations": 2, "verbose": 0}
    expected = plain.predict(X, **work)
    assert torch.equal(model.predict(X, ipus=4, **work), expected)
    assert model._session.divided.partitions.inference.ipus == 2
    fit(model, 3)
    assert model.history.params["ipus"] == 2


@ENGINES
def test_a_pipeline_of_counted_blocks_must_be_filled(engine):
    for make in (lambda: net(0, 1), InForward):
        assert message(fit, compiled_alone(make(), engine), 2, kind=PlanError) == (
            "`gradient_accumulation` must be at least 3 to fill a training pipeline of 2 "
            "stages, forward and backward, got 2. Try 3."
        )


@pytest.mark.few
@ENGINES
def test_options_say_how_the_counted_blocks_run(engine, capsys):
    """Sharded blocks are no pipeline that would have to be filled."""
    for make in (lambda: net(0, 1), InForward):
        options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
        model = compiled_alone(make(), engine, poptorch=options)
        fit(model, 1)
        model.explain()
        text = "Training: sharded over 2 IPUs by the module's own blocks."
        assert text in capsys.readouterr().out.splitlines()


@pytest.mark.few
@ENGINES
def test_replicas_of_options_are_so_many_times_the_counted_blocks(engine):
    for make in (lambda: net(0, 1), InForward):
        options = poptorch.Options().replicationFactor(2)
        options.Training.gradientAccumulation(3)
        model = compiled_alone(make(), engine, poptorch=options)
        fit(model, None)
        found = model.history.params
        assert (found["replicas"], found["ipus"]) == (2, 4)
        with pytest.raises(PlanError, match="replicationFactor x 2 IPUs of a replica, which says"):
            model.fit(X, Y, batch_size=2, ipus=2, verbose=0)


def stream():
    """Batches that can be read once."""
    return ((X[i : i + 2], Y[i : i + 2]) for i in range(0, 12, 2))


@pytest.mark.few
@ENGINES
def test_ipus_of_a_stream_can_not_be_shared_out_before_blocks_show(engine):
    """Where they are one replica, or the annotations or the user say it, they need not be."""
    work = {"gradient_accumulation": 3, "verbose": 0}
    with pytest.raises(PartitionError) as caught:
        compiled_alone(InForward(), engine).fit(stream(), ipus=4, **work)
    assert str(caught.value) == (
        "ipus=4 was divided into replicas before the first batch, which can't be read twice, "
        "showed that the module's own blocks need 2 IPUs. Pass ipus_per_replica=2 to compile."
    )
    cured = compiled_alone(InForward(), engine, parallel=ipufit.Parallel(ipus_per_replica=2))
    for model, ipus in (
        (cured, 4),
        (compiled_alone(net(0, 1), engine), 4),
        (compiled_alone(InForward(), engine), None),
    ):
        model.fit(stream(), ipus=ipus, **work)
        assert model.history.params["ipus"] == (ipus or 2)


def test_a_module_without_blocks_is_recorded_as_often_as_ever():
    """Only blocks make it run once more, and IPUs that are to be shared out before it runs."""
    calls = []

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            calls.append(len(x))
            return self.layer(x)

    fit(compiled_alone(Counting()), 1)
    assert calls == [2]


def test_blocks_are_not_counted_where_the_module_needs_values():
    """What runs eagerly can't be looked at beforehand: it counts as one stage per IPU."""

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = net(0, 1, 0)

        def forward(self, x):
            return self.layers(x) if float(x.sum()) < 1e9 else x

    model = over_two(Branching(), run_eagerly=True)
    fit(model, 3)
    assert model.history.params["ipus"] == 2
