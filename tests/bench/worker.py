"""One peer in a process of its own: answers lines of JSON until its input ends."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys


def main() -> None:
    """``python -m tests.bench.worker WORKLOAD PEER``."""
    workload, name = sys.argv[1:]
    if name.startswith("Keras"):
        os.environ["KERAS_BACKEND"] = "torch" if "torch" in name else "jax"
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        from tests.bench.peers import PEERS
        from tests.bench.workloads import WORKLOADS

        work = WORKLOADS[workload]
        rounds, first = PEERS[name](work)
        for line in sys.stdin:
            asked = json.loads(line)
            if asked["do"] == "losses":
                answer = {"losses": first(asked["count"])}
            else:
                seconds = rounds(asked["epochs"])
                answer = {"seconds": [value / work.updates for value in seconds]}
            answer["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
