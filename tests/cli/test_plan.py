"""``ipufit plan`` prints what a script's fit would take, and by its status whether it fits."""

import json

import pytest
import torch
from torch import nn

import ipufit
from ipufit.cli.main import main

NET = "nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))"
FIT = f"made({NET}).fit(x, y, batch_size=4, epochs=1000000, ipus=2, device_iterations=3)\n"
LARGE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)[..., None].expand(-1, -1, 30_000_000).exp().mean(-1)

"""


@pytest.fixture
def model():
    """The one that the script makes."""
    model = ipufit.Model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    model.compile("adam", "cross_entropy")
    return model


BATCH = (torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64))
DATA = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(torch.zeros(40, 4), torch.zeros(40, dtype=torch.int64)), 4
)


@pytest.mark.few
@pytest.mark.parametrize(("options", "ipus"), [((), 2), (("--ipus", "4"), 4), (("--ipus=4",), 4)])
def test_it_prints_both_plans_of_the_first_fit(command, model, options, ipus, capfd):
    """What explain and plan say in the script, without a change of it."""
    status, out, err = command("plan", f"{FIT}print('trained')\n", *options)
    model.explain(DATA, ipus=ipus, device_iterations=3)
    batches = capfd.readouterr().out.partition("\nRuns ")[0]
    assert (status, err) == (0, "")
    assert out == f"{batches}\n\n{model.plan(BATCH, ipus=ipus)}\n"


def test_another_division_is_the_best_one(command, model):
    """Its batches are those of a fit that was told so, and left out."""
    status, out, _ = command("plan", FIT, "--ipus-per-replica", "2")
    assert status == 0
    assert out == f"{model.plan(BATCH, ipus=2, ipus_per_replica=2)}\n"


def test_json_has_stdout_for_itself(command, model):
    """It is read by a program."""
    text = f"print('hello', sys.argv[1:])\n{FIT}"
    status, out, err = command("plan", text, "--json", arguments=["--ipus", "7"])
    found = json.loads(out)
    batches = found.pop("batches")
    assert (status, err) == (0, "hello ['--ipus', '7']\n")
    assert found == json.loads(json.dumps(model.plan(BATCH, ipus=2).to_dict()))
    assert (batches["micro_batch_size"], batches["replicas"]) == (4, 2)
    assert (batches["device_iterations"], batches["samples"]) == (3, 40)


def test_a_stage_that_does_not_fit_is_status_one(command):
    """A build server needs no more than that."""
    status, out, _ = command("plan", f"{LARGE}made(Net()).fit(x, y, batch_size=4)\n")
    assert status == 1
    assert "does not fit" in out


def test_data_without_a_batch_is_told_with_its_reason(command):
    """As fit tells it."""
    status, _, err = command("plan", f"made({NET}).fit(iter([]))\n")
    assert status == 2
    assert "training data must yield at least one batch, but it is empty. An iterator can" in err


def test_a_loader_tells_its_own_batch_size(command):
    """One of which only the first batch says it."""
    loader = "[(x[:5], y[:5]), (x[5:10], y[5:10])]"
    status, out, _ = command("plan", f"made({NET}).fit({loader})\n")
    assert status == 0
    assert "  micro-batch            5  samples" in out


def test_a_fault_of_fit_is_one_line(command):
    """There is nothing to see in ipufit's own files."""
    status, out, err = command("plan", FIT.replace("batch_size=4", "batch_size=0"))
    assert (status, out) == (2, "")
    assert err.startswith("ipufit plan: batch_size must be ")
    assert err.count("\n") == 1


def test_a_fault_of_the_script_keeps_its_traceback(command):
    """It says where."""
    status, _, err = command("plan", "made(nn.Linear(4, 3), jit='fast')\n")
    assert status == 2
    assert "Traceback" in err
    assert err.endswith("ipufit plan: the script failed, so the plan is not complete.\n")


@pytest.mark.parametrize("given", ["0", "-2", "2.5", "two"])
@pytest.mark.parametrize("option", ["--ipus", "--ipus-per-replica"])
def test_a_number_of_ipus_is_a_whole_one(option, given, capsys):
    """Before the script is run."""
    with pytest.raises(SystemExit) as end:
        main(["plan", option, given, "script.py"])
    assert end.value.code == 2
    assert (
        f"argument {option}: must be a whole number of at least 1, got {given!r}\n"
        in capsys.readouterr().err
    )
