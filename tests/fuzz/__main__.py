"""``python -m tests.fuzz FILE``: look for bytes that end reading in anything but our errors.

Needs atheris, which ``nox -s fuzz`` installs. Options after the file are those of libFuzzer.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """Run until libFuzzer says so; it ends with what it has found."""
    import atheris

    readers = ["ipufit.checkpoint", "ipufit.utils.codec", "ipufit.utils.files", "json"]
    instrumented: Any = atheris.instrument_imports(include=readers)
    with instrumented:
        from tests.fuzz.checkpoint import Reader, seeds

    file, *options = sys.argv[1:]
    reader = Reader(file)
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds(file)):
            (Path(folder) / str(number)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *options, folder], lambda content: reader.read(content))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
