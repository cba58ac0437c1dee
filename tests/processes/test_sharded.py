"""With ``shard="optimizer"`` each process has a part of the optimizer's state, and all weights."""

import dataclasses
import textwrap

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.engines.embedded.zero import cuts_of
from ipufit.errors import ConfigurationError
from ipufit.tracing.flat_storage import FlatBlock
from tests.processes.launching import ROOT, run_copies

SCRIPT = "import sys\nsys.path.insert(0, '.')\n"
SCRIPT += (ROOT / "tests" / "processes" / "sharded.py").read_text()


def run(folder, count, *parts):
    """What each process has printed, when all have done these parts."""
    ends = run_copies(SCRIPT, count, args=(str(folder), *parts))
    for ended in ends:
        assert ended.code == 0, str(ended)
        done = [part for part in parts if part not in ("weights", "briefly", "buckets")]
        assert ended.stdout.count(" done\n") == len(done), str(ended)
    return [ended.stdout for ended in ends]


REFUSED = """\
ConfigurationError: shard='optimizer' needs an optimizer that ipufit implements itself, but got \
Adagrad, whose step works on whole parameters. Use sgd, adam, adamw, rmsprop or lamb, or leave \
shard='optimizer' out.
ConfigurationError: shard='optimizer' communicates with the other processes within an update, \
but got jit='inductor', which compiles whole updates. Use jit='auto', or leave shard='optimizer' \
out.
ProcessError: all processes of a run must have the same state of the optimizer, but process 0 has \
'changed' and process 1 has 'as it was'. Start all of them with the same program, arguments and \
seed, and pass the whole data to each; each takes its own share.
"""
WITHIN = """\
ConfigurationError: with shard='optimizer' the optimizer's state must be changed in all \
processes before an epoch begins, but it was changed within one. Change it in on_epoch_end or \
on_epoch_begin, after model.gather_optimizer().
"""
SAID = "The optimizer's state lies in parts over 2 processes; each gets "


@pytest.mark.long
def test_two_processes_give_the_numbers_of_whole_state(tmp_path):
    """Ways to change a gradient that need the whole sum of it, and where the host looks late."""
    run(tmp_path, 2, "briefly", "others")


@pytest.mark.long
def test_each_way_to_change_a_gradient_works_on_parts(tmp_path):
    run(tmp_path, 2, "others")


@pytest.mark.long
def test_every_rule_works_on_parts(tmp_path):
    """With layers frozen and thawed between fits."""
    run(tmp_path, 2, "optimizers")


@pytest.mark.long
def test_parts_of_sums_go_along_with_backward_too(tmp_path):
    run(tmp_path, 2, "buckets", "optimizers", "others", "skips")


@pytest.mark.long
def test_what_is_skipped_or_asked_for_works_on_parts(tmp_path):
    """Skipped and lost updates, callbacks that gather or change state, refusals, ``explain``."""
    for text in run(tmp_path, 2, "skips", "callbacks"):
        assert REFUSED + WITHIN in text
        assert text.count(SAID + "its part of the gradients' sum.") == 2
        for why in ("a bound on its norm", "a loss scale"):
            whole = f"the whole sum of the gradients, which {why} needs."
            assert SAID + whole in text
        assert "note: replicated_tensor_sharding needs a replication_factor" not in text
    # What a configuration does is said by each process, as it is by compile.
    line = (
        "replicated_tensor_sharding=True: shard='optimizer' of Memory: in parts over the "
        "processes, whose replicas share them"
    )
    assert line in " ".join(text.split())


@pytest.mark.long
def test_checkpoints_go_on_in_parts_whole_and_in_one_process(tmp_path):
    run(tmp_path, 2, "writes", "resumes")
    run(tmp_path, 1, "resumes")


@pytest.mark.long
def test_three_processes_give_the_numbers_of_whole_state(tmp_path):
    """Parts of three, of which one has what is left over."""
    run(tmp_path, 3, "optimizers", "others", "skips", "writes", "resumes")


SUMS = """
    import torch
    from ipufit.processes import current
    from ipufit.processes.group import all_gather_parts, gather_parts, reduce_scatter

    us = current()
    me = us.process_id
    generator = torch.Generator().manual_seed(me)
    large = 9 * 10**6 + 1  # of more than one window
    cuts = [[0, 3, 6, 10], [0, 0, 0, 7], [0, 7, 7, 7], [0, 5, 5, 5 + 4], [0, 3 * 10**6, 10**6 * 6]]
    cuts[-1].append(large)
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float32]
    flats = [
        torch.randn(cut[-1], generator=generator).to(dtype) for cut, dtype in zip(cuts, dtypes)
    ]
    sums = [sum(each).to(flat.dtype) for flat, each in zip(
        flats, zip(*us.gather([flat.double() for flat in flats]))
    )]
    for found, flat, whole, cut in zip(reduce_scatter(us, flats, cuts), flats, sums, cuts):
        assert found.data_ptr() == flat[cut[me]:].data_ptr() or not found.numel()
        torch.testing.assert_close(found, whole[cut[me]:cut[me + 1]], rtol=1e-2, atol=1e-5)
    for flat, cut in zip(flats, cuts):
        flat[:cut[me]] = 0
        flat[cut[me + 1]:] = 0
    all_gather_parts(us, flats, cuts)
    for flat, whole in zip(flats, sums):
        torch.testing.assert_close(flat, whole, rtol=1e-2, atol=1e-5)
        assert all(flat.equal(each) for each in us.gather(flat))
    for everywhere in (True, False):
        found = gather_parts(us, torch.full((me,), me), [0, 1, 2], everywhere)
        expected = torch.tensor([1, 2, 2]) if everywhere or me == 0 else None
        assert (found is None) == (expected is None)
        assert found is None or found.equal(expected)
    print("whole")
"""


