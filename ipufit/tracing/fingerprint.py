"""Fingerprints of the Python values that a recording has frozen, besides tensors.

Attributes of modules can be listed; of globals there are too many. So the code of forward and loss
is searched: the names in it, those in the functions and methods of the user's that it calls, and so
on.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import sys
import types
import weakref
from typing import Any, Dict, FrozenSet, Iterator, List, Optional, Set, Tuple

import torch
from torch import Tensor, nn

from ipufit.losses import Loss
from ipufit.tracing.user_lines import is_users, users_module
from ipufit.utils.console import warn_user
from ipufit.utils.random_streams import generator_state
from ipufit.utils.state import GONE, MEMBERS, PLAIN, Place, ValueSnapshot, is_of_torch, version_of

_CONTAINERS = (list, tuple, dict, set, frozenset)
# What is called of a module that is recorded; of a LightningModule, its steps.
_ENTRIES = ("forward", "__call__", "training_step", "validation_step", "test_step", "predict_step")
# Where torch has hooks of modules.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Objects within objects, such as config.model.rate.
_DEPTH_OF_VALUES = 4


class StepModule(nn.Module):
    """The user's module and the loss as one module, so that both may own parameters and buffers.

    Args:
        net: the user's module.
        loss: normal form; None where there is none.

    Attributes:
        net, loss: as given.
        loss_module: the loss where it is a module.
        functions: what the loss calls that is no module.
    """

    def __init__(self, net: nn.Module, loss: Optional[Loss] = None) -> None:
        super().__init__()
        self.net = net
        self.loss_module = loss.module if loss is not None else None
        self.loss = loss
        self.functions = () if loss is None else loss.functions

    def tensors(self) -> Dict[str, Tensor]:
        """Parameters and buffers by name."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    def owners(self) -> Tuple[object, ...]:
        """The user's modules and the objects that the loss calls, whose attributes are frozen.

        Those of a TorchScript module are not Python's.
        """
        parts = [each for each in self.modules() if not isinstance(each, torch.jit.ScriptModule)]
        return (*parts[1:], *filter(_has_settings, map(_owner, self.functions)))

    @contextlib.contextmanager
    def preserve_attributes(self, notes_writes: bool = False) -> Iterator[List[str]]:
        """Undo what forward and loss set on themselves: tensors of a recording have no values.

        Args:
            notes_writes: whether what they write to globals and classes, such as a count of calls,
                stays, and is part of no fingerprint from then on: each recording would call for
                another one.

        Yields:
            A list that holds, afterwards, what was set or filled, as "Class.attribute", sorted;
            what torch's own modules set on themselves is left out.
        """
        changed: List[str] = []
        referents: List[object] = []
        reader = CodeReader(self)
        before = _values_read(reader, referents) if notes_writes else {}
        is_users = None if notes_writes else is_of_users
        snapshot = ValueSnapshot(self.owners(), reader.places, True, is_users)
        try:
            yield changed
            if notes_writes:
                after = _values_read(CodeReader(self), referents)
                written = {key[0] for key, value in before.items() if after.get(key) != value}
                _WRITTEN.setdefault(self.net, set()).update(written)
        finally:
            changed += snapshot.changed()
            changed += snapshot.restore()

    @torch.no_grad()
    def refresh_hooks(self) -> None:
        """Have hooks of torch's, such as pruning's, compute what they set from the present weights.

        A recording does not run them. Recordings know what they set by its identity, which stays.
        """
        for part in self.modules():
            for hook in part._forward_pre_hooks.values():
                if type(hook).__module__.startswith("torch.nn.utils."):
                    before = dict(vars(part))
                    # In training mode, that of spectral_norm also changes its buffers.
                    part.training = False
                    hook(part, ())
                    for name in (name for name, value in before.items() if torch.is_tensor(value)):
                        before[name].data.copy_(vars(part)[name])
                    vars(part).update(before)

    @contextlib.contextmanager
    def forget_recording(self) -> Iterator[None]:
        """Let no tensor of a recording in the block stay where the user's code can reach it."""
        snapshot = ValueSnapshot(self.owners(), CodeReader(self).places)
        try:
            yield
        finally:
            snapshot.forget()


# Titles of what code writes itself when it is recorded, by the user's module.
_WRITTEN: weakref.WeakKeyDictionary[nn.Module, Set[str]] = weakref.WeakKeyDictionary()


