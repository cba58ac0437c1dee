"""Operators that change no value: hints, scopes, marks; and losses."""

import pytest
import torch

from ipufit import poptorch
from ipufit.poptorch import enums
from ipufit.poptorch._operators.identities import LOSSES, resolve_overlaps
from tests.poptorch.recording import record

X = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "function",
    [
        poptorch.nop,
        poptorch.recomputationCheckpoint,
        lambda x: poptorch.set_available_memory(x, 0.3),
        lambda x: poptorch.set_overlap_for_input(x, enums.OverlapMode.OverlapAccumulationLoop),
        lambda x: poptorch.set_overlap_for_output(x, enums.OverlapMode.NoOverlap),
        lambda x: poptorch.ipu_print_tensor(x, "x"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_hints_leave_values_and_gradients_as_they_are(function, training, capfd):
    assert function(X) is X

    def step(x):
        x = x.detach().requires_grad_()
        y = function(x)
        return [y.detach(), *torch.autograd.grad((y**3).sum(), [x])]

    got = record(step, torch.zeros_like(X), training=training)(X)
    torch.testing.assert_close(got, [X, 3 * X**2], rtol=1e-15, atol=0)


def test_checkpoints_keep_the_structure():
    a, b = torch.ones(1), torch.zeros(1)
    assert poptorch.recomputationCheckpoint(a, b) == (a, b)
    assert poptorch.recomputationCheckpoint((a, b)) == (a, b)
    assert poptorch.recomputationCheckpoint([a, b]) == [a, b]
    assert poptorch.recomputationCheckpoint([a]) == [a]
    assert poptorch.recomputationCheckpoint(a) is a


@pytest.mark.parametrize("mode", list(enums.MatMulSerializationMode))
@pytest.mark.parametrize("keep_precision", [True, False])
def test_a_serialized_product_is_a_product(mode, keep_precision):
    recorded = record(
        lambda x: poptorch.serializedMatMul(x, x.t(), mode, 2, keep_precision), torch.zeros(2, 2)
    )
    torch.testing.assert_close(recorded(X), [X @ X.t()], rtol=1e-15, atol=0)
    assert torch.equal(poptorch.serializedMatMul(X, X, mode), X @ X)


MODE = enums.MatMulSerializationMode.Disabled


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda: poptorch.nop(1),
            poptorch.Error,
            "nop must take a torch.tensor argument. <class 'int'> is not supported. Call it once "
            "for each tensor.",
        ),
        (
            lambda: poptorch.recomputationCheckpoint(X, 1),
            ValueError,
            "All inputs must be tensors, or one list or tuple of them, got int. Leave out what is "
            "not a tensor.",
        ),
        (
            lambda: poptorch.set_available_memory([X], 0.1),
            poptorch.Error,
            "You may only set available memory for torch.tensor values. <class 'list'> is not "
            "supported. Give the result of the operator that it is meant for.",
        ),
        (
            lambda: poptorch.set_available_memory(X, 60),
            poptorch.Error,
            "set_available_memory expects a proportion from 0 to 1, got 60. Divide a percentage by "
            "100.",
        ),
        (
            lambda: poptorch.serializedMatMul(X, X, "none"),
            AssertionError,
            "serializedMatMul expects mode to be a poptorch.MatMulSerializationMode, got 'none'.",
        ),
        (
            lambda: poptorch.serializedMatMul(X, X, MODE, 2.0),
            AssertionError,
            "serializedMatMul expects factor to be an int, got 2.0. Give the number of parts.",
        ),
        (
            lambda: poptorch.serializedMatMul(X, X, MODE, 2, 1),
            AssertionError,
            "serializedMatMul expects keep_precision to be True or False, got 1.",
        ),
        (
            lambda: poptorch.identity_loss(X, "max"),
            AssertionError,
            'Unsupported reduction type! Expected "sum", "mean" or "none", got \'max\'.',
        ),
        (
            lambda: poptorch.NameScope(3),
            AssertionError,
            "Parameter to NameScope must be a string, got 3.",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, kind, text):
    with pytest.raises(kind) as failure:
        call()
    assert getattr(failure.value, "message", str(failure.value)) == text


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_an_identity_loss_is_reduced_and_marked(reduction):
    def model(x):
        return poptorch.identity_loss(x * 2, reduction)

    recorded = record(model, torch.zeros_like(X))
    expected = {"sum": (2 * X).sum(), "mean": (2 * X).mean(), "none": 2 * X}[reduction]
    assert recorded.trace.losses == 1
    torch.testing.assert_close(recorded(X), [expected], rtol=1e-15, atol=0)
    torch.testing.assert_close(model(X), expected, rtol=1e-15, atol=0)
    assert poptorch.identity_loss(X, "none") is not X


F = torch.nn.functional
P, Q = torch.tensor([[0.2, 0.7], [0.5, 0.4]]), torch.tensor([[0.3, 0.6], [0.1, 0.9]])
SIGNS, CLASSES = torch.tensor([1.0, -1.0]), torch.tensor([1, 0])
LENGTHS = torch.tensor([2])
LOSS_CALLS = [
    lambda: F.l1_loss(P, Q),
    lambda: F.mse_loss(P, Q),
    lambda: F.smooth_l1_loss(P, Q),
    lambda: F.nll_loss(P, CLASSES),
    lambda: F.cross_entropy(P, CLASSES),
    lambda: F.binary_cross_entropy(P, Q),
    lambda: F.binary_cross_entropy_with_logits(P, Q),
    lambda: torch.binary_cross_entropy_with_logits(P, Q),
    lambda: F.kl_div(P, Q, reduction="batchmean"),
    lambda: torch.kl_div(P, Q),
    lambda: F.poisson_nll_loss(P, Q),
    lambda: F.hinge_embedding_loss(P[0], SIGNS),
    lambda: torch.hinge_embedding_loss(P[0], SIGNS),
    lambda: F.soft_margin_loss(P[0], SIGNS),
    lambda: F.cosine_embedding_loss(P, Q, SIGNS),
    lambda: F.margin_ranking_loss(P[0], Q[0], SIGNS),
    lambda: F.triplet_margin_loss(P, Q, P),
    lambda: F.ctc_loss(P[:, None].log_softmax(2), CLASSES[None, :1], LENGTHS, LENGTHS - 1),
    lambda: torch.nn.CrossEntropyLoss()(P, CLASSES),
    lambda: torch.nn.MSELoss(reduction="sum")(P, Q),
]


@pytest.mark.parametrize("call", LOSS_CALLS)
def test_a_loss_of_torch_is_marked_once(call):
    from torch.overrides import TorchFunctionMode

    from ipufit.poptorch._operators.routing import call as route
    from ipufit.poptorch._tracing import Trace, traced

    class Routed(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return route(func, args, kwargs or {})

    trace = Trace(training=True)
    with traced(trace), Routed():
        value = call()
    assert trace.losses == 1
    assert torch.equal(value, call())


def test_other_functions_are_no_losses():
    assert F.huber_loss not in LOSSES
    assert F.gaussian_nll_loss not in LOSSES
    assert torch.mean not in LOSSES


def convolutions(count, scope, transposed=False):
    def model(x):
        with scope:
            weight = torch.ones(1, 1, 1, 1)
            for _ in range(count):
                x = F.conv_transpose2d(x, weight) if transposed else F.conv2d(x, weight)
        return x

    return model


IMAGE = torch.ones(1, 1, 2, 2)


def test_a_multi_conv_changes_no_value_and_is_used_again():
    scope = (
        poptorch.MultiConv()
        .availableMemoryProportions((0.8, 0.7))
        .partialsTypes([torch.float, torch.half])
        .planType(enums.MultiConvPlanType.Parallel)
        .perConvReservedTiles(100)
        .cycleBackOff(0.3)
        .enableConvDithering([True, False])
    )
    for _ in range(2):
        assert torch.equal(record(convolutions(2, scope), IMAGE)(IMAGE)[0], IMAGE)
    assert torch.equal(convolutions(0, scope)(IMAGE), IMAGE)


def test_one_option_stands_for_all_convolutions():
    scope = poptorch.MultiConv().availableMemoryProportions(0.8).partialsTypes(torch.half)
    scope.enableConvDithering(False).planType(None)
    assert torch.equal(record(convolutions(3, scope), IMAGE)(IMAGE)[0], IMAGE)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            convolutions(0, poptorch.MultiConv()),
            "Unexpected end_multi_conv: there is no convolution in this poptorch.MultiConv. Put at "
            "least one into it, or remove it.",
        ),
        (
            convolutions(1, poptorch.MultiConv(), transposed=True),
            "Unexpected end_multi_conv: there is no convolution in this poptorch.MultiConv. Put at "
            "least one into it, or remove it.",
        ),
        (
            convolutions(3, poptorch.MultiConv().availableMemoryProportions([0.1, 0.2])),
            "poptorch.MultiConv.availableMemoryProportions expects one value, or one for each of "
            "its 3 convolutions, got 2.",
        ),
        (
            convolutions(3, poptorch.MultiConv().partialsTypes([torch.half] * 2)),
            "poptorch.MultiConv.partialsTypes expects one value, or one for each of its 3 "
            "convolutions, got 2.",
        ),
        (
            convolutions(3, poptorch.MultiConv().enableConvDithering([True] * 4)),
            "poptorch.MultiConv.enableConvDithering expects one value, or one for each of its 3 "
            "convolutions, got 4.",
        ),
    ],
)
def test_a_multi_conv_that_is_none_is_refused(model, text):
    with pytest.raises(poptorch.Error) as failure:
        record(model, IMAGE)
    assert failure.value.message == text


