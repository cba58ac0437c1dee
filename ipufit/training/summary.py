"""The table that ``Model.summary`` prints, and the batch for what looks into a model."""

from __future__ import annotations

import textwrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Sequence

from torch import Tensor, nn

from ipufit.core.batch import MicroBatch, Mode
from ipufit.data.batches import BatchValidator
from ipufit.data.casting import Casting
from ipufit.data.fields import BatchForm
from ipufit.data.in_memory import is_array
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError, unfit
from ipufit.losses.loss import OwnLoss
from ipufit.training.sanity_check import check_call
from ipufit.training.session import Session
from ipufit.utils.console import fold
from ipufit.utils.error_collector import ErrorCollector, at_least_or_none
from ipufit.utils.random_streams import isolated

if TYPE_CHECKING:
    from ipufit.tracing.layers import Layer

_HEAD = ("layer", "class", "output shape", "parameters", "trainable", "notes")
_TEXT = (0, 1, 2, 5)  # columns that may be broken into lines
_GAP = "  "
_LEAST = 60


def check_options(
    line_length: object, depth: object, expand_nested: object, print_fn: object
) -> None:
    """Refuse what can't be honoured.

    Raises:
        ConfigurationError: naming the option.
    """
    for name, value, least in (("line_length", line_length, _LEAST), ("depth", depth, 1)):
        at_least_or_none(name, value, least, "Leave it out to show everything.")
    if not isinstance(expand_nested, bool):
        advice = "Use depth=2 to show two levels."
        raise unfit("expand_nested", "True or False", expand_nested, advice)
    if not expand_nested and depth not in (None, 1):
        raise ConfigurationError(
            f"expand_nested=False shows one level, got depth={depth} too. Leave one of them out."
        )
    if print_fn is not None and not callable(print_fn):
        needed = "a function that takes the text"
        raise unfit("print_fn", needed, print_fn, "Leave it out to print.")
    ErrorCollector.end_checks()


def sample_of(
    x: object,
    form: Optional[BatchForm],
    asks: str = "summary",
    target: bool = False,
    casting: Optional[Casting] = None,
) -> MicroBatch:
    """A micro-batch from one batch of inputs, as ``predict`` takes it, or from a loader's first.

    Args:
        x: the batch or the loader; a list of two or three parts of which one is a tensor is a
            batch, as a DataLoader makes it.
        form: in which module and loss take batches; None before ``compile``.
        asks: the method that asks, for messages.
        target: whether to keep the target of a batch that has one.
        casting: chooses its dtypes, as for ``fit``; None leaves them as they are.

    Raises:
        ConfigurationError: a loader that can be read only once, or is empty.
        DataError: it can't be fed.
    """
    form = form or BatchForm()
    batch = batch_of(x, form.own_loss, asks)
    if isinstance(batch, Mapping):
        with_target = target and form.has_target(batch)
    else:
        with_target = target and isinstance(batch, (tuple, list)) and len(batch) in (2, 3)
        with_target = with_target and batch[1] is not None
    mode = Mode.TRAIN if form.own_loss or with_target else Mode.PREDICT
    return BatchValidator(DataAdapter([batch], "the sample"), mode, form, casting)(batch, 0)


def batch_of(x: object, own_loss: OwnLoss, asks: str) -> Any:
    """Return the argument, if it is a batch, or the first batch of a loader.

    Args:
        x: the batch or the loader.
        own_loss: whether the module computes its own loss.
        asks: the method that asks, for messages.

    Raises:
        ConfigurationError: a loader that can be read only once, or is empty.
    """
    batch = x
    # A list that is no batch has batches, not arrays.
    is_of_parts = isinstance(x, list) and (own_loss or len(x) in (2, 3)) and any(map(is_array, x))
    if not (is_of_parts or is_array(x) or isinstance(x, (tuple, Mapping))):
        if isinstance(x, Iterator):
            raise ConfigurationError(
                f"{asks} needs a batch, or a loader that can be read again, got "
                f"{type(x).__name__}, whose first batch would be lost. Pass one batch."
            )
        # The order of a shuffled loader must not depend on who has looked into it.
        with isolated():
            batch = next(iter(DataAdapter(x, "the sample").loader), None)
        if batch is None:
            raise ConfigurationError(f"{asks} needs a batch, but the loader has none. Pass one.")
    return batch


