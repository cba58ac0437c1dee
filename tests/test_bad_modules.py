"""Modules and losses that can't become one program: the error names the line and what to write."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

import ipufit
from ipufit.errors import CaptureError
from tests.engines import EAGER, EAGER_OR_NOT, has_kept_values, runs_eagerly
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

BEFORE = "but the program is recorded once, before there are values"
EAGERLY = "To run this module as it is, without capture, use compile(..., run_eagerly=True)."
BRANCH = (
    f"Python branched on a tensor's value, {BEFORE}",
    "Write torch.where(condition, a, b), or multiply by a mask, so that both cases are in the "
    "program.",
)
NUMBER = (
    f"a tensor's value was turned into a Python number, {BEFORE}",
    "Keep it a tensor (0-dim tensors work in arithmetic and torch.where), or compute the number "
    "before training and store it as an attribute.",
)
NEEDED = (
    f"Python needed a tensor's value, {BEFORE}",
    "Keep it in tensors: torch.where(condition, a, b) instead of a branch, gather or a mask "
    "instead of a slice that ends at a value.",
)
SHAPE = (
    "a shape depends on a tensor's values, but the shapes of the program are fixed when it is "
    "recorded",
    "Keep the full shape: write torch.where(mask, x, 0) instead of x[mask], topk with a fixed k "
    "instead of nonzero or unique.",
)
NUMPY = (
    f"a tensor was converted to NumPy, {BEFORE}",
    "Use the torch operator of the same meaning.",
)
TEXT = (
    f"a tensor's value was written into a text, {BEFORE}",
    "Return the tensor as an output, and format it outside of the module.",
)


def marked(function):
    """The number and the text of the line that ends in ``# here``."""
    lines, first = inspect.getsourcelines(function)
    number = next(i for i, text in enumerate(lines) if text.endswith("# here\n"))
    return first + number, lines[number].strip()


# ---- values in the middle of forward ------------------------------------------------------------


class If(Net):
    def forward(self, x):
        y = super().forward(x)
        if y.sum() > 0:  # here
            y = 2 * y
        return y


class IfTensor(Net):
    def forward(self, x):
        positive = (x.sum() > 0).float()
        if positive:  # here
            x = -x
        return super().forward(x)


class Ternary(Net):
    def forward(self, x):
        y = super().forward(x)
        return y if bool(y.mean() > 0) else -y  # here


class While(Net):
    def forward(self, x):
        y = super().forward(x)
        while y.norm() > 1:  # here
            y = y / 2
        return y


class Assert(Net):
    def forward(self, x):
        assert torch.isfinite(x).all()  # here
        return super().forward(x)


class Largest(Net):
    def forward(self, x):
        y = super().forward(x)
        return y * max(y[0, 0], y[0, 1])  # here


class Same(Net):
    def forward(self, x):
        if torch.equal(x, x):  # here
            x = -x
        return super().forward(x)


class Item(Net):
    def forward(self, x):
        scale = x.abs().max().item()  # here
        return super().forward(x / scale)


class Int(Net):
    def forward(self, x):
        count = int((x > 0).sum())  # here
        return super().forward(x) / (1 + count)


class Float(Net):
    def forward(self, x):
        return super().forward(x) * float(x.std())  # here


class List(Net):
    def forward(self, x):
        first = x.tolist()[0][0]  # here
        return super().forward(x) * first


class Range(Net):
    def forward(self, x):
        for _ in range(x[0].argmax()):  # here
            x = x + 1
        return super().forward(x)


class Slice(Net):
    def forward(self, x):
        longest = x[0].argmax()
        return super().forward(x) + x[:, :longest].sum()  # here


class Mask(Net):
    def forward(self, x):
        y = super().forward(x)
        return y + x[x > 0].mean()  # here


class Select(Net):
    def forward(self, x):
        y = super().forward(x)
        return y + 0.01 * torch.masked_select(y, y > 0).sum()  # here


class Nonzero(Net):
    def forward(self, x):
        rows = torch.nonzero(x > 0)  # here
        return super().forward(x) + rows.float().mean()


class Where(Net):
    def forward(self, x):
        rows, _ = torch.where(x > 0)  # here
        return super().forward(x) + rows.float().mean()


class Unique(Net):
    def forward(self, x):
        values = torch.unique(x)  # here
        return super().forward(x) + values.mean()


class Numpy(Net):
    def forward(self, x):
        y = super().forward(x)
        return y + float(np.median(x.numpy()))  # here


class Array(Net):
    def forward(self, x):
        middle = np.median(np.asarray(x))  # here
        return super().forward(x) + torch.tensor(middle, dtype=torch.float32)


class Format(Net):
    def forward(self, x):
        self.note = f"{x.mean():.3f}"  # here
        return super().forward(x)


def helper(x):
    """Not a method: the line is here all the same."""
    return x / x.max().item()  # here


