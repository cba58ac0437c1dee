"""Which process this is follows from what the user, torch or a launcher says, or is an error."""

import os
import re
import socket

import pytest

import ipufit
from ipufit.errors import ConfigurationError, ProcessError
from ipufit.processes import ALONE, current, distributed, identity
from ipufit.processes.launchers import Rendezvous
from tests.processes.launching import _OURS

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node1-77@1",
}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "3",
}
HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}


@pytest.fixture
def environment(monkeypatch):
    """Sets variables, and nothing else is said about processes, by anybody."""
    monkeypatch.setattr(identity, "_arguments", identity._Arguments())
    monkeypatch.setattr(identity, "_runs", {})
    for name in os.environ:
        if name.startswith(_OURS):
            monkeypatch.delenv(name)

    def set_all(variables):
        for name, text in variables.items():
            monkeypatch.setenv(name, text)

    return set_all


def test_one_process_does_everything_alone(environment):
    """Most runs have one, and need no torch.distributed."""
    us = current()
    assert us is ALONE
    assert (us.process_id, us.num_processes, us.local_id) == (0, 1, 0)
    assert us.is_rank_zero
    assert not us.is_distributed
    assert us.describe() == "One process."
    value = object()
    us.connect()
    us.add([])
    us.broadcast([])
    us.assert_equal_across_ranks(seed=1)
    assert us.gather(value) == [value]
    assert us.run_on_rank_zero(lambda: value) is value
    assert us.run_on_all_ranks(lambda: value) is value
    with pytest.raises(KeyError), us.propagate_errors():
        raise KeyError


