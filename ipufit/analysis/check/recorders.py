"""Recorders of what a run does: its operators, and lines that print, seed, or read a value."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import io
import logging
import numbers
import sys
import threading
import traceback
import types
import warnings
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ipufit.errors import CaptureError
from ipufit.tracing.capture import fault_error, makes_shape, value_error
from ipufit.tracing.flat_storage import storage_id
from ipufit.tracing.grad_step import GradStep
from ipufit.tracing.interpreter import Listener, OperatorCall
from ipufit.tracing.user_lines import Frame, is_installed, is_users, source_line, user_frame
from ipufit.utils import tree
from ipufit.utils.random_operators import draws
from ipufit.utils.state import replaced


@dataclasses.dataclass
class Operation:
    """One operator as it was called.

    Attributes:
        name: of the operator.
        structure: its arguments without the values.
        values: numbers and texts among them, and fingerprints of tensors that Python made.
        frame: the user's line.
        constants: the tensors that Python made, until their fingerprints are taken.
        titles: where those tensors are kept, of which that is known.
    """

    name: str
    structure: Tuple[object, ...]
    values: List[object]
    frame: Optional[Frame]
    constants: List[Tuple[int, Tensor]]
    titles: List[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Constant:
    """Fingerprint of a tensor that Python made.

    Attributes:
        print: of its values.
        shown: the value of a tensor of one element.
    """

    print: str
    shown: str

    def __str__(self) -> str:
        return self.shown


def digest(tensor: Tensor) -> _Constant:
    """Make a fingerprint of dtype, shape and values."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return _Constant("", "a tensor")
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    shown = f"a tensor of shape {tuple(tensor.shape)}"
    if flat.numel() == 1:
        shown = f"a tensor of {flat.item()!r}"
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    text = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return _Constant(hashlib.blake2b(text + data, digest_size=12).hexdigest(), shown)


