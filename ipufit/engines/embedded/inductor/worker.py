"""The process that compiles: reads a request from its directory, leaves a library there.

It ends when its standard input does, and takes the compilers that it has started with it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from pathlib import Path

__all__ = ["ERROR", "REQUEST", "main"]

REQUEST, ERROR = "request.json", "error.txt"
_NICENESS = 10


def main(directory: str, library: str) -> int:
    """Compile; 0 if it went well.

    Args:
        directory: where the request is.
        library: name of what is made there.
    """
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(_NICENESS)
    place = Path(directory)
    try:
        _compile((place / REQUEST).read_text(), place / library)
    except BaseException as error:
        traceback.print_exc()
        (place / ERROR).write_text(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _compile(text: str, library: Path) -> None:
    import torch
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    from ipufit.engines.embedded.inductor import onednn
    from ipufit.engines.embedded.inductor.request import Request
    from ipufit.engines.embedded.inductor.update_spec import update_of

    request = Request.of_json(text)
    torch.set_num_threads(request.threads)
    onednn.allow_any_weight()
    examples = request.examples()
    with torch.no_grad():
        graph = make_fx(update_of(request.form), tracing_mode="fake")(*examples)
        options = {"aot_inductor.output_path": str(library)}
        torch._inductor.aot_compile(graph, tuple(examples), options=options)
