"""Fixtures that many tests share, and how much of the grids is run."""

import collections
import functools
import gc
import importlib
import logging
import os
import pathlib
import signal
import sys
import tempfile

import hypothesis
import pytest
import torch

from tests.covering import cover, sides

# pytest would listen to torch's log of its own tracing, and each tensor of a recording then write
# its stack there.
logging.getLogger("torch.__trace").propagate = True

# The tensors of the tests are too small to share between cores, and waiting for a busy core costs
# more than the work.
torch.set_num_threads(1)

# Workers of a parallel run are told a width, at which tqdm would cut its lines.
os.environ.pop("COLUMNS", None)

# A shell starts its background jobs with Ctrl-C ignored; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The oldest Python, where missing names and grammar would show, and the other engine, which has
# tests of its own, run the first of several points; so many examples show a property.
IS_OLDEST = sys.version_info < (3, 9)
EXAMPLES, ALL_EXAMPLES = 200, 2000

TESTS = pathlib.Path(__file__).parent
BROWSER = TESTS / "browser"
OF_THE_SDK = ("horovod", "libpvti", "popart", "popdist", "poptorch", "poptorch_geometric")
ENGINES = ("embedded", "ipu-standin")
# Where a test, and what runs now, keep the name of their engine.
ENGINE = pytest.StashKey()
# Folders whose tests choose their engines themselves, or need none. Every other test runs on the
# engine that --engine names, unless it is marked as both_engines.
OWN_ENGINES = (
    *("against_keras", "analysis/check", "analysis/compare", "as_poptorch", "bench", "browser"),
    *("cli", "conformance", "house", "integrations", "lightning", "pages", "poptorch", "processes"),
    *("report", "search", "sklearn"),
)


def pytest_addoption(parser):
    """Offer the other engine, and all points of the grids."""
    parser.addoption(
        "--engine",
        choices=(*ENGINES, "all"),
        default=ENGINES[0],
        help="run the tests of Model alone, their models on this engine; by default all tests, "
        f"and those on {ENGINES[0]}; with all, those of Model once more on the others",
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every point of the tests marked as a grid, not those in which every two values "
        "meet, and of those marked as few, not those that are named, on the oldest Python and the "
        "other engine of all tests, not the first alone, those marked as long, and "
        f"{ALL_EXAMPLES} examples of each property, not {EXAMPLES}",
    )


def pytest_configure(config):
    """The same examples in every run: a failure is then about the change, not about luck.

    Nor is it about what earlier runs have left in the user's cache.
    """
    cache = tempfile.TemporaryDirectory(prefix="ipufit-tests-")
    config.add_cleanup(cache.cleanup)
    os.environ["IPUFIT_CACHE_DIR"] = cache.name
    count = ALL_EXAMPLES if config.getoption("--exhaustive") else EXAMPLES
    hypothesis.settings.register_profile(
        "same", max_examples=count, deadline=None, derandomize=True, database=None
    )
    hypothesis.settings.load_profile("same")


@pytest.hookimpl(hookwrapper=True)
def pytest_collection():
    """Keep what imports and collection have made out of the garbage collector's sight.

    It would go through a million objects again and again, a quarter of the time of all tests. What
    torch imports for its first recording is half of them.
    """
    gc.disable()
    yield
    importlib.import_module("torch._dynamo")
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path, config):
    """Leave out what needs a browser, unless it is asked for, and what runs on no other engine."""
    if collection_path == BROWSER and not _wants_browser(config):
        return True
    is_other = config.getoption("--engine") in ENGINES[1:]
    return True if is_other and _has_own_engine(collection_path) else None


@functools.lru_cache(maxsize=None)
def _has_own_engine(path):
    """Whether tests of this file or folder choose their engines themselves, by its place."""
    parts = path.relative_to(TESTS).parts if TESTS in path.parents else ()
    return any(parts[: len(own)] == own for own in (tuple(f.split("/")) for f in OWN_ENGINES))


def pytest_report_header(config):
    """Say what is left out."""
    return None if _wants_browser(config) else "tests/browser is left out: nox -s browser runs it"


def pytest_terminal_summary(terminalreporter):
    """Say why tests were skipped, each reason once, however many files have it."""
    skipped = terminalreporter.getreports("skipped")
    reasons = collections.Counter(report.longrepr[2].partition(": ")[2] for report in skipped)
    if reasons:
        terminalreporter.section("skipped")
        for reason, count in sorted(reasons.items()):
            terminalreporter.line(f"{count:4d}  {reason}")


