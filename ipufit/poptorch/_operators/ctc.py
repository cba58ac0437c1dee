"""Decoding of connectionist temporal classification by prefix beam search."""

from __future__ import annotations

import math
from typing import Dict, List, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.poptorch._errors import error
from ipufit.poptorch._operators.graph import define

__all__ = ["ctc_beam_search_decoder"]

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


def _run(
    probs: Tensor, lengths: Tensor, blank: int, beam_width: int, top_paths: int
) -> Tuple[Tensor, Tensor, Tensor]:
    steps, batch, _ = probs.shape
    scores = torch.full((batch, top_paths), _NEVER, dtype=torch.float64)
    counts = torch.zeros((batch, top_paths), dtype=torch.int32)
    paths = torch.full((batch, top_paths, steps), blank, dtype=torch.int32)
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
    device = probs.device
    return scores.to(device, probs.dtype), counts.to(device), paths.to(device)


def _shapes(
    probs: Tensor, lengths: Tensor, blank: int, beam_width: int, top_paths: int
) -> Tuple[Tensor, Tensor, Tensor]:
    steps, batch, _ = probs.shape
    return (
        probs.new_empty((batch, top_paths)),
        probs.new_empty((batch, top_paths), dtype=torch.int32),
        probs.new_empty((batch, top_paths, steps), dtype=torch.int32),
    )


_DECODER = define(
    "ctc_beam_search_decoder(Tensor probs, Tensor lengths, int blank, int beam_width, "
    "int top_paths) -> (Tensor, Tensor, Tensor)",
    _run,
    _shapes,
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
    if not isinstance(probs, Tensor):
        raise error(
            "ctc_beam_search_decoder: probs must be a torch.tensor argument. "
            f"{type(probs)} is not supported."
        )
    if not isinstance(lengths, Tensor):
        raise error(
            "ctc_beam_search_decoder: lengths must be a torch.tensor argument. "
            f"{type(lengths)} is not supported."
        )
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
