"""Names: of logged values, which must be free, of arguments, and patterns of parameters."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
import inspect
from typing import Callable, Container, Dict, Mapping, Sequence, Type, TypeVar

from ipufit.errors import ConfigurationError, UnknownArgumentError

__all__ = [
    *("MEANT", "REGROUPED", "RESERVED", "check_log_name", "in_validation", "matches_pattern"),
    "with_hints",
]

T = TypeVar("T")

RESERVED = (
    *("batch", "epoch", "event", "learning_rate", "loss", "loss_scale", "samples"),
    *("skipped_updates", "update", "updates"),
)


def matches_pattern(name: str, pattern: str) -> bool:
    """Tell whether a pattern names a parameter: itself, a part above it, or by wildcards.

    Args:
        name: of the parameter, as ``named_parameters`` of the module has it.
        pattern: a name, the name of a part, or a pattern of fnmatch.
    """
    is_part = name == pattern or name.startswith(f"{pattern}.")
    return is_part or fnmatch.fnmatchcase(name, pattern)


def check_log_name(name: object, reserved: Container[str] = (), exact: bool = False) -> str:
    """Make sure that a value can be logged under this name.

    Args:
        name: of a metric, a part of the loss, or a value logged by hand.
        reserved: names that others have.
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
    if name in reserved:
        raise ConfigurationError(
            f"logged values must have different names, got {name!r} twice. Choose another name; "
            f"that of a metric with metrics={{'{name}_2': metric}}."
        )
    return name


def in_validation(name: str, exact: bool, trained: Container[str]) -> str:
    """Name a value of a validation beside those of training.

    Args:
        name: as it was logged.
        exact: whether it keeps its name where it can.
        trained: names of the values of training.
    """
    return name if exact and name not in trained else f"val_{name}"


# ---- arguments ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Meant:
    """An argument that stands here for one of another library.

    Attributes:
        method: of Model; "Model" for its constructor.
        argument: of the method, or one of its regrouped ones.
        remark: how its meaning differs, or an example.
    """

    method: str
    argument: str
    remark: str


_OPTIMIZER = Meant(
    "compile",
    "optimizer",
    "the optimizer has it, as in lambda params: torch.optim.AdamW(params, lr=0.01)",
)
_EPOCHS = Meant("fit", "epochs", "how many, or a range of their indices")
_UPDATES = Meant("fit", "steps_per_epoch", "weight updates of an epoch, of which epochs is 1")
_MICRO_BATCH = Meant("fit", "batch_size", "the samples that one replica sees at once")
_ACCUMULATION = Meant("fit", "gradient_accumulation", "micro-batches that are summed for an update")
_IPUS = Meant(
    "fit", "ipus", "the total number of IPUs; of GPUs, each is driven by a process of its own"
)
_CLIPPING = Meant("compile", "global_clipnorm", "the bound on the norm of all gradients together")
_MIXED = Meant("compile", "precision", "'mixed_float16' or 'mixed_bfloat16'")
_INPUTS = Meant("fit", "x", "a loader or a dataset too")
_TARGETS = Meant("fit", "y", "of arrays and tensors; a loader yields (inputs, target)")
_HELD_OUT = Meant("fit", "validation_data", "(x, y), a loader or a dataset")
_HELD_OUT_SIZE = Meant("fit", "validation_batch_size", "the samples that one replica sees at once")
_WORKERS = Meant("fit", "x", "a DataLoader(dataset, batch_size=..., num_workers=...)")
_CALLBACKS = Meant("fit", "callbacks", "a list, such as [ipufit.callbacks.EarlyStopping()]")
_SCHEDULE = Meant(
    "compile", "lr_scheduler", "'cosine', a scheduler of torch's, or a function of the update"
)
_WARMUP = Meant(
    "compile", "lr_scheduler", "a curve with a warm-up: ipufit.optim.schedules.Cosine(warmup=0.1)"
)
_RESUME = Meant("fit", "resume", "the path of a checkpoint, or 'auto'")

