"""The pages under docs/ name what exists, and docstrings say of all that is public what it is."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ipufit
from ipufit.callbacks.callback import EVENTS
from tests.complete_types import PUBLIC
from tests.pages import catalog
from tests.pages.docstrings import described, parameters

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
OBJECTS = catalog.public_objects()


def text_of(path):
    """A page without its code blocks, in which `#` is no heading and `|` no table."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def headings(path):
    """Level and text of every heading of a page."""
    return [(len(m[1]), m[2]) for m in re.finditer(r"^(#+) (.*)$", text_of(path), re.M)]


def resolve(name):
    """The object with this full name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


@pytest.mark.parametrize("module", PUBLIC)
def test_all_lists_what_can_be_imported(module):
    """A name that is public but not listed, or listed but absent, misleads every reader."""
    found = importlib.import_module(module)
    namespace = {}
    exec(f"from {module} import *", namespace)
    del namespace["__builtins__"]
    assert sorted(namespace) == sorted(found.__all__)
    assert list(found.__all__) == sorted(found.__all__)
    own = {
        name
        for name, value in vars(found).items()
        if inspect.isclass(value)
        and value.__module__.startswith(module)
        and not name.startswith("_")
    }
    assert own <= set(found.__all__)


def cases(only=None):
    """Public classes and functions, each under its full name."""
    chosen = [name for name, value in OBJECTS.items() if only is None or isinstance(value, only)]
    assert len(chosen) > 20
    return pytest.mark.parametrize("name", chosen)


def kin(name):
    """The class of this name and its bases, as far as they are ipufit's, nearest first."""
    return [kind for kind in OBJECTS[name].__mro__ if kind.__module__.startswith("ipufit")]


def told(name):
    """What docstrings of a class and its bases say of its arguments and attributes."""
    return {
        entry
        for kind in kin(name)
        for section in ("Args", "Attributes")
        for entry in described(kind, section)
    }


def test_every_public_name_has_a_page_or_a_place_on_one():
    """What is not in the reference is not found."""
    listed = set()
    for room in catalog.ROOMS:
        assert inspect.getdoc(importlib.import_module(room))
        found = catalog.contents(room, OBJECTS)
        listed |= {name for names in found.values() for name in names}
        count = sum(map(len, found.values()))
        assert count == len(catalog.names_of(room))
    assert set(OBJECTS) <= listed
    rooms = {name for name in listed if name not in OBJECTS}
    assert rooms <= set(catalog.ROOMS)
    assert set(PUBLIC) <= set(catalog.ROOMS)


# Classes that members of public classes return to ipufit itself, and bases of several classes.
FOR_IPUFIT = {
    *("CallbackModel", "IpuLayout", "MemberSchedules", "Rendezvous", "ScheduleSnapshot"),
    *("Estimator", "Padding"),
}


def test_what_public_calls_return_has_a_page():
    """A reader of a report or a plan looks up what its entries have."""
    paged = {value.__name__ for value in OBJECTS.values()}
    missing = set()
    for name, kind in OBJECTS.items():
        # Those who write engines read the code of the seam.
        if not inspect.isclass(kind) or name.startswith(("ipufit.engines", "ipufit.testing")):
            continue
        for base in kin(name):
            annotated = {**catalog.attribute_types(base), **vars(base).get("__annotations__", {})}
            types = [text for each, text in annotated.items() if not each.startswith("_")]
            for member in catalog.public_members(kind, OBJECTS).values():
                function = getattr(member, "fget", None) or getattr(member, "func", member)
                types.append(getattr(function, "__annotations__", {}).get("return", ""))
            for word in set(re.findall(r"\w+", " ".join(map(str, types)))) - paged - FOR_IPUFIT:
                value = getattr(sys.modules[base.__module__], word, None)
                if inspect.isclass(value) and value.__module__.startswith("ipufit"):
                    missing.add(f"{name}: {word}")
    assert not missing


@cases()
def test_every_public_name_says_what_it_is(name):
    """In words of its own: what a base says is said of the base."""
    thing = resolve(name)
    assert thing is OBJECTS[name]
    assert len(vars(thing).get("__doc__") or thing.__doc__) > 20
    if inspect.isclass(thing):
        assert thing.__doc__ not in [base.__doc__ for base in thing.__mro__[1:]]
        assert not thing.__doc__.startswith(f"{thing.__name__}(")  # what dataclasses writes


@cases(type)
def test_every_public_member_is_described(name):
    """A method or attribute that is not listed is found by chance only."""
    members = catalog.public_members(OBJECTS[name], OBJECTS)
    for member, value in members.items():
        text = inspect.getdoc(value)
        assert text, member
    for kind in kin(name):
        data = {
            member
            for member, value in {**vars(kind), **vars(kind).get("__annotations__", {})}.items()
            if not member.startswith("_")
            and not inspect.isfunction(value)
            and not isinstance(value, catalog.DESCRIPTORS)
            and not type(value).__module__.startswith("sklearn")
        }
        source = inspect.getsource(kind)
        data |= set(re.findall(r"^        self\.([a-z]\w*)(?:: [^=\n]+)? = ", source, re.M))
        # Every exception has args.
        assert data - set(members) - {"args"} <= told(name), kind


