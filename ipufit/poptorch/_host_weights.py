"""The host's parameters and buffers, and their transfers to and from the device."""

from __future__ import annotations

from typing import Dict, List, Sequence

import torch
from torch import Tensor, nn

from ipufit.poptorch._device import Device
from ipufit.poptorch._logging import logger
from ipufit.poptorch._wrapping import (
    ExecutorLink,
    WeightSource,
    host_tensors,
    quietly,
    sharing_links,
    unwrap,
    wrap,
)


def check_module(model: object) -> None:
    """Refuse a model that has no weights which could go to a device, as PopTorch does.

    Raises:
        AttributeError: it is a function, say.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise AttributeError(
            f"{kind!r} object has no attribute 'named_modules': a model must be a torch.nn.Module "
            f"to be compiled, got a {kind}. Call it in the forward of a module, and wrap that."
        )


class HostWeights:
    """Parameters and buffers of the user's module.

    Args:
        owner: the executor, which wrapped tensors ask.
        model: the user's module; wrapped in place when training.
        training: whether the device changes weights.
    """

    def __init__(self, owner: WeightSource, model: nn.Module, training: bool) -> None:
        # Weak: an executor goes as soon as its last user lets go of it.
        self._link = ExecutorLink(owner)
        self._model = model
        self._training = training
        # Versions of the host's weights that inference was given, by who trains them.
        self._uploaded: Dict[ExecutorLink, int] = {}
        if training:
            wrap(model, self._link)

    @property
    def is_dirty(self) -> bool:
        """True if the device has trained since its weights were last copied to the host."""
        return self._link.dirty

    def trained(self) -> None:
        """Record that the device has changed its weights."""
        self._link.dirty = True

    def parameters(self) -> Dict[str, Tensor]:
        """Return the host's parameters by name, without asking the device."""
        with quietly():
            return {name: tensor.detach() for name, tensor in self._model.named_parameters()}

    def buffers(self) -> Dict[str, Tensor]:
        """Return the host's buffers by name, without asking the device."""
        with quietly():
            return {name: tensor.detach() for name, tensor in self._model.named_buffers()}

    def trainable(self, groups: Sequence[Sequence[Tensor]]) -> List[List[str]]:
        """Return names of the optimizer's parameters that require a gradient, by group.

        Args:
            groups: the optimizer's parameters.

        Raises:
            KeyError: one of them is not the model's.
        """
        with quietly():
            names_by_pointer = {p.data_ptr(): name for name, p in self._model.named_parameters()}
            names = []
            for group in groups:
                foreign = [p for p in group if p.data_ptr() not in names_by_pointer]
                if foreign:
                    raise KeyError(
                        f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that "
                        "the model has not. Build the optimizer from model.parameters()."
                    )
                names.append([names_by_pointer[p.data_ptr()] for p in group if p.requires_grad])
            return names

    def pull(self, device: Device) -> None:
        """Copy the weights from the device to the host."""
        self._link.pulled()
        logger.debug("Writing weights from IPU to host")
        device.read(host_tensors(self._model))

    def push(self, device: Device) -> None:
        """Copy the weights from the host to the device."""
        self._link.dirty = False
        if not self._training:
            self._uploaded = {link: link.version for link in sharing_links(self._model)}
        logger.debug("Writing weights from host to IPU memory")
        device.write(host_tensors(self._model))

    def exchange(self, device: Device) -> None:
        """Copy newer weights from the device to the host, then all from the host to the device."""
        if self.is_dirty:
            logger.debug("Implicit copyWeightsToHost()")
            self.pull(device)
        self.push(device)

    def is_behind(self) -> bool:
        """Return True if weights were read back from a training device since the last upload.

        Each device that shares them is asked first for what it has newer, and one that was
        destroyed since still counts. A change on the host alone does not: ``copyWeightsToDevice``
        is for that.
        """
        for link in sharing_links(self._model):
            self._uploaded.setdefault(link, link.first_version)
        return any(link.version != version for link, version in self._uploaded.items())

    def push_buffers(self, device: Device, names: Sequence[str]) -> None:
        """Copy only these buffers from the host to the device."""
        self._link.dirty = False
        buffers = self.buffers()
        device.write({name: buffers[name] for name in names})

    def unwrap(self) -> None:
        """Restore the user's module as it was before it was wrapped."""
        if self._training:
            with torch.no_grad():
                unwrap(self._model, self._link.source())