class CodeReader:
    """Values that code can read, found by the names in it.

    Args:
        step: the user's module with the loss.

    Attributes:
        values: plain values, containers of them, arrays, tensors, classes and modules, the code of
            functions that were followed, and other functions, each behind a title for people such
            as "ALPHA" or "Config.alpha"; what the code itself writes is left out.
        generators: objects that draw random numbers, likewise.
        places: where the code finds values, whatever they are.
        names: all names in the code, those of attributes included, and texts that may be some.
    """

    def __init__(self, step: StepModule) -> None:
        self.values: List[Tuple[str, object]] = []
        self.generators: List[Tuple[str, object]] = []
        self.places: List[Place] = []
        self.names: Set[str] = set()
        self._seen: Set[Tuple[object, ...]] = {(id(part), None) for part in step.modules()}
        for kind in dict.fromkeys(map(type, step.modules())):
            for base in kind.__mro__:
                for entry in _ENTRIES:
                    self._read(vars(base).get(entry), f"{base.__name__}.{entry}", kind)
        for part in step.modules():
            self._read(vars(part).get("forward"), f"{type(part).__name__}.forward", type(part))
            for name, value in vars(part).items():
                is_known = isinstance(value, PLAIN) or (id(value), object) in self._seen
                if name in self.names and not is_known:
                    # A configuration is often that of all layers.
                    self._seen.add((id(value), object))
                    title = f"{type(part).__name__}.{name}"
                    self._note(title, value, self.names, _DEPTH_OF_VALUES)
            for hooks in _HOOKS:
                for hook in vars(part).get(hooks, {}).values():
                    self._read(hook, f"a hook of {type(part).__name__}")
        for name, parameter in step.named_parameters():
            for hook in (parameter._backward_hooks or {}).values():
                self._read(hook, f"a hook of {name}")
        for function in step.functions:
            self._read(function, "the loss")
        written = _WRITTEN.get(step.net, ())
        self.values = [(title, value) for title, value in self.values if title not in written]

    def _read(
        self, value: object, title: str, kind: Optional[type] = None, follows: bool = True
    ) -> None:
        """Note a function, or what stands for one, and follow it.

        Args:
            value: anything; what has no code is passed over.
            title: of its place, for people.
            kind: the class whose method it is.
            follows: whether to search its code, where that is the user's.
        """
        if isinstance(value, functools.partial):
            self._read(value.func, title, follows=follows)
            for place, argument in (*enumerate(value.args), *value.keywords.items()):
                depth = _DEPTH_OF_VALUES if follows else 0
                self._note(f"argument {place!r} of a partial", argument, self.names, depth)
            return None
        if isinstance(value, _DESCRIPTORS):
            return self._read(_function_of(value), title, kind)
        owner, method = value, type(value).__dict__.get("__call__")
        is_called = isinstance(method, types.FunctionType) and not isinstance(value, nn.Module)
        if isinstance(value, types.MethodType):
            owner, method, is_called = value.__self__, value.__func__, True
        if is_called:
            self.values.append((title, value))
            kind = type(owner)
            if follows and is_of_users(owner if isinstance(owner, type) else kind):
                names = {getattr(method, "__name__", "")}
                if (id(owner), *names) not in self._seen:
                    self._seen.add((id(owner), *names))
                    self._note(title, owner, names, _DEPTH_OF_VALUES)
            return self._read(method, title, kind, follows)
        if not inspect.isroutine(value):
            return None
        if follows and isinstance(value, types.FunctionType) and _has_code_of_users(value):
            # Another version of a function often has the same code.
            self.values.append((title, value.__code__))
            return None if (id(value), kind) in self._seen else self._follow(value, kind)
        self.values.append((title, value))
        within = inspect.unwrap(value)
        return None if within is value else self._read(within, title, kind, follows)

    def _follow(self, value: types.FunctionType, kind: Optional[type]) -> None:
        """Search the code of a function."""
        self._seen.add((id(value), kind))
        names = _names(value.__code__)
        self.names |= names
        for name in sorted(names):
            if name in value.__globals__:
                self.places.append((name, value.__globals__, name, value.__globals__[name]))
                self._note(name, value.__globals__[name], names, _DEPTH_OF_VALUES)
        self._note_new_names(value, kind)
        self._read_own_variables(value, names)
        if kind is not None:
            self._note_members(kind, names)

    def _note_new_names(self, function: types.FunctionType, kind: Optional[type]) -> None:
        """Note the places of globals, and of attributes of classes, that code will make."""
        variables, attributes = _new_names(function.__code__)
        for name in variables.difference(function.__globals__):
            self.places.append((name, function.__globals__, name, GONE))
        for base in filter(is_of_users, kind.__mro__ if kind is not None and attributes else ()):
            for name in attributes.difference(vars(base)):
                self.places.append((f"{base.__name__}.{name}", base, name, GONE))

    def _read_own_variables(self, function: types.FunctionType, names: Set[str]) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if name != "__class__":
                self.places.append((name, cell, "cell_contents", content))
                if inspect.isroutine(content):
                    # A wrapped function belongs to its wrapper, wherever it is defined.
                    self._read(content, name)
                else:
                    self._note(name, content, names, _DEPTH_OF_VALUES)
        positional = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        defaulted = zip(positional[len(positional) - len(defaults) :], defaults)
        self.places.append((function.__name__, function, "__defaults__", defaults or None))
        for name, default in (*defaulted, *(function.__kwdefaults__ or {}).items()):
            self._note(name, default, names, _DEPTH_OF_VALUES)

    def _note_members(self, kind: type, names: Set[str], makes_objects: bool = False) -> None:
        """Note what code reads from a class of the user's, once: it may hold its own instances."""
        key = (kind, makes_objects, frozenset(names))
        if key in self._seen:
            return
        self._seen.add(key)
        for name, base in sorted(_members(kind, names, makes_objects).items()):
            title, value = f"{kind.__name__}.{name}", vars(base)[name]
            self.places.append((title, base, name, value))
            self._note(title, value, names, _DEPTH_OF_VALUES, kind=kind)

    def _note(
        self, title: str, value: object, names: Set[str], depth: int, kind: Optional[type] = None
    ) -> None:
        """Note a value, and what code in it reads, to some levels of containers and objects."""
        kinds = (*PLAIN, *_CONTAINERS, Tensor, type, nn.Module, enum.Enum)
        is_value = isinstance(value, kinds) or _is_array(value)
        if is_value and (id(value), None) not in self._seen:
            self.values.append((title, value))
        if generator_state(value) is not None:
            self.generators.append((title, value))
        elif inspect.isroutine(value) or isinstance(value, (functools.partial, *_DESCRIPTORS)):
            follows = kind is not None or users_module(getattr(value, "func", value))
            self._read(value, title, kind, follows)
        elif depth and isinstance(value, _CONTAINERS):
            for item in value.values() if isinstance(value, dict) else value:
                if not isinstance(item, (*PLAIN, Tensor)):
                    self._note(title, item, names, depth - 1)
        elif depth and (isinstance(value, (type, enum.Enum)) or not is_value):
            self._note_object(title, value, names, depth)

    def _note_object(self, title: str, value: object, names: Set[str], depth: int) -> None:
        """Note attributes of a class, a module or another object that the code has names for."""
        if isinstance(value, type):
            return self._note_members(value, names, makes_objects=True)
        is_of_others = isinstance(value, types.ModuleType) and not is_of_users(value)
        attributes = getattr(value, "__dict__", {})
        read = _names_with_methods(type(value), names)
        for name in sorted(read.intersection(attributes)):
            member = attributes[name]
            if not is_of_others:
                self.places.append((f"{title}.{name}", attributes, name, member))
            if not is_of_others or inspect.isroutine(member) or inspect.ismodule(member):
                self._note(f"{title}.{name}", member, read, depth - 1)
        for name in sorted(read):
            is_slot = isinstance(getattr(type(value), name, 0), types.MemberDescriptorType)
            if is_slot and hasattr(value, name):
                self._note(f"{title}.{name}", getattr(value, name), read, depth - 1)
        return self._note_members(type(value), names)