class OperationRecorder(Listener):
    """Records every operator below autograd, in recordings and in runs with values.

    Args:
        inputs: tensors that the program gets: state and batch.
        titles: where the user keeps other tensors, by storage.
        note: called for every operator that needs the value of a tensor that depends on ``inputs``.

    Attributes:
        operations: in the order of the program.
        tainted: storages that depend on inputs of the program, or on random numbers.
        outside: tensors of the user's that want a gradient and are no part of the program, with
            the line that uses them.
        generators: lines that draw from a generator of their own.
        is_muted: whether a tensor is just being shown, which is no part of the program.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        titles: Dict[int, str],
        note: Optional[Callable[[CaptureError], None]] = None,
    ) -> None:
        self.is_muted = False
        self.operations: List[Operation] = []
        self.tainted: Set[int] = set()
        self.outside: List[Tuple[Tensor, Optional[Frame]]] = []
        self.generators: List[Optional[Frame]] = []
        self._titles = titles
        self._note = note
        self._is_tainted = False
        self._numbers: Dict[int, int] = {}
        # As long as they live, no other storage has their address.
        self._alive: List[Tensor] = []
        for tensor in inputs:
            self._register(tensor)
            self.tainted.add(storage_id(tensor))

    def seal(self) -> None:
        """Replace tensors by fingerprints, before the next run may change them."""
        for operation in self.operations:
            for place, tensor in operation.constants:
                operation.values[place] = digest(tensor)
            operation.constants.clear()
        self._alive.clear()

    def before(self, call: OperatorCall) -> None:
        """Record the operator, and whether it reads values that the program computes."""
        if self.is_muted:
            return
        frame = user_frame(sys._getframe(1))
        operation = Operation(str(call.operator), (), [], frame, [])
        operation.structure = tuple(
            self._freeze(value, operation) for value in (*call.args, *sorted(call.kwargs.items()))
        )
        self.operations.append(operation)
        self._is_tainted = any(storage_id(t) in self.tainted for t in call.inputs) or draws(
            call.operator, call.args, call.kwargs
        )
        if self._is_tainted and self._note is not None:
            if torch.Tag.data_dependent_output in call.operator.tags:
                self._note(value_error(frame))
            elif makes_shape(call.operator, call.args):
                self._note(fault_error("shape", frame))

    def after(self, call: OperatorCall, result: object) -> None:
        """Follow what depends on inputs into the results."""
        if self.is_muted:
            return
        for tensor in tree.tensors(result):
            self._register(tensor)
            if self._is_tainted:
                self.tainted.add(storage_id(tensor))

    def _register(self, tensor: Tensor) -> None:
        key = storage_id(tensor)
        if key and key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            self._alive.append(tensor)

    def _freeze(self, value: object, operation: Operation) -> object:
        if isinstance(value, Tensor):
            return self._tensor(value, operation)
        if isinstance(value, (bool, numbers.Number, str)):
            operation.values.append(value)
            return type(value).__name__
        if isinstance(value, (tuple, list)):
            return tuple(self._freeze(item, operation) for item in value)
        if isinstance(value, torch.Generator):
            if value is not torch.default_generator:
                self.generators.append(operation.frame)
            return "generator"
        return str(value)

    def _tensor(self, tensor: Tensor, operation: Operation) -> Tuple[object, ...]:
        key = storage_id(tensor)
        if not key:
            return ("sparse", tensor.shape)
        if key not in self._numbers:
            operation.constants.append((len(operation.values), tensor))
            operation.values.append(None)
            if key in self._titles:
                operation.titles.append(self._titles[key])
            if tensor.requires_grad and not _in_backward():
                self.outside.append((tensor, operation.frame))
            self._register(tensor)
            return ("constant", tensor.dtype)
        return (self._numbers[key], tensor.dtype, tuple(tensor.shape))


def _in_backward() -> bool:
    """Return True while gradients are computed; torch.utils.checkpoint calls layers then."""
    gradients = GradStep._gradients.__code__
    return any(frame.f_code is gradients for frame, _ in traceback.walk_stack(sys._getframe(1)))


# Of one and the same computation, what another order of summation may change.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5

# How many operators are looked at to see which of them only one program has.
_AHEAD = 300


@dataclasses.dataclass(frozen=True)
class TraceDifference:
    """An operator that is not the same in both recordings.

    Attributes:
        kind: "constant" of a number or text, "folded" of a tensor that Python made, "program"
            where the operators are others.
        frame: the user's line.
        before, after: what differs, as text.
        titles: where the tensors are kept, of which that is known.
    """

    kind: str
    frame: Optional[Frame]
    before: str
    after: str
    titles: Tuple[str, ...]


def differences(one: Sequence[Operation], other: Sequence[Operation]) -> List[TraceDifference]:
    """List changed values, up to the first operator that is another one.

    A change in torch's own derivative of a line says nothing more than the line.
    """
    every = list(_differences(one, other))
    with_line = [difference for difference in every if difference.frame is not None]
    return with_line or every


def _differences(one: Sequence[Operation], other: Sequence[Operation]) -> Iterator[TraceDifference]:
    has_changed = False
    for place, (a, b) in enumerate(zip(one, other)):
        if a.name != b.name or a.structure != b.structure:
            if not has_changed:
                yield _first_extra(one[place:], other[place:])
            return
        for before, after in zip(a.values, b.values):
            if type(before) is type(after) and repr(before) == repr(after):
                continue
            has_changed = True
            is_plain = isinstance(before, (bool, int, float, complex, str))
            kind = "constant" if is_plain else "folded"
            titles = tuple(dict.fromkeys((*a.titles, *b.titles)))
            yield TraceDifference(kind, a.frame, str(before), str(after), titles)
            break
    if not has_changed and len(one) != len(other):
        shorter = min(len(one), len(other))
        yield _first_extra(one[shorter:], other[shorter:])


def _first_extra(one: Sequence[Operation], other: Sequence[Operation]) -> TraceDifference:
    """Return the first operator that only one of two programs has."""
    keys = [[(o.name, o.frame) for o in part[:_AHEAD]] for part in (one, other)]
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    a, b = one[:1], other[:1]
    for tag, begin, end, start, stop in matcher.get_opcodes():
        if tag != "equal":
            a, b = one[begin:end], other[start:stop]
            break
    frames = [o.frame for o in (*b, *a) if o.frame is not None]
    before, after = (part[0].name if part else "nothing" for part in (a, b))
    return TraceDifference("program", frames[0] if frames else None, before, after, ())


def same_results(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Compare the numbers of two runs, within the error of another summation order."""
    return len(one) == len(other) and all(
        a.shape == b.shape
        and torch.allclose(a.double(), b.double(), _RELATIVE, _ABSOLUTE, equal_nan=True)
        for a, b in zip(one, other)
        if not (a.is_complex() or b.is_complex())
    )


