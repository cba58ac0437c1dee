"""Every fact of the table holds for what it is about, and for nothing else."""

import json
import pkgutil
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.core.train_config import TrainConfig
from ipufit.engines.ipu.optimizers import check_optimizer
from ipufit.engines.ipu.preflight.evaluate import preflight
from ipufit.engines.ipu.preflight.facts import (
    CONDITIONS,
    CONSTANT,
    FACTS,
    LIMITED,
    SUPPORTED,
    UNKNOWN,
    UNSUPPORTED,
    Table,
)
from ipufit.errors import OptimizerError
from tests.engines.ipu.preflight.limits import LIMITS, X, keys
from tests.engines.ipu.preflight.looked_at import LOSS, batch_of, calls_of, report_of, said_of
from tests.engines.ipu.preflight.supported import SUPPORTED as CALLS

pytestmark = pytest.mark.both_engines

HANDLED = [f.key for f in FACTS if f.group == "operators" and f.verdict == SUPPORTED]
HANDLED.remove(CONSTANT)
TAKEN = [f.key for f in FACTS if f.group == "optimizers" and f.verdict == SUPPORTED]
TYPES = [f.key for f in FACTS if f.group == "dtypes" and f.verdict == SUPPORTED]
LIMITED_KEYS = [f.key for f in FACTS if f.verdict != SUPPORTED]


def test_every_fact_has_its_cases():
    """A fact that nothing tries may be wrong for years."""
    assert len({fact.key for fact in FACTS}) == len(FACTS)
    assert set(HANDLED) == set(CALLS)
    assert set(LIMITED_KEYS) == set(LIMITS)
    rest = {f.key for f in FACTS}.difference(HANDLED, LIMITED_KEYS, TAKEN, TYPES)
    assert rest == {CONSTANT}


@pytest.mark.few("aten::glu", "aten::_weight_norm_interface")
@pytest.mark.parametrize("key", HANDLED)
def test_an_operator_is_supported_by_its_row_alone(key):
    """What no row is about must be called unknown, or a hole in the table would read as a yes."""
    calls = calls_of(CALLS[key])
    assert key in {call.name for call in calls}
    assert {verdict for _, verdict in said_of(calls)} <= {LIMITED}
    assert (key, UNKNOWN) in said_of(calls, without=key)


@pytest.mark.parametrize("key", LIMITED_KEYS)
def test_a_limit_is_told_where_it_is_met(key):
    """Missed, it would cost hours of compiling."""
    assert key in LIMITS[key][0]()


@pytest.mark.few("aten::topk sorted=False", "poptorch.cond")
@pytest.mark.parametrize("key", LIMITED_KEYS)
def test_a_limit_is_told_nowhere_else(key):
    """A false alarm makes somebody rewrite what runs."""
    assert key not in LIMITS[key][1]()


def test_what_is_computed_of_constants_alone_needs_no_operator_of_its_own():
    """Masks are made so: PopTorch computes them on the host."""
    made = calls_of(lambda t: t.square + torch.ones(4, 4).tril())
    assert said_of(made) == set()
    assert ("aten::tril", UNKNOWN) in said_of(made, without=CONSTANT)
    assert ("aten::tril", UNKNOWN) in said_of(calls_of(lambda t: t.square.tril()))


def test_a_constant_that_an_input_is_written_into_is_none_any_more():
    """Else a missing operator would hide behind torch.zeros."""

    def filled(t):
        made = torch.zeros(4, 4)
        made[0] = t.row
        return made.tril()

    assert ("aten::tril", UNKNOWN) in said_of(calls_of(filled))


@pytest.mark.parametrize("key", TYPES)
def test_a_type_is_supported_by_its_row_alone(key):
    """A type that no line names must not pass."""
    x = torch.zeros(2, 3, dtype=getattr(torch, key))

    def said(facts):
        return preflight(nn.Identity(), LOSS, None, TrainConfig(), batch_of(x), Table(facts))

    assert not said(FACTS).findings
    missing = said([fact for fact in FACTS if fact.key != key]).unknown
    assert {finding.fact.key for finding in missing} == {key}


OPTIMIZERS = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "LAMB": ipufit.optim.LAMB,
}


