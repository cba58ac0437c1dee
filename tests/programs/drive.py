"""``python drive.py REPORT UPDATES CALLS ...``: what ``ipufit run --claim-ipus ...`` does, counted.

The report is a JSON object: ``updates``, the calls of models for training whose results were
finite, ``calls``, those of all models, and ``seconds``, the processor time of each call, the first
of which records and compiles. After so many of one or the other the program is ended.
"""

import json
import pathlib
import sys
import time

import torch

from ipufit.cli.main import main
from ipufit.utils.poptorch_sdk import install


def tensors(value):
    """All tensors in results of a model."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in tensors(one)]


def count(report, updates, calls):
    """Count the calls of models from here on, into this file; end the program after so many."""
    install(claim_ipus=True)
    executor = __import__("poptorch").PoplarExecutor
    counts = {"updates": 0, "calls": 0, "seconds": []}
    report.write_text(json.dumps(counts), encoding="utf-8")
    call = executor.__call__

    def counted(self, *args, **kwargs):
        begun = time.process_time()
        results = call(self, *args, **kwargs)
        counts["calls"] += 1
        counts["seconds"].append(round(time.process_time() - begun, 1))
        if self._training:
            losses = [t for t in tensors(results) if t.is_floating_point()]
            if not all(torch.isfinite(t).all() for t in losses):
                raise SystemExit("a result of the model is not finite")
            counts["updates"] += 1
        report.write_text(json.dumps(counts), encoding="utf-8")
        if counts["updates"] >= updates or counts["calls"] >= calls:
            raise SystemExit(0)
        return results

    executor.__call__ = counted


if __name__ == "__main__":
    report, updates, calls, *arguments = sys.argv[1:]
    if int(updates):
        count(pathlib.Path(report), int(updates), float(calls))
    main(["run", "--claim-ipus", *arguments])