def _wants_browser(config):
    return any("browser" in pathlib.Path(arg.split("::")[0]).parts for arg in config.args)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leave out what the chosen points of the grids stand for, and what takes long.

    What runs on another engine as well stands behind the rest once more.
    """
    # Before -k leaves points out that a marker names.
    faults = [fault for item in items for fault in _faults_of_markers(item)]
    faults += _unknown_points(config, items)
    if faults:
        # Of a worker, pytest-xdist shows no UsageError.
        kind = RuntimeError if hasattr(config, "workerinput") else pytest.UsageError
        raise kind("\n".join(faults))
    yield  # fixtures put the tests in order
    wanted = config.getoption("--engine")
    chosen = []
    for name in ENGINES if wanted == "all" else (wanted,):
        found = items if name == ENGINES[0] else list(filter(_is_of_model, items))
        if not config.getoption("--exhaustive"):
            found = _stand_for_all(found, name)
        if wanted == "all" and name != ENGINES[0]:
            found = [_once_more(item, name) for item in found]
        for item in found:
            item.stash[ENGINE] = name
        chosen.extend(found)
    left = set(items).difference(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = chosen


def _faults_of_markers(item):
    marker = item.get_closest_marker("embedded_only")
    if marker is not None and not (len(marker.args) == 1 and str(marker.args[0]).strip()):
        yield f"{item.nodeid}: embedded_only needs one reason"


def _unknown_points(config, items):
    """Names of points that the marker ``few`` has, and its test has not."""
    if any("::" in arg for arg in config.args):
        return []
    points = collections.defaultdict(set)
    for item in items:
        test, _, point = item.nodeid.partition("[")
        marker = item.get_closest_marker("few")
        if marker is not None:
            points[test, marker.args].add(point[:-1])
    return [
        f"{test}: few names {sorted(set(args) - ids)}, of points {sorted(ids)}"
        for (test, args), ids in points.items()
        if not ids.issuperset(args)
    ]


def _is_of_model(item):
    """Whether a test runs on every engine."""
    marks = ("both_engines", "embedded_only")
    return not _has_own_engine(item.path) and not any(map(item.get_closest_marker, marks))


def _once_more(item, engine):
    """The same test under another name, of which pytest makes its id."""
    name = f"{item.originalname}:{engine}"
    return type(item).from_parent(
        item.parent,
        name=name + item.name[len(item.originalname) :],
        callspec=getattr(item, "callspec", None),
        callobj=item.obj,
        fixtureinfo=item._fixtureinfo,
        originalname=name,
    )


def _stand_for_all(items, engine):
    """The tests, in their order, without those for which others stand on this engine."""
    is_partly = IS_OLDEST or engine != ENGINES[0]
    points = collections.defaultdict(list)
    for item in items:
        if not any(engine in mark.args or not mark.args for mark in item.iter_markers("long")):
            points[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for test in points.values():
        few = test[0].get_closest_marker("few")
        named = test[:1] if few is None else _named(few.args, test)
        if is_partly or few is not None:
            chosen.update(named[:1] if is_partly else named)
        elif (grid := test[0].get_closest_marker("grid")) is not None:
            places = cover(sides(map(_parameters, test)), **grid.kwargs)
            chosen.update(test[place] for place in places)
        else:
            chosen.update(test)
    return [item for item in items if item in chosen]


def _named(ids, test):
    """The points of a test with these ids; without any, or none on this engine, the first."""
    points = {item.nodeid.partition("[")[2][:-1]: item for item in test}
    return [points[each] for each in ids if each in points] or test[:1]


def _parameters(point):
    return point.callspec.params if hasattr(point, "callspec") else {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Say on which engine models run, also to the fixtures of a module; in float64 on each."""
    engine = item.stash[ENGINE]
    os.environ.pop("IPUFIT_ENGINE", None)
    if not _has_own_engine(item.path):
        os.environ["IPUFIT_ENGINE"] = engine
    if engine == ENGINES[0]:
        yield
        return
    from ipufit.poptorch._precision import keep_float64

    with keep_float64():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """What the fixtures of a module have made on one engine is not for another."""
    session, engine = item.session, item.stash[ENGINE]
    if session.stash.get(ENGINE, engine) != engine:
        session._setupstate.teardown_exact(None)
    session.stash[ENGINE] = engine


@pytest.fixture
def imports(monkeypatch):
    """What ``import`` finds, and what a script sees of its process, are put back after the test.

    No poptorch, nor what is imported beside it, has been imported or is on the path.
    """
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    # Beside the tests lie folders with these names.
    path = [entry for entry in sys.path if not pathlib.Path(entry, "poptorch").exists()]
    monkeypatch.setattr(sys, "path", path)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("IPUFIT_CLAIM_IPUS", "0")
    for name in ("IPUFIT_POPTORCH", "IPUFIT_STANDINS_NAMED"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in OF_THE_SDK]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in OF_THE_SDK]:
        del sys.modules[name]
    vars(torch.ops).pop("poptorch", None)


@pytest.fixture
def engine(request):
    """The engine that runs the model."""
    return request.node.stash[ENGINE]


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Every test starts from the same random numbers."""
    # To seed devices that are not there takes as long as a short test.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)
