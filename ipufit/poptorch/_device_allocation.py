"""Exclusive devices: one belongs to one model of the process until that model releases it."""

from __future__ import annotations

import gc
import os
import threading
from typing import Dict, Optional

from ipufit.poptorch._devices import uses_ipu_model
from ipufit.poptorch._errors import error
from ipufit.poptorch._logging import logger
from ipufit.poptorch.enums import ConnectionType
from ipufit.poptorch.options import Options

__all__ = ["DeviceAllocation", "acquire"]

# There are as many devices as are asked for: this engine computes on the host. What is exclusive
# on a system with IPUs is so here, so that a program that runs here runs there.
_allocations: Dict[int, DeviceAllocation] = {}
_changed = threading.Condition(threading.RLock())


class DeviceAllocation:
    """A device that belongs to one model.

    Attributes:
        device: its number; None where several models may use it at once.
    """

    def __init__(self, device: Optional[int]) -> None:
        self.device = device

    def release(self) -> None:
        """Give the device back; safe to call twice."""
        device, self.device = self.device, None
        if device is None:
            return
        with _changed:
            if _allocations.get(device) is self:
                del _allocations[device]
            _changed.notify_all()
        logger.debug("Detached from device %d", device)


def acquire(options: Options, ipus: int) -> DeviceAllocation:
    """Allocate the device of ``useIpuId``, or the first one that is free.

    Args:
        options: of the model; the IPU Model is nobody's own.
        ipus: how many IPUs it has.

    Raises:
        Error: another model of this process has it, and POPTORCH_WAIT_FOR_IPU is not set.
    """
    if uses_ipu_model(options) or options.connection_type == ConnectionType.Never:
        return DeviceAllocation(None)
    wanted = options.ipu_id if options.exists("ipu_id") else None
    with _changed:
        if wanted is None:
            device = next(
                number for number in range(len(_allocations) + 1) if number not in _allocations
            )
            logger.debug("Acquired %d IPU(s): running on device Id %d.", ipus, device)
        else:
            device = _wait_for(wanted)
            logger.debug("Acquired IPU device with id %d, running on device.", device)
        allocation = _allocations[device] = DeviceAllocation(device)
    logger.debug("Attached to device %d", device)
    return allocation


def _wait_for(device: int) -> int:
    """Wait until a device is free, if POPTORCH_WAIT_FOR_IPU says so."""
    if device in _allocations:
        # A model that nobody uses any more may not be gone yet.
        gc.collect()
    if device in _allocations and os.environ.get("POPTORCH_WAIT_FOR_IPU", "0") in ("", "0"):
        raise error(
            f"Failed to acquire device Id {device}: another model of this process is attached to "
            "it. Call detachFromDevice() or destroy() on that one, or leave out useIpuId."
        )
    while device in _allocations:
        logger.warning("Waiting for the device Id %d, which another model has", device)
        _changed.wait(60)
    return device
