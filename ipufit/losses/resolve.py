"""From what the user may pass as loss to its normal form."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import Any, Callable, Dict, List, Literal, Mapping, Optional, Sequence, Tuple

from torch import nn

from ipufit.core.objective_arguments import (
    argument_order,
    is_running_metric,
    keyword_names,
    required_names,
)
from ipufit.core.outputs import Key, label
from ipufit.errors import ConfigurationError, LossError, shown
from ipufit.losses.call import Call, CallLoss, arguments_of
from ipufit.losses.loss import Loss, WholeBatch
from ipufit.losses.named import by_name
from ipufit.losses.train_step import TrainStep, resolve_steps
from ipufit.utils.error_collector import as_float
from ipufit.utils.names import check_log_name

_REDUCTIONS: Dict[str, Literal["mean", "sum"]] = {
    "mean": "mean",
    "batchmean": "mean",
    "sum": "sum",
}


def resolve_loss(
    loss: object,
    loss_weights: object = None,
    normalize: str = "samples",
    sample_weight_reduction: str = "sum_over_batch_size",
) -> Loss:
    """Bring a loss into normal form.

    Args:
        loss: a name; an ``nn.Module``, kept as it is, or such a class that takes no arguments; a
            callable ``(prediction, target)`` that returns a number, or one value per sample, which
            are averaged; or None, when the module returns ``(outputs, loss)``. Names of parameters
            such as ``y_true, y_pred`` say another order: see :func:`argument_order`. A named loss
            is the function of ``torch.nn.functional`` that bears its name, averaged ("kl_div": over
            the samples, "batchmean"). Several losses are a dict by name of the module's outputs or
            a list by position, None for an output that is not trained.
        loss_weights: of several losses, a dict or list of numbers; 1 by default.
        normalize: what the micro-batches of an update are weighted with: "samples",
            "micro_batches" (all count the same) or "tokens" (the elements that count in the loss).
        sample_weight_reduction: "sum_over_batch_size" divides the weighted sum by the number of
            elements, "mean_with_sample_weight" by the sum of their weights.

    Raises:
        UnknownNameError: no loss has that name; of Keras' losses on probabilities, it tells which
            to use instead.
        LossError: a reduction that leaves more than one number, or something that is no loss.
        ConfigurationError: options that don't go together.
    """
    if loss_weights is not None:
        _refuse_metrics(loss_weights)
    options: Dict[str, Any] = {
        "normalize": normalize,
        "sample_weight_reduction": sample_weight_reduction,
    }
    if isinstance(loss, TrainStep):
        return _of_steps([loss], loss_weights, options)
    if isinstance(loss, (list, tuple)) and any(isinstance(each, TrainStep) for each in loss):
        return _of_steps(loss, loss_weights, options)
    if isinstance(loss, (list, tuple, Mapping)) and not isinstance(loss, str):
        return _several(loss, loss_weights, options)
    if loss_weights is not None:
        raise ConfigurationError(
            f"loss_weights is for a dict or list of losses, got {shown(loss_weights)} with one "
            "loss. Leave it out, or multiply in a callable loss."
        )
    resolved = dataclasses.replace(_one(loss), **options)
    _check_options(resolved)
    return resolved


def _refuse_metrics(loss_weights: object) -> None:
    """Refuse what only metrics can be, where positions of Keras 2 were meant."""
    entries = loss_weights if isinstance(loss_weights, (list, tuple)) else [loss_weights]
    if any(isinstance(each, str) or callable(each) for each in entries):
        raise ConfigurationError(
            f"loss_weights must be numbers, got {shown(loss_weights)}. As positional arguments, "
            "metrics come after loss_weights, as in Keras 3. Write metrics=[...]."
        )


def _check_options(loss: Loss) -> None:
    by_weight = loss.sample_weight_reduction == "mean_with_sample_weight"
    if loss.in_module and by_weight:
        raise ConfigurationError(
            "sample_weights='mean_with_sample_weight' needs a loss that is passed to compile, got "
            "loss=None. Leave it out: the module weights its samples itself."
        )
    if loss.reduction == "sum" and (by_weight or loss.normalize == "tokens"):
        option = (
            "normalize='tokens'"
            if loss.normalize == "tokens"
            else "sample_weights='mean_with_sample_weight'"
        )
        raise LossError(
            f"loss {loss.name!r} must be a mean for {option}, got reduction='sum'. Use "
            "reduction='mean', or leave the option out."
        )
    if _is_keras_loss(loss.function) and loss.takes_weight and loss.reduction == "mean":
        keras = loss.function.reduction  # type: ignore[union-attr]
        if (keras == "mean_with_sample_weight") is not by_weight:
            raise LossError(
                f"loss {loss.name!r} of Keras must have the reduction of compile, got "
                f"reduction={keras!r} with sample_weights={loss.sample_weight_reduction!r}. Use "
                "the same for both."
            )


def _one(loss: object) -> Loss:
    """Bring one loss into normal form, its options aside."""
    if isinstance(loss, Loss):
        return loss
    if loss is None:
        return Loss("the module's own loss", in_module=True)
    if isinstance(loss, WholeBatch):
        return Loss("the module's own loss", in_module="whole")
    names: Optional[Mapping[str, object]] = None
    if isinstance(loss, Call):
        names, loss = loss.names, loss.loss
    if isinstance(loss, str):
        named = by_name(loss)
        resolved = Loss(named.name, function=named)
        return resolved if names is None else _with_order(resolved, named, names)
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        loss = _instantiate(loss)
    if isinstance(loss, nn.Module):
        name = type(loss).__name__
        reduction = _reduction(name, getattr(loss, "reduction", None))
        takes = "sample_weight" in keyword_names(loss.forward)
        resolved = Loss(name, module=loss, reduction=reduction, takes_weight=takes)
        return _with_order(resolved, loss.forward, names)
    if callable(loss) and not isinstance(loss, type):
        keywords = loss.keywords if isinstance(loss, functools.partial) else {}
        inner = loss.func if isinstance(loss, functools.partial) else loss
        name = getattr(inner, "__name__", type(inner).__name__)
        if is_running_metric(loss):
            raise LossError(
                f"a loss must give the value of one micro-batch, got {name}, a metric with "
                "update_state and result, which accumulates over batches. Pass the corresponding "
                "function or loss."
            )
        takes = "sample_weight" not in keywords and "sample_weight" in keyword_names(loss)
        reduction = _reduction(name, keywords.get("reduction"))
        if _is_keras_loss(loss):
            reduction, takes = _keras_reduction(loss, takes)
        resolved = Loss(name, function=loss, reduction=reduction, takes_weight=takes)
        return _with_order(resolved, loss, names)
    came = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
    raise LossError(
        "loss must be a name, an nn.Module, a callable (prediction, target) -> scalar, or None, "
        f"got {came}. Pass for example loss='mse'."
    )


def _is_keras_loss(loss: object) -> bool:
    """Say whether a loss is an object like ``keras.losses.Loss``, which reduces its ``call``."""
    return hasattr(loss, "reduction") and callable(getattr(loss, "call", None))


def _keras_reduction(loss: Any, takes_weight: bool) -> Tuple[Literal["mean", "sum"], bool]:
    """How a loss of Keras joins the samples, and whether it weighs them itself."""
    if loss.reduction in (None, "none"):
        # It gives one value per sample, which are weighted and averaged like a function's.
        return "mean", False
    return "sum" if loss.reduction == "sum" else "mean", takes_weight


def _with_order(
    loss: Loss, call: Callable[..., object], names: Optional[Mapping[str, object]]
) -> Loss:
    """Give a loss the order of its arguments, or their names.

    Args:
        loss: normal form.
        call: what has the parameters.
        names: of a :class:`ipufit.losses.Call`; None of a loss by itself, whose arguments go by
            name where it needs more than two.

    Raises:
        LossError: names that are none of its parameters, or a loss that can't be called.
    """
    needed = [name for name in required_names(call) if name != "sample_weight"]
    if names is not None or len(needed) > 2:
        arguments = arguments_of(loss.name, call, names or {})
        if len(arguments) != 2:
            return CallLoss.of(loss, arguments)
        order = argument_order(call, f"loss {loss.name!r}", LossError)
        return CallLoss.of(dataclasses.replace(loss, order=order), arguments)
    _refuse_few_parameters(loss.name, call)
    order = argument_order(call, f"loss {loss.name!r}", LossError)
    return dataclasses.replace(loss, order=order)


def _refuse_few_parameters(name: str, call: Callable[..., object]) -> None:
    """Refuse a loss that can't be called with a prediction and a target.

    Raises:
        LossError: it takes fewer arguments, or a module and a batch.
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes = [p for p in parameters if p.kind in places or p.default is p.empty]
    takes = [p for p in takes if p.kind is not p.VAR_KEYWORD and p.name != "sample_weight"]
    if [p.name for p in takes[1:]] == ["batch"]:
        raise LossError(
            f"a loss is called with (prediction, target), but {name!r} takes a batch, as a step of "
            f"your own does. Write loss=ipufit.TrainStep({name})."
        )
    if len(takes) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in takes):
        return
    shown = ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)
    raise LossError(
        f"a loss is called with (prediction, target), but {name!r} takes ({shown}). Take both; the "
        "loss need not use the target. For arguments by name, use ipufit.losses.Call."
    )


