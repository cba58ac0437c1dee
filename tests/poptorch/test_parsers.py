import collections
import logging
import sys

import pytest
import torch

from ipufit.poptorch import _parsers as parsers
from ipufit.poptorch._tracing import Trace, traced
from ipufit.poptorch.poptorch_core import Error

Pair = collections.namedtuple("Pair", ["left", "right"])


class Box:
    def __init__(self, first, second, label):
        self.first, self.second, self.label = first, second, label


class SmallBox(Box):
    pass


class BoxParser(parsers.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.first
        yield struct.second

    def reconstruct(self, original_structure, tensor_iterator):
        return type(original_structure)(
            next(tensor_iterator), next(tensor_iterator), original_structure.label
        )


@pytest.fixture
def box_parser():
    parsers.registerCustomArgParser(Box, BoxParser())
    yield
    parsers.registerCustomArgParser(Box, None)


def numbers(count):
    return [torch.tensor(float(i)) for i in range(count)]


def test_tensors_come_out_of_nested_structures_in_order():
    a, b, c, d = numbers(4)
    found = parsers.flattenTensorStructure([a, {"k": (b, 3, None)}, "text", Pair(c, [d])])
    assert [id(t) for t in found] == [id(t) for t in (a, b, c, d)]


def test_a_canonical_structure_says_the_order_of_keys():
    a, b = numbers(2)
    found = parsers.flattenTensorStructure([{"y": a, "x": b}], [{"x": a, "y": a}])
    assert [id(t) for t in found] == [id(b), id(a)]


def test_a_structure_is_rebuilt_with_its_own_types():
    a, b, c, d = numbers(4)
    ordered = collections.OrderedDict([("z", a), ("a", 7)])
    ordered.note = "kept"
    missing = collections.defaultdict(list, x=b)
    built = parsers.reconstructTensorStructure(
        [ordered, missing, Pair(c, "text"), (d, None)], iter("wxyz")
    )
    assert built == [{"z": "w", "a": 7}, {"x": "x"}, Pair("y", "text"), ("z", None)]
    assert type(built[0]) is collections.OrderedDict
    assert built[0].note == "kept"
    assert list(built[0]) == ["z", "a"]
    assert built[1]["new"] == []
    assert type(built[2]) is Pair
    assert ordered["z"] is a
    assert list(missing) == ["x"]


def test_a_filter_keeps_the_tensors_it_refuses():
    a, b = numbers(2)
    built = parsers.reconstructTensorStructure((a, b), ["new"], lambda t: t is b)
    assert built == (a, "new")


def test_too_few_values_are_an_error():
    with pytest.raises(Error) as caught:
        parsers.reconstructTensorStructure(numbers(3), numbers(2))
    assert caught.value.message == (
        "a structure holds more tensors than there are values for it, which are 2. Pass one value "
        "for each tensor; a custom parser's reconstruct() takes as many as its yieldTensors() "
        "yields."
    )


@pytest.mark.usefixtures("box_parser")
@pytest.mark.parametrize("kind", [Box, SmallBox])
def test_a_custom_parser_serves_its_type_and_subclasses(kind):
    a, b, c = numbers(3)
    value = [kind(a, b, "label"), c]
    assert [id(t) for t in parsers.flattenTensorStructure(value)] == [id(a), id(b), id(c)]
    built = parsers.reconstructTensorStructure(value, iter("xyz"))
    assert type(built[0]) is kind
    assert vars(built[0]) == {"first": "x", "second": "y", "label": "label"}
    assert built[1] == "z"


@pytest.mark.usefixtures("box_parser")
def test_the_parser_of_the_exact_type_goes_first():
    class Nothing(parsers.ICustomArgParser):
        def yieldTensors(self, struct):
            return iter(())

        def reconstruct(self, original_structure, tensor_iterator):
            return original_structure

    parsers.registerCustomArgParser(SmallBox, Nothing())
    try:
        assert parsers.flattenTensorStructure(SmallBox(*numbers(2), "label")) == []
        assert len(parsers.flattenTensorStructure(Box(*numbers(2), "label"))) == 2
    finally:
        parsers.registerCustomArgParser(SmallBox, None)


def test_none_removes_a_parser_also_one_that_is_not_there():
    parsers.registerCustomArgParser(Box, BoxParser())
    parsers.registerCustomArgParser(Box, None)
    parsers.registerCustomArgParser(Box, None)
    assert parsers.parser_of(Box(*numbers(2), "label")) is None


def test_something_else_is_no_parser():
    with pytest.raises(Error) as caught:
        parsers.registerCustomArgParser(Box, 3)
    assert caught.value.message == (
        "arg_parser must inherit from ICustomArgParser, but registerCustomArgParser(Box, ...) got "
        "3. Pass an instance of a subclass, or None to remove the parser."
    )


def test_without_poptorch_geometric_its_parsers_are_refused_by_name():
    with pytest.raises(Error) as caught:
        parsers.registerGeometricCustomArgParsers()
    assert caught.value.message == (
        "registerGeometricCustomArgParsers() needs the package 'poptorch_geometric', which comes "
        "with the Poplar SDK, and 'torch_geometric', but 'poptorch_geometric' is not installed. "
        "Register a parser for each of your types with registerCustomArgParser() instead."
    )


def test_poptorch_geometric_registers_its_own_parsers(monkeypatch, tmp_path):
    package = tmp_path / "poptorch_geometric"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "types.py").write_text(
        "calls = []\ndef registerCustomArgParsers():\n    calls.append(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        parsers.registerGeometricCustomArgParsers()
        assert sys.modules["poptorch_geometric.types"].calls == [1]
    finally:
        for name in [n for n in sys.modules if n.startswith("poptorch_geometric")]:
            del sys.modules[name]


def test_attributes_are_read_as_json():
    assert parsers.accessAttributes('{"alpha": [1, 2]}') == {"alpha": [1, 2]}


def test_attributes_are_found_by_number_and_no_number_is_followed(monkeypatch):
    """The number of an object is its address, and text may come from anywhere."""
    known = {"alpha": 1.5}
    monkeypatch.setattr(parsers, "attributes_lists", [{}, known])
    assert parsers.accessAttributes(parsers.ATTR_PREFIX + hex(id(known))) is known
    assert parsers.accessAttributes(parsers.ATTR_PREFIX + hex(id(None))) == {}
    with pytest.raises(ValueError, match="no custom_op of this process has the attributes"):
        parsers.accessAttributes("attr:0x10")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "Wrong type for attribute_id_str: expected a string, got int."),
        (
            "alpha",
            "Invalid attribute_id_str: expected a JSON object or 'attr:' and a number in "
            "hexadecimal, got 'alpha'.",
        ),
    ],
)
def test_other_attributes_are_refused(value, text):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parsers.accessAttributes(value)
    assert str(caught.value) == text


def test_a_tensor_has_one_number_while_a_model_is_recorded():
    a, b = numbers(2)
    with traced(Trace(training=False)):
        first = parsers.getIpuTensorId(a)
        assert parsers.getIpuTensorId(b) != first
        assert parsers.getIpuTensorId(a) == first


def test_outside_of_a_recording_no_tensor_has_a_number():
    with pytest.raises(Error) as caught:
        parsers.getIpuTensorId(torch.zeros(1))
    assert caught.value.message == (
        "You may only call getIpuTensorId on an IPU tensor, and outside of a model's forward no "
        "tensor is one. Call it inside forward, behind isRunningOnIpu()."
    )


def test_nothing_is_logged(caplog):
    with caplog.at_level(logging.DEBUG):
        parsers.flattenTensorStructure({"a": torch.zeros(1)})
    assert not caplog.records
