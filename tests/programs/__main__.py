"""``python -m tests.programs [WORD ...]``: fetch and run published programs, as they are listed.

Words choose programs by group and path. What is fetched goes to build/programs; nothing of it is
kept in the project.
"""

import argparse
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from tests.programs.program import FAILS, OUT_OF_REACH, PASSES, RUNS, TRAINS, table

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "programs"
PAGE = ROOT / "docs" / "programs.md"
# What stands behind it on the page is written here.
TABLES = "<!-- python -m tests.programs --write -->"
GROUPS = (
    *("tutorials", "geometric", "vision", "language"),
    *("lightning", "lightning_strategy", "lightning_examples", "optimum"),
)
TORCH = {"3.11": "torch==2.13.0", "3.8": "torch==2.0.1"}


def checkout(group):
    """The folder of a source at its commit, as it is published."""
    folder = BUILD / "sources" / group.__name__.rpartition(".")[2]
    git = ("git", "-C", str(folder))
    if not folder.exists():
        folder.mkdir(parents=True)
        subprocess.run([*git, "init", "--quiet"], check=True)
        fetch = ("fetch", "--quiet", "--depth=1", group.SOURCE.repository, group.SOURCE.commit)
        subprocess.run([*git, *fetch], check=True)
    subprocess.run([*git, "checkout", "--quiet", "--force", group.SOURCE.commit], check=True)
    subprocess.run([*git, "clean", "-xfdq"], check=True)
    return folder


def python_of(group, name):
    """The interpreter of an environment, which is made if need be."""
    environment = group.ENVIRONMENTS[name]
    folder = BUILD / "environments" / f"{group.__name__.rpartition('.')[2]}-{name}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([f"python{environment.python}", "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        first = [TORCH[environment.python], "setuptools<81", "setuptools-scm<9", "wheel"]
        try:
            subprocess.run([*install, *first, "-e", str(ROOT), "pytest"], check=True)
            # What comes as source and needs torch to be built finds the one that is there.
            subprocess.run(
                [*install, "--no-build-isolation", first[0], *environment.requirements], check=True
            )
        except subprocess.CalledProcessError:
            shutil.rmtree(folder)
            raise
    return str(python)


