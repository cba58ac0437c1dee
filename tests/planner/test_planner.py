"""plan: what stages take, and the division that stages='auto' finds."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import ipufit
from ipufit import poptorch
from ipufit.core.batch import MicroBatch
from ipufit.errors import PartitionError
from ipufit.partition.partition import Partition
from ipufit.planner.costs import IPU_MEMORY, memory_of, state_bytes
from ipufit.planner.measure import measure
from ipufit.planner.planning import best_cuts, cuts_of
from tests.planner.test_measuring import kept

pytestmark = pytest.mark.both_engines

WIDTHS = (6, 9, 4, 12, 3)
X, Y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])


def net():
    """Linear layers of different widths, with a ReLU after each."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in zip(WIDTHS, WIDTHS[1:])]
    return nn.Sequential(*layers)


def nbytes(tensor):
    return tensor.numel() * tensor.element_size()


def compiled(module=None, optimizer="adam", **options):
    model = ipufit.Model(module or net(), engine="embedded")
    # Without the measurements that choose among kernels.
    model.compile(optimizer, "cross_entropy", jit="graph", **options)
    return model


def test_an_ipu_has_the_memory_of_its_tiles():
    """1,472 tiles of 624 KiB."""
    assert IPU_MEMORY == 940_572_672


@pytest.mark.few
@pytest.mark.parametrize(
    ("optimizer", "per_value"),
    [
        ("sgd", 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1),
        ("adam", 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        ("rmsprop", 1),
        ("lamb", 2),
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_the_optimizers_state_is_what_it_really_keeps(optimizer, per_value, trained):
    """Found out beforehand, it is what there is after training, the step's counter included."""
    model = compiled(optimizer=optimizer)
    before = state_bytes(model.optimizer)
    if trained:
        model.fit(X, Y, batch_size=5, verbose=0)
        state = model.optimizer.state
        real = {
            id(p): sum(nbytes(t) for t in state[p].values() if isinstance(t, torch.Tensor))
            for p in model.module.parameters()
        }
        assert before == real == state_bytes(model.optimizer)
    for parameter in model.module.parameters():
        assert before[id(parameter)] - 4 * per_value * parameter.numel() in (0, 4)
    assert trained or not model.optimizer.state


@pytest.mark.long
def test_a_plan_adds_up_parameters_gradients_state_and_activations():
    """Held against the closed forms of linear layers on two stages."""
    model = compiled(parallel=ipufit.Parallel(stages={"2": 1}))
    plan = model.plan((X, Y), recompute=False)
    shapes = list(zip(WIDTHS, WIDTHS[1:]))
    for cost, part in zip(plan.costs, (shapes[:2], shapes[2:])):
        values = sum(a * b + b for a, b in part)
        assert cost.parameters == values
        assert cost.weight_bytes == cost.gradient_bytes == 4 * values
        # Two numbers per value, and a counter per parameter.
        assert cost.optimizer_bytes == 2 * 4 * values + 4 * 2 * len(part)
        assert cost.forward_flops == sum(2 * 5 * a * b for a, b in part)
    first, last = plan.costs
    assert first.backward_flops == 2 * first.forward_flops - 2 * 5 * 6 * 9
    assert last.backward_flops == 2 * last.forward_flops
    # The batch and the results of both ReLUs; then the result of the second, and what follows.
    assert first.activation_bytes == 4 * 5 * (6 + 9 + 4)
    assert first.input_bytes == 4 * 5 * 6
    loss = nn.CrossEntropyLoss()
    end = torch.randn(5, 4, requires_grad=True)
    assert last.activation_bytes == kept(model.module[2:], lambda: loss(model.module[2:](end), Y))
    assert last.input_bytes == 4 * 5 * 4 + nbytes(Y)
    # Three micro-batches of the first stage are in flight, one of the last.
    fixed = [c.weight_bytes + c.gradient_bytes + c.optimizer_bytes for c in plan.costs]
    kept_bytes = [3 * first.activation_bytes, last.activation_bytes]
    assert plan.memory == [a + b for a, b in zip(fixed, kept_bytes)]
    again = model.plan((X, Y))
    assert again.memory[0] == fixed[0] + 3 * 4 * 5 * 6 + 4 * 5 * (9 + 4)
    assert again.memory[1] == plan.memory[1]
    assert again.time_shares[0] > plan.time_shares[0]
    assert sum(plan.time_shares) == pytest.approx(1)


def activations_of(plan):
    """What activations take, stage by stage."""
    fixed = [c.weight_bytes + c.gradient_bytes + c.optimizer_bytes for c in plan.costs]
    return [memory - other for memory, other in zip(plan.memory, fixed)]


def linears(width, count):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


@pytest.mark.long
def test_recomputation_starts_from_inputs_and_from_the_layers_that_compile_names():
    """Linear layers keep their inputs, one value each: the output of the layer before."""
    x, one = torch.randn(5, 6), 4 * 5 * 6
    options = {
        "parallel": ipufit.Parallel(stages={"4": 1}),
        "memory": ipufit.Memory(recompute=["1", "5"]),
    }
    model = ipufit.Model(linears(6, 8))
    model.compile("sgd", "mse", **options)
    kept_all = model.plan((x, x), recompute=False)
    # The last stage keeps the target and the difference to it as well.
    assert activations_of(kept_all) == [3 * 4 * one, 4 * one + 2 * one]
    as_compiled = model.plan((x, x))
    # Of each of three micro-batches the inputs of 0 and 2; then, of one, at most that of 3. The
    # last stage keeps the inputs of 4 and 6 and the target; then that of 7 and the difference.
    assert activations_of(as_compiled) == [3 * 2 * one + one, 3 * one + 2 * one]
    assert as_compiled.to_dict() == model.plan((x, x), recompute=True).to_dict()
    assert as_compiled.to_dict() == model.plan((x, x), recompute=["1", "5"]).to_dict()
    assert "Recomputed: from the inputs of the stages and the outputs of 2 layers." in str(
        as_compiled
    )
    other = model.plan((x, x), recompute="0")
    assert activations_of(other) == [3 * 2 * one + 2 * one, 6 * one]
    assert "and the output of 1 layer." in str(other)
    assert (other.planned.checkpoints, as_compiled.planned.checkpoints) == (("0",), ("1", "5"))
    # The first stage runs all of its forward pass again, the last what comes before its checkpoint.
    first, last = as_compiled.costs
    assert first.backward(3, True) == first.backward_clocks + first.forward_clocks
    assert last.backward(1, True) == last.backward_clocks + last.recomputed_clocks
    assert 0 < last.recomputed_clocks < last.forward_clocks
    assert other.costs[1].recomputed_clocks == 0


def test_a_checkpoint_that_is_read_in_its_own_segment_is_kept():
    """As before an operator that no module calls."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.b(torch.sigmoid(self.a(x)))

    x, one = torch.randn(5, 6), 4 * 5 * 6
    model = ipufit.Model(Net())
    model.compile(
        "sgd", "mse", parallel=ipufit.Parallel(stages={"b": 1}), memory=ipufit.Memory(recompute="a")
    )
    assert activations_of(model.plan((x, x)))[0] == 3 * 2 * one + one


@pytest.mark.long
def test_activations_are_recomputed_as_poptorch_does_it():
    """In a pipeline, unless its options say otherwise, and nowhere else."""
    model = compiled()
    assert not model.plan((X, Y)).planned.recompute
    assert model.plan((X, Y), ipus_per_replica=2).planned.recompute
    assert not model.plan((X, Y), ipus_per_replica=2, strategy="sharded").planned.recompute
    assert not model.plan((X, Y), ipus_per_replica=2, recompute=False).planned.recompute
    assert model.plan((X, Y), recompute=True).planned.recompute
    for mode, expected in ((0, [False, False]), (3, [True, True]), (None, [False, True])):
        options = poptorch.Options()
        options._Popart.set("autoRecomputation", mode)
        model = ipufit.Model(net(), engine="ipu-standin")
        model.compile("adam", "cross_entropy", poptorch=options)
        plans = [model.plan((X, Y), ipus_per_replica=count) for count in (1, 2)]
        assert [plan.planned.recompute for plan in plans] == expected


@pytest.mark.long
def test_auto_counts_activations_as_the_plan_does(monkeypatch):
    """What fits only when it is recomputed is found; what does not fit says how it was counted."""
    model = compiled(parallel=ipufit.Parallel(stages="auto", ipus_per_replica=2))
    kept_all, found = (
        max(model.plan((X, Y), recompute=recompute).memory) for recompute in (False, None)
    )
    assert found < kept_all
    monkeypatch.setattr("ipufit.planner.planning.IPU_MEMORY", found)
    model.fit(X, Y, batch_size=5, gradient_accumulation=3, verbose=0)
    monkeypatch.setattr("ipufit.planner.planning.IPU_MEMORY", 500)
    for strategy, text in (
        ("pipelined", "2.2 KiB, with activations recomputed"),
        ("sharded", "2.0 KiB, with activations kept"),
    ):
        model.compile(
            "adam",
            "cross_entropy",
            parallel=ipufit.Parallel(stages="auto", ipus_per_replica=2, strategy=strategy),
        )
        with pytest.raises(PartitionError) as caught:
            model.fit(X, Y, batch_size=5, gradient_accumulation=3, verbose=0)
        assert str(caught.value) == (
            "stages='auto' must find stages that fit in an IPU's 500 B, but no division into 2 "
            f"does: in the most even one, the largest stage needs about {text}. Use a larger "
            "ipus_per_replica or smaller micro-batches, or name the stages, which are not checked."
        )


@pytest.mark.long
def test_the_batch_may_be_a_loader_or_that_of_the_last_fit():
    """Or inputs alone, and then the loss is not counted."""
    model = compiled(parallel=ipufit.Parallel(stages={"1": 1}))
    expected = model.plan((X, Y)).to_dict()
    data = torch.utils.data.TensorDataset(X, Y)
    assert model.plan(torch.utils.data.DataLoader(data, batch_size=5)).to_dict() == expected
    model.fit(X, Y, batch_size=5, gradient_accumulation=3, verbose=0)
    assert model.plan().to_dict() == expected
    alone = model.plan(X)
    assert alone.costs[0].forward_flops == expected["stages"][0]["forward_flops"]
    assert alone.costs[1].activation_bytes < expected["stages"][1]["activation_bytes"]
    json.dumps(expected)


@pytest.mark.long
def test_planning_changes_no_number():
    """Training afterwards goes as if there had been no plan."""
    nets = []
    for plans in (False, True):
        torch.manual_seed(1)
        model = compiled(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)))
        if plans:
            model.plan((X, Y))
        model.fit(X, Y, batch_size=5, epochs=2, verbose=0)
        nets.append(model.module.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(nets[0].values(), nets[1].values()))


@pytest.mark.long
@given(
    times=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    weights=st.lists(st.integers(0, 5), min_size=8, max_size=8),
    stages=st.integers(1, 4),
    memory=st.integers(4, 40),
)
@settings(deadline=None, max_examples=300)
def test_the_slowest_stage_is_as_fast_as_brute_force_makes_it(times, weights, stages, memory):
    """Earlier stages hold more micro-batches, so the same parts may fit later only."""
    parts = len(times)

    def time(begin, end):
        return sum(times[begin:end])

    def fits(stage, begin, end):
        return sum(weights[begin:end]) * (2 * (stages - stage) - 1) <= memory

    values = []
    for begins in itertools.combinations(range(1, parts), stages - 1):
        bounds = [0, *begins, parts]
        pairs = list(zip(bounds, bounds[1:]))
        if all(fits(stage, *pair) for stage, pair in enumerate(pairs)):
            values.append(max(time(*pair) for pair in pairs))
    found = best_cuts(parts, stages, time, fits)
    if stages > parts or not values:
        assert found is None
        return
    bounds = [*found, parts]
    pairs = list(zip(bounds, bounds[1:]))
    assert all(fits(stage, *pair) for stage, pair in enumerate(pairs))
    assert max(time(*pair) for pair in pairs) == min(values)
    assert best_cuts(parts, stages, time, fits, limit=min(values)) == found
    assert best_cuts(parts, stages, time, fits, limit=min(values) - 1) is None


def slowest(costs):
    return max(c.forward_clocks + c.backward_clocks for c in costs)


def all_divisions(model, batch, stages):
    """The costs for every choice of modules that begin a stage, blocks and what is inside."""
    names = [name for name, _ in model.module.named_modules() if name][1:]
    estimator = model._session.divided.estimator(
        MicroBatch.of(batch[:1], {}, batch[1], len(batch[0]))
    )
    for begins in itertools.combinations(names, stages - 1):
        division = tuple((name, number + 1) for number, name in enumerate(begins))
        yield estimator.estimate(Partition(division, stages, "pipelined", False, stages))


def most_memory(costs):
    return max(memory_of(costs, "grouped", recompute=False))


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 3])
def test_a_plan_finds_the_best_of_all_divisions(stages):
    """Of a real module: every other division has a slower stage, or does not fit."""
    model = compiled(parallel=ipufit.Parallel(auto_round_ipus=True))
    others = list(all_divisions(model, (X, Y), stages))

    found = model.plan((X, Y), ipus_per_replica=stages, recompute=False)
    assert slowest(found.costs) == min(map(slowest, others))
    given = model.plan((X, Y), stages=found.stages, recompute=False)
    assert (given.costs, max(given.memory)) == (found.costs, most_memory(found.costs))
    least = min(map(most_memory, others))
    tight = model.plan((X, Y), ipus_per_replica=stages, ipu_memory=least, recompute=False)
    fitting = [costs for costs in others if most_memory(costs) <= least]
    assert tight.fits
    assert slowest(tight.costs) == min(map(slowest, fitting))


@pytest.mark.long
def test_the_fewest_stages_that_fit_are_looked_for():
    """A power of two; where nothing fits, the plan says so."""
    model = compiled()
    alone = model.plan((X, Y))
    assert (len(alone.costs), alone.stages, alone.fits) == (1, {"0": 0}, True)
    two = model.plan((X, Y), ipu_memory=alone.memory[0] - 1)
    assert (len(two.costs), two.fits) == (2, True)
    assert two.planned.gradient_accumulation == 3
    never = model.plan((X, Y), ipu_memory=100)
    assert (len(never.costs), never.fits) == (8, False)
    assert "does not fit" in str(never)
    assert len(model.plan((X, Y), ipus=2, ipu_memory=100).costs) == 2
    assert model.plan((X, Y), ipus=8, ipus_per_replica=2).planned.replicas == 4


def nested():
    """Three blocks of which each has an inside, between a first and a last layer."""
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*block), nn.Linear(8, 4))


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 4])
def test_blocks_are_cut_where_that_is_much_better(stages):
    """As fast as brute force over every module, inside of blocks too."""
    batch = torch.randn(3, 8), torch.tensor([0, 1, 2])
    model = compiled(nested())
    found = model.plan(batch, ipus_per_replica=stages, recompute=False)
    assert slowest(found.costs) == min(map(slowest, all_divisions(model, batch, stages)))
    assert any(name.count(".") == 2 for name in found.stages)


@pytest.mark.long
def test_blocks_stay_whole_where_cutting_them_brings_little():
    """Eight alike blocks on four stages: two each."""
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)]
    model = compiled(nn.Sequential(*blocks))
    plan = model.plan((torch.randn(3, 8), torch.tensor([0, 1, 2])), ipus_per_replica=4)
    assert list(plan.stages) == ["0", "2", "4", "6"]


class Weighted(nn.Module):
    """An operator before the layer that it holds."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(torch.tanh(x))


def test_a_border_has_the_name_of_the_outermost_module_that_begins_there():
    """And of the inner one where the outer has done something before."""
    inner = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    module = nn.Sequential(nn.Linear(6, 6), inner, Weighted(), nn.Flatten())
    batch = MicroBatch.of((X,), {}, None, 5)
    trace = measure(module, None, batch, list(module.parameters()))
    assert [cut.name for cut in cuts_of(trace, module, fine=True)] == [
        "0",
        "1",
        "1.1.1",
        "2",
        "2.layer",
    ]
    assert [cut.name for cut in cuts_of(trace, module, fine=False)] == [
        "0",
        "1.1.0",
        "1.1.1",
        "2.layer",
    ]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_layers_that_compute_their_weights_are_divided(engine):
    """What computes a weight is called as a module, but begins no stage."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    for layer in module:
        register_parametrization(layer, "weight", nn.Tanh())
    model = ipufit.Model(module, engine)
    model.compile(
        "adam", "cross_entropy", parallel=ipufit.Parallel(stages="auto", ipus_per_replica=2)
    )
    model.fit(X, Y, batch_size=5, gradient_accumulation=3, verbose=0)
    assert list(model.plan().stages) == ["0", "1"]


class Twice(nn.Module):
    """A layer that is used at both ends, weights that are tied, one that is not used."""

    def __init__(self, tied):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head, self.spare = nn.Linear(6, 3), nn.Linear(2, 2)
        if tied:
            self.last.weight = self.first.weight
        self.act = nn.ReLU()

    def forward(self, x):
        for layer in (self.first, self.middle, self.last):
            x = self.act(layer(x)).flatten(1)
        return self.head(x)


@pytest.mark.parametrize(
    ("tied", "stages"),
    [
        (False, {"first": 0, "last": 1}),
        (True, {"first": (0, 0), "middle": (1, 1), "last": (2, 0)}),
    ],
)
def test_a_parameter_is_on_one_ipu(tied, stages):
    """What reads it again goes back there; nor does a stage begin at a module called again."""
    model = compiled(Twice(tied), parallel=ipufit.Parallel(stages="auto", ipus_per_replica=2))
    plan = model.plan((X, Y))
    assert plan.stages == stages
    assert plan.planned.unused == ("spare.weight", "spare.bias")
    values = sum(p.numel() for p in model.module.parameters()) - 6
    assert sum(cost.parameters for cost in plan.costs) == values
    model.fit(X, Y, batch_size=5, gradient_accumulation=2 * len(stages) - 1, verbose=0)


def test_recurrent_layers_without_a_list_are_divided_too():
    """By their calls; the operators between two calls are the first one's."""
    model = compiled(
        nn.Sequential(nn.Linear(6, 5), nn.Flatten(), nn.Tanh(), nn.Linear(5, 3)),
        parallel=ipufit.Parallel(auto_round_ipus=True),
    )
    assert list(model.plan((X, Y), ipus_per_replica=3).stages) == ["0", "2", "3"]


@pytest.mark.long
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_auto_is_resolved_with_the_first_micro_batch(engine, capsys):
    """As the plan says; validation and predict have the same stages."""
    model = ipufit.Model(net(), engine=engine)
    model.compile(
        "adam", "cross_entropy", parallel=ipufit.Parallel(stages="auto", ipus_per_replica=2)
    )
    expected = model.plan((X, Y)).stages
    model.explain(torch.utils.data.TensorDataset(X, Y), gradient_accumulation=3)
    assert "pipelined over 2 stages, divided once the first micro-batch" in capsys.readouterr().out
    model.fit(X, Y, batch_size=5, gradient_accumulation=3, verbose=0, seed=0)
    model.predict(X, verbose=0)
    model.explain()
    second = list(expected)[1]
    line = (
        f"Training: pipelined over 2 stages found by ipufit: stage 0 from 0; stage 1 from {second}."
    )
    assert line in capsys.readouterr().out.splitlines()
    named = ipufit.Model(net(), engine=engine)
    named.compile("adam", "cross_entropy", parallel=ipufit.Parallel(stages=expected))
    named.fit(X, Y, batch_size=5, gradient_accumulation=3, verbose=0, seed=0)
    for a, b in zip(model.module.parameters(), named.module.parameters()):
        assert torch.equal(a, b)


@pytest.mark.long
def test_the_least_accumulation_of_a_plan_reaches_the_wish():
    """And no smaller one does."""
    plan = compiled(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))).plan(
        (X, Y), stages={"2": 1}
    )
    least = plan.least_accumulation(0.8)
    assert plan.utilisation(least) >= 0.8 > plan.utilisation(least - 1)
    assert plan.utilisation() == plan.utilisation(3)
    assert plan.utilisation(3, "sequential") == pytest.approx(0.5)
    line = plan.timeline()
    assert (line.utilisation, len(line.tasks)) == (plan.utilisation(), 12)


TABLE = """\
Estimate for training Sequential on 2 replicas of 2 IPUs, pipelined
micro-batches of 5, 6 of them per update
stage begins with  weights  gradients  optimizer  activations  recomputed    total   of IPU
-------------------------------------------------------------------------------------------
0: 0                 412 B      412 B      840 B      1.1 KiB       620 B  2.7 KiB  < 0.1 %
1: 2                 396 B      396 B      808 B        484 B       484 B  2.0 KiB  < 0.1 %
Total: with activations as kept, for all micro-batches in flight.
Memory of an IPU: 897.0 MiB = 1,472 tiles x 624 KiB; stage 0 takes most, and fits.
Code, exchange and temporary tensors are not counted.
stage begins with  parameters  forward FLOPs  backward FLOPs    time
--------------------------------------------------------------------
0: 0                      103            900           1.3 k  44.2 %
1: 2                       99            840           1.7 k  55.8 %
FLOPs are for one micro-batch.
"""


def test_the_table():
    """Its numbers, and what it says of the pipeline."""
    model = compiled()
    asked = {"ipus": 4, "gradient_accumulation": 6, "stages": {"2": 1}}
    assert "Total: with activations as recomputed," in str(model.plan((X, Y), **asked))
    plan = model.plan((X, Y), recompute=False, **asked)
    text = str(plan)
    assert text.splitlines()[:14] == TABLE.splitlines()
    assert [line.split()[0] for line in text.splitlines()[-5:]] == [
        "-" * len(text.splitlines()[-5]),
        "grouped",
        "interleaved",
        "sequential",
        "*",
    ]
    assert repr(plan) == "PartitionPlan(Sequential, 2 stages, pipelined, fits)"


class Named(nn.Module):
    """Has its layers under a name that no line has room for."""

    def __init__(self, layers):
        super().__init__()
        self.add_module(NAME, nn.Sequential(*layers))

    def forward(self, x):
        return getattr(self, NAME)(x)


NAME = "a_name_of_more_characters_" * 4


def test_a_table_has_at_most_100_columns():
    """With many stages, long names and modules that forward does not use."""
    model = ipufit.Model(Named([nn.Linear(6, 6) for _ in range(11)]))
    for number in range(9):
        model.module.add_module(f"not_used_{number}_" * 4, nn.Linear(2, 2))
    model.compile("adam", "mse")
    plan = model.plan((X, X), ipus=8, ipus_per_replica=8)
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 100
    names = [line.split("  ")[0] for line in lines if line.startswith("7: ")]
    assert [name[:8] for name in names] == ["7: a_..."] * 2
    assert all(
        name.endswith(f"more_characters_.{[*plan.stages][-1].rpartition('.')[2]}") for name in names
    )
    assert any("15, 13, ..., 1" in line for line in lines)
    assert "Not used by forward" in str(plan)


@pytest.mark.long
def test_the_picture_has_a_bar_for_every_task_and_every_part_of_memory(tmp_path):
    """Two panels; the file is written."""
    pytest.importorskip("matplotlib")
    plan = compiled(parallel=ipufit.Parallel(auto_round_ipus=True)).plan(
        (X, Y), stages={"1": 1, "2": 2}, gradient_accumulation=5
    )
    path = tmp_path / "plan.png"
    timeline, memory = plan.plot(path).axes
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(timeline.patches) == 2 * 3 * 5
    ends = max(bar.get_x() + bar.get_width() for bar in timeline.patches)
    assert ends == pytest.approx(plan.timeline().total)
    assert len(memory.patches) == 4 * 3
    tops = [0.0] * 3
    for bar in memory.patches:
        tops[round(bar.get_y() + bar.get_height() / 2)] += bar.get_width()
    assert [round(top * 1024) for top in tops] == plan.memory
    assert not memory.lines
    full = compiled().plan((X, Y), stages={"1": 1}, ipu_memory=3000).plot()
    assert len(full.axes[1].lines) == 1


class OwnLoss(nn.Module):
    """Computes its loss, of a part of a dict that is the target."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x, labels):
        out = self.head(self.body(x))
        return out, nn.functional.cross_entropy(out, labels)


@pytest.mark.long
def test_a_module_with_a_loss_of_its_own_is_planned_with_it():
    """The batch holds all that forward takes."""
    model = ipufit.Model(OwnLoss())
    model.compile("sgd", parallel=ipufit.Parallel(stages={"head": 1}))
    plan = model.plan({"x": X, "labels": Y})
    parted = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    other = compiled(parted, "sgd", parallel=ipufit.Parallel(stages={"1": 1})).plan((X, Y))
    assert [c.activation_bytes for c in plan.costs] == [c.activation_bytes for c in other.costs]
    assert plan.memory == other.memory


def test_a_model_that_does_not_train_has_weights_alone():
    """No gradients, no state, nothing kept for a backward pass."""
    plan = compiled(
        optimizer=None, parallel=ipufit.Parallel(stages="auto", ipus_per_replica=2)
    ).plan((X, Y))
    for cost, memory in zip(plan.costs, plan.memory):
        assert memory == cost.weight_bytes > 0
        assert (cost.gradient_bytes, cost.optimizer_bytes, cost.activation_bytes) == (0, 0, 0)
        assert (cost.backward_flops, cost.backward_clocks) == (0, 0)
        assert cost.forward_flops > 0


@pytest.mark.few
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_a_state_in_host_memory_takes_none_of_an_ipus(engine):
    """The gradients stay where they are."""
    model = ipufit.Model(net(), engine)
    plans = []
    for offload in (False, True):
        model.compile(
            "adam",
            "cross_entropy",
            parallel=ipufit.Parallel(stages={"2": 1}),
            memory=ipufit.Memory(offload_optimizer=offload),
        )
        plans.append(model.plan((X, Y)))
    for on, off in zip(*(plan.costs for plan in plans)):
        assert (off.optimizer_bytes, off.gradient_bytes) == (0, on.gradient_bytes)
        assert on.optimizer_bytes > 0


def test_a_loss_with_weights_of_its_own_counts_on_the_last_stage():
    """And weights that it shares with the module count once."""

    class Scaled(nn.Module):
        def __init__(self, shared):
            super().__init__()
            self.shared, self.scale = shared, nn.Parameter(torch.ones(3))

        def forward(self, prediction, target):
            return nn.functional.cross_entropy(prediction * self.scale, target)

    module = net()
    model = ipufit.Model(module)
    model.compile("adam", Scaled(module[3]), parallel=ipufit.Parallel(stages={"2": 1}))
    plan = model.plan((X, Y))
    alone = compiled(parallel=ipufit.Parallel(stages={"2": 1})).plan((X, Y))
    extra = [a.parameters - b.parameters for a, b in zip(plan.costs, alone.costs)]
    assert (extra, plan.planned.unused) == ([0, 3], ())
