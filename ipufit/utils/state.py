"""State of modules, optimizers and random generators: put back, or replaced for one call."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import random
import sys
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ipufit.utils.interrupts import defer_sigint

__all__ = [
    "MEMBERS",
    "AttributeSnapshot",
    "MemoSnapshot",
    "Place",
    "call_with",
    "copy_optimizer_state",
    "cuda_in_use",
    "device_of",
    "eval_mode",
    "fork_rng",
    "generator_states",
    "generators_of",
    "preserve_state",
    "recurrent_on_gpu",
    "refill",
    "set_generators",
    "train_mode",
    "watch_modules",
]


def device_of(module: nn.Module) -> torch.device:
    """Device of a module's first parameter; the CPU for a module without one."""
    first = next(module.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def cuda_in_use() -> bool:
    """True if anything has used CUDA yet; any other question would initialise it."""
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())


def generator_states() -> Dict[str, Any]:
    """Read the states of the generators of torch, Python and NumPy, as far as they are in use."""
    numpy = sys.modules.get("numpy")
    states: Dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    if cuda_in_use():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_generators(states: Mapping[str, Any]) -> None:
    """Let the generators go on from these states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


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
            with defer_sigint(), torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
                for generator, value in drawing:
                    generator.set_state(value)
                if optimizer is not None and state is not None:
                    optimizer.load_state_dict(state)


def copy_optimizer_state(optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """A copy of ``optimizer.state_dict()``; tensors that shared memory have their own in it."""
    return {key: _copied(value) for key, value in optimizer.state_dict().items()}


def _copied(value: object) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    return copy.deepcopy(value)


def generators_of(loader: object) -> List[torch.Generator]:
    """List the generators of a DataLoader and of its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batch_sampler]
    owners.append(getattr(batch_sampler, "sampler", None))
    by_id = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners)}
    return [g for g in by_id.values() if isinstance(g, torch.Generator)]


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


# What contents are looked at and put back; subclasses of the user's may do anything when changed.
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
# Attributes of a module that hold its tensors and the modules in it.
MEMBERS = ("_parameters", "_buffers", "_modules")
# What torch keeps in a module for itself, hooks among it.
_OF_TORCH = frozenset(vars(nn.Module()))


class AttributeSnapshot:
    """The attributes of objects, and what is in the lists, dicts, sets and deques among them.

    Args:
        owners: modules and other objects that have attributes.
    """

    def __init__(self, owners: Sequence[object]) -> None:
        # Parameters, buffers and modules have no owner here: what is done to them is not told.
        self._namespaces: List[Tuple[object, Dict[str, object], Dict[str, object]]] = []
        self._contents: List[Tuple[object, str, Any, Any]] = []
        self._tensors: List[Tuple[object, str, Tensor, int, Tensor]] = []
        for owner in owners:
            self._namespaces.append((owner, vars(owner), dict(vars(owner))))
            for name, value in vars(owner).items():
                if isinstance(value, Tensor):
                    clone = value.detach().clone()
                    self._tensors.append((owner, name, value, value._version, clone))
                elif name in MEMBERS:
                    self._namespaces.append((None, vars(owner)[name], dict(vars(owner)[name])))
                elif type(value) in _CONTAINERS and name not in _OF_TORCH:
                    self._contents.append((owner, name, value, value.copy()))

    def changed(self) -> List[str]:
        """Name what is bound to another value, gone, or has other contents, as "Class.attribute".

        Parameters, buffers and modules are left out, and what torch's own modules set.
        """
        titles = set()
        for owner, now, before in self._namespaces:
            for name in {**before, **now} if owner is not None else ():
                is_same = before.get(name, self) is now.get(name, self)
                if not is_same and not _is_of_torch(owner):
                    titles.add(f"{type(owner).__name__}.{name}")
        for owner, name, container, content in self._contents:
            if not _is_same(container, content) and not _is_of_torch(owner):
                titles.add(f"{type(owner).__name__}.{name}")
        return sorted(titles)

    def written(self) -> List[str]:
        """Name the tensors among the attributes that were changed in place, likewise."""
        return [
            f"{type(owner).__name__}.{name}"
            for owner, name, tensor, version, _ in self._tensors
            if tensor._version != version and not _is_of_torch(owner)
        ]

    def restore(self) -> None:
        """Put back every attribute, the values of tensors, and what was in each container."""
        for _, _, tensor, version, value in self._tensors:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(value)
        for _, _, container, content in self._contents:
            refill(container, content)
        for _, namespace, before in self._namespaces:
            if namespace.keys() != before.keys():
                namespace.clear()
            namespace.update(before)


