"""Modules and losses that can't become one program: the error names the line and what to write."""

import collections
import copy
import functools
import inspect
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

import ipufit
from ipufit.errors import CaptureError
from tests.engines import EAGER, has_kept_values, runs_eagerly, strict
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

BEFORE = "but the program is recorded once, before there are values"
EAGERLY = "To run this module as it is, without capture, use compile(..., run_eagerly=True)."
BRANCH = (
    f"Python branched on a tensor's value, {BEFORE}",
    "Write torch.where(condition, a, b), or multiply by a mask, so that both branches are in the "
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
    "Use the corresponding torch operator.",
)
ONE_HOT = (
    f"one_hot read the values of its classes, {BEFORE}",
    "Call it as torch.nn.functional.one_hot(x, num_classes), with the number of classes.",
)
TEXT = (
    f"a tensor's value was formatted as a string, {BEFORE}",
    "Return the tensor as an output, and format it outside the module.",
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


class OneHot(Net):
    def forward(self, x):
        columns = nn.functional.one_hot((x > 0).long()).float()  # here
        return super().forward(x) + columns.mean()


class OneHotByName(Net):
    def forward(self, x):
        columns = one_hot((x > 0).long())  # here
        return super().forward(x) + columns.float().mean()


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
    OneHot: ONE_HOT,
    OneHotByName: ONE_HOT,
    Calls: NUMBER,
}


@pytest.mark.long("ipu-standin")
@pytest.mark.few(
    "IfTensor",
    "While",
    "Assert",
    "Largest",
    "Item",
    "Range",
    "Slice",
    "Mask",
    "Nonzero",
    "Unique",
    "Array",
    "OneHot",
    "Calls",
)
@pytest.mark.parametrize("kind", VALUES, ids=lambda kind: kind.__name__)
def test_a_value_that_python_needs_is_refused_with_its_line(kind):
    """A recording that guessed the value would train another model than the user wrote."""
    engine = Watched()
    model = compiled(kind(), engine=lambda: engine, jit="graph")
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
        y = y * nn.functional.one_hot(y.argmax(1), num_classes=3).add(1)
        return y * torch.tensor(2.0).item() * max(x.shape)


@pytest.mark.long
def test_what_needs_no_value_is_recorded():
    """Refusing too much would send people to the slow mode for nothing."""
    losses = []
    for options in ({}, EAGER):
        torch.manual_seed(0)
        losses.append(fit(compiled(Allowed(), **options)).history["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.long("ipu-standin")
def test_a_loss_is_read_like_a_module():
    """It is part of the same program."""

    def rounded(prediction, target):
        return (prediction - target).square().mean() * target.max().item()  # here

    line, source = marked(rounded)
    model = compiled(loss=rounded, **strict())
    at = f"at {__file__}:{line} in rounded: `{source}`"
    with refused(model, CaptureError, f"{NUMBER[0]}, {at}. {NUMBER[1]} {EAGERLY}"):
        fit(model)


@pytest.mark.long("ipu-standin")
def test_a_fault_of_eval_mode_is_found_before_training():
    """Validation takes another path through forward, and an epoch would be lost to find it."""

    class Evaluating(Net):
        def forward(self, x):
            y = super().forward(x)
            return y if self.training else y * x.max().item()  # here

    model = compiled(Evaluating(), **strict())
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
def test_a_rebound_tensor_is_refused(kind, what, instead):
    """The program reads the old tensor for ever: the statistics would silently stand still."""
    model = compiled(kind(), **strict())
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


@pytest.mark.long
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
        "forward sets Keeps.last, but it runs only once, to be recorded: the loss of the same step "
        "reads the new value, but for all else the attribute keeps its present one. To carry a "
        "value from one micro-batch to the next, register a buffer and change it in place; to run "
        "forward every time, use compile(..., run_eagerly=True)."
    ),
    "ipu-standin": (
        "forward sets Keeps.last, but it runs only once, to be traced: the loss of the same step "
        "reads the new value, but for all else the attribute keeps its present one. To carry a "
        "value from one micro-batch to the next, register a buffer of floating point and change "
        "it in place."
    ),
}


@pytest.mark.long("ipu-standin")
def test_a_recording_leaves_no_trace_in_the_module(engine):
    """Tensors of a recording have no values: a kept one would break the next forward."""

    class Keeps(Net):
        last = None

        def forward(self, x):
            self.last = super().forward(x).detach()
            return super().forward(x)

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


class HooksOnce(Net):
    """Hooks its layer in the first forward, to count its calls in each, as transformers does."""

    is_hooked = False

    def forward(self, x):
        if not self.is_hooked:
            self.is_hooked = True
            self.head.register_forward_hook(lambda *_: self.outputs.append(1))
        self.outputs = []
        return super().forward(x) + len(self.outputs)


