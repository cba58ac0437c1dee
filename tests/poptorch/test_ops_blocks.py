"""poptorch.Block, BeginBlock, BlockFunction, removeBlocks, and how modules are shown."""

import copy
import pickle

import pytest
import torch

from ipufit import poptorch
from ipufit.poptorch._tracing import RecordedBlocks, Trace, traced


def entered(function, *args):
    trace = Trace(training=False)
    with traced(trace):
        function(*args)
    return trace.blocks.entered


def test_blocks_are_noted_in_the_order_in_which_they_are_entered():
    def forward():
        with poptorch.Block("a", ipu_id=1):
            pass
        poptorch.Block.start("b")
        with poptorch.Block("a"):
            pass

    assert entered(forward) == [("a", 1), ("b", None), ("a", None)]
    forward()


def test_blocks_without_a_name_are_numbered():
    def forward():
        with poptorch.Block():
            pass
        with poptorch.Block("named"):
            pass
        poptorch.Block.start(ipu_id=2)
        poptorch.Block.useAutoId()
        poptorch.Block.start()

    assert entered(forward) == [("0", None), ("named", None), ("1", 2), ("0", None)]
    poptorch.Block.useAutoId()


def test_a_module_begins_a_block_and_stays_the_same_module():
    layer = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(torch.nn.ReLU(), layer)
    assert poptorch.BeginBlock(layer, "second", 1) is layer
    assert type(layer) is torch.nn.Linear
    assert entered(model, torch.ones(2)) == [("second", 1)]
    model(torch.ones(2))


def test_a_number_given_to_a_module_stays_with_it():
    model = torch.nn.Sequential(*[poptorch.BeginBlock(torch.nn.ReLU(), ipu_id=i) for i in (0, 1)])
    for _ in range(2):
        assert entered(model, torch.ones(1)) == [("0", 0), ("1", 1)]


def plus_one(x):
    return x + 1


def test_a_callable_that_begins_a_block_is_saved_with_it():
    block = pickle.loads(pickle.dumps(poptorch.BeginBlock(plus_one, 1, 2)))
    assert (block._user_id, block._ipu_id, block(2)) == (1, 2, 3)


def test_callables_begin_blocks_too():
    block = poptorch.BeginBlock(lambda x, y=0: x + y, "f", 3)
    assert isinstance(block, poptorch.LegacyBeginBlockFn)
    assert block(1, y=2) == 3
    assert entered(block, 1) == [("f", 3)]
    unnamed = poptorch.BeginBlock(lambda: None)
    assert entered(lambda: (unnamed(), unnamed())) == [("0", None), ("0", None)]


def test_a_function_is_a_block():
    @poptorch.BlockFunction("f", ipu_id=1)
    def function(x, y=1):
        """What it does."""
        return x + y

    assert (function(1, y=3), function.__doc__) == (4, "What it does.")
    trace = Trace(training=False)
    with traced(trace):
        function(1)
        assert trace.blocks.entered == [("f", 1)]
        with pytest.raises(poptorch.Error, match="No active Block"):
            trace.blocks.on_operator()


def test_an_operator_after_a_block_was_left_is_refused():
    blocks = RecordedBlocks()
    blocks.on_operator()
    blocks.enter("a", None)
    blocks.on_operator()
    blocks.leave()
    with pytest.raises(poptorch.Error) as failure:
        blocks.on_operator()
    assert failure.value.message == (
        "No active Block, all the ops must belong to a Block: something is computed after the "
        "block 'a' was left. Put it into a poptorch.Block, or begin blocks with "
        "poptorch.Block.start or poptorch.BeginBlock, which don't end."
    )
    blocks.enter("b", 1)
    blocks.on_operator()


def test_blocks_are_removed_at_any_depth_and_other_hooks_stay():
    inner = torch.nn.ReLU()
    model = torch.nn.Sequential(torch.nn.Sequential(inner))
    calls = []
    handle = inner.register_forward_pre_hook(lambda *_: calls.append(1))
    poptorch.BeginBlock(inner, ipu_id=1)
    poptorch.BeginBlock(model, ipu_id=2)
    with pytest.raises(poptorch.Error) as failure:
        poptorch.BeginBlock(inner)
    assert failure.value.message == (
        "module has already been assigned to a block. Call poptorch.removeBlocks on it first."
    )
    poptorch.removeBlocks(model)
    assert entered(model, torch.ones(1)) == []
    assert calls == [1]
    handle.remove()
    poptorch.BeginBlock(inner)
    with pytest.raises(AssertionError) as wrong:
        poptorch.removeBlocks(3)
    assert str(wrong.value) == "removeBlocks expects a torch.nn.Module, got int."


def test_what_can_not_be_called_begins_no_block():
    with pytest.raises(poptorch.Error) as failure:
        poptorch.BeginBlock("layer")
    assert failure.value.message == (
        "module is not an instance of torch.nn.Module or function. Got str: give BeginBlock the "
        "layer that begins the block."
    )


def test_blocks_are_shown_in_front_of_modules(capsys):
    model = torch.nn.Sequential(
        torch.nn.Linear(1, 2), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Dropout(0.5))
    )
    assert poptorch.module_repr(model) == repr(model)
    poptorch.BeginBlock(model[1][1], "last", 2)
    poptorch.BeginBlock(model[0], ipu_id=1)
    text = (
        "Sequential(\n"
        "  (0): BeginBlock(user_id=None, ipu_id=1) Linear(in_features=1, out_features=2, "
        "bias=True)\n"
        "  (1): Sequential(\n"
        "    (0): ReLU()\n"
        "    (1): BeginBlock(user_id=last, ipu_id=2) Dropout(p=0.5, inplace=False)\n"
        "  )\n"
        ")"
    )
    assert poptorch.module_repr(model) == text
    poptorch.print(model)
    poptorch.print("other")
    assert capsys.readouterr().out == f"{text}\nother\n"


def test_blocks_are_copied_and_saved_with_a_module():
    model = poptorch.BeginBlock(torch.nn.ReLU(), 1, 2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert poptorch.module_repr(other) == "BeginBlock(user_id=1, ipu_id=2) ReLU()"
        poptorch.removeBlocks(other)
    assert entered(model, torch.ones(1)) == [(1, 2)]


def test_a_wrapped_function_knows_its_block():
    block = poptorch.BeginBlock(len, "head", 3)
    assert (block._user_id, block._ipu_id) == ("head", 3)
