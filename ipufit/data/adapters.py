"""Every form in which data may come, brought to a source of batches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Iterable, List, Mapping, Optional, Tuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from ipufit.core.batch import Mode, RawBatch
from ipufit.data.fields import BatchForm, refuse_listed
from ipufit.data.in_memory import (
    EpochOrder,
    array_loader,
    as_arrays,
    as_tensors,
    is_array,
    is_datasets_table,
    is_table,
)
from ipufit.data.loaders import BatchSequence, batch_total
from ipufit.data.sharding import Sharded
from ipufit.data.source import DataAdapter, refuse_no_batches
from ipufit.data.weights import ClassWeights, refuse_bad_weights
from ipufit.errors import ConfigurationError, DataError, unfit
from ipufit.losses.loss import OwnLoss
from ipufit.utils import tree
from ipufit.utils.console import warn_user
from ipufit.utils.error_collector import ErrorCollector, as_list, at_least
from ipufit.utils.poptorch_sdk import sdk_kind

_DEFAULT_BATCH_SIZE = 32  # Keras'
# What tables of other libraries make arrays or frames with.
_CONVERSIONS = ("to_numpy", "toarray", "to_pandas", "collect")


# What yields the batches, and what yields them in the order of a key; None where nothing can.
_Loader = Tuple[Iterable[RawBatch], Optional[Callable[[int], Iterable[RawBatch]]]]


@dataclasses.dataclass(frozen=True)
class DataArguments:
    """Arguments of a call that hold data, as the user passed them.

    Attributes:
        role: what it is for, such as "training data".
        x: in any form.
        y, sample_weight: beside tensors and arrays.
        class_weight: by class index.
        batch_size: of tensors, arrays and datasets.
        shuffle: of tensors, arrays and map-style datasets.
        shuffles: the default of ``shuffle``.
        batch_size_name: the argument that the user knows.
        form: in which forward takes inputs, to predict from a tuple or list of arrays.
        are_inputs: whether ``x`` is such a tuple or list, that forward is called with.
    """

    role: str
    x: Any
    y: object = None
    sample_weight: object = None
    class_weight: object = None
    batch_size: object = None
    shuffle: Any = None
    shuffles: bool = False
    batch_size_name: str = "batch_size"
    form: Optional[BatchForm] = None
    are_inputs: bool = False

    def as_arrays(self) -> DataArguments:
        """The data with arrays and tensors for frames, lists of numbers and tables of datasets.

        Raises:
            DataError: a frame or a list holds something else than numbers.
        """
        x = as_tensors(self.x)
        parts = {"x": x, "y": self.y, "sample_weight": self.sample_weight}
        # A long list without a target is one of batches, which are looked at as they come.
        is_nested = isinstance(x, Mapping) or self.y is not None or self.are_inputs
        for name, part in parts.items():
            if is_table(part) or (is_nested and isinstance(part, (Mapping, tuple, list))):
                parts[name] = as_arrays(part, f"{self.role}: {name}")
        return dataclasses.replace(self, **parts)


def get_data_adapter(arguments: DataArguments, mode: Mode, own_loss: OwnLoss) -> DataAdapter:
    """Make a source of batches of data in any form.

    Args:
        arguments: the data and what goes with it, as they were passed.
        mode: what the batches are for.
        own_loss: whether the module computes its own loss.

    Raises:
        DataError: it is not data.
        ConfigurationError: arguments that don't go with this form; all of them.
    """
    faults = ErrorCollector()
    if arguments.form is not None:
        _refuse_samples(arguments.form, arguments.x, arguments.role)
    if isinstance(arguments.x, list) and arguments.y is None and not own_loss:
        _refuse_pairs(arguments.x, arguments.role)
    kind, is_cut = _kind(arguments), isinstance(arguments.x, Sharded)
    if is_cut:
        arguments = dataclasses.replace(arguments, x=arguments.x.loader)
    elif kind == "loader":
        refuse_no_batches(arguments.x, arguments.role)
    arguments = arguments.as_arrays()
    _refuse_table(arguments)
    size = _DEFAULT_BATCH_SIZE
    with faults.collect():
        if arguments.batch_size is not None:
            name, advice = arguments.batch_size_name, "Pass weights by name, sample_weight=weights."
            if mode is Mode.PREDICT:
                advice = "predict takes x, but no target."
            advice = "" if as_list(arguments.batch_size) is None else advice
            size = at_least(name, arguments.batch_size, 1, " or None", advice)
    with faults.collect():
        if arguments.shuffle is not None and not isinstance(arguments.shuffle, bool):
            raise unfit("shuffle", "True, False or None", arguments.shuffle)
    for check in (_refuse_batch_size, _refuse_shuffle, _refuse_parts):
        with faults.collect():
            check(arguments, kind)
    class_weights = None
    with faults.collect():
        class_weights = _class_weights(arguments, own_loss)
    loader, order = arguments.x, None
    if kind == "arrays":
        with faults.collect():
            _refuse_missing_or_weights(arguments, mode, own_loss)
        with faults.collect():
            loader, order = _of_arrays(arguments, mode, size)
    faults.raise_all()
    if kind == "dataset":
        loader, order = _of_dataset(arguments, size)
    elif kind == "batches":
        loader, order = _of_batches(arguments)
    elif kind == "stream":
        loader = DataLoader(arguments.x, batch_size=size)
    shuffles = arguments.shuffles if arguments.shuffle is None else arguments.shuffle
    shuffled = order if shuffles else None
    return DataAdapter(loader, arguments.role, shuffled, class_weights=class_weights, is_cut=is_cut)


def comes_in_samples(arguments: DataArguments) -> bool:
    """True if batches are made here, so that there is a batch size to choose."""
    return _kind(arguments) not in ("loader", "batches")


def _kind(arguments: DataArguments) -> str:
    """Form of the data: "arrays", "dataset", "stream" (an IterableDataset), "batches" or "loader".

    Of "batches" each has a number; a "loader" yields them.
    """
    x = arguments.x.loader if isinstance(arguments.x, Sharded) else arguments.x
    if isinstance(x, DataLoader):
        _refuse_combined_batches(x, arguments.role)
        return "loader"
    if isinstance(x, Dataset):
        return "stream" if isinstance(x, IterableDataset) else "dataset"
    if is_datasets_table(x):
        return "dataset"
    if is_array(x) or is_table(x) or isinstance(x, Mapping) or arguments.are_inputs:
        return "arrays"
    if tree.is_sequence(x):
        if arguments.y is not None and x is arguments.x:
            return "arrays"
        _refuse_bare_sequence(x, arguments.role, arguments.form)
    kind = type(x)
    has_hooks = hasattr(kind, "on_epoch_end")
    return "batches" if has_hooks and hasattr(kind, "__getitem__") else "loader"


def _refuse_combined_batches(loader: Any, role: str) -> None:
    """A loader of PopTorch's has joined what an execution takes; one update would take it all."""
    size = loader._combined_batch_size if sdk_kind(loader, ("DataLoader",)) else None
    if size is None:
        return
    options = loader.options
    batches = options.device_iterations * options.replication_factor
    batches *= options.Training.gradient_accumulation
    if batches > 1:
        raise DataError(
            f"{role} must come in micro-batches, because ipufit combines them itself, got a "
            f"poptorch.DataLoader, which combines {batches} in each batch of {size} samples. "
            f"Pass torch's DataLoader with batch_size={size // batches}."
        )


