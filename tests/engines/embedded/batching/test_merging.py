"""Micro-batches of an update in one larger batch: the same numbers, or none of it and a reason."""

import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ipufit
from ipufit.core.batch import CombinedBatch, MicroBatch, Mode
from ipufit.core.train_config import Outputs, TrainConfig
from ipufit.engines.embedded.batching import decision
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.program import ProgramSpec
from ipufit.losses import resolve_loss
from tests.fitting import PLANS, Plan, assert_close, assert_equal, compiled, fit, skipping_refusals
from tests.nets import CNN, MLP, Noise, Running, Transformer, data
from tests.points import only
from tests.reference import train

pytestmark = pytest.mark.both_engines

# In float64, sums in another order differ by about 1e-16 relative; Adam amplifies that.
TOLERANCE = 1e-10


class Pictures(nn.Module):
    """Convolutions and pooling, without normalisation."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 2), nn.Conv2d(4, 6, 2, padding=1)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = functional.max_pool2d(self.first(x).relu_(), 2)
        return self.head(functional.adaptive_avg_pool2d(self.second(x).relu(), 1).flatten(1))


class Of(nn.Module):
    """A function of hidden features between two layers, so that its derivative matters."""

    def __init__(self, function, *parts):
        super().__init__()
        self.first, self.head = nn.Linear(12, 12), nn.Linear(12, 5)
        self.parts = nn.ModuleList(parts)
        self.function = function

    def forward(self, x):
        hidden = self.first(x.flatten(1))
        hidden = self.function(hidden, *self.parts)
        return self.head(hidden.reshape(hidden.shape[0], -1)[:, :12])


def build(make):
    torch.manual_seed(1)
    return make().double()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def sgd(parameters):
    # Exactly proportional to the gradient: an error in it can't hide.
    return torch.optim.SGD(parameters, lr=0.05)


def trained(net, plan, n=16, merged=True, way="late", optimizer=sgd, run=fit, **options):
    """A copy of the network after two epochs, its history, and the engine."""
    model, engine = compiled(net, optimizer, way=way, **options)
    if not merged:
        engine.merge = lambda *arguments: decision.Decision.against(1, "a test says so")
    history = run(model, *data(n), plan)
    return model.module, history.history, engine


def assert_same_numbers(first, second):
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values == pytest.approx(second[name], abs=TOLERANCE, nan_ok=True), name


ACCUMULATING = [*PLANS[2:], Plan(2, 2, 2, 4), Plan(4, 2, 4)]
KINDS = (MLP, Pictures, Transformer)
# Every plan of a net that is quickly recorded, either way; the others where micro-batches and
# updates are left over.
QUICK = {
    *((MLP, plan, ("late", "recorded")[place % 2]) for place, plan in enumerate(ACCUMULATING)),
    (Pictures, ACCUMULATING[1], "late"),
    (Pictures, ACCUMULATING[4], "recorded"),
    (Transformer, ACCUMULATING[0], "recorded"),
}


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "plan", "way"),
    only(QUICK, itertools.product(KINDS, ACCUMULATING, ("recorded", "late"))),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_numbers_are_those_of_micro_batches_apart(kind, plan, way):
    """Weights, losses and metrics, with accumulation, replicas and tails."""
    net = build(kind)
    options = {"metrics": ["accuracy"], "optimizer": adam, "way": way}
    one, history, engine = trained(net, plan, n=49, **options)
    if isinstance(engine, EmbeddedEngine):
        assert engine.training.merging.merged is not None
    other, expected, _ = trained(net, plan, n=49, merged=False, **{**options, "way": "late"})
    assert_close(one, other, TOLERANCE)
    assert_same_numbers(history, expected)


@pytest.mark.few
@pytest.mark.parametrize("plan", PLANS[2:], ids=str)
@pytest.mark.parametrize("kind", [MLP, Pictures, Transformer], ids=lambda kind: kind.__name__)
def test_numbers_are_those_of_a_loop_written_by_hand(kind, plan):
    net = build(kind)
    ours, history, engine = trained(net, plan, n=23, optimizer=adam)
    assert engine.training.merging.merged is not None
    report = train(
        net, adam(net.parameters()), functional.cross_entropy, *data(23), epochs=2, **plan.by_hand
    )
    assert_close(ours, net, TOLERANCE)
    assert history["loss"] == pytest.approx([loss for loss, _ in report], abs=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize("kind", [MLP, Pictures, Transformer], ids=lambda kind: kind.__name__)
def test_float32_agrees_to_its_rounding(kind):
    """About 1e-7 relative for each sum; two epochs of plain gradient steps leave less than 1e-5."""

    def narrow(model, x, y, plan):
        return fit(model, x.float(), y, plan)

    net = build(kind).float()
    ours, history, engine = trained(net, Plan(2, 2, 2, 4), n=32, run=narrow)
    assert engine.training.merging.merged is not None
    other, expected, _ = trained(net, Plan(2, 2, 2, 4), n=32, merged=False, run=narrow)
    assert_close(ours, other, 1e-5)
    assert history["loss"] == pytest.approx(expected["loss"], abs=1e-5)


class Rows(Dataset):
    """Samples made of several parts."""

    def __init__(self, *parts):
        self.parts = parts

    def __len__(self):
        return len(self.parts[0])

    def __getitem__(self, index):
        return tuple(part[index] for part in self.parts)


def float_targets(x, y):
    return functional.one_hot(y, 5).double()


def signs(x, y):
    return 2 * float_targets(x, y) - 1


def gaps(x, y):
    """Classes with elements that don't count; in one micro-batch of 2, none does."""
    y = y.clone()
    y[::3], y[8:10] = -100, -100
    return y


