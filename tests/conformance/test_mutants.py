"""The cases pass on the real thing, and on nothing that differs from it."""

import pytest

from ipufit.conformance.implementations import IMPLEMENTATIONS
from ipufit.conformance.running import chosen, run_case
from tests.conformance.mutants import MUTANTS

IMPLEMENTED = {name: IMPLEMENTATIONS[name]() for name in ("embedded", "standin")}
POINTS = [
    pytest.param(name, case, id=f"{name}: {case.name}")
    for name, implementation in IMPLEMENTED.items()
    for case in chosen(["*"], implementation)
]


@pytest.mark.few
@pytest.mark.parametrize(("engine", "case"), POINTS)
def test_what_is_judged_passes_and_what_is_open_is_as_we_read_it(engine, case):
    """In float64, at rounding."""
    row = run_case(IMPLEMENTED[engine], case)
    if row.outcome == "skip":
        pytest.skip(row.details)
    if not case.question:
        assert (row.outcome, row.details) == ("pass", "")
        return
    assert row.outcome == "open"
    if case.scenario is None or case.scenario.mean_strategy == "PostAndLoss":
        assert row.details  # an observation
    else:
        assert row.details == "as we read it"


def test_there_are_enough_mutants():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 25


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mutant_is_killed(mutant):
    """Run until the first case that sees it, of those that have to.

    A case that ends with an exception has seen nothing: the mutant may be at fault.
    """
    implementation = IMPLEMENTED[mutant.engine]
    cases = [case for case in chosen([mutant.killed_by], implementation) if not case.question]
    assert cases
    with mutant.applied():
        killed = any(run_case(implementation, case).outcome == "fail" for case in cases)
    assert killed
