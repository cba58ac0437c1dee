"""Operators that draw random numbers: which they are, how a graph gets them, who else draws them.

Where the generator of a device can't be started at a key, its numbers are drawn on the host, whose
generator can, and copied there.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Mapping, NoReturn, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.errors import ConfigurationError
from ipufit.utils import tree
from ipufit.utils.devices import HOST, is_keyed


def uses_random_numbers(graph: fx.GraphModule) -> bool:
    """Tell whether the graph draws from a random generator."""
    return any(draws(node.target, node.args, node.kwargs) for node in graph.graph.nodes)


def draws(operator: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Say whether a call of an operator draws random numbers.

    Attention draws them for its dropout alone, which may be 0.

    Args:
        operator: of the dispatcher; another function draws none.
        args, kwargs: of the call.
    """
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if operator._schema.name.endswith("_backward"):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            positional = args[place] if place < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", positional) != 0.0)
    return torch.Tag.nondeterministic_seeded in operator.tags


# Operators that make numbers, or write them over what is there, of a shape alone.
_MAKERS = (
    *("aten.rand.default", "aten.randn.default", "aten.randint.default", "aten.randint.low"),
    *("aten.randperm.default", "aten.rand_like.default", "aten.randn_like.default"),
    *("aten.randint_like.default", "aten.randint_like.low_dtype", "aten.bernoulli.p"),
    "aten.normal.float_float",
)
_FILLS = (
    *("aten.bernoulli_.float", "aten.uniform_.default", "aten.normal_.default"),
    *("aten.exponential_.default", "aten.random_.default", "aten.random_.to"),
    *("aten.random_.from", "aten.geometric_.default", "aten.cauchy_.default"),
    "aten.log_normal_.default",
)
_EMPTY = (
    *("aten.empty.memory_format", "aten.empty_like.default", "aten.empty_strided.default"),
    *("aten.new_empty.default", "aten.new_empty_strided.default"),
)


def hoist_draws(owner: fx.GraphModule, graph: fx.Graph) -> Optional[fx.GraphModule]:
    """Make inputs of the random numbers of a graph, behind those that it has.

    In their order, up to the first that depend on more than a shape: what follows would get other
    numbers.

    Args:
        owner: has what the graph reads.
        graph: is changed.

    Returns:
        What draws the numbers, without arguments, in the order of the new inputs; None where there
        are none.
    """
    drawn, order = fx.Graph(), {node: place for place, node in enumerate(graph.nodes)}
    numbers: List[fx.Node] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]

    def empty_like(source: fx.Node) -> fx.Node:
        value: Tensor = source.meta["val"]
        return drawn.call_function(
            torch.ops.aten.empty_strided.default,
            ([*value.shape], [*value.stride()]),
            {"dtype": value.dtype, "device": value.device},
        )

    for node in [each for each in graph.nodes if draws(each.target, each.args, each.kwargs)]:
        name, sources = str(node.target), node.all_input_nodes
        filled = [source for source in sources if name in _FILLS]
        is_new = all(
            str(source.target) in _EMPTY and min(source.users, key=order.__getitem__) is node
            for source in filled
        )
        if not is_new or name not in (*_MAKERS, *_FILLS):
            break
        args = [fx.map_arg(each, empty_like) for each in (node.args, node.kwargs)]
        numbers.append(drawn.call_function(node.target, *args))
        with graph.inserting_after(last):
            last = graph.placeholder(f"drawn_{len(numbers)}")
        last.meta = dict(node.meta)
        for each in (node, *filled):
            each.replace_all_uses_with(last)
            graph.erase_node(each)
    drawn.output(tuple(numbers))
    return fx.GraphModule(owner, drawn) if numbers else None


