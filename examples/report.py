"""Write the report of a run: a page with curves, times, a pipeline's timeline and memory.

A convolutional net in four stages learns real digits, which ship with scikit-learn; nothing is
downloaded. The page goes to the folder given, or to a temporary one: open report.html in a browser,
and trace.json in Perfetto. Prints where the time went. Takes seconds.

    pip install ".[examples]"
    python examples/report.py [folder]
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import ipufit

SEED = 0
LIMIT = 5_000_000


def block(inputs, outputs):
    """A convolution with BatchNorm."""
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


def main(folder):
    """Fit with a report, and look into it."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    net = nn.Sequential(
        block(1, 8), block(8, 16), nn.MaxPool2d(2), block(16, 16), nn.Flatten(), nn.Linear(256, 10)
    )
    model = ipufit.Model(net)
    stages = {"0": 0, "1": 1, "3": 2, "4": 3}
    model.compile(
        "adam", "cross_entropy", metrics=["accuracy"], parallel=ipufit.Parallel(stages=stages)
    )
    model.fit(
        x,
        y,
        batch_size=8,
        epochs=5,
        ipus=4,
        gradient_accumulation=8,
        validation_split=0.2,
        seed=SEED,
        verbose=2,
        callbacks=[ipufit.Report(folder)],
    )
    facts = json.loads((folder / "run.json").read_text())
    for name, seconds in sorted(facts["phases"].items(), key=lambda each: -each[1]):
        print(f"{name:>10}: {100 * seconds / facts['seconds']:5.1f} %")
    for warning in facts["warnings"]:
        print(f"- {warning['text']} {warning['cure']}")
    page = folder / "report.html"
    print(f"{page}: {page.stat().st_size:,} bytes")
    if page.stat().st_size > LIMIT:
        raise SystemExit(f"the page is larger than {LIMIT:,} bytes")
    if abs(sum(facts["phases"].values()) - facts["seconds"]) > 1e-6:
        raise SystemExit("the phases must add up to the time of the run")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()) / "run")
