"""Facts about settings of ``compile`` and about optimizers, of which PopTorch runs its own."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterator, Mapping, Sequence, Tuple, Type

import torch
from torch import Tensor

from ipufit.core.compile_arguments import AUTO
from ipufit.core.train_config import TrainConfig
from ipufit.engines.ipu.preflight.report import (
    LIMITED,
    SUPPORTED,
    UNSUPPORTED,
    Fact,
    Line,
    always,
    guide,
)

__all__ = [
    "CLIPPED",
    "OPTIMIZERS",
    "SETTINGS",
    "ParameterGroup",
    "no_such_optimizer",
    "refused_arguments",
    "refused_settings",
]

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
        _fact("clipnorm", _ONE_NORM, "Use Clip(global_norm=...)", _CLIPPING),
        _fact("clipvalue", _ONE_NORM, "Use Clip(global_norm=...)", _CLIPPING),
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
    if clip.norm is not None:
        yield f"Clip(norm={clip.norm:g})", SETTINGS["clipnorm"]
    if clip.value is not None:
        yield f"Clip(value={clip.value:g})", SETTINGS["clipvalue"]
    if config.ema is not None:
        yield str(config.ema), SETTINGS["use_ema"]
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
        yield "run_eagerly=True", SETTINGS["run_eagerly"]
    elif config.jit != AUTO:
        yield f"jit={config.jit!r}", SETTINGS["jit"]


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """A group of parameters of an optimizer.

    Attributes:
        kind: class of the optimizer.
        settings: of the group.
        others: settings of all groups.
    """

    kind: Type[torch.optim.Optimizer]
    settings: Mapping[str, Any]
    others: Sequence[Mapping[str, Any]] = ()


def _attributes(line: int) -> Line:
    return Line("python/_optimizer_attributes.py", line)


def _is_set(name: str) -> Callable[[ParameterGroup], bool]:
    return lambda group: bool(group.settings.get(name))


def _differs(name: str) -> Callable[[ParameterGroup], bool]:
    def differs(group: ParameterGroup) -> bool:
        return any(other.get(name) != group.others[0].get(name) for other in group.others)

    return differs


def _is_decoupled_adam(group: ParameterGroup) -> bool:
    return group.kind is torch.optim.Adam and bool(group.settings.get("decoupled_weight_decay"))


def _is_dampened(group: ParameterGroup) -> bool:
    return bool(group.settings.get("momentum") and group.settings.get("dampening"))


def _has_several_rates(group: ParameterGroup) -> bool:
    rate = group.settings.get("lr")
    return isinstance(rate, Tensor) and rate.numel() != 1


# By name: the line of the guide that lists it, and the line of the code that takes it.
_KINDS = {"SGD": (726, 316), "Adam": (727, 322), "AdamW": (728, 325)}
_KINDS.update({"RMSprop": (729, 332), "LAMB": (730, 344)})

_LEAVE_OUT = "Leave it out."


def _kind(name: str) -> Fact:
    listed, attribute_line = _KINDS[name]
    places = (guide("overview", listed), _attributes(attribute_line))
    return Fact("optimizers", name, name, SUPPORTED, "it is one of PopTorch's optimizers", places)


def _setting(
    key: str,
    says: str,
    place: Line,
    applies: Callable[[ParameterGroup], bool],
    verdict: str = UNSUPPORTED,
    cure: str = _LEAVE_OUT,
) -> Fact:
    return Fact("optimizers", key, key, verdict, says, (place,), cure, applies)


# A setting that PopTorch does not know of is read by nobody.
_UNREAD = _attributes(263)

OPTIMIZERS: Tuple[Fact, ...] = (
    *(_kind(name) for name in _KINDS),
    _setting("maximize", "PopTorch leaves it aside", _UNREAD, _is_set("maximize")),
    _setting("amsgrad", "PopTorch has no such variant", _attributes(68), _is_set("amsgrad")),
    _setting(
        "decoupled_weight_decay",
        "AdamW is the class for that",
        _attributes(323),
        _is_decoupled_adam,
        cure="Use AdamW.",
    ),
    _setting(
        "dampening",
        "torch takes the first gradient whole, the device does not",
        _attributes(185),
        _is_dampened,
    ),
    _setting(
        "lr",
        "PopTorch takes one",
        _attributes(168),
        _has_several_rates,
        cure="Use one number, and groups of parameters where rates differ.",
    ),
    _setting(
        "centered",
        "all parameter groups must have the same",
        _attributes(335),
        _differs("centered"),
        cure="Make them alike.",
    ),
    _setting(
        "bias_correction",
        "it is one setting of the whole optimizer",
        guide("overview", 734),
        _differs("bias_correction"),
        cure="Make them alike.",
    ),
    *(
        _setting(
            name,
            "PopTorch leaves it aside, and no number changes by it",
            _UNREAD,
            _is_set(name),
            LIMITED,
            "",
        )
        for name in ("foreach", "fused", "capturable", "differentiable")
    ),
)


def refused_settings(group: ParameterGroup) -> Iterator[Tuple[str, Fact]]:
    """Yield settings of one group, as they are written, that an IPU can't do."""
    for fact in OPTIMIZERS:
        if fact.verdict != UNSUPPORTED or fact.key in ("centered", "bias_correction"):
            continue
        if fact.applies(group):
            value = group.settings[fact.key]
            several = isinstance(value, Tensor) and value.numel() != 1
            name = "a learning rate that is no single number" if several else f"{fact.key}={value}"
            yield name, fact


def no_such_optimizer(name: str) -> Fact:
    """Make the fact about an optimizer that PopTorch does not have."""
    return Fact(
        "optimizers",
        "another class",
        name,
        UNSUPPORTED,
        f"PopTorch has {', '.join(_KINDS)}, and runs no Python code of an optimizer",
        (guide("overview", 746), _attributes(59)),
        "Choose one of these.",
    )
