"""Optimizers: from what the user may pass to one torch optimizer over the module's parameters."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, Type, Union

import torch
from torch import nn

from ipufit.errors import OptimizerError, UnknownNameError
from ipufit.optim.optimizers import LAMB, Muon
from ipufit.optim.several import MultiOptimizer, NamedParameters, by_patterns, members_of
from ipufit.utils.console import warn_user

_ACCEPTED = (
    "a name, a class of torch.optim, an optimizer built from the module's parameters(), a "
    "factory lambda params: optimizer, or several of them"
)


def _known() -> Dict[str, Type[torch.optim.Optimizer]]:
    classes = {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    del classes["optimizer"]
    return {"muon": Muon, **classes, "lamb": LAMB}


def resolve_optimizer(
    optimizer: object, named_parameters: NamedParameters, modules: Sequence[nn.Module] = ()
) -> torch.optim.Optimizer:
    """Bring an optimizer into normal form: one object over trainable parameters of the module.

    Args:
        optimizer: one of

            - a name, in any case, of a class in ``torch.optim``, or "lamb"
              (:class:`ipufit.optim.LAMB`); built with the defaults of this torch, but "sgd" always
              with ``lr=0.01``, as in Keras: torch's own default changed from none to 0.001; "muon"
              trains hidden matrices with Muon and all else with AdamW;
            - a class of optimizers that needs nothing but parameters;
            - a torch optimizer, kept as it is with its state; it may leave parameters out;
            - a factory, called with the list of trainable parameters;
            - a dict of these by patterns of parameter names, such as ``{"encoder.*": "adamw",
              "head": torch.optim.SGD(...)}``, with "*" for all the others; or a list of torch
              optimizers over disjoint parameters; or a factory of such.
        named_parameters: all parameters of the module and their names, frozen ones included. A
            name, a class or a factory gets those with ``requires_grad``.
        modules: that have these, for "muon".

    Raises:
        UnknownNameError: no optimizer has that name.
        OptimizerError: no trainable parameter, parameters that are not the module's, that belong to
            two optimizers or to none, or something that is no optimizer.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return _checked(optimizer, named_parameters)
    _refuse_options(optimizer)
    if isinstance(optimizer, (list, tuple, Mapping)):
        return _several(optimizer, named_parameters, modules)
    if isinstance(optimizer, str) and optimizer.lower() == "muon":
        return _muon(named_parameters, modules)
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
    parameters = _trainable(named_parameters)
    try:
        inspect.signature(build).bind(parameters)
    except TypeError as error:
        raise OptimizerError(
            f"an optimizer factory must take the trainable parameters, but {error}. Write for "
            "example lambda params: torch.optim.SGD(params, lr=0.01)."
        ) from error
    built = build(parameters)
    if isinstance(built, (list, tuple, Mapping)):
        return _several(built, named_parameters, modules)
    if not isinstance(built, torch.optim.Optimizer):
        raise OptimizerError(
            f"an optimizer factory must return a torch optimizer, got {type(built).__name__}. "
            "Write for example lambda params: torch.optim.SGD(params, lr=0.01)."
        )
    return _checked(built, named_parameters)


def sparse_parameters(optimizer: Optional[torch.optim.Optimizer]) -> Set[int]:
    """Identities of the parameters that an optimizer goes by the indices of sparse gradients of."""
    members = [] if optimizer is None else members_of(optimizer).values()
    sparse = (each for each in members if isinstance(each, torch.optim.SparseAdam))
    return {id(p) for each in sparse for group in each.param_groups for p in group["params"]}


