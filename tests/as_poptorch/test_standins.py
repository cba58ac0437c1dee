"""What programs import beside poptorch where there is no SDK."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ipufit.utils.poptorch_sdk import install

ROOT = Path(__file__).resolve().parents[2]


def run(folder, text, **environment):
    """A script of ``ipufit run`` in a process of its own: status, stdout and stderr."""
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ipufit", "run", str(script)],
        capture_output=True,
        text=True,
        cwd=str(ROOT),
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def installed(imports):
    """Imports a module as a program does that ``ipufit run`` runs."""
    install()
    return __import__


def test_each_says_once_that_it_stands_in(installed, capsys):
    for _ in range(2):
        for name in ("popart", "popdist", "popdist.poptorch", "horovod.torch", "libpvti"):
            installed(name)
            for loaded in [module for module in sys.modules if module.startswith(name)]:
                del sys.modules[loaded]
    reason = "no SDK is installed for this Python"
    assert capsys.readouterr().err.splitlines() == [
        f"ipufit: popart is ipufit's stand-in with its enums alone: {reason}",
        f"ipufit: popdist is ipufit's stand-in for one process: {reason}",
        f"ipufit: poptorch is ipufit's stand-in in plain torch: {reason}",
        f"ipufit: horovod is ipufit's stand-in for one process: {reason}",
        "ipufit: libpvti is ipufit's stand-in whose spans torch.profiler shows, and which keeps no "
        f"graphs: {reason}",
    ]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("popart", " with enums alone, which has AccumulateOuterFragmentSchedule, "),
        ("popdist", " for one process, which has execute_on_instances, getInstanceIndex, "),
        ("horovod.torch", " for one process, which has Average, Max, "),
        ("libpvti", ", which has Graph, HeatmapDouble, Tracepoint, "),
    ],
)
def test_a_name_that_a_stand_in_lacks_is_refused(name, what, installed):
    installed(name)
    with pytest.raises(AttributeError) as caught:
        _ = sys.modules[name].Builder
    text = str(caught.value)
    assert text.startswith(
        f"{name}.Builder comes with Graphcore's Poplar SDK, and this is ipufit's stand-in{what}"
    )
    assert text.endswith(". Enable the SDK in this shell, or remove the code that uses it.")


def test_a_module_of_the_sdk_comes_first(installed, tmp_path, capsys):
    (tmp_path / "popart.py").write_text("name = 'of the SDK'", encoding="utf-8")
    (tmp_path / "libpvti.py").write_text("import half_of_it", encoding="utf-8")
    sys.path.append(str(tmp_path))
    assert installed("popart").name == "of the SDK"
    assert installed("libpvti").Graph("loss", "").addSeries("training").add(1.0) is None
    assert capsys.readouterr().err.splitlines() == [
        "ipufit: libpvti is ipufit's stand-in whose spans torch.profiler shows, and which keeps no "
        f"graphs: the one in {tmp_path} can't be imported (ModuleNotFoundError: No module named "
        "'half_of_it')"
    ]


SETTINGS = """
import popart, popdist, popdist.poptorch, poptorch
from popart import SyntheticDataMode

options = popdist.poptorch.Options(ipus_per_replica=4)
assert isinstance(options, poptorch.Options)
options.replicationFactor(2).enableSyntheticData(int(popart.SyntheticDataMode.RandomNormal))
schedule = popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized
options._Popart.set("accumulateOuterFragmentSettings.schedule", int(schedule))
options._Popart.set("subgraphCopyingStrategy", int(popart.SubgraphCopyingStrategy.JustInTime))
print(options.replication_factor, SyntheticDataMode.Zeros.value, int(schedule))
popdist.init()
print(popdist.isPopdistEnvSet(), popdist.getInstanceIndex(), popdist.getNumInstances())
print(popdist.getNumLocalReplicas(), popdist.getNumTotalReplicas(), popdist.getNumIpusPerReplica())
popdist.synchronize()
print(popdist.execute_on_instances({0}, max, 3, 4), popdist.execute_on_instances({1}, max, 3, 4))
"""


@pytest.mark.long
def test_a_script_for_one_process_finds_popart_s_enums_and_popdist_s_functions(tmp_path):
    status, out, err = run(tmp_path, SETTINGS)
    assert status == 0, err
    assert out.splitlines() == ["2 1 3", "False 0 1", "1 1 1", "4 None"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "name"),
    [("popdist", "POPDIST_NUM_TOTAL_REPLICAS"), ("horovod.torch", "OMPI_COMM_WORLD_SIZE")],
)
def test_one_of_several_processes_is_refused(module, name, tmp_path):
    status, _, err = run(tmp_path, f"import {module} as m\nm.init()\n", **{name: "4"})
    assert status == 1
    assert err.splitlines()[-1] == (
        f"RuntimeError: this must be a single process, but {name} is '4', as set by poprun, mpirun "
        f"and horovodrun. {module} for several processes comes with Graphcore's Poplar SDK: enable "
        "it in this shell, or start the program without them."
    )


def test_one_process_is_what_horovod_reduces_over(installed, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    hvd = installed("horovod.torch").torch
    with pytest.raises(ValueError, match=r"^Horovod must be initialized, but is not\. Call init"):
        hvd.size()
    hvd.init()
    assert (hvd.is_initialized(), hvd.rank(), hvd.size()) == (True, 0, 1)
    assert (hvd.local_rank(), hvd.local_size()) == (0, 1)
    loss = torch.tensor([2.5])
    results = [
        hvd.allreduce(loss, average=False),
        hvd.allreduce(loss, op=hvd.Sum),
        *hvd.grouped_allreduce([loss], op=hvd.Average),
        hvd.allgather(loss),
        hvd.broadcast(loss, root_rank=0),
    ]
    assert all(result is not loss and torch.equal(result, loss) for result in results)
    hvd.broadcast_parameters({"weight": loss}, root_rank=0)
    with pytest.raises(ValueError, match=r"^`root_rank` must be the number of a process, but is 1"):
        hvd.broadcast(loss, root_rank=1)
    with pytest.raises(ValueError, match=r"but both came\. Pass `op` alone\.$"):
        hvd.allreduce(loss, average=True, op=hvd.Average)
    hvd.shutdown()
    assert not hvd.is_initialized()


def test_spans_of_libpvti_are_spans_of_torch_s_profiler(installed):
    pvti = installed("libpvti")
    channel = pvti.createTraceChannel("app")

    class Loader:
        def read(self):
            return 3

    loader = Loader()
    pvti.instrument(loader, ["read"], channel)
    with torch.profiler.profile() as profile:
        with pvti.Tracepoint(channel, "epoch"):
            pvti.Tracepoint.event(channel, "half")
        pvti.Tracepoint.begin(channel, "end")
        assert loader.read() == 3
        pvti.Tracepoint.end(channel, "end")
        pvti.Tracepoint.end(channel, "none")
    names = {event.name for event in profile.events()}
    assert {"app.epoch", "app.half", "app.end", "app.read"} <= names
    assert pvti.Graph("loss", "").addSeries("training").add(0.5) is None
    assert pvti.HeatmapDouble("weights", [0.0, 1.0], "2^x").add([0.5]) is None
