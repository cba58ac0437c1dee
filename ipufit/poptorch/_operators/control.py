"""Loops and branches that are decided at run time; each body is recorded once."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import torch
from torch import Tensor

from ipufit.poptorch._dtype_cast import DEVICE_DTYPES
from ipufit.poptorch._errors import error
from ipufit.poptorch._operators.bodies import BRANCH, REPEAT, Body, record
from ipufit.poptorch._tracing import Trace, tracing

__all__ = ["cond", "for_loop"]


def _on_device(dtype: torch.dtype) -> torch.dtype:
    return DEVICE_DTYPES.get(dtype, dtype)


def _inference_only(trace: Trace, name: str) -> None:
    if trace.training:
        raise error(
            f"poptorch.{name}() is only supported in inference, but this is a training model. "
            "Wrap the model with poptorch.inferenceModel, or write the steps one after another."
        )


def _listed(value: object) -> List[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def for_loop(count: int, body: Callable[..., Any], inputs: List[Tensor]) -> List[Tensor]:
    """Run a body several times, each time on what it returned the time before.

    The body is recorded once, whatever the count is. It works on copies, so that it changes
    nothing outside of itself; other tensors of the model may be used in it.

    Args:
        count: number of turns, fixed when the model is compiled.
        body: takes as many tensors as there are inputs and returns as many, of the same shapes
            and dtypes.
        inputs: the tensors of the first turn, a list.
    Returns:
        What the last turn returned.
    Raises:
        ValueError: the inputs are no list of tensors.
        Error: a training model, a count that is no number, or a body that returns something else
            than it takes.
    """
    if not isinstance(inputs, list):
        raise ValueError(
            "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. "
            f"(Object is not list) Got {type(inputs).__name__}: write [x] for one tensor."
        )
    for position, tensor in enumerate(inputs):
        if not isinstance(tensor, Tensor):
            raise ValueError(
                "poptorch.for_loop expects input tensors (inputs) to be a list of tensors. "
                f"(Object contained in list at index {position} is not torch.tensor) "
                f"Got {type(tensor).__name__}: write torch.tensor(...) around a number."
            )
    if isinstance(count, Tensor) or not isinstance(count, int) or count < 0:
        raise error(
            f"poptorch.for_loop expects count to be an int of at least 0 that is known when the "
            f"model is compiled, got {count!r}. Pass a Python int."
        )
    trace = tracing()
    if trace is None:
        state = [tensor.clone() for tensor in inputs]
        for _ in range(count):
            state = _listed(body(*[tensor.clone() for tensor in state]))
        return state
    _inference_only(trace, "for_loop")
    recorded, captured = record(
        _checked_loop_body(body, inputs), inputs, "the body of poptorch.for_loop"
    )
    with torch.no_grad():
        return list(REPEAT(inputs, captured, count, recorded.number))


def _checked_loop_body(body: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Wrap the body of a loop to check and convert its results, so that they can be its inputs."""

    def checked(*arguments: Tensor) -> List[Any]:
        results = _listed(body(*arguments))
        if len(results) != len(inputs):
            raise error(
                f"the body of poptorch.for_loop must return as many tensors as it takes, expected "
                f"{len(inputs)}, got {len(results)}. Return every input, changed or not."
            )
        return [_like(r, i, n) for n, (r, i) in enumerate(zip(results, inputs))]

    return checked


def _like(result: object, expected: Tensor, position: int) -> Any:
    if not isinstance(result, Tensor):
        return result
    same = _on_device(result.dtype) == _on_device(expected.dtype) and result.shape == expected.shape
    if not same:
        raise error(
            f"the body of poptorch.for_loop must return tensors like its inputs: expected "
            f"{tuple(expected.shape)} {_on_device(expected.dtype)} at index {position}, got "
            f"{tuple(result.shape)} {_on_device(result.dtype)}. Convert or reshape it where the "
            "body ends."
        )
    return result.to(expected.dtype)


def cond(
    condition: Tensor,
    then_body: Callable[..., Any],
    then_inps: List[Tensor],
    else_body: Callable[..., Any],
    else_inps: List[Tensor],
) -> List[Tensor]:
    """Run one of two bodies; which one is decided by a tensor while the model runs.

    Both bodies are recorded; only the one that is taken is computed. They work on copies, and may
    use other tensors of the model beside their inputs.

    Args:
        condition: one element.
        then_body: takes tensors and returns one, or a list or tuple of them.
        then_inps: its inputs, a list, which may be empty.
        else_body: as ``then_body``; returns the same number of tensors, of the same shapes and
            dtypes.
        else_inps: its inputs.
    Returns:
        A list of the tensors that the body returned.
    Raises:
        ValueError: inputs that are no list of tensors.
        Error: a training model, a condition of several elements, or bodies that return
            different things.
    """
    for inputs in (then_inps, else_inps):
        if not isinstance(inputs, list):
            raise ValueError(
                "poptorch.cond expects then_inps and else_inps tensors to be a list of tensors. "
                f"(Object is not list) Got {type(inputs).__name__}: write [x] for one tensor, [] "
                "for none."
            )
        for position, tensor in enumerate(inputs):
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    "poptorch.cond expects then_inps and else_inps tensors to be a list of "
                    f"tensors. (Object contained in list at index {position} is not "
                    f"torch.tensor) Got {type(tensor).__name__}: write torch.tensor(...) around "
                    "a number."
                )
    trace = tracing()
    if trace is None:
        if condition:
            return _listed(then_body(*[tensor.clone() for tensor in then_inps]))
        return _listed(else_body(*[tensor.clone() for tensor in else_inps]))
    _inference_only(trace, "cond")
    if not isinstance(condition, Tensor) or condition.numel() != 1:
        got = f"shape {tuple(condition.shape)}" if isinstance(condition, Tensor) else condition
        raise error(
            f"poptorch.cond expects the condition to be a tensor of one element, got {got}. "
            "Reduce it with torch.all or torch.any."
        )
    then_recorded, then_captured = record(then_body, then_inps, "then_body of poptorch.cond")
    else_recorded, else_captured = record(
        _checked_else_body(else_body, then_recorded), else_inps, "else_body of poptorch.cond"
    )
    with torch.no_grad():
        return list(
            BRANCH(
                condition,
                then_inps,
                then_captured,
                else_inps,
                else_captured,
                then_recorded.number,
                else_recorded.number,
            )
        )


def _checked_else_body(body: Callable[..., Any], then_recorded: Body) -> Callable[..., Any]:
    """Wrap a branch's second body to check its results and convert them to the first's dtypes."""

    def checked(*arguments: Tensor) -> List[Any]:
        results = _listed(body(*arguments))
        if len(results) != len(then_recorded.results):
            raise error(
                "then_body and else_body of poptorch.cond must return the same number of "
                f"tensors, got {len(then_recorded.results)} and {len(results)}. Return a tensor "
                "unchanged where one of them has nothing to compute."
            )
        for position, (result, expected) in enumerate(zip(results, then_recorded.results)):
            if not isinstance(result, Tensor):
                continue
            same = _on_device(result.dtype) == _on_device(expected.dtype)
            if not same or result.shape != expected.shape:
                raise error(
                    "then_body and else_body of poptorch.cond must return tensors of the same "
                    f"shape and dtype, got {tuple(expected.shape)} {_on_device(expected.dtype)} "
                    f"and {tuple(result.shape)} {_on_device(result.dtype)} at index {position}. "
                    "Convert or reshape one of them at the end of its body."
                )
        return [
            r.to(e.dtype) if isinstance(r, Tensor) else r
            for r, e in zip(results, then_recorded.results)
        ]

    return checked
