"""The layers of a module: parameters, sharing, and output shapes found out without values."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from ipufit.core.batch import MicroBatch
from ipufit.partition.partition import is_called
from ipufit.tracing.fingerprint import StepModule
from ipufit.tracing.interpreter import Listener, OperatorCall, watch_operators
from ipufit.utils import tree
from ipufit.utils.interrupts import defer_signals
from ipufit.utils.random_streams import isolated
from ipufit.utils.state import call_with, device_of, eval_mode, fork_rng

_READS_A_VALUE = "it reads the value of a tensor"


@dataclasses.dataclass
class Layer:
    """A module of the tree, with what the summary says of it.

    Attributes:
        name: as in ``state_dict``; empty for the model itself.
        depth: 0 for the model itself.
        kind: its class.
        parameters: number of values in the parameters of its own that no layer before it has.
        trainable: how many of them require gradients.
        notes: what a reader should know, such as sharing.
        module: itself.
    """

    name: str
    depth: int
    kind: str
    parameters: int
    trainable: int
    notes: List[str]
    module: nn.Module


def layers_of(module: nn.Module) -> List[Layer]:
    """All layers, each parameter counted at its first owner."""
    # A module may leave parts out that no program has, such as metrics.
    parts = {id(part) for _, part in module.named_modules()}
    return list(_walk(module, "", 0, {}, {}, parts))


def _walk(
    module: nn.Module,
    name: str,
    depth: int,
    owners: Dict[int, str],
    names: Dict[int, str],
    parts: Set[int],
) -> Iterator[Layer]:
    kind = type(module).__name__
    if id(module) in names:
        note = f"the same module as {names[id(module)] or 'the model'}"
        yield Layer(name, depth, kind, 0, 0, [note], module)
        return
    names[id(module)] = name
    notes, counts, prefix = [], [0, 0], f"{name}." if name else ""
    parameters = {key: p for key, p in module._parameters.items() if p is not None}
    for key, parameter in parameters.items():
        if id(parameter) in owners:
            notes.append(f"{key} is shared with {owners[id(parameter)]}")
            continue
        owners[id(parameter)] = f"{prefix}{key}"
        counts[0] += parameter.numel()
        counts[1] += parameter.numel() if parameter.requires_grad else 0
    yield Layer(name, depth, kind, counts[0], counts[1], notes, module)
    for key, child in module._modules.items():
        if child is not None and id(child) in parts:
            yield from _walk(child, f"{prefix}{key}", depth + 1, owners, names, parts)


@defer_signals(interrupts=False, handlers=True)
def output_shapes(
    module: nn.Module, batch: MicroBatch
) -> Tuple[Dict[nn.Module, List[str]], Set[str], Optional[str]]:
    """Call the module in eval mode on tensors without values, and write down what comes out.

    No value is computed, no buffer changes and no random number is drawn.

    Args:
        module: whose layers are looked at.
        batch: a micro-batch; of its tensors only shape and dtype matter.

    Returns:
        The outputs' shapes of every layer that was called, one per call; the names of the
        parameters that were used; and why the call failed, or None. The layers before a failure
        have shapes.
    """
    shapes: Dict[nn.Module, List[str]] = {}
    used: Set[str] = set()

    def note(part: nn.Module, _: object, out: object) -> None:
        shapes.setdefault(part, []).append(_form(out))

    try:
        with contextlib.ExitStack() as hooks:
            for part in module.modules():
                hooks.enter_context(part.register_forward_hook(note))
            _call_without_values(module, batch, used)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return shapes, used, _READS_A_VALUE
    except Exception as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        return shapes, used, f"{type(error).__name__}: {reason}"
    return shapes, used, None


def can_run(module: nn.Module, batch: MicroBatch) -> bool:
    """Say whether the module runs, as far as tensors without values show it: see above."""
    return output_shapes(module, batch)[2] in (None, _READS_A_VALUE)


def outputs_of(module: nn.Module, batch: MicroBatch) -> tree.Tree:
    """Return the module's outputs in eval mode, as tensors without values; None where it fails.

    No value is computed, no buffer changes and no random number is drawn.

    Args:
        module: is called once.
        batch: a micro-batch; of its tensors only shape and dtype matter.
    """
    with fork_rng():
        try:
            return _call_without_values(module, batch, set())
        except Exception:
            return None


class _ParameterReads(Listener):
    """Notes which parameters an operator takes, whichever layer's forward that is in."""

    def __init__(self, names: Dict[int, str], used: Set[str]) -> None:
        self._names = names
        self._used = used

    def before(self, call: OperatorCall) -> None:
        """Note the parameters among the arguments."""
        self._used.update(self._names[id(t)] for t in call.inputs if id(t) in self._names)


def _call_without_values(module: nn.Module, batch: MicroBatch, used: Set[str]) -> tree.Tree:
    device, attributes = device_of(module), StepModule(module).preserve_attributes()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state: Dict[str, Tensor] = {
        name: mode.from_tensor(tensor)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    reads = _ParameterReads({id(tensor): name for name, tensor in state.items()}, used)
    # With gradients: torch's fused kernels for inference would skip layers.
    gradients = torch.enable_grad()
    with eval_mode(module), isolated(device), attributes, mode, watch_operators(reads), gradients:
        leaves = [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in batch.leaves]
        args, kwargs, _, _ = dataclasses.replace(batch, leaves=tuple(leaves)).unpack()
        return call_with(module, state, args, kwargs)


def _form(output: tree.Tree) -> str:
    """The shapes of nested outputs: ``(4, 10)``, ``[(4, 2), (4,)]``, ``{a: (4, 2)}``."""
    if isinstance(output, Tensor):
        return str(tuple(output.shape))
    leaves, structure = tree.flatten(output)
    if structure.kind is None:
        return type(output).__name__
    return _nested(structure, iter(leaves))


def _nested(structure: tree.Structure, leaves: Iterator[object]) -> str:
    if structure.kind is None:
        return _form(next(leaves))
    if structure.kind is type(None):
        return "None"
    parts = [_nested(child, leaves) for child in structure.children]
    if all(isinstance(key, int) for key in structure.keys):
        return f"[{', '.join(parts)}]"
    return "{" + ", ".join(f"{key}: {part}" for key, part in zip(structure.keys, parts)) + "}"


def note_calls(layers: Sequence[Layer], shapes: Dict[nn.Module, List[str]], used: Set[str]) -> None:
    """Add to the notes which layers were called several times, and which not at all."""
    listed: Set[nn.Module] = set()
    for layer in layers:
        if layer.module in listed:
            continue
        listed.add(layer.module)
        calls = len(shapes.get(layer.module, ()))
        if calls > 1:
            layer.notes.append(f"called {calls} times")
        if calls or not is_called(layer.module):
            continue
        if not any(part in shapes for part in layer.module.modules()):
            prefix = f"{layer.name}." if layer.name else ""
            direct = any(name.startswith(prefix) for name in used)
            layer.notes.append("used without a call" if direct else "not called")
