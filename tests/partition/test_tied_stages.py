"""Weights that are shared across IPUs: what reads one again goes back to the IPU that has it."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.engines.ipu.engine import IpuEngine
from ipufit.errors import PartitionError, PlanError
from ipufit.partition.own_blocks import record_blocks
from ipufit.planner.pipeline_schedule import least_accumulation, simulate
from ipufit.planner.rendering import size
from ipufit.report.advice import _of_stages
from ipufit.report.facts import partition
from ipufit.report.page.document import render_section
from ipufit.report.page.pipeline import pipeline
from tests.fitting import assert_equal, unmeasured
from tests.ipu_calls import Recorder

pytestmark = pytest.mark.both_engines

ENGINES = pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
# The other engine in --exhaustive runs.
ENGINES_AT_LENGTH = pytest.mark.parametrize(
    "engine", ["embedded", pytest.param("ipu-standin", marks=pytest.mark.long)]
)
WORDS = 11
X = torch.randint(0, WORDS, (26, 5), generator=torch.Generator().manual_seed(0))


class Decoder(nn.Module):
    """A language model whose head has the weight of the embedding, as GPT-2's."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.place = nn.Parameter(torch.randn(5, 8))
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) + self.place
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x)).transpose(1, 2)


class Stack(nn.Module):
    """Half of an encoder and a decoder, with an embedding of its own name."""

    def __init__(self, embed=None):
        super().__init__()
        self.embed = embed or nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x, context=0.0):
        x = self.embed(x) + context
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x)


class EncoderDecoder(nn.Module):
    """One weight for two embeddings and the head, as T5's.

    Args:
        how: "weight" ties the weights of two embeddings, "module" has one module for both,
            "decoder" ties that of the decoder alone with the head, as Whisper does.
    """

    def __init__(self, how="weight"):
        super().__init__()
        self.encoder = Stack()
        self.decoder = Stack(self.encoder.embed if how == "module" else None)
        self.head = nn.Linear(8, WORDS)
        if how == "weight":
            self.decoder.embed.weight = self.encoder.embed.weight
        self.head.weight = self.decoder.embed.weight

    def forward(self, x):
        return self.head(self.decoder(x.flip(1), self.encoder(x))).transpose(1, 2)


NETS = {
    "decoder": Decoder,
    "both": EncoderDecoder,
    "module": lambda: EncoderDecoder("module"),
    "one": lambda: EncoderDecoder("decoder"),
}
# What begins the stages, and the IPU of each.
EXPECTED = [
    ("decoder", [2, 2], [("layers.0", 0), ("layers.2", 1), ("head", 2)], (0, 1, 0)),
    ("decoder", [0, 4], [("layers.0", 1), ("head", 2)], (0, 1, 0)),
    (
        "decoder",
        [4, 0],
        [("layers.0", 0), ("after layers.3", 1), ("head", 2)],
        (0, 1, 0),
    ),
    (
        "both",
        [2, 2],
        [("encoder.layers.0", 0), ("decoder.layers.0", 1), ("head", 2)],
        (0, 1, 0),
    ),
    (
        "both",
        [1, 3],
        [
            *(("encoder.layers.0", 0), ("encoder.layers.1", 1), ("decoder.embed", 2)),
            *(("decoder.layers.0", 3), ("head", 4)),
        ],
        (0, 1, 0, 1, 0),
    ),
    (
        "both",
        [1, 1, 1, 1],
        [
            *(("encoder.layers.0", 0), ("encoder.layers.1", 1), ("decoder.embed", 2)),
            *(("decoder.layers.0", 3), ("decoder.layers.1", 4), ("head", 5)),
        ],
        (0, 1, 0, 2, 3, 0),
    ),
    (
        "module",
        [1, 3],
        [
            *(("encoder.layers.0", 0), ("encoder.layers.1", 1), ("after encoder.layers.1", 2)),
            *(("decoder.layers.0", 3), ("head", 4)),
        ],
        (0, 1, 0, 1, 0),
    ),
    ("one", [2, 2], [("encoder.layers.0", 0), ("decoder.embed", 1)], ()),
    (
        "one",
        [2, 1, 1],
        [
            *(("encoder.layers.0", 0), ("decoder.embed", 1)),
            *(("decoder.layers.1", 2), ("head", 3)),
        ],
        (0, 1, 2, 1),
    ),
]


