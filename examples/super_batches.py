"""Process 9,600 samples in one call: 300 device iterations of 4 micro-batches of 8 samples.

On an IPU the host is far away: Graphcore's tutorials therefore hand over many micro-batches at
once, as one large "super-batch". Here 300 device iterations accumulate 4 micro-batches of 8
samples each, on one replica, so that one call makes 300 weight updates of 32 samples. The same
updates are then made one call at a time. Weights are equal to the last bit: how many updates a call
makes is a matter of speed alone. Nothing is downloaded; takes seconds.

    pip install .
    python examples/super_batches.py
"""

import time

import torch
from torch import nn

import ipufit

SEED = 0
ITERATIONS, ACCUMULATION, BATCH = 300, 4, 8
SAMPLES = ITERATIONS * ACCUMULATION * BATCH


def trained(x, y, device_iterations):
    """Train for five epochs of 300 updates; the weights, and seconds of the later epochs."""
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model = ipufit.Model(net)
    model.compile("adam", "mse")
    work = {"device_iterations": device_iterations, "gradient_accumulation": ACCUMULATION}
    model.explain(x, batch_size=BATCH, **work)
    options = {"batch_size": BATCH, "seed": SEED, "verbose": 0, **work}
    model.fit(x, y, epochs=1, **options)
    start = time.perf_counter()
    history = model.fit(x, y, epochs=range(1, 5), **options)
    return net.state_dict(), history, time.perf_counter() - start


def main():
    """Both ways, side by side."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(SAMPLES, 16, generator=generator)
    y = (x[:, :1] * x[:, 1:2]).sin()
    whole, history, seconds = trained(x, y, ITERATIONS)
    single, _, others = trained(x, y, 1)
    print(f"a super-batch has {SAMPLES:,} samples; loss {history.history['loss'][-1]:.4f}")
    print(f"300 updates per call take {seconds / others:.2f} of the time of one per call")
    if not all(torch.equal(whole[name], single[name]) for name in whole):
        raise SystemExit("the weights differ, but must not")
    if history.history["loss"][-1] > 0.9 * history.history["loss"][0]:
        raise SystemExit("the loss did not fall")
    print("the weights are equal to the last bit")


if __name__ == "__main__":
    main()
