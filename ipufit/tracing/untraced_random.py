"""Random numbers of Python and NumPy in a recording, which has them as constants: refused."""

from __future__ import annotations

import collections
import contextlib
import re
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import Precision
from ipufit.tracing.capture import OWN_DRAWS, capture, capture_error
from ipufit.tracing.fingerprint import CodeReader, StepModule
from ipufit.tracing.grad_step import GradStep, ModuleWithLoss
from ipufit.tracing.graph_analysis import GraphSignature
from ipufit.tracing.ipu_only import for_this_engine
from ipufit.tracing.user_lines import Frame, Lines, source_line, users_module
from ipufit.utils.console import warn_user
from ipufit.utils.random_streams import LOCK, Generators, generator_state
from ipufit.utils.state import parts_of


def advise_call(frame: Optional[Frame]) -> str:
    """Which call of torch's to use instead of the one in a line, as a sentence."""
    source = source_line(frame[0], frame[1]) if frame is not None else ""
    call = next(call for words, call in _CALLS if re.search(words, source))
    branch = ", and choose with torch.where instead of a branch" if _BRANCH.search(source) else ""
    return f"Draw with {call}, whose numbers are part of the program{branch}."


_CALLS = (
    (r"beta|dirichlet", "torch.distributions.Beta(a, b).sample()"),
    (r"gauss|normal|randn", "torch.randn"),
    (r"shuffle|permutation", "torch.randperm"),
    (r"randint|randrange|integers|choice|sample\(", "torch.randint"),
    (r"", "torch.rand"),
)
_BRANCH = re.compile(r"\b(if|elif|while)\b")


def describe_draw(name: str) -> str:
    """Say why Python must not draw a random number in the step."""
    return (
        f"a random number is drawn from {name}, but Python runs only once, to be recorded: every "
        "micro-batch would get the same number"
    )


# A stream that begins with a number near 0, and one that begins with several near 1: where a layer
# is left out with some probability, one of them makes another choice than almost any.
_LOW, _HIGH = 906, 92377


@contextlib.contextmanager
def refuse_draws(
    step: StepModule, record: Callable[[], fx.GraphModule], runs_eagerly: bool = True
) -> Iterator[None]:
    """Refuse random numbers of Python or NumPy that a recording in the block depends on.

    Nothing more is done where no generator has moved; else the recording is made again, to find the
    lines and to see whether other numbers make another program.

    Args:
        step: a step module; generators that its code reads or its modules hold count too.
        record: makes a recording of the same.
        runs_eagerly: whether the engine can run the module itself.

    Raises:
        CaptureError: with the line, and the call of torch's to use.

    Warns:
        UserWarning: numbers are drawn, but the program is the same with others.
    """
    # The data pipeline may draw as well, but not while this is held.
    with LOCK:
        generators = Generators(reachable_generators(step, with_torch=False))
        yield
        if OWN_DRAWS:
            _refuse_seeds(record, runs_eagerly)
        if not generators.drawn():
            return
        now = generators.again()
        try:
            _judge(generators, record, runs_eagerly)
        finally:
            now.restore()


def _refuse_seeds(record: Callable[[], fx.GraphModule], runs_eagerly: bool) -> None:
    """Refuse a generator that forward makes or seeds: a recording itself moves none."""
    before = dict(OWN_DRAWS)
    generators = Generators([(str(place), each) for place, (each, _) in before.items()])
    try:
        generators.start(_LOW)
        started = generators.again()
        _recorded(record)
        moved = started.drawn()
    finally:
        generators.restore()
    for place, (_, frame) in OWN_DRAWS.items():
        if place not in before or str(place) in moved:
            raise capture_error(
                "random numbers are drawn from a torch.Generator that is made or seeded in the "
                "step, which has the same numbers each time, but a recording would draw new ones",
                "Make and seed it in __init__ for new numbers, or register the numbers with "
                "register_buffer.",
                frame,
                runs_eagerly=runs_eagerly,
            )


