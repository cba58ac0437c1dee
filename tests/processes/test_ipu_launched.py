"""What PopTorch is told in one of several processes; nobody is spoken to."""

import dataclasses
import sys
import types

import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.plan import Plan
from ipufit.engines.ipu.engine import IpuEngine
from ipufit.engines.ipu.ipu_config import IPUConfig
from ipufit.engines.ipu.ipu_config.settings import engine_options
from ipufit.engines.ipu.options import make_options
from ipufit.engines.ipu.size import Size
from ipufit.engines.program import ProgramSpec
from ipufit.errors import ConfigurationError, PlanError
from ipufit.losses import resolve_loss
from ipufit.processes import ALONE, Processes
from tests.ipu_calls import Recorder, signature_of

SECOND = Processes(1, 2, "torchrun")
TARGET = torch.ones(3, 2)


def spec_of(processes=SECOND, module=None, loss=None, mode=Mode.TRAIN, **plan):
    module = module or nn.Linear(4, 2)
    given = {"micro_batch_size": 3, "ipus": 2, "gradient_accumulation": 2, **plan}
    made = Plan.make(**given, processes=processes.num_processes, process=processes.process_id)
    return ProgramSpec(
        module=module,
        loss=loss or resolve_loss("mse"),
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        plan=made,
        mode=mode,
        want_outputs=False,
        seed=0,
        processes=processes,
    )


def options_for(spec, given=None):
    return make_options(poptorch, dataclasses.replace(spec, options=given), Size.of(spec.plan))


def group_of(options):
    return options.Distributed.processId, options.Distributed.numProcesses


def test_options_say_which_process_it_is_and_its_own_replicas():
    options = options_for(spec_of())
    assert group_of(options) == (1, 2)
    assert options.replication_factor == 2


def test_poptorch_has_what_is_called_for_it():
    recorder = Recorder()
    with recorder.watching():
        spec = spec_of()
        make_options(recorder, spec, Size.of(spec.plan))
    owner = "poptorch.options._DistributedOptions"
    called = [call for call in recorder.calls if call.owner == owner]
    assert [(call.name, call.args) for call in called] == [("configureProcessId", (1, 2))]
    assert signature_of(owner, "configureProcessId").bind(*called[0].args)


def test_one_process_stays_alone(monkeypatch):
    """OpenMPI's numbers, which PopTorch reads by itself, do not count where ipufit was told so."""
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    assert group_of(poptorch.Options()) == (2, 4)
    assert group_of(options_for(spec_of(ALONE))) == (0, 1)
    assert group_of(options_for(spec_of(ALONE), poptorch.Options())) == (0, 1)
    assert group_of(options_for(spec_of(SECOND), poptorch.Options())) == (1, 2)


def test_replicas_of_several_processes_have_buffers_of_their_own():
    spec = spec_of(ipus=1)
    assert not options_for(spec).broadcast_buffers
    assert options_for(spec_of(ALONE, ipus=1)).broadcast_buffers


def numbered(process, count):
    options = poptorch.Options()
    options.Distributed.configureProcessId(process, count)
    return options


def test_given_options_of_the_same_processes_are_taken():
    given = numbered(1, 2)
    assert group_of(options_for(spec_of(), given)) == (1, 2)


@pytest.mark.parametrize(
    ("processes", "known"), [(SECOND, "1 of 2"), (ALONE, "0 of 1")], ids=["several", "alone"]
)
def test_given_options_of_other_processes_are_refused(processes, known):
    with pytest.raises(ConfigurationError) as caught:
        options_for(spec_of(processes), numbered(2, 4))
    assert str(caught.value) == (
        f"training_options must be for process {known}, which ipufit found, but they are for "
        "process 2 of 4. Leave Distributed.configureProcessId out, and "
        "start the processes with torchrun, mpirun or PopRun, or call ipufit.distributed."
    )


# PopDist.


class PopdistOptions(poptorch.Options):
    """Refuses what PopDist's do, and knows what PopRun says."""

    def __init__(self, ipus_per_replica=1):
        super().__init__()
        ASKED.append(ipus_per_replica)
        super().replicationFactor(2)
        self.Distributed.configureProcessId(1, 2)
        kind = type(self.Distributed)
        self.Distributed.__class__ = type("_Distributed", (kind,), dict.fromkeys(BLOCKED, blocked))


ASKED = []
BLOCKED = ("configureProcessId", "disable", "setEnvVarNames")


def blocked(*arguments):
    raise RuntimeError("Cannot call it with popdist.poptorch.Options")


PopdistOptions.replicationFactor = PopdistOptions.useIpuId = blocked


@pytest.fixture
def popdist(monkeypatch):
    """A module like PopDist, in a process that PopRun has started as the second of two."""
    module = types.ModuleType("popdist")
    module.poptorch = types.ModuleType("popdist.poptorch")
    module.isPopdistEnvSet = lambda: True
    module.poptorch.Options = PopdistOptions
    monkeypatch.setitem(sys.modules, "popdist", module)
    monkeypatch.setitem(sys.modules, "popdist.poptorch", module.poptorch)
    return module


def test_popdist_makes_the_options_where_poprun_started_the_process(popdist):
    options = options_for(spec_of(ipus=4, stages=2))
    assert isinstance(options, PopdistOptions)
    assert ASKED[-1] == 2
    assert group_of(options) == (1, 2)


