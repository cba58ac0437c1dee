"""State of modules, optimizers and random generators: put back, or replaced for one call."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import operator
import random
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ipufit.errors import ConfigurationError
from ipufit.utils.devices import accelerator_states, set_accelerator_states
from ipufit.utils.interrupts import defer_signals


def device_of(module: nn.Module) -> torch.device:
    """Device of a module's first parameter, or else buffer; the CPU for a module without them."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return first.device if first is not None else torch.device("cpu")


def generator_states() -> Dict[str, Any]:
    """Read the states of the generators of torch, Python and NumPy, as far as they are in use."""
    numpy = sys.modules.get("numpy")
    states: Dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return {**states, **accelerator_states()}


def set_generators(states: Mapping[str, Any]) -> None:
    """Let the generators go on from these states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    set_accelerator_states(states)


@contextlib.contextmanager
def fork_rng() -> Iterator[None]:
    """Leave the generators of torch, Python and NumPy (if it is loaded) as they were found."""
    states = generator_states()
    try:
        yield
    finally:
        set_generators(states)


@contextlib.contextmanager
def preserve_state(
    modules: Sequence[Optional[nn.Module]],
    optimizer: Optional[torch.optim.Optimizer],
    loader: object = None,
) -> Iterator[None]:
    """Put back, bit for bit, weights, buffers, optimizer state and random number generators.

    Args:
        modules: the module, and the loss where it is one; None is passed over.
        optimizer: torch's, or None.
        loader: generators that it and its samplers have for themselves are put back too.
    """
    values = [
        (tensor, tensor.detach().clone())
        for module in modules
        if module is not None
        for tensor in (*module.parameters(), *module.buffers())
    ]
    drawing = [(generator, generator.get_state()) for generator in generators_of(loader)]
    state = None if optimizer is None else copy_optimizer_state(optimizer)
    with fork_rng():
        try:
            yield
        finally:
            with defer_signals(), torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
                for generator, value in drawing:
                    generator.set_state(value)
                if optimizer is not None and state is not None:
                    optimizer.load_state_dict(state)


def copy_optimizer_state(optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """A copy of ``optimizer.state_dict()``; tensors that shared memory have their own in it."""
    return {key: _copied(value) for key, value in optimizer.state_dict().items()}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Dict[str, Any]) -> None:
    """Load a state; what torch would bring to the dtype of the parameters stays as it was saved."""
    optimizer.load_state_dict(state)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters):
        loaded = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            present = loaded.get(name)
            both = isinstance(value, Tensor) and isinstance(present, Tensor)
            if both and present.dtype != value.dtype:
                loaded[name] = value.to(present.device, copy=True)


def _copied(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return copy.deepcopy(value)


def samplers_of(loader: object) -> List[object]:
    """List what chooses the samples of a DataLoader; a batch sampler has a sampler of its own."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [sampler, batch_sampler, getattr(batch_sampler, "sampler", sampler)]