# By the name that Keras, Lightning or transformers have.
MEANT: Mapping[str, Meant] = {
    **dict.fromkeys(("learning_rate", "lr", "weight_decay", "momentum"), _OPTIMIZER),
    **dict.fromkeys(
        ("epoch", "nb_epoch", "nb_epochs", "num_epochs", "n_epochs", "max_epochs"), _EPOCHS
    ),
    "num_train_epochs": _EPOCHS,
    "max_steps": _UPDATES,
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), _MICRO_BATCH),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), _ACCUMULATION),
    **dict.fromkeys(("devices", "num_devices", "gpus", "replicas", "num_replicas"), _IPUS),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "clip_norm"), _CLIPPING),
    **dict.fromkeys(("fp16", "bf16", "mixed_precision", "dtype"), _MIXED),
    **dict.fromkeys(("train_dataset", "train_dataloaders", "train_loader", "dataset"), _INPUTS),
    **dict.fromkeys(("labels", "target"), _TARGETS),
    **dict.fromkeys(("val_data", "eval_dataset", "eval_data"), _HELD_OUT),
    **dict.fromkeys(("val_dataloaders", "val_loader", "validation_set"), _HELD_OUT),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size"), _HELD_OUT_SIZE),
    **dict.fromkeys(("workers", "num_workers", "collate_fn"), _WORKERS),
    **dict.fromkeys(("use_multiprocessing", "max_queue_size"), _WORKERS),
    **dict.fromkeys(("callback", "early_stopping", "logger"), _CALLBACKS),
    **dict.fromkeys(("lr_schedule", "lr_scheduler_type", "scheduler"), _SCHEDULE),
    **dict.fromkeys(("warmup", "warmup_steps", "warmup_ratio"), _WARMUP),
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), _RESUME),
    "accelerator": Meant("Model", "engine", "'embedded' or 'ipu'; device='cuda' for a GPU"),
    "auto_scale_loss": Meant("compile", "loss_scale", "'dynamic'"),
    "check_val_every_n_epoch": Meant("fit", "validation_freq", "a number of epochs"),
    "jit_compile": Meant("compile", "jit", "how the recorded program runs, such as 'inductor'"),
    "random_state": Meant("fit", "seed", "an integer"),
    "steps_per_execution": Meant(
        "fit",
        "device_iterations",
        "weight updates per call of the program, forward passes in evaluate and predict",
    ),
    "val_split": Meant("fit", "validation_split", "the fraction of the samples to hold out"),
}


_STAGES = "{'encoder': 0, 'head': 1}"
# Arguments of 0.1.0 that are grouped now, by method: what is written in place of each, an example.
# The changelog prints these rows.
REGROUPED: Mapping[str, Mapping[str, str]] = {
    "compile": {
        "normalize": "reduction=ipufit.Reduction(normalize='tokens')",
        "sample_weight_reduction": (
            "reduction=ipufit.Reduction(sample_weights='mean_with_sample_weight')"
        ),
        "gradient_reduction": "reduction=ipufit.Reduction(gradients='sum')",
        "clipnorm": "clip=ipufit.Clip(norm=1.0)",
        "global_clipnorm": "clip=ipufit.Clip(global_norm=1.0)",
        "clipvalue": "clip=ipufit.Clip(value=0.5)",
        "use_ema": "ema=ipufit.EMA()",
        "ema_momentum": "ema=ipufit.EMA(momentum=0.99)",
        "ema_overwrite_frequency": "ema=ipufit.EMA(overwrite_frequency=100)",
        "loss_scale": "precision=ipufit.Precision('mixed_float16', loss_scale='dynamic')",
        "accumulation_dtype": "precision=ipufit.Precision(accumulation_dtype='float32')",
        "output_mode": "outputs='final'",
        "output_every": "outputs=ipufit.Outputs('every_n', 4)",
        "stages": f"parallel=ipufit.Parallel(stages={_STAGES})",
        "layers_per_ipu": "parallel=ipufit.Parallel(layers_per_ipu=[2, 2])",
        "layers": "parallel=ipufit.Parallel(layers_per_ipu=[2, 2], layers='blocks')",
        "strategy": f"parallel=ipufit.Parallel(stages={_STAGES}, strategy='sharded')",
        "ipus_per_replica": "parallel=ipufit.Parallel(ipus_per_replica=2)",
        "auto_round_ipus": "parallel=ipufit.Parallel(auto_round_ipus=True)",
        "inference_stages": (
            f"parallel=ipufit.Parallel(inference=ipufit.Parallel(stages={_STAGES}))"
        ),
        "inference_layers_per_ipu": (
            "parallel=ipufit.Parallel(inference=ipufit.Parallel(layers_per_ipu=[2, 2]))"
        ),
        "inference_strategy": (
            "parallel=ipufit.Parallel(inference=ipufit.Parallel(strategy='sharded'))"
        ),
        "serialized_layers": "memory=ipufit.Memory(serialize={'head': 4})",
        "inference_serialized_layers": "memory=ipufit.Memory(inference_serialize={'head': 4})",
        "recompute": "memory=ipufit.Memory(recompute=True)",
        "offload_optimizer_state": "memory=ipufit.Memory(offload_optimizer=True)",
        "shard_optimizer": "memory=ipufit.Memory(shard='optimizer')",
        "shard_weights": "memory=ipufit.Memory(shard='weights')",
        "training_options": "poptorch=options",
        "inference_options": "poptorch=(None, options)",
    },
    "fit": {
        "initial_epoch": "epochs=range(3, 10)",
        "validation_steps": "validation_data=ipufit.Validation(val_loader, steps=10)",
        "validation_batch_size": "validation_data=ipufit.Validation((x, y), batch_size=32)",
        "validation_freq": "validation_data=ipufit.Validation(val_loader, freq=2)",
        "inference_ipus": "validation_data=ipufit.Validation(val_loader, ipus=2)",
        "inference_device_iterations": (
            "validation_data=ipufit.Validation(val_loader, device_iterations=4)"
        ),
        "limit_train_batches": "loading=ipufit.Loading(limit_train_batches=10)",
        "limit_val_batches": "loading=ipufit.Loading(limit_val_batches=10)",
        "overfit_batches": "loading=ipufit.Loading(overfit_batches=1)",
        "fast_dev_run": "loading=ipufit.Loading(fast_dev_run=True)",
        "prefetch": "loading=ipufit.Loading(prefetch=2)",
        "resume": "checkpoint=ipufit.Checkpoint('runs/1', resume='auto')",
        "resume_changes": (
            "checkpoint=ipufit.Checkpoint('runs/1', resume='auto', resume_changes={'lr'})"
        ),
        "max_restarts": "checkpoint=ipufit.Checkpoint('runs/1', max_restarts=3)",
        "report": "callbacks=[ipufit.Report('runs/1')]",
        "autoreport": "callbacks=[ipufit.Report('autoreport')]",
        "autoreport_dir": "callbacks=[ipufit.Report('autoreport')]",
    },
    "explain": {"limit_train_batches": "loading=ipufit.Loading(limit_train_batches=10)"},
}