def test_every_optimizer_of_the_table_is_tried():
    """The list of this file and that of the table are one."""
    assert sorted(TAKEN) == sorted(OPTIMIZERS)


@pytest.mark.parametrize("key", TAKEN)
def test_an_optimizer_is_supported_by_its_row_alone_and_by_the_engine(key):
    """What preflight says and what fit refuses must be the same."""
    net = nn.Linear(4, 3)
    optimizer = OPTIMIZERS[key](net.parameters(), lr=0.1)
    given = (net, LOSS, optimizer, TrainConfig(), batch_of(X))
    assert not preflight(*given).findings
    check_optimizer(optimizer, TrainConfig())
    without = Table([fact for fact in FACTS if fact.key != key])
    assert keys(preflight(*given, without)) == {"another class"}


@pytest.mark.parametrize("key", ["maximize", "amsgrad", "decoupled_weight_decay", "dampening"])
def test_the_engine_refuses_the_settings_that_preflight_does(key):
    """Both go by the same facts."""
    net = nn.Linear(4, 3)
    momentum = {"momentum": 0.9} if key == "dampening" else {}
    kind = torch.optim.SGD if key in ("maximize", "dampening") else torch.optim.Adam
    optimizer = kind(net.parameters(), lr=0.1, **momentum)
    optimizer.param_groups[0][key] = 0.5 if key == "dampening" else True
    fact = next(fact for fact in FACTS if fact.key == key)
    assert keys(preflight(net, LOSS, optimizer, TrainConfig(), batch_of(X))) == {key}
    with pytest.raises(OptimizerError, match=re.escape(fact.says)):
        check_optimizer(optimizer, TrainConfig())


def test_an_optimizer_of_another_kind_can_not_run():
    """PopTorch runs no Python code of an optimizer."""
    net = nn.Linear(4, 3)
    given = (net, LOSS, torch.optim.Adagrad(net.parameters()), TrainConfig(), batch_of(X))
    (finding,) = preflight(*given).unsupported
    assert (finding.what, finding.verdict) == ("Adagrad", UNSUPPORTED)
    assert "SGD, Adam, AdamW, RMSprop, LAMB" in finding.fact.says


def test_every_fact_says_where_it_is_written_and_how_to_go_on():
    """Without the line nobody can check it, and without the cure it is of little help."""
    for fact in FACTS:
        assert fact.places, fact.key
        assert all(place.line > 0 and "." in place.file for place in fact.places), fact.key
        assert fact.says, fact.key
        assert bool(fact.cure) or fact.verdict in (SUPPORTED, LIMITED), fact.key
        assert bool(fact.example) or fact.verdict == SUPPORTED, fact.key


def test_the_facts_are_a_file_of_the_package():
    """Whoever installs a wheel must have them, and whoever checks one reads it without Python."""
    rows = json.loads(pkgutil.get_data("ipufit.engines.ipu.preflight", "facts.json"))
    handlers = [f"aten::{name}" for names in rows["handlers"].values() for name in names]
    assert [*handlers, *(row["key"] for row in rows["facts"])] == [fact.key for fact in FACTS]


def test_every_condition_is_one_of_a_fact():
    """One that no row names would be dead, and one that nothing defines an error at the user's."""
    assert {fact.when for fact in FACTS if isinstance(fact.when, str)} == set(CONDITIONS)


SHOWN = [f for f in FACTS if f.example and f.group in ("operators", "losses", "layers")]
WORDS = {"torch": torch, "F": F, "nn": nn, "poptorch": poptorch}


@pytest.mark.few("aten::topk sorted=False", "aten::cross_entropy_loss label_smoothing")
@pytest.mark.parametrize("fact", SHOWN, ids=lambda fact: fact.key)
def test_the_example_of_a_fact_is_about_it(fact):
    """It stands in the file so that nobody has to guess what a row means."""
    if fact.group == "layers":
        if fact.key == "LayerNorm(bias=False)" and torch.__version__.startswith("2.0."):
            pytest.skip("torch 2.0 has no such argument")
        assert fact.applies(eval(fact.example, WORDS))
        return
    example = eval(f"lambda t: {fact.example}", WORDS)
    assert fact.key in keys(report_of(example))
