"""``ipufit bench`` times a script's program in several ways, which must give the same losses."""

import json

import pytest

from ipufit.cli.main import main
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.inductor import requirements

NET = "nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))"
# Two executions of two updates in an epoch.
FIT = (
    "made(net{}).fit(x[:32], y[:32], batch_size=4, epochs=1000000, ipus=2, device_iterations=2, "
    "seed=5)\n"
)
COUNTING = """
import os

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        os.environ["CALLS"] = "0"

    def forward(self, x):
        os.environ["CALLS"] = str(int(os.environ["CALLS"]) + 1)
        return self.layer(x) * int(os.environ["CALLS"])

net = Net()
"""
BRANCHING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else -self.layer(x)

net = Net()
"""
COMPLEX = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(torch.fft.rfft(x).abs())

net = Net()
"""
SHORT = ("--seconds", "0.01")


@pytest.fixture
def bench(command):
    """Status, the JSON that is printed or None, and stderr."""

    def run(text, *options):
        status, out, err = command("bench", text, *SHORT, "--json", *options)
        return status, json.loads(out) if out else None, err

    return run


def test_ways_are_timed_and_agree(bench):
    """With the same random numbers, a recorded program has the bits of the module."""
    status, found, err = bench(f"print('hello')\nnet = {NET}\n{FIT.format('')}")
    ways = found.pop("ways")
    assert (status, err, found["agree"]) == (0, "hello\n", True)
    assert (found["engine"], found["compiled"]) == ("embedded", "auto")
    assert (found["update_size"], found["device_iterations"], found["rounds"]) == (8, 2, 3)
    assert [way["name"] for way in ways] == ["off", "graph", "kernels"]
    assert [way["loss_away"] for way in ways[:2]] == [0, 0]
    assert ways[0]["ratio"] == {"median": 1, "low": 1, "high": 1}
    for way in ways:
        assert way["agrees"]
        assert way["loss_away"] <= way["loss_may_be_away"] < 1e-3
        assert way["executions"] >= 3
        assert way["samples_per_second"] == 8 * way["updates_per_second"] > 0
        assert 0 < way["ratio"]["low"] <= way["ratio"]["median"] <= way["ratio"]["high"]
        assert way["seconds_waiting_for_data"] >= 0


def test_nothing_of_it_is_left(bench):
    """A script may hold its model in an except or finally of its own."""
    text = f"""
net = {NET}
before, drawn = [p.clone() for p in net.parameters()], torch.get_rng_state()
model = made(net)
try:
    model.fit(x, y, batch_size=4)
finally:
    print(all(map(torch.equal, before, net.parameters())), model._session.optimizer.state)
    print(torch.equal(drawn, torch.get_rng_state()), [p.grad for p in net.parameters()])
"""
    status, _, err = bench(text)
    assert status == 0
    assert err == "True defaultdict(<class 'dict'>, {})\nTrue [None, None, None, None]\n"


@pytest.mark.long
def test_people_read_a_table(command, monkeypatch):
    """Of each way one line, and what became of it; this machine's kernels may be fast or not."""
    monkeypatch.setattr(EmbeddedEngine, "way", "graph")
    status, out, _ = command("bench", f"net = {NET}\n{FIT.format('')}", *SHORT)
    lines = out.splitlines()
    assert status == 0
    assert lines[0].startswith(
        "Sequential on the embedded engine: updates of 8 samples, 2 in an execution; torch "
    )
    assert lines[2].split() == (
        ["way", "updates/s", "samples/s", "to", "first", "(lowest,", "highest)", "data", "wait"]
    )
    assert [line.split()[0] for line in lines[3:6]] == ["off", "graph", "kernels"]
    assert lines[3].split()[3:6] == ["1.00", "(1.00,", "1.00)"]
    assert lines[-2:] == [
        "The script compiles with jit='auto'.",
        "kernels ran as graph here. No faster kernel fits.",
    ]


def test_a_fast_wrong_answer_is_a_failure(command, monkeypatch):
    """A counter outside of Python's objects stands still in a recorded program."""
    monkeypatch.setenv("CALLS", "0")
    status, out, _ = command("bench", COUNTING + FIT.format(""), *SHORT)
    assert status == 1
    (graph, kernels) = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert graph.startswith("WRONG: the losses of graph in the first execution differ by ")
    assert kernels.startswith("WRONG: the losses of kernels in the first execution differ by ")
    assert graph.endswith(
        ". `ipufit check` finds code that behaves differently in a recorded program; if it finds "
        "nothing, please report this."
    )


