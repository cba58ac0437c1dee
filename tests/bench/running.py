"""Processes that are measured: each waits while others run, and answers lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any, Callable, Dict, Optional

__all__ = ["Running", "serve"]

Answer = Callable[[Dict[str, Any]], Dict[str, Any]]


class Running:
    """``python -m module arguments`` in a process of its own.

    Args:
        module: calls :func:`serve`.
        arguments: of its command line.
        cache: where ipufit keeps what a later process finds; None for the user's place.

    Attributes:
        name: the last argument.
    """

    def __init__(self, module: str, *arguments: str, cache: Optional[str] = None) -> None:
        self.name = (module, *arguments)[-1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **({} if cache is None else {"IPUFIT_CACHE_DIR": cache})},
        )

    def ask(self, **what: Any) -> Dict[str, Any]:
        """One answer.

        Raises:
            SystemExit: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}")
        answer: Dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        # Its input ends, and then it does.
        self._process.__exit__(None, None, None)


def serve(make: Callable[[], Answer]) -> None:
    """Answer until the input ends; whatever else is printed goes to stderr.

    Args:
        make: imports what is slow to import, and returns what answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    with contextlib.redirect_stdout(sys.stderr):
        answer = make()
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
