"""The weights of samples reach the program, from every form; bad ones are refused by position."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import ConfigurationError, DataError
from ipufit.testing import RecordingEngine
from tests.faulty import Batches, Stream
from tests.told import message

X = torch.arange(10.0)[:, None]
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 3])
THREE = CLASSES % 3
W = torch.linspace(0.5, 5, 10, dtype=torch.float64)


def recording(loss="mse", **options):
    """A model that computes nothing and remembers everything."""
    engine = RecordingEngine()
    model = ipufit.Model(nn.Linear(1, 1), engine=lambda: engine)
    model.compile("sgd", loss, **options)
    return model, engine


def weights(engine, index=0):
    """The weights of each micro-batch that a program was given."""
    program = [program for program in engine.programs if program.executions][index]
    return [b.unpack()[3] for e in program.executions for b in e.micro_batches]


TRIPLES = [(X[i : i + 4], X[i : i + 4], W[i : i + 4]) for i in (0, 4, 8)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ((X, X), {"sample_weight": W, "batch_size": 4, "shuffle": False}),
        lambda: ((X, X), {"sample_weight": W.numpy(), "batch_size": 4, "shuffle": False}),
        lambda: ((TensorDataset(X, X, W),), {"batch_size": 4, "shuffle": False}),
        lambda: ((DataLoader(TensorDataset(X, X, W), 4),), {}),
        lambda: ((Stream(list(zip(X, X, W))),), {"batch_size": 4}),
        lambda: ((TRIPLES,), {}),
        lambda: ((Batches([[x.numpy(), y, w.numpy()] for x, y, w in TRIPLES]),), {}),
    ],
    ids=["tensors", "arrays", "dataset", "loader", "stream", "list", "numpy batches"],
)
def test_weights_of_every_form_reach_the_program(make):
    """As a fourth part of the micro-batch, in their own dtype."""
    model, engine = recording()
    args, options = make()
    model.fit(*args, verbose=0, **options)
    assert [w.dtype for w in weights(engine)] == [torch.float64] * 3
    assert torch.equal(torch.cat(weights(engine)), W)
    model.evaluate(*args, verbose=0, **{k: v for k, v in options.items() if k != "shuffle"})
    assert torch.equal(torch.cat(weights(engine, 1)), W)


def test_weights_are_shuffled_and_split_with_their_samples():
    """A weight belongs to its sample."""
    model, engine = recording()
    arguments = {"sample_weight": X[:, 0] + 1, "validation_split": 0.3, "batch_size": 4}
    model.fit(X, X, verbose=0, **arguments)
    for program in (p for p in engine.programs if p.executions):
        for execution in program.executions:
            for batch in execution.micro_batches:
                args, _, _, weight = batch.unpack()
                assert torch.equal(args[0][:, 0] + 1, weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_whole_numbers_become_floating_point(dtype):
    """A mask is a weight; a loss can't be multiplied by a bool."""
    model, engine = recording()
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1, 0], dtype=dtype)
    model.fit(X, X, sample_weight=mask, batch_size=10, shuffle=False, verbose=0)
    (weight,) = weights(engine)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, mask.float())


def test_weights_may_have_more_dimensions_and_structure():
    """One weight per token, or weights by output."""
    model, engine = recording()
    model.fit(X, X, sample_weight=torch.ones(10, 3), batch_size=4, verbose=0)
    assert [tuple(w.shape) for w in weights(engine)] == [(4, 3), (4, 3), (2, 3)]
    by_name = {"a": W, "b": torch.zeros(10)}
    model, engine = recording()
    model.fit(X, {"a": X, "b": X}, sample_weight=by_name, batch_size=10, shuffle=False, verbose=0)
    (found,) = weights(engine)
    assert torch.equal(found["a"], W)
    assert torch.equal(found["b"], torch.zeros(10))