@pytest.mark.long
def test_parts_are_summed_joined_and_collected():
    """Parts of every length and dtype, some empty, some of several windows."""
    for ended in run_copies(textwrap.dedent(SUMS), 3):
        assert (ended.code, ended.stdout) == (0, "whole\n"), str(ended)


def test_cuts_are_even_and_those_between_parameters_meet_their_ends():
    sizes = [5, 1, 30, 4, 60]
    named = [(str(i), torch.zeros(size)) for i, size in enumerate(sizes)]
    block = FlatBlock.of(named, 0, 0.0)
    assert cuts_of(block, 3, between_parameters=False) == [0, 33, 66, 100]
    assert cuts_of(block, 2, between_parameters=True) == [0, 40, 100]
    assert cuts_of(block, 4, between_parameters=True) == [0, 36, 40, 100, 100]
    assert cuts_of(FlatBlock.of(named[:1], 0, 0.0), 3, between_parameters=True) == [0, 0, 5, 5]
    assert cuts_of(FlatBlock.of(named[1:2], 0, 0.0), 3, between_parameters=False) == [0, 0, 0, 1]


def test_one_process_has_nothing_to_share_out(capsys):
    """The same numbers, the whole state in torch's optimizer, and a sentence that says so."""
    found = []
    for shards in (True, False):
        torch.manual_seed(0)
        model = ipufit.Model(nn.Linear(4, 3))
        model.compile(
            "adam", "cross_entropy", memory=ipufit.Memory(shard="optimizer" if shards else None)
        )
        x, y = torch.randn(6, 4), torch.tensor([0, 1, 2] * 2)
        model.fit(x, y, batch_size=1, ipus=2, seed=1, verbose=0)
        assert model.gather_optimizer() is model.optimizer
        found.append(model.optimizer.state_dict()["state"][0]["exp_avg"])
        capsys.readouterr()
        model.explain()
        text = capsys.readouterr().out
        said = (
            "shard='optimizer' changes nothing in one process, where all replicas share one state."
        )
        assert (said in text) is shards
    assert found[0].equal(found[1])


def configured(value):
    return {"config": ipufit.IPUConfig(replicated_tensor_sharding=value)}


def located(value):
    options = poptorch.Options()
    location = poptorch.TensorLocationSettings().useReplicatedTensorSharding(value)
    options.TensorLocations.setOptimizerLocation(location)
    return {"poptorch": options}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {**configured(False), "memory": ipufit.Memory(shard="optimizer")},
            "Memory.shard must agree with IPUConfig.replicated_tensor_sharding, which is False, "
            "got 'optimizer'. Leave it out, or change the config.",
        ),
        (
            {**located(False), "memory": ipufit.Memory(shard="optimizer")},
            "Memory.shard must agree with training_options.TensorLocations.setOptimizerLocation, "
            "which says False, got 'optimizer'. Leave it out, or change the options.",
        ),
    ],
)
def test_what_compile_refuses(options, text):
    model = ipufit.Model(nn.Linear(4, 3), engine="embedded")
    with pytest.raises(ConfigurationError) as caught:
        model.compile("adam", "cross_entropy", **options)
    assert str(caught.value) == text


def locations_on_ipus(monkeypatch, replicas, **options):
    """Where PopTorch is told to have what, in a fit on the stand-in."""
    given = []
    made = poptorch.trainingModel

    def noted(module, options=None, optimizer=None):
        given.append(options.TensorLocations.toDict())
        return made(module, options, optimizer)

    monkeypatch.setattr(poptorch, "trainingModel", noted)
    model = ipufit.Model(nn.Linear(4, 3), engine="ipu-standin")
    model.compile("adam", "cross_entropy", **options)
    x, y = torch.randn(8, 4), torch.tensor([0, 1] * 4)
    model.fit(x, y, batch_size=2, ipus=replicas, verbose=0)
    model.close()
    return given[0]


@pytest.mark.few("options0-2-location0", "options3-2-location3")
@pytest.mark.parametrize(
    ("options", "replicas", "location"),
    [
        ({}, 2, {"useReplicatedTensorSharding": 1}),
        ({}, 1, None),
        ({"memory": ipufit.Memory(offload_optimizer=True)}, 1, {"onChip": 0}),
        (
            {"memory": ipufit.Memory(offload_optimizer=True)},
            2,
            {"onChip": 0, "useReplicatedTensorSharding": 1},
        ),
        (located(True), 2, {"useReplicatedTensorSharding": 1}),
    ],
)
def test_on_ipus_replicas_share_the_state(options, replicas, location, monkeypatch):
    """In what PopTorch is given; the stand-in has one memory."""
    memory = dataclasses.replace(options.get("memory", ipufit.Memory()), shard="optimizer")
    found = locations_on_ipus(monkeypatch, replicas, **{**options, "memory": memory})
    assert found.get("location_optimizer") == location
