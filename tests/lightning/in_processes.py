"""One fit, in as many processes as there are; the first prints what it has made.

python -m torch.distributed.run --nproc-per-node=2 tests/lightning/in_processes.py
"""

import json
import os

import torch

from tests.lightning.twins import Classifier, ipufit_of, loader, rows

torch.set_num_threads(1)
processes = int(os.environ.get("WORLD_SIZE", "1"))
x, y = rows(22, 6)
model = ipufit_of(Classifier())
history = model.fit(
    loader(x, y, batch_size=4),
    validation_data=loader(x[:10], y[:10], batch_size=4),
    epochs=2,
    ipus=2 // processes,
    seed=0,
    verbose=0,
)
if os.environ.get("RANK", "0") == "0":
    weights = [p.detach().flatten().tolist() for p in model.lightning.parameters()]
    print(json.dumps([history.history, weights]))
