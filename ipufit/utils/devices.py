"""Abilities of devices: generators of random numbers, memory, streams; found by feature.

torch has a module for each type, ``torch.cuda``, ``torch.mps``, ``torch.xpu`` or what a package
registers for a device of its own, and these differ in what they have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Protocol, Tuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ipufit.errors import ConfigurationError

HOST = torch.device("cpu")

# What a device raises that lacks an ability.
_LACKS = (AttributeError, AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError)

# Devices but the host that modules of this process have been on.
_USED: Dict[torch.device, None] = {}


class TimingEvent(Protocol):
    """A moment in the work of a device."""

    def elapsed_time(self, end_event: TimingEvent) -> float:
        """Milliseconds from this moment to another one, which both have passed."""


@dataclasses.dataclass(frozen=True)
class DeviceGenerator:
    """The default generator of random numbers of a device.

    Attributes:
        start: at a key.
        state: reads the state, a tensor of the host.
        go_on: from a state.
    """

    start: Callable[[int], object]
    state: Callable[[], Tensor]
    go_on: Callable[[Tensor], object]


def _has(device: torch.device, *names: str) -> bool:
    """Tell whether torch's module for a device, if there is one, has all these."""
    module = vars(torch).get(device.type) if device.type not in ("cpu", "meta") else None
    return module is not None and all(hasattr(module, name) for name in names)


def _ask(device: torch.device, name: str, *args: object) -> object:
    """Call a function of torch's module for a device, with that as the current one."""
    module = getattr(torch, device.type)
    several = device.index is not None and hasattr(module, "device") and module.device_count() > 1
    with module.device(device.index) if several else contextlib.nullcontext():
        return getattr(module, name)(*args)


def _ask_of(device: torch.device, name: str) -> object:
    """Call a function that takes the device, where there may be several of its type."""
    return _ask(device, name, *((device,) if _has(device, "current_device") else ()))


@functools.lru_cache(maxsize=None)
def generator_of(device: torch.device) -> Optional[DeviceGenerator]:
    """Find the default generator of a device that is not the host; None where it can't be set."""
    if _has(device, "default_generators", "current_device"):
        module = getattr(torch, device.type)
        index = device.index if device.index is not None else module.current_device()
        default: torch.Generator = module.default_generators[index]
        return DeviceGenerator(default.manual_seed, default.get_state, default.set_state)
    if not _has(device, "manual_seed", "get_rng_state", "set_rng_state"):
        return None
    start, state, go_on = (
        functools.partial(_ask, device, name)
        for name in ("manual_seed", "get_rng_state", "set_rng_state")
    )
    return DeviceGenerator(start, cast(Callable[[], Tensor], state), go_on)


@functools.lru_cache(maxsize=None)
def is_keyed(device: torch.device) -> bool:
    """Tell whether what a device draws can be repeated; tried once where that is not known."""
    if device.type in ("cpu", "cuda"):
        return True
    generator = generator_of(device)
    if generator is None:
        return False
    try:
        # A recording may be under way, whose tensors have no values.
        with _disable_current_modes():
            return _repeats(device, generator)
    except _LACKS:
        return False


def _repeats(device: torch.device, generator: DeviceGenerator) -> bool:
    """Tell whether numbers come again after a generator was started, or set, as before."""

    def draw() -> List[float]:
        numbers: List[float] = torch.rand(8, device=device).tolist()
        return numbers

    before = generator.state()
    try:
        generator.start(1)
        first, state, second = draw(), generator.state(), draw()
        generator.go_on(state)
        again = draw()
        generator.start(1)
        return again == second != first == draw()
    finally:
        generator.go_on(before)


def check_devices(tensors: Iterable[Tuple[str, Tensor]]) -> None:
    """Refuse tensors without values, and note the devices of the others.

    Args:
        tensors: parameters and buffers, with their names.

    Raises:
        ConfigurationError: one of them is on the device "meta".
    """
    for name, tensor in tensors:
        if tensor.device.type == "meta":
            raise ConfigurationError(
                f"a module must have values to compute with, but {name!r} is on the device 'meta', "
                "where tensors have none. Allocate it with module.to_empty(device='cpu'), and load "
                "or initialise its weights."
            )
        if tensor.device.type != "cpu":
            _USED[tensor.device] = None


def devices_in_use(device: torch.device = HOST) -> List[torch.device]:
    """List a device first, and the others but the host that modules have been on."""
    return [*dict.fromkeys((device, *_USED))]


def _types_in_use() -> List[str]:
    return [*dict.fromkeys(device.type for device in _USED)]


def accelerator_states() -> Dict[str, List[Tensor]]:
    """Read the generators of all devices in use but the host, by type and index."""
    states = {}
    # Any other question would initialise it.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    for kind in _types_in_use():
        if kind != "cuda":
            several = [generator_of(each) for each in _devices(kind) if is_keyed(each)]
            states[kind] = [generator.state() for generator in several if generator is not None]
    return states


def set_accelerator_states(states: Mapping[str, List[Tensor]]) -> None:
    """Let those generators that are here, and as many, go on from the states of others."""
    cuda = states.get("cuda", [])
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
    for kind in _types_in_use():
        devices = [each for each in _devices(kind) if is_keyed(each)] if kind in states else []
        if kind != "cuda" and len(devices) == len(states[kind]):
            for device, state in zip(devices, states[kind]):
                generator = generator_of(device)
                assert generator is not None
                generator.go_on(state)


def _devices(kind: str) -> List[torch.device]:
    one = torch.device(kind)
    count = _ask(one, "device_count") if _has(one, "device_count") else 1
    return [torch.device(kind, index) for index in range(cast(int, count))]


def memory_of_tensors(device: torch.device) -> Optional[float]:
    """Bytes that tensors have on a device; None for the host, and where it doesn't say."""
    for name in ("memory_allocated", "current_allocated_memory"):
        if _has(device, name):
            return float(cast(float, _ask_of(device, name)))
    return None


def name_of(device: torch.device) -> str:
    """A device with the name of its maker's, where it has one."""
    if not _has(device, "get_device_name"):
        return str(device)
    return f"{device} ({_ask_of(device, 'get_device_name')})"


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that it was asked for."""
    if _has(device, "synchronize"):
        _ask_of(device, "synchronize")


def clear_cache() -> None:
    """Let devices give back memory that no tensor has."""
    for kind in {"cuda", *_types_in_use()}:
        if _has(torch.device(kind), "empty_cache"):
            _ask(torch.device(kind), "empty_cache")


@functools.lru_cache(maxsize=None)
def can_pin(device: torch.device) -> bool:
    """Tell whether the host has memory that a device reads directly."""
    if device.type in ("cpu", "cuda"):
        return device.type == "cuda"
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except _LACKS:
        return False


def timing_event(device: torch.device) -> Optional[TimingEvent]:
    """An event when a device has done all it was asked for; None where it tells no times."""
    if not _has(device, "Event", "synchronize"):
        return None
    try:
        event = getattr(torch, device.type).Event(enable_timing=True)
        if _has(device, "current_stream"):
            event.record(getattr(torch, device.type).current_stream(device))
        else:
            event.record()
    except _LACKS:
        return None
    return cast(TimingEvent, event)


def is_out_of_memory(error: Exception) -> bool:
    """True of an error by which Python, or torch on any device, says that there is no room."""
    # Torch's errors about it, on a GPU and on the host, are told from others by their text alone.
    texts = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)
    )
