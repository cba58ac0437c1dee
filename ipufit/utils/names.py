"""Names: of logged values, which must be free, of arguments, and patterns of parameters."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import inspect
import re
from typing import Callable, Container, Dict, Mapping, Optional, Sequence, Type, TypeVar, cast

from ipufit.errors import ConfigurationError, IpufitError, UnknownArgumentError, unfit
from ipufit.utils.error_collector import ErrorCollector

F = TypeVar("F", bound=Callable[..., object])
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
        raise unfit("the name of a logged value", "a string", name, "Write for example 'error'.")
    is_ours = name in RESERVED or name.startswith("val_")
    if is_ours and not (exact and (name == "loss" or name not in RESERVED)):
        needed = f"free, and ipufit itself logs {', '.join(RESERVED)} and val_..."
        advice = "Choose another name; rename a metric with metrics={'name': metric}."
        raise unfit("the name of a logged value", needed, name, advice)
    if name in reserved:
        raise ConfigurationError(
            f"logged values must have different names, got {name!r} twice. Choose another name; "
            f"rename a metric with metrics={{'{name}_2': metric}}."
        )
    return name


# ---- arguments ----------------------------------------------------------------------------------


# What is written here for an argument of Keras, Lightning, transformers, skorch or ipufit 0.1.0. By
# names: the call as it works, and behind "#" a remark; or a sentence. "evaluate.x" is that name in
# evaluate alone. The pages for those who come from there, and the changelog, have these names too.
REPLACEMENTS: Mapping[str, str] = {
    "learning_rate lr weight_decay momentum adam_beta1 adam_beta2 adam_epsilon optim_args": (
        "compile(optimizer=lambda params: torch.optim.AdamW(params, lr=0.01))"
        "  # the optimizer has it"
    ),
    "optim optimizers": "compile(optimizer='adamw')  # a name, a class or an object of torch.optim",
    "lamb": "compile(optimizer='lamb')",
    "lamb_no_bias_correction": (
        "compile(optimizer=lambda params: ipufit.optim.LAMB(params, bias_correction=False))"
    ),
    "criterion compute_loss_func": "compile(loss='cross_entropy')  # or a module or a function",
    "compute_metrics preprocess_logits_for_metrics scoring include_for_metrics": (
        "compile(metrics=['accuracy'])  # names, or functions (prediction, target) of a micro-batch"
    ),
    "label_smoothing label_smoothing_factor": (
        "compile(loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1))"
    ),
    "max_epochs num_train_epochs nb_epoch max_iter": (
        "fit(epochs=3)  # how many, or a range of their indices"
    ),
    "initial_epoch": "fit(epochs=range(3, 10))",
    "max_steps": "fit(steps_per_epoch=100)  # weight updates of an epoch, of which epochs is 1",
    "val_check_interval eval_steps": (
        "fit(steps_per_epoch=100)  # weight updates of an epoch, after each of which it validates"
    ),
    "min_epochs min_steps": (
        "fit(callbacks=[ipufit.callbacks.EarlyStopping('loss', start_from_epoch=3)])"
    ),
    "early_stopping load_best_model_at_end metric_for_best_model": (
        "fit(callbacks=[ipufit.callbacks.EarlyStopping('loss', restore_best_weights=True)])"
    ),
    "max_time": "fit(callbacks=[ipufit.callbacks.Timer('00:12:00:00')])  # days to seconds",
    "per_device_train_batch_size train_batch_size iterator_train__batch_size": (
        "fit(batch_size=32)  # the samples that one replica sees at once"
    ),
    "evaluate.per_device_eval_batch_size evaluate.eval_batch_size": "evaluate(batch_size=32)",
    "per_device_eval_batch_size eval_batch_size validation_batch_size": (
        "fit(validation_data=ipufit.Validation((x, y), batch_size=32))"
    ),
    "gradient_accumulation_steps accumulate_grad_batches": (
        "fit(gradient_accumulation=2)  # micro-batches that are summed for an update"
    ),
    "devices num_devices gpus n_ipu replicas num_replicas replication_factor": (
        "fit(ipus=2)  # the total number of IPUs; of GPUs, each is driven by a process of its own"
    ),
    "num_nodes distribute use_distributed_sampler local_rank": (
        "Start the script once for each process, as torchrun does: see docs/distributed.md."
    ),
    "strategy": (
        "compile(parallel=ipufit.Parallel(stages={'encoder': 0, 'head': 1}, strategy='sharded'))"
        "  # of stages; several processes need none, see docs/distributed.md"
    ),
    "model net model_init": "Model(module=module)",
    "ipu_config": "compile(config=ipufit.IPUConfig(device_iterations=4))",
    "accelerator use_cpu": "Model(engine='embedded')  # or 'ipu'; device='cuda' for a GPU",
    "gradient_clip_val gradient_clip_algorithm max_grad_norm clip_norm global_clipnorm": (
        "compile(clip=ipufit.Clip(global_norm=1.0))  # or norm= for each parameter, or value="
    ),
    "clipnorm": "compile(clip=ipufit.Clip(norm=1.0))",
    "clipvalue": "compile(clip=ipufit.Clip(value=0.5))",
    "use_ema": "compile(ema=ipufit.EMA())",
    "ema_momentum": "compile(ema=ipufit.EMA(momentum=0.99))",
    "ema_overwrite_frequency": "compile(ema=ipufit.EMA(overwrite_frequency=100))",
    "fp16 bf16 mixed_precision dtype": "compile(precision='mixed_bfloat16')  # or 'mixed_float16'",
    "auto_scale_loss loss_scale loss_scale_factor loss_scaling auto_loss_scaling": (
        "compile(precision=ipufit.Precision('mixed_float16', loss_scale='dynamic'))"
    ),
    "evaluate.eval_dataset evaluate.dataloaders predict.dataloaders predict.test_dataset": (
        "evaluate(x=DataLoader(dataset, batch_size=32))"
    ),
    "train_dataset train_dataloaders train_loader dataset": (
        "fit(x=DataLoader(dataset, batch_size=32))  # or the dataset itself"
    ),
    "labels target": "fit(y=y)  # of arrays and tensors; a loader yields (inputs, target)",
    "eval_dataset eval_data val_data val_dataloaders val_loader validation_set": (
        "fit(validation_data=(x, y))  # or a loader or a dataset"
    ),
    "num_workers dataloader_num_workers workers use_multiprocessing max_queue_size collate_fn": (
        "fit(x=DataLoader(dataset, num_workers=2))  # the loader has it"
    ),
    "data_collator drop_last dataloader_drop_last pin_memory dataloader_pin_memory": (
        "fit(x=DataLoader(dataset, drop_last=True))  # the loader has it"
    ),
    "prefetch_factor dataloader_prefetch_factor dataloader_mode": (
        "fit(loading=ipufit.Loading(prefetch=2))"
    ),
    "group_by_length train_sampling_strategy": (
        "Give the DataLoader a batch_sampler=ipufit.data.LengthBuckets(dataset, batch_size=8)."
    ),
    "datamodule": "Write ipufit.Model.from_lightning(module), which takes one in fit.",
    "validation_steps": "fit(validation_data=ipufit.Validation(val_loader, steps=2))",
    "validation_freq check_val_every_n_epoch eval_strategy evaluation_strategy": (
        "fit(validation_data=ipufit.Validation((x, y), freq=1))  # a number of epochs"
    ),
    "val_split validation_fraction train_split": (
        "fit(validation_split=0.2)  # the fraction of the samples to hold out"
    ),
    "limit_test_batches limit_predict_batches": "evaluate(steps=1)  # device iterations",
    "num_sanity_val_steps": "Leave it out: validation is recorded before training, always.",
    "logger report_to log_every_n_steps logging_steps logging_strategy": (
        "fit(callbacks=[ipufit.callbacks.CSVLogger('log.csv')])  # or TensorBoard, ExperimentLogger"
    ),
    "enable_progress_bar disable_tqdm": "fit(verbose=0)  # or 1 for a bar, 2 for a line per epoch",
    "enable_model_summary": "Call model.summary().",
    "lr_schedule lr_scheduler_type scheduler": (
        "compile(lr_scheduler='cosine')  # or a torch scheduler, or a function of the update"
    ),
    "warmup warmup_steps warmup_ratio": (
        "compile(lr_scheduler=ipufit.optim.schedules.Cosine(warmup=0.1))"
    ),
    "evaluate.ckpt_path predict.ckpt_path": (
        "Write ipufit.load('model.safetensors', module) for a model with these weights."
    ),
    "resume ckpt_path resume_from_checkpoint": (
        "fit(checkpoint=ipufit.Checkpoint('runs/1', resume='auto'))"
    ),
    "enable_checkpointing default_root_dir output_dir save_strategy save_steps save_total_limit": (
        "fit(checkpoint='runs/1')  # or an ipufit.Checkpoint, which says how often"
    ),
    "jit_compile torch_compile": "compile(jit='auto')  # how the recorded program runs",
    "mode backend fullgraph dynamic torch_compile_backend torch_compile_mode": (
        "compile(jit='inductor')  # or another backend of torch.compile"
    ),
    "name": "Leave it out: a model is called after the class of its module.",
    "random_state data_seed": "fit(seed=0)",
    "deterministic benchmark full_determinism": (
        "Call torch.use_deterministic_algorithms(True); fit(seed=...) fixes the random numbers."
    ),
    "steps_per_execution": (
        "fit(device_iterations=4)  # weight updates per call of the program, forward passes in "
        "evaluate and predict"
    ),
    "gradient_checkpointing activation_checkpointing": (
        "compile(memory=ipufit.Memory(recompute=True))"
    ),
    "detect_anomaly": "compile(detect_nan=True)",
    "compile_only": "fit(loading=ipufit.Loading(fast_dev_run=True))",
    "profiler report autoreport autoreport_dir": "fit(callbacks=[ipufit.Report('runs/1')])",
    # Of ipufit 0.1.0 alone, what the fields of settings do not say.
    "sample_weight_reduction": (
        "compile(reduction=ipufit.Reduction(sample_weights='mean_with_sample_weight'))"
    ),
    "gradient_reduction": "compile(reduction=ipufit.Reduction(gradients='sum'))",
    "output_mode": "compile(outputs='final')",
    "output_every": "compile(outputs=ipufit.Outputs('every_n', 4))",
    "inference_stages": (
        "compile(parallel=ipufit.Parallel(inference=ipufit.Parallel(stages={'encoder': 0, "
        "'head': 1})))"
    ),
    "inference_layers_per_ipu": (
        "compile(parallel=ipufit.Parallel(inference=ipufit.Parallel(layers_per_ipu=[2, 2])))"
    ),
    "inference_strategy": (
        "compile(parallel=ipufit.Parallel(inference=ipufit.Parallel(stages={'encoder': 0, "
        "'head': 1}, strategy='sharded')))"
    ),
    "serialized_layers": "compile(memory=ipufit.Memory(serialize={'head': 4}))",
    "inference_serialized_layers": (
        "compile(memory=ipufit.Memory(inference_serialize={'head': 4}))"
    ),
    "offload_optimizer_state": "compile(memory=ipufit.Memory(offload_optimizer=True))",
    "shard_optimizer": "compile(memory=ipufit.Memory(shard='optimizer'))",
    "shard_weights": "compile(memory=ipufit.Memory(shard='weights'))",
    "training_options": "compile(poptorch=options)",
    "inference_options": "compile(poptorch=(None, options))",
    "inference_ipus": "fit(validation_data=ipufit.Validation(val_loader, ipus=2))",
    "inference_device_iterations": (
        "fit(validation_data=ipufit.Validation(val_loader, device_iterations=4))"
    ),
}
_OWNERS = ("compile", "fit", "evaluate", "Model")


def with_hints(*silent: str, **like: str) -> Callable[[Type[T]], Type[T]]:
    """Let the public methods of a class say what was meant by an argument that they do not have.

    They say what else is wrong in the same error: each checks all arguments before it does
    anything, and then asks an ``ErrorCollector(of_call=True)``.

    Args:
        silent: names of methods that do not ask one, as no other argument of theirs may be wrong.
        like: of methods with ``**options`` that no base has, the method whose options these are.
    """

    def decorate(kind: Type[T]) -> Type[T]:
        for name, method in list(vars(kind).items()):
            if name != "__init__" and name.startswith("_"):
                continue
            bases = [vars(base) for base in kind.__mro__[1:]]
            options = [base[like.get(name, name)] for base in bases if like.get(name, name) in base]
            if isinstance(method, classmethod):
                setattr(kind, name, classmethod(_hinting(method.__func__)))
            elif inspect.isfunction(method):
                setattr(kind, name, _hinting(method, name not in silent, options))
        return kind

    return decorate


def hinting(kind: type) -> Callable[[F], F]:
    """Let a function that makes a model say the same as the methods of this class."""

    def decorate(function: F) -> F:
        return cast(F, _hinting(function, kind=kind))

    return decorate


def _hinting(
    function: Callable[..., object],
    collects: bool = True,
    bases: Sequence[Callable[..., object]] = (),
    kind: Optional[type] = None,
) -> Callable[..., object]:
    """Return the function, or one that says what was meant by an argument that it does not have.

    Args:
        function: takes arguments.
        collects: whether it asks an ``ErrorCollector(of_call=True)`` before it does anything.
        bases: the last one has what its ``**options`` are.
        kind: the class of the model, where the function is no method.
    """
    bound = int(kind is None)
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    if bases and parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        options = list(inspect.signature(bases[-1]).parameters.values())[1:]
        first = {p.name for p in parameters}
        more = [p.replace(kind=p.KEYWORD_ONLY) for p in options if p.name not in first]
        parameters = [*parameters[:-1], *more]
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters):
        return function
    names = {p.name for p in parameters}
    most = len([p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]) + bound

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        if len(args) > most or not names.issuperset(kwargs):
            name = "Model" if function.__name__ == "__init__" else function.__name__
            first = kind or args[0]
            owner = first if isinstance(first, type) else type(first)
            error = _unknown(owner, name, parameters, args[bound:], kwargs)
            values = {name: value for name, value in kwargs.items() if name in names}
            if collects and parameters:
                _collect(error, functools.partial(function, *args[:most], **values))
            raise error
        return function(*args, **kwargs)

    return call


def _collect(error: UnknownArgumentError, call: Callable[[], object]) -> None:
    """Raise the error together with what is wrong with the arguments that the method has."""
    try:
        with ErrorCollector.beginning_with(error):
            call()
    except UnknownArgumentError:
        raise
    except TypeError as fault:
        # Such as of an argument that is missing because its name is misspelt.
        raise error from fault
    except IpufitError as fault:
        raise UnknownArgumentError(f"{error}\n{fault}") from fault


def _parameters(kind: type, method: str) -> Dict[str, inspect.Parameter]:
    """The parameters of a method of Model, or of its constructor, without ``self``."""
    name = "__init__" if method == "Model" else method
    functions = [vars(base)[name] for base in kind.__mro__[:-1] if name in vars(base)]
    return {
        p.name: p for f in functions for p in list(inspect.signature(f).parameters.values())[1:]
    }


def _settings(kind: type, name: str) -> str:
    """The call that has a field of this name in an object of settings, such as a Clip; or ""."""
    for owner in ("compile", "fit"):
        for parameter in _parameters(kind, owner).values():
            for word in re.findall(r"\w+", str(parameter.annotation)):
                settings = inspect.unwrap(getattr(kind, owner)).__globals__.get(word)
                if name in getattr(settings, "__dataclass_fields__", ()):
                    return f"{owner}({parameter.name}=ipufit.{word}({name}=...))"
    return ""


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
            f"{method} takes ({', '.join(by_position)}) by position, got {len(args)} values. Pass "
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
    rows = {word: row for names, row in REPLACEMENTS.items() for word in names.split()}
    row = rows.get(f"{method}.{name}") or rows.get(name) or ""
    calls = [f"{o}({name}=...)" if name in _parameters(kind, o) else "" for o in _OWNERS]
    row = row or next(filter(None, [*calls[:2], _settings(kind, name), *calls[2:]]), "")
    owner, _, rest = row.partition("(")
    if owner in _OWNERS:
        call, _, remark = rest.partition("  # ")
        written = call[:-1]
        is_here = owner == method or written.partition("=")[0] in parameters
        written = written if is_here else f"{owner}(..., {written})"
        separator = ", " if remark.startswith("or ") else ": "
        return f"Write {separator.join(filter(None, (written, remark)))}."
    near = difflib.get_close_matches(name.lower(), parameters, n=1, cutoff=0.75)
    if row or near:
        return row or f"Write {near[0]}=..."
    return f"Leave it out, or use one of these: {', '.join(parameters)}."
