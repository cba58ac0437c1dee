"""Options from a file, which is parsed and never run as a program."""

from __future__ import annotations

import ast
import enum
import json
import os
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Tuple, Type

from ipufit.poptorch import enums
from ipufit.poptorch._options.execution import STRATEGIES, Phase, Stage, _IExecutionStrategy
from ipufit.poptorch._options.group import (
    OptionGroup,
    TensorLocationSettings,
    _PopartOptions,
    nearest,
)

ENUMS: Dict[str, Type[enum.Enum]] = {name: getattr(enums, name) for name in enums.__all__}

_GROUPS = ("Distributed", "Jit", "Precision", "TensorLocations", "Training", "_Popart")
_HOLDERS = (OptionGroup, _PopartOptions, _IExecutionStrategy, Stage, Phase)


def _setters(target: object) -> List[str]:
    """Return the public methods of options, of a group, or of one of their arguments."""
    names = [name for name in dir(type(target)) if not name.startswith("_")]
    return [name for name in names if callable(getattr(type(target), name))]


def member(target: object, name: str) -> Any:
    """Return a group of options, or a setter.

    Raises:
        AttributeError: there is none of this name.
    """
    groups = [group for group in _GROUPS if hasattr(type(target), group)]
    names = [*groups, *_setters(target)] if isinstance(target, _HOLDERS) else []
    if name not in names:
        raise AttributeError(f"There is no option {name}. {nearest(name, names)}")
    return getattr(target, name)


def _enum_member(value: object) -> object:
    """Return the enum's member that a text such as ``"Enum.Member"`` names, or the value itself."""
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    kind, name = value.split(".")
    return getattr(ENUMS.get(kind), "__members__", {}).get(name, value)


def apply_json(options: OptionGroup, text: str, source: str) -> None:
    """Call the setters that a JSON object names, unless one of them does not exist.

    Raises:
        ValueError: not a JSON object.
        AttributeError: a name that is not a setter.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} expected JSON, got {text!r}: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(
            f'{source} expected a JSON object, such as {{"deviceIterations": 2}}, got {text!r}.'
        )
    calls: List[Tuple[Callable[..., object], List[object]]] = []
    for name, value in values.items():
        target: Any = options
        for part in name.split("."):
            target = member(target, part)
        if isinstance(target, _HOLDERS):
            raise AttributeError(
                f"{source}: {name} is a group of options. Name one of its setters, such as "
                f'"{name}.{_setters(target)[0]}".'
            )
        calls.append((target, value if isinstance(value, list) else [_enum_member(value)]))
    for setter, arguments in calls:
        setter(*arguments)


# Value of an expression, once the options are there.
Reading = Callable[[OptionGroup], Any]

_MAKERS: Dict[str, object] = {
    **STRATEGIES,
    **{maker.__name__: maker for maker in (Phase, Stage, TensorLocationSettings)},
}
_ALLOWED = (
    "A line is one call, such as deviceIterations(2) or Training.gradientAccumulation(4), with "
    "numbers, strings, True, False, None, lists, tuples, sets, dicts, enums "
    f"(poptorch.OutputMode.All), and poptorch.{', poptorch.'.join(sorted(_MAKERS))} as arguments. "
    "The file is read, never run."
)
_SETTERS_FAULTS = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)


class ConfigFileError(Exception):
    """A line of an options file that can't be read, and what a line may contain."""


class _Unreadable(Exception):
    """An expression that a line may not contain."""


class _Line(NamedTuple):
    """A line that sets an option."""

    text: str
    where: str
    number: int
    position: int

    def quoted(self) -> str:
        """Return the line as PopTorch prints it, and its number in the file if that differs."""
        # PopTorch counts only the lines that it keeps.
        numbering = f"\n(Line {self.number} with blank lines and comments.)"
        return f"\n> options.{self.text}{numbering if self.number != self.position else ''}"


