"""In which floating-point types a program computes: autocast, half-precision modules."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any, Callable, Iterable, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.objective_arguments import dtype_name
from ipufit.core.train_config import Precision
from ipufit.errors import ConfigurationError, first_line
from ipufit.utils import tree
from ipufit.utils.console import warn_user
from ipufit.utils.random_streams import isolated


def autocast_state(device: torch.device) -> Tuple[Any, ...]:
    """Read whether autocast is on for a device, and in which dtype."""
    if hasattr(torch, "get_autocast_dtype"):
        kind = device.type
        return (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    if device.type == "cpu":
        return (torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype())
    return (torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype())


class WithoutAutocast:
    """Calls a recorded graph as it is: the casts of its own autocast are operators in it.

    Args:
        graph: what is called.
        arguments: like those of the calls.

    Attributes:
        graph: as passed; another one may take its place.
    """

    def __init__(self, graph: Callable[..., List[Tensor]], arguments: Sequence[Tensor]) -> None:
        self.graph = graph
        self._kind = arguments[-1].device.type
        self._is_on = _autocast_switch(self._kind)

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        """Call the graph."""
        if not self._is_on():
            return self.graph(*tensors)
        with torch.autocast(self._kind, enabled=False):
            return self.graph(*tensors)


def _autocast_switch(kind: str) -> Callable[[], bool]:
    """Find the functions of torch that switch autocast for a kind of device."""
    if hasattr(torch, "get_autocast_dtype"):
        return functools.partial(torch.is_autocast_enabled, kind)
    return torch.is_autocast_cpu_enabled if kind == "cpu" else torch.is_autocast_enabled


@contextlib.contextmanager
def computing_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """Autocast as the precision asks; without one, that of the user stays as it is."""
    enabled, dtype = autocast_state(device)
    if precision.autocast is not None:
        enabled, dtype = True, precision.autocast
    if not enabled:
        yield
        return
    # The cache would keep casts of weights from one micro-batch to the next.
    with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
        yield


def with_inputs_in(precision: Precision, batch: Tuple[tree.Tree, ...]) -> Tuple[tree.Tree, ...]:
    """The batch (args, kwargs, target, sample_weight), floating point as the precision asks.

    Weights of samples stay as they are: they are no part of what the module computes.
    """
    if precision.inputs is None:
        return batch

    def cast(leaf: tree.Leaf) -> tree.Leaf:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(precision.inputs) if floating else leaf

    args, kwargs, target, sample_weight = batch
    return (*(tree.map_leaves(cast, part) for part in (args, kwargs, target)), sample_weight)


def check_precision(precision: Precision, module: nn.Module) -> None:
    """Make sure that this torch and this module can compute like that.

    Raises:
        ConfigurationError: autocast to this type is missing, or parameters are of another type.
    """
    devices = {p.device.type for p in module.parameters()} or {"cpu"}
    autocast, inputs = precision.autocast, precision.inputs
    for device in devices if autocast is not None else ():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with torch.autocast(device, dtype=autocast):
                    state = autocast_state(torch.device(device))
            except RuntimeError:
                state = (False, None)
        if autocast is not None and state != (True, autocast):
            raise ConfigurationError(
                f"precision={precision.name!r} needs autocast to {dtype_name(autocast)} on "
                f"{device}, which torch {torch.__version__} does not have. Use 'mixed_bfloat16', "
                "a newer torch, or None."
            )
    if inputs is None:
        return
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != inputs:
            raise ConfigurationError(
                f"precision={precision.name!r} needs a module of {dtype_name(inputs)}, but "
                f"{name!r} is {dtype_name(parameter.dtype)}. Convert it first: "
                f"module.to(torch.{dtype_name(inputs)}), or use a mixed precision, which keeps "
                "the dtype of the weights."
            )


@contextlib.contextmanager
def refuse_missing_half() -> Iterator[None]:
    """Say what to do where the CPU has no kernel for a half-precision type.

    Raises:
        ConfigurationError: naming the operator.
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "not implemented for 'Half'" not in text and "'BFloat16'" not in text:
            raise
        raise ConfigurationError(
            "every operator of the program must support the chosen precision, but torch "
            f"{torch.__version__} says on the CPU: {first_line(error)}. Use float32, "
            "'mixed_bfloat16', or a GPU."
        ) from error


def computes_in_half(tensors: Iterable[object]) -> bool:
    """True if one of the values is a tensor of half precision."""
    half = (torch.float16, torch.bfloat16)
    return any(isinstance(t, Tensor) and t.dtype in half for t in tensors)


def mixes_double(tensors: Sequence[Tensor]) -> bool:
    """True if float64 stands beside a narrower floating-point type."""
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return torch.float64 in kinds and len(kinds) > 1


def try_out(run: Callable[..., object], arguments: Sequence[Tensor]) -> None:
    """Run once on copies: a recording knows of no missing kernels and few mixed types.

    Raises:
        ConfigurationError: naming the operator that is missing.
    """
    with isolated(arguments[-1].device), refuse_missing_half():
        run(*(argument.clone() for argument in arguments))


def warn_of_vanishing_eps(optimizer: torch.optim.Optimizer) -> None:
    """Say so where the eps that keeps a division from being one by zero is zero itself."""
    for group in optimizer.param_groups:
        eps = group.get("eps")
        is_number = isinstance(eps, float) and eps > 0
        if not is_number or not any(p.dtype == torch.float16 for p in group["params"]):
            continue
        if torch.tensor(eps, dtype=torch.float16) == 0:
            warn_user(
                f"eps={eps:g} of {type(optimizer).__name__} is zero in float16, so a weight "
                "whose gradient is zero becomes NaN. Pass a larger one, such as 1e-4, or keep "
                "weights in float32 with precision='mixed_float16'.",
            )
            return
