"""Steps of one's own in the style of published programs, each with its loop by hand."""

import copy
import dataclasses
import functools
from typing import Any, Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit import TrainStep


def dense(*sizes, norm=False):
    """Dense layers with tanh in between."""
    layers = []
    for before, after in zip(sizes, sizes[1:]):
        layers += [nn.Linear(before, after), nn.Tanh()]
        layers += [nn.BatchNorm1d(after)] if norm else []
    return nn.Sequential(*layers[: -2 if norm else -1])


class Adversaries(nn.Module):
    """A generator of points and a critic of them."""

    def __init__(self):
        super().__init__()
        self.generator = dense(3, 8, 2, norm=True)
        self.critic = dense(2, 8, 1)

    def forward(self, noise):
        return self.generator(noise)


def tell_apart(net, batch):
    """The discriminator's step of DCGAN."""
    real, noise = batch
    fake = net.generator(noise).detach()
    ones = torch.ones(len(real), 1, dtype=real.dtype)
    loss = F.binary_cross_entropy_with_logits(net.critic(real), ones)
    return {"d": loss + F.binary_cross_entropy_with_logits(net.critic(fake), 0 * ones)}


def deceive(net, batch):
    """The generator's step of DCGAN."""
    made = net.critic(net.generator(batch[1]))
    return {"g": F.binary_cross_entropy_with_logits(made, torch.ones_like(made))}


def criticise(net, batch):
    """The critic's step of WGAN-GP, with a penalty on the norm of a gradient."""
    real, noise = batch
    fake = net.generator(noise).detach()
    between = ((real + fake) / 2).requires_grad_()
    (slope,) = torch.autograd.grad(net.critic(between).sum(), between, create_graph=True)
    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
    return {"d": net.critic(fake).mean() - net.critic(real).mean() + 10 * penalty, "gp": penalty}


def please(net, batch):
    """The generator's step of WGAN."""
    return {"g": -net.critic(net.generator(batch[1])).mean()}


class ActorCritic(nn.Module):
    """A trunk that both use, logits of actions, and a value."""

    def __init__(self):
        super().__init__()
        self.actor = dense(2, 8, 3)
        self.critic = dense(2, 8, 1)

    def forward(self, observation):
        return self.actor(observation)


def act_and_judge(net, batch):
    """Policy gradient with a baseline; both losses are computed with the same weights."""
    observation, noise = batch
    gain = noise[:, 0]
    value = net.critic(observation)[:, 0]
    advantage = (gain - value).detach()
    chosen = net.actor(observation).log_softmax(1)[:, 0]
    return {"policy": -(chosen * advantage).mean(), "value": F.mse_loss(value, gain)}


class Regressor(nn.Module):
    """A net for everything with one loss."""

    def __init__(self):
        super().__init__()
        self.body = dense(2, 8, 3)

    def forward(self, x):
        return self.body(x)


def sharpness_aware(net, batch):
    """SAM: the gradient at the worst point near by, which a first gradient finds."""
    x, y = batch
    loss = F.mse_loss(net(x), y)
    if not net.training:
        return loss
    named = dict(net.named_parameters())
    slopes = torch.autograd.grad(loss, list(named.values()))
    norm = torch.stack([slope.norm() for slope in slopes]).norm()
    climbed = {n: p + 0.05 * s / norm for (n, p), s in zip(named.items(), slopes)}
    return F.mse_loss(torch.func.functional_call(net, climbed, (x,)), y)


def robust(net, batch):
    """Adversarial training: the loss at inputs that a gradient has moved."""
    x, y = batch
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(net(x), y), x)
    return F.mse_loss(net((x + 0.1 * slope.sign()).detach()), y)


def smooth(net, batch):
    """A penalty on the gradient by the input, as in R1 regularisation."""
    x, y = batch
    x = x.clone().requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + 0.5 * slope.square().sum(1).mean()


class Contrast(nn.Module):
    """An encoder, a second one that follows it slowly, and a queue of keys."""

    def __init__(self):
        super().__init__()
        self.query = dense(2, 8, 3)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", torch.randn(16, 3, dtype=torch.float64))

    def forward(self, x):
        return self.query(x)


def contrast(net, batch):
    """A contrastive loss with a momentum encoder, as in MoCo."""
    x, other = batch
    query = F.normalize(net.query(x), dim=1)
    with torch.no_grad():
        if net.training:
            for followed, follower in zip(net.query.parameters(), net.key.parameters()):
                follower.mul_(0.9).add_(followed, alpha=0.1)
        key = F.normalize(net.key(other[:, :2]), dim=1)
    others = query @ F.normalize(net.queue, dim=1).T
    logits = torch.cat([(query * key).sum(1, keepdim=True), others], 1) / 0.2
    loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
    if net.training:
        net.queue.copy_(torch.cat([key, net.queue[: -len(key)]]))
    return loss


class Distilled(nn.Module):
    """A student, and a teacher that no optimizer has."""

    def __init__(self):
        super().__init__()
        self.student = dense(2, 4, 3)
        self.teacher = dense(2, 8, 3).requires_grad_(False)

    def forward(self, x):
        return self.student(x)


