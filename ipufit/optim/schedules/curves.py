"""Curves of the learning rate over a whole run, by name: warm-up, then down to the last update."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Callable, Dict, Literal, Optional, Tuple, Type, Union

from ipufit.errors import ConfigurationError, UnknownNameError, unfit
from ipufit.utils import error_collector
from ipufit.utils.error_collector import SettingsRepr, at_least_or_none, one_of

DecayShape = Literal["cosine", "linear", "1-sqrt"]
CycleShape = Literal["cosine", "linear"]

# Longer than any run: for what is the same however long the run is.
ENDLESS = 2**62

# Numbers of curves, and the least that each may be.
_LEAST = {"final": 0.0, "power": 0.0, "div_factor": 1.0, "final_div_factor": 1.0}


class Curve(SettingsRepr, abc.ABC):
    """Multiplier of the learning rates of all parameter groups over the updates of one run.

    Attributes:
        warmup: updates, or a share of the run, over which the multiplier grows from 0.
        total: updates of the run; None takes those that ``fit`` makes.
    """

    warmup: Union[int, float]
    total: Optional[int]
    _needs_length = True

    def __post_init__(self) -> None:
        self._check_span("warmup")
        for name, least in _LEAST.items():
            if hasattr(self, name):
                self._check_number(name, least)
        total = at_least_or_none(f"total of {type(self).__name__}", self.total, 1)
        object.__setattr__(self, "total", total)

    @abc.abstractmethod
    def multiplier(self, update: int, length: int) -> float:
        """Return the factor of all learning rates in one update.

        Args:
            update: counted from 0; at ``length`` and later it is the value that the curve ends at.
            length: of the run, in updates.
        """

    @property
    def _depends_on_length(self) -> bool:
        """True if values before the last update depend on how long the run is."""
        return self._needs_length or isinstance(self.warmup, float)

    def _check_fit(self, length: int, unit: str) -> None:
        if self._updates(self.warmup, length) >= length:
            raise ConfigurationError(
                f"warmup of {self!r} must be shorter than the run, which is {length} {unit}, got "
                f"{self.warmup}. Pass fewer {unit}, or a share of the run such as warmup=0.1."
            )

    def _updates(self, span: Union[int, float], length: int) -> int:
        """Return a number of updates as it is; a share of them is rounded up."""
        if isinstance(span, float):
            return min(math.ceil(span * length), length - 1)
        return span

    def _check_span(self, name: str) -> None:
        """Refuse what is no number of updates and no share of the run."""
        value = getattr(self, name)
        needed = "a whole number of updates, or a share of the run as a float less than 1"
        updates = error_collector.whole_number(value)
        most = 1 if updates is None else math.inf
        words = (
            f"{name} of {type(self).__name__}",
            value,
            needed,
            lambda number: 0 <= number < most,
        )
        share = error_collector.number_in(*words, f"Write for example {name}=100, or {name}=0.1.")
        object.__setattr__(self, name, share if updates is None else updates)

    def _check_number(self, name: str, least: float) -> None:
        needed = f"a finite number of at least {least:g}"
        words = (f"{name} of {type(self).__name__}", getattr(self, name), needed)
        number = error_collector.number_in(*words, lambda number: least <= number < math.inf)
        object.__setattr__(self, name, number)


class _WarmedUp(Curve):
    """A curve that begins with a line from 0 to the optimizer's own learning rates."""

    def multiplier(self, update: int, length: int) -> float:
        """Return the factor of all learning rates in one update.

        Args:
            update: counted from 0; at ``length`` and later it is the value that the curve ends at.
            length: of the run, in updates.
        """
        warmup = self._updates(self.warmup, length)
        if update < warmup:
            return update / warmup
        # A run of warm-up alone is refused; here it would have nothing to divide by.
        return self._after_warmup(min(update, length) - warmup, max(1, length - warmup), length)

    @abc.abstractmethod
    def _after_warmup(self, update: int, span: int, length: int) -> float:
        """Return the multiplier so many updates after the warm-up, of a span of so many."""


@dataclasses.dataclass(frozen=True, repr=False)
class Constant(_WarmedUp):
    """The optimizer's own learning rates, after a linear warm-up.

    ``compile(lr_scheduler=...)`` takes it, and ``lr_scheduler="constant"`` stands for the default.
    The formula is that of ``get_constant_schedule_with_warmup`` of transformers.

    Attributes:
        warmup: updates over which the rate grows from 0, a whole number; or a share of the run, as
            a float less than 1.
        total: updates of the run, where ``fit`` can't know them; None takes those of ``fit``.

    Raises:
        ConfigurationError: a value can't work.
    """

    warmup: Union[int, float] = 0
    total: Optional[int] = None
    _needs_length = False

    def _after_warmup(self, update: int, span: int, length: int) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True, repr=False)
