"""Which way a value is better, by its name."""

from __future__ import annotations

import re
from typing import Optional

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


def direction_of(name: str) -> Optional[str]:
    """Whether to aim for "min" or "max"; None if the name does not say.

    Args:
        name: such as "val_loss", "BinaryAccuracy" or "top5_acc"; its words decide, the last that is
            known: an "accuracy_loss" is a loss.
    """
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    spaced = re.sub(r"(?i)cross_entropy", "crossentropy", spaced)
    for word in reversed(re.split(r"[^a-z0-9]+", spaced.lower())):
        if word in _SMALL:
            return "min"
        if word in _LARGE:
            return "max"
    return None
