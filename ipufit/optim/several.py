"""Several optimizers as one, each over parameters of its own."""

from __future__ import annotations

import collections
import inspect
from typing import (
    Any,
    Callable,
    ChainMap,
    Dict,
    Iterable,
    List,
    Mapping,
    MutableMapping,
    Optional,
    Sequence,
    Tuple,
    Type,
)

import torch
from torch import nn

from ipufit.errors import ConfigurationError, OptimizerError
from ipufit.utils.names import matches_pattern

NamedParameters = Sequence[Tuple[str, nn.Parameter]]

# Names of parameters that an error shows.
_SHOWN = 5

# Pattern of all parameters that no other one matches.
_REST = "*"


class _MultiState(ChainMap[torch.Tensor, object]):
    """The states of several optimizers as one: a parameter's is in that of its optimizer."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # A ChainMap begins with the keys of its last map.
        super().__init__(*[each.state for each in reversed(optimizers)])
        self._optimizers = optimizers

    def _of(self, key: torch.Tensor) -> Dict[torch.Tensor, object]:
        """The state that has a parameter, or is to have it."""
        for each in self._optimizers:
            if key in each.state:
                return each.state
        for each in self._optimizers:
            if any(p is key for group in each.param_groups for p in group["params"]):
                return each.state
        raise KeyError(key)

    def __getitem__(self, key: torch.Tensor) -> object:
        return self._of(key)[key]

    def __setitem__(self, key: torch.Tensor, value: object) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: torch.Tensor) -> None:
        del self._of(key)[key]

    # Not those of a ChainMap, which change its first map only.
    pop = MutableMapping.pop  # type: ignore[assignment]
    popitem = MutableMapping.popitem
    clear = MutableMapping.clear


class MultiOptimizer(torch.optim.Optimizer):
    """Several torch optimizers that make one update together.

    Its parameter groups are those of all of them in a row, and its state is theirs, so code that
    sets a learning rate or saves the state sees one optimizer, and each of them can be used by
    itself.

    Args:
        optimizers: by name, over disjoint parameters.

    Attributes:
        optimizers: as passed.
        choice: text that says which parameters each of them has, if ipufit has chosen; otherwise
            empty.
    """

    optimizers: Dict[str, torch.optim.Optimizer]
    choice: str

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        # Not torch's own __init__, which makes groups and a state.
        self.__setstate__({"optimizers": dict(optimizers), "choice": "", "defaults": {}})

    @property
    def param_groups(self) -> List[Dict[str, object]]:  # type: ignore[override]
        """The parameter groups of all optimizers, in their order; a new list each time."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @property
    def state(self) -> MutableMapping[torch.Tensor, object]:  # type: ignore[override]
        """The state of all optimizers, by parameter."""
        return _MultiState([*self.optimizers.values()])

    def add_param_group(self, param_group: Dict[str, object]) -> None:
        """Refuse a group, which must belong to one of the optimizers.

        Args:
            param_group: for all of them.

        Raises:
            OptimizerError: always.
        """
        name, params = next(iter(self.optimizers)), param_group.get("params", ())
        count = len(list(params)) if isinstance(params, collections.abc.Iterable) else 0
        raise OptimizerError(
            "a parameter group must belong to one of several optimizers, got one for all (number "
            f"of parameters: {count}). Call add_param_group of one of them, such as "
            f"model.optimizer.optimizers[{name!r}]."
        )

    def _switch(self, mode: str) -> None:
        for each in self.optimizers.values():
            if hasattr(each, mode):
                getattr(each, mode)()

    def __getstate__(self) -> Dict[str, Any]:
        return {name: getattr(self, name) for name in ("optimizers", "choice", "defaults")}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        if "optimizers" in state:
            super().__setstate__(state)
            members = self.optimizers.values()
            if any(hasattr(each, "train") and hasattr(each, "eval") for each in members):
                self.train: Callable[[], None] = lambda: self._switch("train")
                self.eval: Callable[[], None] = lambda: self._switch("eval")
            return
        # What torch's load_state_dict has made.
        for name, indices in groups_of_members(self).items():
            groups = [state["param_groups"][index] for index in indices]
            parameters = {id(p) for group in groups for p in group["params"]}
            values = {
                key: value
                for key, value in state["state"].items()
                if id(key) in parameters or not isinstance(key, torch.Tensor)
            }
            member_state = collections.defaultdict(dict, values)
            self.optimizers[name].__setstate__({"state": member_state, "param_groups": groups})

    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:  # type: ignore[override]
        """Call the step of every optimizer.

        Args:
            closure: computes the loss again; called once, before all of them.

        Returns:
            What it returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers.values():
            each.step()
        return loss


def members_of(optimizer: torch.optim.Optimizer) -> Dict[str, torch.optim.Optimizer]:
    """The optimizers that an optimizer is made of, by name; of a plain one, itself."""
    return optimizer.optimizers if isinstance(optimizer, MultiOptimizer) else {"": optimizer}


def refuse_unknown_members(
    argument: str, names: Iterable[str], optimizer: torch.optim.Optimizer
) -> None:
    """Make sure that what is set for single optimizers is so for some that there are.

    Raises:
        ConfigurationError: it is not.
    """
    members = members_of(optimizer)
    for name in names:
        if name not in members:
            there = ", ".join(map(repr, filter(None, members))) or "only one, without a name"
            raise ConfigurationError(
                f"{argument} must name existing optimizers, got {name!r}. There is {there}."
            )


def name_of_optimizer(optimizer: Optional[torch.optim.Optimizer]) -> str:
    """The class of an optimizer, or the classes of those that it is made of, for people."""
    if isinstance(optimizer, MultiOptimizer):
        return " + ".join(type(each).__name__ for each in optimizer.optimizers.values())
    return type(optimizer).__name__


def groups_of_members(optimizer: torch.optim.Optimizer) -> Dict[str, range]:
    """For each of the optimizers that one is made of the indices of its parameter groups."""
    indices, start = {}, 0
    for name, each in members_of(optimizer).items():
        indices[name] = range(start, start + len(each.param_groups))
        start = indices[name].stop
    return indices


def index_of_group(optimizer: torch.optim.Optimizer) -> Dict[int, int]:
    """For each parameter of an optimizer, by identity, the index of its group."""
    groups = optimizer.param_groups
    return {id(p): index for index, group in enumerate(groups) for p in group["params"]}


def settings_of(group: Mapping[str, object]) -> Dict[str, object]:
    """The settings of a parameter group, all but "params"; tensors of one element as numbers."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for name, value in group.items()
        if name != "params"
    }


