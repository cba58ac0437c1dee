"""Arguments: bad ones reported together, which a user corrects in one go; groups of them shown.

A call knows by context variables what was found out around it; :func:`within` sets one for a block.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import operator
import os
import reprlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Type, TypeVar, Union, get_args

from ipufit.errors import ConfigurationError, DataError, PlanError, UnknownArgumentError, unfit

T = TypeVar("T")

# The names that the present call has wrong, until the collector of the call takes them over.
_wrong_names: contextvars.ContextVar[Optional[UnknownArgumentError]] = contextvars.ContextVar(
    "wrong_names", default=None
)


# Whether calls end where their arguments are checked.
_only_checks: contextvars.ContextVar[bool] = contextvars.ContextVar("only_checks", default=False)


@contextlib.contextmanager
def within(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value within the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class _CheckedError(Exception):
    """Ends a call whose arguments are right, where no more of it is wanted."""


class ErrorCollector:
    """Collects what is wrong with the arguments of one call.

    Args:
        of_call: whether it begins with the wrong names of a call: see :meth:`beginning_with`.
    """

    def __init__(self, of_call: bool = False) -> None:
        self._errors: List[Union[ConfigurationError, DataError]] = []
        self._of_call = of_call
        wrong_names = _wrong_names.get() if of_call else None
        if wrong_names is not None:
            self._errors.append(wrong_names)
            _wrong_names.set(None)

    @staticmethod
    def beginning_with(
        wrong_names: Optional[UnknownArgumentError],
    ) -> contextlib.AbstractContextManager[None]:
        """Let the collector of the call in the block begin with names that are wrong.

        So nothing is done of what the call does once all faults were raised. None is for a call of
        ours within one that has such names.
        """
        return within(_wrong_names, wrong_names)

    @staticmethod
    def check_only(call: Callable[[], object]) -> None:
        """Raise what is wrong with the arguments of a call, which does nothing else."""
        with within(_only_checks, True), contextlib.suppress(_CheckedError):
            call()

    @classmethod
    def end_checks(cls) -> None:
        """Raise the names that the present call has wrong, now that its values are checked.

        Raises:
            UnknownArgumentError: there are some.
        """
        cls(of_call=True).raise_all()

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Keep an error of arguments or data for :meth:`raise_all`, which must follow."""
        try:
            yield
        except (ConfigurationError, DataError) as error:
            # Without this frame, which from Python 3.12 on holds the error in a circle.
            frames = error.__traceback__ and error.__traceback__.tb_next
            self._errors.append(error.with_traceback(frames))

    def raise_all(self) -> None:
        """A single error as it is; several as one, with the texts of all.

        Raises:
            PlanError: if all are; with every fault and the suggestions joined.
            UnknownArgumentError: if one is.
            DataError: if all are.
            ConfigurationError: otherwise.
        """
        # Where frames hold what was raised in them, all that they hold waits for the collector of
        # garbage: loaders with their workers, for one.
        errors, self._errors = self._errors, []
        if len(errors) == 1:
            raise errors.pop()
        texts: Dict[str, None] = {}  # in order; training and validation often share a fault
        suggestion: Dict[str, object] = {}
        for error in errors:
            if isinstance(error, PlanError):
                texts.update(dict.fromkeys(error.faults))
                suggestion.update(error.suggestion)
            else:
                texts[str(error)] = None
        if errors and all(isinstance(error, PlanError) for error in errors):
            raise PlanError(list(texts), suggestion)
        if errors:
            kind: Type[Union[ConfigurationError, DataError]] = ConfigurationError
            if any(isinstance(error, UnknownArgumentError) for error in errors):
                kind = UnknownArgumentError
            elif all(isinstance(error, DataError) for error in errors):
                kind = DataError
            raise kind("\n".join(texts))
        if self._of_call and _only_checks.get():
            raise _CheckedError


def whole_number(value: Any) -> Optional[int]:
    """Return a whole number as an int; None of anything else: floats and bools are none."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return int(operator.index(value))
    except TypeError:  # an array with several elements has the method, but is no index
        return None


def as_float(value: object) -> float:
    """Convert one real number to a float; NaN for anything else: texts, bools, several numbers."""
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if is_bool or isinstance(value, (str, bytes)):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # an array with several elements has the method
        return math.nan


def as_list(value: object) -> Optional[List[Any]]:
    """List what has elements, but is no text and no mapping; None of anything else."""
    try:
        return None if isinstance(value, (str, bytes, dict)) else list(value)  # type: ignore[call-overload]
    except TypeError:  # a tensor without dimensions has the method
        return None


def number_in(
    name: str,
    value: object,
    needed: str = "a positive number",
    is_good: Callable[[float], bool] = lambda number: 0 < number < math.inf,
    advice: str = "",
) -> float:
    """Check that an argument is a good number, by default a positive one, and return it as a float.

    Args:
        name: of the argument.
        value: what came.
        needed: what would have been good, for the message.
        is_good: tells it of a number; of NaN, which stands for what is none, it says no.
        advice: the last sentence of the error, which says which one to take.

    Raises:
        ConfigurationError: it is not.
    """
    number = as_float(value)
    if is_good(number):
        return number
    raise unfit(name, needed, value, advice)


def at_least(name: str, value: Any, least: int, also: str = "", advice: str = "") -> int:
    """Check that an argument is a whole number of at least ``least``, and return it as an int.

    Args:
        name: of the argument.
        value: what came.
        least: the smallest good one.
        also: what else would have been good, for the message.
        advice: the last sentence of the error, which says which one to take.

    Raises:
        ConfigurationError: it is no integer, or a smaller one.
    """
    number = whole_number(value)
    if number is not None and number >= least:
        return number
    raise unfit(name, f"an integer of at least {least}{also}", value, advice)


def at_least_or_none(name: str, value: object, least: int, advice: str = "") -> Optional[int]:
    """Check that an argument is None, or what :func:`at_least` takes, and return it.

    Raises:
        ConfigurationError: it is neither.
    """
    return None if value is None else at_least(name, value, least, " or None", advice)


def is_number(value: object) -> bool:
    """Tell whether a value is a number of Python's, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def one_of(name: str, value: T, choices: object, advice: str = "") -> T:
    """Check that an argument is one of the choices, of its very type, and return it.

    Args:
        name: of the argument.
        value: what came.
        choices: a Literal type, or a tuple of values and of such types.
        advice: the last sentence of the error, which says which one to take.

    Raises:
        ConfigurationError: names them.
    """
    words: List[object] = []
    for choice in choices if isinstance(choices, tuple) else (choices,):
        words += get_args(choice) or (choice,)
    for word in words:
        if type(value) is type(word) and value == word:
            return value
    several = len(words) > 2
    right = (", " if several else " or ").join(map(repr, words))
    raise unfit(name, "one of " * several + right, value, advice)


def folder_of(name: str, value: object) -> str:
    """The path of a folder that an argument names, as text.

    Args:
        name: of the argument, for the message.
        value: what came.

    Raises:
        ConfigurationError: it is no path.
    """
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path:
        raise unfit(name, "the path of a folder", value, "Use for example 'runs/1'.")
    return path


class SettingsRepr:
    """Base of frozen dataclasses that shows the arguments which are not at their defaults."""

    def __repr__(self) -> str:
        settings: Any = self
        changed = []
        for field in dataclasses.fields(settings):
            value = getattr(self, field.name)
            if type(value) is not type(field.default) or value != field.default:
                text = repr(value) if isinstance(value, str) else reprlib.repr(value)
                changed.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(changed)})"
