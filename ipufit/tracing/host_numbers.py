"""Numbers that a recorded function computes on the host: followed while it is recorded.

A recording freezes every Python number that it meets. Here the numbers that change from call to
call stand for themselves: arithmetic on them, and on tensors of one number in host memory, becomes
a little program of its own, whose results are inputs of the graph. What Python decides by such a
number is a condition; where it turns out otherwise, the recording does not fit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from ipufit.utils.state import replaced

Number = Union[int, float, Tensor]

# Of the inputs: the numbers that the graph takes and the further results; None where it does not
# fit.
HostProgram = Callable[[Sequence[Number]], Optional[Tuple[List[Number], List[Number]]]]

_MATH = (
    *("sqrt", "pow", "exp", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh"),
    *("fabs", "floor", "ceil", "trunc", "hypot", "copysign", "isfinite", "isnan", "isinf"),
)

# They make a tensor of one number where they get no shape, or an empty one.
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
_OF_SHAPES = (torch.zeros, torch.ones, torch.full, torch.empty)


class HostWriteError(RuntimeError):
    """A tensor that was taken for a number on the host gets a value of the recorded program.

    Attributes:
        input: which of the inputs it is, or None.
        tensor: which of the tensors that the function makes of numbers, or None.
    """

    def __init__(self, number: Optional[int], tensor: Optional[int]) -> None:
        self.input, self.tensor = number, tensor
        super().__init__("it writes a result into a scalar tensor in host memory")


def is_host_number(value: object) -> bool:
    """Tell whether a value is a number that the host has: of Python, or a tensor on the CPU."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and value.device.type == "cpu"
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class _Symbol:
    """A number whose arithmetic is noted down."""

    tape: HostNumbers
    name: str

    def __bool__(self) -> bool:
        return bool(self.tape.compute(bool, (self,)))

    def __hash__(self) -> int:
        return hash(self.tape.fix(self))

    def __int__(self) -> int:
        return int(self.tape.fix(self))

    def __trunc__(self) -> int:
        return int(self.tape.fix(self))

    def __index__(self) -> int:
        return operator.index(self.tape.fix(self))

    def __float__(self) -> float:
        return float(self.tape.fix(self))


def _method(function: Callable[..., object], is_reflected: bool = False) -> Callable[..., object]:
    def method(self: _Symbol, *others: object) -> object:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        return self.tape.compute(function, (*others, self) if is_reflected else (self, *others))

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_Symbol, f"__{_name}__", _method(getattr(operator, _name)))
    setattr(_Symbol, f"__r{_name}__", _method(getattr(operator, _name), True))
