"""``ipufit run``: a file or module runs as Python runs it, and finds a package ``poptorch``."""

from __future__ import annotations

import builtins
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Optional, Sequence

from ipufit.utils.console import PACKAGE

__all__ = [
    "CHOICES",
    "Script",
    "ScriptError",
    "enter",
    "enter_module",
    "offer_poptorch",
    "read_script",
    "run_module",
    "run_script",
]


class ScriptError(Exception):
    """A script that can't be read, or a module that is not there."""


@dataclass(frozen=True)
class Script:
    """A file that has been read.

    Attributes:
        path: as it was given; ``sys.argv[0]`` of the script.
        source: its bytes, in the encoding that it names.
    """

    path: str
    source: bytes


def read_script(path: str) -> Script:
    """Read a script.

    Raises:
        ScriptError: it is no file, or the system doesn't let it be read.
    """
    wanted = "`script` must be a file of Python that can be read"
    if os.path.isdir(path):
        raise ScriptError(f"{wanted}, but {path} is a folder. Name the file in it to run.")
    try:
        with open(path, "rb") as file:
            return Script(path, file.read())
    except FileNotFoundError:
        raise ScriptError(
            f"{wanted}, but {path} does not exist. The path is relative to {os.getcwd()}."
        ) from None
    except OSError as fault:
        reason = fault.strerror or str(fault)
        raise ScriptError(f"{wanted}, but {path} can't be: {reason}. Give another.") from None


def enter(script: Script, arguments: Sequence[str]) -> None:
    """Make ``sys.argv`` and ``sys.path`` those of the script.

    They stay so when it has ended: threads, exit handlers and processes that it started go on
    needing them.
    """
    _enter(script.path, os.path.dirname(os.path.realpath(script.path)), arguments)


def enter_module(name: str, arguments: Sequence[str]) -> None:
    """Make ``sys.argv`` and ``sys.path`` those of a module that ``python -m`` runs.

    Nothing is imported yet, not even the package that the module is in.

    Raises:
        ScriptError: there is no such module, as far as that can be known without importing one.
    """
    _enter("-m", os.getcwd(), arguments)
    outermost = name.partition(".")[0]
    if not outermost or importlib.util.find_spec(outermost) is None:
        raise ScriptError(
            "`-m` must be followed by the name of a module that can be imported, but there is no "
            f"module {outermost!r}. Install it for {sys.executable}, or start in the folder that "
            f"it is in, not in {os.getcwd()}."
        )


def _enter(name: str, folder: str, arguments: Sequence[str]) -> None:
    sys.argv[:] = [name, *arguments]
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return  # Python has put no folder in front, either
    left, sys.path[0] = sys.path[0], folder
    home = os.path.realpath(os.path.join(PACKAGE, os.pardir))
    # A checkout that is not installed was found through the folder that has just gone.
    if os.path.realpath(left) == home and home not in map(os.path.realpath, sys.path):
        _search_also(home)


def run_script(script: Script) -> None:
    """Run it as ``__main__``, as Python does.

    Raises:
        BaseException: what the script raises. Where it reaches the top, the traceback that Python
            shows begins in the script.
    """
    main = types.ModuleType("__main__")
    # As Python does: absolute since 3.9.
    file = script.path if sys.version_info < (3, 9) else os.path.abspath(script.path)
    main.__file__ = file
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
    vars(main).update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    try:
        exec(compile(script.source, file, "exec", dont_inherit=True), vars(main))
    except SystemExit:
        raise
    except BaseException as fault:
        _show_from(fault, lambda path: path == file)
        raise


def run_module(name: str) -> None:
    """Run it as ``__main__``, as ``python -m`` does.

    Raises:
        BaseException: what the module raises. Where it reaches the top, the traceback that Python
            shows begins in the module.
    """
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException as fault:
        above = (__file__, runpy.run_module.__code__.co_filename)
        _show_from(fault, lambda path: path not in above)
        raise


def _search_also(folder: str) -> None:
    """Import from this folder, too, here and in processes that this one starts.

    multiprocessing hands over ``sys.path``; any other Python reads the environment.
    """
    if folder not in sys.path:
        sys.path.append(folder)
    present = os.environ.get("PYTHONPATH")
    entries = present.split(os.pathsep) if present else []
    if folder not in entries:
        os.environ["PYTHONPATH"] = os.pathsep.join([*entries, folder])


def _show_from(fault: BaseException, is_its: Callable[[str], bool]) -> None:
    """Leave out of the traceback that Python shows what lies above the script's own code.

    Args:
        fault: as it was caught here.
        is_its: whether a file, of those from here on, is the script's.
    """
    first = fault.__traceback__
    while first is not None and not is_its(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    frame = first.tb_frame if first is not None else None
    show = sys.excepthook

    def shown(kind: type, value: BaseException, traceback: Optional[types.TracebackType]) -> None:
        while traceback is not None and traceback.tb_frame is not frame:
            traceback = traceback.tb_next
        show(kind, value.with_traceback(traceback), traceback)

    sys.excepthook = shown


CHOICES = ("auto", "sdk", "standin")

_NAME = "poptorch"
# A folder with a package of that name, for processes in which no finder of ours is installed.
_AS_POPTORCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "as_poptorch")