def with_hints(kind: Type[T]) -> Type[T]:
    """Let the public methods of a class say what was meant by an argument that they do not have."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, _hinting(method))
    return kind


def _hinting(method: Callable[..., object]) -> Callable[..., object]:
    parameters = list(inspect.signature(method).parameters.values())
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return method
    names = {p.name for p in parameters}
    most = len([p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD])

    @functools.wraps(method)
    def call(self: object, *args: object, **kwargs: object) -> object:
        if len(args) >= most or not names.issuperset(kwargs):
            name = "Model" if method.__name__ == "__init__" else method.__name__
            raise _unknown(type(self), name, parameters[1:], args, kwargs)
        return method(self, *args, **kwargs)

    return call


def _parameters(kind: type, method: str) -> Dict[str, inspect.Parameter]:
    """The parameters of a method of Model, or of its constructor, without ``self``."""
    function = kind if method == "Model" else getattr(kind, method)
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("self", None)
    return parameters


def _unknown(
    kind: type,
    method: str,
    parameters: Sequence[inspect.Parameter],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> UnknownArgumentError:
    """The error for all arguments that a method does not have."""
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = [p.name for p in parameters]
    texts = []
    if len(args) > len(by_position):
        texts.append(
            f"{method} takes ({', '.join(by_position)}) by position, got {len(args)} values. Give "
            "all others by name."
        )
    texts += [
        f"{method} has no argument {name!r}. {_advice(kind, method, names, name)}"
        for name in kwargs
        if name not in names
    ]
    return UnknownArgumentError("\n".join(texts))


def _advice(kind: type, method: str, parameters: Sequence[str], name: str) -> str:
    """The sentence of an error that says what to write instead."""
    if name in REGROUPED.get(method, {}):
        return f"Write {REGROUPED[method][name]}."
    meant = MEANT.get(name)
    if meant is not None:
        is_grouped = meant.argument not in _parameters(kind, meant.method)
        place = REGROUPED[meant.method][meant.argument] if is_grouped else f"{meant.argument}=..."
        is_here = method == meant.method or meant.argument in parameters
        return f"Write {place if is_here else f'{meant.method}(..., {place})'}: {meant.remark}."
    near = difflib.get_close_matches(name.lower(), parameters, n=1, cutoff=0.75)
    if near:
        return f"Write {near[0]}=..."
    for owner, rows in REGROUPED.items():
        if name in rows:
            return f"Write {owner}(..., {rows[name]})."
    for owner in ("compile", "fit", "evaluate", "Model"):
        if name in _parameters(kind, owner):
            return f"Write {owner}(..., {name}=...)."
    return f"Leave it out, or write one that there is: {', '.join(parameters)}."
