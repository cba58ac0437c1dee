"""Options about the device: which IPUs, when, with what memory."""

from __future__ import annotations

import os
from typing import Dict, Optional, TypeVar, Union

from ipufit.poptorch import enums
from ipufit.poptorch._options.group import OptionGroup, need_type
from ipufit.poptorch._options.popart import _PopartOptions

__all__ = ["DeviceOptions"]

Self = TypeVar("Self", bound="DeviceOptions")


class DeviceOptions(OptionGroup):
    """Options that say where a model runs."""

    _popart: _PopartOptions

    def autoRoundNumIPUs(self: Self, auto_round_num_ipus: bool = True) -> Self:
        """Take the next power of two where a model needs another number of IPUs."""
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def useIpuModel(self: Self, use_model: bool) -> Self:
        """Follow the rules of the IPU Model instead of hardware's.

        It comes before the environment variable ``POPTORCH_IPU_MODEL``.
        """
        need_type("use_model", use_model, bool)
        self.createOrSet(use_model=use_model)
        return self

    def connectionType(self: Self, connection_type: enums.ConnectionType) -> Self:
        """When a model takes its device.

        Raises:
            AssertionError: not a ``ConnectionType``.
        """
        need_type("connectionType", connection_type, enums.ConnectionType)
        self.set(connection_type=connection_type.value)
        return self

    def syncPattern(self: Self, sync_pattern: enums.SyncPattern) -> Self:
        """Which IPUs wait for each other.

        Raises:
            AssertionError: not a ``SyncPattern``.
        """
        need_type("syncPattern", sync_pattern, enums.SyncPattern)
        self.set(sync_pattern=sync_pattern.value)
        return self

    def useIpuId(self: Self, ipu_id: int) -> Self:
        """Take this device of the system.

        Raises:
            AssertionError: not an int.
        """
        need_type("ipu_id", ipu_id, int)
        self.createOrSet(ipu_id=ipu_id)
        return self

    def useOfflineIpuTarget(self: Self, ipu_version: int = 2) -> Self:
        """Only compile, for a kind of IPU: 1, 2 or 21. It sets ``ConnectionType.Never``."""
        need_type("ipu_version", ipu_version, int)
        self.connectionType(enums.ConnectionType.Never)
        self.createOrSet(ipu_version=ipu_version)
        return self

    def setAvailableMemoryProportion(
        self: Self, available_memory_proportion: Dict[str, float]
    ) -> Self:
        """Memory for temporary values, as a part of each IPU's: ``{"IPU0": 0.5}``.

        Raises:
            AssertionError: a key that is not "IPU" and a number, or a value outside of 0 ... 1.
        """
        need_type("available_memory_proportion", available_memory_proportion, dict)
        by_ipu: Dict[int, float] = {}
        for key, proportion in available_memory_proportion.items():
            if not isinstance(key, str) or not key.startswith("IPU") or not key[3:].isdigit():
                raise AssertionError(
                    f'Available memory is set for each IPU, by "IPU" and its number, got {key!r}. '
                    'Use {"IPU0": 0.5}.'
                )
            need_type(f"available_memory_proportion[{key!r}]", proportion, float, int)
            if not 0 <= proportion <= 1:
                raise AssertionError(
                    f"The available memory of {key} must be in 0 ... 1, got {proportion}."
                )
            by_ipu[int(key[3:])] = float(proportion)
        self.createOrSet(available_memory_proportion=by_ipu)
        return self

    def enableExecutableCaching(self: Self, path: Optional[Union[str, os.PathLike[str]]]) -> Self:
        """Keep compiled programs in a folder and take them from there; None for no longer."""
        if path is None:
            self._popart.set("enableEngineCaching", False)
            return self
        need_type("enableExecutableCaching", path, str, os.PathLike)
        self._popart.set("cachePath", os.fspath(path))
        self._popart.set("enableEngineCaching", True)
        return self
