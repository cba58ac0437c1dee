"""Batches that plan takes, what compile(stages=plan) does, and stages that are found anew."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import ConfigurationError, DataError, PartitionError, PlanError
from tests.fitting import unmeasured
from tests.told import message

pytestmark = pytest.mark.both_engines

X, Y = torch.randn(24, 6), torch.randint(0, 3, (24,), generator=torch.Generator().manual_seed(0))
ENGINES = pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])


def net(*widths):
    torch.manual_seed(0)
    widths = widths or (6, 9, 4, 12, 3)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])))


def compiled(module=None, engine="embedded", optimizer="adam", **options):
    model = ipufit.Model(module or net(), engine)
    model.compile(optimizer, "cross_entropy", **options, **unmeasured(engine))
    return model


def fit(model, batch_size=4, x=X, y=Y, **work):
    model.fit(
        x, y, batch_size=batch_size, verbose=0, seed=0, **{"gradient_accumulation": 3, **work}
    )


class Two(nn.Module):
    """Two inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x, z):
        return self.second(self.first(x + z))


@pytest.mark.long
def test_a_list_that_a_loader_makes_is_a_batch():
    """DataLoader's own collate function makes lists, of one input or several."""
    model = compiled(parallel=ipufit.Parallel(stages={"1": 1}))
    expected = model.plan((X[:4], Y[:4])).to_dict()
    batch = next(iter(DataLoader(TensorDataset(X, Y), 4)))
    assert isinstance(batch, list)
    assert model.plan(batch).to_dict() == expected
    assert model.plan([batch, batch]).to_dict() == expected
    assert expected["with_loss"]
    model = compiled(Two(), parallel=ipufit.Parallel(stages={"second": 1}))
    assert model.plan([[X, X], Y]).to_dict() == model.plan(((X, X), Y)).to_dict()


@pytest.mark.long
def test_a_list_that_is_a_batch_of_a_module_with_a_loss_of_its_own():
    """All its parts go to forward, however many there are."""

    class Own(Two):
        def forward(self, x, z, w, labels):
            out = super().forward(x, z) * w
            return out, nn.functional.cross_entropy(out, labels)

    model = ipufit.Model(Own())
    model.compile("sgd")
    assert model.plan([X, X, X[:, :3], Y]).planned.micro_batch_size == 24


@pytest.mark.long
def test_without_a_target_the_plan_says_that_the_loss_is_not_counted():
    model = compiled()
    assert "Without a target: the loss is not counted." in str(model.plan(X))
    assert "Without a target" not in str(model.plan((X, Y)))
    assert not model.plan(X).planned.with_loss


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            {"x": X, "y": Y},
            "the sample, batch 0: Sequential.forward takes 'input', but the fields of the batch "
            "are 'x', 'y'. Say which ones it gets: one by position, compile(..., inputs='x'), "
            "or by name, inputs={'parameter': 'field'}.",
        ),
        (
            [{"x": X}],
            "the sample, batch 0: Sequential.forward takes 'input', but the fields of the batch "
            "are 'x'. Say which ones it gets: one by position, compile(..., inputs='x'), or by "
            "name, inputs={'parameter': 'field'}.",
        ),
        (
            [X[:4], Y],
            "the sample, batch 0: all parts must have the same number of samples, but input [0] "
            "has 4 and target has 24. Check the dataset or collate_fn.",
        ),
    ],
)
def test_a_batch_that_forward_can_not_take_is_refused(batch, text):
    assert message(compiled().plan, batch, kind=DataError) == text