def fit_on(make_target):
    def run(model, x, y, plan):
        loader = DataLoader(Rows(x, make_target(x, y)), batch_size=plan.mb)
        return model.fit(
            loader, epochs=2, ipus=plan.replicas, gradient_accumulation=plan.ga, seed=5, verbose=0
        )

    return run


def plain(x, y):
    return y


CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1], dtype=torch.float64)


def own_mean(prediction, target):
    """A loss that is not torch's, and logs."""
    value = (prediction.logsumexp(1) - prediction.gather(1, target[:, None])[:, 0]).mean()
    ipufit.log("largest", prediction.detach().max(), reduce="max")
    return value


def counted(prediction, target):
    kept = target != -100
    each = functional.cross_entropy(prediction, target, reduction="none", ignore_index=-100)
    return each.sum() / kept.sum().clamp(min=1), kept.sum()


def each_sample(prediction, target):
    return functional.cross_entropy(prediction, target, reduction="none")


def _rates(prediction, target):
    return functional.poisson_nll_loss(prediction, target)


LOSSES = {
    "cross_entropy": ("cross_entropy", plain, {}),
    "class indices that don't count": (
        "cross_entropy",
        gaps,
        {"reduction": ipufit.Reduction(normalize="tokens")},
    ),
    "probabilities": ("cross_entropy", float_targets, {}),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), plain, {}),
    "class weights": (nn.CrossEntropyLoss(CLASS_WEIGHT), plain, {}),
    "both": (nn.CrossEntropyLoss(CLASS_WEIGHT, label_smoothing=0.2), plain, {}),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), plain, {}),
    "sum, reduced by sum": (
        nn.CrossEntropyLoss(reduction="sum"),
        plain,
        {"reduction": ipufit.Reduction(gradients="sum")},
    ),
    "micro-batches": (
        "cross_entropy",
        plain,
        {"reduction": ipufit.Reduction(normalize="micro_batches")},
    ),
    "reduced by sum": ("cross_entropy", plain, {"reduction": ipufit.Reduction(gradients="sum")}),
    "one value per sample": (each_sample, plain, {}),
    "mse": ("mse", float_targets, {}),
    "mae": ("mae", float_targets, {}),
    "huber": ("huber", float_targets, {}),
    "smooth_l1": ("smooth_l1", float_targets, {}),
    "bce_with_logits": ("bce_with_logits", float_targets, {}),
    "positive weights": (nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT), float_targets, {}),
    "hinge": ("hinge_embedding", signs, {}),
    "soft_margin": ("soft_margin", signs, {}),
    "multi_margin": ("multi_margin", plain, {}),
    "multilabel_soft_margin": ("multilabel_soft_margin", float_targets, {}),
    "poisson": ("poisson_nll", float_targets, {}),
    "kl_div": ("kl_div", float_targets, {}),
    "kl_div, sum": (nn.KLDivLoss(reduction="sum"), float_targets, {}),
    "a function": (_rates, float_targets, {}),
    "one that logs": (own_mean, plain, {}),
    "one that counts": (counted, gaps, {"reduction": ipufit.Reduction(normalize="tokens")}),
}


@pytest.mark.few
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_what_it_is_apart(name):
    """The loss of each micro-batch, its count, what it logs, and its gradient."""
    loss, target, options = LOSSES[name]
    if getattr(loss, "label_smoothing", 0.0) and not hasattr(torch, "compiler"):
        pytest.skip("torch 2.0 smooths labels by their values, which no recording holds")
    net = build(MLP)
    options = {"loss": loss, "run": fit_on(target), **options}
    one, history, engine = trained(net, Plan(2, 1, 2, 4), n=37, **options)
    assert engine.training.merging.merged is not None, engine.training.merging.explanation
    other, expected, _ = trained(net, Plan(2, 1, 2, 4), n=37, merged=False, **options)
    assert_close(one, other, TOLERANCE)
    assert_same_numbers(history, expected)


