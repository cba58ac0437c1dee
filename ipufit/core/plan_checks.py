"""The checks of :meth:`ipufit.core.plan.Plan.make`: every fault, with the nearest valid value."""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from functools import partial
from typing import Any, Callable, Dict, List, Optional

from ipufit.errors import PlanError

__all__ = ["Checks", "check_filling", "round_up"]

# The arguments in the order in which their faults are told, in the words of who typed them.
_WORDS = {
    "micro_batch_size": "`batch_size` of the loader",
    "ipus": "`ipus`, the total number of IPUs,",
    "device_iterations": "`device_iterations`",
    "gradient_accumulation": "`gradient_accumulation`",
    "stages": "`stages`",
    "samples": "`samples`",
    "dropped": "`dropped`",
    "fixed_updates": "`fixed_updates`",
    "auto_round_ipus": "`auto_round_ipus`",
    "processes": "`processes`",
    "process": "`process`, which counts from 0,",
}


class Checks:
    """Collects faults; every check gives back a valid value, so that the next ones can go on."""

    def __init__(self) -> None:
        self.faults: Dict[str, str] = {}
        self.fixes: Dict[str, object] = {}

    def raise_faults(self) -> None:
        """Raise one PlanError with everything found, if anything was."""
        if self.faults:
            raise PlanError([self.faults[n] for n in _WORDS if n in self.faults], self.fixes)

    def fault(self, name: str, rest: str, **fix: object) -> None:
        """Note a fault of an argument, and the arguments that would mend it."""
        self.faults[name] = f"{_WORDS[name]} must be {rest}"
        self.fixes.update(fix)

    def number(
        self, name: str, value: Any, rule: str, nearest: Callable[[int], List[int]], hint: str = ""
    ) -> int:
        """The value if ``nearest`` leaves it alone, otherwise a fault and the nearest valid one."""
        whole = _as_int(value)
        near = _near(value) if whole is None else [whole]
        valid = sorted({choice for n in near for choice in nearest(n)})
        if whole is not None and valid == [whole]:
            return whole
        best = min(valid, key=lambda choice: sum(abs(choice - n) for n in near))
        choices = " or ".join(map(str, valid)) + hint
        if whole is None:
            self.fault(name, f"{rule}. {_kind(value)}, write {choices}.", **{name: best})
        else:
            self.fault(name, f"{rule}, got {whole}. Try {choices}.", **{name: best})
        return best

    def count(self, name: str, value: Any, least: int = 1) -> int:
        """A whole number of at least ``least``."""
        rule = "a positive whole number" if least else "a whole number of at least 0"
        return self.number(name, value, rule, lambda n: [max(n, least)])

    def flag(self, name: str, value: object) -> bool:
        """True or False, nothing that only counts as one."""
        if not isinstance(value, bool):
            self.fault(name, f"a bool. {_kind(value)}, write True or False.", **{name: False})
        return value is True

    def accumulation(self, value: Any, training: bool, pipeline: int = 1) -> int:
        """Check that a training pipeline of so many stages is filled; 1 in inference."""
        if training and pipeline > 1:
            least = 2 * pipeline - 1
            rule = (
                f"at least {least} to fill a training pipeline of {pipeline} stages, forward and "
                "back"
            )
            return self.number("gradient_accumulation", value, rule, lambda n: [max(n, least)])
        if training:
            return self.count("gradient_accumulation", value)
        rule = "1 in evaluate and predict, which make no updates"
        return self.number("gradient_accumulation", value, rule, lambda n: [1])

    def iterations(self, value: Any, training: bool, pipeline: int = 1) -> int:
        """Check that an inference pipeline of so many stages is filled."""
        if training or pipeline == 1:
            return self.count("device_iterations", value)
        rule = f"at least {pipeline} to fill a pipeline of {pipeline} stages"
        return self.number("device_iterations", value, rule, lambda n: [max(n, pipeline)])

    def ipus(self, value: Any, stages: int, rounding: bool) -> int:
        """Check the total number of IPUs, and say where ``auto_round_ipus=True`` would help."""
        total = stages if value is None else _as_int(value)
        # No power of two is a multiple of three: then only rounding up can help.
        stuck = not rounding and stages != round_up(stages)
        rule = "a power of two" + (f" that stages={stages} divides" if stages > 1 else "")
        if rounding:
            rule = f"a multiple of stages={stages}" if stages > 1 else "a positive whole number"
        hint = ""
        if stuck:
            rule, hint = f"{rule} (there is none)", " with auto_round_ipus=True"
        if total is not None and total > 0 and total % stages == 0:
            reserved = round_up(total)
            idle = f"auto_round_ipus=True to reserve {reserved} and leave {reserved - total} idle"
            if stuck:
                came = total if value is not None else f"None, which means {total}"
                self.fault("ipus", f"{rule}, got {came}. Try {idle}.", auto_round_ipus=True)
                return total
            hint = f", or {idle}"
        if value is None:
            return stages
        if stuck:
            self.fixes["auto_round_ipus"] = True
        return self.number("ipus", value, rule, partial(_nearest_ipus, stages, rounding), hint)


def check_filling(accumulation: int, iterations: int, training: bool, stages: int) -> None:
    """Hold a plan against a pipeline whose number of stages was not known before.

    Args:
        accumulation: micro-batches of an update.
        iterations: device iterations.
        training: whether it trains.
        stages: of the forward pass.

    Raises:
        PlanError: the pipeline is not filled; with the smallest number that fills it.
    """
    check = Checks()
    check.accumulation(accumulation, training, stages)
    check.iterations(iterations, training, stages)
    check.raise_faults()


def _nearest_ipus(stages: int, rounding: bool, total: int) -> List[int]:
    """The valid totals around ``total``, itself alone if it is one.

    A power of two is a multiple of every smaller one. Where stages is not a power of two, multiples
    of it are offered, and the caller adds auto_round_ipus=True.
    """
    total = max(total, stages)
    if rounding or stages != round_up(stages):
        below = total // stages * stages
        return [below] if below == total else [below, below + stages]
    above = round_up(total)
    return [above] if above == total else [above // 2, above]


def round_up(count: int) -> int:
    """The power of two that is ``count`` or the next one above it."""
    return 1 << (count - 1).bit_length()


def _as_int(value: Any) -> Optional[int]:
    """The value as an int, or None where it is not a whole number: floats and bools are not."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return int(operator.index(value))
    except TypeError:
        return None


def _near(value: object) -> List[int]:
    """The whole numbers around what should have been an int; [1] where nothing says which."""
    try:
        number = float(value) if isinstance(value, (str, numbers.Real)) else math.nan
        return sorted({math.floor(number), math.ceil(number)})
    except (ValueError, OverflowError):
        return [1]


def _kind(value: object) -> str:
    if value is None:
        return "None is not allowed"
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    return f"{reprlib.repr(value)} is {article} {name}"
