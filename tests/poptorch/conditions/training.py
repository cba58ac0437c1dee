"""What is refused of weights, optimizers and loaders of data."""

import torch

from ipufit import poptorch
from ipufit.poptorch import optim
from tests.poptorch.conditions.making import (
    Failing,
    Net,
    Nothing,
    Row,
    Stream,
    accessor_of_asynchronous,
    detached_twice,
    infer,
    loader,
    next_optimizer,
    same,
    sampler,
    subclassed,
    trained,
    two_processes,
    wrapped_twice,
)

ROWS = [
    # Weights.
    Row(
        "a buffer of a subclass",
        lambda: poptorch.trainingModel(subclassed()),
        poptorch.Error,
        "All buffers must be an instance of torch.Tensor",
        "example with .as_subclass(torch.Tensor).",
    ),
    Row(
        "wrapped twice",
        wrapped_twice,
        RuntimeError,
        "Model has already been wrapped in",
        "the model to unwrap before wrapping again.",
    ),
    Row(
        "weights to the host uncompiled",
        lambda: trained(run=False)[0].copyWeightsToHost(),
        poptorch.Error,
        "Model has not been compiled or has been",
        "it with inputs, or call compile(), first.",
    ),
    Row(
        "weights to the device uncompiled",
        lambda: trained(run=False)[0].copyWeightsToDevice(),
        poptorch.Error,
        "Model has not been compiled or has been",
        "it with inputs, or call compile(), first.",
    ),
    Row(
        "an unknown updatable buffer",
        lambda: infer(same, change=lambda o: o.updatableNamedBuffers(["other"])),
        poptorch.Error,
        "updatableNamedBuffers names 'other', but the",
        "has the buffers state. Name one of them.",
    ),
    Row(
        "no updatable buffers",
        lambda: trained()[0].copyNamedBuffersToDevice(),
        poptorch.Error,
        "No named buffers marked as updatable via",
        "before wrapping the model.",
    ),
    Row(
        "an optimizer for inference",
        lambda: poptorch.PoplarExecutor(
            Net(), None, False, "", torch.optim.SGD(Net().parameters(), lr=0.1)
        ),
        AssertionError,
        "Optimizer should be None for inference, got",
        "None for inference, got one. Leave it out.",
    ),
    Row(
        "attached already",
        lambda: trained()[0].attachToDevice(),
        poptorch.Error,
        "Device is already attached. Ask",
        "attached. Ask isAttachedToDevice() first.",
    ),
    Row(
        "attached uncompiled",
        lambda: trained(run=False)[0].attachToDevice(),
        poptorch.Error,
        "Model has not been compiled or has been",
        "it with inputs, or call compile(), first.",
    ),
    Row(
        "not attached",
        detached_twice,
        poptorch.Error,
        "Device is not attached. Ask",
        "attached. Ask isAttachedToDevice() first.",
    ),
    Row(
        "offline",
        lambda: infer(same, change=lambda o: o.connectionType(poptorch.ConnectionType.Never)),
        AssertionError,
        "Trying to run a model on an offline device",
        "instead of model(inputs)",
    ),
    # Optimizers.
    Row(
        "an unsupported optimizer",
        lambda: trained(make=lambda p: torch.optim.Adagrad(p)),
        AssertionError,
        "Unsupported optimizer type Adagrad. The device",
        "SGD, Adam, AdamW, RMSprop, LAMB.",
    ),
    Row(
        "a type of accumulation",
        lambda: trained(make=lambda p: optim.SGD(p, lr=0.1, accum_type=torch.int32)),
        AssertionError,
        "Accumulation types must be either torch.float32",
        "Pass one of the two.",
    ),
    Row(
        "a type of moments",
        lambda: trained(
            make=lambda p: optim.Adam(p, first_order_momentum_accum_type=torch.float64)
        ),
        AssertionError,
        "Accumulation types must be either torch.float32",
        "Pass one of the two.",
    ),
    Row(
        "amsgrad",
        lambda: trained(make=lambda p: torch.optim.Adam(p, amsgrad=True)),
        ValueError,
        "Only non-amsgrad Adam/AdamW optimizers are",
        "amsgrad=True in the defaults. Leave it out.",
    ),
    Row(
        "centered in one group",
        lambda: trained(
            make=lambda p: torch.optim.RMSprop(
                [{"params": q, "centered": i == 0} for i, q in enumerate(p)], lr=0.1
            )
        ),
        AssertionError,
        "All parameter groups must have the same value",
        "got [True, False]. Use one for all.",
    ),
    Row(
        "a norm that is not a number",
        lambda: trained(make=lambda p: optim.SGD(p, lr=0.1, max_grad_norm=float("nan"))),
        poptorch.Error,
        "Maximum norm of gradients cannot be NaN. Pass",
        "Pass max_grad_norm=float('inf') for none.",
    ),
    Row(
        "an unknown attribute",
        lambda: optim.SGD(Net().parameters(), lr=0.1).variable_attrs.markAsConstant("rate"),
        AssertionError,
        "Unknown attribute rate: the optimizer has no",
        "It has lr, momentum,",
    ),
    Row(
        "a constant changed",
        lambda: next_optimizer(
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5), lambda p: torch.optim.SGD(p, lr=0.1)
        ),
        poptorch.Error,
        "The optimizer can't change momentum in the",
        "to an optimizer of poptorch.optim.",
    ),
    Row(
        "constness changed",
        lambda: next_optimizer(lambda p: optim.SGD(p, lr=0.1, weight_decay=0.0)),
        poptorch.Error,
        "The optimizer can't change weight_decay in the",
        "to an optimizer of poptorch.optim.",
    ),
    Row(
        "another optimizer",
        lambda: next_optimizer(lambda p: optim.Adam(p, lr=0.1)),
        poptorch.Error,
        "The optimizer can't change its type from SGD2",
        "Call destroy() and wrap the model again.",
    ),
    Row(
        "other accumulation",
        lambda: next_optimizer(
            lambda p: optim.Adam(p, lr=0.1, first_order_momentum_accum_type=torch.float16),
            lambda p: optim.Adam(p, lr=0.1),
        ),
        poptorch.Error,
        "The optimizer can't change the type of the",
        "Call destroy() and wrap the model again.",
    ),
    Row(
        "other clipping",
        lambda: next_optimizer(lambda p: optim.SGD(p, lr=0.1, max_grad_norm=1.0)),
        poptorch.Error,
        "The optimizer can't change max_grad_norm from",
        "Call destroy() and wrap the model again.",
    ),
    Row(
        "other groups",
        lambda: next_optimizer(lambda p: optim.SGD([{"params": [q]} for q in p], lr=0.1)),
        poptorch.Error,
        "The optimizer can't change the number of groups",
        "Call destroy() and wrap the model again.",
    ),
    Row(
        "no state",
        lambda: trained()[2].load_state_dict({}),
        RuntimeError,
        "Cannot load optimizer state dictionary because",
        "of an optimizer of poptorch.optim gave.",
    ),
    Row(
        "state of torch's",
        lambda: trained()[2].load_state_dict(
            torch.optim.SGD(Net().parameters(), lr=0.1).state_dict()
        ),
        RuntimeError,
        "Only IPU optimizer states can be loaded onto",
        "of an optimizer of poptorch.optim gave.",
    ),
    # Loading.
    Row(
        "batch_sampler and batch_size",
        lambda: loader(batch_sampler=sampler(), batch_size=2),
        poptorch.Error,
        "`batch_sampler` option is mutually exclusive",
        "are in a batch: leave the others out.",
    ),
    Row(
        "batch_sampler and shuffle",
        lambda: loader(batch_sampler=sampler(), shuffle=True),
        poptorch.Error,
        "`batch_sampler` option is mutually exclusive",
        "are in a batch: leave the others out.",
    ),
    Row(
        "batch_sampler and processes",
        lambda: loader(two_processes, batch_sampler=sampler()),
        poptorch.Error,
        "`batch_sampler` option is mutually exclusive",
        "pass auto_distributed_partitioning=False.",
    ),
    Row(
        "a stream and processes",
        lambda: loader(two_processes, Stream()),
        AssertionError,
        "auto_distributed_partitioning not supported for",
        "pass auto_distributed_partitioning=False.",
    ),
    Row(
        "shuffled processes without seed",
        lambda: loader(two_processes, shuffle=True),
        AssertionError,
        "When using auto_distributed_partitioning you",
        "they part the dataset in the same order.",
    ),
    Row(
        "no batches and processes",
        lambda: loader(two_processes, batch_size=None),
        AssertionError,
        "batch_size=None not allowed when using",
        "with auto_distributed_partitioning=False.",
    ),
    Row(
        "a worker batch too large",
        lambda: loader(
            batch_size=2, mode=poptorch.DataLoaderMode.AsyncRebatched, rebatched_worker_size=3
        ),
        AssertionError,
        "The rebatched_worker_size (3) must be <= to the",
        "(2). Use a smaller one, or leave it out.",
    ),
    Row(
        "rebatched_size given",
        lambda: loader(
            batch_size=2,
            mode=poptorch.DataLoaderMode.AsyncRebatched,
            async_options={"rebatched_size": 2},
        ),
        AssertionError,
        "async_options can't hold rebatched_size: a",
        "and use mode=DataLoaderMode.AsyncRebatched.",
    ),
    Row(
        "an accessor of an asynchronous loader",
        accessor_of_asynchronous,
        poptorch.Error,
        "The DataLoader already uses an",
        "or make it with mode=DataLoaderMode.Sync.",
    ),
    Row(
        "leftovers without rebatching",
        lambda: poptorch.AsynchronousDataAccessor(loader(batch_size=2, drop_last=False, data=3)),
        AssertionError,
        "The 'drop_last=False' option from the",
        "Pass rebatched_size=2, or drop_last=True.",
    ),
    Row(
        "rebatched_size of one",
        lambda: poptorch.AsynchronousDataAccessor(loader(), rebatched_size=1),
        AssertionError,
        "rebatched_size must be None or greater than 1,",
        "use DataLoaderMode.Async for it.",
    ),
    Row(
        "no data",
        lambda: poptorch.AsynchronousDataAccessor(Nothing()),
        poptorch.Error,
        "AsynchronousDataAccessor worker thread failed",
        "fewer samples than a combined batch.",
    ),
    Row(
        "a worker that fails",
        lambda: poptorch.AsynchronousDataAccessor(Failing()),
        poptorch.Error,
        "AsynchronousDataAccessor worker thread failed",
        "the dataset raised OSError: lost",
    ),
]
