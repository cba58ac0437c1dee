"""Check of what a recording would make of a module, by comparing several runs of it."""

from __future__ import annotations

import contextlib
import types
from typing import Dict, Iterator, Optional

import torch
from torch import Tensor, nn

from ipufit.analysis.check.messages import output_at, seeded_at
from ipufit.analysis.check.output_events import OutputEvents, quiet
from ipufit.analysis.check.python_state import same_values
from ipufit.analysis.check.report import CheckReport, Findings
from ipufit.analysis.check.runs import ModuleUnderTest
from ipufit.analysis.check.static_checks import mode_findings, untrained_findings
from ipufit.analysis.check.suite import CheckSuite
from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.train_config import Precision
from ipufit.data.source import DataAdapter
from ipufit.partition.partition import NOT_DIVIDED, Partitions
from ipufit.tracing.capture import Frame
from ipufit.tracing.user_lines import users_frame
from ipufit.training.sample_batch import no_batch
from ipufit.training.sanity_check import FailureExplainer, check_call, wrap_batch_errors
from ipufit.training.session import Session
from ipufit.training.summary import sample_of
from ipufit.utils.random_streams import isolated
from ipufit.utils.state import eval_mode, train_mode

__all__ = ["checked", "checked_sample", "run_check"]


def run_check(
    explainer: FailureExplainer,
    sample: MicroBatch,
    optimizer: Optional[torch.optim.Optimizer],
    caller: Optional[Frame],
    partitions: Partitions = NOT_DIVIDED,
) -> CheckReport:
    """Run the module a few times, and report what a recorded program would not repeat.

    Afterwards weights, buffers, optimizer, generators, attributes and modes are what they were.

    Args:
        explainer: module, loss and precision; its loss is None where there is none, or no target
            for it.
        sample: a micro-batch.
        optimizer: None where every parameter counts as trained.
        caller: the line that stands for what has none of its own.
        partitions: of the module over IPUs.

    Raises:
        Exception: of the module's own, which can't take the batch.
        DataError: a label is no class.
    """
    module, loss = explainer.module, explainer.loss
    owned = None
    if optimizer is not None:
        owned = [p for group in optimizer.param_groups for p in group["params"]]
    tested = ModuleUnderTest(module, loss, sample, explainer.precision, owned, partitions)
    findings = Findings(caller)
    events = OutputEvents()
    with isolated(tested.device), _put_back(tested) as pristine:
        with quiet(events):
            findings.add(*mode_findings(tested.step))
            loss_module = loss.module if loss is not None else None
            with train_mode(module, loss_module):
                with_gradient = CheckSuite(tested, pristine, findings, True).run()
            with eval_mode(module, loss_module), findings.with_note(" in eval mode"):
                CheckSuite(tested, pristine, findings, False).run()
        findings.add(*untrained_findings(tested.step, tested.trained, with_gradient))
    explainer.labels = tested.labels
    explainer.check_labels([sample], None)
    findings.add(*(output_at(frame, how) for frame, how in events.outputs.items()))
    findings.add(*(seeded_at(frame) for frame in events.seeds))
    return CheckReport(type(module).__name__, findings.sorted(), loss is not None)


@contextlib.contextmanager
def _put_back(tested: ModuleUnderTest) -> Iterator[Dict[str, Tensor]]:
    """Save parameters and buffers, and restore those that the block has changed.

    Yields:
        The copies, by name.
    """
    state = tested.state
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


def checked(
    module: nn.Module, session: Optional[Session], x: object, frame: Optional[types.FrameType]
) -> CheckReport:
    """Check a module on a batch.

    Args:
        module: the user's.
        session: None before ``compile``.
        x: a batch or a loader; None for the shapes of the last ``fit``.
        frame: of the caller.

    Raises:
        ConfigurationError: neither a batch nor an earlier ``fit``.
        DataError: the batch can't be fed.
    """
    own_loss = session is not None and session.loss.in_module
    if x is not None:
        casting = None if session is None else session.casting
        sample = sample_of(x, own_loss, "check", True, casting)
    elif session is not None and session.sample is not None:
        leaves = tuple(_random(leaf) for leaf in session.sample.leaves)
        sample = MicroBatch(leaves, session.sample.structure, session.sample.size)
    else:
        raise no_batch("check")
    return checked_sample(module, session, sample, frame)


def checked_sample(
    module: nn.Module,
    session: Optional[Session],
    sample: MicroBatch,
    frame: Optional[types.FrameType],
) -> CheckReport:
    """Check a module on a micro-batch that has been read already.

    Raises:
        DataError, LossError: module or loss can't take it.
    """
    loss = session.loss if session is not None else None
    if loss is not None:
        check_call(module, sample, loss, DataAdapter([], "check"))
        if not loss.in_module and sample.unpack()[2] is None:
            loss = None
    precision = session.config.precision if session is not None else Precision()
    optimizer = session.optimizer if session is not None else None
    caller = users_frame(frame, everywhere=True)
    partitions = session.partitions if session is not None else NOT_DIVIDED
    explainer = FailureExplainer(module, loss, Mode.TRAIN, precision, "check")
    with wrap_batch_errors(explainer, sample):
        return run_check(explainer, sample, optimizer, caller, partitions)


def _random(leaf: torch.Tensor) -> torch.Tensor:
    """Make values for a tensor of which only the shape is known."""
    if leaf.is_floating_point() or leaf.is_complex():
        generator = torch.Generator().manual_seed(0)
        return torch.randn(leaf.shape, dtype=torch.float32, generator=generator).to(leaf.dtype)
    return torch.zeros(leaf.shape, dtype=leaf.dtype)
