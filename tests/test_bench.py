"""The benchmark: it times nothing that trains something else, and reports what was measured."""

import pytest
import torch

from tests.bench.__main__ import check
from tests.bench.peers import PEERS
from tests.bench.report import Result, table
from tests.bench.workloads import WORKLOADS

pytestmark = pytest.mark.both_engines


def has_fused_adam():
    """Whether this torch has it for the CPU."""
    try:
        torch.optim.Adam([torch.zeros(1)], fused=True)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(
    "peer", ["ipufit", "eager loop, DataLoader", "eager loop, indexed, fused Adam"]
)
def test_peers_train_the_same(peer, workload):
    """Those that need nothing but torch; `nox -s bench` compares all before it times any."""
    if "fused" in peer and not has_fused_adam():
        pytest.skip("this torch has no fused Adam for the CPU")
    work = WORKLOADS[workload]
    _, wanted = PEERS["eager loop, DataLoader"](work)
    _, own = PEERS[peer](work)
    check(workload, peer, own(3), "by hand", wanted(3))


def test_a_peer_that_trains_something_else_is_not_timed():
    check("mlp", "one", [2.0, 1.001], "other", [2.0, 1.0])
    for losses in ([2.0, 1.01], [2.0, float("nan")]):
        with pytest.raises(SystemExit) as caught:
            check("mlp", "one", losses, "other", [2.0, 1.0])
        assert str(caught.value) == (
            f"mlp: the loss of one in update 1 is {losses[1]}, but that of other is 1.0: they do "
            "not train the same."
        )


def test_the_table_has_medians_and_ratios_round_by_round():
    first = Result("mlp", "ipufit", [1e-4, 2e-4, 4e-4], 2**20)
    other = Result("mlp", "loop", [3e-4, 2e-4, 4e-4], 2**21)
    assert table([first, other]).splitlines()[2:] == [
        "| ipufit | 200 | 1.00 (1.00 to 1.00) | 1 |",
        "| loop | 300 | 1.00 (1.00 to 3.00) | 2 |",
    ]
