"""From the arguments of a call to those of forward, as Python binds them."""

from __future__ import annotations

import inspect
import logging
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from torch import nn

from ipufit.poptorch._arguments import Arguments
from ipufit.poptorch._errors import error
from ipufit.poptorch._parsers import flattenTensorStructure, reconstructTensorStructure

__all__ = ["ArgumentParser"]

_logger = logging.getLogger("poptorch::python")


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
        self._kinds = {parameter.kind for parameter in self._parameters}
        self._warned_contiguous = False

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], fast_path: bool = False
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
            _logger.warning(
                "At least one input tensor is not contiguous: non-contiguous tensors will be "
                "converted. Pass tensor.contiguous() to do this once."
            )
        if not detached and not fast_path:
            _logger.warning(
                "Input tensor has requires_grad=True set. This tensor will be detached because "
                "backward pass via inputs is not supported. Gradients of a model's inputs can't be "
                "asked for from outside. Call requires_grad_() on it in forward, and return its "
                "gradient as an output."
            )
        used = [tensor.detach().contiguous() for tensor in tensors]
        new_args, new_kwargs = reconstructTensorStructure(structure, used)
        return Arguments(new_args, names, new_kwargs, original=structure)

    def _bound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tuple[List[str], List[Any], Dict[str, Any]]:
        self._check_names(args, kwargs)
        names: List[str] = []
        positional: List[Any] = []
        named: Dict[str, Any] = {}
        left = dict(kwargs)
        for parameter in self._parameters:
            name, kind = parameter.name, parameter.kind
            if kind is _Kind.VAR_POSITIONAL:
                rest = args[len(positional) :]
                names += [f"*{name}[{i}]" for i in range(len(rest))]
                positional += rest
            elif kind is _Kind.VAR_KEYWORD:
                continue
            elif kind is _Kind.KEYWORD_ONLY:
                named[name] = left.pop(name) if name in left else _default(parameter)
            else:
                names.append(name)
                if len(positional) < len(args):
                    positional.append(args[len(positional)])
                elif name in left and kind is not _Kind.POSITIONAL_ONLY:
                    positional.append(left.pop(name))
                else:
                    positional.append(_default(parameter))
        named.update(left)
        return names, positional, named

    def _check_names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        by_position = [
            parameter.name
            for parameter in self._parameters
            if parameter.kind in (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)
        ]
        all_names = [parameter.name for parameter in self._parameters]
        if _Kind.VAR_POSITIONAL not in self._kinds and len(args) > len(by_position):
            raise AssertionError(
                f"Too many arguments provided: expected {', '.join(by_position) or 'none'} "
                f"({len(by_position)}) but got {len(args)} by position. Pass what forward takes."
            )
        by_keyword = {
            parameter.name
            for parameter in self._parameters
            if parameter.kind in (_Kind.POSITIONAL_OR_KEYWORD, _Kind.KEYWORD_ONLY)
        }
        for name in kwargs:
            if name not in by_keyword and _Kind.VAR_KEYWORD not in self._kinds:
                raise AssertionError(
                    f"{name} is not a valid parameter. Allowed values are "
                    f"{', '.join(all_names) or 'none'}."
                )
            if name in by_position[: len(args)] and name in by_keyword:
                raise AssertionError(
                    f"Parameter {name} was passed more than once. Pass it by position or by name."
                )


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.default is _Kind.empty:
        raise error(f"Mandatory parameter {parameter.name} missing. Pass a value for it.")
    return parameter.default


def _warn_of_dicts(structure: Any) -> None:
    left = [structure[0], *structure[1].values()]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            _logger.warning(
                "A dict among the inputs is taken apart by the keys of the first call: later calls "
                "must have the same keys. A tuple says this by itself."
            )
            return
        if isinstance(value, (list, tuple)):
            left.extend(value)