@pytest.mark.long("ipu-standin")
@pytest.mark.filterwarnings("ignore:forward sets HooksOnce")
def test_a_recording_leaves_no_hook_that_forward_registers():
    """Hooks that stay, where the note of them does not, run twice in the next recording."""
    model = compiled(HooksOnce())
    fit(model)
    data = loader()
    predicted = model.predict(data, verbose=0)
    net = model.module
    assert not net.head._forward_hooks
    torch.testing.assert_close(predicted, net.eval()(torch.cat([x for x, _ in data])).detach())


class Fills(Net):
    """Puts tensors into containers that it has: some grow, some do not; one name is private."""

    def __init__(self):
        super().__init__()
        self._cache = {}
        self.latest = {"y": None}
        self.recent = collections.deque(maxlen=2)
        self.calls = [0]

    def forward(self, x):
        if "ones" not in self._cache:
            self._cache["ones"] = torch.ones(4, dtype=x.dtype)
        y = super().forward(x * self._cache["ones"])
        self.latest["y"] = y.detach()
        self.recent.append(y.detach())
        self.calls[0] += 1
        return y


@pytest.mark.long("ipu-standin")
def test_a_recording_leaves_nothing_in_containers_of_the_module():
    """A memo that a recording fills would hold tensors without values, which predict returns."""
    model = compiled(Fills())
    names = r"forward sets Fills\._cache, Fills\.calls, Fills\.latest, Fills\.recent, but"
    with pytest.warns(UserWarning, match=names):
        fit(model)
    net = model.module
    assert (net._cache, net.latest, [*net.recent], net.calls) == ({}, {"y": None}, [], [0])
    data = loader()
    with pytest.warns(UserWarning, match=names):
        predicted = model.predict(data, verbose=0)
    torch.testing.assert_close(predicted, net.eval()(torch.cat([x for x, _ in data])).detach())
    assert type(net._cache["ones"]) is torch.Tensor


class Memo:
    """Computes a mask once for each size, as helpers of models do."""

    def __init__(self):
        self.masks = {}

    def __call__(self, size):
        if size not in self.masks:
            self.masks[size] = (torch.ones(size).cumsum(0),)
        return self.masks[size][0]


class Least(collections.OrderedDict):
    """Keeps the latest, as many caches do."""

    def __getitem__(self, key):
        self.move_to_end(key)
        return super().__getitem__(key)


MEMO, MASKS, MASK = Memo(), {}, None


@functools.lru_cache(maxsize=None)
def cached_mask(size):
    return Memo()(size)


def kept_in_a_global(net, size):
    global MASK
    if MASK is None:
        MASK = Memo()(size)
    return MASK


def kept_in_a_new_global(net, size):
    global NEW_MASK
    if "NEW_MASK" not in globals():
        NEW_MASK = Memo()(size)
    return NEW_MASK


def kept_in_a_list_of_a_global(net, size):
    return MASKS.setdefault("all", [Memo()(size)])[0]


def kept_in_a_class(net, size):
    if KeepsMask.mask is None:
        KeepsMask.mask = Memo()(size)
    return KeepsMask.mask


def kept_in_a_subclass_of_ordered_dict(net, size):
    if size not in net.least:
        net.least[size] = Memo()(size)
    return net.least[size]


def kept_in_a_closure():
    mask = None

    def masked(net, size):
        nonlocal mask
        if mask is None:
            mask = Memo()(size)
        return mask

    return masked


def kept_in_a_default(net, size, memo=Memo()):  # noqa: B008
    return memo(size)


class KeepsMask(Net):
    mask = None

    def __init__(self, get):
        super().__init__()
        self.get, self.memo, self.nested, self.least = get, Memo(), {"by": ({},)}, Least()

    def forward(self, x):
        return super().forward(x * self.get(self, 4))


KEPT = {
    "an object of the module": lambda net, size: net.memo(size),
    "a container in containers": lambda net, size: net.nested["by"][0].setdefault(0, Memo()(size)),
    "a subclass of OrderedDict": kept_in_a_subclass_of_ordered_dict,
    "a cache of functools": lambda net, size: cached_mask(size),
    "an object of the file": lambda net, size: MEMO(size),
    "a container of the file": kept_in_a_list_of_a_global,
    "a global": kept_in_a_global,
    "a new global": kept_in_a_new_global,
    "a class": kept_in_a_class,
    "a variable around the function": kept_in_a_closure(),
    "a default": kept_in_a_default,
}


