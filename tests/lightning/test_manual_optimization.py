"""Manual optimization: its steps of optimizers are turns of an update, as Lightning makes them."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import CaptureError, ConfigurationError, LossError, OptimizerError
from tests.lightning import pl
from tests.lightning.twins import by_lightning

pytestmark = pytest.mark.embedded_only("an IPU makes an update from one loss")


class GAN(pl.LightningModule):
    """As in Lightning's guide: two optimizers, a generated batch that both losses use, logs."""

    def __init__(self, norm=True):
        super().__init__()
        self.automatic_optimization = False
        middle = [nn.BatchNorm1d(8)] if norm else []
        self.generator = nn.Sequential(nn.Linear(3, 8), *middle, nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), *copy.deepcopy(middle), nn.Linear(8, 1))

    def configure_optimizers(self):
        # Of the last bias, which BatchNorm takes away, the gradient is a rounding error.
        generator = torch.optim.Adam(self.generator.parameters(), 1e-2, eps=1e-4)
        return [generator, torch.optim.SGD(self.critic.parameters(), 0.1, momentum=0.9)]

    def judge(self, points, real):
        logits = self.critic(points)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        real, noise = batch
        made = self.generator(noise)
        critic_loss = self.judge(real, True) + self.judge(made.detach(), False)
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        generator_loss = self.judge(made, True)
        generator.zero_grad()
        self.manual_backward(generator_loss)
        generator.step()
        self.log_dict({"g": generator_loss, "d": critic_loss}, on_epoch=True, on_step=False)

    def validation_step(self, batch, batch_idx):
        self.log("distance", self.generator(batch[1]).mean(0).sub(batch[0].mean(0)).norm())

    def predict_step(self, batch, batch_idx):
        return self.generator(batch[1])


class Toggled(GAN):
    """Losses between toggle_optimizer and untoggle_optimizer, of parts that share a trunk."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        real, noise = batch
        self.toggle_optimizer(generator)
        loss = self.judge(self.generator(noise), True)
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.toggle_optimizer(critic)
        loss = self.judge(real, True) + self.judge(self.generator(noise).detach(), False)
        self.manual_backward(loss)
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)


class AtOnce(GAN):
    """Both losses are computed before either step."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        real, noise = batch
        made = self.generator(noise)
        losses = self.judge(real, True) + self.judge(made.detach(), False), self.judge(made, True)
        for optimizer in (critic, generator):
            optimizer.zero_grad()
        self.toggle_optimizer(critic)
        self.manual_backward(losses[0])
        self.untoggle_optimizer(critic)
        self.toggle_optimizer(generator)
        self.manual_backward(losses[1])
        self.untoggle_optimizer(generator)
        critic.step()
        generator.step()


class Closures(GAN):
    """Closures for the steps, and several losses for one of them."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        real, noise = batch

        def criticise():
            critic.zero_grad()
            self.manual_backward(self.judge(real, True))
            self.manual_backward(self.judge(self.generator(noise).detach(), False))

        critic.step(closure=criticise)
        generator.zero_grad()
        self.manual_backward(self.judge(self.generator(noise), True))
        generator.step()


class OneOptimizer(GAN):
    """A single optimizer, as for SAM or accumulation of one's own."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.critic.parameters(), 1e-2)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.judge(batch[0], True)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, on_epoch=True, on_step=False)


def batches():
    """Points and noise, in batches of 8."""
    generator = torch.Generator().manual_seed(0)
    real = torch.randn(32, 2, generator=generator, dtype=torch.float64)
    noise = torch.randn(32, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(real, noise), 8)


def pair(kind):
    """Two modules with the same weights."""
    torch.manual_seed(1)
    module = kind().double()
    return module, copy.deepcopy(module)


def difference(one, other):
    """The largest difference of two modules' states."""
    pairs = zip(one.state_dict().values(), other.state_dict().values())
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("kind", [GAN, Toggled, AtOnce, Closures, OneOptimizer])
def test_weights_and_buffers_are_those_of_lightning(kind):
    """Each segment between two steps changes buffers once, whichever turns run it again."""
    ours, theirs = pair(kind)
    ipufit.Model.from_lightning(ours).fit(batches(), epochs=3, verbose=0, device_iterations=2)
    by_lightning(theirs, "fit", batches(), max_epochs=3)
    assert difference(ours, theirs) < 1e-10


def test_logged_values_are_those_of_lightning():
    """A value belongs to the turn in which it was computed, wherever it is logged."""
    ours, theirs = pair(GAN)
    model = ipufit.Model.from_lightning(ours)
    history = model.fit(batches(), epochs=2, verbose=0, validation_data=batches()).history
    trainer, _ = by_lightning(theirs, "fit", batches(), batches(), max_epochs=2)
    for name, value in trainer.callback_metrics.items():
        assert history[name][-1] == pytest.approx(value.item(), abs=1e-6)
    assert set(history) == {"loss", "g", "d", "distance"}
    made = model.predict(batches(), verbose=0)
    assert made.shape == (32, 2)


