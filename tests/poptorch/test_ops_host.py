"""poptorch.CPU and poptorch.custom_op."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.poptorch._operators import custom as custom_operators
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
        "nothing but IPU hardware with Graphcore's SDK can run. Write what it computes elsewhere: "
        "ipufit.poptorch.register_custom_op('Cube', 'my.ops', lambda x0, scale: ..., version=2), "
        "which returns tensors like example_outputs."
    )


@pytest.fixture
def registered(monkeypatch):
    """What a test registers is gone when it ends."""
    monkeypatch.setattr(custom_operators, "_IMPLEMENTATIONS", {**custom_operators._IMPLEMENTATIONS})
    return poptorch.register_custom_op


class Scaled(nn.Module):
    """A dense layer, a custom operator and a loss."""

    def __init__(self, version=1):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
        self.version = version

    def forward(self, x, target):
        x = self.linear(x)
        arguments = ("Cube", "my.ops", self.version, [x], {"scale": 2.0})
        (x,) = poptorch.custom_op([x], *arguments)
        return x, poptorch.identity_loss((x - target).square().sum(), reduction="none")


def test_a_registered_operator_is_trained_through(registered):
    """It is differentiated as the operators that its function calls."""
    registered("Cube", "my.ops", lambda x, scale: scale * x**3)
    net, (x, target) = Scaled(), torch.randn(2, 5, 3)
    weight = net.linear.weight.detach().clone().requires_grad_()
    y = 2 * (x @ weight.T + net.linear.bias.detach()) ** 3
    (y - target).square().sum().backward()
    expected = (weight - 0.01 * weight.grad).detach()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.01)
    out, _ = poptorch.trainingModel(net, optimizer=optimizer)(x, target)
    torch.testing.assert_close(out, y.detach())
    torch.testing.assert_close(net.linear.weight.detach(), expected)


def test_an_operator_is_registered_for_one_version(registered):
    registered("Cube", "my.ops", lambda x, scale: scale * x**3, version=2)
    x = torch.randn(2, 5, 3)
    models = []
    for version in (1, 2):
        net = Scaled(version)
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.01)
        models.append(poptorch.trainingModel(net, optimizer=optimizer))
    with pytest.raises(poptorch.Error, match=r"'Cube' of 'my\.ops', version 1, is code compiled"):
        models[0](*x)
    assert torch.isfinite(models[1](*x)[1])


def test_a_registered_function_returns_what_its_calls_expect(registered):
    registered("Cube", "my.ops", lambda x, scale: [x, x.half()], version=2)
    with pytest.raises(poptorch.Error) as failure:
        record(lambda x: custom(x, scale=2.0), torch.ones(2))
    assert failure.value.message == (
        "poptorch.custom_op: the function that is registered for 'Cube' of 'my.ops' must return "
        "tensors like example_outputs: expected [((2,), torch.float32), ((), torch.float32)], got "
        "[((2,), torch.float32), ((2,), torch.float16)]. Register another, or pass other "
        "example_outputs."
    )


@pytest.mark.parametrize(
    ("operator", "attributes", "expected"),
    [
        (("RemapCE", "ai.graphcore"), {"grain_size": 8}, lambda x: x),
        (("CopyTensor", "ai.graphcore"), None, lambda x: x),
        (("LeakyRelu", "custom.ops"), {"alpha": 0.2}, lambda x: F.leaky_relu(x, 0.2)),
    ],
)
def test_operators_of_published_programs_are_registered(operator, attributes, expected):
    x = torch.randn(4, 3)
    (out,) = record(lambda x: poptorch.custom_op([x], *operator, 1, [x], attributes), x)(x)
    torch.testing.assert_close(out, expected(x))


def test_popart_s_ctc_is_torch_s_with_its_gradient():
    log_probs = torch.randn(9, 2, 5).log_softmax(-1).requires_grad_()
    targets, steps, lengths = (
        torch.randint(1, 5, (2, 3)),
        torch.tensor([9, 7]),
        torch.tensor([3, 2]),
    )
    loss = F.ctc_loss(log_probs, targets, steps, lengths, reduction="sum")
    loss.backward()
    inputs = (log_probs.detach(), targets, steps, lengths)
    attributes = {"reduction": "Sum", "blank": 0, "outDataType": "UNDEFINED"}
    like = [torch.tensor(0.0), log_probs.detach()]
    results = record(
        lambda *inputs: poptorch.custom_op(
            list(inputs), "Ctc", "ai.graphcore", 1, like, attributes
        ),
        *inputs,
    )(*inputs)
    torch.testing.assert_close(results[0], loss.detach())
    torch.testing.assert_close(results[1], log_probs.grad)


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


class Follower(nn.Module):
    """A layer that is trained, and averages of its weight and bias that its outputs need."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = nn.Linear(3, 2), nn.Linear(3, 2)
        self.teacher.requires_grad_(False)

    def forward(self, x, factor):
        for weight, average in zip(self.student.parameters(), self.teacher.parameters()):
            inputs = [weight, average, factor]
            poptorch.custom_op(inputs, "ExpMovAvg", "com.acme", 1, [weight])
        error = self.student(x) - self.teacher(x)
        return error, poptorch.identity_loss(error.square().sum(), reduction="none")


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_moving_average_moves_once_an_update_after_the_step(accumulation, replicas):
    """All micro-batches of an update see the average that the one before has left."""
    net, expected = Follower(), Follower()
    options = poptorch.Options().replicationFactor(replicas).deviceIterations(2)
    options.Training.gradientAccumulation(accumulation)
    options.outputMode(poptorch.OutputMode.All)
    reduction = poptorch.ReductionType.Sum
    options.Training.accumulationAndReplicationReductionType(reduction)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.01)
    samples = 2 * accumulation * replicas
    x, factor = torch.randn(samples, 3), torch.tensor([0.9]).repeat(samples)
    factor[-accumulation * replicas :] = 0.5
    errors, _ = poptorch.trainingModel(net, options, optimizer)(x, factor)
    sgd = torch.optim.SGD(expected.student.parameters(), lr=0.01)
    for part, old, rows in zip(errors.chunk(2), (0.9, 0.5), x.chunk(2)):
        sgd.zero_grad()
        error = expected.student(rows) - expected.teacher(rows)
        torch.testing.assert_close(part, error.detach())
        error.square().sum().backward()
        sgd.step()
        pairs = zip(expected.student.parameters(), expected.teacher.parameters())
        for weight, average in pairs:
            average.copy_(old * average + (1 - old) * weight.detach())
    for (name, tensor), other in zip(net.state_dict().items(), expected.state_dict().values()):
        torch.testing.assert_close(tensor, other, msg=name)


