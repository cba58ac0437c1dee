"""Any other torch optimizer, through its own ``step``, recorded."""

from __future__ import annotations

import collections
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, fx, nn

from ipufit.core.compile_arguments import Backend
from ipufit.core.precision import computes_in_half, refuse_missing_half, try_out
from ipufit.engines.embedded.clipping import GradientTransform
from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.engines.embedded.passes.torch_compile import compile_update, reads_values
from ipufit.errors import CaptureError, OptimizerError
from ipufit.optim.rules import list_rule_names
from ipufit.tracing.capture import capture
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage, group_alike, storage_id

__all__ = ["TracedOptimizer"]

# Block, slot in the block, name in the optimizer's state.
_Key = Tuple[int, int, str]


# What an optimizer's step may raise on tensors without values.
_CAN_FAIL = (
    CaptureError,
    RuntimeError,
    TypeError,
    NotImplementedError,
    AttributeError,
    KeyError,
    AssertionError,
)


def _settings(optimizer: torch.optim.Optimizer) -> List[Dict[str, str]]:
    """The hyper-parameters of every group."""
    return [
        {name: repr(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _outside_state(optimizer: torch.optim.Optimizer) -> object:
    """List what an optimizer holds besides parameters and their state; no step may change it."""
    attributes = {
        name: v for name, v in vars(optimizer).items() if name not in ("state", "param_groups")
    }
    plain = {
        k: repr(v) if isinstance(v, (int, float, str, bool)) else id(v)
        for k, v in attributes.items()
    }
    return _settings(optimizer), plain


def _captured(step: Callable[..., List[Tensor]], arguments: Sequence[Tensor]) -> fx.GraphModule:
    graph = capture(step, arguments, guard=False)
    if arguments[0].device.type == "cpu" and computes_in_half(arguments):
        try_out(graph, arguments)
    return graph


def _copied(state: Mapping[_Key, object]) -> Dict[_Key, object]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _tensor_keys(state: Mapping[_Key, object]) -> List[_Key]:
    return [key for key, value in state.items() if isinstance(value, Tensor)]


class TracedOptimizer:
    """Any other torch optimizer, through its own ``step``, recorded.

    The first update, which makes the state that is missing, and the later ones are two graphs.
    Hyper-parameters are constants of both.

    Attributes:
        memory: where the state is between two updates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        finish: GradientTransform,
        memory: StateMemory,
        compiler: Optional[Backend] = None,
    ) -> None:
        self._optimizer = optimizer
        self._compiler = compiler
        self._finish = finish
        self.memory = memory
        self._storage = FlatStorage([])
        self._state: Dict[_Key, Any] = {}
        # What of it the memory keeps; counters stay where torch has them.
        self._kept: Set[_Key] = set()
        self._graphs: Dict[bool, fx.GraphModule] = {}
        # What runs them.
        self._runs: Dict[bool, Callable[..., List[Tensor]]] = {}
        self._keys: List[_Key] = []
        self._known_keys: List[_Key] = []
        self._whole: Set[_Key] = set()
        self._growth: Dict[_Key, object] = {}
        self._numbers: Dict[_Key, object] = {}
        self._eager = False
        self._settings = _settings(optimizer)

    def layout(self, named: Sequence[Tuple[str, nn.Parameter]]) -> List[FlatBlock]:
        """Parameters of one group, dtype and device stand together."""
        return group_alike(self._optimizer, named, lambda parameter: 0)

    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over the optimizer's state and record the update."""
        self._storage = storage
        self._eager = run_eagerly
        self._state = {}
        for b, block in enumerate(storage.blocks):
            for s, slot in enumerate(block.slots):
                for name, value in self._optimizer.state.get(slot.parameter, {}).items():
                    copied = value.clone() if isinstance(value, Tensor) else value
                    self._keep((b, s, name), copied)
        try:
            if run_eagerly:
                # Once on copies: what can't be followed must show before any weight changes.
                flats = [flat.clone() for flat in storage.flats]
                gradients = [torch.zeros_like(like) for like in self._finish.examples(flats)]
                with refuse_missing_half():
                    self._step(flats, gradients, _copied(self._fetched()))
            elif {key[:2] for key in self._state} != set(self._places()):
                # A parameter has no state yet: all at first, later one unfrozen since.
                self._record_first()
            else:
                self._record_later()
        except _CAN_FAIL as error:
            raise self._refusal(error) from error
        self._runs.update(self._graphs)
        for is_first, graph in self._graphs.items():
            if self._compiler is not None and not reads_values(graph):
                self._runs[is_first] = compile_update(self._compiler, graph, storage.flats)

    def _refusal(self, error: Exception) -> OptimizerError:
        reads_value = isinstance(error, CaptureError)
        reason = (
            "it needs a tensor's value" if reads_value else (str(error) or type(error).__name__)
        )
        return OptimizerError(
            f"the optimizer's step must be recordable as one program, and that of "
            f"{type(self._optimizer).__name__} is not on this torch: {reason.splitlines()[0]}. Use "
            f"{list_rule_names()}, which ipufit has as programs of its own, or "
            "compile(..., run_eagerly=True)."
        )

    def refresh(self, rows: Sequence[Sequence[Mapping[str, object]]]) -> None:
        """Hyper-parameters are constants of the graphs; refuse a change instead of ignoring it."""
        if _settings(self._optimizer) != self._settings:
            raise OptimizerError(
                f"the hyper-parameters of {type(self._optimizer).__name__} are constants of the "
                "program, and one of them changed during fit. Change them between two calls of "
                f"fit, or use {list_rule_names()}, where they may change."
            )

    def _twin(
        self, flats: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> Tuple[torch.optim.Optimizer, List[Tensor]]:
        """The optimizer over views of flat tensors, without state."""
        # Not copy.copy: an optimizer's own pickling leaves attributes of subclasses out. A
        # scheduler may have put a wrapper of step on the object.
        twin = object.__new__(type(self._optimizer))
        vars(twin).update(vars(self._optimizer))
        vars(twin).pop("step", None)
        twin.state = collections.defaultdict(dict)
        twin.param_groups = [dict(group, params=[]) for group in self._optimizer.param_groups]
        for group in twin.param_groups:
            # One tensor after another, without a fused kernel: these can be recorded.
            group.update({key: False for key in ("foreach", "fused") if key in group})
        views = []
        for block, flat, gradient in zip(self._storage.blocks, flats, gradients):
            for slot in block.slots:
                view = slot.view(flat)
                view.grad = slot.view(gradient)
                twin.param_groups[block.group]["params"].append(view)
                views.append(view)
        return twin, views

    def _places(self) -> List[Tuple[int, int]]:
        return [
            (b, s) for b, block in enumerate(self._storage.blocks) for s in range(len(block.slots))
        ]

    def _step(
        self, flats: Sequence[Tensor], gradients: Sequence[Tensor], state: Mapping[Any, object]
    ) -> Dict[_Key, object]:
        finished = self._finish(gradients, self._storage.blocks, flats)
        twin, views = self._twin(flats, finished)
        by_place = dict(zip(self._places(), views))
        for (b, s, name), value in state.items():
            twin.state[by_place[b, s]][name] = value
        before = _outside_state(twin)
        with torch.no_grad():
            twin.step()
        if _outside_state(twin) != before or not set(twin.state).issubset(views):
            raise RuntimeError("it keeps what changes outside of its parameters' state")
        flat_of = [flats[b] for b, _ in self._places()]
        if any(storage_id(view) != storage_id(flat) for view, flat in zip(views, flat_of)):
            raise RuntimeError("it replaces the parameters' data instead of changing it in place")
        return {
            (b, s, name): value
            for (b, s), view in zip(self._places(), views)
            for name, value in twin.state[view].items()
        }

    def _record_first(self) -> None:
        self._known_keys = _tensor_keys(self._state)
        self._graphs[True], new_state = self._trace(self._known_keys, self._state, is_first=True)
        old_state = self._state
        # The state that the later graph starts from: same shapes, values of no meaning.
        tensors = {key: value for key, value in new_state.items() if isinstance(value, Tensor)}
        numbers = {key: value for key, value in new_state.items() if key not in tensors}
        self._state = {
            **numbers,
            **{
                key: torch.zeros(value.shape, dtype=value.dtype, device=value.device)
                for key, value in tensors.items()
            },
        }
        self._record_later()
        self._numbers = numbers
        self._whole = set(self._state)
        self._state = old_state

    def _record_later(self) -> None:
        self._keys = _tensor_keys(self._state)
        numbers = {k: v for k, v in self._state.items() if not isinstance(v, Tensor)}
        graph, after = self._trace(self._keys, numbers)
        self._growth = {k: after[k] - v for k, v in numbers.items() if after[k] != v}
        if self._growth:
            # A counter of Python's, such as Rprop's "step" on torch 2.0.1: harmless if nothing
            # reads it.
            again, _ = self._trace(self._keys, {key: after[key] for key in numbers})
            if again.code != graph.code:
                raise RuntimeError("it computes with Python numbers that change at every step")
        self._graphs[False] = graph

    def _trace(
        self, keys: Sequence[_Key], others: Mapping[_Key, object], is_first: bool = False
    ) -> Tuple[fx.GraphModule, Dict[_Key, Any]]:
        """The graph of a step, and the state that it makes.

        Args:
            keys: of the state's tensors, which the graph takes and returns.
            others: the state beside them, for good.
            is_first: whether the step may add to the state; the graph returns all tensors of it.
        """
        count = len(self._storage.flats)
        after: Dict[_Key, Any] = {}

        def step(*tensors: Tensor) -> List[Tensor]:
            state = {**others, **dict(zip(keys, tensors[2 * count :]))}
            after.clear()
            after.update(self._step(tensors[:count], tensors[count : 2 * count], state))
            if not is_first and set(after) != set(self._state):
                raise RuntimeError("its state changes its form after the first step")
            return [after[key] for key in (_tensor_keys(after) if is_first else keys)]

        flats, state = self._storage.flats, self._fetched()
        arguments = [*flats, *self._finish.examples(flats), *(state[key] for key in keys)]
        return _captured(step, arguments), after

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update, from gradients as they were accumulated."""
        fetched = self._fetched()
        if self._eager:
            new_state = self._step(self._storage.flats, gradients, fetched)
            self._state = {key: value for key, value in self._state.items() if key in new_state}
            for key, value in new_state.items():
                self._keep(key, value)
            return
        first = True in self._graphs and set(self._state) != self._whole
        state = [fetched[key] for key in (self._known_keys if first else self._keys)]
        tensors = self._runs[first](*self._storage.flats, *gradients, *state)
        if first:
            self._state = dict(self._numbers)
        else:
            self._state.update((key, self._state[key] + by) for key, by in self._growth.items())
        for key, tensor in zip(self._keys, tensors):
            self._keep(key, tensor)

    def _keep(self, key: _Key, value: object) -> None:
        """Put a value into the state, where the memory wants it."""
        flat = self._storage.flats[key[0]]
        if not isinstance(value, Tensor) or value.dim() == 0 or value.device != flat.device:
            self._kept.discard(key)
            self._state[key] = value
        elif key in self._kept and key in self._state:
            self._state[key] = self.memory.renew(self._state[key], value)
        else:
            self._state[key] = self.memory.keep(value)
            self._kept.add(key)

    def _fetched(self) -> Dict[_Key, Any]:
        """The state as a step needs it."""
        return {
            key: self.memory.fetch([value])[0] if key in self._kept else value
            for key, value in self._state.items()
        }

    def skip(self) -> None:
        """Leave a weight update out: nothing is planned ahead here."""

    def snapshot(self) -> Dict[_Key, Any]:
        """A copy of the state."""
        return _copied(self._state)

    def restore(self, snapshot: Any) -> None:
        """Go back to a copy of the state."""
        # The graphs change it in place, and a snapshot may be needed again.
        self._state = _copied(snapshot)

    def export(self) -> None:
        """Write the state into the torch optimizer."""
        for (b, s, name), value in self._state.items():
            parameter = self._storage.blocks[b].slots[s].parameter
            torch_state = self._optimizer.state[parameter]
            if (b, s, name) in self._kept:
                torch_state[name] = self.memory.for_torch(value)
            else:
                torch_state[name] = value.clone() if isinstance(value, Tensor) else value

    def state_tensors(self) -> List[Tensor]:
        """The tensors of the state, where it is between two updates."""
        return [value for value in self._state.values() if isinstance(value, Tensor)]

    def release(self) -> None:
        """Let go of the state, which no update needs any more; safe twice."""
        self._storage, self._state, self._kept = FlatStorage([]), {}, set()

    def recorded(self) -> Optional[fx.GraphModule]:
        """The graph of later updates; None where there is none."""
        return self._graphs.get(False)

    def aside(self, times: int) -> Optional[Callable[[Sequence[Tensor]], None]]:
        """Nothing: torch's own step is not tried on copies."""
        return None
