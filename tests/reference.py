"""Training written out by hand in eager torch, to hold ipufit against.

Replicas are separate: each has buffers of its own, and the gradient of an update is the mean over
the samples of all its micro-batches.
"""

import copy

import torch
from torch.func import functional_call

from ipufit.utils.random_streams import micro_batch_key, update_key


def cut(n, micro_batch):
    """Index ranges of the micro-batches of an epoch."""
    return [range(i, min(n, i + micro_batch)) for i in range(0, n, micro_batch)]


def follow(net, optimizer, batches, loss=torch.nn.functional.cross_entropy):
    """Make an update of ``net`` in place for every batch, as a plain loop does."""
    for x, y in batches:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()


def train(
    net,
    optimizer,
    loss,
    x,
    y,
    epochs,
    mb,
    ga=1,
    replicas=1,
    seed=None,
    first_update=0,
    equally=False,
    finish=lambda parameters, update: True,
    after=lambda net, update: None,
):
    """Train ``net`` in place; returns per epoch (mean loss, predictions made while training).

    Args:
        seed: for networks with dropout: the generator starts anew at every micro-batch, at a place
            that ipufit documents.
        first_update: of that place.
        equally: every micro-batch of an update counts the same, whatever its size.
        finish: called with the parameters, their .grad reduced, and the update's index; changes
            .grad, and says whether the optimizer makes its step.
        after: called with the network and the number of updates after each of them.
    """
    names = [name for name, _ in net.named_parameters()]
    parameters = dict(net.named_parameters())
    buffers = [dict(net.named_buffers())]
    buffers += [copy.deepcopy(buffers[0]) for _ in range(replicas - 1)]
    report, update = [], first_update
    for _ in range(epochs):
        micro_batches = cut(len(x), mb)
        losses, predictions = [], []
        for first in range(0, len(micro_batches), ga * replicas):
            group = micro_batches[first : first + ga * replicas]
            samples = sum(len(rows) for rows in group)
            gradients = {name: torch.zeros_like(parameters[name]) for name in names}
            for place, rows in enumerate(group):
                replica = place % replicas
                if seed is not None:
                    torch.manual_seed(micro_batch_key(update_key(seed, "train", update), place))
                inputs, target = x[rows.start : rows.stop], y[rows.start : rows.stop]
                prediction = functional_call(net, {**parameters, **buffers[replica]}, (inputs,))
                value = loss(prediction, target)
                weight = 1 / len(group) if equally else len(rows) / samples
                for name, gradient in zip(
                    names, torch.autograd.grad(value, [parameters[name] for name in names])
                ):
                    gradients[name] += weight * gradient
                losses.append(value.item() * len(rows))
                predictions.append(prediction.detach())
            for name in names:
                parameters[name].grad = gradients[name]
            if finish(list(parameters.values()), update):
                optimizer.step()
            optimizer.zero_grad()
            update += 1
            after(net, update)
        report.append((sum(losses) / len(x), torch.cat(predictions)))
    return report