def _of_steps(steps: Sequence[object], loss_weights: object, options: Mapping[str, Any]) -> Loss:
    """Bring steps of the user's own into normal form."""
    of_users = [step for step in steps if isinstance(step, TrainStep)]
    others = [step for step in steps if not isinstance(step, TrainStep)]
    if others:
        raise ConfigurationError(
            "TrainSteps can't be mixed with other losses, because they take turns, got "
            f"{type(others[0]).__name__} among them. Wrap it: TrainStep(lambda module, batch: "
            "...)."
        )
    if loss_weights is not None:
        raise ConfigurationError(
            f"loss_weights is for losses of outputs, got {shown(loss_weights)} with a TrainStep. "
            "Multiply in the step."
        )
    resolved = resolve_steps(of_users, options)
    _check_options(resolved)
    return resolved


# ---- several losses -----------------------------------------------------------------------------


def _several(loss: Any, loss_weights: object, options: Mapping[str, Any]) -> Loss:
    # Imported here: most models have one loss.
    from ipufit.losses import multi_output

    by_key = isinstance(loss, Mapping)
    items: List[Tuple[Any, object]] = list(loss.items() if by_key else enumerate(loss))
    if options["normalize"] == "tokens":
        raise LossError(
            f"normalize='tokens' needs one loss, got {len(items)}: each would count its own "
            "tokens. Pass one callable loss(prediction, target) that returns (mean, count)."
        )
    weights = _loss_weights(loss_weights, items, by_key)
    parts: List[multi_output.OutputLoss] = []
    log_names: List[str] = []
    for key, entry in items:
        if by_key and (not isinstance(key, str) or not key):
            raise ConfigurationError(
                f"losses as a dict must have names of outputs as keys, got {key!r}. Write "
                "{'output': loss}; for losses by position, a list."
            )
        if isinstance(entry, (list, tuple, Mapping)):
            raise ConfigurationError(
                f"each output must have one loss, got {type(entry).__name__} of {len(entry)} for "
                f"{label(key)!r}. Pass a callable loss(prediction, target) that adds them up."
            )
        log_names.append(check_log_name(f"{label(key)}_loss", log_names))
        if entry is not None:
            one = dataclasses.replace(_one(entry), **options)
            if isinstance(one, CallLoss):
                if not by_key:
                    raise LossError(
                        f"losses in a list are called with (prediction, target), got {one.name!r} "
                        f"for {label(key)!r}, which takes its arguments by name. Pass a dict of "
                        "losses: its keys are the names in the logs."
                    )
                # Of several targets none is the only one.
                one = dataclasses.replace(one, targets=())
            _check_options(one)
            parts.append(multi_output.OutputLoss(key, one, weights[key]))
    if not parts:
        raise LossError(
            f"at least one output must have a loss, got {loss!r}. Pass for example "
            "loss={'output': 'mse'}, or loss=None when the module returns (outputs, loss)."
        )
    return multi_output.SeveralLosses(
        name="several losses",
        module=multi_output.joined_module(parts),
        reduction=multi_output.shared_reduction(parts),
        parts=tuple(parts),
        positions=None if by_key else len(items),
        **options,
    )