class Calls(Net):
    def forward(self, x):
        return super().forward(helper(x))


VALUES = {
    If: BRANCH,
    IfTensor: BRANCH,
    Ternary: BRANCH,
    While: BRANCH,
    Assert: BRANCH,
    Largest: BRANCH,
    Same: BRANCH,
    Item: NUMBER,
    Int: NUMBER,
    Float: NUMBER,
    List: NUMBER,
    Range: NUMBER,
    Slice: NEEDED,
    Mask: SHAPE,
    Select: SHAPE,
    Nonzero: SHAPE,
    Where: SHAPE,
    Unique: SHAPE,
    Numpy: NUMPY,
    Array: NUMPY,
    Format: TEXT,
    Calls: NUMBER,
}


@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_a_value_that_python_needs_is_refused_with_its_line(kind):
    """A recording that guessed the value would train another model than the user wrote."""
    engine = Watched()
    model = compiled(kind(), engine=lambda: engine)
    told = Told()
    function = helper if kind is Calls else kind.forward
    line, source = marked(function)
    what, instead = VALUES[kind]
    at = f"at {__file__}:{line} in {function.__name__}: `{source}`"
    with refused(model, CaptureError, f"{what}, {at}. {instead} {EAGERLY}") as caught:
        fit(model, callbacks=[told])
    assert (caught.value.file, caught.value.line) == (__file__, line)
    assert told.hooks == []
    assert engine.built == engine.closed == 1
    with refused(model, CaptureError, f"{what}, {at}. {instead} {EAGERLY}"):
        model.predict(loader(), verbose=0)


@runs_eagerly
@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_the_same_module_trains_eagerly(kind):
    """The advice of every such error must work."""
    model = compiled(kind(), run_eagerly=True)
    before = state(model)
    assert fit(model, epochs=2).epoch == [0, 1]
    assert not torch.equal(before["/body.weight"], state(model)["/body.weight"])
    assert_clean(model)


class Allowed(Net):
    """Looks like the modules above, and needs no value."""

    def forward(self, x):
        if x.shape[0] > 1 and x.dtype is torch.float32:
            x = x[:, torch.tensor([3, 2, 1, 0])]
        y = super().forward(x)
        y = y + y.gather(1, y.argmax(1, keepdim=True))
        y = torch.where(y > 0, y, 0.1 * y)
        y[y > 5] = 5.0
        return y * torch.tensor(2.0).item() * max(x.shape)


