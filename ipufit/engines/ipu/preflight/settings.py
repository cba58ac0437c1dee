"""Facts about settings of ``compile``."""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Tuple

import torch

from ipufit.core.compile_arguments import AUTO
from ipufit.core.train_config import TrainConfig
from ipufit.engines.ipu.preflight.facts import UNSUPPORTED, Fact, Line, always, guide

__all__ = ["CLIPPED", "SETTINGS", "refused_arguments"]

# Optimizers with max_grad_norm.
CLIPPED = ("SGD", "Adam", "AdamW")

_HALF = guide("overview", 965)
_CLIPPING = Line("python/optim.py", 229)
_COMPILED = guide("pytorch_to_poptorch", 12)


def _fact(
    key: str, says: str, cure: str, place: Line, applies: Callable[[Any], bool] = always
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
            Line("python/options.py", 336),
        ),
        _fact(
            "accumulation_dtype",
            "accumulators are float16 or float32",
            "Use one of these",
            Line("python/_optimizer_attributes.py", 75),
        ),
        _fact("detect_nan", "a device tells nothing of its operators", "Leave it out", _COMPILED),
        _fact("run_eagerly", "a device runs compiled programs only", "Leave it out", _COMPILED),
        _fact("jit", "Poplar alone compiles its programs", "Leave it out", _COMPILED),
    )
)


def refused_arguments(config: TrainConfig) -> Iterator[Tuple[str, Fact]]:
    """Settings of ``compile`` that an IPU can't honour, as they are written, with the facts."""
    clip, scale, precision = config.clip, config.loss_scale, config.precision
    for name, bound in (("clipnorm", clip.norm), ("clipvalue", clip.value)):
        if bound is not None:
            yield f"{name}={bound:g}", SETTINGS[name]
    if config.averaging is not None:
        yield "use_ema=True", SETTINGS["use_ema"]
    if precision.autocast is not None:
        yield f"precision={precision.name!r}", SETTINGS["autocast"]
    if precision.inputs in (torch.bfloat16, torch.float64):
        yield f"precision={precision.name!r}", SETTINGS["precision"]
    if scale is not None and scale.dynamic and precision.autocast is None:
        yield f"loss_scale={scale.describe()!r}", SETTINGS["loss_scale"]
    if config.accumulation_dtype not in (None, torch.float16, torch.float32):
        dtype = str(config.accumulation_dtype).replace("torch.", "")
        yield f"accumulation_dtype={dtype!r}", SETTINGS["accumulation_dtype"]
    if config.detect_nan:
        yield "detect_nan=True", SETTINGS["detect_nan"]
    if config.run_eagerly:
        yield "run_eagerly=True or jit='off'", SETTINGS["run_eagerly"]
    elif config.jit != AUTO:
        yield f"jit={config.jit!r}", SETTINGS["jit"]
