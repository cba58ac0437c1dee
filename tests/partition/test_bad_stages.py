"""Divisions that can't work, refused before anything runs; the texts of the errors."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.errors import ConfigurationError, PartitionError, PlanError, UnknownNameError
from tests.fitting import unmeasured

pytestmark = pytest.mark.both_engines


class Net(nn.Module):
    """Two lists of layers, and a parameter that may be tied."""

    def __init__(self, order=("embed", "a", "b", "head"), tied=False):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.a = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.b = nn.ModuleList([nn.Tanh()])
        self.order = order
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        for name in self.order:
            x = self.b[0](x) if name == "b" else getattr(self, name)(x)
        return x


X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (12,), generator=torch.Generator().manual_seed(1))
KNOWN = "Known names: a, a.0, a.1, a.2, b, b.0, embed, head."


def compiled(net=None, engine="embedded", **options):
    model = ipufit.Model(net if net is not None else Net(), engine=engine)
    model.compile("sgd", "cross_entropy", **{**unmeasured(engine, **options), **options})
    return model


def message(error, **options):
    with pytest.raises(error) as caught:
        compiled(**options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"parallel": ipufit.Parallel(stages={"heat": 0})},
            UnknownNameError,
            f"unknown module in stages 'heat'. Did you mean 'head'? {KNOWN}",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"embed": 0, "head": 2})},
            PartitionError,
            "stages must number the stages without gaps, but no module begins stage 1, got 0, 2. "
            "Renumber them from 0.",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"embed": 1.5})},
            PartitionError,
            "stages['embed'] must be the number of a stage, from 0, got 1.5.",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"embed": torch.tensor(1.0)})},
            PartitionError,
            "stages['embed'] must be the number of a stage, from 0, got tensor(1.).",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"embed": True})},
            PartitionError,
            "stages['embed'] must be the number of a stage, from 0, got True.",
        ),
        (
            {"parallel": ipufit.Parallel(stages=["embed"])},
            PartitionError,
            "stages must map names of modules to numbers of stages, got ['embed']. Write for "
            "example stages={'encoder': 0, 'head': 1}.",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"head": 1}, layers_per_ipu=[1, 2])},
            PartitionError,
            "stages and layers_per_ipu both divide the module. Pass one of them.",
        ),
        (
            {"parallel": ipufit.Parallel(layers_per_ipu=[1, 1])},
            PartitionError,
            "layers_per_ipu must add up to the number of repeated layers, got 2 and the module has "
            "3 (3 in a). Write -1 for one of the numbers to assign the rest, or name the layers "
            "with layers=.",
        ),
        (
            {"parallel": ipufit.Parallel(layers_per_ipu=[2, -1, -1])},
            PartitionError,
            "layers_per_ipu must leave a layer for every -1, but the module has 3 (3 in a): the "
            "other IPUs take 2, and 2 entries of -1 share 1. Use fewer IPUs or smaller numbers.",
        ),
        (
            {"parallel": ipufit.Parallel(layers_per_ipu=[2, 0, 1])},
            PartitionError,
            "layers_per_ipu must give every IPU at least one layer, except the first, one after "
            "the last layer, and those with parts of a serialised layer, got 0 for IPU 1. Use "
            "fewer IPUs, with [2, 1], or put other modules there with "
            "stages={'name of a module': 1}.",
        ),
        (
            {"parallel": ipufit.Parallel(layers_per_ipu=[1, -2])},
            PartitionError,
            "layers_per_ipu must list a number of layers for every IPU, -1 for an even share of "
            "the rest, got [1, -2]. Write for example layers_per_ipu=[2, 3, -1, -1].",
        ),
        (
            {"parallel": ipufit.Parallel(layers_per_ipu=torch.tensor([1.0, 2.0]))},
            PartitionError,
            "layers_per_ipu must list a number of layers for every IPU, -1 for an even share of "
            "the rest, got tensor([1., 2.]). Write for example layers_per_ipu=[2, 3, -1, -1].",
        ),
        (
            {"parallel": ipufit.Parallel(layers_per_ipu=3)},
            PartitionError,
            "layers_per_ipu must list a number of layers for every IPU, -1 for an even share of "
            "the rest, got 3. Write for example layers_per_ipu=[2, 3, -1, -1].",
        ),
        (
            {"parallel": ipufit.Parallel(layers_per_ipu=[1, 2], layers="heat")},
            UnknownNameError,
            f"unknown module in layers 'heat'. Did you mean 'head'? {KNOWN}",
        ),
        (
            {"parallel": ipufit.Parallel(layers_per_ipu=[1, 2], layers=["a", "head"])},
            PartitionError,
            "layers must name modules that contain layers, but 'head' contains none. Name the "
            "ModuleList or Sequential.",
        ),
        (
            {"parallel": ipufit.Parallel(layers="a")},
            PartitionError,
            "layers says which layers layers_per_ipu counts, but there is no layers_per_ipu. Pass "
            "both or none.",
        ),
        (
            {"net": nn.Linear(4, 4), "parallel": ipufit.Parallel(layers_per_ipu=[1, 1])},
            PartitionError,
            "layers_per_ipu counts the blocks of a ModuleList or Sequential of equal blocks, but "
            "Linear has none. Name their container with layers='...', use "
            "stages={'name of a module': number of its stage}, or pass ipus_per_replica, for a "
            "module with blocks of its own.",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"head": 1}, strategy="pipelines")},
            UnknownNameError,
            "unknown strategy 'pipelines'. Did you mean 'pipelined'? Known names: "
            "parallel_phased, pipelined, serial_phased, sharded.",
        ),
        (
            {"parallel": ipufit.Parallel(strategy="sharded")},
            PartitionError,
            "strategy says how stages run, got 'sharded', but nothing divides the module. Pass "
            "stages or layers_per_ipu, or ipus_per_replica for a module with its own blocks. For "
            "overlapped IO on one IPU use poptorch= with "
            "setExecutionStrategy(poptorch.ShardedExecution()).",
        ),
        (
            {"parallel": ipufit.Parallel(strategy=3)},
            PartitionError,
            "strategy must be one of 'pipelined', 'sharded', 'serial_phased', 'parallel_phased', "
            "or an object such as poptorch.PipelinedExecution(), got 3.",
        ),
        (
            {
                "parallel": ipufit.Parallel(
                    stages={"head": 1}, strategy=poptorch.PipelinedExecution()
                )
            },
            PartitionError,
            "strategy as a PopTorch object names the module's own blocks, but stages or "
            "layers_per_ipu divides it too. Use strategy='pipelined', or leave the other out.",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"head": 1}, ipus_per_replica=4)},
            PartitionError,
            "ipus_per_replica must be the number of IPUs that the pipelined stages need, 2, got 4. "
            "Leave it out.",
        ),
        (
            {"parallel": ipufit.Parallel(ipus_per_replica=0)},
            PartitionError,
            "ipus_per_replica must be a positive whole number or None, got 0.",
        ),
        (
            {"parallel": ipufit.Parallel(ipus_per_replica=torch.tensor(2.5))},
            PartitionError,
            "ipus_per_replica must be a positive whole number or None, got tensor(2.5000).",
        ),
        (
            {"parallel": ipufit.Parallel(inference=ipufit.Parallel(layers_per_ipu=[1, 1]))},
            PartitionError,
            "inference.layers_per_ipu must add up to the number of repeated layers, got 2 and the "
            "module has 3 (3 in a). Write -1 for one of the numbers to assign the rest, or name "
            "the layers with layers=.",
        ),
    ],
)
def test_compile_refuses(options, error, text):
    assert message(error, **options) == text


def test_all_faults_are_told_at_once():
    text = message(
        ConfigurationError,
        parallel=ipufit.Parallel(
            stages={"heat": 0, "embed": -1},
            inference=ipufit.Parallel(strategy="shard", stages={"head": 1}),
        ),
    )
    assert text == (
        f"unknown module in stages 'heat'. Did you mean 'head'? {KNOWN}\n"
        "stages['embed'] must be the number of a stage, from 0, got -1.\n"
        "unknown inference.strategy 'shard'. Did you mean 'sharded'? Known names: "
        "parallel_phased, pipelined, serial_phased, sharded."
    )


def fit(model, **work):
    model.fit(X, Y, batch_size=2, **{"verbose": 0, "gradient_accumulation": 3, **work})


def fault(model, **work):
    with pytest.raises(PlanError) as caught:
        fit(model, **work)
    return str(caught.value), caught.value.suggestion


def test_a_training_pipeline_must_be_filled():
    """Forward and back: twice the stages, less one."""
    text, better = fault(
        compiled(parallel=ipufit.Parallel(layers_per_ipu=[1, 1, 1], auto_round_ipus=True)),
        gradient_accumulation=2,
    )
    assert text == (
        "`gradient_accumulation` must be at least 5 to fill a training pipeline of 3 stages, "
        "forward and backward, got 2. Try 5."
    )
    assert better == {"gradient_accumulation": 5}


def test_an_inference_pipeline_must_be_filled():
    model = compiled(
        parallel=ipufit.Parallel(
            stages={"head": 1}, inference=ipufit.Parallel(strategy="pipelined")
        )
    )
    with pytest.raises(PlanError) as caught:
        model.evaluate(X, Y, verbose=0)
    assert str(caught.value) == (
        "`device_iterations` must be at least 2 to fill a pipeline of 2 stages, got 1. Try 2."
    )


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["sharded", "serial_phased", "parallel_phased"])
def test_other_strategies_need_no_filling(strategy):
    model = compiled(
        parallel=ipufit.Parallel(
            stages={"head": 1}, strategy=strategy, inference=ipufit.Parallel(strategy=strategy)
        )
    )
    fit(model, gradient_accumulation=1)
    assert model.evaluate(X, Y, verbose=0)["loss"] > 0


def test_ipus_must_be_a_multiple_of_the_stages():
    text, _ = fault(
        compiled(parallel=ipufit.Parallel(stages={"a": 1, "head": 2})),
        ipus=8,
        gradient_accumulation=5,
    )
    assert text == (
        "`ipus`, the total number of IPUs, must be a power of two that stages=3 divides (there is "
        "none), got 8. Try 6 or 9 with compile(..., "
        "parallel=ipufit.Parallel(auto_round_ipus=True))."
    )


ENGINES = pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])


def broken(model, **work):
    """The text of the error, and that no weight has changed."""
    before = [p.detach().clone() for p in model.module.parameters()]
    with pytest.raises(PartitionError) as caught:
        fit(model, **work)
    for parameter, value in zip(model.module.parameters(), before):
        assert torch.equal(parameter, value)
    return str(caught.value)


@ENGINES
def test_stages_run_in_the_order_of_their_numbers(engine):
    text = broken(compiled(engine=engine, parallel=ipufit.Parallel(stages={"embed": 1, "a.1": 0})))
    assert text == (
        "stages must run in the order of their numbers, but 'a.1' of stage 0 runs after 'embed' of "
        "stage 1. Give it stage 1 or later, or let forward call it earlier."
    )


@ENGINES
def test_a_module_that_is_called_again_later_is_out_of_order(engine):
    net = Net(order=("embed", "a", "embed", "head"))
    text = broken(compiled(net, engine, parallel=ipufit.Parallel(stages={"embed": 0, "a": 1})))
    assert text == (
        "stages must run in the order of their numbers, but 'embed' of stage 0 runs again after "
        "'a' of stage 1. Give it stage 1 or later, or let forward call it earlier."
    )


@pytest.mark.long
@ENGINES
@pytest.mark.parametrize("strategy", ["pipelined", "serial_phased"])
def test_a_module_that_begins_a_stage_must_run(engine, strategy):
    """Without it, a phase would have no block."""
    net = Net(order=("embed", "a"))
    text = broken(
        compiled(
            net, engine, parallel=ipufit.Parallel(stages={"a": 0, "head": 1}, strategy=strategy)
        )
    )
    assert text == (
        "every module that begins a stage must be called by forward, but 'head' was not. Name a "
        "module that is called as module(...), not one whose parameters are used from outside."
    )


@pytest.mark.long
@ENGINES
def test_tied_weights_on_two_stages_are_refused(engine):
    text = broken(
        compiled(Net(tied=True), engine, parallel=ipufit.Parallel(stages={"embed": 0, "head": 1}))
    )
    assert text == (
        "a parameter must be on one IPU, but 'embed.weight' and 'head.weight' are one parameter, "
        "in stages 0 and 1. Put all its uses into one stage, or give each its own copy: "
        "module.weight = torch.nn.Parameter(module.weight.detach().clone())."
    )
    net = Net(order=("embed", "a", "embed", "head"))
    text = broken(compiled(net, engine, parallel=ipufit.Parallel(stages={"a": 1})))
    assert text == (
        "a parameter must be on one IPU, but 'embed.weight' is used in stages 0 and 1. Put all its "
        "uses into one stage, or give each its own copy: module.weight = "
        "torch.nn.Parameter(module.weight.detach().clone())."
    )


@ENGINES
def test_parts_of_a_layer_lie_on_the_ipus_of_a_replica(engine):
    """They begin stages themselves, in the order of their IPUs."""
    wrong = {"engine": engine, "memory": ipufit.Memory(serialize={"head": [1, 1]})}
    assert message(PartitionError, **wrong) == (
        "splits_per_ipu of serialised layers must have a number for each IPU of a replica, got 2 "
        "and a replica has 1. Divide the module with stages, or pass ipus_per_replica=2."
    )
    assert message(
        PartitionError, **wrong, parallel=ipufit.Parallel(stages={"a": 1}, strategy="serial_phased")
    ) == (
        "splits_per_ipu of serialised layers must have a number for each IPU of a replica, got 2 "
        "and a replica has 1. Divide the module with stages, or pass ipus_per_replica=2."
    )
    assert message(
        PartitionError,
        **wrong,
        parallel=ipufit.Parallel(stages={"a": 1}, strategy="parallel_phased"),
    ) == (
        "splits_per_ipu puts parts of one layer on several IPUs, which phases can't do, but the "
        "strategy is 'parallel_phased'. Use a factor, or another strategy."
    )
    assert broken(compiled(Net(), parallel=ipufit.Parallel(stages={"a.1": 1}), **wrong)) == (
        "stages must run in the order of their numbers, but 'head' has parts on IPU 0 and runs "
        "after 'a.1' of stage 1. Split it over IPU 1 and later ones."
    )


@ENGINES
def test_a_table_split_over_ipus_can_not_come_twice(engine):
    """Tied to the projection behind, its parts would be needed at both ends of the pipeline."""
    net = Net(tied=True)
    text = broken(
        compiled(
            net,
            engine,
            memory=ipufit.Memory(serialize={"embed": [1, 1]}),
            parallel=ipufit.Parallel(ipus_per_replica=2),
        )
    )
    assert text == (
        "stages must run in the order of their numbers, but 'head' has parts on IPU 0 and runs "
        "after 'embed' of stage 1. Split it over IPU 1 and later ones."
    )


@pytest.mark.long
@ENGINES
def test_tied_weights_on_one_stage_stay_tied(engine):
    net = Net(tied=True)
    fit(
        compiled(
            net, engine, parallel=ipufit.Parallel(stages={"a.1": 0, "a.2": 0}, ipus_per_replica=1)
        )
    )
    assert net.head.weight is net.embed.weight


class Blocks(nn.Module):
    """Two layers with blocks of their own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = poptorch.BeginBlock(nn.Linear(4, 4), "B", ipu_id=1)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.long
