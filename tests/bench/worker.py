"""One peer in a process of its own."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any, Dict

from tests.bench.running import serve


def main() -> None:
    """``python -m tests.bench.worker PEER``: losses and epochs of any workload, as asked."""
    (name,) = sys.argv[1:]
    if name.startswith("Keras"):
        os.environ["KERAS_BACKEND"] = "torch" if "torch" in name else "jax"

    def make() -> Any:
        from tests.bench.peers import EARLIER, LONG_RUN, PEERS
        from tests.bench.real import REAL
        from tests.bench.workloads import WORKLOADS

        peer = LONG_RUN if name == EARLIER else PEERS[name]
        made: Dict[Any, Any] = {}

        def answer(asked: Dict[str, Any]) -> Dict[str, Any]:
            work = {**WORKLOADS, **REAL}[asked["workload"]].of(asked["updates"])
            if work not in made:
                made[work] = peer(work)
            rounds, first = made[work]
            if asked["do"] == "losses":
                found = {"losses": first(asked["count"])}
            else:
                updates = len(work.batches())
                found = {"seconds": [value / updates for value in rounds(asked["epochs"])]}
            found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return found

        return answer

    serve(make)


if __name__ == "__main__":
    main()
