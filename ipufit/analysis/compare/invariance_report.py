"""Report of ``Model.check_invariance``, and the search for the causes that it names.

Every call of a module is repeated with each half of its rows, while the modules that it calls give
what they gave for the whole; rows that differ then are its own doing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch
from ipufit.losses import Loss
from ipufit.tracing.comparison import Tolerance, distance
from ipufit.utils import tree
from ipufit.utils.console import TextReport
from ipufit.utils.devices import accelerator_states


@dataclasses.dataclass(frozen=True)
class InvarianceSetting:
    """One way to divide updates of the same samples, and its result.

    Attributes:
        batch_size: samples of a micro-batch.
        gradient_accumulation: micro-batches that each replica sums for one update.
        replicas: copies of the model.
        device_iterations: updates in one call of the program.
        loss: mean over the updates.
        loss_difference: from the loss of the first setting.
        difference: largest difference of a weight after the updates from the first setting,
            divided by the largest magnitude in its tensor.
        parameter: name of the parameter with that difference.
        ok: whether loss and weights are within the tolerance.
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
        kind: "batch", if rows depend on the other rows of the micro-batch; "state", if a second
            call with the same rows gives other values; "random", if random numbers are drawn;
            "sum", if the loss is a sum but gradients are averaged, or the reverse; "loss", if the
            loss depends on several samples at once; "unknown".
        text: what was observed.
        cure: what to do.
    """

    module: str
    kind: str
    text: str
    cure: str

    def __str__(self) -> str:
        return f"{self.text} {self.cure}"


@dataclasses.dataclass(frozen=True)
class InvarianceReport(TextReport):
    """Result of updates with the same samples, divided in several ways.

    Attributes:
        settings: the ways that were tried; the first has all samples in one micro-batch.
        causes: modules whose results depend on the division; empty if all settings agree.
        samples: number of samples in each update.
        updates: number of updates with each setting.
        dtype: in which everything was computed.
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
        values.update({name: [*values[name]] for name in ("settings", "causes")})
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
        verdict = "give the same weights" if self.ok else "depend on how they are divided"
        return "\n".join([f"{what}, {verdict}.", *lines, *map(str, self.causes)])


@dataclasses.dataclass
class _Call:
    """One call of a module."""

    name: str
    module: nn.Module
    args: Tuple[object, ...]
    kwargs: Mapping[str, object]
    before: Tuple[Tensor, ...]
    inner: List[_Call] = dataclasses.field(default_factory=list)
    output: object = None
    draws: bool = False


def find_causes(
    module: nn.Module, loss: Loss, batch: MicroBatch, gradient_reduction: str
) -> Tuple[InvarianceCause, ...]:
    """Find what breaks invariance, module by module and then in the loss.

    Args:
        module: a copy that may be changed, in the mode of training.
        loss: normal form.
        batch: all samples of an update.
        gradient_reduction: of ``compile``.
    """
    causes: Dict[Tuple[str, str], InvarianceCause] = {}
    with torch.no_grad():
        torch.manual_seed(0)
        calls = _calls(module, loss, batch)
        for call in calls:
            cause = _cause(call, batch.size)
            if cause is not None:
                causes.setdefault((cause.module, cause.kind), cause)
        cause = None
        if not loss.differentiates:
            # Steps of the user's own make a loss of several calls of the module, or of its parts.
            cause = _loss_cause(loss, calls[-1], batch, gradient_reduction)
    if cause is not None:
        causes["loss", cause.kind] = cause
    if not causes:
        return (
            InvarianceCause(
                "",
                "unknown",
                "No module does this in its forward pass.",
                "Look for state that a module keeps between calls, and for hooks.",
            ),
        )
    return tuple(causes.values())