def kinds_by_group(optimizer: torch.optim.Optimizer) -> List[Type[torch.optim.Optimizer]]:
    """For each parameter group the class of the optimizer that it belongs to."""
    members = members_of(optimizer).values()
    return [type(each) for each in members for _ in each.param_groups]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether there are hooks on an optimizer's step."""
    hooks = vars(optimizer)
    return bool(hooks.get("_optimizer_step_pre_hooks") or hooks.get("_optimizer_step_post_hooks"))


def evaluates_again(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer's step needs a closure that evaluates the loss again.

    Of one that has a default, this is so if the step calls it and never asks whether it is there.
    """
    step = inspect.unwrap(type(optimizer).step)
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        return closure is not None
    try:
        text = "" if step.__module__.startswith("torch.") else inspect.getsource(step)
    except (OSError, TypeError):  # typed at a prompt, or compiled
        return False
    return "closure()" in text and not (" if closure" in text or " if not closure" in text)


def refuse_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse hooks on an optimizer's step, which this program would never call.

    Raises:
        OptimizerError: there are hooks on ``step``.
    """
    for each in (optimizer, *members_of(optimizer).values()):
        if has_step_hooks(each):
            raise OptimizerError(
                f"hooks on the step of {type(each).__name__} can't run, because the program does "
                "not call step. Remove them, or do their work in a callback."
            )


def by_patterns(patterns: Iterable[str], named: NamedParameters) -> Dict[str, NamedParameters]:
    """Divide the parameters of a module by patterns of their names.

    Args:
        patterns: each a name, the name of a module, or a pattern of fnmatch; "*" are all that no
            other one matches.
        named: all parameters and their names; tied ones may have several.

    Raises:
        OptimizerError: a pattern matches nothing, or a trainable parameter belongs to two of them
            or to none; with the names.
    """
    names: Dict[int, List[str]] = {}
    parameters: Dict[int, nn.Parameter] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    owners: Dict[int, List[str]] = {
        key: [p for p in patterns if p != _REST and any(matches_pattern(n, p) for n in those)]
        for key, those in names.items()
    }
    twice = {names[key][0]: those for key, those in owners.items() if len(those) > 1}
    if twice:
        name, both = next(iter(twice.items()))
        raise OptimizerError(
            f"each parameter must belong to one optimizer, but {name!r} belongs to those of "
            f"{both[0]!r} and {both[1]!r}{_more(list(twice))}. The patterns must not overlap."
        )
    rest = [key for key, those in owners.items() if not those]
    if _REST in patterns:
        owners.update({key: [_REST] for key in rest})
    left_out = [names[key][0] for key in rest if parameters[key].requires_grad]
    if left_out and _REST not in patterns:
        raise OptimizerError(
            f"each parameter must belong to one optimizer, but {left_out[0]!r} belongs to "
            f"none{_more(left_out)}. Add a pattern for it, '*' for all the others, or freeze it "
            "with requires_grad_(False)."
        )
    divided: Dict[str, NamedParameters] = {}
    for pattern in patterns:
        divided[pattern] = [
            (names[key][0], parameters[key]) for key, those in owners.items() if those == [pattern]
        ]
        if not any(parameter.requires_grad for _, parameter in divided[pattern]):
            came = "only frozen ones" if divided[pattern] else "none"
            shown = ", ".join(repr(those[0]) for those in list(names.values())[:_SHOWN])
            raise OptimizerError(
                f"each pattern of optimizer must match trainable parameters of the module, but "
                f"{pattern!r} matches {came}. Its parameters are {shown}"
                f"{', ...' if len(names) > _SHOWN else ''}."
            )
    return divided


def _more(names: Sequence[str]) -> str:
    """Name further parameters, in brackets."""
    others = ", ".join(map(repr, names[1:_SHOWN]))
    dots = ", ..." if len(names) > _SHOWN else ""
    return f" (and so {'does' if len(names) == 2 else 'do'} {others}{dots})" if others else ""