# Title, owner, name and value of a global, a variable around a function, an attribute of a class.
Place = Tuple[str, object, str, object]
# Levels of objects and containers that are looked at, and items of a container.
_DEPTH, _MOST = 6, 1000


class MemoSnapshot:
    """The values that code can reach, by which tensors of a recording are found that it keeps.

    Args:
        owners: modules and other objects that have attributes, whose values may have some as well.
        places: where else the code reads.
    """

    def __init__(self, owners: Sequence[object], places: Sequence[Place] = ()) -> None:
        # Titles, whether they are attributes, what is in there, and a copy of it.
        self._contents: List[Tuple[str, bool, Any, Any]] = []
        self._caches: List[Tuple[functools._lru_cache_wrapper[object], object]] = []
        self._places = places
        followed: Set[int] = set()
        values: List[Tuple[str, object, bool, int]] = []
        for owner in owners:
            for part in (vars(owner), *map(vars(owner).get, MEMBERS)):
                values.append((type(owner).__name__, part, True, _DEPTH))
        for title, _, _, value in places:
            values.append((title, value, False, _DEPTH))
        # Nearest first; the list grows.
        for title, value, is_namespace, depth in values:
            if isinstance(value, functools._lru_cache_wrapper):
                self._caches.append((value, value.cache_info()))
            parts = _parts_of(value)
            if parts is None or not depth or id(parts) in followed:
                continue
            followed.add(id(parts))
            is_namespace = is_namespace or parts is not value
            content = dict(parts.items()) if isinstance(parts, dict) else list(parts)
            self._contents.append((title, is_namespace, parts, content))
            for name in content if len(content) <= _MOST else ():
                inner = content[name] if isinstance(parts, dict) else name
                named = f"{title}.{name}" if is_namespace else title
                values.append((named, inner, False, depth - 1))

    def __enter__(self) -> MemoSnapshot:
        return self

    def __exit__(self, *error: object) -> None:
        self.forget()

    def forget(self) -> List[str]:
        """Put back what was in the place of tensors of a recording; return titles of these."""
        titles = []
        for title, is_namespace, parts, content in self._contents:
            if isinstance(parts, dict):
                for name, value in list(parts.items()):
                    if value is not content.get(name, self) and _is_recorded(value):
                        titles.append(f"{title}.{name}" if is_namespace else title)
                        del parts[name]
                        parts.update({name: content[name]} if name in content else {})
                for name in content if is_namespace else ():
                    parts.setdefault(name, content[name])
            elif not _is_same(parts, content) and _is_recorded(parts):
                titles.append(title)
                refill(parts, content)
        for title, owner, name, before in self._places:
            now = owner.get(name) if isinstance(owner, dict) else getattr(owner, name)
            if now is not before and _is_recorded(now):
                titles.append(title)
                if isinstance(owner, dict):
                    owner[name] = before
                else:
                    setattr(owner, name, before)
        for function, info in self._caches:
            if function.cache_info() != info:
                function.cache_clear()
        return titles


def _parts_of(value: object) -> Any:
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
    parts = _parts_of(value) or ()
    inner = list(parts.values() if isinstance(parts, dict) else parts)
    return depth > 0 and any(_is_recorded(part, depth - 1) for part in inner)


def _is_of_torch(owner: object) -> bool:
    return type(owner).__module__.partition(".")[0] == "torch"


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


@contextlib.contextmanager
def _as_found(modules: Sequence[Optional[nn.Module]]) -> Iterator[None]:
    flags = [(m, m.training) for module in modules if module is not None for m in module.modules()]
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag


@contextlib.contextmanager
def train_mode(*modules: Optional[nn.Module]) -> Iterator[None]:
    """Train mode of module and loss; one already in it keeps the parts set to eval."""
    with _as_found(modules):
        for module in modules:
            if module is not None and not module.training:
                module.train()
        yield


@contextlib.contextmanager
def eval_mode(*modules: Optional[nn.Module]) -> Iterator[None]:
    """Eval mode of module and loss."""
    with _as_found(modules):
        for module in modules:
            if module is not None:
                module.eval()
        yield


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
    handles = [register_module_forward_pre_hook(on_call)]
    if on_return is not None:
        handles.append(register_module_forward_hook(on_return))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