def bound_tensors(
    modules: Sequence[nn.Module], optimizer: Optional[torch.optim.Optimizer]
) -> Tuple[List[List[int]], List[Tuple[str, int, bool]]]:
    """Return what a program that trains is built for, to compare it later.

    Args:
        modules: the user's, and that of the loss.
        optimizer: torch's, or None.

    Returns:
        Identities of the parameters of each of the optimizer's groups; name and identity of each
        parameter and buffer of the modules, and whether it is trainable.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    identities = [[id(parameter) for parameter in group["params"]] for group in groups]
    named = [(*each.named_parameters(), *each.named_buffers()) for each in modules]
    return identities, [(name, id(t), t.requires_grad) for each in named for name, t in each]


def outside_optimizer(
    named: NamedParameters, optimizer: Optional[torch.optim.Optimizer]
) -> List[str]:
    """Names of the trainable ones among these parameters that an optimizer has not."""
    groups, _ = bound_tensors((), optimizer)
    inside = {identity for group in groups for identity in group}
    return [name for name, p in named if p.requires_grad and id(p) not in inside]


def warn_of_late(
    module: nn.Module, optimizer: Optional[torch.optim.Optimizer], left_out: Sequence[str]
) -> None:
    """Say so if a parameter became trainable after ``compile`` made the optimizer.

    Args:
        module: the user's.
        optimizer: that is to train it.
        left_out: names of what was trainable before, and not in the optimizer either.
    """
    outside = outside_optimizer([*module.named_parameters()], optimizer)
    late = [name for name in outside if name not in left_out]
    if late:
        warn_user(
            f"{', '.join(late[:5])}{', ...' if len(late) > 5 else ''} became trainable after "
            "compile made the optimizer, so fit does not train it. Call compile again or "
            "model.optimizer.add_param_group to train it.",
        )


def class_by_name(name: str) -> Type[torch.optim.Optimizer]:
    """Find the optimizer class with this name, in any case.

    Raises:
        UnknownNameError: no optimizer has that name.
    """
    classes = _known()
    kind = classes.get(name.lower())
    if kind is None:
        raise UnknownNameError("optimizer", name, set(classes))
    return kind


def settings_by_name(kind: Type[torch.optim.Optimizer]) -> Dict[str, float]:
    """Settings with which the name of a class builds it, where they are not torch's defaults."""
    return {"lr": 0.01} if kind is torch.optim.SGD else {}


def _by_class(
    kind: Type[torch.optim.Optimizer], settings: Mapping[str, float]
) -> Callable[[List[nn.Parameter]], torch.optim.Optimizer]:
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


def _refuse_options(optimizer: object) -> None:
    """Refuse a name or class beside its options, with the factory that says the same."""
    options: Dict[str, object] = {}
    if isinstance(optimizer, (list, tuple)) and len(optimizer) == 2:
        optimizer, second = optimizer
        options = {"lr": second} if isinstance(second, (int, float)) else second
    elif isinstance(optimizer, Mapping) and {"lr", "learning_rate", "config"} & set(optimizer):
        options = {**optimizer, **optimizer.get("config", {})}
        options.pop("config", None)
        names = [options.pop(key, None) for key in ("name", "class_name", "type")]
        optimizer = next(filter(None, names), "adam")
    if not options or not isinstance(optimizer, (str, type)) or not isinstance(options, Mapping):
        return
    kind = class_by_name(optimizer) if isinstance(optimizer, str) else optimizer
    module = "ipufit.optim" if kind is LAMB else "torch.optim"
    options = {"lr" if name == "learning_rate" else name: options[name] for name in options}
    call = ", ".join(["params", *(f"{name}={value!r}" for name, value in options.items())])
    raise OptimizerError(
        f"optimizer must be {_ACCEPTED}, got {optimizer!r} with options. Pass a factory: lambda "
        f"params: {module}.{kind.__name__}({call})."
    )


