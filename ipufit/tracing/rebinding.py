"""A tensor of the module that forward replaces: the program would read the old one for ever."""

from __future__ import annotations

import inspect
import re
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence, Tuple

from torch import Tensor, nn

from ipufit.errors import CaptureError
from ipufit.tracing.flat_storage import storage_id

__all__ = ["public_name", "rebound", "refuse_rebinding", "storages"]


def public_name(name: str) -> str:
    """The user's name for the step module's ``net.name``; the loss keeps its prefix."""
    return name[len("net.") :] if name.startswith("net.") else name


def storages(tensors: Mapping[str, Tensor]) -> Dict[str, int]:
    """Where the tensors' values are, by name."""
    return {name: storage_id(tensor) for name, tensor in tensors.items()}


def rebound(
    module: nn.Module, tensors: Mapping[str, Tensor], before: Mapping[str, int]
) -> Iterator[CaptureError]:
    """Errors, with the place, for the tensors that forward has not left where they were.

    Args:
        module: whose forward has run.
        tensors: its parameters and buffers before, by name.
        before: their storages.
    """
    now: Dict[str, Tensor] = dict(module.named_parameters())
    now.update(module.named_buffers())
    for name in sorted({*tensors, *now}):
        tensor = tensors.get(name)
        if tensor is None or now.get(name) is not tensor or storage_id(tensor) != before[name]:
            yield _rebound(module, name, new=tensor is None)


def refuse_rebinding(
    module: nn.Module, tensors: Mapping[str, Tensor], before: Mapping[str, int]
) -> None:
    """Make sure that there are none.

    Raises:
        CaptureError: the first one.
    """
    for error in rebound(module, tensors, before):
        raise error


def _rebound(module: nn.Module, name: str, new: bool) -> CaptureError:
    path, _, attribute = name.rpartition(".")
    parts = path.split(".")
    owners = [module.get_submodule(".".join(parts[:i])) for i in range(len(parts), 0, -1)]
    file, line, function = _assignment([type(owner) for owner in owners], attribute)
    if new:
        what = "registered"
        instead = "Register it in __init__, and change it in place in forward"
    elif attribute in owners[0]._parameters:
        what = "replaced by another tensor"
        instead = "Keep the new value under another name, or make it a buffer"
    else:
        what = "replaced by another tensor"
        instead = f"Change it in place: self.{attribute}.copy_(new_value)"
    at = f", at {file}:{line}" if file else ""
    begin, end = f"{public_name(name)!r} was {what} inside forward", "the program would never see"
    return CaptureError(
        f"{begin}{at}, and {end} the new one. {instead}.",
        file,
        line,
        function=function,
        kind="rebound",
        what=f"{begin}, and {end} the new one",
        cure=f"{instead}.",
    )


def _assignment(
    owners: Sequence[type], attribute: str
) -> Tuple[Optional[str], Optional[int], Optional[str]]:
    """File, line and function where the user sets the attribute, or else where forward begins."""
    name = re.escape(attribute)
    setting = re.compile(rf"\.{name}(\.data)?\s*=(?!=)|[\"']{name}[\"']")
    begin: Tuple[Optional[str], Optional[int], Optional[str]] = (None, None, None)
    for owner in owners:
        for function in _methods(owner):
            try:
                file = inspect.getsourcefile(function)
                lines, first = inspect.getsourcelines(function)
            except (OSError, TypeError):
                continue
            for number, line in enumerate(lines, first):
                if setting.search(line):
                    return file, number, function.__name__
            if begin[0] is None and function.__name__ == "forward":
                begin = file, first, "forward"
    return begin


def _methods(owner: type) -> Iterator[Callable[..., Any]]:
    """List methods of a user's class: forward, and then what it may call."""
    if owner.__module__.partition(".")[0] == "torch":
        return
    forward = inspect.unwrap(owner.forward)  # type: ignore[attr-defined]
    yield forward
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, method in vars(base).items():
                if inspect.isfunction(method) and name not in ("forward", "__init__"):
                    yield inspect.unwrap(method)
