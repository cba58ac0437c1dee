"""The benchmark: it times nothing that trains something else, and reports what was measured."""

import contextlib
import itertools
import math
from collections import Counter

import pytest
import torch

from ipufit.engines.embedded.autotune import JitAutotuner
from ipufit.engines.embedded.programs import training
from tests.bench import __main__ as bench
from tests.bench import costs as bench_costs
from tests.bench import curves, first_update, limits, shares
from tests.bench.__main__ import ALL, Extent, check, first, measured, tables
from tests.bench.costs import (
    Cost,
    cost_table,
    curve_costs,
    import_cost,
    memory_costs,
    share_costs,
    start_cost,
)
from tests.bench.curves import CURVES, Curve, medians, one_round
from tests.bench.limits import Limit, best_rate, limit_table, operations
from tests.bench.peers import (
    BY_HAND,
    COMPILED,
    EARLIER,
    FIRST_RUN,
    LONG_RUN,
    OWN,
    PEERS,
)
from tests.bench.report import Result, points_table, table, times, write
from tests.bench.running import Running
from tests.bench.workloads import WORKLOADS

TINY = Extent(rounds=2, epochs=1, updates=16, curve_rounds=1, curve_updates=4, times=1)


def has_fused_adam():
    """Whether this torch has it for the CPU."""
    try:
        torch.optim.Adam([torch.zeros(1)], fused=True)
    except RuntimeError:
        return False
    return True


# Of torch alone; those of other packages are compared by `nox -s bench`.
_OF_TORCH = ("tabular", "tagger", "unet")


@pytest.mark.few
@pytest.mark.parametrize("workload", [*WORKLOADS, *_OF_TORCH])
@pytest.mark.parametrize(
    "peer", [*(n for n in PEERS if n.startswith(OWN) and n != COMPILED), BY_HAND]
)
def test_peers_train_the_same(peer, workload):
    """Those that need nothing but torch; `nox -s bench` compares all before it times any."""
    if peer == BY_HAND and not has_fused_adam():
        pytest.skip("this torch has no fused Adam for the CPU")
    work = ALL[workload]
    _, wanted = PEERS["eager loop, DataLoader"](work)
    _, own = PEERS[peer](work)
    check(workload, peer, own(3), "by hand", wanted(3))


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        # Of a linear layer: forward, and the gradient of the weight, but not of the first input.
        ("mlp", 2 * 32 * (2 * 784 * 128 + 3 * 128 * 10)),
        # Four gates of each direction, each with a product of the input and one of the state; all
        # of it twice more in the gradient.
        ("tagger", None),
    ],
)
def test_operations_of_an_update_are_counted(workload, expected):
    pytest.importorskip("torch.utils.flop_counter")
    work = ALL[workload]
    if expected is None:
        words = sum(x.numel() for x, _ in work.batches()) / len(work.batches())
        expected = 3 * 2 * words * (2 * 4 * 128 * (64 + 128) + 256 * 10)
    assert operations(work) == pytest.approx(expected)


def test_the_best_rate_is_that_of_the_fastest_product(monkeypatch):
    monkeypatch.setattr(limits, "_seconds", lambda product, a, b: 4.0 if len(a) < 2048 else 0.5)
    assert best_rate() == 2 * 2048**3 / 0.5


def test_a_limit_is_a_share_of_the_time():
    limit = Limit("mlp", operations=2e9, seconds=0.04, rate=1e11)
    assert limit.share == pytest.approx(0.5)
    assert "| mlp | 2.00 | 20000 | 40000 | 0.50 |" in limit_table([limit])


def test_a_batch_of_the_tagger_is_of_one_bucket():
    """Each sentence once, cut behind its end at the latest; few are left over."""
    work = ALL["tagger"]
    x, _ = work.tensors()
    batches = work.batches()
    assert {words.shape[1] for words, _ in batches} == {16, 32, 48, 64}
    for words, classes in batches:
        assert words.shape == classes.shape == (work.batch, words.shape[1])
        assert (words[:, -16:] != 0).any(1).all()
        assert ((words == 0) == (classes == -100)).all()
    whole = [row for words, _ in batches for row in words.sum(1).tolist()]
    assert len(x) - 4 * work.batch < len(whole) <= len(x)
    assert not Counter(whole) - Counter(x.sum(1).tolist())


