"""Everything ipufit raises on purpose.

::

    IpufitError
    ├── ConfigurationError (ValueError)   an argument that cannot work
    │   ├── PlanError                     the batch algebra does not fit; carries every fault
    │   ├── PartitionError                the module can't be divided over IPUs as asked
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

Every message has three beats: what was expected, what came, what to do. docs/troubleshooting.md
explains those that need more words, under headings with their texts.
"""

from __future__ import annotations

import dataclasses
import difflib
import reprlib
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

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
    "NonFiniteValue",
    "NotCompiledError",
    "Operand",
    "OptimizerError",
    "PartitionError",
    "PlanError",
    "ProcessError",
    "RecoverableDeviceError",
    "UnknownArgumentError",
    "UnknownNameError",
    "UnrecoverableDeviceError",
]


# Not public: how messages show values, and errors that others raise.


def shown(value: object) -> str:
    """Show a value in a message, cut where it is long; of an array its shape instead."""
    short = reprlib.Repr()
    short.maxlist = short.maxtuple = short.maxdict = 64
    short.maxstring = short.maxother = 80
    text, shape = short.repr(value), getattr(value, "shape", "")
    if isinstance(shape, tuple) and ("..." in text or "\n" in text):
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return text


def unfit(name: str, needed: str, value: object, advice: str = "") -> ConfigurationError:
    """Make the error for an argument: what is needed, what came, and a sentence on what to do."""
    return ConfigurationError(f"{name} must be {needed}, got {shown(value)}. {advice}".rstrip())


def first_line(error: object) -> str:
    """Return the first line of an error's text without its full stop; torch adds its C++ stack."""
    return str(error).strip().partition("\n")[0].rstrip(".")


def brief_error(error: BaseException) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}"


def describe_error(error: BaseException) -> str:
    """Return the class of an error and its whole text, without a full stop."""
    return f"{type(error).__name__}: {error}".rstrip(".: ")


class IpufitError(Exception):
    """Base of every error that ipufit raises on purpose.

    Each derives from the built-in exception that a caller may expect, too.

    Attributes:
        is_common: whether all processes of a run raise it, so none waits for another.
    """

    is_common: bool = False


