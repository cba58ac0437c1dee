"""Implementations of ``self.log``, for steps that are being recorded and for hooks."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, Optional, Tuple, Union

import torch
from torch import Tensor, nn

from ipufit.core.logged_values import LogRule, check_value, report
from ipufit.errors import ConfigurationError
from ipufit.lightning_module.inspection import (
    MetricObject,
    is_collection,
    is_metric,
    lightning_parts,
)
from ipufit.lightning_module.metric_calls import MetricCalls, MetricValue
from ipufit.lightning_module.trainer_proxy import replace_attributes
from ipufit.utils.names import check_log_name

Log = Callable[..., None]
Notes = Dict[str, Dict[str, object]]
# Besides a stand-in for the result of a metric, which only a step has.
Number = Union[float, Tensor, MetricObject]

_REDUCTIONS = {
    **dict.fromkeys(("mean", "avg", torch.mean), "mean"),
    **dict.fromkeys(("sum", sum, torch.sum), "sum"),
    **dict.fromkeys(("max", max, torch.max), "max"),
    **dict.fromkeys(("min", min, torch.min), "min"),
}


@contextlib.contextmanager
def attached(
    module: nn.Module, trainer: object, log: Log, more: Optional[Mapping[str, object]] = None
) -> Iterator[None]:
    """Replace ``self.trainer``, ``self.log`` and ``self.log_dict`` in the block.

    Args:
        module: a LightningModule; those inside it get the same.
        trainer: what stands in for a Trainer.
        log: takes the arguments of ``LightningModule.log``.
        more: other attributes to replace, by name.
    """

    def log_dict(dictionary: object, *args: object, **options: object) -> None:
        items: Iterable[Tuple[object, object]]
        if is_collection(dictionary):
            items = zip(dictionary.keys(), dictionary.values(copy_state=False))
        elif isinstance(dictionary, Mapping):
            items = dictionary.items()
        else:
            raise ConfigurationError(
                "self.log_dict takes a dict of names and values, or a MetricCollection, got "
                f"{type(dictionary).__name__}. Pass one of these."
            )
        for name, value in items:
            log(name, value, *args, **options)

    attributes = {"_trainer": trainer, "log": log, "log_dict": log_dict, **(more or {})}
    with replace_attributes([(part, attributes) for part in lightning_parts(module)]):
        yield


def step_log(role: str, size: int, metrics: MetricCalls, notes: Optional[Notes] = None) -> Log:
    """Make ``self.log`` of a step, by which a value becomes part of the program.

    Args:
        role: "train", "validation" or "test".
        size: of the micro-batch, in samples.
        metrics: writes down what is logged of metric objects.
        notes: where a Trainer keeps the values, how each was logged, by name; else None. It
            computes those of metric objects itself.
    """
    trains = role == "train"

    def log(
        name: str,
        value: Union[Number, MetricValue],
        prog_bar: bool = False,
        logger: Optional[bool] = None,
        on_step: Optional[bool] = None,
        on_epoch: Optional[bool] = None,
        reduce_fx: object = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: object = None,
        add_dataloader_idx: bool = True,
        batch_size: Optional[int] = None,
        metric_attribute: Optional[str] = None,
        rank_zero_only: bool = False,
    ) -> None:
        each = trains if on_step is None else bool(on_step)
        whole = not trains if on_epoch is None else bool(on_epoch)
        _check(name, value, each or whole)
        attribute = None if is_metric(value) else metric_attribute
        _refuse(name, enable_graph, sync_dist_group, attribute, rank_zero_only)
        _check_size(name, batch_size, size)
        reduce = _reduction(name, reduce_fx)
        if notes is not None:
            notes[name] = {"on_step": each, "on_epoch": whole, "reduce_fx": reduce}
            notes[name].update(prog_bar=prog_bar, logger=logger)
        if is_metric(value):
            if reduce != "mean":
                raise ConfigurationError(
                    f"self.log({name!r}) can't honour reduce_fx={reduce!r} for a metric object, "
                    "which computes the value of the epoch itself. Leave it out."
                )
            metrics.log_metric(name, value, each, whole, metric_attribute, notes is not None)
            return
        # The epoch's "loss" is a mean over its samples, whoever logs it.
        last = "mean" if name == "loss" else "last"
        every, epoch = LogRule(last, on_update=True, exact=True), LogRule(reduce, exact=True)
        rules = {name: epoch if whole or notes is not None else every}
        if each and whole and notes is None:
            step = LogRule("last", on_update=True, exact=True)
            rules = {f"{name}_step": step, f"{name}_epoch": epoch, **rules}
        for key, rule in rules.items():
            if isinstance(value, MetricValue):
                metrics.log_value(key, value, rule)
            else:
                report(key, value, rule)

    return log


def hook_log(values: Dict[str, float], computed: Callable[[str, MetricObject], float]) -> Log:
    """Make ``self.log`` of a hook at the end of an epoch, which adds to the values of the epoch.

    Args:
        values: those of the epoch.
        computed: the value of a metric object that is logged under a name.
    """

    def log(name: str, value: Number, *_: object, **options: Any) -> None:
        _check(name, value, True)
        _refuse(name, **options)
        _reduction(name, options.get("reduce_fx", "mean"))
        if options.get("on_step"):
            raise ConfigurationError(
                f"self.log({name!r}, on_step=True) can't be called at the end of an epoch, which "
                "is not a step. Leave on_step out."
            )
        values[name] = computed(name, value) if is_metric(value) else float(value)

    return log


def no_log(where: str) -> Log:
    """Make ``self.log`` of a method in which nothing can be logged."""

    def log(name: object, *_: object, **__: object) -> None:
        raise ConfigurationError(
            f"self.log({name!r}) can't be called in {where}, where there is no epoch for the value "
            "to belong to. Log in training_step, validation_step, test_step or an on_..._epoch_end."
        )

    return log


def _check(name: object, value: object, used: bool) -> None:
    check_log_name(name, exact=True)
    if not is_metric(value) and not isinstance(value, MetricValue):
        check_value(name, value)
    if not used:
        raise ConfigurationError(
            f"self.log({name!r}, on_step=False, on_epoch=False) would log nothing. Leave one of "
            "them out."
        )


def _refuse(
    name: str,
    enable_graph: bool = False,
    sync_dist_group: object = None,
    metric_attribute: object = None,
    rank_zero_only: bool = False,
    **_: object,
) -> None:
    refused = {
        "enable_graph": (enable_graph, "no gradient flows through a logged value"),
        "sync_dist_group": (sync_dist_group is not None, "values are those of all processes"),
        "metric_attribute": (metric_attribute is not None, "the value is not a metric object"),
        "rank_zero_only": (rank_zero_only, "values are those of all processes"),
    }
    for option, (is_given, why) in refused.items():
        if is_given:
            raise ConfigurationError(
                f"self.log({name!r}) can't honour {option}: {why}. Leave it out."
            )


def _check_size(name: str, batch_size: object, size: int) -> None:
    if batch_size is None or (type(batch_size) is int and batch_size == size):
        return
    raise ConfigurationError(
        f"self.log({name!r}) weights a value with the number of samples in its micro-batch, "
        f"{size}, got batch_size={batch_size!r}. Leave batch_size out; for another mean, log a sum "
        "and a count with reduce_fx='sum'."
    )


def _reduction(name: str, reduce_fx: object) -> str:
    key = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    try:
        return _REDUCTIONS[key]
    except (KeyError, TypeError):
        raise ConfigurationError(
            f"self.log({name!r}) can reduce with 'mean', 'sum', 'max' or 'min', got "
            f"reduce_fx={reduce_fx!r}. Use one of these."
        ) from None
