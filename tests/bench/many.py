"""``python -m tests.bench.many``: models trained by fit_many, and by one fit after another.

Prints for each net the CPU time of an update of one model in microseconds, recording included, in
rounds: the ways take turns, as the machine's speed changes while one looks. The ratio is the median
over the rounds.
"""

import argparse
import statistics
import time
import warnings

import torch
from torch import nn

import ipufit

BATCH, SAMPLES = 32, 3200
# Features, hidden units, classes; and the rate of dropout.
NETS = {
    "20-32-32-4": ([20, 32, 32, 4], 0.0),
    "20-64-64-4": ([20, 64, 64, 4], 0.0),
    "20-64-64-4, dropout": ([20, 64, 64, 4], 0.1),
    "20-128-128-4": ([20, 128, 128, 4], 0.0),
    "784-128-10": ([784, 128, 10], 0.0),
}


def build(sizes, dropout, lr, seed):
    """A compiled MLP."""
    torch.manual_seed(seed)
    pairs = zip(sizes[:-1], sizes[1:-1])
    hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs]
    hidden += [nn.Dropout(dropout)] if dropout else []
    net = nn.Sequential(*hidden, nn.Linear(*sizes[-2:]))
    model = ipufit.Model(net)
    model.compile(torch.optim.Adam(net.parameters(), lr), "cross_entropy")
    return model


def measure(name, models, epochs, rounds):
    """Microseconds of each way in each round: together, one after another, as many updates."""
    sizes, dropout = NETS[name]
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, sizes[0]), torch.randint(0, sizes[-1], (SAMPLES,))
    grid = [{"lr": 1e-3 * (1 + i / 10), "seed": i} for i in range(models)]
    options = {"epochs": epochs, "batch_size": BATCH, "verbose": 0}

    def make(lr, seed):
        return build(sizes, dropout, lr, seed)

    def together():
        ipufit.fit_many(make, grid, x, y, **options)

    def in_turn(**more):
        for setting in grid:
            make(**setting).fit(x, y, seed=setting["seed"], **options, **more)

    warnings.simplefilter("ignore")  # of nets that are faster by themselves
    together()  # what a process does once
    ways = (together, in_turn, lambda: in_turn(device_iterations=100))
    seconds = []
    for _ in range(rounds):
        seconds.append([])
        for way in ways:
            start = time.process_time()
            way()
            seconds[-1].append(time.process_time() - start)
    updates = models * epochs * -(-SAMPLES // BATCH)
    return [[1e6 * each / updates for each in one] for one in seconds]


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nets", nargs="*", choices=NETS, default=list(NETS))
    args = parser.parse_args()
    print("| net | fit_many | fit | ratio | fit, device_iterations=100 | ratio |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in args.nets:
        rounds = measure(name, args.models, args.epochs, args.rounds)
        many, each, large = (statistics.median(way) for way in zip(*rounds))
        first = statistics.median(each / many for many, each, _ in rounds)
        second = statistics.median(large / many for many, _, large in rounds)
        print(f"| {name} | {many:.0f} | {each:.0f} | {first:.1f} | {large:.0f} | {second:.1f} |")


if __name__ == "__main__":
    main()
