"""Which program runs an update: the full one, one with padding, a smaller one, or none."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Sequence, Tuple

from ipufit.core.batch import counts_by_rank
from ipufit.engines.embedded.gradient_reduction import Reduction
from ipufit.engines.ipu.module_copy import Trained
from ipufit.engines.ipu.padding import padding_needed, samples_stand_apart
from ipufit.engines.ipu.program_cache import ProgramCache
from ipufit.engines.ipu.size import Size
from ipufit.engines.program import ProgramSpec
from ipufit.errors import PlanError
from ipufit.tracing.grad_step import public_name

__all__ = ["ProgramSelector"]

_LEVELS = ("none", "micro-batches", "samples")


class ProgramSelector:
    """Chooses, and builds what is chosen.

    Args:
        spec: what is built.
        size: of the main program's calls.
        programs: builds them.
    """

    def __init__(self, spec: ProgramSpec, size: Size, programs: ProgramCache) -> None:
        self._spec = spec
        self._size = size
        self._programs = programs
        self._reduction = Reduction(spec)
        self._apart: Optional[bool] = None

    def forget(self) -> None:
        """The module is another one now."""
        self._apart = None

    def program_for(self, update: Sequence[int]) -> Trained:
        """The program for one update, the same one in all processes.

        Args:
            update: samples of its micro-batches, of all processes, by place; 0 where there is none.

        Raises:
            PlanError: no program can run it exactly.
        """
        size = dataclasses.replace(self._size, iterations=1)
        need = self._need(update)
        if need == "none" and size == self._size:
            return self._programs.built(size)
        self._programs.built(self._size)
        if not self._may_be(need):
            return self._programs.built(self._smaller(update, size))
        # One program for all of them: where an epoch ends in an update that needs more, it is
        # prepared for that as well.
        last = self.last_sizes()
        coming = self._need(last) if last is not None else "none"
        if _LEVELS.index(coming) > _LEVELS.index(need) and self._may_be(coming):
            need = coming
        there = [
            known
            for known in self._programs.sizes
            if dataclasses.replace(known, padding="none") == size
            and known != self._size
            and _LEVELS.index(known.padding) >= _LEVELS.index(need)
        ]
        return self._programs.built(there[0] if there else dataclasses.replace(size, padding=need))

    def check_last(self) -> None:
        """Make sure that an epoch's last update can be run, as far as it is known.

        Raises:
            PlanError: it can't.
        """
        last = self.last_sizes()
        if last is not None and not self._may_be(self._need(last)):
            self._smaller(last, dataclasses.replace(self._size, iterations=1))

    def _need(self, update: Sequence[int]) -> str:
        return padding_needed([each for each in update if each], self._spec.plan)

    def last_sizes(self) -> Optional[Tuple[int, ...]]:
        """Sizes of the micro-batches of an epoch's last update, if that is not full."""
        plan = self._spec.plan
        if plan.tail is None:
            return None
        return list(plan.updates(plan.tail.samples))[-1]

    def shares(self, sizes: Sequence[int], size: Size, counted: bool) -> List[float]:
        """Return what each loss is multiplied with before PopTorch's reduction.

        Args:
            sizes: samples of the update's micro-batches, of all processes.
            size: of the program.
            counted: whether the loss knows by itself what it is a mean over.
        """
        if counted:
            return [1.0] * len(sizes)
        # PopTorch divides by the replicas of all processes.
        divisor = size.per_update * self._spec.plan.processes
        if self._spec.config.gradient_reduction != "mean":
            divisor = 1
        return [share * divisor for share in self._reduction.coefficients(sizes)]

    def _may_be(self, need: str) -> bool:
        """Tell whether such padding changes nothing."""
        if need == "none":
            return True
        traced = self._programs.built(self._size).unit.traced
        if traced.changed or traced.counters:
            return False
        if need == "micro-batches":
            return True
        if self._apart is None:
            assert self._programs.example is not None
            logs = set(traced.reported.rules) - set(self._spec.loss.part_names)  # type: ignore[union-attr]
            self._apart = not logs and samples_stand_apart(self._spec, self._programs.example)
        return self._apart

    def _smaller(self, update: Sequence[int], size: Size) -> Size:
        """The size of a program for just these micro-batches.

        Raises:
            PlanError: there is none.
        """
        plan = self._spec.plan
        sizes = [each for each in update if each]
        counts = counts_by_rank(update, plan)
        own = counts[0]
        if len(set(sizes)) == 1 and set(counts) == {own} and own % size.replicas == 0:
            smaller = dataclasses.replace(
                size, accumulation=own // size.replicas, micro_batch=sizes[0]
            )
            shares = self.shares(sizes, smaller, False)
            plain = all(abs(share - 1) < 1e-12 for share in shares)
            return smaller if plain else dataclasses.replace(smaller, padding="micro-batches")
        traced = self._programs.built(self._size).unit.traced
        if traced.changed or traced.counters:
            which = public_name(sorted([*traced.changed, *traced.counters])[0])
            why = f"forward changes the buffer {which!r}, which padding would change too"
        else:
            why = "the loss, or what the module logs, can't be told sample by sample"
        raise PlanError(
            [
                f"every update must be one that an IPU can run exactly, but the last one of an "
                f"epoch has micro-batches of {', '.join(map(str, sizes))} samples instead of "
                f"{plan.micro_batches_per_update} of {size.micro_batch}, and {why}. Use "
                "drop_last=True in the loader, a batch_size and gradient_accumulation that divide "
                "the samples, or engine='embedded'."
            ]
        )
