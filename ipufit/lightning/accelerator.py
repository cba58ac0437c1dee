"""The accelerator "ipu", replicas that one process drives, and a Trainer that needs no more."""

from __future__ import annotations

from typing import Any, Dict

import torch

from ipufit.errors import ConfigurationError
from ipufit.lightning.packages import part
from ipufit.lightning.strategy import IPUStrategy, Replicas

__all__ = ["IPUAccelerator", "Replicas", "Trainer"]


class IPUAccelerator(part("accelerators").Accelerator):  # type: ignore[misc]
    """Accelerator "ipu", for which ``devices=8`` means eight replicas of the model.

    They run on the engine of the strategy, and so also where there is no IPU.
    """

    def setup_device(self, device: torch.device) -> None:
        """Do nothing: the engine finds its devices itself."""

    def setup(self, trainer: Any) -> None:
        """Make sure that the strategy is that of ipufit.

        Raises:
            ConfigurationError: another strategy would train on the host instead.
        """
        if not isinstance(trainer.strategy, IPUStrategy):
            raise ConfigurationError(
                "accelerator='ipu' needs ipufit's strategy, got "
                f"{type(trainer.strategy).__name__}. Pass strategy=ipufit.lightning.IPUStrategy(), "
                "or make the Trainer with ipufit.lightning.Trainer, which has it."
            )

    def teardown(self) -> None:
        """Do nothing: there is nothing to free."""

    def get_device_stats(self, device: object) -> Dict[str, Any]:
        """Return an empty dict: an IPU has no statistics to monitor."""
        return {}

    @staticmethod
    def parse_devices(devices: object) -> int:
        """Convert ``devices`` of a Trainer to a number of replicas."""
        if type(devices) is str and devices.isdigit():
            devices = int(devices)
        if type(devices) is not int or devices < 1:
            raise ConfigurationError(
                "devices must be a number of replicas with accelerator='ipu', got "
                f"{devices!r}. Pass for example devices=4."
            )
        return devices

    @staticmethod
    def get_parallel_devices(devices: int) -> Replicas:
        """Return one device for the Trainer, which must start no further processes."""
        return Replicas(devices)

    @staticmethod
    def auto_device_count() -> int:
        """Return 1, the default number of replicas."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return True: without an IPU the embedded engine runs."""
        return True

    @staticmethod
    def name() -> str:
        """Return the name by which a Trainer takes it."""
        return "ipu"


class Trainer(part("").Trainer):  # type: ignore[misc]
    """Lightning's Trainer, for which ``accelerator="ipu"`` means :class:`IPUStrategy` too.

    Lightning chooses the strategy of an accelerator from a list of its own, to which nothing can be
    added.

    >>> from ipufit.lightning import Trainer
    >>> trainer = Trainer(accelerator="ipu", devices=8, logger=False, enable_checkpointing=False)
    >>> type(trainer.strategy).__name__
    'IPUStrategy'

    Args:
        options: the arguments of Lightning's Trainer, by name.
    """

    def __init__(self, **options: Any) -> None:
        accelerator = options.get("accelerator")
        is_ours = accelerator == IPUAccelerator.name() or isinstance(accelerator, IPUAccelerator)
        if is_ours and options.get("strategy", "auto") == "auto":
            options["strategy"] = IPUStrategy()
        super().__init__(**options)


_registry = part("accelerators").AcceleratorRegistry
if "ipu" not in _registry:
    _registry.register("ipu", IPUAccelerator, description="replicas that ipufit drives")
