"""What a training model of the stand-in says of other processes before it speaks to them.

What several processes do together is in tests/processes/test_ipu_processes.py.
"""

import pytest
import torch
from torch import nn

from ipufit import poptorch
from tests.told import message

X, Y = torch.ones(1, 2), torch.ones(1, 2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x, y):
        out = x * self.weight
        return out, nn.functional.mse_loss(out, y)


def options_of(process, count):
    options = poptorch.Options().showCompilationProgressBar(False)
    options.Distributed.configureProcessId(process, count)
    return options


def trainer(options):
    return poptorch.trainingModel(Net(), options)


def launched(monkeypatch, process, count):
    """As torchrun tells a process which it is."""
    names = {"RANK": process, "WORLD_SIZE": count}
    for name, value in {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29999}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("count", [1, 2])
def test_training_needs_the_processes_that_the_options_speak_of(monkeypatch, count):
    """Alone it would train on its part of the data, and nobody would notice."""
    launched(monkeypatch, 0, count)
    says = "nothing of other processes" if count == 1 else "process 0 of 2"
    assert message(trainer(options_of(1, 4)), X, Y, kind=poptorch.Error) == (
        "'poptorch_py_error': a training model must reach the other processes that "
        "options.Distributed speaks of, which makes this process 1 of 4, but the environment says "
        f"{says}. Start all of them with torchrun, mpirun or PopRun, call ipufit.distributed with "
        "the same numbers, or train alone with options.Distributed.disable()."
    )


def test_a_refused_model_has_no_program_and_no_device(monkeypatch):
    launched(monkeypatch, 0, 1)
    executor = trainer(options_of(0, 2).useIpuId(3))
    with pytest.raises(poptorch.Error):
        executor.compile(X, Y)
    assert not executor.isCompiled()
    assert poptorch.inferenceModel(Net(), options_of(0, 1).useIpuId(3))(X, Y) is not None


def test_options_of_one_process_train_alone(monkeypatch):
    """PopTorch reads no environment but OpenMPI's, so that this is one of one to it."""
    launched(monkeypatch, 1, 2)
    for options in (poptorch.Options(), options_of(0, 1)):
        trainer(options.showCompilationProgressBar(False))(X, Y)


def test_compiling_and_inference_need_no_other_process():
    options = options_of(1, 4)
    assert poptorch.inferenceModel(Net(), options)(X, Y)[0].tolist() == [[1.0, 1.0]]
    offline = options_of(1, 4).useOfflineIpuTarget()
    executor = trainer(offline)
    executor.compile(X, Y)
    assert executor.isCompiled()


def test_parameters_of_replicas_own_are_refused_in_several_processes(monkeypatch):
    """Groups would reach over all processes, each of which holds a part."""
    launched(monkeypatch, 1, 2)
    executor = poptorch.trainingModel(Grouped(), options_of(1, 2).replicationFactor(2))
    executor.weight.replicaGrouping(
        poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup
    )
    assert message(executor, X.expand(2, 2), Y.expand(2, 2), kind=poptorch.Error) == (
        "'poptorch_py_error': replicaGrouping must leave a parameter the same on all replicas "
        "where several processes train, which ipufit.poptorch does not cut up, but 'weight' has "
        "several copies. Leave replicaGrouping out, or train in one process."
    )


class Grouped(Net):
    """With a parameter for each of two replicas."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
