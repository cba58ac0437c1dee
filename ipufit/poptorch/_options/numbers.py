"""Options about number formats, and withdrawn ones about tracing."""

from __future__ import annotations

import torch

from ipufit.poptorch import enums
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.group import OptionGroup, need_type
from ipufit.poptorch._options.popart import _PopartOptions

__all__ = ["_JitOptions", "_PrecisionOptions"]


def _withdrawn(call: str, reason: str) -> None:
    logger.warning("[Deprecated] options.%s() will be removed: %s Delete the call.", call, reason)


class _JitOptions(OptionGroup):
    """Withdrawn options of PopTorch's former tracer: ``options.Jit``."""

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Accept False; the option is withdrawn.

        Raises:
            ValueError: it is True.
        """
        _withdrawn("Jit.traceModel", "models are recorded as they run.")
        if trace_model:
            raise ValueError(
                "options.Jit.traceModel(True) is no longer supported. Delete the call: models are "
                "recorded as they run."
            )
        return self


class _PrecisionOptions(OptionGroup):
    """Number formats and floating-point exceptions: ``options.Precision``."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        self._popart_options = popart_options
        super().__init__()

    def halfFloatCasting(
        self, half_float_casting: enums.HalfFloatCastingBehavior
    ) -> _PrecisionOptions:
        """Accept a withdrawn option: operators promote as in torch."""
        _withdrawn("Precision.halfFloatCasting", "half and float mix as in torch.")
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        """Accept a withdrawn option: statistics have the type that the module gives them.

        Raises:
            ValueError: it is not a bool.
        """
        if not isinstance(value, bool):
            raise ValueError(
                "runningStatisticsAlwaysFloat needs to be set to a bool, got "
                f"{value!r}. Delete the call: statistics keep the module's type."
            )
        _withdrawn(
            "Precision.runningStatisticsAlwaysFloat", "statistics have the type of the module's."
        )
        return self

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        """Stop where a computation makes NaN, divides by zero or overflows.

        Raises:
            AssertionError: it is not a bool.
        """
        if not isinstance(enabled, bool):
            raise AssertionError(
                f"enableFloatingPointExceptions needs to be set to a bool, got {enabled!r}."
            )
        self._popart_options.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        """Round to half at random, right on average. This engine rounds to nearest."""
        need_type("enableStochasticRounding", enabled, bool)
        self._popart_options.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Set the type of partial sums in products and convolutions; torch chooses it here.

        It replaces what ``Training.setConvolutionDithering`` has set, and the other way round.

        Raises:
            ValueError: neither ``torch.float`` nor ``torch.half``.
        """
        names = {torch.float32: "float", torch.float16: "half"}
        if not isinstance(dtype, torch.dtype) or dtype not in names:
            raise ValueError(
                "parameter to setPartialsType should be either torch.float or torch.half, "
                f"got {dtype!r}."
            )
        self._popart_options.set("partialsTypeMatMuls", names[dtype])
        self._popart_options.set("convolutionOptions", {"partialsType": names[dtype]})
        return self
