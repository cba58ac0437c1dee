"""Every option of every public function changes something: none is silently ignored."""

import functools
import importlib
import inspect

import pytest

import ipufit
from ipufit.callbacks import Callback
from ipufit.callbacks.callback import EVENTS
from ipufit.engines.program import Engine, Program
from ipufit.metrics.by_task import TaskMetric
from tests.engines import embedded_only
from tests.options import FLIPS, callbacks, config, model, observed, parts, steps

__all__ = ["callbacks", "config", "model", "parts", "steps"]

MODULES = ["ipufit", "ipufit.testing"]

# A subclass that implements an inherited interface is called by the library, not by the user, so
# the arguments of these methods are no options.
INTERFACES = [Callback, Program, Engine, TaskMetric]

# What calls return, and nobody makes. They are public as types to annotate with.
RETURNED = [ipufit.Comparison, ipufit.InvarianceReport, ipufit.PreflightFinding]
# The methods of this one are called where Lightning is, as in `nox -s integrations`.
RETURNED += [ipufit.StepsModel] if steps.LIGHTNING is None else []


def is_called_by_us(kind, method):
    """Whether the class has the method from an interface that the library calls."""
    return any(issubclass(kind, face) and method in vars(face) for face in INTERFACES)


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    """Where tests run side by side, tqdm would cut its lines within a rate, which differs."""
    monkeypatch.delenv("COLUMNS", raising=False)


def public():
    """Public functions and classes by their shortest full name, without "ipufit."."""
    found, waiting, seen = {}, list(MODULES), set()
    while waiting:
        place = waiting.pop(0)
        module = importlib.import_module(place)
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value):
                waiting.append(value.__name__)
            elif id(value) not in seen:
                seen.add(id(value))
                found[f"{place}.{name}"[len("ipufit.") :]] = value
    return found


def functions():
    """Every public function, constructor and method, by name."""
    found = public()
    for name, value in found.items():
        if value in RETURNED:
            continue
        if not inspect.isclass(value):
            yield name, value
            continue
        # Bases that are not public themselves are parts of the class, or of a base that is.
        bases = [kind for kind in value.__mro__[1:] if kind.__module__.startswith("ipufit.")]
        others = [kind for kind in bases if kind in found.values()]
        parts = [value, *(b for b in bases if not any(issubclass(kind, b) for kind in others))]
        members = {own: member for kind in reversed(parts) for own, member in vars(kind).items()}
        for own, member in members.items():
            member = getattr(member, "__func__", member)
            if not inspect.isfunction(member) or (own.startswith("_") and own != "__init__"):
                continue
            if own == "__init__":
                yield name, member
            elif not is_called_by_us(value, own):
                yield f"{name}.{own}", member


def defaults(function):
    """The default values of a function's options, or what says that there is none."""
    parameters = dict(inspect.signature(function).parameters)
    # LambdaCallback takes the hooks of all events by name.
    by_name = EVENTS if parameters.pop("hooks", None) is not None else ()
    # Those of the same method of Model go by name.
    parameters.pop("options", None)
    return {**dict.fromkeys(by_name), **{name: p.default for name, p in parameters.items()}}


def options():
    """(function, option) of all of them."""
    return {
        (name, option)
        for name, function in functions()
        for option in defaults(function)
        if option not in ("self", "cls")
    }


def twice(observe, given):
    """What is seen, which must be the same when nothing is flipped."""
    found = observed(observe, given)
    assert observed(observe, given) == found
    return found


BASELINES = {}


def baseline(observe, also):
    """The same without the option, once for all flips beside these; None where one is required."""
    # By the objects: what a registry says of several options is one object.
    key = (observe, *sorted((name, id(value)) for name, value in also.items()))
    if key not in BASELINES:
        try:
            inspect.signature(observe).bind(**also)
        except TypeError:
            return None
        # Once more only where nothing is said beside it: the rest is the same function.
        see = observed if also else twice
        BASELINES[key] = see(observe, also)
    return BASELINES[key]


@functools.lru_cache(maxsize=None)
def defaults_of(function):
    """The default values of a public function's options, by its name."""
    return defaults(dict(functions())[function])


def test_every_option_has_a_flip():
    """A new option comes with the proof that it does something."""
    assert len(options()) > 250
    assert options() - set(FLIPS) == set()


def test_every_flip_has_an_option():
    """A flip of what is gone would go on passing."""
    assert set(FLIPS) - options() == set()


@pytest.mark.parametrize(("function", "option"), FLIPS)
@embedded_only("its models run eagerly, because hundreds of them are compiled")
def test_the_option_changes_something(function, option, request):
    """A result, a report or an exception; with --exhaustive, the same value twice changes nothing.

    Else that is seen of each function without options alone, and what several options are compared
    with is seen once.
    """
    observe, name, flip = FLIPS[function, option]
    value, changed = flip.values
    is_exhaustive = request.config.getoption("--exhaustive")
    is_default = defaults_of(function)[option] is value
    is_shared = is_default and not (flip.also and is_exhaustive)
    one = baseline(observe, flip.also) if is_shared else None
    if one is None:
        see = twice if is_exhaustive else observed
        one = see(observe, {name: value, **flip.also})
    assert one != observed(observe, {name: changed, **flip.also})


def test_the_walk_reaches_all_kinds():
    """If it went no further than the first module, nothing above would notice."""
    names = {name for name, _ in functions()}
    for name in (
        "Model.fit",
        "callbacks.EarlyStopping",
        "optim.LAMB",
        "optim.schedules.resolve_schedule",
        "errors.PlanError",
        "testing.RecordingProgram",
        "History.from_json",
        *(() if steps.LIGHTNING is None else ("StepsModel.fit", "StepsModel.test")),
    ):
        assert name in names
    assert inspect.isclass(ipufit.Model)
