"""The step of a torch optimizer as graphs over flat tensors, whose inputs are what changes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.precision import computes_in_half, try_out
from ipufit.engines.embedded.gradient_transform import GradientTransform
from ipufit.errors import CaptureError, first_line
from ipufit.optim.several import settings_of
from ipufit.tracing.capture import capture
from ipufit.tracing.flat_storage import FlatStorage, Slot, storage_id
from ipufit.tracing.host_numbers import HostNumbers, HostProgram, HostWriteError, is_host_number
from ipufit.utils.state import ValueSnapshot

# Of a parameter's state: its place among all parameters, and the name.
Key = Tuple[int, str]
# Of a group's setting: the index of the group, the name, and the place in it where it is a tuple.
_Setting = Tuple[int, str, Optional[int]]

# What an optimizer's step may raise on tensors without values.
_CAN_FAIL = (
    CaptureError,
    RuntimeError,
    TypeError,
    NotImplementedError,
    AttributeError,
    KeyError,
    ValueError,
    ArithmeticError,
    AssertionError,
)
# Recordings of one optimizer: each decision that Python makes by a number asks for one more.
_MOST = 16
_LEAKS = "it computes with Python numbers in ways that can't be recorded"
# Relative changes of a number, and changes of a count, under which a recording stays the same;
# what is done every so many updates is done after 60 more, in most cases.
_SHIFTS = ((2.0**-20, 1), (-(2.0**-20), -1), (2.0**-20, 60))


class UnrecordableError(Exception):
    """A step can't be recorded; its text is the reason, as the end of a sentence."""


def setting_texts(group: Mapping[str, object]) -> Dict[str, str]:
    """The settings of a group, as texts that differ when they do."""
    return {name: repr(value) for name, value in settings_of(group).items()}


@dataclasses.dataclass(frozen=True)
class _Recording:
    """One way through an optimizer's step.

    Attributes:
        graph: takes weights, gradients, tensors of the state and numbers; returns tensors of the
            state.
        tensors: the state that the graph takes.
        settings, numbers: the settings and the state that the program takes.
        program: works out the numbers.
        new_tensors, new_numbers: the state that graph and program return.
        constants: state that is the same after every update.
        keys: all state afterwards, in the order in which the step makes it.
        form: of the state afterwards.
    """

    graph: fx.GraphModule
    tensors: Sequence[Key]
    settings: Sequence[_Setting]
    numbers: Sequence[Key]
    program: HostProgram
    new_tensors: Sequence[Key]
    new_numbers: Sequence[Key]
    constants: Mapping[Key, object]
    keys: Sequence[Key]
    form: object


@dataclasses.dataclass
class _Inputs:
    """Inputs of a recording.

    Attributes:
        settings, numbers, tensors: the settings, numbers and tensors of the state that it takes.
        fixed: names of the numbers for whose present values it holds.
        traced_tensors: which of the tensors of one number that the step makes are the graph's.
    """

    settings: List[_Setting]
    numbers: List[Key]
    tensors: List[Key]
    fixed: Set[str] = dataclasses.field(default_factory=set)
    traced_tensors: Set[int] = dataclasses.field(default_factory=set)

    def names(self) -> List[str]:
        """Names of the settings and numbers."""
        return [*(name for _, name, _ in self.settings), *(name for _, name in self.numbers)]