def summarize(
    module: nn.Module,
    sample: Optional[MicroBatch],
    line_length: Optional[int] = None,
    depth: Optional[int] = None,
    more: Sequence[str] = (),
    marks: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> str:
    """The text.

    Args:
        module: the user's module.
        sample: of what its forward takes; None leaves output shapes unknown.
        line_length: longest line; None has no limit.
        depth: levels below the model to show; None shows all.
        more: paragraphs to add, such as the plan.
        marks: notes to add, by the name of the layer.
    """
    # Imported here: the rest of this module is needed more often.
    from ipufit.tracing.layers import layers_of, note_calls, output_shapes

    layers = layers_of(module)
    for layer in layers:
        layer.notes.extend(marks.get(layer.name, ()))
    shapes: Dict[nn.Module, List[str]] = {}
    paragraphs = []
    if sample is None:
        paragraphs.append("Output shapes need a batch: summary(x), or an earlier fit.")
    else:
        shapes, used, failure = output_shapes(module, sample)
        if failure is None:
            note_calls(layers, shapes, used)
        else:
            paragraphs.append(
                f"Output shapes marked ? are unknown: forward can't run without values: {failure}."
            )
    complete = sample is not None and not paragraphs
    rows = [
        _row(layer, layers, shapes, complete, depth)
        for layer in layers
        if depth is None or layer.depth <= depth
    ]
    paragraphs += [*_totals(module, layers), *more]
    return "\n".join([*_table(rows, line_length), *(fold(p, line_length) for p in paragraphs)])


def _row(
    layer: Layer,
    layers: Sequence[Layer],
    shapes: Dict[nn.Module, List[str]],
    complete: bool,
    depth: Optional[int],
) -> List[str]:
    counted = [layer]
    if depth is not None and layer.depth == depth:
        counted += [other for other in layers if other.name.startswith(f"{layer.name}.")]
    name = "  " * max(0, layer.depth - 1) + (layer.name or "(model)")
    shape = " / ".join(dict.fromkeys(shapes.get(layer.module, ()))) or ("-" if complete else "?")
    parameters, trainable = (
        sum(getattr(one, kind) for one in counted) for kind in ("parameters", "trainable")
    )
    notes = list(layer.notes)
    for inner in counted[1:]:
        shared = [n for n in inner.notes if " with " in n or " as " in n or n.endswith(" begins")]
        notes += [f"{inner.name[len(layer.name) + 1 :]}: {note}" for note in shared]
    return [name, layer.kind, shape, _count(parameters), _count(trainable), "; ".join(notes)]


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"


def _totals(module: nn.Module, layers: Sequence[Layer]) -> List[str]:
    parameters, buffers = list(module.parameters()), list(module.buffers())
    total = sum(layer.parameters for layer in layers)
    trainable = sum(layer.trainable for layer in layers)
    return [
        f"Parameters: {total:,} ({_mebibytes(parameters)}), {trainable:,} trainable, "
        f"{total - trainable:,} frozen.",
        f"Buffers: {sum(b.numel() for b in buffers):,} values ({_mebibytes(buffers)})."
        if buffers
        else "Buffers: none.",
    ]


def _mebibytes(tensors: Sequence[Tensor]) -> str:
    size = sum(t.numel() * t.element_size() for t in tensors) / 2**20
    return f"{size:.2f} MiB" if size >= 1 or not size else f"{size:.2g} MiB"


def _table(rows: Sequence[Sequence[str]], line_length: Optional[int]) -> List[str]:
    """Head, rule, rows, rule; notes are a column if there is room, else lines of their own."""
    widths = [max(len(row[i]) for row in (_HEAD, *rows)) for i in range(len(_HEAD))]
    apart = len(_GAP) * (len(_HEAD) - 1)
    with_notes = any(row[-1] for row in rows)
    below = line_length is not None and sum(widths) + apart > line_length
    if not with_notes or below:
        widths = widths[:-1]
    if line_length is not None:
        _narrow(widths, line_length - len(_GAP) * (len(widths) - 1))
    head, lines = _lines(_HEAD, widths), []
    for row in rows:
        lines += _lines(row, widths)
        if below and row[-1]:
            lines.append(fold(f"    {row[-1]}", line_length))
    rule = "-" * max(len(line) for text in (*head, *lines) for line in text.splitlines())
    return [*head, rule, *lines, rule]


def _narrow(widths: List[int], room: int) -> None:
    """Take width from the widest column of text, time and again."""
    columns = [i for i in _TEXT if i < len(widths)]
    while sum(widths) > room:
        widest = max(columns, key=lambda i: widths[i])
        widths[widest] -= 1


def _lines(row: Sequence[str], widths: Sequence[int]) -> List[str]:
    """A row as one line, or several where a cell is too wide for its column."""
    cells = []
    for cell, width in zip(row, widths):
        indent = " " * min(len(cell) - len(cell.lstrip()), width // 2)
        wrapped = textwrap.wrap(
            cell.strip(), width, initial_indent=indent, subsequent_indent=indent
        )
        cells.append(wrapped or [""])
    lines = []
    for k in range(max(len(cell) for cell in cells)):
        parts = [cell[k] if k < len(cell) else "" for cell in cells]
        justified = [
            part.ljust(width) if i in _TEXT else part.rjust(width)
            for i, (part, width) in enumerate(zip(parts, widths))
        ]
        lines.append(_GAP.join(justified).rstrip())
    return lines


def sample_for(session: Session, x: object, asks: str) -> MicroBatch:
    """The batch that was given, or that of the last ``fit``.

    Args:
        session: of the model.
        x: a batch or a loader; None for the shapes of the last ``fit``.
        asks: the method that asks.

    Raises:
        ConfigurationError: there is none.
        DataError: it can't be fed.
    """
    if x is not None:
        sample = sample_of(x, session.form(Mode.TRAIN), asks, True, session.casting)
        check_call(session.module, sample, session.loss, f"{asks}: ")
        return sample
    if session.sample is None:
        raise no_batch(asks)
    return session.sample


def no_batch(asks: str) -> ConfigurationError:
    """The error of a method that has nothing to look at."""
    return ConfigurationError(
        f"{asks} needs a batch, {asks}((inputs, target)), or an earlier fit; got neither."
    )
