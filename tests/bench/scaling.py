"""``python -m tests.bench.scaling``: one process and two, bytes between them, and more on paper.

Prints the tables of docs/scaling.md. Every process has one core. One process and two take turns, as
the machine's speed changes while one looks; the median over the rounds is printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.bench.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
UPDATES = 32  # of an epoch of one process, which sees twice as many samples as each of two

# Of networks on paper: bytes per second, and seconds for one message.
NETWORKS = {"10 Gbit/s, 30 us": (1.25e9, 30e-6), "100 Gbit/s, 5 us": (12.5e9, 5e-6)}
SIZES = (8, 64, 256, 1024)


def work(name, iterations):
    """What one process does: a result in JSON on the first one's standard output."""
    import torch

    import ipufit

    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    module, (x, y) = workload.module(), workload.data(2 * UPDATES * workload.batch)
    model = ipufit.Model(module)
    model.compile("adam", "cross_entropy")
    processes = ipufit.distributed()
    options = {"batch_size": workload.batch, "device_iterations": iterations, "verbose": 0}
    model.fit(x, y, **options)
    sent, start = loopback_bytes(), time.perf_counter()
    history = model.fit(x, y, epochs=2, **options)
    seconds = time.perf_counter() - start
    updates = history.params["updates_done"]
    found = {
        "seconds_per_update": seconds / updates,
        "samples_per_second": 2 * len(x) / seconds,
        "bytes_per_update": (loopback_bytes() - sent) / updates,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in module.parameters()),
    }
    if processes.process_id == 0:
        print(json.dumps(found))


def loopback_bytes():
    """Bytes that this machine has sent to itself so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0


def measured(name, processes, iterations):
    """One run."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    if processes == 1:
        command = [sys.executable]
    command += ["-m", "tests.bench.scaling", "--work", name, "--iterations", str(iterations)]
    if processes > 1:
        command[3:3] = ["--standalone"]
    return told_by(command)


def told_by(command):
    """What a command prints in JSON as its last line; each of its processes has one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=str(ROOT))
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


def medians(runs):
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def on_paper(compute, gradient, network, processes):
    """Seconds of an update: what a process computes, and one ring of sums with nothing beside it.

    Every process sends each byte of the gradient 2 (P - 1) / P times, in 2 (P - 1) messages.
    """
    rate, delay = network
    wire = 2 * (processes - 1) / processes * gradient / rate
    return compute + wire + 2 * (processes - 1) * delay


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if asked.work:
        return work(asked.work, asked.iterations)
    found = {}
    for name in WORKLOADS:
        runs = {1: [], 2: []}
        for _ in range(asked.rounds):
            for processes in runs:
                runs[processes].append(measured(name, processes, asked.iterations))
        found[name] = {processes: medians(each) for processes, each in runs.items()}
    print(
        "| model | gradient | 1 process, samples/s | 2 processes | ratio | bytes on the wire per "
        "update | of the gradient |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name, runs in found.items():
        one, two = runs[1], runs[2]
        size = one["gradient_bytes"]
        print(
            f"| {name} | {size:,} B | {one['samples_per_second']:.0f} | "
            f"{two['samples_per_second']:.0f} | "
            f"{two['samples_per_second'] / one['samples_per_second']:.2f} | "
            f"{two['bytes_per_update']:,.0f} B | {two['bytes_per_update'] / size:.2f} x |"
        )
    head = " | ".join(f"{count} processes" for count in SIZES)
    print(f"\n| model | network | {head} |\n| --- | --- |{' --- |' * len(SIZES)}")
    for name, runs in found.items():
        compute, size = runs[1]["seconds_per_update"], runs[1]["gradient_bytes"]
        for label, network in NETWORKS.items():
            shares = [compute / on_paper(compute, size, network, count) for count in SIZES]
            print(f"| {name} | {label} | {' | '.join(f'{share:.0%}' for share in shares)} |")
    return None


if __name__ == "__main__":
    main()