@pytest.mark.filterwarnings("ignore:training data has other dtypes:UserWarning")
@pytest.mark.parametrize(
    "target",
    [
        CLASSES,
        CLASSES[:, None],
        CLASSES.double(),
        CLASSES.to(torch.uint8),
        nn.functional.one_hot(CLASSES),
        nn.functional.one_hot(CLASSES).bool(),
        nn.functional.one_hot(CLASSES).float() * 0.7 + 0.075,
        CLASSES.numpy(),
    ],
    ids=["indices", "column", "floats", "bytes", "one-hot", "bools", "probabilities", "array"],
)
def test_class_weights_are_those_of_keras(target):
    """By index, or by the largest of a row; classes that are not named weigh 1."""
    expected = torch.tensor([{0: 0.5, 2: 3.0}.get(int(c), 1.0) for c in CLASSES])
    pairs = [(X[i : i + 4], target[i : i + 4]) for i in (0, 4, 8)]
    for args, options in (((X, target), {"batch_size": 4, "shuffle": False}), ((pairs,), {})):
        model, engine = recording()
        held = {"validation_data": (X, target)}
        model.fit(*args, class_weight={0: 0.5, 2: 3.0}, verbose=0, **options, **held)
        assert torch.equal(torch.cat(weights(engine)), expected)
        # They are for training alone, as in Keras.
        assert set(weights(engine, 1)) == {None}


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("module", "loss", "target", "weights_by_class", "text"),
    [
        (nn.Linear(2, 3), "cross_entropy", THREE, {7: 100.0, 1: 2.0}, "0 to 2|batch, 3|7"),
        (nn.Linear(2, 3), "cross_entropy", THREE, {3: 1.0, 4: 1.0}, "0 to 2|batch, 3|3, 4"),
        (nn.Linear(2, 3), "mse", torch.eye(3)[THREE], {3: 1.0}, "0 to 2|batch, 3|3"),
        (
            nn.Linear(2, 1),
            "bce_with_logits",
            (THREE[:, None] > 1) * 1.0,
            {2: 5.0},
            "0 to 1|batch, 1|2",
        ),
    ],
    ids=["seven", "two keys", "one-hot", "binary"],
)
def test_class_weights_of_classes_without_an_output_are_refused(
    module, loss, target, weights_by_class, text
):
    """They would weigh nothing, without a word; before any work, and what is right is taken."""
    model = ipufit.Model(module)
    model.compile("sgd", loss)
    classes, shape, came = text.split("|")
    calls = [
        lambda: model.fit(torch.ones(10, 2), target, class_weight=weights_by_class, verbose=0),
        lambda: model.train_on_batch(torch.ones(10, 2), target, class_weight=weights_by_class),
    ]
    for call in calls:
        assert message(call) == (
            f"class_weight must name classes that the outputs have, {classes} for outputs of shape "
            f"({shape}), got {came}. Remove the other keys, or give the module an output for each "
            "class."
        )
    model.fit(torch.ones(10, 2), target, class_weight={0: 2.0, 1: 3.0}, verbose=0)


@pytest.mark.long("ipu-standin")
def test_class_weights_go_with_any_whole_number_where_outputs_are_no_classes():
    """A single output of a regression may have whole numbers as its target."""
    model = ipufit.Model(nn.Linear(2, 1))
    model.compile("sgd", "mse")
    x, y = torch.ones(4, 2), torch.tensor([[7.0], [1.0], [0.0], [7.0]])
    expected = (torch.tensor([[3.0], [1.0], [1.0], [3.0]]) * (model.module(x) - y) ** 2).mean()
    history = model.fit(x, y, class_weight={7: 3.0}, verbose=0).history
    assert history["loss"] == [pytest.approx(expected.item(), rel=1e-5)]


@pytest.mark.long("ipu-standin")
def test_class_weights_are_not_rounded_for_a_module_in_float64():
    """0.1 in float32 is another number, by 1e-8 of it."""
    module = nn.Linear(2, 3).double()
    model = ipufit.Model(module)
    model.compile("sgd", "cross_entropy")
    x = torch.ones(4, 2, dtype=torch.float64)
    y = torch.zeros(4, dtype=torch.int64)
    expected = 0.1 * nn.functional.cross_entropy(module(x), y).item()
    history = model.fit(x, y, class_weight={0: 0.1}, verbose=0).history
    assert history["loss"] == [pytest.approx(expected, rel=1e-14)]


