import collections
import logging

import numpy as np
import pytest
import torch
from torch import nn

from ipufit.poptorch import _parsers as parsers
from ipufit.poptorch._arguments import ArgumentParser
from ipufit.poptorch._execution import CallShape
from ipufit.poptorch._precision import (
    DEVICE_DTYPES,
    check_input,
    narrowed,
    narrowed_output,
    output_dtype,
)
from ipufit.poptorch.enums import OutputMode
from ipufit.poptorch.poptorch_core import Error
from tests.told import message

ADVICE = (
    " The model is compiled for the arguments of its first call. To compile it for these, call "
    "destroy() on it and call it again, or wrap the module in a new inferenceModel() or "
    "trainingModel()."
)

ONE, TWO, THREE = (torch.full((2,), float(i)) for i in (1, 2, 3))


def parsed(function, *args, **kwargs):
    return ArgumentParser(function)(args, kwargs)


def same(left, right):
    return len(left) == len(right) and all(a is b for a, b in zip(left, right))


def refused(function, first, second):
    """The message with which a second call is refused, without the advice at its end."""
    parser = ArgumentParser(function)
    compiled = parser(*first).without_values()
    with pytest.raises(Error) as caught:
        parser(*second, fast_path=True).check_like(compiled)
    assert caught.value.type == "poptorch_py_error"
    assert caught.value.message.endswith(ADVICE)
    return caught.value.message[: -len(ADVICE)]


def call(*args, **kwargs):
    return args, kwargs


class Net(nn.Module):
    def forward(self, x, y=2, *, z=None):
        return x


def test_a_call_is_bound_by_position_with_defaults():
    bound = parsed(Net(), ONE)
    assert bound.names == ("x", "y")
    assert bound.args[0] is ONE
    assert bound.args[1] == 2
    assert bound.kwargs == {"z": None}


def test_keywords_go_to_their_positions():
    def forward(a, b, c=3):
        pass

    bound = parsed(forward, c=THREE, b=TWO, a=ONE)
    assert same(bound.args, (ONE, TWO, THREE))
    assert bound.kwargs == {}


def test_variadic_arguments_and_what_follows_them():
    def forward(a, *rest, k=1, **more):
        pass

    bound = parsed(forward, ONE, TWO, 5, extra=THREE)
    assert bound.names == ("a", "*rest[0]", "*rest[1]")
    assert bound.args[2] == 5
    assert bound.kwargs == {"k": 1, "extra": THREE}
    assert same(bound.tensors(), (ONE, TWO, THREE))


def test_a_function_without_a_signature_takes_anything():
    bound = parsed(torch.relu, ONE, out=TWO)
    assert same(bound.args, (ONE,))
    assert bound.kwargs == {"out": TWO}


def test_positional_only_names_may_come_again_among_keywords():
    namespace = {}
    exec("def forward(a, /, **more): pass", namespace)
    bound = parsed(namespace["forward"], ONE, a=TWO)
    assert same(bound.args, (ONE,))
    assert bound.kwargs == {"a": TWO}


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            call(1, 2, 3),
            "Too many arguments provided: expected x, y (2) but got 3 by position. Pass what "
            "forward takes.",
        ),
        (call(1, w=3), "w is not a valid parameter. Allowed values are x, y, z."),
        (
            call(1, x=3),
            "Parameter x was passed more than once. Pass it by position or by name.",
        ),
    ],
)
def test_a_call_that_forward_does_not_take_is_refused(args, text):
    assert message(ArgumentParser(Net()), *args, kind=AssertionError) == text


@pytest.mark.parametrize("function", [Net(), lambda *, x: x])
def test_a_missing_argument_is_refused(function):
    with pytest.raises(Error) as caught:
        ArgumentParser(function)((), {})
    assert caught.value.message == "Mandatory parameter x missing. Pass a value for it."


def test_something_that_can_not_be_called_has_no_arguments():
    assert message(ArgumentParser, 3, kind=TypeError) == (
        "Expected a torch.nn.Module or a callable, got int. Pass the module itself."
    )


