"""Which package ``import poptorch`` finds: the one of the Poplar SDK, or the stand-in."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any, Callable, Iterator, Optional, Sequence

from ipufit.cli.run_file import search_also

__all__ = ["CHOICES", "offer_poptorch"]

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
    search_also(_AS_POPTORCH)
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
