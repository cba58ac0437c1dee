"""Fixtures that many tests share, and how much of the grids is run."""

import collections
import gc
import importlib
import logging
import os
import pathlib
import signal
import sys

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
ENGINES = ("embedded", "ipu-standin")
# Folders whose tests choose their engines themselves, or need none. Every other test runs on the
# engine that --engine names, unless it is marked as both_engines.
OWN_ENGINES = (
    *("against_keras", "analysis/check", "analysis/compare", "bench", "browser", "cli"),
    *("conformance", "house", "integrations", "lightning", "pages", "poptorch", "processes"),
    *("report", "sklearn"),
)


def pytest_addoption(parser):
    """Offer the other engine, and all points of the grids."""
    parser.addoption(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="run the tests of Model alone, their models on this engine; by default all tests, "
        f"and those on {ENGINES[0]}",
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
    """The same examples in every run: a failure is then about the change, not about luck."""
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
    is_other = config.getoption("--engine") != ENGINES[0]
    return True if is_other and _has_own_engine(collection_path) else None


def _has_own_engine(path):
    """Whether tests of this file or folder choose their engines themselves, by its place."""
    parts = path.relative_to(TESTS).parts if TESTS in path.parents else ()
    return any(parts[: len(own)] == own for own in (tuple(f.split("/")) for f in OWN_ENGINES))


def pytest_report_header(config):
    """Say what is left out."""
    return None if _wants_browser(config) else "tests/browser is left out: nox -s browser runs it"


def _wants_browser(config):
    return any("browser" in pathlib.Path(arg.split("::")[0]).parts for arg in config.args)


def pytest_collection_modifyitems(config, items):
    """Leave out what the chosen points of the grids stand for, and what takes long."""
    for item in items:
        marker = item.get_closest_marker("embedded_only")
        if marker is not None and not (len(marker.args) == 1 and marker.args[0].strip()):
            raise pytest.UsageError(f"{item.nodeid}: embedded_only needs one reason")
    name = config.getoption("--engine")
    is_other = name != ENGINES[0]
    if is_other:
        done = [item for item in items if item.get_closest_marker("both_engines")]
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if not item.get_closest_marker("both_engines")]
    if config.getoption("--exhaustive"):
        return
    is_partly = IS_OLDEST or is_other
    points = collections.defaultdict(list)
    for item in items:
        if not any(name in mark.args or not mark.args for mark in item.iter_markers("long")):
            points[item.nodeid.partition("[")[0]].append(item)
    chosen = set()
    for test in points.values():
        few = test[0].get_closest_marker("few")
        named = test[:1] if few is None else _named(few.args, test, config)
        if is_partly or few is not None:
            chosen.update(named[:1] if is_partly else named)
        elif (grid := test[0].get_closest_marker("grid")) is not None:
            places = cover(sides(map(_parameters, test)), **grid.kwargs)
            chosen.update(test[place] for place in places)
        else:
            chosen.update(test)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _named(ids, test, config):
    """The points of a test with these ids; without any, the first."""
    points = {item.nodeid.partition("[")[2][:-1]: item for item in test}
    unknown = set(ids) - set(points)
    if unknown and not any("::" in arg for arg in config.args):
        name = test[0].nodeid.partition("[")[0]
        raise pytest.UsageError(f"{name}: few names {sorted(unknown)}, of points {list(points)}")
    return [points[each] for each in ids if each in points] or test[:1]


def _parameters(point):
    return point.callspec.params if hasattr(point, "callspec") else {}


@pytest.fixture(autouse=True)
def engine(request, monkeypatch):
    """The engine that runs the model, in float64 also on the stand-in for an IPU.

    A test marked ``embedded_only(reason)`` is about what an IPU can't do, or does otherwise.
    """
    name = request.config.getoption("--engine")
    if _has_own_engine(request.path):
        yield name
        return
    monkeypatch.setenv("IPUFIT_ENGINE", name)
    if name == "embedded":
        yield name
        return
    marker = request.node.get_closest_marker("embedded_only")
    if marker is not None:
        pytest.skip(f"embedded only: {marker.args[0]}")
    from ipufit.poptorch._precision import keep_float64

    with keep_float64():
        yield name


@pytest.fixture(autouse=True)
def _fixed_seed():
    """Every test starts from the same random numbers."""
    torch.manual_seed(0)
