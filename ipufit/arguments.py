"""The arguments of ``fit``, ``evaluate`` and ``predict``, checked together before anything runs."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, List, Optional, Tuple, Union

import torch

from ipufit.callbacks import Callback
from ipufit.callbacks.callback_list import checked
from ipufit.data.source import Source
from ipufit.errors import ConfigurationError
from ipufit.faults import Faults
from ipufit.plan import Plan
from ipufit.randomness import draw_seed
from ipufit.session import Session
from ipufit.verbosity import resolve_verbose

__all__ = ["FitArguments", "InferenceArguments", "one_of"]


@dataclasses.dataclass(frozen=True)
class InferenceArguments:
    """What ``evaluate`` or ``predict`` was asked for, known to be right.

    Attributes:
        source: the loader.
        plan: its batch algebra.
        callbacks: a list.
        seed: an integer.
        level: how much to print: 0, 1 or 2.
    """

    source: Source
    plan: Plan
    callbacks: List[Callback]
    seed: int
    level: int

    @staticmethod
    def check(
        session: Session,
        source: Source,
        ipus: Any,
        device_iterations: Any,
        callbacks: Any,
        seed: Any,
        verbose: Union[int, str],
    ) -> InferenceArguments:
        """Raise all faults at once, or return the arguments."""
        faults = Faults()
        with faults.collected():
            plan = session.plan(source, ipus, device_iterations, 1, training=False)
        with faults.collected():
            callbacks = checked(callbacks)
        with faults.collected():
            seed = _seed(seed, "an integer")
        with faults.collected():
            level = resolve_verbose(verbose)
        faults.raise_all()
        return InferenceArguments(source, plan, callbacks, seed, level)


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """What ``fit`` was asked for, known to be right.

    Attributes:
        source: the loader.
        plan: its batch algebra.
        held_out: the loader for validation and its batch algebra, or None.
        first_epoch, last_epoch: epochs from the first up to, not including, the last.
        callbacks: a list.
        seed: given, or drawn.
        level: how much to print: 0, 1 or 2.
    """

    source: Source
    plan: Plan
    held_out: Optional[Tuple[Source, Plan]]
    first_epoch: int
    last_epoch: int
    callbacks: List[Callback]
    seed: int
    level: int

    @staticmethod
    def check(
        session: Session,
        x: Any,
        epochs: Any,
        ipus: Any,
        device_iterations: Any,
        gradient_accumulation: Any,
        validation_data: Any,
        inference_ipus: Any,
        inference_device_iterations: Any,
        callbacks: Any,
        initial_epoch: Any,
        seed: Any,
        verbose: Union[int, str],
    ) -> FitArguments:
        """Raise all faults at once, or return the arguments."""
        if torch.is_inference_mode_enabled():
            raise ConfigurationError(
                "fit needs gradients, which torch.inference_mode() switches off for good. Call it "
                "outside of that block; evaluate and predict need no such block."
            )
        source = Source(x, "training data")
        held_out = None
        if validation_data is not None:
            held_out = Source(validation_data, "validation data")
        own = {"ipus": inference_ipus, "device_iterations": inference_device_iterations}
        own = {name: value for name, value in own.items() if value is not None}
        faults = Faults()
        with faults.collected():
            first, last = _epochs(initial_epoch, epochs)
        with faults.collected():
            plan = session.plan(source, ipus, device_iterations, gradient_accumulation, True)
        with faults.collected():
            callbacks = checked(callbacks)
        with faults.collected():
            seed = None if seed is None else _seed(seed, "an integer or None")
        with faults.collected():
            level = resolve_verbose(verbose)
        with faults.collected(inference=list(own)):
            shared = {"ipus": ipus, "device_iterations": device_iterations}
            inference = session.plan(
                held_out or source, **{**shared, **own}, gradient_accumulation=1, training=False
            )
        with faults.collected():
            _refuse_unused(own, held_out)
        faults.raise_all()
        source.check_epochs(last - first)
        if held_out is not None:
            held_out.check_epochs(last - first)
        return FitArguments(
            source=source,
            plan=plan,
            held_out=(held_out, inference) if held_out is not None else None,
            first_epoch=first,
            last_epoch=last,
            callbacks=callbacks,
            seed=draw_seed() if seed is None else seed,
            level=level,
        )


def one_of(name: str, value: object, choices: Tuple[object, ...]) -> None:
    """Raise unless the value is one of the choices.

    Raises:
        ConfigurationError: naming them.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigurationError(
            f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}."
        )


def _refuse_unused(own: Any, held_out: Optional[Source]) -> None:
    if own and held_out is None:
        names = " and ".join(f"inference_{name}" for name in own)
        raise ConfigurationError(
            f"{names} set how validation_data is evaluated, but there is none. Pass "
            "validation_data, or leave them out."
        )


def _epochs(initial_epoch: Any, epochs: Any) -> Tuple[int, int]:
    for name, value, least in (("epochs", epochs, 1), ("initial_epoch", initial_epoch, 0)):
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise ConfigurationError(
                f"{name} must be an integer of at least {least}, got {value!r}."
            )
    if initial_epoch >= epochs:
        raise ConfigurationError(
            f"epochs is the index to stop before, so it must be more than initial_epoch "
            f"({initial_epoch}), got {epochs}. Try {initial_epoch + 1}."
        )
    return operator.index(initial_epoch), operator.index(epochs)


def _seed(seed: Any, allowed: str) -> int:
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise ConfigurationError(f"seed must be {allowed}, got {seed!r}.")
    return operator.index(seed)
