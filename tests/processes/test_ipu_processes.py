"""The IPU engine in several processes, over the stand-in."""

import json

import pytest
import torch
from torch import nn

import ipufit
from tests.processes.ipu_runs import run
from tests.processes.launching import run_copies, run_processes

# Two sums over the same numbers in float64, in another order.
CLOSE = {"rtol": 1e-12, "atol": 1e-13}

BEGIN = """
    import torch
    from torch import nn
    import ipufit
    from ipufit import Reduction
    from ipufit.errors import *
    from tests.processes.ipu_runs import *

"""

# By name, what is run in one process with two replicas, and in two with one each.
RUNS = {
    "mlp": {"between": ("nn.Dropout(0.3)",), "held_out": 10, "predicted": 11},
    "sum": {
        "compiled": {"reduction": ipufit.Reduction(gradients="sum"), "optimizer": "sgd"},
        "samples": 24,
    },
    # 43 = one execution of 24, an update of 12, and one of micro-batches 3, 3 and 1: process 1
    # has one of them, which is padding but for a sample or not, whatever process 0 has.
    "tail": {"samples": 43, "held_out": 2, "predicted": 1},
    # The last update has one micro-batch, of process 0 alone.
    "alone": {"samples": 26, "iterations": 1},
    # The first micro-batch of process 1 is the smaller one.
    "short": {"samples": 5, "accumulation": 1, "held_out": 4, "predicted": 5},
    # An update of a program of its own, on which the replicas meet.
    "norm": {"between": ("nn.BatchNorm1d(6)",), "samples": 36, "epochs": 1},
    "wide": {"replicas": 4, "samples": 53, "compiled": {"optimizer": "adamw"}},
}


def made(given):
    return {**given, "between": [eval(text, {"nn": nn}) for text in given.get("between", ())]}


@pytest.fixture(scope="module")
def in_two():
    """What each of two processes prints of the runs."""
    script = f"""
    from ipufit.engines.ipu.executable import Executable

    calls = []

    def noting(name, method):
        def noted(unit, *arguments):
            calls.append([name, unit.step.trains, list(vars(unit.size).values())])
            return method(unit, *arguments)

        return noted

    Executable.compile = noting("compile", Executable.compile)
    Executable.run = noting("run", Executable.run)
    for name, given in {RUNS!r}.items():
        given["between"] = [eval(text) for text in given.get("between", ())]
        say({{**run(**given), "calls": list(calls)}})
        calls.clear()
    """
    ended = run_copies(BEGIN + script, 2)
    for each in ended:
        assert len(each.stdout.splitlines()) == len(RUNS), each
    return [dict(zip(RUNS, map(json.loads, each.stdout.splitlines()))) for each in ended]


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one_with_twice_the_replicas(name, in_two):
    """Weights, buffers, history and outputs, in both of them."""
    alone = run(**made(RUNS[name]))
    for found in in_two:
        _same({key: found[name][key] for key in alone}, alone)


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_make_the_same_calls(name, in_two):
    """An IPU of one would wait for those of the other, which load programs at the same time."""
    calls = [found[name]["calls"] for found in in_two]
    assert calls[0] == calls[1]
    assert ["run", True] in [call[:2] for call in calls[0]]


def _same(found, expected):
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            _same(found[name], expected[name])
        return
    one, other = (torch.tensor(each, dtype=torch.float64) for each in (found, expected))
    torch.testing.assert_close(one, other, **CLOSE)


# What comes of other data, of a checkpoint, of a loss that is no number, of a cache; and a script
# of PopTorch's own. In this order two processes print it.

OTHERS = """
    import sys, tempfile
    from ipufit import poptorch
    from ipufit.poptorch._program_files import ExecutableCache

    us = current()
    me = us.process_id

    # Process 1 has fewer micro-batches, and none in the last update.
    x, y = rows(13)
    own = (x[:10], y[:10]) if me == 0 else (x[10:], y[10:])
    for engine in ("embedded", "ipu-standin"):
        data = ipufit.Sharded(DataLoader(TensorDataset(*own), batch_size=3))
        say(run(data=data, engine=engine, iterations=1))

    # A run that goes on from a checkpoint of its first epoch.
    folder = us.run_on_rank_zero(tempfile.mkdtemp)
    norm = {"between": [nn.BatchNorm1d(6)], "samples": 36}
    whole = run(**norm)
    run(**norm, epochs=1, fit={"checkpoint": folder})
    resumed = run(**norm, fit={"checkpoint": ipufit.Checkpoint(folder, resume="auto")})
    say([whole["weights"] == resumed["weights"], whole["history"] == resumed["history"]])

    # A loss of process 1 is NaN in the first of the updates of one execution.
    x, y = rows(24)
    x[3] = float("nan")
    with refused(NonFiniteLossError):
        run(data=DataLoader(TensorDataset(x, y), batch_size=3), iterations=2)

    # A cache of executables.
    seen = []
    keep, find = ExecutableCache.keep, ExecutableCache.find

    def keeping(self, key, values):
        keep(self, key, values)
        seen.append("compiled")

    def finding(self, key):
        found = find(self, key)
        seen.extend(["loaded"] * (found is not None))
        return found

    ExecutableCache.keep, ExecutableCache.find = keeping, finding
    options = poptorch.Options().showCompilationProgressBar(False)
    options.enableExecutableCaching(us.run_on_rank_zero(tempfile.mkdtemp))
    run(samples=24, epochs=1, compiled={"poptorch": options})
    say(us.gather(seen))

    # PopTorch alone.
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x, y):
            out = self.layer(x)
            return out, nn.functional.mse_loss(out, y)

    def trainer(seed=0):
        torch.manual_seed(seed)
        own = Own()
        options = poptorch.Options().deviceIterations(2).showCompilationProgressBar(False)
        options.Training.gradientAccumulation(2)
        options.Distributed.configureProcessId(me, 2)
        optimizer = poptorch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        return own, options, poptorch.trainingModel(own, options, optimizer)

    own, options, executor = trainer()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(*torch.randn(2, 24, 4, generator=generator))
    losses = []
    for x, y in poptorch.DataLoader(options, data, batch_size=3):
        losses += executor(x, y[:, :2])[1].reshape(-1).tolist()
    say([losses, {name: each.tolist() for name, each in own.state_dict().items()}])
    with refused(poptorch.Error):
        trainer(seed=me)[2](x, y[:, :2])
    with refused(poptorch.Error):
        trainer()[2](x[: 4 + 4 * me], y[: 4 + 4 * me, :2])
"""