def test_device_iterations_and_eager_runs_have_the_same_bits():
    """With dropout in both parts: random numbers are the same in all turns of an update."""

    class Dropped(GAN):
        def __init__(self):
            super().__init__(norm=False)
            self.generator.append(nn.Dropout(0.3))
            self.critic.insert(1, nn.Dropout(0.3))

    results = []
    for options, device_iterations in (({}, 1), ({}, 3), ({"run_eagerly": True}, 1)):
        module, _ = pair(Dropped)
        model = ipufit.Model.from_lightning(module)
        model.compile(**options)
        history = model.fit(
            batches(), epochs=2, verbose=0, seed=1, device_iterations=device_iterations
        )
        results.append((module, history.history))
    for module, history in results[1:]:
        assert difference(module, results[0][0]) == 0
        assert history == results[0][1]


def failing(body):
    """A GAN whose training_step is this function of (self, generator, critic, batch)."""

    class Failing(GAN):
        def training_step(self, batch, batch_idx):
            body(self, *self.optimizers(), batch)

    torch.manual_seed(0)
    return ipufit.Model.from_lightning(Failing().double())


def stale(self, generator, critic, batch):
    made = self.generator(batch[1])
    generator.zero_grad()
    self.manual_backward(self.judge(made, True))
    generator.step()
    critic.zero_grad()
    self.manual_backward(self.judge(made.detach(), False))
    critic.step()


def without_loss(self, generator, critic, batch):
    generator.step()


def clipped(self, generator, critic, batch):
    self.manual_backward(self.judge(batch[0], True))
    self.clip_gradients(critic, gradient_clip_val=1.0)


def scheduled(self, generator, critic, batch):
    self.lr_schedulers().step()


def rated(self, generator, critic, batch):
    critic.param_groups[0]["lr"] = 0.1


def late_log(self, generator, critic, batch):
    for optimizer in (generator, critic):
        optimizer.zero_grad()
        self.manual_backward(self.judge(self.generator(batch[1]), True))
        optimizer.step()
    self.log("after", self.judge(batch[0], True))


def clamped(self, generator, critic, batch):
    for optimizer in (generator, critic):
        optimizer.zero_grad()
        self.manual_backward(self.judge(self.generator(batch[1]), True))
        optimizer.step()
    with torch.no_grad():
        self.critic[0].weight.clamp_(-1, 1)


def left_out(self, generator, critic, batch):
    critic.zero_grad()
    self.manual_backward(self.judge(batch[0], True))
    critic.step()


def now_and_then(self, generator, critic, batch):
    critic.zero_grad()
    self.manual_backward(self.judge(batch[0], True))
    critic.step()
    if self.trainer.global_step % 5 == 0:
        generator.step()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (stale, "a loss depends on the weights before a step of their optimizer"),
        (without_loss, "an optimizer makes a step without a manual_backward after its zero_grad"),
        (clipped, "self.clip_gradients was called, but the program computes and clips"),
        (scheduled, "self.lr_schedulers() was called, but the program steps schedulers itself"),
        (rated, "param_groups of an optimizer was used inside training_step"),
        (late_log, "'after' is computed from the weights after the last step"),
        (now_and_then, "self.global_step was read inside a step"),
    ],
)
def test_what_can_not_be_recorded_is_refused_with_its_line(body, text):
    """Before any update."""
    with pytest.raises(CaptureError, match=re.escape(text)) as caught:
        failing(body).fit(batches(), verbose=0)
    assert f"in {body.__name__}" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (left_out, "training_step must call step of each optimizer from configure_optimizers"),
        (clamped, "changes the parameter 'critic.0.weight' in place"),
    ],
)
def test_what_the_turns_leave_out_is_refused(body, text):
    """Nothing of a step is dropped in silence."""
    with pytest.raises(LossError, match=re.escape(text)):
        failing(body).fit(batches(), verbose=0)


def test_optimizers_come_from_configure_optimizers_alone():
    """What training_step makes steps of."""
    model = ipufit.Model.from_lightning(GAN())
    with pytest.raises(ConfigurationError, match="GAN makes the steps of its optimizers itself"):
        model.compile(optimizer="adam")

    class Scheduled(GAN):
        def configure_optimizers(self):
            optimizers = super().configure_optimizers()
            return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1)]

    model = ipufit.Model.from_lightning(Scheduled())
    with pytest.raises(ConfigurationError, match="would have to step the scheduler"):
        model.fit(batches(), verbose=0)

    class Bare(GAN):
        def configure_optimizers(self):
            return None

    with pytest.raises(
        ConfigurationError, match="must return the optimizers that training_step uses"
    ):
        ipufit.Model.from_lightning(Bare()).fit(batches(), verbose=0)


def test_an_optimizer_that_evaluates_again_needs_automatic_optimization():
    """A closure in the step is run once, but LBFGS calls it several times in an update."""

    class Second(OneOptimizer):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.critic.parameters())

    text = "use another optimizer. A LightningModule returns that loss from training_step."
    with pytest.raises(OptimizerError, match=re.escape(text)):
        ipufit.Model.from_lightning(Second()).fit(batches(), verbose=0)