def _refuse_bare_sequence(x: Any, role: str, form: Optional[BatchForm]) -> None:
    """A list is a list of batches; of a tuple of arrays nobody knows what it means."""
    if isinstance(x, tuple) and x and all(is_array(part) for part in x):
        if form is not None:
            raise DataError(
                f"{role} must be one input, or all inputs that {form.name}.forward takes "
                f"({', '.join(form.parameters or ['any names'])}), got a tuple of {len(x)} tensors "
                "or arrays. Pass the input by itself and without a target, predict(x); batches as "
                "a list, predict([(first,), (second,)])."
            )
        raise DataError(
            f"{role} must say what each part is, got a tuple of {len(x)} tensors or arrays. Pass "
            "the target as y, and several inputs as x=(first, second) or, by name, "
            "x={'first': first, 'second': second}."
        )
    leaves = tree.flatten(x[0])[0] if x else []
    if x and isinstance(x[0], Mapping) and not any(map(is_array, leaves)):
        raise DataError(
            f"{role} must be tensors, arrays or batches of them, got a {type(x).__name__} of "
            f"samples, each a {type(x[0]).__name__} of {type(leaves[0] if leaves else x).__name__} "
            "values. Pass DataLoader(x, batch_size=..., collate_fn=...) with a collate_fn that "
            "makes tensors, such as transformers.default_data_collator."
        )