def apply_file(options: OptionGroup, path: str) -> None:
    """Read every line of a file, then call the setters in them.

    Raises:
        ConfigFileError: a line can't be read; no option was changed.
    """
    lines: List[_Line] = []
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(map(str.strip, file), 1):
            if text and not text.startswith("#"):
                position = len(lines) + 1
                where = f"line {position} of {os.path.basename(path)}"
                lines.append(_Line(text, where, number, position))
    calls = [_read_line(line) for line in lines]
    for line, call in zip(lines, calls):
        try:
            call(options)
        except _SETTERS_FAULTS as error:
            if type(error) not in _SETTERS_FAULTS:
                raise
            raise type(error)(f"{error}\nAt {line.where}:{line.quoted()}") from error


def _read_line(line: _Line) -> Reading:
    """Read the one call of a line.

    Raises:
        ConfigFileError: it is not Python, or not such a call.
    """
    try:
        body = ast.parse(f"options.{line.text}").body
    except (SyntaxError, ValueError) as error:
        reason = getattr(error, "msg", str(error))
        raise ConfigFileError(
            f"SyntaxError at {line.where}: {reason}{line.quoted()}\n{_ALLOWED}"
        ) from error
    try:
        if len(body) != 1 or not isinstance(body[0], ast.Expr):
            raise _Unreadable
        return _call(body[0].value, "options")
    except _Unreadable:
        raise ConfigFileError(
            f"Not a call of an option at {line.where}:{line.quoted()}\n{_ALLOWED}"
        ) from None


def _call(node: ast.AST, root: str) -> Reading:
    """Read a call, whose chain of names and calls begins at a name."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        raise _Unreadable
    if any(word.arg is None for word in node.keywords):  # **options
        raise _Unreadable
    called = _chain(node.func, root)
    arguments = [_argument(argument) for argument in node.args]
    named = {str(word.arg): _argument(word.value) for word in node.keywords}

    def read(options: OptionGroup) -> object:
        positional = [argument(options) for argument in arguments]
        return called(options)(*positional, **{k: v(options) for k, v in named.items()})

    return read


def _chain(node: ast.AST, root: str) -> Reading:
    """Read the function of a call: a setter of options, or a constructor of an argument."""
    if isinstance(node, ast.Call):
        return _call(node, root)
    if isinstance(node, ast.Name) and root == "options" == node.id:
        return lambda options: options
    if not isinstance(node, ast.Attribute):
        raise _Unreadable
    names = _poptorch_names(node)
    if root == "poptorch" and len(names) == 1 and names[0] in _MAKERS:
        maker = _MAKERS[names[0]]
        return lambda options: maker
    if names:
        raise _Unreadable
    holder, name = _chain(node.value, root), node.attr
    return lambda options: member(holder(options), name)


def _argument(node: ast.AST) -> Reading:
    """Read a literal, an enum's member, or a constructor's call."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        kind: Callable[[Iterable[object]], object] = {
            ast.List: list,
            ast.Tuple: tuple,
            ast.Set: set,
        }[type(node)]
        elements = [_argument(element) for element in node.elts]
        return lambda options: kind(element(options) for element in elements)
    if isinstance(node, ast.Dict):
        # The key of `**other` is None, which is refused with all else.
        keys = [_argument(key) for key in node.keys]  # type: ignore[arg-type]
        values = [_argument(value) for value in node.values]
        return lambda options: {key(options): value(options) for key, value in zip(keys, values)}
    if isinstance(node, ast.Call):
        return _call(node, "poptorch")
    if isinstance(node, ast.Attribute):
        named = _enum_member(".".join(_poptorch_names(node)))
        if isinstance(named, str):
            raise _Unreadable
        return lambda options: named
    try:
        literal = ast.literal_eval(node)
    except ValueError:
        raise _Unreadable from None
    return lambda options: literal


def _poptorch_names(node: ast.AST) -> List[str]:
    """Return the names after ``poptorch.``, without its modules'; none for another expression."""
    names: List[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id != "poptorch":
        return []
    return names[1:] if names[0] in ("enums", "options") else names
