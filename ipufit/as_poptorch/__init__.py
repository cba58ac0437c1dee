"""``import poptorch``, and what a program imports beside it, also where there is no Poplar SDK.

This folder is put on ``sys.path``, before all that is installed: each module in it has the name of
one of the SDK's, and gives way to that one where it can be imported.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import NoReturn, Optional, Sequence

__all__ = [
    "CHOICES",
    "CLAIM_IPUS",
    "DOOR",
    "POPTORCH_VERSION",
    "check_alone",
    "install",
    "installed",
    "refuse",
    "search_in",
    "stands_in",
]

# PopTorch 3.4.0; what follows the plus is the engine, where PopTorch has its commit.
POPTORCH_VERSION = "3.4.0+ipufit"

CHOICES = ("auto", "sdk", "standin")

# What processes that this one starts read, too.
CLAIM_IPUS = "IPUFIT_CLAIM_IPUS"
_CHOICE = "IPUFIT_POPTORCH"
_NAMED = "IPUFIT_STANDINS_NAMED"

_POPTORCH = "poptorch"
_STANDIN = "ipufit.poptorch"
_NAMES = ("horovod", "libpvti", "popart", "popdist", _POPTORCH)

_FOLDER = os.path.dirname(os.path.abspath(__file__))
# What `import poptorch` finds first, which decides what it is.
DOOR = os.path.join(_FOLDER, _POPTORCH, "__init__.py")
# Where importlib.metadata finds the version of poptorch, on sys.path where the stand-in will be it.
_METADATA = os.path.join(_FOLDER, "dist-info")

# How many processes a launcher has started, by its variable.
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def install(choice: str = "auto", *, claim_ipus: bool = False, quiet: bool = False) -> None:
    """From here on ``import poptorch`` works, also in processes that this one starts.

    So does that of ``popart``, ``popdist``, ``horovod.torch`` and ``libpvti``, each with what a
    program in one process uses of it. Nothing is imported yet: PopTorch reads its environment
    variables when it is imported, and a program may set them first. The first import of each says
    on stderr what it got, once for all processes.

    Args:
        choice: ``"auto"``: the SDK's where it is installed and can be imported, otherwise ipufit's
            stand-in; ``"sdk"``: the SDK's PopTorch or an ImportError; ``"standin"``: ipufit's
            stand-in for PopTorch, also where the SDK is.
        claim_ipus: whether the stand-in says that there are IPUs, for programs that ask.
        quiet: say nothing on stderr.
    Raises:
        ValueError: there is no such choice.
        RuntimeError: poptorch has been imported, and it is not what this choice leads to.
    """
    _check_choice(choice, "`choice`")
    present = sys.modules.get(_POPTORCH)
    if present is not None and choice != "auto":
        is_standin = present.__name__ == _STANDIN
        if is_standin != (choice == "standin"):
            raise RuntimeError(
                f"`choice` must be decided before poptorch is imported, but {choice!r} came when "
                f"it already was, from {present.__file__}. Call install first, in a new process "
                "or kernel."
            )
    os.environ[_CHOICE] = choice
    if claim_ipus:
        os.environ[CLAIM_IPUS] = "1"
    if quiet:
        os.environ[_NAMED] = " ".join(_NAMES)
    search_in(_FOLDER)
    if choice == "standin" or (choice == "auto" and installed(_POPTORCH) is None):
        search_in(_METADATA)


def search_in(folder: str, *, last: bool = False) -> None:
    """Import from this folder, too, here and in processes that this one starts.

    multiprocessing hands over ``sys.path``; any other Python reads the environment.

    Args:
        folder: an absolute path.
        last: behind all others; otherwise only behind the program's own folder.
    """
    if folder not in sys.path:
        sys.path.insert(len(sys.path) if last else 1, folder)
    present = os.environ.get("PYTHONPATH")
    entries = present.split(os.pathsep) if present else []
    if folder not in entries:
        entries.insert(len(entries) if last else 0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(entries)


def stands_in(name: str, what: str) -> bool:
    """Decide between the stand-in that is being imported and the SDK's module, and say which.

    The SDK's is then in ``sys.modules``, and what ``import`` returns.

    Args:
        name: the name that the stand-in is imported by.
        what: what it is or does, to say behind its name.
    Returns:
        Whether it is the stand-in.
    Raises:
        ImportError: ``IPUFIT_POPTORCH`` asks for the SDK's PopTorch, which can't be had.
    """
    if name not in _NAMES:
        return False  # imported as a part of ipufit, by a tool that looks at all of it
    choice = os.environ.get(_CHOICE, "auto") if name == _POPTORCH else "auto"
    _check_choice(choice, _CHOICE)
    reason = "as --poptorch standin asks"
    if choice != "standin":
        absence = _give_way(name)
        if absence is None:
            return False
        if choice == "sdk":
            raise ImportError(
                f"--poptorch sdk needs the PopTorch of the Poplar SDK, but {absence}. Enable the "
                "SDK in this shell, with the Python and torch that it was made for, or leave the "
                "option out to run on ipufit's stand-in.",
                name=name,
            )
        reason = absence
    if name == _POPTORCH:
        _become_poptorch()
        search_in(_METADATA)
        if os.environ.get(CLAIM_IPUS) == "1":
            reason += "; it claims IPUs, as --claim-ipus asks"
    _say(name, f"ipufit's stand-in {what}: {reason}")
    return True


def refuse(module: str, name: str, names: Sequence[str], what: str = "") -> NoReturn:
    """Say where a name is that a stand-in lacks.

    Args:
        module: the name of the stand-in.
        name: of what a program looks for in it.
        names: what the stand-in has.
        what: what it is for, to say behind its name.
    Raises:
        AttributeError: always.
    """
    raise AttributeError(
        f"{module}.{name} comes with Graphcore's Poplar SDK, and this is ipufit's stand-in{what}, "
        f"which has {', '.join(names)}. Enable the SDK in this shell, or leave out what uses it."
    )


def check_alone(module: str) -> None:
    """Check that this process is the only one of its program.

    Args:
        module: the name of the stand-in that asks.
    Raises:
        RuntimeError: the environment says that there are several.
    """
    for name in sorted(os.environ):
        value = os.environ[name]
        if name.startswith("POPDIST_") or (name in _SIZES and value not in ("", "1")):
            raise RuntimeError(
                f"this process must be the only one, but {name} is {value!r}, as poprun, mpirun "
                f"and horovodrun set it for the processes that they start. {module} for several "
                "processes comes with Graphcore's Poplar SDK: enable it in this shell, or start "
                "the program without them."
            )


def _check_choice(choice: str, where: str) -> None:
    if choice not in CHOICES:
        raise ValueError(
            f"{where} must be one of {', '.join(CHOICES)}, but is {choice!r}. Leave it out for the "
            "SDK's PopTorch where that works, and ipufit's stand-in otherwise."
        )


def _give_way(name: str) -> Optional[str]:
    """Import the SDK's module in the place of the stand-in, or return why it isn't that one."""
    spec = installed(name)
    if spec is None or spec.loader is None:
        return "no SDK is installed for this Python"
    standin, hook = sys.modules[name], sys.excepthook
    try:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except Exception as fault:
        sys.excepthook = hook
        for half in [half for half in sys.modules if half.partition(".")[0] == name]:
            del sys.modules[half]
        sys.modules[name] = standin
        reason = " ".join(f"{type(fault).__name__}: {fault}".rstrip(": ").split())
        return f"the one in {_place(spec)} can't be imported ({reason})"
    if name == _POPTORCH:
        version = getattr(module, "__version__", "of unknown version")
        claims = os.environ.get(CLAIM_IPUS) == "1"
        unused = ", and --claim-ipus has no effect" if claims else ""
        _say(name, f"PopTorch {version} from {_place(spec)}{unused}")
    return None


def installed(name: str) -> Optional[importlib.machinery.ModuleSpec]:
    """The module of this name that is not in this folder; None where there is none.

    A folder without ``__init__.py`` that happens to have this name is no package of the SDK.
    """
    others = [entry for entry in sys.path if entry != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec(name, others)
    return None if spec is None or spec.origin is None else spec


def _place(spec: importlib.machinery.ModuleSpec) -> str:
    """The folder that a module is in."""
    return os.path.dirname(str(spec.origin))


def _say(name: str, line: str) -> None:
    named = os.environ.get(_NAMED, "").split()
    if name not in named:
        os.environ[_NAMED] = " ".join([*named, name])
        sys.stderr.write(f"ipufit: {name} is {line}\n")
        sys.stderr.flush()


class _Loader(importlib.abc.Loader):
    """Loads a module of the stand-in for a name that begins with ``poptorch``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._own: Optional[importlib.machinery.ModuleSpec] = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Import the real module, and keep its own spec, which the import system replaces."""
        module = importlib.import_module(self._name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Restore the module's spec; its code ran under its real name."""
        module.__spec__ = self._own

    def load_module(self, fullname: Optional[str] = None) -> types.ModuleType:
        """Return the module, for programs that call the loader of a spec themselves."""
        return importlib.import_module(self._name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``poptorch.x`` as ``ipufit.poptorch.x``: one module under two names."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Return the spec of a submodule that the stand-in has; None for any other name."""
        if not fullname.startswith(f"{_POPTORCH}."):
            return None
        name = _STANDIN + fullname[len(_POPTORCH) :]
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(name))


def _become_poptorch() -> None:
    """Make the stand-in ``poptorch``, and its operators ``torch.ops.poptorch``."""
    standin = importlib.import_module(_STANDIN)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    # No library of torch's: PopTorch's own could not be imported into this process any more.
    operators = importlib.import_module(f"{_STANDIN}._operators.torch_ops")
    setattr(importlib.import_module("torch").ops, _POPTORCH, operators)
    sys.modules[_POPTORCH] = standin