def test_workloads_say_which_peers_train_them():
    asked = {name: [peer for peer in PEERS if ALL[name].has(peer)] for name in ("mlp", "bert")}
    assert [peer for peer in PEERS if peer not in asked["mlp"]] == [
        "Trainer of transformers",
        "Accelerate",
    ]
    assert [peer for peer in PEERS if peer not in asked["bert"]] == [
        "Keras, torch",
        "Keras, JAX",
        "Keras, JAX, steps_per_execution=32",
        "skorch",
    ]


def test_a_peer_that_trains_something_else_is_not_timed():
    check("mlp", "one", [2.0, 1.001], "other", [2.0, 1.0])
    for losses in ([2.0, 1.01], [2.0, float("nan")]):
        with pytest.raises(SystemExit) as caught:
            check("mlp", "one", losses, "other", [2.0, 1.0])
        assert str(caught.value) == (
            f"mlp: the loss of one in update 1 is {losses[1]}, but that of other is 1.0: they do "
            "not train the same."
        )


@pytest.mark.long
@pytest.mark.parametrize("shared", [False, True])
def test_peers_are_measured_in_processes_of_their_own(shared):
    extent = Extent(**{**vars(TINY), "shared": shared})
    found = measured(["mlp"], [OWN, "eager loop, DataLoader"], extent)
    assert [(result.workload, result.peer) for result in found] == [
        ("mlp", "ipufit"),
        ("mlp", "eager loop, DataLoader"),
    ]
    for result in found:
        assert len(result.seconds) == TINY.rounds
        assert min(result.seconds) > 0
        assert (result.peak is None) == shared


class Asked:
    """Stands for a process; notes its cache, and what it is asked."""

    running = ()

    def __init__(self, module, name, cache):
        self.name, self.cache, self.work = name, cache, []
        self.running.append(self)

    def ask(self, **what):
        self.work.append((what["do"], what["workload"]))
        return {"losses": [1.0], "seconds": [1.0], "peak": 1.0}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.work.append("ends")


def test_only_a_later_run_finds_what_another_has_left(monkeypatch):
    """An earlier one, which has ended before any is timed; every other cache begins empty."""
    monkeypatch.setattr(Asked, "running", [])
    monkeypatch.setattr(bench, "Running", Asked)
    measured(["mlp"], [OWN, FIRST_RUN, BY_HAND], TINY)
    earlier, own, *others = Asked.running
    assert [peer.name for peer in Asked.running] == [EARLIER, OWN, FIRST_RUN, BY_HAND]
    assert earlier.work == [("rounds", "mlp"), "ends"]
    assert earlier.cache == own.cache
    assert len({own.cache, *(peer.cache for peer in others)}) == 3


def test_a_quick_look_has_no_earlier_run(monkeypatch):
    monkeypatch.setattr(Asked, "running", [])
    monkeypatch.setattr(bench, "Running", Asked)
    names = bench._names(quick=True)
    assert set(PEERS).difference(names) == {COMPILED, FIRST_RUN}
    measured(["mlp"], names, TINY)
    assert EARLIER not in [peer.name for peer in Asked.running]


@pytest.mark.parametrize("choice", ["graph", None])
def test_an_earlier_run_goes_on_until_its_updates_are_settled(choice, monkeypatch):
    """So that a later one finds what a training of days would leave."""
    work = ALL["mlp"].of(4)
    asked = []

    def chosen(tuner, make_trial):
        asked.append(tuner)
        tuner._choice = "graph" if len(asked) > 2 else None

    monkeypatch.setattr(JitAutotuner, "choose", chosen)
    monkeypatch.setattr(training, "missing", lambda: None if choice else "a compiler")
    rounds, _ = LONG_RUN(work)
    (seconds,) = rounds(1)
    assert seconds > 0
    assert len(asked) == (3 if choice else 0)


@pytest.mark.long
def test_a_process_that_ends_ends_the_benchmark():
    with pytest.raises(SystemExit, match="nobody ended with 1"):
        measured(["mlp"], ["nobody"], TINY)


def test_the_table_has_medians_and_ratios_round_by_round():
    first = Result("mlp", "ipufit", [1e-4, 2e-4, 4e-4], 2**20)
    other = Result("mlp", "loop", [3e-4, 2e-4, 4e-4], None)
    assert table([first, other]).splitlines()[2:] == [
        "| ipufit | 200 | 1.00 (1.00 to 1.00) | 1 |",
        "| loop | 300 | 1.00 (1.00 to 3.00) |  |",
    ]