@pytest.mark.long
def test_classes_that_do_not_count_in_a_whole_micro_batch_are_nan_as_torch_has_it():
    """A mean over nothing: apart and merged name the same update."""
    net = build(MLP)
    for merged in (True, False):
        with pytest.raises(ipufit.errors.NonFiniteLossError) as caught:
            trained(net, Plan(2, 1, 1, 4), merged=merged, run=fit_on(gaps))
        assert caught.value.update == 1


@pytest.mark.long
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean_with_sample_weight"])
@pytest.mark.parametrize("way", ["recorded", "late"])
def test_sample_weights(reduction, way):
    def weighted(model, x, y, plan):
        weight = torch.rand(len(x), generator=torch.Generator().manual_seed(3)).double()
        weight[4:8] = 0  # of whole micro-batches
        with skipping_refusals():
            return model.fit(
                x,
                y,
                sample_weight=weight,
                batch_size=plan.mb,
                epochs=2,
                ipus=plan.replicas,
                gradient_accumulation=plan.ga,
                shuffle=False,
                seed=5,
                verbose=0,
            )

    net = build(MLP)
    options = {"run": weighted, "reduction": ipufit.Reduction(sample_weights=reduction)}
    one, history, _ = trained(net, Plan(2, 1, 2, 2), n=23, way=way, **options)
    other, expected, _ = trained(net, Plan(2, 1, 2, 2), n=23, merged=False, **options)
    assert_close(one, other, TOLERANCE)
    assert_same_numbers(history, expected)


class Two(nn.Module):
    """Two outputs by name, one with the samples along its second dimension, and a number."""

    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 5), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.body(x.flatten(1)).tanh()
        scale = self.second.weight.square().sum()
        return {"a": self.first(hidden), "b": self.second(hidden).t(), "scale": scale, "version": 3}


def both_outputs(outputs, target):
    assert outputs["version"] == 3
    first = functional.cross_entropy(outputs["a"], target)
    return first + outputs["b"].square().sum(0).mean() + 0.01 * outputs["scale"]


@pytest.mark.long
def test_several_outputs_are_cut_where_their_samples_are():
    """Along any dimension; a tensor without samples goes to every micro-batch as it is."""
    net = build(Two)
    one, history, engine = trained(net, Plan(2, 1, 1, 4), loss=both_outputs)
    assert engine.training.merging.merged is not None
    other, expected, _ = trained(net, Plan(2, 1, 1, 4), merged=False, loss=both_outputs)
    assert_close(one, other, TOLERANCE)
    assert_same_numbers(history, expected)


class Parts(nn.Module):
    """Two outputs by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, x):
        return {"a": self.first(x.flatten(1)), "b": self.second(x.flatten(1)).relu()}


@pytest.mark.long
def test_several_losses():
    """One for each output, with a weight, and History has each of them."""
    net = build(Parts)
    options = {
        "loss": {"a": "cross_entropy", "b": "mse"},
        "loss_weights": {"b": 0.3},
        "run": fit_on(lambda x, y: [{"a": c, "b": t} for c, t in zip(y, float_targets(x, y))]),
    }
    one, history, engine = trained(net, Plan(2, 1, 1, 4), **options)
    assert engine.training.merging.merged is not None
    other, expected, _ = trained(net, Plan(2, 1, 1, 4), merged=False, **options)
    assert {"a_loss", "b_loss"} <= history.keys()
    assert_close(one, other, TOLERANCE)
    assert_same_numbers(history, expected)


def execution(mode, merged, at_once):
    """What one execution of three updates hands back, the last one of half its micro-batches."""
    net, (x, y) = build(Two), data(20)
    engine = EmbeddedEngine()
    engine.as_device = not at_once
    if not merged:
        engine.merge = lambda *arguments: decision.Decision.against(1, "a test says so")
    spec = ProgramSpec(
        module=net,
        loss=resolve_loss(both_outputs),
        optimizer=sgd(net.parameters()),
        plan=ipufit.core.plan.Plan.make(
            micro_batch_size=2, ipus=2, device_iterations=3, gradient_accumulation=2
        ),
        mode=Mode.TRAIN,
        want_outputs=True,
        seed=0,
        config=TrainConfig(outputs=Outputs(mode)),
    )
    program = engine.build(spec)
    batch = CombinedBatch(
        [MicroBatch.of((x[i : i + 2],), {}, y[i : i + 2], 2) for i in range(0, 20, 2)]
    )
    program.prepare(batch.micro_batches[0])
    anchors = program.run(batch)
    program.close()
    assert (engine.training.merging.merged is not None) == merged
    return anchors, net


@pytest.mark.long
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("mode", ["all", "final"])
def test_an_execution_hands_back_what_it_does_apart(mode, at_once):
    """Losses and outputs of every micro-batch, in their places; a short update runs apart."""
    one, net = execution(mode, True, at_once)
    other, expected = execution(mode, False, at_once)
    assert one.places == other.places
    assert len(one.outputs) == len(other.outputs) > 0
    for first, second in zip(one.outputs, other.outputs):
        torch.testing.assert_close(first, second, rtol=0, atol=TOLERANCE)
        assert first["version"] == 3
    torch.testing.assert_close(one.losses, other.losses, rtol=0, atol=TOLERANCE)
    assert_close(net, expected, TOLERANCE)


@pytest.mark.long
def test_sums_of_outputs():
    """output_mode='sum' adds up the rows of micro-batches of each replica."""
    options = {"outputs": "sum", "way": "late"}
    seen = []
    for merged in (True, False):
        model, engine = compiled(build(MLP), sgd, **options)
        if not merged:
            engine.merge = lambda *arguments: decision.Decision.against(1, "a test says so")
        kept = []
        callback = ipufit.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, kept=kept: kept.append(logs["loss"])
        )
        fit(model, *data(16), Plan(2, 2, 2, 2), callbacks=[callback])
        seen.append((model.module, kept))
    assert_close(seen[0][0], seen[1][0], TOLERANCE)
    assert seen[0][1] == pytest.approx(seen[1][1], abs=TOLERANCE)


# Modules whose samples see nothing of each other: each of these runs merged.


class Words(nn.Module):
    """An embedding, a recurrent layer, attention over positions with a mask, tied weights."""

    def __init__(self, cell):
        super().__init__()
        self.embed = nn.Embedding(7, 8, padding_idx=0)
        self.cell = cell(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("mask", torch.ones(12, 12).triu(1).bool())
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        words = (x.flatten(1).abs() * 3).long().clamp(max=6)
        hidden = self.cell(self.embed(words))[0]
        seen, _ = self.attention(hidden, hidden, hidden, attn_mask=self.mask, need_weights=False)
        scores = self.head(hidden + seen) @ self.head.weight @ self.embed.weight.t()
        return scores[:, -1, :5] + scores[:, :, 1:6].mean(1)


class EvalNorm(nn.Module):
    """BatchNorm that normalises with what it has collected."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Linear(24, 5)
        self.norm.running_mean.fill_(0.5)
        self.norm.eval()

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).flatten(1))


