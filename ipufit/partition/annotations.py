"""Blocks of a module's own, as far as they can be seen before it runs."""

from __future__ import annotations

from typing import Any, Iterator, Optional

from torch import nn

from ipufit.utils.poptorch_types import sdk_kind

__all__ = ["annotated_ipus", "is_annotated"]

# Of PopTorch and of the stand-in: what BeginBlock hangs on a module or makes of a callable, and
# the context manager, which a module may hold.
_HOOKS = ("_BlockHook", "BlockHook")
_MODULES = ("LegacyBeginBlockFn", "Block")


def is_annotated(module: nn.Module) -> bool:
    """Whether ``BeginBlock`` was called for the module or a part of it, or it holds a ``Block``.

    What ``forward`` makes itself is not seen.
    """
    return any(True for _ in _annotations(module))


def annotated_ipus(module: nn.Module) -> Optional[int]:
    """Count the IPUs that the annotations of a module name, from 0; None where they name none."""
    ipus = [block._ipu_id for block in _annotations(module) if block._ipu_id is not None]
    return 1 + max(ipus) if ipus else None


def _annotations(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if sdk_kind(part, _MODULES):
            yield part
        for hook in part._forward_pre_hooks.values():
            if sdk_kind(hook, _HOOKS):
                yield hook
