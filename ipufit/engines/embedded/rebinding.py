"""A tensor of the module that forward replaces: the program would read the old one for ever."""

from __future__ import annotations

import inspect
import re
from typing import Dict, Mapping, Optional, Sequence, Tuple

from torch import Tensor, nn

from ipufit.engines.embedded.storage import storage_id
from ipufit.errors import CaptureError

__all__ = ["public_name", "refuse_rebinding", "storages"]


def public_name(name: str) -> str:
    """The user's name for the step module's ``net.name``; the loss keeps its prefix."""
    return name[len("net.") :] if name.startswith("net.") else name


def storages(tensors: Mapping[str, Tensor]) -> Dict[str, int]:
    """Where the tensors' values are, by name."""
    return {name: storage_id(tensor) for name, tensor in tensors.items()}


def refuse_rebinding(
    module: nn.Module, tensors: Mapping[str, Tensor], before: Mapping[str, int]
) -> None:
    """Make sure that forward has left every tensor where it was.

    Args:
        module: whose forward has run.
        tensors: its parameters and buffers before, by name.
        before: their storages.

    Raises:
        CaptureError: it has not; with the place.
    """
    now: Dict[str, Tensor] = dict(module.named_parameters())
    now.update(module.named_buffers())
    for name in sorted({*tensors, *now}):
        tensor = tensors.get(name)
        if tensor is None or now.get(name) is not tensor or storage_id(tensor) != before[name]:
            raise _rebound(module, name, new=tensor is None)


def _rebound(module: nn.Module, name: str, new: bool) -> CaptureError:
    path, _, attribute = name.rpartition(".")
    parts = path.split(".")
    owners = [module.get_submodule(".".join(parts[:i])) for i in range(len(parts), 0, -1)]
    file, line = _assignment([type(owner) for owner in owners], attribute)
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
    return CaptureError(
        f"{public_name(name)!r} was {what} inside forward{at}, and the program would never see "
        f"the new one. {instead}.",
        file,
        line,
    )


def _assignment(owners: Sequence[type], attribute: str) -> Tuple[Optional[str], Optional[int]]:
    """File and line where a forward of the user's sets the attribute, or else where one begins."""
    name = re.escape(attribute)
    setting = re.compile(rf"\.{name}(\.data)?\s*=(?!=)|[\"']{name}[\"']")
    begin: Tuple[Optional[str], Optional[int]] = (None, None)
    for owner in owners:
        if owner.__module__.partition(".")[0] == "torch":
            continue
        try:
            forward = inspect.unwrap(owner.forward)  # type: ignore[attr-defined]
            file = inspect.getsourcefile(forward)
            lines, first = inspect.getsourcelines(forward)
        except (OSError, TypeError, AttributeError):
            continue
        for number, line in enumerate(lines, first):
            if setting.search(line):
                return file, number
        if begin == (None, None):
            begin = file, first
    return begin
