import collections
import json
import logging
import operator
import os
import threading
import zipfile

import pytest
import safetensors.torch
import torch
from torch import fx, nn

from ipufit.poptorch import _program_files as files
from ipufit.poptorch._arguments import ArgumentParser, Arguments
from ipufit.poptorch._codec import InvalidContent, make_codec
from ipufit.poptorch._object_files import (
    UnknownClass,
    WeightsOnly,
    module_from_values,
    module_to_values,
)
from ipufit.poptorch._program_files import ExecutableCache
from ipufit.poptorch.enums import OutputMode
from ipufit.poptorch.poptorch_core import Error
from ipufit.tracing.capture import capture

Pair = collections.namedtuple("Pair", ["left", "right"])


class Named(collections.OrderedDict):
    made = 0

    def __init__(self, *args):
        Named.made += 1
        super().__init__(*args)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "model.poptorch")


def kept(path, value):
    files.write_file(path, {"value": value})
    return files.read_file(path)["value"]


VALUES = [
    None,
    True,
    2**70,
    -0.1,
    float("inf"),
    -float("inf"),
    1 + 2j,
    "text",
    [1, [2.5, None]],
    (1, (), "a"),
    {"a": 1, 2: (3,)},
    {(1, None): "a", "$node": 2.5},
    {1, (2,)},
    torch.Size([2, 3]),
    slice(1, None, 2),
    torch.float16,
    torch.device("cpu"),
    torch.contiguous_format,
    torch.strided,
    OutputMode.EveryN,
    Pair(1, "b"),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back_as_they_were(path, value):
    found = kept(path, value)
    assert found == value
    assert type(found) is type(value)


def test_not_a_number_comes_back(path):
    found = kept(path, float("nan"))
    assert found != found


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.int64],
)
def test_tensors_come_back_bit_by_bit(path, dtype):
    tensor = (torch.arange(6) % 2).to(dtype).reshape(2, 3)
    for value in (tensor, tensor.t(), tensor[0, 0], tensor[:0]):
        found = kept(path, value)
        assert found.dtype is dtype
        assert torch.equal(found, value)


def test_one_tensor_in_two_places_stays_one(path):
    weight = nn.Parameter(torch.ones(2), requires_grad=False)
    plain = torch.zeros(2)
    found = kept(path, [weight, {"tied": weight}, plain, (plain,)])
    assert found[0] is found[1]["tied"]
    assert type(found[0]) is nn.Parameter
    assert not found[0].requires_grad
    assert found[2] is found[3][0]


def test_a_tensor_without_values_is_its_shape(path):
    found = kept(path, torch.empty(3, 2, dtype=torch.int8, device="meta"))
    assert (found.device.type, found.dtype, found.shape) == ("meta", torch.int8, (3, 2))


def test_a_known_dict_type_is_kept_without_its_constructor(path):
    value = Named([("b", 1), ("a", 2)])
    before = Named.made
    found = kept(path, value)
    assert type(found) is Named
    assert list(found.items()) == [("b", 1), ("a", 2)]
    assert Named.made == before


def test_arguments_of_a_call_are_kept_for_comparison(path):
    class Net(nn.Module):
        def forward(self, x, y, *, k=2):
            return x

    parser = ArgumentParser(Net())
    given = parser(({"a": torch.ones(2)}, Pair(torch.ones(1), 5)), {})
    part = given.without_values()
    args, names, kwargs = kept(path, (part.args, part.names, part.kwargs))
    compiled = Arguments(args, names, kwargs)
    given.check_like(compiled)
    with pytest.raises(Error, match="Value mismatch for k: expected 2 but got 3"):
        parser(({"a": torch.ones(2)}, Pair(torch.ones(1), 5)), {"k": 3}).check_like(compiled)


def test_what_a_file_can_not_hold_is_refused_and_none_is_written(path):
    class Odd:
        pass

    for value in (Odd(), {"a": [lambda: 0]}, torch.ones(1).to_sparse(), torch.ones(1) * 1j):
        with pytest.raises(Error):
            files.write_file(path, {"value": value})
    with pytest.raises(Error) as caught:
        files.write_file(path, {"value": {"a": [frozenset()]}})
    assert caught.value.message == (
        "a file holds tensors, numbers, texts, None, and lists, tuples, sets and dicts of them, "
        "but 'value.a.0' is of type frozenset. Use one of these instead."
    )
    with pytest.raises(Error) as caught:
        files.write_file(path, {"value": torch.ones(1) * 1j})
    assert caught.value.message == (
        "a file holds tensors of real numbers, but value is of torch.complex64. Convert it before "
        "you save."
    )
    assert os.listdir(os.path.dirname(path)) == []


