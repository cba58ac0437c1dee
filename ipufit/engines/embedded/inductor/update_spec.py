"""One weight update as a function of tensors alone, described in numbers and text.

The description goes to the process that compiles, in a request with all that the result depends on;
that process makes the function of it. Forward, loss and backward come as the text of a recorded
graph; reduction, clipping and the optimizer's rule are the modules that the graphs of an update are
recorded from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.train_config import Clip
from ipufit.engines import gradient_reduction
from ipufit.engines.embedded import gradient_transform
from ipufit.engines.embedded.gradient_transform import GradientTransform
from ipufit.engines.embedded.passes import cpu_kernels
from ipufit.engines.embedded.timing import processor
from ipufit.engines.gradient_reduction import GradientSum, are_finite
from ipufit.optim import rules
from ipufit.tracing import recurrent, unread_values
from ipufit.tracing.flat_storage import FlatBlock, Slot

# What the text of a graph refers to.
_NAMES: Mapping[str, object] = {
    "torch": torch,
    "device": torch.device,
    "inf": math.inf,
    "nan": math.nan,
    "NoneType": type(None),
    # A graph calls these, by the names that its text has for them.
    **{
        f"{kernel.__module__}.{kernel.__name__}".replace(".", "_"): kernel
        for kernel in (cpu_kernels.channels_last, cpu_kernels.as_recorded)
    },
}


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """Specification of a trained parameter.

    Attributes:
        block: which of the blocks it belongs to.
        place: among the tensors that a micro-batch is computed from.
        shape, order: of the parameter; its dimensions in memory order.
    """

    block: int
    place: int
    shape: Tuple[int, ...]
    order: Tuple[int, ...]

    def weight(self, flat: Tensor) -> Tensor:
        """A view of a flat tensor in the parameter's shape and memory order."""
        wide = flat.view([self.shape[d] for d in self.order])
        return wide.permute([self.order.index(d) for d in range(len(self.order))])

    @property
    def size(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    def alone(self) -> FlatBlock:
        """Make a block that holds this parameter alone."""
        parameter = torch.empty(self.shape, device="meta")
        return FlatBlock(0, 0.0, (Slot("", parameter, self.order, (), 0),))


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """Parameters with one rule.

    Attributes:
        rule: its name.
        settings: which of the group's settings are on.
    """

    rule: str
    settings: Mapping[str, bool]


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """All that an update of equal micro-batches is made of, or one of these, but for the tensors.

    Attributes:
        source: text of what was recorded.
        code: text of the function of a micro-batch: of its state, leaves and constants, returning
            what it reports, its outputs, and a flat gradient for each slot, or each block of the
            program where there are none here.
        slots, blocks: the trained parameters; without blocks, the function is that of a
            micro-batch.
        rest: number of other tensors of state.
        written: which of these forward changes.
        constants, leaves, outputs: number of each for a micro-batch.
        counted: whether what a micro-batch reports has a count.
        micro_batches, replicas: of an update.
        factors, share: how the micro-batches share in the gradient.
        dtype: of their sum, by torch's name; None for that of the gradients.
        clip: bounds on it.
        scale: place of the loss scale among the leaves; None where there is none.
        recomputes: whether values are computed again rather than kept.
    """

    source: str
    code: str
    slots: Tuple[SlotSpec, ...]
    blocks: Tuple[BlockSpec, ...]
    rest: int
    written: Tuple[int, ...]
    constants: int
    leaves: int
    outputs: int
    counted: bool
    micro_batches: int
    replicas: int
    factors: Tuple[float, ...]
    share: float
    dtype: Optional[str]
    clip: Clip
    scale: Optional[int]
    recomputes: bool

    def rules(self) -> List[rules.OptimizerRule]:
        """Make the rule of each block."""
        return [getattr(rules, block.rule)(block.settings) for block in self.blocks]

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> UpdateSpec:
        """Read what ``dataclasses.asdict`` and JSON have made of one."""
        slots = tuple(SlotSpec(**_with_tuples(slot)) for slot in values["slots"])
        blocks = tuple(BlockSpec(**block) for block in values["blocks"])
        parts = {"slots": slots, "blocks": blocks, "clip": Clip(**values["clip"])}
        return UpdateSpec(**{**_with_tuples(values), **parts})


def _with_tuples(values: Mapping[str, Any]) -> Dict[str, Any]:
    """Values from JSON, which makes lists of tuples."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


class UpdateFunction:
    """The function of an update, or of a micro-batch, made of its specification.

    It takes, as one flat list: each slot's part of the flat parameters; each slot's states; for
    each replica the rest of its state; constants; for each block its coefficients; for each
    micro-batch its leaves. Parameters, states and buffers change in place, unless a loss is not
    finite; parameters and states also not where there is a loss scale and the gradient is not
    finite. It returns what the micro-batches report, as one tensor, the outputs of each, and with
    a loss scale whether the gradient is finite. Of a micro-batch, it returns what the text does,
    and changes buffers in place.

    Args:
        form: the specification.
    """

    def __init__(self, form: UpdateSpec) -> None:
        self._form = form
        self._micro_batch = _function(form.code)
        self._rules = form.rules()
        self._dtype = None if form.dtype is None else getattr(torch, form.dtype)
        self._finish = GradientTransform(form.clip, self._dtype)

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """Make the update."""
        form, left = self._form, iter(tensors)

        def take(count: int) -> List[Tensor]:
            return [next(left) for _ in range(count)]

        flats = take(len(form.slots))
        rules = [self._rules[slot.block] for slot in form.slots if self._rules]
        states = [dict(zip(rule.tensors, take(len(rule.tensors)))) for rule in rules]
        rest = [take(form.rest) for _ in range(form.replicas)]
        constants = take(form.constants)
        rows = take(len(form.blocks))
        batches = [take(form.leaves) for _ in range(form.micro_batches)]
        if not form.blocks:
            return self._micro_batch(*self._state(flats, rest[0]), *batches[0], *constants)

        buffers = [state[i] for state in rest for i in form.written]
        trained = [*flats, *(t for state in states for t in state.values())]
        before = [tensor.clone() for tensor in (*buffers, *trained)]
        reported, outputs, total = self._micro_batches(flats, rest, constants, batches)
        losses = torch.stack([n[0] if n.dim() else n for n in reported])
        reduced = total.reduced(1.0 if form.scale is None else batches[0][form.scale])
        gradients = self._finish(reduced, [slot.alone() for slot in form.slots], flats)
        is_good = losses.isfinite().all()
        # As where updates run one graph after another.
        judged = [] if form.scale is None else [are_finite(reduced if form.clip else gradients)]
        is_made = torch.stack([is_good, *judged]).all()
        for rule, slot, flat, gradient, state in zip(rules, form.slots, flats, gradients, states):
            rule.update(flat, gradient, state, rows[slot.block].unbind(), [slice(0, slot.size)])
        keeps = [is_good] * len(buffers) + [is_made] * len(trained)
        for tensor, value, keep in zip((*buffers, *trained), before, keeps):
            tensor.copy_(torch.where(keep, tensor, value))
        together = torch.stack(reported) if len(reported) > 1 else reported[0]
        return [together, *outputs, *judged]

    def _micro_batches(
        self,
        flats: Sequence[Tensor],
        rest: Sequence[Sequence[Tensor]],
        constants: Sequence[Tensor],
        batches: Sequence[Sequence[Tensor]],
    ) -> Tuple[List[Tensor], List[Tensor], GradientSum]:
        """Run the micro-batches; return their numbers, outputs and the sum of their gradients."""
        form = self._form
        total = GradientSum(form.factors, form.share, self._dtype)
        reported: List[Tensor] = []
        outputs: List[Tensor] = []
        for place, leaves in enumerate(batches):
            state = self._state(flats, rest[place % form.replicas])
            numbers, *results = self._micro_batch(*state, *leaves, *constants)
            reported.append(numbers)
            outputs += results[: form.outputs]
            # Two parameters may have one gradient, and a sum changes its own in place.
            gradients = [gradient.clone() for gradient in results[form.outputs :]]
            total.add(gradients, numbers[1] if form.counted else None)
        return reported, outputs, total

    def _state(self, flats: Sequence[Tensor], rest: Sequence[Tensor]) -> List[Tensor]:
        """Return what a micro-batch is computed from: parameters, and the rest of a replica."""
        slots, others = self._form.slots, iter(rest)
        weights = {slot.place: slot.weight(flat) for slot, flat in zip(slots, flats)}
        count = len(weights) + len(rest)
        return [weights[i] if i in weights else next(others) for i in range(count)]


def _function(code: str) -> Callable[..., List[Tensor]]:
    """The function ``forward`` of a text, which was made of a graph by this ipufit."""
    names: Dict[str, Any] = dict(_NAMES)
    exec(compile(code, "<recorded graph>", "exec"), names)
    forward = names["forward"]
    return lambda *tensors: forward(None, *tensors)


# Changes whenever compiled programs can't be used any more for a reason that no part shows.
_FORMAT = "2"
# What the function of a specification is made of, and what compiles it.
_MODULES = gradient_transform, gradient_reduction, rules, cpu_kernels, recurrent, unread_values
_SOURCES = (
    *(str(module.__file__) for module in _MODULES),
    *(__file__, str(Path(__file__).with_name("worker.py"))),
)


@dataclasses.dataclass(frozen=True)
class Request:
    """An update to compile.

    Attributes:
        form: of the update.
        inputs: shape, strides and dtype of each tensor that it takes.
        threads: that it runs on.
        tensors: digest of the state and the batch of the program.
    """

    form: UpdateSpec
    inputs: Tuple[Tuple[Tuple[int, ...], Tuple[int, ...], str], ...]
    threads: int
    tensors: str

    @staticmethod
    def of(form: UpdateSpec, inputs: Sequence[Tensor], tensors: str) -> Request:
        """To compile a form for inputs like these, on as many threads as torch uses now.

        Args:
            form: of the update.
            inputs: of the library.
            tensors: digest of the state and the batch of the program.
        """
        return Request(form, _forms(inputs), torch.get_num_threads(), tensors)

    def to_json(self) -> str:
        """Write the request as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of_json(text: str) -> Request:
        """Read what :meth:`to_json` made."""
        values: Dict[str, Any] = json.loads(text)
        inputs = tuple((tuple(s), tuple(t), d) for s, t, d in values["inputs"])
        form = UpdateSpec.of_json(values["form"])
        return Request(form, inputs, values["threads"], values["tensors"])

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
            "ipufit": _digest(*(Path(file).read_text(encoding="utf-8") for file in _SOURCES)),
            "torch": torch.__version__,
            "cpu": _digest(platform.machine(), processor()),
            "threads": str(self.threads),
            "graph": _digest(graph),
            "update": _digest(json.dumps(update, sort_keys=True)),
            "tensors": self.tensors,
            "shapes": _digest(json.dumps(self.inputs)),
        }


def _forms(tensors: Sequence[Tensor]) -> Tuple[Tuple[Tuple[int, ...], Tuple[int, ...], str], ...]:
    """Shape, strides and dtype of each tensor."""
    return tuple((tuple(t.shape), t.stride(), str(t.dtype)[len("torch.") :]) for t in tensors)


def digest_of(tensors: Sequence[Tensor]) -> str:
    """Digest of the shapes, strides and dtypes of tensors; sparse ones are left out."""
    return _digest(json.dumps(_forms([t for t in tensors if t.layout is torch.strided])))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
