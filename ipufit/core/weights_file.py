"""Weights in a safetensors file, which any program that knows safetensors and torch can load."""

from __future__ import annotations

import copy
import json
import os
import zipfile
from typing import Any, Dict, List, Mapping, Optional, Union

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from ipufit._version import __version__
from ipufit.errors import ConfigurationError, brief_error
from ipufit.utils.error_collector import ErrorCollector, one_of
from ipufit.utils.files import replace_file, sync_folder, write_tensors

_TORCH_SUFFIXES = (".pt", ".pth", ".bin")

# Before it, a file could run code in spite of weights_only (CVE-2025-32434).
_SAFE = "2.6"


def _read_torch(path: str) -> Dict[str, Tensor]:
    """Read the tensors of a state dict that ``torch.save`` wrote, by name.

    Raises:
        ConfigurationError: this torch reads no such file safely, or it is something else.
    """
    if TorchVersion(torch.__version__) < TorchVersion(_SAFE):
        raise ConfigurationError(
            f"a file of torch.save can be read safely from torch 2.6 on, got {path!r} and torch "
            f"{torch.__version__}. Convert it with a newer torch: "
            "safetensors.torch.save_file(torch.load(path, weights_only=True), 'w.safetensors')."
        )
    try:
        _refuse_bombs(path)
        state: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigurationError(
            "load_weights reads files of torch.save(module.state_dict(), path), but can't read "
            f"{path!r}: {brief_error(error)}. Save the state_dict again, or use safetensors."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise _other(path, f"a {type(state).__name__}")
    wrong = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if wrong:
        raise _other(path, f"{type(state[wrong[0]]).__name__} under {wrong[0]!r}")
    return dict(state)


def _refuse_bombs(path: str) -> None:
    """Torch stores its tensors as they are; what is packed may be of any size.

    Raises:
        ValueError: something in it is packed, or said to be larger than the file.
        OSError, zipfile.BadZipFile: it is no file of torch's present format.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it is compressed, which torch.save never does")
    if sum(member.file_size for member in members) > os.path.getsize(path):
        raise ValueError("it claims to hold more than it does")


def _other(path: str, came: str) -> ConfigurationError:
    return ConfigurationError(
        f"load_weights reads a dict of tensors by name, but {path!r} holds {came}. Save only "
        "module.state_dict()."
    )


Path = Union[str, "os.PathLike[str]"]
_SUFFIX = ".safetensors"


def described(module: nn.Module, updates: int) -> Dict[str, str]:
    """Read the description of the weights in a file."""
    kind = type(module)
    about = {
        "ipufit": __version__,
        "torch": str(torch.__version__),
        "module": f"{kind.__module__}.{kind.__qualname__}",
        "updates": updates,
    }
    return {"ipufit": json.dumps(about)}


def save_weights(module: nn.Module, path: Path, about: Optional[Mapping[str, str]] = None) -> None:
    """Write ``module.state_dict()`` to one file.

    ``module.load_state_dict(safetensors.torch.load_file(path))`` reads it, without ipufit. A
    tensor with several names is stored under each. The file appears under its name only when it is
    complete; one that was there before is kept until then.

    Args:
        module: its parameters, persistent buffers and extra state of tensors are written.
        path: ends with ".safetensors"; its folder must exist.
        about: what the file's metadata say besides.

    Raises:
        ConfigurationError: the path can't be written, or the state has values that are not tensors.
    """
    target = check_path(path)
    tensors = {}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            what = f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else ""
            raise ConfigurationError(
                f"a file of weights holds dense tensors only, but {name!r} in the module's "
                f"state_dict is {what or 'of type ' + type(value).__name__}. Return a tensor "
                "from get_extra_state, or save this part separately."
            )
        # A copy: names of one tensor, and views into a larger one, are stored as tensors apart.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    _write(tensors, target, {"format": "pt", **(about or {})})


def check_path(path: Path) -> str:
    """Check the path of a weights file that is to be written, and return it as a string.

    Raises:
        ConfigurationError: it has another suffix, is a folder, or its folder is missing.
    """
    target = os.fspath(path)
    if not isinstance(target, str) or not target.endswith(_SUFFIX):
        raise ConfigurationError(
            f"weights are written as safetensors, so the path must end with {_SUFFIX!r}, got "
            f"{target!r}. Try 'weights{_SUFFIX}'."
        )
    folder = os.path.dirname(target) or "."
    if os.path.isdir(target) or not os.path.isdir(folder):
        fault = f"{target!r} is a folder" if os.path.isdir(target) else f"{folder!r} is not"
        raise ConfigurationError(
            f"weights are written to a file in an existing folder, but {fault}. Create the "
            "folder, or choose another path."
        )
    ErrorCollector.end_checks()
    return target


def _write(tensors: Dict[str, Tensor], target: str, metadata: Dict[str, str]) -> None:
    try:
        with replace_file(target) as part:
            write_tensors(part, tensors, metadata)
    except OSError as error:
        raise ConfigurationError(
            f"weights must be written completely, but {target!r} can't be written: "
            f"{error.strerror or error}. Free some space or choose another path."
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{error}. Convert them with module.to(dtype).") from error
    sync_folder(os.path.dirname(target) or ".")


def load_weights(module: nn.Module, path: Path, strict: bool = True) -> None:
    """Read a file of weights into the module's own tensors, in place.

    Everything is compared before anything is changed.

    Args:
        module: has tensors of the same names and shapes.
        path: of a safetensors file, or of one that ``torch.save(module.state_dict(), path)`` wrote.
        strict: all names and dtypes must agree; a floating-point dtype may become a wider one.
            False ignores names that only one side has, unless that is all, and converts dtypes.

    Raises:
        ConfigurationError: the file can't be read, or does not fit; lists all differences.
    """
    one_of("strict", strict, (True, False))
    stored = _read(path)
    module_state: Dict[str, object] = module.state_dict()
    fitting = {name: value for name, value in stored.items() if name in module_state}
    # To load nothing at all is what nobody wants.
    faults = differences(module_state, stored, "the file", strict or not fitting)
    if faults:
        advice = "Load it into a module like the one that was saved."
        if fitting and strict and not any(": shape " in fault for fault in faults):
            advice += " Pass strict=False to load only what both have."
        raise ConfigurationError(
            f"the weights in {os.fspath(path)!r} must fit the module {type(module).__name__}, but "
            f"they differ:\n" + "\n".join(f"  {fault}" for fault in faults) + f"\n{advice}"
        )
    ErrorCollector.end_checks()
    with torch.no_grad():
        module.load_state_dict(fitting, strict=False)


def _read(path: Path) -> Dict[str, Tensor]:
    if os.fspath(path).endswith(_TORCH_SUFFIXES):
        return _read_torch(os.fspath(path))
    try:
        return safetensors.torch.load_file(os.fspath(path))
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigurationError(
            f"load_weights reads {os.fspath(path)!r} as safetensors, but that fails: {error}. "
            f"For a file of torch.save, use a suffix such as {', '.join(_TORCH_SUFFIXES)}."
        ) from error


def differences(
    module_state: Mapping[str, object],
    stored: Mapping[str, Tensor],
    where: str,
    strict: bool = True,
    widens: bool = True,
) -> List[str]:
    """List the differences, a line each.

    Args:
        module_state: of the module; what is no tensor is passed over.
        stored: what is to take its place.
        where: the latter is, for the text.
        strict: whether names and dtypes must agree.
        widens: whether a floating-point dtype may become a wider one all the same.
    """
    faults = []
    if strict:
        faults += [f"{name}: missing in {where}" for name in module_state if name not in stored]
        faults += [f"{name}: only in {where}" for name in stored if name not in module_state]
    for name, mine in module_state.items():
        value = stored.get(name)
        if value is None or not isinstance(mine, Tensor):
            continue
        fits = value.dtype == mine.dtype or (widens and _widens(value.dtype, mine.dtype))
        if mine.shape != value.shape:
            shapes = f"{tuple(value.shape)} in {where}, {tuple(mine.shape)} in the module"
            faults.append(f"{name}: shape {shapes}")
        elif strict and not fits:
            faults.append(f"{name}: {value.dtype} in {where}, {mine.dtype} in the module")
    return faults


def _widens(source: torch.dtype, target: torch.dtype) -> bool:
    """True if every value of one dtype has its equal in the other."""
    both_floating = source.is_floating_point and target.is_floating_point
    return source == target or (both_floating and torch.promote_types(source, target) == target)


class WeightsCopy:
    """Copies of a module's parameters, buffers and extra state at one moment.

    Args:
        module: buffers that its state_dict leaves out are copied too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        tensors = [*module.parameters(), *module.buffers()]
        self._copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._extra = {
            name: copy.deepcopy(value)
            for name, value in module.state_dict().items()
            if name.rpartition(".")[2] == "_extra_state"
        }

    def state_dict(self) -> Dict[str, Any]:
        """The copies by name, as a checkpoint stores them."""
        return {"tensors": [value for _, value in self._copies], "extra": self._extra}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the copies by those of a checkpoint."""
        pairs = zip(self._copies, state["tensors"])
        self._copies = [(tensor, value.to(tensor.device)) for (tensor, _), value in pairs]
        self._extra = dict(state["extra"])

    def restore(self) -> bool:
        """Put the values back, in place: a running program works on these very tensors.

        Returns:
            Whether it was done; not where the module has other parameters or buffers now.
        """
        now = [*self._module.parameters(), *self._module.buffers()]
        if list(map(id, now)) != [id(tensor) for tensor, _ in self._copies]:
            return False
        with torch.no_grad():
            for tensor, value in self._copies:
                tensor.copy_(value)
            if self._extra:
                self._module.load_state_dict(copy.deepcopy(self._extra), strict=False)
        return True
