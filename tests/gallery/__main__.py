"""``python -m tests.gallery``: run every example, and compare what it prints with docs/gallery.md.

``--write`` writes the page and its pictures anew, ``NAME ...`` chooses examples. Scripts run two at
a time; those of examples/poptorch/, which have no picture, by ``ipufit run``. A build of the pages
runs nothing: it takes the page as it is, and shows each script's source below its part.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gallery import page
from tests.idx_files import main as write_idx_files

ENVIRONMENT = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def call(*command):
    """Run a command of Python; return what it printed. An error shows all of it."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    said = f"--- {' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    if done.returncode:
        raise SystemExit(f"{said}--- ended with {done.returncode}")
    print(said, flush=True)
    return done.stdout


def run(script, folder, draws):
    """Run one script, and draw if need be; return what it printed, and its seconds."""
    arguments = ("--data", folder / "idx") if script.stem == "fashion_mnist" else ()
    if not draws:
        return call(script, *arguments), 0
    picture = folder / f"{script.stem}.png"
    call("-m", "tests.gallery.draw", script, picture, *arguments)
    shutil.copyfile(picture, page.PICTURES / picture.name)
    facts = json.loads(picture.with_suffix(".json").read_text(encoding="utf-8"))
    return facts["printed"], facts["seconds"]


def main():
    """Run all, and compare or write."""
    parser = argparse.ArgumentParser(prog="python -m tests.gallery")
    parser.add_argument("names", nargs="*", metavar="NAME", help="examples to run; none: all")
    parser.add_argument("--write", action="store_true", help="write page and pictures anew")
    options = parser.parse_args()
    scripts = [path for path in page.scripts() if path.stem in (options.names or path.stem)]
    faults, parts = [], page.parts()
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        write_idx_files(folder / "idx")
        running = [pool.submit(run, script, folder, options.write) for script in scripts]
        others = [] if options.names else sorted(page.EXAMPLES.glob("poptorch/*.py"))
        running += [pool.submit(call, "-m", "ipufit", "run", script) for script in others]
        done = [future.result() for future in running]
    for script, (printed, seconds) in zip(scripts, done):
        part = page.part(script, printed, seconds)
        if options.write:
            parts[script.stem] = part
        elif not page.agree(parts.get(script.stem, ""), part):
            faults.append(script.name)
    if options.write:
        page.write(parts)
    print(f"{len(done)} examples ran, and reached the numbers that they promise.")
    if faults:
        sys.exit(
            f"{', '.join(faults)}: docs/gallery.md shows other lines than were printed; "
            "nox -s examples -- --write writes it anew."
        )
    print("docs/gallery.md shows what they print.")


if __name__ == "__main__":
    main()