for _name in ("neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Symbol, f"__{_name}__", _method(getattr(operator, _name)))


class _Float(_Symbol, float):
    """A float whose arithmetic is noted down."""


class _Int(_Symbol, int):
    """An int whose arithmetic is noted down."""


def _plain(value: object) -> object:
    """The number that a symbol stands for now; other values as they are."""
    if isinstance(value, _Float):
        return float.__float__(value)
    return int.__int__(value) if isinstance(value, _Int) else value


class HostNumbers(TorchFunctionMode):
    """Notes what is computed of numbers on the host, while it is entered.

    Args:
        traced_tensors: which of the tensors of one number that the function makes are the graph's.
    """

    def __init__(self, traced_tensors: Collection[int] = ()) -> None:
        super().__init__()
        self._traced_tensors = traced_tensors
        self._inputs = 0
        # Tensors that are inputs, and those that the function has made, by identity.
        self._input_of: Dict[int, int] = {}
        self._tensor_of: Dict[int, int] = {}
        self._count = 0
        self._lines: List[str] = []
        self._copies: List[str] = []
        self._has_conditions = False
        self._constants: Dict[str, object] = {}
        # Results of arithmetic that was noted already.
        self._results: Dict[object, object] = {}
        # Names of the tensors of one number, and the tensors, whose identities they go by.
        self._names: Dict[int, str] = {}
        self._tensors: List[Tensor] = []
        # What stands in the graph for the numbers that it takes, by name.
        self._marks: Dict[str, Union[int, float]] = {}
        self._patches: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

    def __enter__(self) -> HostNumbers:
        patches = [(math, name, self._mathematical(getattr(math, name))) for name in _MATH]
        self._patches = replaced(*patches)
        self._patches.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.__exit__(*error)

    def _mathematical(self, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def call(*args: object) -> object:
            if any(isinstance(arg, _Symbol) for arg in args):
                return self.compute(function, args)
            return function(*args)

        return call

    def input(self, value: Number) -> Any:
        """Return what stands for the next input, which has this value now."""
        name = f"x{self._inputs}"
        self._inputs += 1
        if not isinstance(value, Tensor):
            return self._symbol(value, name)
        self._copies.append(f"{name} = {name}.clone()")
        copy = value.clone()
        self._input_of[id(copy)] = self._inputs - 1
        return self._follow(copy, name)

    def _symbol(self, value: Union[int, float], name: str) -> Union[int, float]:
        symbol = _Float(value) if isinstance(value, float) else _Int(value)
        symbol.tape, symbol.name = self, name
        return symbol

    def _follow(self, tensor: Tensor, name: str) -> Tensor:
        self._names[id(tensor)] = name
        self._tensors.append(tensor)
        return tensor

    def _constant(self, value: object) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _named(self, value: object) -> str:
        """Name a value in the program: a result, a container with results in it, or a constant."""
        if isinstance(value, _Symbol):
            return value.name
        if isinstance(value, Tensor):
            return self._names[id(value)]
        if type(value) in (list, tuple):
            return f"[{', '.join(map(self._named, value))}]"  # type: ignore[call-overload]
        return self._constant(value)

    def _record(
        self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> str:
        name = f"v{len(self._lines)}"
        parts = [*map(self._named, args), *(f"{k}={self._named(v)}" for k, v in kwargs.items())]
        self._lines.append(f"{name} = {self._constant(function)}({', '.join(parts)})")
        return name

    def compute(self, function: Callable[..., object], args: Sequence[object]) -> object:
        """Compute with numbers, and note it; what is true or false becomes a condition."""
        key = function, tuple(a.name if isinstance(a, _Symbol) else (type(a), a) for a in args)
        if key not in self._results:
            value = function(*map(_plain, args))
            self._results[key] = self._result(value, self._record(function, args, {}))
        return self._results[key]

    def _result(self, value: object, name: str) -> object:
        if isinstance(value, bool):
            self._expect(name, value)
            return value
        if isinstance(value, (int, float)):
            return self._symbol(value, name)
        if isinstance(value, Tensor):
            return self._follow(value, name)
        if value is None:
            return value
        raise RuntimeError(f"it makes a {type(value).__name__} of numbers on the host")

    def _expect(self, name: str, value: object) -> None:
        self._has_conditions = True
        self._lines.append(f"if {name} != {self._constant(value)}: return None")

    def fix(self, symbol: Any) -> Any:
        """Return the number that a value stands for now, on condition that it is this one."""
        if isinstance(symbol, Tensor):
            symbol = self._on_host(Tensor.item, (symbol,), {})
        value = _plain(symbol)
        if ("fixed", symbol.name) not in self._results:
            self._results["fixed", symbol.name] = value
            self._expect(symbol.name, value)
        return value

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> object:
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        hosts = [tensor for tensor in tensors if id(tensor) in self._names]
        if hosts and func.__name__ == "__get__":
            with _disable_current_modes():
                return func(*args, **kwargs)
        if hosts and len(hosts) == len(tensors):
            return self._on_host(func, args, kwargs)
        if not tensors and _is_factory(func, args, kwargs):
            self._count += 1
            if self._count not in self._traced_tensors:
                number = self._on_host(func, args, kwargs)
                self._tensor_of[id(number)] = self._count
                return number
        if not hosts and not any(isinstance(leaf, _Symbol) for leaf in leaves):
            return func(*args, **kwargs)
        if hosts and (args[0] is hosts[0] or kwargs.get("out") is not None):
            raise HostWriteError(
                self._input_of.get(id(hosts[0])), self._tensor_of.get(id(hosts[0]))
            )
        if func is Tensor.__setitem__ and isinstance(args[1], Tensor):
            # torch would make a constant of the number.
            func = Tensor.masked_fill_
        return func(*tree_map(self._marked, args), **tree_map(self._marked, kwargs))

    def _on_host(
        self, func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
    ) -> object:
        with _disable_current_modes():
            value = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        return self._result(value, self._record(func, args, kwargs))

    def _marked(self, value: object) -> object:
        """A number that can be found in the graph, in place of one that the graph takes."""
        if isinstance(value, Tensor) and id(value) in self._names:
            value = self._on_host(Tensor.item, (value,), {})
        if not isinstance(value, _Symbol):
            return value
        if value.name not in self._marks:
            place = len(self._marks)
            is_float = isinstance(value, float)
            self._marks[value.name] = 0.41421356 + place * 2.0**-30 if is_float else 2**40 + place
        return self._marks[value.name]

    def follows(self, value: object) -> bool:
        """Tell whether a value is one that this has noted."""
        return isinstance(value, _Symbol) or id(value) in self._names

    def lift(self, graph: fx.GraphModule) -> None:
        """Make the numbers inputs of the graph, after all others.

        Raises:
            RuntimeError: one is not in the graph as it was put there.
        """
        nodes = graph.graph.nodes
        first = next(node for node in nodes if node.op != "placeholder")
        placeholders: Dict[object, fx.Node] = {}
        for name, mark in self._marks.items():
            with graph.graph.inserting_before(first):
                placeholders[type(mark), mark] = graph.graph.placeholder(f"number_{name}")
        used = set()

        def lifted(value: Any) -> Any:
            if type(value) not in (int, float) or (type(value), value) not in placeholders:
                return value
            used.add((type(value), value))
            return placeholders[type(value), value]

        for node in nodes:
            node.args = fx.node.map_aggregate(node.args, lifted)
            node.kwargs = fx.node.map_aggregate(node.kwargs, lifted)
        if len(used) != len(placeholders):
            raise RuntimeError("torch derives a number from one that changes")
        graph.recompile()

    def text(self) -> str:
        """Write down all that was noted, constants included."""
        constants = [(name, repr(value)) for name, value in self._constants.items()]
        return repr((self._lines, constants, list(self._marks)))

    def program(self, results: Sequence[object]) -> HostProgram:
        """Compile what was noted.

        Args:
            results: what the program returns beside the numbers for the graph.
        """
        numbers = ", ".join(self._marks)
        further = ", ".join(map(self._named, results))
        inputs = "".join(f"x{place}, " for place in range(self._inputs))
        body = [f"{inputs}= inputs"] if inputs else []
        # It changes copies of its own where it may turn out not to fit half way.
        copies = self._copies if self._has_conditions else []
        lines = [*body, *copies, *self._lines, f"return [{numbers}], [{further}]"]
        namespace = dict(self._constants)
        exec("\n    ".join(["def program(inputs):", *lines]), namespace)
        compiled: HostProgram = namespace["program"]  # type: ignore[assignment]
        return compiled


def _is_factory(
    func: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    """Tell whether a call that takes no tensor makes a tensor of one number on the host."""
    if func in _OF_NUMBERS:
        is_number = bool(args) and isinstance(args[0], (int, float))
    else:
        shape = args[0] if args else kwargs.get("size")
        is_number = func in _OF_SHAPES and isinstance(shape, (list, tuple)) and not shape
    return is_number and str(kwargs.get("device") or "cpu").startswith("cpu")