@ENGINES
@pytest.mark.parametrize("ipus", [1, 4])
def test_blocks_of_the_module_must_fit_what_compile_was_told(engine, ipus):
    """Without ipus_per_replica, or with their number, it trains."""
    assert broken(
        compiled(Blocks(), engine, parallel=ipufit.Parallel(ipus_per_replica=ipus)),
        gradient_accumulation=7,
    ) == (
        f"the module's own blocks put it on 2 IPUs, but ipus_per_replica is {ipus}. Leave it out, "
        "or set it to 2, in compile or in the config."
    )
    for told in ({}, {"parallel": ipufit.Parallel(ipus_per_replica=2)}):
        model = compiled(Blocks(), engine, **told)
        fit(model, gradient_accumulation=3)
        assert model.history.params["ipus"] == 2


@ENGINES
def test_a_module_is_divided_in_one_way(engine):
    assert broken(
        compiled(Blocks(), engine, parallel=ipufit.Parallel(stages={"first": 0, "second": 1}))
    ) == (
        "a module is divided either by its own blocks or by arguments of compile, but it has "
        "blocks, such as 'B', and also stages or layers_per_ipu. Remove its blocks with "
        "poptorch.removeBlocks(module), or leave the arguments out; with layers_per_ipu=[-1] in a "
        "config, pass ipus_per_replica=2."
    )


