"""Values as JSON and tensors: the same values come back, and nothing else is made of a document."""

import collections
import json
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ipufit.checkpoint import decode, encode
from ipufit.errors import CheckpointError
from tests.checkpoint.written import refused, same
from tests.examples import few

pytestmark = pytest.mark.both_engines

SHAPES = [(), (0,), (3,), (2, 3), (2, 0, 1)]
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def tensor_of(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


TENSORS = st.builds(tensor_of, st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.integers(0, 9))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(2**62, 2**70),
    st.floats(),
    st.text(),
    TENSORS,
)
KEYS = st.one_of(
    st.text(max_size=3),
    st.sampled_from(["a", "a.b", "b", "$tuple", "$dict", "__metadata__"]),
    st.integers(-3, 3),
)
VALUES = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        st.lists(part, max_size=3),
        st.lists(part, max_size=3).map(tuple),
        st.dictionaries(KEYS, part, max_size=4),
    ),
    max_leaves=12,
)
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from(["nan", "0x1", "-0xf", "a", "b", "0X1", " 0x1", "1", ""]),
        st.text(max_size=3),
    ),
    lambda part: st.one_of(
        st.lists(part, max_size=3),
        st.lists(st.lists(part, max_size=3), max_size=3),
        st.dictionaries(
            st.sampled_from(["$tuple", "$dict", "$float", "$int", "$tensor", "$", "a"]),
            part,
            max_size=2,
        ),
    ),
    max_leaves=12,
)


def back(value):
    """The value after a round trip through text."""
    document, tensors = encode(value)
    return decode(json.loads(json.dumps(document, allow_nan=False)), tensors)


@pytest.mark.long
@few(50)
@given(VALUES)
@example([float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 5e-324])
@example({0: 1, "0": 2, -1: (), "": [[]]})
@example([2**64, -(2**64), 2**64 - 1, 10**5000, True, 1, 1.0])
@example({"a.b": torch.ones(1), "a": {"b": torch.zeros(1), "~": torch.ones(2)}, "a/b": None})
@example("\ud800")
def test_values_come_back_as_they_were(value):
    """A tuple that became a list, or a key 0 that became "0", breaks a state_dict."""
    assert same(back(value), value)


@pytest.mark.long
@given(JSON)
@example({"$dict": [[1, 2], [1, 3]]})
@example({"$dict": [[True, 2]]})
@example({"$tensor": "a", "$int": "0x1"})
@example([{"$tensor": "a"}, {"$tensor": "a"}])
@example(float("nan"))
def test_a_hostile_document_gives_a_value_or_the_error(document):
    """Whatever it is: a file may come from a stranger."""
    tensors = {"a": torch.ones(1)}
    try:
        value = decode([document, {"$tensor": "a"}], tensors)
    except CheckpointError:
        return
    assert same(back(value), value)


