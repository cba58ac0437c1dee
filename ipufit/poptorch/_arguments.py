"""The arguments of a call in one normal form, bound to those of forward, and what may change."""

from __future__ import annotations

import inspect
from typing import Any, Dict, Iterator, List, Mapping, NoReturn, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from ipufit.poptorch._logging import error, logger
from ipufit.poptorch._parsers import flattenTensorStructure, parser_of, reconstructTensorStructure
from ipufit.utils.codec import type_name

_ADVICE = (
    " The model is compiled for the arguments of its first call. To compile it for these, call "
    "destroy() on it and call it again, or wrap the module in a new inferenceModel() or "
    "trainingModel()."
)


def _mismatch(what: str, name: str, expected: object, got: object) -> NoReturn:
    raise error(f"{what} mismatch for {name}: expected {expected} but got {got}.{_ADVICE}")


def _compare(name: str, compiled: Any, actual: Any, differing: Set[str]) -> None:
    """Raise at the first difference between a compiled argument and that of a later call.

    A list whose tensors match but whose other items changed raises nothing: its name is added to
    ``differing``.
    """
    if isinstance(compiled, Tensor) and isinstance(actual, Tensor):
        if compiled.dtype != actual.dtype:
            _mismatch("Data type", name, compiled.dtype, actual.dtype)
        if compiled.shape != actual.shape:
            _mismatch("Shape", name, compiled.shape, actual.shape)
        return
    if type(compiled) is not type(actual):
        _mismatch("Type", name, type_name(compiled), type_name(actual))
    if parser_of(compiled) is not None:
        _compare_tensors(name, compiled, actual, differing)
    elif isinstance(compiled, dict):
        _compare_keys(name, compiled, actual)
        for key, item in compiled.items():
            _compare(f"{name}[{key}]", item, actual[key], differing)
    elif isinstance(compiled, tuple):
        _compare_items(name, compiled, actual, differing)
    elif isinstance(compiled, list) and flattenTensorStructure(compiled):
        _compare_tensors(name, compiled, actual, differing)
        if _differ(list(_constants(compiled)), list(_constants(actual))):
            differing.add(name)
    elif _differ(compiled, actual):
        _mismatch("Value", name, compiled, actual)


def _compare_items(
    name: str, compiled: Sequence[object], actual: Sequence[object], differing: Set[str]
) -> None:
    if len(compiled) != len(actual):
        raise error(
            f"Length mismatch for {name}: expected {len(compiled)} elements but got {len(actual)}."
            f"{_ADVICE}"
        )
    for i, item in enumerate(compiled):
        _compare(f"{name}[{i}]", item, actual[i], differing)


def _compare_tensors(name: str, compiled: object, actual: object, differing: Set[str]) -> None:
    """Compare only the tensors of two lists, or of two values with a custom parser, in order."""
    _compare_items(
        name, flattenTensorStructure(compiled), flattenTensorStructure(actual), differing
    )


def _compare_keys(name: str, compiled: Mapping[Any, object], actual: Mapping[Any, object]) -> None:
    """Refuse keyword arguments or dict entries that were added or left out since compilation."""
    details = []
    for what, keys in [
        ("Unexpected", actual.keys() - compiled.keys()),
        ("Missing", compiled.keys() - actual.keys()),
    ]:
        if keys:
            details.append(f"{what} arguments: {', '.join(sorted(map(str, keys)))}")
    if details:
        raise error(f"Keys mismatch for {name}: {'. '.join(details)}.{_ADVICE}")


def _constants(value: object) -> Iterator[object]:
    """Yield the leaves of nested containers that are neither tensors nor values with a parser."""
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _constants(item)
    elif not isinstance(value, Tensor) and parser_of(value) is None:
        yield value


def _differ(compiled: Any, actual: Any) -> bool:
    if compiled is actual:
        return False
    if isinstance(compiled, float) and isinstance(actual, float) and compiled != compiled:
        return actual == actual  # a nan is like another nan
    different = compiled != actual
    try:
        return bool(different)
    except (ValueError, RuntimeError):  # arrays compare element by element
        return bool(different.any())


