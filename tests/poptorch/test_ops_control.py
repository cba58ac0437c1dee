"""poptorch.for_loop and poptorch.cond."""

import copy
import gc
import weakref

import pytest
import torch

from ipufit import poptorch
from ipufit.poptorch._operators.control import Body, bodies_in, everywhere, renumber
from tests.poptorch.recording import record


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_a_loop_runs_its_body_count_times(count):
    x, y = double(1.0, -2.0), double(0.5, 3.0)

    def body(a, b):
        return a * y + b, b - 0.25

    recorded = record(lambda a, b: poptorch.for_loop(count, body, [a, b]), x, x + 1)
    got = recorded(x, y)
    a, b = x, y
    for _ in range(count):
        a, b = a * y + b, b - 0.25
    # y is the literal tensor of the closure, not the second input.
    torch.testing.assert_close(got, [a, b], rtol=0, atol=0)


def test_a_loop_outside_of_a_model_runs_its_body_count_times_too():
    assert poptorch.for_loop(10, lambda x: x * 2, [torch.tensor([1.0])])[0].item() == 1024


def test_the_body_of_a_loop_is_recorded_once():
    """A large count must cost neither memory nor time when the model is compiled."""
    calls = []

    def body(x):
        calls.append(1)
        return x * 1.5

    recorded = record(lambda x: poptorch.for_loop(100_000, body, [x]), torch.ones(2))
    assert calls == [1]
    assert recorded.operators[0] == "ipufit_poptorch.repeat.default"
    lengths = [len(graph.graph.nodes) for graph in everywhere(recorded.graph)]
    assert len(lengths) == 2
    assert max(lengths) < 8


def test_a_body_uses_tensors_from_around_it_and_leaves_them_as_they_are():
    weight = torch.nn.Parameter(double(2.0, 3.0))

    def model(x, y):
        def body(a):
            a += 1
            y.mul_(2)
            return a * y + weight + torch.tensor([10.0, 20.0], dtype=torch.float64)

        return [*poptorch.for_loop(3, body, [x]), x, y]

    x, y = double(1.0, 2.0), double(0.5, 0.25)
    out, same_x, same_y = record(model, torch.zeros(2).double(), torch.zeros(2).double())(x, y)
    expected = x
    for _ in range(3):
        expected = (expected + 1) * (2 * y) + weight.detach() + double(10.0, 20.0)
    torch.testing.assert_close(out, expected, rtol=1e-15, atol=0)
    assert torch.equal(same_x, x)
    assert torch.equal(same_y, y)


def test_a_loop_with_literals_only_is_computed_at_run_time():
    def model(x):
        pair = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
        first, second = poptorch.for_loop(5, lambda a, b: (a * 2, b * a * 2), pair)
        return first, second + x

    first, second = record(model, torch.zeros(2))(torch.zeros(2))
    assert first.tolist() == [32.0, 64.0]
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    for _ in range(5):
        a, b = a * 2, b * a * 2
    assert torch.equal(second, b)


def test_loops_nest():
    def model(x):
        def outer(a):
            return poptorch.for_loop(3, lambda b: b * 2 + a, [a])[0] + x

        return poptorch.for_loop(2, outer, [x])

    a = x = double(0.3, -1.0)
    for _ in range(2):
        b = a
        for _ in range(3):
            b = b * 2 + a
        a = b + x
    torch.testing.assert_close(record(model, torch.zeros(2).double())(x), [a], rtol=1e-15, atol=0)


def test_a_loop_swaps_its_inputs():
    """The results of one turn alias the inputs of the next."""

    def body(a, b):
        a += 1
        return b, a

    out = record(lambda a, b: poptorch.for_loop(3, body, [a, b]), *[torch.zeros(1)] * 2)(
        torch.tensor([0.0]), torch.tensor([10.0])
    )
    assert [t.item() for t in out] == [11.0, 2.0]


def test_a_body_may_return_one_tensor_twice():
    def body(a, b):
        a += 1
        return a, a

    out = record(lambda a: poptorch.for_loop(3, body, [a, a]), torch.zeros(1))(torch.zeros(1))
    assert [t.item() for t in out] == [3.0, 3.0]
    assert out[0].data_ptr() != out[1].data_ptr()


def test_a_loop_that_returns_its_input_returns_a_copy():
    recorded = record(lambda a: poptorch.for_loop(0, lambda b: b, [a]), torch.zeros(1))
    given = torch.ones(1)
    assert recorded.graph(given)[0].data_ptr() != given.data_ptr()


