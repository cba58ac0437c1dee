"""poptorch.CPU and poptorch.custom_op."""

import sys

import pytest
import torch

from ipufit import poptorch
from tests.poptorch.recording import record


def test_a_function_of_the_host_is_called_at_every_run():
    seen = []

    def product(x, y):
        seen.append((x.tolist(), y.tolist()))
        return x * y

    op = poptorch.CPU(product, "product")
    recorded = record(lambda x, y: op(x, y) * 3, torch.ones(2), torch.ones(1))
    # Zeros, once, tell the shapes.
    assert seen == [([0.0, 0.0], [0.0])]
    x = torch.tensor([1.0, 2.0])
    assert recorded(x, torch.tensor([2.0]))[0].tolist() == [6.0, 12.0]
    assert recorded(x, torch.tensor([4.0]))[0].tolist() == [12.0, 24.0]
    assert len(seen) == 3


def test_several_results_and_several_calls_and_any_type():
    op = poptorch.CPU(lambda x: (x.sum(), x > 1), "two")

    def model(x):
        total, flags = op(x)
        more, _ = op(x * 10)
        return total, flags, more

    total, flags, more = record(model, torch.zeros(2))(torch.tensor([1.0, 2.0]))
    assert (total.item(), flags.tolist(), more.item()) == (3.0, [False, True], 30.0)


def test_parameters_of_a_module_on_the_host_are_not_trained():
    layer = torch.nn.Linear(2, 3).double()
    op = poptorch.CPU(layer, "linear")
    assert not any(p.requires_grad for p in layer.parameters())
    x = torch.randn(4, 2, dtype=torch.float64)
    recorded = record(op, torch.zeros_like(x))
    torch.testing.assert_close(recorded(x), [layer(x)], rtol=1e-15, atol=0)


def test_code_of_the_host_is_no_part_of_the_model():
    """It may print, branch on values and call operators of this package."""

    def foo(x):
        return poptorch.identity_loss(x, "sum") if x.sum() > 2 else x.sum() * 0

    op = poptorch.CPU(foo, "foo")
    recorded = record(lambda x: (op(x), poptorch.identity_loss(x, "sum")), torch.zeros(2))
    assert recorded.trace.losses == 1
    assert [t.item() for t in recorded(torch.tensor([1.0, 0.5]))] == [0.0, 1.5]
    assert [t.item() for t in recorded(torch.tensor([2.0, 0.5]))] == [2.5, 2.5]


def test_outside_of_a_model_the_function_is_called():
    assert poptorch.CPU(lambda x: (x, 3), "f")(torch.ones(1))[1] == 3


def test_inputs_are_copies():
    def change(x):
        return x.add_(1)

    op = poptorch.CPU(change, "change")
    recorded = record(lambda x: (op(x), x), torch.zeros(1))
    assert [t.item() for t in recorded(torch.zeros(1))] == [1.0, 0.0]


def test_persistent_data_has_the_shapes_of_the_last_call():
    op = poptorch.CPU(lambda x: x.sum(), "sum")
    record(op, torch.ones(2, 3))
    op.registerPersistentData()
    assert [t.shape for t in op.inputs] == [(2, 3)]
    op.inputs[0] += 1
    op.execute()
    assert op.outputs[0].item() == 6.0


def test_shapes_may_not_change_after_compiling():
    op = poptorch.CPU(lambda x: x[x > 0.5] if x.sum() else x, "mask")
    recorded = record(op, torch.zeros(2))
    with pytest.raises(poptorch.Error) as failure:
        recorded(torch.tensor([0.0, 1.0]))
    assert failure.value.message == (
        "poptorch.CPU 'mask' must return what it returned when the model was compiled: expected "
        "shapes [(2,)], got [(1,)]. Keep shapes independent of values."
    )