def test_a_batch_of_the_wrong_shape_is_refused_with_the_layer():
    with pytest.raises(DataError) as caught:
        compiled().plan((X[:, :3], Y))
    text = str(caught.value)
    assert text.startswith(
        "plan: layer '0', Linear(in_features=6, out_features=9, bias=True), needs 6 features in "
        "the last dimension, got shape (24, 3), dtype float32. Build it with in_features=3, or "
        "give it 6 features. torch says: RuntimeError: "
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.few
@pytest.mark.parametrize(
    "given",
    [
        {"ipus_per_replica": 3},
        {"stages": {"1": 1, "2": 2}},
    ],
)
def test_a_number_of_stages_that_can_not_be_reserved_is_refused(given):
    assert message(compiled().plan, (X, Y), **given, kind=PartitionError) == (
        "the number of stages of a replica, each on an IPU, must be a power of two, got 3. Plan "
        "with 2 or 4, such as ipus_per_replica=4, or compile with Parallel(auto_round_ipus=True) "
        "to leave IPUs idle."
    )
    assert (
        len(compiled(parallel=ipufit.Parallel(auto_round_ipus=True)).plan((X, Y), **given).costs)
        == 3
    )


def test_stages_are_held_against_the_ipus_before_they_are_looked_for():
    """Whether or not so many can be made."""
    assert message(compiled().plan, (X, Y), ipus=4, ipus_per_replica=8, kind=PlanError) == (
        "`ipus`, the total number of IPUs, must be a power of two that stages=8 divides, got 4. "
        "Try 8."
    )
    with pytest.raises(PlanError, match="must be at least 3 to fill a training pipeline of 2"):
        compiled().plan((X, Y), ipus_per_replica=2, gradient_accumulation=2)


@pytest.mark.few("3-expected str, bytes or os.PathLike object, not int")
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/nowhere/plan.png", "[Errno 2] No such file or directory: '/nowhere/plan.png'"),
        (3, "expected str, bytes or os.PathLike object, not int"),
        ("plan.xyz", "Format 'xyz' is not supported"),
    ],
)
def test_a_picture_needs_a_path_that_can_be_written(path, reason):
    pytest.importorskip("matplotlib")
    plan = compiled().plan((X, Y), stages={"1": 1})
    with pytest.raises(ConfigurationError) as caught:
        plan.plot(path)
    begin = (
        "PartitionPlan.plot must be given the path of a picture in a folder that is there, such "
        f"as 'picture.png', got {path!r}: {reason}"
    )
    assert str(caught.value).startswith(begin)
    assert str(caught.value).endswith(". Leave it out to get the figure alone.")