def distil(net, batch):
    """Knowledge distillation: the target's loss, and the teacher's distribution."""
    x, y = batch
    with torch.no_grad():
        taught = net.teacher(x).softmax(1)
    logits = net.student(x)
    soft = F.kl_div(logits.log_softmax(1), taught, reduction="batchmean")
    return {"loss": F.cross_entropy(logits, y.argmax(1)) + soft, "soft": soft}


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
        net: makes the module.
        loss: as ``compile`` takes it.
        turns: for the loop by hand: function, name of the loss, part that it moves, every, repeat.
        rates: learning rates of the parts that have parameters to be moved.
        at_once: whether losses are computed with the same weights.
    """

    net: Callable[[], nn.Module]
    loss: Any
    turns: Any
    rates: Any
    at_once: bool = False


GAN = {"generator": 2e-3, "critic": 1e-3}
PROGRAMS = {
    "dcgan": Program(
        Adversaries,
        [TrainStep(tell_apart, {"d": "critic"}), TrainStep(deceive, {"g": "generator"})],
        [(tell_apart, "d", "critic", 1, 1), (deceive, "g", "generator", 1, 1)],
        GAN,
    ),
    "wgan-gp": Program(
        Adversaries,
        [
            TrainStep(criticise, {"d": "critic"}, repeat=5),
            TrainStep(please, {"g": "generator.*"}),
        ],
        [(criticise, "d", "critic", 1, 5), (please, "g", "generator", 1, 1)],
        GAN,
    ),
    "critic-more-often": Program(
        Adversaries,
        [TrainStep(criticise, {"d": "critic"}), TrainStep(please, {"g": "generator"}, every=3)],
        [(criticise, "d", "critic", 1, 1), (please, "g", "generator", 3, 1)],
        GAN,
    ),
    "actor-critic": Program(
        ActorCritic,
        TrainStep(act_and_judge, {"policy": "actor", "value": "critic"}, at_once=True),
        [(act_and_judge, "policy", "actor", 1, 1), (act_and_judge, "value", "critic", 1, 1)],
        {"actor": 1e-3, "critic": 3e-3},
        at_once=True,
    ),
    "sam": Program(
        Regressor,
        TrainStep(sharpness_aware),
        [(sharpness_aware, None, "body", 1, 1)],
        {"body": 1e-2},
    ),
    "adversarial": Program(
        Regressor, TrainStep(robust), [(robust, None, "body", 1, 1)], {"body": 1e-2}
    ),
    "penalty": Program(
        Regressor, TrainStep(smooth), [(smooth, None, "body", 1, 1)], {"body": 1e-2}
    ),
    "in-turn-on-the-same-weights": Program(
        Regressor,
        [
            TrainStep(lambda net, batch: {"robust": robust(net, batch)}, {"robust": ["body"]}),
            TrainStep(lambda net, batch: {"smooth": smooth(net, batch)}, {"smooth": None}),
        ],
        [(robust, None, "body", 1, 1), (smooth, None, "body", 1, 1)],
        {"body": 1e-2},
    ),
    "contrast": Program(
        Contrast, TrainStep(contrast, "query"), [(contrast, None, "query", 1, 1)], {"query": 1e-2}
    ),
    "distillation": Program(
        Distilled, TrainStep(distil), [(distil, "loss", "student", 1, 1)], {"student": 1e-2}
    ),
}


@functools.lru_cache(maxsize=None)
def samples(count=44):
    """Pairs of 2 and of 3 numbers."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return draw(count, 2), draw(count, 3)


def make(program):
    """The module of a program, always with the same weights."""
    torch.manual_seed(1)
    return program.net().double()


def adam(net, rates):
    """One optimizer with a rate for each part."""
    groups = [{"params": getattr(net, part).parameters(), "lr": lr} for part, lr in rates.items()]
    return torch.optim.Adam(groups, betas=(0.5, 0.9))


def fit(program, net=None, epochs=3, compile_options=None, **options):
    """The module after a fit, its history and its model."""
    net = make(program) if net is None else net
    model = ipufit.Model(net)
    model.compile(adam(net, program.rates), program.loss, **(compile_options or {}))
    loader = DataLoader(TensorDataset(*samples()), batch_size=4)
    history = model.fit(loader, epochs=epochs, seed=5, verbose=0, **options)
    return net, history, model


def by_hand(program, epochs=3, accumulation=1):
    """The same with torch alone, every sample of an update weighing the same."""
    net = make(program)
    optimizers = {part: adam(net, {part: lr}) for part, lr in program.rates.items()}
    x, y = samples()
    done = 0
    for _ in range(epochs):
        for begin in range(0, len(x), 4 * accumulation):
            whole = slice(begin, begin + 4 * accumulation)
            pairs = list(zip(x[whole].split(4), y[whole].split(4)))
            total = len(x[whole])
            if program.at_once:
                _at_once(program, net, pairs, total, optimizers)
            else:
                for function, name, part, every, repeat in program.turns:
                    for _ in range(repeat if (done + 1) % every == 0 else 0):
                        optimizers[part].zero_grad()
                        for pair in pairs:
                            result = function(net, pair)
                            loss = result if name is None else result[name]
                            (loss * len(pair[0]) / total).backward()
                        optimizers[part].step()
            done += 1
    return net


def _at_once(program, net, pairs, total, optimizers):
    gradients = {}
    for function, name, part, _, _ in program.turns:
        weights = list(getattr(net, part).parameters())
        sums = [torch.zeros_like(weight) for weight in weights]
        for pair in pairs:
            loss = function(net, pair)[name] * len(pair[0]) / total
            for tensor, slope in zip(sums, torch.autograd.grad(loss, weights)):
                tensor += slope
        gradients[part] = zip(weights, sums)
    for part, moved in gradients.items():
        for weight, slope in moved:
            weight.grad = slope
        optimizers[part].step()
