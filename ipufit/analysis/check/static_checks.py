"""Findings from the module alone: parameters never trained, and parts in the wrong mode."""

from __future__ import annotations

import re
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple

from torch import nn

from ipufit.analysis.check.findings import Finding
from ipufit.tracing.grad_step import ModuleWithLoss, public_name
from ipufit.tracing.user_lines import Frame, users_module
from ipufit.tracing.validate import line_of

_UNUSED = (
    "never gets a gradient: nothing that the loss depends on uses it",
    "Use it in forward, or remove it; to keep its values on purpose, freeze it with "
    "requires_grad_(False) before compile.",
)
_NOT_OWNED = (
    "requires a gradient, but it is not in the optimizer, so fit does not train it",
    "Pass it to the optimizer, or freeze it with requires_grad_(False).",
)


def untrained_findings(
    step: ModuleWithLoss, trained: Sequence[str], with_gradient: Optional[Sequence[str]]
) -> Iterator[Finding]:
    """Report parameters that no gradient reaches, and those that the optimizer lacks.

    Args:
        step: module and loss.
        trained: names of the parameters that the optimizer has.
        with_gradient: names of those that get a gradient; None if that is unknown.
    """
    if with_gradient is not None:
        unused = set(trained).difference(with_gradient)
        yield from _grouped(step, unused, "unused", _UNUSED)
    named = step.named_parameters()
    left_out = {n for n, p in named if p.requires_grad}.difference(trained)
    yield from _grouped(step, left_out, "not_optimized", _NOT_OWNED)


def _grouped(
    step: ModuleWithLoss, names: Set[str], kind: str, texts: Tuple[str, str]
) -> Iterator[Finding]:
    """Report parameters by the largest modules all of whose parameters are concerned."""
    text, cure = texts
    rest = dict.fromkeys(name for name, _ in step.named_parameters() if name in names)
    for path, part in step.named_modules():
        if not path:
            continue
        inside = {f"{path}.{n}" for n, p in part.named_parameters() if p.requires_grad}
        if len(inside) > 1 and inside <= set(rest):
            for name in inside:
                del rest[name]
            count = f" ({len(inside)} parameters)"
            yield _finding(step, path, kind, f"{_title(path)}{count} {text}", cure)
    for name in rest:
        yield _finding(step, name, kind, f"{_title(name)} {text}", cure)


def _title(path: str) -> str:
    return "the module" if path == "net" else repr(public_name(path))


def _finding(step: ModuleWithLoss, path: str, kind: str, text: str, cure: str) -> Finding:
    file, line, function = defined_at(step, path) or (None, None, None)
    return Finding(kind, "warning", file, line, function, text, cure, public_name(path))


def mode_findings(step: ModuleWithLoss) -> Iterator[Finding]:
    """Report parts that were set to eval before fit and will be trained.

    A part whose parameters are frozen was meant to stay as it is.
    """
    reported: List[str] = []
    if not step.net.training:
        return  # fit sets all of it to train mode
    for path, part in step.net.named_modules(prefix="net"):
        if part.training or any(path.startswith(f"{done}.") for done in reported):
            continue
        reported.append(path)
        parameters = list(part.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            continue
        depends = [m for m in part.modules() if not m.training and _depends_on_mode(m)]
        if not depends:
            continue
        kinds = ", ".join(dict.fromkeys(type(m).__name__ for m in depends))
        yield _finding(
            step,
            path,
            "mode",
            f"{_title(path)} is in eval mode while the model is in train mode, and fit does not "
            f"change that: {kinds} in it stay in eval mode",
            "Call model.module.train() before fit; if that is on purpose, freeze its parameters "
            "with requires_grad_(False).",
        )


def _depends_on_mode(part: nn.Module) -> bool:
    norms = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    if isinstance(part, norms):
        return bool(part.track_running_stats)
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return bool(part.p > 0)
    if isinstance(part, (nn.RNNBase, nn.MultiheadAttention)):
        return bool(part.dropout)
    if not users_module(type(part)):
        return False
    return line_of(type(part).forward, r"self\.training") is not None


def defined_at(step: nn.Module, path: str) -> Optional[Frame]:
    """Return the line of user code that makes a part or parameter, or else the class it is in."""
    parts = path.split(".")
    modules: Dict[str, nn.Module] = dict(step.named_modules())
    for count in range(len(parts) - 1, 0, -1):
        owner = type(modules.get(".".join(parts[:count]), step))
        name = re.escape(parts[count])
        setting = rf"self\.{name}\b[^=(]*=(?!=)|[\"']{name}[\"']"
        for base in filter(users_module, owner.__mro__):
            assignment = line_of(vars(base).get("__init__"), setting)
            if assignment is not None:
                return assignment
    for count in range(len(parts), 0, -1):
        part = modules.get(".".join(parts[:count]))
        if part is not None and users_module(type(part)):
            begin = line_of(type(part))
            if begin is not None:
                return begin
    return None
