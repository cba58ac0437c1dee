"""Losses that can't be trained on, sparse gradients, and errors of the user's own forward."""

import functools

import pytest
import torch
from torch import nn

import ipufit
from ipufit.errors import CaptureError, LossError, OptimizerError
from tests.engines import EAGER_OR_NOT, embedded_only, runs_eagerly
from tests.faulty import (
    Net,
    Told,
    Watched,
    assert_clean,
    batches,
    compiled,
    fit,
    loader,
    refused,
    state,
)
from tests.told import message

# ---- losses -------------------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (
            lambda p, t: (p - t).square().mean(0),
            "loss '<lambda>' must be a scalar, got shape (3,). Reduce it to one number, for "
            "example with .mean().",
        ),
        (
            lambda p, t: None,
            "loss '<lambda>' must be a scalar tensor, got NoneType. Compute it from the prediction "
            "with torch operations, so that gradients can flow.",
        ),
        (
            lambda p, t: 0.5,
            "loss '<lambda>' must be a scalar tensor, got float. Compute it from the prediction "
            "with torch operations, so that gradients can flow.",
        ),
        (
            lambda p, t: p.argmax(1).sum(),
            "loss '<lambda>' must be floating-point, got dtype int64. Compute it from the "
            "prediction with differentiable operations; an argmax or a comparison has no gradient.",
        ),
        (
            lambda p, t: t.square().mean(),
            "the loss must depend on at least one trainable parameter, but no gradient reached any "
            "of the 8 of Net. Look for .detach(), torch.no_grad() or a loss computed from the "
            "targets alone.",
        ),
        (
            lambda p, t: (p.detach() - t).square().mean(),
            "the loss must depend on at least one trainable parameter, but no gradient reached any "
            "of the 8 of Net. Look for .detach(), torch.no_grad() or a loss computed from the "
            "targets alone.",
        ),
    ],
    ids=["vector", "none", "float", "integer", "targets", "detached"],
)
def test_a_loss_without_a_gradient_is_refused(loss, text, run_eagerly):
    """Training would run for hours and change nothing."""
    engine = Watched()
    model = compiled(loss=loss, run_eagerly=run_eagerly, engine=lambda: engine)
    told = Told()
    with refused(model, LossError, text):
        fit(model, callbacks=[told])
    assert told.hooks == []
    assert engine.built == engine.closed == 1


def of_three(prediction, target, margin):
    return (prediction - target - margin).square().mean()


@pytest.mark.parametrize(
    ("loss", "shown"),
    [(lambda prediction: prediction.square().mean(), "prediction"), (lambda: 0.0, "")],
    ids=["one", "none"],
)
def test_a_loss_with_fewer_parameters_is_refused_by_compile(loss, shown):
    """Python's own error comes in the first batch, and knows of no prediction."""
    assert message(compiled, loss=loss, kind=LossError) == (
        f"a loss is called with (prediction, target), but '<lambda>' takes ({shown}). Take both; "
        "the loss need not use the target. For arguments by name, use ipufit.losses.Call."
    )


def test_a_step_in_the_place_of_a_loss_is_refused_with_its_class():
    """It would be called with a prediction where it takes the module."""

    def step(net, batch):
        return net(batch[0]).mean()

    for loss in (step, [step, step]):
        assert message(compiled, loss=loss, kind=LossError) == (
            "a loss is called with (prediction, target), but 'step' takes a batch, as a step of "
            "your own does. Write loss=ipufit.TrainStep(step)."
        )


@embedded_only("PopTorch records no backward pass")
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["recorded", "eager"])
def test_a_backward_pass_of_ones_own_is_refused(run_eagerly):
    """As it stands in every loop; torch's error speaks of a graph that was freed."""

    def loss(prediction, target):
        value = (prediction - target).square().mean()
        value.backward()
        return value

    text = (
        "forward, loss or step must leave the backward pass to ipufit, but one of them calls "
        "backward(). Return the loss; its gradients and the update follow."
    )
    model = compiled(loss=loss, run_eagerly=run_eagerly)
    with refused(model, LossError, text):
        fit(model)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(
    "loss",
    [
        lambda prediction, target: of_three(prediction, target, 0.1),
        functools.partial(of_three, margin=0.1),
        lambda prediction, target: prediction.square().mean(),
        lambda *both: (both[0] - both[1]).square().mean(),
        lambda prediction, *, target: (prediction - target).square().mean(),
    ],
    ids=["function", "partial", "one", "any", "name"],
)
def test_a_loss_that_can_be_called_with_two_arguments_trains(loss):
    """The advice of that error must work, and it must refuse nothing else."""
    assert fit(compiled(loss=loss)).epoch == [0]


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(), nn.L1Loss(), nn.functional.huber_loss, nn.PoissonNLLLoss()],
    ids=["MSELoss", "L1Loss", "huber_loss", "PoissonNLLLoss"],
)
def test_a_target_that_torch_would_broadcast_is_refused(loss, run_eagerly):
    """Torch warns at most, and trains towards the mean of all targets."""
    name = getattr(loss, "__name__", type(loss).__name__)
    model = compiled(nn.Linear(4, 3), loss, run_eagerly=run_eagerly)
    x, y = batches(1)[0]
    text = (
        f"loss {name!r} needs prediction and target of one shape, got prediction (4, 3) and target "
        "(4, 1). Make both shapes equal."
    )
    with refused(model, LossError, text):
        fit(model, [(x, y[:, :1])])
    assert fit(model, [(x, y[:, :1].expand(4, 3))]).epoch == [0]