def _loss_weights(
    loss_weights: object, items: Sequence[Tuple[Key, object]], by_key: bool
) -> Dict[Key, float]:
    """The weight of each output by its key."""
    keys = [key for key, _ in items]
    trained = [key for key, loss in items if loss is not None]
    if loss_weights is None:
        return dict.fromkeys(keys, 1.0)
    weights: Dict[Any, Any]
    if by_key and isinstance(loss_weights, Mapping):
        unknown = [key for key in loss_weights if key not in trained]
        if unknown:
            raise ConfigurationError(
                f"loss_weights must go by the outputs that have a loss, {trained}, got "
                f"{unknown[0]!r}. Use these names."
            )
        weights = dict(loss_weights)
    elif not by_key and isinstance(loss_weights, (list, tuple)):
        if len(loss_weights) != len(items):
            raise ConfigurationError(
                f"loss_weights must have one number for each of the {len(items)} losses, got "
                f"{len(loss_weights)}. Pass 1 to change nothing."
            )
        weights = dict(enumerate(loss_weights))
        idle = [key for key, loss in items if loss is None and weights[key] != 1]
        if idle:
            raise ConfigurationError(
                f"loss_weights must be 1 for outputs without a loss, got {weights[idle[0]]!r} "
                f"for {label(idle[0])!r}. Give it a loss, or 1 as its weight."
            )
    else:
        form = "a dict by output" if by_key else "a list"
        raise ConfigurationError(
            f"loss_weights must be {form}, like the losses, got {type(loss_weights).__name__}. "
            "Give one number for each loss."
        )
    for key, weight in weights.items():
        if not math.isfinite(as_float(weight)):
            raise ConfigurationError(
                f"loss_weights must be finite numbers, got {shown(weight)} for {label(key)!r}. "
                "Give for example 0.5."
            )
    return {key: float(weights.get(key, 1.0)) for key in keys}


# ---- modules and reductions ---------------------------------------------------------------------


def _instantiate(loss: Callable[..., nn.Module]) -> nn.Module:
    name = getattr(loss, "__name__", "loss")
    try:
        inspect.signature(loss).bind()
    except TypeError as error:
        raise LossError(
            f"a loss class must need no arguments, got {name} ({error}). Pass an instance: "
            f"loss={name}(...)."
        ) from error
    return loss()


def _reduction(name: str, reduction: object) -> Literal["mean", "sum"]:
    # torch spells reductions as strings; another kind of attribute of this name is the user's own.
    if not isinstance(reduction, str):
        return "mean"
    if reduction == "none":
        raise LossError(
            f"loss {name!r} must give one number for a micro-batch, got reduction='none'. Use "
            "reduction='mean', or wrap it in a callable that reduces it."
        )
    if reduction not in _REDUCTIONS:
        raise LossError(
            f"loss {name!r} must have reduction 'mean', 'batchmean' or 'sum', got {reduction!r}. "
            "Use one of these; it says how the loss combines the samples."
        )
    return _REDUCTIONS[reduction]
