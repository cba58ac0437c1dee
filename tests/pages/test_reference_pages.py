"""The pages under docs/ name what exists, and all that is public has its place there."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import ipufit
from ipufit.callbacks.callback import EVENTS
from tests.complete_types import PUBLIC

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]


def text_of(path):
    """A page without its code blocks, in which `#` is no heading and `|` no table."""
    return re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def headings(path):
    """Level and text of every heading of a page."""
    return [(len(m[1]), m[2]) for m in re.finditer(r"^(#+) (.*)$", text_of(path), re.M)]


def sections():
    """The sections of the reference by the full name in their heading."""
    parts = re.split(r"^#+ (.*)$", text_of(ROOT / "docs" / "reference.md"), flags=re.M)
    return dict(zip(parts[3::2], parts[4::2]))


def rows(section, kind):
    """First and second cells, without backticks, of the tables whose first column is ``kind``."""
    found = []
    for table in re.findall(rf"^\| {kind} \|.*\n\|[- |]+\n((?:\|.*\n)*)", section, re.M):
        for line in table.splitlines():
            first, second = line.strip("|").split(" | ")[:2]
            found.append((first.strip().strip("`"), second.strip().strip("`")))
    return found


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


def written_signature(text):
    """Name, whether keyword-only, and default (or "required") of each argument in ``f(a, b=1)``."""
    arguments = ast.parse(f"def f{text[text.index('(') :]}: pass").body[0].args
    plain, named = arguments.args, arguments.kwonlyargs
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(plain, defaults), *zip(named, arguments.kw_defaults)]
    keyword_only = [False] * len(plain) + [True] * len(named)
    return [
        (argument.arg, keyword, "required" if default is None else ast.literal_eval(default))
        for (argument, default), keyword in zip(pairs, keyword_only)
    ]


def real_signature(name):
    """The same of the object itself."""
    found = inspect.signature(resolve(name))
    return [
        (
            parameter.name,
            parameter.kind is parameter.KEYWORD_ONLY,
            "required" if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in found.parameters.values()
        if parameter.name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    ]


def entries():
    """Every full name that the reference has a heading or a row for."""
    names = list(sections())
    for section in sections().values():
        names += [name for name, _ in rows(section, "name")]
    return names


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


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module):
    """What is not in the reference is not found."""
    names = entries()
    for name in importlib.import_module(module).__all__:
        assert f"{module}.{name}" in names


def test_every_entry_of_the_reference_exists():
    """A page that describes what was renamed long ago is worse than none."""
    assert len(entries()) > 30
    for name in entries():
        assert resolve(name) is not None


@pytest.mark.parametrize(
    "name",
    [
        "BatchSize",
        "History",
        "IPUConfig",
        "LearningRates",
        "Model",
        "Plan",
        "callbacks.Callback",
        "analysis.check.CheckReport",
        "analysis.check.Finding",
        "optim.schedules.Schedule",
    ],
)
def test_every_public_member_is_in_the_reference(name):
    """A method or attribute that is not listed is found by chance only."""
    full = f"ipufit.{name}"
    section = sections()[full]
    listed = {row for row, _ in rows(section, "attribute")}
    listed = {row.partition("(")[0] for row in listed}
    listed |= {row.partition("(")[0] for row, _ in rows(section, "hook")}
    if name == "callbacks.Callback":
        # Their table is in docs/callbacks.md (tests/callbacks/test_events.py).
        listed |= set(EVENTS)
    listed |= {entry[len(full) + 1 :] for entry in sections() if entry.startswith(full + ".")}
    owner = resolve(full)
    # A base beside it is a part of it, and listed with it unless it has a section of its own.
    package = owner.__module__.rpartition(".")[0]
    kinds = [kind for kind in owner.__mro__ if kind.__module__.rpartition(".")[0] == package]
    apart = [resolve(entry) for entry in sections() if entry != full and entry.count(".") == 2]
    members = {member for kind in kinds for member in vars(kind) if not member.startswith("_")}
    members |= set(getattr(owner, "__dataclass_fields__", ()))
    elsewhere = {member for kind in kinds if kind in apart for member in vars(kind)}
    assert members - elsewhere <= listed
    # Attributes that the constructor makes are not in the class itself.
    for member in listed - members:
        assert f"self.{member}" in inspect.getsource(owner)


def test_signatures_in_the_reference_are_the_real_ones():
    """A default that differs from the page makes a run that nobody asked for."""
    checked = set()
    for name, section in sections().items():
        written = re.match(rf"\s*`({name.rpartition('.')[2]}\(.*\))`\n", section)
        if not written:
            continue
        checked.add(name)
        signature = real_signature(name)
        for own, page in zip(signature, written_signature(written[1])):
            if type(own[2]).__name__ == "_HAS_DEFAULT_FACTORY_CLASS":
                own = (*own[:2], page[2])
            assert own == page, name
        assert len(signature) == len(written_signature(written[1])), name
        table = rows(section, "parameter")
        if table:
            defaults = [
                value if value == "required" else ast.literal_eval(value) for _, value in table
            ]
            names = [parameter for parameter, _ in table]
            assert list(zip(names, defaults)) == [(own, default) for own, _, default in signature]
    methods = ("compile", "fit", "evaluate", "predict", "explain", "summary")
    assert {f"ipufit.Model.{method}" for method in methods} <= checked
    assert {"ipufit.Model", "ipufit.Plan.make", "ipufit.History.plot"} <= checked


def test_hooks_in_the_reference_have_the_real_arguments():
    """Python says nothing about a hook whose arguments are wrong until it is called."""
    full = "ipufit.callbacks.Callback"
    hooks = rows(sections()[full], "hook")
    for hook, _ in hooks:
        name = hook.partition("(")[0]
        assert written_signature(hook) == real_signature(f"{full}.{name}")


def test_errors_in_the_reference_have_the_real_bases():
    """Callers write `except ValueError` by this table."""
    table = rows(sections()["ipufit.errors"], "name")
    assert len(table) == len(ipufit.errors.__all__)
    for name, bases in table:
        assert [base.__name__ for base in resolve(name).__bases__] == bases.split("`, `")


def templates():
    """Every text in the source of the package; "\\0" stands for what is filled in."""
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
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                parts = [constants.get(getattr(part, "id", None), part) for part in parts]
                yield "".join(part if isinstance(part, str) else "\0" for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


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
        ipufit.Model(nn.Linear(1, 1)).compile("?", "?", "?", run_eagerly="?", jit="?")

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
        lambda: buffers("seen"),
        lambda: buffers("new"),
        check,
    ):
        with pytest.raises(ipufit.errors.IpufitError) as caught:
            call()
        yield str(caught.value)


def test_headings_of_troubleshooting_are_texts_of_errors():
    """A reader searches the page for the text on the screen; a stale heading is never found."""
    page = ROOT / "docs" / "troubleshooting.md"
    texts = {*templates(), *provoked()}
    errors = [text for level, text in headings(page) if level == 3]
    assert len(errors) > 80
    stale = []
    for text in errors:
        parts = [part.strip() for part in text.split("...")]
        longest, pattern = max(parts, key=len), re.compile(".*".join(map(re.escape, parts)), re.S)
        if not any(longest in known and pattern.search(known) for known in texts):
            stale.append(text)
    assert stale == []
    kinds = [text for level, text in headings(page) if level == 2][:-2]
    assert set(kinds) <= set(ipufit.errors.__all__)
    exceptions = {
        n for n in ipufit.errors.__all__ if issubclass(resolve(f"ipufit.errors.{n}"), Exception)
    }
    assert exceptions - set(kinds) == {"IpufitError"}


def test_tests_that_the_pages_cite_exist():
    """A promise with the name of a test that is gone is an empty promise."""
    for path in PAGES:
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
