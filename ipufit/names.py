"""Names of logged values: those that mean something already, and those given twice."""

from __future__ import annotations

from typing import Container

from ipufit.errors import ConfigurationError

__all__ = ["RESERVED", "check_log_name", "in_validation"]

RESERVED = (
    "epoch",
    "learning_rate",
    "loss",
    "loss_scale",
    "samples",
    "skipped_updates",
    "updates",
)


def check_log_name(name: object, taken: Container[str] = (), exact: bool = False) -> str:
    """Make sure that a value can be logged under this name.

    Args:
        name: of a metric, a part of the loss, or a value logged by hand.
        taken: names that others have.
        exact: whether validation puts no "val_" before it, so that it may begin with that, and
            may be "loss".

    Returns:
        The name.

    Raises:
        ConfigurationError: no text, reserved, or taken.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"a logged value must have a text as its name, got {name!r}. Write for example 'error'."
        )
    is_ours = name in RESERVED or name.startswith("val_")
    if is_ours and not (exact and (name == "loss" or name not in RESERVED)):
        raise ConfigurationError(
            "a logged value must have a name of its own, and ipufit itself logs "
            f"{', '.join(RESERVED)} and val_..., got {name!r}. Choose another name; that of a "
            "metric with metrics={'name': metric}."
        )
    if name in taken:
        raise ConfigurationError(
            f"logged values must have different names, got {name!r} twice. Choose another name; "
            f"that of a metric with metrics={{'{name}_2': metric}}."
        )
    return name


def in_validation(name: str, exact: bool, trained: Container[str]) -> str:
    """What a value of a validation is called beside those of training.

    Args:
        name: as it was logged.
        exact: whether it keeps its name where it can.
        trained: names of the values of training.
    """
    return name if exact and name not in trained else f"val_{name}"