@pytest.fixture(scope="module")
def others():
    """What each of two processes prints of these, by line."""
    ended = run_copies(BEGIN + OTHERS, 2)
    for each in ended:
        assert len(each.stdout.splitlines()) == 8, each
    return [[json.loads(line) for line in each.stdout.splitlines()] for each in ended]


@pytest.mark.long
def test_processes_with_parts_of_their_own_do_as_on_the_embedded_engine(others):
    """A process without a micro-batch computes padding, so that all run the same programs."""
    for found in others:
        _same(found[1], found[0])
        _same(found[0], others[0][0])


@pytest.mark.long
def test_a_resumed_run_of_two_processes_ends_with_the_same_bits(others):
    """Also the statistics, which are those of process 0 at every epoch's end."""
    assert [found[2] for found in others] == [[True, True]] * 2


def test_a_loss_that_is_no_number_ends_all_processes_after_the_execution(others):
    """They all made it: one that had stopped before would have left the other waiting."""
    text = (
        "the loss must be finite, but it became nan in update 0. An IPU can't go back: the weights "
        "and the optimizer state are those after update 1, the last one of its execution. Look for "
        "a learning rate that is too high, a log or division of zero, or non-finite data."
    )
    assert [found[3] for found in others] == [text] * 2


def test_one_process_compiles_for_the_cache_and_the_other_loads(others):
    """PopTorch's own lock says who is first; all of them come at the same time."""
    assert sorted(others[0][4]) == [["compiled"], ["loaded"]]
    assert others[1][4] == others[0][4]


def test_a_script_of_poptorch_trains_one_model(others):
    """Against a loop by hand over the halves of the data, with losses of each process's own."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(2, 24, 4, generator=torch.Generator().manual_seed(1))
    halves = [(x[:12], y[:12, :2]), (x[12:], y[12:, :2])]
    losses = [[], []]
    for begin in (0, 6):
        optimizer.zero_grad()
        for process, (inputs, targets) in enumerate(halves):
            for first in (begin, begin + 3):
                span = slice(first, first + 3)
                loss = nn.functional.mse_loss(layer(inputs[span]), targets[span])
                (loss / 4).backward()
                losses[process].append(loss.item())
        optimizer.step()
    for process, found in enumerate(others):
        told, weights = found[5]
        # The default output mode returns the last loss; float32 here, as on a device.
        assert told == pytest.approx(losses[process][-1:], rel=1e-6)
        for name, value in layer.state_dict().items():
            torch.testing.assert_close(torch.tensor(weights["layer." + name]), value)
    assert others[0][5][1] == others[1][5][1]


def test_what_the_stand_in_refuses_in_all_processes(others):
    """An IPU would train other models, or hang."""
    texts = [
        "'poptorch_py_error': all processes must begin with the same weights, as PopTorch does not "
        "bring them together, but 'layer.weight' is another in process 1 than in process 0. Seed "
        "torch alike before the module is made, or load one file in all of them.",
        "'poptorch_py_error': all processes must run the same program, but process 0 has inputs "
        "[[4, 4], [4, 2]] and process 1 has [[8, 4], [8, 2]]. Give all of them the same options, "
        "and inputs of the same shapes.",
    ]
    for found in others:
        assert found[6:] == texts


@pytest.mark.long
def test_a_device_error_of_one_process_ends_the_other():
    """It waits in an update, and names who has failed, and of what."""
    script = """
    from ipufit.testing import inject

    # Never reached in process 0.
    with inject("ipu_reset", at_update=2 if current().process_id else 99):
        with refused(RecoverableDeviceError if current().process_id else ProcessError):
            run()
    """
    ended = run_processes(BEGIN + script, 2)
    error = (
        "running failed on the device: a drill lets it fail. It can be used again after IPU_RESET; "
        "see the documentation of the Poplar SDK, then fit again."
    )
    assert json.loads(ended[1].stdout) == error
    assert json.loads(ended[0].stdout) == (
        "all processes of a run must continue together, but process 1 of 2 ended with "
        f"RecoverableDeviceError: {error} Read the output of that process, fix the cause, and "
        "start all processes again; a run with checkpoints resumes from the last one."
    )