class Elsewhere(nn.Module):
    """Uses parameters outside of the modules that hold them."""

    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.way = "tied"

    def forward(self, x):
        if self.way == "tied":
            return nn.functional.linear(self.mid(self.embed(x)), self.embed.weight)
        if self.way == "root":
            return self.mid(self.embed(x * self.scale)) * self.scale
        return self.mid(self.embed(x)) * self.scale


@pytest.mark.long
@ENGINES
def test_a_parameter_is_seen_wherever_it_is_read(engine):
    """By a function with another module's weight, or as a parameter of the module itself."""
    net = Elsewhere()
    for way, name in (("tied", "embed.weight"), ("root", "scale")):
        net.way = way
        assert broken(compiled(net, engine, parallel=ipufit.Parallel(stages={"mid": 1}))) == (
            f"a parameter must be on one IPU, but '{name}' is used in stages 0 and 1. Put all its "
            "uses into one stage, or give each its own copy: module.weight = "
            "torch.nn.Parameter(module.weight.detach().clone())."
        )
    net.way = "once"
    fit(compiled(net, engine, parallel=ipufit.Parallel(stages={"mid": 1})))


def test_run_eagerly_is_checked_too():
    """An IPU refuses to run eagerly."""
    parallel = ipufit.Parallel(stages={"head": 1})
    text = broken(compiled(Net(tied=True), "embedded", parallel=parallel, run_eagerly=True))
    assert text.startswith("a parameter must be on one IPU, but 'embed.weight' and ")


