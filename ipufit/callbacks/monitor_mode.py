"""Which way a value is better: what its loss or metric says, else its name."""

from __future__ import annotations

import re
from typing import Mapping, Optional

__all__ = ["direction_of"]

_LARGE = {
    *("acc", "accuracy", "auc", "auroc", "f1", "fbeta", "precision", "recall", "specificity"),
    *("sensitivity", "iou", "jaccard", "dice", "map", "ap", "r2", "psnr", "ssim", "bleu", "rouge"),
    *("kappa", "mcc", "similarity", "ndcg", "mrr", "top1", "top3", "top5", "correct"),
}
_SMALL = {
    *("loss", "error", "mse", "mae", "rmse", "mape", "msle", "perplexity", "ppl", "nll", "wer"),
    *(
        "cer",
        "hinge",
        "divergence",
        "crossentropy",
        "bce",
        "logloss",
        "brier",
        "fid",
        "deviance",
        "distance",
    ),
}


def direction_of(
    name: str, directions: Optional[Mapping[str, str]] = None, guess: bool = True
) -> Optional[str]:
    """Return "min" or "max", the direction of better values of a metric; None if unknown.

    Args:
        name: such as "val_loss", "BinaryAccuracy" or "top5_acc"; its words decide where nothing is
            known, and of these the last one with a meaning: an "accuracy_loss" is a loss.
        directions: what losses and metrics say of themselves, by name: ``params["directions"]``.
        guess: whether other words than "loss" count. Not where a wrong guess would keep the worst
            weights instead of the best.
    """
    if directions is not None and name in directions:
        return directions[name]
    if not guess:
        return "min" if name.endswith("_loss") else None
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    spaced = re.sub(r"(?i)cross_entropy", "crossentropy", spaced)
    for word in reversed(re.split(r"[^a-z0-9]+", spaced.lower())):
        if word in _SMALL:
            return "min"
        if word in _LARGE:
            return "max"
    return None
