"""Facts about PopTorch 3.4, read from ``facts.json``, and when each of them holds.

A row of the file names its subject, a verdict, what PopTorch says, the files and lines where it
does so, the cure, and an example. ``when`` is a condition: a list of ``[attribute, comparison,
value]``, all of which hold, or the name of one of the conditions below; without it, the fact holds
always.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import operator
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    Sequence,
    Tuple,
    Type,
    Union,
)

import torch
from torch import Tensor

from ipufit.core.compile_arguments import AUTO
from ipufit.core.train_config import TrainConfig
from ipufit.tracing.source_map import Origin

SUPPORTED = "supported"
LIMITED = "supported with limits"
UNSUPPORTED = "not supported"
UNKNOWN = "unknown"

# The subject of what is computed of torch.zeros and the like alone.
CONSTANT = "constant expressions"
# The subject of what is said of buffers that forward changes.
CHANGED = "changed"
# Optimizers with max_grad_norm.
CLIPPED = ("SGD", "Adam", "AdamW")


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of PopTorch's published repository.

    Attributes:
        file: its path there.
        line: counted from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


@dataclasses.dataclass(frozen=True)
class DispatchedCall:
    """A call of an operator.

    Attributes:
        name: such as "aten::add"; of what changes its argument, that of its other form.
        arguments: by name, defaults included; tensors have no values.
        constants: names of tensor arguments that depend on no input and no weight.
        is_constant_result: whether all of its tensors do so, and no random number is drawn.
        is_whole: False of an operator that torch writes with others, which come after it.
        origin: the place of the call.
    """

    name: str
    arguments: Mapping[str, Any]
    constants: FrozenSet[str]
    is_constant_result: bool
    is_whole: bool
    origin: Origin


@dataclasses.dataclass(frozen=True)
class DeviceTensor:
    """A tensor that goes to the device.

    Attributes:
        tensor: of which only type and shape matter.
        in_module: whether it is a weight or a buffer, not a part of the batch.
    """

    tensor: Tensor
    in_module: bool


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """A group of parameters of an optimizer.

    Attributes:
        kind: class of the optimizer.
        settings: of the group.
        others: settings of all groups.
    """

    kind: Type[torch.optim.Optimizer]
    settings: Mapping[str, object]
    others: Sequence[Mapping[str, object]] = ()


# Conditions that compare more than one attribute with a constant.


def _has_special_gradients(call: DispatchedCall) -> bool:
    return any(bool(call.arguments.get(name)) for name in ("sparse", "scale_grad_by_freq"))


def _is_dilated_transpose(call: DispatchedCall) -> bool:
    arguments = call.arguments
    return bool(arguments["transposed"]) and any(size != 1 for size in arguments["dilation"])


def _does_not_divide(call: DispatchedCall) -> bool:
    wanted = call.arguments["output_size"]
    wanted = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    sizes = call.arguments["self"].shape[-len(wanted) :]
    return any(size % to for size, to in zip(sizes, wanted))


def _stretches_unevenly(call: DispatchedCall) -> bool:
    if not call.is_whole:
        # By a factor; torch then writes it with a size.
        return False
    before, after = call.arguments["self"].shape[-2:], call.arguments["output_size"]
    return bool(before[0] * after[1] != before[1] * after[0])


def _is_of_8_bits(call: DispatchedCall) -> bool:
    dtypes = {value.dtype for value in call.arguments.values() if isinstance(value, Tensor)}
    return dtypes in ({torch.uint8}, {torch.int8})


def _has_joined_targets(call: DispatchedCall) -> bool:
    targets, log_probs = call.arguments["targets"], call.arguments["log_probs"]
    return bool(targets.dim() == 1 and log_probs.dim() == 3)


# at::Reduction::Mean of ATen/core/Reduction.h.
_MEAN = 1


def _smooths_a_mean_over_classes(call: DispatchedCall) -> bool:
    arguments = call.arguments
    return bool(
        arguments["label_smoothing"] > 0
        and arguments["reduction"] == _MEAN
        and arguments["weight"] is None
        and not arguments["target"].is_floating_point()
    )


def _is_decoupled_adam(group: ParameterGroup) -> bool:
    return group.kind is torch.optim.Adam and bool(group.settings.get("decoupled_weight_decay"))


def _has_several_rates(group: ParameterGroup) -> bool:
    rate = group.settings.get("lr")
    return isinstance(rate, Tensor) and rate.numel() != 1


def _differs(name: str) -> Callable[[ParameterGroup], bool]:
    def differs(group: ParameterGroup) -> bool:
        return any(other.get(name) != group.others[0].get(name) for other in group.others)

    return differs


CONDITIONS: Dict[str, Callable[[Any], bool]] = {
    "bias_correction differs": _differs("bias_correction"),
    "centered differs": _differs("centered"),
    "does not divide": _does_not_divide,
    "has joined targets": _has_joined_targets,
    "has moving offsets": lambda call: "offsets" not in call.constants,
    "has no bound": lambda optimizer: optimizer.__name__ not in CLIPPED,
    "has several rates": _has_several_rates,
    "has special gradients": _has_special_gradients,
    "is a decoupled Adam": _is_decoupled_adam,
    "is a dilated transpose": _is_dilated_transpose,
    "is empty": lambda tensor: tensor.tensor.numel() == 0,
    "is of 8 bits": _is_of_8_bits,
    "smooths a mean over classes": _smooths_a_mean_over_classes,
    "stretches evenly": lambda call: call.is_whole and not _stretches_unevenly(call),
    "stretches unevenly": _stretches_unevenly,
}

_COMPARISONS: Dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": lambda value, bound: value is not None and value <= bound,
    ">": lambda value, bound: value is not None and value > bound,
    ">=": lambda value, bound: value is not None and value >= bound,
    "in": lambda value, values: value in values,
    "not in": lambda value, values: value not in values,
}


def _attribute(thing: object, name: str) -> object:
    """Return an argument of a call, a setting of a group, or an attribute of anything else."""
    if isinstance(thing, DispatchedCall):
        return thing.arguments.get(name)
    if isinstance(thing, ParameterGroup):
        return thing.settings.get(name)
    return getattr(thing, name)


@dataclasses.dataclass(frozen=True)
class Fact:
    """One statement about PopTorch 3.4, with the place where its source or guide says so.

    A :class:`ipufit.PreflightFinding` has the fact that it is about.

    Attributes:
        group: "operators", "layers", "losses", "optimizers", "settings", "dtypes" or
            "control flow".
        key: its name, of which there is one in the table.
        subject: what it is looked up by: an operator such as "aten::topk", the name of a class, a
            setting, a dtype, or the cause of a failed recording.
        verdict: "supported", "supported with limits", "not supported", or "unknown" if neither
            source nor guide mentions it.
        says: what PopTorch's documentation or source says, in our words.
        places: the lines that say so, those of the documentation first.
        cure: what to do instead; "" if nothing has to be done.
        when: the condition under which it holds; empty if it always does.
        example: code that the fact is about; "" for what is supported.
    """

    group: str
    key: str
    subject: str
    verdict: str
    says: str
    places: Tuple[Line, ...]
    cure: str = ""
    when: Union[str, Tuple[Tuple[str, str, object], ...]] = ()
    example: str = ""

    def applies(self, thing: object) -> bool:
        """Return True if the fact holds for something in a model.

        Args:
            thing: a call of an operator, a module, a parameter group, a dtype or a tensor.
        """
        if isinstance(self.when, str):
            return CONDITIONS[self.when](thing)
        return all(
            _COMPARISONS[comparison](_attribute(thing, name), value)
            for name, comparison, value in self.when
        )

    def as_dict(self) -> Dict[str, object]:
        """Return the fact as plain values, as reports have it in JSON."""
        return {
            "group": self.group,
            "key": self.key,
            "verdict": self.verdict,
            "says": self.says,
            "sources": [dataclasses.asdict(place) for place in self.places],
            "cure": self.cure,
        }


def _line(source: str) -> Line:
    file, _, line = source.rpartition(":")
    return Line(file, int(line))


def _test(test: Sequence[Any]) -> Tuple[str, str, object]:
    name, comparison, value = test
    # A tuple, so that facts can be counted.
    return name, comparison, tuple(value) if isinstance(value, list) else value


def _fact(row: Mapping[str, Any]) -> Fact:
    """Make a fact from a row of the file."""
    when = row.get("when", ())
    return Fact(
        row["group"],
        row["key"],
        row.get("subject", row["key"]),
        row["verdict"],
        row["says"],
        tuple(_line(source) for source in row["sources"]),
        row.get("cure", ""),
        when if isinstance(when, str) else tuple(map(_test, when)),
        row.get("example", ""),
    )


def _handled(handlers: Mapping[str, Mapping[str, int]]) -> Iterator[Fact]:
    """Make the facts about operators with a handler, by its file and the line that registers it."""
    for file, lines in handlers.items():
        for name, line in lines.items():
            key, places = f"aten::{name}", (Line(file, line),)
            says = "a handler is registered for it"
            yield Fact("operators", key, key, SUPPORTED, says, places)


_FILE = json.loads((Path(__file__).parent / "facts.json").read_text("utf-8"))

# Every line is one of this commit of github.com/graphcore/poptorch.
COMMIT: str = _FILE["commit"]
FACTS: Tuple[Fact, ...] = (*_handled(_FILE["handlers"]), *map(_fact, _FILE["facts"]))
# Operators that torch would write with others, but that PopTorch registers, and so takes whole.
WHOLE: FrozenSet[str] = frozenset(_FILE["whole"]["operators"])
_UNLISTED: Dict[str, Fact] = {row["group"]: _fact(row) for row in _FILE["unlisted"]}

# An operator and the arguments of a loss are looked up by the same name.
_TOGETHER = {"losses": "operators"}


class Table:
    """Facts by group and subject."""

    def __init__(self, facts: Sequence[Fact] = FACTS) -> None:
        self._facts: Dict[Tuple[str, str], List[Fact]] = collections.defaultdict(list)
        for fact in facts:
            self._facts[_TOGETHER.get(fact.group, fact.group), fact.subject].append(fact)

    def of(self, group: str, subject: str, thing: object = None) -> List[Fact]:
        """Return the facts about a subject that hold for a call, a module or a tensor."""
        facts = self._facts.get((group, subject), [])
        return [fact for fact in facts if fact.applies(thing)]

    def knows(self, group: str, subject: str) -> bool:
        """Return True if there is any fact about a subject."""
        return bool(self._facts.get((group, subject)))


def unlisted(group: str, name: str = "", cause: str = "") -> Fact:
    """Make the fact about something of a group that has no row.

    Args:
        group: "operators", "losses", "optimizers", "dtypes" or "control flow".
        name: of the operator, class or dtype.
        cause: why a recording failed.
    """
    fact = _UNLISTED[group]
    key, cure = fact.key.format(name=name), fact.cure.format(cause=cause)
    return dataclasses.replace(fact, key=key, subject=name or key, cure=cure)


# The texts are parts of the sentences with which the IPU engine refuses a setting, too.
SETTINGS: Dict[str, Fact] = {fact.key: fact for fact in FACTS if fact.group == "settings"}


def refused_arguments(config: TrainConfig) -> Iterator[Tuple[str, Fact]]:
    """Yield settings of ``compile`` that an IPU can't honour, as they are written, with the facts.

    ``global_clipnorm``, which depends on the optimizer, is not among them.
    """
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


# These differ between groups, of which a refusal that names one group does not speak.
_OF_ALL_GROUPS = ("centered", "bias_correction")


def refused_settings(group: ParameterGroup) -> Iterator[Tuple[str, Fact]]:
    """Yield settings of one group, as they are written, that an IPU can't do."""
    for fact in FACTS:
        refuses = fact.group == "optimizers" and fact.verdict == UNSUPPORTED
        if refuses and fact.key not in _OF_ALL_GROUPS and fact.applies(group):
            value = group.settings[fact.key]
            several = isinstance(value, Tensor) and value.numel() != 1
            name = (
                "a learning rate that is not a single number" if several else f"{fact.key}={value}"
            )
            yield name, fact