def as_pictures(h):
    return h.view(-1, 2, 2, 3)


def heads(h):
    """Attention as many write it: heads beside the samples."""
    size = h.shape[0]
    q = h.view(size, 3, 2, 2).permute(2, 0, 1, 3).reshape(2 * size, 3, 2)
    return torch.bmm(torch.softmax(q @ q.transpose(1, 2), -1), q).view(2, size, 6).permute(1, 0, 2)


def filled(h):
    out = torch.zeros(h.shape[0], 12, dtype=h.dtype)
    out[:, 0] = h.sum(1)
    out[:, 1:7] = h[:, 6:]
    return out.masked_fill_(h > 1, 0.5)


def with_a_token(h, token):
    token = token.weight.expand(h.shape[0], 1, 4)
    return torch.cat([token, h.view(-1, 3, 4)], 1).mean(1).repeat(1, 3)


APART = {
    "relu_": lambda: Of(lambda h: h.relu_()),
    "activations": lambda: Of(
        lambda h: functional.gelu(h) + functional.silu(h) + functional.logsigmoid(h)
    ),
    "softmax": lambda: Of(lambda h: h.softmax(1) + h.log_softmax(-1)),
    "layer_norm": lambda: Of(lambda h, n: n(h), nn.LayerNorm(12)),
    "group_norm": lambda: Of(lambda h, n: n(h.view(-1, 4, 3)), nn.GroupNorm(2, 4)),
    "instance_norm": lambda: Of(lambda h, n: n(as_pictures(h)), nn.InstanceNorm2d(2, affine=True)),
    "sort": lambda: Of(lambda h: h.sort(1)[0] + h.cumsum(-1) + h.flip(1) + h.roll(1, 1)),
    "topk": lambda: Of(lambda h: h.topk(12, 1)[0] * h.argmax(1, keepdim=True)),
    "extremes": lambda: Of(lambda h: h - h.amax(1, True) + h.max(1)[0].unsqueeze(1)),
    "moments": lambda: Of(lambda h: (h - h.mean(1, True)) / (h.std(1, keepdim=True) + 1)),
    "normalize": lambda: Of(lambda h: functional.normalize(h, dim=1) + h.logsumexp(1)[:, None]),
    "gather": lambda: Of(lambda h: h.gather(1, h.argsort(1))),
    "index": lambda: Of(lambda h: h[:, [3, 1, 0, 2]].repeat(1, 3) + h[:, 2:3]),
    "split": lambda: Of(lambda h: torch.cat([-part for part in h.chunk(3, 1)], 1)),
    "stack": lambda: Of(lambda h: torch.stack(h.unbind(1)[:6] * 2, 1)),
    "glu": lambda: Of(lambda h: functional.glu(h, 1).repeat(1, 2)),
    "prelu": lambda: Of(lambda h, p: p(h), nn.PReLU(12)),
    "pad": lambda: Of(lambda h: functional.pad(h, (1, 2))[:, 2:14]),
    "tril": lambda: Of(lambda h: h.view(-1, 3, 4).tril()),
    "outer products": lambda: Of(lambda h: torch.einsum("bi,bj->bij", h, h).sum(1)),
    "products": lambda: Of(lambda h: torch.einsum("bij,bkj->bik", *[h.view(-1, 4, 3)] * 2)),
    "conv1d": lambda: Of(lambda h, c: c(h.unsqueeze(1)), nn.Conv1d(1, 2, 3, padding=1)),
    "transposed": lambda: Of(lambda h, c: c(as_pictures(h)), nn.ConvTranspose2d(2, 2, 2)),
    "pooling": lambda: Of(
        lambda h: (
            functional.avg_pool2d(as_pictures(h), 2, 1, 1)
            + functional.max_pool2d(as_pictures(h), 2, 1, 1)
        )
    ),
    "upsampling": lambda: Of(lambda h: functional.interpolate(as_pictures(h), scale_factor=2)),
    "heads beside samples": lambda: Of(heads),
    "samples second": lambda: Of(
        lambda h, a: a(h.view(-1, 3, 4).transpose(0, 1)).transpose(0, 1), nn.Linear(4, 4)
    ),
    "a matrix from the left": lambda: Of(lambda h, a: (a.weight @ h.t()).t(), nn.Linear(12, 12)),
    "attention": lambda: Of(
        lambda h: functional.scaled_dot_product_attention(*[h.view(-1, 2, 3, 2)] * 3)
    ),
    "causal attention": lambda: Of(
        lambda h: functional.scaled_dot_product_attention(
            *[h.view(-1, 2, 3, 2)] * 3, is_causal=True
        )
    ),
    "a token": lambda: Of(with_a_token, nn.Linear(4, 1)),
    "written in place": lambda: Of(filled),
    "where": lambda: Of(lambda h: torch.where(h > 0, h, torch.zeros_like(h)).clamp(max=1)),
    "constants": lambda: Of(lambda h: h * torch.tensor(0.5) + torch.arange(12)),
    "lstm": lambda: Words(nn.LSTM),
    "BatchNorm in eval mode": EvalNorm,
    "dropout of nothing": lambda: Of(lambda h, d: d(h), nn.Dropout(0.0)),
}


