"""Compare the speed of fit with an eager loop: a dense net, 784-128-10, on random data.

Both train the same net with Adam on the same batches from the same DataLoader, and must end with
the same loss. They take turns, so that a machine that slows down slows both; the medians over the
rounds and their ratio are printed. Takes about half a minute on two cores. Microseconds depend on
the machine; the ratio is what to look at.

    python examples/benchmark_mlp.py
"""

import statistics
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit

ROUNDS, SAMPLES, BATCH = 9, 8192, 32


def build():
    """The same net every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def main():
    """Measure in turns."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 784), torch.randint(0, 10, (SAMPLES,)))
    loader = DataLoader(data, batch_size=BATCH)

    eager = build()
    optimizer = torch.optim.Adam(eager.parameters())
    loss_function = nn.CrossEntropyLoss()

    def loop():
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_function(eager(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        return total / SAMPLES

    model = ipufit.Model(build())
    model.compile(lambda parameters: torch.optim.Adam(parameters), "cross_entropy")

    def fit():
        return model.fit(loader, device_iterations=32, verbose=0, seed=0).history["loss"][0]

    seconds = {loop: [], fit: []}
    for round_ in range(ROUNDS + 1):
        losses = []
        for run in seconds:
            start = time.perf_counter()
            losses.append(run())
            if round_ > 0:  # the first round warms up, and records the program
                seconds[run].append(time.perf_counter() - start)

        if round_ == 0 and abs(losses[0] - losses[1]) > 1e-6:
            raise SystemExit(f"the losses differ: {losses}")

    updates = SAMPLES // BATCH
    median = {run: statistics.median(values) for run, values in seconds.items()}
    for run, name in ((loop, "eager loop"), (fit, "ipufit.fit")):
        print(f"{name}: {1e6 * median[run] / updates:.0f} microseconds per update")
    ratios = [a / b for a, b in zip(seconds[loop], seconds[fit])]
    print(
        f"eager loop / fit: {statistics.median(ratios):.2f} "
        f"(from {min(ratios):.2f} to {max(ratios):.2f} over {ROUNDS} rounds)"
    )


if __name__ == "__main__":
    main()