# What stands in a class for the function that it calls.
_DESCRIPTORS = (property, staticmethod, classmethod, functools.cached_property)


def _function_of(member: object) -> object:
    """Return the function behind a member of a class."""
    for name in ("fget", "__func__", "func"):
        member = getattr(member, name, member)
    return member


def _members(kind: type, names: Set[str], makes_objects: bool) -> Dict[str, type]:
    """Find what code reads from a class of the user's, and the class that has it, by name.

    Methods are called without their names as well; of modules forward, which is always read.
    """
    members: Dict[str, type] = {}
    for base in filter(is_of_users, reversed(kind.__mro__)):
        is_operand = users_module(base) and not issubclass(base, nn.Module)
        for name, member in vars(base).items():
            is_special = name.startswith("__") or issubclass(base, torch.autograd.Function)
            is_called = is_operand and is_special and (makes_objects or name != "__init__")
            if name in names or (is_called and inspect.isroutine(member)):
                members[name] = base
    return members


def _names_with_methods(kind: type, names: Set[str]) -> Set[str]:
    """Add the names in methods that code calls on an object, and in those that these call."""
    members = _members(kind, names, makes_objects=False)
    functions = [_function_of(vars(base)[name]) for name, base in members.items()]
    codes = [f.__code__ for f in functions if isinstance(f, types.FunctionType)]
    read = names.union(*map(_names, codes))
    return read if read == names else _names_with_methods(kind, read)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> Set[str]:
    """Names and texts in a function's code, and in that of functions within it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return names


@functools.lru_cache(maxsize=1024)
def _new_names(code: types.CodeType) -> Tuple[FrozenSet[str], FrozenSet[str]]:
    """Names that a function's code binds: of globals, and of attributes of anything."""
    names: Dict[str, Set[str]] = {"STORE_GLOBAL": set(), "STORE_ATTR": set()}
    for part in (code, *code.co_consts):
        is_code = isinstance(part, types.CodeType)
        for step in dis.get_instructions(part) if is_code else ():
            if step.opname in names:
                names[step.opname].add(step.argval)
    return frozenset(names["STORE_GLOBAL"]), frozenset(names["STORE_ATTR"])


