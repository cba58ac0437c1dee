"""Batches that cannot be fed: refused with a pinned text before they are used, nothing lost."""

import copy
import functools
import inspect
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

import ipufit
from ipufit.errors import CaptureError, DataError, LossError
from tests.engines import embedded_only, one_shape, strict
from tests.faulty import (
    SEVERAL,
    Batches,
    Net,
    Samples,
    Stream,
    Told,
    Watched,
    assert_clean,
    assert_same_bits,
    batches,
    compiled,
    fit,
    loader,
    refused,
    state,
)
from tests.told import message

X, Y = batches(1, 8)[0]
FORM = "a batch must be (inputs, target) or (inputs, target, sample_weight)"
INSTEAD = (
    "Yield its tensors in tuples, lists, dicts or dataclasses, choose the fields for forward with "
    "compile(..., inputs=[...]), or use compile(..., run_eagerly=True)."
)


def place(function):
    """How a message says where batches are made."""
    line = inspect.getsourcelines(function)[1]
    return f" Batches are made at {inspect.getsourcefile(function)}:{line}."


# ---- one batch ----------------------------------------------------------------------------------

BAD_BATCHES = {
    "bare": (X, f"{FORM}, got Tensor. {SEVERAL}"),
    "none": (
        (X, None),
        "the target is missing (None), but the loss needs one. Yield (inputs, target), or use "
        "compile(loss=None) if the module computes its own loss.",
    ),
    "one": ((X,), f"{FORM}, got tuple of 1. {SEVERAL}"),
    "four": ([X, Y, Y, Y], f"{FORM}, got list of 4. {SEVERAL}"),
    "nothing": (None, f"{FORM}, got NoneType. {SEVERAL}"),
    "lengths": (
        (X, Y[:5]),
        "all parts must have the same number of samples, but input [0] has 8 and target has 5. "
        "Check the dataset or collate_fn.",
    ),
    "inputs": (
        ((X, X[:3]), Y),
        "all parts must have the same number of samples, but input [0] has 8 and input [1] has 3. "
        "Check the dataset or collate_fn.",
    ),
    "offsets": (
        ((torch.arange(20) % 4, torch.arange(0, 16, 2)), Y),
        "all parts must have the same number of samples, but input [0] has 20 and input [1] has 8. "
        "If input [1] are the offsets of an EmbeddingBag, pad the bags instead: "
        "nn.EmbeddingBag(..., padding_idx=0) takes indices of shape (batch, length).",
    ),
    "empty": ((X[:0], Y[:0]), "input [0] has no samples. Leave empty batches out of the loader."),
    "scalars": (
        (torch.tensor(1.0), 2),
        "no tensor has a batch dimension. Every input and target needs the samples along its first "
        "dimension.",
    ),
    "grad": (
        (X.clone().requires_grad_(), Y),
        "input [0] must not require grad, but it does: gradients stop at the program's inputs. "
        "Pass tensor.detach().",
    ),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
@pytest.mark.parametrize("role", ["training", "evaluation", "validation"])
def test_a_batch_that_cannot_be_fed_is_named(name, role):
    """Role, number and part of the batch say where to look; nothing has been computed."""
    batch, text = BAD_BATCHES[name]
    engine = Watched()
    model = compiled(engine=lambda: engine)
    told = Told()
    error = f"{role} data, batch 0: {text}"
    if role == "evaluation":
        with refused(model, DataError, error):
            model.evaluate(Batches([batch]), callbacks=[told], verbose=0)
    else:
        data = {"x": Batches([batch])} if role == "training" else {"validation_data": [batch]}
        with refused(model, DataError, error):
            fit(model, callbacks=[told], **data)
    assert told.hooks == []
    assert engine.built == engine.closed


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (({"x": X, "y": "a"}, Y), "input ['y'] must be a tensor to be recorded, got str. "),
        ((X, {"names": ["a"] * 8}), "target['names'][0] must be a tensor to be recorded, got str."),
        (({"x": object()}, Y), "input ['x'] must be a tensor to be recorded, got object. "),
        ((np.array(["a"] * 8), Y), "input [0] must be a tensor to be recorded, got ndarray. "),
    ],
    ids=["string", "strings", "object", "array"],
)
def test_what_is_no_tensor_is_named_where_a_program_is_recorded(batch, text):
    """It has no dtype and shape, which a program is for; nothing has been computed."""
    model = ipufit.Model(Two())
    model.compile("sgd", "mse", **strict())
    with refused(model, CaptureError, text, part=True) as caught:
        fit(model, [batch])
    assert str(caught.value).endswith(INSTEAD)