def _calls(module: nn.Module, loss: Loss, batch: MicroBatch) -> List[_Call]:
    """Record the calls of a forward pass in the order of their returns; the module's is last."""
    done: List[_Call] = []
    stack: List[_Call] = []

    def begin(
        name: str, part: nn.Module, args: Tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        args, kwargs = tree.map_leaves(_copy_tensor, (args, dict(kwargs)))
        stack.append(_Call(name, part, args, kwargs, _generators()))

    def end(part: nn.Module, args: object, output: object) -> None:
        # A module whose exception was caught has not returned.
        while (call := stack.pop()).module is not part:
            pass
        call.output = tree.map_leaves(_copy_tensor, output)
        moved = any(not torch.equal(a, b) for a, b in zip(call.before, _generators()))
        call.draws = moved
        if stack:
            stack[-1].inner.append(call)
        done.append(call)

    args, kwargs, _, _ = batch.unpack()
    with contextlib.ExitStack() as hooks, torch.set_grad_enabled(loss.differentiates):
        for name, part in module.named_modules():
            starting = functools.partial(begin, name)
            hooks.enter_context(part.register_forward_pre_hook(starting, with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(end))
        loss.call(module, args, kwargs)
    return done


def _copy_tensor(leaf: object) -> object:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _generators() -> Tuple[Tensor, ...]:
    states = accelerator_states().values()
    return (torch.get_rng_state(), *(state for each in states for state in each))


def _cause(call: _Call, size: int) -> Optional[InvarianceCause]:
    kind = type(call.module).__name__
    who = f"{call.name!r} ({kind})" if call.name else f"The module itself ({kind})"
    if call.draws and not any(inner.draws for inner in call.inner):
        return InvarianceCause(
            call.name,
            "random",
            f"{who} draws random numbers, and each micro-batch has its own stream.",
            "The results differ like those of two seeds, which is expected. To compare "
            "settings, turn the random layers off, for example with a dropout of 0.",
        )
    if call.draws:
        return None
    if _differs(call, size, [(0, size)]):
        return InvarianceCause(
            call.name,
            "state",
            f"{who} computes other values when it is called once more with the same rows.",
            "Something is kept from call to call, such as a counter: leave it out, or make it a "
            "buffer that counts samples. model.check(sample) names the line.",
        )
    if not _differs(call, size, _halves(size)):
        return None
    what = f"{who} computes a row from other rows of the micro-batch."
    cure = (
        "Take means, maxima and norms over the other dimensions (dim=1 and later), or keep the "
        "size of the micro-batch."
    )
    if isinstance(call.module, nn.modules.batchnorm._BatchNorm):
        what = f"{who} normalises with the statistics of each micro-batch."
        cure = (
            "Use GroupNorm or LayerNorm, or keep the size of the micro-batch and change only "
            "device_iterations."
        )
    return InvarianceCause(call.name, "batch", what, cure)


def _differs(call: _Call, size: int, ranges: Sequence[Tuple[int, int]]) -> bool:
    """Return True if ranges of the rows alone yield other values than in the call."""
    if not any(_has_rows(leaf, size) for leaf in tree.flatten((call.args, call.kwargs))[0]):
        return False
    for begin, end in ranges:
        tried = _call_again(call, begin, end, size)
        if tried is None:
            return False
        result, inner_arguments = tried
        pairs = [(call.output, result)]
        # What the modules that it calls are given is its own doing too.
        pairs += [((inner.args, inner.kwargs), arguments) for inner, arguments in inner_arguments]
        for whole, part in pairs:
            leaves = zip(tree.flatten(whole)[0], tree.flatten(part)[0])
            if any(_differ(*both, begin, end, size) for both in leaves):
                return True
    return False


def _differ(whole: object, part: object, begin: int, end: int, size: int) -> bool:
    """Return True if the tensor of a half differs from that half of the tensor of all rows."""
    rows = _cut(whole, begin, end, size)
    if not _has_rows(whole, size) or not isinstance(part, Tensor) or not isinstance(rows, Tensor):
        return False
    return not _agree(part, rows)


def _halves(size: int) -> Sequence[Tuple[int, int]]:
    return (0, size // 2), (size // 2, size)


def _call_again(
    call: _Call, begin: int, end: int, size: int
) -> Optional[Tuple[object, List[Tuple[_Call, object]]]]:
    """Repeat a call with some rows; inner modules return what they did for these rows.

    Returns:
        The output, and the inner calls with the arguments they get now; None if the call fails.
    """
    args, kwargs = tree.map_leaves(
        lambda leaf: _cut(leaf, begin, end, size), (call.args, dict(call.kwargs))
    )
    try:
        with _replayed(call, begin, end, size) as inner_arguments:
            return call.module.forward(*args, **kwargs), inner_arguments
    except Exception:
        # Such as statistics of a single value.
        return None


@contextlib.contextmanager
def _replayed(call: _Call, begin: int, end: int, size: int) -> Iterator[List[Tuple[_Call, object]]]:
    """Make inner modules return, in the block, what they returned before for these rows.

    Yields:
        The calls, with the arguments that they get now.
    """
    inner_arguments: List[Tuple[_Call, object]] = []
    modules = {id(inner.module): inner.module for inner in call.inner}

    def replay(coming: Iterator[_Call], *args: object, **kwargs: object) -> object:
        inner = next(coming)
        inner_arguments.append((inner, (args, kwargs)))
        return tree.map_leaves(lambda leaf: _cut(leaf, begin, end, size), inner.output)

    for key, part in modules.items():
        coming = iter([inner for inner in call.inner if id(inner.module) == key])
        part.__dict__["forward"] = functools.partial(replay, coming)
    try:
        yield inner_arguments
    finally:
        for part in modules.values():
            del part.__dict__["forward"]


def _has_rows(leaf: object, size: int) -> bool:
    if not isinstance(leaf, Tensor) or not leaf.dim() or not leaf.numel():
        return False
    return leaf.shape[0] % size == 0 or (leaf.dim() > 1 and leaf.shape[1] == size)


def _cut(leaf: object, begin: int, end: int, size: int) -> object:
    """Cut the rows of some samples, along the first dimension or the second."""
    if not isinstance(leaf, Tensor) or not _has_rows(leaf, size):
        return leaf
    if leaf.shape[0] % size == 0:
        each = leaf.shape[0] // size
        return leaf[begin * each : end * each]
    return leaf[:, begin:end]


def _agree(one: Tensor, other: Tensor) -> bool:
    away = distance(one, other)
    return away.absolute <= Tolerance().of(one.dtype, away.scale)


def _loss_cause(
    loss: Loss, root: _Call, batch: MicroBatch, gradient_reduction: str
) -> Optional[InvarianceCause]:
    """Find out if the loss of all samples is what the losses of two halves make together."""
    whole = _loss_of(loss, root, batch, 0, batch.size)
    parts = [_loss_of(loss, root, batch, *half) for half in _halves(batch.size)]
    if whole is None or any(part is None for part in parts):
        return None
    values = [part[0] for part in parts if part is not None]
    weights = [part[1] for part in parts if part is not None]
    total = torch.stack(values).sum()
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    mean = (torch.stack(values) * shares.to(total)).sum()
    is_sum, is_mean = _agree(total, whole[0]), _agree(mean, whole[0])
    if is_sum if gradient_reduction == "sum" else is_mean:
        return None
    if is_sum or is_mean:
        what = "Reduction(gradients='sum') adds up the losses of micro-batches, which are means."
        cure = "Compile with Reduction(gradients='mean')."
        if is_sum:
            what = "The loss adds up its samples, and the gradient is a mean over micro-batches."
            cure = "Use reduction='mean', or compile with Reduction(gradients='sum')."
        return InvarianceCause("loss", "sum", what, cure)
    return InvarianceCause(
        "loss",
        "loss",
        "The loss of all samples is not the mean of those of two halves: it combines several "
        "samples, or divides by the number of samples that count.",
        "For ignored targets and class weights, compile with Reduction(normalize='tokens'). A "
        "loss that compares samples, such as a contrastive loss, needs all of them in one "
        "micro-batch: gradient_accumulation=1 and one replica.",
    )


def _loss_of(
    loss: Loss, root: _Call, batch: MicroBatch, begin: int, end: int
) -> Optional[Tuple[Tensor, float]]:
    """Return loss and weight of some rows, from the outputs that they had among all rows."""
    size = batch.size
    if loss.in_module:
        tried = _call_again(root, begin, end, size)
        if tried is None:
            return None
        term = loss.split(tried[0])[1]
    else:
        _, _, target, weight = tree.map_leaves(
            lambda leaf: _cut(leaf, begin, end, size), batch.unpack()
        )
        outputs = tree.map_leaves(lambda leaf: _cut(leaf, begin, end, size), root.output)
        term = loss(outputs, target, weight)
    count = float(end - begin) if term.count is None else float(term.count)
    return term.value, count
