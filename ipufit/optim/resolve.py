"""Optimizers: from what the user may pass to one torch optimizer over the module's parameters."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Collection, Dict, List, Mapping, Sequence, Tuple, Type

import torch
from torch import nn

from ipufit.errors import OptimizerError, UnknownNameError
from ipufit.optim.lamb import LAMB

__all__ = [
    "class_by_name",
    "has_step_hooks",
    "refuse_step_hooks",
    "resolve_optimizer",
    "settings_by_name",
]

NamedParameters = Sequence[Tuple[str, nn.Parameter]]

# Not one update from one set of dense gradients, so no step of a recorded program.
_REFUSED: Dict[Type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "LBFGS evaluates the loss again within an update",
    torch.optim.SparseAdam: "SparseAdam needs sparse gradients",
}
_ACCEPTED = (
    "a name, a class of torch.optim, an optimizer built from the module's parameters(), or a "
    "factory lambda params: optimizer"
)


def _known() -> Dict[str, Type[torch.optim.Optimizer]]:
    classes = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    del classes["optimizer"]
    return {**classes, "lamb": LAMB}


def resolve_optimizer(
    optimizer: object, named_parameters: NamedParameters
) -> torch.optim.Optimizer:
    """Bring an optimizer into normal form: one object over trainable parameters of the module.

    Args:
        optimizer: one of

            - a name, in any case, of a class in ``torch.optim``, or "lamb"
              (:class:`ipufit.optim.LAMB`); built with the defaults of this torch, but "sgd" always
              with ``lr=0.01``, as in Keras: torch's own default changed from none to 0.001;
            - a class of optimizers that needs nothing but parameters;
            - a torch optimizer, kept as it is with its state; it may leave parameters out;
            - a factory, called with the list of trainable parameters.
        named_parameters: all parameters of the module and their names, frozen ones included. A
            name, a class or a factory gets those with ``requires_grad``.

    Raises:
        UnknownNameError: no optimizer has that name.
        OptimizerError: no trainable parameter, parameters that are not the module's, more than one
            optimizer, one that no program can hold, or something that is no optimizer.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return _checked(optimizer, named_parameters)
    if isinstance(optimizer, tuple) and _is_name_with_options(optimizer):
        raise _with_options(*optimizer)
    if isinstance(optimizer, (list, tuple, Mapping)):
        raise _several(optimizer, "optimizer must be one optimizer")
    build: Callable[[List[nn.Parameter]], object]
    if isinstance(optimizer, str):
        kind = class_by_name(optimizer)
        build = _by_class(kind, settings_by_name(kind))
    elif isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
        build = _by_class(optimizer, {})
    elif callable(optimizer) and not isinstance(optimizer, type):
        build = optimizer
    else:
        came = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise OptimizerError(
            f"optimizer must be {_ACCEPTED}, got {came}. Pass for example optimizer='adam'."
        )
    built = build(_trainable(named_parameters))
    if isinstance(built, (list, tuple, Mapping)):
        raise _several(built, "an optimizer factory must return one optimizer")
    if not isinstance(built, torch.optim.Optimizer):
        raise OptimizerError(
            f"an optimizer factory must return a torch optimizer, got {type(built).__name__}. "
            "Write for example lambda params: torch.optim.SGD(params, lr=0.01)."
        )
    return _checked(built, named_parameters)


def class_by_name(name: str) -> Type[torch.optim.Optimizer]:
    """Find the optimizer class with this name, in any case.

    Raises:
        UnknownNameError: no optimizer has that name.
    """
    classes = _known()
    kind = classes.get(name.lower())
    if kind is None:
        refused = {refused.__name__.lower() for refused in _REFUSED}
        raise UnknownNameError("optimizer", name, set(classes) - refused)
    return kind


def settings_by_name(kind: Type[torch.optim.Optimizer]) -> Dict[str, float]:
    """Settings with which the name of a class builds it, where they are not torch's defaults."""
    return {"lr": 0.01} if kind is torch.optim.SGD else {}