def test_a_moving_average_is_kept_in_half_precision_and_in_files(tmp_path):
    options = poptorch.Options().enableExecutableCaching(str(tmp_path))
    results = []
    for _ in range(2):
        net = Follower().half()
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.0)
        model = poptorch.trainingModel(net, options, optimizer)
        model(torch.randn(1, 3).half(), torch.tensor([0.75]))
        results.append(net.teacher.weight.clone())
    assert len(list(tmp_path.iterdir())) == 1
    before = Follower().half()
    expected = 0.75 * before.teacher.weight + 0.25 * before.student.weight
    for result in results:
        torch.testing.assert_close(result, expected.detach())


def test_what_follows_a_moving_average_is_a_weight():
    class Computed(Follower):
        def forward(self, x, factor):
            inputs = [self.student.weight * 2, self.teacher.weight, factor]
            poptorch.custom_op(inputs, "ExpMovAvg", "com.acme", 1, [self.teacher.weight])
            return super().forward(x, factor)

    net = Computed()
    model = poptorch.trainingModel(net, optimizer=poptorch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error) as failure:
        model(torch.ones(1, 3), torch.ones(1))
    assert failure.value.message == (
        "ExpMovAvg expects a parameter or buffer of the model and another one, which follows it, "
        "got computed tensors of shapes [2, 3] and [2, 3]. Pass them as they are in the model."
    )


def test_a_model_of_ipufit_moves_no_average_for_an_operator():
    model = ipufit.Model(Follower())
    model.compile("sgd", lambda outputs, target: outputs[1])
    with pytest.raises(poptorch.Error) as failure:
        model.fit((torch.ones(2, 3), torch.ones(2)), torch.ones(2), batch_size=1)
    assert failure.value.message == (
        "ExpMovAvg moves an average after each update of a poptorch.trainingModel, and an "
        "ipufit.Model moves averages itself. Leave the operator out, and use "
        "compile(ema=ipufit.EMA(...))."
    )


def test_boxes_are_selected_as_torchvision_does():
    """Of each class by itself; torchvision's rule, written out, on random boxes."""
    torch.manual_seed(0)
    corner, scores = torch.rand(2, 30, 2), torch.rand(2, 30, 3)
    boxes = torch.cat([corner, corner + 0.1 + torch.rand(2, 30, 2)], 2)

    def overlap(one, other):
        sides = torch.min(one[2:], other[2:]) - torch.max(one[:2], other[:2])
        both = float(sides.clamp(min=0).prod())
        return both / (float(sum((box[2:] - box[:2]).prod() for box in (one, other))) - both)

    def selected(scores, boxes, count):
        chosen = []
        for score, place, kind in sorted(
            ((float(s), p, k) for p, row in enumerate(scores) for k, s in enumerate(row)),
            reverse=True,
        ):
            same = [other for _, other, other_kind in chosen if other_kind == kind]
            if score > 0.4 and all(overlap(boxes[place], boxes[p]) <= 0.5 for p in same):
                chosen.append((score, place, kind))
        return chosen[:count]

    for count in (5, 60):
        like = [
            torch.zeros(2, count, dtype=torch.int64),
            torch.zeros(2, count),
            torch.zeros(2, count, 4),
            *(torch.zeros(shape, dtype=torch.int32) for shape in ((2, count), (2,))),
        ]
        settings = {"threshold": 0.5, "scoreThreshold": 0.4, "numDetections": count, "useGather": 1}
        places, best, corners, kinds, lengths = record(
            lambda *inputs, like=like, settings=settings: poptorch.custom_op(
                inputs, "Nms", "ai.graphcore", 1, like, settings
            ),
            scores,
            boxes,
        )(scores, boxes)
        for sample in range(2):
            chosen = selected(scores[sample], boxes[sample], count)
            there = int(lengths[sample])
            rows = zip(best[sample].tolist(), places[sample].tolist(), kinds[sample].tolist())
            assert there == len(chosen)
            assert list(rows)[:there] == chosen
            torch.testing.assert_close(
                corners[sample, :there], boxes[sample, places[sample, :there]]
            )
            assert set(places[sample, there:].tolist()) <= {-1}
            assert not best[sample, there:].any()
            assert not corners[sample, there:].any()
            assert set(kinds[sample, there:].tolist()) <= {2**31 - 1}
    assert 5 < there < 60
