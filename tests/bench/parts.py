"""``python -m tests.bench.parts``: what a process holds and sends, whole and in parts.

Prints the table of docs/memory.md: Adam, and a net of equal layers, in several processes. Memory is
what glibc has given out and not got back since before ``fit``, looked at every half millisecond,
and the module's weights where training works on these themselves.
"""

import argparse
import ctypes
import json
import sys
import threading

from tests.bench.scaling import loopback_bytes, told_by

WIDTH, LAYERS = 1200, 20
KINDS = {"whole": {}, "optimizer": {}, "weights": {}}
MIB = 2**20


def work(kind):
    """What one process does: a result in JSON on the first one's standard output."""
    import torch
    from torch import nn

    import ipufit
    from ipufit.callbacks import LambdaCallback

    torch.set_num_threads(1)
    layers = [[nn.Linear(WIDTH, WIDTH), nn.Tanh()] for _ in range(LAYERS)]
    module = nn.Sequential(*[layer for both in layers for layer in both])
    model = ipufit.Model(module)
    model.compile(
        "adam",
        "mse",
        memory=ipufit.Memory(shard=kind if kind in ("optimizer", "weights") else None),
    )
    processes = ipufit.distributed()
    before, seen = in_use(), []
    looks = Peak()

    def look(batch, logs):
        # What fit needs for a moment when it begins is over.
        if batch == 2:
            seen.extend([loopback_bytes(), in_use()])
            looks.start()
        if batch == 8:
            looks.end()
            seen.append(loopback_bytes())

    x = torch.randn(10 * 4 * processes.num_processes, WIDTH)
    callback = LambdaCallback(on_train_batch_end=look)
    model.fit(x, x, batch_size=4, epochs=1, callbacks=[callback], verbose=0)
    sent, between, later = seen
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    # Where weights lie in parts, the module's own are a copy that a GPU would not hold.
    own = 0 if kind == "weights" else weights
    found = {
        "weights": weights,
        "between": between - before + own,
        "most": looks.most - before + own,
        "sent": (later - sent) / 6 / processes.num_processes,
    }
    if processes.process_id == 0:
        print(json.dumps(found))


class Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(f"other{place}", ctypes.c_size_t) for place in range(4)]
    _fields_ += [("hblkhd", ctypes.c_size_t), ("other4", ctypes.c_size_t)]
    _fields_ += [("other5", ctypes.c_size_t), ("uordblks", ctypes.c_size_t)]
    _fields_ += [("other6", ctypes.c_size_t), ("other7", ctypes.c_size_t)]


def in_use():
    """Bytes that malloc has given out."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Mallinfo
    told = ask()
    return told.uordblks + told.hblkhd


class Peak(threading.Thread):
    """The most that is in use from start to end."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self._over = 0, threading.Event()

    def run(self):
        while not self._over.wait(0.0005):
            self.most = max(self.most, in_use())

    def end(self):
        self._over.set()
        self.join()


def measured(kind, processes):
    """One run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "tests.bench.parts", "--work", kind]
    return told_by(command)


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work")
    asked = parser.parse_args()
    if asked.work:
        return work(asked.work)
    print(
        "| processes | compile(...=True) | between updates | at most | sent by each per update |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for processes in (2, 4):
        for kind in KINDS:
            found = measured(kind, processes)
            between, most, sent = (found[key] / MIB for key in ("between", "most", "sent"))
            print(
                f"| {processes} | {kind if kind != 'whole' else 'neither'} | {between:.0f} MiB | "
                f"{most:.0f} MiB | {sent:.0f} MiB |",
                flush=True,
            )
    print(f"\nThe weights take {found['weights'] / MIB:.0f} MiB.")
    return None


if __name__ == "__main__":
    main()