# For one sample torch computes these by other operators than for several.
OTHERWISE = {"instance_norm", "lstm", "products", "samples second"}


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "size"), [(n, s) for n in APART for s in (1, 2) if s == 2 or n not in OTHERWISE]
)
def test_modules_of_independent_samples_merge(name, size):
    """Of micro-batches of one sample too, whose dimension could be taken for another one."""
    net = build(APART[name])
    one, history, engine = trained(net, Plan(size, 1, 3, 2), n=24)
    assert engine.training.merging.explanation == (
        f"The 6 micro-batches of an update run as one batch of {6 * size} samples."
    )
    other, expected, _ = trained(net, Plan(size, 1, 3, 2), n=24, merged=False)
    assert_close(one, other, TOLERANCE)
    assert_same_numbers(history, expected)


# Modules whose micro-batches are not parts of a larger one, and why.


class Centred(torch.autograd.Function):
    """Its derivative joins samples, its value does not."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


def hooked(h):
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / gradient.norm())
    return h * 2


def logging(h):
    ipufit.log("norm", h.norm())
    return h


class Changed(nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(x.mul_(0.5).flatten(1))


class Frequencies(nn.Module):
    """An embedding whose derivative counts how often an index occurs in the batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5, scale_grad_by_freq=True), nn.Linear(5, 5)

    def forward(self, x):
        return self.head(self.embed((x.flatten(1).abs() * 3).long().clamp(max=6)).mean(1))


JOINS = "{} in forward joins the samples of a batch"
DEPENDS = "{} does something else with 8 samples than with 2"
UNKNOWN = "{} in forward is not known to treat samples one by one"
GRADIENT = "the gradient of forward is not that of its operators"
LAYER = "{!r} is changed by every micro-batch"

