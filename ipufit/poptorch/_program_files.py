"""Recorded programs in files, and in the executable cache. Nothing in a file is ever executed."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import zipfile
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import safetensors.torch
import torch
from torch import Tensor, fx

from ipufit.poptorch._codec import InvalidContent, Values, make_codec, refuse_malformed
from ipufit.poptorch._logging import Error, error, logger
from ipufit.poptorch._operators.control import Body, TensorSpec, bodies_in, everywhere, renumber
from ipufit.poptorch._operators.custom import CALL_CPU
from ipufit.poptorch._placement import uses_ipu_model
from ipufit.poptorch._recording import Outputs, RecordedProgram
from ipufit.poptorch._tracing import Trace
from ipufit.poptorch.options import Options
from ipufit.utils.files import replace_file

Path = Union[str, "os.PathLike[str]"]

FORMAT_VERSION = 2
_FORMAT = "ipufit.poptorch"
_NAME_IN_FOLDER = "model.poptorch"
_METADATA, _TENSORS = "metadata.json", "tensors.safetensors"


def file_to_write(filename: Path) -> str:
    """The path of the file; its folder is made, and a folder gets ``model.poptorch`` inside.

    Raises:
        AssertionError: what should be its folder is a file.
    """
    path = os.fspath(filename)
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        if os.path.exists(folder):
            raise AssertionError(
                f"Destination folder {folder} is not a directory. Choose another path for the file."
            )
        os.makedirs(folder, exist_ok=True)
    if os.path.isdir(path):
        inside = os.path.join(path, _NAME_IN_FOLDER)
        logger.warning("save(): %s is a directory, saving model to %s", path, inside)
        return inside
    return path


def write_file(path: Path, values: Mapping[str, object]) -> None:
    """Write named values; the file appears under its name only when it is complete.

    Args:
        path: as ``file_to_write`` returns it.
        values: tensors, parameters, recorded programs, numbers, texts, None, dtypes, devices,
            poptorch's enums, and lists, tuples, named tuples, sets and dicts of these. A tensor of
            device "meta" stands for its dtype and shape. One object in two places stays one.
    Raises:
        Error: a value of another type.
    """
    content, tensors = make_codec().encode(values)
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise error(
                f"a file holds tensors of real numbers, but {name} is of {tensor.dtype}. Convert "
                "it before you save."
            )
    metadata = {
        "format": _FORMAT,
        "format_version": FORMAT_VERSION,
        "torch": torch.__version__,
        "values": content,
    }
    text = json.dumps(metadata, allow_nan=False)
    with replace_file(os.fspath(path)) as part, zipfile.ZipFile(part, "x") as file:
        file.writestr(_METADATA, text)
        file.writestr(_TENSORS, safetensors.torch.save(tensors))


def read_file(path: Path) -> Values:
    """The values of a file.

    No class named in it is imported, and no code of it runs; operators are looked up in torch.

    Raises:
        Error: it is not there, was not written by ``write_file``, or was written by a version that
            says more than this one can read.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as raw, zipfile.ZipFile(raw) as file:
            metadata, tensors = _parts(file, os.fstat(raw.fileno()).st_size)
        values = make_codec().decode(metadata.get("values"), tensors)
        if not isinstance(values, dict):
            raise InvalidContent("it has no values")
        return values
    except InvalidContent as reason:
        raise invalid(name, str(reason)) from reason
    except OSError as reason:
        raise invalid(name, f"it can't be read ({reason.strerror or reason})") from reason
    except RecursionError as reason:
        raise invalid(name, "its values are nested too deeply") from reason
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as reason:
        raise invalid(name, f"it is damaged, or of another kind ({reason})") from reason


def invalid(name: str, reason: str) -> Exception:
    """The error for a file that can't be used, and why."""
    return error(
        f"Invalid file {name}: {reason}. Write it anew with compileAndExport() or save() of this "
        "version; files of PopTorch itself can't be read here."
    )


def _parts(file: zipfile.ZipFile, size: int) -> Tuple[Values, Dict[str, torch.Tensor]]:
    entries = file.infolist()
    if sorted(entry.filename for entry in entries) != [_METADATA, _TENSORS]:
        raise InvalidContent(f"it must hold {_METADATA} and {_TENSORS}, and nothing else")
    for entry in entries:
        # Stored as they are: a small file can't become a large one.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
            raise InvalidContent(f"its {entry.filename} is compressed")
    try:
        metadata = json.loads(file.read(_METADATA).decode())
    except ValueError as reason:
        raise InvalidContent(f"its {_METADATA} is no JSON: {reason}") from reason
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
        raise InvalidContent(f"its {_METADATA} is not that of a compiled model")
    if metadata.get("format_version") != FORMAT_VERSION:
        raise InvalidContent(
            f"it has format version {metadata.get('format_version')!r}, and this ipufit reads "
            f"{FORMAT_VERSION}; it was written with torch {metadata.get('torch')}"
        )
    try:
        tensors = safetensors.torch.load(file.read(_TENSORS))
    except (safetensors.SafetensorError, KeyError, ValueError) as reason:
        raise InvalidContent(f"its {_TENSORS} can't be read: {reason}") from reason
    return metadata, tensors


