"""A device of its own in plain Python, "plain", for a process that tries one.

Its tensors have the dispatch key, the device and the storages of a backend that is no part of
torch; their memory is the host's, and every operator runs torch's kernel for the CPU. So it shows
what asks for a type of device or for abilities of its module, and what takes values to the host,
which is counted; it shows nothing of streams, of time, of kernels that round otherwise, nor of what
operators a backend lacks.
"""

import types

import torch
from torch.utils import backend_registration

CAN_REGISTER = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
NAME = "plain"


class Plain(types.ModuleType):
    """``torch.plain``: what torch asks of a module of a device."""

    def __init__(self):
        super().__init__(f"torch.{NAME}")
        # Copies of values to the host, by the operator that made them.
        self.reads = []

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


class Keyed(Plain):
    """``torch.plain`` with a generator that can be seeded, read and set, as CUDA's can."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def manual_seed(self, seed):
        """Start the generator."""
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device=NAME):
        """Read the generator."""
        return self.generator.get_state()

    def set_rng_state(self, state, device=NAME):
        """Set the generator."""
        self.generator.set_state(state)


_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ATEN = torch.ops.aten
_SET = _ATEN.set_.source_Storage_storage_offset
# Memory that storages of the device stand on.
_MEMORY = {}


def _storage(host, device):
    """A storage of the device over the memory of a tensor of the host."""
    place = host.untyped_storage()
    _MEMORY[place.data_ptr()] = host
    return torch._C._construct_storage_from_data_pointer(place.data_ptr(), device, place.nbytes())


def _on_device(host, device):
    """A tensor of the device with the values of one of the host, in its memory."""
    made = torch._C._acc.create_empty_tensor((0,), host.dtype)
    storage = _storage(host, device)
    return _SET.redispatch(
        _CPU, made, storage, host.storage_offset(), [*host.shape], [*host.stride()]
    )


def _on_host(tensor):
    """The same memory as a tensor of the host."""
    place = tensor.untyped_storage()
    cpu = torch.device("cpu")
    storage = torch._C._construct_storage_from_data_pointer(place.data_ptr(), cpu, place.nbytes())
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _mapped(function, value):
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, each) for each in value)
    return function(value)


class _Call:
    """One operator on tensors of the device."""

    def __init__(self):
        # Tensors of the host and of the device with the same memory.
        self.pairs = []

    def to_host(self, value):
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == NAME else value
        if not isinstance(value, torch.Tensor) or value.device.type != NAME:
            return value
        # One without memory may be where results go, which gets some then.
        has_memory = value.untyped_storage().nbytes() > 0
        host = _on_host(value) if has_memory else torch.empty(value.shape, dtype=value.dtype)
        self.pairs.append((host, value))
        return host

    def to_device(self, value):
        if not isinstance(value, torch.Tensor):
            return value
        place = value.untyped_storage().data_ptr()
        for host, tensor in self.pairs:
            if host is value:
                if host.numel() and not tensor.untyped_storage().nbytes():
                    form = host.storage_offset(), [*host.shape], [*host.stride()]
                    _SET.redispatch(_CPU, tensor, _storage(host, tensor.device), *form)
                return tensor
            is_view = place and place == host.untyped_storage().data_ptr()
            if is_view and value.dtype == tensor.dtype:
                form = [*value.shape], [*value.stride()], value.storage_offset()
                return _ATEN.as_strided.default.redispatch(_CPU, tensor, *form)
        return _on_device(value, torch.device(NAME, 0))


def _resized(tensor, shape):
    """Give a tensor of the device room for a shape."""
    place = tensor.untyped_storage()
    host = torch.empty(shape, dtype=tensor.dtype)
    if host.untyped_storage().nbytes() > place.nbytes():
        _on_host(tensor)
        _SET.redispatch(_CPU, tensor, _storage(host, tensor.device), 0, [*shape], [*host.stride()])
    else:
        _SET.redispatch(_CPU, tensor, place, 0, [*shape], [*host.stride()])
    return tensor


def register(module):
    """Make the device known to torch, once in a process.

    Args:
        module: becomes ``torch.plain``.
    """
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)
    host = torch.default_generator

    def run(operator, *args, **kwargs):
        if operator is _ATEN.resize_.default:
            return _resized(*args[:2])
        if operator._schema.name == "aten::set_":
            return operator.redispatch(_CPU, *args, **kwargs)
        call = _Call()
        args = _mapped(call.to_host, args)
        kwargs = {name: _mapped(call.to_host, value) for name, value in kwargs.items()}
        if operator is _ATEN._copy_from.default:
            source, target = args[:2]
            target.copy_(source)
            if not any(host is target for host, _ in call.pairs):
                module.reads.append(source.numel())
            return call.to_device(target) if len(call.pairs) == 2 else target
        if operator is _ATEN._local_scalar_dense.default:
            module.reads.append(1)
        if torch.Tag.nondeterministic_seeded not in operator.tags:
            return _mapped(call.to_device, operator(*args, **kwargs))
        outside = host.get_state()
        if isinstance(module, Keyed):
            host.set_state(module.generator.get_state())
        else:
            host.seed()
        try:
            return _mapped(call.to_device, operator(*args, **kwargs))
        finally:
            if isinstance(module, Keyed):
                module.generator.set_state(host.get_state())
            host.set_state(outside)

    def convolution(*args):
        return run(_ATEN.convolution.default, *args)

    def convolution_backward(gradient, source, weight, *rest):
        *settings, wanted = rest
        args = (gradient, source, weight, [weight.shape[0]], *settings, wanted)
        return run(_ATEN.convolution_backward.default, *args)

    fallback, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    fallback.fallback(run, "PrivateUse1")
    aten.impl("convolution_overrideable", convolution, "PrivateUse1")
    aten.impl("convolution_backward_overrideable", convolution_backward, "PrivateUse1")
    module.libraries = fallback, aten