def test_an_older_file_stays_when_writing_fails(path, monkeypatch):
    kept(path, 1)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        kept(path, 2)
    assert files.read_file(path)["value"] == 1
    assert os.listdir(os.path.dirname(path)) == ["model.poptorch"]


def test_a_folder_gets_a_file_inside_and_parents_are_made(tmp_path, caplog):
    assert files.file_to_write(str(tmp_path)) == str(tmp_path / "model.poptorch")
    assert [record.getMessage() for record in caplog.records] == [
        f"save(): {tmp_path} is a directory, saving model to {tmp_path / 'model.poptorch'}"
    ]
    deep = tmp_path / "a" / "b" / "model.pt"
    assert files.file_to_write(deep) == str(deep)
    assert deep.parent.is_dir()
    assert files.file_to_write("model.pt") == "model.pt"
    deep.write_text("")
    with pytest.raises(AssertionError) as caught:
        files.file_to_write(deep / "x")
    assert str(caught.value) == (
        f"Destination folder {deep} is not a directory. Choose another path for the file."
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.head = nn.Linear(32, 3)
        self.scale = torch.tensor(0.5)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = self.head(x.flatten(1)) * self.scale + torch.arange(3, dtype=torch.float64)[[0, 2, 1]]
        return x.clamp(max=float("inf")), x.max(1)[1]


def trained_step(net):
    """Forward and backward of a net with every kind of node that a recording has."""
    parameters, buffers = dict(net.named_parameters()), dict(net.named_buffers())

    def step(x, *tensors):
        held = dict(zip([*parameters, *buffers], tensors))
        for name in parameters:
            held[name] = held[name].detach().requires_grad_()
        out, best = torch.func.functional_call(net, held, (x,))
        loss = nn.functional.cross_entropy(out, best)
        gradients = torch.autograd.grad(loss, [held[name] for name in parameters])
        return [out, best, loss, *gradients]

    tensors = [*parameters.values(), *buffers.values()]
    return capture(step, [torch.ones(2, 1, 6, 6, dtype=torch.float64), *tensors]), tensors


@pytest.mark.long
def test_a_program_that_came_back_computes_the_same(path):
    torch.manual_seed(0)
    graph, tensors = trained_step(Net().double())
    found = kept(path, {"train": graph})["train"]
    x = torch.randn(2, 1, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        other = [tensor.clone() for tensor in tensors]
        expected = graph(x, *tensors)
        for got, wanted in zip(found(x, *other), expected):
            assert torch.equal(got, wanted)
        for got, wanted in zip(other, tensors):  # running statistics changed alike
            assert torch.equal(got, wanted)
    names = [node.name for node in graph.graph.nodes]
    assert [node.name for node in found.graph.nodes] == names


def graph_to_json(graph):
    """A program as JSON, and the tensors that it refers to."""
    document, tensors = make_codec().encode(graph)
    return document["$graph"], tensors


def graph_from_json(content, tensors):
    """The program of such JSON."""
    return make_codec().decode({"$graph": content}, tensors)


def test_a_program_inside_a_program_comes_back():
    inner = capture(lambda x: [x * 2], [torch.ones(2)])
    outer = fx.Graph()
    root = nn.Module()
    root.inner = inner
    x = outer.placeholder("x")
    attribute = outer.create_node("get_attr", "inner")
    outer.output([x, attribute])
    content, tensors = graph_to_json(fx.GraphModule(root, outer))
    found = graph_from_json(json.loads(json.dumps(content)), tensors)
    assert torch.equal(found.inner(torch.ones(2))[0], torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("kind", "target", "text"),
    [
        ("call_function", os.getcwd, "calls <built-in function getcwd>, which a file can't hold"),
        ("call_function", torch.ops.aten.from_file.default, "calls aten.from_file.default, which"),
        ("call_method", "add", r"holds a node of kind 'call_method' \(add\), which"),
    ],
)
def test_a_program_that_a_file_can_not_name_is_not_written(kind, target, text):
    graph = fx.Graph()
    node = graph.create_node(kind, target, (graph.placeholder("x"),))
    graph.output([node])
    with pytest.raises(Error, match=text):
        graph_to_json(fx.GraphModule(nn.Module(), graph))


def node(op, name, target=None, args=(), kwargs=()):
    made = {"op": op, "name": name}
    if target is not None:
        made["target"] = target
    if op in ("call_function", "output"):
        made.update(args=list(args), kwargs=list(kwargs))
    return made


def program(*nodes, attributes=()):
    return {"nodes": list(nodes), "attributes": list(attributes)}


X = node("placeholder", "x")
OUT = node("output", "output", args=[[{"$node": "x"}]])


def test_the_smallest_program_is_sound():
    assert graph_from_json(program(X, OUT), {})(3) == [3]


HOSTILE = {
    "'os.system.default' is not an operator": program(
        X, node("call_function", "y", "os.system.default", ["true"]), OUT
    ),
    "'aten.from_file.default' is not an operator": program(
        X, node("call_function", "y", "aten.from_file.default", ["/etc/passwd"]), OUT
    ),
    "'aten.__init__.default'": program(X, node("call_function", "y", "aten.__init__.default"), OUT),
    "'aten.add.__class__'": program(X, node("call_function", "y", "aten.add.__class__"), OUT),
    "'aten.no_such_thing.default'": program(
        X, node("call_function", "y", "aten.no_such_thing.default"), OUT
    ),
    "'call_module' is not a kind of node": program(X, node("call_module", "y", "z"), OUT),
    "'call_method' is not a kind of node": program(X, node("call_method", "y", "z"), OUT),
    "'x); import os; (' can't be the name of a value": program(
        node("placeholder", "x); import os; ("), OUT
    ),
    "'import' can't be the name of a value": program(node("placeholder", "import"), OUT),
    "'a b' can't be the name of an argument": program(
        X, node("call_function", "y", "aten.add.Tensor", [1], [["a b", 1]]), OUT
    ),
    "'x' can't be the name of a value": program(X, X, OUT),
    "uses 'y' before it is computed": program(
        X, node("call_function", "z", "aten.relu.default", [{"$node": "y"}]), OUT
    ),
    "reads '__class__', which it does not hold": program(
        X, node("get_attr", "y", "__class__"), OUT
    ),
    "'forward' can't be a name in a program": program(X, OUT, attributes=[["forward", 1]]),
    "'c' is neither a tensor nor a program": program(X, OUT, attributes=[["c", 1]]),
    "is the tensor 't7', which is missing in the files": program(
        X, OUT, attributes=[["c", {"$tensor": "t7"}]]
    ),
    "a program has no output": program(X),
    "a program has no nodes": {"attributes": []},
    "a node of a program has no kind": program(3),
    "the attributes of a program must be pairs": program(X, OUT, attributes=[1]),
    "has the tag '$pickle', which is unknown or not alone": program(
        X, node("output", "output", args=[{"$pickle": "gASVCgAAAAAAAAA="}])
    ),
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_program_is_refused(text):
    with pytest.raises(InvalidContent) as caught:
        graph_from_json(HOSTILE[text], {})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"$tensor": "a", "$tuple": []}, "'value' has the tag '$tensor', which is unknown or not"),
        ({"$__class__": 1}, "'value' has the tag '$__class__', which is unknown or not alone"),
        ({"$tuple": 3}, "'value' is a tuple of a value of type int"),
        ({"$float": "1e5"}, "'value' is a float written as '1e5'"),
        ({"$dtype": "load"}, "'load' is not a dtype"),
        ({"$dtype": 3}, "3 is not a dtype"),
        ({"$device": "fpga"}, "'fpga' is not a device"),
        ({"$device": "cuda:x"}, "'value' is not a valid device: "),
        ({"$size": [-1]}, "-1 is not a size"),
        ({"$shape": [{"$dtype": "float32"}, [1.5]]}, "1.5 is not a size"),
        ({"$shape": [3, [1]]}, "3 is not a dtype"),
        ({"$enum": ["OutputMode", "Nothing"]}, "OutputMode.Nothing is not an option"),
        ({"$enum": ["enum", "Enum"]}, "enum.Enum is not an option"),
        ({"$slice": []}, "'value' is not a valid slice: "),
        ({"$slice": [1, 2, 3, 4]}, "'value' is not a valid slice: "),
        ({"$dict": [[[], 1]]}, "'value' is a dict whose parts are no pairs of a key and a value"),
        ({"$pairs": [[[], 1]]}, "'value' is not a valid pairs: "),
        ({"$mapping": ["os:_Environ", []]}, "it has a dict of type 'os:_Environ', which is not"),
        ({"$mapping": ["os:system", []]}, "it has a dict of type 'os:system', which is not"),
        ({"$mapping": ["os", []]}, "'os' is not the name of a class"),
        ({"$namedtuple": ["x:Y", ["a; b"], [1]]}, "['a; b'] are not the names of fields"),
        ({"$namedtuple": ["x:Y", ["a"], []]}, "a 'x:Y' has 1 fields"),
        ({"$parameter": ["t0"]}, "'value' is not a valid parameter: "),
        ({"$tensor": ["t0"]}, "'value' is a tensor named by a value of type list"),
    ],
    ids=str,
)
def test_a_malformed_value_is_refused(path, data, text):
    write_zip(path, metadata({"value": data}))
    with pytest.raises(Error) as caught:
        files.read_file(path)
    assert caught.value.message.startswith(f"Invalid file {path}: ")
    assert text in caught.value.message
    assert caught.value.message.endswith(
        "Write it anew with compileAndExport() or save() of this version; files of PopTorch itself "
        "can't be read here."
    )