def test_curves_go_from_point_to_point_and_line_to_line():
    """So that what the machine does at the time meets the lines of a point alike."""
    told = []

    def timer(line, point):
        return lambda: told.append((line, point)) or float(len(told))

    timers = [[timer(line, point) for point in (1, 2)] for line in "ab"]
    assert one_round(timers) == [[1.0, 3.0], [2.0, 4.0]]
    assert told == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


@pytest.mark.long
@pytest.mark.parametrize("name", CURVES)
def test_every_curve_can_be_measured(name, monkeypatch):
    """On few and small points, one epoch each."""
    if name == "width" and not has_fused_adam():
        pytest.skip("this torch has no fused Adam for the CPU")
    curve = CURVES[name]
    monkeypatch.setattr(curves, "_SAMPLES", (256,))
    curves._all_vectors.cache_clear()
    small = Curve(name, curve.title, curve.unit, (1, 2), curve.lines)
    if name == "samples":
        small = Curve(name, curve.title, curve.unit, (64, 128), curve.lines)
    found = one_round(curves.made(small, 4))
    curves._all_vectors.cache_clear()
    assert len(found) == len(curve.lines)
    assert all(len(line) == 2 and min(line) > 0 for line in found)


def test_the_median_of_a_curve_is_taken_point_by_point():
    assert medians([[1.0, 5.0], [3.0, 4.0], [2.0, 9.0]]) == [2.0, 5.0]


def test_the_table_of_a_curve():
    lines = [("ipufit", [1e-6, 2.5e-4]), ("loop", [3.14e-5, 1.0])]
    assert points_table("width", "µs an update", (64, 128), lines).splitlines() == [
        "| width | ipufit, µs an update | loop, µs an update |",
        "| ---: | ---: | ---: |",
        "| 64 | 1.0 | 31.4 |",
        "| 128 | 250 | 1000000 |",
    ]


def test_a_bound_that_does_not_hold_is_said_not_to():
    held = Cost("one", [0.1, 0.3, 0.2], " s", 0.2)
    broken = Cost("two", [0.05, 0.07], "%", 0.05)
    unknown = Cost("three", [math.nan], " x", 1.3)
    assert cost_table([held, broken, unknown]).splitlines()[2:] == [
        "| one | 0.20 s (0.10 s to 0.30 s) | 0.20 s | yes |",
        "| two | 6.0 % (5.0 % to 7.0 %) | 5.0 % | **no** |",
        "| three | nan x (nan x to nan x) | 1.30 x | **no** |",
    ]


def test_memory_is_held_against_the_loop_by_hand(monkeypatch):
    """Each time in new processes, which do nothing else."""
    peaks = {OWN: iter([110.0, 130.0] * len(WORKLOADS)), BY_HAND: itertools.repeat(100.0)}
    asked = []

    class Process(contextlib.nullcontext):
        def __init__(self, module, peer):
            super().__init__(self)
            self.peer = peer

        def ask(self, **what):
            asked.append((self.peer, what.pop("workload")))
            assert what == {"do": "rounds", "epochs": 3, "updates": 0}
            return {"seconds": [1.0], "peak": next(peaks[self.peer])}

    monkeypatch.setattr(bench_costs, "Running", Process)
    assert memory_costs(2) == [
        Cost(f"peak memory of the {name}, times the eager loop's", [1.1, 1.3], " x", 1.1)
        for name in WORKLOADS
    ]
    assert asked == [(peer, name) for name in WORKLOADS for peer in (OWN, BY_HAND) * 2]


def test_the_costs_of_the_curves():
    """The replicas round by round; of longer executions the worst point of the medians."""
    replicas, executions = curve_costs(
        [[4.0, 3.0, 3.0, 2.0], [4.0, 2.0, 3.0, 2.0], [4.0, 2.0, 2.5, 2.0]], [[1.0, 2.0, 3.0]]
    )
    assert (replicas.values, replicas.holds) == ([3.0], False)
    assert (executions.values, executions.holds) == ([1.5], False)


@pytest.mark.long
def test_fresh_processes_tell_of_import_and_start():
    for cost in (import_cost(1), start_cost(1), *memory_costs(1)):
        assert len(cost.values) == 1
        assert 0 < cost.median < 600