TOGETHER = {
    "mean": (lambda: Of(lambda h: h - h.mean(0)), JOINS.format("aten.mean.dim")),
    "mean of all": (lambda: Of(lambda h: h - h.mean()), JOINS.format("aten.mean")),
    "sum": (lambda: Of(lambda h: h / (1 + h.sum(0).abs())), JOINS.format("aten.sum.dim_IntList")),
    "std": (lambda: Of(lambda h: h / (1 + h.std(0))), JOINS.format("aten.std.correction")),
    "largest": (lambda: Of(lambda h: h / (1 + h.abs().max())), JOINS.format("aten.max")),
    "largest of each": (lambda: Of(lambda h: h - h.amax(0)), JOINS.format("aten.amax")),
    "median": (lambda: Of(lambda h: h - h.median(0)[0]), JOINS.format("aten.median.dim")),
    "norm": (lambda: Of(lambda h: functional.normalize(h, dim=0)), "joins"),
    "softmax": (lambda: Of(lambda h: h.softmax(0)), JOINS.format("aten._softmax")),
    "flip": (lambda: Of(lambda h: h + h.flip(0)), JOINS.format("aten.flip")),
    "roll": (lambda: Of(lambda h: h + h.roll(1, 0)), JOINS.format("aten.roll")),
    "roll of all": (lambda: Of(lambda h: h + h.roll(1)), "aten."),
    "cumsum": (lambda: Of(lambda h: h.cumsum(0)), JOINS.format("aten.cumsum")),
    "sort": (lambda: Of(lambda h: h.sort(0)[0]), "aten.sort"),
    "topk": (lambda: Of(lambda h: h.topk(1, 0)[0] + h), JOINS.format("aten.topk")),
    "products": (lambda: Of(lambda h: h @ h.t() @ h), JOINS.format("aten.mm")),
    "features": (lambda: Of(lambda h: h @ (h.t() @ h)), JOINS.format("aten.mm")),
    "einsum": (lambda: Of(lambda h: torch.einsum("bi,cj->bj", h, h)), "aten."),
    "the first": (lambda: Of(lambda h: h + h[0]), JOINS.format("aten.select.int")),
    "a part": (lambda: Of(lambda h: h + h[:1]), JOINS.format("aten.slice.Tensor")),
    "shifted": (lambda: Of(lambda h: torch.cat([h[1:], h[:1]])), "aten.slice.Tensor"),
    "reversed": (lambda: Of(lambda h: torch.stack(h.unbind()[::-1])), "forward"),
    "pairs": (lambda: Of(lambda h: h.view(-1, 24).softmax(1).view(-1, 12)), "a view of (8, 12)"),
    "one row": (
        lambda: Of(lambda h: h.view(1, -1).cumsum(1).view(-1, 12)),
        JOINS.format("aten.cumsum"),
    ),
    "turned": (
        lambda: Of(lambda h: h.t().reshape(-1, 12)),
        "a view of (12, 8) as (8, 12) splits or mixes samples",
    ),
    "positions": (
        lambda: Of(lambda h: h + torch.arange(len(h))[:, None]),
        DEPENDS.format("aten.arange in forward"),
    ),
    "their number": (
        lambda: Of(lambda h: h * len(h)),
        DEPENDS.format("aten.mul.Tensor in forward"),
    ),
    "a branch on it": (
        lambda: Of(lambda h: h * 2 if len(h) == 2 else h.tanh()),
        DEPENDS.format("forward"),
    ),
    "a convolution over samples": (
        lambda: Of(lambda h, c: c(h.t().unsqueeze(0))[0].t(), nn.Conv1d(12, 12, 3, padding=1)),
        JOINS.format("aten.convolution"),
    ),
    "attention over samples": (
        lambda: Of(lambda h, a: a(h, h, h)[0], nn.MultiheadAttention(12, 2)),
        "joins the samples of a batch",
    ),
    "normalised over samples": (
        lambda: Of(lambda h: functional.layer_norm(h.t(), h.shape[:1]).t()),
        "does something else",
    ),
    "padded samples": (lambda: Of(lambda h: functional.pad(h, (0, 0, 1, 0))[:-1]), "joins"),
    "a triangle": (lambda: Of(lambda h: h.tril()), JOINS.format("aten.tril")),
    "sums in place": (
        lambda: Of(lambda h: h + torch.zeros(12).double().add_(h.sum(1)[-1])),
        JOINS.format("aten.select.int"),
    ),
    "unknown": (lambda: Of(lambda h: h.renorm(2, 0, 1.0)), "aten."),
    "distances": (lambda: Of(lambda h: torch.cdist(h, h) @ h), "aten."),
    "BatchNorm": (
        lambda: Of(lambda h, n: n(h), nn.BatchNorm1d(12)),
        LAYER.format("parts.0.running_mean"),
    ),
    "BatchNorm without memory": (
        lambda: Of(lambda h, n: n(h), nn.BatchNorm1d(12, track_running_stats=False)),
        "batch normalisation takes its statistics from a whole micro-batch",
    ),
    "instance normalisation with memory": (
        lambda: Of(lambda h, n: n(as_pictures(h)), nn.InstanceNorm2d(2, track_running_stats=True)),
        "is changed by every micro-batch",
    ),
    "a buffer": (Running, LAYER.format("seen")),
    "dropout": (CNN, "draws random numbers, other ones in each micro-batch"),
    "dropout alone": (
        lambda: Of(lambda h, d: d(h), nn.Dropout(0.5)),
        "draws random numbers, other ones in each micro-batch",
    ),
    "dropout in attention": (
        lambda: Of(
            lambda h: functional.scaled_dot_product_attention(
                *[h.view(-1, 2, 3, 2)] * 3, dropout_p=0.5
            )
        ),
        "draws random numbers, other ones in each micro-batch",
    ),
    "noise": (Noise, "aten.randn_like draws random numbers, other ones in each micro-batch"),
    "Python's numbers": (
        lambda: Of(lambda h: h * 0.5 if random.random() < 2 else h),
        "forward or loss draw random numbers of Python or NumPy",
    ),
    "NumPy's numbers": (
        lambda: Of(lambda h: h * 0.5 if np.random.rand() < 2 else h),
        "forward or loss draw random numbers of Python or NumPy",
    ),
    "logged": (lambda: Of(logging), "forward logs values of every micro-batch"),
    "a derivative of its own": (lambda: Of(Centred.apply), GRADIENT),
    "frequencies": (Frequencies, JOINS.format("aten.embedding")),
    "a hook": (lambda: Of(hooked), GRADIENT),
    "no gradient": (lambda: Of(lambda h: h - h.detach()), GRADIENT),
    "its input": (Changed, "the batch itself is changed in place"),
}


