"""What stands for CUDA graphs on the CPU: operators written down with the memory they work on.

Like a CUDA graph, a tape does nothing while it is captured, reads and writes the very same memory
in every replay, holds no memory but its own, and refuses to give the host a value meanwhile.
"""

import contextlib

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ipufit.utils.random_streams import isolated

CPU = torch.device("cpu")


class Tapes:
    """For ``EmbeddedEngine.tape``.

    Attributes:
        captures, replays: how many there were.
        refused: operators that can't be captured.
    """

    def __init__(self, refused=()):
        self.captures = self.replays = 0
        self.refused = refused

    def __call__(self, device):
        """One maker for all programs."""
        return self

    def aside(self):
        """There are no streams."""
        return contextlib.nullcontext()

    def capture(self, function, streams):
        """The work of a function."""
        tape = _Tape(self)

        def draw(place, key):
            assert 0 <= place < streams
            tape.entries.append(place)
            torch.default_generator.manual_seed(key)

        with isolated(CPU):
            try:
                with tape:
                    function(draw)
            finally:
                tape.undo()
        self.captures += 1
        return tape


class _Place:
    """Where a tensor is and what it looks like now; only the tape's own memory is held."""

    def __init__(self, tensor, is_own):
        self.is_own = is_own
        self._held = tensor.untyped_storage()
        if not is_own:
            self._seen, self._held = StorageWeakRef(self._held), None
        self._form = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._dtype = tensor.dtype

    def tensor(self):
        storage = self._held
        if not self.is_own:
            storage = torch.UntypedStorage._new_with_weak_ptr(self._seen.cdata)
        assert storage is not None, "a replay reads memory that has been freed"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._form)


def _tensors(values):
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _memory(tensor):
    return tensor.untyped_storage()._cdata


class _Tape(TorchDispatchMode):
    def __init__(self, tapes):
        super().__init__()
        self.entries = []
        self._tapes = tapes
        self._own = set()
        self._before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default or func in self._tapes.refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        given = [t for t in _tensors((args, kwargs)) if t.device == CPU]
        for tensor in given:
            if _memory(tensor) not in self._own and _memory(tensor) not in self._before:
                storage = tensor.untyped_storage()
                self._before[_memory(tensor)] = storage, storage.clone()
        result = func(*args, **kwargs)
        made = [t for t in _tensors(result) if t.device == CPU]
        inputs = {_memory(tensor) for tensor in given}
        self._own.update(_memory(t) for t in made if _memory(t) not in self._before)
        is_work = func._schema.is_mutable or not {_memory(t) for t in made} <= inputs
        if is_work:
            self.entries.append((func, *tree_map(self._place, (args, kwargs, made))))
        return result

    def _place(self, value):
        # Operators of torch's device "meta" have no values.
        if not isinstance(value, Tensor) or value.device != CPU:
            return value
        return _Place(value, _memory(value) in self._own)

    def undo(self):
        """Nothing has been done."""
        for storage, value in self._before.values():
            storage.copy_(value)
        self._before = {}

    def replay(self, keys):
        """All of it again."""
        self._tapes.replays += 1
        with isolated(CPU), torch.no_grad():
            for entry in self.entries:
                if isinstance(entry, int):
                    torch.default_generator.manual_seed(keys[entry])
                else:
                    self._again(*entry)

    def _again(self, func, args, kwargs, made):
        args, kwargs = tree_map(
            lambda v: v.tensor() if isinstance(v, _Place) else v, (args, kwargs)
        )
        result = func(*args, **kwargs)
        for old, new in zip(made, (t for t in _tensors(result) if t.device == CPU)):
            if old.is_own and _memory(old.tensor()) != _memory(new):
                old.tensor().copy_(new)


class HostReads(TorchDispatchMode):
    """Counts the operators that bring a value to the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