def program_to_values(recorded: RecordedProgram) -> Values:
    """Convert a recorded program to values that ``write_file`` takes."""
    bodies = bodies_in(recorded.graph)
    # Counted from 0, so that the same program is written alike by every process.
    numbers = {number: place for place, number in enumerate(bodies)}
    return {
        "graph": _numbered(recorded.graph, numbers),
        "bodies": [
            (
                numbers[number],
                _numbered(body.graph, numbers),
                [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in body.results],
            )
            for number, body in bodies.items()
        ],
        "structure": recorded.outputs.structure,
        "computed": recorded.outputs.computed,
        "constants": recorded.outputs.constants,
        "reached": list(recorded.with_gradient),
        "changed_inputs": list(recorded.changed_inputs),
        "changed_state": list(recorded.changed_state),
        "statistics": list(recorded.statistics),
        "averages": list(recorded.averages),
        "random": recorded.random,
        "overlapped": recorded.overlapped,
        "counted": recorded.counted,
        "activations": dict(recorded.activations),
        "training": recorded.trace.training,
        "entered": recorded.trace.blocks.entered,
    }


def _numbered(graph: fx.GraphModule, numbers: Mapping[int, int]) -> fx.GraphModule:
    if not numbers:
        return graph
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    renumber(copied, numbers)
    return copied


def program_from_values(values: Values) -> RecordedProgram:
    """Rebuild the program of ``program_to_values``.

    Raises:
        InvalidContent: no program is written like this.
    """
    with refuse_malformed("it holds no sound program"):
        graph = values["graph"]
        if not isinstance(graph, fx.GraphModule):
            raise InvalidContent("it holds no program")
        trace = Trace(bool(values["training"]))
        trace.blocks.entered = [(name, ipu) for name, ipu in values["entered"]]
        trace.keep_alive.extend(_bodies(values["bodies"], graph))
        constants = list(values["constants"])
        computed = [bool(each) for each in values["computed"]]
        if [constant is None for constant in constants] != computed:
            raise InvalidContent("its outputs are either computed or constant")
        return RecordedProgram(
            graph,
            Outputs(values["structure"], computed, constants),
            tuple(values["reached"]),
            tuple(values["changed_inputs"]),
            tuple(values["changed_state"]),
            bool(values["random"]),
            bool(values["overlapped"]),
            trace,
            int(values["counted"]),
            {str(name): str(node) for name, node in values["activations"].items()},
            tuple(values.get("statistics", ())),
            tuple((weight, average) for weight, average in values.get("averages", ())),
        )


def _bodies(entries: Any, graph: fx.GraphModule) -> List[Body]:
    """Make the bodies that a graph calls; each may call those before it."""
    bodies: List[Body] = []
    numbers: Dict[int, int] = {}
    for number, inner, results in entries:
        renumber(inner, numbers)
        body = Body(inner, [TensorSpec(tensor.shape, tensor.dtype) for tensor in results])
        bodies.append(body)
        numbers[number] = body.number
    renumber(graph, numbers)
    return bodies


def through_cache(
    recorded: RecordedProgram, state: Mapping[str, Tensor], options: Options
) -> RecordedProgram:
    """Return the cached program in place of a recorded one, or add this one to the cache.

    Args:
        recorded: just recorded: its operators and constants are what it is known by.
        state: the device's tensors, whose shapes count.
        options: they name the folder, if caching is on; the IPU Model has no cache.

    Raises:
        Error: the folder can't be written to.
    """
    settings = options._Popart.options
    folder = settings.get("cachePath", "")
    several = options.Distributed.numProcesses > 1
    if not settings.get("enableEngineCaching") or not folder or uses_ipu_model(options):
        if several:
            logger.info("Each process compiles for itself, without a cache")
        return recorded
    nodes = (node for graph in everywhere(recorded.graph) for node in graph.graph.nodes)
    if any(node.target is CALL_CPU for node in nodes):
        logger.info("Compiled without the cache: the model calls poptorch.CPU, which no file holds")
        return recorded
    cache = ExecutableCache(folder)
    values = program_to_values(recorded)
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in state.items()}
    key = cache.key({**values, "state": shapes})
    with cache.turn(key) if several else contextlib.nullcontext():
        cached = cache.find(key)
        if cached is not None:
            return program_from_values(cached)
        cache.keep(key, values)
    return recorded


class ExecutableCache:
    """A folder of compiled programs.

    Args:
        folder: of ``Options.enableExecutableCaching`` or POPTORCH_CACHE_DIR; made if missing.
    Raises:
        Error: it can't be written to.
    """

    def __init__(self, folder: str) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as reason:
            raise error(
                f"the folder of the executable cache, {folder}, can't be made: "
                f"{reason.strerror}. Choose another one in enableExecutableCaching()."
            ) from reason
        if not os.access(folder, os.W_OK):
            raise error(
                f"Cache folder {folder} is not writable. Choose another one in "
                "enableExecutableCaching()."
            )
        self._folder = folder

    def key(self, values: Mapping[str, object]) -> str:
        """Return a hash of what a compilation depends on: the recorded program and its settings.

        Args:
            values: as for ``write_file``; tensors count with their values.
        """
        content, tensors = make_codec().encode(values)
        header = [FORMAT_VERSION, torch.__version__, content]
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        for name, tensor in tensors.items():
            digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def find(self, key: str) -> Optional[Values]:
        """Return the values under a key, or None; a damaged file counts as none, with a warning."""
        path = self._path(key)
        if not os.path.exists(path):
            return None
        try:
            values = read_file(path)
        except Error as reason:
            logger.warning("The model is compiled again: %s", reason.message)
            return None
        logger.debug("Executable found in the cache: %s", path)
        return values

    def keep(self, key: str, values: Mapping[str, object]) -> None:
        """Store a compiled program under a key."""
        write_file(self._path(key), values)

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, f"{key}.poptorch")

    @contextlib.contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Lock a key, so that one process compiles and the next ones find its program.

        On systems without file locks each process compiles for itself.
        """
        try:
            import fcntl
        except ImportError:
            yield
            return
        with open(os.path.join(self._folder, f"{key}.lock"), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            logger.debug("Executable cache file locked by process %d", os.getpid())
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)
                logger.debug("Process %d released the cache lock", os.getpid())
