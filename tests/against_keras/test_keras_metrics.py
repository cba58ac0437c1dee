"""Metrics by name have the values of Keras' metrics of that name."""

import pytest
import torch
from torch import nn

from ipufit import metrics
from ipufit.metrics.resolve import resolve_metrics
from tests.against_keras.twins import from_keras, keras

pytestmark = from_keras

SAMPLES, BATCH = 60, 13
_GENERATOR = torch.Generator().manual_seed(3)
SHARES = torch.rand(SAMPLES, 4, generator=_GENERATOR)
OTHERS = torch.rand(SAMPLES, 4, generator=_GENERATOR).softmax(1)
ONE = torch.rand(SAMPLES, 1, generator=_GENERATOR)
CLASSES = torch.randint(0, 4, (SAMPLES,), generator=_GENERATOR)
HOT = nn.functional.one_hot(CLASSES, 4).float()
LABELS = (torch.rand(SAMPLES, 4, generator=_GENERATOR) > 0.5).float()
REALS = torch.randn(SAMPLES, 4, generator=_GENERATOR)
NEAR = REALS + torch.randn(SAMPLES, 4, generator=_GENERATOR)
WIDE = torch.rand(SAMPLES, 9, generator=_GENERATOR)
NINE = torch.randint(0, 9, (SAMPLES,), generator=_GENERATOR)
K = keras.metrics

CASES = {
    "auc of one": ("auc", K.AUC, ONE, LABELS[:, :1]),
    "auc of labels": ("auc", K.AUC, SHARES, LABELS),
    "precision of one": ("precision", K.Precision, ONE, LABELS[:, :1]),
    "precision of labels": ("precision", K.Precision, SHARES, LABELS),
    "precision at": (
        metrics.Precision(threshold=0.7),
        lambda: K.Precision(thresholds=0.7),
        SHARES,
        LABELS,
    ),
    "recall": ("recall", K.Recall, SHARES, HOT),
    "f1": ("f1_score", lambda: K.F1Score("macro"), SHARES, HOT),
    "f1 of one": ("f1_score", lambda: K.F1Score("macro", threshold=0.5), ONE, LABELS[:, :1]),
    "f1 micro": (metrics.F1Score(average="micro"), lambda: K.F1Score("micro"), SHARES, HOT),
    "f1 weighted": (
        metrics.F1Score(average="weighted"),
        lambda: K.F1Score("weighted"),
        SHARES,
        HOT,
    ),
    "f1 of labels": (
        metrics.F1Score(task="multilabel"),
        lambda: K.F1Score("macro", threshold=0.5),
        SHARES,
        LABELS,
    ),
    "fbeta": (metrics.FBetaScore(beta=2.0), lambda: K.FBetaScore("macro", 2.0), SHARES, HOT),
    "iou": ("mean_io_u", lambda: K.MeanIoU(4, sparse_y_pred=False), SHARES, CLASSES),
    "iou of one-hot": ("mean_io_u", lambda: K.OneHotMeanIoU(4), SHARES, HOT),
    "iou of one": ("mean_io_u", lambda: K.BinaryIoU(threshold=0.5), ONE, LABELS[:, :1]),
    "r2": ("r2_score", K.R2Score, REALS, NEAR),
    "r2 of one": ("r2_score", K.R2Score, REALS[:, :1], NEAR[:, :1]),
    "pearson": ("pearson_correlation", K.PearsonCorrelation, REALS, NEAR),
    "concordance": ("concordance_correlation", K.ConcordanceCorrelation, REALS, NEAR),
    "top k": (
        "top_k_categorical_accuracy",
        K.TopKCategoricalAccuracy,
        WIDE,
        nn.functional.one_hot(NINE, 9).float(),
    ),
    "sparse top k": (
        "sparse_top_k_categorical_accuracy",
        K.SparseTopKCategoricalAccuracy,
        WIDE,
        NINE,
    ),
    "mape": ("mean_absolute_percentage_error", K.MeanAbsolutePercentageError, REALS, NEAR),
    "msle": ("mean_squared_logarithmic_error", K.MeanSquaredLogarithmicError, REALS, NEAR),
    "log cosh": ("log_cosh", K.LogCoshError, REALS, NEAR),
    "hinge of 0 and 1": ("hinge", K.Hinge, REALS, LABELS),
    "hinge of -1 and 1": ("hinge", K.Hinge, REALS, 2 * LABELS - 1),
    "squared hinge": ("squared_hinge", K.SquaredHinge, REALS, LABELS),
    "kl": ("kl_divergence", K.KLDivergence, SHARES.softmax(1), OTHERS),
    "cosine": ("cosine_similarity", K.CosineSimilarity, REALS, NEAR),
}


@pytest.mark.parametrize("case", CASES)
def test_a_metric_has_the_value_of_keras(case):
    """Over micro-batches of which the last is smaller; to the rounding of float32."""
    metric, make, prediction, target = CASES[case]
    ours, theirs = resolve_metrics(metric), make()
    for p, t in zip(prediction.split(BATCH), target.split(BATCH)):
        ours.update(p, t, len(p))
        theirs.update_state(t.numpy(), p.numpy())
    (value,) = ours.compute().values()
    assert value == pytest.approx(float(theirs.result()), rel=2e-6)
