"""Operators that search: beams of a CTC decoder, farthest points, nearest neighbours."""

from __future__ import annotations

import ctypes
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ipufit.poptorch._logging import error
from ipufit.poptorch._tracing import define, need_kind

Path = Tuple[int, ...]
# Log-probability of the alignments so far that end in a blank, and of those that don't.
Ends = Tuple[float, float]

_NEVER = -math.inf


def _sum(*logs: float) -> float:
    """Return the log of the sum of probabilities whose logs are the arguments."""
    largest = max(logs)
    if largest == _NEVER:
        return _NEVER
    return largest + math.log(sum(math.exp(log - largest) for log in logs))


def _step(beams: Dict[Path, Ends], row: Sequence[float], blank: int) -> Dict[Path, Ends]:
    """Extend all paths by one more row of log-probabilities."""
    grown: Dict[Path, Ends] = {}

    def add(path: Path, ends: Ends) -> None:
        before = grown.get(path, (_NEVER, _NEVER))
        grown[path] = (_sum(before[0], ends[0]), _sum(before[1], ends[1]))

    for path, (blank_end, label_end) in beams.items():
        add(path, (_sum(blank_end, label_end) + row[blank], _NEVER))
        for label, log in enumerate(row):
            if label == blank:
                continue
            if path and path[-1] == label:
                # Once more without a blank between: still the same label.
                add(path, (_NEVER, label_end + log))
                add((*path, label), (_NEVER, blank_end + log))
            else:
                add((*path, label), (_NEVER, _sum(blank_end, label_end) + log))
    return grown


def _decode(rows: Sequence[Sequence[float]], blank: int, width: int) -> List[Tuple[Path, float]]:
    """Return the most likely paths, best first; ties in order of length, then of labels."""
    beams: Dict[Path, Ends] = {(): (0.0, _NEVER)}
    for row in rows:
        grown = _step(beams, row, blank)
        best = sorted(grown, key=lambda path: (-_sum(*grown[path]), len(path), path))
        beams = {path: grown[path] for path in best[:width]}
    return [(path, _sum(*ends)) for path, ends in beams.items()]


def _run_ctc(
    probs: Tensor, lengths: Tensor, blank: int, beam_width: int, top_paths: int
) -> Tuple[Tensor, Tensor, Tensor]:
    steps = len(probs)
    scores, counts, paths = results = _no_paths(probs, lengths, blank, beam_width, top_paths)
    rows = probs.detach().double().cpu().transpose(0, 1).tolist()
    for sample, length in enumerate(lengths.tolist()):
        if not 0 <= length <= steps:
            raise error(
                f"ctc_beam_search_decoder: lengths must be from 0 to the input length {steps}, "
                f"got {length} for sample {sample}."
            )
        decoded = _decode(rows[sample][: int(length)], blank, beam_width)
        for place, (path, score) in enumerate(decoded[:top_paths]):
            scores[sample, place] = score
            counts[sample, place] = len(path)
            paths[sample, place, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return results


def _no_paths(
    probs: Tensor, lengths: Tensor, blank: int, beam_width: int, top_paths: int
) -> Tuple[Tensor, Tensor, Tensor]:
    steps, batch, _ = probs.shape
    return (
        probs.new_full((batch, top_paths), _NEVER),
        probs.new_zeros((batch, top_paths), dtype=torch.int32),
        probs.new_full((batch, top_paths, steps), blank, dtype=torch.int32),
    )


_DECODER = define(
    "ctc_beam_search_decoder(Tensor probs, Tensor lengths, int blank, int beam_width, "
    "int top_paths) -> (Tensor, Tensor, Tensor)",
    _run_ctc,
    _no_paths,
)


def ctc_beam_search_decoder(
    probs: Tensor,
    lengths: Tensor,
    blank: int = 0,
    beam_width: int = 100,
    top_paths: int = 1,
) -> List[Tensor]:
    """Decode with a prefix beam search.

    That of Hannun et al., 2014 (arXiv 1408.2873), without a language model.

    Args:
        probs: log-probabilities of shape (input length, batch size, classes).
        lengths: how many steps of each sample count, shape (batch size,).
        blank: the class that stands for no label.
        beam_width: how many paths are kept at each step.
        top_paths: how many are returned, at most ``beam_width``.
    Returns:
        Log-probabilities of the best paths (batch size, top_paths), in the dtype of ``probs``,
        -inf where there is no such path; their lengths (batch size, top_paths) and the paths
        (batch size, top_paths, input length), int32, filled up with the blank class.
    Raises:
        Error: shapes that don't fit, no such class, more paths than beams.
    """
    need_kind(probs, Tensor, "ctc_beam_search_decoder: probs must be a torch.tensor argument.")
    need_kind(lengths, Tensor, "ctc_beam_search_decoder: lengths must be a torch.tensor argument.")
    if probs.dim() != 3:
        raise error(
            "Incorrect shape for first input to CTC beam search decoder. Expected (input length, "
            f"batch size, classes), got {tuple(probs.shape)}."
        )
    if lengths.shape != probs.shape[1:2]:
        raise error(
            "ctc_beam_search_decoder: lengths must have one number for each sample: expected "
            f"shape {tuple(probs.shape[1:2])}, got {tuple(lengths.shape)}."
        )
    if not 0 <= blank < probs.shape[2]:
        raise error(
            f"ctc_beam_search_decoder: blank must be one of the {probs.shape[2]} classes, got "
            f"{blank}."
        )
    if not 1 <= top_paths <= beam_width:
        raise error(
            "ctc_beam_search_decoder: top_paths must be from 1 to beam_width, which is "
            f"{beam_width}, got {top_paths}."
        )
    with torch.no_grad():
        return list(_DECODER(probs, lengths, blank, beam_width, top_paths))


def _run_fps(src: Tensor, ptr: List[int], counts: List[int], starts: Tensor) -> Tensor:
    chosen = [
        first + _sample(src[first:end], count, int(start))
        for first, end, count, start in zip(ptr, ptr[1:], counts, starts.tolist())
        if count
    ]
    return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64, device=src.device)


