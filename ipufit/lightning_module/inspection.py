"""Facts about a LightningModule, and refusals of what a recorded program can't do.

Neither Lightning nor torchmetrics is imported: classes are known by their names.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, Optional, Set, Tuple, Union

from torch import nn

from ipufit.errors import ConfigurationError
from ipufit.utils.error_collector import ErrorCollector

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection
    from typing_extensions import TypeIs

MetricObject = Union["Metric", "MetricCollection"]

# One library under two names.
_LIGHTNING = ("lightning", "pytorch_lightning")
_TORCHMETRICS = ("torchmetrics",)


def base_of(
    value: object, name: str = "LightningModule", packages: Tuple[str, ...] = _LIGHTNING
) -> Optional[type]:
    """Return the class of this name that an object derives from, in one of the packages; or None.

    Args:
        value: any object.
        name: of the class.
        packages: names of them.
    """
    for kind in type(value).__mro__:
        if kind.__name__ == name and kind.__module__.partition(".")[0] in packages:
            return kind
    return None


def is_data_module(value: object) -> bool:
    """Return True for a LightningDataModule."""
    return base_of(value, "LightningDataModule") is not None


def overrides(value: object, name: str) -> bool:
    """Return True if the user has written this method, in the class or on the object.

    Args:
        value: a LightningModule or LightningDataModule.
        name: of the method; one that Lightning does not have counts if it is there.
    """
    if name in vars(value):
        return True
    owner = next((kind for kind in type(value).__mro__ if name in vars(kind)), None)
    lightning_class = base_of(value) or base_of(value, "LightningDataModule")
    return (
        owner is not None and lightning_class is not None and owner not in lightning_class.__mro__
    )


def lightning_parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and all LightningModules inside it."""
    for part in module.modules():
        if base_of(part) is not None:
            yield part


def is_metric(value: object) -> TypeIs[MetricObject]:
    """Return True for a metric of torchmetrics or a collection of them."""
    return base_of(value, "Metric", _TORCHMETRICS) is not None or is_collection(value)


def is_collection(value: object) -> TypeIs[MetricCollection]:
    """Return True for a MetricCollection of torchmetrics."""
    return base_of(value, "MetricCollection", _TORCHMETRICS) is not None


def metrics_in(module: nn.Module, inside: bool = True) -> Iterator[Tuple[str, MetricObject]]:
    """Yield the metric objects of a module by their paths, each once.

    Args:
        module: where they are.
        inside: whether those inside of others count too.
    """
    outermost: Tuple[str, ...] = ()
    for path, part in module.named_modules():
        if is_metric(part):
            is_inside = path.startswith(outermost)
            outermost += () if is_inside else (f"{path}.",)
            if inside or not is_inside:
                yield path, part


def parts_without_metrics(
    module: nn.Module, visited: Set[int], prefix: str, remove_duplicate: bool
) -> Iterator[Tuple[str, nn.Module]]:
    """Yield modules as ``named_modules`` does, without metric objects and their parts.

    Args:
        module: where to begin.
        visited: identities of parts that were yielded before.
        prefix: before all names.
        remove_duplicate: whether each is told once.
    """
    if remove_duplicate and id(module) in visited:
        return
    visited.add(id(module))
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None and not is_metric(child):
            path = f"{prefix}.{name}" if prefix else name
            yield from parts_without_metrics(child, visited, path, remove_duplicate)


def parameters_of(method: Callable[..., object]) -> Optional[inspect.Signature]:
    """Return the signature of a bound method; None where Python can't tell."""
    try:
        return inspect.signature(method)
    except (TypeError, ValueError):
        return None


_BETWEEN = "Your Python does not run between two batches of a recorded program. "
_GRADIENTS = "The program computes the gradients and applies them itself. "
_CALLBACK = "Use an ipufit callback, whose on_train_batch_end is called after every execution."
_IN_STEP = "Do it in {step}, in tensors, where it becomes part of the program."
_CLIP = "Pass clip=ipufit.Clip(...) to compile."
# Of a Trainer's, in the place of what from_lightning has.
_FOR_TRAINER = {
    _CLIP: "Pass gradient_clip_val to the Trainer.",
    _CALLBACK: "Use on_train_batch_end, which is called after every execution.",
}
_HOOK = "Put tensor.register_hook or parameter.register_hook in its place, which is recorded."
_OPTIMIZER = "Write it as your own optimizer, or as a schedule."
_COLLATE = "Do it in the dataset or in collate_fn, or on the device in on_after_batch_transfer."
_OLD = "Lightning 2 has no such method either. Use self.log in the step, or {instead}."