def made(kind):
    torch.manual_seed(0)
    return NETS[kind]()


def trained(net, engine="embedded", accumulation=11, **options):
    """The model after two epochs of a full update and a smaller one, history and evaluation."""
    model = ipufit.Model(net, engine=engine)
    parallel = options.pop("parallel", ipufit.Parallel())
    parallel = dataclasses.replace(parallel, auto_round_ipus=True)
    model.compile("adam", "cross_entropy", parallel=parallel, **options, **unmeasured(engine))
    work = {"batch_size": 2, "verbose": 0}
    history = model.fit(X, X, epochs=2, gradient_accumulation=accumulation, seed=3, **work)
    return model, history.history, model.evaluate(X, X, **work)


@pytest.fixture(scope="module")
def whole():
    """The same nets on one IPU, by kind and engine."""
    return functools.lru_cache(maxsize=None)(lambda kind, engine: trained(made(kind), engine))


@pytest.mark.parametrize(("kind", "layers", "begins", "places"), EXPECTED)
def test_what_shares_a_weight_goes_back_to_it(kind, layers, begins, places):
    model = ipufit.Model(made(kind))
    model.compile(
        "sgd",
        "cross_entropy",
        parallel=ipufit.Parallel(layers_per_ipu=layers, auto_round_ipus=True),
    )
    found = model._session.divided.partitions.training
    assert (list(found.begins), found.places) == (begins, places)
    assert found.ipus == len(layers)
    assert found.stages == (len(places) or len(layers))


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "layers", "strategy", "engine"),
    [
        pytest.param(
            *(kind, layers, strategy, engine), marks=() if engine in quick else pytest.mark.long
        )
        for kind, layers, strategy, quick in (
            ("decoder", [2, 2], "pipelined", ["ipu-standin"]),
            ("decoder", [0, 4], "pipelined", ["embedded"]),
            ("decoder", [4, 0], "pipelined", ["embedded"]),
            ("both", [2, 2], "pipelined", []),
            ("both", [1, 3], "pipelined", ["ipu-standin"]),
            ("both", [1, 1, 1, 1], "pipelined", ["embedded"]),
            ("module", [1, 3], "pipelined", ["embedded"]),
            ("one", [2, 2], "pipelined", []),
            ("one", [2, 1, 1], "pipelined", ["embedded"]),
            ("decoder", [2, 2], "sharded", ["embedded"]),
            ("both", [1, 3], "sharded", ["ipu-standin"]),
        )
        for engine in ("embedded", "ipu-standin")
    ],
)
def test_the_bits_are_those_of_the_whole_module(whole, engine, kind, layers, strategy):
    """Weights, History and evaluation; full updates and smaller ones."""
    expected = whole(kind, engine)
    found = trained(
        made(kind), engine, parallel=ipufit.Parallel(layers_per_ipu=layers, strategy=strategy)
    )
    assert_equal(found[0].module, expected[0].module)
    assert found[1:] == expected[1:]
    head = found[0].module.head.weight
    assert any(head is p for n, p in found[0].module.named_parameters() if "embed" in n)


