"""Everything ipufit raises on purpose.

::

    IpufitError
    ├── ConfigurationError (ValueError)   an argument that cannot work
    │   ├── PlanError                     the batch algebra does not fit; carries every fault
    │   ├── UnknownArgumentError (TypeError)  an argument that the method does not have
    │   ├── UnknownNameError              a misspelt optimizer, loss or metric; carries the nearest
    │   ├── LossError                     the loss can't be differentiated or reduced
    │   ├── MetricError                   a metric can't take the outputs and targets
    │   └── OptimizerError                the optimizer can't be traced or doesn't fit the module
    ├── NotCompiledError (RuntimeError)   fit, evaluate or predict before compile
    ├── DataError (ValueError)            a batch that cannot be fed; nothing of it was used
    ├── CaptureError (RuntimeError)       the module can't become one program; carries file and line
    ├── CheckpointError (RuntimeError)    a checkpoint can't be written or read; nothing was changed
    ├── NonFiniteLossError (ArithmeticError)  NaN or infinity; carries the update
    ├── ProcessError (RuntimeError)       another process of the run has gone, failed or disagrees
    └── DeviceError (RuntimeError)        the device, or what drives it, refuses or fails
        ├── RecoverableDeviceError        it can be used again; carries the action
        └── UnrecoverableDeviceError      someone has to look at it

Every message has three beats: what was expected, what came, what to do.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Dict, Iterable, Optional, Sequence, Tuple

if TYPE_CHECKING:
    from ipufit.diagnose.nan import NonFiniteValue

__all__ = [
    "CaptureError",
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DeviceError",
    "IpufitError",
    "LossError",
    "MetricError",
    "NonFiniteLossError",
    "NotCompiledError",
    "OptimizerError",
    "PartitionError",
    "PlanError",
    "ProcessError",
    "RecoverableDeviceError",
    "UnknownArgumentError",
    "UnknownNameError",
    "UnrecoverableDeviceError",
]


class IpufitError(Exception):
    """Base of every error that ipufit raises on purpose.

    Attributes:
        is_common: whether all processes of a run raise it, and none waits for another.
    """

    is_common = False


class ConfigurationError(IpufitError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class PlanError(ConfigurationError):
    """The batch algebra does not fit together.

    Attributes:
        faults: one line per fault, all of them, in the order of the arguments.
        suggestion: keyword arguments that, put in place of the faulty ones, are accepted.
    """

    def __init__(
        self, faults: Sequence[str], suggestion: Optional[Dict[str, object]] = None
    ) -> None:
        self.faults: Tuple[str, ...] = tuple(faults)
        self.suggestion: Dict[str, object] = dict(suggestion or {})
        super().__init__("\n".join(self.faults))


class PartitionError(ConfigurationError):
    """A module can't be divided over IPUs in the way that was asked for."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """A method has no argument of that name, or not so many by position."""


class UnknownNameError(ConfigurationError):
    """A name that ipufit does not know.

    Attributes:
        name: the name that came.
        known: the names that are known, sorted.
        nearest: the most similar known name, or None if nothing is near.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        hint: str = "",
        is_typo: bool = True,
        shown: int = 0,
    ) -> None:
        self.name = name
        self.known: Tuple[str, ...] = tuple(sorted(known))
        folded = {k.lower().replace("_", ""): k for k in self.known}
        near = difflib.get_close_matches(
            name.lower().replace("_", ""), list(folded) if is_typo else [], n=1, cutoff=0.6
        )
        self.nearest: Optional[str] = folded[near[0]] if near else None
        advice = f"Did you mean {self.nearest!r}? " if self.nearest else ""
        told = f"Known names: {', '.join(self.known)}."
        if shown and len(self.known) > 2 * shown:
            # A large module has hundreds.
            alike = difflib.get_close_matches(name, self.known, n=shown, cutoff=0.0)
            told = f"Nearest of {len(self.known)} names: {', '.join(alike)}."
        super().__init__(f"unknown {kind} {name!r}. {hint}{advice}{told}")


class LossError(ConfigurationError):
    """The loss is not one scalar, or no trainable parameter feeds it."""


class MetricError(ConfigurationError):
    """A metric cannot take the module's outputs and the targets."""


class OptimizerError(ConfigurationError):
    """The optimizer does not belong to the module, or its update can't be traced."""


