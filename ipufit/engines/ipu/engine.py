"""The IPU engine: programs through PopTorch, the SDK's or the stand-in."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import nn

from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.option_roles import role_of
from ipufit.core.train_config import TrainConfig
from ipufit.engines.ipu.config_options import engine_options
from ipufit.engines.ipu.device import OWNER, alone
from ipufit.engines.ipu.executable import Unit
from ipufit.engines.ipu.failures import told
from ipufit.engines.ipu.inference import InferenceProgram
from ipufit.engines.ipu.ipu_config import IPUConfig
from ipufit.engines.ipu.limits import check_autocast, check_ipus, check_request
from ipufit.engines.ipu.module_copy import unwrapped
from ipufit.engines.ipu.options import check_options, make_options
from ipufit.engines.ipu.sdk import ignored_options, keeps_float64
from ipufit.engines.ipu.size import Size
from ipufit.engines.ipu.step import Form, IpuStep
from ipufit.engines.ipu.training import TrainingProgram
from ipufit.engines.program import Program, ProgramSpec
from ipufit.losses import Loss
from ipufit.partition.partition import Partitions
from ipufit.tracing.fingerprint import fingerprint
from ipufit.tracing.grad_step import StepModule
from ipufit.utils.phase_timer import NO_CLOCK, NoClock

__all__ = ["IpuEngine"]

# Compiled inference programs that are kept for later; the least recently used go first.
_KEPT = 8


class IpuEngine:
    """Builds programs for one compiled model.

    Args:
        sdk: PopTorch, or a module with its API.
        name: "ipu", or "ipu-standin" where the module is the stand-in.

    Attributes:
        sdk, name: as given.
        seconds: time spent on compiling so far, in seconds.
        clock: is told what the time goes to.
        compiled: number of programs compiled so far.
        takes_options: whether ``training_options`` and ``inference_options`` mean something.
    """

    takes_options = True

    def __init__(self, sdk: Any, name: str = "ipu") -> None:
        self.sdk = sdk
        self.name = name
        self.seconds = 0.0
        self.clock: NoClock = NO_CLOCK
        self.compiled = 0
        self._inference: OrderedDict[Tuple[Any, ...], Tuple[Unit, object]] = OrderedDict()

    @property
    def wide(self) -> bool:
        """Whether float64 is kept, as only the stand-in can."""
        return keeps_float64(self.sdk)

    def check(
        self,
        module: nn.Module,
        optimizer: Optional[torch.optim.Optimizer],
        loss: Loss,
        train_config: TrainConfig,
        options: Dict[str, Any],
        partitions: Partitions,
    ) -> None:
        """Refuse at ``compile`` what an IPU can't do.

        Args:
            module, optimizer, loss, config: as ``compile`` resolved them.
            options: by the argument's name.
            partitions: of the module over IPUs.

        Raises:
            ConfigurationError: naming it; several faults as one error.
        """
        for role, given in options.items():
            check_options(self.sdk, given, role)
        check_request(module, optimizer, loss, train_config, self.wide)

    def options_of(self, config: IPUConfig) -> Dict[str, Any]:
        """Options that a configuration asks for, by the argument of ``compile``."""
        return {
            "training_options": engine_options(self.sdk, config, False),
            "inference_options": engine_options(self.sdk, config, True),
        }

    def build(self, spec: ProgramSpec) -> Program:
        """A program for the spec; it is compiled when the first micro-batch of a shape comes."""
        check_options(self.sdk, spec.options, role_of(spec.mode))
        check_autocast()
        check_ipus(spec.plan)
        if spec.mode is Mode.TRAIN:
            return TrainingProgram(self, spec)
        return InferenceProgram(self, spec)

    def inference_unit(self, spec: ProgramSpec, size: Size, example: MicroBatch) -> Unit:
        """The compiled program for the example's shapes; compiled now if it is new."""
        whole = StepModule(spec.module, spec.loss)
        frozen, held = fingerprint(whole)
        forms = tuple((leaf.dtype, leaf.shape[1:]) for leaf in example.leaves)
        key: Tuple[object, ...] = (
            unwrapped(frozen),
            spec.mode,
            spec.want_outputs,
            size,
            example.structure,
            forms,
            id(spec.module),
            id(spec.loss),
            id(spec.options),
        )
        if key not in self._inference:
            unit = self._compiled(spec, size, example)
            key = (unwrapped(fingerprint(whole)[0]), *key[1:])
            self._inference[key] = (unit, (held, spec))
            if len(self._inference) > _KEPT:
                self._destroy(self._inference.popitem(last=False)[1][0])
        self._inference.move_to_end(key)
        return self._inference[key][0]

    def _compiled(self, spec: ProgramSpec, size: Size, example: MicroBatch) -> Unit:
        options = make_options(self.sdk, spec.options, spec, size)
        step = IpuStep(self.sdk, spec.module, spec.loss, spec, Form.of(example, size.padding))
        step.training = spec.module.training
        with self.timed(), told(self.sdk, "wrapping the module"):
            executor = self.sdk.inferenceModel(step, options=options)
            unit = Unit(self.sdk, step, executor, size, self.wide)
            unit.compile(example)
        self.compiled += 1
        return unit

    def _destroy(self, unit: Unit) -> None:
        with told(self.sdk, "closing a program"):
            OWNER.release(unit.executor)
            unit.executor.destroy()

    def release_inference(self) -> None:
        """Take the device from inference programs, so that the next one brings weights over."""
        for unit, _ in self._inference.values():
            OWNER.release(unit.executor)

    @alone
    def close(self) -> None:
        """Let go of all compiled programs; safe twice."""
        while self._inference:
            self._destroy(self._inference.popitem(last=False)[1][0])

    def explain(self, train_config: TrainConfig, options: Mapping[str, Any]) -> List[str]:
        """What is particular about how it runs, in sentences.

        Args:
            config: how an update is made.
            options: as for :meth:`check`.
        """
        lines = []
        schedule = train_config.schedule
        if schedule is not None and schedule.per_update:
            lines.append(
                f"{schedule.name} changes settings with every update, and a device takes them "
                "between calls only: every update is a call of its own."
            )
        elif schedule is not None:
            lines.append(f"{schedule.name} changes settings between epochs: no call is split.")
        if train_config.output_mode.kind != "all":
            lines.append(
                f"output_mode={train_config.output_mode.kind!r} chooses on the host: the device "
                "hands back all outputs, because losses come back from every micro-batch."
            )
        for role, given in options.items():
            names = ignored_options(self.sdk, given)
            if names:
                lines.append(f"Of {role}, these change nothing on {self.name}: {', '.join(names)}.")
        return lines

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block as spent on compiling."""
        start = time.perf_counter()
        try:
            with self.clock.during("capture"):
                yield
        finally:
            self.seconds += time.perf_counter() - start