@pytest.mark.parametrize(
    ("variables", "expected", "place"),
    [
        (TORCHRUN, (5, 8, 1, "torchrun"), Rendezvous("node1", 29400, True, 2)),
        (OPENMPI, (1, 2, 1, "OpenMPI"), Rendezvous("127.0.0.1", 21396)),
        ({**OPENMPI, "POPDIST_NUM_TOTAL_REPLICAS": "4"}, (1, 2, 1, "PopRun"), None),
        (SLURM, (3, 4, 3, "Slurm"), Rendezvous("127.0.0.1", 21262)),
        ({**SLURM, "MASTER_ADDR": "n", "MASTER_PORT": "1"}, (3, 4, 3, "Slurm"), Rendezvous("n", 1)),
        (HAND, (1, 2, 0, "a launcher that sets RANK"), Rendezvous("127.0.0.1", 29400)),
        # Of two that agree, the one that sets the rest.
        ({**OPENMPI, "RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, "OpenMPI"), None),
        # The inner one counts: torchrun in a step of Slurm, a daemon of OpenMPI in one.
        ({**SLURM, **TORCHRUN}, (5, 8, 1, "torchrun"), None),
        ({**SLURM, **OPENMPI}, (1, 2, 1, "OpenMPI"), None),
    ],
)
def test_a_launcher_says_it(environment, variables, expected, place):
    """The numbers are those of the launcher, and the object stays."""
    environment(variables)
    us = current()
    assert (us.process_id, us.num_processes, us.local_id, us.launcher) == expected
    assert place is None or us.place == place
    assert us.timeout == 600
    assert current() is us
    assert not us.connection.is_connected


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        # The shells of a job: by sbatch, by salloc, by srun --pty.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
        {**SLURM, "SLURM_STEP_ID": "4294967291"},
        {**SLURM, "SLURM_STEP_ID": "4294967290"},
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_one_process_stays_one(environment, variables):
    """A launcher that starts one needs no address."""
    environment(variables)
    assert current() is ALONE


def test_a_step_on_several_machines_needs_an_address(environment):
    """Nothing tells where process 0 is."""
    environment({**SLURM, "SLURM_STEP_NUM_NODES": "2"})
    with pytest.raises(ConfigurationError) as caught:
        current()
    assert str(caught.value) == (
        "4 processes need the address of process 0, but MASTER_ADDR is not set. Set it to the name "
        "of that machine, and MASTER_PORT to a free port there, the same for all processes, or "
        'pass address="host:port" to ipufit.distributed.'
    )
    us = distributed(address="node7:29500")
    assert (us.process_id, us.num_processes, us.place) == (3, 4, Rendezvous("node7", 29500))


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        (
            {"RANK": "1"},
            "RANK and WORLD_SIZE must be set together, but RANK is 1 and WORLD_SIZE is not set. "
            "Set WORLD_SIZE, unset RANK, or call ipufit.distributed with the right numbers.",
        ),
        (
            {"WORLD_SIZE": "4"},
            "RANK and WORLD_SIZE must be set together, but WORLD_SIZE is 4 and RANK is not set. "
            "Set RANK, unset WORLD_SIZE, or call ipufit.distributed with the right numbers.",
        ),
        (
            {**HAND, "RANK": "2"},
            "RANK must be from 0 to WORLD_SIZE - 1, but RANK is 2 and WORLD_SIZE is 2. Correct "
            "them, or call ipufit.distributed with the right numbers.",
        ),
        (
            {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "two"},
            "OMPI_COMM_WORLD_SIZE must be an integer, but it is 'two'. Correct it or unset it.",
        ),
        (
            {**HAND, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"},
            "environment variables contradict each other: RANK and WORLD_SIZE say process 1 of 2, "
            "and SLURM_PROCID and SLURM_NTASKS say process 3 of 4. Unset the wrong ones, or call "
            "ipufit.distributed with the right numbers.",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"},
            "2 processes need the port of process 0, but MASTER_PORT is not set. Set it to a port "
            'that is free on its machine, the same for all processes, or pass address="host:port" '
            "to ipufit.distributed.",
        ),
        (
            {**HAND, "MASTER_PORT": "70000"},
            "MASTER_PORT must be from 1 to 65535, but it is 70000. Set it to a port that is free "
            "on the machine of process 0.",
        ),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(environment, variables, text):
    """A wrong guess would train on the wrong share of the data."""
    environment(variables)
    with pytest.raises(ConfigurationError) as caught:
        current()
    assert str(caught.value) == text
    assert distributed(0, 1) is ALONE is current()


def test_distributed_counts_before_the_environment(environment):
    """The user has the last word."""
    environment(TORCHRUN)
    us = distributed(timeout=60)
    assert (us.process_id, us.num_processes, us.timeout, us.launcher) == (5, 8, 60, "torchrun")
    us = distributed(1, 3, address="[::1]:29500")
    assert us.describe() == "Process 1 of 3, started by hand, number 0 on this machine."
    assert us.place == Rendezvous("::1", 29500)
    assert us is current()
    assert distributed(num_processes=1) is ALONE is current()
    us = ipufit.distributed(process_id=1, num_processes=3)
    assert us.place == Rendezvous("node1", 29400)
    assert distributed().launcher == "torchrun"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"process_id": 1},
            "process_id and num_processes must be passed together, but got process_id=1 without "
            "num_processes. Pass both, or leave both to the launcher.",
        ),
        (
            {"num_processes": 2},
            "process_id and num_processes must be passed together, but got num_processes=2 "
            "without process_id. Pass both, or leave both to the launcher.",
        ),
        (
            {"process_id": 2, "num_processes": 2},
            "process_id must be from 0 to num_processes - 1, but got process_id=2 and "
            "num_processes=2. Number the processes from 0.",
        ),
        (
            {"process_id": True, "num_processes": 2},
            "process_id must be an int, got True. Pass process_id from 0, and num_processes, "
            "or leave both to the launcher.",
        ),
        (
            {"address": "node1"},
            'address must be "host:port" of process 0, with a port from 1 to 65535, but got '
            "'node1'. Pass, for example, address=\"node1:29500\".",
        ),
        (
            {"timeout": 0},
            "timeout must be a number of seconds above 0, got 0. Pass, for example, timeout=600.0.",
        ),
        (
            {"timeout": float("inf")},
            "timeout must be a number of seconds above 0, got inf. Pass, for example, "
            "timeout=600.0.",
        ),
        (
            {"process_id": 0, "num_processes": 2},
            "2 processes need the address of process 0, but ipufit.distributed got no address, and "
            'MASTER_ADDR and MASTER_PORT are not set. Pass address="host:port" of process 0, the '
            "same in all processes.",
        ),
    ],
)
def test_distributed_refuses_what_cannot_work(environment, arguments, text):
    """Nothing is kept of it."""
    with pytest.raises(ConfigurationError) as caught:
        distributed(**arguments)
    assert str(caught.value) == text
    assert current() is ALONE


def test_a_torch_without_distributed_is_refused_when_it_is_needed(environment, monkeypatch):
    """Some builds have none."""
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    environment(HAND)
    us = current()
    with pytest.raises(ConfigurationError) as caught:
        us.gather(1)
    assert str(caught.value) == (
        "a run of 2 processes needs torch.distributed, but this torch was built without it. "
        "Install another build of torch, or start one process."
    )


def test_a_port_that_is_taken_is_refused(environment):
    """Torch says why in words of its own."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ProcessError) as caught:
            distributed(0, 2, address=where, timeout=1).connect()
    assert re.fullmatch(
        f"process 0 must be able to listen at {where}, but it can't: .+[^.]\\. Choose another port "
        'by MASTER_PORT or ipufit\\.distributed\\(address="host:port"\\), the same in all '
        "processes\\.",
        str(caught.value),
    )


@pytest.mark.long
def test_a_process_0_that_is_not_there_is_named(environment):
    """Nobody listens on that port."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ProcessError) as caught:
            distributed(1, 2, address=where, timeout=1).connect()
    assert re.fullmatch(
        f"process 0 must be reachable at {where} within 1 s, but is not: .+[^.]\\. Check that it "
        "runs, and that MASTER_ADDR and MASTER_PORT, or the address of ipufit\\.distributed, name "
        "its machine in all processes\\.",
        str(caught.value),
    )
