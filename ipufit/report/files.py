"""The files of a report: facts as JSON, executions as a table of numbers.

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

import json
import math
import os
import sys
from array import array
from typing import Any, Dict, List, Mapping

from ipufit.errors import ConfigurationError
from ipufit.report.rows import columns_of
from ipufit.utils.files import replace_file

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


def append_rows(path: str, numbers: array[float]) -> None:
    """Append rows of executions to a report's file."""
    with open(path, "ab") as file:
        file.write(_little(numbers).tobytes())


def write_rows(path: str, numbers: array[float]) -> None:
    """Replace the rows of the file, atomically."""
    with replace_file(path) as part, open(part, "wb") as file:
        file.write(_little(numbers).tobytes())


def _little(numbers: array[float]) -> array[float]:
    if sys.byteorder == "little":
        return numbers
    turned = array("d", numbers)
    turned.byteswap()
    return turned


def read_facts(folder: str) -> Dict[str, Any]:
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


def read_rows(folder: str) -> Dict[str, List[float]]:
    """Read the columns of ``executions.f64`` of a folder; they are empty without that file."""
    numbers = array("d")
    try:
        with open(os.path.join(folder, EXECUTIONS), "rb") as file:
            data = file.read()
    except FileNotFoundError:
        data = b""
    numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    return columns_of(_little(numbers))