@pytest.fixture
def nothing_kept(monkeypatch):
    """Each test begins without masks."""
    monkeypatch.setitem(globals(), "MASK", None)
    globals().pop("NEW_MASK", None)
    monkeypatch.setattr(KeepsMask, "mask", None)
    for memo in (MEMO, *kept_in_a_default.__defaults__):
        memo.masks.clear()
    (variable,) = KEPT["a variable around the function"].__closure__
    variable.cell_contents = None
    MASKS.clear()
    cached_mask.cache_clear()


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.filterwarnings("ignore:forward sets")
@pytest.mark.parametrize("place", KEPT)
def test_nothing_of_a_recording_stays_where_code_keeps_it(place):
    """A later program, and the module itself, would read it, and return tensors without values."""
    model = compiled(KeepsMask(KEPT[place]))
    fit(model, loader(samples=5, size=3))
    data = loader()
    predicted = model.predict(data, verbose=0)
    x = torch.cat([x for x, _ in data])
    assert type(predicted) is torch.Tensor
    net = model.module.eval()
    torch.testing.assert_close(predicted, Net.forward(net, x * torch.arange(1.0, 5)).detach())
    torch.testing.assert_close(predicted, net(x).detach())


def test_a_tensor_that_a_library_keeps_is_refused_by_a_later_recording(monkeypatch):
    """What installed packages keep is not looked for."""
    library = nn.functional
    monkeypatch.setattr(library, "mask_of_a_test", Memo(), raising=False)
    model = compiled(KeepsMask(lambda net, size: nn.functional.mask_of_a_test(size)), **strict())
    fit(model)
    with pytest.raises(CaptureError, match="stored during an earlier recording") as caught:
        model.predict(loader(), verbose=0)
    assert caught.value.file == __file__
    library.mask_of_a_test.masks.clear()
    assert type(model.predict(loader(), verbose=0)) is torch.Tensor


@pytest.mark.long
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


@pytest.mark.long("ipu-standin")
def test_an_object_around_tensors_is_an_output_for_the_loss_alone():
    """Its tensors are those of the recording, which have no values."""
    model = ipufit.Model(Spread())
    model.compile("sgd", unlikely)
    model.fit(batches(4), gradient_accumulation=2, verbose=0)
    assert message(model.predict, batches(4), verbose=0, kind=CaptureError).startswith(
        "the module's outputs must be tensors in tuples, lists, dicts or dataclasses, but "
        "output is a Normal that holds tensors, which a program can't return. Return its "
        "tensors themselves, or leave it out; in models of the transformers library, "
        "config.use_cache = False turns the cache off."
    )


# ---- causes with a name of their own ------------------------------------------------------------


class Packed(nn.Module):
    """Runs a recurrent layer over sequences of several lengths."""

    def __init__(self, pack=True):
        super().__init__()
        self.cell, self.head, self.pack = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3), pack

    def forward(self, x, lengths):
        if self.pack:
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            return self.head(self.cell(x)[1][-1])
        output, _ = self.cell(x)
        return self.head(output[torch.arange(len(lengths)), lengths - 1])


def test_a_packed_sequence_is_refused_and_the_padded_batch_gives_the_same():
    """The errors that torch raises for it are about sizes and devices, and differ by version."""
    lengths = torch.tensor([5, 2, 3, 1])
    batch = ((torch.randn(4, 5, 4), lengths), torch.randn(4, 3))
    model = compiled(Packed(), **strict())
    text = message(fit, model, [batch], kind=CaptureError)
    assert text.startswith(
        "a packed sequence has a shape that depends on the values of its lengths, but the program "
        f"is recorded once, before there are values, at {__file__}:"
    )
    assert text.endswith(
        ". Run the layer on the padded batch, and select by length from its output: "
        "output[torch.arange(len(lengths)), lengths - 1] is the last step of each sequence. "
        f"{EAGERLY}"
    )
    assert_clean(model)
    padded = compiled(Packed(pack=False))
    padded.module.load_state_dict(model.module.state_dict())
    with torch.no_grad():
        expected = nn.functional.mse_loss(model.module(*batch[0]), batch[1]).item()
    assert fit(padded, [batch]).history["loss"] == [pytest.approx(expected, rel=1e-5)]


@runs_eagerly
def test_a_packed_sequence_trains_eagerly():
    """The advice of that error must work."""
    batch = ((torch.randn(4, 5, 4), torch.tensor([5, 2, 3, 1])), torch.randn(4, 3))
    assert fit(compiled(Packed(), run_eagerly=True), [batch]).epoch == [0]


def squashed(x):
    """A function for torch.compile."""
    return torch.tanh(x)


class Compiles(Net):
    """Calls what went through torch.compile, or what it was made of."""

    activation = staticmethod(torch.compile(squashed, backend="eager"))

    def forward(self, x):
        return self.activation(super().forward(x))  # here