def penalised(net, name, engine, **options):
    """Compiled with a loss that reads a weight of the module."""

    def loss(output, target):
        penalty = getattr(net, name).weight.square().sum()
        return nn.functional.cross_entropy(output, target) + 1e-3 * penalty

    model = ipufit.Model(net, engine=engine)
    model.compile("sgd", loss, **options)
    return model


@pytest.mark.few("ipu-standin")
@ENGINES
def test_the_loss_is_in_the_last_stage(engine):
    """What it reads is too."""
    text = broken(penalised(Net(), "embed", engine, parallel=ipufit.Parallel(stages={"head": 1})))
    assert text == (
        "a parameter must be on one IPU, but 'embed.weight' is used in stage 0 and by the loss, "
        "which is in stage 1. For a weight penalty, use weight_decay of the optimizer; otherwise "
        "move its user into the last stage."
    )
    fit(penalised(Net(), "head", engine, parallel=ipufit.Parallel(stages={"head": 1})))


class Idle(nn.Module):
    """Modules that have no operator of their own."""

    def __init__(self):
        super().__init__()
        self.a, self.i, self.f, self.b = (
            nn.Linear(4, 4),
            nn.Identity(),
            nn.Flatten(),
            nn.Linear(4, 4),
        )
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.b(self.f(self.i(self.a(x)))))