def test_popdist_is_left_alone_where_poprun_did_not_start_the_process(popdist):
    popdist.isPopdistEnvSet = lambda: False
    assert type(options_for(spec_of())) is poptorch.Options


def test_popdist_for_another_poptorch_is_left_alone(popdist):
    """On an SDK machine the stand-in has no part in what PopDist does."""
    popdist.poptorch.Options = object
    assert type(options_for(spec_of())) is poptorch.Options


def test_popdist_makes_the_options_of_a_configuration(popdist):
    config = IPUConfig(ipus_per_replica=2, layers_per_ipu=[1, 1])
    options = engine_options(poptorch, config, for_inference=False)
    assert isinstance(options, PopdistOptions)
    assert ASKED[-1] == 2


def test_popdist_options_of_ones_own_are_taken(popdist):
    given = PopdistOptions()
    options = options_for(spec_of(), given)
    assert isinstance(options, PopdistOptions)
    assert options is not given


def test_other_options_are_refused_under_poprun(popdist):
    with pytest.raises(ConfigurationError) as caught:
        options_for(spec_of(ipus=4, stages=2), poptorch.Options())
    assert str(caught.value) == (
        "training_options must be popdist.poptorch.Options in a process that PopRun has started, "
        "got ipufit.poptorch.Options. Make them with "
        "popdist.poptorch.Options(ipus_per_replica=2), or leave them out."
    )


def test_other_replicas_than_popruns_are_refused(popdist):
    with pytest.raises(ConfigurationError) as caught:
        options_for(spec_of(ipus=8, stages=2))
    assert str(caught.value) == (
        "`ipus` must be those of the replicas that PopRun gives each process, 2 x 2 = 4, got 8. "
        "Pass ipus=4, or start poprun with --num-replicas=8."
    )


def test_other_processes_than_popruns_are_refused(popdist):
    with pytest.raises(ConfigurationError) as caught:
        options_for(spec_of(ALONE))
    assert str(caught.value) == (
        "PopRun and ipufit must agree on the processes, but for PopRun this is process 1 of 2, and "
        "for ipufit 0 of 1. Leave ipufit.distributed out, and start the processes with PopRun "
        "alone."
    )


# Refusals before training.


@pytest.fixture
def second(monkeypatch):
    """An environment like that of the second of two processes, which the other never joins."""
    names = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29999}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))


def micro_batch(target):
    return MicroBatch.of((torch.ones(3, 4),), {}, target, 3)


def refusal(spec, kind, target=TARGET):
    program = IpuEngine(poptorch, "ipu-standin").build(spec)
    try:
        with pytest.raises(kind) as caught:
            program.prepare(micro_batch(target))
    finally:
        program.close()
    return str(caught.value)


@pytest.mark.long
def test_a_tail_that_no_program_of_all_processes_is_exactly_is_refused(second):
    """Seven micro-batches on four replicas, whose statistics padding would change."""
    module = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    spec = spec_of(module=module, samples=7 * 3, gradient_accumulation=2)
    assert refusal(spec, PlanError) == (
        "an IPU must be able to run every update exactly, but the last one of an epoch has "
        "micro-batches of 3, 3, 3, 3, 3, 3, 3 samples instead of 8 of 3, and forward changes the "
        "buffer '1.num_batches_tracked', which padding would change too. Use drop_last=True in the "
        "loader, a batch_size and gradient_accumulation that divide the samples, or "
        "engine='embedded'."
    )


def test_a_tail_that_cannot_run_is_refused_before_training_in_one_process_too():
    module = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    spec = spec_of(ALONE, module=module, samples=3 * 3)
    assert "has micro-batches of 3, 3, 3 samples instead of 4 of 3, and forward changes" in (
        refusal(spec, PlanError)
    )


def test_a_tail_of_whole_accumulation_steps_is_a_smaller_program(second):
    module = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))
    spec = spec_of(module=module, samples=4 * 3, gradient_accumulation=2)
    program = IpuEngine(poptorch, "ipu-standin").build(spec)
    program.prepare(micro_batch(TARGET))
    program.close()


def test_a_loss_that_counts_is_refused(second):
    """One micro-batch in each process are two in an update."""
    loss = resolve_loss("cross_entropy", normalize="tokens")
    spec = spec_of(loss=loss, ipus=1, gradient_accumulation=1)
    assert refusal(spec, ConfigurationError, torch.zeros(3, dtype=torch.int64)) == (
        "on an IPU an update of a loss that counts its own tokens or weights must have one "
        "micro-batch, got 2 from gradient_accumulation, ipus and 2 processes: only the device "
        "knows the counts, and only after the gradients were summed. Use normalize='samples' and "
        "sample_weights='sum_over_batch_size', one micro-batch per update, or engine='embedded'."
    )


@pytest.mark.parametrize("processes", [ALONE, SECOND], ids=["alone", "several"])
def test_a_process_has_64_ipus_at_most(processes):
    """It is PopTorch's rule, and not that of other engines."""
    spec = spec_of(processes, ipus=128)
    count = 2 * processes.num_processes
    with pytest.raises(PlanError) as caught:
        IpuEngine(poptorch, "ipu-standin").build(spec)
    assert str(caught.value) == (
        "`ipus` of one process must be at most 64, the limit of PopTorch, got 128. Try ipus=64 in "
        f"{count} processes, which torchrun, mpirun or PopRun starts."
    )
    assert caught.value.suggestion == {"ipus": 64}