def test_tensors_are_put_back_into_the_structure():
    bound = parsed(Net(), [ONE, {"k": TWO}], y=(3, THREE))
    args, kwargs = bound.rebuild(["a", "b", "c"])
    assert args == (["a", {"k": "b"}], (3, "c"))
    assert kwargs == {"z": None}
    assert bound.tensor_names() == ["tensor 0 of x", "tensor 1 of x", "tensor 0 of y"]
    assert parsed(Net(), ONE, z=TWO).tensor_names() == ["x", "z"]


def test_keys_come_in_the_order_of_the_compiled_call():
    parser = ArgumentParser(Net())
    compiled = parser(*call({"a": ONE, "b": TWO})).without_values()
    later = parser(*call({"b": TWO, "a": ONE}))
    later.check_like(compiled)
    assert same(later.tensors(compiled), (ONE, TWO))


def test_what_is_compared_with_holds_no_values():
    kept = parsed(Net(), ONE, z=[TWO, 5]).without_values()
    assert [(t.device.type, t.shape) for t in kept.tensors()] == [("meta", (2,))] * 2
    assert kept.kwargs["z"][1] == 5


def test_equal_arguments_pass():
    Pair = collections.namedtuple("Pair", "a b")
    args = call(Pair(ONE, 3), y={"k": [ONE, None]}, z=float("nan"))
    parser = ArgumentParser(Net())
    compiled = parser(*args).without_values()
    parser(
        (Pair(TWO, 3),), {"y": {"k": [TWO, None]}, "z": float("nan")}, fast_path=True
    ).check_like(compiled)


def test_every_difference_is_an_error_that_names_the_argument():
    def forward(*args, **kwargs):
        pass

    assert refused(forward, call(ONE), call(ONE, TWO)) == (
        "Number of positional arguments mismatch: expected 1 arguments but got 2."
    )
    assert refused(Net(), call(ONE), call(ONE.int())) == (
        "Data type mismatch for x: expected torch.float32 but got torch.int32."
    )
    assert refused(Net(), call(ONE), call(torch.ones(3))) == (
        "Shape mismatch for x: expected torch.Size([2]) but got torch.Size([3])."
    )
    assert refused(Net(), call(ONE), call(ONE, 3)) == (
        "Value mismatch for y: expected 2 but got 3."
    )
    assert refused(Net(), call(ONE), call(ONE, z=TWO)) == (
        "Type mismatch for z: expected NoneType but got torch.Tensor."
    )
    assert refused(Net(), call((ONE, 3)), call([ONE, 3])) == (
        "Type mismatch for x: expected tuple but got list."
    )
    assert refused(Net(), call((ONE, 3)), call((ONE,))) == (
        "Length mismatch for x: expected 2 elements but got 1."
    )
    assert refused(Net(), call((ONE, (TWO, 3))), call((ONE, (TWO, 4)))) == (
        "Value mismatch for x[1][1]: expected 3 but got 4."
    )
    assert refused(Net(), call({"a": ONE, "b": 1}), call({"a": ONE, "c": 1})) == (
        "Keys mismatch for x: Unexpected arguments: c. Missing arguments: b."
    )
    assert refused(Net(), call({"a": {"b": 1}}), call({"a": {"b": 2}})) == (
        "Value mismatch for x[a][b]: expected 1 but got 2."
    )
    assert refused(forward, call(a=ONE, b=1), call(a=ONE)) == (
        "Keys mismatch for named arguments: Missing arguments: b."
    )
    assert refused(forward, call(a=True), call(a=1)) == (
        "Type mismatch for a: expected bool but got int."
    )
    assert refused(Net(), call([ONE, [TWO]]), call([ONE])) == (
        "Length mismatch for x: expected 2 elements but got 1."
    )
    assert refused(Net(), call([ONE]), call([torch.ones(3)])) == (
        "Shape mismatch for x[0]: expected torch.Size([2]) but got torch.Size([3])."
    )
    assert refused(Net(), call(["a"]), call(["b"])) == (
        "Value mismatch for x: expected ['a'] but got ['b']."
    )
    assert refused(Net(), call(np.array([1, 2])), call(np.array([1, 3]))) == (
        "Value mismatch for x: expected [1 2] but got [1 3]."
    )