@pytest.mark.long
@ENGINES
def test_the_weights_are_those_of_a_loop_by_hand(engine):
    """One gradient has both uses of the weight, in every micro-batch."""
    kind = torch.float32 if engine == "ipu-standin" else torch.float64
    net, plain = made("decoder").to(kind), made("decoder").to(kind)
    model = ipufit.Model(net, engine=engine)
    model.compile(
        lambda p: torch.optim.SGD(p, lr=0.1),
        "cross_entropy",
        parallel=ipufit.Parallel(layers_per_ipu=[2, 2]),
        **unmeasured(engine),
    )
    rows = X[:20]
    model.fit(rows, rows, batch_size=2, gradient_accumulation=5, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for update in rows.split(10):
        optimizer.zero_grad()
        for part in update.split(2):
            (nn.functional.cross_entropy(plain(part), part) / 5).backward()
        optimizer.step()
    near = 1e-10 if kind is torch.float64 else 1e-6
    for (name, value), wanted in zip(net.named_parameters(), plain.parameters()):
        torch.testing.assert_close(value, wanted, rtol=0, atol=near, msg=name)


@pytest.mark.long
def test_a_table_in_parts_on_one_ipu_goes_along():
    """With a factor the embedding has its weight in parts, and so has the head."""
    cut = {"embed": WORDS}
    model, history, value = trained(
        made("decoder"),
        parallel=ipufit.Parallel(layers_per_ipu=[2, 2]),
        memory=ipufit.Memory(serialize=cut),
    )
    assert model._session.divided.partitions.training.places == (0, 1, 0)
    assert (history, value) == trained(made("decoder"), memory=ipufit.Memory(serialize=cut))[1:]


@pytest.mark.long
@ENGINES_AT_LENGTH
def test_every_stage_needs_its_micro_batches(engine):
    """As PopTorch counts them: changes of the IPU, forward and back."""
    for accumulation in (3, 4):
        with pytest.raises(PlanError) as caught:
            trained(
                made("decoder"),
                engine,
                accumulation,
                parallel=ipufit.Parallel(layers_per_ipu=[2, 2]),
            )
        assert str(caught.value) == (
            "`gradient_accumulation` must be at least 5 to fill a training pipeline of 3 "
            f"stages, forward and backward, got {accumulation}. Try 5."
        )
    trained(made("decoder"), engine, 5, parallel=ipufit.Parallel(layers_per_ipu=[2, 2]))


@pytest.mark.long
def test_poptorch_gets_ascending_stages_on_ipus_that_return():
    """AutoStage.SameAsIpu would number the last stage 0, which no pipeline of PopTorch's can be."""
    recorder = Recorder()
    with recorder.watching(), record_blocks() as entered:
        trained(
            made("both"),
            lambda: IpuEngine(recorder, "ipu-standin"),
            parallel=ipufit.Parallel(layers_per_ipu=[1, 3]),
        )
    blocks = [(f"ipufit stage {stage}", ipu) for stage, ipu in enumerate((0, 1, 0, 1, 0))]
    assert [(name, ipu) for name, ipu in entered if str(name).startswith("ipufit")][:5] == blocks
    given = [call.args[0] for call in recorder.calls if call.name == "setExecutionStrategy"]
    assert type(given[0]) is poptorch.PipelinedExecution
    assert {strategy._auto_stage for strategy in given} == {poptorch.AutoStage.AutoIncrement}


@pytest.mark.long
def test_blocks_of_the_module_that_return_are_numbered_upwards_too():
    recorder = Recorder()
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer, ipu in zip(net, (0, 1, 0)):
        poptorch.BeginBlock(layer, ipu_id=ipu)
    x, y = torch.randn(10, 4), torch.randint(0, 4, (10,))
    with recorder.watching():
        model = ipufit.Model(net, lambda: IpuEngine(recorder, "ipu-standin"))
        model.compile("sgd", "cross_entropy", parallel=ipufit.Parallel(ipus_per_replica=2))
        model.fit(x, y, batch_size=2, gradient_accumulation=5, verbose=0)
    given = [call.args[0] for call in recorder.calls if call.name == "setExecutionStrategy"]
    assert given[0]._auto_stage == poptorch.AutoStage.AutoIncrement


@pytest.mark.long
def test_explain_says_where_the_stages_are(capsys):
    model, _, _ = trained(made("decoder"), parallel=ipufit.Parallel(layers_per_ipu=[2, 2]))
    model.explain()
    lines = capsys.readouterr().out.splitlines()
    assert (
        "  IPUs                    2  which share one replica, as a pipeline of 3 stages" in lines
    )
    assert "IPUs: 2 planned, 2 used (1 replica x 2 IPUs), none idle." in lines
    assert (
        "Training: pipelined over 3 stages on 2 IPUs: stage 0 from layers.0; stage 1 from layers.2;"
        " stage 2 from head on IPU 0."
    ) in lines
    model.summary()
    assert "stage 2 begins on IPU 0" in capsys.readouterr().out


def refused(net, engine="embedded", **options):
    with pytest.raises(PartitionError) as caught:
        trained(net, engine, **options)
    return str(caught.value)


@pytest.mark.long
@ENGINES_AT_LENGTH
def test_stages_that_put_a_weight_on_two_ipus_say_how_to_go_back(whole, engine):
    """What the error says, done, trains to the bits of the whole."""
    stages = {"layers.2": 1}
    assert refused(made("decoder"), engine, parallel=ipufit.Parallel(stages=stages)) == (
        "a parameter must be on one IPU, but 'embed.weight' and 'head.weight' are one parameter, "
        "in stages 0 and 1. Put all its uses into one stage, let 'head' go back to IPU 0 as stage "
        "2, with 'head': (2, 0) in stages, or give each its own copy: module.weight = "
        "torch.nn.Parameter(module.weight.detach().clone())."
    )
    stages["head"] = (2, 0)
    found = trained(made("decoder"), engine, parallel=ipufit.Parallel(stages=stages))
    expected = whole("decoder", engine)
    assert_equal(found[0].module, expected[0].module)
    assert found[1:] == expected[1:]


@pytest.mark.long
def test_a_weight_that_is_wanted_in_the_middle_says_so_too(whole):
    stages = {"encoder.layers.1": 1, "decoder.layers.1": 2}
    assert refused(made("both"), parallel=ipufit.Parallel(stages=stages)) == (
        "a parameter must be on one IPU, but 'encoder.embed.weight' and 'decoder.embed.weight' are "
        "one parameter, in stages 0 and 1. Put all its uses into one stage, let 'decoder.embed' go "
        "back to IPU 0 as stage 2, with 'decoder.embed': (2, 0) in stages and pairs with higher "
        "numbers after it, or give each its own copy: module.weight = "
        "torch.nn.Parameter(module.weight.detach().clone())."
    )
    stages = {
        **{"encoder.layers.1": 1, "decoder.embed": (2, 0), "decoder.layers.0": (3, 1)},
        **{"decoder.layers.1": (4, 2), "head": (5, 0)},
    }
    found = trained(made("both"), parallel=ipufit.Parallel(stages=stages))
    assert_equal(found[0].module, whole("both", "embedded")[0].module)
    assert found[0]._session.divided.partitions.training.places == (0, 1, 0, 1, 2, 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"parallel": ipufit.Parallel(stages={"layers.2": 1, "head": (2, 0, 1)})},
            "stages['head'] as a pair must be the number of a stage and that of its IPU, both from "
            "0, got (2, 0, 1). Write for example (2, 0).",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"layers.2": 1, "head": (2, torch.tensor(0.0))})},
            "stages['head'] as a pair must be the number of a stage and that of its IPU, both from "
            "0, got (2, tensor(0.)). Write for example (2, 0).",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"layers.2": 1, "head": (2, -1)})},
            "stages['head'] as a pair must be the number of a stage and that of its IPU, both from "
            "0, got (2, -1). Write for example (2, 0).",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"layers.2": 1, "norm": (2, 0), "head": (2, 1)})},
            "stages must put a stage on one IPU, but stage 2, with 'head', is put on IPU 0 and on "
            "IPU 1. Give the stage the same pair throughout.",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"layers.2": 1, "head": (2, 1)})},
            "stages must begin a stage only where the IPU changes, but stages 1 and 2 are both on "
            "IPU 1. Merge them into one stage.",
        ),
        (
            {"parallel": ipufit.Parallel(stages={"layers.1": 1, "layers.2": (2, 0), "head": 3})},
            "stages must begin on IPU 0 and number the IPUs without gaps, got stages on IPUs 0, 1, "
            "0, 3. A single number is both stage and IPU; after a stage that goes back, write "
            "(number, IPU).",
        ),
        (
            {
                "parallel": ipufit.Parallel(
                    stages={"layers.2": 1, "head": (2, 0)}, strategy="parallel_phased"
                )
            },
            "stages puts a stage on a chosen IPU, (number, IPU), but the strategy is "
            "'parallel_phased', whose phases use the IPUs in turn. Pass only numbers, or use "
            "strategy='pipelined' or 'sharded'.",
        ),
        (
            {
                "parallel": ipufit.Parallel(stages={"layers.2": 1, "head": (2, 0)}),
                "memory": ipufit.Memory(serialize={"layers.0.0": [1, 1]}),
            },
            "stages puts a stage on a chosen IPU, (number, IPU), but serialised layers have parts "
            "on several IPUs, which define the stages. Cut them by a factor, or pass only numbers.",
        ),
        (
            {
                "parallel": ipufit.Parallel(
                    stages={"layers.2": 1, "head": (2, 0)}, ipus_per_replica=4
                )
            },
            "ipus_per_replica must be the number of IPUs that the pipelined stages need, 2, got 4. "
            "Leave it out.",
        ),
    ],
)
def test_pairs_that_can_not_work_are_refused(options, text):
    with pytest.raises(PartitionError) as caught:
        ipufit.Model(made("decoder")).compile("sgd", "cross_entropy", **options)
    assert str(caught.value) == text