@ENGINES
def test_every_stage_computes_something(engine):
    cure = "Begin it with a module that has operators, or remove it and renumber the others."
    for stages, where in (
        ({"a": 1}, "stage 0, before the first name,"),
        ({"i": 1, "b": 2}, "stage 1, which begins with 'i',"),
        ({"a": 0, "f": 1, "b": 2}, "stage 1, which begins with 'f',"),
    ):
        net = compiled(
            Idle(), engine, parallel=ipufit.Parallel(stages=stages, auto_round_ipus=True)
        )
        assert broken(net, gradient_accumulation=5) == (
            f"every stage must compute something, but {where} computes nothing. {cure}"
        )
    model = compiled(Idle(), engine, parallel=ipufit.Parallel(stages={"drop": 1}))
    fit(model)
    with pytest.raises(PartitionError) as caught:
        model.evaluate(X, Y, verbose=0)
    assert str(caught.value) == (
        "every stage must compute something, but stage 1, which begins with 'drop', computes "
        f"nothing in inference. {cure} Use Parallel.inference to divide inference differently."
    )


class Auxiliary(nn.Module):
    """A layer that only training runs."""

    def __init__(self):
        super().__init__()
        self.body, self.aux = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.body(x)
        return self.aux(x) if self.training else x


@pytest.mark.few
@ENGINES
def test_inference_may_need_other_stages(engine):
    model = compiled(Auxiliary(), engine, parallel=ipufit.Parallel(stages={"aux": 1}))
    fit(model)
    with pytest.raises(PartitionError) as caught:
        model.predict(X, verbose=0)
    assert str(caught.value) == (
        "every module that begins a stage must be called by forward, but 'aux' was not called in "
        "inference, which has the same stages as training. Use Parallel.inference to divide it "
        "differently."
    )
    model = compiled(
        Auxiliary(),
        engine,
        parallel=ipufit.Parallel(stages={"aux": 1}, inference=ipufit.Parallel(stages={"body": 0})),
    )
    fit(model)
    assert model.predict(X, verbose=0).shape == X.shape


@pytest.mark.long
@ENGINES
def test_layers_that_torch_fuses_in_inference_keep_their_stages(engine):
    """They are computed in one piece then, without a call of what is inside."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.TransformerEncoder(layer, 1), nn.Flatten())
    options = [False] if engine != "embedded" else [False, True]
    for run_eagerly in options:
        model = compiled(
            net,
            engine,
            parallel=ipufit.Parallel(stages={"1.layers.0.linear1": 1}),
            run_eagerly=run_eagerly,
        )
        fit(model)
        assert model.predict(X, verbose=0).shape == X.shape