def _refuse_samples(form: BatchForm, x: object, role: str) -> None:
    """Refuse a bare tuple or list of arrays that forward takes as one list of samples too."""
    reading, way = "batches", "[(first,), (second,)]"
    if isinstance(x, tuple):
        reading, way = "several inputs", "[((first, second),)]"
    cure = f"Pass {way} for {reading}, or [(samples,)] for one batch with the list."
    form.refuse_samples(x, role, reading, cure)


def _refuse_pairs(x: tree.Tree, role: str) -> None:
    """Refuse a list of samples, which would be read as batches: the target of one is a number."""
    first: tree.Tree = x[0] if x else None
    if not tree.is_sequence(first) or len(first) not in (2, 3):
        return
    refuse_listed(first[0], first[1], role, "(inputs, target)")


def _refuse_batch_size(arguments: DataArguments, kind: str) -> None:
    if arguments.batch_size is not None and kind in ("loader", "batches"):
        raise ConfigurationError(
            f"{arguments.batch_size_name} is for tensors, arrays and datasets, but the "
            f"{arguments.role} already comes in batches, from a {type(arguments.x).__name__}. "
            "Set it there."
        )


def _refuse_shuffle(arguments: DataArguments, kind: str) -> None:
    if arguments.shuffle is not None and kind in ("loader", "stream"):
        raise ConfigurationError(
            "shuffle is for tensors, arrays and map-style datasets, but the order of the "
            f"{arguments.role} comes from a {type(arguments.x).__name__}. Set it there."
        )


def _refuse_parts(arguments: DataArguments, kind: str) -> None:
    parts = {"y": arguments.y, "sample_weight": arguments.sample_weight}
    names = [name for name, value in parts.items() if value is not None]
    if names and kind != "arrays":
        raise ConfigurationError(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} for tensors and arrays, "
            f"but the {arguments.role} comes from a {type(arguments.x).__name__}, which yields all "
            "parts of a sample. Let it yield (inputs, target) or (inputs, target, sample_weight)."
        )


def _class_weights(arguments: DataArguments, own_loss: OwnLoss) -> Optional[ClassWeights]:
    if arguments.class_weight is None:
        return None
    if own_loss:
        raise _no_weights("class_weight", own_loss)
    if arguments.sample_weight is not None:
        raise ConfigurationError(
            "class_weight and sample_weight both say how much a sample counts. Pass one of "
            "them, or multiply both into sample_weight."
        )
    return ClassWeights(arguments.class_weight)


def _no_weights(name: str, own_loss: OwnLoss) -> ConfigurationError:
    if own_loss == "whole":
        return ConfigurationError(
            f"{name} needs a loss from compile, but the steps compute their own. Put weights "
            "into the batch, and apply them in the step."
        )
    return ConfigurationError(
        f"{name} needs a loss from compile, but the module computes its own (loss=None). Let "
        "forward take the weights, or pass loss= to compile."
    )


def _refuse_missing_or_weights(arguments: DataArguments, mode: Mode, own_loss: OwnLoss) -> None:
    if arguments.sample_weight is not None and own_loss:
        raise _no_weights("sample_weight", own_loss)
    if arguments.y is None and arguments.sample_weight is not None:
        raise ConfigurationError("sample_weight needs a target, but y is None. Pass y= as well.")
    may_hold = isinstance(arguments.x, Mapping)
    if arguments.y is None and mode is not Mode.PREDICT and not own_loss and not may_hold:
        raise ConfigurationError(
            f"the {arguments.role} needs a target for the loss, but y is None. Pass y= as well, "
            "or use compile(loss=None) if the module computes its own loss."
        )


def _of_arrays(arguments: DataArguments, mode: Mode, batch_size: int) -> _Loader:
    parts = [arguments.x, arguments.y, arguments.sample_weight]
    roots = ("x", "y", "sample_weight")
    names: List[str] = []
    weight_names: List[str] = []
    for part, root in zip(parts, roots):
        weight_names = []
        for path, leaf in tree.flatten_with_paths(part, root)[0]:
            _refuse_no_array(path, leaf, arguments.role)
            weight_names.append(path)
        names += weight_names
    if not names or not tree.flatten(arguments.x)[0]:
        raise DataError(f"{arguments.role}: x holds no tensor or array. Pass at least one.")
    raw = (arguments.x,) if arguments.are_inputs else arguments.x
    if arguments.y is not None:
        raw = (arguments.x, arguments.y)
    if arguments.sample_weight is not None:
        raw = (arguments.x, arguments.y, arguments.sample_weight)
    loader = array_loader(raw, names, batch_size, arguments.role)
    if arguments.sample_weight is not None:
        refuse_bad_weights(
            arguments.sample_weight, weight_names, arguments.role, mode is Mode.TRAIN
        )
    return loader, loader.shuffled