def test_a_parameter_may_take_the_place_of_a_tensor():
    parser = ArgumentParser(Net())
    compiled = parser(*call(ONE)).without_values()
    parser((nn.Parameter(TWO),), {}, fast_path=True).check_like(compiled)


def test_a_value_beside_tensors_in_a_list_is_baked_in_and_said_once(caplog):
    parser = ArgumentParser(Net())
    compiled = parser(*call([ONE, 3])).without_values()
    parser(*call([TWO, 3])).check_like(compiled)
    assert not caplog.records
    for _ in range(2):
        parser(*call([TWO, 4])).check_like(compiled)
    assert [record.getMessage() for record in caplog.records] == [
        "The values in x that are no tensors differ from those of the first call, which are part "
        "of the compiled program and are used again. Pass them as arguments of their own to have "
        "this checked, or as tensors to change them."
    ]


class Box:
    def __init__(self, tensor):
        self.tensor = tensor


class BoxParser(parsers.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.tensor

    def reconstruct(self, original_structure, tensor_iterator):
        return Box(next(tensor_iterator))


def test_a_type_with_a_parser_is_compared_by_its_tensors():
    parsers.registerCustomArgParser(Box, BoxParser())
    try:
        assert refused(Net(), call(Box(ONE)), call(Box(ONE.double()))) == (
            "Data type mismatch for x[0]: expected torch.float32 but got torch.float64."
        )
        parser = ArgumentParser(Net())
        given = Box(torch.ones(2, 2).t())
        bound = parser(*call(given))
        assert bound.tensors()[0].is_contiguous()
        assert same(bound.callers(), (given.tensor,))
        bound.check_like(parser(*call(Box(torch.zeros(2, 2)))).without_values())
    finally:
        parsers.registerCustomArgParser(Box, None)


def test_strided_inputs_become_dense_and_the_callers_stay(caplog):
    strided = torch.arange(6.0).reshape(2, 3).t()
    parser = ArgumentParser(Net())
    for _ in range(2):
        bound = parser(*call([strided, ONE]))
        dense, one = bound.tensors()
        assert dense.is_contiguous()
        assert torch.equal(dense, strided)
        assert one.data_ptr() == ONE.data_ptr()
        assert same(bound.callers(), (strided, ONE))
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        (
            "poptorch::python",
            logging.WARNING,
            "At least one input tensor is not contiguous: non-contiguous tensors will be "
            "converted. Pass tensor.contiguous() to do this once.",
        )
    ]


def test_gradients_of_inputs_are_cut_with_a_warning_when_compiling(caplog):
    leaf = torch.ones(2, requires_grad=True)
    parser = ArgumentParser(Net())
    bound = parser(*call(leaf))
    assert not bound.tensors()[0].requires_grad
    assert bound.tensors()[0].data_ptr() == leaf.data_ptr()
    assert same(bound.callers(), (leaf,))
    parser(*call(leaf), fast_path=True)
    assert [r.getMessage() for r in caplog.records] == [
        "Input tensor has requires_grad=True set. This tensor will be detached because backward "
        "pass via inputs is not supported. Gradients of a model's inputs can't be asked for from "
        "outside. Call requires_grad_() on it in forward, and return its gradient as an output."
    ]


@pytest.mark.parametrize("fast_path", [False, True])
def test_a_dict_is_warned_about_once_when_compiling(caplog, fast_path):
    ArgumentParser(Net())(*call([{"a": ONE}], y={"b": TWO}), fast_path=fast_path)
    assert [r.getMessage() for r in caplog.records] == ([] if fast_path else [
        "A dict among the inputs is taken apart by the keys of the first call: later calls must "
        "have the same keys. A tuple says this by itself."
    ])  # fmt: skip


