"""Held-out data, evaluated after the epochs of a fit."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from ipufit.callbacks import CallbackList
from ipufit.callbacks.callback_list import CallbackObserver
from ipufit.core.batch import MicroBatch, Mode
from ipufit.data.source import DataAdapter
from ipufit.errors import DataError, IpufitError, LossError, brief_error
from ipufit.training.fit_data import updates_per_epoch
from ipufit.training.session import JobSpec, Session
from ipufit.training.trainer import Trainer
from ipufit.utils.random_streams import isolated
from ipufit.utils.state import eval_mode


class ValidationRunner:
    """Evaluates held-out data after each epoch of a fit, with random numbers of its own.

    Args:
        session: of the model.
        job: an evaluation, of whichever epoch.
    """

    def __init__(self, session: Session, job: JobSpec) -> None:
        self._session = session
        self._job = job
        # Steps that are written for validation name their values for it.
        self._has_own_names = session.loss.in_module == "whole"
        self._names: Optional[List[str]] = None
        self._directions: Dict[str, str] = {}
        self._has_warned = False

    def named(self, name: str, trained: Sequence[str]) -> str:
        """Return the name of a validation's value beside the names of training."""
        return name if self._has_own_names and name not in trained else f"val_{name}"

    def names(self, trained: Sequence[str]) -> List[str]:
        """Return the names of the values, as far as they are known before the first validation."""
        known = self._names if self._has_own_names and self._names is not None else trained
        return [self.named(name, trained) for name in known]

    def directions(self, trained: Sequence[str], known: Mapping[str, str]) -> Dict[str, str]:
        """Return by name "min" or "max", whichever is best, for values where it is known.

        Args:
            trained: names of the values of training.
            known: the same of training.
        """
        own = self._directions if self._has_own_names else known
        return {self.named(name, trained): way for name, way in own.items()}

    def check(self, trained_on: MicroBatch) -> None:
        """Find out before training whether this data can be evaluated, without reading the loader.

        What is recorded for that is kept for the first evaluation.

        Raises:
            DataError: it is empty, can't be fed, or the module takes the training data only.
            CaptureError: the module can't be recorded in eval mode.
        """
        session, source = self._session, self._job.source
        if source.micro_batches == 0:
            raise source.no_batches(0)
        with isolated():
            preview = source.preview()
        if not preview:
            return
        example = session.unpack(source, Mode.EVALUATE, preview[0])
        source = DataAdapter(preview, source.role)
        try:
            with eval_mode(session.module, session.loss.module):
                plan = dataclasses.replace(self._job.plan, fixed_updates=None)
                spec = JobSpec(source, plan, Mode.EVALUATE, self._job.seed, "check")
                job = session.start(spec)
                self._names, self._directions = job.meter.names, job.meter.directions
                session.finish(job.program)
        except Exception as error:
            what = error.what if isinstance(error, DataError) else ""
            is_clear = isinstance(error, IpufitError) and not isinstance(error, LossError)
            if _form(example) == _form(trained_on) or (is_clear and not what):
                raise
            reason = what.partition(": ")[2] or brief_error(error)
            raise DataError(
                f"the module must take the {source.role} like the training data, but it failed "
                f"with {reason}. It got {_shapes(example)}, in training {_shapes(trained_on)}. Use "
                "the same form for both in the dataset or collate_fn."
            ) from (error.__cause__ if what else error)

    def run(self, callbacks: CallbackList, trained: Sequence[str], epoch: int) -> Dict[str, float]:
        """Return loss and metrics over all samples, by their names in the history.

        Args:
            callbacks: those of the fit.
            trained: names of the values of training.
            epoch: index of the epoch after which this is.
        """
        session = self._session
        kept = [(buffer, buffer.clone()) for buffer in session.buffers()]
        with eval_mode(session.module, session.loss.module):
            job = session.start(dataclasses.replace(self._job, epoch=epoch), session.processes)
            try:
                with session.running(job):
                    job.explainer.has_warned |= self._has_warned
                    updates = updates_per_epoch(job.plan, self._job.source)
                    callbacks.params["validation_updates"] = updates
                    values = Trainer(job, [CallbackObserver(callbacks, job)]).evaluate(epoch)
                    self._has_warned = job.explainer.has_warned
                    return {self.named(name, trained): value for name, value in values.items()}
            finally:
                # A module may count in eval mode too; looking must not change training.
                for buffer, value in kept:
                    buffer.copy_(value)


def _form(batch: MicroBatch) -> Tuple[object, ...]:
    return (batch.structure, tuple((leaf.shape[1:], leaf.dtype) for leaf in batch.tensors))


def _shapes(batch: MicroBatch) -> str:
    return " and ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in batch.tensors)
