"""PopTorch, of the SDK or the stand-in, without importing it.

Where a program finds it, which classes are its own, and who is tracing.
"""

from __future__ import annotations

import contextvars
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any, Callable, Container, ContextManager, NoReturn, Optional, Sequence

from ipufit.utils.error_collector import within

CHOICES = ("auto", "sdk", "standin")

# What processes that this one starts read, too.
_CHOICE = "IPUFIT_POPTORCH"
CLAIM_IPUS = "IPUFIT_CLAIM_IPUS"
_NAMED = "IPUFIT_STANDINS_NAMED"

_POPTORCH = "poptorch"
STANDIN = "ipufit.poptorch"
# What a stand-in may be imported as.
_NAMES = ("horovod", "libpvti", "popart", "popdist", _POPTORCH)

# Each module in it has the name of one of the SDK's, and gives way to that one.
_STANDINS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "as_poptorch")
# What `import poptorch` finds first, which decides what it is.
DOOR = os.path.join(_STANDINS, _POPTORCH, "__init__.py")
# Where importlib.metadata finds the version of poptorch, on sys.path where the stand-in will be it.
_METADATA = os.path.join(_STANDINS, "dist-info")

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
        is_standin = present.__name__ == STANDIN
        if is_standin != (choice == "standin"):
            raise RuntimeError(
                f"`choice` must be set before poptorch is imported, but {choice!r} came after it "
                f"was imported from {present.__file__}. Call install first, in a new process or "
                "kernel."
            )
    os.environ[_CHOICE] = choice
    if claim_ipus:
        os.environ[CLAIM_IPUS] = "1"
    if quiet:
        os.environ[_NAMED] = " ".join(_NAMES)
    search_in(_STANDINS)
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
        f"which has {', '.join(names)}. Enable the SDK in this shell, or remove the code that uses "
        "it."
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
                f"this must be a single process, but {name} is {value!r}, as set by poprun, mpirun "
                f"and horovodrun. {module} for several processes comes with Graphcore's Poplar "
                "SDK: enable it in this shell, or start the program without them."
            )


def _check_choice(choice: str, where: str) -> None:
    if choice not in CHOICES:
        raise ValueError(
            f"{where} must be one of {', '.join(CHOICES)}, but is {choice!r}. Leave it out for the "
            "SDK's PopTorch if that works, and ipufit's stand-in otherwise."
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
    others = [entry for entry in sys.path if entry != _STANDINS]
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


def sdk_kind(thing: object, names: Container[str]) -> Optional[str]:
    """Which of PopTorch's classes something is an instance of; None if it is of none of these.

    Args:
        thing: anything.
        names: of the classes.
    """
    for kind in type(thing).__mro__:
        if kind.__name__ in names and "poptorch" in kind.__module__:
            return kind.__name__
    return None


_OnBegin = Callable[[str, Optional[int]], None]

_SDK: contextvars.ContextVar[Optional[Any]] = contextvars.ContextVar("sdk", default=None)
_WATCHER: contextvars.ContextVar[Optional[_OnBegin]] = contextvars.ContextVar(
    "watcher", default=None
)


def sdk_in_use() -> Optional[Any]:
    """PopTorch, or the stand-in, while a program for IPUs is traced; None elsewhere."""
    return _SDK.get()


def trace_with(sdk: object) -> ContextManager[None]:
    """Tell code in the block that this PopTorch traces it."""
    return within(_SDK, sdk)


def begin_block(name: str, ipu: Optional[int]) -> None:
    """Place what runs from now on on this IPU of a replica."""
    sdk, watcher = _SDK.get(), _WATCHER.get()
    if sdk is not None:
        sdk.Block.start(name, ipu_id=ipu)
    if watcher is not None:
        watcher(name, ipu)


def blocks_watched(on_begin: _OnBegin) -> ContextManager[None]:
    """Tell of each :func:`begin_block` in the block."""
    return within(_WATCHER, on_begin)