def test_a_namedtuple_that_is_not_imported_is_made_anew(path):
    write_zip(path, metadata({"value": {"$namedtuple": ["gone:Point", ["x", "y"], [1, 2]]}}))
    found = files.read_file(path)["value"]
    assert (type(found).__name__, found.x, found.y) == ("Point", 1, 2)


def metadata(values, **changes):
    content = {"format": "ipufit.poptorch", "format_version": 2, "torch": "x", "values": values}
    return json.dumps({**content, **changes})


def write_zip(path, text, tensors=None, extra=None, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("metadata.json", text)
        file.writestr("tensors.safetensors", tensors or safetensors.torch.save({}))
        for name in extra or []:
            file.writestr(name, "x")


def message(path):
    with pytest.raises(Error) as caught:
        files.read_file(path)
    text = caught.value.message
    start, end = f"Invalid file {path}: ", ". Write it anew"
    assert text.startswith(start)
    assert end in text
    return text[len(start) : text.index(end)]


def test_a_file_of_another_kind_is_refused(path, tmp_path):
    assert message(path) == "it can't be read (No such file or directory)"
    assert message(str(tmp_path)) == "it can't be read (Is a directory)"
    with open(path, "wb") as file:
        file.write(b"\x80\x04K\x01.")
    assert message(path).startswith("it is damaged, or of another kind (")


def test_a_truncated_file_is_refused(path):
    kept(path, torch.arange(1000))
    with open(path, "rb") as file:
        content = file.read()
    for length in (0, 10, 100, len(content) // 2, len(content) - 1):
        with open(path, "wb") as file:
            file.write(content[:length])
        assert message(path).startswith("it is damaged, or of another kind (")


def test_a_flipped_byte_is_noticed(path):
    kept(path, torch.arange(1000))
    with open(path, "rb") as file:
        content = bytearray(file.read())
    content[len(content) // 2] ^= 1
    with open(path, "wb") as file:
        file.write(content)
    assert "Bad CRC-32 for file 'tensors.safetensors'" in message(path)


@pytest.mark.parametrize("extra", [["../evil"], ["/etc/evil"], ["metadata.json"], ["data.pkl"]])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_other_entries_are_refused(path, extra):
    write_zip(path, metadata({}), extra=extra)
    assert message(path) == "it must hold metadata.json and tensors.safetensors, and nothing else"


def test_a_compressed_file_is_refused(path):
    """It could become far larger than it looks."""
    write_zip(path, metadata({"value": "0" * 10**6}), compression=zipfile.ZIP_DEFLATED)
    assert message(path) == "its metadata.json is compressed"


def test_other_metadata_is_refused(path):
    write_zip(path, "{")
    assert message(path).startswith("its metadata.json is no JSON: ")
    write_zip(path, "[]")
    assert message(path) == "its metadata.json is not that of a compiled model"
    write_zip(path, metadata({}, format="else"))
    assert message(path) == "its metadata.json is not that of a compiled model"
    write_zip(path, metadata({}, format_version=1))
    assert message(path) == (
        "it has format version 1, and this ipufit reads 2; it was written with torch x"
    )
    write_zip(path, metadata([]))
    assert message(path) == "it has no values"
    write_zip(path, metadata({}), tensors=b"rubbish")
    assert message(path).startswith("its tensors.safetensors can't be read: ")


def test_a_deep_nest_is_refused(path):
    write_zip(path, metadata({}).replace("{}", '{"v": ' + "[" * 10**5 + "]" * 10**5 + "}"))
    assert message(path) == "its values are nested too deeply"


class Tower(nn.Module):
    """As a user writes one: values of all kinds, one module twice, a tied weight."""

    ran = 0

    def __init__(self):
        super().__init__()
        Tower.ran += 1
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.rnn = nn.LSTM(3, 2)
        self.act, self.other = nn.functional.gelu, torch.tanh
        self.names = ("a", [1, None])
        self.constant = torch.tensor(2.0)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_parameter("nothing", None)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        return self.rnn(self.other(self.act(self.tied(self.again(x))) * self.constant))[0]


@pytest.mark.filterwarnings("ignore:RNN module weights")
def test_a_module_of_imported_classes_comes_back_without_its_constructor(path):
    torch.manual_seed(0)
    model = Tower().eval()
    before = Tower.ran
    found = module_from_values(kept(path, module_to_values(model)))
    assert type(found) is Tower
    assert Tower.ran == before
    x = torch.randn(4, 3)
    assert torch.equal(found(x), model(x))
    assert found.again is found.first
    assert found.tied.weight is found.first.weight
    assert not found.first.weight.requires_grad
    assert not found.training
    assert found.names == ("a", [1, None])
    assert list(found.state_dict()) == list(model.state_dict())
    assert repr(found) == repr(model)
    found.zero_grad()
    found(x).sum().backward()
    assert found.rnn.weight_ih_l0.grad is not None
    assert found.double()(x.double()).dtype is torch.float64


def test_what_a_module_has_that_a_file_can_not_hold_is_said():
    model = Tower()
    model.first.helper = lambda: 0
    with pytest.raises(Error) as caught:
        module_to_values(model)
    assert caught.value.message.startswith(
        "the attribute first.helper can't be saved: a file holds tensors, "
    )
    assert caught.value.message.endswith("Or save with export_model=False.")
    model.first.helper = None
    model.register_forward_hook(print)
    with pytest.raises(Error, match="the model has hooks"):
        module_to_values(model)
    model = Tower()
    model.first.register_forward_hook(print)
    with pytest.raises(Error) as caught:
        module_to_values(model)
    assert caught.value.message == (
        "first has hooks (_forward_hooks), which a file can't hold. Remove them before you save, "
        "or save with export_model=False."
    )


def changed(**changes):
    values = module_to_values(nn.Linear(1, 1))
    values[0].update(changes)
    return values


@pytest.mark.parametrize("name", ["gone:Net", "os:system", "builtins:dict", "json:JSONDecoder"])
def test_a_class_that_is_no_imported_module_is_not_used(name):
    with pytest.raises(UnknownClass):
        module_from_values(changed(**{"class": name}))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"parameters": [("weight", torch.ones(1))]}, "'weight' is no Parameter"),
        ({"buffers": [("b", 1)]}, "'b' is no Tensor"),
        ({"modules": [("m", "x")]}, "'m' is no int"),
        ({"modules": [("m", 5)]}, "it has no module 5"),
        ({"attributes": [("_parameters", ("value", 1))]}, "'_parameters' can't be an attribute"),
        ({"attributes": [("f", ("function", "os:system"))]}, "'os:system' is not a function of"),
        ({"attributes": [("f", ("function", "torch:load"))]}, "'torch:load' is not a function of"),
        ({"attributes": [("f", ("function", "torch:from_file"))]}, "is not a function of torch"),
        ({"attributes": 3}, "it holds no sound module"),
        ({"class": 3}, "3 is not the name of a class"),
    ],
)
def test_a_hostile_module_is_refused(changes, text):
    with pytest.raises(InvalidContent) as caught:
        module_from_values(changed(**changes))
    assert text in str(caught.value)


