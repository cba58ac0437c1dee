"""The project's checks, one nox session each: `nox -l` is the menu, plain `nox` the quick part.

Versions and dependency groups come from pyproject.toml.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "typing", "tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
# What Python compiles and pytest rewrites is kept: each process of each session would do it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

PYPROJECT = nox.project.load_toml("pyproject.toml")
PROJECT = PYPROJECT["project"]
# Each test trains on one thread, so the cores share the tests.
PARALLEL = ("--numprocesses=auto", "--maxprocesses=4")
# What the suite has tests for, or compares with.
TESTED_EXTRAS = ("completion", "plot", "pandas", "report", "rich", "sklearn", "tensorboard")
TESTED = f".[{','.join(TESTED_EXTRAS)}]"
TAG = "-py3-none-any.whl"
# What is run against the wheel: some seconds, and a little of every part.
WHEEL_TESTS = [
    f"tests/{part}.py"
    for part in (
        *("test_import", "core/test_plan", "core/test_weights"),
        *("data/test_data_forms", "training/test_counts"),
    )
]
# A little of every room, under a minute and a half on two cores.
SMOKE_TESTS = [
    *WHEEL_TESTS,
    *(
        f"tests/{part}.py"
        for part in (
            *("callbacks/test_callback_list", "checkpoint/test_store", "engines/ipu/test_contract"),
            *("losses/test_losses", "partition/test_stage_names", "poptorch/test_micro_batches"),
            *("report/test_rows", "training/test_equality"),
        )
    ),
]
# What shows that an extra works, by its name: test files and folders, or scripts.
EXTRA_CHECKS = {
    "plot": ("tests/callbacks/test_history.py", "tests/analysis/test_lr_finder.py"),
    "pandas": ("tests/callbacks/test_history.py",),
    "tensorboard": ("tests/callbacks/test_tensorboard.py",),
    "hub": ("tests/engines/ipu/ipu_config/test_files.py",),
    "report": ("tests/report",),
    "rich": ("tests/callbacks/test_progress.py",),
    "completion": ("tests/cli/test_completion.py",),
    "sklearn": ("tests/sklearn",),
    "lightning": ("tests/lightning",),
    "examples": tuple(
        f"examples/{name}.py"
        for name in ("digits", "hugging_face", "lightning_module", "scikit_learn_estimator")
    ),
}
# What an extra's oldest versions need and do not ask for.
BESIDE_OLDEST = dict.fromkeys(("examples", "lightning"), ("setuptools<81",))
# What of a browser has to be in /usr/bin.
CHROMIUM = ("chromium", "chromedriver")
# Groups that pin other versions of the same libraries, for sessions that no change has to pass.
UNLOCKED = ("bench", "models")
OLDEST_PYTHON = PROJECT["requires-python"].replace(">=", "")
# The classifiers name the Pythons that are tested, from the oldest on.
NEWEST_PYTHON = PROJECT["classifiers"][-1].rpartition(" ")[2]
# What depends on the version of Python most: frames, tracebacks, bytecode, threads, start-up.
NEWEST_TESTS = [
    f"tests/{part}.py"
    for part in (
        *("test_import", "callbacks/test_callback_list", "callbacks/test_progress"),
        *("checkpoint/test_checkpoints", "checkpoint/test_resume", "cli/test_run_script"),
        *("data/test_bad_batches", "data/test_bad_loaders", "data/test_data_forms"),
        *("data/test_prefetch", "data/test_unreadable_data", "losses/test_bad_losses"),
        *("engines/embedded/batching/test_merging_rules", "tracing/test_bad_modules"),
        *("training/test_bad_arguments", "training/test_random_numbers", "training/test_traps"),
    )
]
# What depends on the version of torch most: what is recorded, what runs, and what trains.
OLDEST_TESTS = [
    *SMOKE_TESTS,
    *(f"tests/{room}" for room in ("engines/embedded", "optim", "tracing", "training")),
]


def group(*names: str) -> tuple[str, ...]:
    """List the requirements of these dependency groups of pyproject.toml."""
    return nox.project.dependency_groups(PYPROJECT, *names)


def oldest(requirements: list[str]) -> list[str]:
    """Name the oldest version that each of these requirements allows."""
    return [re.sub(r"^([\w.-]+)>=", r"\1==", requirement) for requirement in requirements]


def install(session: nox.Session, *requirements: str) -> None:
    """Install these with the versions of constraints.txt."""
    session.log("The first installation takes a minute or more, and prints nothing.")
    session.install("--constraint", "constraints.txt", *requirements)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests on this Python with the pinned torch, those of Model on both engines."""
    install(session, "-e", TESTED, *group("test", "torch"))
    session.run("python", "-m", "pytest", *PARALLEL, *(session.posargs or ["--engine=all"]))
    if not session.posargs:
        session.log("All tests passed, those of Model on both engines: ipufit works here.")
        session.log("Next: docs/quickstart.md to train, CONTRIBUTING.md to change something.")


