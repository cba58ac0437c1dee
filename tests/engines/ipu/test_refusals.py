"""What is refused for an IPU while a module is looked at or traced, in exact words."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ipufit
from ipufit.errors import CaptureError, ConfigurationError
from tests.nets import MLP, Tally, data

pytestmark = pytest.mark.both_engines

# Before, torch.utils.checkpoint knew of GPUs only, and fails in other words.
FOLLOWS_DEVICES = hasattr(torch.utils.checkpoint, "noop_context_fn")


def fit(net, loss="cross_entropy"):
    """One epoch on the stand-in, in float32."""
    model = ipufit.Model(net, engine="ipu-standin")
    model.compile("sgd", loss)
    x, y = data(8)
    return model.fit(x.float(), y, batch_size=4, verbose=0)


def refused(error, text, net):
    with pytest.raises(error) as caught:
        fit(net)
    assert type(caught.value) is error
    assert str(caught.value) == text


class Watching(nn.Module):
    """Reads a weight through an attribute that looks into its memory on the host."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)
        self.view = self.head.weight.detach()

    def forward(self, x):
        return self.head(x.flatten(1)) + x.flatten(1) @ self.view.t()


def test_an_attribute_that_looks_into_a_weight():
    """A device would have the values from before training as a constant, in silence."""
    text = (
        "'view' of Watching shares memory with the parameter 'head.weight', but would not follow "
        "it in training. Compute it in forward instead, such as self.layer.weight.detach()."
    )
    refused(ConfigurationError, text, Watching())


def test_a_hook_and_a_conversion_after_compile():
    """Compile has seen neither, and the hook would not run."""
    net = MLP()
    model = ipufit.Model(net, engine="ipu-standin")
    model.compile("sgd", "cross_entropy")
    x, y = data(8)
    model.fit(x.float(), y, batch_size=4, verbose=0)
    hook = net.layers[0].weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(ConfigurationError, match="runs no hooks on gradients, but"):
        model.fit(x.float(), y, batch_size=4, verbose=0)
    hook.remove()
    net.bfloat16()
    with pytest.raises(ConfigurationError, match="is bfloat16"):
        model.fit(x.bfloat16(), y, batch_size=4, verbose=0)


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients(hook):
    net = MLP()
    if not hasattr(net.layers[0].weight, hook):
        pytest.skip("torch before 2.1")
    getattr(net.layers[0].weight, hook)(lambda tensor: None)
    text = (
        "an IPU runs no hooks on gradients, but 'layers.0.weight' has one. Remove it, or use "
        "engine='embedded'."
    )
    refused(ConfigurationError, text, net)


def test_autocast_of_the_users():
    text = (
        "an IPU can't run under torch.autocast: PopTorch has no autocast. Leave it out, convert "
        "the module with module.half(), or use engine='embedded'."
    )
    with torch.autocast("cpu", torch.bfloat16):
        refused(ConfigurationError, text, MLP())


def test_a_tensor_that_forward_changes_and_that_is_no_buffer():
    net = Tally()
    text = (
        "forward must not change Tally.calls on an IPU, where a tensor that is not a buffer is a "
        "constant. Register it as a buffer of float32, or use engine='embedded'."
    )
    refused(ConfigurationError, text, net)
    assert net.calls == 0
    assert {type(p) for p in net.parameters()} == {nn.Parameter}


def test_a_tensor_that_forward_binds_anew_is_told_whatever_its_version():
    """It is a constant as any attribute, also one that was changed in place before."""

    class Tally(MLP):
        def __init__(self):
            super().__init__()
            self.calls = torch.zeros(())
            self.calls.add_(1)

        def forward(self, x):
            self.calls = self.calls + 1
            return super().forward(x)

    net = Tally()
    with pytest.warns(UserWarning, match=r"forward sets Tally\.calls, but"):
        fit(net)
    assert net.calls == 1


def test_an_attribute_that_a_loss_module_sets_is_told():
    class Noting(nn.Module):
        last = None

        def forward(self, prediction, target):
            self.last = nn.functional.cross_entropy(prediction, target)
            return self.last

    loss = Noting()
    with pytest.warns(UserWarning, match=r"forward sets Noting\.last, but"):
        fit(MLP(), loss)
    assert loss.last is None


@pytest.mark.skipif(not FOLLOWS_DEVICES, reason="torch 2.0")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    class Checkpointed(MLP):
        def forward(self, x):
            h = self.layers[0](x.flatten(1))
            return checkpoint(self.layers[1:], h, use_reentrant=use_reentrant)

    text = (
        "torch.utils.checkpoint can't be traced for an IPU: it asks for a torch.ipu, which there "
        "is not. Call what it wraps directly, or use engine='embedded'."
    )
    refused(CaptureError, text, Checkpointed())


def test_another_attribute_that_is_missing_is_the_modules_own_affair():
    class Wrong(MLP):
        def forward(self, x):
            return self.nothing(x)

    with pytest.raises(AttributeError, match="nothing"):
        fit(Wrong())


def test_a_loss_scale_that_changes_by_itself():
    model = ipufit.Model(MLP(), engine="ipu-standin")
    with pytest.raises(ConfigurationError) as caught:
        model.compile(
            "sgd", "cross_entropy", precision=ipufit.Precision(loss_scale=ipufit.LossScale(8.0, 3))
        )
    assert str(caught.value) == (
        "an IPU can't run loss_scale='LossScale(initial=8.0, growth_interval=3)': PopTorch's own "
        "automatic scaling follows other rules and does not tell its factor. Pass a number, or use "
        "engine='embedded'."
    )


def test_a_cross_entropy_with_weights():
    """In PopTorch's own words, which say what to write instead."""
    weighted = nn.CrossEntropyLoss(weight=torch.ones(5))
    with pytest.raises(ipufit.errors.DeviceError, match='Parameter "weight" is unsupported for'):
        fit(MLP(), weighted)


def test_a_parameter_that_a_loss_reaches_past_the_module():
    """One operand alone, such as a square, is a host tensor too; torch's TypeError came here."""
    net = MLP()
    kept = list(net.parameters())

    def penalty(prediction, target):
        return nn.functional.cross_entropy(prediction, target) + kept[0].square().sum()

    with pytest.raises(ipufit.errors.DeviceError, match="reach a parameter through the module"):
        fit(net, penalty)


def test_an_embedding_with_sparse_gradients():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 3, sparse=True)

        def forward(self, x):
            return self.embed(x.flatten(1).long().clamp(0, 8)).sum(1)

    with pytest.raises(ipufit.errors.DeviceError, match="aten::embedding operation: sparse=True"):
        fit(Words())


def test_weights_that_a_callback_changes_are_those_of_a_prediction():
    """The device has copies of them, which were brought over before the callback."""

    class Zero(ipufit.callbacks.Callback):
        def on_predict_begin(self, logs=None):
            with torch.no_grad():
                for parameter in self.model.module.parameters():
                    parameter.zero_()

    model = ipufit.Model(MLP(), engine="ipu-standin")
    model.compile("sgd", "cross_entropy")
    x = data(8)[0].float()
    assert model.predict(x, batch_size=4, verbose=0).abs().sum() > 0
    assert model.predict(x, batch_size=4, callbacks=[Zero()], verbose=0).abs().sum() == 0