def test_whole_numbers_of_other_width_go_round_a_loop():
    """On the device int64 is int32: torch's own promotion in a body is no mismatch."""
    recorded = record(
        lambda x: poptorch.for_loop(2, lambda a: a.sum().reshape(1), [x]),
        torch.zeros(1, dtype=torch.int32),
    )
    (out,) = recorded(torch.tensor([7], dtype=torch.int32))
    assert (out.dtype, out.item()) == (torch.int32, 7)


def loop(*args):
    return lambda x: poptorch.for_loop(*args, [x])


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (
            lambda x: x,
            "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. (Object is "
            "not list) Got {}: write [x] for one tensor.",
        ),
        (
            lambda x: [x, 5],
            "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. (Object "
            "contained in list at index 1 is not torch.tensor) Got int: write torch.tensor(...) "
            "around a number.",
        ),
    ],
)
def test_a_loop_takes_a_list_of_tensors(inputs, text, recording):
    def model(x):
        return poptorch.for_loop(2, lambda *a: a, inputs(x))

    name = "FakeTensor" if recording else "Tensor"
    with pytest.raises(ValueError) as failure:  # noqa: PT011, the text is compared below
        record(model, torch.ones(1)) if recording else model(torch.ones(1))
    assert str(failure.value) == text.format(name)


@pytest.mark.parametrize("count", [2.0, -1, None])
def test_the_count_of_a_loop_is_known_beforehand(count):
    with pytest.raises(poptorch.Error) as failure:
        poptorch.for_loop(count, lambda a: a, [torch.ones(1)])
    assert failure.value.message == (
        "poptorch.for_loop expects count to be an int of at least 0 that is known when the model "
        f"is compiled, got {count!r}. Pass a Python int."
    )


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            lambda a: (a, a),
            "the body of poptorch.for_loop must return as many tensors as it takes, expected 1, "
            "got 2. Return every input, changed or not.",
        ),
        (
            lambda a: a.sum(),
            "the body of poptorch.for_loop must return tensors like its inputs: expected (2,) "
            "torch.float32 at index 0, got () torch.float32. Convert or reshape it where the body "
            "ends.",
        ),
        (
            lambda a: a.int(),
            "the body of poptorch.for_loop must return tensors like its inputs: expected (2,) "
            "torch.float32 at index 0, got (2,) torch.int32. Convert or reshape it where the body "
            "ends.",
        ),
        (
            lambda a: 3,
            "the body of poptorch.for_loop must return tensors, or a list or tuple of them, got "
            "int. Return only what depends on its inputs as tensors.",
        ),
    ],
)
def test_a_body_returns_what_can_be_its_next_input(body, text):
    with pytest.raises(poptorch.Error) as failure:
        record(loop(2, body), torch.ones(2))
    assert failure.value.message == text


def test_loops_and_branches_are_refused_in_training():
    x = torch.ones(1)
    with pytest.raises(poptorch.Error) as failure:
        record(loop(2, lambda a: a), x, training=True)
    assert failure.value.message == (
        "poptorch.for_loop() is only supported in inference, but this is a training model. Wrap "
        "the model with poptorch.inferenceModel, or write the steps one after another."
    )
    with pytest.raises(poptorch.Error, match=r"poptorch.cond\(\) is only supported in inference"):
        record(
            lambda c, a: poptorch.cond(c, lambda: a, [], lambda: a, []),
            torch.tensor([True]),
            x,
            training=True,
        )


def test_bodies_live_as_long_as_their_recording():
    recorded = record(loop(2, lambda a: a + 1), torch.zeros(1))
    (body,) = recorded.trace.keep_alive
    graph, reference = recorded.graph, weakref.ref(body)
    del body, recorded
    gc.collect()
    assert reference() is None
    with pytest.raises(poptorch.Error) as failure:
        graph(torch.zeros(1))
    assert failure.value.message == (
        "the body of a poptorch.for_loop or poptorch.cond is gone: expected the model that "
        "recorded it to be alive. Compile the model again."
    )


@pytest.mark.long
def test_a_stored_graph_gets_bodies_of_its_own():
    """Their numbers hold in one process only."""

    def model(condition, x):
        def body(a):
            return poptorch.cond(condition, lambda: a * 2, [], lambda: a + 1, [])

        return poptorch.for_loop(3, body, [x])

    recorded = record(model, torch.tensor(True), torch.ones(1))
    stored = copy.deepcopy(recorded.graph)
    parts = [
        (number, copy.deepcopy(body.graph), list(body.results))
        for number, body in bodies_in(recorded.graph).items()
    ]
    assert len(parts) == 3
    del recorded
    gc.collect()
    known = {}
    for number, graph, results in parts:
        renumber(graph, {old: body.number for old, body in known.items()})
        known[number] = Body(graph, results)
    renumber(stored, {old: body.number for old, body in known.items()})
    assert stored(torch.tensor(True), torch.ones(1))[0].item() == 8
    assert stored(torch.tensor(False), torch.ones(1))[0].item() == 4


