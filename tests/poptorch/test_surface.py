"""The public surface of PopTorch 3.4, all of it: names, kinds, parameters, defaults, values.

``surface.json`` holds the facts: which names each namespace has, what each of them is, and how it
is called. A signature is written as in a ``def``.
"""

import abc
import ast
import enum
import importlib
import inspect
import json
import logging
import pathlib
import types

import pytest
import torch

SURFACE = json.loads(pathlib.Path(__file__).with_name("surface.json").read_text())
NAMES = [(space, name) for space, names in SURFACE["namespaces"].items() for name in names]
DEFINITIONS = SURFACE["definitions"]
CORE = SURFACE["poptorch_core"]


def of_kind(kind):
    return [name for name, definition in DEFINITIONS.items() if definition["kind"] == kind]


def found(path):
    """The object of a dotted PopTorch path."""
    space, _, name = path.rpartition(".")
    if not space:
        return importlib.import_module("ipufit.poptorch")
    return getattr(importlib.import_module(f"ipufit.{space}"), name)


def default_of(text):
    """The value that a default's source text stands for."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        kind, _, member = text.partition(".")
        return getattr(found(f"poptorch.enums.{kind}"), member)


def parameters_of(signature):
    """(name, kind, default's text or None) of a signature as it is written."""
    arguments = ast.parse(f"def f{signature}: pass").body[0].args
    count = len(arguments.args) - len(arguments.defaults)
    plain = [None] * count + [
        ast.get_source_segment(f"def f{signature}: pass", node) for node in arguments.defaults
    ]
    listed = [(a.arg, "POSITIONAL_OR_KEYWORD", d) for a, d in zip(arguments.args, plain)]
    if arguments.vararg:
        listed.append((arguments.vararg.arg, "VAR_POSITIONAL", None))
    for argument, node in zip(arguments.kwonlyargs, arguments.kw_defaults):
        text = node and ast.get_source_segment(f"def f{signature}: pass", node)
        listed.append((argument.arg, "KEYWORD_ONLY", text))
    if arguments.kwarg:
        listed.append((arguments.kwarg.arg, "VAR_KEYWORD", None))
    return listed


def assert_called_alike(function, signature):
    expected = parameters_of(signature)
    actual = list(inspect.signature(function).parameters.values())
    assert [(p.name, p.kind.name) for p in actual] == [(name, kind) for name, kind, _ in expected]
    for parameter, (_, _, text) in zip(actual, expected):
        if text is None:
            assert parameter.default is inspect.Parameter.empty
        elif text.startswith("lambda"):
            assert callable(parameter.default)
        else:
            value = default_of(text)
            assert type(parameter.default) is type(value)
            assert parameter.default == value


def test_the_surface_is_complete():
    """The counts that PopTorch's own surface has; a shortened file would prove nothing."""
    kinds = [definition["kind"] for definition in DEFINITIONS.values()]
    assert {kind: kinds.count(kind) for kind in ("class", "enum", "function")} == {
        "class": 34,
        "enum": 15,
        "function": 39,
    }
    assert sum(len(DEFINITIONS[name]["members"]) for name in of_kind("enum")) == 48
    assert len(NAMES) == 159
    assert len(CORE["functions"]) == 47


@pytest.mark.parametrize(("space", "name"), NAMES)
def test_every_name_is_in_its_namespaces(space, name):
    """One object under all of its names, so that ``isinstance`` holds whichever is used."""
    definition = SURFACE["namespaces"][space][name]
    assert getattr(found(space), name) is found(definition)


@pytest.mark.parametrize("space", SURFACE["namespaces"])
def test_no_namespace_says_it_has_more(space):
    """A name of ours would be missing where the script meets real PopTorch."""
    exported = found(space).__all__
    assert len(set(exported)) == len(exported)
    known = set(SURFACE["namespaces"][space])
    assert {name for name in exported if not name.startswith("_")} <= known


def test_the_package_says_all_that_it_has():
    public = {name for name in SURFACE["namespaces"]["poptorch"] if name[0] != "_"}
    assert {name for name in found("poptorch").__all__ if name[0] != "_"} == public


@pytest.mark.parametrize("name", of_kind("function"))
def test_every_function_is_called_alike(name):
    assert isinstance(found(name), types.FunctionType)
    assert_called_alike(found(name), DEFINITIONS[name]["signature"])


@pytest.mark.parametrize("name", of_kind("enum"))
def test_every_enum_has_its_members_and_values(name):
    kind, definition = found(name), DEFINITIONS[name]
    assert issubclass(kind, getattr(enum, definition["base"]))
    assert issubclass(kind, int) == (definition["base"] == "IntEnum")
    assert {member: kind[member].value for member in kind.__members__} == definition["members"]


@pytest.mark.parametrize("name", of_kind("class"))
def test_every_class_is_of_its_public_bases(name):
    kind = found(name)
    assert inspect.isclass(kind)
    for base in DEFINITIONS[name].get("bases", ()):
        root, *rest = base.split(".")
        ancestor = {"torch": torch, "abc": abc, "Exception": Exception}[root]
        for part in rest:
            ancestor = getattr(ancestor, part)
        assert issubclass(kind, ancestor)


METHODS = [
    (name, method) for name in of_kind("class") for method in sorted(DEFINITIONS[name]["methods"])
]


@pytest.mark.parametrize(("name", "method"), METHODS)
def test_every_method_is_called_alike(name, method):
    expected = DEFINITIONS[name]["methods"][method]
    kind, signature = ("method", expected) if isinstance(expected, str) else expected
    attribute = inspect.getattr_static(found(name), method)
    wrappers = {"staticmethod": staticmethod, "classmethod": classmethod}
    if kind in wrappers:
        assert isinstance(attribute, wrappers[kind])
        attribute = attribute.__func__
    assert inspect.isfunction(attribute)
    assert_called_alike(attribute, signature)


PROPERTIES = [
    (name, prop) for name in of_kind("class") for prop in DEFINITIONS[name].get("properties", ())
]


@pytest.mark.parametrize(("name", "prop"), PROPERTIES)
def test_every_property_can_be_read_and_written_alike(name, prop):
    attribute = inspect.getattr_static(found(name), prop)
    assert isinstance(attribute, property)
    writable = DEFINITIONS[name]["properties"][prop] == "read-write"
    assert (attribute.fset is not None) == writable
    assert attribute.fdel is None


@pytest.mark.parametrize("group", SURFACE["option_groups"])
def test_every_group_of_options_is_of_its_class(group):
    options = found("poptorch.Options")()
    assert type(getattr(options, group)) is found(SURFACE["option_groups"][group])


@pytest.mark.parametrize("name", of_kind("exception"))
def test_every_exception_has_its_bases_and_fields(name):
    definition, kind = DEFINITIONS[name], found(name)
    for base in definition["bases"]:
        assert issubclass(kind, Exception if base == "Exception" else found(base))
    error = kind("text")
    for attribute in definition["attributes"]:
        assert isinstance(getattr(error, attribute), str)


@pytest.mark.parametrize("name", of_kind("module"))
def test_every_module_can_be_imported(name):
    assert importlib.import_module(f"ipufit.{name}") is found(name)


def test_every_constant_is_of_its_kind():
    assert sorted(of_kind("constant")) == [
        "poptorch.ATTR_PREFIX",
        "poptorch.BlockId",
        "poptorch.__version__",
        "poptorch.attributes_lists",
        "poptorch.logger",
    ]
    assert isinstance(found("poptorch.logger"), logging.Logger)
    assert found("poptorch.logger").name == "poptorch::python"
    assert found("poptorch.BlockId") is str
    assert found("poptorch.__version__").startswith("3.4.0")
    assert found("poptorch.ATTR_PREFIX") == DEFINITIONS["poptorch.ATTR_PREFIX"]["value"]
    assert isinstance(found("poptorch.attributes_lists"), list)


@pytest.mark.parametrize("name", CORE["functions"])
def test_every_function_of_the_compiled_half_is_there(name):
    function = found(f"poptorch.poptorch_core.{name}")
    assert callable(function)
    parameters = inspect.signature(function).parameters
    for parameter, default in CORE["functions"][name].items():
        assert parameters[parameter].default == ast.literal_eval(default)


@pytest.mark.parametrize("name", CORE["classes"])
def test_every_class_of_the_compiled_half_is_there(name):
    assert inspect.isclass(found(f"poptorch.poptorch_core.{name}"))


@pytest.mark.parametrize("name", CORE["enums"])
def test_every_enum_of_the_compiled_half_has_its_members(name):
    kind = found(f"poptorch.poptorch_core.{name}")
    assert list(kind.__members__) == CORE["enums"][name]
