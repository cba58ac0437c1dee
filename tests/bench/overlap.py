"""``python -m tests.bench.overlap``: sums of gradients beside the backward pass, and behind it.

Prints the table of docs/scaling.md. Two processes, one core each, over the loopback device as it is
and, where this is Linux and one may (root, with `ip` and `tc` of iproute2), over one of a network
namespace that is as slow as a network. In each run, updates of both kinds take turns.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

from tests.bench.scaling import ROOT

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
    from ipufit.engines.embedded import overlap

    torch.set_num_threads(1)
    # Not to be decided: all updates take turns.
    overlap._ROUNDS = 10**6
    layers = [[nn.Linear(WIDTH, WIDTH), nn.ReLU()] for _ in range(LAYERS)]
    model = ipufit.Model(nn.Sequential(*[layer for both in layers for layer in both]))
    model.compile("sgd", "mse")
    processes = ipufit.distributed()
    x = torch.randn(24 * BATCH * processes.num_processes, WIDTH)
    model.fit(x, x, batch_size=BATCH, verbose=0)
    measured = model._session.engine.overlap
    after, along = (statistics.median(each) for each in measured._seconds)
    if processes.process_id == 0:
        print(json.dumps({"after": after, "along": along, "buckets": len(measured.order)}))


def measured(network):
    """One run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
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
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, cwd=str(ROOT), timeout=600
        )
    finally:
        if network is not None:
            subprocess.run(["ip", "netns", "del", name], check=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if asked.work:
        return work()
    may = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    print("| network | buckets | after it | during it | ratio |\n| --- | --- | --- | --- | --- |")
    for name, network in NETWORKS.items():
        if network is not None and not may:
            print(f"{name} needs root, ip and tc.")
            continue
        runs = [measured(network) for _ in range(asked.rounds)]
        after, along = (statistics.median(run[key] for run in runs) for key in ("after", "along"))
        ratios = sorted(run["along"] / run["after"] for run in runs)
        print(
            f"| {name} | {runs[0]['buckets']} | {after * 1e3:.0f} ms | {along * 1e3:.0f} ms | "
            f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
            flush=True,
        )
    return None


if __name__ == "__main__":
    main()
