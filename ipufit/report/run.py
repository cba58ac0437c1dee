"""A run as its report has it: facts as JSON, executions as a table of numbers, and sums of them.

``run.json`` is one object:

- ``format``: "ipufit.Report/1".
- ``status``: "running", "finished", "interrupted" or "failed"; ``error``: the text of a failure.
- ``title``: class of the module. ``begun``: when, as ISO 8601 in UTC. ``seconds``: so far.
- ``params``: those of History. ``explain``: lines of text.
- ``popvision``: folder of the profile that PopVision opens; None where none is written.
- ``environment``: names and values of what ran it.
- ``history``: ``{"epoch": [...], "history": {name: [[place, value], ...]}, "updates": {name:
  [[update, value], ...]}}``, as History.to_json has it.
- ``phases``: seconds by phase, of the whole run, which add up to ``seconds``.
- ``epochs``: of each one ``epoch``, ``begin``, ``seconds``, ``executions``, ``updates``,
  ``samples`` and ``phases``.
- ``first_update``: counter at the beginning. ``total_updates``: expected; None if unknown.
- ``layers``: the module's tree: ``name``, ``depth``, ``kind``, ``parameters``, ``trainable``,
  ``shape``, ``notes``, and ``file`` and ``line`` of its forward, or None.
- ``plan``: the dict of PartitionPlan.to_dict, with ``timeline``: ``tasks`` (lists of stage,
  micro-batch, whether it is backward, begin and end), ``total``, ``utilisation`` and
  ``schedule``, and ``least_accumulation`` for utilisations of 0.8 and 0.9, or None where none
  reaches it; or ``{"missing": why}``.
- ``operators``: one micro-batch, operator by operator, as a program's ``profile`` gives it:
  ``micro_batch_size``, ``way``, ``device``; ``timed``: how, in words; ``note``: what is otherwise
  in the run itself, or ""; ``rows``, each with ``operator``, ``direction`` ("forward", "backward",
  or "optimizer" for a whole weight update), ``module`` ("" for the user's own, "loss" for what the
  loss computes, "gradients" for what joins those of all modules), ``kind``, ``file``, ``line``,
  ``source``, ``calls``, ``seconds``, ``flops`` and ``bytes`` (moved); ``peak``: ``flops`` and
  ``bytes`` per second that this machine reached on large tensors of ``dtype``, each None where it
  can't be measured; ``memory``: bytes that are there all the time (``fixed``: ``weights``,
  ``buffers`` of all replicas, ``gradients`` that are added up, ``optimizer``, ``snapshot``: copies
  to go back to, ``batch``: the samples of an execution, ``outputs``: those kept until its end),
  bytes of values while each operator runs (``curve``: lists of operator, module, direction and
  bytes, in order; the module is "" where micro-batches run merged, and a long curve has the
  highest of several points), their ``peak``, and ``total``.
  Or ``{"missing": why}``.
- ``warnings``: ``text``, ``cure``, ``kind`` ("warning" of Python's, or "advice"), ``place`` (file
  and line, or ""), ``count``.

``executions.f64`` has a row of float64 numbers, little end first, for every execution, or for
several in a row; :data:`ipufit.report.rows.COLUMNS` are its columns.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from array import array
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipufit.errors import ConfigurationError
from ipufit.report.rows import SUMS, columns_of, largest
from ipufit.utils.files import replace_file, write_text
from ipufit.utils.phase_timer import PHASES

FORMAT = "ipufit.Report/1"
# The object in run.json, or one within it.
Facts = Mapping[str, Any]
FACTS, EXECUTIONS = "run.json", "executions.f64"
PAGE, TRACE, TORCH_TRACE = "report.html", "trace.json", "torch_trace.json"
POPVISION = "popvision"
# What the figures of memory are about.
OF_TENSORS, OF_PROCESS = "of tensors on the device", "of the process"


def plain(value: object) -> Any:
    """Convert a value to types that JSON has: numbers that are not finite, and objects, to text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return str(value)


def append_rows(folder: str, numbers: array[float]) -> None:
    """Append rows to ``executions.f64`` of a report's folder."""
    with open(os.path.join(folder, EXECUTIONS), "ab") as file:
        file.write(_little(numbers).tobytes())


def write_rows(folder: str, numbers: array[float]) -> None:
    """Replace the rows of ``executions.f64``, atomically."""
    with replace_file(os.path.join(folder, EXECUTIONS)) as part, open(part, "wb") as file:
        file.write(_little(numbers).tobytes())


def write_facts(folder: str, facts: Facts) -> None:
    """Replace ``run.json`` of a report's folder, atomically."""
    text = json.dumps(plain({"format": FORMAT, **facts}), allow_nan=False)
    write_text(os.path.join(folder, FACTS), text)


def _little(numbers: array[float]) -> array[float]:
    if sys.byteorder == "little":
        return numbers
    turned = array("d", numbers)
    turned.byteswap()
    return turned


