"""``python -m tests.bench.first_update MODEL``: processor time before the first update, as JSON.

Large models, a few samples each, one thread: three updates of an eager loop, and then from the call
of ``fit`` to the end of its first update, of another copy of the model, in all and by part.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor, nn

from tests.bench.costs import Cost
from tests.bench.real import Logits

__all__ = ["MODELS", "FirstUpdates", "first_updates", "parts_table"]

# Beside three eager updates.
_SECONDS = 2.0

# Parts of the time, by what people call them, and the functions that they are spent in.
_PARTS = {
    "recording": ("ipufit.engines.embedded.context", "capture"),
    "choosing kernels": ("ipufit.engines.embedded.context", "lower"),
    "weights and state": ("ipufit.engines.embedded.training_state", "TrainingState.bind"),
    "the update": ("ipufit.engines.embedded.update_runner", "UpdateRunner.make"),
}

# Model, inputs and classes.
Made = Tuple[nn.Module, Tensor, Tensor]


class _Sequences(nn.Module):
    """An LSTM over long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the last time step."""
        scores: Tensor = self.head(self.layer(x)[0][:, -1])
        return scores


def _bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    net = Logits(BertForSequenceClassification(BertConfig(num_labels=4)))
    return net, torch.randint(1000, (2, 32)), torch.randint(4, (2,))


def _gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_positions": 64, "n_embd": 256, "n_layer": 24, "n_head": 4}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=1000, use_cache=False, **shape, **ends)
    words = torch.randint(1000, (2, 65))
    return Logits(GPT2LMHeadModel(config)), words[:, :-1].contiguous(), words[:, 1:].contiguous()


def _resnet() -> Made:
    from torchvision.models import resnet50

    return resnet50(num_classes=10), torch.randn(4, 3, 64, 64), torch.randint(10, (4,))


def _lstm() -> Made:
    return _Sequences(), torch.randn(4, 1000, 32), torch.randint(10, (4,))


MODELS: Dict[str, Callable[[], Made]] = {
    "BERT-base": _bert,
    "GPT-2 with 24 layers": _gpt2,
    "ResNet-50": _resnet,
    "an LSTM over 1,000 time steps": _lstm,
}


def _timed(module: str, path: str) -> List[float]:
    """Let a function tell the processor time of each call."""
    owner: object = importlib.import_module(module)
    *owners, name = path.split(".")
    for each in owners:
        owner = getattr(owner, each)
    function, seconds = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> object:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds.append(time.process_time() - start)

    setattr(owner, name, call)
    return seconds


def main(name: str) -> None:
    """Measure, and print the seconds."""
    import ipufit

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, x, y = MODELS[name]()
    other = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(other.parameters())
    eager: List[float] = []
    for _ in range(3):
        start = time.process_time()
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
        eager.append(time.process_time() - start)
    del other, optimizer
    model = ipufit.Model(net)
    model.compile("adamw", "cross_entropy")
    ends: List[float] = []
    end = ipufit.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.process_time())
    )
    parts = {part: _timed(*where) for part, where in _PARTS.items()}
    start = time.process_time()
    model.fit(x, y, batch_size=len(x), verbose=0, callbacks=[end])
    seconds = {"eager": 3 * min(eager), "first": ends[0] - start}
    print(json.dumps({**seconds, **{part: sum(each) for part, each in parts.items()}}))


def _measured(name: str, cache: str) -> Dict[str, float]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["IPUFIT_CACHE_DIR"] = cache
    command = [sys.executable, "-m", __spec__.name, name]
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    seconds: Dict[str, float] = json.loads(done.stdout)
    return seconds


@dataclasses.dataclass(frozen=True)
class FirstUpdates:
    """Seconds before the first updates of a model.

    Attributes:
        model: its name.
        first: of processes that find nothing measured, in all and by part.
        later: of processes after these.
    """

    model: str
    first: Sequence[Mapping[str, float]]
    later: Sequence[Mapping[str, float]]

    def costs(self) -> List[Cost]:
        """What both are to be at most."""
        eager = min(each["eager"] for each in (*self.first, *self.later))
        title = f"processor time from the call of `fit` to the first update of {self.model}"
        bound, where = _SECONDS + eager, "in a later process"
        return [
            Cost(title, [each["first"] for each in self.first], " s", bound),
            Cost(f"{title}, {where}", [each["first"] for each in self.later], " s", bound / 2),
        ]


def first_updates(count: int) -> List[FirstUpdates]:
    """Of each model, in a process that finds nothing measured, and in one after it."""
    found = []
    for name in MODELS:
        pairs: List[List[Dict[str, float]]] = []
        for _ in range(count):
            with tempfile.TemporaryDirectory() as cache:
                pairs.append([_measured(name, cache) for _ in range(2)])
        first, later = zip(*pairs)
        found.append(FirstUpdates(name, first, later))
    return found


def parts_table(measured: Sequence[FirstUpdates]) -> str:
    """The seconds of each part, one line for a model in a process, and what is left."""
    lines = [
        f"| model | {' | '.join(_PARTS)} | all else | in all |",
        f"| --- |{' ---: |' * (len(_PARTS) + 2)}",
    ]
    for each in measured:
        for title, runs in (("", each.first), (", in a later process", each.later)):
            parts = [statistics.median(run[part] for run in runs) for part in _PARTS]
            whole = statistics.median(run["first"] for run in runs)
            numbers = " | ".join(f"{n:.2f}" for n in (*parts, whole - sum(parts), whole))
            lines.append(f"| {each.model}{title} | {numbers} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1])