class NotCompiledError(IpufitError, RuntimeError):
    """``fit``, ``evaluate`` or ``predict`` was called before ``compile``."""


class DataError(IpufitError, ValueError):
    """A batch that cannot be fed to the program. It is raised before the batch is used.

    Attributes:
        what: the first part of the message, what is wrong; empty where it is not in parts.
        cure: what to do about it.
    """

    def __init__(self, message: str, *, what: str = "", cure: str = "") -> None:
        self.what = what
        self.cure = cure
        super().__init__(message)


class CaptureError(IpufitError, RuntimeError):
    """The module can't be turned into one program.

    Attributes:
        file: the user's file in which it happened, or None when no user frame was on the stack.
        line: the line in that file.
        cause: "value" or "shape" where the program would have to know a tensor's values to go on;
            None for anything else.
        brief: the message without the advice that only holds for :class:`ipufit.Model`.
        function: the function in that file, or None.
        kind: a word for what it is, such as "branch", as :class:`ipufit.diagnose.Finding` has it.
        what: the first part of the message, what is wrong; empty where it is not in parts.
        cure: the last part, what to write instead.
    """

    def __init__(
        self,
        message: str,
        file: Optional[str] = None,
        line: Optional[int] = None,
        cause: Optional[str] = None,
        advice: str = "",
        *,
        function: Optional[str] = None,
        kind: str = "capture",
        what: str = "",
        cure: str = "",
    ) -> None:
        self.file = file
        self.line = line
        self.cause = cause
        self.brief = message
        self.function = function
        self.kind = kind
        self.what = what
        self.cure = cure
        super().__init__(f"{message} {advice}".rstrip())


class CheckpointError(IpufitError, RuntimeError):
    """A checkpoint that can't be written, or can't be read; nothing was changed."""


class NonFiniteLossError(IpufitError, ArithmeticError):
    """The loss became NaN or infinite.

    The weights, buffers and optimizer state are those from before the update named here.

    With ``compile(detect_nan=True)`` it is raised for a gradient or a weight as well, and says
    where the first such value came from.

    Attributes:
        update: index of the weight update, counted from 0 over the life of the compiled model; None
            when it is another value than the loss of an update.
        value: the loss that came.
        epoch: index of the epoch, set by the training loop.
        found: all that is known of the first value that is not finite; None without ``detect_nan``.
        module: name of the module whose operator made it.
        operator: that operator, such as "aten.log.default".
        samples: rows of the micro-batch with such a value; () where they can't be told.
        epoch_samples: the same in the order of the epoch, set by the training loop.
    """

    def __init__(
        self,
        message: str,
        update: Optional[int],
        value: float,
        found: Optional[NonFiniteValue] = None,
    ) -> None:
        self.update = update
        self.value = value
        self.epoch: Optional[int] = None
        self.found = found
        self.module: Optional[str] = None if found is None else found.module
        self.operator: Optional[str] = None if found is None else found.operator
        self.samples: Tuple[int, ...] = () if found is None else found.samples
        self.epoch_samples: Tuple[int, ...] = ()
        super().__init__(message)

    def place(self, epoch: int, before: int) -> None:
        """Say where in the epoch it happened.

        Args:
            epoch: its index.
            before: samples of the epoch before the execution.
        """
        self.epoch = epoch
        if self.found is None or not self.samples:
            return
        self.epoch_samples = tuple(before + self.found.offset + row for row in self.samples)
        shown = ", ".join(map(str, self.epoch_samples[:8]))
        self.args: Tuple[Any, ...] = (
            f"{self} In the order of epoch {epoch}: {shown}.",
            *self.args[1:],
        )


class ProcessError(IpufitError, RuntimeError):
    """Another process of the run has gone, has failed, or does not do the same."""


class DeviceError(IpufitError, RuntimeError):
    """The device, or what compiles and runs programs on it, refuses or fails.

    What PopTorch said is the ``__cause__``.
    """


class RecoverableDeviceError(DeviceError):
    """The device failed and can be used again after an action.

    Attributes:
        action: what has to be done first, in PopTorch's words: "IPU_RESET", "LINK_RESET",
            "PARTITION_RESET" or "FULL_RESET".
    """

    def __init__(self, message: str, action: str) -> None:
        self.action = action
        super().__init__(message)


class UnrecoverableDeviceError(DeviceError):
    """The device failed, and has to be looked at before it is used again."""