@functools.lru_cache(maxsize=None)
def _may_draw(operator: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags or any(
        argument.name == "dropout_p" for argument in operator._schema.arguments
    )


class HostDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws on the host what operators in the block would draw on a device without a key."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: Tuple[Any, ...] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> object:
        drawn = draw_on_host(func, args, kwargs or {}, _refuse)
        return func(*args, **(kwargs or {})) if drawn is NotImplemented else drawn


def _refuse(what: str, instead: str) -> NoReturn:
    raise ConfigurationError(f"{what}. {instead}")


def draw_on_host(
    operator: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    refuse: Callable[[str, str], NoReturn],
) -> object:
    """Draw on the host the numbers of an operator on a device whose generator has no keys.

    Operators that need a shape alone have the numbers that they have on the host.

    Args:
        operator: of the dispatcher.
        args, kwargs: of the call.
        refuse: takes what is wrong and what to do where that is not possible, and raises.

    Returns:
        The operator's results; NotImplemented where it draws none, or on another device.
    """
    if not _may_draw(operator) or not draws(operator, args, kwargs):
        return NotImplemented
    device = kwargs.get("device") or next((t.device for t in tree.tensors((args, kwargs))), HOST)
    device = torch.device(device)
    if is_keyed(device):
        return NotImplemented
    name = str(operator)
    if name in _FILLS:
        here = operator(torch.empty_like(args[0], device=HOST), *args[1:], **kwargs)
        return args[0].copy_(here)
    if name in _MAKERS:
        alike = [torch.empty_like(t, device=HOST) if isinstance(t, Tensor) else t for t in args]
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        kwargs.update({"device": HOST} if "device" in kwargs else {})
        return operator(*alike, **kwargs).to(device)
    if name not in _BY_VALUE:
        refuse(
            f"{operator._schema.name} draws random numbers on {device}, whose generator can't be "
            "seeded per micro-batch, so they would depend neither on seed nor on checkpoints",
            "Draw with torch.rand, randn, randint, bernoulli, normal, multinomial or dropout, "
            "which can get them from the host, or move the module with module.cpu().",
        )
    return _BY_VALUE[name](*args, **kwargs)


def _noise(like: Tensor, fill: str, *settings: float, shape: Sequence[int] = ()) -> Tensor:
    """Numbers of a distribution, drawn on the host, in the form of a tensor, or another shape."""
    place = like.new_empty(shape, device=HOST) if shape else torch.empty_like(like, device=HOST)
    drawn: Tensor = getattr(place, fill)(*settings)
    return drawn.to(like.device)


def _dropout(source: Tensor, p: float, train: Optional[bool]) -> Tuple[Tensor, Tensor]:
    if train is False:
        return source.clone(), torch.ones_like(source, dtype=torch.bool)
    survives = _noise(source, "bernoulli_", 1.0 - p)
    scale, mask = 1.0 / (1.0 - p) if p < 1.0 else 0.0, survives.to(torch.bool)
    # Last, since the last operator of several in a recording stands for the call.
    return source * (survives * scale), mask


def _bernoulli(share: Tensor, generator: object = None) -> Tensor:
    return (_noise(share, "uniform_") < share).to(share.dtype)


def _bernoulli_(target: Tensor, share: Tensor, generator: object = None) -> Tensor:
    return target.copy_(_noise(target.to(torch.float32), "uniform_") < share)


def _normal(
    mean: Union[float, Tensor], std: Union[float, Tensor], generator: object = None
) -> Tensor:
    parts = [each for each in (mean, std) if isinstance(each, Tensor)]
    like = parts[0] if len(parts) == 1 else torch.zeros_like(parts[0] + parts[1])
    return _noise(like, "normal_") * std + mean


def _multinomial(
    share: Tensor, count: int, replacement: bool = False, generator: object = None
) -> Tensor:
    """The first of clocks whose rates are the shares (A. S. Efraimidis, P. G. Spirakis, 2006)."""
    if not replacement:
        return (share / _noise(share, "exponential_")).topk(count).indices
    shape = [*share.shape[:-1], count, share.shape[-1]]
    return (share.unsqueeze(-2) / _noise(share, "exponential_", shape=shape)).argmax(-1)


_BY_VALUE: Dict[str, Callable[..., object]] = {
    "aten.native_dropout.default": _dropout,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli_.Tensor": _bernoulli_,
    "aten.normal.Tensor_Tensor": _normal,
    "aten.normal.Tensor_float": _normal,
    "aten.normal.float_Tensor": _normal,
    "aten.multinomial.default": _multinomial,
}