@pytest.mark.long
def test_a_head_that_a_function_computes_is_refused():
    """No call of a module begins it."""

    class Functional(Decoder):
        def forward(self, x):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return nn.functional.linear(x, self.embed.weight).transpose(1, 2)

    text = refused(Functional(tied=False), parallel=ipufit.Parallel(layers_per_ipu=[2, 2]))
    assert text.startswith(
        "a parameter must be on one IPU, but 'embed.weight' is used in stages 0 and 1. Put all its "
        "uses into one stage, or give each its own copy"
    )
    stages = {"layers.2": 1, "after layers.3": (2, 0)}
    trained(Functional(tied=False), parallel=ipufit.Parallel(stages=stages))


def test_weights_that_layers_share_stay_where_they_are():
    net = made("decoder")
    net.layers[3][0].weight = net.layers[0][0].weight
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy", parallel=ipufit.Parallel(layers_per_ipu=[2, 2]))
    assert [name for name, _ in model._session.divided.partitions.training.begins][-1] == "head"
    assert "'layers.0.0.weight' and 'layers.3.0.weight'" in refused(
        net, parallel=ipufit.Parallel(layers_per_ipu=[2, 2])
    )


@pytest.mark.long
def test_a_plan_adds_up_what_is_on_an_ipu(whole):
    """The weight once; the time and the memory of both stages."""
    model = ipufit.Model(made("decoder"))
    model.compile("adam", "cross_entropy", parallel=ipufit.Parallel(layers_per_ipu=[2, 2]))
    plan = model.plan((X[:2], X[:2]), gradient_accumulation=8)
    assert plan.stages == {"layers.0": (0, 0), "layers.2": (1, 1), "head": (2, 0)}
    assert sum(cost.parameters for cost in plan.costs) == sum(
        p.numel() for p in model.module.parameters()
    )
    first, second, third = plan.stage_memory
    assert plan.memory == [first + third, second]
    line = plan.timeline()
    for ipu in (0, 1):
        tasks = [task for task in line.tasks if plan.ipu_of(task.stage) == ipu]
        assert all(one.end <= other.begin + 1e-12 for one, other in zip(tasks, tasks[1:]))
    assert line.utilisation == pytest.approx(8 / (2 * line.total), abs=1e-12)
    text = str(plan)
    assert "on 2 IPUs, pipelined in 3 stages" in text
    assert "2: head on IPU 0 " in text
    assert "stages 0 and 2 on IPU 0 need most" in text
    assert "Stages on the same IPU run one after the other in every step of the pipeline." in text
    facts = plan.to_dict()
    assert (facts["places"], [stage["ipu"] for stage in facts["stages"]]) == ([0, 1, 0], [0, 1, 0])
    found = trained(made("decoder"), parallel=ipufit.Parallel(stages=plan))
    assert_equal(found[0].module, whole("decoder", "embedded")[0].module)


