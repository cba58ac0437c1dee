"""State that the programs of one IPU engine share: PopTorch, compiled programs, the time."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from typing import Any, Iterator, Tuple

from ipufit.core.batch import MicroBatch
from ipufit.engines.ipu.device import OWNER, alone, translate_errors
from ipufit.engines.ipu.executable import Executable
from ipufit.engines.ipu.module_copy import unwrapped
from ipufit.engines.ipu.options import make_options
from ipufit.engines.ipu.sdk import keeps_float64
from ipufit.engines.ipu.size import Size
from ipufit.engines.ipu.step import Form, IpuStep
from ipufit.engines.program import ProgramSpec
from ipufit.tracing.fingerprint import fingerprint
from ipufit.tracing.grad_step import ModuleWithLoss
from ipufit.utils.phase_timer import NO_CLOCK, NoClock

__all__ = ["IpuContext"]

# Compiled inference programs that are kept for later; the least recently used go first.
_KEPT = 8


class IpuContext:
    """Compiles inference programs and keeps them for later ones, and counts what compiling takes.

    Args:
        sdk: PopTorch, or a module with its API.
        name: "ipu", or "ipu-standin" where the module is the stand-in.

    Attributes:
        sdk, name: as given.
        seconds: time spent on compiling so far, in seconds.
        clock: is told what the time goes to.
        compiled: number of programs compiled so far.
    """

    def __init__(self, sdk: Any, name: str = "ipu") -> None:
        self.sdk = sdk
        self.name = name
        self.seconds = 0.0
        self.clock: NoClock = NO_CLOCK
        self.compiled = 0
        self._inference: OrderedDict[Tuple[Any, ...], Tuple[Executable, object]] = OrderedDict()

    @property
    def wide(self) -> bool:
        """True where float64 is kept, as only the stand-in can."""
        return keeps_float64(self.sdk)

    def inference_unit(self, spec: ProgramSpec, size: Size, example: MicroBatch) -> Executable:
        """The compiled program for the example's shapes; compiled now if it is new."""
        whole = ModuleWithLoss(spec.module, spec.loss)
        frozen, referents = fingerprint(whole)
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
            self._inference[key] = (unit, (referents, spec))
            if len(self._inference) > _KEPT:
                self._destroy(self._inference.popitem(last=False)[1][0])
        self._inference.move_to_end(key)
        return self._inference[key][0]

    def _compiled(self, spec: ProgramSpec, size: Size, example: MicroBatch) -> Executable:
        options = make_options(self.sdk, spec.options, spec, size)
        step = IpuStep(self.sdk, spec.module, spec.loss, spec, Form.of(example, size.padding))
        step.training = spec.module.training
        with self.timed(), translate_errors(self.sdk, "wrapping the module"):
            executor = self.sdk.inferenceModel(step, options=options)
            unit = Executable(self.sdk, step, executor, size, self.wide)
            unit.compile(example)
        self.compiled += 1
        return unit

    def _destroy(self, unit: Executable) -> None:
        with translate_errors(self.sdk, "closing a program"):
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

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block as spent on compiling."""
        start = time.perf_counter()
        try:
            with self.clock.during("capture"):
                yield
        finally:
            self.seconds += time.perf_counter() - start