def _sample(points: Tensor, count: int, start: int) -> Tensor:
    """Choose points greedily: the next one is the farthest from its nearest chosen point."""
    flat = points.reshape(len(points), -1)
    distances = flat.new_full((len(flat),), math.inf)
    chosen = [torch.tensor(start, device=flat.device)]
    for _ in range(count - 1):
        distances = torch.minimum(distances, (flat - flat[chosen[-1]]).square().sum(1))
        # A point is chosen once, also where others lie in the same place.
        distances[chosen[-1]] = -1.0
        chosen.append(distances.argmax())
    return torch.stack(chosen)


_FPS = define(
    "fps(Tensor src, int[] ptr, int[] counts, Tensor starts) -> Tensor",
    _run_fps,
    lambda src, ptr, counts, starts: torch.empty(sum(counts), dtype=torch.int64, device="meta"),
)


def _single(value: float) -> float:
    return ctypes.c_float(value).value


def fps(src: Tensor, ptr: List[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Farthest point sampling: each next point is the one farthest from those chosen before.

    As in the paper on PointNet++ (Qi et al., 2017, section 3.2).

    Args:
        src: shape (points, features).
        ptr: where the points of each sample begin, and where the last one's end.
        ratio: of the points of each sample that are chosen, rounded up.
        random_start: begin with a point drawn at random instead of each sample's first.
    Returns:
        Indices of the chosen points among all, sample by sample.
    Raises:
        Error: an argument of another kind, or a ``ptr`` that does not fit the points.
    """
    need_kind(src, Tensor, "`fps` must take a torch.tensor input.")
    if not isinstance(ptr, list):
        raise error(
            f"`ptr` must be a list of integers. Got {type(ptr)}: the number of points chosen is "
            "fixed when the model is compiled."
        )
    if not len(ptr) >= 2:
        raise error(
            f"`ptr` must contain at least 2 elements. Got {ptr}; for one range write [0, len(src)]."
        )
    need_kind(ratio, float, "`ratio` must be of float type.")
    need_kind(random_start, bool, "`random_start` must be of bool type.")
    ordered = all(a <= b for a, b in zip(ptr, ptr[1:]))
    if not ordered or ptr[0] < 0 or ptr[-1] > src.shape[0]:
        raise error(
            f"`ptr` must rise from at least 0 to at most the number of points, {src.shape[0]}, "
            f"got {ptr}."
        )
    if not 0 < ratio <= 1:
        raise error(f"`ratio` must be more than 0 and at most 1, got {ratio}.")
    sizes = [end - first for first, end in zip(ptr, ptr[1:])]
    # In single precision, as on the device: 30 points at 0.1 are 3, not 4.
    counts = [math.ceil(_single(size * _single(ratio))) for size in sizes]
    starts = torch.zeros(len(sizes), dtype=torch.int64, device=src.device)
    if random_start:
        limits = torch.tensor(sizes, dtype=torch.float64, device=src.device)
        drawn = torch.rand(len(sizes), dtype=torch.float64, device=src.device)
        starts = (drawn * limits).to(torch.int64)
    with torch.no_grad():
        chosen: Tensor = _FPS(src, ptr, counts, starts)
    return chosen


Batch = Optional[Union[List[int], Tensor]]


def nearest(x: Tensor, y: Tensor, batch_x: Batch = None, batch_y: Batch = None) -> Tensor:
    """Return for each row of ``x`` the index of the nearest row of ``y`` in the same sample.

    Args:
        x: shape (rows, features) or (rows,).
        y: shape (other rows, features) or (other rows,).
        batch_x: the sample of each row of ``x``, in rising order; None: all in sample 0.
        batch_y: the sample of each row of ``y``, in rising order; None: all in sample 0.
    Raises:
        Error: shapes or batches that don't fit together.
    """
    for name, points in (("x", x), ("y", y)):
        need_kind(points, Tensor, f"`nearest` must take a torch.tensor `{name}` input.")
        if points.dim() not in (1, 2):
            raise error(
                "Inputs `x` and `y` should be max 2D tensors, while "
                f"`x` has {x.dim()} dims and `y` has {y.dim()} dims. Flatten the features."
            )
    for batch in (batch_x, batch_y):
        if not isinstance(batch, (type(None), list, Tensor)):
            raise error(
                "`batch_x` and `batch_y` must be torch.Tensors or lists while `batch_x` is of "
                f"type {type(batch_x)} and `batch_y` is of type {type(batch_y)}."
            )
    left, right = (points.reshape(points.shape[0], -1) for points in (x, y))
    if left.shape[1] != right.shape[1]:
        raise error(
            f"Inputs shapes inconsistent x.shape[1]={left.shape[1]} vs. "
            f"y.shape[1]={right.shape[1]}. Give points of the same number of features."
        )
    of_x, of_y = _batch(batch_x, left, "x"), _batch(batch_y, right, "y")
    if of_x is not None and of_y is not None:
        _check_shared(of_x, of_y)
    with torch.no_grad():
        return _nearest(left, right, of_x, of_y)


def _nearest(x: Tensor, y: Tensor, batch_x: Optional[Tensor], batch_y: Optional[Tensor]) -> Tensor:
    precise = [p if p.dtype == torch.float64 else p.float() for p in (x, y)]
    wide = torch.promote_types(precise[0].dtype, precise[1].dtype)
    # Not through matrix products, whose rounding decides wrongly between near neighbours.
    distances = torch.cdist(
        precise[0].to(wide), precise[1].to(wide), compute_mode="donot_use_mm_for_euclid_dist"
    )
    if batch_x is None and batch_y is None:
        return distances.argmin(1)
    device = x.device
    of_x = torch.zeros(len(x), device=device) if batch_x is None else batch_x.to(device)
    of_y = torch.zeros(len(y), device=device) if batch_y is None else batch_y.to(device)
    return distances.masked_fill(of_x[:, None] != of_y[None, :], math.inf).argmin(1)


def _batch(batch: Batch, points: Tensor, name: str) -> Optional[Tensor]:
    if batch is None or len(batch) == 0:
        return None
    if len(batch) != points.shape[0] or (isinstance(batch, Tensor) and batch.dim() != 1):
        got = tuple(batch.shape) if isinstance(batch, Tensor) else len(batch)
        raise error(
            f"`batch_{name}` must have one number for each row of `{name}`: expected "
            f"{points.shape[0]}, got {got}."
        )
    values = _values(batch)
    if values is not None and values != sorted(values):
        raise error(f"'batch_{name}' is not sorted. Sort the rows of `{name}` by batch.")
    return batch if isinstance(batch, Tensor) else torch.tensor(batch, dtype=torch.int64)


def _values(batch: Any) -> Optional[List[int]]:
    """Return the numbers; None where they are only there at run time."""
    if isinstance(batch, FakeTensor):
        return None
    values: List[int] = batch if isinstance(batch, list) else batch.tolist()
    return values


def _check_shared(batch_x: Tensor, batch_y: Tensor) -> None:
    of_x, of_y = _values(batch_x), _values(batch_y)
    if of_x is not None and of_y is not None and not set(of_x) <= set(of_y):
        missing = sorted(set(of_x) - set(of_y))
        raise error(
            "Some batch indices occur in 'batch_x' that do not occur in 'batch_y': "
            f"{missing}. Give each sample at least one row of `y`."
        )