@pytest.mark.parametrize(
    ("target", "came"),
    [
        (torch.full((10,), 0.5), "shape (10,) torch.float32 with other values"),
        (torch.ones(10, 3), "shape (10, 3) torch.float32 with other values"),
        (torch.ones(10, 3, dtype=torch.int64), "shape (10, 3) torch.int64 with other values"),
        (torch.ones(10, 3, 2), "shape (10, 3, 2) torch.float32 with other values"),
        ({"a": CLASSES, "b": CLASSES}, "several parts"),
    ],
    ids=["fractions", "labels", "tokens", "pictures", "dict"],
)
def test_class_weights_of_other_targets_are_refused(target, came):
    """A guess would weigh by something that is no class."""
    model, engine = recording()
    assert message(model.fit, X, target, class_weight={0: 2.0}, verbose=0, kind=DataError) == (
        "training data, batch 0: target must hold one class per sample for class_weight: whole "
        "numbers of shape (batch,), or one-hot rows or probabilities of shape (batch, classes), "
        f"got {came}. Use sample_weight instead: beside y, or as the third part of a batch; of "
        "several outputs, weights for each."
    )
    assert engine.programs == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1.0, 2.0], "such as {0: 1.0, 1: 5.0}, got [1.0, 2.0]."),
        ({}, "such as {0: 1.0, 1: 5.0}, got {}."),
        ({"cat": 1.0}, "a key of class_weight must be a class index from 0, got 'cat'."),
        ({-1: 1.0}, "a key of class_weight must be a class index from 0, got -1."),
        ({True: 1.0}, "a key of class_weight must be a class index from 0, got True."),
        ({torch.tensor(2.0): 1.0}, "a class index from 0, got tensor(2.)."),
        ({0: "much"}, "class_weight[0] must be a number, finite and not negative, got 'much'."),
        ({0: -1.0}, "class_weight[0] must be a number, finite and not negative, got -1.0."),
        ({0: float("nan")}, "class_weight[0] must be a number, finite and not negative, got nan."),
        ({0: float("inf")}, "class_weight[0] must be a number, finite and not negative, got inf."),
    ],
)
def test_a_class_weight_that_is_none_is_refused(value, text):
    """Before any work."""
    model, engine = recording()
    assert text in message(model.fit, X, CLASSES, class_weight=value, verbose=0)
    assert engine.programs == []


def bad(position, value):
    """Weights with one bad one."""
    found = torch.ones(10)
    found[position] = value
    return found


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_named_with_its_position(value):
    """In an array as fit starts; in a batch before the batch is used."""
    model, engine = recording()
    text = f"must be finite and not negative, but is {value:g} at position"
    with pytest.raises(DataError) as caught:
        model.fit(X, X, sample_weight=bad(7, value), verbose=0)
    assert str(caught.value) == (
        f"training data: sample_weight {text} 7. Use 0 to leave a sample out."
    )
    assert engine.programs == []
    with pytest.raises(DataError) as caught:
        model.fit(DataLoader(TensorDataset(X, X, bad(7, value)), 4), verbose=0)
    assert str(caught.value) == (
        f"training data, batch 1: sample_weight {text} 3. Use 0 to leave a sample out."
    )
    with pytest.raises(DataError) as caught:
        model.evaluate([(X, X, {"a": bad(7, value)[:, None]})], verbose=0)
    assert str(caught.value) == (
        f"evaluation data, batch 0: sample_weight['a'] {text} (7, 0). Use 0 to leave a sample out. "
        "If it is no weight, yield ((first, second), target) or a dict."
    )