def offer_poptorch(choice: str, tell: Callable[[str], None], claim_ipus: bool = False) -> None:
    """From here on ``import poptorch`` works, also in processes that this one starts.

    Nothing is imported yet: PopTorch reads its environment variables when it is imported, and the
    script may set them first.

    Args:
        choice: one of ``CHOICES``. ``"auto"``: the SDK's where it can be imported.
        tell: is given one line when the script imports poptorch, which says what it got.
        claim_ipus: whether the stand-in says that there are IPUs.
    """
    if claim_ipus:
        os.environ["IPUFIT_CLAIM_IPUS"] = "1"
    if choice == "standin" or (choice == "auto" and _installed() is None):
        _offer_standin()
    sys.meta_path.insert(0, _Chooser(choice, tell))


def _offer_standin() -> None:
    """Let processes that this one starts find the stand-in, and ``importlib.metadata`` here."""
    _search_also(_AS_POPTORCH)
    sys.meta_path.insert(0, _Metadata())


class _Metadata(importlib.abc.MetaPathFinder):
    """Names the stand-in where the version of PopTorch is asked for, also beside an SDK."""

    def find_spec(self, *args: object) -> None:
        """Find no module."""

    def find_distributions(self, context: object = None) -> Iterator[object]:
        """Yield the stand-in's metadata if it is looked for by name, or everything is listed."""
        # Imported here: whoever calls this has imported it.
        from importlib.metadata import DistributionFinder, MetadataPathFinder

        if getattr(context, "name", None) in (None, _NAME):
            ours: Any = DistributionFinder.Context(name=_NAME, path=[_AS_POPTORCH])
            yield from MetadataPathFinder.find_distributions(ours)


class _Chooser(importlib.abc.MetaPathFinder):
    """Decides at the first ``import poptorch``, once."""

    def __init__(self, choice: str, tell: Callable[[str], None]) -> None:
        self._choice = choice
        self._tell = tell

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """The spec of what was chosen, already imported; None for any other name."""
        if fullname != _NAME:
            return None
        sys.meta_path.remove(self)
        module = self._import()
        return importlib.machinery.ModuleSpec(_NAME, _Given(module))

    def _import(self) -> types.ModuleType:
        """Import the package that the choice leads to, and say which."""
        if self._choice == "standin":
            return self._standin("as --poptorch standin asks")
        place = _installed()
        if place is None:
            if self._choice == "sdk":
                raise ModuleNotFoundError(
                    "--poptorch sdk needs the PopTorch of the Poplar SDK, but no package poptorch "
                    "is installed for this Python. Enable the SDK in this shell, or leave the "
                    "option out to run on ipufit's stand-in.",
                    name=_NAME,
                )
            return self._standin("no SDK is installed for this Python")
        hook = sys.excepthook
        try:
            module = importlib.import_module(_NAME)
        except Exception as fault:
            sys.excepthook = hook
            _forget()
            reason = f"{type(fault).__name__}: {fault}".rstrip(": ")
            if self._choice == "sdk":
                raise ImportError(
                    f"--poptorch sdk needs the PopTorch of the Poplar SDK, but the one in {place} "
                    f"can't be imported ({reason}). Use the Python and torch that this SDK was "
                    "made for, or leave the option out to run on ipufit's stand-in.",
                    name=_NAME,
                ) from fault
            return self._standin(f"the one in {place} can't be imported ({_one_line(reason)})")
        version = getattr(module, "__version__", "of unknown version")
        unused = ", and --claim-ipus has no effect" if _claims_ipus() else ""
        self._tell(f"poptorch is PopTorch {version} from {place}{unused}")
        return module

    def _standin(self, reason: str) -> types.ModuleType:
        """Import ours and make its name hold for what is below it, too."""
        from ipufit import poptorch
        from ipufit.poptorch import _alias

        _alias.install()
        if not any(isinstance(finder, _Metadata) for finder in sys.meta_path):
            _offer_standin()
        claimed = "; it claims IPUs, as --claim-ipus asks" if _claims_ipus() else ""
        self._tell(f"poptorch is ipufit's stand-in in plain torch: {reason}{claimed}")
        return poptorch


class _Given(importlib.abc.Loader):
    """Hands out a module that has been imported."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module
        self._own = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module of ipufit that stands for the imported one."""
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing but the spec, which the import has replaced."""
        module.__spec__ = self._own


def _installed() -> Optional[str]:
    """The folder of a package poptorch on ``sys.path``; None where there is none.

    A folder without ``__init__.py`` that happens to have this name is no package of the SDK.
    """
    spec = importlib.machinery.PathFinder.find_spec(_NAME)
    if spec is None or spec.origin is None:
        return None
    place = os.path.dirname(spec.origin)
    return None if os.path.dirname(place) == _AS_POPTORCH else place


def _forget() -> None:
    """Take back an import that failed halfway."""
    for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
        del sys.modules[name]


def _claims_ipus() -> bool:
    return os.environ.get("IPUFIT_CLAIM_IPUS") == "1"


def _one_line(text: str) -> str:
    return " ".join(text.split())