def _several(
    optimizers: Union[Sequence[object], Mapping[object, object]],
    named: NamedParameters,
    modules: Sequence[nn.Module],
) -> torch.optim.Optimizer:
    """One optimizer of several."""
    if not optimizers:
        raise OptimizerError(
            f"optimizer must be {_ACCEPTED}, got an empty {type(optimizers).__name__}."
        )
    members: Dict[str, torch.optim.Optimizer] = {}
    if isinstance(optimizers, Mapping):
        for pattern in optimizers:
            if not isinstance(pattern, str):
                raise OptimizerError(
                    "optimizer must have patterns of parameter names as keys, got "
                    f"{type(pattern).__name__}. Write for example {{'encoder.*': 'adamw', '*': "
                    "'sgd'}."
                )
        divided = by_patterns([str(pattern) for pattern in optimizers], named)
        for pattern, part in divided.items():
            member = resolve_optimizer(optimizers[pattern], part, modules)
            _refuse_left_out(member, part, pattern)
            inner = members_of(member)
            members.update({f"{pattern} {name}".strip(): each for name, each in inner.items()})
    else:
        for place, each in enumerate(optimizers):
            if not isinstance(each, torch.optim.Optimizer):
                raise OptimizerError(
                    f"a list of optimizers must hold torch optimizers, got {type(each).__name__} "
                    f"at place {place}. Pass a dict by patterns of parameter names for others: "
                    "{'encoder.*': 'adamw', '*': 'sgd'}."
                )
            members[str(place)] = _checked(each, named)
        owners: Dict[int, int] = {}
        names = {id(p): name for name, p in reversed(named)}
        for place, each in enumerate(members.values()):
            for parameter in (p for group in each.param_groups for p in group["params"]):
                first = owners.setdefault(id(parameter), place)
                if first != place:
                    raise OptimizerError(
                        f"each parameter must belong to one optimizer, but "
                        f"{names[id(parameter)]!r} belongs to those at places {first} and {place}. "
                        "Leave it out of one of them."
                    )
        for name, parameter in named:
            if parameter.requires_grad and id(parameter) not in owners:
                raise OptimizerError(
                    f"each parameter must belong to one optimizer, but {name!r} belongs to none of "
                    f"the {len(members)}. Add it to one, or freeze it with requires_grad_(False)."
                )
    return MultiOptimizer(members)


def _refuse_left_out(
    optimizer: torch.optim.Optimizer, named: NamedParameters, pattern: str
) -> None:
    """Make sure that an optimizer has all parameters that its pattern matches."""
    for name in outside_optimizer(named, optimizer):
        raise OptimizerError(
            f"each parameter must belong to one optimizer, but {name!r}, which {pattern!r} "
            f"matches, is not in its {type(optimizer).__name__}. Build that from all of them, "
            "or pass a factory."
        )


def _muon(named: NamedParameters, modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """Muon for hidden matrices, and AdamW for all else, with one learning rate for both."""
    trainable = _trainable(named)
    chosen = set(_hidden_matrices(modules, named))
    matrices = [p for p in trainable if id(p) in chosen]
    rest = [p for p in trainable if id(p) not in chosen]
    if not matrices:
        raise OptimizerError(
            "optimizer='muon' trains the matrices of hidden layers, but the module has none: "
            "embeddings, the output layer and everything else are trained by AdamW. Use 'adamw'."
        )
    kind: Any = getattr(torch.optim, "Muon", Muon)
    members: Dict[str, torch.optim.Optimizer] = {
        "muon": kind(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    }
    if rest:
        members["adamw"] = torch.optim.AdamW(rest, lr=1e-3)
    several = MultiOptimizer(members)
    names = {id(p): name for name, p in reversed(named)}
    lists = [", ".join(names[id(p)] for p in those) for those in (matrices, rest)]
    others = f", AdamW the others: {lists[1]}" if rest else ""
    several.choice = f"Muon trains {len(matrices)} hidden matrices: {lists[0]}{others}."
    return several


def _hidden_matrices(
    modules: Sequence[nn.Module], named: Sequence[Tuple[str, nn.Parameter]]
) -> List[int]:
    """Choose what Muon trains, as its author describes: matrices of hidden layers.

    Embeddings are left out, those by name as in Keras, and the output layer, which is the last
    linear layer.

    Args:
        modules: with their parts, in order.
        named: parameters and their names.

    Returns:
        Identities of the parameters.
    """
    left_out = set()
    last: Optional[nn.Linear] = None
    for module in modules:
        for part in module.modules():
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                left_out.add(id(part.weight))
            last = part if isinstance(part, nn.Linear) else last
    if last is not None:
        left_out.add(id(last.weight))
    left_out.update(id(parameter) for name, parameter in named if "embed" in name.lower())
    return [id(p) for _, p in named if p.dim() == 2 and id(p) not in left_out]