def test_multi_convs_do_not_nest():
    def model(x):
        with poptorch.MultiConv(), poptorch.MultiConv():
            return x

    with pytest.raises(poptorch.Error) as failure:
        record(model, IMAGE)
    assert failure.value.message == (
        "Nested poptorch.MultiConv is not supported. Close the outer one first, or put all "
        "convolutions into it."
    )
    assert model(IMAGE) is IMAGE


def test_an_error_inside_of_a_multi_conv_leaves_it_as_it_is():
    def model(x):
        with poptorch.MultiConv():
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record(model, IMAGE)


@pytest.mark.parametrize(
    ("setting", "kind", "text"),
    [
        (
            lambda m: m.availableMemoryProportions(1),
            AssertionError,
            "Invalid available memory proportion! Expected a float, or a list of one for each "
            "convolution, got 1.",
        ),
        (
            lambda m: m.availableMemoryProportions([]),
            AssertionError,
            "Invalid available memory proportion! Expected a float, or a list of one for each "
            "convolution, got [].",
        ),
        (
            lambda m: m.partialsTypes("half"),
            ValueError,
            "Invalid partials types. Expecting torch.float or torch.half, got 'half'.",
        ),
        (
            lambda m: m.partialsTypes([torch.float, torch.int]),
            ValueError,
            "Invalid partials types. Expecting torch.float or torch.half, got torch.int32.",
        ),
        (
            lambda m: m.planType("parallel"),
            AssertionError,
            "Invalid plan type! Expected a poptorch.MultiConvPlanType, got 'parallel'.",
        ),
        (
            lambda m: m.perConvReservedTiles(1.0),
            AssertionError,
            "Invalid reserved tiles! Expected an int, got 1.0.",
        ),
        (
            lambda m: m.cycleBackOff(1),
            AssertionError,
            "Invalid cycle back off! Expected a float, got 1.",
        ),
        (
            lambda m: m.enableConvDithering([True, 1]),
            ValueError,
            "value must be bool or list of bools, got 1.",
        ),
    ],
)
def test_settings_of_a_multi_conv_are_checked(setting, kind, text):
    with pytest.raises(kind) as failure:
        setting(poptorch.MultiConv())
    assert str(failure.value) == text