def _judge(
    generators: Generators, record: Callable[[], fx.GraphModule], runs_eagerly: bool
) -> None:
    generators.restore()
    lines = Lines(generators.probes)
    with lines:
        text = _recorded(record)
    places = [(name, frame) for name in generators.drawn() for frame in lines.lines[name] or [None]]
    if not places:
        # Somebody else has drawn, in a thread of their own.
        return
    others = []
    for seed in (_LOW, _HIGH):
        generators.start(seed)
        others.append(_recorded(record))
    if text is not None and all(other is not None and other.equals(text) for other in others):
        _warn(places)
        return
    name, frame = places[0]
    also = "".join(f" So does {_place(other)}." for _, other in places[1:4] if other is not None)
    cure = f"{advise_call(frame)}{also}"
    raise capture_error(describe_draw(name), cure, frame, kind="random", runs_eagerly=runs_eagerly)


def _recorded(record: Callable[[], fx.GraphModule]) -> Optional[GraphSignature]:
    """Record a step; return None where that fails, which it does with some numbers alone."""
    try:
        return GraphSignature.of(record())
    except Exception:
        return None


def _warn(places: Sequence[Tuple[str, Optional[Frame]]]) -> None:
    name, frame = places[0]
    where = f" at {_place(frame)}" if frame is not None else ""
    warn_user(
        f"a random number is drawn from {name}{where}, but Python runs only once, to be recorded. "
        "The program does not depend on the number, so this has no effect now; if it should, draw "
        "with torch.rand.",
    )


def _place(frame: Frame) -> str:
    return f"{frame[0]}:{frame[1]} in {frame[2]}"


# Levels of objects and containers in which generators are looked for, and items of a container.
_DEPTH, _MOST = 4, 100


def reachable_generators(step: StepModule, with_torch: bool = True) -> List[Tuple[str, object]]:
    """Generators of the user's that code can reach, each once, with a title.

    Args:
        step: whose code.
        with_torch: whether those of torch's are among them.
    """
    reader = CodeReader(step)
    objects = list(reader.generators)
    values: List[Tuple[str, object, int]] = []
    followed: Set[int] = set()
    for part in step.owners():
        followed.add(id(part))
        values.append((type(part).__name__, part, _DEPTH))
    for title, _, _, value in reader.places:
        values.append((title, value, _DEPTH - 1))
    # Nearest first; the list grows.
    for title, value, depth in values:
        if generator_state(value) is not None:
            objects.append((title, value))
            continue
        parts = vars(value) if depth == _DEPTH else parts_of(value) if depth else None
        has_names = parts is not value
        if not parts or (not has_names and len(parts) > _MOST):
            continue
        if has_names and depth < _DEPTH and not users_module(type(value)):
            continue
        for name in list(parts):
            inner = parts[name] if isinstance(parts, dict) else name
            if id(inner) not in followed:
                followed.add(id(inner))
                values.append((f"{title}.{name}" if has_names else title, inner, depth - 1))
    pairs: Dict[int, Tuple[str, object]] = {}
    counts: Dict[str, int] = collections.Counter()
    for title, value in objects:
        if id(value) not in pairs and (with_torch or not isinstance(value, torch.Generator)):
            counts[title] += 1
            # Modules of one class may each have one.
            number = f" ({counts[title]})" if counts[title] > 1 else ""
            pairs[id(value)] = f"{title}{number}", value
    return list(pairs.values())


def record_alone(
    step: ModuleWithLoss, example: MicroBatch, trains: bool, with_loss: bool, precision: Precision
) -> fx.GraphModule:
    """Record a step as the embedded engine does, for an engine that compiles it in another way.

    Args:
        step: the user's module and loss.
        example: a micro-batch.
        trains: with gradients.
        with_loss: compute the loss.
        precision: in which it computes.
    """
    tensors = step.tensors()
    trained = [name for name, tensor in tensors.items() if trains and tensor.requires_grad]
    names = step.state_names(trained)
    layout = (lambda with_gradient: ()) if trains else None
    fixed = names[len(trained) :]
    micro = GradStep(step, trained, fixed, example, with_loss, not trains, layout, precision)
    state: List[Tensor] = [tensors[name].detach() for name in names]
    with for_this_engine():
        return capture(micro, [*state, *example.leaves])
