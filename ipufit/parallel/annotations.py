"""Whether a module has blocks of its own, as far as that can be seen before it runs."""

from __future__ import annotations

from torch import nn

from ipufit.sdk_objects import sdk_kind

__all__ = ["is_annotated"]

# Of PopTorch and of the stand-in: what BeginBlock hangs on a module or makes of a callable, and
# the context manager, which a module may hold.
_HOOKS = ("_BlockHook", "BlockHook")
_MODULES = ("LegacyBeginBlockFn", "Block")


def is_annotated(module: nn.Module) -> bool:
    """Whether ``BeginBlock`` was called for the module or a part of it, or it holds a ``Block``.

    What ``forward`` makes itself is not seen.
    """
    return any(
        sdk_kind(part, _MODULES)
        or any(sdk_kind(hook, _HOOKS) for hook in part._forward_pre_hooks.values())
        for part in module.modules()
    )
