"""Report of a preflight: statements about PopTorch 3.4, and changes that a model needs."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, FrozenSet, List, Mapping, Optional, Tuple

__all__ = [
    "COMMIT",
    "LIMITED",
    "SUPPORTED",
    "UNKNOWN",
    "UNSUPPORTED",
    "Call",
    "CodeLocation",
    "Fact",
    "Line",
    "PreflightFinding",
    "PreflightReport",
    "always",
    "canonical",
    "dispatcher",
    "guide",
    "merged",
    "operators_page",
]

# The last commit of branch sdk-release-3.4 of github.com/graphcore/poptorch: every line below is
# a line of this one.
COMMIT = "c2a8b17762f1d7106f7bf048ff011ab4fee7685e"

SUPPORTED = "supported"
LIMITED = "supported with limits"
UNSUPPORTED = "not supported"
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of PopTorch's published repository.

    Attributes:
        file: its path there.
        line: counted from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


def always(_: object) -> bool:
    """Return True: the condition of a fact that has none."""
    return True


@dataclasses.dataclass(frozen=True)
class Fact:
    """A row of the table.

    Attributes:
        group: "operators", "layers", "losses", "optimizers", "settings", "dtypes" or
            "control flow".
        key: its name, of which there is one in the table.
        subject: what it is looked up by: an operator such as "aten::topk", the name of a class, a
            setting, a dtype, or the cause of a failed recording.
        verdict: SUPPORTED, LIMITED or UNSUPPORTED; UNKNOWN where there is nothing to go by.
        says: what PopTorch's documentation or source says, in our words.
        places: where it does so, the documentation first.
        cure: what to do instead; empty where nothing has to be done.
        applies: whether the fact is one of this call, module, parameter group or tensor.
    """

    group: str
    key: str
    subject: str
    verdict: str
    says: str
    places: Tuple[Line, ...]
    cure: str = ""
    applies: Callable[[Any], bool] = always

    def as_dict(self) -> Dict[str, Any]:
        """Return all but the condition, for JSON."""
        return {
            "group": self.group,
            "key": self.key,
            "verdict": self.verdict,
            "says": self.says,
            "sources": [dataclasses.asdict(place) for place in self.places],
            "cure": self.cure,
        }


def guide(page: str, line: int) -> Line:
    """Return the place of a line of a page of the user guide."""
    return Line(f"docs/user_guide/{page}.rst", line)


def operators_page(line: int) -> Line:
    """Return the place of a line of the guide's list of operators and layers."""
    return guide("supported_ops", line)


def canonical(name: str, line: int) -> Line:
    """Return the place of a line of the handlers that turn ATen operators into PopART's."""
    return Line(f"poptorch/source/popart_canonicalization/{name}.cpp", line)


def dispatcher(name: str, line: int) -> Line:
    """Return the place of a line of the code that takes operators from torch."""
    return Line(f"poptorch/source/dispatch_tracer/{name}", line)


