"""Report of a preflight: statements about PopTorch 3.4, and changes that a model needs."""

from __future__ import annotations

import collections
import dataclasses
from typing import Dict, List, Optional, Tuple

from ipufit.engines.ipu.preflight import facts
from ipufit.tracing.source_map import Origin
from ipufit.utils.console import TextReport

_VERDICTS = (facts.UNSUPPORTED, facts.UNKNOWN, facts.LIMITED)


@dataclasses.dataclass(frozen=True)
class PreflightFinding:
    """A limit of PopTorch at one place of a model.

    Attributes:
        fact: PopTorch's statement, its source, and the cure.
        what: the operator, layer, setting or tensor.
        module: name of the module; "" for the model itself, "loss" for the loss, None if it belongs
            to no module.
        file: source file of the user that calls the operator or layer, or of torch for calls inside
            torch's layers; None if there is no such line.
        line: in that file.
        times: how often it occurs there.
    """

    fact: facts.Fact
    what: str
    module: Optional[str] = None
    file: Optional[str] = None
    line: Optional[int] = None
    times: int = 1

    @classmethod
    def at(cls, fact: facts.Fact, what: str, origin: Origin) -> PreflightFinding:
        """Make a finding about something that ran.

        Args:
            fact: what PopTorch says.
            what: the operator, layer, setting or tensor.
            origin: where it ran.
        """
        return cls(fact, what, origin.module, origin.file, origin.line)

    @property
    def verdict(self) -> str:
        """Either "not supported", "unknown" or "supported with limits"."""
        return self.fact.verdict

    @property
    def cure(self) -> str:
        """Advice; "" if nothing has to be done."""
        return self.fact.cure

    def as_dict(self) -> Dict[str, object]:
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


@dataclasses.dataclass(eq=False, repr=False)
class PreflightReport(TextReport):
    """Findings about a model, from PopTorch 3.4's published source and documentation.

    Nothing was verified on an IPU. :meth:`ipufit.Model.preflight` returns it, and ``print`` shows
    all findings. See docs/preflight.md.

    Each finding is a :class:`ipufit.PreflightFinding`, with a
    :class:`ipufit.engines.ipu.preflight.facts.Fact`.

    Args:
        title: class of the module.
        findings: ``ipufit.engines.ipu.preflight.PreflightFinding`` objects, in any order.
        operators: how many kinds of operators were checked.
        stopped: why operators after a certain one could not be checked; None if all were.
        warnings: what ``fit`` warns of on any engine: why the loss teaches little, and what to do.

    Attributes:
        title: class of the module.
        operators: how many kinds of operators were checked.
        stopped: why operators after a certain one could not be checked; None if all were.
        warnings: what ``fit`` warns of on any engine: why the loss teaches little, and what to do.
        findings: unsupported ones first, then unknown ones, then those with limits.
    """

    title: str
    findings: Tuple[PreflightFinding, ...]
    operators: int
    stopped: Optional[str] = None
    warnings: Tuple[str, ...] = ()

    def __post_init__(self) -> None:
        by_verdict = sorted(self.findings, key=lambda one: _VERDICTS.index(one.verdict))
        self.findings = tuple(by_verdict)

    @property
    def ok(self) -> bool:
        """True if all operators were checked, and none is unsupported or unknown."""
        return not (self.unsupported or self.unknown or self.stopped)

    @property
    def unsupported(self) -> Tuple[PreflightFinding, ...]:
        """Findings for which the model must be changed."""
        return self._of(facts.UNSUPPORTED)

    @property
    def unknown(self) -> Tuple[PreflightFinding, ...]:
        """Findings that PopTorch's sources do not mention, which may or may not run."""
        return self._of(facts.UNKNOWN)

    @property
    def limited(self) -> Tuple[PreflightFinding, ...]:
        """Findings that run with limits or differences."""
        return self._of(facts.LIMITED)

    def as_dict(self) -> Dict[str, object]:
        """Return the whole report, for JSON."""
        return {
            "title": self.title,
            "ok": self.ok,
            "poptorch": {"version": "3.4", "commit": facts.COMMIT},
            "operators": self.operators,
            "stopped": self.stopped,
            "warnings": list(self.warnings),
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
            "From PopTorch's published source and documentation; not verified on an IPU.",
        ]
        for verdict in _VERDICTS:
            for number, finding in enumerate(self._of(verdict)):
                if not number:
                    lines += ["", verdict]
                lines += [f"  {line}" for line in str(finding).splitlines()]
        if self.warnings:
            lines += ["", "on every engine", *(f"  {text}" for text in self.warnings)]
        if self.stopped:
            lines += ["", f"Operators after this were not checked: {self.stopped}"]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<PreflightReport of {self.title}: {'ok' if self.ok else 'not ready'}>"

    def _of(self, verdict: str) -> Tuple[PreflightFinding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict == verdict)


def merged(findings: List[PreflightFinding]) -> Tuple[PreflightFinding, ...]:
    """Merge equal findings, and count each."""
    counted = collections.Counter(findings)
    return tuple(dataclasses.replace(one, times=times) for one, times in counted.items())