class StepRecorder:
    """Records an optimizer's step, and runs what was recorded on the state that torch has.

    Args:
        optimizer: torch's.
        finish: makes of an accumulated gradient what the optimizer gets.
        first_group: index of its first parameter group, in blocks.

    Attributes:
        slots: block and place of every parameter.
        changing: names of settings that are inputs of a recording; those of other names are part of
            what it is for.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, finish: GradientTransform, first_group: int
    ) -> None:
        self._optimizer = optimizer
        self._finish = finish
        self._first_group = first_group
        self._storage = FlatStorage([])
        self.slots: List[Tuple[int, Slot]] = []
        self._views: List[Tensor] = []
        self.changing = {"lr"}
        # Numbers in host memory that graphs work on.
        self._traced_keys: Set[Key] = set()
        self._recordings: Dict[object, List[_Recording]] = {}
        self._form: object = None

    def bind(self, storage: FlatStorage) -> None:
        """Take over parameters."""
        self._storage = storage
        self.slots = [(b, slot) for b, block in enumerate(storage.blocks) for slot in block.slots]
        self._views = [slot.view(storage.flats[b]) for b, slot in self.slots]

    def look(self) -> None:
        """See which form the state has now."""
        self._form = frozenset(
            (key, self._form_of(key, value)) for key, value in self.state_items()
        )

    def purpose(self) -> object:
        """Return all that recordings depend on besides their inputs, under the present settings."""
        return tuple(
            (index, name, type(value) if self._is_input(name, value) else repr(value))
            for index, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        )

    def state_items(self) -> Iterator[Tuple[Key, Any]]:
        """The state of all parameters."""
        state = self._optimizer.state
        for place, (_, slot) in enumerate(self.slots):
            if slot.parameter in state:
                for name, value in state[slot.parameter].items():
                    yield (place, name), value

    def read(self, keys: Sequence[Key]) -> List[Any]:
        """Values of the state."""
        state = self._optimizer.state
        return [state[self.slots[place][1].parameter][name] for place, name in keys]

    def write(self, items: Iterable[Tuple[Key, object]]) -> None:
        """Put values into the state."""
        state = self._optimizer.state
        for (place, name), value in items:
            state[self.slots[place][1].parameter][name] = value

    def run(self, purpose: object, gradients: Sequence[Tensor]) -> None:
        """Update as recorded, now if not before.

        Raises:
            UnrecordableError: that can't be; nothing has changed.
        """
        recordings = self._recordings.setdefault((purpose, self._form, self._storage.form), [])
        if any(self._replay(recording, gradients) for recording in recordings):
            return
        if not self._replay(self.record(purpose), gradients):
            raise UnrecordableError(_LEAKS)

    def _replay(self, recording: _Recording, gradients: Sequence[Tensor]) -> bool:
        """Update as recorded; False, and nothing happens, where Python would decide otherwise."""
        inputs = [*self._settings_of(recording.settings), *self.read(recording.numbers)]
        results = recording.program(inputs)
        if results is None:
            return False
        numbers, new_numbers = results
        state = self.read(recording.tensors)
        tensors = recording.graph(*self._views, *gradients, *state, *numbers)
        values = {
            **recording.constants,
            **dict(zip(recording.new_tensors, tensors)),
            **dict(zip(recording.new_numbers, new_numbers)),
        }
        self.write((key, values[key]) for key in recording.keys)
        self._form = recording.form
        return True

    def latest(self) -> Optional[fx.GraphModule]:
        """The graph that was recorded last; None before there is one."""
        recordings = [each for several in self._recordings.values() for each in several]
        return recordings[-1].graph if recordings else None

    def _is_input(self, name: str, value: object) -> bool:
        """Tell whether a setting is an input of recordings."""
        # By a zero most optimizers decide whether something is computed at all.
        parts = value if type(value) is tuple else (value,)
        return name in self.changing and all(
            isinstance(part, (float, Tensor)) and is_host_number(part) and bool(part)
            for part in parts
        )

    def _form_of(self, key: Key, value: object) -> object:
        if isinstance(value, Tensor):
            return value.shape, value.dtype, key in self._traced_keys
        if is_host_number(value):
            return float if isinstance(value, float) else int
        return repr(value)

    def _inputs(self) -> _Inputs:
        inputs = _Inputs([], [], [])
        for index, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                if name != "params" and self._is_input(name, value):
                    places = range(len(value)) if type(value) is tuple else (None,)
                    inputs.settings += [(index, name, place) for place in places]
        identities = set()
        for key, value in self.state_items():
            if is_host_number(value) and key not in self._traced_keys:
                inputs.numbers.append(key)
                if isinstance(value, Tensor) and id(value) in identities:
                    raise RuntimeError("its parameters share a tensor of the state")
                identities.add(id(value))
            elif isinstance(value, Tensor):
                inputs.tensors.append(key)
            else:
                _check_constant(value)
        return inputs

    def _settings_of(self, chosen: Sequence[_Setting]) -> List[Any]:
        groups = self._optimizer.param_groups
        return [
            groups[index][name] if place is None else groups[index][name][place]
            for index, name, place in chosen
        ]

    def record(self, purpose: object) -> _Recording:
        """Record the present way through the step.

        Raises:
            UnrecordableError: that can't be.
        """
        if sum(map(len, self._recordings.values())) >= _MOST:
            raise UnrecordableError("Python branches on its numbers in too many ways")
        try:
            recording = self._checked()
        except _CAN_FAIL as error:
            is_value = isinstance(error, CaptureError)
            reason = "it needs a tensor's value" if is_value else first_line(error)
            raise UnrecordableError(reason or type(error).__name__) from error
        key = purpose, self._form, self._storage.form
        self._recordings.setdefault(key, []).append(recording)
        return recording

    def _checked(self) -> _Recording:
        inputs = self._inputs()
        while True:
            try:
                recording, texts = self._trace(inputs)
            except HostWriteError as error:
                # It is no number that the host could know.
                number = -1 if error.input is None else error.input - len(inputs.settings)
                if error.tensor is not None:
                    inputs.traced_tensors.add(error.tensor)
                elif number >= 0:
                    self._traced_keys.add(inputs.numbers[number])
                    self.look()
                    inputs = self._inputs()
                else:
                    raise
                continue
            # What depends on a number in a way that was not followed would be a constant.
            names = set(inputs.names())
            if self._stays(inputs, texts, names - inputs.fixed):
                return recording
            if inputs.fixed:
                raise RuntimeError(_LEAKS)
            # Where a small change decides something, the recording is for this very number.
            unstable = [name for name in names if not self._stays(inputs, texts, {name})]
            inputs.fixed.update(unstable)

    def _stays(self, inputs: _Inputs, texts: Tuple[str, str], names: Set[str]) -> bool:
        """Tell whether a recording stays the same with other numbers under these names.

        Raises:
            RuntimeError: a graph depends on one, but no arithmetic that was noted does.
        """
        for shift in _SHIFTS if names else ():
            with contextlib.suppress(ArithmeticError, ValueError):
                others = self._trace(inputs, names, shift)[1]
                if others == texts:
                    return True
                if others[0] == texts[0]:
                    raise RuntimeError(_LEAKS)
        return not names

    def _trace(
        self, inputs: _Inputs, names: Iterable[str] = (), shift: Tuple[float, float] = (0.0, 0.0)
    ) -> Tuple[_Recording, Tuple[str, str]]:
        """Record a step, and write down what was noted of numbers and all that it is made of.

        Args:
            inputs: what is recorded.
            names: of numbers that are others than they are.
            shift: by how much, relatively, and of a count.
        """
        count, flats = len(self._views), self._storage.flats
        begin = count + len(flats)
        tape = HostNumbers(inputs.traced_tensors)
        present = [*self._settings_of(inputs.settings), *self.read(inputs.numbers)]
        symbols: List[Any] = []
        for index, name in enumerate(inputs.names()):
            value = present[index]
            if name in names:
                is_count = index >= len(inputs.settings) and float(value).is_integer()
                value = value + shift[1] if is_count else value * (1 + shift[0])
            symbols.append(tape.input(value))
            if name in inputs.fixed:
                tape.fix(symbols[-1])
        after: Dict[Key, Any] = {}

        def step(*arguments: Tensor) -> List[Tensor]:
            weights, sums = arguments[:count], arguments[count:begin]
            gradients = self._finish(sums, self._storage.blocks, flats)
            state = dict(zip(inputs.tensors, arguments[begin:]))
            state.update(zip(inputs.numbers, symbols[len(inputs.settings) :]))
            with tape:
                chosen = dict(zip(inputs.settings, symbols))
                after.update(self._step(weights, gradients, chosen, state))
            return [v for v in after.values() if isinstance(v, Tensor) and not tape.follows(v)]

        arguments = [*self._views, *self._finish.examples(flats), *self.read(inputs.tensors)]
        graph = capture(step, arguments)
        tape.lift(graph)
        new_tensors = [k for k, v in after.items() if isinstance(v, Tensor) and not tape.follows(v)]
        new_numbers = [key for key, value in after.items() if tape.follows(value)]
        constants = {k: v for k, v in after.items() if k not in {*new_tensors, *new_numbers}}
        for value in constants.values():
            _check_constant(value)
        program = tape.program([after[key] for key in new_numbers])
        tensors = [v for v in (*vars(graph).values(), *graph.buffers()) if isinstance(v, Tensor)]
        texts = tape.text(), repr((graph.code, constants, tensors))
        if not names and arguments[0].device.type == "cpu" and computes_in_half(arguments):
            results = program(present)
            assert results is not None
            numbers = results[0]
            try_out(lambda *values: graph(*values, *numbers), arguments)
        form = frozenset((key, self._form_of(key, value)) for key, value in after.items())
        recording = _Recording(
            graph,
            inputs.tensors,
            inputs.settings,
            inputs.numbers,
            program,
            new_tensors,
            new_numbers,
            constants,
            list(after),
            form,
        )
        return recording, texts

    def _step(
        self,
        views: Sequence[Tensor],
        gradients: Sequence[Tensor],
        chosen: Mapping[_Setting, object],
        state: Mapping[Key, object],
    ) -> Dict[Key, object]:
        """Call the step of an optimizer over parts of flat tensors, and return its state."""
        twin, memory = self._twin(views, gradients, chosen), list(map(storage_id, views))
        present = dict(self.state_items())
        for key, value in present.items():
            twin.state[views[key[0]]][key[1]] = state.get(key, value)
        before = list(map(setting_texts, twin.param_groups))
        watched = ValueSnapshot([twin])
        with torch.no_grad():
            twin.step()
        allowed = {f"{type(twin).__name__}.{name}" for name in ("state", "param_groups")}
        has_changed = bool(set(watched.changed()) - allowed)
        after = {
            (place, name): value
            for place, view in enumerate(views)
            for name, value in twin.state[view].items()
        }
        if set(present) - set(after):
            raise RuntimeError("it removes something from its state")
        is_elsewhere = not set(twin.state).issubset(views)
        if has_changed or is_elsewhere or list(map(setting_texts, twin.param_groups)) != before:
            watched.restore()
            raise RuntimeError("it keeps changing values outside of its parameters' state")
        if list(map(storage_id, views)) != memory:
            raise RuntimeError("it replaces the parameters' data instead of changing it in place")
        return after

    def _twin(
        self,
        views: Sequence[Tensor],
        gradients: Sequence[Tensor],
        chosen: Mapping[_Setting, object],
    ) -> torch.optim.Optimizer:
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
        for (index, name, place), value in chosen.items():
            if place is not None:
                parts = list(twin.param_groups[index][name])
                parts[place] = value
                value = tuple(parts)
            twin.param_groups[index][name] = value
        for (block, slot), view in zip(self.slots, views):
            view.grad = slot.view(gradients[block])
            number = self._storage.blocks[block].group - self._first_group
            twin.param_groups[number]["params"].append(view)
        return twin


def _check_constant(value: object) -> None:
    if not (value is None or isinstance(value, (bool, int, float, str))):
        raise RuntimeError(f"its state has a {type(value).__name__}")
