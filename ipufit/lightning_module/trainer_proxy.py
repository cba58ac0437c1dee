"""Stand-ins for a Trainer and for batch_idx, which refuse what they can't answer truthfully."""

from __future__ import annotations

import contextlib
import sys
import types
from typing import Callable, Dict, Iterable, Iterator, List, Mapping, NoReturn, Optional, Tuple

from ipufit.errors import CaptureError, ConfigurationError
from ipufit.tracing.user_lines import user_frame

_INSIDE = ("ipufit.", "lightning.", "pytorch_lightning.")


def refuse_here(what: str, instead: str) -> NoReturn:
    """Refuse the line of user code that is being recorded.

    Raises:
        CaptureError: always, with file and line.
    """
    frame: Optional[types.FrameType] = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_INSIDE):
        frame = frame.f_back
    user_line = user_frame(frame)
    if user_line is None:
        raise CaptureError(f"{what}. {instead}", what=what, cure=instead)
    file, line, function = user_line
    text = f"{what}, at {file}:{line} in {function}. {instead}"
    raise CaptureError(text, file, line, function=function, what=what, cure=instead)


def refuse_operators(kind: type, refuse: Callable[..., NoReturn], *more: str) -> None:
    """Have a class refuse to be computed with, compared, or made a number or a text.

    Args:
        kind: the class.
        refuse: gets the object and the other operand.
        more: names of further methods that are refused, without underscores.
    """
    operators = (
        *("int", "index", "float", "bool", "str", "format", "hash", "eq", "ne", "lt", "le"),
        *("gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "abs"),
        *("divmod", "round", "radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow"),
        *("and", "or", "rdivmod"),
    )
    for name in (*operators, *more):
        setattr(kind, f"__{name}__", refuse)


class BatchIndex:
    """Stand-in for batch_idx: it may be passed on, and not be used.

    A step is recorded once; the number would be that of the first batch for ever.
    """

    def __repr__(self) -> str:
        return "<batch_idx, which a recorded step can't know>"


def _refuse_use(self: BatchIndex, *_: object) -> NoReturn:
    refuse_here(
        "batch_idx was used, but the step is recorded once and would keep the first index",
        "Leave it out. To count, register a buffer and add 1 to it in training_step; to do "
        "something now and then, use a callback.",
    )


refuse_operators(BatchIndex, _refuse_use)


_STAGES = {
    "training": "train",
    "validating": "validation",
    "testing": "test",
    "predicting": "predict",
}


class StepTrainerProxy:
    """Stand-in for ``self.trainer`` while a step is recorded: it knows which step it is.

    Args:
        role: "train", "validation", "test" or "predict".
    """

    sanity_checking = False

    def __init__(self, role: str) -> None:
        self._role = role

    def __getattr__(self, name: str) -> object:
        if name in _STAGES:
            return _STAGES[name] == self._role
        refuse_here(
            f"{_as_read(name)} was read inside a step, but the step is recorded once and would "
            "keep its present value",
            "For a value that changes with every update, use a schedule of the optimizer, or a "
            "buffer that the step increments; for one that changes with every epoch, a buffer that "
            "on_train_epoch_start sets.",
        )


def _as_read(name: str) -> str:
    module_attributes = (
        "current_epoch",
        "global_step",
        "global_rank",
        "local_rank",
        "logger",
        "loggers",
    )
    return f"self.{name}" if name in module_attributes else f"self.trainer.{name}"


class NotKnownYetError(ConfigurationError):
    """Raised where ``self.trainer`` is asked for what only ``fit`` knows."""


class FitTrainerProxy:
    """Stand-in for ``self.trainer`` outside of the steps, with facts about the run.

    Args:
        facts: attributes by name; a callable is called for its value.
        fitting: whether ``fit`` has been called, so that no more will be known.
        setters: by name what setting an attribute does; others can't be set.
    """

    _known: Mapping[str, object]
    _fitting: bool
    _setters: Mapping[str, Callable[[object], None]]

    def __init__(
        self,
        facts: Mapping[str, object],
        fitting: bool = True,
        setters: Optional[Mapping[str, Callable[[object], None]]] = None,
    ) -> None:
        vars(self).update(_known=dict(facts), _fitting=fitting, _setters=dict(setters or {}))

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._setters:
            raise ConfigurationError(
                f"there is no Trainer whose {name} could be set. Use ipufit's arguments and "
                "callbacks."
            )
        self._setters[name](value)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._known:
            value = self._known[name]
            return value() if callable(value) else value
        there = ", ".join(sorted(self._known)) or "nothing"
        text = (
            "there is no Trainer, so self.trainer has only what ipufit knows about the run "
            f"({there}), not {name!r}."
        )
        if not self._fitting:
            raise NotKnownYetError(f"{text} It has more after fit was called.")
        raise ConfigurationError(f"{text} Pass it to the module's __init__ instead.")


@contextlib.contextmanager
def replace_attributes(attributes: Iterable[Tuple[object, Mapping[str, object]]]) -> Iterator[None]:
    """Replace attributes of objects in the block, by name.

    Args:
        attributes: each object with its attributes.
    """
    before: List[Tuple[Dict[str, object], Mapping[str, object], Dict[str, object]]] = []
    try:
        for each, values in attributes:
            there = vars(each)
            before.append((there, values, {name: there[name] for name in values if name in there}))
            there.update(values)
        yield
    finally:
        for there, values, earlier in before:
            there.update(earlier)  # in its old place: a recording depends on the order
            for name in values:
                if name not in earlier:
                    there.pop(name, None)