@pytest.mark.few
@pytest.mark.parametrize("name", shares.SHARES)
def test_every_share_can_be_measured(name, capsys):
    value = shares.SHARES[name](WORKLOADS["mlp"].of(8))()
    assert -1 < value < math.inf
    assert capsys.readouterr() == ("", "")
    assert len(share_costs(*[[value] for _ in shares.SHARES])) == len(shares.SHARES)


@pytest.mark.long
def test_the_wait_for_data_is_measured():
    """Of slow data it is most of the time."""
    import time

    from tests.bench.fitted import compiled, seconds_of_epochs

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            time.sleep(0.02)
            return torch.zeros(784), 0

    with shares.waits() as waited:
        fit = seconds_of_epochs(compiled(WORKLOADS["mlp"].module()), Slow(), None, batch_size=4)
        epochs = fit(2)
    assert len(waited) == 2
    assert 8 * 0.02 <= waited[1] <= epochs[1]


@pytest.mark.long
def test_the_curves_answer_as_a_process():
    with Running("tests.bench.curves") as running:
        (values,) = running.ask(curve="replicas", updates=2)["values"]
    assert len(values) == 4


@pytest.mark.long
def test_what_comes_before_a_first_update_is_told_by_part(monkeypatch):
    monkeypatch.setattr(first_update, "MODELS", {"an LSTM over 1,000 time steps": None})
    measured = first_update.first_updates(1)
    (first, *_), (later, *_) = measured[0].first, measured[0].later
    assert all(seconds >= 0 for each in (first, later) for seconds in each.values())
    lines = first_update.parts_table(measured).splitlines()
    assert [line.count("|") for line in lines] == [8] * 4
    assert lines[3].endswith(f"| {later['first']:.2f} |")
    whole, half = measured[0].costs()
    assert whole.values == [first["first"]]
    assert half.values == [later["first"]]
    assert half.bound == whole.bound / 2 > 1


def test_what_was_measured_takes_the_place_of_what_was(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Words\n\n<!-- measured -->\n\nold\n\n<!-- how -->\n\n## How\n", encoding="utf-8"
    )
    rounds = {"replicas": {"ipufit": [[1e-4] * 4]}}
    results = [Result("mlp", OWN, [1.0], None)]
    parts = tables(results, rounds, [Cost("one", [0.1], " s", 0.2)])
    write(page, ["note", *parts])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Words\n\n<!-- measured -->\n\nnote\n\n![")
    assert "\n\n## mlp\n\n| peer |" in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        *("# Words", "## mlp", "## Curves", "## Costs", "## How"),
    ]
    assert "\nold\n" not in text
    write(page, ["note", *parts])
    assert page.read_text(encoding="utf-8") == text


def test_the_page_begins_with_what_came_out():
    """Of the peers that a newcomer knows, on the best and the worst workload."""
    results = [
        *(Result("mlp", OWN, [1.0, 2.0], None), Result("mlp", BY_HAND, [3.0, 6.0], None)),
        *(Result("mlp", "another", [9.0, 9.0], None), Result("cnn", OWN, [1.0, 1.0], None)),
        Result("cnn", BY_HAND, [1.5, 1.5], None),
    ]
    name = "PyTorch loop with fused Adam"
    assert times(results) == {"mlp": {name: 3.0}, "cnn": {name: 1.5}}
    assert first(results) == [
        "![Time of an update, as bars](benchmarks-times.svg)",
        f"Time of an update on mlp, cnn, ipufit's being 1: {name} 1.5 to 3.0.",
    ]
    assert first(results[:2])[1] == f"Time of an update on mlp, ipufit's being 1: {name} 3.0."
    assert first([]) == []


@pytest.mark.long
def test_the_plots_are_drawn(tmp_path):
    """The same figures make the same files, small ones."""
    pytest.importorskip("matplotlib")
    from tests.bench.plots import plot_curves, plot_ratios, plot_times

    results = [
        Result(name, peer, [1e-4, 2e-4], None) for name in WORKLOADS for peer in (OWN, BY_HAND)
    ]
    found = {
        name: {line.name: [[1e-4] * len(curve.points)] for line in curve.lines}
        for name, curve in CURVES.items()
    }
    bars = (plot_times, times(results))
    for draw, values in (bars, (plot_ratios, results), (plot_curves, found)):
        drawn = []
        for path in (tmp_path / "one.svg", tmp_path / "two.svg"):
            draw(values, path)
            drawn.append(path.read_bytes())
        assert drawn[0] == drawn[1]
        assert b"<svg" in drawn[0]
        assert len(drawn[0]) < 100_000
