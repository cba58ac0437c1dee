"""``python -m tests.house.path``: how far it is from ``fit`` to the optimizer, as JSON.

Trains a small MLP (tensors, Adam, CPU, one process, jit="graph", one metric) and counts the
package's functions and files that run: in all of compile and fit, in one steady execution, and on
the stack at the update. What loading a module runs is left out: which of them are loaded before
compile, and which by it, says nothing about the way. ``--list`` names the functions.
"""

import collections
import json
import os
import sys

import torch
from torch import nn

import ipufit

HOME = os.path.dirname(os.path.abspath(ipufit.__file__))
# One of them makes the update.
KERNELS = ("_fused_adam_", "adam", "_foreach_addcdiv_")


class Counting(ipufit.callbacks.Callback):
    """Counts calls of the package's functions; marks the ends of executions."""

    def __init__(self):
        self.calls, self.marks, self.stack = collections.Counter(), [], []

    def on_train_batch_end(self, batch, logs=None):
        """Mark the end of an execution."""
        self.marks.append(collections.Counter(self.calls))

    def profile(self, frame, event, arg):
        """Count a call, or remember the stack at the update."""
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            if not loads(frame):
                self.calls[function_of(frame)] += 1
        elif event == "c_call" and getattr(arg, "__name__", "") in KERNELS:
            self.stack = []
            while frame is not None:
                if frame.f_code.co_filename.startswith(HOME):
                    self.stack.insert(0, function_of(frame))
                frame = frame.f_back


def loads(frame):
    """Whether a frame runs because a module is being imported."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def function_of(frame):
    """File and name of the function that a frame runs."""
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    return os.path.relpath(code.co_filename, HOME), name


def main():
    """Train, and print the figures."""
    torch.manual_seed(0)
    x, y = torch.randn(320, 8), torch.randint(0, 3, (320,))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model, counting = ipufit.Model(net), Counting()
    sys.setprofile(counting.profile)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model.compile(optimizer, loss="cross_entropy", metrics=["accuracy"], jit="graph")
    sizes = {"batch_size": 8, "epochs": 2, "device_iterations": 4}
    model.fit(x, y, **sizes, verbose=0, callbacks=[counting])
    sys.setprofile(None)
    steady = counting.marks[-1] - counting.marks[-2]
    if "--list" in sys.argv:
        for (file, name), count in sorted(counting.calls.items()):
            print(f"{file}:{name} x{count}")
    figures = {
        "functions": len(counting.calls),
        "function_files": len({file for file, _ in counting.calls}),
        "steady_functions": len(steady),
        "steady_files": len({file for file, _ in steady}),
        "steady_calls": sum(steady.values()),
        "stack_frames": len(counting.stack),
        "stack_files": len({file for file, _ in counting.stack}),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
