"""A module as text, with the blocks that begin with its parts."""

from __future__ import annotations

import builtins

import torch

__all__ = ["module_repr", "print"]


def module_repr(m: torch.nn.Module) -> str:
    """Return ``repr`` of a module, with the hooks that run before a submodule in front of it."""
    extra = m.extra_repr()
    lines = extra.split("\n") if extra else []
    only_extra = len(lines) == 1 and not m._modules
    for name, part in m._modules.items():
        text = "None" if part is None else module_repr(part)
        lines.append(f"({name}): " + text.replace("\n", "\n  "))
    hooks = "".join(f"{hook!r} " for hook in m._forward_pre_hooks.values())
    inside = "\n  ".join(lines)
    if lines and not only_extra:
        inside = f"\n  {inside}\n"
    kind: str = m._get_name()  # type: ignore[no-untyped-call]
    return f"{hooks}{kind}({inside})"


def print(m: object) -> None:
    """Print a module as ``module_repr`` shows it, and anything else as Python does."""
    builtins.print(module_repr(m) if isinstance(m, torch.nn.Module) else m)
