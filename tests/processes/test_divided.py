"""With ``shard_weights`` each process has a part of the weights, which are whole for a while."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ipufit
from ipufit.engines.embedded.fsdp import ShardedStep, pieces_of
from ipufit.engines.embedded.passes.collective_hooks import (
    FILL,
    FREE,
    SUM,
    hoist_gradients,
    insert_weight_hooks,
)
from ipufit.engines.embedded.programs.sharded import FSDPWeights
from ipufit.errors import CaptureError
from ipufit.tracing.capture import capture
from ipufit.tracing.recording import mark_backward_pass
from tests.processes.test_sharded import REFUSED, SAID, locations_on_ipus, run

WITHIN = """\
with shard='weights' weights must be changed in all processes before an epoch begins, but one \
was changed within an epoch. Change it in on_epoch_end or on_epoch_begin.
"""
EAGER = """\
ConfigurationError: shard='weights' needs a recorded program, which gathers weights only while \
they are read, but got run_eagerly=True, which runs the module itself. Leave one of them out.
"""
AVERAGED = """\
ConfigurationError: shard='weights' keeps each weight once, in one process, but ema exchanges \
whole weights for their averages. Use shard='optimizer' with it, or leave ema out.
"""


def test_two_processes_give_the_numbers_of_whole_weights(tmp_path):
    """Tied, frozen and unused weights, dropout, losses of tokens; two pieces whole at most."""
    for text in run(tmp_path, 2, "weights", "briefly", "most", "nets", "gathers"):
        assert WITHIN in text


@pytest.mark.long
def test_every_net_rule_and_bound_works_on_parts(tmp_path):
    run(tmp_path, 2, "weights", "nets", "optimizers", "others", "skips")


@pytest.mark.long
def test_four_processes_give_the_numbers_of_whole_weights(tmp_path):
    """Of which some have no micro-batch in an update."""
    run(tmp_path, 4, "weights", "nets", "others", "gathers")


@pytest.mark.long
def test_checkpoints_go_on_with_parts_and_with_whole_weights(tmp_path):
    run(tmp_path, 2, "weights", "writes", "resumes")
    run(tmp_path, 1, "weights", "resumes")


@pytest.mark.long
def test_callbacks_and_refusals_know_of_parts(tmp_path):
    refused = REFUSED.replace("shard='optimizer'", "shard='weights'")
    refused = refused.replace("ProcessError: all", EAGER + AVERAGED + "ProcessError: all")
    said = SAID.replace("The optimizer's state lies", "Weights and the optimizer's state lie")
    for text in run(tmp_path, 2, "weights", "callbacks"):
        assert refused in text
        gets = "whole weights while they are read, and its part of the gradients' sum."
        assert text.count(said + gets) == 3
        added = "In every micro-batch the gradients of all processes are added, 760 bytes"
        assert text.count(added) == 3


def recorded(function, *tensors):
    return capture(function, [torch.randn(each) for each in tensors])


def step(first, bias, second, x):
    """Two layers, and the gradients of three weights in two pieces."""
    weights = [each.detach().requires_grad_() for each in (first, bias, second)]
    hidden = torch.tanh(x @ weights[0].t() + weights[1])
    loss = (hidden @ weights[2].t()).square().mean()
    with mark_backward_pass():
        a, b, c = torch.autograd.grad(loss, weights)
    return [loss.detach(), torch.cat([a.reshape(-1), b]), torch.cat([c.reshape(-1)])]


def test_weights_are_there_while_they_are_read_and_sums_begin_at_once():
    """The last piece is read last in forward and first in backward, so it stays between them."""
    module = recorded(step, (4, 3), (4,), (2, 4), (5, 3))
    events = insert_weight_hooks(module, ["0", "1", "2"], [["0", "1"], ["2"]], 2)
    assert events == [(FILL, 0), (FREE, 0), (FILL, 1), (FREE, 1), (SUM, 1), (SUM, 0)]


def test_gradients_are_packed_as_soon_as_they_are_there():
    """With the same results."""
    module = recorded(step, (4, 3), (4,), (2, 4), (5, 3))
    early = copy.deepcopy(module)
    hoist_gradients(early.graph, 2)
    early.graph.lint()
    early.recompile()
    first, second = next(iter(reversed(early.graph.nodes))).args[0][1:]
    order = list(early.graph.nodes)
    assert order.index(second) < order.index(first)
    assert order.index(second) < len(order) - 6
    given = [torch.randn(each) for each in ((4, 3), (4,), (2, 4), (5, 3))]
    for mine, expected in zip(early(*given), module(*given)):
        assert mine.equal(expected)


def test_a_weight_that_forward_changes_is_refused():
    """It would be lost with the memory of its piece."""

    def clamps(weight, x):
        weight.clamp_(-1, 1)
        return [(x @ weight).sum()]

    with pytest.raises(CaptureError) as caught:
        insert_weight_hooks(recorded(clamps, (3, 3), (2, 3)), ["net.weight"], [["net.weight"]], 0)
    assert str(caught.value).startswith(
        "with shard='weights' a weight must stay as it is until its update, but forward changes "
        "'weight' in place. Change a copy, or leave shard='weights' out."
    )


def test_pieces_are_of_one_size_and_leave_modules_whole():
    net = nn.Sequential(*[nn.Linear(5, 5) for _ in range(40)])
    pieces = pieces_of(list(net.named_parameters()))
    assert [len(piece) for piece in pieces] == [6] * 13 + [2]
    assert [name for piece in pieces for name, _ in piece] == [n for n, _ in net.named_parameters()]
    one = nn.MultiheadAttention(4, 2)
    assert [[n for n, _ in piece] for piece in pieces_of(list(one.named_parameters()))] == [
        ["in_proj_weight", "in_proj_bias"],
        ["out_proj.weight", "out_proj.bias"],
    ]
    assert pieces_of([]) == []


def test_one_process_has_whole_weights(capsys):
    """And is told so; the module's weights are up to date all the time."""
    model = ipufit.Model(nn.Linear(4, 3))
    model.compile("adam", "cross_entropy", memory=ipufit.Memory(shard="weights"))
    x, y = torch.randn(8, 4), torch.tensor([0, 1] * 4)
    model.explain(x, batch_size=2)
    said = "shard='weights' changes nothing in one process, where all replicas share one state."
    assert said in capsys.readouterr().out
    before = model.module.weight.detach().clone()
    model.fit(x, y, batch_size=2, verbose=0)
    assert model.gather_weights() is model.module
    assert not before.equal(model.module.weight)


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_on_ipus_replicas_share_weights_and_state(replicas, monkeypatch):
    """In what PopTorch is given; the stand-in has one memory."""
    found = locations_on_ipus(monkeypatch, replicas, memory=ipufit.Memory(shard="weights"))
    parts = {"useReplicatedTensorSharding": 1} if replicas > 1 else None
    assert found.get("location_optimizer") == parts
    assert found.get("location_weight") == parts


@pytest.mark.both_engines
def test_inference_asks_for_one_order_of_the_weights_too(monkeypatch):
    """Else one process would gather another weight than those that wait for it."""
    monkeypatch.setattr(ShardedStep, "take", lambda self, weights: None)
    weights = FSDPWeights.__new__(FSDPWeights)
    weights._weights, weights._events = None, ()

    def attach(events):
        step = ShardedStep(None, (), 0)
        step.events = events
        weights.attach(SimpleNamespace(lowered=SimpleNamespace(run=step)))

    attach([(FILL, 0), (FREE, 0)])
    attach([(FILL, 0), (FREE, 0)])
    with pytest.raises(
        CaptureError, match="all micro-batches must use the weights in the same order"
    ):
        attach([(FILL, 1), (FREE, 1)])