def test_what_is_no_tensor_in_a_later_batch_is_named():
    """What was trained before is kept."""
    model = ipufit.Model(Two())
    model.compile("sgd", "mse", **strict())
    weight = model.module.body.weight.detach().clone()
    with pytest.raises(
        CaptureError, match=r"input \['y'\] must be a tensor to be recorded, got str"
    ):
        fit(model, [({"x": X, "y": X}, Y), ({"x": X, "y": "a"}, Y)])
    assert not torch.equal(model.module.body.weight, weight)


class Two(nn.Module):
    """May take a second input."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)

    def forward(self, x, y=None):
        return self.body(x)


@pytest.mark.long("ipu-standin")
def test_predict_takes_inputs_alone_and_refuses_what_is_neither():
    """A batch means the same for predict as for fit, where a third part is the weights."""
    model = compiled()
    text = (
        "prediction data, batch 0: a batch must be inputs, (inputs, target) or (inputs, target, "
        "sample_weight), got tuple of 4. For several inputs yield ((first, second), target) or "
        "{'name': first, ...}; for a list of images yield (images,)."
    )
    with refused(model, DataError, text):
        model.predict([(X, X, X, Y)], verbose=0)
    expected = model.predict([(X, Y)], verbose=0)
    for batch in (X, (X,), [X], (X, None), (X, Y, Y[:, 0]), {"x": X}, X.numpy()):
        assert torch.equal(model.predict([batch], verbose=0), expected)


def test_a_dataset_without_targets_is_refused():
    """A DataLoader makes a list of one tensor from it."""
    model = compiled()
    text = f"training data, batch 0: {FORM}, got list of 1. {SEVERAL}"
    with refused(model, DataError, text):
        fit(model, DataLoader(TensorDataset(X), batch_size=4))


def test_an_output_without_rows_is_refused_before_predict_runs():
    """Rows of different outputs could not be told apart once they are joined."""

    class Mean(Net):
        def forward(self, x):
            rows = super().forward(x)
            return rows if self.training else {"rows": rows, "mean": rows.mean()}

    engine = Watched()
    model = compiled(Mean(), engine=lambda: engine)
    told = Told()
    text = (
        "predict returns one row per sample, but output['mean'] has shape () for 4 samples. "
        "Return it with the samples along its first dimension, or do not return it in eval mode."
    )
    with refused(model, DataError, text):
        model.predict(loader(), callbacks=[told], verbose=0)
    assert told.hooks == []
    assert engine.built == engine.closed == 1


# ---- batches that differ ------------------------------------------------------------------------


def other(features=4, size=4, dtype=torch.float32):
    """A batch that is not like the first."""
    return torch.zeros(size, features, dtype=dtype), torch.zeros(size, 3)


CHANGES = {
    "shape": (
        other(features=5),
        DataError,
        "training data, batch 5: layer 'body', Linear(in_features=4, out_features=6, bias=True), "
        "needs 4 features in the last dimension, got shape (4, 5), dtype float32, at ",
    ),
    "rank": (
        (torch.zeros(4, 4, 1), torch.zeros(4, 3)),
        DataError,
        "training data, batch 5: layer 'body', Linear(in_features=4, out_features=6, bias=True), "
        "needs 4 features in the last dimension, got shape (4, 4, 1), dtype float32, at ",
    ),
    "target": (
        (torch.zeros(4, 4), torch.zeros(4, 2)),
        LossError,
        "loss 'mse' needs prediction and target of one shape, got prediction (4, 3) and target "
        "(4, 2). Make both shapes equal.",
    ),
    "more": (
        ((torch.zeros(4, 4), torch.zeros(4, 4)), torch.zeros(4, 3)),
        DataError,
        "training data, batch 5: Net.forward(x) can't take a batch of 2 inputs: too many "
        "positional arguments. Yield batches in the form that forward takes.",
    ),
}


@one_shape
@pytest.mark.few("shape-1", "more-4")
@pytest.mark.parametrize(("name", "di"), [*zip(CHANGES, itertools.cycle([1, 4]))])
def test_a_batch_unlike_the_first_ends_training_without_loss(name, di):
    """What the module can't take stops training before it, with what was learned so far."""
    batch, kind, text = CHANGES[name]
    items = batches(5)
    model, twin = compiled(), compiled()
    twin.module.load_state_dict(model.module.state_dict())
    with pytest.raises(kind) as caught:
        fit(model, Batches([*items, batch]), device_iterations=di)
    assert str(caught.value).startswith(text)
    # An execution is fed whole or not at all.
    fit(twin, items[: 5 // di * di])
    assert_same_bits(state(model), state(twin))
    assert_clean(model)
    assert fit(model).epoch == [0]


def views(items):
    """Two rows of every sample."""
    x, y = default_collate([*items, *items])
    return x, y


def test_more_rows_than_a_loader_picks_samples_are_told_of_its_batch_size():
    """No batch came before that the first one could be larger than; the cure does."""
    pairs = DataLoader(TensorDataset(torch.rand(6, 4), torch.rand(6, 3)), 4, collate_fn=views)
    assert message(fit, compiled(), pairs, kind=DataError) == (
        "training data, batch 0: a batch may have at most as many samples as the DataLoader's "
        "batch_size, 4, got 8. If collate_fn makes several rows from one sample, let it put "
        "them along another dimension, or pass your own object whose __iter__ reads the "
        "DataLoader." + place(views)
    )
    model, twin = compiled(), compiled()
    twin.module.load_state_dict(model.module.state_dict())
    fit(model, Batches(pairs))
    fit(twin, list(pairs))
    assert_same_bits(state(model), state(twin))


def samples(count, features):
    return [(torch.zeros(features), torch.zeros(3)) for _ in range(count)]


def collate(width, items):
    """Makes wider batches every time."""
    width.append(0)
    return torch.zeros(len(items), 3 + len(width)), torch.zeros(len(items), 3)


class Collator:
    """The same as an object."""

    def __init__(self):
        self.width = []

    def __call__(self, items):
        return collate(self.width, items)


def generator():
    yield torch.zeros(4, 4), torch.zeros(4, 3)
    yield torch.zeros(4, 5), torch.zeros(4, 3)


@one_shape
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: DataLoader(Samples(samples(4, 4) + samples(4, 5)), 4), Samples.__getitem__),
        (
            lambda: DataLoader(Subset(Samples(samples(4, 4) + samples(4, 5)), range(8)), 4),
            Samples.__getitem__,
        ),
        (lambda: DataLoader(Stream(samples(4, 4) + samples(4, 5)), 4), Stream.__iter__),
        (
            lambda: DataLoader(TensorDataset(X), 4, collate_fn=functools.partial(collate, [])),
            collate,
        ),
        (lambda: DataLoader(TensorDataset(X), 4, collate_fn=Collator()), Collator.__call__),
        (lambda: Batches(list(generator())), Batches.__iter__),
        (generator, generator),
    ],
    ids=["dataset", "subset", "stream", "function", "object", "iterable", "generator"],
)
def test_a_change_of_shape_names_the_line_where_batches_are_made(make, where):
    """The fault is in the user's file, not in the loader that torch shows."""
    model = compiled()
    with pytest.raises(DataError) as caught:
        fit(model, make())
    assert str(caught.value).startswith("training data, batch 1: layer 'body', ")
    assert str(caught.value).endswith(place(where))