@pytest.mark.long("ipu-standin")
def test_a_module_that_computes_no_loss_of_its_own_is_refused():
    """With ``loss=None`` there is nothing else to train on."""

    class Alone(Net):
        def forward(self, x):
            return super().forward(x)

    model = compiled(Alone(), loss=None)
    text = (
        "with loss=None the module must return (outputs, loss), the loss a tensor of one number, "
        "got a tensor of shape (4, 3), dtype float32. Return (outputs, loss) from forward, or pass "
        "loss= to compile."
    )
    with refused(model, LossError, text):
        fit(model, [batches(1)[0][0]])


def test_a_module_without_parameters_is_refused():
    """There is nothing an optimizer could hold."""
    model = ipufit.Model(nn.Sequential(nn.Tanh()))
    text = "the module has no trainable parameter: none of its 0 parameters requires gradients."
    with refused(model, OptimizerError, text, part=True):
        model.compile("sgd", "mse")


def test_a_module_frozen_after_compile_is_refused():
    """The optimizer still holds its parameters, so nothing else would tell."""
    model = compiled()
    model.module.requires_grad_(False)
    text = (
        "Net must have a trainable parameter, but no parameter of the optimizer requires gradients "
        "any more. Unfreeze one with requires_grad_(True); if it was frozen at compile or replaced "
        "since, call compile again."
    )
    with refused(model, LossError, text):
        fit(model)
    model.module.requires_grad_(True)
    assert fit(model).epoch == [0]
    # With assign=True the module has other parameters than the optimizer, and none is frozen.
    for part in (model.module.body, model.module.norm, model.module.frozen_norm, model.module.head):
        part.weight = nn.Parameter(part.weight.detach())
        part.bias = nn.Parameter(part.bias.detach())
    warned = pytest.warns(UserWarning, match="became trainable after compile")
    with warned, refused(model, LossError, text):
        fit(model)


@embedded_only("PopTorch has no sparse embedding, which it says itself")
def test_sparse_gradients_are_refused():
    """Flat dense updates would silently turn a sparse layer into a slow one, or fail late.

    jit="auto" and run_eagerly=True train them: tests/engines/embedded/test_plain_loops.py.
    """

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 3, sparse=True)

        def forward(self, x):
            return self.embed(x)

    words = [(torch.arange(4), torch.zeros(4, 3))]
    model = compiled(Words(), jit="graph")
    text = (
        "gradients must be dense, but that of 'embed.weight' is torch.sparse_coo. Build the layer "
        "with sparse=False, or use compile(..., run_eagerly=True)."
    )
    with refused(model, CaptureError, text):
        fit(model, words)
    model.module.embed.sparse = False
    assert fit(model, words).epoch == [0]


# ---- the user's own errors ----------------------------------------------------------------------


class MineError(Exception):
    """An error that ipufit has never heard of."""


@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize(
    "mine",
    [
        MineError("mine"),
        KeyError("mine"),
        RuntimeError("call .numpy() on data-dependent values"),
        TypeError("no"),
    ],
    ids=repr,
)
def test_an_error_of_forward_surfaces_as_it_is(mine, run_eagerly):
    """Wrapped in another type, it could not be caught or understood any more."""

    class Raises(Net):
        def forward(self, x):
            if x.shape[0] > 1:
                raise mine
            return super().forward(x)

    engine = Watched()
    model = compiled(Raises(), run_eagerly=run_eagerly, engine=lambda: engine)
    with refused(model, type(mine), str(mine)) as caught:
        fit(model)
    assert caught.value is mine
    assert engine.built == engine.closed
    with refused(model, type(mine), str(mine)):
        model.evaluate(loader(), verbose=0)


@runs_eagerly
def test_an_error_of_a_later_forward_keeps_the_updates_before_it():
    """Eagerly a value can raise in the middle of an execution; its update is not begun."""

    class Raises(Net):
        def forward(self, x):
            if x.max() > 100:
                raise MineError("too large")
            return super().forward(x)

    items = batches(6)
    bad = [*items[:5], (items[5][0] + 1000, items[5][1])]
    model, twin = (compiled(Raises(), run_eagerly=True) for _ in range(2))
    twin.module.load_state_dict(model.module.state_dict())
    with pytest.raises(MineError, match="too large"):
        fit(model, bad, device_iterations=6)
    fit(twin, items[:5])
    for name, value in state(twin).items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, state(model)[name]), name
    assert_clean(model)
    assert fit(model).epoch == [0]
