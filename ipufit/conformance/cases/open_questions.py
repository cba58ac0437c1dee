"""Questions that could not be settled without an IPU: reported, not judged."""

from __future__ import annotations

import torch

from ipufit.conformance.kit import FunctionModule, Kit, Regression, open_question


@open_question(
    "open/order of micro-batches",
    "In which order do micro-batches stand in a batch, with iterations and replicas? "
    "(d iteration, r replica; the last varies fastest)",
)
def _order(kit: Kit) -> None:
    def numbered(net, x):
        net.calls += 1
        return torch.cat([x, net.calls * torch.ones_like(x)], 1)

    options = kit.options(device_iterations=3, replicas=2, mode="All").broadcastBuffers(False)
    net = FunctionModule(numbered, calls=torch.zeros(1, dtype=kit.dtype))
    model = kit.inference(net, options)
    out = model(torch.arange(6, dtype=kit.dtype).view(6, 1))
    # Which iteration each row of the batch was worked on in.
    by_row = {int(row): int(count) - 1 for row, count in out.double().tolist()}
    iterations = [by_row.get(row) for row in range(6)]
    named = {(0, 0, 1, 1, 2, 2): "inputs (d, r)", (0, 1, 2, 0, 1, 2): "inputs (r, d)"}
    kit.note(named.get(tuple(iterations), f"iterations of the rows: {iterations}"))
    kit.note(f"rows come back as {[int(row) for row in out[:, 0]]}")


@open_question(
    "open/names in ipu_state", "How does an optimizer name its state, and what shapes has it?"
)
def _state(kit: Kit) -> None:
    net = Regression(kit.linear())
    optimizer = kit.poptorch.optim.Adam(net.parameters(), lr=0.1)
    model = kit.training(net, optimizer, accumulation=2)
    model(kit.rows(4), kit.rows(4, 2))
    state = optimizer.state_dict()
    for part in ("ipu_state", "ipu_param"):
        shapes = {name: list(value.shape) for name, value in sorted(state[part].items())}
        kit.note(f"{part}: {shapes}")


@open_question(
    "open/a new rate with use_combined_accum",
    "Does a change of the learning rate take effect one update late in the combined variant? "
    "(the number of updates until it does)",
)
def _late(kit: Kit) -> None:
    net = Regression(kit.linear())
    settings = {"momentum": 0.5, "use_combined_accum": True}
    optimizer = kit.poptorch.optim.SGD(net.parameters(), lr=0.1, **settings)
    model = kit.training(net, optimizer)
    batch = kit.rows(4), kit.rows(4, 2)
    model(*batch)
    model.setOptimizer(kit.poptorch.optim.SGD(net.parameters(), lr=0.0, **settings))
    late = 0
    for _ in range(4):
        before = net.layer.weight.detach().clone()
        model(*batch)
        if torch.equal(before, net.layer.weight.detach()):
            break
        late += 1
    kit.note(str(late))


@open_question(
    "open/output mode of an anchor", "Does an anchored tensor have an output mode of its own?"
)
def _anchor(kit: Kit) -> None:
    options = kit.options(device_iterations=4, mode="All")
    options.anchorTensor("kept", "input", kit.poptorch.OutputMode.Final)
    model = kit.inference(kit.linear(), options)
    model(kit.rows(8))
    shape = list(model.getAnchoredTensor("kept").shape)
    kit.note(f"asked for Final of 4 micro-batches of 2 rows, got shape {shape}")


@open_question(
    "open/the seed of replicas",
    "Do replicas draw the same random numbers? And the iterations of a call?",
)
def _draws(kit: Kit) -> None:
    zeros = torch.zeros(4, 8, dtype=kit.dtype)
    out = kit.infer(torch.rand_like, zeros, device_iterations=2, replicas=2, seed=1)
    kit.note(f"replicas alike: {bool(torch.equal(out[0], out[1]))}")
    kit.note(f"iterations alike: {bool(torch.equal(out[0], out[2]))}")
