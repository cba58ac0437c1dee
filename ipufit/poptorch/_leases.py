"""Which model has which device: a device is one model's, until that one lets go of it."""

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

__all__ = ["Lease", "acquire"]

# There are as many devices as are asked for: this engine computes on the host. What is exclusive
# on a system with IPUs is so here, so that a program that runs here runs there.
_taken: Dict[int, Lease] = {}
_changed = threading.Condition(threading.RLock())


class Lease:
    """A device that is taken.

    Attributes:
        device: its number; None where several models may use it at once.
    """

    def __init__(self, device: Optional[int]) -> None:
        self.device = device

    def release(self) -> None:
        """Let go of it; safe twice."""
        device, self.device = self.device, None
        if device is None:
            return
        with _changed:
            if _taken.get(device) is self:
                del _taken[device]
            _changed.notify_all()
        logger.debug("Detached from device %d", device)


def acquire(options: Options, ipus: int) -> Lease:
    """Take a device: that of ``useIpuId``, or the first one that is free.

    Args:
        options: of the model; the IPU Model is nobody's own.
        ipus: how many IPUs it has.

    Raises:
        Error: another model of this process has it, and POPTORCH_WAIT_FOR_IPU is not set.
    """
    if uses_ipu_model(options) or options.connection_type == ConnectionType.Never:
        return Lease(None)
    wanted = options.ipu_id if options.exists("ipu_id") else None
    with _changed:
        if wanted is None:
            device = next(number for number in range(len(_taken) + 1) if number not in _taken)
            logger.debug("Acquired %d IPU(s): running on device Id %d.", ipus, device)
        else:
            device = _wait_for(wanted)
            logger.debug("Acquired IPU device with id %d, running on device.", device)
        lease = _taken[device] = Lease(device)
    logger.debug("Attached to device %d", device)
    return lease


def _wait_for(device: int) -> int:
    """Until it is free, if that is wanted."""
    if device in _taken:
        # A model that nobody uses any more may not be gone yet.
        gc.collect()
    if device in _taken and os.environ.get("POPTORCH_WAIT_FOR_IPU", "0") in ("", "0"):
        raise error(
            f"Failed to acquire device Id {device}: another model of this process is attached to "
            "it. Call detachFromDevice() or destroy() on that one, or leave out useIpuId."
        )
    while device in _taken:
        logger.warning("Waiting for the device Id %d, which another model has", device)
        _changed.wait(60)
    return device
