"""IPUConfig: how a model runs on IPUs, in the words of optimum-graphcore."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, ClassVar, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple, Union

from ipufit.engines.ipu.effects import ENGINES
from ipufit.engines.ipu.ipu_config.parameters import (
    PARAMETERS,
    IpuLayout,
    ParameterValues,
    is_default,
    nearest,
    shown,
    twin,
    values_of,
)
from ipufit.engines.ipu.ipu_config.reading import (
    check_changes,
    check_values,
    filled,
    incoherent,
    raise_faults,
    read,
)
from ipufit.engines.ipu.ipu_config.serialization import Path, SerializationMixin
from ipufit.engines.ipu.ipu_config.settings import changed_parameters, effects_of, to_options
from ipufit.engines.ipu.sdk import load_standin, sdk_or_none
from ipufit.errors import ConfigurationError

__all__ = ["IPUConfig"]


_TRUE = ("true", "1", "y", "yes")
_FALSE = ("false", "0", "n", "no")
_NONE = ("none", "null")
# A comma that is not inside of brackets.
_BETWEEN = re.compile(r",(?![^\[]*\])")


def parse_changes(text: str, faults: List[str]) -> Dict[str, object]:
    """The values by name; what can't be read is noted.

    Args:
        text: ``name=value`` separated by commas. Lists are ``[a b c]`` or ``[a,b,c]``.
        faults: sentences are added here.
    """
    if not isinstance(text, str):
        faults.append(
            f"update_from_string needs a string such as 'seed=1,device_iterations=4', got "
            f"{shown(text)}. Use update(...) for a dict."
        )
        return {}
    changes: Dict[str, object] = {}
    for part in _BETWEEN.split(text) if text.strip() else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            faults.append(
                f"every change must be name=value, got {part!r}. Separate changes by commas, and "
                "the entries of a list by spaces: layers_per_ipu=[2 2]."
            )
        elif name in changes:
            faults.append(f"every change must be said once, got {name!r} again. Leave one out.")
        elif name not in PARAMETERS:
            faults.append(f"IPUConfig has no parameter {name!r}. {nearest(name)}")
        else:
            changes[name], fault = _read(name, value)
            faults += [] if fault is None else [fault]
    return changes


def _read(name: str, text: str) -> Tuple[object, Optional[str]]:
    """A value from its text, and a fault or None; whether it fits is looked at later."""
    parameter = PARAMETERS[name]
    words = text.lower()
    if parameter.optional and words in _NONE:
        return None, None
    if isinstance(parameter.default, bool):
        if words in _TRUE + _FALSE:
            return words in _TRUE, None
        accepted = ", ".join(_TRUE + _FALSE)
        return parameter.default, (
            f"IPUConfig.{name} must be one of {accepted} in a string, got {text!r}. Try true."
        )
    if isinstance(parameter.default, str):
        return text, None
    if text.startswith("[") and text.endswith("]"):
        text = "[" + ",".join(text[1:-1].replace(",", " ").split()) + "]"
    try:
        return json.loads(text), None
    except ValueError:
        return text, None


Memory = Union[float, Sequence[float]]

_MODES = ("training", "inference")
# These two are chosen by what is asked for, never by the mode.
_NOT_BY_MODE = ("replication_factor", "device_iterations")


class IPUConfig(ParameterValues, SerializationMixin):
    """How a model runs on IPUs: parameters, names and defaults are those of optimum-graphcore.

    Every parameter is an attribute, too. Values are looked at one by one when they are set, and
    together when the object is made, updated, saved or used; what follows from others is filled in
    when the object is made. ``Model.compile(config=...)`` takes it. See docs/ipu-config.md.

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
        optimizer_state_offchip: keep the optimizer's state in the memory beside the chip.
        replicated_tensor_sharding: each replica keeps a part of that state; from two replicas on.
        matmul_proportion: share of an IPU's memory for temporary values in training, one number or
            one for each IPU of a replica.
        inference_matmul_proportion: the same for inference; None is ``matmul_proportion``, or 0.2
            where that is a list of another length.
        enable_half_partials: partial sums of products and convolutions in float16.
        embedding_serialization_factor: parts into which the embedding is cut on its IPU; None is 1
            without splits.
        inference_embedding_serialization_factor: the same for inference.
        serialized_embedding_splits_per_ipu: parts of the embedding on each IPU instead.
        inference_serialized_embedding_splits_per_ipu: the same for inference.
        projection_serialization_factor: as for the embedding, of the output projection.
        inference_projection_serialization_factor: the same for inference.
        serialized_projection_splits_per_ipu: parts of the projection on each IPU instead.
        inference_serialized_projection_splits_per_ipu: the same for inference.
        recompute_checkpoint_every_layer: compute activations again in the backward pass.
        device_iterations: updates per call of the program.
        inference_device_iterations: forward passes per call.
        output_mode: which outputs of training come back: "all", "sum", "final" or "default", which
            is "final". Inference hands back all.
        seed: of random numbers; None for none.
        auto_loss_scaling: let a loss scale follow the gradients.
        executable_cache_dir: folder for compiled programs; "" or "disabled" for none.
        explicit_ir_inference: an experimental way of the compiler for inference.
        parallelize_kwargs: arguments of the ``parallelize`` of optimum-graphcore's models.
        inference_parallelize_kwargs: the same for inference.
        others: parameters of earlier releases, as docs/ipu-config.md lists them.

    Attributes:
        notes: what was left aside or read differently, one sentence each.

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
        output_mode: str = "final",
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
        self._take({**changed, **others})

    def _take(
        self, arguments: Mapping[str, object], pod_type: Optional[str] = None, where: str = ""
    ) -> None:
        reading = read(arguments, pod_type, where)
        state = self.__dict__
        state.update(reading.values)
        # A configuration for one pod has one value of everything.
        state["_by_pod"] = reading.by_pod if pod_type is None else {}
        state["_passed"] = reading.passed
        state["notes"] = reading.notes
        state["_mode"] = _MODES[0]

    @classmethod
    def _build(
        cls,
        arguments: Mapping[str, object],
        pod_type: Optional[str],
        changes: Mapping[str, object],
        where: str = "",
    ) -> IPUConfig:
        config = cls.__new__(cls)
        faults: List[str] = []
        checked = check_changes(changes, faults)
        try:
            config._take(arguments, pod_type, where)
        except ConfigurationError as error:
            # Together with what is wrong with the changes.
            faults.insert(0, str(error))
        raise_faults(faults)
        config._change(checked, faults)
        return config

    def update(self, changes: Mapping[str, object]) -> None:
        """Set several parameters; all of them or, if something is wrong, none.

        Args:
            changes: values by name.

        Raises:
            ConfigurationError: with every fault.
        """
        faults: List[str] = []
        self._change(check_changes(changes, faults), faults)

    def update_from_string(self, update_str: str) -> None:
        """Set several parameters from one string; all of them or, if something is wrong, none.

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
        changes = parse_changes(update_str, faults)
        self._change(check_changes(changes, faults), faults)

    def _change(self, changes: Mapping[str, object], faults: List[str]) -> None:
        before = dict(self.__dict__)
        if not faults:
            self._set(changes)
            faults = incoherent(self.__dict__)
        if faults:
            self.__dict__.update(before)
        raise_faults(faults)

    def check(self) -> None:
        """Make sure that the values fit together.

        Raises:
            ConfigurationError: with every fault.
        """
        # What a list holds may have been changed without being looked at.
        faults, bad = check_values(values_of(self))
        raise_faults([*faults, *incoherent(self.__dict__, bad)])

    @property
    def mode(self) -> str:
        """The mode for which :meth:`value` answers: "training" or "inference"."""
        return self._mode

    def train(self) -> IPUConfig:
        """Answer for training from now on; returns the configuration."""
        self.__dict__["_mode"] = _MODES[0]
        return self

    def eval(self) -> IPUConfig:
        """Answer for inference from now on; returns the configuration."""
        self.__dict__["_mode"] = _MODES[1]
        return self

    def value(self, name: str) -> Any:
        """A parameter for the present mode: in inference that of its twin, if it has one.

        ``config._layers_per_ipu`` and so on are the same, as code for optimum-graphcore has them.

        Args:
            name: without ``inference_``.

        Raises:
            ConfigurationError: there is no such parameter.

        >>> IPUConfig(inference_device_iterations=5).eval().value("device_iterations")
        5
        """
        if name not in PARAMETERS:
            raise_faults([f"IPUConfig has no parameter {name!r}. {nearest(name)}"])
        other = twin(name) if self._mode == _MODES[1] else None
        return getattr(self, other or name)

    def for_pod_type(self, pod_type: Optional[str] = None) -> IPUConfig:
        """The configuration for one type of pod.

        Args:
            pod_type: as for :meth:`from_dict`; None takes the values named "default".

        Raises:
            ConfigurationError: no such type, a parameter has no value for it, or the values don't
                fit together.
        """
        self.check()
        config = type(self)._build(self._said(), pod_type, {})
        config.__dict__.update(_by_pod={}, notes=self.notes, _mode=self._mode)
        return config

    def batch_size_factor(self, for_inference: bool = False, pod_type: Optional[str] = None) -> int:
        """Micro-batches of one call of the program, on all replicas together.

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
        """How one copy of the model is laid over IPUs.

        Args:
            for_inference: for inference, which computes nothing again.
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
        pod_type: Optional[str] = None,
    ) -> Any:
        """The ``poptorch.Options`` that optimum-graphcore would make of it.

        They are those of the Poplar SDK where its PopTorch can be imported, else
        ``ipufit.poptorch.Options``. The generators of torch stay as they are.

        Args:
            for_inference: for inference.
            compile_only: for programs that are compiled without an IPU.
            pod_type: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: the values don't fit together, or the IPUs are not of the kind that
                they are for.
        """
        config = self.for_pod_type(pod_type)
        config.check()
        return to_options(sdk_or_none() or load_standin(), config, for_inference, compile_only)

    def report(self, engine: str = "embedded") -> str:
        """Three lists: what holds exactly, what approximately, and what has no effect.

        Args:
            engine: "embedded", "ipu" or "ipu-standin".

        Returns:
            A line for every parameter, with its value and why.

        Raises:
            ConfigurationError: there is no such engine.
        """
        if engine not in ENGINES:
            raise ConfigurationError(
                f"engine must be one of {', '.join(map(repr, ENGINES))}, got {shown(engine)}. Try "
                "'embedded'."
            )
        return effects_of(self, engine).in_full()

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
                raise ConfigurationError(
                    f"IPUConfig.mode must be 'training' or 'inference', got {shown(value)}. Use "
                    "train() or eval()."
                )
            self.__dict__["_mode"] = value
            return
        if name.startswith("_") and twin(plain) is not None and plain not in _NOT_BY_MODE:
            name = f"inference_{plain}" if self._mode == _MODES[1] else plain
        faults: List[str] = []
        checked = check_changes({name: value}, faults)
        raise_faults(faults)
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
        values = filled(values_of(self))
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
