"""Cases, their registration, and the tools that they work with."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from types import ModuleType
from typing import Any, Callable, List, NoReturn, Optional, Type

import torch
from torch import Tensor

from ipufit.conformance.scenario import Scenario


@dataclasses.dataclass(frozen=True)
class Case:
    """One claim about an implementation.

    Attributes:
        name: "group/what is claimed".
        question: for a case that is reported and not judged, the unsettled question; "" else.
        scenario: a run that every implementation can make; None where the case examines the
            PopTorch API itself.
        body: takes a kit, and checks the claim where there is no scenario.
        narrow: whether it examines what becomes of dtypes that the device has not.
    """

    name: str
    question: str = ""
    scenario: Optional[Scenario] = None
    body: Optional[Callable[[Kit], None]] = None
    narrow: bool = False


CASES: List[Case] = []


class SkippedError(Exception):
    """A case needs something that is missing, which the text names."""


Body = Callable[["Kit"], None]


def judged(name: str, narrow: bool = False) -> Callable[[Body], Body]:
    """Register a function as a case."""
    return open_question(name, "", narrow)


def open_question(name: str, question: str, narrow: bool = False) -> Callable[[Body], Body]:
    """Register a function as a case that is reported and not judged."""

    def keep(body: Body) -> Body:
        CASES.append(Case(name, question, body=body, narrow=narrow))
        return body

    return keep


def scenario(name: str, question: str = "", **attributes: Any) -> None:
    """Register a scenario as a case."""
    CASES.append(Case(name, question, Scenario(**attributes)))


class FunctionModule(torch.nn.Module):
    """A function as a module.

    Args:
        body: gets the inputs, and before them the module itself where that has parts.
        parts: attributes of the module, such as layers and parameters; a tensor is a buffer.
    """

    def __init__(self, body: Callable[..., Any], **parts: object) -> None:
        super().__init__()
        self.body = body
        self.has_parts = bool(parts)
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        """Call the function."""
        return self.body(self, *inputs) if self.has_parts else self.body(*inputs)


class Regression(torch.nn.Module):
    """A layer; with a target, its loss too."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, y: Optional[Tensor] = None) -> Any:
        """Return the prediction; with a target, the loss beside it."""
        out = self.layer(x)
        return out if y is None else (out, torch.nn.functional.mse_loss(out, y))


class Kit:
    """Tools and results of one case.

    Args:
        poptorch: the package that is examined; None where there is only an engine.
        dtype: dtype of computation.
        tolerance: tolerance of results; absolute, and relative to the largest magnitude expected.

    Attributes:
        error: the largest error of a number so far, relative to the largest magnitude expected
            where that is above 1.
        compared: whether a number was compared.
        faults: claims that failed, in words.
        notes: observations, in words.
    """

    def __init__(
        self, poptorch: Optional[ModuleType], dtype: torch.dtype, tolerance: float
    ) -> None:
        self._poptorch = poptorch
        self.dtype = dtype
        self.tolerance = tolerance
        self.error = 0.0
        self.compared = False
        self.faults: List[str] = []
        self.notes: List[str] = []
        self._models = contextlib.ExitStack()

    @property
    def poptorch(self) -> ModuleType:
        """The package that is examined."""
        assert self._poptorch is not None, "an engine alone runs nothing but scenarios"
        return self._poptorch

    def close(
        self, what: str, got: object, wanted: object, tolerance: Optional[float] = None
    ) -> bool:
        """Claim that two tensors, or numbers, are equal up to rounding, and return the answer."""
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

    def equal(self, what: str, got: object, wanted: object) -> bool:
        """Claim that two things are equal, and return the answer."""
        if got == wanted:
            return True
        self.faults.append(f"{what}: {got!r}, not {wanted!r}")
        return False

    def raises(
        self,
        what: str,
        call: Callable[[], object],
        *,
        text: str = "",
        kind: Optional[Type[Exception]] = None,
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
        """End the case, because this machine can't run it."""
        raise SkippedError(reason)

    def note(self, text: str) -> None:
        """Report an observation."""
        self.notes.append(text)

    # Making things.

    def options(self, **settings: object) -> Any:
        """Return options.

        Args:
            settings: ``device_iterations``, ``accumulation``, ``replicas``, ``mode`` and ``seed``.
        """
        poptorch = self.poptorch
        options = poptorch.Options()
        options.showCompilationProgressBar(False)  # hundreds of bars would be in the table
        options.deviceIterations(settings.get("device_iterations", 1))
        options.replicationFactor(settings.get("replicas", 1))
        options.Training.gradientAccumulation(settings.get("accumulation", 1))
        if "mode" in settings:
            options.outputMode(getattr(poptorch.OutputMode, str(settings["mode"])))
        if "seed" in settings:
            options.randomSeed(settings["seed"])
        return options

    def inference(
        self, module: Callable[..., Any], options: object = None, **settings: object
    ) -> Any:
        """Wrap a module for inference; it is destroyed when the case ends.

        Args:
            module: what is called; a function of tensors is made one.
            options: None for those of the settings.
            settings: those of ``options``.
        """
        used = self.options(**settings) if options is None else options
        if not isinstance(module, torch.nn.Module):
            module = FunctionModule(module)
        model = self.poptorch.inferenceModel(module, used)
        self._models.callback(model.destroy)
        return model

    def training(self, module: object, optimizer: object = None, **settings: object) -> Any:
        """Wrap a module for training; it is destroyed when the case ends."""
        model = self.poptorch.trainingModel(module, self.options(**settings), optimizer)
        self._models.callback(model.destroy)
        return model

    def destroy_models(self) -> None:
        """Destroy the models that the case has made."""
        self._models.close()

    def infer(self, body: Callable[..., Any], *inputs: Tensor, **settings: object) -> Any:
        """Call a function once as an inference model; settings are those of ``options``."""
        model = self.poptorch.inferenceModel(FunctionModule(body), self.options(**settings))
        try:
            return model(*inputs)
        finally:
            model.destroy()

    def rows(self, count: int, features: int = 3, start: int = 0) -> Tensor:
        """Return numbers that repeat nowhere, shape (count, features)."""
        steps = torch.arange(start, start + count * features, dtype=torch.float64)
        return torch.sin(0.83 * steps * (1 + 0.01 * steps)).view(count, features).to(self.dtype)

    def linear(self, inputs: int = 3, outputs: int = 2) -> torch.nn.Linear:
        """Return a layer with weights that repeat nowhere."""
        layer = torch.nn.Linear(inputs, outputs).to(self.dtype)
        layer.weight.data = self.rows(outputs, inputs, 11) * 0.6
        layer.bias.data = self.rows(1, outputs, 5)[0] * 0.3
        return layer


def _show(tensor: Tensor) -> str:
    """Format a tensor's first elements."""
    flat = [f"{value:.6g}" for value in tensor.flatten()[:4].tolist()]
    shown = ", ".join(flat) + (", ..." if tensor.numel() > 4 else "")
    return shown if not tensor.dim() else f"[{shown}]"