def weights_then_values():
    """Layers with many weights, then layers with many values."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 256),
        nn.Linear(256, 256),
        nn.Linear(256, 32),
        nn.Unflatten(1, (1, 32)),
        nn.Conv1d(1, 64, 3),
        nn.Tanh(),
        nn.Tanh(),
        nn.Conv1d(64, 1, 3),
        nn.Flatten(),
        nn.Linear(28, 3),
    )


@pytest.mark.long
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_auto_divides_anew_for_micro_batches_of_another_shape(engine, monkeypatch):
    """Larger ones take longer where there are few weights; predict before fit decides nothing."""
    model = compiled(
        weights_then_values(), engine, parallel=ipufit.Parallel(stages="auto", ipus_per_replica=2)
    )
    small, large = (model.plan((X[:n], Y[:n])).stages for n in (1, 24))
    assert small != large
    model.predict(X, batch_size=24, verbose=0)
    fit(model, 1)
    assert model.plan().stages == small == model.plan((X, Y)).stages
    fit(model, 8)
    fit(model, 24, X.repeat(3, 1), Y.repeat(3))
    assert model.plan().stages == large
    model.predict(X, batch_size=1, verbose=0)
    assert model.plan().stages == large
    monkeypatch.setattr("ipufit.planner.planning.IPU_MEMORY", max(model.plan().memory))
    fit(model, 24, X.repeat(3, 1), Y.repeat(3))
    with pytest.raises(PartitionError, match="stages='auto' must find stages that fit"):
        fit(model, 48, X.repeat(6, 1), Y.repeat(6))


@pytest.mark.long
@ENGINES
def test_a_plan_stands_for_its_stages_and_its_strategy(engine):
    """To the bits of its stages by name."""
    nets = []
    for as_plan in (True, False):
        model = compiled(engine=engine)
        plan = model.plan((X[:4], Y[:4]), ipus_per_replica=2, strategy="sharded")
        given = (
            {"parallel": ipufit.Parallel(stages=plan)}
            if as_plan
            else {"parallel": ipufit.Parallel(stages=plan.stages, strategy="sharded")}
        )
        model.compile("adam", "cross_entropy", **given, **unmeasured(engine))
        fit(model, gradient_accumulation=1)
        again = model.plan()
        assert (again.stages, again.planned.strategy) == (plan.stages, "sharded")
        nets.append(list(model.module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*nets))


@pytest.mark.long
def test_what_works_in_training_alone_begins_no_stage():
    """In inference such a stage would compute nothing, which is refused."""
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(8, 8), nn.Dropout(0.1))]
    model = ipufit.Model(nn.Sequential(*layers, nn.Linear(8, 3)))
    parallel = ipufit.Parallel(stages="auto", ipus_per_replica=4)
    model.compile("sgd", "cross_entropy", parallel=parallel)
    x, y = torch.randn(16, 8), torch.randint(0, 3, (16,))
    model.fit(x, y, batch_size=2, gradient_accumulation=8, verbose=0)
    assert "stage 1 from 2; stage 2 from 4; stage 3 from 6." in model._session.explain()
    assert model.evaluate(x, y, batch_size=2, device_iterations=8, verbose=0)["loss"] > 0


def test_a_plan_of_one_stage_divides_nothing():
    model = compiled()
    model.compile("adam", "cross_entropy", parallel=model.plan((X[:4], Y[:4])))
    fit(model, gradient_accumulation=1)
    assert model.plan().stages == {"0": 0}


@pytest.mark.long
def test_inference_takes_a_plan_too():
    """Which says nothing of the strategy there."""
    model = compiled()
    plan = model.plan((X, Y), ipus_per_replica=2)
    model.compile(
        "adam",
        "cross_entropy",
        parallel=ipufit.Parallel(
            ipus_per_replica=2, stages=plan, inference=ipufit.Parallel(stages=plan)
        ),
    )
    assert model.predict(X, verbose=0).shape == (24, 3)


def refused(plan, module=None, **options):
    model = ipufit.Model(module or net())
    with pytest.raises(PartitionError) as caught:
        model.compile("adam", "cross_entropy", parallel=ipufit.Parallel(stages=plan, **options))
    return str(caught.value)


def test_a_plan_of_another_module_is_refused():
    """One of the same layers is none."""
    plan = compiled().plan((X, Y), ipus_per_replica=2)
    assert refused(plan, net(6, 9, 5, 12, 3)) == (
        "stages as a plan must be for the compiled module, Sequential, but this one is for a "
        "Sequential with other layers or parameters. Call model.plan again."
    )
    assert "for a Sequential" in refused(plan, Two())
    model = ipufit.Model(net())
    model.compile("adam", "cross_entropy", parallel=ipufit.Parallel(stages=plan))
    assert len(model.plan((X, Y)).costs) == 2


def test_a_plan_that_does_not_fit_is_refused():
    plan = compiled().plan((X, Y), ipus_per_replica=2, ipu_memory=1000)
    assert not plan.fits
    most = max(plan.memory)
    assert most < 10 * 1024
    assert refused(plan) == (
        "stages as a plan must fit in its memory, 1000 B per IPU, but its largest stage needs "
        f"about {most} B. Plan with more IPUs or a smaller batch, or pass stages=plan.stages, "
        "which is not checked."
    ).replace(f"{most} B", f"{most / 1024:.1f} KiB")


def test_a_plan_is_refused_beside_another_strategy():
    plan = compiled().plan((X, Y), ipus_per_replica=2)
    assert refused(plan, strategy="sharded") == (
        "strategy must be that of the plan, 'pipelined', got 'sharded'. Leave it out, or plan with "
        "the other strategy."
    )
    model = ipufit.Model(net())
    model.compile(
        "adam", "cross_entropy", parallel=ipufit.Parallel(stages=plan, strategy="pipelined")
    )


@pytest.mark.long
@pytest.mark.parametrize("ipus", [1, 2])
def test_fit_holds_planned_stages_to_the_memory_that_they_were_planned_for(ipus):
    """What a limit of one's own is for: compile has no argument for it."""
    model = compiled()
    batch = X[:4], Y[:4]
    memory = max(model.plan(batch, ipus_per_replica=ipus).memory)
    plan = model.plan(batch, ipus_per_replica=ipus, ipu_memory=memory)
    parallel = ipufit.Parallel(stages=plan)
    model.compile("adam", "cross_entropy", parallel=parallel, **unmeasured("embedded"))
    fit(model, 4)
    fit(model, 3, X[:18], Y[:18])
    before = [p.detach().clone() for p in model.module.parameters()]
    with pytest.raises(PartitionError) as caught:
        fit(model, 24, X.repeat(3, 1), Y.repeat(3))
    most = max(model.plan((X, Y)).memory)
    assert str(caught.value) == (
        f"planned stages must fit in the memory of the plan, {memory / 1024:.1f} KiB per IPU, but "
        f"with micro-batches of 24 samples the largest needs about {most / 1024:.1f} KiB. Plan "
        "with such a batch, or use a smaller one, or pass stages=plan.stages, which is not "
        "checked."
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters()))
    model.predict(X, batch_size=24, verbose=0)
    named = ipufit.Parallel(stages=plan.stages if ipus > 1 else None)
    model.compile("adam", "cross_entropy", parallel=named, **unmeasured("embedded"))
    fit(model, 24, X.repeat(3, 1), Y.repeat(3))