@nox.session
def smoke(session: nox.Session) -> None:
    """Run a little of every room, for a first look."""
    install(session, "-e", TESTED, *group("test", "torch"))
    session.run("python", "-m", "pytest", *PARALLEL, *SMOKE_TESTS)


@nox.session
def exhaustive(session: nox.Session) -> None:
    """Run the tests with every point of their grids, and those that take long."""
    install(session, "-e", TESTED, *group("test", "torch"))
    options = session.posargs or ["--engine=all"]
    session.run("python", "-m", "pytest", "--exhaustive", *PARALLEL, *options)


@nox.session
def lowerings(session: nox.Session) -> None:
    """Run what compiles programs, every point of it, which takes minutes."""
    install(session, "-e", ".", *group("test", "torch"))
    suite = sorted(map(str, Path("tests").glob("**/test_*_compiled.py")))
    session.run("python", "-m", "pytest", "--exhaustive", *suite, *session.posargs)


@nox.session
def processes(session: nox.Session) -> None:
    """Run all that is tested in several processes, what takes long included."""
    install(session, "-e", ".", *group("test", "torch"))
    options = ("--exhaustive", "tests/processes", "--numprocesses=2")
    session.run("python", "-m", "pytest", *options, *session.posargs)


@nox.session
def browser(session: nox.Session) -> None:
    """Open pages of reports in Debian's Chromium, installed if need be; `-- --exhaustive`: all."""
    if not all(Path("/usr/bin", name).exists() for name in CHROMIUM):
        if shutil.which("apt-get") is None:
            session.error(f"needs {' and '.join(CHROMIUM)} in /usr/bin, and here is no apt-get.")
        as_root = () if os.geteuid() == 0 else ("sudo",)
        if as_root and shutil.which("sudo") is None:
            session.error("needs Chromium: as root, apt-get install chromium chromium-driver.")
        session.run(*as_root, "apt-get", "update", external=True)
        packages = ("chromium", "chromium-driver")
        command = ("apt-get", "install", "--yes", "--no-install-recommends", *packages)
        session.run(*as_root, *command, external=True)
    install(session, "-e", ".[report]", *group("browser", "torch"))
    session.run("python", "-m", "pytest", "tests/browser", *session.posargs)


@nox.session
def drill(session: nox.Session) -> None:
    """Kill training 200 times at random moments and go on from there; press Ctrl-C 200 times."""
    install(session, "-e", ".", *group("test", "torch"))
    session.run("python", "-m", "tests.drill", *session.posargs)


