"""Which micro-batch reads what, when weights change, and what comes back: against loops by hand."""

import itertools

import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch import CommGroupType, OutputMode, ReductionType
from ipufit.poptorch._precision import keep_float64


class Echo(nn.Module):
    """Returns what it reads, and a number of it."""

    def forward(self, x):
        return x * 1, x.sum()


def options(di=1, ga=1, replicas=1, group=None, kind=CommGroupType.Consecutive):
    """Options of a batch algebra."""
    made = poptorch.Options().deviceIterations(di).replicationFactor(replicas)
    made.Training.gradientAccumulation(ga)
    if group is not None:
        made.inputReplicaGrouping(group, kind)
    return made


def numbered(count, size=2):
    """Micro-batches whose elements are their number."""
    return torch.arange(count).repeat_interleave(size).reshape(-1, 1).float()


@pytest.mark.parametrize(("di", "replicas"), [(1, 1), (3, 1), (1, 2), (3, 4)])
@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final, OutputMode.Sum])
def test_every_output_mode_returns_its_micro_batches(mode, di, replicas):
    """All: in stream order; Final: each replica's last; Sum: over time, for each replica."""
    model = poptorch.inferenceModel(Echo(), options(di, replicas=replicas).outputMode(mode))
    x = numbered(di * replicas)
    rows, sums = model(x)
    by_time = x.reshape(di, replicas, 2, 1)
    expected = {
        OutputMode.All: by_time,
        OutputMode.Final: by_time[-1],
        OutputMode.Sum: by_time.sum(0),
    }[mode]
    assert torch.equal(rows, expected.reshape(-1, 1))
    totals = expected.reshape(-1, 2).sum(1)
    assert torch.equal(sums, totals if len(totals) > 1 else totals[0])


@pytest.mark.parametrize(("di", "every"), [(4, 1), (4, 2), (6, 3), (4, 4)])
def test_every_nth_device_iteration_comes_back_with_all_its_replicas(di, every):
    opts = options(di, replicas=2).outputMode(OutputMode.EveryN, every)
    rows, sums = poptorch.inferenceModel(Echo(), opts)(numbered(di * 2))
    kept = [2 * i + r for i in range(di) if (i + 1) % every == 0 for r in range(2)]
    assert rows[::2, 0].tolist() == kept
    assert sums.tolist() == [2.0 * k for k in kept]


def test_one_result_keeps_its_shape_and_several_stand_in_a_row():
    """A loss of one micro-batch is 0-dim, of several a vector, however many samples there are."""
    one = poptorch.inferenceModel(Echo(), options(1))(numbered(1))
    four = poptorch.inferenceModel(Echo(), options(4))(numbered(4))
    assert [tuple(t.shape) for t in one] == [(2, 1), ()]
    assert [tuple(t.shape) for t in four] == [(8, 1), (4,)]


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (CommGroupType.Consecutive, [0, 0, 1, 1]),
        (CommGroupType.Orthogonal, [0, 1, 0, 1]),
        (CommGroupType.NoGrouping, [0, 1, 2, 3]),
    ],
)
def test_replicas_of_a_group_read_the_same_micro_batch(kind, members):
    opts = options(3, replicas=4, group=2, kind=kind)
    groups = max(members) + 1
    rows, _ = poptorch.inferenceModel(Echo(), opts)(numbered(3 * groups))
    expected = [groups * i + member for i in range(3) for member in members]
    assert rows[::2, 0].tolist() == expected


def test_every_input_must_divide_into_micro_batches():
    model = poptorch.inferenceModel(Echo(), options(3, replicas=2))
    with pytest.raises(AssertionError, match="Invalid batch dimension") as caught:
        model(torch.zeros(8, 1))
    assert "Pass 6 or 12 samples" in str(caught.value)


class Regression(nn.Module):
    """A linear model with its loss."""

    def __init__(self, reduction="mean"):
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.loss = nn.MSELoss(reduction=reduction)

    def forward(self, x, y):
        out = self.linear(x)
        return out, self.loss(out, y)


def by_hand(model, x, y, di, ga, replicas, reduction, lr):
    """Plain SGD over the micro-batches in stream order; losses and outputs of all of them."""
    size = len(x) // (di * ga * replicas)
    outs, losses = [], []
    places = itertools.product(range(di), range(ga), range(replicas))
    total = None
    for number, (_, step, replica) in enumerate(places):
        part = slice(number * size, (number + 1) * size)
        out, loss = model(x[part], y[part])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        total = gradients if total is None else [a + b for a, b in zip(total, gradients)]
        outs.append(out.detach())
        losses.append(loss.detach())
        if (step, replica) == (ga - 1, replicas - 1):
            count = ga * replicas if reduction == ReductionType.Mean else 1
            with torch.no_grad():
                for p, g in zip(model.parameters(), total):
                    p -= lr * g / count
            total = None
    return torch.cat(outs), torch.stack(losses)