@pytest.mark.parametrize(
    ("call", "training", "text"),
    [
        (
            lambda op, x: op(x=x),
            False,
            "poptorch.CPU 'f' takes positional tensors only, got the keywords x. Pass them by "
            "position.",
        ),
        (
            lambda op, x: op(x, 2),
            False,
            "poptorch.CPU 'f' must take tensors, got int. Write torch.tensor(...) around a number.",
        ),
        (
            lambda op, x: op(x),
            True,
            "poptorch.CPU 'f': CPU ops are only supported in inference graphs, but this is a "
            "training model. Compute it before the model, on its inputs.",
        ),
        (
            lambda op, x: op(x, x),
            False,
            "poptorch.CPU 'f' must return tensors, got int. Write torch.tensor(...) around a "
            "number.",
        ),
    ],
)
def test_what_the_host_can_not_compute_is_refused(call, training, text):
    op = poptorch.CPU(lambda *tensors: tensors[0] if len(tensors) == 1 else 3, "f")
    with pytest.raises(poptorch.Error) as failure:
        record(lambda x: call(op, x), torch.ones(1), training=training)
    assert failure.value.message == text


def test_a_graph_does_not_outlive_its_functions():
    recorded = record(poptorch.CPU(lambda x: x, "f"), torch.ones(1))
    recorded.trace.keep_alive.clear()
    with pytest.raises(poptorch.Error, match=r"the function of a poptorch\.CPU is gone"):
        recorded(torch.ones(1))


def custom(x, **attributes):
    return poptorch.custom_op(
        [x], "Cube", "my.ops", 2, example_outputs=[x, x[0]], attributes=attributes or None
    )


def test_outside_of_a_model_a_custom_operator_returns_zeros():
    x = torch.ones(2, dtype=torch.float16)
    out = custom(x, scale=2.0)
    assert [(t.dtype, t.tolist()) for t in out] == [
        (torch.float16, [0.0, 0.0]),
        (torch.float16, 0.0),
    ]


def test_a_custom_operator_needs_hardware():
    with pytest.raises(poptorch.Error) as failure:
        record(lambda x: custom(x, scale=2.0), torch.ones(2))
    assert failure.value.message == (
        "poptorch.custom_op: 'Cube' of 'my.ops', version 2, is code compiled for an IPU, which "
        "nothing but IPU hardware with Graphcore's SDK can run. Replace it by torch operators "
        "where the model runs elsewhere."
    )


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({3: 1}, "All attribute keys must be strings. Got 3."),
        (
            {"a": None},
            "Attribute values must be floats, ints, strings or a list/tuple of float, ints of "
            "strings. Got NoneType for 'a'.",
        ),
        (
            {"a": [1, 2.0]},
            "The types in a list/tuple attribute must all be the same. Got int and float for 'a'.",
        ),
        (
            {"a": [None]},
            "Attribute values must be floats, ints, strings or a list/tuple of float, ints of "
            "strings. Got a list that holds NoneType for 'a'.",
        ),
        ({"a": "é"}, "é contains non-ASCII characters. Use ASCII only."),
        ({"a": ("b", "é")}, "é contains non-ASCII characters. Use ASCII only."),
        ({"é": 1}, "é contains non-ASCII characters. Use ASCII only."),
    ],
)
def test_attributes_are_numbers_texts_or_lists_of_one_type(attributes, text, recording):
    def call(x):
        return poptorch.custom_op([x], "A", "b", 1, [x], attributes)

    with pytest.raises(ValueError) as failure:  # noqa: PT011, the text is compared below
        record(call, torch.ones(1)) if recording else call(torch.ones(1))
    assert str(failure.value) == text


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [0.0, v], lambda v: (v, 0.0)])
@pytest.mark.parametrize(("sign", "side"), [(1, "high"), (-1, "low")])
def test_float_attributes_fit_into_single_precision(sign, side, wrap):
    value = wrap(sign * sys.float_info.max)
    with pytest.raises(poptorch.Error) as failure:
        record(lambda x: custom(x, a=value), torch.ones(1))
    text = "1.79769e+308" if sign > 0 else "-1.79769e+308"
    assert failure.value.message == (
        f"{text} is too {side} for a Popart float attribute. It has to fit into float32, whose "
        "largest is 3.40282e+38."
    )


def test_equal_attributes_of_other_types_are_others():
    before = len(poptorch.attributes_lists)
    for value in ([1, 2], [1, 2], [1.0, 2.0]):
        custom(torch.ones(1), values_of_this_test=value)
    assert poptorch.attributes_lists[before:] == [
        {"values_of_this_test": [1, 2]},
        {"values_of_this_test": [1.0, 2.0]},
    ]