def generators_of(loader: object) -> List[torch.Generator]:
    """List the generators of a DataLoader and of its samplers, each once."""
    generators: List[torch.Generator] = []
    for owner in (loader, *samplers_of(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and generator not in generators:
            generators.append(generator)
    return generators


@contextlib.contextmanager
def replaced(*attributes: Tuple[object, str, object]) -> Iterator[None]:
    """Give attributes other values, and put the values from before back at the end of the block.

    Args:
        attributes: owner, name and value of each.
    """
    # After torch.backends.disable_global_flags() flags of torch's may be set in a block alone.
    may_set = torch.backends.__allow_nonbracketed_mutation
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in attributes]
    try:
        with may_set():
            for owner, name, value in attributes:
                setattr(owner, name, value)
        yield
    finally:
        with may_set():
            for owner, name, value in before:
                setattr(owner, name, value)


# Values that are compared by what they are, not by which object they are.
PLAIN = (bool, int, float, complex, str, bytes, type(None))
# What contents are looked at and put back; subclasses of the user's may do anything when changed.
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
# Attributes of a module that hold its tensors and the modules in it.
MEMBERS = ("_parameters", "_buffers", "_modules")
# What torch keeps in a module for itself, hooks among it.
_OF_TORCH = frozenset(vars(nn.Module()))
# Title, owner, name and value of a global, a variable around a function, an attribute of a class.
Place = Tuple[str, object, str, object]
# Levels of objects and containers that are looked at, and items of a container.
_DEPTH, _MOST = 6, 1000


@dataclasses.dataclass(frozen=True)
class _Part:
    """The attributes of an object, or what is in a container, with a copy of it.

    Attributes:
        title: of it, for people.
        now: what may change.
        before: the copy.
        depth: how many levels of what is in there are looked at.
        has_names: whether these are attributes, which have titles of their own.
        is_whole: whether all is put back, not only what a recording has left.
        is_told: whether a change of it is told.
    """

    title: str
    now: Any
    before: Any
    depth: int
    has_names: bool = False
    is_whole: bool = False
    is_told: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """Change of a value since a snapshot.

    Attributes:
        title: of its place for people, such as "Net.step", or "COUNT" of a global or a variable
            around a function.
        how: "set", "grown" (the contents of a container), or "written" (a tensor in place).
        owner: what has the name that was set; else the container or the tensor.
        name: that was set, or None.
    """

    title: str
    how: str
    owner: object
    name: Optional[str] = None

    @property
    def key(self) -> str:
        """Text that is the same for a later change of the same place, and for no other."""
        return f"{self.title} {id(self.owner)}"

    def probe(self) -> object:
        """Return a value that differs once the place has changed again."""
        value = self.owner if self.name is None else value_at(self.owner, self.name)
        if isinstance(value, PLAIN):
            return (type(value), repr(value))
        items: object = None
        if isinstance(value, _CONTAINERS):
            parts = [*value, *(value.values() if isinstance(value, dict) else ())]
            few = parts if len(parts) <= _MOST else []
            items = len(parts), [repr(p) if isinstance(p, PLAIN) else id(p) for p in few]
        return (id(value), version_of(value), items)


class ValueSnapshot:
    """Values that code can reach, at one time.

    What owners have as attributes, and in the lists, dicts, sets and deques among these, is told
    and put back. Of what lies deeper and elsewhere, what a recording has left there is: tensors
    without values.

    Args:
        owners: modules and other objects that have attributes.
        places: where else the code reads.
        keeps_values: whether tensors among the attributes are copied, to be put back too.
        is_users: tells of a class whether it is the user's; with it, what is at the places, in
            containers, and in objects of such classes is told and put back, at every depth.
    """

    def __init__(
        self,
        owners: Sequence[object],
        places: Sequence[Place] = (),
        keeps_values: bool = False,
        is_users: Optional[Callable[[type], bool]] = None,
    ) -> None:
        self._parts: List[_Part] = []
        self._tensors: Dict[int, Tuple[str, bool, Tensor, Optional[int], Optional[Tensor]]] = {}
        self._caches: List[Tuple[functools._lru_cache_wrapper[object], object]] = []
        self._places = places
        self._keeps_values = keeps_values
        self._is_deep = is_users is not None
        self._is_users = is_users or (lambda kind: False)
        self._told_of_torchs = ("training",) if self._is_deep else ()
        self._followed: Set[int] = set()
        for owner in owners:
            title, names, is_told = type(owner).__name__, vars(owner), not is_of_torch(owner)
            self._add(title, names, _DEPTH, has_names=True, is_whole=True, is_told=is_told)
            for name, value in names.items():
                if isinstance(value, Tensor):
                    self._keep(f"{title}.{name}", value, is_told)
                elif name in _OF_TORCH and type(value) in _CONTAINERS:
                    # What is done to parameters, buffers, modules and hooks is not told.
                    self._add(title, value, 0, has_names=name in MEMBERS, is_whole=True)
                elif type(value) in _CONTAINERS:
                    named = f"{title}.{name}"
                    self._add(named, value, _DEPTH - 1, is_whole=True, is_told=is_told)
        for title, _, _, value in places:
            self._follow(title, value, _DEPTH, self._is_deep, self._is_deep)
        # Nearest first; the list grows.
        for part in self._parts:
            for name in part.before if part.depth and len(part.before) <= _MOST else ():
                value = part.before[name] if isinstance(part.before, dict) else name
                title = f"{part.title}.{name}" if part.has_names else part.title
                is_whole = self._is_deep and part.is_whole
                self._follow(title, value, part.depth - 1, is_whole, part.is_told)

    def _add(self, title: str, parts: Any, depth: int, **what: bool) -> None:
        self._followed.add(id(parts))
        self._parts.append(_Part(title, parts, copied(parts), depth, **what))

    def _keep(self, title: str, tensor: Tensor, is_told: bool) -> None:
        if id(tensor) not in self._tensors and not tensor.is_meta:
            copy = tensor.detach().clone() if self._keeps_values else None
            self._tensors[id(tensor)] = title, is_told, tensor, version_of(tensor), copy

    def _follow(self, title: str, value: object, depth: int, is_whole: bool, is_told: bool) -> None:
        if isinstance(value, functools._lru_cache_wrapper):
            self._caches.append((value, value.cache_info()))
        elif isinstance(value, Tensor) and is_whole:
            self._keep(title, value, is_told)
        elif isinstance(value, nn.Module) and is_whole:
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                self._keep(f"{title}.{name}", tensor, is_told)
        parts = parts_of(value)
        if parts is None or not depth or id(parts) in self._followed:
            return
        has_names = parts is not value
        is_whole = is_whole and (not has_names or self._is_users(type(value)))
        is_told = is_whole and is_told
        self._add(title, parts, depth, has_names=has_names, is_whole=is_whole, is_told=is_told)

    def tensors(self) -> List[Tuple[str, Tensor]]:
        """List the tensors that are no parameters or buffers, each behind its title."""
        return [(title, tensor) for title, _, tensor, _, _ in self._tensors.values()]

    def changes(self) -> Iterator[Change]:
        """Find what is bound to another value, gone, or has other contents.

        Parameters, buffers and modules are left out, and what torch's own modules set; with
        ``is_users``, a switch of their mode is told.
        """
        yield from self._rebound()
        yield from self.written()

    def _rebound(self) -> Iterator[Change]:
        for part in self._parts:
            if part.has_names:
                for name in {**part.before, **part.now} if part.is_told else self._told_of_torchs:
                    if not _is_equal(part.before.get(name, GONE), part.now.get(name, GONE)):
                        yield Change(f"{part.title}.{name}", "set", part.now, name)
            elif part.is_told and not _is_equal(part.before, part.now):
                yield Change(part.title, "grown", part.now)
        for title, owner, name, before in self._places if self._is_deep else ():
            if not _is_equal(before, value_at(owner, name)):
                yield Change(title, "set", owner, name)

    def written(self) -> Iterator[Change]:
        """Find the tensors that were changed in place, likewise."""
        for title, is_told, tensor, version, value in self._tensors.values():
            if is_told and _is_written(tensor, version, value):
                yield Change(title, "written", tensor)

    def changed(self) -> List[str]:
        """Name what is set, gone, or has other contents, as "Class.attribute"."""
        return sorted({change.title for change in self._rebound()})

    def restore(self) -> List[str]:
        """Put back every attribute, the values of tensors, and what was in each container.

        Returns:
            Titles of what a recording had left elsewhere.
        """
        for _, _, tensor, version, value in self._tensors.values():
            if value is not None and _is_written(tensor, version, value):
                with torch.no_grad():
                    tensor.copy_(value)
        for part in self._parts:
            if part.is_whole:
                refill(part.now, part.before)
        for _, owner, name, before in self._places if self._is_deep else ():
            if value_at(owner, name) is not before:
                _bind(owner, name, before)
        return self.forget()

    def forget(self) -> List[str]:
        """Put back what was in the place of tensors of a recording; return titles of these."""
        titles = []
        for part in self._parts:
            now, before = part.now, part.before
            if isinstance(now, dict):
                for name, value in list(now.items()):
                    if value is not before.get(name, self) and _is_recorded(value):
                        titles.append(f"{part.title}.{name}" if part.has_names else part.title)
                        del now[name]
                        now.update({name: before[name]} if name in before else {})
                for name in before if part.has_names else ():
                    now.setdefault(name, before[name])
            elif not _is_same(now, before) and _is_recorded(now):
                titles.append(part.title)
                refill(now, before)
        for title, owner, name, before in self._places:
            value = value_at(owner, name)
            if value is not before and _is_recorded(value):
                titles.append(title)
                _bind(owner, name, before)
        for function, info in self._caches:
            if function.cache_info() != info:
                function.cache_clear()
        return titles


# Stands for the value of a name that is not bound.
GONE = object()


def value_at(owner: object, name: str) -> object:
    """Return what a global, a variable around a function or an attribute of a class has now."""
    if isinstance(owner, (dict, type)):
        return (owner if isinstance(owner, dict) else vars(owner)).get(name, GONE)
    with contextlib.suppress(ValueError):  # of an empty cell
        return getattr(owner, name, GONE)
    return GONE


def _bind(owner: object, name: str, value: object) -> None:
    """Bind such a name again, or unbind it."""
    if isinstance(owner, dict):
        owner.pop(name, None)
        owner.update({} if value is GONE else {name: value})
    elif value is GONE:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _is_equal(before: object, now: object) -> bool:
    """Compare as a program does: plain values by value, others by identity."""
    if before is now:
        return True
    if isinstance(before, (*PLAIN, torch.device)):
        return type(before) is type(now) and repr(before) == repr(now)
    if isinstance(before, dict) and isinstance(now, dict):
        return _is_equal([*before, *before.values()], [*now, *now.values()])
    if isinstance(before, set) and isinstance(now, set):
        return before == now
    sequences = (list, tuple, deque)
    if isinstance(before, sequences) and isinstance(now, sequences):
        return len(before) == len(now) and all(map(_is_equal, before, now))
    return False


def version_of(value: object) -> Optional[int]:
    """How often a tensor was changed in place; None where torch does not count that."""
    try:
        return value._version if isinstance(value, Tensor) else None
    except RuntimeError:
        return None  # made in inference mode, whatever its data is now


def _is_written(tensor: Tensor, version: Optional[int], value: Optional[Tensor]) -> bool:
    """Tell whether a tensor was changed in place, by its values where there is a copy of them."""
    if value is not None and tensor.layout is torch.strided:
        return not same_values(tensor, value)
    return version_of(tensor) != version


def parts_of(value: object) -> Any:
    """Return what is in a container, or the attributes of an object; None of other values."""
    if isinstance(value, (*_CONTAINERS, tuple)):
        return value
    is_other = isinstance(value, (Tensor, type, types.ModuleType))
    is_other = is_other or type(value).__module__.partition(".")[0] in ("torch", "ipufit")
    return None if is_other or not hasattr(value, "__dict__") else vars(value)


def _is_recorded(value: object, depth: int = 4) -> bool:
    """Tell whether a value is, or holds, a tensor of a recording, which has no values."""
    if isinstance(value, FakeTensor):
        return True
    parts = parts_of(value) or ()
    inner = list(parts.values() if isinstance(parts, dict) else parts)
    return depth > 0 and any(_is_recorded(part, depth - 1) for part in inner)


def is_of_torch(value: object) -> bool:
    """Tell whether a value is of a class of torch's own."""
    return type(value).__module__.partition(".")[0] == "torch"


def same_values(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are equal in every element, where NaN equals NaN."""
    is_alike = one.shape == other.shape and one.dtype == other.dtype
    if not is_alike or one.layout is not torch.strided:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def as_pairs(tensor: Tensor) -> Tensor:
    """Make two real numbers of each element of a complex tensor, along one more dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def copied(container: Any) -> Any:
    """Copy a container, shallowly, to a plain one: classes of users may hold more."""
    if isinstance(container, dict):
        return dict(container.items())
    return set(container) if isinstance(container, set) else list(container)


def refill(container: Any, content: Any) -> None:
    """Put back what was in a list, dict, set or deque, if something else is in it now."""
    if not _is_same(container, content):
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)


def _is_same(container: Any, content: Any) -> bool:
    """Tell whether a container has the very same objects in it as a copy of it."""
    if isinstance(container, set):
        return bool(container == content)
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        container, content = [*container, *container.values()], [*content, *content.values()]
    # Equal texts and numbers are other objects at times; tensors have no one truth.
    return all(map(operator.is_, container, content))


# Modules that threads run, that this thread runs, and that are trained: each has one mode at a
# time, and a recording puts other weights in the place of its own.
_RUNNING: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_MINE = threading.local()
_TRAINED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_CHANGE = threading.Condition()


@contextlib.contextmanager
def _in_mode(trains: bool, *modules: Optional[nn.Module]) -> Iterator[None]:
    """Wait until no other thread runs a part of the modules, and leave their modes as they are."""
    roots = [module for module in modules if module is not None]
    parts = {*itertools.chain.from_iterable(map(nn.Module.modules, roots))}
    mine = vars(_MINE).setdefault("modules", weakref.WeakSet())
    new = parts.difference(mine)
    with _CHANGE:
        # Not for ever: the other thread may wait for something of this one.
        seconds = 600.0 if _TRAINED.isdisjoint(new) else 1.0
        if not _CHANGE.wait_for(functools.partial(new.isdisjoint, _RUNNING), seconds):
            raise ConfigurationError(
                "one thread at a time can run a module, but another one runs this "
                f"{type(roots[0]).__name__} or a part of it. Wait for it, or use a copy of it."
            )
        for running in (mine, _RUNNING, _TRAINED) if trains else (mine, _RUNNING):
            running.update(new)
    try:
        with replaced(*((part, "training", part.training) for part in parts)):
            for root in roots:
                if not (trains and root.training):
                    (root.train if trains else root.eval)()
                # What is in train mode keeps its parts as they are, unless its class says how.
                for part in reversed([part for part in root.modules() if trains and part in new]):
                    if part.training and not type(part).train.__module__.startswith("torch."):
                        part.train()
            yield
    finally:
        with _CHANGE:
            for running in (mine, _RUNNING, _TRAINED):
                running.difference_update(new)
            _CHANGE.notify_all()


# Train mode of module and loss; a module that is already in it keeps the parts set to eval.
train_mode = functools.partial(_in_mode, True)
# Eval mode of module and loss.
eval_mode = functools.partial(_in_mode, False)


def call_with(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: Sequence[object],
    kwargs: Optional[Dict[str, object]] = None,
) -> Any:
    """``torch.func.functional_call``, also of a module that has another one under two names.

    Torch's puts tensors in place name by name, and what it takes back last is then its own.

    Args:
        module: called.
        tensors: by the first name of a parameter or buffer; its other names get the same.
        args, kwargs: of the call.
    """
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    wanted = {id(tensor): tensors[name] for name, tensor in named if name in tensors}
    places: Dict[str, Tensor] = {}
    recurrent: List[nn.RNNBase] = []
    for prefix, part in module.named_modules():
        if isinstance(part, nn.RNNBase):
            recurrent.append(part)
        for key, tensor in itertools.chain(part._parameters.items(), part._buffers.items()):
            if id(tensor) in wanted:
                places[f"{prefix}.{key}" if prefix else key] = wanted[id(tensor)]
    with _weights_stay(recurrent, tensors) if recurrent else contextlib.nullcontext():
        return functional_call(module, places, tuple(args), kwargs, tie_weights=False)


@contextlib.contextmanager
def recurrent_on_gpu(may_use_cudnn: bool) -> Iterator[None]:
    """Run a recurrent layer on a GPU, with cuDNN if torch is set so and it may be used."""
    cudnn = torch.backends.cudnn
    with warnings.catch_warnings(), replaced((cudnn, "enabled", cudnn.enabled and may_use_cudnn)):
        # Weights lie where the program has them; torch advises to move them for cuDNN.
        warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous")
        yield


@contextlib.contextmanager
def _weights_stay(layers: Sequence[nn.RNNBase], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Keep recurrent layers on a GPU from moving weights that are put in their place."""
    layers = [layer for layer in layers if device_of(layer).type == "cuda"]
    # cuDNN looks where weights lie, and those without values lie nowhere.
    is_real = all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors.values())
    try:
        for layer in layers:
            # Dropout of cuDNN's has random numbers of its own, which no seed starts anew.
            drops = layer.training and layer.dropout > 0 and layer.num_layers > 1
            forward = recurrent_on_gpu(is_real and not drops)(layer.forward)
            vars(layer).update(flatten_parameters=lambda: None, forward=forward)
        yield
    finally:
        for layer in layers:
            for name in ("flatten_parameters", "forward"):
                vars(layer).pop(name, None)


@contextlib.contextmanager
def watch_modules(
    on_call: Callable[..., None],
    on_return: Optional[Callable[..., Any]] = None,
) -> Iterator[None]:
    """Tell of every call of any module in the block, and of its return.

    Args:
        on_call: takes the module and its arguments, before its forward.
        on_return: takes the module, its arguments and what its forward has returned; may return
            what the call returns instead.
    """
    # Hooks for all modules: one of a module's own would switch off torch's fast paths.
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(register_module_forward_pre_hook(on_call))
        if on_return is not None:
            hooks.enter_context(register_module_forward_hook(on_return))
        yield
