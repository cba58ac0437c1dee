"""Parameters with a prefix: ``module__hidden``, ``optimizer__lr``, ``compile__jit``."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Iterable, List, Mapping

from ipufit.errors import ConfigurationError, IpufitError, UnknownNameError
from ipufit.faults import Faults
from ipufit.model import Model

__all__ = ["GROUPS", "check_names", "group_of", "is_setting", "settings_of"]

# What the names after each prefix are arguments of.
GROUPS = ("module", "optimizer", "compile", "fit")

# Arguments that have parameters without a prefix, or that the estimator gives itself.
_TAKEN: Dict[str, Iterable[str]] = {
    "compile": ("optimizer", "loss", "metrics"),
    "fit": (
        *("x", "y", "sample_weight", "class_weight", "batch_size", "epochs", "initial_epoch"),
        *("ipus", "device_iterations", "gradient_accumulation", "callbacks", "seed", "verbose"),
        *("validation_data", "validation_split"),
    ),
}


def is_setting(name: str) -> bool:
    """Whether it is the name of a parameter with a prefix."""
    prefix, delimiter, rest = name.partition("__")
    return bool(delimiter and rest) and prefix in GROUPS


def check_names(owner: str, names: Iterable[str]) -> None:
    """Refuse what is no parameter, as Python does with an unknown keyword.

    Raises:
        TypeError: one of the names has none of the prefixes.
    """
    for name in names:
        if not is_setting(name):
            raise TypeError(
                f"{owner} got an unexpected keyword argument {name!r}. Arguments of the module, "
                "the optimizer, Model.compile and Model.fit have a prefix: module__, optimizer__, "
                "compile__, fit__."
            )


def settings_of(estimator: object) -> Dict[str, Any]:
    """All parameters with a prefix, by full name."""
    return {name: value for name, value in vars(estimator).items() if is_setting(name)}


def group_of(estimator: object, group: str) -> Dict[str, Any]:
    """The parameters with one prefix, which is left away.

    Raises:
        ConfigurationError: names that ``Model.compile`` or ``Model.fit`` don't have, or that go
            without a prefix here; all of them.
    """
    start = f"{group}__"
    own = {
        name[len(start) :]: value
        for name, value in settings_of(estimator).items()
        if name.startswith(start)
    }
    if group in _TAKEN:
        _check_options(group, own, Model.compile if group == "compile" else Model.fit)
    return own


def _check_options(group: str, own: Mapping[str, Any], call: Callable[..., Any]) -> None:
    known: List[str] = [name for name in inspect.signature(call).parameters if name != "self"]
    free = [name for name in known if name not in _TAKEN[group]]
    faults = Faults()
    for name in own:
        with faults.collected():
            _check_option(group, name, known, free)
    faults.raise_all()


def _check_option(group: str, name: str, known: List[str], free: List[str]) -> None:
    if name in free:
        return
    if name not in known:
        raise UnknownNameError(f"option of Model.{group}", name, free)
    raise _taken(group, name)


def _taken(group: str, name: str) -> IpufitError:
    return ConfigurationError(
        f"{group}__{name} must not be given: the estimator decides on {name} itself. Use its own "
        "parameters, or the arguments of its fit."
    )