@pytest.mark.long("ipu-standin")
def test_weights_that_are_all_zero_are_refused():
    """Nothing would be learned, by an array or by one update."""
    model, engine = recording()
    with pytest.raises(DataError) as caught:
        model.fit(X, X, sample_weight=np.zeros(10), verbose=0)
    assert str(caught.value) == (
        "training data: sample_weight must have a weight above zero, but all are zero, so "
        "nothing would be learned. Leave it out, or give some samples a positive weight."
    )
    assert engine.programs == []
    half = torch.tensor([1.0] * 6 + [0.0] * 4)
    with pytest.raises(DataError) as caught:
        model.fit(X, X, sample_weight=half, batch_size=2, shuffle=False, verbose=0)
    assert str(caught.value) == (
        "training data, batch 3: an update needs a sample_weight above zero, but all of its "
        "weights are zero, so nothing would be learned. Leave such samples out, or use larger or "
        "shuffled batches."
    )
    assert len(engine.programs[0].executions) == 3
    two = {"batch_size": 2, "shuffle": False, "gradient_accumulation": 2}
    model.fit(X[:8], X[:8], sample_weight=half[:8], verbose=0, **two)
    with pytest.raises(DataError, match="training data, batches 3 to 4: an update needs"):
        model.fit(
            *(X, X),
            sample_weight=half,
            batch_size=2,
            shuffle=False,
            ipus=1,
            gradient_accumulation=3,
            verbose=0,
        )
    model.evaluate(X, X, sample_weight=half, batch_size=2, verbose=0)


@pytest.mark.parametrize(
    ("weight", "text"),
    [
        (W[:7], "all parts must have the same number of samples, but input [0] has 10 and "),
        (1.0, "sample_weight must have one weight per sample, got a single number."),
        (torch.tensor(1.0), "sample_weight must have one weight per sample, got a single number."),
        (W.to(torch.complex64), "sample_weight must be real, got torch.complex64."),
        (["a"] * 10, "sample_weight[0] must be a tensor, got str."),
    ],
    ids=["short", "number", "scalar", "complex", "strings"],
)
def test_weights_of_a_batch_that_are_none_are_named(weight, text):
    """With role, batch and part."""
    model, engine = recording()
    with pytest.raises(DataError) as caught:
        model.fit([(X, X, weight)], verbose=0)
    assert str(caught.value).startswith("training data, batch 0: ")
    assert text in str(caught.value)
    assert engine.programs == []


BY_WEIGHT = ipufit.Reduction(sample_weights="mean_with_sample_weight")


def test_weights_that_begin_late_are_refused_where_a_loss_is_divided_by_them():
    """What the first batches count by can't be added to what the others count by."""
    model, _ = recording(reduction=BY_WEIGHT)
    assert message(model.fit, [(X, X), (X, X, W)], verbose=0, kind=DataError) == (
        "training data, batch 1: if the loss is divided by the sum of weights, all batches must "
        "have a sample_weight or none, but this is the first one that has. Yield (inputs, "
        "target, sample_weight) every time; a weight of 1 changes nothing."
    )
    model.fit([(X, X, None), (X, X)], verbose=0)


def test_weights_beside_others_are_refused():
    """Which of them counts nobody could tell."""
    model, _ = recording()
    both = {"sample_weight": W, "class_weight": {0: 1.0}}
    with pytest.raises(ConfigurationError) as caught:
        model.fit(X, CLASSES, verbose=0, **both)
    assert str(caught.value) == (
        "class_weight and sample_weight both say how much a sample counts. Pass one of them, or "
        "multiply both into sample_weight."
    )
    with pytest.raises(DataError) as caught:
        model.fit([(X, CLASSES, W)], class_weight={0: 1.0}, verbose=0)
    assert str(caught.value) == (
        "training data, batch 0: a batch can't have its own sample_weight together with "
        "class_weight. Leave one out, or multiply them in the dataset."
    )
    with pytest.raises(ConfigurationError) as caught:
        model.fit(X, sample_weight=W, verbose=0)
    assert str(caught.value) == ("sample_weight needs a target, but y is None. Pass y= as well.")


@pytest.mark.parametrize("name", ["sample_weight", "class_weight"])
def test_a_module_with_a_loss_of_its_own_has_no_weights(name):
    """ipufit does not see the loss of the samples."""
    model, _ = recording(None)
    with pytest.raises(ConfigurationError) as caught:
        model.fit(X, CLASSES, verbose=0, **{name: W if name == "sample_weight" else {0: 1.0}})
    assert str(caught.value) == (
        f"{name} needs a loss from compile, but the module computes its own (loss=None). Let "
        "forward take the weights, or pass loss= to compile."
    )
