"""IPUConfig: how a model runs on IPUs, in the words of optimum-graphcore."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any, ClassVar, Dict, FrozenSet, List, Mapping, Optional, Sequence, Union

from ipufit.core import ConfigOutputMode, PodType
from ipufit.engines.ipu.effects import ENGINES
from ipufit.engines.ipu.ipu_config import reading, serialization
from ipufit.engines.ipu.ipu_config.parameters import (
    PARAMETERS,
    IpuLayout,
    ParameterValues,
    check_value,
    is_default,
    nearest,
    twin,
    values_of,
)
from ipufit.engines.ipu.ipu_config.serialization import Path, Token
from ipufit.engines.ipu.ipu_config.settings import changed_parameters, effects_of, to_options
from ipufit.engines.ipu.sdk import load_standin, sdk_or_none
from ipufit.errors import ConfigurationError, shown, unfit
from ipufit.utils.files import write_text

Memory = Union[float, Sequence[float]]

_MODES = ("training", "inference")
# These two are chosen by what is asked for, never by the mode.
_NOT_BY_MODE = ("replication_factor", "device_iterations")


class IPUConfig(ParameterValues):
    """Settings of a model on IPUs, with the parameters, names and defaults of optimum-graphcore.

    Every parameter is also an attribute. Each value is checked when it is set; whether they fit
    together is checked when the object is created, updated, saved or used. Values that follow from
    others are filled in when the object is created. ``Model.compile(config=...)`` takes it. See
    docs/ipu-config.md.

    Args:
        replication_factor: copies of the model in training.
        inference_replication_factor: the same for inference.
        gradient_accumulation_steps: micro-batches that a replica sums before an update.
        layers_per_ipu: layers of the model on each IPU of a replica in training; -1 is an even
            share of the rest, and a single -1 spreads all layers over ``ipus_per_replica``.
        inference_layers_per_ipu: the same for inference; None is ``layers_per_ipu``.
        ipus_per_replica: IPUs of one copy in training; None is the length of ``layers_per_ipu``.
        inference_ipus_per_replica: the same for inference; None is the length of
            ``inference_layers_per_ipu``, or ``ipus_per_replica`` where that is one -1.
        optimizer_state_offchip: keep the optimizer's state in memory outside the chip.
        replicated_tensor_sharding: each replica keeps a part of that state; with two or more
            replicas.
        matmul_proportion: share of an IPU's memory for temporary values in training, one number or
            one for each IPU of a replica.
        inference_matmul_proportion: the same for inference; None is ``matmul_proportion``, or 0.2
            where that is a list of another length.
        enable_half_partials: partial sums of products and convolutions in float16.
        embedding_serialization_factor: number of parts of the embedding on its IPU; None is 1
            without splits.
        inference_embedding_serialization_factor: the same for inference.
        serialized_embedding_splits_per_ipu: parts of the embedding on each IPU instead.
        inference_serialized_embedding_splits_per_ipu: the same for inference.
        projection_serialization_factor: the same for the output projection.
        inference_projection_serialization_factor: the same for inference.
        serialized_projection_splits_per_ipu: parts of the projection on each IPU instead.
        inference_serialized_projection_splits_per_ipu: the same for inference.
        recompute_checkpoint_every_layer: compute activations again in the backward pass.
        device_iterations: updates per call of the program.
        inference_device_iterations: forward passes per call.
        output_mode: which outputs of training are returned: "all", "sum", "final" or "default",
            which is "final". Inference returns all.
        seed: for random numbers; None sets no seed.
        auto_loss_scaling: use a loss scale that follows the gradients.
        executable_cache_dir: folder for compiled programs; "" or "disabled" for none.
        explicit_ir_inference: an experimental mode of the compiler for inference.
        parallelize_kwargs: arguments of the ``parallelize`` of optimum-graphcore's models.
        inference_parallelize_kwargs: the same for inference.
        others: parameters of earlier releases, as docs/ipu-config.md lists them.

    Attributes:
        notes: values of older files that were ignored or changed, one sentence each.

    Raises:
        ConfigurationError: values that can't work; with every fault.

    >>> config = IPUConfig(layers_per_ipu=[2, 3], gradient_accumulation_steps=8)
    >>> config.ipus_per_replica, config.batch_size_factor()
    (2, 8)
    """

    _mode: str
    _by_pod: Dict[str, Dict[str, object]]
    _passed: FrozenSet[str]

    def __init__(
        self,
        replication_factor: int = 1,
        inference_replication_factor: int = 1,
        gradient_accumulation_steps: int = 1,
        layers_per_ipu: Sequence[int] = (-1,),
        inference_layers_per_ipu: Optional[Sequence[int]] = None,
        ipus_per_replica: Optional[int] = None,
        inference_ipus_per_replica: Optional[int] = None,
        optimizer_state_offchip: bool = False,
        replicated_tensor_sharding: bool = False,
        matmul_proportion: Memory = 0.2,
        inference_matmul_proportion: Optional[Memory] = None,
        enable_half_partials: bool = True,
        embedding_serialization_factor: Optional[int] = None,
        inference_embedding_serialization_factor: Optional[int] = None,
        serialized_embedding_splits_per_ipu: Optional[Sequence[int]] = None,
        inference_serialized_embedding_splits_per_ipu: Optional[Sequence[int]] = None,
        projection_serialization_factor: Optional[int] = None,
        inference_projection_serialization_factor: Optional[int] = None,
        serialized_projection_splits_per_ipu: Optional[Sequence[int]] = None,
        inference_serialized_projection_splits_per_ipu: Optional[Sequence[int]] = None,
        recompute_checkpoint_every_layer: bool = False,
        device_iterations: int = 1,
        inference_device_iterations: int = 1,
        output_mode: ConfigOutputMode = "final",
        seed: Optional[int] = None,
        auto_loss_scaling: bool = False,
        executable_cache_dir: Path = "",
        explicit_ir_inference: bool = False,
        parallelize_kwargs: Optional[Dict[str, Any]] = None,
        inference_parallelize_kwargs: Optional[Dict[str, Any]] = None,
        **others: object,
    ) -> None:
        named = {name: value for name, value in locals().items() if name in PARAMETERS}
        # An older name must not lose against the default of the newer one.
        changed = {name: value for name, value in named.items() if not is_default(name, value)}
        self.__dict__.update(reading.read({**changed, **others}), _mode=_MODES[0])

    @classmethod
    def _build(
        cls,
        arguments: Mapping[str, object],
        pod_type: Optional[PodType],
        changes: Mapping[str, object],
        where: str = "",
    ) -> IPUConfig:
        config = cls.__new__(cls)
        faults: List[str] = []
        try:
            config.__dict__.update(reading.read(arguments, pod_type, where), _mode=_MODES[0])
        except ConfigurationError as error:
            # Together with what is wrong with the changes.
            faults.append(str(error))
        config._change(changes, faults)
        return config

    def update(self, changes: Mapping[str, object]) -> None:
        """Set several parameters: all of them or, in case of an error, none.

        Args:
            changes: values by name.

        Raises:
            ConfigurationError: with every fault.
        """
        self._change(changes, [])

    def update_from_string(self, update_str: str) -> None:
        """Set several parameters from a string: all of them or, in case of an error, none.

        Args:
            update_str: ``name=value`` separated by commas: numbers and strings as they are, true or
                false, none where None is allowed, and lists as ``[a b c]``.

        Raises:
            ConfigurationError: with every fault.

        >>> config = IPUConfig()
        >>> config.update_from_string("seed=0,layers_per_ipu=[2 -1],ipus_per_replica=2")
        >>> config.seed, config.layers_per_ipu
        (0, [2, -1])
        """
        faults: List[str] = []
        self._change(reading.parse_changes(update_str, faults), faults)

    def _change(self, changes: Mapping[str, object], faults: List[str]) -> None:
        checked = reading.check_changes(changes, faults)
        before = dict(self.__dict__)
        if not faults:
            self._set(checked)
            faults = reading.incoherent(self.__dict__)
        if faults:
            self.__dict__.update(before)
        reading.raise_faults(faults)

    def check(self) -> None:
        """Check that the values fit together.

        Raises:
            ConfigurationError: with every fault.
        """
        # What a list holds may have been changed without being looked at.
        faults: List[str] = []
        bad = set()
        for name, value in values_of(self).items():
            before = len(faults)
            check_value(name, value, faults)
            bad |= {name} if len(faults) > before else set()
        reading.raise_faults([*faults, *reading.incoherent(self.__dict__, bad)])

    @property
    def mode(self) -> str:
        """Mode of :meth:`value`: "training" or "inference"."""
        return self._mode

    def train(self) -> IPUConfig:
        """Let :meth:`value` return values for training; returns the configuration."""
        self.__dict__["_mode"] = _MODES[0]
        return self

    def eval(self) -> IPUConfig:
        """Let :meth:`value` return values for inference; returns the configuration."""
        self.__dict__["_mode"] = _MODES[1]
        return self

    def value(self, name: str) -> Any:
        """Value of a parameter in the current mode.

        In inference, it is the parameter with the prefix ``inference_``, if that exists.
        ``config._layers_per_ipu`` and so on are the same, for code written for optimum-graphcore.

        Args:
            name: without ``inference_``.

        Raises:
            ConfigurationError: there is no such parameter.

        >>> IPUConfig(inference_device_iterations=5).eval().value("device_iterations")
        5
        """
        if name not in PARAMETERS:
            reading.raise_faults([f"IPUConfig has no parameter {name!r}. {nearest(name)}"])
        other = twin(name) if self._mode == _MODES[1] else None
        return getattr(self, other or name)

    def for_pod_type(self, pod_type: Optional[PodType] = None) -> IPUConfig:
        """Make the configuration for one type of pod.

        Args:
            pod_type: as for :meth:`from_dict`; None uses the values named "default".

        Raises:
            ConfigurationError: an unknown type, a parameter without a value for it, or values that
                don't fit together.
        """
        self.check()
        config = type(self)._build(self._said(), pod_type, {})
        config.__dict__.update(_by_pod={}, notes=self.notes, _mode=self._mode)
        return config

    def batch_size_factor(
        self, for_inference: bool = False, pod_type: Optional[PodType] = None
    ) -> int:
        """Number of micro-batches in one call of the program, on all replicas together.

        Args:
            for_inference: for inference, which accumulates no gradients.
            pod_type: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: as for :meth:`for_pod_type`.
        """
        config = self.for_pod_type(pod_type)
        if for_inference:
            return config.inference_replication_factor * config.inference_device_iterations
        accumulated = config.gradient_accumulation_steps * config.device_iterations
        return config.replication_factor * accumulated

    def partition(self, for_inference: bool = False) -> IpuLayout:
        """How one copy of the model is divided over IPUs.

        Args:
            for_inference: for inference, which recomputes nothing.
        """
        prefix = "inference_" if for_inference else ""
        values: Dict[str, Any] = {}
        for field in dataclasses.fields(IpuLayout)[:-1]:
            value = getattr(self, prefix + field.name)
            values[field.name] = tuple(value) if isinstance(value, list) else value
        recompute = self.recompute_checkpoint_every_layer and not for_inference
        return IpuLayout(recompute_checkpoint_every_layer=recompute, **values)

    def to_options(
        self,
        for_inference: bool = False,
        compile_only: bool = False,
        pod_type: Optional[PodType] = None,
    ) -> Any:
        """Make the ``poptorch.Options`` that optimum-graphcore would make.

        They are those of the Poplar SDK if its PopTorch can be imported, otherwise
        ``ipufit.poptorch.Options``. Torch's generators are not seeded.

        Args:
            for_inference: for inference.
            compile_only: for programs that are compiled without an IPU.
            pod_type: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: the values don't fit together, or the IPUs are of another kind.
        """
        config = self.for_pod_type(pod_type)
        return to_options(sdk_or_none() or load_standin(), config, for_inference, compile_only)

    def report(self, engine: str = "embedded") -> str:
        """List parameters that are exact, approximated, or without effect.

        Args:
            engine: "embedded", "ipu" or "ipu-standin".

        Returns:
            A line for every parameter, with its value and the reason.

        Raises:
            ConfigurationError: an unknown engine.
        """
        if engine not in ENGINES:
            needed = f"one of {', '.join(map(repr, ENGINES))}"
            raise unfit("engine", needed, engine, "Try 'embedded'.")
        return effects_of(self, engine).in_full()

    @classmethod
    def from_dict(
        cls,
        config_dict: Mapping[str, object],
        pod_type: Optional[PodType] = None,
        **changes: object,
    ) -> IPUConfig:
        """Make a configuration from a dict, as in a file.

        Args:
            config_dict: values; also those of earlier releases, and values by pod type.
            pod_type: "pod4", "pod8", "pod16", "pod32", "pod64", "pod128" or "pod256", to choose
                among values by pod type. None uses the values named "default" and keeps the others
                for :meth:`for_pod_type`.
            changes: parameters that are set afterwards. Values that follow from others are not
                updated.

        Raises:
            ConfigurationError: with every fault.
        """
        if not isinstance(config_dict, Mapping):
            raise ConfigurationError(
                f"from_dict needs values by name, got {shown(config_dict)}. Pass a dict, or use "
                "from_pretrained for a path."
            )
        return cls._build(config_dict, pod_type, changes)

    @classmethod
    def from_pretrained(
        cls,
        source: Path,
        pod_type: Optional[PodType] = None,
        *,
        revision: Optional[str] = None,
        cache_dir: Optional[Path] = None,
        local_files_only: bool = False,
        token: Token = None,
        subfolder: str = "",
        **changes: object,
    ) -> IPUConfig:
        """Read a configuration from a file, a folder or the Hugging Face Hub.

        Args:
            source: a file; a folder with an ``ipu_config.json``; or the name of a repository on the
                Hub, for which huggingface_hub is needed (``pip install ipufit[hub]``).
            pod_type: as for :meth:`from_dict`.
            revision: branch, tag or commit on the Hub.
            cache_dir: folder in which huggingface_hub keeps downloads.
            local_files_only: only read from that folder, without a download.
            token: for the Hub; True is the token of the login, and so is None if a token is needed.
            subfolder: with the file, in the folder or repository.
            changes: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: the file is not found or can't be read; with every fault.
        """
        unknown: List[str] = []
        reading.check_changes({n: None for n in changes if n not in PARAMETERS}, unknown)
        # Before anything is downloaded for nothing.
        reading.raise_faults(unknown if not os.path.exists(source) else [])
        hub_arguments: Dict[str, object] = {
            "revision": revision,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
        }
        if token is not None:
            hub_arguments["token"] = token
        path = serialization.find_file(source, subfolder, hub_arguments)
        return cls._build(serialization.read_file(path), pod_type, changes, repr(path))

    @classmethod
    def from_json_file(cls, path: Path, pod_type: Optional[PodType] = None) -> IPUConfig:
        """Read a configuration from a JSON file.

        Args:
            path: of the file.
            pod_type: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: it can't be read; with every fault.
        """
        name = os.fspath(path)
        return cls._build(serialization.read_file(name), pod_type, {}, repr(name))

    @classmethod
    def from_json_string(cls, text: str, pod_type: Optional[PodType] = None) -> IPUConfig:
        """A configuration from JSON.

        Args:
            text: a JSON object.
            pod_type: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: it can't be read; with every fault.
        """
        return cls._build(serialization.parse_json(text, "the text"), pod_type, {}, "the text")

    def to_dict(self) -> Dict[str, Any]:
        """Return all parameters by name, ready for JSON.

        With values by pod type, values that follow from others are left out.
        """
        copied = json.loads(self.to_json_string())
        assert isinstance(copied, dict)
        return copied

    def to_json_string(self) -> str:
        """Write the values as JSON, sorted by name.

        Raises:
            ConfigurationError: ``parallelize_kwargs`` have values that JSON can't represent.
        """
        try:
            return json.dumps(self._said(), indent=2, sort_keys=True, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                "IPUConfig.parallelize_kwargs must hold only JSON values, but "
                f"{str(error).rstrip('.')}. Remove that entry to save the configuration."
            ) from error

    def to_json_file(self, path: Path) -> None:
        """Write the values to a JSON file, which appears under its name only when it is complete.

        Args:
            path: of the file; its folder must exist.

        Raises:
            ConfigurationError: it can't be written, or the values don't fit together.
        """
        self.check()
        text = self.to_json_string()
        try:
            write_text(os.fspath(path), text)
        except OSError as error:
            raise ConfigurationError(
                f"a configuration is written to a file in an existing folder, but {error}. Choose "
                "another path."
            ) from error

    def save_pretrained(
        self,
        folder: Path,
        push_to_hub: bool = False,
        repo_id: Optional[str] = None,
        *,
        commit_message: Optional[str] = None,
        private: Optional[bool] = None,
        token: Token = None,
        revision: Optional[str] = None,
    ) -> Optional[str]:
        """Write ``ipu_config.json`` to a folder, which is created if it is missing.

        ``IPUConfig.from_pretrained(folder)`` reads it; so does optimum-graphcore, unless values are
        by pod type.

        Args:
            folder: of the file.
            push_to_hub: also write it to the Hugging Face Hub.
            repo_id: of the repository there; None is the name of the folder.
            commit_message: as for :meth:`push_to_hub`.
            private: as for :meth:`push_to_hub`.
            token: as for :meth:`push_to_hub`.
            revision: as for :meth:`push_to_hub`.

        Returns:
            The URL of the commit; None if nothing was written to the Hub.

        Raises:
            ConfigurationError: it can't be written, or the values don't fit together.
        """
        for_hub: Dict[str, Any] = {
            "commit_message": commit_message,
            "private": private,
            "token": token,
            "revision": revision,
        }
        named = {"repo_id": repo_id, **for_hub}
        hub_names = [name for name, value in named.items() if value is not None]
        if hub_names and not push_to_hub:
            raise ConfigurationError(
                f"{', '.join(hub_names)} of save_pretrained "
                f"{'are' if len(hub_names) > 1 else 'is'} for the Hugging Face Hub, but "
                "push_to_hub is False. Pass push_to_hub=True, or leave it out."
            )
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"save_pretrained needs a folder, but {error}. Choose another one, or write a file "
                "with to_json_file."
            ) from error
        self.to_json_file(os.path.join(folder, serialization.FILE_NAME))
        if not push_to_hub:
            return None
        name = os.path.basename(os.path.abspath(folder)) if repo_id is None else repo_id
        return self.push_to_hub(name, **for_hub)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: Optional[str] = None,
        private: Optional[bool] = None,
        token: Token = None,
        revision: Optional[str] = None,
    ) -> str:
        """Write ``ipu_config.json`` to a repository on the Hugging Face Hub.

        Repository and branch are created if they are missing. It needs huggingface_hub (``pip
        install ipufit[hub]``).

        Args:
            repo_id: of the repository, such as "someone/some-ipu"; without an owner it is yours.
            commit_message: of the commit; None for one that names the file.
            private: whether a new repository is private; None is the Hub's default.
            token: for the Hub; None is the token of the login.
            revision: branch to write to; None is the main one.

        Returns:
            The URL of the commit.

        Raises:
            ConfigurationError: the values don't fit together, there is no huggingface_hub, or the
                Hub refuses.
        """
        self.check()
        text = self.to_json_string()
        return serialization.upload(text, repo_id, commit_message, private, token, revision)

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is not there; while a copy is made that is everything.
        plain = name[1:]
        if name.startswith("_") and twin(plain) is not None and plain not in _NOT_BY_MODE:
            return self.value(plain)
        if name.startswith("__") or name in ("_by_pod", "_passed", "_mode"):
            raise AttributeError(name)
        raise AttributeError(f"IPUConfig has no parameter {name!r}. {nearest(name)}")

    def __setattr__(self, name: str, value: object) -> None:
        plain = name[1:]
        if name == "mode":
            if value not in _MODES:
                needed = "'training' or 'inference'"
                raise unfit("IPUConfig.mode", needed, value, "Use train() or eval().")
            self.__dict__["_mode"] = value
            return
        if name.startswith("_") and twin(plain) is not None and plain not in _NOT_BY_MODE:
            name = f"inference_{plain}" if self._mode == _MODES[1] else plain
        faults: List[str] = []
        checked = reading.check_changes({name: value}, faults)
        reading.raise_faults(faults)
        self._set(checked)

    def _set(self, checked: Mapping[str, object]) -> None:
        """Values in normal form; None where it follows from others is derived from them anew."""
        state = self.__dict__
        state.update(checked)
        state["_by_pod"] = {n: v for n, v in self._by_pod.items() if n not in checked}
        for name, value in checked.items():
            if "_splits_per_ipu" in name and value is not None:
                factor = name.replace("serialized_", "").replace(
                    "_splits_per_ipu", "_serialization_factor"
                )
                if state[factor] == 1 and checked.get(factor) is None:
                    # A factor of 1 cuts nothing, and gives way.
                    state[factor] = None
        values = reading.filled(values_of(self))
        passed = {name for name, value in checked.items() if value == values[name]}
        state["_passed"] = (self._passed | passed) - (set(checked) - passed)
        state.update(values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IPUConfig):
            return NotImplemented
        return (values_of(self), self._by_pod) == (values_of(other), other._by_pod)

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def _said(self) -> Dict[str, object]:
        """Values to make it of again; what follows from values by type of pod follows anew."""
        names = self._passed if self._by_pod else PARAMETERS
        return {name: self._by_pod.get(name, getattr(self, name)) for name in names}

    def __repr__(self) -> str:
        """Show the values that differ from the defaults."""
        changed = changed_parameters(self)
        return f"IPUConfig({', '.join(f'{name}={value!r}' for name, value in changed.items())})"
