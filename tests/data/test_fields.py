"""Batches that are dicts: what goes into forward, what is the target, and what stays beside."""

import copy
import re

import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.core.batch import MicroBatch
from ipufit.errors import DataError, MetricError
from tests.engines import EAGER_OR_NOT
from tests.fitting import assert_equal, skipping_refusals
from tests.told import message

SAMPLES = 22
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(SAMPLES, 4, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(0, 3, (SAMPLES,), generator=GENERATOR)


class Pictures(Dataset):
    """Samples with a file's name and a number beside picture and label."""

    def __init__(self, **names):
        self.names = names

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        sample = {"file": f"{index}.png", "image": IMAGES[index], "number": index}
        sample["label"] = LABELS[index]
        return {self.names.get(name, name): value for name, value in sample.items()}


class Net(nn.Module):
    """Takes its input under a name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Linear(4, 3).double()

    def forward(self, image):
        return self.head(image)


class Anything(Net):
    """Takes any name."""

    def forward(self, **fields):
        return self.head(fields["image"])


class Sees(Callback):
    """Notes the files of every execution, before it and behind it."""

    def __init__(self):
        super().__init__()
        self.before, self.after = [], []

    def _files(self):
        return [file for extras in self.model.extras for file in extras["file"]]

    def on_train_batch_begin(self, batch, logs=None):
        self.before += self._files()

    def on_train_batch_end(self, batch, logs=None):
        self.after += self._files()

    on_test_batch_begin = on_predict_batch_begin = on_train_batch_begin
    on_test_batch_end = on_predict_batch_end = on_train_batch_end


def loader(batch_size=4, **names):
    return DataLoader(Pictures(**names), batch_size=batch_size)


def made(net=None, loss="cross_entropy", metrics=None, **options):
    model = ipufit.Model(net or Net())
    model.compile("sgd", loss, metrics=metrics, **options)
    return model


def fitted(model, data, **options):
    return model.fit(data, **{"epochs": 2, "seed": 3, "verbose": 0, **options})


# ---- what goes where ----------------------------------------------------------------------------


@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize(
    ("net", "options", "names"),
    [
        (Net, {"inputs": ["image"]}, {}),
        (Net, {"inputs": None}, {}),
        (Net, {"inputs": {"image": "picture"}}, {"image": "picture"}),
        (Anything, {"inputs": ("image",)}, {}),
        (lambda: Net().head, {"inputs": "picture"}, {"image": "picture"}),
    ],
    ids=["list", "signature", "mapping", "any name", "position"],
)
def test_a_dict_trains_as_inputs_and_target(net, options, names, run_eagerly):
    """Whatever says it, every bit is that of (inputs, target), tails included."""
    model = made(net(), targets="label", run_eagerly=run_eagerly, **options)
    plan = {"gradient_accumulation": 2, "device_iterations": 2}
    history = fitted(model, loader(**names), validation_data=loader(5, **names), **plan)
    pairs = [(IMAGES[i : i + 4], LABELS[i : i + 4]) for i in range(0, SAMPLES, 4)]
    held_out = [(IMAGES[i : i + 5], LABELS[i : i + 5]) for i in range(0, SAMPLES, 5)]
    other = made(run_eagerly=run_eagerly)
    expected = fitted(other, pairs, validation_data=held_out, **plan)
    assert history.history == expected.history
    head = getattr(model.module, "head", model.module)
    assert_equal(head, other.module.head)
    data = loader(**names)
    assert model.evaluate(data, verbose=0) == other.evaluate(pairs, verbose=0)
    assert torch.equal(model.predict(data, verbose=0), other.predict(IMAGES, verbose=0))


def test_the_one_field_that_forward_leaves_is_the_target():
    data = [{"image": IMAGES[:4], "label": LABELS[:4]}]
    model, other = made(), made()
    fitted(model, data)
    fitted(other, [(IMAGES[:4], LABELS[:4])])
    assert_equal(model.module, other.module)


def test_arrays_in_a_dict_need_no_y():
    model, other = made(targets="label"), made()
    data = {"image": IMAGES.numpy(), "label": LABELS.numpy(), "number": torch.arange(SAMPLES)}
    fitted(model, data, batch_size=4)
    fitted(other, IMAGES, y=LABELS, batch_size=4)
    assert_equal(model.module, other.module)


def test_several_targets_are_a_dict():
    """As several losses take them."""

    class Two(Net):
        def forward(self, image):
            return {"label": self.head(image), "number": self.head(image).sum(1)}

    data = [{"image": IMAGES[:4], "label": LABELS[:4], "number": torch.arange(4.0), "file": "abcd"}]
    losses = {"label": "cross_entropy", "number": "mse"}
    model = made(Two(), losses, targets=["label", "number"])
    other = made(Two(), losses)
    fitted(model, data)
    fitted(other, [(IMAGES[:4], {"label": LABELS[:4], "number": torch.arange(4.0)})])
    assert_equal(model.module, other.module)


def test_weights_of_samples_and_classes_count():
    weights = torch.linspace(0, 1, SAMPLES)
    data = {"image": IMAGES, "label": LABELS}
    model, other = made(), made()
    fitted(model, {**data, "sample_weight": weights}, batch_size=4)
    fitted(other, IMAGES, y=LABELS, sample_weight=weights, batch_size=4)
    assert_equal(model.module, other.module)
    model, other = made(), made()
    fitted(model, data, batch_size=4, class_weight={0: 5.0})
    fitted(other, IMAGES, y=LABELS, batch_size=4, class_weight={0: 5.0})
    assert_equal(model.module, other.module)


def test_a_module_with_a_loss_of_its_own_leaves_what_it_does_not_take():
    class Own(Net):
        def forward(self, image, label):
            scores = self.head(image)
            return scores, nn.functional.cross_entropy(scores, label)

    seen = Sees()
    model, other = made(Own(), None), made()
    fitted(model, loader(), callbacks=seen)
    fitted(other, [(IMAGES[i : i + 4], LABELS[i : i + 4]) for i in range(0, SAMPLES, 4)])
    assert_equal(model.module, other.module)
    assert seen.after == [f"{index}.png" for index in range(SAMPLES)] * 2


def test_one_batch_and_looks_into_the_module_take_a_dict():
    batch = {"image": IMAGES[:4], "label": LABELS[:4], "file": list("abcd")}
    model, other = made(targets="label"), made()
    assert model.train_on_batch(batch) == other.train_on_batch((IMAGES[:4], LABELS[:4]))
    assert_equal(model.module, other.module)
    assert not model.check(batch)
    lines = []
    model.summary(batch, print_fn=lines.append)
    assert "(4, 3)" in lines[0]


# ---- what stays beside --------------------------------------------------------------------------


@pytest.mark.parametrize("device_iterations", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_fields_come_with_their_samples(shuffle, device_iterations):
    """To callbacks and metrics alike, in training, validation, evaluation and prediction."""
    numbers = []

    def noted(prediction, target, number, *, file):
        assert len(prediction) == len(target) == len(file)
        assert [f"{n}.png" for n in number.tolist()] == list(file)
        torch.testing.assert_close(target, LABELS[number])
        numbers.extend(number.tolist())
        return number.double()

    seen = Sees()
    data = DataLoader(Pictures(), batch_size=4, shuffle=shuffle)
    model = made(metrics=[noted], targets="label")
    del numbers[:]
    options = {"callbacks": seen, "device_iterations": device_iterations, "ipus": 2}
    with skipping_refusals():
        history = fitted(model, data, epochs=1, **options)
    assert history.history["noted"] == [(SAMPLES - 1) / 2]
    files = [f"{index}.png" for index in range(SAMPLES)]
    assert sorted(seen.after) == sorted(files)
    assert (seen.after == files) is not shuffle
    assert seen.after == seen.before
    # Before training, the metric is tried on the first micro-batch.
    assert [f"{n}.png" for n in numbers[-SAMPLES:]] == seen.after
    for method in (model.evaluate, model.predict):
        seen = Sees()
        method(loader(5), callbacks=seen, verbose=0)
        assert seen.before == seen.after == files


def test_a_field_may_have_any_name():
    """Also one that ipufit's own functions have."""

    def named(prediction, target, name, *, size, weight, function):
        return name.double() + size + weight + function

    model = made(metrics=[named], inputs="image", targets="label")
    ones = dict.fromkeys(("name", "size", "weight", "function"), torch.ones(SAMPLES))
    assert model.evaluate({**ones, "image": IMAGES, "label": LABELS}, verbose=0)["named"] == 4


def test_metrics_of_torchmetrics_take_fields_by_the_names_of_their_update():
    """Rankings go by query, which no module takes."""
    queries = torch.arange(SAMPLES) // 4
    scores = torch.linspace(-1, 1, SAMPLES, dtype=torch.float64)[:, None].expand(-1, 4) * 2
    relevant = LABELS % 2
    net = nn.Sequential(nn.Linear(4, 1).double(), nn.Flatten(0))
    metrics = {
        "alone": torchmetrics.retrieval.RetrievalMAP(),
        "together": torchmetrics.MetricCollection([torchmetrics.retrieval.RetrievalMRR()]),
    }
    model = ipufit.Model(net)
    options = {"inputs": "image", "targets": "label"}
    model.compile(
        "sgd", lambda out, target: (out - target).square().mean(), metrics=metrics, **options
    )
    data = {"image": scores, "label": relevant, "indexes": queries}
    values = model.evaluate(data, batch_size=4, verbose=0)
    with torch.no_grad():
        out = net(scores)
    expected = metrics["alone"](out, relevant, indexes=queries)
    assert values["alone"] == pytest.approx(expected.item())
    expected = torchmetrics.retrieval.RetrievalMRR()(out, relevant, indexes=queries)
    assert values["together_RetrievalMRR"] == pytest.approx(expected.item())


def test_a_run_that_goes_on_sees_the_fields_of_what_is_left(tmp_path):
    """With the bits of one that was not interrupted."""

    class EndError(Exception):
        pass

    class Ends(Sees):
        def __init__(self, end=None):
            super().__init__()
            self.end = end

        def on_train_batch_begin(self, batch, logs=None):
            if batch == self.end:
                raise EndError

    def number(prediction, target, file):
        return torch.tensor([float(each[:-4]) for each in file]) * prediction[:, 0]

    def run(callback, **options):
        model = made(metrics=[number], targets="label")
        data = DataLoader(Pictures(), batch_size=4, shuffle=True)
        return model, fitted(model, data, epochs=1, callbacks=callback, **options)

    whole, first, rest = Ends(), Ends(3), Ends()
    model, history = run(whole)
    options = {"every_updates": 3, "resume": "auto"}
    with pytest.raises(EndError):
        run(first, checkpoint=ipufit.Checkpoint(str(tmp_path), **options))
    other, resumed = run(rest, checkpoint=ipufit.Checkpoint(str(tmp_path), **options))
    assert first.after + rest.after == whole.after
    assert resumed.history == history.history
    assert_equal(model.module, other.module)


def test_a_smaller_micro_batch_has_the_fields_of_its_samples():
    fields = {
        "names": list("abcd"),
        "text": "abcd",
        "tensor": torch.arange(4),
        "array": torch.arange(4).numpy(),
        "nested": {"boxes": [torch.ones(2), torch.ones(0), torch.ones(1), torch.ones(3)]},
        "number": 7,
        "scalar": torch.tensor(1.0),
        "other": [1, 2],
    }
    batch = MicroBatch.of((torch.ones(4, 2),), {}, None, 4)
    batch = MicroBatch(batch.leaves, batch.structure, 4, fields)
    cut = batch.head(3).extras
    assert cut["names"] == ["a", "b", "c"]
    assert cut["tensor"].tolist() == cut["array"].tolist() == [0, 1, 2]
    assert len(cut["nested"]["boxes"]) == 3
    for name in ("text", "number", "scalar", "other"):
        assert cut[name] is fields[name]
    copied = batch.clone().extras
    fields["tensor"].zero_()
    fields["array"][:] = 0
    fields["nested"]["boxes"][0].zero_()
    assert copied["tensor"].tolist() == copied["array"].tolist() == [0, 1, 2, 3]
    assert copied["nested"]["boxes"][0].tolist() == [1, 1]
    assert copied["names"] == fields["names"]


# ---- what is refused ----------------------------------------------------------------------------

FIELDS = {"image": IMAGES[:4], "number": torch.arange(4), "label": LABELS[:4]}


class Labelled(Net):
    """Takes everything."""

    def forward(self, image, number, label):
        return self.head(image)


BAD_FIELDS = [
    (
        Net,
        {"inputs": ["picture"]},
        "the batch must have the field 'picture', which inputs of compile names, got 'image', "
        "'number', 'label'. Use one of these names, or add the field in the dataset or "
        "collate_fn.",
    ),
    (
        Net,
        {"targets": ["label", "other"]},
        "the batch must have the field 'other', which targets of compile names, got 'image', "
        "'number', 'label'. Use one of these names, or add the field in the dataset or "
        "collate_fn.",
    ),
    (
        Net,
        {},
        "ipufit can't tell which field of the batch is the target, because Net.forward does not "
        "take 'number', 'label'. Write compile(..., targets='label'), or a list of names for "
        "several.",
    ),
    (
        Labelled,
        {},
        "the loss needs a target, but Labelled.forward takes all fields of the batch, 'image', "
        "'number', 'label'. Add one, name the target with compile(..., targets='label'), or use "
        "compile(loss=None) if the module computes its own loss.",
    ),
    (
        Anything,
        {"targets": "label"},
        "ipufit can't tell which fields of the batch Anything.forward gets, because it takes "
        "any name, got 'image', 'number', 'label'. Write for example compile(..., "
        "inputs=['image'], targets='label').",
    ),
    (
        lambda: Net().head,
        {"targets": "label"},
        "Linear.forward takes 'input', but the fields of the batch are 'image', 'number', "
        "'label'. Say which ones it gets: one by position, compile(..., inputs='image'), or by "
        "name, inputs={'parameter': 'field'}.",
    ),
]


@pytest.mark.parametrize(("net", "options", "text"), BAD_FIELDS)
def test_names_that_match_nothing_are_refused_before_any_work(net, options, text):
    model = made(net(), **options)
    before = copy.deepcopy(model.module)
    for method, role in ((model.fit, "training data"), (model.evaluate, "evaluation data")):
        assert message(method, [FIELDS], verbose=0, kind=DataError) == f"{role}, batch 0: {text}"
    assert_equal(model.module, before)


def test_a_field_that_is_nearly_a_parameter_is_no_field_beside():
    """Left out in silence, a misspelt mask would change what is learned."""

    class Masked(Net):
        def forward(self, image, attention_mask=None):
            return self.head(image if attention_mask is None else image * attention_mask)

    data = [{"image": IMAGES[:4], "atention_mask": torch.ones(4, 1), "label": LABELS[:4]}]
    text = (
        "Masked.forward gets nothing for 'attention_mask', but the batch has 'atention_mask', "
        "which it does not take. Rename the field like the parameter, or say what forward gets: "
        "compile(..., inputs={'attention_mask': 'atention_mask', ...})."
    )
    with pytest.raises(DataError, match=re.escape(text)):
        made(Masked(), targets="label").fit(data, verbose=0)
    # Said explicitly, it is one.
    fitted(made(Masked(), inputs=["image"], targets="label"), data)


@pytest.mark.parametrize(
    ("loss", "options", "text"),
    [
        (
            "mse",
            {"inputs": 3},
            "inputs must be the name of a field of a batch, a list of names, or a dict from "
            "parameters of forward to names, got 3. Write for example inputs=['image', 'mask'].",
        ),
        (
            "mse",
            {"inputs": []},
            "inputs must be the name of a field of a batch, a list of names, or a dict from "
            "parameters of forward to names, got []. Write for example inputs=['image', 'mask'].",
        ),
        (
            "mse",
            {"targets": {"label": "y"}},
            "targets must be the name of a field of a batch, or a list of names for a dict of "
            "targets, got {'label': 'y'}. Write for example targets='label'.",
        ),
        (
            None,
            {"targets": "label"},
            "targets= names the targets of a loss, but with loss=None the module computes its "
            "own, got 'label'. Leave it out, or pass loss= to compile.",
        ),
    ],
)
def test_what_is_no_name_is_refused_by_compile(loss, options, text):
    assert message(made, loss=loss, **options) == text


def test_a_metric_that_takes_what_no_batch_has_is_refused_before_any_work():
    def grouped(prediction, target, group):
        return prediction.mean()

    model = made(metrics=[grouped], targets="label")
    text = (
        "metric 'grouped' takes 'group' from the batch, whose fields are 'file', 'number', "
        "'image'. Rename the parameter to one of these, or give it a default; a batch has fields "
        "if it is a dict."
    )
    assert message(fitted, model, loader(), kind=MetricError) == text
