"""Arguments that are tensors or arrays: one number is read as one, anything else named briefly."""

import math

import numpy as np
import pytest
import torch

import ipufit
from ipufit.callbacks import EarlyStopping
from ipufit.data import LengthBuckets
from ipufit.errors import ConfigurationError, PartitionError, shown
from ipufit.optim.schedules.curves import Cosine
from ipufit.utils.error_collector import as_float, as_list
from tests.nets import MLP
from tests.told import message

BIG = np.arange(1e5).reshape(1000, 100)
PAIR = torch.tensor([1, 2])
SAMPLES = [(torch.ones(i % 3 + 1), 0) for i in range(12)]
X, Y = torch.ones(8, 12), torch.zeros(8, dtype=torch.int64)


def fit(**options):
    """A fit of a small model."""
    model = ipufit.Model(MLP().float())
    model.compile("sgd", "cross_entropy", **options.pop("compile", {}))
    model.fit(X, Y, **{"verbose": 0, "seed": 0, **options})


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2.0),
        (np.float32(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([3]), 3.0),
        *((each, math.nan) for each in (True, "2", b"2", None, PAIR, BIG, 1j, torch.tensor(True))),
    ],
    ids=repr,
)
def test_one_number_of_any_type_is_a_float(value, number):
    """NaN stands for what is none, so no comparison takes it for good."""
    assert as_float(value) == number or (math.isnan(number) and math.isnan(as_float(value)))


def test_what_has_elements_is_a_list():
    """A text has characters and a dict keys, which nobody means as a list of numbers."""
    assert as_list((1, 2)) == as_list(np.array([1, 2])) == [1, 2]
    assert as_list(range(2)) == [0, 1]
    assert [as_list(each) for each in ("12", b"12", {1: 2}, 3, torch.tensor(3))] == [None] * 5


def test_a_long_value_is_shown_briefly():
    """An error of a thousand numbers hides what it says."""
    assert shown(PAIR) == "tensor([1, 2])"
    assert shown(BIG) == "ndarray of shape (1000, 100)"
    assert shown(torch.eye(3)) == "Tensor of shape (3, 3)"
    assert len(shown(list(range(10**4)))) < 400
    assert len(shown("x" * 10**4)) < 100


FRACTION = "validation_split must be a fraction of at least 0.0 and less than 1.0"
VERBOSE = "verbose must be 0 (silent), 1 (bar), 2 (one line an epoch), 'rich' or 'auto'"
CALLBACKS = "callbacks must be a list of ipufit.callbacks.Callback objects"
SPAN = "warmup of Cosine must be a whole number of updates, or a share of the run as a float less"
LENGTHS = "lengths of LengthBuckets must be an integer for each of the 12 samples"
LAYERS = "layers_per_ipu must list a number of layers for every IPU, -1 for an even share"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fit(validation_split=PAIR * 0.25), f"{FRACTION}, got tensor([0.2500, 0.5000])."),
        (lambda: fit(validation_split=BIG), f"{FRACTION}, got ndarray of shape (1000, 100)."),
        (lambda: fit(verbose=PAIR), f"{VERBOSE}, got tensor([1, 2])."),
        (lambda: fit(verbose=BIG), f"{VERBOSE}, got ndarray of shape (1000, 100)."),
        (lambda: fit(shuffle=BIG), "shuffle must be True, False or None, got ndarray of shape"),
        (lambda: fit(seed=BIG), "seed must be an integer or None, got ndarray of shape"),
        (lambda: fit(class_weight=BIG), "by class index, such as {0: 1.0, 1: 5.0}, got ndarray of"),
        (
            lambda: fit(class_weight={0: BIG}),
            "class_weight[0] must be a number, finite and not negative, got",
        ),
        (lambda: fit(callbacks=torch.tensor(2)), f"{CALLBACKS}, got tensor(2)."),
        (lambda: fit(callbacks=BIG), f"{CALLBACKS}, got ndarray of shape (100,)."),
        (lambda: ipufit.Model(BIG), "Model takes a torch.nn.Module object, got ndarray of shape"),
        (lambda: Cosine(warmup=torch.tensor(1.5)), SPAN),
        (lambda: Cosine(warmup=PAIR), SPAN),
        (lambda: LengthBuckets(SAMPLES, 4, lengths=torch.ones(12)), f"{LENGTHS}, got tensor(1.)."),
        (lambda: LengthBuckets(SAMPLES, 4, lengths=torch.tensor(3)), f"{LENGTHS}, got 1. Pass"),
        (lambda: LengthBuckets(SAMPLES, 4, lengths=BIG), f"{LENGTHS}, got ndarray of shape (100,)"),
        (
            lambda: fit(compile={"parallel": ipufit.Parallel(layers_per_ipu=torch.tensor(2))}),
            f"{LAYERS} of the rest, got tensor(2).",
        ),
        (
            lambda: fit(compile={"parallel": ipufit.Parallel(layers_per_ipu=BIG)}),
            f"{LAYERS} of the rest, got ndarray of shape (1000, 100).",
        ),
        (
            lambda: ipufit.Validation((X, Y), freq=torch.tensor(0.5)),
            "freq of Validation must be an",
        ),
        (lambda: ipufit.Precision(loss_scale=BIG), "Precision.loss_scale must be None, a positive"),
        (lambda: ipufit.Clip(value=BIG), "Clip.value must be a positive number, got ndarray of"),
        (
            lambda: EarlyStopping(min_delta=PAIR),
            "min_delta of EarlyStopping must be a finite number",
        ),
    ],
)
def test_an_array_for_one_number_is_named(call, text):
    """NumPy's and torch's own errors name neither the argument nor what to pass."""
    told = message(call, kind=(ConfigurationError, PartitionError))
    assert text in told
    assert len(told) < 300


def test_a_tensor_of_one_number_is_that_number():
    """Settings often come from a checkpoint or a search, as tensors."""
    assert ipufit.Clip(value=torch.tensor(2)) == ipufit.Clip(value=2.0)
    assert ipufit.EMA(torch.tensor(0.5)) == ipufit.EMA(0.5)
    assert ipufit.Validation(freq=torch.tensor(2)).freq == 2
    curve = Cosine(warmup=torch.tensor(3), total=np.int64(9))
    assert (curve.warmup, type(curve.warmup)) == (3, int)
    assert (curve.total, type(curve.total)) == (9, int)
    assert Cosine(warmup=torch.tensor(0.25)).warmup == 0.25
