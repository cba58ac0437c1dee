"""Every call that the IPU engine makes on a PopTorch, written down and held against its surface."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import json
import sys
import types
from pathlib import Path

import ipufit.poptorch
from ipufit import partition
from ipufit.engines import ipu
from ipufit.poptorch import optim

SURFACE = json.loads(
    (Path(__file__).parent / "poptorch" / "surface.json").read_text(encoding="utf-8")
)
_ENGINE = (str(Path(ipu.__file__).parent), str(Path(partition.__file__).parent))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call or look-up.

    Attributes:
        owner: the definition of the object it is made on, or "poptorch" for the module.
        name: of the function, method or attribute.
        target: the object.
        args, kwargs: as they came; None for a look-up.
    """

    owner: str
    name: str
    target: object
    args: tuple = None
    kwargs: dict = None


def _from_the_engine():
    return sys._getframe(2).f_code.co_filename.startswith(_ENGINE)


class Recorder(types.ModuleType):
    """A module like the stand-in, whose attributes are noted when they are looked up."""

    def __init__(self):
        super().__init__("ipufit.poptorch")
        self.calls = []

    def __getattr__(self, name):
        value = getattr(ipufit.poptorch, name)
        if not _from_the_engine():
            return value
        if inspect.isfunction(value):
            return self._noting("poptorch", name, value, self)
        self.calls.append(Call("poptorch", name, self))
        return value

    def _noting(self, owner, name, function, target=None):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if target is not None or _from_the_engine():
                own, rest = (target, args) if target is not None else (args[0], args[1:])
                self.calls.append(Call(owner, name, own, rest, kwargs))
            return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def watching(self):
        """Note the calls of methods too."""
        kinds = {
            "poptorch.PoplarExecutor": ipufit.poptorch.PoplarExecutor,
            "poptorch.Options": ipufit.poptorch.Options,
            "poptorch.options._TrainingOptions": type(ipufit.poptorch.Options().Training),
            "poptorch.options._DistributedOptions": type(ipufit.poptorch.Options().Distributed),
        }
        kinds.update(
            {
                f"poptorch.{name}": getattr(ipufit.poptorch, name)
                for name in (
                    "Block",
                    "ParallelPhasedExecution",
                    "Phase",
                    "PipelinedExecution",
                    "SerialPhasedExecution",
                    "ShardedExecution",
                    "Stage",
                )
            }
        )
        kinds.update(
            {
                f"poptorch.optim.{name}": getattr(optim, name)
                for name in ("SGD", "Adam", "AdamW", "RMSprop", "LAMB")
            }
        )
        patched = []
        try:
            for owner, kind in kinds.items():
                for name in _members(owner):
                    found = inspect.getattr_static(kind, name, None)
                    if isinstance(found, staticmethod):
                        noting = staticmethod(self._noting(owner, name, found.__func__, kind))
                    elif inspect.isfunction(found):
                        noting = self._noting(owner, name, found)
                    else:
                        continue
                    patched.append((kind, name, vars(kind).get(name)))
                    setattr(kind, name, noting)
            yield self
        finally:
            for kind, name, before in reversed(patched):
                if before is None:
                    delattr(kind, name)
                else:
                    setattr(kind, name, before)


def _members(owner):
    names = SURFACE["definitions"][owner]["methods"]
    return [name for name in names if name in ("__init__", "__call__") or name[0] != "_"]


def signature_of(owner, name):
    """How the surface says that a function or method is called; None if it has none of this name.

    Defaults are left as they are written: only whether there is one matters here.
    """
    definitions = SURFACE["definitions"]
    if owner == "poptorch":
        path = SURFACE["namespaces"]["poptorch"].get(name)
        text = None if path is None else definitions[path].get("signature")
    else:
        text = definitions[owner]["methods"].get(name)
        if isinstance(text, list):
            _, text = text
    if text is None:
        return None
    arguments = ast.parse(f"def f{text}: pass").body[0].args
    kinds = inspect.Parameter
    first = len(arguments.args) - len(arguments.defaults)
    found = [
        kinds(each.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if i < first else None)
        for i, each in enumerate(arguments.args)
        if each.arg != "self"
    ]
    if arguments.vararg:
        found.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults):
        empty = kinds.empty if default is None else None
        found.append(kinds(each.arg, kinds.KEYWORD_ONLY, default=empty))
    if arguments.kwarg:
        found.append(kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(found)