def test_a_plan_does_not_fit_if_both_stages_of_an_ipu_do_not():
    """Each of them would."""
    model = ipufit.Model(made("decoder"))
    model.compile("adam", "cross_entropy", parallel=ipufit.Parallel(layers_per_ipu=[2, 2]))
    plan = model.plan((X[:2], X[:2]))
    limit = max(*plan.stage_memory, plan.memory[1])
    assert limit < plan.memory[0]
    small = model.plan((X[:2], X[:2]), ipu_memory=limit)
    assert not small.fits
    text = " ".join(str(small).split())
    assert "; stages 0 and 2 on IPU 0 need most, " in text
    assert ", and do not fit." in text


def test_stages_on_one_ipu_take_turns():
    """Three stages of the same time on two IPUs: a step takes twice as long as one of them."""
    line = simulate("grouped", [1, 1, 1], [2, 2, 2], 10, (0, 1, 0))
    apart = simulate("grouped", [1, 1, 1], [2, 2, 2], 10)
    full = simulate("grouped", [1, 1, 1], [2, 2, 2], 11, (0, 1, 0)).total - line.total
    assert full == 6
    assert line.utilisation == pytest.approx(90 / (2 * line.total))
    assert line.total > apart.total
    sequential = simulate("sequential", [1, 1, 1], [2, 2, 2], 10, (0, 1, 0))
    assert (sequential.total, sequential.utilisation) == (90, 0.5)
    count, limit = least_accumulation("grouped", [1, 3, 1], [1, 3, 1], 0.82, (0, 1, 0))
    assert limit == pytest.approx(10 / 12)
    used = [
        simulate("grouped", [1, 3, 1], [1, 3, 1], n, (0, 1, 0)).utilisation
        for n in (count - 1, count)
    ]
    assert used[0] < 0.82 <= used[1]