@pytest.mark.long("ipu-standin")
def test_what_went_through_torch_compile_is_refused_and_what_it_was_made_of_runs():
    """Torch speaks of FX and of a dynamo-optimized function."""
    model = compiled(Compiles(), **strict())
    line, source = marked(Compiles.forward)
    text = (
        "a function or module that went through torch.compile was called, but only plain Python "
        f"can be recorded, at {__file__}:{line} in forward: `{source}`. Call what was passed to "
        "torch.compile: the whole training step is one program anyway, and compile(..., "
        f"jit='inductor') makes torch.compile's kernels of it. {EAGERLY}"
    )
    with refused(model, CaptureError, text):
        fit(model)
    model.module.activation = squashed
    assert fit(model).epoch == [0]


@pytest.mark.long
@runs_eagerly
def test_what_went_through_torch_compile_runs_eagerly():
    """The advice of that error must work."""
    with warnings.catch_warnings():
        # torch.compile looks at attributes of tensors that it then warns of.
        warnings.simplefilter("ignore")
        assert fit(compiled(Compiles(), run_eagerly=True)).epoch == [0]


@pytest.fixture
def anomaly():
    """torch.autograd.set_detect_anomaly(True), as long as the test runs."""
    torch.autograd.set_detect_anomaly(True)
    yield
    torch.autograd.set_detect_anomaly(False)


@pytest.mark.long("ipu-standin")
def test_anomaly_detection_is_refused_by_its_name(anomaly):
    """Nothing in the user's module asks for a value."""
    text = (
        "torch.autograd.set_detect_anomaly(True) looks for NaN in the values of gradients, but the "
        "program is recorded once, before there are values. Switch it off, "
        "torch.autograd.set_detect_anomaly(False), and use compile(..., detect_nan=True), which "
        f"names operator, line and samples. {EAGERLY}"
    )
    model = compiled(**strict())
    with refused(model, CaptureError, text):
        fit(model)
    # There are no gradients here.
    assert model.predict(loader(), verbose=0).shape == (12, 3)
    torch.autograd.set_detect_anomaly(False)
    assert fit(model).epoch == [0]


@pytest.mark.long
@runs_eagerly
def test_anomaly_detection_works_eagerly_and_its_replacement_does_not_need_it(anomaly):
    """The advice of that error must work."""
    assert fit(compiled(run_eagerly=True)).epoch == [0]
    torch.autograd.set_detect_anomaly(False)
    assert fit(compiled(detect_nan=True)).epoch == [0]


@pytest.mark.long("ipu-standin")
def test_a_value_that_forward_needs_is_no_matter_of_anomaly_detection(anomaly):
    """Both ask for a number, and only one of them is in the user's file."""
    model = compiled(Item(), **strict())
    line, source = marked(Item.forward)
    at = f"at {__file__}:{line} in forward: `{source}`"
    with refused(model, CaptureError, f"{NUMBER[0]}, {at}. {NUMBER[1]} {EAGERLY}"):
        fit(model)


class Balanced(nn.Linear):
    """Has a second loss in an attribute, as mixtures of experts do."""

    aux = None

    def forward(self, x):
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


def test_a_loss_reads_what_forward_has_just_set(engine):
    """The warning says so: the numbers are those of a loop."""
    torch.manual_seed(0)
    net = Balanced(4, 3)
    twin = copy.deepcopy(net)
    x, y = torch.randn(12, 4), torch.randn(12, 3)

    def loss(prediction, target, net=net):
        return (prediction - target).square().mean() + 0.1 * net.aux

    model = ipufit.Model(net)
    model.compile(lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss)
    with pytest.warns(UserWarning, match="the loss of the same step reads the new value"):
        model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for i in [*range(0, 12, 4)] * 3:
        optimizer.zero_grad()
        loss(twin(x[i : i + 4]), y[i : i + 4], twin).backward()
        optimizer.step()
    torch.testing.assert_close(net.weight, twin.weight)
    assert net.aux is None


class Forgetful(nn.Linear):
    """Its forward has no return."""

    def forward(self, x):
        super().forward(x)


@pytest.mark.parametrize("loss", ["mse", lambda prediction, target: prediction.sum()])
def test_a_forward_that_returns_nothing_is_named(loss):
    """The loss would say that it got None, and predict would return it."""
    model = ipufit.Model(Forgetful(4, 3))
    model.compile("sgd", loss)
    x, y = torch.ones(8, 4), torch.ones(8, 3)
    text = (
        "forward must return the outputs of the module, but it returned None. End it with return "
        "and the outputs."
    )
    assert message(model.fit, x, y, verbose=0) == text
    assert message(model.evaluate, x, y, verbose=0) == text
    assert message(model.predict, x, verbose=0) == text