def _by_class(
    kind: Type[torch.optim.Optimizer], settings: Mapping[str, float]
) -> Callable[[List[nn.Parameter]], torch.optim.Optimizer]:
    _refuse(kind)

    def build(params: List[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            inspect.signature(kind).bind(params, **settings)
            # torch says ValueError where a learning rate is required, or of a shape it can't take.
            return kind(params, **settings)  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise OptimizerError(
                f"an optimizer class must need nothing but parameters, got {kind.__name__} "
                f"({error}). Pass a factory: lambda params: {kind.__name__}(params, lr=0.01)."
            ) from error

    return build


def _refuse(kind: Type[torch.optim.Optimizer]) -> None:
    for refused, reason in _REFUSED.items():
        if issubclass(kind, refused):
            raise OptimizerError(
                "optimizer must make one update from one set of dense gradients, got "
                f"{kind.__name__}: {reason}. Use another, for example 'adam'."
            )


def _trainable(named_parameters: NamedParameters) -> List[nn.Parameter]:
    # Tied weights may be listed under two names, and an optimizer takes each tensor once.
    parameters = {id(p): p for _, p in named_parameters if p.requires_grad}
    if not parameters:
        raise _no_trainable(f"none of its {len(named_parameters)} parameters requires gradients")
    return list(parameters.values())


def _no_trainable(came: str) -> OptimizerError:
    return OptimizerError(
        f"the module has no trainable parameter: {came}. Unfreeze at least one with "
        "requires_grad_(True), or use compile(optimizer=None) to only evaluate and predict."
    )


def _checked(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters
) -> torch.optim.Optimizer:
    """The optimizer, if it is one that ipufit can run and all it holds is the module's."""
    kind = type(optimizer).__name__
    _refuse(type(optimizer))
    module_parameters = {id(p) for _, p in named_parameters}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in module_parameters:
                raise OptimizerError(
                    f"every parameter of the optimizer must be the module's, got one of shape "
                    f"{tuple(param.shape)} in group {index} of {kind} that is not. Build it from "
                    f"this module: {kind}(module.parameters(), ...)."
                )
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise _no_trainable(f"nothing that {kind} holds requires gradients")
    return optimizer


def _is_name_with_options(pair: Tuple[object, ...]) -> bool:
    return (
        len(pair) == 2
        and isinstance(pair[0], (str, type))
        and isinstance(pair[1], Mapping)
        and all(isinstance(name, str) for name in pair[1])
    )


def _with_options(optimizer: Any, options: Mapping[str, object]) -> OptimizerError:
    """The error for a name or class beside its options, with the factory that says the same."""
    kind = class_by_name(optimizer) if isinstance(optimizer, str) else optimizer
    module = "ipufit.optim" if kind is LAMB else "torch.optim"
    call = ", ".join(["params", *(f"{name}={value!r}" for name, value in options.items())])
    return OptimizerError(
        f"optimizer must be {_ACCEPTED}, got a tuple of {optimizer!r} and its options. Pass a "
        f"factory: lambda params: {module}.{kind.__name__}({call})."
    )


def _several(optimizers: Collection[object], expected: str) -> OptimizerError:
    return OptimizerError(
        f"{expected}, got {type(optimizers).__name__} of {len(optimizers)}. Use one optimizer with "
        "a parameter group for each: "
        "torch.optim.SGD([{'params': a, 'lr': 0.1}, {'params': b, 'lr': 0.01}])."
    )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether there are hooks on an optimizer's step."""
    hooks = vars(optimizer)
    return any(hooks.get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))


def refuse_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse hooks on an optimizer's step, which this program would never call.

    Raises:
        OptimizerError: there are hooks on ``step``.
    """
    if has_step_hooks(optimizer):
        raise OptimizerError(
            f"hooks on the step of {type(optimizer).__name__} can't run: in one program there is "
            "no call of step. Remove them, or do their work in a callback."
        )