def is_of_users(value: object) -> bool:
    """Say whether a class or a module is neither torch's, ipufit's nor Python's own."""
    if isinstance(value, types.ModuleType):
        return value.__name__ == "__main__" or is_users(getattr(value, "__file__", None) or "<>")
    module = sys.modules.get(value.__module__)
    return module is not None and is_of_users(module)


def _has_code_of_users(function: types.FunctionType) -> bool:
    # At a prompt, and of python -c, code has no file.
    return function.__module__ == "__main__" or is_users(function.__code__.co_filename)


def _is_array(value: object) -> bool:
    """Say whether a value is an array of NumPy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


_DEPTH_OF_OBJECTS = 6
# Larger arrays count by identity: to read them would take long.
_LARGEST_ARRAY = 2**20


def fingerprint(module: StepModule) -> Tuple[Tuple[Tuple[object, ...], ...], Tuple[object, ...]]:
    """The attributes of a module and all below it, such as a dropout's rate or train mode.

    Hooks on parameters count too, and what the code of forward and loss reads from globals,
    closures, classes and objects.

    Numbers and strings count by value, also in containers; an array of NumPy's of up to 1 MiB by
    its content; a tensor that is no buffer by its version; anything else by identity.

    Returns:
        A hashable value that changes when one of them does, and the objects that must be kept alive
        so that no other one takes over their identity.
    """
    referents: List[object] = []
    parts: List[Tuple[object, ...]] = []
    for name, part in module.named_modules():
        attributes = {key: value for key, value in vars(part).items() if key not in MEMBERS}
        parts.append((name, type(part), _freeze(attributes, _DEPTH_OF_OBJECTS, referents)))
    for name, parameter in module.named_parameters():
        hooks = (parameter._backward_hooks or {}).values()
        parts.append((name, type(parameter), tuple(_freeze(hook, 0, referents) for hook in hooks)))
    values = _values_read(CodeReader(module), referents)
    parts.append(("values that forward and loss read", tuple(values.items())))
    return tuple(parts), tuple(referents)


def _values_read(reader: CodeReader, referents: List[object]) -> Dict[Tuple[str, int], object]:
    """Return the values that code reads and does not write, frozen, by title and number."""
    places: Dict[str, int] = {}
    values: Dict[Tuple[str, int], object] = {}
    for title, value in reader.values:
        places[title] = places.get(title, 0) + 1
        values[title, places[title]] = _freeze(value, _DEPTH_OF_OBJECTS, referents)
    return values


def _owner(call: object) -> object:
    """Return the object whose attributes a call of a loss reads, such as a weight of a penalty."""
    while isinstance(call, (functools.partial, types.MethodType)):
        call = call.func if isinstance(call, functools.partial) else call.__self__
    return call


def _has_settings(value: object) -> bool:
    """Say whether an object may have attributes that a call of it depends on, as no class has."""
    is_code = inspect.isroutine(value) or isinstance(value, (type, nn.Module))
    return hasattr(value, "__dict__") and not is_code


def _freeze(value: Any, depth: int, referents: List[object]) -> object:
    if isinstance(value, (*PLAIN, types.CodeType)):
        # 1, 1.0 and True are equal, and not the same to a program.
        return (type(value), value)
    if isinstance(value, types.MethodType):
        # Each look at the attribute of an object makes another one.
        referents.append(value.__self__)
        return (id(value.__self__), _freeze(value.__func__, 0, referents))
    if depth and isinstance(value, dict):
        return tuple(
            (_freeze(k, 0, referents), _freeze(v, depth - 1, referents)) for k, v in value.items()
        )
    if depth and isinstance(value, (list, tuple)):
        return (type(value), tuple(_freeze(item, depth - 1, referents) for item in value))
    if depth and isinstance(value, (set, frozenset)):
        return (type(value), frozenset(_freeze(item, 0, referents) for item in value))
    is_config = hasattr(value, "__dict__") and not isinstance(value, Tensor) and not callable(value)
    if depth and is_config:
        referents.append(value)
        return (id(value), _freeze(vars(value), depth - 1, referents))
    referents.append(value)
    if _is_array(value) and value.nbytes <= _LARGEST_ARRAY:
        return (id(value), value.shape, hash(value.tobytes()))
    if isinstance(value, Tensor):
        return (id(value), version_of(value))
    # Of what is called, numbers and strings; the rest of it may be large.
    settings = vars(value).items() if _has_settings(value) else ()
    plain = [(name, type(each), each) for name, each in settings if isinstance(each, PLAIN)]
    return (id(value), tuple(plain))


class FrozenValues:
    """Values that a recording has as constants, watched while it runs.

    A change counts from the next recording, which is made as the next epoch begins; within an
    epoch it would go unseen.

    Args:
        step: a module with its loss.
    """

    # Executions between two looks, after the first ones; a look takes about as long as a small
    # execution.
    _EVERY = 64

    def __init__(self, step: StepModule) -> None:
        self._step = step
        self._values: Dict[Tuple[str, int], Tuple[object, object]] = {}
        self._executions = 0
        self._reported: List[str] = []
        self._held: List[object] = []

    def note(self) -> None:
        """A recording of the present values runs from here on."""
        self._executions = 0
        self._values = self._now()

    def look(self) -> None:
        """An execution begins: compare, before the first few of them and then before some.

        Warns:
            UserWarning: a value is another one than in the recording; once for each.
        """
        count = self._executions
        self._executions += 1
        if count & (count - 1) and count % self._EVERY:
            return
        now = self._now()
        for (title, owner), (frozen, value) in now.items():
            # An object's attribute may be new, where its class has one.
            before = self._values.get((title, owner), self._values.get((title, 0)))
            if before and before[0] != frozen and title not in self._reported:
                self._reported.append(title)
                warn_user(_text(title, before[1], value))

    def _now(self) -> Dict[Tuple[str, int], Tuple[object, object]]:
        reader = CodeReader(self._step)
        values = [(title, value, 0) for title, value in reader.values]
        for part in self._step.owners():
            for name, value in vars(part).items():
                is_read = name in reader.names or (is_of_torch(part) and not name.startswith("_"))
                if is_read and isinstance(value, (*PLAIN, list, tuple, dict)):
                    values.append((f"{type(part).__name__}.{name}", value, id(part)))
        self._held = []
        return {
            (title, owner): (_freeze(value, _DEPTH_OF_OBJECTS, self._held), value)
            for title, value, owner in values
        }


def _text(title: str, before: object, after: object) -> str:
    both = isinstance(before, PLAIN) and isinstance(after, PLAIN)
    change = f"changed from {before!r} to {after!r}" if both else "changed"
    buffer = "make it a buffer of the module or of the loss module, and change it in place; or "
    return (
        f"{title} {change} within an epoch, but it is a constant of the program: until the end of "
        "the epoch, forward and loss use its old value. To change it within an epoch, "
        f"{'' if isinstance(after, types.CodeType) else buffer}use compile(..., run_eagerly=True)."
    )