_MODULE: Dict[str, str] = {
    "backward": _GRADIENTS + "Leave it out, or change the loss that training_step returns.",
    "optimizer_step": _GRADIENTS + _OPTIMIZER,
    "optimizer_zero_grad": _GRADIENTS + "Leave it out: there is no .grad to set to zero.",
    "configure_gradient_clipping": _GRADIENTS + _CLIP,
    "clip_gradients": _GRADIENTS + _CLIP,
    "lr_scheduler_step": "The program steps the scheduler itself. " + _OPTIMIZER,
    "on_before_backward": _BETWEEN + _IN_STEP.format(step="training_step"),
    "on_after_backward": _BETWEEN + _HOOK,
    "on_before_optimizer_step": _BETWEEN + _HOOK,
    "on_before_zero_grad": _BETWEEN + _CALLBACK,
    "on_train_batch_start": _BETWEEN + _IN_STEP.format(step="training_step"),
    "on_train_batch_end": _BETWEEN + _CALLBACK,
    "transfer_batch_to_device": "ipufit moves batches to the device. " + _COLLATE,
    "on_before_batch_transfer": "ipufit moves batches to the device. " + _COLLATE,
    "configure_callbacks": "Lightning callbacks can't be called here. Pass ipufit callbacks to "
    "fit.",
    "configure_sharded_model": "Use configure_model, which is called before fit.",
    "on_validation_model_zero_grad": "There is no .grad. Leave it out.",
    "training_step_end": _OLD.format(instead="do it at the end of training_step"),
    "training_epoch_end": _OLD.format(instead="on_train_epoch_end"),
    "validation_step_end": _OLD.format(instead="do it at the end of validation_step"),
    "validation_epoch_end": _OLD.format(instead="on_validation_epoch_end"),
    "test_step_end": _OLD.format(instead="do it at the end of test_step"),
    "test_epoch_end": _OLD.format(instead="on_test_epoch_end"),
    "tbptt_split_batch": _OLD.format(instead="cut sequences in the dataset"),
}
for _stage in ("validation", "test", "predict"):
    for _end in ("start", "end"):
        _MODULE[f"on_{_stage}_batch_{_end}"] = _BETWEEN + _IN_STEP.format(step=f"{_stage}_step")
    for _mode in ("eval", "train"):
        _MODULE[f"on_{_stage}_model_{_mode}"] = (
            "ipufit sets train and eval mode itself. Set parts of the module to eval in __init__ "
            "or on_train_epoch_start."
        )

# Hooks that a Trainer calls between executions.
_BY_TRAINER = ("_batch_start", "_batch_end", "_model_eval", "_model_train")

_DATA = ("transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer")

# Arguments of training_step that Lightning fills in one of its other ways to train.
_ARGUMENTS = {
    "dataloader_iter": "Take batch instead: the program gets one batch at a time.",
    "optimizer_idx": "Return one optimizer: a program has one.",
    "hiddens": "Cut sequences in the dataset; keep a state in a buffer.",
}


def refuse_module(module: Any, by_trainer: bool = False) -> None:
    """Look through a LightningModule for all that no program can be made of.

    Args:
        module: the LightningModule.
        by_trainer: whether a Trainer calls what lies between executions.

    Raises:
        ConfigurationError: it is none, or does what can't be recorded; all of it.
    """
    if base_of(module) is None:
        raise ConfigurationError(
            "from_lightning takes a LightningModule object, of lightning.pytorch or "
            f"pytorch_lightning, got {_described(module)}. Pass any other module to "
            "ipufit.Model(module)."
        )
    kind = type(module).__name__
    faults = ErrorCollector()
    with faults.collect():
        if by_trainer and not module.automatic_optimization:
            raise ConfigurationError(
                f"{kind} has automatic_optimization = False, but a Trainer counts and logs steps "
                "one by one, and the program makes many at once. Use ipufit.Model.from_lightning, "
                "or return the loss from training_step."
            )
    for name, instead in _MODULE.items():
        if by_trainer and (name == "configure_callbacks" or name.endswith(_BY_TRAINER)):
            continue
        if by_trainer:
            for words, others in _FOR_TRAINER.items():
                instead = instead.replace(words, others)
        with faults.collect():
            if overrides(module, name):
                raise ConfigurationError(f"{kind}.{name} can't be called. {instead}")
    signature = parameters_of(module.training_step)
    for name, instead in _ARGUMENTS.items():
        with faults.collect():
            if signature is not None and name in signature.parameters:
                raise ConfigurationError(
                    f"{kind}.training_step must take batch or (batch, batch_idx), got {name!r}. "
                    f"{instead}"
                )
    faults.raise_all()


def refuse_data_hooks(data: object) -> None:
    """Refuse hooks of a LightningDataModule that are not called.

    Args:
        data: perhaps something else, which has none.

    Raises:
        ConfigurationError: it overrides what is not called.
    """
    faults = ErrorCollector()
    for name in _DATA:
        with faults.collect():
            if is_data_module(data) and overrides(data, name):
                raise ConfigurationError(
                    f"{type(data).__name__}.{name} can't be called. ipufit moves batches to the "
                    "device. Do it in the dataset or in collate_fn, or on the device in the "
                    "LightningModule's own on_after_batch_transfer."
                )
    faults.raise_all()


def _described(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