@pytest.mark.grid
@pytest.mark.filterwarnings("ignore:a random number is drawn from:UserWarning")
@pytest.mark.parametrize("name", TOGETHER)
def test_modules_that_may_join_samples_do_not_merge(name):
    """A reason is given, and the bits are those without any of this."""
    make, reason = TOGETHER[name]
    net = build(make)

    def copied(model, x, y, plan):
        return fit(model, x.clone(), y, plan)

    ours, history, engine = trained(net, Plan(2, 1, 2, 2), n=20, run=copied)
    assert engine.training.merging.merged is None
    said = engine.training.merging.explanation
    assert said.startswith("The 4 micro-batches of an update run one by one: ")
    assert said.endswith(".")
    assert reason in said, said
    expected, apart, _ = trained(net, Plan(2, 1, 2, 2), n=20, merged=False, run=copied)
    assert_equal(ours, expected)
    assert history["loss"] == apart["loss"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"precision": ipufit.Precision(loss_scale=8.0)}, "the loss is scaled"),
        (
            {"precision": ipufit.Precision(accumulation_dtype="float64")},
            "accumulation_dtype needs a sum over micro-batches",
        ),
        (
            {"memory": ipufit.Memory(recompute=["layers"])},
            "recompute saves memory, and a larger batch needs more",
        ),
        ({"precision": "mixed_bfloat16"}, "half precision rounds a larger batch differently"),
    ],
)
def test_what_compile_was_asked_for_may_forbid_it(options, reason):
    net = build(MLP).float()

    def narrow(model, x, y, plan):
        return fit(model, x.float(), y, plan)

    _, _, engine = trained(net, Plan(2, 1, 1, 4), run=narrow, **options)
    assert engine.training.merging.explanation == (
        f"The 4 micro-batches of an update run one by one: {reason}."
    )


