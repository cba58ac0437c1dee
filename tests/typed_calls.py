"""Calls with words that arguments take, and with typing errors, for mypy and for the program.

mypy has this file among its `files`. It refuses each wrong call, or the `type: ignore` behind it is
one too many, which is a fault in strict mode; tests/core/test_choices.py runs all of them.
"""

from __future__ import annotations

from typing import Callable, Iterator

import torch
from torch import nn

import ipufit
from ipufit.callbacks import EarlyStopping, ModelCheckpoint, ProgbarLogger, TensorBoard, Timer
from ipufit.core import Jit, PrecisionName
from ipufit.metrics import F1Score
from ipufit.optim import Muon
from ipufit.optim.schedules import WSD, OneCycle

Call = Callable[[], object]


def a_model() -> ipufit.Model:
    """A model that can be compiled."""
    return ipufit.Model(nn.Linear(2, 1), engine="embedded")


def a_backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    """A backend of torch.compile that does nothing to a graph."""
    return graph.forward


def compiled() -> ipufit.Model:
    """A compiled model."""
    model = a_model()
    model.compile("sgd", "mse")
    return model


def right() -> Iterator[Call]:
    """Yield calls that the type checker and the program take."""
    x, y = torch.zeros(4, 2), torch.zeros(4, 1)
    word: Jit = "graph"
    name: PrecisionName = "bf16-mixed"
    rest = "aot_" + "eager"
    yield lambda: a_model().compile("sgd", "mse", jit=word, lr_scheduler_interval="epoch")
    yield lambda: a_model().compile("sgd", "mse", jit=rest)
    yield lambda: a_model().compile("sgd", "mse", precision=name, outputs="final")
    yield lambda: a_model().compile("sgd", "mse", precision=ipufit.Precision("mixed_float16"))
    yield lambda: compiled().fit(x, y, verbose=0)
    yield lambda: compiled().fit(x, y, verbose=False)
    yield lambda: compiled().evaluate(x, y, verbose=0)
    yield lambda: ipufit.Reduction("tokens", gradients="mean")
    yield lambda: ipufit.Memory(shard="weights")
    yield lambda: ipufit.Outputs("every_n", 2)
    yield lambda: ipufit.Checkpoint("runs", monitor="val_loss", mode="min")
    yield lambda: ipufit.Precision(None, loss_scale="dynamic")
    yield lambda: EarlyStopping(mode="max", verbose=1)
    yield lambda: ModelCheckpoint("w.safetensors", save_freq="epoch")
    yield lambda: ProgbarLogger("rich")
    yield lambda: Timer().time_elapsed("predict")
    yield lambda: F1Score("multiclass", average="weighted")
    yield lambda: WSD(shape="1-sqrt")
    yield lambda: ipufit.log("size", 1.0, "max")


def wrong() -> Iterator[Call]:
    """Yield calls that both refuse: the last argument is a word that there is not."""
    x, y = torch.zeros(4, 2), torch.zeros(4, 1)
    model, settings = a_model(), ipufit.IPUConfig
    yield lambda: ipufit.Model(nn.Linear(2, 1), engine="embeded")  # type: ignore[arg-type]
    yield lambda: model.compile("sgd", "mse", precision="mixed_float61")  # type: ignore[arg-type]
    yield lambda: model.compile("sgd", "mse", outputs="last")  # type: ignore[arg-type]
    yield lambda: model.compile(
        "sgd",
        "mse",
        lr_scheduler_interval="step",  # type: ignore[arg-type]
    )
    yield lambda: compiled().fit(x, y, verbose="auot")  # type: ignore[arg-type]
    yield lambda: compiled().fit(x, y, verbose=3)  # type: ignore[arg-type]
    yield lambda: compiled().predict(x, verbose=3)  # type: ignore[arg-type]
    yield lambda: compiled().compare((x, y), "flaot64")  # type: ignore[arg-type]
    yield lambda: compiled().plan((x, y), schedule="groupd")  # type: ignore[arg-type]
    yield lambda: compiled().plan((x, y), strategy="shard")  # type: ignore[arg-type]
    yield lambda: ipufit.Reduction("token")  # type: ignore[arg-type]
    yield lambda: ipufit.Reduction(sample_weights="mean")  # type: ignore[arg-type]
    yield lambda: ipufit.Reduction(gradients="average")  # type: ignore[arg-type]
    yield lambda: ipufit.Memory(shard="optimiser")  # type: ignore[arg-type]
    yield lambda: ipufit.Outputs("some")  # type: ignore[arg-type]
    yield lambda: ipufit.Precision("fp16")  # type: ignore[arg-type]
    yield lambda: ipufit.Precision(loss_scale="dynamc")  # type: ignore[arg-type]
    yield lambda: ipufit.Checkpoint(mode="minimum")  # type: ignore[arg-type]
    yield lambda: settings(output_mode="every_n")  # type: ignore[arg-type]
    yield lambda: EarlyStopping(mode="maximum")  # type: ignore[arg-type]
    yield lambda: EarlyStopping(verbose=2)  # type: ignore[arg-type]
    yield lambda: ModelCheckpoint("w.safetensors", save_freq="batch")  # type: ignore[arg-type]
    yield lambda: ProgbarLogger("auto")  # type: ignore[arg-type]
    yield lambda: Timer().time_elapsed("test")  # type: ignore[arg-type]
    yield lambda: F1Score("binry")  # type: ignore[arg-type]
    yield lambda: F1Score(average="mean")  # type: ignore[arg-type]
    yield lambda: Muon([torch.zeros(2, 2)], adjust_lr_fn="none")  # type: ignore[arg-type]
    yield lambda: TensorBoard(update_freq="batches")  # type: ignore[arg-type]
    yield lambda: settings().for_pod_type("pod5")  # type: ignore[arg-type]
    yield lambda: WSD(shape="root")  # type: ignore[arg-type]
    yield lambda: OneCycle(shape="1-sqrt")  # type: ignore[arg-type]
    yield lambda: ipufit.log("size", 1.0, "average")  # type: ignore[arg-type]
