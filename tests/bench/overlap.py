"""``python -m tests.bench.overlap``: sums of gradients beside the backward pass, and behind it.

Prints two tables of docs/scaling.md. Two processes, one core each, over the loopback device as it
is and, where this is Linux and one may (root, with `ip` and `tc` of iproute2), over one of a
network namespace that is as slow as a network. In each run, updates of both kinds take turns. The
second table is on paper: what share of the sending was hidden goes into the times of more
processes.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

from tests.bench.scaling import NETWORKS as PAPER
from tests.bench.scaling import SIZES, on_paper, told_by

WIDTH, LAYERS, BATCH = 1500, 12, 64
# Rates of the loopback device, which both directions share: twice that of one direction.
NETWORKS = {
    "loopback as it is": None,
    "10 Gbit/s": "20gbit",
    "2.5 Gbit/s": "5gbit",
    "1 Gbit/s": "2gbit",
}


def work():
    """What one process does: a result in JSON on the first one's standard output."""
    import torch
    from torch import nn

    import ipufit
    from ipufit.engines.embedded import overlapped_reduction, update_runner

    torch.set_num_threads(1)
    inner, alone = update_runner.UpdateRunner._gradients, []

    def timed(*given):
        start = time.perf_counter()
        found = inner(*given)
        alone.append(time.perf_counter() - start)
        return found

    # Not to be decided: all updates take turns.
    overlapped_reduction._ROUNDS = 10**6
    layers = [[nn.Linear(WIDTH, WIDTH), nn.ReLU()] for _ in range(LAYERS)]
    model = ipufit.Model(nn.Sequential(*[layer for both in layers for layer in both]))
    model.compile("sgd", "mse")
    processes = ipufit.distributed()
    if not processes.is_distributed:
        update_runner.UpdateRunner._gradients = timed
    x = torch.randn(24 * BATCH * processes.num_processes, WIDTH)
    model.fit(x, x, batch_size=BATCH, verbose=0)
    measured = model._session.engine.carried.overlap
    size = sum(p.numel() * p.element_size() for p in model.module.parameters())
    found = {"alone": statistics.median(alone[2:] or [0.0]), "bytes": size}
    if measured is not None:
        after, along = (statistics.median(each) for each in measured._seconds)
        found.update(after=after, along=along, buckets=len(measured.order))
    if processes.process_id == 0:
        print(json.dumps(found))


def measured(network, processes=2):
    """One run."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    command += ["--master-addr=127.0.0.1", "--master-port=29500"]
    command += ["-m", "tests.bench.overlap", "--work"]
    name = "ipufit-overlap"
    if network is not None:
        shape = ["tbf", "rate", network, "burst", "1mb", "latency", "1s"]
        space = ["ip", "netns", "exec", name]
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        if network is not None:
            subprocess.run([*space, "ip", "link", "set", "lo", "up"], check=True)
            subprocess.run([*space, "tc", "qdisc", "add", "dev", "lo", "root", *shape], check=True)
            command = space + command
        return told_by(command)
    finally:
        if network is not None:
            subprocess.run(["ip", "netns", "del", name], check=True)


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if asked.work:
        return work()
    may = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    found, alone = {}, measured(None, processes=1)
    print("| network | buckets | after it | during it | ratio |\n| --- | --- | --- | --- | --- |")
    for name, network in NETWORKS.items():
        if network is not None and not may:
            print(f"{name} needs root, ip and tc.")
            continue
        runs = [measured(network) for _ in range(asked.rounds)]
        found[name] = runs
        after, along = (statistics.median(run[key] for run in runs) for key in ("after", "along"))
        ratios = sorted(run["along"] / run["after"] for run in runs)
        print(
            f"| {name} | {runs[0]['buckets']} | {after * 1e3:.0f} ms | {along * 1e3:.0f} ms | "
            f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
            flush=True,
        )
    print_on_paper(found, alone)
    return None


def print_on_paper(found, alone):
    """The share of an update's time that is left for computing, with and without the overlap."""
    seconds, size = alone["alone"], alone["bytes"]
    head = " | ".join(f"{count} processes" for count in SIZES)
    print(f"\nOne process alone: {seconds * 1e3:.0f} ms, {size:,} bytes of gradients.")
    print(f"\n| network | sums | {head} |\n| --- | --- |{' --- |' * len(SIZES)}")
    runs = [run for name, several in found.items() if "Gbit" in name for run in several]
    hidden = statistics.median(
        (run["after"] - run["along"]) / (run["after"] - seconds) for run in runs
    )
    for label, network in PAPER.items():
        for when, share in (("after", 0.0), (f"during, {hidden:.0%} hidden", hidden)):
            shares = []
            for count in SIZES:
                sending = on_paper(seconds, size, network, count) - seconds
                shares.append(seconds / (seconds + (1 - share) * sending))
            print(f"| {label} | {when} | {' | '.join(f'{each:.0%}' for each in shares)} |")


if __name__ == "__main__":
    main()