def test_without_its_class_a_module_can_not_be_called():
    with pytest.raises(Error) as caught:
        WeightsOnly("pkg.nets:Net")(torch.ones(1))
    assert caught.value.message == (
        "the file holds the compiled program and the weights of Net, but not its Python code, so "
        "that it can't be compiled again. Import pkg.nets before poptorch.load(), or wrap a new "
        "model and load the state_dict() of this one into it."
    )


def test_a_cache_finds_what_was_kept(tmp_path):
    cache = ExecutableCache(str(tmp_path / "new" / "cache"))
    graph = capture(lambda x: [x * 2], [torch.ones(2)])
    key = cache.key({"graph": graph, "options": {"a": 1}})
    assert cache.find(key) is None
    with cache.turn(key):
        cache.keep(key, {"graph": graph})
    again = ExecutableCache(str(tmp_path / "new" / "cache")).find(key)
    assert torch.equal(again["graph"](torch.ones(2))[0], torch.full((2,), 2.0))


def test_a_key_depends_on_program_settings_and_constants(tmp_path):
    cache = ExecutableCache(str(tmp_path))
    two, three = (capture(lambda x, n=n: [x * n], [torch.ones(2)]) for n in (2, 3))
    same = capture(lambda x: [x * 2], [torch.zeros(2)])
    assert cache.key({"g": two}) == cache.key({"g": same})
    keys = {
        cache.key({"g": two}),
        cache.key({"g": three}),
        cache.key({"g": two, "o": 1}),
        cache.key({"g": two, "c": torch.ones(1)}),
        cache.key({"g": two, "c": torch.zeros(1)}),
        cache.key({"g": two, "c": torch.zeros(1, 1)}),
    }
    assert len(keys) == 6