def test_what_runs_eagerly_alone_is_timed_alone(bench):
    """The other ways are refused with their reason."""
    status, found, _ = bench(BRANCHING + FIT.format(", run_eagerly=True"))
    assert (status, found["compiled"], found["agree"]) == (0, "off", True)
    assert [way["refused"] is None for way in found["ways"]] == [True, False, False]
    assert "Python branched on a tensor's value" in found["ways"][1]["refused"]


def test_a_program_that_cannot_be_recorded_is_a_fault(bench):
    """Fit would not run it either."""
    status, found, err = bench(BRANCHING + FIT.format(""))
    assert (status, found) == (2, None)
    assert err.startswith("ipufit bench: ")
    assert "Python branched on a tensor's value" in err
    assert "Traceback" not in err


def test_a_compiled_program_needs_a_compiler(bench, monkeypatch):
    """Said before anything is timed."""
    monkeypatch.setattr(requirements, "missing", lambda: "a compiler. Install one.")
    status, found, err = bench(f"net = {NET}\n{FIT.format('')}", "--inductor")
    assert (status, found) == (2, None)
    assert err == "ipufit bench: --inductor needs a compiler. Install one.\n"


@pytest.mark.long
def test_options_that_do_not_go_with_a_way_are_its_reason(bench):
    """A compiled update can't be looked into."""
    if requirements.missing() is not None:
        pytest.skip("programs can't be compiled here")
    status, found, _ = bench(f"net = {NET}\n{FIT.format(', detect_nan=True')}", "--inductor")
    assert status == 0
    assert [way["refused"] is None for way in found["ways"]] == [True, True, True, False]
    assert found["ways"][3]["refused"].startswith("detect_nan=True inspects every update")


@pytest.mark.long
def test_a_way_that_was_not_taken_is_said(command):
    """The times of another one under its name would be a lie."""
    if requirements.missing() is not None:
        pytest.skip("programs can't be compiled here")
    text = f"{COMPLEX}{FIT.format('')}"
    status, out, _ = command("bench", text, *SHORT, "--inductor")
    assert status == 0
    assert out.splitlines()[-1] == (
        "inductor ran as graph here. Updates run as recorded, not compiled: it computes with "
        "complex numbers."
    )


def test_another_engine_has_one_way(bench):
    """What it makes of a program is its own."""
    text = f"net = {NET}\n{FIT.format(', engine=' + repr('ipu-standin'))}"
    status, found, _ = bench(text)
    assert (status, found["engine"], found["compiled"]) == (0, "ipu-standin", None)
    assert [way["name"] for way in found["ways"]] == ["ipu-standin"]
    status, _, err = bench(text, "--inductor")
    assert (status, err) == (
        2,
        "ipufit bench: --inductor needs the embedded engine, but the script's model runs on the "
        "ipu-standin engine. Leave it out.\n",
    )


def test_data_that_is_read_once_is_refused(bench):
    """It would be used up."""
    loader = "iter(DataLoader(TensorDataset(x, y), batch_size=4))"
    status, _, err = bench(f"made({NET}).fit({loader})\n")
    assert status == 2
    assert err.startswith("ipufit bench: training data must be readable again after a search, got")


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "long"])
def test_time_is_a_positive_number(given, capsys):
    """Before the script is run."""
    with pytest.raises(SystemExit) as end:
        main(["bench", "--seconds", given, "script.py"])
    assert end.value.code == 2
    assert (
        f"argument --seconds: must be a number of seconds above 0, got {given!r}\n"
        in capsys.readouterr().err
    )


@pytest.mark.long
def test_only_the_first_fit_counts(bench):
    """Whatever a script does with the exception that ends it."""
    fit = FIT.format("").strip()
    status, found, _ = bench(
        f"net = {NET}\ntry:\n    {fit}\nexcept BaseException:\n    pass\n{fit}"
    )
    assert (status, found["title"]) == (0, "Sequential")