@pytest.mark.long
@ENGINES_AT_LENGTH
def test_auto_goes_back_where_that_is_faster(engine, capsys):
    """Without it nothing could be divided between the embedding and the head."""
    model = ipufit.Model(made("decoder"), engine=engine)
    parallel = ipufit.Parallel(stages="auto", ipus_per_replica=2)
    model.compile("adam", "cross_entropy", parallel=parallel, **unmeasured(engine))
    for _ in range(2):
        with pytest.raises(PlanError) as caught:
            model.fit(X, X, batch_size=2, gradient_accumulation=3, verbose=0)
        assert caught.value.suggestion == {"gradient_accumulation": 5}
    model.fit(X, X, batch_size=2, gradient_accumulation=5, verbose=0)
    plan = model.plan((X[:2], X[:2]), ipus_per_replica=2)
    assert plan.planned.places == (0, 1, 0)
    assert plan.stages == model.plan().stages
    assert list(plan.stages)[-1] == "head"
    begins = "; ".join(
        f"stage {stage} from {name}{' on IPU 0' if stage == 2 else ''}"
        for stage, name in enumerate(plan.stages)
    )
    model.explain()
    said = f"Training: pipelined over 3 stages on 2 IPUs found by ipufit: {begins}."
    assert said in capsys.readouterr().out.splitlines()


def test_a_report_shows_which_stages_share_an_ipu():
    model, _, _ = trained(made("decoder"), parallel=ipufit.Parallel(layers_per_ipu=[2, 2]))
    plan = ipufit.Plan.make(micro_batch_size=2, stages=2, gradient_accumulation=11)
    facts = partition(model._session, plan)
    page = str(render_section(pipeline({"plan": facts})))
    assert "2: head on IPU 0" in page
    assert "Stages, on 2 IPUs" in page
    assert "takes turns with it" in page
    said = [text for text, _ in _of_stages({**facts, "fits": False, "memory": 100}, {})]
    need = facts["stages"][0]["memory"] + facts["stages"][2]["memory"]
    assert f"The stages on IPU 0 need {size(need)} of 100 B, by estimate." in said


@ENGINES
def test_a_pipeline_of_own_blocks_that_is_not_filled_is_refused_again(engine):
    """Not only by the first call, which counts its stages."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer, ipu in zip(net, (0, 1, 0)):
        poptorch.BeginBlock(layer, ipu_id=ipu)
    model = ipufit.Model(net, engine=engine)
    model.compile("sgd", "cross_entropy", parallel=ipufit.Parallel(ipus_per_replica=2))
    x, y = torch.randn(10, 4), torch.randint(0, 4, (10,))
    for _ in range(2):
        with pytest.raises(PlanError, match="at least 5 to fill a training pipeline of 3 stages"):
            model.fit(x, y, batch_size=2, gradient_accumulation=3, verbose=0)