def test_optimizers_state_comes_back():
    """The state that checkpoints are for, whose keys are numbers."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, betas=(0.5, 0.9))
    for _ in range(3):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    kept = back(optimizer.state_dict())
    assert same(kept, optimizer.state_dict())
    document, tensors = encode({"optimizer": optimizer.state_dict()})
    assert "optimizer.state.0.exp_avg" in tensors
    assert decode(document, tensors)["optimizer"]["param_groups"][0]["betas"] == (0.5, 0.9)


def test_subclasses_of_dict_become_dicts():
    """Schedulers and metrics keep Counter and OrderedDict; their order stays."""
    ordered = collections.OrderedDict(b=1, a=2)
    ordered.move_to_end("b")
    assert same(back(ordered), {"a": 2, "b": 1})
    assert same(back(collections.Counter("aab")), {"a": 2, "b": 1})
    assert same(back(collections.defaultdict(list, {3: [1]})), {3: [1]})


def test_tensors_are_copies_on_the_host_with_readable_names():
    """Training goes on while they are written; and a name must not collide with another."""
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    value = {
        "net": [weight.t(), {"a b": weight, "a/b": weight}],
        "__metadata__": weight,
        7: {"": weight},
        "c": torch.ones(2, dtype=torch.complex64).conj(),
    }
    document, tensors = encode(value)
    names = ["net.0", "net.1.a_b", "net.1.a_b~2", "__metadata__~2", "7._", "c"]
    assert list(tensors) == names
    for tensor in tensors.values():
        assert type(tensor) is torch.Tensor
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert not tensor.is_conj()
    with torch.no_grad():
        weight.zero_()
    assert tensors["net.0"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert list(encode(weight)[1]) == ["value"]
    assert decode(document, tensors)["net"][1]["a/b"] is tensors["net.1.a_b~2"]


Point = collections.namedtuple("Point", "x y")


class Count(int):
    """Would come back as an int."""


HOLDS = (
    "a checkpoint holds dicts, lists, tuples, None, bool, int, float, str and dense tensors, but "
)
KEYS_ARE = (
    f"{HOLDS}{{}} has a key of type {{}}, where a key is a string, or an int of at most 64 bits. "
    "Convert it, or leave it out of the state."
)


@pytest.mark.parametrize(
    ("value", "came"),
    [
        ({"a": [0, {1}]}, "'a.1' is of type set"),
        (Point(1, 2), f"the whole is of type {__name__}.Point"),
        ([Count(3)], f"'0' is of type {__name__}.Count"),
        ({"f": test_values_come_back_as_they_were}, "'f' is of type function"),
        ({"d": torch.float32}, "'d' is of type torch.dtype"),
        (b"", "the whole is of type bytes"),
        ({"w": torch.eye(2).to_sparse()}, "'w' is a tensor of layout torch.sparse_coo"),
        ({"w": torch.empty(2, device="meta")}, "'w' is a tensor on the device meta"),
        (
            nn.UninitializedParameter(),
            "the whole is of type torch.nn.parameter.UninitializedParameter",
        ),
    ],
)
def test_other_types_are_refused_by_their_place(value, came):
    """Left out silently, or as something else, a part would be missing on the day it is needed."""
    refused(lambda: encode(value), HOLDS + came + ". Convert it, or leave it out of the state.")


@pytest.mark.filterwarnings("ignore:torch.quantize:UserWarning")
def test_quantized_tensors_are_refused():
    """Their scale is in no file of tensors."""
    tensor = torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)
    refused(
        lambda: encode({"w": tensor}),
        HOLDS + "'w' is a quantized tensor. Convert it, or leave it out of the state.",
    )


@pytest.mark.parametrize(
    ("key", "kind"), [(1.5, "float"), ((1,), "tuple"), (True, "bool"), (2**64, "int")]
)
def test_other_keys_are_refused(key, kind):
    """JSON would make strings of them."""
    refused(lambda: encode({"a": {key: 1}}), KEYS_ARE.format("'a'", kind))
    refused(lambda: encode({key: 1}), KEYS_ARE.format("the whole", kind))


def test_what_is_nested_in_itself_is_refused():
    """It would have no end."""
    loop = {"a": {}}
    loop["a"]["b"] = loop
    refused(
        lambda: encode(loop),
        HOLDS + "'a.b.a' contains itself, or is deeper than 100 levels. Convert it, or leave it "
        "out of the state.",
    )


def nested(levels, inner=0):
    """So many containers around a value, each of another kind."""
    value = inner
    for level in range(levels):
        value = [[value], (value,), {"a": value}, {1: value}][level % 4]
    return value


def test_a_hundred_levels_come_back():
    """The limit itself is allowed, in the document too."""
    assert same(back(nested(100)), nested(100))
    with pytest.raises(CheckpointError):
        encode(nested(101))


DAMAGED = "the state in a checkpoint must be as ipufit wrote it, but "
CURE = ". Resume from another checkpoint, or restore this one from a copy."


@pytest.mark.parametrize(
    ("document", "came"),
    [
        ({"$pickle": "x"}, "the whole has the tag '$pickle', which is unknown or not alone"),
        ({"$int": "0x1", "b": 1}, "the whole has the tag '$int', which is unknown or not alone"),
        ({"b": 1, "$int": "0x1"}, "the whole has the tag 'b', which is unknown or not alone"),
        ([{"$tuple": {}}], "'0' is a tuple of a value of type dict"),
        ({"a": {"$dict": "ab"}}, "'a' is a dict of 'ab'"),
        ({"$dict": [[1]]}, "the whole is a dict whose parts are no pairs of a key and a value"),
        ({"$dict": ["ab"]}, "the whole is a dict whose parts are no pairs of a key and a value"),
        (
            {"$dict": [[1.5, 1]]},
            "the whole is a dict whose parts are no pairs of a key and a value",
        ),
        ({"$dict": [[1, 1], [1, 1]]}, "the whole is a dict that has the key '1' twice"),
        ({"$dict": [["1", 1], ["1", 1]]}, "the whole is a dict that has the key '1' twice"),
        ({"$float": "1.5"}, "the whole is a float written as '1.5'"),
        ({"$float": 1}, "the whole is a float written as a value of type int"),
        ({"$int": "0xg"}, "the whole is an int written as '0xg'"),
        ({"$int": 3}, "the whole is an int written as a value of type int"),
        ({"$tensor": 3}, "the whole is a tensor named by a value of type int"),
        ({"$tensor": "b"}, "the whole is the tensor 'b', which is missing in the files"),
        (
            [{"$tensor": "a"}, {"$tensor": "a"}],
            "'1' is the tensor 'a', which is used twice",
        ),
        ([], "the whole does not name the tensor 'a' of its files"),
        (2**64, "the whole is a value of type int"),
        (float("nan"), "the whole is a value of type float"),
        ((), "the whole is a value of type tuple"),
        ({1: 2}, "the whole has the tag a value of type int, which is unknown or not alone"),
        ({"b" * 200: [()]}, f"'{'b' * 80}'... is a value of type tuple"),
        (
            json.loads("[" * 102 + "]" * 102),
            "'0.0.0' contains itself, or is deeper than 100 levels",
        ),
    ],
)
def test_a_document_that_encode_did_not_make_is_refused(document, came):
    """With its place, so that it can be told from one that was damaged."""
    refused(lambda: decode(document, {"a": torch.ones(1)}), DAMAGED + came + CURE)


def test_tensors_that_nothing_names_are_counted():
    """A part that was cut out of the document would be lost silently."""
    tensors = {"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}
    refused(
        lambda: decode({"$tensor": "b"}, tensors),
        DAMAGED + "the whole does not name the tensor 'a' and 1 more of its files" + CURE,
    )


def test_long_numbers_take_no_long_time():
    """Python refuses, or takes quadratic time, to read so many decimal digits."""
    long = {"$int": "0x" + "f" * 2_000_000}
    assert decode(long, {}).bit_length() == 8_000_000
    assert sys.getsizeof(encode(decode(long, {}))[0]) < 1000
