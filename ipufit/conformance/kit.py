"""What a case is, what it is given, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, List, NoReturn, Optional

import torch
from torch import Tensor

from ipufit.conformance.scenario import Scenario

__all__ = ["CASES", "Case", "Kit", "SkippedError", "judged", "open_question", "scenario"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One claim.

    Attributes:
        name: "group/what is claimed".
        question: of a case that is reported and not judged, what nobody could establish; "" else.
        scenario: a run that every implementation can make; None where the case asks about the
            PopTorch API itself.
        body: given a kit, does what the scenario does not.
        narrow: whether it asks what becomes of dtypes that the device has not.
    """

    name: str
    question: str = ""
    scenario: Optional[Scenario] = None
    body: Optional[Callable[[Kit], None]] = None
    narrow: bool = False


CASES: List[Case] = []


class SkippedError(Exception):
    """A case needs what is not there; the text says what."""


Body = Callable[["Kit"], None]


def judged(name: str, narrow: bool = False) -> Callable[[Body], Body]:
    """Make a function a case."""
    return open_question(name, "", narrow)


def open_question(name: str, question: str, narrow: bool = False) -> Callable[[Body], Body]:
    """Make a function a case that is reported and not judged."""

    def keep(body: Body) -> Body:
        CASES.append(Case(name, question, body=body, narrow=narrow))
        return body

    return keep


def scenario(name: str, question: str = "", **attributes: Any) -> None:
    """Make a scenario a case."""
    CASES.append(Case(name, question, Scenario(**attributes)))


class Kit:
    """What a case works with.

    Args:
        poptorch: the package that is examined.
        dtype: of computation.
        tolerance: of it; absolute, and relative to the largest magnitude expected.

    Attributes:
        error: the largest error of a number so far, relative to the largest magnitude expected
            where that is above 1.
        compared: whether there was one.
        faults: what was not as claimed, in words.
        notes: what was seen, in words.
    """

    def __init__(self, poptorch: Any, dtype: torch.dtype, tolerance: float) -> None:
        self.poptorch = poptorch
        self.dtype = dtype
        self.tolerance = tolerance
        self.error = 0.0
        self.compared = False
        self.faults: List[str] = []
        self.notes: List[str] = []

    def close(self, what: str, got: Any, wanted: Any, tolerance: Optional[float] = None) -> bool:
        """Claim that two tensors, or numbers, are equal up to rounding; whether they are."""
        tolerance = self.tolerance if tolerance is None else tolerance
        got, wanted = (torch.as_tensor(each).detach().double() for each in (got, wanted))
        if got.shape != wanted.shape:
            self.faults.append(f"{what}: shape {list(got.shape)}, not {list(wanted.shape)}")
            return False
        if not wanted.numel():
            return True
        scale = max(1.0, float(wanted.abs().max()))
        worst = float((got - wanted).abs().max()) / scale
        if math.isnan(worst):
            worst = math.inf
        self.error, self.compared = max(self.error, worst), True
        if worst <= tolerance:
            return True
        self.faults.append(f"{what}: {_show(got)}, not {_show(wanted)}")
        return False

    def equal(self, what: str, got: Any, wanted: Any) -> bool:
        """Claim that two things are the same; whether they are."""
        if got == wanted:
            return True
        self.faults.append(f"{what}: {got!r}, not {wanted!r}")
        return False

    def raises(
        self, what: str, call: Callable[[], Any], *, text: str = "", kind: Any = None
    ) -> None:
        """Claim that a call is refused.

        Args:
            text: what the message holds.
            kind: of the exception; None for ``poptorch.Error``.
        """
        try:
            call()
        except Exception as fault:
            wanted = self.poptorch.Error if kind is None else kind
            if not isinstance(fault, wanted) or text not in str(fault):
                self.faults.append(f"{what}: {type(fault).__name__}: {fault}")
        else:
            self.faults.append(f"{what}: was not refused")

    def skip(self, reason: str) -> NoReturn:
        """End the case: this machine can't do what it needs."""
        raise SkippedError(reason)

    def note(self, text: str) -> None:
        """Report something."""
        self.notes.append(text)

    # Making things.

    def options(self, **settings: Any) -> Any:
        """Options; ``device_iterations``, ``accumulation``, ``replicas``, ``mode``, ``seed``."""
        poptorch = self.poptorch
        options = poptorch.Options()
        options.showCompilationProgressBar(False)  # hundreds of bars would be in the table
        options.deviceIterations(settings.get("device_iterations", 1))
        options.replicationFactor(settings.get("replicas", 1))
        options.Training.gradientAccumulation(settings.get("accumulation", 1))
        if "mode" in settings:
            options.outputMode(getattr(poptorch.OutputMode, settings["mode"]))
        if "seed" in settings:
            options.randomSeed(settings["seed"])
        return options

    def rows(self, count: int, features: int = 3, start: int = 0) -> Tensor:
        """Numbers that repeat nowhere, shape (count, features)."""
        steps = torch.arange(start, start + count * features, dtype=torch.float64)
        return torch.sin(0.83 * steps * (1 + 0.01 * steps)).view(count, features).to(self.dtype)

    def linear(self, inputs: int = 3, outputs: int = 2) -> torch.nn.Linear:
        """A layer with weights that repeat nowhere."""
        layer = torch.nn.Linear(inputs, outputs).to(self.dtype)
        layer.weight.data = self.rows(outputs, inputs, 11) * 0.6
        layer.bias.data = self.rows(1, outputs, 5)[0] * 0.3
        return layer


def _show(tensor: Tensor) -> str:
    """Its first elements."""
    flat = [f"{value:.6g}" for value in tensor.flatten()[:4].tolist()]
    shown = ", ".join(flat) + (", ..." if tensor.numel() > 4 else "")
    return shown if not tensor.dim() else f"[{shown}]"
