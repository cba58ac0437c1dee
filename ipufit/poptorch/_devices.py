"""The devices that a model would need, those that there are, and who has one to itself."""

from __future__ import annotations

import gc
import os
import threading
from typing import Dict, Optional

from ipufit.poptorch import enums
from ipufit.poptorch._errors import error
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.options import Options
from ipufit.poptorch.enums import ConnectionType

__all__ = [
    "DeviceAllocation",
    "acquire",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "reserved",
    "uses_ipu_model",
]

# The most that one process can have.
_MOST = 64


# Set by `ipufit run --claim-ipus`, for processes that the script starts, too.
CLAIM = "IPUFIT_CLAIM_IPUS"


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Say whether the system has a device of so many IPUs: it has none.

    Where ``ipufit run --claim-ipus`` runs the program, it is told that there are up to 64.
    """
    return _flag(CLAIM) and num_ipus <= _MOST


def ipuHardwareVersion() -> int:
    """Return the version of the system's IPUs; 2 where ``ipufit run --claim-ipus`` says so.

    Raises:
        AssertionError: it has none.
    """
    if _flag(CLAIM):
        return 2
    raise AssertionError(
        "No IPU hardware available on this system: ipufit.poptorch computes with torch. Ask "
        "poptorch.ipuHardwareIsAvailable() first, or run the program with `ipufit run "
        "--claim-ipus`, which says that there are some."
    )


def uses_ipu_model(options: Options) -> bool:
    """Return True if the options, or else the environment, choose the IPU Model over hardware."""
    if options.exists("use_model"):
        return bool(options.use_model)
    return _flag("POPTORCH_IPU_MODEL") or _flag("POPTORCH_SMALL_IPU_MODEL")


def _flag(variable: str) -> bool:
    text = os.environ.get(variable, "") or "0"
    try:
        return int(text) != 0
    except ValueError:
        raise error(f"The environment variable {variable} must be 0 or 1, got {text!r}.") from None


def reserved(options: Options, needed: int) -> int:
    """Return how many IPUs are reserved for a model that needs so many, on all its replicas.

    Raises:
        Error: more than a process can have, not a power of two of hardware's IPUs, or options
            that the kind of device does not have.
    """
    _check_most(needed)
    offline = options.connection_type == enums.ConnectionType.Never
    model = uses_ipu_model(options)
    if options.exists("use_model"):
        shown = "Enabled" if model else "Disabled"
        logger.info("From the user configuration: Ipu model: %s", shown)
    if options._Popart.options.get("instrumentWithHardwareCycleCounter"):
        raise error(
            "Cycle count logging is only supported on actual IPU hardware. Leave out "
            "options.logCycleCount(True)."
        )
    if model:
        if offline:
            raise error(
                "The IPU Model can't be compiled for offline, got ConnectionType.Never. Leave out "
                "useIpuModel(True), or unset POPTORCH_IPU_MODEL."
            )
        if options._Popart.options.get("enableEngineCaching"):
            logger.warning("Nothing is cached for the IPU Model: enableExecutableCaching is unused")
        return needed
    if offline:
        if options.exists("ipu_id"):
            raise error(
                f"ConnectionType.Never takes no device, got useIpuId({options.ipu_id}) too. "
                "Leave one of them out."
            )
        return needed
    return _power_of_two(options, needed)


def _check_most(needed: int) -> None:
    if needed > _MOST:
        raise error(
            f"Too many IPUs requested ({needed}). Experiments that need more than {_MOST} IPUs "
            "require distributed execution. Use fewer replicas, or several processes."
        )


def _power_of_two(options: Options, needed: int) -> int:
    """Return the number of IPUs that hardware can reserve."""
    rounded = 1
    while rounded < needed:
        rounded *= 2
    if rounded != needed:
        reason = "because PopTorch must reserve a power of 2 or maximum of 64 IPUs per process"
        if not options.auto_round_num_ipus:
            raise error(
                f"The model specifies the use of {needed} IPUs, however PopTorch must reserve a "
                f"minimum of {rounded} in order to allow the model to run, {reason}. Please "
                "reconfigure your model to use a different number of IPUs or set "
                "poptorch.Options().autoRoundNumIPUs(True)."
            )
        logger.warning(
            "Reserving %d IPUs for a model that uses %d, %s; %d stay unused",
            rounded,
            needed,
            reason,
            rounded - needed,
        )
    return rounded


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
