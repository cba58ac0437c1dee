"""A check of what a recording would make of a module: several runs, held against each other."""

from __future__ import annotations

import contextlib
from typing import Dict, Iterator, Optional

import torch
from torch import Tensor, nn

from ipufit.analysis.check.findings import Findings
from ipufit.analysis.check.messages import said_at, seeded_at
from ipufit.analysis.check.output_events import Said, quiet
from ipufit.analysis.check.python_state import same_values
from ipufit.analysis.check.report import CheckReport
from ipufit.analysis.check.runs import Subject
from ipufit.analysis.check.static_checks import mode_findings, untrained_findings
from ipufit.analysis.check.suite import Battery
from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import Precision
from ipufit.losses import Loss
from ipufit.partition.partition import NOT_DIVIDED, Partitions
from ipufit.tracing.capture import Frame
from ipufit.utils.module_modes import evaluating, training
from ipufit.utils.random_streams import isolated

__all__ = ["check"]


def check(
    module: nn.Module,
    loss: Optional[Loss],
    sample: MicroBatch,
    precision: Precision,
    optimizer: Optional[torch.optim.Optimizer],
    caller: Optional[Frame],
    partitions: Partitions = NOT_DIVIDED,
) -> CheckReport:
    """Run the module a few times, and report what a program would not repeat.

    Afterwards weights, buffers, optimizer, generators, attributes and modes are what they were.

    Args:
        module: the user's.
        loss: normal form; None where there is none, or no target for it.
        sample: a micro-batch.
        precision: in which it computes.
        optimizer: None where every parameter counts as trained.
        caller: the line that stands for what has none of its own.
        partitions: of the module over IPUs.

    Raises:
        DataError: the module can't take the batch.
    """
    owned = None
    if optimizer is not None:
        owned = [p for group in optimizer.param_groups for p in group["params"]]
    subject = Subject(module, loss, sample, precision, owned, partitions)
    found = Findings(caller)
    said = Said()
    with isolated(subject.device), _put_back(subject) as pristine:
        with quiet(said):
            found.add(*mode_findings(subject.step))
            loss_module = loss.module if loss is not None else None
            with training(module, loss_module):
                reached = Battery(subject, pristine, found, True).run()
            with evaluating(module, loss_module), found.noted(" in eval mode"):
                Battery(subject, pristine, found, False).run()
        found.add(*untrained_findings(subject.step, subject.trained, reached))
    found.add(*(said_at(frame, how) for frame, how in said.outputs.items()))
    found.add(*(seeded_at(frame) for frame in said.seeds))
    return CheckReport(type(module).__name__, found.sorted(), loss is not None)


@contextlib.contextmanager
def _put_back(subject: Subject) -> Iterator[Dict[str, Tensor]]:
    """Copies of parameters and buffers, which are put back where someone has reached the own ones.

    Yields:
        The copies, by name.
    """
    state = subject.state
    pristine = {name: tensor.detach().clone() for name, tensor in state.items()}
    gradients = {name: tensor.grad for name, tensor in state.items() if tensor.is_leaf}
    try:
        yield pristine
    finally:
        for name, tensor in state.items():
            if not same_values(tensor, pristine[name]):
                with torch.no_grad():
                    tensor.copy_(pristine[name])
            if name in gradients and tensor.grad is not gradients[name]:
                tensor.grad = gradients[name]