@cases(type)
def test_no_attribute_is_described_twice_or_absent(name):
    """One that was renamed long ago is worse than none, and two entries are one too many."""
    kind = OBJECTS[name]
    attributes = described(kind, "Attributes")
    assert len(attributes) == len(set(attributes))
    assert not set(attributes) & set(catalog.public_members(kind, OBJECTS))
    sources = [inspect.getsource(each) for each in kin(name)]
    for attribute in attributes:
        known = any(
            f"self.{attribute}" in source or re.search(rf"^    {attribute}\b", source, re.M)
            for source in sources
        )
        assert known, attribute


def test_every_attribute_has_a_type():
    """Editors and the reference show it: declared by the class, or where a method sets it."""
    assert [*catalog.untyped(OBJECTS)] == []


@cases()
def test_every_parameter_is_described(name):
    """Of functions, constructors and methods: all that they take, and nothing else."""
    thing = OBJECTS[name]
    if not inspect.isclass(thing):
        assert described(thing, "Args") == parameters(thing)
        return
    taken = parameters(thing)
    arguments = described(thing, "Args")
    assert [argument for argument in taken if argument in arguments] == arguments
    assert set(taken) <= {*arguments, *described(thing, "Attributes")}
    for member, method in catalog.public_members(thing, OBJECTS).items():
        if not inspect.isfunction(method):
            continue
        arguments = described(method, "Args")
        # What a hook or a method of an engine is given is said of the one that it overrides.
        overridden = [vars(kind).get(member) for kind in kin(name)]
        inherited = {arg for other in overridden if other for arg in described(other, "Args")}
        assert set(arguments) <= set(parameters(method)), member
        assert set(parameters(method)) <= {*arguments, *inherited}, member


def test_every_hook_is_described_on_the_page_of_callbacks():
    """Python says nothing about a hook whose arguments are wrong until it is called."""
    members = catalog.public_members(ipufit.callbacks.Callback, OBJECTS)
    assert set(EVENTS) <= set(members)
    for hook, event in EVENTS.items():
        assert tuple(described(members[hook], "Args")) == event.arguments
    rest = {"close", "load_state_dict", "only_reports", "set_model", "set_params", "state_dict"}
    assert set(members) - set(EVENTS) == rest


def test_the_tree_of_errors_has_all_of_them_under_their_bases():
    """Callers write `except ValueError` by the head of the module."""
    tree = re.findall(r"^([│ ├└─]*)(\w+)(?: \((\w+)\))?(?:  .*)?$", ipufit.errors.__doc__, re.M)
    above, found = {}, set()
    for indent, name, builtin in tree[tree.index(("    ", "IpufitError", "")) :]:
        depth = len(indent) // 4
        above[depth] = name
        bases = [base.__name__ for base in resolve(f"ipufit.errors.{name}").__bases__]
        if depth > 1:
            assert bases == [above[depth - 1], *([builtin] if builtin else [])], name
        found.add(name)
    no_errors = {"NonFiniteValue", "Operand"}
    assert found == set(ipufit.errors.__all__) - no_errors


