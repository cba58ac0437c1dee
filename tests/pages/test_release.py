"""What a release says of itself in several places, and how it comes to say so."""

import ast
import datetime
import importlib.util
import re
import shutil
import sys
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ipufit
from tests import release

ROOT = Path(__file__).resolve().parents[2]
DAY = datetime.date(2027, 1, 2)


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere():
    """Who cites a release must be able to find it."""
    for file, pattern in release.VERSIONED.items():
        assert re.findall(pattern, text_of(file)) == [ipufit.__version__]


@pytest.fixture
def standalone(monkeypatch):
    """The function of hatch_build.py, without hatchling."""
    interface = types.SimpleNamespace(MetadataHookInterface=object)
    for name in ("hatchling", "hatchling.metadata", "hatchling.metadata.plugin"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.standalone


def test_a_package_index_gets_a_page_that_stands_alone(standalone):
    """Relative links would lead nowhere there."""
    page = "a [b c](docs/b.md#d), ![e](docs/e.svg) [f](https://f.example/) [g](#g)"
    assert standalone(page, "") == "a b c (`docs/b.md#d`),  [f](https://f.example/) [g](#g)"
    assert standalone(page, "https://a.example/b/{kind}/v1/") == (
        "a [b c](https://a.example/b/blob/v1/docs/b.md#d), "
        "![e](https://a.example/b/raw/v1/docs/e.svg) [f](https://f.example/) [g](#g)"
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not re.search(r"\]\((?!https?:|#)", standalone(readme, ""))


@pytest.fixture
def checkout(tmp_path):
    """A repository with the files of a release, all committed."""
    for file in (*release.VERSIONED, "CHANGELOG.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    changelog = "# Changelog\n\n## [Unreleased]\n\n- New.\n\n## [0.0.1] - 2026-01-01\n\n- Old.\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    release.git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def commit(folder):
    release.git(folder, "add", "--all")
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    release.git(folder, *author, "commit", "--quiet", "--message", "all")


def test_a_release_is_written_wherever_a_version_stands(checkout):
    """One place that is forgotten is a release of two versions."""
    assert [*release.faults(checkout, "1.2.0rc1")] == []
    release.write(checkout, "1.2.0rc1", DAY)
    for file, pattern in release.VERSIONED.items():
        assert re.findall(pattern, (checkout / file).read_text()) == ["1.2.0rc1"]
    assert "date-released: 2027-01-02\n" in (checkout / "CITATION.cff").read_text()
    assert (checkout / "CHANGELOG.md").read_text() == (
        "# Changelog\n\n## [Unreleased]\n\n## [1.2.0rc1] - 2027-01-02\n\n- New.\n\n"
        "## [0.0.1] - 2026-01-01\n\n- Old.\n"
    )
    commit(checkout)
    assert [*release.faults(checkout, "1.3.0")] == [
        "CHANGELOG.md must say under [Unreleased] what is new, but says nothing"
    ]


def test_what_stands_against_a_release_is_said_together(checkout):
    """A tag that is out can't be taken back."""
    release.git(checkout, "tag", f"v{ipufit.__version__}")
    (checkout / "stray.txt").write_text("")
    assert [*release.faults(checkout, ipufit.__version__)] == [
        f"a version must be newer than {ipufit.__version__}, got {ipufit.__version__}",
        "everything must be committed, but these are not:\n?? stray.txt",
        f"the tag v{ipufit.__version__} is there already",
    ]


@pytest.mark.parametrize(
    ("version", "fault"),
    [
        ("v1.0", "a version is written in its normal form, 1.0, got v1.0"),
        ("next", "a version must be one of PEP 440, such as 0.2.0 or 1.0.0rc1, got next"),
    ],
)
def test_a_release_has_a_version_that_installers_understand(checkout, version, fault):
    """An index refuses others once the tag is out."""
    assert [*release.faults(checkout, version)] == [fault]


def locked():
    """Every version of constraints.txt by name; some packages have one for each Python."""
    found = {}
    for line in re.findall(r"^[a-zA-Z].*$", text_of("constraints.txt"), re.M):
        requirement = Requirement(line)
        (version,) = (each.version for each in requirement.specifier)
        found.setdefault(requirement.name, []).append(version)
    return found


def sections():
    """The requirements of pyproject.toml by the name of their list."""
    text = text_of("pyproject.toml")
    lists = re.findall(r"^(\w+) = \[(.*?)\](?=\n(?:\w|#|\n))", text, re.M | re.S)
    bodies = {name: re.sub(r"\{ include-group.*? \}", "", body) for name, body in lists}
    return {name: re.findall(r'"([\w.-]+[^"]*)"', body) for name, body in bodies.items()}


def test_constraints_are_of_what_the_sessions_install():
    """A constraint of yesterday's version would be refused as nox -s tests begins."""
    versions, found = locked(), sections()
    names = ("dependencies", "plot", "examples", "test", "torch", "docs", "lint", "typing", "keras")
    for name in (*names, "integrations", "build", "release", "diagnose", "browser"):
        assert found[name]
        for requirement in map(Requirement, found[name]):
            known = versions[requirement.name.lower()]
            assert any(requirement.specifier.contains(each) for each in known), requirement


def test_extras_pin_nothing():
    """Who installs one beside a program of theirs has other versions already."""
    extras = text_of("pyproject.toml").partition("[project.optional-dependencies]")[2]
    extras = extras.partition("\n[")[0]
    assert len(re.findall(r'"[\w.-]+>=[\d.]+"', extras)) == extras.count('"') // 2 > 8


@pytest.mark.skipif(sys.version_info < (3, 10), reason="says which modules are Python's own")
def test_extra_examples_has_what_the_examples_import():
    """One command installs what the README says they need."""
    names = {requirement.partition(">=")[0] for requirement in sections()["examples"]}
    imported = set()
    for script in (ROOT / "examples").glob("*.py"):
        for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    # ipufit, and what it needs itself.
    imported -= {
        "ipufit",
        "numpy",
        "safetensors",
        "torch",
        "torchmetrics",
        *sys.stdlib_module_names,
    }
    # What History.plot and the report draw with is imported when they do.
    drawing = {"matplotlib", "plotly", "jinja2"}
    assert {{"sklearn": "scikit-learn"}.get(name, name) for name in imported} | drawing == names


def test_hooks_have_the_versions_of_the_checks():
    """Else a commit passes here and fails there."""
    hooks = set(
        re.findall(r"additional_dependencies: \[(.*?)\]", text_of(".pre-commit-config.yaml"))
    )
    assert hooks == {f'"{requirement}"' for requirement in sections()["lint"]}


def test_the_hosted_checks_are_those_of_every_change():
    """What passes on a code host must pass here, and the other way round."""
    workflow = text_of(".github/workflows/checks.yml")
    hosted = set(re.findall(r"^ +- (\w+)(?: --.*)?$", workflow, re.M))
    here = text_of(".ci/run")
    sessions = set(re.findall(r"^@nox\.session.*\ndef (\w+)", text_of("noxfile.py"), re.M))
    assert hosted == {name for name in sessions if re.search(rf"\b{name}\b", here)} - {"newest"}
