"""What is public, as the reference has it: rooms, the names in them, and members of classes.

docs/conf.py makes pages of it; `python -m tests.pages` looks whether the built site has them all.
`ipufit.poptorch` is no room of it: its names and their meaning are PopTorch's, and
docs/poptorch.md says what is otherwise.
"""

import abc
import ast
import functools
import importlib
import inspect
import textwrap

from tests.complete_types import PUBLIC
from tests.pages.docstrings import described

# Classes of what public calls return, and of the parts of that, by the module that has them. Nobody
# makes one by hand, so that `__all__` of no room has them, but programs read them.
RETURNED = {
    "ipufit.analysis.compare.invariance_report": ("InvarianceCause", "InvarianceSetting"),
    "ipufit.core.plan": ("Place", "Tail"),
    "ipufit.engines.ipu.preflight.facts": ("Fact", "Line"),
    "ipufit.planner.costs": ("StageCost",),
    "ipufit.planner.partition_plan": ("Planned",),
    "ipufit.planner.pipeline_schedule": ("Task", "Timeline"),
    "ipufit.processes.group": ("Processes",),
    "ipufit.tracing.comparison": ("Difference",),
}
# Those whose types are held to be complete, those whose types need another package's, and those
# that have something of what public calls return.
ROOMS = tuple(
    sorted(
        {
            *(*PUBLIC, "ipufit.engines", "ipufit.losses", "ipufit.metrics", "ipufit.optim.state"),
            *RETURNED,
        }
    )
)
# What loops call on a metric, once it is in a set of metrics, and on the group of processes: no
# matter of users.
INTERNAL = {
    "ipufit.metrics": {"arrange", "build", "form_of"},
    "ipufit.processes.group": {
        *("add", "assert_equal_across_ranks", "broadcast", "collectives", "connect", "connection"),
        *("gather", "gather_rows", "pending_work", "propagate_errors", "run_on_all_ranks"),
        "run_on_rank_zero",
    },
}
DESCRIPTORS = (property, functools.cached_property, classmethod, staticmethod)


def names_of(room):
    """The names of a room that are public."""
    return RETURNED.get(room) or tuple(importlib.import_module(room).__all__)


def public_objects():
    """Every public class and function by the first full name that it has.

    `ipufit.callbacks.History` is `ipufit.History`, so it has one page.
    """
    found = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in names_of(room):
            value = getattr(module, name)
            if not inspect.ismodule(value) and value not in found.values():
                found[f"{room}.{name}"] = value
    return found


def contents(room, objects):
    """The names of a room, in its order, as the reference has them, by what they are."""
    module = importlib.import_module(room)
    kinds = {"classes": [], "functions": [], "elsewhere": [], "rooms": []}
    names = {id(value): name for name, value in objects.items()}
    for name in names_of(room):
        value = getattr(module, name)
        if inspect.ismodule(value):
            kinds["rooms"].append(value.__name__)
        else:
            kind = "classes" if inspect.isclass(value) else "functions"
            is_here = names[id(value)] == f"{room}.{name}"
            kinds[kind if is_here else "elsewhere"].append(names[id(value)])
    return kinds


def public_bases(kind, objects):
    """The bases of a class that have a page or are another package's, in place of all others."""
    found = []
    for base in kind.__bases__:
        if base in objects.values() or not base.__module__.startswith("ipufit"):
            found += [base] if base not in (object, abc.ABC, *found) else []
        else:
            found += [each for each in public_bases(base, objects) if each not in found]
    return found


def public_members(kind, objects):
    """Functions and properties of a class by name, with those of bases that have no page.

    What a public base has, and says in the same words, is on the page of that base.
    """
    public = [base for base in kind.__mro__[1:] if base in objects.values()]
    internal = {name for room in INTERNAL for name in INTERNAL[room] if is_of(kind, room, objects)}
    found = {}
    for base in kind.__mro__:
        if base in public or not base.__module__.startswith("ipufit"):
            continue
        for name, value in vars(base).items():
            is_member = inspect.isfunction(value) or isinstance(value, DESCRIPTORS)
            if name.startswith("_") or name in internal or name in found or not is_member:
                continue
            # What a classmethod wraps, which has the docstring on every Python.
            member = getattr(value, "__func__", value)
            said = inspect.getdoc(member)
            if not any(said == inspect.getdoc(getattr(other, name, None)) for other in public):
                found[name] = member
    return found


def attribute_types(kind):
    """Types, as they are written, of the attributes that the methods of one class set.

    Either the attribute is annotated there, or it is a parameter of the constructor as it came.
    """
    found = {}
    if not kind.__module__.startswith("ipufit"):
        return found
    source = textwrap.dedent(inspect.getsource(kind))
    text = functools.partial(ast.get_source_segment, source)
    (tree,) = ast.parse(source).body
    for method in (part for part in tree.body if isinstance(part, ast.FunctionDef)):
        given = method.args.args + method.args.kwonlyargs if method.name == "__init__" else []
        types = {each.arg: text(each.annotation) for each in given if each.annotation}
        for node in ast.walk(method):
            annotated = isinstance(node, ast.AnnAssign)
            for target in [node.target] if annotated else getattr(node, "targets", ()):
                if isinstance(target, ast.Attribute) and text(target.value) == "self":
                    if annotated:
                        found[target.attr] = text(node.annotation)
                    elif text(node.value) in types:
                        found[target.attr] = types[text(node.value)]
    return found


def untyped(objects):
    """Attributes of public classes, by full names, whose type is neither declared nor set."""
    for name, value in objects.items():
        if inspect.isclass(value):
            typed = {}
            for base in value.__mro__:
                typed.update({**vars(base).get("__annotations__", {}), **attribute_types(base)})
            for attribute in described(value, "Attributes"):
                member = inspect.getattr_static(value, attribute, None)
                if attribute not in typed and not isinstance(member, DESCRIPTORS):
                    yield f"{name}.{attribute}"


def anchors(objects):
    """By the name of each page of the reference, what it must have an anchor for."""
    found = {}
    for room in ROOMS:
        found[room] = [f"module-{room}", *contents(room, objects)["functions"]]
    for name, value in objects.items():
        if inspect.isclass(value):
            members = [*public_members(value, objects), *described(value, "Attributes")]
            found[name] = [name, *(f"{name}.{member}" for member in members)]
    return found


def is_of(kind, room, objects):
    """Whether the public name of a class is one of this room."""
    return any(name.startswith(f"{room}.") for name, value in objects.items() if value is kind)