def _refuse_table(arguments: DataArguments) -> None:
    """A table would be read as an iterable, of the names of its columns or of its rows."""
    kind = type(arguments.x)
    is_taken = is_array(arguments.x) or is_datasets_table(arguments.x)
    if not is_taken and any(hasattr(kind, method) for method in _CONVERSIONS):
        _refuse_no_array("x", arguments.x, arguments.role)


def _refuse_no_array(path: str, leaf: object, role: str) -> None:
    if is_array(leaf):
        return
    methods = [f".{method}()" for method in _CONVERSIONS if hasattr(leaf, method)]
    cure = f"Pass its numbers, such as {(methods or ['numpy.asarray(...)'])[0]}."
    if isinstance(leaf, (bool, int, float, complex, str)):
        cure = "Pass one value for each sample."
    raise DataError(
        f"{role}: {path} must be a tensor or an array with one row per sample, got "
        f"{type(leaf).__name__}. {cure}"
    )


def _of_batches(arguments: DataArguments) -> _Loader:
    dataset, role = arguments.x, arguments.role
    workers = dataset.workers if hasattr(dataset, "workers") else 0
    if workers > 1 or (hasattr(dataset, "use_multiprocessing") and dataset.use_multiprocessing):
        warn_user(
            f"{role}: the batches of {type(dataset).__name__} are made one after another in this "
            f"process, without its workers={workers}; they are the same batches. To use worker "
            f"processes, pass DataLoader(dataset, batch_size=None, num_workers={workers})."
        )
    batches = BatchSequence(dataset)
    is_finite = batch_total(batches) is not None
    return batches, (lambda key: BatchSequence(dataset, key)) if is_finite else None


def _of_dataset(arguments: DataArguments, batch_size: int) -> _Loader:
    dataset = arguments.x
    try:
        len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise DataError(
            f"{arguments.role}: the dataset {type(dataset).__name__} must have __len__, so that "
            "samples can be selected by index. Add it, or derive from "
            "torch.utils.data.IterableDataset."
        ) from error

    def shuffled(key: int) -> Iterable[RawBatch]:
        # Its present length: a callback may have changed the dataset.
        return DataLoader(dataset, batch_size=batch_size, sampler=EpochOrder(len(dataset), key))

    return DataLoader(dataset, batch_size=batch_size), shuffled


def split_data(
    arguments: DataArguments, fraction: Any, held_out: DataArguments
) -> Tuple[DataArguments, DataArguments]:
    """Split data into samples to train on and the last ``fraction``, which is held out.

    Args:
        arguments: known to be good.
        fraction: between 0 and 1.
        held_out: what the second part is for, and its batch size.

    Raises:
        ConfigurationError: it can't be split, or a part would be empty.
    """
    arguments = arguments.as_arrays()
    kind = _kind(arguments)
    if kind not in ("arrays", "dataset"):
        raise ConfigurationError(
            "validation_split is for tensors, arrays and map-style datasets, but the "
            f"{arguments.role} comes from a {type(arguments.x).__name__}. Pass validation_data."
        )
    leaves = tree.flatten(arguments.x)[0]
    samples = len(arguments.x) if kind == "dataset" else int(leaves[0].shape[0])
    # Keras' own expression: another one may round to another size.
    first = math.floor(samples * (1.0 - fraction))
    if first in (0, samples):
        raise ConfigurationError(
            f"validation_split={fraction} must leave samples for both parts, but with {samples} "
            f"samples it leaves {first} for training and {samples - first} for validation. "
            "Choose another fraction, or pass validation_data."
        )
    parts = []
    for template, rows in ((arguments, range(first)), (held_out, range(first, samples))):
        if kind == "dataset":
            parts.append(dataclasses.replace(template, x=Subset(arguments.x, rows)))
            continue
        cut = slice(rows.start, rows.stop)
        x, y, weight = (
            tree.map_leaves(lambda leaf, cut=cut: leaf[cut], part)  # type: ignore[misc]
            for part in (arguments.x, arguments.y, arguments.sample_weight)
        )
        parts.append(dataclasses.replace(template, x=x, y=y, sample_weight=weight))
    return parts[0], parts[1]