def test_what_needs_no_value_is_recorded():
    """Refusing too much would send people to the slow mode for nothing."""
    losses = []
    for options in ({}, EAGER):
        torch.manual_seed(0)
        losses.append(fit(compiled(Allowed(), **options)).history["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_loss_is_read_like_a_module():
    """It is part of the same program."""

    def rounded(prediction, target):
        return (prediction - target).square().mean() * target.max().item()  # here

    line, source = marked(rounded)
    model = compiled(loss=rounded)
    at = f"at {__file__}:{line} in rounded: `{source}`"
    with refused(model, CaptureError, f"{NUMBER[0]}, {at}. {NUMBER[1]} {EAGERLY}"):
        fit(model)


def test_a_fault_of_eval_mode_is_found_before_training():
    """Validation takes another path through forward, and an epoch would be lost to find it."""

    class Evaluating(Net):
        def forward(self, x):
            y = super().forward(x)
            return y if self.training else y * x.max().item()  # here

    model = compiled(Evaluating())
    told = Told()
    line, source = marked(Evaluating.forward)
    at = f"at {__file__}:{line} in forward: `{source}`"
    with refused(model, CaptureError, f"{NUMBER[0]}, {at}. {NUMBER[1]} {EAGERLY}"):
        fit(model, validation_data=loader(), callbacks=[told])
    assert told.hooks == []


# ---- what forward leaves behind -----------------------------------------------------------------


class Buffered(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(3))


class Rebound(Buffered):
    def forward(self, x):
        y = super().forward(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)  # here
        return y


class Swapped(Buffered):
    def forward(self, x):
        y = super().forward(x)
        self.average.data = 0.9 * self.average + 0.1 * y.detach().mean(0)  # here
        return y


class Part(Net):
    def forward(self, x):
        self.body.weight = nn.Parameter(0.9 * self.body.weight)  # here
        return super().forward(x)


class Registers(Net):
    def forward(self, x):
        self.register_buffer("seen", x.detach().mean(0))  # here
        return super().forward(x)


class Hidden(Buffered):
    def forward(self, x):  # here
        vars(self)["_buffers"].update(average=x.detach().mean(0)[:3])
        return super().forward(x)


REPLACED = "was replaced by another tensor inside forward"
IN_PLACE = "Change it in place: self.average.copy_(new_value)."


@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize(
    ("kind", "what", "instead"),
    [
        (Rebound, f"'average' {REPLACED}", IN_PLACE),
        (Swapped, f"'average' {REPLACED}", IN_PLACE),
        (Hidden, f"'average' {REPLACED}", IN_PLACE),
        (
            Part,
            f"'body.weight' {REPLACED}",
            "Keep the new value under another name, or make it a buffer.",
        ),
        (
            Registers,
            "'seen' was registered inside forward",
            "Register it in __init__, and change it in place in forward.",
        ),
    ],
)
def test_a_rebound_tensor_is_refused(kind, what, instead, run_eagerly):
    """The program reads the old tensor for ever: the statistics would silently stand still."""
    model = compiled(kind(), run_eagerly=run_eagerly)
    line, _ = marked(kind.forward)
    text = f"{what}, at {__file__}:{line}, and the program would never see the new one. {instead}"
    with refused(model, CaptureError, text) as caught:
        fit(model)
    assert (caught.value.file, caught.value.line) == (__file__, line)


@has_kept_values
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_an_input_changed_in_place_that_backward_needs_is_refused(run_eagerly):
    """In torch's own words, before any update."""

    class Late(Net):
        def forward(self, x):
            y = super().forward(x)
            x.add_(1)
            return y

    model = compiled(Late(), run_eagerly=run_eagerly)
    text = "needed for gradient computation has been modified by an inplace operation"
    with refused(model, RuntimeError, text, part=True):
        fit(model)


def test_a_buffer_changed_in_place_is_kept():
    """The advice of that error must work."""

    class InPlace(Buffered):
        def forward(self, x):
            y = super().forward(x)
            self.average.mul_(0.9).add_(0.1 * y.detach().mean(0))
            return y

    found = []
    for options in ({}, EAGER):
        torch.manual_seed(0)
        model = compiled(InPlace(), **options)
        fit(model)
        found.append(model.module.average)
    assert found[0].abs().sum() > 0
    torch.testing.assert_close(found[0], found[1])


SETS = {
    "embedded": (
        "forward sets Keeps.last, but it runs once, to be recorded, and the attribute keeps the "
        "value that it has now. To carry a value from one micro-batch to the next, register a "
        "buffer and change it in place; to run forward every time, use compile(..., "
        "run_eagerly=True)."
    ),
    "ipu-standin": (
        "forward sets Keeps.last, but it runs once, to be traced, and the attribute keeps the "
        "value that it had. To carry a value from one micro-batch to the next, register a buffer "
        "of floating point and change it in place."
    ),
}


def test_a_recording_leaves_no_trace_in_the_module(engine):
    """Tensors of a recording have no values: a kept one would break the next forward."""

    class Keeps(Net):
        last = None

        def forward(self, x):
            y = super().forward(x)
            if self.last is not None:
                y = y + 0 * self.last.mean()
            self.last = y.detach()
            return y

    model = compiled(Keeps())
    # Five samples by three: the smaller last batch is recorded while the first recording is in use.
    with pytest.warns(UserWarning, match="forward sets") as caught:
        fit(model, loader(samples=5, size=3), epochs=2, validation_data=loader(samples=5, size=3))
    assert {str(warning.message) for warning in caught} == {SETS[engine]}
    assert model.module.last is None
    with pytest.warns(UserWarning, match="forward sets"):
        assert model.predict(loader(samples=5, size=3), verbose=0).shape == (5, 3)
    assert type(model.module(torch.zeros(2, 4))) is torch.Tensor
    assert_clean(model)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_recurrent_layer_is_left_with_its_own_weights(kind):
    """torch keeps a second list of them, which a recording replaces."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = kind(4, 3, batch_first=True)

        def forward(self, x):
            return self.cell(x.unsqueeze(1))[0][:, 0]

    model = compiled(Recurrent())
    fit(model, loader(samples=5, size=3))
    cell = model.module.cell
    assert all(
        weight is getattr(cell, name)
        for weight, name in zip(cell._flat_weights, cell._flat_weights_names)
    )
    x = batches(1)[0][0]
    expected = model.predict([x], verbose=0)
    torch.testing.assert_close(model.module(x).detach(), expected)


class Spread(Net):
    """Returns a distribution, which holds tensors and is none."""

    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 1.0, validate_args=False)


def unlikely(spread, target):
    return -spread.log_prob(target).mean()


def test_an_object_around_tensors_is_an_output_for_the_loss_alone():
    """Its tensors are those of the recording, which have no values."""
    model = ipufit.Model(Spread())
    model.compile("sgd", unlikely)
    model.fit(batches(4), gradient_accumulation=2, verbose=0)
    with pytest.raises(CaptureError) as caught:
        model.predict(batches(4), verbose=0)
    assert str(caught.value).startswith(
        "the module's outputs must be tensors in tuples, lists, dicts or dataclasses, but output "
        "is a Normal that holds tensors, which a program can't hand back. Return its tensors "
        "themselves, or leave it out; models of the transformers library return no cache with "
        "config.use_cache = False."
    )