class Linear(_WarmedUp):
    """A linear warm-up, then a straight line down to the end of the run.

    ``compile(lr_scheduler=...)`` takes it, and ``lr_scheduler="linear"`` stands for the default.
    The formula is that of ``get_linear_schedule_with_warmup`` of transformers, and without warm-up
    of ``torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, final, total)``.

    Attributes:
        warmup: updates over which the rate grows from 0, a whole number; or a share of the run, as
            a float less than 1.
        final: where the line ends, as a share of the optimizer's own rate. It would be the rate of
            the update after the last one.
        total: updates of the run, where ``fit`` can't know them; None takes those of ``fit``.

    Raises:
        ConfigurationError: a value can't work.
    """

    warmup: Union[int, float] = 0
    final: float = 0.0
    total: Optional[int] = None

    def _after_warmup(self, update: int, span: int, length: int) -> float:
        return self.final + (1.0 - self.final) * ((span - update) / span)


@dataclasses.dataclass(frozen=True, repr=False)
class Cosine(_WarmedUp):
    """A linear warm-up, then half a wave of a cosine down to the end of the run.

    ``compile(lr_scheduler=...)`` takes it, and ``lr_scheduler="cosine"`` stands for the default.
    The formula is that of ``get_cosine_schedule_with_warmup`` of transformers, and without warm-up
    of ``torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total, final * lr)``.

    Attributes:
        warmup: updates over which the rate grows from 0, a whole number; or a share of the run, as
            a float less than 1.
        final: where the wave ends, as a share of the optimizer's own rate. It would be the rate of
            the update after the last one.
        total: updates of the run, where ``fit`` can't know them; None takes those of ``fit``.

    Raises:
        ConfigurationError: a value can't work.
    """

    warmup: Union[int, float] = 0
    final: float = 0.0
    total: Optional[int] = None

    def _after_warmup(self, update: int, span: int, length: int) -> float:
        return self.final + (1.0 - self.final) * _half_wave(update / span)


@dataclasses.dataclass(frozen=True, repr=False)
class Polynomial(_WarmedUp):
    """A linear warm-up, then a power of the share of the run that is left.

    ``compile(lr_scheduler=...)`` takes it, and ``lr_scheduler="polynomial"`` stands for the
    default. The formula is that of ``get_polynomial_decay_schedule_with_warmup`` of transformers
    with ``lr_end = final * lr``, and without warm-up of
    ``torch.optim.lr_scheduler.PolynomialLR(optimizer, total, power)``.

    Attributes:
        warmup: updates over which the rate grows from 0, a whole number; or a share of the run, as
            a float less than 1.
        power: the exponent, at least 0; 1 is a straight line.
        final: where the curve ends, as a share of the optimizer's own rate. It would be the rate of
            the update after the last one.
        total: updates of the run, where ``fit`` can't know them; None takes those of ``fit``.

    Raises:
        ConfigurationError: a value can't work.
    """

    warmup: Union[int, float] = 0
    power: float = 1.0
    final: float = 0.0
    total: Optional[int] = None

    def _after_warmup(self, update: int, span: int, length: int) -> float:
        return self.final + (1.0 - self.final) * math.pow(1.0 - update / span, self.power)


@dataclasses.dataclass(frozen=True, repr=False)
class WSD(_WarmedUp):
    """A linear warm-up, then the optimizer's own rates, then a decay at the end of the run.

    ``compile(lr_scheduler=...)`` takes it, and ``lr_scheduler="wsd"``, for warm-up, stable, decay,
    stands for the default. The formula is that of ``get_wsd_schedule`` of transformers, but that
    the warm-up begins at 0 whatever ``final`` is.

    Attributes:
        warmup: updates over which the rate grows from 0, a whole number; or a share of the run, as
            a float less than 1.
        decay: updates at the end of the run over which the rate falls, or their share of the run.
        shape: of the decay: "cosine", "linear" or "1-sqrt", which is one less the root of the
            decay's share that is over.
        final: where the decay ends, as a share of the optimizer's own rate. It would be the rate of
            the update after the last one.
        total: updates of the run, where ``fit`` can't know them; None takes those of ``fit``.

    Raises:
        ConfigurationError: a value can't work.
    """

    warmup: Union[int, float] = 0
    decay: Union[int, float] = 0.1
    shape: DecayShape = "cosine"
    final: float = 0.0
    total: Optional[int] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_span("decay")
        one_of("shape of WSD", self.shape, DecayShape)

    def _check_fit(self, length: int, unit: str) -> None:
        super()._check_fit(length, unit)
        warmup, decay = (self._updates(span, length) for span in (self.warmup, self.decay))
        if warmup + decay > length:
            raise ConfigurationError(
                f"warmup and decay of {self!r} must fit into the run, which is {length} {unit}, "
                f"got {warmup} and {decay}. Make one of them shorter."
            )

    def _after_warmup(self, update: int, span: int, length: int) -> float:
        decay = self._updates(self.decay, length)
        past = (update - (span - decay)) / decay if decay else 0.0
        return 1.0 if past <= 0 else self.final + (1.0 - self.final) * _SHAPES[self.shape](past)


def _half_wave(past: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * past))


