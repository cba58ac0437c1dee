"""Listeners hear of the same calls from a graph, from operators of Python, and from functions."""

import pytest
import torch

from ipufit.tracing.capture import capture
from ipufit.tracing.interpreter import (
    InstrumentedInterpreter,
    Listener,
    watch_functions,
    watch_operators,
)


class Log(Listener):
    """Writes down all that it hears."""

    def __init__(self, name="", log=None):
        self.name = name
        self.log = [] if log is None else log
        self.values = {}
        self.released = {}

    def before(self, call):
        self.log.append(f"{self.name}before {call.operator}")

    def after(self, call, result):
        self.log.append(f"{self.name}after {call.operator}")

    def on_value(self, node, value, released):
        self.values[node.name] = value
        self.released[node.name] = list(released)


def step(x, w):
    torch.exp(x)
    return [(x @ w).relu().sum()]


X, W = torch.randn(3, 4), torch.randn(4, 2)


def test_a_graph_tells_of_every_call_and_computes_what_it_did():
    log = Log()
    results = InstrumentedInterpreter(capture(step, [X, W]), [log]).run(X, W)
    assert torch.equal(results[0], step(X, W)[0])
    called = [line for line in log.log if line.startswith("before")]
    eager = Log()
    with watch_operators(eager):
        step(X, W)
    assert called == [line for line in eager.log if line.startswith("before")]
    assert "before aten.mm.default" in called


def test_the_last_listener_is_the_closest_to_an_operator():
    """A timer, say, must not measure what other listeners do."""
    lines = []
    with watch_operators(Log("outer ", lines), Log("inner ", lines)):
        torch.ones(2).exp()
    assert lines[-4:] == [
        "outer before aten.exp.default",
        "inner before aten.exp.default",
        "inner after aten.exp.default",
        "outer after aten.exp.default",
    ]


def test_values_come_with_those_that_are_released_behind_them():
    log = Log()
    graph = capture(step, [X, W])
    InstrumentedInterpreter(graph, [log]).run(X, W)
    (relu,) = (node for node in graph.graph.nodes if "relu" in node.name)
    assert torch.equal(log.values[relu.name], (X @ W).relu())
    (product,) = log.released[relu.name]
    assert torch.equal(product, X @ W)
    for node in graph.graph.nodes:
        if node.op == "call_function" and not node.users:
            assert log.values[node.name] is None


def test_what_a_listener_raises_comes_from_the_line_that_called():
    class Stop(Listener):
        def before(self, call):
            if call.operator is torch.ops.aten.mm.default:
                raise ValueError(f"{len(call.inputs)} tensors")

    with pytest.raises(ValueError, match="2 tensors"), watch_operators(Stop()):
        step(X, W)


def test_functions_are_heard_of_above_autograd():
    log = Log()
    with watch_functions(log):
        result = torch.nn.functional.linear(X, W.t().requires_grad_())
    assert result.grad_fn is not None
    assert any("linear" in line for line in log.log)
