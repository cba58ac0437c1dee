"""Result of ``Model.check_invariance``."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Tuple

__all__ = ["InvarianceCause", "InvarianceReport", "InvarianceSetting"]


@dataclasses.dataclass(frozen=True)
class InvarianceSetting:
    """One way of making updates of the same samples, and what came of it.

    Attributes:
        batch_size: samples of a micro-batch.
        gradient_accumulation, replicas, device_iterations: as of ``fit``.
        loss: mean over the updates.
        loss_difference: from that of the first setting.
        difference: of the weights after the updates from those of the first setting: the largest
            one, of the largest magnitude in its tensor.
        parameter: the one with that difference.
        ok: whether all is within the tolerance.
    """

    batch_size: int
    gradient_accumulation: int
    replicas: int
    device_iterations: int
    loss: float
    loss_difference: float = 0.0
    difference: float = 0.0
    parameter: str = ""
    ok: bool = True


@dataclasses.dataclass(frozen=True)
class InvarianceCause:
    """A reason why results depend on how an update is divided.

    Attributes:
        module: name of the module, "" for the user's own, "loss" for the loss.
        kind: "batch", if rows depend on the other rows of the micro-batch; "random", if numbers are
            drawn; "sum", if the loss adds where a mean is wanted, or the reverse; "loss", if it
            looks at several samples at once; "unknown".
        text: what was seen.
        cure: what to do.
    """

    module: str
    kind: str
    text: str
    cure: str

    def __str__(self) -> str:
        return f"{self.text} {self.cure}"


@dataclasses.dataclass(frozen=True)
class InvarianceReport:
    """Result of updates with the same samples, divided in several ways.

    Attributes:
        settings: what was tried; the first has all samples in one micro-batch.
        causes: what breaks it; empty if nothing does.
        samples: of each update.
        updates: made with each setting.
        dtype: in which it was computed.
    """

    settings: Tuple[InvarianceSetting, ...]
    causes: Tuple[InvarianceCause, ...]
    samples: int
    updates: int
    dtype: str

    @property
    def ok(self) -> bool:
        """True if all settings agree."""
        return all(setting.ok for setting in self.settings)

    def as_dict(self) -> Dict[str, Any]:
        """Return the report as plain numbers, texts, lists and dicts."""
        values = dataclasses.asdict(self)
        values["settings"] = [dataclasses.asdict(each) for each in self.settings]
        values["causes"] = [dataclasses.asdict(each) for each in self.causes]
        return {"ok": self.ok, **values}

    def __str__(self) -> str:
        head = ("batch_size", "accumulation", "replicas", "iterations", "loss", "weights differ")
        rows: List[Tuple[str, ...]] = [head]
        for each in self.settings:
            counts = each.batch_size, each.gradient_accumulation, each.replicas
            differ = f"{each.difference:.1e}" + ("" if each.ok else f"  {each.parameter}")
            iterations = str(each.device_iterations)
            rows.append((*map(str, counts), iterations, f"{each.loss:.6g}", differ))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
        lines = [
            "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths)), row[-1]])
            for row in rows
        ]
        what = f"{self.updates} updates of the same {self.samples} samples, in {self.dtype}"
        verdict = "give the same weights" if self.ok else "depend on how these are divided"
        return "\n".join([f"{what}, {verdict}.", *lines, *map(str, self.causes)])