@nox.session
def soak(session: nox.Session) -> None:
    """Train for 20,000 executions and make 200 models, and see whether anything is left."""
    install(session, "-e", ".", *group("test", "torch"))
    session.run("python", "-m", "tests.soak", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Look for files of checkpoints that end reading in anything but ipufit's errors."""
    install(session, "-e", ".", "atheris>=3.0", *group("test", "torch"))
    options = session.posargs or ["-max_total_time=120"]
    for file in ("manifest.json", "state.json", "state.safetensors", "weights.safetensors"):
        limits = ("-rss_limit_mb=2048", "-timeout=10")
        session.run("python", "-m", "tests.fuzz", file, *limits, *options)


# Today's virtualenv can't make an environment of Python 3.8, that Python's own venv can.
@nox.session(python=OLDEST_PYTHON, venv_backend="venv")
def minimums(session: nox.Session) -> None:
    """Run the tests with the oldest Python and dependencies; `-- --part`: what needs them most."""
    extras = PROJECT["optional-dependencies"]
    promised = PROJECT["dependencies"]
    promised += [each for name in TESTED_EXTRAS for each in extras[name]]
    floors = oldest(promised)
    # torch 2.0 was built against NumPy 1 and can't hand arrays over to NumPy 2.
    session.install("-e", TESTED, *floors, "numpy<2", *group("test"))
    options = OLDEST_TESTS if session.posargs == ["--part"] else session.posargs
    session.run("python", "-m", "pytest", *PARALLEL, *options)


@nox.session(python=NEWEST_PYTHON)
def newest(session: nox.Session) -> None:
    """Run the tests on the newest Python that is tested."""
    session.install("-e", TESTED, *group("test", "torch"))
    session.run("python", "-m", "pytest", *PARALLEL, *session.posargs)


@nox.session
def torches(session: nox.Session) -> None:
    """Run what depends on torch, and all compiled updates, with these versions: `-- 2.14.1`."""
    if not session.posargs:
        session.error("name versions of torch: nox -s torches -- 2.6.0 2.14.1")
    for version in session.posargs:
        session.install("-e", TESTED, f"torch=={version}", *group("test"))
        session.run("python", "-m", "pytest", *PARALLEL, *OLDEST_TESTS)
        session.run("python", "-m", "pytest", "--exhaustive", "tests/engines/embedded/inductor")


@nox.session
def extras(session: nox.Session) -> None:
    """Try every extra, or those named, with its oldest and its newest versions."""
    promised = PROJECT["optional-dependencies"]
    if set(promised) != set(EXTRA_CHECKS):
        session.error("EXTRA_CHECKS must say what shows that each extra of pyproject.toml works.")
    session.install("-e", ".", *group("test", "torch"))
    for extra in session.posargs or promised:
        # The oldest were built for NumPy 1, and what they import warns of what it has given up.
        session.install(*oldest(promised[extra]), "numpy<2", *BESIDE_OLDEST.get(extra, ()))
        try_extra(session, extra, "-W", "default")
        session.install("--upgrade", *promised[extra], "numpy")
        try_extra(session, extra)


def try_extra(session: nox.Session, extra: str, *options: str) -> None:
    """Run what shows that an extra works; the options are pytest's."""
    checks, env = EXTRA_CHECKS[extra], {"MPLBACKEND": "Agg"}
    if extra != "examples":
        session.run("python", "-m", "pytest", *options, *checks, env=env)
        return
    for script in checks:
        session.run("python", script, env=env)


@nox.session
def keras(session: nox.Session) -> None:
    """Compare with Keras itself."""
    install(session, "-e", ".[pandas]", *group("keras", "torch"))
    suite = ("tests/against_keras", "tests/data/test_data_of_keras.py")
    session.run("python", "-m", "pytest", *suite, *PARALLEL, *session.posargs)


@nox.session
def diagnose(session: nox.Session) -> None:
    """Run all tests of the checks, those on models of the transformers library included."""
    install(session, "-e", ".", *group("diagnose", "torch"))
    folders = ("tests/analysis", "tests/tracing/test_detect_nan.py")
    session.run("python", "-m", "pytest", "--exhaustive", *folders, *session.posargs)


@nox.session
def integrations(session: nox.Session) -> None:
    """Run what is tested with other libraries: Lightning, transformers, trackers, notebooks."""
    install(session, "-e", ".[plot,report,sklearn]", *group("integrations", "torch"))
    folders = ("tests/integrations", "tests/lightning")
    session.run("python", "-m", "pytest", *folders, *PARALLEL, *session.posargs)
    options = ("tests/options", "-k", "StepsModel or every_flip or every_option")
    session.run("python", "-m", "pytest", *options, *PARALLEL)


@nox.session
def programs(session: nox.Session) -> None:
    """Fetch published programs for IPUs and run them as they are: `-- WORD ...` chooses some."""
    session.install(*group("torch"), "numpy", "pillow")  # what their data is made up with
    session.run("python", "-m", "tests.programs", *session.posargs)


@nox.session
def models(session: nox.Session) -> None:
    """Train published models of other libraries beside their plain loops: `-- WORD ...`."""
    session.install("-e", ".", *group("models", "torch"))
    session.run("python", "-m", "tests.models", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Time ipufit beside its peers on the same work: `-- --quick` for a look, else minutes."""
    session.install("-e", ".[plot]", *group("bench", "torch"))
    session.run("python", "-m", "tests.bench", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff, and that imports point down."""
    install(session, *group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports")


@nox.session
def house(session: nox.Session) -> None:
    """Measure the structure of the package, and hold it against the bounds that it has reached."""
    install(session, "-e", ".", *group("torch"))
    session.run("python", "-m", "tests.house")


@nox.session
def typing(session: nox.Session) -> None:
    """Check types with mypy, and that those of all public names are complete."""
    install(session, "-e", ".[completion,plot,tensorboard]", *group("typing", "torch"))
    session.run("mypy")
    report = Path(session.create_tmp(), "types.json").resolve()
    command = ("basedpyright", "--verifytypes", "ipufit", "--ignoreexternal", "--outputjson")
    with report.open("w", encoding="utf-8") as file:
        # It counts every module as public, and ends with 1; tests.complete_types knows better.
        session.run(*command, stdout=file, success_codes=[0, 1])
    session.run("python", "-m", "tests.complete_types", report)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages as a site, build/site, and run their Python snippets and all doctests."""
    install(session, "-e", ".[examples,tensorboard]", *group("docs", "torch"))
    site = Path("build", "site")
    shutil.rmtree(site, ignore_errors=True)
    strict = ("--fail-on-warning", "--keep-going", "--fresh-env", "--quiet")
    session.run("python", "-m", "sphinx", *strict, "-c", "docs", ".", site)
    session.run("python", "-m", "tests.pages", site)
    plugin = ("-p", "tests.docs_snippets")
    pages = ("README.md", "docs", "ipufit")
    session.run("python", "-m", "pytest", "--doctest-modules", *plugin, *pages, *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Run every script of examples/, and compare with docs/gallery.md; `-- --write`: write it."""
    install(session, "-e", ".[examples]", *group("torch"))
    session.run("python", "-m", "tests.gallery", *session.posargs)


@nox.session
def digits(session: nox.Session) -> None:
    """Train on the handwritten digits: examples/digits.py, as the README says."""
    install(session, "-e", ".[examples]", *group("torch"))
    session.run("python", Path("examples", "digits.py"), env={"MPLBACKEND": "Agg"})
    session.log("Passed: the net reads at least 97 % of the digits that it was not trained on.")
    session.log("Next: docs/quickstart.md explains each step, docs/gallery.md shows more.")


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist and the wheel into dist/, check them, test the wheel in a bare venv.

    `-- --newest`: on the newest Python that is tested, with what depends on it most.
    """
    install(session, *group("build"))
    is_newest = session.posargs == ["--newest"]
    python = install_wheel(session, build_package(session), is_newest)
    try_wheel(session, python, is_newest)


@nox.session
def release(session: nox.Session) -> None:
    """Make a release of the version named: files, package, SBOM, commit, tag: `-- 0.2.0`."""
    if len(session.posargs) != 1:
        session.error("name the version: nox -s release -- 0.2.0")
    (version,) = session.posargs
    install(session, *group("release"))
    session.run("python", "-m", "tests.release", version)
    wheel = build_package(session)
    python = install_wheel(session, wheel)
    sbom = wheel.with_name(f"ipufit-{version}.cdx.json")
    options = ("--output-reproducible", "--pyproject", "pyproject.toml", "--mc-type", "library")
    session.run("cyclonedx-py", "environment", *options, "--output-file", sbom, python)
    try_wheel(session, python)
    subject, tag = f"release {version}", f"v{version}"
    session.run("git", "commit", "--quiet", "--all", "--message", subject, external=True)
    session.run("git", "tag", "--annotate", tag, "--message", f"ipufit {version}", external=True)
    session.log(f"Tagged {tag}; dist/ holds sdist, wheel and SBOM. Nothing has left this machine.")
    session.log("To publish: git push --follow-tags; twine upload dist/*.tar.gz dist/*.whl")
    if "urls" not in PROJECT:
        session.warn("First add [project.urls] to pyproject.toml: an index would link nowhere.")


def build_package(session: nox.Session) -> Path:
    """Build the sdist and the wheel into dist/, and look into them."""
    dist = Path("dist")
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--sdist", "--wheel")
    (sdist,) = dist.resolve().glob("*.tar.gz")
    (wheel,) = dist.resolve().glob("*.whl")

    session.run("python", "-m", "twine", "check", "--strict", sdist, wheel)

    with tarfile.open(sdist) as archive:
        in_sdist = {Path(name).parts[1] for name in archive.getnames()}
    needed = {"CITATION.cff", "LICENSE", "SECURITY.md", "constraints.txt", "docs", "examples"}
    if lacking := (needed | {"tests"}) - in_sdist:
        session.error(f"{sdist.name} must hold {sorted(needed)}, but lacks {sorted(lacking)}.")

    in_wheel = wheel_files(wheel)
    facts = "ipufit/engines/ipu/preflight/facts.json"
    licence = f"{wheel.name[: -len(TAG)]}.dist-info/licenses/LICENSE"
    for file in ("ipufit/py.typed", facts, licence):
        if file not in in_wheel:
            session.error(f"{wheel.name} must hold {file}, but holds {sorted(in_wheel)}.")
    if strays := [name for name in in_wheel if not name.startswith(("ipufit/", "ipufit-"))]:
        session.error(f"{wheel.name} must hold nothing but ipufit, but holds {strays}.")

    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{wheel.name[: -len(TAG)]}.dist-info/METADATA").decode()
    if links := re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata):
        session.error(f"The page of a package index must stand alone, but links to {links}.")

    scratch = Path(session.create_tmp()).resolve()
    session.run("python", "-m", "pip", "wheel", "--no-deps", "--wheel-dir", scratch, sdist)
    if wheel_files(scratch / wheel.name) != in_wheel:
        session.error(f"{sdist.name} must build the wheel that the checkout builds, but does not.")
    return wheel


def install_wheel(session: nox.Session, wheel: Path, is_newest: bool = False) -> Path:
    """Make an environment of the wheel and what it needs, and nothing else; return its Python."""
    bare = Path(session.create_tmp()).resolve() / "bare"
    base = f"python{NEWEST_PYTHON}" if is_newest else "python"
    session.run(base, "-m", "venv", "--clear", "--without-pip", bare, external=is_newest)
    install_into(session, bare / "bin" / "python", wheel, *group("torch"))
    return bare / "bin" / "python"


def install_into(session: nox.Session, python: Path, *requirements: str | Path) -> None:
    """Install these into an environment that has no pip."""
    pip = ("python", "-m", "pip", "--python", python)
    session.run(*pip, "install", "--quiet", *requirements)


def try_wheel(session: nox.Session, python: Path, is_newest: bool = False) -> None:
    """Run what shows that the package works, in the environment of this Python."""
    suite = python.parents[2] / "suite"  # tests alone: the checkout must not be what is imported
    shutil.rmtree(suite, ignore_errors=True)
    shutil.copytree("tests", suite / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy("pyproject.toml", suite)
    # What the tests need comes last, so that the wheel alone was enough before.
    show = "import ipufit; print('ipufit', ipufit.__version__, 'from', ipufit.__file__)"
    with session.chdir(suite):
        session.run(python, "-I", "-c", show, external=True)
        session.run(python.with_name("ipufit"), "--help", external=True, silent=True)
        install_into(session, python, *group("test"))
        # Some are in both lists.
        chosen = dict.fromkeys([*WHEEL_TESTS, *(NEWEST_TESTS if is_newest else ())])
        session.run(python, "-m", "pytest", *PARALLEL, *chosen, external=True)


@nox.session
def lock(session: nox.Session) -> None:
    """Write constraints.txt anew: the newest versions that pyproject.toml allows."""
    session.install("uv>=0.9")
    groups = [f"--group={name}" for name in PYPROJECT["dependency-groups"] if name not in UNLOCKED]
    options = ("--universal", "--python-version=3.11", "--upgrade", "--all-extras", "--no-annotate")
    header = "--custom-compile-command=nox -s lock"
    output = "--output-file=constraints.txt"
    session.run(
        "uv", "pip", "compile", "--quiet", *options, header, output, *groups, "pyproject.toml"
    )


def wheel_files(path: Path) -> dict[str, int]:
    """Map each file of a wheel to the checksum of its contents."""
    with zipfile.ZipFile(path) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}
