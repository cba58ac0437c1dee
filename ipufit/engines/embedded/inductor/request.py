"""The request to the process that compiles: all that its result depends on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.engines.embedded import clipping, gradient_reduction
from ipufit.engines.embedded.inductor import update_spec as form_module
from ipufit.engines.embedded.inductor.update_spec import UpdateSpec
from ipufit.optim import rules

__all__ = ["Request"]

# Changes whenever compiled programs can't be used any more for a reason that no part shows.
_FORMAT = "1"
_OWN = (clipping, gradient_reduction, rules, form_module)
_HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Request:
    """An update to compile.

    Attributes:
        form: of the update.
        inputs: shape, strides and dtype of each tensor that it takes.
        threads: that it runs on.
    """

    form: UpdateSpec
    inputs: Tuple[Tuple[Tuple[int, ...], Tuple[int, ...], str], ...]
    threads: int

    @staticmethod
    def of(form: UpdateSpec, tensors: Sequence[Tensor]) -> Request:
        """To compile a form for tensors like these, on as many threads as torch uses now."""
        inputs = ((tuple(t.shape), t.stride(), str(t.dtype)[len("torch.") :]) for t in tensors)
        return Request(form, tuple(inputs), torch.get_num_threads())

    def to_json(self) -> str:
        """Write the request as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of_json(text: str) -> Request:
        """Read what :meth:`to_json` made."""
        values: Dict[str, Any] = json.loads(text)
        inputs = tuple((tuple(s), tuple(t), d) for s, t, d in values["inputs"])
        return Request(UpdateSpec.of_json(values["form"]), inputs, values["threads"])

    def examples(self) -> List[Tensor]:
        """Tensors like the inputs, without values."""
        return [torch.empty_strided(s, t, dtype=getattr(torch, d)) for s, t, d in self.inputs]

    def parts(self) -> Mapping[str, str]:
        """All that the result depends on, as short texts."""
        update = dataclasses.asdict(self.form)
        # Which products go to oneDNN is measured anew in each process; what is kept stays.
        graph, _ = update.pop("source"), update.pop("code")
        return {
            "format": _FORMAT,
            "ipufit": _digest(*(_source(Path(str(m.__file__))) for m in _OWN), *_compilers()),
            "torch": torch.__version__,
            "cpu": _digest(platform.machine(), _processor()),
            "threads": str(self.threads),
            "graph": _digest(graph),
            "update": _digest(json.dumps(update, sort_keys=True)),
            "shapes": _digest(json.dumps(self.inputs)),
        }


def _compilers() -> List[str]:
    return [_source(_HERE / name) for name in ("worker.py", "onednn.py")]


def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Describe all that code made for this very processor depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