class OutputEvents:
    """Lines that print, log, warn, or seed torch's generator.

    Attributes:
        outputs: by the line, how.
        seeds: lines that seed.
    """

    def __init__(self) -> None:
        self.outputs: Dict[Frame, str] = {}
        self.seeds: Dict[Frame, None] = {}

    def out(self, how: str) -> None:
        """Record a line that writes now, unless it is of an installed package."""
        frame = user_frame(sys._getframe(2))
        if frame is not None and not is_installed(frame[0]):
            self.outputs.setdefault(frame, how)


class _Sink(io.TextIOBase):
    def __init__(self, events: OutputEvents, thread: int) -> None:
        self._events = events
        self._thread = thread

    def write(self, text: str) -> int:
        if text and threading.get_ident() == self._thread:
            self._events.out("prints")
        return len(text)

    def writable(self) -> bool:
        return True


_SEEDS = ((torch, "manual_seed"), (torch, "seed"), (torch.random, "manual_seed"))


@contextlib.contextmanager
def quiet(events: OutputEvents) -> Iterator[None]:
    """Record output and seeds of the block instead of showing them."""
    sink = _Sink(events, threading.get_ident())

    def handle_record(self: logging.Logger, record: logging.LogRecord) -> None:
        events.out("logs")

    def warned(message: object, category: object, filename: str, lineno: int, *_: object) -> None:
        frame: Optional[types.FrameType] = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") == "warnings":
            frame = frame.f_back
        # torch's own warnings come from the line that calls torch, too.
        source = source_line(frame.f_code.co_filename, frame.f_lineno) if frame else ""
        if frame is not None and is_users(frame.f_code.co_filename) and "warn" in source:
            events.out("warns")

    def seeding(original: Callable[..., object]) -> Callable[..., object]:
        def seed(*args: object, **kwargs: object) -> object:
            frame = user_frame(sys._getframe(1))
            if frame is not None:
                events.seeds[frame] = None
            return original(*args, **kwargs)

        return seed

    seeds = [(owner, name, seeding(getattr(owner, name))) for owner, name in _SEEDS]
    watched = replaced((logging.Logger, "handle", handle_record), *seeds)
    outputs = contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink)
    with outputs[0], outputs[1], warnings.catch_warnings(), watched:
        warnings.simplefilter("always")
        warnings.showwarning = warned  # type: ignore[assignment]
        yield


# How user code reads a tensor in ways that no operator shows, and which fault that is; with tolist
# the line says more.
_READERS = {"tolist": "", "numpy": "numpy", "__array__": "numpy", "__format__": "text"}
_SHOWN = ("__repr__", "__str__", "__format__")


class Reads(Listener):
    """Reports where user code reads values in ways that no operator shows.

    Args:
        note: called with an error for each read.
        recorder: knows the tensors that depend on what the program is given.
    """

    def __init__(self, note: Callable[[CaptureError], None], recorder: OperationRecorder) -> None:
        self._note = note
        self._recorder = recorder

    def before(self, call: OperatorCall) -> None:
        """Report a read, and mute the recorder while a tensor is shown."""
        name = getattr(call.operator, "__name__", "")
        recorder = self._recorder
        recorder.is_muted = False
        if not (call.args and isinstance(call.args[0], Tensor)):
            return
        tensor = call.args[0]
        is_read = name in _READERS and (name != "__format__" or tensor.dim() == 0)
        if storage_id(tensor) in recorder.tainted and is_read:
            frame, kind = user_frame(sys._getframe(1)), _READERS[name]
            self._note(fault_error(kind, frame) if kind else value_error(frame))
        recorder.is_muted = name in _SHOWN

    def after(self, call: OperatorCall, result: object) -> None:
        """Let the recorder go on."""
        self._recorder.is_muted = False