class ConfigurationError(IpufitError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class PlanError(ConfigurationError):
    """The numbers of a plan don't fit together.

    Args:
        faults: one line per fault.
        suggestion: keyword arguments to put in place of the faulty ones.

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
    """A module can't be divided over IPUs in the requested way."""


class UnknownArgumentError(ConfigurationError, TypeError):
    """A method of ``Model`` has no argument of that name, or fewer positional arguments.

    The message says where the argument belongs.
    """


class UnknownNameError(ConfigurationError):
    """An unknown name of an optimizer, a loss, a metric or a module.

    Args:
        kind: what the name is for, such as "optimizer".
        name: the unknown name.
        known: the names that are known.
        hint: a sentence before the advice.
        is_typo: whether to suggest the most similar name.
        shown: number of similar names in the message, if there are more than twice as many; 0 shows
            all.

    Attributes:
        name: the unknown name.
        known: the names that are known, sorted.
        nearest: the most similar known name, or None if none is similar.
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
    """The loss is not one scalar, or does not depend on a trainable parameter."""


class MetricError(ConfigurationError):
    """A metric cannot take the module's outputs and the targets."""


class OptimizerError(ConfigurationError):
    """The optimizer does not belong to the module, or its update can't be traced."""


class NotCompiledError(IpufitError, RuntimeError):
    """``fit``, ``evaluate`` or ``predict`` was called before ``compile``."""


class DataError(IpufitError, ValueError):
    """A batch can't be used by the program. It is raised before the batch is used.

    Args:
        message: the whole message.
        what: its first part, if it is in parts.
        cure: its last part, if it is in parts.

    Attributes:
        what: the first part of the message, what is wrong; empty if the message has no parts.
        cure: what to do about it.
    """

    def __init__(self, message: str, *, what: str = "", cure: str = "") -> None:
        self.what = what
        self.cure = cure
        super().__init__(message)


class CaptureError(IpufitError, RuntimeError):
    """The module can't be turned into one program.

    Args:
        message: without the advice.
        file: of the user's source, or None.
        line: in that file, or None.
        cause: "value", "shape" or None.
        advice: advice that only applies to :class:`ipufit.Model`; the end of the message.
        function: function with the line, or None.
        kind: word for the kind of fault.
        what: the first part of the message, if it is in parts.
        cure: the last part of the message, if it is in parts.

    Attributes:
        file: the user's file in which it happened, or None when no user frame was on the stack.
        line: the line in that file.
        cause: "value" or "shape" if the recording needs a tensor's values to continue; otherwise
            None.
        brief: the message without the advice that only holds for :class:`ipufit.Model`.
        function: the function in that file, or None.
        kind: word for the kind of fault, such as "branch", as in
            :class:`ipufit.analysis.check.Finding`.
        what: the first part of the message, what is wrong; empty if the message has no parts.
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


NAN_ADVICE = (
    "Look for a learning rate that is too high, a log or division of zero, or non-finite data."
)


class NonFiniteLossError(IpufitError, ArithmeticError):
    """The loss became NaN or infinite.

    The weights, buffers and optimizer state are those from before the update named here.

    With ``compile(detect_nan=True)`` it is also raised for a gradient or a weight. With one process
    and the embedded engine, it says where the first such value came from. See docs/diagnosis.md.

    Args:
        message: the text.
        update: index of the weight update, or None.
        value: the loss.
        found: information about the first value that is not finite, or None.

    Attributes:
        update: index of the weight update, counted from 0 since ``compile``; None if the value is
            not the loss of an update.
        value: the loss.
        epoch: index of the epoch, set by the training loop.
        found: information about the first value that is not finite, as a
            :class:`ipufit.errors.NonFiniteValue`; None if it is not known.
        module: name of the module whose operator made it.
        operator: that operator, such as "aten.log.default".
        samples: rows of the micro-batch with such a value; () if they are not known.
        epoch_samples: the same in the order of the epoch, set by the training loop.
        rows: the same as rows of the data, set by ``fit``; () if they are not known.
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
        self.rows: Tuple[int, ...] = ()
        super().__init__(message)

    def place(
        self,
        epoch: int,
        before: int,
        rows: Callable[[List[int]], List[int]] = lambda places: [],
    ) -> None:
        """Set the place in the epoch.

        Args:
            epoch: its index.
            before: samples of the epoch before the execution.
            rows: returns the rows of the data at positions of the epoch; [] if they are not known.
        """
        self.epoch = epoch
        if self.found is None or not self.samples:
            return
        self.epoch_samples = tuple(before + self.found.offset + row for row in self.samples)
        self.rows = tuple(rows([*self.epoch_samples]))
        text = f"{self} In the order of epoch {epoch + 1}: {_first_few(self.epoch_samples)}"
        if self.rows:
            text += f"; row{'s' * (len(self.rows) > 1)} of the data: {_first_few(self.rows)}"
        self.args: Tuple[Any, ...] = (f"{text}.", *self.args[1:])


def _first_few(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return f"{', '.join(map(str, numbers[:8]))}{more}"


class ProcessError(IpufitError, RuntimeError):
    """Another process of the run has ended, has failed, or does something else."""


class DeviceError(IpufitError, RuntimeError):
    """The device, or the software that compiles and runs programs on it, fails.

    PopTorch's error is the ``__cause__``.
    """


class RecoverableDeviceError(DeviceError):
    """The device failed and can be used again after an action.

    Args:
        message: the text.
        action: as the attribute.

    Attributes:
        action: required action, in PopTorch's words: "IPU_RESET", "LINK_RESET", "PARTITION_RESET"
            or "FULL_RESET".
    """

    def __init__(self, message: str, action: str) -> None:
        self.action = action
        super().__init__(message)


class UnrecoverableDeviceError(DeviceError):
    """The device failed, and must be repaired before it is used again."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """Shape and range of a tensor that an operator was called with; not an error.

    Attributes:
        shape: its dimensions.
        minimum: of its finite elements; None if there are none.
        maximum: of its finite elements; None if there are none.
        nans: how many elements are NaN.
        infinities: how many elements are infinite.
    """

    shape: Tuple[int, ...]
    minimum: Optional[float]
    maximum: Optional[float]
    nans: int = 0
    infinities: int = 0

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape)) or "one number"
        values = "nothing finite"
        if self.minimum is not None and self.maximum is not None:
            values = f"{self.minimum:.6g} to {self.maximum:.6g}"
        more = [f"{self.nans} NaN"] if self.nans else []
        more += [f"{self.infinities} infinite"] if self.infinities else []
        return f"({size}): {', '.join([values, *more])}"


@dataclasses.dataclass(frozen=True)
class NonFiniteValue:
    """Origin of the first value that is not finite; not an error.

    It is ``found`` of a :class:`ipufit.errors.NonFiniteLossError`.

    Attributes:
        cause: "data" or "weights", if the inputs were not finite; "forward" or "backward", if an
            operator of that pass made it; "accumulation", if the gradients of the micro-batches are
            finite but their sum is not; "optimizer", if the gradient is finite but the new weights
            are not; "unknown", if the second run gave finite numbers.
        made: "nan" or "inf".
        replica: number of the replica, from 0.
        micro_batch: number of the replica's micro-batch in the update, from 0; in an evaluation,
            its number in the data.
        micro_batches: number of micro-batches in the update; 0 in an evaluation.
        module: name of the module, "" for the user's own and "loss" for the loss; None if it is not
            known.
        kind: class of the module.
        operator: such as "aten.log.default".
        file: of the user's line, or None.
        line: its number, or None.
        source: its text.
        samples: rows of the micro-batch with such a value; () if they are not known.
        offset: number of samples of the execution before the micro-batch.
        operands: the floating-point tensors that the operator was called with, each as an
            :class:`ipufit.errors.Operand`.
        parameter: name of the parameter or buffer whose gradient or value it is, if any.
    """

    cause: str
    made: str = "nan"
    replica: int = 0
    micro_batch: int = 0
    micro_batches: int = 1
    module: Optional[str] = None
    kind: str = ""
    operator: Optional[str] = None
    file: Optional[str] = None
    line: Optional[int] = None
    source: str = ""
    samples: Tuple[int, ...] = ()
    offset: int = 0
    operands: Sequence[Operand] = ()
    parameter: Optional[str] = None

    def describe(self) -> str:
        """Describe everything in sentences."""
        if self.cause == "optimizer":
            return (
                "The gradient was finite, so the value comes from the optimizer's step: check its "
                "learning rate and eps, and whether its state was finite before."
            )
        if self.cause == "accumulation":
            return (
                f"The gradient of each of the {self.micro_batches} micro-batches is finite, but "
                "their sum is not: use accumulation_dtype=torch.float32, or a smaller loss."
            )
        if self.cause == "unknown":
            return (
                "Running the update again operator by operator gave finite values everywhere: "
                "model.compare shows where the recorded program differs from the module."
            )
        if self.cause == "weights" and not self.micro_batches:
            cure = "with compile(detect_nan=True), fit says where that began."
            return f"{self.parameter!r} is not finite: {cure}"
        where = f"replica {self.replica}, micro-batch {self.micro_batch} of {self.micro_batches}"
        where = where if self.micro_batches else f"batch {self.micro_batch}"
        if self.cause == "weights":
            return f"The cause is older: {self.parameter!r} was not finite before, in {where}."
        if self.cause == "data":
            return (
                f"The data was not finite: {self.made} in {where}, {self.rows()}. Leave such "
                "samples out, or fill the missing values."
            )
        return f"{self._first()} in {where}. {self._values()}{self._cure()}"

    def _first(self) -> str:
        passes = "forward" if self.cause == "forward" else "backward"
        whose = "of an unknown module"
        if self.module == "loss":
            whose = "of the loss"
        elif self.module is not None:
            name = f"module {self.module!r}" if self.module else "the module itself"
            whose = f"of {name} ({self.kind})" if self.kind else f"of {name}"
        at = ""
        if self.file is not None:
            source = f": `{self.source}`" if self.source else ""
            at = f", at {self.file}:{self.line}{source},"
        back = "the gradient of " if self.cause == "backward" and self.file is not None else ""
        at = at.replace(", at ", f", {back}what is at ", 1) if back else at
        return f"The {passes} pass made the first {self.made}: {self.operator} {whose}{at}"

    def _values(self) -> str:
        text = ""
        if self.operands:
            text = f"Its operands were {'; '.join(map(str, self.operands))}. "
        if self.samples:
            text += f"It is in {self.rows()}. "
        return text

    def _cure(self) -> str:
        name = (self.operator or "").partition(".")[2].partition(".")[0]
        cures = [_CURES[row] for row in _CURES if {self.cause, name} <= {*row.split()}]
        return (cures or [_TOO_LARGE])[0]

    def rows(self) -> str:
        """The samples, as text."""
        if not self.samples:
            return "in values that do not belong to single samples"
        plural = "s" if len(self.samples) > 1 else ""
        return f"sample{plural} {_first_few(self.samples)} of the micro-batch"


# By pass and operators, why they make what is not finite, and what to do.
_CURES: Dict[str, str] = {
    "forward log log10 log1p log2 logit": (
        "A logarithm needs positive numbers: clamp its input, for example x.clamp(min=1e-6).log()."
    ),
    "forward div reciprocal rsqrt": (
        "Keep the divisor away from zero, for example with x / (y + 1e-6)."
    ),
    "forward acos acosh asin atanh pow sqrt": (
        "It is undefined for some numbers: clamp its input, for example x.clamp(min=0).sqrt()."
    ),
    "forward _log_softmax _softmax": (
        "A row is completely masked with -inf: keep at least one entry of each row."
    ),
    "backward div mul pow reciprocal rsqrt": (
        "A root, a norm or a logarithm has no gradient at zero: add a small number, for example (x "
        "+ 1e-12).sqrt()."
    ),
}
_TOO_LARGE = (
    "The numbers became too large: try a smaller learning rate, compile(..., "
    "clip=ipufit.Clip(global_norm=1.0)), or inputs of about unit size."
)