def _line(past: float) -> float:
    return 1.0 - past


def _root(past: float) -> float:
    return 1.0 - math.sqrt(past)


_SHAPES: Dict[DecayShape, Callable[[float], float]] = {
    "cosine": _half_wave,
    "linear": _line,
    "1-sqrt": _root,
}


@dataclasses.dataclass(frozen=True, repr=False)
class OneCycle(Curve):
    """One cycle: the rate goes up to the optimizer's own, then far down; momentum the other way.

    ``compile(lr_scheduler=...)`` takes it, and ``lr_scheduler="one_cycle"`` stands for the default.
    The formula is that of ``torch.optim.lr_scheduler.OneCycleLR``, with the optimizer's own rates
    as ``max_lr``, ``warmup`` as ``pct_start`` and ``shape`` as ``anneal_strategy``.

    Attributes:
        warmup: updates over which the rate goes up, a whole number; or a share of the run, as a
            float less than 1.
        shape: of both ways: "cosine" or "linear".
        div_factor: the optimizer's own rate, divided by the first one.
        final_div_factor: the first rate, divided by the last one.
        momentum: of the highest and of the first and last rates: ``momentum``, or ``beta1`` of an
            optimizer with betas. None leaves it as the optimizer has it.
        total: updates of the run, where ``fit`` can't know them; None takes those of ``fit``.

    Raises:
        ConfigurationError: a value can't work.
    """

    warmup: Union[int, float] = 0.3
    shape: CycleShape = "cosine"
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    momentum: Optional[Tuple[float, float]] = (0.85, 0.95)
    total: Optional[int] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("shape of OneCycle", self.shape, CycleShape)
        if self.momentum is None:
            return
        pair = tuple(self.momentum) if isinstance(self.momentum, (tuple, list)) else ()
        pair = tuple(map(error_collector.as_float, pair))
        if len(pair) != 2 or not all(0 <= each < 1 for each in pair):
            needed = "two numbers of at least 0 and less than 1, or None"
            advice = "Write for example momentum=(0.85, 0.95)."
            raise unfit("momentum of OneCycle", needed, self.momentum, advice)
        object.__setattr__(self, "momentum", pair)

    def multiplier(self, update: int, length: int) -> float:
        """Return the factor of all learning rates in one update.

        Args:
            update: counted from 0; at ``length`` and later it is the value of the last one.
            length: of the run, in updates.
        """
        first = 1.0 / self.div_factor
        return self._between(update, length, first, 1.0, first / self.final_div_factor)

    def momentum_at(self, update: int, length: int) -> float:
        """Return momentum, or ``beta1``, in one update.

        Args:
            update: counted from 0; at ``length`` and later it is the value of the last one.
            length: of the run, in updates.
        """
        assert self.momentum is not None
        low, high = self.momentum
        return self._between(update, length, high, low, high)

    def _between(self, update: int, length: int, first: float, top: float, last: float) -> float:
        # As torch has it: the way up ends an update early, and is not rounded.
        up = self.warmup * length if isinstance(self.warmup, float) else self.warmup
        peak, end = up - 1.0, length - 1.0
        update = min(update, length - 1)
        begin, goal, past = first, top, update / peak if peak > 0 else 1.0
        if update > peak:
            begin, goal, past = top, last, (update - peak) / (end - peak)
        share = _SHAPES[self.shape](past)
        return goal + (begin - goal) * share


def resolve_length(curve: Curve, length: Optional[int], unit: str) -> int:
    """Find out how long the run is, and refuse a curve that does not fit into it.

    Args:
        curve: of the learning rates.
        length: of the run; None if nobody knows.
        unit: in which it is counted, "updates" or "epochs".

    Raises:
        ConfigurationError: it is unknown, is not ``total``, or leaves nothing after warm-up.
    """
    if length is None:
        length = curve.total
    elif curve.total is not None and curve.total != length:
        end = "early" if curve.total < length else "late"
        raise ConfigurationError(
            f"total of {curve!r} must be the length of the run, which is {length} {unit}, got "
            f"{curve.total}: the curve would end too {end}. Leave total out to use the length of "
            "the run, or change epochs of fit."
        )
    if length is None and curve._depends_on_length:
        raise ConfigurationError(
            f"lr_scheduler={curve!r} must know how many {unit} the run has, but the length of the "
            "data is unknown. Pass fit(steps_per_epoch=...), or data with __len__, or "
            f"{type(curve).__name__}(total=...)."
        )
    length = ENDLESS if length is None else length
    curve._check_fit(length, unit)
    return length


_NAMES: Dict[str, Type[Curve]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "one_cycle": OneCycle,
    "polynomial": Polynomial,
    "wsd": WSD,
}


def curve_by_name(name: str) -> Curve:
    """Make the curve of this name, with its defaults.

    Raises:
        UnknownNameError: there is none.
    """
    if name.lower() not in _NAMES:
        raise UnknownNameError("lr_scheduler", name, _NAMES)
    return _NAMES[name.lower()]()