def test_a_name_scope_changes_nothing():
    def model(x):
        with poptorch.NameScope("scope"):
            return x + 1

    assert torch.equal(record(model, X)(X)[0], X + 1)
    assert torch.equal(model(X), X + 1)


LOOP = enums.OverlapMode.OverlapAccumulationLoop


def resolved(model, *tensors):
    recorded = record(model, *tensors)
    nodes = list(recorded.graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    return recorded, resolve_overlaps(recorded.graph, inputs, nodes[-1].args[0])


def test_overlaps_are_found_and_taken_out():
    def model(a, b):
        parts = poptorch.set_overlap_for_input({"b": b}, enums.OverlapMode.NoOverlap)
        c = a + parts["b"]
        return c, *poptorch.set_overlap_for_output((c + 1, c * 2), LOOP)

    recorded, are_there = resolved(model, X, X)
    assert are_there
    assert not resolved(lambda a, b: a + b, X, X)[1]
    assert not any("overlap" in name for name in recorded.operators)
    torch.testing.assert_close(recorded(X, X), [2 * X, 2 * X + 1, 4 * X], rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            lambda x, z: (x + 1, poptorch.set_overlap_for_input(x, LOOP)),
            "poptorch.set_overlap_for_input must be the only op applied to an input. This is not "
            "the case for input 0 to the model. Use its result wherever the input was used.",
        ),
        (
            lambda x, z: poptorch.set_overlap_for_input(x + 1, LOOP),
            "poptorch.set_overlap_for_input applied on a node which is not a tensor input to the "
            "model. Call it first of all, on the input itself.",
        ),
        (
            lambda x, z: (lambda y: (y, poptorch.set_overlap_for_output(y, LOOP)))(x + 1),
            "poptorch.set_overlap_for_output cannot be used with a tensor that is returned twice. "
            "Please check all returned tensors including those nested in tuples/lists.",
        ),
        (
            lambda x, z: poptorch.set_overlap_for_output(x, LOOP) + 1,
            "poptorch.set_overlap_for_output applied on a node which is not a tensor output to "
            "the model. Call it right before returning, on the output itself.",
        ),
    ],
)
def test_overlaps_elsewhere_are_refused(model, text):
    with pytest.raises(poptorch.Error) as failure:
        resolved(model, X, X)
    assert failure.value.message == text


def test_a_marked_output_may_be_used_before_and_after():
    def model(x):
        y = x + 1
        marked = poptorch.set_overlap_for_output(y, LOOP)
        return marked, y * 2, marked * 3

    recorded, are_there = resolved(model, X)
    assert are_there
    assert not any("overlap" in name for name in recorded.operators)
    y = X + 1
    torch.testing.assert_close(recorded(X), [y, y * 2, y * 3], rtol=1e-15, atol=0)