def division(iterations=1, replicas=1, group=1, accumulation=1):
    """The shape of a call in so far as it divides a batch."""
    members = tuple(replica // group for replica in range(replicas))
    mode = OutputMode.All
    return CallShape(iterations, accumulation, replicas, members, mode, input_group_size=group)


def test_the_factor_counts_groups_instead_of_replicas():
    assert division(3, 4, 2, 5).micro_batches == 3 * 2 * 5
    assert division().micro_batches == 1


def test_the_first_micro_batch_is_a_view():
    batch = division(iterations=2, accumulation=3)
    x = torch.arange(24.0).reshape(12, 2)
    first = batch.first(x, "x")
    assert first.shape == (2, 2)
    assert first.data_ptr() == x.data_ptr()
    assert batch.check(x, "x") == 2
    assert division().first(torch.tensor(3.0), "x").shape == ()


def test_an_uneven_batch_names_all_numbers_and_the_next_sizes():
    batch = division(3, 4, 2, 2)
    text = (
        "Options.deviceIterations(3) * (Options.replicationFactor(4) / "
        "Options.inputReplicaGrouping.input_group_size(2)) * "
        "Options.Training.gradientAccumulation(2) = 12, so that each micro-batch has the same "
    )
    end = " samples, or use poptorch.DataLoader, which loads the right number."
    for size, sizes in [(26, "24 or 36"), (5, "12")]:
        assert message(batch.check, torch.ones(size, 4), "tensor 1 of x", kind=AssertionError) == (
            f"Invalid batch dimension: in the input tensor 1 of x of shape [{size}, 4], the batch "
            f"dimension ({size}) must be a multiple of {text}size. Pass {sizes}{end}"
        )


def test_a_scalar_counts_as_a_batch_of_one():
    with pytest.raises(AssertionError, match=r"^Invalid batch dimension: .*dimension \(1\)"):
        division(2).first(torch.tensor(1.0), "x")


@pytest.mark.parametrize("number", [0, -1])
def test_a_factor_below_one_is_refused(number):
    """Options accept any whole number; a division by zero would say nothing."""
    with pytest.raises(AssertionError, match=r"which must be at least 1\. Set each of these"):
        division(number).check(ONE, "x")


@pytest.mark.parametrize("dtype", sorted(DEVICE_DTYPES, key=str))
def test_inputs_are_narrowed_and_integers_stay_indices(dtype):
    tensor = torch.ones(2, dtype=dtype)
    check_input(tensor, "x")
    expected = {torch.float64: torch.float32, torch.bfloat16: torch.float32}
    assert narrowed(tensor).dtype is expected.get(dtype, dtype)


def test_the_device_has_no_wide_types():
    wide = {torch.int64, torch.float64, torch.bfloat16}
    assert not wide & set(DEVICE_DTYPES.values())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.int64, torch.int32),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.float32),
        (torch.bool, torch.bool),
        (torch.uint8, torch.uint8),
    ],
)
def test_outputs_are_narrowed(dtype, expected):
    assert output_dtype(dtype) is expected
    assert narrowed_output(torch.ones(2, dtype=dtype)).dtype is expected


def test_an_unknown_type_is_refused():
    with pytest.raises(Error) as caught:
        check_input(torch.ones(2, dtype=torch.complex64), "x")
    assert caught.value.message == (
        "Unsupported input type torch.complex64 of the input x. Convert it to one of bfloat16, "
        "bool, float16, float32, float64, int16, int32, int64, int8, uint8; a complex tensor fits "
        "as torch.view_as_real(tensor)."
    )


def test_an_empty_tensor_is_refused():
    with pytest.raises(Error) as caught:
        check_input(torch.ones(0, 3), "x")
    assert caught.value.message == (
        "Zero-sized tensors are unsupported (Got shape [0, 3]). Leave the input x out of this "
        "call, or pad it."
    )