@dataclasses.dataclass(frozen=True)
class CodeLocation:
    """Place in the user's code where something happened.

    Attributes:
        module: name of the innermost module that ran; "" for the model itself, "loss" for the loss.
        file, line: of the user's source, or that of a layer of torch's; None if no one's.
    """

    module: str = ""
    file: Optional[str] = None
    line: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        name: such as "aten::add"; of what changes its argument, that of its other form.
        arguments: by name, defaults included; tensors have no values.
        constants: names of tensor arguments that depend on no input and no weight.
        is_constant_result: whether all of its tensors do so, and no random number is drawn.
        is_whole: False of an operator that torch writes with others, which come after it.
        location: the place of the call.
    """

    name: str
    arguments: Mapping[str, Any]
    constants: FrozenSet[str]
    is_constant_result: bool
    is_whole: bool
    location: CodeLocation

    def is_constant(self, name: str) -> bool:
        """Return True if an argument is known when the model is compiled."""
        return name in self.constants


_VERDICTS = (UNSUPPORTED, UNKNOWN, LIMITED)


@dataclasses.dataclass(frozen=True)
class PreflightFinding:
    """A fact that holds for a place in a model.

    Attributes:
        fact: what PopTorch says, where it says it, and the cure.
        what: the operator, layer, setting or tensor, as the model has it.
        module: name of the module; "" for the model itself, "loss" for the loss, None where it is
            of no module.
        file, line: of the user's source where the operator or layer was called, or of torch's where
            a layer of torch's did; None where no line is to blame.
        times: how often it was met there.
    """

    fact: Fact
    what: str
    module: Optional[str] = None
    file: Optional[str] = None
    line: Optional[int] = None
    times: int = 1

    @classmethod
    def at(cls, fact: Fact, what: str, location: CodeLocation) -> PreflightFinding:
        """Make a finding about something that ran at a location."""
        return cls(fact, what, location.module, location.file, location.line)

    @property
    def verdict(self) -> str:
        """The verdict: "not supported", "unknown" or "supported with limits"."""
        return self.fact.verdict

    @property
    def cure(self) -> str:
        """The cure; "" where nothing has to be done."""
        return self.fact.cure

    def as_dict(self) -> Dict[str, Any]:
        """Return all attributes, for JSON."""
        place = {"module": self.module, "file": self.file, "line": self.line}
        return {"what": self.what, **place, "times": self.times, **self.fact.as_dict()}

    def __str__(self) -> str:
        times = f", {self.times} times" if self.times > 1 else ""
        where = "" if self.module is None else f" in {self.module or 'the model itself'}"
        lines = [f"{self.what}{where}{times}"]
        if self.file is not None:
            lines.append(f"  at: {self.file}:{self.line}")
        lines.append(f"  PopTorch: {self.fact.says}")
        lines.append(f"  source: {'; '.join(map(str, self.fact.places))}")
        if self.cure:
            lines.append(f"  cure: {self.cure}")
        return "\n".join(lines)


class PreflightReport:
    """Findings about a model, by PopTorch 3.4's published source and documentation.

    No IPU has confirmed any of it. ``print`` shows all findings.

    Args:
        title: class of the module.
        findings: in any order.
        operators: how many kinds of operators were looked at.
        stopped: why operators after a certain one could not be looked at; None if all were.

    Attributes:
        title, operators, stopped: the arguments.
        findings: what is not supported first, then what is unknown, then what has limits.
    """

    def __init__(
        self,
        title: str,
        findings: Tuple[PreflightFinding, ...],
        operators: int,
        stopped: Optional[str] = None,
    ) -> None:
        self.title = title
        self.findings: Tuple[PreflightFinding, ...] = tuple(
            sorted(findings, key=lambda one: _VERDICTS.index(one.verdict))
        )
        self.operators = operators
        self.stopped = stopped

    @property
    def ok(self) -> bool:
        """True if all operators were looked at, and none is unsupported or unknown."""
        return not (self.unsupported or self.unknown or self.stopped)

    @property
    def unsupported(self) -> Tuple[PreflightFinding, ...]:
        """Findings that have to be changed."""
        return self._of(UNSUPPORTED)

    @property
    def unknown(self) -> Tuple[PreflightFinding, ...]:
        """Findings without any fact, which does not mean that they run."""
        return self._of(UNKNOWN)

    @property
    def limited(self) -> Tuple[PreflightFinding, ...]:
        """Findings that run in PopTorch's own way."""
        return self._of(LIMITED)

    def as_dict(self) -> Dict[str, Any]:
        """Return the whole report, for JSON."""
        return {
            "title": self.title,
            "ok": self.ok,
            "poptorch": {"version": "3.4", "commit": COMMIT},
            "operators": self.operators,
            "stopped": self.stopped,
            "unsupported": [finding.as_dict() for finding in self.unsupported],
            "unknown": [finding.as_dict() for finding in self.unknown],
            "limited": [finding.as_dict() for finding in self.limited],
        }

    def __str__(self) -> str:
        counts = [(verdict, len(self._of(verdict))) for verdict in _VERDICTS]
        summary = ", ".join(f"{count} {verdict}" for verdict, count in counts if count)
        lines = [
            f"{self.title} for PopTorch 3.4: {'ok' if self.ok else 'not ready'}"
            f"{f' ({summary})' if summary else ''}, {self.operators} kinds of operators",
            "From PopTorch's published source and documentation; no IPU has run this.",
        ]
        for verdict in _VERDICTS:
            for number, finding in enumerate(self._of(verdict)):
                if not number:
                    lines += ["", verdict]
                lines += [f"  {line}" for line in str(finding).splitlines()]
        if self.stopped:
            lines += ["", f"Operators after this were not looked at: {self.stopped}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<PreflightReport of {self.title}: {'ok' if self.ok else 'not ready'}>"

    def _of(self, verdict: str) -> Tuple[PreflightFinding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == verdict)


def merged(findings: List[PreflightFinding]) -> Tuple[PreflightFinding, ...]:
    """Merge equal findings, and count each."""
    counted: Dict[PreflightFinding, int] = {}
    for finding in findings:
        counted[finding] = counted.get(finding, 0) + 1
    return tuple(dataclasses.replace(one, times=times) for one, times in counted.items())