def nodes():
    """Every node in the source of the package, and the constants of its module by name."""
    for path in sorted((ROOT / "ipufit").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            yield node, constants


def template(node, constants):
    """The text that a node stands for, with "\\0" for what is filled in; None if it is no text."""
    if isinstance(node, ast.JoinedStr):
        parts = [getattr(part, "value", None) for part in node.values]
        parts = [constants.get(getattr(part, "id", None), part) for part in parts]
        return "".join(part if isinstance(part, str) else "\0" for part in parts)
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else None


def errors_of_arguments():
    """Texts that ``unfit`` and ``number_in`` join, of texts that are assigned before the call."""
    for path in sorted((ROOT / "ipufit").rglob("*.py")):
        nodes_here = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        assigned = []
        for node in nodes_here:
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                pairs = [(target, value)]
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs = zip(target.elts, value.elts)
                assigned += [(node.lineno, getattr(t, "id", ""), v) for t, v in pairs]

        def local(node, assigned=assigned):
            name = getattr(node, "id", None)
            before = [
                each for each in assigned if name and each[1] == name and each[0] < node.lineno
            ]
            return max(before, key=lambda each: each[0])[2] if before else node

        for call in nodes_here:
            kind = getattr(getattr(call, "func", None), "id", "")
            kind = kind or getattr(getattr(call, "func", None), "attr", "")
            if not isinstance(call, ast.Call) or kind not in ("unfit", "number_in"):
                continue
            arguments = []
            for each in call.args:
                words = local(each.value) if isinstance(each, ast.Starred) else None
                arguments += words.elts if isinstance(words, ast.Tuple) else [each]
            places = (0, 1) if kind == "unfit" else (0, 2)
            if len(arguments) > places[1]:
                name, needed = (template(local(arguments[place]), {}) for place in places)
                yield f"{name or chr(0)} must be {needed or chr(0)}, got \0"


def templates():
    """Every text in the source of the package; "\\0" stands for what is filled in."""
    for node, constants in nodes():
        text = template(node, constants)
        if text is not None:
            yield text
    yield from errors_of_arguments()


def messages():
    """The texts of errors and warnings that are told where they are written, each with a class."""
    for node, constants in nodes():
        call = node.exc if isinstance(node, ast.Raise) else node
        name = getattr(getattr(call, "func", None), "id", "")
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if isinstance(node, ast.Raise) or name == "warn_user":
            first = call.args[0]
            for each in first.elts if isinstance(first, ast.List) else [first]:
                text = template(each, constants)
                if text is not None:
                    yield "UserWarning" if name == "warn_user" else name, text


class Changing(nn.Module):
    """Does to its buffers in forward what a program can't follow."""

    def __init__(self, name):
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.name = name

    def forward(self, x):
        self.register_buffer(self.name, torch.ones(()))
        return self.head(x)


def provoked():
    """The texts of errors that are put together from parts."""

    def plan():
        ipufit.Plan.make(micro_batch_size=0, ipus=3)

    def names():
        ipufit.Model(nn.Linear(1, 1)).compile("?", "?", metrics="?", run_eagerly="?", jit="?")

    def buffers(name):
        model = ipufit.Model(Changing(name))
        model.compile("sgd", "cross_entropy")
        model.predict([torch.ones(1, 2)], verbose=0)

    def check():
        ipufit.Model(nn.Linear(1, 1)).check()

    def reduction():
        ipufit.Reduction(gradients="?")

    def rounding():
        ipufit.Parallel(auto_round_ipus="?")

    for call in (
        plan,
        names,
        reduction,
        rounding,
        lambda: ipufit.Precision("?"),
        lambda: buffers("seen"),
        lambda: buffers("new"),
        check,
    ):
        with pytest.raises(ipufit.errors.IpufitError) as caught:
            call()
        yield str(caught.value)


def test_headings_of_troubleshooting_are_texts_of_errors():
    """A reader looks for the class and the text on the screen; a stale heading is never found."""
    page = ROOT / "docs" / "troubleshooting.md"
    texts, kinds_of = {*templates(), *provoked()}, {}
    for kind, text in messages():
        kinds_of.setdefault(text, set()).add(kind)
    assert len([text for level, text in headings(page) if level == 3]) > 80
    stale, misplaced, section = [], [], None
    for level, text in headings(page):
        if level == 2:
            section = text
        if level != 3:
            continue
        parts = [part.strip() for part in text.split("...")]
        longest, pattern = max(parts, key=len), re.compile(".*".join(map(re.escape, parts)), re.S)
        found = [known for known in texts if longest in known and pattern.search(known)]
        if not found:
            stale.append(text)
        elif all(known in kinds_of for known in found):
            # Classes of other packages, and private ones, have no part of the page.
            kinds = set().union(*(kinds_of[known] for known in found))
            kinds &= {*ipufit.errors.__all__, "UserWarning"}
            if kinds and section not in kinds:
                misplaced.append((text, section, kinds))
    assert stale == []
    assert misplaced == []
    kinds = [text for level, text in headings(page) if level == 2][:-2]
    assert set(kinds) <= set(ipufit.errors.__all__)
    exceptions = {
        n for n in ipufit.errors.__all__ if issubclass(resolve(f"ipufit.errors.{n}"), Exception)
    }
    assert exceptions - set(kinds) == {"IpufitError"}


def test_tests_that_the_pages_cite_exist():
    """A promise with the name of a test that is gone is an empty promise."""
    # The files of programs.md are those of other repositories.
    for path in [page for page in PAGES if page.name != "programs.md"]:
        for file, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", path.read_text("utf-8")):
            source = (ROOT / file).read_text("utf-8")
            assert f"\ndef {name}" in source, f"{path.name}: {file}::{name}"


# What needs minutes, in sessions of their own: drill, soak, processes.
ELSEWHERE = {
    "tests/checkpoint/test_drill.py",
    "tests/checkpoint/test_soak.py",
    "tests/processes/test_runs_on.py",
}


def test_a_promise_has_a_test_that_every_change_runs():
    """What takes long may be left out, but not the only one that shows what is promised."""
    page = (ROOT / "docs" / "how-it-works.md").read_text("utf-8")
    cited = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(cited) > 100
    left_out = set()
    for file, name in cited:
        above = (ROOT / file).read_text("utf-8").partition(f"\ndef {name}(")[0].split("\n\n")[-1]
        if re.search(r"^@pytest\.mark\.long$", above, re.M):
            left_out.add(file)
    assert left_out == ELSEWHERE


def anchor(heading):
    """The name that Markdown renderers give to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_links_between_the_pages_lead_somewhere():
    """Nobody follows a second link after one that is dead."""
    count = 0
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
            if target.startswith("http"):
                continue
            file, _, fragment = target.partition("#")
            page = (path.parent / file).resolve() if file else path
            assert page.exists(), f"{path.name}: {target}"
            if fragment:
                known = [anchor(text) for _, text in headings(page)]
                assert fragment in known, f"{path.name}: {target}"
            count += 1
    assert count > 30