@pytest.mark.few
@pytest.mark.parametrize("reduction", [ReductionType.Mean, ReductionType.Sum])
@pytest.mark.parametrize("loss", ["mean", "sum"])
@pytest.mark.parametrize(
    ("di", "ga", "replicas"), [(1, 1, 1), (3, 1, 1), (1, 4, 1), (1, 1, 2), (2, 3, 4)]
)
def test_training_is_that_of_a_loop_by_hand(di, ga, replicas, loss, reduction):
    """Weights change once per device iteration; gradients count accumulation times replicas."""
    x = torch.randn(di * ga * replicas * 5, 3, dtype=torch.float64)
    y = torch.randn(len(x), 2, dtype=torch.float64)
    theirs, ours = Regression(loss), Regression(loss)
    ours.load_state_dict(theirs.state_dict())
    opts = options(di, ga, replicas).outputMode(OutputMode.All)
    opts.Training.accumulationAndReplicationReductionType(reduction)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    with keep_float64():
        model = poptorch.trainingModel(ours, opts, optimizer)
        for _ in range(3):
            expected = by_hand(theirs, x, y, di, ga, replicas, reduction, 0.01)
            out, losses = model(x, y)
            torch.testing.assert_close(out, expected[0], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(losses.reshape(-1), expected[1], rtol=1e-12, atol=1e-12)
        for a, b in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-12, atol=1e-12)


def test_a_training_model_returns_the_last_micro_batch_of_each_replica_by_default():
    x = torch.randn(24, 3, dtype=torch.float64)
    y = torch.randn(24, 2, dtype=torch.float64)
    net = Regression()
    with keep_float64():
        out, loss = poptorch.trainingModel(net, options(2, 3, 2))(x, y)
    assert out.shape == (4, 2)
    assert loss.shape == (2,)


class Normalised(nn.Module):
    """Its running statistics change as it trains."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return poptorch.identity_loss(self.norm(x), "mean")


@pytest.mark.long
@pytest.mark.parametrize("change", [lambda o: o, lambda o: o.broadcastBuffers(False)])
def test_batch_norm_trains_on_replicas_that_each_keep_their_own_statistics(change):
    """Statistics move once per micro-batch; the host gets those of the first replica."""
    x = torch.randn(24, 3)
    net = Normalised()
    expected = [nn.BatchNorm1d(3), nn.BatchNorm1d(3)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = poptorch.trainingModel(net, change(options(2, replicas=2)), optimizer)
    for call in range(2):
        for i in range(4):
            expected[i % 2](x[call * 12 + i * 3 : call * 12 + i * 3 + 3])
        model(x[call * 12 : call * 12 + 12])
    held = model._program().device.parts(["norm.running_mean", "norm.running_var"])
    assert len(held) == 4
    for replica, norm in enumerate(expected):
        for name in ("running_mean", "running_var"):
            torch.testing.assert_close(held[f"norm.{name}[{replica}]"], getattr(norm, name))
    torch.testing.assert_close(net.norm.running_mean, expected[0].running_mean)
    torch.testing.assert_close(net.norm.running_var, expected[0].running_var)
    # What the host sends, every replica starts from.
    model.copyWeightsToDevice()
    held = model._program().device.parts(["norm.running_mean"])
    torch.testing.assert_close(held["norm.running_mean[1]"], expected[0].running_mean)


@pytest.mark.long
@pytest.mark.parametrize("change", [lambda o: o, lambda o: o.broadcastBuffers(False)])
def test_statistics_of_frozen_batch_norm_stay_on_replicas(change):
    """A layer in evaluation mode changes nothing, so its buffers need no copies."""
    net = Normalised()
    net.norm.eval()
    model = poptorch.trainingModel(net, change(options(2, replicas=2)))
    model(torch.randn(12, 3))
    assert list(model._program().device.parts(["norm.running_mean"])) == ["norm.running_mean"]
    assert torch.equal(net.norm.running_mean, torch.zeros(3))


def test_replicas_that_read_the_same_input_move_statistics_once_each():
    x = torch.randn(3, 3)
    net, expected = Normalised(), nn.BatchNorm1d(3)
    expected(x)
    opts = options(replicas=2, group=2)
    poptorch.trainingModel(net, opts)(x)
    torch.testing.assert_close(net.norm.running_mean, expected.running_mean)


def test_statistics_on_replicas_go_on_from_a_file(tmp_path):
    x = torch.randn(6, 3)
    net, expected = Normalised(), nn.BatchNorm1d(3)
    for _ in range(2):
        expected(x[:3])
    poptorch.trainingModel(net, options(replicas=2)).compileAndExport(
        tmp_path / "program", x, export_model=False
    )
    fresh = Normalised()
    loaded = poptorch.trainingModel(fresh, options(replicas=2))
    loaded.loadExecutable(tmp_path / "program")
    for _ in range(2):
        loaded(x)
    torch.testing.assert_close(fresh.norm.running_mean, expected.running_mean)


class Counting(nn.Module):
    """Changes a buffer in place, by itself or beside batch normalisation."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return poptorch.identity_loss(self.norm(x) + self.count, "mean")


class Damped(Normalised):
    """Changes by hand what batch normalisation changes, too."""

    def forward(self, x):
        loss = super().forward(x)
        self.norm.running_mean *= 0.5
        return loss


@pytest.mark.long
@pytest.mark.parametrize(("kind", "name"), [(Counting, "count"), (Damped, "norm.running_mean")])
def test_a_buffer_that_is_changed_in_place_needs_one_per_replica(kind, name):
    model = poptorch.trainingModel(kind(), options(replicas=2))
    with pytest.raises(poptorch.Error, match=r"broadcastBuffers\(False\)") as caught:
        model(torch.randn(4, 3))
    assert str(caught.value) == (
        "'poptorch_py_error': PopTorch does not support broadcasting buffers. If your model is "
        "able to tolerate buffers becoming out of sync between replicas, you can disable buffer "
        "broadcasting using poptorch.Options.broadcastBuffers(False). The buffer "
        f"{name!r} is changed in place on 2 replicas."
    )
    poptorch.trainingModel(kind(), options(replicas=2).broadcastBuffers(False))(torch.randn(4, 3))
