"""Scripts in several real processes on this machine, none of which outlives its time."""

import atexit
import contextlib
import dataclasses
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from pathlib import Path

import pytest

from tests.copies import CAN_COPY, start_copy

ROOT = Path(__file__).resolve().parents[2]

# What takes long and is about launching and ending alone.
on_one_python = pytest.mark.skipif(
    sys.version_info < (3, 9), reason="one Python is enough for how processes start and end"
)

# What a launcher, or the machine of the tests, may have said already.
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "POPDIST_", "SLURM_")


@dataclasses.dataclass
class Ended:
    """How one process ended.

    Attributes:
        code: negative for a signal, as in subprocess; None if its time was over.
        seconds: from the start to its end.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self):
        return f"ended with {self.code}\n{self.stdout}\n{self.stderr}"


def free_port():
    """A port of this machine on which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def clean_environment(**more):
    """This process's own, without what is said about processes."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_OURS)}
    kept.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PYTHONFAULTHANDLER="1")
    kept.update({name: str(value) for name, value in more.items()})
    return kept


def run_processes(script, count, timeout=600, env=None, args=()):
    """Run a script in processes numbered by RANK and WORLD_SIZE.

    Args:
        script: the text of the program; its indentation does not matter.
        env: variables for all of them, or a function of the number that returns them.
        timeout: seconds, after which those that still run are killed.
    Returns:
        An Ended of each.
    """
    with _written(script) as path:
        arguments = [sys.executable, path, *args]
        commands = [(arguments, each) for each in _numbered(count, env)]
        return _run(commands, timeout)


def run_copies(script, count, timeout=600, env=None, args=()):
    """Do as run_processes does in copies of this process, which has imported torch already.

    How a Python begins and ends is not to be seen in them.
    """
    if not CAN_COPY:
        return run_processes(script, count, timeout, env, args)
    with _written(script) as path:
        commands = [([path, *args], each) for each in _numbered(count, env)]
        return _run(commands, timeout, start=_Copy)


def _numbered(count, env):
    port = free_port()
    return [
        {
            "RANK": number,
            "WORLD_SIZE": count,
            "LOCAL_RANK": number,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            **((env(number) if callable(env) else env) or {}),
        }
        for number in range(count)
    ]


def run_torchrun(script, count, timeout=600, env=None, restarts=0, args=()):
    """Run a script by torchrun; one Ended, of torchrun itself, with what all of them printed."""
    with _written(script) as path:
        options = [f"--nproc_per_node={count}", f"--master_port={free_port()}"]
        options.append(f"--max_restarts={restarts}")
        command = [sys.executable, "-m", "torch.distributed.run", *options, path, *args]
        return _run([(command, env or {})], timeout)[0]


@contextlib.contextmanager
def _written(script):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(textwrap.dedent(script))
        yield str(path)


def _start(command, variables, files):
    return subprocess.Popen(
        command,
        env=variables,
        cwd=str(ROOT),
        stdin=subprocess.DEVNULL,
        stdout=files[0],
        stderr=files[1],
        start_new_session=True,  # so that its own children can be killed with it
    )


class _Copy:
    """A copy of this process that runs a script, with what is used of a subprocess.Popen."""

    def __init__(self, command, variables, files):
        self._process = start_copy(_run_script, command, variables, files)
        self.pid, self.wait = self._process.pid, self._process.join

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode


def _run_script(command, variables, files):
    os.setsid()  # so that its own children can be killed with it
    os.chdir(str(ROOT))
    os.environ.clear()
    os.environ.update(variables)
    for number, file in enumerate(files, 1):
        os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1) for number in (1, 2))
    # What the test runner has set up is not for the script.
    atexit._clear()
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", ResourceWarning)
    warnings.showwarning = _show_warning
    sys.unraisablehook = sys.__unraisablehook__
    sys.argv = list(command)
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _show_warning(message, category, filename, lineno, file=None, line=None):
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def _run(commands, timeout, start=_start):
    begun = time.monotonic()
    running = []
    with contextlib.ExitStack() as stack:
        for command, variables in commands:
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]
            process = start(command, clean_environment(**variables), files)
            stack.callback(_kill, process)
            running.append((process, files))
        ends = {}
        while len(ends) < len(running) and time.monotonic() - begun < timeout:
            for number, (process, _) in enumerate(running):
                if number not in ends and process.poll() is not None:
                    ends[number] = time.monotonic() - begun
            time.sleep(0.02)
        for number, (process, _) in enumerate(running):
            if number not in ends:
                _kill(process)
        return [
            Ended(
                process.returncode if number in ends else None,
                _text(files[0]),
                _text(files[1]),
                ends.get(number, timeout),
            )
            for number, (process, files) in enumerate(running)
        ]


def _text(file):
    file.seek(0)
    return file.read()


def _kill(process):
    # Only what this one started: it leads its own process group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
