"""Conversion of every result of ``configure_optimizers`` to one optimizer and one schedule."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Tuple, Union

import torch

from ipufit.errors import ConfigurationError, unfit
from ipufit.lightning_module.inspection import overrides
from ipufit.lightning_module.logging import attached, no_log
from ipufit.optim.schedules.resolve import AtEpochEnd, EveryBatches

_KEYS = {
    *("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"),
}
_FORMS = (
    "Return an optimizer, [optimizer], ([optimizer], [scheduler]) or a dict with 'optimizer' and "
    "perhaps 'lr_scheduler'."
)


def configure_optimizer(
    module: Any, facts: object
) -> Tuple[Optional[torch.optim.Optimizer], Union[AtEpochEnd, EveryBatches, None]]:
    """Call ``configure_optimizers``.

    Args:
        module: a LightningModule.
        facts: what ``self.trainer`` is while it runs.

    Returns:
        The optimizer, and a schedule as ``compile`` takes it; None for none.

    Raises:
        ConfigurationError: several optimizers, or what a program can't honour.
    """
    optimizers, schedulers, monitor = _configured(module, facts)
    if not optimizers:
        return None, None
    if len(optimizers) != 1:
        raise ConfigurationError(
            f"configure_optimizers must return one optimizer, got {len(optimizers)}: with "
            "automatic optimization Lightning has only one, too. Use several parameter groups, "
            "torch.optim.Adam([{'params': ..., 'lr': ...}, ...]), or set automatic_optimization "
            "= False and make the steps in training_step."
        )
    optimizer = optimizers[0]
    if not schedulers:
        return optimizer, None
    if len(schedulers) > 1:
        raise ConfigurationError(
            f"configure_optimizers must return one scheduler, got {len(schedulers)}. Combine them "
            "with torch.optim.lr_scheduler.ChainedScheduler or SequentialLR."
        )
    return optimizer, _schedule(schedulers[0], monitor)


def configure_manual(module: Any, facts: object) -> List[torch.optim.Optimizer]:
    """Call ``configure_optimizers`` of a module that makes the steps itself.

    Args:
        module: a LightningModule.
        facts: what ``self.trainer`` is while it runs.

    Raises:
        ConfigurationError: there is a scheduler, or no optimizer.
    """
    optimizers, schedulers, _ = _configured(module, facts)
    kind = type(module).__name__
    if not optimizers:
        raise ConfigurationError(
            f"{kind} has automatic_optimization = False, so configure_optimizers must return the "
            "optimizers that training_step uses, got none."
        )
    if schedulers:
        raise ConfigurationError(
            f"{kind} has automatic_optimization = False, so training_step would have to step the "
            "scheduler, but training_step is recorded once. Return only the optimizers, and pass "
            "optimizer and lr_scheduler to compile."
        )
    return optimizers


def _configured(
    module: Any, facts: object
) -> Tuple[List[torch.optim.Optimizer], List[object], Optional[str]]:
    """Call ``configure_optimizers``: optimizers, schedulers, and the monitor of a dict."""
    if not overrides(module, "configure_optimizers"):
        return [], [], None
    with attached(module, facts, no_log("configure_optimizers")):
        result = module.configure_optimizers()
    if result is None:
        return [], [], None
    optimizers, schedulers, monitor = _taken_apart(result)
    return [getattr(each, "optimizer", each) for each in optimizers], schedulers, monitor


def _taken_apart(result: object) -> Tuple[List[Any], List[object], Optional[str]]:
    """Return opimizers, schedulers, and the monitor of a dict."""
    if isinstance(result, torch.optim.Optimizer):
        return [result], [], None
    if isinstance(result, Mapping):
        return _of_dict(result)
    if isinstance(result, (list, tuple)) and result:
        if len(result) == 2 and isinstance(result[0], (list, tuple)):
            second = result[1]
            both = list(second) if isinstance(second, (list, tuple)) else [second]
            return list(result[0]), both, None
        if all(isinstance(each, Mapping) for each in result):
            parts = [_of_dict(each) for each in result]
            monitor = parts[0][2] if len(parts) == 1 else None
            return [p[0][0] for p in parts], [s for p in parts for s in p[1]], monitor
        if all(isinstance(each, torch.optim.Optimizer) for each in result):
            return list(result), [], None
    raise ConfigurationError(
        f"configure_optimizers returned {type(result).__name__}, which is not an accepted form. "
        f"{_FORMS}"
    )


def _of_dict(result: Mapping[str, Any]) -> Tuple[List[Any], List[object], Optional[str]]:
    unknown = sorted(set(result) - {"optimizer", "lr_scheduler", "monitor"})
    if "optimizer" not in result or unknown:
        raise ConfigurationError(
            "configure_optimizers may return a dict with 'optimizer', 'lr_scheduler' and "
            f"'monitor', got {', '.join(map(repr, result)) or 'nothing'}. {_FORMS}"
        )
    scheduler = result.get("lr_scheduler")
    return [result["optimizer"]], [] if scheduler is None else [scheduler], result.get("monitor")


def _schedule(returned: object, monitor: Optional[str]) -> Union[AtEpochEnd, EveryBatches]:
    """Convert a scheduler, or Lightning's dict around one."""
    settings = returned if isinstance(returned, Mapping) else {"scheduler": returned}
    if set(settings) - _KEYS or "scheduler" not in settings:
        raise ConfigurationError(
            f"the dict of a scheduler must have 'scheduler' and may have "
            f"{', '.join(sorted(_KEYS - {'scheduler'}))}, got {', '.join(settings)}. Correct it."
        )
    config = {"interval": "epoch", "frequency": 1, "monitor": monitor, **settings}
    scheduler, frequency = config["scheduler"], config["frequency"]
    watches = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    _check(config, watches)
    if watches:
        return AtEpochEnd(scheduler, config["monitor"], frequency)
    if config["interval"] == "step":
        return EveryBatches(scheduler, frequency)
    return AtEpochEnd(scheduler, frequency=frequency)


def _check(config: Mapping[str, Any], watches: bool) -> None:
    interval = config["interval"]
    if interval not in ("step", "epoch"):
        raise unfit("the interval of a scheduler", "'step' or 'epoch'", interval)
    if watches and interval == "step":
        raise ConfigurationError(
            "ReduceLROnPlateau must have interval 'epoch', got 'step': the learning rates of an "
            "execution are chosen before it computes the monitored value. Leave interval out, and "
            "use steps_per_epoch of fit for shorter epochs."
        )
    if watches and config["monitor"] is None:
        raise ConfigurationError(
            "ReduceLROnPlateau must have a monitor, got none. Return {'optimizer': ..., "
            "'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}."
        )
    if config.get("strict", True) is not True:
        raise ConfigurationError(
            "a scheduler must have strict=True, got False: a missing monitored value is an error. "
            "Leave it out."
        )
    if bool(config.get("reduce_on_plateau", watches)) != watches:
        raise ConfigurationError(
            "reduce_on_plateau must say whether the scheduler is torch's ReduceLROnPlateau, got "
            f"{config['reduce_on_plateau']!r} for {type(config['scheduler']).__name__}. Leave it "
            "out."
        )