def run(group, program, python):
    """Run a program with this Python: the result in a word, and what it says of it."""
    source, work = checkout(group), BUILD / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    if program.prepare is not None:
        program.prepare(source, work)
    if program.graphs:
        write = [python, str(Path(__file__).with_name("graphs.py")), str(work), *program.graphs]
        subprocess.run(write, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    places = {"work": str(work), "source": str(source)}
    arguments = program.arguments.format(**places).split()
    folder = source / (os.path.dirname(program.path) if program.folder is None else program.folder)
    path = os.path.relpath(source / program.path, folder)
    if path.endswith(".ipynb"):
        path = script_of(folder / path)
    report, junit = work / "counts.json", work / "results.xml"
    counts_tests, name = program.result == PASSES, os.path.basename(path)
    is_tests = counts_tests or name.startswith("test_") or name.endswith("_test.py")
    command = ["-m", "pytest", "-q", f"--junitxml={junit}", path] if is_tests else [path]
    drive = [str(Path(__file__).with_name("drive.py")), str(report)]
    updates = 0 if counts_tests else program.updates
    variables = {name: value.format(**places) for name, value in program.variables.items()}
    # What a program starts as `python3` is this one, too.
    search = os.pathsep.join([os.path.dirname(python), os.environ["PATH"]])
    defaults = {"OMP_NUM_THREADS": "2", "MPLBACKEND": "Agg"}
    execute = functools.partial(
        subprocess.run,
        cwd=str(folder),
        env={**defaults, **os.environ, "PATH": search, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=program.seconds,
    )
    for line in program.before:
        done = execute([python, *drive, "0", "inf", *line.format(**places).split()])
        if done.returncode:
            return FAILS, "\n".join([line, *done.stdout.splitlines()[-5:]])
    drive += [str(updates), str(program.calls)]
    done = execute([python, *drive, *command, *arguments])
    (BUILD / "output.txt").write_text(done.stdout, encoding="utf-8")
    if counts_tests:
        return passed(junit, program.failures, done.returncode)
    counts = json.loads(report.read_text("utf-8"))
    if counts["updates"] >= program.updates:
        return TRAINS, f"{counts['updates']} updates in {counts['seconds']} s of processor time"
    if done.returncode == 0:
        return (RUNS if not counts["updates"] else TRAINS), f"to its end, {counts}"
    return FAILS, "\n".join(done.stdout.splitlines()[-5:])


def script_of(notebook):
    """The name of a script beside a notebook: its code, without what only a notebook can do."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = "\n".join(line for line in code.splitlines() if not line.startswith(("%", "!")))
    script = notebook.with_name(f"{notebook.stem}_notebook.py")
    # A process that a notebook starts does not run its cells again.
    text = f"CODE = {code!r}\nif __name__ == '__main__':\n    exec(CODE)\n"
    script.write_text(text, encoding="utf-8")
    return script.name


def passed(junit, failures, status):
    """The result of a file of tests, by pytest's report."""
    if not junit.exists():
        return FAILS, f"pytest ended with {status} and has written no report"
    (suite,) = ElementTree.parse(junit).getroot().iter("testsuite")
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    ran = counts["tests"] - counts["skipped"]
    good = counts["failures"] + counts["errors"] == failures and ran > failures
    return (PASSES if good else FAILS), str(counts)


def page(groups):
    """The text of docs/programs.md, with its tables anew."""
    head = PAGE.read_text("utf-8").partition(f"{TABLES}\n")[0]
    outcomes = Counter(program.result for group in groups for program in group.PROGRAMS)
    good = sum(outcomes[name] for name in (TRAINS, RUNS, PASSES))
    able = good + outcomes[FAILS]
    parts = [
        f"{head}{TABLES}",
        f"{able} programs and files of tests can run without an IPU: {outcomes[TRAINS]} train, "
        f"{outcomes[RUNS]} run, {outcomes[PASSES]} pass, {outcomes[FAILS]} fail. "
        f"{outcomes[OUT_OF_REACH]} are out of reach.",
    ]
    for group in groups:
        source = group.SOURCE
        where = f"[{source.repository[8:]}]({source.repository}) at `{source.commit[:12]}`"
        parts += [f"## {source.title}", f"From {where}.", table(group.PROGRAMS)]
    return "\n\n".join(parts) + "\n"


def load_groups():
    """Import the lists, in the order of the page."""
    return [importlib.import_module(f"tests.programs.{name}") for name in GROUPS]


def results(groups, words, here):
    """Run the programs that the words choose; yields what each did, as a dict."""
    for group in groups:
        for program in group.PROGRAMS:
            name = f"{group.__name__.rpartition('.')[2]}/{program.path}"
            is_chosen = not words or any(word in name for word in words)
            if not is_chosen or program.result in (FAILS, OUT_OF_REACH):
                continue
            begun = time.monotonic()
            try:
                python = sys.executable if here else python_of(group, program.environment)
                result, detail = run(group, program, python)
            except subprocess.TimeoutExpired:
                result, detail = FAILS, f"did not end within {program.seconds} s"
            seconds = round(time.monotonic() - begun)
            yield {
                **{"program": name, "result": result, "listed": program.result},
                **{"seconds": seconds, "detail": detail},
            }


def main():
    """Do what the command line says; the exit status is 1 where a program does otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of group/path")
    parser.add_argument("--here", action="store_true", help="with this Python's packages, for all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/programs.md")
    options = parser.parse_args()
    groups = load_groups()
    if options.write:
        PAGE.write_text(page(groups), encoding="utf-8")
        return 0
    rows = []
    for row in results(groups, options.words, options.here):
        rows.append(row)
        other = "" if row["result"] == row["listed"] else f", listed as {row['listed']}"
        line = f"{row['program']}: {row['result']}{other} ({row['seconds']} s): {row['detail']}"
        print(line, flush=True)
        if options.json is not None:  # what has been seen before an interrupt is not lost
            options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return any(row["result"] != row["listed"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
