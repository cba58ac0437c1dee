"""From an estimator's parameters to a module and an optimizer."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Dict, Mapping

import torch
from torch import nn

from ipufit.errors import ConfigurationError, OptimizerError
from ipufit.optim.resolve import class_by_name
from ipufit.utils.random_streams import isolated, seed_generators

__all__ = ["build_module", "build_optimizer"]

_CPU = torch.device("cpu")


def build_module(
    module: object, settings: Mapping[str, object], seed: int, sizes: Mapping[str, int]
) -> nn.Module:
    """A module of its own for one fit.

    Args:
        module: a module, of which a copy is made; a class or another callable that makes one.
        settings: arguments of the class or callable.
        seed: of the initial weights; the user's generator is left alone.
        sizes: what the data says, passed to a callable that has parameters of these names.

    Raises:
        ConfigurationError: it is none of these, or makes no module.
    """
    if isinstance(module, nn.Module):
        if settings:
            raise ConfigurationError(
                f"module__{next(iter(settings))} needs a module that is still to be made, got an "
                f"object of {type(module).__name__}. Pass the class, or a function that makes it."
            )
        return copy.deepcopy(module)
    if not callable(module):
        raise ConfigurationError(
            "module must be a torch.nn.Module, a class of them or a function that makes one, got "
            f"{module!r}. Pass for example module=MyNet."
        )
    name = getattr(module, "__name__", type(module).__name__)
    try:
        signature = inspect.signature(module)
    except (TypeError, ValueError):
        signature = inspect.Signature()
    sizes_by_name = {size: count for size, count in sizes.items() if size in signature.parameters}
    arguments: Dict[str, Any] = {**sizes_by_name, **settings}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"the module is made by {name}{signature}, which does not take what it was given: "
            f"{error}. Set its arguments with module__ parameters; n_features and n_outputs come "
            "from the data."
        ) from error
    with isolated(_CPU):
        seed_generators(seed, _CPU)
        built = module(**arguments)
    if not isinstance(built, nn.Module):
        raise ConfigurationError(
            f"module must make a torch.nn.Module, but {name} returned {type(built).__name__}. "
            "Return the module from it."
        )
    return built


def build_optimizer(optimizer: Any, settings: Mapping[str, Any]) -> Any:
    """Build the argument of ``Model.compile``: the optimizer, or a factory that adds the settings.

    Args:
        optimizer: a name, a class, or a callable of parameters.
        settings: keyword arguments besides the parameters.

    Raises:
        UnknownNameError: no optimizer has that name.
        OptimizerError: an optimizer over another module's parameters, or settings it does not take.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            "optimizer must be still to be made, since every fit makes a module of its own, got "
            f"an object of {type(optimizer).__name__}. Pass its name or class, and its settings "
            "as optimizer__lr=0.01."
        )
    if not settings:
        return optimizer
    arguments = dict(settings)
    make = class_by_name(optimizer) if isinstance(optimizer, str) else optimizer
    if not callable(make):
        raise OptimizerError(
            f"optimizer must be a name, a class or a callable of parameters, got {optimizer!r}. "
            "Pass for example optimizer='adam'."
        )
    if isinstance(optimizer, str) and make is torch.optim.SGD:
        arguments.setdefault("lr", 0.01)  # what the name means without settings
    try:
        inspect.signature(make).bind([], **arguments)
    except TypeError as error:
        raise OptimizerError(
            f"optimizer__ parameters must be arguments of {getattr(make, '__name__', make)}, got "
            f"{', '.join(arguments)} ({error}). Use names from its signature."
        ) from error
    return lambda params: make(params, **arguments)
