"""What PopTorch does with how ``compile`` asks an update to be made."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

from ipufit.engines.ipu.preflight.facts import UNSUPPORTED, Fact, Place, always
from ipufit.engines.ipu.preflight.places import guide

__all__ = ["CLIPPED", "SETTINGS"]

# Optimizers with max_grad_norm.
CLIPPED = ("SGD", "Adam", "AdamW")

_HALF = guide("overview", 965)
_CLIPPING = Place("python/optim.py", 229)
_COMPILED = guide("pytorch_to_poptorch", 12)


def _fact(
    key: str, says: str, cure: str, place: Place, applies: Callable[[Any], bool] = always
) -> Tuple[str, Fact]:
    return key, Fact("settings", key, key, UNSUPPORTED, says, (place,), cure, applies)


def _has_no_bound(optimizer: type) -> bool:
    return optimizer.__name__ not in CLIPPED


_ONE_NORM = "PopTorch bounds the norm of all gradients together only"

# The texts are parts of the sentences with which the IPU engine refuses a setting, too.
SETTINGS: Dict[str, Fact] = dict(
    (
        _fact("clipnorm", _ONE_NORM, "Use global_clipnorm", _CLIPPING),
        _fact("clipvalue", _ONE_NORM, "Use global_clipnorm", _CLIPPING),
        _fact(
            "global_clipnorm",
            "PopTorch bounds it with SGD, Adam and AdamW only",
            "Choose one of these",
            _CLIPPING,
            _has_no_bound,
        ),
        _fact(
            "use_ema",
            "PopTorch keeps no averages of weights",
            "Leave it out",
            guide("overview", 746),
        ),
        _fact(
            "autocast",
            "PopTorch has no autocast",
            "Convert the module: module.half() and precision='float16'",
            _HALF,
        ),
        _fact(
            "precision",
            "a device computes in float16 and float32",
            "Use 'float16' or 'float32'",
            _HALF,
        ),
        _fact(
            "loss_scale",
            "PopTorch's own automatic scaling follows other rules and does not tell its factor",
            "Pass a number",
            Place("python/options.py", 336),
        ),
        _fact(
            "accumulation_dtype",
            "accumulators are float16 or float32",
            "Use one of these",
            Place("python/_optimizer_attributes.py", 75),
        ),
        _fact("detect_nan", "a device tells nothing of its operators", "Leave it out", _COMPILED),
        _fact("run_eagerly", "a device runs compiled programs only", "Leave it out", _COMPILED),
        _fact("jit", "Poplar alone compiles its programs", "Leave it out", _COMPILED),
    )
)