def test_a_damaged_entry_of_the_cache_is_compiled_again_with_a_warning(tmp_path, caplog):
    cache = ExecutableCache(str(tmp_path))
    (tmp_path / "abc.poptorch").write_bytes(b"rubbish")
    with caplog.at_level(logging.WARNING):
        assert cache.find("abc") is None
    assert (
        caplog.records[0]
        .getMessage()
        .startswith(f"The model is compiled again: Invalid file {tmp_path / 'abc.poptorch'}: ")
    )
    cache.keep("abc", {"v": 1})
    assert cache.find("abc") == {"v": 1}


def test_only_one_has_its_turn_at_a_time(tmp_path, caplog):
    """As between processes: the lock belongs to the open file."""
    caplog.set_level(logging.DEBUG, logger="poptorch::python")
    one, two = (ExecutableCache(str(tmp_path)) for _ in range(2))
    order = []

    def second():
        with two.turn("k"):
            order.append("second")

    with one.turn("k"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    said = [record.getMessage().partition(str(os.getpid())) for record in caplog.records]
    assert sorted(before or after for before, _, after in said) == 2 * [
        "Executable cache file locked by process "
    ] + 2 * ["Process "]


def test_a_cache_in_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Error) as caught:
        ExecutableCache(str(tmp_path / "file"))
    assert caught.value.message == (
        f"the folder of the executable cache, {tmp_path / 'file'}, can't be made: File exists. "
        "Choose another one in enableExecutableCaching()."
    )


def test_getitem_is_the_one_function_beside_operators():
    content = program(X, node("call_function", "y", "getitem", [{"$node": "x"}, 0]), OUT)
    made = [n for n in graph_from_json(content, {}).graph.nodes if n.op == "call_function"]
    assert made[0].target is operator.getitem


def test_a_file_is_one_zip_that_others_can_look_into(path):
    kept(path, {"weight": torch.ones(2)})
    with zipfile.ZipFile(path) as file:
        assert file.namelist() == ["metadata.json", "tensors.safetensors"]
        assert json.loads(file.read("metadata.json"))["format"] == "ipufit.poptorch"
        tensors = safetensors.torch.load(file.read("tensors.safetensors"))
    assert torch.equal(tensors["value.weight"], torch.ones(2))