# ---- the user's own errors ----------------------------------------------------------------------


class MineError(Exception):
    """An error that ipufit has never heard of."""


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("di", [1, 2])
def test_an_error_of_the_dataset_names_its_sample(di):
    """Type and traceback of the user's error stay with it, and what was learned stays."""
    mine = MineError("disk full")

    class Breaks(Samples):
        def __getitem__(self, index):
            if index == 13:
                raise mine
            return super().__getitem__(index)

    pairs = [(x, y) for batch in batches(5) for x, y in zip(*batch)]
    told = Told()
    engine = Watched()
    model, twin = compiled(engine=lambda: engine), compiled()
    twin.module.load_state_dict(model.module.state_dict())
    with pytest.raises(DataError) as caught:
        fit(model, DataLoader(Breaks(pairs), batch_size=4), device_iterations=di, callbacks=[told])
    assert str(caught.value) == (
        "training data, batch 3: sample 13 of Breaks could not be read: MineError: disk full. "
        "Fix that sample, or leave it out; its traceback is above."
    )
    assert caught.value.__cause__ is mine
    fit(twin, batches(5)[: 3 // di * di])
    assert_same_bits(state(model), state(twin))
    assert told.hooks[-1] == "on_train_end"
    assert model.history.epoch == []
    assert engine.built == engine.closed == 1
    assert_clean(model)
    assert fit(model).epoch == [0]


@embedded_only("a device looks at no values: what it makes of such a target is its own affair")
@pytest.mark.parametrize(
    ("on_gpu", "device_iterations", "kept", "cause"),
    [(False, 6, 5, IndexError), (True, 2, 4, type(None))],
    ids=["cpu", "gpu"],
)
def test_a_target_outside_the_classes_ends_training_before_its_update(
    on_gpu, device_iterations, kept, cause, monkeypatch
):
    """Only a value shows it, in the middle of an execution: earlier updates of it are kept.

    A kernel of a GPU's would end its use, so there it is found before its execution.
    """
    if on_gpu:
        gpu = torch.device("cuda")
        monkeypatch.setattr("ipufit.training.session.device_of", lambda module: gpu)
    items = [(x, torch.zeros(4, dtype=torch.int64)) for x, _ in batches(6)]
    bad = [*items[:5], (items[5][0], torch.tensor([0, 1, 2, 3]))]
    model, twin = compiled(loss="cross_entropy"), compiled(loss="cross_entropy")
    twin.module.load_state_dict(model.module.state_dict())
    with pytest.raises(DataError) as caught:
        fit(model, bad, device_iterations=device_iterations)
    assert str(caught.value) == (
        "training data, batch 5: loss 'cross_entropy' needs labels from 0 to 2 for a prediction of "
        "3 classes, got 3 in sample 3. Let the module return 4 classes, or number labels from 0."
    )
    assert isinstance(caught.value.__cause__, cause)
    fit(twin, items[:kept])
    assert_same_bits(state(model), state(twin))
    assert_clean(model)
    assert fit(model, items).epoch == [0]


class Named(nn.Module):
    """Takes one input, under a name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize(
    ("loss", "batch", "text"),
    [
        (
            "mse",
            ((X, X), Y),
            "training data: Named.forward(x) can't take a batch of 2 inputs: too many positional "
            "arguments. Yield batches in the form that forward takes.",
        ),
        (
            "mse",
            ({"image": X}, Y),
            "training data, batch 0: Named.forward takes 'x', but the fields of the batch are "
            "'image'. Say which ones it gets: one by position, compile(..., inputs='image'), or "
            "by name, inputs={'parameter': 'field'}.",
        ),
        (
            None,
            (X, Y),
            "training data: Named.forward(x) can't take a batch of 2 inputs: too many positional "
            "arguments. With loss=None every part of the batch goes to forward: pass loss= to "
            "compile, or let forward take the target and return (outputs, loss).",
        ),
    ],
    ids=["tuple", "dict", "forgotten loss"],
)
def test_a_batch_that_forward_does_not_take_is_refused(loss, batch, text):
    """Python's own error counts self and does not say where the arguments come from."""
    model = ipufit.Model(Named())
    model.compile("sgd", loss)
    assert message(fit, model, [batch], kind=DataError) == text
    assert_clean(model)


class Pictures(nn.Module):
    """Takes pictures of several sizes as a list."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 1)

    def forward(self, pictures):
        return torch.stack([self.head(picture.mean((1, 2))) for picture in pictures])


class Detector(Pictures):
    """May get targets too, as the models of torchvision that detect."""

    def forward(self, pictures, targets=None):
        assert isinstance(pictures, list)
        assert targets is None
        return super().forward(pictures)


class Measures(Pictures):
    """Runs with one picture as well, whose channels it takes for pictures."""

    def forward(self, pictures, others=None):
        return [{"mean": picture.mean().reshape(1)} for picture in pictures]


def value_of(output):
    """The number that one of these modules computes for a picture."""
    return output["mean"] if isinstance(output, dict) else output


def as_lists(samples):
    """Pictures as a list, and their targets as a tensor."""
    return [picture for picture, _ in samples], torch.stack([target for _, target in samples])


# A whole list, of as many samples as the target has, in batches of two with a last one of one.
@pytest.mark.parametrize(
    ("kind", "size", "channels"),
    [(Pictures, 4, 3), (Detector, 4, 3), (Detector, 2, 3), (Detector, 1, 3), (Detector, 4, 1)],
)
@embedded_only("a micro-batch that is smaller than the others is filled up with rows")
def test_a_list_of_pictures_goes_whole_into_forward(kind, size, channels):
    """Its entries are the samples, not the channels of the first one."""
    torch.manual_seed(0)
    pairs = [(torch.randn(channels, 8, 8 + i % 2), torch.ones(1)) for i in range(9)]
    loader = DataLoader(pairs, size, collate_fn=as_lists)
    module = kind()
    module.head = nn.Linear(channels, 1)
    model = ipufit.Model(module)
    model.compile("sgd", "mse")
    history = model.fit(loader, epochs=2, verbose=0)
    twin = copy.deepcopy(model.module)
    pictures = [picture for picture, _ in pairs]
    expected = twin(pictures)
    assert torch.allclose(model.predict(loader, verbose=0), expected)
    # Without targets, in a tuple or by name.
    batches = [pictures[:4], pictures[4:]]
    for wrap in (lambda batch: (batch,), lambda batch: {"pictures": batch}):
        alone = model.predict([wrap(batch) for batch in batches], verbose=0)
        assert torch.allclose(alone, expected)
    assert history.history["loss"][1] < history.history["loss"][0]
    assert model.evaluate(loader, verbose=0)["loss"] == pytest.approx(
        float((expected - 1).square().mean().detach()), rel=1e-5
    )


def test_an_ipu_takes_no_smaller_list_of_pictures():
    """It would be filled up with channels of its last one."""
    pairs = [(torch.randn(3, 8, 8), torch.ones(1)) for _ in range(6)]
    model = ipufit.Model(Pictures(), engine="ipu-standin")
    model.compile("sgd", "mse")
    with pytest.raises(DataError) as caught:
        model.fit(DataLoader(pairs, 4, collate_fn=as_lists), verbose=0)
    assert str(caught.value) == (
        "on IPUs a smaller micro-batch is filled up with samples, so each tensor must have one row "
        "per sample, but one of 2 instead of 4 samples came, such as a list of images, that has "
        "not. Use drop_last=True in the loader, or engine='embedded'."
    )
    loader = DataLoader(pairs, 4, collate_fn=as_lists, drop_last=True)
    assert model.fit(loader, verbose=0).epoch == [0]


def test_a_bare_list_of_pictures_says_how_to_yield_it():
    """It reads like inputs and target, also where there are as many images as channels."""
    pictures = [torch.randn(3, 8, 8) for _ in range(6)]
    text = (
        "prediction data, batch 0: a {} can be {}, or samples such as images, because {}.forward "
        "runs with a list too. Yield (inputs,) without a target, or (samples,) with the list."
    )
    for kind in (Pictures, Detector, Measures):
        model = ipufit.Model(kind())
        for size, came, reading in (
            (1, "list of 1 tensor", "inputs"),
            (2, "list of 2 tensors", "inputs and target"),
            (3, "list of 3 tensors", "inputs and target"),
        ):
            with refused(model, DataError, text.format(came, reading, kind.__name__)):
                model.predict(DataLoader(pictures, size, collate_fn=list), verbose=0)
        with refused(model, DataError, text.format("tuple of 3 tensors", reading, kind.__name__)):
            model.predict([tuple(picture.numpy().astype("float64") for picture in pictures[:3])])
        with pytest.raises(DataError, match=r"got list of 4. .* list of images yield \(images,\)."):
            model.predict(DataLoader(pictures, 4, collate_fn=list), verbose=0)
        loader = DataLoader(pictures, 3, collate_fn=lambda images: (images,))
        outputs = model.predict(loader, verbose=0)
        assert len(outputs) == 6
        for picture, output in zip(pictures, outputs):
            assert torch.equal(value_of(output), value_of(model.module([picture])[0]))


@embedded_only("an IPU fills up a smaller last micro-batch with rows, which pictures have not")
def test_pictures_with_as_many_channels_as_there_are_have_a_smaller_last_batch():
    """Its pictures are fewer; their channels are no rows that could be fewer."""
    pictures = [torch.randn(3, 8, 8) for _ in range(4)]
    model = ipufit.Model(Detector())
    loader = DataLoader(pictures, 3, collate_fn=lambda images: (images,))
    outputs = model.predict(loader, verbose=0)
    assert torch.equal(outputs, torch.stack([model.module([each])[0] for each in pictures]))


def test_bare_pictures_say_how_to_pass_them():
    """They read like batches, or like two inputs of a forward that may take two."""
    pictures = [torch.randn(3, 8, 8) for _ in range(3)]
    text = (
        "prediction data: a {} tensors can be {}, or samples such as images, because "
        "{}.forward runs with a list too. Pass {} or [(samples,)] for one batch with the list."
    )
    first = "[(first,), (second,)] for batches,"
    for kind in (Pictures, Detector, Measures):
        model = ipufit.Model(kind())
        with refused(model, DataError, text.format("list of 3", "batches", kind.__name__, first)):
            model.predict(pictures, verbose=0)
        assert len(model.predict([(pictures,)], verbose=0)) == 3
    first = "[((first, second),)] for several inputs,"
    text = text.format("tuple of 2", "several inputs", "Measures", first)
    with refused(model, DataError, text):
        model.predict((pictures[0], pictures[1]), verbose=0)
    one = model.predict([(picture,) for picture in pictures], verbose=0)
    assert len(one) == 9


@pytest.mark.parametrize("label", [1, np.int64(1), torch.tensor(1)], ids=repr)
@pytest.mark.parametrize("form", ["dicts", "(inputs, target)"])
def test_a_list_of_samples_by_name_is_not_read_as_batches(form, label):
    """Each dict counted as a batch of as many samples as an input has features."""
    samples = [{"x": X[i].numpy(), "y": label} for i in range(2)]
    if form != "dicts":
        samples = [({"x": X[i]}, label) for i in range(2)]
    model = compiled(loss="cross_entropy")
    text = (
        f"{{}}: a list of {form} is read as batches, but the target of the first is one number, "
        f"{label}, so they look like samples. Pass DataLoader(x, batch_size=32, shuffle=True), "
        "which makes batches of them."
    )
    with refused(model, DataError, text.format("training data")):
        fit(model, samples)
    with refused(model, DataError, text.format("evaluation data")):
        model.evaluate(samples, verbose=0)
    with refused(model, DataError, text.format("validation data")):
        fit(model, validation_data=samples)
    fit(model, DataLoader(samples, batch_size=32, shuffle=True))


@pytest.mark.parametrize("label", [1, np.int64(1), torch.tensor(1), 1.0, True], ids=repr)
def test_a_list_of_samples_is_not_read_as_batches(label):
    """As many samples as an input has features were counted."""
    model, pairs = compiled(), [(X[0], label), (X[1], label)]
    text = (
        "{}: a list of (inputs, target) is read as batches, but the target of the first is one "
        f"number, {label}, so they look like samples. Pass DataLoader(x, batch_size=32, "
        "shuffle=True), which makes batches of them."
    )
    with refused(model, DataError, text.format("training data")):
        fit(model, pairs)
    with refused(model, DataError, text.format("evaluation data")):
        model.evaluate(pairs, verbose=0)
    with refused(model, DataError, text.format("prediction data")):
        model.predict(pairs, verbose=0)
    expected = model.predict(X[:2], verbose=0)
    assert torch.equal(model.predict(DataLoader(pairs, 2), verbose=0), expected)


def test_inputs_and_targets_alike_are_read_as_such():
    """Forward runs with no list of both, so it is no list of samples."""
    model = ipufit.Model(nn.Linear(4, 3))
    expected = model.predict(X, verbose=0)
    for batch in ((X, X.clone()), [X, X.clone()], [X, X[:, :1]], [X]):
        assert torch.equal(model.predict([batch], verbose=0), expected)


def test_inputs_that_are_all_needed_are_read_as_such():
    """In a batch of a loader as in arrays: forward can't be called with the first one alone."""

    class Sum(nn.Module):
        def forward(self, left, right):
            return left + 2 * right

    model, other = ipufit.Model(Sum()), X.flip(0)
    for data in ((X, other), [X, other], DataLoader(TensorDataset(X, other), 4), [(X, other)]):
        assert torch.equal(model.predict(data, verbose=0), X + 2 * other)


class Several(nn.Module):
    """Takes a second input where there is one, and returns two outputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, y=None):
        outputs = self.layer(x if y is None else x + y)
        return outputs[:, :1], outputs[:, 1:]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.long("ipu-standin")
def test_a_list_of_inputs_is_spread_where_all_parts_have_a_row_for_each_sample(size):
    """A DataLoader makes lists of the tuples of a dataset, also of two inputs and two targets."""
    torch.manual_seed(0)
    x, y = torch.randn(9, 4), torch.randn(9, 4)
    rows = [((x[i], y[i]), (torch.ones(1), torch.zeros(1))) for i in range(9)]
    model = ipufit.Model(Several())
    model.compile("sgd", ["mse", "mse"])
    loader = DataLoader(rows, size)
    one, other = model.module(x, y)
    first, second = model.predict(loader, verbose=0)
    assert torch.allclose(first, one)
    assert torch.allclose(second, other)
    expected = ((one - 1).square().mean() + other.square().mean()).item()
    assert model.evaluate(loader, verbose=0)["loss"] == pytest.approx(expected, rel=1e-5)


class Bags(nn.Module):
    """Means of embedded words, for bags in a row with offsets, or for padded ones."""

    def __init__(self):
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 3, mode="mean", padding_idx=0)

    def forward(self, words, offsets=None):
        return self.bags(words, offsets)


@embedded_only("an IPU has no EmbeddingBag")
def test_padded_bags_are_those_of_offsets():
    """An error advises to pad bags, which must not change what the module computes."""
    bags = [torch.randint(1, 20, (size,)) for size in (3, 1, 5, 2)]
    offsets = torch.tensor([0, 3, 4, 9])
    net = Bags()
    padded = nn.utils.rnn.pad_sequence(bags, batch_first=True)
    outputs = ipufit.Model(net).predict(padded, verbose=0)
    torch.testing.assert_close(outputs, net(torch.cat(bags), offsets).detach())