def branches(condition, x, y):
    def then_body(a):
        return a, x + y, y

    def else_body(b):
        b += 1
        return b * y, y, x - y

    return poptorch.cond(condition, then_body, [x], else_body, [y])


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("value", [True, False])
def test_a_branch_is_decided_at_run_time(value, recording):
    x, y = double(2.0, 5.0), double(3.0, -1.0)
    condition = torch.tensor([value])
    before = y.clone()
    model = record(branches, ~condition, y, x) if recording else branches
    expected = [x, x + y, y] if value else [(y + 1) * y, y, x - y]
    torch.testing.assert_close(list(model(condition, x, y)), expected, rtol=0, atol=0)
    assert torch.equal(y, before)


def test_only_the_branch_that_is_taken_runs(capfd):
    def model(condition, x):
        return poptorch.cond(
            condition,
            lambda: poptorch.ipu_print_tensor(x, "then"),
            [],
            lambda: poptorch.ipu_print_tensor(x + 1, "else"),
            [],
        )

    recorded = record(model, torch.tensor(True), torch.zeros(1))
    assert capfd.readouterr().err == ""
    recorded(torch.tensor(False), torch.zeros(1))
    assert capfd.readouterr().err == "else: (1.000)\n"


@pytest.mark.long
def test_branches_nest_and_share_a_condition():
    def model(condition, inner, x, y):
        def then_body():
            return poptorch.cond(inner, lambda a: a + y, [x], lambda: x - y, [])[0]

        def else_body(inner):
            inner = torch.logical_not(inner)
            return poptorch.cond(inner, lambda b: x * b, [y], lambda: x * 2, [])[0]

        one = poptorch.cond(condition, then_body, [], else_body, [inner])[0]
        two = poptorch.cond(condition, then_body, [], else_body, [inner])[0]
        return one + two

    x, y = double(0.7), double(0.2)
    flags = [torch.tensor([True]), torch.tensor([False])]
    recorded = record(model, flags[0], flags[0], x, y)
    for outer in flags:
        for inner in flags:
            expected = (x + y if inner else x - y) if outer else (x * 2 if inner else x * y)
            torch.testing.assert_close(
                recorded(outer, inner, x, y), [2 * expected], rtol=1e-15, atol=0
            )


def test_a_branch_in_a_loop_is_decided_at_each_turn():
    def model(x):
        def body(a):
            return poptorch.cond((a < 10).all(), lambda b: b * 2, [a], lambda b: b - 100, [a])

        return poptorch.for_loop(6, body, [x])

    assert record(model, torch.ones(1))(torch.ones(1))[0].item() == -168.0


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (
            lambda b: (b, b),
            "then_body and else_body of poptorch.cond must return the same number of tensors, got "
            "1 and 2. Return a tensor unchanged where one of them has nothing to compute.",
        ),
        (
            lambda b: b[:1].int(),
            "then_body and else_body of poptorch.cond must return tensors of the same shape and "
            "dtype, got (2,) torch.float32 and (1,) torch.int32 at index 0. Convert or reshape "
            "one of them at the end of its body.",
        ),
        (
            lambda b: None,
            "else_body of poptorch.cond must return tensors, or a list or tuple of them, got "
            "NoneType. Return only what depends on its inputs as tensors.",
        ),
    ],
)
def test_both_branches_return_the_same_kind_of_tensors(other, text):
    with pytest.raises(poptorch.Error) as failure:
        record(
            lambda c, a: poptorch.cond(c, lambda b: b * 2, [a], other, [a]),
            torch.tensor(True),
            torch.ones(2),
        )
    assert failure.value.message == text


def test_a_condition_has_one_element():
    with pytest.raises(poptorch.Error) as failure:
        record(
            lambda c, a: poptorch.cond(c, lambda: a, [], lambda: a, []),
            torch.tensor([True, False]),
            torch.ones(2),
        )
    assert failure.value.message == (
        "poptorch.cond expects the condition to be a tensor of one element, got shape (2,). "
        "Reduce it with torch.all or torch.any."
    )


@pytest.mark.parametrize(
    ("given", "got"), [((1, []), "(Object is not list) Got int"), (([1], []), "at index 0")]
)
def test_a_branch_takes_lists_of_tensors(given, got):
    with pytest.raises(ValueError, match=r"poptorch\.cond expects then_inps") as failure:
        poptorch.cond(torch.tensor(True), lambda: 0, given[0], lambda: 0, given[1])
    assert got in str(failure.value)
