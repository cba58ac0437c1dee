"""Encode recorded programs as values of a file, and look them up in the executable cache."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Dict, List, Mapping

import torch
from torch import Tensor, fx

from ipufit.poptorch._cache import ExecutableCache
from ipufit.poptorch._codec import InvalidContent
from ipufit.poptorch._devices import uses_ipu_model
from ipufit.poptorch._graph_files import CALL_CPU
from ipufit.poptorch._logging import logger
from ipufit.poptorch._operators.control import (
    Body,
    TensorSpec,
    bodies_in,
    everywhere,
    register,
    renumber,
)
from ipufit.poptorch._recorded_program import Outputs, RecordedProgram
from ipufit.poptorch._tracing import Trace
from ipufit.poptorch.options import Options

__all__ = ["program_from_values", "program_to_values", "through_cache"]


def program_to_values(recorded: RecordedProgram) -> Dict[str, Any]:
    """Convert a recorded program to values that ``write_file`` takes."""
    bodies = bodies_in(recorded.graph)
    # Counted from 0, so that the same program is written alike by every process.
    numbers = {number: place for place, number in enumerate(bodies)}
    return {
        "graph": _numbered(recorded.graph, numbers),
        "bodies": [
            (
                numbers[number],
                _numbered(body.graph, numbers),
                [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in body.results],
            )
            for number, body in bodies.items()
        ],
        "structure": recorded.outputs.structure,
        "computed": recorded.outputs.computed,
        "constants": recorded.outputs.constants,
        "reached": list(recorded.with_gradient),
        "changed_inputs": list(recorded.changed_inputs),
        "changed_state": list(recorded.changed_state),
        "statistics": list(recorded.statistics),
        "random": recorded.random,
        "overlapped": recorded.overlapped,
        "counted": recorded.counted,
        "activations": dict(recorded.activations),
        "training": recorded.trace.training,
        "entered": recorded.trace.blocks.entered,
    }


def _numbered(graph: fx.GraphModule, numbers: Mapping[int, int]) -> fx.GraphModule:
    if not numbers:
        return graph
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    renumber(copied, numbers)
    return copied


def program_from_values(values: Mapping[str, Any]) -> RecordedProgram:
    """Rebuild the program of ``program_to_values``.

    Raises:
        InvalidContent: no program is written like this.
    """
    try:
        graph = values["graph"]
        if not isinstance(graph, fx.GraphModule):
            raise InvalidContent("it holds no program")
        trace = Trace(bool(values["training"]))
        trace.blocks.entered = [(name, ipu) for name, ipu in values["entered"]]
        trace.keep_alive.extend(_bodies(values["bodies"], graph))
        constants = list(values["constants"])
        computed = [bool(each) for each in values["computed"]]
        if [constant is None for constant in constants] != computed:
            raise InvalidContent("its outputs are either computed or constant")
        return RecordedProgram(
            graph,
            Outputs(values["structure"], computed, constants),
            tuple(values["reached"]),
            tuple(values["changed_inputs"]),
            tuple(values["changed_state"]),
            bool(values["random"]),
            bool(values["overlapped"]),
            trace,
            int(values["counted"]),
            {str(name): str(node) for name, node in values["activations"].items()},
            tuple(values.get("statistics", ())),
        )
    except InvalidContent:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as reason:
        raise InvalidContent(f"it holds no sound program: {reason!r}") from reason


def _bodies(entries: Any, graph: fx.GraphModule) -> List[Body]:
    """Register the bodies that a graph calls; each may call those before it."""
    bodies: List[Body] = []
    numbers: Dict[int, int] = {}
    for number, inner, results in entries:
        renumber(inner, numbers)
        body = Body(inner, [TensorSpec(tensor.shape, tensor.dtype) for tensor in results])
        register(body)
        bodies.append(body)
        numbers[number] = body.number
    renumber(graph, numbers)
    return bodies


def _calls_python(graph: fx.GraphModule) -> bool:
    schemas = (
        getattr(node.target, "_schema", None)
        for each in everywhere(graph)
        for node in each.graph.nodes
    )
    return any(schema is not None and schema.name == CALL_CPU for schema in schemas)


def through_cache(
    recorded: RecordedProgram, state: Mapping[str, Tensor], options: Options
) -> RecordedProgram:
    """Return the cached program in place of a recorded one, or add this one to the cache.

    Args:
        recorded: just recorded: its operators and constants are what it is known by.
        state: the device's tensors, whose shapes count.
        options: they name the folder, if caching is on; the IPU Model has no cache.

    Raises:
        Error: the folder can't be written to.
    """
    settings = options._Popart.options
    folder = settings.get("cachePath", "")
    several = options.Distributed.numProcesses > 1
    if not settings.get("enableEngineCaching") or not folder or uses_ipu_model(options):
        if several:
            logger.info("Each process compiles for itself, without a cache")
        return recorded
    if _calls_python(recorded.graph):
        logger.info("Compiled without the cache: the model calls poptorch.CPU, which no file holds")
        return recorded
    cache = ExecutableCache(folder)
    values = program_to_values(recorded)
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    key = cache.key({**values, "state": shapes})
    with cache.turn(key) if several else contextlib.nullcontext():
        cached = cache.find(key)
        if cached is not None:
            return program_from_values(cached)
        cache.keep(key, values)
    return recorded