def _read_facts(folder: str) -> Dict[str, Any]:
    """Read ``run.json`` of a report's folder.

    Raises:
        ConfigurationError: there is none, or it is something else.
    """
    path = os.path.join(folder, FACTS)
    try:
        with open(path, encoding="utf-8") as file:
            facts = json.load(file)
        file_format = facts["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"a report must be a folder written by ipufit.Report, but {path!r} can't be read "
            f"({type(error).__name__}: {error}). Pass such a folder."
        ) from error
    if file_format != FORMAT:
        raise ConfigurationError(
            f"a report must have the format {FORMAT!r}, but that of {path!r} is {file_format!r}. "
            "Read it with the version of ipufit that wrote it."
        )
    assert isinstance(facts, dict)
    return facts


def _read_rows(folder: str) -> Dict[str, List[float]]:
    """Read the columns of ``executions.f64`` of a folder; they are empty without that file."""
    numbers = array("d")
    try:
        with open(os.path.join(folder, EXECUTIONS), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        data = b""
    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return columns_of(_little(numbers))


@dataclasses.dataclass(frozen=True)
class Run:
    """Facts and executions of one run.

    Attributes:
        folder: of its report.
        facts: ``run.json``; see :mod:`ipufit.report.run`.
        rows: its executions, by column.
    """

    folder: str
    facts: Dict[str, Any]
    rows: Dict[str, List[float]]

    @property
    def history(self) -> Facts:
        """The values of its epochs and updates; there are none before the first epoch is over."""
        nothing: Facts = {"epoch": [], "history": {}, "updates": {}}
        return {**nothing, **self.facts.get("history", {})}

    @staticmethod
    def read(folder: str) -> Run:
        """Read a run from its folder, also while it is being written.

        Raises:
            ConfigurationError: there is no report.
        """
        return Run(folder, _read_facts(folder), _read_rows(folder))


# Runs of one page, with their names; the name of a single run is empty, and not shown.
NamedRuns = Sequence[Tuple[str, Run]]

# No part of the work on samples.
_APART = ("capture", "validation", "report")


def total(run: Run, name: str) -> float:
    """Sum a column over all executions."""
    return math.fsum(run.rows[name])


def samples_per_second(run: Run) -> Optional[float]:
    """Return the rate of training: without capture, validation and the report itself."""
    spent = math.fsum(total(run, phase) for phase in PHASES if phase not in _APART)
    return total(run, "samples") / spent if spent > 0 else None


def ends(rows: Mapping[str, Sequence[float]]) -> List[float]:
    """Return when every execution was over, in seconds since the run began."""
    return [sum(row) for row in zip(rows["begin"], *(rows[phase] for phase in PHASES))]


def binned(rows: Mapping[str, Sequence[float]], most: int) -> List[Dict[str, float]]:
    """Sum executions over at most so many stretches.

    Args:
        rows: executions, by column.
        most: stretches.

    Returns:
        For each stretch the sums of numbers and seconds, ``begin`` and ``first_update`` of the
        first execution, ``update`` and ``end`` after the last, seconds ``working`` on samples, and
        the largest ``memory``.
    """
    length = len(rows["begin"])
    size = max(1, math.ceil(length / most))
    over = ends(rows)
    stretches = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        one: Dict[str, float] = {name: math.fsum(rows[name][start:stop]) for name in SUMS}
        one["begin"], one["first_update"] = rows["begin"][start], rows["first_update"][start]
        one["working"] = math.fsum(one[phase] for phase in PHASES if phase not in _APART)
        last = stop - 1
        one["end"] = over[last]
        one["update"] = rows["first_update"][last] + rows["updates"][last]
        one["memory"] = largest(rows["memory"][start:stop])
        stretches.append(one)
    return stretches


def summarize_run(run: Run) -> Dict[str, object]:
    """Return the most important numbers of a run, in types that JSON has.

    ``final`` are the last values of the history, ``seconds`` and ``phases`` those of the whole run,
    and ``samples_per_second`` is that of the executions, without the time of recording.

    Args:
        run: also one that is not over.
    """
    facts, rows = run.facts, run.rows
    summary = {
        "folder": run.folder,
        **{name: facts[name] for name in ("title", "status", "error", "begun")},
        "epochs": len(run.history["epoch"]),
        "executions": int(sum(rows["executions"])),
        "updates": int(sum(rows["updates"])),
        "samples": int(sum(rows["samples"])),
        "samples_per_second": samples_per_second(run),
        "seconds": facts.get("seconds", 0.0),
        "phases": facts.get("phases", {}),
        "final": {name: pairs[-1][1] for name, pairs in run.history["history"].items() if pairs},
        "warnings": [
            {name: each[name] for name in ("kind", "text", "cure", "place", "count")}
            for each in facts.get("warnings", [])
        ],
    }
    plain_summary: Dict[str, object] = plain(summary)
    return plain_summary