def test_a_hook_on_a_parameter_sees_every_micro_batch():
    net = build(MLP)
    model, engine = compiled(net, sgd, way="late")
    model.module.layers[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    fit(model, *data(16), Plan(2, 1, 1, 4))
    assert "a hook of 'layers.0.weight' sees the gradient of every micro-batch" in (
        engine.training.merging.explanation
    )


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = MLP()

    def forward(self, x, y):
        scores = self.net(x)
        return scores, functional.cross_entropy(scores, y)


@pytest.mark.long
def test_a_loss_of_the_modules_own_is_not_cut():
    _, _, engine = trained(build(OwnLoss), Plan(2, 1, 1, 4), loss=None)
    assert (
        "the module computes its own loss, from a whole micro-batch"
        in engine.training.merging.explanation
    )


@pytest.mark.long
def test_a_loss_that_draws_random_numbers_has_its_own_in_each_micro_batch():
    def noisy(prediction, target):
        return functional.cross_entropy(prediction + torch.randn_like(prediction), target)

    _, _, engine = trained(build(MLP), Plan(2, 1, 1, 4), loss=noisy)
    assert "aten.randn_like draws random numbers" in engine.training.merging.explanation


@pytest.mark.long
def test_too_large_a_batch_is_cut_to_what_memory_allows(monkeypatch):
    """Micro-batches are merged as far as their values fit; the numbers stay."""
    net = build(MLP)
    expected, _, engine = trained(net, Plan(2, 1, 4, 2), merged=False)
    monkeypatch.setattr(decision, "peak_bytes", lambda graph: 2**20)
    for limit, said in (
        (4 * 2**20, "run as 2 batches of 8 samples, to bound the memory."),
        (3 * 2**20, "run as 4 batches of 4 samples, to bound the memory."),
        (
            1.5 * 2**20,
            "run one by one: two of them at once would hold more than 1.5 MiB of values.",
        ),
    ):
        monkeypatch.setattr(decision, "MOST_BYTES", limit)
        ours, _, engine = trained(net, Plan(2, 1, 4, 2))
        assert_close(ours, expected, TOLERANCE)
        assert said in engine.training.merging.explanation


@pytest.mark.few
@pytest.mark.parametrize(
    ("plan", "options", "factor"),
    [
        (Plan(2, 1, 4, 2), {}, 1 / 8),
        (Plan(2, 1, 4), {"loss": "mse"}, 1 / 4),
        (Plan(2, 1, 3, 2), {}, 1.0),
        (Plan(2, 1, 4, 2), {"reduction": ipufit.Reduction(gradients="sum")}, 1.0),
        # Which part of the sum they are depends on the samples.
        (
            Plan(2, 1, 4, 2),
            {"loss": counted, "reduction": ipufit.Reduction(normalize="tokens")},
            1.0,
        ),
    ],
)
def test_a_share_that_is_a_power_of_two_is_multiplied_before_the_sum(
    plan, options, factor, monkeypatch
):
    """It takes no bit of a number, and spares a pass over the sum, also where tails need less."""
    monkeypatch.setattr(decision, "peak_bytes", lambda graph: 2**20)
    monkeypatch.setattr(decision, "MOST_BYTES", 4 * 2**20)
    net, run = build(MLP), fit
    if options.get("loss") == "mse":
        run = fit_on(float_targets)
    # The last update of an epoch has half of the micro-batches, or less.
    ours, history, engine = trained(net, plan, n=24, run=run, **options)
    merged = engine.training.merging.merged
    assert merged is not None
    assert merged.factor == factor
    other, expected, _ = trained(net, plan, n=24, merged=False, run=run, **options)
    assert_close(ours, other, TOLERANCE)
    assert_same_numbers(history, expected)


def test_replicas_whose_buffers_differ_run_apart():
    """Only one of them could be read; equal again, they run as one."""
    model, engine = compiled(build(EvalNorm), sgd, way="late")
    said = []

    class Change(ipufit.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            model.module.norm.running_mean.data.fill_(0.75 if epoch == 1 else 0.5)

        def on_epoch_end(self, epoch, logs=None):
            said.append(engine.training.merging.explanation)

    x, y = data(16)
    fit(model, x, y, Plan(2, 1, 1, 4), epochs=3, callbacks=[Change()])
    merged = "The 4 micro-batches of an update run as one batch of 8 samples."
    apart = "The 4 micro-batches of an update run one by one: the replicas' buffers differ."
    assert said == [merged, apart, merged]


@pytest.mark.long
def test_explain_says_it():
    model, _ = compiled(build(MLP), sgd, way="late")
    fit(model, *data(16), Plan(2, 1, 1, 4))
    assert (
        "The 4 micro-batches of an update run as one batch of 8 samples."
        in model._session.explain()
    )
    model, _ = compiled(build(Running), sgd, way="late")
    fit(model, *data(16), Plan(2, 1, 1, 4))
    reason = "'seen' is changed by every micro-batch."
    assert reason in model._session.explain()


@pytest.mark.parametrize("options", [{"run_eagerly": True}])
def test_off_never_merges(options):
    model = ipufit.Model(build(MLP), engine=EmbeddedEngine)
    model.compile(sgd(model.module.parameters()), "cross_entropy", **options)
    fit(model, *data(16), Plan(2, 1, 1, 4))
    assert model._session.engine.training.merging is None
    assert "micro-batches of an update" not in model._session.explain().partition("Runs")[2]


@pytest.mark.long
def test_one_micro_batch_needs_no_word():
    model, engine = compiled(build(MLP), sgd, way="late")
    fit(model, *data(16), Plan(2))
    assert engine.training.merging is None


@pytest.mark.long
def test_a_second_fit_records_nothing_again():
    model, engine = compiled(build(MLP), sgd, way="late")
    fit(model, *data(16), Plan(2, 1, 1, 4))
    recorded = engine.captures
    fit(model, *data(16), Plan(2, 2, 1, 4))
    assert engine.captures == recorded == 2


@pytest.mark.filterwarnings("ignore:a random number is drawn from:UserWarning")
def test_pythons_and_numpys_numbers_go_on_as_without():
    """A dataset may draw them too."""
    net = build(TOGETHER["Python's numbers"][0])
    left = []
    for merged in (True, False):
        random.seed(7)
        trained(net, Plan(2, 1, 1, 4), merged=merged)
        left.append(random.random())
    assert left[0] == left[1]


@pytest.mark.long
def test_a_recording_is_freed_of_what_looking_at_it_set():
    """Attributes that forward sets while it is recorded for larger batches are undone."""

    class Setting(MLP):
        def forward(self, x):
            self.seen = x.shape[0]
            return super().forward(x)

    net = build(Setting)
    with pytest.warns(UserWarning, match=r"forward sets Setting\.seen"):
        ours, _, engine = trained(net, Plan(2, 1, 1, 4))
    assert engine.training.merging.merged is not None
    assert not hasattr(ours, "seen")
    assert copy.deepcopy(ours) is not ours
