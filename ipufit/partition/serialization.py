"""Number and places of the parts of a serialised layer, and the class that all such layers have."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, Sequence, Tuple

from torch import nn

from ipufit.errors import ConfigurationError

__all__ = [
    "MODES",
    "WHOLE",
    "Parts",
    "Serialization",
    "SerializedModule",
    "has_serialized_layers",
    "parts_of",
]

MODES = ("output_channels", "reducing_dim", "input_channels")


@dataclasses.dataclass(frozen=True)
class Serialization:
    """How one layer is serialised; either ``factor`` or ``splits_per_ipu`` is given.

    Attributes:
        factor: the number of parts, which stay on the layer's IPU.
        splits_per_ipu: the number of parts on each IPU of the pipeline, such as [0, 2, 2]; those
            that are not zero stand side by side.
        mode: of a Linear, what is cut: "output_channels" (rows of the weight), "reducing_dim"
            (its columns) or, by factor only, "input_channels" (rows of the input).
    """

    factor: Optional[int] = None
    splits_per_ipu: Optional[Sequence[int]] = None
    mode: str = "output_channels"


@dataclasses.dataclass(frozen=True)
class Parts:
    """A serialisation in normal form.

    Attributes:
        count: number of parts.
        per_ipu: how many lie on each IPU; None where they stay together.
        mode: one of ``MODES``.
    """

    count: int
    per_ipu: Optional[Tuple[int, ...]]
    mode: str

    @property
    def is_whole(self) -> bool:
        """True if nothing is cut, and nothing has a place."""
        return self.count == 1 and self.per_ipu is None

    @property
    def dim(self) -> int:
        """The dimension of the weight that is cut."""
        return 1 if self.mode == "reducing_dim" else 0

    @property
    def of_weight(self) -> int:
        """Into how many parts the weight is cut."""
        return 1 if self.mode == "input_channels" else self.count

    def ipu_of(self, part: int) -> Optional[int]:
        """The IPU on which a part lies; None where it is that of the layer."""
        if self.per_ipu is None:
            return None
        end = 0
        for ipu, count in enumerate(self.per_ipu):
            end += count
            if part < end:
                return ipu
        raise IndexError(part)

    @property
    def ipus(self) -> Tuple[int, ...]:
        """The IPUs on which parts lie; empty where they stay together."""
        return tuple(ipu for ipu, count in enumerate(self.per_ipu or ()) if count)

    def begins(self, part: int) -> bool:
        """True if this is the first part on its IPU."""
        return self.per_ipu is not None and (
            part == 0 or self.ipu_of(part) != self.ipu_of(part - 1)
        )

    def describe(self) -> str:
        """Write the number of parts as the user did."""
        if self.per_ipu is not None:
            return f"splits_per_ipu={list(self.per_ipu)}"
        return f"factor={self.count}"


WHOLE = Parts(1, None, "output_channels")


def parts_of(layer: str, given: Any) -> Parts:
    """Check what was said of a layer: a factor, a list of splits per IPU, or a Serialization.

    Raises:
        ConfigurationError: it says nothing, two things, or what can't work.
    """
    if isinstance(given, (list, tuple)):
        given = Serialization(splits_per_ipu=given)
    elif not isinstance(given, Serialization):
        given = Serialization(factor=given)
    factor, splits, mode = given.factor, given.splits_per_ipu, given.mode
    if (factor is None) == (splits is None):
        came = "neither" if factor is None else f"factor={factor} and splits_per_ipu={splits}"
        raise ConfigurationError(
            f"either factor or splits_per_ipu says into how many parts {layer!r} is cut, got "
            f"{came}. Give factor where all parts stay on one IPU, splits_per_ipu where each IPU "
            "gets some."
        )
    if mode not in MODES:
        raise ConfigurationError(
            f"the mode of {layer!r} must be one of {', '.join(map(repr, MODES))}, got {mode!r}."
        )
    if splits is not None:
        counts = _splits(layer, splits)
        if mode == "input_channels":
            raise ConfigurationError(
                f"splits_per_ipu of {layer!r} places parts of the weight, but "
                "mode='input_channels' cuts the input and leaves the weight whole. Give a factor, "
                "or another mode."
            )
        return Parts(sum(counts), counts, mode)
    if not isinstance(factor, int) or isinstance(factor, bool) or factor < 1:
        raise ConfigurationError(
            f"{layer!r} must be cut into a number of parts of at least 1, or by a list of splits "
            f"per IPU, got {factor!r}. Pass for example 4, or [2, 2]."
        )
    return Parts(factor, None, mode)


def _splits(layer: str, splits: Any) -> Tuple[int, ...]:
    def refused(rule: str, cure: str) -> ConfigurationError:
        return ConfigurationError(
            f"the splits per IPU of {layer!r} must {rule}, got {splits!r}. {cure}"
        )

    whole = isinstance(splits, (list, tuple)) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in splits
    )
    if not whole:
        raise refused(
            "be a list of numbers of at least 0, one for each IPU", "Pass for example [2, 2]."
        )
    used = [ipu for ipu, count in enumerate(splits) if count]
    if not used:
        raise refused("have at least one part on some IPU", "Leave the layer out to keep it whole.")
    if used[-1] - used[0] + 1 != len(used):
        raise refused(
            "stand on IPUs side by side, without a zero between them",
            f"Move them together, such as {_together(splits, used[0])}.",
        )
    return tuple(splits)


def _together(splits: Sequence[int], first: int) -> Any:
    counts = [count for count in splits if count]
    return [0] * first + counts + [0] * (len(splits) - first - len(counts))


class SerializedModule(nn.Module):
    """Base class of all serialised layers."""


def has_serialized_layers(module: nn.Module) -> bool:
    """True if a layer of the module is serialised."""
    return any(isinstance(layer, SerializedModule) for layer in module.modules())