class Arguments:
    """The arguments of one call, bound to the parameters of forward.

    Attributes:
        args: the positional arguments, defaults among them.
        names: names of the positional arguments in messages.
        kwargs: the keyword-only arguments.
    """

    def __init__(
        self,
        args: Tuple[object, ...],
        names: Sequence[str],
        kwargs: Mapping[str, object],
        original: Optional[Tuple[object, object]] = None,
    ) -> None:
        self.args = args
        self.names = tuple(names)
        self.kwargs = dict(kwargs)
        self._original = original
        self._warned = False

    def tensors(self, like: Optional[Arguments] = None) -> List[Tensor]:
        """Return all tensors in one list: dense in memory, without a gradient.

        Args:
            like: arguments that the model was compiled with, which fix the order of a dict's keys.
        """
        return _flat((self.args, self.kwargs), like)

    def callers(self, like: Optional[Arguments] = None) -> List[Tensor]:
        """Return the caller's own tensors in the order of :meth:`tensors`, for changes in place."""
        return _flat(self._original or (self.args, self.kwargs), like)

    def tensor_names(self) -> List[str]:
        """Return the name in messages of each of the ``tensors()``."""
        named: List[str] = []
        for name, value in [*zip(self.names, self.args), *self.kwargs.items()]:
            count = len(flattenTensorStructure(value))
            alone = isinstance(value, Tensor)
            named += [name] if alone else [f"tensor {i} of {name}" for i in range(count)]
        return named

    def rebuild(self, tensors: Sequence[Tensor]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """Return arguments for forward with these tensors in place of ``tensors()``."""
        args, kwargs = reconstructTensorStructure((self.args, self.kwargs), tensors)
        return args, kwargs

    def without_values(self) -> Arguments:
        """Return a copy with tensors of device "meta", with which later calls are compared."""
        empty = [torch.empty_like(tensor, device="meta") for tensor in self.tensors()]
        args, kwargs = self.rebuild(empty)
        return Arguments(args, self.names, kwargs)

    def check_like(self, compiled: Arguments) -> None:
        """Refuse arguments for which the program was not compiled.

        Raises:
            Error: another number of arguments, type, length, key, dtype, shape or value.
        """
        if len(self.args) != len(compiled.args):
            raise error(
                f"Number of positional arguments mismatch: expected {len(compiled.args)} arguments "
                f"but got {len(self.args)}.{_ADVICE}"
            )
        differing: Set[str] = set()
        for name, expected, got in zip(compiled.names, compiled.args, self.args):
            _compare(name, expected, got, differing)
        _compare_keys("named arguments", compiled.kwargs, self.kwargs)
        for name, expected in compiled.kwargs.items():
            _compare(name, expected, self.kwargs[name], differing)
        if differing and not compiled._warned:
            compiled._warned = True
            logger.warning(
                "The values in %s that are no tensors differ from those of the first call, which "
                "are part of the compiled program and are used again. Pass them as arguments of "
                "their own to have this checked, or as tensors to change them.",
                ", ".join(sorted(differing)),
            )


def _flat(structure: Tuple[object, object], like: Optional[Arguments]) -> List[Tensor]:
    return flattenTensorStructure(structure, None if like is None else (like.args, like.kwargs))


_Kind = inspect.Parameter


class ArgumentParser:
    """Binds calls to the parameters of a module's forward, as it is now.

    Args:
        model: the module, before it is wrapped, or any callable.
    Raises:
        TypeError: it is neither.
    """

    def __init__(self, model: object) -> None:
        if not isinstance(model, nn.Module) and not callable(model):
            raise TypeError(
                "Expected a torch.nn.Module or a callable, got "
                f"{type(model).__name__}. Pass the module itself."
            )
        function = model.forward if isinstance(model, nn.Module) else model
        try:
            self._parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a compiled function may have no signature
            self._parameters = [
                _Kind("args", _Kind.VAR_POSITIONAL),
                _Kind("kwargs", _Kind.VAR_KEYWORD),
            ]
        kinds = {parameter.name: parameter.kind for parameter in self._parameters}
        by_keyword = (_Kind.POSITIONAL_OR_KEYWORD, _Kind.KEYWORD_ONLY)
        self._by_keyword = {name for name, kind in kinds.items() if kind in by_keyword}
        self._takes_any_keyword = _Kind.VAR_KEYWORD in kinds.values()
        self._warned_contiguous = False

    def __call__(
        self, args: Sequence[object], kwargs: Mapping[str, object], fast_path: bool = False
    ) -> Arguments:
        """The arguments of a call in normal form.

        Tensors are made dense and are detached; ``Arguments.callers`` still has the caller's own.

        Args:
            args, kwargs: as the caller passed them.
            fast_path: the model is compiled: what only compiling warns about is not said again.
        Raises:
            AssertionError: too many arguments, one of an unknown name, or one passed twice.
            Error: one is missing.
        """
        names, positional, named = self._bound(args, kwargs)
        structure = (tuple(positional), named)
        if not fast_path:
            _warn_of_dicts(structure)
        tensors = flattenTensorStructure(structure)
        dense = all(tensor.is_contiguous() for tensor in tensors)
        detached = not any(tensor.requires_grad for tensor in tensors)
        if dense and detached:
            return Arguments(structure[0], names, named)
        if not dense and not self._warned_contiguous:
            self._warned_contiguous = True
            logger.warning(
                "At least one input tensor is not contiguous: non-contiguous tensors will be "
                "converted. Pass tensor.contiguous() to do this once."
            )
        if not detached and not fast_path:
            logger.warning(
                "Input tensor has requires_grad=True set. This tensor will be detached because "
                "backward pass via inputs is not supported. Gradients of a model's inputs can't be "
                "asked for from outside. Call requires_grad_() on it in forward, and return its "
                "gradient as an output."
            )
        used = [tensor.detach().contiguous() for tensor in tensors]
        new_args, new_kwargs = reconstructTensorStructure(structure, used)
        return Arguments(new_args, names, new_kwargs, original=structure)

    def _bound(
        self, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Tuple[List[str], List[object], Dict[str, object]]:
        names: List[str] = []
        positional: List[object] = []
        named: Dict[str, Any] = {}
        missing: List[str] = []
        left = dict(kwargs)
        for parameter in self._parameters:
            name, kind = parameter.name, parameter.kind
            if kind is _Kind.VAR_POSITIONAL:
                rest = args[len(positional) :]
                names += [f"*{name}[{i}]" for i in range(len(rest))]
                positional += rest
            if kind in (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD):
                continue
            value = parameter.default
            if kind is not _Kind.KEYWORD_ONLY and len(positional) < len(args):
                value = args[len(positional)]
            elif name in left and kind is not _Kind.POSITIONAL_ONLY:
                value = left.pop(name)
            elif value is _Kind.empty:
                missing.append(name)
            if kind is _Kind.KEYWORD_ONLY:
                named[name] = value
            else:
                names.append(name)
                positional.append(value)
        if len(args) > len(positional):
            raise AssertionError(
                f"Too many arguments provided: expected {', '.join(names) or 'none'} "
                f"({len(names)}) but got {len(args)} by position. Pass what forward takes."
            )
        for name in left:
            if name in self._by_keyword:
                raise AssertionError(
                    f"Parameter {name} was passed more than once. Pass it by position or by name."
                )
            if not self._takes_any_keyword:
                allowed = ", ".join(parameter.name for parameter in self._parameters)
                raise AssertionError(
                    f"{name} is not a valid parameter. Allowed values are {allowed or 'none'}."
                )
        if missing:
            raise error(f"Mandatory parameter {missing[0]} missing. Pass a value for it.")
        named.update(left)
        return names, positional, named


def _warn_of_dicts(structure: Any) -> None:
    left = [structure[0], *structure[1].values()]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            logger.warning(
                "A dict among the inputs is taken apart by the keys of the first call: later calls "
                "must have the same keys. A tuple says this by itself."
            )
            return
        if isinstance(value, (list, tuple)):
            left.extend(value)
