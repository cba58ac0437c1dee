"""Findings of a check: their texts, from runs and from the module alone, and their report."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from torch import nn

from ipufit.analysis.check.recorders import TraceDifference
from ipufit.errors import CaptureError
from ipufit.tracing.grad_step import ModuleWithLoss, public_name
from ipufit.tracing.untraced_random import advise_call, describe_draw
from ipufit.tracing.user_lines import Frame, source_line, users_module
from ipufit.tracing.validate import line_of
from ipufit.utils.console import TextReport
from ipufit.utils.state import Change


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault that :meth:`ipufit.Model.check` reports at one place.

    Attributes:
        kind: kind of fault, such as "branch"; docs/check.md lists them.
        severity: "error": ``fit`` refuses the module, or trains something else than the code says;
            or "warning": wasted work, or code that is rarely intended.
        file: the user's source file; None if there is no such line.
        line: in that file, or None.
        function: function with the line, or None.
        text: what is wrong.
        cure: what to write instead.
        module: name of the module or parameter, or None.
    """

    kind: str
    severity: str
    file: Optional[str]
    line: Optional[int]
    function: Optional[str]
    text: str
    cure: str
    module: Optional[str] = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} in {self.function}: " if self.file else ""
        return f"{where}{self.severity} [{self.kind}] {self.text}. {self.cure}"

    def as_dict(self) -> Dict[str, Any]:
        """Return the attributes by name, for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class CheckReport(TextReport):
    """Findings of a check, errors first; true if there are any.

    :meth:`ipufit.Model.check` returns it. Its length is the number of findings, iterating yields
    them, and ``str`` returns the text.

    Attributes:
        model: name of the class of the module.
        findings: list of :class:`ipufit.analysis.check.Finding`, errors before warnings, in the
            order of files and lines.
        loss: whether the loss was checked too.
    """

    model: str
    findings: Tuple[Finding, ...]
    loss: bool = True

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        part = "" if self.loss else " (without a loss)"
        if not self.findings:
            return f"{self.model}: nothing found{part}."
        return "\n".join([f"{self.model}: {self._counts()}{part}.", *map(_shown, self.findings)])

    def __repr__(self) -> str:
        return f"CheckReport({self.model}, {self._counts()})"

    def _counts(self) -> str:
        errors = sum(finding.severity == "error" for finding in self.findings)
        return f"{_count(errors, 'error')}, {_count(len(self) - errors, 'warning')}"

    def as_dict(self) -> Dict[str, Any]:
        """Return plain values, for JSON: model, loss, and the findings as dicts."""
        findings = [finding.as_dict() for finding in self.findings]
        return {"model": self.model, "loss": self.loss, "findings": findings}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _shown(finding: Finding) -> str:
    where = f"{finding.file}:{finding.line} in {finding.function}" if finding.file else "(no line)"
    source = source_line(finding.file, finding.line)
    lines = [
        f"{where}: {finding.severity} [{finding.kind}]",
        *([f"    {source}"] if source else []),
    ]
    return "\n".join([*lines, f"  {finding.text}.", f"  {finding.cure}"])


class Findings:
    """Collects findings: of each kind, one for a line of the user's.

    Args:
        caller: the line that stands for what has none of its own.

    Attributes:
        note: appended to the texts of findings that are new.
    """

    def __init__(self, caller: Optional[Frame]) -> None:
        self._caller = caller
        self._by_place: Dict[Tuple[object, ...], Finding] = {}
        self.note = ""

    def add(self, *findings: Finding) -> None:
        """Add findings that are new; one without a line gets the line of the caller."""
        for finding in findings:
            what = finding.module if finding.file else finding.module or finding.text
            key = (finding.kind, finding.file, finding.line, what)
            if key in self._by_place:
                continue
            with_note = dataclasses.replace(finding, text=f"{finding.text}{self.note}")
            if with_note.file is None and self._caller is not None:
                file, line, function = self._caller
                with_note = dataclasses.replace(with_note, file=file, line=line, function=function)
            self._by_place[key] = with_note

    def sorted(self) -> Tuple[Finding, ...]:
        """Return the findings, errors first, by file and line."""

        def order(finding: Finding) -> Tuple[str, str, int, str]:
            return (finding.severity, finding.file or "", finding.line or 0, finding.kind)

        return tuple(sorted(self._by_place.values(), key=order))


_NOWHERE: Tuple[Optional[str], Optional[int], Optional[str]] = (None, None, None)
_STATE = (
    "Make it state of the program: register a buffer and change it in place. A value that "
    "changes only between two calls of fit may stay an attribute."
)


def error_at(error: CaptureError) -> Finding:
    """Report code that a recording refuses."""
    what = error.what or error.brief.rstrip(".")
    cure = error.cure or "Read the error that fit raises."
    place = (error.file, error.line, error.function)
    return Finding(error.kind, "error", *place, what, cure)


def differs_at(difference: TraceDifference, causes: Iterable[str]) -> Finding:
    """Report an operator that is not the same in the next call.

    Args:
        difference: the difference.
        causes: titles of what forward changes.
    """
    file, line, function = difference.frame or _NOWHERE
    source = source_line(file, line)
    named = [title for title in causes if title in difference.titles or _is_in(title, source)]
    cause = f" ({', '.join(dict.fromkeys(named))})" if named else ""
    if difference.kind == "program":
        text = (
            f"the next call records another program{cause}: {difference.after} instead of "
            f"{difference.before}; Python branches on a value that changes, and the recording "
            "keeps one branch"
        )
        cure = "Compute both, and choose with torch.where, by a buffer that is changed in place."
    else:
        is_folded = difference.kind == "folded"
        text = (
            f"{'a tensor created in Python' if is_folded else 'a Python value'} changes from call "
            f"to call{cause}, but it is a constant of the program: it was {difference.before}, "
            f"then {difference.after}"
        )
        cure = _STATE
    return Finding(difference.kind, "error", file, line, function, text, cure)


def _is_in(title: str, source: str) -> bool:
    return re.search(rf"\b{re.escape(title.rpartition('.')[2])}\b", source) is not None


def changed_at(change: Change, frame: Optional[Frame]) -> Finding:
    """Report a value that forward leaves changed."""
    where = frame or _NOWHERE
    if change.name == "training":
        text = f"forward switches {change.title}, but the program keeps its recorded mode"
        cure = "Leave train and eval mode to fit, and read self.training."
        return Finding("mode", "error", *where, text, cure)
    if change.how == "written":
        text = (
            f"the tensor {change.title} is changed in forward, but it is not a buffer, so the "
            "program keeps its first value"
        )
        cure = "Register it as a buffer: self.register_buffer(name, tensor)."
        return Finding("folded", "error", *where, text, cure)
    is_global = "." not in change.title
    title = f"the global {change.title}" if is_global else change.title
    if change.how == "grown":
        text = f"forward changes the contents of {title}, but runs only once, to be recorded"
        cure = (
            "Return its contents as an output, or report them with ipufit.log; put numbers that "
            "the next call needs into a buffer."
        )
        return Finding("container", "warning", *where, text, cure)
    kind = "global" if is_global else "attribute"
    text = f"forward sets {title} in every call, but it runs only once, to be recorded"
    cure = (
        "To carry a value from one micro-batch to the next, register a buffer and change it in "
        "place; to look at one, return it as an output or report it with ipufit.log."
    )
    return Finding(kind, "warning", *where, text, cure)


def drawn_at(source: str, frame: Optional[Frame]) -> Finding:
    """Report random numbers that are no part of the program."""
    place = frame or _NOWHERE
    return Finding("random", "error", *place, describe_draw(source), advise_call(frame))


def generator_at(frame: Optional[Frame]) -> Finding:
    """Report an operator that draws from a torch.Generator of the user."""
    text = (
        "random numbers come from a separate torch.Generator, which is not part of the program: "
        "fit(seed=...) does not seed it and checkpoints do not save it"
    )
    cure = "Leave generator= out: each micro-batch has its own stream, from the seed of fit."
    return Finding("generator", "error", *(frame or _NOWHERE), text, cure)


def seeded_at(frame: Frame) -> Finding:
    """Report a seed that is set in forward."""
    text = "forward seeds torch's generator, but runs only once, to be recorded: it has no effect"
    cure = "Use fit(seed=...) instead; each micro-batch has its own random stream."
    return Finding("random", "error", *frame, text, cure)


def outside_at(name: Optional[str], frame: Optional[Frame]) -> Finding:
    """Report a tensor that requires a gradient and gets none."""
    if name is not None:
        text = (
            f"{name!r} is used through a reference outside of the module, such as a list of "
            "parameters, and would get no gradient from this use"
        )
        cure = "Use it through the module, such as self.layer.weight, in forward or in the loss."
    else:
        text = (
            "a tensor that requires a gradient is used here, but it is not a parameter of the "
            "module, so it is a constant of the program and is never trained"
        )
        cure = (
            "Make it an nn.Parameter and an attribute of the module; put several into an "
            "nn.ParameterList."
        )
    return Finding("outside", "error", *(frame or _NOWHERE), text, cure, name)


def output_at(frame: Frame, how: str) -> Finding:
    """Report output of forward."""
    text = f"forward {how} here, but runs only once, to be recorded: later steps print nothing"
    cure = (
        "Report the value with ipufit.log(name, value), or print it in a callback; to run forward "
        "every time, use compile(..., run_eagerly=True)."
    )
    return Finding("output", "warning", *frame, text, cure)


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
    place = defined_at(step, path) or _NOWHERE
    return Finding(kind, "warning", *place, text, cure, public_name(path))


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
